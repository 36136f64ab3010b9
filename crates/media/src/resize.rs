//! Resampling that equals Pillow's `Image.resize` on 8-bit RGB bit for bit.
//!
//! Two passes, horizontal then vertical, each rounding to 8 bits; a pass is skipped when its size does not change.
//! Weights are computed in f64, normalised, and rounded to fixed point with 22 fraction bits; sums are exact
//! integers, so the result does not depend on thread count or CPU.
//!
//! Source: Pillow `src/libImaging/Resample.c`.

use pulp::NullaryFnOnce;
use rayon::prelude::*;

use crate::{MediaError, Rgb8Image};

const FRACTION_BITS: u32 = 22;

/// A resampling kernel: its half-width in input pixels (when not shrinking) and its value.
struct Kernel {
    support: f64,
    weight: fn(f64) -> f64,
}

/// Keys' cubic with a = -0.5.
const BICUBIC: Kernel = Kernel {
    support: 2.0,
    weight: |x| {
        const A: f64 = -0.5;
        let x = x.abs();
        if x < 1.0 {
            ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
        } else if x < 2.0 {
            (((x - 5.0) * x + 8.0) * x - 4.0) * A
        } else {
            0.0
        }
    },
};

const LANCZOS: Kernel = Kernel {
    support: 3.0,
    weight: |x| {
        let sinc = |x: f64| {
            if x == 0.0 { 1.0 } else { (x * std::f64::consts::PI).sin() / (x * std::f64::consts::PI) }
        };
        if (-3.0..3.0).contains(&x) { sinc(x) * sinc(x / 3.0) } else { 0.0 }
    },
};

/// Input span and fixed-point weights of every output pixel along one axis.
struct Taps {
    /// First input pixel and number of weights, per output pixel.
    spans: Vec<(usize, usize)>,
    /// `[outputs, stride]`.
    weights: Vec<i32>,
    stride: usize,
}

impl Taps {
    fn new(num_in: usize, num_out: usize, kernel: &Kernel) -> Self {
        let scale = num_in as f64 / num_out as f64;
        let filter_scale = scale.max(1.0);
        let support = kernel.support * filter_scale;
        let stride = support.ceil() as usize * 2 + 1;
        let inverse = 1.0 / filter_scale;
        let mut spans = Vec::with_capacity(num_out);
        let mut weights = vec![0i32; num_out * stride];
        let mut exact = vec![0f64; stride];
        for (x, fixed) in weights.chunks_exact_mut(stride).enumerate() {
            let centre = (x as f64 + 0.5) * scale;
            // `as` cuts towards zero and saturates, as the C casts followed by the clamps do.
            let first = (centre - support + 0.5) as usize;
            let last = ((centre + support + 0.5) as usize).min(num_in);
            let len = last - first;
            let mut sum = 0.0;
            for (i, w) in exact[..len].iter_mut().enumerate() {
                *w = (kernel.weight)(((i + first) as f64 - centre + 0.5) * inverse);
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

/// One row, horizontally. A type with an inlined `call`, so that it is compiled for the vector width chosen at run time;
/// integer sums are the same at every width.
struct Horizontal<'a> {
    row_in: &'a [u8],
    /// Room for the row with four bytes per pixel, which fill vector registers.
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

/// One row, vertically, from the rows under its weights.
struct Vertical<'a> {
    rows: &'a [u8],
    weights: &'a [i32],
    /// Room for a row.
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

/// Resizes to `width_px` x `height_px` as Pillow's `resize(size, BICUBIC)`.
///
/// # Errors
/// [`MediaError::Shape`] when a side is 0 or the picture's fields do not agree.
pub fn resize_bicubic(image: &Rgb8Image, width_px: u32, height_px: u32) -> Result<Rgb8Image, MediaError> {
    resize(image, width_px, height_px, &BICUBIC)
}

/// Resizes to `width_px` x `height_px` as Pillow's `resize(size, LANCZOS)`.
///
/// # Errors
/// As [`resize_bicubic`].
pub fn resize_lanczos(image: &Rgb8Image, width_px: u32, height_px: u32) -> Result<Rgb8Image, MediaError> {
    resize(image, width_px, height_px, &LANCZOS)
}

fn resize(
    image: &Rgb8Image,
    width_px: u32,
    height_px: u32,
    kernel: &Kernel,
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

    let arch = pulp::Arch::new();
    let pass_1 = (w_in != w_out).then(|| {
        let taps = Taps::new(w_in, w_out, kernel);
        let mut out = vec![0u8; h_in * w_out * 3];
        out.par_chunks_exact_mut(w_out * 3).zip(image.pixels.par_chunks_exact(w_in * 3)).for_each_init(
            || vec![0u8; w_in * 4],
            |padded, (row_out, row_in)| arch.dispatch(Horizontal { row_in, padded, taps: &taps, row_out }),
        );
        out
    });
    let rows = pass_1.as_deref().unwrap_or(&image.pixels);
    if h_in == h_out {
        return Ok(Rgb8Image { width_px, height_px, pixels: rows.to_vec() });
    }

    let taps = Taps::new(h_in, h_out, kernel);
    let row_len = w_out * 3;
    let mut pixels = vec![0u8; h_out * row_len];
    pixels.par_chunks_exact_mut(row_len).enumerate().for_each_init(
        || vec![0i32; row_len],
        |sums, (y, row_out)| {
            let (first, weights) = taps.get(y);
            arch.dispatch(Vertical { rows: &rows[first * row_len..], weights, sums, row_out });
        },
    );
    Ok(Rgb8Image { width_px, height_px, pixels })
}
