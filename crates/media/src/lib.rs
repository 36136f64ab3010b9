//! Media files: decodes pictures, videos and audio, and computes the patches for vision towers and the spectra for audio towers.
//!
//! The crate works on files, pixels and samples, not on tensors. Every result depends only on the file and the settings: there is
//! no randomness and no cache. Files may be malicious, so every read and decode runs under [`Limits`].
//!
//! * [`load_image`], [`probe_image`]: picture files, decoded as Pillow decodes them.
//! * [`resize`]: the resize of Pillow 13, bit for bit.
//! * [`decode_video`], [`probe_video`]: frames of video files, animations, directories and lists of pictures.
//! * [`FrameSampling`], [`PixelBudget`], [`ClipBudget`]: the choice of frames and their size.
//! * [`aria`]: squares with masks, the image processing of Aria.
//! * [`audio`]: audio files and the audio of videos, resampling, Whisper's log-mel features.
//! * [`clip`]: the image processing of CLIP.
//! * [`tiles`]: square tiles of pictures, the image processing of InternVL.
//! * [`qwen_vl`]: resizing rule, normalisation and patch order of Qwen2-VL and Qwen2.5-VL.
//! * [`siglip`]: the image processing of SigLIP towers.
//! * [`smolvlm`]: rows of square tiles, the image processing of SmolVLM.

pub mod aria;
pub mod audio;
pub mod clip;
mod error;
mod image;
mod limits;
mod orientation;
mod program;
pub mod qwen_vl;
mod resize;
mod sampling;
pub mod siglip;
pub mod smolvlm;
pub mod tiles;
mod video;

pub use crate::error::MediaError;
pub use crate::image::{ImageInfo, Rgb8Image, load_image, load_image_bytes, probe_image};
pub use crate::limits::Limits;
pub use crate::orientation::{Orientation, Turn};
pub use crate::resize::{Filter, resize, resize_bicubic};
pub use crate::sampling::{
    ClipBudget, FrameChoice, FrameSampling, PixelBudget, QwenSampling, segment_indices,
};
pub use crate::video::{
    FrameSize, LISTED_FPS, VideoFrames, VideoInfo, VideoRequest, VideoSource, decode_video, probe_video,
};
