//! LoRA adapters of a model: selection of layers, initial values and merging.

use std::collections::BTreeSet;
use std::sync::Arc;

use omnigrpo_guard::Setting;
use omnigrpo_ops::{Adapter, Param, ParamDtype, Part, Values};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use regex::Regex;

use crate::error::{LORA_DROPOUT, LORA_RANK, LORA_TARGETS, ModelError, Result};
use crate::model::Model;

/// Largest accepted rank. It is far above any practical value and bounds the memory that a file can make the program allocate.
pub(crate) const MAX_RANK: usize = 1 << 14;

/// Configuration of a model's adapters.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct LoraConfig {
    /// Rank: rows of `A` and columns of `B`.
    pub rank: usize,
    /// Numerator of the update's scale, `alpha / rank`.
    pub alpha: f64,
    /// Fraction of an adapter's inputs that is dropped in training.
    pub dropout: f64,
    /// Whether the scale is `alpha / √rank` instead.
    pub rslora: bool,
    /// Layers that get an adapter: `all-linear` for the linear layers of the language model, ends of module names, or regular
    /// expressions over whole module names. An end is looked up in the language model first, and elsewhere only if the language
    /// model has no match. A target that names no linear layer may name experts: `experts`, or the end of a parameter's name such
    /// as `experts.down_proj`.
    pub targets: Vec<String>,
    /// Seed of the initial values of `A`; `B` starts at 0.
    pub seed: u64,
}

impl Default for LoraConfig {
    /// Returns rank 64 with alpha 128 on every linear layer of the language model.
    fn default() -> Self {
        let targets = vec!["all-linear".to_owned()];
        Self { rank: 64, alpha: 128.0, dropout: 0.0, rslora: false, targets, seed: 42 }
    }
}

impl LoraConfig {
    /// Returns the factor of `B A` for a given rank.
    pub fn scale(&self, rank: usize) -> f32 {
        let rank = rank as f64;
        (self.alpha / if self.rslora { rank.sqrt() } else { rank }) as f32
    }
}

fn wrong(setting: Setting, got: &str, what: impl Into<String>) -> ModelError {
    ModelError::adapter(format!("{setting} {got:?}: {}", what.into()))
}

/// Returns the name of a layer: that of its weight without `.weight`. The weights of experts may have no such ending.
pub(crate) fn layer_of(weight: &str) -> &str {
    weight.strip_suffix(".weight").unwrap_or(weight)
}

/// Returns the module of a tensor: its name without `weight` or `bias`, or the module that contains a bare parameter.
pub(crate) fn module_of(tensor: &str) -> &str {
    tensor.rsplit_once('.').map_or(tensor, |(module, _)| module)
}

impl Model {
    /// Returns the configuration of the adapters, if the model has any.
    pub fn lora(&self) -> Option<&LoraConfig> {
        self.lora.as_ref()
    }

    /// Adds an adapter to every layer that `config.targets` names. `B` is 0, so the outputs do not change.
    ///
    /// # Errors
    /// Returns an error if a target names no linear layer, a layer is trained in full, or a setting is out of range.
    pub fn add_lora(&mut self, config: &LoraConfig) -> Result<()> {
        if config.rank == 0 || config.rank > MAX_RANK {
            return Err(wrong(LORA_RANK, &config.rank.to_string(), format!("expected 1 to {MAX_RANK}")));
        }
        let layers = self.targets(&config.targets)?;
        for base in layers {
            let stem = layer_of(base.name()).to_owned();
            let [a, b] = factors(base.shape(), config.rank);
            if base.is_experts() && config.dropout > 0.0 {
                let what =
                    format!("adapters of experts ({stem}) do not support dropout, as in PEFT; set it to 0");
                return Err(wrong(LORA_DROPOUT, &config.dropout.to_string(), what));
            }
            let (a, b) = (a.iter().product(), b.iter().product());
            let values = || [kaiming(config.seed, &stem, a, inputs(&base)), vec![0.0; b]];
            self.adapt(&base, config, config.rank, (!base.is_outline()).then(values))?;
        }
        self.lora = Some(config.clone());
        Ok(())
    }

    /// Gives a layer an adapter with these values of `A` and `B`, or the outline of an adapter if no values are given.
    pub(crate) fn adapt(
        &mut self,
        base: &Arc<Param>,
        config: &LoraConfig,
        rank: usize,
        values: Option<[Vec<f32>; 2]>,
    ) -> Result<()> {
        let (stem, part) = (layer_of(base.name()), base.part());
        let param = |name: &str, data: Option<Vec<f32>>, shape: &[usize]| -> Result<Arc<Param>> {
            let name = format!("{stem}.{name}.weight");
            Ok(Arc::new(match data {
                Some(data) => Param::new(name, part, shape, Values::F32(data))?,
                None => Param::outline(name, part, shape, ParamDtype::F32),
            }))
        };
        let [of_a, of_b] = factors(base.shape(), rank);
        let (a, b) = values.map(|[a, b]| (a, b)).unzip();
        let (a, b) = (param("lora_A", a, &of_a)?, param("lora_B", b, &of_b)?);
        let (scale, rate) = (config.scale(rank), config.dropout as f32);
        let adapter = match base.is_experts() {
            false => Adapter::new(Arc::clone(&a), Arc::clone(&b), scale, rate)?,
            true => Adapter::of_experts(Arc::clone(&a), Arc::clone(&b), scale)?,
        };
        base.attach(Arc::new(adapter))?;
        self.push_adapter_param(a);
        self.push_adapter_param(b);
        Ok(())
    }

    /// Returns the linear layers and experts that the targets name, in building order.
    fn targets(&self, targets: &[String]) -> Result<Vec<Arc<Param>>> {
        let linear: Vec<(&Arc<Param>, String)> = self
            .base_params()
            .iter()
            .filter(|p| p.is_linear() && p.name().ends_with(".weight"))
            .map(|p| (p, self.family().format().module_name(module_of(p.name()))))
            .collect();
        let experts: Vec<(&Arc<Param>, String)> = self
            .base_params()
            .iter()
            .filter(|p| p.is_experts())
            .map(|p| (p, self.family().format().module_name(p.name())))
            .collect();
        let (mut chosen, mut of_experts) = (BTreeSet::new(), BTreeSet::new());
        for target in targets {
            let in_llm = |i: &usize| linear[*i].0.part() == Part::Llm;
            let all = 0..linear.len();
            let found: Vec<usize> = if target == "all-linear" {
                all.filter(in_llm).collect()
            } else if target.contains(|c: char| r"*+?()[]{}|\^$".contains(c)) {
                let pattern = Regex::new(&format!("^(?:{target})$")).map_err(|source| {
                    ModelError::Pattern { setting: LORA_TARGETS.to_string(), pattern: target.clone(), source }
                })?;
                all.filter(|&i| {
                    pattern.is_match(&linear[i].1) || pattern.is_match(module_of(linear[i].0.name()))
                })
                .collect()
            } else {
                let ends = |name: &str| {
                    name.strip_suffix(target.as_str())
                        .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
                };
                let found: Vec<usize> =
                    all.filter(|&i| ends(&linear[i].1) || ends(module_of(linear[i].0.name()))).collect();
                let own: Vec<usize> = found.iter().copied().filter(in_llm).collect();
                if own.is_empty() { found } else { own }
            };
            if found.is_empty() {
                let ends = |name: &str| {
                    name.strip_suffix(target.as_str())
                        .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
                };
                let named =
                    |i: &usize| [experts[*i].1.as_str(), module_of(&experts[*i].1)].into_iter().any(ends);
                let own: Vec<usize> = (0..experts.len()).filter(named).collect();
                if !own.is_empty() {
                    of_experts.extend(own);
                    continue;
                }
                let head = target.ends_with("lm_head");
                let mut ends: BTreeSet<&str> =
                    linear.iter().filter_map(|(_, name)| name.rsplit('.').next()).collect();
                ends.retain(|end| end.chars().any(char::is_alphabetic));
                return Err(wrong(
                    LORA_TARGETS,
                    target,
                    if head {
                        format!(
                            "the output head does not support an adapter; leave it out of {LORA_TARGETS}, or select its weights and train without adapters"
                        )
                    } else {
                        format!(
                            "names no linear layer; expected all-linear or the end of a module's name, such as {}",
                            ends.into_iter().collect::<Vec<_>>().join(", ")
                        )
                    },
                ));
            }
            chosen.extend(found);
        }
        let linear = chosen.into_iter().map(|i| linear[i].0);
        Ok(linear.chain(of_experts.into_iter().map(|i| experts[i].0)).map(Arc::clone).collect())
    }

    /// Returns the frozen weights that have an adapter, each with its adapter.
    pub fn adapted(&self) -> impl Iterator<Item = (&Arc<Param>, &Arc<Adapter>)> {
        self.base_params().iter().filter_map(|p| Some((p, p.adapter()?)))
    }

    /// Adds every adapter to its weight and removes the adapters. A bf16 weight is rounded once.
    ///
    /// # Errors
    /// Returns an error if a weight is quantised.
    pub fn merge_adapters(&mut self) -> Result<()> {
        for (base, adapter) in self.adapted() {
            let mut wide = base.read().f32().into_owned();
            adapter.merge_into(&mut wide)?;
            base.store(&wide)?;
            adapter.b().store(&vec![0.0; adapter.b().len()])?;
        }
        self.forget_adapters();
        Ok(())
    }
}

/// Returns the shapes of `A` and `B` for a weight: `[r, k]` and `[n, r]` for a linear layer, `[e, k, r]` and `[e, r, n]` for
/// experts.
pub(crate) fn factors(shape: &[usize], rank: usize) -> [Vec<usize>; 2] {
    match *shape {
        [experts, k, n] => [vec![experts, k, rank], vec![experts, rank, n]],
        [n, k] => [vec![rank, k], vec![n, rank]],
        _ => [Vec::new(), Vec::new()],
    }
}

/// Returns the number of inputs of a linear layer or an expert.
fn inputs(base: &Param) -> usize {
    base.shape().get(1).copied().unwrap_or(1)
}

/// Draws `len` numbers uniformly from `±1/√k`, as `peft` initialises `A` (Kaiming's rule with a = √5). Seed and layer name select
/// the random stream.
fn kaiming(seed: u64, stem: &str, len: usize, k: usize) -> Vec<f32> {
    let mut key = [0u8; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    for (i, byte) in stem.bytes().enumerate() {
        let slot = &mut key[8 + i % 24];
        *slot = slot.wrapping_mul(31).wrapping_add(byte);
    }
    let mut rng = ChaCha8Rng::from_seed(key);
    let bound = 1.0 / (k as f64).sqrt();
    let uniform = |_| ((f64::from(rng.next_u32()) + 0.5) / 2f64.powi(31) - 1.0) * bound;
    (0..len).map(uniform).map(|x| x as f32).collect()
}
