//! Sample rate conversion by FFT (`rubato`). The spectrum is cut at the lower Nyquist frequency with a squared Blackman-Harris
//! window.
//!
//! Compared with the exact band-limited signal, the error is below 1e-5 of the peak up to 90 % of the lower Nyquist frequency.
//! Frequencies above the lower Nyquist frequency are attenuated to below 1e-5. For speech, the result of `soxr` (high quality),
//! which librosa uses, differs by less than 0.2 % of the peak; see `tests/audio.rs` and `tests/data/make_audio.py` of
//! `omnigrpo-media`.
//!
//! This is a crate because `rubato` compiles a whole FFT library into the crate that calls it, which takes four times as long at the
//! optimisation of the media crate.

use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Resampler, WindowFunction};

/// Minimum number of input samples per block, which allows a transition band of 2 % of the lower Nyquist frequency.
const MIN_BLOCK: usize = 4096;

/// Returns the `samples` of one channel at another rate: `ceil(n · to / from)` samples. Both rates are in Hz. The result depends on the
/// input alone, not on threads.
///
/// # Errors
/// Returns the reason if a rate is 0 or the resampler refuses the pair of rates.
pub fn resample(samples: &[f32], from: u32, to: u32) -> Result<Vec<f32>, String> {
    if from == 0 || to == 0 {
        return Err("a rate of 0 is invalid".to_owned());
    }
    if samples.is_empty() || from == to {
        return Ok(samples.to_vec());
    }
    let (from, to) = (from as usize, to as usize);
    // Whole blocks have `step * n` input samples; with an even n the filter delays by whole samples of the output.
    let step = from / gcd(from, to);
    let block = step * 2 * MIN_BLOCK.div_ceil(2 * step);
    let mut resampler =
        Fft::<f32>::new_custom(from, to, block, 1, 1, WindowFunction::BlackmanHarris2, FixedSync::Both)
            .map_err(|e| e.to_string())?;
    let input = InterleavedSlice::new(samples, 1, samples.len()).map_err(|e| e.to_string())?;
    let output = resampler.process_all(&input, samples.len(), None).map_err(|e| e.to_string())?;
    Ok(output.take_data())
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
