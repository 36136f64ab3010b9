//! Settings of other trainers, and their meaning in this program.
//!
//! A launch script of transformers, TRL, VLM-R1, qwen-vl-finetune or a program of [`peers`] has many settings of *that* program.
//! A setting with a counterpart is translated to it. A setting without effect here is dropped and listed in a note. An
//! unsupported setting is an error with advice.

use omnigrpo_data::QUESTION_TEMPLATES;

/// Meaning of a foreign setting in this program.
// Only fates without a function are compared.
#[allow(unpredictable_function_pointer_comparisons)]
#[derive(Debug, PartialEq, Eq)]
pub enum Fate {
    /// The setting is another name of this setting with this value, unless that setting is given directly.
    Becomes(&'static str, String),
    /// The setting becomes several settings, unless they are given directly. Those after the first are implied: if another
    /// foreign setting becomes the same one, that value is used instead.
    BecomesAll(Vec<(&'static str, String)>),
    /// The meaning depends on another setting of the same source, whose value is `None` if it is not given.
    Depends(&'static str, fn(&str, Option<&str>) -> Fate),
    /// The setting has no effect, for the given reason.
    Dropped(&'static str),
    /// The setting is unsupported, and the text is advice.
    Refused(&'static str),
    /// The name and the value belong to this program.
    Own,
}

use Fate::{Becomes, BecomesAll, Depends, Dropped, Own, Refused};

mod peers;
mod trainers;

/// Names of a setting, and a function that returns the meaning of a value. Words of the value are separated by spaces; a bare
/// flag is `true`. A name that ends in `*` matches all names with that prefix that have no earlier row.
type Row = (&'static [&'static str], fn(&str) -> Fate);

/// Trackers of transformers that are unsupported.
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

const COMPLETE: &str = "every process holds the complete weights, gradients and optimizer state";
const IN_PROCESS: &str = "completions are sampled in the same process with the trained weights";
const OWN_KERNELS: &str = "the program uses only its own kernels";
const READ_AHEAD: &str = "rows are read ahead on other threads";

const TABLE: &[Row] = &[
    (&["bf16"], |v| match on(v) {
        Some(true) => Becomes("torch_dtype", "bfloat16".into()),
        _ => Dropped("`torch_dtype` sets the precision of stored weights"),
    }),
    (&["fp16"], |v| match on(v) {
        Some(false) => Dropped("`torch_dtype` sets the precision of stored weights"),
        _ => Refused("fp16 training is unsupported; use `torch_dtype` bfloat16"),
    }),
    (&["tf32"], |_| Dropped("`torch_dtype` sets the precision of products")),
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
        _ => Dropped("earlier checkpoints are moved aside, never overwritten"),
    }),
    (&["attn_implementation"], |_| Dropped("there is only one attention implementation")),
    (&["use_liger_kernel", "use_liger_loss", "torch_compile"], |_| Dropped(OWN_KERNELS)),
    (&["gradient_checkpointing_kwargs"], |_| Dropped("there is only one way to recompute blocks")),
    (&["data_flatten", "padding_free"], |_| Dropped("groups are packed without padding")),
    (&["data_packing"], |_| {
        Dropped("each row of a packed list is read as a separate row; groups are packed without padding")
    }),
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
        Dropped("models and rows are read in place; HF_HOME moves the local cache of models")
    }),
    (&["trust_remote_code"], |_| Dropped("code in a checkpoint is never run")),
    (&["save_safetensors"], |_| Dropped("checkpoints are always in the safetensors format")),
    // VLM-R1 selects the wording of the question by the task.
    (&["task_type"], |v| match QUESTION_TEMPLATES.iter().find(|template| template.name == v) {
        Some(template) => Becomes("question_template", template.name.into()),
        None => Dropped(
            "no question template has this name; `--question_template default` adds VLM-R1's sentence about tags",
        ),
    }),
    (&["lora_task_type"], |_| Dropped("adapters are always for a causal language model")),
    (&["lora_modules_to_save", "modules_to_save"], |v| {
        off(
            v,
            "use `tune_mm_mlp` (or another part) with `trainable_patterns`: those weights are fully trained",
        )
    }),
    (&["per_device_eval_batch_size", "eval_accumulation_steps"], |_| {
        Dropped("an evaluation processes as many rows at a time as fit into memory, with the same result")
    }),
    (&["generation_batch_size"], |_| {
        Refused(
            "use `per_device_train_batch_size` (prompts), `gradient_accumulation_steps` and `steps_per_generation`",
        )
    }),
    (&["vllm_importance_sampling_correction"], |v| match on(v) {
        Some(false) => Dropped("`importance_sampling_correction` is off by default"),
        _ => Becomes("importance_sampling_correction", "sequence_mask".to_owned()),
    }),
    (&["num_beams", "generation_num_beams"], |v| match v {
        "1" => Dropped("completions are sampled"),
        _ => Refused("leave it out: completions are sampled; beam search is unsupported"),
    }),
    // In VLM-R1's model modules, `select_reward_func` has its own rewards only for `rec` and raises for any other task.
    (&["is_reward_customized_from_vlm_module"], |v| match on(v) {
        Some(false) => Dropped("`reward_funcs` sets the rewards"),
        _ => Depends("task_type", |_, task| match task {
            Some("rec") => BecomesAll(vec![("accuracy_mode", "iou".into()), ("format_mode", "rec".into())]),
            _ => Refused(
                "VLM-R1 has its own rewards only for `--task_type rec`; use `reward_funcs`, `accuracy_mode` and `format_mode` \
                 (`omnigrpo rewards list` shows VLM-R1's rules)",
            ),
        }),
    }),
    (&["reward_model", "reward_model_path", "reward_model_name_or_path"], |_| {
        Refused("put its directory or its name on the hub into `reward_funcs`")
    }),
    (&["external_judge"], |_| Refused("use `reward_funcs` judge:http://… and `judge_model`")),
    (&["report_to"], |v| {
        match v.split([',', ' ']).any(|word| TRACKERS.contains(&word.to_ascii_lowercase().as_str())) {
            true => Dropped("this tracker is unsupported; metrics.jsonl has every number"),
            false => Own,
        }
    }),
    (&["logging_dir"], |_| Dropped("logs are in the run directory")),
    (&["disable_tqdm"], |_| Dropped("a terminal always shows the bar; a pipe or a file gets lines")),
    (&["ddp_timeout", "ddp_find_unused_parameters", "ds3_gather_for_generation", "local_rank"], |_| {
        Dropped(COMPLETE)
    }),
    (&["use_vllm", "vllm_*"], |_| Dropped(IN_PROCESS)),
];

fn on(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "true" | "yes" | "1" => Some(true),
        "false" | "no" | "0" => Some(false),
        _ => None,
    }
}

/// Returns the meaning of an unsupported setting: no effect if its value turns it off, otherwise an error with the advice.
fn off(value: &str, advice: &'static str) -> Fate {
    let none = matches!(
        value.to_ascii_lowercase().as_str(),
        "" | "none" | "null" | "false" | "no" | "0" | "0.0" | "-1" | "{}" | "[]"
    );
    if none { Dropped("it is off here as well") } else { Refused(advice) }
}

/// Returns the meaning of a setting if it belongs to another trainer. Dashes count as underscores. `others` returns the text
/// of another setting of the same source, given its name.
pub fn fate<'t>(name: &str, value: &str, others: impl Fn(&str) -> Option<&'t str>) -> Option<Fate> {
    let unset = matches!(value.to_ascii_lowercase().as_str(), "none" | "null");
    let fate = match row(name).map(|(_, fate)| fate(value))? {
        Becomes(..) | BecomesAll(_) | Depends(..) if unset => Dropped("it has no value"),
        Depends(other, fate) => fate(value, others(other)),
        fate => fate,
    };
    (fate != Own).then_some(fate)
}

/// Returns the row of a setting. A prefix ending in `*` never matches a setting of this program.
fn row(name: &str) -> Option<&'static Row> {
    let name = name.replace('-', "_");
    let fits = |pattern: &&str| match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start) && crate::settings::flags::find(&name).is_none(),
        None => **pattern == name,
    };
    TABLE.iter().chain(trainers::TABLE).chain(peers::TABLE).find(|(names, _)| names.iter().any(fits))
}

/// Splits a word of verl or EasyR1, `group.name=value`, into name and value.
#[cfg(feature = "cli")]
pub fn dotted(word: &str) -> Option<(&str, &str)> {
    peers::dotted(word)
}

/// Returns true if another trainer has a setting of this name.
#[cfg(feature = "cli")]
pub fn knows(name: &str) -> bool {
    row(name).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::flags;

    #[test]
    fn no_name_is_a_setting_here_but_where_values_decide() {
        let mut seen = std::collections::BTreeSet::new();
        for name in TABLE.iter().chain(trainers::TABLE).chain(peers::TABLE).flat_map(|(names, _)| *names) {
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
            ("task_type", "rec", "question_template"),
        ] {
            let Some(Becomes(becomes, _)) = fate(name, value, |_| None) else { panic!("{name}") };
            assert_eq!(becomes, setting);
            assert!(flags::find(becomes).is_some());
        }
    }

    #[test]
    fn values_decide() {
        let alone = |name, value| fate(name, value, |_| None);
        assert!(matches!(alone("optim", "adamw_torch"), Some(Dropped(_))));
        assert!(matches!(alone("optim", "lion"), Some(Refused(_))));
        assert!(matches!(alone("use_vllm", "true"), Some(Dropped(_))));
        assert!(matches!(alone("vllm_max_model_length", "2048"), Some(Dropped(_))));
        // The name is another name of a setting of this program.
        assert_eq!(alone("vllm_importance_sampling_mode", "token_mask"), None);
        assert!(matches!(alone("report_to", "jsonl mlflow"), Some(Dropped(_))));
        assert_eq!(alone("report_to", "tensorboard wandb"), None);
        assert_eq!(alone("report_to", "none"), None);
        assert_eq!(alone("report_to", "wandbb"), None);
        assert_eq!(alone("beta", "0.1"), None);
        assert!(matches!(alone("task_type", "vqa"), Some(Dropped(_))));
    }

    /// Every field in the source of another trainer is a setting here or has a row in the table.
    #[test]
    fn every_field_of_other_trainers_has_an_answer() {
        let lists = [
            ("transformers", include_str!("fields/transformers.txt"), 114),
            ("trl", include_str!("fields/trl.txt"), 110),
            ("ms-swift", include_str!("fields/ms_swift.txt"), 393),
            ("unsloth", include_str!("fields/unsloth.txt"), 71),
            ("verl", include_str!("fields/verl.txt"), 820),
            ("easy-r1", include_str!("fields/easy_r1.txt"), 176),
        ];
        for (trainer, list, count) in lists {
            let fields: Vec<&str> = list.lines().filter(|line| !line.starts_with('#')).collect();
            assert_eq!(fields.len(), count, "{trainer}");
            let unknown: Vec<&str> = fields
                .iter()
                .copied()
                .filter(|field| !knows(field) && flags::find(field).is_none())
                .collect();
            assert!(unknown.is_empty(), "{trainer}: {unknown:?}");
            // The command line must also recognise a name with dots.
            for field in fields.iter().filter(|field| field.contains('.')) {
                assert_eq!(dotted(&format!("{field}=1")), Some((*field, "1")), "{trainer}");
            }
            // The message for any value is one line.
            for (field, value) in
                fields.iter().flat_map(|field| ["true", "none", "0.5"].map(|value| (field, value)))
            {
                if let Some(Dropped(why) | Refused(why)) = fate(field, value, |_| None) {
                    assert!(!why.is_empty() && !why.contains('\n') && why.len() < 200, "{field}: {why}");
                }
            }
        }
    }

    #[test]
    fn rewards_of_a_model_module_depend_on_the_task() {
        let with = |task| fate("is_reward_customized_from_vlm_module", "True", move |_| task);
        let Some(BecomesAll(settings)) = with(Some("rec")) else { panic!() };
        assert_eq!(settings, [("accuracy_mode", "iou".to_owned()), ("format_mode", "rec".to_owned())]);
        assert!(settings.iter().all(|(name, _)| flags::find(name).is_some()));
        assert!(matches!(with(Some("vqa")), Some(Refused(_))));
        assert!(matches!(with(None), Some(Refused(_))));
    }

    /// Each row names a setting that exists and a value that its kind accepts.
    #[test]
    fn settings_of_peers_are_read() {
        use crate::settings::values::{Raw, parse};
        let is_read = |name: &'static str, value: &String| {
            let flag = flags::find(name).unwrap_or_else(|| panic!("no setting {name}"));
            parse(&flag.kind, &Raw::Arguments(vec![value.clone()])).is_ok()
        };
        let values = [
            "grpo",
            "true",
            "false",
            "lora",
            "4",
            "0",
            "1",
            "0.5",
            "low_var_kl",
            "vanilla",
            "-1",
            "-0.5",
            "3",
            "main",
            "[0.9,0.999]",
            "{}",
            "cosine",
            "auto",
            "token-mean",
            "seq",
            "['console','wandb']",
            "token_truncate",
            "adamw",
            "default",
            "gspo",
            "k3",
        ];
        for name in trainers::TABLE
            .iter()
            .chain(peers::TABLE)
            .flat_map(|(names, _)| *names)
            .filter(|name| !name.ends_with('*'))
        {
            let fits = |value: &&str| match fate(name, value, |_| None) {
                Some(Becomes(setting, value)) => is_read(setting, &value),
                Some(BecomesAll(settings)) => settings.iter().all(|(setting, value)| is_read(setting, value)),
                Some(Dropped(_)) => true,
                _ => false,
            };
            assert!(values.iter().any(fits), "no value fits {name}");
        }
        assert_eq!(
            fate("data.train_files", "hiyouga/geometry3k@train", |_| None),
            Some(BecomesAll(vec![
                ("train_file", "hiyouga/geometry3k".into()),
                ("dataset_train_split", "train".into())
            ]))
        );
        let of = |update| fate("data.train_batch_size", "512", move |_| update);
        assert_eq!(of(Some("128")), Some(Becomes("steps_per_generation", "4".into())));
        assert!(matches!(of(Some("512")), Some(Dropped(_))));
        assert!(matches!(of(Some("100")), Some(Refused(_))));
        assert_eq!(of(None), Some(Becomes("gradient_accumulation_steps", "512".into())));
        assert_eq!(dotted("+data.seed=1"), Some(("data.seed", "1")));
        assert_eq!(dotted("mine=cmd:./reward.py"), None);
        assert_eq!(dotted("http://a.b/c?d=e"), None);
    }
}
