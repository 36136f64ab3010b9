//! Sound for the families with a Whisper encoder: a part of a file or of a video's audio track, as log-mel features.

use omnigrpo_data::{MediumInfo, MediumRef};
use omnigrpo_media::MediaError;
use omnigrpo_media::audio::{AudioClip, AudioRange, LogMel, read_audio};

use super::frames::file;
use super::{MediaSettings, MediumInput, MediumShape, MissingAudio};
use crate::error::{ModelError, Result};

/// Plans a sound from its header.
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
    if header.sample_rate_hz.is_some() {
        range(medium, mel).check(path, header.duration_secs, &settings.limits)?;
    } else if settings.missing_audio == MissingAudio::Error {
        return Err(ModelError::NoSound { path: path.to_owned() });
    }
    Ok(MediumShape::Mel { mels: mel.num_mels(), frames: mel.num_frames() })
}

/// Decodes a sound to features. A sound longer than the window is truncated, a shorter one is followed by silence.
pub fn prepare(medium: &MediumRef, mel: &LogMel, settings: &MediaSettings) -> Result<MediumInput> {
    let clip = match read_audio(file(medium)?, &range(medium, mel), &settings.limits) {
        Err(MediaError::NoAudioTrack { .. }) if settings.missing_audio == MissingAudio::Silence => {
            AudioClip::silence(mel.window_s(), mel.sample_rate_hz())
        }
        Err(MediaError::NoAudioTrack { path }) => return Err(ModelError::NoSound { path }),
        clip => clip?,
    };
    let features = mel.features_of(&clip)?;
    Ok(MediumInput {
        kind: medium.kind,
        shape: MediumShape::Mel { mels: features.num_mels, frames: features.num_frames },
        data: features.data,
        seconds_per_grid: 0.0,
        frame_times_secs: Vec::new(),
    })
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
    use std::path::{Path, PathBuf};

    use omnigrpo_data::{MediumOptions, MediumSource};
    use omnigrpo_text::MediumKind;

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
        assert_eq!((heard.shape, shape), (shape, MediumShape::Mel { mels: 80, frames: 3000 }));
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
