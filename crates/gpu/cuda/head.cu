// The output head over chunks of the vocabulary: log-probabilities of targets, entropies, and the gradient with respect
// to the logits.
#include "prim.cuh"

/// State of a row after some chunks: the largest logit `top`, `s = Σ e^(z − top)` and `w = Σ (z − top) e^(z − top)`.
struct Running { float top, s, w; };

/// Adds the columns `first..first + width` of the vocabulary to the state. If target t is among them, its logit is
/// written to `picked[t]`. One block per row.
KERNEL_OF(256, 4, statistics, (Running* running, float* picked, const float* logits, int width, u32 first, float inverse_temperature, const u32* offsets, const u32* tokens)) {
    SHARED(float, red, 32);
    const float* z = logits + (i64)blockIdx.x * width;
    float top = -INFINITY, s = 0, w = 0;
    for (int j = threadIdx.x; j < width; j += blockDim.x) top = larger(top, z[j]);
    top = block_max(top, red) * inverse_temperature;
    for (int j = threadIdx.x; j < width; j += blockDim.x) {
        float x = z[j] * inverse_temperature - top, e = exp_(x);
        s += e;
        w += x * e;
    }
    s = block_sum(s, red);
    w = block_sum(w, red);
    for (u32 t = offsets[blockIdx.x] + threadIdx.x; t < offsets[blockIdx.x + 1]; t += blockDim.x)
        if (tokens[t] >= first && tokens[t] - first < width) picked[t] = z[tokens[t] - first] * inverse_temperature;
    if (threadIdx.x == 0) {
        Running now = {top, s, w};
        if (first > 0) {
            Running old = running[blockIdx.x];
            now.top = larger(old.top, top);
            float a = exp_(old.top - now.top), b = exp_(top - now.top);
            now.s = a * old.s + b * s;
            now.w = a * (old.w + (old.top - now.top) * old.s) + b * (w + (top - now.top) * s);
        }
        running[blockIdx.x] = now;
    }
}
/// Computes `lse` and the entropy after the last chunk, and replaces the picked logits with log-probabilities.
KERNEL(finish, (float* logp, float* entropy, float* lse, const Running* running, const u32* offsets, int rows)) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    Running r = running[row];
    float log_s = log_(r.s);
    lse[row] = r.top + log_s;
    entropy[row] = log_s - r.w / r.s;
    for (u32 t = offsets[row]; t < offsets[row + 1]; t++) logp[t] -= lse[row];
}
/// Computes the gradient with respect to a chunk of logits. One block per row; targets are added one after the other.
KERNEL_OF(256, 4, logit_gradients, (Array to, const float* logits, int width, u32 first, float inverse_temperature, const u32* offsets, const u32* tokens, const float* lse, const float* entropy, const float* dlogp, const float* dentropy)) {
    i64 at = (i64)blockIdx.x * width;
    float total = 0, de = dentropy ? dentropy[blockIdx.x] : 0, own = lse[blockIdx.x], h = entropy[blockIdx.x];
    u32 begin = offsets[blockIdx.x], end = offsets[blockIdx.x + 1];
    for (u32 t = begin; t < end; t++) total += dlogp[t];
    for (int j = threadIdx.x; j < width; j += blockDim.x) {
        float log_p = logits[at + j] * inverse_temperature - own;
        float d = -exp_(log_p) * (total + de * (log_p + h));
        for (u32 t = begin; t < end; t++) if (tokens[t] == first + j) d += dlogp[t];
        store(to, at + j, d * inverse_temperature);
    }
}
