//! Detection of the end of a completion by stop tokens and stop strings.
//!
//! Stop ids come from `generation_config.json` and the tokenizer. The sampling parameters in `generation_config.json` are the
//! publisher's and are ignored.

use std::path::Path;

use serde_json::Value;

use crate::files::read_json;
use crate::{Result, TextError, Tokenizer};

const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Rules that end a completion. The sampler, the loss mask and the loaders share one set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopSet {
    /// Stop token ids, sorted and without duplicates.
    pub ids: Vec<u32>,
    /// Stop strings, non-empty and without duplicates.
    pub strings: Vec<String>,
    /// Token id that fills unused positions, if the model has one.
    pub pad_id: Option<u32>,
}

impl StopSet {
    /// Reads the stop rules of the model in `dir`. The sources are `eos_token_id` (a number or a list) and `pad_token_id` of
    /// `generation_config.json`, if it exists, the tokenizer's end token, and `extra_strings`. Without `pad_token_id`, the
    /// tokenizer's padding token is used.
    ///
    /// # Errors
    /// Returns [`TextError::Read`], [`TextError::TooLarge`] or [`TextError::BadFile`] if the file cannot be used. Returns
    /// [`TextError::Conversation`] if a stop string is empty.
    pub fn from_dir(dir: &Path, tokenizer: &Tokenizer, extra_strings: &[String]) -> Result<Self> {
        let path = dir.join("generation_config.json");
        let config = read_json(&path, MAX_CONFIG_BYTES)?.unwrap_or(Value::Null);
        let read = |name: &str| -> Result<Vec<u32>> {
            let ids = match config.get(name) {
                None | Some(Value::Null) => Some(Vec::new()),
                Some(Value::Array(ids)) => ids.iter().map(token_id).collect(),
                Some(id) => token_id(id).map(|id| vec![id]),
            };
            ids.ok_or_else(|| TextError::BadFile {
                path: path.clone(),
                problem: format!("{name} is {}, expected a token id or a list of them", config[name]),
                source: None,
            })
        };
        let mut ids = read("eos_token_id")?;
        ids.extend(tokenizer.eos_token());
        ids.sort_unstable();
        ids.dedup();
        let mut strings: Vec<String> = Vec::new();
        for string in extra_strings {
            if string.is_empty() {
                return Err(TextError::Conversation { problem: "cannot stop at an empty stop string" });
            }
            if !strings.contains(string) {
                strings.push(string.clone());
            }
        }
        let pad_id = read("pad_token_id")?.first().copied().or_else(|| tokenizer.pad_token());
        Ok(StopSet { ids, strings, pad_id })
    }

    /// Reports whether this token ends a completion.
    pub fn is_stop(&self, id: u32) -> bool {
        self.ids.binary_search(&id).is_ok()
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Match of a complete stop string.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopHit {
    /// Index into [`StopSet::strings`].
    pub string: usize,
    /// Start of the stop string, bytes from the start of the completion. The text is cut here.
    pub start: usize,
    /// End of the stop string, bytes. The last token may extend beyond it.
    pub end: usize,
}

/// Matcher that finds the first stop string in a completion that grows token by token. It works on bytes, so a string or a
/// character may span any number of tokens.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    strings: Vec<Vec<u8>>,
    bytes: Vec<u8>,
}

impl StopMatcher {
    /// Starts with an empty completion.
    pub fn new(stops: &StopSet) -> Self {
        StopMatcher {
            strings: stops.strings.iter().map(|s| s.clone().into_bytes()).collect(),
            bytes: Vec::new(),
        }
    }

    /// Appends a token's bytes ([`Tokenizer::token_bytes`]) and returns the stop string that is now complete, if any. Of several
    /// matches it returns the one that starts first, then the longest.
    pub fn push(&mut self, token_bytes: &[u8]) -> Option<StopHit> {
        let old_len = self.bytes.len();
        self.bytes.extend_from_slice(token_bytes);
        let hits = self.strings.iter().enumerate().filter_map(|(string, stop)| {
            // Matches that end in the old bytes were reported earlier.
            let from = (old_len + 1).saturating_sub(stop.len());
            let at = self.bytes[from..].windows(stop.len().max(1)).position(|window| window == stop)?;
            Some(StopHit { string, start: from + at, end: from + at + stop.len() })
        });
        hits.min_by_key(|hit| (hit.start, std::cmp::Reverse(hit.end)))
    }

    /// Returns the number of bytes of the completion that can be shown. The remaining bytes may be the start of a stop string.
    pub fn num_safe_bytes(&self) -> usize {
        let total = self.bytes.len();
        let held = self.strings.iter().map(|stop| {
            let longest = stop.len().saturating_sub(1).min(total);
            (0..=longest).rev().find(|&n| stop.starts_with(&self.bytes[total - n..])).unwrap_or(0)
        });
        total - held.max().unwrap_or(0)
    }

    /// Returns all bytes pushed so far.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matcher(strings: &[&str]) -> StopMatcher {
        let strings = strings.iter().map(|s| (*s).to_owned()).collect();
        StopMatcher::new(&StopSet { strings, ..Default::default() })
    }

    #[test]
    fn a_stop_string_spread_over_tokens_is_found_where_it_starts() {
        let mut m = matcher(&["<|im_end|>"]);
        for piece in ["yes <", "|", "im", "_", "end", "|"] {
            assert_eq!(m.push(piece.as_bytes()), None);
        }
        assert_eq!(m.num_safe_bytes(), 4);
        assert_eq!(m.push(b">\n"), Some(StopHit { string: 0, start: 4, end: 14 }));
        assert_eq!(&m.bytes()[..4], b"yes ");
    }

    #[test]
    fn overlaps_and_split_characters() {
        let mut m = matcher(&["aab", "é", "ab"]);
        assert_eq!(m.push(b"aa"), None);
        assert_eq!(m.num_safe_bytes(), 0);
        assert_eq!(m.push(b"a"), None);
        assert_eq!(m.num_safe_bytes(), 1);
        // "aab" starts one byte before "ab".
        assert_eq!(m.push(b"b"), Some(StopHit { string: 0, start: 1, end: 4 }));
        let mut m = matcher(&["é"]);
        assert_eq!(m.push(&[b'x', 0xC3]), None);
        assert_eq!(m.num_safe_bytes(), 1);
        assert_eq!(m.push(&[0xA9]), Some(StopHit { string: 0, start: 1, end: 3 }));
    }

    #[test]
    fn no_strings_never_stop() {
        let mut m = matcher(&[]);
        assert_eq!(m.push(b"anything"), None);
        assert_eq!(m.num_safe_bytes(), 8);
    }
}
