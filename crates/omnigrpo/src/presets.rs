//! The presets: settings of the source systems as small YAML files.

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

/// The YAML text of a preset.
pub fn text(name: &str) -> Option<&'static str> {
    PRESETS.iter().find(|row| row.0 == name).map(|row| row.2)
}
