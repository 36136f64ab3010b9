//! Media of the Qwen-VL families: decoded, resized, cut into patches.
//!
//! Images follow the checkpoint's processor. Videos follow `qwen-vl-utils` (frames, then size within a budget), unless the run or
//! the row selects another rule. The rule of the checkpoint's video processor limits the pixels of all frames together.

use std::path::Path;

use omnigrpo_data::{MediumInfo, MediumOptions, MediumRef};
use omnigrpo_media::qwen_vl::{ImageProcessor, PatchGrid, Processors};
use omnigrpo_media::{ClipBudget, FrameSize, PixelBudget, load_image, resize_bicubic};
use omnigrpo_text::MediumKind;

use super::config::{Generation, VisionConfig};
use crate::error::{ModelError, Result};
use crate::families::frames::{FramePlan, file, no_audio, no_size};
use crate::families::{FrameRule, MediaSettings, MediumInput, MediumPlan, MediumShape};

/// A reader that prepares media as one checkpoint's processors do.
pub struct MediaReader {
    processors: Processors,
}

impl MediaReader {
    /// Reads the processor files of a checkpoint directory.
    ///
    /// # Errors
    /// Returns an error if files are missing or invalid, or sizes differ from those of the tower.
    pub fn open(dir: &Path, vision: &VisionConfig, generation: Generation) -> Result<Self> {
        let video = match generation {
            Generation::Qwen3 => ImageProcessor::qwen3_video_default(),
            Generation::Qwen2 | Generation::Qwen25 => ImageProcessor::video_default(),
        };
        let processors = Processors::load(dir, &video)?;
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

    /// Plans a medium from its header.
    ///
    /// # Errors
    /// Returns an error if no choice satisfies the options, or the families do not support the kind or source.
    pub fn plan(
        &self,
        medium: &MediumRef,
        header: &MediumInfo,
        settings: &MediaSettings,
    ) -> Result<MediumPlan> {
        let (Some(width), Some(height)) = (header.width_px, header.height_px) else {
            return Err(no_size(medium));
        };
        let (grid, frame_times_secs) = match medium.kind {
            MediumKind::Image => {
                let (height, width) = self.image_size(medium, height, width, settings)?;
                (self.processors.image.grid(1, height, width)?, Vec::new())
            }
            MediumKind::Video => {
                let times = FramePlan::new(medium, settings).times_secs(header)?;
                let size = self.frame_size(medium, settings)?;
                let (width, height) = size.resolve(times.len(), width, height)?;
                settings.limits.check_resized(width, height)?;
                (self.processors.video.grid(times.len(), height, width)?, times)
            }
            MediumKind::Audio => return Err(no_audio()),
        };
        let tokens = grid.num_tokens(self.processors.image.merge_size as usize);
        Ok(MediumPlan { kind: medium.kind, shape: MediumShape::Patches(grid), tokens, frame_times_secs })
    }

    /// Decodes a medium.
    ///
    /// # Errors
    /// Returns an error if the medium is unreadable or no choice satisfies the options.
    pub fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        match medium.kind {
            MediumKind::Image => self.image(medium, settings),
            MediumKind::Video => self.video(medium, settings),
            MediumKind::Audio => Err(no_audio()),
        }
    }

    fn image(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        let mut image = load_image(file(medium)?, &settings.limits)?;
        let (height, width) = self.image_size(medium, image.height_px, image.width_px, settings)?;
        if (height, width) != (image.height_px, image.width_px) {
            image = resize_bicubic(&image, width, height)?;
        }
        let patches =
            ImageProcessor { do_resize: false, ..self.processors.image.clone() }.process_image(&image)?;
        Ok(input(medium.kind, patches.rows, patches.grid, 0.0, Vec::new()))
    }

    fn video(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        let size = self.frame_size(medium, settings)?;
        let video = FramePlan::new(medium, settings).decode(settings, size)?;
        let Some(first) = video.frames.first() else {
            return Err(ModelError::Medium { kind: medium.kind, what: "no frames could be decoded" });
        };
        let (height, width) = (first.height_px, first.width_px);
        let processor = &self.processors.video;
        let patches = processor.process_frames(&video.frames, height, width)?;
        let seconds = video.second_per_grid_t(processor.temporal_patch_size);
        Ok(input(medium.kind, patches.rows, patches.grid, seconds, video.timestamps_s))
    }

    /// Returns the size `(height, width)` to which an image of `height x width` is resized.
    fn image_size(
        &self,
        medium: &MediumRef,
        height: u32,
        width: u32,
        settings: &MediaSettings,
    ) -> Result<(u32, u32)> {
        let options = medium.options.or(&settings.image);
        let (height, width) = match exact(medium.kind, &medium.options)? {
            Some(size) => size,
            None => self.image_processor(&options).resized(height, width)?,
        };
        settings.limits.check_resized(width, height)?;
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

    fn frame_size(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<FrameSize> {
        let (own, options) = (&medium.options, medium.options.or(&settings.video));
        let (processor, factor) = (&self.processors.video, self.processors.video.factor());
        let row_decides = own.min_pixels.or(own.max_pixels).or(own.total_pixels).is_some();
        Ok(match exact(medium.kind, own)? {
            Some((height_px, width_px)) => FrameSize::Exact { width_px, height_px },
            None if settings.rule == FrameRule::Processor && !row_decides => {
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
}

fn input(
    kind: MediumKind,
    data: Vec<f32>,
    grid: PatchGrid,
    seconds_per_grid: f64,
    frame_times_secs: Vec<f64>,
) -> MediumInput {
    MediumInput { kind, shape: MediumShape::Patches(grid), data, seconds_per_grid, frame_times_secs }
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
