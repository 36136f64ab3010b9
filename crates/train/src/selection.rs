//! Selection of the weights to train.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::Arc;

use omnigrpo_guard::Setting;
use omnigrpo_models::Model;
use omnigrpo_ops::{Param, ParamDtype, Part};
use regex::Regex;

use crate::error::{GATE, LLM, LORA_TARGETS, PATTERNS, PROJECTOR, QUANTIZATION, Result, TOWERS, TrainError};

/// Base weights to train. Adapters are always trained.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Selection {
    /// True to train the language model.
    pub llm: bool,
    /// True to train the projector.
    pub projector: bool,
    /// True to train the vision and audio towers.
    pub towers: bool,
    /// True to train the text encoder that conditions the projector, if the family has one.
    pub instruction: bool,
    /// True to train the gate between the branches of the projector, if the family has one; `None` for the same value as
    /// `projector`.
    pub gate: Option<bool>,
    /// Regular expressions on published names. If the list is not empty, only selected weights that match one of them are
    /// trained.
    pub patterns: Vec<String>,
}

impl Default for Selection {
    /// Selects the language model and the projector. A frozen tower runs only once per step and medium.
    fn default() -> Self {
        Self { llm: true, projector: true, ..Self::NONE }
    }
}

impl Selection {
    /// Selection of every weight.
    pub const ALL: Self = Self {
        llm: true,
        projector: true,
        towers: true,
        instruction: true,
        gate: None,
        patterns: Vec::new(),
    };
    /// Selection of no base weight, so that only adapters are trained.
    pub const NONE: Self = Self {
        llm: false,
        projector: false,
        towers: false,
        instruction: false,
        gate: None,
        patterns: Vec::new(),
    };

    fn part(&self, name: &str, part: Part) -> bool {
        match part {
            Part::Projector if is_gate(name) => self.gate.unwrap_or(self.projector),
            Part::Llm => self.llm,
            Part::Projector => self.projector,
            Part::Vision | Part::Audio => self.towers,
            Part::Instruction => self.instruction,
        }
    }

    fn compiled(&self) -> Result<Vec<Regex>> {
        let setting = |p: &String| {
            Regex::new(p).map_err(|source| TrainError::Pattern { name: PATTERNS, pattern: p.clone(), source })
        };
        self.patterns.iter().map(setting).collect()
    }

    /// Returns a function that takes the published name and the part of a weight. It returns true if the weight itself is
    /// trained. It needs no model, so frozen weights can be quantised while they are loaded.
    ///
    /// # Errors
    /// Returns an error if a pattern is not a valid regular expression.
    pub fn matcher(&self) -> Result<impl Fn(&str, Part) -> bool + '_> {
        let patterns = self.compiled()?;
        Ok(move |name: &str, part: Part| {
            self.part(name, part) && (patterns.is_empty() || patterns.iter().any(|p| p.is_match(name)))
        })
    }

    /// Marks the selected weights and the weights of adapters as trained and all others as frozen.
    ///
    /// # Errors
    /// Returns an error if nothing is selected or a pattern is invalid or matches nothing. Also returns an error if a selected
    /// weight is quantised, is in a mapped file, or belongs to a layer with an adapter.
    pub fn apply(&self, model: &Model) -> Result<()> {
        self.check(model)?;
        let selected = self.matcher()?;
        let adapted: HashSet<&str> = model.adapted().map(|(p, _)| module(p.name())).collect();
        let mut any = !adapted.is_empty();
        for param in model.base_params() {
            let on = selected(param.name(), param.part());
            if on {
                trainable(param, &adapted)?;
            }
            param.set_trainable(on);
            any |= on;
        }
        model.adapter_params().iter().for_each(|p| p.set_trainable(true));
        if any {
            Ok(())
        } else {
            Err(TrainError::setting(
                format_args!("{LLM}, {PROJECTOR}, {TOWERS}"),
                "false",
                "nothing is left to train; turn one of them on".into(),
            ))
        }
    }

    /// Returns an error if a setting has no effect on a model.
    fn check(&self, model: &Model) -> Result<()> {
        for pattern in &self.compiled()? {
            let own = || model.base_params().iter().filter(|p| self.part(p.name(), p.part()));
            if !own().any(|p| pattern.is_match(p.name())) {
                let names: Vec<&str> = own().map(|p| p.name()).take(4).collect();
                let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                return Err(TrainError::setting(
                    PATTERNS,
                    pattern.as_str(),
                    format!("matches no weight of the selected parts; their weights are {names}, …"),
                ));
            }
        }
        if let Some(gate) = self.gate
            && !model.base_params().iter().any(|p| is_gate(p.name()))
        {
            return Err(TrainError::setting(
                GATE,
                if gate { "true" } else { "false" },
                "has no effect: the projector of this family has no gate; leave it out".into(),
            ));
        }
        Ok(())
    }
}

/// Returns an error if a selected weight cannot be trained. `adapted` are the layers with adapters.
fn trainable(param: &Param, adapted: &HashSet<&str>) -> Result<()> {
    let (setting, what) = if adapted.contains(module(param.name())) {
        (LORA_TARGETS, "is selected for full training but also has an adapter; remove it from one of the two")
    } else if matches!(param.dtype(), ParamDtype::Quantised(_)) {
        (QUANTIZATION, "is selected for full training, but quantised weights cannot be trained")
    } else if param.is_mapped() {
        (
            Setting { plan: "LoadOptions", field: "in_place" },
            "is selected for training, but weights in mapped files cannot be changed; load the model without \
             this option",
        )
    } else {
        return Ok(());
    };
    Err(TrainError::setting(setting, param.name(), what.into()))
}

fn is_gate(name: &str) -> bool {
    name.contains("bert_gate")
}

fn module(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(module, _)| module)
}

/// Returns a table of the model's parts. The columns are the number of tensors, the parameters, the trained parameters and the
/// parameters of adapters. Two more give the memory of the weights and the memory that training adds: gradient, two moments, and
/// a master for bf16, even if `pure_bf16` is set.
pub fn summary(model: &Model) -> String {
    let mut out = format!(
        "{:<11} {:>7} {:>13} {:>13} {:>11} {:>10} {:>9}\n",
        "part", "tensors", "parameters", "trained", "of adapters", "weights", "training"
    );
    let adapters: HashSet<&str> = model.adapter_params().iter().map(|p| p.name()).collect();
    let mut row = |name: &str, params: &[&Arc<Param>]| {
        let (mut all, mut trained, mut own, mut held, mut added) = (0, 0, 0, 0, 0);
        for param in params {
            all += param.len();
            held += param.num_bytes();
            if param.trainable() {
                trained += param.len();
                added += param.len() * if param.dtype() == ParamDtype::Bf16 { 16 } else { 12 };
            }
            if adapters.contains(param.name()) {
                own += param.len();
            }
        }
        let megabytes = |bytes: usize| match bytes as f64 / 1e6 {
            mb if mb < 1e4 => format!("{mb:.1} MB"),
            mb => format!("{:.1} GB", mb / 1e3),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "{name:<11} {:>7} {all:>13} {trained:>13} {own:>11} {:>10} {:>9}",
            params.len(),
            megabytes(held),
            megabytes(added)
        );
    };
    for part in Part::ALL {
        let params: Vec<_> = model.params().iter().filter(|p| p.part() == part).collect();
        if !params.is_empty() {
            row(part.name(), &params);
        }
    }
    row("total", &model.params().iter().collect::<Vec<_>>());
    out
}

/// Returns the names of the weights to which weight decay applies, as `transformers`' `Trainer.get_decay_parameter_names` does.
/// Biases, names with a `norm` or `layernorm` component and weights of layer norms are excluded. The RMS norms of Qwen2.5-VL's
/// tower (`norm1`, `norm2`, `ln_q`) match none of these rules, so `transformers` decays them, and so does this function.
pub fn decayed_names(params: &[Arc<Param>]) -> HashSet<String> {
    let names: HashSet<&str> = params.iter().map(|p| p.name()).collect();
    params
        .iter()
        .filter(|p| {
            let name = p.name();
            let stem = name.strip_suffix(".weight").unwrap_or(name);
            let layer_norm = p.shape().len() == 1 && names.contains(format!("{stem}.bias").as_str());
            let by_name = name.contains("bias")
                || name.contains("layernorm")
                || name.contains("rmsnorm")
                || name.split('.').any(|part| part == "norm" || part.ends_with("_norm"));
            !(layer_norm || by_name)
        })
        .map(|p| p.name().to_owned())
        .collect()
}
