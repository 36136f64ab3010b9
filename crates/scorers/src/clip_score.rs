//! Agreement of a text with a picture: the cosine of their CLIP features.
//!
//! Source: CLIPScore (arXiv 2104.08718), computed as in torchmetrics for the ViVQA-X project: 100 · cosine, at least 0. The text
//! tower may differ from CLIP's own ([`SentenceEncoder`]). This matters for Vietnamese, since CLIP's own tower was trained on
//! English.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use omnigrpo_media::clip::ClipPixels;
use omnigrpo_media::{Limits, MediaError, Orientation, load_image};
use omnigrpo_models::encoders::clip::Clip;
use omnigrpo_models::{ConfigJson, FrozenWeights, ModelError};
use omnigrpo_ops::Pass;
use omnigrpo_text::Tokenizer;

use crate::error::{Result, ScorerError};
use crate::sentence::{SentenceEncoder, framed};

/// Maximum number of pictures with cached features. The oldest is dropped first. A feature has a few hundred numbers.
const CACHED_PICTURES: usize = 4096;
/// Number of texts encoded in one batch.
const TEXTS_AT_ONCE: usize = 32;

/// CLIP with its own or another text tower.
pub struct ClipScorer {
    clip: Clip,
    pixels: ClipPixels,
    text: TextTower,
    orientation: Orientation,
    cache: Mutex<Cache>,
}

enum TextTower {
    Own(Box<Tokenizer>),
    Other(Box<SentenceEncoder>),
}

/// Path, size and modification time of a picture file when it was read.
type FileKey = (PathBuf, u64, Option<SystemTime>);

#[derive(Default)]
struct Cache {
    features: HashMap<FileKey, Arc<[f32]>>,
    order: VecDeque<FileKey>,
}

impl ClipScorer {
    /// Loads a CLIP directory and, if given, the directory of another text tower.
    ///
    /// # Errors
    /// Returns an error if a file is unreadable, the architecture is unsupported, or the text tower has a different feature
    /// space.
    pub fn load(dir: &Path, text_dir: Option<&Path>, how: impl Into<FrozenWeights>) -> Result<Self> {
        let how = how.into();
        let clip = Clip::load(dir, how.clone())?;
        let pixels = processor(dir, clip.config().picture.side_px)?;
        let text = match text_dir {
            Some(dir) => {
                let encoder = SentenceEncoder::load(dir, how)?;
                let (got, expected) = (encoder.width(), clip.config().projection);
                if got != expected {
                    let what = format!(
                        "its texts have {got} features, the CLIP's pictures {expected}; expected a text tower that was \
                         made for this CLIP"
                    );
                    return Err(ScorerError::File { path: dir.to_path_buf(), what });
                }
                TextTower::Other(Box::new(encoder))
            }
            // With only `vocab.json` and `merges.txt`, the tokenizer would use the rules of another model.
            None if !dir.join("tokenizer.json").is_file() => {
                let what = "tokenizer.json is missing; save the tokenizer again with `transformers`".into();
                return Err(ScorerError::File { path: dir.to_path_buf(), what });
            }
            None => TextTower::Own(Box::new(Tokenizer::from_dir(dir)?)),
        };
        Ok(Self { clip, pixels, text, orientation: Orientation::default(), cache: Mutex::default() })
    }

    /// Reads pictures in this form. By default they are turned upright.
    #[must_use]
    pub fn with_orientation(self, orientation: Orientation) -> Self {
        Self { orientation, ..self }
    }

    /// Returns the features of a picture, with length 1, and caches them.
    ///
    /// # Errors
    /// Returns an error if the file is not a readable picture.
    pub fn picture(&self, path: &Path) -> Result<Arc<[f32]>> {
        let lock = || self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let read = |source| MediaError::Read { path: path.to_path_buf(), source };
        let file = std::fs::metadata(path).map_err(read)?;
        let key = (path.to_path_buf(), file.len(), file.modified().ok());
        if let Some(features) = lock().features.get(&key) {
            return Ok(Arc::clone(features));
        }
        let pixels = self.pixels.pixels(&load_image(path, self.orientation, &Limits::default())?)?;
        // Pictures are encoded one by one, so that features do not depend on which pictures were cached.
        let features: Arc<[f32]> =
            normalised(self.clip.picture_features(&pixels, 1, &Pass::default())?.into_vec()).into();
        let mut cache = lock();
        if cache.features.insert(key.clone(), Arc::clone(&features)).is_none() {
            cache.order.push_back(key);
        }
        if cache.order.len() > CACHED_PICTURES
            && let Some(oldest) = cache.order.pop_front()
        {
            cache.features.remove(&oldest);
        }
        Ok(features)
    }

    /// Returns the features of texts, each with length 1. A text that is too long for the tower is truncated.
    ///
    /// # Errors
    /// Returns an error if a text cannot be tokenised.
    pub fn texts(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>> {
        let mut out = Vec::with_capacity(texts.len());
        for some in texts.chunks(TEXTS_AT_ONCE) {
            let rows = match &self.text {
                TextTower::Other(encoder) => encoder.encode(some)?,
                TextTower::Own(tokenizer) => {
                    let ids = framed(tokenizer, some, self.clip.config().max_tokens)?;
                    let ids: Vec<&[u32]> = ids.iter().map(Vec::as_slice).collect();
                    self.clip.text_features(&ids, &Pass::default())?.into_vec()
                }
            };
            out.extend(rows.chunks_exact(self.clip.config().projection).map(|row| normalised(row.to_vec())));
        }
        Ok(out)
    }
}

fn normalised(mut features: Vec<f32>) -> Vec<f32> {
    let norm = features.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt().max(1e-12);
    features.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
    features
}

/// Returns 100 · cosine of features with length 1, at least 0.
pub(crate) fn clip_score(text: &[f32], picture: &[f32]) -> f64 {
    let cosine: f64 = text.iter().zip(picture).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    (100.0 * cosine).max(0.0)
}

/// Reads `preprocessor_config.json`. Missing keys, or a missing file, get the values of the published CLIP.
fn processor(dir: &Path, side_px: usize) -> Result<ClipPixels> {
    let path = dir.join("preprocessor_config.json");
    let side = u32::try_from(side_px).unwrap_or(u32::MAX);
    let mut pixels = ClipPixels {
        shorter_px: side,
        crop_px: side,
        mean: [0.481_454_66, 0.457_827_5, 0.408_210_73],
        std: [0.268_629_54, 0.261_302_58, 0.275_777_11],
    };
    let json = match ConfigJson::read(&path) {
        Ok(json) => json,
        Err(ModelError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Ok(pixels);
        }
        Err(error) => return Err(error.into()),
    };
    let fail = |what: String| ScorerError::File { path: path.clone(), what };
    for step in ["do_resize", "do_center_crop", "do_rescale", "do_normalize"] {
        if !json.boolean(step, true)? {
            return Err(fail(format!(
                "{step} is false; expected CLIP's processor, which does all four steps"
            )));
        }
    }
    if json.number("resample", 3.0)? != 3.0 {
        return Err(fail("resample is not 3 (bicubic)".into()));
    }
    // The value is a number in old files and an object in new ones.
    let length = |key: &str, part: &str| -> Result<u32> {
        let value = match json.get(key) {
            Some(given) if given.is_object() => json.required_section(key)?.size(part, None)?,
            _ => json.size(key, Some(side_px))?,
        };
        u32::try_from(value).map_err(|_| fail(format!("{key} is too large")))
    };
    pixels.shorter_px = length("size", "shortest_edge")?;
    pixels.crop_px = length("crop_size", "height")?;
    if pixels.crop_px != side || pixels.shorter_px < side {
        return Err(fail(format!(
            "pictures are resized to {} px and cut to {} px, but the tower takes {side} px",
            pixels.shorter_px, pixels.crop_px
        )));
    }
    for (key, colours) in [("image_mean", &mut pixels.mean), ("image_std", &mut pixels.std)] {
        if let Some(value) = json.get(key) {
            let numbers: Option<Vec<f64>> =
                value.as_array().and_then(|list| list.iter().map(serde_json::Value::as_f64).collect());
            *colours = numbers
                .and_then(|list| list.try_into().ok())
                .filter(|list: &[f64; 3]| key == "image_mean" || list.iter().all(|x| *x > 0.0))
                .ok_or_else(|| fail(format!("{key} is {value}; expected three numbers")))?;
        }
    }
    Ok(pixels)
}
