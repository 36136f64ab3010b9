//! `format`: conformance of the completion to the requested format. Range [0, 1]; for `tags3` [0, 3].
//!
//! A tag that the end of the prompt has opened counts as the start of the completion: one that the chat template writes
//! ([`RewardOptions::opened`](crate::RewardOptions)), or one at the end of a prompt that is a text.
//!
//! Sources: strict, R1-V `grpo.py` and the later form of qwen-vl-finetune; graded, the first form of qwen-vl-finetune; tags3, the
//! ViVQA-X fork of VLM-R1; rec, the referring expressions of VLM-R1 (which search anywhere in the text); context, HumanOmniV2, which
//! describes the context before it thinks. Deliberate differences:
//! the sources' expressions accept repeated blocks and empty answers, and the source of `tags3` has no lower bound. Here,
//! `strict` requires exactly one non-empty pair of each expected tag, and `tags3` is at least 0. `Compat::S3Format`,
//! `Compat::S4Format` and the mode `r1v` restore the sources' forms.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;

use crate::contract::PerRow;
use crate::tags::{content, opened_tag, tags};
use crate::{
    AnswerPolicy, Compat, FormatMode, Reward, RewardError, RewardInput, RewardOptions, Think, boxes,
};

pub(crate) fn reward(options: &RewardOptions) -> Result<Box<dyn Reward>, RewardError> {
    let mode = options.format_mode;
    let s3 = options.compat.contains(&Compat::S3Format);
    let s4 = options.compat.contains(&Compat::S4Format);
    let range = match mode {
        FormatMode::Tags3 if s4 => (f64::NEG_INFINITY, 3.0),
        FormatMode::Tags3 => (0.0, 3.0),
        FormatMode::Strict | FormatMode::Graded | FormatMode::R1v | FormatMode::Rec | FormatMode::Context => {
            (0.0, 1.0)
        }
    };
    let template_opens = options.opened.clone();
    let score = move |input: &RewardInput<'_>| {
        let opened = if input.is_text { opened_tag(input.prompt) } else { &template_opens };
        let text = &*match opened {
            "" => Cow::Borrowed(input.completion),
            opened => Cow::Owned(format!("{opened}{}", input.completion)),
        };
        let value = match mode {
            FormatMode::Strict if s3 => f64::from(full_match(text.trim(), input.think)),
            FormatMode::Strict => f64::from(strict(text, input.think, &PAIRS[1..])),
            FormatMode::Graded => graded(text, input.think),
            FormatMode::Tags3 if s4 => tags3(text),
            FormatMode::Tags3 => tags3(text).max(0.0),
            FormatMode::R1v => f64::from(full_match(text, input.think)),
            FormatMode::Rec => f64::from(strict(text, input.think, &PAIRS[1..]) && has_box(text)),
            FormatMode::Context => f64::from(strict(text, input.think, &PAIRS)),
        };
        Ok(Some(value))
    };
    Ok(Box::new(PerRow { name: "format", range, score }))
}

/// Pairs of tags that a completion has, in order.
const PAIRS: [&str; 3] = ["context", "think", "answer"];

/// Returns true for exactly one of each of these pairs in order, without the pair of thinking in rows that do not think, apart from
/// white space around them. Tags are in lower case and not nested, and the answer is not blank.
fn strict(text: &str, think: Think, pairs: &[&'static str]) -> bool {
    let text = text.trim();
    let wanted = pairs.iter().filter(|pair| think == Think::On || **pair != "think");
    let mut expected = wanted.flat_map(|pair| [(*pair, false), (*pair, true)]);
    let blank = |from: usize, to: usize| text[from..to].trim().is_empty();
    // Ends of the last opening tag and of the last pair.
    let (mut open, mut end) = (0, 0);
    for tag in tags(text, pairs) {
        let lower = !text[tag.start..tag.end].bytes().any(|b| b.is_ascii_uppercase());
        let fits = match tag.close {
            false => blank(end, tag.start),
            true => tag.name != "answer" || !blank(open, tag.start),
        };
        if !lower || !fits || expected.next() != Some((tag.name, tag.close)) {
            return false;
        }
        *(if tag.close { &mut end } else { &mut open }) = tag.end;
    }
    expected.next().is_none() && blank(end, text.len())
}

fn has_box(text: &str) -> bool {
    content(text, "answer", AnswerPolicy::Last).is_some_and(|answer| boxes::first_box(answer).is_some())
}

/// Matches the expressions of R1-V (both tags) or of qwen-vl-finetune's no-think sets (only the answer).
fn full_match(text: &str, think: Think) -> bool {
    // The expression is constant. If it did not compile, the first test would fail.
    static BOTH: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"(?s)\A<think>.*?</think>\s*<answer>.*?</answer>\z").ok());
    static ANSWER: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"(?s)\A<answer>.*?</answer>\z").ok());
    let expression = match think {
        Think::On => &*BOTH,
        Think::Off => &*ANSWER,
    };
    expression.as_ref().is_some_and(|expression| expression.is_match(text))
}

/// Returns 0.3 for a think pair, plus 0.3 for an answer pair, plus 0.4 if the first think pair ends before the first answer pair
/// starts. Without thinking, returns 0.6 for an answer pair, plus 0.4 if there is no think tag.
fn graded(text: &str, think: Think) -> f64 {
    let thinks = first_pair(text, "think");
    let answers = first_pair(text, "answer");
    match think {
        Think::On => {
            let order = matches!((thinks, answers), (Some((_, end)), Some((start, _))) if end <= start);
            (3 * u32::from(thinks.is_some()) + 3 * u32::from(answers.is_some()) + 4 * u32::from(order)) as f64
                / 10.0
        }
        Think::Off => {
            let clean = tags(text, &["think"]).next().is_none();
            (6 * u32::from(answers.is_some()) + 4 * u32::from(answers.is_some() && clean)) as f64 / 10.0
        }
    }
}

/// Returns the start and end of the first `<name>…</name>`, in bytes.
fn first_pair(text: &str, name: &str) -> Option<(usize, usize)> {
    let inside = content(text, name, AnswerPolicy::First)?;
    let from = inside.as_ptr() as usize - text.as_ptr() as usize;
    Some((from - name.len() - 2, from + inside.len() + name.len() + 3))
}

/// Returns the sum over think, answer and explain. Each pair counts 1. Without a pair, any opening tag or exactly one closing tag
/// counts 0.5. Each tag beyond one opening and one closing tag subtracts a third.
fn tags3(text: &str) -> f64 {
    let thirds: i64 = ["think", "answer", "explain"]
        .iter()
        .map(|name| {
            let (mut opens, mut closes) = (0i64, 0i64);
            for tag in tags(text, &[name]) {
                *(if tag.close { &mut closes } else { &mut opens }) += 1;
            }
            // The unit is a sixth, so that whole and half points remain exact.
            let base = if first_pair(text, name).is_some() {
                6
            } else if opens > 0 || closes == 1 {
                3
            } else {
                0
            };
            base - 2 * (opens + closes - 2).max(0)
        })
        .sum();
    thirds as f64 / 6.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Row;

    /// Text, graded score, then for sets with and without thinking: the source's expression and our strict rule.
    const TABLE: &[(&str, f64, [u8; 2], [u8; 2])] = &[
        ("<think>a</think> <answer>(1) x</answer>", 1.0, [1, 1], [0, 0]),
        ("<think>a</think><answer>(1)</answer>", 1.0, [1, 1], [0, 0]),
        ("<answer>(1)</answer>", 0.3, [0, 0], [1, 1]),
        ("<think>a</think>", 0.3, [0, 0], [0, 0]),
        ("<answer>(1)</answer> <think>a</think>", 0.6, [0, 0], [0, 0]),
        ("pre <think>a</think> <answer>(1)</answer> post", 1.0, [0, 0], [0, 0]),
        ("<think>a</think> <answer>(1)</answer><answer>(2)</answer>", 1.0, [1, 0], [0, 0]),
        ("<answer>x</answer><think>y</think><answer>z</answer>", 0.6, [0, 0], [1, 0]),
        ("<think></think><answer></answer>", 1.0, [1, 0], [0, 0]),
        (" \n<think>a</think>\n<answer>b</answer>\n", 1.0, [1, 1], [0, 0]),
        // This case is not in the source's table.
        ("<think>a<think>b</think></think><answer>c</answer>", 1.0, [1, 0], [0, 0]),
        ("<think>a</think><answer>b<ANSWER>c</ANSWER></answer>", 1.0, [1, 0], [0, 0]),
        ("<answer> \n </answer>", 0.3, [0, 0], [1, 0]),
        ("", 0.0, [0, 0], [0, 0]),
    ];

    #[test]
    fn golden_strict_and_graded() {
        let with = |format_mode, compat: &[Compat]| RewardOptions {
            format_mode,
            compat: compat.iter().copied().collect(),
            ..RewardOptions::default()
        };
        for &(text, graded, on, off) in TABLE {
            for (think, [source, ours]) in [(Think::On, on), (Think::Off, off)] {
                let row = Row::new("", text, "").think(think);
                let strict = row.score("format", &with(FormatMode::Strict, &[]));
                assert_eq!(strict, Some(f64::from(ours)), "{text} {think:?}");
                let literal = row.score("format", &with(FormatMode::Strict, &[Compat::S3Format]));
                assert_eq!(literal, Some(f64::from(source)), "{text} {think:?}");
            }
            let got = Row::new("", text, "").score("format", &with(FormatMode::Graded, &[]));
            assert_eq!(got, Some(graded), "{text}");
        }
    }

    #[test]
    fn r1v_does_not_strip() {
        let options = RewardOptions { format_mode: FormatMode::R1v, ..RewardOptions::default() };
        let score = |text| Row::new("", text, "").score("format", &options);
        assert_eq!(score("<think>a</think>\n<answer>b</answer>"), Some(1.0));
        assert_eq!(score("\n<think>a</think>\n<answer>b</answer>"), Some(0.0));
        assert_eq!(score("<think>a</think>\n<answer>b</answer>\n"), Some(0.0));
        assert_eq!(score("<think></think><answer></answer>"), Some(1.0));
    }

    #[test]
    fn a_tag_that_the_prompt_has_opened_counts() {
        let modes = [
            (FormatMode::Strict, &[][..]),
            (FormatMode::Strict, &[Compat::S3Format]),
            (FormatMode::Graded, &[]),
            (FormatMode::R1v, &[]),
        ];
        let (opened, twice) = ("ok\n</think>\n<answer>B</answer>", "<think>ok\n</think>\n<answer>B</answer>");
        for (format_mode, compat) in modes {
            let compat = compat.iter().copied().collect();
            let plain = RewardOptions { format_mode, compat, ..RewardOptions::default() };
            let after = RewardOptions { opened: "<think>\n".to_owned(), ..plain.clone() };
            let score = |text, options| Row::new("What?", text, "B").score("format", options).unwrap();
            assert_eq!(score(opened, &after), 1.0, "{format_mode:?}");
            assert!(score(opened, &plain) < 1.0, "{format_mode:?}");
            assert_eq!(score(twice, &plain), 1.0, "{format_mode:?}");
            // A prompt that is a text opens its own tag, and has no template.
            let text = |prompt: &str, completion: &str| {
                let row = Row::new(prompt, completion, "B");
                let input = RewardInput { is_text: true, ..row.input() };
                crate::build(&["format"], &after).unwrap().score(&[input]).unwrap().values[0][0].unwrap()
            };
            assert_eq!(text("What? <think>\n", opened), 1.0);
            assert_eq!(text("What?", twice), 1.0);
            assert!(text("What?", opened) < 1.0);
        }
        // A second opening tag is one too many.
        let after = RewardOptions { opened: "<think>\n".to_owned(), ..RewardOptions::default() };
        assert_eq!(Row::new("What?", twice, "B").score("format", &after), Some(0.0));
    }

    #[test]
    fn rec_wants_a_box() {
        let options = RewardOptions { format_mode: FormatMode::Rec, ..RewardOptions::default() };
        let score = |text| Row::new("", text, "").score("format", &options);
        assert_eq!(score("<think>a</think><answer>{\"bbox\": [1, 2, 30, 40]}</answer>"), Some(1.0));
        assert_eq!(score("<think>a</think><answer>[1, 2, 30]</answer>"), Some(0.0));
        assert_eq!(score("<answer>[1, 2, 30, 40]</answer>"), Some(0.0));
    }

    #[test]
    fn context_comes_before_thinking() {
        let options = RewardOptions { format_mode: FormatMode::Context, ..RewardOptions::default() };
        let score =
            |text: &str, think| Row::new("", text, "").think(think).score("format", &options).unwrap();
        let good = "<context>a man talks</context>\n<think>so</think> <answer>B</answer>\n";
        for (text, on, off) in [
            (good, 1.0, 0.0),
            ("<context>c</context><answer>B</answer>", 0.0, 1.0),
            ("<think>t</think><answer>B</answer>", 0.0, 0.0),
            ("<think>t</think><context>c</context><answer>B</answer>", 0.0, 0.0),
            ("<context>c</context><context>c</context><think>t</think><answer>B</answer>", 0.0, 0.0),
            ("<context>c</context> x <think>t</think><answer>B</answer>", 0.0, 0.0),
            ("<context>c</context><think>t</think><answer> </answer>", 0.0, 0.0),
            ("<Context>c</context><think>t</think><answer>B</answer>", 0.0, 0.0),
        ] {
            assert_eq!([score(text, Think::On), score(text, Think::Off)], [on, off], "{text}");
        }
    }

    #[test]
    fn graded_without_thinking() {
        let options = RewardOptions { format_mode: FormatMode::Graded, ..RewardOptions::default() };
        let score = |text| Row::new("", text, "").think(Think::Off).score("format", &options);
        assert_eq!(score("<answer>b</answer>"), Some(1.0));
        assert_eq!(score("<think>a</think><answer>b</answer>"), Some(0.6));
        assert_eq!(score("b"), Some(0.0));
    }

    #[test]
    fn golden_tags3() {
        let good = "<think>a</think><answer>b</answer><explain>c</explain>";
        let table: &[(String, f64)] = &[
            (good.to_owned(), 3.0),
            ("x <explain>c</explain> y <answer>b</answer><think>a</think>".to_owned(), 3.0),
            ("<answer>b</answer><explain>c</explain>".to_owned(), 2.0),
            ("<think>a<answer>b</answer><explain>c</explain>".to_owned(), 2.5),
            (format!("{good}<answer>b</answer>"), 3.0 - 2.0 / 3.0),
            (good.repeat(3), -1.0),
            ("</think></think><answer>b</answer><explain>c</explain>".to_owned(), 2.0),
            ("plain text".to_owned(), 0.0),
        ];
        let literal = RewardOptions {
            format_mode: FormatMode::Tags3,
            compat: [Compat::S4Format].into(),
            ..RewardOptions::default()
        };
        let ours = RewardOptions { format_mode: FormatMode::Tags3, ..RewardOptions::default() };
        for (text, expected) in table {
            let row = Row::new("", text, "");
            let got = row.score("format", &literal).unwrap();
            assert!((got - expected).abs() < 1e-12, "{text}: {got}");
            let got = row.score("format", &ours).unwrap();
            assert!((got - expected.max(0.0)).abs() < 1e-12, "{text}: {got}");
        }
    }
}
