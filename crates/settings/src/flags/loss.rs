//! The GRPO objective.

use super::*;
use crate::Settings;
use crate::names::words;
use crate::values::Field as _;
use Kind::{Bool, Choice, Text};
use omnigrpo_grpo::{
    AdvantageKind, Aggregation, CorrectionKind, Covariance, Divergence, Kl, RatioLevel, Recipe, Surrogate,
};
use omnigrpo_guard::names::shown;
use omnigrpo_models::{ContextTemplate, PrivilegedContext};
use omnigrpo_train::SyncReference;

/// Returns the choices of the deviation by which centred rewards are divided.
fn deviations() -> Vec<(&'static str, &'static str)> {
    vec![("group", "Deviation of the group."), ("batch", "Deviation of the batch."), ("none", "No division.")]
}

fn no_clip(s: &Settings) -> Option<&'static str> {
    match s.algorithm.loss.surrogate {
        Surrogate::Clip { .. }
        | Surrogate::Cispo { .. }
        | Surrogate::GeometricMean { .. }
        | Surrogate::Dppo { .. } => None,
        Surrogate::Vespo { .. } => Some("the recipe of `loss_type` has a smooth weight and no clip"),
        Surrogate::Ratio => Some("the recipe of `loss_type` does not clip the ratio"),
        Surrogate::Sapo { .. } => Some("the recipe of `loss_type` has a smooth gate and no clip"),
        Surrogate::LogProb => Some("the recipe of `loss_type` has no ratio and no clip"),
        Surrogate::Custom(_) => Some("the loss is a custom function"),
    }
}

fn no_lower_clip(s: &Settings) -> Option<&'static str> {
    let capped = matches!(s.algorithm.loss.surrogate, Surrogate::Cispo { .. });
    no_clip(s).or_else(|| capped.then_some("the recipe of `loss_type` caps the ratio from above only"))
}

fn no_gate(s: &Settings) -> Option<&'static str> {
    (!matches!(s.algorithm.loss.surrogate, Surrogate::Sapo { .. })).then_some("`loss_type` is not sapo")
}

fn no_weight(s: &Settings) -> Option<&'static str> {
    (!matches!(s.algorithm.loss.surrogate, Surrogate::Vespo { .. })).then_some("`loss_type` is not vespo")
}

fn no_clip_cov(s: &Settings) -> Option<&'static str> {
    (!matches!(s.algorithm.loss.covariance, Covariance::Clip { .. })).then_some("`loss_type` is not clip_cov")
}

fn no_kl_cov(s: &Settings) -> Option<&'static str> {
    (!matches!(s.algorithm.loss.covariance, Covariance::Kl { .. })).then_some("`loss_type` is not kl_cov")
}

fn no_bound(s: &Settings) -> Option<&'static str> {
    let mean = matches!(s.algorithm.loss.surrogate, Surrogate::GeometricMean { .. });
    no_lower_clip(s).or_else(|| mean.then_some("the recipe of `loss_type` bounds every token"))
}

fn no_other_model(s: &Settings) -> Option<&'static str> {
    (s.model.teacher.is_none() && s.model.reference.is_none())
        .then_some("neither a teacher nor a reference with files of its own is given")
}

fn no_teacher(s: &Settings) -> Option<&'static str> {
    (s.model.teacher.is_none() && s.prompts.privileged_context.is_none()).then_some("there is no teacher")
}

/// Makes the loss that of a teacher alone, which later settings may change.
fn teach(s: &mut Settings) {
    (s.algorithm.loss.distillation, s.algorithm.loss.beta) = (1.0, 0.0);
}

/// Returns the choices of the divergence from a teacher.
fn divergences() -> Vec<(&'static str, &'static str)> {
    vec![
        (
            "reverse_kl",
            "KL divergence from the policy to the teacher: of the sampled token, as its advantage, or of `teacher_top_k` tokens.",
        ),
        (
            "forward_kl",
            "KL divergence from the teacher to the policy, over the teacher's most probable tokens.",
        ),
        ("jsd", "Generalised Jensen-Shannon divergence over the teacher's most probable tokens (GKD)."),
    ]
}

fn no_kl(s: &Settings) -> Option<&'static str> {
    (s.algorithm.loss.beta == 0.0).then_some("`beta` is 0, so there is no KL term")
}

fn each_reward_alone(s: &Settings) -> Option<&'static str> {
    (s.algorithm.normalize_then_sum)
        .then_some("`multi_objective_aggregation normalize_then_sum` normalises each reward separately")
}

fn still(s: &Settings) -> Option<&'static str> {
    s.run.sync_reference.is_none().then_some("`sync_ref_model` is false")
}

fn uncorrected(s: &Settings) -> Option<&'static str> {
    (!s.algorithm.loss.correction.is_on()).then_some("`importance_sampling_correction` is off")
}

/// Returns the place of a number of one surrogate or one covariance.
macro_rules! part_of {
    ($choice:ident: $kind:ident::$variant:ident $field:ident $([$at:literal])?) => {
        Place {
            field: "",
            set: |s, v| {
                if let $kind::$variant { $field, .. } = &mut s.algorithm.loss.$choice {
                    let part: &mut f64 = &mut (*$field)$([$at])?;
                    *part = take(v)?;
                }
                Ok(())
            },
            get: |s| match s.algorithm.loss.$choice {
                $kind::$variant { $field, .. } => $field$([$at])?.value(),
                _ => None,
            },
        }
    };
}

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row(
        "loss_type",
        Choice(words::<&'static Recipe>),
        Place { field: "recipe",
            set: |s, v| {
                s.recipe = take(v)?;
                s.algorithm.follow(s.recipe);
                Ok(())
            },
            get: |s| s.recipe.value(),
        },
        GRPO,
    )
    .help("Recipe: sets the advantage, the surrogate, the aggregation and the KL estimator together."),
    row(
        "teacher_model_name_or_path",
        Text,
        Place {
            field: "model.teacher",
            set: |s, v| {
                s.model.teacher = Some(take(v)?);
                teach(s);
                Ok(())
            },
            get: |s| s.model.teacher.clone().value(),
        },
        GRPO,
    )
    .help(
        "Directory or hub name of a teacher with the same tokens, such as a larger size of the same family. It scores every \
         sampled token; the log-probability that it gives beyond the policy's is added to the token's advantage (on-policy \
         distillation). With `--reward_weights 0` the teacher alone trains, and rewards are only measured.",
    )
    .alias(&["teacher_model"])
    .unset("no teacher"),
    row(
        "teacher_prompt_column",
        Text,
        Place {
            field: "prompts.privileged_context",
            set: |s, v| {
                let template = ContextTemplate::default();
                s.prompts.privileged_context = Some(PrivilegedContext { column: take(v)?, template });
                teach(s);
                Ok(())
            },
            get: |s| s.prompts.privileged_context.as_ref().and_then(|context| text(&context.column)),
        },
        GRPO,
    )
    .help(
        "Column of each row that the teacher reads after the question, and the policy does not, such as `solution` or a hint. Without `teacher_model_name_or_path`, the policy is its own teacher, with the weights that sample (self-distillation).",
    )
    .alias(&["privileged_context_column"])
    .unset("the teacher reads the policy's prompt"),
    row(
        "teacher_prompt_template",
        Text,
        Place {
            field: "",
            set: |s, v| {
                let given: String = take(v)?;
                let template = given.parse().map_err(|expected: String| {
                    Problem::usage("`teacher_prompt_template` does not put the column after the question")
                        .got(format!("`{}`", shown(&given)))
                        .expected(expected)
                })?;
                if let Some(context) = &mut s.prompts.privileged_context {
                    context.template = template;
                }
                Ok(())
            },
            get: |s| s.prompts.privileged_context.as_ref().and_then(|own| text(&own.template.to_string())),
        },
        GRPO,
    )
    .help("Text of the question for the teacher: `{prompt}`, and after it `{privileged_context}`, the value of the column.")
    .unset("the question, an empty line and the value")
    .idle(|s, _| {
        s.prompts.privileged_context.is_none().then_some("`teacher_prompt_column` is not given")
    }),
    row(
        "teacher_coef",
        float(0.0, BIG),
        Place {
            field: "algorithm.loss.distillation",
            set: |s, v| {
                if no_teacher(s).is_none() {
                    s.algorithm.loss.distillation = take(v)?;
                }
                Ok(())
            },
            get: |s| no_teacher(s).map_or_else(|| s.algorithm.loss.distillation.value(), |_| None),
        },
        GRPO,
    )
    .help("Weight of the teacher beside the rewards.")
    .alias(&["teacher_kl_coef"])
    .unset("1 with a teacher")
    .idle(|s, _| no_teacher(s)),
    row(
        "teacher_divergence",
        Choice(divergences),
        Place {
            field: "",
            set: |s, v| {
                s.algorithm.loss.divergence = match take::<String>(v)?.as_str() {
                    "forward_kl" => Divergence::ForwardKl { top_k: Divergence::TOP_K },
                    "jsd" => Divergence::Jsd { top_k: Divergence::TOP_K, beta: 0.5 },
                    _ => Divergence::Sampled,
                };
                Ok(())
            },
            get: |s| {
                text(match s.algorithm.loss.divergence {
                    Divergence::Sampled | Divergence::ReverseKl { .. } => "reverse_kl",
                    Divergence::ForwardKl { .. } => "forward_kl",
                    Divergence::Jsd { .. } => "jsd",
                })
            },
        },
        GRPO,
    )
    .help("Divergence that a teacher makes small.")
    .idle(|s, _| no_teacher(s)),
    row(
        "teacher_top_k",
        int(0, COUNT),
        Place {
            field: "",
            set: |s, v| {
                let k: usize = take(v)?;
                match &mut s.algorithm.loss.divergence {
                    Divergence::ReverseKl { top_k }
                    | Divergence::ForwardKl { top_k }
                    | Divergence::Jsd { top_k, .. } => *top_k = k,
                    sampled if k > 0 => *sampled = Divergence::ReverseKl { top_k: k },
                    Divergence::Sampled => {}
                }
                Ok(())
            },
            get: |s| s.algorithm.loss.divergence.top_k().value(),
        },
        GRPO,
    )
    .help(
        "Number of the teacher's most probable tokens that the divergence reads at each position; all others are one more token with the rest of the probability. 0, for `reverse_kl` alone, reads the sampled token only.",
    )
    .alias(&["loss_top_k", "distillation_topk", "gkd_logits_topk"])
    .unset("0 for reverse_kl, 100 for the others")
    .idle(|s, _| no_teacher(s)),
    row(
        "teacher_beta",
        float(0.0, 1.0),
        Place {
            field: "",
            set: |s, v| {
                if let Divergence::Jsd { beta, .. } = &mut s.algorithm.loss.divergence {
                    *beta = take(v)?;
                }
                Ok(())
            },
            get: |s| match s.algorithm.loss.divergence {
                Divergence::Jsd { beta, .. } => beta.value(),
                _ => None,
            },
        },
        GRPO,
    )
    .help("Share of the teacher in the mixture of `jsd`: 0 is forward_kl, 1 is reverse_kl over the same tokens.")
    .alias(&["distillation_alpha"])
    .unset("0.5 for jsd")
    .idle(|s, _| {
        let is_jsd = matches!(s.algorithm.loss.divergence, Divergence::Jsd { .. });
        no_teacher(s).or_else(|| (!is_jsd).then_some("`teacher_divergence` is not jsd"))
    }),
    row("ref_model_name_or_path", Text, at!(model.reference), GRPO)
        .help("Directory or hub name of the reference of the KL term, with the same tokens.")
        .alias(&["ref_model"])
        .unset("the model before training")
        .idle(|s, _| no_kl(s)),
    row("ref_load_in_8bit", Bool, at!(model.ref_load_in_8bit), GRPO)
        .help("Store a reference or teacher of its own in 8 bits per weight.")
        .idle(|s, _| no_other_model(s)),
    row("ref_load_in_4bit", Bool, at!(model.ref_load_in_4bit), GRPO)
        .help("Store a reference or teacher of its own in 4 bits per weight.")
        .idle(|s, _| no_other_model(s)),
    row("beta", float(0.0, BIG), at!(algorithm.loss.beta), &[Train, Demo, Bench])
        .help("Weight of the KL to the starting model. At 0 no reference is stored.")
        .alias(&["grpo_beta"])
        .unset("the recipe's; 0.04 for grpo")
        .of_recipe(),
    row("grpo_alpha", float(0.0, BIG), at!(algorithm.alpha), GRPO)
        .help("Factor of the advantage in the policy term.")
        .unset("the recipe's; 1 for grpo")
        .of_recipe(),
    row(
        "scale_rewards",
        Choice(deviations),
        Place { field: "",
            set: |s, v| {
                s.algorithm.advantage = match take::<String>(v)?.as_str() {
                    "batch" => AdvantageKind::Batch,
                    "none" => AdvantageKind::GroupCenter,
                    _ => AdvantageKind::GroupStd,
                };
                Ok(())
            },
            get: |_| None,
        },
        GRPO,
    )
    .help("Divide centred rewards by the deviation of the group, by that of the batch, or not at all.")
    .unset("the recipe's; group for grpo")
    .idle(|s, _| each_reward_alone(s)),
    row("advantage", Choice(words::<AdvantageKind>), at!(algorithm.advantage), GRPO)
        .help("How rewards become advantages; has more choices than `scale_rewards`.")
        .unset("the recipe's; group_std for grpo")
        .of_recipe()
        .idle(|s, _| each_reward_alone(s)),
    row(
        "kl",
        Choice(words::<Kl>),
        Place { field: "algorithm.loss.kl",
            set: |s, v| {
                s.algorithm.loss.kl = take(v)?;
                Ok(())
            },
            get: |s| {
                match s.algorithm.loss.kl {
                    Kl::K3Corrected => Kl::K3,
                    kl => kl,
                }
                .value()
            },
        },
        GRPO,
    )
    .help(
        "KL estimator: per token and never negative (k3), or the signed difference of complete completions \
             (k1_seq).",
    )
    .unset("the recipe's; k3 for grpo")
    .of_recipe()
    .idle(|s, _| no_kl(s)),
    row(
        "use_bias_correction_kl",
        Bool,
        Place { field: "",
            set: |s, v| {
                if take(v)? && s.algorithm.loss.kl == Kl::K3 {
                    s.algorithm.loss.kl = Kl::K3Corrected;
                }
                Ok(())
            },
            get: |s| (s.algorithm.loss.kl == Kl::K3Corrected).value(),
        },
        GRPO,
    )
    .help("Multiply the k3 estimate by the ratio, which makes its gradient unbiased.")
    .idle(|s, _| {
        no_kl(s).or_else(|| (s.algorithm.loss.kl == Kl::K1).then_some("`kl k1_seq` has no ratio to correct"))
    }),
    row("router_aux_loss_coef", float(0.0, BIG), at!(algorithm.router.aux), &[Train, Sft, Demo])
        .help(
            "Weight of the loss that makes routers use all experts equally (it is 1 when they do); for families \
             with experts.",
        )
        .alias(&["moe_aux_loss_coeff"]),
    row("router_z_loss_coef", float(0.0, BIG), at!(algorithm.router.z), &[Train, Sft, Demo])
        .help("Weight of the loss on the size of router logits (their squared log-sum-exp); for families with \
             experts.")
        .alias(&["moe_z_loss_coeff"]),
    row("loss_agg", Choice(words::<Aggregation>), at!(algorithm.loss.aggregation), GRPO)
        .help("How the losses of tokens become one number.")
        .unset("the recipe's; seq_mean for grpo")
        .of_recipe(),
    row("importance_sampling_level", Choice(words::<RatioLevel>), at!(algorithm.loss.ratio), GRPO)
        .help("One ratio per token, or one per completion: the geometric mean of its tokens (GSPO), or their product (RLOO).")
        .unset("the recipe's; token for grpo")
        .of_recipe()
        .idle(|s, _| {
            match s.algorithm.loss.surrogate {
                Surrogate::LogProb => Some("the recipe of `loss_type` has no ratio"),
                Surrogate::GeometricMean { .. } | Surrogate::Vespo { .. } => {
                    Some("the recipe of `loss_type` has a ratio of its own for each completion")
                }
                _ => None,
            }
        }),
    row(
        "epsilon",
        float(0.0, BIG),
        Place { field: "algorithm.loss.surrogate.low",
            set: |s, v| {
                let epsilon = take(v)?;
                // One value sets both bounds, as in TRL.
                if let Surrogate::Clip { low, high, .. }
                | Surrogate::GeometricMean { low, high }
                | Surrogate::Dppo { low, high, .. } = &mut s.algorithm.loss.surrogate
                {
                    (*low, *high) = (epsilon, epsilon);
                }
                Ok(())
            },
            get: |s| match s.algorithm.loss.surrogate {
                Surrogate::Clip { low, .. }
                | Surrogate::GeometricMean { low, .. }
                | Surrogate::Dppo { low, .. } => low.value(),
                _ => None,
            },
        },
        GRPO,
    )
    .help(
        "Lower clip distance of the ratio from 1; for gmpo of the log-ratio from 0; for dppo the bound of the \
         divergence for negative advantages.",
    )
    .unset("the recipe's; 0.2 for grpo")
    .of_recipe()
    .idle(|s, _| no_lower_clip(s)),
    row(
        "epsilon_high",
        float(0.0, BIG),
        Place { field: "algorithm.loss.surrogate.high",
            set: |s, v| {
                match &mut s.algorithm.loss.surrogate {
                    Surrogate::Clip { high: bound, .. }
                    | Surrogate::GeometricMean { high: bound, .. }
                    | Surrogate::Dppo { high: bound, .. }
                    | Surrogate::Cispo { cap: bound } => *bound = take(v)?,
                    _ => {}
                }
                Ok(())
            },
            get: |s| match s.algorithm.loss.surrogate {
                Surrogate::Clip { high: bound, .. }
                | Surrogate::GeometricMean { high: bound, .. }
                | Surrogate::Dppo { high: bound, .. }
                | Surrogate::Cispo { cap: bound } => bound.value(),
                _ => None,
            },
        },
        GRPO,
    )
    .help(
        "Upper clip distance of the ratio from 1; for gmpo of the log-ratio from 0; for dppo the bound of \
         the divergence for positive advantages; for cispo the largest ratio itself.",
    )
    .unset("`epsilon`, or the recipe's")
    .of_recipe()
    .idle(|s, _| no_clip(s)),
    row(
        "delta",
        float(1.0, BIG),
        Place { field: "algorithm.loss.surrogate.delta",
            set: |s, v| {
                match &mut s.algorithm.loss.surrogate {
                    Surrogate::Clip { delta, .. } => *delta = Some(take(v)?),
                    Surrogate::Dppo { cap, .. } => *cap = take(v)?,
                    _ => {}
                }
                Ok(())
            },
            get: |s| match s.algorithm.loss.surrogate {
                Surrogate::Clip { delta, .. } => delta.value(),
                Surrogate::Dppo { cap, .. } => cap.value(),
                _ => None,
            },
        },
        GRPO,
    )
    .help("Upper bound of the unclipped ratio, for negative advantages; for dppo of every ratio.")
    .unset("off; 20 for dppo")
    .idle(|s, _| no_bound(s)),
    row("off_policy_mask_threshold", float(0.0, BIG), at!(algorithm.loss.off_policy_threshold), GRPO)
        .help(
            "Leave completions with a negative advantage out of the policy term if the policy's log-probabilities are \
             below those of sampling by more than this, in nats per token in the mean.",
        )
        .alias(&["off_policy_sequence_mask_delta"])
        .unset("off"),
    row("sapo_temperature_pos", float(1e-6, BIG), part_of!(surrogate: Surrogate::Sapo pos), GRPO)
        .help("Steepness of the gate of sapo for positive advantages.")
        .unset("the recipe's; 1 for sapo")
        .of_recipe()
        .idle(|s, _| no_gate(s)),
    row("sapo_temperature_neg", float(1e-6, BIG), part_of!(surrogate: Surrogate::Sapo neg), GRPO)
        .help("Steepness of the gate of sapo for the other advantages; steeper ones learn less from unlikely tokens.")
        .unset("the recipe's; 1.05 for sapo")
        .of_recipe()
        .idle(|s, _| no_gate(s)),
    row("vespo_k_pos", float(0.0, BIG), part_of!(surrogate: Surrogate::Vespo pos[0]), GRPO)
        .help("Weight of vespo for advantages of at least 0: the power of the ratio.")
        .unset("the recipe's; 2 for vespo")
        .of_recipe()
        .idle(|s, _| no_weight(s)),
    row("vespo_lambda_pos", float(0.0, BIG), part_of!(surrogate: Surrogate::Vespo pos[1]), GRPO)
        .help("Weight of vespo for advantages of at least 0: how fast the weight falls as the ratio rises.")
        .unset("the recipe's; 3 for vespo")
        .of_recipe()
        .idle(|s, _| no_weight(s)),
    row("vespo_k_neg", float(0.0, BIG), part_of!(surrogate: Surrogate::Vespo neg[0]), GRPO)
        .help("Weight of vespo for negative advantages: the power of the ratio.")
        .unset("the recipe's; 3 for vespo")
        .of_recipe()
        .idle(|s, _| no_weight(s)),
    row("vespo_lambda_neg", float(0.0, BIG), part_of!(surrogate: Surrogate::Vespo neg[1]), GRPO)
        .help("Weight of vespo for negative advantages: how fast the weight falls as the ratio rises.")
        .unset("the recipe's; 2 for vespo")
        .of_recipe()
        .idle(|s, _| no_weight(s)),
    row("clip_cov_ratio", float(0.0, 1.0), part_of!(covariance: Covariance::Clip share), GRPO)
        .help("Share of the tokens of a step that clip_cov leaves out of the policy term.")
        .unset("the recipe's; 0.0002 for clip_cov")
        .of_recipe()
        .idle(|s, _| no_clip_cov(s)),
    row("clip_cov_lb", float(-BIG, BIG), part_of!(covariance: Covariance::Clip low), GRPO)
        .help("Lower bound of the covariance of the tokens among which clip_cov chooses.")
        .unset("the recipe's; 1 for clip_cov")
        .of_recipe()
        .idle(|s, _| no_clip_cov(s)),
    row("clip_cov_ub", float(-BIG, BIG), part_of!(covariance: Covariance::Clip high), GRPO)
        .help("Upper bound of the covariance of the tokens among which clip_cov chooses.")
        .unset("the recipe's; 5 for clip_cov")
        .of_recipe()
        .idle(|s, _| no_clip_cov(s)),
    row("kl_cov_ratio", float(0.0, 1.0), part_of!(covariance: Covariance::Kl share), GRPO)
        .help("Share of the tokens of a step, those with the largest covariance, on which kl_cov sets its penalty.")
        .unset("the recipe's; 0.0002 for kl_cov")
        .of_recipe()
        .idle(|s, _| no_kl_cov(s)),
    row("ppo_kl_coef", float(0.0, BIG), part_of!(covariance: Covariance::Kl coef), GRPO)
        .help("Weight of the penalty of kl_cov: the distance of a token's log-probability from that of sampling.")
        .unset("the recipe's; 1 for kl_cov")
        .of_recipe()
        .idle(|s, _| no_kl_cov(s)),
    row("num_iterations", int(1, 1024), at!(run.num_iterations), GRPO)
        .help("Optimizer passes over the completions of each rollout."),
    row(
        "steps_per_generation",
        int(1, 1024),
        Place { field: "run.steps_per_generation", ..at!(batch.per_generation) },
        GRPO,
    )
    .help(
        "Optimizer steps that share one rollout. The rollout holds the prompts of all these steps, and each \
         step takes its own part of them. With `batch_unit` completions it counts batches, as in TRL: \
         `gradient_accumulation_steps` of them are one step.",
    )
    .unset("one optimizer step"),
    row(
        "sync_ref_model",
        Bool,
        Place { field: "",
            set: |s, v| {
                s.run.sync_reference = take::<bool>(v)?.then(SyncReference::default);
                Ok(())
            },
            get: |s| s.run.sync_reference.is_some().value(),
        },
        GRPO,
    )
    .help("Let the reference follow the policy (TR-DPO); not with adapters. With `teacher_prompt_column`, it is the teacher.")
    .idle(|s, _| (!s.algorithm.loss.needs_reference()).then_some("`beta` is 0, so there is no KL term")),
    row(
        "ref_model_sync_steps",
        int(1, COUNT),
        Place { field: "",
            set: |s, v| {
                if let Some(sync) = &mut s.run.sync_reference {
                    sync.every = take(v)?;
                }
                Ok(())
            },
            get: |s| s.run.sync_reference.unwrap_or_default().every.value(),
        },
        GRPO,
    )
    .help("Optimizer steps between two updates of the reference.")
    .idle(|s, _| still(s)),
    row(
        "ref_model_mixup_alpha",
        float(0.0, 1.0),
        Place { field: "",
            set: |s, v| {
                if let Some(sync) = &mut s.run.sync_reference {
                    sync.mixup = take(v)?;
                }
                Ok(())
            },
            get: |s| s.run.sync_reference.unwrap_or_default().mixup.value(),
        },
        GRPO,
    )
    .help("Share of the policy in the reference after such an update.")
    .idle(|s, _| still(s)),
    row("mask_truncated_completions", Bool, at!(algorithm.loss.mask_truncated_completions), GRPO)
        .help("Leave completions that reached the length limit out of the loss."),
    row("top_entropy_quantile", float(1e-6, 1.0), at!(algorithm.loss.top_entropy), GRPO)
        .help("Share of the tokens of a step, those with the highest entropy when sampled, that the policy term \
             and the entropy bonus use in all updates."),
    row("importance_sampling_correction", Choice(words::<CorrectionKind>), at!(algorithm.loss.correction.kind), GRPO)
        .help("Correct for the difference between sampling and training, which use other kernels or fewer bits: \
             weight the loss by the ratio of their probabilities.")
        .alias(&["vllm_importance_sampling_mode"])
        .idle(|s, _| s.not_sampled()),
    row("importance_sampling_clip_max", float(0.0, BIG), at!(algorithm.loss.correction.max), GRPO)
        .help("Largest weight of the correction.")
        .alias(&["vllm_importance_sampling_clip_max"])
        .idle(|s, _| uncorrected(s)),
    row("importance_sampling_clip_min", float(0.0, BIG), at!(algorithm.loss.correction.min), GRPO)
        .help("Smallest weight of the correction.")
        .unset("none")
        .alias(&["vllm_importance_sampling_clip_min"])
        .idle(|s, _| uncorrected(s)),
    row("entropy_coef", float(-BIG, BIG), at!(algorithm.loss.entropy_coef), GRPO)
        .help("Weight of an entropy bonus."),
];
