//! Decoded media that stay in memory.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use omnigrpo_data::{RowReader, Sample};
use omnigrpo_models::{
    Checkpoint, FrameRule, MediaSettings, MediaUsage, Prompt, PromptBuilder, PromptSettings,
};
use serde_json::json;

use omnigrpo_testkit::golden;

fn checkpoint() -> Checkpoint {
    Checkpoint::open(&golden("checkpoints/qwen2_5_vl_tied")).unwrap()
}

fn prompts(checkpoint: &Checkpoint, media: MediaSettings) -> PromptBuilder {
    PromptBuilder::open(checkpoint, PromptSettings { media, ..PromptSettings::default() }).unwrap()
}

/// A row with a medium of each of the files.
fn row(dir: &Path, kind: &str, files: &[&str]) -> Sample {
    let marks = format!("<{kind}>").repeat(files.len());
    let mut row = json!({ "problem": format!("{marks}What?"), "solution": "x", "max_pixels": 12544 });
    row[format!("{kind}s")] = json!(files);
    row["meta"] = json!({ "frame_cnts": [4, 4], "min_frames": 1, "max_frames": 4, "dynamic_sample": true });
    RowReader::new("row").media_in(dir).sample(row).unwrap()
}

/// A folder with a clip, a copy of it, two pictures and a folder of frames.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (from, to) in
        [("clip.gif", "a.gif"), ("clip.gif", "b.gif"), ("alpha.png", "a.png"), ("noise.png", "b.png")]
    {
        std::fs::copy(golden("media").join(from), dir.path().join(to)).unwrap();
    }
    std::fs::create_dir(dir.path().join("frames")).unwrap();
    for i in 0..4 {
        let to = dir.path().join(format!("frames/{i}.png"));
        std::fs::copy(golden(&format!("media/frames/000{i}.png")), to).unwrap();
    }
    dir
}

fn same(a: &Prompt, b: &Prompt) -> bool {
    a.media.iter().zip(&b.media).all(|(a, b)| Arc::ptr_eq(a, b))
}

#[test]
fn what_is_kept_is_what_decoding_gives_and_found_by_content() {
    let (dir, open) = (folder(), checkpoint());
    let plain = prompts(&checkpoint(), MediaSettings::default());
    let kept = prompts(&open, MediaSettings::default());
    open.media_store().set_max_bytes(1 << 30);
    for (kind, files) in
        [("image", vec!["a.png", "b.png"]), ("video", vec!["a.gif"]), ("video", vec!["frames"])]
    {
        let row = row(dir.path(), kind, &files);
        let before = open.media_store().usage();
        let [first, second] = [0, 1].map(|epoch| kept.build_in(&row, epoch).unwrap());
        assert_eq!(first, plain.build(&row).unwrap());
        assert_eq!(second, first);
        assert!(same(&first, &second), "{files:?} was decoded again");
        let after = open.media_store().usage();
        let count = files.len() as u64;
        assert_eq!((after.asked - before.asked, after.found - before.found), (2 * count, count));
    }
    // A copy is the same medium, and another builder of the same checkpoint finds it.
    let clip = |file: &str| row(dir.path(), "video", &[file]);
    let other = prompts(&open, MediaSettings::default());
    assert!(same(&kept.build(&clip("a.gif")).unwrap(), &other.build(&clip("b.gif")).unwrap()));
    // Other settings read it anew.
    let mut fewer = MediaSettings::default();
    fewer.video.max_frames = Some(4);
    let fewer = prompts(&open, fewer).build(&clip("a.gif")).unwrap();
    assert!(!same(&kept.build(&clip("a.gif")).unwrap(), &fewer));
    // A store without room is off.
    assert_eq!(plain.media_store().usage(), MediaUsage::default());
}

/// A file whose content takes longer to read than decoding may is not kept.
#[test]
fn a_file_that_is_read_slowly_is_not_kept() {
    let (dir, open) = (folder(), checkpoint());
    open.media_store().set_max_bytes(1 << 30);
    let mut hurried = MediaSettings::default();
    hurried.limits.timeout = Duration::ZERO;
    let row = row(dir.path(), "image", &["a.png"]);
    let prompt = prompts(&open, hurried).build(&row).unwrap();
    assert_eq!(open.media_store().usage().bytes, 0);
    assert_eq!(prompt, prompts(&open, MediaSettings::default()).build(&row).unwrap());
    assert!(open.media_store().usage().bytes > 0);
}

#[test]
fn a_file_that_changes_is_decoded_again_and_errors_are_not_kept() {
    let (dir, open) = (folder(), checkpoint());
    let kept = prompts(&open, MediaSettings::default());
    open.media_store().set_max_bytes(1 << 30);
    let picture = row(dir.path(), "image", &["a.png"]);
    let (a, b) = (kept.build(&picture).unwrap(), kept.build(&row(dir.path(), "image", &["b.png"])).unwrap());
    let path = dir.path().join("a.png");
    let content = std::fs::read(&path).unwrap();
    // The length is unchanged, and a time of change says nothing to a reader that ignores it.
    let mut broken = content.clone();
    broken[20..40].fill(0);
    std::fs::write(&path, &broken).unwrap();
    let usage = open.media_store().usage();
    assert!(kept.build(&picture).is_err() && kept.build(&picture).is_err());
    assert_eq!(open.media_store().usage().bytes, usage.bytes);
    std::fs::copy(dir.path().join("b.png"), &path).unwrap();
    assert!(same(&kept.build(&picture).unwrap(), &b));
    std::fs::write(&path, &content).unwrap();
    assert!(same(&kept.build(&picture).unwrap(), &a));
    std::fs::remove_file(&path).unwrap();
    assert!(kept.build(&picture).is_err(), "what was kept does not stand for a file that is gone");
    // A frame more makes another clip.
    let frames = row(dir.path(), "video", &["frames"]);
    let four = kept.build(&frames).unwrap();
    std::fs::copy(golden("media/frames/0007.png"), dir.path().join("frames/9.png")).unwrap();
    assert_ne!(kept.build(&frames).unwrap(), four);
}

/// Frames that are drawn anew in each epoch, and shuffled ones, whose order the row keys.
#[test]
fn chance_has_the_result_it_has_without_a_store() {
    let (dir, open) = (folder(), checkpoint());
    open.media_store().set_max_bytes(1 << 30);
    let drawn = MediaSettings { rule: FrameRule::Segments, dynamic_sample: true, ..MediaSettings::default() };
    let shuffled = MediaSettings { shuffle_frames: true, seed: 3, ..MediaSettings::default() };
    for settings in [drawn, shuffled.clone(), MediaSettings { seed: 4, ..shuffled }] {
        let (kept, plain) = (prompts(&open, settings.clone()), prompts(&checkpoint(), settings));
        for epoch in 0..6 {
            for (number, file) in (0..).zip(["a.gif", "b.gif"]) {
                let row = Sample { row: number, ..row(dir.path(), "video", &[file]) };
                assert_eq!(kept.build_in(&row, epoch).unwrap(), plain.build_in(&row, epoch).unwrap());
            }
        }
    }
    // At most the four numbers of frames of each clip, and an order for each seed, were decoded.
    let usage = open.media_store().usage();
    assert_eq!(usage.asked, 36);
    assert!((24..36).contains(&usage.found), "{usage:?}");
}

#[test]
fn it_never_holds_more_than_it_may_and_what_came_first_stays() {
    let (dir, open) = (folder(), checkpoint());
    let (kept, store) = (prompts(&open, MediaSettings::default()), open.media_store());
    let rows = ["a.png", "b.png"].map(|file| row(dir.path(), "image", &[file]));
    store.set_max_bytes(1 << 30);
    let bytes = rows.each_ref().map(|row| {
        let before = store.usage().bytes;
        let prompt = kept.build(row).unwrap();
        let medium = &prompt.media[0];
        let taken = store.usage().bytes - before;
        // The bytes of the numbers, and of their key.
        let numbers = 4 * medium.data.len() as u64;
        assert!(taken > numbers && taken < numbers + 512, "{taken} for {numbers}");
        taken
    });
    // The pictures are found only where there is room to the byte.
    for (max, held, found) in [
        (bytes[0] + bytes[1], bytes[0] + bytes[1], [true, true]),
        (bytes[0] + bytes[1] - 1, bytes[0], [true, false]),
        (bytes[0], bytes[0], [true, false]),
        (bytes[0].min(bytes[1]) - 1, 0, [false, false]),
        (0, 0, [false, false]),
    ] {
        store.set_max_bytes(0);
        assert_eq!(store.usage().bytes, 0);
        store.set_max_bytes(max);
        let first = rows.each_ref().map(|row| kept.build(row).unwrap());
        for _ in 0..3 {
            let again = rows.each_ref().map(|row| kept.build(row).unwrap());
            assert_eq!([0, 1].map(|i| same(&first[i], &again[i])), found, "{max} of {bytes:?}");
            assert_eq!(store.usage().bytes, held);
        }
    }
}
