//! Names of the libraries' settings for users of the program: the libraries name fields of plans, but users know flags.

use std::borrow::Cow;

use omnigrpo_guard::Setting;

use crate::settings::flags::{self, Flag};

/// Names of the libraries' plans in their messages, and the corresponding places in [`Settings`](crate::settings::Settings).
const PLANS: &[(&str, &str)] = &[
    ("AdamWConfig", "optimizer"),
    ("Algorithm", "algorithm"),
    ("ColumnNames", "read.columns"),
    ("ExternalOptions", "rewards.options.external"),
    ("LoraConfig", "lora"),
    ("MediaSettings", "prompts.media"),
    ("PromptSettings", "prompts"),
    ("ReadOptions", "read"),
    ("RewardOptions", "rewards.options"),
    ("Roots", "data.roots"),
    ("RunPlan", "run"),
    ("SamplingParams", "algorithm.sampling"),
    ("ScorerOptions", "rewards.scorers"),
    ("Selection", "selection"),
    ("SkipPolicy", "run.skip"),
];

/// Names that do not simply correspond to a field of a plan.
const OTHERS: &[(&str, &str)] = &[
    ("LoadOptions::dtype", "--torch_dtype"),
    ("LoadOptions::quantization", "--load_in_8bit, --load_in_4bit"),
    ("PromptSettings::max_completion_length", "--max_completion_length"),
    ("ReadOptions::fetch", "--allow_urls public"),
    ("ResumeFrom::Newest", "auto"),
    ("ResumeFrom::Start", "never"),
    ("RewardOptions::max_completion_tokens", "--max_completion_length"),
    ("TrainSetup::eval", "--eval_file and --val_split_ratio"),
    ("TrainSetup::lock", "--output_dir"),
    ("TrainSetup::rewards", "--reward_funcs"),
    ("TrainSetup::shuffled", "--temporal_order_bonus"),
    ("UrlOptions::allow_private", "--allow_urls all"),
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
        ("TrainSetup", "eval") => "--eval_file and --val_split_ratio",
        ("TrainSetup", "lock") => "--output_dir",
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

/// Replaces fields in a library's message by flags.
pub fn worded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("::") {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let begin = rest[..at].rfind(|c: char| !is_name(c)).map_or(0, |i| i + 1);
        let end_of_name =
            |from: usize| rest[from..].find(|c: char| !is_name(c)).map_or(rest.len(), |i| from + i);
        let mut end = end_of_name(at + 2);
        // A nested field: `MediaSettings::image.max_pixels`. A full stop before a space ends a sentence.
        while rest[end..].starts_with('.') && end_of_name(end + 1) > end + 1 {
            end = end_of_name(end + 1);
        }
        match flag_of(&rest[begin..at], &rest[at + 2..end]) {
            Some(flag) => out.extend([&rest[..begin], &flag]),
            None => out.push_str(&rest[..end]),
        }
        rest = &rest[end..];
    }
    out + rest
}

/// Returns the flag of a plan's field.
fn flag_of(plan: &str, field: &str) -> Option<String> {
    let whole = format!("{plan}::{field}");
    if let Some((_, words)) = OTHERS.iter().find(|(name, _)| *name == whole) {
        return Some((*words).to_owned());
    }
    if plan == "FamilyOption" {
        return flags::find(field).map(|flag| format!("--{}", flag.name));
    }
    let (_, place) = PLANS.iter().find(|(name, _)| *name == plan)?;
    flag_at(&format!("{place}.{field}")).map(|flag| format!("--{}", flag.name))
}

/// Returns the flag that fills a field of [`Settings`](crate::settings::Settings).
pub fn flag_at(place: &str) -> Option<&'static Flag> {
    flags::all().find(|flag| flag.place.field == place)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use omnigrpo_models::FAMILIES;

    use super::*;

    /// Every setting that a message of a library can name has a name for users, whose flags exist.
    #[test]
    fn every_setting_has_a_name_of_flags_that_exist() {
        let libraries = [
            omnigrpo_data::SETTINGS,
            omnigrpo_fetch::SETTINGS,
            omnigrpo_models::SETTINGS,
            omnigrpo_observe::SETTINGS,
            omnigrpo_rewards::SETTINGS,
            omnigrpo_scorers::SETTINGS,
            omnigrpo_train::SETTINGS,
        ];
        let of_families = FAMILIES.iter().flat_map(|family| family.options);
        let of_families = of_families.map(|option| omnigrpo_models::FamilyOption::setting(option.name));
        for setting in libraries.into_iter().flatten().copied().chain(of_families) {
            let name = name(setting).unwrap_or_else(|| panic!("{setting:?} has no flag"));
            let unknown =
                |word: &str| word.strip_prefix("--").is_some_and(|flag| flags::find(flag).is_none());
            assert!(!name.split([' ', ',']).any(unknown), "{setting:?} is {name}");
        }
    }

    #[test]
    fn fields_become_flags_and_other_text_stays() {
        for (said, told) in [
            ("LoraConfig::targets \"x\": no layer", "--lora_target_modules \"x\": no layer"),
            (
                "lower RunPlan::max_steps, or AdamWConfig::learning_rate",
                "lower --max_steps, or --learning_rate",
            ),
            ("RunPlan::resume ResumeFrom::Start", "--resume_from_checkpoint never"),
            (
                "in std::io::Error, Selection::nothing and a::b",
                "in std::io::Error, Selection::nothing and a::b",
            ),
            ("::x Roots::images", "::x --image_folders"),
            ("give FamilyOption::bert", "give --bert"),
            (
                "lower MediaSettings::image.max_pixels. Or MediaSettings::video.nothing.",
                "lower --max_pixels. Or MediaSettings::video.nothing.",
            ),
            ("", ""),
        ] {
            assert_eq!(worded(said), told);
        }
    }

    /// The table in `docs/watch.md` equals the rules in the code, with flags.
    #[test]
    fn every_rule_is_documented_with_its_flag() {
        let docs =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/watch.md")).unwrap();
        let row = |rule: &omnigrpo_observe::Rule| {
            format!(
                "| `{}` | {} | {} | `{}` |",
                rule.name,
                rule.window,
                rule.doc,
                name(rule.setting).unwrap()
            )
        };
        let missing: Vec<String> =
            omnigrpo_observe::RULES.iter().map(row).filter(|row| !docs.contains(row.as_str())).collect();
        assert!(missing.is_empty(), "docs/watch.md lacks {missing:#?}");
    }

    /// In the sources of the libraries, no line names a flag, and every field that a message names has its flag.
    #[test]
    fn libraries_speak_of_fields_and_each_has_a_flag() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let libraries = std::fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path());
        let libraries = libraries.filter(|path| !path.ends_with("omnigrpo"));
        let mut folders: Vec<_> = libraries.map(|path| path.join("src")).filter(|src| src.is_dir()).collect();
        assert!(folders.len() > 15, "{folders:?}");
        let mut named = 0;
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                // The page of a run names flags, because it is for users of the program.
                if path.extension().is_none_or(|extension| extension != "rs") {
                    continue;
                }
                let text = std::fs::read_to_string(&path).unwrap();
                for line in text.lines().take_while(|line| !line.contains("#[cfg(test)]")) {
                    for (at, dashes) in line.match_indices("--") {
                        let word = &line[at + dashes.len()..];
                        let name = word.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next();
                        let flag = name.filter(|name| !name.is_empty()).and_then(flags::find);
                        assert!(flag.is_none_or(|flag| flag.positional), "{}: {line}", path.display());
                    }
                    if line.trim_start().starts_with("//") {
                        continue;
                    }
                    // Messages are between quotes. A continuation line has no quote at its beginning.
                    for piece in line.split('"').skip(usize::from(!line.trim_start().starts_with('"'))) {
                        for (plan, field) in piece.split_whitespace().filter_map(|word| word.split_once("::"))
                        {
                            let plan = plan.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
                            let field =
                                field.split(|c: char| !c.is_ascii_alphanumeric() && !"_.".contains(c)).next();
                            let field = field.map(|field| field.trim_end_matches('.'));
                            if PLANS.iter().any(|(name, _)| *name == plan) {
                                let field = field.unwrap_or_default();
                                // The name is composed at run time: `Roots::{kind}s`.
                                if field.is_empty() {
                                    continue;
                                }
                                named += 1;
                                // Code between two strings of a line looks the same, but its name begins with a capital letter or
                                // is called.
                                let known =
                                    flag_of(plan, field).is_some() || piece.contains(&format!("{field}("));
                                assert!(known, "{}: {plan}::{field} in {line}", path.display());
                            }
                        }
                    }
                }
            }
        }
        assert!(named >= 20, "{named}");
    }
}
