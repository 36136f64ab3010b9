//! The presets: settings of the source systems and of TRL as small YAML files.

use crate::config;
use crate::explain;
use crate::flags::{self, Flag, Section, Verb};
use crate::layer::Layer;
use crate::values::{Given, Origin, Value, Values};

/// One source system.
struct Preset {
    name: &'static str,
    help: &'static str,
    /// What it trains with.
    text: &'static str,
    /// What its supervised start is trained with, if it has one.
    sft: &'static str,
}

const COLD_START: &str = "\
learning_rate: 2.0e-5      # R1-Omni's cold start
num_train_epochs: 5        # R1-Omni's cold start
lr_scheduler_type: cosine  # R1-Omni's cold start
warmup_ratio: 0.03         # R1-Omni's cold start
";

const PRESETS: &[Preset] = &[
    Preset {
        name: "r1-v",
        help: "R1-V: images and videos, accuracy and format",
        text: include_str!("../presets/r1-v.yaml"),
        sft: "",
    },
    Preset {
        name: "humanomni",
        help: "R1-Omni: emotions in video and sound",
        text: include_str!("../presets/humanomni.yaml"),
        sft: COLD_START,
    },
    Preset {
        name: "qwen-video",
        help: "sets of actions in videos, graded rewards",
        text: include_str!("../presets/qwen-video.yaml"),
        sft: "",
    },
    Preset {
        name: "qwen-mcq",
        help: "multiple choice about videos, strict rewards",
        text: include_str!("../presets/qwen-mcq.yaml"),
        sft: "",
    },
    Preset {
        name: "vivqa-x",
        help: "Vietnamese answers with explanations",
        text: include_str!("../presets/vivqa-x.yaml"),
        sft: "",
    },
    Preset {
        name: "vlm-r1",
        help: "VLM-R1: images, batches counted in completions",
        text: include_str!("../presets/vlm-r1.yaml"),
        sft: "",
    },
    Preset {
        name: "trl",
        help: "TRL 1.16's defaults, batches counted in completions",
        text: include_str!("../presets/trl.yaml"),
        sft: "",
    },
];

/// Name and help of every preset.
pub fn words() -> Vec<(&'static str, &'static str)> {
    PRESETS.iter().map(|preset| (preset.name, preset.help)).collect()
}

/// The YAML texts of a preset.
#[cfg(test)]
pub fn texts(name: &str) -> impl Iterator<Item = &'static str> {
    PRESETS.iter().filter(move |preset| preset.name == name).flat_map(|preset| [preset.text, preset.sft])
}

/// The settings of a preset that concern a verb.
pub fn layer(name: &str, verb: Verb) -> Layer {
    let Some(preset) = PRESETS.iter().find(|preset| preset.name == name) else { return Layer::default() };
    let read = |text| config::parse(text, name, |_| Origin::Preset(name.to_string()));
    let mut layer = read(preset.text);
    layer.given.retain(|given| concerns(verb, given.flag));
    if verb == Verb::Sft {
        layer.given.extend(read(preset.sft).given);
    }
    layer
}

/// What a file with a training run's settings says about sampling belongs to training: evaluation and generation take
/// their own defaults, as an evaluation within the run does. Returns what to tell about that.
pub fn of_evaluation(file: &mut Layer, verb: Verb) -> Option<String> {
    const OTHERS: [Verb; 3] = [Verb::Generate, Verb::Score, Verb::Eval];
    let trains = |flag: &Flag| flag.is_of(Verb::Train) || flag.is_of(Verb::Sft);
    let training = |given: &Given| trains(given.flag) && !OTHERS.iter().any(|v| given.flag.verbs.contains(v));
    if !OTHERS.contains(&verb) || !file.given.iter().any(training) {
        return None;
    }
    let defaults = Values::defaults(verb);
    let mut left = Vec::new();
    file.given.retain(|given| {
        let mine = given.flag.is_of(verb);
        let kept = !mine || !trains(given.flag) || concerns(verb, given.flag);
        if !kept && defaults.lookup(given.flag.name).is_none_or(|(default, _)| *default != given.value) {
            left.push(format!("`{}` {}", given.flag.name, explain::yaml(&given.value)));
        }
        kept
    });
    (!left.is_empty()).then(|| {
        format!(
            "the file of settings is a training run's; how it samples is not taken: {}. Flags of `{}` set it",
            left.join(", "),
            verb.name()
        )
    })
}

/// A preset says how its system trains with GRPO. Evaluation and generation share its rows, prompts and rewards, but not
/// the way training samples; supervised training shares neither question nor pace.
fn concerns(verb: Verb, flag: &Flag) -> bool {
    let stands_under = |section: Section| section.rows().iter().any(|row| row.name == flag.name);
    match verb {
        Verb::Train | Verb::Demo => true,
        Verb::Sft => {
            [Section::Model, Section::Data, Section::Media, Section::Rewards, Section::Family]
                .into_iter()
                .any(stands_under)
                && flag.name != "prompt_form"
                || flag.name.starts_with("tune_")
                || matches!(flag.name, "freeze_vision_modules" | "max_completion_length")
        }
        _ => !stands_under(Section::Rollout) || flag.name == "max_completion_length",
    }
}

/// A preset's `cider` is the half of `explanation` that needs no pictures; with a CLIP at hand the preset means the whole.
pub fn complete(values: &mut Values) {
    let (Some(flag), Some(_)) = (flags::find("reward_funcs"), values.lookup("clip_model")) else { return };
    let Some((Value::Texts(names), origin @ Origin::Preset(_))) = values.lookup(flag.name).cloned() else {
        return;
    };
    let whole = |name: String| if name == "cider" { "explanation".to_owned() } else { name };
    let value = Value::Texts(names.into_iter().map(whole).collect());
    values.set(Given { flag, value, origin });
}

/// The weights of a preset belong to its rewards. In another list of rewards each keeps its weight by name, and those
/// that the preset does not have get 1. Returns what to tell about that.
pub fn reweigh(values: &mut Values, preset: &Values) -> Option<String> {
    let flag = flags::find("reward_weights")?;
    let (Value::Floats(own), Origin::Preset(name)) = values.lookup(flag.name)?.clone() else { return None };
    let (Value::Texts(rewards), list) = values.lookup("reward_funcs")? else { return None };
    let (Value::Texts(known), _) = preset.lookup("reward_funcs")? else { return None };
    if matches!(list, Origin::Preset(_)) {
        return None;
    }
    let weight = |reward: &String| {
        let same = |other: &String| other == reward || reward == "explanation" && other == "cider";
        known.iter().position(same).and_then(|at| own.get(at)).copied().unwrap_or(1.0)
    };
    let weights: Vec<f64> = rewards.iter().map(weight).collect();
    let shown: Vec<String> =
        rewards.iter().zip(&weights).map(|(reward, w)| format!("{reward} {w}")).collect();
    let note = format!("rewards keep their weights of preset {name}, others have 1: {}", shown.join(", "));
    values.set(Given { flag, value: Value::Floats(weights), origin: Origin::Preset(name) });
    Some(note)
}
