//! Every reward of the table on hostile text: no panic, no value outside its range, and time that grows with the text,
//! not with its square.
#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use omnigrpo_rewards::{
    AccuracyMode, Compat, DocumentFrequencies, FormatMode, RewardError, RewardInput, RewardOptions, RowKey,
    Think, build, table,
};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

fn options() -> RewardOptions {
    let mut frequencies = DocumentFrequencies::default();
    frequencies.add_item(&["có một vòi sen"]);
    frequencies.add_item(&["một con mèo"]);
    RewardOptions { cider: Some(Arc::new(frequencies)), ..RewardOptions::default() }
}

/// The table as it is, then every mode and every compat flag on top.
fn all_options() -> Vec<RewardOptions> {
    let mut all = vec![options()];
    all.extend(FormatMode::ALL.iter().map(|row| RewardOptions { format_mode: row.1, ..options() }));
    all.extend(AccuracyMode::ALL.iter().map(|row| RewardOptions { accuracy_mode: row.1, ..options() }));
    for (mode, flag) in [
        (AccuracyMode::McqIou, Compat::S2Accuracy),
        (AccuracyMode::McqExact, Compat::S3Accuracy),
        (AccuracyMode::McqExact, Compat::VlmR1Choice),
        (AccuracyMode::YesNo, Compat::VlmR1Choice),
        (AccuracyMode::ShortText, Compat::S4Accuracy),
    ] {
        all.push(RewardOptions { accuracy_mode: mode, compat: [flag].into(), ..options() });
    }
    all
}

/// Scores with every reward; a value outside the range or a panic is an error here.
fn score_all(
    prompt: &str,
    completion: &str,
    solution: &str,
    options: &RewardOptions,
) -> Result<(), RewardError> {
    let names: Vec<String> = table().iter().map(|row| row.name.to_owned()).collect();
    let set = build(&names, options)?;
    for think in [Think::On, Think::Off] {
        score(&set, prompt, completion, solution, think)?;
    }
    Ok(())
}

fn score(
    set: &omnigrpo_rewards::RewardSet,
    prompt: &str,
    completion: &str,
    solution: &str,
    think: Think,
) -> Result<(), RewardError> {
    let mut columns = Map::new();
    columns.insert("explanations".to_owned(), json!([solution, "có"]));
    set.score(&[RewardInput {
        prompt,
        turns: &[],
        completion,
        completion_ids: &[1, 2, 3, 1, 2, 3],
        solution: Some(solution),
        columns: &columns,
        think,
        media_paths: &[],
        media: &[],
        key: RowKey { seed: 1, step: 2, row: 3, sample: 4 },
        truncated: false,
        added_turns: 0,
        is_text: false,
    }])
    .map(|_| ())
}

/// Pieces that parsers look for, in any order, with anything between.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        prop::sample::select(vec![
            "<",
            ">",
            "</",
            "<think>",
            "</think>",
            "<answer>",
            "</answer>",
            "<ANSWER>",
            "<explain>",
            "</explain>",
            "(",
            ")",
            "(A)",
            "(1)",
            "B.",
            "C)",
            "A, C",
            "[",
            "]",
            "{",
            "}",
            "[1,2,3,4]",
            "[[",
            "```json",
            "```",
            "\\boxed{",
            "\\frac",
            "\\frac{1}{2}",
            "\\sqrt",
            "\\text{",
            "^",
            "_",
            "$",
            "%",
            "!",
            "|",
            "1e999",
            "0.5",
            "-",
            "+",
            "/",
            "=",
            ",",
            "1,000",
            "yes",
            "không",
            "happy",
            "\n",
            "\r",
            " ",
            "\u{301}",
            "İ",
            "ß",
            "𝟙",
            "\0",
            "None",
            "{\"bbox_2d\": [0,0,1e308,-1e308], \"label\": \"x\"}",
        ])
        .prop_map(str::to_owned),
        "\\PC{0,6}",
        any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_text_breaks_a_reward(prompt in text(), completion in text(), solution in text()) {
        for options in all_options() {
            let result = score_all(&prompt, &completion, &solution, &options);
            prop_assert!(result.is_ok(), "{}", result.unwrap_err());
        }
    }

    #[test]
    fn a_completion_equal_to_its_solution_is_never_wrong_by_label(words in "[a-z]{1,8}( [a-z]{1,8}){0,3}") {
        let set = build(&["label".to_owned(), "all_match".to_owned()], &options()).unwrap();
        let columns = Map::new();
        let completion = format!("<answer>{words}</answer>");
        let input = RewardInput {
            prompt: "", completion: &completion, completion_ids: &[], solution: Some(&words), columns: &columns,
            turns: &[],
            think: Think::On, media_paths: &[], media: &[], key: RowKey { seed: 0, step: 0, row: 0, sample: 0 }, truncated: false, added_turns: 0, is_text: false,
        };
        prop_assert_eq!(&set.score(&[input]).unwrap().total, &vec![Some(2.0)]);
    }
}

#[test]
fn time_is_bounded_on_long_repeats() {
    let units = [
        "<",
        "<answer>",
        "</answer>",
        "<think><answer>",
        "<answer></answer>",
        "(",
        "(A)",
        "A, ",
        "B. ",
        "[",
        "{",
        "[1,",
        "```json",
        "```json[",
        "\\boxed{",
        "\\frac",
        "\\text{",
        "$",
        "1,000,",
        "-",
        "^",
        "a",
        "a ",
        "é",
        "\u{301}",
        "\n",
        "yes ",
        "[0,0,1,1]",
        "{\"bbox_2d\":[0,0,1,1],\"label\":\"a\"},",
        "answer is A ",
        "1 1/1 ",
    ];
    let names: Vec<String> = table().iter().map(|row| row.name.to_owned()).collect();
    let sets: Vec<_> = all_options().iter().map(|options| build(&names, options).unwrap()).collect();
    let size = 1 << 18;
    for unit in units {
        let raw = unit.repeat(size / unit.len());
        let texts =
            [format!("<answer>{raw}</answer>"), format!("<answer>```json\n[{raw}\n```</answer>"), raw];
        for text in &texts {
            let start = Instant::now();
            // The plain table on both sides and as the question; then each mode on the completion alone.
            score(&sets[0], text, text, text, Think::On).unwrap();
            score(&sets[1 + unit.len() % (sets.len() - 1)], "q", text, "(B) x", Think::Off).unwrap();
            assert!(start.elapsed() < Duration::from_secs(20), "{unit:?}: {:?}", start.elapsed());
        }
    }
}

#[test]
fn megabytes_of_tags_are_scored_in_linear_time() {
    let names = ["format", "accuracy", "mcq", "math", "short_text", "emotion", "od_ap"].map(str::to_owned);
    let set = build(&names, &options()).unwrap();
    for unit in ["<", "<answer>", "<think></think>", "</answer>"] {
        let text = unit.repeat((8 << 20) / unit.len());
        let start = Instant::now();
        score(&set, "q", &text, "(B) x", Think::On).unwrap();
        assert!(start.elapsed() < Duration::from_secs(20), "{unit}: {:?}", start.elapsed());
    }
}

#[test]
fn many_boxes_and_deep_json_are_bounded() {
    let entry = |i: usize| json!({"bbox_2d": [i % 90, i % 70, i % 90 + 20, i % 70 + 20], "label": "cat"});
    let list = |n: usize| {
        format!("<answer>```json\n{}\n```</answer>", Value::from((0..n).map(entry).collect::<Vec<_>>()))
    };
    let deep = format!("<answer>{}</answer>", "[".repeat(1 << 20));
    let set = build(
        &["od_ap", "od_ap50", "odLength", "weighted_sum", "repetition"].map(str::to_owned),
        &RewardOptions::default(),
    )
    .unwrap();
    let start = Instant::now();
    score(&set, "", &list(20_000), &list(2_000), Think::On).unwrap();
    score(&set, "", &deep, &list(10), Think::On).unwrap();
    score(&set, "", &list(10), &deep, Think::On).unwrap();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[test]
fn every_row_of_the_table_has_help_and_its_own_name() {
    for row in table() {
        assert!(!(row.doc)().is_empty() && !row.source.is_empty(), "{}", row.name);
        let reward = (row.make)(&options()).unwrap();
        assert_eq!(reward.name(), row.name);
        let (low, high) = reward.range();
        assert!(low < high && high.is_finite(), "{}", row.name);
    }
}
