//! Qwen2-Audio: a Whisper encoder over at most 30 s of sound, and a Qwen2.
//!
//! The encoder does not hear the silence after a sound, but its convolutions read it. Source: arXiv 2407.10759; `transformers` 5.23
//! `models/qwen2_audio`. Published files have no chat template; the one here writes what the template of the processor's class writes.

use std::path::Path;
use std::sync::Arc;

use omnigrpo_data::{MediumInfo, MediumRef};
use omnigrpo_media::audio::LogMel;
use omnigrpo_ops::{Linear, Part, Pass, Tape, Var};
use omnigrpo_text::{ChatTemplate, MediumKind, MediumTokens};
use serde_json::json;

use super::sound::{num_features, processor_of};
use super::{
    Architecture, Encoder, Format, IdleSettings, MediaSettings, MediumInput, MediumPlan, MediumShape,
    Network, Processor, Roles, processor, qwen_vl, sound,
};
use crate::config_json::ConfigJson;
use crate::decoder::{Decoder, DecoderConfig, DecoderNames, TextDefaults};
use crate::encoders::whisper::{Whisper, WhisperClass, WhisperConfig};
use crate::error::{ModelError, Result};
use crate::weights::{Scope, WeightSource};

const NAMES: DecoderNames =
    DecoderNames { model: "language_model.model.", head: "language_model.lm_head.weight" };
const AUDIO: &str = "audio_tower.";
const PROJECTOR: &str = "multi_modal_projector.";

/// Prefixes in files, and in the modules of `transformers`.
const PREFIXES: [&str; 4] = [NAMES.model, NAMES.head, AUDIO, PROJECTOR];
const MODULES: [&str; 4] =
    ["model.language_model.", "lm_head.weight", "model.audio_tower.", "model.multi_modal_projector."];

/// Template for a checkpoint that does not contain one.
const TEMPLATE: &str = include_str!("template.jinja");

/// Reads configuration and processor files.
///
/// # Errors
/// Returns an error if fields are missing or invalid.
pub fn open(dir: &Path, json: &ConfigJson) -> Result<Roles> {
    let given = json.required_section("text_config")?;
    given.only("model_type", "qwen2")?;
    // Published files leave the sizes of `Qwen2Config` out.
    let mut text = given.with_object(json!({
        "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 151_936,
    }));
    text.replace(given.object().clone());
    let decoder = DecoderConfig::parse(&text, json, TextDefaults::QWEN2)?;
    let audio = WhisperConfig::parse(&json.required_section("audio_config")?, &WhisperClass::QWEN2_AUDIO)?;
    let token = json.token(json.either("audio_token_index", "audio_token_id"), 151_646, decoder.vocab)?;
    let mel = processor_of(dir, audio.num_mels)?.trimmed();
    let (got, expected) = (mel.num_frames(), 2 * audio.num_positions);
    if got != expected {
        return Err(ModelError::shape(format!(
            "the audio processor's window has {got} frames, but the audio tower reads {expected}"
        )));
    }
    let range = json.spread("initializer_range", 0.02)?;
    let config = Arc::new(QwenAudio { decoder, audio, token, initializer_range: range });
    let processor = Box::new(QwenAudioProcessor { config: Arc::clone(&config), mel });
    Ok(Roles { processor, architecture: Arc::clone(&config) as _, format: config })
}

/// Configuration of one checkpoint.
struct QwenAudio {
    decoder: DecoderConfig,
    audio: WhisperConfig,
    /// Placeholder id of a feature.
    token: u32,
    initializer_range: f32,
}

struct QwenAudioProcessor {
    config: Arc<QwenAudio>,
    mel: LogMel,
}

fn check_kind(kind: MediumKind) -> Result<()> {
    match kind {
        MediumKind::Audio => Ok(()),
        kind => Err(ModelError::MediumKind { kind, what: "this model supports only sounds" }),
    }
}

impl Processor for QwenAudioProcessor {
    fn kinds(&self) -> &'static [MediumKind] {
        &[MediumKind::Audio]
    }

    fn idle_settings(&self) -> IdleSettings {
        IdleSettings { fields: IdleSettings::SIZES, why: || "it reads sounds and text".into() }
    }

    fn shorten(&self, _: MediumKind) -> Option<String> {
        Some("give the sound an end in the row (video_end)".to_owned())
    }

    fn plan(&self, medium: &MediumRef, header: &MediumInfo, settings: &MediaSettings) -> Result<MediumPlan> {
        check_kind(medium.kind)?;
        let shape = sound::plan(medium, header, &self.mel, settings)?;
        Ok(MediumPlan {
            kind: medium.kind,
            shape,
            tokens: num_features(&self.config.audio, shape.mel()?[2])?,
            frame_times_secs: Vec::new(),
            seconds_per_grid: 0.0,
            of_clip: medium.options.of_clip,
        })
    }

    fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        check_kind(medium.kind)?;
        sound::prepare(medium, &self.mel, settings)
    }

    fn tokens(&self, kind: MediumKind, shape: &MediumShape, _: &[f64]) -> Result<MediumTokens> {
        let count = num_features(&self.config.audio, shape.mel()?[2])?;
        Ok(MediumTokens::repeated(kind, "<|AUDIO|>", self.config.token, count))
    }

    fn placeholder_ids(&self) -> Vec<u32> {
        vec![self.config.token]
    }

    fn chat_template(&self, dir: &Path) -> Result<ChatTemplate> {
        processor::chat_template(dir, TEMPLATE, |_| None)
    }
}

impl Format for QwenAudio {
    fn published_name(&self, key: &str) -> Option<String> {
        let other = key.ends_with("rotary_emb.inv_freq") || key.ends_with("position_ids");
        (!other).then(|| qwen_vl::renamed(key, MODULES, PREFIXES))
    }

    fn module_name(&self, published: &str) -> String {
        qwen_vl::renamed(published, PREFIXES, MODULES)
    }
}

impl Architecture for QwenAudio {
    fn decoder_config(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn initializer_range(&self) -> f32 {
        self.initializer_range
    }

    fn network(&self, source: &mut dyn WeightSource) -> Result<Network> {
        let tower = Whisper::build(self.audio.clone(), AUDIO, Part::Audio, source)?;
        let mut weights = Scope::new(source, PROJECTOR, Part::Projector);
        let linear = weights.linear("linear", self.decoder.hidden, self.audio.sizes.hidden, true)?;
        let decoder = Decoder::build(self.decoder.clone(), NAMES, source)?;
        Ok(Network { decoder, encoder: Some(Box::new(QwenAudioEncoder { tower, linear })) })
    }
}

/// The tower and the projector.
struct QwenAudioEncoder {
    tower: Whisper,
    linear: Linear,
}

impl Encoder for QwenAudioEncoder {
    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        self.tower.forward(&medium.data, medium.shape.mel()?[2], pass, tape)
    }

    fn project(
        &self,
        tower: &Var,
        _medium: &MediumInput,
        _instruction: &[u32],
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var> {
        let (linear, pass) = (self.linear.clone(), pass.clone());
        Ok(tape.segment([tower], move |tape, [x]| tape.linear(x, &linear, &pass))?)
    }
}
