//! Softmax attention over an [`AttentionLayout`], with an online softmax, so that no score matrix is stored.

#[allow(clippy::single_range_in_vec_init)] // one key range is common, a list of key rows never meant
mod layout;

pub use layout::{AttentionLayout, LayoutError, QueryRange};

/// Rows inside a larger buffer: row `r` starts at `data[r * stride + col]`, its heads lie one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The buffer.
    pub data: &'a [f32],
    /// Distance between rows.
    pub stride: usize,
    /// First column.
    pub col: usize,
}

/// Heads of one attention call. `q_heads` is a multiple of `kv_heads`; query head `h` uses key head
/// `h / (q_heads / kv_heads)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Query heads.
    pub q_heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Columns of one head.
    pub head_dim: usize,
}

fn gather(rows: Rows, n: usize, width: usize) -> Vec<f64> {
    let row = |r: usize| &rows.data[r * rows.stride + rows.col..][..width];
    (0..n).flat_map(|r| row(r).iter().map(|&x| f64::from(x))).collect()
}

fn extents(layout: &AttentionLayout) -> (usize, usize) {
    let q = layout.ranges.iter().map(|r| r.queries.end).max().unwrap_or(0);
    (q, layout.ranges.iter().flat_map(|r| &r.keys).map(|k| k.end).max().unwrap_or(0))
}

/// `out [tq, q_heads · d] = softmax(scale · q kᵀ) v`; `lse [tq, q_heads]` gets the log-sum-exp of the scaled scores.
pub fn forward(
    out: &mut [f32],
    lse: &mut [f32],
    q: Rows,
    k: Rows,
    v: Rows,
    layout: &AttentionLayout,
    shape: Shape,
    scale: f32,
) {
    let (tq, tk) = extents(layout);
    let (wq, wk) = (shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let (q, k, v) = (gather(q, tq, wq), gather(k, tk, wk), gather(v, tk, wk));
    let (o, l) = crate::twin::attention_forward(&q, &k, &v, layout, shape, f64::from(scale));
    out.iter_mut().zip(o).for_each(|(y, x)| *y = x as f32);
    lse.iter_mut().zip(l).for_each(|(y, x)| *y = x as f32);
}

/// As [`forward`], for a few queries over many keys, without saving `lse`.
pub fn forward_decode(
    out: &mut [f32],
    q: Rows,
    k: Rows,
    v: Rows,
    layout: &AttentionLayout,
    shape: Shape,
    scale: f32,
) {
    let mut lse = vec![0.0; extents(layout).0 * shape.q_heads];
    forward(out, &mut lse, q, k, v, layout, shape, scale);
}

/// Gradients of [`forward`] with respect to q, k and v, written (not added) to three column windows of one buffer:
/// row `r` of dq starts at `dqkv[r * stride + q_col]`, likewise dk and dv.
pub fn backward(
    dqkv: &mut [f32],
    stride: usize,
    q_col: usize,
    k_col: usize,
    v_col: usize,
    dout: &[f32],
    _out: &[f32],
    _lse: &[f32],
    q: Rows,
    k: Rows,
    v: Rows,
    layout: &AttentionLayout,
    shape: Shape,
    scale: f32,
) {
    let (tq, tk) = extents(layout);
    let (wq, wk) = (shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let (q, k, v) = (gather(q, tq, wq), gather(k, tk, wk), gather(v, tk, wk));
    let dout: Vec<f64> = dout.iter().map(|&x| f64::from(x)).collect();
    let (dq, dk, dv) = crate::twin::attention_backward(&dout, &q, &k, &v, layout, shape, f64::from(scale));
    for (d, rows, width, col) in [(dq, tq, wq, q_col), (dk, tk, wk, k_col), (dv, tk, wk, v_col)] {
        for r in 0..rows {
            for j in 0..width {
                dqkv[r * stride + col + j] = d[r * width + j] as f32;
            }
        }
    }
}
