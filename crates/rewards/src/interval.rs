//! `temporal_iou`: overlap of the time interval in the answer with that of the ground truth. Range [0, 1].
//!
//! An interval is two times with a dash, "to", "and" or a comma between them: `13.4-28.1`, `from 13.4s to 28.1s`, `[13.4, 28.1]`,
//! `00:13 - 00:28.5`, `{"start": 13.4, "end": 28.1}`. Times are seconds, mm:ss, h:mm:ss, or numbers with the units h, min and s.
//!
//! Source: Time-R1 (arXiv 2503.13377), whose answers are "13.4 to 28.1" in an answer tag. As there, the last interval of an answer
//! counts. Deliberate differences: other forms of an interval and answers without a tag count too, and an interval that ends
//! before it starts earns 0.

use std::sync::LazyLock;

use regex::{Captures, Regex};

use crate::answer::Question;

/// Pattern of one time, with eight groups: hours, minutes and seconds around colons; hours, minutes and seconds with units; minutes and
/// seconds with units; a number of seconds.
const TIME: &str = r"(?:(?:([0-9]{1,4}):)?([0-9]{1,4}):([0-9]{2}(?:\.[0-9]+)?)|(?:([0-9]{1,9})\s?h(?:ours?|rs?)?\s?)?([0-9]{1,9}(?:\.[0-9]+)?)\s?m(?:in(?:ute)?s?)?(?:\s?([0-9]{1,9}(?:\.[0-9]+)?)\s?s(?:ec(?:ond)?s?)?)?|([0-9]{1,9}(?:\.[0-9]+)?)(?:\s?(s(?:ec(?:ond)?s?)?))?)";
/// Number of groups of [`TIME`].
const GROUPS: usize = 8;

// The expression is constant. If it did not compile, the first test would fail.
static INTERVAL: LazyLock<Option<Regex>> = LazyLock::new(|| {
    let start = r#"(?i)(?:(from|between)\s+|"?start(?:[ _]time)?"?\s*[:=]?\s*)?"#;
    let between = r#"\.?["'\s]*([-–—−~→]|->|to|and|until|till|,)["'\s]*(?:"?end(?:[ _]time)?"?\s*[:=]?\s*)?"#;
    Regex::new(&format!(r"{start}{TIME}{between}{TIME}")).ok()
});

/// A time interval of a text.
struct Interval {
    /// Start and end, in seconds.
    secs: [f64; 2],
    /// True if the text can mean nothing else: a unit, a colon, a word before it, or decimals on both sides of a dash or of "to".
    is_marked: bool,
}

/// Returns `None` if the ground truth is no interval.
pub(crate) fn score(question: &Question<'_>) -> Option<f64> {
    let gold = last(&question.gold).filter(|gold| gold.secs[0] < gold.secs[1])?.secs;
    Some(last(&question.answer).map_or(0.0, |answer| overlap(answer.secs, gold)))
}

/// Returns true if the text is one time interval and nothing else. Numbers with a dash between them are one if both have decimals.
pub(crate) fn is_interval(text: &str) -> bool {
    let found = INTERVAL.as_ref().and_then(|expression| expression.captures(text));
    let whole = |found: &Captures<'_>| {
        found.get(0).is_some_and(|all| all.as_str() == text.trim().trim_end_matches('.').trim_end())
    };
    let interval = found.filter(whole).and_then(|found| interval(&found));
    interval.is_some_and(|interval| interval.is_marked && interval.secs[0] < interval.secs[1])
}

/// Returns the length of the intersection divided by that of the union.
fn overlap(a: [f64; 2], b: [f64; 2]) -> f64 {
    let shared = (a[1].min(b[1]) - a[0].max(b[0])).max(0.0);
    let union = (a[1] - a[0]) + (b[1] - b[0]) - shared;
    // An interval that ends before it starts has a negative length.
    if a[0] < a[1] && union > 0.0 { (shared / union).clamp(0.0, 1.0) } else { 0.0 }
}

fn last(text: &str) -> Option<Interval> {
    let found = INTERVAL.as_ref()?.captures_iter(text).last()?;
    interval(&found)
}

fn interval(found: &Captures<'_>) -> Option<Interval> {
    // The group between the times is their separator.
    let (first, separator, second) = (2, 2 + GROUPS, 3 + GROUPS);
    let secs = [seconds(found, first)?, seconds(found, second)?];
    let has_unit = |from: usize| (from..from + 6).chain([from + 7]).any(|group| found.get(group).is_some());
    let has_decimals = |from: usize| found.get(from + 6).is_some_and(|number| number.as_str().contains('.'));
    // Two numbers with one of these between them may be a point or two solutions.
    let is_list =
        found.get(separator).is_some_and(|text| matches!(text.as_str().to_lowercase().as_str(), "," | "and"));
    let is_marked = found.get(1).is_some()
        || has_unit(first)
        || has_unit(second)
        || (has_decimals(first) && has_decimals(second) && !is_list);
    Some(Interval { secs, is_marked })
}

/// Returns the time whose groups start at `from`, in seconds.
fn seconds(found: &Captures<'_>, from: usize) -> Option<f64> {
    let number = |group: usize| found.get(from + group).map(|text| text.as_str().parse::<f64>());
    let mut secs = 0.0;
    for (group, factor) in [(0, 3600.0), (1, 60.0), (2, 1.0), (3, 3600.0), (4, 60.0), (5, 1.0), (6, 1.0)] {
        if let Some(number) = number(group) {
            secs += factor * number.ok()?;
        }
    }
    Some(secs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Row;
    use crate::{AccuracyMode, RewardOptions, suitable_rule};

    fn score(answer: &str, gold: &str) -> Option<f64> {
        let row = Row::new(
            "When does it happen?",
            &format!("<think>5 to 6</think><answer>{answer}</answer>"),
            gold,
        );
        row.score("temporal_iou", &RewardOptions::default())
    }

    #[test]
    fn all_forms_of_an_interval_are_read() {
        for form in [
            "13.4-28.1",
            "13.4 - 28.1",
            "13.4 to 28.1",
            "<answer>13.4 to 28.1</answer>",
            "from 13.4s to 28.1s",
            "From 13.4 seconds to 28.1 seconds.",
            "between 13.4 sec and 28.1 sec",
            "[13.4, 28.1]",
            "(13.4,28.1)",
            "13.4s – 28.1s",
            "00:13.4 - 00:28.1",
            "0:00:13.4 to 0:00:28.1",
            "\\boxed{13.4 \\text{ to } 28.1}",
            "{\"start\": 13.4, \"end\": 28.1}",
            "start: 13.4, end: 28.1",
            "start time: 13.4 s, end time: 28.1 s",
            "The event lasts from 13.4 to 28.1 seconds in the video.",
            "1 to 2? No, 13.4 to 28.1",
        ] {
            assert_eq!(score(form, "[13.4, 28.1]"), Some(1.0), "{form}");
            let gold = form.replace("<answer>", "").replace("</answer>", "");
            assert_eq!(score("13.4 to 28.1", &gold), Some(1.0), "{form}");
        }
        assert_eq!(score("01:05 to 02:10", "[65, 130]"), Some(1.0));
        assert_eq!(score("1 min 5 s to 2 min 10 s", "65-130"), Some(1.0));
        assert_eq!(score("1m5s - 1h 2m 10s", "65-3730"), Some(1.0));
        assert_eq!(score("1:00:00 to 1:00:10", "3600 to 3610"), Some(1.0));
        // Without an answer tag, the text after the thinking counts.
        let row = Row::new("", "<think>5 to 6</think>\nfrom 13.4s to 28.1s", "13.4-28.1");
        assert_eq!(row.score("temporal_iou", &RewardOptions::default()), Some(1.0));
    }

    #[test]
    fn overlaps_computed_by_hand() {
        for (answer, gold, expected) in [
            ("10 to 20", "15 to 25", 5.0 / 15.0),
            ("0 to 40", "10 to 20", 0.25),
            ("10 to 20", "20 to 30", 0.0),
            ("1 to 2", "10 to 20", 0.0),
            ("20 to 10", "10 to 20", 0.0),
            ("15 to 15", "10 to 20", 0.0),
            ("at 15", "10 to 20", 0.0),
            ("", "10 to 20", 0.0),
        ] {
            let got = score(answer, gold).unwrap();
            assert!((got - expected).abs() < 1e-12, "{answer} / {gold}: {got}");
        }
        // No interval, or one without a length.
        for gold in ["the start", "15", "20-10", "15 to 15", ""] {
            assert_eq!(score("10 to 20", gold), None, "{gold}");
        }
        assert_eq!(score(&format!("{} to 28.1", "9".repeat(400)), "13.4-28.1"), Some(0.0));
    }

    #[test]
    fn the_default_rule_takes_what_can_only_be_an_interval() {
        for gold in
            ["13.4-28.1", "13.4 to 28.1", "from 13 to 28", "13s to 28s", "00:13 - 00:28", "between 3 and 4 s"]
        {
            assert_eq!(suitable_rule("When?", gold), Some(AccuracyMode::TemporalIou), "{gold}");
        }
        // A score of a match, a difference, a range of years, a sentence, two solutions, a point.
        for gold in [
            "3-4",
            "28.1-13.4",
            "1914-1918",
            "it rains from 13.4s to 28.1s",
            "1.5, 2.5",
            "0.35, 0.62",
            "1.5 and 2.5",
        ] {
            assert_ne!(suitable_rule("When?", gold), Some(AccuracyMode::TemporalIou), "{gold}");
        }
        let accuracy = |completion: &str| {
            Row::new("When?", completion, "13.4-28.1").score("accuracy", &RewardOptions::default())
        };
        assert_eq!(accuracy("<answer>13.4 - 28.1</answer>"), Some(1.0));
        assert_eq!(accuracy("<answer>[13.4, 28.1]</answer>"), Some(1.0));
    }

    #[test]
    fn time_is_linear_on_adversarial_text() {
        for unit in ["1", "1 ", "1:", "1-", "1m", "1 to ", "from ", "1.1s,"] {
            let text = unit.repeat(200_000 / unit.len());
            let start = std::time::Instant::now();
            let _ = (last(&text), is_interval(&text));
            assert!(start.elapsed().as_secs() < 10, "{unit}: {:?}", start.elapsed());
        }
    }
}
