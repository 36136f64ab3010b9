//! The model of a command: source, form and trained parts.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::Result;
use omnigrpo_models::{
    Checkpoint, Family, LoadOptions, LoraConfig, Model, Part, QuantBits, Quantization, whole_tensors,
};
use omnigrpo_ops::Device;
use omnigrpo_train::Selection;

use super::super::{memory, options};
use super::hub::named_dir;
use crate::settings::Settings;
use crate::settings::problem::Problem;

/// Returns the checkpoint directory of `--model_name_or_path`: a directory, or a model in the local Hugging Face cache.
pub fn checkpoint_dir(settings: &Settings) -> Result<PathBuf> {
    let Some(name) = &settings.model.name else {
        return Err(Problem::usage("no model is given").expected("`--model_name_or_path DIR`").into());
    };
    Ok(named_dir("the model", name, settings)?)
}

/// Opens the checkpoint of `--model_name_or_path`, with the changes requested by flags.
pub fn checkpoint(settings: &Settings) -> Result<Checkpoint> {
    let dir = checkpoint_dir(settings)?;
    Checkpoint::open_with(&dir, |config| options::replaced(settings, &dir, config))
}

/// Returns the parts that are fully trained.
pub fn selection(settings: &Settings, family: &Family) -> Selection {
    let mut selection = settings.selection.clone();
    if settings.model.freeze_vision_modules {
        let frozen = |part| family.row().vision_modules.contains(&part);
        selection.projector &= !frozen(Part::Projector);
        selection.towers &= !frozen(Part::Vision);
    }
    selection
}

/// Loads the model with its adapter, or creates one with random weights from its configuration. The model is read-only: weights
/// stay in their files if possible.
pub fn model(settings: &Settings, checkpoint: &Checkpoint, device: Device) -> Result<Model> {
    load(settings, checkpoint, &Selection::NONE, device, true)
}

/// Loads the model like [`model`], with weights that can be changed.
pub fn model_to_change(settings: &Settings, checkpoint: &Checkpoint) -> Result<Model> {
    load(settings, checkpoint, &Selection::NONE, Device::Cpu, false)
}

/// Checks that the settings for routers apply to the model.
pub fn check_router(settings: &Settings, checkpoint: &Checkpoint) -> Result<()> {
    let experts = checkpoint.family().architecture().decoder_config().experts;
    if experts.is_none() && !settings.algorithm.router.is_off() {
        let name = checkpoint.family().name();
        return Err(Problem::usage(
            "router_aux_loss_coef and router_z_loss_coef have no effect on this model",
        )
        .got(format!("{name}, which has no experts"))
        .expected("a family with experts, such as aria; otherwise remove the two settings")
        .into());
    }
    Ok(())
}

/// Loads the model to train, with a new adapter if the settings request one.
pub fn trained_model(settings: &Settings, checkpoint: &Checkpoint, device: Device) -> Result<Model> {
    let selection = selection(settings, checkpoint.family());
    let mut model = load(settings, checkpoint, &selection, device, false)?;
    if let Some(lora) = new_adapters(settings) {
        model.add_lora(lora)?;
    }
    Ok(model)
}

/// Returns the configuration of new adapters, if the settings request them.
fn new_adapters(settings: &Settings) -> Option<&LoraConfig> {
    Some(&settings.lora).filter(|_| settings.model.use_peft && settings.model.adapter.is_none())
}

/// Returns the outline of the model to train, with its adapters, and with trained weights marked.
pub fn trained_outline(settings: &Settings, checkpoint: &Checkpoint) -> Result<Model> {
    let selection = selection(settings, checkpoint.family());
    let mut outline = with_options(settings, checkpoint, &selection, (Device::Outline, false), |options| {
        Ok(Model::outline(checkpoint, options, settings.model.init_weights.is_some())?)
    })?;
    if let Some(adapter) = &settings.model.adapter {
        outline.load_adapter(adapter)?;
    }
    if let Some(lora) = new_adapters(settings) {
        outline.add_lora(lora)?;
    }
    selection.apply(&outline)?;
    Ok(outline)
}

/// Calls `f` with the load options of the settings.
fn with_options<R>(
    settings: &Settings,
    checkpoint: &Checkpoint,
    trained: &Selection,
    (device, in_place): (Device, bool),
    f: impl FnOnce(&LoadOptions) -> Result<R>,
) -> Result<R> {
    let bits = match (settings.model.load_in_8bit, settings.model.load_in_4bit) {
        (true, _) => Some(QuantBits::Eight),
        (_, true) => Some(QuantBits::Four),
        _ => None,
    };
    let whole = match &settings.model.adapter {
        Some(adapter) if bits.is_some() || in_place => whole_tensors(adapter, checkpoint.family().format())?,
        _ => BTreeSet::new(),
    };
    let trained = trained.matcher()?;
    let keep = |name: &str, part: Part| whole.contains(name) || trained(name, part);
    let quantization = bits.map(|bits| Quantization { bits, keep: &keep });
    // Weights stay in their files only for short commands that do not change them: during a long run, a file could change
    // unnoticed.
    let in_place = in_place && device == Device::Cpu && whole.is_empty();
    f(&LoadOptions { dtype: settings.model.dtype, quantization, device, in_place })
}

/// Loads a model after checking that it fits into memory.
fn load(
    settings: &Settings,
    checkpoint: &Checkpoint,
    trained: &Selection,
    device: Device,
    in_place: bool,
) -> Result<Model> {
    let mut model = with_options(settings, checkpoint, trained, (device, in_place), |options| {
        memory::weights_fit(
            &Model::outline(checkpoint, options, settings.model.init_weights.is_some())?,
            device,
        )?;
        let model = match settings.model.init_weights {
            Some(seed) => Model::random(checkpoint, seed, options)?,
            None => Model::load_with(checkpoint, options)?,
        };
        if let Some(quantization) = &options.quantization {
            let params = model.params().iter();
            let left = params.filter(|p| quantization.leaves(p.name(), p.part(), p.shape())).count();
            if left > 0 {
                tracing::warn!(
                    "{left} linear weights are not quantised, because their rows are shorter than a group of {} numbers",
                    Quantization::GROUP
                );
            }
        }
        Ok(model)
    })?;
    if let Some(adapter) = &settings.model.adapter {
        model.load_adapter(adapter)?;
    }
    Ok(model)
}
