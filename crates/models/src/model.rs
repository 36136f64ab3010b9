//! A network with its weights: scoring and training of packed streams.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Tensor;
use omnigrpo_ops::{Param, Part, Segments, rows_from_vec, with_f32};

use crate::decoder::{Decoder, Scored};
use crate::error::{ModelError, Result};
use crate::families::{Family, MediumInput, Network, open_family};
use crate::prompt::Prompt;
use crate::stream::PackedStream;
use crate::weights::{FileSource, RandomSource, ReferenceSource, WeightDtype, WeightFiles, save_weights};

/// A model: family, network, weights.
pub struct Model {
    family: Arc<dyn Family>,
    network: Box<dyn Network>,
    params: Vec<Arc<Param>>,
    dir: PathBuf,
}

/// What a tower made of one medium. Shared by every pass whose tower is the same.
#[derive(Clone, Debug)]
pub struct Features {
    /// Output of the tower, before the projector.
    pub tower: Tensor,
    /// Features in the language model's width, `[tokens, h]`.
    pub rows: Tensor,
}

/// A stream that has run forward with a tape.
pub struct StreamPass<'a> {
    model: &'a Model,
    stream: &'a PackedStream,
    decoder_tape: Segments<'a>,
    /// Tape of each medium that has a trained tower or projector, by (group, medium).
    media_tapes: HashMap<(usize, usize), Segments<'a>>,
    scored: Scored,
    /// Per scored token, completion by completion, in nats.
    pub logprobs: Vec<f32>,
    /// Entropy at each scored token, in nats.
    pub entropies: Vec<f32>,
}

impl Model {
    /// Loads a checkpoint directory. All weights start frozen.
    ///
    /// # Errors
    /// An unknown model, unreadable files, tensors that do not fit.
    pub fn load(dir: &Path, dtype: WeightDtype) -> Result<Self> {
        let family = open_family(dir)?;
        let files = WeightFiles::open(dir, |key| family.published_name(key))?;
        let mut source = FileSource::new(&files, dtype);
        let network = family.network(&mut source)?;
        let params = source.finish(family.name())?;
        Ok(Self { family, network, params, dir: dir.to_path_buf() })
    }

    /// A model with the configuration of `dir` and random weights: for training from nothing and for benchmarks.
    ///
    /// # Errors
    /// An unknown or impossible configuration.
    pub fn random(dir: &Path, seed: u64, dtype: WeightDtype) -> Result<Self> {
        let family = open_family(dir)?;
        let mut source = RandomSource { seed, std: family.initializer_range(), dtype, params: Vec::new() };
        let network = family.network(&mut source)?;
        Ok(Self { network, params: source.params, family, dir: dir.to_path_buf() })
    }

    /// A frozen model for the KL term: copies of the weights that are trained, shared handles to the rest.
    ///
    /// # Errors
    /// Out of memory.
    pub fn reference(&self) -> Result<Self> {
        let policy = self.params.iter().map(|p| (p.name().to_owned(), Arc::clone(p))).collect();
        let mut source = ReferenceSource { policy: &policy, tied: self.decoder().tied(), params: Vec::new() };
        let network = self.family.network(&mut source)?;
        Ok(Self { family: Arc::clone(&self.family), network, params: source.params, dir: self.dir.clone() })
    }

    /// Its family.
    #[must_use]
    pub fn family(&self) -> &Arc<dyn Family> {
        &self.family
    }

    /// Its language model.
    #[must_use]
    pub fn decoder(&self) -> &Decoder {
        self.network.decoder()
    }

    /// Its weights in building order.
    #[must_use]
    pub fn params(&self) -> &[Arc<Param>] {
        &self.params
    }

    /// The directory it came from.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether any weight of `part` is trained.
    #[must_use]
    pub fn trains(&self, part: Part) -> bool {
        self.params.iter().any(|p| p.part() == part && p.trainable())
    }

    /// Writes the weights in the published layout.
    ///
    /// # Errors
    /// A directory that cannot be written.
    pub fn save_weights(&self, dir: &Path) -> Result<()> {
        save_weights(dir, &self.params)
    }

    /// Runs tower and projector on one medium.
    ///
    /// # Errors
    /// Input that does not fit.
    pub fn encode(&self, medium: &MediumInput) -> Result<Features> {
        let tower = self.network.tower(medium, None)?;
        let rows = self.network.project(&tower, medium, None)?;
        Ok(Features { tower, rows })
    }

    /// Features of a prompt's media from tower outputs of a model whose tower is the same. Runs the projector only.
    ///
    /// # Errors
    /// Input that does not fit.
    pub fn project(&self, tower: &Tensor, medium: &MediumInput) -> Result<Features> {
        Ok(Features { tower: tower.clone(), rows: self.network.project(tower, medium, None)? })
    }

    /// Features of every medium of a prompt, in order.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<Features>> {
        prompt.media.iter().map(|m| self.encode(m)).collect()
    }

    /// The input rows of a prompt: token embeddings with features in their spans.
    ///
    /// # Errors
    /// Features that do not fill their spans.
    pub fn embed_prompt(&self, prompt: &Prompt, features: &[Features]) -> Result<Tensor> {
        let stream = PackedStream::new(&[crate::GroupStream { prompt, completions: Vec::new() }])?;
        let rows: Vec<&Tensor> = features.iter().map(|f| &f.rows).collect();
        self.embed(&stream, |_, medium| rows.get(medium).copied())
    }

    fn embed<'t>(
        &self,
        stream: &PackedStream,
        features: impl Fn(usize, usize) -> Option<&'t Tensor>,
    ) -> Result<Tensor> {
        let h = self.decoder().config().hidden;
        let mut x = self.decoder().embed(&stream.ids)?;
        for span in &stream.features {
            let Some(rows) = features(span.group, span.medium) else {
                return Err(ModelError::prompt(format!(
                    "group {}: no features were given for medium {}",
                    span.group, span.medium
                )));
            };
            let (n, width) = rows.dims2()?;
            if width != h || span.feature + span.len > n {
                return Err(ModelError::prompt(format!(
                    "group {}, medium {}: the prompt has room for rows {}..{} of width {h}, the projector made {n} of \
                     width {width}",
                    span.group,
                    span.medium,
                    span.feature,
                    span.feature + span.len
                )));
            }
            with_f32(rows, |rows| {
                x[span.row * h..(span.row + span.len) * h]
                    .copy_from_slice(&rows[span.feature * h..(span.feature + span.len) * h]);
            })?;
        }
        Ok(rows_from_vec(x, stream.rows(), h)?)
    }

    /// Log-probabilities and entropies of a stream, per scored token, completion by completion. `features[group]`
    /// holds the features of the group's media.
    ///
    /// # Errors
    /// Features that do not fill their spans.
    pub fn score(
        &self,
        stream: &PackedStream,
        features: &[Vec<Features>],
        temperature: f32,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let x = self.embed(stream, |g, m| features.get(g)?.get(m).map(|f| &f.rows))?;
        let decoder = self.decoder();
        let rope = decoder.rope_table(&stream.positions);
        let hidden = decoder.forward(x, &rope, &stream.layout, None)?;
        let scored = decoder.score(&hidden, &stream.targets, temperature)?;
        Ok((stream.by_completion(&scored.logprobs), stream.by_completion(&scored.entropies)))
    }

    /// As [`Self::score`], keeping what a backward pass needs. Towers and projectors with trained weights run again on
    /// a tape; a frozen tower's output is taken from `features`. `recompute` trades time for memory.
    ///
    /// # Errors
    /// Features that do not fill their spans.
    pub fn train_pass<'a>(
        &'a self,
        stream: &'a PackedStream,
        prompts: &[&Prompt],
        features: &[Vec<Features>],
        temperature: f32,
        recompute: bool,
    ) -> Result<StreamPass<'a>> {
        let tower_trained = self.trains(Part::Vision) || self.trains(Part::Audio);
        let mut media_tapes = HashMap::new();
        let mut tracked: HashMap<(usize, usize), Tensor> = HashMap::new();
        if tower_trained || self.trains(Part::Projector) {
            for (g, prompt) in prompts.iter().enumerate() {
                for (m, medium) in prompt.media.iter().enumerate() {
                    let mut tape = Segments::new(recompute);
                    let tower = match (tower_trained, features.get(g).and_then(|f| f.get(m))) {
                        (false, Some(features)) => features.tower.clone(),
                        (false, None) => self.network.tower(medium, None)?,
                        (true, _) => self.network.tower(medium, Some(&mut tape))?,
                    };
                    tracked.insert((g, m), self.network.project(&tower, medium, Some(&mut tape))?);
                    media_tapes.insert((g, m), tape);
                }
            }
        }
        let x = self.embed(stream, |g, m| {
            tracked.get(&(g, m)).or_else(|| features.get(g)?.get(m).map(|f| &f.rows))
        })?;
        let decoder = self.decoder();
        let rope = decoder.rope_table(&stream.positions);
        let mut decoder_tape = Segments::new(recompute);
        let hidden = decoder.forward(x, &rope, &stream.layout, Some(&mut decoder_tape))?;
        let scored = decoder.score(&hidden, &stream.targets, temperature)?;
        Ok(StreamPass {
            logprobs: stream.by_completion(&scored.logprobs),
            entropies: stream.by_completion(&scored.entropies),
            model: self,
            stream,
            decoder_tape,
            media_tapes,
            scored,
        })
    }
}

impl StreamPass<'_> {
    /// Adds the gradients of every trained weight, given dL/dlogp and dL/dentropy per scored token.
    ///
    /// # Errors
    /// Lengths that differ from the stream's.
    pub fn backward(self, dlogp: &[f32], dentropy: Option<&[f32]>) -> Result<()> {
        let Self { model, stream, decoder_tape, mut media_tapes, scored, .. } = self;
        if dlogp.len() != stream.num_targets() || dentropy.is_some_and(|d| d.len() != dlogp.len()) {
            return Err(ModelError::prompt(format!(
                "backward: {} gradients for {} scored tokens",
                dlogp.len(),
                stream.num_targets()
            )));
        }
        let dlogp = stream.by_target(dlogp);
        let dentropy = dentropy.map(|d| stream.by_target(d));
        let decoder = model.decoder();
        let dhidden =
            decoder.score_backward(&scored, &stream.targets, stream.rows(), &dlogp, dentropy.as_deref())?;
        drop(scored);
        let dx = decoder_tape.backward(dhidden)?;
        let h = decoder.config().hidden;
        let mut dx = omnigrpo_ops::to_vec(&dx)?;
        let mut dfeatures: HashMap<(usize, usize), Vec<f32>> = HashMap::new();
        for span in &stream.features {
            let rows = &mut dx[span.row * h..(span.row + span.len) * h];
            if media_tapes.contains_key(&(span.group, span.medium)) {
                // Spans of one medium come in feature order, so appending keeps the rows aligned.
                dfeatures.entry((span.group, span.medium)).or_default().extend_from_slice(rows);
            }
            rows.fill(0.0);
        }
        decoder.embedding().accumulate(|table| {
            let mut text_ids = Vec::with_capacity(stream.rows());
            let mut text_dx = Vec::with_capacity(dx.len());
            let mut at = 0;
            let spans = stream.features.iter().map(|s| (s.row, s.len)).chain([(stream.rows(), 0)]);
            for (row, len) in spans {
                text_ids.extend_from_slice(&stream.ids[at..row]);
                text_dx.extend_from_slice(&dx[at * h..row * h]);
                at = row + len;
            }
            omnigrpo_kernels::embedding::scatter_add(table, &text_dx, &text_ids, h);
        });
        let mut keys: Vec<_> = dfeatures.keys().copied().collect();
        keys.sort_unstable();
        for key in keys {
            if let (Some(tape), Some(d)) = (media_tapes.remove(&key), dfeatures.remove(&key)) {
                let rows = d.len() / h;
                tape.backward(rows_from_vec(d, rows, h)?)?;
            }
        }
        Ok(())
    }
}
