//! Settings for reading media, which rows may override, and random choices about media.

use crate::error::*;
use omnigrpo_data::{MediumOptions, MediumRef};
use omnigrpo_guard::Setting;
use omnigrpo_media::{Limits, Orientation};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Rule that chooses the frames of a video, unless the row gives its own choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub enum FrameRule {
    /// Frames at a rate, as in `qwen-vl-utils`.
    #[default]
    Qwen,
    /// One frame per interval, as in `qwen-vl-finetune`.
    BaseInterval,
    /// Frames from each segment that the row's `meta` lists; by interval for rows without segments.
    Segments,
    /// Frames at a rate, as in the published video processor, which also chooses their size. Only some families support it.
    Processor,
}

/// Treatment of a video without an audio track whose sound is requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub enum MissingAudio {
    /// An error, because the row is invalid.
    #[default]
    Error,
    /// Silence.
    Silence,
}

/// Key of a medium for random choices. Paths are not part of it, so that copied data gets the same choices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MediumKey {
    /// Index of the row in the dataset.
    pub row: u64,
    /// Index of the medium in its row, from 0.
    pub index: u64,
    /// Pass over the data, from 0. Numbers of frames are drawn again in each pass; the order of frames is the same in all.
    pub epoch: u64,
}

/// Settings for reading media, which rows may override.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct MediaSettings {
    /// Sizes of images. Unset fields follow the checkpoint's processor.
    pub image: MediumOptions,
    /// Frames and sizes of videos. Unset fields follow `qwen-vl-utils`.
    pub video: MediumOptions,
    /// Rule that chooses frames.
    pub rule: FrameRule,
    /// Seconds between frames, for rules that work by interval.
    pub base_interval_secs: f64,
    /// Whether the number of frames of rows with `meta.dynamic_sample` is random, as in training, or the largest possible.
    pub dynamic_sample: bool,
    /// Whether the frames of videos are shuffled. Their times do not change.
    pub shuffle_frames: bool,
    /// Seed of the random numbers and orders of frames.
    pub seed: u64,
    /// Key of the medium to read, for the random numbers and orders of frames.
    pub key: MediumKey,
    /// Treatment of a file without sound.
    pub missing_audio: MissingAudio,
    /// Form in which pictures and frames are given: turned upright, or as they are stored.
    pub orientation: Orientation,
    /// Limits of one medium.
    pub limits: Limits,
    /// Largest number of tiles of an image, for families that use tiles. If unset, it follows the checkpoint.
    pub max_tiles: Option<u32>,
}

/// Returns the default frames of a video.
fn frames() -> MediumOptions {
    MediumOptions { fps: Some(2.0), min_frames: Some(4), max_frames: Some(8), ..MediumOptions::default() }
}

impl Default for MediaSettings {
    /// Returns sizes that follow the checkpoint's processor. A video has two frames a second, from four to eight, since each
    /// frame costs tokens.
    fn default() -> Self {
        Self {
            image: MediumOptions::default(),
            video: frames(),
            rule: FrameRule::default(),
            base_interval_secs: 2.0,
            dynamic_sample: false,
            shuffle_frames: false,
            seed: 0,
            key: MediumKey::default(),
            missing_audio: MissingAudio::default(),
            orientation: Orientation::default(),
            limits: Limits::default(),
            max_tiles: None,
        }
    }
}

impl MediaSettings {
    /// Returns those settings that differ from the defaults.
    pub(super) fn given(&self) -> impl Iterator<Item = Setting> {
        let (image, video, usual) = (&self.image, &self.video, frames());
        [
            (MAX_TILES, self.max_tiles.is_some()),
            (IMAGE_MIN_PIXELS, image.min_pixels.is_some()),
            (IMAGE_MAX_PIXELS, image.max_pixels.is_some()),
            (VIDEO_MIN_PIXELS, video.min_pixels.is_some()),
            (VIDEO_MAX_PIXELS, video.max_pixels.is_some()),
            (VIDEO_TOTAL_PIXELS, video.total_pixels.is_some()),
            (VIDEO_FPS, video.fps.is_some() && video.fps != usual.fps),
            (VIDEO_MIN_FRAMES, video.min_frames.is_some() && video.min_frames != usual.min_frames),
            (VIDEO_MAX_FRAMES, video.max_frames.is_some() && video.max_frames != usual.max_frames),
            (RULE, self.rule != FrameRule::default()),
        ]
        .into_iter()
        .filter_map(|(setting, given)| given.then_some(setting))
    }

    /// Returns the same settings for one medium.
    pub(crate) fn keyed(&self, key: MediumKey) -> Self {
        Self { key, ..self.clone() }
    }

    /// Draws a number from `min` to `max`.
    fn draw(&self, min: u32, max: u32) -> u32 {
        let span = u64::from(max.saturating_sub(min)) + 1;
        min + (self.stream(self.key.epoch << 1).next_u64() % span) as u32
    }

    /// Returns the random number of frames of a medium, or `None` if its number is not random.
    pub(crate) fn drawn(&self, medium: &MediumRef) -> Option<u32> {
        let segments = medium.options.segments.as_ref().filter(|s| s.dynamic_sample)?;
        let asked_for = self.dynamic_sample && self.rule == FrameRule::Segments;
        asked_for.then(|| self.draw(segments.min_frames, segments.max_frames))
    }

    /// Puts decoded frames into the required order: unchanged, or shuffled. A shuffled order depends only on the seed and the
    /// medium, and always differs from the original order.
    pub(crate) fn order<T>(&self, frames: &mut [T]) {
        if !self.shuffle_frames || frames.len() < 2 {
            return;
        }
        let mut random = self.stream(1);
        let mut moved = false;
        for last in (1..frames.len()).rev() {
            let pick = (random.next_u64() % (last as u64 + 1)) as usize;
            frames.swap(last, pick);
            moved |= pick != last;
        }
        if !moved {
            frames.rotate_left(1);
        }
    }

    /// Returns random numbers for the seed, the row and the medium. Each use has its own stream: an even one for numbers of
    /// frames, 1 for the order.
    fn stream(&self, purpose: u64) -> ChaCha8Rng {
        let mut key = [0u8; 32];
        for (slot, part) in
            key.as_chunks_mut::<8>().0.iter_mut().zip([self.seed, self.key.row, self.key.index])
        {
            *slot = part.to_le_bytes();
        }
        let mut random = ChaCha8Rng::from_seed(key);
        random.set_stream(purpose);
        random
    }
}

/// Settings that a family does not read.
#[derive(Clone, Copy, Debug)]
pub struct IdleSettings {
    /// Fields of [`MediaSettings`].
    pub fields: &'static [Setting],
    /// Function that returns the reason, and an alternative setting.
    pub why: fn() -> String,
}

impl IdleSettings {
    /// Fields with the sizes and the number of pictures and frames, and with the rule that chooses frames.
    pub(super) const SIZES: &[Setting] = &[
        MAX_TILES,
        IMAGE_MIN_PIXELS,
        IMAGE_MAX_PIXELS,
        VIDEO_MIN_PIXELS,
        VIDEO_MAX_PIXELS,
        VIDEO_TOTAL_PIXELS,
        VIDEO_FPS,
        VIDEO_MIN_FRAMES,
        VIDEO_MAX_FRAMES,
        RULE,
        BASE_INTERVAL_SECS,
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_drawn_anew_for_every_medium_and_epoch() {
        let draw = |seed: u64, row: u64, index: u64, epoch: u64| {
            let key = MediumKey { row, index, epoch };
            MediaSettings { seed, key, ..MediaSettings::default() }.draw(3, 6)
        };
        let (mut seen, mut of_rows) = ([0; 4], [0; 4]);
        for n in 0..400 {
            assert_eq!(draw(7, 5, 1, n), draw(7, 5, 1, n));
            seen[draw(7, 5, 1, n) as usize - 3] += 1;
            of_rows[draw(7, n, 1, 5) as usize - 3] += 1;
        }
        // Each of the four numbers is drawn about a hundred times; the standard deviation is 9.
        for seen in [seen, of_rows] {
            assert!(seen.iter().all(|n| (60..140).contains(n)), "{seen:?}");
        }
        assert!((0..50).any(|epoch| draw(7, 5, 1, epoch) != draw(8, 5, 1, epoch)));
        assert!((0..50).any(|epoch| draw(7, 5, 1, epoch) != draw(7, 5, 0, epoch)));
        assert!((0..50).any(|epoch| draw(7, 5, 1, epoch) != draw(7, 1, 5, epoch)));
    }

    #[test]
    fn an_order_is_never_the_old_one_and_stays_over_epochs() {
        for seed in 0..50 {
            let of = |epoch: u64| {
                let key = MediumKey { row: seed / 7, index: 0, epoch };
                MediaSettings { shuffle_frames: true, seed, key, ..MediaSettings::default() }
            };
            for num in 2..5 {
                let plain: Vec<usize> = (0..num).collect();
                let [mut order, mut later] = [plain.clone(), plain.clone()];
                of(0).order(&mut order);
                of(3).order(&mut later);
                assert_eq!(order, later);
                assert_ne!(order, plain);
                order.sort_unstable();
                assert_eq!(order, plain);
            }
            of(0).order(&mut [0]);
        }
    }
}
