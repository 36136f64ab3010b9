//! Conversion of pictures and frames to the patch rows of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.
//!
//! A picture is resized so that both sides are multiples of `patch_size * merge_size` ([`smart_resize`]), scaled and normalised
//! per channel, and cut into patches. The rows are in the order that the merger expects: time slice, block row, block column,
//! then the `merge_size x merge_size` patches of a block. A row contains `[channel, time, y, x]`. A picture is repeated to fill
//! its one time slice. If the last slice of a video is incomplete, the last frame is repeated.
//!
//! The values of pictures equal those of `Qwen2VLImageProcessorPil` exactly: `u8 * rescale_factor` in f64, rounded to f32, then
//! `(x - mean) / std` in f32. Video frames are scaled as in `Qwen2VLVideoProcessor`, which first divides mean and std by the
//! factor. Frames that need no resizing are therefore exact too. Other frames are resized with the same bicubic filter as
//! pictures. The torchvision kernel of the published processor does not round between its two passes. The results differ by one
//! level in smooth areas. In noise, they differ by up to 20 of 255 levels, because overshoot is clipped here between the passes.
//!
//! Source: `transformers` 5.23 `models/qwen2_vl/{image_processing_pil,video_processing}_qwen2_vl.py`, qwen-vl-utils 0.0.14.

use std::borrow::Cow;
use std::path::Path;

use rayon::prelude::*;
use serde::Deserialize;

use crate::tiles::wrong_normalisation;
use crate::{Limits, MediaError, Rgb8Image, resize_bicubic};

/// Maximum ratio of the longer side to the shorter side.
pub const MAX_ASPECT_RATIO: f64 = 200.0;

/// Maximum size of a processor file in bytes. Published files have a few hundred bytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The two published variants of [`smart_resize`]. They differ only for pictures with a side far below the factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResizeRule {
    /// Variant of `transformers`, in which a side may round to 0 before the area is checked.
    Processor,
    /// Variant of qwen-vl-utils, in which sides round to at least the factor. In a few cases, qwen-vl-utils shrinks a side to 0
    /// and fails later; here, the side is then the factor.
    QwenVlUtils,
}

/// Returns the size `(height, width)` to which a picture of `height x width` is resized. Both sides are multiples of `factor`,
/// the area is within `[min_pixels, max_pixels]`, and the aspect ratio is nearly preserved. As in Python, ties round to even and
/// the arithmetic is in f64.
///
/// # Errors
/// Returns [`MediaError::Shape`] for an empty picture or a ratio of the sides above 200. Returns [`MediaError::Setting`] unless
/// `0 <= min <= max`, or if no size satisfies the bounds.
pub fn smart_resize(
    height: u32,
    width: u32,
    factor: u32,
    min_pixels: f64,
    max_pixels: f64,
    rule: ResizeRule,
) -> Result<(u32, u32), MediaError> {
    if factor == 0 || !(min_pixels >= 0.0 && max_pixels >= min_pixels && max_pixels.is_finite()) {
        return Err(MediaError::setting(
            "picture area bounds",
            format!("factor {factor}, min_pixels {min_pixels}, max_pixels {max_pixels}"),
            "factor >= 1 and 0 <= min_pixels <= max_pixels",
        ));
    }
    let (h, w, f) = (f64::from(height), f64::from(width), f64::from(factor));
    let ratio = h.max(w) / h.min(w);
    if height == 0 || width == 0 || ratio > MAX_ASPECT_RATIO {
        return Err(MediaError::Shape {
            what: "picture sides",
            got: format!("{width}x{height}"),
            expected: format!("sides of at least 1 with a ratio of at most {MAX_ASPECT_RATIO}"),
        });
    }
    let least = if rule == ResizeRule::QwenVlUtils { f } else { 0.0 };
    let round = |x: f64| ((x / f).round_ties_even() * f).max(least);
    let (mut h_bar, mut w_bar) = (round(h), round(w));
    if h_bar * w_bar > max_pixels {
        let beta = (h * w / max_pixels).sqrt();
        let floor = |x: f64| ((x / beta / f).floor() * f).max(f);
        (h_bar, w_bar) = (floor(h), floor(w));
    } else if h_bar * w_bar < min_pixels {
        let beta = (min_pixels / (h * w)).sqrt();
        let ceil = |x: f64| (x * beta / f).ceil() * f;
        (h_bar, w_bar) = (ceil(h), ceil(w));
    }
    if h_bar < f || w_bar < f || h_bar * w_bar > f64::from(u32::MAX) {
        return Err(MediaError::setting(
            "picture area bounds",
            format!(
                "min_pixels {min_pixels} and max_pixels {max_pixels}, which resize {width}x{height} to {w_bar}x{h_bar}"
            ),
            format!("bounds that result in sides of at least {factor} and fewer than 2^32 pixels"),
        ));
    }
    Ok((h_bar as u32, w_bar as u32))
}

/// Extent of a medium in patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PatchGrid {
    /// Number of time slices (1 for a picture).
    pub t: usize,
    /// Number of patch rows.
    pub h: usize,
    /// Number of patch columns.
    pub w: usize,
}

impl PatchGrid {
    /// Returns the number of patches, which is the number of rows for the vision tower.
    pub fn num_patches(&self) -> usize {
        self.t * self.h * self.w
    }

    /// Returns the number of tokens in the prompt, if `merge_size x merge_size` patches become one token.
    pub fn num_tokens(&self, merge_size: usize) -> usize {
        self.num_patches() / (merge_size * merge_size).max(1)
    }
}

/// A medium in the form of the vision tower's input.
#[derive(Debug, Clone, PartialEq)]
pub struct Patches {
    /// Patch values `[num_patches, row_len]`.
    pub rows: Vec<f32>,
    /// Length of a row, `3 * temporal_patch_size * patch_size * patch_size`.
    pub row_len: usize,
    /// Extent in patches; `rows.len() == grid.num_patches() * row_len`.
    pub grid: PatchGrid,
}

/// Settings of the image or video processor of a Qwen-VL checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageProcessor {
    /// Side of a patch, in pixels. Default 14.
    pub patch_size: u32,
    /// Frames per time slice. Default 2.
    pub temporal_patch_size: u32,
    /// Patches per side that the projector merges into one token. Default 2.
    pub merge_size: u32,
    /// Minimum area after resizing, in pixels.
    pub min_pixels: u64,
    /// Maximum area after resizing, in pixels. For a video, it applies to each frame.
    pub max_pixels: u64,
    /// Channel means, on the scale after rescaling.
    pub mean: [f64; 3],
    /// Channel standard deviations, on the scale after rescaling.
    pub std: [f64; 3],
    /// Factor that converts bytes to the scale of `mean` and `std`. Default 1/255.
    pub rescale_factor: f64,
    /// True to resize pictures. Otherwise, their sides must already be valid.
    pub do_resize: bool,
    /// True to multiply values by `rescale_factor`.
    pub do_rescale: bool,
    /// True to normalise values with `mean` and `std`.
    pub do_normalize: bool,
}

/// Creates the published defaults of `Qwen2VLImageProcessor`.
impl Default for ImageProcessor {
    fn default() -> Self {
        Self {
            patch_size: 14,
            temporal_patch_size: 2,
            merge_size: 2,
            min_pixels: 56 * 56,
            max_pixels: 28 * 28 * 1280,
            mean: [0.48145466, 0.4578275, 0.40821073],
            std: [0.26862954, 0.26130258, 0.27577711],
            rescale_factor: 1.0 / 255.0,
            do_resize: true,
            do_rescale: true,
            do_normalize: true,
        }
    }
}

/// Keys of a published processor file. Unknown keys are ignored, because published files contain many that concern other
/// programs.
#[derive(Deserialize)]
struct RawProcessor {
    patch_size: Option<u32>,
    temporal_patch_size: Option<u32>,
    merge_size: Option<u32>,
    min_pixels: Option<u64>,
    max_pixels: Option<u64>,
    size: Option<RawSize>,
    image_mean: Option<[f64; 3]>,
    image_std: Option<[f64; 3]>,
    rescale_factor: Option<f64>,
    do_resize: Option<bool>,
    do_rescale: Option<bool>,
    do_normalize: Option<bool>,
    resample: Option<u32>,
}

/// Bounds on pixels, under their old names or the names of the general image processor.
#[derive(Deserialize)]
struct RawSize {
    #[serde(alias = "min_pixels")]
    shortest_edge: Option<u64>,
    #[serde(alias = "max_pixels")]
    longest_edge: Option<u64>,
}

#[derive(Deserialize)]
struct RawProcessors {
    image_processor: Option<RawProcessor>,
    video_processor: Option<RawProcessor>,
}

/// The image processor and the video processor of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Processors {
    /// Processor for pictures.
    pub image: ImageProcessor,
    /// Processor for videos.
    pub video: ImageProcessor,
}

impl Processors {
    /// Reads the processors of a checkpoint directory from `processor_config.json` (keys `image_processor`, `video_processor`).
    /// If a key is missing there, the image processor is read from `preprocessor_config.json`. The video processor is read from
    /// `video_preprocessor_config.json`, or else from `preprocessor_config.json`. Values that a file does not state for videos
    /// are taken from `video`.
    ///
    /// # Errors
    /// Returns [`MediaError::Read`] if no file has an image processor. Returns [`MediaError::Setting`] if a file is not JSON of
    /// the expected form or contains impossible values.
    pub fn load(dir: &Path, video: &ImageProcessor) -> Result<Self, MediaError> {
        let read = |name: &str| -> Result<Option<String>, MediaError> {
            let path = dir.join(name);
            if !path.try_exists().map_err(|source| MediaError::Read { path: path.clone(), source })? {
                return Ok(None);
            }
            let limits = Limits { max_file_bytes: MAX_CONFIG_BYTES, ..Limits::default() };
            let bytes = limits.read(&path)?;
            String::from_utf8(bytes)
                .map(Some)
                .map_err(|e| MediaError::setting(path.display().to_string(), e, "UTF-8 text"))
        };
        let nested = match read("processor_config.json")? {
            Some(text) => parse_json::<RawProcessors>("processor_config.json", &text)?,
            None => RawProcessors { image_processor: None, video_processor: None },
        };
        let flat = read("preprocessor_config.json")?;
        let image = match (nested.image_processor, &flat) {
            (Some(raw), _) => ImageProcessor::default().with(raw)?,
            (None, Some(text)) => ImageProcessor::from_json(text)?,
            (None, None) => {
                let source = std::io::Error::new(
                    std::io::ErrorKind::NotFound,
                    "no image processor, neither here nor in processor_config.json",
                );
                return Err(MediaError::Read { path: dir.join("preprocessor_config.json"), source });
            }
        };
        let video = match (nested.video_processor, read("video_preprocessor_config.json")?.or(flat)) {
            (Some(raw), _) => video.clone().with(raw)?,
            (None, Some(text)) => video.clone().with(parse_json("video processor file", &text)?)?,
            (None, None) => video.clone(),
        };
        Ok(Self { image, video })
    }
}

fn parse_json<'a, T: Deserialize<'a>>(what: &str, text: &'a str) -> Result<T, MediaError> {
    serde_json::from_str(text).map_err(|e| MediaError::setting(what, e, "the JSON of a Qwen-VL processor"))
}

impl ImageProcessor {
    /// Returns the published defaults of `Qwen2VLVideoProcessor`.
    pub fn video_default() -> Self {
        Self { min_pixels: 128 * 28 * 28, max_pixels: 768 * 28 * 28, ..Self::default() }
    }

    /// Returns the published defaults of `Qwen3VLVideoProcessor`, whose bounds on pixels apply to a complete video.
    pub fn qwen3_video_default() -> Self {
        Self {
            patch_size: 16,
            mean: [0.5; 3],
            std: [0.5; 3],
            min_pixels: 128 * 32 * 32,
            max_pixels: 768 * 32 * 32,
            ..Self::default()
        }
    }

    /// Parses the text of a `preprocessor_config.json`. Absent keys keep the published defaults.
    ///
    /// # Errors
    /// Returns [`MediaError::Setting`] for other text or impossible values.
    pub fn from_json(text: &str) -> Result<Self, MediaError> {
        Self::default().with(parse_json("preprocessor_config.json", text)?)
    }

    fn with(mut self, raw: RawProcessor) -> Result<Self, MediaError> {
        fn set<T>(to: &mut T, from: Option<T>) {
            if let Some(value) = from {
                *to = value;
            }
        }
        if let Some(size) = raw.size {
            let (Some(min), Some(max)) = (size.shortest_edge, size.longest_edge) else {
                return Err(MediaError::setting(
                    "processor size",
                    "a size without both keys",
                    "`shortest_edge` and `longest_edge`, the minimum and maximum area in pixels",
                ));
            };
            (self.min_pixels, self.max_pixels) = (min, max);
        }
        set(&mut self.min_pixels, raw.min_pixels);
        set(&mut self.max_pixels, raw.max_pixels);
        set(&mut self.patch_size, raw.patch_size);
        set(&mut self.temporal_patch_size, raw.temporal_patch_size);
        set(&mut self.merge_size, raw.merge_size);
        set(&mut self.mean, raw.image_mean);
        set(&mut self.std, raw.image_std);
        set(&mut self.rescale_factor, raw.rescale_factor);
        set(&mut self.do_resize, raw.do_resize);
        set(&mut self.do_rescale, raw.do_rescale);
        set(&mut self.do_normalize, raw.do_normalize);
        if let Some(other) = raw.resample.filter(|&r| r != 3) {
            return Err(MediaError::setting("processor resample", other, "3 (bicubic)"));
        }
        self.check()?;
        Ok(self)
    }

    fn check(&self) -> Result<(), MediaError> {
        // A limit of 64 is far above every published value, and prevents overflow in all products below.
        let sizes = [self.patch_size, self.temporal_patch_size, self.merge_size];
        let positive = |x: f64| x.is_finite() && x > 0.0;
        let (what, got, expected) = if !sizes.iter().all(|size| (1..=64).contains(size)) {
            ("patch_size, temporal_patch_size, merge_size", format!("{sizes:?}"), "each 1 to 64")
        } else if !(self.min_pixels <= self.max_pixels && self.max_pixels <= u64::from(u32::MAX)) {
            let got = format!("{} and {}", self.min_pixels, self.max_pixels);
            ("min_pixels and max_pixels", got, "minimum <= maximum < 2^32")
        } else if let Some(wrong) = wrong_normalisation(&self.mean, &self.std) {
            wrong
        } else if !positive(self.rescale_factor) {
            ("rescale_factor", self.rescale_factor.to_string(), "a number above 0")
        } else {
            return Ok(());
        };
        Err(MediaError::setting(what, got, expected))
    }

    /// Returns the number of pixels of which both sides of a resized picture are multiples.
    pub fn factor(&self) -> u32 {
        self.patch_size * self.merge_size
    }

    /// Returns the size `(height, width)` to which a picture is resized, or a video frame without a token budget.
    ///
    /// # Errors
    /// Returns the errors of [`smart_resize`]. If `do_resize` is off, returns an error unless the sides are multiples of
    /// [`factor`](Self::factor).
    pub fn resized(&self, height: u32, width: u32) -> Result<(u32, u32), MediaError> {
        self.check()?;
        if self.do_resize {
            let (min, max) = (self.min_pixels as f64, self.max_pixels as f64);
            return smart_resize(height, width, self.factor(), min, max, ResizeRule::Processor);
        }
        self.require_multiples(height, width)?;
        Ok((height, width))
    }

    /// Returns the extent in patches of `num_frames` frames, resized to `height x width`. A picture counts as 1 frame.
    ///
    /// # Errors
    /// Returns [`MediaError::Shape`] if a side is not a multiple of [`factor`](Self::factor) or there is no frame.
    pub fn grid(&self, num_frames: usize, height: u32, width: u32) -> Result<PatchGrid, MediaError> {
        self.require_multiples(height, width)?;
        if num_frames == 0 {
            return Err(no_frames());
        }
        Ok(PatchGrid {
            t: num_frames.div_ceil(self.temporal_patch_size as usize),
            h: (height / self.patch_size) as usize,
            w: (width / self.patch_size) as usize,
        })
    }

    fn require_multiples(&self, height: u32, width: u32) -> Result<(), MediaError> {
        let factor = self.factor().max(1);
        if height.min(width) == 0 || !height.is_multiple_of(factor) || !width.is_multiple_of(factor) {
            return Err(MediaError::Shape {
                what: "picture sides",
                got: format!("{width}x{height}"),
                expected: format!("multiples of {factor}"),
            });
        }
        Ok(())
    }

    /// Resizes and normalises a picture and cuts it into patches.
    pub fn process_image(&self, image: &Rgb8Image) -> Result<Patches, MediaError> {
        image.check()?;
        let (height, width) = self.resized(image.height_px, image.width_px)?;
        let image = resize_if_needed(image, height, width)?;
        self.patchify(&[image.as_ref()], &self.table(|c| self.exact_level(c)))
    }

    /// Resizes the frames of one video to `height x width`, normalises them and cuts them into patches. For the size, see
    /// [`resized`](Self::resized) and [`crate::PixelBudget::frame_size`].
    ///
    /// # Errors
    /// Returns [`MediaError::Shape`] if there are no frames or a side is not a multiple of [`factor`](Self::factor).
    pub fn process_frames(
        &self,
        frames: &[Rgb8Image],
        height: u32,
        width: u32,
    ) -> Result<Patches, MediaError> {
        self.check()?;
        self.grid(frames.len(), height, width)?;
        let frames = frames
            .par_iter()
            .map(|frame| resize_if_needed(frame, height, width))
            .collect::<Result<Vec<_>, _>>()?;
        let frames: Vec<&Rgb8Image> = frames.iter().map(AsRef::as_ref).collect();
        self.patchify(&frames, &self.table(|c| self.fused_level(c)))
    }

    /// Returns the normalised value of every byte, for each channel.
    fn table<F: Fn(u8) -> f32>(&self, level: impl Fn(usize) -> F) -> [[f32; 256]; 3] {
        std::array::from_fn(|c| {
            let level = level(c);
            std::array::from_fn(|byte| level(byte as u8))
        })
    }

    /// Returns the normalisation for pictures, which rescales in f64, rounds to f32 and normalises in f32.
    fn exact_level(&self, c: usize) -> impl Fn(u8) -> f32 {
        let factor = if self.do_rescale { self.rescale_factor } else { 1.0 };
        let (mean, std) =
            if self.do_normalize { (self.mean[c] as f32, self.std[c] as f32) } else { (0.0, 1.0) };
        move |byte| ((f64::from(byte) * factor) as f32 - mean) / std
    }

    /// Returns the normalisation for videos, which converts mean and std to the scale of bytes, in f32.
    fn fused_level(&self, c: usize) -> impl Fn(u8) -> f32 {
        let (mean, std) =
            if self.do_normalize { (self.mean[c] as f32, self.std[c] as f32) } else { (0.0, 1.0) };
        let levels = if self.do_rescale { (1.0 / self.rescale_factor) as f32 } else { 1.0 };
        let (mean, std) = (mean * levels, std * levels);
        move |byte| (f32::from(byte) - mean) / std
    }

    fn patchify(&self, frames: &[&Rgb8Image], table: &[[f32; 256]; 3]) -> Result<Patches, MediaError> {
        let (Some(first), Some(last)) = (frames.first(), frames.last()) else { return Err(no_frames()) };
        let grid = self.grid(frames.len(), first.height_px, first.width_px)?;
        let (patch, merge) = (self.patch_size as usize, self.merge_size as usize);
        let num_slice_frames = self.temporal_patch_size as usize;
        let plane = patch * patch;
        let row_len = 3 * num_slice_frames * plane;
        let width = first.width_px as usize;
        let blocks_down = grid.h / merge;
        let mut rows = vec![0f32; grid.num_patches() * row_len];
        // Each chunk contains one block row of one time slice.
        rows.par_chunks_exact_mut(grid.w * merge * row_len).enumerate().for_each(|(chunk, rows)| {
            let (slice, block_row) = (chunk / blocks_down, chunk % blocks_down);
            for (i, row) in rows.chunks_exact_mut(row_len).enumerate() {
                let (block_col, in_row, in_col) = (i / (merge * merge), i / merge % merge, i % merge);
                let y0 = (block_row * merge + in_row) * patch;
                let x0 = (block_col * merge + in_col) * patch;
                for time in 0..num_slice_frames {
                    let pixels = &frames.get(slice * num_slice_frames + time).unwrap_or(last).pixels;
                    for y in 0..patch {
                        let line = &pixels[((y0 + y) * width + x0) * 3..][..patch * 3];
                        for (x, rgb) in line.chunks_exact(3).enumerate() {
                            for c in 0..3 {
                                row[(c * num_slice_frames + time) * plane + y * patch + x] =
                                    table[c][rgb[c] as usize];
                            }
                        }
                    }
                }
            }
        });
        Ok(Patches { rows, row_len, grid })
    }
}

fn no_frames() -> MediaError {
    MediaError::Shape { what: "video", got: "no frames".into(), expected: "at least one frame".into() }
}

fn resize_if_needed(image: &Rgb8Image, height: u32, width: u32) -> Result<Cow<'_, Rgb8Image>, MediaError> {
    image.check()?;
    if (image.height_px, image.width_px) == (height, width) {
        return Ok(Cow::Borrowed(image));
    }
    resize_bicubic(image, width, height).map(Cow::Owned)
}
