// Attention over ranges on tensor cores, following FlashAttention-2 (arXiv 2307.08691): a forward pass, and a backward
// pass without atomics. The backward pass has two kernels: one for the gradient with respect to queries, and one for
// the gradients with respect to keys and values. Rows are bf16, sums are f32.
//
// A packed row is `[queries | keys | values]` and has `stride` columns. A head has D columns, a multiple of 8. In
// shared memory it is padded with zeros to a multiple of 16.
#include "prim.cuh"

/// The key rows `k0..k1` for the queries `q0..q1`. Query i sees key k if k < i + off.
struct Item { int q0, q1, k0, k1, off; };
/// The rows of one block of threads, and the items that include these rows.
struct Tile { int row0, row1, item0, item1; };
struct Shape { int stride, out_stride, heads, group; float scale; };

constexpr int THREADS = 128, ROWS = 64;
template <int D> constexpr int PADDED = (D + 15) / 16 * 16;
/// Number of columns of a row in shared memory. The eight extra columns put eight rows into different banks.
template <int D> constexpr int LINE = PADDED<D> + 8;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

/// Loads the rows `row..row + N` into shared memory. Rows from `end` on and columns beyond the head are zeros.
template <int D, int N> DEVICE void load_rows(u16* to, const u16* from, i64 stride, int row, int end) {
    constexpr int CHUNKS = PADDED<D> / 8;
    for (int i = threadIdx.x; i < N * CHUNKS; i += THREADS) {
        int r = i / CHUNKS, c = i % CHUNKS * 8;
        bool in = row + r < end && c < D;
        copy_async(to + r * LINE<D> + c, from + (in ? (row + r) * stride + c : 0), in);
    }
}
/// Loads the 16×16 block at (row, col) as a left factor.
template <int D> DEVICE void left(u32 (&a)[4], const u16* tile, int row, int col) {
    int lane = threadIdx.x % 32;
    load_matrices<false>(a, tile + (row + lane % 16) * LINE<D> + col + lane / 16 * 8);
}
/// Loads the rows `row..row + 16` as columns of a right factor. Its depth is the columns `col..col + 16`.
template <int D> DEVICE void right_rows(u32 (&b)[4], const u16* tile, int row, int col) {
    int lane = threadIdx.x % 32;
    load_matrices<false>(b, tile + (row + lane / 16 * 8 + lane % 8) * LINE<D> + col + lane / 8 % 2 * 8);
}
/// Loads the columns `col..col + 16` of a right factor. Its depth is the rows `row..row + 16`.
template <int D> DEVICE void right_cols(u32 (&b)[4], const u16* tile, int row, int col) {
    int lane = threadIdx.x % 32;
    load_matrices<true>(b, tile + (row + lane % 16) * LINE<D> + col + lane / 16 * 8);
}
/// Computes `s[16, 8·N] = (rows of tile a) · (rows of tile b)ᵀ` over D columns.
template <int D, int N> DEVICE void products(float (&s)[N][4], const u16* left_tile, int row, const u16* right_tile) {
    UNROLL for (int j = 0; j < N; j++) UNROLL for (int e = 0; e < 4; e++) s[j][e] = 0;
    UNROLL for (int c = 0; c < PADDED<D>; c += 16) {
        u32 a[4], b[4];
        left<D>(a, left_tile, row, c);
        UNROLL for (int j = 0; j < N; j += 2) {
            right_rows<D>(b, right_tile, j * 8, c);
            mma(s[j], a, b[0], b[1]);
            mma(s[j + 1], a, b[2], b[3]);
        }
    }
}
/// Computes `acc[16, padded] += p[16, 8·N] · tile[8·N, D]`, with p rounded to bf16.
template <int D, int N> DEVICE void accumulate(float (&acc)[PADDED<D> / 8][4], const float (&p)[N][4], const u16* tile) {
    UNROLL for (int j = 0; j < N; j += 2) {
        u32 a[4] = {pack(p[j][0], p[j][1]), pack(p[j][2], p[j][3]), pack(p[j + 1][0], p[j + 1][1]), pack(p[j + 1][2], p[j + 1][3])};
        UNROLL for (int c = 0; c < PADDED<D>; c += 16) {
            u32 b[4];
            right_cols<D>(b, tile, j * 8, c);
            mma(acc[c / 8], a, b[0], b[1]);
            mma(acc[c / 8 + 1], a, b[2], b[3]);
        }
    }
}
/// Position of a loop over the key rows (or query rows) of several items.
struct Cursor {
    const Item* items;
    Tile tile;
    int item, at, step;
    bool by_query;
    DEVICE int begin() const { return by_query ? items[item].q0 : items[item].k0; }
    DEVICE int end() const {
        Item it = items[item];
        if (by_query) return it.q1;
        int seen = tile.row1 - 1 + it.off;
        return seen < it.k1 ? seen : it.k1;
    }
    DEVICE void settle() { while (item < tile.item1 && at >= end()) if (++item < tile.item1) at = begin(); }
    DEVICE Cursor(const Item* items, Tile tile, int step, bool by_query) : items(items), tile(tile), item(tile.item0), at(0), step(step), by_query(by_query) {
        if (item < tile.item1) { at = begin(); settle(); }
    }
    DEVICE bool valid() const { return item < tile.item1; }
    DEVICE void next() { at += step; settle(); }
};
template <int D> DEVICE void store_rows(u16* to, const float (&acc)[PADDED<D> / 8][4], float f0, float f1, i64 stride, int row, int end) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    UNROLL for (int c = 0; c < D / 8; c++) {
        if (row + g < end) *(u32*)(to + (i64)(row + g) * stride + c * 8 + 2 * t) = pack(acc[c][0] * f0, acc[c][1] * f0);
        if (row + g + 8 < end) *(u32*)(to + (i64)(row + g + 8) * stride + c * 8 + 2 * t) = pack(acc[c][2] * f1, acc[c][3] * f1);
    }
}

/// Applies a step of the online softmax. Scores become weights, and previous sums, taken with a smaller maximum `m` (in
/// units of `factor`), are reduced.
template <int D, int N> DEVICE void softmax_step(float (&s)[N][4], float (&acc)[PADDED<D> / 8][4], float (&m)[2], float (&l)[2], float factor) {
    UNROLL for (int h = 0; h < 2; h++) {
        float top = m[h];
        UNROLL for (int j = 0; j < N; j++) UNROLL for (int e = 2 * h; e < 2 * h + 2; e++) top = s[j][e] * factor > top ? s[j][e] * factor : top;
        top = quad_max(top);
        float safe = top == -INFINITY ? 0.0f : top, decay = exp2_(m[h] - safe), sum = 0;
        m[h] = top;
        UNROLL for (int j = 0; j < N; j++) UNROLL for (int e = 2 * h; e < 2 * h + 2; e++) sum += s[j][e] = exp2_(s[j][e] * factor - safe);
        l[h] = l[h] * decay + sum;
        UNROLL for (int d = 0; d < PADDED<D> / 8; d++) { acc[d][2 * h] *= decay; acc[d][2 * h + 1] *= decay; }
    }
}

template <int D> DEVICE void forward(u16* out, float* lse, const u16* q, const u16* k, const u16* v, const Tile* tiles, const Item* items, Shape sh) {
    constexpr int LD = LINE<D>, N = ROWS / 8;
    DYNAMIC_SHARED(shared);
    u16 *sq = (u16*)shared, *sk = sq + ROWS * LD, *sv = sk + 2 * ROWS * LD;
    Tile tile = tiles[blockIdx.y];
    int head = blockIdx.x, kv = head / sh.group, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, own = threadIdx.x / 32 * 16;
    int row = tile.row0 + own + g;
    float factor = sh.scale * LOG2E;
    auto fetch = [&](Cursor c, int stage) {
        load_rows<D, ROWS>(sk + stage * ROWS * LD, k + kv * D, sh.stride, c.at, c.end());
        load_rows<D, ROWS>(sv + stage * ROWS * LD, v + kv * D, sh.stride, c.at, c.end());
    };
    Cursor c(items, tile, ROWS, false);
    load_rows<D, ROWS>(sq, q + head * D, sh.stride, tile.row0, tile.row1);
    if (c.valid()) fetch(c, 0);
    commit_copies();
    float acc[PADDED<D> / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
    for (int stage = 0; c.valid(); stage ^= 1) {
        Cursor next = c;
        next.next();
        if (next.valid()) fetch(next, stage ^ 1);
        commit_copies();
        wait_copies<1>();
        sync_block();
        float s[N][4];
        products<D, N>(s, sq, own, sk + stage * ROWS * LD);
        Item it = items[c.item];
        if (c.at + ROWS > it.k1 || c.at + ROWS > tile.row0 + it.off)
            UNROLL for (int j = 0; j < N; j++) UNROLL for (int e = 0; e < 4; e++) {
                int key = c.at + j * 8 + 2 * t + e % 2;
                if (key >= it.k1 || key >= row + e / 2 * 8 + it.off) s[j][e] = -INFINITY;
            }
        softmax_step<D, N>(s, acc, m, l, factor);
        accumulate<D, N>(acc, s, sv + stage * ROWS * LD);
        sync_block();
        c = next;
    }
    float f[2];
    UNROLL for (int h = 0; h < 2; h++) {
        l[h] = quad_sum(l[h]);
        f[h] = l[h] > 0 ? 1 / l[h] : 0;
        if (t == 0 && row + 8 * h < tile.row1) lse[(i64)(row + 8 * h) * sh.heads + head] = (m[h] + log2_(l[h])) * LN2;
    }
    store_rows<D>(out + head * D, acc, f[0], f[1], sh.out_stride, tile.row0 + own, tile.row1);
}

/// Computes the gradient with respect to queries. `delta[row, head] = Σ dout · out`.
template <int D> DEVICE void backward_q(u16* dq, const u16* dout, const float* lse, const float* delta, const u16* q, const u16* k, const u16* v, const Tile* tiles, const Item* items, Shape sh) {
    constexpr int LD = LINE<D>, N = ROWS / 8;
    DYNAMIC_SHARED(shared);
    u16 *sq = (u16*)shared, *sd = sq + ROWS * LD, *sk = sd + ROWS * LD, *sv = sk + ROWS * LD;
    Tile tile = tiles[blockIdx.y];
    int head = blockIdx.x, kv = head / sh.group, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, own = threadIdx.x / 32 * 16;
    int row = tile.row0 + own + g;
    float factor = sh.scale * LOG2E, minus[2], del[2];
    UNROLL for (int h = 0; h < 2; h++) {
        i64 at = (i64)(row + 8 * h < tile.row1 ? row + 8 * h : tile.row0) * sh.heads + head;
        minus[h] = -lse[at] * LOG2E, del[h] = delta[at];
    }
    load_rows<D, ROWS>(sq, q + head * D, sh.stride, tile.row0, tile.row1);
    load_rows<D, ROWS>(sd, dout + head * D, sh.out_stride, tile.row0, tile.row1);
    float acc[PADDED<D> / 8][4] = {};
    for (Cursor c(items, tile, ROWS, false); c.valid(); c.next()) {
        load_rows<D, ROWS>(sk, k + kv * D, sh.stride, c.at, c.end());
        load_rows<D, ROWS>(sv, v + kv * D, sh.stride, c.at, c.end());
        commit_copies();
        wait_copies<0>();
        sync_block();
        float s[N][4], dp[N][4];
        products<D, N>(s, sq, own, sk);
        products<D, N>(dp, sd, own, sv);
        Item it = items[c.item];
        UNROLL for (int j = 0; j < N; j++) UNROLL for (int e = 0; e < 4; e++) {
            int key = c.at + j * 8 + 2 * t + e % 2, h = e / 2;
            bool seen = key < it.k1 && key < row + 8 * h + it.off;
            s[j][e] = seen ? exp2_(s[j][e] * factor + minus[h]) * (dp[j][e] - del[h]) : 0.0f;
        }
        accumulate<D, N>(acc, s, sk);
        sync_block();
    }
    store_rows<D>(dq + head * D, acc, sh.scale, sh.scale, sh.stride, tile.row0 + own, tile.row1);
}

/// Where a kernel for keys and values writes. Head i of a row begins at column `i · head`. If several query heads share
/// a key head, they write f32 parts, which `sum_heads` adds.
struct Gradients { char *dk, *dv; int bf16, stride, head, none; };
template <int D> DEVICE void store_gradients(char* to, Gradients at, const float (&acc)[PADDED<D> / 8][4], float factor, int head, int row, int end) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (at.bf16) return store_rows<D>((u16*)to + head * at.head, acc, factor, factor, at.stride, row, end);
    UNROLL for (int c = 0; c < D / 8; c++) UNROLL for (int h = 0; h < 2; h++) {
        if (row + g + 8 * h >= end) continue;
        float* place = (float*)to + (i64)(row + g + 8 * h) * at.stride + head * at.head + c * 8 + 2 * t;
        *(Words2*)place = {{bits(acc[c][2 * h] * factor), bits(acc[c][2 * h + 1] * factor)}};
    }
}
/// Computes the gradients with respect to keys and values, as far as one query head contributes to them. A tile has key
/// rows; its items have the queries that see these rows.
template <int D> DEVICE void backward_kv(Gradients to, const u16* dout, const float* lse, const float* delta, const u16* q, const u16* k, const u16* v, const Tile* tiles, const Item* items, Shape sh) {
    constexpr int LD = LINE<D>, Q = 32, N = Q / 8;
    DYNAMIC_SHARED(shared);
    u16 *sk = (u16*)shared, *sv = sk + ROWS * LD, *sq = sv + ROWS * LD, *sd = sq + Q * LD;
    Tile tile = tiles[blockIdx.y];
    int head = blockIdx.x, kv = head / sh.group, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, own = threadIdx.x / 32 * 16;
    int row = tile.row0 + own + g;
    float factor = sh.scale * LOG2E;
    load_rows<D, ROWS>(sk, k + kv * D, sh.stride, tile.row0, tile.row1);
    load_rows<D, ROWS>(sv, v + kv * D, sh.stride, tile.row0, tile.row1);
    float acc_k[PADDED<D> / 8][4] = {}, acc_v[PADDED<D> / 8][4] = {};
    for (Cursor c(items, tile, Q, true); c.valid(); c.next()) {
        load_rows<D, Q>(sq, q + head * D, sh.stride, c.at, c.end());
        load_rows<D, Q>(sd, dout + head * D, sh.out_stride, c.at, c.end());
        commit_copies();
        wait_copies<0>();
        sync_block();
        Item it = items[c.item];
        float s[N][4], dp[N][4];
        products<D, N>(s, sk, own, sq);
        UNROLL for (int j = 0; j < N; j++) UNROLL for (int e = 0; e < 4; e++) {
            int query = c.at + j * 8 + 2 * t + e % 2, key = row + e / 2 * 8;
            bool seen = query < it.q1 && key >= it.k0 && key < it.k1 && key < query + it.off;
            s[j][e] = seen ? exp2_(s[j][e] * factor - lse[(i64)query * sh.heads + head] * LOG2E) : 0.0f;
        }
        accumulate<D, N>(acc_v, s, sd);
        products<D, N>(dp, sv, own, sd);
        UNROLL for (int j = 0; j < N; j++) UNROLL for (int e = 0; e < 4; e++) {
            int query = c.at + j * 8 + 2 * t + e % 2;
            s[j][e] *= dp[j][e] - (query < it.q1 ? delta[(i64)query * sh.heads + head] : 0.0f);
        }
        accumulate<D, N>(acc_k, s, sq);
        sync_block();
    }
    store_gradients<D>(to.dk, to, acc_k, sh.scale, head, tile.row0 + own, tile.row1);
    store_gradients<D>(to.dv, to, acc_v, 1, head, tile.row0 + own, tile.row1);
}

/// A row to decode; see plain_attention.cu.
struct Decode { char* prompt; int prompt_rows, length, page, none; };
/// Up to 64 pairs of a query head and a row in `row0..row1`. These rows continue one prompt. Pairs are numbered from
/// `first` on, and pair i belongs to row `row0 + i / group`.
struct Pairs { int row0, row1, first, none; };
constexpr int SPLIT = 256, PAGE = 64, WARPS = THREADS / 32, HEADS = 16;

/// Computes part `blockIdx.z` of the keys of a prompt for all rows that continue it. Keys and values are read once. The
/// results are those of the online softmax, `[row, head, part, {top, sum, values}]`, with `top` in base 2.
template <int D> DEVICE void decode_prompt(float* partial, const u16* q, const Decode* rows, const Pairs* tiles, int layer, int parts, Shape sh) {
    constexpr int LD = LINE<D>, N = ROWS / 8, CHUNKS = PADDED<D> / 8;
    DYNAMIC_SHARED(shared);
    u16 *sq = (u16*)shared, *sk = sq + ROWS * LD, *sv = sk + 2 * ROWS * LD;
    Pairs tile = tiles[blockIdx.x];
    Decode it = rows[tile.row0];
    int kv = blockIdx.y, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, own = threadIdx.x / 32 * 16;
    int pairs = (tile.row1 - tile.row0) * sh.group, width = sh.heads / sh.group * D;
    int begin = blockIdx.z * SPLIT, end = begin + SPLIT < it.prompt_rows ? begin + SPLIT : it.prompt_rows;
    const u16* k = (const u16*)it.prompt + (i64)layer * it.prompt_rows * 2 * width + kv * D;
    auto fetch = [&](int at, int stage) {
        load_rows<D, ROWS>(sk + stage * ROWS * LD, k, 2 * width, at, end);
        load_rows<D, ROWS>(sv + stage * ROWS * LD, k + width, 2 * width, at, end);
    };
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        int r = i / CHUNKS, c = i % CHUNKS * 8, pair = tile.first + r;
        bool in = pair < pairs && c < D;
        i64 from = (i64)(tile.row0 + pair / sh.group) * sh.stride + (kv * sh.group + pair % sh.group) * D + c;
        copy_async(sq + r * LD + c, q + (in ? from : 0), in);
    }
    if (begin < end) fetch(begin, 0);
    commit_copies();
    float acc[PADDED<D> / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {}, factor = sh.scale * LOG2E;
    for (int at = begin, stage = 0; at < end; at += ROWS, stage ^= 1) {
        if (at + ROWS < end) fetch(at + ROWS, stage ^ 1);
        commit_copies();
        wait_copies<1>();
        sync_block();
        float s[N][4];
        products<D, N>(s, sq, own, sk + stage * ROWS * LD);
        UNROLL for (int j = 0; j < N; j++) UNROLL for (int e = 0; e < 4; e++)
            if (at + j * 8 + 2 * t + e % 2 >= end) s[j][e] = -INFINITY;
        softmax_step<D, N>(s, acc, m, l, factor);
        accumulate<D, N>(acc, s, sv + stage * ROWS * LD);
        sync_block();
    }
    UNROLL for (int h = 0; h < 2; h++) {
        l[h] = quad_sum(l[h]);
        int pair = tile.first + own + g + 8 * h, row = tile.row0 + pair / sh.group, head = kv * sh.group + pair % sh.group;
        if (pair >= pairs) continue;
        float* to = partial + (((i64)row * sh.heads + head) * parts + blockIdx.z) * (2 + D);
        if (t == 0) to[0] = m[h], to[1] = l[h];
        UNROLL for (int c = 0; c < D / 8; c++) UNROLL for (int e = 0; e < 2; e++) to[2 + c * 8 + 2 * t + e] = acc[c][2 * h + e];
    }
}

/// Some parts of an online softmax, joined: the top, the sum, and the sum of one column of the values.
struct Joined { float top, sum, value; };
/// Joins more parts in order. An empty part has a top of −∞ and a sum of 0; in a part of NaN, the sum is NaN.
DEVICE void join(Joined& to, const float* from, int parts, int stride, int column) {
    for (int p = 0; p < parts; p++, from += stride) {
        if (from[0] == -INFINITY && from[1] == 0) continue;
        float top = larger(to.top, from[0]), before = exp2_(to.top - top), own = exp2_(from[0] - top);
        to = {top, to.sum * before + from[1] * own, to.value * before + from[2 + column] * own};
    }
}
/// Appends the key and the value of row `blockIdx.x` to the last page of its completion, and computes its attention over
/// prompt and completion. `blockIdx.y` selects a key head and up to 16 of its query heads, so keys are read once for
/// these. `blockIdx.z` is a part of the completion's keys: each warp takes 16 keys of a page, and the warps are joined
/// in order. The block that finishes last joins the prompt's parts, from `decode_prompt`, with those of the completion.
template <int D> DEVICE void decode(u16* out, float* partial, u32* counters, const u16* qkv, const Decode* rows, char* const* pages, int layer, int prompt_parts, int parts, Shape sh) {
    constexpr int LD = LINE<D>, CHUNKS = PADDED<D> / 8, PART = 2 + D;
    DYNAMIC_SHARED(shared);
    u16 *sq = (u16*)shared, *sk = sq + HEADS * LD, *sv = sk + 2 * PAGE * LD;
    Decode it = rows[blockIdx.x];
    int tiles = (sh.group + HEADS - 1) / HEADS, kv = blockIdx.y / tiles, first = blockIdx.y % tiles * HEADS;
    int heads = sh.group - first < HEADS ? sh.group - first : HEADS, head = kv * sh.group + first;
    // A padding row has one part without keys, and its result is zero.
    int own_parts = it.length > SPLIT ? (it.length + SPLIT - 1) / SPLIT : 1, width = sh.heads / sh.group * D;
    if (blockIdx.z >= own_parts) return;
    int begin = blockIdx.z * SPLIT, end = begin + SPLIT < it.length ? begin + SPLIT : it.length, newest = it.length - 1;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32, own = warp * 16;
    const u16 *row = qkv + (i64)blockIdx.x * sh.stride, *fresh = row + (sh.heads + kv) * D;
    auto page_of = [&](int key) { return (u16*)pages[it.page + key / PAGE] + (i64)layer * PAGE * 2 * width + kv * D; };
    auto fetch = [&](int at, int stage) {
        const u16* page = page_of(at);
        for (int i = threadIdx.x; i < PAGE * CHUNKS; i += THREADS) {
            int r = i / CHUNKS, c = i % CHUNKS * 8, to = (stage * PAGE + r) * LD + c;
            bool in = at + r < end && c < D;
            const u16* from = !in ? page : at + r == newest ? fresh + c : page + r * 2 * width + c;
            copy_async(sk + to, from, in);
            copy_async(sv + to, from + width, in);
        }
    };
    for (int i = threadIdx.x; i < HEADS * CHUNKS; i += THREADS) {
        int r = i / CHUNKS, c = i % CHUNKS * 8;
        bool in = r < heads && c < D;
        copy_async(sq + r * LD + c, row + (in ? (head + r) * D + c : 0), in);
    }
    if (begin < end) fetch(begin, 0);
    commit_copies();
    if (first == 0 && begin <= newest && newest < end) {
        u16* to = page_of(newest) + newest % PAGE * 2 * width;
        for (int c = threadIdx.x * 8; c < D; c += THREADS * 8) {
            *(Words4*)(to + c) = *(const Words4*)(fresh + c);
            *(Words4*)(to + width + c) = *(const Words4*)(fresh + width + c);
        }
    }
    float acc[PADDED<D> / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {}, factor = sh.scale * LOG2E;
    for (int at = begin, stage = 0; at < end; at += PAGE, stage ^= 1) {
        if (at + PAGE < end) fetch(at + PAGE, stage ^ 1);
        commit_copies();
        wait_copies<1>();
        sync_block();
        float s[2][4];
        products<D, 2>(s, sq, 0, sk + (stage * PAGE + own) * LD);
        UNROLL for (int j = 0; j < 2; j++) UNROLL for (int e = 0; e < 4; e++)
            if (at + own + j * 8 + 2 * t + e % 2 >= end) s[j][e] = -INFINITY;
        softmax_step<D, 2>(s, acc, m, l, factor);
        accumulate<D, 2>(acc, s, sv + (stage * PAGE + own) * LD);
        sync_block();
    }
    // The rows of shared memory are no longer needed; the results of the warps take their place.
    wait_copies<0>();
    sync_block();
    float* of_warps = (float*)shared;
    UNROLL for (int h = 0; h < 2; h++) {
        l[h] = quad_sum(l[h]);
        float* to = of_warps + (own + g + 8 * h) * PART;
        if (t == 0) to[0] = m[h], to[1] = l[h];
        UNROLL for (int c = 0; c < D / 8; c++) UNROLL for (int e = 0; e < 2; e++) to[2 + c * 8 + 2 * t + e] = acc[c][2 * h + e];
    }
    sync_block();
    float* of_row = partial + ((i64)blockIdx.x * sh.heads + head) * parts * PART;
    for (int i = threadIdx.x; i < heads * D; i += THREADS) {
        Joined sum = {-INFINITY, 0, 0};
        join(sum, of_warps + i / D * PART, WARPS, 16 * PART, i % D);
        float* to = of_row + ((i64)i / D * parts + prompt_parts + blockIdx.z) * PART;
        if (i % D == 0) to[0] = sum.top, to[1] = sum.sum;
        to[2 + i % D] = sum.value;
    }
    if (!finishes_last(counters + blockIdx.x * gridDim.y + blockIdx.y, own_parts)) return;
    for (int i = threadIdx.x; i < heads * D; i += THREADS) {
        const float* from = of_row + (i64)i / D * parts * PART;
        Joined sum = {-INFINITY, 0, 0};
        join(sum, from, (it.prompt_rows + SPLIT - 1) / SPLIT, PART, i % D);
        join(sum, from + prompt_parts * PART, own_parts, PART, i % D);
        out[(i64)blockIdx.x * sh.out_stride + head * D + i] = bf16(sum.sum == 0 ? 0 : sum.value / sum.sum);
    }
}

/// Computes `delta[row, head] = Σ dout · out`, with one warp per row and head.
KERNEL_OF(128, 4, delta, (float* delta, Array dout, Array out, i64 count, int d)) {
    i64 at = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    float sum = 0;
    if (at < count) for (int i = threadIdx.x % 32; i < d; i += 32) sum += load(dout, at * d + i) * load(out, at * d + i);
    sum = warp_sum(sum);
    if (at < count && threadIdx.x % 32 == 0) delta[at] = sum;
}

/// Adds the parts of the query heads that share a key head, in order. A row of `partial` is
/// `[query head, dk | dv]` and a row of the output is `[dk | dv]`, of `kv` heads each.
KERNEL(sum_heads, (Array to, const float* partial, i64 rows, int stride, int kv, int group, int d)) {
    i64 i = thread_index();
    int quads = (d + 3) / 4, col = i % quads * 4;
    if (i >= rows * 2 * kv * quads) return;
    i64 row = i / (2 * kv * quads), place = i / quads % (2 * kv), part = place / kv, head = place % kv * group;
    Four sum = {};
    for (int h = 0; h < group; h++) {
        i64 at = ((row * kv * group + head + h) * 2 + part) * d;
        Four x = load4({(char*)partial, 0}, at + col, at + d);
        for (int e = 0; e < 4; e++) sum.x[e] += x.x[e];
    }
    i64 at = row * stride + place * d;
    store4(to, at + col, at + d, sum);
}

#define OF_WIDTH(D) \
    KERNEL_OF(THREADS, 2, forward_##D, (u16* out, float* lse, const u16* q, const u16* k, const u16* v, const Tile* tiles, const Item* items, Shape sh)) { \
        forward<D>(out, lse, q, k, v, tiles, items, sh); } \
    KERNEL_OF(THREADS, 2, backward_q_##D, (u16* dq, const u16* dout, const float* lse, const float* delta, const u16* q, const u16* k, const u16* v, const Tile* tiles, const Item* items, Shape sh)) { \
        backward_q<D>(dq, dout, lse, delta, q, k, v, tiles, items, sh); } \
    KERNEL_OF(THREADS, 2, backward_kv_##D, (Gradients to, const u16* dout, const float* lse, const float* delta, const u16* q, const u16* k, const u16* v, const Tile* tiles, const Item* items, Shape sh)) { \
        backward_kv<D>(to, dout, lse, delta, q, k, v, tiles, items, sh); } \
    KERNEL_OF(THREADS, 2, decode_prompt_##D, (float* partial, const u16* q, const Decode* rows, const Pairs* tiles, int layer, int parts, Shape sh)) { \
        decode_prompt<D>(partial, q, rows, tiles, layer, parts, sh); } \
    KERNEL_OF(THREADS, 2, decode_##D, (u16* out, float* partial, u32* counters, const u16* qkv, const Decode* rows, char* const* pages, int layer, int prompt_parts, int parts, Shape sh)) { \
        decode<D>(out, partial, counters, qkv, rows, pages, layer, prompt_parts, parts, sh); }
OF_WIDTH(64)
OF_WIDTH(72)
OF_WIDTH(80)
OF_WIDTH(128)
