//! Settings of other trainers, and what becomes of each here.
//!
//! A launch script of transformers, TRL, VLM-R1 or qwen-vl-finetune is full of settings that say how *that* program is
//! to work. One that has a counterpart is read as it, one that nothing here depends on is dropped and listed in a note,
//! one that asks for what there is not is an error that says what to do.

/// What becomes of a setting.
#[derive(Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is read as this setting with this value, unless that one is given itself.
    Becomes(&'static str, String),
    /// Nothing depends on it, for the reason given.
    Dropped(&'static str),
    /// It asks for what there is not; what to do.
    Refused(&'static str),
    /// The name and the value are this program's own.
    Own,
}

use Fate::{Becomes, Dropped, Own, Refused};

/// Names and what becomes of a value, whose words have a space between them; a bare flag is `true`.
type Row = (&'static [&'static str], fn(&str) -> Fate);

/// Places that transformers can report to, and this program cannot.
const TRACKERS: &[&str] = &[
    "aim",
    "azure_ml",
    "clearml",
    "codecarbon",
    "comet_ml",
    "dagshub",
    "dvclive",
    "flyte",
    "mlflow",
    "neptune",
    "swanlab",
    "trackio",
];

const ONE_PROCESS: &str = "there is one process";
const IN_PROCESS: &str = "completions are sampled in the same process with the trained weights";
const OWN_KERNELS: &str = "the kernels are this program's own";
const READ_AHEAD: &str = "rows are read ahead on other threads";

const TABLE: &[Row] = &[
    (&["bf16"], |v| match on(v) {
        Some(true) => Becomes("torch_dtype", "bfloat16".into()),
        _ => Dropped("`torch_dtype` says how weights are held"),
    }),
    (&["fp16"], |v| match on(v) {
        Some(false) => Dropped("`torch_dtype` says how weights are held"),
        _ => Refused("there is no fp16 training; use `torch_dtype` bfloat16"),
    }),
    (&["tf32"], |_| Dropped("products are as exact as `torch_dtype` says")),
    (&["optim"], |v| match v {
        "adamw" | "adamw_hf" | "adamw_torch" | "adamw_torch_fused" | "adamw_apex_fused" => {
            Dropped("the optimizer is AdamW")
        }
        _ => Refused("leave it out: the only optimizer is AdamW"),
    }),
    (&["max_new_tokens"], |v| Becomes("max_completion_length", v.into())),
    (&["dataset_name"], |v| Becomes("train_file", v.into())),
    (&["overwrite_output_dir"], |v| match on(v) {
        Some(true) => Becomes("resume_from_checkpoint", "never".into()),
        _ => Dropped("earlier checkpoints are moved aside, never written over"),
    }),
    (&["use_vllm"], |v| match on(v) {
        Some(false) => Dropped(IN_PROCESS),
        _ => Refused("leave it out: completions are sampled in the same process with the trained weights"),
    }),
    (&["vllm_mode", "vllm_device", "vllm_gpu_memory_utilization", "vllm_max_model_len"], |_| {
        Dropped(IN_PROCESS)
    }),
    (&["attn_implementation"], |_| Dropped("there is one attention implementation")),
    (&["use_liger_kernel", "use_liger_loss", "torch_compile"], |_| Dropped(OWN_KERNELS)),
    (&["gradient_checkpointing_kwargs"], |_| Dropped("blocks are recomputed in one way only")),
    (&["data_flatten", "data_packing", "padding_free"], |_| Dropped("groups are packed without padding")),
    (
        &[
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_prefetch_factor",
            "dataloader_persistent_workers",
        ],
        |_| Dropped(READ_AHEAD),
    ),
    (&["remove_unused_columns"], |_| Dropped("rewards see every column of a row")),
    (&["cache_dir", "arrow_cache_dir"], |_| {
        Dropped("models and rows are read where they are; HF_HOME moves the local cache of models")
    }),
    (&["trust_remote_code"], |_| Dropped("no code of a checkpoint is ever run")),
    (&["save_safetensors"], |_| Dropped("checkpoints are always safetensors")),
    (&["task_type"], |_| Dropped("tasks differ by their rows and rewards alone")),
    (&["lora_task_type"], |_| Dropped("adapters are those of a causal language model")),
    (&["lora_modules_to_save"], |_| {
        Refused(
            "use `tune_mm_mlp` (or another part) with `trainable_patterns`: those weights are trained whole",
        )
    }),
    (&["per_device_eval_batch_size", "eval_accumulation_steps"], |_| {
        Dropped("evaluation takes as many rows at a time as it has room for, with the same result")
    }),
    (&["generation_batch_size"], |_| {
        Refused(
            "use `per_device_train_batch_size` (prompts), `gradient_accumulation_steps` and `steps_per_generation`",
        )
    }),
    (&["vllm_importance_sampling_correction"], |v| match on(v) {
        Some(false) => Dropped("`importance_sampling_correction` is off by itself"),
        _ => Becomes("importance_sampling_correction", "sequence_mask".to_owned()),
    }),
    (&["num_beams", "generation_num_beams"], |v| match v {
        "1" => Dropped("completions are sampled"),
        _ => Refused("leave it out: completions are sampled, there is no beam search"),
    }),
    (&["is_reward_customized_from_vlm_module"], |v| match on(v) {
        Some(false) => Dropped("rewards are those of `reward_funcs`"),
        _ => Refused("use `reward_funcs` and `accuracy_mode`; `omnigrpo rewards list` shows VLM-R1's rules"),
    }),
    (&["reward_model", "reward_model_path", "reward_model_name_or_path"], |_| {
        Refused("give its directory or its name on the hub to `reward_funcs`")
    }),
    (&["external_judge"], |_| Refused("use `reward_funcs` judge:http://… and `judge_model`")),
    (&["report_to"], |v| {
        match v.split([',', ' ']).any(|word| TRACKERS.contains(&word.to_ascii_lowercase().as_str())) {
            true => Dropped("there is no such tracker here; metrics.jsonl has every number"),
            false => Own,
        }
    }),
    (&["logging_dir"], |_| Dropped("logs are in the run directory")),
    (&["disable_tqdm"], |_| Dropped("progress bars are shown on terminals only")),
    (&["ddp_timeout", "ddp_find_unused_parameters", "ds3_gather_for_generation", "local_rank"], |_| {
        Dropped(ONE_PROCESS)
    }),
];

fn on(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "true" | "yes" | "1" => Some(true),
        "false" | "no" | "0" => Some(false),
        _ => None,
    }
}

/// What becomes of a setting, if it is another trainer's. Dashes count as underscores.
pub fn fate(name: &str, value: &str) -> Option<Fate> {
    let name = name.replace('-', "_");
    let row = TABLE.iter().find(|(names, _)| names.contains(&name.as_str()));
    row.map(|(_, fate)| fate(value)).filter(|fate| *fate != Own)
}

/// Whether another trainer has a setting of this name.
pub fn knows(name: &str) -> bool {
    let name = name.replace('-', "_");
    TABLE.iter().any(|(names, _)| names.contains(&name.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags;

    #[test]
    fn no_name_is_a_setting_here_but_where_values_decide() {
        let mut seen = std::collections::BTreeSet::new();
        for name in TABLE.iter().flat_map(|(names, _)| *names) {
            assert!(seen.insert(name), "`{name}` is in two rows");
            assert_eq!(flags::find(name).is_some(), *name == "report_to", "{name}");
        }
    }

    #[test]
    fn what_a_setting_becomes_is_a_setting() {
        for (name, value, setting) in [
            ("bf16", "True", "torch_dtype"),
            ("max-new-tokens", "64", "max_completion_length"),
            ("dataset_name", "rows.json", "train_file"),
            ("overwrite_output_dir", "true", "resume_from_checkpoint"),
        ] {
            let Some(Becomes(becomes, _)) = fate(name, value) else { panic!("{name}") };
            assert_eq!(becomes, setting);
            assert!(flags::find(becomes).is_some());
        }
    }

    #[test]
    fn values_decide() {
        assert!(matches!(fate("optim", "adamw_torch"), Some(Dropped(_))));
        assert!(matches!(fate("optim", "lion"), Some(Refused(_))));
        assert!(matches!(fate("use_vllm", "False"), Some(Dropped(_))));
        assert!(matches!(fate("use_vllm", "true"), Some(Refused(_))));
        assert!(matches!(fate("report_to", "jsonl mlflow"), Some(Dropped(_))));
        assert_eq!(fate("report_to", "tensorboard wandb"), None);
        assert_eq!(fate("report_to", "none"), None);
        assert_eq!(fate("report_to", "wandbb"), None);
        assert_eq!(fate("beta", "0.1"), None);
    }
}
