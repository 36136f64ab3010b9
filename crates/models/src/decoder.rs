//! The Qwen2 decoder, shared by every family whose language model is a Qwen2.
//!
//! Source: `transformers` 5.23 `models/qwen2/modeling_qwen2.py` and, for three-axis positions,
//! `models/qwen2_vl/modeling_qwen2_vl.py`. Differences: query, key and value projections run as one op whose output
//! is rotated in place; logits are never formed for a whole stream; the last block goes beyond its keys and values only
//! for rows whose output somebody reads.
//!
//! A block works on plain slices and has a backward pass written by hand. For it, a block keeps its input, the packed
//! queries, keys and values, attention's output, the middle of the residual stream and the gate and up projections;
//! normalised rows and the gated product are computed again.
//!
//! Shapes: `t` rows of a stream, `h` width, `d` head width.

use std::sync::Arc;

use candle_core::Tensor;
use omnigrpo_kernels::{activation, buffer, logprob};
use omnigrpo_ops::{
    AttentionHeads, AttentionLayout, Linear, MatmulMode, Norm, PackedLinear, Param, Part, RopeTable,
    Segments, rows_from_vec, with_f32,
};

use crate::cache::GroupCache;
use crate::config_json::ConfigJson;
use crate::error::{ModelError, Result};
use crate::rope::Rope;
use crate::weights::{Init, WeightSource};

/// Sizes of a Qwen2 decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub intermediate: usize,
    /// Transformer blocks.
    pub layers: usize,
    /// Attention heads.
    pub heads: AttentionHeads,
    /// Rows of the embedding.
    pub vocab: usize,
    /// RMS norm epsilon.
    pub rms_eps: f32,
    /// Rotary positions.
    pub rope: Rope,
    /// Longest sequence the model was made for, tokens.
    pub max_positions: usize,
    /// What the configuration says about tied embeddings. A file with two different tensors has the last word.
    pub tie_word_embeddings: bool,
}

/// What a class of `transformers` 5.23 assumes where a file is silent. Sizes without a default here must be in the file.
#[derive(Clone, Copy, Debug)]
pub struct TextDefaults {
    /// `num_key_value_heads` where the key is absent; null stands for the number of query heads.
    pub kv_heads: usize,
    /// `rms_norm_eps`.
    pub rms_eps: f64,
    /// `rope_theta`.
    pub theta: f64,
    /// `tie_word_embeddings` of the whole configuration.
    pub tied: bool,
    /// Whether positions have three axes.
    pub multimodal: bool,
}

impl TextDefaults {
    /// `Qwen2Config`.
    pub const QWEN2: Self = Self { kv_heads: 32, rms_eps: 1e-6, theta: 1e4, tied: false, multimodal: false };
    /// `Qwen2VLTextConfig` and `Qwen2_5_VLTextConfig`.
    pub const QWEN_VL: Self = Self { kv_heads: 8, rms_eps: 1e-5, theta: 1e6, tied: false, multimodal: true };
}

impl DecoderConfig {
    /// Reads the fields of a Qwen2 language model; `root` is the whole configuration, which may say instead of `text` that
    /// embeddings are tied.
    ///
    /// # Errors
    /// A missing or impossible field, sliding windows, another activation than SwiGLU's.
    pub fn parse(text: &ConfigJson, root: &ConfigJson, class: TextDefaults) -> Result<Self> {
        let hidden = text.size("hidden_size", None)?;
        let q = text.size("num_attention_heads", None)?;
        let absent = !text.object().contains_key("num_key_value_heads");
        let kv = text.size("num_key_value_heads", Some(if absent { class.kv_heads } else { q }))?;
        let dim = text.size("head_dim", Some(hidden / q))?;
        if kv == 0 || q % kv != 0 || dim == 0 || dim % 2 != 0 {
            return Err(text.error(format!("{q} heads of {dim} with {kv} key-value heads cannot be grouped")));
        }
        if text.boolean("use_sliding_window", false)? {
            return Err(text.error("use_sliding_window is true; sliding windows are not supported"));
        }
        if !matches!(text.text("hidden_act")?, None | Some("silu" | "swish")) {
            return Err(text.error("hidden_act of the language model: only \"silu\" is supported"));
        }
        let tied = |json: &ConfigJson, default: bool| json.boolean("tie_word_embeddings", default);
        Ok(Self {
            hidden,
            intermediate: text.size("intermediate_size", None)?,
            layers: text.size("num_hidden_layers", None)?,
            heads: AttentionHeads { q, kv, dim },
            vocab: text.size("vocab_size", None)?,
            rms_eps: text.epsilon("rms_norm_eps", class.rms_eps)?,
            rope: Rope::parse(text, dim, class.theta, class.multimodal)?,
            max_positions: text.size("max_position_embeddings", Some(32768))?,
            tie_word_embeddings: tied(root, class.tied)? || tied(text, false)?,
        })
    }
}

/// A position on the temporal, height and width axes. Text has three equal ones.
pub type Position = [u32; 3];

/// Names of the decoder's tensors: `model.` for Qwen-VL, `language_model.model.` for others.
#[derive(Clone, Copy, Debug)]
pub struct DecoderNames {
    /// Prefix of `embed_tokens`, `layers`, `norm`.
    pub model: &'static str,
    /// The output head.
    pub head: &'static str,
}

/// A Qwen2 decoder.
pub struct Decoder {
    config: DecoderConfig,
    embed: Arc<Param>,
    layers: Vec<Layer>,
    final_norm: Norm,
    head: Arc<Param>,
    /// Of the rotary pairs of a head.
    frequencies: Vec<f32>,
}

struct Layer {
    input_norm: Norm,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    mlp_norm: Norm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// Rows of a decode call that belong to one group.
pub struct DecodeRows<'a> {
    /// The group's cache.
    pub cache: &'a mut GroupCache,
    /// For each row, the completion it continues.
    pub slots: Vec<usize>,
}

/// Which hidden rows are scored, and with which tokens: row `rows[i]` has the targets
/// `tokens[offsets[i]..offsets[i + 1]]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Targets {
    /// Distinct rows of the stream.
    pub rows: Vec<usize>,
    /// `rows.len() + 1` offsets into `tokens`.
    pub offsets: Vec<usize>,
    /// Token ids.
    pub tokens: Vec<u32>,
}

/// Log-probabilities of a stream's targets, and what their backward pass needs.
pub struct Scored {
    /// Per target, in nats, of softmax(logits / temperature).
    pub logprobs: Vec<f32>,
    /// Per target: the entropy at its row, in nats.
    pub entropies: Vec<f32>,
    hidden_nh: Vec<f32>,
    normed_nh: Vec<f32>,
    /// Of the final norm.
    rstd: Vec<f32>,
    lse: Vec<f32>,
    row_entropies: Vec<f32>,
    temperature: f32,
}

impl Decoder {
    /// Builds the decoder from a source of weights.
    ///
    /// # Errors
    /// As the source.
    pub fn build(config: DecoderConfig, names: DecoderNames, source: &mut dyn WeightSource) -> Result<Self> {
        let (h, i, a) = (config.hidden, config.intermediate, config.heads);
        let prefix = names.model;
        let mut get = |name: String, shape: &[usize], init: Init| {
            source.get(&format!("{prefix}{name}"), Part::Llm, shape, init)
        };
        let embed = get("embed_tokens.weight".into(), &[config.vocab, h], Init::Normal)?;
        let mut layers = Vec::with_capacity(config.layers);
        for l in 0..config.layers {
            let mut rms = |name: &str| -> Result<Norm> {
                let weight = get(format!("layers.{l}.{name}.weight"), &[h], Init::Ones)?;
                Ok(Norm::Rms { weight, eps: config.rms_eps })
            };
            let input_norm = rms("input_layernorm")?;
            let mlp_norm = rms("post_attention_layernorm")?;
            let mut linear = |name: &str, n: usize, k: usize, bias: bool| -> Result<Linear> {
                let weight = get(format!("layers.{l}.{name}.weight"), &[n, k], Init::Normal)?;
                let bias =
                    bias.then(|| get(format!("layers.{l}.{name}.bias"), &[n], Init::Zeros)).transpose()?;
                Ok(Linear::new(weight, bias)?)
            };
            layers.push(Layer {
                input_norm,
                mlp_norm,
                q: linear("self_attn.q_proj", a.q_width(), h, true)?,
                k: linear("self_attn.k_proj", a.kv_width(), h, true)?,
                v: linear("self_attn.v_proj", a.kv_width(), h, true)?,
                o: linear("self_attn.o_proj", h, a.q_width(), false)?,
                gate: linear("mlp.gate_proj", i, h, false)?,
                up: linear("mlp.up_proj", i, h, false)?,
                down: linear("mlp.down_proj", h, i, false)?,
            });
        }
        let final_norm =
            Norm::Rms { weight: get("norm.weight".into(), &[h], Init::Ones)?, eps: config.rms_eps };
        let tied =
            source.tied(&format!("{prefix}embed_tokens.weight"), names.head, config.tie_word_embeddings)?;
        let head = if tied {
            Arc::clone(&embed)
        } else {
            source.get(names.head, Part::Llm, &[config.vocab, h], Init::Normal)?
        };
        let frequencies = config.rope.frequencies(a.dim);
        Ok(Self { config, embed, layers, final_norm, head, frequencies })
    }

    /// Its sizes.
    #[must_use]
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Whether the output head is the input embedding.
    #[must_use]
    pub fn tied(&self) -> bool {
        Arc::ptr_eq(&self.embed, &self.head)
    }

    /// The input embedding `[vocab, h]`.
    #[must_use]
    pub fn embedding(&self) -> &Arc<Param> {
        &self.embed
    }

    /// Rotary angles of each row.
    #[must_use]
    pub fn rope_table(&self, positions: &[Position]) -> Arc<RopeTable> {
        let half = self.frequencies.len();
        let [t, h, _] = self.config.rope.mrope_section.unwrap_or([half, 0, 0]);
        let table = RopeTable::from_angles(positions.len(), half, |row, angles| {
            for (i, angle) in angles.iter_mut().enumerate() {
                let axis = usize::from(i >= t) + usize::from(i >= t + h);
                *angle = positions[row][axis] as f32 * self.frequencies[i];
            }
        });
        Arc::new(table.scaled(self.config.rope.attention()))
    }

    /// Token embeddings `[ids.len(), h]`.
    ///
    /// # Errors
    /// An id outside the vocabulary.
    pub fn embed(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let (h, vocab) = (self.config.hidden, self.config.vocab);
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
            return Err(ModelError::prompt(format!("token id {id} is outside the vocabulary of {vocab}")));
        }
        let mut x = vec![0.0; ids.len() * h];
        self.embed.with_weight(|w| omnigrpo_kernels::embedding::gather(&mut x, w, ids, h))?;
        Ok(x)
    }

    /// Runs a packed stream `[t, h]` to the last block's output (before the final norm) of `rows`, which ascend:
    /// `[rows.len(), h]`. With `tape` the blocks are recorded for a backward pass.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward<'a>(
        &'a self,
        x_th: Tensor,
        rope: &Arc<RopeTable>,
        layout: &Arc<AttentionLayout>,
        rows: &[usize],
        mut tape: Option<&mut Segments<'a>>,
    ) -> Result<Tensor> {
        let (t, h) = x_th.dims2()?;
        let heads = self.config.heads;
        layout.validate(t, t).map_err(|e| ModelError::shape(format!("decoder: {e}")))?;
        if rows.last().is_some_and(|&row| row >= t) || !rows.is_sorted_by(|a, b| a < b) {
            return Err(ModelError::shape(format!("decoder: output rows must ascend below {t}")));
        }
        let some = Arc::new(layout.only(rows));
        let mut x = x_th;
        for (l, layer) in self.layers.iter().enumerate() {
            let last = l + 1 == self.layers.len();
            let layout = Arc::clone(if last { &some } else { layout });
            let block = Block::new(layer, heads, rope, MatmulMode::Gemm, last.then_some(rows));
            let (out, kept) = with_f32(&x, |x| block.forward_over(x, t, &layout))??;
            let out = rows_from_vec(out, if last { rows.len() } else { t }, h)?;
            if let Some(tape) = &mut tape {
                let kept = (!tape.recompute()).then_some(kept);
                tape.own(move |dy| {
                    let dy = omnigrpo_ops::to_vec(&dy.contiguous()?)?;
                    let dx = with_f32(&x, |x| {
                        let kept = match kept {
                            Some(kept) => kept,
                            None => block.forward_over(x, t, &layout)?.1,
                        };
                        block.backward(x, t, kept, dy, &layout)
                    })??;
                    rows_from_vec(dx, t, h)
                });
            }
            x = out;
        }
        Ok(x)
    }

    /// Runs a prompt and keeps its keys and values in `cache`. Returns the hidden row of the last token, `[h]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn prefill(&self, x_th: Tensor, rope: &Arc<RopeTable>, cache: &mut GroupCache) -> Result<Vec<f32>> {
        let (t, _) = x_th.dims2()?;
        let heads = self.config.heads;
        let end = [t.saturating_sub(1)];
        let all = AttentionLayout::causal(t);
        let mut x = omnigrpo_ops::to_vec(&x_th.contiguous()?)?;
        for (l, layer) in self.layers.iter().enumerate() {
            let last = l + 1 == self.layers.len();
            let layout = if last { all.only(&end) } else { all.clone() };
            let block = Block::new(layer, heads, rope, MatmulMode::Gemm, last.then_some(&end));
            let (out, _) = block.forward(&x, t, |qkv, out, lse| {
                cache.write_prompt(l, qkv, heads);
                heads.forward(qkv, out, lse, &layout);
            })?;
            x = out;
        }
        Ok(x)
    }

    /// One decode step on rows `[n, h]`: each continues one completion of one group. The bits of a row do not depend on
    /// which other rows are in the call.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn decode(
        &self,
        x_nh: Vec<f32>,
        rope: &Arc<RopeTable>,
        groups: &mut [DecodeRows],
    ) -> Result<Vec<f32>> {
        let heads = self.config.heads;
        let rows = rope.rows();
        let (from, to) = (heads.packed_width(), heads.q_width());
        let mut x = x_nh;
        for (l, layer) in self.layers.iter().enumerate() {
            let block = Block::new(layer, heads, rope, MatmulMode::Rows, None);
            x = block
                .forward(&x, rows, |qkv, out, _| {
                    let mut row = 0;
                    for group in groups.iter_mut() {
                        let n = group.slots.len();
                        let (qkv, out) = (&qkv[row * from..][..n * from], &mut out[row * to..][..n * to]);
                        group.cache.attend(l, qkv, &group.slots, heads, out);
                        row += n;
                    }
                })?
                .0;
        }
        for group in groups {
            group.cache.advance(&group.slots);
        }
        Ok(x)
    }

    /// Logits of `n` rows of hidden states `[n, h]`, `[n, vocab]`, for sampling. Rows do not influence each other.
    ///
    /// # Errors
    /// Another number of elements than whole rows.
    pub fn logits(&self, hidden_nh: &[f32]) -> Result<Vec<f32>> {
        let (h, vocab) = (self.config.hidden, self.config.vocab);
        let n = hidden_nh.len() / h;
        let (normed, _) = self.final_norm.forward(hidden_nh, n)?;
        let mut logits = vec![0.0; n * vocab];
        self.head.with_weight(|w| logprob::logits_rows(&mut logits, &normed, w, n, h, vocab))?;
        Ok(logits)
    }

    /// Log-probabilities and entropies of `targets`, in vocabulary chunks. `hidden_nh` holds the targets' rows alone, in
    /// their order, as [`Self::forward`] returns them.
    ///
    /// # Errors
    /// Another number of rows than the targets', a token out of range.
    pub fn score(&self, hidden_nh: &Tensor, targets: &Targets, temperature: f32) -> Result<Scored> {
        let (n, h) = hidden_nh.dims2()?;
        let vocab = self.config.vocab;
        if n != targets.rows.len() || targets.tokens.iter().any(|&id| id as usize >= vocab) {
            return Err(ModelError::shape(format!(
                "score: {n} rows for {} with targets, or a token outside of {vocab}",
                targets.rows.len()
            )));
        }
        let hidden_nh = omnigrpo_ops::to_vec(hidden_nh)?;
        let (normed_nh, rstd) = self.final_norm.forward(&hidden_nh, n)?;
        let mut logprobs = vec![0.0; targets.tokens.len()];
        let mut row_entropies = vec![0.0; n];
        let mut lse = vec![0.0; n];
        self.head.with_weight(|w| {
            logprob::forward(
                &normed_nh,
                w,
                n,
                h,
                vocab,
                &targets.tokens,
                &targets.offsets,
                temperature,
                &mut logprobs,
                &mut row_entropies,
                &mut lse,
            );
        })?;
        let mut entropies = vec![0.0; targets.tokens.len()];
        for (i, &entropy) in row_entropies.iter().enumerate() {
            entropies[targets.offsets[i]..targets.offsets[i + 1]].fill(entropy);
        }
        Ok(Scored { logprobs, entropies, hidden_nh, normed_nh, rstd, lse, row_entropies, temperature })
    }

    /// The gradient of [`Self::score`]: from dL/dlogp and dL/dentropy per target to dL/dhidden of the targets' rows
    /// `[n, h]`, adding the gradients of head and final norm.
    ///
    /// # Errors
    /// Lengths that differ from the targets'.
    pub fn score_backward(
        &self,
        scored: Scored,
        targets: &Targets,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
    ) -> Result<Tensor> {
        let (n, h, vocab) = (targets.rows.len(), self.config.hidden, self.config.vocab);
        if dlogp.len() != targets.tokens.len() {
            return Err(ModelError::shape(format!(
                "score backward: {} gradients for {} targets",
                dlogp.len(),
                targets.tokens.len()
            )));
        }
        let row_dentropy: Option<Vec<f32>> = dentropy
            .map(|d| (0..n).map(|i| d[targets.offsets[i]..targets.offsets[i + 1]].iter().sum()).collect());
        let mut dnormed = vec![0.0; n * h];
        self.head.with_weight(|w| {
            let mut run = |dhead: Option<&mut [f32]>| {
                logprob::backward(
                    &mut dnormed,
                    dhead,
                    &scored.normed_nh,
                    w,
                    n,
                    h,
                    vocab,
                    &targets.tokens,
                    &targets.offsets,
                    &scored.lse,
                    &scored.row_entropies,
                    dlogp,
                    row_dentropy.as_deref(),
                    scored.temperature,
                );
            };
            if self.head.trainable() { self.head.accumulate(|dw| run(Some(dw))) } else { run(None) }
        })?;
        let mut dhidden = buffer::zeros(n * h);
        self.final_norm.backward(&mut dhidden, &scored.hidden_nh, &scored.rstd, &dnormed, n)?;
        Ok(rows_from_vec(dhidden, n, h)?)
    }
}

/// One block in one pass.
struct Block<'a> {
    layer: &'a Layer,
    heads: AttentionHeads,
    qkv: PackedLinear,
    o: PackedLinear,
    gate_up: PackedLinear,
    down: PackedLinear,
    /// Rows that go beyond attention; `None` for all.
    some: Option<Vec<usize>>,
}

/// What a block keeps for its backward pass, besides its input. `n` of the `t` rows go beyond attention.
struct Kept {
    /// `[t, (q + 2 kv) · d]`
    qkv: Vec<f32>,
    /// `[t, q]`
    lse: Vec<f32>,
    /// `[t, q · d]`
    attended: Vec<f32>,
    /// The residual stream after attention, `[n, h]`.
    middle: Vec<f32>,
    /// `[n, 2i]`
    gate_up: Vec<f32>,
}

impl<'a> Block<'a> {
    fn new(
        layer: &'a Layer,
        heads: AttentionHeads,
        rope: &Arc<RopeTable>,
        mode: MatmulMode,
        some: Option<&[usize]>,
    ) -> Self {
        let linear = |layers: &[&Linear]| match some {
            Some(rows) => PackedLinear::new(layers, mode).of_rows(rows),
            None => PackedLinear::new(layers, mode),
        };
        Self {
            layer,
            heads,
            qkv: PackedLinear::new(&[&layer.q, &layer.k, &layer.v], mode).rotated(rope, heads.q + heads.kv),
            o: linear(&[&layer.o]),
            gate_up: linear(&[&layer.gate, &layer.up]),
            down: linear(&[&layer.down]),
            some: some.map(<[usize]>::to_vec),
        }
    }

    fn width(&self) -> usize {
        self.layer.o.n()
    }

    /// The rows of `x [t, width]` that go beyond attention.
    fn pick<'x>(&self, x: &'x [f32], width: usize) -> std::borrow::Cow<'x, [f32]> {
        match &self.some {
            None => x.into(),
            Some(rows) => rows.iter().flat_map(|&r| &x[r * width..(r + 1) * width]).copied().collect(),
        }
    }

    /// The reverse of [`Self::pick`]: zeros in the other rows.
    fn spread(&self, x: Vec<f32>, t: usize, width: usize) -> Vec<f32> {
        let Some(rows) = &self.some else { return x };
        let mut all = buffer::zeros(t * width);
        for (x, &r) in x.chunks_exact(width).zip(rows) {
            all[r * width..(r + 1) * width].copy_from_slice(x);
        }
        all
    }

    /// `x [t, h]` to the block's output `[n, h]`. `attend` reads the packed queries, keys and values and writes
    /// attention's output and log-sum-exps.
    fn forward(
        &self,
        x: &[f32],
        t: usize,
        attend: impl FnOnce(&[f32], &mut [f32], &mut [f32]),
    ) -> candle_core::Result<(Vec<f32>, Kept)> {
        let (h, heads) = (self.width(), self.heads);
        let qkv = self.qkv.forward(&self.layer.input_norm.forward(x, t)?.0, t, h)?;
        let mut attended = buffer::zeros(t * heads.q_width());
        let mut lse = buffer::zeros(t * heads.q);
        attend(&qkv, &mut attended, &mut lse);
        let n = self.some.as_ref().map_or(t, Vec::len);
        let q_width = heads.q_width();
        let middle = self.o.forward_onto(&self.pick(x, h), &self.pick(&attended, q_width), n, q_width)?;
        let gate_up = self.gate_up.forward(&self.layer.mlp_norm.forward(&middle, n)?.0, n, h)?;
        let i = self.layer.gate.n();
        let inner = activation::swiglu_forward(&gate_up, n, i);
        let out = self.down.forward_onto(&middle, &inner, n, i)?;
        Ok((out, Kept { qkv, lse, attended, middle, gate_up }))
    }

    fn forward_over(
        &self,
        x: &[f32],
        t: usize,
        layout: &AttentionLayout,
    ) -> candle_core::Result<(Vec<f32>, Kept)> {
        self.forward(x, t, |qkv, out, lse| self.heads.forward(qkv, out, lse, layout))
    }

    /// `dx [t, h]` from `dy [n, h]`, with the gradients of the weights added to their buffers. Each kept array is freed
    /// after its use.
    fn backward(
        &self,
        x: &[f32],
        t: usize,
        kept: Kept,
        mut dy: Vec<f32>,
        layout: &AttentionLayout,
    ) -> candle_core::Result<Vec<f32>> {
        let Kept { qkv, lse, attended, middle, mut gate_up } = kept;
        let (h, i, heads) = (self.width(), self.layer.gate.n(), self.heads);
        let n = self.some.as_ref().map_or(t, Vec::len);
        {
            let inner = activation::swiglu_forward(&gate_up, n, i);
            let dinner = self.down.backward(&inner, &mut dy, n, i)?;
            activation::swiglu_backward(&mut gate_up, &dinner, n, i);
        }
        let (normed, stats) = self.layer.mlp_norm.forward(&middle, n)?;
        let dnormed = self.gate_up.backward(&normed, &mut gate_up, n, h)?;
        drop((normed, gate_up));
        let mut dmiddle = dy;
        self.layer.mlp_norm.backward(&mut dmiddle, &middle, &stats, &dnormed, n)?;
        drop((middle, dnormed));
        let q_width = heads.q_width();
        let dattended = self.o.backward(&self.pick(&attended, q_width), &mut dmiddle, n, q_width)?;
        let dattended = self.spread(dattended, t, q_width);
        let mut dqkv = heads.backward(&qkv, &attended, &lse, &dattended, layout);
        drop((qkv, attended, dattended));
        let (normed, stats) = self.layer.input_norm.forward(x, t)?;
        let dnormed = self.qkv.backward(&normed, &mut dqkv, t, h)?;
        let mut dx = self.spread(dmiddle, t, h);
        self.layer.input_norm.backward(&mut dx, x, &stats, &dnormed, t)?;
        Ok(dx)
    }
}
