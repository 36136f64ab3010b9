//! `tokenizer.json` and the files beside it from the metadata of a GGUF file, and back.
//!
//! Only byte-level BPE is supported, with the four ways to cut text into words that [`RULES`] lists by their names in llama.cpp. A file
//! has tokens, merges and kinds of tokens; everything else follows from the name.

use std::collections::HashMap;
use std::sync::LazyLock;

use omnigrpo_gguf::{GgufFile, Metadata, Value as Datum};
use omnigrpo_text::{ChatTemplate, StopSet, Tokenizer};
use serde_json::{Map, Value, json};

use super::config::shortened;
use crate::error::{ModelError, Result};
use crate::model::Model;

/// Name in GGUF of BPE over bytes.
const BPE: &str = "gpt2";

/// Kinds of tokens. Source: `llama.h`, `enum llama_token_type`.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// Tokens that end a completion in llama.cpp, whatever the metadata say: those of the families here.
const ENDS: [&str; 5] = ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"];

/// Words of contractions, letters, digits, other characters and white space. `DIGITS` is replaced.
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A way to cut text into words before byte pairs are merged.
struct Rule {
    /// Names in llama.cpp. The first one is written.
    names: &'static [&'static str],
    /// Normaliser of `tokenizer.json`.
    normalizer: Value,
    /// Pre-tokenizer of `tokenizer.json`.
    pre_tokenizer: Value,
    /// Whether a word that is a token is taken as it is.
    ignore_merges: bool,
    /// Whether a text begins with the start token, unless the file says otherwise.
    starts: bool,
}

/// The ways to cut text, as the published tokenizers of these families have them.
static RULES: LazyLock<[Rule; 4]> = LazyLock::new(|| {
    let bytes = |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex });
    let sequence = |first: Value, use_regex: bool| json!({ "type": "Sequence", "pretokenizers": [first, bytes(use_regex)] });
    let words = |digits: &str| {
        let pattern = WORDS.replace("DIGITS", digits);
        json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
    };
    [
        Rule {
            names: &["qwen2"],
            normalizer: json!({ "type": "NFC" }),
            pre_tokenizer: sequence(words(r"\p{N}"), false),
            ignore_merges: false,
            starts: false,
        },
        Rule {
            names: &["llama-bpe", "llama3", "llama-v3"],
            normalizer: Value::Null,
            pre_tokenizer: sequence(words(r"\p{N}{1,3}"), false),
            ignore_merges: true,
            starts: true,
        },
        Rule {
            names: &["smollm"],
            normalizer: Value::Null,
            pre_tokenizer: sequence(json!({ "type": "Digits", "individual_digits": true }), true),
            ignore_merges: false,
            starts: false,
        },
        Rule {
            names: &["gpt-2"],
            normalizer: Value::Null,
            pre_tokenizer: bytes(true),
            ignore_merges: false,
            starts: false,
        },
    ]
});

/// The tokenizer files of a checkpoint.
pub struct TokenizerFiles {
    /// Name and content of each file.
    pub files: Vec<(&'static str, String)>,
    /// Number of tokens, unused ones included.
    pub num_tokens: usize,
    /// `bos_token_id` and `eos_token_id`, for `config.json`. A `pad_token_id` there would keep a row of the embedding from learning, and a
    /// GGUF file does not say whether the model was trained so.
    pub ids: Map<String, Value>,
}

/// Metadata of a tokenizer.
struct Keys<'a>(&'a GgufFile);

impl<'a> Keys<'a> {
    fn fail(&self, what: impl Into<String>) -> ModelError {
        self.0.error(what).into()
    }

    fn read<T>(&self, key: &str, take: impl Fn(&'a Datum) -> Option<T>, expected: &str) -> Result<Option<T>> {
        let Some(datum) = self.0.get(key) else { return Ok(None) };
        let wrong = || self.fail(format!("{key} is {}, expected {expected}", shortened(datum)));
        take(datum).map(Some).ok_or_else(wrong)
    }

    fn required<T>(&self, key: &str, take: impl Fn(&'a Datum) -> Option<T>, expected: &str) -> Result<T> {
        let missing = || self.fail(format!("{key} is missing, expected {expected}"));
        self.read(key, take, expected)?.ok_or_else(missing)
    }

    /// Returns a list of texts.
    fn texts(&self, key: &str) -> Result<Vec<&'a str>> {
        let take = |datum: &'a Datum| datum.list()?.iter().map(Datum::text).collect();
        self.required(key, take, "a list of texts")
    }
}

/// Returns the tokenizer files of a GGUF file.
pub fn files(file: &GgufFile, context: Option<u64>) -> Result<TokenizerFiles> {
    let keys = Keys(file);
    let model = keys.required("tokenizer.ggml.model", Datum::text, "a text")?;
    if model != BPE {
        return Err(keys.fail(format!("tokenizer.ggml.model is {model:?}, expected {BPE:?}, BPE over bytes")));
    }
    let name =
        keys.required("tokenizer.ggml.pre", Datum::text, "the name of a way to cut text into words")?;
    let Some(rule) = RULES.iter().find(|rule| rule.names.contains(&name)) else {
        let known: Vec<_> = RULES.iter().flat_map(|rule| rule.names).copied().collect();
        return Err(
            keys.fail(format!("tokenizer.ggml.pre is {name:?}, expected one of {}", known.join(", ")))
        );
    };
    let tokens = keys.texts("tokenizer.ggml.tokens")?;
    let kinds = |datum: &Datum| {
        let list = datum.list()?.iter().map(|kind| kind.count().and_then(|kind| i32::try_from(kind).ok()));
        list.collect::<Option<Vec<_>>>()
    };
    let kinds = keys.required("tokenizer.ggml.token_type", kinds, "a list of integers")?;
    if kinds.len() != tokens.len() {
        let what = format!(
            "tokenizer.ggml.token_type has {} values, expected {}, one per token",
            kinds.len(),
            tokens.len()
        );
        return Err(keys.fail(what));
    }

    let (mut ids, mut vocab, mut added) = (HashMap::new(), Map::new(), Vec::new());
    for (id, (&token, &kind)) in tokens.iter().zip(&kinds).enumerate() {
        match kind {
            UNUSED => continue,
            NORMAL => {}
            UNKNOWN | CONTROL | USER_DEFINED => added.push(json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": kind != USER_DEFINED,
            })),
            other => {
                return Err(keys.fail(format!("token {id}, {token:?}, is of kind {other}, expected a kind from 1 to 5")));
            }
        }
        if let Some(other) = ids.insert(token, id) {
            return Err(
                keys.fail(format!("tokens {other} and {id} are both {token:?}, expected different texts"))
            );
        }
        // Every token is part of the vocabulary, so that it keeps its id.
        vocab.insert(token.to_owned(), id.into());
    }
    let merges: Vec<Value> = keys
        .texts("tokenizer.ggml.merges")?
        .into_iter()
        .enumerate()
        .map(|(i, merge)| match merge.split_once(' ') {
            Some((a, b)) if !b.contains(' ') && [a, b, &format!("{a}{b}")].iter().all(|token| ids.contains_key(*token)) => {
                Ok(json!([a, b]))
            }
            _ => {
                let merge = shortened(&Datum::from(merge));
                Err(keys.fail(format!("merge {i} is {merge}, expected two tokens whose union is a token, and a space between them")))
            }
        })
        .collect::<Result<_>>()?;

    let special = |key: &str| -> Result<Option<(usize, &str)>> {
        let id = keys.read(&format!("tokenizer.ggml.{key}_token_id"), Datum::count, "a token id")?;
        let Some(id) = id else { return Ok(None) };
        match usize::try_from(id).ok().and_then(|id| Some((id, *tokens.get(id)?))) {
            Some(found) if kinds[found.0] != UNUSED => Ok(Some(found)),
            _ => Err(keys.fail(format!(
                "tokenizer.ggml.{key}_token_id is {id}, expected one of {} tokens",
                tokens.len()
            ))),
        }
    };
    let (start, end) = (special("bos")?, special("eos")?);
    let pad = match special("padding")? {
        Some(pad) => Some(pad),
        None => special("pad")?,
    };
    if keys.read("tokenizer.ggml.add_eos_token", Datum::truth, "true or false")? == Some(true) {
        return Err(keys.fail("tokenizer.ggml.add_eos_token is true, expected false: prompts do not end"));
    }
    let starts = keys.read("tokenizer.ggml.add_bos_token", Datum::truth, "true or false")?;
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    let post_processor = match (starts.unwrap_or(rule.starts), start) {
        (false, _) => bytes.clone(),
        (true, Some((id, token))) => json!({
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": token, "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [
                { "SpecialToken": { "id": token, "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } },
                { "SpecialToken": { "id": token, "type_id": 1 } }, { "Sequence": { "id": "B", "type_id": 1 } },
            ],
            "special_tokens": { token: { "id": token, "ids": [id], "tokens": [token] } },
        }),
        (true, None) => {
            return Err(
                keys.fail("a text begins with the start token, but tokenizer.ggml.bos_token_id is missing")
            );
        }
    };
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": rule.normalizer,
        "pre_tokenizer": rule.pre_tokenizer,
        "post_processor": post_processor,
        "decoder": bytes,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": rule.ignore_merges,
            "vocab": vocab,
            "merges": merges,
        },
    });

    let mut settings =
        json!({ "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false });
    let (mut named, mut generation) = (Map::new(), Map::new());
    for (key, found) in [("bos", start), ("eos", end), ("pad", pad)] {
        let Some((id, token)) = found else { continue };
        settings[format!("{key}_token")] = token.into();
        generation.insert(format!("{key}_token_id"), id.into());
        if key != "pad" {
            named.insert(format!("{key}_token_id"), id.into());
        }
    }
    if let Some(context) = context {
        settings["model_max_length"] = context.into();
    }
    let also = [special("eot")?, special("eom")?].into_iter().flatten().map(|(id, _)| id);
    let by_name = ENDS.iter().filter_map(|end| ids.get(end).copied()).filter(|&id| kinds[id] == CONTROL);
    let mut ends: Vec<usize> = end.map(|(id, _)| id).into_iter().collect();
    for id in also.chain(by_name) {
        if !ends.contains(&id) {
            ends.push(id);
        }
    }
    generation.insert("eos_token_id".into(), ends.into());
    let mut files = vec![
        ("tokenizer.json", tokenizer.to_string()),
        ("tokenizer_config.json", format!("{settings:#}\n")),
        ("generation_config.json", format!("{:#}\n", Value::Object(generation))),
    ];
    if let Some(template) = keys.read("tokenizer.chat_template", Datum::text, "a text")? {
        files.push(("chat_template.jinja", template.to_owned()));
    }
    Ok(TokenizerFiles { files, num_tokens: tokens.len(), ids: named })
}

/// Returns the steps of a pre-tokenizer without what does not matter for ids.
fn steps(pre_tokenizer: &Value) -> Vec<Value> {
    let mut list = match pre_tokenizer["pretokenizers"].as_array() {
        Some(list) => list.clone(),
        None => vec![pre_tokenizer.clone()],
    };
    list.iter_mut().filter_map(Value::as_object_mut).for_each(|step| drop(step.remove("trim_offsets")));
    list
}

/// Returns the metadata of the tokenizer, the stop tokens and the chat template of a model. The embedding may have more rows than the
/// tokenizer has tokens; they become unused tokens.
pub fn metadata_of(model: &Model) -> Result<Metadata> {
    let dir = model.dir();
    let fail = |what: String| ModelError::layout(format!("{}: {what}", dir.join("tokenizer.json").display()));
    let tokenizer = Tokenizer::from_dir(dir)?;
    let json = tokenizer.to_json()?;
    let bpe = &json["model"];
    let plain = |key: &str| matches!(&bpe[key], Value::Null | Value::Bool(false)) || bpe[key] == "";
    let is_plain =
        ["unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout"];
    if bpe["type"] != "BPE" || !is_plain.iter().all(|key| plain(key)) {
        return Err(fail(format!("the model is {}; for GGUF expected BPE over bytes", bpe["type"])));
    }
    let rule = RULES.iter().find(|rule| {
        steps(&rule.pre_tokenizer) == steps(&json["pre_tokenizer"])
            && (json["normalizer"].is_null() || json["normalizer"]["type"] == "NFC")
            && bpe["ignore_merges"].as_bool().unwrap_or(false) == rule.ignore_merges
    });
    let Some(rule) = rule else {
        let known: Vec<_> = RULES.iter().map(|rule| rule.names[0]).collect();
        return Err(fail(format!(
            "normalizer, pre_tokenizer and ignore_merges are those of no name in GGUF that is known here; expected those of {}",
            known.join(", ")
        )));
    };

    let num_rows = model.decoder().config().vocab;
    let mut tokens: Vec<(String, i32)> = (0..num_rows).map(|id| (format!("[PAD{id}]"), UNUSED)).collect();
    let mut put =
        |id: Option<u64>, token: &str, kind: i32| match id.and_then(|id| tokens.get_mut(id as usize)) {
            Some(row) => {
                *row = (token.to_owned(), kind);
                Ok(())
            }
            None => Err(fail(format!(
                "token {token:?} has the id {id:?}, expected one below {num_rows}, the rows of the embedding"
            ))),
        };
    for (token, id) in bpe["vocab"].as_object().into_iter().flatten() {
        put(id.as_u64(), token, NORMAL)?;
    }
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let content = token["content"].as_str().unwrap_or_default();
        if let Some(rule) = ["single_word", "lstrip", "rstrip"].iter().find(|rule| token[**rule] == true) {
            return Err(fail(format!(
                "token {content:?} has {rule}, which GGUF cannot express; expected added tokens without it"
            )));
        }
        put(token["id"].as_u64(), content, if token["special"] == true { CONTROL } else { USER_DEFINED })?;
    }
    let merges = bpe["merges"].as_array().into_iter().flatten().map(|merge| match merge {
        Value::Array(pair) => {
            let part = |i: usize| pair.get(i).and_then(Value::as_str).unwrap_or_default();
            Datum::Text(format!("{} {}", part(0), part(1)))
        }
        text => Datum::from(text.as_str().unwrap_or_default()),
    });
    let merges: Vec<_> = merges.collect();
    let (tokens, kinds): (Vec<_>, Vec<_>) =
        tokens.into_iter().map(|(token, kind)| (Datum::Text(token), Datum::I32(kind))).unzip();

    let stops = StopSet::from_dir(dir, &tokenizer, &[])?;
    let end = tokenizer.eos_token().or(stops.ids.first().copied());
    let known_end = |id: u32| tokenizer.token(id).is_some_and(|token| ENDS.contains(&token.as_str()));
    let mut more = stops.ids.iter().copied().filter(|&id| Some(id) != end && !known_end(id));
    let (turn, message) = (more.next(), more.next());
    if let Some(id) = more.next() {
        return Err(ModelError::layout(format!(
            "{}: token {id} is one stop token too many, expected at most three beside {}",
            dir.join("generation_config.json").display(),
            ENDS.join(", ")
        )));
    }
    let start = match tokenizer.start_token() {
        None => model.checkpoint().config().id("bos_token_id", num_rows)?,
        start => start,
    };
    let starts = start.is_some() && tokenizer.encode_continued("", &[])?.first().copied() == start;
    let mut metadata: Metadata = vec![
        ("tokenizer.ggml.model".into(), BPE.into()),
        ("tokenizer.ggml.pre".into(), rule.names[0].into()),
        ("tokenizer.ggml.tokens".into(), Datum::List(tokens)),
        ("tokenizer.ggml.token_type".into(), Datum::List(kinds)),
        ("tokenizer.ggml.merges".into(), Datum::List(merges)),
        ("tokenizer.ggml.add_bos_token".into(), Datum::Bool(starts)),
    ];
    let ids = [("bos", start), ("eos", end), ("padding", stops.pad_id), ("eot", turn), ("eom", message)];
    metadata.extend(
        ids.into_iter()
            .filter_map(|(key, id)| Some((format!("tokenizer.ggml.{key}_token_id"), Datum::U32(id?)))),
    );
    metadata.push(("tokenizer.chat_template".into(), ChatTemplate::from_dir(dir)?.source().into()));
    Ok(metadata)
}
