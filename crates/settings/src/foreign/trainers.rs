//! Settings of transformers' `TrainingArguments` (5.23), of TRL's `GRPOConfig`, `ModelConfig` and `ScriptArguments` (1.16), and
//! of the cold start of R1-Omni, other than those in its launch scripts.

use super::Fate::{Becomes, BecomesAll, Dropped, Refused};
use super::{Row, off, on};

const SHUFFLED: &str = "each pass draws all rows in an order set by `data_seed`";

/// Rows of the table of settings.
pub(super) const TABLE: &[Row] = &[
    // transformers.
    (&["hub_always_push"], |v| match on(v) {
        Some(true) => Becomes("hub_strategy", "every_save".into()),
        _ => Dropped("`hub_strategy` sets when to push"),
    }),
    (&["greater_is_better"], |v| match on(v) {
        Some(false) => {
            Refused("use a `metric_for_best_model` for which higher is better, such as eval_reward")
        }
        _ => Dropped("higher is better"),
    }),
    (&["use_cpu", "no_cuda"], |v| match on(v) {
        Some(true) => Becomes("device", "cpu".into()),
        _ => Dropped("`device` sets where the model runs"),
    }),
    (&["shuffle_dataset", "dataset_shuffle", "train_dataloader_shuffle"], |v| match on(v) {
        Some(false) => Refused("leave it out: each pass draws the rows in an order set by `data_seed`"),
        _ => Dropped(SHUFFLED),
    }),
    // TRL.
    (&["model_revision", "revision"], |v| match v {
        "main" => Dropped("this revision is always downloaded"),
        v => off(v, "give the directory of that revision to `model_name_or_path`"),
    }),
    // TRL's trainers with a teacher.
    (&["teacher_model_kind"], |v| match v {
        "live" => {
            Dropped("without `teacher_model_name_or_path`, the policy teaches with the weights that sample")
        }
        "ema" => Becomes("sync_ref_model", "true".into()),
        _ => Refused("give the model itself to `teacher_model_name_or_path`, or use live or ema"),
    }),
    (&["distillation_mode"], |v| match v {
        "sampled_token" => Becomes("teacher_divergence", "reverse_kl".into()),
        "topk_logits" => Dropped("`teacher_divergence` and `teacher_top_k` set it"),
        _ => Refused("use `teacher_top_k`: the teacher's most probable tokens, and one for all others"),
    }),
    (&["loss_add_tail", "distillation_add_tail"], |v| match on(v) {
        Some(true) => Dropped("all other tokens are always one more token"),
        _ => Refused("use true: all other tokens are one more token"),
    }),
    // R1-Omni's cold start, and VLM-R1.
    (&["mm_tunable_parts"], |v| {
        let trains = |marks: [&str; 2]| marks.iter().any(|mark| v.contains(mark)).to_string();
        BecomesAll(vec![
            ("tune_mm_llm", trains(["language_model", "llm"])),
            ("tune_mm_mlp", trains(["mlp", "projector"])),
            ("tune_mm_vision", trains(["vision_tower", "audio_tower"])),
        ])
    }),
    (&["data_folder"], |v| {
        BecomesAll(
            ["image_folders", "video_folders", "audio_folders"].map(|name| (name, v.to_owned())).to_vec(),
        )
    }),
];
