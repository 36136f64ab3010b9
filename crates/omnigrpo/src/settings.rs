//! The settings of one run, typed.
//!
//! [`Settings::from_values`] is the only reader of the flag table's values: below it nobody sees a flag, a file of
//! settings or an environment variable. Unless a field says otherwise, it means what the row of its name in
//! `flags.rs` says, in the unit given there; an `Option` is `None` where that row's default is unset.
//!
//! The structs do not derive `PartialEq`: it would count as reading every field, and so hide from the compiler a
//! setting that no verb uses.

use std::path::{Path, PathBuf};
use std::time::Duration;

use omnigrpo_data::{ColumnNames, QUESTION_TEMPLATES, QuestionTemplate};
use omnigrpo_grpo::{AdvantageKind, Aggregation, Kl, LossPlan, RECIPES, RatioLevel, Recipe, Surrogate};
use omnigrpo_rewards::{
    AccuracyMode, AnswerPolicy, Compat, ExternalOptions, FormatMode, LabelSet, Labels, RewardOptions,
};
use serde_json::{Map, Value as Json};

use crate::flags::Verb;
use crate::problem::Problem;
use crate::values::{FromValue, Value, Values};

/// A type whose values have names on the command line.
pub trait Named: Copy + PartialEq + 'static {
    /// Name, value and one line of help, in the order of the help.
    fn table() -> Vec<(&'static str, Self, &'static str)>;
}

/// Name and help of every value of a type, for the flag table.
pub fn words<T: Named>() -> Vec<(&'static str, &'static str)> {
    T::table().into_iter().map(|(name, _, help)| (name, help)).collect()
}

/// The name of a value.
pub fn name_of<T: Named>(value: T) -> Option<&'static str> {
    T::table().into_iter().find(|row| row.1 == value).map(|row| row.0)
}

impl<T: Named> FromValue for T {
    fn from_value(value: &Value) -> Option<Self> {
        let Value::Text(text) = value else { return None };
        Self::table().into_iter().find(|row| row.0 == text).map(|row| row.1)
    }
}

/// Declares an enum; the first doc line of a variant is its help.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident: $(#[doc = $help:literal] $variant:ident = $text:literal),+ $(,)?) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $(#[doc = $help] $variant),+ }

        impl Named for $name {
            fn table() -> Vec<(&'static str, Self, &'static str)> {
                vec![$(($text, Self::$variant, $help)),+]
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
    /// How a checkpoint is written, where its family is published in two layouts.
    Layout:
    /// For transformers, vLLM and TRL.
    Hf = "hf",
    /// For the code of the model's own repository.
    Original = "original",
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
    /// Which media may be fetched.
    AllowUrls:
    /// None.
    Off = "off",
    /// Those of hosts on the public network.
    Public = "public",
    /// Those of this machine and its network too.
    All = "all",
);
choice!(
    /// What a file without an audio track gives.
    MissingAudio:
    /// A bad row.
    Error = "error",
    /// Silence.
    Silence = "silence",
);
choice!(
    /// How HumanOmni prompts are written.
    PromptForm:
    /// As in supervised training and inference.
    Sft = "sft",
    /// As the original GRPO trainer: an empty Qwen2-VL video before the media.
    R1OmniGrpo = "r1omni_grpo",
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
    /// Where metrics go.
    Tracker:
    /// No place besides the run directory.
    None = "none",
    /// The file `metrics.jsonl` of the run directory.
    Jsonl = "jsonl",
    /// Event files in `tensorboard/` of the run directory.
    Tensorboard = "tensorboard",
    /// Weights & Biases, through the package `wandb` of `reward_python`.
    Wandb = "wandb",
    /// `http://127.0.0.1:PORT/metrics`, for Prometheus.
    Prometheus = "prometheus",
    /// All of them.
    All = "all",
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

/// Lists a type of another crate.
macro_rules! listed {
    ($name:ty: $($text:literal = $value:expr, $help:literal);+ $(;)?) => {
        impl Named for $name {
            fn table() -> Vec<(&'static str, Self, &'static str)> {
                vec![$(($text, $value, $help)),+]
            }
        }
    };
}

listed!(AdvantageKind:
    "group_std" = AdvantageKind::GroupStd, "centred, over the sample deviation of the group";
    "batch_std" = AdvantageKind::Batch, "centred per group, over the sample deviation of the batch";
    "group_center" = AdvantageKind::GroupCenter, "centred per group";
    "group_std_clamped" = AdvantageKind::GroupStdClamped, "centred, over the population deviation, at least 0.01";
);
listed!(Kl:
    "k3" = Kl::K3, "per token, never negative";
    "k1_seq" = Kl::K1, "signed difference of whole completions";
);
listed!(Aggregation:
    "seq_mean" = Aggregation::SequenceMean, "mean over completions of their token means";
    "token_mean" = Aggregation::TokenMeanGlobal, "mean over all tokens of the step";
    "token_mean_local" = Aggregation::TokenMeanLocal, "mean over the tokens of each batch";
    "constant_length" = Aggregation::ConstantLength, "sum over completions times the length limit";
    "token_sum" = Aggregation::TokenSum, "sum over tokens, mean over completions";
);
listed!(RatioLevel:
    "token" = RatioLevel::Token, "a ratio per token";
    "sequence" = RatioLevel::Sequence, "a ratio per completion";
);

/// Lists a type with a table of its own in another crate.
macro_rules! listed_there {
    ($($name:ty),+) => { $(
        impl Named for $name {
            fn table() -> Vec<(&'static str, Self, &'static str)> {
                <$name as omnigrpo_rewards::Named>::ALL.to_vec()
            }
        }
    )+ };
}
listed_there!(FormatMode, AccuracyMode, AnswerPolicy, Compat);

impl Named for &'static Recipe {
    fn table() -> Vec<(&'static str, Self, &'static str)> {
        RECIPES.iter().map(|recipe| (recipe.name, recipe, recipe.summary)).collect()
    }
}

impl Named for &'static QuestionTemplate {
    fn table() -> Vec<(&'static str, Self, &'static str)> {
        QUESTION_TEMPLATES.iter().map(|template| (template.name, template, template.doc)).collect()
    }
}

/// Which scored completions become rows for `sft`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Keep {
    /// The best of each row, the first of several.
    Best,
    /// Those that count as right.
    Passed,
    /// Those whose reward is at least this.
    From(f64),
}

impl Keep {
    fn parse(text: &str) -> Result<Self, Problem> {
        match (text, text.parse::<f64>()) {
            ("best", _) => Ok(Self::Best),
            ("passed", _) => Ok(Self::Passed),
            (_, Ok(number)) if number.is_finite() => Ok(Self::From(number)),
            _ => Err(Problem::usage("which completions are to be kept?")
                .got(format!("`{text}`"))
                .expected("`best`, `passed`, or the least reward as a number")
                .at("--keep")),
        }
    }
}

/// Whether and from where to resume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Start anew.
    Never,
    /// The newest checkpoint, if its settings are those of this run, else anew.
    Auto,
    /// The newest checkpoint, and no other start.
    Must,
    /// This checkpoint.
    From(PathBuf),
}

impl Resume {
    // `true` and `false` are what users of other trainers pass; taken as paths they would name a missing folder.
    fn parse(text: &str) -> Self {
        match text.to_ascii_lowercase().as_str() {
            "never" | "false" | "no" => Self::Never,
            "auto" | "true" | "yes" => Self::Auto,
            "must" => Self::Must,
            _ => Self::From(PathBuf::from(text)),
        }
    }
}

/// Environment variables, read here and nowhere else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// `WANDB_DISABLED` is true: `report_to wandb` has no effect.
    pub wandb_disabled: bool,
    /// `WANDB_API_KEY`, which the package reads itself; known here to be shown nowhere.
    pub wandb_api_key: Option<String>,
    /// `EXP_NAME`, the name of a run that has none of its own.
    pub exp_name: Option<String>,
    /// The variable by which a launcher says that it started several processes, as `NAME=NUMBER`.
    pub several_processes: Option<String>,
    /// Where completions are logged as the source systems do: `LOG_PATH` with `DEBUG_MODE`.
    pub debug_log: Option<PathBuf>,
    /// `DS_SKIP_CUDA_CHECK` is true. There is no DeepSpeed here; kept to say so.
    pub ds_skip_cuda_check: bool,
    /// `CUDA_VISIBLE_DEVICES`, as the driver reads it.
    pub cuda_visible_devices: Option<String>,
    /// What belongs to the Hugging Face hub.
    pub hub: HubEnvironment,
    /// `XDG_CACHE_HOME`, else `.cache` in `HOME`, with a folder of this program's own.
    pub cache_dir: PathBuf,
    /// `OPENAI_API_KEY`, sent to a `judge:` as bearer token and shown nowhere.
    pub judge_api_key: Option<String>,
}

/// The variables of `huggingface_hub`, with its defaults.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct HubEnvironment {
    /// `HF_HUB_CACHE`, else `hub` in `HF_HOME`, which is `huggingface` in the cache of the user.
    pub cache: PathBuf,
    /// `HF_ENDPOINT`.
    pub endpoint: String,
    /// `HF_TOKEN`; shown nowhere.
    pub token: Option<String>,
    /// `HF_TOKEN_PATH`, where `hf auth login` keeps one.
    pub token_file: PathBuf,
    /// `HF_HUB_OFFLINE` or `TRANSFORMERS_OFFLINE` is true.
    pub offline: bool,
}

impl std::fmt::Debug for HubEnvironment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HubEnvironment").field("cache", &self.cache).finish_non_exhaustive()
    }
}

impl HubEnvironment {
    fn read(get: &dyn Fn(&str) -> Option<String>, user_cache: &Path) -> Self {
        let path = |name: &str| get(name).map(PathBuf::from);
        let home = path("HF_HOME").unwrap_or_else(|| user_cache.join("huggingface"));
        Self {
            cache: path("HF_HUB_CACHE")
                .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
                .unwrap_or_else(|| home.join("hub")),
            endpoint: get("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned()),
            token: get("HF_TOKEN")
                .or_else(|| get("HUGGING_FACE_HUB_TOKEN"))
                .map(|token| token.trim().to_owned()),
            token_file: path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token")),
            offline: on(get, "HF_HUB_OFFLINE") || on(get, "TRANSFORMERS_OFFLINE"),
        }
    }
}

fn on(get: &dyn Fn(&str) -> Option<String>, name: &str) -> bool {
    get(name).is_some_and(|v| matches!(v.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on"))
}

impl Environment {
    /// Reads the variables through `get`.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Self {
        // An empty variable is as good as none.
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        let user_cache = get("XDG_CACHE_HOME").map(PathBuf::from);
        let user_cache = user_cache
            .or_else(|| Some(PathBuf::from(get("HOME")?).join(".cache")))
            .unwrap_or_else(|| PathBuf::from(".cache"));
        let several = ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].into_iter().find_map(|name| {
            let processes: u64 = get(name)?.trim().parse().ok()?;
            (processes > 1).then(|| format!("{name}={processes}"))
        });
        Self {
            wandb_disabled: on(&get, "WANDB_DISABLED"),
            wandb_api_key: get("WANDB_API_KEY"),
            exp_name: get("EXP_NAME"),
            several_processes: several,
            debug_log: on(&get, "DEBUG_MODE")
                .then(|| get("LOG_PATH").map_or_else(|| PathBuf::from("grpo_debug.log"), PathBuf::from)),
            ds_skip_cuda_check: on(&get, "DS_SKIP_CUDA_CHECK"),
            cuda_visible_devices: get("CUDA_VISIBLE_DEVICES"),
            hub: HubEnvironment::read(&get, &user_cache),
            cache_dir: user_cache.join("omnigrpo"),
            judge_api_key: get("OPENAI_API_KEY"),
        }
    }
}

/// What a verb reads and writes.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct IoSettings {
    pub format: Option<String>,
    pub shell: Option<String>,
    pub directory: Option<PathBuf>,
    pub run_dirs: Vec<String>,
    pub input: Option<PathBuf>,
    pub output: Option<PathBuf>,
    /// Which completions `rewards run` makes rows of.
    pub keep: Option<Keep>,
    pub prompt: Option<String>,
    pub image: Vec<String>,
    pub video: Vec<String>,
    pub audio: Vec<String>,
    pub row: u64,
    pub num_rows: u64,
}

/// The workload of `bench`.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct BenchSettings {
    pub num_images: usize,
    pub image_px: usize,
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub num_prompts: usize,
    pub num_steps: usize,
    pub json: Option<PathBuf>,
}

/// The checkpoint and its precision.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct ModelSettings {
    pub model_name_or_path: Option<String>,
    pub torch_dtype: TorchDtype,
    pub adapter_name_or_path: Option<PathBuf>,
    pub merge: bool,
    pub layout: Option<Layout>,
    pub load_in_8bit: bool,
    pub load_in_4bit: bool,
    pub init_weights: Option<u64>,
    pub vision_tower: Option<String>,
    pub audio_tower: Option<String>,
    pub bert: Option<String>,
    pub mm_dynamic_compressor: Option<bool>,
    pub pure_bf16: bool,
    pub max_stream_tokens: Option<usize>,
    pub gradient_checkpointing: bool,
}

/// The registry that is taken where none is given.
pub const REGISTRY: &str = "dataset_registry.yaml";

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
    pub columns: ColumnNames,
    pub image_folders: Vec<PathBuf>,
    pub video_folders: Vec<PathBuf>,
    pub audio_folders: Vec<PathBuf>,
    pub use_audio_in_video: bool,
    pub missing_audio: MissingAudio,
    pub allow_urls: AllowUrls,
    pub media_timeout_secs: f64,
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
    pub max_anyres_num: Option<u32>,
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
    pub question_template: &'static QuestionTemplate,
    pub prompt_form: Option<PromptForm>,
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
    /// One for all rows, or one per training file.
    pub accuracy_mode: Vec<AccuracyMode>,
    pub answer_policy: AnswerPolicy,
    pub think: ThinkMode,
    pub multi_objective_aggregation: MultiObjective,
    pub temporal_order_bonus: bool,
    pub compat: Vec<Compat>,
    pub reward_timeout_secs: f64,
    pub reward_workers: usize,
    pub judge_model: Option<String>,
    pub judge_prompt: Option<PathBuf>,
    pub reward_python: String,
    pub clip_model: Option<String>,
    pub clip_text_model: Option<String>,
    pub explanation_clip_weight: f64,
    pub bertscore_model: Option<String>,
    pub bertscore_layer: Option<usize>,
    pub bertscore_idf: bool,
    pub bertscore_baseline: Option<PathBuf>,
}

impl RewardSettings {
    /// The settings of the rewards crate. `cider` needs document frequencies besides, which come from the data.
    pub fn options(&self, max_completion_tokens: usize) -> RewardOptions {
        let defaults = ExternalOptions::default();
        RewardOptions {
            format_mode: self.format_mode,
            accuracy_mode: match self.accuracy_mode[..] {
                [mode] => mode,
                // Rows of the training files carry theirs.
                _ => AccuracyMode::Auto,
            },
            answer_policy: self.answer_policy,
            compat: self.compat.iter().copied().collect(),
            weights: self.reward_weights.clone(),
            max_completion_tokens,
            // The ramp keeps its share of the limit.
            overlong_cache_tokens: max_completion_tokens / 5,
            external: ExternalOptions {
                timeout: Duration::from_secs_f64(self.reward_timeout_secs),
                pool_size: self.reward_workers,
                python: self.reward_python.clone(),
                judge_model: self.judge_model.clone().unwrap_or(defaults.judge_model.clone()),
                ..defaults
            },
            ..RewardOptions::default()
        }
    }
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

/// The GRPO objective: the recipe with every choice that was given in its place.
#[derive(Clone, Debug)]
pub struct LossSettings {
    /// The recipe of `loss_type`.
    pub recipe: &'static Recipe,
    /// From `advantage`, else `scale_rewards`, else the recipe.
    pub advantage: AdvantageKind,
    /// `grpo_alpha`.
    pub alpha: f64,
    /// The loss, checked.
    pub plan: LossPlan,
    /// Optimizer passes over each batch of completions.
    pub num_iterations: usize,
}

impl LossSettings {
    fn from_values(v: &Values) -> Result<Self, Problem> {
        let recipe: &'static Recipe = v.get("loss_type")?;
        let scaled = v.get::<Option<ScaleRewards>>("scale_rewards")?.map(|scale| match scale {
            ScaleRewards::Group => AdvantageKind::GroupStd,
            ScaleRewards::Batch => AdvantageKind::Batch,
            ScaleRewards::None => AdvantageKind::GroupCenter,
        });
        let advantage = v.get::<Option<_>>("advantage")?.or(scaled).unwrap_or(recipe.advantage);
        let epsilon: Option<f64> = v.get("epsilon")?;
        let epsilon_high: Option<f64> = v.get("epsilon_high")?;
        let delta: Option<f64> = v.get("delta")?;
        let surrogate = match recipe.loss.surrogate {
            Surrogate::Clip { low, high, delta: own } => Surrogate::Clip {
                low: epsilon.unwrap_or(low),
                // One given bound stands for both, as in TRL.
                high: epsilon_high.or(epsilon).unwrap_or(high),
                delta: delta.or(own),
            },
            Surrogate::Cispo { cap } => Surrogate::Cispo { cap: epsilon_high.unwrap_or(cap) },
            other => other,
        };
        let kl = v.get::<Option<Kl>>("kl")?.unwrap_or(recipe.loss.kl);
        let corrected: bool = v.get("use_bias_correction_kl")?;
        Ok(Self {
            recipe,
            advantage,
            alpha: v.get::<Option<_>>("grpo_alpha")?.unwrap_or(recipe.alpha),
            plan: LossPlan {
                surrogate,
                ratio: v.get::<Option<_>>("importance_sampling_level")?.unwrap_or(recipe.loss.ratio),
                aggregation: v.get::<Option<_>>("loss_agg")?.unwrap_or(recipe.loss.aggregation),
                kl: if corrected && kl == Kl::K3 { Kl::K3Corrected } else { kl },
                beta: v.get::<Option<_>>("beta")?.unwrap_or(recipe.loss.beta),
                entropy_coef: v.get("entropy_coef")?,
                mask_truncated_completions: v.get("mask_truncated_completions")?,
            },
            num_iterations: v.get("num_iterations")?,
        })
    }
}

/// What a recipe sets where nobody gave anything else, so that the printed configuration is complete.
pub fn recipe_values(recipe: &'static Recipe, values: &Values) -> Vec<(&'static str, Value)> {
    let given = |name: &str| values.lookup(name);
    let mut out = vec![("beta", Value::Float(recipe.loss.beta)), ("grpo_alpha", Value::Float(recipe.alpha))];
    let mut name = |flag, name: Option<&'static str>| {
        if let Some(name) = name {
            out.push((flag, Value::Text(name.to_string())));
        }
    };
    if given("scale_rewards").is_none() {
        name("advantage", name_of(recipe.advantage));
    }
    name("kl", name_of(recipe.loss.kl));
    name("loss_agg", name_of(recipe.loss.aggregation));
    name("importance_sampling_level", name_of(recipe.loss.ratio));
    match recipe.loss.surrogate {
        Surrogate::Clip { low, high, .. } => {
            let high = match given("epsilon") {
                Some((Value::Float(epsilon), _)) => *epsilon,
                _ => high,
            };
            out.extend([("epsilon", Value::Float(low)), ("epsilon_high", Value::Float(high))]);
        }
        Surrogate::Cispo { cap } => out.push(("epsilon_high", Value::Float(cap))),
        _ => {}
    }
    out.retain(|(name, _)| given(name).is_none());
    out
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
    /// Resolved: false with adapters, else true, unless given.
    pub tune_mm_llm: bool,
    /// Resolved: false with adapters, else true, unless given.
    pub tune_mm_mlp: bool,
    /// `None` follows the projector.
    pub tune_gate: Option<bool>,
    /// Resolved: true with `freeze_vision_modules` false and no adapters, else false, unless given.
    pub tune_mm_vision: bool,
    /// Resolved: false unless given.
    pub freeze_vision_modules: bool,
    pub tune_bert: bool,
    pub trainable_patterns: Vec<String>,
    /// Resolved: also true where training starts from an adapter.
    pub use_peft: bool,
    pub lora_r: usize,
    pub lora_alpha: f64,
    pub lora_dropout: f64,
    pub lora_target_modules: Vec<String>,
    pub use_rslora: bool,
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
    /// What the console shows, with times: `log.txt` of the run directory, or `runs/NAME/log/log.txt` with `exp_name`.
    pub log_file: Option<PathBuf>,
    pub deepspeed: Option<PathBuf>,
    pub num_train_epochs: f64,
    /// `None` where the flag is -1.
    pub max_steps: Option<u64>,
    pub seed: u64,
    /// Resolved: `seed` unless given.
    pub data_seed: u64,
    pub save_strategy: SaveStrategy,
    pub save_steps: u64,
    pub save_minutes: Option<f64>,
    pub save_total_limit: Option<usize>,
    pub save_only_model: bool,
    pub resume_from_checkpoint: Resume,
    pub allow_changed_settings: bool,
}

/// Evaluation during training, and tables of `eval`.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct EvalSettings {
    /// Resolved: steps with `eval_steps`, else epoch with evaluation data, else no, unless given.
    pub eval_strategy: EvalStrategy,
    pub eval_steps: Option<u64>,
    pub eval_on_start: bool,
    /// Resolved: 1, greedy, unless given.
    pub num_generations_eval: usize,
    pub metric_for_best_model: String,
    pub category_column: Option<String>,
    pub accuracy_threshold: f64,
    pub labels: Labels,
}

/// Metrics and console.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct LogSettings {
    pub logging_steps: u64,
    /// Resolved: `logging_steps` unless given.
    pub grpo_logging_steps: u64,
    pub run_name: Option<String>,
    pub report_to: Vec<Tracker>,
    pub log_completions: bool,
    /// Serve the run as a page.
    pub dashboard: bool,
    /// Of that page; 0 for a free one.
    pub dashboard_port: u16,
    pub prometheus_port: u16,
    /// A table in the terminal instead of a page.
    pub tui: bool,
    /// Write the numbers of each token.
    pub log_token_stats: bool,
    /// Count time, operations and bytes by phase and kernel.
    pub profile: bool,
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
    pub bench: BenchSettings,
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
        let reward_weights = reward_weights(v, &reward_funcs)?;
        let exp_name: Option<String> = v.get("exp_name")?;
        if let Some(name) = &exp_name {
            plain_name(name)?;
        }
        let output_dir: Option<PathBuf> = v.get("output_dir")?;
        if let (Some(dir), Some(name)) = (&output_dir, &exp_name) {
            return Err(Problem::usage("the run directory is given twice")
                .got(format!("`output_dir` {} and `exp_name` {name}", dir.display()))
                .expected("one of them; `--run_name` names a run in a directory of your choice"));
        }
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
            columns: ColumnNames {
                prompt: v.get("prompt_column")?,
                solution: v.get("solution_column")?,
                image: v.get("image_column")?,
                video: v.get("video_column")?,
            },
            image_folders: v.get("image_folders")?,
            video_folders: v.get("video_folders")?,
            audio_folders: v.get("audio_folders")?,
            use_audio_in_video: v.get("use_audio_in_video")?,
            missing_audio: v.get("missing_audio")?,
            allow_urls: v.get("allow_urls")?,
            media_timeout_secs: v.get("media_timeout_secs")?,
            strict_media: v.get("strict_media")?,
            max_skipped: v.get("max_skipped")?,
            skip_data_check: v.get("skip_data_check")?,
        };
        let eval_strategy = v.get::<Option<EvalStrategy>>("eval_strategy")?.unwrap_or(match eval_steps {
            Some(_) => EvalStrategy::Steps,
            None if data.has_eval_rows() => EvalStrategy::Epoch,
            None => EvalStrategy::No,
        });
        let adapter: Option<PathBuf> = v.get("adapter_name_or_path")?;
        let use_peft = v.get("use_peft")? || adapter.is_some();
        let freeze_vision_modules: Option<bool> = v.get("freeze_vision_modules")?;
        Ok(Self {
            io: IoSettings {
                format: v.get("format")?,
                shell: v.get("shell")?,
                directory: v.get("directory")?,
                run_dirs: v.get::<Option<_>>("run_dirs")?.unwrap_or_default(),
                input: v.get("input")?,
                output: v.get("output")?,
                keep: v.get::<Option<String>>("keep")?.as_deref().map(Keep::parse).transpose()?,
                prompt: v.get("prompt")?,
                image: v.get("image")?,
                video: v.get("video")?,
                audio: v.get("audio")?,
                row: v.get("row")?,
                num_rows: v.get("num_rows")?,
            },
            model: ModelSettings {
                model_name_or_path: v.get("model_name_or_path")?,
                torch_dtype: v.get("torch_dtype")?,
                adapter_name_or_path: adapter,
                merge: v.get("merge")?,
                layout: v.get("layout")?,
                load_in_8bit: v.get("load_in_8bit")?,
                load_in_4bit: v.get("load_in_4bit")?,
                init_weights: v.get("init_weights")?,
                vision_tower: v.get("vision_tower")?,
                audio_tower: v.get("audio_tower")?,
                bert: v.get("bert")?,
                mm_dynamic_compressor: v.get("mm_dynamic_compressor")?,
                pure_bf16: v.get("pure_bf16")?,
                max_stream_tokens: v.get("max_stream_tokens")?,
                gradient_checkpointing: v.get("gradient_checkpointing")?,
            },
            data,
            media: MediaSettings {
                min_pixels: v.get("min_pixels")?,
                max_pixels: v.get("max_pixels")?,
                max_anyres_num: v.get("max_anyres_num")?,
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
                prompt_form: v.get("prompt_form")?,
                system_prompt: v.get("system_prompt")?,
                chat_template_kwargs: v.get::<Option<_>>("chat_template_kwargs")?.unwrap_or_default(),
                max_prompt_length: v.get("max_prompt_length")?,
            },
            rewards: RewardSettings {
                reward_funcs,
                reward_weights,
                format_mode: v.get("format_mode")?,
                accuracy_mode: v.get("accuracy_mode")?,
                answer_policy: v.get("answer_policy")?,
                think: v.get("think")?,
                multi_objective_aggregation: v.get("multi_objective_aggregation")?,
                temporal_order_bonus: v.get("temporal_order_bonus")?,
                compat: v.get("compat")?,
                reward_timeout_secs: v.get("reward_timeout_secs")?,
                reward_workers: v.get("reward_workers")?,
                judge_model: v.get("judge_model")?,
                judge_prompt: v.get("judge_prompt")?,
                reward_python: v.get("reward_python")?,
                clip_model: v.get("clip_model")?,
                clip_text_model: v.get("clip_text_model")?,
                explanation_clip_weight: v.get("explanation_clip_weight")?,
                bertscore_model: v.get("bertscore_model")?,
                bertscore_layer: v.get("bertscore_layer")?,
                bertscore_idf: v.get("bertscore_idf")?,
                bertscore_baseline: v.get("bertscore_baseline")?,
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
            loss: LossSettings::from_values(v)?,
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
                tune_mm_llm: v.get::<Option<_>>("tune_mm_llm")?.unwrap_or(!use_peft),
                tune_mm_mlp: v.get::<Option<_>>("tune_mm_mlp")?.unwrap_or(!use_peft),
                tune_gate: v.get("tune_gate")?,
                tune_mm_vision: v
                    .get::<Option<_>>("tune_mm_vision")?
                    .unwrap_or(freeze_vision_modules == Some(false) && !use_peft),
                freeze_vision_modules: freeze_vision_modules == Some(true),
                tune_bert: v.get("tune_bert")?,
                trainable_patterns: v.get("trainable_patterns")?,
                use_peft,
                lora_r: v.get("lora_r")?,
                lora_alpha: v.get("lora_alpha")?,
                lora_dropout: v.get("lora_dropout")?,
                lora_target_modules: v.get("lora_target_modules")?,
                use_rslora: v.get("use_rslora")?,
                per_device_train_batch_size: v.get("per_device_train_batch_size")?,
                gradient_accumulation_steps: v.get("gradient_accumulation_steps")?,
            },
            run: RunSettings {
                log_file: match (&output_dir, &exp_name) {
                    (Some(dir), _) => Some(dir.join("log.txt")),
                    (None, Some(name)) => Some(PathBuf::from("runs").join(name).join("log/log.txt")),
                    (None, None) => None,
                },
                output_dir: output_dir
                    .or_else(|| exp_name.map(|name| PathBuf::from("checkpoints/rl").join(name))),
                deepspeed: v.get("deepspeed")?,
                num_train_epochs: v.get("num_train_epochs")?,
                max_steps: u64::try_from(max_steps).ok(),
                seed,
                data_seed: v.get::<Option<_>>("data_seed")?.unwrap_or(seed),
                save_strategy: v.get("save_strategy")?,
                save_steps: v.get("save_steps")?,
                save_minutes: v.get("save_minutes")?,
                save_total_limit: v.get("save_total_limit")?,
                save_only_model: v.get("save_only_model")?,
                resume_from_checkpoint: Resume::parse(&resume),
                allow_changed_settings: v.get("allow_changed_settings")?,
            },
            eval: EvalSettings {
                eval_strategy,
                eval_steps,
                eval_on_start: v.get("eval_on_start")?,
                num_generations_eval: v.get::<Option<_>>("num_generations_eval")?.unwrap_or(1),
                metric_for_best_model: v.get("metric_for_best_model")?,
                category_column: v.get("category_column")?,
                accuracy_threshold: v.get("accuracy_threshold")?,
                labels: labels(&v.get::<Vec<String>>("label_set")?)?,
            },
            log: LogSettings {
                logging_steps,
                grpo_logging_steps: v.get::<Option<_>>("grpo_logging_steps")?.unwrap_or(logging_steps),
                run_name: v.get("run_name")?,
                report_to: v.get("report_to")?,
                log_completions: v.get("log_completions")?,
                dashboard: v.get("dashboard")?,
                dashboard_port: v.get("dashboard_port")?,
                prometheus_port: v.get("prometheus_port")?,
                tui: v.get("tui")?,
                log_token_stats: v.get("log_token_stats")?,
                profile: v.get("profile")?,
            },
            bench: BenchSettings {
                num_images: v.get("num_images")?,
                image_px: v.get("image_px")?,
                prompt_tokens: v.get("prompt_tokens")?,
                completion_tokens: v.get("completion_tokens")?,
                num_prompts: v.get("num_prompts")?,
                num_steps: v.get("num_steps")?,
                json: v.get("json")?,
            },
            threads: v.get("threads")?,
            env,
        })
    }
}

/// `reward_weights`, 1 each if there are none, with the weights that name their reward in place.
fn reward_weights(v: &Values, rewards: &[String]) -> Result<Vec<f64>, Problem> {
    let mut weights: Vec<f64> = v.get("reward_weights")?;
    let all = v.rank("reward_weights");
    if weights.is_empty() {
        weights = vec![1.0; rewards.len()];
    }
    for (reward, setting) in [("format", "format_reward_weight"), ("accuracy", "accuracy_reward_weight")] {
        let Some(weight) = v.get::<Option<f64>>(setting)? else { continue };
        if v.rank(setting) == all {
            return Err(Problem::usage(format!("the weight of `{reward}` is given twice"))
                .got(format!("`reward_weights` and `{setting}`"))
                .expected("one of them"));
        }
        // A weight that names its reward yields to a list that was given over it.
        let at = rewards.iter().position(|name| name == reward).filter(|_| v.rank(setting) > all);
        if let Some(slot) = at.and_then(|at| weights.get_mut(at)) {
            *slot = weight;
        }
    }
    Ok(weights)
}

/// `--label_set`.
fn labels(words: &[String]) -> Result<Labels, Problem> {
    match words {
        [] => Ok(Labels::None),
        [word] if word == "auto" => Ok(Labels::OfGroundTruths),
        names => LabelSet::new(names)
            .map(Labels::Given)
            .map_err(|e| Problem::usage(e.to_string()).expected("`auto`, or the labels").at("--label_set")),
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
pub fn needs(verb: Verb, s: &Settings) -> Vec<Problem> {
    let rows = "`--train_file FILE`, `--dataset_use NAME` or `--data_file_paths A:B`";
    let trains = matches!(verb, Verb::Train | Verb::Sft);
    let (train_rows, eval_rows) = (s.data.has_train_rows(), s.data.has_eval_rows());
    let named: Vec<&str> =
        s.data.dataset_use.iter().chain(&s.data.eval_dataset_use).map(String::as_str).collect();
    let mut missing = Vec::new();
    let mut need = |lacks: bool, problem: Problem| {
        if lacks {
            missing.push(problem);
        }
    };
    need(
        trains && s.run.output_dir.is_none(),
        Problem::usage("no run directory").expected("`--output_dir DIR` or `--exp_name NAME`"),
    );
    need(
        trains && !train_rows && !(verb == Verb::Train && s.rollout.replay.is_some()),
        Problem::usage("no training data").expected(rows),
    );
    need(
        matches!(verb, Verb::DataCheck | Verb::DataShow) && !train_rows && !eval_rows,
        Problem::usage("no data").expected(format!("{rows}, or their `--eval_…` forms")),
    );
    need(
        verb == Verb::Eval && s.data.eval_file.is_empty() && s.data.eval_dataset_use.is_empty(),
        Problem::usage("no evaluation data").expected("`--eval_file FILE` or `--eval_dataset_use NAME`"),
    );
    need(
        !named.is_empty() && s.data.dataset_registry.is_none() && !Path::new(REGISTRY).is_file(),
        Problem::usage("dataset names without a registry").got(format!("`{}`", named.join(","))).expected(
            format!("`--dataset_registry FILE`, which maps names to files, or a file {REGISTRY} here"),
        ),
    );
    need(
        verb == Verb::Generate && s.io.input.is_none() && s.io.prompt.is_none(),
        Problem::usage("nothing to answer").expected("`--input FILE --output FILE`, or `--prompt TEXT`"),
    );
    need(
        verb == Verb::Generate && s.io.input.is_some() && s.io.output.is_none(),
        Problem::usage("no place for the completions of `--input`").expected("`--output FILE`"),
    );
    let wants =
        |name: &str| verb != Verb::DataCheck && s.rewards.reward_funcs.iter().any(|reward| reward == name);
    need(
        wants("explanation") && s.rewards.explanation_clip_weight > 0.0 && s.rewards.clip_model.is_none(),
        Problem::usage("the reward `explanation` needs a CLIP")
            .expected("`--clip_model DIR`")
            .help("`--explanation_clip_weight 0` is CIDEr alone"),
    );
    need(
        wants("bertscore") && s.rewards.bertscore_model.is_none(),
        Problem::usage("the reward `bertscore` needs a text encoder").expected("`--bertscore_model DIR`"),
    );
    missing
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli;
    use crate::config;
    use crate::values::{Origin, Resolved};

    fn resolved(verb: Verb, yaml: &str) -> Result<Resolved, Problem> {
        let given = config::parse(yaml, "test", |_| Origin::Flag);
        cli::resolve(verb, given, Environment::default())
    }

    fn train(yaml: &str) -> Settings {
        resolved(Verb::Train, yaml).unwrap().settings
    }

    #[test]
    fn the_loss_is_the_recipe_with_the_given_choices_in_its_place() {
        let clip = |s: &Settings| match s.loss.plan.surrogate {
            Surrogate::Clip { low, high, delta } => (low, high, delta),
            other => panic!("{other:?}"),
        };
        let grpo = train("");
        assert_eq!(clip(&grpo), (0.2, 0.2, None));
        assert_eq!((grpo.loss.plan.beta, grpo.loss.alpha, grpo.loss.plan.kl), (0.04, 1.0, Kl::K3));
        assert_eq!(grpo.loss.advantage, AdvantageKind::GroupStd);
        assert_eq!(grpo.loss.plan.aggregation, Aggregation::SequenceMean);
        // One bound stands for both.
        assert_eq!(clip(&train("epsilon: 0.1")), (0.1, 0.1, None));
        assert_eq!(clip(&train("epsilon_high: 0.28\ndelta: 4")), (0.2, 0.28, Some(4.0)));
        let gspo = train("loss_type: gspo");
        assert_eq!(clip(&gspo), (3e-4, 4e-4, None));
        assert_eq!((gspo.loss.plan.ratio, gspo.loss.plan.beta), (RatioLevel::Sequence, 0.0));
        assert_eq!(train("loss_type: gspo\nbeta: 0.1").loss.plan.beta, 0.1);
        assert_eq!(
            train("loss_type: cispo\nepsilon_high: 4").loss.plan.surrogate,
            Surrogate::Cispo { cap: 4.0 }
        );
        assert_eq!(train("use_bias_correction_kl: yes").loss.plan.kl, Kl::K3Corrected);
        assert_eq!(train("loss_agg: token_sum\nkl: k1_seq").loss.plan.kl, Kl::K1);
        assert_eq!(train("scale_rewards: none").loss.advantage, AdvantageKind::GroupCenter);
        assert_eq!(train("scale_rewards: batch").loss.advantage, AdvantageKind::Batch);
        assert_eq!(train("advantage: group_std_clamped").loss.advantage, AdvantageKind::GroupStdClamped);
    }

    #[test]
    fn every_choice_of_a_recipe_has_a_name() {
        for recipe in RECIPES {
            assert!(name_of(recipe.advantage).is_some(), "{}", recipe.name);
            assert!(name_of(recipe.loss.kl).is_some(), "{}", recipe.name);
            assert!(name_of(recipe.loss.aggregation).is_some(), "{}", recipe.name);
            assert!(name_of(recipe.loss.ratio).is_some(), "{}", recipe.name);
            train(&format!("loss_type: {}", recipe.name));
        }
    }

    #[test]
    fn a_loss_out_of_range_names_its_setting() {
        let error = resolved(Verb::Train, "epsilon: 1.5").unwrap_err().to_string();
        assert!(error.contains("`epsilon`") && error.contains("1.5"), "{error}");
        let error = resolved(Verb::Train, "epsilon_high: 0.3\ndelta: 1.2").unwrap_err().to_string();
        assert!(error.contains("`delta`"), "{error}");
        let error =
            resolved(Verb::Train, "scale_rewards: none\nadvantage: group_std").unwrap_err().to_string();
        assert!(error.contains("`scale_rewards` and `advantage`"), "{error}");
    }

    #[test]
    fn unset_settings_follow_the_ones_they_name() {
        let s = train("learning_rate: 1e-5\nseed: 7\nlogging_steps: 5\ntemperature: 0.7");
        assert_eq!((s.optim.mm_projector_lr, s.optim.vision_tower_lr), (1e-5, 1e-5));
        assert_eq!((s.run.data_seed, s.log.grpo_logging_steps), (7, 5));
        assert_eq!(s.rollout.logprob_temperature, 0.7);
        assert_eq!(s.rewards.reward_weights, [1.0, 1.0]);
        assert_eq!(s.run.max_steps, None);
        assert_eq!(train("max_steps: 0").run.max_steps, Some(0));
        let s = resolved(Verb::Eval, "").unwrap().settings;
        assert_eq!((s.rollout.num_generations, s.rollout.temperature), (1, 0.0));
        assert_eq!(s.rollout.logprob_temperature, 1.0);
        assert_eq!(resolved(Verb::Sft, "").unwrap().settings.optim.learning_rate, 2e-5);
        assert_eq!(train("").eval.eval_strategy, EvalStrategy::No);
        assert_eq!(train("val_split_ratio: 10%").eval.eval_strategy, EvalStrategy::Epoch);
        assert_eq!(train("val_split_ratio: 0.1\neval_steps: 5").eval.eval_strategy, EvalStrategy::Steps);
    }

    #[test]
    fn directories_follow_the_name_of_an_experiment() {
        let run = train("exp_name: first-try").run;
        assert_eq!(run.output_dir, Some(PathBuf::from("checkpoints/rl/first-try")));
        for bad in ["a/b", "..", ".x", "a\\b", "\"\""] {
            assert!(resolved(Verb::Train, &format!("exp_name: {bad}")).is_err(), "{bad}");
        }
        assert!(resolved(Verb::Train, "exp_name: a\noutput_dir: b").is_err());
        let demo = resolved(Verb::Demo, "").unwrap().settings.run;
        assert_eq!(demo.output_dir, Some(PathBuf::from("runs/demo")));
    }

    #[test]
    fn vlm_r1s_switch_trains_the_towers() {
        let towers = |yaml: &str| {
            let optim = train(yaml).optim;
            (optim.tune_mm_vision, optim.freeze_vision_modules)
        };
        assert_eq!(towers(""), (false, false));
        assert_eq!(towers("freeze_vision_modules: true"), (false, true));
        assert_eq!(towers("freeze_vision_modules: false"), (true, false));
        assert_eq!(towers("freeze_vision_modules: false\nuse_peft: true"), (false, false));
        assert_eq!(towers("preset: vivqa-x"), (false, true));
        assert_eq!(towers("preset: vivqa-x\nfreeze_vision_modules: false"), (true, false));
        assert_eq!(towers("preset: vivqa-x\ntune_mm_vision: true"), (true, false));
        assert_eq!(towers("preset: vivqa-x\ntune_mm_vision: false"), (false, true));
        assert_eq!(towers("preset: qwen-mcq\nfreeze_vision_modules: false"), (true, false));
        assert_eq!(towers("preset: r1-v"), (true, false));
        assert!(resolved(Verb::Train, "freeze_vision_modules: true\ntune_mm_vision: true").is_err());
    }

    #[test]
    fn weights_go_with_their_rewards() {
        let weights = |yaml: &str| train(yaml).rewards.reward_weights;
        assert_eq!(weights("format_reward_weight: 0.3\naccuracy_reward_weight: 0.7"), [0.7, 0.3]);
        assert_eq!(weights("accuracy_reward_weight: 2"), [2.0, 1.0]);
        assert_eq!(weights("preset: qwen-mcq\nformat_reward_weight: 1"), [0.7, 1.0]);
        assert_eq!(weights("preset: qwen-mcq\nreward_funcs: format"), [0.3]);
        assert_eq!(weights("preset: qwen-mcq\nreward_funcs: random format accuracy"), [1.0, 0.3, 0.7]);
        let third = 1.0 / 3.0;
        assert_eq!(weights("preset: vivqa-x\nreward_funcs: accuracy format"), [third, third]);
        assert_eq!(
            weights("preset: vivqa-x\nreward_funcs: [accuracy, format, explanation, mine=cmd:x]"),
            [third, third, 1.0, 1.0]
        );
        // A list given over the preset counts as it stands.
        assert_eq!(weights("preset: vivqa-x\nreward_funcs: format\nreward_weights: 5"), [5.0]);
        for wrong in [
            "reward_weights: 1 2\nformat_reward_weight: 3",
            "reward_funcs: accuracy\nformat_reward_weight: 3",
            "preset: qwen-mcq\nreward_weights: 1",
        ] {
            assert!(resolved(Verb::Train, wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_stronger_source_wins_over_another_name_for_the_same() {
        let run = |yaml: &str| train(yaml).run;
        assert_eq!(run("preset: vivqa-x").max_steps, Some(500));
        assert_eq!(run("preset: vivqa-x\nnum_train_epochs: 2").max_steps, None);
        assert_eq!(run("preset: vivqa-x\nnum_train_epochs: 1\nmax_steps: 7").max_steps, Some(7));
        assert_eq!(run("preset: humanomni\nmax_steps: -1").num_train_epochs, 2.0);
        let loss = |yaml: &str| train(yaml).loss.advantage;
        assert_eq!(loss("preset: qwen-mcq\nscale_rewards: none"), AdvantageKind::GroupCenter);
        assert_eq!(train("preset: qwen-mcq\nwarmup_steps: 3").optim.warmup_ratio, 0.0);
        assert_eq!(train("preset: r1-v\nfps: 1").media.nframes, None);
    }

    #[test]
    fn other_commands_take_of_a_preset_what_is_not_training() {
        for verb in [Verb::Eval, Verb::Generate] {
            let s = resolved(verb, "preset: qwen-mcq").unwrap().settings;
            let plain = resolved(verb, "").unwrap().settings;
            assert_eq!(s.rollout.num_generations, 1);
            assert_eq!(s.rollout.temperature, plain.rollout.temperature);
            assert_eq!(s.rollout.logprob_temperature, 1.0);
            assert_eq!((s.rollout.max_completion_length, s.media.video_max_frames), (512, 8));
            assert_eq!(s.media.max_pixels, Some(451_584));
        }
        let s = resolved(Verb::Eval, "preset: r1-v").unwrap().settings;
        assert_eq!(s.prompt.question_template.name, "r1-v");
        let sft = resolved(Verb::Sft, "preset: humanomni").unwrap().settings;
        assert_eq!((sft.optim.learning_rate, sft.run.num_train_epochs), (2e-5, 5.0));
        assert_eq!(sft.optim.lr_scheduler_type, LrScheduler::Cosine);
        assert_eq!(sft.prompt.question_template.name, "none");
        let sft = resolved(Verb::Sft, "preset: qwen-video").unwrap().settings;
        assert_eq!((sft.optim.learning_rate, sft.run.num_train_epochs), (2e-5, 1.0));
        assert_eq!((sft.optim.weight_decay, sft.media.max_pixels), (0.0, Some(451_584)));
    }

    #[test]
    fn the_name_of_an_experiment_may_come_from_the_environment() {
        let env = |name: &str| Environment::read(|var| (var == "EXP_NAME").then(|| name.to_owned()));
        let run = |verb, yaml: &str, name: &str| {
            let given = config::parse(yaml, "test", |_| Origin::Flag);
            cli::resolve(verb, given, env(name)).map(|resolved| resolved.settings.run.output_dir)
        };
        assert_eq!(run(Verb::Train, "", "vi").unwrap(), Some("checkpoints/rl/vi".into()));
        assert_eq!(run(Verb::Train, "exp_name: mine", "vi").unwrap(), Some("checkpoints/rl/mine".into()));
        assert_eq!(run(Verb::Sft, "output_dir: out", "vi").unwrap(), Some("out".into()));
        assert_eq!(run(Verb::Export, "merge: true\nadapter_path: a", "vi").unwrap(), None);
        assert!(run(Verb::Train, "", "a/b").is_err());
    }

    #[test]
    fn resuming_is_never_a_folder_called_false() {
        for (text, resume) in [
            ("auto", Resume::Auto),
            ("True", Resume::Auto),
            ("must", Resume::Must),
            ("false", Resume::Never),
            ("never", Resume::Never),
            ("runs/a/checkpoint-3", Resume::From("runs/a/checkpoint-3".into())),
        ] {
            assert_eq!(train(&format!("resume_from_checkpoint: {text}")).run.resume_from_checkpoint, resume);
        }
    }

    #[test]
    fn rewards_get_their_settings() {
        let s = train(
            "format_mode: graded\naccuracy_mode: mcq_iou\nreward_timeout_secs: 1.5\nreward_workers: 3\nreward_weights: [2, 1]",
        );
        let options = s.rewards.options(100);
        assert_eq!((options.format_mode, options.accuracy_mode), (FormatMode::Graded, AccuracyMode::McqIou));
        assert_eq!((options.max_completion_tokens, options.overlong_cache_tokens), (100, 20));
        assert_eq!(options.external.timeout, Duration::from_millis(1500));
        assert_eq!((options.external.pool_size, options.weights), (3, vec![2.0, 1.0]));
        // The defaults here and there are the same.
        let plain = train("").rewards.options(256);
        let there = RewardOptions::default();
        assert_eq!(plain.external.timeout, there.external.timeout);
        assert_eq!(plain.external.pool_size, there.external.pool_size);
        assert_eq!(plain.overlong_cache_tokens, there.overlong_cache_tokens);
        assert_eq!((plain.format_mode, plain.accuracy_mode), (there.format_mode, there.accuracy_mode));
        assert_eq!(plain.answer_policy, there.answer_policy);
    }

    #[test]
    fn the_hub_is_where_its_python_library_has_it() {
        let read = |variables: &[(&str, &str)]| {
            let found =
                |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
            Environment::read(found)
        };
        let plain = read(&[("HOME", "/h"), ("HF_TOKEN", ""), ("HF_ENDPOINT", "")]);
        assert_eq!(plain.hub.cache, PathBuf::from("/h/.cache/huggingface/hub"));
        assert_eq!(plain.hub.token_file, PathBuf::from("/h/.cache/huggingface/token"));
        assert_eq!((plain.hub.endpoint.as_str(), &plain.hub.token), ("https://huggingface.co", &None));
        assert_eq!((plain.cache_dir, plain.hub.offline), (PathBuf::from("/h/.cache/omnigrpo"), false));
        let home = [("HOME", "/h"), ("XDG_CACHE_HOME", "/c"), ("HF_HOME", "/f"), ("HF_HUB_OFFLINE", "1")];
        let moved = read(&home);
        assert_eq!((moved.hub.cache, moved.hub.offline), (PathBuf::from("/f/hub"), true));
        assert_eq!(moved.cache_dir, PathBuf::from("/c/omnigrpo"));
        let named = read(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/k"), ("HF_TOKEN", "secret\n")]);
        assert_eq!(
            (named.hub.cache.as_path(), named.hub.token.as_deref()),
            (Path::new("/k"), Some("secret"))
        );
        assert!(!format!("{named:?}").contains("secret"));
    }

    #[test]
    fn lists_and_objects_are_read_from_files() {
        let s =
            train("reward_funcs: accuracy random\nreward_weights: 1, 0.5\nchat_template_kwargs: {a: [1, x]}");
        assert_eq!(s.rewards.reward_funcs, ["accuracy", "random"]);
        assert_eq!(s.rewards.reward_weights, [1.0, 0.5]);
        assert_eq!(Json::Object(s.prompt.chat_template_kwargs), serde_json::json!({"a": [1, "x"]}));
        let s = train("train_file: [\"a,b.json\", c.json]\ncompat: [s2_accuracy, s4-format]");
        assert_eq!(s.data.train_file, [PathBuf::from("a,b.json"), PathBuf::from("c.json")]);
        assert_eq!(s.rewards.compat, [Compat::S2Accuracy, Compat::S4Format]);
    }
}
