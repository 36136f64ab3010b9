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

/// Returns the way in which the tokenizer of a file cuts text.
fn rule_of(keys: &Keys) -> Result<&'static Rule> {
    let model = keys.required("tokenizer.ggml.model", Datum::text, "a text")?;
    if model != BPE {
        return Err(keys.fail(format!("tokenizer.ggml.model is {model:?}, expected {BPE:?}, BPE over bytes")));
    }
    let name =
        keys.required("tokenizer.ggml.pre", Datum::text, "the name of a way to cut text into words")?;
    RULES.iter().find(|rule| rule.names.contains(&name)).ok_or_else(|| {
        let known: Vec<_> = RULES.iter().flat_map(|rule| rule.names).copied().collect();
        keys.fail(format!("tokenizer.ggml.pre is {name:?}, expected one of {}", known.join(", ")))
    })
}

/// The tokens of a file.
struct Tokens<'a> {
    keys: Keys<'a>,
    /// Text and kind of each token.
    all: Vec<(&'a str, i32)>,
    /// Ids of the tokens that are used.
    ids: HashMap<&'a str, usize>,
}

impl<'a> Tokens<'a> {
    fn read(keys: Keys<'a>) -> Result<Self> {
        let texts = keys.texts("tokenizer.ggml.tokens")?;
        let kinds = |datum: &Datum| {
            let list =
                datum.list()?.iter().map(|kind| kind.count().and_then(|kind| i32::try_from(kind).ok()));
            list.collect::<Option<Vec<_>>>()
        };
        let kinds = keys.required("tokenizer.ggml.token_type", kinds, "a list of integers")?;
        if kinds.len() != texts.len() {
            let (got, expected) = (kinds.len(), texts.len());
            let what = format!("{got} values, expected {expected}, one per token");
            return Err(keys.fail(format!("tokenizer.ggml.token_type has {what}")));
        }
        let all: Vec<_> = texts.into_iter().zip(kinds).collect();
        let mut ids = HashMap::new();
        for (id, &(token, kind)) in all.iter().enumerate() {
            if !(NORMAL..=UNUSED).contains(&kind) {
                let what = format!("token {id}, {token:?}, is of kind {kind}, expected a kind from 1 to 5");
                return Err(keys.fail(what));
            }
            if kind != UNUSED
                && let Some(other) = ids.insert(token, id)
            {
                let what = format!("tokens {other} and {id} are both {token:?}, expected different texts");
                return Err(keys.fail(what));
            }
        }
        Ok(Self { keys, all, ids })
    }

    /// Returns the vocabulary. Every token is part of it, so that it keeps its id.
    fn vocabulary(&self) -> Map<String, Value> {
        let used = self.all.iter().enumerate().filter(|(_, (_, kind))| *kind != UNUSED);
        used.map(|(id, (token, _))| ((*token).to_owned(), id.into())).collect()
    }

    /// Returns the tokens that are not cut.
    fn added(&self) -> Vec<Value> {
        let added = self
            .all
            .iter()
            .enumerate()
            .filter(|(_, (_, kind))| [UNKNOWN, CONTROL, USER_DEFINED].contains(kind));
        let entry = |(id, (token, kind)): (usize, &(&str, i32))| {
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": *kind != USER_DEFINED,
            })
        };
        added.map(entry).collect()
    }

    fn merges(&self) -> Result<Vec<Value>> {
        let merge = |(i, merge): (usize, &str)| match merge.split_once(' ') {
            Some((a, b))
                if !b.contains(' ')
                    && [a, b, &format!("{a}{b}")].iter().all(|token| self.ids.contains_key(*token)) =>
            {
                Ok(json!([a, b]))
            }
            _ => {
                let merge = shortened(&Datum::from(merge));
                let expected = "two tokens whose union is a token, and a space between them";
                Err(self.keys.fail(format!("merge {i} is {merge}, expected {expected}")))
            }
        };
        self.keys.texts("tokenizer.ggml.merges")?.into_iter().enumerate().map(merge).collect()
    }

    /// Returns the token with a role.
    fn special(&self, role: &str) -> Result<Option<(usize, &'a str)>> {
        let key = format!("tokenizer.ggml.{role}_token_id");
        let Some(id) = self.keys.read(&key, Datum::count, "a token id")? else { return Ok(None) };
        match usize::try_from(id).ok().and_then(|id| Some((id, *self.all.get(id)?))) {
            Some((id, (token, kind))) if kind != UNUSED => Ok(Some((id, token))),
            _ => Err(self.keys.fail(format!("{key} is {id}, expected one of {} tokens", self.all.len()))),
        }
    }

    /// Returns the tokens that end a completion, `end` first.
    fn ends(&self, end: Option<usize>) -> Result<Vec<usize>> {
        let also = [self.special("eot")?, self.special("eom")?].into_iter().flatten().map(|(id, _)| id);
        let by_name = ENDS.iter().filter_map(|end| self.ids.get(end).copied());
        let by_name = by_name.filter(|&id| self.all[id].1 == CONTROL);
        let mut ends: Vec<usize> = end.into_iter().collect();
        for id in also.chain(by_name) {
            if !ends.contains(&id) {
                ends.push(id);
            }
        }
        Ok(ends)
    }

    /// Returns the post-processor, which puts the token `start` before a text if the file or its rule says so.
    fn post_processor(&self, rule: &Rule, start: Option<(usize, &str)>) -> Result<Value> {
        let starts = self.keys.read("tokenizer.ggml.add_bos_token", Datum::truth, "true or false")?;
        if !starts.unwrap_or(rule.starts) {
            return Ok(byte_level());
        }
        let Some((id, token)) = start else {
            let what = "a text begins with the start token, but tokenizer.ggml.bos_token_id is missing";
            return Err(self.keys.fail(what));
        };
        let text = |name: &str, type_id: u8| {
            [
                json!({ "SpecialToken": { "id": token, "type_id": type_id } }),
                json!({ "Sequence": { "id": name, "type_id": type_id } }),
            ]
        };
        let pair = [text("A", 0), text("B", 1)].concat();
        Ok(json!({
            "type": "TemplateProcessing",
            "single": text("A", 0),
            "pair": pair,
            "special_tokens": { token: { "id": token, "ids": [id], "tokens": [token] } },
        }))
    }
}

fn byte_level() -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false })
}

/// Returns the tokenizer files of a GGUF file.
pub fn files(file: &GgufFile, context: Option<u64>) -> Result<TokenizerFiles> {
    let rule = rule_of(&Keys(file))?;
    let tokens = Tokens::read(Keys(file))?;
    let (keys, merges) = (&tokens.keys, tokens.merges()?);
    let (start, end) = (tokens.special("bos")?, tokens.special("eos")?);
    let pad = match tokens.special("padding")? {
        Some(pad) => Some(pad),
        None => tokens.special("pad")?,
    };
    if keys.read("tokenizer.ggml.add_eos_token", Datum::truth, "true or false")? == Some(true) {
        return Err(keys.fail("tokenizer.ggml.add_eos_token is true, expected false: prompts do not end"));
    }
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": tokens.added(),
        "normalizer": rule.normalizer,
        "pre_tokenizer": rule.pre_tokenizer,
        "post_processor": tokens.post_processor(rule, start)?,
        "decoder": byte_level(),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": rule.ignore_merges,
            "vocab": tokens.vocabulary(),
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
    generation.insert("eos_token_id".into(), tokens.ends(end.map(|(id, _)| id))?.into());
    let mut files = vec![
        ("tokenizer.json", tokenizer.to_string()),
        ("tokenizer_config.json", format!("{settings:#}\n")),
        ("generation_config.json", format!("{:#}\n", Value::Object(generation))),
    ];
    if let Some(template) = keys.read("tokenizer.chat_template", Datum::text, "a text")? {
        files.push(("chat_template.jinja", template.to_owned()));
    }
    Ok(TokenizerFiles { files, num_tokens: tokens.all.len(), ids: named })
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

/// Returns the way in which a `tokenizer.json` cuts text.
fn rule_in(json: &Value) -> std::result::Result<&'static Rule, String> {
    let bpe = &json["model"];
    let plain = |key: &&str| matches!(&bpe[*key], Value::Null | Value::Bool(false)) || bpe[*key] == "";
    let is_plain =
        ["unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout"];
    if bpe["type"] != "BPE" || !is_plain.iter().all(plain) {
        return Err(format!("the model is {}; for GGUF expected BPE over bytes", bpe["type"]));
    }
    let rule = RULES.iter().find(|rule| {
        steps(&rule.pre_tokenizer) == steps(&json["pre_tokenizer"])
            && (json["normalizer"].is_null() || json["normalizer"]["type"] == "NFC")
            && bpe["ignore_merges"].as_bool().unwrap_or(false) == rule.ignore_merges
    });
    rule.ok_or_else(|| {
        let known: Vec<_> = RULES.iter().map(|rule| rule.names[0]).collect();
        format!(
            "normalizer, pre_tokenizer and ignore_merges are those of no name in GGUF that is known here; expected those of {}",
            known.join(", ")
        )
    })
}

/// Returns text and kind of the token of each row of the embedding. Rows without a token have unused ones.
fn tokens_in(json: &Value, num_rows: usize) -> std::result::Result<Vec<(String, i32)>, String> {
    let mut tokens: Vec<(String, i32)> = (0..num_rows).map(|id| (format!("[PAD{id}]"), UNUSED)).collect();
    let mut put = |id: Option<u64>, token: &str, kind: i32| {
        let row = id.and_then(|id| tokens.get_mut(id as usize)).ok_or_else(|| {
            format!(
                "token {token:?} has the id {id:?}, expected one below {num_rows}, the rows of the embedding"
            )
        })?;
        *row = (token.to_owned(), kind);
        Ok::<_, String>(())
    };
    for (token, id) in json["model"]["vocab"].as_object().into_iter().flatten() {
        put(id.as_u64(), token, NORMAL)?;
    }
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let content = token["content"].as_str().unwrap_or_default();
        if let Some(rule) = ["single_word", "lstrip", "rstrip"].iter().find(|rule| token[**rule] == true) {
            return Err(format!(
                "token {content:?} has {rule}, which GGUF cannot express; expected added tokens without it"
            ));
        }
        put(token["id"].as_u64(), content, if token["special"] == true { CONTROL } else { USER_DEFINED })?;
    }
    Ok(tokens)
}

/// Returns the metadata of the tokenizer, the stop tokens and the chat template of a model. The embedding may have more rows than the
/// tokenizer has tokens; they become unused tokens.
pub fn metadata_of(model: &Model) -> Result<Metadata> {
    let dir = model.dir();
    let fail = |what: String| ModelError::layout(format!("{}: {what}", dir.join("tokenizer.json").display()));
    let tokenizer = Tokenizer::from_dir(dir)?;
    let json = tokenizer.to_json()?;
    let rule = rule_in(&json).map_err(fail)?;
    let num_rows = model.decoder().config().vocab;
    let tokens = tokens_in(&json, num_rows).map_err(fail)?;
    let (tokens, kinds): (Vec<_>, Vec<_>) =
        tokens.into_iter().map(|(token, kind)| (Datum::Text(token), Datum::I32(kind))).unzip();
    let merges = json["model"]["merges"].as_array().into_iter().flatten().map(|merge| match merge {
        Value::Array(pair) => {
            let part = |i: usize| pair.get(i).and_then(Value::as_str).unwrap_or_default();
            Datum::Text(format!("{} {}", part(0), part(1)))
        }
        text => Datum::from(text.as_str().unwrap_or_default()),
    });
    let merges: Vec<_> = merges.collect();

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
