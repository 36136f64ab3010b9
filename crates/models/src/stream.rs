//! Packed streams: groups laid out as `[prompt | completion 1 | … | completion G]`, one after the other.
//!
//! A completion of R tokens contributes its first R − 1 tokens as rows. Its first token is scored at the prompt's last
//! row, which therefore has one target per completion. Every completion continues the prompt's positions on all
//! axes and attends to the whole prompt and to itself.
//!
//! A completion may contain turns of an environment ([`AddedTurn`]). Their tokens are rows that the model reads. They are no
//! targets, so no loss depends on how probable they are.

use std::ops::Range;
use std::sync::Arc;

use omnigrpo_data::MediumRef;
use omnigrpo_ops::{AttentionLayout, Layout, SameExperts, Targets};
use omnigrpo_text::{Span, Turn};

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

/// A turn that an environment added to a completion: tokens that the model read and did not sample.
#[derive(Clone, Debug, PartialEq)]
pub struct AddedTurn {
    /// Index of its first token in the completion, after at least one sampled token.
    pub start: usize,
    /// Tokens and media of the turn. Spans and positions count from its first token.
    pub turn: Arc<Prompt>,
    /// Place of each medium of the turn among the media of the group ([`Prompt::media`] of the group's prompt).
    pub media: Vec<usize>,
    /// Files of its media, in the same order.
    pub sources: Vec<MediumRef>,
    /// The turn as its speaker wrote it. Indices of media count from the turn's first medium of their kind.
    pub said: Turn,
}

impl AddedTurn {
    /// Returns the tokens of the completion that belong to the turn.
    pub fn tokens(&self) -> Range<usize> {
        self.start..self.start + self.turn.ids.len()
    }
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
    /// Rows of each completion.
    pub(crate) own_rows: Vec<Range<usize>>,
    /// Comparison of the rows' experts with those of the rollout, if any.
    pub(crate) experts: Option<Arc<SameExperts>>,
    /// Number of a teacher's tokens that are targets after each scored token.
    teacher_tokens: usize,
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
        Self::with_turns(groups, |_, _| &[])
    }

    /// Lays out groups whose completions contain turns of an environment. `turns` returns those of a completion, in order, given
    /// the indices of its group and of the completion in it.
    ///
    /// # Errors
    /// Returns an error as [`Self::new`] does, or if a turn is not followed by a sampled token or its tokens differ from those of
    /// the completion.
    pub fn with_turns<'t>(
        groups: &[GroupStream],
        turns: impl Fn(usize, usize) -> &'t [AddedTurn],
    ) -> Result<Self> {
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
            own_rows: Vec::new(),
            experts: None,
            teacher_tokens: 0,
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
            stream.push_spans(&prompt.spans, (g, start), Some)?;
            stream.push_first_targets(prompt, start, &group.completions);
            let prompt_key = stream.keys.last().copied().unwrap_or_default();
            let mut first = stream.targets.tokens.len() - copies;
            for (c, completion) in group.completions.iter().enumerate() {
                stream.push_completion((g, completion), turns(g, c), prompt, (first, prompt_key))?;
                first += usize::from(!completion.is_empty());
            }
            let suffixes: Vec<usize> = group.completions.iter().map(|c| c.len().saturating_sub(1)).collect();
            shapes.push((prompt.ids.len(), suffixes));
        }
        stream.layout = Arc::new(AttentionLayout::groups(&shapes).into());
        Ok(stream)
    }

    /// Appends the feature rows of spans that count from row `start`. `place` returns the place of a medium in the group.
    fn push_spans(
        &mut self,
        spans: &[Span],
        (group, start): (usize, usize),
        place: impl Fn(usize) -> Option<usize>,
    ) -> Result<()> {
        let mut used: Vec<(usize, usize)> = Vec::new();
        for span in spans {
            let medium = place(span.medium).ok_or_else(|| {
                ModelError::shape(format!(
                    "packed stream: a turn shows medium {}, which has no place",
                    span.medium
                ))
            })?;
            // Two media of a turn may have the same place. Each of them starts with the first feature.
            let at = used.iter().position(|(own, _)| *own == span.medium).unwrap_or(used.len());
            if at == used.len() {
                used.push((span.medium, 0));
            }
            let feature = used[at].1;
            used[at].1 += span.len;
            self.features.push(FeatureRows {
                group,
                medium,
                row: start + span.start,
                feature,
                len: span.len,
            });
        }
        Ok(())
    }

    /// Appends the targets of the prompt's last row: the first tokens of all completions.
    fn push_first_targets(&mut self, prompt: &Prompt, start: usize, completions: &[&[u32]]) {
        let first = self.targets.tokens.len();
        self.targets.tokens.extend(completions.iter().filter_map(|c| c.first()));
        if self.targets.tokens.len() > first {
            self.targets.rows.push(start + prompt.ids.len() - 1);
            self.targets.offsets.push(self.targets.tokens.len());
        }
    }

    /// Appends a completion. `first` is the index of its first token among the targets, and `key` that of the prompt's last row.
    fn push_completion(
        &mut self,
        (group, ids): (usize, &[u32]),
        turns: &[AddedTurn],
        prompt: &Prompt,
        (first, mut key): (usize, u64),
    ) -> Result<()> {
        let (mut end, mut added) = (0, 0);
        for turn in turns {
            let Range { start, end: next } = turn.tokens();
            if start <= end || next >= ids.len() || ids[start..next] != turn.turn.ids {
                return Err(ModelError::shape(format!(
                    "packed stream: a turn at tokens {start}..{next} of a completion of {} tokens; expected sampled tokens \
                     before and after it, and the turn's own tokens there",
                    ids.len()
                )));
            }
            (end, added) = (next, added + turn.turn.ids.len());
        }
        self.lengths.push(ids.len() - added);
        self.own_rows.push(self.ids.len()..self.ids.len() + ids.len().saturating_sub(1));
        if ids.is_empty() {
            return Ok(());
        }
        self.order.push(first);
        let (mut next, mut turns) = (prompt.next_position, turns.iter().peekable());
        for (t, (&input, &target)) in ids.iter().zip(&ids[1..]).enumerate() {
            if let Some(turn) = turns.next_if(|turn| turn.tokens().end == t) {
                next += turn.turn.next_position;
            }
            match turns.peek().filter(|turn| turn.start <= t) {
                Some(AddedTurn { start, turn, media, .. }) => {
                    if *start == t {
                        self.push_spans(&turn.spans, (group, self.ids.len()), |m| media.get(m).copied())?;
                    }
                    self.positions.push(turn.positions[t - start].map(|at| next + at));
                }
                None => {
                    self.positions.push([next; 3]);
                    next += 1;
                }
            }
            // The last token of a turn predicts a sampled token.
            if turns.peek().is_none_or(|turn| !turn.tokens().contains(&(t + 1))) {
                self.order.push(self.targets.tokens.len());
                self.targets.rows.push(self.ids.len());
                self.targets.tokens.push(target);
                self.targets.offsets.push(self.targets.tokens.len());
            }
            self.ids.push(input);
            self.copies.push(1.0);
            key = next_key(key, input);
            self.keys.push(key);
        }
        Ok(())
    }

    /// Compares the experts of training with those of the rollout. `experts` has those of each completion, as
    /// [`DecoderMemory::take_experts`](crate::DecoderMemory::take_experts) returns them. A completion whose experts are unknown is not
    /// compared.
    #[must_use]
    pub fn comparing_experts<'e>(self, experts: impl Iterator<Item = &'e [u32]>) -> Self {
        let mut known = vec![Vec::new(); self.ids.len()];
        for (rows, marks) in self.own_rows.iter().zip(experts) {
            let blocks = marks.len() / rows.len().max(1);
            let each = marks.chunks_exact(blocks.max(1)).map(<[u32]>::to_vec);
            known[rows.clone()].iter_mut().zip(each).for_each(|(known, marks)| *known = marks);
        }
        let compares = known.iter().any(|marks| !marks.is_empty());
        Self { experts: compares.then(|| Arc::new(SameExperts::new(known))), ..self }
    }

    /// Returns the number of rows whose experts differed in some block since [`Self::comparing_experts`], and that of all compared rows.
    pub fn other_experts(&self) -> [usize; 2] {
        self.experts.as_ref().map_or([0; 2], |experts| experts.counts())
    }

    /// Makes `k` tokens of a teacher targets at each scored token: `[tokens, k]`, completion by completion. Their log-probabilities
    /// and gradients are apart from those of the scored tokens ([`StreamPass::teacher`](crate::StreamPass)).
    ///
    /// # Errors
    /// Returns an error unless there are `k` tokens for each scored token.
    pub fn with_teacher_tokens(mut self, tokens: &[u32], k: usize) -> Result<Self> {
        if tokens.len() != self.order.len() * k || self.teacher_tokens > 0 {
            return Err(ModelError::shape(format!(
                "packed stream: got {} tokens of a teacher; expected {k} for each of {} scored tokens, once",
                tokens.len(),
                self.order.len()
            )));
        }
        let scored = std::mem::take(&mut self.targets.tokens);
        self.targets.tokens = vec![0; scored.len() * (1 + k)];
        for (token, own) in scored.into_iter().zip(self.targets.tokens.chunks_mut(1 + k)) {
            own[0] = token;
        }
        self.targets.offsets.iter_mut().for_each(|at| *at *= 1 + k);
        for (at, own) in self.order.iter_mut().zip(tokens.chunks(k.max(1))) {
            *at *= 1 + k;
            self.targets.tokens[*at + 1..][..own.len()].copy_from_slice(own);
        }
        self.teacher_tokens = k;
        Ok(self)
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.ids.len()
    }

    /// Returns the number of scored tokens of each completion, group by group.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Returns the total number of scored tokens.
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

    /// Reorders values from completion order to target order. Those of the teacher's tokens are `[tokens, k]`, or empty for 0.
    pub(crate) fn by_target(&self, by_completion: &[f32], of_teacher: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; self.targets.tokens.len()];
        for (&i, &x) in self.order.iter().zip(by_completion) {
            out[i] = x;
        }
        let k = self.teacher_tokens.max(1);
        for (&i, own) in self.order.iter().zip(of_teacher.chunks(k)) {
            out[i + 1..][..own.len()].copy_from_slice(own);
        }
        out
    }

    /// Returns the values of the teacher's tokens in completion order, `[tokens, k]`.
    pub(crate) fn of_teacher(&self, by_target: &[f32]) -> Vec<f32> {
        let each = self.order.iter().filter(|_| self.teacher_tokens > 0);
        each.flat_map(|&i| &by_target[i + 1..][..self.teacher_tokens]).copied().collect()
    }

    /// Returns the values of each scored token, `[tokens, k]`, from those of the rows with targets, `[rows, k]`.
    pub(crate) fn of_rows<T: Copy>(&self, by_row: &[T]) -> Vec<T> {
        let k = by_row.len() / self.targets.rows.len().max(1);
        let row = |target: usize| self.targets.offsets.partition_point(|&from| from <= target) - 1;
        let each = self.order.iter().filter(|_| k > 0);
        each.flat_map(|&target| &by_row[row(target) * k..][..k]).copied().collect()
    }

    /// Returns the number of a teacher's tokens at each scored token.
    pub fn teacher_tokens(&self) -> usize {
        self.teacher_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::{MediumInput, MediumShape};
    use omnigrpo_text::{MediumKind, Role};

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
                of_clip: None,
            };
            let spans = vec![Span { medium: 0, start: 1, len: 1 }];
            keys(&[(&Prompt { media: vec![Arc::new(medium)], spans, ..prompt(3) }, vec![&[10, 11]])])
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
        assert_eq!(stream.by_target(&by_completion, &[]), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(stream.lengths(), [3, 1, 0, 2]);
    }

    /// Tokens of an added turn are rows without targets. Positions continue after the turn's own.
    #[test]
    fn added_turns_are_read_and_not_scored() {
        let a = prompt(2);
        // Two tokens and a medium whose positions reach 3, so that the next token has position 4.
        let turn = Arc::new(Prompt {
            ids: vec![50, 51, 51],
            spans: vec![Span { medium: 0, start: 1, len: 2 }],
            positions: vec![[0; 3], [1, 1, 1], [1, 3, 1]],
            next_position: 4,
            ..prompt(3)
        });
        let added = |start, ids: &[u32]| {
            let turn = Arc::new(Prompt { ids: ids.to_vec(), ..(*turn).clone() });
            vec![AddedTurn {
                start,
                turn,
                media: vec![5],
                sources: Vec::new(),
                said: Turn::text(Role::Tool, ""),
            }]
        };
        let turns = added(2, &[50, 51, 51]);
        let groups = [GroupStream { prompt: &a, completions: vec![&[20], &[10, 11, 50, 51, 51, 12, 13]] }];
        let of = |turns: &[AddedTurn]| {
            PackedStream::with_turns(&groups, |g, c| {
                if (g, c) == (0, 1) { turns } else { &[] }.to_vec().leak()
            })
        };
        let stream = of(&turns).unwrap();
        assert_eq!(stream.ids, [0, 1, 10, 11, 50, 51, 51, 12]);
        let own: Vec<_> = stream.positions[2..].iter().map(|p| (p[0], p[1])).collect();
        assert_eq!(own, [(2, 2), (3, 3), (4, 4), (5, 5), (5, 7), (8, 8)]);
        assert_eq!(stream.targets.tokens, [20, 10, 11, 12, 13]);
        assert_eq!(stream.targets.rows, [1, 2, 6, 7]);
        assert_eq!(
            (stream.lengths(), stream.own_rows.iter().map(Range::len).collect()),
            (&[1, 4][..], vec![0, 6])
        );
        assert_eq!(stream.by_completion(&[0.0, 1.0, 2.0, 3.0, 4.0]), [0.0, 1.0, 2.0, 3.0, 4.0]);
        let features: Vec<_> = stream.features.iter().map(|f| (f.medium, f.row, f.len)).collect();
        assert_eq!(features, [(5, 5, 2)]);
        // A turn must stand between sampled tokens, and its tokens are those of the completion.
        for wrong in [added(0, &[10, 11]), added(2, &[50, 51, 51, 12, 13]), added(2, &[51, 51, 51])] {
            assert!(of(&wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_medium_in_two_spans_keeps_its_row_count() {
        let mut p = prompt(6);
        p.media = vec![];
        p.spans = vec![Span { medium: 0, start: 1, len: 2 }, Span { medium: 0, start: 4, len: 1 }];
        p.media.push(Arc::new(crate::MediumInput {
            kind: omnigrpo_text::MediumKind::Image,
            shape: crate::MediumShape::Mel { mels: 1, frames: 1, heard: 1 },
            data: vec![],
            seconds_per_grid: 0.0,
            frame_times_secs: vec![],
            of_clip: None,
        }));
        let stream = PackedStream::new(&[GroupStream { prompt: &p, completions: vec![&[7]] }]).unwrap();
        let rows: Vec<_> = stream.features.iter().map(|f| (f.row, f.feature, f.len)).collect();
        assert_eq!(rows, [(1, 0, 2), (4, 2, 1)]);
    }
}
