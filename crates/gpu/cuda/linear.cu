// Computes y [rows, n] = x [rows, k] · Wᵀ for few rows (decoding) and reads W [n, k] once. The weight is the left
// factor. A row of x is therefore a column of a tensor-core tile, and its bits do not depend on the other rows. The
// division of k into parts depends only on n and k; parts are added in order.
#include "prim.cuh"

constexpr int DEPTH = 64, WEIGHT_ROWS = 64, STAGES = 4, LINE = DEPTH + 8;

/// Computes `partial[part, rows, n]` in f32, for up to `8 · BLOCKS` rows. The grid is (n / 64, parts).
template <int BLOCKS> DEVICE void few_rows(float* partial, const u16* x, const u16* w, int rows, int n, int k, int steps) {
    DYNAMIC_SHARED(shared);
    u16 *sw = (u16*)shared, *sx = sw + STAGES * WEIGHT_ROWS * LINE;
    int first = blockIdx.x * WEIGHT_ROWS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int begin = blockIdx.y * steps, all = (k + DEPTH - 1) / DEPTH, count = begin + steps < all ? steps : all - begin;
    auto fetch = [&](int step) {
        if (step < count) {
            int at = (begin + step) * DEPTH, stage = step % STAGES;
            for (int i = threadIdx.x; i < (WEIGHT_ROWS + BLOCKS * 8) * (DEPTH / 8); i += blockDim.x) {
                int r = i / (DEPTH / 8), c = i % (DEPTH / 8) * 8;
                bool is_x = r >= WEIGHT_ROWS;
                if (is_x) r -= WEIGHT_ROWS;
                int row = is_x ? r : first + r;
                bool in = row < (is_x ? rows : n) && at + c < k;
                u16* to = is_x ? sx + (stage * BLOCKS * 8 + r) * LINE + c : sw + (stage * WEIGHT_ROWS + r) * LINE + c;
                copy_async(to, (is_x ? x : w) + (in ? (i64)row * k + at + c : 0), in);
            }
        }
        commit_copies();
    };
    float acc[BLOCKS][4] = {};
    for (int s = 0; s < STAGES - 1; s++) fetch(s);
    for (int s = 0; s < count; s++) {
        wait_copies<STAGES - 2>();
        sync_block();
        fetch(s + STAGES - 1);
        const u16 *tw = sw + s % STAGES * WEIGHT_ROWS * LINE, *tx = sx + s % STAGES * BLOCKS * 8 * LINE;
        UNROLL for (int c = 0; c < DEPTH; c += 16) {
            u32 a[4];
            load_matrices<false>(a, tw + (warp * 16 + lane % 16) * LINE + c + lane / 16 * 8);
            UNROLL for (int b = 0; b < BLOCKS; b++) {
                const u16* row = tx + (b * 8 + lane / 4) * LINE + c + lane % 4 * 2;
                mma(acc[b], a, *(const u32*)row, *(const u32*)(row + 8));
            }
        }
    }
    UNROLL for (int b = 0; b < BLOCKS; b++) UNROLL for (int e = 0; e < 4; e++) {
        int out = first + warp * 16 + lane / 4 + e / 2 * 8, row = b * 8 + lane % 4 * 2 + e % 2;
        if (out < n && row < rows) partial[((i64)blockIdx.y * rows + row) * n + out] = acc[b][e];
    }
}
/// Adds the parts, in order, to the bias and the residual, or to `y` itself.
KERNEL(few_rows_finish, (Array y, i64 y_stride, const float* partial, Array bias, Array residual, i64 residual_stride, int parts, i64 rows, int n)) {
    i64 i = thread_index();
    if (i >= rows * n) return;
    i64 row = i / n, j = i % n;
    float sum = bias.at ? load(bias, j) : 0;
    for (int p = 0; p < parts; p++) sum += partial[p * rows * n + i];
    if (residual.at) sum += load(residual, row * residual_stride + j);
    store(y, row * y_stride + j, sum);
}
#define FEW(B) KERNEL_OF(128, 2, few_rows_##B, (float* partial, const u16* x, const u16* w, int rows, int n, int k, int steps)) { few_rows<B>(partial, x, w, rows, n, k, steps); }
FEW(1) FEW(2) FEW(4) FEW(8)

/// Computes the same products for any dtype and width without tensor cores. Each warp computes one output of each row,
/// in one part.
KERNEL_OF(128, 4, rows_product, (float* partial, Array x, Array w, int n, int k)) {
    int j = blockIdx.x * 4 + threadIdx.x / 32;
    float sum = 0;
    for (int i = threadIdx.x % 32; j < n && i < k; i += 32) sum += load(x, (i64)blockIdx.y * k + i) * load(w, (i64)j * k + i);
    sum = warp_sum(sum);
    if (j < n && threadIdx.x % 32 == 0) partial[(i64)blockIdx.y * n + j] = sum;
}

/// Widens rows of a weight of 8 or 4 bits, optionally selected by index: `code · step + min`. A block of codes is 16
/// words. Word i has the elements i, i + 16, i + 32, …, starting at its low bits. 64 elements share a scale `{min,
/// step}` in bf16.
KERNEL(widen, (Array to, const u32* codes, const u32* scales, const u32* index, i64 rows, int k, int bits_, int row_words, int row_groups)) {
    i64 i = thread_index();
    if (i >= rows * k) return;
    i64 row = index ? index[i / k] : i / k;
    int p = i % k, per_word = 32 / bits_, block = 16 * per_word, q = p % block;
    u32 word = codes[row * row_words + p / block * 16 + q % 16];
    u32 code = word >> q / 16 * bits_ & ((1u << bits_) - 1);
    u32 scale = scales[row * row_groups + p / 64];
    store(to, i, (float)code * f32(u16(scale >> 16)) + f32(u16(scale)));
}
