//! Outlines of the rows that a forecast of memory and time is made for.

use std::cmp::Reverse;
use std::sync::Arc;

use omnigrpo_data::{Dataset, MediumKind, Sample};
use omnigrpo_models::{MediumShape, Prompt, PromptBuilder, SftExample};
use omnigrpo_rollout::SamplingParams;

use crate::memory::{Work, media_bytes};
use crate::plan::Objective;
use crate::rows::PreparedRow;

/// Maximum number of rows that represent all rows of a step. The longest rows are used.
pub(crate) const PREPARED: usize = 64;
/// Number of rows, evenly spaced over the dataset, that represent all rows when time is predicted.
pub(crate) const TYPICAL: usize = 16;
/// Limit on the number of rows with media, whose tensors take address space.
const PREPARED_WITH_MEDIA: usize = 8;

/// Outlines of the longest rows of a run: their media have a size and no content.
pub struct Longest {
    samples: Vec<Sample>,
    rows: Vec<PreparedRow>,
    examples: Vec<SftExample>,
    versions: u64,
    /// Maximum numbers of media and of tokens in an answer of an environment, and the outline of the largest answer.
    limits: Option<[usize; 2]>,
    answer: Option<Arc<Prompt>>,
}

impl Longest {
    /// Reads some rows and the headers of their media. Leaves out rows that cannot be used; they are reported when they are
    /// drawn.
    pub fn prepare(prompts: &PromptBuilder, dataset: &Dataset, rows: &[u64], objective: Objective) -> Self {
        let mut with_media = 0;
        let few = |sample: &Sample| {
            with_media += usize::from(!sample.media.is_empty());
            with_media <= PREPARED_WITH_MEDIA
        };
        let samples = rows.iter().filter_map(|&row| dataset.get(row).ok()).take_while(few).collect();
        Self::of(prompts, samples, objective)
    }

    fn of(prompts: &PromptBuilder, samples: Vec<Sample>, objective: Objective) -> Self {
        let mut this = Self {
            samples: Vec::new(),
            rows: Vec::new(),
            examples: Vec::new(),
            versions: 1,
            limits: None,
            answer: None,
        };
        for sample in samples {
            for segments in sample.media.iter().filter_map(|medium| medium.options.segments.as_ref()) {
                if segments.dynamic_sample {
                    let more = segments.max_frames.saturating_sub(segments.min_frames);
                    this.versions = this.versions.max(1 + u64::from(more));
                }
            }
            match objective {
                Objective::Imitate => this.examples.extend(prompts.outline_sft(&sample)),
                Objective::Reinforce => this.rows.extend(PreparedRow::outline(prompts, sample.clone())),
            }
            this.samples.push(sample);
        }
        // The rows are sorted by their prompts only, so the answers have to be included here.
        this.examples.sort_by_key(|example| Reverse(example.prompt.ids.len() + example.target.len()));
        this
    }

    /// Returns the same rows built with other settings of media; `None` if none of them can be used.
    pub fn with(&self, prompts: &PromptBuilder, objective: Objective) -> Option<Self> {
        let other = Self::of(prompts, self.samples.clone(), objective).with_answers(prompts, self.limits);
        let any = other.prompts().next().is_some();
        any.then_some(other)
    }

    /// Counts the answers of an environment, whose limits are those of `sampling`.
    #[must_use]
    pub fn answered(self, prompts: &PromptBuilder, sampling: &SamplingParams) -> Self {
        let tokens = sampling.max_completion_length.saturating_sub(2);
        let limits = sampling.turns.map(|limits| {
            [limits.max_answer_media, limits.max_answer_tokens.map_or(tokens, |most| most.min(tokens))]
        });
        self.with_answers(prompts, limits)
    }

    fn with_answers(self, prompts: &PromptBuilder, limits: Option<[usize; 2]>) -> Self {
        // A model that takes no such turns is refused when its completions begin.
        let answer = limits.and_then(|[media, tokens]| prompts.outline_turn(media, tokens).ok().flatten());
        Self { limits, answer: answer.map(Arc::new), ..self }
    }

    /// Returns the outline of the largest answer of an environment; `None` if there is none with media.
    pub(crate) fn answer(&self) -> Option<Arc<Prompt>> {
        self.answer.clone()
    }

    /// Returns the shapes of the media of the longest row.
    pub fn media(&self) -> Vec<(MediumKind, MediumShape)> {
        let longest = self.prompts().max_by_key(|prompt| prompt.ids.len());
        longest.map_or(Vec::new(), |prompt| prompt.media.iter().map(|m| (m.kind, m.shape)).collect())
    }

    /// Returns the number of tokens of the longest prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompts().map(|prompt| prompt.ids.len()).max().unwrap_or(0)
    }

    /// Returns the maximum number of different frame counts with which a clip of these rows may be drawn.
    pub(crate) fn versions(&self) -> u64 {
        self.versions
    }

    /// Returns the largest size of the decoded media of one row, bytes.
    pub fn media_bytes(&self) -> u64 {
        self.prompts().map(media_bytes).max().unwrap_or(0)
    }

    pub(crate) fn prompts(&self) -> impl Iterator<Item = &Prompt> {
        let examples = self.examples.iter().map(|example| &example.prompt);
        self.rows.iter().map(|row| &*row.prompt).chain(examples)
    }

    /// Returns the number of usable rows.
    pub(crate) fn len(&self) -> usize {
        self.rows.len().max(self.examples.len())
    }

    /// Returns `count` rows from index `first`, longest first. Starts again at the first row if there are too few.
    pub(crate) fn work(&self, first: usize, count: usize, objective: Objective) -> Work {
        match objective {
            Objective::Imitate => {
                Work::Examples(self.examples.iter().cycle().skip(first).take(count).cloned().collect())
            }
            Objective::Reinforce => {
                Work::Rollout(self.rows.iter().cycle().skip(first).take(count).cloned().collect())
            }
        }
    }
}
