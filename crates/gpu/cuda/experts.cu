// Mixtures of experts. A place is a pair of a row and one of its experts.
#include "prim.cuh"

/// Chooses the `topk` experts with the largest logits of each row, the first of equal ones, with one warp per row. NaN
/// is ordered as by `f64::total_cmp`. The places of a row follow each other, in the order of their experts. Also writes
/// the tables of that order: the row of each place, the places in order, and the offset of the places of each row.
KERNEL_OF(32, 16, choose, (u32* experts, u32* row_of, u32* in_order, u32* offsets, Array logits, int all, int topk)) {
    u32 row = blockIdx.x, first = row * topk;
    constexpr u32 LAST = 0xfffffffe;
    u32* own = experts + first;
    u64 last = ~(u64)0;
    for (int n = 0; n < topk; n++) {
        u64 best = 0;
        for (int e = threadIdx.x; e < all; e += 32) {
            // -0 equals 0. A NaN may have the largest key, so the low word stays below its maximum.
            u32 b = bits(load(logits, (i64)row * all + e));
            u64 at = (u64)key_of(from_bits(b == 0x80000000u ? 0 : b)) << 32 | (LAST - e);
            if (at < last && at > best) best = at;
        }
        for (int mask = 16; mask; mask /= 2) {
            u64 other = shuffle_xor(best, mask);
            best = other > best ? other : best;
        }
        last = best;
        if (threadIdx.x == 0) {
            u32 expert = LAST - (u32)best;
            int to = n;
            for (; to > 0 && own[to - 1] > expert; to--) own[to] = own[to - 1];
            own[to] = expert;
        }
    }
    for (int n = threadIdx.x; n < topk; n += 32) row_of[first + n] = row, in_order[first + n] = first + n;
    if (threadIdx.x == 0) {
        offsets[row] = first;
        if (row + 1 == gridDim.x) offsets[row + 1] = first + topk;
    }
}
/// Computes `y[p] = x[p] · W`, where W is the `[k, n]` matrix of the place's expert. A weight without `w` is given by its
/// codes, and its elements are rounded to bf16. One thread per output adds the terms in order, so the bits of a place do
/// not depend on other places.
KERNEL(rows_product, (Array y, Array x, Array w, Codes codes, const u32* experts, i64 places, int k, int n)) {
    i64 i = thread_index();
    if (i >= places * n) return;
    i64 place = i / n, row = (i64)experts[place] * k;
    int col = i % n;
    float sum = 0;
    if (w.at) for (int j = 0; j < k; j++) sum += load(x, place * k + j) * load(w, (row + j) * n + col);
    else for (int j = 0; j < k; j++) sum += load(x, place * k + j) * f32(bf16(widened(codes, row + j, col)));
    store(y, i, sum);
}
constexpr int OUTPUTS = 64, DEPTH = 64, STAGES = 4, THREADS = 128, MOST_PLACES = 1024;
/// Elements of a line in shared memory: 64, and 8 that put eight lines into different banks.
constexpr int LINE = 72;

/// Computes the same product on tensor cores, in bf16 with f32 sums, for at most `MOST_PLACES` places. A block computes 64
/// outputs of all places of one expert: `8 · BLOCKS` places at a time, for which it reads its part of the expert's matrix
/// once. The grid is (tiles of outputs, experts). An output is a row of the left factor, and a place is a column of the
/// right one, so its bits do not depend on other places.
template <int BLOCKS> DEVICE void product_of_places(Array y, const u16* x, const u16* w, const u32* experts, int places, int k, int n) {
    constexpr int STAGE = DEPTH * LINE, X_STAGE = BLOCKS * 8 * LINE, PIECES = DEPTH / 8, ROWS = THREADS / PIECES;
    start_next(), wait_previous();
    DYNAMIC_SHARED(shared);
    SHARED(int, counts, THREADS);
    u16 *sw = (u16*)shared, *sx = sw + STAGES * STAGE;
    u32* own = (u32*)(sx + STAGES * X_STAGE);
    // The places of this expert, in order: each thread adds those of its part of the list.
    u32 expert = blockIdx.y;
    int each = (places + THREADS - 1) / THREADS, from = threadIdx.x * each, mine = 0;
    int to = from + each < places ? from + each : places;
    for (int p = from; p < to; p++) mine += experts[p] == expert;
    counts[threadIdx.x] = mine;
    sync_block();
    int at = 0, all = 0;
    for (int i = 0; i < THREADS; i++) {
        if (i < threadIdx.x) at += counts[i];
        all += counts[i];
    }
    for (int p = from; p < to; p++) if (experts[p] == expert) own[at++] = p;
    sync_block();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int col = blockIdx.x * OUTPUTS, count = (k + DEPTH - 1) / DEPTH;
    // This thread copies piece `piece` of lines `line`, `line + ROWS`, … of a stage.
    int line = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    bool in = col + piece * 8 < n;
    const u16* from_w = w + ((i64)expert * k + line) * n + (in ? col + piece * 8 : 0);
    for (int first = 0; first < all; first += BLOCKS * 8) {
        int rows = all - first < BLOCKS * 8 ? all - first : BLOCKS * 8;
        auto fetch = [&](int step) {
            if (step >= count) return;
            UNROLL for (int j = 0; j < DEPTH / ROWS; j++) {
                int row = step * DEPTH + line + j * ROWS;
                bool valid = in && row < k;
                copy_async(sw + step % STAGES * STAGE + (line + j * ROWS) * LINE + piece * 8, valid ? from_w + (i64)(row - line) * n : w, valid);
            }
            for (int row = line; row < BLOCKS * 8; row += ROWS) {
                int of = step * DEPTH + piece * 8;
                bool valid = row < rows && of < k;
                copy_async(sx + step % STAGES * X_STAGE + row * LINE + piece * 8, valid ? x + (i64)own[first + row] * k + of : x, valid);
            }
        };
        float acc[BLOCKS][4] = {};
        for (int s = 0; s < STAGES - 1; s++) { fetch(s); commit_copies(); }
        for (int s = 0; s < count; s++) {
            wait_copies<STAGES - 2>();
            sync_block();
            fetch(s + STAGES - 1);
            commit_copies();
            const u16 *tw = sw + s % STAGES * STAGE + warp * 16, *tx = sx + s % STAGES * X_STAGE;
            UNROLL for (int c = 0; c < DEPTH; c += 16) {
                // Lines of the matrix are columns of the left factor.
                u32 a[4], b[4];
                load_matrices<true>(a, tw + (c + lane / 16 * 8 + lane % 8) * LINE + lane / 8 % 2 * 8);
                UNROLL for (int j = 0; j < BLOCKS; j += 2) {
                    // With a single block of places, the second half of the lanes reads it, too.
                    load_matrices<false>(b, tx + ((BLOCKS == 1 ? 0 : j * 8 + lane / 16 * 8) + lane % 8) * LINE + c + lane / 8 % 2 * 8);
                    mma(acc[j], a, b[0], b[1]);
                    if (BLOCKS > 1) mma(acc[j + 1 < BLOCKS ? j + 1 : j], a, b[2], b[3]);
                }
            }
        }
        UNROLL for (int j = 0; j < BLOCKS; j++) UNROLL for (int e = 0; e < 4; e++) {
            int row = j * 8 + t * 2 + e % 2, out = col + warp * 16 + g + e / 2 * 8;
            if (row < rows && out < n) store(y, (i64)own[first + row] * n + out, acc[j][e]);
        }
        // The stages are filled again.
        wait_copies<0>();
        sync_block();
    }
}
#define PLACES(B) STEP_KERNEL_OF(THREADS, 2, few_places_##B, (Array y, const u16* x, const u16* w, const u32* experts, int places, int k, int n)) { \
    product_of_places<B>(y, x, w, experts, places, k, n); }
PLACES(1) PLACES(2) PLACES(4) PLACES(8)

/// Computes the weight of each place: the softmax over the logits of the experts that its row has chosen. One thread
/// per row.
KERNEL(weights, (float* weights, Array logits, const u32* places, const u32* experts, i64 rows, int each, int all)) {
    i64 row = thread_index();
    if (row >= rows) return;
    float top = -INFINITY, sum = 0;
    for (int j = 0; j < each; j++) top = larger(top, load(logits, row * all + experts[places[row * each + j]]));
    for (int j = 0; j < each; j++) {
        u32 place = places[row * each + j];
        weights[place] = exp_(load(logits, row * all + experts[place]) - top);
        sum += weights[place];
    }
    for (int j = 0; j < each; j++) weights[places[row * each + j]] /= sum;
}
/// Computes `y[row] = x[row] · by[row]`.
KERNEL(scale_rows, (Array y, Array x, const float* by, i64 rows, int cols)) {
    i64 i = thread_index(), quads = (cols + 3) / 4;
    if (i >= rows * quads) return;
    i64 row = i / quads, at = row * cols + i % quads * 4, end = row * cols + cols;
    Four v = load4(x, at, end);
    for (int e = 0; e < 4; e++) v.x[e] *= by[row];
    store4(y, at, end, v);
}
/// Computes `dots[row] = Σ a[row] · b[row]`, with one block per row.
KERNEL_OF(256, 4, row_dots, (float* dots, Array a, Array b, int cols)) {
    SHARED(float, red, 32);
    i64 at = (i64)blockIdx.x * cols, end = at + cols;
    float sum = 0;
    for (i64 i = at + threadIdx.x * 4; i < end; i += blockDim.x * 4) {
        Four x = load4(a, i, end), y = load4(b, i, end);
        for (int e = 0; e < 4; e++) sum += x.x[e] * y.x[e];
    }
    sum = block_sum(sum, red);
    if (threadIdx.x == 0) dots[blockIdx.x] = sum;
}
/// Computes the gradients with respect to the logits from the weights of the places and their gradients `dots`. The
/// output must be zero at the start. One thread per row.
KERNEL(weights_back, (float* dlogits, const float* weights, const float* dots, const u32* places, const u32* experts, i64 rows, int each, int all)) {
    i64 row = thread_index();
    if (row >= rows) return;
    float mean = 0;
    for (int j = 0; j < each; j++) mean += weights[places[row * each + j]] * dots[places[row * each + j]];
    for (int j = 0; j < each; j++) {
        u32 place = places[row * each + j];
        dlogits[row * all + experts[place]] = weights[place] * (dots[place] - mean);
    }
}
