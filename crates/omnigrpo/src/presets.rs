//! The presets: settings of the source systems as small YAML files.

use crate::flags;
use crate::values::{Given, Origin, Value, Values};

/// Name, help and text of every preset.
const PRESETS: &[(&str, &str, &str)] = &[
    ("r1-v", "R1-V: images and videos, accuracy and format", include_str!("../presets/r1-v.yaml")),
    ("humanomni", "R1-Omni: emotions in video and sound", include_str!("../presets/humanomni.yaml")),
    ("qwen-video", "sets of actions in videos, graded rewards", include_str!("../presets/qwen-video.yaml")),
    ("qwen-mcq", "multiple choice about videos, strict rewards", include_str!("../presets/qwen-mcq.yaml")),
    ("vivqa-x", "Vietnamese answers with explanations", include_str!("../presets/vivqa-x.yaml")),
];

/// Name and help of every preset.
pub fn words() -> Vec<(&'static str, &'static str)> {
    PRESETS.iter().map(|(name, help, _)| (*name, *help)).collect()
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

/// The YAML text of a preset.
pub fn text(name: &str) -> Option<&'static str> {
    PRESETS.iter().find(|row| row.0 == name).map(|row| row.2)
}
