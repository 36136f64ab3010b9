//! When a completion ends: stop tokens and stop strings.
//!
//! Stop ids come from `generation_config.json` and the tokenizer. Nothing else of `generation_config.json` is read:
//! sampling parameters there are the publisher's, not this run's.

use std::path::Path;

use crate::{Result, TextError, Tokenizer};

/// What ends a completion. One set serves the sampler, the loss mask and the loaders.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopSet {
    /// Token ids, sorted, each once.
    pub ids: Vec<u32>,
    /// Strings, none empty, each once.
    pub strings: Vec<String>,
    /// The id that fills unused positions, if the model names one.
    pub pad_id: Option<u32>,
}

impl StopSet {
    /// Reads `generation_config.json` in `dir` if it is there, adds the tokenizer's end token and `extra_strings`.
    pub fn from_dir(dir: &Path, tokenizer: &Tokenizer, extra_strings: &[String]) -> Result<Self> {
        let _ = (dir, tokenizer, extra_strings);
        Err(TextError::Conversation { problem: "stop sets are not built in yet" })
    }

    /// Whether this token ends a completion.
    pub fn is_stop(&self, id: u32) -> bool {
        self.ids.binary_search(&id).is_ok()
    }
}

/// A stop string was completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopHit {
    /// Index into [`StopSet::strings`].
    pub string: usize,
    /// Where the stop string starts, in bytes from the start of the completion: text is cut here.
    pub start: usize,
    /// Where it ends, in bytes.
    pub end: usize,
}

/// Finds the first stop string in a completion that grows token by token.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    strings: Vec<Vec<u8>>,
    bytes: Vec<u8>,
}

impl StopMatcher {
    /// Starts an empty completion.
    pub fn new(stops: &StopSet) -> Self {
        StopMatcher {
            strings: stops.strings.iter().map(|s| s.clone().into_bytes()).collect(),
            bytes: Vec::new(),
        }
    }

    /// Appends a token's bytes ([`Tokenizer::token_bytes`]); tells whether a stop string is now complete.
    pub fn push(&mut self, token_bytes: &[u8]) -> Option<StopHit> {
        self.bytes.extend_from_slice(token_bytes);
        let _ = &self.strings;
        None
    }
}
