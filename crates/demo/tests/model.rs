//! The embedded tokenizer, template and configuration, through the crates that read a user's checkpoint.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeSet;
use std::fs;

use omnigrpo_demo::{Form, Kind, MODEL_FILES, Sizes, generate, write_model};
use omnigrpo_text::{
    ChatTemplate, MediumKind, MediumTokens, Part, PromptRenderer, RenderOptions, Role, StopSet, Tokenizer,
    Turn,
};
use serde_json::Value;

fn model_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_model(dir.path()).unwrap();
    dir
}

fn config(dir: &tempfile::TempDir, name: &str) -> Value {
    serde_json::from_slice(&fs::read(dir.path().join(name)).unwrap()).unwrap()
}

/// Two tests or two programs may share a folder.
#[test]
fn several_writers_fill_one_directory_at_once() {
    let dir = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let writers: Vec<_> =
            (0..4).map(|_| scope.spawn(|| (0..20).try_for_each(|_| write_model(dir.path())))).collect();
        for writer in writers {
            writer.join().unwrap().unwrap();
        }
    });
    for (name, bytes) in MODEL_FILES {
        assert!(fs::read(dir.path().join(name)).unwrap() == *bytes, "{name}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), MODEL_FILES.len(), "nothing else is left");
}

#[test]
fn every_word_and_tag_is_one_token_and_every_byte_can_be_encoded() {
    let dir = model_dir();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let words: BTreeSet<&str> = Kind::ALL.iter().flat_map(|kind| kind.answers()).copied().collect();
    for word in words.into_iter().chain(["A", "B", "C", "D", "<think>", "</think>", "<answer>", "</answer>"])
    {
        assert_eq!(tokenizer.encode_text(word).unwrap().len(), 1, "{word}");
    }
    let text = "Grüße, 世界! \u{0}\t\r\n\u{7f} <|im_end|>";
    let ids = tokenizer.encode_text(text).unwrap();
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    assert!(!ids.contains(&tokenizer.token_id("<|im_end|>").unwrap()), "text cannot forge control tokens");
}

#[test]
fn the_configuration_names_the_tokenizers_ids() {
    let dir = model_dir();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let model = config(&dir, "config.json");
    assert_eq!(model["vocab_size"].as_u64().unwrap() as usize, tokenizer.vocab_size());
    for (key, token) in [
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
        ("eos_token_id", "<|im_end|>"),
    ] {
        assert_eq!(model[key].as_u64(), tokenizer.token_id(token).map(u64::from), "{key}");
    }
    let stops = StopSet::from_dir(dir.path(), &tokenizer, &[]).unwrap();
    assert!(stops.is_stop(tokenizer.token_id("<|im_end|>").unwrap()));
    // Head 32 wide: half of it over time, height and width. Tower and decoder meet at the hidden size.
    let sections = model["rope_scaling"]["mrope_section"].as_array().unwrap();
    let num_rotated: u64 = sections.iter().map(|n| n.as_u64().unwrap()).sum();
    let head = model["hidden_size"].as_u64().unwrap() / model["num_attention_heads"].as_u64().unwrap();
    assert_eq!(2 * num_rotated, head);
    assert_eq!(model["vision_config"]["out_hidden_size"], model["hidden_size"]);
}

#[test]
fn a_question_renders_as_the_model_was_trained_on_it() {
    let dir = model_dir();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let template = ChatTemplate::from_dir(dir.path()).unwrap();
    let renderer = PromptRenderer::new(&tokenizer, &template);
    let pad = tokenizer.token_id("<|image_pad|>").unwrap();
    let medium = MediumTokens::repeated(MediumKind::Image, "<|image_pad|>", pad, 4);
    let parts = vec![
        Part::Medium { kind: MediumKind::Image, index: 0 },
        Part::Text("\nWhich colour is it?".to_owned()),
    ];
    let turns = [Turn { role: Role::User, parts }];
    let prompt = renderer.render(&turns, &[medium], &RenderOptions::default()).unwrap();
    assert_eq!(
        tokenizer.decode(&prompt.ids, false).unwrap(),
        "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>\n\
         Which colour is it?<|im_end|>\n<|im_start|>assistant\n"
    );
    // Start, role, newline; one run of vision tokens between two marks; 9 pieces and a newline; end; and the reply's head.
    assert_eq!(prompt.ids.len(), 3 + 6 + 9 + 2 + 3);
}

#[test]
fn completions_are_seven_tokens_with_the_stop_token() {
    let dir = model_dir();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let data = dir.path().join("data");
    generate(&data, 1, Sizes { sft: 80, train: 0, eval: 0 }).unwrap();
    for line in fs::read_to_string(data.join("sft.jsonl")).unwrap().lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let completion = row["conversations"][1]["value"].as_str().unwrap();
        assert_eq!(tokenizer.encode_text(completion).unwrap().len() + 1, 7);
        let question = row["conversations"][0]["value"].as_str().unwrap();
        let most = if row["form"] == Form::Choice.name() { 40 } else { 20 };
        assert!(tokenizer.encode_text(question).unwrap().len() <= most, "{question}");
    }
}
