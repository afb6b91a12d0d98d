// Rows: conversion between stored formats and float32, and the RMSNorm that norms between layers and of heads share.
//
// Operations compute in float32 and round to the row's format where the reference rounds.
#pragma once
#include <algorithm>
#include <cmath>

#include "freight.h"
#include "vec.h"

namespace freight {

constexpr int64_t kShare = 32768;  // elements per thread: fewer are not worth another thread

// The number of threads for row-wise operations. Small inputs get one: waking another takes longer than the rows of a
// decode step.
inline int threads_for(int64_t elements, int threads) {
  return static_cast<int>(std::min<int64_t>(threads, elements / kShare + 1));
}

inline int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }
inline int lanes_at(int64_t i, int64_t size) { return static_cast<int>(std::min<int64_t>(kLanes, size - i)); }

inline const char* element(const void* base, int64_t index, int32_t format) {
  return static_cast<const char*>(base) + index * bytes_of(format);
}
inline char* element(void* base, int64_t index, int32_t format) {
  return static_cast<char*>(base) + index * bytes_of(format);
}

// The first `count` (1 .. 16) values from `from` on, zeros after them.
template <FreightFormat F>
inline V16 load_as(const void* from, int count) {
  if (count == kLanes) return load_as<F>(from);
  alignas(64) char all[kLanes * bytes_of(F)] = {};
  std::memcpy(all, from, static_cast<size_t>(count * bytes_of(F)));
  return load_as<F>(all);
}
inline V16 load_as(const void* from, int32_t format, int count) {
  return format == FREIGHT_FLOAT32    ? load_as<FREIGHT_FLOAT32>(from, count)
         : format == FREIGHT_BFLOAT16 ? load_as<FREIGHT_BFLOAT16>(from, count)
                                      : load_as<FREIGHT_FLOAT16>(from, count);
}

// Store the first `count` lanes in `format` (float32, float16 or bfloat16).
inline void store_as(void* to, V16 v, int32_t format, int count) {
  alignas(64) char all[kLanes * 4];
  void* at = count == kLanes ? to : all;
  if (format == FREIGHT_FLOAT32)
    store_as<FREIGHT_FLOAT32>(at, v);
  else if (format == FREIGHT_BFLOAT16)
    store_as<FREIGHT_BFLOAT16>(at, v);
  else
    store_as<FREIGHT_FLOAT16>(at, v);
  if (count < kLanes) std::memcpy(to, all, static_cast<size_t>(count * bytes_of(format)));
}

// `n` stored values -> padded(n) floats, zeros after the n-th.
template <FreightFormat F>
inline void read_row(const void* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += kLanes) store(to + i, load_as<F>(element(from, i, F), lanes_at(i, n)));
}
inline void read_row(const void* from, int32_t format, int64_t n, float* to) {
  if (format == FREIGHT_FLOAT32)
    read_row<FREIGHT_FLOAT32>(from, n, to);
  else if (format == FREIGHT_BFLOAT16)
    read_row<FREIGHT_BFLOAT16>(from, n, to);
  else
    read_row<FREIGHT_FLOAT16>(from, n, to);
}

// Store `n` values in `format` (float32, float16 or bfloat16); `values` is readable up to padded(n).
inline void write_row(const float* values, int32_t format, int64_t n, void* to) {
  for (int64_t i = 0; i < n; i += kLanes)
    store_as(element(to, i, format), load16(values + i), format, lanes_at(i, n));
}

// Round values to those that `format` can store.
inline V16 rounded_to(V16 values, int32_t format) {
  if (format == FREIGHT_FLOAT32) return values;
  alignas(64) char stored[kLanes * 2];
  store_as(stored, values, format, kLanes);
  return load_as(stored, format, kLanes);
}

// The largest finite magnitude. It is compared as integers, whose order the compiler may change, so that it vectorizes.
inline float largest_finite(const float* values, int64_t size) {
  int32_t largest = 0;
  for (int64_t i = 0; i < size; i++) {
    const int32_t magnitude = static_cast<int32_t>(float_to_bits(values[i]) & 0x7FFFFFFFu);
    const int32_t finite = magnitude < 0x7F800000 ? magnitude : 0;
    largest = largest > finite ? largest : finite;
  }
  return bits_to_float(static_cast<uint32_t>(largest));
}

// amax / max, but at least the smallest normal float32.
inline float scale_from(float amax, float max) { return std::max(amax / max, 0x1p-126f); }

// The sum of squares: by lanes, then over the lanes in order.
inline float sum_of_squares(const float* values, int64_t size) {
  V16 sums{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const V16 v = load16(values + i);
    sums = fma(v, v, sums);
  }
  float lanes[kLanes], sum = 0.f;
  store(lanes, sums);
  for (float lane : lanes) sum += lane;
  return sum;
}

// values = values / sqrt(mean(values^2) + eps) * weight, in place, rounded to `format`. Zeros must follow up to
// padded(size). A weight in `format` multiplies the rounded norm; a float32 weight multiplies before the only rounding.
inline void rms_norm(float* values, const void* weight, int32_t weight_format, int64_t size, int32_t format,
                     float eps) {
  const float mean = sum_of_squares(values, padded(size)) / static_cast<float>(size);
  const V16 scale = set16(1.f / std::sqrt(mean + eps));
  const int32_t between = weight_format == format ? format : FREIGHT_FLOAT32;
  for (int64_t i = 0; i < size; i += kLanes) {
    const V16 normed = rounded_to(load16(values + i) * scale, between);
    const V16 factor = load_as(element(weight, i, weight_format), weight_format, lanes_at(i, size));
    store(values + i, rounded_to(factor * normed, format));
  }
}

}  // namespace freight
