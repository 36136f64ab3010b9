//! Layouts of attention: the key rows that each query row sees.

use std::ops::Range;

use thiserror::Error;

/// Consecutive query rows, and the key rows that they see.
///
/// Every query of the range sees all rows of every key range except the last. If `causal` is false, it also sees all rows of the
/// last key range. If `causal` is true, the `i`-th of `n_queries` queries sees the first `i + 1 + (len_last − n_queries)` rows of
/// the last key range, so that the last query sees all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueryRange {
    pub queries: Range<usize>,
    /// Ranges of key rows, in the order in which they are visited.
    pub keys: Vec<Range<usize>>,
    /// True if the last key range is causal.
    pub causal: bool,
}

impl QueryRange {
    /// Returns the number of rows of the last key range that the `i`-th query sees.
    #[inline]
    pub(crate) fn seen_of_last(&self, i: usize) -> usize {
        let len = self.keys.last().map_or(0, ExactSizeIterator::len);
        if self.causal { (i + 1 + len).saturating_sub(self.queries.len()) } else { len }
    }

    /// Returns the index of the first query that sees row `at` of the last key range, which must be causal. The index may be
    /// beyond the last query.
    #[inline]
    pub(crate) fn first_to_see(&self, at: usize) -> usize {
        let len = self.keys.last().map_or(0, ExactSizeIterator::len);
        // Query i sees at least at + 1 rows if i + 1 + len − n ≥ at + 1.
        (at + self.queries.len()).saturating_sub(len)
    }
}

/// The attention pattern of one call: causal text, a shared prefix with suffixes, vision windows, or decoding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionLayout {
    /// Query ranges, which together contain every query row once.
    pub ranges: Vec<QueryRange>,
}

/// Error of a layout that does not fit its rows.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LayoutError {
    /// Query ranges overlap, leave a gap, or do not end at the last row.
    #[error(
        "attention layout: got query rows {got:?}, expected a range that starts at {expected} and ends by {rows}; \
         the ranges must cover 0..{rows} exactly once"
    )]
    Queries {
        /// The first range, in the order of their starts, that does not begin where the previous range ends.
        got: Range<usize>,
        /// Row at which this range should start.
        expected: usize,
        /// Number of query rows.
        rows: usize,
    },
    /// A key range is reversed or extends beyond the last key row.
    #[error("attention layout: query rows {queries:?} see key rows {got:?}, expected rows in 0..{rows}")]
    Keys {
        queries: Range<usize>,
        /// Invalid key range of these queries.
        got: Range<usize>,
        /// Number of key rows.
        rows: usize,
    },
    /// Two key ranges of one query range overlap, so that a key would count twice.
    #[error("attention layout: query rows {queries:?} see key rows {first:?} and {second:?}, which overlap")]
    Overlap { queries: Range<usize>, first: Range<usize>, second: Range<usize> },
    /// A query sees no key, so its softmax is undefined.
    #[error("attention layout: query row {query} sees no key row; give it at least one")]
    Blind {
        /// The first query row that sees no key.
        query: usize,
    },
}

impl AttentionLayout {
    /// Creates one causal sequence of `n` rows.
    #[must_use]
    pub fn causal(n: usize) -> Self {
        Self { ranges: vec![QueryRange { queries: 0..n, keys: vec![0..n], causal: true }] }
    }

    /// Creates consecutive blocks. Each block sees all of its own rows (images, frames, windows).
    #[must_use]
    pub fn full_blocks(lens: &[usize]) -> Self {
        let mut start = 0;
        let ranges = lens.iter().map(|&len| {
            let rows = start..start + len;
            start += len;
            QueryRange { queries: rows.clone(), keys: vec![rows], causal: false }
        });
        Self { ranges: ranges.collect() }
    }

    /// Creates a causal prefix followed by suffixes. Each suffix sees the complete prefix and, causally, itself.
    #[must_use]
    pub fn prefix_suffixes(prefix_len: usize, suffix_lens: &[usize]) -> Self {
        let mut layout = Self::default();
        layout.push_group(0, prefix_len, suffix_lens);
        layout
    }

    /// Creates several groups of a prefix and its suffixes, consecutive in one stream.
    #[must_use]
    pub fn groups(groups: &[(usize, Vec<usize>)]) -> Self {
        let mut layout = Self::default();
        let mut start = 0;
        for (prefix_len, suffix_lens) in groups {
            start = layout.push_group(start, *prefix_len, suffix_lens);
        }
        layout
    }

    /// Appends a group that starts at row `start`, and returns the end of the group.
    fn push_group(&mut self, start: usize, prefix_len: usize, suffix_lens: &[usize]) -> usize {
        let prefix = start..start + prefix_len;
        let mut end = prefix.end;
        self.ranges.push(QueryRange { queries: prefix.clone(), keys: vec![prefix.clone()], causal: true });
        for len in suffix_lens {
            let own = end..end + len;
            end = own.end;
            self.ranges.push(QueryRange {
                queries: own.clone(),
                keys: vec![prefix.clone(), own],
                causal: true,
            });
        }
        end
    }

    /// Checks the layout against the number of query rows and key rows.
    ///
    /// # Errors
    /// Returns an error if the ranges do not contain every query row exactly once, a key row is out of bounds or counts twice, or
    /// a query sees no key.
    pub fn validate(&self, num_q: usize, num_k: usize) -> Result<(), LayoutError> {
        let mut by_start: Vec<&QueryRange> = self.ranges.iter().filter(|r| r.queries != (0..0)).collect();
        by_start.sort_by_key(|r| (r.queries.start, r.queries.end));
        let mut expected = 0;
        for range in by_start {
            if range.queries.start != expected || range.queries.end < expected || range.queries.end > num_q {
                return Err(LayoutError::Queries { got: range.queries.clone(), expected, rows: num_q });
            }
            expected = range.queries.end;
        }
        if expected != num_q {
            return Err(LayoutError::Queries { got: num_q..num_q, expected, rows: num_q });
        }
        for range in &self.ranges {
            let queries = || range.queries.clone();
            for (i, keys) in range.keys.iter().enumerate() {
                if keys.start > keys.end || keys.end > num_k {
                    return Err(LayoutError::Keys { queries: queries(), got: keys.clone(), rows: num_k });
                }
                for other in &range.keys[..i] {
                    if keys.start.max(other.start) < keys.end.min(other.end) {
                        let (first, second) = (other.clone(), keys.clone());
                        return Err(LayoutError::Overlap { queries: queries(), first, second });
                    }
                }
            }
            let before: usize = range.keys.iter().rev().skip(1).map(ExactSizeIterator::len).sum();
            if !range.queries.is_empty() && before + range.seen_of_last(0) == 0 {
                return Err(LayoutError::Blind { query: range.queries.start });
            }
        }
        Ok(())
    }

    /// Restricts the pattern to the query rows `rows`, which are ascending. Kernels leave the other rows unchanged, because no
    /// range contains them.
    #[must_use]
    pub fn only(&self, rows: &[usize]) -> Self {
        let mut ranges = Vec::new();
        for range in &self.ranges {
            let first = rows.partition_point(|&row| row < range.queries.start);
            let last = rows.partition_point(|&row| row < range.queries.end);
            for run in rows[first..last.max(first)].chunk_by(|a, b| a + 1 == *b) {
                let queries = run[0]..run[run.len() - 1] + 1;
                let mut keys = range.keys.clone();
                if let Some(last) = keys.last_mut() {
                    last.end = last.start + range.seen_of_last(queries.end - 1 - range.queries.start);
                }
                ranges.push(QueryRange { queries, keys, causal: range.causal });
            }
        }
        Self { ranges }
    }

    /// Returns the number of query-key pairs. The forward pass takes `4 · head_dim` floating-point operations per pair and head.
    #[must_use]
    pub fn pairs(&self) -> u64 {
        let of_range = |range: &QueryRange| {
            let before: usize = range.keys.iter().rev().skip(1).map(ExactSizeIterator::len).sum();
            (0..range.queries.len()).map(|i| (before + range.seen_of_last(i)) as u64).sum::<u64>()
        };
        self.ranges.iter().map(of_range).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constructors_place_rows() {
        let layout = AttentionLayout::groups(&[(2, vec![1, 3]), (1, vec![2])]);
        let expected = [
            (0..2, vec![0..2]),
            (2..3, vec![0..2, 2..3]),
            (3..6, vec![0..2, 3..6]),
            (6..7, vec![6..7]),
            (7..9, vec![6..7, 7..9]),
        ];
        for (range, (queries, keys)) in layout.ranges.iter().zip(expected) {
            assert_eq!((&range.queries, &range.keys, range.causal), (&queries, &keys, true));
        }
        assert_eq!(layout.validate(9, 9), Ok(()));
        assert_eq!(AttentionLayout::prefix_suffixes(2, &[1, 3]).ranges, layout.ranges[..3]);
        assert_eq!(AttentionLayout::full_blocks(&[2, 1]).ranges[1].keys, vec![2..3]);
    }

    #[test]
    fn selected_rows_see_the_same_keys() {
        let layout = AttentionLayout::groups(&[(4, vec![3]), (1, vec![2])]);
        let some = layout.only(&[2, 3, 5, 8, 9]);
        let expected = [(2..4, vec![0..4]), (5..6, vec![0..4, 4..6]), (8..10, vec![7..8, 8..10])];
        assert_eq!(some.ranges.len(), expected.len());
        for (range, (queries, keys)) in some.ranges.iter().zip(expected) {
            assert_eq!((&range.queries, &range.keys, range.causal), (&queries, &keys, true));
        }
        // The pairs are 3 + 4, 4 + 2 and (1 + 1) + (1 + 2).
        assert_eq!(some.pairs(), 18);
        assert_eq!(layout.only(&(0..10).collect::<Vec<_>>()).ranges, layout.ranges);
        assert_eq!(layout.only(&[]).ranges, []);
    }

    #[test]
    fn pairs_are_counted() {
        assert_eq!(AttentionLayout::causal(4).pairs(), 10);
        assert_eq!(AttentionLayout::full_blocks(&[2, 3]).pairs(), 13);
        // The prefix of 3 has 6 pairs; the suffix of 2 has (3 + 1) + (3 + 2).
        assert_eq!(AttentionLayout::prefix_suffixes(3, &[2]).pairs(), 15);
        // Two new queries after three cached rows have 4 + 5 pairs.
        let cached = QueryRange { queries: 0..2, keys: vec![0..5], causal: true };
        assert_eq!(AttentionLayout { ranges: vec![cached] }.pairs(), 9);
    }

    #[test]
    fn bad_layouts_are_refused() {
        let one =
            |queries, keys, causal| AttentionLayout { ranges: vec![QueryRange { queries, keys, causal }] };
        assert!(matches!(
            AttentionLayout::causal(4).validate(5, 5),
            Err(LayoutError::Queries { expected: 4, .. })
        ));
        assert!(matches!(AttentionLayout::causal(4).validate(4, 3), Err(LayoutError::Keys { rows: 3, .. })));
        assert!(matches!(
            one(0..2, vec![0..3, 2..4], false).validate(2, 4),
            Err(LayoutError::Overlap { .. })
        ));
        assert!(matches!(one(0..2, vec![], false).validate(2, 4), Err(LayoutError::Blind { query: 0 })));
        assert!(matches!(one(0..3, vec![0..2], true).validate(3, 4), Err(LayoutError::Blind { query: 0 })));
        assert_eq!(one(0..0, vec![], false).validate(0, 0), Ok(()));
    }
}
