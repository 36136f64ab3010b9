// The gated delta rule in chunks of 64 rows, and its gradients. `kernels::recurrent` has the formulas and their source. A pass has a
// step over all chunks, a step from state to state of a sequence, and another one over all chunks:
//
//     T = (I + A)⁻¹    W = T (β ∘ exp(c) ∘ K)    U₀ = T (β ∘ V)                                       solve
//     U = U₀ − W S₀    S₁ = exp(c_C) S₀ + Kᵀ (exp(c_C − c) ∘ U)                                       advance
//     O = exp(c) ∘ (Q S₀) + M U                                                                       outputs
//     ∂U = Mᵀ ∂O + exp(c_C − c) ∘ (K ∂S₁)    ∂S₀ = exp(c_C) ∂S₁ + Qᵀ (exp(c) ∘ ∂O) − Wᵀ ∂U            restart, retreat
//
// Sums of products are in f32. A kernel of name 32 has factors in f32. One of name 16 splits each factor into two bf16 numbers, which
// tensor cores multiply in three products: an error of 2⁻¹⁶ of a factor remains.
#include "prim.cuh"

constexpr int THREADS = 128, CHUNK = 64, SLAB = 32;
/// Numbers of a row of a slab in bf16, of the factors in f32, and of a matrix of a chunk. They put rows into different banks.
constexpr int HALVES = SLAB + 8, LEFT = SLAB + 1, RIGHT = CHUNK + 2, EDGE = CHUNK + 1;
constexpr int SLAB_BYTES = 4 * CHUNK * HALVES * 2, VECTORS = 7;
constexpr float EPS = 1e-6f;
/// Bounds the text that a loop becomes.
#define TIMES _Pragma("unroll LOADS")
#define ONCE _Pragma("unroll 1")
/// Numbers that a thread loads together for a slab. Where one block waits for another step of its own, more of them hide the wait.
constexpr int FEW = 4, MANY = 8;

/// Heads. A row is `[queries | keys | values]`; a key head serves consecutive value heads.
struct Rule { int key_heads, value_heads, dk, dv; };
/// Rows of a chunk. `before` and `after` are the kept states around it; −1 if there is none.
struct Chunk { int first, rows, before, after; };
/// Chunks of a segment, and the part of `nexts` that lists the segments that continue it.
struct Run { int chunk0, chunk1, next0, next1, segment; };

/// A 64×64 tile of sums. Warp w has the rows from 16 w on, and a thread the elements that it has of fragments of tensor cores.
template <bool CORES> struct Sums {
    float x[8][4] = {};
    DEVICE void clear() { UNROLL for (int n = 0; n < 8; n++) UNROLL for (int e = 0; e < 4; e++) x[n][e] = 0; }
    /// Row of element `e` of each fragment.
    DEVICE static int row(int e) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + e / 2 * 8; }
    /// Calls `f(i, j, x)` for each element of this thread.
    template <class F> DEVICE void each(F f) {
        UNROLL for (int n = 0; n < 8; n++) UNROLL for (int e = 0; e < 4; e++) f(row(e), n * 8 + threadIdx.x % 4 * 2 + e % 2, x[n][e]);
    }
    /// Writes the tile to shared memory, which all threads have read.
    DEVICE void put(float* to) {
        sync_block();
        each([&](int i, int j, float x) { to[i * EDGE + j] = x; });
        sync_block();
    }
};
/// Calls `f(i, j)` for each place of a tile, in the order of memory.
template <class F> DEVICE void each_place(F f) {
    ONCE for (int n = threadIdx.x; n < CHUNK * CHUNK; n += THREADS) f(n / CHUNK, n % CHUNK);
}
/// Adds the sums of `f(i, j)` along the rows of a tile to `to[i]`.
template <class T, class F> DEVICE void add_rows(T* to, F f) {
    int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < CHUNK; i += THREADS / 32) {
        float sum = warp_sum(f(i, lane) + f(i, lane + 32));
        if (lane == 0) to[i] += sum;
    }
}
/// Subtracts the sums of the columns of a tile from `from[j]`.
DEVICE void subtract_columns(double* from, const float* tile) {
    sync_block();
    if (threadIdx.x < CHUNK) for (int i = 0; i < CHUNK; i++) from[threadIdx.x] -= tile[i * EDGE + threadIdx.x];
    sync_block();
}
/// Which numbers of a factor are adjacent in memory: the terms of a sum, or the rows (columns) of the result.
enum { TERMS, PLACES };

/// Adds `Σ left(i, p) · right(p, j)` over `p < depth`. The barrier at the start makes visible what the block has stored.
template <int L, int R, int LOADS = FEW, bool CORES, class Left, class Right> DEVICE void add(Sums<CORES>& sums, char* slab, int depth, Left left, Right right) {
    u16 *low = (u16*)slab, *other = low + 2 * CHUNK * HALVES;
    float *a = (float*)slab, *b = a + CHUNK * LEFT;
    int lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16;
    auto split = [](u16* to, float x) {
        u16 high = bf16(x);
        to[0] = high, to[CHUNK * HALVES] = bf16(x - f32(high));
    };
    for (int first = 0; first < depth; first += SLAB) {
        sync_block();
        TIMES for (int n = threadIdx.x; n < CHUNK * SLAB; n += THREADS) {
            int i = L == TERMS ? n / SLAB : n % CHUNK, p = L == TERMS ? n % SLAB : n / CHUNK;
            float x = first + p < depth ? left(i, first + p) : 0.0f;
            if (CORES) split(low + i * HALVES + p, x);
            else a[i * LEFT + p] = x;
        }
        TIMES for (int n = threadIdx.x; n < CHUNK * SLAB; n += THREADS) {
            int j = R == TERMS ? n / SLAB : n % CHUNK, p = R == TERMS ? n % SLAB : n / CHUNK;
            float x = first + p < depth ? right(first + p, j) : 0.0f;
            if (CORES) split(other + j * HALVES + p, x);
            else b[p * RIGHT + j] = x;
        }
        sync_block();
        if (CORES) {
            UNROLL for (int c = 0; c < SLAB; c += 16) {
                u32 high[4], rest[4];
                const u16* from = low + (own + lane % 16) * HALVES + c + lane / 16 * 8;
                load_matrices<false>(high, from);
                load_matrices<false>(rest, from + CHUNK * HALVES);
                UNROLL for (int n = 0; n < 8; n += 2) {
                    u32 bh[4], br[4];
                    from = other + (n * 8 + lane / 16 * 8 + lane % 8) * HALVES + c + lane / 8 % 2 * 8;
                    load_matrices<false>(bh, from);
                    load_matrices<false>(br, from + CHUNK * HALVES);
                    UNROLL for (int h = 0; h < 2; h++) {
                        mma(sums.x[n + h], rest, bh[2 * h], bh[2 * h + 1]);
                        mma(sums.x[n + h], high, br[2 * h], br[2 * h + 1]);
                        mma(sums.x[n + h], high, bh[2 * h], bh[2 * h + 1]);
                    }
                }
            }
        } else {
            ONCE for (int p = 0; p < SLAB; p++) sums.each([&](int i, int j, float& x) { x += a[i * LEFT + p] * b[p * RIGHT + j]; });
        }
    }
}

/// A chunk in one value head.
template <bool CORES> struct Part {
    char *slab, *rest;
    float* rows;
    Array qkv;
    Chunk at;
    Rule r;
    int head, key_head;
    i64 stride;
    DEVICE Part(char* shared, Array qkv, const float* gates, const float* lengths, const float* decays, Chunk at, Rule r, int head)
        : slab(shared), rest(shared + SLAB_BYTES + 4 * VECTORS * CHUNK), rows((float*)(shared + SLAB_BYTES)), qkv(qkv), at(at), r(r), head(head),
          key_head(head / (r.value_heads / r.key_heads)), stride(2 * r.key_heads * r.dk + r.value_heads * r.dv) {
        sync_block();
        for (int n = threadIdx.x; n < VECTORS * CHUNK; n += THREADS) {
            int what = n / CHUNK, i = n % CHUNK;
            i64 row = at.first + i;
            float x = 0;
            if (i < at.rows) {
                if (what < 4) x = decays[(row * r.value_heads + head) * 4 + what];
                else if (what == 4) x = gates[(row * 2 + 1) * r.value_heads + head];
                else x = lengths[(row * 2 + what - 5) * r.key_heads + key_head];
            }
            rows[n] = x;
        }
        sync_block();
    }
    /// Decay from row `s` to row `t`, as one exponential of a difference: it cannot overflow.
    DEVICE float decay(int t, int s) const { return exp_((rows[t] - rows[s]) + (rows[CHUNK + t] - rows[CHUNK + s])); }
    DEVICE float since(int i) const { return rows[2 * CHUNK + i]; }
    DEVICE float until(int i) const { return rows[3 * CHUNK + i]; }
    DEVICE float beta(int i) const { return rows[4 * CHUNK + i]; }
    /// Decay over the chunk.
    DEVICE float whole() const { return since(at.rows - 1); }
    /// Returns a number of the rows, which are bf16 for tensor cores.
    DEVICE float number(i64 at) const { return CORES ? f32(((const u16*)qkv.at)[at]) : ((const float*)qkv.at)[at]; }
    DEVICE void set_number(Array to, i64 at, float x) const {
        if (CORES) ((u16*)to.at)[at] = bf16(x);
        else ((float*)to.at)[at] = x;
    }
    DEVICE float normed(int i, int p, int what) const {
        if (i >= at.rows || p >= r.dk) return 0;
        return number((at.first + i) * stride + (what * r.key_heads + key_head) * r.dk + p) * rows[(5 + what) * CHUNK + i];
    }
    DEVICE float q(int i, int p) const { return normed(i, p, 0); }
    DEVICE float k(int i, int p) const { return normed(i, p, 1); }
    DEVICE i64 value(int i, int j) const { return (at.first + i) * stride + 2 * r.key_heads * r.dk + head * r.dv + j; }
    DEVICE float v(int i, int j) const { return i < at.rows && j < r.dv ? number(value(i, j)) : 0; }
    /// Place of a number in an array `[rows, value_heads, width]`.
    DEVICE i64 place(int i, int j, int width) const { return ((i64)(at.first + i) * r.value_heads + head) * width + j; }
    DEVICE bool has(int i, int j, int width) const { return i < at.rows && j < width; }
    DEVICE float of(const float* x, int i, int j, int width) const { return has(i, j, width) ? x[place(i, j, width)] : 0; }
    DEVICE float of(Array x, int i, int j, int width) const { return has(i, j, width) ? load(x, place(i, j, width)) : 0; }
    /// Place of this head in state `index`.
    DEVICE i64 state(i64 index) const { return (index * r.value_heads + head) * r.dk * r.dv; }
    DEVICE float of_state(const float* s, int p, int j) const { return p < r.dk && j < r.dv ? s[p * r.dv + j] : 0; }
    /// Computes `M`, the decayed products of queries and keys. It is visible after the next barrier.
    DEVICE void pairs(float* m) const {
        Sums<CORES> sums;
        add<TERMS, TERMS>(sums, slab, r.dk, [&](int i, int p) { return q(i, p); }, [&](int p, int j) { return k(j, p); });
        sums.put(m);
        each_place([&](int i, int j) { m[i * EDGE + j] = j <= i && i < at.rows ? decay(i, j) * m[i * EDGE + j] : 0; });
    }
    /// Stores columns `j0..` of rows in an array `[rows, value_heads, width]`, or adds `by` times them.
    DEVICE void store_rows(float* to, Sums<CORES>& sums, int j0, int width, float by = 0) const {
        const float* tile = (float*)slab;
        sums.put((float*)slab);
        each_place([&](int i, int j) {
            if (!has(i, j0 + j, width)) return;
            float& x = to[place(i, j0 + j, width)];
            x = by == 0 ? tile[i * EDGE + j] : x + by * tile[i * EDGE + j];
        });
    }
    /// Stores rows `i0..` and columns `j0..` of a state, plus those of `other` if it is given, decayed over the chunk.
    DEVICE void store_state(float* to, Sums<CORES>& sums, int i0, int j0, const float* other) const {
        const float* tile = (float*)slab;
        sums.put((float*)slab);
        each_place([&](int i, int j) {
            i64 at = (i64)(i0 + i) * r.dv + j0 + j;
            if (i0 + i < r.dk && j0 + j < r.dv) to[at] = tile[i * EDGE + j] + (other ? whole() * other[at] : 0);
        });
    }
    /// Computes `U = U₀ − W S₀` in 64 columns.
    template <int LOADS> DEVICE void subtract_state(float* u, const float* w, const float* s, int j0) const {
        Sums<CORES> sums;
        add<TERMS, PLACES, LOADS>(sums, slab, r.dk, [&](int i, int p) { return of(w, i, p, r.dk); }, [&](int p, int j) { return of_state(s, p, j0 + j); });
        store_rows(u, sums, j0, r.dv, -1);
    }
};

/// Computes the reciprocal lengths of queries, which contain their scale, and of keys: `lengths[row, 2, key head]`. One warp each.
KERNEL_OF(32, 16, lengths, (float* lengths, Array qkv, Rule r)) {
    int what = blockIdx.x % (2 * r.key_heads);
    i64 row = blockIdx.x / (2 * r.key_heads), from = row * (2 * r.key_heads * r.dk + r.value_heads * r.dv) + what * r.dk;
    float sum = 0;
    for (int p = threadIdx.x * 4; p < r.dk; p += 128) {
        Four x = load4(qkv, from + p, from + r.dk);
        for (int e = 0; e < 4; e++) sum += x.x[e] * x.x[e];
    }
    sum = sqrt_(warp_sum(sum) + EPS);
    if (threadIdx.x == 0) lengths[blockIdx.x] = 1 / (what < r.key_heads ? sum * sqrt_((float)r.dk) : sum);
}
/// Computes, of each row in a value head, the sum of the log-decays from the start of its chunk, as two numbers, and the decays from
/// the start of the chunk and to its end. One thread per row.
KERNEL_OF(64, 16, decays, (float* decays, const float* gates, const Chunk* chunks, int heads)) {
    Chunk at = chunks[blockIdx.x];
    double sum = 0, total = 0;
    for (int i = 0; i < at.rows; i++) {
        total += gates[(i64)(at.first + i) * 2 * heads + blockIdx.y];
        if (i == threadIdx.x) sum = total;
    }
    if (threadIdx.x >= at.rows) return;
    float high = (float)sum, *to = decays + ((i64)(at.first + threadIdx.x) * heads + blockIdx.y) * 4;
    to[0] = high, to[1] = (float)(sum - high), to[2] = exp_(high), to[3] = exp_((float)(total - sum));
}

/// Computes `W` and `U₀` of a chunk in a value head, and stores `T [rows, heads, 64]` if the array is given.
template <bool CORES> DEVICE void solve(float* w, float* u, float* inverse, Array qkv, const float* gates, const float* lengths, const float* decays, const Chunk* chunks, Rule r) {
    DYNAMIC_SHARED(shared);
    Part<CORES> c(shared, qkv, gates, lengths, decays, chunks[blockIdx.x], r, blockIdx.y);
    float *a = (float*)c.rest, *t = a + CHUNK * EDGE;
    Sums<CORES> sums;
    add<TERMS, TERMS>(sums, c.slab, r.dk, [&](int i, int p) { return c.k(i, p); }, [&](int p, int j) { return c.k(j, p); });
    sums.put(a);
    each_place([&](int i, int j) { a[i * EDGE + j] = j < i && i < c.at.rows ? c.beta(i) * c.decay(i, j) * a[i * EDGE + j] : 0; });
    sync_block();
    // Sixteen rows at a time: first the part of earlier rows, then one row after the other, with a thread for each column.
    for (int b = 0; b < CHUNK; b += 16) {
        for (int n = threadIdx.x; n < 16 * b; n += THREADS) {
            int i = b + n / b, j = n % b;
            float sum = 0;
            for (int s = j; s < b; s++) sum += a[i * EDGE + s] * t[s * EDGE + j];
            t[i * EDGE + j] = -sum;
        }
        sync_block();
        if (int j = threadIdx.x; j < CHUNK) {
            float own[16];
            UNROLL for (int y = 0; y < 16; y++) {
                own[y] = j < b ? t[(b + y) * EDGE + j] : j == b + y ? 1.0f : 0.0f;
                UNROLL for (int z = 0; z < y; z++) own[y] -= a[(b + y) * EDGE + b + z] * own[z];
            }
            UNROLL for (int y = 0; y < 16; y++) t[(b + y) * EDGE + j] = own[y];
        }
        sync_block();
    }
    auto of_t = [&](int i, int s) { return t[i * EDGE + s]; };
    for (int j0 = 0; j0 < r.dk; j0 += CHUNK) {
        sums.clear();
        add<TERMS, PLACES>(sums, c.slab, CHUNK, of_t, [&](int s, int j) { return c.beta(s) * c.since(s) * c.k(s, j0 + j); });
        c.store_rows(w, sums, j0, r.dk);
    }
    for (int j0 = 0; j0 < r.dv; j0 += CHUNK) {
        sums.clear();
        add<TERMS, PLACES>(sums, c.slab, CHUNK, of_t, [&](int s, int j) { return c.beta(s) * c.v(s, j0 + j); });
        c.store_rows(u, sums, j0, r.dv);
    }
    if (inverse) for (int n = threadIdx.x; n < c.at.rows * CHUNK; n += THREADS) inverse[c.place(n / CHUNK, n % CHUNK, CHUNK)] = t[n / CHUNK * EDGE + n % CHUNK];
}

/// Goes through the chunks of a segment, in 64 columns of a value head: `U` replaces `U₀`, and kept states are stored.
template <bool CORES> DEVICE void advance(float* states, float* u, const float* w, Array qkv, const float* gates, const float* lengths, const float* decays, const Chunk* chunks, const Run* runs, Rule r) {
    DYNAMIC_SHARED(shared);
    Run run = runs[blockIdx.x];
    int j0 = blockIdx.z * CHUNK;
    for (int n = run.chunk0; n < run.chunk1; n++) {
        Part<CORES> c(shared, qkv, gates, lengths, decays, chunks[n], r, blockIdx.y);
        const float* before = states + c.state(c.at.before);
        if (c.at.before >= 0) c.template subtract_state<CORES ? MANY : FEW>(u, w, before, j0);
        if (c.at.after < 0) continue;
        float* after = states + c.state(c.at.after);
        for (int i0 = 0; i0 < r.dk; i0 += CHUNK) {
            Sums<CORES> sums;
            add<PLACES, PLACES, CORES ? MANY : FEW>(sums, c.slab, CHUNK, [&](int i, int t) { return c.until(t) * c.k(t, i0 + i); }, [&](int t, int j) { return c.of(u, t, j0 + j, r.dv); });
            c.store_state(after, sums, i0, j0, c.at.before >= 0 ? before : nullptr);
        }
    }
}

/// Computes the output of a chunk in a value head.
template <bool CORES> DEVICE void outputs(float* out, const float* states, const float* u, Array qkv, const float* gates, const float* lengths, const float* decays, const Chunk* chunks, Rule r) {
    DYNAMIC_SHARED(shared);
    Part<CORES> c(shared, qkv, gates, lengths, decays, chunks[blockIdx.x], r, blockIdx.y);
    float* m = (float*)c.rest;
    c.pairs(m);
    const float* before = states + c.state(c.at.before);
    for (int j0 = 0; j0 < r.dv; j0 += CHUNK) {
        Sums<CORES> sums;
        if (c.at.before >= 0)
            add<TERMS, PLACES>(sums, c.slab, r.dk, [&](int i, int p) { return c.since(i) * c.q(i, p); }, [&](int p, int j) { return c.of_state(before, p, j0 + j); });
        add<TERMS, PLACES>(sums, c.slab, CHUNK, [&](int i, int s) { return m[i * EDGE + s]; }, [&](int s, int j) { return c.of(u, s, j0 + j, r.dv); });
        c.store_rows(out, sums, j0, r.dv);
    }
}

/// Begins the backward pass of a chunk in a value head: `U` replaces `U₀`, and `du` becomes `Mᵀ ∂O`.
template <bool CORES> DEVICE void restart(float* du, float* u, const float* w, const float* states, Array dout, Array qkv, const float* gates, const float* lengths, const float* decays, const Chunk* chunks, Rule r) {
    DYNAMIC_SHARED(shared);
    Part<CORES> c(shared, qkv, gates, lengths, decays, chunks[blockIdx.x], r, blockIdx.y);
    float* m = (float*)c.rest;
    c.pairs(m);
    for (int j0 = 0; j0 < r.dv; j0 += CHUNK) {
        if (c.at.before >= 0) c.template subtract_state<FEW>(u, w, states + c.state(c.at.before), j0);
        Sums<CORES> sums;
        add<PLACES, PLACES>(sums, c.slab, CHUNK, [&](int i, int t) { return m[t * EDGE + i]; }, [&](int t, int j) { return c.of(dout, t, j0 + j, r.dv); });
        c.store_rows(du, sums, j0, r.dv);
    }
}

/// Goes back through the chunks of a segment, in 64 columns of a value head. Completes `du`, stores the gradients of kept states in
/// `dstates`, and that of the state with which the segment starts in `starts [segment]`, if it continues another one.
template <bool CORES> DEVICE void retreat(float* dstates, float* starts, float* du, const float* w, Array dout, Array qkv, const float* gates, const float* lengths, const float* decays, const Chunk* chunks, const Run* runs, const u32* nexts, Rule r) {
    DYNAMIC_SHARED(shared);
    Run run = runs[blockIdx.x];
    int j0 = blockIdx.z * CHUNK, width = r.dv - j0 < CHUNK ? r.dv - j0 : CHUNK;
    for (int n = run.chunk1 - 1; n >= run.chunk0; n--) {
        Part<CORES> c(shared, qkv, gates, lengths, decays, chunks[n], r, blockIdx.y);
        bool reached = c.at.after >= 0;
        float* after = dstates + c.state(c.at.after);
        if (reached && n == run.chunk1 - 1) {
            for (int k = threadIdx.x; k < r.dk * width; k += THREADS) {
                i64 at = (i64)(k / width) * r.dv + j0 + k % width;
                float sum = 0;
                for (int next = run.next0; next < run.next1; next++) sum += starts[c.state(nexts[next]) + at];
                after[at] = sum;
            }
        }
        if (reached) {
            Sums<CORES> sums;
            add<TERMS, PLACES, CORES ? MANY : FEW>(sums, c.slab, r.dk, [&](int i, int p) { return c.until(i) * c.k(i, p); }, [&](int p, int j) { return c.of_state(after, p, j0 + j); });
            c.store_rows(du, sums, j0, r.dv, 1);
        }
        if (c.at.before < 0) continue;
        float* before = n > run.chunk0 ? dstates + c.state(c.at.before) : starts + c.state(run.segment);
        for (int i0 = 0; i0 < r.dk; i0 += CHUNK) {
            Sums<CORES> sums;
            add<PLACES, PLACES, CORES ? MANY : FEW>(sums, c.slab, CHUNK, [&](int i, int t) { return c.since(t) * c.q(t, i0 + i); }, [&](int t, int j) { return c.of(dout, t, j0 + j, r.dv); });
            add<PLACES, PLACES, CORES ? MANY : FEW>(sums, c.slab, CHUNK, [&](int i, int t) { return -c.of(w, t, i0 + i, r.dk); }, [&](int t, int j) { return c.of(du, t, j0 + j, r.dv); });
            c.store_state(before, sums, i0, j0, reached ? after : nullptr);
        }
    }
}

/// Computes the gradients of the values and gates of a chunk, and of its normalised queries and keys in one value head.
/// `R = Tᵀ ∂U` replaces `du`.
template <bool CORES> DEVICE void gradients(Array dqkv, float* dgates, float* dq, float* dk, float* du, const float* u, const float* inverse, const float* states, const float* dstates, Array dout, Array qkv, const float* gates, const float* lengths, const float* decays, const Chunk* chunks, Rule r) {
    DYNAMIC_SHARED(shared);
    Part<CORES> c(shared, qkv, gates, lengths, decays, chunks[blockIdx.x], r, blockIdx.y);
    // Gradients of the running sums of log-decays, their parts that reach the end of the chunk too, and gradients of β.
    double *dsum = (double*)c.rest, *ends = dsum + CHUNK;
    float *dbeta = (float*)(ends + CHUNK), *pm = dbeta + CHUNK, *pn = pm + CHUNK * EDGE, *tile = (float*)c.slab;
    if (threadIdx.x < CHUNK) dsum[threadIdx.x] = ends[threadIdx.x] = dbeta[threadIdx.x] = 0;
    bool starts = c.at.before >= 0, reached = c.at.after >= 0;
    const float *before = states + c.state(c.at.before), *after = dstates + c.state(c.at.after);
    Sums<CORES> sums;
    for (int j0 = 0; j0 < r.dv; j0 += CHUNK) {
        sums.clear();
        add<PLACES, PLACES>(sums, c.slab, CHUNK, [&](int i, int s) { return c.of(inverse, s, i, CHUNK); }, [&](int s, int j) { return c.of(du, s, j0 + j, r.dv); });
        c.store_rows(du, sums, j0, r.dv);
        each_place([&](int i, int j) { if (c.has(i, j0 + j, r.dv)) c.set_number(dqkv, c.value(i, j0 + j), c.beta(i) * tile[i * EDGE + j]); });
        add_rows(dbeta, [&](int i, int j) { return tile[i * EDGE + j] * c.v(i, j0 + j); });
    }
    auto u_of = [&](int p, int s) { return c.of(u, s, p, r.dv); };
    auto k_of = [&](int p, int s) { return c.k(s, p); };
    // ∂M ∘ L, and what it gives the decays.
    sums.clear();
    add<TERMS, TERMS>(sums, c.slab, r.dv, [&](int i, int p) { return c.of(dout, i, p, r.dv); }, u_of);
    sums.put(pm);
    sums.clear();
    add<TERMS, TERMS>(sums, c.slab, r.dk, [&](int i, int p) { return c.q(i, p); }, k_of);
    sums.put(tile);
    add_rows(dsum, [&](int i, int s) {
        int at = i * EDGE + s;
        pm[at] = s <= i && i < c.at.rows ? pm[at] * c.decay(i, s) : 0;
        return tile[at] *= pm[at];
    });
    subtract_columns(dsum, tile);
    // ∂A ∘ L ∘ β, and what it gives β and the decays. The sum with its transpose is kept.
    sums.clear();
    add<TERMS, TERMS>(sums, c.slab, r.dv, [&](int i, int p) { return c.of(du, i, p, r.dv); }, u_of);
    sums.put(pn);
    sums.clear();
    add<TERMS, TERMS>(sums, c.slab, r.dk, [&](int i, int p) { return c.k(i, p); }, k_of);
    sums.put(tile);
    add_rows(dbeta, [&](int i, int s) {
        int at = i * EDGE + s;
        float x = s < i && i < c.at.rows ? -pn[at] * c.decay(i, s) : 0, of_beta = x * tile[at];
        pn[at] = x * c.beta(i), tile[at] = of_beta * c.beta(i);
        return of_beta;
    });
    add_rows(dsum, [&](int i, int s) { return tile[i * EDGE + s]; });
    subtract_columns(dsum, tile);
    each_place([&](int i, int s) { if (s > i) pn[i * EDGE + s] = pn[s * EDGE + i]; });
    for (int j0 = 0; j0 < r.dk; j0 += CHUNK) {
        auto state_of = [&](int p, int j) { return c.of_state(before, j0 + j, p); };
        sums.clear();
        if (starts) {
            add<TERMS, TERMS>(sums, c.slab, r.dv, [&](int i, int p) { return c.since(i) * c.of(dout, i, p, r.dv); }, state_of);
            sums.put(tile);
            add_rows(dsum, [&](int i, int j) { return tile[i * EDGE + j] * c.q(i, j0 + j); });
        }
        add<TERMS, PLACES>(sums, c.slab, CHUNK, [&](int i, int s) { return pm[i * EDGE + s]; }, [&](int s, int j) { return c.k(s, j0 + j); });
        c.store_rows(dq, sums, j0, r.dk);
        sums.clear();
        if (reached) {
            add<TERMS, TERMS>(sums, c.slab, r.dv, [&](int i, int p) { return c.until(i) * c.of(u, i, p, r.dv); }, [&](int p, int j) { return c.of_state(after, j0 + j, p); });
            sums.put(tile);
            add_rows(ends, [&](int i, int j) { return tile[i * EDGE + j] * c.k(i, j0 + j); });
        }
        if (starts) {
            Sums<CORES> own;
            add<TERMS, TERMS>(own, c.slab, r.dv, [&](int i, int p) { return -c.since(i) * c.of(du, i, p, r.dv); }, state_of);
            own.put(tile);
            add_rows(dbeta, [&](int i, int j) { return tile[i * EDGE + j] * c.k(i, j0 + j); });
            add_rows(dsum, [&](int i, int j) { return c.beta(i) * tile[i * EDGE + j] * c.k(i, j0 + j); });
            UNROLL for (int n = 0; n < 8; n++) UNROLL for (int e = 0; e < 4; e++) sums.x[n][e] += c.beta(own.row(e)) * own.x[n][e];
        }
        add<TERMS, PLACES>(sums, c.slab, CHUNK, [&](int i, int s) { return pn[i * EDGE + s]; }, [&](int s, int j) { return c.k(s, j0 + j); });
        add<PLACES, PLACES>(sums, c.slab, CHUNK, [&](int i, int t) { return pm[t * EDGE + i]; }, [&](int t, int j) { return c.q(t, j0 + j); });
        c.store_rows(dk, sums, j0, r.dk);
    }
    SHARED(double, red, 32);
    double inner = 0;
    if (starts && reached) for (int n = threadIdx.x; n < r.dk * r.dv; n += THREADS) inner += (double)before[n] * after[n];
    inner = block_sum(inner, red) * c.whole();
    if (threadIdx.x >= c.at.rows) return;
    // The gradient of a log-decay is the sum over the running sums that contain it.
    double sum = inner;
    for (int i = 0; i < c.at.rows; i++) {
        sum += ends[i];
        if (i >= threadIdx.x) sum += dsum[i] - ends[i];
    }
    i64 to = (i64)(c.at.first + threadIdx.x) * 2 * r.value_heads + c.head;
    dgates[to] = (float)sum, dgates[to + r.value_heads] = dbeta[threadIdx.x];
}

/// Adds the gradients of a query or key over the value heads of its key head, and goes through the normalisation. One block each.
KERNEL_OF(128, 4, finish, (Array dqkv, const float* dq, const float* dk, Array qkv, const float* lengths, Rule r)) {
    SHARED(float, red, 32);
    int what = blockIdx.x / r.key_heads % 2, head = blockIdx.x % r.key_heads, group = r.value_heads / r.key_heads;
    i64 row = blockIdx.x / (2 * r.key_heads), at = row * (2 * r.key_heads * r.dk + r.value_heads * r.dv) + (what * r.key_heads + head) * r.dk;
    const float* from = (what ? dk : dq) + (row * r.value_heads + head * group) * r.dk;
    float length = lengths[blockIdx.x], along = 0;
    auto slope = [&](int p) {
        float sum = 0;
        for (int h = 0; h < group; h++) sum += from[h * r.dk + p];
        return sum;
    };
    for (int p = threadIdx.x; p < r.dk; p += blockDim.x) along += slope(p) * load(qkv, at + p);
    // The length of a query contains 1 / √dk.
    along = block_sum(along, red) * length * length * (what ? 1 : r.dk);
    for (int p = threadIdx.x; p < r.dk; p += blockDim.x) store(dqkv, at + p, length * (slope(p) - load(qkv, at + p) * along));
}

#define OF_FACTORS(BITS) \
    KERNEL_OF(THREADS, 2, solve_##BITS, (float* w, float* u, float* inverse, Array qkv, const float* gates, const float* lengths, const float* decays, const Chunk* chunks, Rule r)) { \
        solve<BITS == 16>(w, u, inverse, qkv, gates, lengths, decays, chunks, r); } \
    KERNEL_OF(THREADS, 2, advance_##BITS, (float* states, float* u, const float* w, Array qkv, const float* gates, const float* lengths, const float* decays, const Chunk* chunks, const Run* runs, Rule r)) { \
        advance<BITS == 16>(states, u, w, qkv, gates, lengths, decays, chunks, runs, r); } \
    KERNEL_OF(THREADS, 2, outputs_##BITS, (float* out, const float* states, const float* u, Array qkv, const float* gates, const float* lengths, const float* decays, const Chunk* chunks, Rule r)) { \
        outputs<BITS == 16>(out, states, u, qkv, gates, lengths, decays, chunks, r); } \
    KERNEL_OF(THREADS, 2, restart_##BITS, (float* du, float* u, const float* w, const float* states, Array dout, Array qkv, const float* gates, const float* lengths, const float* decays, const Chunk* chunks, Rule r)) { \
        restart<BITS == 16>(du, u, w, states, dout, qkv, gates, lengths, decays, chunks, r); } \
    KERNEL_OF(THREADS, 2, retreat_##BITS, (float* dstates, float* starts, float* du, const float* w, Array dout, Array qkv, const float* gates, const float* lengths, const float* decays, const Chunk* chunks, const Run* runs, const u32* nexts, Rule r)) { \
        retreat<BITS == 16>(dstates, starts, du, w, dout, qkv, gates, lengths, decays, chunks, runs, nexts, r); } \
    KERNEL_OF(THREADS, 2, gradients_##BITS, (Array dqkv, float* dgates, float* dq, float* dk, float* du, const float* u, const float* inverse, const float* states, const float* dstates, Array dout, Array qkv, const float* gates, const float* lengths, const float* decays, const Chunk* chunks, Rule r)) { \
        gradients<BITS == 16>(dqkv, dgates, dq, dk, du, u, inverse, states, dstates, dout, qkv, gates, lengths, decays, chunks, r); }
OF_FACTORS(16)
OF_FACTORS(32)
