//! Media of InternVL: images as tiles, videos as frames of one tile each.

use std::path::Path;

use omnigrpo_data::MediumInfo;
use omnigrpo_media::tiles::TileProcessor;
use omnigrpo_media::{Filter, FrameSize, Rgb8Image, VideoFrames};

use super::InternVlConfig;
use crate::config_json::ConfigJson;
use crate::error::*;
use crate::families::frames::FramePlan;
use crate::families::reader::{Reader, Request, Values, image_processor, normalisation, size_px};
use crate::families::{IdleSettings, MediaSettings, MediumShape};

/// Default means and standard deviations of the class, which are those of CLIP; every published file has other values.
const CLIP: [[f64; 3]; 2] =
    [[0.481_454_66, 0.457_827_5, 0.408_210_73], [0.268_629_54, 0.261_302_58, 0.275_777_11]];

/// A reader that prepares media with one checkpoint's tiling.
pub(super) struct MediaReader {
    tiles: TileProcessor,
    tokens_per_tile: usize,
}

/// Ignored settings: pictures of these models are tiles, so a limit on pixels would have no effect.
pub(super) const IDLE: IdleSettings = IdleSettings {
    fields: &[IMAGE_MIN_PIXELS, IMAGE_MAX_PIXELS, VIDEO_MIN_PIXELS, VIDEO_MAX_PIXELS, VIDEO_TOTAL_PIXELS],
    why: || format!("its pictures are tiles of a fixed size, and {MAX_TILES} limits the tiles of an image"),
};

impl MediaReader {
    /// Reads the tiling from `config.json`, or in the hf layout from the processor file.
    pub fn open(dir: &Path, config: &InternVlConfig) -> Result<Self> {
        let mut tiles = config.tiles.clone();
        if config.layout.rules().tiles_in_processor {
            let (json, side) = processor(dir)?;
            tiles.side_px = side as u32;
            if side != config.tiles.side_px as usize {
                return Err(json.error(format!(
                    "tiles have {side} px here but {} px in config.json",
                    config.tiles.side_px
                )));
            }
            tiles.min_tiles = json.size("min_patches", Some(1))? as u32;
            tiles.max_tiles = json.size("max_patches", Some(12))? as u32;
            json.only("do_resize", true)?;
            [tiles.mean, tiles.std] = normalisation(&json, Filter::Bicubic, CLIP)?;
        }
        tiles.check()?;
        Ok(Self { tiles, tokens_per_tile: config.tokens_per_tile() })
    }

    /// Returns the checkpoint's tiling.
    pub fn tiling(&self) -> &TileProcessor {
        &self.tiles
    }

    fn tiles(&self, settings: &MediaSettings) -> TileProcessor {
        let mut tiles = self.tiles.clone();
        if let Some(max) = settings.max_tiles {
            tiles.max_tiles = max;
            // A limit of the run that is below the checkpoint's minimum takes precedence.
            tiles.min_tiles = tiles.min_tiles.min(max);
        }
        tiles
    }

    fn shape_of(&self, count: usize) -> MediumShape {
        let side = self.tiles.side_px as usize;
        MediumShape::Pictures { count, height_px: side, width_px: side }
    }
}

impl Reader for MediaReader {
    fn frame_size(&self, _: Request, _: &FramePlan) -> Result<FrameSize> {
        Ok(FrameSize::Exact { width_px: self.tiles.side_px, height_px: self.tiles.side_px })
    }

    fn shape(&self, of: Request, header: &MediumInfo, frames: Option<usize>) -> Result<MediumShape> {
        if let Some(frames) = frames {
            return Ok(self.shape_of(frames));
        }
        let [width, height] = size_px(of, header)?;
        Ok(self.shape_of(self.tiles(of.settings).num_tiles(width, height)?))
    }

    fn tokens(&self, shape: &MediumShape) -> Result<usize> {
        Ok(shape.pictures()?[0] * self.tokens_per_tile)
    }

    fn picture(&self, of: Request, picture: Rgb8Image) -> Result<Values> {
        let data = self.tiles(of.settings).process_image(&picture)?;
        let side = self.tiles.side_px as usize;
        Ok((self.shape_of(data.len() / (3 * side * side)), data))
    }

    fn clip(&self, _: Request, video: &VideoFrames) -> Result<Values> {
        Ok((self.shape_of(video.frames.len()), self.tiles.process_frames(&video.frames)?))
    }
}

/// Reads the image processor of the hf layout and the side of its tiles, from `processor_config.json` or else
/// `preprocessor_config.json`.
pub(super) fn processor(dir: &Path) -> Result<(ConfigJson, usize)> {
    let json = image_processor(dir)?;
    let size =
        json.section("size")?.ok_or_else(|| json.error("size is missing; expected height and width"))?;
    let (height, width) = (size.size("height", None)?, size.size("width", None)?);
    if height != width {
        return Err(json.error(format!("tiles have {width}×{height} px; expected squares")));
    }
    Ok((json, height))
}
