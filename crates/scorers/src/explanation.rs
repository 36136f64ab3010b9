//! `explanation`: `w · clip + (1 − w) · cider`, both clamped to [0, 1].
//!
//! Source: the explanation reward of the ViVQA-X project, with w = 0.5. The text is the content of the completion's first
//! `<explain>` tag. The CLIP part is (score − 15) / 20, where the score is 100 · cosine of the text and the row's first picture.
//! The CIDEr part is the value of the `cider` reward divided by 10.
//!
//! Deliberate differences from the source:
//!
//! * Document frequencies are those of the training references. The source counts within a batch, so CIDEr is 0 for a batch of
//!   one prompt.
//! * All references count.
//! * The CLIP part is limited to 1.
//! * Scores are not stretched over the batch. Stretching gives every batch a 0 and a 1, and makes a reward depend on its
//!   neighbours.
//! * A missing explanation earns 0, although CLIP gives an empty text a positive score.
//!
//! The option `explanation_compat` restores the source's counting and stretching, and removes the limit.

use std::collections::HashMap;
use std::sync::Arc;

use omnigrpo_rewards::{DocumentFrequencies, Reward, RewardError, RewardInput, explanation, references};

use omnigrpo_media::{Limits, probe_image};

use crate::clip_score::{ClipScorer, clip_score};
use crate::error::{CLIP_MODEL, CLIP_WEIGHT, Result, ScorerError};
use crate::options::ScorerOptions;

const NAME: &str = "explanation";
/// CLIP score of unrelated texts, which earns 0. A score of `CLIP_FLOOR + CLIP_SPAN` earns 1.
const CLIP_FLOOR: f64 = 15.0;
const CLIP_SPAN: f64 = 20.0;

struct Explanation {
    clip: Option<ClipScorer>,
    frequencies: Option<Arc<DocumentFrequencies>>,
    clip_weight: f64,
    compat: bool,
}

pub(crate) fn reward(options: &ScorerOptions) -> Result<Box<dyn Reward>> {
    let setting = |what: &str| ScorerError::Setting { reward: NAME, what: what.to_owned() };
    let weight = options.explanation_clip_weight;
    if !(0.0..=1.0).contains(&weight) {
        return Err(setting(&format!("its CLIP share is {weight}; expected a number from 0 to 1")));
    }
    let clip = match &options.clip_model {
        _ if weight == 0.0 => None,
        Some(dir) => {
            let scorer = ClipScorer::load(dir, options.clip_text_model.as_deref(), options.weights.clone())?;
            Some(scorer.with_orientation(options.orientation))
        }
        None => {
            return Err(setting(&format!(
                "it needs a CLIP: give its directory with {CLIP_MODEL}, or 0 as {CLIP_WEIGHT} for CIDEr alone"
            )));
        }
    };
    let frequencies = options.frequencies.clone().filter(|f| f.num_items() >= 2);
    if weight < 1.0 && frequencies.is_none() && !options.explanation_compat {
        return Err(setting(
            "its CIDEr needs document frequencies of at least 2 training items with references (column \
             `explanations`, or an <explain> tag in the solution)",
        ));
    }
    Ok(Box::new(Explanation { clip, frequencies, clip_weight: weight, compat: options.explanation_compat }))
}

impl Reward for Explanation {
    fn name(&self) -> &str {
        NAME
    }

    fn range(&self) -> (f64, f64) {
        (0.0, 1.0)
    }

    fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        let clip = self.clip_parts(batch)?;
        let rows = batch.iter().zip(clip);
        if self.compat {
            return Ok(self.stretched(rows.collect()));
        }
        Ok(rows
            .map(|(input, clip)| {
                let cider = self.cider_part(input)?;
                let clip = clip?.clamp(0.0, 1.0);
                // A missing part has no weight, and a part of weight 0 is not computed.
                let value = self.clip_weight * clip + (1.0 - self.clip_weight) * cider;
                Some(if explanation(input.completion).trim().is_empty() { 0.0 } else { value })
            })
            .collect())
    }

    fn applies(&self, row: &RewardInput<'_>) -> Result<Option<bool>, RewardError> {
        let Some(path) = row.media_paths.first().filter(|_| self.clip.is_some()) else {
            return Ok(Some(self.compat || self.clip.is_none() && self.cider_part(row).is_some()));
        };
        // The header distinguishes a picture from a video or a sound. Damage behind the header is found when the prompt is read.
        probe_image(path, &Limits::default()).map_err(|e| no_picture(0, row, &e))?;
        Ok(Some(self.compat || self.cider_part(row).is_some()))
    }
}

fn no_picture(index: usize, input: &RewardInput<'_>, why: &dyn std::error::Error) -> RewardError {
    RewardError::Row {
        reward: NAME.to_owned(),
        row: format!("{index} (dataset row {}, sample {})", input.key.row, input.key.sample),
        what: format!("the CLIP score wants a picture: {}", omnigrpo_guard::told(why)),
    }
}

impl Explanation {
    /// Returns CIDEr divided by 10, or `None` for a row without references.
    fn cider_part(&self, input: &RewardInput<'_>) -> Option<f64> {
        let Some(frequencies) = self.frequencies.as_ref().filter(|_| self.clip_weight < 1.0) else {
            return Some(0.0);
        };
        let references = references(input.columns, input.solution);
        let text = explanation(input.completion);
        (!references.is_empty()).then(|| (frequencies.score(text, &references) / 10.0).clamp(0.0, 1.0))
    }

    /// Returns `max(0, (score − 15) / 20)` of each row, or `None` for a row without a picture.
    fn clip_parts(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        let Some(clip) = &self.clip else { return Ok(vec![Some(0.0); batch.len()]) };
        let mut texts: Vec<&str> = Vec::new();
        let mut places: HashMap<&str, usize> = HashMap::new();
        for input in batch {
            let text = explanation(input.completion).trim();
            places.entry(text).or_insert_with(|| {
                texts.push(text);
                texts.len() - 1
            });
        }
        let texts = clip.texts(&texts).map_err(|e| e.of_batch(NAME))?;
        let part = |(index, input): (usize, &RewardInput<'_>)| {
            let Some(path) = input.media_paths.first() else { return Ok(None) };
            let picture = clip.picture(path).map_err(|e| no_picture(index, input, &e))?;
            let score = clip_score(&texts[places[explanation(input.completion).trim()]], &picture);
            Ok(Some(((score - CLIP_FLOOR) / CLIP_SPAN).max(0.0)))
        };
        batch.iter().enumerate().map(part).collect()
    }

    /// Computes the source's own form. The explanation in the solution is the only reference, words are counted over the batch,
    /// and CIDEr keeps its scale of 10. The sums are stretched so that the worst row of the batch gets 0 and the best row 1.
    fn stretched(&self, rows: Vec<(&RewardInput<'_>, Option<f64>)>) -> Vec<Option<f64>> {
        let reference =
            |input: &RewardInput<'_>| input.solution.map_or(String::new(), |s| explanation(s).to_owned());
        let mut frequencies = DocumentFrequencies::default();
        rows.iter().for_each(|(input, _)| frequencies.add_item(&[reference(input)]));
        let raw: Vec<f64> = rows
            .iter()
            .map(|(input, clip)| {
                let cider = frequencies.score(explanation(input.completion), &[reference(input)]);
                self.clip_weight * clip.unwrap_or(0.0) + (1.0 - self.clip_weight) * cider
            })
            .collect();
        let low = raw.iter().copied().fold(f64::INFINITY, f64::min);
        let high = raw.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        raw.iter().map(|x| Some(if high > low { (x - low) / (high - low) } else { 0.0 })).collect()
    }
}
