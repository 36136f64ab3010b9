// RMS norm and layer norm, with one block of threads per row. Gradients with respect to weights are column sums (see
// sums.cu).
#include "prim.cuh"

/// Computes `y = x · rstd · weight`.
STEP_KERNEL_OF(256, 4, rms, (Array y, float* rstd, Array x, Array weight, int dim, float eps)) {
    start_next(), wait_previous();
    SHARED(float, red, 32);
    i64 at = (i64)blockIdx.x * dim;
    float squares = 0;
    for (int j = threadIdx.x * 4; j < dim; j += blockDim.x * 4) {
        Four v = load4(x, at + j, at + dim);
        for (int e = 0; e < 4; e++) squares += v.x[e] * v.x[e];
    }
    float r = rms_factor(block_sum(squares, red), dim, eps);
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
    for (int j = threadIdx.x * 4; j < dim; j += blockDim.x * 4) {
        Four v = load4(x, at + j, at + dim), w = load4(weight, j, dim);
        for (int e = 0; e < 4; e++) v.x[e] *= r * w.x[e];
        store4(y, at + j, at + dim, v);
    }
}
/// Computes `y = (x − mean) · rstd · weight + bias`. `stats` has all means, followed by all reciprocal standard
/// deviations.
STEP_KERNEL_OF(256, 4, layer, (Array y, float* stats, Array x, Array weight, Array bias, int dim, float eps)) {
    start_next(), wait_previous();
    SHARED(float, red, 32);
    i64 at = (i64)blockIdx.x * dim;
    float sum = 0, squares = 0;
    for (int j = threadIdx.x * 4; j < dim; j += blockDim.x * 4) {
        Four v = load4(x, at + j, at + dim);
        for (int e = 0; e < 4; e++) sum += v.x[e];
    }
    float mean = block_sum(sum, red) / dim;
    for (int j = threadIdx.x * 4; j < dim; j += blockDim.x * 4) {
        Four v = load4(x, at + j, at + dim);
        for (int e = 0; e < 4 && j + e < dim; e++) squares += (v.x[e] - mean) * (v.x[e] - mean);
    }
    float r = 1 / sqrt_(block_sum(squares, red) / dim + eps);
    if (threadIdx.x == 0) {
        stats[blockIdx.x] = mean;
        stats[gridDim.x + blockIdx.x] = r;
    }
    for (int j = threadIdx.x * 4; j < dim; j += blockDim.x * 4) {
        Four v = load4(x, at + j, at + dim), w = load4(weight, j, dim), b = load4(bias, j, dim);
        for (int e = 0; e < 4; e++) v.x[e] = (v.x[e] - mean) * r * w.x[e] + b.x[e];
        store4(y, at + j, at + dim, v);
    }
}
/// Adds the gradient with respect to the input to `dx`, and writes the sum to `low`, too, if it is given.
KERNEL_OF(256, 4, rms_back, (Array dx, Array low, Array dy, Array x, const float* rstd, Array weight, int dim)) {
    SHARED(float, red, 32);
    i64 at = (i64)blockIdx.x * dim;
    float dot = 0, r = rstd[blockIdx.x];
    for (int j = threadIdx.x * 4; j < dim; j += blockDim.x * 4) {
        Four v = load4(x, at + j, at + dim), d = load4(dy, at + j, at + dim), w = load4(weight, j, dim);
        for (int e = 0; e < 4; e++) dot += d.x[e] * w.x[e] * v.x[e];
    }
    dot = block_sum(dot, red) * r * r / dim;
    for (int j = threadIdx.x * 4; j < dim; j += blockDim.x * 4) {
        Four v = load4(x, at + j, at + dim), d = load4(dy, at + j, at + dim), w = load4(weight, j, dim), to = load4(dx, at + j, at + dim);
        for (int e = 0; e < 4; e++) to.x[e] += r * (d.x[e] * w.x[e] - v.x[e] * dot);
        store4(dx, at + j, at + dim, to);
        if (low.at) store4(low, at + j, at + dim, to);
    }
}
KERNEL_OF(256, 4, layer_back, (Array dx, Array low, Array dy, Array x, const float* stats, Array weight, int dim)) {
    SHARED(float, red, 32);
    i64 at = (i64)blockIdx.x * dim;
    float sum = 0, dot = 0, mean = stats[blockIdx.x], r = stats[gridDim.x + blockIdx.x];
    for (int j = threadIdx.x * 4; j < dim; j += blockDim.x * 4) {
        Four v = load4(x, at + j, at + dim), d = load4(dy, at + j, at + dim), w = load4(weight, j, dim);
        for (int e = 0; e < 4; e++) {
            sum += d.x[e] * w.x[e];
            dot += d.x[e] * w.x[e] * (v.x[e] - mean) * r;
        }
    }
    sum = block_sum(sum, red) / dim;
    dot = block_sum(dot, red) / dim;
    for (int j = threadIdx.x * 4; j < dim; j += blockDim.x * 4) {
        Four v = load4(x, at + j, at + dim), d = load4(dy, at + j, at + dim), w = load4(weight, j, dim), to = load4(dx, at + j, at + dim);
        for (int e = 0; e < 4; e++) to.x[e] += r * (d.x[e] * w.x[e] - sum - (v.x[e] - mean) * r * dot);
        store4(dx, at + j, at + dim, to);
        if (low.at) store4(low, at + j, at + dim, to);
    }
}
