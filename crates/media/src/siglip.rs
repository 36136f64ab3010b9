//! Image processing of SigLIP towers: makes pictures square, resizes them and normalises them.
//!
//! Source: `transformers` 5.23 `SiglipImageProcessorPil` and, for the padding, HumanOmni's `mm_utils.expand2square`. The values
//! are identical to both, bit for bit.

use std::borrow::Cow;
use std::path::Path;

use serde::Deserialize;

use crate::{MediaError, Rgb8Image, resize_bicubic};

/// Treatment of a picture that is not square.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Squaring {
    /// Stretch the picture to a square.
    Stretch,
    /// Centre the picture on a square of the mean colour.
    Pad,
}

/// Settings of a tower's image processing.
#[derive(Debug, Clone, PartialEq)]
pub struct SiglipProcessor {
    /// Side of the output, in pixels.
    pub side_px: u32,
    /// Channel means, which are subtracted from colours in 0..1.
    pub mean: [f32; 3],
    /// Channel standard deviations, by which the difference is divided.
    pub std: [f32; 3],
    /// Treatment of a picture that is not square.
    pub squaring: Squaring,
}

impl SiglipProcessor {
    /// Creates the published processor for an output of `side_px`.
    pub fn new(side_px: u32, squaring: Squaring) -> Self {
        Self { side_px, mean: [0.5; 3], std: [0.5; 3], squaring }
    }

    /// Reads a `preprocessor_config.json`.
    ///
    /// # Errors
    /// Returns [`MediaError::Setting`] if the file cannot be read, if its resampling is not bicubic, or if its sides differ from
    /// `side_px`.
    pub fn from_config(path: &Path, side_px: u32, squaring: Squaring) -> Result<Self, MediaError> {
        #[derive(Deserialize)]
        struct Size {
            height: u32,
            width: u32,
        }
        #[derive(Deserialize)]
        struct Config {
            size: Option<Size>,
            image_mean: Option<[f32; 3]>,
            image_std: Option<[f32; 3]>,
            resample: Option<u32>,
            rescale_factor: Option<f64>,
        }
        let fail = |got: String, expected: &str| {
            Err(MediaError::setting("SigLIP processor", format!("{}: {got}", path.display()), expected))
        };
        let text = match omnigrpo_guard::inside::read_path(path, crate::limits::MAX_CONFIG_BYTES) {
            Ok(text) => text,
            Err(e) => return fail(e.to_string(), "a readable preprocessor_config.json"),
        };
        let config: Config = match serde_json::from_slice(&text) {
            Ok(config) => config,
            Err(e) => return fail(e.to_string(), "size, image_mean and image_std of a SigLIP processor"),
        };
        let (height, width) = config.size.map_or((side_px, side_px), |size| (size.height, size.width));
        if (height, width) != (side_px, side_px) {
            return fail(format!("size {width}x{height}"), &format!("the tower's size, {side_px}x{side_px}"));
        }
        if let Some(filter) = config.resample.filter(|&filter| filter != 3) {
            return fail(format!("resample {filter}"), "3 (bicubic)");
        }
        if let Some(factor) = config.rescale_factor.filter(|factor| (factor * 255.0 - 1.0).abs() > 1e-6) {
            return fail(format!("rescale_factor {factor}"), "1/255");
        }
        let (mean, std) = (config.image_mean.unwrap_or([0.5; 3]), config.image_std.unwrap_or([0.5; 3]));
        if std.iter().any(|s| !s.is_normal()) || mean.iter().any(|m| !(0.0..=1.0).contains(m)) {
            return fail(
                format!("image_mean {mean:?}, image_std {std:?}"),
                "means in 0..1 and a std other than 0",
            );
        }
        Ok(Self { side_px, mean, std, squaring })
    }

    /// Returns the normalised pixels `[pictures.len(), 3, side, side]`.
    pub fn process(&self, pictures: &[Rgb8Image]) -> Result<Vec<f32>, MediaError> {
        let cells = self.side_px as usize * self.side_px as usize;
        let levels = [0, 1, 2].map(|c| {
            let level = |value: usize| ((value as f64 * (1.0 / 255.0)) as f32 - self.mean[c]) / self.std[c];
            (0..256).map(level).collect::<Vec<f32>>()
        });
        let mut out = Vec::with_capacity(pictures.len() * 3 * cells);
        for picture in pictures {
            let square = self.square(picture)?;
            let resized = resize_bicubic(&square, self.side_px, self.side_px)?;
            for (c, levels) in levels.iter().enumerate() {
                out.extend(resized.pixels.iter().skip(c).step_by(3).map(|&value| levels[value as usize]));
            }
        }
        Ok(out)
    }

    fn square<'a>(&self, picture: &'a Rgb8Image) -> Result<Cow<'a, Rgb8Image>, MediaError> {
        let (width, height) = (picture.width_px, picture.height_px);
        if width == height || self.squaring == Squaring::Stretch {
            return Ok(Cow::Borrowed(picture));
        }
        let side = width.max(height);
        let mut square = Rgb8Image::filled(side, side, self.mean.map(|m| (f64::from(m) * 255.0) as u8))?;
        let (left, top) = ((side - width) as usize / 2, (side - height) as usize / 2);
        for (y, row) in picture.pixels.chunks_exact(width as usize * 3).enumerate() {
            let at = ((top + y) * side as usize + left) * 3;
            square.pixels[at..at + row.len()].copy_from_slice(row);
        }
        Ok(Cow::Owned(square))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_is_centred_on_grey() {
        let wide = Rgb8Image::new(3, 1, vec![255; 9]).unwrap();
        let processor = SiglipProcessor::new(3, Squaring::Pad);
        let grey = (127.0f64 / 255.0) as f32 * 2.0 - 1.0;
        let rows = processor.process(std::slice::from_ref(&wide)).unwrap();
        assert_eq!(rows.len(), 27);
        for (i, x) in rows[..9].iter().enumerate() {
            let expected = if (3..6).contains(&i) { 1.0 } else { grey };
            assert!((x - expected).abs() < 1e-6, "{i}: {x}");
        }
        let stretched = SiglipProcessor::new(3, Squaring::Stretch).process(&[wide]).unwrap();
        assert_eq!(stretched, [1.0; 27]);
    }
}
