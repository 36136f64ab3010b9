//! Media that cannot be read: in bounded time the row is skipped and counted, or the run stops if that is set.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{Place, ROWS, Ran, ran};

const TRAIN: &str = "train --model M --threads 1 --num_generations 2 --gradient_accumulation_steps 1 --max_steps 4 --max_completion_length 4 --train_file with.jsonl --output_dir run";
const CLIP: &str = r#"{"id": "bad", "video": "clip.mp4", "problem": "<video>What?", "solution": "x"}"#;

/// Body of a program that computes for ever.
const BUSY: &str = "while :; do :; done";

/// Good rows, and a bad one in second place.
fn with(place: &Place, bad: &str) {
    let rows: Vec<&str> = ROWS.lines().collect();
    place.write("with.jsonl", [rows[0], bad, rows[1], rows[2]].join("\n"));
}

/// Puts programs into a directory that is searched first.
fn programs(place: &Place, scripts: &[(&str, &str)]) {
    fs::create_dir(place.path("bin")).unwrap();
    for (name, body) in scripts {
        let path = place.path("bin").join(name);
        fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

fn with_programs(place: &Place, line: &str) -> Ran {
    let mut command: Command = place.command(line);
    let path = format!("{}:{}", place.path("bin").display(), std::env::var("PATH").unwrap());
    ran(command.env("PATH", path))
}

/// The run continues without the row and counts it; with `--strict_media` it stops.
fn skipped(place: &Place, more: &str, reason: &str) {
    let started = Instant::now();
    with_programs(place, &format!("{TRAIN} {more} --max_skipped 0.5")).ok();
    assert!(started.elapsed() < Duration::from_secs(60));
    let rows = place.lines("run/skipped.jsonl");
    assert!(rows.iter().all(|row| row["id"] == "bad") && !rows.is_empty(), "{rows:?}");
    assert!(rows[0]["reason"].as_str().unwrap().contains(reason), "{}", rows[0]);
    let steps = place.lines("run/metrics.jsonl");
    assert_eq!((steps.len(), &steps[3]["data/skipped"]), (4, &1.0.into()));
    let strict = TRAIN.replace("--output_dir run", "--output_dir strict --strict_media");
    with_programs(place, &format!("{strict} {more}")).fails(1, &[reason]);
    assert!(!place.exists("strict/model.safetensors"));
}

#[test]
fn a_decoder_that_computes_for_ever_on_the_header() {
    let place = Place::new();
    place.write("clip.mp4", "anything");
    with(&place, CLIP);
    // The sleep is a child of the script and keeps its output open.
    programs(&place, &[("ffprobe", &format!("sleep 600 & {BUSY}")), ("ffmpeg", BUSY)]);
    skipped(&place, "--media_timeout_secs 0.4", "`ffprobe` did not finish within 0.4 s of processor time");
}

#[test]
fn a_decoder_that_computes_for_ever_on_the_frames() {
    let place = Place::new();
    place.write("clip.mp4", "anything");
    with(&place, CLIP);
    let header = r#"echo '{"streams": [{"width": 56, "height": 56, "nb_frames": "8", "nb_read_packets": "8", "avg_frame_rate": "4/1"}]}'"#;
    programs(&place, &[("ffprobe", header), ("ffmpeg", &format!("sleep 600 & {BUSY}"))]);
    skipped(&place, "--media_timeout_secs 0.4", "`ffmpeg` did not finish within 0.4 s of processor time");
}

/// A decoder without processor time does not make its file bad: no row is skipped.
#[test]
fn a_decoder_that_waits_is_a_failure_of_the_machine() {
    let place = Place::new();
    place.write("clip.mp4", "anything");
    with(&place, CLIP);
    programs(&place, &[("ffprobe", "sleep 600; exit 0"), ("ffmpeg", "sleep 600; exit 0")]);
    let said = "`ffprobe` was killed after 1 s in which it used hardly any processor time";
    with_programs(&place, &format!("{TRAIN} --media_timeout_secs 0.1 --max_skipped 0.5")).fails(75, &[said]);
    assert!(!place.exists("run/skipped.jsonl"));
}

/// Without ffmpeg a clip is not bad, neither for a check nor for a run nor for inference. If the program returns in time, the run
/// does not notice.
#[test]
fn a_decoder_that_is_missing_is_a_failure_of_the_machine() {
    let place = Place::new();
    place.write("clip.mp4", "anything");
    with(&place, CLIP);
    let header = r#"echo '{"streams": [{"width": 56, "height": 56, "nb_frames": "8", "nb_read_packets": "8", "avg_frame_rate": "4/1"}]}'"#;
    // The script writes the requested number of black frames of 56 × 56 pixels.
    let frames = r#"while [ $# -gt 0 ]; do if [ "$1" = -frames:v ]; then n=$2; fi; shift; done; /usr/bin/head -c $((n * 9408)) /dev/zero"#;
    programs(&place, &[("ffprobe", header), ("ffmpeg", frames)]);
    let line = |verb: &str| match verb {
        "generate" => {
            "generate --model M --input with.jsonl --output out.jsonl --max_completion_length 4".to_owned()
        }
        "check" => "data check --model M --train_file with.jsonl".to_owned(),
        _ => TRAIN.replace("--output_dir run", &format!("--output_dir {verb}")),
    };
    let found = |verb: &str| with_programs(&place, &line(verb));
    found("whole").ok();
    found("generate").ok();
    assert!(place.lines("out.jsonl")[1].get("error").is_none());
    fs::remove_file(place.path("out.jsonl")).unwrap();
    // An installed ffmpeg is not found.
    let hidden = &|verb: &str| {
        let mut command = place.command(&line(verb));
        command.env("PATH", place.path("bin"));
        command
    };
    fs::rename(place.path("bin"), place.path("away")).unwrap();
    // Each waits for the machine first.
    std::thread::scope(|threads| {
        for verb in ["check", "generate", "cut"] {
            threads.spawn(move || {
                let ran = ran(&mut hidden(verb)).fails(75, &["machine", "ffmpeg"]);
                assert!(!ran.stderr.contains("cannot be used"), "{}", ran.stderr);
            });
        }
    });
    assert!(!place.exists("out.jsonl") && !place.exists("cut/skipped.jsonl"));
    let mut child = hidden("back").stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    fs::rename(place.path("away"), place.path("bin")).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(place.bytes("back/model.safetensors") == place.bytes("whole/model.safetensors"));
}

#[test]
fn a_decoder_that_answers_nonsense() {
    let place = Place::new();
    place.write("clip.mp4", "anything");
    with(&place, CLIP);
    programs(&place, &[("ffprobe", "echo nonsense")]);
    skipped(&place, "", "cannot parse the output of ffprobe");
}

#[test]
fn a_video_without_frames_per_second() {
    let place = Place::new();
    place.write("clip.mp4", "anything");
    with(&place, CLIP);
    let header = r#"echo '{"streams": [{"width": 56, "height": 56, "nb_frames": "8", "avg_frame_rate": "0/0", "r_frame_rate": "0/0"}]}'"#;
    programs(&place, &[("ffprobe", header)]);
    skipped(&place, "", "neither frame rate nor duration is known");
}

#[test]
#[ignore = "needs ffmpeg"]
fn videos_that_ffmpeg_cannot_read() {
    for (name, args) in [
        // An hour at 30 frames a second exceeds the limit of reading.
        ("hour.mp4", &["-f", "lavfi", "-i", "color=s=16x16:r=30:d=3600", "-c:v", "mpeg4", "-q:v", "31"][..]),
        ("sound.mp4", &["-f", "lavfi", "-i", "sine=d=1"]),
    ] {
        let place = Place::new();
        let mut made = Command::new("ffmpeg");
        made.args(["-v", "error"]).args(args).arg(place.path(name));
        assert!(made.status().unwrap().success());
        with(&place, &CLIP.replace("clip.mp4", name));
        fs::create_dir(place.path("bin")).unwrap();
        skipped(&place, "", name);
    }
    for (name, content) in [("empty.mp4", ""), ("text.mp4", "no video at all")] {
        let place = Place::new();
        place.write(name, content);
        with(&place, &CLIP.replace("clip.mp4", name));
        fs::create_dir(place.path("bin")).unwrap();
        skipped(&place, "", name);
    }
}

/// Rows with pictures and sound: the sound of a clip is a separate medium, and each of the two may be broken.
#[test]
#[ignore = "needs ffmpeg"]
fn clips_with_sound_that_ffmpeg_cannot_read() {
    let place = Place::new();
    let made = |name: &str, args: &[&str]| {
        let mut ffmpeg = Command::new("ffmpeg");
        ffmpeg.args(["-v", "error"]).args(args).arg(place.path(name));
        assert!(ffmpeg.status().unwrap().success());
    };
    let picture = ["-f", "lavfi", "-i", "testsrc=s=64x64:r=8:d=2"];
    let tone = ["-f", "lavfi", "-i", "sine=r=16000:d=2"];
    let coded = ["-c:v", "mpeg4", "-c:a", "aac"];
    made("whole.mp4", &[&picture[..], &tone, &coded].concat());
    made("mute.mp4", &[&picture[..], &coded[..2]].concat());
    made("blind.mp4", &[&tone[..], &coded[2..]].concat());
    // An hour with few frames: only its sound is too long.
    let hour = [
        "-f",
        "lavfi",
        "-i",
        "color=s=16x16:r=0.2",
        "-f",
        "lavfi",
        "-i",
        "anullsrc=r=8000:cl=mono",
        "-t",
        "3600",
    ];
    made("hour.mp4", &[&hour[..], &coded].concat());
    let whole = place.bytes("whole.mp4");
    place.write("cut.mp4", &whole[..whole.len() / 2]);
    let mut scratched = whole.clone();
    scratched[100..whole.len() / 2].fill(0x5a);
    place.write("scratched.mp4", scratched);
    place.write("empty.mp4", "");
    // The content of a file decides, not its name.
    place.write("named.wav", whole);

    let row = |id: &str, media: &str, question: &str| {
        format!(r#"{{"id": "{id}", {media} "problem": "{question}", "solution": "sad"}}"#)
    };
    let clip = |id: &str, file: &str| {
        row(id, &format!(r#""video": "{file}","#), r"<video>\n<audio>\nWhich emotion?")
    };
    let bad = [
        ("missing", "the file does not exist"),
        ("empty", "the file is empty"),
        ("cut", "cut.mp4"),
        ("scratched", "scratched.mp4"),
        ("mute", "no audio track"),
        ("blind", "blind.mp4: "),
        ("hour", "length of the sound in seconds"),
    ];
    let mut rows: Vec<String> = bad.iter().map(|(id, _)| clip(id, &format!("{id}.mp4"))).collect();
    rows.extend([
        clip("whole", "whole.mp4"),
        clip("named", "named.wav"),
        row("seen", r#""video": "mute.mp4","#, r"<video>\nWhich emotion?"),
        row("heard", r#""audio": "whole.mp4","#, r"<audio>\nWhich emotion?"),
        row("read", "", "Which emotion?"),
    ]);
    place.write("with.jsonl", rows.join("\n"));
    let model = crate::support::golden("checkpoints/humanomni");
    let train = TRAIN.replace("--model M", &format!("--model {}", model.display()));
    let started = Instant::now();
    let ran = place.run(&format!("{train} --per_device_train_batch_size 3 --max_skipped 0.9")).ok();
    assert!(!ran.stderr.contains("WARN"), "{}", ran.stderr);
    assert!(started.elapsed() < Duration::from_secs(60));
    let skipped = place.lines("run/skipped.jsonl");
    for (id, reason) in bad {
        let line = skipped.iter().find(|line| line["id"] == id).unwrap_or_else(|| panic!("{id} was used"));
        assert!(line["reason"].as_str().unwrap().contains(reason), "{line}");
    }
    assert_eq!(skipped.len(), bad.len(), "{skipped:?}");
    let strict = train.replace("--output_dir run", "--output_dir strict --strict_media");
    place.run(&strict).fails(1, &["none, with --strict_media"]);
}

/// Cached results of 100 000 headers survive a change of the next header.
#[test]
fn a_check_of_headers_that_is_stopped_keeps_what_it_knows() {
    let place = Place::new();
    let row = |name: &str| CLIP.replace("clip.mp4", name);
    place.write("with.jsonl", ["a.mp4", "b.mp4", "hang.mp4"].map(row).join("\n"));
    for name in ["a.mp4", "b.mp4", "hang.mp4"] {
        place.write(name, "anything");
    }
    let header = r#"{"streams": [{"width": 56, "height": 56, "nb_frames": "8", "avg_frame_rate": "4/1"}]}"#;
    programs(
        &place,
        &[("ffprobe", &format!("case \"$*\" in *hang*) exec sleep 20;; esac; echo '{header}'"))],
    );
    let path = format!("{}:{}", place.path("bin").display(), std::env::var("PATH").unwrap());
    let mut run = place.command(TRAIN).env("PATH", path).spawn().unwrap();
    let cache = place.path("run/.cache/media-headers-2.jsonl");
    let lines = || fs::read_to_string(&cache).unwrap_or_default().lines().count();
    let waited = Instant::now();
    while lines() < 2 && waited.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(Command::new("kill").args(["-TERM", &run.id().to_string()]).status().unwrap().success());
    assert_eq!(run.wait().unwrap().code(), None, "ended by the signal");
    assert_eq!(lines(), 2);
}

/// Sound files of the `media` tests.
fn sound(name: &str) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../media/tests/data/audio").join(name)
}

/// Writes a RIFF file that claims `num_bytes` of samples (`format` 1: 16 bits, 3: float) at 8 kHz, with a hole after `samples`.
fn wav(place: &Place, name: &str, format: u8, num_bytes: u32, samples: &[u8]) {
    let width = if format == 3 { 4u8 } else { 2 };
    let mut bytes = b"RIFF".to_vec();
    bytes.extend((num_bytes + 36).to_le_bytes());
    bytes.extend(b"WAVEfmt \x10\0\0\0");
    bytes.extend([format, 0, 1, 0]);
    bytes.extend(8000u32.to_le_bytes());
    bytes.extend((8000 * u32::from(width)).to_le_bytes());
    bytes.extend([width, 0, 8 * width, 0]);
    bytes.extend(b"data");
    bytes.extend(num_bytes.to_le_bytes());
    bytes.extend(samples);
    place.write(name, &bytes);
    let file = fs::File::options().write(true).open(place.path(name)).unwrap();
    file.set_len(44 + u64::from(num_bytes)).unwrap();
}

#[test]
fn sound_that_cannot_be_heard() {
    let place = Place::new();
    for (from, to) in [
        ("speech.wav", "speech.wav"),
        ("speech.flac", "flac.wav"),
        ("mute.mp4", "mute.mp4"),
        ("speech.opus", "hang.opus"),
    ] {
        fs::copy(sound(from), place.path(to)).unwrap();
    }
    let whole = fs::read(sound("speech.wav")).unwrap();
    place.write("cut.wav", &whole[..whole.len() / 2]);
    place.write("empty.wav", "");
    wav(&place, "hour.wav", 1, 3600 * 16_000, &[]);
    wav(&place, "nan.wav", 3, 8, &[0, 0, 0, 0, 0, 0, 0xc0, 0x7f]);
    // Opus needs ffmpeg, and this one never ends.
    programs(&place, &[("ffprobe", BUSY), ("ffmpeg", BUSY)]);

    let row = |id: &str, file: &str| {
        format!(
            r#"{{"id": "{id}", "audio": "{file}", "problem": "<audio>\nWhat is said?", "solution": "yes"}}"#
        )
    };
    let bad = [
        ("empty", "empty.wav", "the file is empty"),
        ("cut", "cut.wav", "cut.wav: cannot decode"),
        ("missing", "missing.wav", "the file does not exist"),
        ("hour", "hour.wav", "length of the sound in seconds"),
        ("nan", "nan.wav", "sample 1 is NaN"),
        (
            "mute",
            "mute.mp4",
            "mute.mp4: the file has no audio track; remove the audio from the row, or take silence in its place \
             (--missing_audio silence)",
        ),
        ("hang", "hang.opus", "`ffprobe` did not finish within 0.4 s of processor time"),
    ];
    let mut rows: Vec<String> = bad.iter().map(|(id, file, _)| row(id, file)).collect();
    // The last file has the wrong ending, which does not matter.
    rows.extend([row("good", "speech.wav"), row("named", "flac.wav")]);
    place.write("with.jsonl", rows.join("\n"));

    let model = crate::support::golden("checkpoints/humanomni");
    let train = TRAIN.replace("--model M", &format!("--model {}", model.display()));
    let train = format!("{train} --media_timeout_secs 0.4").replace("--max_steps 4", "--max_steps 8");
    let started = Instant::now();
    with_programs(&place, &format!("{train} --max_skipped 0.9")).ok();
    assert!(started.elapsed() < Duration::from_secs(60));
    let skipped = place.lines("run/skipped.jsonl");
    for (id, _, reason) in bad {
        let line = skipped.iter().find(|line| line["id"] == id).unwrap_or_else(|| panic!("{id} was used"));
        assert!(line["reason"].as_str().unwrap().contains(reason), "{line}");
    }
    assert_eq!(skipped.len(), bad.len());
    assert_eq!(place.lines("run/metrics.jsonl")[7]["data/skipped"], bad.len() as f64);
    let strict = train.replace("--output_dir run", "--output_dir strict --strict_media");
    with_programs(&place, &strict).fails(1, &["none, with --strict_media"]);

    // A clip without sound is silence if that is set.
    place.write("with.jsonl", [row("mute", "mute.mp4"), row("good", "speech.wav")].join("\n"));
    let silent = train.replace("--output_dir run", "--output_dir silent --missing_audio silence");
    with_programs(&place, &silent).ok();
    assert!(!place.exists("silent/skipped.jsonl") || place.lines("silent/skipped.jsonl").is_empty());

    // One question about one sound.
    let ask = format!("generate --model {} --audio flac.wav --max_completion_length 4", model.display());
    place.run_with(&ask, &["--prompt", "What is said?"]).ok();
    let ask = format!("generate --model {} --audio cut.wav --max_completion_length 4", model.display());
    place.run_with(&ask, &["--prompt", "What is said?"]).fails(1, &["cut.wav: cannot decode"]);
}

/// A row of Video-R1 without `data_type`, other names of columns, and messages in a column of their own: the column and its setting are
/// named, and nothing is trained.
#[test]
fn media_that_nothing_reads_stop_a_run_before_its_first_step() {
    let place = Place::new();
    let train = TRAIN.replace("with.jsonl", "lost.jsonl") + " --reward_funcs format";
    let check = "data check --model M --train_file lost.jsonl";
    for (column, value, setting) in [
        ("path", r#""shapes.png""#, "--image_column path"),
        ("film", r#"["clip.mp4"]"#, "--video_column film"),
        ("speech", r#"{"path": "a.wav"}"#, "--audio_column speech"),
        (
            "chat",
            r#"[{"role": "user", "content": [{"type": "image", "image": "x"}]}]"#,
            "--prompt_column chat",
        ),
    ] {
        let row = format!(r#"{{"problem": "Which?", "solution": "x", "{column}": {value}}}"#);
        place.write("lost.jsonl", format!("{row}\n{row}\n"));
        let what = format!("the column `{column}` looks like");
        place.run(check).fails(1, &[&what, setting, "in 2 of 2 sampled rows", "--allow_text_only"]);
        place.run(&train).fails(1, &[&what, setting]);
        assert!(!place.exists("run/metrics.jsonl"));
    }
    place.run("init --model M --train_file lost.jsonl").fails(1, &["the column `chat` looks like"]);
    assert!(!place.exists("omnigrpo.yaml"));
    let told = place.run(&format!("{check} --allow_text_only")).ok().stdout;
    assert!(told.contains("warning: the column `chat` looks like images"), "{told}");
    place.write("lost.jsonl", r#"{"problem": "Which?", "solution": "x", "path": "shapes.png"}"#);
    place.run(&format!("{check} --image_column path")).ok();
    // A column that looks like media in few rows is a warning.
    let rows: String = (0..30)
        .map(|n| {
            let more = if n == 7 { r#", "icon": "x.png""# } else { "" };
            format!("{{\"image\": \"shapes.png\", \"problem\": \"Which?\", \"solution\": \"x\"{more}}}\n")
        })
        .collect();
    place.write("lost.jsonl", rows);
    let told = place.run(check).ok().stdout;
    assert!(told.contains("warning: the column `icon` looks like images in 1 of 30"), "{told}");
}

#[test]
fn rows_that_are_all_text_are_trained_only_if_that_is_asked_for() {
    let place = Place::new();
    place.write("with.jsonl", "{\"problem\": \"2 + 2?\", \"solution\": \"4\"}\n");
    let why = "all rows are text only, but the model sees or hears";
    place.run(TRAIN).fails(1, &[why, "--image_column NAME", "--allow_text_only"]);
    place.run("data check --model M --train_file with.jsonl").fails(1, &[why]);
    assert!(!place.exists("run/metrics.jsonl"));
    let once = TRAIN.replace("--max_steps 4", "--max_steps 1");
    place.run(&format!("{once} --allow_text_only")).ok();
    // Without a model, nobody knows what it sees. Evaluation rows may be text.
    place.run("data check --train_file with.jsonl").ok();
    place.run("data check --model M --train_file rows.jsonl --eval_file with.jsonl").ok();
}

#[test]
fn a_folder_of_tables_is_read_and_one_of_arrow_files_is_refused_with_the_command() {
    let place = Place::new();
    let table = include_bytes!("../../../data/tests/data/hub.parquet");
    fs::create_dir_all(place.path("set/data")).unwrap();
    fs::write(place.path("set/data/train-00000-of-00001.parquet"), table).unwrap();
    place.write("set/data/kept.png", place.bytes("shapes.png"));
    let told = place.run("data check --train_file set").ok().stdout;
    assert!(told.contains("3 rows: 4 images"), "{told}");
    place
        .run("data check --train_file set --dataset_train_split test")
        .fails(1, &["`test`", "available: default/train"]);
    fs::create_dir(place.path("it's saved")).unwrap();
    place.write("it's saved/state.json", "{}");
    place.write("it's saved/data-00000-of-00001.arrow", "ARROW1");
    // The command was run with `datasets` 5.2 on folders of one split and of several.
    let command = "python3 -c 'import sys, datasets as d; s = d.load_from_disk(sys.argv[1]); (s if isinstance(s, d.Dataset) \
                   else s[sys.argv[2]]).to_parquet(sys.argv[3])' 'it'\\''s saved' test test.parquet\n";
    place
        .run_with("data check --dataset_train_split test --train_file", &["it's saved"])
        .fails(1, &["`save_to_disk`", "write a parquet table and give that one: ", command]);
    fs::create_dir(place.path("empty")).unwrap();
    place
        .run("data check --train_file empty")
        .fails(1, &["the folder has no parquet tables", "got: no files"]);
}

/// A picture, and the same stored sideways with the orientation 6, as Pillow wrote them.
const UPRIGHT: &str = "iVBORw0KGgoAAAANSUhEUgAAAFQAAAA4BAMAAACRc8LTAAAAElBMVEX/AAAA/wAAAP///wAAAAD////AItz5AAAAK0lEQVR42mNkQAGCeHhMDESDUaWjSkeVjiqljVJG49Eya1TpqNJRpUNHKQDdOQDmAlzrCwAAAABJRU5ErkJggg==";
const SIDEWAYS: &str = "iVBORw0KGgoAAAANSUhEUgAAADgAAABUBAMAAAAlnukMAAAAElBMVEX/AAAA/wAAAP///wAAAAD////AItz5AAAAGmVYSWZNTQAqAAAACAABARIAAwAAAAEABgAAAAAAANZnS2kAAAAuSURBVHjaY1RiQAbGKDwmBjxgVHJUcmRJsrxH4b4fDaFRyVHJ0bwyKjkqSYkkAAmRBL1TwufaAAAAAElFTkSuQmCC";

/// A sideways photo gives the numbers of its upright copy, a run says how many there are, and a run from before the setting goes on
/// with stored pixels.
#[test]
fn a_sideways_photo_is_turned_and_an_older_run_keeps_its_pixels() {
    let place = Place::new();
    for (name, text) in [("upright.png", UPRIGHT), ("sideways.png", SIDEWAYS)] {
        use base64::Engine as _;
        place.write(name, base64::engine::general_purpose::STANDARD.decode(text).unwrap());
    }
    let row = |name: &str| {
        format!(
            r#"{{"id": "r", "image": "{name}", "problem": "Which?", "solution": "x", "completions": ["red"]}}"#
        )
    };
    for name in ["upright", "sideways"] {
        place.write(&format!("{name}.jsonl"), row(&format!("{name}.png")));
    }
    let score = |rows: &str, more: &str| {
        let out = format!("{rows}{}.out", more.len());
        place.run(&format!("score --model M --input {rows}.jsonl --output {out} {more}")).ok();
        place.lines(&out)[0]["completions"].clone()
    };
    assert_eq!(score("sideways", ""), score("upright", ""));
    assert_ne!(score("sideways", "--orientation stored"), score("upright", ""));
    let told = place.run("data check --model M --train_file sideways.jsonl").ok().stdout;
    assert!(told.contains("1 of 1 images are stored sideways; they are turned"), "{told}");
    let told = place.run("data check --model M --train_file sideways.jsonl --preset vlm-r1").ok().stdout;
    assert!(told.contains("1 of 1 images are stored sideways; they stay so (--orientation)"), "{told}");

    let line = |steps: usize, more: &str| {
        let line = TRAIN
            .replace("with.jsonl", "sideways.jsonl")
            .replace("--max_steps 4", &format!("--max_steps {steps} {more}"));
        line + " --save_steps 1 --reward_funcs format"
    };
    let into = |dir: &str, line: &str| line.replace("--output_dir run", &format!("--output_dir {dir}"));
    for dir in ["run", "other"] {
        place.run(&into(dir, &line(1, "--orientation stored"))).ok();
        forget(
            &place,
            &format!("{dir}/checkpoint-1"),
            &["orientation", "continue_text_prompts", "length_bonus"],
        );
    }
    let told = place.run(&line(2, "")).ok().stderr;
    assert!(
        told.contains(
            "using --orientation stored: the checkpoint to resume from is of a program that did not turn"
        ),
        "{told}"
    );
    assert!(told.contains("at step 1 of 2") && !told.contains("starting from the beginning"), "{told}");
    assert!(place.text("run/config.yaml").contains("orientation: stored"));
    // The next resume needs no word either, and asking for the other form is a difference.
    let told = place.run(&line(3, "")).ok().stderr;
    assert!(told.contains("at step 2 of 3"), "{told}");
    let told = place.run(&line(4, "--orientation upright --allow_changed_settings")).ok().stderr;
    assert!(told.contains("orientation: \"stored\" → \"upright\""), "{told}");
    // A run that starts from the beginning beside the older checkpoint turns pictures.
    let other = place.run(&into("other", &line(2, "--learning_rate 1e-4")));
    other.fails(1, &["learning_rate: 1e-6 → 0.0001", "--resume_from_checkpoint never"]);
    let told = place
        .run(&into("other", &line(2, "--learning_rate 1e-4 --resume_from_checkpoint never")))
        .ok()
        .stderr;
    assert!(told.contains("starting from the beginning") && told.contains("they are turned\n"), "{told}");
    assert!(place.text("other/config.yaml").contains("orientation: upright"));
    assert!(place.exists("other/superseded-1/checkpoint-1"));
    // Its own checkpoint resumes as it is.
    let told = place.run(&into("other", &line(3, "--learning_rate 1e-4"))).ok().stderr;
    assert!(told.contains("at step 2 of 3") && !told.contains("using --orientation"), "{told}");
}

/// Removes entries from the settings of a checkpoint, as an earlier version writes them that does not have these settings.
fn forget(place: &Place, checkpoint: &str, names: &[&str]) {
    let state = place.path(checkpoint).join("trainer_state.json");
    let mut saved: serde_json::Value = serde_json::from_slice(&fs::read(&state).unwrap()).unwrap();
    let settings = saved["fingerprint"].as_object_mut().unwrap();
    names.iter().for_each(|name| drop(settings.remove(*name).unwrap()));
    place.rewrite_of_checkpoint(checkpoint, "trainer_state.json", &saved.to_string());
}

/// A run stops if an earlier version, which did not read columns that are part of the prompts now, has written its checkpoint.
#[test]
fn an_older_run_stops_at_columns_that_it_did_not_read() {
    let place = Place::new();
    let row = |id: usize, more: &str| {
        format!(r#"{{"id": "{id}", "image": "shapes.png", "problem": "Which?", "solution": "red"{more}}}"#)
    };
    let rows = |more: &str| [row(1, ""), row(2, more), row(3, "")].join("\n");
    place.write("with.jsonl", rows(r#", "system": "Be short.", "C": "x", "B": "blue", "A": "red""#));
    let line = |steps: usize| {
        let line = TRAIN.replace("--max_steps 4", &format!("--max_steps {steps}"));
        line + " --num_iterations 2 --save_steps 1 --reward_funcs format"
    };
    const NAME: &str = "columns in the prompts";
    place.run(&line(1)).ok();
    let told = place.run(&line(2)).ok().stderr;
    assert!(told.contains("at step 1 of 2"), "{told}");
    place.run(&line(3)).ok();
    forget(&place, "run/checkpoint-3", &[NAME, "length_bonus"]);
    place.run(&line(4)).fails(
        1,
        &[
            "checkpoint-3 was written by an earlier version, which did not read choices and system of the rows",
            "resume with the new prompts with --allow_changed_settings, or start from the beginning with \
             --resume_from_checkpoint never",
        ],
    );
    assert!(place.exists("run/checkpoint-3") && !place.exists("run/superseded-1"));
    // Its rollout in progress is of the old prompts.
    let told = place.run(&(line(4) + " --allow_changed_settings")).ok().stderr;
    assert!(told.contains(&format!("{NAME}: unset → \"choices and system\"")), "{told}");
    assert!(told.contains("at step 3 of 4"), "{told}");
    let told = place.run(&line(5)).ok().stderr;
    assert!(told.contains("at step 4 of 5"), "{told}");

    // Rows without such columns have no entry. Other rows are another run.
    place.write("with.jsonl", rows(""));
    let told = place.run(&(line(2) + " --resume_from_checkpoint never")).ok().stderr;
    assert!(told.contains("starting from the beginning"), "{told}");
    assert!(!place.text("run/checkpoint-1/trainer_state.json").contains(NAME));
}
