//! Settings that bind a checkpoint to the run that resumes it.
//!
//! The table of settings decides: a row is binding, or free for a verb, and then its value may change between the
//! parts of a run. The program and Python read the values from what the user gave. A program in Rust has plans, from which
//! [`Values::of`] reads the same settings ([`Settings::of_plans`]). So a run has one identity, however it was started.

use omnigrpo_grpo::{Aggregation, RECIPES, Recipe, Surrogate};
use omnigrpo_models::{MediaSettings, PromptSettings};
use omnigrpo_rewards::RewardOptions;
use omnigrpo_train::{AdamWConfig, Algorithm, MICRO_BATCHES, Objective, PROMPTS, RunPlan, Selection};
use serde_json::{Map, Value as Json, json};

use crate::flags::{self, Flag, Kind, Section, Verb};
use crate::run::{Rewards, Settings, Turns};
use crate::values::{Given, Origin, Raw, Values};

/// Name of the number of gradient leaves in a checkpoint. One leaf has no entry.
pub const LEAVES: &str = "gradient_leaves";

/// Settings by which a step is divided over processes and batches. Their product, [`PROMPTS`], binds a run.
const DIVIDED: [&str; 2] = ["per_device_train_batch_size", "gradient_accumulation_steps"];

/// A setting whose default has changed. A run that resumes keeps the value of its checkpoint unless the user gives another.
pub struct Earlier {
    /// Name of the setting.
    pub name: &'static str,
    /// Earlier default. It holds for checkpoints that do not name the setting.
    pub default: &'static str,
    /// Reason in the message to the user if the checkpoint does not name the setting.
    pub why: &'static str,
}

/// All settings whose default has changed.
pub const EARLIER: [Earlier; 2] = [
    Earlier {
        name: "orientation",
        default: "stored",
        why: "the checkpoint to resume from is of a program that did not turn pictures and clips, and the model keeps the same \
              pixels; `--orientation upright` turns them",
    },
    Earlier {
        name: "lora_dropout",
        default: "0.05",
        why: "the checkpoint to resume from is of a program with this default",
    },
];

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
    out.extend(unnamed(settings));
    out
}

/// Returns the fields of plans that have no setting of their own and that a program in Rust has changed.
fn unnamed(settings: &Settings) -> impl Iterator<Item = (String, Json)> {
    let Settings { prompts: PromptSettings { render, media, .. }, algorithm, run, .. } = settings;
    let usual = MediaSettings::default();
    let is_named = settings.model.teacher.is_some() || settings.prompts.privileged_context.is_some();
    let taught = !is_named && algorithm.loss.distillation != 0.0;
    let changed = [
        (!render.tools.is_empty(), "tools", json!(render.tools)),
        (render.now.is_some(), "time of the chat template", json!(render.now)),
        (media.seed != run.rows.seed, "seed of media", json!(media.seed)),
        (media.dynamic_sample != usual.dynamic_sample, "dynamic_sample", json!(media.dynamic_sample)),
        (media.shuffle_frames != usual.shuffle_frames, "shuffle_frames", json!(media.shuffle_frames)),
        (!algorithm.recall, "recall", json!(algorithm.recall)),
        (taught, "distillation", json!(algorithm.loss.distillation)),
        (taught && algorithm.loss.divergence.top_k() > 0, "divergence", json!(algorithm.loss.divergence)),
    ];
    changed
        .into_iter()
        .filter(|(is_changed, ..)| *is_changed)
        .map(|(_, name, value)| (name.to_owned(), value))
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
    let value = |changed: &Earlier| {
        let read = flags::find(changed.name).and_then(|flag| {
            Given::read(flag, &Raw::Arguments(vec![changed.default.to_owned()]), Origin::Default).ok()
        });
        read.map_or(Json::Null, |given| given.value.json())
    };
    own.chain(EARLIER.iter().map(|changed| (changed.name.to_owned(), value(changed)))).collect()
}

/// Returns the settings that never bind a checkpoint of this verb. Earlier versions stored some of them.
pub fn free(verb: Verb) -> Vec<&'static str> {
    let own = flags::all().filter(|flag| !flag.binds(verb)).map(|flag| flag.name);
    own.chain(DIVIDED).collect()
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
        let turns = algorithm.sampling.turns.map(|limits| Turns {
            environment: Some("an environment of the program".to_owned()),
            max_turns: limits.max_turns,
            max_tool_tokens: limits.max_answer_tokens,
            max_tool_images: limits.max_answer_media,
        });
        let options = RewardOptions { weights: weights.to_vec(), ..RewardOptions::default() };
        Self {
            algorithm: algorithm.clone(),
            optimizer: optimizer.clone(),
            selection: selection.clone(),
            run: run.clone(),
            prompts: prompts.clone(),
            rewards: Rewards { funcs: rewards, options, ..Self::default().rewards },
            turns: turns.unwrap_or_else(|| Self::default().turns),
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::flags::find;
    use crate::values::Value;

    /// The binding of a program's plans, and the plans as text.
    fn of(settings: &Settings) -> (Map<String, Json>, String) {
        let Settings { algorithm, optimizer, selection, run, prompts, .. } = settings;
        let plans = format!("{algorithm:?} {optimizer:?} {selection:?} {run:?} {prompts:?}");
        let own =
            Settings::of_plans(algorithm, optimizer, selection, run, prompts, (vec!["mine".to_owned()], &[]));
        (binding(&Values::of(&own), &own, Verb::Train, 1), plans)
    }

    /// A value of a setting other than this one.
    fn other(flag: &Flag, now: Option<&Value>) -> Option<Value> {
        let texts: Vec<String> = match flag.kind {
            Kind::Bool => vec!["true".into(), "false".into()],
            Kind::Int { min, max } => vec![(min + 1).min(max).to_string(), (min + 3).min(max).to_string()],
            Kind::Float { min, max } => {
                [0.5, 0.25, 1.5, 2.5].map(|x: f64| x.clamp(min, max).to_string()).to_vec()
            }
            Kind::Fraction => vec!["0.5".into(), "0.25".into()],
            Kind::Choice(names) | Kind::Switch(names) => {
                names().into_iter().map(|(name, _)| name.to_owned()).collect()
            }
            _ => return None,
        };
        let values = texts.iter().filter_map(|text| crate::explain::default_value(&flag.kind, text));
        values.into_iter().find(|value| Some(value) != now)
    }

    /// Whatever a binding setting changes in the plans of a program, under each recipe, its checkpoints notice.
    #[test]
    fn plans_that_differ_by_a_binding_setting_have_another_binding() {
        let mut seen = std::collections::BTreeSet::new();
        for recipe in RECIPES {
            let mut base = Settings { recipe, ..Settings::default() };
            base.algorithm.follow(recipe);
            let (bound, plans) = of(&base);
            for flag in flags::all().filter(|flag| flag.binds(Verb::Train) && !DIVIDED.contains(&flag.name)) {
                let Some(value) = other(flag, (flag.place.get)(&base).as_ref()) else { continue };
                let mut changed = base.clone();
                if (flag.place.set)(&mut changed, &value).is_err() {
                    continue;
                }
                let (now_bound, now) = of(&changed);
                if now != plans {
                    seen.insert(flag.name);
                    assert!(now_bound != bound, "{} under {}", flag.name, recipe.name);
                }
            }
        }
        assert!(seen.len() >= 50, "{seen:?}");
    }

    /// The program has a setting for everything, so its checkpoints have no entries beside them.
    #[test]
    fn settings_by_name_need_no_other_entries() {
        for given in
            [json!({}), json!({ "seed": 7 }), json!({ "data_seed": 7, "seed": 8, "environment": "zoom" })]
        {
            let Json::Object(given) = given else { unreachable!() };
            let resolved =
                crate::resolve(Verb::Train, crate::Layer::of(Verb::Train, given), Default::default());
            assert_eq!(unnamed(&resolved.unwrap().settings).collect::<Vec<_>>(), []);
        }
    }

    /// So they do for fields that have no setting of their own.
    #[test]
    fn plans_that_differ_in_a_field_without_a_setting_have_another_binding() {
        let bound = of(&Settings::default()).0;
        let changes: [fn(&mut Settings); 7] = [
            |s| s.algorithm.loss.distillation = 0.5,
            |s| s.prompts.render.tools.push(json!({ "type": "function" })),
            |s| s.prompts.media.seed = 7,
            |s| s.prompts.media.shuffle_frames = true,
            |s| s.algorithm.recall = false,
            |s| s.algorithm.sampling.turns = Some(Default::default()),
            |s| s.algorithm.loss.surrogate = Surrogate::Custom(omnigrpo_grpo::CustomTerm(|token| token.logp)),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut changed = Settings::default();
            change(&mut changed);
            assert!(of(&changed).0 != bound, "change {number}");
        }
        assert!(find("max_turns").is_some_and(|flag| flag.binds(Verb::Train)));
    }
}
