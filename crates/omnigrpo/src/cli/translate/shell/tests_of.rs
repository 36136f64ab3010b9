//! Conditions of a shell, as far as they follow from the script. `None` stands for a condition that depends on the machine.

use brush_parser::ast::{BinaryPredicate, ExtendedTestExpr, TestExpr, UnaryPredicate};
use brush_parser::test_command;

use super::Shell;
use super::words::MARK;

/// Maximum number of words of a condition in single brackets.
const MAX_WORDS: usize = 64;

fn and(left: Option<bool>, right: Option<bool>) -> Option<bool> {
    match (left, right) {
        (Some(false), _) | (_, Some(false)) => Some(false),
        (Some(true), Some(true)) => Some(true),
        _ => None,
    }
}

fn not(value: Option<bool>) -> Option<bool> {
    value.map(|value| !value)
}

fn or(left: Option<bool>, right: Option<bool>) -> Option<bool> {
    not(and(not(left), not(right)))
}

impl Shell {
    /// Evaluates the words of `test` or `[`.
    pub(super) fn test(&self, words: &[String]) -> Result<Option<bool>, String> {
        let own = match words {
            [open, inner @ .., close] if open == "[" && close == "]" => inner,
            [_, inner @ ..] => inner,
            [] => &[],
        };
        if own.len() > MAX_WORDS {
            return Ok(None);
        }
        Ok(test_command::parse(own).ok().and_then(|test| self.evaluate(&test)))
    }

    fn evaluate(&self, test: &TestExpr) -> Option<bool> {
        match test {
            TestExpr::False => Some(false),
            TestExpr::Literal(text) => known(text).map(|text| !text.is_empty()),
            TestExpr::And(left, right) => and(self.evaluate(left), self.evaluate(right)),
            TestExpr::Or(left, right) => or(self.evaluate(left), self.evaluate(right)),
            TestExpr::Not(inner) => not(self.evaluate(inner)),
            TestExpr::Parenthesized(inner) => self.evaluate(inner),
            TestExpr::UnaryTest(predicate, text) => self.unary(predicate, known(text)),
            TestExpr::BinaryTest(predicate, left, right) => self.binary(predicate, known(left), known(right)),
        }
    }

    /// Evaluates a condition in double brackets.
    pub(super) fn extended_test(&mut self, test: &ExtendedTestExpr) -> Result<Option<bool>, String> {
        Ok(match test {
            ExtendedTestExpr::And(left, right) => and(self.extended_test(left)?, self.extended_test(right)?),
            ExtendedTestExpr::Or(left, right) => or(self.extended_test(left)?, self.extended_test(right)?),
            ExtendedTestExpr::Not(inner) => not(self.extended_test(inner)?),
            ExtendedTestExpr::Parenthesized(inner) => self.extended_test(inner)?,
            ExtendedTestExpr::UnaryTest(predicate, word) => {
                let text = self.tested(&word.value)?;
                self.unary(predicate, text.as_deref())
            }
            ExtendedTestExpr::BinaryTest(predicate, left, right) => {
                let (left, right) = (self.tested(&left.value)?, self.tested(&right.value)?);
                self.binary(predicate, left.as_deref(), right.as_deref())
            }
        })
    }

    fn unary(&self, predicate: &UnaryPredicate, text: Option<&str>) -> Option<bool> {
        match predicate {
            UnaryPredicate::StringHasNonZeroLength => text.map(|text| !text.is_empty()),
            UnaryPredicate::StringHasZeroLength => text.map(str::is_empty),
            UnaryPredicate::ShellVariableIsSetAndAssigned => {
                text.map(|name| self.variables.contains_key(name))
            }
            _ => None,
        }
    }

    fn binary(&self, predicate: &BinaryPredicate, left: Option<&str>, right: Option<&str>) -> Option<bool> {
        let (left, right) = (left?, right?);
        let numbers = || Some((left.trim().parse::<i64>().ok()?, right.trim().parse::<i64>().ok()?));
        use BinaryPredicate as B;
        match predicate {
            B::StringExactlyMatchesString => Some(left == right),
            B::StringDoesNotExactlyMatchString => Some(left != right),
            B::StringExactlyMatchesPattern => self.fits(right, left),
            B::StringDoesNotExactlyMatchPattern => not(self.fits(right, left)),
            B::StringContainsSubstring => Some(left.contains(right)),
            B::StringMatchesRegex => {
                let regex = regex::RegexBuilder::new(right).size_limit(1 << 20).build().ok()?;
                Some(regex.is_match(left))
            }
            B::LeftSortsBeforeRight => Some(left < right),
            B::LeftSortsAfterRight => Some(left > right),
            B::ArithmeticEqualTo => numbers().map(|(left, right)| left == right),
            B::ArithmeticNotEqualTo => numbers().map(|(left, right)| left != right),
            B::ArithmeticLessThan => numbers().map(|(left, right)| left < right),
            B::ArithmeticLessThanOrEqualTo => numbers().map(|(left, right)| left <= right),
            B::ArithmeticGreaterThan => numbers().map(|(left, right)| left > right),
            B::ArithmeticGreaterThanOrEqualTo => numbers().map(|(left, right)| left >= right),
            B::FilesReferToSameDeviceAndInodeNumbers
            | B::LeftFileIsNewerOrExistsWhenRightDoesNot
            | B::LeftFileIsOlderOrDoesNotExistWhenRightDoes => None,
        }
    }
}

/// Returns a text if its value is known.
fn known(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.contains(MARK))
}
