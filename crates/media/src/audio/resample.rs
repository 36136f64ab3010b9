//! Another sample rate, by FFT (`rubato`): the spectrum is cut at the lower Nyquist frequency with a squared
//! Blackman-Harris window.
//!
//! Against the exact band-limited signal the error is below 1e-5 of the peak up to 90 % of the lower Nyquist frequency, and
//! what lies above it comes out below 1e-5. `soxr` (high quality), which librosa uses, gives the same speech
//! within 0.2 % of its peak; see `tests/audio.rs` and `tests/data/make_audio.py`.

use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Resampler, WindowFunction};

use super::AudioClip;
use crate::MediaError;

/// Least input samples per block: enough for a transition band of 2 % of the lower Nyquist frequency.
const MIN_BLOCK: usize = 4096;

/// Returns the same sound at `sample_rate_hz`, with `ceil(n · new rate / old rate)` samples. A pure function of its input, independent of
/// threads.
///
/// # Errors
/// A rate of 0.
pub fn resample(clip: &AudioClip, sample_rate_hz: u32) -> Result<AudioClip, MediaError> {
    if clip.sample_rate_hz == sample_rate_hz {
        return Ok(clip.clone());
    }
    let (from, to) = (clip.sample_rate_hz as usize, sample_rate_hz as usize);
    let wrong = |e: &dyn std::fmt::Display| {
        MediaError::setting("resampling", format!("{from} Hz to {to} Hz ({e})"), "positive rates")
    };
    if from == 0 || to == 0 {
        return Err(wrong(&"a rate of 0 is invalid"));
    }
    if clip.samples.is_empty() {
        return Ok(AudioClip { samples: Vec::new(), sample_rate_hz });
    }
    // Whole blocks have `step * n` input samples; with an even n the filter delays by whole samples of the output.
    let step = from / gcd(from, to);
    let block = step * 2 * MIN_BLOCK.div_ceil(2 * step);
    let mut resampler =
        Fft::<f32>::new_custom(from, to, block, 1, 1, WindowFunction::BlackmanHarris2, FixedSync::Both)
            .map_err(|e| wrong(&e))?;
    let num_samples = clip.samples.len();
    let input = InterleavedSlice::new(&clip.samples, 1, num_samples).map_err(|e| wrong(&e))?;
    let output = resampler.process_all(&input, num_samples, None).map_err(|e| wrong(&e))?;
    Ok(AudioClip { samples: output.take_data(), sample_rate_hz })
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
