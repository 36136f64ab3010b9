//! Sizes and frames of images and videos.

use super::*;
use crate::Settings;
use crate::names::words;
use Kind::Choice;
use omnigrpo_models::{FrameRule, Orientation};

fn not_by_qwen(s: &Settings) -> Option<&'static str> {
    (s.prompts.media.rule != FrameRule::Qwen).then_some("only `frame_sampling qwen_vl_utils` reads it")
}

fn not_by_rate(s: &Settings) -> Option<&'static str> {
    (!matches!(s.prompts.media.rule, FrameRule::Qwen | FrameRule::Processor))
        .then_some("only `frame_sampling` qwen_vl_utils and processor read it")
}

fn by_processor(s: &Settings) -> Option<&'static str> {
    (s.prompts.media.rule == FrameRule::Processor)
        .then_some("`frame_sampling processor` bounds all frames together, with `total_pixels`")
}

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row("orientation", Choice(words::<Orientation>), at!(prompts.media.orientation), FETCHES).help(
        "Form of pictures and videos that a phone stored sideways, for the model, its tools and rewards.",
    ),
    row("min_pixels", int(1, MANY), at!(prompts.media.image.min_pixels), ROWS)
        .help("Minimum number of pixels of an image after resizing; it sets the smallest number of vision tokens.")
        .unset("the checkpoint's; 3136 for Qwen2.5-VL, 65536 for Qwen3-VL"),
    row("max_pixels", int(1, MANY), at!(prompts.media.image.max_pixels), ROWS)
        .help(
            "Maximum number of pixels of an image after resizing; it limits vision tokens, memory and time.",
        )
        .unset("the checkpoint's; 12845056 for Qwen2.5-VL, 16777216 for Qwen3-VL"),
    row("frame_sampling", Choice(words::<FrameRule>), at!(prompts.media.rule), ROWS).help(
        "Rule that picks the frames of a video: by rate (`qwen_vl_utils`, or `processor` for the video \
             processor of Qwen3-VL or SmolVLM2), by interval (`base_interval`, as qwen-vl-finetune), or per segment of the row's \
             `meta`.",
    ),
    row("fps", float(1e-3, 1e3), at!(prompts.media.video.fps), ROWS)
        .help("Frames to sample per second of video.")
        .idle(|s, _| {
            not_by_rate(s)
                .or_else(|| s.prompts.media.video.nframes.map(|_| "`nframes` gives the number of frames"))
        }),
    row(
        "nframes",
        int(1, COUNT),
        Place {
            field: "prompts.media.video.nframes",
            set: |s, v| {
                s.prompts.media.video.nframes = Some(take(v)?);
                s.prompts.media.video.fps = None;
                Ok(())
            },
            get: |s| crate::values::Field::value(&s.prompts.media.video.nframes),
        },
        ROWS,
    )
    .help("Frames of each video, instead of a rate.")
    .unset("from `fps`")
    .idle(|s, _| not_by_qwen(s)),
    row("video_min_frames", int(1, COUNT), at!(prompts.media.video.min_frames), ROWS)
        .help("Minimum number of frames of a video.")
        .alias(&["min_frames"]),
    row("video_max_frames", int(1, COUNT), at!(prompts.media.video.max_frames), ROWS)
        .help("Maximum number of frames of a video; each pair of frames costs vision tokens.")
        .alias(&["max_frames"]),
    row("base_interval", float(1e-3, 1e6), at!(prompts.media.base_interval_secs), ROWS)
        .help("Seconds between frames under `--frame_sampling base_interval`.")
        .idle(|s, _| {
            matches!(s.prompts.media.rule, FrameRule::Qwen | FrameRule::Processor)
                .then_some("only `frame_sampling` base_interval and meta read it")
        }),
    row("video_min_frame_pixels", int(1, MANY), at!(prompts.media.video.min_pixels), ROWS)
        .help("Minimum number of pixels of a video frame after resizing.")
        .idle(|s, _| by_processor(s))
        .unset("the rule's: 100352, for Qwen3-VL 131072; base_interval 3136"),
    row("video_max_frame_pixels", int(1, MANY), at!(prompts.media.video.max_pixels), ROWS)
        .help("Maximum number of pixels of a video frame after resizing.")
        .idle(|s, _| by_processor(s))
        .unset("the rule's: 602112, for Qwen3-VL 786432; base_interval 25088"),
    row("total_pixels", int(1, MANY), at!(prompts.media.video.total_pixels), ROWS)
        .help(
            "Maximum number of pixels of all frames of a video together; it lowers the limit per frame in long videos.",
        )
        .unset("90316800, for Qwen3-VL 117964800")
        .idle(|s, _| not_by_rate(s)),
];
