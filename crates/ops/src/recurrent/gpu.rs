//! Recurrent layers on a GPU, which does not support them.

use crate::gpu::Card;

use super::*;

impl Card {
    fn refuses<T>(&self, op: &'static str) -> Result<T> {
        Err(Error::Unsupported { op, device: self.device() })
    }
}

impl RecurrentOps for Card {
    fn causal(&self, _: &Rows, _: &CausalConv, _: &Segments) -> Result<Rows> {
        self.refuses("causal convolution")
    }

    fn causal_back(&self, _: &Rows, _: &Rows, _: &CausalConv, _: &Segments) -> Result<Rows> {
        self.refuses("causal convolution")
    }

    fn delta_gates(&self, _: &Rows, _: &DeltaGates) -> Result<Rows> {
        self.refuses(OP)
    }

    fn delta_gates_back(&self, _: &Rows, _: &Rows, _: &Rows, _: &DeltaGates) -> Result<Rows> {
        self.refuses(OP)
    }

    fn delta(&self, _: &Rows, _: &Rows, _: &Segments, _: DeltaHeads) -> Result<(Rows, Rows)> {
        self.refuses(OP)
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
        self.refuses(OP)
    }

    fn gated_norm(&self, _: &Rows, _: &Rows, _: &GatedNorm) -> Result<(Rows, Rows)> {
        self.refuses("gated norm")
    }

    fn gated_norm_back(&self, _: &Rows, _: &Rows, _: &Rows, _: &Rows, _: &GatedNorm) -> Result<[Rows; 2]> {
        self.refuses("gated norm")
    }

    fn states(&self, _: usize, _: usize, _: StateSizes) -> std::io::Result<StateStore> {
        let error = Error::Unsupported { op: OP, device: self.device() };
        Err(std::io::Error::new(std::io::ErrorKind::Unsupported, error.to_string()))
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
        self.refuses("causal convolution")
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
        self.refuses(OP)
    }
}
