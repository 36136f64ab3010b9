//! Settings that change results by rounding alone. A run may resume with other values of them, and reports which differ.
//!
//! A change of these settings changes the order of sums, or which pass computes an activation: with recomputation, the backward pass
//! computes the activations that the rollout would otherwise have kept ([`omnigrpo_models::DecoderMemory`]), and shorter streams or
//! smaller micro-batches divide the sum of a gradient over more passes.

use std::collections::BTreeMap;

use omnigrpo_guard::Setting;
use omnigrpo_ops::Device;
use omnigrpo_ranks::GradientSum;

use crate::error::{DEVICE, GRADIENT_SUM, MICRO_BATCH, OFFLOAD, RECOMPUTE, REFERENCE_DEVICE, STREAM_ROWS};
use crate::optimizer::Offload;
use crate::plan::TrainSetup;

/// Values of the settings that change results by rounding, by name in a checkpoint.
pub(crate) type Rounding = BTreeMap<String, String>;

/// Name in a checkpoint, setting, and value in a run.
type Row = (&'static str, Setting, fn(&TrainSetup) -> String);

const SETTINGS: [Row; 7] = [
    ("recompute", RECOMPUTE, |setup| setup.algorithm.recompute.to_string()),
    ("stream rows", STREAM_ROWS, |setup| setup.algorithm.stream_rows().to_string()),
    ("prompts per micro-batch", MICRO_BATCH, |setup| setup.algorithm.micro().to_string()),
    ("device", DEVICE, |setup| kind(setup.model.device()).to_owned()),
    ("reference device", REFERENCE_DEVICE, |setup| match setup.algorithm.loss.needs_reference() {
        true => kind(setup.reference_device).to_owned(),
        false => "none".to_owned(),
    }),
    // The CPU has the state of its own weights in any case.
    ("optimizer", OFFLOAD, |setup| match (setup.model.device(), setup.optimizer.offload) {
        (Device::Gpu(_), Offload::Cpu | Offload::File) => "on the CPU".to_owned(),
        _ => "on the device".to_owned(),
    }),
    ("gradient sum", GRADIENT_SUM, |setup| {
        let split = &setup.algorithm.split;
        match split.settings.sum {
            GradientSum::Ordered => "ordered".to_owned(),
            GradientSum::Engine => format!("over {} processes", split.ranks.size()),
        }
    }),
];

fn kind(device: Device) -> &'static str {
    if let Device::Gpu(_) = device { "gpu" } else { "cpu" }
}

/// Returns the values of a run.
pub(crate) fn of(setup: &TrainSetup) -> Rounding {
    SETTINGS.iter().map(|(name, _, value)| ((*name).to_owned(), value(setup))).collect()
}

/// Returns a text about the values that differ between a checkpoint and the run that resumes it; `None` if all are equal. Ignores
/// values that the checkpoint of an earlier version lacks.
pub(crate) fn differing(checkpoint: &Rounding, run: &Rounding) -> Option<String> {
    let each = SETTINGS.iter().filter_map(|(name, setting, _)| {
        let (old, new) = (checkpoint.get(*name)?, run.get(*name)?);
        (old != new).then(|| format!("{setting}: {old} → {new}"))
    });
    let each: Vec<String> = each.collect();
    (!each.is_empty()).then(|| each.join("; "))
}
