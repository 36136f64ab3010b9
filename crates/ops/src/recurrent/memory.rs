//! States of the recurrent layers of a group while it decodes: those of the prompt, and those of each completion.

use memmap2::MmapMut;

use crate::attention::GroupCache;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::recurrent::{CausalConv, DeltaHeads};
use crate::rows::Rows;

/// Sizes of the state of a recurrent layer in one sequence, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateSizes {
    /// Last inputs of the causal convolution, `[taps − 1, channels]`.
    pub conv: usize,
    /// State of the gated delta rule.
    pub state: usize,
    channels: usize,
}

impl StateSizes {
    /// Returns the sizes for `channels` channels under a convolution of `taps` rows, and these heads.
    pub fn new(channels: usize, taps: usize, heads: DeltaHeads) -> Self {
        Self { conv: taps.saturating_sub(1) * channels, state: heads.state_len(), channels }
    }

    /// Returns the numbers of a layer and sequence.
    pub fn both(self) -> usize {
        self.conv + self.state
    }

    pub(crate) fn fits_conv(self, conv: &CausalConv) -> bool {
        self.channels == conv.channels() && self.conv == (conv.taps() - 1) * conv.channels()
    }
}

/// States of the recurrent layers of a group.
pub(crate) struct States {
    pub(crate) store: StateStore,
    pub(crate) layers: usize,
    pub(crate) sizes: StateSizes,
}

/// Storage of states, by layer: the state of the prompt, then that of each slot. A state has the inputs of the convolution, then
/// that of the delta rule.
pub(crate) enum StateStore {
    /// Anonymous memory that is mapped lazily, so that a completion that has not begun uses none.
    Cpu(Vec<MmapMut>),
    #[cfg(feature = "twin")]
    Twin(Vec<Vec<f64>>),
    Gpu(super::gpu::CardStates),
    /// Size of all states, which is counted but not allocated.
    Outline(#[allow(dead_code)] crate::outline::Span),
}

impl GroupCache {
    /// Adds memory for the states of `layers` recurrent layers.
    ///
    /// # Errors
    /// Returns an error if address space is unavailable.
    pub fn with_states(mut self, layers: usize, sizes: StateSizes) -> std::io::Result<Self> {
        let store = self.device().backend().states(layers, self.lengths.len(), sizes)?;
        self.states = Some(States { store, layers, sizes });
        Ok(self)
    }

    /// Writes the state of recurrent layer `index` after the prompt: `x` are the inputs of the convolution, and `kept` the states
    /// of [`DeltaHeads::forward_prompt`].
    ///
    /// # Errors
    /// Returns an error if the rows are on another device, or the cache has no such layer of these sizes.
    pub fn write_prompt_state(&mut self, index: usize, x: &Rows, kept: &Rows) -> Result<()> {
        self.check_device(x.device())?;
        x.device().check("state of a prompt", kept)?;
        let rows = self.prompt_rows;
        let fits = |states: &&mut States| {
            index < states.layers
                && x.dims() == (rows, states.sizes.channels)
                && kept.cols() == states.sizes.state
                && kept.rows() > 0
        };
        let dims = (x.dims(), kept.dims());
        match self.states.as_mut().filter(fits) {
            Some(states) => x.device().backend().remember_prompt(states, index, x, kept),
            None => {
                let what = format!(
                    "inputs {:?} and states {:?} of layer {index}, which has no memory",
                    dims.0, dims.1
                );
                return Err(Error::shape("state of a prompt", what));
            }
        }
        Ok(())
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }
}
