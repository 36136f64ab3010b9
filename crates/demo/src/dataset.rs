//! The dataset: JSONL files of questions, with their pictures and clips.
//!
//! | file | rows |
//! |---|---|
//! | `sft.jsonl` | questions for supervised fine-tuning: choices with the correct completion, and short answers with a guess in the correct form, so that GRPO still has something to teach |
//! | `train.jsonl` | questions for GRPO |
//! | `eval.jsonl` | held-out questions |
//! | `eval_permuted.jsonl` | the held-out questions, each with the medium of another question of the same type |
//!
//! Each medium occurs only once in all files, except that `eval_permuted.jsonl` reuses the media of `eval.jsonl`. A picture is
//! drawn again if its encoded bytes were drawn before. The encoding is a function of the pixels, so equal bytes mean equal
//! content. `eval_permuted.jsonl` keeps the solution of each question. On this file a model that looks at the medium falls to
//! chance; a model that only reads the question does not.
//!
//! Columns: `id`, `image` or `video`, `conversations`, `solution`, `type` (see [`Kind::name`]), `form` (see
//! [`Form::name`](crate::Form::name)), `answer` (the word for what the medium shows), and `sha256` (of the medium's file).
//! Rows with clips also have `min_pixels` and `max_pixels`, so that their frames are not enlarged.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};

use image::codecs::gif::{GifEncoder, Repeat};
use image::{Delay, DynamicImage, Frame, ImageFormat, ImageResult, RgbImage};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::DemoError;
use crate::draw::{CELL_PX, frames};
use crate::question::{Form, Kind, Question};
use crate::random::{shuffle, stream};

const MANIFEST: &str = "manifest.json";
/// Limit on draws for one row. The space of pictures is so large that one draw is nearly always enough.
const MAX_ATTEMPTS: u64 = 100;
/// Time between frames of a clip, milliseconds: two frames a second, the rate at which the model samples videos.
const FRAME_MS: u32 = 500;
/// Area of a frame, pixels.
const FRAME_PX: u32 = 4 * CELL_PX * CELL_PX;

/// A file of questions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Questions for supervised fine-tuning.
    Sft,
    /// Questions for GRPO.
    Train,
    /// Held-out questions.
    Eval,
}

impl Split {
    /// All splits.
    pub const ALL: [Self; 3] = [Self::Sft, Self::Train, Self::Eval];

    /// Returns the name of the file.
    pub const fn file(self) -> &'static str {
        match self {
            Self::Sft => "sft.jsonl",
            Self::Train => "train.jsonl",
            Self::Eval => "eval.jsonl",
        }
    }

    /// Returns the forms of the questions, which alternate in this order. Most questions of supervised fine-tuning are choices,
    /// because those teach what a picture shows.
    const fn forms(self) -> &'static [Form] {
        match self {
            Self::Sft => &[Form::Choice, Form::Choice, Form::Choice, Form::Short],
            Self::Train | Self::Eval => &Form::ALL,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Sft => "sft",
            Self::Train => "train",
            Self::Eval => "eval",
        }
    }
}

/// Number of questions per split. With a multiple of 80, every answer and letter of every type occurs equally often.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Number of rows in `sft.jsonl`.
    pub sft: usize,
    /// Number of rows in `train.jsonl`.
    pub train: usize,
    /// Number of rows in `eval.jsonl` and in `eval_permuted.jsonl`.
    pub eval: usize,
}

impl Default for Sizes {
    /// Returns the sizes used by the recipes in `examples/demo`.
    fn default() -> Self {
        Self { sft: 16000, train: 8000, eval: 480 }
    }
}

impl Sizes {
    /// Sizes of the talking clips of `examples/humanomni`. Few rows have reasons, so that training on labels still has much to
    /// teach. With a multiple of 126, every emotion of every category occurs equally often.
    pub const TALKING: Self = Self { sft: 42, train: 504, eval: 252 };

    const fn of(self, split: Split) -> usize {
        match split {
            Split::Sft => self.sft,
            Split::Train => self.train,
            Split::Eval => self.eval,
        }
    }
}

impl std::fmt::Display for Sizes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} sft, {} train and {} eval questions", self.sft, self.train, self.eval)
    }
}

/// Record of a generated dataset, written to its directory as `manifest.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Name and version of the generator. Another version may draw other pictures for the same seed.
    pub generator: String,
    /// Seed of all random choices.
    pub seed: u64,
    /// Number of questions per split.
    pub sizes: Sizes,
    /// SHA-256 of each JSONL file, in hexadecimal. Rows contain the digests of their media, so these four digests identify the
    /// complete dataset.
    pub sha256: BTreeMap<String, String>,
}

/// Writes the dataset to `dir` and returns its manifest. Keeps a finished dataset of the same seed and sizes unchanged.
/// The directory appears only when it is complete.
///
/// # Errors
/// Returns [`DemoError::Occupied`] if `dir` contains something else, otherwise [`DemoError::Write`], [`DemoError::Encode`] or
/// [`DemoError::NoNewPicture`].
pub fn generate(dir: &Path, seed: u64, sizes: Sizes) -> Result<Manifest, DemoError> {
    if let Some(found) = existing(dir, seed, sizes)? {
        return Ok(found);
    }
    let mut partial = dir.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    if partial.exists() {
        at(&partial, fs::remove_dir_all(&partial))?;
    }
    let manifest = write_all(&partial, seed, sizes)?;
    if dir.exists() {
        // The directory is empty; otherwise `existing` would have returned. Not every system can rename onto an empty directory.
        at(dir, fs::remove_dir(dir))?;
    }
    at(dir, fs::rename(&partial, dir))?;
    Ok(manifest)
}

fn at<T>(path: &Path, result: std::io::Result<T>) -> Result<T, DemoError> {
    result.map_err(|source| DemoError::Write { path: path.to_path_buf(), source })
}

/// Returns the manifest of the finished dataset in `dir` if its seed and sizes match, and `None` if `dir` is empty or missing.
fn existing(dir: &Path, seed: u64, sizes: Sizes) -> Result<Option<Manifest>, DemoError> {
    if !dir.exists() || at(dir, fs::read_dir(dir))?.next().is_none() {
        return Ok(None);
    }
    let text = fs::read_to_string(dir.join(MANIFEST)).ok();
    let found = text.and_then(|text| serde_json::from_str::<Manifest>(&text).ok());
    let occupied =
        |found| DemoError::Occupied { path: dir.to_path_buf(), found, seed, sizes: sizes.to_string() };
    match found {
        Some(m) if m.generator != generator() => {
            Err(occupied(format!("a dataset of {}, but this version is {}", m.generator, generator())))
        }
        Some(m) if (m.seed, m.sizes) == (seed, sizes) => Ok(Some(m)),
        Some(m) => Err(occupied(format!("a dataset of seed {} with {}", m.seed, m.sizes))),
        None => Err(occupied("files that are not a dataset of this generator".to_owned())),
    }
}

fn generator() -> String {
    format!("omnigrpo-demo {}", env!("CARGO_PKG_VERSION"))
}

/// A question and the medium drawn for it.
struct Row {
    question: Question,
    /// Path relative to the dataset's directory.
    medium: String,
    sha256: String,
}

fn write_all(dir: &Path, seed: u64, sizes: Sizes) -> Result<Manifest, DemoError> {
    let mut used = HashSet::new();
    let mut sha256 = BTreeMap::new();
    for split in Split::ALL {
        let media_dir = dir.join("media").join(split.name());
        at(&media_dir, fs::create_dir_all(&media_dir))?;
        let rows = draw_split(dir, seed, split, sizes.of(split), &mut used)?;
        let mut order: Vec<usize> = (0..rows.len()).collect();
        // The types alternate in `rows`, and some verbs read a file in order, so the rows are shuffled.
        shuffle(&mut stream(seed, split as u8, u64::MAX, 0), &mut order);
        let lines = order.iter().map(|&i| row_json(split, i, &rows[i], &rows[i]));
        write_jsonl(dir, split.file(), lines, &mut sha256)?;
        if split == Split::Eval {
            let other = permuted(&rows, seed);
            let lines = order.iter().map(|&i| row_json(split, i, &rows[i], &rows[other[i]]));
            write_jsonl(dir, "eval_permuted.jsonl", lines, &mut sha256)?;
        }
    }
    let manifest = Manifest { generator: generator(), seed, sizes, sha256 };
    write_json(&dir.join(MANIFEST), &manifest)?;
    Ok(manifest)
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<(), DemoError> {
    let text = serde_json::to_string_pretty(value).map_err(std::io::Error::from);
    at(path, text.and_then(|text| fs::write(path, text + "\n")))
}

fn write_jsonl(
    dir: &Path,
    file: &str,
    lines: impl Iterator<Item = Value>,
    sha256: &mut BTreeMap<String, String>,
) -> Result<(), DemoError> {
    let mut bytes = Vec::new();
    let path = dir.join(file);
    for line in lines {
        at(&path, writeln!(bytes, "{line}"))?;
    }
    at(&path, fs::write(&path, &bytes))?;
    sha256.insert(file.to_owned(), hex(&bytes));
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn draw_split(
    dir: &Path,
    seed: u64,
    split: Split,
    num_rows: usize,
    used: &mut HashSet<String>,
) -> Result<Vec<Row>, DemoError> {
    let draw = |row: usize| -> Result<Row, DemoError> {
        for attempt in 0..MAX_ATTEMPTS {
            let mut rng = stream(seed, split as u8, row as u64, attempt);
            let question = Question::deal(row, split.forms(), &mut rng);
            let pictures = frames(question.kind, question.answer, &mut rng);
            let extension = if question.kind == Kind::Direction { "gif" } else { "png" };
            let medium = format!("media/{}/{row:05}.{extension}", split.name());
            let path = dir.join(&medium);
            let bytes =
                encode(pictures).map_err(|source| DemoError::Encode { path: path.clone(), source })?;
            let sha256 = hex(&bytes);
            if used.insert(sha256.clone()) {
                at(&path, fs::write(&path, bytes))?;
                return Ok(Row { question, medium, sha256 });
            }
        }
        Err(DemoError::NoNewPicture { file: split.file(), row, attempts: MAX_ATTEMPTS })
    };
    (0..num_rows).map(draw).collect()
}

/// Encodes one picture as a PNG, several as a GIF that repeats forever.
fn encode(pictures: Vec<RgbImage>) -> ImageResult<Vec<u8>> {
    let mut bytes = Vec::new();
    match <[RgbImage; 1]>::try_from(pictures) {
        Ok([picture]) => picture.write_to(&mut Cursor::new(&mut bytes), ImageFormat::Png)?,
        Err(pictures) => {
            let mut encoder = GifEncoder::new(&mut bytes);
            encoder.set_repeat(Repeat::Infinite)?;
            for picture in pictures {
                let picture = DynamicImage::from(picture).to_rgba8();
                encoder.encode_frame(Frame::from_parts(
                    picture,
                    0,
                    0,
                    Delay::from_numer_denom_ms(FRAME_MS, 1),
                ))?;
            }
        }
    }
    Ok(bytes)
}

/// Returns, for each row, the index of the row whose medium it gets. The rows of each type form one random cycle, so no
/// question keeps its own medium (unless it is the only one), and answers agree at the rate of chance.
fn permuted(rows: &[Row], seed: u64) -> Vec<usize> {
    let mut other: Vec<usize> = (0..rows.len()).collect();
    for kind in Kind::ALL {
        let mut cycle: Vec<usize> = (0..rows.len()).filter(|&i| rows[i].question.kind == kind).collect();
        shuffle(&mut stream(seed, u8::MAX, kind as u64, 0), &mut cycle);
        for (i, &row) in cycle.iter().enumerate() {
            other[row] = cycle[(i + 1) % cycle.len()];
        }
    }
    other
}

fn row_json(split: Split, number: usize, row: &Row, shown: &Row) -> Value {
    let Question { kind, form, text, .. } = &row.question;
    let medium = if *kind == Kind::Direction { "video" } else { "image" };
    let reply = if split == Split::Sft { row.question.first_lesson() } else { row.question.completion() };
    let mut json = json!({
        "id": format!("{}-{number:05}", split.name()),
        medium: shown.medium,
        "conversations": [
            {"from": "human", "value": format!("<{medium}>\n{text}")},
            {"from": "gpt", "value": reply},
        ],
        "solution": row.question.solution(),
        "type": kind.name(),
        "form": form.name(),
        "answer": row.question.word(),
        "sha256": shown.sha256,
    });
    if *kind == Kind::Direction {
        // The published minimum size of a video frame is far above the size of these frames, which must not be enlarged.
        json["min_pixels"] = FRAME_PX.into();
        json["max_pixels"] = FRAME_PX.into();
    }
    json
}
