// A stand-in for libcuda.so.1, which runs kernels on the CPU and checks every call.
//
// Memory of a device is memory of the host between two inaccessible pages. New memory is filled with 0xff, which is NaN. Kernels come from the
// objects that this library is linked with, by the name of the file that a module states. They run at once, on the
// scheduler of crates/gpu/emu. A call that a real driver refuses, or that leads to undefined behaviour, is a complaint:
// a line of the report and of standard error. README.md lists the settings.
#include "stand_in.hpp"
#include "emu.hpp"
#include <csignal>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

/// Values of CUresult.
enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_PTX = 218,
    UNSUPPORTED_PTX_VERSION = 222,
    NOT_FOUND = 500,
    ILLEGAL_ADDRESS = 700,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
};

/// Values of CUdevice_attribute.
enum Attribute {
    MAX_SHARED_MEMORY_PER_BLOCK = 8,
    MULTIPROCESSOR_COUNT = 16,
    L2_CACHE_SIZE = 38,
    ECC_ENABLED = 32,
    COMPUTE_CAPABILITY_MAJOR = 75,
    COMPUTE_CAPABILITY_MINOR = 76,
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
    MEMORY_POOLS_SUPPORTED = 115,
};

constexpr int FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE = 8;
/// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
constexpr int LAUNCH_ATTRIBUTE_STARTS_EARLY = 6;
constexpr int MEMPOOL_ATTRIBUTE_RELEASE_THRESHOLD = 4;
/// Shared memory that a block may use without asking for more.
constexpr unsigned DEFAULT_SHARED = 48 << 10;
constexpr size_t PAGE = 4096, ALIGNMENT = 256;
/// Content of the bytes between the end of an allocation and its guard page.
constexpr unsigned char TAIL = 0xa5;

/// The described hardware.
struct Settings {
    int driver = int(setting("STAND_IN_DRIVER", 13000ull));
    int devices = int(setting("STAND_IN_DEVICES", 1ull));
    /// Compute capability, ten times its major number plus its minor number.
    int architecture = int(setting("STAND_IN_ARCHITECTURE", 90ull));
    size_t memory = setting("STAND_IN_MEMORY", 4ull << 30);
    int shared = int(setting("STAND_IN_SHARED", 227ull << 10));
    int ecc = int(setting("STAND_IN_ECC", 1ull));
    /// Seed of the order in which the threads of a kernel run.
    uint64_t seed = setting("STAND_IN_SEED", 1ull);
    /// Kernel, as `file/name`, whose launch ends in an error that later calls report.
    std::string fault = setting("STAND_IN_FAULT", "");
    /// False if kernels and products are checked but not computed. Memory then holds zeros.
    bool computes = setting("STAND_IN_COMPUTES", 1ull) != 0;
    bool blocking = setting("CUDA_LAUNCH_BLOCKING", 0ull) != 0;
};
// Programs may call the driver until they end, so nothing of the following is ever destroyed.
static const Settings& settings = *new Settings;

struct Device {
    size_t used = 0;
    /// Sizes of the freed pieces that the pool keeps, and their sum. A larger allocation cannot have them.
    std::multiset<size_t> kept;
    size_t kept_bytes = 0;
    /// First error of a kernel. Every later call returns it.
    int failure = SUCCESS;
};
struct Stream;
struct Allocation {
    size_t bytes;
    Device* device;
    /// Stream whose work used this memory last, and the time of that call.
    Stream* user = nullptr;
    uint64_t used = 0;
};
/// Main memory from which a device copies. The host may not access it while a copy is in progress.
struct Pinned {
    size_t bytes;
    int copies = 0;
};
/// A copy of pinned memory. It is carried out when something waits for it.
struct Copy {
    uint64_t number;
    Address device;
    char* host;
    size_t bytes;
    bool up, done = false;
};
struct Event {
    Stream* stream = nullptr;
    /// Number of the last copy of the stream, and the time when the event was recorded.
    uint64_t copy = 0, time = 0;
};
struct Module {
    std::string file;
};
struct Function {
    std::string file, name;
    const emu::Kernel* kernel;
    unsigned shared = DEFAULT_SHARED;
};
using Work = std::function<int()>;
struct Graph {
    Device* device;
    std::vector<Work> nodes;
};
struct Stream {
    Device* device;
    bool captures = false, invalid = false;
    std::unique_ptr<Graph> graph;
    /// Number of kernels and products.
    uint64_t kernels = 0;
    /// Copies that the host does not know to be complete, and the number of the last one.
    std::deque<Copy> copies;
    uint64_t last_copy = 0;
    /// For each other stream: the time and the number of the copy up to which its work precedes further work of this stream.
    std::map<Stream*, Event> waited;
    /// The same for further calls of the host.
    Event finished;
};

static std::recursive_mutex lock;
static bool is_initialised;
static Device devices[8];
static thread_local Device* current;
static auto& allocations = *new std::map<Address, Allocation>;
static auto& freed = *new std::set<Address>;
static auto& streams = *new std::set<void*>;
static auto& graphs = *new std::set<void*>;
static auto& executables = *new std::set<void*>;
static auto& modules = *new std::set<void*>;
static auto& events = *new std::set<void*>;
static auto& pinned = *new std::map<char*, Pinned>;
/// Number of calls that queued work.
static uint64_t now;
/// Kernel that runs now, for the report of a fault.
static const Function* running;

/// Numbers and complaints of this process. They are written to `$STAND_IN_REPORT/<process>.json` when it ends.
struct Report {
    std::map<std::string, uint64_t> calls, kernels, numbers;
    std::vector<std::string> complaints;
    size_t live = 0, peak = 0;

    void write() {
        const char* folder = getenv("STAND_IN_REPORT");
        if (!folder || written) return;
        written = true;
        std::string path = std::string(folder) + "/" + std::to_string(getpid()) + ".json";
        FILE* file = fopen(path.c_str(), "w");
        if (!file) {
            fprintf(stderr, "stand-in: cannot write %s\n", path.c_str());
            return;
        }
        fprintf(file, "{\"peak_bytes\": %zu, \"live_bytes\": %zu, \"live_allocations\": %zu", peak, live, allocations.size());
        for (auto& [name, number] : numbers) fprintf(file, ", \"%s\": %llu", name.c_str(), (unsigned long long)number);
        table(file, "calls", calls);
        table(file, "kernels", kernels);
        fprintf(file, ", \"complaints\": [");
        for (size_t i = 0; i < complaints.size(); i++) fprintf(file, "%s\"%s\"", i ? ", " : "", escaped(complaints[i]).c_str());
        fprintf(file, "]}\n");
        fclose(file);
    }

  private:
    bool written = false;
    static std::string escaped(const std::string& text) {
        std::string out;
        for (unsigned char c : text) {
            if (c == '"' || c == '\\') out += '\\';
            out += c < ' ' ? ' ' : char(c);
        }
        return out;
    }
    static void table(FILE* file, const char* name, const std::map<std::string, uint64_t>& numbers) {
        const char* between = "";
        fprintf(file, ", \"%s\": {", name);
        for (auto& [key, number] : numbers) {
            fprintf(file, "%s\"%s\": %llu", between, key.c_str(), (unsigned long long)number);
            between = ", ";
        }
        fprintf(file, "}");
    }
};
static Report& report = *new Report;
__attribute__((destructor)) static void at_exit() { report.write(); }

__attribute__((format(printf, 1, 2))) static void complain(const char* format, ...) {
    char text[512];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    // The stack of a signal handler is too small for a stream without a buffer.
    std::string line = std::string("stand-in: ") + text + "\n";
    if (write(STDERR_FILENO, line.data(), line.size()) < 0) abort();
    report.complaints.emplace_back(text);
}

/// Begins a call: takes the lock and counts the call.
#define CALL \
    std::lock_guard<std::recursive_mutex> locked(lock); \
    report.calls[__func__]++
/// Begins a call that needs a current context without an error.
#define CALL_IN_CONTEXT \
    CALL; \
    if (!is_initialised) return NOT_INITIALIZED; \
    if (!current) { \
        complain("%s without a current context", __func__); \
        return INVALID_CONTEXT; \
    } \
    if (current->failure) return current->failure
/// Refuses a call in a thread whose stream is being captured. The capture becomes invalid.
#define NOT_WHILE_CAPTURING(stream) \
    if ((stream)->captures) { \
        (stream)->invalid = true; \
        complain("%s while the stream is being captured", __func__); \
        return STREAM_CAPTURE_UNSUPPORTED; \
    }

/// Returns the handle as a stream of the current context, or null with a complaint.
static Stream* stream_of(void* handle, const char* call) {
    auto stream = static_cast<Stream*>(handle);
    if (!streams.count(handle)) {
        complain("%s: a stream that does not exist", call);
        return nullptr;
    }
    if (stream->device != current) {
        complain("%s: a stream of another context", call);
        return nullptr;
    }
    return stream;
}
#define STREAM(name, handle) \
    Stream* name = stream_of(handle, __func__); \
    if (!name) return INVALID_VALUE

static bool is_captured() {
    for (void* stream : streams)
        if (auto s = static_cast<Stream*>(stream); s->device == current && s->captures) return true;
    return false;
}

static std::map<Address, Allocation>::iterator allocation_of(Address at) {
    auto after = allocations.upper_bound(at);
    return after == allocations.begin() ? allocations.end() : std::prev(after);
}

/// Returns the pinned memory that holds an address of the host, or the end.
static std::map<char*, Pinned>::iterator pinned_at(const void* at) {
    auto after = pinned.upper_bound(const_cast<char*>(static_cast<const char*>(at)));
    if (after == pinned.begin()) return pinned.end();
    auto found = std::prev(after);
    return static_cast<const char*>(at) < found->first + found->second.bytes ? found : pinned.end();
}

/// Notes that work of a stream uses an allocation. Complains if work of another stream may use it at the same time.
static void use(Address at, Stream* stream, const char* what) {
    auto found = allocation_of(at);
    if (found == allocations.end() || at >= found->first + found->second.bytes) return;
    auto& [bytes, device, user, used] = found->second;
    if (user && user != stream && used > std::max(stream->waited[user].time, user->finished.time))
        complain("%s uses %zu bytes at %llx, which work of another stream may use at the same time", what, bytes, found->first);
    for (void* other : streams)
        for (auto& copy : static_cast<Stream*>(other)->copies)
            if (other != stream && copy.device >= found->first && copy.device < found->first + bytes &&
                copy.number > stream->waited[static_cast<Stream*>(other)].copy) {
                complain("%s uses %zu bytes at %llx, which another stream copies", what, bytes, found->first);
                return;
            }
    user = stream;
    used = ++now;
}

/// Carries out the copies of a stream up to a number.
static void carry_out(Stream* stream, uint64_t last) {
    for (auto& copy : stream->copies) {
        if (copy.number > last) break;
        if (copy.done) continue;
        copy.done = true;
        auto device = reinterpret_cast<char*>(copy.device);
        auto memory = pinned_at(copy.host);
        mprotect(memory->first, memory->second.bytes, PROT_READ | PROT_WRITE);
        memcpy(copy.up ? device : copy.host, copy.up ? copy.host : device, copy.bytes);
        mprotect(memory->first, memory->second.bytes, copy.up ? PROT_READ : PROT_NONE);
    }
}

/// Carries out the copies that precede an event, and gives their pinned memory back to the host.
static void complete(const Event& event) {
    Stream* stream = event.stream;
    if (!stream) return;
    carry_out(stream, event.copy);
    stream->finished.time = std::max(stream->finished.time, event.time);
    while (!stream->copies.empty() && stream->copies.front().number <= event.copy) {
        auto memory = pinned_at(stream->copies.front().host);
        if (--memory->second.copies == 0) mprotect(memory->first, memory->second.bytes, PROT_READ | PROT_WRITE);
        stream->copies.pop_front();
    }
}

/// Allocations that the operands of the next product are in.
static thread_local std::vector<Address> operands;

EXPORTED bool stand_in_holds(Address at, size_t bytes) {
    std::lock_guard<std::recursive_mutex> locked(lock);
    auto found = allocation_of(at);
    if (found == allocations.end() || found->second.device != current) return false;
    operands.push_back(at);
    return at + bytes <= found->first + found->second.bytes;
}

EXPORTED void stand_in_count(const char* what, uint64_t by) {
    std::lock_guard<std::recursive_mutex> locked(lock);
    report.numbers[what] += by;
}

EXPORTED void stand_in_complain(const char* text) {
    std::lock_guard<std::recursive_mutex> locked(lock);
    complain("%s", text);
}

/// Runs work, or records it if the stream is being captured.
static int queue(Stream* stream, Work work) {
    if (stream->captures) {
        stream->graph->nodes.push_back(std::move(work));
        return SUCCESS;
    }
    return work();
}

EXPORTED int stand_in_queue(void* handle, void (*work)(void*), void* data) {
    std::lock_guard<std::recursive_mutex> locked(lock);
    if (!current) {
        complain("a product or an exchange without a current context");
        return INVALID_CONTEXT;
    }
    if (current->failure) return current->failure;
    STREAM(stream, handle);
    stream->kernels++;
    for (Address operand : operands) use(operand, stream, "a product or an exchange");
    operands.clear();
    return queue(stream, [=] {
        if (settings.computes) work(data);
        return int(SUCCESS);
    });
}

// Driver and devices.

/// Reports an access of a kernel outside of all arrays, or of the host to memory that is being copied, and ends the process.
static void on_fault(int signal, siginfo_t* info, void*) {
    if (auto memory = pinned_at(info->si_addr); memory != pinned.end() && memory->second.copies) {
        complain("the host accessed pinned memory at %p, whose copy is in progress", info->si_addr);
        report.write();
        _exit(70);
    }
    if (running) {
        complain("kernel %s/%s accessed %p, outside of its arrays", running->file.c_str(), running->name.c_str(), info->si_addr);
        report.write();
        _exit(70);
    }
    // This fault is the program's. It occurs again when this function returns, and then has its usual effect.
    std::signal(signal, SIG_DFL);
}

EXPORTED int cuInit(unsigned) {
    CALL;
    if (settings.devices == 0) return NO_DEVICE;
    if (!is_initialised) {
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, nullptr);
    }
    is_initialised = true;
    return SUCCESS;
}

EXPORTED int cuDriverGetVersion(int* version) {
    CALL;
    *version = settings.driver;
    return SUCCESS;
}

EXPORTED int cuDeviceGetCount(int* count) {
    CALL;
    *count = settings.devices;
    return is_initialised ? SUCCESS : NOT_INITIALIZED;
}

EXPORTED int cuDeviceGet(int* device, int ordinal) {
    CALL;
    if (ordinal < 0 || ordinal >= settings.devices || ordinal >= 8) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

EXPORTED int cuDeviceGetName(char* name, int length, int) {
    CALL;
    snprintf(name, size_t(length), "%s", setting("STAND_IN_NAME", "Stand-in GPU"));
    return SUCCESS;
}

EXPORTED int cuDeviceGetPCIBusId(char* id, int length, int device) {
    CALL;
    snprintf(id, size_t(length), "0000:%02X:00.0", device + 1);
    return SUCCESS;
}

EXPORTED int cuDeviceTotalMem_v2(size_t* bytes, int) {
    CALL;
    *bytes = settings.memory;
    return SUCCESS;
}

EXPORTED int cuDeviceGetAttribute(int* value, int attribute, int) {
    CALL;
    switch (attribute) {
    case MAX_SHARED_MEMORY_PER_BLOCK: *value = DEFAULT_SHARED; break;
    case MULTIPROCESSOR_COUNT: *value = 4; break;
    case L2_CACHE_SIZE: *value = 50 << 20; break;
    case ECC_ENABLED: *value = settings.ecc; break;
    case COMPUTE_CAPABILITY_MAJOR: *value = settings.architecture / 10; break;
    case COMPUTE_CAPABILITY_MINOR: *value = settings.architecture % 10; break;
    case MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = settings.shared; break;
    // The system keeps 1 KiB of it for each block.
    case MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = settings.shared + 1024; break;
    case MEMORY_POOLS_SUPPORTED: *value = 1; break;
    default: complain("cuDeviceGetAttribute: the stand-in knows no attribute %d", attribute); return INVALID_VALUE;
    }
    return SUCCESS;
}

/// NVRTC calls this function of the loaded driver and reads the table.
EXPORTED int cuGetExportTable(const void** table, const void*) {
    static const uint64_t entries[64] = {16};
    *table = entries;
    return SUCCESS;
}

EXPORTED int cuGetErrorName(int result, const char** name) {
    switch (result) {
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NO_BINARY_FOR_GPU: *name = "CUDA_ERROR_NO_BINARY_FOR_GPU"; break;
    case INVALID_PTX: *name = "CUDA_ERROR_INVALID_PTX"; break;
    case UNSUPPORTED_PTX_VERSION: *name = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"; break;
    case ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    default: *name = "CUDA_ERROR"; break;
    }
    return SUCCESS;
}

EXPORTED int cuGetErrorString(int result, const char** text) {
    switch (result) {
    case OUT_OF_MEMORY: *text = "out of memory"; break;
    case NO_BINARY_FOR_GPU: *text = "no kernel image is available for execution on the device"; break;
    case INVALID_PTX: *text = "a PTX JIT compilation failed"; break;
    case UNSUPPORTED_PTX_VERSION: *text = "the provided PTX was compiled with an unsupported toolchain."; break;
    case ILLEGAL_ADDRESS: *text = "an illegal memory access was encountered"; break;
    default: *text = "an error of the stand-in"; break;
    }
    return SUCCESS;
}

// Contexts and streams. A context is represented by its device.

EXPORTED int cuDevicePrimaryCtxRetain(void** context, int device) {
    CALL;
    if (!is_initialised) return NOT_INITIALIZED;
    *context = &devices[device];
    return SUCCESS;
}

EXPORTED int cuCtxSetCurrent(void* context) {
    CALL;
    current = static_cast<Device*>(context);
    return SUCCESS;
}

EXPORTED int cuStreamCreate(void** stream, unsigned) {
    CALL_IN_CONTEXT;
    auto made = new Stream;
    made->device = current;
    *stream = made;
    streams.insert(made);
    return SUCCESS;
}

EXPORTED int cuStreamSynchronize(void* handle) {
    CALL_IN_CONTEXT;
    STREAM(stream, handle);
    NOT_WHILE_CAPTURING(stream);
    complete(Event{stream, stream->last_copy, now});
    for (auto& [other, event] : stream->waited) complete(event);
    return SUCCESS;
}

/// Returns the handle as an event, or null with a complaint.
static Event* event_of(void* handle, const char* call) {
    if (events.count(handle)) return static_cast<Event*>(handle);
    complain("%s: an event that does not exist", call);
    return nullptr;
}
#define EVENT(name, handle) \
    Event* name = event_of(handle, __func__); \
    if (!name) return INVALID_VALUE

EXPORTED int cuEventCreate(void** event, unsigned) {
    CALL_IN_CONTEXT;
    *event = new Event;
    events.insert(*event);
    return SUCCESS;
}

EXPORTED int cuEventRecord(void* handle, void* stream_handle) {
    CALL_IN_CONTEXT;
    EVENT(event, handle);
    STREAM(stream, stream_handle);
    NOT_WHILE_CAPTURING(stream);
    *event = Event{stream, stream->last_copy, now};
    return SUCCESS;
}

EXPORTED int cuEventSynchronize(void* handle) {
    CALL_IN_CONTEXT;
    EVENT(event, handle);
    if (is_captured()) complain("cuEventSynchronize while a stream is being captured");
    complete(*event);
    return SUCCESS;
}

EXPORTED int cuEventDestroy_v2(void* handle) {
    CALL_IN_CONTEXT;
    EVENT(event, handle);
    events.erase(handle);
    delete event;
    return SUCCESS;
}

EXPORTED int cuStreamWaitEvent(void* stream_handle, void* handle, unsigned) {
    CALL_IN_CONTEXT;
    EVENT(event, handle);
    STREAM(stream, stream_handle);
    NOT_WHILE_CAPTURING(stream);
    if (!event->stream || event->stream == stream) return SUCCESS;
    // Kernels run at once, so they need the result of the copies now. The host does not know it yet.
    carry_out(event->stream, event->copy);
    auto& waited = stream->waited[event->stream];
    waited = Event{event->stream, std::max(waited.copy, event->copy), std::max(waited.time, event->time)};
    return SUCCESS;
}

// Memory.

EXPORTED int cuDeviceGetDefaultMemPool(void** pool, int device) {
    CALL;
    *pool = &devices[device];
    return SUCCESS;
}

EXPORTED int cuMemPoolSetAttribute(void*, int attribute, void*) {
    CALL;
    if (attribute == MEMPOOL_ATTRIBUTE_RELEASE_THRESHOLD) return SUCCESS;
    complain("cuMemPoolSetAttribute: the stand-in knows no attribute %d", attribute);
    return INVALID_VALUE;
}

EXPORTED int cuMemPoolTrimTo(void* pool, size_t bytes) {
    CALL_IN_CONTEXT;
    if (bytes) {
        complain("cuMemPoolTrimTo: the stand-in can only keep nothing");
        return INVALID_VALUE;
    }
    auto device = static_cast<Device*>(pool);
    device->kept.clear();
    device->kept_bytes = 0;
    report.numbers["trims"]++;
    return SUCCESS;
}

EXPORTED int cuMemGetInfo_v2(size_t* free, size_t* total) {
    CALL_IN_CONTEXT;
    *total = settings.memory;
    *free = settings.memory - current->used;
    return SUCCESS;
}

/// Returns the number of bytes between the two guard pages of an allocation, which lies at their end.
static size_t room(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }
static size_t padded(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

EXPORTED int cuMemAllocAsync(Address* at, size_t bytes, void* handle) {
    CALL_IN_CONTEXT;
    STREAM(stream, handle);
    NOT_WHILE_CAPTURING(stream);
    if (bytes == 0) {
        complain("cuMemAllocAsync of 0 bytes");
        return INVALID_VALUE;
    }
    auto piece = current->kept.lower_bound(bytes);
    if (piece != current->kept.end()) {
        current->kept_bytes -= *piece;
        current->kept.erase(piece);
    } else if (bytes > settings.memory - current->used - current->kept_bytes) {
        return OUT_OF_MEMORY;
    }
    size_t inner = room(bytes);
    void* mapped = mmap(nullptr, inner + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return OUT_OF_MEMORY;
    char* begin = static_cast<char*>(mapped) + PAGE;
    if (mprotect(begin, inner, PROT_READ | PROT_WRITE)) return OUT_OF_MEMORY;
    char* first = begin + inner - padded(bytes);
    // A new mapping holds zeros, and takes no memory of the host until it is written.
    if (settings.computes) memset(first, 0xff, bytes);
    memset(first + bytes, TAIL, padded(bytes) - bytes);
    *at = Address(first);
    allocations[*at] = {bytes, current, nullptr, 0};
    freed.erase(*at);
    current->used += bytes;
    report.live += bytes;
    report.peak = std::max(report.peak, report.live);
    report.numbers["allocations"]++;
    return SUCCESS;
}

EXPORTED int cuMemFreeAsync(Address at, void* handle) {
    CALL_IN_CONTEXT;
    STREAM(stream, handle);
    NOT_WHILE_CAPTURING(stream);
    auto found = allocations.find(at);
    if (found == allocations.end()) {
        complain("cuMemFreeAsync of %llx, which %s", at, freed.count(at) ? "is already free" : "was not allocated");
        return INVALID_VALUE;
    }
    use(at, stream, __func__);
    auto [bytes, device, user, used] = found->second;
    char* first = reinterpret_cast<char*>(at);
    for (size_t i = bytes; i < padded(bytes); i++)
        if (static_cast<unsigned char>(first[i]) != TAIL) {
            complain("byte %zu of an allocation of %zu bytes was written", i, bytes);
            break;
        }
    size_t inner = room(bytes);
    munmap(first + padded(bytes) - inner - PAGE, inner + 2 * PAGE);
    device->used -= bytes;
    device->kept.insert(bytes);
    device->kept_bytes += bytes;
    report.live -= bytes;
    report.numbers["frees"]++;
    freed.insert(at);
    allocations.erase(found);
    return SUCCESS;
}

/// Returns true if the range is inside an allocation. Otherwise, complains.
static bool holds(Address at, size_t bytes, const char* call) {
    bool holds = stand_in_holds(at, bytes);
    operands.clear();
    if (holds) return true;
    complain("%s: %zu bytes from %llx are not inside an allocation", call, bytes, at);
    return false;
}

EXPORTED int cuMemsetD8Async(Address at, unsigned char value, size_t bytes, void* handle) {
    CALL_IN_CONTEXT;
    STREAM(stream, handle);
    if (!holds(at, bytes, __func__)) return INVALID_VALUE;
    use(at, stream, __func__);
    report.numbers["bytes_set"] += bytes;
    return queue(stream, [=] {
        memset(reinterpret_cast<void*>(at), value, bytes);
        return int(SUCCESS);
    });
}

EXPORTED int cuMemHostAlloc(void** at, size_t bytes, unsigned) {
    CALL_IN_CONTEXT;
    void* mapped = mmap(nullptr, room(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes == 0 || mapped == MAP_FAILED) return bytes ? OUT_OF_MEMORY : INVALID_VALUE;
    pinned[static_cast<char*>(mapped)] = {bytes};
    *at = mapped;
    report.numbers["pinned_bytes"] += bytes;
    return SUCCESS;
}

EXPORTED int cuMemFreeHost(void* at) {
    CALL_IN_CONTEXT;
    auto found = pinned.find(static_cast<char*>(at));
    if (found == pinned.end() || found->second.copies) {
        complain("cuMemFreeHost of %p, which %s", at, found == pinned.end() ? "was not allocated" : "is being copied");
        return INVALID_VALUE;
    }
    munmap(at, room(found->second.bytes));
    pinned.erase(found);
    return SUCCESS;
}

/// Copies between a device and main memory. A copy of pageable memory is complete when the call returns.
static int copy_host(Address device, char* host, size_t bytes, Stream* stream, bool up, const char* call) {
    // A capture would record the address of the host's memory, which the caller may free.
    NOT_WHILE_CAPTURING(stream);
    if (!holds(device, bytes, call)) return INVALID_VALUE;
    use(device, stream, call);
    report.numbers[up ? "bytes_up" : "bytes_down"] += bytes;
    auto memory = pinned_at(host);
    if (memory == pinned.end()) {
        bool others_compute = false;
        for (void* other : streams) others_compute |= static_cast<Stream*>(other)->device == current && static_cast<Stream*>(other)->kernels;
        if (others_compute && !stream->kernels)
            complain("%s of pageable memory on a stream without kernels: the host waits for it, so nothing overlaps", call);
        memcpy(up ? reinterpret_cast<char*>(device) : host, up ? host : reinterpret_cast<char*>(device), bytes);
        return SUCCESS;
    }
    if (host + bytes > memory->first + memory->second.bytes) {
        complain("%s: %zu bytes from %p are not inside pinned memory", call, bytes, static_cast<void*>(host));
        return INVALID_VALUE;
    }
    if (memory->second.copies) complain("%s: the pinned memory at %p is still being copied", call, static_cast<void*>(host));
    report.numbers[up ? "pinned_bytes_up" : "pinned_bytes_down"] += bytes;
    memory->second.copies++;
    stream->copies.push_back({++stream->last_copy, device, host, bytes, up});
    mprotect(memory->first, memory->second.bytes, up ? PROT_READ : PROT_NONE);
    return SUCCESS;
}

EXPORTED int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* handle) {
    CALL_IN_CONTEXT;
    STREAM(stream, handle);
    return copy_host(to, static_cast<char*>(const_cast<void*>(from)), bytes, stream, true, __func__);
}

EXPORTED int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* handle) {
    CALL_IN_CONTEXT;
    STREAM(stream, handle);
    return copy_host(from, static_cast<char*>(to), bytes, stream, false, __func__);
}

EXPORTED int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* handle) {
    CALL_IN_CONTEXT;
    STREAM(stream, handle);
    if (!holds(to, bytes, __func__) || !holds(from, bytes, __func__)) return INVALID_VALUE;
    for (Address at : {to, from}) use(at, stream, __func__);
    return queue(stream, [=] {
        memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
        return int(SUCCESS);
    });
}

// Graphs.

EXPORTED int cuStreamBeginCapture_v2(void* handle, int) {
    CALL_IN_CONTEXT;
    STREAM(stream, handle);
    NOT_WHILE_CAPTURING(stream);
    stream->captures = true;
    stream->invalid = false;
    stream->graph = std::make_unique<Graph>(Graph{current, {}});
    return SUCCESS;
}

EXPORTED int cuStreamEndCapture(void* handle, void** graph) {
    CALL_IN_CONTEXT;
    STREAM(stream, handle);
    if (!stream->captures) {
        complain("cuStreamEndCapture without a capture");
        return INVALID_VALUE;
    }
    stream->captures = false;
    *graph = nullptr;
    if (stream->invalid) return STREAM_CAPTURE_INVALIDATED;
    *graph = stream->graph.release();
    graphs.insert(*graph);
    return SUCCESS;
}

EXPORTED int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
    CALL_IN_CONTEXT;
    if (!graphs.count(graph)) {
        complain("cuGraphInstantiateWithFlags of a graph that does not exist");
        return INVALID_VALUE;
    }
    *executable = new Graph(*static_cast<Graph*>(graph));
    executables.insert(*executable);
    report.numbers["graphs"]++;
    return SUCCESS;
}

/// Deletes a graph of `those`. Complains if it is not among them.
static int destroy(std::set<void*>& those, void* graph, const char* call) {
    if (!those.erase(graph)) {
        complain("%s of a graph that does not exist", call);
        return INVALID_VALUE;
    }
    delete static_cast<Graph*>(graph);
    return SUCCESS;
}

EXPORTED int cuGraphDestroy(void* graph) {
    CALL_IN_CONTEXT;
    return destroy(graphs, graph, __func__);
}

EXPORTED int cuGraphExecDestroy(void* executable) {
    CALL_IN_CONTEXT;
    return destroy(executables, executable, __func__);
}

EXPORTED int cuGraphLaunch(void* executable, void* handle) {
    CALL_IN_CONTEXT;
    STREAM(stream, handle);
    NOT_WHILE_CAPTURING(stream);
    if (!executables.count(executable)) {
        complain("cuGraphLaunch of a graph that does not exist");
        return INVALID_VALUE;
    }
    auto& nodes = static_cast<Graph*>(executable)->nodes;
    report.numbers["graph_launches"]++;
    report.numbers["graph_nodes"] += nodes.size();
    for (auto& node : nodes)
        if (int result = node()) return result;
    return SUCCESS;
}

// Modules and kernels.

/// Returns the length of a cubin, which its ELF header states.
static size_t length_of(const unsigned char* elf) {
    uint64_t sections;
    uint16_t size, count;
    memcpy(&sections, elf + 0x28, 8);
    memcpy(&size, elf + 0x3a, 2);
    memcpy(&count, elf + 0x3c, 2);
    return sections + size_t(size) * count;
}

/// Returns the architecture of a cubin, ten times its major number plus its minor number.
static int architecture_of(const unsigned char* elf) {
    uint32_t flags;
    memcpy(&flags, elf + 0x30, 4);
    // The eighth version of the format moved the number.
    return elf[8] >= 8 ? flags >> 8 & 0xff : flags & 0xff;
}

/// Returns a number `major.minor` after `word` as ten times `major` plus `minor`, or `major` alone. Returns 0 if there is none.
static int number_after(const std::string& text, const char* word) {
    size_t at = text.find(word);
    if (at == std::string::npos) return 0;
    int major = 0, minor = 0;
    return sscanf(text.c_str() + at + strlen(word), "%d.%d", &major, &minor) == 2 ? 10 * major + minor : major;
}

/// Returns the file of kernels whose name, with `.cu`, is in an image, or an empty string.
static std::string file_in(const char* image, size_t length) {
    for (const emu::Kernel* kernel = emu::kernels; kernel; kernel = kernel->next) {
        std::string name = std::string(kernel->file) + ".cu";
        const char* at = image;
        while ((at = static_cast<const char*>(memmem(at, length - size_t(at - image), name.data(), name.size())))) {
            bool begins = at == image || !(isalnum(at[-1]) || at[-1] == '_');
            if (begins) return kernel->file;
            at++;
        }
    }
    return "";
}

EXPORTED int cuModuleLoadData(void** module, const void* image) {
    CALL_IN_CONTEXT;
    if (is_captured()) {
        complain("cuModuleLoadData while a stream is being captured");
        return STREAM_CAPTURE_UNSUPPORTED;
    }
    auto bytes = static_cast<const unsigned char*>(image);
    bool is_elf = !memcmp(bytes, "\x7f" "ELF", 4);
    size_t length = is_elf ? length_of(bytes) : strlen(static_cast<const char*>(image));
    if (is_elf) {
        int got = architecture_of(bytes);
        // Machine code runs on devices with the same major number and at least the same minor number.
        if (got / 10 != settings.architecture / 10 || got > settings.architecture) return NO_BINARY_FOR_GPU;
        report.numbers["cubins"]++;
    } else {
        std::string text(static_cast<const char*>(image), length);
        if (!number_after(text, ".version ")) return INVALID_IMAGE;
        if (number_after(text, ".target sm_") > settings.architecture) return INVALID_PTX;
        // PTX 9.0 belongs to CUDA 13.0, PTX 8.0 to CUDA 12.0.
        if (number_after(text, ".version ") + 40 > settings.driver / 1000 * 10 + settings.driver % 1000 / 10) return UNSUPPORTED_PTX_VERSION;
        report.numbers["ptx_modules"]++;
    }
    std::string file = file_in(static_cast<const char*>(image), length);
    if (file.empty()) {
        complain("cuModuleLoadData: the image names no file of kernels");
        return INVALID_IMAGE;
    }
    *module = new Module{file};
    modules.insert(*module);
    return SUCCESS;
}

EXPORTED int cuModuleGetFunction(void** function, void* handle, const char* name) {
    CALL_IN_CONTEXT;
    if (!modules.count(handle)) {
        complain("cuModuleGetFunction of a module that does not exist");
        return INVALID_VALUE;
    }
    const std::string& file = static_cast<Module*>(handle)->file;
    for (const emu::Kernel* kernel = emu::kernels; kernel; kernel = kernel->next)
        if (file == kernel->file && !strcmp(kernel->name, name)) {
            *function = new Function{file, name, kernel};
            return SUCCESS;
        }
    complain("cuModuleGetFunction: %s.cu has no kernel %s", file.c_str(), name);
    return NOT_FOUND;
}

EXPORTED int cuFuncSetAttribute(void* function, int attribute, int value) {
    CALL_IN_CONTEXT;
    if (attribute != FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE) {
        complain("cuFuncSetAttribute: the stand-in knows no attribute %d", attribute);
        return INVALID_VALUE;
    }
    auto f = static_cast<Function*>(function);
    if (value < 0 || value > settings.shared) {
        complain("%s/%s: %d bytes of shared memory, at most %d", f->file.c_str(), f->name.c_str(), value, settings.shared);
        return INVALID_VALUE;
    }
    f->shared = unsigned(value);
    return SUCCESS;
}

extern "C" const char* emulated_launch(const char* file, const char* name, const unsigned* grid, unsigned threads, size_t shared, void** args,
                                       const size_t* sizes, size_t count, uint64_t seed);

extern "C" void emulated_early(bool early);

/// A launch with a copy of its arguments, as graphs keep them.
struct Launch {
    const Function* function;
    unsigned grid[3], threads, shared;
    bool early;
    std::vector<std::vector<char>> values;

    int run() const {
        std::string name = function->file + "/" + function->name;
        uint64_t count = ++report.numbers["launches"];
        report.kernels[name]++;
        if (!settings.computes) return SUCCESS;
        auto copies = values;
        std::vector<void*> pointers;
        for (auto& value : copies) pointers.push_back(value.data());
        auto& sizes = function->kernel->sizes;
        uint64_t seed = settings.seed * (count * 2 + 0x9e3779b97f4a7c15ull);
        running = function;
        report.numbers["early_launches"] += early;
        emulated_early(early);
        const char* why = emulated_launch(function->file.c_str(), function->name.c_str(), grid, threads, shared, pointers.data(), sizes.data(),
                                          sizes.size(), seed);
        running = nullptr;
        if (why) complain("kernel %s: %s", name.c_str(), why);
        if (why || name == settings.fault) current->failure = ILLEGAL_ADDRESS;
        return settings.blocking ? current->failure : int(SUCCESS);
    }
};

/// Attributes of a launch, as cuda.h lays them out.
struct LaunchAttribute {
    int id, pad;
    union { int value; char room[64]; };
};
struct Config {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
    void* stream;
    LaunchAttribute* attributes;
    unsigned count;
};
EXPORTED int cuLaunchKernelEx(const Config* config, void* handle, void** arguments, void** extra) {
    CALL_IN_CONTEXT;
    STREAM(stream, config->stream);
    auto& [grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, of, attributes, count] = *config;
    auto function = static_cast<const Function*>(handle);
    const char* name = function->name.c_str();
    if (!grid_x || !grid_y || !grid_z || grid_x > 0x7fffffff || grid_y > 65535 || grid_z > 65535) {
        complain("%s: a grid of %u×%u×%u blocks", name, grid_x, grid_y, grid_z);
        return INVALID_VALUE;
    }
    if (!block_x || block_y != 1 || block_z != 1 || block_x > function->kernel->max_threads || block_x > 1024) {
        complain("%s: %u×%u×%u threads, at most %u", name, block_x, block_y, block_z, function->kernel->max_threads);
        return INVALID_VALUE;
    }
    if (shared > function->shared) {
        complain("%s: %u bytes of shared memory of the %u that were asked for", name, shared, function->shared);
        return INVALID_VALUE;
    }
    bool early = count == 1 && attributes->id == LAUNCH_ATTRIBUTE_STARTS_EARLY && attributes->value == 1;
    if (count > 0 && !early) {
        complain("%s: the stand-in knows no such attribute of a launch", name);
        return INVALID_VALUE;
    }
    if (early && (settings.architecture < 90 || settings.driver < 12030)) {
        complain("%s: starts early on compute capability %d with CUDA %d", name, settings.architecture, settings.driver);
        return INVALID_VALUE;
    }
    if (early && (!stream->captures || stream->graph->nodes.empty())) {
        complain("%s: starts early without a kernel of the same graph before it", name);
        return INVALID_VALUE;
    }
    if (extra) {
        complain("%s: arguments as a buffer", name);
        return INVALID_VALUE;
    }
    auto launch = std::make_shared<Launch>(Launch{function, {grid_x, grid_y, grid_z}, block_x, shared, early, {}});
    for (size_t i = 0; i < function->kernel->sizes.size(); i++) {
        auto value = static_cast<char*>(arguments[i]);
        launch->values.emplace_back(value, value + function->kernel->sizes[i]);
    }
    stream->kernels++;
    // Eight bytes of an argument may be the address of an array.
    for (auto& value : launch->values)
        for (size_t at = 0; at + sizeof(Address) <= value.size() && !stream->captures; at += sizeof(Address)) {
            Address word;
            memcpy(&word, value.data() + at, sizeof word);
            use(word, stream, name);
        }
    return queue(stream, [launch] { return launch->run(); });
}
