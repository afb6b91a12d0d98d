// Weights in MXFP4: the layout of their units, and its decoders. Every value decodes exactly to bfloat16, so a product
// has the bits of the same product with weights in bfloat16.
//
// A unit is 32 inputs of 16 rows: 4 lines of 16 words, where a word has the codes of 8 inputs of a row, the first in
// the lowest bits; then a byte for each row, the byte of its scale minus 2 (`kMxBase`). This is 4.25 bits a weight.
// Packing admits only scales with which all values are normal in bfloat16 (freight.h). So scaling a value is an
// addition to its exponent, and AMX tiles, which flush subnormals, do not treat it as zero.
#pragma once
#include "packed.h"

namespace freight {

constexpr int kMxCodes = kMxUnit - kLanes;  // bytes of codes in a unit
constexpr int kMxBase = 2;                  // subtracted from a scale's byte
constexpr float kMxValues[8] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};

#if FREIGHT_AVX512

// Decoder of one input of 16 rows, by the lowest four bits of each word.
struct MxFloats {
  __m512 table;

  MxFloats() {
    alignas(64) float values[16];
    for (int code = 0; code < 16; code++) values[code] = kMxValues[code & 7] * (code & 8 ? -4.f : 4.f);  // 2 ** kMxBase
    table = _mm512_load_ps(values);
  }

  FREIGHT_INLINE static __m512i words(const uint8_t* unit, int line) { return _mm512_loadu_si512(unit + kUnit * line); }
  FREIGHT_INLINE static __m512 scales(const uint8_t* unit) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(unit + kMxCodes));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
  }
  FREIGHT_INLINE V16 operator()(__m512i codes, __m512 scale) const {
    return {(VF)_mm512_mul_ps(_mm512_permutexvar_ps(codes, table), scale)};
  }
};

struct Mxfp4 {
  using Math = Single;
  static constexpr int steps = kMxInputs, at_once = 1;
  static constexpr float factor = 1.f;
  MxFloats floats;
  FREIGHT_INLINE void decode(const uint8_t* unit, int step, V16* out) const {
    const __m512i codes = _mm512_srl_epi32(floats.words(unit, step / 8), _mm_cvtsi32_si128(step % 8 * 4));
    *out = floats(codes, floats.scales(unit));
  }
};

// Decoder to bfloat16 by a look-up of each byte. Exponents in the table are so small that the scale's byte is added.
struct Mxfp4Pair {
  using Math = Pair;
  static constexpr int steps = kMxInputs / 2, at_once = 2;
  static constexpr float factor = 1.f;
  __m512i table, nibbles[4], spread;

  Mxfp4Pair() {
    constexpr uint16_t kLess = (127 - kMxBase) << 7;
    alignas(64) uint8_t bytes[64] = {}, shifts[4][64], from[64];
    for (int code = 0; code < 16; code++) {
      const uint32_t value = float_to_bits(kMxValues[code & 7]) >> 16;
      const uint32_t bits = value ? (value - kLess) | (code & 8 ? 0x8000u : 0u) : 0u;
      bytes[code] = bits & 0xFF, bytes[16 + code] = bits >> 8;
    }
    for (int i = 0; i < 64; i++) {  // byte i of the result: row i / 4, of its two inputs i / 2 % 2
      for (int pair = 0; pair < 4; pair++) shifts[pair][i] = i % 8 / 4 * 32 + pair * 8 + i / 2 % 2 * 4;
      from[i] = i % 2 ? i / 4 : 0x80;
    }
    table = _mm512_load_si512(bytes), spread = _mm512_load_si512(from);
    for (int pair = 0; pair < 4; pair++) nibbles[pair] = _mm512_load_si512(shifts[pair]);
  }

  FREIGHT_INLINE void decode(const uint8_t* unit, int step, __m512i* out) const {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(unit + kMxCodes));
    const __m512i scales = _mm512_srli_epi16(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), spread), 1);
    const __m512i words = _mm512_loadu_si512(unit + step / 4 * kUnit);
    for (int i = 0; i < at_once; i++) {
      const __m512i codes = _mm512_multishift_epi64_epi8(nibbles[step % 4 + i], words);  // in the low halves of bytes
      const __m512i index = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(0x0F0F0F0F),
                                                      _mm512_set1_epi32(0x10001000), 0xEA);  // codes & .. | ..
      const __m512i value = _mm512_permutexvar_epi8(index, table);
      out[i] = _mm512_maskz_add_epi16(_mm512_test_epi16_mask(value, value), value, scales);
    }
  }
};

#else

struct Mxfp4 {
  using Math = Single;
  static constexpr int steps = kMxInputs, at_once = 1;
  static constexpr float factor = 1.f;

  FREIGHT_INLINE void decode(const uint8_t* unit, int step, V16* out) const {
    const uint8_t *line = unit + step / 8 * kUnit, *scales = unit + kMxCodes;
    const int shift = step % 8 * 4;
    *out = each([=](int i) {
      VU words;
      std::memcpy(&words, line + i * W * 4, sizeof words);
      const VU codes = words >> shift;
      return (VF)(magnitude(codes & 7u) | (codes & 8u) << 28) * scale(scales + i * W);
    });
  }

  // The bits of the floats for codes 0 to 7, times 2 ** kMxBase.
  FREIGHT_INLINE static VU magnitude(VU codes) {
#if FREIGHT_AVX2
    const __m256 table = _mm256_setr_ps(0.f, 2.f, 4.f, 6.f, 8.f, 12.f, 16.f, 24.f);
    return (VU)_mm256_permutevar8x32_ps(table, (__m256i)codes);
#else
    const VU normal = (VU)((VI)codes > 1);  // a mask; code 1 is subnormal in E2M1
    return (normal & ((codes << 22) + 0x40000000u)) | (~normal & (0u - codes) & 0x40000000u);
#endif
  }
  FREIGHT_INLINE static VF scale(const uint8_t* bytes) {
#if FREIGHT_AVX2
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    return (VF)_mm256_slli_epi32(wide, 23);
#else
    const VU wide = {bytes[0], bytes[1], bytes[2], bytes[3]};
    return (VF)(wide << 23);
#endif
  }
};

#if FREIGHT_NEON_BF16
struct Mxfp4Pair {
  using Math = Pair;
  static constexpr int steps = kMxInputs / 2, at_once = 1;
  static constexpr float factor = 1.f;
  void decode(const uint8_t* unit, int step, Pair::Operand* out) const {
    V16 first, second;
    Mxfp4().decode(unit, 2 * step, &first);
    Mxfp4().decode(unit, 2 * step + 1, &second);
    for (int i = 0; i < 4; i++) {
      const VU both = (VU)first.v[i] >> 16 | ((VU)second.v[i] & 0xFFFF0000u);
      out->v[i] = vreinterpretq_bf16_u32((uint32x4_t)both);
    }
  }
};
#endif

#endif

#if FREIGHT_AVX512 || FREIGHT_NEON_BF16
template <>
constexpr int kUnitOf<Mxfp4Pair> = kMxUnit;
#endif
template <>
constexpr int kUnitOf<Mxfp4> = kMxUnit;

}  // namespace freight
