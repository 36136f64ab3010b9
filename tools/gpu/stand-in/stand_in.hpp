// What the stand-in libraries share: their settings, their report, and the memory of their devices.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

/// Marks a function that the stand-in gives to programs.
#define EXPORTED extern "C" __attribute__((visibility("default")))

using Address = unsigned long long;

/// Returns a setting from the environment, or `otherwise` if it is absent.
inline const char* setting(const char* name, const char* otherwise) {
    const char* value = getenv(name);
    return value && *value ? value : otherwise;
}
inline unsigned long long setting(const char* name, unsigned long long otherwise) {
    const char* value = getenv(name);
    return value && *value ? strtoull(value, nullptr, 10) : otherwise;
}

// libcuda.so.1 exports these functions for the other stand-ins.
extern "C" {
/// Returns true if the `bytes` bytes from `at` are inside one allocation.
bool stand_in_holds(Address at, size_t bytes);
/// Runs `work(data)` in order with the work of a stream, or records it. Returns a CUresult.
int stand_in_queue(void* stream, void (*work)(void*), void* data);
/// Adds `by` to a number of the report.
void stand_in_count(const char* what, uint64_t by);
/// Adds a complaint to the report, and prints it.
void stand_in_complain(const char* text);
}
