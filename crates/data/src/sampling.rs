//! Selection of the rows of a dataset: `all`, `first:N`, `end:N`, `random:N`, with N a number or `p%`.

use crate::error::DataError;
use crate::order::{Use, choose, stream};

/// Selection of the rows of a dataset. Selected rows keep the order of the file.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum Sampling {
    /// Every row.
    #[default]
    All,
    /// First rows of the file.
    First(Amount),
    /// Last rows of the file.
    End(Amount),
    /// Seeded random selection without repetition.
    Random(Amount),
}

/// Number of rows to select, at most the number of rows in the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// Absolute number of rows.
    Rows(u64),
    /// Percentage rounded up, `⌈n·p/100⌉` rows, as in VLM-R1's lists.
    PercentUp(f64),
    /// Percentage rounded down, `⌊n·p/100⌋` rows, as in `name%p` of [`Registry::select`](crate::Registry::select).
    PercentDown(f64),
}

impl Amount {
    fn of(self, num_rows: u64) -> u64 {
        let share = |percent: f64| num_rows as f64 * percent / 100.0;
        let rows = match self {
            Self::Rows(rows) => rows,
            Self::PercentUp(percent) => share(percent).ceil() as u64,
            Self::PercentDown(percent) => share(percent).floor() as u64,
        };
        rows.min(num_rows)
    }
}

impl Sampling {
    /// Parses `all`, `first:N`, `end:N`, `random:N`, with N a number of rows or `p%`.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] if the text is none of these.
    pub fn parse(text: &str) -> Result<Self, DataError> {
        let wrong = || DataError::Setting {
            setting: "sampling_strategy",
            got: text.to_owned(),
            expected: "all, first:N, end:N or random:N, with N a number of rows or p% (0 < p ≤ 100)",
        };
        if text == "all" {
            return Ok(Self::All);
        }
        let (how, amount) = text.split_once(':').ok_or_else(wrong)?;
        let amount = match amount.strip_suffix('%') {
            Some(percent) => {
                Amount::PercentUp(percent.parse().ok().filter(|p| is_percent(*p)).ok_or_else(wrong)?)
            }
            None => Amount::Rows(amount.parse().ok().filter(|rows| *rows > 0).ok_or_else(wrong)?),
        };
        match how {
            "first" => Ok(Self::First(amount)),
            "end" => Ok(Self::End(amount)),
            "random" => Ok(Self::Random(amount)),
            _ => Err(wrong()),
        }
    }

    /// Returns the selected rows of `0..num_rows`, ascending; `None` for all. `counter` distinguishes the datasets of a run.
    pub(crate) fn rows(self, num_rows: u64, seed: u64, counter: u64) -> Option<Vec<u64>> {
        match self {
            Self::All => None,
            Self::First(amount) => Some((0..amount.of(num_rows)).collect()),
            Self::End(amount) => Some((num_rows - amount.of(num_rows)..num_rows).collect()),
            Self::Random(amount) => {
                Some(choose(num_rows, amount.of(num_rows) as usize, stream(seed, Use::Sampling, counter)))
            }
        }
    }
}

pub(crate) fn is_percent(percent: f64) -> bool {
    percent > 0.0 && percent <= 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strategies_choose_the_documented_rows() {
        let rows = |text: &str, num_rows| Sampling::parse(text).unwrap().rows(num_rows, 1, 0);
        assert_eq!(rows("all", 5), None);
        assert_eq!(rows("first:2", 5), Some(vec![0, 1]));
        assert_eq!(rows("end:2", 5), Some(vec![3, 4]));
        assert_eq!(rows("end:50%", 5), Some(vec![2, 3, 4]));
        assert_eq!(rows("first:9", 5).map(|rows| rows.len()), Some(5));
        assert_eq!(rows("random:1%", 5).map(|rows| rows.len()), Some(1));
        assert_eq!(Sampling::Random(Amount::PercentDown(50.0)).rows(5, 1, 0).map(|rows| rows.len()), Some(2));
        let chosen = rows("random:50", 100).unwrap();
        assert_eq!(chosen.len(), 50);
        assert!(chosen.is_sorted() && chosen != (0..50).collect::<Vec<_>>());
        assert_eq!(Some(&chosen), rows("random:50", 100).as_ref());
        assert_ne!(Some(chosen), Sampling::parse("random:50").unwrap().rows(100, 1, 1));
    }

    #[test]
    fn other_texts_are_errors() {
        for text in [
            "",
            "some",
            "first",
            "first:",
            "first:0",
            "first:-1",
            "random:0%",
            "random:101%",
            "random:x%",
            "last:3",
            "random:NaN%",
        ] {
            assert!(matches!(Sampling::parse(text), Err(DataError::Setting { .. })), "{text}");
        }
    }
}
