//! The model card: `README.md` beside a trained model.

use omnigrpo_models::Model;
use omnigrpo_observe::write_atomic;

use crate::error::Result;
use crate::evaluate::Evaluation;
use crate::plan::{Objective, RunPlan};

/// Writes it. `how` says in words what the steps were.
pub(crate) fn write(
    run: &RunPlan,
    model: &Model,
    how: &str,
    steps: u64,
    after: Option<&Evaluation>,
) -> Result<()> {
    let base = model.dir().display();
    let tag = match run.objective {
        Objective::Imitate => "sft",
        Objective::Reinforce => "grpo",
    };
    let head = if model.lora().is_some() {
        format!("library_name: peft\nbase_model: {base}")
    } else {
        "library_name: transformers".to_owned()
    };
    let mut text = format!(
        "---\n{head}\ntags: [omnigrpo, {tag}]\n---\n\n# {}\n\nTrained from `{base}` with omnigrpo \
         {}: {steps} steps of {how}.\n\nThe settings are in `config.yaml`, every step's metrics in \
         `metrics.jsonl`.\n",
        run.run_name.clone().unwrap_or_else(|| {
            run.output_dir.file_name().map_or("model".into(), |n| n.to_string_lossy().into_owned())
        }),
        env!("CARGO_PKG_VERSION"),
    );
    if let Some(after) = after {
        text.push_str("\n| metric | value |\n|---|---|\n");
        for (name, value) in &after.summary.metrics {
            if let Some(value) = value {
                text.push_str(&format!("| {name} | {value:.4} |\n"));
            }
        }
    }
    let path = run.output_dir.join("README.md");
    Ok(write_atomic(&path, |out| out.write_all(text.as_bytes()))?)
}
