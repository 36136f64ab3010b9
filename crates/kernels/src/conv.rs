//! What convolutional projectors need beside matrix products: depthwise 3×3 convolution, gathering of patches, sparse
//! mixing of rows (pooling, interpolation), and two gates.
//!
//! Pictures are channels-last: a row is one position with its `c` channels, positions of a picture are row-major,
//! pictures follow each other. A dense convolution is [`unfold`] and a linear layer, and this layout is why every loop
//! here runs along contiguous channels.

use crate::parallel::{Shared, ranges};
use crate::simd::{load, sigmoid, store};

/// Elementary operations per element of a gate, for the decision to use threads.
const GATE_COST: usize = 8;

/// An entry of a patch that lies outside of the picture and reads as zero; see [`unfold`].
pub const OUTSIDE: u32 = u32::MAX;

/// Rows as weighted sums of other rows: row `r` is `Σ weights[i] · x[rows[i]]` over `i` in
/// `offsets[r]..offsets[r + 1]`.
#[derive(Clone, Debug, PartialEq)]
pub struct RowMix {
    /// One more than there are output rows.
    pub offsets: Vec<usize>,
    /// Input rows.
    pub rows: Vec<u32>,
    /// Their weights.
    pub weights: Vec<f32>,
}

impl RowMix {
    /// The mean of each list of rows.
    #[must_use]
    pub fn means(groups: impl IntoIterator<Item = Vec<u32>>) -> Self {
        let mut mix = Self { offsets: vec![0], rows: Vec::new(), weights: Vec::new() };
        for group in groups {
            mix.weights.extend(vec![1.0 / group.len() as f32; group.len()]);
            mix.rows.extend(group);
            mix.offsets.push(mix.rows.len());
        }
        mix
    }

    /// The rows themselves, in this order.
    #[must_use]
    pub fn select(rows: Vec<u32>) -> Self {
        Self { offsets: (0..=rows.len()).collect(), weights: vec![1.0; rows.len()], rows }
    }

    /// Output rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// Whether there is no output row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One more than the largest input row that is read.
    #[must_use]
    pub fn reads(&self) -> usize {
        self.rows.iter().max().map_or(0, |&row| row as usize + 1)
    }
}

simd_fn! {
    /// `y += a · x`
    fn add_scaled<'a>(simd: S, y: &'a mut [f32], x: &'a [f32], a: f32) -> () {
        let a = simd.splat_f32s(a);
        for i in (0..y.len()).step_by(S::F32_LANES) {
            let sum = simd.mul_add_e_f32s(load(simd, x, i), a, load(simd, y, i));
            store(simd, y, i, sum);
        }
    }
}

simd_fn! {
    /// `y += w · x`, elementwise.
    fn add_product<'a>(simd: S, y: &'a mut [f32], x: &'a [f32], w: &'a [f32]) -> () {
        for i in (0..y.len()).step_by(S::F32_LANES) {
            let sum = simd.mul_add_e_f32s(load(simd, x, i), load(simd, w, i), load(simd, y, i));
            store(simd, y, i, sum);
        }
    }
}

/// `y [mix.len(), c]` from `x [_, c]`.
pub fn mix_forward(y: &mut [f32], x: &[f32], mix: &RowMix, c: usize) {
    debug_assert!(y.len() == mix.len() * c && x.len() >= mix.reads() * c);
    let y = Shared::new(y);
    ranges(mix.len(), 1, mix.rows.len() * c, |range| {
        for r in range {
            // SAFETY: every row is visited once.
            let y = unsafe { y.part(r * c, c) };
            y.fill(0.0);
            for i in mix.offsets[r]..mix.offsets[r + 1] {
                let row = mix.rows[i] as usize;
                add_scaled(y, &x[row * c..(row + 1) * c], mix.weights[i]);
            }
        }
    });
}

/// Gradient of [`mix_forward`]: `dx [_, c] +=`.
pub fn mix_backward(dx: &mut [f32], dy: &[f32], mix: &RowMix, c: usize) {
    debug_assert!(dy.len() == mix.len() * c && dx.len() >= mix.reads() * c);
    let dx = Shared::new(dx);
    // Threads own columns, so that a row that is read twice is always summed in order.
    ranges(c, 64, mix.rows.len() * c, |cols| {
        for r in 0..mix.len() {
            for i in mix.offsets[r]..mix.offsets[r + 1] {
                // SAFETY: the column ranges are disjoint.
                let dx = unsafe { dx.part(mix.rows[i] as usize * c + cols.start, cols.len()) };
                add_scaled(dx, &dy[r * c + cols.start..r * c + cols.end], mix.weights[i]);
            }
        }
    });
}

/// Calls `f(tap, position of the output, position of the input)` for what a 3×3 window with one row of padding touches
/// in output rows `lines` (of all pictures) of pictures `h × w`.
#[inline]
fn windows(lines: std::ops::Range<usize>, h: usize, w: usize, mut f: impl FnMut(usize, usize, usize)) {
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

/// Depthwise 3×3 convolution with stride 1 and zero padding of 1: `x`, `y` `[n · h · w, c]`, `weight [c, 9]` as
/// published (`[c, 1, 3, 3]`). With `transposed`, the gradient towards the input: `y` is then `dx`, and `x` is `dy`.
pub fn depthwise3(
    y: &mut [f32],
    x: &[f32],
    weight: &[f32],
    n: usize,
    h: usize,
    w: usize,
    c: usize,
    transposed: bool,
) {
    debug_assert!(y.len() == n * h * w * c && x.len() == y.len() && weight.len() == 9 * c);
    let mut taps = vec![0.0; 9 * c];
    for tap in 0..9 {
        let from = if transposed { 8 - tap } else { tap };
        for (ch, to) in taps[tap * c..(tap + 1) * c].iter_mut().enumerate() {
            *to = weight[ch * 9 + from];
        }
    }
    let y = Shared::new(y);
    ranges(n * h, 1, n * h * w * c * 9, |lines| {
        // SAFETY: the ranges of lines are disjoint.
        unsafe { y.part(lines.start * w * c, lines.len() * w * c) }.fill(0.0);
        windows(lines, h, w, |tap, to, from| {
            // SAFETY: a position of one of this range's lines.
            let y = unsafe { y.part(to * c, c) };
            add_product(y, &x[from * c..(from + 1) * c], &taps[tap * c..(tap + 1) * c]);
        });
    });
}

/// Gradient of [`depthwise3`] towards the weight: `dweight [c, 9] +=`.
pub fn depthwise3_weight(dweight: &mut [f32], dy: &[f32], x: &[f32], n: usize, h: usize, w: usize, c: usize) {
    debug_assert!(dy.len() == n * h * w * c && x.len() == dy.len() && dweight.len() == 9 * c);
    let mut taps = vec![0.0; 9 * c];
    let shared = Shared::new(&mut taps);
    ranges(c, 64, n * h * w * c * 9, |cols| {
        windows(0..n * h, h, w, |tap, at, from| {
            // SAFETY: the column ranges are disjoint.
            let sum = unsafe { shared.part(tap * c + cols.start, cols.len()) };
            let (dy, x) = (&dy[at * c..(at + 1) * c], &x[from * c..(from + 1) * c]);
            add_product(sum, &dy[cols.clone()], &x[cols.clone()]);
        });
    });
    for (ch, dweight) in dweight.chunks_exact_mut(9).enumerate() {
        for (tap, d) in dweight.iter_mut().enumerate() {
            *d += taps[tap * c + ch];
        }
    }
}

/// Patches as rows: `y[r, ch · taps + k] = x[sources[r · taps + k], ch]`, or 0 where the source is [`OUTSIDE`]. With a
/// weight `[out, c, taps…]` read as `[out, c · taps]`, a linear layer on them is a convolution. `y` is
/// `[sources.len() / taps, c · taps]`.
pub fn unfold(y: &mut [f32], x: &[f32], sources: &[u32], taps: usize, c: usize) {
    debug_assert_eq!(y.len(), sources.len() * c);
    let width = taps * c;
    let y = Shared::new(y);
    ranges(sources.len() / taps, 1, sources.len() * c, |range| {
        for r in range {
            // SAFETY: every row is visited once.
            let y = unsafe { y.part(r * width, width) };
            for (k, &source) in sources[r * taps..(r + 1) * taps].iter().enumerate() {
                let to = y[k..].iter_mut().step_by(taps);
                if source == OUTSIDE {
                    to.for_each(|to| *to = 0.0);
                } else {
                    let from = &x[source as usize * c..(source as usize + 1) * c];
                    to.zip(from).for_each(|(to, from)| *to = *from);
                }
            }
        }
    });
}

/// Gradient of [`unfold`]: `dx [_, c] +=`.
pub fn fold(dx: &mut [f32], dy: &[f32], sources: &[u32], taps: usize, c: usize) {
    debug_assert_eq!(dy.len(), sources.len() * c);
    let dx = Shared::new(dx);
    ranges(c, 16, sources.len() * c, |cols| {
        for (at, &source) in sources.iter().enumerate().filter(|(_, source)| **source != OUTSIDE) {
            // SAFETY: the column ranges are disjoint.
            let dx = unsafe { dx.part(source as usize * c + cols.start, cols.len()) };
            let row = &dy[at / taps * taps * c + at % taps..];
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
    /// `y *= s (1 − s)`, `s = sigmoid(gate)`.
    fn gate_slope_row<'a>(simd: S, y: &'a mut [f32], gate: &'a [f32]) -> () {
        for i in (0..y.len()).step_by(S::F32_LANES) {
            let (open, closed) = sigmoid(simd, load(simd, gate, i));
            let slope = simd.mul_f32s(open, closed);
            store(simd, y, i, simd.mul_f32s(load(simd, y, i), slope));
        }
    }
}

/// `y [n · s, c] = x · sigmoid(gate)`, each row of `gate [n, c]` for `s` consecutive rows of `x`.
pub fn gate_forward(y: &mut [f32], x: &[f32], gate: &[f32], n: usize, s: usize, c: usize) {
    debug_assert!(y.len() == n * s * c && x.len() == y.len() && gate.len() == n * c);
    let y = Shared::new(y);
    ranges(n * s, 1, n * s * c * GATE_COST, |range| {
        for r in range {
            // SAFETY: every row is visited once.
            let y = unsafe { y.part(r * c, c) };
            gate_row(y, &x[r * c..(r + 1) * c], &gate[r / s * c..(r / s + 1) * c]);
        }
    });
}

/// Gradients of [`gate_forward`]: `dx`, `dgate` are overwritten.
pub fn gate_backward(
    dx: &mut [f32],
    dgate: &mut [f32],
    dy: &[f32],
    x: &[f32],
    gate: &[f32],
    n: usize,
    s: usize,
    c: usize,
) {
    gate_forward(dx, dy, gate, n, s, c);
    let dgate = Shared::new(dgate);
    ranges(n, 1, n * s * c * 2, |range| {
        for p in range {
            // SAFETY: every row is visited once.
            let sum = unsafe { dgate.part(p * c, c) };
            sum.fill(0.0);
            for r in p * s..(p + 1) * s {
                add_product(sum, &dy[r * c..(r + 1) * c], &x[r * c..(r + 1) * c]);
            }
            gate_slope_row(sum, &gate[p * c..(p + 1) * c]);
        }
    });
}

/// Probabilities of a few logits.
fn softmax(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exp: Vec<f32> = logits.iter().map(|l| (l - max).exp()).collect();
    let sum: f32 = exp.iter().sum();
    exp.iter().map(|e| e / sum).collect()
}

/// `y [len] = Σ softmax(logits)ᵢ · x[i]`, `x [logits.len(), len]`.
pub fn blend_forward(y: &mut [f32], x: &[f32], logits: &[f32]) {
    let len = y.len();
    debug_assert_eq!(x.len(), logits.len() * len);
    let shares = softmax(logits);
    let y = Shared::new(y);
    ranges(len, 64, x.len(), |range| {
        // SAFETY: the ranges are disjoint.
        let y = unsafe { y.part(range.start, range.len()) };
        y.fill(0.0);
        for (i, &share) in shares.iter().enumerate() {
            add_scaled(y, &x[i * len + range.start..i * len + range.end], share);
        }
    });
}

/// Gradients of [`blend_forward`]: `dx`, `dlogits` are overwritten.
pub fn blend_backward(dx: &mut [f32], dlogits: &mut [f32], dy: &[f32], x: &[f32], logits: &[f32]) {
    let len = dy.len();
    debug_assert!(x.len() == logits.len() * len && dx.len() == x.len() && dlogits.len() == logits.len());
    let shares = softmax(logits);
    let mut along = vec![0.0f64; logits.len()];
    for (i, &share) in shares.iter().enumerate() {
        let (dx, x) = (&mut dx[i * len..(i + 1) * len], &x[i * len..(i + 1) * len]);
        dx.fill(0.0);
        add_scaled(dx, dy, share);
        along[i] = dy.iter().zip(x).map(|(d, x)| f64::from(*d) * f64::from(*x)).sum();
    }
    let mean: f64 = shares.iter().zip(&along).map(|(s, a)| f64::from(*s) * a).sum();
    for ((d, share), along) in dlogits.iter_mut().zip(&shares).zip(&along) {
        *d = (f64::from(*share) * (along - mean)) as f32;
    }
}
