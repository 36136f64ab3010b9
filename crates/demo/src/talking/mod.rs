//! Talking clips: short videos of a drawn face that speaks with a synthetic voice, for models that see and hear.
//!
//! | file | rows |
//! |---|---|
//! | `sft.jsonl` | like EMER: the answer with its reasons, `<think>…</think>` and `<answer>…</answer>` |
//! | `train.jsonl` | like MAFW and DFEW: the emotion alone |
//! | `eval.jsonl` | held-out rows like those of `train.jsonl` |
//! | `eval_other_sound.jsonl` | held-out rows of category `sound`, each with the sound of a clip of another emotion |
//! | `eval_other_picture.jsonl` | held-out rows of category `picture`, each with the picture of a clip of another emotion |
//!
//! The emotion is one of the seven of DFEW. Column `category` names the media that show it: face and voice (`both`), only the
//! voice (`sound`: the face is neutral), or only the face (`picture`: the voice is neutral). A model that cannot hear can only
//! guess among six emotions on `sound`, as can a model that cannot see on `picture`. The last two files keep the solution of each
//! row, so a model that uses the exchanged medium answers them wrong.
//!
//! A clip is a QuickTime file of one second: eight PNG frames of 32 × 32 pixels and 16-bit sound at 16 kHz, without loss. The
//! same seed gives the same bytes.

mod face;
mod mov;
mod voice;

use std::fs;
use std::io::Cursor;
use std::path::Path;

use image::{ImageFormat, RgbImage};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::random::{pick, shuffle, stream};
use crate::{DemoError, Sizes};

pub use voice::SAMPLE_RATE_HZ;

/// Frames per second.
pub const FPS: u32 = 8;
/// Number of frames of a clip.
pub const NUM_FRAMES: usize = 8;

/// Question that R1-Omni uses for every clip.
const QUESTION: &str = "As an emotional recognition expert; throughout the video, which emotion conveyed by the characters is the most obvious to you?";
/// Text that R1-Omni adds to a question if it expects an answer with reasons.
const FORM: &str =
    "Output the thinking process in <think> </think> and final emotion in <answer> </answer> tags.";

/// One of the seven emotions of DFEW, with its voice and its face.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emotion {
    /// High and lively voice; smile.
    Happy,
    /// Rising voice; open mouth, wide eyes.
    Surprise,
    /// Even voice; calm face.
    Neutral,
    /// Loud, fast and rough voice; frown and slanted brows.
    Angry,
    /// Low and creaking voice; crooked mouth, narrow eyes.
    Disgust,
    /// Low, slow and falling voice; corners of the mouth down.
    Sad,
    /// High and trembling voice; wide eyes, tight mouth.
    Fear,
}

impl Emotion {
    /// All emotions. `Neutral` is the first.
    pub const ALL: [Self; 7] =
        [Self::Neutral, Self::Happy, Self::Surprise, Self::Angry, Self::Disgust, Self::Sad, Self::Fear];

    /// Returns the label used in the rows.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Happy => "happy",
            Self::Surprise => "surprise",
            Self::Neutral => "neutral",
            Self::Angry => "angry",
            Self::Disgust => "disgust",
            Self::Sad => "sad",
            Self::Fear => "fear",
        }
    }

    const fn face(self) -> &'static str {
        match self {
            Self::Happy => "The face smiles.",
            Self::Surprise => "The mouth and the eyes are wide open.",
            Self::Neutral => "The face is calm.",
            Self::Angry => "The face frowns and is red.",
            Self::Disgust => "The mouth is crooked and the eyes are narrow.",
            Self::Sad => "The corners of the mouth hang down.",
            Self::Fear => "The face is pale and the eyes are wide.",
        }
    }

    const fn voice(self) -> &'static str {
        match self {
            Self::Happy => "The voice is high and lively.",
            Self::Surprise => "The voice glides up.",
            Self::Neutral => "The voice is even.",
            Self::Angry => "The voice is loud and rough.",
            Self::Disgust => "The voice is low and creaks.",
            Self::Sad => "The voice is low and falls.",
            Self::Fear => "The voice is high and trembles.",
        }
    }
}

/// Media of a clip that show the emotion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Category {
    /// Face and voice.
    Both,
    /// Voice only; the face is neutral.
    Sound,
    /// Face only; the voice is neutral.
    Picture,
}

impl Category {
    /// All categories. Rows cycle through them in this order.
    pub const ALL: [Self; 3] = [Self::Both, Self::Sound, Self::Picture];

    /// Returns the value of the column `category`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Sound => "sound",
            Self::Picture => "picture",
        }
    }
}

/// Content of one clip.
struct Clip {
    name: String,
    category: Category,
    emotion: Emotion,
}

/// Writes the rows to `dir` and the clips to `dir/clips`. Overwrites existing files.
///
/// # Errors
/// Returns an error if a file cannot be written.
pub fn generate_talking(dir: &Path, seed: u64, sizes: Sizes) -> Result<(), DemoError> {
    let folder = dir.join("clips");
    fs::create_dir_all(&folder).map_err(|source| DemoError::Write { path: folder.clone(), source })?;
    for (number, (split, num_rows)) in
        [("sft", sizes.sft), ("train", sizes.train), ("eval", sizes.eval)].into_iter().enumerate()
    {
        // These keys differ from those of the pictures, this crate's other task, so that the two share no random numbers.
        let split_key = 100 + number as u8;
        let mut clips = Vec::with_capacity(num_rows);
        for row in 0..num_rows {
            let category = Category::ALL[row % 3];
            let emotion = match category {
                Category::Both => Emotion::ALL[row / 3 % 7],
                Category::Sound | Category::Picture => Emotion::ALL[1 + row / 3 % 6],
            };
            let clip = Clip { name: format!("clips/{split}_{row:04}.mov"), category, emotion };
            write(&dir.join(&clip.name), &movie(&clip, &mut stream(seed, split_key, row as u64, 0))?)?;
            clips.push(clip);
        }
        shuffle(&mut stream(seed, split_key, u64::MAX, 0), &mut clips);
        let row = if split == "sft" { with_reasons } else { label_only };
        write_rows(&dir.join(format!("{split}.jsonl")), clips.iter().map(row))?;
        if split == "eval" {
            for (file, category) in
                [("eval_other_sound.jsonl", Category::Sound), ("eval_other_picture.jsonl", Category::Picture)]
            {
                write_rows(&dir.join(file), exchanged(&clips, category).into_iter())?;
            }
        }
    }
    Ok(())
}

/// Returns the bytes of a clip's file.
fn movie(clip: &Clip, rng: &mut ChaCha8Rng) -> Result<Vec<u8>, DemoError> {
    let (face, voice) = match clip.category {
        Category::Both => (clip.emotion, clip.emotion),
        Category::Sound => (Emotion::Neutral, clip.emotion),
        Category::Picture => (clip.emotion, Emotion::Neutral),
    };
    let samples = voice::speak(voice, rng);
    let frames = face::frames(face, &loudness(&samples), rng);
    let encoded = frames.iter().map(|frame| png(&clip.name, frame)).collect::<Result<Vec<_>, _>>()?;
    Ok(mov::file(&encoded, face::SIDE_PX, FPS, &samples, SAMPLE_RATE_HZ))
}

/// Returns the loudness during each frame, from 0 to 1; the mouth opens accordingly.
fn loudness(samples: &[i16]) -> Vec<f64> {
    let per_frame = samples.len().div_ceil(NUM_FRAMES).max(1);
    let means: Vec<f64> = samples
        .chunks(per_frame)
        .map(|part| part.iter().map(|&s| f64::from(s).abs()).sum::<f64>() / part.len() as f64)
        .collect();
    let most = means.iter().copied().fold(1.0, f64::max);
    means.into_iter().map(|mean| mean / most).collect()
}

fn png(name: &str, frame: &RgbImage) -> Result<Vec<u8>, DemoError> {
    let mut bytes = Cursor::new(Vec::new());
    frame
        .write_to(&mut bytes, ImageFormat::Png)
        .map_err(|source| DemoError::Encode { path: name.into(), source })?;
    Ok(bytes.into_inner())
}

fn conversation(question: &str, answer: &str) -> Value {
    json!([
        {"from": "human", "value": format!("<video>\n<audio>\n{question}")},
        {"from": "gpt", "value": answer},
    ])
}

fn with_reasons(clip: &Clip) -> Value {
    let (face, voice) = match clip.category {
        Category::Both => (clip.emotion, clip.emotion),
        Category::Sound => (Emotion::Neutral, clip.emotion),
        Category::Picture => (clip.emotion, Emotion::Neutral),
    };
    let label = clip.emotion.label();
    let answer = format!("<think>{} {}</think>\n<answer>{label}</answer>", face.face(), voice.voice());
    json!({
        "id": id(clip), "video": clip.name, "category": clip.category.name(), "label": label,
        "conversations": conversation(&format!("{QUESTION}\n{FORM}"), &answer),
    })
}

fn label_only(clip: &Clip) -> Value {
    json!({
        "id": id(clip), "video": clip.name, "category": clip.category.name(),
        "conversations": conversation(QUESTION, clip.emotion.label()),
    })
}

fn id(clip: &Clip) -> &str {
    clip.name.trim_start_matches("clips/").trim_end_matches(".mov")
}

/// Returns the rows of a category. In each row, the medium that shows the emotion is taken from the next row with another
/// emotion.
fn exchanged(clips: &[Clip], category: Category) -> Vec<Value> {
    let of: Vec<&Clip> = clips.iter().filter(|clip| clip.category == category).collect();
    let rows = of.iter().enumerate().filter_map(|(i, clip)| {
        let other =
            of.iter().cycle().skip(i + 1).take(of.len()).find(|other| other.emotion != clip.emotion)?;
        let mut row = label_only(clip);
        let (picture, sound) = match category {
            Category::Picture => (&other.name, &clip.name),
            Category::Both | Category::Sound => (&clip.name, &other.name),
        };
        row["video"] = json!(picture);
        row["audio"] = json!(sound);
        Some(row)
    });
    rows.collect()
}

fn write_rows(path: &Path, rows: impl Iterator<Item = Value>) -> Result<(), DemoError> {
    let text: String = rows.map(|row| format!("{row}\n")).collect();
    write(path, text.as_bytes())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), DemoError> {
    fs::write(path, bytes).map_err(|source| DemoError::Write { path: path.to_owned(), source })
}

/// Returns a random number from `low` to `high`.
fn real(rng: &mut ChaCha8Rng, low: f64, high: f64) -> f64 {
    low + (high - low) * pick(rng, 1 << 16) as f64 / 65_536.0
}

#[cfg(test)]
mod tests;
