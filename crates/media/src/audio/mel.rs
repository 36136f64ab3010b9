//! Whisper's log-mel features.
//!
//! The steps are:
//!
//! * Pad the audio with zeros, or cut it, to the window (30 s). Reflect half a frame at both ends.
//! * Cut frames of `n_fft` samples every `hop_length` samples, and weight them with a periodic Hann window.
//! * Compute the power spectrum, and apply Slaney's mel filters with area norm from 0 to 8000 Hz.
//! * Take log10 of at least 1e-10, and raise values below (maximum - 8) to that bound. Compute (x + 4) / 4.
//!
//! The last frame is dropped. Everything is computed in f64. [`LogMel::trimmed`] leaves out the silence after the sound, without
//! which the values of all other frames are the same.
//!
//! Source: `transformers` 5.23 `models/whisper/feature_extraction_whisper.py`, `audio_utils.mel_filter_bank`.

use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use super::{AudioClip, resample};
use crate::MediaError;

/// Upper frequency limit of the filters, in Hz.
const MAX_HZ: f64 = 8000.0;
/// Point at which Slaney's scale changes from linear to logarithmic, in Hz and in mel.
const BREAK_HZ: f64 = 1000.0;
const BREAK_MEL: f64 = 15.0;
/// Mel per unit of the natural logarithm above that point: 27 mel for a factor of 6.4.
const MEL_PER_LOG: f64 = 27.0;
/// Minimum power before the logarithm.
const FLOOR: f64 = 1e-10;
/// Number of decades below the maximum that are kept.
const RANGE: f64 = 8.0;

/// Log-mel features of one audio clip.
#[derive(Debug, Clone, PartialEq)]
pub struct MelSpectrogram {
    /// Features `[num_mels, num_frames]`, row-major.
    pub data: Vec<f32>,
    /// Number of mel filters.
    pub num_mels: usize,
    /// Number of frames.
    pub num_frames: usize,
    /// Number of leading frames that a model hears. The frames after them are those that its convolutions read.
    pub num_heard: usize,
}

/// Converter from audio to log-mel features, with the settings of a checkpoint's processor.
#[derive(Clone)]
pub struct LogMel {
    sample_rate_hz: u32,
    num_samples: usize,
    n_fft: usize,
    hop_length: usize,
    window: Vec<f64>,
    filters: Vec<Filter>,
    fourier: Arc<Fourier>,
    is_trimmed: bool,
}

/// Frames that the convolutions of a Whisper encoder read after the last one that it hears.
const READ_AFTER: usize = 2;

/// Nonzero part of a mel filter.
#[derive(Clone)]
struct Filter {
    first_bin: usize,
    weights: Vec<f64>,
}

/// Keys of `preprocessor_config.json` that affect the features.
#[derive(Deserialize)]
#[serde(default)]
struct Config {
    feature_extractor_type: String,
    feature_size: usize,
    sampling_rate: u32,
    hop_length: usize,
    chunk_length: usize,
    n_fft: usize,
    padding_value: f64,
    padding_side: String,
    dither: f64,
    do_normalize: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            feature_extractor_type: "WhisperFeatureExtractor".into(),
            feature_size: 80,
            sampling_rate: 16_000,
            hop_length: 160,
            chunk_length: 30,
            n_fft: 400,
            padding_value: 0.0,
            padding_side: "right".into(),
            dither: 0.0,
            do_normalize: false,
        }
    }
}

impl LogMel {
    /// Creates the published converter of Whisper: 16 kHz, 30 s, and frames of 400 samples every 160 samples. `num_mels` is 128
    /// for large-v3 and 80 for its predecessors.
    ///
    /// # Errors
    /// Returns an error if `num_mels` is 0 or above 1024.
    pub fn whisper(num_mels: usize) -> Result<Self, MediaError> {
        Self::new(&Config { feature_size: num_mels, ..Config::default() })
    }

    /// Creates the converter described by the `preprocessor_config.json` of a Whisper checkpoint.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, belongs to another feature extractor, or requests an unsupported step.
    pub fn from_config(path: &Path) -> Result<Self, MediaError> {
        let text = omnigrpo_guard::inside::read_path(path, crate::limits::MAX_CONFIG_BYTES)
            .map_err(|source| MediaError::Read { path: path.to_owned(), source })?;
        let wrong = |e: serde_json::Error| {
            MediaError::setting(
                path.display().to_string(),
                e,
                "the preprocessor_config.json of a Whisper model",
            )
        };
        // The text is parsed as a map first, because a list would be accepted as a structure without keys.
        Self::from_object(path, &serde_json::from_slice(&text).map_err(wrong)?)
    }

    /// Creates the converter that these keys of the file at `path` describe.
    ///
    /// # Errors
    /// Returns an error if the keys belong to another feature extractor, or request an unsupported step.
    pub fn from_object(
        path: &Path,
        keys: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<Self, MediaError> {
        let wrong = |e: serde_json::Error| {
            MediaError::setting(path.display().to_string(), e, "the audio processor of a Whisper model")
        };
        Self::new(&serde_json::from_value(keys.clone().into()).map_err(wrong)?)
    }

    fn new(config: &Config) -> Result<Self, MediaError> {
        let wrong = |key: &str, got: &dyn std::fmt::Display, expected: &str| {
            Err(MediaError::setting(format!("`{key}` of the audio processor"), got, expected))
        };
        if config.feature_extractor_type != "WhisperFeatureExtractor" {
            return wrong(
                "feature_extractor_type",
                &config.feature_extractor_type,
                "WhisperFeatureExtractor",
            );
        }
        if !(1..=1024).contains(&config.feature_size) {
            return wrong("feature_size", &config.feature_size, "1 to 1024 mel filters");
        }
        if !(1..=384_000).contains(&config.sampling_rate) {
            return wrong("sampling_rate", &config.sampling_rate, "1 to 384000 Hz");
        }
        if !(2..=2048).contains(&config.n_fft) || !config.n_fft.is_multiple_of(2) {
            return wrong("n_fft", &config.n_fft, "an even number from 2 to 2048");
        }
        if !(1..=config.n_fft).contains(&config.hop_length) {
            return wrong("hop_length", &config.hop_length, "1 to n_fft");
        }
        let num_samples = config.chunk_length.saturating_mul(config.sampling_rate as usize);
        if !(1..=600).contains(&config.chunk_length) || num_samples <= config.n_fft {
            return wrong("chunk_length", &config.chunk_length, "1 to 600 seconds, and more than one frame");
        }
        if config.dither != 0.0 {
            return wrong("dither", &config.dither, "0, because features must not be random");
        }
        if config.do_normalize {
            return wrong("do_normalize", &true, "false");
        }
        if config.padding_value != 0.0 {
            return wrong("padding_value", &config.padding_value, "0");
        }
        if config.padding_side != "right" {
            return wrong("padding_side", &config.padding_side, "right");
        }
        let n = config.n_fft;
        let window =
            (0..n).map(|i| 0.5 - 0.5 * (std::f64::consts::TAU * i as f64 / n as f64).cos()).collect();
        Ok(Self {
            sample_rate_hz: config.sampling_rate,
            num_samples,
            n_fft: n,
            hop_length: config.hop_length,
            window,
            filters: mel_filters(config.feature_size, n, f64::from(config.sampling_rate)),
            fourier: Arc::new(Fourier::new(n)),
            is_trimmed: false,
        })
    }

    /// Returns the converter of models that do not hear the silence after a sound. Its features end soon after the sound.
    #[must_use]
    pub fn trimmed(self) -> Self {
        Self { is_trimmed: true, ..self }
    }

    /// Returns whether the silence after a sound is left out.
    pub fn is_trimmed(&self) -> bool {
        self.is_trimmed
    }

    /// Returns the sample rate from which features are computed, in Hz.
    pub fn sample_rate_hz(&self) -> u32 {
        self.sample_rate_hz
    }

    /// Returns the seconds of audio that the features cover. Longer audio is cut.
    pub fn window_s(&self) -> f64 {
        self.num_samples as f64 / f64::from(self.sample_rate_hz)
    }

    /// Returns the number of mel filters.
    pub fn num_mels(&self) -> usize {
        self.filters.len()
    }

    /// Returns the number of frames of the window: 3000 for Whisper.
    pub fn num_frames(&self) -> usize {
        self.num_samples / self.hop_length
    }

    /// Returns the number of frames of the features of `num_samples` samples, and how many of these a model hears. Both are those of
    /// the window, unless the silence is trimmed.
    pub fn frames_of(&self, num_samples: usize) -> [usize; 2] {
        let window = self.num_frames();
        if !self.is_trimmed {
            return [window; 2];
        }
        let heard = num_samples.div_ceil(self.hop_length).min(window);
        // A frame that begins within its half before the end of the sound is not silent.
        let after = (self.n_fft / 2).div_ceil(self.hop_length).max(READ_AFTER);
        [(heard + after).min(window), heard]
    }

    /// Computes the features of a clip at any sample rate.
    pub fn features_of(&self, clip: &AudioClip) -> Result<MelSpectrogram, MediaError> {
        self.features(&resample(clip, self.sample_rate_hz)?.samples)
    }

    /// Computes the features `[num_mels, num_frames]` of samples at [`Self::sample_rate_hz`], padded or cut to the window. The number
    /// of frames is that of [`Self::frames_of`].
    ///
    /// # Errors
    /// Returns an error if a sample is not a finite number.
    pub fn features(&self, samples: &[f32]) -> Result<MelSpectrogram, MediaError> {
        let samples = &samples[..samples.len().min(self.num_samples)];
        if let Some(i) = samples.iter().position(|x| !x.is_finite()) {
            return Err(MediaError::setting(format!("sample {i}"), samples[i], "a finite number"));
        }
        let at = |i: i64| {
            // Samples are reflected without repeating the border. The border itself may be in the padding.
            let last = self.num_samples as i64 - 1;
            let i = if i < 0 { -i } else { last - (last - i).abs() };
            samples.get(i as usize).map_or(0.0, |&x| f64::from(x))
        };
        let (num_mels, [num_frames, num_heard]) = (self.filters.len(), self.frames_of(samples.len()));
        let mut log = vec![FLOOR.log10(); num_mels * num_frames];
        let mut frame = vec![0.0; self.n_fft];
        let mut spectrum = vec![[0.0; 2]; self.n_fft / 2 + 1];
        let mut power = vec![0.0; spectrum.len()];
        let half = (self.n_fft / 2) as i64;
        for t in 0..num_frames {
            let start = (t * self.hop_length) as i64 - half;
            let touches_end = start + self.n_fft as i64 >= self.num_samples as i64;
            if start >= samples.len() as i64 && !touches_end {
                continue; // nothing but padding
            }
            for (i, (x, w)) in frame.iter_mut().zip(&self.window).enumerate() {
                *x = at(start + i as i64) * w;
            }
            self.fourier.transform(&frame, &mut spectrum);
            for (p, [re, im]) in power.iter_mut().zip(&spectrum) {
                *p = re * re + im * im;
            }
            for (m, filter) in self.filters.iter().enumerate() {
                let sum: f64 =
                    filter.weights.iter().zip(&power[filter.first_bin..]).map(|(w, p)| w * p).sum();
                log[m * num_frames + t] = sum.max(FLOOR).log10();
            }
        }
        let max = log.iter().copied().fold(f64::MIN, f64::max);
        let data = log.into_iter().map(|x| ((x.max(max - RANGE) + 4.0) / 4.0) as f32).collect();
        Ok(MelSpectrogram { data, num_mels, num_frames, num_heard })
    }
}

/// Discrete Fourier transform of real frames of one even length, as a product with a table. It takes tens of microseconds for 400
/// samples. A library for it took a tenth of the compile time of this crate.
struct Fourier {
    /// Table of `cos` and `-sin` of 2π·k·i / n, `[n / 2 + 1 samples i, n / 2 + 1 bins k]`.
    turns: Vec<[f64; 2]>,
}

impl Fourier {
    fn new(n: usize) -> Self {
        let half = n / 2;
        // The product is reduced modulo n before it is scaled, so that large products lose no bits.
        let turn = |i: usize, k: usize| {
            let (sin, cos) = (std::f64::consts::TAU * ((i * k) % n) as f64 / n as f64).sin_cos();
            [cos, -sin]
        };
        let turns = (0..=half).flat_map(|i| (0..=half).map(move |k| turn(i, k))).collect();
        Self { turns }
    }

    /// Writes the bins 0 to n / 2 of a frame of n samples. Samples i and n - i have the same cosine, and their sines differ only
    /// in sign.
    fn transform(&self, frame: &[f64], bins: &mut [[f64; 2]]) {
        let n = frame.len();
        bins.fill([0.0; 2]);
        for (i, turns) in self.turns.chunks_exact(bins.len()).enumerate() {
            let mirrored = if i == 0 || 2 * i == n { 0.0 } else { frame[n - i] };
            let (sum, difference) = (frame[i] + mirrored, frame[i] - mirrored);
            for ([re, im], [cos, sin]) in bins.iter_mut().zip(turns) {
                *re += cos * sum;
                *im += sin * difference;
            }
        }
    }
}

/// Returns triangular filters whose edges are equally spaced on Slaney's mel scale. The height of a filter is 2 divided by its
/// width in Hz.
fn mel_filters(num_mels: usize, n_fft: usize, sample_rate_hz: f64) -> Vec<Filter> {
    let top = mel_from_hz(MAX_HZ);
    let edges: Vec<f64> =
        (0..num_mels + 2).map(|i| hz_from_mel(top * i as f64 / (num_mels + 1) as f64)).collect();
    let hz_of = |bin: usize| bin as f64 * sample_rate_hz / n_fft as f64;
    edges
        .windows(3)
        .map(|edge| {
            let weight = |bin: usize| {
                let hz = hz_of(bin);
                let (rise, fall) =
                    ((hz - edge[0]) / (edge[1] - edge[0]), (edge[2] - hz) / (edge[2] - edge[1]));
                rise.min(fall).max(0.0) * 2.0 / (edge[2] - edge[0])
            };
            let touched = || (0..=n_fft / 2).filter(|&bin| weight(bin) > 0.0);
            let first_bin = touched().next().unwrap_or(0);
            let weights =
                touched().next_back().map_or(Vec::new(), |last| (first_bin..=last).map(weight).collect());
            Filter { first_bin, weights }
        })
        .collect()
}

fn mel_from_hz(hz: f64) -> f64 {
    if hz < BREAK_HZ {
        hz * BREAK_MEL / BREAK_HZ
    } else {
        BREAK_MEL + (hz / BREAK_HZ).ln() * MEL_PER_LOG / 6.4f64.ln()
    }
}

fn hz_from_mel(mel: f64) -> f64 {
    if mel < BREAK_MEL {
        mel * BREAK_HZ / BREAK_MEL
    } else {
        BREAK_HZ * ((mel - BREAK_MEL) * 6.4f64.ln() / MEL_PER_LOG).exp()
    }
}
