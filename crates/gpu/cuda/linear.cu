// Computes y [rows, n] = x [rows, k] · Wᵀ for few rows (decoding) and reads W [n, k] once. A launch takes up to three
// weights, whose outputs are neighbouring columns of y. The weight is the left factor. A row of x is therefore a column
// of a tensor-core tile, and its bits do not depend on the other rows. The division of k into parts depends only on the
// weights; the block that finishes last adds the parts of a tile in order.
#include "prim.cuh"

/// A weight `[n, k]` with its optional bias. `at` has bf16 or f32 values, or codes of 8 or 4 bits with `scales`. Bit 0 of
/// `low` is set for values in bf16, bit 1 for a bias in bf16.
struct Layer { char* at; const u32* scales; char* bias; int n, low; };
/// The outputs `first..` of a layer, whose first output is column `col` of the launch.
struct Place { Layer layer; int first, col; };

/// Returns the layer that has tile `tile`, if a tile is `per` outputs of one layer.
DEVICE Place place_of(int tile, int per, Layer a, Layer b, Layer c) {
    int of_a = (a.n + per - 1) / per, of_b = (b.n + per - 1) / per;
    if (tile < of_a) return {a, tile * per, 0};
    if (tile < of_a + of_b) return {b, (tile - of_a) * per, a.n};
    return {c, (tile - of_a - of_b) * per, a.n + b.n};
}
/// Returns the bias of an output, to which its sum is added.
DEVICE float bias_of(Layer layer, int out) { return layer.bias ? load({layer.bias, layer.low >> 1}, out) : 0; }
DEVICE void put(Array y, Array residual, i64 at, float sum) {
    if (residual.at) sum += load(residual, at);
    store(y, at, sum);
}

constexpr int WEIGHT_ROWS = 64, STAGES = 4, THREADS = 128;
/// Columns of a stage: one block of codes, or 64 values.
template <int BITS> constexpr int DEPTH = BITS == 4 ? 128 : 64;
/// Bytes of a weight's row in a stage, with padding that puts eight rows into different banks.
template <int BITS> constexpr int WEIGHT_LINE = BITS == 16 ? 144 : 96;
template <int BITS> constexpr int X_LINE = DEPTH<BITS> + 8;

/// Returns `code · step + min`, with the code in the low bits of `word` and `{min, step}` in `scale`. The result equals
/// that of `widen`, because the product is exact. The sum converts an integer below 2^23 faster than a conversion does.
template <int BITS> DEVICE float value(u32 word, u32 scale) {
    float code = from_bits(0x4b000000u | (word & ((1u << BITS) - 1))) - 8388608.0f;
    return code * f32(u16(scale >> 16)) + f32(u16(scale));
}

/// Computes a tile of 64 outputs for up to `8 · BLOCKS` rows. The grid is (tiles, parts). If there are several parts,
/// `partial` has `[tile, part, rows, 64]` numbers.
template <int BITS, int BLOCKS> DEVICE void few_rows(Array y, Array residual, i64 stride, float* partial, u32* counters, const u16* x, Layer l0, Layer l1, Layer l2, int rows, int k, int steps) {
    constexpr int D = DEPTH<BITS>, LINE = X_LINE<BITS>, W_LINE = WEIGHT_LINE<BITS>, GROUPS = D / 64;
    // Pieces of 16 bytes in a stage of a weight's row.
    constexpr int PIECES = BITS == 16 ? D / 8 : 4;
    DYNAMIC_SHARED(shared);
    char* sw = shared;
    u16* sx = (u16*)(shared + STAGES * WEIGHT_ROWS * W_LINE);
    Place place = place_of(blockIdx.x, WEIGHT_ROWS, l0, l1, l2);
    Layer w = place.layer;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int begin = blockIdx.y * steps, all = (k + D - 1) / D, count = begin + steps < all ? steps : all - begin;
    int pieces = BITS == 16 ? k / 8 : all * PIECES;
    auto fetch = [&](int step) {
        if (step < count) {
            int at = begin + step, stage = step % STAGES;
            for (int i = threadIdx.x; i < WEIGHT_ROWS * PIECES; i += THREADS) {
                int r = i / PIECES, c = i % PIECES, piece = at * PIECES + c;
                bool in = place.first + r < w.n && piece < pieces;
                copy_async(sw + (stage * WEIGHT_ROWS + r) * W_LINE + c * 16, w.at + (in ? ((i64)(place.first + r) * pieces + piece) * 16 : 0), in);
            }
            for (int i = threadIdx.x; i < BLOCKS * 8 * (D / 8); i += THREADS) {
                int r = i / (D / 8), c = i % (D / 8) * 8;
                bool in = r < rows && at * D + c < k;
                copy_async(sx + (stage * BLOCKS * 8 + r) * LINE + c, x + (in ? (i64)r * k + at * D + c : 0), in);
            }
        }
        commit_copies();
    };
    // Scales of this thread's two rows for the current step and the next one.
    u32 scales[2][GROUPS] = {}, next[2][GROUPS] = {};
    auto fetch_scales = [&](int step) {
        UNROLL for (int h = 0; h < 2; h++) UNROLL for (int s = 0; s < GROUPS; s++) {
            int out = place.first + warp * 16 + g + 8 * h;
            next[h][s] = step < count && out < w.n ? w.scales[((i64)out * all + begin + step) * GROUPS + s] : 0;
        }
    };
    float acc[BLOCKS][4] = {};
    for (int s = 0; s < STAGES - 1; s++) fetch(s);
    if (BITS < 16) fetch_scales(0);
    for (int s = 0; s < count; s++) {
        wait_copies<STAGES - 2>();
        sync_block();
        fetch(s + STAGES - 1);
        const char* tw = sw + (s % STAGES * WEIGHT_ROWS + warp * 16) * W_LINE;
        const u16* tx = sx + s % STAGES * BLOCKS * 8 * LINE;
        // Words 2t, 2t + 1, 2t + 8, 2t + 9 of two rows have this thread's elements of all columns.
        u32 words[2][4];
        if (BITS < 16) {
            UNROLL for (int h = 0; h < 2; h++) {
                const Words2* line = (const Words2*)(tw + (g + 8 * h) * W_LINE);
                UNROLL for (int i = 0; i < 4; i++) words[h][i] = line[t + i / 2 * 4].x[i % 2];
                UNROLL for (int i = 0; i < GROUPS; i++) scales[h][i] = next[h][i];
            }
            fetch_scales(s + 1);
        }
        UNROLL for (int c = 0; c < D; c += 16) {
            u32 a[4];
            if (BITS == 16) load_matrices<false>(a, (const u16*)(tw + lane % 16 * W_LINE) + c + lane / 16 * 8);
            else {
                UNROLL for (int i = 0; i < 4; i++) {
                    int h = i % 2, first = i / 2 * 2, shift = c / 16 * BITS;
                    u32 scale = scales[h][c / 64];
                    a[i] = pack(value<BITS>(words[h][first] >> shift, scale), value<BITS>(words[h][first + 1] >> shift, scale));
                }
            }
            UNROLL for (int b = 0; b < BLOCKS; b++) {
                const u16* row = tx + (b * 8 + g) * LINE + c + t * 2;
                mma(acc[b], a, *(const u32*)row, *(const u32*)(row + 8));
            }
        }
    }
    int size = rows * WEIGHT_ROWS, parts = gridDim.y;
    float* parts_at = partial + (i64)blockIdx.x * parts * size;
    UNROLL for (int b = 0; b < BLOCKS; b++) UNROLL for (int e = 0; e < 4; e++) {
        int row = b * 8 + t * 2 + e % 2, j = warp * 16 + g + e / 2 * 8, out = place.first + j;
        if (row >= rows) continue;
        if (parts > 1) parts_at[(i64)blockIdx.y * size + row * WEIGHT_ROWS + j] = acc[b][e];
        else if (out < w.n) put(y, residual, row * stride + place.col + out, bias_of(w, out) + acc[b][e]);
    }
    if (parts == 1 || !finishes_last(counters + blockIdx.x, parts)) return;
    for (int i = threadIdx.x; i < size; i += THREADS) {
        int out = place.first + i % WEIGHT_ROWS;
        if (out >= w.n) continue;
        float sum = bias_of(w, out);
        for (int p = 0; p < parts; p++) sum += parts_at[(i64)p * size + i];
        put(y, residual, i / WEIGHT_ROWS * stride + place.col + out, sum);
    }
}
#define FEW(NAME, BITS, B) KERNEL_OF(THREADS, 2, NAME##_##B, (Array y, Array residual, i64 stride, float* partial, u32* counters, const u16* x, Layer l0, Layer l1, Layer l2, int rows, int k, int steps)) { \
    few_rows<BITS, B>(y, residual, stride, partial, counters, x, l0, l1, l2, rows, k, steps); }
#define OF_BITS(NAME, BITS) FEW(NAME, BITS, 1) FEW(NAME, BITS, 2) FEW(NAME, BITS, 4) FEW(NAME, BITS, 8)
OF_BITS(few_rows, 16) OF_BITS(few_rows_of_8_bits, 8) OF_BITS(few_rows_of_4_bits, 4)

/// Computes the same products for any dtype and width without tensor cores. Each warp computes one output of one row.
KERNEL_OF(THREADS, 4, rows_product, (Array y, Array residual, i64 stride, Array x, Layer l0, Layer l1, Layer l2, int k)) {
    Place place = place_of(blockIdx.x * 4 + threadIdx.x / 32, 1, l0, l1, l2);
    int out = place.first;
    bool valid = out < place.layer.n;
    Array w = {place.layer.at, place.layer.low & 1};
    float sum = 0;
    for (int i = threadIdx.x % 32; valid && i < k; i += 32) sum += load(x, (i64)blockIdx.y * k + i) * load(w, (i64)out * k + i);
    sum = warp_sum(sum);
    if (valid && threadIdx.x % 32 == 0) put(y, residual, blockIdx.y * stride + place.col + out, bias_of(place.layer, out) + sum);
}

/// Widens rows of a weight of 8 or 4 bits, optionally selected by index: `code · step + min`. A block of codes is 16
/// words. Word i has the elements i, i + 16, i + 32, …, starting at its low bits. 64 elements share a scale `{min,
/// step}` in bf16.
KERNEL(widen, (Array to, Codes codes, const u32* index, i64 rows, int k)) {
    i64 i = thread_index();
    if (i >= rows * k) return;
    store(to, i, widened(codes, index ? index[i / k] : i / k, i % k));
}
