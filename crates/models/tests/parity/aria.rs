//! Aria, from rows to gradients, against `transformers` 5.23: pictures, prompts, the tower with its masks, experts.

use std::collections::BTreeMap;
use std::path::Path;

use omnigrpo_media::aria::AriaProcessor;
use omnigrpo_media::{Limits as MediaLimits, Orientation, load_image};
use omnigrpo_models::{
    Arithmetic, Checkpoint, GroupStream, LoadOptions, MediaSettings, MediumShape, Memories, Model,
    PackedStream, Prompt, Quantization, RouterPlan, Training, WeightDtype,
};
use omnigrpo_ops::{ParamDtype, Part, QuantBits};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::rows::{ARIA, builder, cases_of, check_plans, dataset_of, prompt_of, settings};
use omnigrpo_testkit::{
    Golden, assert_close, backward, card, case_prompt, check_forward, check_gradients, checkpoint, copy_dir,
    golden, in_order, max_diff, model_of, sketch, take_gradients, train_adapters, train_all, training,
    weight_bits,
};

fn cases() -> impl Iterator<Item = (&'static str, String)> {
    cases_of(&ARIA)
}

fn prompt(name: &str, case: &str) -> Prompt {
    prompt_of("aria", &checkpoint(name), case)
}

fn inputs(case: &str) -> Golden {
    Golden::read(&format!("aria/{case}.safetensors"))
}

fn expected(name: &str, case: &str) -> Golden {
    Golden::read(&format!("aria/{case}.{name}.safetensors"))
}

fn logprobs(model: &Model, prompt: &Prompt, completion: &[u32]) -> Vec<f32> {
    let stream = PackedStream::new(&[GroupStream { prompt, completions: vec![completion] }]).unwrap();
    model.score(&stream, &[model.encode_prompt(prompt).unwrap()], 1.0).unwrap().0
}

/// Colours and masks of squares `[n, 4, side, side]`.
fn planes(data: &[f32], side: usize) -> [Vec<f32>; 2] {
    let plane = side * side;
    let squares = data.chunks_exact(4 * plane);
    let colours = squares.clone().flat_map(|square| square[..3 * plane].to_vec()).collect();
    [colours, squares.flat_map(|square| square[3 * plane..].to_vec()).collect()]
}

/// Sketches of equal numbers: they are stored as f32.
fn assert_same_sketch(got: &[f32], want: &[f32], what: &str) {
    for (i, (a, b)) in sketch(got).iter().zip(want).enumerate() {
        let bound = 1e-4 + 1e-6 * f64::from(b.abs());
        assert!((a - f64::from(*b)).abs() <= bound, "{what}: sketch {i} is {a} for {b}");
    }
}

#[test]
fn ids_pixels_and_masks_equal_the_reference() {
    for (name, case) in cases() {
        let (prompt, want) = (prompt(name, &case), expected(name, &case));
        assert_eq!(prompt.ids, want.ids("prompt_ids"), "{name} {case}");
        for (i, m) in in_order(&prompt).into_iter().enumerate() {
            let medium = &prompt.media[m];
            let MediumShape::Masked { side_px: side, .. } = medium.shape else { panic!("{name} {case}") };
            let [colours, masks] = planes(&medium.data, side);
            assert_same_sketch(
                &colours,
                &want.f["pixels"][9 * i..][..9],
                &format!("{name} {case}, pixels {i}"),
            );
            assert_same_sketch(&masks, &want.f["masks"][9 * i..][..9], &format!("{name} {case}, masks {i}"));
        }
        let positions: Vec<[u32; 3]> = (0..prompt.ids.len() as u32).map(|p| [p; 3]).collect();
        assert_eq!((prompt.positions, prompt.next_position), (positions, prompt.ids.len() as u32));
    }
}

/// Squares of 490 and 980 px, whole and split.
#[test]
fn pictures_of_the_published_sizes_equal_transformers() {
    let want: Value = serde_json::from_slice(&std::fs::read(golden("aria/pictures.json")).unwrap()).unwrap();
    let processor = |side: &Value, split: bool| AriaProcessor {
        side_px: side.as_u64().unwrap() as u32,
        min_side_px: 336,
        split: if split { AriaProcessor::published_split() } else { Vec::new() },
        mean: [0.5; 3],
        std: [0.5; 3],
    };
    let pictures = want["pictures"].as_array().unwrap();
    assert_eq!(pictures.len(), 8);
    for row in pictures {
        let what = format!("{} {} {}", row[0], row[1], row[2]);
        let image = load_image(
            &golden("media").join(row[0].as_str().unwrap()),
            Orientation::default(),
            &MediaLimits::default(),
        )
        .unwrap();
        let own = processor(&row[1], row[2].as_bool().unwrap());
        let (data, side) = (own.process_image(&image).unwrap(), own.side_px as usize);
        let [colours, masks] = planes(&data, side);
        let real: Vec<Value> = masks
            .chunks_exact(side * side)
            .map(|mask| {
                let width = mask[..side].iter().sum::<f32>() as usize;
                let height = mask.chunks_exact(side).map(|row| row[0]).sum::<f32>() as usize;
                serde_json::json!([height, width])
            })
            .collect();
        assert_eq!(Value::from(real), row[3], "{what}");
        let numbers: Vec<f32> =
            row[4].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
        assert_same_sketch(&colours, &numbers, &what);
    }
    for row in want["counts"].as_array().unwrap() {
        let [width, height] = [&row[0], &row[1]].map(|n| n.as_u64().unwrap() as u32);
        let count = processor(&row[2], true).num_squares(width, height).unwrap();
        assert_eq!(count as u64, row[3].as_u64().unwrap(), "{row}");
    }
}

#[test]
fn plans_from_headers_are_what_decoding_gives() {
    let rows = dataset_of("aria");
    for (name, _) in ARIA {
        for max_tiles in [None, Some(1), Some(4)] {
            let builder = builder(&checkpoint(name), MediaSettings { max_tiles, ..MediaSettings::default() });
            check_plans(&builder, &rows);
        }
    }
}

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

/// Router and experts included. An expert that got no token has a gradient of zeros.
#[test]
fn every_gradient_equals_the_reference() {
    let mut idle = 0;
    for (name, case) in cases() {
        let model = model_of(name);
        let (want, inputs, prompt) = (expected(name, &case), inputs(&case), prompt(name, &case));
        let completion = inputs.ids("completion_ids");
        for recompute in [false, true] {
            backward(&model, &prompt, &completion, &inputs.f["coefficients"], training(recompute));
            let compared = check_gradients(&model, &want, "", 1e-3);
            let least = if case == "B" { 27 } else { 75 };
            assert!(compared >= least, "{name} {case}: only {compared} gradients");
        }
        for &expert in &want.i["idle"] {
            for layer in ["fc1", "fc2"] {
                let weight = format!("language_model.model.layers.0.mlp.experts.{layer}.weight");
                let param = model.params().iter().find(|p| p.name() == weight).unwrap();
                let size = param.len() / param.shape()[0];
                let grad = param.grad().unwrap();
                let own = &grad[expert as usize * size..][..size];
                assert!(own.iter().all(|&g| g == 0.0), "{name} {case}: expert {expert} got no token");
                idle += 1;
            }
        }
    }
    assert!(idle > 0);
}

#[test]
fn a_group_equals_separate_sequences() {
    let coefficient = |c: usize, t: usize| ((c * 17 + t * 5 + 1) as f32 * 1.7).sin();
    let completions: [&[u32]; 3] = [&[7, 100, 200, 31, 5], &[44], &[9, 8, 250]];
    for (name, case) in [("aria", "E"), ("aria_own", "C")] {
        let (model, prompt) = (model_of(name), prompt(name, case));
        train_all(&model);
        let run = |streams: &[Vec<usize>]| {
            let mut logp = BTreeMap::new();
            for members in streams {
                let of = members.iter().map(|&c| completions[c]).collect();
                let stream = PackedStream::new(&[GroupStream { prompt: &prompt, completions: of }]).unwrap();
                let features = [model.encode_prompt(&prompt).unwrap()];
                let pass = model.train_pass(&stream, &features, Training::default(), None).unwrap();
                let (mut dlogp, mut at) = (Vec::new(), 0);
                for &c in members {
                    let n = completions[c].len();
                    logp.insert(c, pass.logprobs[at..at + n].to_vec());
                    dlogp.extend((0..n).map(|t| coefficient(c, t)));
                    at += n;
                }
                let gradients = pass.backward(&dlogp, None).unwrap();
                model
                    .backward_media(
                        &[&prompt],
                        &features,
                        Memories::default(),
                        gradients,
                        Training::default(),
                    )
                    .unwrap();
            }
            (logp, take_gradients(&model))
        };
        let (packed, packed_grads) = run(&[vec![0, 1, 2]]);
        let (separate, separate_grads) = run(&[vec![0], vec![1], vec![2]]);
        for (c, want) in &separate {
            assert!(max_diff(&packed[c], want) <= 1e-5, "{name} {c}");
        }
        assert_close(&packed_grads, &separate_grads, 5e-5, name);
    }
}

/// Losses of routers in a packed group: a prompt's token weighs as many as it stands for. The z-loss is a mean over tokens, so
/// it is that of separate sequences; the use of experts is compared where the sequences are equal.
#[test]
fn losses_of_routers_count_a_prompt_for_each_completion() {
    let (model, prompt) = (model_of("aria"), prompt("aria", "E"));
    train_all(&model);
    let run = |streams: &[Vec<&[u32]>], router: RouterPlan, recompute: bool| {
        let tokens = |c: &&[u32]| prompt.ids.len() + c.len() - 1;
        let all = || streams.iter().flatten();
        let step_tokens = [all().map(tokens).sum(), all().map(|c| c.len()).sum()];
        let training = Training { router, step_tokens, recompute, ..Training::default() };
        let mut losses = [0.0; 2];
        for completions in streams {
            let groups = [GroupStream { prompt: &prompt, completions: completions.clone() }];
            let stream = PackedStream::new(&groups).unwrap();
            let features = [model.encode_prompt(&prompt).unwrap()];
            let pass = model.train_pass(&stream, &features, training, None).unwrap();
            let router = pass.router().unwrap();
            let gradients = pass.backward(&vec![0.0; stream.num_targets()], None).unwrap();
            losses.iter_mut().zip(router.losses()).for_each(|(sum, own)| *sum += own);
            model.backward_media(&[&prompt], &features, Memories::default(), gradients, training).unwrap();
        }
        (losses, take_gradients(&model))
    };
    let (z, aux) = (RouterPlan { aux: 0.0, z: 1.0 }, RouterPlan { aux: 1.0, z: 0.0 });
    let (a, b, c): (&[u32], &[u32], &[u32]) = (&[7, 100, 200, 31, 5], &[44, 8], &[9, 8, 250]);
    let (packed, packed_grads) = run(&[vec![a, b, c]], z, false);
    let (separate, separate_grads) = run(&[vec![a], vec![b], vec![c]], z, false);
    assert!((packed[1] - separate[1]).abs() < 1e-5 * packed[1], "{packed:?} {separate:?}");
    assert_close(&packed_grads, &separate_grads, 5e-5, "z");
    let (thrice, thrice_grads) = run(&[vec![a, a, a]], aux, false);
    let (once, once_grads) = run(&[vec![a]], aux, false);
    assert!(thrice.iter().zip(once).all(|(a, b)| (a - b).abs() < 1e-4), "{thrice:?} {once:?}");
    assert_close(&thrice_grads, &once_grads, 5e-5, "aux");
    // Counted once, whether blocks are recomputed or not.
    let (again, again_grads) = run(&[vec![a, a, a]], aux, true);
    assert!(again == thrice && again_grads == thrice_grads);
    // Without them nothing is asked of a pass.
    let stream = PackedStream::new(&[GroupStream { prompt: &prompt, completions: vec![a] }]).unwrap();
    let features = [model.encode_prompt(&prompt).unwrap()];
    assert!(model.train_pass(&stream, &features, Training::default(), None).unwrap().router().is_none());
}

/// A copy of a checkpoint whose tensors have other names.
fn renamed(name: &str, rename: impl Fn(&str) -> String) -> TempDir {
    let dir = TempDir::new().unwrap();
    copy_dir(&checkpoint(name), dir.path());
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let views: Vec<(String, TensorView)> =
        file.tensors().into_iter().map(|(name, view)| (rename(&name), view)).collect();
    safetensors::serialize_to_file(views, None, &path).unwrap();
    dir
}

/// Names of `state_dict()`: the same model.
#[test]
fn names_in_memory_and_those_of_the_models_own_code_are_read() {
    let model = model_of("aria");
    let in_memory = renamed("aria", |name| match name.strip_prefix("language_model.model.") {
        Some(rest) => {
            let rest = rest.replace("experts.fc1.weight", "experts.gate_up_proj");
            format!("model.language_model.{}", rest.replace("experts.fc2.weight", "experts.down_proj"))
        }
        None => name.strip_prefix("language_model.").map_or_else(|| format!("model.{name}"), str::to_owned),
    });
    let again = omnigrpo_testkit::load(in_memory.path(), WeightDtype::Auto).unwrap();
    assert!(weight_bits(&again) == weight_bits(&model));
    // PEFT's names of the modules.
    let format = model.family().format();
    for (published, module) in [
        ("language_model.model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj"),
        ("language_model.lm_head", "lm_head"),
        ("vision_tower.encoder.layers.1.mlp.fc1", "model.vision_tower.encoder.layers.1.mlp.fc1"),
        (
            "language_model.model.layers.0.mlp.experts.fc1.weight",
            "model.language_model.layers.0.mlp.experts.gate_up_proj",
        ),
        (
            "language_model.model.layers.0.mlp.experts.fc2",
            "model.language_model.layers.0.mlp.experts.down_proj",
        ),
    ] {
        assert_eq!(format.module_name(published), module);
        let with_ending = |name: &str, of: &str| match name.ends_with(".weight") || of.contains("experts") {
            true => name.to_owned(),
            false => format!("{name}.weight"),
        };
        let want = format!("{}.weight", published.trim_end_matches(".weight"));
        assert_eq!(format.published_name(&with_ending(module, module)).unwrap(), want);
    }

    // Saved, a checkpoint of the model's own code is one of transformers.
    let own = model_of("aria_own");
    let dir = TempDir::new().unwrap();
    let saved = dir.path().join("saved");
    own.save_pretrained(&saved).unwrap();
    let bytes = std::fs::read(saved.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for name in [
        "vision_tower.embeddings.patch_embedding.weight",
        "multi_modal_projector.layer_norm.weight",
        "multi_modal_projector.feed_forward.linear_in.weight",
        "multi_modal_projector.cross_attn.layer_norm_kv.bias",
    ] {
        assert!(file.tensor(name).is_ok(), "{name}");
    }
    let config: Value = serde_json::from_slice(&std::fs::read(saved.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["text_config"]["intermediate_size"], 12);
    assert_eq!(config["text_config"]["model_type"], "aria_text");
    assert_eq!(config["vision_config"]["model_type"], "idefics3_vision");
    assert!(config.get("auto_map").is_none());
    let again = omnigrpo_testkit::load(&saved, WeightDtype::Auto).unwrap();
    assert!(weight_bits(&again) == weight_bits(&own));
    let (prompt, completion) = (prompt("aria_own", "E"), inputs("E").ids("completion_ids"));
    assert_eq!(logprobs(&again, &prompt, &completion), logprobs(&own, &prompt, &completion));
}

/// Frozen experts of 8 and 4 bits: a model with them is that of the same weights widened, in values and in the gradients of
/// adapters, and an outline says what it will take.
#[test]
fn experts_of_few_bits() {
    let sizes = |name: &str, sizes: Value| {
        let dir = TempDir::new().unwrap();
        copy_dir(&checkpoint(name), dir.path());
        let path = dir.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let text = if name == "aria" { &mut config["text_config"] } else { &mut config };
        text.as_object_mut().unwrap().extend(sizes.as_object().unwrap().clone());
        std::fs::write(&path, config.to_string()).unwrap();
        let opened = Checkpoint::open(dir.path()).unwrap();
        (dir, opened)
    };
    let (_dir, aria) =
        sizes("aria", json!({"hidden_size": 64, "intermediate_size": 72, "initializer_range": 0.1}));
    experts_of_few_bits_in(&aria);
    let (_dir, alone) = sizes(
        "qwen3_moe",
        json!({"hidden_size": 64, "moe_intermediate_size": 72, "num_experts_per_tok": 9, "initializer_range": 0.1}),
    );
    experts_of_few_bits_in(&alone);
}

fn experts_of_few_bits_in(opened: &Checkpoint) {
    let prompt = case_prompt(
        "B",
        &Model::load(opened, &LoadOptions { random: Some(5), ..LoadOptions::default() }).unwrap(),
    );
    let completions: [&[u32]; 2] = [&[7, 100, 200, 31, 5], &[44]];
    for bits in [QuantBits::Eight, QuantBits::Four] {
        let keep = |_: &str, _: Part| false;
        let quantization = Some(Quantization { bits, keep: &keep });
        let dense = LoadOptions { dtype: WeightDtype::Float32, ..LoadOptions::default() };
        // With float32 inputs, a quantised model and its widened weights multiply the same numbers.
        let arithmetic = Arithmetic { keeps_inputs: true, ..Arithmetic::default() };
        let options = LoadOptions { quantization, arithmetic, ..dense };
        let mut few = Model::load(opened, &LoadOptions { random: Some(5), ..options }).unwrap();
        let mut wide = Model::load(opened, &LoadOptions { random: Some(5), ..dense }).unwrap();
        let mut on_card =
            Model::load(opened, &LoadOptions { random: Some(5), device: card(), ..options }).unwrap();
        let outline =
            Model::load(opened, &LoadOptions { outline: true, random: Some(1), ..options }).unwrap();
        let bytes = |model: &Model| model.params().iter().map(|p| p.num_bytes()).sum::<usize>();
        assert_eq!(bytes(&outline), bytes(&few));
        for (few, wide) in few.params().iter().zip(wide.params()) {
            let is_expert = few.name().contains(".experts.");
            let is_quantised = few.dtype() == ParamDtype::Quantised(bits);
            assert!(is_quantised || !is_expert, "{}", few.name());
            assert!(
                !is_quantised || !few.name().contains("router") && !few.name().contains(".gate."),
                "{}",
                few.name()
            );
            if is_expert {
                // 8.5 or 4.5 bits a weight, and what fills rows up to whole blocks.
                assert!(few.num_bytes() * 8 <= few.len() * (2 * bits.bits() + 1), "{}", few.name());
            }
            wide.store(&few.read().f32()).unwrap();
        }
        let run = |model: &mut Model| {
            train_adapters(model, &["all-linear", "experts"]);
            let groups = [GroupStream { prompt: &prompt, completions: completions.to_vec() }];
            let stream = PackedStream::new(&groups).unwrap();
            let pass = model.train_pass(&stream, &[Vec::new()], Training::default(), None).unwrap();
            let logprobs = pass.logprobs.clone();
            pass.backward(&[1.0, -0.5, 0.25, 2.0, -1.0, 0.75], None).unwrap();
            (logprobs, take_gradients(model))
        };
        let ((got, few_grads), (want, wide_grads)) = (run(&mut few), run(&mut wide));
        assert!(max_diff(&got, &want) <= 1e-4, "{bits:?}: {}", max_diff(&got, &want));
        assert_close(&few_grads, &wide_grads, 1e-3, "quantised");
        // The kernels of a GPU round to bf16 what they multiply.
        let (got, grads) = run(&mut on_card);
        assert!(max_diff(&got, &want) <= 0.03, "{bits:?} on a card: {}", max_diff(&got, &want));
        assert_close(&grads, &wide_grads, 0.1, "quantised, on a card");
    }
}

/// Memory of the published sizes, from their configurations, as the pages give it: 4.5 or 8.5 bits for each weight of a linear layer or an expert.
#[test]
fn published_mixtures_fit_where_they_are_quantised() {
    for (size, sidecars, gigabytes) in [
        ("aria_25B", "aria", [50.6, 27.4, 15.0]),
        ("qwen3_vl_30B-A3B", "qwen3_vl_moe", [62.1, 33.6, 18.4]),
        ("qwen3_vl_235B-A22B", "qwen3_vl_moe", [471.3, 251.6, 134.4]),
        ("internvl_3.5_30B-A3B", "internvl3_5_moe_original", [61.7, 33.4, 18.3]),
    ] {
        let dir = TempDir::new().unwrap();
        copy_dir(&checkpoint(sidecars), dir.path());
        std::fs::copy(golden("published").join(size).join("config.json"), dir.path().join("config.json"))
            .unwrap();
        if let Ok(text) = std::fs::read_to_string(dir.path().join("preprocessor_config.json")) {
            let text = text.replace(": 112", ": 980").replace(": 28", ": 448");
            std::fs::write(dir.path().join("preprocessor_config.json"), text).unwrap();
        }
        let got = weights_in_gigabytes(dir.path());
        let near = got.iter().zip(gigabytes).all(|(got, want)| (got - want).abs() < 0.05);
        assert!(near, "{size}: {got:?} GB, not {gigabytes:?}");
    }
}

/// Returns the bytes of the weights in bf16, and with frozen weights in 8 and in 4 bits, in units of 10⁹.
fn weights_in_gigabytes(dir: &Path) -> [f64; 3] {
    let opened = Checkpoint::open(dir).unwrap();
    let bytes = |bits: Option<QuantBits>| {
        let keep = |_: &str, _: Part| false;
        let quantization = bits.map(|bits| Quantization { bits, keep: &keep });
        let options = LoadOptions { dtype: WeightDtype::BFloat16, quantization, ..LoadOptions::default() };
        let outline =
            Model::load(&opened, &LoadOptions { outline: true, random: Some(1), ..options }).unwrap();
        outline.params().iter().map(|p| p.num_bytes()).sum::<usize>() as f64 / 1e9
    };
    [None, Some(QuantBits::Eight), Some(QuantBits::Four)].map(bytes)
}

#[test]
fn parts_are_told_apart() {
    for (name, _) in ARIA {
        for param in model_of(name).params() {
            let part = match param.name() {
                n if n.starts_with("language_model.") => Part::Llm,
                n if n.starts_with("multi_modal_projector.") => Part::Projector,
                _ => Part::Vision,
            };
            assert_eq!(param.part(), part, "{}", param.name());
        }
    }
}

/// The end of a turn is ordinary text here: it stops as a string, and an answer to imitate ends in its tokens.
#[test]
fn a_turn_ends_in_ordinary_text() {
    let rows = dataset_of("aria");
    let builder = builder(&checkpoint("aria"), MediaSettings::default());
    assert_eq!(builder.stops().strings, ["<|im_end|>"]);
    let end = builder.tokenizer().encode_control("<|im_end|>", &[]).unwrap();
    assert!(end.len() > 1);
    let mut sample = rows.get(1).unwrap();
    sample.solution = Some("three".into());
    let target = builder.build_sft(&sample, 0).unwrap().target;
    assert_eq!(target, builder.tokenizer().encode_control("three<|im_end|>", &[]).unwrap());
    // A string that the run gives too is there once.
    let mut own = settings(MediaSettings::default());
    own.stop_strings = vec!["<|im_end|>".into(), "END".into()];
    let opened = Checkpoint::open(&checkpoint("aria")).unwrap();
    let builder = omnigrpo_models::PromptBuilder::open(&opened, own).unwrap();
    assert_eq!(builder.stops().strings, ["<|im_end|>", "END"]);
}

#[test]
fn settings_choose_among_squares() {
    let sample = dataset_of("aria").get(5).unwrap();
    let tokens = |name: &str, change: &dyn Fn(&mut MediaSettings)| {
        let mut media = MediaSettings::default();
        change(&mut media);
        builder(&checkpoint(name), media).build(&sample).unwrap().spans.iter().map(|s| s.len).sum::<usize>()
    };
    // A picture of 90 × 60: one square of 8 tokens, one of 4, or split into squares of 4 and 8.
    assert_eq!(tokens("aria", &|_| ()), 8);
    assert_eq!(tokens("aria", &|m| m.image.max_pixels = Some(112 * 112 - 1)), 4);
    assert_eq!(tokens("aria_own", &|m| m.max_tiles = Some(1)), 4);
    let split = tokens("aria_own", &|_| ());
    assert!(split > 4 && split % 4 == 0, "{split}");
    assert!(tokens("aria", &|m| m.max_tiles = Some(4)) <= 4 * 8);
    // Bounds that would do nothing are refused.
    let opened = Checkpoint::open(&checkpoint("aria")).unwrap();
    let mut media = MediaSettings::default();
    media.image.min_pixels = Some(1000);
    assert!(opened.family().check_settings(&media).unwrap_err().to_string().contains("max_pixels"));
}

#[test]
fn what_a_configuration_cannot_mean_is_an_error() {
    type Change = (&'static str, fn(&mut Value), &'static str);
    let refused: [Change; 9] = [
        (
            "config.json",
            |c| c["text_config"]["moe_topk"] = 9.into(),
            "moe_topk is 9, but moe_num_experts is only 8",
        ),
        (
            "config.json",
            |c| c["text_config"]["moe_num_shared_experts"] = 0.into(),
            "moe_num_shared_experts is 0",
        ),
        ("config.json", |c| c["text_config"]["mlp_bias"] = true.into(), "mlp_bias"),
        ("config.json", |c| c["image_token_index"] = 320.into(), "vocabulary of 320"),
        ("config.json", |c| c["vision_feature_layer"] = (-2).into(), "vision_feature_layer is -2"),
        (
            "config.json",
            |c| c["projector_patch_to_query_dict"] = serde_json::json!({"15": 4}),
            "the key \"15\"; expected a square number of at most 64",
        ),
        ("config.json", |c| c["projector_patch_to_query_dict"] = serde_json::json!({}), "is empty"),
        ("preprocessor_config.json", |c| c["max_image_size"] = 98.into(), "supports squares of [56, 112] px"),
        ("preprocessor_config.json", |c| c["min_image_size"] = 113.into(), "min_image_size"),
    ];
    for (file, change, part) in refused {
        let dir = TempDir::new().unwrap();
        copy_dir(&checkpoint("aria"), dir.path());
        let path: &Path = &dir.path().join(file);
        let mut json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        change(&mut json);
        std::fs::write(path, json.to_string()).unwrap();
        let error = Checkpoint::open(dir.path()).err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    }
}
