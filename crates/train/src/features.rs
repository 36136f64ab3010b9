//! Features of media: for a rollout, after an update, and for the reference.

use omnigrpo_models::{Features, Memories, Model, Prompt};
use omnigrpo_ops::Part::{Audio, Vision};

use crate::error::Result;
use crate::rollouts::Group;
use crate::step::Algorithm;

/// Results of a tower's forward pass that are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Features only.
    Features,
    /// Features and the arrays that the backward pass of the first update needs.
    Activations,
}

impl Keep {
    /// Returns the results that a rollout keeps. Recomputation is for runs that are short of memory, so their towers keep
    /// features only.
    pub(crate) fn for_update(algorithm: &Algorithm) -> Self {
        if algorithm.recompute { Self::Features } else { Self::Activations }
    }
}

/// Computes the features of the media of prompts. [`prepare`](crate::prepare) builds the prompts first. A training step receives
/// prompts that another thread built in advance. Features must be computed with the current weights.
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

/// Computes features without keeping activations.
pub(crate) fn encode_plain<'p>(
    model: &Model,
    prompts: impl IntoIterator<Item = &'p Prompt>,
) -> Result<Vec<Vec<Features>>> {
    Ok(encode(model, Keep::Features, prompts)?.0)
}

/// Recomputes features after an update. If no tower is trained, only the projector runs again.
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

/// Returns the features for the reference. If the tower is trained, the reference computes them. If only the projector is
/// trained, the reference projects the policy's tower output. Otherwise they are the policy's features.
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
