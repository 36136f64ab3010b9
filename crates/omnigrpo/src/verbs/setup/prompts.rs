//! How prompts are made, what reading a medium may cost, and how completions are drawn.

use anyhow::Result;
use omnigrpo_data::MediumOptions;
use omnigrpo_models::{Checkpoint, FrameRule, Limits, MediaSettings, PromptBuilder, PromptSettings};
use omnigrpo_rollout::SamplingParams;
use omnigrpo_text::RenderOptions;

use crate::settings::{FrameSampling, MissingAudio, Settings};

/// Makes prompts for a checkpoint. `training` lets rows draw their number of frames.
pub fn prompts(settings: &Settings, checkpoint: &Checkpoint, training: bool) -> Result<PromptBuilder> {
    prompts_with(settings, checkpoint, training, false)
}

/// As [`prompts`] of training, with the frames of videos in another order.
pub fn shuffled_prompts(settings: &Settings, checkpoint: &Checkpoint) -> Result<PromptBuilder> {
    prompts_with(settings, checkpoint, true, true)
}

fn prompts_with(
    settings: &Settings,
    checkpoint: &Checkpoint,
    training: bool,
    shuffle_frames: bool,
) -> Result<PromptBuilder> {
    let media = &settings.media;
    // Some have a default, which is nothing to those that do not read them.
    let reads = |flag: &str| !checkpoint.family().processor().idle_settings().flags.contains(&flag);
    let video = MediumOptions {
        fps: (media.nframes.is_none() && reads("fps")).then_some(media.fps),
        nframes: media.nframes,
        min_frames: reads("video_min_frames").then_some(media.video_min_frames),
        max_frames: reads("video_max_frames").then_some(media.video_max_frames),
        min_pixels: media.video_min_frame_pixels,
        max_pixels: media.video_max_frame_pixels,
        total_pixels: media.total_pixels,
        ..MediumOptions::default()
    };
    let image = MediumOptions {
        min_pixels: media.min_pixels,
        max_pixels: media.max_pixels,
        ..MediumOptions::default()
    };
    let interval_secs = media.base_interval;
    let rule = match media.frame_sampling {
        FrameSampling::QwenVlUtils => FrameRule::Qwen,
        FrameSampling::BaseInterval => FrameRule::BaseInterval { interval_secs },
        FrameSampling::Meta => FrameRule::Segments { interval_secs },
    };
    let prompt = PromptSettings {
        media: MediaSettings {
            image,
            video,
            rule,
            dynamic_sample: training,
            shuffle_frames,
            seed: settings.run.data_seed,
            epoch: 0,
            missing_audio: match settings.data.missing_audio {
                MissingAudio::Error => omnigrpo_models::MissingAudio::Error,
                MissingAudio::Silence => omnigrpo_models::MissingAudio::Silence,
            },
            limits: limits(settings),
            max_tiles: media.max_anyres_num,
        },
        render: RenderOptions {
            system: settings.prompt.system_prompt.clone(),
            kwargs: settings.prompt.chat_template_kwargs.clone(),
            ..RenderOptions::default()
        },
        max_prompt_length: settings.prompt.max_prompt_length,
        max_completion_length: settings.rollout.max_completion_length,
        stop_strings: settings.rollout.stop_strings.clone(),
    };
    Ok(PromptBuilder::open(checkpoint, prompt)?)
}

/// What reading one medium may cost.
pub fn limits(settings: &Settings) -> Limits {
    Limits {
        timeout: std::time::Duration::from_secs_f64(settings.data.media_timeout_secs),
        ..Limits::default()
    }
}

/// How completions are sampled.
pub fn sampling(settings: &Settings) -> SamplingParams {
    let r = &settings.rollout;
    SamplingParams {
        temperature: r.temperature as f32,
        top_p: r.top_p as f32,
        top_k: r.top_k,
        min_p: r.min_p as f32,
        repetition_penalty: r.repetition_penalty as f32,
        max_completion_length: r.max_completion_length,
        min_completion_length: r.min_completion_length,
        logprob_temperature: Some(r.logprob_temperature as f32),
        seed: settings.run.seed,
    }
}
