// The formats of the cache as bytes: encoding, decoding tables, and conversions that every build has.
//
// FP8 is E4M3FN, E4M3FNUZ and E5M2 (Micikevicius et al. 2022; Noune et al. 2022), whose values are all exact in BF16.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "freight.h"
#include "simd.h"

namespace freight {

constexpr int bytes_of(FreightFormat f) {
  return f == FREIGHT_FLOAT32 ? 4 : f == FREIGHT_FLOAT16 || f == FREIGHT_BFLOAT16 ? 2 : 1;
}

constexpr int mantissa_bits(FreightFormat fp8) { return fp8 == FREIGHT_E5M2 ? 2 : 3; }
constexpr int exponent_bias(FreightFormat fp8) { return fp8 == FREIGHT_E5M2 ? 15 : fp8 == FREIGHT_E4M3FN ? 7 : 8; }
constexpr float fp8_max(FreightFormat fp8) {
  return fp8 == FREIGHT_E5M2 ? 57344.0f : fp8 == FREIGHT_E4M3FN ? 448.0f : 240.0f;
}

// Half a step above the largest value: larger magnitudes do not round to it; they are clipped.
constexpr float fp8_overflow(FreightFormat fp8) {
  return fp8 == FREIGHT_E5M2 ? 61440.0f : fp8 == FREIGHT_E4M3FN ? 464.0f : 248.0f;
}

// float of an FP8 byte, from its definition. For building tables.
inline float fp8_value(FreightFormat format, int code) {
  const int bits = mantissa_bits(format), bias = exponent_bias(format);
  const int magnitude = code & 0x7F, exponent = magnitude >> bits, mantissa = magnitude & ((1 << bits) - 1);
  const float sign = code & 0x80 ? -1.0f : 1.0f, nan = std::numeric_limits<float>::quiet_NaN();
  if (format == FREIGHT_E4M3FN && magnitude == 0x7F) return nan;
  if (format == FREIGHT_E4M3FNUZ && code == 0x80) return nan;
  if (format == FREIGHT_E5M2 && exponent == 31) return mantissa ? nan : sign * std::numeric_limits<float>::infinity();
  if (exponent == 0) return sign * std::ldexp((float)mantissa, 1 - bias - bits);
  return sign * std::ldexp((float)(mantissa + (1 << bits)), exponent - bias - bits);
}

// FP8 byte of a float: saturates, rounds to nearest, ties to even; NaN stays NaN (E4M3FN and E5M2: with its sign).
// Branch-free, so that loops over it become vectors.
template <FreightFormat F>
inline uint8_t float_to_fp8(float value) {
  constexpr int dropped = 23 - mantissa_bits(F), bias = exponent_bias(F);
  constexpr uint32_t smallest_normal = (uint32_t)(128 - bias) << 23;  // 2 ** (1 - bias)
  constexpr uint32_t magic = (uint32_t)(128 - bias + dropped) << 23;  // its last bit is worth a subnormal's
  const uint32_t sign = float_to_bits(value) >> 24 & 0x80;
  const float magnitude = bits_to_float(float_to_bits(value) & 0x7FFFFFFF);
  const float clamped = magnitude > fp8_max(F) ? fp8_max(F) : magnitude;
  const uint32_t bits = float_to_bits(clamped);
  const uint32_t rounded = bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
  const uint32_t normal = (rounded >> dropped) - ((uint32_t)(127 - bias) << mantissa_bits(F));
  const uint32_t subnormal = float_to_bits(clamped + bits_to_float(magic)) - magic;
  const uint32_t code = bits < smallest_normal ? subnormal : normal;
  if (F == FREIGHT_E4M3FNUZ) return (uint8_t)(value != value ? 0x80 : code == 0 ? 0 : code | sign);
  return (uint8_t)(sign | (value != value ? 0x7F : code));
}

// All 256 floats of an FP8 format, and the two BF16 bytes of its 128 non-negative codes.
struct Fp8Table {
  alignas(64) float value[256];
  alignas(64) uint8_t low[128], high[128];
  explicit Fp8Table(FreightFormat format) {
    for (int code = 0; code < 256; code++) value[code] = fp8_value(format, code);
    for (int code = 0; code < 128; code++) {
      low[code] = float_to_bits(value[code]) >> 16 & 0xFF;
      high[code] = float_to_bits(value[code]) >> 24;
    }
  }
};

template <FreightFormat F>
const Fp8Table& fp8_table() {
  static const Fp8Table table(F);
  return table;
}

// `n` values of a 16- or 32-bit row as floats.
inline void read_row(const void* row, FreightFormat type, int n, float* out) {
  const uint16_t* half = (const uint16_t*)row;
  if (type == FREIGHT_FLOAT32) std::memcpy(out, row, sizeof(float) * (size_t)n);
  if (type == FREIGHT_BFLOAT16)
    for (int i = 0; i < n; i++) out[i] = bf16_to_float(half[i]);
  if (type == FREIGHT_FLOAT16)
    for (int i = 0; i < n; i++) out[i] = f16_to_float(half[i]);
}

inline void write_row(const float* values, FreightFormat type, int n, void* row) {
  uint16_t* half = (uint16_t*)row;
  if (type == FREIGHT_FLOAT32) std::memcpy(row, values, sizeof(float) * (size_t)n);
  if (type == FREIGHT_BFLOAT16)
    for (int i = 0; i < n; i++) half[i] = float_to_bf16(values[i]);
  if (type == FREIGHT_FLOAT16)
    for (int i = 0; i < n; i++) half[i] = float_to_f16(values[i]);
}

}  // namespace freight
