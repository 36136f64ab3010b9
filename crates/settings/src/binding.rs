//! Settings that bind a checkpoint to the run that resumes it.
//!
//! The table of settings decides: a row is binding, or free for a verb, and then its value may change between the
//! parts of a run. The program and Python read the values from what the user gave. A program in Rust has plans, from which
//! [`Values::of`] reads the same settings ([`Settings::of_plans`]). So a run has one identity, however it was started.

use omnigrpo_grpo::{Aggregation, RECIPES, Recipe, Surrogate};
use omnigrpo_models::PromptSettings;
use omnigrpo_rewards::RewardOptions;
use omnigrpo_train::{AdamWConfig, Algorithm, MICRO_BATCHES, Objective, PROMPTS, RunPlan, Selection};
use serde_json::{Map, Value as Json};

use crate::flags::{self, Flag, Kind, Section, Verb};
use crate::run::{Rewards, Settings};
use crate::values::Values;

/// Name of the number of gradient leaves in a checkpoint. One leaf has no entry.
pub const LEAVES: &str = "gradient_leaves";

/// Settings by which a step is divided over processes and batches. Their product, [`PROMPTS`], binds a run.
const DIVIDED: [&str; 2] = ["per_device_train_batch_size", "gradient_accumulation_steps"];

/// Settings whose default has changed: name, and the earlier default. It holds for checkpoints that do not name the setting.
const EARLIER: [(&str, &str); 1] = [("orientation", "stored")];

/// Returns every setting that must not change when a run resumes.
pub fn binding(values: &Values, settings: &Settings, verb: Verb, leaves: usize) -> Map<String, Json> {
    let real = |(flag, value): (&Flag, Json)| {
        let is_path = matches!(flag.kind, Kind::Path | Kind::Paths(_));
        (flag.name.to_owned(), if is_path { real_paths(value) } else { value })
    };
    let mut out: Map<String, Json> = values.binding(verb).map(real).collect();
    out.retain(|name, _| !DIVIDED.contains(&name.as_str()));
    out.insert(PROMPTS.into(), settings.run.prompts_per_step.into());
    let loss = &settings.algorithm.loss;
    if loss.aggregation == Aggregation::TokenMeanLocal {
        // The loss is a mean over micro-batches, so other ones give another loss.
        out.insert(MICRO_BATCHES.into(), settings.algorithm.prompts_per_micro_batch.into());
    }
    if let Surrogate::Custom(_) = loss.surrogate {
        // The code of a function cannot be compared.
        out.insert("loss_type".into(), "a function of the program".into());
    }
    if leaves > 1 {
        out.insert(LEAVES.into(), leaves.into());
    }
    out
}

/// Returns the names and values of the settings that shape the training of a run, for its model card. Settings without effect, and values that
/// may name places on this machine, are left out.
pub fn shaping(values: &Values, settings: &Settings, verb: Verb) -> Map<String, Json> {
    let defaults = Values::defaults(verb);
    let is_main = |flag: &Flag| {
        use Section::{Loss, Optimizer, Rollout, Run};
        [Rollout, Loss, Optimizer, Run]
            .iter()
            .any(|section| section.rows().iter().any(|row| row.name == flag.name))
    };
    let is_shown = |flag: &Flag, value: &Json| {
        let changed = || defaults.lookup(flag.name).is_none_or(|(default, _)| default.json() != *value);
        let is_place =
            matches!(flag.kind, Kind::Path | Kind::Paths(_) | Kind::Specs | Kind::Text | Kind::Object);
        !is_place && flag.is_of(verb) && (flag.idle)(settings, verb).is_none() && (is_main(flag) || changed())
    };
    let shown = values.binding(verb).filter(|(flag, value)| is_shown(flag, value));
    shown.map(|(flag, value)| (flag.name.to_owned(), value)).collect()
}

/// Returns the values of settings in checkpoints of earlier versions, which had fewer: the defaults that keep what those did.
pub fn earlier(verb: Verb) -> Map<String, Json> {
    let defaults = Values::defaults(verb);
    let own = defaults.binding(verb).map(|(flag, value)| (flag.name.to_owned(), value));
    own.chain(EARLIER.map(|(name, value)| (name.to_owned(), value.into()))).collect()
}

/// Returns the settings that never bind a checkpoint of this verb. Earlier versions stored some of them.
pub fn free(verb: Verb) -> Vec<&'static str> {
    let own = flags::all().filter(|flag| !flag.binds(verb)).map(|flag| flag.name);
    own.chain(DIVIDED).collect()
}

/// Returns the earlier default of a setting whose default has changed.
pub fn earlier_default(name: &str) -> Option<&'static str> {
    EARLIER.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
}

impl Settings {
    /// Returns the settings of a run that a program describes by plans. Settings without a plan have their defaults.
    pub fn of_plans(
        algorithm: &Algorithm,
        optimizer: &AdamWConfig,
        selection: &Selection,
        run: &RunPlan,
        prompts: &PromptSettings,
        (rewards, weights): (Vec<String>, &[f64]),
    ) -> Self {
        let kind = |recipe: &&Recipe| {
            std::mem::discriminant(&recipe.loss.surrogate)
                == std::mem::discriminant(&algorithm.loss.surrogate)
        };
        let options = RewardOptions { weights: weights.to_vec(), ..RewardOptions::default() };
        Self {
            algorithm: algorithm.clone(),
            optimizer: optimizer.clone(),
            selection: selection.clone(),
            run: run.clone(),
            prompts: prompts.clone(),
            rewards: Rewards { funcs: rewards, options, ..Self::default().rewards },
            // All other parts of a recipe are settings of their own.
            recipe: RECIPES.iter().find(kind).unwrap_or(&RECIPES[0]),
            ..Self::default()
        }
    }
}

/// Returns the verb that pursues an objective.
pub fn verb_of(objective: Objective) -> Verb {
    match objective {
        Objective::Reinforce => Verb::Train,
        Objective::Imitate => Verb::Sft,
    }
}

/// Replaces paths by their real paths, so that different spellings compare equal.
fn real_paths(value: Json) -> Json {
    match value {
        Json::String(path) => {
            let real = std::fs::canonicalize(&path).map(|real| real.display().to_string());
            real.unwrap_or(path).into()
        }
        Json::Array(paths) => paths.into_iter().map(real_paths).collect(),
        other => other,
    }
}
