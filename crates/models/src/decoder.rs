//! The decoder: a language model of blocks, described by its configuration.
//!
//! Qwen2, Qwen3 and Llama differ in biases and in the norms of queries and keys, Aria has experts. Source: `transformers`
//! 5.23 `models/{qwen2,qwen3,llama,aria}` and, for three-axis positions and deep features, `models/{qwen2_vl,qwen3_vl}`. Differences:
//! query, key and value projections run as one; logits are never formed for a whole stream; the last block goes beyond its keys
//! and values only for rows whose output somebody reads.
//!
//! Shapes: `t` rows of a stream, `h` width, `d` head width.

use std::sync::Arc;

use omnigrpo_ops::{
    AttentionHeads, AttentionLayout, DecodeBatch, DecodeRows, Draw, DrawFrom, ExpertLinear, GroupCache, Host,
    Index, Layout, Linear, Norm, Param, Part, Pass, Replays, RopeTable, Rows, Sampler, Scores, Tape, Targets,
    Var, embed, embed_backward,
};

use crate::block::{Block, BlockPass, Mlp, NormOrder, QkNorm};
use crate::config_json::ConfigJson;
use crate::error::{ModelError, Result};
use crate::experts::Experts;
use crate::recall::DecoderMemory;
use crate::rope::Rope;
use crate::weights::{Init, Scope, WeightSource};

/// Sizes and kind of a decoder.
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
    /// Whether the configuration ties embeddings. A file with two different tensors overrides it.
    pub tie_word_embeddings: bool,
    /// Whether queries, keys and values have biases, and whether attention's output layer has one.
    pub attention_bias: [bool; 2],
    /// Whether queries and keys are normalised head by head.
    pub qk_norm: bool,
    /// Experts beside the feed-forward layer, which all rows then share.
    pub experts: Option<ExpertsConfig>,
    /// How many of the first blocks have deep features of media added behind them (arXiv 2406.04334).
    pub deep: usize,
}

/// Sizes of the experts of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsConfig {
    /// How many there are.
    pub count: usize,
    /// How many a row uses.
    pub topk: usize,
    /// Width of one.
    pub intermediate: usize,
}

/// Defaults of a class of `transformers` 5.23 where a file is silent, and its fixed values. Sizes without a default here
/// must be in the file.
#[derive(Clone, Copy, Debug)]
pub struct TextDefaults {
    /// `num_key_value_heads` where the key is absent; null, and `None` here, stand for the number of query heads.
    pub kv_heads: Option<usize>,
    /// `head_dim`; `None` for an equal share of the width.
    pub head_dim: Option<usize>,
    /// `rms_norm_eps`.
    pub rms_eps: f64,
    /// `rope_theta`.
    pub theta: f64,
    /// `max_position_embeddings`.
    pub max_positions: usize,
    /// `tie_word_embeddings` of the whole configuration.
    pub tied: bool,
    /// Axes of positions.
    pub axes: PositionAxes,
    /// Whether queries, keys and values always have biases and attention's output layer never; otherwise `attention_bias`
    /// of the file says it of all four.
    pub qkv_bias: bool,
    /// Whether queries and keys are normalised head by head.
    pub qk_norm: bool,
}

impl TextDefaults {
    /// `Qwen2Config`.
    pub const QWEN2: Self = Self {
        kv_heads: Some(32),
        head_dim: None,
        rms_eps: 1e-6,
        theta: 1e4,
        max_positions: 32768,
        tied: false,
        axes: PositionAxes::One,
        qkv_bias: true,
        qk_norm: false,
    };
    /// `Qwen2VLTextConfig` and `Qwen2_5_VLTextConfig`.
    pub const QWEN_VL: Self =
        Self { kv_heads: Some(8), rms_eps: 1e-5, theta: 1e6, axes: PositionAxes::Sections, ..Self::QWEN2 };
    /// `Qwen3Config`.
    pub const QWEN3: Self = Self { head_dim: Some(128), qkv_bias: false, qk_norm: true, ..Self::QWEN2 };
    /// `Qwen3VLTextConfig`.
    pub const QWEN3_VL: Self =
        Self { theta: 5e5, max_positions: 128_000, axes: PositionAxes::Interleaved, ..Self::QWEN3 };
    /// `LlamaConfig`.
    pub const LLAMA: Self = Self { kv_heads: None, max_positions: 2048, qkv_bias: false, ..Self::QWEN2 };
}

impl DecoderConfig {
    /// Reads the fields of a language model of this class; `root` is the whole configuration, which may say instead of `text`
    /// that embeddings are tied.
    ///
    /// # Errors
    /// A missing or impossible field, sliding windows, another activation than SwiGLU's, biases in the feed-forward layer.
    pub fn parse(text: &ConfigJson, root: &ConfigJson, class: TextDefaults) -> Result<Self> {
        let hidden = text.size("hidden_size", None)?;
        let q = text.size("num_attention_heads", None)?;
        let absent = !text.object().contains_key("num_key_value_heads");
        let default = class.kv_heads.filter(|_| absent).unwrap_or(q);
        let kv = text.size("num_key_value_heads", Some(default))?;
        let dim = text.size("head_dim", Some(class.head_dim.unwrap_or(hidden / q)))?;
        if kv == 0 || q % kv != 0 || dim == 0 || dim % 2 != 0 {
            return Err(text.error(format!("{q} heads of {dim} with {kv} key-value heads cannot be grouped")));
        }
        if text.boolean("use_sliding_window", false)? {
            return Err(text.error("use_sliding_window is true; sliding windows are not supported"));
        }
        if !matches!(text.text("hidden_act")?, None | Some("silu" | "swish")) {
            return Err(text.error("hidden_act of the language model: only \"silu\" is supported"));
        }
        if text.boolean("mlp_bias", false)? {
            return Err(text.error("mlp_bias is true; feed-forward layers with biases are not supported"));
        }
        let tied = |json: &ConfigJson, default: bool| json.boolean("tie_word_embeddings", default);
        Ok(Self {
            hidden,
            intermediate: text.size("intermediate_size", None)?,
            layers: text.size("num_hidden_layers", None)?,
            heads: AttentionHeads { q, kv, dim },
            vocab: text.size("vocab_size", None)?,
            rms_eps: text.epsilon("rms_norm_eps", class.rms_eps)?,
            rope: Rope::parse(text, dim, &class)?,
            max_positions: text.size("max_position_embeddings", Some(class.max_positions))?,
            tie_word_embeddings: tied(root, class.tied)? || tied(text, false)?,
            attention_bias: match class.qkv_bias {
                true => [true, false],
                false => [text.boolean("attention_bias", false)?; 2],
            },
            qk_norm: class.qk_norm,
            experts: None,
            deep: 0,
        })
    }
}

/// A position on the temporal, height and width axes. Text has three equal ones.
pub type Position = [u32; 3];

/// Input of a decoder.
#[derive(Clone, Debug)]
pub struct DecoderInput {
    /// The stream before the first block, `[t, h]`.
    pub x: Var,
    /// Rows to add after the first blocks, for families with deep features.
    pub deep: Option<DeepFeatures>,
}

/// Features that join the stream behind the first blocks.
#[derive(Clone, Debug)]
pub struct DeepFeatures {
    /// The rows of the stream that they are added to; distinct.
    pub at: Arc<Index>,
    /// `[n · at.len(), h]`: those added behind the first block, then those behind the second, and so on.
    pub rows: Var,
}

impl From<Var> for DecoderInput {
    /// A stream that nothing joins.
    fn from(x: Var) -> Self {
        Self { x, deep: None }
    }
}

impl From<Rows> for DecoderInput {
    /// A stream that nothing joins and no gradient is asked for.
    fn from(x: Rows) -> Self {
        Var::constant(x).into()
    }
}

impl DecoderInput {
    /// The stream `x` behind block `l`, with what joins it there.
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

/// Which axis of a position the pairs of a head turn with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PositionAxes {
    /// Positions have one.
    One,
    /// The first pairs use the first axis, the next ones the second, the last ones the third.
    Sections,
    /// By turns: every third pair with the second axis and every third with the third, as far as their shares go, the others
    /// with the first.
    Interleaved,
}

impl PositionAxes {
    /// The axis of a pair, given how many pairs each axis has.
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

/// Names of the decoder's tensors: `model.` for Qwen-VL, `language_model.model.` for others.
#[derive(Clone, Copy, Debug)]
pub struct DecoderNames {
    /// Prefix of `embed_tokens`, `layers`, `norm`.
    pub model: &'static str,
    /// The output head.
    pub head: &'static str,
}

/// A decoder with its weights.
pub struct Decoder {
    config: DecoderConfig,
    embed: Arc<Param>,
    blocks: Vec<Arc<Block>>,
    final_norm: Norm,
    head: Arc<Param>,
    /// Frequencies of the rotary pairs of a head.
    frequencies: Vec<f32>,
}

/// Log-probabilities of a stream's targets, and what their backward pass needs.
pub struct Scored {
    /// Per target, in nats, of softmax(logits / temperature).
    pub logprobs: Vec<f32>,
    /// Per target: the entropy at its row, in nats.
    pub entropies: Vec<f32>,
    hidden: Rows,
    normed: Rows,
    /// Statistics of the final norm.
    stats: Rows,
    /// Log-probabilities by target and entropies by row, in the device's precision.
    pub scores: Scores,
}

impl Decoder {
    /// Builds the decoder from a source of weights.
    pub fn build(config: DecoderConfig, names: DecoderNames, source: &mut dyn WeightSource) -> Result<Self> {
        let (h, i, heads) = (config.hidden, config.intermediate, config.heads);
        let [qkv_bias, proj_bias] = config.attention_bias;
        let mut scope = Scope::new(source, names.model, Part::Llm);
        let embed = scope.get("embed_tokens.weight", &[config.vocab, h], Init::Normal)?;
        let mut blocks = Vec::with_capacity(config.layers);
        for l in 0..config.layers {
            let mut layer = scope.sub(&format!("layers.{l}."));
            let mlp = |name: &str| match config.experts {
                None => format!("mlp.{name}"),
                Some(_) => format!("mlp.shared_experts.{name}"),
            };
            let norms = [
                layer.rms_norm("input_layernorm", h, config.rms_eps)?,
                layer.rms_norm("post_attention_layernorm", h, config.rms_eps)?,
            ];
            blocks.push(Arc::new(Block {
                order: NormOrder::Pre,
                norms,
                scales: None,
                qkv: vec![
                    layer.linear("self_attn.q_proj", heads.q_width(), h, qkv_bias)?,
                    layer.linear("self_attn.k_proj", heads.kv_width(), h, qkv_bias)?,
                    layer.linear("self_attn.v_proj", heads.kv_width(), h, qkv_bias)?,
                ],
                proj: layer.linear("self_attn.o_proj", h, heads.q_width(), proj_bias)?,
                qk_norm: match config.qk_norm {
                    false => None,
                    true => Some(QkNorm::PerHead([
                        layer.rms_norm("self_attn.q_norm", heads.dim, config.rms_eps)?,
                        layer.rms_norm("self_attn.k_norm", heads.dim, config.rms_eps)?,
                    ])),
                },
                mlp: Mlp::SwiGlu {
                    gate: layer.linear(&mlp("gate_proj"), i, h, false)?,
                    up: layer.linear(&mlp("up_proj"), i, h, false)?,
                    down: layer.linear(&mlp("down_proj"), h, i, false)?,
                },
                experts: match config.experts {
                    None => None,
                    Some(ExpertsConfig { count, topk, intermediate }) => {
                        let (fc1, fc2) = ([count, h, 2 * intermediate], [count, intermediate, h]);
                        Some(Experts {
                            // A parameter rather than a layer in `transformers`: it takes no adapter.
                            router: Linear::reshaped(
                                layer.get("mlp.router.weight", &[count, h], Init::Normal)?,
                                None,
                                count,
                                h,
                            )?,
                            fc1: ExpertLinear::new(layer.get(
                                "mlp.experts.fc1.weight",
                                &fc1,
                                Init::Normal,
                            )?)?,
                            fc2: ExpertLinear::new(layer.get(
                                "mlp.experts.fc2.weight",
                                &fc2,
                                Init::Normal,
                            )?)?,
                            topk,
                        })
                    }
                },
                heads,
            }));
        }
        let final_norm = scope.rms_norm("norm", h, config.rms_eps)?;
        let name = format!("{}embed_tokens.weight", names.model);
        let tied = source.tied(&name, names.head, config.tie_word_embeddings)?;
        let head = if tied {
            Arc::clone(&embed)
        } else {
            source.get(names.head, Part::Llm, &[config.vocab, h], Init::Normal)?
        };
        let frequencies = config.rope.frequencies(heads.dim);
        Ok(Self { config, embed, blocks, final_norm, head, frequencies })
    }

    /// Returns the sizes.
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

    /// Token embeddings `[ids.len(), h]`.
    ///
    /// # Errors
    /// An id outside the vocabulary.
    pub fn embed(&self, ids: &[u32], pass: &Pass) -> Result<Rows> {
        let vocab = self.config.vocab;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
            return Err(ModelError::shape(format!("token id {id} is outside the vocabulary of {vocab}")));
        }
        Ok(embed(pass.device, &self.embed, &ids.to_vec().into())?)
    }

    /// Adds the gradient of [`Self::embed`] to the embedding's.
    ///
    /// # Errors
    /// Another number of rows than ids.
    pub fn embed_backward(&self, ids: &[u32], dx: &Rows) -> Result<()> {
        Ok(embed_backward(&self.embed, ids, dx)?)
    }

    /// Runs a packed stream `[t, h]` to the last block's output (before the final norm) of `rows`, which ascend:
    /// `[rows.len(), h]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
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
            return Err(ModelError::shape(format!("decoder: output rows must ascend below {t}")));
        }
        let some = Arc::new(Host::new(layout.only(rows)));
        let rows: Arc<Index> = Arc::new(rows.to_vec().into());
        let mut x = input.x.clone();
        for (l, block) in self.blocks.iter().enumerate() {
            let (layout, rows) = match l + 1 == self.blocks.len() {
                true => (&some, Some(&rows)),
                false => (layout, None),
            };
            x = tape.apply(BlockPass::new(block, pass, Some(rope), layout, rows), [&x])?;
            x = input.join(l, x, tape)?;
        }
        Ok(x)
    }

    /// An empty cache for a prompt of `prompt_rows` tokens and `slots` completions of at most `slot_rows` tokens.
    ///
    /// # Errors
    /// No address space.
    pub fn cache(
        &self,
        prompt_rows: usize,
        slots: usize,
        slot_rows: usize,
        pass: &Pass,
    ) -> Result<GroupCache> {
        let (layers, heads) = (self.config.layers, self.config.heads);
        GroupCache::new(pass.device, layers, heads, prompt_rows, slots, slot_rows)
            .map_err(ModelError::io("key-value cache"))
    }

    /// Runs a prompt and keeps its keys and values in `cache`, and what blocks computed in `memory`. Returns the hidden row of
    /// the last token, `[1, h]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
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
            let (y, kept) = BlockPass::new(block, pass, Some(rope), layout, rows).run(x.rows(), |qkv| {
                cache.write_prompt(l, qkv, heads)?;
                heads.forward(qkv, layout)
            })?;
            if let Some(memory) = memory.as_deref_mut() {
                memory.keep(l, &y, kept)?;
            }
            x = input.join(l, Var::constant(y), &mut Tape::off())?;
        }
        Ok(x.into_rows())
    }

    /// One decode step on rows `[n, h]`: each continues one completion of one group. The bits of a row do not depend on
    /// which other rows are in the call. `memory` takes what blocks computed.
    ///
    /// # Errors
    /// Shapes that do not fit, a full cache.
    pub fn decode(
        &self,
        x: Rows,
        rope: &Arc<RopeTable>,
        batch: &mut DecodeBatch,
        pass: &Pass,
        memory: Option<&mut DecoderMemory>,
    ) -> Result<Rows> {
        let x = self.decode_blocks(x, rope, batch, pass, memory)?;
        batch.advance();
        Ok(x)
    }

    /// [`Self::decode`] but for counting the token in the caches.
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
            let block = BlockPass::new(block, &pass, Some(rope), &none, None);
            let (y, kept) = block.run(&x, |qkv| heads.attend_cached(qkv, l, batch))?;
            if let Some(memory) = memory.as_deref_mut() {
                memory.keep(l, &y, kept)?;
            }
            x = y;
        }
        Ok(x)
    }

    /// Draws tokens for rows in flight, one after the other. Weights do not change meanwhile.
    #[must_use]
    pub fn next_tokens<'a>(&'a self, how: Sampler<'a>, pass: &Pass) -> NextTokens<'a> {
        NextTokens {
            decoder: self,
            pass: pass.clone(),
            tokens: omnigrpo_ops::NextTokens::new(pass.device, how, self.config.vocab),
        }
    }

    /// Hidden rows `[n, h]` behind the final norm, for a head of another kind than the vocabulary's.
    ///
    /// # Errors
    /// Another width.
    pub fn normed(&self, hidden: &Rows) -> Result<Rows> {
        Ok(self.final_norm.forward(hidden)?.0)
    }

    /// Logits of hidden rows `[n, h]`, `[n, vocab]`, for sampling. Rows do not influence each other.
    ///
    /// # Errors
    /// Another width.
    pub fn logits(&self, hidden: &Rows) -> Result<Rows> {
        Ok(omnigrpo_ops::logits(&self.normed(hidden)?, &self.head)?)
    }

    /// Log-probabilities and entropies of `targets`, in vocabulary chunks. `hidden` holds the targets' rows alone, in
    /// their order, as [`Self::forward`] returns them.
    ///
    /// # Errors
    /// Another number of rows than the targets', a token out of range.
    pub fn score(&self, hidden: Rows, targets: &Targets, temperature: f32) -> Result<Scored> {
        let (normed, stats) = self.final_norm.forward(&hidden)?;
        let scores = omnigrpo_ops::score(&normed, &self.head, targets, temperature)?;
        let mut entropies = vec![0.0; targets.tokens.len()];
        for (i, &entropy) in scores.entropies.to_vec().iter().enumerate() {
            entropies[targets.offsets[i]..targets.offsets[i + 1]].fill(entropy);
        }
        Ok(Scored { logprobs: scores.logprobs.to_vec(), entropies, hidden, normed, stats, scores })
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
    ) -> Result<Rows> {
        let Scored { hidden, normed, stats, scores, .. } = scored;
        let each_row = |d: &[f32]| -> Vec<f32> {
            targets.offsets.windows(2).map(|ends| d[ends[0]..ends[1]].iter().sum()).collect()
        };
        if dentropy.is_some_and(|d| d.len() != targets.tokens.len()) {
            return Err(ModelError::shape("score backward: gradients of entropies for other targets"));
        }
        let dentropy = dentropy.map(each_row);
        let dnormed =
            omnigrpo_ops::score_backward(&normed, &self.head, targets, &scores, dlogp, dentropy.as_deref())?;
        let mut dhidden = Rows::zeros(hidden.device(), hidden.rows(), hidden.cols());
        self.final_norm.backward(&mut dhidden, &hidden, &stats, &dnormed)?;
        Ok(dhidden)
    }
}

/// The next tokens of rows in flight: see [`omnigrpo_ops::NextTokens`].
pub struct NextTokens<'a> {
    decoder: &'a Decoder,
    pass: Pass,
    tokens: omnigrpo_ops::NextTokens<'a>,
}

impl NextTokens<'_> {
    /// Returns the same decoder with every kernel of a card launched separately.
    #[must_use]
    pub fn plain(self) -> Self {
        Self { tokens: self.tokens.plain(), ..self }
    }

    /// How tokens came about, on a card.
    #[must_use]
    pub fn replays(&self) -> Option<&Replays> {
        self.tokens.replays()
    }

    /// Draws a token for each row of `groups`, whose last tokens are `ids` at `positions`, and counts it in the caches. The bits of a
    /// row do not depend on which other rows are in the call. What the blocks leave goes to `memory`, which takes it from a
    /// model that [can recall it](crate::Model::can_recall) alone. `None`: a logit is NaN or +∞, or no token can be drawn.
    ///
    /// # Errors
    /// Numbers of rows that differ, a full cache, an id outside the vocabulary.
    pub fn next(
        &mut self,
        groups: Vec<DecodeRows>,
        ids: Vec<u32>,
        positions: &[Position],
        from: &[DrawFrom],
        mut memory: Option<&mut DecoderMemory>,
    ) -> Result<Vec<Option<Draw>>> {
        let Self { decoder, pass, tokens } = self;
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
