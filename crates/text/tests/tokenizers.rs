//! Tokenizer files of every accepted kind, checked by value and against the `tokenizers` crate itself.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use omnigrpo_text::{StopSet, StreamDecoder, TextError, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

fn tiny() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/tokenizer.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn dir_with(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn load(files: &[(&str, &str)]) -> Result<Tokenizer, TextError> {
    Tokenizer::from_dir(dir_with(files).path())
}

/// A tokenizer as SentencePiece models are published: `▁` for spaces, bytes as a fallback.
fn sentence_piece() -> Value {
    let mut vocab = serde_json::Map::new();
    for piece in ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab", "▁ab"] {
        vocab.insert(piece.to_owned(), json!(vocab.len()));
    }
    for byte in 0..=255u8 {
        vocab.insert(format!("<0x{byte:02X}>"), json!(vocab.len()));
    }
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "<unk>"},
        "added_tokens": [added(0, "<unk>", &[]), added(1, "<s>", &[]), added(2, "</s>", &[])],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
            "merges": ["▁ a", "a b", "▁a b"]},
    })
}

fn added(id: u32, content: &str, flags: &[&str]) -> Value {
    let flag = |name: &str| flags.contains(&name);
    json!({"id": id, "content": content, "single_word": flag("single_word"), "lstrip": flag("lstrip"),
        "rstrip": flag("rstrip"), "normalized": false, "special": !flag("plain")})
}

#[test]
fn sentence_piece_by_value() {
    let t = load(&[("tokenizer.json", &sentence_piece().to_string())]).unwrap();
    // ▁ab ▁ab, not cut to 3 nor padded to 9; "</s>" one token and then a new start.
    assert_eq!(t.encode_control("ab ab a", &[]).unwrap(), [8, 8, 6]);
    assert_eq!(t.encode_control("ab</s>a", &[]).unwrap(), [8, 2, 6]);
    assert_eq!(t.encode_framed("ab ab a").unwrap(), [1, 8, 8, 6]);
    // "</s>" as text: ▁, then bytes: < / s > are not in the vocabulary.
    let byte = |b: u8| 9 + u32::from(b);
    assert_eq!(t.encode_text("</s>").unwrap(), [3, byte(b'<'), byte(b'/'), byte(b's'), byte(b'>')]);
    assert_eq!(t.encode_control("</s>", &[2]).unwrap(), t.encode_text("</s>").unwrap());
    assert_eq!(t.decode(&t.encode_text(" é</s>ab").unwrap(), true).unwrap(), " é</s>ab");
    assert_eq!(t.token_bytes(8), b" ab");
    assert_eq!(t.token_bytes(byte(0xC3)), [0xC3]);
    assert_eq!(t.vocab_size(), 9 + 256);
    // The first byte of é is held back; a byte that cannot be continued is not.
    let mut stream = StreamDecoder::new(true);
    let pieces: Vec<String> =
        [2, 6, byte(0xC3), byte(0xA9), byte(0xC3), 4, byte(0xE2)].map(|id| stream.push(&t, id)).into();
    assert_eq!(pieces, ["", "a", "", "é", "", "\u{FFFD}a", ""]);
    assert_eq!(stream.finish(), "\u{FFFD}");
}

#[test]
fn configuration_marks_and_adds_tokens() {
    let config = json!({
        "eos_token": {"content": "<|im_end|>", "lstrip": false},
        "additional_special_tokens": ["<tool_call>"],
        "pad_token": "a",
        "added_tokens_decoder": {"480": {"content": "<extra>", "special": true}},
    });
    let vocab_size = load(&[("tokenizer.json", &tiny().to_string())]).unwrap().vocab_size();
    assert_eq!(vocab_size, 480);
    let t = load(&[("tokenizer.json", &tiny().to_string()), ("tokenizer_config.json", &config.to_string())])
        .unwrap();
    let tool = t.token_id("<tool_call>").unwrap();
    assert!(t.is_special(tool) && t.is_special(480) && !t.is_special(t.token_id("<think>").unwrap()));
    assert_eq!(t.encode_control("<tool_call><extra>", &[]).unwrap(), [tool, 480]);
    assert!(!t.encode_text("<tool_call><extra>").unwrap().contains(&tool));
    assert_eq!(t.eos_token(), t.token_id("<|im_end|>"));
    // A plain word that serves as padding stays a word.
    assert_eq!(t.pad_token(), t.token_id("a"));
    assert_eq!(t.encode_text("a").unwrap(), [t.token_id("a").unwrap()]);
    assert_eq!(t.token(480).as_deref(), Some("<extra>"));

    let wrong = json!({"added_tokens_decoder": {"700": {"content": "<extra>", "special": true}}}).to_string();
    let error =
        load(&[("tokenizer.json", &tiny().to_string()), ("tokenizer_config.json", &wrong)]).unwrap_err();
    assert!(matches!(&error, TextError::BadFile { problem, .. } if problem.contains("700")), "{error}");
}

#[test]
fn qwen_slow_files_build_the_same_tokenizer() {
    let json = tiny();
    let pair = |merge: &Value| match merge.as_array() {
        Some(pair) => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
        None => merge.as_str().unwrap().to_owned(),
    };
    let merges: Vec<String> = json["model"]["merges"].as_array().unwrap().iter().map(pair).collect();
    let merges = format!("#version: 0.2\n{}\n", merges.join("\n"));
    let tokens = json["added_tokens"].as_array().unwrap();
    let tokens: serde_json::Map<_, _> = tokens.iter().map(|t| (t["id"].to_string(), t.clone())).collect();
    let config = json!({"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": tokens}).to_string();
    let vocab = json["model"]["vocab"].to_string();
    let slow =
        load(&[("vocab.json", &vocab), ("merges.txt", &merges), ("tokenizer_config.json", &config)]).unwrap();
    let fast = load(&[("tokenizer.json", &json.to_string())]).unwrap();
    let text = "<|im_start|>user\n Trong he\u{301} có 42 cats' \n\n <think>?<|im_end|>\n";
    assert_eq!(slow.encode_control(text, &[]).unwrap(), fast.encode_control(text, &[]).unwrap());
    assert_eq!(slow.encode_text(text).unwrap(), fast.encode_text(text).unwrap());
    let ids = slow.encode_text(text).unwrap();
    assert_eq!(slow.decode(&ids, false).unwrap(), text.replace("e\u{301}", "é"));

    let other = json!({"tokenizer_class": "GPT2Tokenizer"}).to_string();
    let error = load(&[("vocab.json", &vocab), ("merges.txt", &merges), ("tokenizer_config.json", &other)]);
    assert!(matches!(error, Err(TextError::BadFile { .. })));
}

#[test]
fn unusable_files_are_errors() {
    assert!(matches!(load(&[]), Err(TextError::NoTokenizer { .. })));
    assert!(matches!(load(&[("tokenizer.json", "{}")]), Err(TextError::BadFile { .. })));
    let mut dropout = tiny();
    dropout["model"]["dropout"] = json!(0.1);
    let error = load(&[("tokenizer.json", &dropout.to_string())]).unwrap_err().to_string();
    assert!(error.contains("dropout"), "{error}");
    assert!(matches!(
        load(&[("tokenizer.json", &tiny().to_string()), ("tokenizer_config.json", "[")]),
        Err(TextError::BadFile { .. })
    ));
}

/// A vocabulary in which a control token can be reached by merges: such text is refused, not smuggled in.
#[test]
fn control_tokens_reachable_from_text_are_refused() {
    let mut json = sentence_piece();
    json["normalizer"] = Value::Null;
    json["added_tokens"].as_array_mut().unwrap().push(added(7, "ab", &[]));
    let t = load(&[("tokenizer.json", &json.to_string())]).unwrap();
    assert_eq!(t.encode_control("ab", &[]).unwrap(), [7]);
    assert!(matches!(t.encode_text("ab"), Err(TextError::ControlInText { id: 7, .. })));
    assert_eq!(t.encode_text("ba").unwrap(), [5, 4]);
}

#[test]
fn stop_sets_read_ids_only() {
    let tokenizer = json!({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}).to_string();
    let files = |generation: &str| {
        let dir = dir_with(&[
            ("tokenizer.json", &tiny().to_string()),
            ("tokenizer_config.json", &tokenizer),
            ("generation_config.json", generation),
        ]);
        let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
        StopSet::from_dir(dir.path(), &tokenizer, &["END".to_owned(), "END".to_owned()])
    };
    // The tiny vocabulary has 467 tokens, then <|endoftext|> 467, <|im_start|> 468, <|im_end|> 469.
    let stops = files(r#"{"eos_token_id": [469, 467], "temperature": 0.1, "top_k": 1}"#).unwrap();
    assert_eq!((stops.ids.as_slice(), stops.pad_id), ([467, 469].as_slice(), Some(467)));
    assert_eq!(stops.strings, ["END"]);
    assert!(stops.is_stop(469) && !stops.is_stop(468));
    let stops = files(r#"{"eos_token_id": 7, "pad_token_id": 9}"#).unwrap();
    assert_eq!((stops.ids.as_slice(), stops.pad_id), ([7, 469].as_slice(), Some(9)));
    assert_eq!(files("{}").unwrap().ids, [469]);
    assert!(matches!(files(r#"{"eos_token_id": "x"}"#), Err(TextError::BadFile { .. })));
    assert!(matches!(files(r#"{"eos_token_id": [1, -1]}"#), Err(TextError::BadFile { .. })));
}

/// Tokens with every flag, checked against the crate's own search.
#[derive(Clone)]
struct Flagged {
    ours: Tokenizer,
    theirs: tokenizers::Tokenizer,
}

fn flagged(base: &Value) -> Flagged {
    let mut json = base.clone();
    let first = json["model"]["vocab"].as_object().unwrap().len().max(480) as u32;
    json["padding"] = Value::Null;
    json["truncation"] = Value::Null;
    let tokens = json["added_tokens"].as_array_mut().unwrap();
    let ids = first..;
    let new: [(&str, &[&str]); 5] = [
        ("<L>", &["lstrip"]),
        ("<R>", &["rstrip", "plain"]),
        ("<B>", &["lstrip", "rstrip"]),
        ("word", &["single_word", "plain"]),
        ("<B>long", &[]),
    ];
    tokens.extend(ids.zip(new).map(|(id, (content, flags))| added(id, content, flags)));
    let text = json.to_string();
    Flagged { ours: load(&[("tokenizer.json", &text)]).unwrap(), theirs: text.parse().unwrap() }
}

/// Tokenizers that write bytes as characters: with several cuts before that or none, with a cut that the crate makes another way,
/// and without a normalizer.
fn byte_level() -> Vec<Value> {
    let spelled = |add_prefix_space: bool, use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex});
    let cut = |pattern: &str, behavior: &str, invert: bool| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert});
    // An empty match, a match that looks ahead, and text between the matches.
    let cuts = [cut(r"\p{N}{1,3}|x*", "Isolated", false), cut(r"\s+(?!\S)|\S", "Isolated", false)];
    let steps = [
        vec![spelled(false, false)],
        vec![cuts[0].clone(), cuts[1].clone(), spelled(false, false)],
        vec![cut(r"\s+", "Removed", false), spelled(false, false)],
        vec![cut(r"\S+", "Isolated", true), spelled(false, false)],
        vec![cuts[0].clone(), spelled(true, false)],
        vec![spelled(false, true)],
        vec![spelled(false, false), cuts[0].clone()],
    ];
    let normalizers = [json!(null), json!({"type": "NFC"}), json!({"type": "Lowercase"})];
    let with = |(steps, normalizer): (Vec<Value>, &Value)| {
        let mut json = tiny();
        json["normalizer"] = normalizer.clone();
        json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps});
        json
    };
    steps.into_iter().zip(normalizers.iter().cycle()).map(with).collect()
}

fn fragments() -> impl Strategy<Value = String> {
    let fragment = prop::sample::select(vec![
        "<L>",
        "<R>",
        "<B>",
        "<B>long",
        "word",
        "words",
        " ",
        "\n",
        "\t ",
        "a",
        "ab",
        "b",
        "é",
        "e\u{301}",
        "\u{1100}\u{1161}\u{11a8}",
        "\u{301}",
        "\u{a0}",
        "\u{ad}\u{0}",
        "X\r\n",
        "it's 1234",
        "中",
        "😀",
        "<|im_start|>",
        "<|im_end|>",
        "</s>",
        "<",
        "|>",
        "42",
        "_",
        "<think>",
        "\u{FFFC}",
    ]);
    prop::collection::vec(fragment, 0..12).prop_map(|fragments| fragments.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    #[test]
    fn added_tokens_are_found_as_the_crate_finds_them(text in fragments()) {
        use std::sync::LazyLock;
        static ALL: LazyLock<Vec<Flagged>> = LazyLock::new(|| {
            [tiny(), sentence_piece()].iter().chain(&byte_level()).map(flagged).collect()
        });
        for Flagged { ours, theirs } in ALL.iter() {
            let expected = theirs.encode(text.as_str(), false).unwrap();
            prop_assert_eq!(ours.encode_control(&text, &[]).unwrap(), expected.get_ids());
            let ids = expected.get_ids();
            prop_assert_eq!(ours.decode(ids, false).unwrap(), theirs.decode(ids, false).unwrap());
            prop_assert_eq!(ours.decode(ids, true).unwrap(), theirs.decode(ids, true).unwrap());
        }
    }
}

/// A row or a completion may be a megabyte of added tokens; the square of that would be hours.
#[test]
fn time_grows_with_the_number_of_added_tokens() {
    let tokenizer = load(&[("tokenizer.json", &tiny().to_string())]).unwrap();
    let one = tokenizer.encode_text("<think>a").unwrap();
    assert_eq!(one.len(), 2);
    let started = std::time::Instant::now();
    assert_eq!(tokenizer.encode_text(&"<think>a".repeat(1 << 17)).unwrap(), one.repeat(1 << 17));
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}

/// `tokenizer.json` is not trusted: it ends neither the process nor its memory.
#[test]
fn hostile_tokenizers_are_errors() {
    let with = |part: &str, value: Value| {
        let mut file = tiny();
        file[part] = value;
        file
    };
    let replace = |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
    let charsmap = |declared: u32, len: usize| {
        let map = [&declared.to_le_bytes()[..], &vec![0; len]].concat();
        json!({"type": "Precompiled", "precompiled_charsmap": BASE64_STANDARD.encode(map)})
    };
    let long = "a".repeat(10 << 20);
    for (name, file, said) in [
        ("charsmap", with("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"})), ""),
        (
            "empty trie",
            with("normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AAAAAGEA"})),
            "",
        ),
        (
            "trie beyond the map",
            with("normalizer", charsmap(u32::MAX, 40)),
            "declares a trie of 4294967295 bytes",
        ),
        (
            "nested map",
            with(
                "normalizer",
                json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, charsmap(44, 40)]}),
            ),
            "declares a trie of 44 bytes, expected at most the 40",
        ),
        (
            "length 0",
            with("pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
            "FixedLength has length 0",
        ),
        (
            "chain",
            with(
                "normalizer",
                json!({"type": "Sequence", "normalizers": vec![replace("a", &"a".repeat(10)); 9]}),
            ),
            "longer than",
        ),
        (
            "prepend",
            with("normalizer", json!({"type": "Prepend", "prepend": long})),
            "Prepend inserts 10485760 bytes",
        ),
        ("replace", with("normalizer", replace("a", &long)), "Replace inserts 10485760 bytes"),
        ("empty pattern", with("normalizer", replace("", &"b".repeat(1000))), "longer than"),
        ("decoder", with("decoder", replace("a", &long)), "decoder: Replace inserts"),
        (
            "steps",
            with("normalizer", json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFC"}); 200]})),
            "201 parts",
        ),
    ] {
        let text = "banana ".repeat(20_000);
        let result = load(&[("tokenizer.json", &file.to_string())]).and_then(|t| t.encode_text(&text));
        let error = result.err().map(|e| omnigrpo_guard::told(&e));
        assert!(error.as_ref().is_some_and(|e| e.contains(said)), "{name}: {error:?}");
    }
}
