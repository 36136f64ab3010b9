// Elementwise kernels: copies, sums, activations, rotation, dropout, the optimizer. Each thread processes four
// elements.
#include "prim.cuh"

KERNEL(add, (Array to, Array from, i64 n)) {
    i64 i = thread_index() * 4;
    if (i >= n) return;
    Four a = load4(to, i, n), b = load4(from, i, n);
    for (int e = 0; e < 4; e++) a.x[e] += b.x[e];
    store4(to, i, n, a);
}
KERNEL(cast, (Array to, Array from, i64 n)) {
    i64 i = thread_index() * 4;
    if (i < n) store4(to, i, n, load4(from, i, n));
}
KERNEL(scale, (Array x, float by, i64 n)) {
    i64 i = thread_index() * 4;
    if (i >= n) return;
    Four v = load4(x, i, n);
    for (int e = 0; e < 4; e++) v.x[e] *= by;
    store4(x, i, n, v);
}
/// Copies a rectangle of rows from one dtype to another. Row indices are optional (null means 0, 1, 2, …).
KERNEL(copy_rows, (Array to, Array from, const u32* to_rows, const u32* from_rows, i64 rows, int cols, i64 to_stride, i64 from_stride)) {
    i64 i = thread_index(), quads = (cols + 3) / 4;
    if (i >= rows * quads) return;
    i64 row = i / quads, col = i % quads * 4;
    i64 t = (to_rows ? to_rows[row] : row) * to_stride, f = (from_rows ? from_rows[row] : row) * from_stride;
    store4(to, t + col, t + cols, load4(from, f + col, f + cols));
}
/// Computes `y[row] = bias (+ residual[row])` for some columns of rows of `stride` elements.
KERNEL(bias_rows, (Array y, Array bias, Array residual, i64 rows, int cols, i64 stride)) {
    i64 i = thread_index(), quads = (cols + 3) / 4;
    if (i >= rows * quads) return;
    i64 at = i / quads * stride, col = i % quads * 4;
    Four v = load4(bias, col, cols);
    if (residual.at) {
        Four r = load4(residual, at + col, at + cols);
        for (int e = 0; e < 4; e++) v.x[e] += r.x[e];
    }
    store4(y, at + col, at + cols, v);
}

enum { GELU_ERF, GELU_TANH, QUICK_GELU, SILU, TANH };
/// Returns the activation, and writes its derivative to `slope`.
DEVICE float activate(int kind, float x, float& slope) {
    float u = x, du = 1;
    switch (kind) {
        case TANH: { float y = tanh_(x); slope = 1 - y * y; return y; }
        case GELU_ERF: {
            float phi = 0.5f * (1 + erf_(x * 0.70710678f));
            slope = phi + x * exp_(-0.5f * x * x) * 0.39894228f;
            return x * phi;
        }
        case GELU_TANH: u = 1.59576912f * (x + 0.044715f * x * x * x); du = 1.59576912f * (1 + 0.134145f * x * x); break;
        case QUICK_GELU: u = 1.702f * x; du = 1.702f; break;
    }
    float s = sigmoid(u);
    slope = s + x * s * (1 - s) * du;
    return x * s;
}
KERNEL(activation, (Array y, Array x, int kind, i64 n)) {
    i64 i = thread_index() * 4;
    if (i >= n) return;
    Four v = load4(x, i, n);
    float slope;
    for (int e = 0; e < 4; e++) v.x[e] = activate(kind, v.x[e], slope);
    store4(y, i, n, v);
}
/// Replaces `x` with its gradient.
KERNEL(activation_back, (Array x, Array dy, int kind, i64 n)) {
    i64 i = thread_index() * 4;
    if (i >= n) return;
    Four v = load4(x, i, n), d = load4(dy, i, n);
    for (int e = 0; e < 4; e++) {
        float slope;
        activate(kind, v.x[e], slope);
        v.x[e] = d.x[e] * slope;
    }
    store4(x, i, n, v);
}
/// Computes `silu(gate) · up` for rows `[gate | up]`.
KERNEL(swiglu, (Array y, Array gate_up, i64 rows, int inner)) {
    i64 i = thread_index(), quads = (inner + 3) / 4;
    if (i >= rows * quads) return;
    i64 row = i / quads, col = i % quads * 4, at = row * 2 * inner;
    Four g = load4(gate_up, at + col, at + inner), u = load4(gate_up, at + inner + col, at + 2 * inner);
    for (int e = 0; e < 4; e++) g.x[e] *= sigmoid(g.x[e]) * u.x[e];
    store4(y, row * inner + col, (row + 1) * inner, g);
}
/// Replaces `gate_up` with its gradient.
KERNEL(swiglu_back, (Array gate_up, Array dy, i64 rows, int inner)) {
    i64 i = thread_index(), quads = (inner + 3) / 4;
    if (i >= rows * quads) return;
    i64 row = i / quads, col = i % quads * 4, at = row * 2 * inner;
    Four g = load4(gate_up, at + col, at + inner), u = load4(gate_up, at + inner + col, at + 2 * inner);
    Four d = load4(dy, row * inner + col, (row + 1) * inner);
    for (int e = 0; e < 4; e++) {
        float s = sigmoid(g.x[e]), silu = g.x[e] * s;
        g.x[e] = d.x[e] * u.x[e] * s * (1 + g.x[e] * (1 - s));
        u.x[e] = d.x[e] * silu;
    }
    store4(gate_up, at + col, at + inner, g);
    store4(gate_up, at + inner + col, at + 2 * inner, u);
}
/// Computes `y = residual + x · scale` with one scale per column. Without a residual, computes `y = x · scale`.
KERNEL(scale_columns, (Array y, Array x, Array residual, Array scale, i64 rows, int cols)) {
    i64 i = thread_index(), quads = (cols + 3) / 4;
    if (i >= rows * quads) return;
    i64 at = i / quads * cols, col = i % quads * 4;
    Four v = load4(x, at + col, at + cols), s = load4(scale, col, cols), r = {};
    if (residual.at) r = load4(residual, at + col, at + cols);
    for (int e = 0; e < 4; e++) v.x[e] = r.x[e] + v.x[e] * s.x[e];
    store4(y, at + col, at + cols, v);
}
/// Rotates, in place, the first `heads` heads of `2 · half` columns in each row. The elements of a pair are `half`
/// apart.
KERNEL(rotate, (Array x, const float* cosines, const float* sines, i64 rows, int cols, int heads, int half, float sign)) {
    i64 i = thread_index();
    if (i >= rows * heads * half) return;
    i64 row = i / (heads * half);
    int head = i / half % heads, j = i % half;
    float c = cosines[row * half + j], s = sign * sines[row * half + j];
    i64 at = row * cols + head * 2 * half + j;
    float a = load(x, at), b = load(x, at + half);
    store(x, at, a * c - b * s);
    store(x, at + half, b * c + a * s);
}

/// Applies the finaliser of SplitMix64.
DEVICE u64 mixed(u64 x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
/// Zeroes the elements whose random number is below `threshold`, and multiplies the others by `keep`. Two columns share
/// one number, which depends on `key`, the key of the row (without `row_keys`, its index) and the column.
KERNEL(dropout, (Array y, Array x, const u64* row_keys, u64 key, u64 threshold, float keep, i64 rows, int cols)) {
    i64 i = thread_index(), pairs = (cols + 1) / 2;
    if (i >= rows * pairs) return;
    i64 row = i / pairs, pair = i % pairs;
    u64 row_key = mixed(key ^ (row_keys ? row_keys[row] : (u64)row));
    u64 random = mixed(row_key + (u64)pair * 0x9e3779b97f4a7c15ull);
    for (int e = 0; e < 2 && pair * 2 + e < cols; e++) {
        i64 at = row * cols + pair * 2 + e;
        u64 r = e ? random >> 32 : random & 0xffffffffull;
        store(y, at, r < threshold ? 0.0f : load(x, at) * keep);
    }
}

struct AdamW { float lr, beta1, beta2, eps, decay, correction1, correction2, scale; };
/// Applies one AdamW step. A bf16 weight is rounded to nearest even from an f32 master. `rest` stores the difference of
/// the bits: `master = (weight << 16) + rest`. If `rest` is null, the weight itself is the value. 16 bits cannot
/// represent a tie that was rounded down, so the lower neighbour of such a value is stored instead.
KERNEL(adamw, (Array weight, short* rest, float* m, float* v, const float* grad, i64 n, AdamW c)) {
    i64 i = thread_index();
    if (i >= n) return;
    float g = grad[i] * c.scale;
    float mi = m[i] = c.beta1 * m[i] + (1 - c.beta1) * g;
    float vi = v[i] = c.beta2 * v[i] + (1 - c.beta2) * g * g;
    float w = rest ? from_bits((u32(((u16*)weight.at)[i]) << 16) + (u32)(int)rest[i]) : load(weight, i);
    w -= c.lr * c.decay * w;
    w -= c.lr * (mi * c.correction1) / (sqrt_(vi * c.correction2) + c.eps);
    if (rest) {
        u32 whole = bits(w);
        // A tie above an even half rounds down; all other values round up.
        whole -= (whole & 0x1ffffu) == 0x8000u;
        u32 upper = (whole + 0x8000u) >> 16;
        // The NaN of a GPU, 0x7fffffff, would round to a zero.
        if (w != w) upper = 0x7fffu, whole = 0x7fff0000u;
        ((u16*)weight.at)[i] = u16(upper);
        rest[i] = (short)(whole - (upper << 16));
    } else {
        store(weight, i, w);
    }
}
