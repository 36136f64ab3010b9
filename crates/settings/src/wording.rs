//! Names of the libraries' settings for users of the program: the libraries name fields of plans, but users know flags.

use std::borrow::Cow;

use omnigrpo_guard::Setting;

use crate::flags::{self, Flag};

/// Names of the libraries' plans in their messages, and the corresponding places in [`Settings`](crate::Settings).
const PLANS: &[(&str, &str)] = &[
    ("AdamWConfig", "optimizer"),
    ("Algorithm", "algorithm"),
    ("ColumnNames", "read.columns"),
    ("EvalSchedule", "run.eval"),
    ("LoraConfig", "lora"),
    ("MediaSettings", "prompts.media"),
    ("PromptSettings", "prompts"),
    ("ReadOptions", "read"),
    ("ResumePlan", "run.resume"),
    ("RewardOptions", "rewards.options"),
    ("Roots", "data.roots"),
    ("RowPlan", "run.rows"),
    ("RunPlan", "run"),
    ("SamplingParams", "algorithm.sampling"),
    ("SavePlan", "run.save"),
    ("ScorerOptions", "rewards.scorers"),
    ("Selection", "selection"),
    ("SkipPolicy", "run.rows.skip"),
];

/// Lets all later messages of this process name flags.
pub fn name_flags() {
    omnigrpo_guard::name_settings_by(name);
}

/// Returns the name of a setting for users.
fn name(setting: Setting) -> Option<Cow<'static, str>> {
    let words = match (setting.plan, setting.field) {
        ("LoadOptions", "device") => "--device",
        ("LoadOptions", "dtype") => "--torch_dtype",
        ("LoadOptions", "quantization") => "--load_in_8bit, --load_in_4bit",
        ("PromptSettings", "max_completion_length") | ("RewardOptions", "max_completion_tokens") => {
            "--max_completion_length"
        }
        ("ReadOptions", "fetch") => "--allow_urls public",
        ("ResumeFrom", "Newest") => "auto",
        ("ResumeFrom", "Start") => "never",
        ("RunPlan", "sync_reference") => "--sync_ref_model",
        ("Division", "leaves") => "--gradient_leaves",
        ("Division", "sum") => "--gradient_sum",
        ("TrainSetup", "eval") => "--eval_file and --val_split_ratio",
        ("TrainSetup", "lock") => "--output_dir",
        ("TrainSetup", "reference_device") => "--reference_device",
        ("TrainSetup", "rewards") => "--reward_funcs",
        ("TrainSetup", "shuffled") => "--temporal_order_bonus",
        ("UrlOptions", "allow_private") => "--allow_urls all",
        _ => return flag(setting).map(|flag| format!("--{}", flag.name).into()),
    };
    Some(words.into())
}

/// Returns the flag of a plan's field.
pub fn flag(setting: Setting) -> Option<&'static Flag> {
    if setting.plan == "FamilyOption" {
        return flags::find(setting.field);
    }
    let (_, place) = PLANS.iter().find(|(plan, _)| *plan == setting.plan)?;
    flag_at(&format!("{place}.{}", setting.field))
}

/// Returns the flag that fills a field of [`Settings`](crate::Settings).
pub fn flag_at(place: &str) -> Option<&'static Flag> {
    flags::all().find(|flag| flag.place.field == place)
}

#[cfg(test)]
mod tests {
    use omnigrpo_models::{FAMILIES, FamilyOption};

    use super::*;

    /// Every setting that a message of a library can name has a name for users, whose flags exist.
    #[test]
    fn every_setting_has_a_name_of_flags_that_exist() {
        let libraries = [
            omnigrpo_data::SETTINGS,
            omnigrpo_fetch::SETTINGS,
            omnigrpo_models::SETTINGS,
            omnigrpo_rewards::SETTINGS,
            omnigrpo_scorers::SETTINGS,
            omnigrpo_train::SETTINGS,
        ];
        let of_families = FAMILIES
            .iter()
            .flat_map(|family| family.options)
            .map(|option| FamilyOption::setting(option.name));
        for setting in libraries.into_iter().flatten().copied().chain(of_families) {
            let name = name(setting).unwrap_or_else(|| panic!("{setting:?} has no flag"));
            let unknown =
                |word: &str| word.strip_prefix("--").is_some_and(|flag| flags::find(flag).is_none());
            assert!(!name.split([' ', ',']).any(unknown), "{setting:?} is {name}");
        }
    }

    /// The table in `docs/watch.md` equals the rules in the code, with flags.
    #[test]
    fn every_rule_is_documented_with_its_flag() {
        let docs =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/watch.md")).unwrap();
        let row = |rule: &omnigrpo_train::Rule| {
            format!(
                "| `{}` | {} | {} | {} | `{}` |",
                rule.name,
                rule.window,
                rule.doc,
                rule.formula,
                name(rule.setting).unwrap()
            )
        };
        let missing: Vec<String> =
            omnigrpo_train::RULES.iter().map(row).filter(|row| !docs.contains(row.as_str())).collect();
        assert!(missing.is_empty(), "docs/watch.md lacks {missing:#?}");
    }
}
