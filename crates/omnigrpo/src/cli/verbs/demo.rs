//! `demo`: the embedded checkpoint on the generated task, through the same code as any other run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use omnigrpo_data::{Dataset, DatasetSpec, Roots};
use omnigrpo_demo::{Sizes, generate, write_model};
use omnigrpo_rollout::SamplingParams;
use omnigrpo_train::{EvalOptions, EvalPlan, Evaluation, MAX_LIVE, Objective, evaluate};

use super::{print, train};
use crate::settings::explain::plain;
use crate::settings::flags::{Verb, find};
use crate::settings::problem::Problem;
use crate::settings::values::{Given, Origin, Raw, Resolved};
use crate::settings::{Layer, config, resolve};
use omnigrpo_session::{Session, setup};

/// Settings of the run, as a file for `train --config`.
const RECIPE: &str = include_str!("../../../assets/demo.yaml");
/// Seed of the generated data. Seeds of training are set by the user.
const DATA_SEED: u64 = 1;

/// Trains the embedded model and prints its accuracy before and after.
pub fn demo(resolved: &Resolved, session: &Session) -> Result<()> {
    let settings = &resolved.settings;
    let Some(output_dir) = settings.io.output_dir.clone() else {
        return Err(Problem::usage("no run directory is given").expected("`--output_dir DIR`").into());
    };
    let lock = omnigrpo_session::training::take(&output_dir)?;
    let [data, start] = places(&output_dir);
    session.console.line(&format!(
        "writing the task to {} and the model to {}",
        data.display(),
        start.display()
    ));
    generate(&data, DATA_SEED, Sizes { sft: 0, ..Sizes::default() })?;
    write_model(&start)?;
    let run = run_settings(resolved)?;
    let session_of_run = session.with(&run.settings);
    let summary =
        omnigrpo_session::training::run(&run, &session_of_run, Objective::Reinforce, lock, Box::new(()))?
            .summary;
    train::finish(&summary, &run, true)?;
    let permuted = permuted(&run, session, &data)?;
    print(&verdict(summary.before.as_ref(), summary.after.as_ref(), &permuted))
}

/// Returns the folder of the task and that of the model at the start.
fn places(output_dir: &Path) -> [PathBuf; 2] {
    [output_dir.join("data"), output_dir.join("start-model")]
}

/// Returns the settings of the demo's training.
fn recipe() -> Layer {
    config::parse(RECIPE, "the demo's recipe", |line| Origin::Config(format!("demo:{line}")))
}

/// Returns the value that a setting has in the demo's training, if it differs from that of `train`.
pub fn default_of(name: &str) -> Option<String> {
    // The task and the model are in the run directory.
    let own = ["model_name_or_path", "train_file", "eval_file", "output_dir"];
    let recipe = recipe();
    let given = recipe.given.iter().find(|given| given.flag.name == name && !own.contains(&name))?;
    Some(plain(&given.value))
}

/// Returns the settings of the demo's training with those of the user.
pub fn run_settings(resolved: &Resolved) -> Result<Resolved, Problem> {
    let settings = &resolved.settings;
    let output_dir = settings.io.output_dir.clone().unwrap_or_default();
    let [data, start] = places(&output_dir);
    let mut recipe = recipe();
    let given = &mut recipe.given;
    let here = [
        ("model_name_or_path", start.display().to_string()),
        ("train_file", data.join("train.jsonl").display().to_string()),
        ("eval_file", data.join("eval.jsonl").display().to_string()),
        ("output_dir", output_dir.display().to_string()),
        ("eval_on_start", "true".to_owned()),
    ];
    for (name, text) in here {
        given.retain(|g| g.flag.name != name);
        if let Some(flag) = find(name) {
            given.push(Given::read(flag, &Raw::Arguments(vec![text]), Origin::Flag)?);
        }
    }
    // Settings of the user override the recipe.
    for own in resolved.values.given() {
        if own.flag.is_of(Verb::Train) && own.flag.name != "output_dir" {
            given.retain(|g| g.flag.name != own.flag.name);
            given.push(own);
        }
    }
    resolve(Verb::Train, recipe, settings.env.clone())
}

/// Evaluates the trained model with the medium of each question replaced by that of another question of the same type.
fn permuted(run: &Resolved, session: &Session, data: &std::path::Path) -> Result<Evaluation> {
    let settings = &run.settings;
    let mut trained = settings.clone();
    trained.model.name = settings.io.output_dir.as_ref().map(|d| d.display().to_string());
    let checkpoint = setup::checkpoint(&trained)?;
    let model = setup::model(&trained, &checkpoint, session.device()?)?;
    let prompts = session.prompts(&trained, &checkpoint, false)?;
    let specs = DatasetSpec::from_files(&[data.join("eval_permuted.jsonl")], &Roots::default())?;
    let dataset = Arc::new(Dataset::open(&specs, &setup::read_options(&trained))?);
    let corpus = setup::corpus(&trained, &dataset, 0..dataset.len());
    let rewards = session.rewards(&trained, corpus.as_ref(), Some(&prompts))?;
    let plan = EvalPlan {
        interaction: None,
        prompts: Arc::new(prompts),
        rows: (0..dataset.len()).collect(),
        dataset,
        options: EvalOptions {
            sampling: SamplingParams {
                max_completion_length: settings.algorithm.sampling.max_completion_length,
                ..SamplingParams::greedy()
            },
            batch_rows: MAX_LIVE,
            ..EvalOptions::default()
        },
    };
    let mut progress = session.console.progress("evaluating with exchanged media", plan.rows.len() as u64);
    Ok(evaluate(&model, &rewards, &plan, &mut |done| progress.advance(done))?)
}

fn verdict(before: Option<&Evaluation>, after: Option<&Evaluation>, permuted: &Evaluation) -> String {
    let accuracy = |e: Option<&Evaluation>| e.and_then(|e| e.metric("eval_rewards/accuracy/mean"));
    let percent = |x: Option<f64>| x.map_or("-".to_owned(), |x| format!("{:.1} %", 100.0 * x));
    format!(
        "\naccuracy on held-out questions {} → {}\nwith media exchanged among questions {} (best constant answer {})\n",
        percent(accuracy(before)),
        percent(accuracy(after)),
        percent(accuracy(Some(permuted))),
        percent(Some(best_constant(permuted))),
    )
}

/// Returns the accuracy of the best constant answer to each wording of the question. A model reaches it without looking at the
/// picture.
fn best_constant(evaluation: &Evaluation) -> f64 {
    let mut by_form: BTreeMap<bool, BTreeMap<&str, BTreeMap<&str, usize>>> = BTreeMap::new();
    for row in &evaluation.rows {
        let choice = row.prompt.contains("Options:");
        let question = row.prompt.trim().lines().next().unwrap_or_default();
        let counts = by_form.entry(choice).or_default().entry(question).or_default();
        *counts.entry(row.solution.as_deref().unwrap_or_default()).or_default() += 1;
    }
    let best: usize = by_form
        .values()
        .flat_map(BTreeMap::values)
        .map(|answers| answers.values().copied().max().unwrap_or(0))
        .sum();
    best as f64 / evaluation.rows.len().max(1) as f64
}
