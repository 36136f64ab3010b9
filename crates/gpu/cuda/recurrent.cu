// Layers that carry a state from row to row, except for the chunks of the gated delta rule (delta.cu): causal convolution, gates,
// gated norm, and decoding.
#include "prim.cuh"

/// Number of rows that `sources` has for each row.
constexpr int WINDOW = 8;
constexpr u32 NONE = 0xffffffffu;

/// Returns the sum of the window of a row in one channel. `sources[row, back]` is the row that is `back` rows before it in its
/// sequence, or NONE.
DEVICE float window(Array x, Array weight, const u32* sources, i64 row, int channel, int c, int taps) {
    float sum = 0;
    for (int back = taps - 1; back >= 0; back--) {
        u32 source = sources[row * WINDOW + back];
        if (source != NONE) sum += load(weight, channel * taps + taps - 1 - back) * load(x, (i64)source * c + channel);
    }
    return sum;
}
/// Computes a causal depthwise convolution along each sequence, followed by SiLU.
KERNEL(causal, (Array y, Array x, Array weight, const u32* sources, i64 rows, int c, int taps)) {
    i64 n = thread_index();
    if (n >= rows * c) return;
    float sum = window(x, weight, sources, n / c, n % c, c, taps);
    store(y, n, sum * sigmoid(sum));
}
/// Computes the gradient with respect to the sums of windows.
KERNEL(causal_sums, (float* d, Array dy, Array x, Array weight, const u32* sources, i64 rows, int c, int taps)) {
    i64 n = thread_index();
    if (n >= rows * c) return;
    float sum = window(x, weight, sources, n / c, n % c, c, taps), s = sigmoid(sum);
    d[n] = load(dy, n) * (s + sum * s * (1 - s));
}
/// Computes the gradient with respect to `x` from that of the sums. `entries[offsets[row]..offsets[row + 1]]` are the places of
/// `sources` that have the row, in the order of addition.
KERNEL(causal_back, (Array dx, const float* d, Array weight, const u32* offsets, const u32* entries, i64 rows, int c, int taps)) {
    i64 n = thread_index();
    if (n >= rows * c) return;
    i64 row = n / c;
    int channel = n % c;
    float sum = 0;
    for (u32 e = offsets[row]; e < offsets[row + 1]; e++) {
        int back = entries[e] % WINDOW;
        if (back < taps) sum += d[(i64)(entries[e] / WINDOW) * c + channel] * load(weight, channel * taps + taps - 1 - back);
    }
    store(dx, n, sum);
}
/// Computes `partial[part, channel · taps + tap]`, the gradient with respect to the weight over the rows of a part.
KERNEL(causal_weight, (float* partial, const float* d, Array x, const u32* sources, i64 rows, int c, int taps, i64 per_part)) {
    int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= c * taps) return;
    int channel = k / taps, back = taps - 1 - k % taps;
    i64 begin = blockIdx.y * per_part, end = begin + per_part < rows ? begin + per_part : rows;
    float sum = 0;
    for (i64 row = begin; row < end; row++) {
        u32 source = sources[row * WINDOW + back];
        if (source != NONE) sum += d[row * c + channel] * load(x, (i64)source * c + channel);
    }
    partial[(i64)blockIdx.y * c * taps + k] = sum;
}

/// Returns `ln(1 + eˣ)`, and writes its derivative to `slope`.
DEVICE float softplus(float x, float& slope) {
    float e = exp_(x < 0 ? x : -x), u = 1 + e;
    slope = (x < 0 ? e : 1.0f) / u;
    // The quotient corrects the rounding of u.
    return (x > 0 ? x : 0.0f) + (u == 1 ? e : log_(u) * (e / (u - 1)));
}
/// Computes `[−exp(a_log) · ln(1 + exp(a + dt_bias)) | sigmoid(b)]` of rows `[a | b]`.
KERNEL(gates, (float* y, Array x, Array a_log, Array dt_bias, i64 rows, int heads)) {
    i64 n = thread_index();
    if (n >= rows * heads) return;
    int head = n % heads;
    i64 at = n / heads * 2 * heads + head;
    float slope;
    y[at] = -exp_(load(a_log, head)) * softplus(load(x, at) + load(dt_bias, head), slope);
    y[at + heads] = sigmoid(load(x, at + heads));
}
/// Computes the gradients with respect to `x` and, of each row, with respect to `a_log`.
KERNEL(gates_back, (float* dx, float* da_log, const float* dy, Array x, const float* y, Array a_log, Array dt_bias, i64 rows, int heads)) {
    i64 n = thread_index();
    if (n >= rows * heads) return;
    int head = n % heads;
    i64 at = n / heads * 2 * heads + head;
    float slope, beta = y[at + heads];
    softplus(load(x, at) + load(dt_bias, head), slope);
    dx[at] = -dy[at] * exp_(load(a_log, head)) * slope;
    dx[at + heads] = dy[at + heads] * beta * (1 - beta);
    da_log[n] = dy[at] * y[at];
}

/// Computes `y = x · rstd · weight · silu(gate)`, with one block for each head of each row.
KERNEL_OF(256, 4, gated_norm, (Array y, float* rstd, Array x, Array gate, Array weight, int dim, float eps)) {
    SHARED(float, red, 32);
    i64 at = (i64)blockIdx.x * dim;
    float squares = 0;
    for (int j = threadIdx.x * 4; j < dim; j += blockDim.x * 4) {
        Four v = load4(x, at + j, at + dim);
        for (int e = 0; e < 4; e++) squares += v.x[e] * v.x[e];
    }
    float r = 1 / sqrt_(block_sum(squares, red) / dim + eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
    for (int j = threadIdx.x * 4; j < dim; j += blockDim.x * 4) {
        Four v = load4(x, at + j, at + dim), g = load4(gate, at + j, at + dim), w = load4(weight, j, dim);
        for (int e = 0; e < 4; e++) v.x[e] *= r * w.x[e] * g.x[e] * sigmoid(g.x[e]);
        store4(y, at + j, at + dim, v);
    }
}
/// Computes the gradients with respect to the output of the norm and to the gate.
KERNEL_OF(256, 4, gated_norm_back, (float* dnormed, Array dgate, Array dy, Array x, Array gate, Array weight, const float* rstd, int dim)) {
    i64 at = (i64)blockIdx.x * dim;
    float r = rstd[blockIdx.x];
    for (int j = threadIdx.x * 4; j < dim; j += blockDim.x * 4) {
        Four v = load4(x, at + j, at + dim), g = load4(gate, at + j, at + dim), w = load4(weight, j, dim), d = load4(dy, at + j, at + dim);
        for (int e = 0; e < 4; e++) {
            float s = sigmoid(g.x[e]), normed = v.x[e] * r * w.x[e];
            v.x[e] = d.x[e] * g.x[e] * s;
            g.x[e] = d.x[e] * normed * s * (1 + g.x[e] * (1 - s));
        }
        store4({(char*)dnormed, 0}, at + j, at + dim, v);
        store4(dgate, at + j, at + dim, g);
    }
}

/// The state with which rows of a completion begin, and where the next one is stored: in all layers, the last inputs of the
/// convolution and the state of the delta rule. A padding row has none, and its result is never read.
struct Continued { const float* from; float* to; };

/// Computes the convolution of `each` rows that continue a sequence. Block `blockIdx.y` has the rows of one completion.
KERNEL(causal_steps, (Array y, Array x, Array weight, const Continued* table, i64 first, int c, int taps, int each)) {
    int channel = blockIdx.x * blockDim.x + threadIdx.x;
    Continued it = table[blockIdx.y];
    if (channel >= c || !it.to) return;
    const float* from = it.from + first;
    float *to = it.to + first, before[WINDOW - 1] = {};
    UNROLL for (int i = 0; i < WINDOW - 1; i++) if (i < taps - 1) before[i] = from[(i64)i * c + channel];
    for (int row = 0; row < each; row++) {
        i64 at = ((i64)blockIdx.y * each + row) * c + channel;
        float own = load(x, at), sum = 0;
        UNROLL for (int i = 0; i < WINDOW - 1; i++) if (i < taps - 1) sum += load(weight, channel * taps + i) * before[i];
        sum += load(weight, channel * taps + taps - 1) * own;
        store(y, at, sum * sigmoid(sum));
        UNROLL for (int i = 0; i < WINDOW - 1; i++) if (i < taps - 1) before[i] = i + 1 < taps - 1 ? before[i + 1 < WINDOW - 1 ? i + 1 : i] : own;
    }
    UNROLL for (int i = 0; i < WINDOW - 1; i++) if (i < taps - 1) to[(i64)i * c + channel] = before[i];
}

/// Heads of the gated delta rule; see delta.cu.
struct Rule { int key_heads, value_heads, dk, dv; };
constexpr float EPS = 1e-6f;
/// A thread of `delta_steps` has one column of the state and every eighth key: at most KEYS of them.
constexpr int COLUMNS = 32, PARTS = 8, KEYS = 32;

/// Moves the states of completions on by `each` rows: `S ← exp(g) S; S ← S + k ⊗ β (v − Sᵀ k); o = Sᵀ q`. A block has 32 columns
/// of the state of a value head in registers, so that it is read and written once.
KERNEL_OF(256, 2, delta_steps, (float* out, Array qkv, const float* gates, const Continued* table, i64 first, Rule r, int each)) {
    SHARED(float, sums, 2 * PARTS * COLUMNS);
    SHARED(float, red, 32);
    Continued it = table[blockIdx.x];
    if (!it.to) return;
    int head = blockIdx.y, own = threadIdx.x % COLUMNS, part = threadIdx.x / COLUMNS, column = blockIdx.z * COLUMNS + own;
    int key_head = head / (r.value_heads / r.key_heads), stride = 2 * r.key_heads * r.dk + r.value_heads * r.dv;
    bool in = column < r.dv;
    i64 place = first + (i64)head * r.dk * r.dv + column;
    float s[KEYS] = {};
    UNROLL for (int i = 0; i < KEYS; i++) if (in && i * PARTS + part < r.dk) s[i] = it.from[place + (i64)(i * PARTS + part) * r.dv];
    for (int row = 0; row < each; row++) {
        i64 n = (i64)blockIdx.x * each + row, q = n * stride + key_head * r.dk, k = q + r.key_heads * r.dk;
        float qq = 0, kk = 0, qk = 0;
        for (int p = threadIdx.x; p < r.dk; p += blockDim.x) {
            float a = load(qkv, q + p), b = load(qkv, k + p);
            qq += a * a, kk += b * b, qk += a * b;
        }
        float of_q = 1 / (sqrt_(block_sum(qq, red) + EPS) * sqrt_((float)r.dk)), of_k = 1 / sqrt_(block_sum(kk, red) + EPS);
        float along = block_sum(qk, red) * of_q * of_k;
        float decay = exp_(gates[n * 2 * r.value_heads + head]), beta = gates[(n * 2 + 1) * r.value_heads + head], sq = 0, sk = 0;
        UNROLL for (int i = 0; i < KEYS; i++) {
            int p = i * PARTS + part;
            if (p < r.dk) sq += load(qkv, q + p) * of_q * s[i], sk += load(qkv, k + p) * of_k * s[i];
        }
        sums[threadIdx.x] = sq, sums[PARTS * COLUMNS + threadIdx.x] = sk;
        sync_block();
        sq = sk = 0;
        UNROLL for (int i = 0; i < PARTS; i++) sq += sums[i * COLUMNS + own], sk += sums[(PARTS + i) * COLUMNS + own];
        float u = in ? beta * (load(qkv, n * stride + 2 * r.key_heads * r.dk + head * r.dv + column) - decay * sk) : 0;
        if (in && part == 0) out[(n * r.value_heads + head) * r.dv + column] = decay * sq + along * u;
        UNROLL for (int i = 0; i < KEYS; i++) {
            int p = i * PARTS + part;
            if (p < r.dk) s[i] = decay * s[i] + load(qkv, k + p) * of_k * u;
        }
        sync_block();
    }
    UNROLL for (int i = 0; i < KEYS; i++) if (in && i * PARTS + part < r.dk) it.to[place + (i64)(i * PARTS + part) * r.dv] = s[i];
}
