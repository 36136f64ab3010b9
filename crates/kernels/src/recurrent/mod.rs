//! Layers that carry a state from each row of a sequence to the next: the gated delta rule and causal convolution.
//!
//! [`Segments`] says which rows of a packed stream follow which. A stream of a prompt and its completions has a segment for the
//! prompt, and one for each completion, which continues the state that the prompt ends with. Gradients of that state add up over
//! the completions, in their order, and flow back through the prompt once. No value of a completion reaches another one.

mod conv;
mod delta;
mod gates;

use std::collections::HashMap;
use std::ops::Range;

use thiserror::Error;

pub use conv::{causal_backward, causal_forward, causal_state, causal_steps};
pub(crate) use delta::Scratch as DeltaScratch;
pub use delta::{CHUNK, DeltaShape, delta_backward, delta_forward, delta_steps};
pub use gates::{gates_backward, gates_forward};

use crate::attention::AttentionLayout;

/// Consecutive rows of a stream that belong to one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    pub rows: Range<usize>,
    /// Index of the segment that this one continues, or `None` if the sequence starts here.
    pub after: Option<usize>,
    /// Number of segments before this one in its sequence.
    pub(crate) level: usize,
    /// Index of the state after the first chunk among the states that the delta rule keeps.
    first_state: usize,
    /// Number of these states.
    states: usize,
}

/// The sequences of a stream: segments that cover its rows in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segments {
    all: Vec<Segment>,
}

/// Rows of a batch that continue a sequence, and the state of the sequence, which is moved on by them.
#[derive(Debug)]
pub struct Continued<'a> {
    pub rows: Range<usize>,
    pub state: &'a mut [f32],
}

/// Returns true if the parts cover `rows` rows in order.
fn covers(parts: &[Continued], rows: usize) -> bool {
    let mut end = 0;
    parts.iter().all(|part| part.rows.start == std::mem::replace(&mut end, part.rows.end)) && end == rows
}

/// Error of a layout that does not describe sequences.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "recurrent layer: query rows {queries:?} see key rows {keys:?}; expected the next rows of the stream, which see themselves \
     causally, and before them all rows of the sequence that they continue"
)]
pub struct SegmentError {
    queries: Range<usize>,
    keys: Vec<Range<usize>>,
}

impl Segments {
    /// Reads the sequences of `rows` rows from the pattern of attention over the same stream.
    ///
    /// # Errors
    /// Returns an error if the ranges do not cover the rows in order, or if a range does not see exactly the rows before it in
    /// its own sequence.
    pub fn of(layout: &AttentionLayout, rows: usize) -> Result<Self, SegmentError> {
        let mut all: Vec<Segment> = Vec::with_capacity(layout.ranges.len());
        // Segments by their key ranges, which identify the sequence up to their end.
        let mut known: HashMap<Vec<Range<usize>>, usize> = HashMap::new();
        let mut end = 0;
        for range in &layout.ranges {
            let error = || SegmentError { queries: range.queries.clone(), keys: range.keys.clone() };
            if range.queries.is_empty() {
                continue;
            }
            let keys: Vec<_> = range.keys.iter().filter(|keys| !keys.is_empty()).cloned().collect();
            let Some((own, before)) = keys.split_last() else { return Err(error()) };
            let alone = range.queries.len() == 1;
            if *own != range.queries || own.start != end || !(range.causal || alone) {
                return Err(error());
            }
            let after = match before {
                [] => None,
                before => Some(*known.get(before).ok_or_else(error)?),
            };
            end = own.end;
            let level = after.map_or(0, |after| all[after].level + 1);
            known.insert(keys, all.len());
            all.push(Segment { rows: range.queries.clone(), after, level, first_state: 0, states: 0 });
        }
        if end != rows {
            return Err(SegmentError { queries: end..rows, keys: Vec::new() });
        }
        let mut segments = Self { all };
        let continued: Vec<usize> = segments.all.iter().filter_map(|segment| segment.after).collect();
        segments.number_states(|s| continued.contains(&s));
        Ok(segments)
    }

    /// Creates one sequence of `rows` rows, whose last state is kept.
    #[must_use]
    pub fn one(rows: usize) -> Self {
        let segment = Segment { rows: 0..rows, after: None, level: 0, first_state: 0, states: 0 };
        let mut segments = Self { all: if rows == 0 { Vec::new() } else { vec![segment] } };
        segments.number_states(|_| true);
        segments
    }

    /// Numbers the kept states: those between chunks, and the last one of the segments that `keeps_last` selects.
    fn number_states(&mut self, keeps_last: impl Fn(usize) -> bool) {
        let mut next = 0;
        for (s, segment) in self.all.iter_mut().enumerate() {
            let between = segment.rows.len().div_ceil(CHUNK) - 1;
            (segment.first_state, segment.states) = (next, between + usize::from(keeps_last(s)));
            next += segment.states;
        }
    }

    /// Returns the segments, in the order of their rows.
    #[must_use]
    pub fn all(&self) -> &[Segment] {
        &self.all
    }

    /// Returns the number of rows of the stream.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.all.last().map_or(0, |segment| segment.rows.end)
    }

    /// Returns the number of states that the delta rule keeps: the state after each chunk of [`CHUNK`] rows, without the last one
    /// of a segment that no other segment continues.
    #[must_use]
    pub fn states(&self) -> usize {
        self.all.last().map_or(0, |segment| segment.first_state + segment.states)
    }

    /// Returns the number of chunks.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.all.iter().map(|segment| segment.rows.len().div_ceil(CHUNK)).sum()
    }

    /// Returns the index of the state after a segment among the kept states, or `None` if it is not kept.
    #[must_use]
    pub fn last_state(&self, segment: usize) -> Option<usize> {
        let segment = self.all.get(segment)?;
        Self::state_after(segment, segment.rows.len().div_ceil(CHUNK) - 1)
    }

    /// Returns the index of the state before chunk `chunk` of a segment, or `None` if the state is zero.
    #[must_use]
    pub fn state_before(&self, segment: &Segment, chunk: usize) -> Option<usize> {
        match (chunk, segment.after) {
            (0, None) => None,
            (0, Some(after)) => Some(self.all[after].first_state + self.all[after].states - 1),
            (chunk, _) => Some(segment.first_state + chunk - 1),
        }
    }

    /// Returns the index of the state after chunk `chunk` of a segment, or `None` if it is not kept.
    #[must_use]
    pub fn state_after(segment: &Segment, chunk: usize) -> Option<usize> {
        (chunk < segment.states).then_some(segment.first_state + chunk)
    }

    /// Returns the segments by level. A segment continues one of an earlier level.
    #[must_use]
    pub fn levels(&self) -> Vec<Vec<usize>> {
        let mut levels = Vec::new();
        for (s, segment) in self.all.iter().enumerate() {
            levels.resize(levels.len().max(segment.level + 1), Vec::new());
            levels[segment.level].push(s);
        }
        levels
    }

    /// Returns the row that is `back` rows before the first row of a segment in its sequence, or `None` if the sequence is
    /// shorter.
    #[must_use]
    pub fn row_before(&self, segment: &Segment, back: usize) -> Option<usize> {
        let before = &self.all[segment.after?];
        match back.checked_sub(before.rows.len() + 1) {
            None => Some(before.rows.end - back),
            Some(rest) => self.row_before(before, rest + 1),
        }
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // one key range is meant, as in a layout
mod tests {
    use super::*;
    use crate::attention::QueryRange;

    #[test]
    fn a_group_is_a_prompt_and_what_continues_it() {
        let layout = AttentionLayout::groups(&[(2, vec![1, 0, 130]), (65, Vec::new())]);
        let segments = Segments::of(&layout, 198).unwrap();
        let seen: Vec<_> = segments.all.iter().map(|s| (s.rows.clone(), s.after, s.states)).collect();
        // The prompt keeps its last state; its completions and the second prompt do not.
        let expected = [(0..2, None, 1), (2..3, Some(0), 0), (3..133, Some(0), 2), (133..198, None, 1)];
        assert_eq!(seen, expected);
        assert_eq!((segments.states(), segments.chunks(), segments.rows()), (4, 7, 198));
        assert_eq!(segments.levels(), [vec![0, 3], vec![1, 2]]);
        let rows = |s: usize| [1, 2, 3].map(|back| segments.row_before(&segments.all[s], back));
        assert_eq!([rows(0), rows(2)], [[None; 3], [Some(1), Some(0), None]]);
        assert_eq!(Segments::one(64).states(), 1);
        assert_eq!(Segments::one(0), Segments::of(&AttentionLayout::default(), 0).unwrap());
    }

    /// A turn continues a completion: rows before a segment may belong to several segments.
    #[test]
    fn a_segment_may_continue_one_that_continues_another() {
        let range = |queries: Range<usize>, keys| QueryRange { queries, keys, causal: true };
        let layout = AttentionLayout {
            ranges: vec![
                range(0..2, vec![0..2]),
                range(2..3, vec![0..2, 2..3]),
                range(3..5, vec![0..2, 2..3, 3..5]),
            ],
        };
        let segments = Segments::of(&layout, 5).unwrap();
        let last = &segments.all[2];
        assert_eq!((last.after, last.level), (Some(1), 2));
        assert_eq!(
            [1, 2, 3, 4].map(|back| segments.row_before(last, back)),
            [Some(2), Some(1), Some(0), None]
        );
    }

    #[test]
    fn other_patterns_are_refused() {
        let of = |ranges: Vec<(Range<usize>, Vec<Range<usize>>, bool)>, rows| {
            let ranges =
                ranges.into_iter().map(|(queries, keys, causal)| QueryRange { queries, keys, causal });
            Segments::of(&AttentionLayout { ranges: ranges.collect() }, rows)
        };
        for (ranges, rows) in [
            // Rows that see later rows.
            (vec![(0..2, vec![0..2], false)], 2),
            // A gap, a row without a range, and chosen rows.
            (vec![(1..2, vec![1..2], true)], 2),
            (vec![(0..2, vec![0..2], true)], 3),
            (vec![(0..1, vec![0..1], true), (1..2, vec![0..2], true)], 2),
            // Rows that do not see all rows before them.
            (vec![(0..2, vec![0..2], true), (2..3, vec![0..1, 2..3], true)], 3),
        ] {
            assert!(of(ranges.clone(), rows).is_err(), "{ranges:?}");
        }
        let message = of(vec![(0..2, vec![0..2], false)], 2).unwrap_err().to_string();
        assert!(message.contains("query rows 0..2 see key rows [0..2]"), "{message}");
        assert!(of(vec![(0..1, vec![0..1], false)], 1).is_ok());
    }
}
