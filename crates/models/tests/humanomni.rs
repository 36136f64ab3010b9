//! HumanOmni against an independent construction of it (`tools/goldens/make_humanomni.py`): prompts, pixels, spectrogram,
//! features, logits, every gradient, loading and saving of both layouts, packed groups.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::collections::BTreeSet;
use std::path::Path;

use omnigrpo_data::{MediumOptions, MediumRef, MediumSource, Origin, Reference, Sample, Think};
use omnigrpo_guard::told;
use omnigrpo_models::{
    Checkpoint, GroupStream, Limits, LoadOptions, Memories, Model, ModelError, PackedStream, Prompt,
    PromptBuilder, PromptSettings, Training, WeightDtype, humanomni, probe_medium,
};
use omnigrpo_ops::Part;
use omnigrpo_testkit::{
    Golden, assert_close, backward, causal_logits, check_gradients, checkpoint, copy_dir, golden, max_diff,
    omni_prompt, take_gradients, train_all, training, weight_bits,
};
use omnigrpo_text::{Form, MediumKind, Role, split_conversation};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

const SMALL: &str = "humanomni";
const LARGE: &str = "humanomni_large";
const QUESTION: &str = "Which emotion is the most obvious?";
const LONG: &str = "What colors do you see? What do you see? What colors? What?";

/// Question with placeholders, and media.
fn case(name: &str) -> (String, Vec<MediumKind>) {
    use MediumKind::{Audio, Image, Video};
    match name {
        "va" => (format!("<video>\n<audio>\n{QUESTION}"), vec![Video, Audio]),
        "v" => (format!("<video>\n{LONG}"), vec![Video]),
        "a" => ("<audio>\nWhat do you hear?".into(), vec![Audio]),
        "i" => ("<image>\nWhat colors?".into(), vec![Image]),
        _ => ("What is the most obvious emotion?".into(), vec![]),
    }
}

fn sample(text: &str, kinds: &[MediumKind]) -> Sample {
    let count = |kind| kinds.iter().filter(|k| **k == kind).count();
    let counts = MediumKind::ALL.map(|kind| (kind, count(kind))).into();
    let path = |kind: MediumKind| match kind.form() {
        Form::Picture => golden("media/shapes.png"),
        Form::Clip => golden("media/frames"),
        Form::Sound => golden("media/rise.wav"),
    };
    let media = kinds.iter().map(|&kind| MediumRef {
        kind,
        source: MediumSource::Path(path(kind)),
        options: MediumOptions::default(),
    });
    Sample {
        is_text: false,
        joined: Vec::new(),
        id: "test".into(),
        row: 0,
        dataset: "test".into(),
        origin: Origin { file: Path::new("test").into(), line: 1 },
        turns: split_conversation(&[(Role::User, text.to_owned())], counts).unwrap(),
        media: media.collect(),
        solution: None,
        solution_from: None,
        reference: Reference { from: 1, later: Vec::new(), media: Vec::new() },
        tools: None,
        columns: Map::new(),
        think: Think::Off,
        completions: None,
        rewards: None,
    }
}

fn opened(dir: &Path, overrides: &Map<String, Value>) -> Checkpoint {
    Checkpoint::open_with(dir, |_| Ok::<_, ModelError>(overrides.clone())).unwrap()
}

fn builder(dir: &Path, overrides: &Map<String, Value>) -> PromptBuilder {
    let settings = PromptSettings { max_completion_length: 32, ..PromptSettings::default() };
    PromptBuilder::open(&opened(dir, overrides), settings).unwrap()
}

fn prompt(name: &str, which: &str) -> Prompt {
    let (text, kinds) = case(which);
    builder(&checkpoint(name), &Map::new()).build(&sample(&text, &kinds)).unwrap()
}

fn load(name: &str) -> Model {
    omnigrpo_testkit::load(&checkpoint(name), WeightDtype::Float32).unwrap()
}

fn cases() -> Vec<(&'static str, Vec<&'static str>)> {
    vec![(SMALL, vec!["va", "v", "a", "i", "t"]), (LARGE, vec!["va", "i"])]
}

fn expected(name: &str, which: &str) -> Golden {
    Golden::read(&format!("humanomni/{which}.{name}.safetensors"))
}

fn overrides(key: &str, value: Value) -> Map<String, Value> {
    Map::from_iter([(key.to_owned(), value)])
}

#[test]
fn the_constants_are_the_originals() {
    use MediumKind::{Audio, Image, Video};
    assert_eq!([Image, Video, Audio].map(MediumKind::placeholder), ["<image>", "<video>", "<audio>"]);
    assert_eq!(
        humanomni::MARKERS,
        [
            (Image, ["<im_start>", "<im_end>"]),
            (Video, ["<vi_start>", "<vi_end>"]),
            (Audio, ["<au_start>", "<au_end>"])
        ]
    );
    assert_eq!(humanomni::NUM_FRAMES, 8);
    // The markers are text: several ordinary tokens each.
    let prompts = builder(&checkpoint(SMALL), &Map::new());
    for marker in humanomni::MARKERS.into_iter().flat_map(|(_, pair)| pair) {
        assert_eq!(prompts.tokenizer().token_id(marker), None);
        assert!(prompts.tokenizer().encode_control(marker, &[]).unwrap().len() > 1);
    }
}

#[test]
fn prompts_equal_the_original_form() {
    for (name, list) in cases() {
        for which in list {
            let want = expected(name, which);
            let got = prompt(name, which);
            let rebuilt = omni_prompt(&want);
            assert_eq!(got.ids, rebuilt.ids, "{name} {which}");
            assert_eq!(got.spans, rebuilt.spans, "{name} {which}");
            assert!(got.positions.iter().enumerate().all(|(i, p)| *p == [i as u32; 3]));
            assert_eq!(got.next_position as usize, got.ids.len());
            let sees = got.media.iter().any(|m| m.kind != MediumKind::Audio);
            let question = if sees { want.ids("bert_ids") } else { Vec::new() };
            assert_eq!(got.instruction, question, "{name} {which}");
        }
    }
}

/// Media that the row does not place stand before the text, each on a line of its own: the same prompt.
#[test]
fn unplaced_media_give_the_same_prompt() {
    let kinds = [MediumKind::Video, MediumKind::Audio];
    let prompts = builder(&checkpoint(SMALL), &Map::new());
    let unplaced = prompts.build(&sample(QUESTION, &kinds)).unwrap();
    assert_eq!(unplaced.ids, prompt(SMALL, "va").ids);
    assert_eq!(unplaced.instruction, prompt(SMALL, "va").instruction);
}

#[test]
fn pixels_and_spectrogram_equal_the_processors() {
    for (name, list) in cases() {
        for which in list {
            let want = expected(name, which);
            for medium in &prompt(name, which).media {
                let levels = match medium.kind.form() {
                    Form::Sound => {
                        let delta = max_diff(&medium.data, &want.f["mel"]);
                        assert!(delta <= 1e-4, "{name} {which}: the spectrogram differs by {delta}");
                        continue;
                    }
                    Form::Picture => &want.u["image_u8"],
                    Form::Clip => &want.u["video_u8"],
                };
                let pixels: Vec<f32> =
                    levels.iter().map(|&u| ((f64::from(u) * (1.0 / 255.0)) as f32 - 0.5) / 0.5).collect();
                assert!(medium.data == pixels, "{name} {which}: pixels differ");
            }
        }
    }
}

/// Counts from headers equal those of decoding.
#[test]
fn plans_from_headers_count_the_same_tokens() {
    for (name, list) in cases() {
        let prompts = builder(&checkpoint(name), &Map::new());
        for which in list {
            let (text, kinds) = case(which);
            let sample = sample(&text, &kinds);
            let headers: Vec<_> =
                sample.media.iter().map(|m| probe_medium(m, &Limits::default()).unwrap()).collect();
            let (rendered, plans) = prompts.plan(&sample, &headers).unwrap();
            let built = prompts.build(&sample).unwrap();
            assert_eq!(rendered.ids, built.ids, "{name} {which}");
            for (plan, medium) in plans.iter().zip(&built.media) {
                assert_eq!((plan.kind, plan.shape), (medium.kind, medium.shape));
                assert_eq!(plan.frame_times_secs, medium.frame_times_secs);
            }
        }
    }
}

#[test]
fn features_and_logits_equal_the_construction() {
    for (name, list) in cases() {
        let model = load(name);
        for which in list {
            let want = expected(name, which);
            let prompt = prompt(name, which);
            let features = model.encode_prompt(&prompt).unwrap();
            for (i, f) in features.iter().enumerate() {
                let delta = max_diff(&f.rows.to_vec(), &want.f[&format!("features.{i}")]);
                assert!(delta <= 1e-4, "{name} {which}: features {i} differ by {delta}");
            }
            let completion = want.ids("completion_ids");
            let groups = [GroupStream { prompt: &prompt, completions: vec![&completion] }];
            let stream = PackedStream::new(&groups).unwrap();
            let (logp, _) = model.score(&stream, std::slice::from_ref(&features), 1.0).unwrap();
            let delta = max_diff(&logp, &want.f["logp"]);
            assert!(delta <= 1e-4, "{name} {which}: log-probabilities differ by {delta}");

            let mut all = prompt.clone();
            all.ids.extend(&completion[..completion.len() - 1]);
            all.positions = (0..all.ids.len() as u32).map(|p| [p; 3]).collect();
            let x = model.embed_prompt(&all, &features).unwrap();
            let first = prompt.ids.len() - 1;
            let rows: Vec<usize> = (first..first + completion.len()).collect();
            let logits = causal_logits(&model, x, &all.positions, &rows);
            let delta = max_diff(&logits, &want.f["logits"]);
            assert!(delta <= 1e-4, "{name} {which}: logits differ by {delta}");
        }
    }
}

#[test]
fn the_dynamic_compressor_is_a_switch() {
    let on = overrides("mm_dynamic_compressor", json!(true));
    let dir = checkpoint(SMALL);
    let model = Model::load(
        &opened(&dir, &on),
        &LoadOptions { dtype: WeightDtype::Float32, ..LoadOptions::default() },
    )
    .unwrap();
    let (text, kinds) = case("v");
    let prompt = builder(&dir, &on).build(&sample(&text, &kinds)).unwrap();
    // Four frames of 2×2: one token each, and the second frame whole.
    assert_eq!(prompt.spans[0].len, 8);
    let features = model.encode_prompt(&prompt).unwrap();
    let delta = max_diff(&features[0].rows.to_vec(), &expected(SMALL, "v").f["compressed"]);
    assert!(delta <= 1e-4, "compressed features differ by {delta}");
    // A copy keeps the switch.
    let out = TempDir::new().unwrap();
    model.save_pretrained(out.path()).unwrap();
    assert_eq!(config(out.path())["mm_dynamic_compressor"], true);
}

#[test]
fn every_gradient_equals_the_construction() {
    for (name, list) in cases() {
        let model = load(name);
        for which in list {
            for recompute in [false, true] {
                let want = expected(name, which);
                let prompt = prompt(name, which);
                let completion = want.ids("completion_ids");
                backward(&model, &prompt, &completion, &want.f["coefficients"], training(recompute));
                check_gradients(&model, &want, "", 1e-3);
            }
        }
    }
}

/// Sound and sight reach weights of their own; text reaches neither.
#[test]
fn what_a_pass_would_reach_is_known_without_it() {
    let prompts = ["va", "t", "a"].map(|which| prompt(SMALL, which));
    let counts = omnigrpo_testkit::check_reach(&load(SMALL), &prompts, &[7, 9, 100]);
    assert!(counts[0] > counts[2] && counts[2] > counts[1], "{counts:?}");
}

/// With BERT and towers frozen the rest has the gradients it has when everything is trained.
#[test]
fn frozen_parts_do_not_change_other_gradients() {
    let model = load(SMALL);
    let want = expected(SMALL, "va");
    let prompt = prompt(SMALL, "va");
    let completion = want.ids("completion_ids");
    let groups = [GroupStream { prompt: &prompt, completions: vec![&completion] }];
    let stream = PackedStream::new(&groups).unwrap();
    let features = vec![model.encode_prompt(&prompt).unwrap()];
    let run = |parts: &[Part]| {
        for param in model.params() {
            param.set_trainable(parts.contains(&param.part()));
            param.clear_grad();
        }
        let pass = model.train_pass(&stream, &features, Training::default(), None).unwrap();
        let gradients = pass.backward(&want.f["coefficients"], None).unwrap();
        model
            .backward_media(&[&prompt], &features, Memories::default(), gradients, Training::default())
            .unwrap();
        take_gradients(&model)
    };
    let all = run(&Part::ALL);
    for parts in [&[Part::Projector][..], &[Part::Instruction], &[Part::Audio], &[Part::Llm, Part::Projector]]
    {
        let of: BTreeSet<_> =
            model.params().iter().filter(|p| parts.contains(&p.part())).map(|p| p.name()).collect();
        let same = all.iter().filter(|(name, _)| of.contains(name.as_str()));
        let same = same.map(|(name, grad)| (name.clone(), grad.clone())).collect();
        assert_close(&run(parts), &same, 1e-6, &format!("{parts:?}"));
    }
}

/// Groups with different media and a text-only one in one stream: the log-probabilities and gradients of nine separate
/// sequences.
#[test]
fn a_packed_stream_equals_separate_sequences() {
    let model = load(SMALL);
    let prompts = ["va", "t", "a"].map(|which| prompt(SMALL, which));
    let completions: [Vec<Vec<u32>>; 3] = [
        vec![vec![5], vec![7, 9, 100, 298], vec![8, 8, 9]],
        vec![vec![1, 2, 3], vec![4], vec![6, 5, 298]],
        vec![vec![33, 44], vec![55, 66, 77, 88, 99], vec![11]],
    ];
    train_all(&model);
    let groups: Vec<GroupStream> = prompts
        .iter()
        .zip(&completions)
        .map(|(prompt, list)| GroupStream { prompt, completions: list.iter().map(Vec::as_slice).collect() })
        .collect();
    let stream = PackedStream::new(&groups).unwrap();
    let refs: Vec<&Prompt> = prompts.iter().collect();
    let features: Vec<_> = prompts.iter().map(|p| model.encode_prompt(p).unwrap()).collect();
    let pass = model.train_pass(&stream, &features, Training::default(), None).unwrap();
    let packed = pass.logprobs.clone();
    let weights: Vec<f32> = (0..packed.len()).map(|i| ((i * 37 % 11) as f32 - 5.0) / 5.0).collect();
    let gradients = pass.backward(&weights, None).unwrap();
    model.backward_media(&refs, &features, Memories::default(), gradients, Training::default()).unwrap();
    let packed_gradients = take_gradients(&model);

    let mut separate = Vec::new();
    for ((prompt, list), features) in prompts.iter().zip(&completions).zip(&features) {
        let features = std::slice::from_ref(features);
        for completion in list {
            let groups = [GroupStream { prompt, completions: vec![completion.as_slice()] }];
            let stream = PackedStream::new(&groups).unwrap();
            let pass = model.train_pass(&stream, features, Training::default(), None).unwrap();
            let at = separate.len();
            separate.extend_from_slice(&pass.logprobs);
            let gradients = pass.backward(&weights[at..separate.len()], None).unwrap();
            model
                .backward_media(&[prompt], features, Memories::default(), gradients, Training::default())
                .unwrap();
        }
    }
    let delta = max_diff(&packed, &separate);
    assert!(delta <= 1e-5, "log-probabilities differ by {delta}");
    assert_close(&packed_gradients, &take_gradients(&model), 5e-5, "packed");
}

fn tensors(dir: &Path) -> BTreeSet<String> {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.names().into_iter().map(str::to_owned).collect()
}

fn config(dir: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap()
}

#[test]
fn what_is_saved_has_the_layout_it_came_in() {
    for name in [SMALL, LARGE] {
        let dir = checkpoint(name);
        let model = omnigrpo_testkit::load(&dir, WeightDtype::Auto).unwrap();
        let out = TempDir::new().unwrap();
        let saved = out.path().join("saved");
        model.save_pretrained(&saved).unwrap();
        assert_eq!(tensors(&saved), tensors(&dir), "{name}");
        let again = omnigrpo_testkit::load(&saved, WeightDtype::Auto).unwrap();
        assert_eq!(weight_bits(&again), weight_bits(&model), "{name}");
        // The copy finds the towers' directories, tokenizer and processors where they are.
        let (text, kinds) = case("va");
        let got = builder(&saved, &Map::new()).build(&sample(&text, &kinds)).unwrap();
        assert_eq!(got, prompt(name, "va"), "{name}");
    }
}

/// A tower that was trained goes into the checkpoint; what stayed as it was stays where it was.
#[test]
fn a_trained_tower_is_saved_inside() {
    let model = load(LARGE);
    for param in model.params() {
        param.set_trainable(param.part() == Part::Audio);
    }
    let out = TempDir::new().unwrap();
    model.save_pretrained(out.path()).unwrap();
    let names = tensors(out.path());
    assert!(names.iter().any(|n| n.starts_with("model.audio_tower.audio_tower.encoder.layers.1.")));
    assert!(!names.iter().any(|n| n.starts_with("model.vision_tower.")));
    let again = omnigrpo_testkit::load(out.path(), WeightDtype::Float32).unwrap();
    assert_eq!(weight_bits(&again), weight_bits(&model));
    model.load_weights(out.path()).unwrap();
}

/// The message of loading a checkpoint whose files were changed.
fn refused(change: &dyn Fn(&Path)) -> String {
    let out = TempDir::new().unwrap();
    let dir = out.path().join("model");
    copy_dir(&checkpoint(LARGE), &dir);
    change(&dir);
    match omnigrpo_testkit::load(&dir, WeightDtype::Auto) {
        Ok(_) => panic!("the checkpoint loaded"),
        Err(e) => told(&e),
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let cases = [
        ("mm_vision_tower", json!("nowhere/at-all"), "FamilyOption::vision_tower"),
        ("mm_vision_tower", json!("../secret"), "FamilyOption::vision_tower"),
        ("mm_projector_type", json!("stc_connector"), "all_in_one_small"),
        ("mm_projector_type", json!("all_in_one_small"), "face branch"),
        ("mm_hidden_size", json!(13), "mm_hidden_size"),
        ("mm_vision_select_layer", json!(-9), "hidden state -9"),
        ("prompt_form", json!("other"), "r1omni_grpo"),
        // The published sizes are known, but the weights have to be somewhere.
        ("mm_audio_tower", json!("openai/whisper-large-v3"), "FamilyOption::audio_tower"),
    ];
    for (key, value, expected) in cases {
        let message = refused(&|dir| {
            let mut config = config(dir);
            config[key] = value.clone();
            std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        });
        assert!(message.contains(expected), "expected {expected:?} in: {message}");
    }
    let message = refused(&|dir| std::fs::remove_file(dir.join("whisper/model.safetensors")).unwrap());
    assert!(message.contains("whisper: no model.safetensors"), "{message}");
}

#[test]
fn the_original_grpo_form_puts_an_empty_qwen_video_in_front() {
    let form = overrides("prompt_form", json!("r1omni_grpo"));
    let (text, kinds) = case("va");
    let got = builder(&checkpoint(SMALL), &form).build(&sample(&text, &kinds)).unwrap();
    let plain = prompt(SMALL, "va");
    assert_eq!(got.ids.len(), plain.ids.len() + 3);
    let at = plain.ids.iter().zip(&got.ids).position(|(a, b)| a != b).unwrap();
    // vision_start, video_pad, vision_end of the fixture's vocabulary.
    assert_eq!(got.ids[at..at + 3], [299, 303, 300]);
    assert_eq!(got.ids[at + 3..], plain.ids[at..]);
    assert_eq!(got.instruction, plain.instruction);
}
