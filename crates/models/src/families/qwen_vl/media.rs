//! Media of the Qwen-VL families: decoded, resized, cut into patches.
//!
//! Images follow the checkpoint's processor. Videos follow `qwen-vl-utils` (frames, then size under a budget), or another
//! rule where the run or the row asks for it.

use std::path::Path;

use omnigrpo_data::{MediumInfo, MediumOptions, MediumRef, MediumSource};
use omnigrpo_media::qwen_vl::{ImageProcessor, PatchGrid, Processors};
use omnigrpo_media::{
    FrameChoice, FrameSampling, FrameSize, LISTED_FPS, Limits, PixelBudget, QwenSampling, VideoRequest,
    VideoSource, decode_video, load_image, resize_bicubic,
};
use omnigrpo_text::MediumKind;

use super::VisionConfig;
use crate::error::{ModelError, Result};
use crate::families::{FrameRule, MediaSettings, MediumInput, MediumPlan};

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

    /// What a medium will become, given its header.
    ///
    /// # Errors
    /// Options that exclude every choice, a kind or source these families do not take.
    pub fn plan(
        &self,
        medium: &MediumRef,
        header: &MediumInfo,
        settings: &MediaSettings,
    ) -> Result<MediumPlan> {
        let (Some(width), Some(height)) = (header.width_px, header.height_px) else {
            return Err(ModelError::prompt(format!("the header of the {} gives no size", medium.kind)));
        };
        let (grid, frame_times_secs) = match medium.kind {
            MediumKind::Image => {
                let processor = self.image_processor(&medium.options.or(&settings.image));
                let (height, width) = match exact(&medium.options)? {
                    Some(size) => size,
                    None => processor.resized(height, width)?,
                };
                (processor.grid(1, height, width)?, Vec::new())
            }
            MediumKind::Video => {
                let (request, _) = self.video_request(medium, settings)?;
                let listed = is_list(&medium.source);
                let fps = if listed {
                    request.listed_fps.unwrap_or(LISTED_FPS)
                } else {
                    header.fps.unwrap_or_default()
                };
                let frames = header.num_frames.unwrap_or_default() as usize;
                let FrameChoice { indices, .. } = if listed {
                    request.sampling.choose_listed(frames, fps)?
                } else {
                    request.sampling.choose(frames, fps)?
                };
                let (height, width) = match &request.size {
                    FrameSize::Exact { width_px, height_px } => (*height_px, *width_px),
                    FrameSize::Budget { budget, factor } => {
                        budget.frame_size(indices.len(), height, width, *factor)?
                    }
                    FrameSize::Native => (height, width),
                };
                let times = indices.iter().map(|&i| i as f64 / fps).collect();
                (self.processors.video.grid(indices.len(), height, width)?, times)
            }
            MediumKind::Audio => return Err(no_audio()),
        };
        let tokens = grid.num_tokens(self.processors.image.merge_size as usize);
        Ok(MediumPlan { kind: medium.kind, grid, tokens, frame_times_secs })
    }

    /// Decodes a medium.
    ///
    /// # Errors
    /// An unreadable medium, options that exclude every choice.
    pub fn prepare(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        match medium.kind {
            MediumKind::Image => self.image(medium, settings),
            MediumKind::Video => self.video(medium, settings),
            MediumKind::Audio => Err(no_audio()),
        }
    }

    fn image(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        let MediumSource::Path(path) = &medium.source else {
            return Err(ModelError::prompt("an image is one file; got a list of frames or a URL"));
        };
        let mut image = load_image(path, &self.limits)?;
        let mut processor = self.image_processor(&medium.options.or(&settings.image));
        if let Some((height, width)) = exact(&medium.options)? {
            image = resize_bicubic(&image, width, height)?;
            processor.do_resize = false;
        }
        let patches = processor.process_image(&image)?;
        Ok(input(medium.kind, patches.rows, patches.grid, 0.0, Vec::new()))
    }

    fn video(&self, medium: &MediumRef, settings: &MediaSettings) -> Result<MediumInput> {
        let (request, source) = self.video_request(medium, settings)?;
        let video = decode_video(&source, &request, &self.limits)?;
        let Some(first) = video.frames.first() else {
            return Err(ModelError::prompt("the video gave no frame"));
        };
        let (height, width) = (first.height_px, first.width_px);
        let processor = &self.processors.video;
        let patches = processor.process_frames(&video.frames, height, width)?;
        let seconds = video.second_per_grid_t(processor.temporal_patch_size);
        Ok(input(medium.kind, patches.rows, patches.grid, seconds, video.timestamps_s))
    }

    fn image_processor(&self, options: &MediumOptions) -> ImageProcessor {
        let mut processor = self.processors.image.clone();
        if let Some(min) = options.min_pixels {
            processor.min_pixels = min;
        }
        if let Some(max) = options.max_pixels {
            processor.max_pixels = max;
            // A bound that the row or run lowers below the checkpoint's minimum wins.
            processor.min_pixels = processor.min_pixels.min(max);
        }
        processor
    }

    fn video_request(
        &self,
        medium: &MediumRef,
        settings: &MediaSettings,
    ) -> Result<(VideoRequest, VideoSource)> {
        let source = match &medium.source {
            MediumSource::Path(path) => VideoSource::from_path(path),
            MediumSource::Frames(frames) => VideoSource::FrameList(frames.clone()),
            MediumSource::Url(url) => {
                return Err(ModelError::prompt(format!(
                    "{url}: videos by URL are not read; download the file first"
                )));
            }
        };
        let own = &medium.options;
        let listed = is_list(&medium.source);
        let options = own.or(&settings.video);
        let count = |n: Option<u32>| n.map(|n| n as usize);
        let qwen = FrameSampling::Qwen(QwenSampling {
            // The rate of a list says how fast its pictures follow each other, not how many to take.
            fps: options.fps.filter(|_| !listed),
            nframes: count(options.nframes),
            min_frames: count(options.min_frames),
            max_frames: count(options.max_frames),
            video_start: options.video_start,
            video_end: options.video_end,
        });
        let row_decides = own.nframes.is_some()
            || (own.fps.is_some() && !listed)
            || own.video_start.or(own.video_end).is_some();
        let interval = |interval_secs: f64| FrameSampling::BaseInterval {
            interval_secs,
            min_frames: count(options.min_frames).unwrap_or(4),
            max_frames: count(options.max_frames).unwrap_or(8),
        };
        let sampling = match (&settings.rule, &own.segments) {
            _ if row_decides => qwen,
            (FrameRule::Segments { .. }, Some(segments)) => {
                let n = if segments.dynamic_sample && settings.dynamic_sample {
                    settings.draw(&medium.source, segments.min_frames, segments.max_frames)
                } else {
                    segments.max_frames
                };
                FrameSampling::Segments {
                    frame_counts: segments.frame_counts.iter().map(|&n| f64::from(n)).collect(),
                    num_frames: n as usize,
                }
            }
            (FrameRule::Qwen, _) => qwen,
            (FrameRule::BaseInterval { interval_secs } | FrameRule::Segments { interval_secs }, _) => {
                interval(*interval_secs)
            }
        };
        let size = match exact(own)? {
            Some((height_px, width_px)) => FrameSize::Exact { width_px, height_px },
            None => FrameSize::Budget {
                budget: PixelBudget {
                    min_pixels: options.min_pixels,
                    max_pixels: options.max_pixels,
                    total_pixels: options.total_pixels.map(|n| n as f64),
                },
                factor: self.processors.video.factor(),
            },
        };
        let listed_fps = if listed { own.fps } else { None };
        Ok((VideoRequest { sampling, size, listed_fps }, source))
    }
}

fn input(
    kind: MediumKind,
    patches: Vec<f32>,
    grid: PatchGrid,
    seconds_per_grid: f64,
    frame_times_secs: Vec<f64>,
) -> MediumInput {
    MediumInput { kind, patches, grid, seconds_per_grid, frame_times_secs }
}

fn exact(options: &MediumOptions) -> Result<Option<(u32, u32)>> {
    match (options.resized_height, options.resized_width) {
        (Some(height), Some(width)) => Ok(Some((height, width))),
        (None, None) => Ok(None),
        _ => Err(ModelError::prompt(
            "resized_height and resized_width belong together; one of them is missing",
        )),
    }
}

fn is_list(source: &MediumSource) -> bool {
    match source {
        MediumSource::Path(path) => path.is_dir(),
        MediumSource::Frames(_) => true,
        MediumSource::Url(_) => false,
    }
}

fn no_audio() -> ModelError {
    ModelError::prompt("this model takes images and videos, not sound; remove the audio from the row")
}
