//! Text encoders of BERT's kind: BERT, RoBERTa, XLM-RoBERTa, DistilBERT.
//!
//! Norms come after each half of a block. The models differ in the names of tensors and configuration keys, in the first
//! position, and in token types and pooler, which not all have. Source: arXiv 1810.04805, 1907.11692,
//! 1911.02116, 1910.01108; `transformers` 5.23 `models/{bert,roberta,xlm_roberta,distilbert}`.
//!
//! Sequences of a batch follow one another without padding and attend only to themselves. Unsupported: decoders, relative
//! positions.

use std::path::Path;
use std::sync::Arc;

use omnigrpo_ops::{
    Activation, AttentionLayout, Index, Linear, Mix, Norm, Param, Part, Pass, RowMix, Rows, Tape, Var,
};

use super::{Blocks, EncoderSizes, LayerNames, SizeKeys, load};
use crate::block::NormOrder;
use crate::config_json::ConfigJson;
use crate::error::{ModelError, Result};
use crate::weights::{FrozenWeights, Init, Scope, WeightSource};

const BERT_LAYERS: LayerNames = LayerNames {
    prefix: "encoder.layer.",
    order: NormOrder::Post,
    norm1: "attention.output.LayerNorm",
    qkv: ["attention.self.query", "attention.self.key", "attention.self.value"],
    out: "attention.output.dense",
    norm2: "output.LayerNorm",
    fc: ["intermediate.dense", "output.dense"],
    key_bias: true,
};

const DISTIL_LAYERS: LayerNames = LayerNames {
    prefix: "transformer.layer.",
    order: NormOrder::Post,
    norm1: "sa_layer_norm",
    qkv: ["attention.q_lin", "attention.k_lin", "attention.v_lin"],
    out: "attention.out_lin",
    norm2: "output_layer_norm",
    fc: ["ffn.lin1", "ffn.lin2"],
    key_bias: true,
};

/// A configuration of BERT's kind.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// Sizes of the blocks.
    pub sizes: EncoderSizes,
    /// Rows of the word embedding.
    pub vocab: usize,
    /// Rows of the position embedding.
    pub max_positions: usize,
    /// Position of the first token: 0, or the padding id + 1 for RoBERTa.
    pub first_position: usize,
    /// Rows of the token-type embedding; 0 for none.
    pub token_types: usize,
    /// Whether tensors have DistilBERT's names.
    distil: bool,
}

impl BertConfig {
    /// Reads a `config.json` with `model_type` bert, roberta, xlm-roberta, camembert or distilbert.
    ///
    /// # Errors
    /// Returns an error if the model is another one or a field is invalid; the error names the field.
    pub fn parse(json: &ConfigJson) -> Result<Self> {
        let kind = json.text("model_type")?.unwrap_or("bert");
        let roberta = match kind {
            "bert" | "distilbert" => false,
            "roberta" | "xlm-roberta" | "camembert" => true,
            other => {
                let known = "bert, roberta, xlm-roberta, camembert or distilbert";
                return Err(json.error(format!("model_type is {other:?}; expected {known}")));
            }
        };
        let distil = kind == "distilbert";
        let embedding = json.text("position_embedding_type")?.unwrap_or("absolute");
        if json.boolean("is_decoder", false)? || embedding != "absolute" {
            return Err(json.error(
                "is_decoder or position_embedding_type is unsupported; expected an encoder with absolute positions",
            ));
        }
        let keys = if distil {
            SizeKeys {
                hidden: ("dim", 768),
                intermediate: ("hidden_dim", 3072),
                layers: ("n_layers", 6),
                heads: ("n_heads", 12),
                activation: ("activation", "gelu"),
                norm_eps: 1e-12,
            }
        } else {
            SizeKeys {
                hidden: ("hidden_size", 768),
                intermediate: ("intermediate_size", 3072),
                layers: ("num_hidden_layers", 12),
                heads: ("num_attention_heads", 12),
                activation: ("hidden_act", "gelu"),
                norm_eps: 1e-12,
            }
        };
        let max_positions = json.size("max_position_embeddings", Some(512))?;
        let padding = json.get("pad_token_id").map_or(Some(1), serde_json::Value::as_u64);
        let first_position = match (roberta, padding) {
            (false, _) => 0,
            (true, Some(id)) if (id as usize) < max_positions.saturating_sub(1) => id as usize + 1,
            (true, _) => return Err(json.error("pad_token_id must be below max_position_embeddings − 1")),
        };
        Ok(Self {
            sizes: EncoderSizes::parse(json, &keys)?,
            vocab: json.size("vocab_size", Some(if roberta { 50_265 } else { 30_522 }))?,
            max_positions,
            first_position,
            token_types: if distil { 0 } else { json.size("type_vocab_size", Some(2))? },
            distil,
        })
    }

    /// Returns the length of the longest supported sequence, in tokens.
    pub fn max_tokens(&self) -> usize {
        self.max_positions - self.first_position
    }
}

/// A text encoder of BERT's kind.
pub struct Bert {
    config: BertConfig,
    words: Arc<Param>,
    positions: Arc<Param>,
    token_types: Option<Arc<Param>>,
    embed_norm: Norm,
    blocks: Blocks,
    pooler: Option<Linear>,
}

impl Bert {
    /// Builds the encoder. Names below `prefix` are those of `BertModel`, such as
    /// `embeddings.word_embeddings.weight`. `pooler` is true if the checkpoint has a pooler.
    pub fn build(
        config: BertConfig,
        pooler: bool,
        prefix: &str,
        part: Part,
        source: &mut dyn WeightSource,
    ) -> Result<Self> {
        let mut weights = Scope::new(source, prefix, part);
        let c = config.sizes.hidden;
        let mut table = |name: &str, rows: usize| {
            weights.get(&format!("embeddings.{name}_embeddings.weight"), &[rows, c], Init::Normal)
        };
        let words = table("word", config.vocab)?;
        let positions = table("position", config.max_positions)?;
        let token_types =
            (config.token_types > 0).then(|| table("token_type", config.token_types)).transpose()?;
        let embed_norm = weights.layer_norm("embeddings.LayerNorm", c, config.sizes.norm_eps)?;
        let layers = if config.distil { &DISTIL_LAYERS } else { &BERT_LAYERS };
        let blocks = Blocks::build(&config.sizes, layers, &mut weights)?;
        let pooler = pooler.then(|| weights.linear("pooler.dense", c, c, true)).transpose()?;
        Ok(Self { words, positions, token_types, embed_norm, blocks, pooler, config })
    }

    /// Loads an encoder without pooler from a separate directory, frozen.
    ///
    /// # Errors
    /// Returns an error if files are unreadable, the architecture is another one or tensors do not fit.
    pub fn load(dir: &Path, how: impl Into<FrozenWeights>) -> Result<Self> {
        let name = |key: &str| published_name(key).filter(|name| !name.starts_with("pooler."));
        load(dir, how, "BERT", name, |json, source| {
            Self::build(BertConfig::parse(json)?, false, "", Part::Llm, source)
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// Maps token ids, with the tokenizer's special tokens, to the stream after the first `blocks` blocks `[t, c]`. The
    /// sequences follow one another.
    ///
    /// # Errors
    /// Returns an error if there is no sequence, a sequence is empty or too long, an id is outside the vocabulary, or the encoder
    /// has fewer blocks.
    pub fn hidden(&self, sequences: &[&[u32]], blocks: usize, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        let config = &self.config;
        if sequences.is_empty() || blocks > config.sizes.layers {
            return Err(ModelError::shape(format!(
                "BERT: got {} sequences and {blocks} blocks; expected at least one sequence and at most {} blocks",
                sequences.len(),
                config.sizes.layers
            )));
        }
        if let Some(bad) = sequences.iter().find(|s| s.is_empty() || s.len() > config.max_tokens()) {
            return Err(ModelError::shape(format!(
                "BERT: a sequence has {} tokens; expected 1 to {}",
                bad.len(),
                config.max_tokens()
            )));
        }
        let ids = |ids: Vec<u32>| -> Arc<Mix> { Arc::new(RowMix::select(ids).into()) };
        let words = ids(sequences.iter().flat_map(|s| s.iter().copied()).collect());
        let first = config.first_position;
        let positions = sequences.iter().flat_map(|s| (first..first + s.len()).map(|p| p as u32));
        let positions = ids(positions.collect());
        let x = tape.input(Rows::zeros(pass.device, words.len(), config.sizes.hidden));
        let x = tape.add_rows(&x, &self.words, &words)?;
        let mut x = tape.add_rows(&x, &self.positions, &positions)?;
        if let Some(table) = &self.token_types {
            x = tape.add_rows(&x, table, &ids(vec![0; words.len()]))?;
        }
        let x = tape.norm(&x, &self.embed_norm)?;
        let lens: Vec<usize> = sequences.iter().map(|s| s.len()).collect();
        self.blocks.forward(x, blocks, AttentionLayout::full_blocks(&lens), pass, tape)
    }

    /// Returns the row of `[CLS]`, the first of each sequence, of the last block's output: `[n, c]`.
    pub fn first(&self, sequences: &[&[u32]], pass: &Pass, tape: &mut Tape) -> Result<Var> {
        let x = self.hidden(sequences, self.config.sizes.layers, pass, tape)?;
        let mut at = 0;
        let starts = sequences.iter().map(|sequence| {
            at += sequence.len();
            at - sequence.len()
        });
        let starts: Index = starts.collect::<Vec<_>>().into();
        Ok(tape.select(&x, &Arc::new(starts))?)
    }

    /// Computes `pooler_output` `[n, c]`: a layer and tanh on the row of `[CLS]`.
    pub fn pooled(&self, sequences: &[&[u32]], pass: &Pass, tape: &mut Tape) -> Result<Var> {
        let Some(pooler) = &self.pooler else {
            return Err(ModelError::weights(
                "BERT: pooled output was requested, but the checkpoint has no pooler",
            ));
        };
        let x = self.first(sequences, pass, tape)?;
        let x = tape.linear(&x, pooler, pass)?;
        Ok(tape.activation(&x, Activation::Tanh)?)
    }
}

/// Maps the name of a tensor in a directory of BERT's kind to its name below an empty prefix, or to `None` for heads and entries
/// that are not weights. Files of 2018 call a norm's weight and bias `gamma` and `beta`.
pub fn published_name(key: &str) -> Option<String> {
    let heads = ["cls.", "lm_head.", "vocab_", "classifier.", "qa_outputs.", "pre_classifier."];
    if heads.iter().any(|head| key.starts_with(head)) {
        return None;
    }
    let models = ["bert.", "roberta.", "distilbert."];
    let name = models.iter().find_map(|model| key.strip_prefix(model)).unwrap_or(key);
    if ["embeddings.position_ids", "embeddings.token_type_ids"].contains(&name) {
        return None;
    }
    let name = match (name.strip_suffix(".gamma"), name.strip_suffix(".beta")) {
        (Some(norm), _) => format!("{norm}.weight"),
        (_, Some(norm)) => format!("{norm}.bias"),
        _ => name.to_owned(),
    };
    Some(name)
}
