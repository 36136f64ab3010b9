//! Construction of networks.

use omnigrpo_ops::{Pass, Tape, Var};

use super::MediumInput;
use crate::decoder::{Decoder, DecoderConfig};
use crate::error::Result;
use crate::weights::WeightSource;

/// The half of a family that computes: a configuration that becomes a network, given weights.
pub trait Architecture: Send + Sync {
    /// The language model's sizes.
    fn decoder_config(&self) -> &DecoderConfig;

    /// Standard deviation of new weights.
    fn initializer_range(&self) -> f32;

    /// The network, with weights from `source`.
    fn network(&self, source: &mut dyn WeightSource) -> Result<Network>;
}

/// A language model and what encodes media for it, with their weights.
pub struct Network {
    /// The language model.
    pub decoder: Decoder,
    /// Towers and projectors.
    pub encoder: Box<dyn Encoder>,
}

/// Towers and projectors with their weights.
pub trait Encoder: Send + Sync {
    /// A medium through the tower, `[n, tower width]`.
    ///
    /// # Errors
    /// Input that does not fit the tower.
    fn tower(&self, medium: &MediumInput, pass: &Pass, tape: &mut Tape) -> Result<Var>;

    /// Tower output through the projector: features `[tokens, h]` in the order of the prompt. `instruction` is what
    /// [`super::Processor::instruction_ids`] made of the prompt.
    ///
    /// # Errors
    /// Input that does not fit the projector.
    fn project(
        &self,
        tower: &Var,
        medium: &MediumInput,
        instruction: &[u32],
        pass: &Pass,
        tape: &mut Tape,
    ) -> Result<Var>;
}
