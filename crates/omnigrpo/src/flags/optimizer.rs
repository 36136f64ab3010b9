//! What is trained and how fast.

use super::*;
use crate::names::{BatchUnit, words};
use crate::settings::{DeviceChoice, Settings};
use crate::values::Field as _;
use Kind::{Bool, Choice, Fraction, Texts, Words};
use omnigrpo_train::ScheduleKind;

fn no_new_adapter(s: &Settings) -> Option<&'static str> {
    if s.model.adapter.is_some() {
        return Some("the adapter of `adapter_name_or_path` has its own");
    }
    (!s.model.use_peft).then_some("`use_peft` is false")
}

/// Whether no adapter can be outside of the language model.
fn llm_adapters(s: &Settings) -> bool {
    !s.model.use_peft || s.model.adapter.is_none() && s.lora.targets == ["all-linear"]
}

fn flat(s: &Settings) -> Option<&'static str> {
    (s.run.schedule == ScheduleKind::Constant)
        .then_some("`lr_scheduler_type` is constant; use constant_with_warmup")
}

/// The settings.
pub const FLAGS: &[Flag] = &[
    row("learning_rate", float(0.0, 100.0), at!(optimizer.learning_rate), STEPS)
        .help("Peak learning rate of AdamW.")
        .alias(&["lr"])
        .per_verb(&[(Sft, "2e-5")]),
    row("lr_scheduler_type", Choice(words::<ScheduleKind>), at!(run.schedule), STEPS)
        .help("Course of the learning rate after warm-up.")
        .alias(&["lr_scheduler"]),
    row("warmup_ratio", Fraction, at!(run.warmup_ratio), STEPS)
        .help("Share of all steps over which the learning rate rises from 0.")
        .overridden(|s, _| (s.run.warmup_steps > 0).then_some("`warmup_steps` overrides it"))
        .idle(|s, _| flat(s)),
    row("warmup_steps", int(0, COUNT), at!(run.warmup_steps), STEPS)
        .help("Steps over which the learning rate rises from 0; wins over the ratio.")
        .idle(|s, _| flat(s)),
    row("weight_decay", float(0.0, BIG), at!(optimizer.weight_decay), STEPS)
        .help("Decoupled decay, not applied to norms and biases."),
    row("adam_beta1", float(0.0, 1.0), at!(optimizer.beta1), STEPS).help("Decay of AdamW's mean."),
    row("adam_beta2", float(0.0, 1.0), at!(optimizer.beta2), STEPS).help("Decay of AdamW's squared mean."),
    row("adam_epsilon", float(0.0, 1.0), at!(optimizer.epsilon), STEPS).help("Added to AdamW's denominator."),
    row("max_grad_norm", float(0.0, BIG), at!(optimizer.max_grad_norm), STEPS)
        .help("Norm the gradient is clipped to; 0 is off."),
    row("offload_optimizer", Bool, at!(optimizer.offload), STEPS)
        .help(
            "Keep the optimizer's state of weights on a GPU in main memory, from where it travels for each \
             step: of 16 bytes a trained bfloat16 weight the GPU holds 6, and results are the same to the bit.",
        )
        .idle(|s, _| (s.model.device == DeviceChoice::Cpu).then_some("`device` is cpu"))
        .free(LOOP),
    row("mm_projector_lr", float(0.0, 100.0), at!(optimizer.projector_lr), STEPS)
        .help("Learning rate of the projector between tower and language model.")
        .unset("`learning_rate`")
        .idle(|s, _| {
            (!s.selection.projector && llm_adapters(s)).then_some("nothing of the projector is trained")
        }),
    row("vision_tower_lr", float(0.0, 100.0), at!(optimizer.tower_lr), STEPS)
        .help("Learning rate of the towers: vision, audio, and the encoder of the question (HumanOmni).")
        .unset("`learning_rate`")
        .idle(|s, _| {
            (!s.selection.towers && llm_adapters(s)).then_some("nothing of the vision tower is trained")
        }),
    row("tune_mm_llm", Bool, at!(selection.llm), STEPS)
        .help("Train the language model.")
        .unset("true; false with adapters"),
    row("tune_mm_mlp", Bool, at!(selection.projector), STEPS)
        .help("Train the projector; with adapters it is trained whole beside them.")
        .unset("true; false with adapters"),
    row("tune_mm_vision", Bool, at!(selection.towers), STEPS)
        .help(
            "Train the vision tower, and the audio tower where there is one. A frozen tower runs once \
             per step and medium.",
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
    .help(
        "Freeze what VLM-R1 calls the vision modules: the towers, and of all families but \
             InternVL the projector too. With false the towers are trained, as there, unless adapters \
             are.",
    )
    .unset("the `tune_mm_` settings decide")
    .first(),
    row("trainable_patterns", Texts, at!(selection.patterns), TUNES)
        .help(
            "Of the parts that are trained whole, only weights whose published name matches one of \
             these regular expressions. One that matches nothing is an error.",
        )
        .idle(|s, _| {
            (!(s.selection.llm || s.selection.projector || s.selection.towers)).then_some(
                "no part is trained whole: turn on `tune_mm_llm`, `tune_mm_mlp` or `tune_mm_vision`",
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
        "Train LoRA adapters on frozen weights. Outputs, checkpoints included, then hold the \
             adapters and whatever is trained whole; the reference is the same weights with adapters \
             off.",
    )
    .alias(&["use_lora", "lora_enable"])
    .first(),
    row("lora_r", int(1, 16_384), at!(lora.rank), TUNES)
        .help("Rank of the adapters.")
        .idle(|s, _| no_new_adapter(s)),
    row("lora_alpha", float(0.0, BIG), at!(lora.alpha), TUNES)
        .help("Adapters are scaled by alpha over rank.")
        .idle(|s, _| no_new_adapter(s)),
    row("lora_dropout", float(0.0, 0.999), at!(lora.dropout), TUNES)
        .help(
            "Share of an adapter's inputs dropped in policy passes; sampling, scoring and the \
             reference drop nothing.",
        )
        .idle(|s, _| no_new_adapter(s)),
    row("lora_target_modules", Words, at!(lora.targets), TUNES)
        .help(
            "Layers that get an adapter: `all-linear` for those of the language model, or ends of \
             module names (looked up there first, then in tower and projector), or regular \
             expressions over whole names; `experts` for every expert of a mixture, each with an adapter \
             of its own (`lora_dropout 0`). Never the head.",
        )
        .alias(&["lora_targets"])
        .idle(|s, _| no_new_adapter(s)),
    row("use_rslora", Bool, at!(lora.rslora), TUNES)
        .help("Scale adapters by alpha over the root of the rank, which keeps high ranks learning.")
        .idle(|s, _| no_new_adapter(s)),
    row(
        "per_device_train_batch_size",
        int(1, 65_536),
        Place { field: "algorithm.prompts_per_micro_batch", ..at!(batch.per_device) },
        STEPS,
    )
    .help("Prompts worked on at a time; completions where `batch_unit` says so."),
    row("batch_unit", Choice(words::<BatchUnit>), at!(batch.unit), &[Train])
        .help("What `per_device_train_batch_size` counts. A preset brings the unit of its source."),
    row(
        "gradient_accumulation_steps",
        int(1, 65_536),
        Place { field: "run.prompts_per_step", ..at!(batch.accumulation) },
        STEPS,
    )
    .help("Batches per optimizer step."),
];
