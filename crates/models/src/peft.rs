//! Adapter files in the format of PEFT.
//!
//! Source of the format: `peft` 0.21 `utils/save_and_load.py` and `tuners/lora/config.py`. `adapter_model.safetensors` contains
//! `base_model.model.{module}.lora_A.weight` `[r, k]` and `.lora_B.weight` `[n, r]`, and under
//! `base_model.model.{tensor}` every tensor that was trained in full. `adapter_config.json` contains their settings. Module
//! names are those of the class that `transformers` builds.
//!
//! The experts of a layer are one tensor. PEFT therefore names them in `target_parameters` and wraps their module once for each
//! tensor; the wrapper of the first tensor is the innermost. `{module}.base_layer.lora_A.weight` belongs to the first tensor,
//! `{module}.lora_A.weight` to the last. The factors of all experts form one matrix: row `i·r + j` of `A [e·r, k]` and column
//! `j·e + i` of `B [n, r·e]` belong to expert `i` and rank `j`.
//!
//! Ranks and alphas of single layers (`rank_pattern`, `alpha_pattern`) are read, and written under full module names.
//!
//! Unsupported: pickled adapters, methods other than LoRA, and variants whose sum is not `W + s·BA` (DoRA, biases, repeated
//! layers, a base changed at initialisation).

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use omnigrpo_guard::inside;
use omnigrpo_ops::{Adapter, Param};
use regex::Regex;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, View};
use serde_json::{Map, Value, json};

use crate::config_json::ConfigJson;
use crate::error::{ModelError, Result};
use crate::families::Format;
use crate::lora::{LoraConfig, MAX_RANK, layer_of, module_of};
use crate::model::Model;
use crate::origin::Origin;
use omnigrpo_kernels::checksum::checksum;

const CONFIG: &str = "adapter_config.json";
pub(crate) const WEIGHTS: &str = "adapter_model.safetensors";
const PREFIX: &str = "base_model.model.";

/// Reads the name of the base model from the `adapter_config.json` of `dir`, if that file exists.
///
/// # Errors
/// Returns an error if the file is not an adapter configuration.
pub fn adapter_base(dir: &Path) -> Result<Option<String>> {
    if !dir.join(CONFIG).is_file() {
        return Ok(None);
    }
    Ok(read_config(dir)?.text("base_model_name_or_path")?.map(str::to_owned))
}

/// Returns a number without a fraction as an integer.
fn as_integer(x: f64) -> Value {
    if x.fract() == 0.0 { json!(x as i64) } else { json!(x) }
}

impl Model {
    /// Writes the adapters, and every tensor that is trained in full, in the format of PEFT.
    ///
    /// # Errors
    /// Returns an error if the model has no adapters or the directory cannot be written.
    pub fn save_adapter(&self, dir: &Path) -> Result<()> {
        let Some(lora) = &self.lora else {
            return Err(ModelError::Checkpoint {
                dir: dir.to_path_buf(),
                what: "the model has no adapter".into(),
            });
        };
        std::fs::create_dir_all(dir).map_err(ModelError::io(dir))?;
        let format = self.family().format();
        let mut tensors = Vec::new();
        let [modules, parameters] = self.factors(&mut tensors)?;
        // PEFT saves whole modules, so the other tensors of a trained tensor's module are saved as well.
        let whole = |p: &&Arc<Param>| p.trainable() || self.whole.contains(p.name());
        let whole: BTreeSet<&str> =
            self.base_params().iter().filter(whole).map(|p| module_of(p.name())).collect();
        for param in self.base_params() {
            let name = param.name();
            if whole.iter().any(|m| name.strip_prefix(m).is_some_and(|rest| rest.starts_with('.'))) {
                tensors.push((format!("{PREFIX}{}", format.module_name(name)), Owned::of(param)?));
            }
        }
        let [ranks, alphas] = self.patterns(lora.rank);
        let metadata = Some([("format".to_owned(), "pt".to_owned())].into());
        let path = dir.join(WEIGHTS);
        safetensors::serialize_to_file(tensors, metadata, &path)
            .map_err(ModelError::safetensors(&path, "written"))?;
        crate::weights::share(&path)?;
        let whole: Vec<String> = whole.into_iter().map(|m| format.module_name(m)).collect();
        let base = Origin::of(self.dir());
        // `AutoPeftModel` makes the base by this class. It refuses a task type, whose classes do not include models that see.
        let classes = self.checkpoint().config().get("architectures");
        let class = classes.and_then(|classes| classes.get(0)).and_then(Value::as_str);
        let by_class =
            class.map(|class| json!({ "base_model_class": class, "parent_library": "transformers" }));
        let config = json!({
            "peft_type": "LORA",
            "task_type": if by_class.is_some() { Value::Null } else { json!("CAUSAL_LM") },
            "auto_mapping": by_class,
            "base_model_name_or_path": base.name,
            "revision": base.revision,
            "inference_mode": true,
            "r": lora.rank,
            "lora_alpha": as_integer(lora.alpha),
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
            "lora_dropout": lora.dropout,
            "use_rslora": lora.rslora,
            "use_dora": false,
            "bias": "none",
            "fan_in_fan_out": false,
            "init_lora_weights": true,
            "target_modules": modules,
            "target_parameters": if parameters.is_empty() { Value::Null } else { json!(parameters) },
            "modules_to_save": if whole.is_empty() { Value::Null } else { json!(whole) },
        });
        let path = dir.join(CONFIG);
        std::fs::write(&path, format!("{config:#}\n")).map_err(ModelError::io(path))
    }

    /// Adds the factors of all adapters to `tensors`. Returns the names of the adapted modules, and of the adapted parameters.
    fn factors(&self, tensors: &mut Vec<(String, Owned)>) -> Result<[Vec<String>; 2]> {
        let format = self.family().format();
        let (mut modules, mut parameters) = (Vec::new(), Vec::new());
        for (base, adapter) in self.adapted() {
            if base.is_experts() {
                let parameter = format.module_name(base.name());
                let module = module_of(&parameter);
                let later = self.adapted().skip_while(|(other, _)| !Arc::ptr_eq(other, base)).skip(1);
                let beside = |other: &Arc<Param>| module_of(&format.module_name(other.name())) == module;
                let depth = later.filter(|(other, _)| other.is_experts() && beside(other)).count();
                let wrapper = format!("{PREFIX}{module}{}", ".base_layer".repeat(depth));
                for (name, (shape, data)) in ["lora_A", "lora_B"].into_iter().zip(packed_experts(adapter)) {
                    tensors.push((format!("{wrapper}.{name}.weight"), Owned::new(shape, &data)));
                }
                parameters.push(parameter);
                continue;
            }
            let module = format.module_name(module_of(base.name()));
            for (name, param) in [("lora_A", adapter.a()), ("lora_B", adapter.b())] {
                tensors.push((format!("{PREFIX}{module}.{name}.weight"), Owned::of(param)?));
            }
            modules.push(module);
        }
        Ok([modules, parameters])
    }

    /// Returns the ranks that are not the usual one and the alphas of single layers, by module.
    fn patterns(&self, usual: usize) -> [Map<String, Value>; 2] {
        let format = self.family().format();
        let (mut ranks, mut alphas) = (Map::new(), Map::new());
        for (base, adapter) in self.adapted() {
            let (stem, rank) = (layer_of(base.name()), adapter.rank());
            let module = match base.is_experts() {
                true => format.module_name(base.name()),
                false => format.module_name(stem),
            };
            if let Some(&own) = self.alphas.get(stem) {
                alphas.insert(module.clone(), as_integer(own));
            }
            if rank != usual {
                ranks.insert(module, rank.into());
            }
        }
        [ranks, alphas]
    }

    /// Reads an adapter in PEFT's format: adds the adapters and loads the tensors that were trained in full.
    ///
    /// # Errors
    /// Returns an error if files are missing or damaged, or come from another method or another model.
    pub fn load_adapter(&mut self, dir: &Path) -> Result<()> {
        let config = read_config(dir)?;
        let lora = lora_config(&config)?;
        let alpha_of = alpha_pattern(&config)?;
        let file = AdapterFile::open(dir, self.family().format())?;
        let mut by_name: BTreeMap<String, Arc<Param>> =
            self.base_params().iter().map(|p| (layer_of(p.name()).to_owned(), Arc::clone(p))).collect();
        for (stem, pair) in &file.pairs {
            let fail = |what: String| ModelError::Checkpoint { dir: dir.to_path_buf(), what };
            let base = by_name.remove(stem);
            let Some(base) = base.filter(|p| p.is_linear() || p.is_experts()) else {
                return Err(fail(format!(
                    "the adapter is for {stem}, which is not a linear layer of this model"
                )));
            };
            let (rank, a, b) =
                own_factors(&base, pair).map_err(|what| fail(format!("the adapter of {stem} {what}")))?;
            let module = file.modules.get(stem).unwrap_or(stem);
            let own = alpha_of.iter().find(|(pattern, _)| pattern.is_match(module)).map(|(_, alpha)| *alpha);
            let layer = LoraConfig { alpha: own.unwrap_or(lora.alpha), ..lora.clone() };
            self.adapt(&base, &layer, rank, Some([a, b]))?;
            if layer.alpha != lora.alpha {
                self.alphas.insert(stem.clone(), layer.alpha);
            }
        }
        self.lora = Some(lora);
        if let Some(digests) = &mut self.digests {
            digests.insert(WEIGHTS.to_owned(), file.digest);
        }
        self.store_whole(dir, &file)?;
        self.whole = file.whole.into_keys().collect();
        Ok(())
    }

    /// Overwrites the adapters and the fully trained tensors with those of a directory that [`Self::save_adapter`] wrote.
    ///
    /// # Errors
    /// Returns an error if the file does not contain exactly this model's adapters.
    pub fn reload_adapter(&self, dir: &Path) -> Result<()> {
        let file = AdapterFile::open(dir, self.family().format())?;
        let fail = |what: String| ModelError::Checkpoint { dir: dir.to_path_buf(), what };
        if file.pairs.len() != self.adapted().count() {
            return Err(fail(format!(
                "got adapters for {} layers, expected {} as in this model",
                file.pairs.len(),
                self.adapted().count()
            )));
        }
        for (base, adapter) in self.adapted() {
            let stem = layer_of(base.name());
            let Some(pair) = file.pairs.get(stem) else {
                return Err(fail(format!("the adapter of {stem} is missing")));
            };
            let (rank, a, b) =
                own_factors(base, pair).map_err(|what| fail(format!("the adapter of {stem} {what}")))?;
            if rank != adapter.rank() {
                return Err(fail(format!(
                    "the adapter of {stem} has rank {rank}, expected {}",
                    adapter.rank()
                )));
            }
            adapter.a().store(&a)?;
            adapter.b().store(&b)?;
        }
        if let Some(p) =
            self.base_params().iter().find(|p| p.trainable() && !file.whole.contains_key(p.name()))
        {
            return Err(fail(format!("tensor {} is missing, but this run trains it", p.name())));
        }
        self.store_whole(dir, &file)
    }

    fn store_whole(&self, dir: &Path, file: &AdapterFile) -> Result<()> {
        for (name, (shape, data)) in &file.whole {
            let fail = |what: String| ModelError::Checkpoint { dir: dir.to_path_buf(), what };
            match self.base_params().iter().find(|p| p.name() == name) {
                // An outline has no data to overwrite.
                Some(param) if param.shape() == shape && param.is_outline() => {}
                Some(param) if param.shape() == shape => param.store(data)?,
                Some(param) => {
                    return Err(fail(format!(
                        "tensor {name} has shape {shape:?}; expected {:?}",
                        param.shape()
                    )));
                }
                None => return Err(fail(format!("tensor {name} is not part of this model"))),
            }
        }
        Ok(())
    }

    /// Writes the result of training: the adapter if the model has one, else the whole checkpoint. The tokenizer and processor
    /// files are written in both cases.
    pub fn save_trained(&self, dir: &Path) -> Result<()> {
        if self.lora.is_none() {
            return self.save_pretrained(dir);
        }
        self.save_adapter(dir)?;
        self.copy_companions(dir, &[])?;
        self.write_template(dir, &[])
    }

    /// Loads the result that [`Self::save_trained`] wrote.
    pub fn load_trained(&self, dir: &Path) -> Result<()> {
        if self.lora.is_none() { self.load_weights(dir) } else { self.reload_adapter(dir) }
    }
}

/// Lists the tensors that an adapter directory contains in full. They cannot be quantised.
///
/// # Errors
/// Returns an error if a file is unreadable.
pub fn whole_tensors(dir: &Path, format: &dyn Format) -> Result<BTreeSet<String>> {
    Ok(AdapterFile::open(dir, format)?.whole.into_keys().collect())
}

fn read_config(dir: &Path) -> Result<ConfigJson> {
    ConfigJson::read(&dir.join(CONFIG))
}

/// Settings of variants that add something other than `s·BA`, or change other tensors.
const VARIANTS: [&str; 11] = [
    "use_dora",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "layer_replication",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
];

fn lora_config(config: &ConfigJson) -> Result<LoraConfig> {
    let fail = |what: String| config.error(what);
    let kind = config.text("peft_type")?.unwrap_or_default();
    if kind != "LORA" {
        return Err(fail(format!("peft_type {kind:?}, expected LORA")));
    }
    for key in VARIANTS {
        let off = match config.get(key) {
            None | Some(Value::Bool(false)) => true,
            Some(Value::Array(list)) => list.is_empty(),
            Some(Value::Object(map)) => map.is_empty(),
            Some(_) => false,
        };
        if !off {
            return Err(fail(format!(
                "{key} is set, which is not supported; merge the adapter with `peft` first"
            )));
        }
    }
    if !matches!(config.text("bias")?, None | Some("none")) {
        return Err(fail(
            "bias is trained, which is not supported; merge the adapter with `peft` first".into(),
        ));
    }
    // These methods change the base weights at initialisation, so the file alone does not determine the difference to the
    // checkpoint.
    let init = config.get("init_lora_weights").and_then(Value::as_str).unwrap_or_default();
    if ["pissa", "olora", "corda", "loftq"].iter().any(|name| init.starts_with(name)) {
        return Err(fail(format!(
            "init_lora_weights {init:?} changes the base model; convert the adapter with `peft` first"
        )));
    }
    let rank = config.size("r", Some(8))?;
    if rank > MAX_RANK {
        return Err(fail(format!("r is {rank}, expected 1 to {MAX_RANK}")));
    }
    let alpha = config.number("lora_alpha", 8.0)?;
    let dropout = config.number("lora_dropout", 0.0)?;
    if !(0.0..1.0).contains(&dropout) {
        return Err(fail(format!("lora_dropout is {dropout}; expected at least 0 and less than 1")));
    }
    let rslora = config.boolean("use_rslora", false)?;
    Ok(LoraConfig { rank, alpha, dropout, rslora, targets: Vec::new(), seed: 0 })
}

/// Returns the parameters that `target_parameters` names.
fn target_parameters(dir: &Path) -> Result<Vec<String>> {
    if !dir.join(CONFIG).is_file() {
        return Ok(Vec::new());
    }
    let config = read_config(dir)?;
    match config.get("target_parameters") {
        None => Ok(Vec::new()),
        Some(value) => serde_json::from_value(value.clone())
            .map_err(|_| config.error(format!("target_parameters is {value}; expected names of parameters"))),
    }
}

/// Expert tensors in the order in which modules define them and PEFT wraps them.
const EXPERT_PARAMETERS: [&str; 2] = ["gate_up_proj", "down_proj"];

/// Returns the full name of the parameter that the adapter of an expert module belongs to. `wrapper` is the module's name,
/// followed by `.base_layer` once per level. The number of levels selects the parameter: it counts back from the last targeted
/// one.
fn expert_parameter(wrapper: &str, targets: &[String]) -> Option<String> {
    let (mut module, mut depth) = (wrapper, 0);
    while let Some(inner) = module.strip_suffix(".base_layer") {
        (module, depth) = (inner, depth + 1);
    }
    let names = EXPERT_PARAMETERS.map(|parameter| format!("{module}.{parameter}"));
    let targeted = |name: &String| {
        let end = |target: &String| name.strip_suffix(target.as_str());
        targets.iter().filter_map(end).any(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    names.into_iter().filter(targeted).rev().nth(depth)
}

/// Converts the adapter of experts to PEFT's layout: shape and values of `A` and `B`.
fn packed_experts(adapter: &Adapter) -> [Dense; 2] {
    let (&[experts, k, rank], &[_, _, n]) = (adapter.a().shape(), adapter.b().shape()) else {
        return [(Vec::new(), Vec::new()), (Vec::new(), Vec::new())];
    };
    let (a, b) = (adapter.a().read(), adapter.b().read());
    let (mut packed_a, mut packed_b) = (vec![0.0; experts * rank * k], vec![0.0; n * rank * experts]);
    let (a, b) = (a.f32(), b.f32());
    for e in 0..experts {
        for r in 0..rank {
            (0..k).for_each(|i| packed_a[(e * rank + r) * k + i] = a[(e * k + i) * rank + r]);
            (0..n).for_each(|o| packed_b[(o * rank + r) * experts + e] = b[(e * rank + r) * n + o]);
        }
    }
    [(vec![rank * experts, k], packed_a), (vec![n, rank * experts], packed_b)]
}

/// Converts the `A` and `B` of a file to the layout of the weight's adapter, and returns the rank, `A` and `B`. The error text
/// describes the problem.
fn own_factors(
    base: &Param,
    (a, b): &(Option<Dense>, Option<Dense>),
) -> std::result::Result<(usize, Vec<f32>, Vec<f32>), String> {
    let (Some((a_shape, a)), Some((b_shape, b))) = (a, b) else {
        return Err("lacks lora_A or lora_B".into());
    };
    let rows = a_shape.first().copied().unwrap_or_default();
    let fits = |rank: usize, k: usize, n: usize, experts: usize| {
        let fits = (1..=MAX_RANK).contains(&rank)
            && *a_shape == [rank * experts, k]
            && *b_shape == [n, rank * experts];
        let of = if experts > 1 { format!("{experts}·r") } else { "r".into() };
        let wrong =
            || format!("has shapes {a_shape:?} and {b_shape:?}, expected [{of}, {k}] and [{n}, {of}]");
        fits.then_some(rank).ok_or_else(wrong)
    };
    match *base.shape() {
        [experts, k, n] => {
            let rank = fits(rows / experts.max(1), k, n, experts)?;
            let (mut own_a, mut own_b) = (vec![0.0; a.len()], vec![0.0; b.len()]);
            for e in 0..experts {
                for r in 0..rank {
                    (0..k).for_each(|i| own_a[(e * k + i) * rank + r] = a[(e * rank + r) * k + i]);
                    (0..n).for_each(|o| own_b[(e * rank + r) * n + o] = b[(o * rank + r) * experts + e]);
                }
            }
            Ok((rank, own_a, own_b))
        }
        [n, k] => Ok((fits(rows, k, n, 1)?, a.clone(), b.clone())),
        ref other => Err(format!("belongs to a weight of shape {other:?}, which is unsupported")),
    }
}

/// Reads the alphas of single layers, keyed by the ends of module names. Ranks come from the shapes of the tensors.
fn alpha_pattern(config: &ConfigJson) -> Result<Vec<(Regex, f64)>> {
    let Some(patterns) = config.section("alpha_pattern")? else { return Ok(Vec::new()) };
    let each = |name: &String| {
        let wrong =
            |source| ModelError::Pattern { setting: "alpha_pattern".into(), pattern: name.clone(), source };
        let pattern = Regex::new(&format!(r"^(?:.*\.)?(?:{name})$")).map_err(wrong)?;
        Ok((pattern, patterns.number(name, 0.0)?))
    };
    patterns.object().keys().map(each).collect()
}

/// Shape and values of a tensor.
type Dense = (Vec<usize>, Vec<f32>);

/// Tensors of an adapter, keyed by published name.
struct AdapterFile {
    /// `A` and `B`, keyed by the layer's published name without `weight`.
    pairs: BTreeMap<String, (Option<Dense>, Option<Dense>)>,
    /// Module names of these layers in the file.
    modules: BTreeMap<String, String>,
    whole: BTreeMap<String, Dense>,
    /// Digest of the file.
    digest: u64,
}

impl AdapterFile {
    fn open(dir: &Path, format: &dyn Format) -> Result<Self> {
        let path = dir.join(WEIGHTS);
        let fail = |what: String| ModelError::Checkpoint { dir: dir.to_path_buf(), what };
        if !path.is_file() && dir.join("adapter_model.bin").is_file() {
            return Err(fail(
                "adapter_model.bin is a pickle, which can run code when it is read; save the adapter as safetensors".into(),
            ));
        }
        let bytes = inside::read_path(&path, u64::MAX).map_err(ModelError::io(&path))?;
        let file = SafeTensors::deserialize(&bytes).map_err(ModelError::safetensors(&path, "read"))?;
        let targets = target_parameters(dir)?;
        let (pairs, modules, whole) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let mut this = Self { pairs, modules, whole, digest: checksum(&bytes) };
        for (key, view) in file.tensors() {
            let inner = key.strip_prefix(PREFIX).unwrap_or(&key).replace(".default", "");
            let inner = inner.replace(".modules_to_save", "");
            let (end_a, end_b) = (".lora_A.weight", ".lora_B.weight");
            let wrapper = inner.strip_suffix(end_a).or_else(|| inner.strip_suffix(end_b));
            let parameter = wrapper.and_then(|wrapper| expert_parameter(wrapper, &targets));
            let inner = inner.replace(".base_layer", "");
            let published = |name: &str| {
                format
                    .published_name(name)
                    .ok_or_else(|| fail(format!("{key} is not a weight of this family")))
            };
            let dense =
                (view.shape().to_vec(), widened(&view).map_err(|what| fail(format!("{key}: {what}")))?);
            let stem = inner.strip_suffix(end_a).or_else(|| inner.strip_suffix(end_b));
            let Some(stem) = stem else {
                if inner.contains("lora_") {
                    return Err(fail(format!(
                        "{key}: only lora_A and lora_B of linear layers are supported"
                    )));
                }
                this.whole.insert(published(&inner)?, dense);
                continue;
            };
            let module = parameter.clone().unwrap_or_else(|| stem.to_owned());
            let stem = published(&parameter.unwrap_or_else(|| format!("{stem}.weight")))?;
            this.modules.insert(layer_of(&stem).to_owned(), module);
            let pair = this.pairs.entry(layer_of(&stem).to_owned()).or_default();
            *(if inner.ends_with(end_a) { &mut pair.0 } else { &mut pair.1 }) = Some(dense);
        }
        Ok(this)
    }
}

fn widened(view: &TensorView) -> std::result::Result<Vec<f32>, String> {
    let bytes = view.data();
    let two = || bytes.as_chunks::<2>().0.iter();
    let data: Vec<f32> = match view.dtype() {
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        Dtype::BF16 => two().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect(),
        Dtype::F16 => two().map(|&b| half::f16::from_le_bytes(b).to_f32()).collect(),
        other => return Err(format!("dtype {other:?}, expected F32, BF16 or F16")),
    };
    match data.iter().find(|x| !x.is_finite()) {
        Some(x) => Err(format!("contains {x}, expected finite numbers")),
        None => Ok(data),
    }
}

/// A tensor to be written to a file, in the dtype in which the model holds it.
struct Owned {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Owned {
    fn new(shape: Vec<usize>, data: &[f32]) -> Self {
        Self { dtype: Dtype::F32, shape, bytes: data.iter().flat_map(|x| x.to_le_bytes()).collect() }
    }

    fn of(param: &Param) -> Result<Self> {
        use omnigrpo_kernels::Stored;
        let (dtype, bytes) = match param.read().stored() {
            Stored::F32(x) => (Dtype::F32, x.iter().flat_map(|x| x.to_le_bytes()).collect()),
            Stored::Bf16(x) => (Dtype::BF16, x.iter().flat_map(|x| x.to_le_bytes()).collect()),
            Stored::Quantised(x) => {
                let mut wide = vec![0.0; x.len()];
                x.widen(&mut wide);
                (Dtype::F32, wide.iter().flat_map(|x| x.to_le_bytes()).collect())
            }
        };
        Ok(Self { dtype, shape: param.shape().to_vec(), bytes })
    }
}

impl View for Owned {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}
