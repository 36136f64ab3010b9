//! Resampling of 8-bit RGB that equals `Image.resize` of Pillow 13 bit for bit.
//!
//! There are two passes, and each rounds to 8 bits. A pass is skipped if its size does not change. The order of the passes is
//! that of Pillow 13 ([`vertical_first`]). Pillow 12 and earlier always begin with the horizontal pass; if the orders differ,
//! about a fifth of the values differ by one level. Weights are computed in f64, normalised, and rounded to fixed point with 22
//! fraction bits. Sums are exact integers, so the result does not depend on the number of threads or the CPU.
//!
//! Source: Pillow 13.0 `src/libImaging/Resample.c`.

use pulp::NullaryFnOnce;
use rayon::prelude::*;

use crate::{MediaError, Rgb8Image};

const FRACTION_BITS: u32 = 22;

/// Filter of a resize.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// Keys' cubic convolution with a = -0.5.
    Bicubic,
    /// A sinc, windowed by its main lobe stretched to three input pixels.
    Lanczos,
}

impl Filter {
    /// Returns the number of the filter in Pillow, which is `resample` in the files of image processors.
    pub const fn code(self) -> u32 {
        match self {
            Self::Lanczos => 1,
            Self::Bicubic => 3,
        }
    }

    /// Returns the half-width in input pixels, if the picture does not shrink.
    fn support(self) -> f64 {
        match self {
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    fn at(self, x: f64) -> f64 {
        match self {
            Self::Bicubic => bicubic(x),
            Self::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
            Self::Lanczos => 0.0,
        }
    }
}

fn sinc(x: f64) -> f64 {
    if x == 0.0 {
        return 1.0;
    }
    let x = x * std::f64::consts::PI;
    x.sin() / x
}

fn bicubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

/// Input span and fixed-point weights of every output pixel along one axis.
struct Taps {
    /// First input pixel and number of weights, per output pixel.
    spans: Vec<(usize, usize)>,
    /// Fixed-point weights `[outputs, stride]`.
    weights: Vec<i32>,
    stride: usize,
}

impl Taps {
    fn new(num_in: usize, num_out: usize, filter: Filter) -> Self {
        let scale = num_in as f64 / num_out as f64;
        let filter_scale = scale.max(1.0);
        let support = filter.support() * filter_scale;
        let stride = support.ceil() as usize * 2 + 1;
        let inverse = 1.0 / filter_scale;
        let mut spans = Vec::with_capacity(num_out);
        let mut weights = vec![0i32; num_out * stride];
        let mut exact = vec![0f64; stride];
        for (x, fixed) in weights.chunks_exact_mut(stride).enumerate() {
            let centre = (x as f64 + 0.5) * scale;
            // Like the C casts with their clamps, `as` truncates towards zero and saturates.
            let first = (centre - support + 0.5) as usize;
            let last = ((centre + support + 0.5) as usize).min(num_in);
            let len = last - first;
            let mut sum = 0.0;
            for (i, w) in exact[..len].iter_mut().enumerate() {
                *w = filter.at(((i + first) as f64 - centre + 0.5) * inverse);
                sum += *w;
            }
            for (fixed, w) in fixed.iter_mut().zip(&exact[..len]) {
                let w = if sum == 0.0 { *w } else { *w / sum } * f64::from(1u32 << FRACTION_BITS);
                *fixed = if w < 0.0 { w - 0.5 } else { w + 0.5 } as i32;
            }
            spans.push((first, len));
        }
        Self { spans, weights, stride }
    }

    fn get(&self, out: usize) -> (usize, &[i32]) {
        let (first, len) = self.spans[out];
        (first, &self.weights[out * self.stride..][..len])
    }
}

fn round_to_u8(sum: i32) -> u8 {
    (sum >> FRACTION_BITS).clamp(0, 255) as u8
}

/// Horizontal resampling of one row. It is a type with an inlined `call`, so that it is compiled for the vector width chosen at
/// run time. Integer sums are the same at every width.
struct Horizontal<'a> {
    row_in: &'a [u8],
    /// Buffer for the row with four bytes per pixel, which fit vector registers.
    padded: &'a mut [u8],
    taps: &'a Taps,
    row_out: &'a mut [u8],
}

impl NullaryFnOnce for Horizontal<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (to, from) in self.padded.chunks_exact_mut(4).zip(self.row_in.chunks_exact(3)) {
            to[..3].copy_from_slice(from);
        }
        for (x, rgb) in self.row_out.chunks_exact_mut(3).enumerate() {
            let (first, weights) = self.taps.get(x);
            let mut sums = [1i32 << (FRACTION_BITS - 1); 4];
            for (p, &w) in self.padded[first * 4..].chunks_exact(4).zip(weights) {
                for c in 0..4 {
                    sums[c] += i32::from(p[c]) * w;
                }
            }
            for c in 0..3 {
                rgb[c] = round_to_u8(sums[c]);
            }
        }
    }
}

/// Vertical resampling of one row, from the input rows to which its weights apply.
struct Vertical<'a> {
    rows: &'a [u8],
    weights: &'a [i32],
    /// Buffer for the sums of one row.
    sums: &'a mut [i32],
    row_out: &'a mut [u8],
}

impl NullaryFnOnce for Vertical<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.sums.fill(1 << (FRACTION_BITS - 1));
        for (row_in, &w) in self.rows.chunks_exact(self.row_out.len()).zip(self.weights) {
            for (sum, &v) in self.sums.iter_mut().zip(row_in) {
                *sum += i32::from(v) * w;
            }
        }
        for (out, &sum) in self.row_out.iter_mut().zip(self.sums.iter()) {
            *out = round_to_u8(sum);
        }
    }
}

/// Returns whether Pillow 13 runs the vertical pass before the horizontal pass. This is the case if the height shrinks, and by
/// more than twice as many pixels as the width. If the width grows, its shrinkage counts as negative.
fn vertical_first(from: (usize, usize), to: (usize, usize)) -> bool {
    let lost = |from: usize, to: usize| from as i64 - to as i64;
    let (columns, rows) = (lost(from.0, to.0), lost(from.1, to.1));
    rows > 0 && rows > 2 * columns
}

/// Resizes with [`Filter::Bicubic`]; see [`resize`].
///
/// # Errors
/// Returns the errors of [`resize`].
pub fn resize_bicubic(image: &Rgb8Image, width_px: u32, height_px: u32) -> Result<Rgb8Image, MediaError> {
    resize(image, width_px, height_px, Filter::Bicubic)
}

/// Resizes to `width_px` x `height_px` with the same result as Pillow's `resize(size, filter)`.
///
/// # Errors
/// Returns [`MediaError::Shape`] if a side is 0 or the picture's fields do not agree with each other.
pub fn resize(
    image: &Rgb8Image,
    width_px: u32,
    height_px: u32,
    filter: Filter,
) -> Result<Rgb8Image, MediaError> {
    image.check()?;
    if width_px == 0 || height_px == 0 {
        return Err(MediaError::Shape {
            what: "size to resize to",
            got: format!("{width_px}x{height_px}"),
            expected: "sides of at least 1".into(),
        });
    }
    let (w_in, h_in) = (image.width_px as usize, image.height_px as usize);
    let (w_out, h_out) = (width_px as usize, height_px as usize);
    let columns = (w_in != w_out).then(|| Taps::new(w_in, w_out, filter));
    let rows = (h_in != h_out).then(|| Taps::new(h_in, h_out, filter));
    let pixels = match (columns, rows) {
        (None, None) => image.pixels.clone(),
        (Some(columns), None) => horizontally(&image.pixels, w_in, &columns),
        (None, Some(rows)) => vertically(&image.pixels, w_in, &rows),
        (Some(columns), Some(rows)) if vertical_first((w_in, h_in), (w_out, h_out)) => {
            horizontally(&vertically(&image.pixels, w_in, &rows), w_in, &columns)
        }
        (Some(columns), Some(rows)) => vertically(&horizontally(&image.pixels, w_in, &columns), w_out, &rows),
    };
    Ok(Rgb8Image { width_px, height_px, pixels })
}

/// Resamples every row of `pixels`, whose rows have `width` pixels.
fn horizontally(pixels: &[u8], width: usize, taps: &Taps) -> Vec<u8> {
    let arch = pulp::Arch::new();
    let row_len = taps.spans.len() * 3;
    let mut out = vec![0u8; pixels.len() / (width * 3) * row_len];
    out.par_chunks_exact_mut(row_len).zip(pixels.par_chunks_exact(width * 3)).for_each_init(
        || vec![0u8; width * 4],
        |padded, (row_out, row_in)| arch.dispatch(Horizontal { row_in, padded, taps, row_out }),
    );
    out
}

/// Resamples every column of `pixels`, whose rows have `width` pixels.
fn vertically(pixels: &[u8], width: usize, taps: &Taps) -> Vec<u8> {
    let arch = pulp::Arch::new();
    let row_len = width * 3;
    let mut out = vec![0u8; taps.spans.len() * row_len];
    out.par_chunks_exact_mut(row_len).enumerate().for_each_init(
        || vec![0i32; row_len],
        |sums, (y, row_out)| {
            let (first, weights) = taps.get(y);
            arch.dispatch(Vertical { rows: &pixels[first * row_len..], weights, sums, row_out });
        },
    );
    out
}
