//! Layers that carry a state from row to row: causal convolution, the gates and the norm of the gated delta rule, and the rule.
//!
//! The rule runs on tensor cores if the rows are bf16: each factor of a product is split into two bf16 numbers, so that 2⁻¹⁶ of it is
//! lost. With f32 rows, products are in f32. States and sums are f32 in both cases.

use std::ops::Range;

use omnigrpo_kernels::recurrent::{CHUNK, DeltaShape, Segments};

use crate::conv::Unfolding;
use crate::device::{Array, Dtype, Gpu};
use crate::launchers::{Rule, delta as chunked, recurrent as kernels};

/// Number of rows that the table of windows has for each row, which is the maximum number of taps.
const WINDOW: usize = 8;
/// Number of rows in one part of the gradient of a convolution's weight.
const PER_PART: usize = 256;
/// Number of columns of a state that a block of decoding has.
const COLUMNS: usize = 32;
/// Bytes of shared memory of a block: slabs of factors, numbers of each row, and square matrices of a chunk.
const SLABS: usize = 4 * CHUNK * (32 + 8) * 2 + 4 * 7 * CHUNK;
const SQUARE: usize = 4 * CHUNK * (CHUNK + 1);
/// Sums of the backward pass: two in f64 and one in f32 for each row.
const SUMS: usize = CHUNK * (8 + 8 + 4);

/// Rows of a chunk, and the kept states before and after it; −1 if there is none.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Chunk {
    first: i32,
    rows: i32,
    before: i32,
    after: i32,
}

/// Chunks of a segment, and the segments that continue it.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Run {
    chunks: [i32; 2],
    nexts: [i32; 2],
    segment: i32,
}

/// The sequences of a stream, on a device.
#[derive(Debug)]
pub struct Sequences {
    windows: Unfolding,
    chunks: Array,
    runs: Array,
    nexts: Array,
    /// Runs of each level. A segment continues one of an earlier level.
    levels: Vec<Range<usize>>,
    counts: Counts,
}

#[derive(Clone, Copy, Debug)]
struct Counts {
    rows: usize,
    chunks: usize,
    segments: usize,
    states: usize,
}

impl Sequences {
    /// Converts sequences to the form that kernels read.
    pub fn new(gpu: &Gpu, segments: &Segments) -> Self {
        let (all, number) = (segments.all(), |n: usize| n as i32);
        let mut sources = Vec::with_capacity(segments.rows() * WINDOW);
        let (mut chunks, mut runs, mut nexts) = (Vec::new(), Vec::new(), Vec::new());
        for (s, segment) in all.iter().enumerate() {
            for row in segment.rows.clone() {
                let own = row - segment.rows.start;
                let source = |back: usize| match back.checked_sub(own + 1) {
                    None => Some(row - back),
                    Some(rest) => segments.row_before(segment, rest + 1),
                };
                sources.extend((0..WINDOW).map(|back| source(back).map_or(u32::MAX, |row| row as u32)));
            }
            let (first_chunk, first_next) = (chunks.len(), nexts.len());
            for (chunk, first) in segment.rows.clone().step_by(CHUNK).enumerate() {
                let state = |state: Option<usize>| state.map_or(-1, number);
                chunks.push(Chunk {
                    first: number(first),
                    rows: number(CHUNK.min(segment.rows.end - first)),
                    before: state(segments.state_before(segment, chunk)),
                    after: state(Segments::state_after(segment, chunk)),
                });
            }
            let continue_it = all.iter().enumerate().filter(|(_, next)| next.after == Some(s));
            nexts.extend(continue_it.map(|(next, _)| next as u32));
            runs.push(Run {
                chunks: [first_chunk, chunks.len()].map(number),
                nexts: [first_next, nexts.len()].map(number),
                segment: number(s),
            });
        }
        let mut levels = Vec::new();
        let mut ordered = Vec::with_capacity(runs.len());
        for level in segments.levels() {
            let first = ordered.len();
            ordered.extend(level.into_iter().map(|s| runs[s]));
            levels.push(first..ordered.len());
        }
        let counts = Counts {
            rows: segments.rows(),
            chunks: chunks.len(),
            segments: all.len(),
            states: segments.states(),
        };
        Self {
            windows: Unfolding::new(gpu, &sources, WINDOW, segments.rows()),
            chunks: gpu.upload_words(&chunks),
            runs: gpu.upload_words(&ordered),
            nexts: gpu.upload_words(&nexts),
            levels,
            counts,
        }
    }
}

/// Returns the number of f32 values that the gated delta rule needs besides its arguments and results, in the forward or the
/// backward pass over these sequences.
pub fn delta_scratch(segments: &Segments, shape: DeltaShape, back: bool) -> usize {
    let DeltaShape { key_heads, value_heads, key_dim, value_dim } = shape;
    let each = if back { 2 * (key_dim + value_dim) + CHUNK } else { key_dim + value_dim };
    let states = if back { segments.states() + segments.all().len() } else { 0 };
    segments.rows() * (value_heads * (each + 4) + 2 * key_heads) + states * shape.state_len()
}

/// Returns a table for decoding ([`Gpu::causal_steps`]): the addresses of the states that rows begin with and those of the states after
/// them, which may be the same. The table is padded to `rows` rows.
pub fn continued(entries: &[[&Array; 2]], rows: usize) -> Vec<u64> {
    let mut addresses: Vec<u64> = entries.iter().flatten().map(|state| state.place(0)).collect();
    addresses.resize(2 * rows, 0);
    addresses
}

/// Arrays that all chunks of a pass need.
struct Prepared {
    /// Reciprocal lengths of queries and keys, `[t, 2 · key heads]`.
    lengths: Array,
    /// Decays of each row, `[t, value heads, 4]`.
    decays: Array,
    /// `W [t, value heads, key_dim]`
    w: Array,
    /// `U₀ [t, value heads, value_dim]`
    u: Array,
    /// `T [t, value heads, 64]`, for a backward pass.
    inverse: Option<Array>,
}

fn rule(shape: DeltaShape) -> Rule {
    let DeltaShape { key_heads, value_heads, key_dim, value_dim } = shape;
    Rule { key_heads, value_heads, dk: key_dim, dv: value_dim }
}

/// Returns the number of bits of factors.
fn bits(qkv: &Array) -> usize {
    match qkv.dtype() {
        Dtype::Bf16 => 16,
        Dtype::F32 => 32,
    }
}

impl Gpu {
    /// Computes a causal depthwise convolution of `x [t, c]` along each sequence with `weight [c, taps]`, followed by SiLU.
    pub fn causal(&self, x: &Array, weight: &Array, sequences: &Sequences) -> Array {
        let rows = sequences.counts.rows;
        let c = x.len() / rows.max(1);
        let y = self.alloc(x.len(), x.dtype());
        let kernel =
            kernels::causal(&y, x, weight, sequences.windows.sources(), rows, c, weight.len() / c.max(1));
        self.each(kernel, x.len());
        y
    }

    /// Returns the gradient of the convolution's sums in f32, given that of its output.
    pub fn causal_sums(&self, dy: &Array, x: &Array, weight: &Array, sequences: &Sequences) -> Array {
        let rows = sequences.counts.rows;
        let (c, sources) = (x.len() / rows.max(1), sequences.windows.sources());
        let d = self.alloc(x.len(), Dtype::F32);
        let kernel = kernels::causal_sums(&d, dy, x, weight, sources, rows, c, weight.len() / c.max(1));
        self.each(kernel, x.len());
        d
    }

    /// Returns the gradient of [`Self::causal`] with respect to its input in `dtype`, given that of its sums.
    pub fn causal_back(&self, d: &Array, weight: &Array, sequences: &Sequences, dtype: Dtype) -> Array {
        let rows = sequences.counts.rows;
        let (c, [offsets, entries]) = (d.len() / rows.max(1), sequences.windows.readers());
        let dx = self.alloc(d.len(), dtype);
        let kernel = kernels::causal_back(&dx, d, weight, offsets, entries, rows, c, weight.len() / c.max(1));
        self.each(kernel, d.len());
        dx
    }

    /// Adds the gradient of [`Self::causal`] with respect to its weight to `dw`, given that of its sums.
    pub fn causal_weight(&self, dw: &mut Array, d: &Array, x: &Array, sequences: &Sequences) {
        let (len, rows) = (dw.len(), sequences.counts.rows);
        let (c, parts) = (x.len() / rows.max(1), rows.div_ceil(PER_PART));
        let partial = self.alloc(parts * len, Dtype::F32);
        let threads = len.next_multiple_of(32).clamp(32, 256);
        let sources = sequences.windows.sources();
        let kernel = kernels::causal_weight(&partial, d, x, sources, rows, c, len / c.max(1), PER_PART);
        self.launch(kernel, [len.div_ceil(threads), parts, 1], threads, 0);
        self.add_parts(dw, &partial, parts);
    }

    /// Computes the gates `[g | β]` of rows `[a | b]` in f32, `[t, 2 · heads]`.
    pub fn delta_gates(&self, x: &Array, a_log: &Array, dt_bias: &Array) -> Array {
        let heads = a_log.len();
        let y = self.alloc(x.len(), Dtype::F32);
        self.each(kernels::gates(&y, x, a_log, dt_bias, x.len() / (2 * heads).max(1), heads), x.len() / 2);
        y
    }

    /// Returns the gradients, in f32, of [`Self::delta_gates`] with respect to `x`, and, for each row, with respect to `a_log`. `y` is
    /// its result.
    pub fn delta_gates_back(
        &self,
        dy: &Array,
        x: &Array,
        y: &Array,
        a_log: &Array,
        dt_bias: &Array,
    ) -> [Array; 2] {
        let heads = a_log.len();
        let rows = x.len() / (2 * heads).max(1);
        let [dx, da] = [2, 1].map(|each| self.alloc(each * rows * heads, Dtype::F32));
        self.each(kernels::gates_back(&dx, &da, dy, x, y, a_log, dt_bias, rows, heads), rows * heads);
        [dx, da]
    }

    /// Returns `x · rstd · weight · silu(gate)` for pieces of as many columns as the weight has, in the dtype of the gate, and `rstd`
    /// of each piece.
    pub fn gated_norm(&self, x: &Array, gate: &Array, weight: &Array, eps: f32) -> [Array; 2] {
        let dim = weight.len();
        let count = x.len() / dim.max(1);
        let (y, rstd) = (self.alloc(x.len(), gate.dtype()), self.alloc(count, Dtype::F32));
        self.each_row(kernels::gated_norm(&y, &rstd, x, gate, weight, dim, eps), count, dim);
        [y, rstd]
    }

    /// Returns the gradients of [`Self::gated_norm`] with respect to the normalised rows, in f32, and to the gate.
    pub fn gated_norm_back(
        &self,
        dy: &Array,
        x: &Array,
        gate: &Array,
        rstd: &Array,
        weight: &Array,
    ) -> [Array; 2] {
        let dim = weight.len();
        let [dnormed, dgate] = [Dtype::F32, gate.dtype()].map(|dtype| self.alloc(x.len(), dtype));
        let kernel = kernels::gated_norm_back(&dnormed, &dgate, dy, x, gate, weight, rstd, dim);
        self.each_row(kernel, x.len() / dim.max(1), dim);
        [dnormed, dgate]
    }

    fn prepare(
        &self,
        qkv: &Array,
        gates: &Array,
        sequences: &Sequences,
        shape: DeltaShape,
        back: bool,
    ) -> Prepared {
        let (r, Counts { rows: t, chunks, .. }) = (rule(shape), sequences.counts);
        let table = |each| self.alloc(t * each, Dtype::F32);
        let heads = r.value_heads;
        let (lengths, decays) = (table(2 * r.key_heads), table(4 * heads));
        let (w, u) = (table(heads * r.dk), table(heads * r.dv));
        let inverse = back.then(|| table(heads * CHUNK));
        self.launch(chunked::lengths(&lengths, qkv, r), [t * 2 * r.key_heads, 1, 1], 32, 0);
        let kernel = chunked::decays(&decays, gates, &sequences.chunks, heads);
        self.launch(kernel, [chunks, heads, 1], CHUNK, 0);
        let kernel = chunked::solve(
            bits(qkv),
            &w,
            &u,
            inverse.as_ref(),
            qkv,
            gates,
            &lengths,
            &decays,
            &sequences.chunks,
            r,
        );
        self.launch(kernel, [chunks, heads, 1], 128, SLABS + 2 * SQUARE);
        Prepared { lengths, decays, w, u, inverse }
    }

    /// Computes the gated delta rule of packed rows `[t, packed_width]` with the gates `[t, 2 · value_heads]` in f32. Returns the
    /// output `[t, value_width]` and the kept states, both in f32.
    pub fn delta(&self, qkv: &Array, gates: &Array, sequences: &Sequences, shape: DeltaShape) -> [Array; 2] {
        let (r, Counts { rows: t, chunks, states, .. }) = (rule(shape), sequences.counts);
        let states = self.alloc(states * shape.state_len(), Dtype::F32);
        let Prepared { lengths, decays, w, u, .. } = self.prepare(qkv, gates, sequences, shape, false);
        let (table, number) = (&sequences.chunks, bits(qkv));
        for level in &sequences.levels {
            let runs = sequences.runs.element(level.start * (size_of::<Run>() / 4));
            let kernel =
                chunked::advance(number, &states, &u, &w, qkv, gates, &lengths, &decays, table, runs, r);
            self.launch(kernel, [level.len(), r.value_heads, r.dv.div_ceil(CHUNK)], 128, SLABS);
        }
        drop(w);
        let out = self.alloc(t * shape.value_width(), Dtype::F32);
        let kernel = chunked::outputs(number, &out, &states, &u, qkv, gates, &lengths, &decays, table, r);
        self.launch(kernel, [chunks, r.value_heads, 1], 128, SLABS + SQUARE);
        [out, states]
    }

    /// Returns the gradients of [`Self::delta`] with respect to the packed rows, in their dtype, and to the gates. `states` are its
    /// kept states.
    pub fn delta_back(
        &self,
        dout: &Array,
        qkv: &Array,
        gates: &Array,
        states: &Array,
        sequences: &Sequences,
        shape: DeltaShape,
    ) -> [Array; 2] {
        let (r, Counts { rows: t, chunks, segments, .. }) = (rule(shape), sequences.counts);
        let Prepared { lengths, decays, w, u, inverse } = self.prepare(qkv, gates, sequences, shape, true);
        let (table, number, heads) = (&sequences.chunks, bits(qkv), r.value_heads);
        let f32s = |len| self.alloc(len, Dtype::F32);
        let du = f32s(t * shape.value_width());
        let kernel =
            chunked::restart(number, &du, &u, &w, states, dout, qkv, gates, &lengths, &decays, table, r);
        self.launch(kernel, [chunks, heads, 1], 128, SLABS + SQUARE);
        let (dstates, starts) = (f32s(states.len()), f32s(segments * shape.state_len()));
        for level in sequences.levels.iter().rev() {
            let runs = sequences.runs.element(level.start * (size_of::<Run>() / 4));
            let nexts = &sequences.nexts;
            let kernel = chunked::retreat(
                number, &dstates, &starts, &du, &w, dout, qkv, gates, &lengths, &decays, table, runs, nexts,
                r,
            );
            self.launch(kernel, [level.len(), heads, r.dv.div_ceil(CHUNK)], 128, SLABS);
        }
        drop(starts);
        let (dqkv, dgates) = (self.alloc(qkv.len(), qkv.dtype()), f32s(gates.len()));
        // The gradients of queries take the place of W.
        let (dq, dk) = (w, f32s(t * heads * r.dk));
        let kernel = chunked::gradients(
            number,
            &dqkv,
            &dgates,
            &dq,
            &dk,
            &du,
            &u,
            inverse.as_ref(),
            states,
            &dstates,
            dout,
            qkv,
            gates,
            &lengths,
            &decays,
            table,
            r,
        );
        self.launch(kernel, [chunks, heads, 1], 128, SLABS + SUMS + 2 * SQUARE);
        let kernel = chunked::finish(&dqkv, &dq, &dk, qkv, &lengths, r);
        self.launch(kernel, [t * 2 * r.key_heads, 1, 1], r.dk.next_multiple_of(32).clamp(32, 128), 0);
        [dqkv, dgates]
    }

    /// Computes [`Self::causal`] of rows that continue sequences, `each` rows for each entry of `table`, and moves their states on. An
    /// entry has the addresses of the state `[taps − 1, c]` that is read and of the state that is written; the kernel's part of it begins after `first` numbers.
    pub fn causal_steps(&self, x: &Array, weight: &Array, table: &Array, first: usize, each: usize) -> Array {
        let slots = table.len() / 4;
        let c = x.len() / (slots * each).max(1);
        let y = self.alloc(x.len(), x.dtype());
        let threads = c.next_multiple_of(32).clamp(32, 256);
        let kernel = kernels::causal_steps(&y, x, weight, table, first, c, weight.len() / c.max(1), each);
        self.launch(kernel, [c.div_ceil(threads), slots, 1], threads, 0);
        y
    }

    /// Computes [`Self::delta`] of rows that continue sequences, as [`Self::causal_steps`] does. The heads have at most
    /// [`MOST_KEYS`](Self::MOST_KEYS) columns of keys.
    pub fn delta_steps(
        &self,
        qkv: &Array,
        gates: &Array,
        table: &Array,
        first: usize,
        each: usize,
        shape: DeltaShape,
    ) -> Array {
        let (slots, r) = (table.len() / 4, rule(shape));
        let out = self.alloc(slots * each * shape.value_width(), Dtype::F32);
        let kernel = kernels::delta_steps(&out, qkv, gates, table, first, r, each);
        self.launch(kernel, [slots, r.value_heads, r.dv.div_ceil(COLUMNS)], 256, 0);
        out
    }

    /// Maximum number of columns of a key head when decoding: a thread has an eighth of them in registers.
    pub const MOST_KEYS: usize = 256;
}
