//! A model's vocabulary.

use std::path::Path;

use crate::{Result, TextError};

/// Text ↔ token ids.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    eos_token: Option<u32>,
    pad_token: Option<u32>,
}

impl Tokenizer {
    /// Loads the tokenizer of the model in `dir`.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        Err(TextError::NoTokenizer { dir: dir.to_owned() })
    }

    /// Encodes plain text: literals of control tokens in it are ordinary text.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_control(text, &[])
    }

    /// Encodes text in which control tokens are recognised, except the ids in `excluded` (media placeholders).
    pub fn encode_control(&self, text: &str, excluded: &[u32]) -> Result<Vec<u32>> {
        let _ = (text, excluded);
        Err(TextError::Conversation { problem: "encoding is not built in yet" })
    }

    /// Encodes plain text with the start and end tokens that the tokenizer's post-processor adds (BERT, CLIP).
    pub fn encode_framed(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_text(text)
    }

    /// Decodes ids; bytes that are no UTF-8 become U+FFFD. With `skip_special`, special tokens are left out.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let _ = (ids, skip_special);
        Err(TextError::Conversation { problem: "decoding is not built in yet" })
    }

    /// The bytes a token adds to a completion. Unknown ids add nothing.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.inner.id_to_token(id).map(String::into_bytes).unwrap_or_default()
    }

    /// Id of a token by its literal.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// One more than the largest id, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Whether the id is a special (control) token.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .get(&id)
            .is_some_and(|token| token.special)
    }

    /// The token that ends a turn, if the tokenizer names one.
    pub fn eos_token(&self) -> Option<u32> {
        self.eos_token
    }

    /// The padding token, if the tokenizer names one.
    pub fn pad_token(&self) -> Option<u32> {
        self.pad_token
    }
}

/// Decodes a completion token by token, holding back bytes that do not yet form a character.
#[derive(Debug, Clone, Default)]
pub struct StreamDecoder {
    pending: Vec<u8>,
    skip_special: bool,
}

impl StreamDecoder {
    /// Starts a completion. With `skip_special`, special tokens add nothing.
    pub fn new(skip_special: bool) -> Self {
        StreamDecoder { pending: Vec::new(), skip_special }
    }

    /// The text that this token completes; may be empty.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        if !(self.skip_special && tokenizer.is_special(id)) {
            self.pending.extend(tokenizer.token_bytes(id));
        }
        String::new()
    }

    /// The rest: bytes still held back become U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}
