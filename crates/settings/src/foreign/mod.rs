//! Settings of other trainers, and their meaning in this program.
//!
//! A launch script of transformers, TRL, VLM-R1, qwen-vl-finetune or a program of `peers` has many settings of *that* program.
//! A setting with a counterpart is translated to it. A setting without effect here is dropped and listed in a note. An
//! unsupported setting is an error with advice.

use std::path::Path;
use std::sync::LazyLock;

use omnigrpo_data::QUESTION_TEMPLATES;
use omnigrpo_guard::inside;

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
    /// The setting becomes several settings, and a part of it, which changes training there, is left out for the given reason.
    Partly(Vec<(&'static str, String)>, &'static str),
    /// The meaning depends on another setting of the same source, whose value is `None` if it is not given.
    Depends(&'static str, fn(&str, Option<&str>) -> Fate),
    /// The setting has no effect, for the given reason.
    Dropped(&'static str),
    /// The setting changes training there and is left out here; the text is advice.
    Lost(&'static str),
    /// The setting is unsupported, and the text is advice.
    Refused(&'static str),
    /// The name and the value belong to this program.
    Own,
}

use Fate::{Becomes, BecomesAll, Depends, Dropped, Lost, Own, Partly, Refused};

mod peers;
mod trainers;

/// Names of a setting, and a function that returns the meaning of a value. Words of the value are separated by spaces; a bare
/// flag is `true`. `plain.txt` has the settings whose meaning does not depend on the value.
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
];

const IN_PROCESS: &str = "completions are sampled in the same process with the trained weights";

const TABLE: &[Row] = &[
    (&["bf16"], |v| match on(v) {
        Some(true) => Becomes("torch_dtype", "bfloat16".into()),
        _ => Dropped("`torch_dtype` sets the precision of stored weights"),
    }),
    (&["fp16"], |v| match on(v) {
        Some(false) => Dropped("`torch_dtype` sets the precision of stored weights"),
        _ => Refused("fp16 training is unsupported; use `torch_dtype` bfloat16"),
    }),
    // FSDP of transformers: words separated by spaces; `true` stands for full_shard.
    (&["fsdp"], |v| {
        let words: Vec<&str> = v
            .split([' ', ',', '[', ']', '\'', '"'])
            .filter(|word| !matches!(*word, "" | "auto_wrap"))
            .collect();
        match words[..] {
            [] | ["no_shard" | "false" | "False"] => Dropped("it cuts nothing"),
            // The parts of cut weights are in main memory in any case.
            ["full_shard" | "true" | "True"] | ["full_shard", "offload"] | ["offload", "full_shard"] => {
                Becomes("shard", "weights".into())
            }
            ["shard_grad_op"] => Becomes("shard", "gradients".into()),
            ["hybrid_shard" | "hybrid_shard_zero2"] => {
                Refused("weights are cut over all processes; write full_shard or shard_grad_op")
            }
            _ => Refused(
                "expected full_shard, shard_grad_op or no_shard; `--offload_optimizer` moves the state of the optimizer",
            ),
        }
    }),
    (&["fsdp_config"], |_| Depends("fsdp", fsdp_config)),
    (&["ds3_gather_for_generation"], |v| match on(v) {
        Some(true) => Dropped("every process samples with the complete weights"),
        _ => Refused("leave it out: every process samples with the complete weights"),
    }),
    (&["zero_hpz_partition_size", "sequence_parallel_size", "deepspeed_autotp_size"], |v| match v {
        "0" | "1" => Dropped("it is off here as well"),
        _ => Refused("remove it: only data parallelism is supported"),
    }),
    (&["optim"], |v| match v {
        "adamw" | "adamw_8bit" => Own,
        "adamw_hf" | "adamw_torch" | "adamw_torch_fused" | "adamw_apex_fused" => {
            Becomes("optim", "adamw".into())
        }
        "adamw_bnb_8bit" | "paged_adamw_8bit" | "adamw_torch_8bit" => Becomes("optim", "adamw_8bit".into()),
        _ => Refused("expected adamw or adamw_8bit: the only optimizer is AdamW"),
    }),
    (&["overwrite_output_dir"], |v| match on(v) {
        Some(true) => Becomes("resume_from_checkpoint", "never".into()),
        _ => Dropped("earlier checkpoints are moved aside, never overwritten"),
    }),
    // VLM-R1 selects the wording of the question by the task; peft names the kind of model.
    (&["task_type"], |v| match QUESTION_TEMPLATES.iter().find(|template| template.name == v) {
        Some(template) => Becomes("question_template", template.name.into()),
        None if v == "CAUSAL_LM" => Dropped("adapters are always for a causal language model"),
        None => Dropped(
            "no question template has this name; `--question_template default` adds VLM-R1's sentence about tags",
        ),
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
    // ms-swift writes `tensorboard swanlab`.
    (&["report_to"], |v| {
        let words: Vec<&str> = v.split([',', ' ']).filter(|word| !word.is_empty()).collect();
        let known: Vec<&str> = words
            .iter()
            .copied()
            .filter(|word| !TRACKERS.contains(&word.to_ascii_lowercase().as_str()))
            .collect();
        match (known.len(), words.len()) {
            (n, all) if n == all => Own,
            (0, _) => Dropped("this tracker is unsupported; metrics.jsonl has every number"),
            _ => Becomes("report_to", known.join(",")),
        }
    }),
    // ms-swift's names of the files that it brings.
    (&["deepspeed"], |v| {
        let shard = |shard: &str| ("shard", shard.to_owned());
        let offload = ("offload_optimizer", "cpu".to_owned());
        match v {
            "zero0" => Becomes("shard", "none".into()),
            "zero1" => Becomes("shard", "optimizer".into()),
            "zero2" => Becomes("shard", "gradients".into()),
            "zero3" => Becomes("shard", "weights".into()),
            "zero2_offload" => BecomesAll(vec![shard("gradients"), offload]),
            "zero3_offload" => BecomesAll(vec![shard("weights"), offload]),
            _ => Own,
        }
    }),
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

/// Row of `plain.txt`: names with one meaning, whatever their value.
struct Plain {
    /// Names; one that ends in `*` is a prefix.
    names: Vec<&'static str>,
    meaning: Meaning,
    /// Setting, reason or advice.
    text: &'static str,
}

#[derive(Clone, Copy)]
enum Meaning {
    Becomes,
    Dropped,
    Lost,
    Off,
    Refused,
}

impl Plain {
    fn fate(&self, value: &str) -> Fate {
        match self.meaning {
            Meaning::Becomes => Becomes(self.text, value.to_owned()),
            Meaning::Dropped => Dropped(self.text),
            Meaning::Lost => Lost(self.text),
            Meaning::Off => off(value, self.text),
            Meaning::Refused => Refused(self.text),
        }
    }
}

const PLAIN_TEXT: &str = include_str!("plain.txt");

/// Rows of `plain.txt`, whose head describes its form.
static PLAIN: LazyLock<Vec<Plain>> = LazyLock::new(|| {
    const MEANINGS: [(&str, Meaning); 5] = [
        ("becomes ", Meaning::Becomes),
        ("dropped: ", Meaning::Dropped),
        ("lost: ", Meaning::Lost),
        ("off: ", Meaning::Off),
        ("refused: ", Meaning::Refused),
    ];
    let mut rows: Vec<Plain> = Vec::new();
    for line in PLAIN_TEXT.lines() {
        match rows.last_mut().filter(|_| line.starts_with(' ')) {
            Some(row) => row.names.extend(line.split_whitespace()),
            None => rows.extend(MEANINGS.iter().find_map(|(start, meaning)| {
                Some(Plain { names: Vec::new(), meaning: *meaning, text: line.strip_prefix(start)? })
            })),
        }
    }
    rows
});

/// Returns the row of `plain.txt` with this name, or with its longest prefix. A prefix never matches a setting of this program.
fn plain(name: &str) -> Option<&'static Plain> {
    let exact = PLAIN.iter().find(|row| row.names.contains(&name));
    let prefix = |row: &'static Plain| {
        let fits =
            row.names.iter().filter_map(|own| own.strip_suffix('*')).filter(|own| name.starts_with(own));
        Some((fits.map(str::len).max()?, row))
    };
    exact.or_else(|| {
        crate::flags::find(name)
            .is_none()
            .then(|| PLAIN.iter().filter_map(prefix))?
            .max_by_key(|(len, _)| *len)
            .map(|(_, row)| row)
    })
}

/// Returns the row whose meaning depends on the value.
fn row(name: &str) -> Option<&'static Row> {
    [TABLE, trainers::TABLE, peers::TABLE].into_iter().flatten().find(|(names, _)| names.contains(&name))
}

/// Returns the meaning of a setting if it belongs to another trainer. Dashes count as underscores. `others` returns the text
/// of another setting of the same source, given its name.
pub fn fate<'t>(name: &str, value: &str, others: impl Fn(&str) -> Option<&'t str>) -> Option<Fate> {
    let name = name.replace('-', "_");
    let unset = matches!(value.to_ascii_lowercase().as_str(), "none" | "null");
    let fate = match row(&name) {
        Some((_, fate)) => fate(value),
        None => plain(&name)?.fate(value),
    };
    let fate = match fate {
        Becomes(..) | BecomesAll(_) | Partly(..) | Depends(..) if unset => Dropped("it has no value"),
        Depends(other, fate) => fate(value, others(other)),
        fate => fate,
    };
    (fate != Own).then_some(fate)
}

/// Returns true if the words of a setting of another trainer are names of datasets.
pub fn is_list(name: &str) -> bool {
    matches!(name.replace('-', "_").as_str(), "dataset" | "val_dataset" | "dataset_name")
}

/// Returns the reward of this program for a reward of TRL.
pub fn reward(name: &str) -> &str {
    match name.strip_prefix("trl.rewards.").unwrap_or(name) {
        "accuracy_reward" | "reasoning_accuracy_reward" => "math",
        "think_format_reward" => "think_format",
        "get_soft_overlong_punishment" => "overlong",
        "get_cosine_scaled_reward" => "cosine",
        "get_repetition_penalty_reward" => "repetition_tokens",
        _ => name,
    }
}

/// Returns the meaning of FSDP's fields, from JSON text or from a file, beside the value of `fsdp`. Names may begin with `fsdp_`.
fn fsdp_config(value: &str, fsdp: Option<&str>) -> Fate {
    let cuts_weights = fsdp.is_some_and(|words| words.contains("full_shard"));
    const MAX_BYTES: u64 = 1 << 20;
    let text = match value.trim_start().starts_with('{') {
        true => Some(value.to_owned()),
        false => inside::read_named(Path::new(value), MAX_BYTES).ok(),
    };
    let json = text.and_then(|text| serde_json::from_str::<serde_json::Value>(&text).ok());
    let Some(fields) = json.as_ref().and_then(serde_json::Value::as_object) else {
        return Refused("expected a JSON file, or JSON text, with the fields of FSDP");
    };
    for (name, value) in fields {
        let is_off = matches!(value.as_str(), Some("false" | "False")) || *value == false || value.is_null();
        match name.strip_prefix("fsdp_").unwrap_or(name) {
            "transformer_layer_cls_to_wrap"
            | "auto_wrap_policy"
            | "backward_prefetch"
            | "backward_prefetch_policy"
            | "forward_prefetch"
            | "limit_all_gathers"
            | "sync_module_states"
            | "cpu_ram_efficient_loading"
            | "use_orig_params"
            | "version" => {}
            "offload_params" | "xla" | "xla_fsdp_v2" | "xla_fsdp_grad_ckpt" if is_off => {}
            // The parts of cut weights are in main memory in any case.
            "offload_params" if cuts_weights => {}
            "offload_params" => {
                return Refused(
                    "write false for offload_params, or full_shard as `fsdp`: only cut weights are in main memory",
                );
            }
            "state_dict_type" if value == "FULL_STATE_DICT" => {}
            "state_dict_type" => return Refused("write FULL_STATE_DICT: checkpoints are complete"),
            "reshard_after_forward" if !is_off => {}
            "reshard_after_forward" => {
                return Refused("leave reshard_after_forward out and write shard_grad_op as `fsdp`");
            }
            "activation_checkpointing" if is_off => {}
            "activation_checkpointing" => return Refused("leave it out and give `--gradient_checkpointing`"),
            "min_num_params" => return Refused("leave min_num_params out and give `--shard_min_elements`"),
            _ => return Refused("a field of it is unknown or unsupported"),
        }
    }
    Dropped("the weights of one layer of the decoder are complete at a time, and checkpoints are complete")
}

/// Splits a word of verl or EasyR1, `group.name=value`, into name and value.
pub fn dotted(word: &str) -> Option<(&str, &str)> {
    peers::dotted(word)
}

/// Returns true if another trainer has a setting of this name.
pub fn knows(name: &str) -> bool {
    let name = name.replace('-', "_");
    row(&name).is_some() || plain(&name).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags;

    #[test]
    fn no_name_is_a_setting_here_but_where_values_decide() {
        let mut seen = std::collections::BTreeSet::new();
        let rows = [TABLE, trainers::TABLE, peers::TABLE].into_iter().flatten();
        let in_code = rows.flat_map(|(names, _)| names.iter());
        for name in in_code.chain(PLAIN.iter().flat_map(|row| &row.names)) {
            assert!(seen.insert(name), "`{name}` is in two rows");
            assert_eq!(
                flags::find(name).is_some(),
                matches!(*name, "report_to" | "deepspeed" | "reward_funcs" | "optim"),
                "{name}"
            );
        }
    }

    #[test]
    fn every_paragraph_of_plain_settings_is_read() {
        let heads =
            PLAIN_TEXT.lines().filter(|line| !line.is_empty() && !line.starts_with(['#', ' '])).count();
        assert_eq!((PLAIN.len(), PLAIN.iter().filter(|row| row.names.is_empty()).count()), (heads, 0));
        for row in PLAIN.iter().filter(|row| matches!(row.meaning, Meaning::Becomes)) {
            assert!(flags::find(row.text).is_some(), "{}", row.text);
        }
        // An own name comes before a prefix, and a longer prefix before a shorter one.
        let text = |name| plain(name).map(|row| row.text);
        assert_ne!(text("trainer.val_only"), text("trainer.anything"));
        assert_ne!(text("actor_rollout_ref.ref.anything"), text("actor_rollout_ref.anything"));
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
        assert!(matches!(alone("optim", "adamw_torch"), Some(Becomes("optim", _))));
        assert!(alone("optim", "adamw_8bit").is_none());
        assert!(matches!(alone("optim", "lion"), Some(Refused(_))));
        assert!(matches!(alone("use_vllm", "true"), Some(Dropped(_))));
        assert!(matches!(alone("vllm_max_model_length", "2048"), Some(Dropped(_))));
        // The name is another name of a setting of this program.
        assert_eq!(alone("vllm_importance_sampling_mode", "token_mask"), None);
        assert!(matches!(alone("report_to", "swanlab mlflow"), Some(Dropped(_))));
        assert_eq!(
            alone("report_to", "tensorboard swanlab"),
            Some(Becomes("report_to", "tensorboard".into()))
        );
        assert_eq!(alone("deepspeed", "zero3"), Some(Becomes("shard", "weights".into())));
        assert_eq!(alone("deepspeed", "local/zero3.json"), None);
        assert_eq!(alone("report_to", "tensorboard wandb"), None);
        assert_eq!(alone("report_to", "none"), None);
        assert_eq!(alone("report_to", "wandbb"), None);
        assert_eq!(alone("beta", "0.1"), None);
        assert!(matches!(alone("task_type", "vqa"), Some(Dropped(_))));
    }

    #[test]
    fn a_mapping_counts_and_two_names_of_one_value_agree() {
        use crate::Verb;
        use crate::layer::Layer;
        let read = |given: serde_json::Value| {
            Layer::of(Verb::Train, given.as_object().unwrap_or_else(|| panic!()).clone())
        };
        let layer =
            read(serde_json::json!({ "lr_scheduler_kwargs": { "num_cycles": 3 }, "generation_kwargs": {} }));
        assert_eq!(layer.problems.len(), 1, "{:?}", layer.problems);
        assert!(layer.problems[0].to_string().contains("num_cycles"), "{}", layer.problems[0]);
        assert_eq!(layer.dropped.len(), 1);
        let two = |value| {
            read(serde_json::json!({ "activation_checkpointing": value, "gradient_checkpointing": "true" }))
        };
        assert_eq!((two("true").dropped.len(), two("false").dropped.len()), (0, 1));
    }

    /// Every field in the source of another trainer is a setting here or has a row in the table.
    #[test]
    fn every_field_of_other_trainers_has_an_answer() {
        let lists = [
            ("transformers", include_str!("fields/transformers.txt"), 114),
            ("trl", include_str!("fields/trl.txt"), 110),
            ("ms-swift", include_str!("fields/ms_swift.txt"), 393),
            ("peft", include_str!("fields/peft.txt"), 42),
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
                if let Some(Dropped(why) | Lost(why) | Refused(why)) = fate(field, value, |_| None) {
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
        use crate::values::{Raw, parse};
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
            "live",
            "topk_logits",
        ];
        for name in trainers::TABLE
            .iter()
            .chain(peers::TABLE)
            .flat_map(|(names, _)| *names)
            .filter(|name| !name.ends_with('*'))
        {
            let fits = |value: &&str| match fate(name, value, |_| None) {
                Some(Becomes(setting, value)) => is_read(setting, &value),
                Some(BecomesAll(settings) | Partly(settings, _)) => {
                    settings.iter().all(|(setting, value)| is_read(setting, value))
                }
                Some(Dropped(_) | Lost(_)) => true,
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
        // Estimators and losses as verl, EasyR1, ms-swift and SkyRL name them.
        let alone = |name, value| fate(name, value, |_| None);
        for name in
            ["algorithm.adv_estimator", "advantage_estimator", "trainer.algorithm.advantage_estimator"]
        {
            for (value, own) in [
                ("grpo_passk", "grpo_passk"),
                ("rloo", "rloo"),
                ("rloo_vectorized", "rloo"),
                ("reinforce_plus_plus", "reinforce_plus_plus"),
                ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline"),
                ("reinforce++", "reinforce_plus_plus"),
                ("maxrl", "maxrl"),
            ] {
                assert_eq!(alone(name, value), Some(Becomes("advantage", own.into())), "{name} {value}");
            }
            assert!(matches!(alone(name, "grpo"), Some(Dropped(_))));
            assert!(matches!(alone(name, "gae"), Some(Refused(_))));
        }
        for name in [
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "worker.actor.loss_type",
            "trainer.algorithm.policy_loss_type",
        ] {
            for (value, own) in [
                ("gspo", "gspo"),
                ("gspo_token", "gspo"),
                ("geo_mean", "gmpo"),
                ("clip_cov", "clip_cov"),
                ("kl_cov", "kl_cov"),
                ("dppo", "dppo_tv"),
            ] {
                assert_eq!(alone(name, value), Some(Becomes("loss_type", own.into())), "{name} {value}");
            }
            let Some(BecomesAll(settings)) = alone(name, "dppo_kl") else { panic!("{name}") };
            assert_eq!(settings[0], ("loss_type", "dppo_kl".to_owned()));
            assert!(settings.iter().all(|(setting, value)| is_read(setting, value)));
            assert!(matches!(alone(name, "gpg"), Some(Refused(_))));
        }
        let share = |mode| fate("actor_rollout_ref.actor.policy_loss.clip_cov_ratio", "0.01", move |_| mode);
        assert_eq!(share(Some("clip_cov")), Some(Becomes("clip_cov_ratio", "0.01".into())));
        assert!(matches!(share(Some("kl_cov")), Some(Dropped(_))) && matches!(share(None), Some(Dropped(_))));
        assert_eq!(dotted("+data.seed=1"), Some(("data.seed", "1")));
        assert_eq!(dotted("mine=cmd:./reward.py"), None);
        assert_eq!(dotted("http://a.b/c?d=e"), None);
    }
}
