//! Qwen2.5-Omni and Qwen2-Audio, from rows to gradients, against `transformers` 5.23: prompts, pixels, spectrograms, positions, towers.

use std::collections::BTreeSet;

use omnigrpo_data::{Dataset, DatasetSpec, ReadOptions, Roots};
use omnigrpo_models::{
    Checkpoint, MediaSettings, MediumShape, MissingAudio, Prompt, WeightDtype, WeightFiles,
};
use omnigrpo_ops::Part;
use omnigrpo_text::MediumKind;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::rows::{OMNI, QWEN_AUDIO, builder, dataset_of, prompt_of, sample_of};
use omnigrpo_testkit::{
    Golden, backward, check_forward, check_gradients, checkpoint, copy_dir, golden, model_of, sketch,
    training,
};

/// Folder, checkpoint and case.
fn cases() -> impl Iterator<Item = (&'static str, &'static str, String)> {
    let all =
        OMNI.iter().map(|row| ("qwen_omni", row)).chain(QWEN_AUDIO.iter().map(|row| ("qwen_audio", row)));
    all.flat_map(|(folder, (name, cases))| cases.chars().map(move |case| (folder, *name, case.to_string())))
}

fn prompt(folder: &str, name: &str, case: &str) -> Prompt {
    prompt_of(folder, &checkpoint(name), case)
}

fn expected(folder: &str, name: &str, case: &str) -> Golden {
    Golden::read(&format!("{folder}/{case}.{name}.safetensors"))
}

#[test]
fn ids_pixels_spectrograms_and_positions_equal_transformers() {
    for (folder, name, case) in cases() {
        let (prompt, want) = (prompt(folder, name, &case), expected(folder, name, &case));
        assert_eq!(prompt.ids, want.ids("prompt_ids"), "{name} {case}: {}", prompt.text);
        let mut compared = 0;
        for (kind, key) in
            [(MediumKind::Image, "images"), (MediumKind::Video, "videos"), (MediumKind::Audio, "mels")]
        {
            for (i, medium) in prompt.media.iter().filter(|m| m.kind == kind).enumerate() {
                let data = match medium.shape {
                    MediumShape::Mel { frames, heard, .. } => {
                        assert!(medium.data.len() % frames == 0 && (heard..=heard + 2).contains(&frames));
                        medium.data.chunks(frames).flat_map(|band| &band[..heard]).copied().collect()
                    }
                    _ => medium.data.clone(),
                };
                let want = &want.f[key][9 * i..][..9];
                for (j, (a, b)) in sketch(&data).iter().zip(want).enumerate() {
                    // The sum of the roundings of a spectrogram of up to 3,100 frames in its own float32.
                    let bound = if key == "mels" { 1e-2 } else { 1e-4 } + 1e-6 * f64::from(b.abs());
                    assert!(
                        (a - f64::from(*b)).abs() <= bound,
                        "{name} {case} {key} {i}: sketch {j} is {a} for {b}"
                    );
                }
                compared += 1;
            }
        }
        assert_eq!(compared, prompt.media.len());
        let len = prompt.ids.len();
        match want.i.get("position_ids") {
            Some(positions) => {
                let at = |row: usize| [0, 1, 2].map(|axis| positions[axis * len + row] as u32);
                assert_eq!(prompt.positions, (0..len).map(at).collect::<Vec<_>>(), "{name} {case}");
                assert_eq!(prompt.next_position, prompt.positions[len - 1][0] + 1);
            }
            None => assert!(prompt.positions.iter().enumerate().all(|(i, p)| *p == [i as u32; 3])),
        }
    }
}

#[test]
fn features_logits_and_logprobs_equal_transformers() {
    for (folder, name, case) in cases() {
        let (model, want) = (model_of(name), expected(folder, name, &case));
        let completion = want.ids("completion_ids");
        check_forward(&format!("{name} {case}"), &model, prompt(folder, name, &case), &completion, &want);
    }
}

#[test]
fn every_gradient_equals_transformers() {
    for (folder, name, case) in cases() {
        let model = model_of(name);
        let (want, prompt) = (expected(folder, name, &case), prompt(folder, name, &case));
        let coefficients = Golden::read(&format!("{folder}/{case}.safetensors"));
        for recompute in [false, true] {
            let completion = want.ids("completion_ids");
            backward(&model, &prompt, &completion, &coefficients.f["coefficients"], training(recompute));
            let compared = check_gradients(&model, &want, "", 1e-3);
            let least = if case == "B" { 20 } else { 50 };
            assert!(compared >= least, "{name} {case}: only {compared} gradients");
        }
    }
}

/// Counts from headers equal those of decoding.
#[test]
fn plans_from_headers_are_what_decoding_gives() {
    for (folder, name, case) in cases() {
        let builder = builder(&checkpoint(name), MediaSettings::default());
        let sample = sample_of(folder, &case);
        let headers: Vec<_> = sample
            .media
            .iter()
            .map(|m| omnigrpo_models::probe_medium(m, &Default::default()).unwrap())
            .collect();
        let (rendered, plans) = builder.plan(&sample, &headers).unwrap();
        let built = builder.build(&sample).unwrap();
        assert_eq!((rendered.ids, rendered.spans), (built.ids, built.spans), "{name} {case}");
        for (plan, medium) in plans.iter().zip(&built.media) {
            assert_eq!((plan.kind, plan.shape, plan.of_clip), (medium.kind, medium.shape, medium.of_clip));
            assert_eq!(plan.seconds_per_grid, medium.seconds_per_grid);
        }
        let outline = builder.outline(&sample).unwrap();
        assert_eq!(outline.positions, built.positions, "{name} {case}");
    }
}

#[test]
fn parts_are_told_apart() {
    for name in ["omni", "omni_thinker", "qwen2_audio"] {
        for param in model_of(name).params() {
            let part = match param.name().trim_start_matches("thinker.") {
                n if n.starts_with("visual.merger.") || n.starts_with("audio_tower.proj.") => Part::Projector,
                n if n.starts_with("multi_modal_projector.") => Part::Projector,
                n if n.starts_with("visual.") => Part::Vision,
                n if n.starts_with("audio_tower.") => Part::Audio,
                _ => Part::Llm,
            };
            assert_eq!(param.part(), part, "{}", param.name());
        }
    }
}

/// The parts that speak are not in memory. A saved copy has every tensor of the checkpoint, with the bytes of those parts, and the voices.
#[test]
fn a_saved_copy_speaks_as_before() {
    let raw = |dir: &std::path::Path| {
        let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.tensors().into_iter();
        tensors.map(|(name, view)| (name, view.dtype(), view.data().to_vec())).collect::<Vec<_>>()
    };
    let sorted = |mut list: Vec<(String, safetensors::Dtype, Vec<u8>)>| {
        list.sort_by(|a, b| a.0.cmp(&b.0));
        list
    };
    for name in ["omni", "omni_thinker"] {
        let (model, out) = (model_of(name), TempDir::new().unwrap());
        let mute: BTreeSet<&str> = model.params().iter().map(|p| p.name()).collect();
        assert!(
            !mute.iter().any(|n| n.contains("talker") || n.contains("token2wav") || n.contains("bos_eos"))
        );
        model.save_pretrained(out.path()).unwrap();
        assert_eq!(sorted(raw(out.path())), sorted(raw(&checkpoint(name))), "{name}");
        let voices = |dir: &std::path::Path| std::fs::read(dir.join("spk_dict.pt")).ok();
        assert_eq!(voices(out.path()), voices(&checkpoint(name)));
        assert_eq!(voices(out.path()).is_some(), name == "omni");
        // A second copy is made from the first.
        let again = TempDir::new().unwrap();
        omnigrpo_testkit::load(out.path(), WeightDtype::Auto).unwrap().save_pretrained(again.path()).unwrap();
        assert_eq!(sorted(raw(again.path())), sorted(raw(out.path())));
        let config: Value =
            serde_json::from_slice(&std::fs::read(out.path().join("config.json")).unwrap()).unwrap();
        let thinker = if name == "omni" { &config["thinker_config"] } else { &config };
        assert_eq!(thinker["tie_word_embeddings"], false);
        assert_eq!(config.get("tie_word_embeddings").is_some(), name == "omni_thinker");
    }
    let files = WeightFiles::open(&checkpoint("omni"), |key| Some(key.to_owned())).unwrap();
    assert!(
        files.names().any(|n| n.starts_with("talker.")) && files.names().any(|n| n.starts_with("token2wav."))
    );
}

/// Files under the names of the modules of `transformers`, which some tools write.
#[test]
fn module_names_are_read() {
    let opened = Checkpoint::open(&checkpoint("omni")).unwrap();
    let format = opened.family().format();
    for (module, published) in [
        ("thinker.model.visual.blocks.0.attn.q.weight", "thinker.visual.blocks.0.attn.q.weight"),
        ("thinker.model.audio_tower.conv1.bias", "thinker.audio_tower.conv1.bias"),
        (
            "thinker.model.language_model.layers.0.mlp.up_proj.weight",
            "thinker.model.layers.0.mlp.up_proj.weight",
        ),
        ("thinker.lm_head.weight", "thinker.lm_head.weight"),
    ] {
        assert_eq!(format.published_name(module).as_deref(), Some(published));
        assert_eq!(format.published_name(published).as_deref(), Some(published));
        assert_eq!(format.module_name(published), module);
    }
    assert_eq!(format.published_name("talker.model.norm.weight"), None);
    let audio = Checkpoint::open(&checkpoint("qwen2_audio")).unwrap();
    for (module, published) in [
        ("model.audio_tower.conv1.bias", "audio_tower.conv1.bias"),
        ("model.multi_modal_projector.linear.bias", "multi_modal_projector.linear.bias"),
        ("model.language_model.norm.weight", "language_model.model.norm.weight"),
        ("lm_head.weight", "language_model.lm_head.weight"),
    ] {
        assert_eq!(audio.family().format().published_name(module).as_deref(), Some(published));
        assert_eq!(audio.family().format().module_name(published), module);
    }
}

/// A sound that is shown inside a clip and the same sound after the clip: the same media, other prompts.
#[test]
fn a_sound_is_inside_its_clip_only_where_it_was_read_from_it() {
    let builder = builder(&checkpoint("omni"), MediaSettings::default());
    let inside = sample_of("qwen_omni", "H");
    let mut after = inside.clone();
    after.media.iter_mut().for_each(|medium| medium.options.of_clip = None);
    let [inside, after] = [inside, after].map(|sample| builder.build(&sample).unwrap());
    let data = |prompt: &Prompt| prompt.media.iter().map(|m| m.data.clone()).collect::<Vec<_>>();
    assert_eq!(data(&inside), data(&after));
    // Spans of the picture, then of clip and sound by turns.
    assert_eq!(after.spans.iter().map(|s| s.medium).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(inside.spans.len() > 5, "{:?}", inside.spans);
    let of = |prompt: &Prompt, medium| {
        prompt.spans.iter().filter(|s| s.medium == medium).map(|s| s.len).sum::<usize>()
    };
    assert_eq!([1, 2].map(|m| of(&inside, m)), [1, 2].map(|m| of(&after, m)));
    assert!(inside.next_position < after.next_position);
}

/// The sound of a video file, which `use_audio_in_video` adds, is interleaved with its picture. A file without sound is a bad row, or has
/// silence of its length.
#[test]
#[ignore = "needs ffmpeg and ffprobe"]
fn the_sound_of_a_video_file_is_inside_it_ffmpeg() {
    let dir = TempDir::new().unwrap();
    let frames = golden("media/frames/%04d.png").display().to_string();
    let sound = golden("media/sounds/two.wav").display().to_string();
    for (name, more) in [("talks.mov", &["-i", &sound, "-c:a", "pcm_s16le"][..]), ("mute.mov", &[])] {
        let mut ffmpeg = std::process::Command::new("ffmpeg");
        ffmpeg.args(["-v", "error", "-framerate", "2", "-i", &frames]).args(more).args(["-c:v", "mpeg4"]);
        assert!(ffmpeg.arg(dir.path().join(name)).status().unwrap().success());
    }
    let question = "Which way does the ball move?";
    let of = |file: &str, missing_audio| {
        let row = json!({"video": file, "problem": format!("<video>\n{question}"), "min_pixels": 3136, "max_pixels": 12544});
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, row.to_string()).unwrap();
        let spec = DatasetSpec::file(&path).with_roots(Roots::all(dir.path()));
        let hear = ReadOptions { use_audio_in_video: true, ..ReadOptions::default() };
        let sample = Dataset::open(&[spec], &hear).unwrap().get(0).unwrap();
        assert_eq!(sample.media[1].options.of_clip, Some(0));
        let settings = MediaSettings { missing_audio, ..MediaSettings::default() };
        builder(&checkpoint("omni"), settings).build(&sample)
    };
    let talks = of("talks.mov", MissingAudio::Error).unwrap();
    // This is the same clip as frames with the sound beside it.
    let mut sample = sample_of("qwen_omni", "D");
    sample.media.iter_mut().filter(|m| m.kind == MediumKind::Audio).for_each(|m| m.options.of_clip = Some(0));
    let listed = builder(&checkpoint("omni"), MediaSettings::default()).build(&sample).unwrap();
    assert_eq!((&talks.ids, &talks.positions), (&listed.ids, &listed.positions));
    assert_eq!(talks.media[1].data, listed.media[1].data);
    let error = of("mute.mov", MissingAudio::Error).unwrap_err().to_string();
    assert!(error.contains("mute.mov") && error.contains("no audio track"), "{error}");
    let silent = of("mute.mov", MissingAudio::Silence).unwrap();
    assert_eq!(silent.media[1].shape.mel().unwrap(), [16, 402, 400]);
    assert!(silent.media[1].data.iter().all(|x| *x == -1.5));
}

#[test]
fn sounds_and_kinds_that_the_towers_cannot_read_are_errors() {
    let dir = TempDir::new().unwrap();
    let wav = |samples: u32| {
        let mut bytes = Vec::new();
        bytes.extend(b"RIFF");
        bytes.extend((36 + 2 * samples).to_le_bytes());
        bytes.extend(b"WAVEfmt ");
        for part in
            [16u32.to_le_bytes(), [1, 0, 1, 0], 16000u32.to_le_bytes(), 32000u32.to_le_bytes(), [2, 0, 16, 0]]
        {
            bytes.extend(part);
        }
        bytes.extend(b"data");
        bytes.extend((2 * samples).to_le_bytes());
        bytes.extend((0..samples).flat_map(|i| ((i * 37 % 200) as i16).to_le_bytes()));
        bytes
    };
    let path = dir.path().join("click.wav");
    let mut sample = sample_of("qwen_audio", "A");
    sample.media[0].source = omnigrpo_data::MediumSource::Path(path.clone());
    for name in ["omni", "qwen2_audio"] {
        let builder = builder(&checkpoint(name), MediaSettings::default());
        // Two steps of 160 samples give no feature; three give one.
        std::fs::write(&path, wav(320)).unwrap();
        let error = builder.build(&sample).unwrap_err().to_string();
        assert!(error.contains("the sound is too short"), "{error}");
        std::fs::write(&path, wav(321)).unwrap();
        assert_eq!(builder.build(&sample).unwrap().spans[0].len, 1, "{name}");
    }
    let picture = dataset_of("qwen_omni").get(0).unwrap();
    let error = builder(&checkpoint("qwen2_audio"), MediaSettings::default()).build(&picture).unwrap_err();
    assert!(error.to_string().contains("supports only sounds"), "{error}");
}

#[test]
fn what_a_configuration_cannot_mean_is_an_error() {
    type Change = (&'static str, &'static str, fn(&mut Value), &'static str);
    let refused: [Change; 10] = [
        (
            "omni",
            "config.json",
            |c| c["thinker_config"]["audio_config"]["output_dim"] = 40.into(),
            "audio tower have width 40",
        ),
        (
            "omni",
            "config.json",
            |c| c["thinker_config"]["vision_config"]["out_hidden_size"] = 40.into(),
            "vision tower have width 40",
        ),
        (
            "omni",
            "config.json",
            |c| c["thinker_config"]["audio_config"]["n_window"] = 1501.into(),
            "n_window is 1501",
        ),
        (
            "omni",
            "config.json",
            |c| c["thinker_config"]["audio_token_index"] = 320.into(),
            "vocabulary of 320",
        ),
        (
            "omni",
            "config.json",
            |c| c["thinker_config"]["seconds_per_chunk"] = json!(0.01),
            "less than one position",
        ),
        (
            "omni_thinker",
            "config.json",
            |c| c["text_config"]["use_sliding_window"] = true.into(),
            "use_sliding_window",
        ),
        ("omni", "preprocessor_config.json", |c| c["feature_size"] = 8.into(), "8 frequency bands"),
        ("omni", "preprocessor_config.json", |c| c["patch_size"] = 16.into(), "patch"),
        (
            "qwen2_audio",
            "preprocessor_config.json",
            |c| c["chunk_length"] = 2.into(),
            "window has 200 frames",
        ),
        (
            "qwen2_audio",
            "config.json",
            |c| c["text_config"]["model_type"] = "llama".into(),
            "model_type is \"llama\"",
        ),
    ];
    for (name, file, change, part) in refused {
        let dir = TempDir::new().unwrap();
        copy_dir(&checkpoint(name), dir.path());
        let path = dir.path().join(file);
        let mut json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        std::fs::write(&path, json.to_string()).unwrap();
        let error = Checkpoint::open(dir.path()).err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    }
}
