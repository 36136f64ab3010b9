//! The model of a command: source, form and trained parts.

use std::path::PathBuf;

use anyhow::Result;
use omnigrpo_kernels::Arithmetic;
use omnigrpo_kernels::paths::Path;
use omnigrpo_models::{Checkpoint, Family, Model, Part, QuantBits};
use omnigrpo_ops::Device;
use omnigrpo_train::{ModelPlan, Selection};

use super::hub::named_dir;
use crate::options;
use omnigrpo_settings::{Bf16Products, Problem, QuantizedActivations, Settings};

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

/// Returns how the CPU multiplies with the weights of the models of a command.
pub fn arithmetic(settings: &Settings) -> Arithmetic {
    Arithmetic {
        bf16_products: match settings.model.bf16_products {
            Bf16Products::Auto => None,
            Bf16Products::Widened => Some(Path::Widened),
            Bf16Products::Dot => Some(Path::Dot),
            Bf16Products::Amx => Some(Path::Amx),
        },
        keeps_inputs: settings.model.quantized_activations == QuantizedActivations::Float32,
    }
}

/// Returns the plan of the model. With `use_peft` and no adapter, it gets new adapters.
pub fn model_plan(settings: &Settings, checkpoint: &Checkpoint, device: Device) -> ModelPlan {
    let model = &settings.model;
    ModelPlan {
        checkpoint: checkpoint.clone(),
        dtype: model.dtype,
        bits: bits(model.load_in_8bit, model.load_in_4bit),
        device,
        arithmetic: arithmetic(settings),
        random: model.init_weights,
        adapter: model.adapter.clone(),
        lora: model.use_peft.then(|| settings.lora.clone()),
    }
}

/// Returns the plan of a reference or teacher that is another model than the policy.
pub fn reference_plan(settings: &Settings, device: Device) -> Result<Option<ModelPlan>> {
    let model = &settings.model;
    let (what, name) = match (&model.teacher, &model.reference) {
        (Some(name), _) => ("the teacher", name),
        (None, Some(name)) => ("the reference", name),
        (None, None) => return Ok(None),
    };
    let checkpoint = Checkpoint::open(&named_dir(what, name, settings)?)?;
    let bits = bits(model.ref_load_in_8bit, model.ref_load_in_4bit);
    Ok(Some(ModelPlan { bits, device, arithmetic: arithmetic(settings), ..ModelPlan::of(&checkpoint) }))
}

fn bits(eight: bool, four: bool) -> Option<QuantBits> {
    match (eight, four) {
        (true, _) => Some(QuantBits::Eight),
        (_, true) => Some(QuantBits::Four),
        _ => None,
    }
}

/// Loads the model with its adapter, for a command that does not change it.
pub fn model(settings: &Settings, checkpoint: &Checkpoint, device: Device) -> Result<Model> {
    Ok(model_plan(settings, checkpoint, device).load_to_read()?)
}

/// Loads the model with its adapter, for a command that changes weights without training.
pub fn model_to_change(settings: &Settings, checkpoint: &Checkpoint) -> Result<Model> {
    let plan = ModelPlan { lora: None, ..model_plan(settings, checkpoint, Device::Cpu) };
    Ok(plan.load(&Selection::NONE)?)
}
