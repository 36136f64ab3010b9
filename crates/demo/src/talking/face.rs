//! The drawn face: a coloured disc with eyes, brows and a mouth that opens with the voice. The features show the emotion,
//! and the colour supports it, as in comics.

use image::{Rgb, RgbImage};
use rand_chacha::ChaCha8Rng;

use super::{Emotion, real};
use crate::random::pick;

/// Side of a frame, pixels.
pub(super) const SIDE_PX: u32 = 32;

/// Look of an emotion. Lengths are in radii of the face.
struct Look {
    colour: [u8; 3],
    /// Height of the corners of the mouth above its middle.
    smile: f64,
    /// Height of the right corner of the mouth above the left.
    crooked: f64,
    /// Half-width of the mouth.
    mouth: f64,
    /// Opening of the silent mouth.
    open: f64,
    /// Vertical radius of the eyes.
    eye: f64,
    /// Height of the inner ends of the brows above the outer ends.
    brow: f64,
    /// Height of the brows above the eyes.
    raised: f64,
}

fn look(emotion: Emotion) -> Look {
    let calm = Look {
        colour: [190, 165, 140],
        smile: 0.0,
        crooked: 0.0,
        mouth: 0.4,
        open: 0.04,
        eye: 0.12,
        brow: 0.0,
        raised: 0.28,
    };
    match emotion {
        Emotion::Neutral => calm,
        Emotion::Happy => Look { colour: [245, 215, 60], smile: 0.3, mouth: 0.5, ..calm },
        Emotion::Surprise => {
            Look { colour: [250, 165, 70], mouth: 0.2, open: 0.3, eye: 0.2, raised: 0.45, ..calm }
        }
        Emotion::Angry => Look { colour: [225, 65, 50], smile: -0.15, brow: -0.25, raised: 0.2, ..calm },
        Emotion::Disgust => Look { colour: [125, 180, 60], crooked: 0.3, eye: 0.06, raised: 0.16, ..calm },
        Emotion::Sad => Look { colour: [95, 130, 225], smile: -0.3, brow: 0.2, ..calm },
        Emotion::Fear => Look {
            colour: [200, 180, 235],
            mouth: 0.55,
            open: 0.1,
            eye: 0.2,
            brow: 0.15,
            raised: 0.4,
            ..calm
        },
    }
}

/// Draws one frame per loudness (0 to 1).
pub(super) fn frames(emotion: Emotion, loudness: &[f64], rng: &mut ChaCha8Rng) -> Vec<RgbImage> {
    let look = look(emotion);
    let side = f64::from(SIDE_PX);
    let radius = real(rng, 0.36, 0.44) * side;
    let (x, y) = (side / 2.0 + real(rng, -2.0, 2.0), side / 2.0 + real(rng, -2.0, 2.0));
    let ground = [(); 3].map(|()| 20 + pick(rng, 50) as u8);
    let shade = real(rng, 0.85, 1.05);
    let skin = look.colour.map(|c| (f64::from(c) * shade).min(255.0) as u8);
    loudness
        .iter()
        .map(|loudness| {
            RgbImage::from_fn(SIDE_PX, SIDE_PX, |column, row| {
                // Coordinates relative to the centre of the face, in radii; `v` points up.
                let (u, v) = ((f64::from(column) + 0.5 - x) / radius, (y - f64::from(row) - 0.5) / radius);
                if u * u + v * v > 1.0 {
                    return Rgb(ground);
                }
                Rgb(if feature(&look, *loudness, u, v) { [25, 15, 20] } else { skin })
            })
        })
        .collect()
}

/// Returns true if a point of the face belongs to an eye, a brow or the mouth.
fn feature(look: &Look, loudness: f64, u: f64, v: f64) -> bool {
    let (eye_u, eye_v) = (u.abs() - 0.38, v - 0.2);
    let eye = (eye_u / 0.12).powi(2) + (eye_v / look.eye).powi(2) <= 1.0;
    let slope = look.brow * -eye_u / 0.2;
    let brow = eye_u.abs() <= 0.22 && (eye_v - look.raised - slope).abs() <= 0.07;
    let across = u / look.mouth;
    let middle = -0.48 + look.smile * (across * across - 0.5) + look.crooked * across / 2.0;
    let half_open = 0.06 + look.open / 2.0 + 0.1 * loudness;
    let mouth = across.abs() <= 1.0 && (v - middle).abs() <= half_open * (1.0 - 0.6 * across * across);
    eye || brow || mouth
}
