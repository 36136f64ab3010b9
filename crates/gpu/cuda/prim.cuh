// Primitives of the kernels: bf16 as u16, arrays of either dtype, tensor-core fragments, asynchronous copies. `emu.hpp`
// provides the same names on CPUs.
#pragma once
#ifdef EMULATED
#include "emu.hpp"
typedef uint16_t u16;
typedef uint32_t u32;
typedef int64_t i64;
typedef uint64_t u64;
#else
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
#define KERNEL(name, params) extern "C" __global__ void name params
#define KERNEL_OF(threads, blocks, name, params) extern "C" __global__ void __launch_bounds__(threads, blocks) name params
#define DEVICE __device__ __forceinline__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) char name[]
#define SHARED(type, name, n) __shared__ type name[n]
#define UNROLL _Pragma("unroll")
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
DEVICE void sync_block() { __syncthreads(); }
template <class T> DEVICE T shuffle_xor(T x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEVICE float exp2_(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_(float x) { return __log2f(x); }
DEVICE float exp_(float x) { return expf(x); }
DEVICE float log_(float x) { return logf(x); }
DEVICE float tanh_(float x) { return tanhf(x); }
DEVICE float erf_(float x) { return erff(x); }
DEVICE float sqrt_(float x) { return sqrtf(x); }
DEVICE float f32(u16 x) { return __uint_as_float(u32(x) << 16); }
DEVICE u32 bits(float x) { return __float_as_uint(x); }
DEVICE float from_bits(u32 x) { return __uint_as_float(x); }
DEVICE u32 pack(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DEVICE u16 bf16(float x) { return u16(pack(x, 0.0f)); }
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <bool TRANSPOSED> DEVICE void load_matrices(u32 (&r)[4], const u16* row) {
    u32 at = static_cast<u32>(__cvta_generic_to_shared(row));
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
DEVICE void copy_async(void* to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(static_cast<u32>(__cvta_generic_to_shared(to))), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Increments a counter, which becomes 0 after `last`, and returns its previous value. All that is stored before this
/// call, in the order of barriers, is visible after a later call of any block.
DEVICE u32 count(u32* counter, u32 last) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0,[%1],%2;" : "=r"(before) : "l"(__cvta_generic_to_global(counter)), "r"(last) : "memory");
    return before;
}
/// Adds an integer to one in shared memory atomically, and returns the previous value. Floats are never added this way,
/// because their sum depends on the order.
DEVICE u32 add_shared(u32* at, u32 by) {
    u32 before;
    asm volatile("atom.shared.add.u32 %0,[%1],%2;" : "=r"(before) : "r"(static_cast<u32>(__cvta_generic_to_shared(at))), "r"(by) : "memory");
    return before;
}
DEVICE u64 add_shared(u64* at, u64 by) {
    u64 before;
    asm volatile("atom.shared.add.u64 %0,[%1],%2;" : "=l"(before) : "r"(static_cast<u32>(__cvta_generic_to_shared(at))), "l"(by) : "memory");
    return before;
}
template <int NEWEST> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory"); }
#endif

/// An array of either dtype. `at` is null for an absent array. All threads take the same branch on the dtype.
struct Array { char* at; int bf16; };
struct Four { float x[4]; };
struct alignas(16) Words4 { u32 x[4]; };
struct alignas(8) Words2 { u32 x[2]; };

DEVICE float load(Array a, i64 i) { return a.bf16 ? f32(((const u16*)a.at)[i]) : ((const float*)a.at)[i]; }
DEVICE void store(Array a, i64 i, float v) {
    if (a.bf16) ((u16*)a.at)[i] = bf16(v);
    else ((float*)a.at)[i] = v;
}
/// Loads the elements `i..i + 4`. Elements from `end` on are zeros.
DEVICE Four load4(Array a, i64 i, i64 end) {
    Four v = {};
    u64 at = (u64)a.at + i * (a.bf16 ? 2 : 4);
    if (i + 4 > end || at % (a.bf16 ? 8 : 16)) {
        for (int e = 0; e < 4; e++) if (i + e < end) v.x[e] = load(a, i + e);
    } else if (a.bf16) {
        Words2 w = *(const Words2*)at;
        for (int e = 0; e < 4; e++) v.x[e] = f32(u16(w.x[e / 2] >> 16 * (e % 2)));
    } else {
        Words4 w = *(const Words4*)at;
        for (int e = 0; e < 4; e++) v.x[e] = from_bits(w.x[e]);
    }
    return v;
}
DEVICE void store4(Array a, i64 i, i64 end, Four v) {
    u64 at = (u64)a.at + i * (a.bf16 ? 2 : 4);
    if (i + 4 > end || at % (a.bf16 ? 8 : 16)) {
        for (int e = 0; e < 4; e++) if (i + e < end) store(a, i + e, v.x[e]);
    } else if (a.bf16) {
        *(Words2*)at = {{pack(v.x[0], v.x[1]), pack(v.x[2], v.x[3])}};
    } else {
        *(Words4*)at = {{bits(v.x[0]), bits(v.x[1]), bits(v.x[2]), bits(v.x[3])}};
    }
}
DEVICE i64 thread_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE float larger(float a, float b) { return a > b ? a : b; }
DEVICE float sigmoid(float x) { return 1 / (1 + exp_(-x)); }
/// Maps floats to unsigned numbers that have the same order.
DEVICE u32 key_of(float x) {
    u32 b = bits(x);
    return b >> 31 ? ~b : b | 0x80000000u;
}
/// A weight of 8 or 4 bits, in the layout that `widen` in linear.cu describes.
struct Codes { const u32* codes; const u32* scales; int bits, row_words, row_groups, none; };
/// Returns element `p` of a row: `code · step + min`.
DEVICE float widened(Codes c, i64 row, int p) {
    int per_word = 32 / c.bits, block = 16 * per_word, q = p % block;
    u32 word = c.codes[row * c.row_words + p / block * 16 + q % 16];
    u32 code = word >> q / 16 * c.bits & ((1u << c.bits) - 1);
    u32 scale = c.scales[row * c.row_groups + p / 64];
    return (float)code * f32(u16(scale >> 16)) + f32(u16(scale));
}

DEVICE float quad_max(float x) {
    x = larger(x, shuffle_xor(x, 1));
    return larger(x, shuffle_xor(x, 2));
}
DEVICE float quad_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}
template <class T> DEVICE T warp_sum(T x) {
    for (int mask = 16; mask; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}
/// Returns the sum over the block, with the same bits in every thread. `red` has 32 elements. Blocks must consist of
/// full warps.
template <class T> DEVICE T block_sum(T x, T* red) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = x;
    sync_block();
    T sum = 0;
    for (u32 w = 0; w < blockDim.x / 32; w++) sum += red[w];
    sync_block();
    return sum;
}
/// Counts this block among `blocks` that have stored parts of one result. Returns true in the block that is counted last:
/// it can read all parts. The counter is 0 before and after. It has no influence on numbers, because parts are added in
/// a fixed order.
DEVICE bool finishes_last(u32* counter, u32 blocks) {
    SHARED(u32, last, 1);
    sync_block();
    if (blocks == 1) return true;
    if (threadIdx.x == 0) last[0] = count(counter, blocks - 1) == blocks - 1;
    sync_block();
    return last[0];
}
DEVICE float block_max(float x, float* red) {
    for (int mask = 16; mask; mask /= 2) x = larger(x, shuffle_xor(x, mask));
    if (threadIdx.x % 32 == 0) red[threadIdx.x / 32] = x;
    sync_block();
    float top = red[0];
    for (u32 w = 1; w < blockDim.x / 32; w++) top = larger(top, red[w]);
    sync_block();
    return top;
}
