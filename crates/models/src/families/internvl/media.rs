//! Media of InternVL: images as tiles, videos as frames of one tile each.

use std::path::Path;

use omnigrpo_data::{MediumInfo, MediumRef};
use omnigrpo_media::tiles::TileProcessor;
use omnigrpo_media::{FrameSize, load_image};
use omnigrpo_text::MediumKind;

use super::{InternVlConfig, Layout};
use crate::config_json::ConfigJson;
use crate::error::*;
use crate::families::frames::{FramePlan, file, no_audio, no_size};
use crate::families::{IdleSettings, MediaSettings, MediumInput, MediumPlan, MediumShape};

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
        if config.layout == Layout::Hf {
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
            // The class defaults are those of CLIP; every published file has other values.
            tiles.mean = triple(&json, "image_mean", [0.481_454_66, 0.457_827_5, 0.408_210_73])?;
            tiles.std = triple(&json, "image_std", [0.268_629_54, 0.261_302_58, 0.275_777_11])?;
            if let Some(other) = json.get("resample").filter(|v| v.as_u64() != Some(3)) {
                return Err(json.error(format!("resample is {other}; expected 3 (bicubic)")));
            }
            for key in ["do_resize", "do_rescale", "do_normalize"] {
                if !json.boolean(key, true)? {
                    return Err(json.error(format!("{key} is false; only true is supported")));
                }
            }
            let factor = json.number("rescale_factor", 1.0 / 255.0)?;
            if factor != 1.0 / 255.0 {
                return Err(json.error(format!("rescale_factor is {factor}; expected 1/255")));
            }
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

    fn shape(&self, count: usize) -> MediumShape {
        let side = self.tiles.side_px as usize;
        MediumShape::Pictures { count, height_px: side, width_px: side }
    }

    /// Plans a medium from its header.
    pub fn plan(
        &self,
        medium: &MediumRef,
        header: &MediumInfo,
        settings: &MediaSettings,
    ) -> Result<MediumPlan> {
        let (count, frame_times_secs) = match medium.kind {
            MediumKind::Image => {
                let (Some(width), Some(height)) = (header.width_px, header.height_px) else {
                    return Err(no_size(medium));
                };
                (self.tiles(settings).num_tiles(width, height)?, Vec::new())
            }
            MediumKind::Video => {
                let times = FramePlan::new(medium, settings).times_secs(header)?;
                (times.len(), times)
            }
            MediumKind::Audio => return Err(no_audio()),
        };
        Ok(MediumPlan {
            kind: medium.kind,
            shape: self.shape(count),
            tokens: count * self.tokens_per_tile,
            frame_times_secs,
        })
    }

    /// Decodes a medium.
    pub fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        let tiles = self.tiles(settings);
        let (data, frame_times_secs) = match medium.kind {
            MediumKind::Image => {
                (tiles.process_image(&load_image(file(medium)?, &settings.limits)?)?, Vec::new())
            }
            MediumKind::Video => {
                let plan = FramePlan::new(medium, settings);
                let size = FrameSize::Exact { width_px: tiles.side_px, height_px: tiles.side_px };
                let video = plan.decode(settings, size)?;
                (tiles.process_frames(&video.frames)?, video.timestamps_s)
            }
            MediumKind::Audio => return Err(no_audio()),
        };
        let side = tiles.side_px as usize;
        Ok(MediumInput {
            kind: medium.kind,
            shape: self.shape(data.len() / (3 * side * side)),
            data,
            seconds_per_grid: 0.0,
            frame_times_secs,
        })
    }
}

/// Reads the image processor of the hf layout and the side of its tiles, from `processor_config.json` or else
/// `preprocessor_config.json`.
pub(super) fn processor(dir: &Path) -> Result<(ConfigJson, usize)> {
    let nested = dir.join("processor_config.json");
    let nested = if nested.is_file() { ConfigJson::read(&nested)?.section("image_processor")? } else { None };
    let json = match nested {
        Some(json) => json,
        None => ConfigJson::read(&dir.join("preprocessor_config.json"))?,
    };
    let size =
        json.section("size")?.ok_or_else(|| json.error("size is missing; expected height and width"))?;
    let (height, width) = (size.size("height", None)?, size.size("width", None)?);
    if height != width {
        return Err(json.error(format!("tiles have {width}×{height} px; expected squares")));
    }
    Ok((json, height))
}

fn triple(json: &ConfigJson, key: &str, default: [f64; 3]) -> Result<[f64; 3]> {
    match json.get(key) {
        None => Ok(default),
        Some(value) => serde_json::from_value(value.clone())
            .map_err(|_| json.error(format!("{key} is {value}; expected three numbers"))),
    }
}
