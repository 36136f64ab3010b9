//! Names of metrics that programs read, in `metrics.jsonl` and in memory. TRL has the same names, where it has the metric.

/// Loss of an update.
pub const LOSS: &str = "loss";
/// KL divergence from the reference, in nats.
pub const KL: &str = "kl";
/// Mean divergence from the teacher over its most probable tokens, per token, in nats.
pub const TEACHER_DIVERGENCE: &str = "teacher_divergence";
/// Mean entropy per token, in nats.
pub const ENTROPY: &str = "entropy";
/// Share of tokens or completions whose ratio is clipped.
pub const CLIP_RATIO: &str = "clip_ratio/region_mean";
/// Mean length of completions, in tokens.
pub const MEAN_LENGTH: &str = "completions/mean_length";
/// Share of completions that reached the length limit.
pub const CLIPPED: &str = "completions/clipped_ratio";
/// Number of completions.
pub const COUNT: &str = "completions/count";
/// Mean reward.
pub const REWARD: &str = "reward";
/// Standard deviation of the rewards.
pub const REWARD_STD: &str = "reward_std";
/// Smallest reward of a completion.
pub const REWARD_MIN: &str = "reward/min";
/// Largest reward of a completion.
pub const REWARD_MAX: &str = "reward/max";
/// Correlation of the length and the reward of completions within their groups.
pub const LENGTH_CORRELATION: &str = "reward/length_correlation";
/// Share of groups whose completions all have the same reward.
pub const ZERO_STD: &str = "frac_reward_zero_std";
/// Norm of the gradient before clipping.
pub const GRAD_NORM: &str = "grad_norm";
/// Tokens that went through the model.
pub const NUM_TOKENS: &str = "num_tokens";
/// Learning rate of the update.
pub const LEARNING_RATE: &str = "learning_rate";
/// Time of the step, in seconds.
pub const STEP_TIME: &str = "step_time";
