//! `fuzzy`: VLM-R1's default accuracy. Range [0, 1]. The first rule that applies decides:
//!
//! * Equal values score 1.
//! * If the ground truth contains a digit: equality of the numbers, or similarity of the texts if a side is not a number.
//! * If the ground truth contains a choice letter: equality of the letters.
//! * Otherwise: similarity of the texts.
//!
//! Similarity is 1 minus (insertions and deletions between the cleaned texts / sum of their lengths), as in `Levenshtein.ratio`.
//! Texts are truncated at the extractor's limit of characters.

use crate::all_match::clean;
use crate::answer::{MAX_ANSWER_CHARS, Question};
use crate::choice::extract_choice;
use crate::math;

pub(crate) fn score(question: &Question<'_>) -> Option<f64> {
    let (answer, gold) = (&*question.answer, &*question.gold);
    if gold.is_empty() {
        return None;
    }
    if math::same(answer, gold) {
        return Some(1.0);
    }
    let similarity = || similarity(&clean(answer), &clean(gold));
    if gold.contains(|c: char| c.is_ascii_digit()) {
        let both = (clean(answer).parse::<f64>(), clean(gold).parse::<f64>());
        return Some(if let (Ok(answer), Ok(gold)) = both {
            f64::from(answer == gold)
        } else {
            similarity()
        });
    }
    if let Some(choice) = extract_choice(gold) {
        return Some(f64::from(extract_choice(answer) == Some(choice)));
    }
    Some(similarity())
}

/// Returns 2 × the longest common subsequence / the sum of lengths, in characters.
fn similarity(a: &str, b: &str) -> f64 {
    let a: Vec<char> = a.chars().take(MAX_ANSWER_CHARS).collect();
    let b: Vec<char> = b.chars().take(MAX_ANSWER_CHARS).collect();
    if a.is_empty() && b.is_empty() {
        return 1.0;
    }
    (2 * common_subsequence(&a, &b)) as f64 / (a.len() + b.len()) as f64
}

/// Returns the length of the longest common subsequence. Computes 64 cells of the table at a time. Source: Hyyrö, "Bit-parallel
/// LCS-length computation revisited" (2004).
fn common_subsequence(a: &[char], b: &[char]) -> usize {
    let words = a.len().div_ceil(64);
    let mut positions: std::collections::HashMap<char, Vec<u64>> = std::collections::HashMap::new();
    for (at, c) in a.iter().enumerate() {
        positions.entry(*c).or_insert_with(|| vec![0; words])[at / 64] |= 1 << (at % 64);
    }
    // A zero bit marks a step of the subsequence.
    let mut state = vec![u64::MAX; words];
    for c in b {
        let Some(matches) = positions.get(c) else { continue };
        let mut carry = false;
        for (word, matched) in state.iter_mut().zip(matches) {
            let both = *word & matched;
            let (sum, first) = word.overflowing_add(both);
            let (sum, second) = sum.overflowing_add(u64::from(carry));
            carry = first || second;
            *word = sum | (*word & !matched);
        }
    }
    let unused = words * 64 - a.len();
    state.iter().map(|word| word.count_zeros() as usize).sum::<usize>().min(words * 64 - unused)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RewardOptions;
    use crate::testing::Row;

    #[test]
    fn similarity_is_levenshtein_ratio() {
        // Values of `Levenshtein.ratio` 0.27.5 in Python.
        for (a, b, expected) in [
            ("kitten", "sitting", 0.615_384_615_384_615_4),
            ("red ball", "red", 0.545_454_545_454_545_4),
            ("abc", "abc", 1.0),
            ("abc", "", 0.0),
            ("", "", 1.0),
            ("vòi sen", "sen vòi", 0.428_571_428_571_428_55),
        ] {
            assert!((similarity(a, b) - expected).abs() < 1e-12, "{a} {b} {}", similarity(a, b));
        }
    }

    #[test]
    fn bits_agree_with_the_table() {
        // These texts are longer than a word of bits, so that carries occur.
        let text = |seed: u64, length: usize| -> Vec<char> {
            let mut state = seed;
            (0..length)
                .map(|_| {
                    state =
                        state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    char::from(b'a' + (state >> 60) as u8 % 5)
                })
                .collect()
        };
        for (n, m) in [(1, 1), (63, 64), (64, 65), (130, 200), (257, 40)] {
            let (a, b) = (text(n as u64, n), text(1000 + m as u64, m));
            let mut table = vec![vec![0usize; m + 1]; n + 1];
            for i in 1..=n {
                for j in 1..=m {
                    table[i][j] = if a[i - 1] == b[j - 1] {
                        table[i - 1][j - 1] + 1
                    } else {
                        table[i - 1][j].max(table[i][j - 1])
                    };
                }
            }
            assert_eq!(common_subsequence(&a, &b), table[n][m], "{n} {m}");
        }
    }

    #[test]
    fn rule() {
        let score = |answer: &str, gold| {
            Row::new("", &format!("<answer>{answer}</answer>"), gold)
                .score("fuzzy", &RewardOptions::default())
        };
        assert_eq!(score("3.0", "3"), Some(1.0));
        assert_eq!(score("4", "3"), Some(0.0));
        assert_eq!(score("B", "The answer is B."), Some(1.0));
        assert_eq!(score("C", "B."), Some(0.0));
        assert_eq!(score("red", "red ball"), Some(6.0 / 11.0));
        assert_eq!(score("room 3a", "room 3b"), Some(12.0 / 14.0));
    }
}
