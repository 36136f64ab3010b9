use omnigrpo_data::{Dataset, DatasetSpec, ReadOptions};
use omnigrpo_media::audio::{AudioRange, LogMel, read_audio};
use omnigrpo_media::{
    FrameSampling, FrameSize, Limits, Orientation, VideoRequest, VideoSource, decode_video, probe_video,
};
use omnigrpo_text::{MediumKind, Part};

use super::*;

const SMALL: Sizes = Sizes { sft: 21, train: 21, eval: 42 };

fn rows(dir: &Path, file: &str) -> Vec<Value> {
    let text = fs::read_to_string(dir.join(file)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let [a, b, c] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let sizes = Sizes { sft: 3, train: 3, eval: 3 };
    for (dir, seed) in [(&a, 1), (&b, 1), (&c, 2)] {
        generate_talking(dir.path(), seed, sizes).unwrap();
    }
    let read = |dir: &tempfile::TempDir, file: &str| fs::read(dir.path().join(file)).unwrap();
    for file in ["sft.jsonl", "eval_other_sound.jsonl", "clips/sft_0000.mov", "clips/eval_0002.mov"] {
        assert_eq!(read(&a, file), read(&b, file), "{file}");
    }
    assert_ne!(read(&a, "clips/sft_0000.mov"), read(&c, "clips/sft_0000.mov"));
    assert_ne!(read(&a, "clips/sft_0000.mov"), read(&a, "clips/train_0000.mov"));
}

#[test]
fn rows_are_what_the_loader_takes() {
    let dir = tempfile::tempdir().unwrap();
    generate_talking(dir.path(), 1, SMALL).unwrap();
    for (file, num_rows) in
        [("sft.jsonl", 21), ("train.jsonl", 21), ("eval.jsonl", 42), ("eval_other_sound.jsonl", 14)]
    {
        let spec = DatasetSpec::file(dir.path().join(file));
        let dataset = Dataset::open(&[spec], &ReadOptions::default()).unwrap();
        assert_eq!(dataset.len(), num_rows, "{file}");
        for row in 0..num_rows {
            let sample = dataset.get(row).unwrap();
            let kinds: Vec<_> = sample.media.iter().map(|medium| medium.kind).collect();
            assert_eq!(kinds, [MediumKind::Video, MediumKind::Audio]);
            let same = sample.media[0].source == sample.media[1].source;
            assert_eq!(same, !file.contains("other"), "{file}");
            assert!(
                matches!(&sample.turns[0].parts[..3], [Part::Medium { .. }, Part::Text(line), Part::Medium { .. }] if line == "\n")
            );
            let solution = sample.solution.unwrap();
            if file == "sft.jsonl" {
                let label = sample.columns["label"].as_str().unwrap();
                assert!(
                    solution.starts_with("<think>The ")
                        && solution.ends_with(&format!("<answer>{label}</answer>"))
                );
            } else {
                assert!(Emotion::ALL.iter().any(|emotion| emotion.label() == solution), "{solution}");
            }
        }
    }
    // Every emotion has the same number of rows in a category.
    let eval = rows(dir.path(), "eval.jsonl");
    let count = |category: &str, label: &str| {
        eval.iter()
            .filter(|row| row["category"] == category && row["conversations"][1]["value"] == label)
            .count()
    };
    assert!(Emotion::ALL.iter().all(|emotion| count("both", emotion.label()) == 2));
    assert_eq!((count("sound", "neutral"), count("picture", "neutral")), (0, 0));
    assert!(
        Emotion::ALL[1..].iter().all(|e| count("sound", e.label()) >= 2 && count("picture", e.label()) >= 2)
    );
    // The exchanged medium shows another emotion than the solution.
    let label = |clip: &Value| {
        let row = eval.iter().find(|row| row["video"] == *clip).unwrap();
        row["conversations"][1]["value"].clone()
    };
    for (file, medium) in [("eval_other_sound.jsonl", "audio"), ("eval_other_picture.jsonl", "video")] {
        for row in rows(dir.path(), file) {
            assert_ne!(label(&row[medium]), row["conversations"][1]["value"]);
        }
    }
}

#[test]
fn the_sound_is_in_the_file_without_loss() {
    let dir = tempfile::tempdir().unwrap();
    let clip = Clip { name: "clips/x.mov".into(), category: Category::Both, emotion: Emotion::Happy };
    let path = dir.path().join("x.mov");
    write(&path, &movie(&clip, &mut stream(3, 100, 0, 0)).unwrap()).unwrap();
    let samples = voice::speak(Emotion::Happy, &mut stream(3, 100, 0, 0));
    let heard = read_audio(&path, &AudioRange::default(), &Limits::default()).unwrap();
    assert_eq!((heard.sample_rate_hz, heard.samples.len()), (SAMPLE_RATE_HZ, 16_000));
    assert!(heard.samples.iter().zip(&samples).all(|(heard, &said)| *heard == f32::from(said) / 32768.0));
    // The sound is loud.
    let most = samples.iter().map(|s| s.unsigned_abs()).max().unwrap();
    assert!(most > 4000, "{most}");
}

/// Classifies each new clip by its nearest known clip. Voices alone suffice to recognise the emotion, and so do faces alone.
#[test]
fn voices_and_faces_can_be_told_apart() {
    let mel = LogMel::whisper(80).unwrap();
    let voice = |emotion, row| -> Vec<f32> {
        let samples = voice::speak(emotion, &mut stream(9, 100, row, 0));
        let samples: Vec<f32> = samples.iter().map(|&s| f32::from(s) / 32768.0).collect();
        let features = mel.features(&samples).unwrap();
        // Features at ten points in time, 80 filters each.
        (0..800).map(|i| features.data[i / 10 * 3000 + i % 10 * 10 + 5]).collect()
    };
    let face = |emotion, row| -> Vec<f32> {
        let frames = face::frames(emotion, &[0.5], &mut stream(9, 101, row, 0));
        frames[0].as_raw().iter().map(|&p| f32::from(p)).collect()
    };
    let told = |of: &dyn Fn(Emotion, u64) -> Vec<f32>| {
        let known: Vec<(Emotion, Vec<f32>)> = Emotion::ALL
            .iter()
            .flat_map(|&e| (0..12).map(move |row| (e, row)))
            .map(|(e, row)| (e, of(e, row)))
            .collect();
        let distance = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
        let right =
            Emotion::ALL.iter().flat_map(|&e| (50..56).map(move |row| (e, row))).filter(|&(e, row)| {
                let new = of(e, row);
                let nearest = known
                    .iter()
                    .min_by(|a, b| distance(&a.1, &new).total_cmp(&distance(&b.1, &new)))
                    .unwrap();
                nearest.0 == e
            });
        right.count()
    };
    let (heard, seen) = (told(&voice), told(&face));
    assert!(heard >= 34 && seen >= 38, "of 42: {heard} voices, {seen} faces");
}

#[test]
#[ignore = "needs ffmpeg; .ci/run runs it"]
fn ffmpeg_gives_the_frames_that_were_drawn() {
    let dir = tempfile::tempdir().unwrap();
    generate_talking(dir.path(), 1, Sizes { sft: 3, train: 0, eval: 0 }).unwrap();
    let source = VideoSource::File(dir.path().join("clips/sft_0000.mov"));
    let info = probe_video(&source, None, &Limits::default()).unwrap();
    assert_eq!((info.width_px, info.height_px, info.num_frames), (face::SIDE_PX, face::SIDE_PX, NUM_FRAMES));
    assert!((info.fps - f64::from(FPS)).abs() < 1e-9);
    let request = VideoRequest {
        sampling: FrameSampling::Midpoints { num_frames: NUM_FRAMES },
        size: FrameSize::Native,
        listed_fps: None,
        orientation: Orientation::Upright,
    };
    let video = decode_video(&source, &request, &Limits::default()).unwrap();
    let mut rng = stream(1, 100, 0, 0);
    let samples = voice::speak(Emotion::Neutral, &mut rng);
    let drawn = face::frames(Emotion::Neutral, &loudness(&samples), &mut rng);
    for (got, drawn) in video.frames.iter().zip(&drawn) {
        assert_eq!(got.pixels, *drawn.as_raw());
    }
}
