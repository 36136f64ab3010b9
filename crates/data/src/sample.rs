//! A dataset row as a conversation, its media by reference, its solution, and every column unchanged.
//!
//! Nothing here is decoded: a medium is a path (checked against its root) plus the options that decide how it will
//! be read. The final assistant turn is never part of the prompt.

use std::path::PathBuf;
use std::sync::Arc;

use omnigrpo_text::{MediumKind, Part, Role, Turn};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One row of a dataset, parsed. The prompt is `turns` with `media`; everything else serves rewards and records.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The row's `id` (or `question_id`) column as text, else `dataset:line`. Not necessarily unique.
    pub id: String,
    /// Index of the row in its [`Dataset`](crate::Dataset), `0..len`; the same for the same settings. Keys random
    /// numbers and skip lists.
    pub row: u64,
    /// Name of the registry entry, or the file stem.
    pub dataset: Arc<str>,
    /// Where the row stands on disk.
    pub origin: Origin,
    /// The prompt: every turn before the final assistant turn, never empty, ends with a user turn.
    pub turns: Vec<Turn>,
    /// Every medium of `turns`, each mentioned exactly once: `Part::Medium { kind, index }` is the `index`-th medium of
    /// that kind in this list.
    pub media: Vec<MediumRef>,
    /// Ground truth for rewards, verbatim: the column that [`ColumnNames`](crate::ColumnNames) names, else the first of
    /// `solution`, `answer`, `ground_truth`, `reward_model.ground_truth`, the final assistant turn, `label`. Values that
    /// are not strings are given as JSON text.
    pub solution: Option<String>,
    /// The column that `solution` is from, or `(the final turn)`.
    pub solution_from: Option<Arc<str>>,
    /// Column `completion`, else the final assistant turn, verbatim: the target of supervised training.
    pub reference_answer: Option<String>,
    /// Every column of the row, and the dataset's default columns where the row lacks one.
    pub columns: Map<String, Value>,
    /// Whether a completion is expected to think before it answers.
    pub think: ThinkMode,
    /// Completions the row brings along (for scoring and replay).
    pub completions: Option<Vec<RecordedCompletion>>,
    /// Rewards the row brings along, one number per completion.
    pub rewards: Option<RecordedRewards>,
}

impl Sample {
    /// Returns the text that supervised training teaches for this row: the final assistant turn, else the solution.
    pub fn sft_target(&self) -> Option<&str> {
        self.reference_answer.as_deref().or(self.solution.as_deref())
    }

    /// Text of the last user turn without its media.
    pub fn question(&self) -> String {
        let last = self.turns.iter().rev().find(|turn| turn.role == Role::User);
        last.into_iter()
            .flat_map(|turn| &turn.parts)
            .filter_map(|part| match part {
                Part::Text(text) => Some(text.as_str()),
                Part::Medium { .. } => None,
            })
            .collect()
    }
}

/// Where a row stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The annotation file.
    pub file: Arc<std::path::Path>,
    /// Line of the row's first character, from 1.
    pub line: u64,
}

/// Whether a completion is expected to have a `<think>` part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ThinkMode {
    /// `<think>…</think><answer>…</answer>`.
    On,
    /// `<answer>…</answer>` only.
    Off,
}

/// One medium of a sample: where it is and how it is to be read.
#[derive(Debug, Clone, PartialEq)]
pub struct MediumRef {
    /// Image, video or audio.
    pub kind: MediumKind,
    /// Where it is.
    pub source: MediumSource,
    /// How it is to be read. What is `None` here follows the run's settings.
    pub options: MediumOptions,
}

/// Where a medium is. Paths are canonical and inside their root (see [`Roots`](crate::Roots)).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum MediumSource {
    /// A file (image, video, animation, sound), or a folder of frames.
    Path(PathBuf),
    /// Still images that make a clip, in time order.
    Frames(Vec<PathBuf>),
}

/// How a medium is to be read. `None` leaves the choice to the run's settings. A message part's own value wins over
/// the row's; defaults of the run go in by [`MediumOptions::or`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MediumOptions {
    /// Frames per second to sample (for a frame list: its own rate), > 0.
    pub fps: Option<f64>,
    /// Exact number of frames, ≥ 1; excludes `fps`.
    pub nframes: Option<u32>,
    /// Fewest frames to sample.
    pub min_frames: Option<u32>,
    /// Most frames to sample.
    pub max_frames: Option<u32>,
    /// Least area of an image or frame, pixels.
    pub min_pixels: Option<u64>,
    /// Greatest area of an image or frame, pixels.
    pub max_pixels: Option<u64>,
    /// Greatest area of all frames together, pixels.
    pub total_pixels: Option<u64>,
    /// Exact height before patching, pixels; only together with `resized_width`.
    pub resized_height: Option<u32>,
    /// Exact width before patching, pixels.
    pub resized_width: Option<u32>,
    /// Start of the used part of a clip, seconds.
    pub video_start: Option<f64>,
    /// End of the used part of a clip, seconds.
    pub video_end: Option<f64>,
    /// The clip is made of segments, each sampled on its own.
    pub segments: Option<Segments>,
}

impl MediumOptions {
    /// These options, with `defaults` for what is open. Where one of `fps` and `nframes` is set, the other's default does
    /// not apply.
    pub fn or(&self, defaults: &Self) -> Self {
        let rate_is_open = self.fps.is_none() && self.nframes.is_none();
        Self {
            fps: self.fps.or(defaults.fps.filter(|_| rate_is_open)),
            nframes: self.nframes.or(defaults.nframes.filter(|_| rate_is_open)),
            min_frames: self.min_frames.or(defaults.min_frames),
            max_frames: self.max_frames.or(defaults.max_frames),
            min_pixels: self.min_pixels.or(defaults.min_pixels),
            max_pixels: self.max_pixels.or(defaults.max_pixels),
            total_pixels: self.total_pixels.or(defaults.total_pixels),
            resized_height: self.resized_height.or(defaults.resized_height),
            resized_width: self.resized_width.or(defaults.resized_width),
            video_start: self.video_start.or(defaults.video_start),
            video_end: self.video_end.or(defaults.video_end),
            segments: self.segments.clone().or_else(|| defaults.segments.clone()),
        }
    }
}

/// The `meta` column of clips that were cut together from several segments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segments {
    /// Frames of each segment; their sum is the clip's frame count.
    pub frame_counts: Vec<u32>,
    /// Fewest frames to take from each segment.
    pub min_frames: u32,
    /// Most frames to take from each segment.
    pub max_frames: u32,
    /// In training, draw the number of frames from `min_frames..=max_frames`; else always `max_frames`.
    pub dynamic_sample: bool,
}

/// A completion that came with the row. At least one of `text` and `completion_ids` is there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RecordedCompletion {
    /// Text.
    pub text: Option<String>,
    /// Tokens, including the stop token; take precedence over `text`.
    pub completion_ids: Option<Vec<u32>>,
    /// Log-probability of each token under the policy that sampled it; as long as `completion_ids`.
    pub logprobs: Option<Vec<f64>>,
    /// `stop` or `length`, where recorded.
    pub finish_reason: Option<String>,
}

/// Rewards that came with the row.
#[derive(Debug, Clone, PartialEq)]
pub enum RecordedRewards {
    /// One total per completion.
    Total(Vec<f64>),
    /// Per reward function, one value per completion; `None` where it did not apply.
    Named(Vec<(String, Vec<Option<f64>>)>),
}
