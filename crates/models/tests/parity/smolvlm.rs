//! SmolVLM2 and SmolVLM v1, from rows to gradients, against `transformers` 5.23: tiles, frames, prompts, tower and connector.

use omnigrpo_data::{Dataset, DatasetSpec, MediumOptions, MediumRef, MediumSource, ReadOptions, Roots};
use omnigrpo_media::FrameSampling;
use omnigrpo_media::smolvlm::SmolVlmProcessor;
use omnigrpo_models::{Checkpoint, FrameRule, MediaSettings, MediumShape, Prompt};
use omnigrpo_ops::Part;
use omnigrpo_text::MediumKind;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::rows::{SMOLVLM, builder, cases_of, check_plans, dataset_of, prompt_of};
use omnigrpo_testkit::{
    Golden, backward, check_forward, check_gradients, checkpoint, copy_dir, golden, in_order, model_of,
    sketch, training,
};

fn cases() -> impl Iterator<Item = (&'static str, String)> {
    cases_of(&SMOLVLM)
}

fn prompt(name: &str, case: &str) -> Prompt {
    prompt_of("smolvlm", &checkpoint(name), case)
}

fn expected(name: &str, case: &str) -> Golden {
    Golden::read(&format!("smolvlm/{case}.{name}.safetensors"))
}

#[test]
fn ids_pixels_and_positions_equal_transformers() {
    for (name, case) in cases() {
        let (prompt, want) = (prompt(name, &case), expected(name, &case));
        assert_eq!(prompt.ids, want.ids("prompt_ids"), "{name} {case}: {}", prompt.text);
        for (i, m) in in_order(&prompt).into_iter().enumerate() {
            let want = &want.f["pixels"][9 * i..][..9];
            for (j, (a, b)) in sketch(&prompt.media[m].data).iter().zip(want).enumerate() {
                let bound = 1e-4 + 1e-6 * f64::from(b.abs());
                assert!((a - f64::from(*b)).abs() <= bound, "{name} {case} {i}: sketch {j} is {a} for {b}");
            }
        }
        let positions: Vec<[u32; 3]> = (0..prompt.ids.len() as u32).map(|p| [p; 3]).collect();
        assert_eq!((prompt.positions, prompt.next_position), (positions, prompt.ids.len() as u32));
    }
}

/// 100 and more sizes of pictures, and 60 lengths of videos.
#[test]
fn tiles_and_frames_are_chosen_as_in_transformers() {
    let want: Value = serde_json::from_slice(&std::fs::read(golden("smolvlm/rules.json")).unwrap()).unwrap();
    let tiles: Vec<[u32; 6]> = serde_json::from_value(want["tiles"].clone()).unwrap();
    let of = |longest_px, side_px, max_tiles| SmolVlmProcessor {
        side_px,
        longest_px,
        split: true,
        max_tiles,
        mean: [0.5; 3],
        std: [0.5; 3],
    };
    assert!(tiles.len() > 100);
    for [width, height, longest, side, rows, columns] in tiles {
        let got = of(longest, side, None).arrangement(width, height).unwrap();
        assert_eq!(got, [rows, columns], "{width}x{height}, {longest}, {side}");
        // A limit makes the picture smaller, never larger than it was.
        for most in [1, 2, 5, 9] {
            let [r, c] = of(longest, side, Some(most)).arrangement(width, height).unwrap();
            assert!(r * c <= most && r <= rows && c <= columns, "{width}x{height}, {most}: {r}x{c}");
            assert!(rows * columns > most || [r, c] == [rows, columns]);
        }
    }
    let frames: Vec<(usize, f64, f64, usize, Vec<usize>)> =
        serde_json::from_value(want["frames"].clone()).unwrap();
    assert_eq!(frames.len(), 60);
    for (total, video_fps, fps, max_frames, indices) in frames {
        let rule = FrameSampling::Inside { fps, min_frames: 1, max_frames };
        let got = rule.choose(total, video_fps).unwrap().indices;
        assert_eq!(got, indices, "{total} at {video_fps}: {fps}, {max_frames}");
    }
}

#[test]
fn plans_from_headers_are_what_decoding_gives() {
    let rows = dataset_of("smolvlm");
    for max_tiles in [None, Some(1), Some(4)] {
        for name in ["smolvlm", "smolvlm_tied"] {
            let builder = builder(&checkpoint(name), MediaSettings { max_tiles, ..MediaSettings::default() });
            check_plans(&builder, &rows);
        }
    }
}

#[test]
fn features_logits_and_logprobs_equal_transformers() {
    for (name, case) in cases() {
        let model = model_of(name);
        let want = expected(name, &case);
        let prompt = prompt(name, &case);
        let completion = want.ids("completion_ids");
        check_forward(&format!("{name} {case}"), &model, prompt, &completion, &want);
    }
}

#[test]
fn every_gradient_equals_transformers() {
    for (name, case) in cases() {
        let model = model_of(name);
        let (want, prompt) = (expected(name, &case), prompt(name, &case));
        let coefficients = Golden::read(&format!("smolvlm/{case}.safetensors"));
        for recompute in [false, true] {
            let completion = want.ids("completion_ids");
            backward(&model, &prompt, &completion, &coefficients.f["coefficients"], training(recompute));
            let compared = check_gradients(&model, &want, "", 1e-3);
            // Without a picture, only the language model: nine weights a layer, the last norm, embedding and head.
            let least = if case == "B" { 20 } else { 60 };
            assert!(compared >= least, "{name} {case}: only {compared} gradients");
        }
    }
}

#[test]
fn parts_are_told_apart() {
    for (name, _) in SMOLVLM {
        for param in model_of(name).params() {
            let part = match param.name() {
                n if n.starts_with("model.vision_model.") => Part::Vision,
                n if n.starts_with("model.connector.") => Part::Projector,
                _ => Part::Llm,
            };
            assert_eq!(param.part(), part, "{}", param.name());
        }
    }
}

/// Supervised rows give the ids of the template: the blank after `Assistant:` belongs to the answer, as in what the model says.
#[test]
fn conversations_to_imitate_equal_transformers() {
    let want: Value = serde_json::from_slice(&std::fs::read(golden("smolvlm/chats.json")).unwrap()).unwrap();
    let dir = TempDir::new().unwrap();
    for chat in want.as_array().unwrap() {
        let path = dir.path().join("rows.jsonl");
        let messages: Vec<Value> = chat["messages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|message| json!({"role": message["role"], "content": message["content"][0]["text"]}))
            .collect();
        std::fs::write(&path, json!({"messages": messages}).to_string()).unwrap();
        let spec = DatasetSpec::file(&path).with_roots(Roots::all(dir.path()));
        let rows = Dataset::open(&[spec], &ReadOptions::default()).unwrap();
        let builder = builder(&checkpoint("smolvlm"), MediaSettings::default());
        let example = builder.build_sft(&rows.get(0).unwrap(), 0).unwrap();
        let got: Vec<u32> = [example.prompt.ids.clone(), example.target].concat();
        let ids: Vec<u32> = serde_json::from_value(chat["ids"].clone()).unwrap();
        assert_eq!(got, ids, "{}", example.prompt.text);
    }
}

/// A clip of 8 frames in 4 seconds: a frame a second, whose times are in the prompt.
#[test]
fn the_rule_of_the_processor_takes_a_frame_a_second() {
    let checkpoint = Checkpoint::open(&checkpoint("smolvlm")).unwrap();
    let medium = MediumRef {
        kind: MediumKind::Video,
        source: MediumSource::Path(golden("media/clip.gif")),
        options: MediumOptions::default(),
    };
    let mut settings = MediaSettings { rule: FrameRule::Processor, ..MediaSettings::default() };
    settings.video = MediumOptions {
        fps: Some(1.0),
        min_frames: Some(1),
        max_frames: Some(64),
        ..MediumOptions::default()
    };
    let processor = checkpoint.family().processor();
    checkpoint.family().check_settings(&settings).unwrap();
    let made = processor.prepare(&medium, &settings).unwrap();
    assert_eq!(made.shape, MediumShape::Frames { count: 4, side_px: 24, clip_secs: 4 });
    assert_eq!(made.frame_times_secs, [0.0, 1.0, 2.0, 3.5]);
}

/// SmolVLM v1 has the processor of Idefics3, which reads images only.
#[test]
fn the_first_generation_reads_images_only() {
    let opened = Checkpoint::open(&checkpoint("smolvlm_v1")).unwrap();
    let processor = opened.family().processor();
    assert_eq!(processor.kinds(), [MediumKind::Image]);
    let error = builder(&checkpoint("smolvlm_v1"), MediaSettings::default())
        .build(&dataset_of("smolvlm").get(3).unwrap())
        .unwrap_err()
        .to_string();
    assert!(error.contains("reads images only"), "{error}");
    let settings = MediaSettings { rule: FrameRule::Processor, ..MediaSettings::default() };
    assert!(opened.family().check_settings(&settings).is_err());
}

#[test]
fn settings_choose_among_tiles() {
    let sample = dataset_of("smolvlm").get(5).unwrap();
    let tokens = |max_tiles| {
        let media = MediaSettings { max_tiles, ..MediaSettings::default() };
        let prompt = builder(&checkpoint("smolvlm"), media).build(&sample).unwrap();
        prompt.spans.iter().map(|s| s.len).sum::<usize>()
    };
    // A picture of 90 × 60 px in tiles of 24 px with 4 tokens each: 2 rows of 3 and the whole, 1 row of 2, or the whole alone.
    assert_eq!([None, Some(6), Some(4), Some(1)].map(tokens), [28, 28, 20, 4]);
    let opened = Checkpoint::open(&checkpoint("smolvlm")).unwrap();
    let mut media = MediaSettings::default();
    media.image.max_pixels = Some(1000);
    let error = opened.family().check_settings(&media).unwrap_err().to_string();
    assert!(error.contains("max_tiles"), "{error}");
}

#[test]
fn what_a_configuration_cannot_mean_is_an_error() {
    type Change = (&'static str, fn(&mut Value), &'static str);
    let refused: [Change; 9] = [
        ("config.json", |c| c["scale_factor"] = 4.into(), "scale_factor is 4, but a tile has 6 × 6 patches"),
        ("config.json", |c| c["image_token_id"] = 352.into(), "vocabulary of 352"),
        ("config.json", |c| c["text_config"]["model_type"] = "qwen2".into(), "model_type is \"qwen2\""),
        ("config.json", |c| c["vision_config"]["num_channels"] = 4.into(), "num_channels is 4"),
        ("preprocessor_config.json", |c| c["resample"] = 3.into(), "resample is 3; only 1"),
        ("preprocessor_config.json", |c| c["do_pad"] = false.into(), "do_pad is false"),
        (
            "preprocessor_config.json",
            |c| c["max_image_size"] = json!({"longest_edge": 48}),
            "max_image_size is 48 px, but the tower reads squares of 24 px",
        ),
        ("preprocessor_config.json", |c| c["size"] = json!({"height": 48}), "longest_edge is missing"),
        (
            "processor_config.json",
            |c| c["image_seq_len"] = 64.into(),
            "image_seq_len is 64, but a tile has 4",
        ),
    ];
    for (file, change, part) in refused {
        let dir = TempDir::new().unwrap();
        copy_dir(&checkpoint("smolvlm"), dir.path());
        let path = dir.path().join(file);
        let mut json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        std::fs::write(&path, json.to_string()).unwrap();
        let error = Checkpoint::open(dir.path()).err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    }
}
