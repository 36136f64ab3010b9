//! Converts media to squares, and conversations to prompts.

use std::path::Path;
use std::sync::Arc;

use omnigrpo_text::{ChatTemplate, MediumKind, MediumSegment, MediumTokens};

use super::{SmolVlmConfig, media};
use crate::error::{MAX_TILES, ModelError, Result, VIDEO_MAX_FRAMES, VIDEO_NFRAMES};
use crate::families::reader::ReadMedia;
use crate::families::{IdleSettings, MediumShape, Processor, processor};

/// Tag on both sides of every run of features.
const FAKE: &str = "<fake_token_around_image>";
/// Tags of the features of a whole picture.
const WHOLE: &str = "<fake_token_around_image><global-img>";

/// Template for a checkpoint that does not contain one. It is also the one that `transformers` takes for conversations with a
/// video.
const TEMPLATE: &str = include_str!("template.jinja");

pub(super) struct SmolVlmPrompts {
    pub(super) config: Arc<SmolVlmConfig>,
    pub(super) media: media::MediaReader,
}

impl Processor for SmolVlmPrompts {
    fn reader(&self) -> Option<&dyn ReadMedia> {
        Some(&self.media)
    }

    fn idle_settings(&self) -> IdleSettings {
        media::IDLE
    }

    fn chooses_frames(&self) -> bool {
        self.config.videos
    }

    fn shorten(&self, kind: MediumKind) -> Option<String> {
        match kind {
            MediumKind::Video => Some(format!("lower {VIDEO_MAX_FRAMES} or {VIDEO_NFRAMES}")),
            _ => Some(format!("lower {MAX_TILES}")),
        }
    }

    fn tokens(&self, kind: MediumKind, shape: &MediumShape, times_secs: &[f64]) -> Result<MediumTokens> {
        let text = |text: String| MediumSegment::Text(text);
        let features = || MediumSegment::Features {
            token: self.config.image_token,
            count: self.config.tokens_per_tile(),
        };
        let (marker, segments) = match *shape {
            MediumShape::Frames { count, clip_secs, .. } => {
                if times_secs.len() != count {
                    let times = times_secs.len();
                    return Err(ModelError::shape(format!("a video has {count} frames, but {times} times")));
                }
                let mut segments = vec![text(format!(
                    "You are provided the following series of {} frames from a {} [H:MM:SS] video.\n",
                    words(count),
                    clock(clip_secs)
                ))];
                for time in times_secs {
                    let secs = *time as u64;
                    segments.push(text(format!("\nFrame from {:02}:{:02}:{WHOLE}", secs / 60, secs % 60)));
                    segments.extend([features(), text(FAKE.into())]);
                }
                segments.push(text("\n\n".into()));
                ("<video>", segments)
            }
            MediumShape::Tiles { rows, columns, .. } => {
                let mut segments = Vec::new();
                let cut = rows * columns > 1;
                for row in 1..=rows {
                    for column in 1..=columns {
                        if cut {
                            let tag = format!("{FAKE}<row_{row}_col_{column}>");
                            segments.extend([text(tag), features()]);
                        }
                    }
                    if cut {
                        segments.push(text("\n".into()));
                    }
                }
                let gap = if cut { "\n" } else { "" };
                segments.extend([text(format!("{gap}{WHOLE}")), features(), text(FAKE.into())]);
                ("<image>", segments)
            }
            other => {
                return Err(ModelError::shape(format!(
                    "this model expects squares, but the medium is {other}"
                )));
            }
        };
        Ok(MediumTokens { kind, marker: marker.into(), segments })
    }

    fn placeholder_ids(&self) -> Vec<u32> {
        vec![self.config.image_token]
    }

    /// Reads the chat template. The published template writes nothing for a video. It is changed to write its marker, as the
    /// template does that `transformers` takes for videos.
    fn chat_template(&self, dir: &Path) -> Result<ChatTemplate> {
        processor::chat_template(dir, TEMPLATE, |source| {
            let image = "{{ '<image>' }}";
            let both = format!("{image}{{% elif line['type'] == 'video' %}}{{{{ '<video>' }}}}");
            (self.config.videos && !source.contains("video")).then(|| source.replace(image, &both))
        })
    }

    fn stop_tokens(&self) -> &'static [&'static str] {
        &["<end_of_utterance>"]
    }
}

/// Returns a time as Python's `timedelta` writes it.
fn clock(secs: usize) -> String {
    let (days, secs) = (secs / 86_400, secs % 86_400);
    let days = match days {
        0 => String::new(),
        1 => "1 day, ".into(),
        days => format!("{days} days, "),
    };
    format!("{days}{}:{:02}:{:02}", secs / 3600, secs / 60 % 60, secs % 60)
}

/// Returns a number below a million in English, as the Python package `num2words` writes it.
fn words(n: usize) -> String {
    const SMALL: [&str; 20] = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ];
    const TENS: [&str; 8] = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];
    let joined = |high: String, gap: &str, rest: usize| match rest {
        0 => high,
        rest => format!("{high}{gap}{}", words(rest)),
    };
    match n {
        0..20 => SMALL[n].to_owned(),
        20..100 => joined(TENS[n / 10 - 2].to_owned(), "-", n % 10),
        100..1000 => joined(format!("{} hundred", SMALL[n / 100]), " and ", n % 100),
        _ => {
            let gap = if n % 1000 < 100 { " and " } else { ", " };
            joined(format!("{} thousand", words(n / 1000)), gap, n % 1000)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values: `num2words` 0.5.14.
    #[test]
    fn numbers_are_written_in_english() {
        for (n, expected) in [
            (0, "zero"),
            (8, "eight"),
            (13, "thirteen"),
            (30, "thirty"),
            (64, "sixty-four"),
            (100, "one hundred"),
            (101, "one hundred and one"),
            (768, "seven hundred and sixty-eight"),
            (1000, "one thousand"),
            (1005, "one thousand and five"),
            (2345, "two thousand, three hundred and forty-five"),
            (100_000, "one hundred thousand"),
        ] {
            assert_eq!(words(n), expected);
        }
    }

    #[test]
    fn times_are_written_as_python_does() {
        let written = [4, 61, 3725, 86_399, 86_400, 180_000].map(clock);
        let expected = ["0:00:04", "0:01:01", "1:02:05", "23:59:59", "1 day, 0:00:00", "2 days, 2:00:00"];
        assert_eq!(written, expected);
    }
}
