//! Attention over an [`AttentionLayout`]. It runs on tensor cores if the rows are bf16 and a head has 64, 72, 80 or 128 columns.

use std::sync::Arc;

use omnigrpo_kernels::attention::AttentionLayout;

use crate::device::{Array, Dtype, Gpu, Pack};
use crate::launchers::{self, Element, Gradients, Shape, attention as kernels, plain_attention as plain};

/// Numbers of heads in packed rows `[q heads | k heads | v heads]`. Each head has `d` columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    pub q: usize,
    pub kv: usize,
    /// Number of columns of a head, at most 256.
    pub d: usize,
}

impl Heads {
    fn packed(self) -> usize {
        (self.q + 2 * self.kv) * self.d
    }

    fn shape(self) -> Shape {
        let (stride, out_stride) = (self.packed(), self.q * self.d);
        Shape { stride, out_stride, heads: self.q, group: self.group(), scale: self.scale() }
    }

    /// Returns the number of query heads that share a key head.
    fn group(self) -> usize {
        self.q / self.kv.max(1)
    }

    fn scale(self) -> f32 {
        1.0 / (self.d as f32).sqrt()
    }

    /// Returns the padded width of a head in shared memory if tensor cores are supported.
    fn tensor_cores(self, dtype: Dtype) -> Option<usize> {
        let supported = dtype == Dtype::Bf16 && kernels::FORWARD.contains(&self.d);
        supported.then(|| self.d.next_multiple_of(16))
    }
}

/// Number of rows in a tile.
const ROWS: usize = 64;
/// Factor by which tiles of queries are larger in the forward pass if there are enough of them.
const WIDE: usize = 2;

/// The query rows `q[0]..q[1]` and the key rows that they see: query `i` sees key `j` of `k[0]..k[1]` if `j < i + off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Item {
    q: [i32; 2],
    k: [i32; 2],
    off: i32,
}

/// The rows of one block of threads, and the items that include these rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Tile {
    rows: [i32; 2],
    items: [i32; 2],
}

#[derive(Debug)]
struct Tiles {
    tiles: Array,
    items: Array,
    len: usize,
}

impl Tiles {
    fn new(gpu: &Gpu, (tiles, items): &(Vec<Tile>, Vec<Item>)) -> Self {
        Self { tiles: gpu.upload_words(tiles), items: gpu.upload_words(items), len: tiles.len() }
    }
}

/// An attention layout on a device.
#[derive(Debug)]
pub struct Pattern {
    by_query: Tiles,
    /// The same, with [`WIDE`] times the rows in a tile.
    by_query_wide: Tiles,
    by_key: Tiles,
    /// True if every row is a query. Otherwise, outputs are set to zero first.
    complete: bool,
}

/// Value of `off` that lets a query see every key.
const ALL: i32 = 1 << 30;

/// Sorts tiles by decreasing work. A GPU starts blocks in order, so a long tile at the end would leave most of it idle.
fn longest_first(tiles: &mut [Tile], items: &[Item], work: impl Fn(&Tile, &Item) -> i32) {
    let of = |tile: &Tile| -> i64 {
        let [first, last] = tile.items.map(|item| item as usize);
        items[first..last].iter().map(|item| i64::from(work(tile, item).max(0))).sum()
    };
    tiles.sort_by_cached_key(|tile| std::cmp::Reverse(of(tile)));
}

/// Returns the number of keys that a tile of queries reads for an item.
fn keys_of(tile: &Tile, item: &Item) -> i32 {
    item.k[1].min(tile.rows[1] - 1 + item.off) - item.k[0]
}

/// Returns the number of queries that a tile of keys reads for an item.
fn queries_of(_: &Tile, item: &Item) -> i32 {
    item.q[1] - item.q[0]
}

/// Converts the number of a row or item. So many rows as the bound have more tiles than a grid, so their launch is refused.
fn index(n: usize) -> i32 {
    n.min(1 << 29) as i32
}

fn by_query(layout: &AttentionLayout, rows: usize) -> (Vec<Tile>, Vec<Item>) {
    let (mut tiles, mut items) = (Vec::new(), Vec::new());
    for range in &layout.ranges {
        let first = index(items.len());
        let q = [range.queries.start, range.queries.end].map(index);
        for (i, keys) in range.keys.iter().enumerate() {
            let k = [keys.start, keys.end].map(index);
            let causal = range.causal && i + 1 == range.keys.len();
            items.push(Item { q, k, off: if causal { k[1] - q[1] + 1 } else { ALL } });
        }
        let last = index(items.len());
        for at in (q[0]..q[1]).step_by(rows) {
            tiles.push(Tile { rows: [at, q[1].min(at + rows as i32)], items: [first, last] });
        }
    }
    longest_first(&mut tiles, &items, keys_of);
    (tiles, items)
}

fn by_key(layout: &AttentionLayout, rows: usize) -> (Vec<Tile>, Vec<Item>) {
    let all = by_query(layout, ROWS).1;
    let (mut tiles, mut items) = (Vec::new(), Vec::new());
    for at in (0..rows).step_by(ROWS) {
        let [begin, end] = [at, rows.min(at + ROWS)].map(index);
        let first = index(items.len());
        for item in all.iter().filter(|item| item.k[0] < end && item.k[1] > begin) {
            // First query that sees the first of these keys.
            let q = item.q[0].max(begin.max(item.k[0]) - item.off + 1);
            if q < item.q[1] {
                items.push(Item { q: [q, item.q[1]], ..*item });
            }
        }
        tiles.push(Tile { rows: [begin, end], items: [first, index(items.len())] });
    }
    longest_first(&mut tiles, &items, queries_of);
    (tiles, items)
}

impl Pattern {
    /// Converts a layout for `rows` rows to the form that kernels read.
    pub fn new(gpu: &Gpu, layout: &AttentionLayout, rows: usize) -> Self {
        let queries: usize = layout.ranges.iter().map(|range| range.queries.len()).sum();
        Self {
            by_query: Tiles::new(gpu, &by_query(layout, ROWS)),
            by_query_wide: Tiles::new(gpu, &by_query(layout, WIDE * ROWS)),
            by_key: Tiles::new(gpu, &by_key(layout, rows)),
            complete: queries == rows,
        }
    }
}

/// Number of rows in a page of a cache.
pub const PAGE: usize = 64;

/// Completions that continue one prompt. Caches have the dtype of the packed rows. A row of one layer is `[keys | values]`.
#[derive(Clone, Debug)]
pub struct CachedGroup<'a> {
    /// Cache of the prompt, `[layer, prompt_rows, keys | values]`.
    pub prompt: &'a Array,
    /// Number of rows of the prompt.
    pub prompt_rows: usize,
    /// For each completion, its pages (each `[layer, PAGE, keys | values]`) and its number of tokens, including the token that is
    /// being decoded.
    pub completions: Vec<(Vec<&'a Array>, usize)>,
}

impl CachedGroup<'_> {
    /// Returns the number of pairs of a row and a query head that read the same keys.
    fn pairs(&self, heads: Heads) -> usize {
        self.completions.len() * heads.group()
    }
}

/// A row to decode, in the layout that kernels read.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Row {
    /// Low and high word of the address of the prompt's cache.
    prompt: [u32; 2],
    prompt_rows: u32,
    length: u32,
    page: u32,
    none: u32,
}

/// Up to 64 pairs of a row and a query head. The pairs read the same keys.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Pairs {
    rows: [u32; 2],
    first: u32,
    none: u32,
}

/// Sizes of the tables of a decoding step. They determine the grids of the step and the memory between its kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DecodingSize {
    pub rows: usize,
    tiles: usize,
    /// Number of parts of the longest prompt and of the longest completion.
    parts: [usize; 2],
    /// Number of pairs of a key head and up to [`JOINED_HEADS`] of its query heads.
    heads: usize,
}

impl DecodingSize {
    /// Returns the sizes of the tables for these groups.
    pub fn of(groups: &[CachedGroup], heads: Heads) -> Self {
        let parts = |lengths: &mut dyn Iterator<Item = usize>| lengths.max().unwrap_or(0).div_ceil(SPLIT);
        let completions = groups.iter().flat_map(|group| &group.completions);
        Self {
            rows: completions.clone().count(),
            tiles: groups.iter().map(|group| group.pairs(heads).div_ceil(ROWS)).sum(),
            parts: [
                parts(&mut groups.iter().map(|group| group.prompt_rows)),
                parts(&mut completions.map(|(_, length)| *length)),
            ],
            heads: heads.kv * heads.group().div_ceil(JOINED_HEADS),
        }
    }

    /// Returns the number of pages per row.
    fn pages(self) -> usize {
        self.parts[1] * (SPLIT / PAGE)
    }

    /// Rounds up to one of a few sizes. Padding rows fill the rest.
    #[must_use]
    pub fn rounded(self, rows: usize) -> Self {
        let parts = self.parts.map(usize::next_power_of_two);
        Self { rows, tiles: self.tiles.next_power_of_two(), parts, ..self }
    }
}

/// Tables of the rows of a decoding step, on a device. They are created once per step, and every layer reads them.
#[derive(Debug)]
pub struct Decoding {
    rows: Array,
    pages: Array,
    tiles: Array,
    /// Counters of the blocks that have finished a part, one for each row and each of [`DecodingSize::heads`].
    counters: Array,
    size: DecodingSize,
}

impl Decoding {
    /// Uploads the tables of the rows, in the order of the groups and their completions.
    pub fn new(gpu: &Gpu, groups: &[CachedGroup], heads: Heads) -> Self {
        let (mut pack, size) = (Pack::default(), DecodingSize::of(groups, heads));
        let at = Self::pack(&mut pack, groups, heads, size);
        Self::over(&pack.upload(gpu), at, size)
    }

    /// Packs tables of the given size, and returns the offset of each table.
    #[must_use]
    pub fn pack(pack: &mut Pack, groups: &[CachedGroup], heads: Heads, size: DecodingSize) -> [usize; 4] {
        let words = |at: u64| [at as u32, (at >> 32) as u32];
        let (mut rows, mut tiles) = (Vec::with_capacity(size.rows + 1), Vec::with_capacity(size.tiles));
        let mut pages = vec![0u64; size.rows * size.pages()];
        for group in groups {
            let first = rows.len();
            for (own, length) in &group.completions {
                let page = rows.len() * size.pages();
                rows.push(Row {
                    prompt: words(group.prompt.place(0)),
                    prompt_rows: group.prompt_rows as u32,
                    length: *length as u32,
                    page: page as u32,
                    none: 0,
                });
                pages[page..].iter_mut().zip(own).for_each(|(to, page)| *to = page.place(0));
            }
            let pairs = group.pairs(heads) as u32;
            let rows = [first as u32, rows.len() as u32];
            tiles.extend((0..pairs).step_by(ROWS).map(|first| Pairs { rows, first, none: 0 }));
        }
        // Add one row, because tiles without rows read it.
        rows.resize(size.rows + 1, bytemuck::Zeroable::zeroed());
        tiles.resize(size.tiles, Pairs { rows: [size.rows as u32; 2], first: 0, none: 0 });
        let counters = vec![0u32; size.rows * size.heads];
        [pack.add(&rows), pack.add(&pages), pack.add(&tiles), pack.add(&counters)]
    }

    /// Creates a view of the tables that were packed into `whole`.
    pub fn over(whole: &Arc<Array>, [rows, pages, tiles, counters]: [usize; 4], size: DecodingSize) -> Self {
        let words = |first, bytes| Array::part(whole, first, bytes / 4);
        Self {
            rows: words(rows, (size.rows + 1) * size_of::<Row>()),
            pages: words(pages, size.rows * size.pages() * size_of::<u64>()),
            tiles: words(tiles, size.tiles * size_of::<Pairs>()),
            counters: words(counters, size.rows * size.heads * size_of::<u32>()),
            size,
        }
    }
}

/// Number of keys in one part of the sum of a decoding row.
const SPLIT: usize = 128;

/// Norms and rotation of the queries and keys of packed rows, before attention. The bits are those of [`Gpu::rms`] and [`Gpu::rotate`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Turn<'a> {
    /// Cosines and sines `[rows, half]` in f32. They rotate the first `2 · half` columns of each head.
    pub waves: Option<[&'a Array; 2]>,
    /// Weights `[d]` of the RMS norms of each query head and each key head, the constant that is added to the mean square, and
    /// one that is added to the weights.
    pub norms: Option<([&'a Array; 2], [f32; 2])>,
}

/// Returns the number of f32 values that attention over a cache needs besides its result, for rows that see a prompt and a
/// completion of these lengths.
pub fn cached_scratch(rows: usize, [prompt, own]: [usize; 2], heads: Heads) -> usize {
    let parts: usize = [prompt, own].map(|len| len.div_ceil(SPLIT).next_power_of_two()).iter().sum();
    rows * heads.q * parts * (2 + heads.d)
}

/// Number of query heads for which a block reads the keys of a completion once.
const JOINED_HEADS: usize = 16;

impl Gpu {
    fn output(&self, len: usize, dtype: Dtype, pattern: &Pattern) -> Array {
        if pattern.complete { self.alloc(len, dtype) } else { self.zeros(len, dtype) }
    }

    /// Computes self-attention of packed rows `[t, (q + 2 kv) · d]`. Returns the outputs `[t, q · d]` in the dtype of the rows,
    /// and the log-sum-exps `[t, q]` in f32.
    pub fn attention(&self, qkv: &Array, pattern: &Pattern, heads: Heads) -> (Array, Array) {
        let Heads { q, kv, d } = heads;
        let t = qkv.len() / heads.packed().max(1);
        let out = self.output(t * q * d, qkv.dtype(), pattern);
        let lse = self.output(t * q, Dtype::F32, pattern);
        let shape = heads.shape();
        let [a, b, c] = [0, q * d, (q + kv) * d].map(|col| qkv.element(col));
        if let Some(width) = heads.tensor_cores(qkv.dtype()) {
            // The queries of a tile, and two stages of keys and values.
            let shared = |queries| (queries + 4 * ROWS) * (width + 8) * 2;
            let (wide, limits) = (&pattern.by_query_wide, self.limits());
            // A wide tile takes about 1.5 times as long as a tile. So it is not used for ranges of few rows, nor if there were fewer
            // than one and a half rounds of blocks: a multiprocessor has two at a time.
            let saves =
                3 * wide.len <= 2 * pattern.by_query.len && q * wide.len >= 3 * limits.multiprocessors;
            if saves && limits.has_room(shared(WIDE * ROWS), shared(ROWS)) {
                let Tiles { tiles, items, len } = wide;
                let kernel = kernels::forward_wide(d, &out, &lse, a, b, c, tiles, items, shape);
                self.launch(kernel, [q, *len, 1], 128, shared(WIDE * ROWS));
            } else {
                let Tiles { tiles, items, len } = &pattern.by_query;
                let kernel = kernels::forward(d, &out, &lse, a, b, c, tiles, items, shape);
                self.launch(kernel, [q, *len, 1], 128, shared(ROWS));
            }
        } else {
            let Tiles { tiles, items, len } = &pattern.by_query;
            let kernel = plain::forward(&out, &lse, a, b, c, tiles, items, shape, d);
            self.launch(kernel, [q, *len, ROWS], 128, 0);
        }
        (out, lse)
    }

    /// Returns the gradient with respect to the packed rows, in their dtype.
    pub fn attention_back(
        &self,
        qkv: &Array,
        out: &Array,
        lse: &Array,
        dout: &Array,
        pattern: &Pattern,
        heads: Heads,
    ) -> Array {
        let Heads { q, kv, d } = heads;
        let t = qkv.len() / heads.packed().max(1);
        let dqkv = self.output(qkv.len(), qkv.dtype(), pattern);
        let delta = self.alloc(t * q, Dtype::F32);
        let shape = heads.shape();
        let parts = [0, q * d, (q + kv) * d];
        self.launch(kernels::delta(&delta, dout, out, t * q, d), [(t * q).div_ceil(4), 1, 1], 128, 0);
        // Each query head has its own blocks. Heads that share a key head write parts, which are added in order.
        let partial = (q != kv).then(|| self.alloc(t * q * 2 * d, Dtype::F32));
        let to = match &partial {
            Some(partial) => {
                let (dk, dv) = (partial.element(0), partial.element(d));
                Gradients { dk, dv, bf16: 0, stride: 2 * q * d, head: 2 * d }
            }
            None => {
                let [_, dk, dv] = parts.map(|col| dqkv.element(col));
                let bf16 = usize::from(dqkv.dtype() == Dtype::Bf16);
                Gradients { dk, dv, bf16, stride: heads.packed(), head: d }
            }
        };
        let [a, b, c] = parts.map(|col| qkv.element(col));
        let (Tiles { tiles, items, len }, by_key) = (&pattern.by_query, &pattern.by_key);
        if let Some(padded) = heads.tensor_cores(qkv.dtype()) {
            let dout = &*self.held(dout, Dtype::Bf16);
            let line = (padded + 8) * 2;
            // Rows of queries and of gradients, and two stages of keys and values.
            let shared = |keys| (2 * ROWS + 4 * keys) * line;
            let small = kernels::BACKWARD_Q_NARROW.contains(&d);
            let (kernel, keys) = match !small || self.limits().has_room(shared(ROWS), shared(ROWS / 2)) {
                true => {
                    (kernels::backward_q(d, &dqkv, dout, lse, &delta, a, b, c, tiles, items, shape), ROWS)
                }
                false => (
                    kernels::backward_q_narrow(d, &dqkv, dout, lse, &delta, a, b, c, tiles, items, shape),
                    ROWS / 2,
                ),
            };
            self.launch(kernel, [q, *len, 1], 128, shared(keys));
            let Tiles { tiles, items, len } = by_key;
            let kernel = kernels::backward_kv(d, to, dout, lse, &delta, a, b, c, tiles, items, shape);
            // Keys and values, and two stages of queries, of gradients and of two numbers for each query.
            self.launch(kernel, [q, *len, 1], 128, 4 * ROWS * line + 4 * ROWS * 2);
        } else {
            let kernel = plain::backward_q(&dqkv, dout, lse, &delta, a, b, c, tiles, items, shape, d);
            self.launch(kernel, [q, *len, ROWS], 128, 0);
            let Tiles { tiles, items, len } = by_key;
            let kernel = plain::backward_kv(to, dout, lse, &delta, a, b, c, tiles, items, shape, d);
            self.launch(kernel, [q, *len, ROWS], 128, 0);
        }
        if let Some(partial) = &partial {
            let (to, stride) = (dqkv.element(q * d), heads.packed());
            let kernel = kernels::sum_heads(to, partial, t, stride, kv, heads.group(), d);
            self.each(kernel, t * 2 * kv * d.div_ceil(4));
        }
        dqkv
    }

    /// Returns true if [`Self::attend_cached`] can turn queries and keys of this dtype.
    pub fn turns_cached(dtype: Dtype, heads: Heads) -> bool {
        heads.tensor_cores(dtype).is_some()
    }

    /// Appends the keys and values of each packed row to the last page of its completion. Returns the row's attention over prompt
    /// and completion. The bits of a row do not depend on other rows. `turn` has no effect without [`Self::turns_cached`].
    pub fn attend_cached(
        &self,
        qkv: &Array,
        decoding: &Decoding,
        layer: usize,
        heads: Heads,
        turn: Turn,
    ) -> Array {
        let Heads { q, kv, d } = heads;
        let DecodingSize { rows, tiles, parts: [prompt_parts, own_parts], heads: blocks } = decoding.size;
        let parts = prompt_parts + own_parts;
        let Decoding { rows: table, pages, tiles: pairs, counters, .. } = decoding;
        let out = self.alloc(rows * q * d, qkv.dtype());
        let partial = self.alloc(rows * q * parts * (2 + d), Dtype::F32);
        // Tensor cores read the keys of a shared prompt once for all its completions, and the keys of a completion once for all
        // query heads of a key head.
        if let Some(padded) = heads.tensor_cores(qkv.dtype()) {
            let (shape, line) = (heads.shape(), (padded + 8) * 2);
            let half = turn.waves.map_or(0, |[cosines, _]| cosines.len() / rows.max(1));
            let [cosines, sines] = turn.waves.map_or_else(Default::default, |waves| waves.map(Element::from));
            let [eps, shift] = turn.norms.map_or([0.0; 2], |(_, constants)| constants);
            let [q_norm, k_norm] = [0, 1].map(|i| turn.norms.map(|(weights, _)| weights[i]));
            let turn = launchers::Turn { cosines, sines, half, eps, shift };
            let kernel =
                kernels::decode_prompt(d, &partial, qkv, table, pairs, layer, parts, shape, turn, q_norm);
            self.launch(kernel, [tiles, kv, prompt_parts], 128, 5 * ROWS * line);
            let kernel = kernels::decode(
                d,
                &out,
                &partial,
                counters,
                qkv,
                table,
                pages,
                layer,
                prompt_parts,
                parts,
                shape,
                turn,
                q_norm,
                k_norm,
            );
            self.launch(kernel, [rows, blocks, own_parts], 128, (JOINED_HEADS + 4 * PAGE) * line);
            return out;
        }
        let low = usize::from(qkv.dtype() == Dtype::Bf16);
        let (stride, width) = (heads.packed(), 2 * kv * d);
        self.each_row(plain::append(table, pages, low, qkv, stride, width, layer), rows, width);
        let (group, scale) = (heads.group(), heads.scale());
        let kernel = plain::decode(
            &partial,
            qkv,
            table,
            pages,
            low,
            layer,
            prompt_parts,
            parts,
            q,
            group,
            stride,
            d,
            scale,
        );
        self.launch(kernel, [rows, q, parts], 128, 0);
        self.each(plain::decode_join(&out, &partial, rows * q, parts, d), rows * q * d);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BinaryHeap;

    /// Blocks of 128 threads that 132 multiprocessors run at the same time.
    const SLOTS: usize = 264;

    /// Returns the fraction of the slots' time in which they are busy, if each block starts, in order, in the first free slot.
    fn busy(work: impl Iterator<Item = i64>) -> f64 {
        let mut slots: BinaryHeap<_> = (0..SLOTS).map(|_| std::cmp::Reverse(0)).collect();
        let (mut all, mut last) = (0, 0);
        for work in work {
            let end = slots.pop().map_or(0, |slot| slot.0) + work;
            slots.push(std::cmp::Reverse(end));
            all += work;
            last = last.max(end);
        }
        all as f64 / (SLOTS as i64 * last) as f64
    }

    /// So many rows that their numbers do not fit have more tiles than a grid, instead of none.
    #[test]
    fn rows_beyond_32_bits_have_too_many_tiles() {
        let (tiles, _) = by_query(&AttentionLayout::causal(3 << 30), ROWS);
        assert!(tiles.len() > 65_535, "{} tiles", tiles.len());
    }

    /// The blocks of the backward pass keep a GPU busy. For comparison: with one block per tile and key head, in the order of
    /// rows, most of it was idle.
    #[test]
    fn blocks_of_a_group_keep_a_gpu_busy() {
        // Query heads and key heads of 3B and 7B, and the percentages with a block per key head.
        let models = [("3B", 16, 2, [17, 14, 49]), ("7B", 28, 4, [35, 27, 66])];
        let layouts = [
            ("1792 + 8 × 256", AttentionLayout::groups(&[(1792, vec![256; 8])]), 3840),
            ("1024 + 8 × 512", AttentionLayout::groups(&[(1024, vec![512; 8])]), 5120),
            ("causal 8192", AttentionLayout::causal(8192), 8192),
        ];
        for (name, q, kv, before) in models {
            for ((what, layout, rows), before) in layouts.iter().zip(before) {
                let work = |(tiles, items): &(Vec<Tile>, Vec<Item>), of: fn(&Tile, &Item) -> i32| {
                    let work = |tile: &Tile| -> i64 {
                        let [first, last] = tile.items.map(|item| item as usize);
                        items[first..last].iter().map(|item| i64::from(of(tile, item).max(0))).sum()
                    };
                    tiles.iter().map(|tile| (tile.rows[0], work(tile))).collect::<Vec<_>>()
                };
                let per_head = |tiles: &[(i32, i64)]| {
                    busy(tiles.iter().flat_map(|&(_, work)| std::iter::repeat_n(work, q)))
                };
                let mut keys = work(&by_key(layout, *rows), queries_of);
                let [now, queries] = [per_head(&keys), per_head(&work(&by_query(layout, ROWS), keys_of))];
                keys.sort_unstable();
                let group = (q / kv) as i64;
                let old = busy((0..kv).flat_map(|_| keys.iter().map(|&(_, work)| work * group)));
                println!("{name}, {what}: {old:.3} before, {now:.3} now, {queries:.3} by query");
                assert_eq!((old * 100.0).round() as i32, before, "{name}, {what}, one block per key head");
                assert!(now >= 0.9, "{name}, {what}: {now}");
                assert!(queries >= 0.9, "{name}, {what}, by query: {queries}");
            }
        }
    }
}
