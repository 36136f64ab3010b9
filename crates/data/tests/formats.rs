//! Rows as their publishers write them, every format and every way to get them wrong.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::path::PathBuf;

use omnigrpo_data::{
    ColumnNames, Dataset, DatasetSpec, MediumKind, MediumOptions, MediumSource, Part, QuestionTemplate,
    ReadOptions, RecordedRewards, Registry, Role, Roots, RowError, RowProblem, RowReader, Sample, Segments,
    Think,
};
use omnigrpo_guard::told;
use omnigrpo_text::ToolCall;
use serde_json::{Value, json};

struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    /// A folder with a few media, whose content nobody reads here.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "a.png",
            "b.png",
            "clip.mp4",
            "clip2.mp4",
            "sound.wav",
            "f/0.png",
            "f/1.png",
            "anim.gif",
            "train2014/COCO_train2014_000000000009.jpg",
        ] {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        }
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().canonicalize().unwrap().join(name)
    }

    fn spec(&self, name: &str, text: &str) -> DatasetSpec {
        std::fs::write(self.path(name), text).unwrap();
        DatasetSpec::file(self.path(name))
    }

    fn read_with(&self, row: &Value, options: &ReadOptions) -> Result<Sample, RowError> {
        let spec = self.spec("rows.jsonl", &row.to_string());
        Dataset::open(&[spec], options).unwrap().get(0)
    }

    fn read(&self, row: Value) -> Sample {
        self.read_with(&row, &ReadOptions::default()).unwrap()
    }

    fn error(&self, row: Value) -> String {
        told(&self.read_with(&row, &ReadOptions::default()).unwrap_err())
    }
}

/// Returns the text that supervised training imitates last.
fn answer(sample: &Sample) -> Option<String> {
    sample.sft_turns().last().map(omnigrpo_text::Turn::written)
}

fn text(text: &str) -> Part {
    Part::Text(text.to_owned())
}

fn medium(kind: MediumKind, index: usize) -> Part {
    Part::Medium { kind, index }
}

const IMAGE: Part = Part::Medium { kind: MediumKind::Image, index: 0 };
const VIDEO: Part = Part::Medium { kind: MediumKind::Video, index: 0 };
const AUDIO: Part = Part::Medium { kind: MediumKind::Audio, index: 0 };

fn sources(sample: &Sample) -> Vec<MediumSource> {
    sample.media.iter().map(|medium| medium.source.clone()).collect()
}

#[test]
fn qwen_finetune_video_row_with_meta() {
    let place = Place::new();
    let question = "<video>\nWhich actions? (1) a (2) b\nOutput the thinking process in <think> </think> and final answer in <answer> </answer> tags.";
    let sample = place.read(json!({
        "id": "v_17",
        "conversations": [
            {"from": "human", "value": question},
            {"from": "gpt", "value": "<answer>(1) a (2) b</answer>"},
        ],
        "video": "clip.mp4",
        "meta": {"frame_cnts": [15.0, 11], "min_frames": 4, "max_frames": 8, "dynamic_sample": true},
    }));
    assert_eq!(sample.id, "v_17");
    assert_eq!((sample.row, sample.origin.line), (0, 1));
    assert_eq!(&*sample.dataset, "rows");
    assert_eq!(sample.turns.len(), 1);
    assert_eq!(sample.turns[0].parts, [VIDEO, text(&question["<video>".len()..])]);
    assert_eq!(sources(&sample), [MediumSource::Path(place.path("clip.mp4"))]);
    let segments =
        Segments { frame_counts: vec![15, 11], min_frames: 4, max_frames: 8, dynamic_sample: true };
    assert_eq!(sample.media[0].options, MediumOptions { segments: Some(segments), ..Default::default() });
    assert_eq!(sample.solution.as_deref(), Some("<answer>(1) a (2) b</answer>"));
    assert_eq!(answer(&sample), sample.solution);
    assert_eq!(sample.think, Think::On);
    assert_eq!(sample.columns["meta"]["max_frames"], 8);
}

/// A conversation with a tool: the cold start of a model that looks again.
#[test]
fn turns_of_tools() {
    let place = Place::new();
    let arguments = json!({"bbox_2d": [1, 2, 3, 4]});
    let sample = place.read(json!({
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "which digit?"}]},
            {"role": "assistant", "content": "I look.", "tool_calls": [
                {"type": "function", "function": {"name": "zoom", "arguments": arguments.to_string()}}
            ]},
            {"role": "tool", "content": [{"type": "image", "image": "b.png"}]},
            {"role": "assistant", "content": "<answer>7</answer>"},
        ],
    }));
    let roles: Vec<Role> = sample.turns.iter().map(|turn| turn.role).collect();
    assert_eq!(roles, [Role::User, Role::Assistant, Role::Tool]);
    let call = |name: &str, arguments: &Value| {
        Part::Call(ToolCall { name: name.to_owned(), arguments: arguments.as_object().cloned().unwrap() })
    };
    assert_eq!(sample.turns[1].parts, [text("I look."), call("zoom", &arguments)]);
    assert_eq!(
        sample.turns[1].written(),
        "I look.\n<tool_call>\n{\"name\": \"zoom\", \"arguments\": {\"bbox_2d\": [1, 2, 3, 4]}}\n</tool_call>"
    );
    // All turns of the model are imitated.
    assert_eq!(sample.reference.from, 0);
    assert_eq!(sample.turns[2].parts, [Part::Medium { kind: MediumKind::Image, index: 1 }]);
    assert_eq!(answer(&sample).as_deref(), Some("<answer>7</answer>"));
    // A call without text, and the names of other formats.
    let sample = place.read(json!({
        "messages": [
            {"from": "human", "value": "which digit?"},
            {"role": "assistant", "tool_calls": [{"name": "now", "arguments": {}}]},
            {"from": "observation", "value": "noon"},
        ],
        "answer": "12",
    }));
    assert_eq!(sample.turns[1].parts, [text(""), call("now", &json!({}))]);
    assert_eq!((sample.turns[2].role, &sample.turns[2].parts[..]), (Role::Tool, &[text("noon")][..]));
    // The conversation has no final turn of the model, so all of it is the prompt.
    assert_eq!(sample.reference.from, 3);
    // Placeholders in plain texts, as ms-swift writes them.
    let sample = place.read(json!({
        "messages": [
            {"role": "user", "content": "<image>which digit?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now"}}]},
            {"role": "tool", "content": "<image>"},
            {"role": "assistant", "content": "7"},
        ],
        "images": ["a.png", "b.png"],
    }));
    assert_eq!(sample.turns[1].parts, [text(""), call("now", &json!({}))]);
    assert_eq!(sample.turns[2].parts, [Part::Medium { kind: MediumKind::Image, index: 1 }]);
}

/// A completion may have turns of a tool. The prompt is context.
#[test]
fn completions_of_several_turns() {
    let place = Place::new();
    let sample = place.read(json!({
        "prompt": [{"role": "user", "content": "when?"}],
        "completion": [
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now"}}]},
            {"role": "tool", "content": "noon"},
            {"role": "assistant", "content": "12"},
        ],
    }));
    assert_eq!((sample.turns.len(), sample.reference.from), (1, 1));
    let roles: Vec<Role> = sample.sft_turns().iter().map(|turn| turn.role).collect();
    assert_eq!(roles, [Role::Assistant, Role::Tool, Role::Assistant]);
    assert_eq!(sample.solution.as_deref(), Some("12"));
    let open = json!({"prompt": "when?", "completion": [{"role": "tool", "content": "noon"}]});
    assert!(place.error(open).contains("messages that begin and end with an assistant turn"));
}

/// The column `tools`, as TRL and ms-swift write it.
#[test]
fn rows_describe_tools() {
    let place = Place::new();
    let (function, expected) = (
        json!({"name": "zoom", "parameters": {}}),
        json!({"type": "function", "function": {"name": "zoom", "parameters": {}}}),
    );
    let with = |tools: Value| place.read(json!({"prompt": "Q", "tools": tools})).tools;
    for tools in [
        json!([expected]),
        json!([function]),
        json!([expected.to_string()]),
        json!(json!([function]).to_string()),
    ] {
        assert_eq!(with(tools.clone()), Some(vec![expected.clone()]), "{tools}");
    }
    assert_eq!((with(json!([])), with(Value::Null)), (Some(Vec::new()), None));
    for wrong in [json!("zoom"), json!([{"type": "function"}]), json!({"zoom": {}})] {
        let told = place.error(json!({"prompt": "Q", "tools": wrong}));
        assert!(told.contains("`tools`") && told.contains("a list of {type: function"), "{told}");
    }
}

#[test]
fn turns_of_recorded_completions_are_read() {
    let place = Place::new();
    let completions = |own: Value| json!({ "question": "which?", "completions": [own] });
    // A picture comes before the text unless `content` has another order.
    let turn = json!({ "model": "look", "model_tokens": 2, "text": "here", "tokens": 9, "media": ["a.png"] });
    let said = json!([{ "type": "text", "text": "<image>" }, { "type": "image", "image": "b.png" }]);
    let second =
        json!({ "model": "again", "role": "user", "content": said, "text": "<image>", "media": ["b.png"] });
    let read = place.read(completions(json!({ "text": "7", "turns": [turn, second] })));
    let turns = &read.completions.unwrap()[0].turns;
    assert_eq!((turns[0].model.as_str(), turns[0].model_tokens, turns[0].tokens), ("look", Some(2), Some(9)));
    assert_eq!(
        (turns[0].said.role, turns[0].said.parts.as_slice()),
        (Role::Tool, &[IMAGE, text("here")][..])
    );
    assert_eq!(
        (turns[1].said.role, turns[1].said.parts.as_slice()),
        (Role::User, &[text("<image>"), IMAGE][..])
    );
    let file = |turn: usize| turns[turn].media.iter().map(|m| m.source.clone()).collect::<Vec<_>>();
    assert_eq!(file(0), [MediumSource::Path(place.path("a.png"))]);
    assert_eq!(file(1), [MediumSource::Path(place.path("b.png"))]);
    // `eval` writes the turns of all completions beside their texts.
    let beside = json!({ "question": "which?", "completions": ["7", "8"], "completion_turns": [[], [{ "model": "look", "text": "a" }]] });
    let completions_beside = place.read(beside).completions.unwrap();
    assert_eq!([completions_beside[0].turns.len(), completions_beside[1].turns.len()], [0, 1]);
    for wrong in [
        json!([{ "text": "look" }]),
        json!([{ "model": "look", "role": "assistant", "text": "a" }]),
        json!([{ "model": "look", "model_tokens": -1, "text": "a" }]),
        json!("look"),
    ] {
        let message = place.error(completions(json!({ "text": "7", "turns": wrong })));
        assert!(
            message.contains("completions[0].turns") && message.contains("{model, text, media}"),
            "{message}"
        );
    }
}

/// A chosen completion becomes turns of the model and of the tool. Media of the tool follow those of the prompt.
#[test]
fn a_completion_with_turns_of_a_tool_shows_media() {
    let place = Place::new();
    let part = json!([{ "type": "image", "image": "b.png" }, { "type": "text", "text": "the part" }]);
    let sample = place.read(json!({
        "image": "a.png", "prompt": "<image>\nwhich?", "solution": "7",
        "completion": [
            { "role": "assistant", "content": "look" },
            { "role": "tool", "content": part },
            { "role": "assistant", "content": "7" },
        ],
    }));
    assert_eq!((sample.media.len(), sample.reference.from), (1, 1));
    let turns = sample.sft_turns();
    assert_eq!(turns[1].role, Role::Tool);
    assert_eq!(turns[1].parts, [medium(MediumKind::Image, 1), text("the part")]);
    let files: Vec<_> = sample.sft_media().into_iter().map(|medium| medium.source).collect();
    assert_eq!(files, ["a.png", "b.png"].map(|name| MediumSource::Path(place.path(name))));
    let shown = json!({ "prompt": "which?", "completion": [{ "role": "assistant", "content": [{ "type": "image", "image": "a.png" }] }] });
    assert!(place.error(shown).contains("expected text"));
}

#[test]
fn qwen_finetune_images_and_both_media_in_one_row() {
    let place = Place::new();
    let sample = place.read(json!({
        "image": ["a.png", "b.png"], "video": "clip.mp4",
        "conversations": [
            {"role": "user", "content": "<image>\nand <image> or <video>?"},
            {"role": "assistant", "content": "first"},
            {"role": "user", "content": "sure?"},
            {"role": "assistant", "content": "yes"},
        ],
    }));
    let roles: Vec<_> = sample.turns.iter().map(|turn| turn.role).collect();
    assert_eq!(roles, [Role::User, Role::Assistant, Role::User]);
    let expected = [IMAGE, text("\nand "), medium(MediumKind::Image, 1), text(" or "), VIDEO, text("?")];
    assert_eq!(sample.turns[0].parts, expected);
    assert_eq!(sample.turns[1].parts, [text("first")]);
    assert_eq!(sample.question(), "sure?");
    assert_eq!(sample.solution.as_deref(), Some("yes"));
    assert_eq!(sample.id, "rows:1");
}

#[test]
fn mentioned_sound_is_that_of_the_videos() {
    let place = Place::new();
    let clip = MediumSource::Path(place.path("clip.mp4"));
    // How R1-Omni's data is published: one path, two placeholders.
    let sample = place.read(json!({
        "video": "clip.mp4", "video_end": 2.5,
        "conversations": [{"from": "human", "value": "<video>\n<audio>\nWhich emotion?"}, {"from": "gpt", "value": "sad"}],
    }));
    assert_eq!(sample.turns[0].parts, [VIDEO, text("\n"), AUDIO, text("\nWhich emotion?")]);
    assert_eq!(sources(&sample), [clip.clone(), clip.clone()]);
    assert_eq!(sample.media[1].kind, MediumKind::Audio);
    assert_eq!(sample.media[1].options.video_end, Some(2.5));
    // Typed parts, with the clip in the part and in the column.
    let typed = |video: serde_json::Value, columns: serde_json::Value| {
        let mut row = columns;
        row["messages"] = json!([{"role": "user", "content": [video, {"type": "audio"}, "What?"]}]);
        place.read(row)
    };
    for sample in [
        typed(json!({"type": "video", "video": "clip.mp4"}), json!({})),
        typed(json!({"type": "video"}), json!({"video": "clip.mp4"})),
    ] {
        assert_eq!(sample.turns[0].parts, [VIDEO, AUDIO, text("What?")]);
        assert_eq!(sources(&sample), [clip.clone(), clip.clone()]);
    }
    // Frames have no sound to be meant.
    let problem = place.error(json!({"video": ["f/0.png", "f/1.png"], "question": "<video><audio>What?"}));
    assert!(problem.contains("<audio>"), "{problem}");
}

#[test]
fn videos_are_heard_where_the_run_asks_for_it() {
    let place = Place::new();
    let hearing = ReadOptions { use_audio_in_video: true, ..Default::default() };
    let clip = MediumSource::Path(place.path("clip.mp4"));
    let row = json!({"video": "clip.mp4", "question": "<video>\nWhich emotion?"});
    assert_eq!(place.read(row.clone()).turns[0].parts, [VIDEO, text("\nWhich emotion?")]);
    let sample = place.read_with(&row, &hearing).unwrap();
    assert_eq!(sample.turns[0].parts, [VIDEO, text("\n"), AUDIO, text("\nWhich emotion?")]);
    assert_eq!(sources(&sample), [clip.clone(), clip.clone()]);
    // Two clips: only the file can be heard, and its sound follows it.
    let row = json!({"messages": [{"role": "user", "content": [
        {"type": "video", "video": ["f/0.png", "f/1.png"]}, {"type": "video", "video": "clip.mp4"}, "What?",
    ]}]});
    let sample = place.read_with(&row, &hearing).unwrap();
    assert_eq!(
        sample.turns[0].parts,
        [VIDEO, medium(MediumKind::Video, 1), text("\n"), AUDIO, text("What?")]
    );
    assert_eq!(sources(&sample)[1..], [clip.clone(), clip]);
    // A row that names its sound keeps it.
    let row = json!({"video": "clip.mp4", "audio": "sound.wav", "question": "What?"});
    let sample = place.read_with(&row, &hearing).unwrap();
    assert_eq!(sources(&sample)[1], MediumSource::Path(place.path("sound.wav")));
    assert_eq!(sample.media.len(), 2);
}

#[test]
fn r1_omni_row_has_video_and_audio() {
    let place = Place::new();
    let row = json!({
        "video": "clip.mp4", "audio": "sound.wav",
        "conversations": [{"from": "human", "value": "<video>\n<audio>\nWhich emotion?"}, {"from": "gpt", "value": "sad"}],
    });
    let sample = place.read(row.clone());
    assert_eq!(sample.turns[0].parts, [VIDEO, text("\n"), AUDIO, text("\nWhich emotion?")]);
    assert_eq!(sample.solution.as_deref(), Some("sad"));
    let template = QuestionTemplate::named("humanomni").unwrap();
    let sample = place.read_with(&row, &ReadOptions { template, ..Default::default() }).unwrap();
    assert_eq!(sample.turns[0].parts[..2], [VIDEO, AUDIO]);
    assert!(
        sample
            .question()
            .starts_with("As an emotional recognition expert; throughout the video, which emotion")
    );
    assert!(sample.question().ends_with("final emotion in <answer> </answer> tags."));
}

#[test]
fn vlm_r1_row_keeps_boxes_and_methods() {
    let place = Place::new();
    let row = json!({
        "id": 1, "image": "COCO_train2014_000000000009.jpg", "accu_reward_method": "iou",
        "conversations": [
            {"from": "human", "value": "<image>Please provide the bounding box of the cat."},
            {"from": "gpt", "value": [10, 20, 30.5, 40]},
        ],
    });
    let template = QuestionTemplate::named("rec").unwrap();
    let sample = place.read_with(&row, &ReadOptions { template, ..Default::default() }).unwrap();
    assert_eq!(sample.id, "1");
    assert_eq!(sample.solution.as_deref(), Some("[10,20,30.5,40]"));
    assert_eq!(
        sources(&sample),
        [MediumSource::Path(place.path("train2014/COCO_train2014_000000000009.jpg"))]
    );
    assert_eq!(sample.columns["accu_reward_method"], "iou");
    assert!(sample.question().ends_with("tags. Output the final answer in JSON format."));
}

#[test]
fn r1_v_row_has_problem_and_solution() {
    let place = Place::new();
    let sample =
        place.read(json!({"image": "a.png", "problem": "How many?", "solution": "<answer> 3 </answer>"}));
    assert_eq!(sample.turns[0].parts, [IMAGE, text("How many?")]);
    assert_eq!(sample.solution.as_deref(), Some("<answer> 3 </answer>"));
    assert!(sample.reference.later.is_empty());
    assert_eq!(answer(&sample).as_deref(), Some("<answer> 3 </answer>"));
    let sample = place.read(json!({"question": "2+2?", "answer": 4}));
    assert_eq!((sample.solution.as_deref(), sample.media.len()), (Some("4"), 0));
}

#[test]
fn trl_rows() {
    let place = Place::new();
    // A plain prompt beside one image.
    let sample = place
        .read(json!({"prompt": "What is this?", "image": "a.png", "solution": "cat", "completion": "a cat"}));
    assert_eq!(sample.turns[0].parts, [IMAGE, text("What is this?")]);
    assert_eq!(answer(&sample).as_deref(), Some("a cat"));
    assert_eq!(sample.solution.as_deref(), Some("cat"));
    // Messages with parts that take their images from the column.
    let sample = place.read(json!({
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "One <image> "}, {"type": "image"}, {"type": "image", "text": null}]},
        ],
        "images": ["a.png", {"bytes": null, "path": "b.png"}],
        "completion": [{"role": "assistant", "content": [{"type": "text", "text": "yes"}]}],
    }));
    assert_eq!(sample.turns[0].parts, [text("Be brief.")]);
    assert_eq!(sample.turns[1].parts, [text("One <image> "), IMAGE, medium(MediumKind::Image, 1)]);
    assert_eq!(
        sources(&sample),
        [MediumSource::Path(place.path("a.png")), MediumSource::Path(place.path("b.png"))]
    );
    assert_eq!(sample.solution.as_deref(), Some("yes"));
    // Messages whose images nothing mentions: before the text.
    let sample = place.read(json!({
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hm?"}]},
            {"role": "assistant", "content": "ok"},
        ],
        "images": ["a.png", "b.png"],
    }));
    assert_eq!(sample.turns[0].parts, [IMAGE, medium(MediumKind::Image, 1), text("Hm?")]);
    assert_eq!(answer(&sample).as_deref(), Some("ok"));
}

#[test]
fn typed_parts_carry_paths_and_options() {
    let place = Place::new();
    let sample = place.read(json!({
        "max_pixels": 50176, "nframes": 8, "video_end": 9,
        "messages": [{"role": "user", "content": [
            {"type": "video", "video": "clip.mp4", "fps": 1.0, "max_pixels": 1000, "video_start": 0.5, "video_end": 2.5},
            {"type": "video", "video": ["f/0.png", "f/1.png"]},
            {"type": "image_url", "image_url": {"url": "a.png"}, "resized_height": 280, "resized_width": 420},
            {"image": "b.png", "min_pixels": 784},
            {"type": "audio", "audio": "sound.wav"},
            "What?",
        ]}],
    }));
    let parts =
        [VIDEO, medium(MediumKind::Video, 1), IMAGE, medium(MediumKind::Image, 1), AUDIO, text("What?")];
    assert_eq!(sample.turns[0].parts, parts);
    let options: Vec<_> = sample.media.iter().map(|medium| medium.options.clone()).collect();
    // A part's own fps also silences the row's nframes.
    assert_eq!(
        options[0],
        MediumOptions {
            fps: Some(1.0),
            max_pixels: Some(1000),
            video_start: Some(0.5),
            video_end: Some(2.5),
            ..Default::default()
        }
    );
    assert_eq!(
        (options[1].nframes, options[1].max_pixels, options[1].video_end),
        (Some(8), Some(50176), Some(9.0))
    );
    assert_eq!((options[2].resized_height, options[2].resized_width), (Some(280), Some(420)));
    assert_eq!((options[3].min_pixels, options[3].max_pixels), (Some(784), Some(50176)));
    assert_eq!(
        sample.media[1].source,
        MediumSource::Frames(vec![place.path("f/0.png"), place.path("f/1.png")])
    );
}

#[test]
fn clips_as_frames_folders_and_lists() {
    let place = Place::new();
    let with = |video: Value| place.read(json!({"prompt": "Q", "video": video}));
    let frames = MediumSource::Frames(vec![place.path("f/0.png"), place.path("f/1.png")]);
    assert_eq!(sources(&with(json!(["f/0.png", "f/1.png"]))), std::slice::from_ref(&frames));
    assert_eq!(sources(&with(json!([["f/0.png", "f/1.png"]]))), [frames]);
    assert_eq!(sources(&with(json!("f"))), [MediumSource::Path(place.path("f"))]);
    assert_eq!(sources(&with(json!("anim.gif"))), [MediumSource::Path(place.path("anim.gif"))]);
    assert_eq!(with(json!(["clip.mp4", "clip2.mp4"])).media.len(), 2);
    // A WebP may be a clip or one of its frames; its header tells.
    let webp = |flags: u8| [b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0".as_slice(), &[flags, 0, 0, 0]].concat();
    std::fs::write(place.path("anim.webp"), webp(0x12)).unwrap();
    std::fs::write(place.path("still.webp"), webp(0x10)).unwrap();
    let anim = MediumSource::Path(place.path("anim.webp"));
    for clips in [json!("anim.webp"), json!(["anim.webp"]), json!([["anim.webp"]])] {
        assert_eq!(sources(&with(clips)), std::slice::from_ref(&anim));
    }
    assert_eq!(sources(&with(json!(["anim.webp", "anim.webp"]))), [anim.clone(), anim]);
    let still = MediumSource::Frames(vec![place.path("still.webp"); 2]);
    assert_eq!(sources(&with(json!(["still.webp", "still.webp"]))), [still]);
    let sample = with(json!({"path": "clip.mp4", "fps": 4}));
    assert_eq!(sample.media[0].options.fps, Some(4.0));
    assert!(with(json!("")).media.is_empty() && with(Value::Null).media.is_empty());
}

#[test]
fn text_rows_leading_answers_and_literal_tags() {
    let place = Place::new();
    let sample = place.read(json!({"conversations": [
        {"from": "gpt", "value": "Hello, I am a model."},
        {"from": "human", "value": "Hi <b>there</b>"},
    ]}));
    assert_eq!(sample.turns.len(), 1);
    assert_eq!((answer(&sample), sample.solution), (None, None));
    // An odd `fps` column is nobody's business in a row without media.
    assert_eq!(place.read(json!({"prompt": "Q", "fps": "fast"})).columns["fps"], "fast");
}

#[test]
fn recorded_completions_and_rewards() {
    let place = Place::new();
    let sample = place.read(json!({
        "prompt": "Q", "completions": ["a", {"text": "b", "completion_ids": [1, 2], "logprobs": [-0.5, -1], "finish_reason": "stop"}],
        "rewards": [1, 0.5],
    }));
    let completions = sample.completions.unwrap();
    assert_eq!(completions[0].text.as_deref(), Some("a"));
    assert_eq!(completions[1].completion_ids, Some(vec![1, 2]));
    assert_eq!(completions[1].logprobs, Some(vec![-0.5, -1.0]));
    assert_eq!(completions[1].finish_reason.as_deref(), Some("stop"));
    assert_eq!(sample.rewards, Some(RecordedRewards::Total(vec![1.0, 0.5])));

    let sample = place.read(json!({
        "prompt": "Q", "completion_ids": [[7], []], "logprobs": [[-2.0], []], "rewards": {"format": [1, null]},
    }));
    assert_eq!(sample.completions.unwrap()[0].completion_ids, Some(vec![7]));
    assert_eq!(
        sample.rewards,
        Some(RecordedRewards::Named(vec![("format".to_owned(), vec![Some(1.0), None])]))
    );

    let sample =
        place.read(json!({"prompt": "Q", "completions": [[{"role": "assistant", "content": "hi"}]]}));
    assert_eq!(sample.completions.unwrap()[0].text.as_deref(), Some("hi"));

    for (row, expected) in [
        (json!({"prompt": "Q", "completions": "a"}), "column `completions`: got text \"a\", expected a list"),
        (json!({"prompt": "Q", "completions": [3]}), "completions[0]"),
        (json!({"prompt": "Q", "completions": ["a"], "rewards": [1, 2]}), "2 numbers for 1 completions"),
        (
            json!({"prompt": "Q", "completions": ["a"], "completion_ids": [[1], [2]]}),
            "2 beside 1 completions",
        ),
        (json!({"prompt": "Q", "completion_ids": [[1, 2]], "logprobs": [[0.0]]}), "1 numbers for 2 tokens"),
        (json!({"prompt": "Q", "completion_ids": [[-1]]}), "a list of token ids"),
        (json!({"prompt": "Q", "completions": ["a"], "rewards": {"r": ["x"]}}), "rewards.r"),
    ] {
        let message = place.error(row);
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn ground_truths_are_found_under_the_names_of_other_trainers() {
    let place = Place::new();
    let turns = json!([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "long way to 4"}]);
    let cases = [
        (json!({"prompt": "Q", "solution": "1", "answer": "2"}), "1", "solution"),
        (json!({"prompt": "Q", "answer": 2, "ground_truth": "3"}), "2", "answer"),
        (json!({"messages": turns, "ground_truth": "3", "label": 9}), "3", "ground_truth"),
        (json!({"messages": turns, "label": 9}), "long way to 4", "(the final turn)"),
        (json!({"prompt": "Q", "label": "cat", "gt": "dog"}), "cat", "label"),
        // verl: the preprocessing scripts of its examples write such rows.
        (
            json!({"data_source": "geo3k", "prompt": [{"role": "user", "content": "<image>Q"}], "images": ["a.png"],
                "ability": "math", "reward_model": {"style": "rule", "ground_truth": "48"},
                "extra_info": {"split": "train", "index": 0, "answer": "other"}}),
            "48",
            "reward_model.ground_truth",
        ),
    ];
    for (row, expected, from) in cases {
        let sample = place.read(row);
        assert_eq!(sample.solution.as_deref(), Some(expected));
        assert_eq!(sample.solution_from.as_deref(), Some(from));
    }
    let sample = place.read(json!({"prompt": "Q", "gt": "dog"}));
    assert_eq!((sample.solution, sample.solution_from), (None, None));
}

#[test]
fn columns_can_be_named() {
    let place = Place::new();
    let name = |name: &str| Some(name.to_owned());
    let options = ReadOptions {
        columns: ColumnNames {
            prompt: name("instruction"),
            solution: name("info.gt"),
            image: name("picture"),
            video: name("clips"),
            audio: None,
        },
        ..ReadOptions::default()
    };
    let row = json!({"instruction": "<image><video>Q", "prompt": "not this", "solution": "nor this",
        "info": {"gt": [1, 2]}, "picture": "a.png", "image": "missing.png", "clips": ["clip.mp4"]});
    let sample = place.read_with(&row, &options).unwrap();
    assert_eq!(sample.turns[0].parts, [IMAGE, VIDEO, text("Q")]);
    assert_eq!(
        sources(&sample),
        [MediumSource::Path(place.path("a.png")), MediumSource::Path(place.path("clip.mp4"))]
    );
    assert_eq!((sample.solution.as_deref(), sample.reference.later.len()), (Some("[1,2]"), 0));

    // A row may lack what others have, but not its prompt.
    let rows =
        format!("{row}\n{}\n{}\n", json!({"instruction": "Q", "solution": "x"}), json!({"prompt": "Q"}));
    let dataset = Dataset::open(&[place.spec("named.jsonl", &rows)], &options).unwrap();
    let second = dataset.get(1).unwrap();
    assert_eq!((second.solution, second.media.len()), (None, 0));
    let message = told(&dataset.get(2).unwrap_err());
    assert!(message.contains("got columns [prompt], expected one of instruction"), "{message}");
    let seen = ["instruction", "prompt", "solution", "info", "picture", "image", "clips"];
    assert_eq!(dataset.columns_seen(), seen);

    // A name that no row has is a slip.
    let error = Dataset::open(
        &[place.spec("other.jsonl", r#"{"instruction": "Q", "pic": 1, "info": {}}"#)],
        &options,
    );
    let message = told(&error.err().unwrap());
    let expected =
        "has the column ColumnNames::image: got `picture`, expected one of [instruction, pic, info]";
    assert!(message.contains("other.jsonl") && message.contains(expected), "{message}");
}

#[test]
fn rollout_logs_and_evaluations_read_as_rows_with_completions() {
    let place = Place::new();
    let line = |id: &str, sample: u64, reward: Value, row: Value| {
        let mut line = json!({"step": 3, "epoch": 0.5, "id": id, "group": 0, "sample": sample, "prompt": "<rendered>",
            "completion": format!("{id}{sample}"), "rewards": {"accuracy": reward, "judge": null}, "reward": 1.0,
            "advantage": 0.5, "finish_reason": "length", "media": []});
        if !row.is_null() {
            line["row"] = row;
        }
        line.to_string()
    };
    let text = [
        line("a", 0, json!(1.0), json!({"problem": "A?", "solution": "1"})),
        line("a", 1, json!(0.25), Value::Null),
        line("b", 0, json!(null), json!({"problem": "B?", "kind": "x"})),
    ]
    .join("\n");
    let dataset = Dataset::open(&[place.spec("step-000003.jsonl", &text)], &ReadOptions::default()).unwrap();
    assert_eq!((dataset.len(), dataset.id(0), dataset.id(1)), (2, "a".to_owned(), "b".to_owned()));
    let a = dataset.get(0).unwrap();
    assert_eq!((a.question().as_str(), a.solution.as_deref(), a.origin.line), ("A?", Some("1"), 1));
    let completions = a.completions.unwrap();
    assert_eq!(completions.iter().map(|c| c.text.as_deref()).collect::<Vec<_>>(), [Some("a0"), Some("a1")]);
    assert_eq!(completions[0].finish_reason.as_deref(), Some("length"));
    let expected = [("accuracy", vec![Some(1.0), Some(0.25)]), ("judge", vec![None, None])];
    assert_eq!(a.rewards, Some(RecordedRewards::Named(expected.map(|(n, v)| (n.to_owned(), v)).into())));
    let b = dataset.get(1).unwrap();
    assert_eq!((b.origin.line, &b.columns["kind"]), (3, &json!("x")));

    // A completion that is missing is no smaller group, and a log without rows says so.
    let torn = [line("a", 0, json!(1.0), json!({"problem": "A?"})), line("a", 2, json!(1.0), Value::Null)]
        .join("\n");
    let error = |text: &str| {
        let dataset = Dataset::open(&[place.spec("torn.jsonl", text)], &ReadOptions::default()).unwrap();
        told(&dataset.get(0).unwrap_err())
    };
    assert!(error(&torn).contains("2 as completion 1"), "{}", error(&torn));
    assert!(error(&line("a", 0, json!(1.0), Value::Null)).contains("the prompt's `row`"));

    let evaluated = json!({"id": "e", "dataset": "d", "prompt": "Q? wrapped", "completions": ["x"], "answers": [null],
        "rewards": {"format": [0.0]}, "reward": [0.0], "row": {"messages": [{"role": "user", "content": "Q?"}]}});
    let sample = place.read(evaluated);
    assert_eq!((sample.id.as_str(), sample.question().as_str()), ("e", "Q?"));
    assert_eq!(sample.rewards, Some(RecordedRewards::Named(vec![("format".to_owned(), vec![Some(0.0)])])));
    // `row` alone is a column like any other.
    assert_eq!(place.read(json!({"problem": "Q?", "row": {"a": 1}})).columns["row"], json!({"a": 1}));
}

#[test]
fn a_chosen_completion_is_learned_and_the_answer_stays_the_truth() {
    let place = Place::new();
    let turns = json!([{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "A"}]);
    let sample = place.read(json!({"conversations": turns, "completion": "<think>t</think>A"}));
    assert_eq!(
        (answer(&sample).as_deref(), sample.solution.as_deref()),
        (Some("<think>t</think>A"), Some("A"))
    );
}

#[test]
fn bad_rows_say_what_where_and_what_was_expected() {
    let place = Place::new();
    let cases = [
        (
            json!({"txt": "x"}),
            "got columns [txt], expected one of conversations, messages, prompt, question, problem",
        ),
        (json!({"conversations": "x"}), "column `conversations`: got text \"x\", expected a list of turns"),
        (json!({"conversations": []}), "no question"),
        (json!({"conversations": [{"from": "human"}]}), "conversations[0]"),
        (
            json!({"conversations": [{"from": "robot", "value": "x"}]}),
            "got text \"robot\", expected human, user",
        ),
        (
            json!({"conversations": [{"from": "human", "value": 3}]}),
            "got number 3, expected a text or a list of parts",
        ),
        (json!({"conversations": [{"from": "gpt", "value": "x"}]}), "no question"),
        (
            json!({"messages": [{"role": "system", "content": "x"}, {"role": "assistant", "content": "y"}]}),
            "got turns [system]",
        ),
        (json!({"prompt": "  "}), "no text or medium"),
        (json!({"prompt": "<image> Q"}), "1 <image> placeholder"),
        (json!({"prompt": "<image> Q", "image": ["a.png", "b.png"]}), "has 2 image file"),
        (
            json!({"prompt": "Q", "image": "none.png"}),
            "image `none.png` cannot be used: the file does not exist",
        ),
        (json!({"prompt": "Q", "image": "../none.png"}), "leaves its root"),
        (json!({"prompt": "Q", "image": 3}), "column `image`: got number 3"),
        (json!({"prompt": "Q", "image": "a.png", "images": ["a.png"]}), "only one of the two"),
        (json!({"prompt": "Q", "image": {"bytes": "iVBOR", "path": "a.png"}}), "bytes inside the row"),
        (json!({"prompt": "Q", "image": "https://example.org/a.png"}), "ReadOptions::fetch"),
        (json!({"prompt": "Q", "image": "data:image/png;base64,AAAA"}), "write the medium to a file"),
        (
            json!({"prompt": "Q", "image": "a.png", "max_pixels": "many"}),
            "column `max_pixels`: got text \"many\", expected a whole number",
        ),
        (json!({"prompt": "Q", "video": "clip.mp4", "fps": 0}), "expected a number > 0"),
        (json!({"prompt": "Q", "video": "clip.mp4", "fps": 1, "nframes": 2}), "either `fps` or `nframes`"),
        (
            json!({"prompt": "Q", "video": "clip.mp4", "min_frames": 9, "max_frames": 2}),
            "at most `max_frames`",
        ),
        (
            json!({"prompt": "Q", "video": "clip.mp4", "video_start": 3, "video_end": 2}),
            "less than `video_end`",
        ),
        (json!({"prompt": "Q", "image": "a.png", "resized_height": 28}), "together with `resized_width`"),
        (json!({"prompt": "Q", "video": "clip.mp4", "meta": {"frame_cnts": [3.5]}}), "meta.frame_cnts"),
        (json!({"prompt": "Q", "video": "clip.mp4", "meta": {"frame_cnts": []}}), "meta.frame_cnts"),
        (
            json!({"prompt": "Q", "video": ["clip.mp4", "clip2.mp4"], "meta": {"frame_cnts": [3]}}),
            "one object per clip",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            "got 1 image parts without a path and 0 entries",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "cat", "text": "x"}]}]}),
            "messages[0].content[0]",
        ),
        (
            json!({"prompt": "Q", "completion": [{"role": "user", "content": "x"}]}),
            "end with an assistant turn",
        ),
    ];
    let mut wrong = Vec::new();
    for (row, expected) in cases {
        let message = place.error(row.clone());
        if !(message.contains(expected) && message.contains("rows.jsonl:1") && message.starts_with("row 0")) {
            wrong.push(format!("{row}\n  got {message}\n  expected {expected}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_bad_row_costs_only_itself() {
    let place = Place::new();
    let deep = "[".repeat(100_000) + &"]".repeat(100_000);
    let lines = [
        "{\"prompt\": \"one\"}",
        "{\"prompt\": ",
        &format!("{{\"prompt\": \"x\", \"deep\": {deep}}}"),
        "\u{1}",
        "{\"prompt\": NaN}",
        "[1]",
        "{\"prompt\": \"seven\"}",
    ];
    let spec = place.spec("rows.jsonl", &lines.join("\n"));
    let dataset = Dataset::open(&[spec], &ReadOptions::default()).unwrap();
    assert_eq!(dataset.len(), 7);
    assert_eq!(dataset.get(0).unwrap().question(), "one");
    assert_eq!(dataset.get(6).unwrap().question(), "seven");
    for row in 1..5 {
        let error = dataset.get(row).unwrap_err();
        match error.problem {
            RowProblem::NoNumber { word } => assert_eq!((row, word), (4, "NaN")),
            ref problem => assert!(row != 4 && matches!(problem, RowProblem::Json(_)), "{error}"),
        }
        assert_eq!((error.row, error.line), (row, row + 1));
    }
    assert!(matches!(dataset.get(7).unwrap_err().problem, RowProblem::OutOfRange { len: 7 }));
    let error = told(&dataset.get(5).unwrap_err());
    assert!(error.contains("column `(the row)`: got a list of 1, expected an object"), "{error}");
    assert!(dataset.get(u64::MAX).is_err());
}

/// qwen-vl-finetune's `pack_data.py` writes lists of rows that it trains as one sequence; here each is a row, with the media and the
/// columns of the file it came from.
#[test]
fn rows_of_a_packed_file_are_rows() {
    let place = Place::new();
    let row = |id: usize| {
        json!({"id": id, "image": "a.png", "conversations": [
            {"from": "human", "value": format!("<image>\nHow many? {id}")},
            {"from": "gpt", "value": id.to_string()},
        ]})
    };
    let packed = json!([[row(0), row(1)], [row(2)], [row(3), row(4), row(5)]]);
    let spec = place.spec("cambrian_737k_pack.json", &serde_json::to_string_pretty(&packed).unwrap());
    let dataset = Dataset::open(&[spec], &ReadOptions::default()).unwrap();
    assert_eq!(dataset.len(), 6);
    for id in 0..6 {
        let sample = dataset.get(id).unwrap();
        assert_eq!(sample.solution.as_deref(), Some(id.to_string().as_str()));
        assert_eq!(sample.media.len(), 1);
        assert!(sample.question().ends_with(&format!("How many? {id}")), "{}", sample.question());
    }
}

#[test]
fn media_are_told_apart_by_what_they_hold() {
    let place = Place::new();
    let write = |name: &str, bytes: &[u8]| std::fs::write(place.path(name), bytes).unwrap();
    std::fs::create_dir(place.path("frames")).unwrap();
    let long = vec![7; 20_000];
    write("a.png", &long);
    write("b.png", b"b");
    write("frames/1.png", b"1");
    write("frames/2.png", b"2");
    let rows = json!([
        {"prompt": "A?", "images": ["a.png", "b.png"]},
        {"prompt": "B?", "video": "frames"},
        {"prompt": "C?", "image": "gone.png"},
        {"prompt": "D?", "image": "https://example.org/d.png"},
    ]);
    write("rows.json", rows.to_string().as_bytes());
    let digest = |name: &str| {
        let spec = DatasetSpec::file(place.path(name));
        Dataset::open(&[spec], &ReadOptions::default()).unwrap().media_digest()
    };
    let first = digest("rows.json");
    assert_eq!((first.len(), digest("rows.json")), (32, first.clone()));
    // A copy elsewhere, later, is the same.
    std::fs::create_dir_all(place.path("copy/frames")).unwrap();
    for name in ["a.png", "b.png", "frames/1.png", "frames/2.png", "rows.json"] {
        std::fs::write(place.path("copy").join(name), std::fs::read(place.path(name)).unwrap()).unwrap();
    }
    assert_eq!(digest("copy/rows.json"), first);
    // Either end of a file, its length, a frame more.
    let changed = |change: &dyn Fn(&mut Vec<u8>), name: &str, bytes: &[u8]| {
        let mut new = bytes.to_vec();
        change(&mut new);
        write(name, &new);
        assert_ne!(digest("rows.json"), first, "{name}");
        write(name, bytes);
        assert_eq!(digest("rows.json"), first, "{name}");
    };
    changed(&|bytes| bytes[19_999] = 8, "a.png", &long);
    changed(&|bytes| bytes[0] = 8, "a.png", &long);
    changed(&|bytes| bytes.push(7), "a.png", &long);
    changed(&|bytes| bytes[0] = b'x', "frames/2.png", b"2");
    write("frames/3.png", b"2");
    assert_ne!(digest("rows.json"), first);
    // A pipe into which nobody writes is not waited for.
    let made = std::process::Command::new("mkfifo").arg(place.path("pipe.png")).status();
    if made.is_ok_and(|status| status.success()) {
        write("pipes.json", br#"[{"prompt": "E?", "image": "pipe.png"}]"#);
        assert_eq!(digest("pipes.json").len(), 32);
    }
}

#[test]
fn several_datasets_are_one_list_of_rows() {
    let place = Place::new();
    let rows = |name: &str, num: usize| {
        (0..num).map(|row| json!({"prompt": format!("{name}{row}")})).collect::<Vec<_>>()
    };
    std::fs::write(place.path("a.json"), serde_json::to_string_pretty(&rows("a", 10)).unwrap()).unwrap();
    std::fs::write(place.path("b_no_think.json"), json!(rows("b", 3)).to_string()).unwrap();
    let registry = json!({
        "a": {"annotation_path": "a.json", "columns": {"reward_method": "mcq"}},
        "b_no_think": {"annotation_path": "b_no_think.json", "format": "prompt"},
    });
    std::fs::write(place.path("registry.json"), registry.to_string()).unwrap();
    let registry = Registry::open(&place.path("registry.json")).unwrap();
    let specs = registry.select("a%50,b_no_think", &Roots::default()).unwrap();
    let open = |seed| Dataset::open(&specs, &ReadOptions { seed, ..Default::default() }).unwrap();
    let dataset = open(1);
    assert_eq!(dataset.parts().collect::<Vec<_>>(), [("a", 5), ("b_no_think", 3)]);
    let questions = |dataset: &Dataset| {
        (0..dataset.len()).map(|row| dataset.get(row).unwrap().question()).collect::<Vec<_>>()
    };
    let got = questions(&dataset);
    assert!(got[..5].iter().all(|question| question.starts_with('a')) && got[..5].is_sorted());
    assert_eq!(got[5..], ["b0", "b1", "b2"]);
    assert_eq!(questions(&open(1)), got);
    assert_ne!(questions(&open(2)), got);
    let digest = dataset.fingerprint().unwrap();
    assert_eq!(open(1).fingerprint().unwrap(), digest);
    assert_ne!(open(2).fingerprint().unwrap(), digest);
    // Another word of the same length, and back again.
    let text = std::fs::read_to_string(place.path("a.json")).unwrap();
    std::fs::write(place.path("a.json"), text.replace("a7", "x7")).unwrap();
    assert_ne!(open(1).fingerprint().unwrap(), digest);
    std::fs::write(place.path("a.json"), text).unwrap();
    assert_eq!(open(1).fingerprint().unwrap(), digest);
    let (first, last) = (dataset.get(0).unwrap(), dataset.get(7).unwrap());
    assert_eq!((first.think, last.think), (Think::On, Think::Off));
    assert_eq!(first.columns["reward_method"], "mcq");
    assert!(last.columns.get("reward_method").is_none());
    assert_eq!(&*last.dataset, "b_no_think");
    // Pretty-printed arrays know the line of each row.
    let number: u64 = first.question()[1..].parse().unwrap();
    assert_eq!(first.origin.line, 2 + 3 * number);
}

#[test]
fn a_row_without_a_file() {
    let place = Place::new();
    let absolute = place.path("b.png");
    let row = json!({"prompt": "<image><image> Q", "images": ["a.png", absolute]});
    let sample = RowReader::new("shell").media_in(place.folder.path()).sample(row).unwrap();
    assert_eq!(sources(&sample), [MediumSource::Path(place.path("a.png")), MediumSource::Path(absolute)]);
    assert_eq!((sample.id.as_str(), sample.think), ("shell:1", Think::On));
    let missing = RowReader::new("shell").media_in(place.path("none")).sample(json!({"prompt": "Q"}));
    assert!(matches!(missing, Err(RowProblem::Io(_))));
}

#[test]
fn empty_and_unknown_files_are_errors_of_the_dataset() {
    let place = Place::new();
    for (name, text, expected) in [
        ("e.jsonl", "", "the dataset is empty"),
        ("e.json", "[]", "the dataset is empty"),
        ("e.csv", "a,b\n", "the dataset is empty"),
        ("e.parquet", "PAR1", "unknown dataset format"),
        ("e.json", "{\n  \"data\": [", "several lines"),
    ] {
        let spec = place.spec(name, text);
        let message = told(&Dataset::open(&[spec], &ReadOptions::default()).err().unwrap());
        assert!(message.contains(expected) && message.contains(name), "{message}");
    }
}

mod arbitrary {
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    use super::Place;

    /// One folder for all cases; the two tests write different files.
    static PLACE: LazyLock<Place> = LazyLock::new(Place::new);

    /// JSON built of the words that rows are made of, so that most branches are reached.
    fn value() -> impl Strategy<Value = Value> {
        let text = prop::sample::select(vec![
            "",
            "human",
            "gpt",
            "user",
            "assistant",
            "system",
            "text",
            "image",
            "video",
            "audio",
            "<image>",
            "a <video> b",
            "a.png",
            "../a.png",
            "/etc/passwd",
            "f",
            "clip.mp4",
            "https://x/y",
            "data:x",
            "\0",
            "é\u{202e}",
        ]);
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(|number| json!(number)),
            text.prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(5, 48, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((key(), inner), 0..6)
                    .prop_map(|pairs| Value::from(Map::from_iter(pairs))),
            ]
        })
    }

    fn key() -> impl Strategy<Value = String> {
        let known = prop::sample::select(vec![
            "conversations",
            "messages",
            "prompt",
            "question",
            "from",
            "value",
            "role",
            "content",
            "type",
            "text",
            "image",
            "images",
            "video",
            "videos",
            "audio",
            "path",
            "url",
            "bytes",
            "image_url",
            "fps",
            "nframes",
            "min_frames",
            "max_frames",
            "min_pixels",
            "max_pixels",
            "video_start",
            "video_end",
            "resized_height",
            "meta",
            "frame_cnts",
            "dynamic_sample",
            "solution",
            "answer",
            "id",
            "completion",
            "completions",
            "completion_ids",
            "logprobs",
            "rewards",
        ]);
        prop_oneof![20 => known.prop_map(str::to_owned), 1 => any::<String>()]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
        #[test]
        fn rows_of_any_json_are_a_sample_or_an_error(pairs in prop::collection::vec((key(), value()), 0..8)) {
                let row = Value::from(Map::from_iter(pairs));
            if let Ok(sample) = PLACE.read_with(&row, &Default::default()) {
                prop_assert_eq!(sample.turns.last().map(|turn| turn.role), Some(super::Role::User));
                let mentioned = sample.turns.iter().flat_map(|turn| &turn.parts)
                    .filter(|part| matches!(part, super::Part::Medium { .. })).count();
                prop_assert_eq!(mentioned, sample.media.len());
            }
        }

        #[test]
        fn files_of_any_bytes_are_rows_or_an_error(bytes in prop::collection::vec(prop_oneof![
            prop::sample::select(b"[]{},\":\\\n\r 1a".to_vec()), any::<u8>()], 0..200), array in any::<bool>()) {
            let mut content = if array { b"[".to_vec() } else { b"{".to_vec() };
            content.extend(bytes);
            std::fs::write(PLACE.path("x.json"), content).unwrap();
            let spec = super::DatasetSpec::file(PLACE.path("x.json"));
            if let Ok(dataset) = super::Dataset::open(&[spec], &Default::default()) {
                for row in 0..dataset.len() {
                    let _ = dataset.get(row);
                }
            }
        }
    }
}
