//! Recurrent layers on an outline.

use omnigrpo_gpu::Dtype;

use crate::outline::{Held, Outline, Span, card, holding, in_f32, reach, same};
use crate::work::{Call, note, note_elements};

use super::*;

impl RecurrentOps for Outline {
    fn causal(&self, x: &Rows, layer: &CausalConv, _: &Segments) -> Result<Rows> {
        if card().is_some() {
            return Err(Error::Unsupported { op: "causal convolution" });
        }
        note_elements(layer.taps * x.len());
        Ok(same(x))
    }

    fn causal_back(&self, x: &Rows, _: &Rows, layer: &CausalConv, _: &Segments) -> Result<Rows> {
        note_elements(3 * layer.taps * x.len());
        reach(&layer.weight);
        Ok(same(x))
    }

    fn delta_gates(&self, x: &Rows, _: &DeltaGates) -> Result<Rows> {
        note_elements(GATE * x.len());
        Ok(same(x))
    }

    fn delta_gates_back(&self, x: &Rows, _: &Rows, _: &Rows, layer: &DeltaGates) -> Result<Rows> {
        note_elements(GATE * x.len());
        reach(&layer.a_log);
        reach(&layer.dt_bias);
        Ok(same(x))
    }

    fn delta(&self, qkv: &Rows, _: &Rows, segments: &Segments, heads: DeltaHeads) -> Result<(Rows, Rows)> {
        note(|| Call::Delta { rows: qkv.rows(), heads, back: false });
        Ok((in_f32(qkv.rows(), heads.value_width()), in_f32(segments.states(), heads.state_len())))
    }

    fn delta_back(
        &self,
        qkv: &Rows,
        gates: &Rows,
        _: &Rows,
        _: &Rows,
        segments: &Segments,
        heads: DeltaHeads,
    ) -> Result<[Rows; 2]> {
        note(|| Call::Delta { rows: qkv.rows(), heads, back: true });
        // The gradients of the states with which segments start.
        let _starts = Span::new(segments.all().len() * heads.state_len(), Dtype::F32);
        Ok([same(qkv), same(gates)])
    }

    fn gated_norm(&self, x: &Rows, _: &Rows, norm: &GatedNorm) -> Result<(Rows, Rows)> {
        let dim = norm.weight.len();
        note(|| Call::Norm { rows: x.len() / dim, dim, back: false });
        note_elements(x.len());
        Ok((same(x), in_f32(x.rows(), x.cols() / dim)))
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
        if card().is_some() {
            return Err(refused_states());
        }
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
        _: &mut [DecodeRows],
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
        groups: &mut [DecodeRows],
        each: usize,
    ) -> Result<Rows> {
        let slots = groups.iter().map(|group| group.slots.len()).sum();
        note(|| Call::DeltaSteps { slots, each, heads });
        Ok(in_f32(qkv.rows(), heads.value_width()))
    }
}

/// Elementwise operations per gate.
const GATE: usize = 20;
