//! Transformer blocks of towers: pictures, sound and short text.
//!
//! One block serves all of them: the normalisation and where it stands, the feed-forward layer, rotation and attention
//! pattern vary; attention, residual, feed-forward, residual does not. Attention of a batch needs no padding and no mask:
//! the sequences lie one after the other and the [`AttentionLayout`] keeps them apart.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use omnigrpo_ops::{
    Activation, AttentionHeads, AttentionLayout, Linear, MatmulMode, Norm, Param, RopeTable, activation,
    attention, linear, linear_residual, norm, packed_linear, qkv_rope, scale_residual, swiglu,
};

/// The feed-forward layer of a block.
pub enum Mlp {
    /// `fc2(act(fc1 x))`
    Plain {
        /// `[intermediate, h]`
        fc1: Linear,
        /// Between the two.
        act: Activation,
        /// `[h, intermediate]`
        fc2: Linear,
    },
    /// `down(silu(gate x) · up x)`
    SwiGlu {
        /// `[intermediate, h]`
        gate: Linear,
        /// `[intermediate, h]`
        up: Linear,
        /// `[h, intermediate]`
        down: Linear,
    },
}

/// Where the norms of a block stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOrder {
    /// `x += proj(attn(norm1 x)); x += mlp(norm2 x)`
    Pre,
    /// `x = norm1(x + proj(attn x)); x = norm2(x + mlp x)`, as BERT.
    Post,
}

/// One block of a tower.
pub struct TowerBlock {
    /// Where the norms stand.
    pub order: NormOrder,
    /// Of attention.
    pub norm1: Norm,
    /// Of queries and keys over all heads together, before the heads are split; InternViT-6B has them.
    pub qk_norm: Option<[Norm; 2]>,
    /// Scales `[h]` of what attention and the feed-forward layer add to the stream.
    pub scales: Option<[Arc<Param>; 2]>,
    /// Query, key and value: one layer `[3h, h]` with its rows in this order, or three `[h, h]`.
    pub qkv: Vec<Linear>,
    /// `[h, h]`
    pub proj: Linear,
    /// Of the feed-forward layer.
    pub norm2: Norm,
    /// The feed-forward layer.
    pub mlp: Mlp,
}

const MODE: MatmulMode = MatmulMode::Gemm;

impl TowerBlock {
    /// `[n, h] → [n, h]`, rotating queries and keys by `rope` where there is one.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward(
        &self,
        x_nh: &Tensor,
        rope: Option<&Arc<RopeTable>>,
        heads: AttentionHeads,
        layout: &Arc<AttentionLayout>,
    ) -> Result<Tensor> {
        match self.order {
            NormOrder::Pre => {
                let x_nh = self.attend(&norm(x_nh, &self.norm1)?, x_nh, rope, heads, layout)?;
                self.feed_forward(&norm(&x_nh, &self.norm2)?, &x_nh)
            }
            NormOrder::Post => {
                let x_nh = norm(&self.attend(x_nh, x_nh, rope, heads, layout)?, &self.norm1)?;
                norm(&self.feed_forward(&x_nh, &x_nh)?, &self.norm2)
            }
        }
    }

    /// `residual + proj(attn x)`, scaled
    fn attend(
        &self,
        x_nh: &Tensor,
        residual_nh: &Tensor,
        rope: Option<&Arc<RopeTable>>,
        heads: AttentionHeads,
        layout: &Arc<AttentionLayout>,
    ) -> Result<Tensor> {
        let layers: Vec<&Linear> = self.qkv.iter().collect();
        let qkv = match rope {
            Some(rope) => qkv_rope(x_nh, &layers, rope, heads.q + heads.kv, MODE)?,
            None => packed_linear(x_nh, &layers, MODE)?,
        };
        let qkv = match &self.qk_norm {
            Some(_) if rope.is_some() => {
                bail!("tower block: rotation comes after the norms of queries and keys")
            }
            Some(norms) => normed_qk(&qkv, norms, heads)?,
            None => qkv,
        };
        self.add(&attention(&qkv, heads, layout)?, residual_nh, &self.proj, 0)
    }

    /// `residual + mlp x`, scaled
    fn feed_forward(&self, x_nh: &Tensor, residual_nh: &Tensor) -> Result<Tensor> {
        let (inner, last) = match &self.mlp {
            Mlp::Plain { fc1, act, fc2 } => (activation(&linear(x_nh, fc1, MODE)?, *act)?, fc2),
            Mlp::SwiGlu { gate, up, down } => (swiglu(&packed_linear(x_nh, &[gate, up], MODE)?)?, down),
        };
        self.add(&inner, residual_nh, last, 1)
    }

    /// `residual + last(x)`, or with scales `residual + scale[branch] · last(x)`
    fn add(&self, x: &Tensor, residual_nh: &Tensor, last: &Linear, branch: usize) -> Result<Tensor> {
        match &self.scales {
            Some(scales) => scale_residual(&linear(x, last, MODE)?, residual_nh, &scales[branch]),
            None => linear_residual(x, residual_nh, last, MODE),
        }
    }
}

/// A packed row with its queries and its keys normalised.
fn normed_qk(qkv: &Tensor, norms: &[Norm; 2], heads: AttentionHeads) -> Result<Tensor> {
    let [q, k] = norms;
    let (q_width, kv_width) = (heads.q_width(), heads.kv_width());
    Tensor::cat(
        &[
            norm(&qkv.narrow(1, 0, q_width)?.contiguous()?, q)?,
            norm(&qkv.narrow(1, q_width, kv_width)?.contiguous()?, k)?,
            qkv.narrow(1, q_width + kv_width, kv_width)?,
        ],
        1,
    )
}
