//! Encoding of a text as one vector: a text encoder, pooling, and a layer into the feature space of another model.
//!
//! Reads the layout of `sentence-transformers`, in which multilingual text towers for CLIP are published. `modules.json` names a
//! transformer (XLM-RoBERTa, DistilBERT, BERT, RoBERTa), mean or `[CLS]` pooling, and dense layers. Other modules and other kinds
//! of pooling are unsupported.

use std::path::{Component, Path, PathBuf};

use omnigrpo_models::encoders::bert::Bert;
use omnigrpo_models::{ConfigJson, FrozenWeights, WeightFiles};
use omnigrpo_ops::{Activation, Linear, PackedLinear, Param, Part, Pass, Rows, Tape};
use omnigrpo_text::Tokenizer;
use serde_json::Value;

use crate::error::{Result, ScorerError};

/// Maximum size of `modules.json` in bytes. Published files have about a kilobyte.
const MAX_MODULES_BYTES: u64 = 1 << 20;

/// A text encoder with pooling and dense layers.
pub struct SentenceEncoder {
    bert: Bert,
    tokenizer: Tokenizer,
    max_tokens: usize,
    pooling: Pooling,
    dense: Vec<Dense>,
}

#[derive(Clone, Copy, PartialEq)]
enum Pooling {
    /// Mean over all tokens, including the start and end tokens.
    Mean,
    /// Row of the first token.
    First,
}

struct Dense {
    layer: Linear,
    tanh: bool,
}

fn fail(path: impl Into<PathBuf>, what: impl Into<String>) -> ScorerError {
    ScorerError::File { path: path.into(), what: what.into() }
}

impl SentenceEncoder {
    /// Loads a directory.
    ///
    /// # Errors
    /// Returns an error if the layout is unsupported, a file is unreadable, or widths do not match.
    pub fn load(dir: &Path, how: impl Into<FrozenWeights>) -> Result<Self> {
        let how = how.into();
        let modules = dir.join("modules.json");
        if !modules.is_file() {
            let what = "modules.json is missing; expected a directory of `sentence-transformers`";
            return Err(fail(dir, what));
        }
        let bytes = omnigrpo_guard::inside::read_path(&modules, MAX_MODULES_BYTES)
            .map_err(ScorerError::io(&modules))?;
        let list: Vec<Value> = serde_json::from_slice(&bytes)
            .map_err(|source| ScorerError::Json { path: modules.clone(), source })?;
        let mut transformer = None;
        let mut pooling = None;
        let mut dense = Vec::new();
        for module in &list {
            let text = |key: &str| module.get(key).and_then(Value::as_str).unwrap_or_default();
            let place = inside(dir, text("path")).ok_or_else(|| {
                fail(&modules, format!("{:?} is no folder of this directory", text("path")))
            })?;
            match text("type").rsplit('.').next().unwrap_or_default() {
                "Transformer" => transformer = Some(place),
                "Pooling" => pooling = Some(read_pooling(&place)?),
                "Dense" => dense.push(Dense::load(&place, how.clone())?),
                // The length of a vector does not change its cosine.
                "Normalize" => {}
                other => {
                    let known = "Transformer, Pooling, Dense or Normalize";
                    return Err(fail(&modules, format!("module {other:?}; expected {known}")));
                }
            }
        }
        let (Some(place), Some(pooling)) = (transformer, pooling) else {
            return Err(fail(&modules, "expected a Transformer and a Pooling"));
        };
        let bert = Bert::load(&place, how)?;
        let tokenizer_dir = if place.join("tokenizer.json").is_file() { &place } else { dir };
        let tokenizer = Tokenizer::from_dir(tokenizer_dir)?;
        let most = bert.config().max_tokens();
        let limits = place.join("sentence_bert_config.json");
        let asked = if limits.is_file() {
            ConfigJson::read(&limits)?.size("max_seq_length", Some(most))?
        } else {
            most
        };
        let this = Self { bert, tokenizer, max_tokens: asked.min(most), pooling, dense };
        let mut width = this.bert.config().sizes.hidden;
        for Dense { layer, .. } in &this.dense {
            if layer.k() != width {
                return Err(fail(
                    dir,
                    format!("a dense layer takes {} features, but gets {width}", layer.k()),
                ));
            }
            width = layer.n();
        }
        Ok(this)
    }

    /// Returns the number of features of a text.
    pub fn width(&self) -> usize {
        self.dense.last().map_or(self.bert.config().sizes.hidden, |dense| dense.layer.n())
    }

    /// Returns one row of [`Self::width`] numbers per text. A text that is too long is truncated.
    ///
    /// # Errors
    /// Returns an error if a text cannot be tokenised.
    pub fn encode(&self, texts: &[&str]) -> Result<Vec<f32>> {
        let ids = framed(&self.tokenizer, texts, self.max_tokens)?;
        let ids: Vec<&[u32]> = ids.iter().map(Vec::as_slice).collect();
        let c = self.bert.config().sizes.hidden;
        let pass = Pass::default();
        let pooled = match self.pooling {
            Pooling::First => self.bert.first(&ids, &pass, &mut Tape::off())?.into_rows().into_vec(),
            Pooling::Mean => {
                let layers = self.bert.config().sizes.layers;
                let hidden = self.bert.hidden(&ids, layers, &pass, &mut Tape::off())?.into_rows().into_vec();
                let mut rows = hidden.chunks_exact(c);
                let mut pooled = vec![0.0f32; ids.len() * c];
                for (mean, ids) in pooled.chunks_exact_mut(c).zip(&ids) {
                    for row in rows.by_ref().take(ids.len()) {
                        mean.iter_mut().zip(row).for_each(|(m, x)| *m += x);
                    }
                    mean.iter_mut().for_each(|m| *m /= ids.len() as f32);
                }
                pooled
            }
        };
        let mut x = Rows::from_vec(pooled, ids.len(), c)?;
        for Dense { layer, tanh } in &self.dense {
            x = PackedLinear::new(&[layer], &pass).forward(&x)?;
            if *tanh {
                x = x.activated(Activation::Tanh);
            }
        }
        Ok(x.into_vec())
    }
}

impl Dense {
    fn load(dir: &Path, how: FrozenWeights) -> Result<Self> {
        let json = ConfigJson::read(&dir.join("config.json"))?;
        let (k, n) = (json.size("in_features", None)?, json.size("out_features", None)?);
        let activation = json.get("activation_function").and_then(Value::as_str).unwrap_or("Tanh");
        let tanh = match activation.rsplit('.').next().unwrap_or_default() {
            "Tanh" => true,
            "Identity" => false,
            other => {
                let what = format!("activation_function {other:?}; expected Identity or Tanh");
                return Err(fail(dir.join("config.json"), what));
            }
        };
        let files = WeightFiles::open(dir, |key| Some(key.to_owned()))?;
        if how.digests.is_some() {
            files.keep_digests();
        }
        let read = |name: &str| -> Result<_> {
            let values = files.read(name, how.dtype)?.map_err(|what| fail(dir, what.trim().to_owned()))?;
            let shape = files.shape(name).unwrap_or_default();
            let param = Param::new(name, Part::Projector, shape, values)?;
            Ok(std::sync::Arc::new(param.with(how.arithmetic)))
        };
        let bias = json.boolean("bias", true)?.then(|| read("linear.bias")).transpose()?;
        let layer = Linear::reshaped(read("linear.weight")?, bias, n, k)?;
        if let Some(shared) = how.digests {
            shared.add(&files);
        }
        Ok(Self { layer, tanh })
    }
}

fn read_pooling(dir: &Path) -> Result<Pooling> {
    let path = dir.join("config.json");
    let json = ConfigJson::read(&path)?;
    if let Some(mode) = json.get("pooling_mode").and_then(Value::as_str) {
        return match mode {
            "mean" => Ok(Pooling::Mean),
            "cls" => Ok(Pooling::First),
            other => Err(fail(path, format!("pooling_mode is {other:?}; expected mean or cls"))),
        };
    }
    let on: Vec<&str> = json
        .object()
        .iter()
        .filter(|(key, value)| key.starts_with("pooling_mode_") && value.as_bool() == Some(true))
        .map(|(key, _)| key.as_str())
        .collect();
    match on.as_slice() {
        ["pooling_mode_mean_tokens"] => Ok(Pooling::Mean),
        ["pooling_mode_cls_token"] => Ok(Pooling::First),
        other => Err(fail(path, format!("pools by {other:?}; expected mean or cls"))),
    }
}

/// Returns a folder of a directory. Returns `None` for a path outside the directory, also if a link leads there.
fn inside(dir: &Path, path: &str) -> Option<PathBuf> {
    let plain = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
    (plain && omnigrpo_guard::inside::resolve(dir, path).is_ok()).then(|| dir.join(path))
}

/// Returns token ids with start and end tokens, truncated to `max_tokens`. The end token is kept.
pub(crate) fn framed(tokenizer: &Tokenizer, texts: &[&str], max_tokens: usize) -> Result<Vec<Vec<u32>>> {
    texts
        .iter()
        .map(|text| {
            let mut end = text.len().min(MAX_TEXT_BYTES);
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            let mut ids = tokenizer.encode_framed(&text[..end])?;
            if ids.len() > max_tokens
                && let Some(&last) = ids.last()
            {
                ids.truncate(max_tokens);
                ids[max_tokens - 1] = last;
            }
            Ok(ids)
        })
        .collect()
}

/// Maximum number of bytes of a text that are tokenised. Text towers read at most a few hundred tokens.
const MAX_TEXT_BYTES: usize = 1 << 16;
