//! Writes 8 frames of a clip, chosen by the rule of qwen-vl-utils, as raw RGB, and their indices beside them (`.idx`).
//! `tests/slow/compare_pyav.py` compares them with PyAV's.
//!
//! `cargo run -p omnigrpo-media --example dump_frames CLIP OUT`

use std::path::PathBuf;

use omnigrpo_media::{
    FrameSampling, FrameSize, Limits, Orientation, QwenSampling, VideoRequest, VideoSource, decode_video,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [clip, out] = std::env::args_os()
        .skip(1)
        .map(PathBuf::from)
        .collect::<Vec<_>>()
        .try_into()
        .map_err(|_| "usage: dump_frames CLIP OUT")?;
    let request = VideoRequest {
        sampling: FrameSampling::Qwen(QwenSampling { nframes: Some(8), ..Default::default() }),
        size: FrameSize::Native,
        listed_fps: None,
        orientation: Orientation::Upright,
    };
    let video = decode_video(&VideoSource::File(clip), &request, &Limits::default())?;
    std::fs::write(&out, video.frames.into_iter().flat_map(|frame| frame.pixels).collect::<Vec<u8>>())?;
    let indices: Vec<String> = video.indices.iter().map(ToString::to_string).collect();
    std::fs::write(out.with_extension("idx"), indices.join(" "))?;
    Ok(())
}
