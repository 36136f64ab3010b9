//! Operations of convolutional projectors other than matrix products: depthwise 3×3 convolution, gathering of patches,
//! sparse mixing of rows (pooling, interpolation), and two gates.
//!
//! Images are channels-last: a row is one position with its `c` channels, the positions of an image are row-major, and
//! images follow each other. In this layout every loop runs along contiguous channels. A dense convolution is
//! [`unfold`] followed by a linear layer.

use crate::buffer;
use crate::mat::{Mat, MatMut, check};
use crate::parallel::{Shared, ranges};
use crate::simd::{load, sigmoid, store};

/// Elementary operations per element of a gate, used to decide how many threads share the work.
const GATE_COST: usize = 8;

/// Source index of a patch entry that is outside the image and therefore reads as zero; see [`unfold`].
pub const OUTSIDE: u32 = u32::MAX;

/// A matrix whose rows are weighted sums of the rows of another matrix.
///
/// Row `r` is `Σ weights[i] · x[rows[i]]` over `i` in `offsets[r]..offsets[r + 1]`.
#[derive(Clone, Debug, PartialEq)]
pub struct RowMix {
    /// Offsets into `rows` and `weights`; one more entry than there are output rows.
    pub offsets: Vec<usize>,
    pub rows: Vec<u32>,
    pub weights: Vec<f32>,
}

impl RowMix {
    /// Returns a mix of weighted rows: the terms of each output row are pairs of an input row and its weight.
    #[must_use]
    pub fn of_terms<T: IntoIterator<Item = (u32, f32)>>(outputs: impl IntoIterator<Item = T>) -> Self {
        let mut mix = Self { offsets: vec![0], rows: Vec::new(), weights: Vec::new() };
        for terms in outputs {
            for (row, weight) in terms {
                mix.rows.push(row);
                mix.weights.push(weight);
            }
            mix.offsets.push(mix.rows.len());
        }
        mix
    }

    /// Returns a mix that averages each list of rows.
    #[must_use]
    pub fn means(groups: impl IntoIterator<Item = Vec<u32>>) -> Self {
        Self::of_terms(groups.into_iter().map(|group| {
            let weight = 1.0 / group.len() as f32;
            group.into_iter().map(move |row| (row, weight))
        }))
    }

    /// Returns a mix that copies a row, or none, to each output row.
    #[must_use]
    pub fn of_ids(ids: impl IntoIterator<Item = Option<u32>>) -> Self {
        Self::of_terms(ids.into_iter().map(|id| id.map(|id| (id, 1.0))))
    }

    /// Returns a mix that copies `rows` in the given order.
    #[must_use]
    pub fn select(rows: Vec<u32>) -> Self {
        Self { offsets: (0..=rows.len()).collect(), weights: vec![1.0; rows.len()], rows }
    }

    /// Returns all terms, output row by output row: the output row, the input row, and the weight.
    pub fn terms(&self) -> impl Iterator<Item = (usize, u32, f32)> {
        let of = |r: usize| self.offsets[r]..self.offsets[r + 1];
        (0..self.len()).flat_map(move |r| of(r).map(move |i| (r, self.rows[i], self.weights[i])))
    }

    /// Returns the number of output rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if every term has a weight and belongs to one output row.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let terms = self.rows.len();
        self.offsets.first() == Some(&0)
            && self.offsets.is_sorted()
            && self.offsets.last() == Some(&terms)
            && self.weights.len() == terms
    }

    /// Returns the index of the largest input row plus one.
    #[must_use]
    pub fn reads(&self) -> usize {
        self.rows.iter().max().map_or(0, |&row| row as usize + 1)
    }
}

simd_fn! {
    /// Computes `y += a · x`.
    fn add_scaled<'a>(simd: S, y: &'a mut [f32], x: &'a [f32], a: f32) -> () {
        let a = simd.splat_f32s(a);
        for i in (0..y.len()).step_by(S::F32_LANES) {
            let sum = simd.mul_add_e_f32s(load(simd, x, i), a, load(simd, y, i));
            store(simd, y, i, sum);
        }
    }
}

simd_fn! {
    /// Computes `y += w · x` for every element.
    fn add_product<'a>(simd: S, y: &'a mut [f32], x: &'a [f32], w: &'a [f32]) -> () {
        for i in (0..y.len()).step_by(S::F32_LANES) {
            let sum = simd.mul_add_e_f32s(load(simd, x, i), load(simd, w, i), load(simd, y, i));
            store(simd, y, i, sum);
        }
    }
}

/// Returns the mixed rows of `x [_, c]`, as `[mix.len(), c]`.
#[must_use]
pub fn mix_forward(x: Mat, mix: &RowMix) -> Vec<f32> {
    buffer::of_rows(mix.len(), x.cols, mix.rows.len() * x.cols, |r, y| {
        for i in mix.offsets[r]..mix.offsets[r + 1] {
            add_scaled(y, x.row(mix.rows[i] as usize), mix.weights[i]);
        }
    })
}

/// Adds the gradient of [`mix_forward`] to `dx [_, c]`.
pub fn mix_backward(dy: Mat, mix: &RowMix, dx: MatMut) {
    check!("mix, backward", dy.rows == mix.len() && dx.cols == dy.cols, dy.dims(), mix.len(), dx.dims());
    // Each thread computes its own columns, so that the terms of a repeated row are always added in the same order.
    ranges(dy.cols, 64, mix.rows.len() * dy.cols, |cols| {
        for (r, row, weight) in mix.terms() {
            // SAFETY: the column ranges are disjoint.
            let dx = unsafe { dx.part(row as usize, cols.clone()) };
            add_scaled(dx, &dy.row(r)[cols.clone()], weight);
        }
    });
}

/// Calls `f(tap, output position, input position)` for every tap inside the image of a 3×3 window with padding 1. `lines` selects
/// the output lines, which are counted over all images of `h × w`.
#[inline]
fn windows(lines: std::ops::Range<usize>, [h, w]: [usize; 2], mut f: impl FnMut(usize, usize, usize)) {
    for line in lines {
        let y = line % h;
        for x in 0..w {
            for tap in 0..9 {
                let (dy, dx) = (tap / 3, tap % 3);
                if (1..=h).contains(&(y + dy)) && (1..=w).contains(&(x + dx)) {
                    f(tap, line * w + x, (line + dy - 1) * w + x + dx - 1);
                }
            }
        }
    }
}

/// Computes a depthwise 3×3 convolution with stride 1 and zero padding 1.
///
/// Images have `[h, w]` positions, and `x` and the result are `[n · h · w, c]`. `weight [c, 9]` has the layout of published
/// weights (`[c, 1, 3, 3]`). If `transposed`, the function maps the gradient of the output to the gradient of the input.
#[must_use]
pub fn depthwise3(x: Mat, weight: &[f32], [h, w]: [usize; 2], transposed: bool) -> Vec<f32> {
    let (rows, c) = x.dims();
    check!(
        "depthwise convolution",
        rows.is_multiple_of(h * w) && weight.len() == 9 * c,
        x.dims(),
        weight.len(),
        (h, w)
    );
    let mut taps = vec![0.0; 9 * c];
    for tap in 0..9 {
        let from = if transposed { 8 - tap } else { tap };
        for (ch, to) in taps[tap * c..(tap + 1) * c].iter_mut().enumerate() {
            *to = weight[ch * 9 + from];
        }
    }
    let fill = |y: Shared| {
        ranges(rows / w.max(1), 1, rows * c * 9, |lines| {
            y.clear(lines.start * w * c, lines.len() * w * c);
            windows(lines, [h, w], |tap, to, from| {
                // SAFETY: the position belongs to a line of this range. No other range contains the line, and it has been zeroed.
                let y = unsafe { y.part(to * c, c) };
                add_product(y, x.row(from), &taps[tap * c..(tap + 1) * c]);
            });
        });
    };
    // SAFETY: the lines cover the whole buffer.
    unsafe { buffer::written(rows * c, fill) }
}

/// Adds the gradient of [`depthwise3`] with respect to its weight to `dweight [c, 9]`.
pub fn depthwise3_weight(dy: Mat, x: Mat, [h, w]: [usize; 2], dweight: &mut [f32]) {
    let (rows, c) = x.dims();
    let fits = rows.is_multiple_of(h * w) && dy.dims() == x.dims() && dweight.len() == 9 * c;
    check!("depthwise convolution, gradient of the weight", fits, x.dims(), dy.dims(), dweight.len(), (h, w));
    let mut taps = vec![0.0; 9 * c];
    let shared = Shared::new(&mut taps);
    ranges(c, 64, rows * c * 9, |cols| {
        windows(0..rows / w.max(1), [h, w], |tap, at, from| {
            // SAFETY: the column ranges are disjoint.
            let sum = unsafe { shared.part(tap * c + cols.start, cols.len()) };
            add_product(sum, &dy.row(at)[cols.clone()], &x.row(from)[cols.clone()]);
        });
    });
    for (ch, dweight) in dweight.chunks_exact_mut(9).enumerate() {
        for (tap, d) in dweight.iter_mut().enumerate() {
            *d += taps[tap * c + ch];
        }
    }
}

/// Gathers patches into rows: `y[r, ch · taps + k] = x[sources[r · taps + k], ch]`, or 0 if the source is [`OUTSIDE`]. Returns
/// `[sources.len() / taps, c · taps]`.
///
/// If a weight `[out, c, taps…]` is read as `[out, c · taps]`, a linear layer that applies it to the result is a convolution.
#[must_use]
pub fn unfold(x: Mat, sources: &[u32], taps: usize) -> Vec<f32> {
    check!("unfold", sources.len().is_multiple_of(taps), sources.len(), taps);
    let rows = sources.len() / taps.max(1);
    buffer::of_rows(rows, taps * x.cols, sources.len() * x.cols, |r, y| {
        for (k, &source) in sources[r * taps..(r + 1) * taps].iter().enumerate() {
            if source != OUTSIDE {
                let to = y[k..].iter_mut().step_by(taps);
                to.zip(x.row(source as usize)).for_each(|(to, from)| *to = *from);
            }
        }
    })
}

/// Adds the gradient of [`unfold`] to `dx [_, c]`.
pub fn fold(dy: Mat, sources: &[u32], taps: usize, dx: MatMut) {
    check!(
        "fold",
        dy.rows * taps == sources.len() && dy.cols == taps * dx.cols,
        dy.dims(),
        dx.dims(),
        sources.len(),
        taps
    );
    ranges(dx.cols, 16, sources.len() * dx.cols, |cols| {
        for (at, &source) in sources.iter().enumerate().filter(|(_, source)| **source != OUTSIDE) {
            // SAFETY: the column ranges are disjoint.
            let dx = unsafe { dx.part(source as usize, cols.clone()) };
            let row = &dy.row(at / taps)[at % taps..];
            for (d, ch) in dx.iter_mut().zip(cols.clone()) {
                *d += row[ch * taps];
            }
        }
    });
}

simd_fn! {
    fn gate_row<'a>(simd: S, y: &'a mut [f32], x: &'a [f32], gate: &'a [f32]) -> () {
        for i in (0..y.len()).step_by(S::F32_LANES) {
            let open = sigmoid(simd, load(simd, gate, i)).0;
            store(simd, y, i, simd.mul_f32s(load(simd, x, i), open));
        }
    }
}

simd_fn! {
    /// Computes `y *= s (1 − s)` with `s = sigmoid(gate)`.
    fn gate_slope_row<'a>(simd: S, y: &'a mut [f32], gate: &'a [f32]) -> () {
        for i in (0..y.len()).step_by(S::F32_LANES) {
            let (open, closed) = sigmoid(simd, load(simd, gate, i));
            let slope = simd.mul_f32s(open, closed);
            store(simd, y, i, simd.mul_f32s(load(simd, y, i), slope));
        }
    }
}

/// Returns the number of rows of `x` that share a row of `gate`.
fn rows_per_gate(x: Mat, gate: Mat) -> usize {
    let s = x.rows / gate.rows.max(1);
    check!("gate", x.dims() == (gate.rows * s, gate.cols), x.dims(), gate.dims());
    s
}

/// Returns `x · sigmoid(gate)`. Each row of `gate [n, c]` applies to `s` consecutive rows of `x [n · s, c]`.
#[must_use]
pub fn gate_forward(x: Mat, gate: Mat) -> Vec<f32> {
    let s = rows_per_gate(x, gate);
    buffer::of_rows(x.rows, x.cols, x.rows * x.cols * GATE_COST, |r, y| {
        gate_row(y, x.row(r), gate.row(r / s));
    })
}

/// Returns the gradients of [`gate_forward`] with respect to `x` and `gate`.
#[must_use]
pub fn gate_backward(dy: Mat, x: Mat, gate: Mat) -> (Vec<f32>, Vec<f32>) {
    check!("gate, backward", dy.dims() == x.dims(), dy.dims(), x.dims());
    let s = rows_per_gate(x, gate);
    let dgate = buffer::of_rows(gate.rows, x.cols, x.rows * x.cols * 2, |p, sum| {
        for r in p * s..(p + 1) * s {
            add_product(sum, dy.row(r), x.row(r));
        }
        gate_slope_row(sum, gate.row(p));
    });
    (gate_forward(dy, gate), dgate)
}

/// Returns the softmax of a short list of logits.
fn softmax(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exp: Vec<f32> = logits.iter().map(|l| (l - max).exp()).collect();
    let sum: f32 = exp.iter().sum();
    exp.iter().map(|e| e / sum).collect()
}

/// Returns `Σ softmax(logits)ᵢ · x[i]` as `[len]`, for `x [logits.len(), len]`.
#[must_use]
pub fn blend_forward(x: Mat, logits: &[f32]) -> Vec<f32> {
    check!("blend", x.rows == logits.len(), x.dims(), logits.len());
    let shares = softmax(logits);
    let fill = |y: Shared| {
        ranges(x.cols, 64, x.rows * x.cols, |range| {
            y.clear(range.start, range.len());
            // SAFETY: the ranges are disjoint, and this range was just zeroed.
            let y = unsafe { y.part(range.start, range.len()) };
            for (i, &share) in shares.iter().enumerate() {
                add_scaled(y, &x.row(i)[range.clone()], share);
            }
        });
    };
    // SAFETY: together, the ranges cover the whole buffer.
    unsafe { buffer::written(x.cols, fill) }
}

/// Returns the gradients of [`blend_forward`] with respect to `x` and the logits.
#[must_use]
pub fn blend_backward(dy: &[f32], x: Mat, logits: &[f32]) -> (Vec<f32>, Vec<f32>) {
    check!("blend, backward", x.dims() == (logits.len(), dy.len()), x.dims(), logits.len(), dy.len());
    let shares = softmax(logits);
    let mut dx = buffer::zeros(x.rows * x.cols);
    let mut along = vec![0.0f64; logits.len()];
    for (i, &share) in shares.iter().enumerate() {
        add_scaled(&mut dx[i * dy.len()..(i + 1) * dy.len()], dy, share);
        along[i] = dy.iter().zip(x.row(i)).map(|(d, x)| f64::from(*d) * f64::from(*x)).sum();
    }
    let mean: f64 = shares.iter().zip(&along).map(|(s, a)| f64::from(*s) * a).sum();
    let dlogits = shares.iter().zip(&along).map(|(share, along)| (f64::from(*share) * (along - mean)) as f32);
    (dx, dlogits.collect())
}
