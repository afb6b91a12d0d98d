// The C interface of the CPU kernels, version 1: what src/freight/kernels/cpu/library.py calls through ctypes.
//
// Plain functions on raw pointers; every array is contiguous and row-major unless its comment says otherwise. Nothing
// here allocates what it returns, throws, or keeps a pointer beyond the call. `threads` is how many threads may work.
// Attention and the KV cache have their own header, attention.h.
#pragma once
#include <cstdint>

#define FREIGHT_API extern "C" __attribute__((visibility("default")))

// Changes when any declaration changes, so that a library from an older build is refused instead of called wrongly.
constexpr int32_t FREIGHT_ABI = 1;
FREIGHT_API int32_t freight_abi();

// How values are stored; the numbers are part of the interface.
enum FreightFormat : int32_t {
  FREIGHT_FLOAT32 = 0,
  FREIGHT_FLOAT16 = 1,
  FREIGHT_BFLOAT16 = 2,
  FREIGHT_E4M3FN = 3,
  FREIGHT_E5M2 = 4,
  FREIGHT_E4M3FNUZ = 5,
};

// Take the caller's OpenMP pool: the address of GOMP_parallel of the runtime that the process uses already (torch's),
// so that one pool of threads exists and two never fight for the cores. Null: a pool of our own. Called once.
typedef void (*FreightGompParallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
FREIGHT_API void freight_init(FreightGompParallel gomp_parallel);
