//! The model card, `README.md` beside a trained model: what was trained from what, on what and how, for people and for
//! the hub.

use std::path::Path;

use omnigrpo_data::Dataset;
use omnigrpo_models::{Model, Origin};
use omnigrpo_observe::write_atomic;

use crate::error::Result;
use crate::evaluate::Evaluation;
use crate::plan::{Objective, RunPlan};

/// Writes it. `how` says in words what the steps were.
pub(crate) fn write(
    dir: &Path,
    run: &RunPlan,
    model: &Model,
    dataset: &Dataset,
    how: &str,
    steps: u64,
    after: Option<&Evaluation>,
) -> Result<()> {
    let metrics = after.into_iter().flat_map(|after| &after.summary.metrics);
    let card = Card {
        name: run
            .run_name
            .clone()
            .unwrap_or_else(|| dir.file_name().map_or("model".into(), |n| n.to_string_lossy().into_owned())),
        base: Origin::of(model.dir()),
        adapter: model.lora().is_some(),
        method: match run.objective {
            Objective::Imitate => "sft",
            Objective::Reinforce => "grpo",
        },
        how,
        num_steps: steps,
        datasets: dataset.parts().map(|(name, rows)| (name.to_owned(), rows)).collect(),
        metrics: metrics.filter_map(|(name, value)| Some((name.clone(), (*value)?))).collect(),
    };
    let path = dir.join("README.md");
    Ok(write_atomic(&path, |out| out.write_all(card.text().as_bytes()))?)
}

struct Card<'a> {
    name: String,
    base: Origin,
    /// Whether the directory holds adapters to the base.
    adapter: bool,
    /// `grpo` or `sft`.
    method: &'a str,
    /// The method in words.
    how: &'a str,
    num_steps: u64,
    /// Name and rows of each dataset.
    datasets: Vec<(String, u64)>,
    /// Of the last evaluation.
    metrics: Vec<(String, f64)>,
}

impl Card<'_> {
    /// Fields for the hub, then text.
    fn text(&self) -> String {
        let Origin { name: base, revision } = &self.base;
        let (library, relation) =
            if self.adapter { ("peft", "adapter") } else { ("transformers", "finetune") };
        let mut text = format!(
            "---\nlibrary_name: {library}\nbase_model: {}\nbase_model_relation: {relation}\ntags: [omnigrpo, {}]\n---\n\n# {}\n\n",
            plain(base),
            self.method,
            self.name,
        );
        let at = revision.as_ref().map(|commit| format!(" at revision `{commit}`")).unwrap_or_default();
        let plural = if self.num_steps == 1 { "" } else { "s" };
        text.push_str(&format!(
            "Trained from `{base}`{at} with omnigrpo {}: {} step{plural} of {}.\n\n",
            env!("CARGO_PKG_VERSION"),
            self.num_steps,
            self.how
        ));
        let rows = |rows: u64| format!("{rows} row{}", if rows == 1 { "" } else { "s" });
        let datasets: Vec<_> =
            self.datasets.iter().map(|(name, num_rows)| format!("`{name}` ({})", rows(*num_rows))).collect();
        text.push_str(&format!(
            "Data: {}. The settings are in `config.yaml`, every step's metrics in `metrics.jsonl`.\n",
            datasets.join(", ")
        ));
        if !self.metrics.is_empty() {
            text.push_str("\n| metric | value |\n|---|---|\n");
            for (name, value) in &self.metrics {
                text.push_str(&format!("| {name} | {value:.4} |\n"));
            }
        }
        text
    }
}

/// A value of YAML: as it is where it can be mistaken for nothing else, else in quotes.
fn plain(text: &str) -> String {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    match text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.chars().all(harmless) {
        true => text.to_owned(),
        false => format!("{text:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_names_base_data_and_method() {
        let mut card = Card {
            name: "first try".to_owned(),
            base: Origin { name: "me/tiny".to_owned(), revision: Some("abc".to_owned()) },
            adapter: true,
            method: "grpo",
            how: "GRPO",
            num_steps: 1,
            datasets: vec![("cats".to_owned(), 1), ("dogs".to_owned(), 20)],
            metrics: vec![("eval_reward".to_owned(), 0.5)],
        };
        let text = card.text();
        let expected = "---\nlibrary_name: peft\nbase_model: me/tiny\nbase_model_relation: adapter\ntags: [omnigrpo, grpo]\n---\n\n# first try\n\nTrained from `me/tiny` at revision `abc` with omnigrpo ";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.contains(": 1 step of GRPO.\n\nData: `cats` (1 row), `dogs` (20 rows). The"), "{text}");
        assert!(text.ends_with("| eval_reward | 0.5000 |\n"), "{text}");
        card.base = Origin { name: "1: my model".to_owned(), revision: None };
        (card.adapter, card.num_steps) = (false, 2);
        let text = card.text();
        assert!(text.contains(
            "library_name: transformers\nbase_model: \"1: my model\"\nbase_model_relation: finetune\n"
        ));
        assert!(text.contains("Trained from `1: my model` with") && text.contains(": 2 steps of"), "{text}");
    }
}
