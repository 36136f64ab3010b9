// Runs CUDA C++ on the CPU, for tests, with one fiber per thread and one block after the other. A seed determines the
// order of the blocks, which warp runs, and how far ahead of the others. Shared memory starts as NaN. Asynchronous copies arrive immediately, or
// when a thread waits for them. A missing barrier or wait therefore changes results from seed to seed. Only `prim.cuh`
// includes this file.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace emu {

struct Dim { unsigned x = 1, y = 1, z = 1; };
struct Copy { void* to; const void* from; int bytes; };

struct Fiber {
    void* sp = nullptr;
    Dim tid;
    unsigned lane = 0, warp = 0, parity = 0;
    bool waited = false;  // for the kernels before
    enum { ready, at_block, at_warp, done } state = ready;
    std::vector<std::vector<Copy>> groups;  // of asynchronous copies, oldest first
    std::vector<Copy> open;
};
/// Values that the lanes of a warp exchange. There are two slots, so the last exchange stays readable during the next
/// exchange of a fast lane.
struct Warp {
    unsigned size = 0, alive = 0, waiting = 0;
    const void* meeting = nullptr;  // the operation at which the lanes wait for each other
    alignas(64) unsigned char slot[2][32][64];
    alignas(64) float tile[2][16][8];
};

struct Block {
    Dim grid, dim, index;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<std::pair<const void*, size_t>> arrays;  // of shared memory, by place in the text
    unsigned alive = 0, waiting = 0;
    char *shared = nullptr, *arena = nullptr;  // memory that the launch asked for, and room for arrays of the text
    size_t shared_bytes = 0, arena_used = 0;
    void* home = nullptr;  // stack of the scheduler
    void (*body)(void**) = nullptr;
    void** args = nullptr;
    const char* failure = nullptr;
};
constexpr size_t ARENA = 48 << 10;
extern thread_local Block* block;
extern thread_local Fiber* self;

void wait_block();
/// Waits for the other lanes of the warp, all at the operation `what`. The last lane calls `last(warp, parity)`.
void wait_warp(const void* what, void (*last)(Warp&, unsigned) = nullptr);
void wait_copies(unsigned newest);
void copy(Copy what);
void commit_copies();
void* shared_array(const void* place, size_t bytes);
/// Ends the launch with a message.
[[noreturn]] void fail(const char* why);

/// Publishes `value` of this lane. Returns the values of all lanes, which stay valid until the exchange after the next.
template <class T> inline const unsigned char (*exchange(const T& value, void (*last)(Warp&, unsigned) = nullptr))[64] {
    static_assert(sizeof(T) <= 64);
    static const char place = 0;
    Warp& warp = block->warps[self->warp];
    unsigned parity = self->parity ^= 1;
    memcpy(warp.slot[parity][self->lane], &value, sizeof(T));
    wait_warp(last ? (const void*)last : &place, last);
    return warp.slot[parity];
}
template <class T> inline T of_lane(const unsigned char (*slots)[64], unsigned lane) {
    T value;
    memcpy(&value, slots[lane], sizeof(T));
    return value;
}
void multiply(Warp& warp, unsigned parity);

/// A kernel, and its entry point, which takes the argument array of cuLaunchKernel.
struct Kernel {
    const char *file, *name;
    void (*run)(void**);
    std::vector<size_t> sizes;
    unsigned max_threads;
    Kernel* next;
};
extern Kernel* kernels;
/// Functions of a library that checks more than the emulator does (tools/gpu/ptx).
struct Observer {
    /// `early` is true if kernels before this one may still run.
    void (*launch_begins)(bool early);
    void (*launch_ends)();
    void (*block_begins)();
    /// Takes note of a row of a matrix that a product reads or writes. Returns null, or an error.
    const char* (*product_row)(const void* at, size_t bytes, bool writes);
};
extern const Observer* observer;
template <auto F> struct Entry;
template <class... A, void (*F)(A...)> struct Entry<F> {
    template <size_t... I> static void call(void** args, std::index_sequence<I...>) {
        F(*static_cast<std::remove_reference_t<A>*>(args[I])...);
    }
    static void run(void** args) { call(args, std::index_sequence_for<A...>{}); }
    static std::vector<size_t> sizes() { return {sizeof(A)...}; }
};
struct Register {
    Kernel kernel;
    Register(const char* file, const char* name, void (*run)(void**), std::vector<size_t> sizes, unsigned threads)
        : kernel{file, name, run, std::move(sizes), threads, kernels} { kernels = &kernel; }
};

}  // namespace emu

// The build defines KERNEL_FILE, the name of the file without its extension.
#define KERNEL(name, params) KERNEL_OF(1024, 1, name, params)
#define KERNEL_OF(threads, blocks, name, params) \
    static void name params; \
    static emu::Register name##_entry(KERNEL_FILE, #name, emu::Entry<name>::run, emu::Entry<name>::sizes(), threads); \
    static void name params
#define STEP_KERNEL(name, params) KERNEL(name, params)
#define STEP_KERNEL_OF(threads, blocks, name, params) KERNEL_OF(threads, blocks, name, params)
#define DEVICE inline
#define DYNAMIC_SHARED(name) char* name = emu::block->shared
#define SHARED(type, name, n) \
    static const char name##_place = 0; \
    type* name = static_cast<type*>(emu::shared_array(&name##_place, sizeof(type) * (n)))
#define threadIdx (emu::self->tid)
#define blockIdx (emu::block->index)
#define blockDim (emu::block->dim)
#define gridDim (emu::block->grid)
#define UNROLL

inline void sync_block() { emu::wait_block(); }
// Kernels run one after the other, so there is nothing to wait for. A launch that starts early fails if a thread does not wait.
inline void start_next() {}
inline void wait_previous() { emu::self->waited = true; }
template <class T> inline T shuffle_xor(T x, int mask) {
    return emu::of_lane<T>(emu::exchange(x), emu::self->lane ^ unsigned(mask));
}
inline float exp2_(float x) { return std::exp2(x); }
inline float log2_(float x) { return std::log2(x); }
inline float exp_(float x) { return std::exp(x); }
inline float log_(float x) { return std::log(x); }
inline float tanh_(float x) { return std::tanh(x); }
inline float erf_(float x) { return std::erf(x); }
inline float sqrt_(float x) { return std::sqrt(x); }
inline float rounded_product(float a, float b) { return a * b; }
inline float fma_(float a, float b, float c) { return std::fma(a, b, c); }
inline float max_(float a, float b) { return std::fmax(a, b); }
inline float f32(uint16_t x) { uint32_t u = uint32_t(x) << 16; float f; memcpy(&f, &u, 4); return f; }
inline uint32_t bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
inline float from_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
inline uint16_t bf16(float f) {
    uint32_t u = bits(f);
    if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(0x7fff);
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline uint32_t pack(float lo, float hi) { return bf16(lo) | uint32_t(bf16(hi)) << 16; }
/// Computes `d[16×8] += a[16×16] · b[16×8]`, with the fragments of mma.sync.m16n8k16.row.col.
inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Fragments { uint32_t a[4], b[2]; } own{{a[0], a[1], a[2], a[3]}, {b0, b1}};
    emu::exchange(own, emu::multiply);
    const auto& tile = emu::block->warps[emu::self->warp].tile[emu::self->parity];
    unsigned g = emu::self->lane / 4, t = emu::self->lane % 4;
    for (unsigned e = 0; e < 4; e++) d[e] += tile[g + e / 2 * 8][2 * t + e % 2];
}
template <bool TRANSPOSED> inline void load_matrices(uint32_t (&r)[4], const uint16_t* row) {
    if (uintptr_t(row) % 16) emu::fail("ldmatrix: a row that does not begin at a multiple of 16 bytes");
    static const char place = 0;
    auto slots = emu::exchange(row);
    unsigned g = emu::self->lane / 4, t = emu::self->lane % 4;
    for (unsigned m = 0; m < 4; m++) {
        uint16_t x[2];
        for (unsigned i = 0; i < 2; i++)
            x[i] = TRANSPOSED ? emu::of_lane<const uint16_t*>(slots, m * 8 + 2 * t + i)[g]
                              : emu::of_lane<const uint16_t*>(slots, m * 8 + g)[2 * t + i];
        r[m] = x[0] | uint32_t(x[1]) << 16;
    }
    // The instruction reads all lanes together. Without this wait, a fast lane could overwrite data that a slow lane
    // has not read yet.
    emu::wait_warp(&place);
}
inline void copy_async(void* to, const void* from, bool valid) {
    if ((uintptr_t(to) | uintptr_t(from)) % 16) emu::fail("cp.async: an address that is no multiple of 16 bytes");
    emu::copy({to, valid ? from : nullptr, 16});
}
inline void prefetch(const void* from, uint32_t bytes) {
    if ((uintptr_t(from) | bytes) % 16) emu::fail("a prefetch: address or bytes are no multiple of 16");
    // Memory beyond an array is not readable.
    for (uint32_t i = 0; i < bytes; i += 16) (void)*((const volatile char*)from + i);
}
inline void commit_copies() { emu::commit_copies(); }
template <int NEWEST> inline void wait_copies() { emu::wait_copies(NEWEST); }
inline uint32_t count(uint32_t* counter, uint32_t last) {
    uint32_t before = *counter;
    *counter = before >= last ? 0 : before + 1;
    return before;
}
template <class T> inline T add_shared(T* at, T by) {
    T before = *at;
    *at += by;
    return before;
}
