//! Media files to pixels, frames, the patches that vision towers take, and the spectra that audio towers take.
//!
//! Knows files, pixels and samples, no tensors. Everything here is a pure function of the file and the settings; nothing is random
//! and nothing is cached. Files come from outside: every read and decode runs under [`Limits`].
//!
//! * [`load_image`], [`probe_image`]: picture files as Pillow reads them.
//! * [`resize_bicubic`]: the resize of Pillow 13, bit for bit.
//! * [`decode_video`], [`probe_video`]: frames of video files, animations, directories and lists of pictures.
//! * [`FrameSampling`], [`PixelBudget`], [`ClipBudget`]: which frames, and how large.
//! * [`aria`]: squares with masks, as Aria sees pictures.
//! * [`audio`]: sound files and the sound of videos, resampling, Whisper's log-mel features.
//! * [`clip`]: the pixels that CLIP looks at.
//! * [`tiles`]: square tiles of pictures, as InternVL sees them.
//! * [`qwen_vl`]: resizing rule, normalisation and patch order of Qwen2-VL and Qwen2.5-VL.
//! * [`siglip`]: pictures for SigLIP towers.

pub mod aria;
pub mod audio;
pub mod clip;
mod error;
mod image;
mod limits;
mod program;
pub mod qwen_vl;
mod resize;
mod sampling;
pub mod siglip;
pub mod tiles;
mod video;

pub use crate::error::MediaError;
pub use crate::image::{ImageInfo, Rgb8Image, load_image, load_image_bytes, probe_image};
pub use crate::limits::Limits;
pub use crate::resize::resize_bicubic;
pub use crate::sampling::{
    ClipBudget, FrameChoice, FrameSampling, PixelBudget, QwenSampling, segment_indices,
};
pub use crate::video::{
    FrameSize, LISTED_FPS, VideoFrames, VideoInfo, VideoRequest, VideoSource, decode_video, probe_video,
};
