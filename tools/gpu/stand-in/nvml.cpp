// A stand-in for libnvidia-ml.so.1: the health of a card, as the environment states it.
#include "stand_in.hpp"

enum Result { SUCCESS = 0, NOT_SUPPORTED = 3 };

EXPORTED int nvmlInit_v2() { return SUCCESS; }
EXPORTED int nvmlShutdown() { return SUCCESS; }

EXPORTED int nvmlSystemGetDriverVersion(char* version, unsigned length) {
    snprintf(version, length, "%s", setting("STAND_IN_RELEASE", "580.65.06"));
    return SUCCESS;
}

EXPORTED int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
    static int one;
    *device = &one;
    return SUCCESS;
}

EXPORTED int nvmlDeviceGetMigMode(void*, unsigned* now, unsigned* pending) {
    *now = *pending = unsigned(setting("STAND_IN_MIG", 0ull));
    return SUCCESS;
}

/// Errors since the driver was loaded (`counter` 0) or in the life of the card, which memory could not correct (`type` 1).
EXPORTED int nvmlDeviceGetTotalEccErrors(void*, int type, int counter, unsigned long long* count) {
    if (!setting("STAND_IN_ECC", 1ull)) return NOT_SUPPORTED;
    *count = type == 1 && counter == 0 ? setting("STAND_IN_ECC_ERRORS", 0ull) : 0;
    return SUCCESS;
}

EXPORTED int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* reasons) {
    *reasons = setting("STAND_IN_THROTTLE", 0ull);
    return SUCCESS;
}

struct Rates { unsigned gpu, memory; };

EXPORTED int nvmlDeviceGetUtilizationRates(void*, Rates* rates) {
    if (setting("STAND_IN_MIG", 0ull)) return NOT_SUPPORTED;
    *rates = {unsigned(setting("STAND_IN_BUSY", 50ull)), 0};
    return SUCCESS;
}

struct Memory { unsigned long long total, free, used; };

EXPORTED int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
    memory->total = setting("STAND_IN_MEMORY", 4294967296ull);
    memory->used = memory->total / 4;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

EXPORTED int nvmlDeviceGetTemperature(void*, int, unsigned* degrees) {
    *degrees = 40;
    return SUCCESS;
}
