//! The synthetic voice: a vowel, as harmonics under two formants, spoken in syllables. Pitch, pace, loudness and roughness
//! express the emotion. The arithmetic uses only sums and products, so that every machine computes the same samples.

use rand_chacha::ChaCha8Rng;

use super::{Emotion, real};
use crate::random::pick;

/// Samples per second.
pub const SAMPLE_RATE_HZ: u32 = 16_000;
/// Length of the sound in samples: one second.
const NUM_SAMPLES: usize = SAMPLE_RATE_HZ as usize;
/// Upper limit of the harmonics, Hz.
const TOP_HZ: f64 = 4500.0;

/// First two formants of a, e, i, o, u, Hz.
const VOWELS: [[f64; 2]; 5] =
    [[800.0, 1200.0], [500.0, 1900.0], [300.0, 2300.0], [500.0, 900.0], [320.0, 700.0]];

/// Sound of an emotion.
struct Manner {
    /// Pitch at the beginning and at the end, Hz.
    pitch_hz: [f64; 2],
    syllables: f64,
    loudness: f64,
    /// Rate in Hz and depth of the tremor in loudness.
    tremor: [f64; 2],
    /// Share of noise.
    breath: f64,
}

fn manner(emotion: Emotion) -> Manner {
    let of = |pitch_hz, syllables, loudness, tremor, breath| Manner {
        pitch_hz,
        syllables,
        loudness,
        tremor,
        breath,
    };
    match emotion {
        Emotion::Neutral => of([150.0, 150.0], 3.0, 0.5, [0.0, 0.0], 0.02),
        Emotion::Happy => of([230.0, 330.0], 5.0, 0.7, [0.0, 0.0], 0.02),
        Emotion::Surprise => of([180.0, 520.0], 1.0, 0.7, [0.0, 0.0], 0.02),
        Emotion::Angry => of([170.0, 130.0], 6.0, 0.95, [0.0, 0.0], 0.5),
        Emotion::Disgust => of([110.0, 95.0], 2.0, 0.5, [22.0, 0.95], 0.05),
        Emotion::Sad => of([140.0, 85.0], 1.0, 0.35, [0.0, 0.0], 0.02),
        Emotion::Fear => of([360.0, 340.0], 2.0, 0.4, [9.0, 0.8], 0.15),
    }
}

/// Returns the samples of one second of speech.
pub(super) fn speak(emotion: Emotion, rng: &mut ChaCha8Rng) -> Vec<i16> {
    let manner = manner(emotion);
    let formants = VOWELS[pick(rng, VOWELS.len())];
    let register = real(rng, 0.92, 1.08);
    let loudness = manner.loudness * real(rng, 0.85, 1.05);
    let pace = manner.syllables * real(rng, 0.9, 1.1);
    // Returns the amplitude of a harmonic: formants amplify harmonics near them.
    let colour = |hz: f64| {
        let near = |i: usize| 1.0 / (1.0 + ((hz - formants[i]) / (120.0 + 40.0 * i as f64)).powi(2));
        near(0) + 0.6 * near(1) + 0.02
    };
    let mut phase = real(rng, 0.0, 1.0);
    let mut out = Vec::with_capacity(NUM_SAMPLES);
    for i in 0..NUM_SAMPLES {
        let t = i as f64 / NUM_SAMPLES as f64;
        let pitch = register * (manner.pitch_hz[0] + (manner.pitch_hz[1] - manner.pitch_hz[0]) * t);
        phase = (phase + pitch / f64::from(SAMPLE_RATE_HZ)).fract();
        let partials = (1..).map(f64::from).take_while(|k| k * pitch < TOP_HZ);
        let tone: f64 = partials.map(|k| colour(k * pitch) * sine(k * phase)).sum();
        let noise = real(rng, -1.0, 1.0) * 2.0;
        // Each syllable swells and fades, with a short pause before the next.
        let syllable = (t * pace).fract();
        let swell = (8.0 * syllable).min(5.0 * (1.0 - syllable)).clamp(0.0, 1.0);
        let tremor = 1.0 - manner.tremor[1] * (0.5 + 0.5 * sine(manner.tremor[0] * t));
        let voice = (1.0 - manner.breath) * tone + manner.breath * noise;
        out.push((voice * swell * tremor * loudness * 6000.0).clamp(-32_000.0, 32_000.0) as i16);
    }
    out
}

/// Returns the sine of `turns` full turns, with an error below 0.002.
fn sine(turns: f64) -> f64 {
    let x = turns - turns.round();
    let parabola = 8.0 * x - 16.0 * x * x.abs();
    0.225 * (parabola * parabola.abs() - parabola) + parabola
}
