//! Names of values, both for types of the libraries and for the program's own types.

use omnigrpo_data::{Curriculum, QUESTION_TEMPLATES, QuestionTemplate};
use omnigrpo_grpo::{AdvantageKind, Aggregation, CorrectionKind, Kl, RECIPES, RatioLevel, Recipe, recipe};
use omnigrpo_models::{FrameRule, GgufPrecision, MissingAudio, Orientation, WeightDtype};
use omnigrpo_rewards::{AccuracyMode, AnswerPolicy, Compat, FormatMode};
use omnigrpo_train::{GradDtype, GradientSum, Offload, Optim, ScheduleKind, Shard};

use crate::Backend;
use crate::run::Workload;

/// A type whose values have names on the command line.
pub trait Named: Copy + PartialEq + 'static {
    /// Returns name, value and one line of help for each value, in the order of the help.
    fn table() -> Vec<(&'static str, Self, &'static str)>;
}

/// Returns the name and help of every value of a type, for the flag table.
pub fn words<T: Named>() -> Vec<(&'static str, &'static str)> {
    T::table().into_iter().map(|(name, _, help)| (name, help)).collect()
}

/// Returns the name of a value.
pub fn name_of<T: Named>(value: T) -> Option<&'static str> {
    T::table().into_iter().find(|row| row.1 == value).map(|row| row.0)
}

/// Returns the value with this name.
pub fn named<T: Named>(name: &str) -> Option<T> {
    T::table().into_iter().find(|row| row.0 == name).map(|row| row.1)
}

/// Declares an enum. The first doc line of a variant is its help, and the first variant is the default.
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

        impl Default for $name {
            fn default() -> Self {
                Self::table()[0].1
            }
        }
    };
}

choice!(
    /// Media that may be fetched.
    AllowUrls:
    /// No media.
    Off = "off",
    /// Media of hosts on the public network.
    Public = "public",
    /// Media of this machine and its network as well.
    All = "all",
);
choice!(
    /// Files of a model.
    ExportFormat:
    /// A checkpoint directory, for transformers, vLLM and TRL.
    Safetensors = "safetensors",
    /// The file `model.gguf`, for llama.cpp: text models only.
    Gguf = "gguf",
);
choice!(
    /// Unit of a batch size.
    BatchUnit:
    /// Prompts, each with all of its completions (TRL before 0.16, R1-V, R1-Omni).
    Prompts = "prompts",
    /// Completions (TRL since 0.16, VLM-R1): a step has their number over `num_generations` prompts.
    Completions = "completions",
);
choice!(
    /// Times at which a model is pushed to the hub.
    HubStrategy:
    /// After training.
    End = "end",
    /// Also after each checkpoint, during training; a checkpoint is left out if the one before is still being sent.
    EverySave = "every_save",
);
choice!(
    /// Destinations of metrics.
    Tracker:
    /// Only the run directory.
    None = "none",
    /// The file `metrics.jsonl` of the run directory.
    Jsonl = "jsonl",
    /// Event files in `tensorboard/` of the run directory.
    Tensorboard = "tensorboard",
    /// Weights & Biases, through the package `wandb` of `reward_python`.
    Wandb = "wandb",
    /// Trackio, through the package `trackio` of `reward_python`.
    Trackio = "trackio",
    /// `http://127.0.0.1:PORT/metrics`, for Prometheus.
    Prometheus = "prometheus",
    /// All of them.
    All = "all",
);
choice!(
    /// Form of activations in products with 8-bit or 4-bit weights.
    QuantizedActivations:
    /// The fastest form: bytes if the CPU multiplies them (two for each activation beside 8-bit weights, one beside 4-bit weights), else float32. Many rows take bfloat16 on tiles, and on CPUs that multiply bfloat16 but no bytes.
    Auto = "auto",
    /// Unchanged everywhere: decoding and training then differ only by the order of sums.
    Float32 = "float32",
);
choice!(
    /// Ways of multiplying with bfloat16 weights.
    Bf16Products:
    /// On tiles if the CPU has them, else the faster way on this CPU model.
    Auto = "auto",
    /// Weights are widened to float32; nothing is rounded.
    Widened = "widened",
    /// With vectors that multiply pairs (AVX512-BF16); activations are rounded.
    Dot = "dot",
    /// With matrix tiles; activations are rounded.
    Amx = "amx",
);
/// Implements `Named` for a type of another crate, with a table given here.
macro_rules! listed {
    ($name:ty: $($text:literal = $value:expr, $help:literal);+ $(;)?) => {
        impl Named for $name {
            fn table() -> Vec<(&'static str, Self, &'static str)> {
                vec![$(($text, $value, $help)),+]
            }
        }
    };
}

listed!(WeightDtype:
    "auto" = WeightDtype::Auto, "Precision of the checkpoint.";
    "float32" = WeightDtype::Float32, "32 bits.";
    "bfloat16" = WeightDtype::BFloat16, "16 bits with the exponent of float32.";
);
listed!(FrameRule:
    "qwen_vl_utils" = FrameRule::Qwen, "By rate, like the package qwen-vl-utils.";
    "base_interval" = FrameRule::BaseInterval, "By interval, like qwen-vl-finetune.";
    "meta" = FrameRule::Segments, "Per segment, from the row's `meta`.";
    "processor" = FrameRule::Processor, "By rate, like the video processor of Qwen3-VL, which limits all frames together.";
);
listed!(Orientation:
    "upright" = Orientation::Upright, "Turned as the file's orientation tag or display matrix says, as `transformers` and `datasets` do.";
    "stored" = Orientation::Stored, "As they are stored in the file.";
);
listed!(GgufPrecision:
    "f16" = GgufPrecision::F16, "Half precision.";
    "q8_0" = GgufPrecision::Q8_0, "8 bits, 32 values with a scale.";
);
listed!(MissingAudio:
    "error" = MissingAudio::Error, "A bad row.";
    "silence" = MissingAudio::Silence, "Silence.";
);
listed!(ScheduleKind:
    "constant" = ScheduleKind::Constant, "Constant from the first step.";
    "constant_with_warmup" = ScheduleKind::ConstantWithWarmup, "Constant after the warm-up.";
    "linear" = ScheduleKind::Linear, "Linear decrease to 0.";
    "cosine" = ScheduleKind::Cosine, "Half a cosine down to 0.";
);
listed!(GradientSum:
    "ordered" = GradientSum::Ordered, "In a fixed order: the bits do not depend on the number of ranks.";
    "engine" = GradientSum::Engine, "In the order of MPI or NCCL: faster; a sum differs by up to ranks × 6e-8 of the sum of its absolute terms.";
);
listed!(Backend:
    "auto" = Backend::Auto, "NCCL between GPUs, MPI between CPUs.";
    "nccl" = Backend::Nccl, "NCCL, from GPU to GPU.";
    "mpi" = Backend::Mpi, "MPI; gradients of GPUs go through main memory.";
    "gloo" = Backend::Mpi, "As `mpi`.";
);
listed!(Offload:
    "none" = Offload::None, "The device of the model.";
    "cpu" = Offload::Cpu, "Main memory. `true` means the same.";
    "file" = Offload::File, "Files on a disk (`nvme_path`), which are mapped into memory.";
);
listed!(Optim:
    "adamw" = Optim::AdamW, "AdamW with moments in float32: 8 bytes a weight.";
    "adamw_8bit" = Optim::AdamW8bit, "AdamW with moments in 8 bits, in blocks of 256: 2 bytes a weight.";
);
listed!(GradDtype:
    "float32" = GradDtype::Float32, "4 bytes a weight.";
    "bfloat16" = GradDtype::Bfloat16, "2 bytes a weight. Each stream of tokens is added in float32, and the sum is rounded.";
);
listed!(Workload:
    "own" = Workload::Own, "Equal prompts and completions of the sizes that are given.";
    "easyr1-3b" = Workload::EasyR1, "A step that EasyR1 publishes: Qwen2.5-VL-3B, 512 questions with a picture, 5 completions each; one update.";
);
listed!(Shard:
    "none" = Shard::None, "Every process has the complete state.";
    "optimizer" = Shard::Optimizer, "Each process has a part of the moments and masters (ZeRO stage 1).";
    "gradients" = Shard::Gradients, "Gradients, too (ZeRO stage 2).";
    "weights" = Shard::Weights, "The decoder's large weights, too, whether trained or not (ZeRO stage 3).";
);
listed!(Curriculum:
    "off" = Curriculum::None, "in random order";
    "easy_first" = Curriculum::EasyFirst, "rows that earned most first";
    "hard_first" = Curriculum::HardFirst, "rows that earned least first";
);
listed!(AdvantageKind:
    "group_std" = AdvantageKind::GroupStd, "centred, divided by the sample deviation of the group";
    "batch_std" = AdvantageKind::Batch, "centred per group, divided by the sample deviation of the batch";
    "group_center" = AdvantageKind::GroupCenter, "centred per group";
    "group_std_clamped" = AdvantageKind::GroupStdClamped, "centred, divided by the population deviation, at least 0.01";
    "rloo" = AdvantageKind::LeaveOneOut, "without the mean of the group's other rewards";
    "reinforce_plus_plus" = AdvantageKind::Whitened, "centred and divided over all tokens of the batch";
    "reinforce_plus_plus_baseline" = AdvantageKind::GroupCenterWhitened, "centred per group, then as `reinforce_plus_plus`";
    "grpo_passk" = AdvantageKind::PassAtK, "the lead of the group's best over its second, divided by the group's deviation";
    "maxrl" = AdvantageKind::MaxRl, "centred, divided by the mean of the group; for rewards of at least 0 (a group without a mean above 0 teaches nothing)";
    "rloo_vectorized" = AdvantageKind::LeaveOneOut, "as `rloo`";
    "reinforce++" = AdvantageKind::Whitened, "as `reinforce_plus_plus`";
    "max_rl" = AdvantageKind::MaxRl, "as `maxrl`";
);
listed!(Kl:
    "k3" = Kl::K3, "per token, never negative";
    "k1_seq" = Kl::K1, "signed difference of complete completions";
);
listed!(Aggregation:
    "seq_mean" = Aggregation::SequenceMean, "mean over completions of their token means";
    "token_mean" = Aggregation::TokenMeanGlobal, "mean over all tokens of the step";
    "token_mean_local" = Aggregation::TokenMeanLocal, "mean over the tokens of each batch";
    "constant_length" = Aggregation::ConstantLength, "sum, divided by completions times the length limit";
    "token_sum" = Aggregation::TokenSum, "sum over tokens, mean over completions";
);
listed!(CorrectionKind:
    "off" = CorrectionKind::Off, "none";
    "token_truncate" = CorrectionKind::TokenTruncate, "a weight for each token, limited to the bounds (TIS)";
    "token_mask" = CorrectionKind::TokenMask, "a weight for each token, 0 beyond the bounds (MIS)";
    "sequence_truncate" = CorrectionKind::SequenceTruncate, "a weight for each completion, limited to the bounds";
    "sequence_mask" = CorrectionKind::SequenceMask, "a weight for each completion, 0 beyond the bounds";
);
listed!(RatioLevel:
    "token" = RatioLevel::Token, "a ratio per token";
    "sequence" = RatioLevel::Sequence, "a ratio per completion: the geometric mean of its tokens";
    "sequence_product" = RatioLevel::Product, "a ratio per completion: the product of its tokens";
);

/// Implements `Named` for a type of another crate that has its own table there.
macro_rules! listed_there {
    ($($name:ty),+) => { $(
        impl Named for $name {
            fn table() -> Vec<(&'static str, Self, &'static str)> {
                <$name>::ALL.to_vec()
            }
        }
    )+ };
}
listed_there!(FormatMode, AccuracyMode, AnswerPolicy, Compat);

/// Names of recipes in other programs, with their help.
const ALIASES: &[(&str, &str)] = &[
    ("gspo_token", "as `gspo`"),
    ("geo_mean", "as `gmpo`"),
    ("reinforce++", "as `reinforce_plus_plus`"),
    ("reinforce++_baseline", "as `reinforce_plus_plus_baseline`"),
    ("dppo", "as `dppo_tv`"),
];

impl Named for &'static Recipe {
    fn table() -> Vec<(&'static str, Self, &'static str)> {
        let own = RECIPES.iter().map(|recipe| (recipe.name, recipe, recipe.summary));
        own.chain(ALIASES.iter().filter_map(|(alias, help)| Some((*alias, recipe(alias)?, *help)))).collect()
    }
}

impl Named for &'static QuestionTemplate {
    fn table() -> Vec<(&'static str, Self, &'static str)> {
        QUESTION_TEMPLATES.iter().map(|template| (template.name, template, template.doc)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alias_is_a_value_and_names_its_recipe() {
        let listed: Vec<&str> = ALIASES.iter().map(|(alias, _)| *alias).collect();
        let known: Vec<&str> = RECIPES.iter().flat_map(|recipe| recipe.aliases).copied().collect();
        assert_eq!(listed, known);
        for (alias, help) in ALIASES {
            let recipe = named::<&'static Recipe>(alias).unwrap();
            assert_eq!(*help, format!("as `{}`", recipe.name));
            assert_eq!(name_of(recipe), Some(recipe.name));
        }
    }

    #[test]
    fn every_choice_of_a_recipe_has_a_name() {
        for recipe in RECIPES {
            assert!(name_of(recipe.advantage).is_some(), "{}", recipe.name);
            assert!(name_of(recipe.loss.kl).is_some(), "{}", recipe.name);
            assert!(name_of(recipe.loss.aggregation).is_some(), "{}", recipe.name);
            assert!(name_of(recipe.loss.ratio).is_some(), "{}", recipe.name);
        }
    }
}
