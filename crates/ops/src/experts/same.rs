//! Comparison of the experts of two passes over the same rows.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use super::Routes;

/// Experts of some rows in an earlier pass, and the rows that use others now.
///
/// The experts of a row in a block are one number, [`Routes::marks`].
#[derive(Debug, Default)]
pub struct SameExperts {
    /// Marks of each row by block; none for a row that is not compared.
    known: Vec<Vec<u32>>,
    others: Mutex<BTreeSet<usize>>,
}

impl SameExperts {
    /// Creates the comparison from the marks of each row by block. A row without marks is not compared.
    pub fn new(known: Vec<Vec<u32>>) -> Self {
        Self { known, others: Mutex::default() }
    }

    /// Compares the experts of the routed rows in a block. `rows` lists them; `None` means all rows of the pass. Experts that a GPU
    /// chose are not compared.
    pub fn compare(&self, block: usize, routes: &Routes, rows: Option<&[usize]>) {
        let row = |at: usize| rows.map_or(Some(at), |rows| rows.get(at).copied());
        let differs = |row: usize, mark: u32| {
            let known = self.known.get(row).and_then(|known| known.get(block));
            known.is_some_and(|&known| known != mark)
        };
        let marks = routes.marks().unwrap_or_default().into_iter().enumerate();
        let others = marks.filter_map(|(at, mark)| row(at).filter(|&row| differs(row, mark)));
        self.others.lock().unwrap_or_else(PoisonError::into_inner).extend(others);
    }

    /// Returns the number of rows that used other experts in some block, and that of all compared rows.
    pub fn counts(&self) -> [usize; 2] {
        let others = self.others.lock().unwrap_or_else(PoisonError::into_inner).len();
        [others, self.known.iter().filter(|known| !known.is_empty()).count()]
    }
}

impl Routes {
    /// Returns a number for the experts of each row, or `None` if a GPU chose them. Rows with the same experts have the same number.
    /// Rows with different ones have different numbers, except for one pair in about four billion.
    pub fn marks(&self) -> Option<Vec<u32>> {
        // FNV-1a over the indices, which ascend within a row.
        let mark = |places: &[u32]| {
            let experts = places.iter().map(|&place| self.experts[place as usize]);
            experts.fold(0x811c_9dc5_u32, |mark, expert| (mark ^ expert).wrapping_mul(0x0100_0193))
        };
        let each = self.places() / self.rows().max(1);
        let of_rows = || self.sums.rows.chunks_exact(each.max(1)).map(mark).collect();
        self.only_on.is_none().then(of_rows)
    }
}
