// Convolutions over channels-last rows, and gates.
#include "prim.cuh"

constexpr u32 OUTSIDE = 0xffffffffu;

/// Computes `y[i / taps, channel, i % taps] = x[sources[i], channel]`, or zero if the source is OUTSIDE.
KERNEL(unfold, (Array y, Array x, const u32* sources, i64 count, int taps, int c)) {
    i64 n = thread_index();
    if (n >= count * c) return;
    i64 row = n / ((i64)taps * c);
    int channel = n / taps % c, tap = n % taps;
    u32 source = sources[row * taps + tap];
    store(y, n, source == OUTSIDE ? 0.0f : load(x, (i64)source * c + channel));
}
/// Computes the gradient of `unfold`. `entries[offsets[row]..offsets[row + 1]]` are the patch entries that read the
/// row, in the order of addition.
KERNEL(fold, (Array dx, Array dy, const u32* offsets, const u32* entries, i64 rows, int taps, int c)) {
    i64 n = thread_index();
    if (n >= rows * c) return;
    i64 row = n / c;
    int channel = n % c;
    float sum = load(dx, n);
    for (u32 e = offsets[row]; e < offsets[row + 1]; e++) sum += load(dy, ((i64)(entries[e] / taps) * c + channel) * taps + entries[e] % taps);
    store(dx, n, sum);
}
/// Computes a depthwise 3×3 convolution with padding 1. With `flip`, computes the gradient with respect to the input.
KERNEL(depthwise, (Array y, Array x, Array weight, i64 rows, int h, int w, int c, int flip)) {
    i64 n = thread_index();
    if (n >= rows * c) return;
    i64 row = n / c;
    int channel = n % c, cx = row % w, cy = row / w % h;
    float sum = 0;
    for (int tap = 0; tap < 9; tap++) {
        int dy = tap / 3 - 1, dx = tap % 3 - 1;
        if (cy + dy < 0 || cy + dy >= h || cx + dx < 0 || cx + dx >= w) continue;
        sum += load(weight, channel * 9 + (flip ? 8 - tap : tap)) * load(x, (row + dy * w + dx) * c + channel);
    }
    store(y, n, sum);
}
/// Computes `partial[part, channel · 9 + tap]`, the gradient with respect to the weight over the rows of a part.
KERNEL(depthwise_weight, (float* partial, Array dy, Array x, i64 rows, int h, int w, int c, i64 per_part)) {
    int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= 9 * c) return;
    int channel = k / 9, oy = k % 9 / 3 - 1, ox = k % 3 - 1;
    i64 begin = blockIdx.y * per_part, end = begin + per_part < rows ? begin + per_part : rows;
    float sum = 0;
    for (i64 row = begin; row < end; row++) {
        int cx = row % w, cy = row / w % h;
        if (cy + oy < 0 || cy + oy >= h || cx + ox < 0 || cx + ox >= w) continue;
        sum += load(dy, row * c + channel) * load(x, (row + oy * w + ox) * c + channel);
    }
    partial[(i64)blockIdx.y * 9 * c + k] = sum;
}
/// Computes `x · sigmoid(gate)`. Each row of the gate applies to `s` rows of `x`.
KERNEL(gate, (Array y, Array x, Array gate, i64 n, i64 s, int c)) {
    i64 i = thread_index();
    if (i >= n) return;
    store(y, i, load(x, i) * sigmoid(load(gate, i / (s * c) * c + i % c)));
}
KERNEL(gate_back, (Array dgate, Array dy, Array x, Array gate, i64 rows, i64 s, int c)) {
    i64 i = thread_index();
    if (i >= rows * c) return;
    float open = sigmoid(load(gate, i)), sum = 0;
    for (i64 j = 0; j < s; j++) {
        i64 at = (i / c * s + j) * c + i % c;
        sum += load(dy, at) * load(x, at);
    }
    store(dgate, i, sum * open * (1 - open));
}
DEVICE float share(Array logits, int k, int which) {
    float top = load(logits, 0), sum = 0;
    for (int i = 1; i < k; i++) top = larger(top, load(logits, i));
    for (int i = 0; i < k; i++) sum += exp_(load(logits, i) - top);
    return exp_(load(logits, which) - top) / sum;
}
/// Computes `y = Σ softmax(logits)ᵢ · xᵢ` over `k` alternatives of `n` values each.
KERNEL(blend, (Array y, Array x, Array logits, i64 n, int k)) {
    i64 j = thread_index();
    if (j >= n) return;
    float sum = 0;
    for (int i = 0; i < k; i++) sum += share(logits, k, i) * load(x, i * n + j);
    store(y, j, sum);
}
KERNEL(blend_back, (Array dx, Array dy, Array logits, i64 n, int k)) {
    i64 j = thread_index();
    if (j >= n * k) return;
    store(dx, j, share(logits, k, j / n) * load(dy, j % n));
}
/// Computes the gradient with respect to the logits from `dots[i · parts..]`, the partial sums of `Σ dy · xᵢ`. Runs in
/// one thread.
KERNEL(blend_logits, (Array dlogits, const double* dots, Array logits, int parts, int k)) {
    double mean = 0;
    for (int i = 0; i < k * parts; i++) mean += share(logits, k, i / parts) * dots[i];
    for (int i = 0; i < k; i++) {
        double dot = 0;
        for (int part = 0; part < parts; part++) dot += dots[i * parts + part];
        store(dlogits, i, share(logits, k, i) * (float)(dot - mean));
    }
}
