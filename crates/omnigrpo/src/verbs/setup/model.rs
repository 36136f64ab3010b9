//! The model of a command: from where, in what form, what of it is trained.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::Result;
use omnigrpo_models::{Checkpoint, Family, LoadOptions, Model, Part, QuantBits, Quantization, whole_tensors};
use omnigrpo_ops::Device;
use omnigrpo_train::{MemoryOf, MemoryPlan, Selection};

use super::super::{memory, options};
use super::hub::named_dir;
use crate::problem::Problem;
use crate::settings::Settings;

/// The checkpoint directory that `--model_name_or_path` names: a directory, or a model in the local Hugging Face cache.
pub fn checkpoint_dir(settings: &Settings) -> Result<PathBuf> {
    let Some(name) = &settings.model.name else {
        return Err(Problem::usage("no model is given").expected("`--model_name_or_path DIR`").into());
    };
    Ok(named_dir("the model", name, settings)?)
}

/// Opens that checkpoint, with what flags change about it.
pub fn checkpoint(settings: &Settings) -> Result<Checkpoint> {
    let dir = checkpoint_dir(settings)?;
    Checkpoint::open_with(&dir, |config| options::replaced(settings, &dir, config))
}

/// What is trained whole.
pub fn selection(settings: &Settings, family: &Family) -> Selection {
    let mut selection = settings.selection.clone();
    if settings.model.freeze_vision_modules {
        let frozen = |part| family.row().vision_modules.contains(&part);
        selection.projector &= !frozen(Part::Projector);
        selection.towers &= !frozen(Part::Vision);
    }
    selection
}

/// Loads the model with its adapter, or makes a random one from its configuration.
pub fn model(settings: &Settings, checkpoint: &Checkpoint, device: Device) -> Result<Model> {
    load(settings, checkpoint, &Selection::NONE, device, &|_| Ok(()))
}

/// The model to train: as [`model`], with a new adapter where one is asked for. What will not fit into memory is a warning,
/// before anything is loaded.
pub fn trained_model(
    settings: &Settings,
    checkpoint: &Checkpoint,
    [device, reference_device]: [Device; 2],
    with_reference: bool,
) -> Result<Model> {
    let experts = checkpoint.family().architecture().decoder_config().experts;
    if experts.is_none() && !settings.algorithm.router.is_off() {
        let name = checkpoint.family().name();
        return Err(Problem::usage(
            "router_aux_loss_coef and router_z_loss_coef have no effect on this model",
        )
        .got(format!("{name}, which has no experts"))
        .expected("a family with experts, such as aria; or remove the two")
        .into());
    }
    let selection = selection(settings, checkpoint.family());
    let lora = settings.model.use_peft.then_some(&settings.lora);
    let plan = MemoryPlan {
        selection: Some(&selection),
        lora,
        pure_bf16: settings.optimizer.pure_bf16,
        reference: with_reference && reference_device == device,
        of: match device {
            Device::Gpu(_) => MemoryOf::Card { offload: settings.optimizer.offload },
            _ => MemoryOf::Host,
        },
        stream_rows: settings.algorithm.stream_rows(),
        recompute: settings.algorithm.recompute,
    };
    let mut model = load(settings, checkpoint, &selection, device, &|outline| {
        memory::warn(&omnigrpo_train::memory(outline, &plan)?, device);
        Ok(())
    })?;
    if let Some(lora) = lora.filter(|_| settings.model.adapter.is_none()) {
        model.add_lora(lora)?;
    }
    Ok(model)
}

/// Loads a model that fits into memory; `before` sees its outline first.
fn load(
    settings: &Settings,
    checkpoint: &Checkpoint,
    trained: &Selection,
    device: Device,
    before: &dyn Fn(&Model) -> Result<()>,
) -> Result<Model> {
    let adapter = settings.model.adapter.as_deref();
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
        dtype: settings.model.dtype,
        quantization: bits.map(|bits| Quantization { bits, keep: &keep }),
        device,
    };
    let outline = Model::outline(checkpoint, &options, settings.model.init_weights.is_some())?;
    memory::weights_fit(&outline, device)?;
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
