//! The values of each type.
//!
//! Source: `quants.py` of the Python package `gguf`. Each line rounds as NumPy does there, so the values are equal to the bit. A block
//! begins or ends with scales in half precision; the numbers of few bits are packed so that the low half of byte `i` belongs to value `i`
//! and the high half to a value half a group later.

use half::{bf16, f16};

/// Calls `block` with each block and its values.
fn each<const BYTES: usize, const VALUES: usize>(
    bytes: &[u8],
    to: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [f32; VALUES]),
) {
    let (blocks, values) = (bytes.as_chunks::<BYTES>().0, to.as_chunks_mut::<VALUES>().0);
    blocks.iter().zip(values).for_each(|(bytes, values)| block(bytes, values));
}

/// Returns the number in half precision at byte `at`.
fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

pub fn f32(bytes: &[u8], to: &mut [f32]) {
    each::<4, 1>(bytes, to, |bytes, value| value[0] = f32::from_le_bytes(*bytes));
}

pub fn f16(bytes: &[u8], to: &mut [f32]) {
    each::<2, 1>(bytes, to, |bytes, value| value[0] = f16::from_le_bytes(*bytes).to_f32());
}

pub fn bf16(bytes: &[u8], to: &mut [f32]) {
    each::<2, 1>(bytes, to, |bytes, value| value[0] = bf16::from_le_bytes(*bytes).to_f32());
}

pub fn q4_0(bytes: &[u8], to: &mut [f32]) {
    each::<18, 32>(bytes, to, |block, to| {
        let d = half(block, 0);
        for (i, q) in block[2..].iter().enumerate() {
            to[i] = d * f32::from((q & 15) as i8 - 8);
            to[i + 16] = d * f32::from((q >> 4) as i8 - 8);
        }
    });
}

pub fn q4_1(bytes: &[u8], to: &mut [f32]) {
    each::<20, 32>(bytes, to, |block, to| {
        let (d, m) = (half(block, 0), half(block, 2));
        for (i, q) in block[4..].iter().enumerate() {
            to[i] = d * f32::from(q & 15) + m;
            to[i + 16] = d * f32::from(q >> 4) + m;
        }
    });
}

pub fn q5_0(bytes: &[u8], to: &mut [f32]) {
    each::<22, 32>(bytes, to, |block, to| {
        let d = half(block, 0);
        // One high bit per value.
        let high = |i: usize| (block[2 + i / 8] >> (i % 8) & 1) << 4;
        for (i, q) in block[6..].iter().enumerate() {
            to[i] = d * f32::from((q & 15 | high(i)) as i8 - 16);
            to[i + 16] = d * f32::from((q >> 4 | high(i + 16)) as i8 - 16);
        }
    });
}

pub fn q8_0(bytes: &[u8], to: &mut [f32]) {
    each::<34, 32>(bytes, to, |block, to| {
        let d = half(block, 0);
        for (to, q) in to.iter_mut().zip(&block[2..]) {
            *to = f32::from(*q as i8) * d;
        }
    });
}

/// Returns scale and minimum of group `j` of 8, each of 6 bits, from the 12 bytes that hold them.
fn scale_and_min(packed: &[u8], j: usize) -> (u8, u8) {
    match j {
        0..4 => (packed[j] & 63, packed[j + 4] & 63),
        _ => {
            let low = packed[j + 4];
            (low & 15 | packed[j - 4] >> 2 & 0x30, low >> 4 | packed[j] >> 2 & 0x30)
        }
    }
}

pub fn q4_k(bytes: &[u8], to: &mut [f32]) {
    each::<144, 256>(bytes, to, |block, to| {
        let (d, dmin, quants) = (half(block, 0), half(block, 2), &block[16..]);
        for j in 0..8 {
            let (scale, min) = scale_and_min(&block[4..16], j);
            let (d, m) = (d * f32::from(scale), dmin * f32::from(min));
            for l in 0..32 {
                let q = quants[j / 2 * 32 + l] >> (j % 2 * 4) & 15;
                to[j * 32 + l] = d * f32::from(q) - m;
            }
        }
    });
}

pub fn q5_k(bytes: &[u8], to: &mut [f32]) {
    each::<176, 256>(bytes, to, |block, to| {
        let (d, dmin, high, quants) = (half(block, 0), half(block, 2), &block[16..48], &block[48..]);
        for j in 0..8 {
            let (scale, min) = scale_and_min(&block[4..16], j);
            let (d, m) = (d * f32::from(scale), dmin * f32::from(min));
            for l in 0..32 {
                let q = quants[j / 2 * 32 + l] >> (j % 2 * 4) & 15 | (high[l] >> j & 1) << 4;
                to[j * 32 + l] = d * f32::from(q) - m;
            }
        }
    });
}

pub fn q6_k(bytes: &[u8], to: &mut [f32]) {
    each::<210, 256>(bytes, to, |block, to| {
        let (low, high, scales, d) = (&block[..128], &block[128..192], &block[192..208], half(block, 208));
        for (i, to) in to.iter_mut().enumerate() {
            // Two halves of 128 values, each of four quarters of 32.
            let (part, quarter, l) = (i / 128, i / 32 % 4, i % 32);
            let q = low[part * 64 + quarter % 2 * 32 + l] >> (quarter / 2 * 4) & 15
                | (high[part * 32 + l] >> (quarter * 2) & 3) << 4;
            *to = d * f32::from(scales[i / 16] as i8) * f32::from(q as i8 - 32);
        }
    });
}

/// Appends values as f32.
pub fn to_f32(values: &[f32], to: &mut Vec<u8>) {
    to.extend(values.iter().flat_map(|x| x.to_le_bytes()));
}

/// Appends values in half precision, rounded to the nearest, ties to even.
pub fn to_f16(values: &[f32], to: &mut Vec<u8>) {
    to.extend(values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()));
}

/// Appends blocks of 8 bits. A value is divided by the largest magnitude of its block over 127, before that scale is rounded to half
/// precision; halves round away from zero.
pub fn to_q8_0(values: &[f32], to: &mut Vec<u8>) {
    for block in values.chunks_exact(32) {
        let d = block.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
        let by = if d == 0.0 { 0.0 } else { 1.0 / d };
        to.extend(f16::from_f32(d).to_le_bytes());
        to.extend(block.iter().map(|x| (x * by).round() as i8 as u8));
    }
}
