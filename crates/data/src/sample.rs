//! Dataset row as a conversation, with references to its media, its solution, and every column unchanged.
//!
//! Nothing is decoded here. A medium is a path (checked against its root) and the options for reading it. The final assistant
//! turn is never part of the prompt.

use std::path::PathBuf;
use std::sync::Arc;

use omnigrpo_text::{MediumKind, Part, Role, Turn};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::accepted::accepted_answers;

/// Parsed row of a dataset. The prompt consists of `turns` and `media`; the other fields are for rewards and logs.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Id of the row: the `id` (or `question_id`) column as text, else `dataset:line`. Not necessarily unique.
    pub id: String,
    /// Index of the row in its [`Dataset`](crate::Dataset), `0..len`. It is stable for the same settings, and keys random numbers
    /// and skip lists.
    pub row: u64,
    /// Name of the registry entry, or the file stem.
    pub dataset: Arc<str>,
    /// File and line of the row.
    pub origin: Origin,
    /// Prompt: every turn before the final assistant turn. It is never empty and ends with a user turn.
    pub turns: Vec<Turn>,
    /// Every medium of `turns`, each mentioned exactly once: `Part::Medium { kind, index }` is the `index`-th medium of
    /// that kind in this list.
    pub media: Vec<MediumRef>,
    /// Columns beside the conversation that are part of the prompt: `system`, and `choices` for `options`, `choices` or `A`, `B`, ….
    pub joined: Vec<&'static str>,
    /// True if the prompt is a text that the model continues as it stands, without a chat template. It is the only part of `turns`.
    pub is_text: bool,
    /// Ground truth for rewards, verbatim. It comes from the column named in [`ColumnNames`](crate::ColumnNames), else from the
    /// first of `solution`, `answer`, `ground_truth`, `reward_model.ground_truth`, `answers`, the final assistant turn, `label`.
    /// Values that are not strings are given as JSON text. A list of texts accepts any of them
    /// ([`accepted_answers`](crate::accepted_answers)).
    pub solution: Option<String>,
    /// Source of `solution`: the name of the column, or `(the final turn)`.
    pub solution_from: Option<Arc<str>>,
    /// Target of supervised training: the column `completion`, else the turns of the model in the conversation.
    pub reference: Reference,
    /// Tools that the prompt describes, from the column `tools`, in the format of OpenAI. `None` leaves the choice to the run.
    pub tools: Option<Vec<Value>>,
    /// Columns of the row, and the dataset's default columns that the row lacks.
    pub columns: Map<String, Value>,
    /// Think mode: `On` if a completion is expected to think before it answers.
    pub think: Think,
    /// Completions recorded in the row, for scoring and replay.
    pub completions: Option<Vec<RecordedCompletion>>,
    /// Rewards recorded in the row, one number per completion.
    pub rewards: Option<RecordedRewards>,
}

impl Sample {
    /// Returns the turns after the prompt that supervised training reads: those of the reference, else the solution, of which the
    /// first accepted answer.
    pub fn sft_turns(&self) -> Vec<Turn> {
        match &self.solution {
            Some(solution) if self.reference.later.is_empty() => {
                let first = accepted_answers(solution).and_then(|all| all.into_iter().next());
                vec![Turn::text(Role::Assistant, first.unwrap_or_else(|| solution.clone()))]
            }
            _ => self.reference.later.clone(),
        }
    }

    /// Returns the media of the prompt and of [`Self::sft_turns`].
    pub fn sft_media(&self) -> Vec<MediumRef> {
        self.media.iter().chain(&self.reference.media).cloned().collect()
    }

    /// Returns the text of the last user turn without its media.
    pub fn question(&self) -> String {
        let last = self.turns.iter().rev().find(|turn| turn.role == Role::User);
        last.map(Turn::written).unwrap_or_default()
    }
}

/// Turns of the model that supervised training imitates.
#[derive(Debug, Clone, PartialEq)]
pub struct Reference {
    /// Index of the first turn in [`Sample::turns`] that may be imitated. Turns of the model before it are context.
    pub from: usize,
    /// Turns after [`Sample::turns`]. They are empty or end with a turn of the model. Indices of their media count from the first
    /// medium of their kind in [`Sample::media`].
    pub later: Vec<Turn>,
    /// Media of `later`, which follow [`Sample::media`].
    pub media: Vec<MediumRef>,
}

/// File and line of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// Annotation file.
    pub file: Arc<std::path::Path>,
    /// Line of the row's first character, from 1.
    pub line: u64,
}

/// Expected form of a completion, with or without a `<think>` part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Think {
    /// Completion of the form `<think>…</think><answer>…</answer>`.
    On,
    /// Completion of the form `<answer>…</answer>`.
    Off,
}

/// Medium of a sample: its source and the options for reading it.
#[derive(Debug, Clone, PartialEq)]
pub struct MediumRef {
    /// Kind of the medium: image, video or audio.
    pub kind: MediumKind,
    /// File or frames of the medium.
    pub source: MediumSource,
    /// Options for reading the medium. An option that is `None` follows the run's settings.
    pub options: MediumOptions,
}

/// Source of a medium. Paths are canonical and inside their root (see [`Roots`](crate::Roots)).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum MediumSource {
    /// A file (image, video, animation, sound), or a folder of frames.
    Path(PathBuf),
    /// Still images that form a clip, in time order.
    Frames(Vec<PathBuf>),
}

/// Options for reading a medium. `None` leaves the choice to the run's settings. The value of a message part takes precedence
/// over the value of the row. [`MediumOptions::or`] fills in the defaults of the run.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct MediumOptions {
    /// Frames per second to sample, > 0. For a list of frames, it is the list's own frame rate.
    pub fps: Option<f64>,
    /// Exact number of frames, ≥ 1; excludes `fps`.
    pub nframes: Option<u32>,
    /// Minimum number of frames to sample.
    pub min_frames: Option<u32>,
    /// Maximum number of frames to sample.
    pub max_frames: Option<u32>,
    /// Minimum area of an image or frame, pixels.
    pub min_pixels: Option<u64>,
    /// Maximum area of an image or frame, pixels.
    pub max_pixels: Option<u64>,
    /// Maximum area of all frames together, pixels.
    pub total_pixels: Option<u64>,
    /// Exact height before the division into patches, pixels; only together with `resized_width`.
    pub resized_height: Option<u32>,
    /// Exact width before the division into patches, pixels; only together with `resized_height`.
    pub resized_width: Option<u32>,
    /// Start of the used part of a clip, seconds.
    pub video_start: Option<f64>,
    /// End of the used part of a clip, seconds.
    pub video_end: Option<f64>,
    /// Segments of the clip, each sampled separately.
    pub segments: Option<Segments>,
    /// Index, among the clips of the row, of the clip whose sound this is, if `use_audio_in_video` added it. Families that
    /// interleave a clip with its sound do so for this sound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub of_clip: Option<usize>,
}

impl MediumOptions {
    /// Returns these options with unset values taken from `defaults`. If one of `fps` and `nframes` is set, the default of the
    /// other is ignored.
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
            of_clip: self.of_clip,
        }
    }
}

/// Segments of a clip that was cut together from several videos (the `meta` column).
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Segments {
    /// Number of frames in each segment; their sum is the clip's frame count.
    pub frame_counts: Vec<u32>,
    /// Minimum number of frames to take from each segment.
    pub min_frames: u32,
    /// Maximum number of frames to take from each segment.
    pub max_frames: u32,
    /// Flag for training: draw the number of frames from `min_frames..=max_frames`. Otherwise it is always `max_frames`.
    pub dynamic_sample: bool,
}

/// Completion recorded in a row. At least one of `text` and `completion_ids` is set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RecordedCompletion {
    /// Text of the completion: that of the last turn of the model if there are `turns`.
    pub text: Option<String>,
    /// Tokens of the completion, including the stop token and the turns of an environment; they take precedence over `text`.
    pub completion_ids: Option<Vec<u32>>,
    /// Log-probability of each sampled token under the policy that sampled it.
    pub logprobs: Option<Vec<f64>>,
    /// Turns of an environment, in order.
    pub turns: Vec<RecordedTurn>,
    /// Finish reason, `stop` or `length`, if recorded.
    pub finish_reason: Option<String>,
}

impl RecordedCompletion {
    /// Returns the completion as a column `completion` for supervised training: its text, or messages if it has several turns.
    pub fn answer(&self) -> Value {
        let said = |text: &str| json!({ "role": Role::Assistant.as_str(), "content": text });
        let last = self.text.as_deref().unwrap_or_default();
        if self.turns.is_empty() {
            return json!(last);
        }
        let added = |turn: &RecordedTurn| {
            let answer =
                json!({ "role": turn.said.role.as_str(), "content": content(&turn.said, &turn.media) });
            [said(&turn.model), answer]
        };
        self.turns.iter().flat_map(added).chain([said(last)]).collect()
    }
}

/// Turn of an environment in a recorded completion.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedTurn {
    /// Text of the model's turn before it.
    pub model: String,
    /// Number of tokens of the model's turn, including its stop token, if recorded.
    pub model_tokens: Option<usize>,
    /// The turn. Indices of media count from its first medium of their kind.
    pub said: Turn,
    /// Media of the turn, in order.
    pub media: Vec<MediumRef>,
    /// Number of tokens of the turn, if recorded.
    pub tokens: Option<usize>,
}

/// Returns the content of a message: the parts of a turn as rows have them. `media` are the media of the turn.
pub fn content(turn: &Turn, media: &[MediumRef]) -> Value {
    let part = |part: &Part| match part {
        Part::Text(text) => json!({ "type": "text", "text": text }),
        Part::Call(call) => json!({ "type": "text", "text": call.to_string() }),
        Part::Medium { kind, index } => {
            let source = media.iter().filter(|medium| medium.kind == *kind).nth(*index).map(|m| &m.source);
            let source = match source {
                Some(MediumSource::Path(path)) => json!(path.display().to_string()),
                Some(MediumSource::Frames(frames)) => {
                    frames.iter().map(|frame| json!(frame.display().to_string())).collect()
                }
                None => Value::Null,
            };
            json!({ "type": kind.as_str(), kind.as_str(): source })
        }
    };
    turn.parts.iter().map(part).collect()
}

/// Returns a turn whose media follow those of `before`.
pub fn renumbered(turn: &Turn, before: &[MediumRef]) -> Turn {
    let part = |part: &Part| match part {
        Part::Medium { kind, index } => {
            let earlier = before.iter().filter(|medium| medium.kind == *kind).count();
            Part::Medium { kind: *kind, index: earlier + index }
        }
        other => other.clone(),
    };
    Turn { role: turn.role, parts: turn.parts.iter().map(part).collect() }
}

/// Rewards recorded in a row.
#[derive(Debug, Clone, PartialEq)]
pub enum RecordedRewards {
    /// Total reward of each completion.
    Total(Vec<f64>),
    /// Values of each reward function, one per completion; `None` if the function did not apply.
    Named(Vec<(String, Vec<Option<f64>>)>),
}
