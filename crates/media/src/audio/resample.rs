//! Sample rate conversion by FFT (`rubato`). The spectrum is cut at the lower Nyquist frequency with a squared Blackman-Harris
//! window.
//!
//! Compared with the exact band-limited signal, the error is below 1e-5 of the peak up to 90 % of the lower Nyquist frequency.
//! Frequencies above the lower Nyquist frequency are attenuated to below 1e-5. For speech, the result of `soxr` (high quality),
//! which librosa uses, differs by less than 0.2 % of the peak; see `tests/audio.rs` and `tests/data/make_audio.py`.

use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Resampler, WindowFunction};

use super::AudioClip;
use crate::MediaError;

/// Minimum number of input samples per block, which allows a transition band of 2 % of the lower Nyquist frequency.
const MIN_BLOCK: usize = 4096;

/// Returns the same audio at `sample_rate_hz`, with `ceil(n · new rate / old rate)` samples. The result depends only on the
/// input, not on the number of threads.
///
/// # Errors
/// Returns an error if a rate is 0.
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
    // A block has `step * n` input samples. If n is even, the delay of the filter is a whole number of output samples.
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
