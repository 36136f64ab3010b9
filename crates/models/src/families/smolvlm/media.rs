//! Media of SmolVLM: images as tiles and a whole, videos as one square for each frame.

use std::path::Path;

use omnigrpo_data::MediumInfo;
use omnigrpo_media::smolvlm::SmolVlmProcessor;
use omnigrpo_media::{Filter, FrameSampling, FrameSize, Rgb8Image, VideoFrames};
use omnigrpo_text::MediumKind;

use super::config::SmolVlmConfig;
use crate::config_json::ConfigJson;
use crate::error::*;
use crate::families::frames::FramePlan;
use crate::families::reader::{Reader, Request, Values, image_processor, normalisation, size_px};
use crate::families::{IdleSettings, MediaSettings, MediumShape};

/// A reader that prepares media as one checkpoint's processors do.
pub(super) struct MediaReader {
    pictures: SmolVlmProcessor,
    /// Longest edge of a frame before it becomes a square, in px.
    frame_px: u32,
    tokens_per_tile: usize,
    /// Whether the processor reads videos too.
    videos: bool,
}

/// Ignored settings: pictures of these models are tiles, so a limit on pixels would have no effect.
pub(super) const IDLE: IdleSettings = IdleSettings {
    fields: &[IMAGE_MIN_PIXELS, IMAGE_MAX_PIXELS, VIDEO_MIN_PIXELS, VIDEO_MAX_PIXELS, VIDEO_TOTAL_PIXELS],
    why: || {
        format!(
            "its pictures are tiles of a fixed size, and {MAX_TILES} limits the tiles of an image; 1 leaves the whole image \
             as one tile"
        )
    },
};

impl MediaReader {
    /// Reads sizes and normalisation from the processor files.
    pub fn open(dir: &Path, config: &SmolVlmConfig) -> Result<Self> {
        let json = image_processor(dir)?;
        for key in ["do_resize", "do_pad"] {
            json.only(key, true)?;
        }
        let [mean, std] = normalisation(&json, Filter::Lanczos, [[0.5; 3]; 2])?;
        let side = edge(&json, "max_image_size", 364)?;
        let tower = config.tower.picture.side_px;
        if side != tower {
            return Err(json.error(format!(
                "max_image_size is {side} px, but the tower reads squares of {tower} px; tiles of another size are unsupported"
            )));
        }
        let pictures = SmolVlmProcessor {
            side_px: side as u32,
            longest_px: edge(&json, "size", 4 * 364)? as u32,
            split: json.boolean("do_image_splitting", true)?,
            max_tiles: None,
            mean,
            std,
        };
        pictures.check()?;
        let tokens_per_tile = config.tokens_per_tile();
        let whole = dir.join("processor_config.json");
        if whole.is_file() {
            let json = ConfigJson::read(&whole)?;
            let tokens = json.size("image_seq_len", Some(tokens_per_tile))?;
            if tokens != tokens_per_tile {
                let what = format!("image_seq_len is {tokens}, but a tile has {tokens_per_tile} tokens");
                return Err(json.error(what));
            }
        }
        let frame_px = if config.videos { frame_px(dir, &json)? } else { pictures.longest_px };
        Ok(Self { pictures, frame_px, tokens_per_tile, videos: config.videos })
    }

    fn pictures(&self, settings: &MediaSettings) -> SmolVlmProcessor {
        SmolVlmProcessor { max_tiles: settings.max_tiles, ..self.pictures.clone() }
    }

    fn tiles(&self, [rows, columns]: [u32; 2]) -> MediumShape {
        let side_px = self.pictures.side_px as usize;
        MediumShape::Tiles { rows: rows as usize, columns: columns as usize, side_px }
    }

    fn frames_of(&self, count: usize, duration_secs: f64) -> MediumShape {
        let side_px = self.pictures.side_px as usize;
        MediumShape::Frames { count, side_px, clip_secs: duration_secs as usize }
    }
}

impl Reader for MediaReader {
    fn supported(&self) -> (&'static [MediumKind], &'static str) {
        match self.videos {
            true => (&[MediumKind::Image, MediumKind::Video], "this model supports only images and videos"),
            false => {
                (&[MediumKind::Image], "the processor of this model reads images only; SmolVLM2 reads videos")
            }
        }
    }

    /// Chooses frames by the rule of the published processor if the run asks for it.
    fn frames(&self, of: Request) -> Result<FramePlan> {
        let mut plan = FramePlan::new(of.medium, of.settings);
        if let FrameSampling::Rate { fps, min_frames, max_frames } = plan.sampling {
            plan.sampling = FrameSampling::Inside { fps, min_frames, max_frames };
        }
        Ok(plan)
    }

    fn frame_size(&self, _: Request, _: &FramePlan) -> Result<FrameSize> {
        Ok(FrameSize::Square { longest_px: self.frame_px, side_px: self.pictures.side_px })
    }

    fn shape(&self, of: Request, header: &MediumInfo, frames: Option<usize>) -> Result<MediumShape> {
        if let Some(frames) = frames {
            return Ok(self.frames_of(frames, self.frames(of)?.duration_secs(header)));
        }
        let [width, height] = size_px(of, header)?;
        Ok(self.tiles(self.pictures(of.settings).arrangement(width, height)?))
    }

    fn tokens(&self, shape: &MediumShape) -> Result<usize> {
        Ok(shape.squares()?[0] * self.tokens_per_tile)
    }

    fn picture(&self, of: Request, picture: Rgb8Image) -> Result<Values> {
        let (arrangement, data) = self.pictures(of.settings).process_image(&picture)?;
        Ok((self.tiles(arrangement), data))
    }

    fn clip(&self, _: Request, video: &VideoFrames) -> Result<Values> {
        let shape = self.frames_of(video.frames.len(), video.duration_s);
        Ok((shape, self.pictures.process_frames(&video.frames)?))
    }
}

/// Returns the `longest_edge` of a size in px.
fn edge(json: &ConfigJson, key: &str, default: usize) -> Result<usize> {
    match json.section(key)? {
        Some(size) => size.size("longest_edge", None),
        None => Ok(default),
    }
}

/// Returns the longest edge of a frame in the first step of the video processor. Its file may be that of the image processor, and
/// its `size` takes precedence over that of `video_sampling`.
fn frame_px(dir: &Path, image: &ConfigJson) -> Result<u32> {
    let own = dir.join("video_preprocessor_config.json");
    let nested = dir.join("processor_config.json");
    let nested = if nested.is_file() { ConfigJson::read(&nested)?.section("video_processor")? } else { None };
    let json = match nested {
        Some(json) => json,
        None if own.is_file() => ConfigJson::read(&own)?,
        None => image.clone(),
    };
    let sampling = json.section("video_sampling")?;
    let px = match sampling {
        Some(sampling) if json.get("size").is_none() => edge(&sampling, "video_size", 4 * 364)?,
        _ => edge(&json, "size", 4 * 364)?,
    };
    Ok(px as u32)
}
