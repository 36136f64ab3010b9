//! The table of model families.
//!
//! To add one: a folder here with an implementation of [`Family`] and [`Network`], and a row in [`FAMILIES`]. The
//! loader, the parity suite and the documentation iterate the table.

pub(crate) mod frames;
pub mod humanomni;
pub mod internvl;
pub mod qwen_vl;
pub mod sound;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use omnigrpo_data::{MediumInfo, MediumOptions, MediumRef, MediumSource};
use omnigrpo_media::audio::probe_audio;
use omnigrpo_media::qwen_vl::PatchGrid;
use omnigrpo_media::{Limits, MediaError, VideoSource, probe_image, probe_video};
use omnigrpo_ops::{Param, Pass, Tape, Var};
use omnigrpo_text::{ChatTemplate, MediumKind, MediumTokens, Span, Turn};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde_json::{Map, Value};

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
    /// A small published checkpoint.
    pub published: &'static str,
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
        published: "Qwen/Qwen2-VL-2B-Instruct",
        model_types: &["qwen2_vl"],
        architectures: &["Qwen2VLForConditionalGeneration"],
        open: |dir, json| qwen_vl::QwenVl::open(dir, json, qwen_vl::Generation::Qwen2),
    },
    FamilyRow {
        name: "qwen2_5_vl",
        doc: "Qwen2.5-VL: window attention in the tower, absolute time in positions",
        source: "arXiv 2502.13923; transformers models/qwen2_5_vl",
        published: "Qwen/Qwen2.5-VL-3B-Instruct",
        model_types: &["qwen2_5_vl"],
        architectures: &["Qwen2_5_VLForConditionalGeneration"],
        open: |dir, json| qwen_vl::QwenVl::open(dir, json, qwen_vl::Generation::Qwen25),
    },
    FamilyRow {
        name: "internvl",
        doc: "InternVL2, 2.5, 3 and Vintern on Qwen2, as published for their own code: tiles, videos as frames",
        source: "arXiv 2412.05271, 2504.10479; OpenGVLab/InternVL internvl_chat",
        published: "OpenGVLab/InternVL3-1B",
        model_types: &["internvl_chat"],
        architectures: &["InternVLChatModel"],
        open: |dir, json| internvl::InternVl::open(dir, json, internvl::Layout::Original),
    },
    FamilyRow {
        name: "internvl_hf",
        doc: "the same models as published for transformers",
        source: "transformers models/internvl",
        published: "OpenGVLab/InternVL3-1B-hf",
        model_types: &["internvl"],
        architectures: &["InternVLForConditionalGeneration"],
        open: |dir, json| internvl::InternVl::open(dir, json, internvl::Layout::Hf),
    },
    FamilyRow {
        name: "humanomni",
        doc: "HumanOmni and R1-Omni: video, sound and text, features steered by the question",
        source: "arXiv 2501.15111, 2503.05379; HumanMLLM/HumanOmni, HumanMLLM/R1-Omni",
        published: "StarJiaxing/R1-Omni-0.5B",
        model_types: &["HumanOmni_qwen2"],
        architectures: &["HumanOmniQwen2ForCausalLM"],
        open: humanomni::HumanOmni::open,
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

/// What a video without an audio track gives where its sound is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissingAudio {
    /// An error: the row is bad.
    #[default]
    Error,
    /// Silence.
    Silence,
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
    /// Whether the frames of videos come in another order than they were filmed in, their times unchanged.
    pub shuffle_frames: bool,
    /// Keys the draw and the order.
    pub seed: u64,
    /// Which pass over the data, from 0: keys the draw.
    pub epoch: u64,
    /// What a file without sound gives.
    pub missing_audio: MissingAudio,
    /// What one medium may cost.
    pub limits: Limits,
    /// Most tiles of an image, for families that tile. What is open follows the checkpoint.
    pub max_tiles: Option<u32>,
}

impl Default for MediaSettings {
    fn default() -> Self {
        Self {
            image: MediumOptions::default(),
            video: MediumOptions::default(),
            rule: FrameRule::Qwen,
            dynamic_sample: false,
            shuffle_frames: false,
            seed: 0,
            epoch: 0,
            missing_audio: MissingAudio::default(),
            limits: Limits::default(),
            max_tiles: None,
        }
    }
}

impl MediaSettings {
    /// The flags of those settings that say something.
    fn given(&self) -> impl Iterator<Item = &'static str> {
        let (image, video) = (&self.image, &self.video);
        [
            ("max_anyres_num", self.max_tiles.is_some()),
            ("min_pixels", image.min_pixels.is_some()),
            ("max_pixels", image.max_pixels.is_some()),
            ("video_min_frame_pixels", video.min_pixels.is_some()),
            ("video_max_frame_pixels", video.max_pixels.is_some()),
            ("total_pixels", video.total_pixels.is_some()),
            ("fps", video.fps.is_some()),
            ("video_min_frames", video.min_frames.is_some()),
            ("video_max_frames", video.max_frames.is_some()),
            ("frame_sampling", self.rule != FrameRule::Qwen),
        ]
        .into_iter()
        .filter_map(|(flag, given)| given.then_some(flag))
    }

    /// A number from `min` to `max` that depends on the seed, the epoch and the medium alone.
    pub(crate) fn draw(&self, source: &MediumSource, min: u32, max: u32) -> u32 {
        let span = u64::from(max.saturating_sub(min)) + 1;
        min + (self.stream(source, self.epoch << 1).next_u64() % span) as u32
    }

    /// Brings decoded frames into the order asked for: as they are, or one that depends on the seed and the medium
    /// alone and is never theirs.
    pub(crate) fn order<T>(&self, source: &MediumSource, frames: &mut [T]) {
        if !self.shuffle_frames || frames.len() < 2 {
            return;
        }
        let mut random = self.stream(source, 1);
        let mut moved = false;
        for last in (1..frames.len()).rev() {
            let pick = (random.next_u64() % (last as u64 + 1)) as usize;
            frames.swap(last, pick);
            moved |= pick != last;
        }
        if !moved {
            frames.rotate_left(1);
        }
    }

    /// Random numbers keyed by the seed and the medium, a stream per use: even ones for draws, 1 for the order.
    fn stream(&self, source: &MediumSource, purpose: u64) -> ChaCha8Rng {
        let mut key = [0u8; 32];
        key[..8].copy_from_slice(&self.seed.to_le_bytes());
        for (i, byte) in format!("{source:?}").bytes().enumerate() {
            let slot = &mut key[8 + i % 24];
            *slot = slot.wrapping_mul(31).wrapping_add(byte);
        }
        let mut random = ChaCha8Rng::from_seed(key);
        random.set_stream(purpose);
        random
    }
}

/// Reads what a medium's header says. Depends on the source alone. A file without an audio track has no sample rate; whether
/// that is an error is for [`Family::plan`] to say.
///
/// # Errors
/// An unreadable medium, or one over a limit, with its path.
pub fn probe_medium(medium: &MediumRef, limits: &Limits) -> Result<MediumInfo> {
    match (medium.kind, &medium.source) {
        (MediumKind::Image, MediumSource::Path(path)) => {
            let info = probe_image(path, limits)?;
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
            };
            let info = probe_video(&source, None, limits)?;
            Ok(MediumInfo {
                width_px: Some(info.width_px),
                height_px: Some(info.height_px),
                num_frames: Some(info.num_frames as u64),
                fps: Some(info.fps),
                duration_secs: Some(info.duration_s),
                sample_rate_hz: None,
            })
        }
        (MediumKind::Audio, MediumSource::Path(path)) => match probe_audio(path, limits) {
            Ok(info) => Ok(MediumInfo {
                duration_secs: info.duration_s,
                sample_rate_hz: Some(info.sample_rate_hz),
                ..MediumInfo::default()
            }),
            Err(MediaError::NoAudioTrack { .. }) => Ok(MediumInfo::default()),
            Err(error) => Err(error.into()),
        },
        (kind, _) => Err(ModelError::prompt(format!("no family here reads this kind of {kind}"))),
    }
}

/// What the numbers of a prepared medium are. Each family makes and reads the shapes of its own towers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediumShape {
    /// Rows of vision patches, `[t · h · w, patch_len]`.
    Patches(PatchGrid),
    /// Pictures of one size, `[count, 3, height, width]`: the tiles of an image, the frames of a video.
    Pictures {
        /// How many.
        count: usize,
        /// Of each, px.
        height_px: usize,
        /// Of each, px.
        width_px: usize,
    },
    /// A log-mel spectrogram, `[mels, frames]`.
    Mel {
        /// Frequency bands.
        mels: usize,
        /// Steps in time.
        frames: usize,
    },
}

impl MediumShape {
    /// The grid of [`Self::Patches`].
    ///
    /// # Errors
    /// Another shape.
    pub fn patches(&self) -> Result<PatchGrid> {
        match self {
            Self::Patches(grid) => Ok(*grid),
            other => Err(ModelError::shape(format!("this tower reads patches, the medium is {other}"))),
        }
    }

    /// Count, height and width of [`Self::Pictures`].
    ///
    /// # Errors
    /// Another shape.
    pub fn pictures(&self) -> Result<[usize; 3]> {
        match self {
            Self::Pictures { count, height_px, width_px } => Ok([*count, *height_px, *width_px]),
            other => Err(ModelError::shape(format!("this tower reads pictures, the medium is {other}"))),
        }
    }

    /// Bands and frames of [`Self::Mel`].
    ///
    /// # Errors
    /// Another shape.
    pub fn mel(&self) -> Result<[usize; 2]> {
        match self {
            Self::Mel { mels, frames } => Ok([*mels, *frames]),
            other => Err(ModelError::shape(format!("this tower reads spectrograms, the medium is {other}"))),
        }
    }
}

impl fmt::Display for MediumShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Patches(grid) => {
                write!(f, "{}×{}×{} patches (time × height × width)", grid.t, grid.h, grid.w)
            }
            Self::Pictures { count, height_px, width_px } => {
                write!(f, "{count} × {height_px}×{width_px} px (pictures, height × width)")
            }
            Self::Mel { mels, frames } => write!(f, "{mels}×{frames} log-mel (bands × frames)"),
        }
    }
}

/// A medium, decoded and resized: the input of a tower. The sound of a clip is a medium of its own, since another tower
/// reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct MediumInput {
    /// Image, video or audio.
    pub kind: MediumKind,
    /// What `data` holds.
    pub shape: MediumShape,
    /// The numbers, normalised as the tower expects them.
    pub data: Vec<f32>,
    /// Seconds from one temporal patch to the next; 0 where the family has none.
    pub seconds_per_grid: f64,
    /// Times of the frames in the clip, seconds; empty for an image.
    pub frame_times_secs: Vec<f64>,
}

/// What a medium will become, known from its header alone.
#[derive(Clone, Debug, PartialEq)]
pub struct MediumPlan {
    /// Image, video or audio.
    pub kind: MediumKind,
    /// What it will be prepared to.
    pub shape: MediumShape,
    /// Tokens in the prompt, counting features only.
    pub tokens: usize,
    /// Times of the frames that will be read, seconds.
    pub frame_times_secs: Vec<f64>,
}

/// A checkpoint in another layout than it was loaded in.
pub struct Converted {
    /// The weights under their names there.
    pub params: Vec<Arc<Param>>,
    /// `config.json`.
    pub config: Value,
    /// Files to write, by name.
    pub files: Vec<(&'static str, String)>,
    /// Files of the old layout that are not copied.
    pub left_out: &'static [&'static str],
}

/// Settings that a family does not read.
#[derive(Clone, Copy, Debug)]
pub struct IdleSettings {
    /// Their names, which are those of the flags.
    pub flags: &'static [&'static str],
    /// Why, and what to set instead.
    pub why: &'static str,
}

/// A tower whose weights may be in a directory of its own.
pub struct Companion {
    /// That directory, if one was found.
    pub dir: Option<PathBuf>,
    /// The flag that gives it.
    pub flag: &'static str,
    /// What its tensors are called in the checkpoint, before [`Self::published`].
    pub prefix: &'static str,
    /// The name of a tensor of that directory below the prefix, or `None` for what is not part of the tower.
    pub published: fn(&str) -> Option<String>,
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

    /// Media settings that this family does not read.
    fn idle_settings(&self) -> IdleSettings;

    /// Whether these settings can be followed; checked once, before any medium is read.
    ///
    /// # Errors
    /// A setting without effect.
    fn check_settings(&self, settings: &MediaSettings) -> Result<()> {
        let IdleSettings { flags, why } = self.idle_settings();
        match settings.given().find(|flag| flags.contains(flag)) {
            Some(flag) => {
                Err(ModelError::prompt(format!("{flag} has no effect on {}: {why}; remove it", self.name())))
            }
            None => Ok(()),
        }
    }

    /// What makes a medium of this kind shorter, for prompts that are too long. `None`: its length is fixed.
    fn shorten(&self, kind: MediumKind) -> Option<&'static str>;

    /// Whether the projector belongs to the vision modules that VLM-R1 freezes, which are named by a part of their names.
    fn projector_is_vision(&self) -> bool {
        true
    }

    /// A tensor's name, or its module's, in the model class that `transformers` builds; adapters are saved under it.
    fn module_name(&self, published: &str) -> String {
        published.to_owned()
    }

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

    /// How a medium of this shape appears in the prompt.
    ///
    /// # Errors
    /// A shape that is not this family's.
    fn tokens(&self, kind: MediumKind, shape: &MediumShape) -> Result<MediumTokens>;

    /// Ids that only media may produce: a completion containing one is plain text.
    fn placeholder_ids(&self) -> Vec<u32>;

    /// Positions of a rendered prompt of `len` tokens, and the position of the token after it. Plain counting unless a
    /// family has axes of its own.
    ///
    /// # Errors
    /// Media whose shape is not this family's.
    fn positions(
        &self,
        len: usize,
        _spans: &[Span],
        _media: &[Arc<MediumInput>],
    ) -> Result<(Vec<Position>, u32)> {
        Ok(((0..len as u32).map(|p| [p; 3]).collect(), len as u32))
    }

    /// The conversation as it is rendered: a family may put white space around media that the row does not place.
    fn arrange(&self, turns: &[Turn]) -> Vec<Turn> {
        turns.to_vec()
    }

    /// Towers that may be in directories of their own.
    fn companions(&self) -> Vec<Companion> {
        Vec::new()
    }

    /// Adjusts the `config.json` of a saved copy.
    fn saved_config(&self, _config: &mut Map<String, Value>) {}

    /// What the projector reads of the question (see [`Network::project`]), as ids of a vocabulary of its own. Most
    /// projectors read nothing of it.
    ///
    /// # Errors
    /// Text that cannot be encoded.
    fn instruction_ids(&self, _turns: &[Turn]) -> Result<Vec<u32>> {
        Ok(Vec::new())
    }

    /// The chat template of the checkpoint in `dir`.
    ///
    /// # Errors
    /// Unreadable files, a template that does not compile.
    fn chat_template(&self, dir: &Path) -> Result<ChatTemplate> {
        Ok(ChatTemplate::from_dir(dir)?)
    }

    /// Tokens that end a completion, whatever the checkpoint's files say.
    fn stop_tokens(&self) -> &'static [&'static str] {
        &[]
    }

    /// The layout the checkpoint is written in.
    fn layout(&self) -> &'static str {
        "hf"
    }

    /// The checkpoint in `dir` with these weights in another layout.
    ///
    /// # Errors
    /// A layout this family does not have; settings it cannot express.
    fn convert(&self, _dir: &Path, _params: &[Arc<Param>], layout: &str) -> Result<Converted> {
        Err(ModelError::layout(format!(
            "layout {layout:?}: checkpoints of {} have one layout, {:?}",
            self.name(),
            self.layout()
        )))
    }

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
    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var>;

    /// Tower output through the projector: features `[tokens, h]` in the order of the prompt. `instruction` is what
    /// [`Family::instruction_ids`] made of the prompt.
    ///
    /// # Errors
    /// Input that does not fit the projector.
    fn project(
        &self,
        tower: &Var,
        medium: &MediumInput,
        instruction: &[u32],
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var>;
}

/// Finds the family of a checkpoint directory by the `model_type` and `architectures` of its `config.json`.
///
/// # Errors
/// No readable `config.json`, or a model this program does not know.
pub fn open_family(dir: &Path) -> Result<Arc<dyn Family>> {
    open_family_with(dir, &Map::new())
}

/// As [`open_family`], with some keys of `config.json` replaced.
///
/// # Errors
/// As [`open_family`].
pub fn open_family_with(dir: &Path, overrides: &Map<String, Value>) -> Result<Arc<dyn Family>> {
    let path = dir.join("config.json");
    if !path.is_file() {
        return Err(ModelError::Checkpoint {
            dir: dir.to_path_buf(),
            what: "no config.json; expected a checkpoint directory in the published Hugging Face layout"
                .into(),
        });
    }
    let mut json = ConfigJson::read(&path)?;
    json.replace(overrides);
    let model_type = json.text("model_type")?.unwrap_or_default();
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
            let known: Vec<_> =
                FAMILIES.iter().map(|row| format!("{} (such as {})", row.name, row.published)).collect();
            Err(json.error(format!(
                "model_type {model_type:?} with architectures {architectures:?} is not a family of this program; use a \
                 checkpoint of one of these: {}",
                known.join(", ")
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of the tower's input: what is read, its shape, and the times.
    fn clip(checkpoint: &str, shuffle_frames: bool, seed: u64) -> MediumInput {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let family = open_family(&golden.join("checkpoints").join(checkpoint)).unwrap();
        let medium = MediumRef {
            kind: MediumKind::Video,
            source: MediumSource::Path(golden.join("media/clip.gif")),
            options: MediumOptions { max_pixels: Some(12_544), ..MediumOptions::default() },
        };
        let settings = MediaSettings { shuffle_frames, seed, ..MediaSettings::default() };
        family.prepare(&medium, &settings).unwrap()
    }

    #[test]
    fn shuffled_frames_keep_their_number_and_times() {
        for checkpoint in ["qwen2_5_vl_tied", "internvl_hf", "humanomni"] {
            let (plain, shuffled) = (clip(checkpoint, false, 1), clip(checkpoint, true, 1));
            assert_ne!(plain.data, shuffled.data, "{checkpoint}");
            assert_eq!(shuffled, clip(checkpoint, true, 1), "{checkpoint}");
            assert_eq!(MediumInput { data: plain.data.clone(), ..shuffled }, plain, "{checkpoint}");
            assert_eq!(clip(checkpoint, false, 2), plain, "{checkpoint}");
        }
    }

    #[test]
    fn a_number_is_drawn_anew_in_every_epoch() {
        let source = MediumSource::Path("clip.mp4".into());
        let draw = |seed: u64, epoch: u64| {
            MediaSettings { seed, epoch, ..MediaSettings::default() }.draw(&source, 3, 6)
        };
        let mut seen = [0; 4];
        for epoch in 0..400 {
            assert_eq!(draw(7, epoch), draw(7, epoch));
            seen[draw(7, epoch) as usize - 3] += 1;
        }
        // Each of the four about a hundred times; the standard deviation is 9.
        assert!(seen.iter().all(|n| (60..140).contains(n)), "{seen:?}");
        assert!((0..50).any(|epoch| draw(7, epoch) != draw(8, epoch)));
    }

    #[test]
    fn an_order_is_never_the_old_one() {
        let source = MediumSource::Path("clip.mp4".into());
        for seed in 0..50 {
            let settings = MediaSettings { shuffle_frames: true, seed, ..MediaSettings::default() };
            for num in 2..5 {
                let plain: Vec<usize> = (0..num).collect();
                let mut order = plain.clone();
                settings.order(&source, &mut order);
                assert_ne!(order, plain);
                order.sort_unstable();
                assert_eq!(order, plain);
            }
            settings.order(&source, &mut [0]);
        }
    }
}
