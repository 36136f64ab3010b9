//! HumanOmni and R1-Omni: video and sound.
//!
//! A SigLIP tower reads the frames, a Whisper encoder the sound, a BERT the question. The output of BERT determines the mixture
//! of three branches over the frames (see `projector`). The language model is a Qwen2 with plain positions. Source: arXiv
//! 2501.15111, 2503.05379; HumanMLLM/HumanOmni and HumanMLLM/R1-Omni.
//!
//! Prompts are those of supervised training and inference: the model's own chat template, with media in the order of the
//! conversation between markers that are ordinary text. A line break follows each medium that the row does not place.
//! Differences from the original: BERT always reads only the text of the question; rows may have any of video,
//! image, sound and text; nothing is encoded for an absent medium. BERT has no dropout.
//!
//! Towers may be in the checkpoint or in separate directories. Weights in the checkpoint take precedence.

mod config;
mod media;
mod processor;
mod projector;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use omnigrpo_ops::{Param, Part, Pass, Tape, Var};
use omnigrpo_text::{MediumKind, Tokenizer};
use serde_json::{Map, Value};

use super::{
    Architecture, Companion, Encoder, FamilyOption, Format, MediumInput, MediumShape, Network, OptionKind,
    Roles,
};
use crate::config_json::ConfigJson;
use crate::decoder::{Decoder, DecoderConfig, DecoderNames};
use crate::encoders::{bert, siglip, whisper};
use crate::error::Result;
use crate::weights::{Init, WeightSource};

pub use config::{Component, HumanOmniConfig, ProjectorConfig, PromptForm, TOWER_KEYS, find_tower};
use projector::{AudioProjector, Plan, VisualProjector};

const DECODER: DecoderNames = DecoderNames { model: "model.", head: "lm_head.weight" };
const VISION: &str = "model.vision_tower.vision_tower.vision_model.";
const AUDIO: &str = "model.audio_tower.audio_tower.encoder.";
const TEXT: &str = "model.bert_model.";

/// Markers around media. They are not tokens of the vocabulary; each is encoded as several tokens. The original gives placeholders
/// of media ids outside the vocabulary (−200 to −202). Here, positions of features have id 0, whose embedding is never used.
pub const MARKERS: [(MediumKind, [&str; 2]); 3] = [
    (MediumKind::Image, ["<im_start>", "<im_end>"]),
    (MediumKind::Video, ["<vi_start>", "<vi_end>"]),
    (MediumKind::Audio, ["<au_start>", "<au_end>"]),
];

/// Options for the directories of the encoders, and two switches.
pub const OPTIONS: &[FamilyOption] = &[
    FamilyOption { name: "vision_tower", key: TOWER_KEYS[0], holds: OptionKind::Directory(None) },
    FamilyOption { name: "audio_tower", key: TOWER_KEYS[1], holds: OptionKind::Directory(None) },
    FamilyOption {
        name: "bert",
        key: TOWER_KEYS[2],
        holds: OptionKind::Directory(Some("bert-base-uncased")),
    },
    FamilyOption { name: "mm_dynamic_compressor", key: "mm_dynamic_compressor", holds: OptionKind::Value },
    FamilyOption { name: "prompt_form", key: "prompt_form", holds: OptionKind::Value },
];

/// Default number of frames of a video.
pub const NUM_FRAMES: usize = 8;

/// Reads the configuration of a checkpoint and of its towers.
///
/// # Errors
/// Returns an error if files or fields are missing or invalid.
pub fn open(dir: &Path, json: &ConfigJson) -> Result<Roles> {
    let config = Arc::new(HumanOmniConfig::parse(dir, json)?);
    if config.form == PromptForm::R1OmniGrpo {
        let tokenizer = Tokenizer::from_dir(dir)?;
        if tokenizer.token_id("<|video_pad|>").is_none() {
            return Err(json.error(
                "prompt_form \"r1omni_grpo\" needs a tokenizer with Qwen2-VL's <|vision_start|>, <|video_pad|> and \
                 <|vision_end|>: the original used that of Qwen2-VL-2B-Instruct",
            ));
        }
    }
    let media = media::MediaReader::open(&config)?;
    let tokenizer = match &config.text.dir {
        Some(dir) if dir.join("tokenizer.json").is_file() || dir.join("vocab.txt").is_file() => {
            Some(Tokenizer::from_dir(dir)?)
        }
        _ => None,
    };
    let processor = Box::new(processor::HumanOmniProcessor { config: Arc::clone(&config), media, tokenizer });
    Ok(Roles { processor, architecture: Arc::clone(&config) as _, format: config })
}

impl Format for HumanOmniConfig {
    /// Maps the keys of towers, which have the names of `transformers` inside the checkpoint's own wrappers. Parts that never run
    /// (Whisper's classifier) are not weights here.
    fn published_name(&self, key: &str) -> Option<String> {
        if key.ends_with("rotary_emb.inv_freq") {
            return None;
        }
        let below = |start: &str| key.strip_prefix(start);
        if let Some(name) = below("model.vision_tower.vision_tower.") {
            return siglip::published_name(name).map(|name| format!("{VISION}{name}"));
        }
        if let Some(name) = below("model.audio_tower.audio_tower.") {
            return name.starts_with("encoder.").then(|| key.to_owned());
        }
        if let Some(name) = below(TEXT) {
            return bert::published_name(name).map(|name| format!("{TEXT}{name}"));
        }
        Some(key.to_owned())
    }

    fn companions(&self) -> Vec<Companion> {
        let config = self;
        let mut list = Vec::new();
        let mut add = |dir: &Option<PathBuf>, key, prefix, published| {
            list.push(Companion { dir: dir.clone(), option: config::option(key), prefix, published });
        };
        add(&config.vision.dir, TOWER_KEYS[0], VISION, siglip::published_name as fn(&str) -> Option<String>);
        if let Some(audio) = &config.audio {
            add(&audio.dir, TOWER_KEYS[1], AUDIO, whisper::published_name);
        }
        add(&config.text.dir, TOWER_KEYS[2], TEXT, bert::published_name);
        list
    }

    /// Writes the directories of the towers as absolute paths, so that the saved copy finds them.
    fn saved_config(&self, config: &mut Map<String, Value>) {
        let dirs = [
            self.vision.dir.as_ref(),
            self.audio.as_ref().and_then(|audio| audio.dir.as_ref()),
            self.text.dir.as_ref(),
        ];
        for (key, dir) in TOWER_KEYS.into_iter().zip(dirs) {
            if let Some(dir) = dir.and_then(|dir| std::fs::canonicalize(dir).ok()) {
                config.insert(key.into(), Value::String(dir.to_string_lossy().into_owned()));
            }
        }
    }
}

impl Architecture for HumanOmniConfig {
    fn decoder_config(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn initializer_range(&self) -> f32 {
        self.initializer_range
    }

    fn network(&self, source: &mut dyn WeightSource) -> Result<Network> {
        let config = self;
        let decoder = Decoder::build(config.decoder.clone(), DECODER, source)?;
        let vision = siglip::Siglip::build(config.vision.config.clone(), VISION, Part::Vision, source)?;
        let audio = config
            .audio
            .as_ref()
            .map(|audio| -> Result<_> {
                let tower = whisper::Whisper::build(audio.config.clone(), AUDIO, Part::Audio, source)?;
                let width = audio.config.sizes.hidden;
                Ok((tower, Arc::new(AudioProjector::build(width, config.decoder.hidden, source)?)))
            })
            .transpose()?;
        let text_width = config.text.config.sizes.hidden;
        let projector = Arc::new(VisualProjector::build(&config.projector, text_width, source)?);
        for name in ["query", "key"] {
            let name = format!("model.feature_compressor.vlm_{name}_projector");
            if source.has(&format!("{name}.weight")) {
                // The compressor's constructor creates this parameter, but no code uses it. It is loaded so that a saved
                // checkpoint is complete.
                let shape = [256, config.projector.tower_width];
                source.get(&format!("{name}.weight"), Part::Projector, &shape, Init::Normal)?;
                source.get(&format!("{name}.bias"), Part::Projector, &shape[..1], Init::Zeros)?;
            }
        }
        let pooler = source.has(&format!("{TEXT}pooler.dense.weight"));
        let mut recorded = Recorded { source, params: Vec::new() };
        let text =
            bert::Bert::build(config.text.config.clone(), pooler, TEXT, Part::Instruction, &mut recorded)?;
        let text_params = recorded.params;
        let encoder = Box::new(HumanOmniEncoder {
            vision,
            vision_blocks: config.vision_blocks,
            audio,
            text,
            text_params,
            projector,
            sizes: config.projector.clone(),
        });
        Ok(Network { decoder, encoder: Some(encoder) })
    }
}

/// A source that records the weights it returns.
struct Recorded<'s> {
    source: &'s mut dyn WeightSource,
    params: Vec<Arc<Param>>,
}

impl WeightSource for Recorded<'_> {
    fn get(&mut self, name: &str, part: Part, shape: &[usize], init: Init) -> Result<Arc<Param>> {
        let param = self.source.get(name, part, shape, init)?;
        self.params.push(Arc::clone(&param));
        Ok(param)
    }

    fn tied(&mut self, embed: &str, head: &str, config: bool) -> Result<bool> {
        self.source.tied(embed, head, config)
    }

    fn has(&self, name: &str) -> bool {
        self.source.has(name)
    }
}

/// Towers and projectors of HumanOmni.
struct HumanOmniEncoder {
    vision: siglip::Siglip,
    vision_blocks: usize,
    audio: Option<(whisper::Whisper, Arc<AudioProjector>)>,
    text: bert::Bert,
    text_params: Vec<Arc<Param>>,
    projector: Arc<VisualProjector>,
    sizes: ProjectorConfig,
}

impl HumanOmniEncoder {
    fn audio(&self) -> Result<&(whisper::Whisper, Arc<AudioProjector>)> {
        self.audio.as_ref().ok_or_else(media::no_audio_tower)
    }
}

impl Encoder for HumanOmniEncoder {
    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        match medium.shape {
            MediumShape::Mel { heard, .. } => self.audio()?.0.forward(&medium.data, heard, pass, tape),
            _ => {
                let [count, ..] = medium.shape.pictures()?;
                self.vision.hidden(&medium.data, count, self.vision_blocks, pass, tape)
            }
        }
    }

    fn project(
        &self,
        tower: &Var,
        medium: &MediumInput,
        instruction: &[u32],
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var> {
        let own = pass.clone();
        if let MediumShape::Mel { .. } = medium.shape {
            let projector = Arc::clone(&self.audio()?.1);
            return Ok(tape.segment([tower], move |tape, [x]| projector.forward(x, &own, tape))?);
        }
        let plan = Plan::new(&self.sizes, medium.shape.pictures()?[0]);
        let question = match self.text_params.iter().any(|p| p.trainable() || p.adapter().is_some()) {
            true => self.text.first(&[instruction], pass, tape)?,
            false => self.text.first(&[instruction], pass, &mut Tape::off())?,
        };
        let projector = Arc::clone(&self.projector);
        Ok(tape.segment([tower, &question], move |tape, [x, question]| {
            projector.forward(x, question, &plan, &own, tape)
        })?)
    }
}
