// What translated PTX is written in: types, registers, memory, and the functions that opcodes.py names. It runs on the project's
// emulator (crates/gpu/emu). Compiled with -DHAZARDS, every access to memory is also checked by hazards.cpp.
#pragma once
#include "emu.hpp"
#include <cfenv>
#include <cstdarg>
#include <limits>

namespace ptx {
using s8 = int8_t; using s16 = int16_t; using s32 = int32_t; using s64 = int64_t;
using u8 = uint8_t; using u16 = uint16_t; using u32 = uint32_t; using u64 = uint64_t;
using b8 = u8; using b16 = u16; using b32 = u32; using b64 = u64;
using f32 = float; using f64 = double; using pred = bool;

template <class T> struct wide;
template <> struct wide<s16> { using type = s32; };
template <> struct wide<u16> { using type = u32; };
template <> struct wide<s32> { using type = s64; };
template <> struct wide<u32> { using type = u64; };
template <> struct wide<s64> { using type = __int128; };
template <> struct wide<u64> { using type = unsigned __int128; };
template <class T> using Wide = typename wide<T>::type;

// Registers hold bits. An instruction reads and writes them as numbers of its type. A wider register is truncated when it is
// read, and extended when it is written, by the sign of the type.
template <class T, class R> inline T get(R bits) {
    static_assert(sizeof(T) <= sizeof(R), "the register is too narrow for the type of the instruction");
    if constexpr (sizeof(T) == sizeof(R)) return __builtin_bit_cast(T, bits);
    else return T(bits);
}
template <class R, class T> inline void set(R& to, T value) {
    static_assert(sizeof(T) <= sizeof(R), "the register is too narrow for the type of the instruction");
    if constexpr (sizeof(T) == sizeof(R)) to = __builtin_bit_cast(R, value);
    else to = R(s64(value));
}

/// An address, and the line of the kernel's source that uses it.
struct Address {
    u64 at;
    const char* file;
    int line;
    Address(u64 at, const char* file = __builtin_FILE(), int line = __builtin_LINE()) : at(at), file(file), line(line) {}
};
/// Ends the launch with a message that names block, warp and thread, and the line of an access if it is known.
[[noreturn]] __attribute__((format(printf, 2, 3))) inline void refuse(const Address& where, const char* format, ...) {
    static thread_local char text[400];
    const emu::Dim& block = emu::block->index;
    unsigned thread = emu::self->tid.x;
    size_t used = snprintf(text, sizeof text, "block %u,%u,%u, warp %u, thread %u", block.x, block.y, block.z, thread / 32, thread);
    if (where.line) used += snprintf(text + used, sizeof text - used, ", %s:%d", where.file, where.line);
    used += snprintf(text + used, sizeof text - used, ": ");
    va_list rest;
    va_start(rest, format);
    vsnprintf(text + used, sizeof text - used, format, rest);
    va_end(rest);
    emu::fail(text);
}
/// The place of a failure that is no access.
inline const Address NOWHERE = {0, "", 0};

/// Returns the offset of an array in shared memory, which a kernel numbers from 0 on.
inline u32 shared_offset(uintptr_t number, size_t bytes) {
    char* at = static_cast<char*>(emu::shared_array(reinterpret_cast<const void*>(number), bytes));
    return u32(at - emu::block->shared);
}
enum Space { global, shared, param };
/// How an instruction uses memory. An atomic one reads and writes.
enum Use { reads, writes, atomic };
inline const char* name(Space space) { return space == global ? "global" : space == shared ? "shared" : "parameter"; }
template <Space S> inline char* place(const Address& a) {
    return S == shared ? emu::block->shared + u32(a.at) : reinterpret_cast<char*>(a.at);
}
#ifdef HAZARDS
void check(Space space, const char* at, size_t bytes, Use use, const Address& where);
/// Notes that this thread has counted at `counter`, with release and acquire.
void passed_counter(const void* counter);
void copying(const char* to, size_t bytes);
void committed();
void waited(unsigned newest);
void passed_barrier();
void started_next();
#else
inline void check(Space, const char*, size_t, Use, const Address&) {}
inline void passed_counter(const void*) {}
inline void copying(const char*, size_t) {}
inline void committed() {}
inline void waited(unsigned) {}
inline void passed_barrier() {}
inline void started_next() {}
#endif
template <Space S> inline char* checked(const Address& a, size_t bytes, Use use) {
    char* at = place<S>(a);
    if (S != param && uintptr_t(at) % bytes)
        refuse(a, "%s access of %zu bytes at an address that is not a multiple of %zu", name(S), bytes, bytes);
    if (S != param) check(S, at, bytes, use, a);
    return at;
}
template <Space S, class T, size_t N, class... R> inline void load(const Address& a, R&... to) {
    static_assert(sizeof...(R) == N);
    const char* at = checked<S>(a, sizeof(T) * N, reads);
    auto next = [&] { T value; memcpy(&value, at, sizeof(T)); at += sizeof(T); return value; };
    (set(to, next()), ...);
}
template <Space S, class T, size_t N, class... V> inline void store(const Address& a, V... values) {
    static_assert(sizeof...(V) == N);
    char* at = checked<S>(a, sizeof(T) * N, writes);
    auto put = [&](T value) { memcpy(at, &value, sizeof(T)); at += sizeof(T); };
    (put(values), ...);
}
template <class T, class R> inline void added(const Address& a, T by, R& to) {
    char* at = checked<shared>(a, sizeof(T), atomic);
    T before;
    memcpy(&before, at, sizeof(T));
    set(to, before);
    before += by;
    memcpy(at, &before, sizeof(T));
}
template <class R> inline void counted(const Address& a, u32 last, R& to) {
    char* at = checked<global>(a, sizeof(u32), atomic);
    set(to, count(reinterpret_cast<u32*>(at), last));
    passed_counter(at);
}
inline void copy(const Address& to, const Address& from, u32 bytes) {
    if (bytes != 0 && bytes != 16) refuse(to, "cp.async of %u bytes; 0 and 16 are supported", bytes);
    char* target = checked<shared>(to, 16, writes);
    const char* source = bytes ? checked<global>(from, 16, reads) : nullptr;
    copying(target, 16);
    copy_async(target, source, source);
}
inline void fetch_ahead(const Address& from, u32 bytes) {
    if ((from.at | bytes) % 16) refuse(from, "prefetch of %u bytes: address and bytes must be multiples of 16", bytes);
    for (u32 i = 0; i < bytes; i += 16) check(global, place<global>(from) + i, 16, reads, from);
    prefetch(place<global>(from), bytes);
}
inline void commit() { committed(); emu::commit_copies(); }
inline void wait(unsigned newest) { waited(newest); emu::wait_copies(newest); }
inline void starts_next() { started_next(); }
inline void waits_for_previous() { wait_previous(); }
inline void barrier() { passed_barrier(); emu::wait_block(); }

/// Returns the result of arithmetic. NaN of single precision has all bits set but the sign, whatever NaN came in.
template <class T> inline T canonical(T x) {
    if constexpr (sizeof(T) == 4)
        if (x != x) return get<T>(b32(0x7fffffff));
    return x;
}
template <bool TRANSPOSED> inline void matrices(const Address& row, u32& r0, u32& r1, u32& r2, u32& r3) {
    u32 r[4];
    load_matrices<TRANSPOSED>(r, reinterpret_cast<const u16*>(checked<shared>(row, 16, reads)));
    r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
}
inline void multiply(u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, f32 c0, f32 c1, f32 c2, f32 c3, b32& d0, b32& d1, b32& d2, b32& d3) {
    f32 d[4] = {c0, c1, c2, c3};
    mma(d, {a0, a1, a2, a3}, b0, b1);
    set(d0, canonical(d[0])), set(d1, canonical(d[1])), set(d2, canonical(d[2])), set(d3, canonical(d[3]));
}
inline void exchange(u32 a, u32 mask, u32 clamp, u32 lanes, u32& to, pred& valid) {
    if (lanes != ~u32(0) || clamp != 31 || mask > 31) refuse(NOWHERE, "shfl of lanes %x with clamp %u; only whole warps are supported", lanes, clamp);
    to = shuffle_xor(a, int(mask));
    valid = true;
}

template <class To, class... From> inline To joined(From... parts) {
    static_assert((sizeof(From) + ...) == sizeof(To));
    To whole = 0;
    int shift = 0;
    ((whole |= To(parts) << shift, shift += 8 * sizeof(parts)), ...);
    return whole;
}
template <class Part, class From, class... To> inline void split(From whole, To&... to) {
    static_assert(sizeof(Part) * sizeof...(To) == sizeof(From));
    int at = 0;
    (set(to, Part(whole >> 8 * sizeof(Part) * at++)), ...);
}
/// Returns a quotient. PTX leaves a division by zero undefined; here it ends the launch.
template <class T> inline T divided(T a, T b) {
    if (!b) refuse(NOWHERE, "division of whole numbers by zero");
    return b == T(-1) && std::is_signed_v<T> ? -a : a / b;
}
template <class T> inline T inserted(T a, T b, u32 at, u32 count) {
    constexpr u32 width = 8 * sizeof(T);
    if (at >= width || !count) return b;
    T mask = (count < width ? (T(1) << count) - 1 : ~T(0)) << at;
    return (b & ~mask) | (T(a << at) & mask);
}
/// Returns a value rounded toward zero. A number beyond the range of `T` becomes its end, and NaN as the ISA lists it.
template <class T, class F> inline T truncated(F x) {
    using Range = std::numeric_limits<T>;
    if (x != x) return sizeof(F) == 4 && sizeof(T) < 8 ? T(0) : T(u64(1) << (8 * sizeof(T) - 1));
    // 2 to the number of bits is exact, while the largest number may not be.
    if (x >= std::ldexp(F(1), Range::digits)) return Range::max();
    if (x <= F(Range::min())) return Range::min();
    return T(x);
}
inline f32 flushed(f32 x) { return std::fabs(x) < std::numeric_limits<f32>::min() ? std::copysign(0.0f, x) : x; }
/// Computes under another rounding mode. The compiler must not move the computation out of it.
template <class F> __attribute__((noinline)) auto rounded(int mode, F compute) {
    int before = fegetround();
    fesetround(mode);
    volatile auto result = compute();
    fesetround(before);
    return +result;
}
}  // namespace ptx
