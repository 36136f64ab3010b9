//! METEOR: a one-to-one alignment of words, precision and recall of the aligned words, and a penalty for a fragmented alignment.
//!
//! Source: Denkowski and Lavie 2014 (METEOR 1.5), with its English parameters α = 0.85, β = 0.2, γ = 0.6. The mean is
//! `P·R / (α·P + (1-α)·R)`, the penalty `γ·(chunks / matches)^β`. The best of several references counts. The score of a corpus
//! is computed from summed statistics. Alignments maximise the number of equal words, then minimise the number of chunks, then
//! the distance. A beam of 40 searches for them, like the reference program.
//!
//! Supported: equal words (weight 1) and equal English stems (weight 0.6). Unsupported, since they need tables of data: WordNet
//! synonyms, paraphrases, and the lower weight of English function words (all words have the same weight).

use std::cmp::Reverse;

use rust_stemmers::{Algorithm, Stemmer};

const ALPHA: f64 = 0.85;
const BETA: f64 = 0.2;
const GAMMA: f64 = 0.6;
const STEM_WEIGHT: f64 = 0.6;
const BEAM: usize = 40;
/// Maximum number of aligned words and marks of a text. A text of 150 words seldom has more.
const MAX_TOKENS: usize = 320;

/// Splits a text into lower-case words, as METEOR's normalizer does. The normalizer recognises Latin letters up to ž and Cyrillic
/// letters. Other letters, such as the "ế" of "tiếng", become separate words, as in published scores. Marks become separate words
/// too, except a hyphen between letters (a space) and a point or comma between digits.
pub(super) fn words(text: &str) -> Vec<String> {
    fn is_letter(c: char) -> bool {
        matches!(c, 'A'..='Z' | 'a'..='z' | 'À'..='Ö' | 'Ø'..='ö' | 'ø'..='ž' | 'Ѐ'..='ӿ' | 'Ԁ'..='ԧ')
    }
    let chars: Vec<char> = text.chars().collect();
    let mut spaced = String::with_capacity(text.len() + 8);
    for (i, &c) in chars.iter().enumerate() {
        let around = |is: fn(char) -> bool| {
            i > 0 && is(chars[i - 1]) && chars.get(i + 1).is_some_and(|&next| is(next))
        };
        if is_letter(c) || c.is_ascii_digit() || (matches!(c, '.' | ',') && around(|c| c.is_ascii_digit())) {
            spaced.extend(c.to_lowercase());
        } else if c.is_whitespace() || (c == '-' && around(is_letter)) {
            spaced.push(' ');
        } else {
            spaced.push(' ');
            spaced.extend(c.to_lowercase());
            spaced.push(' ');
        }
    }
    spaced.split_whitespace().take(MAX_TOKENS).map(str::to_owned).collect()
}

/// Counts of a score, which are summed over a corpus.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Statistics {
    prediction_words: f64,
    reference_words: f64,
    matches: f64,
    weighted_matches: f64,
    chunks: f64,
}

impl std::ops::AddAssign for Statistics {
    fn add_assign(&mut self, other: Self) {
        self.prediction_words += other.prediction_words;
        self.reference_words += other.reference_words;
        self.matches += other.matches;
        self.weighted_matches += other.weighted_matches;
        // A segment that equals its reference has no penalty, also within the sum.
        self.chunks += if other.is_whole() { 0.0 } else { other.chunks };
    }
}

impl Statistics {
    fn is_whole(&self) -> bool {
        self.chunks == 1.0 && self.matches == self.prediction_words && self.matches == self.reference_words
    }

    /// Returns the score, 0..1.
    pub fn score(&self) -> f64 {
        if self.weighted_matches == 0.0 {
            return 0.0;
        }
        let precision = self.weighted_matches / self.prediction_words;
        let recall = self.weighted_matches / self.reference_words;
        let mean = precision * recall / (ALPHA * precision + (1.0 - ALPHA) * recall);
        let penalty = if self.is_whole() { 0.0 } else { GAMMA * (self.chunks / self.matches).powf(BETA) };
        mean * (1.0 - penalty)
    }
}

/// Returns the statistics for the reference with the best score.
pub(super) fn best(prediction: &[String], references: &[Vec<String>]) -> Statistics {
    let stemmer = Stemmer::create(Algorithm::English);
    let stems = |words: &[String]| -> Vec<String> {
        words.iter().map(|word| stemmer.stem(word).into_owned()).collect()
    };
    let prediction_stems = stems(prediction);
    let mut best: Option<Statistics> = None;
    for reference in references {
        let aligned = align(prediction, &prediction_stems, reference, &stems(reference));
        if best.is_none_or(|best| aligned.score() > best.score()) {
            best = Some(aligned);
        }
    }
    best.unwrap_or_else(|| Statistics { prediction_words: prediction.len() as f64, ..Statistics::default() })
}

/// An alignment of the first words of the reference.
#[derive(Debug, Clone, Copy, Default)]
struct Path {
    used: [u64; MAX_TOKENS.div_ceil(64)],
    equal: usize,
    stem: usize,
    chunks: usize,
    distance: usize,
    /// Index after the prediction's word that matched the last reference word.
    end: Option<usize>,
}

impl Path {
    fn rank(&self) -> (Reverse<usize>, usize, usize) {
        (Reverse(self.equal), self.chunks, self.distance)
    }
}

/// Kind of match of two words. The better kind is first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Match {
    Equal,
    Stem,
}

fn align(
    prediction: &[String],
    prediction_stems: &[String],
    reference: &[String],
    stems: &[String],
) -> Statistics {
    let matched = |at: usize, i: usize| {
        let equal = prediction[i] == reference[at];
        if equal { Some(Match::Equal) } else { (prediction_stems[i] == stems[at]).then_some(Match::Stem) }
    };
    let coverage: Vec<usize> = (0..prediction.len())
        .map(|i| (0..reference.len()).filter(|&at| matched(at, i).is_some()).count())
        .collect();
    let mut paths = vec![Path::default()];
    for at in 0..reference.len() {
        // Equal words precede equal stems. The first of equally good alignments is kept.
        let mut matches: Vec<(usize, Match)> =
            (0..prediction.len()).filter_map(|i| Some((i, matched(at, i)?))).collect();
        matches.sort_by_key(|&(_, kind)| kind);
        let certain = matches!(matches[..], [(i, _)] if coverage[i] == 1);
        let mut next = Vec::with_capacity(paths.len() * 2);
        for mut path in paths {
            for &(i, kind) in &matches {
                if path.used[i / 64] >> (i % 64) & 1 == 1 {
                    continue;
                }
                let mut taken = path;
                taken.used[i / 64] |= 1 << (i % 64);
                taken.equal += usize::from(kind == Match::Equal);
                taken.stem += usize::from(kind == Match::Stem);
                taken.chunks += usize::from(path.end.is_some_and(|end| end != i));
                taken.end = Some(i + 1);
                // METEOR 1.5 adds the distance to the previous path, so that it affects later candidates.
                if certain {
                    taken.distance += at.abs_diff(i)
                } else {
                    path.distance += at.abs_diff(i)
                }
                next.push(taken);
            }
            if !certain {
                path.chunks += usize::from(path.end.take().is_some());
                next.push(path);
            }
        }
        next.sort_by_key(Path::rank);
        next.truncate(BEAM);
        paths = next;
    }
    for path in &mut paths {
        path.chunks += usize::from(path.end.take().is_some());
    }
    paths.sort_by_key(Path::rank);
    let best = paths.first().copied().unwrap_or_default();
    Statistics {
        prediction_words: prediction.len() as f64,
        reference_words: reference.len() as f64,
        matches: (best.equal + best.stem) as f64,
        weighted_matches: best.equal as f64 + STEM_WEIGHT * best.stem as f64,
        chunks: best.chunks as f64,
    }
}
