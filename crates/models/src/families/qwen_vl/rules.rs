//! Rules of each generation of Qwen-VL, one constant per generation.
//!
//! Source: the classes of `transformers` 5.23. No other module asks which generation a checkpoint has.

use omnigrpo_media::qwen_vl::ImageProcessor;
use omnigrpo_ops::Activation;

use crate::decoder::TextDefaults;

/// Prefixes of the tower and of the language model in the modules of `transformers`.
pub(super) const MODULES: [&str; 2] = ["model.visual.", "model.language_model."];

/// Differences between generations.
#[derive(Debug)]
pub struct Rules {
    /// Class of the language model.
    pub text: TextDefaults,
    /// Prefixes of the tower and of the language model in files.
    pub prefixes: [&'static str; 2],
    /// Key of the tower's width, with its default.
    pub width: (&'static str, usize),
    /// Key of the width of the features.
    pub features: &'static str,
    /// Default of the feed-forward layer's width; `None` if the key is `mlp_ratio`.
    pub intermediate: Option<usize>,
    /// Default number of blocks.
    pub depth: usize,
    /// Default side of a patch, px.
    pub patch: usize,
    /// Whether the patch layer has a bias.
    pub patch_bias: bool,
    /// Supported activations; the first is the default.
    pub activations: &'static [(&'static str, Activation)],
    /// Whether norms are RMS norms and the feed-forward layer is gated. Otherwise they are layer norms and a plain layer.
    pub gated: bool,
    /// Names of the layers of queries, keys and values; one name if they are one layer.
    pub qkv: &'static [&'static str],
    /// Names of a plain feed-forward layer.
    pub plain: [&'static str; 2],
    /// Names of the norm and the layers of a merger.
    pub merger: [&'static str; 3],
    /// Whether most blocks attend only inside windows.
    pub windows: bool,
    /// Whether temporal positions follow the time of a video. Otherwise temporal patches are counted.
    pub absolute_time: bool,
    /// Whether the tower has learned positions in addition to the rotation.
    pub positions: bool,
    /// Whether deep features are taken.
    pub deep: bool,
    /// Default placeholder ids of an image and of a video.
    pub media_tokens: [u32; 2],
    /// Whether the prompt contains the times of a video's frames as text. Each slice of frames is then a separate picture.
    pub times_as_text: bool,
    /// Whether the video processor chooses frames.
    pub chooses_frames: bool,
    /// Defaults of the video processor.
    pub video: fn() -> ImageProcessor,
}

/// Qwen2-VL.
pub const QWEN2: Rules = Rules {
    text: TextDefaults::QWEN_VL,
    prefixes: ["visual.", "model."],
    width: ("embed_dim", 1280),
    features: "hidden_size",
    intermediate: None,
    depth: 32,
    patch: 14,
    patch_bias: false,
    activations: &[("quick_gelu", Activation::QuickGelu), ("gelu", Activation::GeluErf)],
    gated: false,
    qkv: &["attn.qkv"],
    plain: ["mlp.fc1", "mlp.fc2"],
    merger: ["ln_q", "mlp.0", "mlp.2"],
    windows: false,
    absolute_time: false,
    positions: false,
    deep: false,
    media_tokens: [151_655, 151_656],
    times_as_text: false,
    chooses_frames: false,
    video: ImageProcessor::video_default,
};

/// Qwen2.5-VL.
pub const QWEN25: Rules = Rules {
    width: ("hidden_size", 3584),
    features: "out_hidden_size",
    intermediate: Some(3420),
    activations: &[("silu", Activation::Silu)],
    gated: true,
    windows: true,
    absolute_time: true,
    ..QWEN2
};

/// Qwen3-VL, which is published under the module names of `transformers`.
pub const QWEN3: Rules = Rules {
    text: TextDefaults::QWEN3_VL,
    prefixes: MODULES,
    width: ("hidden_size", 1152),
    features: "out_hidden_size",
    intermediate: Some(4304),
    depth: 27,
    patch: 16,
    patch_bias: true,
    activations: &[("gelu_pytorch_tanh", Activation::GeluTanh), ("gelu", Activation::GeluErf)],
    plain: ["mlp.linear_fc1", "mlp.linear_fc2"],
    merger: ["norm", "linear_fc1", "linear_fc2"],
    positions: true,
    deep: true,
    times_as_text: true,
    chooses_frames: true,
    video: ImageProcessor::qwen3_video_default,
    ..QWEN2
};

/// Qwen3-VL with experts.
pub const QWEN3_MOE: Rules = Rules { text: TextDefaults::QWEN3_VL_MOE, ..QWEN3 };

/// Qwen3.5, and Qwen3.6 and 3.8 of the same class: the tower of Qwen3-VL without deep features.
pub const QWEN35: Rules =
    Rules { text: TextDefaults::QWEN35, deep: false, media_tokens: [248_056, 248_057], ..QWEN3 };
