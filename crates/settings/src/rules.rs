//! Checks for settings that contradict each other and for missing settings. The row of a setting in the flag table defines when
//! the setting has no effect.

use std::path::Path;

use omnigrpo_grpo::{AdvantageKind, Covariance, Surrogate};
use omnigrpo_guard::names::{nearest, shown};
use omnigrpo_scorers::RewardModel;
use omnigrpo_train::{EvalWhen, GradDtype, SaveWhen, Selection};

use crate::flags::Verb::{self, Demo, Eval, Export, Generate, Serve, Sft, Train, Watch};
use crate::names::{ExportFormat, Tracker};
use crate::problem::Problem;
use crate::values::{Value, Values};
use crate::wording::flag_at;
use crate::{REGISTRY, Settings};

/// Two settings for the same thing, and the condition under which they contradict each other. If one comes from a stronger
/// source, the other returns to its default, because a preset must not forbid the other setting.
pub type Rivals = (&'static str, &'static str, fn(&Value, &Value) -> bool);

/// Every pair of settings for the same thing.
pub const RIVALS: &[Rivals] = &[
    ("tune_mm_vision", "freeze_vision_modules", |tune, freeze| tune == freeze),
    ("advantage", "scale_rewards", |_, _| true),
    ("output_dir", "exp_name", |_, _| true),
    ("max_steps", "num_train_epochs", |steps, _| *steps != Value::Int(-1)),
    ("warmup_steps", "warmup_ratio", |steps, _| *steps != Value::Int(0)),
    ("nframes", "fps", |_, _| true),
];

/// Returns true if every advantage is 0 because each question has only one completion.
fn lone_completions(s: &Settings) -> bool {
    s.algorithm.num_generations == 1
        && (s.algorithm.advantage != AdvantageKind::GroupStdClamped || s.algorithm.normalize_then_sum)
}

/// Returns a warning about settings that work but are probably a mistake.
pub fn doubts(verb: Verb, s: &Settings) -> Option<String> {
    if !matches!(verb, Train | Demo) || s.algorithm.num_generations != 1 {
        return None;
    }
    let advice = "`--num_generations 8` is the default";
    Some(if lone_completions(s) {
        let rest = match (s.algorithm.loss.beta != 0.0, s.algorithm.loss.entropy_coef != 0.0) {
            (true, false) => "the KL term",
            (false, _) => "the entropy term",
            (true, true) => "the KL and entropy terms",
        };
        format!(
            "`num_generations` 1: a completion has no others of its question to be compared with, so every advantage is 0 \
             and only {rest} is trained on. {advice}"
        )
    } else {
        format!(
            "`num_generations` 1: no question has two completions to compare, so `advantage` group_std_clamped \
             compares each completion with those of the step's other questions. {advice}"
        )
    })
}

/// Returns a note about clip bounds without effect. The first update of a rollout compares the policy with itself, so its ratios
/// are 1.
pub fn unreached_clip(values: &Values, s: &Settings) -> Option<String> {
    let clips = matches!(s.algorithm.loss.surrogate, Surrogate::Clip { .. });
    let once = s.run.num_iterations == 1 && s.run.steps_per_generation == 1 && !s.run.rows.replay;
    if !clips || !once || s.algorithm.loss.surrogate == s.recipe.loss.surrogate {
        return None;
    }
    let given = ["epsilon", "epsilon_high", "delta"]
        .into_iter()
        .filter(|name| values.lookup(name).is_some_and(|(_, origin)| origin.is_users()));
    let given: Vec<String> = given.map(|name| format!("`{name}`")).collect();
    (!given.is_empty()).then(|| {
        format!(
            "no ratio is clipped in this run ({}): each completion is trained on once, right after it is sampled, so its ratio \
             is 1. `num_iterations` or `steps_per_generation` above 1 make ratios differ",
            given.join(", ")
        )
    })
}

/// A contradiction between settings.
struct Rule {
    /// Verbs to which the rule applies.
    verbs: &'static [Verb],
    /// Returns the problems; none if the settings agree.
    check: fn(&Settings) -> Vec<Problem>,
}

const fn rule(check: fn(&Settings) -> Vec<Problem>) -> Rule {
    rule_in(Verb::ALL, check)
}

const fn rule_in(verbs: &'static [Verb], check: fn(&Settings) -> Vec<Problem>) -> Rule {
    Rule { verbs, check }
}

/// Least length of a key beyond this machine, in bytes. Nobody guesses 16 random letters and digits.
const MIN_KEY_BYTES: usize = 16;

/// Returns a problem if other machines could reach a server that has no key, or one that can be guessed.
fn without_key(s: &Settings, server: &str) -> Vec<Problem> {
    let len = s.env.api_key.as_ref().map(String::len);
    when(!s.network.host.is_loopback() && len.is_none_or(|len| len < MIN_KEY_BYTES), || {
        let what = if len.is_none() { "it has no key" } else { "its key is too short" };
        Problem::usage(format!("other machines could reach {server}, and {what}"))
            .got(format!("`host` {}", s.network.host))
            .expected(format!(
                "a key of at least {MIN_KEY_BYTES} characters in OMNIGRPO_API_KEY, which clients send as `Authorization: Bearer KEY`"
            ))
            .help("export OMNIGRPO_API_KEY=$(openssl rand -hex 16)")
    })
}

fn when(wrong: bool, problem: impl FnOnce() -> Problem) -> Vec<Problem> {
    wrong.then(problem).into_iter().collect()
}

/// Every contradiction, in the order of the messages.
const RULES: &[Rule] = &[
    rule_in(&[Serve], |s| without_key(s, "`serve`")),
    rule_in(&[Train, Sft, Demo], |s| match s.reports_to(Tracker::Prometheus) {
        true => without_key(s, "Prometheus"),
        false => Vec::new(),
    }),
    rule_in(&[Train, Sft, Demo, Watch, Serve], |s| {
        let is_name = |name: &String| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
            !name.is_empty() && !name.starts_with(['.', '-']) && name.chars().all(is_plain)
        };
        let wrong = s.network.allowed_hosts.iter().find(|name| !is_name(name));
        wrong
            .map(|name| {
                Problem::usage("`allowed_hosts` has something that is no name of a machine")
                    .got(format!("`{}`", shown(name)))
                    .expected("names without a port, such as `node7` or `gpu.example.org`")
            })
            .into_iter()
            .collect()
    }),
    rule_in(&[Train, Demo], |s| {
        when(
            lone_completions(s) && s.algorithm.loss.beta == 0.0 && s.algorithm.loss.entropy_coef == 0.0,
            || {
                Problem::usage(
                    "a group of one completion has no other to compare with, and the loss has no other term",
                )
                .got("`num_generations` 1 and `beta` 0")
                .expected("`--num_generations` 2 or more")
                .help("8 is the default")
            },
        )
    }),
    rule_in(&[Train, Demo], |s| {
        when(s.algorithm.sampling.temperature == 0.0 && s.data.replay.is_none(), || {
            Problem::usage("at temperature 0 all completions of a group are equal, so nothing is learned")
                .got("`temperature` 0")
                .expected("`--temperature` above 0")
        })
    }),
    rule_in(&[Eval, Generate], |s| {
        when(s.algorithm.num_generations > 1 && s.algorithm.sampling.temperature == 0.0, || {
            Problem::usage("at temperature 0 all completions of a prompt are equal")
                .got(format!("`num_generations` {} and `temperature` 0", s.algorithm.num_generations))
                .expected("one completion, or `--temperature` above 0")
        })
    }),
    rule(|s| {
        let (min, max) =
            (s.algorithm.sampling.min_completion_length, s.algorithm.sampling.max_completion_length);
        when(min > max, || {
            Problem::usage("`min_completion_length` is above `max_completion_length`")
                .got(format!("`min_completion_length` {min}, `max_completion_length` {max}"))
                .expected("the minimum at most the maximum")
        })
    }),
    rule(|s| {
        let taught = match (&s.model.teacher, &s.prompts.privileged_context) {
            (Some(_), _) => "teacher_model_name_or_path",
            (None, Some(_)) => "teacher_prompt_column",
            (None, None) => return Vec::new(),
        };
        when(s.algorithm.loss.beta != 0.0, || {
            Problem::usage("a teacher and the KL term would need two more models")
                .got(format!("`{taught}` and `beta` {}", s.algorithm.loss.beta))
                .expected(
                    "`beta 0` with a teacher; without one, `ref_model_name_or_path` names another reference",
                )
        })
    }),
    rule(|s| {
        when(s.rewards.funcs.is_empty(), || {
            Problem::usage("no reward")
                .got("an empty `reward_funcs`")
                .expected("at least one reward; `rewards list` shows the names")
        })
    }),
    rule(|s| {
        let (weights, rewards) = (&s.rewards.options.weights, &s.rewards.funcs);
        when(weights.len() != rewards.len(), || {
            Problem::usage("`reward_weights` and `reward_funcs` have different lengths")
                .got(format!(
                    "{} weights for {} rewards ({})",
                    weights.len(),
                    rewards.len(),
                    rewards.join(", ")
                ))
                .expected("one weight per reward, in the same order")
        })
    }),
    rule(wrong_loss),
    rule(|s| unknown_rewards(&s.rewards.funcs)),
    rule(|s| {
        let video = &s.prompts.media.video;
        let (Some(min), Some(max)) = (video.min_frames, video.max_frames) else { return Vec::new() };
        when(min > max, || {
            Problem::usage("`video_min_frames` is above `video_max_frames`")
                .got(format!("`video_min_frames` {min}, `video_max_frames` {max}"))
                .expected("the minimum at most the maximum")
        })
    }),
    rule(|s| {
        crossed(
            ["min_pixels", "max_pixels"],
            s.prompts.media.image.min_pixels,
            s.prompts.media.image.max_pixels,
        )
    }),
    rule(|s| {
        let names = ["video_min_frame_pixels", "video_max_frame_pixels"];
        crossed(names, s.prompts.media.video.min_pixels, s.prompts.media.video.max_pixels)
    }),
    rule(|s| {
        let (files, folders) = (s.data.data_file_paths.len(), s.data.roots.images.len());
        when(files != folders && files > 0, || {
            Problem::usage("`data_file_paths` and `image_folders` have different lengths")
                .got(format!("{files} files and {folders} folders"))
                .expected("one image folder per file, in the same order")
                .help("`--train_file` takes any number of folders")
        })
    }),
    rule_in(&[Export], |s| {
        let other = s.model.layout.is_some() || s.model.format == ExportFormat::Gguf;
        when(!s.model.merge && !other, || {
            Problem::usage("nothing to export")
                .got("neither an adapter to merge nor another layout or format")
                .expected("`--adapter_name_or_path DIR --merge`, `--layout hf` or `--format gguf`")
        })
    }),
    rule_in(&[Export], |s| {
        when(s.model.merge && s.model.adapter.is_none(), || {
            Problem::usage("`merge` without an adapter").expected("`--adapter_name_or_path DIR`")
        })
    }),
    rule_in(&[Export], |s| {
        when(!s.model.merge && s.model.adapter.is_some(), || {
            Problem::usage("an adapter can only be exported merged").expected("`--merge`")
        })
    }),
    rule(|s| {
        let both = |eight: bool, four: bool, of: &str| {
            when(eight && four, || {
                Problem::usage("weights cannot have both 8 and 4 bits")
                    .got(format!("`{of}load_in_8bit` and `{of}load_in_4bit` both true"))
                    .expected("one of them")
            })
        };
        let model = &s.model;
        let mut wrong = both(model.load_in_8bit, model.load_in_4bit, "");
        wrong.extend(both(model.ref_load_in_8bit, model.ref_load_in_4bit, "ref_"));
        wrong
    }),
    rule_in(&[Train, Sft], |s| {
        let parts = s.env.processes.max(s.algorithm.split.leaves.unwrap_or(1)).max(1);
        when(s.optimizer.grad_dtype == GradDtype::Bfloat16 && parts > 1, || {
            Problem::usage(format!("gradients that {parts} parts of an update sum up are in float32"))
                .got("`grad_dtype` bfloat16")
                .expected("`grad_dtype` float32, or one process and `gradient_leaves` 1")
        })
    }),
    rule_in(&[Train, Sft], |s| {
        when((s.model.load_in_8bit || s.model.load_in_4bit) && !s.model.use_peft, || {
            Problem::usage("quantised weights cannot be trained")
                .got("`load_in_8bit` or `load_in_4bit` without adapters")
                .expected("`--use_peft`")
                .help("without adapters, keep the weights in the checkpoint's precision")
        })
    }),
    rule(|s| {
        let Selection { llm, projector, towers, instruction, .. } = s.selection;
        let some = llm || projector || towers || instruction || s.model.use_peft;
        when(!some, || {
            Problem::usage("nothing to train")
                .got("`tune_mm_llm`, `tune_mm_mlp`, `tune_mm_vision` and `tune_bert` all false")
                .expected("at least one of them true")
        })
    }),
    rule(|s| {
        when(s.model.freeze_vision_modules && s.selection.towers, || {
            Problem::usage("the vision tower cannot be both frozen and trained")
                .got("`freeze_vision_modules` and `tune_mm_vision` both true")
                .expected("one of them")
        })
    }),
    rule(|s| {
        let chosen = &s.log.report_to;
        when(chosen.contains(&Tracker::None) && chosen.iter().any(|one| *one != Tracker::None), || {
            Problem::usage("`report_to` none together with trackers").expected("`none`, or the trackers")
        })
    }),
    rule(|s| {
        when(s.run.eval.when == EvalWhen::Steps(0), || {
            Problem::usage("`eval_strategy steps` without a number of steps").expected("`--eval_steps N`")
        })
    }),
    rule(|s| {
        when(s.run.save.when == SaveWhen::Best && s.run.eval.when == EvalWhen::Never, || {
            Problem::usage("`save_strategy best` needs evaluations to compare")
                .expected("evaluation data and `--eval_steps N` or `--eval_strategy epoch`")
        })
    }),
];

/// Returns a problem for each missing setting of a group in which no single flag is required.
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
        trains && !s.io.dry_run && s.io.output_dir.is_none(),
        Problem::usage("no run directory").expected("`--output_dir DIR` or `--exp_name NAME`"),
    );
    need(
        trains && !train_rows && !(verb == Verb::Train && s.data.replay.is_some()),
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
        !named.is_empty() && s.data.registry.is_none() && !Path::new(REGISTRY).is_file(),
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
        Problem::usage("no output for the completions of `--input`").expected("`--output FILE`"),
    );
    let wants = |name: &str| verb != Verb::DataCheck && !s.lacks_reward(name);
    need(
        wants("bertscore") && s.rewards.scorers.bertscore_model.is_none(),
        Problem::usage("the reward `bertscore` needs a text encoder").expected("`--bertscore_model DIR`"),
    );
    missing
}

/// Returns a problem for each contradiction in the settings.
pub fn check(verb: Verb, s: &Settings) -> Vec<Problem> {
    RULES.iter().filter(|rule| rule.verbs.contains(&verb)).flat_map(|rule| (rule.check)(s)).collect()
}

fn wrong_loss(s: &Settings) -> Vec<Problem> {
    let problem = |error| match error {
        omnigrpo_grpo::Error::Setting { setting: "covariance", expected, .. } => {
            Problem::usage("`clip_cov` and `kl_cov` choose tokens by one advantage and one term per token")
                .got("`loss_type` with one of them")
                .expected(expected)
        }
        omnigrpo_grpo::Error::Setting { setting, value, expected } => {
            let flag = match setting {
                "surrogate.cap" if matches!(s.algorithm.loss.surrogate, Surrogate::Dppo { .. }) => "delta",
                // One flag sets the upper bound of every other surrogate.
                "surrogate.cap" => "epsilon_high",
                "covariance.share" if matches!(s.algorithm.loss.covariance, Covariance::Kl { .. }) => {
                    "kl_cov_ratio"
                }
                "covariance.share" => "clip_cov_ratio",
                "covariance.low" => "clip_cov_lb",
                "covariance.high" => "clip_cov_ub",
                "covariance.coef" => "ppo_kl_coef",
                "surrogate.pos" => "sapo_temperature_pos",
                "surrogate.neg" => "sapo_temperature_neg",
                "surrogate.k_pos" => "vespo_k_pos",
                "surrogate.lambda_pos" => "vespo_lambda_pos",
                "surrogate.k_neg" => "vespo_k_neg",
                "surrogate.lambda_neg" => "vespo_lambda_neg",
                "divergence.top_k" => "teacher_top_k",
                "divergence.beta" => "teacher_beta",
                field => flag_at(&format!("algorithm.loss.{field}")).map_or(field, |flag| flag.name),
            };
            Problem::usage(format!("wrong value for `{flag}`")).got(value.to_string()).expected(expected)
        }
        other => Problem::usage(other.to_string()),
    };
    s.algorithm.loss.validate().err().map(problem).into_iter().collect()
}

/// Reports a lower bound above its upper bound.
fn crossed([low, high]: [&str; 2], min: Option<u64>, max: Option<u64>) -> Vec<Problem> {
    let Some((min, max)) = min.zip(max) else { return Vec::new() };
    when(min > max, || {
        Problem::usage(format!("`{low}` is above `{high}`"))
            .got(format!("{min} and {max}"))
            .expected("the minimum at most the maximum")
    })
}

/// Returns true if a reward is known by name, or names a program, a function of a file, an address or a reward model.
pub fn is_reward(spec: &str) -> bool {
    unknown_rewards(&[spec.to_owned()]).is_empty()
}

/// Reports unknown names of rewards. Programs and addresses, which contain a colon, are checked when they are called.
fn unknown_rewards(specs: &[String]) -> Vec<Problem> {
    let scorers = omnigrpo_scorers::table();
    let names =
        || omnigrpo_rewards::table().iter().map(|row| row.name).chain(scorers.iter().map(|row| row.name));
    let unknown = specs.iter().filter(|spec| {
        !spec.contains(':') && names().all(|name| name != *spec) && RewardModel::spec(spec).is_none()
    });
    let problem = |spec: &String| {
        let problem = Problem::usage("unknown reward").got(format!("`{}`", shown(spec))).expected(format!(
            "{}, the directory of a reward model, `cmd:PROGRAM`, `FILE.py:FUNCTION` or `http://…`",
            names().collect::<Vec<_>>().join(", ")
        ));
        match nearest(spec, names()) {
            _ if spec.ends_with(".py") => {
                problem.help(format!("name one function of the file: `{}:FUNCTION`", shown(spec)))
            }
            Some(name) => problem.help(format!("did you mean `{name}`?")),
            None => problem,
        }
    };
    unknown.map(problem).collect()
}
