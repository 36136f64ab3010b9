//! Talking clips: short videos of a drawn face that speaks with a synthetic voice, for models that see and hear.
//!
//! | file | rows |
//! |---|---|
//! | `sft.jsonl` | in the manner of EMER: the answer with its reasons, `<think>…</think>` and `<answer>…</answer>` |
//! | `train.jsonl` | in the manner of MAFW and DFEW: the emotion alone |
//! | `eval.jsonl` | the same, held out |
//! | `eval_other_sound.jsonl` | held-out rows of category `sound`, each with the sound of a clip of another emotion |
//! | `eval_other_picture.jsonl` | held-out rows of category `picture`, each with the picture of a clip of another emotion |
//!
//! The emotion is one of the seven of DFEW. Column `category` says where it is to be found: in face and voice (`both`), in the
//! voice alone (`sound`: the face is neutral), or in the face alone (`picture`: the voice is neutral). Who cannot hear can only
//! guess among six on `sound`, who cannot see on `picture`. The two last files keep the solution of the row: who
//! uses the medium in question is wrong there.
//!
//! A clip is a QuickTime file of one second: eight PNG frames of 32 pixels and 16-bit sound at 16 kHz, without loss. The
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

use crate::DemoError;
use crate::draw::{pick, shuffle, stream};

pub use voice::SAMPLE_RATE_HZ;

/// Frames per second.
pub const FPS: u32 = 8;
/// Frames of a clip.
pub const NUM_FRAMES: usize = 8;

/// The question that R1-Omni asks of every clip.
const QUESTION: &str = "As an emotional recognition expert; throughout the video, which emotion conveyed by the characters is the most obvious to you?";
/// Text that R1-Omni adds where it expects an answer with reasons.
const FORM: &str =
    "Output the thinking process in <think> </think> and final emotion in <answer> </answer> tags.";

/// An emotion of DFEW.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emotion {
    /// High and lively; smiles.
    Happy,
    /// Glides up; open mouth, wide eyes.
    Surprise,
    /// Even; calm.
    Neutral,
    /// Loud, fast and rough; frowns under slanted brows.
    Angry,
    /// Low and creaking; crooked mouth, narrow eyes.
    Disgust,
    /// Low, slow and falling; corners of the mouth down.
    Sad,
    /// High and trembling; wide eyes, tight mouth.
    Fear,
}

impl Emotion {
    /// All of them; the last six but one are not neutral.
    pub const ALL: [Self; 7] =
        [Self::Neutral, Self::Happy, Self::Surprise, Self::Angry, Self::Disgust, Self::Sad, Self::Fear];

    /// The label in the rows.
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

/// Where the emotion is to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Category {
    /// In face and voice.
    Both,
    /// In the voice; the face is neutral.
    Sound,
    /// In the face; the voice is neutral.
    Picture,
}

impl Category {
    /// All categories, in turn.
    pub const ALL: [Self; 3] = [Self::Both, Self::Sound, Self::Picture];

    /// The word in the rows.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Sound => "sound",
            Self::Picture => "picture",
        }
    }
}

/// Rows per file. Multiples of 126 give every emotion of every category equally often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TalkingSizes {
    /// Rows of `sft.jsonl`.
    pub sft: usize,
    /// Rows of `train.jsonl`.
    pub train: usize,
    /// Rows of `eval.jsonl`.
    pub eval: usize,
}

impl Default for TalkingSizes {
    /// The sizes of the recipe in `examples/humanomni`: few rows with reasons, so that there is much left to learn from labels.
    fn default() -> Self {
        Self { sft: 42, train: 504, eval: 252 }
    }
}

/// Content of one clip.
struct Clip {
    name: String,
    category: Category,
    emotion: Emotion,
}

/// Writes the rows and, in `clips/`, the clips. What is there is written over.
///
/// # Errors
/// A file that cannot be written.
pub fn generate_talking(dir: &Path, seed: u64, sizes: TalkingSizes) -> Result<(), DemoError> {
    let folder = dir.join("clips");
    fs::create_dir_all(&folder).map_err(|source| DemoError::Write { path: folder.clone(), source })?;
    for (number, (split, num_rows)) in
        [("sft", sizes.sft), ("train", sizes.train), ("eval", sizes.eval)].into_iter().enumerate()
    {
        // Beyond the streams of the pictures of this crate's other task.
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

/// The bytes of a clip.
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

/// Loudness during each frame, from 0 to 1: the mouth follows it.
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

/// Rows of a category with the medium that tells the emotion taken from the next row with another one.
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

/// A number between two others.
fn real(rng: &mut ChaCha8Rng, low: f64, high: f64) -> f64 {
    low + (high - low) * pick(rng, 1 << 16) as f64 / 65_536.0
}

#[cfg(test)]
mod tests;
