//! The table of built-in rewards, and how a list of names becomes a [`RewardSet`].

use crate::error::suggestion;
use crate::{Reward, RewardError, RewardOptions, RewardSet, accuracy, format, random};

/// One built-in reward.
#[derive(Debug)]
pub struct RewardRow {
    /// Name on the command line and in metrics.
    pub name: &'static str,
    /// One line of help.
    pub doc: &'static str,
    /// Where the rule comes from.
    pub source: &'static str,
    /// Makes it from the settings.
    pub make: fn(&RewardOptions) -> Result<Box<dyn Reward>, RewardError>,
}

/// Every built-in reward. Help, documentation and the suites over all rewards iterate it.
pub fn table() -> &'static [RewardRow] {
    TABLE
}

static TABLE: &[RewardRow] = &[
    RewardRow {
        name: "accuracy",
        doc: "is the answer right, compared as --accuracy_mode or the row's column says",
        source: "R1-V, qwen-vl-finetune, VLM-R1",
        make: accuracy::reward,
    },
    RewardRow {
        name: "format",
        doc: "does the completion have the tags asked for, as --format_mode says",
        source: "R1-V, qwen-vl-finetune, ViVQA-X",
        make: format::reward,
    },
    RewardRow {
        name: "random",
        doc: "a seeded number in [0, 1), as a baseline and for benchmarks",
        source: "own",
        make: random::reward,
    },
];

/// Makes the rewards of a run. A spec is a name of the [`table`], `cmd:"program arguments"`, `http://…`, `https://…`
/// or `judge:http(s)://…`; `name=spec` gives one of the last four a name of its own.
///
/// # Errors
/// Unknown names, settings a reward cannot work with, weights that do not fit.
pub fn build(specs: &[String], options: &RewardOptions) -> Result<RewardSet, RewardError> {
    let rewards = specs.iter().map(|spec| one(spec.trim(), options)).collect::<Result<Vec<_>, _>>()?;
    RewardSet::new(rewards, &options.weights)
}

fn one(spec: &str, options: &RewardOptions) -> Result<Box<dyn Reward>, RewardError> {
    if let Some(row) = TABLE.iter().find(|row| row.name == spec) {
        return (row.make)(options);
    }
    let names = || TABLE.iter().map(|row| row.name);
    Err(RewardError::UnknownReward {
        name: spec.to_owned(),
        hint: suggestion(spec, names()),
        known: names().collect::<Vec<_>>().join(", "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_get_a_suggestion() {
        let error = build(&["acuracy".to_owned()], &RewardOptions::default()).unwrap_err().to_string();
        assert!(error.contains("did you mean `accuracy`"), "{error}");
    }
}
