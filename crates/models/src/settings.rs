//! Settings that messages name.

use omnigrpo_guard::Setting;

use crate::{LoraConfig, MediaSettings, PromptSettings};

omnigrpo_guard::settings! {
    LORA_DROPOUT = LoraConfig.dropout;
    LORA_RANK = LoraConfig.rank;
    LORA_TARGETS = LoraConfig.targets;
    BASE_INTERVAL_SECS = MediaSettings.base_interval_secs;
    IMAGE_MAX_PIXELS = MediaSettings.image.max_pixels;
    IMAGE_MIN_PIXELS = MediaSettings.image.min_pixels;
    MAX_TILES = MediaSettings.max_tiles;
    RULE = MediaSettings.rule;
    VIDEO_FPS = MediaSettings.video.fps;
    VIDEO_MAX_FRAMES = MediaSettings.video.max_frames;
    VIDEO_MAX_PIXELS = MediaSettings.video.max_pixels;
    VIDEO_MIN_FRAMES = MediaSettings.video.min_frames;
    VIDEO_MIN_PIXELS = MediaSettings.video.min_pixels;
    VIDEO_NFRAMES = MediaSettings.video.nframes;
    VIDEO_TOTAL_PIXELS = MediaSettings.video.total_pixels;
    MAX_COMPLETION_LENGTH = PromptSettings.max_completion_length;
    MAX_PROMPT_LENGTH = PromptSettings.max_prompt_length;
    LLM = Selection: llm;
    PATTERNS = Selection: patterns;
}

/// Returns the setting of a [`FamilyOption`](crate::FamilyOption).
#[must_use]
pub const fn of_family(option: &'static str) -> Setting {
    Setting { plan: "FamilyOption", field: option }
}
