// Draws a token from each row of logits, with one block per row. The steps follow the order of `transformers`:
// repetition penalty, minimum length, temperature, top-k, top-p, min-p. The host supplies the uniform random number.
//
// Tokens are ordered by decreasing logit, and tokens with the same logit by id. Nothing is sorted. A position in that
// order is found bit by bit in the key of a logit, with one sum over the row per bit, in a fixed order.
#include "prim.cuh"

struct Sampling { float temperature, top_p, min_p, scoring; int top_k; u32 vocab; };
struct Drawn { u32 id; float logp, sampler_logp, entropy; };
/// The tokens up to a position in the order.
struct Cut { u32 key, id; };

/// Maps floats to unsigned numbers that have the same order.
DEVICE u32 key_of(float x) {
    u32 b = bits(x);
    return b >> 31 ? ~b : b | 0x80000000u;
}
DEVICE bool within(Cut cut, u32 key, u32 id) { return key > cut.key || (key == cut.key && id <= cut.id); }

template <class F> DEVICE double total(const float* z, u32 vocab, double* red, F of) {
    double sum = 0;
    for (u32 id = threadIdx.x; id < vocab; id += blockDim.x) sum += of(z[id], id);
    return block_sum(sum, red);
}
/// Returns the largest key for which the tokens at or above it sum to more than `bound` (with `reach`, to at least
/// `bound`).
template <class F> DEVICE u32 descend(const float* z, u32 vocab, double* red, double bound, bool reach, F of) {
    u32 key = 0;
    for (u32 bit = 0x80000000u; bit; bit >>= 1) {
        u32 next = key | bit;
        double sum = total(z, vocab, red, [&](float x, u32 id) { return key_of(x) >= next ? of(x, id) : 0.0; });
        if (reach ? sum >= bound : sum > bound) key = next;
    }
    return key;
}
/// Returns the id of the `rank`-th token with a certain key that `cut` keeps, or of the last such token.
DEVICE u32 id_of(const float* z, u32 vocab, u32* counts, u32 key, Cut cut, u32 rank) {
    u32 per = (vocab + blockDim.x - 1) / blockDim.x, begin = threadIdx.x * per, end = begin + per < vocab ? begin + per : vocab;
    u32 own = 0, before = 0, all = 0;
    for (u32 id = begin; id < end; id++) own += key_of(z[id]) == key && within(cut, key, id);
    counts[threadIdx.x] = own;
    sync_block();
    for (u32 i = 0; i < blockDim.x; i++) {
        if (i < threadIdx.x) before += counts[i];
        all += counts[i];
    }
    sync_block();
    if (rank >= all) rank = all - 1;
    if (rank >= before && rank < before + own)
        for (u32 id = begin; id < end; id++)
            if (key_of(z[id]) == key && within(cut, key, id) && before++ == rank) counts[0] = id;
    sync_block();
    u32 id = counts[0];
    sync_block();
    return id;
}

/// Divides the positive and multiplies the negative logits of the tokens `ids[offsets[row]..offsets[row + 1]]` by the
/// penalty. These tokens are distinct. Their previous logits are saved in `raw`.
KERNEL(penalise, (float* logits, float* raw, const u32* offsets, const u32* ids, u32 vocab, float penalty)) {
    float* z = logits + (i64)blockIdx.x * vocab;
    for (u32 i = offsets[blockIdx.x] + threadIdx.x; i < offsets[blockIdx.x + 1]; i += blockDim.x) {
        float x = raw[i] = z[ids[i]];
        z[ids[i]] = x > 0 ? x / penalty : x * penalty;
    }
}
/// Excludes tokens in the rows that `forbids` marks.
KERNEL(forbid, (float* logits, const u32* forbids, const u32* ids, int count, u32 vocab)) {
    if (!forbids[blockIdx.x]) return;
    for (int i = threadIdx.x; i < count; i += blockDim.x) logits[(i64)blockIdx.x * vocab + ids[i]] = -INFINITY;
}
/// Draws tokens. `lse` and `entropy` belong to the scoring temperature, before penalties.
KERNEL_OF(256, 2, draw, (Drawn* out, const float* logits, const float* raw, const u32* offsets, const u32* ids, const double* uniforms, const float* lse, const float* entropy, Sampling p)) {
    SHARED(double, red, 32);
    SHARED(float, red32, 32);
    SHARED(u32, counts, 256);
    const float* z = logits + (i64)blockIdx.x * p.vocab;
    u32 vocab = p.vocab, id;
    float top = -INFINITY;
    for (u32 i = threadIdx.x; i < vocab; i += blockDim.x) top = larger(top, z[i]);
    top = block_max(top, red32);
    Cut cut = {0, 0xffffffffu};
    double mass = 1, weight = 1;
    if (p.temperature == 0) {
        id = id_of(z, vocab, counts, key_of(top), cut, 0);
    } else {
        float inverse = 1 / p.temperature;
        auto own = [&](float x) { return (double)exp_((x - top) * inverse); };
        auto kept = [&](float x, u32 i) { return within(cut, key_of(x), i) && own(x) >= p.min_p ? own(x) : 0.0; };
        bool truncated = p.top_k > 0 || p.top_p < 1 || p.min_p > 0;
        if (p.top_k > 0 && p.top_k < (int)vocab) {
            u32 key = descend(z, vocab, red, p.top_k, true, [&](float, u32) { return 1.0; });
            u32 above = (u32)total(z, vocab, red, [&](float x, u32) { return key_of(x) > key ? 1.0 : 0.0; });
            cut = {key, id_of(z, vocab, counts, key, cut, p.top_k - above - 1)};
        }
        float min_p = p.min_p;
        p.min_p = 0;
        if (p.top_p < 1) {
            double bound = p.top_p * total(z, vocab, red, kept);
            u32 key = descend(z, vocab, red, bound, true, kept);
            double above = total(z, vocab, red, [&](float x, u32 i) { return key_of(x) > key ? kept(x, i) : 0.0; });
            double each = own(from_bits(key >> 31 ? key & 0x7fffffffu : ~key)), more = (bound - above) / each;
            u32 rank = more > 1 ? (u32)more - ((double)(u32)more == more) : 0;
            cut = {key, id_of(z, vocab, counts, key, cut, rank)};
        }
        p.min_p = min_p;
        mass = total(z, vocab, red, kept);
        double bound = uniforms[blockIdx.x] * mass;
        if (truncated) {
            u32 key = descend(z, vocab, red, bound, false, kept);
            double above = total(z, vocab, red, [&](float x, u32 i) { return key_of(x) > key ? kept(x, i) : 0.0; });
            double each = own(from_bits(key >> 31 ? key & 0x7fffffffu : ~key));
            id = id_of(z, vocab, counts, key, cut, (u32)((bound - above) / each));
        } else {
            // Search in the order of ids: each thread sums a range of them, then one thread searches the range that
            // contains the bound.
            SHARED(double, runs, 256);
            u32 per = (vocab + blockDim.x - 1) / blockDim.x, begin = threadIdx.x * per;
            double sum = 0;
            for (u32 i = begin; i < begin + per && i < vocab; i++) sum += own(z[i]);
            runs[threadIdx.x] = sum;
            sync_block();
            if (threadIdx.x == 0) {
                double before = 0;
                u32 run = 0, last = 0;
                while (run + 1 < blockDim.x && before + runs[run] <= bound) before += runs[run++];
                for (u32 i = run * per; i < vocab; i++) {
                    if (own(z[i]) == 0) continue;
                    last = i;
                    before += own(z[i]);
                    if (before > bound) break;
                }
                counts[0] = last;
            }
            sync_block();
            id = counts[0];
        }
        weight = own(z[id]);
    }
    if (threadIdx.x == 0) {
        float logit = z[id];
        if (raw) for (u32 i = offsets[blockIdx.x]; i < offsets[blockIdx.x + 1]; i++) if (ids[i] == id) logit = raw[i];
        out[blockIdx.x] = {id, logit / p.scoring - lse[blockIdx.x], p.temperature == 0 ? 0 : log_((float)(weight / mass)), entropy[blockIdx.x]};
    }
}
