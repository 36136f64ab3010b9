// The scheduler of the emulator; see emu.hpp.
#include "emu.hpp"
#include <algorithm>
#include <sys/mman.h>

namespace emu {
thread_local Block* block;
thread_local Fiber* self;
Kernel* kernels;
const Observer* observer;
static thread_local uint64_t most_blocks = ~uint64_t(0);
static thread_local bool early;
static constexpr size_t STACK = 128 << 10;
/// The stacks begin at different places of the caches: at one place, the threads of a block would evict each other.
static constexpr size_t APART = 576, PLACES = 100;

extern "C" void emu_switch(void** save, void* load);
#if defined(__x86_64__)
asm(".globl emu_switch\nemu_switch:\npush %rbx\npush %rbp\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\npop %r15\npop %r14\npop %r13\npop %r12\npop %rbp\npop %rbx\nret\n");
static void* first_frame(char* top, void (*entry)()) {
    void** sp = reinterpret_cast<void**>(uintptr_t(top) & ~uintptr_t(15));
    *--sp = nullptr;  // a return address that is never used; keeps the stack aligned as after a call
    *--sp = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    return sp;
}
#elif defined(__aarch64__)
asm(".globl emu_switch\nemu_switch:\nsub sp,sp,#160\nstp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\n"
    "stp x25,x26,[sp,#48]\nstp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\nstp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\n"
    "stp d12,d13,[sp,#128]\nstp d14,d15,[sp,#144]\nmov x2,sp\nstr x2,[x0]\nmov sp,x1\nldp x19,x20,[sp]\n"
    "ldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\nldp x27,x28,[sp,#64]\nldp x29,x30,[sp,#80]\n"
    "ldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\nldp d12,d13,[sp,#128]\nldp d14,d15,[sp,#144]\nadd sp,sp,#160\nret\n");
static void* first_frame(char* top, void (*entry)()) {
    char* sp = reinterpret_cast<char*>(uintptr_t(top) & ~uintptr_t(15)) - 160;
    memset(sp, 0, 160);
    *reinterpret_cast<void (**)()>(sp + 88) = entry;
    return sp;
}
#endif


static void leave() { emu_switch(&self->sp, block->home); }
static void start() {
    block->body(block->args);
    if (early && !self->waited) fail("a kernel that starts early has ended without waiting for those before it");
    self->state = Fiber::done;
    leave();
    abort();
}
void fail(const char* why) {
    if (!block->failure) block->failure = why;
    self->state = Fiber::done;
    leave();
    abort();
}
static void release_block() {
    for (Fiber& f : block->fibers) if (f.state == Fiber::at_block) f.state = Fiber::ready;
    block->waiting = 0;
}
void wait_block() {
    self->state = Fiber::at_block;
    if (++block->waiting == block->alive) release_block();
    leave();
}
void wait_warp(const void* what, void (*last)(Warp&, unsigned)) {
    Warp& warp = block->warps[self->warp];
    if (warp.alive != warp.size) fail("an operation of a whole warp after some of its threads have ended");
    if (!warp.waiting) warp.meeting = what;
    if (warp.meeting != what) fail("threads of a warp are at different operations");
    self->state = Fiber::at_warp;
    if (++warp.waiting == warp.alive) {
        if (last) last(warp, self->parity);
        for (Fiber* f = &block->fibers[self->warp * 32], *end = f + warp.size; f < end; f++) if (f->state == Fiber::at_warp) f->state = Fiber::ready;
        warp.waiting = 0;
    }
    leave();
}
/// Computes `tile = a · b` from the fragments of all lanes.
void multiply(Warp& warp, unsigned parity) {
    float a[16][16], b[16][8];
    for (unsigned lane = 0; lane < 32; lane++) {
        unsigned g = lane / 4, t = lane % 4;
        uint16_t x[12];
        memcpy(x, warp.slot[parity][lane], 24);
        for (unsigned i = 0; i < 8; i++) a[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = f32(x[i]);
        for (unsigned i = 0; i < 4; i++) b[2 * t + i % 2 + i / 2 * 8][g] = f32(x[8 + i]);
    }
    auto& tile = warp.tile[parity];
    memset(tile, 0, sizeof tile);
    for (unsigned i = 0; i < 16; i++) for (unsigned k = 0; k < 16; k++) for (unsigned j = 0; j < 8; j++) tile[i][j] += a[i][k] * b[k][j];
}
void* shared_array(const void* place, size_t bytes) {
    for (auto& [known, at] : block->arrays) if (known == place) return block->arena + at;
    size_t at = block->arena_used;
    block->arena_used += (bytes + 15) & ~size_t(15);
    if (block->arena_used > ARENA) fail("more than 48 KiB of static shared memory");
    block->arrays.emplace_back(place, at);
    return block->arena + at;
}

static thread_local uint64_t state;
static uint64_t random() { state ^= state << 13; state ^= state >> 7; return state ^= state << 17; }
/// Returns a random number below `n`, without a division.
static size_t below(size_t n) { return (random() >> 32) * n >> 32; }
static void arrive(const Copy& c) { c.from ? (void)memcpy(c.to, c.from, c.bytes) : (void)memset(c.to, 0, c.bytes); }
void copy(Copy what) {
    if (state && random() % 2) arrive(what);
    else self->open.push_back(what);
}
void commit_copies() {
    self->groups.push_back(std::move(self->open));
    self->open.clear();
}
void wait_copies(unsigned newest) {
    auto& groups = self->groups;
    while (groups.size() > newest) {
        for (const Copy& c : groups.front()) arrive(c);
        groups.erase(groups.begin());
    }
}

/// Stacks of the fibers of a host thread, kept for its next launch.
struct Stacks {
    char* at = nullptr;
    size_t bytes = 0;
    char* take(size_t want) {
        if (bytes < want) {
            if (at) munmap(at, bytes);
            void* p = mmap(nullptr, want, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            at = p == MAP_FAILED ? nullptr : static_cast<char*>(p);
            bytes = at ? want : 0;
        }
        return at;
    }
    ~Stacks() { if (at) munmap(at, bytes); }
};

static const char* launch(const Kernel& kernel, Dim grid, unsigned threads, size_t shared, void** args, uint64_t seed) {
    static thread_local Stacks all;
    char* stacks = all.take(STACK * threads);
    if (!stacks) return "no memory for the stacks of its threads";
    Block b;
    block = &b;
    b.grid = grid, b.dim = {threads, 1, 1}, b.body = kernel.run, b.args = args;
    std::vector<char> memory(shared + ARENA + 256);
    b.shared = reinterpret_cast<char*>((uintptr_t(memory.data()) + 127) & ~uintptr_t(127));
    b.arena = b.shared + (shared + 15) / 16 * 16;
    b.shared_bytes = shared;
    b.fibers.resize(threads), b.warps.resize((threads + 31) / 32);
    std::vector<unsigned> order(threads);
    for (unsigned i = 0; i < threads; i++) order[i] = i;
    state = seed;
    // A launch of too many blocks runs the first and the last of each dimension.
    constexpr unsigned ENDS = 32;
    bool sampled = size_t(grid.x) * grid.y * grid.z > most_blocks;
    auto after = [&](unsigned i, unsigned n) { return sampled && n > 2 * ENDS && i + 1 == ENDS ? n - ENDS : i + 1; };
    std::vector<size_t> blocks;
    for (unsigned z = 0; z < grid.z; z = after(z, grid.z))
        for (unsigned y = 0; y < grid.y; y = after(y, grid.y))
            for (unsigned x = 0; x < grid.x; x = after(x, grid.x)) blocks.push_back(x + size_t(grid.x) * (y + size_t(grid.y) * z));
    if (seed) for (size_t i = blocks.size(); i > 1; i--) std::swap(blocks[i - 1], blocks[below(i)]);
    for (size_t i : blocks) {
        b.index = {unsigned(i % grid.x), unsigned(i / grid.x % grid.y), unsigned(i / grid.x / grid.y)};
        memset(b.shared, 0xff, (shared + 15) / 16 * 16 + (b.arena_used ? b.arena_used : ARENA));
        for (Warp& w : b.warps) w.size = w.alive = w.waiting = 0;
        b.alive = threads, b.waiting = 0;
        for (unsigned i = 0; i < threads; i++) {
            Fiber& f = b.fibers[i];
            // Vectors keep their memory.
            f.groups.clear(), f.open.clear();
            f.parity = 0, f.waited = false, f.state = Fiber::ready;
            f.tid = {i, 0, 0};
            f.lane = i % 32, f.warp = i / 32;
            b.warps[f.warp].alive = ++b.warps[f.warp].size;
            f.sp = first_frame(stacks + STACK * (i + 1) - APART * (i % PLACES), start);
        }
        if (observer) observer->block_begins();
        // With seed 0, all threads advance together. With another seed, a random warp runs ahead, for some steps or
        // until it waits for the rest of the block. Every effect of a missing barrier therefore occurs under some seed.
        while (b.alive) {
            bool moved = false;
            unsigned from = 0, to = threads;
            uint64_t passes = 1;
            if (seed) {
                unsigned w = below(b.warps.size());
                for (unsigned tries = 0; tries < b.warps.size(); tries++, w = (w + 1) % b.warps.size()) {
                    bool any = false;
                    for (unsigned i = w * 32; i < threads && i < w * 32 + 32; i++) any |= b.fibers[i].state == Fiber::ready;
                    if (any) break;
                }
                from = w * 32, to = std::min(from + 32, threads);
                passes = random() % 2 ? ~uint64_t(0) : 1 + random() % 8;
            }
            for (bool more = true; more && passes--;) {
                more = false;
                if (seed) for (unsigned i = to - from; i > 1; i--) std::swap(order[from + i - 1], order[from + below(i)]);
                for (unsigned j = from; j < to; j++) {
                    self = &b.fibers[order[j]];
                    if (self->state != Fiber::ready) continue;
                    moved = more = true;
                    emu_switch(&b.home, self->sp);
                    if (b.failure) return b.failure;
                    if (self->state == Fiber::done) {
                        if (--b.alive && b.waiting == b.alive) release_block();
                        if (Warp& w = b.warps[self->warp]; --w.alive && w.waiting) return "an operation of a whole warp after some of its threads have ended";
                    }
                }
            }
            if (!moved) return "threads wait at different barriers";
        }
    }
    return nullptr;
}

/// A matrix in the layout of products: `[rows, cols]`, with `ld` elements from one row to the next.
struct Operand { const char* at; int64_t ld; int bf16, transposed; };
/// Reports the rows of a matrix to the observer. Returns null, or an error.
static const char* observe(Operand o, int64_t rows, int64_t cols, bool writes) {
    if (o.transposed) std::swap(rows, cols);
    int64_t size = o.bf16 ? 2 : 4;
    const char* failure = nullptr;
    for (int64_t i = 0; observer && !failure && i < rows; i++) failure = observer->product_row(o.at + i * o.ld * size, cols * size, writes);
    return failure;
}
static std::vector<float> widened(Operand o, int64_t rows, int64_t cols) {
    std::vector<float> x(rows * cols);
    for (int64_t i = 0; i < rows; i++) for (int64_t j = 0; j < cols; j++) {
        int64_t at = o.transposed ? j * o.ld + i : i * o.ld + j;
        x[i * cols + j] = o.bf16 ? f32(reinterpret_cast<const uint16_t*>(o.at)[at]) : reinterpret_cast<const float*>(o.at)[at];
    }
    return x;
}
}  // namespace emu

/// Launches a kernel like cuLaunchKernel. Returns null, or the error.
extern "C" const char* emulated_launch(const char* file, const char* name, const unsigned* grid, unsigned threads, size_t shared, void** args, const size_t* sizes, size_t count, uint64_t seed) {
    for (emu::Kernel* k = emu::kernels; k; k = k->next) {
        if (strcmp(k->file, file) || strcmp(k->name, name)) continue;
        if (k->sizes != std::vector<size_t>(sizes, sizes + count)) return "its arguments differ in number or size from those it was given";
        if (!threads || !grid[0] || !grid[1] || !grid[2]) return "a launch without threads or blocks, which a GPU refuses";
        if (threads > k->max_threads) return "more threads than its bounds allow";
        if (emu::observer) emu::observer->launch_begins(emu::early);
        const char* failure = emu::launch(*k, {grid[0], grid[1], grid[2]}, threads, shared, args, seed);
        if (emu::observer) emu::observer->launch_ends();
        return failure;
    }
    return "there is no such kernel";
}
/// From now on, launches of this thread that have more blocks run only the first and the last of each dimension.
extern "C" void emulated_sample(uint64_t most_blocks) { emu::most_blocks = most_blocks; }
/// The next launches of this thread start early, or no longer do: kernels before them may still run on a GPU.
extern "C" void emulated_early(bool early) { emu::early = early; }
/// Computes `c [m, n] = a [m, k] · b [k, n] (+ plus [m, n])` with f32 sums over k in order. On a GPU, cuBLASLt computes this
/// product. Returns null, or an error.
extern "C" const char* emulated_product(int64_t m, int64_t n, int64_t k, const emu::Operand* a, const emu::Operand* b, char* c, int64_t ldc, int bf16_out, const char* plus) {
    if (m <= 0 || n <= 0 || k <= 0) return "a product without rows, columns or terms, which cuBLASLt refuses";
    emu::Operand to{c, ldc, bf16_out, 0};
    const char* failure = emu::observe(*a, m, k, false);
    if (!failure) failure = emu::observe(*b, k, n, false);
    if (!failure && plus) failure = emu::observe({plus, ldc, bf16_out, 0}, m, n, false);
    if (!failure) failure = emu::observe(to, m, n, true);
    if (failure) return failure;
    std::vector<float> x = emu::widened(*a, m, k), y = emu::widened(*b, k, n), sum(n);
    for (int64_t i = 0; i < m; i++) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int64_t p = 0; p < k; p++) {
            float f = x[i * k + p];
            const float* row = &y[p * n];
            for (int64_t j = 0; j < n; j++) sum[j] += f * row[j];
        }
        for (int64_t j = 0; j < n; j++) {
            int64_t at = i * ldc + j;
            auto narrow = reinterpret_cast<const uint16_t*>(plus);
            auto wide = reinterpret_cast<const float*>(plus);
            float own = (plus ? bf16_out ? f32(narrow[at]) : wide[at] : 0) + sum[j];
            if (bf16_out) reinterpret_cast<uint16_t*>(c)[at] = bf16(own);
            else reinterpret_cast<float*>(c)[at] = own;
        }
    }
    return nullptr;
}
