//! Time to score 10,000 completions on one core: each built-in text reward, and all of them together.
#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::Arc;

use criterion::{Criterion, criterion_group, criterion_main};
use omnigrpo_rewards::{DocumentFrequencies, RewardInput, RewardOptions, RowKey, Think, build, table};
use serde_json::{Map, json};

const NUM_COMPLETIONS: usize = 10_000;

fn bench(criterion: &mut Criterion) {
    let thought =
        "The clip shows a person who picks up the part, turns it round and puts it into the frame. "
            .repeat(8);
    let question =
        "What happens?\nOptions:\n(A) Pick up\n(B) Insert\n(C) Screw\n(D) None of the above\nThink first.";
    let boxes = |shift: usize| {
        let labels = ["cat", "dog"];
        let entry = |i: usize| json!({"bbox_2d": [i * 9 + shift, 5, i * 9 + 8, 40], "label": labels[i % 2]});
        format!("```json\n{}\n```", json!((0..8).map(entry).collect::<Vec<_>>()))
    };
    let text: Vec<String> = (0..NUM_COMPLETIONS)
        .map(|i| {
            let answer = ["(B) Insert", "B", "42.5 cm", "yes", "(1) (2)", "a red ball"][i % 6];
            format!(
                "<think>{thought}</think> <answer>{answer}</answer><explain>it fits the frame {i}</explain>"
            )
        })
        .collect();
    let detections: Vec<String> = (0..NUM_COMPLETIONS)
        .map(|i| format!("<think>{thought}</think><answer>{}</answer>", boxes(i % 3)))
        .collect();
    let gold = ["(B) Insert", "(B) Insert", "42.5", "no", "(1) (2)", "a blue ball"];
    let gold_boxes = boxes(0);
    let ids: Vec<u32> = (0..200).collect();
    let mut columns = Map::new();
    columns.insert(
        "explanations".to_owned(),
        json!(["it fits into the frame", "the frame holds it", "it is held"]),
    );
    let rows = |texts: &'_ [String], detection: bool| -> Vec<(String, String)> {
        let solution = |i: usize| if detection { gold_boxes.clone() } else { gold[i % 6].to_owned() };
        texts.iter().enumerate().map(|(i, text)| (text.clone(), solution(i))).collect()
    };
    let (text, detections) = (rows(&text, false), rows(&detections, true));
    fn batch<'a>(
        rows: &'a [(String, String)],
        question: &'a str,
        ids: &'a [u32],
        columns: &'a Map<String, serde_json::Value>,
    ) -> Vec<RewardInput<'a>> {
        let input = |(i, (completion, solution)): (usize, &'a (String, String))| RewardInput {
            prompt: question,
            turns: &[],
            completion,
            completion_ids: ids,
            solution: Some(solution),
            columns,
            think: Think::On,
            media_paths: &[],
            media: &[],
            key: RowKey { seed: 0, step: 0, row: i as u64, sample: 0 },
            truncated: false,
            added_turns: 0,
            is_text: false,
        };
        rows.iter().enumerate().map(input).collect()
    }
    let text = batch(&text, question, &ids, &columns);
    let detections = batch(&detections, "Find them.", &ids, &columns);
    let mut frequencies = DocumentFrequencies::default();
    frequencies.add_item(&["it fits into the frame", "the frame holds it"]);
    frequencies.add_item(&["a cat sits on the mat"]);
    let options = RewardOptions { cider: Some(Arc::new(frequencies)), ..RewardOptions::default() };
    let mut group = criterion.benchmark_group("10000 completions");
    group.sample_size(10);
    let is_detection = |name: &str| name.starts_with("od") || name == "weighted_sum" || name == "iou";
    for row in table() {
        let set = build(&[row.name.to_owned()], &options).unwrap();
        let rows = if is_detection(row.name) { &detections } else { &text };
        group.bench_function(row.name, |bencher| bencher.iter(|| set.score(rows).unwrap()));
    }
    let names = table().iter().map(|row| row.name).filter(|name| !is_detection(name) && *name != "cider");
    let set = build(&names.map(str::to_owned).collect::<Vec<_>>(), &options).unwrap();
    group.bench_function("all text rewards", |bencher| bencher.iter(|| set.score(&text).unwrap()));
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
