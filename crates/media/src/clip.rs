//! Image processing of CLIP: resizes the shorter side, crops the centre and normalises the colours.
//!
//! Source: `transformers` 5.23 `models/clip/image_processing_pil_clip.py`. The results are identical bit for bit.

use crate::{MediaError, Rgb8Image, resize_bicubic};

/// Maximum ratio of the longer side to the shorter. Without a limit, resizing the shorter side of an elongated picture would use
/// unbounded memory.
const MAX_ASPECT: u32 = 200;

/// Settings of CLIP's image processing.
#[derive(Debug, Clone, PartialEq)]
pub struct ClipPixels {
    /// Length of the shorter side after resizing, in pixels.
    pub shorter_px: u32,
    /// Side of the square cropped from the centre, in pixels; at most `shorter_px`.
    pub crop_px: u32,
    /// Mean of each colour channel, on a scale of 0 to 1.
    pub mean: [f64; 3],
    /// Standard deviation of each colour channel, on a scale of 0 to 1.
    pub std: [f64; 3],
}

impl ClipPixels {
    /// Returns normalised pixels `[3, crop, crop]`.
    ///
    /// # Errors
    /// Returns [`MediaError::Shape`] if one side of the picture is more than 200 times the other, or if the crop exceeds the
    /// shorter side.
    pub fn pixels(&self, image: &Rgb8Image) -> Result<Vec<f32>, MediaError> {
        let (width, height) = (image.width_px, image.height_px);
        let (short, long) = (width.min(height), width.max(height));
        if short == 0 || long / short > MAX_ASPECT || self.crop_px > self.shorter_px {
            return Err(MediaError::Shape {
                what: "picture for CLIP",
                got: format!(
                    "{width}x{height}, resized to {} and cropped to {}",
                    self.shorter_px, self.crop_px
                ),
                expected: format!(
                    "sides that differ by a factor of at most {MAX_ASPECT}, and a crop inside the picture"
                ),
            });
        }
        let longer = (u64::from(self.shorter_px) * u64::from(long) / u64::from(short)) as u32;
        let (w, h) = if width <= height { (self.shorter_px, longer) } else { (longer, self.shorter_px) };
        let resized = resize_bicubic(image, w, h)?;
        let (w, crop) = (w as usize, self.crop_px as usize);
        let (left, top) = ((w - crop) / 2, (h as usize - crop) / 2);
        let mut out = Vec::with_capacity(3 * crop * crop);
        for c in 0..3 {
            let (mean, std) = (self.mean[c] as f32, self.std[c] as f32);
            for y in top..top + crop {
                for x in left..left + crop {
                    let scaled = (f64::from(resized.pixels[(y * w + x) * 3 + c]) * (1.0 / 255.0)) as f32;
                    out.push((scaled - mean) / std);
                }
            }
        }
        Ok(out)
    }
}
