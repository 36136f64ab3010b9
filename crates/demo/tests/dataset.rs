//! Properties that the recipes and the reader of a report rely on: balanced, held out, read by the project's own readers, scored
//! by its own rewards, the same bytes for the same seed.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::Path;

use image::codecs::gif::GifDecoder;
use image::{AnimationDecoder, ImageReader};
use omnigrpo_data::{Dataset, DatasetSpec, MediumKind, ReadOptions};
use omnigrpo_demo::{DemoError, Sizes, generate};
use omnigrpo_rewards::{RewardInput, RewardOptions, RowKey, Think, build};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

const SMALL: Sizes = Sizes { sft: 80, train: 80, eval: 480 };
const FILES: [&str; 3] = ["sft.jsonl", "train.jsonl", "eval.jsonl"];

fn rows(dir: &Path, file: &str) -> Vec<Map<String, Value>> {
    let text = fs::read_to_string(dir.join(file)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn text<'a>(row: &'a Map<String, Value>, column: &str) -> &'a str {
    row.get(column).and_then(Value::as_str).unwrap_or_default()
}

fn medium(row: &Map<String, Value>) -> &str {
    text(row, if row.contains_key("video") { "video" } else { "image" })
}

/// Pixels of every frame of a file, with its size and, for a clip, each frame's delay in milliseconds.
fn frames(path: &Path) -> Vec<(u32, u32, u32, Vec<u8>)> {
    if path.extension().unwrap() == "gif" {
        let file = std::io::BufReader::new(fs::File::open(path).unwrap());
        let frames = GifDecoder::new(file).unwrap().into_frames().collect_frames().unwrap();
        let rgb = |f: image::Frame| {
            let (num, den) = f.delay().numer_denom_ms();
            let picture = image::DynamicImage::from(f.into_buffer()).to_rgb8();
            (picture.width(), picture.height(), num / den, picture.into_raw())
        };
        frames.into_iter().map(rgb).collect()
    } else {
        let picture = ImageReader::open(path).unwrap().decode().unwrap();
        assert_eq!(picture.color(), image::ColorType::Rgb8);
        vec![(picture.width(), picture.height(), 0, picture.into_rgb8().into_raw())]
    }
}

#[test]
fn no_medium_is_shared_and_every_digest_is_that_of_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("data");
    generate(&dir, 1, SMALL).unwrap();
    let mut files = BTreeSet::new();
    let mut pixels = BTreeSet::new();
    let mut num_rows = 0;
    for file in FILES {
        for row in rows(&dir, file) {
            let path = dir.join(medium(&row));
            let digest: String =
                Sha256::digest(fs::read(&path).unwrap()).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(digest, text(&row, "sha256"));
            let mut hash = Sha256::new();
            for (width, height, _, rgb) in frames(&path) {
                hash.update(width.to_le_bytes());
                hash.update(height.to_le_bytes());
                hash.update(rgb);
            }
            files.insert(medium(&row).to_owned());
            pixels.insert(hash.finalize().to_vec());
            num_rows += 1;
        }
    }
    assert_eq!((files.len(), pixels.len()), (num_rows, num_rows));
    assert_eq!(num_rows, 640);
}

#[test]
fn media_are_small_and_need_no_resizing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("data");
    generate(&dir, 3, Sizes { sft: 0, train: 0, eval: 80 }).unwrap();
    let mut sizes = BTreeSet::new();
    for row in rows(&dir, "eval.jsonl") {
        let frames = frames(&dir.join(medium(&row)));
        for &(width, height, delay_ms, _) in &frames {
            assert!([56, 84].contains(&width) && [56, 84].contains(&height));
            sizes.insert((width, height));
            if row.contains_key("video") {
                assert_eq!((width, height, delay_ms, frames.len()), (56, 56, 500, 4));
                assert_eq!(
                    (row["min_pixels"].as_u64(), row["max_pixels"].as_u64()),
                    (Some(3136), Some(3136))
                );
            } else {
                assert_eq!(frames.len(), 1);
            }
        }
        if row.contains_key("video") {
            assert!(frames.windows(2).all(|pair| pair[0].3 != pair[1].3), "the shape moves");
        }
    }
    assert_eq!(sizes.len(), 4);
}

#[test]
fn the_best_constant_answer_of_each_type_is_near_chance() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("data");
    generate(&dir, 1, SMALL).unwrap();
    for file in FILES {
        if file == "sft.jsonl" {
            // The forms of direction alternate in fours, which so few rows do not fill.
            continue;
        }
        let mut answers: BTreeMap<String, HashMap<String, usize>> = BTreeMap::new();
        for row in rows(&dir, file) {
            let word = text(&row, "answer").to_owned();
            *answers.entry(text(&row, "type").to_owned()).or_default().entry(word).or_default() += 1;
        }
        assert_eq!(answers.len(), 5);
        for (kind, counts) in answers {
            let total: usize = counts.values().sum();
            let best = *counts.values().max().unwrap();
            // A word serves both forms, a letter only choices. Turns of the forms need not end with the file.
            let words = if kind == "colour" { 8 } else { 4 };
            assert_eq!(counts.len(), words);
            assert!(best <= total / words + 2, "{file} {kind}: {best} of {total}");
        }
    }
}

#[test]
fn permuting_media_leaves_the_questions_and_makes_looking_worthless() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("data");
    generate(&dir, 1, SMALL).unwrap();
    let (own, other) = (rows(&dir, "eval.jsonl"), rows(&dir, "eval_permuted.jsonl"));
    assert_eq!(own.len(), other.len());
    let seen: HashMap<&str, &str> = own.iter().map(|row| (medium(row), text(row, "answer"))).collect();
    let mut agreeing: BTreeMap<&str, usize> = BTreeMap::new();
    for (own, other) in own.iter().zip(&other) {
        for column in ["id", "conversations", "solution", "type", "form", "answer"] {
            assert_eq!(own[column], other[column]);
        }
        assert_ne!(medium(own), medium(other));
        let shown = seen[medium(other)];
        *agreeing.entry(text(own, "type")).or_default() += usize::from(shown == text(own, "answer"));
    }
    let media: BTreeSet<&str> = other.iter().map(medium).collect();
    assert_eq!(media.len(), own.len(), "each medium is used once");
    for (kind, num) in agreeing {
        // Four standard deviations around chance for 96 questions.
        let chance: f64 = if kind == "colour" { 1.0 / 8.0 } else { 1.0 / 4.0 };
        let spread = 4.0 * (96.0 * chance * (1.0 - chance)).sqrt();
        assert!((num as f64 - 96.0 * chance).abs() < spread, "{kind}: {num}");
    }
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_seed_other_pictures() {
    let dir = tempfile::tempdir().unwrap();
    let sizes = Sizes { sft: 40, train: 40, eval: 40 };
    let one = generate(&dir.path().join("one"), 7, sizes).unwrap();
    let two = generate(&dir.path().join("two"), 7, sizes).unwrap();
    let three = generate(&dir.path().join("three"), 8, sizes).unwrap();
    assert_eq!(one, two);
    for (file, digest) in &one.sha256 {
        assert_ne!(digest, &three.sha256[file]);
    }
    // Rows pin their media (see above); sizes of other splits do not change a split.
    let alone = generate(&dir.path().join("alone"), 7, Sizes { sft: 0, train: 40, eval: 0 }).unwrap();
    assert_eq!(alone.sha256["train.jsonl"], one.sha256["train.jsonl"]);
}

#[test]
fn a_finished_dataset_is_kept_and_anything_else_is_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let sizes = Sizes { sft: 10, train: 10, eval: 10 };
    let first = generate(&data, 7, sizes).unwrap();
    let marker = data.join("media/eval/marker");
    fs::write(&marker, "kept").unwrap();
    assert_eq!(generate(&data, 7, sizes).unwrap(), first);
    assert!(marker.exists());
    let error = generate(&data, 8, sizes).unwrap_err();
    assert!(matches!(error, DemoError::Occupied { .. }));
    assert!(error.to_string().contains("of seed 7") && error.to_string().contains("of seed 8"), "{error}");

    let mine = dir.path().join("mine");
    fs::create_dir(&mine).unwrap();
    fs::write(mine.join("thesis.txt"), "a year's work").unwrap();
    assert!(matches!(generate(&mine, 7, sizes), Err(DemoError::Occupied { .. })));
    assert!(mine.join("thesis.txt").exists());

    // Files of an interrupted run are replaced.
    let partial = dir.path().join("next.partial");
    fs::create_dir_all(&partial).unwrap();
    fs::write(partial.join("sft.jsonl"), "half").unwrap();
    generate(&dir.path().join("next"), 7, sizes).unwrap();
    assert!(!partial.exists());
}

#[test]
fn the_projects_reader_takes_every_row() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("data");
    generate(&dir, 1, SMALL).unwrap();
    for file in FILES.into_iter().chain(["eval_permuted.jsonl"]) {
        let spec = DatasetSpec::file(dir.join(file));
        let dataset = Dataset::open(&[spec], &ReadOptions::default()).unwrap();
        let mut num_clips = 0;
        for row in 0..dataset.len() {
            let sample = dataset.get(row).unwrap();
            assert_eq!(sample.media.len(), 1);
            num_clips += u64::from(sample.media[0].kind == MediumKind::Video);
        }
        assert_eq!(num_clips * 5, dataset.len());
    }
}

#[test]
fn the_completion_given_earns_everything_and_other_replies_only_the_format() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("data");
    generate(&dir, 1, Sizes { sft: 0, train: 80, eval: 0 }).unwrap();
    let rewards = build(&["accuracy".to_owned(), "format".to_owned()], &RewardOptions::default()).unwrap();
    let score = |row: &Map<String, Value>, completion: &str| {
        let prompt = row["conversations"][0]["value"].as_str().unwrap().split_once('\n').unwrap().1;
        let input = RewardInput {
            prompt,
            turns: &[],
            completion,
            completion_ids: &[],
            solution: Some(text(row, "solution")),
            columns: row,
            think: Think::On,
            media_paths: &[],
            media: &[],
            key: RowKey { seed: 0, step: 0, row: 0, sample: 0 },
            truncated: false,
            added_turns: 0,
            is_text: false,
        };
        let scores = rewards.score(&[input]).unwrap();
        (scores.values[0][0].unwrap(), scores.values[1][0].unwrap())
    };
    let words = ["red", "left", "up", "top", "cross", "circle", "A", "B", "C", "D", "1", "2", "3", "4"];
    for row in rows(&dir, "train.jsonl") {
        let gold = row["conversations"][1]["value"].as_str().unwrap();
        assert_eq!(score(&row, gold), (1.0, 1.0));
        let right = text(&row, "solution").replace("<answer>", "").replace("</answer>", "");
        for word in words {
            // The text of the right option is as good as its letter.
            let full = f64::from(word == text(&row, "answer") || right.starts_with(&format!("({word})")));
            let completion = format!("<think>{word}</think><answer>{word}</answer>");
            assert_eq!(score(&row, &completion), (full, 1.0), "{row:?} {word}");
        }
        assert_eq!(score(&row, text(&row, "answer")).1, 0.0);
    }
}

#[test]
fn fine_tuning_shows_choices_answered_and_short_answers_guessed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("data");
    generate(&dir, 1, Sizes { sft: 1600, train: 0, eval: 0 }).unwrap();
    let mut num_right = 0;
    for row in rows(&dir, "sft.jsonl") {
        let completion = row["conversations"][1]["value"].as_str().unwrap();
        let word = text(&row, "answer");
        let right = completion == format!("<think>{word}</think><answer>{word}</answer>");
        if text(&row, "form") == "choice" {
            assert!(right);
        } else {
            num_right += usize::from(right);
        }
    }
    // 80 of each kind of short answer; a guess is right one time in four, of colours one in eight: 90 ± 4 × 8.2.
    assert!((57..=123).contains(&num_right), "{num_right}");
}
