//! How media are read where a row does not say otherwise, and what is drawn at random about them.

use omnigrpo_data::{MediumOptions, MediumRef};
use omnigrpo_media::Limits;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// How frames of a video are chosen where the row does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FrameRule {
    /// By rate, as `qwen-vl-utils`.
    #[default]
    Qwen,
    /// One frame per interval, as `qwen-vl-finetune`.
    BaseInterval,
    /// From each segment that the row's `meta` lists; by interval for rows without.
    Segments,
    /// By rate, as the published video processor, which sizes frames too; of families whose processor does.
    Processor,
}

/// Treatment of a video without an audio track whose sound is requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissingAudio {
    /// An error: the row is bad.
    #[default]
    Error,
    /// Silence.
    Silence,
}

/// Which medium it is that something is drawn for. Where its files lie does not count, so that copied data are the same data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediumKey {
    /// Number of its row in the dataset.
    pub row: u64,
    /// Number of the medium in its row, from 0.
    pub index: u64,
    /// The pass over the data, from 0. Numbers of frames are drawn anew in each; the order of frames stays.
    pub epoch: u64,
}

/// How media are read where a row does not say otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct MediaSettings {
    /// Sizes of images. What is open follows the checkpoint's processor.
    pub image: MediumOptions,
    /// Frames and sizes of videos. What is open follows `qwen-vl-utils`.
    pub video: MediumOptions,
    /// How frames are chosen.
    pub rule: FrameRule,
    /// Seconds between frames, for the rules that go by interval.
    pub base_interval_secs: f64,
    /// Whether rows with `meta.dynamic_sample` draw their number of frames (training) or take the largest.
    pub dynamic_sample: bool,
    /// Whether the frames of videos come in another order than they were filmed in, their times unchanged.
    pub shuffle_frames: bool,
    /// Keys the draw and the order.
    pub seed: u64,
    /// The medium that is read: keys the draw and the order.
    pub key: MediumKey,
    /// Treatment of a file without sound.
    pub missing_audio: MissingAudio,
    /// Limits of one medium.
    pub limits: Limits,
    /// Most tiles of an image, for families that tile. What is open follows the checkpoint.
    pub max_tiles: Option<u32>,
}

/// Frames of a video where nothing is said.
fn frames() -> MediumOptions {
    MediumOptions { fps: Some(2.0), min_frames: Some(4), max_frames: Some(8), ..MediumOptions::default() }
}

impl Default for MediaSettings {
    /// Sizes as the checkpoint's processor says; of a video two frames a second, from four to eight, each of which costs
    /// tokens.
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
            limits: Limits::default(),
            max_tiles: None,
        }
    }
}

impl MediaSettings {
    /// The fields of those settings that say something else than the defaults.
    pub(super) fn given(&self) -> impl Iterator<Item = &'static str> {
        let (image, video, usual) = (&self.image, &self.video, frames());
        [
            ("max_tiles", self.max_tiles.is_some()),
            ("image.min_pixels", image.min_pixels.is_some()),
            ("image.max_pixels", image.max_pixels.is_some()),
            ("video.min_pixels", video.min_pixels.is_some()),
            ("video.max_pixels", video.max_pixels.is_some()),
            ("video.total_pixels", video.total_pixels.is_some()),
            ("video.fps", video.fps.is_some() && video.fps != usual.fps),
            ("video.min_frames", video.min_frames.is_some() && video.min_frames != usual.min_frames),
            ("video.max_frames", video.max_frames.is_some() && video.max_frames != usual.max_frames),
            ("rule", self.rule != FrameRule::default()),
        ]
        .into_iter()
        .filter_map(|(field, given)| given.then_some(field))
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

    /// The number of frames that is drawn for a medium; none where its number is not left to chance.
    pub(crate) fn drawn(&self, medium: &MediumRef) -> Option<u32> {
        let segments = medium.options.segments.as_ref().filter(|s| s.dynamic_sample)?;
        let asked_for = self.dynamic_sample && self.rule == FrameRule::Segments;
        asked_for.then(|| self.draw(segments.min_frames, segments.max_frames))
    }

    /// Brings decoded frames into the order asked for: as they are, or one that depends on the seed and the medium
    /// alone and is never theirs.
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

    /// Random numbers keyed by the seed, the row and the medium, a stream per use: even ones for draws, 1 for the order.
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
    /// Fields of [`MediaSettings`]: `max_tiles`, `video.max_frames`.
    pub fields: &'static [&'static str],
    /// Why, and what to set instead.
    pub why: &'static str,
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
        // Each of the four about a hundred times; the standard deviation is 9.
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
