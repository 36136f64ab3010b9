//! Supervised examples of conversations with tools: the tokens of the whole conversation, with the turns of the model as targets.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use omnigrpo_data::{RowReader, Sample};
use omnigrpo_models::{
    Checkpoint, GroupStream, ModelError, PackedStream, PromptBuilder, PromptSettings, SftExample,
};
use omnigrpo_testkit::{checkpoint, copy_dir, golden, max_diff, model_of};
use omnigrpo_text::{
    ChatTemplate, Part, PromptRenderer, RenderOptions, RenderedConversation, Role, Tokenizer, Turn,
};
use serde_json::{Value, json};

fn builder(name: &str, render: RenderOptions) -> PromptBuilder {
    let settings = PromptSettings { max_completion_length: 64, render, ..PromptSettings::default() };
    PromptBuilder::open(&Checkpoint::open(&checkpoint(name)).unwrap(), settings).unwrap()
}

fn sample(row: Value) -> Sample {
    RowReader::new("rows").media_in(golden("media")).sample(row).unwrap()
}

/// Two pictures in different turns, two answers to calls in a row, and two questions.
fn conversation() -> Value {
    let call = |x: u32| json!({ "function": { "name": "zoom", "arguments": { "bbox_2d": [x, 2, 3, 4] } } });
    json!({ "messages": [
        { "role": "user", "content": [{ "type": "image", "image": "shapes.png" }, { "type": "text", "text": "which digit?" }] },
        { "role": "assistant", "content": "I look.", "tool_calls": [call(1)] },
        { "role": "tool", "content": [{ "type": "image", "image": "alpha.png" }, { "type": "text", "text": "the part" }] },
        { "role": "tool", "content": [{ "type": "text", "text": "<|im_end|> is text" }] },
        { "role": "assistant", "content": "7" },
        { "role": "user", "content": [{ "type": "text", "text": "sure?" }] },
        { "role": "assistant", "content": "yes, 7" },
    ] })
}

/// Renders all turns at once, as `transformers` does (see the goldens of the crate `text`).
fn whole(name: &str, prompts: &PromptBuilder, sample: &Sample, example: &SftExample) -> RenderedConversation {
    let (tokenizer, template) =
        (Tokenizer::from_dir(&checkpoint(name)).unwrap(), ChatTemplate::from_dir(&checkpoint(name)).unwrap());
    let media = example.prompt.media.iter();
    let processor = prompts.family().processor();
    let shown = media.map(|m| processor.tokens(m.kind, &m.shape, &m.frame_times_secs).unwrap());
    let turns = processor.arrange(&[sample.turns.clone(), sample.sft_turns()].concat());
    let renderer = PromptRenderer::new(&tokenizer, &template);
    let options = &prompts.settings().render;
    renderer.render_conversation(&turns, &shown.collect::<Vec<_>>(), options, prompts.stops()).unwrap()
}

fn mask(example: &SftExample) -> Vec<bool> {
    let mut mask = vec![false; example.prompt.ids.len()];
    mask.resize(mask.len() + example.target.len(), true);
    for turn in &example.turns {
        let tokens = turn.tokens();
        let first = example.prompt.ids.len();
        mask[first + tokens.start..first + tokens.end].fill(false);
    }
    mask
}

#[test]
fn examples_are_the_conversation_with_the_turns_of_the_model_as_targets() {
    for name in ["qwen2_vl_untied", "qwen2_5_vl_untied", "qwen3_vl", "internvl3_5_hf"] {
        let (prompts, sample) = (builder(name, RenderOptions::default()), sample(conversation()));
        let example = prompts.build_sft(&sample, 0).unwrap();
        assert_eq!((example.turns.len(), example.prompt.media.len()), (2, 2), "{name}");
        assert_eq!(example.turns[0].media, [1], "{name}");
        let whole = whole(name, &prompts, &sample, &example);
        let ids = [example.prompt.ids.clone(), example.target.clone()].concat();
        let decode = |ids: &[u32]| prompts.tokenizer().decode(ids, false).unwrap();
        assert_eq!(decode(&ids), decode(&whole.prompt.ids[..ids.len()]), "{name}");
        assert_eq!(ids, whole.prompt.ids[..ids.len()], "{name}");
        assert_eq!(mask(&example), whole.train_mask[..ids.len()], "{name}");
        assert_eq!(example.num_imitated(), mask(&example).iter().filter(|own| **own).count());
        // Headers alone give the same sizes.
        let outline = prompts.outline_sft(&sample).unwrap();
        assert_eq!((&outline.prompt.ids, &outline.target), (&example.prompt.ids, &example.target), "{name}");

        // The last answer has the log-probabilities that it has after a prompt with all turns.
        let model = model_of(name);
        let features = [model.encode_prompt(&example.prompt).unwrap()];
        let group = [GroupStream { prompt: &example.prompt, completions: vec![&example.target] }];
        let stream = PackedStream::with_turns(&group, |_, _| &example.turns).unwrap();
        let scored = model.score(&stream, &features, 1.0).unwrap().0;
        assert_eq!(scored.len(), example.num_imitated(), "{name}");
        let prompt = prompts.build(&sample).unwrap();
        let answer = &ids[prompt.ids.len()..];
        let group = [GroupStream { prompt: &prompt, completions: vec![answer] }];
        let features = [model.encode_prompt(&prompt).unwrap()];
        let plain = model.score(&PackedStream::new(&group).unwrap(), &features, 1.0).unwrap().0;
        let delta = max_diff(&scored[scored.len() - answer.len()..], &plain);
        assert!(delta <= 1e-5, "{name}: {delta}");
    }
}

/// Every answer of a conversation is a target, and only the completion of a prompt.
#[test]
fn prompts_are_context() {
    let prompts = builder("qwen2_5_vl_untied", RenderOptions::default());
    let say = |role: &str, text: &str| json!({ "role": role, "content": text });
    let texts = |row: Value| -> Vec<String> {
        let example = prompts.build_sft(&sample(row), 0).unwrap();
        let (mut texts, mut from) = (Vec::new(), 0);
        let end = example.target.len()..example.target.len();
        for others in example.turns.iter().map(|turn| turn.tokens()).chain([end]) {
            texts.push(prompts.tokenizer().decode(&example.target[from..others.start], false).unwrap());
            from = others.end;
        }
        texts
    };
    let history = [say("user", "a?"), say("assistant", "a"), say("user", "b?")];
    let with = |last: Value| [&history[..], &[last]].concat();
    assert_eq!(texts(json!({ "messages": with(say("assistant", "b")) })), ["a<|im_end|>", "b<|im_end|>"]);
    assert_eq!(texts(json!({ "prompt": history, "completion": "b" })), ["b<|im_end|>"]);
    assert_eq!(texts(json!({ "messages": history, "solution": "b" })), ["b<|im_end|>"]);
    let turns = [say("assistant", "b"), say("tool", "c"), say("assistant", "d")];
    assert_eq!(texts(json!({ "prompt": "b?", "completion": turns })), ["b<|im_end|>", "d<|im_end|>"]);
    let none = prompts.build_sft(&sample(json!({ "prompt": "b?" })), 0);
    assert!(matches!(none, Err(ModelError::NoAnswer)), "{none:?}");
}

#[test]
fn a_row_may_describe_its_own_tools() {
    let tool = |name: &str| json!({ "type": "function", "function": { "name": name, "parameters": {} } });
    let prompts =
        builder("qwen2_5_vl_untied", RenderOptions { tools: vec![tool("run")], ..Default::default() });
    let text = |tools: Value| prompts.build(&sample(json!({ "prompt": "b?", "tools": tools }))).unwrap().text;
    let described = |name: &str| {
        format!(
            "<tools>\n{{\"type\": \"function\", \"function\": {{\"name\": \"{name}\", \"parameters\": {{}}}}}}\n</tools>"
        )
    };
    assert!(text(Value::Null).contains(&described("run")));
    assert!(text(json!([tool("own")])).contains(&described("own")));
    assert!(!text(json!([])).contains("# Tools"));
}

/// Copies a checkpoint and replaces its template.
fn with_template(template: &str) -> (tempfile::TempDir, PromptBuilder) {
    let folder = tempfile::tempdir().unwrap();
    copy_dir(&checkpoint("qwen2_5_vl_untied"), folder.path());
    std::fs::remove_file(folder.path().join("chat_template.json")).ok();
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let prompts = PromptBuilder::open(&checkpoint, PromptSettings::default()).unwrap();
    (folder, prompts)
}

/// A turn of an environment on which the template works for too long says too much. The limits of a turn hold in the same way, and
/// the template renders other turns.
#[test]
fn a_turn_of_an_environment_may_say_too_much() {
    // The work grows with the square of a text.
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for x in range(m.content|length) %}\
                    {% for y in range(m.content|length) %}{% endfor %}{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let (_folder, prompts) = with_template(template);
    let turn = |parts: Vec<Part>| prompts.turn(&Turn { role: Role::Tool, parts }, &[], 4000);
    let text = |letters: usize| Part::Text("x".repeat(letters));
    assert!(turn(vec![text(500)]).unwrap().is_some());
    for (parts, why) in [
        (vec![text(3000)], "too much work or memory"),
        (vec![text(1); 1025], "1025 texts and media, expected at most 1024"),
        (vec![text(1 << 20), text(1)], "1048577 bytes of text, expected at most 1048576"),
    ] {
        let error = turn(parts).unwrap_err();
        assert!(matches!(error, ModelError::SaysTooMuch { .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}");
    }
    assert!(turn(vec![text(5)]).unwrap().is_some());
}

/// A template of a model that thinks leaves out the thoughts of earlier turns. They are imitated all the same.
#[test]
fn a_template_cannot_rewrite_a_target() {
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] | trim }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let (_folder, prompts) = with_template(template);
    let say = |role: &str, text: &str| json!({ "role": role, "content": text });
    let thought = " <think>\nlook\n</think>\n<tool_call>{\"name\": \"zoom\"}</tool_call> ";
    let row = sample(json!({ "messages": [
        say("user", "which?"), say("assistant", thought), say("tool", " 7\n"), say("assistant", "7"),
    ] }));
    let example = prompts.build_sft(&row, 0).unwrap();
    let first = &example.target[..example.turns[0].start];
    assert_eq!(prompts.tokenizer().decode(first, false).unwrap(), format!("{thought}<|im_end|>"));
    assert_eq!(
        example.turns[0].turn.text,
        "\n<|im_start|>user\n<tool_response>\n 7\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    );
    // A prompt has what the template writes.
    let prompt = prompts.build(&row).unwrap();
    let text = prompts.tokenizer().decode(&prompt.ids, false).unwrap();
    let call = "<|im_start|>assistant\n<tool_call>{\"name\": \"zoom\"}</tool_call><|im_end|>\n";
    assert!(text.contains(call) && !text.contains("look"), "{text}");
}
