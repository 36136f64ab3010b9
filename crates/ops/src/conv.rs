//! Ops of convolutional projectors over channels-last rows: dense convolution over gathered patches, depthwise 3×3,
//! pooling and interpolation, and two gates.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor, bail};
use omnigrpo_kernels::buffer;
use omnigrpo_kernels::conv as kernel;
use omnigrpo_kernels::linear as matmul;

use crate::slices::{f32_of, rows_from_vec, with_f32};
use crate::{Linear, Param, ParamDtype};

pub use omnigrpo_kernels::conv::{OUTSIDE, RowMix};

/// Elements of unfolded patches that exist at a time (64 MiB of `f32`).
const UNFOLDED: usize = 1 << 24;

/// The patches of a convolution: output row `r` reads rows `sources[r · taps..(r + 1) · taps]` of the input, or zero for
/// [`OUTSIDE`].
#[derive(Clone, Debug, PartialEq)]
pub struct Patches {
    /// Rows of the input, [`OUTSIDE`] included.
    pub sources: Vec<u32>,
    /// Positions under the window.
    pub taps: usize,
}

impl Patches {
    /// Output rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.sources.len() / self.taps.max(1)
    }

    fn reads(&self) -> usize {
        self.sources.iter().filter(|&&s| s != OUTSIDE).max().map_or(0, |&s| s as usize + 1)
    }
}

/// A dense convolution of any dimension: `[t, c] → [patches.rows(), n]`. The layer's weight is the published
/// `[n, c, taps…]` read as `[n, c · taps]`. Patches are gathered again in the backward pass instead of being kept.
/// Gradient: input, weight, bias.
///
/// # Errors
/// A weight of another width, a patch that reads a row the input does not have.
pub fn convolution(x_tc: &Tensor, layer: &Linear, patches: &Arc<Patches>) -> Result<Tensor> {
    x_tc.apply_op1(Convolution { layer: layer.clone(), patches: Arc::clone(patches) })
}

/// Depthwise 3×3 convolution, stride 1, zero padding 1, without bias: `[n · h · w, c] → [n · h · w, c]`. `weight` is the
/// published `[c, 1, 3, 3]`. Gradient: input, weight.
///
/// # Errors
/// Rows that are no whole pictures, another number of channels.
pub fn depthwise3(x_pc: &Tensor, weight: &Arc<Param>, h: usize, w: usize) -> Result<Tensor> {
    x_pc.apply_op1(Depthwise { weight: Arc::clone(weight), h, w })
}

/// Rows as weighted sums of rows, `[t, c] → [mix.len(), c]`: pooling, interpolation, selection. Gradient: input.
///
/// # Errors
/// A row that the input does not have.
pub fn mix_rows(x_tc: &Tensor, mix: &Arc<RowMix>) -> Result<Tensor> {
    x_tc.apply_op1(Mix(Arc::clone(mix)))
}

/// `x · sigmoid(gate)`, each row of `gate [n, c]` for `s` consecutive rows of `x [n · s, c]`. Gradient: both.
///
/// # Errors
/// Shapes that do not fit.
pub fn gate_rows(x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    x.apply_op2(gate, Gate)
}

/// `Σ softmax(logits)ᵢ · xᵢ`: `x [k · t, c]` holds `k` alternatives of `t` rows, `logits` is `[1, k]`. Gradient: both.
///
/// # Errors
/// Shapes that do not fit.
pub fn blend(x: &Tensor, logits_1k: &Tensor) -> Result<Tensor> {
    x.apply_op2(logits_1k, Blend)
}

struct Convolution {
    layer: Linear,
    patches: Arc<Patches>,
}

impl Convolution {
    fn check(&self, rows: usize, c: usize) -> Result<()> {
        let Patches { sources, taps } = &*self.patches;
        if *taps == 0 || !sources.len().is_multiple_of(*taps) || self.patches.reads() > rows {
            bail!(
                "convolution {}: {} sources under {taps} taps, reading {} of {rows} rows",
                self.layer.weight().name(),
                sources.len(),
                self.patches.reads()
            );
        }
        if self.layer.k() != c * taps {
            bail!(
                "convolution {}: input has {c} channels under {taps} taps, the weight is {}×{}",
                self.layer.weight().name(),
                self.layer.n(),
                self.layer.k()
            );
        }
        Ok(())
    }

    /// Runs `f(first row, number of rows, unfolded rows)` over pieces of the output; their bounds depend on sizes alone.
    fn pieces(
        &self,
        x: &[f32],
        c: usize,
        mut f: impl FnMut(usize, usize, &[f32], &[u32]) -> Result<()>,
    ) -> Result<()> {
        let Patches { sources, taps } = &*self.patches;
        let step = (UNFOLDED / (c * taps).max(1)).max(1);
        let mut unfolded = vec![0.0; step.min(self.patches.rows()) * c * taps];
        for start in (0..self.patches.rows()).step_by(step) {
            let rows = step.min(self.patches.rows() - start);
            let sources = &sources[start * taps..(start + rows) * taps];
            let unfolded = &mut unfolded[..rows * c * taps];
            kernel::unfold(unfolded, x, sources, *taps, c);
            f(start, rows, unfolded, sources)?;
        }
        Ok(())
    }
}

impl CustomOp1 for Convolution {
    fn name(&self) -> &'static str {
        "convolution"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (t, c) = layout.shape().dims2()?;
        self.check(t, c)?;
        let x = f32_of("convolution", storage, layout)?;
        let (rows, n, k) = (self.patches.rows(), self.layer.n(), self.layer.k());
        let mut y = buffer::zeros(rows * n);
        self.pieces(x, c, |start, rows, unfolded, _| {
            let y = &mut y[start * n..(start + rows) * n];
            self.layer.weight().with_weight(|w| {
                let mut run = |bias: Option<&[f32]>| {
                    let layer = matmul::Layer { bias, ..matmul::Layer::new(w, n) };
                    matmul::forward(y, n, unfolded, k, &[layer], rows, k, false);
                };
                match self.layer.bias() {
                    Some(bias) => bias.with_f32(|b| run(Some(b))),
                    None => {
                        run(None);
                        Ok(())
                    }
                }
            })?
        })?;
        Ok((CpuStorage::F32(y), Shape::from((rows, n))))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let (t, c) = x.dims2()?;
        let (n, k, taps) = (self.layer.n(), self.layer.k(), self.patches.taps);
        let mut dx = buffer::zeros(t * c);
        let dy = dy.contiguous()?;
        with_f32(x, |x| {
            with_f32(&dy, |dy| {
                self.pieces(x, c, |start, rows, unfolded, sources| {
                    let dy = &dy[start * n..(start + rows) * n];
                    let weight = self.layer.weight();
                    let bf16 = weight.dtype() == ParamDtype::Bf16;
                    weight.accumulate(|dw| {
                        matmul::backward_weight(
                            &mut [matmul::Gradient { dw, col: 0, n, bf16 }],
                            dy,
                            n,
                            unfolded,
                            k,
                            rows,
                            k,
                        );
                    });
                    if let Some(bias) = self.layer.bias() {
                        bias.accumulate(|db| matmul::backward_bias(db, dy, n, rows, n));
                    }
                    let mut dunfolded = buffer::zeros(rows * k);
                    weight.with_weight(|w| {
                        let layer = matmul::Layer::new(w, n);
                        matmul::backward_input(&mut dunfolded, k, dy, n, &[layer], rows, k, false);
                    })?;
                    kernel::fold(&mut dx, &dunfolded, sources, taps, c);
                    Ok(())
                })
            })
        })???;
        Ok(Some(rows_from_vec(dx, t, c)?))
    }
}

struct Depthwise {
    weight: Arc<Param>,
    h: usize,
    w: usize,
}

impl CustomOp1 for Depthwise {
    fn name(&self) -> &'static str {
        "depthwise3"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (t, c) = layout.shape().dims2()?;
        let (h, w) = (self.h, self.w);
        if h * w == 0 || !t.is_multiple_of(h * w) || self.weight.len() != 9 * c {
            bail!(
                "depthwise3 {}: input is {t}×{c} for pictures of {h}×{w}, the weight has {} elements",
                self.weight.name(),
                self.weight.len()
            );
        }
        let x = f32_of("depthwise3", storage, layout)?;
        let mut y = buffer::zeros(t * c);
        self.weight.with_f32(|k| kernel::depthwise3(&mut y, x, k, t / (h * w), h, w, c, false))?;
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let (t, c) = x.dims2()?;
        let (h, w) = (self.h, self.w);
        let mut dx = buffer::zeros(t * c);
        let dy = dy.contiguous()?;
        with_f32(x, |x| {
            with_f32(&dy, |dy| {
                self.weight.accumulate(|dw| kernel::depthwise3_weight(dw, dy, x, t / (h * w), h, w, c));
                self.weight.with_f32(|k| kernel::depthwise3(&mut dx, dy, k, t / (h * w), h, w, c, true))
            })
        })???;
        Ok(Some(rows_from_vec(dx, t, c)?))
    }
}

struct Mix(Arc<RowMix>);

impl CustomOp1 for Mix {
    fn name(&self) -> &'static str {
        "mix_rows"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (t, c) = layout.shape().dims2()?;
        if self.0.reads() > t || self.0.offsets.last() != Some(&self.0.rows.len()) {
            bail!("mix_rows: reads {} of {t} rows", self.0.reads());
        }
        let mut y = buffer::zeros(self.0.len() * c);
        kernel::mix_forward(&mut y, f32_of("mix_rows", storage, layout)?, &self.0, c);
        Ok((CpuStorage::F32(y), Shape::from((self.0.len(), c))))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let (t, c) = x.dims2()?;
        let mut dx = buffer::zeros(t * c);
        let dy = dy.contiguous()?;
        with_f32(&dy, |dy| kernel::mix_backward(&mut dx, dy, &self.0, c))?;
        Ok(Some(rows_from_vec(dx, t, c)?))
    }
}

struct Gate;

impl CustomOp2 for Gate {
    fn name(&self) -> &'static str {
        "gate_rows"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        gate: &CpuStorage,
        lg: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let ((t, c), (n, width)) = (lx.shape().dims2()?, lg.shape().dims2()?);
        if width != c || n == 0 || t % n != 0 {
            bail!("gate_rows: input is {t}×{c}, gate is {n}×{width}");
        }
        let mut y = buffer::zeros(t * c);
        let (x, gate) = (f32_of("gate_rows", x, lx)?, f32_of("gate_rows", gate, lg)?);
        kernel::gate_forward(&mut y, x, gate, n, t / n, c);
        Ok((CpuStorage::F32(y), lx.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        gate: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let ((t, c), (n, _)) = (x.dims2()?, gate.dims2()?);
        let (mut dx, mut dgate) = (buffer::zeros(t * c), vec![0.0; n * c]);
        let dy = dy.contiguous()?;
        with_f32(x, |x| {
            with_f32(gate, |gate| {
                with_f32(&dy, |dy| kernel::gate_backward(&mut dx, &mut dgate, dy, x, gate, n, t / n, c))
            })
        })???;
        Ok((Some(rows_from_vec(dx, t, c)?), Some(rows_from_vec(dgate, n, c)?)))
    }
}

struct Blend;

impl CustomOp2 for Blend {
    fn name(&self) -> &'static str {
        "blend"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        logits: &CpuStorage,
        ll: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let ((t, c), (one, k)) = (lx.shape().dims2()?, ll.shape().dims2()?);
        if one != 1 || k == 0 || t % k != 0 {
            bail!("blend: input is {t}×{c}, logits are {one}×{k}; expected one row and k × t rows");
        }
        let mut y = buffer::zeros(t / k * c);
        kernel::blend_forward(&mut y, f32_of("blend", x, lx)?, f32_of("blend", logits, ll)?);
        Ok((CpuStorage::F32(y), Shape::from((t / k, c))))
    }

    fn bwd(
        &self,
        x: &Tensor,
        logits: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let ((t, c), (_, k)) = (x.dims2()?, logits.dims2()?);
        let (mut dx, mut dlogits) = (buffer::zeros(t * c), vec![0.0; k]);
        let dy = dy.contiguous()?;
        with_f32(x, |x| {
            with_f32(logits, |logits| {
                with_f32(&dy, |dy| kernel::blend_backward(&mut dx, &mut dlogits, dy, x, logits))
            })
        })???;
        Ok((Some(rows_from_vec(dx, t, c)?), Some(rows_from_vec(dlogits, 1, k)?)))
    }
}
