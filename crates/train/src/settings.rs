//! Settings that messages name.

use omnigrpo_data::{ColumnNames, ReadOptions};
use omnigrpo_guard::Setting;
use omnigrpo_models::{LoadOptions, LoraConfig, PromptSettings};

use crate::{AdamWConfig, ResumeFrom, RunPlan, Selection, SkipPolicy, TrainSetup};

omnigrpo_guard::settings! {
    LEARNING_RATE = AdamWConfig.learning_rate;
    MAX_GRAD_NORM = AdamWConfig.max_grad_norm;
    SOLUTION = ColumnNames.solution;
    DTYPE = LoadOptions.dtype;
    QUANTIZATION = LoadOptions.quantization;
    LORA_TARGETS = LoraConfig.targets;
    MAX_COMPLETION_LENGTH = PromptSettings.max_completion_length;
    TEMPLATE = ReadOptions.template;
    NEWEST = ResumeFrom::Newest;
    START = ResumeFrom::Start;
    ALLOW_CHANGED = RunPlan.allow_changed;
    BEST_METRIC = RunPlan.best_metric;
    MAX_STEPS = RunPlan.max_steps;
    RESUME = RunPlan.resume;
    SAVE_ONLY_MODEL = RunPlan.save_only_model;
    GATE = Selection.gate;
    LLM = Selection.llm;
    PATTERNS = Selection.patterns;
    PROJECTOR = Selection.projector;
    TOWERS = Selection.towers;
    MAX_SHARE = SkipPolicy.max_share;
    STRICT = SkipPolicy.strict;
    EVAL = TrainSetup.eval;
    LOCK = TrainSetup.lock;
    REWARDS = TrainSetup.rewards;
    SHUFFLED = TrainSetup.shuffled;
}

/// Device of the weights. Programs do not choose it where a message names it.
pub(crate) const DEVICE: Setting = Setting { plan: "LoadOptions", field: "device" };
/// Weights that stay in mapped files. Programs do not choose them.
pub(crate) const IN_PLACE: Setting = Setting { plan: "LoadOptions", field: "in_place" };
