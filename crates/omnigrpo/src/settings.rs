//! The settings of one run, typed.
//!
//! [`Settings::from_values`] is the only reader of the flag table's values: below it nobody sees a flag, a file of
//! settings or an environment variable. Unless a field says otherwise, it means what the row of its name in
//! `flags.rs` says, in the unit given there; an `Option` is `None` where that row's default is unset.
//!
//! The structs do not derive `PartialEq`: it would count as reading every field, and so hide from the compiler a
//! setting that no verb uses.
#![expect(dead_code, reason = "the verbs that read the settings are not all here yet")]

use std::path::PathBuf;

use serde_json::{Map, Value as Json};

use crate::explain::Problem;
use crate::flags::Verb;
use crate::values::{FromValue, Value, Values};

/// An enum whose variants have names on the command line.
pub trait Named: Copy + 'static {
    /// Name and variant, in the order of the help.
    fn pairs() -> &'static [(&'static str, Self)];
}

impl<T: Named> FromValue for T {
    fn from_value(value: &Value) -> Option<Self> {
        let Value::Text(text) = value else { return None };
        Self::pairs().iter().find(|(name, _)| name == text).map(|(_, variant)| *variant)
    }
}

/// Declares an enum and its names in one place.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident: $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)?) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$vdoc])* $variant),+ }

        impl $name {
            /// The names, in the order of the help.
            pub const NAMES: &'static [&'static str] = &[$($text),+];
        }

        impl Named for $name {
            fn pairs() -> &'static [(&'static str, Self)] {
                &[$(($text, $name::$variant)),+]
            }
        }
    };
}

choice!(
    /// Precision of the weights.
    TorchDtype:
    /// That of the checkpoint.
    Auto = "auto",
    /// 32 bits.
    Float32 = "float32",
    /// 16 bits with the exponent of float32.
    Bfloat16 = "bfloat16",
);
choice!(
    /// Rule that picks video frames.
    FrameSampling:
    /// By rate, as the package qwen-vl-utils.
    QwenVlUtils = "qwen_vl_utils",
    /// By interval, as qwen-vl-finetune.
    BaseInterval = "base_interval",
    /// Per segment, from the row's `meta`.
    Meta = "meta",
);
choice!(
    /// Sentence added to each question.
    QuestionTemplate:
    /// None.
    None = "none",
    /// Thinking, then the final answer.
    Default = "default",
    /// As default, the answer in JSON (referring expressions).
    Rec = "rec",
    /// Thinking, then the final answer as a number.
    R1V = "r1-v",
    /// Thinking, then the final emotion.
    Emotion = "emotion",
    /// Thinking, answer and explanation in Vietnamese.
    VivqaX = "vivqa-x",
);
choice!(
    /// What the `format` reward wants.
    FormatMode:
    /// Exactly one pair of each required tag.
    Strict = "strict",
    /// 0.3 for thinking tags, 0.3 for answer tags, 0.4 for their order.
    Graded = "graded",
    /// Thinking, answer and explanation tags.
    Tags3 = "tags3",
    /// The pattern of R1-V.
    R1V = "r1v",
);
choice!(
    /// How the `accuracy` reward compares.
    AccuracyMode:
    /// Decided per row.
    Auto = "auto",
    /// Equal label after normalisation.
    Label = "label",
    /// Emotion label with synonyms.
    Emotion = "emotion",
    /// Equal set of options.
    McqExact = "mcq_exact",
    /// Intersection over union of options.
    McqIou = "mcq_iou",
    /// 3.0, 1.5 or 0 by shared words.
    ShortText = "short_text",
    /// Equal number or formula.
    Math = "math",
    /// Yes or no.
    YesNo = "yes_no",
    /// Intersection over union of a box.
    Iou = "iou",
    /// Average precision of boxes.
    OdAp = "od_ap",
    /// Average precision at IoU 0.5.
    OdAp50 = "od_ap50",
    /// Equal cleaned text.
    AllMatch = "all_match",
    /// The rule of R1-V.
    R1V = "r1v",
);
choice!(
    /// Whether a completion must think first.
    ThinkMode:
    /// Per dataset, by its name.
    Auto = "auto",
    /// Always.
    On = "on",
    /// Never.
    Off = "off",
);
choice!(
    /// Order of normalising and summing rewards.
    MultiObjective:
    /// Normalise the weighted sum.
    SumThenNormalize = "sum_then_normalize",
    /// Normalise each reward first.
    NormalizeThenSum = "normalize_then_sum",
);
choice!(
    /// Known defects of the source systems.
    Compat:
    /// The first answer tag counts, not the last.
    FirstAnswer = "first_answer",
    /// Two texts without option numbers are equal.
    S2Accuracy = "s2_accuracy",
    /// Short answers without the yes/no guard.
    S4Accuracy = "s4_accuracy",
);
choice!(
    /// Recipe of the objective.
    LossType:
    /// The published algorithm.
    Grpo = "grpo",
    /// Mean over the tokens of a batch.
    Bnpo = "bnpo",
    /// Divided by a constant length.
    DrGrpo = "dr_grpo",
    /// Mean over the tokens of all batches of a step.
    Dapo = "dapo",
    /// Capped, detached ratio.
    Cispo = "cispo",
    /// Ratio per completion.
    Gspo = "gspo",
    /// Soft gate instead of a clip.
    Sapo = "sapo",
    /// Source system 2 as written: log-probability of the whole completion.
    S2 = "s2",
    /// Source system 3: no clip, clamped deviation.
    S3 = "s3",
);
choice!(
    /// Deviation that centred rewards are divided by.
    ScaleRewards:
    /// That of the group.
    Group = "group",
    /// That of the batch.
    Batch = "batch",
    /// None.
    None = "none",
);
choice!(
    /// Advantage of the source systems.
    Advantage:
    /// Centred, over the sample deviation of the group.
    SampleStd = "group_std",
    /// Centred.
    Center = "group_center",
    /// Centred, over the clamped population deviation.
    ClampedStd = "group_std_clamped",
);
choice!(
    /// KL estimator.
    Kl:
    /// Per token, never negative.
    K3 = "k3",
    /// Signed difference of whole completions.
    K1Seq = "k1_seq",
);
choice!(
    /// How token losses become one number.
    LossAgg:
    /// Mean over completions of their token means.
    SeqMean = "seq_mean",
    /// Mean over all tokens of the step.
    TokenMean = "token_mean",
    /// Mean over the tokens of each batch.
    TokenMeanLocal = "token_mean_local",
    /// Sum over completions and the length limit.
    ConstantLength = "constant_length",
    /// Sum over tokens, mean over completions.
    TokenSum = "token_sum",
);
choice!(
    /// What a ratio belongs to.
    ImportanceLevel:
    /// Each token.
    Token = "token",
    /// Each completion.
    Sequence = "sequence",
);
choice!(
    /// Course of the learning rate.
    LrScheduler:
    /// Flat from the first step.
    Constant = "constant",
    /// Flat after warm-up.
    ConstantWithWarmup = "constant_with_warmup",
    /// Falling to 0 in a line.
    Linear = "linear",
    /// Falling to 0 in half a cosine.
    Cosine = "cosine",
);
choice!(
    /// When to write a checkpoint.
    SaveStrategy:
    /// Only the model at the end.
    No = "no",
    /// Every `save_steps`.
    Steps = "steps",
    /// After each epoch.
    Epoch = "epoch",
    /// When the metric of the evaluation improves.
    Best = "best",
);
choice!(
    /// When to evaluate.
    EvalStrategy:
    /// Never.
    No = "no",
    /// Every `eval_steps`.
    Steps = "steps",
    /// After each epoch.
    Epoch = "epoch",
);
choice!(
    /// Where averaged metrics go.
    LogSink:
    /// Nowhere.
    None = "none",
    /// Files of JSON lines.
    Jsonl = "jsonl",
);

/// Whether and from where to resume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Start anew.
    Never,
    /// The newest checkpoint, if its settings are those of this run.
    Auto,
    /// This checkpoint.
    From(PathBuf),
}

impl Resume {
    // `true` and `false` are what users of other trainers pass; taken as paths they would name a missing folder.
    fn parse(text: &str) -> Self {
        match text.to_ascii_lowercase().as_str() {
            "never" | "false" | "no" => Self::Never,
            "auto" | "true" | "yes" => Self::Auto,
            _ => Self::From(PathBuf::from(text)),
        }
    }
}

/// Environment variables, read here and nowhere else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// `WANDB_DISABLED` is true. Nothing is ever sent to W&B; kept to say so.
    pub wandb_disabled: bool,
    /// `DEBUG_MODE` is true: rewards append a line per completion to `log_path`.
    pub debug_mode: bool,
    /// `LOG_PATH`.
    pub log_path: Option<PathBuf>,
    /// `CUDA_VISIBLE_DEVICES`, as the driver reads it.
    pub cuda_visible_devices: Option<String>,
}

impl Environment {
    /// Reads the variables through `get`.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Self {
        let on = |name| {
            get(name).is_some_and(|v| matches!(v.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on"))
        };
        Self {
            wandb_disabled: on("WANDB_DISABLED"),
            debug_mode: on("DEBUG_MODE"),
            log_path: get("LOG_PATH").filter(|p| !p.is_empty()).map(PathBuf::from),
            cuda_visible_devices: get("CUDA_VISIBLE_DEVICES"),
        }
    }
}

/// What a verb reads and writes.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct IoSettings {
    pub format: Option<String>,
    pub input: Option<PathBuf>,
    pub output: Option<PathBuf>,
    pub prompt: Option<String>,
    pub image: Vec<String>,
    pub video: Vec<String>,
    pub row: u64,
    pub num_rows: u64,
}

/// The checkpoint and its precision.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct ModelSettings {
    pub model_name_or_path: Option<String>,
    pub torch_dtype: TorchDtype,
    pub pure_bf16: bool,
    pub max_stream_tokens: Option<usize>,
    pub gradient_checkpointing: bool,
}

/// Where rows come from.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct DataSettings {
    pub train_file: Vec<PathBuf>,
    pub dataset_use: Vec<String>,
    pub dataset_registry: Option<PathBuf>,
    /// As long as `image_folders`, which hold the media of the file at the same place.
    pub data_file_paths: Vec<PathBuf>,
    pub eval_file: Vec<PathBuf>,
    pub eval_dataset_use: Vec<String>,
    pub val_split_ratio: f64,
    pub image_folders: Vec<PathBuf>,
    pub video_folders: Vec<PathBuf>,
    pub audio_folders: Vec<PathBuf>,
    pub allow_urls: bool,
    pub strict_media: bool,
    pub max_skipped: f64,
    pub skip_data_check: bool,
}

impl DataSettings {
    /// True if some flag names training rows.
    pub fn has_train_rows(&self) -> bool {
        !(self.train_file.is_empty() && self.dataset_use.is_empty() && self.data_file_paths.is_empty())
    }

    /// True if some flag names evaluation rows.
    pub fn has_eval_rows(&self) -> bool {
        !(self.eval_file.is_empty() && self.eval_dataset_use.is_empty()) || self.val_split_ratio > 0.0
    }
}

/// How images and videos are sized and sampled.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct MediaSettings {
    pub min_pixels: Option<u64>,
    pub max_pixels: Option<u64>,
    pub frame_sampling: FrameSampling,
    pub fps: f64,
    pub nframes: Option<u32>,
    pub video_min_frames: u32,
    pub video_max_frames: u32,
    pub base_interval: f64,
    pub video_min_frame_pixels: Option<u64>,
    pub video_max_frame_pixels: Option<u64>,
    pub total_pixels: Option<u64>,
}

/// How rows become prompts.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct PromptSettings {
    pub question_template: QuestionTemplate,
    pub system_prompt: Option<String>,
    pub chat_template_kwargs: Map<String, Json>,
    pub max_prompt_length: Option<usize>,
}

/// How completions are scored.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct RewardSettings {
    pub reward_funcs: Vec<String>,
    /// As long as `reward_funcs`.
    pub reward_weights: Vec<f64>,
    pub format_mode: FormatMode,
    pub accuracy_mode: AccuracyMode,
    pub think: ThinkMode,
    pub multi_objective_aggregation: MultiObjective,
    pub compat: Vec<Compat>,
    pub reward_timeout_secs: f64,
    pub reward_workers: usize,
}

/// How completions are sampled.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct RolloutSettings {
    pub num_generations: usize,
    pub temperature: f64,
    pub top_p: f64,
    pub top_k: usize,
    pub min_p: f64,
    pub repetition_penalty: f64,
    /// Resolved: `temperature`, or 1 when that is 0, unless given.
    pub logprob_temperature: f64,
    pub max_completion_length: usize,
    pub min_completion_length: usize,
    pub stop_strings: Vec<String>,
    pub batch_size: usize,
    pub replay: Option<PathBuf>,
}

/// The GRPO objective. `None` takes the recipe's choice.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct LossSettings {
    pub loss_type: LossType,
    pub beta: f64,
    pub grpo_alpha: f64,
    pub scale_rewards: Option<ScaleRewards>,
    pub advantage: Option<Advantage>,
    pub kl: Option<Kl>,
    pub use_bias_correction_kl: bool,
    pub loss_agg: Option<LossAgg>,
    pub importance_sampling_level: Option<ImportanceLevel>,
    pub epsilon: Option<f64>,
    pub epsilon_high: Option<f64>,
    pub delta: Option<f64>,
    pub num_iterations: usize,
    pub mask_truncated_completions: bool,
    pub entropy_coef: f64,
}

/// What is trained and how fast.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct OptimSettings {
    pub learning_rate: f64,
    pub lr_scheduler_type: LrScheduler,
    pub warmup_ratio: f64,
    pub warmup_steps: u64,
    pub weight_decay: f64,
    pub adam_beta1: f64,
    pub adam_beta2: f64,
    pub adam_epsilon: f64,
    pub max_grad_norm: f64,
    /// Resolved: `learning_rate` unless given.
    pub mm_projector_lr: f64,
    /// Resolved: `learning_rate` unless given.
    pub vision_tower_lr: f64,
    pub tune_mm_llm: bool,
    pub tune_mm_mlp: bool,
    pub tune_mm_vision: bool,
    pub freeze_vision_modules: bool,
    /// Prompts, not completions.
    pub per_device_train_batch_size: usize,
    pub gradient_accumulation_steps: usize,
}

/// Length, checkpoints, resuming.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct RunSettings {
    /// Resolved from `exp_name` if that is given instead. Present for every verb that trains.
    pub output_dir: Option<PathBuf>,
    /// Where logs go apart from the run directory: `runs/NAME/log` with `exp_name`.
    pub log_dir: Option<PathBuf>,
    pub num_train_epochs: f64,
    /// `None` where the flag is -1.
    pub max_steps: Option<u64>,
    pub seed: u64,
    /// Resolved: `seed` unless given.
    pub data_seed: u64,
    pub save_strategy: SaveStrategy,
    pub save_steps: u64,
    pub save_total_limit: Option<usize>,
    pub save_only_model: bool,
    pub resume_from_checkpoint: Resume,
}

/// Evaluation during training, and tables of `eval`.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct EvalSettings {
    /// Resolved: steps with `eval_steps`, else epoch with evaluation data, else no, unless given.
    pub eval_strategy: EvalStrategy,
    pub eval_steps: Option<u64>,
    /// Resolved: 1, greedy, unless given.
    pub num_generations_eval: usize,
    pub metric_for_best_model: String,
    pub category_column: Option<String>,
}

/// Metrics and console.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct LogSettings {
    pub logging_steps: u64,
    /// Resolved: `logging_steps` unless given.
    pub grpo_logging_steps: u64,
    pub report_to: LogSink,
    pub run_name: Option<String>,
    pub log_completions: bool,
}

/// Every setting of one run.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Settings {
    pub io: IoSettings,
    pub model: ModelSettings,
    pub data: DataSettings,
    pub media: MediaSettings,
    pub prompt: PromptSettings,
    pub rewards: RewardSettings,
    pub rollout: RolloutSettings,
    pub loss: LossSettings,
    pub optim: OptimSettings,
    pub run: RunSettings,
    pub eval: EvalSettings,
    pub log: LogSettings,
    /// `None` uses all cores.
    pub threads: Option<usize>,
    pub env: Environment,
}

impl Settings {
    /// Reads every row of the flag table once. Settings a verb does not take have their defaults.
    ///
    /// # Errors
    /// A name or type here that the table does not have, which the tests exclude, and an `exp_name` that is no
    /// plain name.
    pub fn from_values(values: &Values, env: Environment) -> Result<Self, Problem> {
        let v = values;
        let learning_rate: f64 = v.get("learning_rate")?;
        let seed: u64 = v.get("seed")?;
        let temperature: f64 = v.get("temperature")?;
        let logprob_temperature = if temperature > 0.0 { temperature } else { 1.0 };
        let reward_funcs: Vec<String> = v.get("reward_funcs")?;
        let mut reward_weights: Vec<f64> = v.get("reward_weights")?;
        if reward_weights.is_empty() {
            reward_weights = vec![1.0; reward_funcs.len()];
        }
        let exp_name: Option<String> = v.get("exp_name")?;
        if let Some(name) = &exp_name {
            plain_name(name)?;
        }
        let output_dir: Option<PathBuf> = v.get("output_dir")?;
        let logging_steps: u64 = v.get("logging_steps")?;
        let eval_steps: Option<u64> = v.get("eval_steps")?;
        let max_steps: i64 = v.get("max_steps")?;
        let resume: String = v.get("resume_from_checkpoint")?;
        let data = DataSettings {
            train_file: v.get("train_file")?,
            dataset_use: v.get("dataset_use")?,
            dataset_registry: v.get("dataset_registry")?,
            data_file_paths: v.get("data_file_paths")?,
            eval_file: v.get("eval_file")?,
            eval_dataset_use: v.get("eval_dataset_use")?,
            val_split_ratio: v.get("val_split_ratio")?,
            image_folders: v.get("image_folders")?,
            video_folders: v.get("video_folders")?,
            audio_folders: v.get("audio_folders")?,
            allow_urls: v.get("allow_urls")?,
            strict_media: v.get("strict_media")?,
            max_skipped: v.get("max_skipped")?,
            skip_data_check: v.get("skip_data_check")?,
        };
        let eval_strategy = v.get::<Option<EvalStrategy>>("eval_strategy")?.unwrap_or(match eval_steps {
            Some(_) => EvalStrategy::Steps,
            None if data.has_eval_rows() => EvalStrategy::Epoch,
            None => EvalStrategy::No,
        });
        Ok(Self {
            io: IoSettings {
                format: v.get("format")?,
                input: v.get("input")?,
                output: v.get("output")?,
                prompt: v.get("prompt")?,
                image: v.get("image")?,
                video: v.get("video")?,
                row: v.get("row")?,
                num_rows: v.get("num_rows")?,
            },
            model: ModelSettings {
                model_name_or_path: v.get("model_name_or_path")?,
                torch_dtype: v.get("torch_dtype")?,
                pure_bf16: v.get("pure_bf16")?,
                max_stream_tokens: v.get("max_stream_tokens")?,
                gradient_checkpointing: v.get("gradient_checkpointing")?,
            },
            data,
            media: MediaSettings {
                min_pixels: v.get("min_pixels")?,
                max_pixels: v.get("max_pixels")?,
                frame_sampling: v.get("frame_sampling")?,
                fps: v.get("fps")?,
                nframes: v.get("nframes")?,
                video_min_frames: v.get("video_min_frames")?,
                video_max_frames: v.get("video_max_frames")?,
                base_interval: v.get("base_interval")?,
                video_min_frame_pixels: v.get("video_min_frame_pixels")?,
                video_max_frame_pixels: v.get("video_max_frame_pixels")?,
                total_pixels: v.get("total_pixels")?,
            },
            prompt: PromptSettings {
                question_template: v.get("question_template")?,
                system_prompt: v.get("system_prompt")?,
                chat_template_kwargs: v.get::<Option<_>>("chat_template_kwargs")?.unwrap_or_default(),
                max_prompt_length: v.get("max_prompt_length")?,
            },
            rewards: RewardSettings {
                reward_funcs,
                reward_weights,
                format_mode: v.get("format_mode")?,
                accuracy_mode: v.get("accuracy_mode")?,
                think: v.get("think")?,
                multi_objective_aggregation: v.get("multi_objective_aggregation")?,
                compat: v.get("compat")?,
                reward_timeout_secs: v.get("reward_timeout_secs")?,
                reward_workers: v.get("reward_workers")?,
            },
            rollout: RolloutSettings {
                num_generations: v.get("num_generations")?,
                temperature,
                top_p: v.get("top_p")?,
                top_k: v.get("top_k")?,
                min_p: v.get("min_p")?,
                repetition_penalty: v.get("repetition_penalty")?,
                logprob_temperature: v
                    .get::<Option<_>>("logprob_temperature")?
                    .unwrap_or(logprob_temperature),
                max_completion_length: v.get("max_completion_length")?,
                min_completion_length: v.get("min_completion_length")?,
                stop_strings: v.get("stop_strings")?,
                batch_size: v.get("batch_size")?,
                replay: v.get("replay")?,
            },
            loss: LossSettings {
                loss_type: v.get("loss_type")?,
                beta: v.get("beta")?,
                grpo_alpha: v.get("grpo_alpha")?,
                scale_rewards: v.get("scale_rewards")?,
                advantage: v.get("advantage")?,
                kl: v.get("kl")?,
                use_bias_correction_kl: v.get("use_bias_correction_kl")?,
                loss_agg: v.get("loss_agg")?,
                importance_sampling_level: v.get("importance_sampling_level")?,
                epsilon: v.get("epsilon")?,
                epsilon_high: v.get("epsilon_high")?,
                delta: v.get("delta")?,
                num_iterations: v.get("num_iterations")?,
                mask_truncated_completions: v.get("mask_truncated_completions")?,
                entropy_coef: v.get("entropy_coef")?,
            },
            optim: OptimSettings {
                learning_rate,
                lr_scheduler_type: v.get("lr_scheduler_type")?,
                warmup_ratio: v.get("warmup_ratio")?,
                warmup_steps: v.get("warmup_steps")?,
                weight_decay: v.get("weight_decay")?,
                adam_beta1: v.get("adam_beta1")?,
                adam_beta2: v.get("adam_beta2")?,
                adam_epsilon: v.get("adam_epsilon")?,
                max_grad_norm: v.get("max_grad_norm")?,
                mm_projector_lr: v.get::<Option<_>>("mm_projector_lr")?.unwrap_or(learning_rate),
                vision_tower_lr: v.get::<Option<_>>("vision_tower_lr")?.unwrap_or(learning_rate),
                tune_mm_llm: v.get("tune_mm_llm")?,
                tune_mm_mlp: v.get("tune_mm_mlp")?,
                tune_mm_vision: v.get("tune_mm_vision")?,
                freeze_vision_modules: v.get("freeze_vision_modules")?,
                per_device_train_batch_size: v.get("per_device_train_batch_size")?,
                gradient_accumulation_steps: v.get("gradient_accumulation_steps")?,
            },
            run: RunSettings {
                log_dir: exp_name.as_ref().map(|name| PathBuf::from("runs").join(name).join("log")),
                output_dir: output_dir
                    .or_else(|| exp_name.map(|name| PathBuf::from("checkpoints/rl").join(name))),
                num_train_epochs: v.get("num_train_epochs")?,
                max_steps: u64::try_from(max_steps).ok(),
                seed,
                data_seed: v.get::<Option<_>>("data_seed")?.unwrap_or(seed),
                save_strategy: v.get("save_strategy")?,
                save_steps: v.get("save_steps")?,
                save_total_limit: v.get("save_total_limit")?,
                save_only_model: v.get("save_only_model")?,
                resume_from_checkpoint: Resume::parse(&resume),
            },
            eval: EvalSettings {
                eval_strategy,
                eval_steps,
                num_generations_eval: v.get::<Option<_>>("num_generations_eval")?.unwrap_or(1),
                metric_for_best_model: v.get("metric_for_best_model")?,
                category_column: v.get("category_column")?,
            },
            log: LogSettings {
                logging_steps,
                grpo_logging_steps: v.get::<Option<_>>("grpo_logging_steps")?.unwrap_or(logging_steps),
                report_to: v.get("report_to")?,
                run_name: v.get("run_name")?,
                log_completions: v.get("log_completions")?,
            },
            threads: v.get("threads")?,
            env,
        })
    }
}

/// A name that is one path component, so that logs and checkpoints of a run cannot land elsewhere.
fn plain_name(name: &str) -> Result<(), Problem> {
    if !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\']) && !name.contains("..") {
        return Ok(());
    }
    let clean: String = name
        .trim_start_matches('.')
        .replace("..", "_")
        .chars()
        .map(|c| if c == '/' || c == '\\' { '-' } else { c })
        .collect();
    let problem = Problem::usage("`exp_name` is not a plain name")
        .got(format!("`{name}`"))
        .expected("a name without `/`, `\\`, `..` or a leading dot");
    Err(if clean.is_empty() {
        problem
    } else {
        problem.help(format!("try `{clean}`, or give a directory with `--output_dir`"))
    })
}

/// What is missing although no single flag is required.
pub fn needs(verb: Verb, s: &Settings) -> Option<Problem> {
    let rows = "`--train_file FILE`, `--dataset_use NAME` or `--data_file_paths A:B`";
    let named: Vec<&str> =
        s.data.dataset_use.iter().chain(&s.data.eval_dataset_use).map(String::as_str).collect();
    if !named.is_empty() && s.data.dataset_registry.is_none() {
        return Some(
            Problem::usage("dataset names without a registry")
                .got(format!("`{}`", named.join(",")))
                .expected("`--dataset_registry FILE`, which maps names to files"),
        );
    }
    match verb {
        Verb::Train | Verb::Sft if s.run.output_dir.is_none() => {
            Some(Problem::usage("no run directory").expected("`--output_dir DIR` or `--exp_name NAME`"))
        }
        Verb::Train if s.rollout.replay.is_some() => None,
        Verb::Train | Verb::Sft if !s.data.has_train_rows() => {
            Some(Problem::usage("no training data").expected(rows))
        }
        Verb::DataCheck | Verb::DataShow if !s.data.has_train_rows() && !s.data.has_eval_rows() => {
            Some(Problem::usage("no data").expected(format!("{rows}, or their `--eval_…` forms")))
        }
        Verb::Eval if s.data.eval_file.is_empty() && s.data.eval_dataset_use.is_empty() => Some(
            Problem::usage("no evaluation data").expected("`--eval_file FILE` or `--eval_dataset_use NAME`"),
        ),
        Verb::Generate if s.io.input.is_none() && s.io.prompt.is_none() => Some(
            Problem::usage("nothing to answer").expected("`--input FILE --output FILE`, or `--prompt TEXT`"),
        ),
        Verb::Generate if s.io.input.is_some() && s.io.output.is_none() => {
            Some(Problem::usage("no place for the completions of `--input`").expected("`--output FILE`"))
        }
        _ => None,
    }
}
