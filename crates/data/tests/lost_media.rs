//! Rows whose media, choices or system turn stand where a reader could overlook them.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use omnigrpo_data::{
    ColumnNames, Dataset, DatasetSpec, MediumKind, MediumSource, ReadOptions, Role, RowReader, Sample,
};
use omnigrpo_guard::told;
use serde_json::{Value, json};

fn place() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.png", "b.png", "clip.mp4", "sound.wav"] {
        std::fs::write(folder.path().join(name), "x").unwrap();
    }
    folder
}

fn reader(folder: &Path, columns: ColumnNames) -> RowReader {
    let cache_dir = Some(folder.join("cache"));
    let options = ReadOptions { cache_dir, columns, ..ReadOptions::default() };
    RowReader::new("rows").media_in(folder).options(options)
}

fn read(folder: &Path, row: Value) -> Sample {
    reader(folder, ColumnNames::default()).sample(row).unwrap()
}

fn error(folder: &Path, row: Value) -> String {
    told(&reader(folder, ColumnNames::default()).sample(row).unwrap_err())
}

fn kinds(sample: &Sample) -> Vec<MediumKind> {
    sample.media.iter().map(|medium| medium.kind).collect()
}

#[test]
fn rows_of_video_r1_have_their_medium_and_their_choices() {
    let place = place();
    let row = |path: &str, kind: &str| {
        json!({
            "problem_id": 2, "problem": "What does he do?", "data_type": kind, "problem_type": "multiple choice",
            "options": ["A. sit", "B. run"], "solution": "<answer>A</answer>", "path": path,
        })
    };
    let clip = read(place.path(), row("./clip.mp4", "video"));
    assert_eq!(kinds(&clip), [MediumKind::Video]);
    assert_eq!(clip.question(), "What does he do?\nOptions:\nA. sit\nB. run");
    assert_eq!(kinds(&read(place.path(), row("a.png", "image"))), [MediumKind::Image]);
    // Without `data_type` nothing tells the kind, so nothing is read.
    let mut plain = row("a.png", "image");
    plain.as_object_mut().unwrap().remove("data_type");
    assert_eq!(kinds(&read(place.path(), plain)), []);
}

#[test]
fn conversations_in_json_text_are_parsed_or_are_bad_rows() {
    let place = place();
    let messages = json!([{ "role": "user", "content": [{ "type": "image", "image": "a.png" }, { "type": "text", "text": "Angle?" }] }]);
    for (column, text) in [
        ("prompt", messages.to_string()),
        ("messages", messages.to_string()),
        ("problem", format!("\n {messages} ")),
        ("conversations", json!([{ "from": "human", "value": "<image>Angle?" }]).to_string()),
    ] {
        let mut row = json!({ "answer": "B" });
        row[column] = text.into();
        if column == "conversations" {
            row["images"] = "[\"a.png\"]".into();
        }
        let sample = read(place.path(), row);
        assert_eq!(
            (kinds(&sample), sample.question().as_str()),
            (vec![MediumKind::Image], "Angle?"),
            "{column}"
        );
    }
    let parts = json!([{ "role": "user", "content": messages[0]["content"].to_string() }]);
    assert_eq!(kinds(&read(place.path(), json!({ "prompt": parts }))), [MediumKind::Image]);
    // Other JSON is a text.
    for text in ["[1, 2, 3]", "[{\"name\": 1}]", "[{\"role\": \"admin\"}] Explain this.", "{\"a\": 1}"] {
        assert_eq!(read(place.path(), json!({ "prompt": text })).question(), text);
    }
    for text in ["[{'role': 'user', 'content': 'x'}]", "[{\"role\": \"user\", \"content\": \"x]"] {
        let message = error(place.path(), json!({ "prompt": text }));
        assert!(message.contains("column `prompt`") && message.contains("as JSON in a text"), "{message}");
    }
    let message = error(place.path(), json!({ "prompt": "[{\"role\": \"nobody\"}]" }));
    assert!(message.contains("prompt[0]"), "{message}");
}

#[test]
fn a_system_key_is_the_system_turn_of_a_row_without_one() {
    let place = place();
    let roles = |row: Value| -> Vec<(Role, String)> {
        read(place.path(), row).turns.iter().map(|turn| (turn.role, turn.written())).collect()
    };
    assert_eq!(
        roles(json!({ "system": "Be brief.", "question": "Q" })),
        [(Role::System, "Be brief.".to_owned()), (Role::User, "Q".to_owned())]
    );
    let own = json!([{ "role": "system", "content": "mine" }, { "role": "user", "content": "Q" }]);
    assert_eq!(roles(json!({ "system": "other", "messages": own }))[0], (Role::System, "mine".to_owned()));
    assert!(error(place.path(), json!({ "system": 3, "question": "Q" })).contains("column `system`"));
}

#[test]
fn media_in_base64_are_read_with_and_without_an_address() {
    let place = place();
    let bytes = |n: u8| [&b"\x89PNG\r\n\x1a\n"[..], &[n; 60]].concat();
    let (one, two) = (STANDARD.encode(bytes(1)), STANDARD.encode(bytes(2)));
    let lines = one.as_bytes().chunks(40).map(|line| std::str::from_utf8(line).unwrap()).collect::<Vec<_>>();
    for text in [one.clone(), lines.join("\n"), format!("data:image/png;base64,{one}")] {
        let sample = read(place.path(), json!({ "prompt": "Q", "image": text }));
        let MediumSource::Path(path) = &sample.media[0].source else { panic!() };
        assert_eq!(std::fs::read(path).unwrap(), bytes(1));
    }
    let frames = format!("data:video/jpeg;base64,{one},{two}");
    let sample = read(place.path(), json!({ "prompt": "<video>Q", "video": frames }));
    let MediumSource::Frames(frames) = &sample.media[0].source else { panic!() };
    assert_eq!(
        frames.iter().map(|path| std::fs::read(path).unwrap()).collect::<Vec<_>>(),
        [bytes(1), bytes(2)]
    );
    // Errors are short whatever the value.
    let without = RowReader::new("rows").media_in(place.path());
    for (row, expected) in [
        (json!({ "prompt": "Q", "image": format!("{one}{}=x", "A".repeat(5000)) }), "broken base64"),
        (json!({ "prompt": "Q", "image": "long/".repeat(300) }), "does not exist"),
    ] {
        let message = error(place.path(), row);
        assert!(message.contains(expected) && message.len() < 600, "{message}");
    }
    let message = told(&without.sample(json!({ "prompt": "Q", "image": one })).unwrap_err());
    assert!(message.contains("a medium in base64") && message.len() < 400, "{message}");
}

#[test]
fn columns_that_look_like_media_and_are_not_read_are_found() {
    let place = place();
    let unread = |rows: Vec<Value>, columns: ColumnNames| -> Vec<(String, String, u64, u64)> {
        let dataset = reader(place.path(), columns).dataset(rows).unwrap();
        let found = dataset.unread_media().into_iter();
        found.map(|one| (one.column, one.setting.to_string(), one.rows, one.lost)).collect()
    };
    let none = ColumnNames::default;
    let one = |column: &str, setting: &str, rows, lost| (column.to_owned(), setting.to_owned(), rows, lost);
    let row = |name: &str, value: Value| json!({ "question": "Q", "answer": "a.png", name: value });
    for (name, value, column, setting) in [
        ("path", json!("clip.mp4"), "path", "ColumnNames::video"),
        ("picture", json!(["a.png", "b.png"]), "picture", "ColumnNames::image"),
        ("speech", json!({ "path": "sound.wav", "bytes": null }), "speech", "ColumnNames::audio"),
        ("views", json!({ "front": "a.png" }), "views.front", "ColumnNames::image"),
        (
            "chat",
            json!([{ "role": "user", "content": [{ "type": "video", "video": "x" }] }]),
            "chat",
            "ColumnNames::prompt",
        ),
        ("image_urls", json!("[\"https://host/a.jpg?x=1\"]"), "image_urls", "ColumnNames::image"),
        ("options", json!(["a.png", "b.png"]), "options", "ColumnNames::image"),
        (
            "messages_2",
            json!("[{\"role\": \"user\", \"content\": [{\"type\": \"image\"}]}]"),
            "messages_2",
            "ColumnNames::prompt",
        ),
    ] {
        assert_eq!(unread(vec![row(name, value)], none()), [one(column, setting, 1, 1)], "{name}");
    }
    // Columns that are read, and texts that only mention a file.
    for (name, value) in [
        ("image", json!("a.png")),
        ("videos", json!(["clip.mp4"])),
        ("completion", json!("b.png")),
        ("solution", json!("b.png")),
        ("hint", json!("look at the file a.png")),
    ] {
        assert_eq!(unread(vec![row(name, value)], none()), [], "{name}");
    }
    let named = ColumnNames { image: Some("picture".to_owned()), ..none() };
    assert_eq!(unread(vec![row("picture", json!("a.png"))], named.clone()), []);
    let both = json!({ "question": "Q", "picture": "a.png", "image": "b.png" });
    assert_eq!(unread(vec![both.clone()], named), [one("image", "ColumnNames::image", 1, 0)]);
    // A second copy of a picture that is read loses nothing.
    assert_eq!(unread(vec![both], none()), [one("picture", "ColumnNames::image", 1, 0)]);
    let rows =
        (0..300).map(|n| if n % 20 == 0 { row("path", json!("a.png")) } else { row("path", json!("-")) });
    let dataset = reader(place.path(), none()).dataset(rows).unwrap();
    let found = dataset.unread_media();
    assert!(found[0].sampled == 256 && found[0].rows > 5 && !found[0].is_usual(), "{found:?}");
    assert!(dataset.is_text_only());
    let missing =
        reader(place.path(), none()).dataset([json!({ "question": "Q", "image": "gone.png" })]).unwrap();
    assert!(!missing.is_text_only());
}

#[test]
fn one_column_may_have_media_of_two_kinds() {
    let place = place();
    let shared = || Some("file".to_owned());
    let columns = ColumnNames { image: shared(), video: shared(), ..ColumnNames::default() };
    let read = |value: Value| {
        kinds(
            &reader(place.path(), columns.clone()).sample(json!({ "question": "Q", "file": value })).unwrap(),
        )
    };
    assert_eq!(read(json!("a.png")), [MediumKind::Image]);
    assert_eq!(read(json!("clip.mp4")), [MediumKind::Video]);
    assert_eq!(
        read(json!(["a.png", "clip.mp4", "b.png"])),
        [MediumKind::Image, MediumKind::Image, MediumKind::Video]
    );
}

#[test]
fn a_row_for_another_folder_has_absolute_paths_also_in_json_text() {
    let place = place();
    let messages =
        json!([{ "role": "user", "content": [{ "type": "image", "image": "b.png" }] }]).to_string();
    let row = json!({ "prompt": messages, "videos": "[\"clip.mp4\"]", "answer": "x" });
    let dataset = reader(place.path(), ColumnNames::default()).dataset([row]).unwrap();
    let moved = Value::Object(dataset.portable_row(&dataset.get(0).unwrap()));
    let full = |name: &str| place.path().canonicalize().unwrap().join(name).display().to_string();
    assert_eq!(moved["prompt"][0]["content"][0]["image"], full("b.png"));
    assert_eq!(moved["videos"], json!([full("clip.mp4")]));
    let typed = json!({ "problem": "Q", "path": "clip.mp4", "data_type": "video" });
    let dataset = reader(place.path(), ColumnNames::default()).dataset([typed]).unwrap();
    assert_eq!(dataset.portable_row(&dataset.get(0).unwrap())["path"], full("clip.mp4"));
}

#[test]
fn numbers_of_python_and_objects_over_several_lines_are_named() {
    let place = place();
    let open = |name: &str, text: &str| {
        std::fs::write(place.path().join(name), text).unwrap();
        Dataset::open(&[DatasetSpec::file(place.path().join(name))], &ReadOptions::default())
    };
    for (value, word) in
        [("NaN", "NaN"), ("[1, Infinity]", "Infinity"), ("-Infinity", "-Infinity"), ("{\"a\":NaN}", "NaN")]
    {
        let dataset = open("n.jsonl", &format!("{{\"question\": \"NaN\", \"score\": {value}}}\n")).unwrap();
        let message = told(&dataset.get(0).unwrap_err());
        assert!(message.contains(&format!("got {word}, which JSON does not have")), "{message}");
    }
    let dataset = open("b.jsonl", "{\"question\": nil}\n").unwrap();
    assert!(told(&dataset.get(0).unwrap_err()).contains("expected"));
    let indented = serde_json::to_string_pretty(&json!({ "question": "Q", "answer": "x" })).unwrap();
    for name in ["i.jsonl", "i.json"] {
        let message = open(name, &format!("{indented}\n{indented}\n")).err().unwrap().to_string();
        assert!(message.contains(":1: got JSON objects over several lines"), "{message}");
    }
    // A first row that is cut off is a bad row.
    let dataset = open("c.jsonl", "{\"question\": \"Q\n{\"question\": \"R\"}\n").unwrap();
    assert!(dataset.get(0).is_err() && dataset.get(1).is_ok());
}
