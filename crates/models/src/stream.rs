//! Packed streams: groups laid out as `[prompt | completion 1 | … | completion G]`, one after the other.
//!
//! A completion of R tokens contributes its first R − 1 tokens as rows. Its first token is scored at the prompt's last
//! row, which therefore has one target per completion. Every completion continues the prompt's positions on all
//! axes and attends to the whole prompt and to itself.

use std::sync::Arc;

use omnigrpo_ops::{AttentionLayout, Layout, Targets};

use crate::decoder::Position;
use crate::error::{ModelError, Result};
use crate::prompt::Prompt;

/// A prompt and the completions to score under it.
#[derive(Clone, Debug)]
pub struct GroupStream<'a> {
    /// The shared prompt.
    pub prompt: &'a Prompt,
    /// Token ids of the completions, including stop tokens. An empty completion contributes nothing.
    pub completions: Vec<&'a [u32]>,
}

/// A range of rows that contain features of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FeatureRows {
    pub group: usize,
    pub medium: usize,
    /// First row in the stream.
    pub row: usize,
    /// First row among the medium's features.
    pub feature: usize,
    pub len: usize,
}

/// Several groups as one sequence.
#[derive(Clone, Debug)]
pub struct PackedStream {
    pub(crate) ids: Vec<u32>,
    /// Key of each row for the dropout masks: a hash of its prompt and of its tokens up to the row. It does not depend on the
    /// packing.
    pub(crate) keys: Vec<u64>,
    pub(crate) positions: Vec<Position>,
    /// Number of completions to which each row belongs.
    pub(crate) copies: Vec<f32>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) features: Vec<FeatureRows>,
    pub(crate) targets: Targets,
    /// Index in `targets.tokens` of each scored token, completion by completion.
    pub(crate) order: Vec<usize>,
    lengths: Vec<usize>,
}

/// Returns the hash of a sequence with hash `key` that continues with `id`.
pub(crate) fn next_key(key: u64, id: u32) -> u64 {
    (key.rotate_left(23) ^ (u64::from(id) + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl PackedStream {
    /// Lays out groups in the given order.
    ///
    /// # Errors
    /// Returns an error if a prompt is empty or the positions of a span do not add up.
    pub fn new(groups: &[GroupStream]) -> Result<Self> {
        let mut stream = Self {
            ids: Vec::new(),
            keys: Vec::new(),
            positions: Vec::new(),
            copies: Vec::new(),
            layout: Arc::default(),
            features: Vec::new(),
            targets: Targets { offsets: vec![0], ..Targets::default() },
            order: Vec::new(),
            lengths: Vec::new(),
        };
        let mut shapes = Vec::with_capacity(groups.len());
        for (g, group) in groups.iter().enumerate() {
            let prompt = group.prompt;
            let start = stream.ids.len();
            if prompt.ids.is_empty() || prompt.ids.len() != prompt.positions.len() {
                return Err(ModelError::shape(format!(
                    "packed stream: a prompt has {} tokens and {} positions; expected equal numbers above 0",
                    prompt.ids.len(),
                    prompt.positions.len()
                )));
            }
            stream.ids.extend_from_slice(&prompt.ids);
            let copies = group.completions.iter().filter(|c| !c.is_empty()).count();
            stream.copies.resize(stream.ids.len(), copies as f32);
            let mut key = prompt.key();
            for &id in &prompt.ids {
                key = next_key(key, id);
                stream.keys.push(key);
            }
            stream.positions.extend_from_slice(&prompt.positions);
            let mut used = vec![0; prompt.media.len()];
            for span in &prompt.spans {
                let feature = used[span.medium];
                used[span.medium] += span.len;
                stream.features.push(FeatureRows {
                    group: g,
                    medium: span.medium,
                    row: start + span.start,
                    feature,
                    len: span.len,
                });
            }
            stream.push_completions(prompt, start, &group.completions);
            let suffixes: Vec<usize> = group.completions.iter().map(|c| c.len().saturating_sub(1)).collect();
            shapes.push((prompt.ids.len(), suffixes));
        }
        stream.layout = Arc::new(AttentionLayout::groups(&shapes).into());
        Ok(stream)
    }

    fn push_completions(&mut self, prompt: &Prompt, start: usize, completions: &[&[u32]]) {
        // The prompt's last row comes first among the targets: its targets are the first tokens of all completions.
        let first = self.targets.tokens.len();
        self.targets.tokens.extend(completions.iter().filter_map(|c| c.first()));
        if self.targets.tokens.len() > first {
            self.targets.rows.push(start + prompt.ids.len() - 1);
            self.targets.offsets.push(self.targets.tokens.len());
        }
        let mut scored = 0;
        let prompt_key = self.keys.last().copied().unwrap_or_default();
        for completion in completions {
            let mut key = prompt_key;
            self.lengths.push(completion.len());
            if completion.is_empty() {
                continue;
            }
            self.order.push(first + scored);
            scored += 1;
            for (t, (&input, &target)) in completion.iter().zip(&completion[1..]).enumerate() {
                self.order.push(self.targets.tokens.len());
                self.targets.rows.push(self.ids.len());
                self.targets.tokens.push(target);
                self.targets.offsets.push(self.targets.tokens.len());
                self.ids.push(input);
                self.copies.push(1.0);
                key = next_key(key, input);
                self.keys.push(key);
                self.positions.push([prompt.next_position + t as u32; 3]);
            }
        }
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.ids.len()
    }

    /// Returns the number of scored tokens of each completion, group by group.
    #[must_use]
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Returns the total number of scored tokens.
    #[must_use]
    pub fn num_targets(&self) -> usize {
        self.order.len()
    }

    /// Returns the row of the second-to-last token of each completion.
    ///
    /// # Errors
    /// Returns an error if a completion has fewer than two tokens.
    pub(crate) fn last_rows(&self) -> Result<Vec<usize>> {
        let mut end = 0;
        let row = |len: &usize| {
            end += len;
            let target = *self.order.get(end.checked_sub(1)?).filter(|_| *len > 1)?;
            self.targets.rows.get(self.targets.offsets.partition_point(|&from| from <= target) - 1).copied()
        };
        let rows: Option<Vec<usize>> = self.lengths.iter().map(row).collect();
        rows.ok_or_else(|| ModelError::shape("packed stream: a completion has fewer than two tokens"))
    }

    /// Splits values per scored token into those of each completion.
    pub fn each<'n>(&'n self, numbers: &'n [f32]) -> impl Iterator<Item = &'n [f32]> {
        let mut rest = numbers;
        self.lengths.iter().map(move |&len| {
            let (own, others) = rest.split_at(len.min(rest.len()));
            rest = others;
            own
        })
    }

    /// Reorders values from target order to completion order.
    pub(crate) fn by_completion(&self, by_target: &[f32]) -> Vec<f32> {
        self.order.iter().map(|&i| by_target[i]).collect()
    }

    /// Reorders values from completion order to target order.
    pub(crate) fn by_target(&self, by_completion: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; self.order.len()];
        for (&i, &x) in self.order.iter().zip(by_completion) {
            out[i] = x;
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::{MediumInput, MediumShape};
    use omnigrpo_text::{MediumKind, Span};

    fn prompt(len: u32) -> Prompt {
        Prompt {
            ids: (0..len).collect(),
            spans: Vec::new(),
            positions: (0..len).map(|p| [p; 3]).collect(),
            next_position: len,
            media: Vec::new(),
            instruction: Vec::new(),
            text: String::new(),
        }
    }

    /// The key of a row does not depend on the packing. Rows of other prompts have other keys, even after the same tokens.
    #[test]
    fn rows_are_named_by_prompt_and_tokens() {
        let keys = |groups: &[(&Prompt, Vec<&[u32]>)]| {
            let groups: Vec<GroupStream> = groups
                .iter()
                .map(|(prompt, completions)| GroupStream { prompt, completions: completions.clone() })
                .collect();
            PackedStream::new(&groups).unwrap().keys
        };
        let (a, b) = (prompt(3), prompt(4));
        let both = keys(&[(&a, vec![&[10, 11], &[12, 13]]), (&b, vec![&[10, 11]])]);
        assert_eq!(both[..4], keys(&[(&a, vec![&[10, 11]])]));
        assert_eq!(both[5..], keys(&[(&b, vec![&[10, 11]])]));
        let mut distinct = both.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), both.len());
        // The prompts differ only in their pictures.
        let shown = |value: f32| {
            let medium = MediumInput {
                kind: MediumKind::Image,
                shape: MediumShape::Pictures { count: 1, height_px: 20, width_px: 20 },
                data: vec![value; 1200],
                seconds_per_grid: 0.0,
                frame_times_secs: Vec::new(),
            };
            keys(&[(&Prompt { media: vec![Arc::new(medium)], ..prompt(3) }, vec![&[10, 11]])])
        };
        assert_eq!(shown(0.5), shown(0.5));
        assert!(shown(0.5).iter().zip(shown(0.25)).all(|(a, b)| *a != b));
    }

    #[test]
    fn completions_share_the_last_prompt_row() {
        let (a, b) = (prompt(3), prompt(2));
        let groups = [
            GroupStream { prompt: &a, completions: vec![&[10, 11, 12], &[20], &[]] },
            GroupStream { prompt: &b, completions: vec![&[30, 31]] },
        ];
        let stream = PackedStream::new(&groups).unwrap();
        assert_eq!(stream.ids, [0, 1, 2, 10, 11, 0, 1, 30]);
        assert_eq!(stream.positions.iter().map(|p| p[0]).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 0, 1, 2]);
        assert_eq!(stream.targets.rows, [2, 3, 4, 6, 7]);
        assert_eq!(stream.targets.offsets, [0, 2, 3, 4, 5, 6]);
        assert_eq!(stream.targets.tokens, [10, 20, 11, 12, 30, 31]);
        let by_completion = stream.by_completion(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(by_completion, [0.0, 2.0, 3.0, 1.0, 4.0, 5.0]);
        assert_eq!(stream.by_target(&by_completion), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(stream.lengths(), [3, 1, 0, 2]);
    }

    #[test]
    fn a_medium_in_two_spans_keeps_its_row_count() {
        let mut p = prompt(6);
        p.media = vec![];
        p.spans = vec![Span { medium: 0, start: 1, len: 2 }, Span { medium: 0, start: 4, len: 1 }];
        p.media.push(Arc::new(crate::MediumInput {
            kind: omnigrpo_text::MediumKind::Image,
            shape: crate::MediumShape::Mel { mels: 1, frames: 1 },
            data: vec![],
            seconds_per_grid: 0.0,
            frame_times_secs: vec![],
        }));
        let stream = PackedStream::new(&[GroupStream { prompt: &p, completions: vec![&[7]] }]).unwrap();
        let rows: Vec<_> = stream.features.iter().map(|f| (f.row, f.feature, f.len)).collect();
        assert_eq!(rows, [(1, 0, 2), (4, 2, 1)]);
    }
}
