//! Construction of networks.

use omnigrpo_ops::{Pass, Tape, Var};

use super::MediumInput;
use crate::decoder::{Decoder, DecoderConfig};
use crate::error::Result;
use crate::weights::WeightSource;

/// The role of a family that builds a network from a configuration and weights.
pub trait Architecture: Send + Sync {
    /// Returns the sizes of the language model.
    fn decoder_config(&self) -> &DecoderConfig;

    /// Returns the standard deviation of new weights.
    fn initializer_range(&self) -> f32;

    /// Builds the network with weights from `source`.
    fn network(&self, source: &mut dyn WeightSource) -> Result<Network>;
}

/// A language model and the encoder of its media, if it has one, with their weights.
pub struct Network {
    /// The language model.
    pub decoder: Decoder,
    /// Towers and projectors; `None` if the model reads text only.
    pub encoder: Option<Box<dyn Encoder>>,
}

/// Towers and projectors with their weights.
pub trait Encoder: Send + Sync {
    /// Runs the tower on a medium, `[n, tower width]`.
    ///
    /// # Errors
    /// Returns an error if the input does not fit the tower.
    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var>;

    /// Runs the projector on the tower's output. Returns features `[tokens, h]` in the order of the prompt. `instruction` is the
    /// result of [`super::Processor::instruction_ids`] for the prompt.
    ///
    /// # Errors
    /// Returns an error if the input does not fit the projector.
    fn project(
        &self,
        tower: &Var,
        medium: &MediumInput,
        instruction: &[u32],
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var>;
}
