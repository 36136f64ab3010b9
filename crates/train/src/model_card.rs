//! Model card: the `README.md` next to a trained model. It states what was trained, from which base, on which data and how, for
//! readers and for the hub. The hub reads the fields at the top (names and values: "Model Cards" in its documentation).
//!
//! The card contains one path of this machine: that of a base that the hub does not know, by which an adapter finds it. Such a base
//! appears only in the text. The licence is included
//! if the card of the base states it.

use std::path::Path;

use omnigrpo_data::Dataset;
use omnigrpo_guard::inside;
use omnigrpo_models::{Model, Origin};
use omnigrpo_observe::write_atomic;
use omnigrpo_ops::Device;
use serde_json::{Map, Value};

use crate::error::Result;
use crate::evaluate::Evaluation;
use crate::plan::{Curves, Objective, RunPlan};
use crate::step::Algorithm;

/// File name of the card's picture.
const PICTURE: &str = "metrics.svg";

/// Contents of a card.
pub(crate) struct Facts<'a> {
    pub(crate) run: &'a RunPlan,
    pub(crate) curves: Option<Curves>,
    pub(crate) model: &'a Model,
    pub(crate) dataset: &'a Dataset,
    pub(crate) algorithm: &'a Algorithm,
    pub(crate) rewards: Vec<&'a str>,
    pub(crate) num_steps: u64,
    pub(crate) before: Option<&'a Evaluation>,
    pub(crate) after: Option<&'a Evaluation>,
}

/// Writes the card and its picture into a run directory.
pub(crate) fn write(dir: &Path, facts: Facts) -> Result<()> {
    let picture = facts.curves.and_then(|draw| draw(dir));
    if let Some(svg) = &picture {
        write_atomic(&dir.join(PICTURE), |out| out.write_all(svg.as_bytes()))?;
    }
    let text = Card::of(dir, &facts, picture.is_some()).text();
    Ok(write_atomic(&dir.join("README.md"), |out| out.write_all(text.as_bytes()))?)
}

/// Maximum size in bytes of the base model's card.
const MAX_CARD_BYTES: u64 = 16 << 20;

struct Card {
    name: String,
    base: Origin,
    /// Name of the base on the hub.
    hub_base: Option<String>,
    /// Licence fields.
    license: Vec<(&'static str, String)>,
    /// True if the directory contains adapters for the base.
    adapter: bool,
    /// Hub name of the model's task.
    task: &'static str,
    /// `grpo` or `sft`.
    method: &'static str,
    /// Description of the method.
    how: String,
    num_steps: u64,
    /// Machine and training time.
    trained: String,
    command: Option<String>,
    /// Name and number of rows of each dataset.
    datasets: Vec<(String, u64)>,
    settings: Map<String, Value>,
    /// Name of each metric with its values before and after training.
    metrics: Vec<(String, Option<f64>, Option<f64>)>,
    picture: bool,
    bibliography: Vec<String>,
}

impl Card {
    fn of(dir: &Path, facts: &Facts, picture: bool) -> Self {
        let Facts { run, model, dataset, algorithm, .. } = facts;
        let imitate = run.objective == Objective::Imitate;
        let base = Origin::of(model.dir());
        // `inside::read` does not follow links out of the directory.
        let fields = inside::read(model.dir(), "README.md", MAX_CARD_BYTES).unwrap_or_default();
        let fields = String::from_utf8_lossy(&fields);
        let own_name = || dir.file_name().map_or("model".into(), |n| n.to_string_lossy().into_owned());
        let mut datasets: Vec<(String, u64)> = Vec::new();
        for (name, rows) in dataset.parts() {
            // The files of one dataset are counted together.
            match datasets.iter_mut().find(|(own, _)| own == name) {
                Some((_, all)) => *all += rows,
                None => datasets.push((name.to_owned(), rows)),
            }
        }
        let metric = |evaluation: Option<&Evaluation>, name: &str| evaluation.and_then(|e| e.metric(name));
        let names = facts.after.into_iter().flat_map(|after| &after.summary.metrics).map(|(name, _)| name);
        let papers = if imitate { Vec::new() } else { algorithm.loss.papers(algorithm.advantage) };
        let methods: Vec<_> = papers.iter().map(|paper| paper.method).collect();
        Self {
            name: run.card.run_name.clone().unwrap_or_else(own_name),
            hub_base: match &base {
                Origin { name, revision: Some(_) } => Some(name.clone()),
                _ => model.checkpoint().config().get("_name_or_path").and_then(hub_name).or_else(|| {
                    // An adapter belongs to the exact weights it was trained on, so the base of the base does not apply.
                    let of_card = || field(&fields, "base_model").map(Value::from);
                    of_card().filter(|_| model.lora().is_none()).as_ref().and_then(hub_name)
                }),
            },
            license: ["license", "license_name", "license_link"]
                .into_iter()
                .filter_map(|key| Some((key, field(&fields, key)?)))
                .collect(),
            base,
            adapter: model.lora().is_some(),
            task: model.family().row().task,
            method: if imitate { "sft" } else { "grpo" },
            how: match imitate {
                true => "supervised training".to_owned(),
                false => format!(
                    "{}, {} completions per prompt, rewards {}",
                    methods.join(" with the loss of "),
                    algorithm.num_generations,
                    facts.rewards.join(", ")
                ),
            },
            num_steps: facts.num_steps,
            trained: trained(dir, model.device()),
            command: run.card.command.clone(),
            datasets,
            settings: run.card.settings.clone(),
            metrics: names
                .map(|name| (name.clone(), metric(facts.before, name), metric(facts.after, name)))
                .filter(|(_, _, after)| after.is_some())
                .collect(),
            picture,
            bibliography: papers.iter().map(omnigrpo_grpo::Paper::bibtex).collect(),
        }
    }

    /// Returns the text of the card: the fields for the hub, then the description.
    fn text(&self) -> String {
        let mut text = format!("---\n{}---\n\n# {}\n\n", self.fields(), self.name);
        let Origin { name: base, revision } = &self.base;
        // A card is published, so it does not show where a directory is.
        let base = if revision.is_some() { base } else { base.rsplit('/').next().unwrap_or(base) };
        let at = revision.as_ref().map(|commit| format!(" at revision `{commit}`")).unwrap_or_default();
        let what = if self.adapter { "A LoRA adapter, trained on" } else { "Trained from" };
        let plural = if self.num_steps == 1 { "" } else { "s" };
        text.push_str(&format!(
            "{what} `{base}`{at} with omnigrpo {}: {} step{plural} of {}.\n\n",
            omnigrpo_observe::version(),
            self.num_steps,
            self.how
        ));
        let rows = |rows: u64| format!("{rows} row{}", if rows == 1 { "" } else { "s" });
        let datasets: Vec<_> =
            self.datasets.iter().map(|(name, num_rows)| format!("`{name}` ({})", rows(*num_rows))).collect();
        text.push_str(&format!("Data: {}.\n\n{}\n", datasets.join(", "), self.trained));
        if let Some(command) = &self.command {
            text.push_str(&format!("\n```sh\n{command}\n```\n"));
        }
        if self.picture {
            text.push_str(&format!("\n![Metrics of the training steps]({PICTURE})\n"));
        }
        if !self.metrics.is_empty() {
            let compared = self.metrics.iter().any(|(_, before, _)| before.is_some());
            text.push_str("\n## Evaluation\n\n");
            text.push_str(if compared {
                "| metric | before | after |\n|---|---|---|\n"
            } else {
                "| metric | value |\n|---|---|\n"
            });
            let number = |value: &Option<f64>| value.map_or_else(String::new, |value| format!("{value:.4}"));
            for (name, before, after) in &self.metrics {
                let before = if compared { format!(" {} |", number(before)) } else { String::new() };
                text.push_str(&format!("| {name} |{before} {} |\n", number(after)));
            }
        }
        if !self.settings.is_empty() {
            text.push_str("\n## Settings\n\n| setting | value |\n|---|---|\n");
        }
        for (name, value) in &self.settings {
            text.push_str(&format!(
                "| {name} | `{}` |\n",
                value.as_str().map_or_else(|| value.to_string(), str::to_owned)
            ));
        }
        if !self.bibliography.is_empty() {
            text.push_str(&format!("\n## Citation\n\n```bibtex\n{}```\n", self.bibliography.join("\n")));
        }
        text
    }

    /// Returns the fields for the hub.
    fn fields(&self) -> String {
        let mut fields = Vec::new();
        if let Some(base) = &self.hub_base {
            let relation = if self.adapter { "adapter" } else { "finetune" };
            fields.push(format!("base_model: {}", plain(base)));
            fields.push(format!("base_model_relation: {relation}"));
        }
        fields.push(format!("library_name: {}", if self.adapter { "peft" } else { "transformers" }));
        fields.push(format!("pipeline_tag: {}", self.task));
        fields.extend(self.license.iter().map(|(key, value)| format!("{key}: {}", plain(value))));
        let mut list = |key: &str, items: Vec<String>| {
            if !items.is_empty() {
                fields.push(format!("{key}:\n- {}", items.join("\n- ")));
            }
        };
        let on_hub = self.datasets.iter().filter_map(|(name, _)| hub_name(&Value::from(name.as_str())));
        list("datasets", on_hub.map(|name| plain(&name)).collect());
        let lora = self.adapter.then_some("lora");
        let tags = ["omnigrpo", self.method].into_iter().chain(lora).map(str::to_owned);
        list("tags", tags.collect());
        fields.iter().map(|field| format!("{field}\n")).collect()
    }
}

/// Describes the machine and the total time of all steps in the records of the run directory.
fn trained(dir: &Path, device: Device) -> String {
    let secs: f64 = std::fs::read_to_string(dir.join(omnigrpo_observe::names::METRICS))
        .unwrap_or_default()
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok()?["step_time"].as_f64())
        // `sum` would return -0 for an empty list.
        .fold(0.0, |sum, secs| sum + secs);
    let time = match secs {
        secs if secs >= 3600.0 => format!("{:.1} h", secs / 3600.0),
        secs if secs >= 60.0 => format!("{:.1} min", secs / 60.0),
        secs => format!("{secs:.1} s"),
    };
    let cpu = std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("model name"))?;
        Some(line.trim_start_matches([' ', '\t', ':']).trim().to_owned())
    });
    let machine = match device {
        Device::Gpu(card) => card.name(),
        _ => {
            let threads = rayon::current_num_threads();
            let plural = if threads == 1 { "" } else { "s" };
            format!("{threads} thread{plural} of {}", cpu.as_deref().unwrap_or("a CPU"))
        }
    };
    format!("Trained on {machine}; the steps took {time}.")
}

/// Returns the value if it is a valid name on the hub, `ORG/NAME`.
fn hub_name(value: &Value) -> Option<String> {
    let (org, name) = value.as_str()?.split_once('/')?;
    let part = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
            && !part.contains("..")
            && !part.ends_with(['.', '-'])
    };
    (part(org) && part(name)).then(|| format!("{org}/{name}"))
}

/// Returns a scalar value of the fields at the top of a card.
fn field(card: &str, key: &str) -> Option<String> {
    let fields = card.strip_prefix("---\n")?.split("\n---").next()?;
    let value = fields.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(": "))?;
    let value = value.trim().trim_matches(['"', '\'']);
    // Lists and multi-line strings begin with one of these characters.
    (!value.is_empty() && !value.starts_with(['[', '{', '|', '>', '&', '*', '!'])).then(|| value.to_owned())
}

/// Returns a YAML value. It is quoted unless it cannot be mistaken for anything else.
fn plain(text: &str) -> String {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    let word =
        !["true", "false", "yes", "no", "on", "off", "null"].contains(&text.to_ascii_lowercase().as_str());
    match word && text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.chars().all(harmless) {
        true => text.to_owned(),
        false => Value::from(text).to_string(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn card() -> Card {
        Card {
            name: "first try".to_owned(),
            base: Origin { name: "me/tiny".to_owned(), revision: Some("abc".to_owned()) },
            hub_base: Some("me/tiny".to_owned()),
            license: vec![("license", "apache-2.0".to_owned())],
            adapter: true,
            task: "image-text-to-text",
            method: "grpo",
            how: "GRPO".to_owned(),
            num_steps: 1,
            trained: "Trained on 2 threads of a CPU; the steps took 1.5 h.".to_owned(),
            command: Some("omnigrpo train --beta 0.04".to_owned()),
            datasets: [("cats", 1), ("me/dogs", 20), ("data/of/mine", 2), ("../birds", 3)]
                .map(|(name, rows)| (name.to_owned(), rows))
                .to_vec(),
            settings: Map::from_iter([
                ("learning_rate".to_owned(), json!(1e-6)),
                ("beta".to_owned(), json!(0.04)),
            ]),
            metrics: vec![("eval_reward".to_owned(), Some(0.25), Some(0.5))],
            picture: true,
            bibliography: vec!["@misc{a}\n".to_owned(), "@misc{b}\n".to_owned()],
        }
    }

    #[test]
    fn a_card_names_base_data_method_and_numbers() {
        let text = card().text();
        let fields = "---\nbase_model: me/tiny\nbase_model_relation: adapter\nlibrary_name: peft\npipeline_tag: image-text-to-text\n\
                      license: apache-2.0\ndatasets:\n- me/dogs\ntags:\n- omnigrpo\n- grpo\n- lora\n---\n";
        let version = env!("CARGO_PKG_VERSION");
        let rest = format!(
            "\n# first try\n\nA LoRA adapter, trained on `me/tiny` at revision `abc` with omnigrpo {version}: 1 step of GRPO.\n\n\
             Data: `cats` (1 row), `me/dogs` (20 rows), `data/of/mine` (2 rows), `../birds` (3 rows).\n\n\
             Trained on 2 threads of a CPU; the steps took 1.5 h.\n\n```sh\nomnigrpo train --beta 0.04\n```\n\n![Metrics of the training steps](metrics.svg)\n\n\
             ## Evaluation\n\n| metric | before | after |\n|---|---|---|\n| eval_reward | 0.2500 | 0.5000 |\n\n\
             ## Settings\n\n| setting | value |\n|---|---|\n| learning_rate | `1e-6` |\n| beta | `0.04` |\n\n\
             ## Citation\n\n```bibtex\n@misc{{a}}\n\n@misc{{b}}\n```\n"
        );
        assert_eq!(text, format!("{fields}{rest}"));

        let mut other = card();
        other.base = Origin { name: "1: my model".to_owned(), revision: None };
        (other.hub_base, other.adapter, other.picture, other.num_steps) = (None, false, false, 2);
        (other.metrics[0].1, other.license) = (None, vec![("license", "no".to_owned())]);
        other.bibliography.clear();
        let text = other.text();
        assert!(
            text.starts_with(
                "---\nlibrary_name: transformers\npipeline_tag: image-text-to-text\nlicense: \"no\"\n"
            ),
            "{text}"
        );
        assert!(text.contains("Trained from `1: my model` with") && text.contains(": 2 steps of"), "{text}");
        assert!(text.contains("| metric | value |\n|---|---|\n| eval_reward | 0.5000 |\n"), "{text}");
        assert!(!text.contains("svg") && !text.contains("bibtex") && !text.contains("lora"), "{text}");
    }

    #[test]
    fn the_time_is_that_of_all_steps_in_the_records() {
        let dir = tempfile::tempdir().unwrap();
        let lines =
            "{\"step\":1,\"step_time\":3000}\n{\"eval_reward\":1}\n{\"step\":2,\"step_time\":4200.0}\ncut";
        std::fs::write(dir.path().join("metrics.jsonl"), lines).unwrap();
        let text = trained(dir.path(), Device::Cpu);
        assert!(
            text.starts_with("Trained on ") && text.contains(" thread") && text.contains(" of "),
            "{text}"
        );
        assert!(text.ends_with("; the steps took 2.0 h."), "{text}");
        let none = trained(&dir.path().join("none"), Device::Cpu);
        assert!(none.ends_with("; the steps took 0.0 s."), "{none}");
    }

    #[test]
    fn fields_of_another_card() {
        let card = "---\nlicense: other\nlicense_name: \"qwen-research\"\nbase_model:\n- a/b\ntags: [x]\n---\nlicense_link: no\n";
        assert_eq!(field(card, "license").as_deref(), Some("other"));
        assert_eq!(field(card, "license_name").as_deref(), Some("qwen-research"));
        for absent in ["base_model", "tags", "license_link"] {
            assert_eq!(field(card, absent), None, "{absent}");
        }
        assert_eq!(field("license: mit\n", "license"), None);
        assert_eq!(
            hub_name(&json!("Qwen/Qwen2.5-VL-3B-Instruct")).as_deref(),
            Some("Qwen/Qwen2.5-VL-3B-Instruct")
        );
        for path in ["/mnt/models/x", "./x", "a/b/c", "tiny", "../x/y", ""] {
            assert_eq!(hub_name(&json!(path)), None, "{path}");
        }
    }
}
