//! Features of media: for a rollout, after an update, and for the reference.

use omnigrpo_models::{Features, Memories, Model, Prompt, PromptBuilder};
use omnigrpo_ops::Part::{Audio, Vision};

use crate::error::Result;
use crate::rollouts::{Group, Kept};
use crate::rows::{PreparedRow, bring_here};
use crate::saved_turns;
use crate::step::{Algorithm, Divided};

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

/// Computes the features of the rows that this rank trains on; those of the others are empty. `keep` keeps results for the first
/// update, by leaf. The failure of one rank is that of all.
pub(crate) fn encode_own(
    model: &Model,
    prompts: &PromptBuilder,
    algorithm: &Divided,
    rows: &mut [PreparedRow],
    keep: bool,
) -> Result<(Vec<Vec<Features>>, Vec<Kept>)> {
    let mut all = vec![Vec::new(); rows.len()];
    let mut kept = Vec::new();
    // Later updates of a rollout have other weights, so they cannot use results of the rollout.
    let keep = keep && algorithm.is_one_update(rows.len());
    let keeps = if keep { Keep::for_update(algorithm) } else { Keep::Features };
    let encoded = algorithm.own_leaves_of_rollout(rows.len()).into_iter().try_for_each(|groups| {
        let rows = &mut rows[groups.clone()];
        rows.iter_mut().try_for_each(|row| bring_here(prompts, row))?;
        let (own, memories) = encode(model, keeps, rows.iter().map(|row| &*row.prompt))?;
        all[groups.clone()].clone_from_slice(&own);
        if keep {
            kept.push(Kept { groups, memories, recalled: None });
        }
        Ok(())
    });
    algorithm.split.agree(encoded)?;
    Ok((all, kept))
}

/// Decodes the media of the groups that this rank trains on and computes their features, unless they are here. Drops the features
/// of all other groups.
pub(crate) fn settle(
    model: &Model,
    prompts: &PromptBuilder,
    algorithm: &Divided,
    groups: &mut [Group],
) -> Result<()> {
    let own = algorithm.owns(groups.len());
    for (Group { row, features, completions }, own) in groups.iter_mut().zip(own) {
        if !own {
            features.clear();
            continue;
        }
        bring_here(prompts, row)?;
        let each = completions.iter_mut().map(|scored| &mut scored.completion);
        row.add_media(saved_turns::bring_here(each, prompts, &row.prompt.media)?);
        if features.len() < row.prompt.media.len() {
            *features = model.encode_prompt(&row.prompt)?;
        }
    }
    Ok(())
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

/// Returns the features for the reference. If the tower is trained, or if the reference is another model, the reference computes
/// them. If only the projector is trained, the reference projects the policy's tower output. Otherwise, and if the policy is its own
/// teacher, they are the policy's features.
pub(crate) fn of_reference(
    reference: &Model,
    policy: &Model,
    prompt: &Prompt,
    features: &[Features],
) -> Result<Vec<Features>> {
    if std::ptr::eq(reference, policy) {
        return Ok(features.to_vec());
    }
    if policy.trains_tower() || reference.dir() != policy.dir() {
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
