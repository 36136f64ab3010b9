//! Recurrent layers on an outline.

use omnigrpo_gpu::{Dtype, delta_scratch};

use crate::outline::{Held, Outline, Span, card, holding, in_f32, reach, same};
use crate::work::{Call, note, note_elements};

use super::*;

impl RecurrentOps for Outline {
    fn causal(&self, x: &Rows, layer: &CausalConv, _: &Host<Segments>) -> Result<Rows> {
        note_elements(layer.taps * x.len());
        Ok(same(x))
    }

    fn causal_back(&self, x: &Rows, _: &Rows, layer: &CausalConv, _: &Host<Segments>) -> Result<Rows> {
        note_elements(3 * layer.taps * x.len());
        reach(&layer.weight);
        let _sums = card().map(|_| Span::new(x.len(), Dtype::F32));
        Ok(same(x))
    }

    fn delta_gates(&self, x: &Rows, _: &DeltaGates) -> Result<Rows> {
        note_elements(GATE * x.len());
        Ok(in_f32(x.rows(), x.cols()))
    }

    fn delta_gates_back(&self, x: &Rows, _: &Rows, _: &Rows, layer: &DeltaGates) -> Result<Rows> {
        note_elements(GATE * x.len());
        reach(&layer.a_log);
        reach(&layer.dt_bias);
        Ok(in_f32(x.rows(), x.cols()))
    }

    fn delta(
        &self,
        qkv: &Rows,
        _: &Rows,
        segments: &Host<Segments>,
        heads: DeltaHeads,
    ) -> Result<(Rows, Rows)> {
        note(|| Call::Delta { rows: qkv.rows(), heads, back: false });
        let _scratch = scratch(segments, heads, false);
        Ok((in_f32(qkv.rows(), heads.value_width()), in_f32(segments.states(), heads.state_len())))
    }

    fn delta_back(
        &self,
        qkv: &Rows,
        gates: &Rows,
        _: &Rows,
        _: &Rows,
        segments: &Host<Segments>,
        heads: DeltaHeads,
    ) -> Result<[Rows; 2]> {
        note(|| Call::Delta { rows: qkv.rows(), heads, back: true });
        let _scratch = scratch(segments, heads, true);
        // The gradients of the states with which segments start.
        let starts = segments.all().len() * heads.state_len();
        let _starts = card().is_none().then(|| Span::new(starts, Dtype::F32));
        Ok([same(qkv), same(gates)])
    }

    fn gated_norm(&self, x: &Rows, gate: &Rows, norm: &GatedNorm) -> Result<(Rows, Rows)> {
        let dim = norm.weight.len();
        note(|| Call::Norm { rows: x.len() / dim, dim, back: false });
        note_elements(x.len());
        Ok((same(gate), in_f32(x.rows(), x.cols() / dim)))
    }

    fn gated_norm_back(
        &self,
        x: &Rows,
        gate: &Rows,
        _: &Rows,
        _: &Rows,
        norm: &GatedNorm,
    ) -> Result<[Rows; 2]> {
        let dim = norm.weight.len();
        note(|| Call::Norm { rows: x.len() / dim, dim, back: true });
        note_elements(2 * x.len());
        reach(&norm.weight);
        let (dx, dgate, _dnormed) = (same(x), same(gate), same(x));
        Ok([dx, dgate])
    }

    fn states(&self, layers: usize, slots: usize, sizes: StateSizes) -> std::io::Result<StateStore> {
        let span = || Span::new(layers * (1 + slots) * sizes.both(), Dtype::F32);
        Ok(StateStore::Outline(holding(Held::Cache, span)))
    }

    fn remember_prompt(&self, _: &mut States, _: usize, _: &Rows, kept: &Rows) {
        note_elements(kept.cols());
    }

    fn causal_cached(
        &self,
        x: &Rows,
        layer: &CausalConv,
        _: usize,
        _: &mut DecodeBatch,
        _: usize,
    ) -> Result<Rows> {
        note_elements(2 * layer.taps * x.len());
        Ok(same(x))
    }

    fn delta_cached(
        &self,
        qkv: &Rows,
        _: &Rows,
        heads: DeltaHeads,
        _: usize,
        batch: &mut DecodeBatch,
        each: usize,
    ) -> Result<Rows> {
        let slots = batch.groups.iter().map(|group| group.slots.len()).sum();
        note(|| Call::DeltaSteps { slots, each, heads });
        Ok(in_f32(qkv.rows(), heads.value_width()))
    }
}

/// Counts the memory that a GPU needs besides arguments and results.
fn scratch(segments: &Segments, heads: DeltaHeads, back: bool) -> Option<Span> {
    card().map(|_| Span::new(delta_scratch(segments, heads.shape(), back), Dtype::F32))
}

/// Elementwise operations per gate.
const GATE: usize = 20;
