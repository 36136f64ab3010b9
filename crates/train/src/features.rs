//! Features of media: for a rollout, again after an update, and as the reference sees them.

use omnigrpo_models::{Features, Memories, Model, Prompt};
use omnigrpo_ops::Part::{Audio, Vision};

use crate::error::Result;
use crate::rollouts::Group;
use crate::step::Algorithm;

/// Features of every prompt's media, for sampling and for the first update after it.
pub(crate) fn encode<'p>(
    model: &Model,
    algorithm: &Algorithm,
    prompts: impl Iterator<Item = &'p Prompt>,
) -> Result<(Vec<Vec<Features>>, Memories)> {
    if algorithm.recompute {
        // Runs that recompute are short of memory, so towers keep nothing either.
        let features = prompts.map(|prompt| Ok(model.encode_prompt(prompt)?)).collect::<Result<_>>()?;
        return Ok((features, Memories::default()));
    }
    Ok(model.encode_for_training(prompts)?)
}

/// Renews features after an update: through the tower where it is trained, else through the projector alone.
pub(crate) fn encode_again(model: &Model, groups: &mut [Group]) -> Result<()> {
    let towers = model.trains(Vision) || model.trains(Audio);
    for Group { row, features, .. } in groups {
        *features = match towers {
            true => model.encode_prompt(&row.prompt)?,
            false => project(model, &row.prompt, features)?,
        };
    }
    Ok(())
}

/// Features as the reference sees them: the policy's where tower and projector are the same weights, the tower's output
/// reused where only the projector differs.
pub(crate) fn of_reference(
    reference: &Model,
    policy: &Model,
    prompt: &Prompt,
    features: &[Features],
) -> Result<Vec<Features>> {
    if policy.trains_tower() {
        return Ok(reference.encode_prompt(prompt)?);
    }
    if policy.trains_projection() { project(reference, prompt, features) } else { Ok(features.to_vec()) }
}

fn project(model: &Model, prompt: &Prompt, features: &[Features]) -> Result<Vec<Features>> {
    let each = prompt.media.iter().zip(features);
    Ok(each
        .map(|(m, f)| model.project(&f.tower, m, &prompt.instruction))
        .collect::<omnigrpo_models::Result<_>>()?)
}
