//! Image processing of SmolVLM and Idefics3: square tiles in rows and columns, and the whole picture as a last square.
//!
//! The longest edge of a picture is resized to a fixed length, also if the picture is smaller; the other edge keeps the aspect
//! ratio, made even. Both edges are then enlarged to multiples of the tile's side. The result is cut from left to right and top to
//! bottom, and the result as a whole is resized to one more tile. If there would be only one tile, there is no other. Every resize
//! has the filter of LANCZOS.
//!
//! Pixels equal those of Pillow's resize, followed by `u8 / 255` in f64, rounded to f32, then `(x - mean) / std` in f32.
//!
//! Source: `transformers` 5.23 `models/smolvlm/image_processing_pil_smolvlm.py`, `models/smolvlm/video_processing_smolvlm.py`.

use crate::tiles::{normalised, not_empty, wrong_normalisation};
use crate::{Filter, MediaError, Rgb8Image, resize};

/// Longest edge of any picture, in pixels.
const MOST_PX: u32 = 4096;

/// Settings of the image processing.
#[derive(Debug, Clone, PartialEq)]
pub struct SmolVlmProcessor {
    /// Side of a tile, in pixels.
    pub side_px: u32,
    /// Longest edge of a picture before it is cut, in pixels.
    pub longest_px: u32,
    /// Whether pictures are cut into tiles. If not, each is one square.
    pub split: bool,
    /// Largest number of tiles of a picture, without the one for the whole. Pictures with more become smaller.
    pub max_tiles: Option<u32>,
    /// Channel means, on a scale of 0 to 1.
    pub mean: [f64; 3],
    /// Channel standard deviations, on a scale of 0 to 1.
    pub std: [f64; 3],
}

/// Number of rows and columns of tiles, both 1 for a picture that is not cut.
pub type Arrangement = [u32; 2];

impl SmolVlmProcessor {
    /// Checks the settings.
    ///
    /// # Errors
    /// Returns [`MediaError::Setting`] for an impossible length, number of tiles or normalisation.
    pub fn check(&self) -> Result<(), MediaError> {
        let (what, got, expected) = if !(2..=MOST_PX).contains(&self.side_px) {
            ("side of a tile", format!("{} px", self.side_px), "2 to 4096 px")
        } else if self.longest_px == 0 {
            ("longest edge of a picture", "0 px".into(), "at least 1 px")
        } else if self.max_tiles == Some(0) {
            ("number of tiles", "0".into(), "at least 1")
        } else if self.longest_px.min(MOST_PX) / self.side_px > 64 {
            let got = format!("tiles of {} px, edges of {} px", self.side_px, self.longest_px);
            ("side of a tile", got, "at most 64 tiles along an edge")
        } else if let Some(wrong) = wrong_normalisation(&self.mean, &self.std) {
            wrong
        } else {
            return Ok(());
        };
        Err(MediaError::setting(what, got, expected))
    }

    /// Returns rows and columns of the tiles of a picture of `width x height`.
    ///
    /// # Errors
    /// Returns the errors of [`check`](Self::check), and [`MediaError::Shape`] for an empty picture.
    pub fn arrangement(&self, width: u32, height: u32) -> Result<Arrangement, MediaError> {
        Ok(self.sizes(width, height)?.1)
    }

    /// Returns width and height of a picture after the first step, and the arrangement of its tiles.
    fn sizes(&self, width: u32, height: u32) -> Result<((u32, u32), Arrangement), MediaError> {
        self.check()?;
        not_empty(width, height)?;
        let most = self.max_tiles.filter(|_| self.split).unwrap_or(u32::MAX);
        let mut longest = self.longest_px;
        loop {
            let fitted = fitted(width, height, longest);
            let [rows, columns] = if self.split { self.tiles(fitted) } else { [1, 1] };
            let along = rows.max(columns);
            if along == 1 || rows * columns <= most {
                return Ok((fitted, [rows, columns]));
            }
            // The even edge may be longer by 1.
            longest = ((along - 1) * self.side_px).min(longest - 1);
        }
    }

    /// Returns the number of rows and columns that cover a picture of this width and height.
    fn tiles(&self, (width, height): (u32, u32)) -> Arrangement {
        let (side, ratio) = (self.side_px, f64::from(width) / f64::from(height));
        if width >= height {
            let columns = width.div_ceil(side);
            let height = (f64::from(columns * side) / ratio) as u32;
            [height.div_ceil(side).max(1), columns]
        } else {
            let rows = height.div_ceil(side);
            let width = (f64::from(rows * side) * ratio) as u32;
            [rows, width.div_ceil(side).max(1)]
        }
    }

    /// Converts a picture to tiles followed by the whole, `[tiles, 3, side, side]`, with their arrangement.
    ///
    /// # Errors
    /// Returns the errors of [`arrangement`](Self::arrangement).
    pub fn process_image(&self, image: &Rgb8Image) -> Result<(Arrangement, Vec<f32>), MediaError> {
        let (size, [rows, columns]) = self.sizes(image.width_px, image.height_px)?;
        let side = self.side_px;
        let canvas = resized(&resized(image, size)?, (columns * side, rows * side))?;
        let whole = resized(&canvas, (side, side))?;
        let tiles = if rows * columns == 1 { 0 } else { rows * columns };
        let mut places: Vec<(&Rgb8Image, u32, u32)> =
            (0..tiles).map(|i| (&canvas, i % columns * side, i / columns * side)).collect();
        places.push((&whole, 0, 0));
        Ok(([rows, columns], normalised(&places, side, [self.mean, self.std])))
    }

    /// Converts frames that [`square`] has resized, `[frames, 3, side, side]`.
    ///
    /// # Errors
    /// Returns [`MediaError::Shape`] if there are no frames, or a frame is not such a square.
    pub fn process_frames(&self, frames: &[Rgb8Image]) -> Result<Vec<f32>, MediaError> {
        self.check()?;
        let other = |frame: &&Rgb8Image| (frame.width_px, frame.height_px) != (self.side_px, self.side_px);
        let got = match frames.iter().find(other) {
            Some(frame) => format!("a frame of {}x{} px", frame.width_px, frame.height_px),
            None if frames.is_empty() => "no frames".into(),
            None => {
                let places: Vec<_> = frames.iter().map(|frame| (frame, 0, 0)).collect();
                return Ok(normalised(&places, self.side_px, [self.mean, self.std]));
            }
        };
        let expected = format!("frames of {0}x{0} px", self.side_px);
        Err(MediaError::Shape { what: "video", got, expected })
    }
}

/// Resizes a frame so that its longest edge is `longest_px`, and then to a square of `side_px`.
///
/// # Errors
/// Returns [`MediaError::Shape`] if a side is 0 or the picture's fields do not agree with each other.
pub fn square(frame: &Rgb8Image, longest_px: u32, side_px: u32) -> Result<Rgb8Image, MediaError> {
    frame.check()?;
    let size = fitted(frame.width_px, frame.height_px, longest_px);
    resized(&resized(frame, size)?, (side_px, side_px))
}

/// Returns width and height of a picture whose longest edge becomes `longest`. Products are truncated as in the source.
fn fitted(width: u32, height: u32, longest: u32) -> (u32, u32) {
    let longest = longest.min(1 << 24);
    let even = |length: u32| (length + length % 2).max(1);
    let ratio = f64::from(width) / f64::from(height);
    let (width, height) = match width >= height {
        true => (longest, even((f64::from(longest) / ratio) as u32)),
        false => (even((f64::from(longest) * ratio) as u32), longest),
    };
    if longest <= MOST_PX {
        return (width, height);
    }
    let ratio = f64::from(width) / f64::from(height);
    match width >= height {
        true => (MOST_PX, ((f64::from(MOST_PX) / ratio) as u32).max(1)),
        false => (((f64::from(MOST_PX) * ratio) as u32).max(1), MOST_PX),
    }
}

fn resized(image: &Rgb8Image, (width, height): (u32, u32)) -> Result<Rgb8Image, MediaError> {
    resize(image, width, height, Filter::Lanczos)
}
