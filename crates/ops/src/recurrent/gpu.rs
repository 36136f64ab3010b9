//! Recurrent layers on a GPU, which does not support them.

use crate::gpu::Card;

use super::*;

impl RecurrentOps for Card {
    fn causal(&self, _: &Rows, _: &CausalConv, _: &Segments) -> Result<Rows> {
        Err(Error::Unsupported { op: "causal convolution" })
    }

    fn causal_back(&self, _: &Rows, _: &Rows, _: &CausalConv, _: &Segments) -> Result<Rows> {
        Err(Error::Unsupported { op: "causal convolution" })
    }

    fn delta_gates(&self, _: &Rows, _: &DeltaGates) -> Result<Rows> {
        Err(Error::Unsupported { op: OP })
    }

    fn delta_gates_back(&self, _: &Rows, _: &Rows, _: &Rows, _: &DeltaGates) -> Result<Rows> {
        Err(Error::Unsupported { op: OP })
    }

    fn delta(&self, _: &Rows, _: &Rows, _: &Segments, _: DeltaHeads) -> Result<(Rows, Rows)> {
        Err(Error::Unsupported { op: OP })
    }

    fn delta_back(
        &self,
        _: &Rows,
        _: &Rows,
        _: &Rows,
        _: &Rows,
        _: &Segments,
        _: DeltaHeads,
    ) -> Result<[Rows; 2]> {
        Err(Error::Unsupported { op: OP })
    }

    fn gated_norm(&self, _: &Rows, _: &Rows, _: &GatedNorm) -> Result<(Rows, Rows)> {
        Err(Error::Unsupported { op: "gated norm" })
    }

    fn gated_norm_back(&self, _: &Rows, _: &Rows, _: &Rows, _: &Rows, _: &GatedNorm) -> Result<[Rows; 2]> {
        Err(Error::Unsupported { op: "gated norm" })
    }

    fn states(&self, _: usize, _: usize, _: StateSizes) -> std::io::Result<StateStore> {
        Err(refused_states())
    }

    /// There are no states on a GPU ([`Self::states`]), so nothing calls this.
    fn remember_prompt(&self, _: &mut States, _: usize, _: &Rows, _: &Rows) {}

    fn causal_cached(
        &self,
        _: &Rows,
        _: &CausalConv,
        _: usize,
        _: &mut [DecodeRows],
        _: usize,
    ) -> Result<Rows> {
        Err(Error::Unsupported { op: "causal convolution" })
    }

    fn delta_cached(
        &self,
        _: &Rows,
        _: &Rows,
        _: DeltaHeads,
        _: usize,
        _: &mut [DecodeRows],
        _: usize,
    ) -> Result<Rows> {
        Err(Error::Unsupported { op: OP })
    }
}
