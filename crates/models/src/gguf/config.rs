//! `config.json` from the metadata of a GGUF file, and back.

use std::f64::consts::TAU;

use omnigrpo_gguf::{GgufFile, Metadata, Value as Datum};
use serde_json::{Value, json};

use super::{EMBEDDING, ROTATIONS};
use crate::decoder::DecoderConfig;
use crate::error::Result;
use crate::families::TextClass;
use crate::rope::{Rope, RopeScaling};

/// Keys of an architecture that are read here.
const READ: &[&str] = &[
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
];
/// Keys of an architecture without an effect on the numbers.
const WITHOUT_EFFECT: &[&str] = &["vocab_size", "rope.scaling.finetuned", "tensor_data_layout"];
/// Keys that may be present as long as they are 0.
const ZERO: &[&str] = &["expert_count", "expert_used_count"];

/// Ramp of the rule of Llama 3.1, in turns over the original length, and that length. A file has only the resulting divisors of the
/// frequencies.
const LLAMA3_TURNS: [f64; 2] = [1.0, 4.0];
const LLAMA3_ORIGINAL: f64 = 8192.0;
/// Turns of YaRN's ramp in llama.cpp.
const YARN_TURNS: [f64; 2] = [32.0, 1.0];

/// The metadata of one architecture.
pub struct Sizes<'a> {
    file: &'a GgufFile,
    class: &'a TextClass,
}

impl<'a> Sizes<'a> {
    /// Checks that every key of the architecture is known, since an unknown one may change what the model computes.
    pub fn new(file: &'a GgufFile, class: &'a TextClass) -> Result<Self> {
        for (key, value) in file.metadata() {
            let Some(key) = key.strip_prefix(class.model_type).and_then(|key| key.strip_prefix('.')) else {
                continue;
            };
            let known = [READ, WITHOUT_EFFECT].iter().any(|keys| keys.contains(&key));
            let is_off = ZERO.contains(&key) && value.count() == Some(0);
            if !known && !is_off {
                let shown = shortened(value);
                let what = format!(
                    "{}.{key} is {shown}, which is unsupported; expected a file without it",
                    class.model_type
                );
                return Err(file.error(what).into());
            }
        }
        Ok(Self { file, class })
    }

    fn get(&self, key: &str) -> Option<&'a Datum> {
        self.file.get(&format!("{}.{key}", self.class.model_type))
    }

    /// Returns a value that a function takes from a datum; `None` if the key is missing.
    fn read<T>(&self, key: &str, take: impl Fn(&'a Datum) -> Option<T>, expected: &str) -> Result<Option<T>> {
        let Some(datum) = self.get(key) else { return Ok(None) };
        let wrong = || {
            let (name, shown) = (self.class.model_type, shortened(datum));
            self.file.error(format!("{name}.{key} is {shown}, expected {expected}"))
        };
        Ok(Some(take(datum).ok_or_else(wrong)?))
    }

    fn size(&self, key: &str) -> Result<Option<u64>> {
        self.read(key, Datum::count, "one integer for all layers")
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        self.read(key, Datum::number, "a number")
    }

    fn required(&self, key: &str) -> Result<u64> {
        let missing =
            || self.file.error(format!("{}.{key} is missing, expected an integer", self.class.model_type));
        Ok(self.size(key)?.ok_or_else(missing)?)
    }

    /// Returns the content of `config.json`. `tied` says whether the output head is the embedding.
    pub fn config(&self, tied: bool) -> Result<Value> {
        let fail = |what: String| self.file.error(what);
        let embedding = self.file.tensors().iter().find(|tensor| tensor.name() == EMBEDDING);
        let embedding = embedding
            .ok_or_else(|| fail(format!("tensor {EMBEDDING} is missing, expected the embedding")))?;
        let &[vocab, _] = embedding.shape() else {
            return Err(fail(format!(
                "tensor {EMBEDDING} has shape {:?}, expected two sizes",
                embedding.shape()
            ))
            .into());
        };
        let (width, heads) = (self.required("embedding_length")?, self.required("attention.head_count")?);
        let dim = match self.size("attention.key_length")? {
            Some(dim) => dim,
            None if heads > 0 => width / heads,
            None => 0,
        };
        for key in ["attention.value_length", "rope.dimension_count"] {
            if let Some(other) = self.size(key)?
                && other != dim
            {
                let what = format!(
                    "{}.{key} is {other}, expected {dim}, the width of a head",
                    self.class.model_type
                );
                return Err(fail(what).into());
            }
        }
        let theta = self.number("rope.freq_base")?.unwrap_or(1e4);
        let Some(eps) = self.number("attention.layer_norm_rms_epsilon")? else {
            let key = "attention.layer_norm_rms_epsilon";
            return Err(fail(format!("{}.{key} is missing, expected a number", self.class.model_type)).into());
        };
        let kv_heads = match self.size("attention.head_count_kv")? {
            Some(kv) => kv,
            None => heads,
        };
        let mut config = json!({
            "architectures": [self.class.architecture],
            "model_type": self.class.model_type,
            "vocab_size": vocab,
            "hidden_size": width,
            "intermediate_size": self.required("feed_forward_length")?,
            "num_hidden_layers": self.required("block_count")?,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": dim,
            "max_position_embeddings": self.required("context_length")?,
            "rms_norm_eps": eps,
            "rope_theta": theta,
            "rope_scaling": self.scaling(theta, dim as usize)?,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "tie_word_embeddings": tied,
        });
        if !self.class.defaults.qkv_bias {
            let biased = self.file.tensors().iter().any(|tensor| tensor.name().ends_with(".attn_q.bias"));
            config["attention_bias"] = biased.into();
        }
        Ok(config)
    }

    /// Returns `rope_scaling`.
    fn scaling(&self, theta: f64, dim: usize) -> Result<Value> {
        let kind = self.read("rope.scaling.type", Datum::text, "a text")?.unwrap_or("none");
        let factor = self.number("rope.scaling.factor")?;
        let original = self.size("rope.scaling.original_context_length")?;
        let rotations = self.rotations(theta, dim)?;
        let fail = |what: String| Err(self.file.error(what).into());
        match (kind, factor, original, rotations) {
            ("none", None, None, None) => Ok(Value::Null),
            ("none", None, None, Some([factor, original])) => Ok(json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LLAMA3_TURNS[0],
                "high_freq_factor": LLAMA3_TURNS[1],
                "original_max_position_embeddings": original as u64,
            })),
            ("linear", Some(factor), None, None) => Ok(json!({ "rope_type": "linear", "factor": factor })),
            ("yarn", Some(factor), Some(original), None) => Ok(json!({
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
            })),
            (kind, factor, original, rotations) => {
                let also = if rotations.is_some() {
                    format!(", with the tensor {ROTATIONS}")
                } else {
                    String::new()
                };
                fail(format!(
                    "rope.scaling.type is {kind:?} with factor {factor:?} and original_context_length {original:?}{also}; expected \
                     none, linear with a factor, or yarn with both"
                ))
            }
        }
    }

    /// Returns factor and original length of Llama 3.1's rule whose divisors of the rotary frequencies the file has.
    fn rotations(&self, theta: f64, dim: usize) -> Result<Option<[f64; 2]>> {
        let Some(tensor) = self.file.tensors().iter().find(|tensor| tensor.name() == ROTATIONS) else {
            return Ok(None);
        };
        if tensor.shape() != [dim / 2] {
            let what = format!("tensor {ROTATIONS} has shape {:?}, expected [{}]", tensor.shape(), dim / 2);
            return Err(self.file.error(what).into());
        }
        let mut got = vec![0.0; dim / 2];
        self.file.read(tensor, 0, &mut got)?;
        let rule = llama3_of(&got, theta, dim);
        let RopeScaling::Llama3 { factor, original, .. } = rule else { return Ok(None) };
        let expected = divisors(&Rope { theta, axes: None, scaling: rule }, dim);
        let far = |(got, expected): (&f32, &f32)| got.is_nan() || (got - expected).abs() > 1e-4 * expected;
        match got.iter().zip(&expected).position(far) {
            None => Ok(Some([factor, original])),
            Some(at) => {
                let what = format!(
                    "value {at} of tensor {ROTATIONS} is {}, expected {} by the rule of Llama 3.1 for a factor of {factor}; other \
                     scaled rotations are unsupported",
                    got[at], expected[at]
                );
                Err(self.file.error(what).into())
            }
        }
    }
}

/// Returns the rule of Llama 3.1 that explains divisors of the frequencies best. The largest divisor is the factor, and the first one
/// between 1 and the factor gives the original length. Without one, it is that of the published models.
fn llama3_of(divisors: &[f32], theta: f64, dim: usize) -> RopeScaling {
    let factor = f64::from(divisors.iter().copied().fold(1.0, f32::max));
    let plain = Rope { theta, axes: None, scaling: RopeScaling::None }.frequencies(dim);
    let [low, high] = LLAMA3_TURNS;
    let between = plain
        .iter()
        .zip(divisors)
        .find(|(_, divisor)| (1.001..factor - 0.001).contains(&f64::from(**divisor)));
    let original = between.map_or(LLAMA3_ORIGINAL, |(&frequency, &divisor)| {
        let smooth = (1.0 / f64::from(divisor) - 1.0 / factor) / (1.0 - 1.0 / factor);
        (TAU / f64::from(frequency) * (low + smooth * (high - low))).round()
    });
    RopeScaling::Llama3 { factor, original, turns: LLAMA3_TURNS }
}

/// Returns the numbers by which a scaling divides the frequencies of the pairs of a head.
fn divisors(rope: &Rope, dim: usize) -> Vec<f32> {
    let plain = Rope { scaling: RopeScaling::None, ..rope.clone() }.frequencies(dim);
    plain.iter().zip(rope.frequencies(dim)).map(|(plain, scaled)| plain / scaled).collect()
}

/// Returns sizes and rotations of a decoder as metadata of an architecture, and the divisors of the frequencies that belong in a tensor. The
/// error is a message.
pub fn metadata_of(
    decoder: &DecoderConfig,
    architecture: &str,
) -> Result<(Metadata, Option<Vec<f32>>), String> {
    let size = |n: usize| match u32::try_from(n) {
        Ok(n) => Ok(Datum::U32(n)),
        Err(_) => Err(format!("a size is {n}, expected at most {}", u32::MAX)),
    };
    let mut metadata = vec![
        ("block_count", size(decoder.layers)?),
        ("context_length", size(decoder.max_positions)?),
        ("embedding_length", size(decoder.hidden)?),
        ("feed_forward_length", size(decoder.intermediate)?),
        ("attention.head_count", size(decoder.heads.q)?),
        ("attention.head_count_kv", size(decoder.heads.kv)?),
        ("attention.key_length", size(decoder.heads.dim)?),
        ("attention.value_length", size(decoder.heads.dim)?),
        ("attention.layer_norm_rms_epsilon", Datum::F32(decoder.rms_eps)),
        ("rope.dimension_count", size(decoder.heads.dim)?),
        ("rope.freq_base", Datum::F32(decoder.rope.theta as f32)),
        ("vocab_size", size(decoder.vocab)?),
    ];
    let mut rotations = None;
    let scaling = |kind: &str, factor: f64| {
        [("rope.scaling.type", Datum::from(kind)), ("rope.scaling.factor", Datum::F32(factor as f32))]
    };
    match decoder.rope.scaling {
        // Within `context_length`, dynamic scaling does nothing.
        RopeScaling::None | RopeScaling::Dynamic => {}
        RopeScaling::Linear { factor } => metadata.extend(scaling("linear", factor)),
        RopeScaling::Yarn { factor, original, turns, truncate, attention } => {
            let usual = 0.1 * factor.ln() + 1.0;
            if turns != YARN_TURNS || !truncate || (attention - usual).abs() > 1e-6 {
                return Err(format!(
                    "rope_scaling yarn has beta_fast {}, beta_slow {}, truncate {truncate} and attention_factor {attention}; for GGUF \
                     expected {}, {}, true and {usual}",
                    turns[0], turns[1], YARN_TURNS[0], YARN_TURNS[1]
                ));
            }
            metadata.extend(scaling("yarn", factor));
            metadata.push(("rope.scaling.original_context_length", size(original as usize)?));
        }
        RopeScaling::Llama3 { .. } => rotations = Some(divisors(&decoder.rope, decoder.heads.dim)),
    }
    let named = metadata.into_iter().map(|(key, value)| (format!("{architecture}.{key}"), value));
    Ok((named.collect(), rotations))
}

/// Formats a value for a message; a long one is truncated.
pub fn shortened(value: &Datum) -> String {
    let text = match value {
        Datum::List(list) => format!("a list of {} values", list.len()),
        Datum::Text(text) => format!("{text:?}"),
        value => format!("{value:?}"),
    };
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
