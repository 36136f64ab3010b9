//! Checks that no text makes a reward panic or leave its range.
#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use omnigrpo_rewards::{
    AccuracyMode, Compat, DocumentFrequencies, FormatMode, RewardInput, RewardOptions, RewardSet, RowKey,
    Think, build, table,
};
use serde_json::{Map, json};

#[derive(Arbitrary, Debug)]
struct Texts<'a> {
    mode: u8,
    think: bool,
    solution: &'a str,
    prompt: &'a str,
    completion: &'a [u8],
}

/// The table of rewards by default, with every mode, and with every compatibility flag.
static SETS: LazyLock<Vec<RewardSet>> = LazyLock::new(|| {
    let mut frequencies = DocumentFrequencies::default();
    frequencies.add_item(&["a cat on a mat"]);
    frequencies.add_item(&["có một vòi sen"]);
    let plain = RewardOptions { cider: Some(Arc::new(frequencies)), ..RewardOptions::default() };
    let mut options = vec![plain.clone()];
    options.extend(FormatMode::ALL.iter().map(|row| RewardOptions { format_mode: row.1, ..plain.clone() }));
    options
        .extend(AccuracyMode::ALL.iter().map(|row| RewardOptions { accuracy_mode: row.1, ..plain.clone() }));
    // The old format of ViVQA-X has a range without lower bound; the others are bounded.
    options.extend(Compat::ALL.iter().map(|row| RewardOptions { compat: [row.1].into(), ..plain.clone() }));
    let names: Vec<String> = table().iter().map(|row| row.name.to_owned()).collect();
    options.iter().map(|options| build(&names, options).expect("the table")).collect()
});

fuzz_target!(|texts: Texts<'_>| {
    let completion = String::from_utf8_lossy(texts.completion);
    let mut columns = Map::new();
    columns.insert("explanations".to_owned(), json!([texts.solution, texts.prompt]));
    let input = RewardInput {
        prompt: texts.prompt,
        turns: &[],
        completion: &completion,
        completion_ids: &[1, 2, 3, 1, 2, 3],
        solution: Some(texts.solution),
        columns: &columns,
        think: if texts.think { Think::On } else { Think::Off },
        media_paths: &[],
        media: &[],
        key: RowKey { seed: 1, step: 2, row: 3, sample: 4 },
        truncated: false,
        added_turns: 0,
        is_text: false,
    };
    // The set returns a panic inside a reward as an error.
    SETS[usize::from(texts.mode) % SETS.len()].score(&[input]).expect("a score for every text");
});
