//! Settings files of DeepSpeed (`zero2.json`, `zero3.json`), and the meaning of each field for a run of this program.
//!
//! The stage is `--shard`, the largest bucket size is `--reduce_bucket_size`, and `stage3_param_persistence_threshold` is
//! `--shard_min_elements`. A number that is in both the file and the settings must be the same in both, as in the
//! `transformers` trainer. `auto` takes the value of the setting. An
//! unsupported field is an error, and so is a field that is not in the table. Fields:
//! <https://www.deepspeed.ai/docs/config-json/>.

use std::path::Path;

use omnigrpo_guard::inside;
use omnigrpo_models::WeightDtype;
use omnigrpo_train::{Offload, ScheduleKind, Shard};
use serde_json::Value;

use crate::Settings;
use crate::names::name_of;
use crate::problem::Problem;

/// Maximum size of a file, bytes. A larger file contains no settings.
const MAX_BYTES: u64 = 1 << 20;

/// Meaning of a field: its effect in this run, or why the value is unsupported. `on_gpu` is true if the model is on a GPU.
enum Field {
    /// Numbers that must equal the values of settings.
    Same(&'static str, fn(&Settings) -> Vec<f64>),
    /// A field with its own reader.
    Read(fn(&Value, &Settings, on_gpu: bool) -> Result<String, String>),
}

use Field::{Read, Same};

/// Fields by path whose meaning depends on settings. `deepspeed.txt` has the others.
const FIELDS: &[(&str, Field)] = &[
    (
        "train_batch_size",
        Same("per_device_train_batch_size × gradient_accumulation_steps × processes", |s| {
            vec![(s.batch.per_device * s.batch.accumulation * s.env.processes.max(1)) as f64]
        }),
    ),
    (
        "train_micro_batch_size_per_gpu",
        Same("per_device_train_batch_size", |s| vec![s.batch.per_device as f64]),
    ),
    (
        "gradient_accumulation_steps",
        Same("gradient_accumulation_steps", |s| vec![s.batch.accumulation as f64]),
    ),
    ("gradient_clipping", Same("max_grad_norm", |s| vec![s.optimizer.max_grad_norm])),
    ("optimizer.params.lr", Same("learning_rate", |s| vec![s.optimizer.learning_rate])),
    (
        "optimizer.params.betas",
        Same("adam_beta1 and adam_beta2", |s| vec![s.optimizer.beta1, s.optimizer.beta2]),
    ),
    ("optimizer.params.eps", Same("adam_epsilon", |s| vec![s.optimizer.epsilon])),
    ("optimizer.params.weight_decay", Same("weight_decay", |s| vec![s.optimizer.weight_decay])),
    ("scheduler.type", Read(scheduler)),
    ("scheduler.params.warmup_max_lr", Same("learning_rate", |s| vec![s.optimizer.learning_rate])),
    ("scheduler.params.warmup_num_steps", Same("warmup_steps", |s| vec![s.run.schedule.warmup_steps as f64])),
    ("scheduler.params.total_num_steps", Read(total_steps)),
    ("zero_optimization.stage", Read(stage)),
    ("zero_optimization.offload_optimizer.device", Read(offload_optimizer)),
    ("zero_optimization.offload_optimizer.nvme_path", Read(nvme_path)),
    ("zero_optimization.offload_param.device", Read(offload_param)),
    ("zero_optimization.allgather_bucket_size", Read(bucket)),
    ("zero_optimization.reduce_bucket_size", Read(bucket)),
    (
        "zero_optimization.stage3_prefetch_bucket_size",
        Read(|v, s, _| match v.as_f64() {
            Some(0.0) => Ok("nothing is fetched ahead".into()),
            _ => of_layers(v, s, "a layer is fetched when a pass reaches it"),
        }),
    ),
    ("zero_optimization.stage3_param_persistence_threshold", Read(threshold)),
    (
        "zero_optimization.stage3_max_live_parameters",
        Read(|v, s, _| {
            of_layers(v, s, "a pass completes the weights of one layer at a time, and a rollout those of all")
        }),
    ),
    (
        "zero_optimization.stage3_max_reuse_distance",
        Read(|v, s, _| of_layers(v, s, "a pass drops the weights of a layer when it reaches the next one")),
    ),
    (
        "zero_optimization.cpu_offload",
        Read(|v, s, on_gpu| match v {
            Value::Bool(true) => offload_optimizer(&"cpu".into(), s, on_gpu),
            Value::Bool(false) => offload_optimizer(&"none".into(), s, on_gpu),
            _ => Err("expected true or false".into()),
        }),
    ),
    (
        "zero_optimization.overlap_comm",
        Read(|v, _, _| match v {
            Value::Bool(true) => Ok("no effect: a pass waits for each exchange".into()),
            v if *v == false || v.is_null() || v == "auto" => Ok("a pass waits for each exchange".into()),
            _ => Err("expected true or false".into()),
        }),
    ),
    ("bf16.enabled", Read(bf16)),
    (
        "fp16.enabled",
        Read(|v, _, _| match v {
            Value::Bool(true) => Err("fp16 training is unsupported; use bf16".into()),
            v if *v == false || v == "auto" => Ok("off: fp16 training is unsupported".into()),
            _ => Err("expected false or \"auto\"".into()),
        }),
    ),
];

/// Returns the meaning and the reason of a field in `deepspeed.txt`, whose head describes its form.
fn plain(name: &str) -> Option<(&'static str, &'static str)> {
    let mut meaning = "";
    for line in include_str!("deepspeed.txt").lines() {
        match line.starts_with(' ') {
            true if line.split_whitespace().any(|own| own == name) => return meaning.split_once(": "),
            true => {}
            false => meaning = line,
        }
    }
    None
}

/// Reads the file as JSON.
fn parse(path: &Path) -> Result<Value, Problem> {
    let place = path.display().to_string();
    let unreadable = |e: String| {
        Problem::usage("the DeepSpeed file cannot be read")
            .at(place.clone())
            .got(e)
            .expected("a JSON file such as zero2.json, or no `deepspeed` setting, which is never required")
    };
    let text = inside::read_named(path, MAX_BYTES).map_err(|e| unreadable(e.to_string()))?;
    let json: Value = serde_json::from_str(&text).map_err(|e| unreadable(e.to_string()))?;
    if json.is_object() { Ok(json) } else { Err(unreadable("no JSON object".into())) }
}

/// Reads a file and returns one line per field that explains its effect in this run. `on_gpu` is true if the model is on a GPU.
///
/// # Errors
/// Returns an error if the file cannot be read, or if a field is unknown, differs from a setting, or requests something
/// unsupported.
pub fn read(path: &Path, settings: &Settings, on_gpu: bool) -> Result<Vec<String>, Problem> {
    let place = path.display().to_string();
    let json = parse(path)?;
    let mut leaves = Vec::new();
    collect("", &json, &mut leaves);
    let (mut lines, mut problems) = (Vec::new(), Vec::new());
    for (name, value) in leaves {
        let effect = match FIELDS.iter().find(|(known, _)| *known == name) {
            Some((_, Same(ours, values))) => same(ours, value, &values(settings)),
            Some((_, Read(read))) => read(value, settings, on_gpu),
            None => match plain(&name) {
                Some(("no effect", why)) => Ok(format!("no effect: {why}")),
                Some((supported, why)) => one_of(supported, value)
                    .map(|()| why.to_owned())
                    .map_err(|expected| format!("{why}; {expected}")),
                None => Err("not a field this program knows".to_owned()),
            },
        };
        match effect {
            Ok(text) => lines.push(format!("{name} = {value}: {text}")),
            Err(problem) => problems.push(format!("{name} = {value}: {problem}")),
        }
    }
    if problems.is_empty() {
        return Ok(lines);
    }
    Err(Problem::usage("unsupported setting in the DeepSpeed file")
        .at(place)
        .got(problems.join("\n"))
        .help("change the file or the settings, or leave `deepspeed` out"))
}

/// Collects the leaves of nested objects with their paths. Lists are leaves.
fn collect<'v>(path: &str, value: &'v Value, leaves: &mut Vec<(String, &'v Value)>) {
    match value.as_object() {
        Some(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                collect(&path, value, leaves);
            }
        }
        None => leaves.push((path.to_owned(), value)),
    }
}

/// Checks that a value is `"auto"` or one of those in a text of JSON. Numbers are compared by value: 1 is 1.0.
fn one_of(supported: &str, value: &Value) -> Result<(), String> {
    let all = serde_json::Deserializer::from_str(supported).into_iter::<Value>().flatten();
    let is_same = |own: Value| *value == own || value.as_f64().is_some_and(|x| own.as_f64() == Some(x));
    let found = value == "auto" || all.into_iter().any(is_same);
    if found { Ok(()) } else { Err(format!("expected {}", supported.replace(' ', " or "))) }
}

fn same(name: &str, value: &Value, ours: &[f64]) -> Result<String, String> {
    let shown = ours.iter().map(f64::to_string).collect::<Vec<_>>().join(", ");
    if value == "auto" {
        return Ok(format!("{name} = {shown}"));
    }
    let theirs: Option<Vec<f64>> = match value.as_array() {
        Some(list) => list.iter().map(Value::as_f64).collect(),
        None => value.as_f64().map(|x| vec![x]),
    };
    match theirs {
        Some(theirs) if theirs == ours => Ok(format!("{name}, the same")),
        Some(theirs) if theirs.len() == ours.len() => {
            Err(format!("{name} is {shown}; write \"auto\" or the same number"))
        }
        _ => Err(format!("expected \"auto\" or {shown}")),
    }
}

fn scheduler(value: &Value, s: &Settings, _: bool) -> Result<String, String> {
    let ours = s.run.schedule.kind;
    let fits = match value.as_str() {
        Some("WarmupLR") => matches!(ours, ScheduleKind::ConstantWithWarmup | ScheduleKind::Constant),
        Some("WarmupDecayLR") => ours == ScheduleKind::Linear,
        Some("WarmupCosineLR") => ours == ScheduleKind::Cosine,
        _ => return Err("expected WarmupLR, WarmupDecayLR or WarmupCosineLR".into()),
    };
    if fits {
        Ok("lr_scheduler_type, the same".into())
    } else {
        Err("`lr_scheduler_type` differs: WarmupLR is constant_with_warmup, WarmupDecayLR linear, WarmupCosineLR cosine"
            .into())
    }
}

fn total_steps(value: &Value, s: &Settings, _: bool) -> Result<String, String> {
    match (value.as_u64(), s.run.max_steps) {
        _ if value == "auto" => Ok("the run's length".into()),
        (Some(theirs), Some(ours)) if theirs == ours => Ok("max_steps, the same".into()),
        _ => Err("the schedule follows the run's length; write \"auto\" or the number of `max_steps`".into()),
    }
}

/// Values of `shard` by stage, and what each process has a part of.
const STAGES: [(Shard, &str, &str); 4] = [
    (Shard::None, "none", "nothing"),
    (Shard::Optimizer, "optimizer", "the moments and masters"),
    (Shard::Gradients, "gradients", "the gradients, moments and masters"),
    (Shard::Weights, "weights", "the decoder's weights, the gradients, moments and masters"),
];

fn stage(value: &Value, s: &Settings, _: bool) -> Result<String, String> {
    let ours = s.algorithm.split.shard;
    let stage = value.as_u64().and_then(|stage| STAGES.get(usize::try_from(stage).ok()?));
    match stage {
        None => Err("expected 0, 1, 2 or 3".into()),
        Some((shard, ..)) if *shard != ours => {
            let name = STAGES.iter().find(|(shard, ..)| *shard == ours).map_or("", |(_, name, _)| name);
            Err(format!("`shard` is {name}; remove that setting or write the same stage"))
        }
        Some((Shard::None, ..)) => Ok("nothing is cut into parts".into()),
        Some(_) if s.env.processes <= 1 => {
            Ok("no effect: there is one process, so nothing is cut into parts".into())
        }
        Some((_, name, what)) => Ok(format!("`shard` is {name}: each process has a part of {what}")),
    }
}

fn threshold(value: &Value, s: &Settings, _: bool) -> Result<String, String> {
    if s.algorithm.split.shard != Shard::Weights {
        return Ok("no effect: no weight is cut into parts".into());
    }
    same("shard_min_elements", value, &[s.algorithm.split.least_cut as f64])
}

/// Reads a number of elements that does not change when layers are completed.
fn of_layers(value: &Value, s: &Settings, why: &str) -> Result<String, String> {
    match value.as_f64() {
        Some(0.0..) => {}
        None if value.is_null() || value == "auto" => {}
        _ => return Err("expected \"auto\" or a number of elements".into()),
    }
    let why = match s.algorithm.split.shard {
        Shard::Weights if s.env.processes > 1 => why,
        Shard::Weights => "there is one process, so no weight is cut into parts",
        _ => "no weight is cut into parts",
    };
    Ok(format!("no effect: {why}"))
}

fn bucket(value: &Value, s: &Settings, _: bool) -> Result<String, String> {
    let ours = s.algorithm.split.bucket;
    match value.as_f64() {
        None if value == "auto" => Ok(format!("reduce_bucket_size = {ours}")),
        Some(size) if size == ours as f64 => Ok("reduce_bucket_size, the same".into()),
        Some(size) if (1.0..ours as f64).contains(&size) => {
            Ok(format!("reduce_bucket_size = {ours}, the largest bucket"))
        }
        Some(size) if size > ours as f64 => {
            Err(format!("`reduce_bucket_size` is {ours}; remove that setting or write the same number"))
        }
        _ => Err("expected \"auto\" or a number of elements".into()),
    }
}

/// Returns the settings that a file implies unless they are given: `shard`, `reduce_bucket_size` and `shard_min_elements`. Returns none
/// if the file cannot be read, because [`read`] reports that.
pub fn implied(path: &Path) -> Vec<(&'static str, String)> {
    let Ok(json) = parse(path) else { return Vec::new() };
    let zero = &json["zero_optimization"];
    let whole = |x: f64, least: f64, most: f64| (least..=most).contains(&x).then(|| (x as u64).to_string());
    let sizes = ["reduce_bucket_size", "allgather_bucket_size"];
    let largest = sizes.iter().filter_map(|name| zero[name].as_f64()).fold(0.0, f64::max);
    let stage = zero["stage"].as_u64().and_then(|stage| STAGES.get(usize::try_from(stage).ok()?));
    let shard = stage.filter(|(shard, ..)| *shard != Shard::None).map(|(_, name, _)| (*name).to_owned());
    let cuts = stage.is_some_and(|(shard, ..)| *shard == Shard::Weights);
    let threshold = zero["stage3_param_persistence_threshold"].as_f64().filter(|_| cuts);
    let least = threshold.and_then(|x| whole(x, 0.0, (1u64 << 40) as f64));
    let each = [
        ("shard", shard),
        ("reduce_bucket_size", whole(largest, 1.0, f64::from(1 << 30))),
        ("shard_min_elements", least),
    ];
    each.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

fn offload_optimizer(value: &Value, s: &Settings, on_gpu: bool) -> Result<String, String> {
    match (value.as_str(), on_gpu) {
        (Some("nvme"), _) if s.optimizer.offload == Offload::File => {
            Ok("`offload_optimizer`: the state is in files".into())
        }
        (Some("cpu" | "none"), _) if s.optimizer.offload == Offload::File => {
            Err("`offload_optimizer` is file; remove that setting or write \"device\": \"nvme\"".into())
        }
        (Some("cpu"), false) => Ok("the state is in host memory, as always on a CPU".into()),
        (Some("cpu"), true) if s.optimizer.offload == Offload::Cpu => {
            Ok("`offload_optimizer`: the state stays in host memory".into())
        }
        (Some("none"), _) => Ok("nothing is offloaded".into()),
        (Some("cpu" | "nvme"), _) => {
            let own = name_of(s.optimizer.offload).unwrap_or_default();
            Err(format!("`offload_optimizer` is {own}; remove that setting or write the same place"))
        }
        _ => Err("expected cpu, nvme or none".into()),
    }
}

fn nvme_path(value: &Value, s: &Settings, _: bool) -> Result<String, String> {
    match (value.as_str(), &s.optimizer.offload_folder) {
        (Some(path), Some(folder)) if folder == Path::new(path) => {
            Ok("`nvme_path`: the folder of the files".into())
        }
        (Some(_), Some(folder)) if s.optimizer.offload == Offload::File => {
            Err(format!("`nvme_path` is {}; remove that setting or write the same folder", folder.display()))
        }
        (Some(_), _) => Ok("no effect: the state is not in files".into()),
        (None, _) if value.is_null() => Ok("the files are in `output_dir`".into()),
        _ => Err("expected a folder".into()),
    }
}

fn offload_param(value: &Value, s: &Settings, on_gpu: bool) -> Result<String, String> {
    match (value.as_str(), on_gpu) {
        (Some("cpu"), false) => Ok("weights are in host memory, as always on a CPU".into()),
        (Some("cpu"), true) if s.algorithm.split.shard == Shard::Weights => Ok(
            "a process has its parts of cut weights in host memory, and copies a layer when a pass needs it; a single process cuts nothing, \
             and its weights stay on the GPU"
                .into(),
        ),
        (Some("cpu"), true) => Err(
            "only cut weights are in host memory; write stage 3, or write none and lower the size of the weights with \
             `load_in_4bit` or `load_in_8bit`"
                .into(),
        ),
        (Some("none"), _) => Ok("nothing is offloaded".into()),
        (Some("nvme"), _) => Err("offload to a disk is unsupported; expected cpu or none".into()),
        _ => Err("expected cpu or none".into()),
    }
}

/// Returns where a file places the optimizer's state, and the folder of files. Returns [`Offload::None`] if the file cannot be read,
/// because [`read`] reports that.
pub fn offloads_optimizer(path: &Path) -> (Offload, Option<String>) {
    let Ok(json) = parse(path) else { return (Offload::None, None) };
    let zero = &json["zero_optimization"];
    let own = &zero["offload_optimizer"];
    match own["device"].as_str() {
        Some("nvme") => (Offload::File, own["nvme_path"].as_str().map(str::to_owned)),
        Some("cpu") => (Offload::Cpu, None),
        _ if zero["cpu_offload"] == true => (Offload::Cpu, None),
        _ => (Offload::None, None),
    }
}

fn bf16(value: &Value, s: &Settings, _: bool) -> Result<String, String> {
    match value {
        Value::Bool(true) if s.model.dtype != WeightDtype::BFloat16 => {
            Err("`torch_dtype` is not bfloat16; give `--torch_dtype bfloat16` or write \"auto\"".into())
        }
        Value::Bool(false) if s.model.dtype == WeightDtype::BFloat16 => {
            Err("`torch_dtype` is bfloat16; write true or \"auto\"".into())
        }
        Value::Bool(_) => Ok("torch_dtype, the same".into()),
        _ if value == "auto" => Ok("set by `torch_dtype`".into()),
        _ => Err("expected true, false or \"auto\"".into()),
    }
}
