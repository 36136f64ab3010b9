//! Image processing of InternVL: square tiles of pictures.
//!
//! A picture is resized to the arrangement of `columns x rows` tiles with the nearest aspect ratio, even if this distorts the
//! picture. It is then cut row by row. If there is more than one tile, the complete picture follows as an additional tile. Pixels
//! are scaled and normalised per channel.
//!
//! Pixels equal those of Pillow's bicubic resize, followed by `u8 / 255` in f64, rounded to f32, then `(x - mean) / std` in f32.
//! Both `GotOcr2ImageProcessorPil` and the published code of the original checkpoints compute these values.
//!
//! Source: `dynamic_preprocess` in `internvl_chat` of OpenGVLab/InternVL; `transformers` 5.23
//! `models/got_ocr2/image_processing_pil_got_ocr2.py`. Arrangements with the same number of tiles are ordered as in
//! `transformers` (fewer columns first), whereas their order in the original code is that of a hash set.

use rayon::prelude::*;

use crate::{MediaError, Rgb8Image, resize_bicubic};

/// Maximum number of tiles in the settings. Published values do not exceed 40.
const MOST_TILES: u32 = 1024;

/// Settings of the tiling.
#[derive(Debug, Clone, PartialEq)]
pub struct TileProcessor {
    /// Side of a tile, in pixels.
    pub side_px: u32,
    /// Minimum number of tiles, without the thumbnail.
    pub min_tiles: u32,
    /// Maximum number of tiles, without the thumbnail. A value of 1 disables tiling.
    pub max_tiles: u32,
    /// True to add the complete picture as a tile if there is more than one tile.
    pub thumbnail: bool,
    /// Channel means, on a scale of 0 to 1.
    pub mean: [f64; 3],
    /// Channel standard deviations, on a scale of 0 to 1.
    pub std: [f64; 3],
}

/// Creates the published settings, with the normalisation of ImageNet.
impl Default for TileProcessor {
    fn default() -> Self {
        Self {
            side_px: 448,
            min_tiles: 1,
            max_tiles: 12,
            thumbnail: true,
            mean: [0.485, 0.456, 0.406],
            std: [0.229, 0.224, 0.225],
        }
    }
}

/// Returns the arrangement `(columns, rows)` of `min_tiles` to `max_tiles` tiles for a picture of `width x height`.
///
/// The arrangement whose ratio is nearest to that of the picture is chosen. Several arrangements can be equally near (1x1, 2x2
/// and 3x3 for a square). A larger one is then chosen only if the picture has more than half as many pixels as the arrangement.
pub fn tile_grid(width: u32, height: u32, side_px: u32, min_tiles: u32, max_tiles: u32) -> (u32, u32) {
    let ratio = f64::from(width) / f64::from(height);
    let area = f64::from(width) * f64::from(height);
    let mut candidates: Vec<(u32, u32)> = (1..=max_tiles)
        .flat_map(|columns| (1..=max_tiles / columns).map(move |rows| (columns, rows)))
        .filter(|(columns, rows)| columns * rows >= min_tiles)
        .collect();
    candidates.sort_by_key(|(columns, rows)| columns * rows);
    let (mut best, mut nearest) = ((1, 1), f64::INFINITY);
    for (columns, rows) in candidates {
        let distance = (ratio - f64::from(columns) / f64::from(rows)).abs();
        let half = 0.5 * f64::from(side_px) * f64::from(side_px) * f64::from(columns * rows);
        if distance < nearest || (distance == nearest && area > half) {
            (best, nearest) = ((columns, rows), distance);
        }
    }
    best
}

/// Returns name, value and expectation of a normalisation that is not usable.
pub(crate) fn wrong_normalisation(
    mean: &[f64; 3],
    std: &[f64; 3],
) -> Option<(&'static str, String, &'static str)> {
    let usable = mean.iter().all(|m| m.is_finite()) && std.iter().all(|s| s.is_finite() && *s > 0.0);
    let wrong = (
        "image_mean and image_std",
        format!("{mean:?} and {std:?}"),
        "finite numbers, with every std above 0",
    );
    (!usable).then_some(wrong)
}

/// Checks that a picture has an area.
pub(crate) fn not_empty(width: u32, height: u32) -> Result<(), MediaError> {
    if width > 0 && height > 0 {
        return Ok(());
    }
    Err(MediaError::Shape {
        what: "picture",
        got: format!("{width}x{height}"),
        expected: "sides of at least 1".into(),
    })
}

impl TileProcessor {
    /// Checks the settings.
    ///
    /// # Errors
    /// Returns [`MediaError::Setting`] for an impossible side, impossible bounds or an impossible normalisation.
    pub fn check(&self) -> Result<(), MediaError> {
        let (what, got, expected) = if !(1..=1 << 14).contains(&self.side_px) {
            ("side of a tile", format!("{} px", self.side_px), "1 to 16384 px")
        } else if !(1..=self.max_tiles).contains(&self.min_tiles) || self.max_tiles > MOST_TILES {
            let got = format!("{} to {}", self.min_tiles, self.max_tiles);
            ("number of tiles", got, "1 <= minimum <= maximum <= 1024")
        } else if let Some(wrong) = wrong_normalisation(&self.mean, &self.std) {
            wrong
        } else {
            return Ok(());
        };
        Err(MediaError::setting(what, got, expected))
    }

    /// Returns the number of tiles for a picture of `width x height`, including the thumbnail.
    ///
    /// # Errors
    /// Returns the errors of [`check`](Self::check), and [`MediaError::Shape`] for an empty picture.
    pub fn num_tiles(&self, width: u32, height: u32) -> Result<usize, MediaError> {
        let (columns, rows) = self.grid(width, height)?;
        let tiles = (columns * rows) as usize;
        Ok(tiles + usize::from(self.thumbnail && tiles > 1))
    }

    fn grid(&self, width: u32, height: u32) -> Result<(u32, u32), MediaError> {
        self.check()?;
        not_empty(width, height)?;
        Ok(tile_grid(width, height, self.side_px, self.min_tiles, self.max_tiles))
    }

    /// Converts a picture to tiles, `[num_tiles, 3, side, side]`.
    pub fn process_image(&self, image: &Rgb8Image) -> Result<Vec<f32>, MediaError> {
        let (columns, rows) = self.grid(image.width_px, image.height_px)?;
        let side = self.side_px;
        let canvas = resize(image, side * columns, side * rows)?;
        let mut places: Vec<(&Rgb8Image, u32, u32)> =
            (0..columns * rows).map(|i| (&canvas, i % columns * side, i / columns * side)).collect();
        let thumbnail;
        if self.thumbnail && places.len() > 1 {
            thumbnail = resize(image, side, side)?;
            places.push((&thumbnail, 0, 0));
        }
        Ok(normalised(&places, self.side_px, [self.mean, self.std]))
    }

    /// Converts each frame of a video to one tile, `[frames, 3, side, side]`.
    pub fn process_frames(&self, frames: &[Rgb8Image]) -> Result<Vec<f32>, MediaError> {
        self.check()?;
        if frames.is_empty() {
            return Err(MediaError::Shape {
                what: "video",
                got: "no frames".into(),
                expected: "at least one frame".into(),
            });
        }
        let frames = frames
            .par_iter()
            .map(|frame| resize(frame, self.side_px, self.side_px))
            .collect::<Result<Vec<_>, _>>()?;
        let places: Vec<_> = frames.iter().map(|frame| (frame, 0, 0)).collect();
        Ok(normalised(&places, self.side_px, [self.mean, self.std]))
    }
}

/// Returns the normalised value of each byte in each channel.
pub(crate) fn values_of_bytes(mean: &[f64; 3], std: &[f64; 3]) -> [[f32; 256]; 3] {
    std::array::from_fn(|c| {
        std::array::from_fn(|byte| ((byte as f64 * (1.0 / 255.0)) as f32 - mean[c] as f32) / std[c] as f32)
    })
}

/// Returns squares of pictures as planes of normalised values. Each square is given by its picture and its upper left corner.
pub(crate) fn normalised(
    places: &[(&Rgb8Image, u32, u32)],
    side_px: u32,
    [mean, std]: [[f64; 3]; 2],
) -> Vec<f32> {
    let table = values_of_bytes(&mean, &std);
    let side = side_px as usize;
    let plane = side * side;
    let mut out = vec![0f32; places.len() * 3 * plane];
    out.par_chunks_exact_mut(3 * plane).zip(places).for_each(|(tile, (image, x0, y0))| {
        for y in 0..side {
            let start = (*y0 as usize + y) * image.width_px as usize + *x0 as usize;
            for (x, rgb) in image.pixels[start * 3..][..side * 3].chunks_exact(3).enumerate() {
                for c in 0..3 {
                    tile[c * plane + y * side + x] = table[c][rgb[c] as usize];
                }
            }
        }
    });
    out
}

/// Resizes a picture if its size differs. Checks the picture in either case.
fn resize(image: &Rgb8Image, width: u32, height: u32) -> Result<Rgb8Image, MediaError> {
    image.check()?;
    if (image.width_px, image.height_px) == (width, height) {
        return Ok(image.clone());
    }
    resize_bicubic(image, width, height)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Limit cases of the published rule, computed by hand.
    #[test]
    fn the_nearest_ratio_wins_and_ties_go_by_area() {
        let grid = |w, h, max| tile_grid(w, h, 448, 1, max);
        // For a square, 1x1, 2x2 and 3x3 are equally near. The larger is chosen if the picture has more than half of its pixels.
        assert_eq!(grid(448, 448, 12), (1, 1));
        assert_eq!(grid(633, 633, 12), (1, 1)); // 400,689 px against 401,408
        assert_eq!(grid(634, 634, 12), (2, 2));
        assert_eq!(grid(950, 950, 12), (2, 2)); // 902,500 px against 903,168
        assert_eq!(grid(951, 951, 12), (3, 3));
        assert_eq!(grid(4000, 4000, 3), (1, 1));
        // For a ratio of 2:1, 2x1 and 4x2 are equally near.
        assert_eq!(grid(800, 400, 12), (2, 1));
        assert_eq!(grid(1800, 900, 12), (4, 2));
        assert_eq!(grid(1800, 900, 7), (2, 1));
        // No arrangement has these ratios.
        assert_eq!(grid(10_000, 10, 12), (12, 1));
        assert_eq!(grid(10, 10_000, 12), (1, 12));
        assert_eq!(grid(300, 200, 6), (3, 2));
        assert_eq!(grid(1000, 370, 12), (5, 2));
        assert_eq!(grid(4000, 3000, 1), (1, 1));
        // The minimum number of tiles excludes 1x1.
        assert_eq!(tile_grid(100, 100, 448, 2, 12), (2, 2));
        assert_eq!(tile_grid(125, 100, 448, 2, 2), (1, 2));
        assert_eq!(tile_grid(2000, 1600, 448, 2, 2), (2, 1));
    }

    /// 200 sizes with five pairs of bounds; the expected arrangements are those of `transformers`
    /// (`tools/goldens/make_internvl.py`).
    #[test]
    fn arrangements_equal_transformers() {
        let rows: Vec<[u32; 6]> = serde_json::from_str(include_str!("../tests/data/tilings.json")).unwrap();
        assert_eq!(rows.len(), 200);
        for [width, height, least, most, columns, rows] in rows {
            let got = tile_grid(width, height, 448, least, most);
            assert_eq!(got, (columns, rows), "{width}x{height}, {least} to {most} tiles");
        }
    }

    #[test]
    fn the_thumbnail_comes_last_and_only_beside_others() {
        let p = TileProcessor { side_px: 2, thumbnail: true, ..TileProcessor::default() };
        assert_eq!(p.num_tiles(4, 2).unwrap(), 3);
        assert_eq!(p.num_tiles(2, 2).unwrap(), 1);
        let without = TileProcessor { thumbnail: false, ..p.clone() };
        assert_eq!(without.num_tiles(4, 2).unwrap(), 2);
        // The left tile is black and the right tile is white. Only the thumbnail is resized.
        let row = [0u8, 0, 0, 0, 0, 0, 255, 255, 255, 255, 255, 255];
        let image = Rgb8Image::new(4, 2, [row, row].concat()).unwrap();
        let tiles = p.process_image(&image).unwrap();
        assert_eq!(tiles.len(), 3 * 12);
        let black = [0, 1, 2].map(|c| (0.0 - p.mean[c] as f32) / p.std[c] as f32);
        let white = [0, 1, 2].map(|c| (1.0 - p.mean[c] as f32) / p.std[c] as f32);
        for c in 0..3 {
            assert_eq!(tiles[c * 4..c * 4 + 4], [black[c]; 4]);
            assert_eq!(tiles[12 + c * 4..12 + c * 4 + 4], [white[c]; 4]);
            let thumbnail = &tiles[24 + c * 4..24 + c * 4 + 4];
            assert!(thumbnail[0] < thumbnail[1] && thumbnail[..2] == thumbnail[2..]);
        }
        assert_eq!(without.process_image(&image).unwrap(), tiles[..24]);
    }

    #[test]
    fn impossible_settings_are_refused() {
        let p = TileProcessor::default();
        for bad in [
            TileProcessor { max_tiles: 0, ..p.clone() },
            TileProcessor { min_tiles: 13, ..p.clone() },
            TileProcessor { side_px: 0, ..p.clone() },
            TileProcessor { std: [0.0, 1.0, 1.0], ..p.clone() },
            TileProcessor { max_tiles: 1025, ..p.clone() },
        ] {
            assert!(bad.num_tiles(10, 10).is_err(), "{bad:?}");
        }
        assert!(p.num_tiles(0, 10).is_err());
        assert!(p.process_frames(&[]).is_err());
    }
}
