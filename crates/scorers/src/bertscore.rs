//! `bertscore`: similarity of meaning between a text and its reference, measured token by token.
//!
//! Each token is matched with the most similar token of the compared text, by the cosine of contextual embeddings. The mean over
//! the candidate's tokens is the precision, the mean over the reference's tokens the recall. Start and end tokens can be matched
//! but have no weight. Source: arXiv 1904.09675 and its package `bert_score` 0.3.13, whose values these are. Difference:
//! sequences are not padded. A token with only negative similarities keeps the largest of them, where the package may take the 0
//! of a padding token.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use omnigrpo_guard::inside;
use omnigrpo_models::FrozenWeights;
use omnigrpo_models::encoders::bert::Bert;
use omnigrpo_ops::{Pass, Tape};
use omnigrpo_rewards::{Reward, RewardError, RewardInput, explanation, references};
use omnigrpo_text::Tokenizer;

use crate::error::{BERTSCORE_MODEL, Result, ScorerError};
use crate::options::ScorerOptions;
use crate::sentence::framed;

const NAME: &str = "bertscore";
/// Number of texts encoded in one batch.
const TEXTS_AT_ONCE: usize = 16;
/// Maximum size of a baseline file in bytes. The file has one line per layer.
const MAX_BASELINE_BYTES: u64 = 1 << 20;

/// Precision, recall and their harmonic mean. Each is at most 1 before rescaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BertScore {
    /// Precision over the candidate's tokens.
    pub precision: f64,
    /// Recall over the reference's tokens.
    pub recall: f64,
    /// `2 P R / (P + R)`
    pub f1: f64,
}

/// A text encoder that scores the similarity of texts.
pub struct BertScorer {
    bert: Bert,
    tokenizer: Tokenizer,
    layer: usize,
    /// Ids of the start and end tokens.
    frame: Vec<u32>,
    idf: Option<Idf>,
    baseline: Option<[f64; 3]>,
}

struct Idf {
    num_texts: f64,
    counts: HashMap<u32, f64>,
}

/// Tokens of a text and their embeddings `[t, c]`, each of length 1.
struct Embedded {
    ids: Vec<u32>,
    rows: Vec<f32>,
}

impl BertScorer {
    /// Loads a directory. The embeddings are the output of the first `layer` blocks, or of all blocks by default.
    ///
    /// # Errors
    /// Returns an error if a file is unreadable, the architecture is unsupported, or the model has fewer than `layer` blocks.
    pub fn load(dir: &Path, layer: Option<usize>, how: impl Into<FrozenWeights>) -> Result<Self> {
        let bert = Bert::load(dir, how)?;
        let layers = bert.config().sizes.layers;
        let layer = layer.unwrap_or(layers);
        if layer > layers {
            let what = format!("layer {layer} is asked for, the model has {layers}");
            return Err(ScorerError::Setting { reward: NAME, what });
        }
        let tokenizer = Tokenizer::from_dir(dir)?;
        let frame = tokenizer.encode_framed("")?;
        Ok(Self { bert, tokenizer, layer, frame, idf: None, baseline: None })
    }

    /// Weights every token by its inverse document frequency in `texts`.
    ///
    /// # Errors
    /// Returns an error if a text cannot be tokenised.
    pub fn with_idf(mut self, texts: &[&str]) -> Result<Self> {
        let mut counts = HashMap::new();
        for text in texts {
            let ids: HashSet<u32> = self.ids(&[text])?.into_iter().flatten().collect();
            ids.into_iter().for_each(|id| *counts.entry(id).or_insert(0.0) += 1.0);
        }
        self.idf = Some(Idf { num_texts: texts.len() as f64, counts });
        Ok(self)
    }

    /// Rescales scores by the scores of random pairs, from a file of `LAYER,P,R,F` lines in the package's format.
    ///
    /// # Errors
    /// Returns an error if the file has no line for the layer, or a value is not a number.
    pub fn with_baseline(mut self, path: &Path) -> Result<Self> {
        let fail = |what: String| ScorerError::File { path: path.to_path_buf(), what };
        let text = inside::read_named(path, MAX_BASELINE_BYTES).map_err(ScorerError::io(path))?;
        let line = text.lines().map(|line| line.split([',', '\t']).map(str::trim).collect::<Vec<_>>());
        let found = line.into_iter().find(|cells| cells[0].parse() == Ok(self.layer));
        let numbers = found.and_then(|cells| {
            let numbers: Option<Vec<f64>> = cells[1..].iter().map(|cell| cell.parse().ok()).collect();
            numbers.and_then(|list| <[f64; 3]>::try_from(list).ok())
        });
        let usable = |list: &[f64; 3]| list.iter().all(|x| x.is_finite() && *x < 1.0);
        self.baseline = Some(
            numbers
                .filter(usable)
                .ok_or_else(|| fail(format!("no line `{},P,R,F` with three numbers below 1", self.layer)))?,
        );
        Ok(self)
    }

    /// Scores each candidate against its references. Each value is that of the best reference.
    ///
    /// # Errors
    /// Returns an error if a text cannot be tokenised.
    pub fn score(&self, pairs: &[(&str, Vec<&str>)]) -> Result<Vec<BertScore>> {
        let mut texts: Vec<&str> = Vec::new();
        let mut places: HashMap<&str, usize> = HashMap::new();
        for (candidate, references) in pairs {
            for text in std::iter::once(candidate).chain(references).map(|text| text.trim()) {
                places.entry(text).or_insert_with(|| {
                    texts.push(text);
                    texts.len() - 1
                });
            }
        }
        let embedded = self.embed(&texts)?;
        let of = |text: &str| &embedded[places[text.trim()]];
        Ok(pairs
            .iter()
            .map(|(candidate, references)| {
                let scores = references.iter().map(|reference| self.compare(of(candidate), of(reference)));
                scores.reduce(best).unwrap_or(BertScore { precision: 0.0, recall: 0.0, f1: 0.0 })
            })
            .collect())
    }

    fn ids(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>> {
        framed(&self.tokenizer, texts, self.bert.config().max_tokens())
    }

    fn embed(&self, texts: &[&str]) -> Result<Vec<Embedded>> {
        let c = self.bert.config().sizes.hidden;
        let mut out = Vec::with_capacity(texts.len());
        for some in texts.chunks(TEXTS_AT_ONCE) {
            let ids = self.ids(some)?;
            let slices: Vec<&[u32]> = ids.iter().map(Vec::as_slice).collect();
            let hidden = self.bert.hidden(&slices, self.layer, &Pass::default(), &mut Tape::off())?;
            let mut rows = hidden.into_rows().into_vec();
            for row in rows.chunks_exact_mut(c) {
                let norm = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt().max(1e-12);
                row.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
            }
            let mut at = 0;
            for ids in ids {
                let end = at + ids.len() * c;
                out.push(Embedded { ids, rows: rows[at..end].to_vec() });
                at = end;
            }
        }
        Ok(out)
    }

    fn compare(&self, candidate: &Embedded, reference: &Embedded) -> BertScore {
        let c = self.bert.config().sizes.hidden;
        let frame = self.frame.len();
        let (mut precision, mut recall, mut f1) = (0.0, 0.0, 0.0);
        // A text without tokens scores 0.
        if candidate.ids.len() > frame && reference.ids.len() > frame {
            let mut best_p = vec![f64::NEG_INFINITY; candidate.ids.len()];
            let mut best_r = vec![f64::NEG_INFINITY; reference.ids.len()];
            for (a, p) in candidate.rows.chunks_exact(c).zip(&mut best_p) {
                for (b, r) in reference.rows.chunks_exact(c).zip(&mut best_r) {
                    let cosine = f64::from(a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>());
                    *p = p.max(cosine);
                    *r = r.max(cosine);
                }
            }
            precision = self.mean(&candidate.ids, &best_p);
            recall = self.mean(&reference.ids, &best_r);
            if precision + recall != 0.0 {
                f1 = 2.0 * precision * recall / (precision + recall);
            }
        }
        if let Some(baseline) = self.baseline {
            let rescaled = |x: f64, b: f64| (x - b) / (1.0 - b);
            precision = rescaled(precision, baseline[0]);
            recall = rescaled(recall, baseline[1]);
            f1 = rescaled(f1, baseline[2]);
        }
        BertScore { precision, recall, f1 }
    }

    /// Returns the weighted mean, or 0 if no token has a weight.
    fn mean(&self, ids: &[u32], values: &[f64]) -> f64 {
        let weight = |id: &u32| match &self.idf {
            Some(idf) => {
                let count = idf.counts.get(id).copied().unwrap_or(0.0);
                ((idf.num_texts + 1.0) / (count + 1.0)).ln()
            }
            None => f64::from(u8::from(!self.frame.contains(id))),
        };
        let (mut sum, mut total) = (0.0, 0.0);
        for (id, value) in ids.iter().zip(values) {
            let weight = weight(id);
            sum += weight * value;
            total += weight;
        }
        if total > 0.0 { sum / total } else { 0.0 }
    }
}

fn best(a: BertScore, b: BertScore) -> BertScore {
    BertScore { precision: a.precision.max(b.precision), recall: a.recall.max(b.recall), f1: a.f1.max(b.f1) }
}

/// F1 of the `<explain>` text with the best reference, clamped to [0, 1]. A row without references has the value `None`.
struct BertScoreReward(BertScorer);

pub(crate) fn reward(options: &ScorerOptions) -> Result<Box<dyn Reward>> {
    let Some(dir) = &options.bertscore_model else {
        let what = format!("it needs a text encoder: give its directory with {BERTSCORE_MODEL}");
        return Err(ScorerError::Setting { reward: NAME, what });
    };
    let mut scorer = BertScorer::load(dir, options.bertscore_layer, options.weights.clone())?;
    if options.bertscore_idf {
        scorer = scorer.with_idf(&options.references.iter().map(String::as_str).collect::<Vec<_>>())?;
    }
    if let Some(path) = &options.bertscore_baseline {
        scorer = scorer.with_baseline(path)?;
    }
    Ok(Box::new(BertScoreReward(scorer)))
}

impl Reward for BertScoreReward {
    fn name(&self) -> &str {
        NAME
    }

    fn range(&self) -> (f64, f64) {
        (0.0, 1.0)
    }

    fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        let pairs: Vec<(&str, Vec<&str>)> = batch
            .iter()
            .map(|input| (explanation(input.completion), references(input.columns, input.solution)))
            .collect();
        let scores = self.0.score(&pairs).map_err(|e| e.of_batch(NAME))?;
        let value = |(score, (_, references)): (BertScore, &(&str, Vec<&str>))| {
            (!references.is_empty()).then(|| score.f1.clamp(0.0, 1.0))
        };
        Ok(scores.into_iter().zip(&pairs).map(value).collect())
    }

    fn applies(&self, row: &RewardInput<'_>) -> Result<Option<bool>, RewardError> {
        Ok(Some(!references(row.columns, row.solution).is_empty()))
    }
}
