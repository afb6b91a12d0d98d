// The formats of the cache as bytes: decoding tables, and float conversions that every build has.
//
// FP8 here is E4M3FN, E4M3FNUZ and E5M2 (Micikevicius et al. 2022; Noune et al. 2022). Every FP8 value is exact in BF16.
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

// float of an FP8 byte, from its definition. For building tables.
inline float fp8_value(FreightFormat format, int code) {
  const int mantissa_bits = format == FREIGHT_E5M2 ? 2 : 3, bias = format == FREIGHT_E5M2 ? 15 : format == FREIGHT_E4M3FN ? 7 : 8;
  const int magnitude = code & 0x7F, exponent = magnitude >> mantissa_bits, mantissa = magnitude & ((1 << mantissa_bits) - 1);
  const float sign = code & 0x80 ? -1.0f : 1.0f, nan = std::numeric_limits<float>::quiet_NaN();
  if (format == FREIGHT_E4M3FN && magnitude == 0x7F) return nan;
  if (format == FREIGHT_E4M3FNUZ && code == 0x80) return nan;
  if (format == FREIGHT_E5M2 && exponent == 31) return mantissa ? nan : sign * std::numeric_limits<float>::infinity();
  if (exponent == 0) return sign * std::ldexp((float)mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((float)(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
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
