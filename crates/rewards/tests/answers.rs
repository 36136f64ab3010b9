//! Forms of answers and ground truths that every rule reads alike: LaTeX around an answer, tuples and intervals, lists of accepted
//! answers.

#![allow(clippy::unwrap_used)]

use omnigrpo_data::RowReader;
use omnigrpo_rewards::{AccuracyMode, RewardInput, RewardOptions, RowKey, build, suitable_rule};
use serde_json::{Value, json};

/// Scores a completion of a row by a reward. The ground truth is what the reader of rows makes of the columns.
fn score(reward: &str, row: &Value, completion: &str) -> Option<f64> {
    let sample = RowReader::new("rows").sample(row.clone()).unwrap();
    let question = sample.question();
    let input = RewardInput {
        prompt: &question,
        turns: &sample.turns,
        completion,
        completion_ids: &[1; 12],
        solution: sample.solution.as_deref(),
        columns: &sample.columns,
        think: sample.think,
        media_paths: &[],
        media: &[],
        key: RowKey { seed: 0, step: 0, row: 0, sample: 0 },
        truncated: false,
        added_turns: 0,
        is_text: false,
    };
    build(&[reward], &RewardOptions::default()).unwrap().score(&[input]).unwrap().values[0][0]
}

fn tagged(answer: &str) -> String {
    format!("<think>\\boxed{{no}} t</think><answer>{answer}</answer>")
}

#[test]
fn latex_around_an_answer_does_not_matter_to_any_rule() {
    let options = "Which colour?\n(A) red\n(B) blue\n(C) green";
    let boxes = "[{\"bbox_2d\": [0, 0, 10, 10], \"label\": \"cat\"}]";
    let rules = [
        ("accuracy", options, "B"),
        ("accuracy", "How many?", "12"),
        ("accuracy", "Is it?", "yes"),
        ("accuracy", "Which?", "angry"),
        ("accuracy", "Where?", "[0, 0, 10, 10]"),
        ("accuracy", "Find cats.", boxes),
        ("accuracy", "When?", "13.4s to 28.1s"),
        ("mcq", options, "B"),
        ("mcq_iou", options, "B"),
        ("label", "Which?", "red ball"),
        ("emotion", "Which?", "happy"),
        ("yes_no", "Is it?", "no"),
        ("short_text", "Which?", "vòi sen"),
        ("math", "How many?", "\\frac{1}{2}"),
        ("iou", "Where?", "[0, 0, 10, 10]"),
        ("temporal_iou", "When?", "[13.4, 28.1]"),
        ("od_ap", "Find cats.", boxes),
        ("od_ap50", "Find cats.", boxes),
        ("odLength", "Find cats.", boxes),
        ("weighted_sum", "Find cats.", boxes),
        ("all_match", "Which?", "red ball"),
        ("fuzzy", "Which?", "red ball"),
        ("fuzzy", options, "B"),
    ];
    for (reward, question, gold) in rules {
        let row = |solution: &str| json!({ "problem": question, "solution": solution });
        let full = score(reward, &row(gold), &tagged(gold)).unwrap();
        assert!(full >= 1.0, "{reward} {gold}");
        let wrapped: &[fn(&str) -> String] = &[
            |text| format!("\\boxed{{{text}}}"),
            |text| format!("$\\boxed{{{text}}}$."),
            |text| format!("\\text{{{text}}}"),
            |text| format!("${text}$"),
            |text| format!("\\( \\boxed{{\\text{{{text}}}}} \\)"),
            |text| format!("The answer is \\boxed{{{text}}}."),
        ];
        for wrap in wrapped {
            // "\text{…}" ends at the first brace of an object or a fraction in it.
            if gold.contains('{') && wrap("").contains("\\text") {
                continue;
            }
            let (answer, truth) = (wrap(gold), row(&wrap(gold)));
            assert_eq!(score(reward, &row(gold), &tagged(&answer)), Some(full), "{reward}: {answer}");
            assert_eq!(score(reward, &truth, &tagged(gold)), Some(full), "{reward}: ground truth {answer}");
            // A box marks an answer as a tag does.
            let untagged = format!("<think>\\boxed{{no}}</think>\n{answer}");
            if answer.contains("\\boxed") {
                assert_eq!(score(reward, &row(gold), &untagged), Some(full), "{reward}: {untagged}");
            }
        }
        let wrong = score(reward, &row(gold), &tagged("\\boxed{nothing}")).unwrap();
        assert!(wrong < full, "{reward} {gold}: {wrong}");
    }
    // Several boxes are several labels.
    let row = json!({ "problem": options, "solution": "A, C" });
    assert_eq!(score("mcq", &row, &tagged("\\boxed{A}, \\boxed{C}")), Some(1.0));
    assert_eq!(score("mcq", &row, &tagged("\\boxed{\\text{A}, \\text{C}}")), Some(1.0));
    assert_eq!(score("mcq", &row, &tagged("\\boxed{A} is wrong; \\boxed{C}")), Some(0.0));
}

#[test]
fn tuples_and_intervals_are_compared_by_value_and_order() {
    for (gold, right, wrong) in [
        (
            "(3, 4)",
            vec!["(3, 4)", "\\left(3,4\\right)", "(3.0, 4.0)", "$(3,4)$"],
            vec!["(4, 3)", "[3, 4]", "(3, 4, 5)", "3"],
        ),
        ("(-1, 2)", vec!["(-1,2)", "\\boxed{(-1, 2)}"], vec!["(2, -1)", "(1, 2)"]),
        ("[0.5, 1.5]", vec!["[0.5,1.5]", "[\\frac12, \\frac{3}{2}]"], vec!["(0.5, 1.5)", "[1.5, 0.5]"]),
        ("(a, b)", vec!["(a,b)"], vec!["(b, a)", "a"]),
        ("[0, 1)", vec!["[0,1)"], vec!["[0,1]", "(0,1)"]),
        ("(-\\infty, 3]", vec!["(-∞, 3]", "(-\\infty,3]"], vec!["(\\infty, 3]", "(-\\infty, 3)"]),
        ("\\{1, 2\\}", vec!["\\{2, 1\\}"], vec!["\\{1, 3\\}"]),
        ("((1, 2), (3, 4))", vec!["((1.0,2),(3,4))"], vec!["((3,4),(1,2))"]),
        ("(x+1, 2y)", vec!["(1+x, 2y)"], vec!["(2y, x+1)"]),
    ] {
        let row = json!({ "problem": "Which?", "solution": gold });
        assert_eq!(suitable_rule("Which?", gold), Some(AccuracyMode::Math), "{gold}");
        for answer in right {
            assert_eq!(score("accuracy", &row, &tagged(answer)), Some(1.0), "{gold}: {answer}");
        }
        for answer in wrong {
            assert_eq!(score("accuracy", &row, &tagged(answer)), Some(0.0), "{gold}: {answer}");
        }
    }
    // Labels and texts of the choices that a question lists, words in brackets, a box.
    let listed = "Which two?\n(A) red\n(B) blue\n(C) green";
    assert_eq!(suitable_rule(listed, "(A, C)"), Some(AccuracyMode::McqIou));
    let row = json!({ "problem": listed, "solution": "(A, C)" });
    assert_eq!(score("accuracy", &row, &tagged("C, A")), Some(1.0));
    let points = "Where is it?\nA. (3, 4)\nB. (4, 3)";
    let row = json!({ "problem": points, "solution": "(3, 4)" });
    assert_eq!(score("accuracy", &row, &tagged("A")), Some(1.0));
    assert_eq!(score("accuracy", &row, &tagged("(4, 3)")), Some(0.0));
    for (gold, rule) in [
        ("(red, blue)", AccuracyMode::Label),
        ("[1, 2, 30, 40]", AccuracyMode::Iou),
        ("(B) red, warm", AccuracyMode::McqExact),
        ("(3)", AccuracyMode::McqExact),
        ("3-4", AccuracyMode::Label),
    ] {
        assert_eq!(suitable_rule("Which?", gold), Some(rule), "{gold}");
    }
}

#[test]
fn any_of_the_accepted_answers_is_right() {
    let listed = "Which?\nA. red\nB. blue\nC. green";
    for (reward, problem, golds, right, wrong) in [
        ("accuracy", "Is it?", json!(["yes", "yeah"]), vec!["yes", "Yeah."], vec!["no", "maybe"]),
        (
            "accuracy",
            "Who?",
            json!(["Barack Obama", "Obama", "44"]),
            vec!["obama", "44.0"],
            vec!["Bush", "45"],
        ),
        ("accuracy", listed, json!(["A", "C"]), vec!["A", "(C) green"], vec!["B"]),
        ("mcq", listed, json!(["A", "C"]), vec!["C"], vec!["B"]),
        ("math", "?", json!(["\\frac{1}{2}", "50\\%"]), vec!["0.5", "50%"], vec!["2"]),
        ("label", "?", json!(["cat", "kitten"]), vec!["Kitten"], vec!["dog"]),
        ("fuzzy", "?", json!(["cat", "dog"]), vec!["dog"], vec![]),
        (
            "iou",
            "?",
            json!(["[0, 0, 10, 10]", "[20, 20, 30, 30]"]),
            vec!["[20, 20, 30, 30]"],
            vec!["[50, 50, 60, 60]"],
        ),
        ("short_text", "?", json!(["vòi sen", "sen"]), vec![], vec!["mưa"]),
        ("yes_no", "?", json!(["yes", "true"]), vec!["true"], vec!["no"]),
        ("emotion", "?", json!(["happy", "calm"]), vec!["calm"], vec!["sad"]),
        ("temporal_iou", "?", json!(["1 to 2", "10 to 20"]), vec!["10 to 20"], vec!["30 to 40"]),
        ("all_match", "?", json!(["a b", "c"]), vec!["c"], vec!["d"]),
    ] {
        for column in ["solution", "answer", "answers", "ground_truth"] {
            let row = json!({ "problem": problem, column: golds });
            for answer in &right {
                assert_eq!(
                    score(reward, &row, &tagged(answer)),
                    Some(1.0),
                    "{reward} {column} {golds}: {answer}"
                );
            }
            for answer in &wrong {
                assert_eq!(
                    score(reward, &row, &tagged(answer)),
                    Some(0.0),
                    "{reward} {column} {golds}: {answer}"
                );
            }
        }
        // A list as text, as in tables, and inside a tag.
        if let Some(answer) = right.first() {
            for text in [golds.to_string(), format!("<answer>{golds}</answer>")] {
                let row = json!({ "problem": problem, "solution": text });
                assert_eq!(score(reward, &row, &tagged(answer)), Some(1.0), "{reward} {text}");
            }
        }
    }
    let row = json!({ "problem": "?", "answers": ["vòi sen", "sen"] });
    assert_eq!(score("short_text", &row, &tagged("sen")), Some(3.0), "the best of the scores counts");
    // The length of an answer counts as before.
    let row = json!({ "problem": "?", "solution": ["cat", "kitten"] });
    let short = score("length", &row, &tagged("kitten")).unwrap();
    assert!(short > 0.0, "{short}");
    // The column `answers` comes after the others, and a single answer is a text.
    let row = json!({ "problem": "?", "answer": "dog", "answers": ["cat"] });
    assert_eq!(score("label", &row, &tagged("dog")), Some(1.0));
    assert_eq!(
        score("label", &json!({ "problem": "?", "answers": ["cat", "cat"] }), &tagged("cat")),
        Some(1.0)
    );
    assert_eq!(score("label", &json!({ "problem": "?", "answers": [] }), &tagged("cat")), None);
}
