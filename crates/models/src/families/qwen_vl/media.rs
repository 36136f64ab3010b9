//! Media of the Qwen-VL families: decoded, resized, cut into patches.

use std::path::Path;

use omnigrpo_data::{MediumRef, MediumSource};
use omnigrpo_media::qwen_vl::{ImageProcessor, Processors};
use omnigrpo_media::{Limits, load_image, probe_image};
use omnigrpo_text::MediumKind;

use super::VisionConfig;
use crate::error::{ModelError, Result};
use crate::families::{MediaSettings, MediumInput, MediumPlan};

/// Reads media as one checkpoint's processors say.
pub struct MediaReader {
    processors: Processors,
    limits: Limits,
}

impl MediaReader {
    /// Reads the processor files of a checkpoint directory.
    ///
    /// # Errors
    /// Missing or impossible files, sizes that are not the tower's.
    pub fn open(dir: &Path, vision: &VisionConfig) -> Result<Self> {
        let processors = Processors::load(dir)?;
        for p in [&processors.image, &processors.video] {
            let got = [p.patch_size, p.temporal_patch_size, p.merge_size].map(|n| n as usize);
            let expected = [vision.patch, vision.temporal_patch, vision.merge];
            if got != expected {
                return Err(ModelError::Checkpoint {
                    dir: dir.to_path_buf(),
                    what: format!(
                        "the processor's patch, temporal patch and merge sizes are {got:?}, the tower's {expected:?}"
                    ),
                });
            }
        }
        Ok(Self { processors, limits: Limits::default() })
    }

    fn image_processor(&self, medium: &MediumRef, settings: &MediaSettings) -> ImageProcessor {
        let mut processor = self.processors.image.clone();
        let options = &medium.options;
        if let Some(min) = options.min_pixels.or(settings.min_pixels) {
            processor.min_pixels = min;
        }
        if let Some(max) = options.max_pixels.or(settings.max_pixels) {
            processor.max_pixels = max;
        }
        processor
    }

    /// What a medium will become, from its header.
    ///
    /// # Errors
    /// An unreadable medium.
    pub fn plan(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumPlan> {
        match (medium.kind, &medium.source) {
            (MediumKind::Image, MediumSource::Path(path)) => {
                let processor = self.image_processor(medium, settings);
                let info = probe_image(path, &self.limits)?;
                let (height, width) = processor.resized(info.height_px, info.width_px)?;
                let grid = processor.grid(1, height, width)?;
                let tokens = grid.num_tokens(processor.merge_size as usize);
                Ok(MediumPlan { kind: medium.kind, grid, tokens, frame_times_secs: Vec::new() })
            }
            _ => Err(ModelError::prompt("not an image")),
        }
    }

    /// Decodes a medium.
    ///
    /// # Errors
    /// An unreadable medium.
    pub fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        match (medium.kind, &medium.source) {
            (MediumKind::Image, MediumSource::Path(path)) => {
                let patches =
                    self.image_processor(medium, settings).process_image(&load_image(path, &self.limits)?)?;
                Ok(MediumInput {
                    kind: medium.kind,
                    patches: patches.rows,
                    grid: patches.grid,
                    seconds_per_grid: 0.0,
                    frame_times_secs: Vec::new(),
                })
            }
            _ => Err(ModelError::prompt("not an image")),
        }
    }
}
