//! Sums in an order that depends only on the number of summands.
//!
//! Summands are added as a binary tree. The left branch has the largest power of two below their number, and both branches are
//! such sums. A sum of n·2ʲ summands is therefore, to the bit, the sum over n of the sums over 2ʲ neighbours: n ranks that have
//! added 2ʲ summands each ([`Cascade`]) and then add each other's sums ([`fold`]) get the result of one process that adds n·2ʲ
//! summands. The rounding error grows with the logarithm of their number.

/// Number that stands for an absent summand: adding it changes the bits of no number.
pub const ABSENT: f32 = -0.0;

/// Order in which the gradients of all ranks are summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub enum GradientSum {
    /// A fixed order, that of [`fold`]. The bits depend only on the number of summands.
    #[default]
    Ordered,
    /// The order of the engine, which is faster. The bits depend on the number of ranks, the engine and the network.
    Engine,
}

/// Sums `parts`, blocks of `len` numbers, block by block, and returns the sum, which is stored in the first block.
pub fn fold(parts: &mut [f32], len: usize) -> &[f32] {
    let count = parts.len().checked_div(len).unwrap_or(0);
    let mut stride = 1;
    while stride < count {
        for left in (0..count - stride).step_by(2 * stride) {
            let (head, tail) = parts.split_at_mut((left + stride) * len);
            let (to, from) = (&mut head[left * len..][..len], &tail[..len]);
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
        stride *= 2;
    }
    &parts[..len]
}

/// Sum of summands that arrive one after the other, in the order of [`fold`]. It stores at most 1 + log₂ k sums of k summands.
#[derive(Debug)]
pub struct Cascade<T> {
    /// Sums over 2ʰ summands with their height h; the heights fall.
    held: Vec<(u32, Option<T>)>,
}

impl<T> Default for Cascade<T> {
    fn default() -> Self {
        Self { held: Vec::new() }
    }
}

impl<T> Cascade<T> {
    /// Adds the next summand; `None` is an absent one. `add` adds its second argument to its first.
    ///
    /// # Errors
    /// Returns an error if `add` does.
    pub fn push<E>(
        &mut self,
        part: Option<T>,
        mut add: impl FnMut(&mut T, T) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut next = (0, part);
        while let Some((height, left)) = self.held.pop_if(|(height, _)| *height == next.0) {
            next = (height + 1, join(left, next.1, &mut add)?);
        }
        self.held.push(next);
        Ok(())
    }

    /// Returns the sum; `None` if no summand is present.
    ///
    /// # Errors
    /// Returns an error if `add` does.
    pub fn finish<E>(mut self, mut add: impl FnMut(&mut T, T) -> Result<(), E>) -> Result<Option<T>, E> {
        let mut sum = None;
        while let Some((_, left)) = self.held.pop() {
            sum = join(left, sum, &mut add)?;
        }
        Ok(sum)
    }
}

fn join<T, E>(
    left: Option<T>,
    right: Option<T>,
    add: &mut impl FnMut(&mut T, T) -> Result<(), E>,
) -> Result<Option<T>, E> {
    Ok(match (left, right) {
        (Some(mut left), Some(right)) => {
            add(&mut left, right)?;
            Some(left)
        }
        (left, right) => left.or(right),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn add(to: &mut f32, from: f32) -> Result<(), Infallible> {
        *to += from;
        Ok(())
    }

    fn numbers(count: usize) -> Vec<f32> {
        (0..count)
            .map(|i| ((i * 7919 + 13) % 1009) as f32 * 1.000_123e-3 * if i % 3 == 0 { -1e3 } else { 1.0 })
            .collect()
    }

    #[test]
    fn five_summands_are_added_as_a_tree() {
        // ((a + b) + (c + d)) + e: the first four cancel only in this order.
        let mut parts = [1e8, 1.0, -1e8, -1.0, 0.5];
        assert_eq!(fold(&mut parts, 1), [0.5]);
        // Without the second one: (1e8 + (-1e8 - 1)) + 0.5, where -1e8 - 1 rounds to -1e8.
        assert_eq!(fold(&mut [1e8, ABSENT, -1e8, -1.0, 0.5], 1), [0.5]);
        for x in [4.0, 0.0, -0.0, 1e-45, f32::INFINITY] {
            assert_eq!(fold(&mut [ABSENT, x, ABSENT], 1)[0].to_bits(), x.to_bits());
        }
    }

    #[test]
    fn a_cascade_gives_the_bits_of_a_fold() {
        for count in 1..40 {
            for absent in [usize::MAX, 0, count / 2] {
                let mut parts = numbers(count);
                let mut cascade = Cascade::default();
                for (i, part) in parts.iter_mut().enumerate() {
                    cascade.push((i != absent).then_some(*part), add).unwrap();
                    assert!(cascade.held.len() <= 1 + count.ilog2() as usize);
                    *part = if i == absent { ABSENT } else { *part };
                }
                let folded = fold(&mut parts, 1)[0];
                let sum = cascade.finish(add).unwrap();
                assert_eq!(sum.is_some(), count > 1 || absent > 0);
                if let Some(sum) = sum {
                    assert_eq!(sum.to_bits(), folded.to_bits(), "{count} without {absent}");
                }
            }
        }
    }

    #[test]
    fn sums_of_neighbours_add_up_to_the_bits_of_the_whole() {
        for ranks in 1..9 {
            for leaves in [1, 2, 4, 8] {
                let parts = numbers(ranks * leaves);
                let whole = fold(&mut parts.clone(), 1)[0];
                let sum_of = |own: &[f32]| fold(&mut own.to_vec(), 1)[0];
                let mut sums: Vec<f32> = parts.chunks(leaves).map(sum_of).collect();
                let sum = fold(&mut sums, 1)[0];
                assert_eq!(sum.to_bits(), whole.to_bits(), "{ranks} ranks with {leaves} leaves");
            }
        }
    }
}
