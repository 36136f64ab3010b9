//! `accuracy`.

use crate::answer::{Question, same_label};
use crate::contract::PerRow;
use crate::{Reward, RewardError, RewardInput, RewardOptions};

pub(crate) fn reward(options: &RewardOptions) -> Result<Box<dyn Reward>, RewardError> {
    let policy = options.answer_policy;
    let score = move |input: &RewardInput<'_>| {
        Ok(Question::new(input, policy).map(|question| f64::from(same_label(question.answer, question.gold))))
    };
    Ok(Box::new(PerRow { name: "accuracy", range: (0.0, 1.0), score }))
}
