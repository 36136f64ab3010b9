// Checks every access to memory of translated PTX. A launch fails if
//
// * two threads access the same bytes, one of them writes, and nothing orders them. Within a block, `bar.sync` does. Between
//   blocks, a counter does: what comes before a block's count is before what follows the later count of another block. Atomic
//   operations need no order among themselves. The order in which the emulator happened to run threads does not matter;
// * bytes are accessed that belong to no array, or lie behind the shared memory that the launch asked for;
// * bytes are read that nothing has written: in shared memory since the block began, in global memory since the allocation;
// * an asynchronous copy's target is accessed before its thread has waited for it;
// * a thread of a launch that starts early accesses, before it waits, bytes that a launch before it may still write, or writes bytes
//   that it may still access. These are the launches before it, up to one that starts the next one after its own wait.
//
// The host reports its arrays by `emulated_memory`. Bytes are checked in pairs, since no kernel accesses single ones.
#include "ptx.hpp"
#include <map>
#include <mutex>
#include <string>
#include <sys/mman.h>

namespace ptx {
namespace {

constexpr u64 PAIR = 2;

/// Threads that accessed a pair of bytes, and the number of barriers that they had passed.
struct Access {
    static constexpr s32 NONE = -1, SEVERAL = -2;
    s64 block = NONE;  // SEVERAL: threads of several blocks
    s32 thread = NONE;  // SEVERAL: threads of this block, all after the same barrier
    u32 barriers = 0;
    bool any() const { return block != NONE; }
    /// Returns whether this access certainly comes before `later` of the same block.
    bool before_own(const Access& later) const {
        return block == later.block && (thread == later.thread || barriers < later.barriers);
    }
    /// Returns whether this access certainly comes before `later`, which is the current one.
    bool before(const Access& later) const;
    void add(const Access& one) {
        if (before(one)) *this = one;
        else if (block != one.block) block = SEVERAL;
        else thread = SEVERAL;
    }
};
/// The history of a pair of bytes within a launch, or within a block for shared memory.
struct Pair {
    u32 since = 0;  // number of that launch or block
    u32 written = 0;  // number of the last launch that wrote the bytes
    s32 copier = Access::NONE;  // thread whose asynchronous copy is under way
    Access write, read, atomic;
};
template <class T> T* mapped(u64 count) {
    void* at = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : static_cast<T*>(at);
}
/// An array of the host. Its tables are mapped lazily, because arrays may be larger than memory.
struct Array {
    /// Size in bytes from which the host maps an array lazily. All of it then counts as written.
    static constexpr u64 LARGE = 1 << 30;
    u64 bytes, pairs;
    bool* defined;
    Pair* history;
    explicit Array(u64 bytes) : bytes(bytes), pairs(bytes / PAIR + 1), defined(mapped<bool>(pairs)), history(mapped<Pair>(pairs)) {}
    Array(const Array&) = delete;
    ~Array() { munmap(defined, pairs * sizeof(bool)), munmap(history, pairs * sizeof(Pair)); }
    bool is_defined(u64 pair) const { return bytes >= LARGE || defined[pair]; }
    void define(u64 from, u64 count, bool value) {
        if (bytes >= LARGE) return;
        memset(defined + from / PAIR, value, (from + count + PAIR - 1) / PAIR - from / PAIR);
    }
};

std::mutex door;  // One launch runs at a time. It guards all that follows.
std::map<u64, Array> arrays;
u32 launches, blocks;
/// Whether the current launch starts early, and the number of the first launch that may still run when it starts. When the next one
/// does, this one may still run, and those that may run now only if a thread starts the next one before it waits.
bool early;
u32 may_run, next_may_run;
std::vector<Pair> of_shared;
/// Asynchronous copies of a thread that it has not waited for: their targets in shared memory, in groups.
struct Copies {
    std::vector<std::vector<u32>> groups;
    std::vector<u32> open;
};
std::vector<Copies> copies;
/// The counts at each counter in this launch, and those of other blocks that the current block has met, each with its own count.
std::map<const void*, std::vector<Access>> counts;
std::vector<std::pair<Access, Access>> met;
std::vector<u32> barriers;

/// Returns the array that contains an address, and the address's offset.
std::pair<Array*, u64> array_of(u64 at) {
    auto next = arrays.upper_bound(at);
    if (next == arrays.begin()) return {nullptr, 0};
    auto& [start, array] = *--next;
    return {at - start < array.bytes ? &array : nullptr, at - start};
}
Access now() {
    const emu::Dim &at = emu::block->index, &grid = emu::block->grid;
    unsigned thread = emu::self->tid.x;
    return {s64(at.x) + s64(grid.x) * (at.y + s64(grid.y) * at.z), s32(thread), barriers[thread]};
}
bool Access::before(const Access& later) const {
    if (!any() || before_own(later)) return true;
    for (auto& [theirs, ours] : met)
        if (before_own(theirs) && ours.before_own(later)) return true;
    return false;
}
std::string who(const Access& access) {
    if (access.block == Access::SEVERAL) return "several blocks";
    std::string text = "block " + std::to_string(access.block);
    if (access.thread == Access::SEVERAL) return text + ", several threads";
    return text + ", warp " + std::to_string(access.thread / 32) + ", thread " + std::to_string(access.thread);
}
/// Checks an access against the history of the bytes, and adds it.
void order(Space space, Pair& pair, u32 since, Use use, const Address& where) {
    if (space == global && early && !emu::self->waited && (use == reads ? pair.written : pair.since) >= may_run && pair.since != since)
        refuse(where, "%s of global memory that a launch before this one may still access, without waiting for it", use == reads ? "read" : "write");
    u32 written = pair.written;
    if (pair.since != since) pair = Pair{since, written};
    if (use != reads) pair.written = since;
    Access me = now();
    const char* what = use == reads ? "read" : "write";
    if (pair.copier != Access::NONE)
        refuse(where, "%s of %s memory to which thread %d copies, which it has not waited for", what, name(space), pair.copier);
    auto after = [&](const Access& other, const char* did) {
        if (!other.before(me))
            refuse(where, "%s of %s memory that %s %s, without a barrier between them", what, name(space), who(other).c_str(), did);
    };
    after(pair.write, "wrote");
    if (use != atomic) after(pair.atomic, "wrote");
    if (use != reads) after(pair.read, "read");
    if (use == writes) pair.write = me;
    else (use == reads ? pair.read : pair.atomic).add(me);
}
void check_shared(const char* at, size_t bytes, Use use, const Address& where) {
    const emu::Block& b = *emu::block;
    bool dynamic = at >= b.shared && at + bytes <= b.shared + b.shared_bytes;
    if (!dynamic && !(at >= b.arena && at + bytes <= b.arena + b.arena_used))
        refuse(where, "access of %zu bytes at %td in shared memory, of which the launch has %zu", bytes, at - b.shared, b.shared_bytes);
    for (u64 i = (at - b.shared) / PAIR; i < (at + bytes - b.shared) / PAIR; i++) {
        Pair& pair = of_shared[i];
        if (use != writes && (pair.since != blocks || !pair.write.any()))
            refuse(where, "read of shared memory that nothing has written");
        order(shared, pair, blocks, use, where);
    }
}
void check_global(const char* at, size_t bytes, Use use, const Address& where) {
    auto [array, from] = array_of(u64(at));
    if (!array) refuse(where, "%s of global memory at %p, which belongs to no array", use == reads ? "read" : "write", at);
    if (from + bytes > array->bytes) refuse(where, "access of %zu bytes at byte %lu of an array of %lu bytes", bytes, from, array->bytes);
    for (u64 i = from / PAIR; i < (from + bytes) / PAIR; i++) {
        if (use != writes && !array->is_defined(i))
            refuse(where, "read of global memory that nothing has written, at byte %lu of an array of %lu bytes", PAIR * i, array->bytes);
        order(global, array->history[i], launches, use, where);
        if (use != reads) array->defined[i] = true;
    }
}
/// Checks bytes that a product accesses, and marks those that it writes as defined.
const char* product_row(const void* at, size_t bytes, bool writes) {
    std::lock_guard<std::mutex> guard(door);
    auto [array, from] = array_of(u64(at));
    if (!array || from + bytes > array->bytes) return "a product accesses memory that belongs to no array";
    for (u64 i = from / PAIR; i < (from + bytes) / PAIR && !writes; i++)
        if (!array->is_defined(i)) return "a product reads global memory that nothing has written";
    if (writes) array->define(from, bytes, true);
    return nullptr;
}
void launch_begins(bool starts_early) {
    door.lock(), launches++, counts.clear();
    early = starts_early;
    may_run = early ? next_may_run : launches;
    next_may_run = launches;
}
void launch_ends() { door.unlock(); }
void block_begins() {
    const emu::Block& b = *emu::block;
    blocks++;
    met.clear();
    of_shared.resize(std::max(of_shared.size(), size_t(b.arena - b.shared + emu::ARENA) / PAIR));
    copies.assign(b.dim.x, {});
    barriers.assign(b.dim.x, 0);
}
const emu::Observer observer = {launch_begins, launch_ends, block_begins, product_row};
[[maybe_unused]] const bool registered = (emu::observer = &observer, true);
}  // namespace

void check(Space space, const char* at, size_t bytes, Use use, const Address& where) {
    if (bytes % PAIR) refuse(where, "access of %zu bytes; the checks cover multiples of %lu", bytes, PAIR);
    (space == shared ? check_shared : check_global)(at, bytes, use, where);
}
void passed_counter(const void* counter) {
    Access me = now();
    for (const Access& other : counts[counter]) met.emplace_back(other, me);
    counts[counter].push_back(me);
}
void copying(const char* to, size_t bytes) {
    u32 first = (to - emu::block->shared) / PAIR;
    for (u32 i = first; i < first + bytes / PAIR; i++) {
        of_shared[i].copier = emu::self->tid.x;
        copies[emu::self->tid.x].open.push_back(i);
    }
}
void committed() {
    Copies& own = copies[emu::self->tid.x];
    own.groups.push_back(std::move(own.open));
    own.open.clear();
}
void waited(unsigned newest) {
    Copies& own = copies[emu::self->tid.x];
    while (own.groups.size() > newest) {
        // The bytes arrive now at the latest. Other threads may read them after the next barrier.
        for (u32 i : own.groups.front()) of_shared[i].copier = Access::NONE, of_shared[i].write = now();
        own.groups.erase(own.groups.begin());
    }
}
void passed_barrier() { barriers[emu::self->tid.x]++; }
void started_next() {
    if (early && !emu::self->waited) next_may_run = may_run;
}
}  // namespace ptx

/// Takes note of memory that the host allocated, freed, wrote, or declared undefined.
extern "C" void emulated_memory(uint64_t at, size_t bytes, int event) {
    enum { allocated, freed, written, undefined };
    std::lock_guard<std::mutex> guard(ptx::door);
    if (event == allocated) ptx::arrays.try_emplace(at, bytes);
    if (event == freed) ptx::arrays.erase(at);
    if (event == written || event == undefined)
        if (auto [array, from] = ptx::array_of(at); array) array->define(from, bytes, event == written);
}
