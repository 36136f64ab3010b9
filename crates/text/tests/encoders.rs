//! Tokenizers of text encoders against `transformers` 5.23: BERT's `vocab.txt`, CLIP's byte pairs, XLM-RoBERTa's unigrams,
//! RoBERTa's byte pairs. Data: `tools/goldens/make_scorers.py`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::path::{Path, PathBuf};

use omnigrpo_text::Tokenizer;
use serde_json::Value;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../scorers/tests/golden").join(path)
}

fn goldens() -> Value {
    serde_json::from_slice(&std::fs::read(golden("goldens.json")).unwrap()).unwrap()
}

fn framed(tokenizer: &Tokenizer, texts: &Value) -> Vec<Vec<u32>> {
    let texts = texts.as_array().unwrap().iter();
    texts.map(|text| tokenizer.encode_framed(text.as_str().unwrap()).unwrap()).collect()
}

fn ids(list: &Value) -> Vec<Vec<u32>> {
    serde_json::from_value(list.clone()).unwrap()
}

#[test]
fn ids_with_start_and_end_equal_transformers() {
    let all = goldens();
    for name in ["bert", "multilingual", "roberta"] {
        let tokenizer = Tokenizer::from_dir(&golden(name)).unwrap();
        assert_eq!(framed(&tokenizer, &all["texts"]), ids(&all[name]["ids"]), "{name}");
    }
    // CLIP's last text is cut in the goldens.
    let tokenizer = Tokenizer::from_dir(&golden("clip")).unwrap();
    let (got, want) = (framed(&tokenizer, &all["texts"]), ids(&all["clip"]["ids"]));
    assert_eq!(got[..5], want[..5]);
    assert_eq!(got[5][..39], want[5][..39]);
    assert!(got[5].len() > 40);
}

#[test]
fn phoberts_own_files_are_read() {
    let all = goldens();
    let tokenizer = Tokenizer::from_dir(&golden("phobert")).unwrap();
    assert_eq!(framed(&tokenizer, &all["phobert"]["texts"]), ids(&all["phobert"]["ids"]));
    let lines = std::fs::read_to_string(golden("phobert/vocab.txt")).unwrap().lines().count();
    assert_eq!(tokenizer.vocab_size(), 4 + lines);

    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let error = || Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
    write("bpe.codes", "a b 3\n");
    assert!(error().contains("tokenizer.json"), "{}", error());
    write("vocab.txt", "a@@ 3\nb");
    assert!(error().contains("vocab.txt") && error().contains("line 2"), "{}", error());
    write("vocab.txt", "a@@ 3\nb 1\n");
    assert_eq!(Tokenizer::from_dir(dir.path()).unwrap().encode_framed("ab b").unwrap(), [0, 4, 5, 5, 2]);
    write("bpe.codes", "a b\n");
    assert!(error().contains("bpe.codes") && error().contains("line 1"), "{}", error());
    write("tokenizer_config.json", r#"{"tokenizer_class": "BertweetTokenizer"}"#);
    assert!(error().contains("BertweetTokenizer"), "{}", error());
}

#[test]
fn a_vocabulary_alone_follows_its_configuration() {
    let all = goldens();
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let vocab = std::fs::read_to_string(golden("bert/vocab.txt")).unwrap();
    write("vocab.txt", &vocab);
    // Without a configuration a vocabulary is lower-cased, as in `transformers`.
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!(framed(&tokenizer, &all["texts"]), ids(&all["bert"]["ids"]));
    write("tokenizer_config.json", r#"{"do_lower_case": false}"#);
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!(framed(&tokenizer, &all["texts"]), ids(&all["bert"]["cased_ids"]));
    assert_ne!(ids(&all["bert"]["ids"]), ids(&all["bert"]["cased_ids"]));
    assert_eq!(tokenizer.encode_framed("[SEP]").unwrap().last(), tokenizer.token_id("[SEP]").as_ref());
    assert!(!tokenizer.encode_text("[CLS]").unwrap().contains(&tokenizer.token_id("[CLS]").unwrap()));
    assert_eq!(tokenizer.decode(&tokenizer.encode_text("con mèo").unwrap(), true).unwrap(), "con mèo");
    write("vocab.txt", "a\nb\n");
    let error = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
    assert!(error.contains("vocab.txt") && error.contains("[CLS]"), "{error}");
}
