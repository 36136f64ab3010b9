//! Media that arrive in the middle of a completion, against `transformers` on one plain sequence.
//!
//! A golden prompt is cut before its first medium. The rest becomes a completion in which every medium is a turn of an environment
//! and every other token is sampled. The golden numbers are those of the whole sequence.

use std::ops::Range;
use std::sync::Arc;

use omnigrpo_models::{
    AddedTurn, Features, GroupStream, LoadOptions, Memories, Model, PackedStream, Prompt, Training,
    WeightDtype,
};
use omnigrpo_ops::{DecodeBatch, DecodeRows, Device};
use omnigrpo_testkit::{
    Golden, assert_close, case_prompt, check_gradients, checkpoint, max_diff, model_of, take_gradients,
    train_adapters, train_all, training,
};
use omnigrpo_text::{Role, Span, Turn};

/// Checkpoints with a case that shows several media, and the folder of its golden numbers.
const CASES: [(&str, &str, &str, usize); 9] = [
    ("qwen2_vl_tied", "cases", "A", 3),
    ("qwen2_5_vl_tied", "cases", "A", 3),
    ("qwen3_vl", "qwen3_vl", "A", 2),
    ("qwen3_5", "qwen3_5", "A", 2),
    ("internvl3_5_hf", "internvl", "A", 2),
    ("qwen3_vl_moe", "qwen3_vl", "E", 3),
    ("smolvlm", "smolvlm", "A", 2),
    ("omni", "qwen_omni", "E", 3),
    ("qwen2_audio", "qwen_audio", "C", 2),
];

/// A golden sequence as a prompt and a completion with turns.
struct Cut {
    /// The text before the first medium, with all media.
    prompt: Prompt,
    /// The rest of the sequence.
    ids: Vec<u32>,
    turns: Vec<AddedTurn>,
    features: Vec<Features>,
    /// Number of sampled tokens before the golden completion.
    before: usize,
}

fn cut(model: &Model, whole: &Prompt, completion: &[u32]) -> Cut {
    let mut shown: Vec<(usize, Range<usize>)> = Vec::new();
    for span in &whole.spans {
        match shown.last_mut() {
            Some((medium, tokens)) if *medium == span.medium => tokens.end = span.start + span.len,
            _ => shown.push((span.medium, span.start..span.start + span.len)),
        }
    }
    // One token before the first medium is sampled.
    let len = shown[0].1.start - 1;
    let turn = |(medium, tokens): &(usize, Range<usize>)| {
        let next = whole.positions[tokens.start - 1][0] + 1;
        let spans = whole.spans.iter().filter(|span| tokens.contains(&span.start));
        AddedTurn {
            start: tokens.start - len,
            turn: Arc::new(Prompt {
                ids: whole.ids[tokens.clone()].to_vec(),
                spans: spans.map(|s| Span { medium: 0, start: s.start - tokens.start, len: s.len }).collect(),
                positions: whole.positions[tokens.clone()]
                    .iter()
                    .map(|at| at.map(|axis| axis - next))
                    .collect(),
                next_position: whole.positions[tokens.end][0] - next,
                media: vec![Arc::clone(&whole.media[*medium])],
                instruction: Vec::new(),
                text: String::new(),
            }),
            media: vec![*medium],
            sources: Vec::new(),
            said: Turn::text(Role::Tool, ""),
        }
    };
    let turns: Vec<AddedTurn> = shown.iter().map(turn).collect();
    let prompt = Prompt {
        ids: whole.ids[..len].to_vec(),
        spans: Vec::new(),
        positions: whole.positions[..len].to_vec(),
        next_position: whole.positions[len - 1][0] + 1,
        ..whole.clone()
    };
    let added: usize = turns.iter().map(|turn| turn.turn.ids.len()).sum();
    Cut {
        ids: [&whole.ids[len..], completion].concat(),
        before: whole.ids.len() - len - added,
        features: model.encode_prompt(whole).unwrap(),
        prompt,
        turns,
    }
}

/// Two completions with the same turns share one prompt.
fn pair(cut: &Cut) -> PackedStream {
    let groups = [GroupStream { prompt: &cut.prompt, completions: vec![&cut.ids, &cut.ids] }];
    PackedStream::with_turns(&groups, |_, _| &cut.turns).unwrap()
}

/// Log-probabilities and gradients of the golden loss, which the two completions share.
fn train(model: &Model, cut: &Cut, coefficients: &[f32], how: Training) -> Vec<f32> {
    let stream = pair(cut);
    assert_eq!(stream.lengths(), [cut.before + coefficients.len(); 2]);
    let pass = model.train_pass(&stream, std::slice::from_ref(&cut.features), how, None).unwrap();
    let logprobs = pass.logprobs.clone();
    let part = |share: f32| {
        let zeros = std::iter::repeat_n(0.0, cut.before);
        zeros.chain(coefficients.iter().map(move |c| c * share)).collect::<Vec<f32>>()
    };
    let gradients = pass.backward(&[part(0.25), part(0.75)].concat(), None).unwrap();
    let features = std::slice::from_ref(&cut.features);
    model.backward_media(&[&cut.prompt], features, Memories::default(), gradients, how).unwrap();
    logprobs
}

#[test]
fn media_in_turns_equal_one_sequence() {
    for (name, folder, case, media) in CASES {
        let mut model = model_of(name);
        // Qwen3.5 has the rows of Qwen3-VL.
        let of_inputs = if folder == "qwen3_5" { "qwen3_vl" } else { folder };
        let inputs = Golden::read(&format!("{of_inputs}/{case}.safetensors"));
        let want = Golden::read(&format!("{folder}/{case}.{name}.safetensors"));
        let completion = if want.i.contains_key("completion_ids") { &want } else { &inputs };
        let (whole, completion) = (case_prompt(case, &model), completion.ids("completion_ids"));
        let cut = cut(&model, &whole, &completion);
        assert_eq!((cut.turns.len(), cut.prompt.spans.len()), (media, 0), "{name}");
        for recompute in [false, true] {
            train_all(&model);
            let logp = train(&model, &cut, &inputs.f["coefficients"], training(recompute));
            let each = cut.before + completion.len();
            for own in logp.chunks(each) {
                let delta = max_diff(&own[cut.before..], &want.f["logp"]);
                assert!(delta <= 1e-4, "{name}: log-probabilities differ by {delta}");
            }
            assert!(check_gradients(&model, &want, "", 1e-3) > 20, "{name}");
        }
        // Adapters: the gradients of the plain sequence.
        drop(take_gradients(&model));
        model.params().iter().for_each(|param| param.set_trainable(false));
        train_adapters(&mut model, &["q_proj", "v_proj", "down_proj"]);
        let how = Training::default();
        train(&model, &cut, &inputs.f["coefficients"], how);
        let got = take_gradients(&model);
        let plain =
            PackedStream::new(&[GroupStream { prompt: &whole, completions: vec![&completion] }]).unwrap();
        let pass = model.train_pass(&plain, std::slice::from_ref(&cut.features), how, None).unwrap();
        let gradients = pass.backward(&inputs.f["coefficients"], None).unwrap();
        let features = std::slice::from_ref(&cut.features);
        model.backward_media(&[&whole], features, Memories::default(), gradients, how).unwrap();
        assert_close(&got, &take_gradients(&model), 5e-5, name);
    }
}

/// Decoding over a cache that turns extend gives the greedy text of `transformers`, on every device.
#[test]
fn greedy_text_after_media_in_turns_equals_one_sequence() {
    for (name, folder, case, _) in CASES {
        for device in Device::all() {
            let options = LoadOptions { dtype: WeightDtype::Float32, device, ..LoadOptions::default() };
            let opened = omnigrpo_models::Checkpoint::open(&checkpoint(name)).unwrap();
            let model = Model::load(&opened, &options).unwrap();
            let want = Golden::read(&format!("{folder}/{case}.{name}.safetensors")).ids("greedy");
            let Cut { prompt, ids, turns, features, .. } = cut(&model, &case_prompt(case, &model), &[]);
            let (decoder, pass) = (model.decoder(), model.pass());
            let rows = ids.len() + want.len();
            let mut cache = decoder.cache(prompt.ids.len(), 2, rows, &pass).unwrap();
            let shown = Prompt { media: Vec::new(), ..prompt.clone() };
            let x = model.embed_prompt(&shown, &[]).unwrap();
            decoder.prefill(x, &decoder.rope_table(&prompt.positions), &mut cache, &pass, None).unwrap();
            let (mut at, mut next, mut last) = (0, prompt.next_position, None);
            let mut said = Vec::new();
            while said.len() < want.len() {
                let (id, turn) = (ids.get(at).copied(), turns.iter().find(|turn| turn.start == at + 1));
                let id = id.unwrap_or_else(|| said[at - ids.len()]);
                // A token is read with the turn that follows it, as a generator does.
                let mut rows = Prompt {
                    ids: vec![id],
                    spans: Vec::new(),
                    positions: vec![[next; 3]],
                    next_position: next + 1,
                    media: Vec::new(),
                    instruction: Vec::new(),
                    text: String::new(),
                };
                let mut own = Vec::new();
                if let Some(AddedTurn { turn, media, .. }) = turn {
                    rows.ids.extend(&turn.ids);
                    rows.positions.extend(turn.positions.iter().map(|at| at.map(|axis| next + 1 + axis)));
                    rows.spans = turn.spans.iter().map(|s| Span { start: s.start + 1, ..*s }).collect();
                    rows.media.clone_from(&turn.media);
                    rows.next_position += turn.next_position;
                    own = media.iter().map(|&medium| features[medium].clone()).collect();
                }
                let (x, rope) =
                    (model.embed_prompt(&rows, &own).unwrap(), decoder.rope_table(&rows.positions));
                let hidden = if turn.is_some() {
                    decoder.extend(x, &rope, &mut cache, 1, &pass, None).unwrap()
                } else {
                    let mut batch = DecodeBatch::new(vec![DecodeRows { cache: &mut cache, slots: vec![1] }]);
                    decoder.decode(x.x.rows().clone(), &rope, &mut batch, &pass, None).unwrap()
                };
                (at, next) = (at + rows.ids.len(), rows.next_position);
                let logits = decoder.logits(&hidden).unwrap().to_vec();
                last = (0..logits.len() as u32)
                    .max_by(|&a, &b| logits[a as usize].total_cmp(&logits[b as usize]));
                if at >= ids.len() {
                    said.extend(last);
                }
            }
            assert!(last.is_some());
            assert_eq!(said, want, "{name} on {device}");
        }
    }
}
