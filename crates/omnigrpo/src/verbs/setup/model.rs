//! The model of a command: from where, in what form, what of it is trained.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::Result;
use omnigrpo_models::{
    Checkpoint, Family, LoadOptions, LoraConfig, Model, Part, QuantBits, Quantization, WeightDtype,
    whole_tensors,
};
use omnigrpo_train::{MemoryPlan, Selection};

use super::super::humanomni::overrides;
use super::super::memory;
use super::hub::named_dir;
use crate::problem::Problem;
use crate::settings::{Settings, TorchDtype};

/// The checkpoint directory that `--model_name_or_path` names: a directory, or a model in the local Hugging Face cache.
pub fn checkpoint_dir(settings: &Settings) -> Result<PathBuf> {
    let Some(name) = &settings.model.model_name_or_path else {
        return Err(Problem::usage("no model is given").expected("`--model_name_or_path DIR`").into());
    };
    Ok(named_dir("the model", name, settings)?)
}

/// Opens that checkpoint, with what flags change about it.
pub fn checkpoint(settings: &Settings) -> Result<Checkpoint> {
    let dir = checkpoint_dir(settings)?;
    Checkpoint::open_with(&dir, |config| overrides(settings, &dir, config))
}

/// The dtype weights are held in.
pub fn weight_dtype(settings: &Settings) -> WeightDtype {
    match settings.model.torch_dtype {
        TorchDtype::Auto => WeightDtype::Auto,
        TorchDtype::Float32 => WeightDtype::Float32,
        TorchDtype::Bfloat16 => WeightDtype::BFloat16,
    }
}

/// What is trained whole.
pub fn selection(settings: &Settings, family: &Family) -> Selection {
    let optim = &settings.optim;
    let frozen = |part| optim.freeze_vision_modules && family.row().vision_modules.contains(&part);
    Selection {
        llm: optim.tune_mm_llm,
        projector: optim.tune_mm_mlp && !frozen(Part::Projector),
        towers: optim.tune_mm_vision && !frozen(Part::Vision),
        instruction: optim.tune_bert,
        gate: optim.tune_gate,
        patterns: optim.trainable_patterns.clone(),
    }
}

/// Loads the model with its adapter, or makes a random one from its configuration.
pub fn model(settings: &Settings, checkpoint: &Checkpoint) -> Result<Model> {
    load(settings, checkpoint, &Selection::NONE, &|_| Ok(()))
}

/// The model to train: as [`model`], with a new adapter where one is asked for. What will not fit into memory is a warning,
/// before anything is loaded.
pub fn trained_model(settings: &Settings, checkpoint: &Checkpoint, with_reference: bool) -> Result<Model> {
    let selection = selection(settings, checkpoint.family());
    let lora = settings.optim.use_peft.then(|| lora(settings));
    let plan = MemoryPlan {
        selection: Some(&selection),
        lora: lora.as_ref(),
        ..memory_plan(settings, with_reference)
    };
    let mut model = load(settings, checkpoint, &selection, &|outline| {
        memory::warn(&omnigrpo_train::memory(outline, &plan)?);
        Ok(())
    })?;
    if let Some(lora) = lora.filter(|_| settings.model.adapter_name_or_path.is_none()) {
        model.add_lora(&lora)?;
    }
    Ok(model)
}

/// The adapters of a run.
pub fn lora(settings: &Settings) -> LoraConfig {
    let optim = &settings.optim;
    LoraConfig {
        rank: optim.lora_r,
        alpha: optim.lora_alpha,
        dropout: optim.lora_dropout,
        rslora: optim.use_rslora,
        targets: optim.lora_target_modules.clone(),
        seed: settings.run.seed,
    }
}

/// A run's memory, apart from what is trained.
fn memory_plan(settings: &Settings, reference: bool) -> MemoryPlan<'static> {
    MemoryPlan {
        selection: None,
        lora: None,
        pure_bf16: settings.model.pure_bf16,
        reference,
        stream_rows: settings.model.max_stream_tokens.unwrap_or(super::super::train::STREAM_ROWS),
        recompute: settings.model.gradient_checkpointing,
    }
}

/// Loads a model that fits into memory; `before` sees its outline first.
fn load(
    settings: &Settings,
    checkpoint: &Checkpoint,
    trained: &Selection,
    before: &dyn Fn(&Model) -> Result<()>,
) -> Result<Model> {
    let adapter = settings.model.adapter_name_or_path.as_deref();
    let bits = match (settings.model.load_in_8bit, settings.model.load_in_4bit) {
        (true, _) => Some(QuantBits::Eight),
        (_, true) => Some(QuantBits::Four),
        _ => None,
    };
    let whole = match (adapter, bits) {
        (Some(adapter), Some(_)) => whole_tensors(adapter, checkpoint.family().format())?,
        _ => BTreeSet::new(),
    };
    let trained = trained.matcher()?;
    let keep = |name: &str, part: Part| whole.contains(name) || trained(name, part);
    let options = LoadOptions {
        dtype: weight_dtype(settings),
        quantization: bits.map(|bits| Quantization { bits, keep: &keep }),
        ..LoadOptions::default()
    };
    let outline = Model::outline(checkpoint, &options, settings.model.init_weights.is_some())?;
    memory::weights_fit(&outline)?;
    before(&outline)?;
    drop(outline);
    let mut model = match settings.model.init_weights {
        Some(seed) => Model::random(checkpoint, seed, &options)?,
        None => Model::load_with(checkpoint, &options)?,
    };
    if let Some(adapter) = adapter {
        model.load_adapter(adapter)?;
    }
    Ok(model)
}
