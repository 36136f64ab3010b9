//! The presets: settings of the source systems as small YAML files.

/// Names of the presets.
pub const NAMES: &[&str] = &["r1-v", "humanomni", "qwen-video", "qwen-mcq", "vivqa-x"];

/// The YAML text of a preset.
pub fn text(name: &str) -> Option<&'static str> {
    match name {
        "r1-v" => Some(include_str!("../presets/r1-v.yaml")),
        "humanomni" => Some(include_str!("../presets/humanomni.yaml")),
        "qwen-video" => Some(include_str!("../presets/qwen-video.yaml")),
        "qwen-mcq" => Some(include_str!("../presets/qwen-mcq.yaml")),
        "vivqa-x" => Some(include_str!("../presets/vivqa-x.yaml")),
        _ => None,
    }
}
