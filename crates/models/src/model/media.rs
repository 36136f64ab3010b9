//! Features of media: towers and projectors, forward and backward.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::Ordering;

use omnigrpo_ops::{Memory, Part, Pass, Rows, Tape, Var};
use omnigrpo_text::MediumKind;

use super::{Model, Training};
use crate::error::{ModelError, Result};
use crate::families::{Encoder, MediumInput, TEXT_ONLY};
use crate::prompt::Prompt;

/// Largest number of bytes of tower results that are kept per trained weight.
const KEPT_BYTES: usize = 8;

/// Output of a tower for one medium. Every pass with the same tower shares it; a clone shares the data. The results of the blocks
/// are kept in [`Memories`].
#[derive(Clone, Debug)]
pub struct Features {
    /// Output of the tower, before the projector.
    pub tower: Rows,
    /// Features in the language model's width, `[(1 + deep) · tokens, h]`: first the rows of the prompt, then the rows added
    /// after the first block, and so on ([`crate::DecoderConfig::deep`], mostly 0).
    pub rows: Rows,
}

/// Results of towers, keyed by (group, medium), for the backward pass; see [`Model::encode_for_training`].
#[derive(Debug, Default)]
pub struct Memories(BTreeMap<(usize, usize), Memory>);

/// Gradients of media features, each in the shape of [`Features::rows`], keyed by (group, medium). A [`StreamPass`](super::StreamPass) returns them
/// for towers and projectors. Gradients of several streams are summed, so that a medium goes back through its tower once.
#[derive(Clone, Debug, Default)]
pub struct FeatureGradients(pub(super) BTreeMap<(usize, usize), Rows>);

impl FeatureGradients {
    /// Adds the gradients of another stream, whose group `g` is `groups[g]` here.
    ///
    /// # Errors
    /// Returns an error if a medium has a different number of features.
    pub fn add(&mut self, other: Self, groups: &[usize]) -> Result<()> {
        for ((g, medium), d) in other.0 {
            let Some(&group) = groups.get(g) else {
                return Err(ModelError::shape(format!(
                    "feature gradients: got group {g}, expected one of {}",
                    groups.len()
                )));
            };
            match self.0.entry((group, medium)) {
                Entry::Vacant(empty) => drop(empty.insert(d)),
                Entry::Occupied(mut sum) => sum.get_mut().add(&d)?,
            }
        }
        Ok(())
    }
}

impl Model {
    /// Runs tower and projector on one medium of a prompt with this instruction ([`Prompt::instruction`]).
    ///
    /// # Errors
    /// Returns an error if the input has the wrong shape.
    pub fn encode(&self, medium: &MediumInput, instruction: &[u32]) -> Result<Features> {
        self.encode_in(medium, instruction, &self.pass())
    }

    fn encode_in(&self, medium: &MediumInput, instruction: &[u32], pass: &Pass) -> Result<Features> {
        let tower = self.tower(medium, pass, &mut Tape::off())?;
        let rows = self.encoder(medium)?.project(&tower, medium, instruction, pass, &mut Tape::off())?;
        Ok(Features { tower: tower.into_rows(), rows: rows.into_rows() })
    }

    /// Computes the features of a medium from the tower output of another model with the same tower, on any device. Runs only the
    /// projector.
    ///
    /// # Errors
    /// Returns an error if the input has the wrong shape.
    pub fn project(&self, tower: &Rows, medium: &MediumInput, instruction: &[u32]) -> Result<Features> {
        self.project_in(tower, medium, instruction, &self.pass())
    }

    fn project_in(
        &self,
        tower: &Rows,
        medium: &MediumInput,
        instruction: &[u32],
        pass: &Pass,
    ) -> Result<Features> {
        let tower = Var::constant(tower.to_device(pass.device));
        let rows = self.encoder(medium)?.project(&tower, medium, instruction, pass, &mut Tape::off())?;
        Ok(Features { tower: tower.into_rows(), rows: rows.into_rows() })
    }

    /// Computes the features of every medium of a prompt, in order.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<Features>> {
        prompt.media.iter().map(|m| self.encode(m, &prompt.instruction)).collect()
    }

    /// Encodes several prompts as [`Self::encode_prompt`] does, for a later [`Self::backward_media`] with the same weights. Also
    /// returns the memories that [`Self::backward_media`] takes. They contain the results of the blocks of a trained tower, up to
    /// eight bytes for each trained weight: half of the size of weights, gradients and moments. Media beyond that limit run
    /// through the tower again.
    pub fn encode_for_training<'p>(
        &self,
        prompts: impl IntoIterator<Item = &'p Prompt>,
    ) -> Result<(Vec<Vec<Features>>, Memories)> {
        let keep = self.trains_tower() && !self.drops(&[Part::Vision, Part::Audio]);
        let mut room = if keep {
            self.params.iter().filter(|p| p.trainable()).map(|p| KEPT_BYTES * p.len()).sum()
        } else {
            0
        };
        let (pass, mut memories, mut all) = (self.pass(), Memories::default(), Vec::new());
        for (g, prompt) in prompts.into_iter().enumerate() {
            let mut features = Vec::with_capacity(prompt.media.len());
            for (m, medium) in prompt.media.iter().enumerate() {
                let mut tape = if room > 0 { Tape::remembering(room) } else { Tape::off() };
                let tower = self.tower(medium, &pass, &mut tape)?;
                if let Some((memory, left)) = tape.into_memory() {
                    memories.0.insert((g, m), memory);
                    room = left;
                }
                features.push(self.project_in(tower.rows(), medium, &prompt.instruction, &pass)?);
            }
            all.push(features);
        }
        Ok((all, memories))
    }

    /// Returns the features to use in a training pass. `features` are those of the present weights; they are returned unchanged
    /// unless adapters of towers or projectors use dropout. In that case the features are computed again, as
    /// [`Self::backward_media`] will differentiate them.
    pub fn features_in_training(
        &self,
        prompt: &Prompt,
        features: &[Features],
        training: Training,
    ) -> Result<Vec<Features>> {
        let towers = self.drops(&[Part::Vision, Part::Audio]);
        if !towers && !self.drops(&[Part::Projector, Part::Instruction]) {
            return Ok(features.to_vec());
        }
        let media = prompt.media.iter().zip(features).enumerate();
        media
            .map(|(m, (medium, own))| {
                let pass = self.training_pass(training, None, prompt.medium_key(m));
                match towers {
                    true => self.encode_in(medium, &prompt.instruction, &pass),
                    false => self.project_in(&own.tower, medium, &prompt.instruction, &pass),
                }
            })
            .collect()
    }

    /// Returns the encoder for a medium.
    ///
    /// # Errors
    /// Returns an error if the model reads text only.
    fn encoder(&self, medium: &MediumInput) -> Result<&dyn Encoder> {
        let no_encoder = || ModelError::MediumKind { kind: medium.kind, what: TEXT_ONLY };
        self.network.encoder.as_deref().ok_or_else(no_encoder)
    }

    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var> {
        self.tower_runs.fetch_add(1, Ordering::Relaxed);
        self.encoder(medium)?.tower(medium, pass, tape)
    }

    /// Returns how many times a medium has gone through the tower so far.
    pub fn tower_runs(&self) -> u64 {
        self.tower_runs.load(Ordering::Relaxed)
    }

    /// Returns whether updates change the features, because a weight of a tower or projector is trained.
    pub fn trains_media(&self) -> bool {
        self.trains_tower() || self.trains_projection()
    }

    /// Gives one medium of each kind in the groups `idle` a gradient of zeros if no medium of this kind has a gradient. One per
    /// kind is enough, because media of the same kind reach the same weights.
    ///
    /// `features` are those of [`Self::backward_media`].
    pub fn reach_media(
        &self,
        prompts: &[&Prompt],
        features: &[impl AsRef<[Features]>],
        idle: &[usize],
        gradients: &mut FeatureGradients,
    ) {
        if !self.trains_media() {
            return;
        }
        let media = |g: usize| prompts.get(g).into_iter().flat_map(|p| &p.media).map(|m| m.kind);
        let mut kinds: Vec<MediumKind> = gradients.0.keys().filter_map(|&(g, m)| media(g).nth(m)).collect();
        for &g in idle {
            for (m, kind) in media(g).enumerate() {
                let own = features.get(g).and_then(|own| own.as_ref().get(m));
                if let Some(Features { rows, .. }) = own.filter(|_| !kinds.contains(&kind)) {
                    kinds.push(kind);
                    gradients.0.insert((g, m), Rows::zeros(self.device, rows.rows(), rows.cols()));
                }
            }
        }
    }

    /// Propagates the gradients of features back through trained projectors and towers. Each medium runs forward once more, on a
    /// tape that lives for this medium only; results in `memories` are not computed again. The output of a frozen tower is taken
    /// from `features`, which are the originals and not the result of [`Self::features_in_training`]. `prompts`, `features` and
    /// `memories` are indexed by group.
    ///
    /// # Errors
    /// Returns an error if gradients belong to media that do not exist.
    pub fn backward_media(
        &self,
        prompts: &[&Prompt],
        features: &[impl AsRef<[Features]>],
        mut memories: Memories,
        gradients: FeatureGradients,
        training: Training,
    ) -> Result<()> {
        let tower_trained = self.trains_tower();
        for ((g, m), d) in gradients.0 {
            let medium = prompts.get(g).and_then(|p| Some((*p, p.media.get(m)?)));
            let Some(((prompt, medium), own)) = medium.zip(features.get(g).and_then(|f| f.as_ref().get(m)))
            else {
                return Err(ModelError::shape(format!("feature gradients: group {g} has no medium {m}")));
            };
            let memory = memories.0.remove(&(g, m));
            let known = memory.is_some();
            let mut tape = memory
                .map_or_else(|| Tape::recording(training.recompute), |memory| Tape::recalling(memory, false));
            let pass = self.training_pass(training, None, prompt.medium_key(m));
            let tower = match (tower_trained, known) {
                (true, true) => self.encoder(medium)?.tower(medium, &pass, &mut tape)?,
                (true, false) => self.tower(medium, &pass, &mut tape)?,
                (false, _) => Var::constant(own.tower.to_device(self.device)),
            };
            let rows =
                self.encoder(medium)?.project(&tower, medium, &prompt.instruction, &pass, &mut tape)?;
            drop(tower);
            tape.backward(&rows, d)?;
        }
        Ok(())
    }
}
