//! InternVL2, 2.5 and 3 with Qwen2 language models, Vintern among them, in both published layouts.
//!
//! Source: `internvl_chat` of OpenGVLab/InternVL (original layout), `transformers` 5.23 `models/internvl` (hf layout), the
//! published configurations. The layouts differ in tensor names, in the form of the query, key and value projections, in
//! their files and in the prompt; the numbers are the same. A checkpoint keeps its layout; [`convert`] changes it.

mod config;
mod convert;
mod media;
mod template;
mod vision;

use std::path::Path;

use omnigrpo_data::{MediumInfo, MediumRef};
use omnigrpo_ops::{Pass, Tape, Var};
use omnigrpo_text::{ChatTemplate, MediumKind, MediumSegment, MediumTokens, TemplateOrigin, Tokenizer};

pub use config::{InternVlConfig, Layout, VisionConfig};
pub use convert::convert;
pub use vision::VisionTower;

use super::{Family, IdleSettings, MediaSettings, MediumInput, MediumPlan, MediumShape, Network};
use crate::config_json::ConfigJson;
use crate::decoder::{Decoder, DecoderConfig, DecoderNames};
use crate::error::{ModelError, Result};
use crate::weights::WeightSource;

const NAMES: DecoderNames =
    DecoderNames { model: "language_model.model.", head: "language_model.lm_head.weight" };

/// Tokens around the features of a tile or frame, and the one that stands for a feature.
const OPEN: &str = "<img>";
const CLOSE: &str = "</img>";
const CONTEXT: &str = "<IMG_CONTEXT>";

/// The family with one checkpoint's configuration.
pub struct InternVl {
    config: InternVlConfig,
    media: media::MediaReader,
    context_token: u32,
}

impl InternVl {
    /// Reads configuration, processor and, in the original layout, tokenizer files.
    ///
    /// # Errors
    /// Missing or impossible fields; a vocabulary without `<IMG_CONTEXT>`.
    pub fn open(dir: &Path, json: &ConfigJson, layout: Layout) -> Result<Box<dyn Family>> {
        let config = InternVlConfig::parse(json, layout)?;
        let media = media::MediaReader::open(dir, &config)?;
        let context_token = match config.context_token {
            Some(id) => id,
            // The original configuration does not name it.
            None => match Tokenizer::from_dir(dir)?.token_id(CONTEXT) {
                Some(id) if (id as usize) < config.decoder.vocab => id,
                other => {
                    return Err(ModelError::Checkpoint {
                        dir: dir.to_path_buf(),
                        what: format!(
                            "the tokenizer's id of {CONTEXT} is {other:?}; expected one below the vocabulary of {}",
                            config.decoder.vocab
                        ),
                    });
                }
            },
        };
        Ok(Box::new(Self { config, media, context_token }))
    }
}

impl Family for InternVl {
    fn name(&self) -> &'static str {
        match self.config.layout {
            Layout::Original => "internvl",
            Layout::Hf => "internvl_hf",
        }
    }

    fn decoder_config(&self) -> &DecoderConfig {
        &self.config.decoder
    }

    fn initializer_range(&self) -> f32 {
        self.config.initializer_range
    }

    fn published_name(&self, key: &str) -> Option<String> {
        if key.ends_with("rotary_emb.inv_freq") || key.ends_with("position_ids") {
            return None;
        }
        if self.config.layout == Layout::Original {
            return Some(key.to_owned());
        }
        // Names in memory of transformers 4.52 and later.
        Some(match key.strip_prefix("model.") {
            Some(rest) => match rest.strip_prefix("language_model.") {
                Some(inner) => format!("{}{inner}", NAMES.model),
                None => rest.to_owned(),
            },
            None if key == "lm_head.weight" => NAMES.head.to_owned(),
            None => key.to_owned(),
        })
    }

    fn module_name(&self, published: &str) -> String {
        if self.config.layout == Layout::Original {
            return published.to_owned();
        }
        match published.strip_prefix("language_model.") {
            Some(head) if head.starts_with("lm_head") => head.to_owned(),
            _ => match published.strip_prefix(NAMES.model) {
                Some(inner) => format!("model.language_model.{inner}"),
                None => format!("model.{published}"),
            },
        }
    }

    /// `vision_model` names the tower alone.
    fn projector_is_vision(&self) -> bool {
        false
    }

    fn idle_settings(&self) -> IdleSettings {
        media::IDLE
    }

    fn shorten(&self, kind: MediumKind) -> Option<&'static str> {
        match kind {
            MediumKind::Video => Some("lower video_max_frames or nframes"),
            _ => Some("lower max_anyres_num"),
        }
    }

    fn plan(&self, medium: &MediumRef, header: &MediumInfo, settings: &MediaSettings) -> Result<MediumPlan> {
        self.media.plan(medium, header, settings)
    }

    fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        self.media.prepare(medium, settings)
    }

    /// An image is all its tiles between one pair of tags. A video is a numbered line per frame.
    fn tokens(&self, kind: MediumKind, shape: &MediumShape) -> Result<MediumTokens> {
        let [count, ..] = shape.pictures()?;
        let features = |tiles: usize| MediumSegment::Features {
            token: self.context_token,
            count: tiles * self.config.tokens_per_tile(),
        };
        let text = |text: String| MediumSegment::Text(text);
        let segments = match kind {
            MediumKind::Video => (1..=count)
                .flat_map(|i| {
                    let line = if i == 1 { "" } else { "\n" };
                    [text(format!("{line}Frame{i}: {OPEN}")), features(1), text(CLOSE.into())]
                })
                .collect(),
            _ => vec![text(OPEN.into()), features(count), text(CLOSE.into())],
        };
        let marker = match (kind, self.config.layout) {
            (MediumKind::Video, _) => "<video>",
            (_, Layout::Hf) => CONTEXT,
            (_, Layout::Original) => "<image>",
        };
        Ok(MediumTokens { kind, marker: marker.into(), segments })
    }

    fn placeholder_ids(&self) -> Vec<u32> {
        vec![self.context_token]
    }

    /// The original layout names its template in `config.json`, the hf one brings a file.
    fn chat_template(&self, dir: &Path) -> Result<ChatTemplate> {
        if let Some(source) = &self.config.template {
            return Ok(ChatTemplate::from_source(source)?);
        }
        let template = ChatTemplate::from_dir(dir)?;
        if template.origin() == TemplateOrigin::BuiltIn {
            return Ok(ChatTemplate::from_source(template::HF)?);
        }
        Ok(template)
    }

    fn stop_tokens(&self) -> &'static [&'static str] {
        &["<|im_end|>"]
    }

    fn layout(&self) -> &'static str {
        self.config.layout.name()
    }

    fn convert(
        &self,
        dir: &Path,
        params: &[std::sync::Arc<omnigrpo_ops::Param>],
        layout: &str,
    ) -> Result<super::Converted> {
        convert(dir, &self.config, self.context_token, params, layout)
    }

    fn network(&self, source: &mut dyn WeightSource) -> Result<Box<dyn Network>> {
        let tower = VisionTower::build(&self.config, source)?;
        let decoder = Decoder::build(self.config.decoder.clone(), NAMES, source)?;
        Ok(Box::new(InternVlNetwork { tower, decoder }))
    }
}

struct InternVlNetwork {
    tower: VisionTower,
    decoder: Decoder,
}

impl Network for InternVlNetwork {
    fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        self.tower.forward(&medium.data, medium.shape.pictures()?, pass, tape)
    }

    fn project(
        &self,
        tower: &Var,
        medium: &MediumInput,
        _instruction: &[u32],
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var> {
        self.tower.project(tower, medium.shape.pictures()?, pass, tape)
    }
}
