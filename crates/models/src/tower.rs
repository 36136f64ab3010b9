//! Transformer blocks of vision towers.
//!
//! One block serves all towers: the normalisation, the feed-forward layer and the attention pattern vary, the order
//! `x += proj(attn(norm1 x)); x += mlp(norm2 x)` does not.

use std::sync::Arc;

use candle_core::{Result, Tensor};
use omnigrpo_ops::{
    Activation, AttentionHeads, AttentionLayout, Linear, MatmulMode, Norm, RopeTable, activation, attention,
    linear, linear_residual, norm, packed_linear, qkv_rope, swiglu,
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

/// One block of a tower.
pub struct TowerBlock {
    /// Before attention.
    pub norm1: Norm,
    /// `[3h, h]`, rows query, key, value.
    pub qkv: Linear,
    /// `[h, h]`
    pub proj: Linear,
    /// Before the feed-forward layer.
    pub norm2: Norm,
    /// The feed-forward layer.
    pub mlp: Mlp,
}

impl TowerBlock {
    /// `[n, h] → [n, h]`, rotating queries and keys by `rope`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn forward(
        &self,
        x_nh: &Tensor,
        rope: &Arc<RopeTable>,
        heads: AttentionHeads,
        layout: &Arc<AttentionLayout>,
    ) -> Result<Tensor> {
        const MODE: MatmulMode = MatmulMode::Gemm;
        let qkv = qkv_rope(&norm(x_nh, &self.norm1)?, &[&self.qkv], rope, heads.q + heads.kv, MODE)?;
        let x_nh = linear_residual(&attention(&qkv, heads, layout)?, x_nh, &self.proj, MODE)?;
        let normed = norm(&x_nh, &self.norm2)?;
        match &self.mlp {
            Mlp::Plain { fc1, act, fc2 } => {
                linear_residual(&activation(&linear(&normed, fc1, MODE)?, *act)?, &x_nh, fc2, MODE)
            }
            Mlp::SwiGlu { gate, up, down } => {
                linear_residual(&swiglu(&packed_linear(&normed, &[gate, up], MODE)?)?, &x_nh, down, MODE)
            }
        }
    }
}
