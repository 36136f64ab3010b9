//! Media of Aria: images as squares with masks, videos as frames of one square each.

use std::path::Path;

use omnigrpo_data::{MediumInfo, MediumRef};
use omnigrpo_media::aria::AriaProcessor;
use omnigrpo_media::{FrameSize, load_image, probe_video};
use omnigrpo_text::MediumKind;

use super::config::AriaConfig;
use crate::config_json::ConfigJson;
use crate::error::*;
use crate::families::frames::{FramePlan, file, no_audio, no_size};
use crate::families::{IdleSettings, MediaSettings, MediumInput, MediumPlan, MediumShape};

/// A reader that prepares media as one checkpoint's processor does.
pub(super) struct MediaReader {
    pictures: AriaProcessor,
    /// Whether images are split by default.
    splits: bool,
    /// Sides of squares in px, with their numbers of tokens, ascending.
    sides: Vec<(u32, usize)>,
}

/// Ignored settings: pictures are squares of a few fixed sizes.
pub(super) const IDLE: IdleSettings = IdleSettings {
    fields: &[IMAGE_MIN_PIXELS, VIDEO_MIN_PIXELS, VIDEO_TOTAL_PIXELS],
    why: || {
        format!(
            "its pictures are squares of fixed sizes; {IMAGE_MAX_PIXELS} and {VIDEO_MAX_PIXELS} choose among them, and \
             {MAX_TILES} above 1 allows large images to be split"
        )
    },
};

impl MediaReader {
    /// Reads sizes and normalisation from the processor file.
    pub fn open(dir: &Path, config: &AriaConfig) -> Result<Self> {
        let json = processor(dir)?;
        let side = json.size("max_image_size", Some(980))?;
        if config.tokens(side).is_none() {
            let sides = config.sides();
            return Err(json
                .error(format!("max_image_size is {side}; the projector supports squares of {sides:?} px")));
        }
        let sides = config.sides().into_iter().filter_map(|side| Some((side as u32, config.tokens(side)?)));
        for key in ["do_rescale", "do_normalize"] {
            if !json.boolean(key, true)? {
                return Err(json.error(format!("{key} is false; only true is supported")));
            }
        }
        if let Some(other) = json.get("resample").filter(|v| v.as_u64() != Some(3)) {
            return Err(json.error(format!("resample is {other}; expected 3 (bicubic)")));
        }
        let factor = json.number("rescale_factor", 1.0 / 255.0)?;
        if factor != 1.0 / 255.0 {
            return Err(json.error(format!("rescale_factor is {factor}; expected 1/255")));
        }
        let split = match json.get("split_resolutions").filter(|value| !value.is_null()) {
            None => AriaProcessor::published_split(),
            Some(value) => serde_json::from_value(value.clone()).map_err(|_| {
                json.error(format!("split_resolutions is {value}; expected pairs of height and width"))
            })?,
        };
        let pictures = AriaProcessor {
            side_px: side as u32,
            min_side_px: json.size("min_image_size", Some(336))? as u32,
            split,
            mean: triple(&json, "image_mean")?,
            std: triple(&json, "image_std")?,
        };
        pictures.check()?;
        Ok(Self { pictures, splits: json.boolean("split_image", false)?, sides: sides.collect() })
    }

    /// Returns the side of the largest square within a number of pixels, or of the smallest square if none fits.
    fn side(&self, max_pixels: u64) -> u32 {
        let within = self.sides.iter().rev().find(|(side, _)| u64::from(side.pow(2)) <= max_pixels);
        within.or(self.sides.first()).map_or(self.pictures.side_px, |(side, _)| *side)
    }

    /// Returns the settings that cut an image or a video into squares.
    fn pictures(&self, medium: &MediumRef, settings: &MediaSettings) -> AriaProcessor {
        let mut own = self.pictures.clone();
        if medium.kind == MediumKind::Video {
            // Frames use the smallest squares by default, as in the code of the model's authors.
            let max_pixels = medium.options.or(&settings.video).max_pixels.unwrap_or(0);
            own.side_px = self.side(max_pixels);
            own.split.clear();
        } else {
            if let Some(max_pixels) = medium.options.or(&settings.image).max_pixels {
                own.side_px = self.side(max_pixels);
            }
            match settings.max_tiles {
                None if self.splits => {}
                None => own.split.clear(),
                Some(most) => {
                    let pieces = |length: u32| u64::from(length.div_ceil(own.side_px));
                    own.split.retain(|&(height, width)| pieces(height) * pieces(width) <= u64::from(most));
                    if most <= 1 {
                        own.split.clear();
                    }
                }
            }
        }
        own.min_side_px = own.min_side_px.min(own.side_px);
        own
    }

    fn shape(pictures: &AriaProcessor, count: usize) -> MediumShape {
        MediumShape::Masked { count, side_px: pictures.side_px as usize }
    }

    /// Plans a medium from its header.
    pub fn plan(
        &self,
        medium: &MediumRef,
        header: &MediumInfo,
        settings: &MediaSettings,
    ) -> Result<MediumPlan> {
        let pictures = self.pictures(medium, settings);
        let (count, frame_times_secs) = match medium.kind {
            MediumKind::Image => {
                let (Some(width), Some(height)) = (header.width_px, header.height_px) else {
                    return Err(no_size(medium));
                };
                (pictures.num_squares(width, height)?, Vec::new())
            }
            MediumKind::Video => {
                let times = FramePlan::new(medium, settings).times_secs(header)?;
                (times.len(), times)
            }
            MediumKind::Audio => return Err(no_audio()),
        };
        Ok(MediumPlan {
            kind: medium.kind,
            shape: Self::shape(&pictures, count),
            tokens: count * self.tokens(pictures.side_px as usize)?,
            frame_times_secs,
        })
    }

    /// Returns the number of tokens of a square.
    pub fn tokens(&self, side_px: usize) -> Result<usize> {
        let known = self.sides.iter().find(|(side, _)| *side as usize == side_px);
        known.map(|(_, tokens)| *tokens).ok_or_else(|| {
            ModelError::shape(format!(
                "squares of {side_px} px are unsupported; the projector supports {:?}",
                self.sides
            ))
        })
    }

    /// Decodes a medium.
    pub fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        let pictures = self.pictures(medium, settings);
        let (data, frame_times_secs) = match medium.kind {
            MediumKind::Image => {
                (pictures.process_image(&load_image(file(medium)?, &settings.limits)?)?, Vec::new())
            }
            MediumKind::Video => {
                let plan = FramePlan::new(medium, settings);
                let info = probe_video(&plan.source, plan.listed_fps, &settings.limits)?;
                let (width_px, height_px) = pictures.fitted_size(info.width_px, info.height_px);
                let size = FrameSize::Exact { width_px, height_px };
                let video = plan.decode(settings, size)?;
                (pictures.process_frames(&video.frames)?, video.timestamps_s)
            }
            MediumKind::Audio => return Err(no_audio()),
        };
        let side = pictures.side_px as usize;
        Ok(MediumInput {
            kind: medium.kind,
            shape: Self::shape(&pictures, data.len() / (4 * side * side)),
            data,
            seconds_per_grid: 0.0,
            frame_times_secs,
        })
    }
}

/// Reads the image processor from `processor_config.json` or else `preprocessor_config.json`.
fn processor(dir: &Path) -> Result<ConfigJson> {
    let nested = dir.join("processor_config.json");
    let nested = if nested.is_file() { ConfigJson::read(&nested)?.section("image_processor")? } else { None };
    match nested {
        Some(json) => Ok(json),
        None => ConfigJson::read(&dir.join("preprocessor_config.json")),
    }
}

fn triple(json: &ConfigJson, key: &str) -> Result<[f64; 3]> {
    match json.get(key) {
        None => Ok([0.5; 3]),
        Some(value) => serde_json::from_value(value.clone())
            .map_err(|_| json.error(format!("{key} is {value}; expected three numbers"))),
    }
}
