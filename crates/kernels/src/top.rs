//! The largest logits of a row, found in chunks of the vocabulary. Of equal logits, the lower token id is taken.

use std::cmp::Ordering;

/// Number of logits that are compared with the smallest kept one together.
const BLOCK: usize = 64;

/// Which most probable tokens of a row are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Top {
    /// Number of tokens.
    pub k: usize,
    /// Bound of their ids: tokens with this id or a larger one are left out.
    pub below: usize,
}

impl Top {
    /// No tokens.
    pub const NONE: Self = Self { k: 0, below: 0 };

    /// Returns what there is of it in a vocabulary.
    #[must_use]
    pub fn within(self, vocab: usize) -> Self {
        let below = self.below.min(vocab);
        Self { k: self.k.min(below), below }
    }
}

/// A logit and its token id.
pub(crate) type Candidate = (f32, u32);

/// Number of candidates of a row, and the logit that a later one has to exceed.
pub(crate) type Kept = (usize, f32);

/// State of a row before its first chunk.
pub(crate) const NONE: Kept = (0, f32::NEG_INFINITY);

/// Returns the room that a row needs for its candidates.
pub(crate) const fn room(k: usize) -> usize {
    2 * k
}

fn rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Offers a chunk of a row's logits, whose first token has the id `first`. `room` has the candidates so far. Chunks come in the order of
/// their ids.
pub(crate) fn offer(room: &mut [Candidate], kept: &mut Kept, first: usize, logits: &[f32]) {
    let k = room.len() / 2;
    for (block, logits) in logits.chunks(BLOCK).enumerate() {
        let least = kept.1;
        // A NaN is a candidate, so that it appears in the result.
        if kept.0 >= k && !logits.iter().fold(false, |any, &z| any | (z > least) | z.is_nan()) {
            continue;
        }
        for (at, &z) in logits.iter().enumerate() {
            if kept.0 >= k && z <= kept.1 {
                continue;
            }
            room[kept.0] = (z, (first + block * BLOCK + at) as u32);
            kept.0 += 1;
            if kept.0 == room.len() {
                room.select_nth_unstable_by(k - 1, rank);
                *kept = (k, room[k - 1].0);
            }
        }
    }
}

/// Sorts the candidates of a row after its last chunk and returns the `k` largest, or all if there are fewer.
pub(crate) fn sorted(room: &mut [Candidate], kept: Kept) -> &[Candidate] {
    let k = room.len() / 2;
    let found = &mut room[..kept.0];
    found.sort_unstable_by(rank);
    &found[..kept.0.min(k)]
}

/// Returns the `k` largest of a row's logits with their token ids, the largest first.
///
/// # Panics
/// Panics if `k` is 0.
#[must_use]
pub fn largest(logits: &[f32], k: usize) -> Vec<(f32, u32)> {
    let (mut room, mut kept) = (vec![(0.0, 0); room(k)], NONE);
    offer(&mut room, &mut kept, 0, logits);
    sorted(&mut room, kept).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result is that of sorting all logits, also with equal ones, excluded ones and more chunks than one.
    #[test]
    fn the_largest_are_those_of_a_sorted_row() {
        let mut state = 7_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as u32
        };
        for (v, k, values) in
            [(1, 1, 3), (5, 5, 3), (300, 7, 20), (5000, 100, 1 << 20), (5000, 64, 9), (90, 90, 4)]
        {
            let logits: Vec<f32> = (0..v)
                .map(|_| match next() % values {
                    0 => f32::NEG_INFINITY,
                    z => z as f32 - 3.0,
                })
                .collect();
            let mut expected: Vec<Candidate> = logits.iter().copied().zip(0..).collect();
            expected.sort_by(rank);
            expected.truncate(k);
            assert_eq!(largest(&logits, k), expected, "{v} logits, {k} of them");
            let (mut candidates, mut kept) = (vec![(0.0, 0); room(k)], NONE);
            for (at, chunk) in logits.chunks(97).enumerate() {
                offer(&mut candidates, &mut kept, 97 * at, chunk);
            }
            assert_eq!(sorted(&mut candidates, kept), expected, "{v} logits in chunks");
        }
        assert!(largest(&[1.0, f32::NAN, 2.0], 1)[0].0.is_nan());
    }
}
