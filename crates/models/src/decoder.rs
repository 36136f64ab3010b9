//! The Qwen2 decoder, shared by every family whose language model is a Qwen2.
//!
//! Source: `transformers` 5.23 `models/qwen2/modeling_qwen2.py` and, for three-axis positions,
//! `models/qwen2_vl/modeling_qwen2_vl.py`. Differences: query, key and value projections run as one op whose output
//! is rotated in place; logits are never formed for a whole stream.
//!
//! Shapes: `t` rows of a stream, `h` width, `d` head width.

use std::sync::Arc;

use candle_core::Tensor;
use omnigrpo_kernels::logprob;
use omnigrpo_ops::{
    AttentionHeads, AttentionLayout, Linear, MatmulMode, Norm, Param, Part, RopeTable, Segments, attention,
    linear_residual, norm, packed_linear, qkv_rope, rows_from_vec, swiglu, with_f32,
};

use crate::cache::GroupCache;
use crate::error::{ModelError, Result};
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
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Pairs of a head that turn with the temporal, height and width position; `None` for plain positions.
    pub mrope_section: Option<[usize; 3]>,
    /// Longest sequence the model was made for, tokens.
    pub max_positions: usize,
    /// What the configuration says about tied embeddings (files have the last word).
    pub tie_word_embeddings: bool,
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
        Ok(Self { config, embed, layers, final_norm, head })
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
        let half = self.config.heads.dim / 2;
        let frequencies: Vec<f32> = (0..half)
            .map(|i| (1.0 / self.config.rope_theta.powf(2.0 * i as f64 / (2 * half) as f64)) as f32)
            .collect();
        let [t, h, _] = self.config.mrope_section.unwrap_or([half, 0, 0]);
        Arc::new(RopeTable::from_angles(positions.len(), half, |row, angles| {
            for (i, angle) in angles.iter_mut().enumerate() {
                let axis = usize::from(i >= t) + usize::from(i >= t + h);
                *angle = positions[row][axis] as f32 * frequencies[i];
            }
        }))
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

    /// Runs a packed stream `[t, h]` to the last block's output (before the final norm). With `tape` the blocks are
    /// recorded for a backward pass.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward<'a>(
        &'a self,
        x_th: Tensor,
        rope: &Arc<RopeTable>,
        layout: &Arc<AttentionLayout>,
        mut tape: Option<&mut Segments<'a>>,
    ) -> Result<Tensor> {
        let heads = self.config.heads;
        let mut x = x_th;
        for layer in &self.layers {
            let (rope, layout) = (Arc::clone(rope), Arc::clone(layout));
            let run = move |x: &Tensor| {
                layer.forward(x, &rope, heads, MatmulMode::Gemm, |qkv| attention(qkv, heads, &layout))
            };
            x = match &mut tape {
                Some(tape) => tape.push(&x, run)?,
                None => run(&x)?,
            };
        }
        Ok(x)
    }

    /// Runs a prompt and keeps its keys and values in `cache`. Returns the hidden row of the last token, `[1, h]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn prefill(&self, x_th: Tensor, rope: &Arc<RopeTable>, cache: &mut GroupCache) -> Result<Tensor> {
        let heads = self.config.heads;
        let rows = x_th.dim(0)?;
        let layout = Arc::new(AttentionLayout::causal(rows));
        let mut x = x_th;
        for (l, layer) in self.layers.iter().enumerate() {
            x = layer.forward(&x, rope, heads, MatmulMode::Gemm, |qkv| {
                with_f32(qkv, |packed| cache.write_prompt(l, packed, heads))?;
                attention(qkv, heads, &layout)
            })?;
        }
        Ok(x.narrow(0, rows - 1, 1)?.contiguous()?)
    }

    /// One decode step: each row continues one completion of one group. The bits of a row do not depend on which
    /// other rows are in the call.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn decode(&self, x_nh: Tensor, rope: &Arc<RopeTable>, groups: &mut [DecodeRows]) -> Result<Tensor> {
        let heads = self.config.heads;
        let rows = x_nh.dim(0)?;
        let mut x = x_nh;
        for (l, layer) in self.layers.iter().enumerate() {
            x = layer.forward(&x, rope, heads, MatmulMode::Rows, |qkv| {
                let mut out = vec![0.0; rows * heads.q_width()];
                with_f32(qkv, |packed| {
                    let mut row = 0;
                    for group in groups.iter_mut() {
                        let n = group.slots.len();
                        let packed = &packed[row * heads.packed_width()..][..n * heads.packed_width()];
                        let out = &mut out[row * heads.q_width()..][..n * heads.q_width()];
                        group.cache.attend(l, packed, &group.slots, heads, out);
                        row += n;
                    }
                })?;
                rows_from_vec(out, rows, heads.q_width())
            })?;
        }
        for group in groups {
            group.cache.advance(&group.slots);
        }
        Ok(x)
    }

    /// Logits of a few rows, `[n, vocab]`, for sampling. Rows do not influence each other.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn logits(&self, hidden_nh: &Tensor) -> Result<Vec<f32>> {
        let (n, h) = hidden_nh.dims2()?;
        let normed = norm(hidden_nh, &self.final_norm)?;
        let mut logits = vec![0.0; n * self.config.vocab];
        with_f32(&normed, |x| {
            self.head.with_weight(|w| logprob::logits_rows(&mut logits, x, w, n, h, self.config.vocab))
        })??;
        Ok(logits)
    }

    /// Log-probabilities and entropies of `targets`, in vocabulary chunks.
    ///
    /// # Errors
    /// A row or token out of range.
    pub fn score(&self, hidden_th: &Tensor, targets: &Targets, temperature: f32) -> Result<Scored> {
        let (t, h) = hidden_th.dims2()?;
        let n = targets.rows.len();
        let vocab = self.config.vocab;
        if targets.rows.iter().any(|&r| r >= t) || targets.tokens.iter().any(|&id| id as usize >= vocab) {
            return Err(ModelError::prompt(format!(
                "score: a target is outside of {t} rows or {vocab} tokens"
            )));
        }
        let mut hidden_nh = vec![0.0; n * h];
        with_f32(hidden_th, |x| {
            for (to, &row) in hidden_nh.chunks_exact_mut(h).zip(&targets.rows) {
                to.copy_from_slice(&x[row * h..(row + 1) * h]);
            }
        })?;
        let Norm::Rms { weight, eps } = &self.final_norm else {
            return Err(ModelError::prompt("score: the decoder's final norm is not an RMS norm"));
        };
        let mut normed_nh = vec![0.0; n * h];
        let mut rstd = vec![0.0; n];
        weight.with_f32(|w| {
            omnigrpo_kernels::norm::rms_forward(&mut normed_nh, &mut rstd, &hidden_nh, w, n, h, *eps);
        })?;
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

    /// The gradient of [`Self::score`]: from dL/dlogp and dL/dentropy per target to dL/dhidden `[t, h]`, adding the
    /// gradients of head and final norm.
    ///
    /// # Errors
    /// Lengths that differ from the targets'.
    pub fn score_backward(
        &self,
        scored: &Scored,
        targets: &Targets,
        stream_rows: usize,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
    ) -> Result<Tensor> {
        let (n, h, vocab) = (targets.rows.len(), self.config.hidden, self.config.vocab);
        if dlogp.len() != targets.tokens.len() {
            return Err(ModelError::prompt(format!(
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
        let Norm::Rms { weight, .. } = &self.final_norm else {
            return Err(ModelError::prompt("score: the decoder's final norm is not an RMS norm"));
        };
        let mut dhidden_nh = vec![0.0; n * h];
        weight.with_f32(|w| {
            let mut run = |dw: Option<&mut [f32]>| {
                omnigrpo_kernels::norm::rms_backward(
                    &mut dhidden_nh,
                    dw,
                    &dnormed,
                    &scored.hidden_nh,
                    w,
                    &scored.rstd,
                    n,
                    h,
                );
            };
            if weight.trainable() { weight.accumulate(|dw| run(Some(dw))) } else { run(None) }
        })?;
        let mut dhidden = vec![0.0; stream_rows * h];
        for (from, &row) in dhidden_nh.chunks_exact(h).zip(&targets.rows) {
            for (to, from) in dhidden[row * h..(row + 1) * h].iter_mut().zip(from) {
                *to += from;
            }
        }
        Ok(rows_from_vec(dhidden, stream_rows, h)?)
    }
}

impl Layer {
    fn forward(
        &self,
        x_th: &Tensor,
        rope: &Arc<RopeTable>,
        heads: AttentionHeads,
        mode: MatmulMode,
        attend: impl FnOnce(&Tensor) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<Tensor> {
        let normed = norm(x_th, &self.input_norm)?;
        let qkv = qkv_rope(&normed, &[&self.q, &self.k, &self.v], rope, heads.q + heads.kv, mode)?;
        let x_th = linear_residual(&attend(&qkv)?, x_th, &self.o, mode)?;
        let normed = norm(&x_th, &self.mlp_norm)?;
        let inner = swiglu(&packed_linear(&normed, &[&self.gate, &self.up], mode)?)?;
        linear_residual(&inner, &x_th, &self.down, mode)
    }
}
