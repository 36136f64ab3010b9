//! The table of model families.
//!
//! To add one: a folder here with an implementation of [`Family`] and [`Network`], and a row in [`FAMILIES`]. The
//! loader, the parity suite and the documentation iterate the table.

pub mod qwen_vl;

use std::path::Path;
use std::sync::Arc;

use candle_core::Tensor;
use omnigrpo_data::{MediumInfo, MediumOptions, MediumRef, MediumSource};
use omnigrpo_media::qwen_vl::PatchGrid;
use omnigrpo_media::{Limits, VideoSource, probe_image, probe_video};
use omnigrpo_ops::Segments;
use omnigrpo_text::{MediumKind, MediumTokens, Span};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::config_json::ConfigJson;
use crate::decoder::{Decoder, DecoderConfig, Position};
use crate::error::{ModelError, Result};
use crate::weights::WeightSource;

/// One family in the table.
pub struct FamilyRow {
    /// Its name in messages.
    pub name: &'static str,
    /// What it is, in a line.
    pub doc: &'static str,
    /// Where the architecture is defined.
    pub source: &'static str,
    /// Values of `model_type` in `config.json`.
    pub model_types: &'static [&'static str],
    /// Values of `architectures` in `config.json`.
    pub architectures: &'static [&'static str],
    /// Reads configuration and processor files of a checkpoint directory.
    pub open: fn(&Path, &ConfigJson) -> Result<Box<dyn Family>>,
}

/// Every family this program knows.
pub const FAMILIES: &[FamilyRow] = &[
    FamilyRow {
        name: "qwen2_vl",
        doc: "Qwen2-VL: images and videos, three-axis positions",
        source: "arXiv 2409.12191; transformers models/qwen2_vl",
        model_types: &["qwen2_vl"],
        architectures: &["Qwen2VLForConditionalGeneration"],
        open: |dir, json| qwen_vl::QwenVl::open(dir, json, qwen_vl::Generation::Qwen2),
    },
    FamilyRow {
        name: "qwen2_5_vl",
        doc: "Qwen2.5-VL: window attention in the tower, absolute time in positions",
        source: "arXiv 2502.13923; transformers models/qwen2_5_vl",
        model_types: &["qwen2_5_vl"],
        architectures: &["Qwen2_5_VLForConditionalGeneration"],
        open: |dir, json| qwen_vl::QwenVl::open(dir, json, qwen_vl::Generation::Qwen25),
    },
];

/// How frames of a video are chosen where the row does not say.
#[derive(Clone, Debug, PartialEq)]
pub enum FrameRule {
    /// By rate, as `qwen-vl-utils`.
    Qwen,
    /// One frame per interval, as `qwen-vl-finetune`.
    BaseInterval {
        /// Seconds between frames.
        interval_secs: f64,
    },
    /// From each segment that the row's `meta` lists; by interval for rows without.
    Segments {
        /// Seconds between frames of rows without segments.
        interval_secs: f64,
    },
}

/// How media are read where a row does not say otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct MediaSettings {
    /// Sizes of images. What is open follows the checkpoint's processor.
    pub image: MediumOptions,
    /// Frames and sizes of videos. What is open follows `qwen-vl-utils`.
    pub video: MediumOptions,
    /// How frames are chosen.
    pub rule: FrameRule,
    /// Whether rows with `meta.dynamic_sample` draw their number of frames (training) or take the largest.
    pub dynamic_sample: bool,
    /// Keys the draw.
    pub seed: u64,
}

impl Default for MediaSettings {
    fn default() -> Self {
        Self {
            image: MediumOptions::default(),
            video: MediumOptions::default(),
            rule: FrameRule::Qwen,
            dynamic_sample: false,
            seed: 0,
        }
    }
}

impl MediaSettings {
    /// A number from `min` to `max` that depends on the seed and the medium alone.
    pub(crate) fn draw(&self, source: &MediumSource, min: u32, max: u32) -> u32 {
        let mut key = [0u8; 32];
        key[..8].copy_from_slice(&self.seed.to_le_bytes());
        for (i, byte) in format!("{source:?}").bytes().enumerate() {
            let slot = &mut key[8 + i % 24];
            *slot = slot.wrapping_mul(31).wrapping_add(byte);
        }
        let span = u64::from(max.saturating_sub(min)) + 1;
        min + (ChaCha8Rng::from_seed(key).next_u64() % span) as u32
    }
}

/// Reads what a medium's header says. Depends on the source alone.
///
/// # Errors
/// An unreadable medium, with its path.
pub fn probe_medium(medium: &MediumRef) -> Result<MediumInfo> {
    let limits = Limits::default();
    match (medium.kind, &medium.source) {
        (MediumKind::Image, MediumSource::Path(path)) => {
            let info = probe_image(path, &limits)?;
            Ok(MediumInfo {
                width_px: Some(info.width_px),
                height_px: Some(info.height_px),
                ..MediumInfo::default()
            })
        }
        (MediumKind::Video, source) => {
            let source = match source {
                MediumSource::Path(path) => VideoSource::from_path(path),
                MediumSource::Frames(frames) => VideoSource::FrameList(frames.clone()),
                MediumSource::Url(url) => return Err(no_url(url)),
            };
            let info = probe_video(&source, None, &limits)?;
            Ok(MediumInfo {
                width_px: Some(info.width_px),
                height_px: Some(info.height_px),
                num_frames: Some(info.num_frames as u64),
                fps: Some(info.fps),
                duration_secs: Some(info.duration_s),
                sample_rate_hz: None,
            })
        }
        (_, MediumSource::Url(url)) => Err(no_url(url)),
        (kind, _) => Err(ModelError::prompt(format!("no family here reads this kind of {kind}"))),
    }
}

fn no_url(url: &str) -> ModelError {
    ModelError::prompt(format!("{url}: media by URL are not read; download the file first"))
}

/// A medium, decoded and resized: the input of a tower.
#[derive(Clone, Debug, PartialEq)]
pub struct MediumInput {
    /// Image or video.
    pub kind: MediumKind,
    /// Patch rows `[t · h · w, patch_len]`.
    pub patches: Vec<f32>,
    /// In patches.
    pub grid: PatchGrid,
    /// Seconds from one temporal patch to the next; 0 for an image.
    pub seconds_per_grid: f64,
    /// Times of the frames in the clip, seconds; empty for an image.
    pub frame_times_secs: Vec<f64>,
}

/// What a medium will become, known from its header alone.
#[derive(Clone, Debug, PartialEq)]
pub struct MediumPlan {
    /// Image or video.
    pub kind: MediumKind,
    /// In patches.
    pub grid: PatchGrid,
    /// Tokens in the prompt.
    pub tokens: usize,
    /// Times of the frames that will be read, seconds.
    pub frame_times_secs: Vec<f64>,
}

/// A model family with the configuration of one checkpoint, without weights.
pub trait Family: Send + Sync {
    /// The row's name.
    fn name(&self) -> &'static str;

    /// The language model's sizes.
    fn decoder_config(&self) -> &DecoderConfig;

    /// Standard deviation of new weights.
    fn initializer_range(&self) -> f32;

    /// The published name of a tensor in a file, or `None` for keys that are no weights.
    fn published_name(&self, key: &str) -> Option<String>;

    /// What a medium will become, given its header (see [`probe_medium`]).
    ///
    /// # Errors
    /// Options that exclude every choice, a kind this family does not take.
    fn plan(&self, medium: &MediumRef, header: &MediumInfo, settings: &MediaSettings) -> Result<MediumPlan>;

    /// Decodes a medium.
    ///
    /// # Errors
    /// As [`Self::plan`], and whatever only decoding shows.
    fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput>;

    /// How a medium with this grid appears in the prompt.
    fn tokens(&self, kind: MediumKind, grid: PatchGrid) -> MediumTokens;

    /// Ids that only media may produce: a completion containing one is plain text.
    fn placeholder_ids(&self) -> Vec<u32>;

    /// Positions of a rendered prompt, and the position of the token after it.
    fn positions(&self, len: usize, spans: &[Span], media: &[Arc<MediumInput>]) -> (Vec<Position>, u32);

    /// The network, with weights from `source`.
    ///
    /// # Errors
    /// As the source.
    fn network(&self, source: &mut dyn WeightSource) -> Result<Box<dyn Network>>;
}

/// Tower, projector and decoder with their weights.
pub trait Network: Send + Sync {
    /// The language model.
    fn decoder(&self) -> &Decoder;

    /// A medium through the tower, `[n, tower width]`.
    ///
    /// # Errors
    /// Input that does not fit the tower.
    fn tower<'a>(&'a self, medium: &MediumInput, tape: Option<&mut Segments<'a>>) -> Result<Tensor>;

    /// Tower output through the projector: features `[tokens, h]` in the order of the prompt.
    ///
    /// # Errors
    /// Input that does not fit the projector.
    fn project<'a>(
        &'a self,
        tower: &Tensor,
        medium: &MediumInput,
        tape: Option<&mut Segments<'a>>,
    ) -> Result<Tensor>;
}

/// Finds the family of a checkpoint directory by the `model_type` and `architectures` of its `config.json`.
///
/// # Errors
/// No readable `config.json`, or a model this program does not know.
pub fn open_family(dir: &Path) -> Result<Arc<dyn Family>> {
    let path = dir.join("config.json");
    if !path.is_file() {
        return Err(ModelError::Checkpoint {
            dir: dir.to_path_buf(),
            what: "no config.json; expected a checkpoint directory in the published Hugging Face layout"
                .into(),
        });
    }
    let json = ConfigJson::read(&path)?;
    let model_type = json.get("model_type").and_then(|v| v.as_str()).unwrap_or_default();
    let architectures: Vec<&str> = json
        .get("architectures")
        .and_then(|v| v.as_array())
        .map(|list| list.iter().filter_map(|v| v.as_str()).collect())
        .unwrap_or_default();
    let row = FAMILIES
        .iter()
        .find(|row| row.model_types.contains(&model_type))
        .or_else(|| FAMILIES.iter().find(|row| architectures.iter().any(|a| row.architectures.contains(a))));
    match row {
        Some(row) => Ok((row.open)(dir, &json)?.into()),
        None => {
            let known: Vec<_> = FAMILIES.iter().map(|row| row.name).collect();
            Err(json.error(format!(
                "model_type {model_type:?} with architectures {architectures:?} is not a family of this program; it \
                 knows {}",
                known.join(", ")
            )))
        }
    }
}
