//! The presets: small YAML files with the settings of the source systems and of TRL.

use crate::config;
use crate::explain;
use crate::flags::{self, Flag, Section, Verb};
use crate::layer::Layer;
use crate::values::{Given, Origin, Value, Values};

/// One source system.
struct Preset {
    name: &'static str,
    help: &'static str,
    /// YAML text with the settings of GRPO training.
    text: &'static str,
    /// YAML text with the settings of the supervised training before GRPO; empty if the system has none.
    sft: &'static str,
}

const COLD_START: &str = "\
learning_rate: 2.0e-5      # R1-Omni's cold start
num_train_epochs: 5        # R1-Omni's cold start
lr_scheduler_type: cosine  # R1-Omni's cold start
warmup_ratio: 0.03         # R1-Omni's cold start
";

const TRL_SFT: &str = "\
learning_rate: 2.0e-5           # SFTConfig
num_train_epochs: 3             # transformers default
per_device_train_batch_size: 8  # transformers default
gradient_accumulation_steps: 1  # transformers default
gradient_checkpointing: true    # SFTConfig
logging_steps: 10               # SFTConfig
save_steps: 500                 # transformers default
";

/// Declares the presets: name, help, and the settings of `sft`. Those of `train` are in the file with the name.
macro_rules! presets {
    ($($name:literal $help:literal $sft:expr;)+) => {
        const PRESETS: &[Preset] = &[$(Preset {
            name: $name,
            help: $help,
            text: include_str!(concat!("../presets/", $name, ".yaml")),
            sft: $sft,
        }),+];
    };
}

presets! {
    "r1-v" "R1-V: images and videos, accuracy and format" "";
    "humanomni" "R1-Omni: emotions in video and sound" COLD_START;
    "humanomni-v2" "HumanOmniV2: context, reasoning and answers about video and sound" "";
    "qwen-video" "sets of actions in videos, graded rewards" "";
    "qwen-mcq" "multiple choice about videos, strict rewards" "";
    "vivqa-x" "Vietnamese answers with explanations" "";
    "vlm-r1" "VLM-R1: images, batches counted in completions" "";
    "deepeyes" "DeepEyes: details of images, with a tool that zooms" "";
    "trl" "TRL 1.16's defaults, batches counted in completions" TRL_SFT;
}

/// Returns the name and help of every preset.
pub fn words() -> Vec<(&'static str, &'static str)> {
    PRESETS.iter().map(|preset| (preset.name, preset.help)).collect()
}

/// Returns the YAML texts of a preset.
#[cfg(test)]
pub fn texts(name: &str) -> impl Iterator<Item = &'static str> {
    PRESETS.iter().filter(move |preset| preset.name == name).flat_map(|preset| [preset.text, preset.sft])
}

/// Returns the settings of a preset that concern a verb.
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

/// Sizes of the workloads of `bench`. A picture of 392 pixels has 14 × 14 tokens, so that a prompt has 375.
const WORKLOADS: &[(&str, &str)] = &[(
    "easyr1-3b",
    "\
num_prompts: 512
num_generations: 5
prompt_tokens: 179
num_images: 1
image_px: 392
completion_tokens: 300
num_steps: 1
beta: 0.01
torch_dtype: bfloat16
gradient_checkpointing: true
",
)];

/// Returns the settings of a workload of `bench` as a layer of settings; none for one without.
pub fn workload(name: &str) -> Layer {
    let found = WORKLOADS.iter().find(|(own, _)| *own == name);
    found.map(|(_, text)| config::parse(text, name, |_| Origin::Preset(name.to_string()))).unwrap_or_default()
}

/// Returns the settings of a preset for a verb.
pub fn settings(name: &str, verb: Verb) -> Vec<Given> {
    layer(name, verb).given
}

/// Removes the sampling settings of a training run from a file, and returns a note about them. Evaluation and generation have
/// their own defaults, which are also those of an evaluation during training.
pub fn of_evaluation(file: &mut Layer, verb: Verb) -> Option<String> {
    const OTHERS: [Verb; 4] = [Verb::Generate, Verb::Score, Verb::Eval, Verb::Serve];
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
            "the file of settings describes a training run, whose sampling settings are ignored: {}. Set them with \
             flags of `{}`",
            left.join(", "),
            verb.name()
        )
    })
}

/// Returns true if a preset's setting concerns a verb. Evaluation and generation share the rows, prompts and rewards of GRPO
/// training, but not its sampling. Supervised training shares neither questions nor learning rates.
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

/// Replaces the preset's reward `cider` by `explanation` if a CLIP model is given. `cider` is the part of `explanation` that
/// needs no pictures.
pub fn complete(values: &mut Values) {
    let (Some(flag), Some(_)) = (flags::find("reward_funcs"), values.lookup("clip_model")) else { return };
    let Some((Value::Texts(names), origin @ Origin::Preset(_))) = values.lookup(flag.name).cloned() else {
        return;
    };
    let whole = |name: String| if name == "cider" { "explanation".to_owned() } else { name };
    let value = Value::Texts(names.into_iter().map(whole).collect());
    values.set(Given { flag, value, origin });
}

/// Applies the weights of a preset to another list of rewards: each reward keeps its weight by name, others get 1. Returns a
/// note about them.
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
    let note = format!("rewards of preset {name} keep their weights, others get 1: {}", shown.join(", "));
    values.set(Given { flag, value: Value::Floats(weights), origin: Origin::Preset(name) });
    Some(note)
}
