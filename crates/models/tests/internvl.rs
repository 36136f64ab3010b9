//! InternVL in both layouts, from rows to gradients: against `transformers` 5.23 (hf layout) and against the model written
//! out in PyTorch (original layout). Data and scripts: `tests/golden/README.md`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::collections::BTreeMap;
use std::path::Path;

use omnigrpo_data::RowReader;
use omnigrpo_guard::told;
use omnigrpo_models::{
    Checkpoint, Features, GroupStream, MediaSettings, MediumShape, Memories, Model, PackedStream, Prompt,
    Training, WeightDtype,
};
use omnigrpo_ops::Part;
use omnigrpo_testkit::rows::{INTERNVL, builder, cases_of, check_plans, dataset, prompt};
use omnigrpo_testkit::{
    Golden, assert_close, check_forward, check_gradients, checkpoint, copy_dir, golden, in_order, max_diff,
    model_of, take_gradients, train_all, training, weight_bits,
};
use serde_json::json;
use tempfile::TempDir;

/// Every checkpoint with every case it has results for.
fn cases() -> impl Iterator<Item = (&'static str, String)> {
    cases_of(&INTERNVL)
}

fn inputs(case: &str) -> Golden {
    Golden::read(&format!("internvl/{case}.safetensors"))
}

fn expected(name: &str, case: &str) -> Golden {
    Golden::read(&format!("internvl/{case}.{name}.safetensors"))
}

fn features(model: &Model, prompt: &Prompt) -> Vec<Features> {
    model.encode_prompt(prompt).unwrap()
}

fn logprobs(model: &Model, prompt: &Prompt, completion: &[u32]) -> Vec<f32> {
    let stream = PackedStream::new(&[GroupStream { prompt, completions: vec![completion] }]).unwrap();
    model.score(&stream, &[features(model, prompt)], 1.0).unwrap().0
}

#[test]
fn ids_and_pixels_equal_the_reference() {
    const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
    const STD: [f32; 3] = [0.229, 0.224, 0.225];
    for (name, case) in cases() {
        let prompt = prompt(&checkpoint(name), &case);
        assert_eq!(prompt.ids, expected(name, &case).ids("prompt_ids"), "{name} {case}");
        let got: Vec<f32> = in_order(&prompt).iter().flat_map(|&m| prompt.media[m].data.clone()).collect();
        let bytes = inputs(&case).u.get("u8").cloned().unwrap_or_default();
        let plane = 28 * 28;
        let want = bytes.iter().enumerate().map(|(i, &u)| {
            let c = i / plane % 3;
            ((f64::from(u) * (1.0 / 255.0)) as f32 - MEAN[c]) / STD[c]
        });
        assert!(got.iter().copied().eq(want), "{name} {case}: pixels differ");
        let positions: Vec<[u32; 3]> = (0..prompt.ids.len() as u32).map(|p| [p; 3]).collect();
        assert_eq!((prompt.positions, prompt.next_position), (positions, prompt.ids.len() as u32));
    }
}

/// Rows of InternVL, LLaVA and VLM-R1 write a line break behind `<image>`; users of `transformers` write none. The template of
/// the hf layout writes one of its own, as in `transformers`, so the first kind of row has two there.
#[test]
fn the_hf_template_writes_a_line_break_of_its_own() {
    let text = |name: &str, value: &str| {
        let row =
            json!({ "image": "media/shapes.png", "conversations": [{ "from": "human", "value": value }] });
        let sample = RowReader::new("rows").media_in(golden("")).sample(row).unwrap();
        let prompt = builder(&checkpoint(name), MediaSettings::default()).build(&sample).unwrap();
        prompt.text.replace("<IMG_CONTEXT>", "<image>")
    };
    for (hf, original) in [("internvl_hf", "internvl_original"), ("internvl3_5_hf", "internvl3_5_original")] {
        assert!(text(hf, "<image>What?").contains("<image>\nWhat?"));
        assert!(text(original, "<image>\nWhat?").contains("<image>\nWhat?"));
        assert!(text(hf, "<image>\nWhat?").contains("<image>\n\nWhat?"));
    }
}

#[test]
fn plans_from_headers_are_what_decoding_gives() {
    let rows = dataset();
    for (name, _) in INTERNVL {
        check_plans(&builder(&checkpoint(name), MediaSettings::default()), &rows);
    }
}

#[test]
fn features_logits_and_logprobs_equal_the_reference() {
    for (name, case) in cases() {
        let model = model_of(name);
        let (want, inputs) = (expected(name, &case), inputs(&case));
        let prompt = prompt(&checkpoint(name), &case);
        let completion = inputs.ids("completion_ids");
        check_forward(&format!("{name} {case}"), &model, prompt, &completion, &want);
    }
}

#[test]
fn every_gradient_equals_the_reference() {
    for (name, case) in cases() {
        let model = model_of(name);
        let (want, inputs) = (expected(name, &case), inputs(&case));
        let prompt = prompt(&checkpoint(name), &case);
        let completion = inputs.ids("completion_ids");
        let groups = [GroupStream { prompt: &prompt, completions: vec![&completion] }];
        let stream = PackedStream::new(&groups).unwrap();
        for recompute in [false, true] {
            train_all(&model);
            let features = [model.encode_prompt(&prompt).unwrap()];
            let pass = model.train_pass(&stream, &features, training(recompute), None).unwrap();
            let gradients = pass.backward(&inputs.f["coefficients"], None).unwrap();
            model
                .backward_media(&[&prompt], &features, Memories::default(), gradients, training(recompute))
                .unwrap();
            let compared = check_gradients(&model, &want, "", 1e-3);
            let least = if case == "B" { 25 } else { 60 };
            assert!(compared >= least, "{name} {case}: only {compared} gradients");
        }
    }
}

#[test]
fn positions_of_other_tile_sizes_are_interpolated() {
    let golden = Golden::read("internvl/interpolated.safetensors");
    for name in ["internvl_original", "internvl_hf"] {
        let model = model_of(name);
        let mut medium = (*prompt(&checkpoint(name), "C").media[0]).clone();
        medium.shape = MediumShape::Pictures { count: 2, height_px: 42, width_px: 42 };
        medium.data = golden.f["pixels"].clone();
        let rows = model.encode(&medium, &[]).unwrap().rows.to_vec();
        let d = max_diff(&rows, &golden.f["features"]);
        assert!(d <= 1e-4, "{name}: features differ by {d}");
    }
}

/// One prompt through both layouts has the same bits, and gradients that are the same numbers.
#[test]
fn both_layouts_are_one_model() {
    for (hf, original) in [
        ("internvl_hf", "internvl_original"),
        ("internvl_rms_hf", "internvl_rms_original"),
        ("internvl3_5_hf", "internvl3_5_original"),
        ("internvl3_5_moe_hf", "internvl3_5_moe_original"),
    ] {
        let (a, b) = (model_of(hf), model_of(original));
        for case in ["C", "E"] {
            let prompt = prompt(&checkpoint(hf), case);
            let completion = inputs(case).ids("completion_ids");
            assert_eq!(logprobs(&a, &prompt, &completion), logprobs(&b, &prompt, &completion), "{hf} {case}");
        }
        // Converted in memory, the weights carry the same names and bits.
        for (from, to, layout) in [(&a, &b, "original"), (&b, &a, "hf")] {
            let converted = from
                .family()
                .format()
                .convert(from.dir(), from.checkpoint().config(), from.params(), layout)
                .unwrap()
                .unwrap();
            let bits: BTreeMap<String, Vec<u32>> = converted
                .params
                .iter()
                .map(|p| (p.name().to_owned(), p.read().f32().iter().map(|x| x.to_bits()).collect()))
                .collect();
            let mut want = weight_bits(to);
            if let ("original", true) = (layout, a.decoder().tied()) {
                // The original code wants a head of its own.
                let head = want["language_model.model.embed_tokens.weight"].clone();
                want.insert("language_model.lm_head.weight".into(), head);
            }
            assert_eq!(bits.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
            assert!(bits == want, "{layout}");
        }
    }
}

/// Converted on disk: loads, gives the same bits, and comes back as it was.
#[test]
fn a_checkpoint_is_saved_in_its_layout_and_converted_on_request() {
    for (name, _) in INTERNVL {
        let model = model_of(name);
        let here = model.family().format().layout();
        let there = if here == "hf" { "original" } else { "hf" };
        let dir = TempDir::new().unwrap();
        let path = |name: &str| dir.path().join(name);

        model.save_pretrained(&path("same")).unwrap();
        model.save_as(&path("same too"), here).unwrap();
        for saved in ["same", "same too"] {
            let again = omnigrpo_testkit::load(&path(saved), WeightDtype::Auto).unwrap();
            assert_eq!(again.family().format().layout(), here);
            assert_eq!(weight_bits(&again), weight_bits(&model), "{name}");
        }

        model.save_as(&path("other"), there).unwrap();
        let other = omnigrpo_testkit::load(&path("other"), WeightDtype::Auto).unwrap();
        assert_eq!(other.family().format().layout(), there);
        assert_eq!(other.decoder().tied(), model.decoder().tied(), "{name}");
        let own = prompt(&checkpoint(name), "E");
        let completion = inputs("E").ids("completion_ids");
        assert_eq!(logprobs(&other, &own, &completion), logprobs(&model, &own, &completion), "{name}");
        // A prompt keeps its system turn on the way to hf; on the way back there is the one the original code has.
        let there_prompt = prompt(&path("other"), "E");
        if there == "hf" {
            assert_eq!(there_prompt.ids, own.ids, "{name}");
        } else {
            assert_eq!(there_prompt.ids, prompt(&checkpoint("internvl_original"), "E").ids, "{name}");
        }
        assert_eq!(there_prompt.media, own.media, "{name}");

        other.save_as(&path("back"), here).unwrap();
        let back = omnigrpo_testkit::load(&path("back"), WeightDtype::Auto).unwrap();
        let (got, mut want) = (weight_bits(&back), weight_bits(&model));
        assert_eq!(got, want, "{name}");
        want.clear();
        let ids = prompt(&path("back"), "E").ids;
        assert!(here == "hf" || ids == own.ids, "{name}");
        assert!(model.save_as(&path("nowhere"), "gguf").is_err());
    }
}

#[test]
fn what_a_layout_cannot_say_is_an_error() {
    let with = |name: &str, file: &str, change: &dyn Fn(&mut serde_json::Value)| {
        let dir = TempDir::new().unwrap();
        copy_dir(&checkpoint(name), dir.path());
        let path = dir.path().join(file);
        let mut json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        std::fs::write(&path, json.to_string()).unwrap();
        dir
    };
    let convert = |dir: &Path, layout: &str| {
        let model = omnigrpo_testkit::load(dir, WeightDtype::Auto).unwrap();
        model.save_as(&dir.join("out"), layout).unwrap_err().to_string()
    };
    let no_thumbnail = with("internvl_original", "config.json", &|c| c["use_thumbnail"] = false.into());
    assert!(convert(no_thumbnail.path(), "hf").contains("use_thumbnail is false"));
    let grey = with("internvl_hf", "preprocessor_config.json", &|c| c["image_mean"][0] = 0.5.into());
    assert!(convert(grey.path(), "original").contains("ImageNet"));

    type Change = (&'static str, fn(&mut serde_json::Value), &'static str);
    let refused: [Change; 15] = [
        (
            "internvl_original",
            |c| c["llm_config"]["architectures"][0] = "InternLM2ForCausalLM".into(),
            "InternLM2",
        ),
        (
            "internvl3_5_original",
            |c| {
                c["llm_config"]["architectures"][0] = "Qwen2MoeForCausalLM".into();
                c["llm_config"]["model_type"] = "qwen2_moe".into();
            },
            "Qwen2MoeForCausalLM (qwen2_moe); expected Qwen2 or Qwen3",
        ),
        ("internvl_original", |c| c["template"] = "phi3-chat".into(), "internvl2_5, Hermes-2"),
        ("internvl_original", |c| c["ps_version"] = "v1".into(), "ps_version"),
        ("internvl_original", |c| c["select_layer"] = (-2).into(), "select_layer is -2"),
        ("internvl_original", |c| c["force_image_size"] = 30.into(), "multiple of 14 px"),
        ("internvl_original", |c| c["max_dynamic_patch"] = 4000.into(), "maximum <= 1024"),
        ("internvl_hf", |c| c["vision_feature_layer"] = (-2).into(), "vision_feature_layer is -2"),
        ("internvl_hf", |c| c["image_token_id"] = 320.into(), "vocabulary of 320"),
        ("internvl_hf", |c| c["text_config"]["rope_scaling"]["rope_type"] = "zzz".into(), "zzz"),
        (
            "internvl_hf",
            |c| c["text_config"]["rope_scaling"]["mrope_section"] = serde_json::json!([2, 3, 3]),
            "positions of this family have one axis",
        ),
        ("internvl_original", |c| c["llm_config"]["hidden_act"] = "gelu".into(), "expected \"silu\""),
        ("internvl_original", |c| c["ps_version"] = 2.into(), "ps_version is 2; expected a string"),
        ("internvl_hf", |c| c["image_seq_length"] = "4".into(), "image_seq_length is \"4\""),
        ("internvl_hf", |c| c["vision_config"]["layer_norm_eps"] = 7.into(), "layer_norm_eps is 7e0"),
    ];
    for (name, change, part) in refused {
        let dir = with(name, "config.json", &change);
        let error = told(&Checkpoint::open(dir.path()).err().unwrap());
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn max_anyres_num_bounds_the_tiles_of_images() {
    let sample = dataset().get(0).unwrap();
    for name in ["internvl_hf", "internvl_original"] {
        let tiles = |max_tiles: Option<u32>| -> Vec<usize> {
            let media = MediaSettings { max_tiles, ..MediaSettings::default() };
            let prompt = builder(&checkpoint(name), media).build(&sample).unwrap();
            prompt.media.iter().map(|m| m.shape.pictures().unwrap()[0]).collect()
        };
        assert_eq!(tiles(None), [5, 3]);
        assert_eq!(tiles(Some(6)), [7, 7]);
        assert_eq!(tiles(Some(1)), [1, 1]);
    }
    // Bounds that would do nothing are refused before anything is read.
    let opened = Checkpoint::open(&checkpoint("internvl_hf")).unwrap();
    let mut media = MediaSettings::default();
    media.image.max_pixels = Some(1000);
    assert!(opened.family().check_settings(&media).unwrap_err().to_string().contains("max_tiles"));
    let qwen = Checkpoint::open(&checkpoint("qwen2_vl_tied")).unwrap();
    let media = MediaSettings { max_tiles: Some(3), ..MediaSettings::default() };
    assert!(qwen.family().check_settings(&media).unwrap_err().to_string().contains("max_pixels"));
}

#[test]
fn a_group_equals_separate_sequences() {
    let coefficient = |c: usize, t: usize| ((c * 17 + t * 5 + 1) as f32 * 1.7).sin();
    for (name, groups) in [
        ("internvl_hf", &["E", "B"][..]),
        ("internvl_original", &["D", "A"]),
        ("internvl_rms_original", &["C"]),
        ("internvl3_5_hf", &["E"]),
    ] {
        let model = model_of(name);
        train_all(&model);
        let prompts: Vec<Prompt> = groups.iter().map(|case| prompt(&checkpoint(name), case)).collect();
        let completions: [&[u32]; 3] = [&[7, 100, 200, 31, 5], &[44], &[9, 8, 250]];
        let run = |streams: &[Vec<(usize, usize)>]| {
            let mut logp = BTreeMap::new();
            for members in streams {
                let mut by_group: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
                members.iter().for_each(|&(g, c)| by_group.entry(g).or_default().push(c));
                let packed: Vec<GroupStream> = by_group
                    .iter()
                    .map(|(&g, cs)| GroupStream {
                        prompt: &prompts[g],
                        completions: cs.iter().map(|&c| completions[c]).collect(),
                    })
                    .collect();
                let stream = PackedStream::new(&packed).unwrap();
                let of: Vec<&Prompt> = by_group.keys().map(|&g| &prompts[g]).collect();
                let features: Vec<_> = of.iter().map(|p| model.encode_prompt(p).unwrap()).collect();
                let pass = model.train_pass(&stream, &features, Training::default(), None).unwrap();
                let (mut dlogp, mut at) = (Vec::new(), 0);
                for (g, cs) in &by_group {
                    for &c in cs {
                        let n = completions[c].len();
                        logp.insert((*g, c), pass.logprobs[at..at + n].to_vec());
                        dlogp.extend((0..n).map(|t| coefficient(*g * 3 + c, t)));
                        at += n;
                    }
                }
                let gradients = pass.backward(&dlogp, None).unwrap();
                model
                    .backward_media(&of, &features, Memories::default(), gradients, Training::default())
                    .unwrap();
            }
            (logp, take_gradients(&model))
        };
        let all: Vec<(usize, usize)> = (0..prompts.len()).flat_map(|g| (0..3).map(move |c| (g, c))).collect();
        let (packed, packed_grads) = run(std::slice::from_ref(&all));
        let singles: Vec<Vec<(usize, usize)>> = all.iter().map(|&one| vec![one]).collect();
        let (separate, separate_grads) = run(&singles);
        for (key, want) in &separate {
            assert!(max_diff(&packed[key], want) <= 1e-5, "{name} {key:?}");
        }
        assert_close(&packed_grads, &separate_grads, 5e-5, name);
    }
}

#[test]
fn parts_are_told_apart() {
    for (name, _) in INTERNVL {
        let model = model_of(name);
        for param in model.params() {
            let part = match param.name() {
                n if n.starts_with("language_model.") => Part::Llm,
                n if n.starts_with("mlp1.") || n.starts_with("multi_modal_projector.") => Part::Projector,
                _ => Part::Vision,
            };
            assert_eq!(param.part(), part, "{}", param.name());
        }
    }
}
