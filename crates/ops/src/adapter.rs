//! Low-rank adapters on frozen linear layers.
//!
//! `y += s · B A drop(x)` with `A [r, k]`, `B [n, r]` in f32 whatever the frozen weight is stored in; `s` is `alpha / r`, or
//! `alpha / √r` for rank-stabilised LoRA. Source: Hu et al., arXiv 2106.09685; Kalajdzievski, arXiv 2312.03732; the module
//! structure is that of `peft` 0.21 `tuners/lora/layer.py`, where dropout is applied to the adapter's input alone.
//!
//! Gradients, with `u = A x̃`, `t = s · Bᵀ dy` and `x̃ = m ⊙ x / (1 − p)`: `dB += s · dy uᵀ`, `dA += t x̃ᵀ`,
//! `dx += m ⊙ (Aᵀ t) / (1 − p)`. Nothing is computed for the frozen weight.
//!
//! Difference: a dropout mask is a function of (key of the update, adapter, row, column) and of nothing else. A recomputed
//! block therefore sees the same mask, and a row sees it wherever it stands in a packed stream. The key of a row is
//! given by whoever runs the pass ([`Dropout::enter`]); without an active scope nothing is dropped.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Result, bail};
use omnigrpo_kernels::Weight;
use omnigrpo_kernels::linear::{self as kernel, Gradient, Layer};

use crate::linear::MatmulMode;
use crate::param::Param;

/// A low-rank update of one linear layer.
#[derive(Debug)]
pub struct Adapter {
    a: Arc<Param>,
    b: Arc<Param>,
    rank: usize,
    scale: f32,
    rate: f32,
    dropout: Arc<Dropout>,
    /// Keys the mask, so that layers drop independently.
    id: u64,
}

impl Adapter {
    /// An adapter from `A [r, k]` and `B [n, r]`. `rate` is the share of inputs dropped while `dropout` is active.
    ///
    /// # Errors
    /// Shapes that do not fit, weights that are not f32, a rate outside of `0..1`.
    pub fn new(a: Arc<Param>, b: Arc<Param>, scale: f32, rate: f32, dropout: Arc<Dropout>) -> Result<Self> {
        let (&[rank, _], &[_, inner]) = (a.shape(), b.shape()) else {
            bail!("adapter {}: A is {:?}, B is {:?}, expected rank 2", a.name(), a.shape(), b.shape());
        };
        if rank == 0 || rank != inner {
            bail!(
                "adapter {}: A is {:?}, B is {:?}, expected [r, k] and [n, r]",
                a.name(),
                a.shape(),
                b.shape()
            );
        }
        if [&a, &b].iter().any(|p| p.dtype() != crate::ParamDtype::F32) {
            bail!("adapter {}: expected f32, got {:?} and {:?}", a.name(), a.dtype(), b.dtype());
        }
        if !(0.0..1.0).contains(&rate) {
            bail!("adapter {}: dropout {rate}, expected 0 or more and below 1", a.name());
        }
        let id = a.name().bytes().fold(0xcbf2_9ce4_8422_2325, |h, byte| mix(h ^ u64::from(byte)));
        Ok(Self { rank, scale, rate, dropout, id, a, b })
    }

    /// `A [r, k]`.
    #[must_use]
    pub fn a(&self) -> &Arc<Param> {
        &self.a
    }

    /// `B [n, r]`.
    #[must_use]
    pub fn b(&self) -> &Arc<Param> {
        &self.b
    }

    /// What `B A` is multiplied with.
    #[must_use]
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// `(n, k)` of the layer it fits.
    #[must_use]
    pub fn shape(&self) -> (usize, usize) {
        (self.b.len() / self.rank, self.a.len() / self.rank)
    }

    /// Adds `s · B A` to `w [n, k]`, row by row: merging.
    ///
    /// # Errors
    /// A length that differs from `n · k`.
    pub fn merge_into(&self, w: &mut [f32]) -> Result<()> {
        let (n, k) = self.shape();
        if w.len() != n * k {
            bail!("adapter {}: merging into {} values, expected {n}×{k}", self.a.name(), w.len());
        }
        let scaled = self.b.with_f32(|b| b.iter().map(|b| b * self.scale).collect::<Vec<f32>>())?;
        // dW += Bᵀᵀ A is the weight gradient's product with the rank as rows.
        let mut b_rn = vec![0.0; scaled.len()];
        for (i, row) in scaled.chunks_exact(self.rank).enumerate() {
            row.iter().enumerate().for_each(|(r, &x)| b_rn[r * n + i] = x);
        }
        self.a.with_f32(|a| {
            kernel::backward_weight(
                &mut [Gradient { dw: w, col: 0, n, bf16: false }],
                &b_rn,
                n,
                a,
                k,
                self.rank,
                k,
            );
        })
    }

    pub(crate) fn scope(&self) -> Option<DropoutScope> {
        self.dropout.current()
    }

    /// The mask of a call, or `None` where nothing is dropped.
    fn mask(&self, scope: Option<&DropoutScope>, rows: usize) -> Result<Option<Mask>> {
        let Some(scope) = scope.filter(|_| self.rate > 0.0) else { return Ok(None) };
        if let Some(keys) = &scope.rows
            && keys.len() != rows
        {
            bail!("adapter {}: {rows} rows with {} dropout keys", self.a.name(), keys.len());
        }
        let rows = scope.rows.clone();
        Ok(Some(Mask { key: mix(scope.key ^ self.id), rows, rate: self.rate }))
    }

    /// `y [rows, n] += s · B A drop(x)`, rows of `y` `stride` apart.
    pub(crate) fn forward(
        &self,
        y: &mut [f32],
        stride: usize,
        x: &[f32],
        rows: usize,
        mode: MatmulMode,
        scope: Option<&DropoutScope>,
    ) -> Result<()> {
        let (n, k) = self.shape();
        let r = self.rank;
        let dropped = self.mask(scope, rows)?.map(|mask| mask.applied(x, k));
        let x = dropped.as_deref().unwrap_or(x);
        let product = match mode {
            MatmulMode::Gemm => kernel::forward,
            MatmulMode::Rows => kernel::forward_rows,
        };
        let mut u = vec![0.0; rows * r];
        self.a.with_f32(|a| product(&mut u, r, x, k, &[Layer::new(Weight::F32(a), r)], rows, k, false))?;
        u.iter_mut().for_each(|u| *u *= self.scale);
        self.b.with_f32(|b| product(y, stride, &u, r, &[Layer::new(Weight::F32(b), n)], rows, r, true))
    }

    /// Adds the gradients of `A` and `B` to their buffers and that of the input to `dx [rows, k]`.
    pub(crate) fn backward(
        &self,
        dx: &mut [f32],
        dy: &[f32],
        stride: usize,
        x: &[f32],
        rows: usize,
        scope: Option<&DropoutScope>,
    ) -> Result<()> {
        let (n, k) = self.shape();
        let r = self.rank;
        let mask = self.mask(scope, rows)?;
        let dropped = mask.as_ref().map(|mask| mask.applied(x, k));
        let x = dropped.as_deref().unwrap_or(x);
        let mut t = vec![0.0; rows * r];
        self.b.with_f32(|b| {
            kernel::backward_input(&mut t, r, dy, stride, &[Layer::new(Weight::F32(b), n)], rows, r, false);
        })?;
        t.iter_mut().for_each(|t| *t *= self.scale);
        if self.b.trainable() {
            let mut u = vec![0.0; rows * r];
            self.a.with_f32(|a| {
                kernel::forward(&mut u, r, x, k, &[Layer::new(Weight::F32(a), r)], rows, k, false)
            })?;
            u.iter_mut().for_each(|u| *u *= self.scale);
            self.b.accumulate(|dw| {
                kernel::backward_weight(
                    &mut [Gradient { dw, col: 0, n, bf16: false }],
                    dy,
                    stride,
                    &u,
                    r,
                    rows,
                    r,
                );
            });
        }
        self.a.accumulate(|dw| {
            kernel::backward_weight(&mut [Gradient { dw, col: 0, n: r, bf16: false }], &t, r, x, k, rows, k)
        });
        self.a.with_f32(|a| match &mask {
            None => kernel::backward_input(dx, k, &t, r, &[Layer::new(Weight::F32(a), r)], rows, k, true),
            Some(mask) => {
                let mut own = vec![0.0; rows * k];
                kernel::backward_input(&mut own, k, &t, r, &[Layer::new(Weight::F32(a), r)], rows, k, false);
                mask.apply(&mut own, k);
                dx.iter_mut().zip(&own).for_each(|(dx, own)| *dx += own);
            }
        })
    }
}

/// Whether and what the adapters of a model drop at present; shared by all of them.
#[derive(Debug, Default)]
pub struct Dropout {
    scope: Mutex<Option<DropoutScope>>,
}

/// What keys the masks of one pass.
#[derive(Clone, Debug)]
pub struct DropoutScope {
    key: u64,
    rows: Option<Arc<[u64]>>,
}

impl DropoutScope {
    /// The scope of some of the rows, by index.
    pub(crate) fn of_rows(&self, rows: &[usize]) -> Self {
        let keys = rows.iter().map(|&row| self.rows.as_ref().map_or(row as u64, |keys| keys[row]));
        Self { key: self.key, rows: Some(keys.collect()) }
    }
}

impl Dropout {
    /// Drops inputs from now on, until [`Self::leave`]. `key` names the update, `rows` each row of the calls to come;
    /// without `rows` a row is named by its index.
    pub fn enter(&self, key: u64, rows: Option<Arc<[u64]>>) {
        *self.lock() = Some(DropoutScope { key: mix(key), rows });
    }

    /// Drops nothing from now on.
    pub fn leave(&self) {
        *self.lock() = None;
    }

    fn current(&self) -> Option<DropoutScope> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<DropoutScope>> {
        self.scope.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Mask {
    key: u64,
    rows: Option<Arc<[u64]>>,
    rate: f32,
}

impl Mask {
    fn applied(&self, x: &[f32], k: usize) -> Vec<f32> {
        let mut out = x.to_vec();
        self.apply(&mut out, k);
        out
    }

    /// Drops or scales every element of `x [rows, k]`.
    fn apply(&self, x: &mut [f32], k: usize) {
        let keep = 1.0 / (1.0 - self.rate);
        let threshold = (f64::from(self.rate) * 2f64.powi(32)) as u64;
        for (i, row) in x.chunks_exact_mut(k).enumerate() {
            let row_key = mix(self.key ^ self.rows.as_ref().map_or(i as u64, |rows| rows[i]));
            // One number serves two columns.
            for (j, pair) in row.chunks_mut(2).enumerate() {
                let random = mix(row_key.wrapping_add((j as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
                for (x, random) in pair.iter_mut().zip([random & 0xffff_ffff, random >> 32]) {
                    *x = if random < threshold { 0.0 } else { *x * keep };
                }
            }
        }
    }
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood, 2014): a bijection whose outputs for counters pass as random.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_drops_its_share_and_keeps_the_mean() {
        let mask = Mask { key: 7, rows: None, rate: 0.3 };
        let (rows, k) = (200, 101);
        let mut x = vec![1.0; rows * k];
        mask.apply(&mut x, k);
        let dropped = x.iter().filter(|x| **x == 0.0).count() as f64 / x.len() as f64;
        // Four standard deviations of a share of 20,200 draws.
        assert!((dropped - 0.3).abs() < 4.0 * (0.3f64 * 0.7 / 20_200.0).sqrt(), "{dropped}");
        assert!(x.iter().all(|&x| x == 0.0 || x == 1.0 / 0.7));
        // Neither rows nor columns repeat.
        assert!(x.chunks_exact(k).skip(1).all(|row| row != &x[..k]));
        let columns = |j: usize| (0..rows).map(|i| x[i * k + j]).collect::<Vec<_>>();
        assert!((1..k).all(|j| columns(j) != columns(0)));
    }

    #[test]
    fn a_row_has_its_mask_wherever_it_stands() {
        let of = |keys: &[u64]| {
            let mask = Mask { key: 3, rows: Some(keys.into()), rate: 0.5 };
            mask.applied(&vec![1.0; keys.len() * 64], 64)
        };
        let (all, some) = (of(&[5, 9, 11]), of(&[11, 5]));
        assert_eq!((&some[..64], &some[64..]), (&all[128..], &all[..64]));
        assert_ne!(all[..64], all[64..128]);
    }
}
