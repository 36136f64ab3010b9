//! Trained parts and learning rates.

use super::*;
use crate::names::{BatchUnit, words};
use crate::values::Field as _;
use crate::{DeviceChoice, Settings};
use Kind::{Bool, Choice, Fraction, Path, Switch, Texts, Words};
use omnigrpo_train::{GradDtype, Offload, Optim, ScheduleKind};

fn no_new_adapter(s: &Settings) -> Option<&'static str> {
    if s.model.adapter.is_some() {
        return Some("the adapter in `adapter_name_or_path` has its own value");
    }
    (!s.model.use_peft).then_some("`use_peft` is false")
}

/// Returns true if all adapters are in the language model.
fn llm_adapters(s: &Settings) -> bool {
    !s.model.use_peft || s.model.adapter.is_none() && s.lora.targets == ["all-linear"]
}

fn flat(s: &Settings) -> Option<&'static str> {
    (s.run.schedule.kind == ScheduleKind::Constant)
        .then_some("`lr_scheduler_type` is constant; use constant_with_warmup")
}

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row("learning_rate", float(0.0, 100.0), at!(optimizer.learning_rate), STEPS)
        .help("Peak learning rate of AdamW.")
        .alias(&["lr"])
        .per_verb(&[(Sft, "2e-5")]),
    row("lr_scheduler_type", Choice(words::<ScheduleKind>), at!(run.schedule.kind), STEPS)
        .help("Schedule of the learning rate after the warm-up.")
        .alias(&["lr_scheduler"]),
    row("warmup_ratio", Fraction, at!(run.schedule.warmup_ratio), STEPS)
        .help("Share of all steps in which the learning rate rises from 0.")
        .overridden(|s, _| (s.run.schedule.warmup_steps > 0).then_some("`warmup_steps` overrides it"))
        .idle(|s, _| flat(s)),
    row("warmup_steps", int(0, COUNT), at!(run.schedule.warmup_steps), STEPS)
        .help("Steps in which the learning rate rises from 0; takes precedence over the ratio.")
        .idle(|s, _| flat(s)),
    row("weight_decay", float(0.0, BIG), at!(optimizer.weight_decay), STEPS)
        .help("Decoupled weight decay; not applied to norms and biases."),
    row("adam_beta1", float(0.0, 1.0), at!(optimizer.beta1), STEPS).help("Decay of AdamW's mean of gradients."),
    row("adam_beta2", float(0.0, 1.0), at!(optimizer.beta2), STEPS).help("Decay of AdamW's mean of squared gradients."),
    row("adam_epsilon", float(0.0, 1.0), at!(optimizer.epsilon), STEPS).help("Number added to AdamW's denominator."),
    row("max_grad_norm", float(0.0, BIG), at!(optimizer.max_grad_norm), STEPS)
        .help("Largest norm of the gradient, which is clipped to it; 0 is off."),
    row("optim", Choice(words::<Optim>), at!(optimizer.optim), STEPS)
        .help(
            "Form of the optimizer's moments. 8 bits are for weights of at least 4,096 values; smaller ones have float32. Checkpoints \
             hold float32 in both forms.",
        )
        .idle(|s, _| (s.optimizer.offload == Offload::File).then_some("files of `offload_optimizer` hold float32")),
    row("grad_dtype", Choice(words::<GradDtype>), at!(optimizer.grad_dtype), STEPS)
        .help(
            "Form in which gradients are kept until the update, for weights of the language model with at least 4,096 values. `bfloat16` \
             needs one process and `gradient_leaves` 1.",
        ),
    row("offload_optimizer", Switch(words::<Offload>), at!(optimizer.offload), STEPS)
        .help(
            "Where the optimizer state is. With `cpu` and `file`, the CPU applies the updates: of 16 bytes per trained bfloat16 \
             weight a GPU holds at most 6. Results are equal except for the last bit of a few masters.",
        )
        .idle(|s, _| {
            (s.model.device == DeviceChoice::Cpu && s.optimizer.offload == Offload::Cpu).then_some("`device` is cpu")
        })
        .free(LOOP)
        .per_rank(),
    row("nvme_path", Path, at!(optimizer.offload_folder), STEPS)
        .help("Directory for the files of `offload_optimizer file`; put it on a fast disk. The files are unnamed and vanish with the run.")
        .unset("`output_dir`")
        .idle(|s, _| (s.optimizer.offload != Offload::File).then_some("`offload_optimizer` is not file"))
        .free(LOOP)
        .per_rank(),
    row("mm_projector_lr", float(0.0, 100.0), at!(optimizer.projector_lr), STEPS)
        .of_media()
        .help("Learning rate of the projector between tower and language model.")
        .unset("`learning_rate`")
        .idle(|s, _| {
            (!s.selection.projector && llm_adapters(s)).then_some("the projector is frozen")
        }),
    row("vision_tower_lr", float(0.0, 100.0), at!(optimizer.tower_lr), STEPS)
        .of_media()
        .help("Learning rate of the towers: vision, audio, and the text encoder of HumanOmni.")
        .unset("`learning_rate`")
        .idle(|s, _| {
            (!s.selection.towers && llm_adapters(s)).then_some("the vision tower is frozen")
        }),
    row("tune_mm_llm", Bool, at!(selection.llm), STEPS)
        .help("Train the language model.")
        .unset("true; false with adapters"),
    row("tune_mm_mlp", Bool, at!(selection.projector), STEPS)
        .of_media()
        .help("Train the projector; with adapters, all of its weights besides them.")
        .unset("true; false with adapters"),
    row("tune_mm_vision", Bool, at!(selection.towers), STEPS)
        .of_media()
        .help(
            "Train the vision tower, and the audio tower if the model has one. A frozen tower runs once per \
             step and medium.",
        )
        .unset("true with `freeze_vision_modules` false and no adapters, else false"),
    row(
        "freeze_vision_modules",
        Bool,
        Place { field: "model.freeze_vision_modules",
            set: |s, v| {
                s.model.freeze_vision_modules = take(v)?;
                s.selection.towers = !s.model.freeze_vision_modules && !s.model.use_peft;
                Ok(())
            },
            get: |_| None,
        },
        STEPS,
    )
    .of_media()
        .help(
        "Freeze what VLM-R1 calls the vision modules: the towers and, except for InternVL, the projector. \
             `false` trains the towers, except with adapters.",
    )
    .unset("the `tune_mm_` settings decide")
    .first(),
    row("trainable_patterns", Texts, at!(selection.patterns), TUNES)
        .help(
            "Regular expressions: of the parts that are trained as a whole, train only weights whose published \
             name matches one of them. A pattern that matches nothing is an error.",
        )
        .idle(|s, _| {
            (!(s.selection.llm || s.selection.projector || s.selection.towers)).then_some(
                "no part is trained as a whole: turn on `tune_mm_llm`, `tune_mm_mlp` or `tune_mm_vision`",
            )
        }),
    row(
        "use_peft",
        Bool,
        Place { field: "model.use_peft",
            set: |s, v| {
                if take(v)? {
                    s.train_adapters();
                }
                Ok(())
            },
            get: |s| s.model.use_peft.value(),
        },
        TUNES,
    )
    .help(
        "Train LoRA adapters on frozen weights. Checkpoints and the final model then hold the adapters and \
             the parts that are trained as a whole; the reference is the same model without adapters.",
    )
    .alias(&["use_lora", "lora_enable"])
    .first(),
    row("lora_r", int(1, 16_384), at!(lora.rank), TUNES)
        .help("Rank of the adapters.")
        .idle(|s, _| no_new_adapter(s)),
    row("lora_alpha", float(0.0, BIG), at!(lora.alpha), TUNES)
        .help("Scale of the adapters: alpha divided by the rank.")
        .idle(|s, _| no_new_adapter(s)),
    row("lora_dropout", float(0.0, 0.999), at!(lora.dropout), TUNES)
        .help(
            "Share of an adapter's inputs that is dropped in policy passes. Sampling, scoring and the reference \
             drop nothing, so with more than 0 the first update cannot reuse the rollout's forward pass.",
        )
        .idle(|s, _| no_new_adapter(s)),
    row("lora_target_modules", Words, at!(lora.targets), TUNES)
        .help(
            "Layers that get an adapter. `all-linear`: those of the language model. Ends of module names are \
             looked up there first, then in tower and projector. Regular expressions match complete names. \
             `experts`: every expert of a mixture, each with its own adapter (`lora_dropout 0`). The head never \
             gets one.",
        )
        .alias(&["lora_targets"])
        .idle(|s, _| no_new_adapter(s)),
    row("use_rslora", Bool, at!(lora.rslora), TUNES)
        .help("Scale adapters by alpha divided by the square root of the rank, which keeps high ranks learning.")
        .idle(|s, _| no_new_adapter(s)),
    row(
        "per_device_train_batch_size",
        int(1, 65_536),
        Place { field: "algorithm.prompts_per_micro_batch", ..at!(batch.per_device) },
        STEPS,
    )
    .help("Prompts per micro-batch (completions with `--batch_unit completions`)."),
    row("batch_unit", Choice(words::<BatchUnit>), at!(batch.unit), &[Train])
        .help("Unit of `per_device_train_batch_size`. A preset sets the unit of its source."),
    row(
        "gradient_accumulation_steps",
        int(1, 65_536),
        Place { field: "run.prompts_per_step", ..at!(batch.accumulation) },
        STEPS,
    )
    .help("Batches per optimizer step. The first lines of a run say how many completions a step takes."),
];
