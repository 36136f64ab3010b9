// Sums over many rows or elements, in an order that depends on sizes alone. Parts are summed first, and then added in
// order.
#include "prim.cuh"

/// Computes `partial[part, j]`, the sum of `a[row, j]` over the rows of the part. The terms are multiplied by `b[row,
/// j]` if it is given, or by `(b − mean) · rstd`. One thread per column; the rows of a part are added in order.
KERNEL(column_sums, (float* partial, Array a, i64 a_stride, Array b, const float* mean, const float* rstd, i64 rows, int cols, i64 per_part)) {
    int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= cols) return;
    i64 begin = blockIdx.y * per_part, end = begin + per_part < rows ? begin + per_part : rows;
    float sum = 0;
    for (i64 row = begin; row < end; row++) {
        float term = load(a, row * a_stride + j);
        if (b.at) term *= (load(b, row * cols + j) - (mean ? mean[row] : 0)) * (rstd ? rstd[row] : 1);
        sum += term;
    }
    partial[(i64)blockIdx.y * cols + j] = sum;
}
/// Computes `to[j] += Σ partial[part, j]`.
KERNEL(add_parts, (float* to, const float* partial, int parts, i64 cols)) {
    i64 j = thread_index();
    if (j >= cols) return;
    float sum = 0;
    for (int part = 0; part < parts; part++) sum += partial[part * cols + j];
    to[j] += sum;
}
/// Computes `to[j]` as the sum of `parts[block, j]` over the blocks, added as a binary tree. Overwrites `parts`.
KERNEL(fold_blocks, (float* to, float* parts, int blocks, i64 len)) {
    i64 j = thread_index();
    if (j >= len) return;
    for (int stride = 1; stride < blocks; stride *= 2)
        for (int left = 0; left + stride < blocks; left += 2 * stride) parts[left * len + j] += parts[(left + stride) * len + j];
    to[j] = parts[j];
}
/// Computes `partial[block] = Σ a · b` over the elements of a block of `per_block`.
KERNEL_OF(256, 4, dots, (double* partial, Array a, Array b, i64 n, i64 per_block)) {
    SHARED(double, red, 32);
    i64 begin = blockIdx.x * per_block, end = begin + per_block < n ? begin + per_block : n;
    double sum = 0;
    for (i64 i = begin + threadIdx.x * 4; i < end; i += blockDim.x * 4) {
        Four x = load4(a, i, end), y = load4(b, i, end);
        for (int e = 0; e < 4; e++) sum += (double)x.x[e] * y.x[e];
    }
    sum = block_sum(sum, red);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
/// Computes rows as weighted sums of rows. Sets row `targets[r]` (or `r`) of `y` to `Σ weights[i] · x[rows[i]]` over
/// `offsets[r]..offsets[r + 1]`, in that order, or adds the sum to it. One block per row.
STEP_KERNEL(mix_rows, (Array y, Array x, const u32* targets, const u32* offsets, const u32* rows, const float* weights, int cols, int adds)) {
    start_next(), wait_previous();
    i64 at = (i64)(targets ? targets[blockIdx.x] : blockIdx.x) * cols;
    u32 begin = offsets[blockIdx.x], end = offsets[blockIdx.x + 1];
    for (int j = threadIdx.x * 4; j < cols; j += blockDim.x * 4) {
        Four sum = {};
        if (adds) sum = load4(y, at + j, at + cols);
        for (u32 i = begin; i < end; i++) {
            i64 from = (i64)rows[i] * cols;
            float w = weights ? weights[i] : 1;
            Four v = load4(x, from + j, from + cols);
            for (int e = 0; e < 4; e++) sum.x[e] += w * v.x[e];
        }
        store4(y, at + j, at + cols, sum);
    }
}
