//! T-GRPO: completions on shuffled frames, and a bonus for answers that need the order of frames. The rule is
//! [`omnigrpo_rewards::temporal_order_bonus`]. The correctness of an answer is the run's accuracy reward as a share of its
//! largest value.

use omnigrpo_data::MediumKind;
use omnigrpo_models::PromptBuilder;
use omnigrpo_rewards::{RewardMatrix, RewardSet, answer_reward, length_bonus, temporal_order_bonus};
use omnigrpo_rollout::Completion;

use crate::error::{LENGTH_BONUS, ORDER_BONUS, Result, TrainError};
use crate::rows::PreparedRow;
use crate::sampling;
use crate::scoring;
use crate::step::Collector;

/// Name of the bonus in metrics.
const NAME: &str = "temporal_order";

/// Bit in the rollout number that gives completions on shuffled frames different random numbers.
const SHUFFLED: u64 = 1 << 63;

/// Adds the bonus to scored completions. Rows without a video and rows to which the accuracy does not apply get none. `shuffled`
/// builds prompts with shuffled frames. Half as many completions are sampled for them.
pub fn add_order_bonus(
    collector: &Collector,
    shuffled: &PromptBuilder,
    rows: &[PreparedRow],
    rollout: u64,
    matrix: &mut RewardMatrix,
) -> Result<()> {
    let Collector { rewards, algorithm, .. } = *collector;
    let Some((name, best)) = answer_reward(rewards) else {
        return Err(TrainError::setting(
            ORDER_BONUS,
            "given",
            "no reward of the run checks answers, so no answer can depend on the order of frames; add `accuracy`"
                .into(),
        ));
    };
    let group = algorithm.num_generations;
    let mut bonus: Vec<Option<f64>> = vec![None; rows.len() * group];
    let Some(accuracy) = matrix.names.iter().position(|n| n == name) else { return Ok(()) };
    let accuracy = matrix.values[accuracy].clone();
    let owns = algorithm.owns(rows.len()).into_iter();
    let (mut videos, own): (Vec<PreparedRow>, Vec<bool>) =
        rows.iter().cloned().zip(owns).filter(|(row, _)| has_video(row)).unzip();
    let completions = sampling::shuffled(collector, shuffled, (&mut videos, &own), SHUFFLED | rollout)?;
    let shuffled_accuracy = scoring::once(&algorithm.split, &videos, &completions, |scored| {
        scoring::score_by(rewards, name, scored, algorithm.seed, SHUFFLED | rollout)
    })?;
    let mut shuffled_accuracy = shuffled_accuracy.into_iter();
    let share = |value: Option<f64>| value.map(|value| value / best);
    let mut done = completions.iter();
    for (row, (bonus, ordered)) in rows.iter().zip(bonus.chunks_mut(group).zip(accuracy.chunks(group))) {
        if !has_video(row) {
            continue;
        }
        let num = done.next().map_or(0, Vec::len);
        let others: Option<Vec<f64>> = shuffled_accuracy.by_ref().take(num).map(share).collect();
        let ordered: Option<Vec<f64>> = ordered.iter().copied().map(share).collect();
        if let (Some(ordered), Some(others)) = (ordered, others) {
            let earned = temporal_order_bonus(&ordered, &others);
            bonus.iter_mut().zip(earned).for_each(|(slot, value)| *slot = Some(value));
        }
    }
    matrix.add(NAME, bonus);
    Ok(())
}

/// Adds Video-R1's bonus for right answers of middle length. Groups to which the accuracy does not apply get none.
pub fn add_length_bonus(
    rewards: &RewardSet,
    completions: &[Vec<Completion>],
    matrix: &mut RewardMatrix,
) -> Result<()> {
    let Some((name, best)) = answer_reward(rewards) else {
        return Err(TrainError::setting(
            LENGTH_BONUS,
            "given",
            "no reward of the run checks answers, so no answer is known to be right; add `accuracy`".into(),
        ));
    };
    let Some(accuracy) = matrix.names.iter().position(|n| n == name) else { return Ok(()) };
    let mut accuracy = matrix.values[accuracy].iter();
    let mut bonus = Vec::new();
    for group in completions {
        let own: Vec<Option<f64>> = accuracy.by_ref().take(group.len()).copied().collect();
        let lengths: Vec<usize> = group.iter().map(|completion| completion.ids.len()).collect();
        match own.iter().map(|value| value.map(|value| value / best)).collect::<Option<Vec<f64>>>() {
            Some(own) => bonus.extend(length_bonus(&own, &lengths).into_iter().map(Some)),
            None => bonus.extend(own.iter().map(|_| None)),
        }
    }
    matrix.add("length_control", bonus);
    Ok(())
}

fn has_video(row: &PreparedRow) -> bool {
    row.prompt.media.iter().any(|medium| medium.kind == MediumKind::Video)
}
