//! Sound for the families with a Whisper encoder: a part of a file or of a video's audio track, as log-mel features.

use std::path::Path;

use omnigrpo_data::{MediumInfo, MediumRef};
use omnigrpo_media::audio::{AudioClip, AudioRange, LogMel, read_audio};
use omnigrpo_media::{MediaError, VideoSource, probe_video};

use omnigrpo_text::MediumKind;

use super::frames::file;
use super::{MediaSettings, MediumInput, MediumShape, MissingAudio};
use crate::config_json::ConfigJson;
use crate::encoders::whisper::WhisperConfig;
use crate::error::{ModelError, Result};

/// Reads the audio processor of a checkpoint from `processor_config.json`, or else from `preprocessor_config.json`.
///
/// # Errors
/// Returns an error if the file is missing or asks for something unsupported, or its number of bands is not that of the tower.
pub(super) fn processor_of(dir: &Path, num_mels: usize) -> Result<LogMel> {
    let nested = dir.join("processor_config.json");
    let nested =
        if nested.is_file() { ConfigJson::read(&nested)?.section("feature_extractor")? } else { None };
    let mel = match nested {
        Some(json) => LogMel::from_object(&dir.join("processor_config.json"), json.object())?,
        None => LogMel::from_config(&dir.join("preprocessor_config.json"))?,
    };
    match mel.num_mels() {
        got if got == num_mels => Ok(mel),
        got => Err(ModelError::shape(format!(
            "the audio processor has {got} frequency bands, but the audio tower has {num_mels}"
        ))),
    }
}

/// Returns the number of features of a sound.
///
/// # Errors
/// Returns an error if the sound is too short for one feature.
pub(super) fn num_features(config: &WhisperConfig, heard: usize) -> Result<usize> {
    match config.num_rows(heard) {
        0 => Err(ModelError::Medium {
            kind: MediumKind::Audio,
            what: "the sound is too short; expected at least three steps of its spectrogram, mostly 0.03 s",
        }),
        count => Ok(count),
    }
}

/// Plans a sound from its header. If the features depend on its length, and no header states it, the sound is decoded.
///
/// # Errors
/// Returns an error if the file has no sound, unless the settings replace missing sound by silence, or if the requested part is
/// too long or does not exist.
pub fn plan(
    medium: &MediumRef,
    header: &MediumInfo,
    mel: &LogMel,
    settings: &MediaSettings,
) -> Result<MediumShape> {
    let path = file(medium)?;
    let clip_samples = |clip: &AudioClip| resampled(clip.samples.len(), clip.sample_rate_hz, mel);
    let num_samples = match (header.sample_rate_hz, header.duration_secs) {
        (None, _) if settings.missing_audio == MissingAudio::Error => {
            return Err(ModelError::NoSound { path: path.to_owned() });
        }
        (None, _) => clip_samples(&silence(medium, mel, settings)?),
        (Some(rate_hz), length) => {
            let range = range(medium, mel);
            range.check(path, length, &settings.limits)?;
            match length {
                Some(secs) => resampled(range.num_samples(secs, rate_hz), rate_hz, mel),
                None if mel.is_trimmed() => clip_samples(&read_audio(path, &range, &settings.limits)?),
                None => 0,
            }
        }
    };
    let [frames, heard] = mel.frames_of(num_samples);
    Ok(MediumShape::Mel { mels: mel.num_mels(), frames, heard })
}

/// Returns the number of samples after resampling.
fn resampled(num_samples: usize, rate_hz: u32, mel: &LogMel) -> usize {
    (num_samples as u64 * u64::from(mel.sample_rate_hz())).div_ceil(u64::from(rate_hz.max(1))) as usize
}

/// Decodes a sound to features. A sound longer than the window is truncated, a shorter one is followed by silence.
pub fn prepare(medium: &MediumRef, mel: &LogMel, settings: &MediaSettings) -> Result<MediumInput> {
    let clip = match read_audio(file(medium)?, &range(medium, mel), &settings.limits) {
        Err(MediaError::NoAudioTrack { .. }) if settings.missing_audio == MissingAudio::Silence => {
            silence(medium, mel, settings)?
        }
        Err(MediaError::NoAudioTrack { path }) => return Err(ModelError::NoSound { path }),
        clip => clip?,
    };
    let features = mel.features_of(&clip)?;
    Ok(MediumInput {
        kind: medium.kind,
        shape: MediumShape::Mel {
            mels: features.num_mels,
            frames: features.num_frames,
            heard: features.num_heard,
        },
        data: features.data,
        seconds_per_grid: 0.0,
        frame_times_secs: Vec::new(),
        of_clip: medium.options.of_clip,
    })
}

/// Returns the silence that replaces the sound of a clip without an audio track. It is as long as the window, or as long as the clip
/// if silence is trimmed.
fn silence(medium: &MediumRef, mel: &LogMel, settings: &MediaSettings) -> Result<AudioClip> {
    let rate_hz = mel.sample_rate_hz();
    if !mel.is_trimmed() {
        return Ok(AudioClip::silence(mel.window_s(), rate_hz));
    }
    let clip = probe_video(&VideoSource::from_path(file(medium)?), None, &settings.limits)?;
    let num_samples = range(medium, mel).num_samples(clip.duration_s, rate_hz);
    Ok(AudioClip { samples: vec![0.0; num_samples], sample_rate_hz: rate_hz })
}

fn range(medium: &MediumRef, mel: &LogMel) -> AudioRange {
    AudioRange {
        start_s: medium.options.video_start,
        end_s: medium.options.video_end,
        keep_s: Some(mel.window_s()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use omnigrpo_data::{MediumOptions, MediumSource};

    use super::*;
    use crate::families::probe_medium;

    fn sound(name: &str) -> MediumRef {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../media/tests/data/audio");
        let path: PathBuf = dir.join(name);
        MediumRef {
            kind: MediumKind::Audio,
            source: MediumSource::Path(path),
            options: MediumOptions::default(),
        }
    }

    #[test]
    fn the_sound_of_a_video_becomes_features() {
        let (mel, settings) = (LogMel::whisper(80).unwrap(), MediaSettings::default());
        let mut medium = sound("clip.mp4");
        let header = probe_medium(&medium, &settings.limits).unwrap();
        assert_eq!(header.sample_rate_hz, Some(22050));
        let shape = plan(&medium, &header, &mel, &settings).unwrap();
        let heard = prepare(&medium, &mel, &settings).unwrap();
        assert_eq!((heard.shape, shape), (shape, MediumShape::Mel { mels: 80, frames: 3000, heard: 3000 }));
        assert_eq!(heard.data.len(), 80 * 3000);
        // The file has a fifth of a second of speech: its frames are loud, all others are quiet.
        let data = &heard.data;
        let loudest = |frames: std::ops::Range<usize>| {
            let bins = (0..80).flat_map(|m| frames.clone().map(move |t| data[m * 3000 + t]));
            bins.fold(f32::MIN, f32::max)
        };
        assert!(loudest(0..25) > 1.0 && loudest(30..3000) < loudest(0..25) - 1.0);

        // A part that does not exist is rejected after the header is read.
        medium.options.video_start = Some(3.0);
        let error = plan(&medium, &header, &mel, &settings).unwrap_err().to_string();
        assert!(error.contains("clip.mp4") && error.contains("within the sound"), "{error}");
    }

    #[test]
    fn silence_comes_only_when_asked_for() {
        let (mel, settings) = (LogMel::whisper(80).unwrap(), MediaSettings::default());
        let medium = sound("mute.mp4");
        let header = probe_medium(&medium, &settings.limits).unwrap();
        for error in [plan(&medium, &header, &mel, &settings).err(), prepare(&medium, &mel, &settings).err()]
        {
            assert!(error.unwrap().to_string().contains("no audio track"));
        }
        let silent = MediaSettings { missing_audio: MissingAudio::Silence, ..settings };
        plan(&medium, &header, &mel, &silent).unwrap();
        let heard = prepare(&medium, &mel, &silent).unwrap();
        assert!(heard.data.iter().all(|&x| x == -1.5));
        // A missing file is not replaced by silence.
        assert!(prepare(&sound("missing.wav"), &mel, &silent).is_err());
    }
}
