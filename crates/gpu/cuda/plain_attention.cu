// Attention over ranges and over a cache without tensor cores, for any dtype and any head width up to 256. It is used
// for f32 weights and for head widths that tensor cores do not support. Each query (or key) and head has a block of 128
// threads. The block first has one thread per key, then one thread per column.
#include "prim.cuh"

struct Item { int q0, q1, k0, k1, off; };
struct Tile { int row0, row1, item0, item1; };
struct Shape { int stride, out_stride, heads, group; float scale; };

constexpr int THREADS = 128, COLUMNS = 2;

/// Loops over chunks of the keys (or queries) that a row sees.
#define EACH_CHUNK(FROM, TO) \
    for (int item = tile.item0; item < tile.item1; item++) \
        for (int at = (FROM), end = (TO); at < end; at += THREADS)

DEVICE float dot(Array a, i64 at, Array b, i64 bt, int d) {
    float sum = 0;
    for (int j = 0; j < d; j += 4) {
        Four x = load4(a, at + j, at + d), y = load4(b, bt + j, bt + d);
        for (int e = 0; e < 4; e++) sum += x.x[e] * y.x[e];
    }
    return sum;
}
/// Returns the end of an item's keys that `row` sees.
DEVICE int seen(Item it, int row) { return it.k1 < row + it.off ? it.k1 : row + it.off; }

/// Online softmax over chunks of scores. A thread owns the output columns `threadIdx.x` and `threadIdx.x + 128`.
struct Softmax {
    float top = -INFINITY, sum = 0, acc[COLUMNS] = {};
    /// Adds a chunk. `score` is the score of the thread's key, or −∞ if it has none. `value(i, column)` is the value of
    /// the i-th key of the chunk.
    template <class F> DEVICE void chunk(float score, float* p, float* red, int count, int d, F value) {
        float now = larger(top, block_max(score, red));
        float decay = now == -INFINITY ? 1 : exp_(top - now);
        p[threadIdx.x] = score == -INFINITY ? 0 : exp_(score - now);
        sync_block();
        top = now;
        sum *= decay;
        for (int i = 0; i < count; i++) sum += p[i];
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            int j = threadIdx.x + c * THREADS;
            acc[c] *= decay;
            if (j < d) for (int i = 0; i < count; i++) acc[c] += p[i] * value(i, j);
        }
        sync_block();
    }
};

KERNEL_OF(128, 4, forward, (Array out, float* lse, Array q, Array k, Array v, const Tile* tiles, const Item* items, Shape sh, int d)) {
    SHARED(float, p, THREADS);
    SHARED(float, red, 32);
    Tile tile = tiles[blockIdx.y];
    int row = tile.row0 + blockIdx.z, head = blockIdx.x;
    if (row >= tile.row1) return;
    i64 kv = head / sh.group * d;
    Softmax s;
    EACH_CHUNK(items[item].k0, seen(items[item], row)) {
        int key = at + threadIdx.x, count = end - at < THREADS ? end - at : THREADS;
        float score = key < end ? sh.scale * dot(q, (i64)row * sh.stride + head * d, k, (i64)key * sh.stride + kv, d) : -INFINITY;
        s.chunk(score, p, red, count, d, [&](int i, int j) { return load(v, (i64)(at + i) * sh.stride + kv + j); });
    }
    UNROLL for (int c = 0; c < COLUMNS; c++) {
        int j = threadIdx.x + c * THREADS;
        if (j < d) store(out, (i64)row * sh.out_stride + head * d + j, s.sum == 0 ? 0 : s.acc[c] / s.sum);
    }
    if (threadIdx.x == 0) lse[(i64)row * sh.heads + head] = s.top + log_(s.sum);
}
KERNEL_OF(128, 4, backward_q, (Array dq, Array dout, const float* lse, const float* delta, Array q, Array k, Array v, const Tile* tiles, const Item* items, Shape sh, int d)) {
    SHARED(float, ds, THREADS);
    Tile tile = tiles[blockIdx.y];
    int row = tile.row0 + blockIdx.z, head = blockIdx.x;
    if (row >= tile.row1) return;
    i64 kv = head / sh.group * d, own = (i64)row * sh.stride + head * d, stat = (i64)row * sh.heads + head;
    float acc[COLUMNS] = {};
    EACH_CHUNK(items[item].k0, seen(items[item], row)) {
        int key = at + threadIdx.x, count = end - at < THREADS ? end - at : THREADS;
        if (key < end) {
            i64 from = (i64)key * sh.stride + kv;
            float prob = exp_(sh.scale * dot(q, own, k, from, d) - lse[stat]);
            ds[threadIdx.x] = sh.scale * prob * (dot(dout, (i64)row * sh.out_stride + head * d, v, from, d) - delta[stat]);
        }
        sync_block();
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            int j = threadIdx.x + c * THREADS;
            if (j < d) for (int i = 0; i < count; i++) acc[c] += ds[i] * load(k, (i64)(at + i) * sh.stride + kv + j);
        }
        sync_block();
    }
    UNROLL for (int c = 0; c < COLUMNS; c++) {
        int j = threadIdx.x + c * THREADS;
        if (j < d) store(dq, own + j, acc[c]);
    }
}
/// Where gradients are written; see attention.cu.
struct Gradients { char *dk, *dv; int bf16, stride, head, none; };
/// Computes the gradients with respect to keys and values, as far as one query head contributes to them. Tiles have key
/// rows; their items have the queries that see some of these rows.
KERNEL_OF(128, 4, backward_kv, (Gradients to, Array dout, const float* lse, const float* delta, Array q, Array k, Array v, const Tile* tiles, const Item* items, Shape sh, int d)) {
    SHARED(float, p, THREADS);
    SHARED(float, ds, THREADS);
    Tile tile = tiles[blockIdx.y];
    int key = tile.row0 + blockIdx.z, head = blockIdx.x;
    if (key >= tile.row1) return;
    i64 own = (i64)key * sh.stride + head / sh.group * d;
    float acc_k[COLUMNS] = {}, acc_v[COLUMNS] = {};
    EACH_CHUNK(items[item].q0, items[item].q1) {
        Item it = items[item];
        int row = at + threadIdx.x, count = end - at < THREADS ? end - at : THREADS;
        float prob = 0, slope = 0;
        if (row < end && key >= it.k0 && key < seen(it, row)) {
            i64 stat = (i64)row * sh.heads + head;
            prob = exp_(sh.scale * dot(q, (i64)row * sh.stride + head * d, k, own, d) - lse[stat]);
            slope = sh.scale * prob * (dot(dout, (i64)row * sh.out_stride + head * d, v, own, d) - delta[stat]);
        }
        p[threadIdx.x] = prob;
        ds[threadIdx.x] = slope;
        sync_block();
        UNROLL for (int c = 0; c < COLUMNS; c++) {
            int j = threadIdx.x + c * THREADS;
            if (j < d) for (int i = 0; i < count; i++) {
                acc_k[c] += ds[i] * load(q, (i64)(at + i) * sh.stride + head * d + j);
                acc_v[c] += p[i] * load(dout, (i64)(at + i) * sh.out_stride + head * d + j);
            }
        }
        sync_block();
    }
    UNROLL for (int c = 0; c < COLUMNS; c++) {
        int j = threadIdx.x + c * THREADS;
        i64 place = (i64)key * to.stride + head * to.head + j;
        if (j < d) store({to.dk, to.bf16}, place, acc_k[c]), store({to.dv, to.bf16}, place, acc_v[c]);
    }
}

/// A row to decode: the keys and values of its prompt (`[layer, row, keys | values]`), its number of tokens, including
/// this one, and its first page in `pages` (each `[layer, PAGE rows, keys | values]`). A padding row has no tokens, and
/// its result is never read.
struct Decode { char* prompt; int prompt_rows, length, page, none; };
constexpr int SPLIT = 128, PAGE = 64;

/// Writes the keys and values of each row behind those of its earlier tokens.
STEP_KERNEL(append, (const Decode* rows, char* const* pages, int cache_bf16, Array qkv, int stride, int width, int layer)) {
    start_next(), wait_previous();
    Decode it = rows[blockIdx.x];
    int own = it.length - 1;
    if (own < 0) return;
    i64 to = (i64)(layer * PAGE + own % PAGE) * width, from = (i64)(blockIdx.x + 1) * stride - width;
    for (int j = threadIdx.x * 4; j < width; j += blockDim.x * 4)
        store4({pages[it.page + own / PAGE], cache_bf16}, to + j, to + width, load4(qkv, from + j, from + width));
}

/// Computes part `blockIdx.z` of the keys of row `blockIdx.x`, for query head `blockIdx.y`. The results are
/// `{top, sum}` of the online softmax and sums of values, `[row, head, part, 2 + d]`. The first `prompt_parts` of all
/// `parts` belong to the prompt. The division into parts depends only on positions in the prompt or the completion, so
/// the bits of a row do not depend on other rows.
STEP_KERNEL_OF(128, 4, decode, (float* partial, Array q, const Decode* rows, char* const* pages, int cache_bf16, int layer, int prompt_parts, int parts, int heads, int group, int stride, int d, float scale)) {
    start_next(), wait_previous();
    SHARED(float, p, THREADS);
    SHARED(float, red, 32);
    Decode it = rows[blockIdx.x];
    int head = blockIdx.y, width = heads / group * d, kv = head / group * d, part = blockIdx.z;
    bool of_prompt = part < prompt_parts;
    int total = of_prompt ? it.prompt_rows : it.length, begin = (of_prompt ? part : part - prompt_parts) * SPLIT;
    int end = begin + SPLIT < total ? begin + SPLIT : total;
    auto cache = [&](int key) { return Array{of_prompt ? it.prompt : pages[it.page + key / PAGE], cache_bf16}; };
    auto place = [&](int key) { return (i64)(of_prompt ? layer * it.prompt_rows + key : layer * PAGE + key % PAGE) * 2 * width + kv; };
    Softmax s;
    for (int at = begin; at < end; at += THREADS) {
        int key = at + threadIdx.x, count = end - at < THREADS ? end - at : THREADS;
        float score = key < end ? scale * dot(q, (i64)blockIdx.x * stride + head * d, cache(key), place(key), d) : -INFINITY;
        s.chunk(score, p, red, count, d, [&](int i, int j) { return load(cache(at + i), place(at + i) + width + j); });
    }
    float* to = partial + (((i64)blockIdx.x * heads + head) * parts + part) * (2 + d);
    if (threadIdx.x == 0) to[0] = s.top, to[1] = s.sum;
    UNROLL for (int c = 0; c < COLUMNS; c++)
        if (int j = threadIdx.x + c * THREADS; j < d) to[2 + j] = s.acc[c];
}
/// Joins the parts in order. Empty parts have a `top` of −∞ and a sum of 0; in a part of NaN, the sum is NaN.
STEP_KERNEL(decode_join, (Array out, const float* partial, i64 count, int parts, int d)) {
    start_next(), wait_previous();
    i64 i = thread_index();
    if (i >= count * d) return;
    const float* from = partial + i / d * parts * (2 + d);
    float top = -INFINITY, sum = 0, acc = 0;
    for (int part = 0; part < parts; part++) top = larger(top, from[(i64)part * (2 + d)]);
    for (int part = 0; part < parts; part++) {
        const float* at = from + (i64)part * (2 + d);
        if (at[0] == -INFINITY && at[1] == 0) continue;
        float factor = exp_(at[0] - top);
        sum += at[1] * factor;
        acc += at[2 + i % d] * factor;
    }
    store(out, i, sum == 0 ? 0 : acc / sum);
}
