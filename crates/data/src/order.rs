//! Order in which rows are drawn. It depends on (seed, epoch) alone and can resume at any row.
//!
//! Each epoch is a Fisher–Yates shuffle driven by ChaCha8, with the seed as key and the epoch as stream. An order therefore does
//! not depend on earlier draws and is the same on every machine. If an epoch ends inside a batch, the batch continues with the
//! next epoch, so every row is drawn equally often.

use std::collections::{BTreeMap, BTreeSet};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

/// Error of drawing or resuming.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// Order without usable rows.
    #[error(
        "no row left to draw: got {num_rows} rows of which {num_skipped} are skipped, expected at least one usable row; see the messages about the skipped rows"
    )]
    Empty {
        /// Number of rows in the order.
        num_rows: usize,
        /// Number of rows on the skip list.
        num_skipped: usize,
    },
    /// Saved state that does not belong to this order.
    #[error(
        "the saved data position is index {index}, but the epoch has {num_rows} rows; the dataset has changed since the checkpoint was written"
    )]
    Position {
        /// Index in the saved state.
        index: u64,
        /// Number of rows in this order.
        num_rows: usize,
    },
}

/// Rules by which the rewards of one pass over the rows select and sort the rows of the next pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct Lessons {
    /// Lowest average reward; rows that earned less are left out.
    pub low: Option<f64>,
    /// Highest average reward; rows that earned more are left out.
    pub high: Option<f64>,
    /// Order by difficulty.
    pub curriculum: Curriculum,
}

/// Order of a pass by the rewards of the previous pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub enum Curriculum {
    /// No order by reward; rows come as drawn.
    #[default]
    None,
    /// Rows with the highest rewards first.
    EasyFirst,
    /// Rows with the lowest rewards first.
    HardFirst,
}

/// State that a checkpoint stores in order to draw the same rows again.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OrderState {
    /// Epoch of the next row, from 0.
    pub epoch: u64,
    /// Index of the next row in the epoch's order.
    pub index: u64,
    /// Rows that are never drawn.
    pub skipped: BTreeSet<u64>,
    /// Reward of each row when it was last drawn, if the rules use rewards.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub earned: BTreeMap<u64, f64>,
    /// Rewards at the start of the epoch, which determine its order.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub judged: BTreeMap<u64, f64>,
}

/// Sequence of drawn rows, epoch after epoch.
#[derive(Debug, Clone)]
pub struct Order {
    rows: Vec<u64>,
    seed: u64,
    shuffle: bool,
    lessons: Lessons,
    state: OrderState,
    permutation: Vec<u64>,
}

impl Order {
    /// Creates an order over `rows` (row indices of a dataset, see [`split`]) at the start of epoch 0. Without `shuffle`, every
    /// epoch follows the order of `rows`. `skipped` rows are never drawn.
    pub fn new(rows: Vec<u64>, seed: u64, shuffle: bool, skipped: BTreeSet<u64>) -> Self {
        let state = OrderState { skipped, ..OrderState::default() };
        let lessons = Lessons::default();
        let mut order = Self { rows, seed, shuffle, lessons, state, permutation: Vec::new() };
        order.shuffle_epoch();
        order
    }

    /// Returns the order with rules that use the rewards of earlier passes.
    #[must_use]
    pub fn learning(mut self, lessons: Lessons) -> Self {
        self.lessons = lessons;
        self.shuffle_epoch();
        self
    }

    /// Records the reward of a row. It takes effect in the next pass.
    pub fn earned(&mut self, row: u64, reward: f64) {
        if self.lessons != Lessons::default() {
            self.state.earned.insert(row, reward);
        }
    }

    /// Resumes at the position of `state`.
    ///
    /// # Errors
    /// Returns an error if the position is outside the epoch.
    pub fn resume(&mut self, state: OrderState) -> Result<(), OrderError> {
        if state.index > self.rows.len() as u64 {
            return Err(OrderError::Position { index: state.index, num_rows: self.rows.len() });
        }
        self.state = state;
        self.shuffle_epoch();
        Ok(())
    }

    /// Returns the state from which [`Order::resume`] draws the same next row.
    pub fn state(&self) -> &OrderState {
        &self.state
    }

    /// Removes a row from this and all later epochs. The next draw takes its place.
    pub fn skip(&mut self, row: u64) {
        self.state.skipped.insert(row);
    }

    /// Returns the number of rows that can still be drawn in an epoch.
    pub fn num_usable(&self) -> usize {
        self.rows.iter().filter(|row| !self.state.skipped.contains(row)).count()
    }

    /// Returns the number of epochs drawn so far, including a fraction.
    pub fn epochs_done(&self) -> f64 {
        self.state.epoch as f64 + self.state.index as f64 / self.permutation.len().max(1) as f64
    }

    /// Draws the next row.
    ///
    /// # Errors
    /// Returns an error if every row is skipped.
    pub fn draw(&mut self) -> Result<u64, OrderError> {
        // Two passes suffice, even if the position is the last of an epoch and the only usable row is the first.
        for _ in 0..2 * self.rows.len() + 1 {
            if self.state.index >= self.permutation.len() as u64 {
                self.state.index = 0;
                // A damaged checkpoint may name the last pass that there is.
                self.state.epoch = self.state.epoch.saturating_add(1);
                self.state.judged.clone_from(&self.state.earned);
                self.shuffle_epoch();
            }
            let Some(&row) = self.permutation.get(self.state.index as usize) else { break };
            self.state.index += 1;
            if !self.state.skipped.contains(&row) {
                return Ok(row);
            }
        }
        Err(OrderError::Empty { num_rows: self.rows.len(), num_skipped: self.state.skipped.len() })
    }

    /// Draws the next `num_prompts` rows.
    ///
    /// # Errors
    /// Returns an error if every row is skipped.
    pub fn draw_batch(&mut self, num_prompts: usize) -> Result<Vec<u64>, OrderError> {
        (0..num_prompts).map(|_| self.draw()).collect()
    }

    fn shuffle_epoch(&mut self) {
        self.permutation.clone_from(&self.rows);
        if self.shuffle {
            let mut rng = stream(self.seed, Use::Epoch, self.state.epoch);
            shuffle(&mut rng, &mut self.permutation);
        }
        self.learn();
    }

    /// Filters the rows and sorts the rest by reward; rows without a reward come first. If the filter would remove every usable
    /// row, the pass keeps all rows.
    fn learn(&mut self) {
        let (judged, Lessons { low, high, curriculum }) = (&self.state.judged, self.lessons);
        let kept = |row: &u64| {
            judged
                .get(row)
                .is_none_or(|&r| low.is_none_or(|low| r >= low) && high.is_none_or(|high| r <= high))
        };
        let usable = |row: &u64| !self.state.skipped.contains(row);
        if self.permutation.iter().any(|row| usable(row) && kept(row)) {
            self.permutation.retain(kept);
        }
        let known = |row: &u64| judged.get(row).copied();
        match curriculum {
            Curriculum::None => {}
            Curriculum::HardFirst => {
                self.permutation.sort_by(|a, b| {
                    known(a).unwrap_or(f64::NEG_INFINITY).total_cmp(&known(b).unwrap_or(f64::NEG_INFINITY))
                });
            }
            Curriculum::EasyFirst => {
                self.permutation.sort_by(|a, b| {
                    known(b).unwrap_or(f64::INFINITY).total_cmp(&known(a).unwrap_or(f64::INFINITY))
                });
            }
        }
    }
}

/// Splits `0..num_rows` into (train, validation), each ascending. The validation part has `round(ratio · num_rows)` rows, but
/// leaves at least one row for training. The split depends on (seed, num_rows, ratio) only.
pub fn split(num_rows: u64, ratio: f64, seed: u64) -> (Vec<u64>, Vec<u64>) {
    let wanted = (num_rows as f64 * ratio.clamp(0.0, 1.0)).round() as u64;
    let num_val = wanted.min(num_rows.saturating_sub(1)) as usize;
    let val = choose(num_rows, num_val, stream(seed, Use::Validation, 0));
    let in_val: BTreeSet<u64> = val.iter().copied().collect();
    let train = (0..num_rows).filter(|row| !in_val.contains(row)).collect();
    (train, val)
}

/// Chooses `num_chosen` rows of `0..num_rows` without repetition, ascending.
pub(crate) fn choose(num_rows: u64, num_chosen: usize, mut rng: ChaCha8Rng) -> Vec<u64> {
    let mut rows: Vec<u64> = (0..num_rows).collect();
    shuffle(&mut rng, &mut rows);
    rows.truncate(num_chosen);
    rows.sort_unstable();
    rows
}

/// Purpose of a stream of random numbers. Streams of different purposes never overlap.
#[derive(Clone, Copy)]
pub(crate) enum Use {
    Epoch = 0,
    Validation = 1,
    Sampling = 2,
}

/// Returns random numbers keyed by seed and purpose (the cipher's key) and by `counter` (its stream).
pub(crate) fn stream(seed: u64, purpose: Use, counter: u64) -> ChaCha8Rng {
    let mut key = [0u8; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8] = purpose as u8;
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(counter);
    rng
}

fn shuffle(rng: &mut ChaCha8Rng, rows: &mut [u64]) {
    for last in (1..rows.len()).rev() {
        // Multiply-shift instead of modulo; its bias is below len / 2^64.
        let pick = ((u128::from(rng.next_u64()) * (last as u128 + 1)) >> 64) as usize;
        rows.swap(last, pick);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(num_rows: u64, seed: u64) -> Order {
        Order::new((0..num_rows).collect(), seed, true, BTreeSet::new())
    }

    #[test]
    fn an_epoch_is_a_permutation_and_differs_from_the_next_and_by_seed() {
        let mut one = order(100, 7);
        let first = one.draw_batch(100).unwrap();
        let second = one.draw_batch(100).unwrap();
        let other_seed = order(100, 8).draw_batch(100).unwrap();
        let mut sorted = first.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        assert_ne!(first, second);
        assert_ne!(first, other_seed);
        assert_eq!(first, order(100, 7).draw_batch(100).unwrap());
        assert_eq!(one.epochs_done(), 2.0);
    }

    #[test]
    fn order_is_pinned() {
        // A change of these numbers changes every resumed run and needs a note in the changelog.
        assert_eq!(order(8, 42).draw_batch(16).unwrap(), [4, 5, 0, 3, 6, 7, 1, 2, 4, 5, 7, 2, 0, 3, 1, 6]);
    }

    #[test]
    fn shuffle_is_uniform() {
        // 6 orders of 3 rows over 6000 epochs: expected 1000 each, standard deviation 29.
        let mut counts = std::collections::BTreeMap::new();
        let mut order = order(3, 1);
        for _ in 0..6000 {
            *counts.entry(order.draw_batch(3).unwrap()).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 6);
        assert!(counts.values().all(|count| (850..1150).contains(count)), "{counts:?}");
    }

    #[test]
    fn without_shuffle_rows_come_as_they_stand() {
        let mut order = Order::new(vec![4, 2, 9], 0, false, BTreeSet::new());
        assert_eq!(order.draw_batch(5).unwrap(), [4, 2, 9, 4, 2]);
    }

    #[test]
    fn resumed_order_equals_uninterrupted_order_with_rows_skipped_on_the_way() {
        let run = |stop_at: Option<usize>| {
            let mut order = order(13, 3);
            let mut drawn = Vec::new();
            for step in 0..40 {
                if stop_at == Some(step) {
                    let saved = serde_json::to_string(order.state()).unwrap();
                    order = self::order(13, 3);
                    order.resume(serde_json::from_str(&saved).unwrap()).unwrap();
                }
                let row = order.draw().unwrap();
                if step == 5 || step == 17 {
                    order.skip(row);
                }
                drawn.push(row);
            }
            drawn
        };
        let whole = run(None);
        for stop_at in 0..40 {
            assert_eq!(run(Some(stop_at)), whole, "resumed at {stop_at}");
        }
        let broken = whole[5];
        assert!(!whole[6..].contains(&broken));
    }

    /// Returns an order over six rows in which row `r` earns `r / 5`.
    fn learner(lessons: Lessons) -> Order {
        order(6, 3).learning(lessons)
    }

    fn pass(order: &mut Order, rows: usize) -> Vec<u64> {
        let each = (0..rows).map(|_| {
            let row = order.draw().unwrap();
            order.earned(row, row as f64 / 5.0);
            row
        });
        each.collect()
    }

    #[test]
    fn a_pass_leaves_out_what_the_one_before_found_too_easy_or_too_hard() {
        let plain = order(6, 3).draw_batch(12).unwrap();
        let mut filtered = learner(Lessons { low: Some(0.3), high: Some(0.9), ..Lessons::default() });
        assert_eq!(pass(&mut filtered, 6), plain[..6], "nothing is known in the first pass");
        let second: Vec<u64> = plain[6..].iter().copied().filter(|row| (2..=4).contains(row)).collect();
        assert_eq!(pass(&mut filtered, 3), second);
        assert_eq!(filtered.epochs_done(), 2.0);
        // A row that is left out keeps its reward, so it stays out.
        assert!(pass(&mut filtered, 9).iter().all(|row| (2..=4).contains(row)));

        let mut hopeless = learner(Lessons { low: Some(2.0), ..Lessons::default() });
        pass(&mut hopeless, 6);
        assert_eq!(pass(&mut hopeless, 6), plain[6..], "a pass is never empty");
        let mut only = learner(Lessons { high: Some(0.0), ..Lessons::default() });
        only.skip(0);
        pass(&mut only, 5);
        assert_eq!(pass(&mut only, 5).len(), 5, "the row that would be left can not be used");
    }

    #[test]
    fn a_curriculum_sorts_by_what_was_earned_and_resumes_exactly() {
        let lessons = |curriculum| Lessons { curriculum, ..Lessons::default() };
        let mut easy = learner(lessons(Curriculum::EasyFirst));
        let first = pass(&mut easy, 6);
        assert_eq!(first, order(6, 3).draw_batch(6).unwrap());
        assert_eq!(pass(&mut easy, 6), [5, 4, 3, 2, 1, 0]);
        let mut hard = learner(lessons(Curriculum::HardFirst));
        pass(&mut hard, 6);
        assert_eq!(pass(&mut hard, 4), [0, 1, 2, 3]);
        // Saves the state in the middle of a pass, after rewards that will change the next pass.
        hard.earned(0, 9.0);
        let saved = serde_json::to_string(hard.state()).unwrap();
        let mut again = learner(lessons(Curriculum::HardFirst));
        again.resume(serde_json::from_str(&saved).unwrap()).unwrap();
        assert_eq!(again.draw_batch(8).unwrap(), hard.draw_batch(8).unwrap());
        assert_eq!(again.draw_batch(4).unwrap(), [1, 2, 3, 4]);
    }

    #[test]
    fn the_next_row_takes_the_place_of_a_skipped_one() {
        let plain = order(10, 5).draw_batch(4).unwrap();
        let mut order = order(10, 5);
        order.skip(plain[1]);
        assert_eq!(order.draw_batch(3).unwrap(), [plain[0], plain[2], plain[3]]);
        assert_eq!(order.num_usable(), 9);
    }

    #[test]
    fn nothing_to_draw_is_an_error() {
        assert_eq!(order(0, 0).draw(), Err(OrderError::Empty { num_rows: 0, num_skipped: 0 }));
        let mut order = Order::new(vec![1, 2], 0, true, BTreeSet::from([1, 2]));
        assert_eq!(order.draw(), Err(OrderError::Empty { num_rows: 2, num_skipped: 2 }));
        let beyond = OrderState { index: 3, ..OrderState::default() };
        assert_eq!(order.resume(beyond), Err(OrderError::Position { index: 3, num_rows: 2 }));
    }

    #[test]
    fn the_only_usable_row_is_found_from_any_position() {
        let mut order = Order::new((0..5).collect(), 9, true, BTreeSet::from([0, 1, 2, 3]));
        assert_eq!(order.draw_batch(7).unwrap(), [4; 7]);
    }

    #[test]
    fn split_is_exact_disjoint_and_repeatable() {
        let (train, val) = split(100, 0.1, 3);
        assert_eq!((train.len(), val.len()), (90, 10));
        let mut all = [train, val.clone()].concat();
        all.sort_unstable();
        assert_eq!(all, (0..100).collect::<Vec<_>>());
        assert_eq!(split(100, 0.1, 3).1, val);
        assert_ne!(split(100, 0.1, 4).1, val);
        assert_eq!(split(3, 1.0, 0).0.len(), 1);
        assert_eq!(split(0, 0.5, 0), (vec![], vec![]));
    }
}
