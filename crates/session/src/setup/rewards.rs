//! The rewards of a command and their references.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use omnigrpo_data::Dataset;
use omnigrpo_guard::{inside, told};
use omnigrpo_models::{FrozenWeights, PromptBuilder};
use omnigrpo_rewards::{Compat, Corpus, Reward, RewardSet, opened_tag, spec_files};
use omnigrpo_scorers::{RewardModel, ScorerOptions};
use omnigrpo_train::{Peer, Signals};

use super::hub::named_dir;
use omnigrpo_settings::problem::Problem;
use omnigrpo_settings::{Settings, of_caller};

/// Functions and signals that a program hands in, which runs a command in its process.
#[derive(Clone, Default)]
pub struct Functions {
    /// Function that returns the reward `caller:NAME` for a name.
    pub rewards: Option<Arc<MakeReward>>,
    /// Environment `caller:NAME`.
    pub environment: Option<Arc<dyn Peer>>,
    /// Digest of the code of each function, by the function's name. A run resumes only with the same digests.
    pub digests: BTreeMap<String, String>,
    /// Requests of other threads to a run.
    pub signals: Signals,
    /// True to start a complete run from the beginning, instead of leaving it as it is.
    pub repeat_complete: bool,
}

/// Function that returns the reward for a name.
type MakeReward = dyn Fn(&str) -> Option<Box<dyn Reward>> + Send + Sync;

impl Functions {
    /// Creates the reward for a name.
    ///
    /// # Errors
    /// Returns an error if the program has no such reward, as when its run is started again from the command line.
    fn reward(&self, name: &str) -> Result<Box<dyn Reward>, Problem> {
        self.rewards.as_ref().and_then(|make| make(name)).ok_or_else(|| {
            Problem::usage("the reward is a function of the program that started the run")
                .at("--reward_funcs")
                .got(format!("`caller:{name}`"))
                .expected("a reward by name, a program, `FILE.py:FUNCTION` or an address")
                .help("start the run from that program, or write the function to a file")
        })
    }
}

/// Returns the references of these rows if a reward needs them.
pub fn corpus(settings: &Settings, dataset: &Dataset, rows: impl IntoIterator<Item = u64>) -> Option<Corpus> {
    let wants = |name: &str| !settings.lacks_reward(name);
    let weigh_tokens = wants("bertscore") && settings.rewards.scorers.bertscore_idf;
    (wants("cider") || wants("explanation") || weigh_tokens)
        .then(|| omnigrpo_train::checks::corpus(dataset, rows, weigh_tokens))
}

/// Returns the files that determine the scores of rewards.
pub fn reward_files(settings: &Settings) -> Vec<PathBuf> {
    let files = settings.rewards.funcs.iter().flat_map(|spec| spec_files(spec));
    files.chain(settings.rewards.judge_prompt.clone()).collect()
}

/// Builds the rewards. `prompts` tells `format` which tag the chat template opens.
pub fn rewards(
    settings: &Settings,
    corpus: Option<&Corpus>,
    prompts: Option<&PromptBuilder>,
    (functions, weights): (&Functions, FrozenWeights),
) -> Result<RewardSet> {
    let asked = &settings.rewards;
    let wants = |name: &str| !settings.lacks_reward(name);
    let mut options = asked.options.clone();
    options.external.judge_api_key = settings.env.judge_api_key.clone();
    options.external.system = settings.prompts.render.system.clone();
    if let Some(path) = &asked.judge_prompt {
        options.external.judge_template = judge_prompt(path)?;
    }
    if let Some(prompts) = prompts.filter(|_| wants("format")) {
        options.opened = opened_tag(&prompts.rendered_question()?).to_owned();
    }
    options.cider = corpus.map(|corpus| Arc::clone(&corpus.frequencies));
    let dir = |flag: &str, wanted: bool, name: &Option<PathBuf>| {
        let name = name.as_ref().filter(|_| wanted).map(|name| name.to_string_lossy());
        name.map(|name| named_dir("the model", &name, settings).map_err(|problem| problem.at(flag)))
            .transpose()
    };
    let weights = FrozenWeights { arithmetic: super::arithmetic(settings), ..weights };
    let pictures = wants("explanation") && asked.scorers.explanation_clip_weight > 0.0;
    let scorers = ScorerOptions {
        clip_model: dir("--clip_model", pictures, &asked.scorers.clip_model)?,
        clip_text_model: dir("--clip_text_model", pictures, &asked.scorers.clip_text_model)?,
        explanation_compat: options.compat.contains(&Compat::S4Explanation),
        bertscore_model: dir("--bertscore_model", wants("bertscore"), &asked.scorers.bertscore_model)?,
        frequencies: options.cider.clone(),
        references: corpus.map_or_else(Vec::new, |corpus| corpus.texts.clone()),
        weights: weights.clone(),
        ..asked.scorers.clone()
    };
    let mut made = omnigrpo_scorers::table()
        .iter()
        .filter(|row| wants(row.name))
        .map(|row| (row.make)(&scorers).map_err(|e| Problem::of(&e).at("--reward_funcs")))
        .collect::<Result<Vec<_>, _>>()?;
    let mut names = asked.funcs.clone();
    for spec in &mut names {
        if let Some(name) = of_caller(spec) {
            made.push(functions.reward(name)?);
            *spec = name.to_owned();
            continue;
        }
        let Some((name, place)) = RewardModel::spec(spec) else { continue };
        let at = |problem: Problem| problem.at("--reward_funcs");
        let dir = named_dir("the reward model", place, settings).map_err(at)?;
        let render = settings.prompts.render.clone();
        let model = RewardModel::load(name, &dir, weights.clone(), render).map_err(|e| {
            at(Problem::failure(format!("the reward model `{place}` cannot be used")).got(told(&e)))
        })?;
        made.push(Box::new(model));
        *spec = name.to_owned();
    }
    omnigrpo_rewards::build_with(&names, &options, made)
        .map_err(|e| Problem::usage(told(&e)).at("--reward_funcs").into())
}

/// Reads the prompt for a judge from a file.
fn judge_prompt(path: &Path) -> Result<String> {
    const MAX_BYTES: u64 = 64 << 10;
    let problem = |got: String| {
        Problem::usage("the judge's prompt cannot be used")
            .at(path.display().to_string())
            .got(got)
            .expected("a text that contains `{answer}` or `{completion}` and requests a number from 0 to 1")
    };
    let text = inside::read_named(path, MAX_BYTES).map_err(|e| problem(e.to_string()))?;
    if !text.contains("{answer}") && !text.contains("{completion}") {
        return Err(problem("a text without an answer to grade".to_owned()).into());
    }
    Ok(text)
}

/// Builds the rewards that need neither a model nor another program, which suffice to check rows. Returns `None` if there are
/// none.
pub fn text_rewards(settings: &Settings, dataset: &Dataset) -> Result<Option<RewardSet>> {
    let mut textual = settings.clone();
    let asked = &mut textual.rewards;
    let is_built_in = |name: &String| omnigrpo_rewards::table().iter().any(|row| row.name == name);
    asked.funcs.retain(is_built_in);
    asked.options.weights = vec![1.0; asked.funcs.len()];
    if asked.funcs.is_empty() {
        return Ok(None);
    }
    let with = (&Functions::default(), FrozenWeights::default());
    rewards(&textual, corpus(&textual, dataset, 0..dataset.len()).as_ref(), None, with).map(Some)
}
