//! Qwen3-VL, from rows to gradients, against `transformers` 5.23: patches, prompts with the times of frames, positions, the tower
//! with its deep features.

use omnigrpo_data::{MediumOptions, MediumRef, MediumSource};
use omnigrpo_models::{
    Checkpoint, FrameRule, GroupStream, MediaSettings, MediumShape, Memories, Model, PackedStream, Prompt,
    RouterPlan, Training, probe_medium,
};
use omnigrpo_ops::Part;
use omnigrpo_text::MediumKind;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::rows::{QWEN3_VL, builder, cases_of, check_plans, dataset_of, prompt_of};
use omnigrpo_testkit::{
    Golden, backward, check_forward, check_gradients, check_gradients_of, checkpoint, copy_dir, golden,
    in_order, model_of, sketch, train_all, training,
};

fn cases() -> impl Iterator<Item = (&'static str, String)> {
    cases_of(&QWEN3_VL)
}

fn prompt(name: &str, case: &str) -> Prompt {
    prompt_of("qwen3_vl", &checkpoint(name), case)
}

fn inputs(case: &str) -> Golden {
    Golden::read(&format!("qwen3_vl/{case}.safetensors"))
}

fn expected(name: &str, case: &str) -> Golden {
    Golden::read(&format!("qwen3_vl/{case}.{name}.safetensors"))
}

#[test]
fn ids_positions_and_patches_equal_the_reference() {
    for (name, case) in cases() {
        let (prompt, want) = (prompt(name, &case), expected(name, &case));
        assert_eq!(prompt.ids, want.ids("prompt_ids"), "{name} {case}");
        let (positions, len) = (&want.i["position_ids"], prompt.ids.len());
        for (axis, want) in positions.chunks(len).enumerate() {
            let got: Vec<i64> = prompt.positions.iter().map(|p| i64::from(p[axis])).collect();
            assert_eq!(got, want, "{name} {case} axis {axis}");
        }
        assert_eq!(i64::from(prompt.next_position), positions.iter().max().unwrap() + 1);
        for (i, m) in in_order(&prompt).into_iter().enumerate() {
            let medium = &prompt.media[m];
            let MediumShape::Patches(grid) = medium.shape else { panic!("{name} {case}") };
            let want_grid: Vec<usize> = want.i["grids"][3 * i..][..3].iter().map(|&n| n as usize).collect();
            assert_eq!([grid.t, grid.h, grid.w], want_grid[..], "{name} {case}, medium {i}");
            // Stored as f32; frames are scaled in another order than pictures.
            for (k, (a, b)) in sketch(&medium.data).iter().zip(&want.f["pixels"][9 * i..]).enumerate() {
                let bound = 1e-4 + 1e-6 * f64::from(b.abs());
                assert!(
                    (a - f64::from(*b)).abs() <= bound,
                    "{name} {case}, medium {i}: sketch {k} is {a} for {b}"
                );
            }
        }
    }
}

/// A slice is shown with the middle of its frames' times, rounded as Python rounds (0.25 to 0.2).
#[test]
fn slices_of_a_video_have_their_times_as_text() {
    let text = |case: &str| {
        let prompt = prompt("qwen3_vl", case);
        let builder = builder(&checkpoint("qwen3_vl"), MediaSettings::default());
        let ids: Vec<u32> = prompt.ids.iter().copied().filter(|&id| id != 303).collect();
        builder.tokenizer().decode(&ids, false).unwrap()
    };
    let slice = |at: &str| format!("<{at} seconds><|vision_start|><|vision_end|>");
    let three = format!("<|vision_start|>{}{}{}<|vision_end|>", slice("0.2"), slice("0.8"), slice("1.3"));
    assert!(text("D").contains(&three), "{}", text("D"));
    let two = format!("then <|vision_start|>{}{}<|vision_end|> and", slice("0.2"), slice("1.2"));
    assert!(text("E").contains(&two), "{}", text("E"));
}

#[test]
fn plans_from_headers_are_what_decoding_gives() {
    check_plans(&builder(&checkpoint("qwen3_vl"), MediaSettings::default()), &dataset_of("qwen3_vl"));
}

/// Features of all levels, one below the other.
#[test]
fn features_logits_and_logprobs_equal_the_reference() {
    for (name, case) in cases() {
        let model = model_of(name);
        let (want, inputs) = (expected(name, &case), inputs(&case));
        let prompt = prompt(name, &case);
        let completion = inputs.ids("completion_ids");
        check_forward(&format!("{name} {case}"), &model, prompt, &completion, &want);
    }
}

/// The mergers of deep features and the learned positions among them.
#[test]
fn every_gradient_equals_the_reference() {
    for (name, case) in cases() {
        let model = model_of(name);
        let (want, inputs, prompt) = (expected(name, &case), inputs(&case), prompt(name, &case));
        let completion = inputs.ids("completion_ids");
        for recompute in [false, true] {
            backward(&model, &prompt, &completion, &inputs.f["coefficients"], training(recompute));
            let compared = check_gradients(&model, &want, "", 1e-3);
            let all = model.params().len();
            let llm = model.params().iter().filter(|p| p.part() == Part::Llm).count();
            assert_eq!(compared, if case == "B" { llm } else { all }, "{name} {case}");
        }
    }
}

/// The loss that balances the use of experts, of each router, and its gradients.
#[test]
fn losses_of_routers_equal_the_reference() {
    let (name, case) = ("qwen3_vl_moe", "E");
    let (model, want, prompt) = (model_of(name), expected(name, case), prompt(name, case));
    let completion = inputs(case).ids("completion_ids");
    let stream =
        PackedStream::new(&[GroupStream { prompt: &prompt, completions: vec![&completion] }]).unwrap();
    let step_tokens = [prompt.ids.len() + completion.len() - 1, completion.len()];
    for recompute in [false, true] {
        train_all(&model);
        let router = RouterPlan { aux: 1.0, z: 0.0 };
        let how = Training { router, step_tokens, recompute, ..Training::default() };
        let features = [model.encode_prompt(&prompt).unwrap()];
        let pass = model.train_pass(&stream, &features, how, None).unwrap();
        let router = pass.router().unwrap();
        let gradients = pass.backward(&vec![0.0; stream.num_targets()], None).unwrap();
        model.backward_media(&[&prompt], &features, Memories::default(), gradients, how).unwrap();
        let (got, want_loss) = (router.losses()[0], f64::from(want.f["balance"][0]));
        assert!((got - want_loss).abs() <= 1e-5 * want_loss, "{got} for {want_loss}");
        let compared = balance_gradients(&model, &want);
        assert!(compared > 100, "only {compared} gradients");
    }
}

/// Compares the gradients of the loss of routers. Weights behind the last router have none.
fn balance_gradients(model: &Model, want: &Golden) -> usize {
    let behind = ["model.language_model.norm.weight", "lm_head.weight", "layers.3.mlp.experts."];
    let of_loss: Vec<_> = model
        .params()
        .iter()
        .filter(|p| !behind.iter().any(|name| p.name().contains(name)))
        .cloned()
        .collect();
    check_gradients_of(&of_loss, want, "balance.", 1e-3)
}

#[test]
fn parts_and_names_are_those_of_the_modules() {
    for (name, _) in QWEN3_VL {
        let model = model_of(name);
        let format = model.family().format();
        for param in model.params() {
            let part = match param.name() {
                n if n.contains("merger") => Part::Projector,
                n if n.starts_with("model.visual.") => Part::Vision,
                _ => Part::Llm,
            };
            assert_eq!(param.part(), part, "{}", param.name());
            assert_eq!(format.published_name(param.name()).as_deref(), Some(param.name()));
            assert_eq!(format.module_name(param.name()), param.name());
        }
    }
}

/// Missing keys of a processor file have the defaults of the class of `transformers` that reads it.
#[test]
fn a_video_processor_file_may_be_short() {
    let dir = TempDir::new().unwrap();
    copy_dir(&checkpoint("qwen3_vl"), dir.path());
    std::fs::write(dir.path().join("video_preprocessor_config.json"), "{}").unwrap();
    let (short, whole) = (prompt_of("qwen3_vl", dir.path(), "D"), prompt("qwen3_vl", "D"));
    assert_eq!(short, whole);
}

/// The video processor's own rule: an odd number of frames, and one bound on the pixels of all of them.
#[test]
fn frames_may_be_those_of_the_video_processor() {
    let opened = Checkpoint::open(&checkpoint("qwen3_vl")).unwrap();
    let processor = opened.family().processor();
    let clip = |options: MediumOptions| MediumRef {
        kind: MediumKind::Video,
        source: MediumSource::Path(golden("media/clip.gif")),
        options,
    };
    let shape = |medium: &MediumRef, total_pixels: Option<u64>| {
        let mut settings = MediaSettings { rule: FrameRule::Processor, ..MediaSettings::default() };
        (settings.video.max_frames, settings.video.total_pixels) = (Some(7), total_pixels);
        let plan =
            processor.plan(medium, &probe_medium(medium, &settings.limits).unwrap(), &settings).unwrap();
        let made = processor.prepare(medium, &settings).unwrap();
        assert_eq!(plan.shape, made.shape);
        let grid = made.shape.patches().unwrap();
        ([grid.t, grid.h, grid.w], made.frame_times_secs)
    };
    // Seven of eight frames, at 56 × 56 px.
    let plain = clip(MediumOptions::default());
    assert_eq!(shape(&plain, None), ([4, 4, 4], vec![0.0, 0.5, 1.0, 2.0, 2.5, 3.0, 3.5]));
    assert_eq!(shape(&plain, Some(8 * 32 * 32)).0, [4, 2, 2]);
    // The row decides.
    let own = clip(MediumOptions { nframes: Some(2), max_pixels: Some(12_544), ..MediumOptions::default() });
    assert_eq!(shape(&own, None), ([1, 8, 8], vec![0.0, 3.5]));
    // Other families have no such processor.
    let settings = MediaSettings { rule: FrameRule::Processor, ..MediaSettings::default() };
    opened.family().check_settings(&settings).unwrap();
    for name in ["qwen2_5_vl_tied", "internvl_hf"] {
        let other = Checkpoint::open(&checkpoint(name)).unwrap();
        let why = other.family().check_settings(&settings).unwrap_err().to_string();
        assert!(
            why.contains("MediaSettings::rule has no effect")
                && why.contains("video processor does not choose frames"),
            "{why}"
        );
    }
}

#[test]
fn what_a_configuration_cannot_mean_is_an_error() {
    type Change = (&'static str, fn(&mut Value), &'static str);
    let refused: [Change; 8] = [
        (
            "config.json",
            |c| c["vision_config"]["deepstack_visual_indexes"] = json!([0, 4]),
            "deepstack_visual_indexes is [0, 4]; expected ascending indices of the tower's 4 blocks, from 0",
        ),
        ("config.json", |c| c["vision_config"]["deepstack_visual_indexes"] = json!([2, 1]), "ascending"),
        (
            "config.json",
            |c| c["text_config"]["num_hidden_layers"] = 3.into(),
            "lists 3 blocks; expected fewer than the 3 blocks",
        ),
        (
            "config.json",
            |c| c["vision_config"]["num_position_embeddings"] = 24.into(),
            "num_position_embeddings is 24; expected a square number",
        ),
        ("config.json", |c| c["vision_config"]["hidden_act"] = "silu".into(), "hidden_act is \"silu\""),
        (
            "config.json",
            |c| c["text_config"]["rope_scaling"]["mrope_interleaved"] = false.into(),
            "mrope_interleaved is false",
        ),
        (
            "config.json",
            |c| c["text_config"]["rope_scaling"]["mrope_section"] = json!([4, 2, 3]),
            "expected three sizes that sum to 8",
        ),
        ("preprocessor_config.json", |c| c["patch_size"] = 14.into(), "those of the tower are [16, 2, 2]"),
    ];
    for (file, change, part) in refused {
        let dir = TempDir::new().unwrap();
        copy_dir(&checkpoint("qwen3_vl"), dir.path());
        let path = dir.path().join(file);
        let mut json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        std::fs::write(path, json.to_string()).unwrap();
        let error = Checkpoint::open(dir.path()).err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    }
}
