//! Bad input: a clear error, exit code 2 for usage and 1 for failure, nothing half-written.

use std::fs;

use crate::support::{Place, ROWS, last_tensor};
use serde_json::json;

const TRAIN: &str = "train --model M --threads 1 --num_generations 2 --gradient_accumulation_steps 1 --max_steps 2 --max_completion_length 4 --output_dir run";
const IMAGE_TAIL: &str = r#""problem": "<image>\nWhich?", "solution": "x", "completions": ["y"]}"#;

/// Good rows, and a bad one with the id "bad" in second place.
fn with(place: &Place, bad: &str) {
    let rows: Vec<&str> = ROWS.lines().collect();
    place.write("with.jsonl", [rows[0], bad, rows[1], rows[2]].join("\n"));
    place.write("only.jsonl", format!("{bad}\n"));
}

/// A bad row is found before training: it is skipped and counted if tolerated, else the run does not start.
fn bad_row(bad: &str, reason: &[&str]) {
    let place = Place::new();
    with(&place, bad);
    let parts = [
        &["too many rows cannot be used", "got: 1 of 4 rows", "--max_skipped", "with.jsonl:2 (--row 1)"],
        reason,
    ]
    .concat();
    place.run(&format!("{TRAIN} --train_file with.jsonl")).fails(1, &parts);
    assert_eq!(place.names("run"), [".cache", ".lock", "log.txt"], "nothing half-written");
    place
        .run(&format!("{TRAIN} --train_file with.jsonl --strict_media"))
        .fails(1, &["none, with --strict_media"]);
    let ran = place.run(&format!("{TRAIN} --train_file with.jsonl --max_skipped 50%")).ok();
    assert!(ran.stderr.contains("training on 3 of 4 rows"), "{}", ran.stderr);
    let skipped = place.lines("run/skipped.jsonl");
    assert_eq!(skipped.len(), 1);
    assert_eq!(skipped[0]["id"], "bad");
    for part in reason {
        assert!(skipped[0]["reason"].as_str().unwrap().contains(part), "{}", skipped[0]);
    }
    for row in place.lines("run/metrics.jsonl") {
        assert_eq!(row["data/skipped"], 1.0);
    }
    place.run("data check --model M --train_file with.jsonl").fails(1, &["1 of 4 rows cannot be used"]);
    place
        .run(&format!("{TRAIN} --train_file only.jsonl --max_skipped 1.0 --resume_from_checkpoint never"))
        .fails(1, &["no usable training row"]);

    // Commands that answer row by row report the error in the row's place.
    place.run("score --model M --input with.jsonl --output scored.jsonl").fails(1, &["4 of 4 rows failed"]);
    place
        .run("generate --model M --input with.jsonl --output made.jsonl --max_completion_length 2")
        .fails(1, &["1 of 4 rows failed"]);
    for file in ["scored.jsonl", "made.jsonl"] {
        let line = &place.lines(file)[1];
        assert_eq!(line["id"], "bad");
        for part in reason {
            assert!(line["error"].as_str().unwrap().contains(part), "{line}");
        }
    }
    assert_eq!(place.lines("made.jsonl").iter().filter(|line| line.get("completions").is_some()).count(), 3);
    place
        .run("eval --model M --eval_file with.jsonl --max_completion_length 2")
        .fails(1, &["1 of 4 rows could not be evaluated", "skipped row 1 (id bad)"]);
    place.run("eval --model M --eval_file with.jsonl --max_completion_length 2 --max_skipped 0.25").ok();
}

#[test]
fn a_missing_image() {
    bad_row(
        &format!(r#"{{"id": "bad", "image": "gone.png", {IMAGE_TAIL}"#),
        &["image `gone.png` cannot be used: the file does not exist; paths tried: "],
    );
}

#[test]
fn a_wrong_number_of_placeholders() {
    bad_row(
        r#"{"id": "bad", "image": "shapes.png", "problem": "<image> and <image>", "solution": "x", "completions": ["y"]}"#,
        &["2 <image> placeholder(s)", "1 image file(s)", "write one <image> per file"],
    );
}

#[test]
fn a_path_that_leaves_its_root() {
    bad_row(
        &format!(r#"{{"id": "bad", "image": "../../../etc/hostname", {IMAGE_TAIL}"#),
        &["`../../../etc/hostname` cannot be used: the path leaves its root", "--image_folders"],
    );
}

#[test]
fn a_row_of_no_known_format() {
    bad_row(
        r#"{"id": "bad", "what": "ever"}"#,
        &[
            "unknown row format: got columns [id, what], expected one of conversations, messages, prompt",
            "--question asks one question of all rows that have none",
        ],
    );
}

#[test]
fn a_picture_that_is_no_picture() {
    let place = Place::new();
    place.write("bad.png", "this is a text");
    with(&place, &format!(r#"{{"id": "bad", "image": "bad.png", {IMAGE_TAIL}"#));
    place.run(&format!("{TRAIN} --train_file with.jsonl")).fails(1, &["1 of 4 rows", "bad.png"]);
}

/// The header is complete, so only decoding finds the damage.
#[test]
fn a_truncated_picture() {
    let place = Place::new();
    let whole = place.bytes("shapes.png");
    place.write("cut.png", &whole[..60]);
    with(&place, &format!(r#"{{"id": "bad", "image": "cut.png", {IMAGE_TAIL}"#));
    let reason = ["cut.png: cannot decode", "which is damaged or incomplete; replace it"];
    let four = TRAIN.replace("--max_steps 2", "--max_steps 4");
    let over = place.run(&format!("{four} --train_file with.jsonl")).fails(1, &reason);
    assert!(over.stderr.contains("1 of 4 rows cannot be used, more than --max_skipped"), "{}", over.stderr);
    assert!(!place.exists("run/model.safetensors"));
    assert_eq!(place.lines("run/skipped.jsonl")[0]["id"], "bad");
    place
        .run(&format!("{four} --train_file with.jsonl --strict_media"))
        .fails(1, &["row 1 (bad) cannot be used"]);
    // Another row replaces it: every step has its prompt, and the replacement is counted.
    place.run(&format!("{four} --train_file with.jsonl --max_skipped 0.5")).ok();
    let steps = place.lines("run/metrics.jsonl");
    assert_eq!(steps.len(), 4);
    assert_eq!(steps[3]["data/skipped"], 1.0);
    assert!(place.lines("run/rollouts/step-000004.jsonl").iter().all(|line| line["id"] != "bad"));
    place.run("generate --model M --input only.jsonl --output o.jsonl").fails(1, &["1 of 1 rows failed"]);
    assert!(place.lines("o.jsonl")[0]["error"].as_str().unwrap().contains("cannot decode"));
    place.run_with("generate --model M --image cut.png", &["--prompt", "What?"]).fails(1, &reason);
}

#[test]
#[ignore = "needs ffmpeg"]
fn a_truncated_video_that_ffmpeg_cannot_read() {
    let place = Place::new();
    let made = std::process::Command::new("ffmpeg")
        .args([
            "-v",
            "error",
            "-f",
            "lavfi",
            "-i",
            "testsrc=size=64x64:rate=8:duration=4",
            "-pix_fmt",
            "yuv420p",
            "whole.mp4",
        ])
        .current_dir(place.path(""))
        .status();
    assert!(made.unwrap().success());
    let whole = place.bytes("whole.mp4");
    place.write("cut.mp4", &whole[..whole.len() / 3]);
    with(&place, r#"{"id": "bad", "video": "cut.mp4", "problem": "<video>What?", "solution": "x"}"#);
    place.run(&format!("{TRAIN} --train_file with.jsonl")).fails(1, &["1 of 4 rows", "cut.mp4"]);
    place.run("generate --model M --input only.jsonl --output o.jsonl").fails(1, &["1 of 1 rows failed"]);
    assert!(place.lines("o.jsonl")[0]["error"].as_str().unwrap().contains("cut.mp4"));
}

/// A row that names an unknown rule of comparison is a bad row in every command.
#[test]
fn a_row_that_the_rewards_cannot_score() {
    let place = Place::new();
    let bad = r#"{"id": "bad", "problem": "Which?", "solution": "x", "accu_reward_method": "bogus"}"#;
    with(&place, bad);
    let reason = "column `accu_reward_method`: accuracy_mode: unknown value `bogus`";
    place.run("data check --model M --train_file with.jsonl").fails(1, &["1 of 4 rows cannot be used"]);
    let check = place.run("data check --model M --train_file with.jsonl");
    assert!(check.stdout.contains(":2 (--row 1): ") && check.stdout.contains(reason), "{}", check.stdout);
    place.run(&format!("{TRAIN} --train_file with.jsonl")).fails(1, &["too many rows", reason]);
    let long = TRAIN.replace("--max_steps 2", "--max_steps 6");
    let skipped = |dir: &str| {
        let rows = place.lines(&format!("{dir}/skipped.jsonl"));
        rows.iter()
            .map(|row| (row["id"].clone(), row["reason"].as_str().unwrap().contains(reason)))
            .collect::<Vec<_>>()
    };
    place.run(&format!("{long} --train_file with.jsonl --max_skipped 50%")).ok();
    assert_eq!(skipped("run"), [(json!("bad"), true)]);
    // Without the check it is found when it is drawn, and another row replaces it.
    place
        .run(&format!(
            "{} --train_file with.jsonl --max_skipped 50% --skip_data_check",
            long.replace("dir run", "dir late")
        ))
        .ok();
    assert_eq!(skipped("late"), [(json!("bad"), true)]);
    assert_eq!(place.lines("late/metrics.jsonl").len(), 6);
    assert!(place.lines("late/skipped.jsonl")[0]["replaced_by"].is_string());
    // In evaluations.
    let line = format!(
        "{} --train_file rows.jsonl --eval_file with.jsonl --eval_steps 1",
        TRAIN.replace("dir run", "dir eval")
    );
    let ran = place.run(&line).ok();
    assert!(
        ran.stderr.contains("evaluations will skip row 1 (bad): reward `accuracy`: column"),
        "{}",
        ran.stderr
    );
    assert_eq!(skipped("eval"), vec![(json!("bad"), true); 2]);
    assert_eq!(place.lines("eval/eval/step-000002.jsonl").len(), 3);
    let line = "eval --model M --eval_file with.jsonl --max_completion_length 2";
    place.run(line).fails(1, &["1 of 4 rows could not be evaluated", "skipped row 1 (id bad)"]);
    place.run(&format!("{line} --max_skipped 0.25")).ok();
}

/// Nothing is sampled for a reward without a ground truth to compare with.
#[test]
fn a_ground_truth_in_a_column_of_another_name() {
    let place = Place::new();
    let rows: String = (0..8).map(|i| format!("{{\"problem\": \"{i}?\", \"gt\": \"{i}\"}}\n")).collect();
    place.write("gt.jsonl", &rows);
    let parts = [
        "the reward `accuracy` applies to no row",
        "8 rows with the columns problem, gt",
        "if it is in `gt`, add `--solution_column gt`",
    ];
    // The rows are all text.
    let train = format!("{TRAIN} --allow_text_only");
    place.run(&format!("{train} --train_file gt.jsonl")).fails(1, &parts);
    place.run(&format!("{train} --train_file gt.jsonl --skip_data_check")).fails(1, &parts);
    assert!(!place.exists("run/rollouts"));
    place.run("eval --model M --eval_file gt.jsonl --max_completion_length 2").fails(1, &parts);
    let check = place.run("data check --model M --train_file gt.jsonl --allow_text_only").ok().stdout;
    assert!(parts.iter().all(|part| check.contains(part)), "{check}");
    // Without the reward, or with some rows that it can read.
    let format = place.run(&format!("{train} --train_file gt.jsonl --reward_funcs format")).ok();
    assert!(
        format.stderr.contains("no question asks for the tags that the reward `format` wants"),
        "{}",
        format.stderr
    );
    place.write("some.jsonl", format!("{rows}{{\"problem\": \"1?\", \"solution\": \"1\"}}\n"));
    let some = place
        .run(&format!(
            "{train} --train_file some.jsonl --question_template default --resume_from_checkpoint never"
        ))
        .ok();
    assert!(some.stderr.contains("the reward `accuracy` does not apply to 8 of 9 rows"), "{}", some.stderr);
    assert!(!some.stderr.contains("no question asks"), "{}", some.stderr);
    // A reward that needs another kind of truth.
    place
        .run(&format!("{TRAIN} --train_file rows.jsonl --reward_funcs iou --resume_from_checkpoint never"))
        .fails(
            1,
            &["the reward `iou` applies to no row", "3 rows with a ground truth that the reward cannot read"],
        );
}

/// VLM-R1 gives one rule per file, joined by colons.
#[test]
fn a_rule_of_comparison_per_file() {
    let place = Place::new();
    place.write("a.jsonl", r#"{"problem": "1?", "solution": "x", "accu_reward_method": "mcq"}"#);
    place.write("b.jsonl", r#"{"problem": "2?", "solution": "x"}"#);
    let line = format!(
        "{TRAIN} --data_file_paths a.jsonl:b.jsonl --image_folders .:. --reward_funcs accuracy --allow_text_only"
    );
    let ran = place.run(&format!("{line} --reward_method default:map")).ok();
    assert!(
        ran.stderr.contains("`accuracy` does not apply to 1 of 2 rows"),
        "no box for `map`: {}",
        ran.stderr
    );
    let ran = place.run(&format!("{line} --reward_method mcq:default --resume_from_checkpoint never")).ok();
    assert!(place.text("run/config.yaml").contains("accuracy_mode: [mcq, default]"), "{}", ran.stderr);
    place.run(&format!("{line} --reward_method mcq:map:default")).fails(
        2,
        &["`accuracy_mode` and the list of training files have different lengths", "3 rules for 2 files"],
    );
}

/// A prompt over the limit is never truncated, least of all inside a medium.
#[test]
fn a_prompt_over_the_limit() {
    let place = Place::new();
    let line = format!("{TRAIN} --train_file rows.jsonl --max_prompt_length 32");
    place
        .run(&line)
        .fails(1, &["the prompt is too long: got 44 tokens, expected at most 32", "--max_prompt_length"]);
    place.run(&format!("{line} --max_skipped 0.9")).ok();
    let skipped: Vec<_> = place.lines("run/skipped.jsonl").iter().map(|row| row["id"].clone()).collect();
    assert_eq!(skipped, [json!("shapes"), json!("clip")]);
    for step in place.lines("run/metrics.jsonl") {
        assert_eq!(step["data/skipped"], 2.0);
    }
    for step in ["run/rollouts/step-000001.jsonl", "run/rollouts/step-000002.jsonl"] {
        assert!(place.lines(step).iter().all(|line| line["id"] == "sum"));
    }
}

/// The header suffices: no command decodes or resizes media of such a row.
#[test]
fn a_size_that_no_memory_holds() {
    let size = r#""resized_width": 28, "resized_height": 2147483648"#;
    let reason = "size after resizing: got 28x2147483648, expected at most 178956970 pixels";
    let bad = format!(r#"{{"id": "bad", "image": "shapes.png", {size}, {IMAGE_TAIL}"#);
    bad_row(&bad, &[reason]);
    let place = Place::new();
    with(&place, &bad);
    place.run("data show --model M --train_file only.jsonl").fails(1, &[reason]);
    let unchecked = TRAIN.replace("--max_steps 2", "--max_steps 4 --skip_data_check --max_skipped 0.5");
    place.run(&format!("{unchecked} --train_file with.jsonl")).ok();
    assert!(place.lines("run/skipped.jsonl")[0]["reason"].as_str().unwrap().contains(reason));

    // Media of a prompt that is too long are not decoded either. The picture is truncated, which decoding would find.
    let whole = place.bytes("shapes.png");
    place.write("shapes.png", &whole[..60]);
    let pixels = r#""min_pixels": 4000000000, "max_pixels": 4200000000"#;
    for (options, reason) in [(size, reason), (pixels, reason.split(": got").next().unwrap())] {
        place.write("only.jsonl", bad.replace(size, options));
        place.run("data show --model M --train_file only.jsonl").fails(1, &[reason]);
    }
    place.write("only.jsonl", bad.replace(size, r#""min_pixels": 40000000, "max_pixels": 42000000"#));
    place.run("data show --model M --train_file only.jsonl").fails(
        1,
        &[
            "the prompt is too long: got ",
            "the model's positions",
            "lower --max_pixels, or lower --max_completion_length",
        ],
    );
}

/// The advice depends on kind and model: pixels change nothing for tiles, and frames come first for a clip.
#[test]
fn a_prompt_over_the_limit_names_the_settings_that_shorten_it() {
    let place = Place::new();
    let row =
        |medium: &str, tag: &str| format!(r#"{{{medium}, "problem": "<{tag}>Which?", "solution": "x"}}"#);
    place.write("image.jsonl", row(r#""image": "shapes.png""#, "image"));
    place.write("video.jsonl", row(r#""video": "clip.gif""#, "video"));
    place.write("text.jsonl", format!(r#"{{"problem": "{}", "solution": "x"}}"#, "why ".repeat(40)));
    for (model, rows, advice) in [
        ("qwen2_5_vl_tied", "image", "lower --max_pixels, or raise --max_prompt_length"),
        (
            "qwen2_5_vl_tied",
            "video",
            "lower --video_max_frames or --nframes, --video_max_frame_pixels or --total_pixels, or raise",
        ),
        ("qwen2_5_vl_tied", "text", "shorten the text, or raise --max_prompt_length"),
        ("internvl_hf", "image", "never truncated: lower --max_anyres_num, or raise --max_prompt_length"),
        (
            "internvl_hf",
            "video",
            "never truncated: lower --video_max_frames or --nframes, or raise --max_prompt_length",
        ),
        // That family counts a clip as one token.
        ("humanomni", "video", "never truncated: shorten the text, or raise --max_prompt_length"),
    ] {
        let model = crate::support::golden("checkpoints").join(model);
        let line = format!("data check --train_file {rows}.jsonl --max_prompt_length 12 --model");
        let ran = place.run(&format!("{line} {}", model.display()));
        for part in ["the prompt is too long: got ", "at most 12 (--max_prompt_length)", advice] {
            assert!(ran.stdout.contains(part), "`{part}` is not in\n{}", ran.stdout);
        }
        ran.fails(1, &["1 of 1 rows cannot be used"]);
    }
}

/// The model may decide whether a setting has an effect: a user's setting without effect is an error, a preset's is dropped.
#[test]
fn settings_that_a_family_does_not_read() {
    let place = Place::new();
    place.write("one.jsonl", r#"{"image": "shapes.png", "problem": "<image>Which?", "solution": "x"}"#);
    let model = |name: &str| crate::support::golden("checkpoints").join(name).display().to_string();
    let show = |name: &str| format!("data show --train_file one.jsonl --model {}", model(name));
    let humanomni = show("humanomni");
    for (line, flag) in [
        (format!("{humanomni} --max_pixels 12544"), "`max_pixels` has no effect on humanomni"),
        (format!("{humanomni} --min_pixels 3136"), "`min_pixels` has no effect on humanomni"),
        (format!("{humanomni} --fps 1"), "`fps` has no effect on humanomni"),
        (format!("{humanomni} --video_min_frames 2"), "`video_min_frames` has no effect on humanomni"),
        (format!("{humanomni} --video_max_frames 9"), "`video_max_frames` has no effect on humanomni"),
        (
            format!("{humanomni} --video_max_frame_pixels 784"),
            "`video_max_frame_pixels` has no effect on humanomni",
        ),
        (
            format!("{humanomni} --video_min_frame_pixels 784"),
            "`video_min_frame_pixels` has no effect on humanomni",
        ),
        (format!("{humanomni} --total_pixels 7840"), "`total_pixels` has no effect on humanomni"),
        (
            format!("{humanomni} --frame_sampling base_interval"),
            "`frame_sampling` has no effect on humanomni",
        ),
        (format!("{} --max_pixels 12544", show("internvl_hf")), "`max_pixels` has no effect on internvl_hf"),
        (
            format!("{} --max_anyres_num 2", show("qwen2_vl_tied")),
            "`max_anyres_num` has no effect on qwen2_vl",
        ),
    ] {
        place.run(&line).fails(2, &[flag, "got: ", "help: "]);
    }
    place.write("c.yaml", "max_pixels: 12544\n");
    // The line may suit the model of the file, which the command line replaces.
    let note = place.run(&format!("{humanomni} --config c.yaml")).ok().stderr;
    let told = "`max_pixels` 12544 of c.yaml:1 is not used: its pictures always have the size of its tower";
    assert!(note.contains(told), "{note}");
    place.write("c.yaml", format!("max_pixels: 12544\nmodel_name_or_path: {}\n", model("humanomni")));
    place
        .run("data show --train_file one.jsonl --config c.yaml")
        .fails(2, &["at: c.yaml:1", "help: its pictures always have the size of its tower"]);
    // The family's own preset sets pixels for Qwen models, which it also serves, and qwen-mcq sets bounds for tiles.
    let left = |preset: &str, name: &str| {
        place.run(&format!("{} --preset {preset} --max_completion_length 4", show(name))).ok().stderr
    };
    let note = left("humanomni", "humanomni");
    assert!(
        note.contains(
            "left out of the preset humanomni, since they have no effect on humanomni: `max_pixels` 401408"
        ),
        "{note}"
    );
    // A launch script may repeat values of its preset, and no others.
    let repeated = format!("{} --preset humanomni --max_completion_length 4", show("humanomni"));
    let note = place.run(&format!("{repeated} --max_pixels 401408")).ok().stderr;
    assert!(note.contains("left out of the preset humanomni"), "{note}");
    place
        .run(&format!("{repeated} --max_pixels 12544"))
        .fails(2, &["`max_pixels` has no effect on humanomni", "got: 12544"]);
    let note = left("qwen-mcq", "internvl_hf");
    assert!(
        note.contains("`min_pixels` 12544, `max_pixels` 451584, `video_min_frame_pixels` 3136"),
        "{note}"
    );
    assert!(!left("humanomni", "qwen2_vl_tied").contains("left out"));
}

/// Settings of media and towers have no effect on a model that reads text only.
#[test]
fn settings_of_media_and_a_model_that_reads_text_only() {
    let place = Place::new();
    let model = crate::support::golden("checkpoints/qwen2").display().to_string();
    place.write("one.jsonl", r#"{"question": "What is 2+3?", "answer": "5"}"#);
    let line = format!("train --model {model} --train_file one.jsonl --reward_funcs random --output_dir run");
    for (name, value) in [
        ("max_pixels", "12544"),
        ("fps", "1"),
        ("nframes", "2"),
        ("frame_sampling", "processor"),
        ("orientation", "stored"),
        ("max_anyres_num", "2"),
        ("image_column", "picture"),
        ("video_folders", "."),
        ("use_audio_in_video", "true"),
        ("media_timeout_secs", "3"),
        ("mm_processor_cache_gb", "1"),
        ("freeze_vision_modules", "true"),
        ("tune_mm_vision", "true"),
        ("tune_mm_mlp", "false"),
        ("temporal_order_bonus", "true"),
    ] {
        let no_effect = format!("`{name}` has no effect on qwen2");
        let more = if name == "temporal_order_bonus" { "--reward_funcs accuracy" } else { "" };
        place
            .run(&format!("{line} {more} --{name} {value}"))
            .fails(2, &[&no_effect, "got: ", &format!("help: it reads text only; leave `{name}` out")]);
    }
    place
        .run(&format!("bench --model {model} --num_images 2"))
        .fails(2, &["`num_images` has no effect on qwen2"]);
    // What a preset sets for media is dropped with a note.
    let small = "--max_steps 1 --num_generations 2 --max_completion_length 4 --threads 1";
    let ran = place.run(&format!("{line} --preset r1-v {small}")).ok();
    assert!(
        ran.stderr.contains("left out of the preset r1-v, since they have no effect on qwen2"),
        "{}",
        ran.stderr
    );
}

/// A number of frames for all clips is a target; a row that asks for more frames than its clip has is bad.
#[test]
fn a_clip_with_fewer_frames_than_the_preset_takes() {
    let place = Place::new();
    fs::create_dir(place.path("five")).unwrap();
    for i in 0..5 {
        fs::copy(place.path("noise.png"), place.path(&format!("five/{i}.png"))).unwrap();
    }
    let row =
        |own: &str| format!(r#"{{"video": "five", {own} "problem": "<video>Which?", "solution": "x"}}"#);
    place.write("all.jsonl", row(""));
    place.write("own.jsonl", row(r#""nframes": 8,"#));
    let show = "data show --model M --preset r1-v --video_max_frame_pixels 3136 --train_file";
    let shown = place.run(&format!("{show} all.jsonl")).ok().stdout;
    assert!(shown.contains("frames at 0.00 0.50 1.50 2.00 s"), "{shown}");
    place
        .run(&format!("{show} own.jsonl"))
        .fails(1, &["number of frames: got 8 (taken in pairs), expected 2 to 5"]);
}

/// A bad evaluation row is found before training, not at the first evaluation.
#[test]
fn rows_to_evaluate_on_are_checked_before_training() {
    let place = Place::new();
    with(&place, &format!(r#"{{"id": "bad", "image": "gone.png", {IMAGE_TAIL}"#));
    let line = format!("{TRAIN} --train_file rows.jsonl --eval_file with.jsonl --eval_steps 1");
    let parts = ["too many evaluation rows cannot be used", "got: 1 of 4 rows", "gone.png"];
    place.run(&line).fails(1, &parts);
    assert_eq!(place.names("run"), [".cache", ".lock", "log.txt"]);
    let ran = place.run(&format!("{line} --max_skipped 0.25")).ok();
    assert!(ran.stderr.contains("4 evaluation rows: 1 images, 1 videos"), "{}", ran.stderr);
    assert!(place.lines("run/metrics.jsonl").iter().any(|row| row["eval_skipped"] == 1.0));
    // `data check` reads both.
    let both = "data check --model M --train_file rows.jsonl --eval_file with.jsonl";
    place.run(both).fails(1, &["1 of 7 rows cannot be used"]);
    place.run("data check --model M --eval_file with.jsonl").fails(1, &["1 of 4 rows cannot be used"]);
    place.run(&both.replace("rows.jsonl", "none.jsonl")).fails(1, &["none.jsonl"]);
}

#[test]
fn a_wrong_folder_for_all_rows_is_named() {
    let place = Place::new();
    let row = |id: &str| format!(r#"{{"id": "{id}", "image": "x/{id}.png", {IMAGE_TAIL}"#);
    place.write("all.jsonl", [row("a"), row("b")].join("\n"));
    let help = "help: none of the image files was found: set --image_folders to the folder";
    place.run("data check --model M --train_file all.jsonl").fails(1, &[help]);
    place.run(&format!("{TRAIN} --train_file all.jsonl")).fails(1, &[help]);
}

#[test]
fn files_that_are_no_dataset() {
    let place = Place::new();
    place.write("empty.jsonl", "");
    place.write("empty.json", "[]");
    place.write("text.txt", "a,b\n1,2\n");
    let cases: &[(&str, &[&str])] = &[
        ("empty.jsonl", &["the dataset is empty: got 0 rows in empty.jsonl, expected at least one"]),
        ("empty.json", &["the dataset is empty: got 0 rows in empty.json, expected at least one"]),
        (
            "text.txt",
            &["text.txt: unknown dataset format: got content that begins with", "expected a .jsonl file"],
        ),
        ("gone.jsonl", &["gone.jsonl", "No such file"]),
    ];
    for (file, parts) in cases {
        place.run(&format!("{TRAIN} --train_file {file}")).fails(1, parts);
        assert_eq!(place.names("run"), [".lock", "log.txt"]);
        place.run(&format!("score --model M --input {file} --output out.jsonl")).fails(1, parts);
        assert!(!place.exists("out.jsonl"));
    }
}

#[test]
fn a_group_of_one_trains_on_the_kl_term_aloud_or_not_at_all() {
    let place = Place::new();
    let line = TRAIN.replace("--num_generations 2", "--num_generations 1");
    place.run(&format!("{line} --train_file rows.jsonl --beta 0")).fails(
        2,
        &[
            "a group of one completion has no other to compare with",
            "expected: `--num_generations` 2 or more",
        ],
    );
    assert!(!place.exists("run"));
    let ran =
        place.run(&format!("{line} --train_file rows.jsonl --reward_funcs random --learning_rate 1e-3")).ok();
    let said = "every advantage is 0 and only the KL term is trained on";
    assert!(ran.stderr.contains(said) && place.text("run/log.txt").contains(said), "{}", ran.stderr);
    let metrics = place.lines("run/metrics.jsonl");
    // At first the policy equals the reference, and the KL term is flat.
    let of = |name: &str| metrics[0][name].as_f64().unwrap().abs();
    assert!(of("loss") < 1e-6 && of("grad_norm") < 1e-3, "{metrics:?}");
    assert!(place.lines("run/rollouts/step-000001.jsonl").iter().all(|row| row["advantage"] == 0.0));
}

#[test]
fn an_unknown_flag_is_a_usage_error() {
    let place = Place::new();
    let ran = place.run(&format!("{TRAIN} --train_file rows.jsonl --num_generation 4"));
    ran.fails(2, &["num_generation"]);
    assert!(!place.exists("run"));
}

#[test]
fn an_output_that_cannot_be_written() {
    let place = Place::new();
    place.write("file", "mine");
    for dir in ["file", "file/run", "/proc/run"] {
        let line = TRAIN.replace("--output_dir run", &format!("--output_dir {dir}"));
        place.run(&format!("{line} --train_file rows.jsonl")).fails(
            1,
            &[
                "the run directory cannot be written",
                &format!("at: {dir}"),
                "got: ",
                "help: choose another --output_dir",
            ],
        );
    }
    for out in ["file/out.jsonl", "/proc/out.jsonl"] {
        for verb in ["generate --input", "score --input", "eval --eval_file"] {
            let ran = place.run(&format!("{verb} rows.jsonl --model M --output {out}"));
            ran.fails(
                1,
                &["the output cannot be written", &format!("at: {out}"), "help: choose another --output"],
            );
        }
    }
    assert_eq!(place.text("file"), "mine");
}

#[test]
fn checkpoints_that_do_not_fit() {
    let place = Place::new();
    place.checkpoint("missing", |header, data| {
        let (name, start) = last_tensor(header);
        header.remove(&name);
        data.truncate(start);
    });
    place.checkpoint("extra", |header, data| {
        let (start, end) = (data.len(), data.len() + 8);
        header.insert(
            "model.surprise".into(),
            json!({"dtype": "F32", "shape": [2], "data_offsets": [start, end]}),
        );
        data.extend([0; 8]);
    });
    place.checkpoint("shape", |header, _| {
        let (name, _) = last_tensor(header);
        header[&name]["shape"].as_array_mut().unwrap().insert(0, json!(1));
    });
    place.checkpoint("nan", |_, data| data[..4].copy_from_slice(&f32::NAN.to_le_bytes()));
    place.checkpoint("cut", |_, data| data.truncate(1000));
    place.checkpoint("pickle", |_, _| {});
    let weights = place.path("pickle/model.safetensors");
    fs::rename(weights, place.path("pickle/pytorch_model.bin")).unwrap();
    place.checkpoint("none", |_, _| {});
    fs::remove_file(place.path("none/model.safetensors")).unwrap();

    let last = "visual.patch_embed.proj.weight";
    let cases: &[(&str, &[&str])] = &[
        (
            "missing",
            &["do not fit the qwen2_5_vl architecture", "missing tensor", last, "[16, 3, 2, 14, 14]"],
        ),
        ("extra", &["unknown tensor model.surprise"]),
        ("shape", &[last, "shape [1, 16, 3, 2, 14, 14], expected [16, 3, 2, 14, 14]"]),
        ("nan", &["tensor model.embed_tokens.weight: element 0 is NaN, expected finite numbers"]),
        ("cut", &["cut/model.safetensors cannot be read as safetensors"]),
        ("pickle", &["only a pickle checkpoint was found (pytorch_model.bin)", "convert it to safetensors"]),
        ("none", &["no model.safetensors and no model.safetensors.index.json"]),
    ];
    for (name, parts) in cases {
        let model = |line: &str| line.replace("--model M", &format!("--model {name}"));
        place.run(&format!("{} --train_file rows.jsonl", model(TRAIN))).fails(1, parts);
        let written = place.names("run");
        assert!(
            written.iter().all(|name| [".cache", ".lock", "log.txt"].contains(&name.as_str())),
            "{written:?}"
        );
        place.run(&model("generate --model M --input rows.jsonl --output out.jsonl")).fails(1, parts);
        assert!(!place.exists("out.jsonl"));
        place.run(&model("doctor --model M")).fails(1, parts);
    }
    place.run("generate --model nowhere --input rows.jsonl --output out.jsonl").fails(
        1,
        &["the model was not found", "got: `nowhere`", "expected: a checkpoint directory", "hf download"],
    );
}
