//! Packing of completions into streams.
//!
//! Groups are packed in order until a stream is full. A group that is larger than a stream is split into several streams with the
//! same prompt. Packing and splitting change the result only by rounding.

use std::ops::Range;

/// Completions of one group that share a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Index of the group.
    pub group: usize,
    /// Range of completions in the group.
    pub completions: Range<usize>,
}

/// Packs groups into streams of at most `max_rows` rows. `groups` gives the prompt length and the completion lengths of each
/// group. A single completion with its prompt is never split, even if it is longer.
pub fn pack(groups: &[(usize, Vec<usize>)], max_rows: usize) -> Vec<Vec<Part>> {
    let mut streams: Vec<Vec<Part>> = Vec::new();
    let mut used = usize::MAX;
    for (group, (prompt, completions)) in groups.iter().enumerate() {
        let mut start = 0;
        while start < completions.len() {
            let rows = |c: usize| completions[c].saturating_sub(1);
            let whole = prompt + (start..completions.len()).map(rows).sum::<usize>();
            let (end, cost) = if whole <= max_rows {
                (completions.len(), whole)
            } else {
                let mut cost = prompt + rows(start);
                let mut end = start + 1;
                while end < completions.len() && cost + rows(end) <= max_rows {
                    cost += rows(end);
                    end += 1;
                }
                (end, cost)
            };
            let part = Part { group, completions: start..end };
            match streams.last_mut() {
                Some(stream) if used.saturating_add(cost) <= max_rows => {
                    stream.push(part);
                    used += cost;
                }
                _ => {
                    streams.push(vec![part]);
                    used = cost;
                }
            }
            start = end;
        }
    }
    streams
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(group: usize, completions: Range<usize>) -> Part {
        Part { group, completions }
    }

    #[test]
    fn small_groups_share_a_stream() {
        let groups = [(10, vec![5, 5]), (10, vec![5, 5]), (10, vec![5, 5])];
        // Each group takes 10 + 4 + 4 rows.
        assert_eq!(pack(&groups, 40), [vec![part(0, 0..2), part(1, 0..2)], vec![part(2, 0..2)]]);
    }

    #[test]
    fn a_large_group_is_split_with_its_prompt() {
        let groups = [(10, vec![11, 11, 11, 11, 11])];
        assert_eq!(pack(&groups, 30), [vec![part(0, 0..2)], vec![part(0, 2..4)], vec![part(0, 4..5)]]);
    }

    #[test]
    fn one_completion_is_never_split() {
        assert_eq!(pack(&[(10, vec![100, 3])], 30), [vec![part(0, 0..1)], vec![part(0, 1..2)]]);
        assert_eq!(pack(&[(10, vec![])], 30), Vec::<Vec<Part>>::new());
    }
}
