// A stand-in for libnccl.so.2: the ranks are processes or threads of this machine, which exchange bytes through shared memory.
//
// Exchanges take place in the call that queues them. Like NCCL, one with a rank that is gone does not return: it reports an error
// in the background and waits until the communicator is aborted. Two ranks that disagree about a size get a complaint.
//
// Without the stand-in of libcuda, arrays are in main memory, as on the emulator.
#include "stand_in.hpp"
#include <atomic>
#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>
#include <vector>

// The stand-in of libcuda has them.
#pragma weak stand_in_holds
#pragma weak stand_in_queue
#pragma weak stand_in_count
#pragma weak stand_in_complain

/// Values of ncclResult_t.
enum Status { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
/// Values of ncclDataType_t and ncclRedOp_t.
enum Type { UINT8 = 1, FLOAT32 = 7, SUM = 0 };

/// Bytes that travel at once from one rank to another.
constexpr size_t CHUNK = 256 << 10;
constexpr int MOST_RANKS = 8;
/// Seconds after which a rank that waits is an error of the test, not a slow peer.
constexpr int PATIENCE = 180;

/// A piece of a message between two ranks.
struct Mailbox {
    std::atomic<bool> full;
    /// Bytes of the message and of this piece.
    size_t total, bytes;
    char data[CHUNK];
};
struct Shared {
    std::atomic<int> joined;
    std::atomic<int> process[MOST_RANKS];
    std::atomic<bool> left[MOST_RANKS];
    Mailbox boxes[MOST_RANKS][MOST_RANKS];
};
struct Communicator {
    int rank, size;
    Shared* shared;
    std::string path;
    uint64_t exchanges = 0;
    std::atomic<int> error{SUCCESS};
    std::atomic<bool> aborted{false};
};
/// A message of this rank to a peer, or from it.
struct Message {
    bool is_sent;
    char* at;
    size_t bytes;
    int peer;
    size_t done = 0;
    bool is_complete() const { return done == bytes; }
};
struct Exchange {
    Communicator* communicator;
    const char* call;
    std::vector<Message> messages = {};
    /// Numbers of an AllReduce, and the gathered numbers of all ranks.
    float* sum = nullptr;
    size_t count = 0;
    std::vector<float> gathered = {};
    int status = SUCCESS;
};

static thread_local int depth;
static thread_local std::unique_ptr<Exchange> group;
static thread_local void* group_stream;
static thread_local std::string last_error;

__attribute__((format(printf, 2, 3))) static int refused(int status, const char* format, ...) {
    char text[512];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    last_error = text;
    return status;
}

static void complain(const std::string& text) {
    if (stand_in_complain) return stand_in_complain(text.c_str());
    fprintf(stderr, "stand-in: %s\n", text.c_str());
}

/// Returns true if a rank has left the communicator, or its process has ended.
static bool is_gone(Communicator* c, int rank) {
    if (c->shared->left[rank]) return true;
    int process = c->shared->process[rank];
    char path[64], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE* file = fopen(path, "r");
    if (!file) return true;
    // A process that has ended stays a zombie until its parent asks for its status.
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 0;
    fclose(file);
    return state == 'Z' || state == 'X';
}

/// Moves the next piece of a message. Returns true if there was one.
static bool advance(Communicator* c, Message& message, const char* call) {
    auto [from, to] = message.is_sent ? std::pair(c->rank, message.peer) : std::pair(message.peer, c->rank);
    Mailbox& box = c->shared->boxes[from][to];
    if (box.full.load(std::memory_order_acquire) == message.is_sent) return false;
    size_t rest = message.bytes - message.done;
    if (message.is_sent) {
        box.total = message.bytes;
        box.bytes = rest < CHUNK ? rest : CHUNK;
        memcpy(box.data, message.at + message.done, box.bytes);
    } else if (box.total != message.bytes) {
        complain(std::string(call) + ": rank " + std::to_string(c->rank) + " expects " + std::to_string(message.bytes) + " bytes from rank " +
                 std::to_string(message.peer) + ", which sends " + std::to_string(box.total));
        c->error = INVALID_USAGE;
        return false;
    } else {
        memcpy(message.at + message.done, box.data, box.bytes);
    }
    message.done += box.bytes;
    box.full.store(message.is_sent, std::memory_order_release);
    return true;
}

/// Carries out an exchange. Does not return before it is complete or aborted.
static void carry_out(Exchange* e) {
    Communicator* c = e->communicator;
    bool is_lost = ++c->exchanges == setting("STAND_IN_NCCL_FAULT", 0ull);
    if (is_lost) c->error = SYSTEM_ERROR;
    for (uint64_t waits = 0;;) {
        bool is_complete = !is_lost, has_advanced = false;
        for (size_t i = 0; i < e->messages.size() && !is_lost; i++) {
            Message& message = e->messages[i];
            if (message.is_complete()) continue;
            is_complete = false;
            bool is_next = true;
            for (size_t j = 0; j < i; j++) {
                Message& other = e->messages[j];
                is_next &= other.is_complete() || other.peer != message.peer || other.is_sent != message.is_sent;
            }
            has_advanced |= is_next && advance(c, message, e->call);
        }
        if (is_complete) break;
        if (c->aborted) {
            e->status = REMOTE_ERROR;
            return;
        }
        if (has_advanced) {
            waits = 0;
            continue;
        }
        usleep(50);
        if (++waits % 200 == 0 && !c->error)
            for (auto& message : e->messages)
                if (!message.is_complete() && is_gone(c, message.peer)) c->error = REMOTE_ERROR;
        if (waits > PATIENCE * 20000ull) {
            complain(std::string(e->call) + ": the other ranks do not make the same call");
            abort();
        }
    }
    // Not the order of a tree, so that a sum in the wrong order is noticed.
    for (size_t i = 0; e->sum && i < e->count; i++) {
        float sum = e->gathered[(size_t(c->size) - 1) * e->count + i];
        for (int rank = c->size - 2; rank >= 0; rank--) sum += e->gathered[size_t(rank) * e->count + i];
        e->sum[i] = sum;
    }
    if (stand_in_count) {
        stand_in_count("exchanges", 1);
        for (auto& message : e->messages)
            if (message.is_sent && message.peer != c->rank) stand_in_count("exchanged_bytes", message.bytes);
    }
}

/// Carries out an exchange in the order of a stream.
static int run(Exchange* e, void* stream) {
    if (e->communicator->aborted) return refused(INVALID_USAGE, "%s on an aborted communicator", e->call);
    auto work = [](void* data) { carry_out(static_cast<Exchange*>(data)); };
    if (!stand_in_queue)
        work(e);
    else if (stand_in_queue(stream, work, e))
        return refused(SYSTEM_ERROR, "%s: the stream has failed", e->call);
    return e->status ? refused(e->status, "remote process exited or there was a network error") : int(SUCCESS);
}

/// Adds a message. Complains if it is not inside an allocation.
static int add(Exchange* e, bool is_sent, const void* at, size_t bytes, int peer) {
    if (peer < 0 || peer >= e->communicator->size) return refused(INVALID_ARGUMENT, "%s: rank %d of %d", e->call, peer, e->communicator->size);
    if (bytes && stand_in_holds && !stand_in_holds(Address(at), bytes)) {
        complain(std::string(e->call) + ": " + std::to_string(bytes) + " bytes are not inside an allocation");
        return INVALID_ARGUMENT;
    }
    e->messages.push_back({is_sent, static_cast<char*>(const_cast<void*>(at)), bytes, peer});
    return SUCCESS;
}

/// Adds a message to the group of this thread, or carries it out.
static int point_to_point(bool is_sent, const char* call, const void* at, size_t count, int type, int peer, void* handle, void* stream) {
    if (type != UINT8) return refused(INVALID_ARGUMENT, "%s: the stand-in knows bytes only", call);
    auto c = static_cast<Communicator*>(handle);
    if (!depth) return refused(INVALID_USAGE, "%s: the stand-in knows it in groups only", call);
    if (!group) group.reset(new Exchange{c, "ncclSend, ncclRecv"});
    group_stream = stream;
    return add(group.get(), is_sent, at, count, peer);
}

EXPORTED int ncclGetVersion(int* version) {
    *version = int(setting("STAND_IN_NCCL", 22803ull));
    return SUCCESS;
}

EXPORTED const char* ncclGetErrorString(int status) {
    switch (status) {
    case SYSTEM_ERROR: return "unhandled system error";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "invalid usage";
    case REMOTE_ERROR: return "remote process exited or there was a network error";
    default: return "unknown result code";
    }
}

EXPORTED const char* ncclGetLastError(void*) { return last_error.c_str(); }

EXPORTED int ncclGetUniqueId(char* id) {
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != sizeof random) return SYSTEM_ERROR;
    memset(id, 0, 128);
    snprintf(id, 128, "/dev/shm/stand-in-nccl-%016llx", (unsigned long long)random);
    return SUCCESS;
}

struct Id {
    char path[128];
};

EXPORTED int ncclCommInitRank(void** handle, int size, Id id, int rank) {
    if (size < 1 || size > MOST_RANKS || rank < 0 || rank >= size) return refused(INVALID_ARGUMENT, "rank %d of %d", rank, size);
    int file = open(id.path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared))) return refused(SYSTEM_ERROR, "%s: %s", id.path, strerror(errno));
    void* mapped = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return refused(SYSTEM_ERROR, "%s: %s", id.path, strerror(errno));
    auto shared = static_cast<Shared*>(mapped);
    shared->process[rank] = getpid();
    shared->joined++;
    for (int waits = 0; shared->joined < size; waits++) {
        if (waits > PATIENCE * 1000) return refused(REMOTE_ERROR, "%d of %d ranks have joined", int(shared->joined), size);
        usleep(1000);
    }
    // All have it open.
    unlink(id.path);
    *handle = new Communicator{rank, size, shared, id.path};
    return SUCCESS;
}

EXPORTED int ncclCommAbort(void* handle) {
    auto c = static_cast<Communicator*>(handle);
    c->shared->left[c->rank] = true;
    // An exchange in progress still uses it, so it is left to the end of the process.
    c->aborted = true;
    return SUCCESS;
}

EXPORTED int ncclCommDestroy(void* handle) {
    auto c = static_cast<Communicator*>(handle);
    c->shared->left[c->rank] = true;
    munmap(c->shared, sizeof(Shared));
    delete c;
    return SUCCESS;
}

EXPORTED int ncclCommGetAsyncError(void* handle, int* status) {
    *status = static_cast<Communicator*>(handle)->error;
    return SUCCESS;
}

EXPORTED int ncclGroupStart() {
    depth++;
    return SUCCESS;
}

EXPORTED int ncclGroupEnd() {
    if (--depth || !group) return SUCCESS;
    auto own = std::move(group);
    return run(own.get(), group_stream);
}

EXPORTED int ncclSend(const void* at, size_t count, int type, int peer, void* handle, void* stream) {
    return point_to_point(true, __func__, at, count, type, peer, handle, stream);
}

EXPORTED int ncclRecv(void* at, size_t count, int type, int peer, void* handle, void* stream) {
    return point_to_point(false, __func__, at, count, type, peer, handle, stream);
}

EXPORTED int ncclAllGather(const void* own, void* all, size_t count, int type, void* handle, void* stream) {
    if (type != UINT8) return refused(INVALID_ARGUMENT, "%s: the stand-in knows bytes only", __func__);
    auto c = static_cast<Communicator*>(handle);
    Exchange e{c, __func__};
    for (int rank = 0; rank < c->size; rank++) {
        if (int status = add(&e, true, own, count, rank)) return status;
        if (int status = add(&e, false, static_cast<char*>(all) + size_t(rank) * count, count, rank)) return status;
    }
    return run(&e, stream);
}

EXPORTED int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* handle, void* stream) {
    if (type != UINT8) return refused(INVALID_ARGUMENT, "%s: the stand-in knows bytes only", __func__);
    auto c = static_cast<Communicator*>(handle);
    Exchange e{c, __func__};
    for (int rank = 0; rank < c->size && c->rank == root; rank++)
        if (rank != root)
            if (int status = add(&e, true, from, count, rank)) return status;
    if (c->rank != root)
        if (int status = add(&e, false, to, count, root)) return status;
    return run(&e, stream);
}

EXPORTED int ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, void* handle, void* stream) {
    if (type != FLOAT32 || operation != SUM) return refused(INVALID_ARGUMENT, "%s: the stand-in knows sums of f32 only", __func__);
    auto c = static_cast<Communicator*>(handle);
    Exchange e{c, __func__, {}, static_cast<float*>(to), count, std::vector<float>(size_t(c->size) * count)};
    for (int rank = 0; rank < c->size; rank++) {
        if (int status = add(&e, true, from, 4 * count, rank)) return status;
        e.messages.push_back({false, reinterpret_cast<char*>(e.gathered.data() + size_t(rank) * count), 4 * count, rank});
    }
    return run(&e, stream);
}
