//! Checkpoint, precision and memory.

use super::*;
use crate::DeviceChoice;
use crate::cards;
use crate::names::{Bf16Products, ExportFormat, QuantizedActivations, words};
use crate::run::Workload;
use crate::values::Field as _;
use Kind::{Bool, Choice, Path, Text};
use omnigrpo_models::{GgufPrecision, WeightDtype};

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row("model_name_or_path", Text, at!(model.name), MODEL)
        .help(
            "Checkpoint directory in the published Hugging Face layout, or the name of a model on the hub, \
             which is fetched if the local cache lacks it.",
        )
        .alias(&["model", "model_path"])
        .unset("")
        .required(&[Train, Sft, Generate, Score, Eval, Export])
        .free(LOOP)
        .per_rank(),
    row("torch_dtype", Choice(words::<WeightDtype>), at!(model.dtype), PRECISE)
        .help(
            "Precision of the weights; `auto` keeps that of the checkpoint, and `convert` makes float32 of values of few bits. With bfloat16 the optimizer keeps \
             float32 masters, and products on AMX tiles round activations as well.",
        )
        .alias(&["dtype"]),
    row(
        "device",
        Text,
        Place {
            field: "",
            set: |s, v| {
                s.model.device = DeviceChoice::parse(&take::<String>(v)?, "device")?;
                Ok(())
            },
            get: |s| text(&s.model.device.to_string()),
        },
        PLACED,
    )
    .help(
        "Where the model runs: `cpu`, or `cuda:N` for the NVIDIA GPU with that number in the driver's list \
             (`cuda` is the first; CUDA_VISIBLE_DEVICES hides some). `auto` takes the first GPU, else the CPU, \
             and prints which and why.",
    )
    .idle(|s, verb| (verb == Bench && s.bench.workload == Workload::Own).then_some("the workload `own` runs on the CPU"))
    .free(LOOP)
    .per_rank(),
    row(
        "reference_device",
        Text,
        Place {
            field: "",
            set: |s, v| {
                let choice = DeviceChoice::parse(&take::<String>(v)?, "reference_device")?;
                s.model.reference_device = Some(choice);
                Ok(())
            },
            get: |s| s.model.reference_device.and_then(|choice| text(&choice.to_string())),
        },
        GRPO,
    )
    .help("Where the reference of the KL term runs. `cpu` leaves the memory of a GPU to the policy.")
    .unset("`device`")
    .idle(|s, _| {
        let teaches_itself = s.prompts.privileged_context.is_some()
            && s.model.teacher.is_none()
            && s.run.sync_reference.is_none();
        match teaches_itself {
            true => Some("the policy is its own teacher"),
            false => (!s.algorithm.loss.needs_reference()).then_some("`beta` is 0, so there is no reference"),
        }
    })
    .free(LOOP),
    row(
        "gpu_memory",
        Text,
        Place {
            field: "",
            set: |s, v| {
                s.model.gpu_memory = Some(memory_of(&take::<String>(v)?)?);
                Ok(())
            },
            get: |s| s.model.gpu_memory.and_then(|bytes| text(&format!("{}MB", bytes / 1_000_000))),
        },
        TUNES,
    )
    .help(
        "Plan for a GPU with this memory, such as `24GB`, instead of opening one. The memory that the driver takes for \
         itself is not included.",
    )
    .unset("the free memory of `device`")
    .idle(|s, _| match s.io.dry_run {
        true => on_cpu(s),
        false => Some("only `plan`, `init` and `--dry_run` assume a GPU"),
    })
    .free(LOOP),
    row(
        "gpu_rates",
        Text,
        Place {
            field: "",
            set: |s, v| {
                let given: String = take(v)?;
                let rates = cards::rates_of(&given)?;
                s.model.gpu_rates = Some((given, rates));
                Ok(())
            },
            get: |s| s.model.gpu_rates.as_ref().and_then(|(given, _)| text(given)),
        },
        TUNES,
    )
    .help(
        "GPU whose times `plan` and `init` predict: rtx-4080, rtx-4090, rtx-3090, l4, rtx-5090, a100-40gb, a6000, l40s, a100-80gb, h100, \
         h200 or b200; or TFLOP/s of bf16 products and GB/s of memory, such as `165,1008`.",
    )
    .unset("those of a usual GPU with as much memory")
    .idle(|s, _| match s.io.dry_run {
        true => on_cpu(s),
        false => Some("only `plan`, `init` and `--dry_run` predict times"),
    })
    .free(LOOP),
    row(
        "adapter_name_or_path",
        Path,
        Place {
            field: "model.adapter",
            set: |s, v| {
                s.model.adapter = Some(take(v)?);
                s.train_adapters();
                Ok(())
            },
            get: |s| s.model.adapter.value(),
        },
        ADAPTED,
    )
    .help(
        "LoRA adapter in PEFT's format that was trained on this checkpoint. Training continues it, with its \
             rank and scale; other commands apply it.",
    )
    .alias(&["adapter_path"])
    .unset("none")
    .first()
    .free(LOOP)
    .per_rank(),
    row("merge", Bool, at!(model.merge), &[Export])
        .help("Add the adapter to the weights and write a complete checkpoint."),
    row("format", Choice(words::<ExportFormat>), at!(model.format), &[Export])
        .help("Files to write into `output_dir`."),
    row("outtype", Choice(words::<GgufPrecision>), at!(model.outtype), &[Export])
        .help("Precision of the matrices in a GGUF file. Vectors always have float32.")
        .idle(|s, _| (s.model.format != ExportFormat::Gguf).then_some("only `format` gguf has it")),
    row("load_in_8bit", Bool, at!(model.load_in_8bit), QUANTISED).help(
        "Store frozen linear weights in 8 bits (8.5 with scales), quantised one tensor at a time while they \
             are read. Training then needs adapters.",
    ),
    row("load_in_4bit", Bool, at!(model.load_in_4bit), QUANTISED).help(
        "Store frozen linear weights in 4 bits (4.5 with scales): a quarter of bfloat16, with 16 times the \
             rounding error of 8 bits. Training then needs adapters.",
    ),
    row("quantized_activations", Choice(words::<QuantizedActivations>), at!(model.quantized_activations), QUANTISED)
        .help(
            "Form of the activations in products with frozen 8-bit or 4-bit weights. `float32` is slower on \
             CPUs that multiply 8-bit integers or bfloat16.",
        )
        .idle(|s, _| {
            (!s.model.load_in_8bit && !s.model.load_in_4bit)
                .then_some("no weight has few bits without `load_in_8bit` or `load_in_4bit`")
        }),
    row("bf16_products", Choice(words::<Bf16Products>), at!(model.bf16_products), MULTIPLIES)
        .help(
            "How the CPU multiplies with bfloat16 weights, and with widened 8-bit or 4-bit weights. CPUs that \
             multiply bytes widen them only for gradients, and for many rows on tiles. `doctor` measures each \
             way. A resumed run keeps the way that it began with.",
        )
        .free(LOOP)
        .idle(|s, verb| {
            let wide = s.model.dtype == WeightDtype::Float32 && !s.model.load_in_8bit && !s.model.load_in_4bit;
            (wide && verb != Doctor).then_some("`torch_dtype` is float32 and no weight has few bits")
        }),
    row("init_weights", int(0, i64::MAX), at!(model.init_weights), &[Train, Sft])
        .help(
            "Start from random weights with this seed; the checkpoint directory then needs no weight files.",
        )
        .unset("the checkpoint's weights"),
    row("pure_bf16", Bool, at!(optimizer.pure_bf16), STEPS)
        .help(
            "Update bfloat16 weights without float32 masters. This saves memory, but at small learning rates \
             most updates round to nothing, unless `stochastic_rounding` is set.",
        )
        .idle(|s, _| (s.model.dtype == WeightDtype::Float32).then_some("`torch_dtype` is float32")),
    row("stochastic_rounding", Bool, at!(optimizer.stochastic_rounding), STEPS)
        .help(
            "Round bfloat16 weights without masters up or down at random, with the exact value as the mean, so that small updates \
             count. The same run has the same bits.",
        )
        .idle(|s, _| (!s.optimizer.pure_bf16).then_some("`pure_bf16` is false")),
    row("max_stream_tokens", int(16, COUNT), at!(algorithm.max_stream_tokens), &[Train, Sft, Score, Demo])
        .help(
            "Maximum number of tokens in one forward pass. A larger group is split into passes that share its prompt. Results \
             are the same except for rounding, so a run that resumes with another value ends with other bits.",
        )
        .unset("4096; a whole group in `score`")
        .free(LOOP),
    row("gradient_checkpointing", Bool, at!(algorithm.recompute), &[Train, Sft, Demo, Bench])
        .help(
            "Recompute blocks in the backward pass: less memory, about a third more time. Results are the same except for \
             rounding, so a run that resumes with another value ends with other bits.",
        )
        .free(LOOP),
];

/// Returns why a plan has no use for a GPU.
fn on_cpu(settings: &Settings) -> Option<&'static str> {
    (settings.model.device == DeviceChoice::Cpu)
        .then_some("`device` is cpu, and the plan measures this machine")
}

/// Reads an amount of memory such as `24GB`, in bytes.
fn memory_of(text: &str) -> Result<u64, Problem> {
    let units = [("GiB", 1u64 << 30), ("GB", 1_000_000_000), ("MB", 1_000_000)];
    let read = |(unit, bytes): &(&str, u64)| {
        let number: f64 = text.strip_suffix(unit)?.trim().parse().ok()?;
        (number > 0.0 && number < BIG).then_some((number * *bytes as f64) as u64)
    };
    units.iter().find_map(read).ok_or_else(|| {
        Problem::usage("this is no amount of memory")
            .at("--gpu_memory")
            .got(format!("`{text}`"))
            .expected("a number with a unit, such as `24GB`, `22.5GiB` or `800MB`")
    })
}
