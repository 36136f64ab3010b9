// Draws a token from each row of logits, with several blocks per row. The steps follow the order of `transformers`:
// repetition penalty, minimum length, temperature, top-k, top-p, min-p. The host supplies the uniform random number.
//
// A block has a segment of its row, `blockIdx.y`. The block of a row that finishes last joins the segments. The number of segments
// depends on the vocabulary alone.
//
// Tokens are ordered by decreasing logit, and tokens with the same logit by id. Nothing is sorted. Each cut of top-k,
// top-p and min-p keeps the first tokens of that order, so only the sum of their weights must be known. One pass over
// the row counts and weighs the tokens in bins of decreasing logits. A position is then found in a bin, and among the
// few tokens of that bin. Weights are integers, so sums do not depend on their order.
#include "prim.cuh"

struct Sampling { float temperature, top_p, min_p, scoring; int top_k; u32 vocab; };
struct Drawn { u32 id; float logp, sampler_logp, entropy; };

constexpr int THREADS = 256, BINS = 2048, LISTED = 512;
/// Number of bins per unit of the logits divided by the temperature. The last bin has all tokens of weight 0.
constexpr float BINS_PER_NAT = 64;

/// The columns of a segment, whose first one is a multiple of four.
struct Segment { u32 begin, end; };
DEVICE Segment segment_of(u32 vocab, u32 segment, u32 segments) {
    u32 each = (vocab + 4 * segments - 1) / (4 * segments) * 4, begin = segment * each;
    return {begin < vocab ? begin : vocab, begin + each < vocab ? begin + each : vocab};
}
/// Applies `f(column, logit)` to a thread's share of the columns, in an order that does not depend on the address. LOADS loads
/// are in flight.
template <u32 LOADS, class F> DEVICE void each_logit(const float* z, Segment of, F f) {
    constexpr u32 STEP = THREADS * 4;
    u32 whole = of.begin + (of.end - of.begin) / 4 * 4;
    // Segments begin at a multiple of four columns.
    bool aligned = (u64)z % 16 == 0;
    for (u32 at = of.begin + threadIdx.x * 4; at < whole; at += LOADS * STEP) {
        Words4 words[LOADS];
        auto from = [&](u32 i) { return z + (at + i * STEP < whole ? at + i * STEP : at); };
        if (aligned) UNROLL for (u32 i = 0; i < LOADS; i++) words[i] = *(const Words4*)from(i);
        else UNROLL for (u32 i = 0; i < LOADS; i++) UNROLL for (u32 e = 0; e < 4; e++) words[i].x[e] = bits(from(i)[e]);
        UNROLL for (u32 i = 0; i < LOADS; i++)
            if (at + i * STEP < whole) UNROLL for (u32 e = 0; e < 4; e++) f(at + i * STEP + e, from_bits(words[i].x[e]));
    }
    if (whole + threadIdx.x < of.end) f(whole + threadIdx.x, z[whole + threadIdx.x]);
}

/// The first index at which a sum reaches a target, and the sum before it.
struct Position { u32 at; u64 before; };
/// Returns the first index below `n` at which the sum of `of(0)`, `of(1)`, … reaches `target`, or the last index. Each
/// thread sums a range; the range that contains the index is then divided again.
template <class F> DEVICE Position search(u32 n, u64 target, u64* runs, F of) {
    SHARED(u64, warps, THREADS / 32);
    u32 first = 0, count = n;
    u64 before = 0;
    for (;;) {
        u32 per = (count + THREADS - 1) / THREADS, begin = threadIdx.x * per, end = begin + per < count ? begin + per : count;
        u64 own = 0;
        for (u32 i = begin; i < end; i++) own += of(first + i);
        runs[threadIdx.x] = own;
        own = warp_sum(own);
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
        sync_block();
        u32 last = (count - 1) / per, warp = 0;
        while (warp < last / 32 && before + warps[warp] < target) before += warps[warp++];
        u32 run = warp * 32;
        while (run < last && before + runs[run] < target) before += runs[run++];
        sync_block();
        first += run * per;
        if (per == 1) return {first, before};
        count = run < last ? per : count - last * per;
    }
}
/// A token, and the sum of the weights up to it in the order.
struct Found { u32 id; u64 mass; };
struct Token { u64 mass; u32 key, id; };
/// A row of logits. A weight is `e^((z − top) / temperature)` in units of 2^−44.
struct Logits {
    const float* z;
    u32 vocab;
    float top, inverse;
    u32* counts;
    u64 *masses, *red, *runs;
    Token* list;

    DEVICE float weight(float x) const { return exp_((x - top) * inverse); }
    DEVICE u64 mass(float x) const { return (u64)(weight(x) * 17592186044416.0f); }
    DEVICE u32 bin(float x) const {
        float at = (top - x) * (inverse * BINS_PER_NAT);
        return at < BINS - 1 ? (u32)at : BINS - 1;
    }
    template <class F> DEVICE u64 total(F of) const {
        u64 sum = 0;
        for (u32 id = threadIdx.x; id < vocab; id += THREADS) sum += of(z[id]);
        return block_sum(sum, red);
    }
    /// Fills the bins with a segment.
    DEVICE void fill_bins(Segment of) const {
        for (u32 i = threadIdx.x; i < BINS; i += THREADS) counts[i] = 0, masses[i] = 0;
        sync_block();
        each_logit<8>(z, of, [&](u32, float x) {
            u32 own = bin(x);
            add_shared(counts + own, 1u);
            add_shared(masses + own, mass(x));
        });
        sync_block();
    }
    /// Returns the sum of the weights in the bins below `end`.
    DEVICE u64 mass_below(u32 end) const {
        u64 sum = 0;
        for (u32 i = threadIdx.x; i < end; i += THREADS) sum += masses[i];
        return block_sum(sum, red);
    }
    /// Finds the first token at which the sum of the weights reaches `target`, or with `by_count` the `target`-th token.
    DEVICE Found find(u64 target, bool by_count) const {
        SHARED(u32, size, 1);
        SHARED(Found, found, 1);
        auto amount = [&](u64 mass) { return by_count ? 1 : mass; };
        Position place = search(BINS, target, runs, [&](u32 i) { return by_count ? counts[i] : masses[i]; });
        u64 before = mass_below(place.at);
        // Tokens of the last bin have no weight, and no such token is ever drawn.
        if (place.at == BINS - 1) return {0, before};
        if (threadIdx.x == 0) size[0] = 0;
        sync_block();
        each_logit<2>(z, {0, vocab}, [&](u32 id, float x) {
            if (bin(x) != place.at) return;
            u32 slot = add_shared(size, 1u);
            if (slot < LISTED) list[slot] = {mass(x), key_of(x), id};
        });
        sync_block();
        if (size[0] > LISTED) return find_slowly(target, by_count);
        for (u32 i = threadIdx.x; i < size[0]; i += THREADS) {
            Token own = list[i];
            u64 sum = place.before, mass = before;
            for (u32 j = 0; j < size[0]; j++) {
                if (list[j].key < own.key || (list[j].key == own.key && list[j].id > own.id)) continue;
                sum += amount(list[j].mass);
                mass += list[j].mass;
            }
            if (sum >= target && sum - amount(own.mass) < target) found[0] = {own.id, mass};
        }
        sync_block();
        Found result = found[0];
        sync_block();
        return result;
    }
    /// Finds the same token without a list, if many tokens are in one bin: the key bit by bit, with one sum per bit.
    DEVICE Found find_slowly(u64 target, bool by_count) const {
        auto amount = [&](float x) { return by_count ? 1 : mass(x); };
        u32 key = 0;
        for (u32 bit = 0x80000000u; bit; bit >>= 1) {
            u32 next = key | bit;
            if (total([&](float x) { return key_of(x) >= next ? amount(x) : 0; }) >= target) key = next;
        }
        u64 above = total([&](float x) { return key_of(x) > key ? amount(x) : 0; });
        u64 heavier = total([&](float x) { return key_of(x) > key ? mass(x) : 0; });
        u64 each = mass(from_bits(key >> 31 ? key & 0x7fffffffu : ~key));
        u64 rank = by_count ? target - above : (target - above + each - 1) / each;
        u32 id = search(vocab, rank, runs, [&](u32 i) { return key_of(z[i]) == key; }).at;
        return {id, heavier + rank * each};
    }
};

/// Statistics of a segment: the largest logit, and with `z` divided by a temperature the largest one `top`, `s = Σ e^(z − top)` and
/// `w = Σ (z − top) e^(z − top)`.
struct Survey { float largest, top, s, w; };
/// Finds the largest logit of each row and, if `lse` is given, the log-sum-exp and the entropy of the logits divided by the scoring
/// temperature.
STEP_KERNEL_OF(256, 4, survey, (float* largest, float* lse, float* entropy, Survey* surveys, u32* counters, const float* logits, u32 vocab, float inverse_temperature)) {
    start_next(), wait_previous();
    SHARED(float, red, 32);
    const float* z = logits + (i64)blockIdx.x * vocab;
    Segment of = segment_of(vocab, blockIdx.y, gridDim.y);
    Survey all = {-INFINITY, -INFINITY, 0, 0};
    each_logit<8>(z, of, [&](u32, float x) { all.largest = larger(all.largest, x); });
    all.largest = block_max(all.largest, red);
    all.top = all.largest * inverse_temperature;
    // Logits of −∞ have no weight, also if a segment has no others.
    float shift = all.top == -INFINITY ? 0 : all.top;
    each_logit<8>(z, of, [&](u32, float logit) {
        float x = logit * inverse_temperature - shift, e = exp_(x);
        all.s += e;
        all.w += x * e;
    });
    all.s = block_sum(all.s, red);
    all.w = block_sum(all.w, red);
    Survey* own = surveys + (i64)blockIdx.x * gridDim.y;
    if (threadIdx.x == 0) own[blockIdx.y] = all;
    if (!finishes_last(counters + blockIdx.x, gridDim.y) || threadIdx.x > 0) return;
    all = {-INFINITY, -INFINITY, 0, 0};
    for (u32 i = 0; i < gridDim.y; i++) {
        Survey next = own[i];
        if (next.top == -INFINITY && next.s == 0) continue;
        float top = larger(all.top, next.top), a = exp_(all.top - top), b = exp_(next.top - top);
        if (all.s == 0 && all.top == -INFINITY) all.top = top, a = 0;
        all.w = a * (all.w + (all.top - top) * all.s) + b * (next.w + (next.top - top) * next.s);
        all.s = a * all.s + b * next.s;
        all.top = top;
        all.largest = larger(all.largest, next.largest);
    }
    largest[blockIdx.x] = all.largest;
    if (!lse) return;
    float log_s = log_(all.s);
    lse[blockIdx.x] = all.top + log_s;
    entropy[blockIdx.x] = log_s - all.w / all.s;
}
/// Divides the positive and multiplies the negative logits of the tokens `ids[offsets[row]..offsets[row + 1]]` by the
/// penalty. These tokens are distinct. Their previous logits are saved in `raw`.
STEP_KERNEL(penalise, (float* logits, float* raw, const u32* offsets, const u32* ids, u32 vocab, float penalty)) {
    start_next(), wait_previous();
    float* z = logits + (i64)blockIdx.x * vocab;
    for (u32 i = offsets[blockIdx.x] + threadIdx.x; i < offsets[blockIdx.x + 1]; i += blockDim.x) {
        float x = raw[i] = z[ids[i]];
        z[ids[i]] = x > 0 ? x / penalty : x * penalty;
    }
}
/// Excludes tokens in the rows that `forbids` marks.
STEP_KERNEL(forbid, (float* logits, const u32* forbids, const u32* ids, int count, u32 vocab)) {
    start_next(), wait_previous();
    if (!forbids[blockIdx.x]) return;
    for (int i = threadIdx.x; i < count; i += blockDim.x) logits[(i64)blockIdx.x * vocab + ids[i]] = -INFINITY;
}
/// Draws tokens. `lse` and `entropy` belong to the scoring temperature, before penalties, and `largest` to the logits after them.
/// `sums` has the weight of each segment. With a cut, `bin_masses` and `bin_counts` have the bins of each segment instead.
STEP_KERNEL_OF(256, 2, draw, (Drawn* out, u32* counters, u64* sums, u64* bin_masses, u32* bin_counts, const float* logits, const float* raw, const u32* offsets, const u32* ids, const double* uniforms, const float* largest, const float* lse, const float* entropy, Sampling p)) {
    start_next(), wait_previous();
    SHARED(u64, red, 32);
    SHARED(u64, runs, THREADS);
    SHARED(u32, counts, BINS);
    SHARED(u64, masses, BINS);
    SHARED(Token, list, LISTED);
    const float* z = logits + (i64)blockIdx.x * p.vocab;
    u32 vocab = p.vocab, segments = gridDim.y, id;
    float top = largest[blockIdx.x];
    // A NaN or +∞ among the logits makes `lse` NaN. Such a row has no token, and neither has one without any weight.
    if (!(lse[blockIdx.x] < INFINITY) || top == -INFINITY) {
        float nan = from_bits(0x7fc00000u);
        if (threadIdx.x == 0 && blockIdx.y == 0) out[blockIdx.x] = {0, nan, nan, nan};
        return;
    }
    bool greedy = p.temperature == 0, truncated = !greedy && (p.top_k > 0 || p.top_p < 1 || p.min_p > 0);
    Logits row = {z, vocab, top, greedy ? 1 : 1 / p.temperature, counts, masses, red, runs, list};
    auto mass_of = [&](float x) -> u64 { return greedy ? x == top : row.mass(x); };
    Segment of = segment_of(vocab, blockIdx.y, segments);
    i64 first = (i64)blockIdx.x * segments, own = first + blockIdx.y;
    if (truncated) {
        row.fill_bins(of);
        for (u32 i = threadIdx.x; i < BINS; i += THREADS) bin_counts[own * BINS + i] = counts[i], bin_masses[own * BINS + i] = masses[i];
    } else {
        u64 sum = 0;
        each_logit<8>(z, of, [&](u32, float x) { sum += mass_of(x); });
        sum = block_sum(sum, red);
        if (threadIdx.x == 0) sums[own] = sum;
    }
    if (!finishes_last(counters + blockIdx.x, segments)) return;
    u64 mass = 0, weight = 1;
    auto target_of = [&](u64 mass) {
        u64 target = (u64)(uniforms[blockIdx.x] * (double)mass) + 1;
        return target > mass ? mass : target;
    };
    if (truncated) {
        for (u32 i = threadIdx.x; i < BINS; i += THREADS) {
            counts[i] = 0, masses[i] = 0;
            for (u32 s = 0; s < segments; s++) counts[i] += bin_counts[(first + s) * BINS + i], masses[i] += bin_masses[(first + s) * BINS + i];
        }
        sync_block();
        mass = row.mass_below(BINS);
        if (p.top_k > 0 && p.top_k < (int)vocab) mass = row.find(p.top_k, true).mass;
        if (p.top_p < 1) {
            double bound = p.top_p * (double)mass;
            u64 target = (u64)bound;
            target += (double)target < bound;
            mass = row.find(target > 1 ? target : 1, false).mass;
        }
        if (p.min_p > 0) {
            u64 kept = row.total([&](float x) { return row.weight(x) >= p.min_p ? row.mass(x) : 0; });
            mass = kept < mass ? kept : mass;
        }
        id = row.find(target_of(mass), false).id;
    } else {
        for (u32 s = 0; s < segments; s++) mass += sums[first + s];
        u64 target = greedy ? 1 : target_of(mass), before = 0;
        u32 s = 0;
        while (s + 1 < segments && before + sums[first + s] < target) before += sums[first + s++];
        of = segment_of(vocab, s, segments);
        id = of.begin + search(of.end - of.begin, target - before, runs, [&](u32 i) { return mass_of(z[of.begin + i]); }).at;
    }
    if (!greedy) weight = row.mass(z[id]);
    if (threadIdx.x == 0) {
        float logit = z[id];
        if (raw) for (u32 i = offsets[blockIdx.x]; i < offsets[blockIdx.x + 1]; i++) if (ids[i] == id) logit = raw[i];
        float sampled = greedy ? 0 : log_((float)((double)weight / (double)mass));
        out[blockIdx.x] = {id, logit / p.scoring - lse[blockIdx.x], sampled, entropy[blockIdx.x]};
    }
}
