//! Whole tiny networks on the f64 twin: from media and ids through tower, projector and decoder to log-probabilities and
//! entropies, every gradient is a central difference. And parts of one computation on different devices.

use std::sync::Arc;

use omnigrpo_models::{
    Checkpoint, GroupStream, LoadOptions, Memories, Model, PackedStream, Prompt, ReferencePlace, Training,
    WeightDtype,
};
use omnigrpo_ops::{Device, Param, Tape};

use crate::decoders::{self, DECODERS, Group};
use omnigrpo_testkit::differences::{SMALL_STEP, STEP, check_weights, snap};
use omnigrpo_testkit::{
    Golden, assert_close, case_prompt, checkpoint, max_diff, omni_prompt, take_gradients, train_all, training,
};

fn load(name: &str, device: Device) -> Model {
    let options = LoadOptions { dtype: WeightDtype::Float32, device, ..LoadOptions::default() };
    let model = Model::load(&Checkpoint::open(&checkpoint(name)).unwrap(), &options).unwrap();
    assert_eq!(model.device(), device);
    model
}

const COMPLETION: [u32; 4] = [17, 3, 250, 9];
const DLOGP: [f32; 4] = [0.5, -1.0, 0.75, 2.0];
const DENTROPY: [f32; 4] = [-0.5, 0.25, 1.0, 0.0];

fn bits(params: &[Arc<Param>]) -> Vec<Option<Vec<f64>>> {
    params.iter().map(|p| p.with_grad(|g| g.map(|g| g.to_f64()))).collect()
}

/// Every gradient of a model on the twin; `together` weights are moved at a time.
fn check(model: &Model, prompt: &Prompt, what: &str, together: usize) {
    snap(model.params());
    let groups = [GroupStream { prompt, completions: vec![&COMPLETION] }];
    let stream = PackedStream::new(&groups).unwrap();
    let backward = |how: Training, remembers: bool| {
        train_all(model);
        let (features, memories) = model.encode_for_training([prompt]).unwrap();
        let memories = if remembers { memories } else { Memories::default() };
        let pass = model.train_pass(&stream, &features, how, None).unwrap();
        let gradients = pass.backward(&DLOGP, Some(&DENTROPY)).unwrap();
        model.backward_media(&[prompt], &features, memories, gradients, how).unwrap();
        bits(model.params())
    };
    let recomputed = backward(training(true), false);
    let remembered = backward(training(false), true);
    let kept = backward(training(false), false);
    assert!(recomputed == kept, "{what}: recomputed gradients differ");
    assert!(remembered == kept, "{what}: remembered gradients differ");
    check_weights(what, model.params(), (together, SMALL_STEP), &|| {
        let features = [model.encode_prompt(prompt).unwrap()];
        let pass = model.train_pass(&stream, &features, Training::default(), None).unwrap();
        let scores = &pass.scored().scores;
        let weighed = |x: Vec<f64>, d: [f32; 4]| x.iter().zip(d).map(|(x, d)| x * f64::from(d)).sum::<f64>();
        weighed(scores.logprobs.to_f64(), DLOGP) + weighed(scores.entropies.to_f64(), DENTROPY)
    });
}

#[test]
fn decoders_with_embedding_and_head() {
    for (name, class) in DECODERS {
        let text = decoders::load(name, class);
        snap(&text.params);
        let want = Golden::read(&format!("decoders/{name}.safetensors"));
        let group = Group::new(want.ids("prompt_ids")[..6].to_vec(), Group::golden(&want).completions);
        let d =
            |seed: f32| (0..group.order.len()).map(move |i| (8.0 * (i as f32 * seed).sin()).round() / 8.0);
        let (dlogp, dentropy): (Vec<f32>, Vec<f32>) = (d(1.3).collect(), d(0.7).collect());
        let run = |tape: Tape, remembers: bool| {
            text.params.iter().for_each(|p| p.clear_grad());
            decoders::backward(&text, &group, &dlogp, &dentropy, (tape, remembers), Device::Twin);
            bits(&text.params)
        };
        let remembered = run(Tape::remembering(usize::MAX), true);
        let recomputed = run(Tape::recording(true), false);
        let kept = run(Tape::recording(false), false);
        assert!(recomputed == kept && remembered == kept, "{name}");
        check_weights(name, &text.params, (1, STEP), &|| {
            let scores = decoders::forward(&text, &group, Device::Twin, &mut Tape::off()).2.scores;
            let (logp, entropy) = (scores.logprobs.to_f64(), scores.entropies.to_f64());
            let offsets = &group.targets.offsets;
            // dL/dentropy is given for each target of a row.
            let of_row = |row: usize| {
                dentropy[offsets[row]..offsets[row + 1]].iter().copied().map(f64::from).sum::<f64>()
            };
            let entropies: f64 = entropy.iter().enumerate().map(|(row, e)| e * of_row(row)).sum();
            entropies + logp.iter().zip(&dlogp).map(|(l, d)| l * f64::from(*d)).sum::<f64>()
        });
    }
}

#[test]
fn towers_projectors_and_decoders_of_qwen() {
    for (name, case) in [("qwen2_vl_tied", "C"), ("qwen2_5_vl_untied", "E"), ("qwen3_vl_untied", "D")] {
        let model = load(name, Device::Twin);
        check(&model, &case_prompt(case, &model), name, 8);
    }
}

#[test]
fn towers_projectors_and_decoders_of_internvl() {
    for name in ["internvl_hf", "internvl_rms_hf", "internvl3_5_hf"] {
        let model = load(name, Device::Twin);
        check(&model, &crate::rows::prompt(&checkpoint(name), "C"), name, 8);
    }
}

#[test]
fn towers_projectors_and_decoders_of_aria() {
    // Routes that stay the same over the steps of a difference.
    for (name, case) in [("aria", "C"), ("aria_own", "F")] {
        let model = load(name, Device::Twin);
        check(&model, &crate::rows::prompt_of("aria", &checkpoint(name), case), name, 8);
    }
}

#[test]
fn towers_projectors_and_decoders_of_smolvlm() {
    for (name, case) in [("smolvlm", "D"), ("smolvlm_tied", "C"), ("smolvlm_v1", "F")] {
        let model = load(name, Device::Twin);
        check(&model, &crate::rows::prompt_of("smolvlm", &checkpoint(name), case), name, 8);
    }
}

#[test]
fn towers_projectors_and_decoders_of_humanomni() {
    let model = load("humanomni", Device::Twin);
    let prompt = omni_prompt(&Golden::read("humanomni/va.humanomni.safetensors"));
    check(&model, &prompt, "humanomni", 16);
}

#[test]
fn towers_projectors_and_decoders_of_models_that_hear() {
    for (folder, name, case) in [("qwen_omni", "omni", "F"), ("qwen_audio", "qwen2_audio", "C")] {
        let model = load(name, Device::Twin);
        check(&model, &crate::rows::prompt_of(folder, &checkpoint(name), case), name, 16);
    }
}

/// A reference elsewhere than its policy: its log-probabilities are the policy's, from the policy's features or its own, and
/// the policy's gradients do not change.
#[test]
fn a_reference_may_live_on_another_device() {
    for (policy_on, reference_on) in [(Device::Cpu, Device::Twin), (Device::Twin, Device::Cpu)] {
        let model = load("qwen2_5_vl_tied", policy_on);
        train_all(&model);
        let prompt = case_prompt("E", &model);
        let reference = model.reference(ReferencePlace::Memory(reference_on)).unwrap();
        assert_eq!((model.device(), reference.device()), (policy_on, reference_on));
        assert!(reference.params().iter().all(|p| !p.trainable()));
        let groups = [GroupStream { prompt: &prompt, completions: vec![&COMPLETION, &[5, 6]] }];
        let stream = PackedStream::new(&groups).unwrap();
        let features = [model.encode_prompt(&prompt).unwrap()];
        let gradients = || {
            let pass = model.train_pass(&stream, &features, Training::default(), None).unwrap();
            let logprobs = pass.logprobs.clone();
            let d = vec![1.0; logprobs.len()];
            let gradients = pass.backward(&d, None).unwrap();
            model
                .backward_media(&[&prompt], &features, Memories::default(), gradients, Training::default())
                .unwrap();
            (logprobs, take_gradients(&model))
        };
        let (logprobs, before) = gradients();
        let own = [reference.encode_prompt(&prompt).unwrap()];
        let media = prompt.media.iter().zip(&features[0]);
        let projected = [media
            .map(|(medium, f)| reference.project(&f.tower, medium, &prompt.instruction).unwrap())
            .collect::<Vec<_>>()];
        for (what, features) in [("the policy's", &features), ("its own", &own), ("projected", &projected)] {
            let (got, _) = reference.score(&stream, features, 1.0).unwrap();
            let d = max_diff(&got, &logprobs);
            assert!(d <= 1e-5, "{policy_on} beside {reference_on}, {what} features: differs by {d}");
        }
        let (again, after) = gradients();
        assert_eq!(again, logprobs);
        assert_close(&after, &before, 0.0, "policy");
    }
}
