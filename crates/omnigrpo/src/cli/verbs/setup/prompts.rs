//! Prompt builders of a command.

use anyhow::Result;
use omnigrpo_models::{Checkpoint, MediaSettings, PromptBuilder, PromptSettings};

use crate::settings::Settings;

/// Returns the builder of prompts for a checkpoint. With `training`, the number of frames of a row may be random.
pub fn prompts(settings: &Settings, checkpoint: &Checkpoint, training: bool) -> Result<PromptBuilder> {
    prompts_with(settings, checkpoint, training, false)
}

/// Returns the builder of training prompts whose video frames are shuffled.
pub fn shuffled_prompts(settings: &Settings, checkpoint: &Checkpoint) -> Result<PromptBuilder> {
    prompts_with(settings, checkpoint, true, true)
}

fn prompts_with(
    settings: &Settings,
    checkpoint: &Checkpoint,
    dynamic_sample: bool,
    shuffle_frames: bool,
) -> Result<PromptBuilder> {
    let prompts = settings.prompts.clone();
    let media = MediaSettings { dynamic_sample, shuffle_frames, ..prompts.media };
    Ok(PromptBuilder::open(checkpoint, PromptSettings { media, ..prompts })?)
}

/// Returns the memory of decoded media that the settings give, bytes.
pub fn media_bytes(settings: &Settings) -> Option<u64> {
    const GIB: f64 = (1u64 << 30) as f64;
    settings.data.mm_processor_cache_gb.map(|given| (given * GIB) as u64)
}
