//! Features of media: for a rollout, again after an update, and as the reference sees them.

use omnigrpo_models::{Features, Memories, Model, Prompt};
use omnigrpo_ops::Part::{Audio, Vision};

use crate::error::Result;
use crate::rollouts::Group;
use crate::step::Algorithm;

/// Part of a tower's forward pass that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Features alone.
    Features,
    /// Also the arrays that the backward pass of the first update needs.
    Activations,
}

impl Keep {
    /// Returns what a rollout keeps. Runs that recompute are short of memory, so their towers keep nothing either.
    pub(crate) fn for_update(algorithm: &Algorithm) -> Self {
        if algorithm.recompute { Self::Features } else { Self::Activations }
    }
}

/// The second half of the way of a row, from prompts to the features of their media; [`prepare`](crate::prepare) is the first. A
/// training step has prompts made ahead, on another thread, and features by the weights of the moment.
pub fn encode<'p>(
    model: &Model,
    keep: Keep,
    prompts: impl IntoIterator<Item = &'p Prompt>,
) -> Result<(Vec<Vec<Features>>, Memories)> {
    match keep {
        Keep::Features => {
            let each = prompts.into_iter().map(|prompt| Ok(model.encode_prompt(prompt)?));
            Ok((each.collect::<Result<_>>()?, Memories::default()))
        }
        Keep::Activations => Ok(model.encode_for_training(prompts)?),
    }
}

/// Features alone.
pub(crate) fn encode_plain<'p>(
    model: &Model,
    prompts: impl IntoIterator<Item = &'p Prompt>,
) -> Result<Vec<Vec<Features>>> {
    Ok(encode(model, Keep::Features, prompts)?.0)
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
