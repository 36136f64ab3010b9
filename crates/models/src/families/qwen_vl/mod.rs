//! Qwen2-VL and Qwen2.5-VL.
//!
//! Source: `transformers` 5.23 (`models/qwen2_vl`, `models/qwen2_5_vl`), `qwen-vl-utils` 0.0.14 for media, the published
//! checkpoints for defaults.

mod config;
mod positions;
mod vision;

use std::path::Path;
use std::sync::Arc;

use omnigrpo_data::{MediumInfo, MediumRef};
use omnigrpo_media::qwen_vl::PatchGrid;
use omnigrpo_ops::{Pass, Tape, Var};
use omnigrpo_text::{MediumKind, MediumTokens, Span};

pub use config::{Generation, QwenVlConfig, VisionConfig};
pub use positions::{MediumAxes, positions};
pub use vision::VisionTower;

use super::{Family, IdleSettings, MediaSettings, MediumInput, MediumPlan, MediumShape, Network};
use crate::config_json::ConfigJson;
use crate::decoder::{Decoder, DecoderConfig, DecoderNames, Position};
use crate::error::Result;
use crate::weights::WeightSource;

const NAMES: DecoderNames = DecoderNames { model: "model.", head: "lm_head.weight" };

/// The family with one checkpoint's configuration.
pub struct QwenVl {
    config: QwenVlConfig,
    media: media::MediaReader,
}

mod media;

impl QwenVl {
    /// Reads configuration and processor files.
    ///
    /// # Errors
    /// Missing or impossible fields.
    pub fn open(dir: &Path, json: &ConfigJson, generation: Generation) -> Result<Box<dyn Family>> {
        let config = QwenVlConfig::parse(json, generation)?;
        let media = media::MediaReader::open(dir, &config.vision)?;
        Ok(Box::new(Self { config, media }))
    }

    fn axes(&self, grid: PatchGrid, seconds_per_grid: f64) -> MediumAxes {
        let temporal_step = match self.config.vision.tokens_per_second {
            Some(rate) => rate as f32 * seconds_per_grid as f32,
            None => 1.0,
        };
        MediumAxes { grid, merge: self.config.vision.merge, temporal_step }
    }
}

impl Family for QwenVl {
    fn name(&self) -> &'static str {
        match self.config.generation {
            Generation::Qwen2 => "qwen2_vl",
            Generation::Qwen25 => "qwen2_5_vl",
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
        Some(match key.strip_prefix("model.") {
            Some(rest) if rest.starts_with("visual.") => rest.to_owned(),
            Some(rest) => match rest.strip_prefix("language_model.") {
                Some(inner) => format!("model.{inner}"),
                None => key.to_owned(),
            },
            None => key.to_owned(),
        })
    }

    fn module_name(&self, published: &str) -> String {
        match published.strip_prefix("model.") {
            Some(rest) => format!("model.language_model.{rest}"),
            None if published.starts_with("visual.") => format!("model.{published}"),
            None => published.to_owned(),
        }
    }

    fn idle_settings(&self) -> IdleSettings {
        IdleSettings {
            flags: &["max_anyres_num"],
            why: "it does not cut images into tiles, and max_pixels is the most pixels of an image",
        }
    }

    fn shorten(&self, kind: MediumKind) -> Option<&'static str> {
        match kind {
            MediumKind::Video => {
                Some("lower video_max_frames or nframes, video_max_frame_pixels or total_pixels")
            }
            _ => Some("lower max_pixels"),
        }
    }

    fn plan(&self, medium: &MediumRef, header: &MediumInfo, settings: &MediaSettings) -> Result<MediumPlan> {
        self.media.plan(medium, header, settings)
    }

    fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        self.media.prepare(medium, settings)
    }

    fn tokens(&self, kind: MediumKind, shape: &MediumShape) -> Result<MediumTokens> {
        let count = shape.patches()?.num_tokens(self.config.vision.merge);
        Ok(match kind {
            MediumKind::Video => {
                MediumTokens::repeated(kind, "<|video_pad|>", self.config.video_token, count)
            }
            _ => MediumTokens::repeated(kind, "<|image_pad|>", self.config.image_token, count),
        })
    }

    fn placeholder_ids(&self) -> Vec<u32> {
        vec![self.config.image_token, self.config.video_token]
    }

    fn positions(
        &self,
        len: usize,
        spans: &[Span],
        media: &[Arc<MediumInput>],
    ) -> Result<(Vec<Position>, u32)> {
        let axes = media
            .iter()
            .map(|m| Ok(self.axes(m.shape.patches()?, m.seconds_per_grid)))
            .collect::<Result<Vec<_>>>()?;
        Ok(positions(len, spans, |m| axes[m]))
    }

    fn network(&self, source: &mut dyn WeightSource) -> Result<Box<dyn Network>> {
        let tower = VisionTower::build(self.config.vision.clone(), self.config.generation, source)?;
        let decoder = Decoder::build(self.config.decoder.clone(), NAMES, source)?;
        Ok(Box::new(QwenVlNetwork { tower, decoder }))
    }
}

struct QwenVlNetwork {
    tower: VisionTower,
    decoder: Decoder,
}

impl Network for QwenVlNetwork {
    fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        self.tower.forward(&medium.data, medium.shape.patches()?, pass, tape)
    }

    fn project(
        &self,
        tower: &Var,
        medium: &MediumInput,
        _instruction: &[u32],
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var> {
        self.tower.project(tower, medium.shape.patches()?, pass, tape)
    }
}
