// Stored formats, and conversion of one value at a time from and to its bits (vec.h converts sixteen).
//
// FP8 is E4M3FN, E4M3FNUZ and E5M2 (Micikevicius et al. 2022; Noune et al. 2022), whose values are all exact in BF16.
// So are those of INT8, whose code 0x80 is NaN: a symmetric range does not need -128.
// Decoding is exact, subnormals included, and NaN stays NaN.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "freight.h"

namespace freight {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float bf16_to_float(uint16_t value) { return bits_to_float(static_cast<uint32_t>(value) << 16); }

// Round to nearest, ties to even; NaN stays a (quiet) NaN. Branch-free, so that loops over it vectorize.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(value != value ? (bits >> 16 | 0x40) : rounded);
}

// Exact, subnormals, infinities and NaN included.
inline float f16_to_float(uint16_t value) {
  const uint32_t magnitude = value & 0x7FFFu, sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const float scaled = bits_to_float(magnitude << 13) * 0x1p112f;  // the bias is 15 in float16, 127 in float32
  const uint32_t bits = magnitude >= 0x7C00u ? (magnitude << 13 | 0x7F800000u) : float_to_bits(scaled);
  return bits_to_float(bits | sign);
}

// Round to nearest, ties to even; beyond the range: infinity.
inline uint16_t float_to_f16(float value) {
  const uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u)
    half = 0x7E00u;
  else if (magnitude >= 0x477FF000u)
    half = 0x7C00u;
  else if (magnitude < 0x38800000u)  // below 2^-14: a multiple of 2^-24, which adding 0.5 rounds to
    half = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3F000000u;
  else
    half = (magnitude + 0xFFFu + (magnitude >> 13 & 1) - 0x38000000u) >> 13;
  return static_cast<uint16_t>(sign | half);
}

constexpr int bytes_of(int32_t f) {
  return f == FREIGHT_FLOAT32 ? 4 : f == FREIGHT_FLOAT16 || f == FREIGHT_BFLOAT16 ? 2 : 1;
}

// Say whether values are stored as bytes that encode the true value divided by a scale.
constexpr bool is_quantized(int32_t f) { return bytes_of(f) == 1; }

// Call call(std::integral_constant<FreightFormat, F>()) for a format that is known only at run time.
template <class Call>
void for_format(int32_t format, const Call& call) {
  switch (format) {
    case FREIGHT_FLOAT32: return call(std::integral_constant<FreightFormat, FREIGHT_FLOAT32>());
    case FREIGHT_FLOAT16: return call(std::integral_constant<FreightFormat, FREIGHT_FLOAT16>());
    case FREIGHT_BFLOAT16: return call(std::integral_constant<FreightFormat, FREIGHT_BFLOAT16>());
    case FREIGHT_E4M3FN: return call(std::integral_constant<FreightFormat, FREIGHT_E4M3FN>());
    case FREIGHT_E5M2: return call(std::integral_constant<FreightFormat, FREIGHT_E5M2>());
    case FREIGHT_E4M3FNUZ: return call(std::integral_constant<FreightFormat, FREIGHT_E4M3FNUZ>());
    case FREIGHT_INT8: return call(std::integral_constant<FreightFormat, FREIGHT_INT8>());
  }
}

constexpr int mantissa_bits(FreightFormat fp8) { return fp8 == FREIGHT_E5M2 ? 2 : 3; }
constexpr int exponent_bias(FreightFormat fp8) { return fp8 == FREIGHT_E5M2 ? 15 : fp8 == FREIGHT_E4M3FN ? 7 : 8; }
constexpr float max_of(FreightFormat f) {
  return f == FREIGHT_E5M2 ? 57344.0f : f == FREIGHT_E4M3FN ? 448.0f : f == FREIGHT_INT8 ? 127.0f : 240.0f;
}

// Half a step above the largest value: larger magnitudes do not round to that value, but are clipped to it.
constexpr float overflow_of(FreightFormat f) {
  return f == FREIGHT_E5M2 ? 61440.0f : f == FREIGHT_E4M3FN ? 464.0f : f == FREIGHT_INT8 ? 127.5f : 248.0f;
}

// The float of a quantized byte, computed from the definition of its format; used to build tables.
inline float value_of(FreightFormat format, int code) {
  const int bits = mantissa_bits(format), bias = exponent_bias(format);
  const int magnitude = code & 0x7F, exponent = magnitude >> bits, mantissa = magnitude & ((1 << bits) - 1);
  const float sign = code & 0x80 ? -1.0f : 1.0f, nan = std::numeric_limits<float>::quiet_NaN();
  if (format == FREIGHT_E4M3FN && magnitude == 0x7F) return nan;
  if ((format == FREIGHT_E4M3FNUZ || format == FREIGHT_INT8) && code == 0x80) return nan;
  if (format == FREIGHT_INT8) return (float)(int8_t)code;
  if (format == FREIGHT_E5M2 && exponent == 31) return mantissa ? nan : sign * std::numeric_limits<float>::infinity();
  if (exponent == 0) return sign * std::ldexp((float)mantissa, 1 - bias - bits);
  return sign * std::ldexp((float)(mantissa + (1 << bits)), exponent - bias - bits);
}

template <FreightFormat F>
inline uint8_t fp8_code(float value) {
  constexpr int dropped = 23 - mantissa_bits(F), bias = exponent_bias(F);
  constexpr uint32_t smallest_normal = (uint32_t)(128 - bias) << 23;  // 2 ** (1 - bias)
  constexpr uint32_t magic = (uint32_t)(128 - bias + dropped) << 23;  // its last bit has the value of a subnormal's
  const uint32_t sign = float_to_bits(value) >> 24 & 0x80;
  const float magnitude = bits_to_float(float_to_bits(value) & 0x7FFFFFFF);
  const float clamped = magnitude > max_of(F) ? max_of(F) : magnitude;
  const uint32_t bits = float_to_bits(clamped);
  const uint32_t rounded = bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
  const uint32_t normal = (rounded >> dropped) - ((uint32_t)(127 - bias) << mantissa_bits(F));
  const uint32_t subnormal = float_to_bits(clamped + bits_to_float(magic)) - magic;
  const uint32_t code = bits < smallest_normal ? subnormal : normal;
  if (F == FREIGHT_E4M3FNUZ) return (uint8_t)(value != value ? 0x80 : code == 0 ? 0 : code | sign);
  return (uint8_t)(sign | (value != value ? 0x7F : code));
}

inline uint8_t int8_code(float value) {
  const float magic = 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer; the last byte of the sum is its code
  const float least = value < -127.0f ? -127.0f : value, clamped = least > 127.0f ? 127.0f : least;
  return (uint8_t)(value != value ? 0x80 : float_to_bits(clamped + magic));
}

// The quantized byte of a float: rounded to nearest, ties to even, saturating; NaN stays NaN (in E4M3FN and E5M2 with
// its sign). Branch-free, so that loops over it vectorize.
template <FreightFormat F>
inline uint8_t code_of(float value) {
  if constexpr (F == FREIGHT_INT8) return int8_code(value);
  else return fp8_code<F>(value);
}

// All 256 floats of a quantized format, and the two BF16 bytes of its 128 non-negative codes.
struct CodeTable {
  alignas(64) float value[256];
  alignas(64) uint8_t low[128], high[128];
  explicit CodeTable(FreightFormat format) {
    for (int code = 0; code < 256; code++) value[code] = value_of(format, code);
    for (int code = 0; code < 128; code++) {
      low[code] = float_to_bits(value[code]) >> 16 & 0xFF;
      high[code] = float_to_bits(value[code]) >> 24;
    }
  }
};

template <FreightFormat F>
const CodeTable& code_table() {
  static const CodeTable table(F);
  return table;
}

}  // namespace freight
