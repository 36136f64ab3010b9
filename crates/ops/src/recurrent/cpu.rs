//! Recurrent layers on the CPU.

use std::ops::Range;

use memmap2::MmapMut;
use omnigrpo_kernels::recurrent::{self as kernel, Continued};
use omnigrpo_kernels::{buffer, norm};

use crate::cpu::{Cpu, accumulate};

use super::*;

impl RecurrentOps for Cpu {
    fn causal(&self, x: &Rows, layer: &CausalConv, segments: &Host<Segments>) -> Result<Rows> {
        let y = kernel::causal_forward(x.mat(), &layer.weight.read().f32(), segments);
        Ok(Rows::on_cpu(y, x.rows(), x.cols()))
    }

    fn causal_back(
        &self,
        x: &Rows,
        dy: &Rows,
        layer: &CausalConv,
        segments: &Host<Segments>,
    ) -> Result<Rows> {
        let weight = &layer.weight;
        let mut gradient = weight.gradient(Device::Cpu);
        let dw = gradient.as_mut().map(|gradient| gradient.cpu());
        let dx = kernel::causal_backward(dy.mat(), x.mat(), &weight.read().f32(), segments, dw);
        Ok(Rows::on_cpu(dx, x.rows(), x.cols()))
    }

    fn delta_gates(&self, x: &Rows, layer: &DeltaGates) -> Result<Rows> {
        let y = kernel::gates_forward(x.mat(), &layer.a_log.read().f32(), &layer.dt_bias.read().f32());
        Ok(Rows::on_cpu(y, x.rows(), x.cols()))
    }

    fn delta_gates_back(&self, x: &Rows, y: &Rows, dy: &Rows, layer: &DeltaGates) -> Result<Rows> {
        let DeltaGates { a_log, dt_bias } = layer;
        let (dx, da, db) =
            kernel::gates_backward(dy.mat(), x.mat(), y.mat(), &a_log.read().f32(), &dt_bias.read().f32());
        accumulate(a_log, |sum| buffer::add(sum, &da));
        accumulate(dt_bias, |sum| buffer::add(sum, &db));
        Ok(Rows::on_cpu(dx, x.rows(), x.cols()))
    }

    fn delta(
        &self,
        qkv: &Rows,
        gates: &Rows,
        segments: &Host<Segments>,
        heads: DeltaHeads,
    ) -> Result<(Rows, Rows)> {
        let (out, states) = kernel::delta_forward(qkv.mat(), gates.mat(), segments, heads.shape());
        let states = Rows::on_cpu(states, segments.states(), heads.state_len());
        Ok((Rows::on_cpu(out, qkv.rows(), heads.value_width()), states))
    }

    fn delta_back(
        &self,
        qkv: &Rows,
        gates: &Rows,
        states: &Rows,
        dout: &Rows,
        segments: &Host<Segments>,
        heads: DeltaHeads,
    ) -> Result<[Rows; 2]> {
        let (dqkv, dgates) =
            kernel::delta_backward(dout.mat(), qkv.mat(), gates.mat(), states.cpu(), segments, heads.shape());
        Ok([Rows::on_cpu(dqkv, qkv.rows(), qkv.cols()), Rows::on_cpu(dgates, gates.rows(), gates.cols())])
    }

    fn gated_norm(&self, x: &Rows, gate: &Rows, layer: &GatedNorm) -> Result<(Rows, Rows)> {
        let weight = layer.weight.read();
        let (y, stats) = norm::gated_forward(x.mat(), gate.mat(), &weight.f32(), layer.eps);
        let heads = x.cols() / layer.weight.len();
        Ok((Rows::on_cpu(y, x.rows(), x.cols()), Rows::on_cpu(stats, x.rows(), heads)))
    }

    fn gated_norm_back(
        &self,
        x: &Rows,
        gate: &Rows,
        stats: &Rows,
        dy: &Rows,
        layer: &GatedNorm,
    ) -> Result<[Rows; 2]> {
        let mut gradient = layer.weight.gradient(Device::Cpu);
        let dw = gradient.as_mut().map(|gradient| gradient.cpu());
        let weight = layer.weight.read();
        let (dx, dgate) = norm::gated_backward(dy.mat(), x.mat(), gate.mat(), &weight.f32(), stats.cpu(), dw);
        Ok([dx, dgate].map(|data| Rows::on_cpu(data, x.rows(), x.cols())))
    }

    fn states(&self, layers: usize, slots: usize, sizes: StateSizes) -> std::io::Result<StateStore> {
        let bytes = (1 + slots) * sizes.both() * size_of::<f32>();
        let layers = (0..layers).map(|_| MmapMut::map_anon(bytes.max(1)));
        Ok(StateStore::Cpu(layers.collect::<std::io::Result<_>>()?))
    }

    fn remember_prompt(&self, states: &mut States, layer: usize, x: &Rows, kept: &Rows) {
        let StateSizes { conv, state, .. } = states.sizes;
        let StateStore::Cpu(layers) = &mut states.store else { return };
        let (to_conv, to) = floats(&mut layers[layer]).split_at_mut(conv);
        kernel::causal_state(x.mat(), &Segments::one(x.rows()), 0, to_conv);
        to[..state].copy_from_slice(&kept.cpu()[kept.len() - state..]);
    }

    fn causal_cached(
        &self,
        x: &Rows,
        layer: &CausalConv,
        index: usize,
        batch: &mut DecodeBatch,
        each: usize,
    ) -> Result<Rows> {
        let mut parts = parts(&mut batch.groups, index, each, |sizes| 0..sizes.conv);
        let y = kernel::causal_steps(x.mat(), &layer.weight.read().f32(), &mut parts);
        Ok(Rows::on_cpu(y, x.rows(), x.cols()))
    }

    fn delta_cached(
        &self,
        qkv: &Rows,
        gates: &Rows,
        heads: DeltaHeads,
        index: usize,
        batch: &mut DecodeBatch,
        each: usize,
    ) -> Result<Rows> {
        let mut parts = parts(&mut batch.groups, index, each, |sizes| sizes.conv..sizes.both());
        let out = kernel::delta_steps(qkv.mat(), gates.mat(), &mut parts, heads.shape());
        Ok(Rows::on_cpu(out, qkv.rows(), heads.value_width()))
    }
}

fn floats(map: &mut MmapMut) -> &mut [f32] {
    bytemuck::cast_slice_mut(&mut map[..])
}

/// Returns the states of the groups' slots in row order, `each` rows for each slot. A completion without tokens begins with the
/// state of the prompt. `of` selects a part of a state.
fn parts<'a>(
    groups: &'a mut [DecodeRows],
    layer: usize,
    each: usize,
    of: impl Fn(StateSizes) -> Range<usize>,
) -> Vec<Continued<'a>> {
    let mut parts = Vec::new();
    for group in groups {
        let (slots, lengths) = (&group.slots, &group.cache.lengths);
        let Some(States { store: StateStore::Cpu(layers), sizes, .. }) = &mut group.cache.states else {
            continue;
        };
        let range = of(*sizes);
        let (prompt, own) = floats(&mut layers[layer]).split_at_mut(sizes.both());
        let mut own: Vec<Option<&mut [f32]>> = own.chunks_exact_mut(sizes.both().max(1)).map(Some).collect();
        for &slot in slots {
            let Some(state) = own.get_mut(slot).and_then(Option::take) else { continue };
            let state = &mut state[range.clone()];
            if lengths[slot] == 0 {
                state.copy_from_slice(&prompt[range.clone()]);
            }
            let first = parts.len() * each;
            parts.push(Continued { rows: first..first + each, state });
        }
    }
    parts
}
