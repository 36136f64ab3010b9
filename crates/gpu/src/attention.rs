//! Attention over an [`AttentionLayout`]. It runs on tensor cores if the rows are bf16 and a head has 64, 72, 80 or 128 columns.

use std::sync::Arc;

use omnigrpo_kernels::attention::AttentionLayout;

use crate::device::{Arg, Array, Dtype, Field, Gpu, Launch, Pack};

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

    fn shape(self, scale: f32) -> Arg {
        let [stride, out, heads, group] =
            [self.packed(), self.q * self.d, self.q, self.group()].map(Field::Size);
        Arg::fields(&[stride, out, heads, group, Field::Float(scale)])
    }

    /// Returns the number of query heads that share a key head.
    fn group(self) -> usize {
        self.q / self.kv.max(1)
    }

    fn scale(self) -> f32 {
        1.0 / (self.d as f32).sqrt()
    }

    /// Returns the kernels that use tensor cores, and the padded width of a head in shared memory. Returns `None` if tensor cores
    /// are unsupported.
    fn tensor_cores(self, dtype: Dtype) -> Option<([&'static str; 5], usize)> {
        let names = match (dtype, self.d) {
            (Dtype::Bf16, 64) => [
                "attention/forward_64",
                "attention/backward_q_64",
                "attention/backward_kv_64",
                "attention/decode_prompt_64",
                "attention/decode_64",
            ],
            (Dtype::Bf16, 72) => [
                "attention/forward_72",
                "attention/backward_q_72",
                "attention/backward_kv_72",
                "attention/decode_prompt_72",
                "attention/decode_72",
            ],
            (Dtype::Bf16, 80) => [
                "attention/forward_80",
                "attention/backward_q_80",
                "attention/backward_kv_80",
                "attention/decode_prompt_80",
                "attention/decode_80",
            ],
            (Dtype::Bf16, 128) => [
                "attention/forward_128",
                "attention/backward_q_128",
                "attention/backward_kv_128",
                "attention/decode_prompt_128",
                "attention/decode_128",
            ],
            _ => return None,
        };
        Some((names, self.d.next_multiple_of(16)))
    }
}

/// Number of rows in a tile.
const ROWS: usize = 64;

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

fn by_query(layout: &AttentionLayout) -> (Vec<Tile>, Vec<Item>) {
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
        for at in (q[0]..q[1]).step_by(ROWS) {
            tiles.push(Tile { rows: [at, q[1].min(at + ROWS as i32)], items: [first, last] });
        }
    }
    longest_first(&mut tiles, &items, keys_of);
    (tiles, items)
}

fn by_key(layout: &AttentionLayout, rows: usize) -> (Vec<Tile>, Vec<Item>) {
    let all = by_query(layout).1;
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
    #[must_use]
    pub fn new(gpu: &Gpu, layout: &AttentionLayout, rows: usize) -> Self {
        let queries: usize = layout.ranges.iter().map(|range| range.queries.len()).sum();
        Self {
            by_query: Tiles::new(gpu, &by_query(layout)),
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
    #[must_use]
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
    #[must_use]
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
    #[must_use]
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
const SPLIT: usize = 256;

/// Returns the number of f32 values that attention over a cache needs besides its result, for rows that see a prompt and a
/// completion of these lengths.
#[must_use]
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
    #[must_use]
    pub fn attention(&self, qkv: &Array, pattern: &Pattern, heads: Heads) -> (Array, Array) {
        let Heads { q, kv, d } = heads;
        let t = qkv.len() / heads.packed().max(1);
        let out = self.output(t * q * d, qkv.dtype(), pattern);
        let lse = self.output(t * q, Dtype::F32, pattern);
        let Tiles { tiles, items, len } = &pattern.by_query;
        let shape = heads.shape(heads.scale());
        let parts = [0, q * d, (q + kv) * d];
        if let Some(([kernel, ..], width)) = heads.tensor_cores(qkv.dtype()) {
            let [a, b, c] = parts.map(|col| Arg::Pointer(qkv.place(col)));
            let shared = 5 * ROWS * (width + 8) * 2;
            let launch = Launch { kernel, grid: [q, *len, 1], threads: 128, shared };
            self.launch(
                launch,
                &[out.pointer(), lse.pointer(), a, b, c, tiles.pointer(), items.pointer(), shape],
            );
        } else {
            let [a, b, c] = parts.map(|col| qkv.arg_at(col));
            let launch =
                Launch { kernel: "plain_attention/forward", grid: [q, *len, ROWS], threads: 128, shared: 0 };
            let d = Arg::Size(d);
            self.launch(
                launch,
                &[out.arg(), lse.pointer(), a, b, c, tiles.pointer(), items.pointer(), shape, d],
            );
        }
        (out, lse)
    }

    /// Returns the structure `Gradients` of attention.cu. `strides` are those of a row and of a head.
    fn gradients(places: [u64; 2], dtype: Dtype, strides: [usize; 2]) -> Arg {
        let ([dk, dv], [row, head]) = (places.map(Field::Pointer), strides.map(Field::Size));
        Arg::fields(&[dk, dv, Field::Flag(u32::from(dtype == Dtype::Bf16)), row, head, Field::Flag(0)])
    }

    /// Returns the gradient with respect to the packed rows, in their dtype.
    #[must_use]
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
        let (queries, keys) = (&pattern.by_query, &pattern.by_key);
        let shape = heads.shape(heads.scale());
        let parts = [0, q * d, (q + kv) * d];
        let width = Arg::Size(d);
        let delta_launch =
            Launch { kernel: "attention/delta", grid: [(t * q).div_ceil(4), 1, 1], threads: 128, shared: 0 };
        let count = Arg::Long((t * q) as i64);
        self.launch(delta_launch, &[delta.pointer(), dout.arg(), out.arg(), count, width]);
        let stats = [lse.pointer(), delta.pointer()];
        let of = |tiles: &Tiles| [tiles.tiles.pointer(), tiles.items.pointer(), shape];
        // Each query head has its own blocks. Heads that share a key head write parts, which are added in order.
        let partial = (q != kv).then(|| self.alloc(t * q * 2 * d, Dtype::F32));
        let to = match &partial {
            Some(partial) => {
                Self::gradients([partial.place(0), partial.place(d)], Dtype::F32, [2 * q * d, 2 * d])
            }
            None => {
                let places = [parts[1], parts[2]].map(|col| dqkv.place(col));
                Self::gradients(places, dqkv.dtype(), [heads.packed(), d])
            }
        };
        if let Some(([_, to_q, to_kv, ..], padded)) = heads.tensor_cores(qkv.dtype()) {
            let dout = self.held(dout, Dtype::Bf16);
            let line = (padded + 8) * 2;
            let inputs = parts.map(|col| Arg::Pointer(qkv.place(col)));
            let launch = |kernel, tiles: &Tiles, rows| Launch {
                kernel,
                grid: [q, tiles.len, 1],
                threads: 128,
                shared: rows * line,
            };
            self.launch(
                launch(to_q, queries, 4 * ROWS),
                &[&[dqkv.pointer(), dout.pointer()], &stats[..], &inputs, &of(queries)].concat(),
            );
            self.launch(
                launch(to_kv, keys, 3 * ROWS),
                &[&[to, dout.pointer()], &stats[..], &inputs, &of(keys)].concat(),
            );
        } else {
            let inputs = parts.map(|col| qkv.arg_at(col));
            let launch = |kernel, tiles: &Tiles| Launch {
                kernel,
                grid: [q, tiles.len, ROWS],
                threads: 128,
                shared: 0,
            };
            self.launch(
                launch("plain_attention/backward_q", queries),
                &[&[dqkv.arg(), dout.arg()], &stats[..], &inputs, &of(queries), &[width]].concat(),
            );
            self.launch(
                launch("plain_attention/backward_kv", keys),
                &[&[to, dout.arg()], &stats[..], &inputs, &of(keys), &[width]].concat(),
            );
        }
        if let Some(partial) = &partial {
            let [stride, kv_heads, group] = [heads.packed(), kv, heads.group()].map(Arg::Size);
            let args =
                [dqkv.arg_at(q * d), partial.pointer(), Arg::Long(t as i64), stride, kv_heads, group, width];
            self.each("attention/sum_heads", t * 2 * kv * d.div_ceil(4), &args);
        }
        dqkv
    }

    /// Appends the keys and values of each packed row to the last page of its completion. Returns the row's attention over prompt
    /// and completion. The bits of a row do not depend on other rows.
    #[must_use]
    pub fn attend_cached(&self, qkv: &Array, decoding: &Decoding, layer: usize, heads: Heads) -> Array {
        let Heads { q, kv, d } = heads;
        let DecodingSize { rows, tiles, parts: [prompt_parts, own_parts], heads: blocks } = decoding.size;
        let parts = prompt_parts + own_parts;
        let (table, pages) = (decoding.rows.pointer(), decoding.pages.pointer());
        let int = Arg::Size;
        let out = self.alloc(rows * q * d, qkv.dtype());
        let partial = self.alloc(rows * q * parts * (2 + d), Dtype::F32);
        // Tensor cores read the keys of a shared prompt once for all its completions, and the keys of a completion once for all
        // query heads of a key head.
        if let Some(([.., of_prompt, of_all], padded)) = heads.tensor_cores(qkv.dtype()) {
            let shape = heads.shape(heads.scale());
            let launch =
                |kernel, grid, lines| Launch { kernel, grid, threads: 128, shared: lines * (padded + 8) * 2 };
            let args = [
                partial.pointer(),
                qkv.pointer(),
                table,
                decoding.tiles.pointer(),
                int(layer),
                int(parts),
                shape,
            ];
            self.launch(launch(of_prompt, [tiles, kv, prompt_parts], 5 * ROWS), &args);
            let args = [
                out.pointer(),
                partial.pointer(),
                decoding.counters.pointer(),
                qkv.pointer(),
                table,
                pages,
                int(layer),
                int(prompt_parts),
                int(parts),
                shape,
            ];
            self.launch(launch(of_all, [rows, blocks, own_parts], JOINED_HEADS + 4 * PAGE), &args);
            return out;
        }
        let low = int(usize::from(qkv.dtype() == Dtype::Bf16));
        let (stride, width) = (int(heads.packed()), 2 * kv * d);
        let args = [table, pages, low, qkv.arg(), stride, int(width), int(layer)];
        self.each_row("plain_attention/append", rows, width, &args);
        let args = [
            partial.pointer(),
            qkv.arg(),
            table,
            pages,
            low,
            int(layer),
            int(prompt_parts),
            int(parts),
            int(q),
            int(heads.group()),
            stride,
            int(d),
            Arg::Float(heads.scale()),
        ];
        let grid = [rows, q, parts];
        self.launch(Launch { kernel: "plain_attention/decode", grid, threads: 128, shared: 0 }, &args);
        let count = Arg::Long((rows * q) as i64);
        let args = [out.arg(), partial.pointer(), count, int(parts), int(d)];
        self.each("plain_attention/decode_join", rows * q * d, &args);
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
        let (tiles, _) = by_query(&AttentionLayout::causal(3 << 30));
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
                let [now, queries] = [per_head(&keys), per_head(&work(&by_query(layout), keys_of))];
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
