//! The table of flags, with one row per setting.
//!
//! The parser, `--help`, the keys of `--config` files and presets, `--print_config`, `docs/generated/flags.md` and "did you
//! mean" all use this table. Names are those of `transformers` and TRL, with underscores. The names used by the source
//! systems are aliases. A row names the field of [`Settings`] that it fills. Most are fields of a library's plan, whose
//! default is that of the library.

mod data;
mod evaluation;
mod family;
mod io;
mod logging;
mod loss;
mod media;
mod model;
mod optimizer;
mod program;
mod prompt;
mod rewards;
mod rollout;
mod run;
mod verb;

pub use verb::Verb;

use std::collections::HashMap;
use std::sync::LazyLock;

use crate::Settings;
use crate::explain;
use crate::problem::Problem;
use crate::values::{Value, take};

use verb::Verb::{
    Bench, Convert, DataCheck, DataConvert, DataShow, Demo, Doctor, Eval, Export, Generate, Plan, Push,
    RewardsList, RewardsRun, RewardsTry, Score, Serve, Sft, Train,
};

/// Every setting, by its section in the help.
pub const TABLE: &[(Section, &[Flag])] = &[
    (Section::Io, io::FLAGS),
    (Section::Model, model::FLAGS),
    (Section::Data, data::FLAGS),
    (Section::Media, media::FLAGS),
    (Section::Prompt, prompt::FLAGS),
    (Section::Rewards, rewards::FLAGS),
    (Section::Rollout, rollout::FLAGS),
    (Section::Loss, loss::FLAGS),
    (Section::Optimizer, optimizer::FLAGS),
    (Section::Run, run::FLAGS),
    (Section::Evaluation, evaluation::FLAGS),
    (Section::Logging, logging::FLAGS),
    (Section::Program, program::FLAGS),
    (Section::Family, family::FLAGS),
];

/// Returns every setting, in the order of the help.
pub fn all() -> impl Iterator<Item = &'static Flag> {
    TABLE.iter().flat_map(|(_, rows)| rows.iter())
}

/// Returns the flag with this name or alias. Dashes count as underscores.
pub fn find(name: &str) -> Option<&'static Flag> {
    static FLAGS: LazyLock<HashMap<&str, &Flag>> = LazyLock::new(|| {
        all()
            .flat_map(|flag| flag.aliases.iter().chain([&flag.name]).map(move |name| (*name, flag)))
            .collect()
    });
    FLAGS.get(name.replace('-', "_").as_str()).copied()
}

/// Names and their help.
pub type Names = fn() -> Vec<(&'static str, &'static str)>;

/// Type of a setting's value, which determines how text is parsed.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// A switch: `--flag`, or true, false, yes, no, 1, 0.
    Bool,
    /// An integer within bounds, both included.
    Int {
        /// Smallest value.
        min: i64,
        /// Largest value.
        max: i64,
    },
    /// A finite number within bounds, both included.
    Float {
        /// Smallest value.
        min: f64,
        /// Largest value.
        max: f64,
    },
    /// A share of 1, written `0.05` or `5%`.
    Fraction,
    /// Any text.
    Text,
    /// A file or directory.
    Path,
    /// One of these names.
    Choice(Names),
    /// One of these names. `true`, and the setting without a value, is the second of them, and `false` the first.
    Switch(Names),
    /// Several of these names, separated by spaces or commas.
    Choices(Names),
    /// Words, separated by spaces or commas.
    Words,
    /// Numbers, separated by spaces or commas.
    Floats,
    /// Paths, separated by spaces (several arguments) or one of these characters. A path that exists is never split.
    Paths(&'static [char]),
    /// Names of rewards, split like `Words`. A program (`cmd:…`) or an address (`http://…`) is never split.
    Specs,
    /// Texts, one per argument.
    Texts,
    /// A JSON object, or a mapping in YAML.
    Object,
}

impl Kind {
    /// Returns true if several values may be given.
    pub const fn is_list(&self) -> bool {
        matches!(
            self,
            Self::Choices(_) | Self::Words | Self::Floats | Self::Paths(_) | Self::Specs | Self::Texts
        )
    }
}

/// A section of the help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Input and output of the verb.
    Io,
    /// Checkpoint and precision.
    Model,
    /// Sources of rows.
    Data,
    /// Sizes and frames of images and videos.
    Media,
    /// Conversion of rows to prompts.
    Prompt,
    /// Scoring of completions.
    Rewards,
    /// Sampling of completions.
    Rollout,
    /// The GRPO objective.
    Loss,
    /// Trained parts and learning rates.
    Optimizer,
    /// Length, checkpoints, resuming.
    Run,
    /// Evaluation.
    Evaluation,
    /// Metrics and console.
    Logging,
    /// The program itself.
    Program,
    /// Settings that only one family of models reads.
    Family,
}

impl Section {
    /// Every section, in the order of the help.
    pub const ALL: &'static [Self] = &[
        Self::Io,
        Self::Model,
        Self::Data,
        Self::Media,
        Self::Prompt,
        Self::Rewards,
        Self::Rollout,
        Self::Loss,
        Self::Optimizer,
        Self::Run,
        Self::Evaluation,
        Self::Logging,
        Self::Program,
        Self::Family,
    ];

    /// Returns the settings of the section.
    pub fn rows(self) -> &'static [Flag] {
        TABLE.iter().find(|(section, _)| *section == self).map_or(&[], |(_, rows)| rows)
    }

    /// Returns the heading.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Io => "Input and output",
            Self::Model => "Model",
            Self::Data => "Data",
            Self::Media => "Images and videos",
            Self::Prompt => "Prompt",
            Self::Rewards => "Rewards",
            Self::Rollout => "Rollout",
            Self::Loss => "Loss",
            Self::Optimizer => "Optimizer",
            Self::Run => "Run and checkpoints",
            Self::Evaluation => "Evaluation",
            Self::Logging => "Logging",
            Self::Program => "Program",
            Self::Family => "Settings of one model family",
        }
    }
}

/// Field for a setting's value.
#[derive(Clone, Copy)]
pub struct Place {
    /// Field of [`Settings`] that stores the value, or the common prefix of several fields; empty if there is none.
    pub field: &'static str,
    /// Stores the value.
    pub set: fn(&mut Settings, &Value) -> Result<(), Problem>,
    /// Reads the value; `None` if it is unset.
    pub get: fn(&Settings) -> Option<Value>,
}

/// Defines the place of a setting that fills one field.
macro_rules! at {
    ($($field:ident).+) => {
        Place {
            field: stringify!($($field).+),
            set: |settings, value| {
                settings.$($field).+ = crate::values::take(value)?;
                Ok(())
            },
            get: |settings| crate::values::Field::value(&settings.$($field).+),
        }
    };
}
use at;

/// Defines the place of an option of the model's family ([`omnigrpo_models::FamilyRow::options`]).
macro_rules! of_family {
    ($name:literal) => {
        Place {
            field: "",
            set: |settings, value| {
                settings.family.insert($name.to_owned(), value.json());
                Ok(())
            },
            get: |_| None,
        }
    };
}
use of_family;

/// Place of a setting that is applied before the others, or together with them at the end.
const NOWHERE: Place = Place { field: "", set: |_, _| Ok(()), get: |_| None };

/// Wraps a name as a value.
fn text(name: &str) -> Option<Value> {
    Some(Value::Text(name.to_owned()))
}

/// Function that returns the reason why a setting has no effect in a run of that verb, or `None` if it has one.
///
/// If a setting has no effect, giving it by flag or file with a value other than its default is an error, because the user
/// expects an effect. A setting from a preset is dropped instead.
pub type Idle = fn(&Settings, Verb) -> Option<&'static str>;

/// One row of the table.
#[derive(Clone, Copy)]
pub struct Flag {
    /// Canonical name, with underscores and without leading dashes.
    pub name: &'static str,
    /// Other accepted names.
    pub aliases: &'static [&'static str],
    /// Type of the value.
    pub kind: Kind,
    /// Destination of the value.
    pub place: Place,
    /// Description of the behaviour without a value.
    pub unset: Option<&'static str>,
    /// Defaults that differ for some verbs.
    pub verb_defaults: &'static [(Verb, &'static str)],
    /// Help text: effect, unit and reason.
    pub help: &'static str,
    /// Verbs that take the setting.
    pub verbs: &'static [Verb],
    /// Values of the setting if it is given without one; a value then follows an equals sign.
    pub alone: &'static [(Verb, &'static str)],
    /// Verbs that require the setting.
    pub required: &'static [Verb],
    /// True for a positional argument.
    pub positional: bool,
    /// True if the setting is allowed only on the command line, not in a file.
    pub command_line_only: bool,
    /// True if the setting is applied first, because defaults of others depend on it.
    pub first: bool,
    /// True if the default comes from the recipe.
    pub of_recipe: bool,
    /// Verbs whose runs can resume with another value of the setting. Such a setting names the location of inputs (which are
    /// identified by content), the amount of work at a time or the length of a run, and does not change results.
    pub free: &'static [Verb],
    /// True if the processes of a run may have different values of the setting. Such a setting names the location of inputs (which
    /// are compared by content), belongs to a machine or its console, or is used by the first process only.
    pub per_rank: bool,
    /// True if the setting is about media or their towers, outside of [`Section::Media`].
    pub of_media: bool,
    /// Function that returns the reason why the setting has no effect.
    pub idle: Idle,
    /// Function that returns the reason if another setting overrides this one in `transformers`. Scripts of that trainer give
    /// both, so the program prints a note instead of an error.
    pub overridden: Idle,
}

impl std::fmt::Debug for Flag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flag").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Value of a setting that the user did not give.
pub enum Fallback {
    /// This value.
    Is(Value),
    /// No value; the text describes the behaviour.
    Unset(&'static str),
}

impl Flag {
    /// Returns true if the verb takes the setting. `plan` and `init` take the settings of `train`.
    pub fn is_of(&self, verb: Verb) -> bool {
        let of_run = self.verbs.contains(&verb.runs()) && !(verb != verb.runs() && self.name == "dry_run");
        of_run || self.verbs.contains(&verb)
    }

    /// Returns true if a run of the verb resumes only with the same value of the setting.
    pub fn binds(&self, verb: Verb) -> bool {
        self.is_of(verb) && !self.free.contains(&verb)
    }

    /// Returns true if the setting has no effect on a model that reads text only.
    pub fn is_of_media(&self) -> bool {
        self.of_media || Section::Media.rows().iter().any(|flag| flag.name == self.name)
    }

    /// Returns the default for a verb.
    pub fn default_for(&self, verb: Verb) -> Fallback {
        let own = self.verb_defaults.iter().find(|(of, _)| *of == verb.runs());
        match own.and_then(|(_, text)| explain::default_value(&self.kind, text)) {
            Some(value) => Fallback::Is(value),
            None => self.default(),
        }
    }

    /// Returns the library's default.
    pub fn default(&self) -> Fallback {
        match (self.unset, (self.place.get)(&Settings::default())) {
            (None, Some(value)) => Fallback::Is(value),
            (words, _) => Fallback::Unset(words.unwrap_or_default()),
        }
    }

    const fn help(mut self, help: &'static str) -> Self {
        self.help = help;
        self
    }

    const fn alias(mut self, aliases: &'static [&'static str]) -> Self {
        self.aliases = aliases;
        self
    }

    const fn unset(mut self, words: &'static str) -> Self {
        self.unset = Some(words);
        self
    }

    const fn per_verb(mut self, defaults: &'static [(Verb, &'static str)]) -> Self {
        self.verb_defaults = defaults;
        self
    }

    /// Sets the values that the setting has if it is given without one.
    const fn alone(mut self, values: &'static [(Verb, &'static str)]) -> Self {
        self.alone = values;
        self
    }

    const fn required(mut self, verbs: &'static [Verb]) -> Self {
        self.required = verbs;
        self
    }

    const fn positional(mut self) -> Self {
        self.positional = true;
        self
    }

    const fn command_line_only(mut self) -> Self {
        self.command_line_only = true;
        self
    }

    const fn first(mut self) -> Self {
        self.first = true;
        self
    }

    const fn of_recipe(mut self) -> Self {
        self.of_recipe = true;
        self
    }

    const fn free(mut self, verbs: &'static [Verb]) -> Self {
        self.free = verbs;
        self
    }

    const fn per_rank(mut self) -> Self {
        self.per_rank = true;
        self
    }

    const fn of_media(mut self) -> Self {
        self.of_media = true;
        self
    }

    const fn idle(mut self, when: Idle) -> Self {
        self.idle = when;
        self
    }

    const fn overridden(mut self, when: Idle) -> Self {
        self.overridden = when;
        self
    }
}

/// Returns a row. Its methods add help and options.
const fn row(name: &'static str, kind: Kind, place: Place, verbs: &'static [Verb]) -> Flag {
    Flag {
        name,
        aliases: &[],
        kind,
        place,
        unset: None,
        verb_defaults: &[],
        alone: &[],
        help: "",
        verbs,
        required: &[],
        positional: false,
        command_line_only: false,
        first: false,
        of_recipe: false,
        free: &[],
        per_rank: false,
        of_media: false,
        idle: |_, _| None,
        overridden: |_, _| None,
    }
}

const fn int(min: i64, max: i64) -> Kind {
    Kind::Int { min, max }
}

const fn float(min: f64, max: f64) -> Kind {
    Kind::Float { min, max }
}

/// Upper bound of sizes and counts without a natural limit: far above real use, below overflow.
pub(crate) const MANY: i64 = 1 << 40;
/// Upper bound of 32-bit counts.
pub(crate) const COUNT: i64 = 1 << 30;
/// Upper bound of rates and weights without a natural limit.
pub(crate) const BIG: f64 = 1e9;

/// Verbs that take a file of settings: all that do not only show runs or write files for shells and editors.
pub(crate) const SET: &[Verb] = &[
    Train,
    Plan,
    Sft,
    Generate,
    Score,
    Eval,
    Serve,
    DataCheck,
    DataShow,
    DataConvert,
    RewardsList,
    RewardsRun,
    RewardsTry,
    Export,
    Push,
    Doctor,
    Demo,
    Bench,
];
/// Verbs with the settings of a family of models.
pub(crate) const FAMILY: &[Verb] =
    &[Train, Sft, Generate, Score, Eval, Serve, DataCheck, DataShow, Export, Doctor, Bench, RewardsTry];
/// Verbs that load a model by flag, or only its processor if a model is given.
pub(crate) const MODEL: &[Verb] =
    &[Train, Sft, Generate, Score, Eval, DataCheck, DataShow, Export, Doctor, Bench, RewardsRun, RewardsTry];
/// Verbs that choose the precision of the weights.
pub(crate) const PRECISE: &[Verb] =
    &[Train, Sft, Generate, Score, Eval, Serve, Convert, Export, Demo, Bench, RewardsTry];
/// Verbs that multiply with the weights of a model.
pub(crate) const MULTIPLIES: &[Verb] =
    &[Train, Sft, Generate, Score, Eval, Serve, Doctor, Demo, Bench, RewardsTry];
/// Verbs with a choice of device.
pub(crate) const PLACED: &[Verb] = &[Train, Sft, Generate, Score, Eval, Serve, Demo, Bench, RewardsTry];
/// Verbs that may use a medium more than once.
pub(crate) const CACHES: &[Verb] = &[Train, Sft, Generate, Score, Eval, Demo, RewardsTry];
/// Verbs that take an adapter.
pub(crate) const ADAPTED: &[Verb] = &[Train, Sft, Generate, Score, Eval, Serve, Export, RewardsTry];
/// Verbs that can quantise a model.
pub(crate) const QUANTISED: &[Verb] = &[Train, Sft, Generate, Score, Eval, Serve, RewardsTry];
/// Verbs that train the user's model.
pub(crate) const TUNES: &[Verb] = &[Train, Sft];
/// Verbs that read training rows.
pub(crate) const TRAIN_ROWS: &[Verb] = &[Train, Sft, DataCheck, DataShow, RewardsTry];
/// Verbs that read evaluation rows.
pub(crate) const EVAL_ROWS: &[Verb] = &[Train, Sft, Eval, DataCheck, DataShow];
/// Verbs that read rows or messages with media.
pub(crate) const ROWS: &[Verb] = &[Train, Sft, Generate, Score, Eval, Serve, DataCheck, DataShow, RewardsTry];
/// Verbs that read rows of any format.
pub(crate) const READS_ROWS: &[Verb] =
    &[Train, Sft, Generate, Score, Eval, DataCheck, DataShow, RewardsRun, RewardsTry];
/// Verbs that may fetch media.
pub(crate) const FETCHES: &[Verb] =
    &[Train, Sft, Generate, Score, Eval, Serve, DataCheck, DataShow, RewardsRun, RewardsTry];
/// Verbs that can skip bad rows.
pub(crate) const BAD_ROWS: &[Verb] = &[Train, Sft, Eval];
/// Verbs with the GRPO objective.
pub(crate) const GRPO: &[Verb] = &[Train, Demo];
/// Verb that takes the workload of `bench`.
pub(crate) const BENCH: &[Verb] = &[Bench];
/// Verbs that score completions with rewards.
pub(crate) const REWARDED: &[Verb] = &[Train, Sft, Eval, Demo, RewardsRun, RewardsTry];
/// Verbs that name their rewards with `reward_funcs`.
pub(crate) const NAMES_REWARDS: &[Verb] = &[Train, Sft, Eval, DataCheck, Demo, RewardsRun];
/// Verbs that use rewards, also on rows without completions.
pub(crate) const ASKS_REWARDS: &[Verb] = &[Train, Sft, Eval, DataCheck, Demo, RewardsRun, RewardsTry];
/// Verbs that sample.
pub(crate) const SAMPLES: &[Verb] = &[Train, Generate, Eval, Serve, Demo, RewardsTry];
/// Verbs that read or write completions of bounded length.
pub(crate) const BOUNDED: &[Verb] =
    &[Train, Sft, Generate, Eval, Serve, DataCheck, DataShow, RewardsRun, Demo, RewardsTry];
/// Verbs that take optimizer steps.
pub(crate) const STEPS: &[Verb] = &[Train, Sft, Demo];
/// Verbs that use random numbers.
pub(crate) const RANDOM: &[Verb] = &[Train, Sft, Generate, Eval, RewardsRun, Demo, Bench, RewardsTry];
/// Verbs that train with checkpoints.
pub(crate) const LOOP: &[Verb] = &[Train, Sft, Demo];
/// Verbs that summarise scored completions.
pub(crate) const SUMS_UP: &[Verb] = &[Train, Sft, Eval, RewardsRun];
/// Verbs whose work several processes divide.
pub(crate) const DIVIDES: &[Verb] = &[Train, Sft, Generate, Eval];
/// Verbs that evaluate during training.
pub(crate) const PERIODIC: &[Verb] = &[Train, Sft];

/// Verbs that limit the length of prompts.
pub(crate) const RUNS_ROWS: &[Verb] = &[Train, Sft, Generate, Score, Eval, Serve, DataCheck, DataShow];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::config;
    use crate::environment::Environment;
    use crate::values::{Origin, Values};

    #[test]
    fn names_are_unique_and_lower_case() {
        let mut seen = BTreeSet::new();
        for flag in all() {
            for name in std::iter::once(&flag.name).chain(flag.aliases) {
                assert!(seen.insert(*name), "`{name}` names two settings");
                assert!(
                    name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'),
                    "{name}"
                );
            }
        }
        let sections: Vec<Section> = TABLE.iter().map(|(section, _)| *section).collect();
        assert_eq!(sections, Section::ALL);
    }

    #[test]
    fn rows_are_complete_and_every_required_verb_takes_the_flag() {
        for flag in all() {
            assert!(flag.required.iter().all(|v| flag.verbs.contains(v)), "{}", flag.name);
            for (verb, text) in flag.verb_defaults {
                assert!(flag.verbs.contains(verb), "{}", flag.name);
                assert!(explain::default_value(&flag.kind, text).is_some(), "{} {text}", flag.name);
            }
            assert!(!flag.verbs.is_empty() && flag.help.ends_with('.'), "{}", flag.name);
        }
    }

    /// A default from a library has the row's kind, can be read back as written, and is stored in its own field. A setting
    /// without a default describes its behaviour in words.
    #[test]
    fn defaults_are_the_libraries_and_fit_their_kind() {
        let untouched = Settings::default();
        for verb in Verb::ALL {
            let values = Values::defaults(*verb);
            let settings = Settings::from_values(&values, Environment::default()).unwrap();
            for flag in all().filter(|flag| flag.verb_defaults.iter().all(|(of, _)| of != verb)) {
                let (name, there) = (flag.name, (flag.place.get)(&untouched));
                match flag.default() {
                    Fallback::Is(value) => {
                        let written =
                            config::parse(&format!("{name}: {}", explain::yaml(&value)), "", |_| {
                                Origin::Flag
                            });
                        if !flag.command_line_only {
                            assert_eq!(written.given[0].value, value, "{name}");
                        }
                        assert_eq!(Some(value), there, "{name}");
                        if name != "reward_weights" {
                            assert_eq!((flag.place.get)(&settings), there, "{name}");
                        }
                    }
                    Fallback::Unset(_) => {
                        assert!(flag.unset.is_some(), "`{name}` has no default and no words for it")
                    }
                }
            }
        }
    }

    /// Every value that the kind of a row accepts can be stored in the row's field.
    #[test]
    fn every_row_takes_the_values_of_its_kind() {
        for flag in all() {
            let samples: Vec<String> = match flag.kind {
                Kind::Bool => vec!["true".into(), "false".into()],
                Kind::Int { min, max } => vec![min.to_string(), max.to_string()],
                Kind::Float { min, max } => vec![min.to_string(), max.to_string()],
                Kind::Fraction => vec!["0".into(), "5%".into()],
                Kind::Choice(names) | Kind::Choices(names) | Kind::Switch(names) => {
                    names().into_iter().map(|(name, _)| name.to_owned()).collect()
                }
                Kind::Floats => vec!["1 2.5".into()],
                Kind::Object => vec!["{\"a\": 1}".into()],
                _ if flag.name.ends_with("device") => vec!["cpu".into(), "cuda".into(), "cuda:7".into()],
                _ if flag.name == "gpu_memory" => vec!["24GB".into(), "22.5GiB".into(), "800MB".into()],
                _ if flag.name == "gpu_rates" => vec!["rtx-4090".into(), "165,1008".into()],
                _ if flag.name == "teacher_prompt_template" => {
                    vec!["{prompt} Hint: {privileged_context}".into()]
                }
                _ if flag.name == "host" => vec!["0.0.0.0".into(), "::1".into()],
                _ if flag.name == "keep" => vec!["best".into(), "0.5".into()],
                Kind::Words => vec!["some words".into()],
                _ => vec!["some".into()],
            };
            for text in samples {
                let value = explain::default_value(&flag.kind, &text).unwrap();
                (flag.place.set)(&mut Settings::default(), &value)
                    .unwrap_or_else(|e| panic!("{} {text}: {e}", flag.name));
            }
        }
    }

    /// A number in a mapping of a file is finite too, at every depth.
    #[test]
    fn numbers_in_mappings_are_finite() {
        let read =
            |text: &str| config::parse(&format!("chat_template_kwargs: {text}"), "f", |_| Origin::Flag);
        for text in ["{a: .nan}", "{a: {b: [1, .inf]}}", "{a: -.Inf}"] {
            let said: String = read(text).problems.iter().map(ToString::to_string).collect();
            let named = ["`chat_template_kwargs`", "finite numbers"].iter().all(|part| said.contains(part));
            assert!(named, "{text}: {said}");
        }
        let layer = read("{a: 1, b: [true, null, -2.5, x], c: {d: 3}}");
        assert!(layer.problems.is_empty(), "{layer:?}");
        let expected = serde_json::json!({"a": 1, "b": [true, null, -2.5, "x"], "c": {"d": 3}});
        assert_eq!(layer.given[0].value.json(), expected);
    }

    /// YAML reads some names without quotes as true and false.
    #[test]
    fn choices_may_be_words_that_yaml_reads_as_true_and_false() {
        for (line, expected) in [
            ("save_strategy: no", "no"),
            ("save_strategy: NO", "no"),
            ("think: off", "off"),
            ("think: on", "on"),
            ("allow_urls: off", "off"),
            ("eval_strategy: \"no\"", "no"),
        ] {
            let layer = config::parse(line, "f", |_| Origin::Flag);
            assert!(layer.problems.is_empty(), "{line}: {layer:?}");
            assert_eq!(layer.given[0].value, Value::Text(expected.to_owned()), "{line}");
        }
        // A choice without such a name has no false.
        assert_eq!(config::parse("loss_type: no", "f", |_| Origin::Flag).problems.len(), 1);
    }

    #[test]
    fn presets_use_canonical_names_and_say_where_each_value_comes_from() {
        for (name, _) in crate::presets::words() {
            for text in crate::presets::texts(name) {
                let layer = config::parse(text, name, |_| Origin::Preset(name.to_string()));
                assert!(layer.problems.is_empty() && layer.dropped.is_empty(), "{name}: {layer:?}");
                for line in text.lines().filter(|line| !line.starts_with('#')) {
                    let (key, rest) = line.split_once(':').unwrap();
                    assert_eq!(find(key).unwrap().name, key, "{name}");
                    assert!(rest.contains(" # "), "{name}: `{key}` has no source");
                }
            }
        }
    }
}
