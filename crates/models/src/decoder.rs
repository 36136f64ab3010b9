//! The decoder: a language model of blocks, described by its configuration.
//!
//! Qwen2, Qwen3 and Llama differ in biases and in the norms of queries and keys; Aria has experts. Source: `transformers` 5.23
//! `models/{qwen2,qwen3,llama,aria}` and, for three-axis positions and deep features, `models/{qwen2_vl,qwen3_vl}`. Differences
//! to the source: query, key and value projections run as one; logits are never computed for a whole stream at once; in the last
//! block, only rows whose output is used continue past the keys and values.
//!
//! Shapes: `t` rows of a stream, `h` width, `d` head width.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use omnigrpo_ops::{
    AttentionHeads, AttentionLayout, CausalConv, DecodeBatch, DecodeRows, DeltaGates, DeltaHeads, Draw,
    DrawFrom, GatedNorm, GroupCache, Host, Index, Layout, Linear, Norm, Param, Part, Pass, Replays,
    RopeTable, Rows, Sampler, Scores, StateSizes, Tape, Targets, Top, Var, embed, embed_backward,
};

use crate::block::{Block, BlockPass, Mlp, NormOrder, QkNorm};
use crate::config_json::ConfigJson;
use crate::error::{ModelError, Result};
use crate::experts::{Experts, ExpertsConfig, MixtureClass};
use crate::mixer::{DeltaMixer, Mixer};
use crate::recall::DecoderMemory;
use crate::rope::Rope;
use crate::weights::{Init, Scope, WeightSource};

/// Sizes and kind of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Width of the residual stream, `h`.
    pub hidden: usize,
    /// Width of the feed-forward layer of all rows; 0 if the blocks have experts alone.
    pub intermediate: usize,
    /// Number of transformer blocks.
    pub layers: usize,
    /// Number and width of the attention heads.
    pub heads: AttentionHeads,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Row of the embedding without a gradient as input, as `padding_idx` of PyTorch's `Embedding`.
    pub padding: Option<u32>,
    /// Epsilon of the RMS norms.
    pub rms_eps: f32,
    /// Rotary positions.
    pub rope: Rope,
    /// Number of columns of a head that are rotated.
    pub rotary: usize,
    /// Longest sequence for which the model was trained, in tokens.
    pub max_positions: usize,
    /// Whether the configuration ties input embedding and output head. A file with two different tensors overrides it.
    pub tie_word_embeddings: bool,
    /// Whether queries, keys and values have biases, and whether attention's output layer has one.
    pub attention_bias: [bool; 2],
    /// Whether queries and keys are normalised head by head.
    pub qk_norm: bool,
    /// Whether RMS norms multiply by one plus their weight.
    pub norm_around_one: bool,
    /// Whether the output of attention is multiplied by the sigmoid of a gate.
    pub output_gate: bool,
    /// Blocks with the gated delta rule in place of attention, if any.
    pub delta: Option<DeltaConfig>,
    /// Experts of each block, if any.
    pub experts: Option<ExpertsConfig>,
    /// Number of leading blocks after which deep features of media are added (arXiv 2406.04334).
    pub deep: usize,
}

/// Blocks with the gated delta rule.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaConfig {
    /// Whether each block has the delta rule.
    pub blocks: Vec<bool>,
    /// Numbers and sizes of the heads.
    pub heads: DeltaHeads,
    /// Number of rows in a window of the convolution.
    pub taps: usize,
}

/// Fixed values of a class of `transformers` 5.23, and its defaults for keys that a file lacks. Sizes without a default here
/// must be in the file.
#[derive(Clone, Copy, Debug)]
pub struct TextDefaults {
    /// `num_attention_heads`.
    pub heads: Option<usize>,
    /// `num_key_value_heads` if the key is absent. Null in the file, or `None` here, means the number of query heads.
    pub kv_heads: Option<usize>,
    /// `head_dim`; `None` for the width divided by the number of heads.
    pub head_dim: Option<usize>,
    /// `rms_norm_eps`.
    pub rms_eps: f64,
    /// `rope_theta`.
    pub theta: f64,
    /// `max_position_embeddings`.
    pub max_positions: usize,
    /// `tie_word_embeddings` of the whole configuration.
    pub tied: bool,
    /// Rule that assigns the axes of a position to the pairs of a head.
    pub axes: PositionAxes,
    /// Whether queries, keys and values always have biases and attention's output layer never has one. Otherwise `attention_bias`
    /// of the file applies to all four.
    pub qkv_bias: bool,
    /// Whether queries and keys are normalised head by head.
    pub qk_norm: bool,
    /// `pad_token_id`.
    pub padding: Option<u32>,
    /// Experts of the class, which replace the feed-forward layer; `None` for a dense model.
    pub experts: Option<MixtureClass>,
    /// Whether the class is a hybrid: some blocks have the gated delta rule, attention has an output gate, a part of each head is
    /// rotated, and norms multiply by one plus their weight.
    pub hybrid: bool,
}

impl TextDefaults {
    /// `Qwen2Config`.
    pub const QWEN2: Self = Self {
        heads: None,
        kv_heads: Some(32),
        head_dim: None,
        rms_eps: 1e-6,
        theta: 1e4,
        max_positions: 32768,
        tied: false,
        axes: PositionAxes::One,
        qkv_bias: true,
        qk_norm: false,
        padding: None,
        experts: None,
        hybrid: false,
    };
    /// `Qwen2VLTextConfig` and `Qwen2_5_VLTextConfig`.
    pub const QWEN_VL: Self =
        Self { kv_heads: Some(8), rms_eps: 1e-5, theta: 1e6, axes: PositionAxes::Sections, ..Self::QWEN2 };
    /// `Qwen3Config`.
    pub const QWEN3: Self = Self { head_dim: Some(128), qkv_bias: false, qk_norm: true, ..Self::QWEN2 };
    /// `Qwen3VLTextConfig`.
    pub const QWEN3_VL: Self =
        Self { theta: 5e5, max_positions: 128_000, axes: PositionAxes::Interleaved, ..Self::QWEN3 };
    /// `Qwen3MoeConfig`.
    pub const QWEN3_MOE: Self = Self {
        heads: Some(32),
        kv_heads: Some(4),
        head_dim: None,
        experts: Some(MixtureClass::QWEN3),
        ..Self::QWEN3
    };
    /// `Qwen3VLMoeTextConfig`.
    pub const QWEN3_VL_MOE: Self = Self {
        heads: Some(16),
        kv_heads: Some(16),
        head_dim: None,
        experts: Some(MixtureClass::QWEN3_VL),
        ..Self::QWEN3_VL
    };
    /// `Qwen3_5TextConfig`.
    pub const QWEN35: Self = Self {
        heads: Some(16),
        kv_heads: Some(4),
        head_dim: Some(256),
        hybrid: true,
        axes: PositionAxes::Interleaved,
        ..Self::QWEN3
    };
    /// `LlamaConfig`.
    pub const LLAMA: Self =
        Self { heads: Some(32), kv_heads: None, max_positions: 2048, qkv_bias: false, ..Self::QWEN2 };
}

impl TextDefaults {
    /// Prefix of the weights for speculative decoding. `transformers` ignores them.
    const SPECULATION: &'static str = "mtp.";

    /// Returns the prefix of tensors that a model of this class does not use and that its saved copies keep.
    pub(crate) fn carried(&self) -> Option<&'static str> {
        self.hybrid.then_some(Self::SPECULATION)
    }
}

impl DecoderConfig {
    /// Reads the fields of a language model of this class. `root` is the whole configuration, which may contain
    /// `tie_word_embeddings` instead of `text`.
    ///
    /// # Errors
    /// Returns an error if a field is missing or invalid, or if the model has sliding windows or dual-chunk attention, an
    /// activation other than that of SwiGLU, or biases in the feed-forward layer.
    pub fn parse(text: &ConfigJson, root: &ConfigJson, class: TextDefaults) -> Result<Self> {
        let hidden = text.size("hidden_size", None)?;
        let q = text.size("num_attention_heads", class.heads)?;
        let absent = !text.object().contains_key("num_key_value_heads");
        let default = class.kv_heads.filter(|_| absent).unwrap_or(q);
        let kv = text.size("num_key_value_heads", Some(default))?;
        let dim = text.size("head_dim", Some(class.head_dim.unwrap_or(hidden / q)))?;
        if kv == 0 || q % kv != 0 || dim == 0 || dim % 2 != 0 {
            return Err(text.error(format!(
                "{q} heads of width {dim} cannot share {kv} key-value heads; expected an even width and a multiple of the \
                 key-value heads"
            )));
        }
        let layers = text.size("num_hidden_layers", None)?;
        let delta = delta_blocks(text, layers, class.hybrid)?;
        let rotary = Rope::columns(text, dim, &class)?;
        if !matches!(text.text("hidden_act")?, None | Some("silu" | "swish")) {
            return Err(text.error("hidden_act of the language model is unsupported; expected \"silu\""));
        }
        if text.boolean("mlp_bias", false)? {
            return Err(text.error("mlp_bias is true; feed-forward layers with biases are not supported"));
        }
        let tied = |json: &ConfigJson, default: bool| json.boolean("tie_word_embeddings", default);
        let vocab = text.size("vocab_size", None)?;
        let experts = class.experts.map(|class| class.parse(text)).transpose()?;
        Ok(Self {
            hidden,
            intermediate: if experts.is_some() { 0 } else { text.size("intermediate_size", None)? },
            layers,
            heads: AttentionHeads { q, kv, dim },
            vocab,
            padding: padding(text, vocab, class.padding)?,
            rms_eps: text.epsilon("rms_norm_eps", class.rms_eps)?,
            rope: Rope::parse(text, rotary, &class)?,
            rotary,
            max_positions: text.size("max_position_embeddings", Some(class.max_positions))?,
            tie_word_embeddings: tied(root, class.tied)? || tied(text, false)?,
            attention_bias: match class.qkv_bias {
                true => [true, false],
                false => [text.boolean("attention_bias", false)?; 2],
            },
            qk_norm: class.qk_norm,
            norm_around_one: class.hybrid,
            output_gate: class.hybrid && text.boolean("attn_output_gate", true)?,
            delta,
            experts,
            deep: 0,
        })
    }

    /// Returns whether block `l` has the gated delta rule in place of attention.
    pub fn is_delta(&self, l: usize) -> bool {
        self.delta.as_ref().is_some_and(|delta| delta.blocks.get(l) == Some(&true))
    }
}

/// Returns the blocks with the gated delta rule, and checks that every other block attends to all earlier rows.
fn delta_blocks(text: &ConfigJson, layers: usize, hybrid: bool) -> Result<Option<DeltaConfig>> {
    const FULL: &str = "full_attention";
    const LINEAR: &str = "linear_attention";
    if text.boolean("use_sliding_window", false)? {
        return Err(text.error("use_sliding_window is true; sliding windows are not supported"));
    }
    if text.get("dual_chunk_attention_config").is_some() {
        let what = "dual_chunk_attention_config is present; dual-chunk attention is not supported";
        return Err(text.error(what));
    }
    let known: &[&str] = if hybrid { &[FULL, LINEAR] } else { &[FULL] };
    let interval = text.size("full_attention_interval", Some(4))?.max(1);
    let blocks = match text.get("layer_types") {
        None => (1..=layers).map(|l| hybrid && !l.is_multiple_of(interval)).collect(),
        Some(kinds) => {
            let kinds = kinds.as_array().ok_or_else(|| text.error("layer_types is not a list"))?;
            if let Some(other) = kinds.iter().position(|kind| known.iter().all(|known| kind != known)) {
                let (kind, known) = (&kinds[other], known.join("\" and \""));
                let verb = if hybrid { "are" } else { "is" };
                let what =
                    format!("layer_types has {kind} for layer {other}; only \"{known}\" {verb} supported");
                return Err(text.error(what));
            }
            kinds.iter().map(|kind| kind == LINEAR).collect::<Vec<_>>()
        }
    };
    if blocks.len() != layers {
        let n = blocks.len();
        return Err(
            text.error(format!("layer_types has {n} entries; expected one for each of {layers} layers"))
        );
    }
    if !blocks.contains(&true) {
        return Ok(None);
    }
    let size = |key: &str, default: usize| text.size(key, Some(default));
    let heads = DeltaHeads {
        key: size("linear_num_key_heads", 16)?,
        value: size("linear_num_value_heads", 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
    };
    if heads.key == 0 || heads.value == 0 || !heads.value.is_multiple_of(heads.key) {
        let what = format!(
            "linear_num_value_heads is {} and linear_num_key_heads is {}; expected a multiple, above 0",
            heads.value, heads.key
        );
        return Err(text.error(what));
    }
    if heads.key_dim == 0 || heads.value_dim == 0 {
        return Err(text.error("linear_key_head_dim and linear_value_head_dim must be above 0"));
    }
    let taps = size("linear_conv_kernel_dim", 4)?;
    if !(1..=8).contains(&taps) {
        return Err(text.error(format!("linear_conv_kernel_dim is {taps}; expected 1 to 8")));
    }
    Ok(Some(DeltaConfig { blocks, heads, taps }))
}

/// Reads `pad_token_id`. A negative one counts from the end, as in PyTorch. One beyond the vocabulary names no row.
fn padding(text: &ConfigJson, vocab: usize, default: Option<u32>) -> Result<Option<u32>> {
    const KEY: &str = "pad_token_id";
    let id = match (text.get(KEY), text.object().contains_key(KEY)) {
        (None, true) => None,
        (None, false) => default.map(i64::from),
        (Some(value), _) => {
            Some(value.as_i64().ok_or_else(|| text.error(format!("{KEY} is {value}; expected a token id")))?)
        }
    };
    let row = id.map(|id| if id < 0 { id + vocab as i64 } else { id });
    Ok(row.and_then(|row| u32::try_from(row).ok()).filter(|&row| (row as usize) < vocab))
}

/// A position on the temporal, height and width axes. For text all three are equal.
pub type Position = [u32; 3];

/// Input of a decoder.
#[derive(Clone, Debug)]
pub struct DecoderInput {
    /// Stream before the first block, `[t, h]`.
    pub x: Var,
    /// Rows to add after the first blocks, for families with deep features.
    pub deep: Option<DeepFeatures>,
}

/// Features that are added to the stream after the first blocks.
#[derive(Clone, Debug)]
pub struct DeepFeatures {
    /// Rows of the stream to which the features are added; distinct.
    pub at: Arc<Index>,
    /// `[n · at.len(), h]`: rows to add after the first block, then those to add after the second, and so on.
    pub rows: Var,
}

impl From<Var> for DecoderInput {
    /// Builds an input without deep features.
    fn from(x: Var) -> Self {
        Self { x, deep: None }
    }
}

impl From<Rows> for DecoderInput {
    /// Builds an input without deep features and without a gradient.
    fn from(x: Rows) -> Self {
        Var::constant(x).into()
    }
}

impl DecoderInput {
    /// Returns the stream `x` after block `l`, with the deep features of this block added.
    fn join(&self, l: usize, x: Var, tape: &mut Tape) -> Result<Var> {
        let Some(DeepFeatures { at, rows }) = &self.deep else { return Ok(x) };
        let from = l * at.len();
        if from >= rows.rows().rows() {
            return Ok(x);
        }
        let own = tape.select(rows, &Arc::new((from..from + at.len()).collect::<Vec<_>>().into()))?;
        let own = tape.spread(&own, at, x.rows().rows())?;
        Ok(tape.add(&x, &own)?)
    }
}

/// Rule that assigns to each pair of a head the axis of the position by which it is rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PositionAxes {
    /// One axis for all pairs.
    One,
    /// Consecutive sections: the first pairs use the first axis, the next ones the second, the last ones the third.
    Sections,
    /// Alternating axes: of each three pairs, one uses the second axis and one the third, until their shares are used up. All
    /// other pairs use the first axis.
    Interleaved,
}

impl PositionAxes {
    /// Returns the axis of a pair, given the number of pairs of each axis.
    pub(crate) fn of_pair(self, pair: usize, [t, h, w]: [usize; 3]) -> usize {
        match self {
            Self::One => 0,
            Self::Sections => usize::from(pair >= t) + usize::from(pair >= t + h),
            Self::Interleaved => match pair % 3 {
                1 if pair < 3 * h => 1,
                2 if pair < 3 * w => 2,
                _ => 0,
            },
        }
    }
}

/// Names of the decoder's tensors: `model.` for Qwen-VL, `language_model.model.` for other families.
#[derive(Clone, Copy, Debug)]
pub struct DecoderNames {
    /// Prefix of `embed_tokens`, `layers`, `norm`.
    pub model: &'static str,
    /// Name of the output head.
    pub head: &'static str,
}

/// A decoder with its weights.
pub struct Decoder {
    config: DecoderConfig,
    embed: Arc<Param>,
    blocks: Vec<Arc<Block>>,
    final_norm: Norm,
    head: Arc<Param>,
    /// Number of each block among those of its own kind, with or without the delta rule.
    places: Vec<usize>,
    /// Frequencies of the rotary pairs of a head, in radians per position.
    frequencies: Vec<f32>,
    rows_read: AtomicU64,
}

/// Log-probabilities of a stream's targets, and the arrays that their backward pass needs.
pub struct Scored {
    /// Log-probability of each target under softmax(logits / temperature), in nats.
    pub logprobs: Vec<f32>,
    /// Entropy at the row of each target, in nats.
    pub entropies: Vec<f32>,
    hidden: Rows,
    normed: Rows,
    /// Statistics of the final norm.
    stats: Rows,
    /// Log-probabilities by target and entropies by row, in the device's precision.
    pub scores: Scores,
}

/// Builds an RMS norm of a decoder.
fn norm(config: &DecoderConfig, scope: &mut Scope, name: &str, c: usize) -> Result<Norm> {
    match config.norm_around_one {
        true => {
            let weight = scope.get(&format!("{name}.weight"), &[c], Init::Zeros)?;
            Ok(Norm::AroundOne { weight, eps: config.rms_eps })
        }
        false => scope.rms_norm(name, c, config.rms_eps),
    }
}

/// Builds the input layers, the gated delta rule and the output layer of a block.
fn delta(
    config: &DeltaConfig,
    h: usize,
    eps: f32,
    layer: &mut Scope,
) -> Result<(Vec<Linear>, Mixer, Linear)> {
    let DeltaConfig { heads, taps, .. } = *config;
    let (c, v) = (heads.packed_width(), heads.value_width());
    let mut scope = layer.sub("linear_attn.");
    let conv = scope.get("conv1d.weight", &[c, 1, taps], Init::Normal)?;
    let mixer = DeltaMixer {
        conv: CausalConv::new(conv)?,
        gates: DeltaGates {
            a_log: scope.get("A_log", &[heads.value], Init::Zeros)?,
            dt_bias: scope.get("dt_bias", &[heads.value], Init::Ones)?,
        },
        norm: GatedNorm { weight: scope.get("norm.weight", &[heads.value_dim], Init::Ones)?, eps },
        heads,
    };
    let layers = vec![
        scope.linear("in_proj_qkv", c, h, false)?,
        scope.linear("in_proj_z", v, h, false)?,
        scope.linear("in_proj_a", heads.value, h, false)?,
        scope.linear("in_proj_b", heads.value, h, false)?,
    ];
    Ok((layers, Mixer::Delta(mixer), scope.linear("out_proj", h, v, false)?))
}

/// Builds the input layers, attention and the output layer of a block.
fn attention(config: &DecoderConfig, layer: &mut Scope) -> Result<(Vec<Linear>, Mixer, Linear)> {
    let (h, heads) = (config.hidden, config.heads);
    let [qkv_bias, proj_bias] = config.attention_bias;
    let (queries, mixer) = match config.output_gate {
        true => (2 * heads.q_width(), Mixer::GatedAttention),
        false => (heads.q_width(), Mixer::Attention),
    };
    let layers = vec![
        layer.linear("self_attn.q_proj", queries, h, qkv_bias)?,
        layer.linear("self_attn.k_proj", heads.kv_width(), h, qkv_bias)?,
        layer.linear("self_attn.v_proj", heads.kv_width(), h, qkv_bias)?,
    ];
    Ok((layers, mixer, layer.linear("self_attn.o_proj", h, heads.q_width(), proj_bias)?))
}

/// Builds a block of a decoder.
fn block(config: &DecoderConfig, l: usize, layer: &mut Scope) -> Result<Block> {
    let (h, i, heads) = (config.hidden, config.intermediate, config.heads);
    let norms =
        [norm(config, layer, "input_layernorm", h)?, norm(config, layer, "post_attention_layernorm", h)?];
    let of_delta = config.delta.as_ref().filter(|delta| delta.blocks[l]);
    let (qkv, mixer, proj) = match of_delta {
        Some(own) => delta(own, h, config.rms_eps, layer)?,
        None => attention(config, layer)?,
    };
    // The feed-forward layer of all rows, if there is one.
    let shared = config.experts.map_or(Some("mlp"), |experts| experts.names.shared);
    Ok(Block {
        order: NormOrder::Pre,
        norms,
        scales: None,
        mixer,
        qkv,
        proj,
        qk_norm: match config.qk_norm && of_delta.is_none() {
            false => None,
            true => Some(QkNorm::PerHead([
                norm(config, layer, "self_attn.q_norm", heads.dim)?,
                norm(config, layer, "self_attn.k_norm", heads.dim)?,
            ])),
        },
        mlp: shared.map(|at| swiglu(&mut layer.sub(&format!("{at}.")), h, i)).transpose()?,
        experts: config.experts.map(|experts| Experts::build(&experts, h, layer)).transpose()?,
        heads,
    })
}

/// Builds the feed-forward layer of all rows.
fn swiglu(layer: &mut Scope, h: usize, i: usize) -> Result<Mlp> {
    Ok(Mlp::SwiGlu {
        gate: layer.linear("gate_proj", i, h, false)?,
        up: layer.linear("up_proj", i, h, false)?,
        down: layer.linear("down_proj", h, i, false)?,
    })
}

impl Decoder {
    /// Builds the decoder from a source of weights.
    pub fn build(config: DecoderConfig, names: DecoderNames, source: &mut dyn WeightSource) -> Result<Self> {
        let h = config.hidden;
        let mut scope = Scope::new(source, names.model, Part::Llm);
        let embed = scope.get("embed_tokens.weight", &[config.vocab, h], Init::Normal)?;
        let block = |l: usize| block(&config, l, &mut scope.sub(&format!("layers.{l}."))).map(Arc::new);
        let blocks = (0..config.layers).map(block).collect::<Result<_>>()?;
        let final_norm = norm(&config, &mut scope, "norm", h)?;
        let name = format!("{}embed_tokens.weight", names.model);
        let tied = source.tied(&name, names.head, config.tie_word_embeddings)?;
        let head = if tied {
            Arc::clone(&embed)
        } else {
            source.get(names.head, Part::Llm, &[config.vocab, h], Init::Normal)?
        };
        let frequencies = config.rope.frequencies(config.rotary);
        let mut next = [0; 2];
        let place = |l: usize| {
            let of = &mut next[usize::from(config.is_delta(l))];
            std::mem::replace(of, *of + 1)
        };
        let places = (0..config.layers).map(place).collect();
        Ok(Self {
            config,
            embed,
            blocks,
            final_norm,
            head,
            places,
            frequencies,
            rows_read: AtomicU64::new(0),
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Returns whether the output head is the input embedding.
    pub fn tied(&self) -> bool {
        Arc::ptr_eq(&self.embed, &self.head)
    }

    /// Returns the output head `[vocab, h]`, unless it is the input embedding.
    pub fn own_head(&self) -> Option<&Arc<Param>> {
        (!self.tied()).then_some(&self.head)
    }

    /// Returns the input embedding `[vocab, h]`.
    pub fn embedding(&self) -> &Arc<Param> {
        &self.embed
    }

    /// Returns the weights of each block, with those of its adapters.
    pub fn block_params(&self) -> Vec<Vec<Arc<Param>>> {
        let with_adapter = |param: &Arc<Param>| {
            let adapter = param.adapter().into_iter().flat_map(|adapter| [adapter.a(), adapter.b()]);
            [param].into_iter().chain(adapter).map(Arc::clone).collect::<Vec<_>>()
        };
        self.blocks.iter().map(|block| block.params().into_iter().flat_map(with_adapter).collect()).collect()
    }

    /// Returns the layers that a [`Lend`](omnigrpo_ops::Lend) numbers, each with its weights: the blocks, the embedding and the
    /// head, which may be the same weight. Adapters and the final norm belong to no layer.
    pub fn layers(&self) -> Vec<Vec<Arc<Param>>> {
        let blocks = self.blocks.iter().map(|block| block.params().into_iter().map(Arc::clone).collect());
        blocks.chain([&self.embed, &self.head].map(|end| vec![Arc::clone(end)])).collect()
    }

    /// Returns the number of the embedding and that of the head among the [`Self::layers`].
    pub fn ends(&self) -> [usize; 2] {
        [self.blocks.len(), self.blocks.len() + 1]
    }

    /// Computes the rotary angles of each row.
    pub fn rope_table(&self, positions: &[Position]) -> Arc<RopeTable> {
        let half = self.frequencies.len();
        let axes = self.config.rope.axes.clone().unwrap_or_default();
        let (positions, frequencies) = (positions.to_vec(), self.frequencies.clone());
        let table = RopeTable::from_angles(positions.len(), half, move |row, angles| {
            for (i, angle) in angles.iter_mut().enumerate() {
                let axis = axes.get(i).copied().unwrap_or(0);
                *angle = positions[row][axis] as f32 * frequencies[i];
            }
        });
        Arc::new(table.scaled(self.config.rope.attention()))
    }

    /// Returns the token embeddings `[ids.len(), h]`.
    ///
    /// # Errors
    /// Returns an error if an id is outside the vocabulary.
    pub fn embed(&self, ids: &[u32], pass: &Pass) -> Result<Rows> {
        let vocab = self.config.vocab;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
            return Err(ModelError::shape(format!("token id {id} is outside the vocabulary of {vocab}")));
        }
        Ok(embed(pass.device, &self.embed, &ids.to_vec().into())?)
    }

    /// Adds the gradient of [`Self::embed`] to that of the embedding. The row of the padding token gets none. If the output head is
    /// the same tensor, the gradient of the head remains.
    ///
    /// # Errors
    /// Returns an error if the numbers of rows and ids differ.
    pub fn embed_backward(&self, ids: &[u32], dx: &Rows) -> Result<()> {
        let Some(padding) = self.config.padding.filter(|padding| ids.contains(padding)) else {
            return Ok(embed_backward(&self.embed, ids, dx)?);
        };
        let read = ids.iter().zip(0..).filter(|(id, _)| **id != padding);
        let (ids, rows): (Vec<u32>, Vec<usize>) = read.map(|(&id, row)| (id, row)).unzip();
        Ok(embed_backward(&self.embed, &ids, &dx.select(&rows.into())?)?)
    }

    /// Runs a packed stream `[t, h]` and returns the last block's output at `rows`, before the final norm: `[rows.len(), h]`.
    /// `rows` must ascend.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit.
    pub fn forward(
        &self,
        input: impl Into<DecoderInput>,
        rope: &Arc<RopeTable>,
        layout: &Arc<Layout>,
        rows: &[usize],
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var> {
        let input = input.into();
        let t = input.x.rows().rows();
        layout.validate(t, t)?;
        if rows.last().is_some_and(|&row| row >= t) || !rows.is_sorted_by(|a, b| a < b) {
            return Err(ModelError::shape(format!(
                "decoder: output rows must be in ascending order and below {t}"
            )));
        }
        let some = Arc::new(Host::new(layout.only(rows)));
        let rows: Arc<Index> = Arc::new(rows.to_vec().into());
        let mut x = input.x.clone();
        for (l, block) in self.blocks.iter().enumerate() {
            let (layout, rows) = match l + 1 == self.blocks.len() {
                // The delta rule goes through all rows.
                true if self.config.is_delta(l) => (layout, Some(&rows)),
                true => (&some, Some(&rows)),
                false => (layout, None),
            };
            x = tape.apply(BlockPass::new(block, pass, Some(rope), layout, rows).numbered(pass, l), [&x])?;
            x = input.join(l, x, tape)?;
        }
        Ok(x)
    }

    /// Creates an empty cache for a prompt of `prompt_rows` tokens and `slots` completions of at most `slot_rows` tokens.
    ///
    /// # Errors
    /// Returns an error if address space runs out.
    pub fn cache(
        &self,
        prompt_rows: usize,
        slots: usize,
        slot_rows: usize,
        pass: &Pass,
    ) -> Result<GroupCache> {
        let recurrent = (0..self.config.layers).filter(|&l| self.config.is_delta(l)).count();
        let (layers, heads) = (self.config.layers - recurrent, self.config.heads);
        let cache = GroupCache::new(pass.device, layers, heads, prompt_rows, slots, slot_rows);
        let cache = match &self.config.delta {
            None => cache,
            Some(DeltaConfig { heads, taps, .. }) => {
                let sizes = StateSizes::new(heads.packed_width(), *taps, *heads);
                cache.and_then(|cache| cache.with_states(recurrent, sizes))
            }
        };
        cache.map_err(ModelError::io("key-value cache"))
    }

    fn count(&self, rows: usize) {
        self.rows_read.fetch_add(rows as u64, Ordering::Relaxed);
    }

    /// Returns how many tokens have been read for sampling so far: in prompts, in turns of other speakers, and one by one.
    pub fn rows_read(&self) -> u64 {
        self.rows_read.load(Ordering::Relaxed)
    }

    /// Runs a prompt. Keeps its keys and values in `cache` and the results of the blocks in `memory`. Returns the hidden row of
    /// the last token, `[1, h]`.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit.
    pub fn prefill(
        &self,
        input: impl Into<DecoderInput>,
        rope: &Arc<RopeTable>,
        cache: &mut GroupCache,
        pass: &Pass,
        mut memory: Option<&mut DecoderMemory>,
    ) -> Result<Rows> {
        let input = input.into();
        let t = input.x.rows().rows();
        self.count(t);
        let end = vec![t.saturating_sub(1)];
        let all = AttentionLayout::causal(t);
        let last = Arc::new(Host::new(all.only(&end)));
        let (all, end): (Arc<Layout>, Arc<Index>) = (Arc::new(all.into()), Arc::new(end.into()));
        let heads = self.config.heads;
        let mut x = input.x.clone();
        for (l, block) in self.blocks.iter().enumerate() {
            let (layout, rows) = match l + 1 == self.blocks.len() {
                true => (&last, Some(&end)),
                false => (&all, None),
            };
            let at = self.places[l];
            let (y, kept) = BlockPass::new(block, pass, Some(rope), layout, rows).run(x.rows(), |qkv| {
                if let Mixer::Delta(delta) = &block.mixer {
                    return delta.prefill(qkv, &all, at, cache);
                }
                cache.write_prompt(at, qkv, heads)?;
                heads.forward(qkv, layout)
            })?;
            if let Some(memory) = memory.as_deref_mut() {
                memory.keep(l, &y, kept)?;
            }
            x = input.join(l, Var::constant(y), &mut Tape::off())?;
        }
        Ok(x.into_rows())
    }

    /// Runs one decoding step on rows `[n, h]`, each of which continues one completion of one group. The bits of a row do not
    /// depend on the other rows in the call. The results of the blocks are kept in `memory`.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit or a cache is full.
    pub fn decode(
        &self,
        x: Rows,
        rope: &Arc<RopeTable>,
        batch: &mut DecodeBatch,
        pass: &Pass,
        memory: Option<&mut DecoderMemory>,
    ) -> Result<Rows> {
        self.count(x.rows());
        let x = self.decode_blocks(x, rope, batch, pass, memory)?;
        batch.advance();
        Ok(x)
    }

    /// Runs consecutive rows of one completion that were not sampled one by one: the last sampled token, and then text and media
    /// that another speaker added. Keeps their keys and values in `cache` and the results of the blocks in `memory`. Returns the
    /// hidden row of the last token, `[1, h]`.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit or the slot is full.
    pub fn extend(
        &self,
        input: impl Into<DecoderInput>,
        rope: &Arc<RopeTable>,
        cache: &mut GroupCache,
        slot: usize,
        pass: &Pass,
        mut memory: Option<&mut DecoderMemory>,
    ) -> Result<Rows> {
        let input = input.into();
        let (heads, none): (_, Arc<Layout>) = (self.config.heads, Arc::default());
        let (mut x, rows) = (input.x.clone(), input.x.rows().rows());
        self.count(rows);
        for (l, block) in self.blocks.iter().enumerate() {
            let (at, run) = (self.places[l], BlockPass::new(block, pass, Some(rope), &none, None));
            let (y, kept) = run.run(x.rows(), |qkv| match &block.mixer {
                Mixer::Delta(delta) => delta.extend(qkv, at, cache, slot),
                _ => heads.attend_extended(qkv, at, cache, slot),
            })?;
            if let Some(memory) = memory.as_deref_mut() {
                memory.keep(l, &y, kept)?;
            }
            x = input.join(l, Var::constant(y), &mut Tape::off())?;
        }
        cache.extend(slot, rows);
        Ok(x.into_rows().row_range(rows.saturating_sub(1)..rows)?)
    }

    /// Runs [`Self::decode`] without counting the token in the caches.
    fn decode_blocks(
        &self,
        x: Rows,
        rope: &Arc<RopeTable>,
        batch: &mut DecodeBatch,
        pass: &Pass,
        mut memory: Option<&mut DecoderMemory>,
    ) -> Result<Rows> {
        let pass = pass.clone().per_row();
        let heads = self.config.heads;
        let none: Arc<Layout> = Arc::default();
        let mut x = x;
        for (l, block) in self.blocks.iter().enumerate() {
            let (at, run) = (self.places[l], BlockPass::new(block, &pass, Some(rope), &none, None));
            let run = if memory.is_none() { run.without_wide().over_cache() } else { run };
            let (y, kept) = run.run(&x, |qkv| match &block.mixer {
                Mixer::Delta(delta) => delta.decode(qkv, at, batch),
                _ => heads.attend_cached(qkv, at, batch, run.turn(qkv)),
            })?;
            if let Some(memory) = memory.as_deref_mut() {
                memory.keep(l, &y, kept)?;
            }
            x = y;
        }
        Ok(x)
    }

    /// Returns a generator that draws tokens for the active rows, step by step. The weights must not change while it is in use.
    pub fn next_tokens<'a>(&'a self, how: Sampler<'a>, pass: &Pass) -> NextTokens<'a> {
        NextTokens {
            decoder: self,
            pass: pass.clone(),
            tokens: omnigrpo_ops::NextTokens::new(pass.device, how, self.config.vocab),
        }
    }

    /// Applies the final norm to hidden rows `[n, h]`, for heads other than that of the vocabulary.
    ///
    /// # Errors
    /// Returns an error if the width differs.
    pub fn normed(&self, hidden: &Rows) -> Result<Rows> {
        Ok(self.final_norm.forward(hidden)?.0)
    }

    /// Computes the logits `[n, vocab]` of hidden rows `[n, h]`, for sampling. Rows do not influence each other.
    ///
    /// # Errors
    /// Returns an error if the width differs.
    pub fn logits(&self, hidden: &Rows) -> Result<Rows> {
        Ok(omnigrpo_ops::logits(&self.normed(hidden)?, &self.head)?)
    }

    /// Computes log-probabilities and entropies of `targets`, in vocabulary chunks. `hidden` contains only the targets' rows, in
    /// their order, as [`Self::forward`] returns them.
    ///
    /// # Errors
    /// Returns an error if the number of rows differs from that of the targets or a token is out of range.
    pub fn score(&self, hidden: Rows, targets: &Targets, temperature: f32) -> Result<Scored> {
        self.score_top(hidden, targets, temperature, Top::NONE)
    }

    /// Computes what [`Self::score`] does, and the `top` most probable tokens at each row of the targets ([`Scores::top`]).
    ///
    /// # Errors
    /// Returns the errors of [`Self::score`].
    pub fn score_top(&self, hidden: Rows, targets: &Targets, temperature: f32, top: Top) -> Result<Scored> {
        let (normed, stats) = self.final_norm.forward(&hidden)?;
        let scores = omnigrpo_ops::score_top(&normed, &self.head, targets, temperature, top)?;
        let mut entropies = vec![0.0; targets.tokens.len()];
        for (i, &entropy) in scores.entropies.to_vec().iter().enumerate() {
            entropies[targets.offsets[i]..targets.offsets[i + 1]].fill(entropy);
        }
        Ok(Scored { logprobs: scores.logprobs.to_vec(), entropies, hidden, normed, stats, scores })
    }

    /// Computes the gradient of [`Self::score`], from dL/dlogp and dL/dentropy per target to dL/dhidden of the targets' rows
    /// `[n, h]`. Adds the gradients of head and final norm.
    ///
    /// # Errors
    /// Returns an error if the lengths differ from that of the targets.
    pub fn score_backward(
        &self,
        scored: Scored,
        targets: &Targets,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
    ) -> Result<Rows> {
        let Scored { hidden, normed, stats, scores, .. } = scored;
        let each_row = |d: &[f32]| -> Vec<f32> {
            targets.offsets.windows(2).map(|ends| d[ends[0]..ends[1]].iter().sum()).collect()
        };
        if dentropy.is_some_and(|d| d.len() != targets.tokens.len()) {
            return Err(ModelError::shape(
                "score backward: the numbers of entropy gradients and targets differ",
            ));
        }
        let dentropy = dentropy.map(each_row);
        let dnormed =
            omnigrpo_ops::score_backward(&normed, &self.head, targets, &scores, dlogp, dentropy.as_deref())?;
        let mut dhidden = Rows::zeros(hidden.device(), hidden.rows(), hidden.cols());
        self.final_norm.backward(&mut dhidden, &hidden, &stats, &dnormed)?;
        Ok(dhidden)
    }
}

/// A generator of the next tokens of active rows; see [`omnigrpo_ops::NextTokens`].
pub struct NextTokens<'a> {
    decoder: &'a Decoder,
    pass: Pass,
    tokens: omnigrpo_ops::NextTokens<'a>,
}

impl NextTokens<'_> {
    /// Returns the same generator, with every GPU kernel launched separately.
    #[must_use]
    pub fn plain(self) -> Self {
        Self { tokens: self.tokens.plain(), ..self }
    }

    /// Returns counts of how the tokens were computed, on a GPU.
    pub fn replays(&self) -> Option<&Replays> {
        self.tokens.replays()
    }

    /// Draws a token for each row of `groups`, whose last tokens are `ids` at `positions`, and counts it in the caches. The bits
    /// of a row do not depend on the other rows in the call. The results of the blocks are kept in `memory`, which may be given
    /// only for a model that [can recall](crate::Model::can_recall). A draw is `None` if a logit is NaN or +∞, or if no token can
    /// be drawn.
    ///
    /// # Errors
    /// Returns an error if numbers of rows differ, a cache is full or an id is outside the vocabulary.
    pub fn next(
        &mut self,
        groups: Vec<DecodeRows>,
        ids: Vec<u32>,
        positions: &[Position],
        from: &[DrawFrom],
        mut memory: Option<&mut DecoderMemory>,
    ) -> Result<Vec<Option<Draw>>> {
        let Self { decoder, pass, tokens } = self;
        decoder.count(ids.len());
        let rope = decoder.rope_table(positions);
        tokens.next(ids, rope, groups, from, |of| -> Result<()> {
            let x = embed(pass.device, &decoder.embed, of.ids)?;
            let hidden = decoder.decode_blocks(x, of.rope, of.batch, pass, memory.as_deref_mut())?;
            let at_once = pass.device.logit_rows();
            for first in (0..hidden.rows()).step_by(at_once) {
                let rows = first..hidden.rows().min(first + at_once);
                of.draw(decoder.logits(&hidden.row_range(rows)?)?)?;
            }
            Ok(())
        })
    }
}
