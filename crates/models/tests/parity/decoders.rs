//! Text-only decoders that differ from the families' by fields of their configuration: Qwen3 and Llama, against
//! `transformers` on every device, and their caches against the full forward pass.

use std::sync::Arc;

use omnigrpo_models::{
    ConfigJson, Decoder, DecoderConfig, DecoderNames, FileSource, Position, Rope, RopeScaling, Scored,
    TextDefaults, WeightDtype, WeightFiles,
};
use omnigrpo_ops::{
    AttentionHeads, AttentionLayout, DecodeBatch, DecodeRows, Device, Layout, Param, Pass, Rows, Tape,
    Targets, Var,
};

use omnigrpo_testkit::{Golden, check_gradients_of, golden, max_diff};

pub const DECODERS: [(&str, TextDefaults); 3] =
    [("qwen3", TextDefaults::QWEN3), ("llama", TextDefaults::LLAMA), ("llama_tied", TextDefaults::LLAMA)];

/// A decoder and its weights, all of them trained.
pub struct Text {
    pub decoder: Decoder,
    pub params: Vec<Arc<Param>>,
}

pub fn load(name: &str, class: TextDefaults) -> Text {
    let dir = golden("decoders").join(name);
    let json = ConfigJson::read(&dir.join("config.json")).unwrap();
    let config = DecoderConfig::parse(&json, &json, class).unwrap();
    let files = WeightFiles::open(&dir, |key| Some(key.to_owned())).unwrap();
    let mut source = FileSource::new(&files, WeightDtype::Auto);
    let names = DecoderNames { model: "model.", head: "lm_head.weight" };
    let decoder = Decoder::build(config, names, &mut source).unwrap();
    let params = source.finish("decoder").unwrap();
    params.iter().for_each(|p| p.set_trainable(true));
    Text { decoder, params }
}

/// A prompt and its completions as one stream.
pub struct Group {
    pub prompt: Vec<u32>,
    pub completions: Vec<Vec<u32>>,
    ids: Vec<u32>,
    positions: Vec<Position>,
    layout: Arc<Layout>,
    pub targets: Targets,
    /// Place among the targets of each token, completion by completion.
    pub order: Vec<usize>,
}

impl Group {
    pub fn new(prompt: Vec<u32>, completions: Vec<Vec<u32>>) -> Self {
        let (mut ids, end) = (prompt.clone(), prompt.len() as u32);
        let mut positions: Vec<Position> = (0..end).map(|p| [p; 3]).collect();
        // The prompt's last row has the first token of each completion as its targets.
        let firsts: Vec<u32> = completions.iter().map(|c| c[0]).collect();
        let mut targets =
            Targets { rows: vec![prompt.len() - 1], offsets: vec![0, firsts.len()], tokens: firsts };
        let mut order = Vec::new();
        for (c, completion) in completions.iter().enumerate() {
            order.push(c);
            for (t, pair) in completion.windows(2).enumerate() {
                order.push(targets.tokens.len());
                targets.rows.push(ids.len());
                targets.tokens.push(pair[1]);
                targets.offsets.push(targets.tokens.len());
                ids.push(pair[0]);
                positions.push([end + t as u32; 3]);
            }
        }
        let suffixes = completions.iter().map(|c| c.len() - 1).collect();
        let layout = Arc::new(AttentionLayout::groups(&[(prompt.len(), suffixes)]).into());
        Self { prompt, completions, ids, positions, layout, targets, order }
    }

    pub fn golden(want: &Golden) -> Self {
        let ids = want.ids("completion_ids");
        let mut rest = &ids[..];
        let take = |&n: &i64| {
            let (own, left) = rest.split_at(n as usize);
            rest = left;
            own.to_vec()
        };
        Self::new(want.ids("prompt_ids"), want.i["lengths"].iter().map(take).collect())
    }

    /// Values by target in the completions' order.
    pub fn by_completion<T: Copy>(&self, by_target: &[T]) -> Vec<T> {
        self.order.iter().map(|&at| by_target[at]).collect()
    }

    /// The reverse of [`Self::by_completion`].
    pub fn by_target(&self, by_completion: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; self.order.len()];
        self.order.iter().zip(by_completion).for_each(|(&at, x)| out[at] = *x);
        out
    }
}

/// A forward pass on a tape: the stream's embedding, the hidden rows of its targets and their scores.
pub fn forward(text: &Text, group: &Group, device: Device, tape: &mut Tape) -> (Var, Var, Scored) {
    let (decoder, pass) = (&text.decoder, Pass::on(device));
    let x = tape.input(decoder.embed(&group.ids, &pass).unwrap());
    let rope = decoder.rope_table(&group.positions);
    let hidden = decoder.forward(x.clone(), &rope, &group.layout, &group.targets.rows, &pass, tape).unwrap();
    let scored = decoder.score(hidden.rows().clone(), &group.targets, 1.0).unwrap();
    (x, hidden, scored)
}

/// Adds the gradients of Σ dlogp · logp + dentropy · entropy to those of the weights.
pub fn backward(
    text: &Text,
    group: &Group,
    dlogp: &[f32],
    dentropy: &[f32],
    (mut tape, recalls): (Tape, bool),
    device: Device,
) {
    if recalls {
        forward(text, group, device, &mut tape);
        tape = Tape::recalling(tape.into_memory().unwrap().0, false);
    }
    let (x, hidden, scored) = forward(text, group, device, &mut tape);
    let dhidden = text.decoder.score_backward(scored, &group.targets, dlogp, Some(dentropy)).unwrap();
    let dx = tape.backward(&hidden, dhidden).unwrap().take(&x).unwrap();
    text.decoder.embed_backward(&group.ids, &dx).unwrap();
}

#[test]
fn configurations_are_those_of_their_classes() {
    let config = |name, class| load(name, class).decoder.config().clone();
    let qwen = config("qwen3", TextDefaults::QWEN3);
    assert_eq!(qwen.heads, AttentionHeads { q: 4, kv: 2, dim: 8 });
    assert!(qwen.heads.q_width() != qwen.hidden && qwen.qk_norm && qwen.attention_bias == [false; 2]);
    let llama = config("llama", TextDefaults::LLAMA);
    assert_eq!(llama.heads, AttentionHeads { q: 4, kv: 2, dim: 6 });
    assert!(matches!(llama.rope.scaling, RopeScaling::Llama3 { factor: 8.0, original: 32.0, .. }));
    assert!(!llama.qk_norm && llama.attention_bias == [false; 2] && !llama.tie_word_embeddings);
    let tied = config("llama_tied", TextDefaults::LLAMA);
    // The file is silent about key heads, as Llama 2 is.
    assert_eq!(tied.heads, AttentionHeads { q: 2, kv: 2, dim: 12 });
    let plain = Rope { theta: 1e4, axes: None, scaling: RopeScaling::None };
    assert!(tied.attention_bias == [true; 2] && tied.tie_word_embeddings && tied.rope == plain);

    let parse = |class, more: serde_json::Value| {
        let json = serde_json::json!({
            "hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "vocab_size": 10,
        });
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, json.to_string()).unwrap();
        let mut json = ConfigJson::read(&path).unwrap();
        json.replace(more.as_object().unwrap().clone());
        DecoderConfig::parse(&json, &json, class)
    };
    let none = || serde_json::json!({});
    // Defaults of the classes where a file is silent.
    let qwen = parse(TextDefaults { kv_heads: Some(4), ..TextDefaults::QWEN3 }, none()).unwrap();
    assert_eq!((qwen.heads, qwen.max_positions), (AttentionHeads { q: 8, kv: 4, dim: 128 }, 32768));
    let llama = parse(TextDefaults::LLAMA, none()).unwrap();
    assert_eq!((llama.heads, llama.max_positions), (AttentionHeads { q: 8, kv: 8, dim: 32 }, 2048));
    let refused = parse(TextDefaults::LLAMA, serde_json::json!({"mlp_bias": true})).unwrap_err().to_string();
    assert!(refused.contains("mlp_bias") && refused.contains("not supported"), "{refused}");
    // Qwen2 has its biases whatever the file says.
    let biases = serde_json::json!({"attention_bias": false, "num_key_value_heads": 2});
    assert_eq!(parse(TextDefaults::QWEN2, biases).unwrap().attention_bias, [true, false]);
}

#[test]
fn logits_and_logprobs_equal_transformers() {
    for (name, class) in DECODERS {
        let (text, want) = (load(name, class), Golden::read(&format!("decoders/{name}.safetensors")));
        assert_eq!(text.decoder.tied(), name != "llama");
        let group = Group::golden(&want);
        for device in Device::all() {
            let pass = Pass::on(device);
            let ids: Vec<u32> = group.prompt.iter().chain(&group.completions[0]).copied().collect();
            let positions: Vec<Position> = (0..ids.len() as u32).map(|p| [p; 3]).collect();
            let (rope, rows) = (text.decoder.rope_table(&positions), (0..ids.len()).collect::<Vec<_>>());
            let x = Var::constant(text.decoder.embed(&ids, &pass).unwrap());
            let layout = Arc::new(AttentionLayout::causal(ids.len()).into());
            let hidden = text.decoder.forward(x, &rope, &layout, &rows, &pass, &mut Tape::off()).unwrap();
            let logits = text.decoder.logits(hidden.rows()).unwrap().to_vec();
            let d = max_diff(&logits, &want.f["logits"]);
            assert!(d <= 1e-4, "{name} on {device}: logits differ by {d}");

            let (.., scored) = forward(&text, &group, device, &mut Tape::off());
            let d = max_diff(&group.by_completion(&scored.logprobs), &want.f["logp"]);
            assert!(d <= 1e-4, "{name} on {device}: log-probabilities differ by {d}");
            let d = max_diff(&group.by_completion(&scored.entropies), &want.f["entropy"]);
            assert!(d <= 1e-4, "{name} on {device}: entropies differ by {d}");
        }
    }
}

#[test]
fn every_gradient_equals_transformers() {
    for (name, class) in DECODERS {
        let (text, want) = (load(name, class), Golden::read(&format!("decoders/{name}.safetensors")));
        let group = Group::golden(&want);
        let [dlogp, dentropy] = ["dlogp", "dentropy"].map(|d| group.by_target(&want.f[d]));
        for device in Device::all() {
            for tape in [(Tape::recording(false), false), (Tape::recording(true), false)] {
                text.params.iter().for_each(|p| p.clear_grad());
                backward(&text, &group, &dlogp, &dentropy, tape, device);
                let compared = check_gradients_of(&text.params, &want, "", 1e-3);
                assert_eq!(compared, text.params.len(), "{name} on {device}");
            }
        }
    }
}

/// The log-probability of a token under a row of logits.
fn logprob(logits: &[f64], token: u32) -> f64 {
    let max = logits.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
    logits[token as usize] - max - sum.ln()
}

#[test]
fn greedy_text_equals_transformers() {
    for (name, class) in DECODERS {
        let (text, want) = (load(name, class), Golden::read(&format!("decoders/{name}.safetensors")));
        let (decoder, prompt, greedy) = (&text.decoder, want.ids("prompt_ids"), want.ids("greedy"));
        for device in Device::all() {
            let pass = Pass::on(device);
            let positions: Vec<Position> = (0..prompt.len() as u32).map(|p| [p; 3]).collect();
            let mut cache = decoder.cache(prompt.len(), 1, greedy.len(), &pass).unwrap();
            let x = decoder.embed(&prompt, &pass).unwrap();
            let mut hidden =
                decoder.prefill(x, &decoder.rope_table(&positions), &mut cache, &pass, None).unwrap();
            let mut got = Vec::new();
            loop {
                let logits = decoder.logits(&hidden).unwrap().to_f64();
                let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32;
                got.push(best);
                if got.len() == greedy.len() {
                    break;
                }
                let position = [(prompt.len() + got.len() - 1) as u32; 3];
                let mut rows = DecodeBatch::new(vec![DecodeRows { cache: &mut cache, slots: vec![0] }]);
                let (x, rope) = (decoder.embed(&[best], &pass).unwrap(), decoder.rope_table(&[position]));
                hidden = decoder.decode(x, &rope, &mut rows, &pass, None).unwrap();
            }
            assert_eq!(got, greedy, "{name} on {device}");
        }
    }
}

/// Each completion, decoded in one batch after one prompt, has the numbers that training computes from the packed
/// stream; and a completion decoded alone has the same bits.
#[test]
fn caches_equal_the_full_forward_pass() {
    for (name, class) in DECODERS {
        let (text, want) = (load(name, class), Golden::read(&format!("decoders/{name}.safetensors")));
        let (decoder, group) = (&text.decoder, Group::golden(&want));
        for device in Device::all() {
            let pass = Pass::on(device);
            let scores = forward(&text, &group, device, &mut Tape::off()).2.scores;
            let trained = group.by_completion(&scores.logprobs.to_f64());
            let drawn = |which: &[usize]| -> Vec<Vec<f64>> {
                let completions: Vec<&[u32]> = which.iter().map(|&c| &group.completions[c][..]).collect();
                let longest = completions.iter().map(|c| c.len()).max().unwrap();
                let positions: Vec<Position> = (0..group.prompt.len() as u32).map(|p| [p; 3]).collect();
                let mut cache = decoder.cache(group.prompt.len(), which.len(), longest, &pass).unwrap();
                let x = decoder.embed(&group.prompt, &pass).unwrap();
                let last =
                    decoder.prefill(x, &decoder.rope_table(&positions), &mut cache, &pass, None).unwrap();
                let first = decoder.logits(&last).unwrap().to_f64();
                let mut out: Vec<Vec<f64>> =
                    completions.iter().map(|c| vec![logprob(&first, c[0])]).collect();
                for step in 1..longest {
                    let slots: Vec<usize> =
                        (0..which.len()).filter(|&c| completions[c].len() > step).collect();
                    let ids: Vec<u32> = slots.iter().map(|&c| completions[c][step - 1]).collect();
                    let position = [(group.prompt.len() + step - 1) as u32; 3];
                    let rope = decoder.rope_table(&vec![position; slots.len()]);
                    let mut rows =
                        DecodeBatch::new(vec![DecodeRows { cache: &mut cache, slots: slots.clone() }]);
                    let x = decoder.embed(&ids, &pass).unwrap();
                    let hidden = decoder.decode(x, &rope, &mut rows, &pass, None).unwrap();
                    let logits: Rows = decoder.logits(&hidden).unwrap();
                    for (&c, row) in slots.iter().zip(logits.to_f64().chunks(logits.cols())) {
                        out[c].push(logprob(row, completions[c][step]));
                    }
                }
                out
            };
            let all = drawn(&(0..group.completions.len()).collect::<Vec<_>>());
            let bound = if device == Device::Twin { 1e-10 } else { 1e-5 };
            let flat: Vec<f64> = all.iter().flatten().copied().collect();
            assert_eq!(flat.len(), trained.len());
            for (at, (drawn, trained)) in flat.iter().zip(&trained).enumerate() {
                assert!(
                    (drawn - trained).abs() <= bound,
                    "{name} on {device}, token {at}: {drawn} drawn, {trained} trained"
                );
            }
            for c in 0..group.completions.len() {
                assert_eq!(drawn(&[c])[0], all[c], "{name} on {device}: completion {c} alone");
            }
        }
    }
}
