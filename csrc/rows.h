// Rows of 16- and 32-bit values, sixteen floats at a time, and RMSNorm, which the norms between layers and those of heads
// share. As the reference: float32 inside, rounded to the row's format where it rounds.
#pragma once
#include <algorithm>
#include <cmath>

#include "freight.h"
#include "simd.h"

namespace freight {

constexpr int kLanes = 16;
constexpr int64_t kShare = 32768;  // elements that are worth a second thread

// Only large inputs are distributed over threads: waking one takes longer than the rows of a decode step.
inline int threads_for(int64_t elements, int threads) {
  return static_cast<int>(std::min<int64_t>(threads, elements / kShare + 1));
}

inline int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }
inline int lanes_at(int64_t i, int64_t size) { return static_cast<int>(std::min<int64_t>(kLanes, size - i)); }
inline int64_t size_of(int32_t format) { return format == FREIGHT_FLOAT32 ? 4 : 2; }

inline V16 load_16(const char* from, int32_t format) {
  if (format == FREIGHT_FLOAT32) return load16(reinterpret_cast<const float*>(from));
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
  return format == FREIGHT_BFLOAT16 ? bf16_to_16(halves) : f16_to_16(halves);
}

// The `count` (1 .. 16) values at element `first` of `from`, zeros after them.
inline V16 load_as(const void* from, int64_t first, int32_t format, int count) {
  const char* at = static_cast<const char*>(from) + first * size_of(format);
  if (count == kLanes) return load_16(at, format);
  alignas(64) char all[64] = {};
  std::memcpy(all, at, static_cast<size_t>(count * size_of(format)));
  return load_16(all, format);
}

// The values that `format` stores for them.
inline V16 rounded_to(V16 values, int32_t format) {
  if (format == FREIGHT_FLOAT32) return values;
  alignas(64) char stored[64];
  store_as(stored, values, format, kLanes);
  return load_16(stored, format);
}

// The largest finite magnitude. Compared as integers, which a compiler may take in any order: so this becomes vectors.
inline float largest_finite(const float* values, int64_t size) {
  int32_t largest = 0;
  for (int64_t i = 0; i < size; i++) {
    const int32_t magnitude = static_cast<int32_t>(float_to_bits(values[i]) & 0x7FFFFFFFu);
    const int32_t finite = magnitude < 0x7F800000 ? magnitude : 0;
    largest = largest > finite ? largest : finite;
  }
  return bits_to_float(static_cast<uint32_t>(largest));
}

// amax / max, as large as the smallest normal float32 at least.
inline float scale_from(float amax, float max) { return std::max(amax / max, 0x1p-126f); }

inline char* element(void* base, int64_t index, int32_t format) {
  return static_cast<char*>(base) + index * size_of(format);
}

// In lanes, and the lanes in order.
inline float sum_of_squares(const float* values, int64_t size) {
  V16 sums = zero16();
  for (int64_t i = 0; i < size; i += kLanes) {
    const V16 v = load16(values + i);
    sums = madd16(v, v, sums);
  }
  float lanes[kLanes], sum = 0.f;
  store16(lanes, sums);
  for (float lane : lanes) sum += lane;
  return sum;
}

// values = values / sqrt(mean(values^2) + eps) * weight, in place, as `format` stores them. Zeros follow up to
// padded(size). A weight in `format` multiplies the rounded norm; a float32 weight multiplies before the one rounding.
inline void rms_norm(float* values, const void* weight, int32_t weight_format, int64_t size, int32_t format,
                     float eps) {
  const float mean = sum_of_squares(values, padded(size)) / static_cast<float>(size);
  const V16 scale = splat16(1.f / std::sqrt(mean + eps));
  const int32_t between = weight_format == format ? format : FREIGHT_FLOAT32;
  for (int64_t i = 0; i < size; i += kLanes) {
    const V16 normed = rounded_to(mul16(load16(values + i), scale), between);
    store16(values + i, rounded_to(mul16(load_as(weight, i, weight_format, lanes_at(i, size)), normed), format));
  }
}

}  // namespace freight
