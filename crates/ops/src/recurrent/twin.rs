//! Recurrent layers on the f64 twin.

use std::ops::Range;

use omnigrpo_kernels::{Mat, twin};

use crate::twin::{Twin, accumulate, values};

use super::*;

impl RecurrentOps for Twin {
    fn causal(&self, x: &Rows, layer: &CausalConv, segments: &Host<Segments>) -> Result<Rows> {
        let y = twin::causal_forward(x.mat64(), &values(&layer.weight), segments);
        Ok(Rows::on_twin(y, x.rows(), x.cols()))
    }

    fn causal_back(
        &self,
        x: &Rows,
        dy: &Rows,
        layer: &CausalConv,
        segments: &Host<Segments>,
    ) -> Result<Rows> {
        let (dx, dw) = twin::causal_backward(dy.mat64(), x.mat64(), &values(&layer.weight), segments);
        accumulate(&layer.weight, &dw);
        Ok(Rows::on_twin(dx, x.rows(), x.cols()))
    }

    fn delta_gates(&self, x: &Rows, layer: &DeltaGates) -> Result<Rows> {
        let y = twin::gates_forward(x.mat64(), &values(&layer.a_log), &values(&layer.dt_bias));
        Ok(Rows::on_twin(y, x.rows(), x.cols()))
    }

    fn delta_gates_back(&self, x: &Rows, _: &Rows, dy: &Rows, layer: &DeltaGates) -> Result<Rows> {
        let DeltaGates { a_log, dt_bias } = layer;
        let (dx, da, db) = twin::gates_backward(dy.mat64(), x.mat64(), &values(a_log), &values(dt_bias));
        accumulate(a_log, &da);
        accumulate(dt_bias, &db);
        Ok(Rows::on_twin(dx, x.rows(), x.cols()))
    }

    /// Returns the state after each segment that another one continues. All other kept states are zeros, because the twin does not
    /// read them.
    fn delta(
        &self,
        qkv: &Rows,
        gates: &Rows,
        segments: &Host<Segments>,
        heads: DeltaHeads,
    ) -> Result<(Rows, Rows)> {
        let shape = heads.shape();
        let (out, ends) = twin::delta_forward_states(qkv.mat64(), gates.mat64(), segments, shape);
        let mut states = vec![0.0; segments.states() * heads.state_len()];
        for (segment, end) in ends.iter().enumerate() {
            if let Some(at) = segments.last_state(segment) {
                states[at * heads.state_len()..][..heads.state_len()].copy_from_slice(end);
            }
        }
        let states = Rows::on_twin(states, segments.states(), heads.state_len());
        Ok((Rows::on_twin(out, qkv.rows(), heads.value_width()), states))
    }

    fn delta_back(
        &self,
        qkv: &Rows,
        gates: &Rows,
        _: &Rows,
        dout: &Rows,
        segments: &Host<Segments>,
        heads: DeltaHeads,
    ) -> Result<[Rows; 2]> {
        let (dqkv, dgates) =
            twin::delta_backward(dout.mat64(), qkv.mat64(), gates.mat64(), segments, heads.shape());
        Ok([Rows::on_twin(dqkv, qkv.rows(), qkv.cols()), Rows::on_twin(dgates, gates.rows(), gates.cols())])
    }

    fn gated_norm(&self, x: &Rows, gate: &Rows, layer: &GatedNorm) -> Result<(Rows, Rows)> {
        let weight = values(&layer.weight);
        let y = twin::gated_norm_forward(x.mat64(), gate.mat64(), &weight, f64::from(layer.eps));
        Ok((Rows::on_twin(y, x.rows(), x.cols()), Rows::on_twin(Vec::new(), 0, 1)))
    }

    fn gated_norm_back(
        &self,
        x: &Rows,
        gate: &Rows,
        _: &Rows,
        dy: &Rows,
        layer: &GatedNorm,
    ) -> Result<[Rows; 2]> {
        let (weight, eps) = (values(&layer.weight), f64::from(layer.eps));
        let (dx, dgate, dw) = twin::gated_norm_backward(dy.mat64(), x.mat64(), gate.mat64(), &weight, eps);
        accumulate(&layer.weight, &dw);
        Ok([dx, dgate].map(|data| Rows::on_twin(data, x.rows(), x.cols())))
    }

    fn states(&self, layers: usize, slots: usize, sizes: StateSizes) -> std::io::Result<StateStore> {
        Ok(StateStore::Twin(vec![vec![0.0; (1 + slots) * sizes.both()]; layers]))
    }

    fn remember_prompt(&self, states: &mut States, layer: usize, x: &Rows, kept: &Rows) {
        let StateSizes { conv, state, .. } = states.sizes;
        let StateStore::Twin(layers) = &mut states.store else { return };
        let (to_conv, to) = layers[layer].split_at_mut(conv);
        let known = x.twin().len().min(conv);
        to_conv[..conv - known].fill(0.0);
        to_conv[conv - known..].copy_from_slice(&x.twin()[x.len() - known..]);
        to[..state].copy_from_slice(&kept.twin()[kept.len() - state..]);
    }

    fn causal_cached(
        &self,
        x: &Rows,
        layer: &CausalConv,
        index: usize,
        batch: &mut DecodeBatch,
        each: usize,
    ) -> Result<Rows> {
        let (c, weight) = (x.cols(), values(&layer.weight));
        let mut y = Vec::with_capacity(x.len());
        each_state(
            &mut batch.groups,
            index,
            each,
            |sizes| 0..sizes.conv,
            |rows, state| {
                // The rows before are part of the same sequence.
                let mut all = state.to_vec();
                all.extend_from_slice(&x.twin()[rows.start * c..rows.end * c]);
                let (own, count) = (state.len(), all.len() / c);
                let whole = twin::causal_forward(Mat::new(&all, count, c), &weight, &Segments::one(count));
                y.extend_from_slice(&whole[own..]);
                state.copy_from_slice(&all[all.len() - own..]);
            },
        );
        Ok(Rows::on_twin(y, x.rows(), c))
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
        let mut out = Vec::with_capacity(qkv.rows() * heads.value_width());
        each_state(
            &mut batch.groups,
            index,
            each,
            |sizes| sizes.conv..sizes.both(),
            |rows, state| {
                let [qkv, gates] = [qkv, gates].map(|x| x.mat64().row_range(rows.clone()));
                out.extend(twin::delta_steps(qkv, gates, state, heads.shape()));
            },
        );
        Ok(Rows::on_twin(out, qkv.rows(), heads.value_width()))
    }
}

/// Calls `f(rows, state)` for each slot, as the CPU does.
fn each_state(
    groups: &mut [DecodeRows],
    layer: usize,
    each: usize,
    of: impl Fn(StateSizes) -> Range<usize>,
    mut f: impl FnMut(Range<usize>, &mut [f64]),
) {
    let mut first = 0;
    for group in groups {
        let (slots, lengths) = (&group.slots, &group.cache.lengths);
        let Some(States { store: StateStore::Twin(layers), sizes, .. }) = &mut group.cache.states else {
            continue;
        };
        let (range, both) = (of(*sizes), sizes.both());
        let (prompt, own) = layers[layer].split_at_mut(both);
        for &slot in slots {
            let state = &mut own[slot * both..][range.clone()];
            if lengths[slot] == 0 {
                state.copy_from_slice(&prompt[range.clone()]);
            }
            f(first..first + each, state);
            first += each;
        }
    }
}
