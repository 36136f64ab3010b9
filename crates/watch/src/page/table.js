// The charts of the page. The program reads this list for the files that `omnigrpo report` writes, so it is JSON.
//
// A line is a metric and its label. `band` names the metrics of its lower and upper edge, and `spread` a distance to both sides.
// `{}` stands for any part of a name. A title with `{}` is a chart of its own for each such part.
export const CHARTS = [
  { "title": "Reward", "lines": [["reward", "reward"]], "spread": "reward_std", "help": "Mean of the weighted sum of all rewards, and its standard deviation" },
  { "title": "Reward: {}", "lines": [["rewards/{}/mean", "{}"]], "spread": "rewards/{}/std", "help": "Mean and standard deviation" },
  { "title": "Groups without variance", "lines": [["frac_reward_zero_std", "share"]], "zero": true, "help": "Share of prompts whose completions all got the same reward: nothing is learned from them" },
  { "title": "KL", "lines": [["kl", "kl"]], "help": "Distance from the reference, in nats" },
  { "title": "Entropy", "lines": [["entropy", "entropy"]], "help": "Mean entropy at completion tokens, in nats" },
  { "title": "Loss", "lines": [["loss", "loss"]], "help": "Objective of the training; near 0 for GRPO, whatever the model learns" },
  { "title": "Gradient norm", "lines": [["grad_norm", "norm"]], "help": "Norm of all gradients before clipping" },
  { "title": "Clip ratio", "lines": [["clip_ratio/region_mean", "all"], ["clip_ratio/low_mean", "low"], ["clip_ratio/high_mean", "high"]], "zero": true, "help": "Share of tokens whose ratio is clipped" },
  { "title": "Completion length", "lines": [["completions/mean_length", "mean"]], "band": ["completions/min_length", "completions/max_length"], "help": "Tokens: mean, minimum and maximum" },
  { "title": "Cut off", "lines": [["completions/clipped_ratio", "share"]], "zero": true, "help": "Share of completions that hit the length limit" },
  { "title": "Calls of tools", "lines": [["tools/call_frequency", "calls per completion"], ["tools/failure_frequency", "share that failed"]], "zero": true, "help": "Calls per completion, and the share of the calls that failed" },
  { "title": "Turns", "lines": [["turns/mean", "mean"], ["turns/max", "maximum"]], "help": "Turns of the model in a completion: mean and maximum" },
  { "title": "Rollout and training", "lines": [["sampling/sampling_logp_difference/mean", "mean"], ["sampling/sampling_logp_difference/max", "max"]], "help": "Difference of log-probabilities between rollout and training per token, in nats" },
  { "title": "Step time by phase", "stacked": true, "lines": [["time/{}", "{}"]], "help": "Seconds of a step" },
  { "title": "Tokens per second", "lines": [["derived/tokens_per_second", "tokens/s"]], "zero": true, "help": "Tokens processed in training, divided by the time of the step" },
  { "title": "Memory", "stacked": true, "lines": [["memory/media_store_mb", "media kept"], ["derived/memory_rest_mb", "rest of the peak"]], "help": "In MB: decoded media kept for later passes, and the rest of the peak memory of the process" },
  { "title": "Processor and card", "lines": [["machine/cpu_percent", "processor"], ["machine/gpu_percent", "card"]], "zero": true, "help": "Percent of the time of a step in which the cores of the machine, and the card, were busy" },
  { "title": "Memory of machine and card", "lines": [["machine/memory_mb", "machine"], ["machine/gpu_memory_mb", "card"]], "zero": true, "help": "In MB: memory in use by all processes" },
  { "title": "Learning rate", "lines": [["learning_rate", "rate"]], "help": "Learning rate of the step" },
  { "title": "Evaluation", "evals": true, "lines": [["eval_accuracy", "accuracy"], ["eval_reward", "reward"]], "help": "Share of correct answers and mean reward on held-out rows" }
];
