//! Text models as GGUF files, the format of llama.cpp.
//!
//! [`convert_gguf`] writes a checkpoint directory from a file, and [`Model::save_gguf`] a file from a model. Both cover the families
//! `qwen2`, `qwen3` and `llama`, whose architectures llama.cpp calls by the same names.
//!
//! Source: llama.cpp, `conversion/{base,llama,qwen}.py`, `gguf-py/gguf/{constants,tensor_mapping}.py` and `src/llama-vocab.cpp`.
//! Refused with what was found and what was expected: other architectures and tokenizers, experts, sliding windows, rotations that the
//! families lack, keys of the architecture that nothing here knows, and tensors that are missing, extra or of other shapes.
//!
//! Differences to llama.cpp: a token is a control token if it is marked special, and not by its spelling. The places of Llama's rotary
//! frequencies are compared with the rule of Llama 3.1 and written as that rule.

mod config;
mod export;
mod import;
mod tokenizer;

use crate::decoder::DecoderConfig;

pub use export::GgufPrecision;
pub use import::{ConvertedGguf, convert_gguf};

/// Names of a block's tensors, in GGUF and in published checkpoints.
const IN_BLOCK: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];
/// Names of the tensors outside of blocks.
const OUTSIDE: &[(&str, &str)] = &[
    (EMBEDDING, "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    (HEAD, "lm_head.weight"),
];
/// Input embedding.
const EMBEDDING: &str = "token_embd.weight";
/// Output head; absent if it is the embedding.
const HEAD: &str = "output.weight";
/// Divisors of Llama's rotary frequencies.
const ROTATIONS: &str = "rope_freqs.weight";

/// Returns the name in GGUF of a tensor with a published name.
fn name_in_gguf(published: &str) -> Option<String> {
    if let Some((gguf, _)) = OUTSIDE.iter().find(|(_, name)| *name == published) {
        return Some((*gguf).to_owned());
    }
    let (layer, rest) = published.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, kind) = rest.rsplit_once('.')?;
    let (gguf, _) = IN_BLOCK.iter().find(|(_, name)| *name == module)?;
    Some(format!("blk.{layer}.{gguf}.{kind}"))
}

/// Order of the rows of a tensor in GGUF.
///
/// Llama rotates column `i` of a head with column `i + d/2`, and llama.cpp's code for this architecture rotates neighbours. So its files
/// have the rows of queries and keys in another order: within each head, row `2j + i` there is row `i·d/2 + j` here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowOrder {
    /// The published order.
    Same,
    /// Rotated pairs are neighbours, in heads of this number of rows.
    Neighbours(usize),
}

impl RowOrder {
    /// Returns the order of a tensor, given by its name in GGUF.
    fn of(name: &str, architecture: &str, decoder: &DecoderConfig) -> Self {
        let rotated = [".attn_q.", ".attn_k."].iter().any(|module| name.contains(module));
        if rotated && architecture == "llama" { Self::Neighbours(decoder.heads.dim) } else { Self::Same }
    }

    /// Returns the number of rows that are reordered among themselves.
    fn unit(self) -> usize {
        match self {
            Self::Same => 1,
            Self::Neighbours(rows) => rows,
        }
    }

    /// Returns the row in GGUF of a published row.
    fn in_gguf(self, row: usize) -> usize {
        match self {
            Self::Same => row,
            Self::Neighbours(rows) => {
                let (head, within) = (row / rows, row % rows);
                head * rows + within % (rows / 2) * 2 + within / (rows / 2)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_block_and_outside_are_those_of_llama_cpp() {
        let name = |published| name_in_gguf(published).unwrap_or_default();
        assert_eq!(name("model.layers.12.self_attn.q_proj.bias"), "blk.12.attn_q.bias");
        assert_eq!(name("model.layers.0.post_attention_layernorm.weight"), "blk.0.ffn_norm.weight");
        assert_eq!(name("lm_head.weight"), "output.weight");
        assert_eq!(name("model.layers.0.mlp.experts.0.weight"), "");
    }

    /// `weights.reshape(heads, 2, d // 2, …).swapaxes(1, 2)` of llama.cpp's converter, on two heads of six rows.
    #[test]
    fn rows_of_llama_are_reordered_within_each_head() {
        let order = RowOrder::Neighbours(6);
        let rows: Vec<_> = (0..12).map(|row| order.in_gguf(row)).collect();
        assert_eq!(rows, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }
}
