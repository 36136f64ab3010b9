//! Image processing of Aria: each picture becomes one or more squares, with a mask of real pixels.
//!
//! The longer side of a picture is resized to the side of the square. The other side keeps the aspect ratio, but a narrow picture
//! is stretched so that this side reaches a minimum. The picture is in the upper left corner of the square, and the rest is
//! black. If splitting is enabled, the picture is first resized to fit the best of several canvas sizes and centred on black. The
//! canvas is then cut into pieces, from left to right and top to bottom. Each piece, including its black borders, is then
//! processed as a picture.
//!
//! Pixels equal those of Pillow's bicubic resize, followed by `u8 / 255` in f64, rounded to f32, then `(x - mean) / std` in f32.
//!
//! Source: `transformers` 5.23 `models/aria/image_processing_pil_aria.py` and `select_best_resolution`, `get_patch_output_size`
//! of its `image_processing_utils`. Difference: in the source, all pictures of a batch have as many pieces as the picture with
//! the most pieces; here, each picture has only the pieces that it needs.

use rayon::prelude::*;

use crate::tiles::{not_empty, values_of_bytes, wrong_normalisation};
use crate::{MediaError, Rgb8Image, resize_bicubic};

/// Channels of a pixel: three colours and the mask.
const CHANNELS: usize = 4;

/// Maximum number of pixels of a canvas: 64 pieces with a side of 980 pixels.
const MOST_PIXELS: u64 = 64 * 980 * 980;

/// Settings of Aria's image processing.
#[derive(Debug, Clone, PartialEq)]
pub struct AriaProcessor {
    /// Side of a square, in pixels.
    pub side_px: u32,
    /// Minimum length of a picture's shorter side, in pixels.
    pub min_side_px: u32,
    /// Canvas sizes `(height, width)` for splitting, in pixels. If empty, pictures are not split.
    pub split: Vec<(u32, u32)>,
    /// Channel means, on a scale of 0 to 1.
    pub mean: [f64; 3],
    /// Channel standard deviations, on a scale of 0 to 1.
    pub std: [f64; 3],
}

/// Piece of a canvas: left, top, width and height in pixels.
type Piece = [u32; 4];

impl AriaProcessor {
    /// Returns the canvas sizes of the published processors, which are multiples of 490 px.
    pub fn published_split() -> Vec<(u32, u32)> {
        const UNITS: [(u32, u32); 19] = [
            (1, 2),
            (1, 3),
            (1, 4),
            (1, 5),
            (1, 6),
            (1, 7),
            (1, 8),
            (2, 4),
            (2, 3),
            (2, 2),
            (2, 1),
            (3, 1),
            (3, 2),
            (4, 1),
            (4, 2),
            (5, 1),
            (6, 1),
            (7, 1),
            (8, 1),
        ];
        UNITS.iter().map(|&(height, width)| (490 * height, 490 * width)).collect()
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// Returns [`MediaError::Setting`] for impossible sizes or an impossible normalisation.
    pub fn check(&self) -> Result<(), MediaError> {
        let too_large =
            |&&(h, w): &&(u32, u32)| h == 0 || w == 0 || u64::from(h) * u64::from(w) > MOST_PIXELS;
        let (what, got, expected) = if !(1..=1 << 14).contains(&self.side_px) {
            ("side of a picture", format!("{} px", self.side_px), "1 to 16384 px")
        } else if !(1..=self.side_px).contains(&self.min_side_px) {
            (
                "min_image_size",
                format!("{} px", self.min_side_px),
                "at least 1 px, and at most max_image_size",
            )
        } else if let Some((height, width)) = self.split.iter().find(too_large) {
            ("split_resolutions", format!("{height}x{width} px"), "sizes of at most 64 pieces of 980 px")
        } else if let Some(wrong) = wrong_normalisation(&self.mean, &self.std) {
            wrong
        } else {
            return Ok(());
        };
        Err(MediaError::setting(what, got, expected))
    }

    /// Returns the number of squares for a picture of `width x height`.
    ///
    /// # Errors
    /// Returns the errors of [`check`](Self::check), and [`MediaError::Shape`] for an empty picture.
    pub fn num_squares(&self, width: u32, height: u32) -> Result<usize, MediaError> {
        self.check()?;
        not_empty(width, height)?;
        Ok(self.canvas(width, height).map_or(1, |size| self.pieces(size).len()))
    }

    /// Returns the best canvas size `(height, width)` for a picture, or `None` if pictures are not split.
    fn canvas(&self, width: u32, height: u32) -> Option<(u32, u32)> {
        let (own_width, own_height) = (f64::from(width), f64::from(height));
        let own = u64::from(width) * u64::from(height);
        let mut best: Option<((u32, u32), u64, u64)> = None;
        for &(height, width) in &self.split {
            let scale = (f64::from(width) / own_width).min(f64::from(height) / own_height);
            let shrunk = (own_width * scale) as u64 * (own_height * scale) as u64;
            let used = shrunk.min(own);
            let wasted = u64::from(width) * u64::from(height) - used;
            if best.is_none_or(|(_, most, least)| used > most || (used == most && wasted < least)) {
                best = Some(((height, width), used, wasted));
            }
        }
        best.map(|(size, ..)| size)
    }

    /// Returns the pieces of a canvas.
    fn pieces(&self, (height, width): (u32, u32)) -> Vec<Piece> {
        let side = self.side_px;
        let starts = |length: u32| (0..length).step_by(side as usize);
        let of_row = |y| starts(width).map(move |x| [x, y, side.min(width - x), side.min(height - y)]);
        starts(height).flat_map(of_row).collect()
    }

    /// Converts a picture to squares, `[num_squares, 4, side, side]`: three colour planes, followed by a mask that is 1 for real
    /// pixels and 0 for padding.
    pub fn process_image(&self, image: &Rgb8Image) -> Result<Vec<f32>, MediaError> {
        image.check()?;
        self.num_squares(image.width_px, image.height_px)?;
        let Some(size) = self.canvas(image.width_px, image.height_px) else {
            return Ok(self.squares(&[self.fitted(image)?]));
        };
        let canvas = centred(image, size)?;
        let pieces: Vec<Rgb8Image> = self
            .pieces(size)
            .into_par_iter()
            .map(|piece| self.fitted(&cut(&canvas, piece)?))
            .collect::<Result<_, MediaError>>()?;
        Ok(self.squares(&pieces))
    }

    /// Converts each frame of a video to one square, `[frames, 4, side, side]`.
    pub fn process_frames(&self, frames: &[Rgb8Image]) -> Result<Vec<f32>, MediaError> {
        self.check()?;
        if frames.is_empty() {
            return Err(MediaError::Shape {
                what: "video",
                got: "no frames".into(),
                expected: "at least one frame".into(),
            });
        }
        let frames = frames.par_iter().map(|frame| self.fitted(frame)).collect::<Result<Vec<_>, _>>()?;
        Ok(self.squares(&frames))
    }

    /// Returns the size `(width, height)` to which a picture of `width x height` is resized in its square.
    pub fn fitted_size(&self, width: u32, height: u32) -> (u32, u32) {
        let side = self.side_px;
        let scale = f64::from(side) / f64::from(width.max(height));
        let other = |length: u32| ((f64::from(length) * scale) as u32).max(self.min_side_px).min(side);
        if width >= height { (side, other(height)) } else { (other(width), side) }
    }

    /// Resizes a picture to its size in the square.
    fn fitted(&self, image: &Rgb8Image) -> Result<Rgb8Image, MediaError> {
        let (width, height) = self.fitted_size(image.width_px, image.height_px);
        resize(image, width, height)
    }

    fn squares(&self, pictures: &[Rgb8Image]) -> Vec<f32> {
        let table = values_of_bytes(&self.mean, &self.std);
        let side = self.side_px as usize;
        let plane = side * side;
        let mut out = vec![0f32; pictures.len() * CHANNELS * plane];
        out.par_chunks_exact_mut(CHANNELS * plane).zip(pictures).for_each(|(square, picture)| {
            for (c, table) in table.iter().enumerate() {
                square[c * plane..(c + 1) * plane].fill(table[0]);
            }
            let width = picture.width_px as usize;
            for (y, row) in picture.pixels.chunks_exact(3 * width).enumerate() {
                for (x, rgb) in row.chunks_exact(3).enumerate() {
                    for c in 0..3 {
                        square[c * plane + y * side + x] = table[c][rgb[c] as usize];
                    }
                }
                square[3 * plane + y * side..][..width].fill(1.0);
            }
        });
        out
    }
}

fn resize(image: &Rgb8Image, width: u32, height: u32) -> Result<Rgb8Image, MediaError> {
    if (image.width_px, image.height_px) == (width, height) {
        return Ok(image.clone());
    }
    resize_bicubic(image, width, height)
}

/// Resizes a picture to the largest size that fits a canvas of `(height, width)` with the same aspect ratio, and centres it on
/// black.
fn centred(image: &Rgb8Image, (height, width): (u32, u32)) -> Result<Rgb8Image, MediaError> {
    let (own_width, own_height) = (f64::from(image.width_px), f64::from(image.height_px));
    let (by_width, by_height) = (f64::from(width) / own_width, f64::from(height) / own_height);
    let fitted = match by_width < by_height {
        true => (width, ((own_height * by_width).ceil() as u32).clamp(1, height)),
        false => (((own_width * by_height).ceil() as u32).clamp(1, width), height),
    };
    let picture = resize(image, fitted.0, fitted.1)?;
    let mut canvas = Rgb8Image::filled(width, height, [0; 3])?;
    let (left, top) = (((width - fitted.0) / 2) as usize, ((height - fitted.1) / 2) as usize);
    let row_len = 3 * fitted.0 as usize;
    for (y, row) in picture.pixels.chunks_exact(row_len).enumerate() {
        let at = 3 * ((top + y) * width as usize + left);
        canvas.pixels[at..at + row_len].copy_from_slice(row);
    }
    Ok(canvas)
}

fn cut(canvas: &Rgb8Image, [left, top, width, height]: Piece) -> Result<Rgb8Image, MediaError> {
    let (row_len, start) = (3 * width as usize, 3 * left as usize);
    let rows = canvas.pixels.chunks_exact(3 * canvas.width_px as usize);
    let rows = rows.skip(top as usize).take(height as usize);
    Rgb8Image::new(width, height, rows.flat_map(|row| &row[start..start + row_len]).copied().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(side_px: u32, min_side_px: u32) -> AriaProcessor {
        AriaProcessor { side_px, min_side_px, split: Vec::new(), mean: [0.5; 3], std: [0.5; 3] }
    }

    #[test]
    fn a_picture_fills_its_square_from_the_corner() {
        let p = whole(4, 2);
        assert_eq!(
            [p.fitted_size(8, 4), p.fitted_size(4, 8), p.fitted_size(100, 1)],
            [(4, 2), (2, 4), (4, 2)]
        );
        let square = p.process_image(&Rgb8Image::filled(4, 2, [255, 0, 255]).unwrap()).unwrap();
        let planes: Vec<&[f32]> = square.chunks_exact(16).collect();
        assert_eq!(planes[0], [[1.0; 8], [-1.0; 8]].concat());
        assert_eq!(planes[1], [-1.0; 16]);
        assert_eq!(planes[3], [[1.0; 8], [0.0; 8]].concat());
    }

    #[test]
    fn a_split_picture_is_cut_row_by_row_with_its_borders() {
        // A picture of 4 × 3 is split into 2 × 2 pieces of 2 px. The missing row is black and at the bottom.
        let p = AriaProcessor { split: vec![(4, 4), (2, 2)], ..whole(2, 1) };
        assert_eq!(p.num_squares(4, 3).unwrap(), 4);
        let squares = p.process_image(&Rgb8Image::filled(4, 3, [255; 3]).unwrap()).unwrap();
        let first: Vec<&[f32]> = squares.chunks_exact(16).map(|square| &square[..4]).collect();
        let (whole_piece, half) = ([1.0; 4], [1.0, 1.0, -1.0, -1.0]);
        assert_eq!(first, [&whole_piece, &whole_piece, &half, &half]);
        // The black borders of pieces count as real pixels.
        assert!(squares.chunks_exact(16).all(|square| square[12..] == [1.0; 4]));
        // If no size shows more of the picture, the size that wastes less is chosen.
        assert_eq!(p.canvas(2, 2), Some((2, 2)));
    }

    #[test]
    fn impossible_settings_are_refused() {
        for bad in [
            whole(0, 1),
            whole(10, 0),
            whole(10, 11),
            AriaProcessor { split: vec![(490, 0)], ..whole(10, 1) },
            AriaProcessor { split: vec![(1 << 20, 1 << 20)], ..whole(10, 1) },
            AriaProcessor { std: [0.0; 3], ..whole(10, 1) },
        ] {
            assert!(bad.num_squares(10, 10).is_err(), "{bad:?}");
        }
        assert!(whole(10, 1).num_squares(0, 10).is_err() && whole(10, 1).process_frames(&[]).is_err());
        assert_eq!(AriaProcessor::published_split().len(), 19);
    }
}
