//! T-GRPO: completions on shuffled frames, and the bonus of those that needed the order. The rule is
//! [`omnigrpo_rewards::temporal_order_bonus`]; what is right is what the run's accuracy reward says, as a share of its
//! largest value.

use omnigrpo_data::MediumKind;
use omnigrpo_models::{Model, PromptBuilder};
use omnigrpo_rewards::{RewardMatrix, RewardSet, answer_reward, temporal_order_bonus};
use omnigrpo_rollout::Request;

use crate::error::{Result, TrainError};
use crate::rows::PreparedRow;
use crate::scoring;
use crate::step::{Algorithm, generator};

/// Name of the bonus in metrics.
const NAME: &str = "temporal_order";

/// Keys the completions on shuffled frames apart from those of the same rollout.
const SHUFFLED: u64 = 1 << 63;

/// Adds the bonus to scored completions. Rows without a video, or where the accuracy does not apply, have none.
/// `shuffled` makes prompts with shuffled frames; half as many completions are sampled for them.
///
/// # Errors
/// As the rollout and the rewards; no reward that looks at answers.
pub fn add_order_bonus(
    model: &Model,
    shuffled: &PromptBuilder,
    rewards: &RewardSet,
    algorithm: &Algorithm,
    rows: &[PreparedRow],
    rollout: u64,
    matrix: &mut RewardMatrix,
) -> Result<()> {
    let Some((name, best)) = answer_reward(rewards) else {
        return Err(TrainError::setting(
            "temporal_order_bonus",
            "true",
            "no reward of the run looks at answers; add `accuracy` to reward_funcs".into(),
        ));
    };
    let group = algorithm.num_generations;
    let mut bonus: Vec<Option<f64>> = vec![None; rows.len() * group];
    let Some(accuracy) = matrix.names.iter().position(|n| n == name) else { return Ok(()) };
    let accuracy = matrix.values[accuracy].clone();
    let has_video = |row: &&PreparedRow| row.prompt.media.iter().any(|m| m.kind == MediumKind::Video);
    let videos: Vec<&PreparedRow> = rows.iter().filter(has_video).collect();
    let prompts = videos
        .iter()
        .map(|row| Ok(shuffled.build_in(&row.sample, row.epoch)?))
        .collect::<Result<Vec<_>>>()?;
    let features = prompts.iter().map(|p| Ok(model.encode_prompt(p)?)).collect::<Result<Vec<_>>>()?;
    let num_samples = (group / 2).max(1);
    let before = scoring::occurrences(videos.iter().map(|row| row.sample.row));
    let requests: Vec<Request> = videos
        .iter()
        .zip(prompts.iter().zip(&features))
        .zip(before)
        .map(|((row, (prompt, features)), before)| Request {
            prompt,
            features,
            num_samples,
            rollout: SHUFFLED | rollout,
            row: row.sample.row,
            first_sample: before * num_samples as u32,
        })
        .collect();
    let completions = generator(model, shuffled, algorithm).generate(&requests, |_| {})?;
    let scored: Vec<_> = videos.iter().zip(&completions).map(|(r, c)| (&r.sample, c.as_slice())).collect();
    let mut shuffled_accuracy =
        scoring::score_by(rewards, name, &scored, algorithm.seed, SHUFFLED | rollout)?.into_iter();
    let share = |value: Option<f64>| value.map(|value| value / best);
    let mut done = completions.iter();
    for (row, (bonus, ordered)) in rows.iter().zip(bonus.chunks_mut(group).zip(accuracy.chunks(group))) {
        if !has_video(&row) {
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
