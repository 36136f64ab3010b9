//! Trains the embedded model to answer briefly: `cargo run --release --example train_with_own_reward -- runs/brief`
#![allow(clippy::print_stdout)]

use std::ops::ControlFlow;
use std::path::PathBuf;

use omnigrpo::{
    Checkpoint, Dataset, DatasetSpec, Front, Inputs, LoadOptions, Model, PromptBuilder, PromptSettings,
    ReadOptions, RewardSet, TrainPlan, demo, metric, reward, train,
};

fn main() -> anyhow::Result<()> {
    let dir = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| "runs/brief".into()));
    // Any checkpoint of a known family and any file of rows works; these two are embedded in the program.
    demo::write_model(&dir.join("model"))?;
    demo::generate(&dir.join("data"), 1, demo::Sizes { sft: 0, train: 64, eval: 0 })?;

    let checkpoint = Checkpoint::open(&dir.join("model"))?;
    let model = Model::load(&checkpoint, &LoadOptions::default())?;
    let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default())?;
    let file = DatasetSpec::file(dir.join("data/train.jsonl"));
    let rows = Dataset::open(&[file], &ReadOptions::default())?;

    let brief = reward("brief", (f64::NEG_INFINITY, 0.0), |row| -(row.completion.len() as f64));
    let rewards = RewardSet::new(vec![brief], &[])?;

    let mut plan = TrainPlan::in_dir(dir.join("run"));
    plan.algorithm.sampling.max_completion_length = 32;
    plan.optimizer.learning_rate = 1e-4;
    plan.run.max_steps = Some(3);
    let front = Front::default().on_step(|step| {
        println!("step {}: reward {:.1}", step.step, step.metric(metric::REWARD).unwrap_or_default());
        ControlFlow::Continue(())
    });
    let trained = train(Inputs::new(model, prompts, rows, rewards), plan, front)?;
    println!("{} steps; the model is in {}", trained.summary.steps, dir.join("run").display());
    Ok(())
}
