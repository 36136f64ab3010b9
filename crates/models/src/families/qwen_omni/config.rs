//! `config.json` of Qwen2.5-Omni, whole or of the thinker alone.
//!
//! In a whole checkpoint the thinker's configuration is under `thinker_config`, and its tensors have the prefix `thinker.`. If a
//! published file omits a field, the class default of `transformers` 5.23 applies.

use crate::config_json::ConfigJson;
use crate::decoder::{DecoderConfig, DecoderNames, PositionAxes, TextDefaults};
use crate::encoders::whisper::{WhisperClass, WhisperConfig};
use crate::error::Result;
use crate::families::qwen_vl::VisionConfig;
use crate::families::qwen_vl::rules::{QWEN25, Rules};

/// `Qwen2_5OmniTextConfig`.
const TEXT: TextDefaults = TextDefaults {
    heads: Some(28),
    kv_heads: Some(4),
    theta: 1e6,
    axes: PositionAxes::Sections,
    ..TextDefaults::QWEN2
};

/// Tensor names of a kind of checkpoint.
#[derive(Debug)]
pub struct Names {
    /// Rules of the vision tower, with its prefix and that of the language model.
    pub rules: Rules,
    /// Prefix of the audio tower.
    pub audio: &'static str,
    /// Names of the language model.
    pub decoder: DecoderNames,
    /// Prefixes of vision tower, language model and audio tower in the modules of `transformers`.
    pub modules: [&'static str; 3],
}

impl Names {
    /// Prefixes in files, in the order of [`Self::modules`].
    pub fn prefixes(&self) -> [&'static str; 3] {
        [self.rules.prefixes[0], self.rules.prefixes[1], self.audio]
    }
}

/// The thinker alone.
const THINKER: Names = Names {
    rules: Rules { prefixes: ["visual.", "model."], qkv: &["attn.q", "attn.k", "attn.v"], ..QWEN25 },
    audio: "audio_tower.",
    decoder: DecoderNames { model: "model.", head: "lm_head.weight" },
    modules: ["model.visual.", "model.language_model.", "model.audio_tower."],
};

/// A whole checkpoint.
const WHOLE: Names = Names {
    rules: Rules { prefixes: ["thinker.visual.", "thinker.model."], ..THINKER.rules },
    audio: "thinker.audio_tower.",
    decoder: DecoderNames { model: "thinker.model.", head: "thinker.lm_head.weight" },
    modules: ["thinker.model.visual.", "thinker.model.language_model.", "thinker.model.audio_tower."],
};

/// Key of the thinker's configuration in that of a whole checkpoint.
pub const THINKER_KEY: &str = "thinker_config";

/// A Qwen2.5-Omni configuration.
#[derive(Clone, Debug)]
pub struct OmniConfig {
    /// Tensor names.
    pub names: &'static Names,
    /// Configuration of the language model.
    pub decoder: DecoderConfig,
    /// Configuration of the vision tower.
    pub vision: VisionConfig,
    /// Configuration of the audio tower.
    pub audio: WhisperConfig,
    /// Placeholder ids of features of an image, a video and a sound.
    pub tokens: [u32; 3],
    /// Temporal positions per second.
    pub positions_per_second: f32,
    /// Temporal positions of a stretch of a clip whose picture and sound are shown one after the other.
    pub stretch: u32,
    /// Standard deviation of new weights.
    pub initializer_range: f32,
}

impl OmniConfig {
    /// Reads a configuration.
    ///
    /// # Errors
    /// Returns an error that names the field if a field is missing or invalid.
    pub fn parse(json: &ConfigJson) -> Result<Self> {
        let (names, thinker) = match json.section(THINKER_KEY)? {
            Some(thinker) => (&WHOLE, thinker),
            None => (&THINKER, json.clone()),
        };
        // Only the thinker's own key says whether its head is tied.
        let mut text = thinker.required_section("text_config")?;
        text.replace([("tie_word_embeddings".to_owned(), false.into())].into_iter().collect());
        let decoder = DecoderConfig::parse(&text, &thinker, TEXT)?;
        let vision = VisionConfig::parse(&thinker.required_section("vision_config")?, &names.rules)?;
        let audio_json = thinker.required_section("audio_config")?;
        let audio = WhisperConfig::parse(&audio_json, &WhisperClass::QWEN25_OMNI)?;
        for (what, width) in [("vision", vision.out), ("audio", audio_json.size("output_dim", Some(3584))?)] {
            if width != decoder.hidden {
                let hidden = decoder.hidden;
                return Err(json.error(format!(
                    "features of the {what} tower have width {width}, but the language model has width {hidden}"
                )));
            }
        }
        let token = |old: &str, new: &str, default: u32| {
            thinker.token(thinker.either(old, new), default, decoder.vocab)
        };
        let per_second = thinker.number_in("position_id_per_seconds", 25.0, 1.0..=1e3)?;
        let stretch = per_second * thinker.number_in("seconds_per_chunk", 2.0, 0.01..=1e3)?;
        if stretch < 1.0 {
            return Err(thinker.error("seconds_per_chunk covers less than one position"));
        }
        Ok(Self {
            names,
            tokens: [
                token("image_token_index", "image_token_id", 151_655)?,
                token("video_token_index", "video_token_id", 151_656)?,
                token("audio_token_index", "audio_token_id", 151_646)?,
            ],
            positions_per_second: per_second as f32,
            stretch: stretch as u32,
            initializer_range: thinker.spread("initializer_range", 0.02)?,
            decoder,
            vision,
            audio,
        })
    }
}
