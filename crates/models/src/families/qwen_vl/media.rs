//! Media of the Qwen-VL families: decoded, resized, cut into patches.
//!
//! Images follow the checkpoint's processor. Videos follow `qwen-vl-utils` (frames, then size within a budget), unless the run or
//! the row selects another rule. The rule of the checkpoint's video processor limits the pixels of all frames together.

use std::path::Path;

use omnigrpo_data::{MediumInfo, MediumOptions};
use omnigrpo_media::qwen_vl::{ImageProcessor, Processors};
use omnigrpo_media::{ClipBudget, FrameSize, PixelBudget, Rgb8Image, VideoFrames, resize_bicubic};
use omnigrpo_text::MediumKind;

use super::config::VisionConfig;
use super::rules::Rules;
use crate::error::{ModelError, Result};
use crate::families::frames::FramePlan;
use crate::families::reader::{Reader, Request, Values, size_px};
use crate::families::{FrameRule, MediumShape};

/// A reader that prepares media as one checkpoint's processors do.
pub struct MediaReader {
    processors: Processors,
}

impl MediaReader {
    /// Reads the processor files of a checkpoint directory.
    ///
    /// # Errors
    /// Returns an error if files are missing or invalid, or sizes differ from those of the tower.
    pub fn open(dir: &Path, vision: &VisionConfig, rules: &Rules) -> Result<Self> {
        let processors = Processors::load(dir, &(rules.video)())?;
        for p in [&processors.image, &processors.video] {
            let got = [p.patch_size, p.temporal_patch_size, p.merge_size].map(|n| n as usize);
            let expected = [vision.patch, vision.temporal_patch, vision.merge];
            if got != expected {
                return Err(ModelError::Checkpoint {
                    dir: dir.to_path_buf(),
                    what: format!(
                        "the processor's patch, temporal patch and merge sizes are {got:?}, but those of the tower are {expected:?}"
                    ),
                });
            }
        }
        Ok(Self { processors })
    }
}

impl Reader for MediaReader {
    fn frame_size(&self, of: Request, _: &FramePlan) -> Result<FrameSize> {
        let (own, options) = (&of.medium.options, of.medium.options.or(&of.settings.video));
        let (processor, factor) = (&self.processors.video, self.processors.video.factor());
        let row_decides = own.min_pixels.or(own.max_pixels).or(own.total_pixels).is_some();
        Ok(match exact(of.medium.kind, own)? {
            Some((height_px, width_px)) => FrameSize::Exact { width_px, height_px },
            None if of.settings.rule == FrameRule::Processor && !row_decides => {
                let max_pixels = options.total_pixels.unwrap_or(processor.max_pixels);
                let min_pixels = processor.min_pixels.min(max_pixels);
                let budget =
                    ClipBudget { min_pixels, max_pixels, slice_frames: processor.temporal_patch_size };
                FrameSize::Clip { budget, factor }
            }
            None => FrameSize::Budget {
                budget: PixelBudget {
                    min_pixels: options.min_pixels,
                    max_pixels: options.max_pixels,
                    total_pixels: options.total_pixels.map(|n| n as f64),
                },
                factor,
            },
        })
    }

    fn shape(&self, of: Request, header: &MediumInfo, frames: Option<usize>) -> Result<MediumShape> {
        let [width, height] = size_px(of, header)?;
        let Some(frames) = frames else {
            let (height, width) = self.image_size(of, height, width)?;
            return Ok(MediumShape::Patches(self.processors.image.grid(1, height, width)?));
        };
        let size = self.frame_size(of, &self.frames(of)?)?;
        let (width, height) = size.resolve(frames, width, height)?;
        of.settings.limits.check_resized(width, height)?;
        Ok(MediumShape::Patches(self.processors.video.grid(frames, height, width)?))
    }

    fn tokens(&self, shape: &MediumShape) -> Result<usize> {
        Ok(shape.patches()?.num_tokens(self.processors.image.merge_size as usize))
    }

    fn picture(&self, of: Request, mut picture: Rgb8Image) -> Result<Values> {
        let (height, width) = self.image_size(of, picture.height_px, picture.width_px)?;
        if (height, width) != (picture.height_px, picture.width_px) {
            picture = resize_bicubic(&picture, width, height)?;
        }
        let patches =
            ImageProcessor { do_resize: false, ..self.processors.image.clone() }.process_image(&picture)?;
        Ok((MediumShape::Patches(patches.grid), patches.rows))
    }

    fn clip(&self, of: Request, video: &VideoFrames) -> Result<Values> {
        let Some(first) = video.frames.first() else {
            return Err(ModelError::Medium { kind: of.medium.kind, what: "no frames could be decoded" });
        };
        let (height, width) = (first.height_px, first.width_px);
        let processor = &self.processors.video;
        let patches = processor.process_frames(&video.frames, height, width)?;
        Ok((MediumShape::Patches(patches.grid), patches.rows))
    }

    fn seconds_per_grid(&self, sampled_fps: f64) -> f64 {
        f64::from(self.processors.video.temporal_patch_size) / sampled_fps
    }
}

impl MediaReader {
    /// Returns the size `(height, width)` to which an image of `height x width` is resized.
    fn image_size(&self, of: Request, height: u32, width: u32) -> Result<(u32, u32)> {
        let options = of.medium.options.or(&of.settings.image);
        let (height, width) = match exact(of.medium.kind, &of.medium.options)? {
            Some(size) => size,
            None => self.image_processor(&options).resized(height, width)?,
        };
        of.settings.limits.check_resized(width, height)?;
        Ok((height, width))
    }

    fn image_processor(&self, options: &MediumOptions) -> ImageProcessor {
        let mut processor = self.processors.image.clone();
        if let Some(min) = options.min_pixels {
            processor.min_pixels = min;
        }
        if let Some(max) = options.max_pixels {
            processor.max_pixels = max;
            // A limit of the row or run that is below the checkpoint's minimum takes precedence.
            processor.min_pixels = processor.min_pixels.min(max);
        }
        processor
    }
}

fn exact(kind: MediumKind, options: &MediumOptions) -> Result<Option<(u32, u32)>> {
    match (options.resized_height, options.resized_width) {
        (Some(height), Some(width)) => Ok(Some((height, width))),
        (None, None) => Ok(None),
        _ => Err(ModelError::MediumOptions {
            kind,
            what: "resized_height and resized_width belong together; one of them is missing",
        }),
    }
}
