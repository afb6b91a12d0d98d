// The formats of the cache as bytes: which there are, encoding and decoding. Attention and storing know no bits.
//
// FP8 is E4M3FN, E4M3FNUZ and E5M2 (Micikevicius et al. 2022; Noune et al. 2022), whose values are all exact in BF16.
// So are those of INT8, whose code 0x80 is not needed for -128 in a symmetric range: it is NaN.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "freight.h"
#include "simd.h"

namespace freight {

constexpr int bytes_of(FreightFormat f) {
  return f == FREIGHT_FLOAT32 ? 4 : f == FREIGHT_FLOAT16 || f == FREIGHT_BFLOAT16 ? 2 : 1;
}

// Stored as a byte that encodes the true value divided by a scale.
constexpr bool is_quantized(FreightFormat f) { return bytes_of(f) == 1; }

// call(std::integral_constant<FreightFormat, F>) with the constant of a format that is known at run time.
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

// Half a step above the largest value: larger magnitudes do not round to it; they are clipped.
constexpr float overflow_of(FreightFormat f) {
  return f == FREIGHT_E5M2 ? 61440.0f : f == FREIGHT_E4M3FN ? 464.0f : f == FREIGHT_INT8 ? 127.5f : 248.0f;
}

// float of a quantized byte, from its definition. For building tables.
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
  constexpr uint32_t magic = (uint32_t)(128 - bias + dropped) << 23;  // its last bit is worth a subnormal's
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
  const float magic = 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer, whose last byte is the sum's
  const float least = value < -127.0f ? -127.0f : value, clamped = least > 127.0f ? 127.0f : least;
  return (uint8_t)(value != value ? 0x80 : float_to_bits(clamped + magic));
}

// Quantized byte of a float: saturates, rounds to nearest, ties to even; NaN stays NaN (E4M3FN and E5M2: with its
// sign). Branch-free, so that loops over it become vectors.
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

// Eight stored values as floats.
template <FreightFormat F>
inline void decode8(const uint8_t* from, float* to) {
#if FREIGHT_AVX512 || FREIGHT_AVX2
  if constexpr (F == FREIGHT_FLOAT32) {
    std::memcpy(to, from, 32);
  } else if constexpr (bytes_of(F) == 2) {
    const __m128i code = _mm_loadu_si128((const __m128i*)from);
    if constexpr (F == FREIGHT_FLOAT16)
      _mm256_storeu_ps(to, _mm256_cvtph_ps(code));
    else
      _mm256_storeu_si256((__m256i*)to, _mm256_slli_epi32(_mm256_cvtepu16_epi32(code), 16));
  } else if constexpr (F == FREIGHT_INT8) {
    const __m256i code = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
    const __m256i nan = _mm256_cmpeq_epi32(code, _mm256_set1_epi32(-128));  // all bits set: a NaN
    _mm256_storeu_ps(to, _mm256_or_ps(_mm256_cvtepi32_ps(code), (__m256)nan));
  } else {  // by way of float16, whose exponent's bias is 15
    const __m128i code = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from));
    if constexpr (F == FREIGHT_E5M2) {
      _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_slli_epi16(code, 8)));
    } else {
      const __m128i low = _mm_set1_epi16(0x7F), magnitude = _mm_and_si128(code, low);
      const __m128i is_nan = _mm_cmpeq_epi16(code, _mm_set1_epi16(0x80));
      const __m128i nan = F == FREIGHT_E4M3FNUZ ? is_nan : _mm_cmpeq_epi16(magnitude, low);
      const __m128i sign = _mm_slli_epi16(_mm_andnot_si128(low, code), 8);
      const __m128i half = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(magnitude, 7), sign),
                                        _mm_and_si128(nan, _mm_set1_epi16(0x7E00)));
      const __m256 scale = _mm256_set1_ps(F == FREIGHT_E4M3FNUZ ? 128.0f : 256.0f);
      _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtph_ps(half), scale));
    }
  }
#else
  if constexpr (is_quantized(F)) {
    const float* value = code_table<F>().value;
    for (int i = 0; i < 8; i++) to[i] = value[from[i]];
  } else {
    read_row(from, F, 8, to);
  }
#endif
}

template <FreightFormat F>
inline void decode_row(const uint8_t* from, int n, float* to) {
  int i = 0;
  for (; i + 8 <= n; i += 8) decode8<F>(from + i * bytes_of(F), to + i);
  if (i < n) {
    uint8_t tail[8 * bytes_of(F)] = {};
    float values[8];
    std::memcpy(tail, from + i * bytes_of(F), (size_t)(n - i) * bytes_of(F));
    decode8<F>(tail, values);
    std::memcpy(to + i, values, sizeof(float) * (size_t)(n - i));
  }
}

#if FREIGHT_AVX512

// 64 codes of a quantized format -> BF16, by tables of the low and the high byte: `first` has the first eight of each
// 16 codes, `last` the last eight.
template <FreightFormat F>
struct Decoder {
  __m512i low0, low1, high0, high1;

  Decoder() {
    if constexpr (is_quantized(F)) {
      const CodeTable& table = code_table<F>();
      low0 = _mm512_load_si512(table.low), low1 = _mm512_load_si512(table.low + 64);
      high0 = _mm512_load_si512(table.high), high1 = _mm512_load_si512(table.high + 64);
    }
  }

  void operator()(__m512i code, __m512i& first, __m512i& last) const {
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    const __m512i magnitude = F == FREIGHT_INT8 ? _mm512_abs_epi8(code) : code;  // the look-ups ignore the top bit
    __m512i low = _mm512_permutex2var_epi8(low0, magnitude, low1);
    __m512i high = _mm512_permutex2var_epi8(high0, magnitude, high1);
    high = _mm512_ternarylogic_epi32(high, code, sign, 0xF8);  // high | (code & sign)
    if constexpr (F == FREIGHT_E4M3FNUZ || F == FREIGHT_INT8) {
      const __mmask64 nan = _mm512_cmpeq_epi8_mask(code, sign);
      low = _mm512_mask_blend_epi8(nan, low, _mm512_set1_epi8((char)0xC0));
      high = _mm512_mask_blend_epi8(nan, high, _mm512_set1_epi8(0x7F));
    }
    first = _mm512_unpacklo_epi8(low, high);
    last = _mm512_unpackhi_epi8(low, high);
  }
};

#endif

}  // namespace freight
