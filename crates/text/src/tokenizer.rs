//! Model vocabulary: text ↔ token ids.
//!
//! Source of the format: Hugging Face `tokenizers` (`tokenizer.json`) and `transformers` (`tokenizer_config.json`,
//! `special_tokens_map.json`). Normaliser, pre-tokeniser, model and decoder come from the `tokenizers` crate. The search for
//! added tokens is implemented here, because the author of a literal decides whether it is a control token.
//!
//! *Control tokens* are the added tokens marked special, and those spelled `<|…|>` even if not marked (Qwen leaves
//! `<|fim_prefix|>` and similar tokens unmarked). Other added tokens (`<think>`, `<tool_call>`) are vocabulary: they are
//! recognised in any text, as in `transformers`.
//!
//! Differences from `transformers`: truncation and padding in `tokenizer.json` are ignored. Added tokens are matched in the
//! original text, even those marked `normalized`. Added tokens are decoded from their literal, not through the byte table. BPE
//! dropout, files over 256 MiB, and ids of 2²⁴ and more are errors.
//!
//! `tokenizer.json` comes with a model and is not trusted. Panics inside the crate are reported as errors. A normaliser that
//! would make a text many times longer is rejected before it runs. A `Precompiled` map that declares more bytes than the file
//! contains is rejected before memory is allocated for it.

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;
use tokenizers::decoders::bpe::BPEDecoder;
use tokenizers::decoders::wordpiece::WordPiece as WordPieceDecoder;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizer::Range;
use tokenizers::normalizers::bert::BertNormalizer;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split as SplitAt, SplitPattern};
use tokenizers::processors::bert::BertProcessing;
use tokenizers::utils::SysRegex;
use tokenizers::{
    AddedToken, Model, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper, OffsetType,
    PreTokenizedString, PreTokenizer, PreTokenizerWrapper, SplitDelimiterBehavior, Token,
};

use crate::charsmap::check_charsmaps;
use crate::files::{read_json, read_limited};
use crate::{Cause, Result, TextError};

const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Limits on the growth of a text in a normaliser: a factor, and a number of additional bytes. Published normalisers triple the
/// length (`▁` for each space) and add one piece.
const MAX_GROWTH: usize = 16;
const MAX_MORE_BYTES: usize = 1 << 10;
/// Maximum number of steps of a normaliser. Published ones have up to ten.
const MAX_STEPS: usize = 100;

/// Number of stretches of text whose ids are remembered, and the length of the longest in bytes.
const REMEMBERED: usize = 64;
const MAX_REMEMBERED_BYTES: usize = 256;

/// First of the ids that mark holes and control tokens inside [`Tokenizer::encode_runs`].
const MARK: u32 = 1 << 31;
const MAX_VOCAB: usize = 1 << 24;

/// Pattern by which Qwen models split text before byte pairs are merged (`transformers`, `tokenization_qwen2.py`).
const QWEN_PRE_TOKENS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Converter between text and token ids.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Added tokens for each first byte of their literal, longest first.
    added: Vec<Vec<Added>>,
    control_ids: HashSet<u32>,
    /// Unknown token, the only special token that text may become.
    unk_id: Option<u32>,
    pieces: PieceFormat,
    vocab_size: usize,
    /// Named tokens as templates see them, such as `eos_token` → `<|im_end|>`.
    named_tokens: BTreeMap<String, String>,
    /// Latest short stretches of text with their ids, each in the place of its hash.
    remembered: Arc<[Remembered]>,
}

/// A stretch of text with its ids; `None` before the first one.
type Remembered = Mutex<Option<(String, Vec<u32>)>>;

#[derive(Debug, Clone)]
struct Added {
    id: u32,
    token: AddedToken,
    control: bool,
}

/// Rule by which the decoder turns token strings into bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PieceFormat {
    /// One character per byte (GPT-2's table).
    ByteLevel,
    /// SentencePiece: `▁` is a space, `<0x0A>` a byte, and one space at the start is dropped.
    SentencePiece,
    /// Other rules (word pieces), implemented only by the decoder.
    Opaque,
}

/// Stretch of the string to encode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Run {
    /// Text in which literals of control tokens become control tokens.
    Trusted(String),
    /// Text in which literals of control tokens stay text.
    Plain(String),
    /// Run of `count` copies of `token` that belong to `medium`.
    Hole { medium: usize, token: u32, count: usize },
}

/// Result of encoding runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct EncodedRuns {
    pub ids: Vec<u32>,
    /// Holes with `count > 0`, as (medium, start, len).
    pub holes: Vec<(usize, usize, usize)>,
}

impl Tokenizer {
    /// Loads the tokenizer of the model in `dir`: `tokenizer.json`, else PhoBERT's `vocab.txt` + `bpe.codes`, else BERT's
    /// `vocab.txt`, else Qwen's `vocab.json` + `merges.txt`. `tokenizer_config.json` and `special_tokens_map.json` are used if
    /// they exist.
    ///
    /// # Errors
    /// Returns [`TextError::NoTokenizer`] if none of these exists, and [`TextError::Read`], [`TextError::TooLarge`] or
    /// [`TextError::BadFile`] if a file cannot be used.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let config_path = dir.join("tokenizer_config.json");
        let config = read_json(&config_path, MAX_CONFIG_BYTES)?.unwrap_or(Value::Null);
        let named = read_json(&dir.join("special_tokens_map.json"), MAX_CONFIG_BYTES)?.unwrap_or(Value::Null);

        let mut num_known = None;
        let path = dir.join("tokenizer.json");
        let (path, mut inner) = match read_limited(&path, MAX_TOKENIZER_BYTES)? {
            Some(bytes) => {
                let unreadable =
                    |e: tokenizers::Error| broken(&path, "not a tokenizer this program can read", e);
                check_charsmaps(&bytes).map_err(|e| unreadable(e.into()))?;
                let inner = guarded(|| tokenizers::Tokenizer::from_bytes(&bytes)).map_err(unreadable)?;
                check_parts(&inner).map_err(|what| bad(&path, what))?;
                (path, inner)
            }
            None if dir.join("bpe.codes").is_file() => {
                let (inner, size) = phobert_from_slow_files(dir, &config)?;
                num_known = Some(size);
                (dir.join("vocab.txt"), inner)
            }
            None => match bert_from_vocabulary(&dir.join("vocab.txt"), &config)? {
                Some(inner) => (dir.join("vocab.txt"), inner),
                None => (dir.join("vocab.json"), qwen_from_slow_files(dir, &config)?),
            },
        };
        if let ModelWrapper::BPE(model) = inner.get_model()
            && model.dropout.is_some_and(|p| p > 0.0)
        {
            return Err(bad(&path, "BPE dropout makes ids random; set model.dropout to null".to_owned()));
        }
        inner
            .with_truncation(None)
            .map_err(|e| broken(&path, "truncation cannot be switched off", e))?
            .with_padding(None);
        let known = inner.get_added_tokens_decoder();
        for (id, token) in added_tokens_of(&config, &config_path)? {
            if known.get(&id) != Some(&token) {
                add_token(&mut inner, id, token, &config_path)?;
            }
        }
        let mut this = Self::new(inner, &path, &config, &named)?;
        this.vocab_size = num_known.unwrap_or(this.vocab_size);
        Ok(this)
    }

    fn new(mut inner: tokenizers::Tokenizer, path: &Path, config: &Value, named: &Value) -> Result<Self> {
        let mut named_tokens = BTreeMap::new();
        let mut special_literals = HashSet::new();
        for source in [named, config] {
            for (key, value) in source.as_object().into_iter().flatten() {
                if let Some(literal) = token_literal(value)
                    && key.ends_with("_token")
                {
                    named_tokens.insert(key.clone(), literal.to_owned());
                    special_literals.insert(literal.to_owned());
                }
                if key == "additional_special_tokens" || key == "extra_special_tokens" {
                    let list = value.as_array().into_iter().flatten();
                    let map = value.as_object().into_iter().flatten().map(|(_, v)| v);
                    special_literals.extend(list.chain(map).filter_map(token_literal).map(str::to_owned));
                }
            }
        }
        // Some tokens are special in the configuration but not marked in `tokenizer.json`. Only added tokens are marked here: a
        // plain word of the vocabulary that serves as padding must still be reachable from text.
        for (id, mut token) in inner.get_added_tokens_decoder() {
            if !token.special && special_literals.contains(&token.content) {
                token.special = true;
                add_token(&mut inner, id, token, path)?;
            }
        }

        let mut added: Vec<Vec<Added>> = vec![Vec::new(); 256];
        let mut control_ids = HashSet::new();
        for (id, token) in inner.get_added_tokens_decoder() {
            let control = token.special || (token.content.starts_with("<|") && token.content.ends_with("|>"));
            if control {
                control_ids.insert(id);
            }
            if let Some(&first) = token.content.as_bytes().first() {
                added[usize::from(first)].push(Added { id, token, control });
            }
        }
        for same_start in &mut added {
            same_start.sort_by_key(|a| (std::cmp::Reverse(a.token.content.len()), a.id));
        }

        let vocab_size = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        if vocab_size > MAX_VOCAB {
            return Err(bad(path, format!("largest id is {}, expected below {MAX_VOCAB}", vocab_size - 1)));
        }
        let unk_id = match inner.get_model() {
            ModelWrapper::BPE(model) => model.get_unk_token().as_deref().and_then(|t| inner.token_to_id(t)),
            ModelWrapper::WordPiece(model) => inner.token_to_id(&model.unk_token),
            ModelWrapper::WordLevel(model) => inner.token_to_id(&model.unk_token),
            // The crate does not expose the unknown token, but the configuration names it.
            ModelWrapper::Unigram(_) => named_tokens.get("unk_token").and_then(|t| inner.token_to_id(t)),
        };
        let decoder = serde_json::to_string(&inner.get_decoder())
            .map_err(|e| broken(path, "its decoder cannot be inspected", e))?;
        let pieces = if decoder.contains("\"ByteLevel\"") {
            PieceFormat::ByteLevel
        } else if decoder.contains("\"ByteFallback\"") || decoder.contains('▁') {
            PieceFormat::SentencePiece
        } else {
            PieceFormat::Opaque
        };
        let remembered = (0..REMEMBERED).map(|_| Mutex::default()).collect();
        Ok(Tokenizer { inner, added, control_ids, unk_id, pieces, vocab_size, named_tokens, remembered })
    }

    /// Encodes plain text. Literals of control tokens in it are ordinary text.
    ///
    /// # Errors
    /// Returns [`TextError::Encode`] or [`TextError::ControlInText`].
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.encode_runs(&[Run::Plain(text.to_owned())], &[])?.ids)
    }

    /// Encodes text in which control tokens are recognised, except the ids in `excluded` (media placeholders), whose literals are
    /// ordinary text. No tokens are added before or after the text.
    ///
    /// # Errors
    /// Returns [`TextError::Encode`] or [`TextError::ControlInText`].
    pub fn encode_control(&self, text: &str, excluded: &[u32]) -> Result<Vec<u32>> {
        Ok(self.encode_runs(&[Run::Trusted(text.to_owned())], excluded)?.ids)
    }

    /// Encodes plain text with the start and end tokens that the tokenizer's post-processor adds (BERT's `[CLS]` and `[SEP]`,
    /// CLIP's). Literals of control tokens are ordinary text; the ids are not truncated.
    ///
    /// # Errors
    /// Returns [`TextError::Encode`] or [`TextError::ControlInText`].
    pub fn encode_framed(&self, text: &str) -> Result<Vec<u32>> {
        self.framed(text, self.encode_text(text)?)
    }

    /// Encodes a text that a model continues, as [`Self::encode_control`], with the tokens that the tokenizer's post-processor adds,
    /// such as Llama's start token.
    ///
    /// # Errors
    /// Returns [`TextError::Encode`] or [`TextError::ControlInText`].
    pub fn encode_continued(&self, text: &str, excluded: &[u32]) -> Result<Vec<u32>> {
        self.framed(text, self.encode_control(text, excluded)?)
    }

    fn framed(&self, text: &str, ids: Vec<u32>) -> Result<Vec<u32>> {
        let tokens = ids.into_iter().map(|id| Token::new(id, String::new(), (0, 0))).collect();
        let encoding = tokenizers::Encoding::from_tokens(tokens, 0);
        let encoding = guarded(|| self.inner.post_process(encoding, None, true));
        let encoding = encoding.map_err(|e| encode_error(text, e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the text with a space inserted after the first character of each control token's literal, so that it stays
    /// ordinary text.
    pub(crate) fn defused(&self, text: &str) -> String {
        let mut found = Vec::new();
        self.find_added_tokens(text, &[(text.len(), true)], &[], &mut found);
        let control =
            found.iter().filter(|f| matches!(f.fill, Fill::Token(id) if self.control_ids.contains(&id)));
        let (mut out, mut at) = (String::with_capacity(text.len()), 0);
        for literal in control {
            // White space that the token would absorb stays in front of it.
            let inside = &text[literal.start..literal.end];
            let first = literal.start + inside.len() - inside.trim_start().len();
            let cut = first + text[first..].chars().next().map_or(0, char::len_utf8);
            out.push_str(&text[at..cut]);
            out.push(' ');
            at = cut;
        }
        out + &text[at..]
    }

    /// Encodes consecutive runs as one string, so that a word may begin in one run and end in the next. Ids in `excluded` never
    /// come from text.
    pub(crate) fn encode_runs(&self, runs: &[Run], excluded: &[u32]) -> Result<EncodedRuns> {
        let mut text = String::new();
        let mut is_trusted = Vec::new(); // (end byte, trusted) of every run
        let mut fixed: Vec<Fixed> = Vec::new();
        for run in runs {
            match run {
                Run::Trusted(s) | Run::Plain(s) => text.push_str(s),
                Run::Hole { medium, token, count } => {
                    let start = text.len();
                    text.push('\u{FFFC}');
                    let fill = Fill::Hole { medium: *medium, token: *token, count: *count };
                    fixed.push(Fixed { start, end: text.len(), fill });
                }
            }
            is_trusted.push((text.len(), matches!(run, Run::Trusted(_))));
        }
        self.find_added_tokens(&text, &is_trusted, excluded, &mut fixed);

        let ids = guarded(|| match self.byte_level_cuts() {
            Some(cuts) => self.byte_level_ids(&text, &fixed, &cuts),
            None => self.ids(&text, &fixed),
        });
        let ids = ids.map_err(|e| encode_error(&text, e))?;

        let mut out = EncodedRuns::default();
        for id in ids {
            match id.checked_sub(MARK).and_then(|k| fixed.get(k as usize)).map(|f| f.fill) {
                Some(Fill::Token(id)) => out.ids.push(id),
                Some(Fill::Hole { medium, token, count }) => {
                    if count > 0 {
                        out.holes.push((medium, out.ids.len(), count));
                    }
                    out.ids.resize(out.ids.len() + count, token);
                }
                None if (self.control_ids.contains(&id) || excluded.contains(&id))
                    && Some(id) != self.unk_id =>
                {
                    let token = self.inner.id_to_token(id).unwrap_or_default();
                    return Err(TextError::ControlInText { excerpt: excerpt(&text), token, id });
                }
                // Merging left a piece that is not in the vocabulary.
                None if id as usize >= self.vocab_size => out.ids.extend(self.unk_id),
                None => out.ids.push(id),
            }
        }
        Ok(out)
    }

    /// Adds the matches between the holes to `fixed`, which is sorted afterwards. Of overlapping matches the leftmost wins, then
    /// the longest.
    fn find_added_tokens(
        &self,
        text: &str,
        is_trusted: &[(usize, bool)],
        excluded: &[u32],
        fixed: &mut Vec<Fixed>,
    ) {
        let holes = std::mem::take(fixed);
        let mut holes = holes.into_iter().peekable();
        let (mut at, mut run) = (0, 0);
        while at < text.len() {
            if let Some(hole) = holes.next_if(|hole| hole.start == at) {
                at = hole.end;
                fixed.push(hole);
                continue;
            }
            while is_trusted.get(run).is_some_and(|&(end, _)| end <= at) {
                run += 1;
            }
            let (run_end, trusted) = is_trusted.get(run).copied().unwrap_or((text.len(), false));
            let limit = holes.peek().map_or(text.len(), |hole| hole.start);
            let found = self.added[usize::from(text.as_bytes()[at])].iter().find(|a| {
                let end = at + a.token.content.len();
                text.as_bytes()[at..].starts_with(a.token.content.as_bytes())
                    && end <= limit
                    && !excluded.contains(&a.id)
                    && (!a.control || (trusted && end <= run_end))
                    && (!a.token.single_word || stands_alone(text, at, end))
            });
            let Some(Added { id, token, .. }) = found else {
                at += 1;
                continue;
            };
            let (mut start, mut end) = (at, at + token.content.len());
            if token.lstrip {
                let previous = fixed.last().map_or(0, |f| f.end);
                start = text[..start].trim_end().len().max(previous);
            }
            if token.rstrip {
                end = limit - text[end..limit].trim_start().len();
            }
            fixed.push(Fixed { start, end, fill: Fill::Token(*id) });
            at = end;
        }
    }

    /// Returns the patterns that cut a text before its bytes are written as characters, if that is all that happens to it before the
    /// model, besides [`NFC`]; `None` for other kinds of tokenizers.
    fn byte_level_cuts(&self) -> Option<Vec<&SysRegex>> {
        if !matches!(self.inner.get_normalizer(), None | Some(NormalizerWrapper::NFC(_))) {
            return None;
        }
        let Some(PreTokenizerWrapper::Sequence(steps)) = self.inner.get_pre_tokenizer() else { return None };
        let (last, cuts) = steps.as_ref().split_last()?;
        let plain = |step: &ByteLevel| !step.add_prefix_space && !step.use_regex;
        if !matches!(last, PreTokenizerWrapper::ByteLevel(step) if plain(step)) {
            return None;
        }
        let cut = |step| match step {
            &PreTokenizerWrapper::Split(
                ref step @ SplitAt { behavior: SplitDelimiterBehavior::Isolated, invert: false, .. },
            ) => Some(&step.regex),
            _ => None,
        };
        cuts.iter().map(cut).collect()
    }

    /// Returns what [`Self::ids`] returns, for the tokenizers of [`Self::byte_level_cuts`]. The pipeline of `tokenizers` stores the
    /// text, the origin and the alignment of each piece, which takes hundreds of bytes per token and most of the time.
    fn byte_level_ids(
        &self,
        text: &str,
        fixed: &[Fixed],
        cuts: &[&SysRegex],
    ) -> tokenizers::Result<Vec<u32>> {
        let (mut ids, mut at) = (Vec::new(), 0);
        let ends = fixed.iter().map(|f| (f.start, f.end)).chain([(text.len(), text.len())]);
        for (k, (start, end)) in ends.enumerate() {
            let stretch = text.get(at..start).ok_or("text cut inside a character")?;
            // A template writes the same short stretches in every row.
            if (1..=MAX_REMEMBERED_BYTES).contains(&stretch.len()) {
                let mut hash = DefaultHasher::new();
                stretch.hash(&mut hash);
                let slot = &self.remembered[hash.finish() as usize % self.remembered.len()];
                let known = || slot.lock().unwrap_or_else(PoisonError::into_inner);
                let found = known().as_ref().filter(|(text, _)| text == stretch).map(|(_, ids)| ids.clone());
                let own = match found {
                    Some(own) => own,
                    None => {
                        let mut own = Vec::new();
                        self.add_byte_level(stretch, cuts, &mut own)?;
                        *known() = Some((stretch.to_owned(), own.clone()));
                        own
                    }
                };
                ids.extend(own);
            } else {
                self.add_byte_level(stretch, cuts, &mut ids)?;
            }
            if k < fixed.len() {
                ids.push(MARK + k as u32);
            }
            at = end;
        }
        Ok(ids)
    }

    /// Adds the ids of a stretch without added tokens.
    fn add_byte_level(
        &self,
        stretch: &str,
        cuts: &[&SysRegex],
        ids: &mut Vec<u32>,
    ) -> tokenizers::Result<()> {
        let mut spelled = String::new();
        let mut add = |piece: &str| {
            spelled.clear();
            spelled.extend(piece.bytes().map(char_of_byte));
            let tokens = self.inner.get_model().tokenize(&spelled)?;
            ids.extend(tokens.into_iter().map(|token| token.id));
            Ok(())
        };
        match self.inner.get_normalizer() {
            // ASCII is normal.
            Some(normalizer) if !stretch.is_ascii() => {
                let mut normal = NormalizedString::from(stretch);
                normalizer.normalize(&mut normal)?;
                each_piece(normal.get(), cuts, &mut add)
            }
            _ => each_piece(stretch, cuts, &mut add),
        }
    }

    /// Returns the ids of a text. Instead of the added tokens already found, they contain [`MARK`] plus their index.
    fn ids(&self, text: &str, fixed: &[Fixed]) -> tokenizers::Result<Vec<u32>> {
        let mut pre = PreTokenizedString::from(text);
        self.tokenize(&mut pre, fixed)?;
        Ok(pre.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
    }

    /// Runs the pipeline of `tokenizers` around the added tokens already found.
    fn tokenize(&self, pre: &mut PreTokenizedString, fixed: &[Fixed]) -> tokenizers::Result<()> {
        pre.split(|_, whole| {
            let mut splits: Vec<(NormalizedString, Option<Vec<Token>>)> =
                Vec::with_capacity(2 * fixed.len() + 1);
            // Before normalisation both kinds of ranges are equal. A range of the original text would make the crate scan all
            // earlier alignments, which is quadratic in the number of added tokens.
            let slice = |range: std::ops::Range<usize>| {
                whole.slice(Range::Normalized(range)).ok_or("text cut inside a character")
            };
            let mut at = 0;
            for (k, f) in fixed.iter().enumerate() {
                if at < f.start {
                    splits.push((slice(at..f.start)?, None));
                }
                let mark = Token::new(MARK + k as u32, String::new(), (0, f.end - f.start));
                splits.push((slice(f.start..f.end)?, Some(vec![mark])));
                at = f.end;
            }
            if at < whole.get().len() {
                splits.push((slice(at..whole.get().len())?, None));
            }
            Ok(splits)
        })?;
        pre.split(|_, mut piece| {
            if let Some(normalizer) = self.inner.get_normalizer() {
                let len = piece.get().len();
                normalize(
                    normalizer,
                    &mut piece,
                    len.saturating_mul(MAX_GROWTH).saturating_add(MAX_MORE_BYTES),
                )?;
            }
            Ok([piece])
        })?;
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(pre)?;
        }
        pre.tokenize(|piece| self.inner.get_model().tokenize(piece.get()))
    }

    /// Decodes ids. Bytes that are not UTF-8 become U+FFFD, and unknown ids are dropped. With `skip_special`, special tokens are
    /// left out.
    ///
    /// # Errors
    /// Returns [`TextError::Decode`] from decoders that are neither byte-level nor SentencePiece.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        if self.pieces == PieceFormat::Opaque {
            let decoded = guarded(|| self.inner.decode(ids, skip_special));
            return decoded.map_err(|e| TextError::Decode { num_ids: ids.len(), source: e });
        }
        let mut stream = StreamDecoder::new(skip_special);
        let mut text = String::new();
        for &id in ids {
            text.push_str(&stream.push(self, id));
        }
        text.push_str(&stream.finish());
        Ok(text)
    }

    /// Returns the bytes that a token adds to a completion; unknown ids add none. The bytes of all tokens form the completion's
    /// text, so stop strings can be found even if a character spans tokens. With SentencePiece the text still contains the
    /// leading space that decoding drops. With word pieces the bytes are the token's literal.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        if let Some(token) = self.inner.get_added_vocabulary().get_added_tokens_decoder().get(&id) {
            return token.content.clone().into_bytes();
        }
        let Some(piece) = self.inner.get_model().id_to_token(id) else { return Vec::new() };
        match self.pieces {
            PieceFormat::ByteLevel => match piece.chars().map(byte_of_char).collect() {
                Some(bytes) => bytes,
                None => piece.into_bytes(),
            },
            PieceFormat::SentencePiece => {
                let hex =
                    piece.strip_prefix("<0x").and_then(|p| p.strip_suffix('>')).filter(|p| p.len() == 2);
                match hex.and_then(|p| u8::from_str_radix(p, 16).ok()) {
                    Some(byte) => vec![byte],
                    None => piece.replace('▁', " ").into_bytes(),
                }
            }
            PieceFormat::Opaque => piece.into_bytes(),
        }
    }

    /// Returns the id of a token by its literal.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns a token's literal: the text of an added token, or the vocabulary's spelling of another token.
    pub fn token(&self, id: u32) -> Option<String> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder().get(&id);
        added.map(|token| token.content.clone()).or_else(|| self.inner.get_model().id_to_token(id))
    }

    /// Returns the largest id plus one, including added tokens. A model's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Reports whether the id is marked as a special token. Decoding with `skip_special` leaves these out.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .get(&id)
            .is_some_and(|token| token.special)
    }

    /// Returns the content of the `tokenizer.json` that describes this tokenizer, whatever files it came from.
    ///
    /// # Errors
    /// Returns [`TextError::Unwritable`] if the library cannot write it.
    pub fn to_json(&self) -> Result<Value> {
        let text = self.inner.to_string(false).map_err(|source| TextError::Unwritable { source })?;
        serde_json::from_str(&text).map_err(|e| TextError::Unwritable { source: e.into() })
    }

    /// Returns the token with which a text begins, if the tokenizer has one.
    pub fn start_token(&self) -> Option<u32> {
        self.named_tokens.get("bos_token").and_then(|t| self.token_id(t))
    }

    /// Returns the token that ends a turn, if the tokenizer has one.
    pub fn eos_token(&self) -> Option<u32> {
        self.named_tokens.get("eos_token").and_then(|t| self.token_id(t))
    }

    /// Returns the padding token, if the tokenizer has one.
    pub fn pad_token(&self) -> Option<u32> {
        self.named_tokens.get("pad_token").and_then(|t| self.token_id(t))
    }

    /// Returns the literals of `eos_token`, `pad_token`, … from the configuration.
    pub(crate) fn named_tokens(&self) -> &BTreeMap<String, String> {
        &self.named_tokens
    }
}

/// Calls `add` with each piece of a text that is cut at the ends of all matches of the first pattern, and so on.
fn each_piece(
    text: &str,
    cuts: &[&SysRegex],
    add: &mut impl FnMut(&str) -> tokenizers::Result<()>,
) -> tokenizers::Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    let Some((cut, rest)) = cuts.split_first() else { return add(text) };
    let mut at = 0;
    for (start, end) in cut.find_iter(text) {
        each_piece(&text[at..start], rest, add)?;
        each_piece(&text[start..end], rest, add)?;
        at = end;
    }
    each_piece(&text[at..], rest, add)
}

/// Runs code of the crate and reports a panic as an error of the input file.
fn guarded<T>(run: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    omnigrpo_guard::guarded(run).unwrap_or_else(|_| {
        Err("the tokenizer stopped on an internal error; its file is damaged, copy it again".into())
    })
}

/// Returns an error if a part of the tokenizer cannot work or would make every token of a text very long.
fn check_parts(inner: &tokenizers::Tokenizer) -> std::result::Result<(), String> {
    let parts = [
        ("normalizer", serde_json::to_value(inner.get_normalizer())),
        ("pre_tokenizer", serde_json::to_value(inner.get_pre_tokenizer())),
        ("decoder", serde_json::to_value(inner.get_decoder())),
    ];
    for (name, part) in parts {
        let part = part.map_err(|e| format!("{name} cannot be inspected: {e}"))?;
        let mut steps = 0;
        let mut open = vec![&part];
        while let Some(value) = open.pop() {
            match value {
                Value::Array(list) => open.extend(list),
                Value::Object(map) => {
                    steps += 1;
                    let kind = map.get("type").and_then(Value::as_str).unwrap_or_default();
                    if kind == "FixedLength" && map.get("length").and_then(Value::as_u64) == Some(0) {
                        return Err(format!("{name}: FixedLength has length 0, expected at least 1"));
                    }
                    for key in ["content", "prepend"] {
                        let len = map.get(key).and_then(Value::as_str).map_or(0, str::len);
                        if len > MAX_MORE_BYTES {
                            return Err(format!(
                                "{name}: {kind} inserts {len} bytes, expected at most {MAX_MORE_BYTES}"
                            ));
                        }
                    }
                    open.extend(map.values());
                }
                _ => {}
            }
        }
        if steps > MAX_STEPS {
            return Err(format!("{name} has {steps} parts, expected at most {MAX_STEPS}"));
        }
    }
    Ok(())
}

/// Normalises step by step. A step that could make the text longer than `limit` bytes is rejected before it runs.
fn normalize(step: &NormalizerWrapper, text: &mut NormalizedString, limit: usize) -> tokenizers::Result<()> {
    let before = text.get();
    let most = match step {
        NormalizerWrapper::Sequence(steps) => {
            return steps.as_ref().iter().try_for_each(|step| normalize(step, text, limit));
        }
        NormalizerWrapper::Prepend(step) => before.len() + step.prepend.len(),
        // This assumes a match at every byte. In published normalisers the content is about as long as its pattern.
        NormalizerWrapper::Replace(step) => (before.len() + 1).saturating_mul(step.content.len().max(1)),
        NormalizerWrapper::Precompiled(map) => {
            let mut ends = Vec::new();
            before.char_indices().fold(0usize, |sum, (at, c)| {
                // The crate looks up characters, and graphemes of up to five bytes.
                ends.clear();
                ends.extend(
                    before[at..].char_indices().map(|(i, c)| i + c.len_utf8()).take_while(|&end| end < 6),
                );
                let longest =
                    ends.iter().filter_map(|&end| map.transform(&before[at..at + end])).map(str::len).max();
                sum.saturating_add(longest.unwrap_or(0).max(c.len_utf8()))
            })
        }
        _ => before.len(),
    };
    if most > limit {
        let what = format!("its normalizer makes {} bytes of text longer than {limit}", before.len());
        return Err(what.into());
    }
    step.normalize(text)
}

/// Stretch of the string whose ids are known before the model runs.
#[derive(Debug, Clone, Copy)]
struct Fixed {
    start: usize,
    end: usize,
    fill: Fill,
}

#[derive(Debug, Clone, Copy)]
enum Fill {
    Token(u32),
    Hole { medium: usize, token: u32, count: usize },
}

/// Decoder of a completion, token by token. It holds back bytes that do not yet form a character.
///
/// For byte-level and SentencePiece tokenizers, the pieces joined equal [`Tokenizer::decode`] of all ids.
#[derive(Debug, Clone, Default)]
pub struct StreamDecoder {
    pending: Vec<u8>,
    skip_special: bool,
    started: bool,
}

impl StreamDecoder {
    /// Starts a completion. With `skip_special`, special tokens add no text.
    pub fn new(skip_special: bool) -> Self {
        StreamDecoder { skip_special, ..Default::default() }
    }

    /// Returns the text that this token completes, which may be empty.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        if self.skip_special && tokenizer.is_special(id) {
            return String::new();
        }
        let bytes = tokenizer.token_bytes(id);
        let drop_space =
            !self.started && tokenizer.pieces == PieceFormat::SentencePiece && bytes.first() == Some(&b' ');
        self.started |= !bytes.is_empty();
        self.pending.extend_from_slice(&bytes[usize::from(drop_space)..]);

        let mut text = String::new();
        let mut done = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            let is_last = done + invalid.len() == self.pending.len();
            if invalid.is_empty() || (is_last && may_continue(invalid)) {
                break;
            }
            text.push('\u{FFFD}');
            done += invalid.len();
        }
        self.pending.drain(..done);
        text
    }

    /// Returns the rest. Bytes still held back become U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Reports whether further bytes can complete these bytes to a character.
fn may_continue(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
}

/// Inverts GPT-2's byte table: printable Latin-1 characters stand for themselves, and the other 68 bytes are 256, 257, … in
/// order.
fn byte_of_char(c: char) -> Option<u8> {
    let is_printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let code = c as u32;
    match u8::try_from(code) {
        Ok(byte) => is_printable(byte).then_some(byte),
        Err(_) => (0..=255u8).filter(|&b| !is_printable(b)).nth(code as usize - 256),
    }
}

/// Returns the character of a byte in GPT-2's table.
fn char_of_byte(byte: u8) -> char {
    let code = u32::from(byte);
    let code = match byte {
        0..=0x20 => code + 256,
        0x7F..=0xA0 => code - 0x7F + 256 + 33,
        0xAD => 256 + 67,
        _ => code,
    };
    char::from_u32(code).unwrap_or_default()
}

fn stands_alone(text: &str, start: usize, end: usize) -> bool {
    // The characters that the regular expression \w matches, except rare connector punctuation.
    let is_joiner = |c: char| matches!(c, '_' | '\u{200C}' | '\u{200D}');
    let is_word =
        |c: char| c.is_alphanumeric() || is_joiner(c) || unicode_normalization::char::is_combining_mark(c);
    !text[..start].chars().next_back().is_some_and(is_word)
        && !text[end..].chars().next().is_some_and(is_word)
}

/// Returns the literal of `"<s>"` or `{"content": "<s>", …}`.
fn token_literal(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// Returns `added_tokens_decoder` of `tokenizer_config.json`, by id.
fn added_tokens_of(config: &Value, path: &Path) -> Result<BTreeMap<u32, AddedToken>> {
    let mut tokens = BTreeMap::new();
    for (id, value) in config.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flatten() {
        let (Ok(id), Some(content)) = (id.parse::<u32>(), value.get("content").and_then(Value::as_str))
        else {
            return Err(bad(
                path,
                format!("added_tokens_decoder[{id:?}] is {value}, expected an id and a token"),
            ));
        };
        let flag = |name: &str| value.get(name).and_then(Value::as_bool).unwrap_or(false);
        let token = AddedToken::from(content, flag("special"))
            .single_word(flag("single_word"))
            .lstrip(flag("lstrip"))
            .rstrip(flag("rstrip"))
            .normalized(flag("normalized"));
        tokens.insert(id, token);
    }
    Ok(tokens)
}

/// Adds a token or changes its flags. The crate numbers new tokens itself, so the id is checked.
fn add_token(inner: &mut tokenizers::Tokenizer, id: u32, token: AddedToken, path: &Path) -> Result<()> {
    let content = token.content.clone();
    let added = if token.special { inner.add_special_tokens([token]) } else { inner.add_tokens([token]) };
    added.map_err(|e| broken(path, format!("token {content:?} cannot be added"), e))?;
    match inner.token_to_id(&content) {
        Some(got) if got == id => Ok(()),
        got => Err(bad(
            path,
            format!(
                "token {content:?} has id {id} here but {} in the vocabulary; the files do not belong together",
                got.map_or_else(|| "none".to_owned(), |got| got.to_string())
            ),
        )),
    }
}

/// Loads BERT's `vocab.txt`, with one word piece per line. Returns `None` if the file does not exist.
fn bert_from_vocabulary(path: &Path, config: &Value) -> Result<Option<tokenizers::Tokenizer>> {
    let Some(bytes) = read_limited(path, MAX_TOKENIZER_BYTES)? else { return Ok(None) };
    let broken = |e: tokenizers::Error| broken(path, "the vocabulary cannot be loaded", e);
    let vocab = WordPiece::read_bytes(&bytes).map_err(broken)?;
    let literal = |key: &str, default: &str| -> Result<(String, u32)> {
        let token = config.get(key).and_then(token_literal).unwrap_or(default);
        match vocab.get(token) {
            Some(&id) => Ok((token.to_owned(), id)),
            None => Err(bad(path, format!("the {key} {token:?} is missing; expected BERT's word pieces"))),
        }
    };
    let (cls, sep) = (literal("cls_token", "[CLS]")?, literal("sep_token", "[SEP]")?);
    let unk = literal("unk_token", "[UNK]")?;
    let special = [&cls, &sep, &unk].map(|(token, _)| AddedToken::from(token.clone(), true));
    let rare = [("pad_token", "[PAD]"), ("mask_token", "[MASK]")]
        .into_iter()
        .filter_map(|(key, default)| literal(key, default).ok())
        .map(|(token, _)| AddedToken::from(token, true));
    let flag = |key: &str| config.get(key).and_then(Value::as_bool);
    let model = WordPiece::builder().vocab(vocab.clone()).unk_token(unk.0).build().map_err(broken)?;
    let mut inner = tokenizers::Tokenizer::new(model);
    inner
        .with_normalizer(Some(BertNormalizer::new(
            true,
            flag("tokenize_chinese_chars").unwrap_or(true),
            flag("strip_accents"),
            flag("do_lower_case").unwrap_or(true),
        )))
        .map_err(broken)?;
    inner.with_pre_tokenizer(Some(BertPreTokenizer));
    inner.with_post_processor(Some(BertProcessing::new(sep, cls)));
    inner.with_decoder(Some(WordPieceDecoder::default()));
    inner.add_special_tokens(special.into_iter().chain(rare)).map_err(broken)?;
    Ok(Some(inner))
}

/// Loads PhoBERT's `vocab.txt` (a piece and its count per line; `@@` marks pieces that are not the end of a word) and `bpe.codes`
/// (two parts and their count per line). Also returns the number of pieces in the vocabulary. Merging also creates parts that are
/// not pieces; their ids come after the vocabulary. Source: `transformers` 5.23 `tokenization_phobert.py`.
fn phobert_from_slow_files(dir: &Path, config: &Value) -> Result<(tokenizers::Tokenizer, usize)> {
    const END: &str = "</w>";
    let (path, codes) = (dir.join("vocab.txt"), dir.join("bpe.codes"));
    let class = config.get("tokenizer_class").and_then(Value::as_str).unwrap_or("PhobertTokenizer");
    if class != "PhobertTokenizer" {
        let what = format!("tokenizer_class is {class:?}; with bpe.codes only PhobertTokenizer can be built");
        return Err(bad(&codes, what));
    }
    let read = |path: &Path| -> Result<String> {
        let bytes = read_limited(path, MAX_TOKENIZER_BYTES)?;
        let bytes = bytes.ok_or_else(|| TextError::NoTokenizer { dir: dir.to_owned() })?;
        String::from_utf8(bytes).map_err(|e| broken(path, "not UTF-8", e))
    };
    const SPECIAL: [&str; 4] = ["<s>", "<pad>", "</s>", "<unk>"];
    let mut vocab: Vocab = SPECIAL.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), id)).collect();
    for (number, line) in read(&path)?.lines().enumerate() {
        let Some((piece, _)) = line.trim().rsplit_once(' ') else {
            return Err(bad(&path, format!("line {}: expected a piece and its count", number + 1)));
        };
        let part = piece.strip_suffix("@@").map_or_else(|| format!("{piece}{END}"), str::to_owned);
        let id = vocab.len() as u32;
        vocab.insert(part, id);
    }
    let size = vocab.len();
    let mut merges = Vec::new();
    for (number, line) in read(&codes)?.lines().enumerate() {
        let &[a, b, _] = line.split_whitespace().collect::<Vec<_>>().as_slice() else {
            return Err(bad(&codes, format!("line {}: expected two parts and their count", number + 1)));
        };
        for part in [a.to_owned(), b.to_owned(), format!("{a}{b}")] {
            let id = vocab.len() as u32;
            vocab.entry(part).or_insert(id);
        }
        merges.push((a.to_owned(), b.to_owned()));
    }
    let broken = |e: tokenizers::Error| broken(&codes, "vocab.txt and bpe.codes cannot be loaded", e);
    let model = BPE::builder().vocab_and_merges(vocab, merges).unk_token("<unk>".into());
    let model = model.end_of_word_suffix(END.into()).build().map_err(broken)?;
    let words = SplitPattern::Regex(r"\S+\n?".to_owned());
    let words = SplitAt::new(words, SplitDelimiterBehavior::Removed, true).map_err(broken)?;
    let mut inner = tokenizers::Tokenizer::new(model);
    inner.with_pre_tokenizer(Some(words));
    inner.with_post_processor(Some(BertProcessing::new(("</s>".into(), 2), ("<s>".into(), 0))));
    inner.with_decoder(Some(BPEDecoder::new(END.into())));
    inner.add_special_tokens(SPECIAL.map(|token| AddedToken::from(token, true))).map_err(broken)?;
    Ok((inner, size))
}

/// Loads Qwen's `vocab.json` and `merges.txt`.
fn qwen_from_slow_files(dir: &Path, config: &Value) -> Result<tokenizers::Tokenizer> {
    let (vocab, merges) = (dir.join("vocab.json"), dir.join("merges.txt"));
    if !vocab.is_file() || !merges.is_file() {
        return Err(TextError::NoTokenizer { dir: dir.to_owned() });
    }
    let class = config.get("tokenizer_class").and_then(Value::as_str).unwrap_or_default();
    if !class.starts_with("Qwen2Tokenizer") {
        return Err(bad(
            &vocab,
            format!("tokenizer_class is {class:?}; without tokenizer.json only Qwen2Tokenizer can be built"),
        ));
    }
    for path in [&vocab, &merges] {
        // The library reads the files by path, so this call checks their size and links first.
        read_limited(path, MAX_TOKENIZER_BYTES)?;
    }
    let broken = |e: tokenizers::Error| broken(&vocab, "vocab.json and merges.txt cannot be loaded", e);
    let model =
        BPE::from_file(&vocab.to_string_lossy(), &merges.to_string_lossy()).build().map_err(broken)?;
    let split = SplitAt::new(
        SplitPattern::Regex(QWEN_PRE_TOKENS.to_owned()),
        SplitDelimiterBehavior::Isolated,
        false,
    )
    .map_err(broken)?;
    let byte_level = ByteLevel::new(false, false, false);
    let mut inner = tokenizers::Tokenizer::new(model);
    inner.with_normalizer(Some(NFC)).map_err(broken)?;
    inner.with_pre_tokenizer(Some(Sequence::new(vec![
        PreTokenizerWrapper::Split(split),
        PreTokenizerWrapper::ByteLevel(byte_level),
    ])));
    inner.with_decoder(Some(byte_level));
    Ok(inner)
}

fn bad(path: &Path, problem: String) -> TextError {
    TextError::BadFile { path: path.to_owned(), problem, source: None }
}

fn broken(path: &Path, problem: impl Into<String>, source: impl Into<Cause>) -> TextError {
    TextError::BadFile { path: path.to_owned(), problem: problem.into(), source: Some(source.into()) }
}

fn encode_error(text: &str, source: tokenizers::Error) -> TextError {
    TextError::Encode { excerpt: excerpt(text), source }
}

/// Returns the start of a text, for messages.
pub(crate) fn excerpt(text: &str) -> String {
    text.chars().take(60).collect()
}
