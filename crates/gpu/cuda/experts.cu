// Mixtures of experts. A place is a pair of a row and one of its experts. Places are sorted by expert.
#include "prim.cuh"

/// Computes `y[p] = x[p] · W`, where W is the `[k, n]` matrix of the place's expert (the first matrix if `experts` is
/// null). One thread per output adds the terms in order, so the bits of a place do not depend on other places.
KERNEL(rows_product, (Array y, Array x, Array w, const u32* experts, i64 places, int k, int n)) {
    i64 i = thread_index();
    if (i >= places * n) return;
    i64 place = i / n, col = i % n;
    i64 from = (experts ? (i64)experts[place] * k : 0) * n + col;
    float sum = 0;
    for (int j = 0; j < k; j++) sum += load(x, place * k + j) * load(w, from + (i64)j * n);
    store(y, i, sum);
}
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
