//! `accuracy`: correctness of the answer. [`RewardOptions::accuracy_mode`](crate::RewardOptions) chooses the rule. As in VLM-R1,
//! the column `accu_reward_method` (or `reward_method`) can choose another rule for a row. The rules are the other files of this
//! crate, and each is also a separate reward.
//!
//! The reward does not apply to a row without a ground truth, or to a row whose ground truth does not suit the rule (for example,
//! because it has no box). Range [0, 1]; for `short_text` [0, 3].

use std::collections::BTreeSet;

use crate::answer::{Question, best, golds, same_label};
use crate::contract::PerRow;
use crate::error::ACCURACY_MODE;
use crate::tags::content;
use crate::{
    AccuracyMode, AnswerPolicy, Compat, Reward, RewardError, RewardInput, RewardOptions, all_match, boxes,
    choice, detection, emotion, fuzzy, interval, iou, math, short_text, weighted_sum, yes_no,
};

/// Columns that choose the rule of a row. The first that is present wins.
const METHOD_COLUMNS: [&str; 2] = ["accu_reward_method", "reward_method"];

pub(crate) fn reward(options: &RewardOptions) -> Result<Box<dyn Reward>, RewardError> {
    let scorer = Scorer::new(options);
    let score = move |input: &RewardInput<'_>| scorer.score(input);
    Ok(Box::new(PerRow { name: "accuracy", range: range(options.accuracy_mode), score }))
}

/// Creates the reward of one rule. Rows cannot choose another rule.
pub(crate) fn by_rule(
    name: &'static str,
    mode: AccuracyMode,
    options: &RewardOptions,
) -> Result<Box<dyn Reward>, RewardError> {
    let (policy, compat) = (options.answer_policy, options.compat.clone());
    let score =
        move |input: &RewardInput<'_>| Ok(best(input, policy, |question| compare(mode, question, &compat)));
    Ok(Box::new(PerRow { name, range: range(mode), score }))
}

fn range(mode: AccuracyMode) -> (f64, f64) {
    if mode == AccuracyMode::ShortText { (0.0, short_text::FULL) } else { (0.0, 1.0) }
}

/// The `accuracy` reward without its name, for rewards that depend on correctness.
pub(crate) struct Scorer {
    mode: AccuracyMode,
    policy: AnswerPolicy,
    compat: BTreeSet<Compat>,
}

impl Scorer {
    pub fn new(options: &RewardOptions) -> Self {
        Self { mode: options.accuracy_mode, policy: options.answer_policy, compat: options.compat.clone() }
    }

    pub fn score(&self, input: &RewardInput<'_>) -> Result<Option<f64>, String> {
        let mode = self.mode_of(input)?;
        Ok(best(input, self.policy, |question| compare(mode, question, &self.compat)))
    }

    /// Returns true for at least 0.7 of the full score, which is VLM-R1's threshold for a length reward.
    pub fn is_right(&self, input: &RewardInput<'_>) -> Result<Option<bool>, String> {
        let full = range(self.mode_of(input)?).1;
        Ok(self.score(input)?.map(|score| score >= 0.7 * full))
    }

    fn mode_of(&self, input: &RewardInput<'_>) -> Result<AccuracyMode, String> {
        let own =
            |name: &'static str| Some((name, input.columns.get(name).filter(|value| !value.is_null())?));
        let Some((column, value)) = METHOD_COLUMNS.into_iter().find_map(own) else { return Ok(self.mode) };
        let name = value.as_str().ok_or_else(|| format!("column `{column}` is {value}, expected a name"))?;
        let mode = match name {
            "" => self.mode,
            "llm" => {
                return Err(format!(
                    "column `{column}` is `llm`; give the reward `judge:http(s)://…` instead"
                ));
            }
            name => name.parse().map_err(|error: RewardError| format!("column `{column}`: {error}"))?,
        };
        if range(mode).1 > range(self.mode).1 {
            return Err(format!(
                "column `{column}` is `{name}`, whose scores reach {}; set {ACCURACY_MODE} to {name} so that the range is declared",
                range(mode).1
            ));
        }
        Ok(mode)
    }
}

/// Applies a rule. Returns `None` if the rule does not suit the ground truth.
fn compare(mode: AccuracyMode, question: &Question<'_>, compat: &BTreeSet<Compat>) -> Option<f64> {
    let has = |flag| compat.contains(&flag);
    match mode {
        AccuracyMode::Auto => compare(auto(question), question, compat),
        AccuracyMode::Label => label(question),
        AccuracyMode::Emotion => emotion::score(question),
        AccuracyMode::McqExact if has(Compat::S3Accuracy) => Some(choice::s3_exact(question)),
        AccuracyMode::McqExact if has(Compat::VlmR1Choice) => Some(choice::vlmr1(question)),
        AccuracyMode::McqExact => choice::exact(question),
        AccuracyMode::McqIou if has(Compat::S2Accuracy) => Some(choice::s2_iou(question)),
        AccuracyMode::McqIou => choice::iou(question),
        AccuracyMode::ShortText if has(Compat::S4Accuracy) => Some(short_text::s4_literal(question)),
        AccuracyMode::ShortText => short_text::score(question),
        AccuracyMode::Math => math::score(question),
        AccuracyMode::YesNo if has(Compat::VlmR1Choice) => Some(yes_no::vlmr1(question)),
        AccuracyMode::YesNo => yes_no::score(question),
        AccuracyMode::Iou => iou::score(question, has(Compat::VlmR1Iou)),
        AccuracyMode::TemporalIou => interval::score(question),
        AccuracyMode::OdAp => detection::average_precision(question, detection::Thresholds::Coco),
        AccuracyMode::OdAp50 => detection::average_precision(question, detection::Thresholds::Half),
        AccuracyMode::OdLength => detection::with_length(question),
        AccuracyMode::WeightedSum => weighted_sum::score(question, has(Compat::VlmR1Iou)),
        AccuracyMode::AllMatch => all_match::score(question),
        AccuracyMode::Fuzzy => fuzzy::score(question),
        AccuracyMode::R1v => Some(r1v(question)),
    }
}

/// Returns the rule that suits a question and its ground truth best: the one that [`AccuracyMode::Auto`] chooses, but
/// [`AccuracyMode::McqIou`] for several labels and [`AccuracyMode::Fuzzy`] for a text of several words. Returns `None` without a
/// ground truth.
pub fn suitable_rule(question: &str, solution: &str) -> Option<AccuracyMode> {
    /// Number of words that a model can hit exactly.
    const LABEL_WORDS: usize = 3;
    let input = RewardInput {
        prompt: question,
        turns: &[],
        completion: "",
        completion_ids: &[],
        solution: Some(solution),
        columns: &serde_json::Map::new(),
        think: crate::Think::On,
        media_paths: &[],
        media: &[],
        key: crate::RowKey { seed: 0, step: 0, row: 0, sample: 0 },
        truncated: false,
        added_turns: 0,
        is_text: false,
    };
    let golds = golds(solution, AnswerPolicy::Last);
    let input =
        RewardInput { solution: golds.as_ref().map_or(Some(solution), |all| Some(all.first()?)), ..input };
    let question = Question::new(&input, AnswerPolicy::Last).filter(|question| !question.gold.is_empty())?;
    Some(match auto(&question) {
        AccuracyMode::McqExact if choice::num_labels(&question) > 1 => AccuracyMode::McqIou,
        AccuracyMode::Label if question.gold.split_whitespace().count() > LABEL_WORDS => AccuracyMode::Fuzzy,
        rule => rule,
    })
}

/// Returns the most specific rule that suits the ground truth.
fn auto(question: &Question<'_>) -> AccuracyMode {
    let gold = &*question.gold;
    if boxes::detections(gold).is_some_and(|boxes| !boxes.is_empty()) {
        AccuracyMode::OdAp
    } else if boxes::is_one_box(gold) {
        AccuracyMode::Iou
    } else if math::is_tuple(gold) && !choice::is_offered(question) {
        AccuracyMode::Math
    } else if interval::is_interval(gold) {
        AccuracyMode::TemporalIou
    } else if choice::is_choice(question) {
        AccuracyMode::McqExact
    } else if yes_no::polarity_of_word(gold).is_some() {
        AccuracyMode::YesNo
    } else if math::is_formula(gold) {
        AccuracyMode::Math
    } else {
        AccuracyMode::Label
    }
}

fn label(question: &Question<'_>) -> Option<f64> {
    (!question.gold.is_empty()).then(|| f64::from(same_label(&question.answer, &question.gold)))
}

/// Compares as in R1-V: equal values score 1. Otherwise, the text of the first one-line answer tag must be exactly equal on both
/// sides.
fn r1v(question: &Question<'_>) -> f64 {
    fn first_line_tag(text: &str) -> &str {
        // The source's expression has no dot-matches-newline flag, so a tag that contains a line break does not match.
        content(text, "answer", AnswerPolicy::First)
            .filter(|inside| !inside.contains('\n'))
            .unwrap_or(text)
            .trim()
    }
    let gold = first_line_tag(question.input.solution.unwrap_or_default());
    let answer = first_line_tag(question.input.completion);
    f64::from(!gold.is_empty() && (answer == gold || math::same(answer, gold)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::Row;

    fn auto_score(prompt: &str, completion: &str, gold: &str) -> Option<f64> {
        Row::new(prompt, completion, gold).score("accuracy", &RewardOptions::default())
    }

    #[test]
    fn the_suitable_rule_follows_the_ground_truth() {
        let options = "Which?\n(A) red\n(B) blue\n(C) green";
        for (question, solution, rule) in [
            (options, "<answer>B</answer>", AccuracyMode::McqExact),
            (options, "A, C", AccuracyMode::McqIou),
            ("How many?", "12", AccuracyMode::Math),
            ("How many?", "\\boxed{\\frac{1}{2}}", AccuracyMode::Math),
            ("Is it red?", "No", AccuracyMode::YesNo),
            ("Where?", "[1, 2, 30, 40]", AccuracyMode::Iou),
            ("Which emotion?", "angry", AccuracyMode::Label),
            ("What happens?", "a man walks his dog in the park", AccuracyMode::Fuzzy),
        ] {
            assert_eq!(suitable_rule(question, solution), Some(rule), "{solution}");
        }
        assert_eq!(suitable_rule("What?", " "), None);
    }

    #[test]
    fn auto_follows_the_ground_truth() {
        let options = "What?\n(A) red\n(B) blue";
        assert_eq!(auto_score(options, "<answer>B</answer>", "<answer>(B) blue</answer>"), Some(1.0));
        assert_eq!(auto_score(options, "<answer>Blue.</answer>", "B"), Some(1.0));
        assert_eq!(auto_score("How many?", "<answer>3</answer>", "3.0"), Some(1.0));
        assert_eq!(auto_score("How many?", "<answer>4</answer>", "3"), Some(0.0));
        assert_eq!(auto_score("Is it?", "<answer>Yes, it is.</answer>", "yes"), Some(1.0));
        assert_eq!(
            auto_score("Where?", "<answer>[0, 0, 10, 10]</answer>", "[5, 5, 15, 15]"),
            Some(25.0 / 175.0)
        );
        assert_eq!(auto_score("Which?", "<think>no</think><answer>Angry!</answer>", "angry"), Some(1.0));
        assert_eq!(auto_score("When?", "<answer>4-5</answer>", "3-4"), Some(0.0));
        assert_eq!(auto_score("When?", "<answer>3-4</answer>", "3-4"), Some(1.0));
        assert_eq!(auto_score("Expand.", "<answer>(x+1)^2</answer>", "$x^2+2x+1$"), Some(1.0));
        assert_eq!(auto_score("What is there?", "none", "None"), Some(1.0));
        let gold = "```json\n[{\"bbox_2d\": [0, 0, 10, 10], \"label\": \"cat\"}]\n```";
        let answer = format!("<answer>{gold}</answer>");
        assert_eq!(auto_score("Find cats.", &answer, gold), Some(1.0));
    }

    #[test]
    fn plain_answers_are_judged_where_no_tag_is_asked_for() {
        let prompt = "What is 6 + 7?";
        let gsm8k = "He has 6 + 7 = <<6+7=13>>13 apples.\n#### 13";
        for (completion, expected) in [
            ("The answer is 13.", 1.0),
            ("13", 1.0),
            ("6 + 7 = 13. The answer is 13.", 1.0),
            ("6 + 7 = 13, so the final answer is: **13**\n", 1.0),
            ("6 + 7 = 13\n\n**Answer:** 13", 1.0),
            ("First 6, then 7.\n#### 13", 1.0),
            ("<think>Is the answer is 12?</think>The answer is 13.", 1.0),
            ("The answer is 13. No, the answer is 14.", 0.0),
            ("13 + 1. The answer is 14.", 0.0),
            ("#### 13\n12", 0.0),
            ("The answer is", 0.0),
            ("the answer is <answer>12</answer>, or #### 13", 0.0),
        ] {
            for gold in ["13", gsm8k, "<answer>13</answer>"] {
                assert_eq!(auto_score(prompt, completion, gold), Some(expected), "{completion} {gold}");
            }
        }
        assert_eq!(auto_score("Which?\n(A) red\n(B) blue", "I see blue. The answer is (B).", "B"), Some(1.0));
        assert_eq!(auto_score("How many clips?", "#### 1,072", "Many.\n#### 1072"), Some(1.0));
        // A prompt that asks for tags judges a text without them as a whole.
        let asks = "What is 6 + 7? Answer in <answer> </answer>.";
        assert_eq!(auto_score(asks, "6 + 7 = 13. The answer is 13.", "13"), Some(0.0));
    }

    #[test]
    fn an_empty_answer_earns_nothing_and_no_ground_truth_is_not_applicable() {
        for gold in ["<answer></answer>", "", "3", "yes", "(B) x", "cat"] {
            let score = auto_score("q", "<answer></answer>", gold);
            assert!(score.is_none_or(|score| score == 0.0), "{gold}");
        }
        let mut row = Row::new("q", "<answer>1</answer>", "");
        row.solution = None;
        assert_eq!(row.score("accuracy", &RewardOptions::default()), None);
    }

    #[test]
    fn rows_choose_their_rule() {
        let row = |method| Row::new("q", "<answer>yes</answer>", "Yes").column("accu_reward_method", method);
        let options = RewardOptions { accuracy_mode: AccuracyMode::Iou, ..RewardOptions::default() };
        assert_eq!(row(json!("yes_no")).score("accuracy", &options), Some(1.0));
        assert_eq!(row(json!("all_match")).score("accuracy", &options), Some(1.0));
        // Names that VLM-R1 uses.
        assert_eq!(row(json!("default")).score("accuracy", &options), Some(1.0));
        assert_eq!(row(json!("mcq")).score("accuracy", &options), Some(1.0));
        assert_eq!(row(json!("map")).score("accuracy", &options), None);
        assert_eq!(row(json!("")).score("accuracy", &options), None);
        let error = row(json!("yesno")).try_score("accuracy", &options).unwrap_err().to_string();
        assert!(error.contains("row 0") && error.contains("did you mean `yes_no`"), "{error}");
        let error = row(json!("short_text")).try_score("accuracy", &options).unwrap_err().to_string();
        assert!(error.contains("RewardOptions::accuracy_mode to short_text"), "{error}");
        assert!(row(json!(3)).try_score("accuracy", &options).is_err());
    }

    #[test]
    fn last_answer_counts_unless_told_otherwise() {
        let row = Row::new("q", "<answer>cat</answer><answer>dog</answer>", "dog");
        assert_eq!(row.score("accuracy", &RewardOptions::default()), Some(1.0));
        let first = RewardOptions { answer_policy: AnswerPolicy::First, ..RewardOptions::default() };
        assert_eq!(row.score("accuracy", &first), Some(0.0));
    }

    #[test]
    fn r1v_is_literal() {
        let options = RewardOptions { accuracy_mode: AccuracyMode::R1v, ..RewardOptions::default() };
        let score = |completion, gold| Row::new("q", completion, gold).score("accuracy", &options);
        assert_eq!(score("<answer>happy</answer>", "<answer>happy</answer>"), Some(1.0));
        // Case matters, the first tag counts, and a line break hides a tag.
        assert_eq!(score("<answer>Happy</answer>", "<answer>happy</answer>"), Some(0.0));
        assert_eq!(score("<answer>sad</answer><answer>happy</answer>", "happy"), Some(0.0));
        assert_eq!(score("<answer>\nhappy</answer>", "happy"), Some(0.0));
        assert_eq!(score("happy", "<answer> happy </answer>"), Some(1.0));
        assert_eq!(score("<answer>3.0</answer>", "<answer> 3 </answer>"), Some(1.0));
    }
}
