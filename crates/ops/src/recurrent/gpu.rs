//! Recurrent layers on a GPU.
//!
//! Gates, states and the output of the gated delta rule are f32, whatever the dtype of the weights: a product of decays would lose the
//! rest. Everything else has the dtype of the packed rows.

use omnigrpo_gpu::{Array, Dtype, Gpu, Place, Sequences, continued};

use crate::gpu::Card;

use super::*;

impl RecurrentOps for Card {
    fn causal(&self, x: &Rows, layer: &CausalConv, segments: &Host<Segments>) -> Result<Rows> {
        let sequences = self.sequences(segments);
        let y = self.vector(&layer.weight, |weight| self.gpu.causal(self.of(x), weight, &sequences));
        Ok(self.rows(y, x.rows(), x.cols()))
    }

    fn causal_back(
        &self,
        x: &Rows,
        dy: &Rows,
        layer: &CausalConv,
        segments: &Host<Segments>,
    ) -> Result<Rows> {
        let (sequences, of_x) = (self.sequences(segments), self.of(x));
        let dx = self.vector(&layer.weight, |weight| {
            let d = self.gpu.causal_sums(self.of(dy), of_x, weight, &sequences);
            self.accumulate(&layer.weight, |dw| self.gpu.causal_weight(dw, &d, of_x, &sequences));
            self.gpu.causal_back(&d, weight, &sequences, of_x.dtype())
        });
        Ok(self.rows(dx, x.rows(), x.cols()))
    }

    fn delta_gates(&self, x: &Rows, layer: &DeltaGates) -> Result<Rows> {
        let y = self.vector(&layer.a_log, |a_log| {
            self.vector(&layer.dt_bias, |dt_bias| self.gpu.delta_gates(self.of(x), a_log, dt_bias))
        });
        Ok(self.rows(y, x.rows(), x.cols()))
    }

    fn delta_gates_back(&self, x: &Rows, y: &Rows, dy: &Rows, layer: &DeltaGates) -> Result<Rows> {
        let (rows, cols) = x.dims();
        let [x, y, dy] = [x, y, dy].map(|rows| self.of(rows));
        let [dx, da] = self.vector(&layer.a_log, |a_log| {
            self.vector(&layer.dt_bias, |dt_bias| self.gpu.delta_gates_back(dy, x, y, a_log, dt_bias))
        });
        self.accumulate(&layer.a_log, |to| self.gpu.add_column_sums(to, &da, [0, cols / 2], None, rows));
        self.accumulate(&layer.dt_bias, |to| self.gpu.add_column_sums(to, &dx, [0, cols], None, rows));
        Ok(self.rows(dx, rows, cols))
    }

    fn delta(
        &self,
        qkv: &Rows,
        gates: &Rows,
        segments: &Host<Segments>,
        heads: DeltaHeads,
    ) -> Result<(Rows, Rows)> {
        let sequences = self.sequences(segments);
        let [out, states] = self.gpu.delta(self.of(qkv), self.of(gates), &sequences, heads.shape());
        let states = self.rows(states, segments.states(), heads.state_len());
        Ok((self.rows(out, qkv.rows(), heads.value_width()), states))
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
        let sequences = self.sequences(segments);
        let [of_qkv, states, dout] = [qkv, states, dout].map(|rows| self.of(rows));
        let [dqkv, dgates] =
            self.gpu.delta_back(dout, of_qkv, self.of(gates), states, &sequences, heads.shape());
        Ok([self.rows(dqkv, qkv.rows(), qkv.cols()), self.rows(dgates, gates.rows(), gates.cols())])
    }

    fn gated_norm(&self, x: &Rows, gate: &Rows, layer: &GatedNorm) -> Result<(Rows, Rows)> {
        let [y, stats] = self.vector(&layer.weight, |weight| {
            self.gpu.gated_norm(self.of(x), self.of(gate), weight, layer.eps)
        });
        let heads = x.cols() / layer.weight.len();
        Ok((self.rows(y, x.rows(), x.cols()), self.rows(stats, x.rows(), heads)))
    }

    fn gated_norm_back(
        &self,
        x: &Rows,
        gate: &Rows,
        stats: &Rows,
        dy: &Rows,
        layer: &GatedNorm,
    ) -> Result<[Rows; 2]> {
        let (rows, cols) = x.dims();
        let [x, gate, stats, dy] = [x, gate, stats, dy].map(|rows| self.of(rows));
        let [dx, dgate] = self.vector(&layer.weight, |weight| {
            let [dnormed, dgate] = self.gpu.gated_norm_back(dy, x, gate, stats, weight);
            let mut dx = self.gpu.zeros(x.len(), x.dtype());
            self.gpu.rms_back(&mut dx, &dnormed, x, stats, weight, false);
            self.accumulate(&layer.weight, |dw| self.gpu.norm_weight(dw, &dnormed, x, None, (stats, 0)));
            [dx, dgate]
        });
        Ok([dx, dgate].map(|data| self.rows(data, rows, cols)))
    }

    fn states(&self, layers: usize, slots: usize, sizes: StateSizes) -> std::io::Result<StateStore> {
        let len = layers * sizes.both();
        let own = (0..slots).map(|_| None).collect();
        Ok(StateStore::Gpu(CardStates { prompt: self.gpu.zeros(len, Dtype::F32), own }))
    }

    fn remember_prompt(&self, states: &mut States, layer: usize, x: &Rows, kept: &Rows) {
        let (StateSizes { conv, state, .. }, both) = (states.sizes, states.sizes.both());
        let StateStore::Gpu(CardStates { prompt, .. }) = &mut states.store else { return };
        let (rows, c, first) = (x.rows(), x.cols(), layer * both);
        let known = rows.min(conv / c.max(1));
        let to = Place::new(first + conv - known * c, c);
        self.gpu.copy_rows(prompt, to, self.of(x), Place::new((rows - known) * c, c), [known, c]);
        let from = Place::new((kept.rows() - 1) * state, state);
        self.gpu.copy_rows(prompt, Place::new(first + conv, state), self.of(kept), from, [1, state]);
    }

    fn causal_cached(
        &self,
        x: &Rows,
        layer: &CausalConv,
        index: usize,
        batch: &mut DecodeBatch,
        each: usize,
    ) -> Result<Rows> {
        let (table, sizes) = self.states_of(batch);
        let y = self.vector(&layer.weight, |weight| {
            self.gpu.causal_steps(self.of(x), weight, &table, index * sizes.both(), each)
        });
        Ok(self.rows(y, x.rows(), x.cols()))
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
        if heads.key_dim > Gpu::MOST_KEYS {
            let what = format!("{heads:?}; a GPU decodes with keys of at most {}", Gpu::MOST_KEYS);
            return Err(Error::shape(OP, what));
        }
        let (table, sizes) = self.states_of(batch);
        let first = index * sizes.both() + sizes.conv;
        let out = self.gpu.delta_steps(self.of(qkv), self.of(gates), &table, first, each, heads.shape());
        Ok(self.rows(out, qkv.rows(), heads.value_width()))
    }
}

/// States of a group on a GPU, `[layer, both]`: those of the prompt, and those of each completion that has begun.
pub(crate) struct CardStates {
    prompt: Array,
    own: Vec<Option<Array>>,
}

impl Card {
    fn sequences(&self, segments: &Host<Segments>) -> Arc<Sequences> {
        segments.on(self.device(), |segments| Sequences::new(self.gpu, segments))
    }

    /// Allocates states of completions that begin. Returns the addresses of the states of each row, padded to `rows` rows, or `None`
    /// if the groups have no states.
    pub(crate) fn state_addresses(&self, groups: &mut [DecodeRows], rows: usize) -> Option<Vec<u64>> {
        for group in groups.iter_mut() {
            let States { store: StateStore::Gpu(CardStates { own, .. }), layers, sizes } =
                group.cache.states.as_mut()?
            else {
                return None;
            };
            for &slot in &group.slots {
                own[slot].get_or_insert_with(|| self.gpu.alloc(*layers * sizes.both(), Dtype::F32));
            }
        }
        let mut entries = Vec::with_capacity(rows);
        for group in groups.iter() {
            let Some(States { store: StateStore::Gpu(CardStates { prompt, own }), .. }) = &group.cache.states
            else {
                return None;
            };
            for &slot in &group.slots {
                let own = own[slot].as_ref()?;
                // A completion without tokens begins with the state of the prompt.
                entries.push([if group.cache.lengths[slot] == 0 { prompt } else { own }, own]);
            }
        }
        Some(continued(&entries, rows))
    }

    /// Returns the table of the states of a batch, and their sizes.
    fn states_of(&self, batch: &mut DecodeBatch) -> (Arc<Array>, StateSizes) {
        let rows = batch.rows();
        let sizes = batch.groups.iter().find_map(|group| Some(group.cache.states.as_ref()?.sizes));
        let table = match &batch.states {
            Some(table) => Arc::clone(table),
            None => {
                let addresses = self.state_addresses(&mut batch.groups, rows).unwrap_or_default();
                let table = Arc::new(self.gpu.upload_words(&addresses));
                batch.states = Some(Arc::clone(&table));
                table
            }
        };
        (table, sizes.unwrap_or_default())
    }
}
