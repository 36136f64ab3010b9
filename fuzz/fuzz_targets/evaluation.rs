//! Checks that no text breaks the sums of an evaluation, and that scores of explanations stay within their bounds.
#![no_main]

use std::borrow::Cow;
use std::collections::BTreeMap;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use omnigrpo_rewards::{AnswerPolicy, EvalRow, Labels, Measures, RewardOptions, answer, build, summarize};

#[derive(Arbitrary, Debug)]
struct Row<'a> {
    solution: &'a str,
    completions: Vec<&'a str>,
    references: Vec<&'a str>,
}

fuzz_target!(|rows: Vec<Row<'_>>| {
    let rewards = build(&["accuracy".to_owned()], &RewardOptions::default()).expect("a reward");
    let rows: Vec<EvalRow> = rows
        .iter()
        .map(|row| EvalRow {
            id: String::new(),
            row: serde_json::Map::new(),
            dataset: String::new(),
            prompt: String::new(),
            solution: Some(row.solution.to_owned()),
            media: Vec::new(),
            category: Some(row.solution.to_owned()),
            completion_turns: Vec::new(),
            completions: row.completions.iter().map(|&text| text.to_owned()).collect(),
            answers: row.completions.iter().map(|text| answer(text, AnswerPolicy::Last).map(Cow::into_owned)).collect(),
            rewards: BTreeMap::from([("accuracy".to_owned(), vec![Some(1.0); row.completions.len()])]),
            reward: vec![Some(1.0); row.completions.len()],
            references: row.references.iter().map(|&text| text.to_owned()).collect(),
        })
        .collect();
    let labels = Measures { labels: Labels::OfGroundTruths, ..Measures::default() };
    // Fewer than two ground truths, or too many, do not form a set of labels.
    let _ = summarize(&rows, &rewards, &labels);
    let summary = summarize(&rows, &rewards, &Measures::default()).expect("sums");
    for (name, value) in summary.metrics {
        let most = if name.ends_with("CIDEr") { 1000.0 } else if name.contains("explanation") { 100.0 } else { f64::MAX };
        assert!(value.is_none_or(|value| (0.0..=most + 1e-6).contains(&value)), "{name}: {value:?}");
    }
});
