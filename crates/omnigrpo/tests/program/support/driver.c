/* Stands in for NVIDIA's driver: answers what a program asks before it uses a card, as the variables of the environment say. */
#include <stdlib.h>
#include <string.h>

static int number(const char* name, int otherwise) {
    const char* text = getenv(name);
    return text ? atoi(text) : otherwise;
}
int cuInit(unsigned flags) { (void)flags; return number("DRIVER_INIT", 0); }
int cuDriverGetVersion(int* version) { *version = number("DRIVER_VERSION", 13000); return 0; }
int cuDeviceGetCount(int* count) { *count = number("DRIVER_CARDS", 1); return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int len, int device) { (void)device; strncpy(name, "Stand-in", len); return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { (void)device; *bytes = (size_t)141 << 30; return 0; }
/* Opening a card goes no further than this. */
int cuDevicePrimaryCtxRetain(void** context, int device) { (void)context; (void)device; return number("DRIVER_OPEN", 999); }
int cuGetErrorString(int error, const char** text) { *text = error == 100 ? "no CUDA-capable device" : error == 2 ? "out of memory" : error == 46 ? "busy or unavailable" : "unknown error"; return 0; }
int cuGetErrorName(int error, const char** text) { return cuGetErrorString(error, text); }
/* 75 and 76 are the two numbers of the compute capability. */
int cuDeviceGetAttribute(int* value, int which, int device) {
    (void)device;
    *value = which == 75 ? number("DRIVER_MAJOR", 9) : 0;
    return 0;
}
