//! Sampling through the KV cache: equal to `transformers` without one, equal to the scoring of packed streams, and
//! dependent only on the weights and each sample's key. Data and scripts: `models/tests/golden/README.md`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::collections::BTreeMap;
use std::sync::Arc;

use omnigrpo_models::{
    Checkpoint, DecoderMemory, Features, GroupStream, LoadOptions, Memories, Model, PackedStream, Prompt,
    Training, WeightDtype,
};
use omnigrpo_ops::{Card, DecodeRows, Device, Draw, DrawFrom, Memory, Replays, Sampler};
use omnigrpo_rollout::{
    Completion, FinishReason, GenerateOptions, Generated, Generator, Request, SamplingParams, TokenEvent,
};
use omnigrpo_testkit::{
    CHECKPOINTS, FAMILIES, Golden, QWENS, TEXTS, card, case_prompt, checkpoint, copy_dir, larger_checkpoint,
    larger_model, lengthened, max_diff, omni_prompt, rows,
};
use omnigrpo_text::{StopSet, Tokenizer};

struct Setup {
    model: Model,
    tokenizer: Tokenizer,
}

impl Setup {
    fn open(dir: &std::path::Path) -> Self {
        Self {
            model: omnigrpo_testkit::load(dir, WeightDtype::Auto).unwrap(),
            tokenizer: Tokenizer::from_dir(dir).unwrap(),
        }
    }

    fn new(name: &str) -> Self {
        Self::open(&checkpoint(name))
    }

    fn on(name: &str, dtype: WeightDtype, device: Device) -> Self {
        let options = LoadOptions { dtype, device, ..LoadOptions::default() };
        Self {
            model: Model::load(&Checkpoint::open(&checkpoint(name)).unwrap(), &options).unwrap(),
            tokenizer: Tokenizer::from_dir(&checkpoint(name)).unwrap(),
        }
    }

    fn row(&self, case: &str, row: u64) -> Row {
        let prompt = case_prompt(case, &self.model);
        let features = self.model.encode_prompt(&prompt).unwrap();
        Row { prompt, features, row }
    }

    fn generator<'a>(
        &'a self,
        params: &'a SamplingParams,
        stops: &'a StopSet,
        max_live: usize,
    ) -> Generator<'a> {
        let (model, tokenizer) = (&self.model, &self.tokenizer);
        Generator { model, tokenizer, stops, params, max_live, prompts: None, interaction: None }
    }

    fn generate(
        &self,
        rows: &[&Row],
        num_samples: usize,
        params: &SamplingParams,
        stops: &StopSet,
        max_live: usize,
    ) -> Vec<Vec<Completion>> {
        let requests: Vec<Request> = rows
            .iter()
            .map(|row| Request {
                num_samples,
                rollout: 5,
                row: row.row,
                ..Request::new(&row.prompt, &row.features)
            })
            .collect();
        let generator = self.generator(params, stops, max_live);
        completions(generator.generate(requests, GenerateOptions::default()).unwrap())
    }
}

fn completions(generated: Vec<Generated>) -> Vec<Vec<Completion>> {
    generated.into_iter().map(|of| of.completions).collect()
}

struct Row {
    prompt: Prompt,
    features: Vec<Features>,
    row: u64,
}

fn greedy(tokens: usize) -> SamplingParams {
    SamplingParams { temperature: 0.0, max_completion_length: tokens, ..SamplingParams::default() }
}

fn sampled(tokens: usize) -> SamplingParams {
    SamplingParams { max_completion_length: tokens, seed: 11, ..SamplingParams::default() }
}

/// Scores completions like training.
fn scored(model: &Model, rows: &[&Row], groups: &[Vec<Completion>], temperature: f32) -> Vec<f32> {
    let streams: Vec<GroupStream> = rows
        .iter()
        .zip(groups)
        .map(|(row, group)| GroupStream {
            prompt: &row.prompt,
            completions: group.iter().map(|c| c.ids.as_slice()).collect(),
        })
        .collect();
    let features: Vec<Vec<Features>> = rows.iter().map(|row| row.features.clone()).collect();
    model.score(&PackedStream::new(&streams).unwrap(), &features, temperature).unwrap().0
}

fn recorded(groups: &[Vec<Completion>]) -> Vec<f32> {
    groups.iter().flatten().flat_map(|c| c.logprobs.clone()).collect()
}

#[test]
fn greedy_of_humanomni_equals_its_construction_without_a_cache() {
    for (name, cases) in [("humanomni", &["va", "v", "a", "i", "t"][..]), ("humanomni_large", &["va", "i"])] {
        let dir = checkpoint(name);
        let setup = Setup {
            model: omnigrpo_testkit::load(&dir, WeightDtype::Float32).unwrap(),
            tokenizer: Tokenizer::from_dir(&dir).unwrap(),
        };
        for case in cases {
            let expected = Golden::read(&format!("humanomni/{case}.{name}.safetensors"));
            let prompt = omni_prompt(&expected);
            let features = setup.model.encode_prompt(&prompt).unwrap();
            let row = Row { prompt, features, row: 0 };
            let expected = expected.ids("greedy");
            let groups = setup.generate(&[&row], 2, &greedy(expected.len()), &StopSet::default(), 8);
            for completion in &groups[0] {
                assert_eq!(completion.ids, expected, "{name} {case}");
            }
            // Sampling records the values that training computes.
            let groups = setup.generate(&[&row], 4, &sampled(6), &StopSet::default(), 8);
            let delta = max_diff(&recorded(&groups), &scored(&setup.model, &[&row], &groups, 1.0));
            assert!(delta <= 1e-4, "{name} {case}: recorded and scored differ by {delta}");
        }
    }
}

#[test]
fn greedy_equals_transformers_without_a_cache() {
    let untied = ["qwen2_vl_untied", "qwen2_5_vl_untied"].map(|c| (c, vec!["E"]));
    let tied = CHECKPOINTS.map(|c| (c, vec!["A", "B", "C", "D1", "D2", "E"]));
    let texts = TEXTS.map(|c| (c, vec!["B"]));
    for (name, cases) in tied.into_iter().chain(untied).chain(texts) {
        let setup = Setup::new(name);
        for case in cases {
            let row = setup.row(case, 0);
            let expected = Golden::read(&format!("cases/{case}.{name}.safetensors")).ids("greedy");
            // The golden script ignores stop tokens.
            let groups = setup.generate(&[&row], 2, &greedy(expected.len()), &StopSet::default(), 8);
            for completion in &groups[0] {
                assert_eq!(completion.ids, expected, "{name} {case}");
                assert_eq!(completion.finish_reason, FinishReason::Length);
                assert_eq!(completion.text, setup.tokenizer.decode(&expected, true).unwrap());
                // A drawn token is certain under the greedy sampler, and recorded at temperature 1.
                assert!(completion.sampler_logprobs.iter().all(|&p| p == 0.0));
            }
            let d = max_diff(&recorded(&groups), &scored(&setup.model, &[&row], &groups, 1.0));
            assert!(d <= 1e-4, "{name} {case}: log-probabilities differ by {d}");
        }
    }
}

/// InternVL in both layouts, Aria and Qwen3-VL: the reference recomputes everything for each token.
#[test]
fn greedy_of_tiles_and_squares_equals_the_reference_without_a_cache() {
    let internvl = rows::INTERNVL.map(|(name, cases)| ("internvl", name, cases));
    let aria = rows::ARIA.map(|(name, cases)| ("aria", name, cases));
    let smolvlm = rows::SMOLVLM.map(|(name, cases)| ("smolvlm", name, cases));
    let qwen3 = rows::QWEN3_VL.map(|(name, cases)| ("qwen3_vl", name, cases));
    let omni = rows::OMNI.map(|(name, cases)| ("qwen_omni", name, cases));
    let audio = rows::QWEN_AUDIO.map(|(name, cases)| ("qwen_audio", name, cases));
    let qwen3_5 = rows::QWEN3_5.map(|(name, cases)| ("qwen3_5", name, cases));
    let all =
        internvl.into_iter().chain(aria).chain(smolvlm).chain(qwen3).chain(omni).chain(audio).chain(qwen3_5);
    for (folder, name, cases) in all {
        let setup = Setup::new(name);
        // Qwen3.5 has the rows of Qwen3-VL.
        let of_rows = if folder == "qwen3_5" { "qwen3_vl" } else { folder };
        for case in cases.chars().map(|case| case.to_string()) {
            let prompt = rows::prompt_of(of_rows, &checkpoint(name), &case);
            let features = setup.model.encode_prompt(&prompt).unwrap();
            let row = Row { prompt, features, row: 0 };
            let expected = Golden::read(&format!("{folder}/{case}.{name}.safetensors")).ids("greedy");
            let groups = setup.generate(&[&row], 2, &greedy(expected.len()), &StopSet::default(), 8);
            for completion in &groups[0] {
                assert_eq!(completion.ids, expected, "{name} {case}");
            }
            let sampled = setup.generate(&[&row], 4, &sampled(6), &StopSet::default(), 8);
            for groups in [groups, sampled] {
                let d = max_diff(&recorded(&groups), &scored(&setup.model, &[&row], &groups, 1.0));
                assert!(d <= 1e-4, "{name} {case}: log-probabilities differ by {d}");
            }
        }
    }
}

#[test]
fn rollout_equals_training_log_probabilities() {
    for name in [
        "qwen2_vl_tied",
        "qwen2_vl_untied",
        "qwen2_5_vl_tied",
        "qwen2_5_vl_untied",
        "qwen3_vl",
        "qwen3_5",
        "qwen3_5_untied",
    ] {
        let setup = Setup::new(name);
        let rows: Vec<Row> = ["C", "D2", "B", "E", "A"].iter().map(|c| setup.row(c, 3)).collect();
        let rows: Vec<&Row> = rows.iter().collect();
        for temperature in [1.0, 0.7] {
            let params = SamplingParams { temperature, ..sampled(20) };
            let groups = setup.generate(&rows, 3, &params, &StopSet::default(), 64);
            let d = max_diff(&recorded(&groups), &scored(&setup.model, &rows, &groups, temperature));
            assert!(d <= 1e-4, "{name} at {temperature}: log-probabilities differ by {d}");
            for completion in groups.iter().flatten() {
                let d = max_diff(&completion.logprobs, &completion.sampler_logprobs);
                assert!(d <= 1e-5, "{name}: nothing is cut off, yet the sampler differs by {d}");
            }
            // The record can use another temperature.
            let params = SamplingParams { logprob_temperature: Some(1.0), ..params };
            let again = setup.generate(&rows, 3, &params, &StopSet::default(), 64);
            let d = max_diff(&recorded(&again), &scored(&setup.model, &rows, &again, 1.0));
            assert!(d <= 1e-4, "{name}: log-probabilities at 1 differ by {d}");
            let ids = |groups: &[Vec<Completion>]| -> Vec<Vec<u32>> {
                groups.iter().flatten().map(|c| c.ids.clone()).collect()
            };
            assert_eq!(ids(&again), ids(&groups));
        }
    }
}

/// The results of sampling replace the forward pass: gradients equal those of a pass that computes everything.
#[test]
fn a_rollout_can_be_differentiated() {
    let stops = StopSet { ids: (0..300).step_by(23).collect(), ..StopSet::default() };
    let internvl = ("internvl_hf", ["A", "C", "B"]);
    let qwens = QWENS.into_iter().chain(["qwen3_5", "qwen3_5_untied"]).map(|name| (name, ["E", "D2", "C"]));
    let mixture = ("qwen3_vl_moe", ["E", "D", "C"]);
    for (name, cases) in qwens.chain([internvl, mixture]) {
        let setup = Setup::new(name);
        let model = &setup.model;
        assert!(model.can_recall());
        let row = |(row, case): (u64, &str)| match name {
            "internvl_hf" => {
                let prompt = rows::prompt_of("internvl", &checkpoint(name), case);
                Row { features: model.encode_prompt(&prompt).unwrap(), prompt, row }
            }
            _ => setup.row(case, row),
        };
        let rows: Vec<Row> = (0..).zip(cases).map(row).collect();
        let requests: Vec<Request> = rows
            .iter()
            .map(|row| Request { num_samples: 3, row: row.row, ..Request::new(&row.prompt, &row.features) })
            .collect();
        let prompt_rows: usize = rows.iter().map(|row| row.prompt.ids.len()).sum();
        let params = sampled(16);
        // Some rows wait for others, and completions end at different times.
        let generator = setup.generator(&params, &stops, 6);
        for (outputs_only, room) in [(false, prompt_rows + 9 * 15), (true, 4096), (false, prompt_rows + 20)] {
            let mut memory = DecoderMemory::new(room, outputs_only);
            let options = GenerateOptions { memory: Some(&mut memory), on_token: None, experts: false };
            let groups = completions(generator.generate(requests.iter().copied(), options).unwrap());
            let lengths: Vec<usize> = groups.iter().flatten().map(|c| c.ids.len()).collect();
            assert!(lengths.iter().any(|&len| len < 16) && lengths.contains(&16), "{name}: {lengths:?}");
            let streams: Vec<GroupStream> = rows
                .iter()
                .zip(&groups)
                .map(|(row, group)| GroupStream {
                    prompt: &row.prompt,
                    completions: group.iter().map(|c| c.ids.as_slice()).collect(),
                })
                .collect();
            let stream = PackedStream::new(&streams).unwrap();
            let features: Vec<Vec<Features>> = rows.iter().map(|row| row.features.clone()).collect();
            let memory = memory.of_stream(&stream).unwrap();
            assert_eq!(memory.is_some(), room != prompt_rows + 20, "{name}: room for {room} rows");
            let Some(memory) = memory else { continue };
            omnigrpo_testkit::train_all(model);
            let how = Training { recompute: outputs_only, ..Training::default() };
            let gradients = |recalled: Memory| {
                let pass = model.train_pass(&stream, &features, how, Some(recalled)).unwrap();
                let logprobs = pass.logprobs.clone();
                let d: Vec<f32> = (0..logprobs.len()).map(|i| (i as f32 * 0.7).sin()).collect();
                let of_features = pass.backward(&d, Some(&d)).unwrap();
                let prompts: Vec<&Prompt> = rows.iter().map(|row| &row.prompt).collect();
                let none = Memories::default();
                model.backward_media(&prompts, &features, none, of_features, how).unwrap();
                (logprobs, omnigrpo_testkit::take_gradients(model))
            };
            let (want, expected) = gradients(Memory::default());
            let (got, recalled) = gradients(memory);
            assert!(max_diff(&got, &want) <= 1e-4, "{name}: {}", max_diff(&got, &want));
            assert_ne!(got, want, "{name}: nothing was recalled");
            omnigrpo_testkit::assert_close(&recalled, &expected, 1e-4, name);
            // A stream of other completions does not match the memory.
            let mut memory = DecoderMemory::new(room, outputs_only);
            let options = GenerateOptions { memory: Some(&mut memory), on_token: None, experts: false };
            generator.generate(requests.iter().copied(), options).unwrap();
            let other = PackedStream::new(&streams[..2]).unwrap();
            assert!(memory.of_stream(&other).unwrap().is_none());
        }
    }
}

/// Training counts the rows of completions that use other experts than in the rollout, with and without its results.
#[test]
fn training_knows_the_experts_of_the_rollout() {
    for (name, recalls) in [("qwen3_vl_moe", true), ("aria", false)] {
        let setup = Setup::new(name);
        let model = &setup.model;
        let row = match name {
            "aria" => {
                let prompt = rows::prompt_of("aria", &checkpoint(name), "A");
                Row { features: model.encode_prompt(&prompt).unwrap(), prompt, row: 0 }
            }
            _ => setup.row("E", 0),
        };
        let request = Request { num_samples: 3, ..Request::new(&row.prompt, &row.features) };
        let (params, stops) = (sampled(12), StopSet::default());
        let generator = setup.generator(&params, &stops, 3);
        let mut memory = DecoderMemory::new(4096, false);
        let options = GenerateOptions { memory: Some(&mut memory), on_token: None, experts: true };
        let group = completions(generator.generate([request], options).unwrap()).remove(0);
        let blocks = model.decoder().config().layers;
        let rows: usize = group.iter().map(|c| c.ids.len() - 1).sum();
        assert!(group.iter().all(|c| c.experts.len() == blocks * (c.ids.len() - 1)), "{name}");
        let options = GenerateOptions { experts: true, ..GenerateOptions::default() };
        let alone = completions(generator.generate([request], options).unwrap()).remove(0);
        let unasked = completions(generator.generate([request], GenerateOptions::default()).unwrap());
        assert!(unasked.concat().iter().all(|c| c.experts.is_empty()), "{name}");
        assert!(group.iter().zip(&alone).all(|(a, b)| a.experts == b.experts), "{name}: without a memory");

        let ids = group.iter().map(|c| c.ids.as_slice()).collect();
        let stream = PackedStream::new(&[GroupStream { prompt: &row.prompt, completions: ids }]).unwrap();
        omnigrpo_testkit::train_all(model);
        let others = |experts: &[Vec<u32>], memory: Option<Memory>| {
            let stream = stream.clone().comparing_experts(experts.iter().map(Vec::as_slice));
            let pass = model
                .train_pass(&stream, std::slice::from_ref(&row.features), Training::default(), memory)
                .unwrap();
            let d = vec![1.0; pass.logprobs.len()];
            pass.backward(&d, None).unwrap();
            omnigrpo_testkit::take_gradients(model);
            stream.other_experts()
        };
        let mut experts: Vec<Vec<u32>> = group.iter().map(|c| c.experts.clone()).collect();
        assert_eq!(others(&experts, None), [0, rows], "{name}");
        let memory = memory.of_stream(&stream).unwrap();
        assert_eq!(memory.is_some(), recalls, "{name}");
        // One block of two rows differs, and so do all blocks of a third one. A completion without experts is not compared.
        experts[1][blocks + 1] ^= 1;
        experts[1][4 * blocks] ^= 1;
        experts[2][..blocks].iter_mut().for_each(|mark| *mark ^= 1);
        let compared = rows - (group[0].ids.len() - 1);
        experts[0].clear();
        assert_eq!(others(&experts, None), [3, compared], "{name}");
        if memory.is_some() {
            assert_eq!(others(&experts, memory), [3, compared], "{name}: with the results of the rollout");
        }
    }
}

/// Returns the folder of a checkpoint's results in `models/tests/golden`.
fn folder(name: &str) -> &'static str {
    match name {
        "qwen3_vl" | "qwen3_vl_moe" => "qwen3_vl",
        "aria" => "aria",
        "smolvlm" => "smolvlm",
        "omni" => "qwen_omni",
        "qwen2_audio" => "qwen_audio",
        "humanomni" => "humanomni",
        name if name.starts_with("internvl") => "internvl",
        name if name.starts_with("qwen3_5") => "qwen3_5",
        _ => "cases",
    }
}

/// Sampling runs on any device: the greedy text equals the reference's, and the recorded values equal those of the
/// device's training pass.
#[test]
fn generation_on_every_device() {
    for (name, case) in FAMILIES.into_iter().chain([("qwen3_5_untied", "E")]) {
        let expected = Golden::read(&format!("{}/{case}.{name}.safetensors", folder(name))).ids("greedy");
        for device in Device::all() {
            let setup = Setup::on(name, WeightDtype::Float32, device);
            let row = setup.row(case, 0);
            let groups = setup.generate(&[&row], 2, &greedy(expected.len()), &StopSet::default(), 8);
            assert!(groups[0].iter().all(|completion| completion.ids == expected), "{name}, {device}");
            let groups = setup.generate(&[&row], 3, &sampled(8), &StopSet::default(), 8);
            let d = max_diff(&recorded(&groups), &scored(&setup.model, &[&row], &groups, 1.0));
            // The sampler reads logits in f32 on every device.
            let bound = if device == Device::Twin { 2e-6 } else { 1e-4 };
            assert!(d <= bound, "{name}, {device}: recorded and trained log-probabilities differ by {d}");
        }
    }
}

/// GPU kernels on the emulator: recorded values equal scores up to the rounding of the weights' dtype, and the bits of
/// completions do not depend on the batch.
#[test]
fn rollouts_on_the_emulator() {
    for (name, case) in FAMILIES {
        for (dtype, bound) in [(WeightDtype::Float32, 1e-4), (WeightDtype::BFloat16, 6e-2)] {
            let setup = Setup::on(name, dtype, card());
            let other = match folder(name) {
                "humanomni" => "t",
                _ if name == "qwen3_5_text" || TEXTS.contains(&name) => "B",
                _ => "A",
            };
            let rows = [setup.row(case, 3), setup.row(other, 4)];
            let rows: Vec<&Row> = rows.iter().collect();
            let groups = setup.generate(&rows, 2, &sampled(4), &StopSet::default(), 8);
            let far = max_diff(&recorded(&groups), &scored(&setup.model, &rows, &groups, 1.0));
            assert!(far <= bound, "{name}, {dtype:?}: records differ from scores by {far}");
            let alone = setup.generate(&rows, 2, &sampled(4), &StopSet::default(), 1);
            for (one, all) in alone.iter().flatten().zip(groups.iter().flatten()) {
                assert_eq!((&one.ids, &one.logprobs), (&all.ids, &all.logprobs), "{name}: the batch decides");
            }
        }
    }
}

/// More rows than a launch of the product for few rows takes, and than are drawn at once.
#[test]
fn wide_rollouts_on_the_emulator() {
    for dtype in [WeightDtype::Float32, WeightDtype::BFloat16] {
        let setup = Setup::on("qwen2_5_vl_tied", dtype, card());
        let rows: Vec<Row> = (0..17).map(|row| setup.row("B", row)).collect();
        let rows: Vec<&Row> = rows.iter().collect();
        let wide = setup.generate(&rows, 8, &sampled(2), &StopSet::default(), 256);
        let narrow = setup.generate(&rows, 8, &sampled(2), &StopSet::default(), 64);
        assert_eq!(wide, narrow, "{dtype:?}: the batch decides");
    }
}

/// Samples completions of a few groups, some of which end before others. Returns the tokens with the bits of their
/// recorded values, and statistics of replays. Also checks that each token of all rows takes one upload and one read on
/// a GPU.
fn in_flight(
    model: &Model,
    groups: &[(u32, &[usize])],
    how: Sampler,
    plain: bool,
) -> (Vec<Vec<[u32; 4]>>, Replays) {
    let (decoder, pass) = (model.decoder(), model.pass());
    let Device::Gpu(card) = model.device() else { panic!("{} is no card", model.device()) };
    let mut caches = Vec::new();
    for &(tokens, ends) in groups {
        let ids: Vec<u32> = (0..tokens).map(|i| 3 + i % 50).collect();
        let positions: Vec<_> = (0..tokens).map(|i| [i; 3]).collect();
        let most = ends.iter().max().unwrap() + 1;
        let mut cache = decoder.cache(ids.len(), ends.len(), most, &pass).unwrap();
        let x = decoder.embed(&ids, &pass).unwrap();
        let hidden = decoder.prefill(x, &decoder.rope_table(&positions), &mut cache, &pass, None).unwrap();
        // The first token is drawn here, and the last weights are uploaded to the GPU.
        decoder.logits(&hidden).unwrap();
        caches.push(cache);
    }
    let mut next = decoder.next_tokens(how, &pass);
    if plain {
        next = next.plain();
    }
    let mut done: Vec<Vec<Vec<[u32; 4]>>> =
        groups.iter().map(|(_, ends)| vec![vec![[7, 0, 0, 0]]; ends.len()]).collect();
    for step in 0.. {
        let (mut ids, mut positions, mut from, mut rows) = (vec![], vec![], vec![], vec![]);
        let seen: Vec<Vec<Vec<u32>>> =
            done.iter().map(|g| g.iter().map(|c| c.iter().map(|t| t[0]).collect()).collect()).collect();
        let mut places = Vec::new();
        for (g, (&(prompt, ends), cache)) in groups.iter().zip(&mut caches).enumerate() {
            let slots: Vec<usize> = (0..ends.len()).filter(|&slot| ends[slot] > step).collect();
            for &slot in &slots {
                ids.push(*seen[g][slot].last().unwrap());
                positions.push([prompt + step as u32; 3]);
                let uniform = ((step * 31 + g * 17 + slot * 7) % 97) as f64 / 97.0;
                from.push(DrawFrom { seen: [&[5, 9], &seen[g][slot]], forbids: step < 2, uniform });
                places.push((g, slot));
            }
            if !slots.is_empty() {
                rows.push(DecodeRows { cache, slots });
            }
        }
        if places.is_empty() {
            break;
        }
        let before = card.traffic();
        let drawn = next.next(rows, ids, &positions, &from, None).unwrap();
        if let (Some(before), Some(after)) = (before, card.traffic()) {
            assert_eq!([0, 1].map(|i| after[i] - before[i]), [1, 1], "step {step}");
        }
        for ((g, slot), drawn) in places.into_iter().zip(drawn) {
            let Draw { id, logprob, sampler_logprob, entropy } = drawn.unwrap();
            let [a, b, c] = [logprob, sampler_logprob, entropy].map(f32::to_bits);
            done[g][slot].push([id, a, b, c]);
        }
    }
    model.device().finish().unwrap();
    (done.concat(), next.replays().unwrap().clone())
}

/// In every family, replayed recordings equal individually launched kernels bit for bit, while rows end at different
/// times.
#[test]
fn replayed_tokens_equal_those_of_single_launches() {
    let names = [
        "qwen2_vl_tied",
        "qwen2_5_vl_untied",
        "qwen3_vl",
        "internvl_hf",
        "humanomni",
        "aria",
        "smolvlm",
        "omni",
        "llama",
        "qwen3_5",
        "qwen3_5_text",
    ];
    let groups: [(u32, &[usize]); 3] = [(5, &[3, 9, 7]), (12, &[5, 11]), (2, &[1])];
    for (i, name) in names.into_iter().enumerate() {
        let how = Sampler {
            temperature: 0.9,
            top_k: [0, 20][i % 2],
            repetition_penalty: [1.0, 1.3, 1.0][i % 3],
            forbidden: &[11, 40],
            ..Sampler::default()
        };
        let dtype = [WeightDtype::BFloat16, WeightDtype::Float32][usize::from(i == 0)];
        let options = LoadOptions { dtype, device: card(), ..LoadOptions::default() };
        let model = Model::load(&Checkpoint::open(&checkpoint(name)).unwrap(), &options).unwrap();
        let (own, how_plain) = in_flight(&model, &groups, how, true);
        assert_eq!((how_plain.recorded, how_plain.replayed, how_plain.plain), (0, 0, 11), "{name}");
        let (recorded, how_recorded) = in_flight(&model, &groups, how, false);
        assert_eq!(recorded, own, "{name}");
        assert_eq!(how_recorded.refused, None, "{name}");
        let Replays { recorded, replayed, plain, .. } = how_recorded;
        assert!(recorded >= 3 && replayed >= 5 && replayed + plain == 11, "{name}: {how_recorded:?}");
    }
}

/// More tokens than a page has, and more than a part of attention's sum has: tables grow, and recordings are created
/// again.
#[test]
fn replayed_tokens_cross_pages() {
    let options = LoadOptions { dtype: WeightDtype::BFloat16, device: card(), ..LoadOptions::default() };
    let model = Model::load(&Checkpoint::open(&checkpoint("qwen2_5_vl_tied")).unwrap(), &options).unwrap();
    let how = Sampler::default();
    let groups: [(u32, &[usize]); 2] = [(3, &[262]), (60, &[66])];
    let (own, _) = in_flight(&model, &groups, how, true);
    let (recorded, by) = in_flight(&model, &groups, how, false);
    assert_eq!(recorded, own);
    assert!(by.refused.is_none() && by.replayed >= 255 && by.recorded >= 2, "{by:?}");
}

/// A GPU with insufficient memory reports that, and not that the model's logits are not finite.
#[test]
fn a_gpu_out_of_memory_reports_it() {
    let card = Card::emulated(Some(900_000));
    assert_eq!(card.memory(), Some([900_000; 2]));
    let setup = Setup::on("qwen2_5_vl_tied", WeightDtype::Auto, Device::Gpu(card));
    let row = setup.row("A", 0);
    let (params, stops) = (sampled(64), StopSet::default());
    let requests = vec![Request { num_samples: 8, ..Request::new(&row.prompt, &row.features) }; 40];
    let generator = setup.generator(&params, &stops, 320);
    let error = generator.generate(requests, GenerateOptions::default()).unwrap_err().to_string();
    assert!(error.contains("out of GPU memory") && error.contains("of 900000 free"), "{error}");
    assert!(error.contains("max_stream_tokens") && !error.contains("not finite"), "{error}");
}

/// Returns eight rows: images, videos, text, several media; two of them have the same prompt under another row.
fn mixed(setup: &Setup) -> Vec<Row> {
    let cases = ["C", "D2", "B", "E", "A", "D1", "B", "C"];
    (0u64..).zip(cases).map(|(row, case)| setup.row(case, row)).collect()
}

#[test]
fn completions_do_not_depend_on_batch_size_or_order() {
    for name in QWENS.into_iter().chain(["qwen3_5", "qwen3_5_untied"]) {
        let setup = Setup::new(name);
        let rows = mixed(&setup);
        let stops = StopSet { ids: (0..300).step_by(23).collect(), ..StopSet::default() };
        for params in [sampled(16), SamplingParams { top_p: 0.9, top_k: 40, temperature: 0.8, ..sampled(16) }]
        {
            let alone: Vec<Vec<Completion>> =
                rows.iter().flat_map(|row| setup.generate(&[row], 3, &params, &stops, 1)).collect();
            let stopped = alone.iter().flatten().filter(|c| c.finish_reason == FinishReason::Stop).count();
            assert!(stopped > 0 && stopped < 24, "sequences should leave the batch at different times");
            let all: Vec<&Row> = rows.iter().collect();
            for prompts in [1, 3, 8] {
                let together = setup.generate(&all, 3, &params, &stops, 3 * prompts);
                assert_eq!(together, alone, "{name}: {prompts} prompts at once");
            }
            let order = [5, 2, 7, 0, 3, 6, 1, 4];
            let shuffled: Vec<&Row> = order.iter().map(|&i| &rows[i]).collect();
            for (i, group) in order.into_iter().zip(setup.generate(&shuffled, 3, &params, &stops, 9)) {
                assert_eq!(group, alone[i], "{name}: row {i} in another order");
            }
            // A larger group begins with the same completions.
            let five = setup.generate(&all[..2], 5, &params, &stops, 64);
            for (five, three) in five.iter().zip(&alone) {
                assert_eq!(five[..3], three[..], "{name}");
            }
        }
    }
}

/// Repeats the test above with matrices large enough to be divided into tiles and over threads.
#[test]
fn larger_models_keep_every_bit() {
    for name in QWENS.into_iter().chain(["qwen3_5"]) {
        let tokenizer = Tokenizer::from_dir(&checkpoint(name)).unwrap();
        let setup = Setup { model: larger_model(name), tokenizer };
        let rows: Vec<Row> = mixed(&setup)
            .into_iter()
            .map(|row| Row { prompt: lengthened(row.prompt, 20 * (row.row as u32 + 1)), ..row })
            .collect();
        let all: Vec<&Row> = rows.iter().collect();
        let params = sampled(24);
        let alone: Vec<Vec<Completion>> =
            all.iter().flat_map(|row| setup.generate(&[row], 3, &params, &StopSet::default(), 3)).collect();
        for (threads, max_live) in [(1, 24), (2, 9), (2, 24)] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let together = pool.install(|| setup.generate(&all, 3, &params, &StopSet::default(), max_live));
            assert!(together == alone, "{name}: {threads} threads, {max_live} live");
        }
        let d = max_diff(&recorded(&alone), &scored(&setup.model, &all, &alone, 1.0));
        assert!(d <= 1e-4, "{name}: log-probabilities differ by {d}");
    }
}

/// Decoding by the recurrence and training by chunks agree after prompts of many chunks with pictures. Bits of a completion do not
/// depend on the batch.
///
/// Linear layers and attention also sum in another order when they decode.
#[test]
fn the_delta_rule_after_a_long_prompt() {
    let tiny = |name, dtype| Setup::on(name, dtype, Device::Cpu);
    let wide = || Setup {
        model: larger_model("qwen3_5"),
        tokenizer: Tokenizer::from_dir(&checkpoint("qwen3_5")).unwrap(),
    };
    let published = |dtype| Setup {
        model: model_of_published_widths(dtype),
        tokenizer: Tokenizer::from_dir(&checkpoint("qwen3_5")).unwrap(),
    };
    let (in_f32, in_bf16) = ((5e-6, 1e-4), (1e-2, 0.1));
    for (what, setup, (most_mean, most)) in [
        ("tiny", tiny("qwen3_5", WeightDtype::Float32), in_f32),
        ("tiny, untied", tiny("qwen3_5_untied", WeightDtype::Float32), in_f32),
        ("tiny, bf16", tiny("qwen3_5", WeightDtype::BFloat16), in_bf16),
        ("tiny, untied, bf16", tiny("qwen3_5_untied", WeightDtype::BFloat16), in_bf16),
        ("wide", wide(), in_f32),
        ("heads as published", published(WeightDtype::Float32), (2e-6, 2e-5)),
        ("heads as published, bf16", published(WeightDtype::BFloat16), in_bf16),
    ] {
        let row = |(case, row): (&str, u64)| {
            let short = setup.row(case, row);
            Row { prompt: lengthened(short.prompt, 2000), ..short }
        };
        let rows = [("E", 3), ("C", 4)].map(row);
        let rows: Vec<&Row> = rows.iter().collect();
        let groups = setup.generate(&rows, 3, &sampled(70), &StopSet::default(), 8);
        let (got, want) = (recorded(&groups), scored(&setup.model, &rows, &groups, 1.0));
        let far: Vec<f64> = got.iter().zip(&want).map(|(a, b)| f64::from((a - b).abs())).collect();
        let mean = far.iter().sum::<f64>() / far.len() as f64;
        println!("{what}: {mean:.2e} in the mean, {:.2e} at most", max_diff(&got, &want));
        assert!(mean <= most_mean, "{what}: log-probabilities differ by {mean} in the mean");
        assert!(max_diff(&got, &want) <= most, "{what}: {}", max_diff(&got, &want));
        assert!(setup.generate(&rows, 3, &sampled(70), &StopSet::default(), 1) == groups, "{what}");
    }
}

/// A random Qwen3.5 whose heads and initial weights have the published sizes.
fn model_of_published_widths(dtype: WeightDtype) -> Model {
    let dir = larger_checkpoint("qwen3_5");
    let path = dir.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let text = &mut config["text_config"];
    for key in ["linear_key_head_dim", "linear_value_head_dim"] {
        text[key] = 128.into();
    }
    text["head_dim"] = 256.into();
    text["initializer_range"] = 0.02.into();
    text["rope_parameters"]["partial_rotary_factor"] = 0.25.into();
    text["rope_parameters"]["mrope_section"] = serde_json::json!([11, 11, 10]);
    std::fs::write(&path, config.to_string()).unwrap();
    let options = LoadOptions { random: Some(7), dtype, ..LoadOptions::default() };
    Model::load(&Checkpoint::open(dir.path()).unwrap(), &options).unwrap()
}

#[test]
fn completions_do_not_depend_on_threads() {
    for name in QWENS.into_iter().chain(["qwen3_5"]) {
        let within = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let setup = Setup::new(name);
                let rows = mixed(&setup);
                setup.generate(&rows.iter().collect::<Vec<_>>(), 3, &sampled(16), &StopSet::default(), 64)
            })
        };
        assert_eq!(within(1), within(2), "{name}");
    }
}

#[test]
fn samples_of_a_group_differ_and_keys_decide() {
    let setup = Setup::new("qwen2_5_vl_tied");
    let row = setup.row("C", 1);
    let run = |rollout: u64, row_index: u64, seed: u64| {
        let params = SamplingParams { seed, ..sampled(12) };
        let request =
            Request { num_samples: 4, rollout, row: row_index, ..Request::new(&row.prompt, &row.features) };
        let stops = StopSet::default();
        let generator = setup.generator(&params, &stops, 64);
        generator.generate([request], GenerateOptions::default()).unwrap().remove(0).completions
    };
    let first = run(0, 0, 0);
    for (i, a) in first.iter().enumerate() {
        assert!(first[i + 1..].iter().all(|b| a.ids != b.ids), "sample {i} comes twice");
    }
    assert_eq!(first, run(0, 0, 0));
    for other in [run(1, 0, 0), run(0, 1, 0), run(0, 0, 1)] {
        assert!(first.iter().zip(&other).all(|(a, b)| a.ids != b.ids));
    }
}

/// The fixtures' `generation_config.json` sets top_k 1 and temperature 1e-6.
#[test]
fn generation_config_does_not_sample() {
    let dir = tempfile::TempDir::new().unwrap();
    copy_dir(&checkpoint("qwen2_5_vl_tied"), dir.path());
    let path = dir.path().join("generation_config.json");
    let mut config: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(config["top_k"], 1);
    let run = || {
        let setup = Setup::open(dir.path());
        let stops = StopSet::from_dir(dir.path(), &setup.tokenizer, &[]).unwrap();
        let row = setup.row("C", 0);
        setup.generate(&[&row], 4, &sampled(12), &stops, 64)
    };
    let with = run();
    assert!(
        with[0].iter().any(|c| c.ids != with[0][0].ids),
        "four samples at temperature 1 are all the same"
    );
    config.retain(|key, _| key.ends_with("_token_id"));
    std::fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
    assert_eq!(run(), with);
}

#[test]
fn only_the_frames_of_a_video_change_its_completions() {
    for name in QWENS {
        let setup = Setup::new(name);
        let original = setup.row("D1", 0);
        // Reverse the temporal patches of the prompt.
        let mut prompt = original.prompt.clone();
        let mut medium = (*prompt.media[0]).clone();
        let slice = medium.data.len() / medium.shape.patches().unwrap().t;
        medium.data = medium.data.chunks(slice).rev().flatten().copied().collect();
        prompt.media[0] = Arc::new(medium);
        assert_eq!(prompt.ids, original.prompt.ids);
        let features = setup.model.encode_prompt(&prompt).unwrap();
        let reversed = Row { prompt, features, row: 0 };
        let run = |row: &Row| setup.generate(&[row], 3, &sampled(16), &StopSet::default(), 64);
        let (a, b) = (run(&original), run(&reversed));
        assert!(a[0].iter().zip(&b[0]).any(|(a, b)| a.ids != b.ids), "{name}");
        assert!(a[0].iter().zip(&b[0]).all(|(a, b)| a.logprobs != b.logprobs), "{name}");
    }
}

/// Two rows with three samples each: media and completions stay with their prompt.
#[test]
fn completions_follow_their_prompt() {
    for name in QWENS {
        let setup = Setup::new(name);
        let (image, video) = (setup.row("C", 0), setup.row("D2", 1));
        let run = |rows: &[&Row]| setup.generate(rows, 3, &greedy(12), &StopSet::default(), 64);
        let both = run(&[&image, &video]);
        for (case, group) in ["C", "D2"].iter().zip(&both) {
            let golden = match name {
                "qwen3_vl" => format!("qwen3_vl/{}.{name}", &case[..1]),
                _ => format!("cases/{case}.{name}"),
            };
            let expected = Golden::read(&format!("{golden}.safetensors")).ids("greedy");
            assert!(group.iter().all(|c| c.ids == expected), "{name} {case}");
        }
        assert_ne!(both[0][0].ids, both[1][0].ids);
        assert_eq!(run(&[&video, &image]), [both[1].clone(), both[0].clone()]);
    }
}

#[test]
fn stop_tokens_and_lengths_end_a_completion() {
    let setup = Setup::new("qwen2_5_vl_tied");
    let row = setup.row("C", 0);
    let free = Golden::read("cases/C.qwen2_5_vl_tied.safetensors").ids("greedy");
    let run = |params: &SamplingParams, stops: &StopSet| {
        setup.generate(&[&row], 1, params, stops, 64).remove(0).remove(0)
    };
    let stop = |id: u32| StopSet { ids: vec![id], ..StopSet::default() };

    // The last token that has not occurred before ends the completion, and is part of it.
    let at = (0..free.len()).rev().find(|&i| !free[..i].contains(&free[i])).unwrap();
    assert!(at >= 2);
    let ended = run(&greedy(12), &stop(free[at]));
    assert_eq!((ended.ids.as_slice(), ended.finish_reason), (&free[..=at], FinishReason::Stop));
    assert_eq!(ended.logprobs.len(), at + 1);

    // At exactly the limit, a stop token still stops.
    let exact = run(&greedy(at + 1), &stop(free[at]));
    assert_eq!((exact.ids.as_slice(), exact.finish_reason), (&free[..=at], FinishReason::Stop));
    let short = run(&greedy(at), &stop(free[at]));
    assert_eq!((short.ids.as_slice(), short.finish_reason), (&free[..at], FinishReason::Length));
    assert_eq!(run(&greedy(1), &StopSet::default()).ids, free[..1]);

    // Before the minimum it cannot be drawn; if the minimum equals the limit, every completion has that length.
    let params = SamplingParams { min_completion_length: at + 3, ..greedy(at + 3) };
    let held = run(&params, &stop(free[at]));
    assert_eq!(held.ids.len(), at + 3);
    assert_eq!(held.ids[..at], free[..at]);
    assert!(!held.ids[..at + 2].contains(&free[at]));
    // The recorded values are those of the unmasked distribution.
    let d = max_diff(&held.logprobs, &scored(&setup.model, &[&row], &[vec![held.clone()]], 1.0));
    assert!(d <= 1e-4, "{d}");
}

#[test]
fn control_tokens_are_not_text() {
    let setup = Setup::new("qwen2_vl_tied");
    let row = setup.row("B", 0);
    let stops = StopSet { ids: vec![298], ..StopSet::default() };
    let params = sampled(4);
    let generator = setup.generator(&params, &stops, 4);
    let ids = [setup.tokenizer.encode_text("two boxes").unwrap(), vec![298]].concat();
    assert_eq!(generator.text_of(&ids).unwrap(), "two boxes");
    assert_eq!(row.prompt.spans.len(), 0);
}

#[test]
fn stop_strings_end_a_completion_and_are_removed() {
    let setup = Setup::new("qwen2_vl_tied");
    let row = setup.row("C", 0);
    let full = setup.generate(&[&row], 1, &greedy(40), &StopSet::default(), 64).remove(0).remove(0);
    // Two plain characters of the free text.
    let chars: Vec<char> = full.text.chars().collect();
    let at = (2..chars.len() - 1)
        .find(|&i| chars[i..i + 2].iter().all(char::is_ascii_graphic))
        .expect("some plain text in the greedy completion");
    let stop: String = chars[at..at + 2].iter().collect();
    let expected = full.text.split(&stop).next().unwrap();
    let stops = StopSet { strings: vec![stop.clone()], ..StopSet::default() };
    let ended = setup.generate(&[&row], 1, &greedy(40), &stops, 64).remove(0).remove(0);
    assert_eq!(ended.finish_reason, FinishReason::Stop);
    assert_eq!(ended.text, expected);
    let n = ended.ids.len();
    assert_eq!(ended.ids, full.ids[..n]);
    // The completion ends with the token that completes the string, not later.
    let text = |ids: &[u32]| setup.tokenizer.decode(ids, true).unwrap();
    assert!(text(&full.ids[..n]).contains(&stop));
    assert!(!text(&full.ids[..n - 1]).contains(&stop));
}

#[test]
fn events_report_every_token_in_order() {
    let setup = Setup::new("qwen2_5_vl_untied");
    let rows = [setup.row("B", 0), setup.row("C", 1)];
    let requests: Vec<Request> = rows
        .iter()
        .map(|row| Request { num_samples: 2, row: row.row, ..Request::new(&row.prompt, &row.features) })
        .collect();
    let (params, stops) = (sampled(9), StopSet { ids: vec![90, 150], ..StopSet::default() });
    let generator = setup.generator(&params, &stops, 2);
    let mut seen: BTreeMap<(usize, usize), Vec<(u32, bool)>> = BTreeMap::new();
    let mut on_token = |TokenEvent { request, sample, id, last }| {
        seen.entry((request, sample)).or_default().push((id, last));
    };
    let options = GenerateOptions { on_token: Some(&mut on_token), memory: None, experts: false };
    let groups = completions(generator.generate(requests, options).unwrap());
    for (request, group) in groups.iter().enumerate() {
        for (sample, completion) in group.iter().enumerate() {
            let last = completion.ids.len() - 1;
            let expected: Vec<(u32, bool)> =
                completion.ids.iter().enumerate().map(|(i, &id)| (id, i == last)).collect();
            assert_eq!(seen[&(request, sample)], expected);
        }
    }
}

#[test]
fn diverged_weights_are_named_not_sampled() {
    let setup = Setup::new("qwen2_vl_tied");
    let row = setup.row("B", 4);
    let norm = setup.model.params().iter().find(|p| p.name() == "model.norm.weight").unwrap();
    norm.store(&vec![f32::NAN; norm.len()]).unwrap();
    let request = Request { num_samples: 2, row: row.row, ..Request::new(&row.prompt, &row.features) };
    let (params, stops) = (sampled(4), StopSet::default());
    let generator = setup.generator(&params, &stops, 2);
    let message = generator.generate([request], GenerateOptions::default()).unwrap_err().to_string();
    assert!(message.starts_with("token 0 of sample 0 of row 4"), "{message}");
}
