//! Scores of packed streams, and their gradients.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use omnigrpo_ops::{Device, Memory, ParamDtype, Part, RouterLoss, Rows, Tape, Top, Var};

use super::{FeatureGradients, Features, Model};
use crate::decoder::{DecoderInput, DeepFeatures, Scored};
use crate::error::{ModelError, Result};
use crate::experts::RouterPlan;
use crate::prompt::Prompt;
use crate::stream::PackedStream;

/// Settings of a training pass, besides its weights and rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Training {
    /// Divisor of the logits in the scores.
    pub temperature: f32,
    /// Whether the backward pass recomputes the activations inside blocks instead of keeping them. This takes less memory and
    /// more time.
    pub recompute: bool,
    /// Key of the update for the dropout masks of adapters; updates with different keys have different masks.
    pub dropout_key: u64,
    /// Weights of the losses of expert routers.
    pub router: RouterPlan,
    /// Number of tokens of the whole update, and of the scored tokens among them. A prompt counts once for each of its
    /// completions. These numbers determine a stream's share of the routers' losses.
    pub step_tokens: [usize; 2],
}

impl Default for Training {
    /// Returns settings without losses of routers, for scores at temperature 1.
    fn default() -> Self {
        let router = RouterPlan::default();
        Self { temperature: 1.0, recompute: false, dropout_key: 0, router, step_tokens: [0; 2] }
    }
}

/// Numbers of a stream's scored tokens, completion by completion.
#[derive(Clone, Debug, Default)]
pub struct StreamScores {
    /// Log-probability of each token, in nats.
    pub logprobs: Vec<f32>,
    /// Entropy at each token, in nats.
    pub entropies: Vec<f32>,
    /// Most probable tokens at each token.
    pub top: TopTokens,
}

/// Most probable tokens at each scored token, `[tokens, k]`, the most probable first.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TopTokens {
    /// Number of tokens at each position.
    pub k: usize,
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Log-probability of each, in nats.
    pub logprobs: Vec<f32>,
}

impl TopTokens {
    /// Returns the part of some of the scored tokens.
    #[must_use]
    pub fn part(&self, scored: Range<usize>) -> Self {
        let own = scored.start * self.k..scored.end * self.k;
        Self { k: self.k, tokens: self.tokens[own.clone()].to_vec(), logprobs: self.logprobs[own].to_vec() }
    }
}

/// A stream after its forward pass, with the tape for the backward pass.
pub struct StreamPass<'a> {
    model: &'a Model,
    stream: &'a PackedStream,
    tape: Tape,
    input: DecoderInput,
    hidden: Var,
    scored: Scored,
    /// Log-probability of each scored token, completion by completion, in nats.
    pub logprobs: Vec<f32>,
    /// Entropy at each scored token, in nats.
    pub entropies: Vec<f32>,
    /// Log-probabilities of the teacher's tokens at each scored token, `[tokens, k]`
    /// ([`PackedStream::with_teacher_tokens`]); empty without them.
    pub teacher: Vec<f32>,
    router: Option<Arc<RouterLoss>>,
}

impl Model {
    /// Returns the decoder's input for a prompt: token embeddings with features in their spans, and deep features.
    ///
    /// # Errors
    /// Returns an error if features do not fill their spans.
    pub fn embed_prompt(&self, prompt: &Prompt, features: &[Features]) -> Result<DecoderInput> {
        let stream = PackedStream::new(&[crate::GroupStream { prompt, completions: Vec::new() }])?;
        let rows: Vec<&Rows> = features.iter().map(|f| &f.rows).collect();
        self.embed(&stream, |_, medium| rows.get(medium).copied(), &mut Tape::off())
    }

    fn embed<'t>(
        &self,
        stream: &PackedStream,
        features: impl Fn(usize, usize) -> Option<&'t Rows>,
        tape: &mut Tape,
    ) -> Result<DecoderInput> {
        let (h, deep) = (self.decoder().config().hidden, self.decoder().config().deep);
        let [embedding, _] = self.decoder().ends();
        self.lend(embedding)?;
        let mut x = self.decoder().embed(&stream.ids, &self.pass())?;
        let at: Vec<usize> = stream.features.iter().flat_map(|span| span.row..span.row + span.len).collect();
        let mut joining = Rows::zeros(self.device, deep * at.len(), h);
        let mut joined = 0;
        for span in &stream.features {
            let Some(rows) = features(span.group, span.medium) else {
                return Err(ModelError::shape(format!(
                    "group {}: no features were given for medium {}",
                    span.group, span.medium
                )));
            };
            let (n, width) = (rows.rows() / (1 + deep), rows.cols());
            if width != h || span.feature + span.len > n || n * (1 + deep) != rows.rows() {
                return Err(ModelError::shape(format!(
                    "group {}, medium {}: the prompt has room for rows {}..{} of width {h}, but the projector returned {n} rows of \
                     width {width}",
                    span.group,
                    span.medium,
                    span.feature,
                    span.feature + span.len
                )));
            }
            let rows = rows.to_device(self.device);
            x.set_rows(span.row, &rows, span.feature..span.feature + span.len)?;
            for l in 0..deep {
                let from = (1 + l) * n + span.feature;
                joining.set_rows(l * at.len() + joined, &rows, from..from + span.len)?;
            }
            joined += span.len;
        }
        let deep = (joining.rows() > 0).then(|| DeepFeatures {
            rows: if self.trains_media() { tape.input(joining) } else { Var::constant(joining) },
            at: Arc::new(at.into()),
        });
        Ok(DecoderInput { x: tape.input(x), deep })
    }

    /// Computes log-probabilities and entropies of a stream, per scored token, completion by completion. `features[group]`
    /// contains the features of the group's media, from any device.
    ///
    /// # Errors
    /// Returns an error if features do not fill their spans.
    pub fn score(
        &self,
        stream: &PackedStream,
        features: &[Vec<Features>],
        temperature: f32,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let StreamScores { logprobs, entropies, .. } =
            self.score_top(stream, features, temperature, Top::NONE)?;
        Ok((logprobs, entropies))
    }

    /// Computes what [`Self::score`] does, and the `top` most probable tokens at each scored token; all tokens if there are fewer.
    /// The head works in pieces of the vocabulary, so that `[tokens, k]` is all that is kept of it.
    ///
    /// # Errors
    /// Returns the errors of [`Self::score`].
    pub fn score_top(
        &self,
        stream: &PackedStream,
        features: &[Vec<Features>],
        temperature: f32,
        top: Top,
    ) -> Result<StreamScores> {
        let mut tape = Tape::off();
        let input = self.embed(stream, |g, m| features.get(g)?.get(m).map(|f| &f.rows), &mut tape)?;
        let decoder = self.decoder();
        let rope = decoder.rope_table(&stream.positions);
        let (rows, pass) = (&stream.targets.rows, self.pass());
        let hidden = decoder.forward(input, &rope, &stream.layout, rows, &pass, &mut tape)?;
        self.lend(decoder.ends()[1])?;
        let scored = decoder.score_top(hidden.into_rows(), &stream.targets, temperature, top)?;
        self.device.finish()?;
        let (tokens, token_logprobs) = stream.of_rows(&scored.scores.top).into_iter().unzip();
        Ok(StreamScores {
            logprobs: stream.by_completion(&scored.logprobs),
            entropies: stream.by_completion(&scored.entropies),
            top: TopTokens { k: top.within(decoder.config().vocab).k, tokens, logprobs: token_logprobs },
        })
    }

    /// Returns the language model's output, after its final norm, at the second-to-last token of each completion:
    /// `[completions, h]`. It is for heads other than that of the vocabulary. `features` are as in [`Self::score`].
    ///
    /// # Errors
    /// Returns an error if features do not fill their spans or a completion has fewer than two tokens.
    pub fn hidden_before_last(&self, stream: &PackedStream, features: &[Vec<Features>]) -> Result<Rows> {
        let mut tape = Tape::off();
        let input = self.embed(stream, |g, m| features.get(g)?.get(m).map(|f| &f.rows), &mut tape)?;
        let decoder = self.decoder();
        let rope = decoder.rope_table(&stream.positions);
        let (rows, pass) = (stream.last_rows()?, self.pass());
        let hidden = decoder.forward(input, &rope, &stream.layout, &rows, &pass, &mut tape)?;
        decoder.normed(hidden.rows())
    }

    /// Returns whether a [`DecoderMemory`](crate::DecoderMemory) can replace a forward pass in training. Then a rollout with the
    /// same weights computes the same values, up to rounding: there is no dropout, no weight is quantised (decoding multiplies
    /// such weights in a different way), and experts, if any, [are recalled](crate::ExpertsConfig::recalled).
    pub fn can_recall(&self) -> bool {
        self.can_recall_on(self.device)
    }

    /// Returns [`Self::can_recall`] for the same model on another device.
    pub fn can_recall_on(&self, device: Device) -> bool {
        let drops = self.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        device.remembers_decoding()
            && !drops
            && self.decoder().config().experts.is_none_or(|experts| experts.recalled)
            && !self.params.iter().any(|param| matches!(param.dtype(), ParamDtype::Quantised(_)))
    }

    /// Returns whether a rollout knows which experts each row uses: the model has experts, and no GPU chooses them.
    pub fn remembers_experts(&self) -> bool {
        self.decoder().config().experts.is_some() && self.device.remembers_decoding()
    }

    /// Scores as [`Self::score`] does and keeps what a backward pass needs. `features` are those of the present weights, in the
    /// form that [`Self::features_in_training`] returns. Decoder blocks whose results an earlier pass has `recalled` do not run
    /// again ([`DecoderMemory::of_stream`](crate::DecoderMemory::of_stream)).
    ///
    /// # Errors
    /// Returns an error if features do not fill their spans.
    pub fn train_pass<'a>(
        &'a self,
        stream: &'a PackedStream,
        features: &[Vec<Features>],
        training: Training,
        recalled: Option<Memory>,
    ) -> Result<StreamPass<'a>> {
        let mut tape = Tape::recalling(recalled.unwrap_or_default(), training.recompute);
        let input = self.embed(stream, |g, m| features.get(g)?.get(m).map(|f| &f.rows), &mut tape)?;
        let decoder = self.decoder();
        let rope = decoder.rope_table(&stream.positions);
        let router = (!training.router.is_off()).then(|| {
            let RouterPlan { aux, z } = training.router;
            Arc::new(RouterLoss::new(aux, z, training.step_tokens, stream.copies.clone()))
        });
        let mut pass = self.training_pass(training, Some(&stream.keys), 0);
        pass.router.clone_from(&router);
        pass.experts.clone_from(&stream.experts);
        let rows = &stream.targets.rows;
        let hidden = decoder.forward(input.clone(), &rope, &stream.layout, rows, &pass, &mut tape)?;
        self.lend(decoder.ends()[1])?;
        let scored = decoder.score(hidden.rows().clone(), &stream.targets, training.temperature)?;
        self.device.finish()?;
        Ok(StreamPass {
            logprobs: stream.by_completion(&scored.logprobs),
            entropies: stream.by_completion(&scored.entropies),
            teacher: stream.of_teacher(&scored.logprobs),
            model: self,
            stream,
            tape,
            input,
            hidden,
            scored,
            router,
        })
    }

    /// Gives every weight of the decoder that has no gradient a gradient of zeros.
    pub fn reach_decoder(&self) {
        self.params.iter().filter(|p| p.part() == Part::Llm).for_each(|p| p.reach(self.device));
    }

    /// Collects the gradients of each medium's features from those of a stream's input `[t, h]` and of the deep features in it.
    fn feature_gradients(
        &self,
        stream: &PackedStream,
        dx: &Rows,
        ddeep: Option<&Rows>,
    ) -> Result<FeatureGradients> {
        let (mut tokens, mut all) = (BTreeMap::new(), 0);
        for span in &stream.features {
            let end: &mut usize = tokens.entry((span.group, span.medium)).or_default();
            *end = (*end).max(span.feature + span.len);
            all += span.len;
        }
        let (h, deep) = (dx.cols(), self.decoder().config().deep);
        let rows = |n: usize| Rows::zeros(dx.device(), (1 + deep) * n, h);
        let mut gradients: BTreeMap<_, Rows> = tokens.iter().map(|(&key, &n)| (key, rows(n))).collect();
        let (mut seen, mut filled) = (0, BTreeSet::new());
        for span in &stream.features {
            let key = (span.group, span.medium);
            let (Some(own), Some(n)) = (gradients.get_mut(&key), tokens.get(&key)) else { continue };
            // Several completions of a group may show the same medium.
            let again = !filled.insert((key, span.feature));
            let mut put = |first: usize, from: &Rows, row: usize| -> Result<()> {
                if !again {
                    return Ok(own.set_rows(first, from, row..row + span.len)?);
                }
                let mut sum = from.row_range(row..row + span.len)?;
                sum.add(&own.row_range(first..first + span.len)?)?;
                Ok(own.set_rows(first, &sum, 0..span.len)?)
            };
            put(span.feature, dx, span.row)?;
            if let Some(ddeep) = ddeep {
                for l in 0..deep {
                    put((1 + l) * n + span.feature, ddeep, l * all + seen)?;
                }
            }
            seen += span.len;
        }
        Ok(FeatureGradients(gradients))
    }
}

impl StreamPass<'_> {
    /// Returns the losses of the routers, which the backward pass fills in, or `None` if no router loss is set.
    pub fn router(&self) -> Option<Arc<RouterLoss>> {
        self.router.clone()
    }

    /// Returns the decoder's results for the targets, in the stream's order.
    pub fn scored(&self) -> &Scored {
        &self.scored
    }

    /// Adds the gradients of every trained weight of the decoder, given dL/dlogp and dL/dentropy per scored token. Returns the
    /// gradients of the features for [`Model::backward_media`]; they are empty if neither towers nor projectors are trained.
    ///
    /// # Errors
    /// Returns an error if the lengths differ from the stream's.
    pub fn backward(self, dlogp: &[f32], dentropy: Option<&[f32]>) -> Result<FeatureGradients> {
        self.backward_by_block(dlogp, dentropy, &[], &mut |_| {})
    }

    /// Runs [`Self::backward`], with dL/dlogp of the teacher's tokens as well (`[tokens, k]`, or empty for 0). It calls `done` with the
    /// number of each block of the decoder when the gradients of its weights are complete. The last block comes first. The gradients of the output head and of the final norm are complete before.
    ///
    /// # Errors
    /// Returns an error if the lengths differ from the stream's.
    pub fn backward_by_block(
        self,
        dlogp: &[f32],
        dentropy: Option<&[f32]>,
        dteacher: &[f32],
        done: &mut dyn FnMut(usize),
    ) -> Result<FeatureGradients> {
        let Self { model, stream, tape, input, hidden, scored, .. } = self;
        if dlogp.len() != stream.num_targets() || dentropy.is_some_and(|d| d.len() != dlogp.len()) {
            return Err(ModelError::shape(format!(
                "backward: got {} gradients for {} scored tokens",
                dlogp.len(),
                stream.num_targets()
            )));
        }
        if !dteacher.is_empty() && dteacher.len() != stream.num_targets() * stream.teacher_tokens() {
            return Err(ModelError::shape(format!(
                "backward: got {} gradients for {} tokens of a teacher at each of {} scored tokens",
                dteacher.len(),
                stream.teacher_tokens(),
                stream.num_targets()
            )));
        }
        let dlogp = stream.by_target(dlogp, dteacher);
        let dentropy = dentropy.map(|d| stream.by_target(d, &[]));
        let decoder = model.decoder();
        model.lend(decoder.ends()[1])?;
        let dhidden = decoder.score_backward(scored, &stream.targets, &dlogp, dentropy.as_deref())?;
        let mut inputs = tape.backward_by_block(&hidden, dhidden, done)?;
        let Some(dx) = inputs.take(&input.x) else { return Ok(FeatureGradients::default()) };
        let mut gradients = FeatureGradients::default();
        if model.trains_media() {
            let deep = input.deep.as_ref().and_then(|deep| inputs.take(&deep.rows));
            gradients = model.feature_gradients(stream, &dx, deep.as_ref())?;
        }
        let mut text = Vec::with_capacity(stream.rows());
        let mut at = 0;
        for (row, len) in stream.features.iter().map(|s| (s.row, s.len)).chain([(stream.rows(), 0)]) {
            text.extend(at..row);
            at = row + len;
        }
        if decoder.embedding().trainable() {
            let ids: Vec<u32> = text.iter().map(|&row| stream.ids[row]).collect();
            decoder.embed_backward(&ids, &dx.select(&text.into())?)?;
        }
        Ok(gradients)
    }
}
