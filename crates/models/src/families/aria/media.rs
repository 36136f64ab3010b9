//! Media of Aria: images as squares with masks, videos as frames of one square each.

use std::path::Path;

use omnigrpo_data::MediumInfo;
use omnigrpo_media::aria::AriaProcessor;
use omnigrpo_media::{Filter, FrameSize, Rgb8Image, VideoFrames, probe_video};
use omnigrpo_text::Form;

use super::config::AriaConfig;
use crate::error::*;
use crate::families::frames::FramePlan;
use crate::families::reader::{Reader, Request, Values, image_processor, normalisation, size_px};
use crate::families::{IdleSettings, MediumShape};

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
        let json = image_processor(dir)?;
        let side = json.size("max_image_size", Some(980))?;
        if config.tokens(side).is_none() {
            let sides = config.sides();
            return Err(json
                .error(format!("max_image_size is {side}; the projector supports squares of {sides:?} px")));
        }
        let sides = config.sides().into_iter().filter_map(|side| Some((side as u32, config.tokens(side)?)));
        let [mean, std] = normalisation(&json, Filter::Bicubic, [[0.5; 3]; 2])?;
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
            mean,
            std,
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
    fn pictures(&self, Request { medium, settings }: Request) -> AriaProcessor {
        let mut own = self.pictures.clone();
        if medium.kind.form() == Form::Clip {
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

    /// Returns the number of tokens of a square.
    pub fn tokens_of(&self, side_px: usize) -> Result<usize> {
        let known = self.sides.iter().find(|(side, _)| *side as usize == side_px);
        known.map(|(_, tokens)| *tokens).ok_or_else(|| {
            ModelError::shape(format!(
                "squares of {side_px} px are unsupported; the projector supports {:?}",
                self.sides
            ))
        })
    }
}

impl Reader for MediaReader {
    fn frame_size(&self, of: Request, plan: &FramePlan) -> Result<FrameSize> {
        let info = probe_video(&plan.source, plan.listed_fps, &of.settings.limits)?;
        let pictures = self.pictures(of);
        let [width, height] = info.size_px(of.settings.orientation);
        let (width_px, height_px) = pictures.fitted_size(width, height);
        Ok(FrameSize::Exact { width_px, height_px })
    }

    fn shape(&self, of: Request, header: &MediumInfo, frames: Option<usize>) -> Result<MediumShape> {
        let pictures = self.pictures(of);
        let count = match frames {
            Some(frames) => frames,
            None => {
                let [width, height] = size_px(of, header)?;
                pictures.num_squares(width, height)?
            }
        };
        Ok(MediumShape::Masked { count, side_px: pictures.side_px as usize })
    }

    fn tokens(&self, shape: &MediumShape) -> Result<usize> {
        let [count, side_px] = shape.masked()?;
        Ok(count * self.tokens_of(side_px)?)
    }

    fn picture(&self, of: Request, picture: Rgb8Image) -> Result<Values> {
        let pictures = self.pictures(of);
        Ok(squares(&pictures, pictures.process_image(&picture)?))
    }

    fn clip(&self, of: Request, video: &VideoFrames) -> Result<Values> {
        let pictures = self.pictures(of);
        Ok(squares(&pictures, pictures.process_frames(&video.frames)?))
    }
}

/// Returns values with their shape.
fn squares(pictures: &AriaProcessor, data: Vec<f32>) -> Values {
    let side_px = pictures.side_px as usize;
    (MediumShape::Masked { count: data.len() / (4 * side_px * side_px), side_px }, data)
}
