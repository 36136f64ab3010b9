//! Which weights are trained, and how fast.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::Arc;

use omnigrpo_models::Model;
use omnigrpo_ops::{Param, Part};
use regex::Regex;

use crate::error::{Result, TrainError};

/// What is trained.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// The language model.
    pub llm: bool,
    /// The projector.
    pub projector: bool,
    /// The vision and audio towers.
    pub towers: bool,
    /// If not empty: of those, only weights whose name matches one of these patterns.
    pub patterns: Vec<String>,
}

impl Selection {
    fn part(&self, part: Part) -> bool {
        match part {
            Part::Llm => self.llm,
            Part::Projector => self.projector,
            Part::Vision | Part::Audio => self.towers,
        }
    }

    /// Marks the selected weights of a model as trained and all others as frozen.
    ///
    /// # Errors
    /// Nothing selected, a pattern that is no regular expression or matches nothing.
    pub fn apply(&self, model: &Model) -> Result<()> {
        let patterns = self
            .patterns
            .iter()
            .map(|p| Regex::new(p).map_err(|e| TrainError::setting("trainable_patterns", p, e.to_string())))
            .collect::<Result<Vec<_>>>()?;
        for pattern in &patterns {
            if !model.params().iter().any(|p| self.part(p.part()) && pattern.is_match(p.name())) {
                return Err(TrainError::setting(
                    "trainable_patterns",
                    pattern.as_str(),
                    "matches no weight of the selected parts; `omnigrpo doctor` lists the names".into(),
                ));
            }
        }
        let mut any = false;
        for param in model.params() {
            let on = self.part(param.part())
                && (patterns.is_empty() || patterns.iter().any(|p| p.is_match(param.name())));
            param.set_trainable(on);
            any |= on;
        }
        if any {
            Ok(())
        } else {
            Err(TrainError::setting(
                "tune_mm_llm, tune_mm_mlp, tune_mm_vision",
                "false",
                "nothing is left to train; turn one of them on".into(),
            ))
        }
    }
}

/// A table of the model's parts: tensors, parameters, trained parameters.
#[must_use]
pub fn summary(model: &Model) -> String {
    let mut out = format!("{:<10} {:>8} {:>14} {:>14}\n", "part", "tensors", "parameters", "trained");
    let mut row = |name: &str, params: &[&Arc<Param>]| {
        let count = |ps: &mut dyn Iterator<Item = &&Arc<Param>>| ps.map(|p| p.len()).sum::<usize>();
        let all = count(&mut params.iter());
        let trained = count(&mut params.iter().filter(|p| p.trainable()));
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{name:<10} {:>8} {all:>14} {trained:>14}", params.len());
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

/// Names of the weights that are decayed, as `transformers`' `Trainer.get_decay_parameter_names` decides: not biases,
/// not names with a `norm` or `layernorm` component, not the weights of layer norms. The RMS norms of Qwen2.5-VL's tower
/// (`norm1`, `norm2`, `ln_q`) are none of these and are decayed there as well.
#[must_use]
pub fn decayed_names(params: &[Arc<Param>]) -> HashSet<String> {
    let names: HashSet<&str> = params.iter().map(|p| p.name()).collect();
    params
        .iter()
        .filter(|p| {
            let name = p.name();
            let stem = name.strip_suffix(".weight").unwrap_or(name);
            let layer_norm = p.value().rank() == 1 && names.contains(format!("{stem}.bias").as_str());
            let by_name = name.contains("bias")
                || name.contains("layernorm")
                || name.contains("rmsnorm")
                || name.split('.').any(|part| part == "norm" || part.ends_with("_norm"));
            !(layer_norm || by_name)
        })
        .map(|p| p.name().to_owned())
        .collect()
}
