// Packed weights: their layout, and what a matrix product needs of an instruction set.
//
// A weight is stored as units of 64 bytes that hold 16 output rows x `inputs` inputs (4 in eight bits, 2 in sixteen, 1
// in float32): [ceil(out / 16)][ceil(in / inputs)][64], padded with zeros. So a block of 16 rows is one stream of
// memory, and each of 16 lanes sums one output over its inputs in order: no horizontal sum, and the same order
// whatever the number of rows of x. Within a unit values lie as [inputs][16], except where AVX-512 takes pairs
// (`Pair`): bfloat16 as [16][2], E4M3 so that one decoding gives two registers of 16 x 2.
//
// `Single` multiplies float32 by float32, one input a step. `Pair` takes two bfloat16 inputs a step (vdpbf16ps), which is
// exact in its products. A decoder D turns a unit into D::steps operands of its arithmetic D::Math.
#pragma once
#include <cstddef>

#include "freight.h"
#include "simd.h"

constexpr int kLanes = 16;    // output rows of a block
constexpr int kUnit = 64;     // bytes
constexpr int kGroup = 128;   // outputs and inputs that share one block scale

inline int inputs_per_unit(int32_t format) {
  return format == FREIGHT_FLOAT32 ? 1 : format == FREIGHT_E4M3FN ? 4 : 2;
}

struct Single {
  using X = float;
  using Operand = V16;
  static constexpr int inputs = 1;
  static Operand load(const uint8_t* from) { return load16(reinterpret_cast<const float*>(from)); }
  static void store(uint8_t* to, Operand a) { store16(reinterpret_cast<float*>(to), a); }
  static V16 accumulate(V16 sum, Operand w, X x) { return madd16(w, splat16(x), sum); }
};

// A panel that has been decoded before: one operand a step.
template <class M>
struct Decoded {
  using Math = M;
  static constexpr int steps = 1;
  static constexpr bool streams = false;
  void decode(const uint8_t* unit, typename M::Operand* out) const { out[0] = M::load(unit); }
};

struct Float32 {
  using Math = Single;
  static constexpr int steps = 1;
  static constexpr bool streams = true;
  static constexpr float factor = 1.f;  // true value = decoded * factor
  void decode(const uint8_t* unit, V16* out) const { out[0] = load16(reinterpret_cast<const float*>(unit)); }
};

struct Float16 {
  using Math = Single;
  static constexpr int steps = 2;
  static constexpr bool streams = true;
  static constexpr float factor = 1.f;
  void decode(const uint8_t* unit, V16* out) const {
    const uint16_t* values = reinterpret_cast<const uint16_t*>(unit);
    out[0] = f16_to_16(values), out[1] = f16_to_16(values + 16);
  }
};

#if FREIGHT_AVX512

struct Pair {
  using X = uint32_t;  // two bfloat16, the earlier input in the low half
  using Operand = __m512i;
  static constexpr int inputs = 2;
  static Operand load(const uint8_t* from) { return _mm512_loadu_si512(from); }
  static void store(uint8_t* to, Operand a) { _mm512_storeu_si512(to, a); }
  static V16 accumulate(V16 sum, Operand w, X x) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)w, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)))};
  }
};

inline V16 low_half(__m512i pairs) { return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))}; }
inline V16 high_half(__m512i pairs) {
  return {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))};
}

struct BFloat16Pair {
  using Math = Pair;
  static constexpr int steps = 1;
  static constexpr bool streams = true;
  static constexpr float factor = 1.f;
  void decode(const uint8_t* unit, __m512i* out) const { out[0] = _mm512_loadu_si512(unit); }
};

struct BFloat16 {
  using Math = Single;
  static constexpr int steps = 2;
  static constexpr bool streams = true;
  static constexpr float factor = 1.f;
  void decode(const uint8_t* unit, V16* out) const {
    const __m512i pairs = _mm512_loadu_si512(unit);
    out[0] = low_half(pairs), out[1] = high_half(pairs);
  }
};

// The two bytes of bfloat16 are looked up apart, in 128-byte tables over the codes without their sign.
struct E4M3Pair {
  using Math = Pair;
  static constexpr int steps = 2;
  static constexpr bool streams = true;
  static constexpr float factor = 1.f;
  __m512i low0, low1, high0, high1;

  E4M3Pair() {
    alignas(64) uint8_t low[128], high[128];
    for (int code = 0; code < 128; code++) {
      const uint32_t bits = float_to_bits(e4m3_to_float(static_cast<uint8_t>(code)));
      low[code] = static_cast<uint8_t>(bits >> 16), high[code] = static_cast<uint8_t>(bits >> 24);
    }
    low0 = _mm512_load_si512(low), low1 = _mm512_load_si512(low + 64);
    high0 = _mm512_load_si512(high), high1 = _mm512_load_si512(high + 64);
  }
  void decode(const uint8_t* unit, __m512i* out) const {
    const __m512i code = _mm512_loadu_si512(unit);
    const __m512i low = _mm512_permutex2var_epi8(low0, code, low1);
    __m512i high = _mm512_permutex2var_epi8(high0, code, high1);
    high = _mm512_ternarylogic_epi32(high, code, _mm512_set1_epi8(static_cast<char>(0x80)), 0xF8);  // high | code & sign
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
  }
};

struct E4M3 {
  using Math = Single;
  static constexpr int steps = 4;
  static constexpr bool streams = true;
  static constexpr float factor = 1.f;
  E4M3Pair pairs;
  void decode(const uint8_t* unit, V16* out) const {
    __m512i two[2];
    pairs.decode(unit, two);
    out[0] = low_half(two[0]), out[1] = high_half(two[0]), out[2] = low_half(two[1]), out[3] = high_half(two[1]);
  }
};

#else

struct BFloat16 {
  using Math = Single;
  static constexpr int steps = 2;
  static constexpr bool streams = true;
  static constexpr float factor = 1.f;
  void decode(const uint8_t* unit, V16* out) const {
    const uint16_t* values = reinterpret_cast<const uint16_t*>(unit);
    out[0] = bf16_to_16(values), out[1] = bf16_to_16(values + 16);
  }
};

// NaN codes do not come here: packing has moved them into the row's scale.
struct E4M3 {
  using Math = Single;
  static constexpr int steps = 4;
  static constexpr bool streams = true;
#if FREIGHT_AVX2
  // The code's bits, seven to the left, are a float16 that is 2^8 too small: its exponent's bias is 8 larger.
  static constexpr float factor = 256.f;
  static V16 decode16(const uint8_t* codes) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xBF80)));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
  }
#else
  // The same towards float32, 2^120 too small; that is multiplied at once, since products with it would underflow.
  static constexpr float factor = 1.f;
  static V16 decode16(const uint8_t* codes) {
    float values[16];
    for (int i = 0; i < 16; i++) {
      const int32_t wide = static_cast<int8_t>(codes[i]);
      values[i] = bits_to_float(static_cast<uint32_t>(wide) << 20 & 0x87F00000u) * 0x1p120f;
    }
    return load16(values);
  }
#endif
  void decode(const uint8_t* unit, V16* out) const {
    for (int step = 0; step < 4; step++) out[step] = decode16(unit + 16 * step);
  }
};

#endif

// Where row `lane` and input `input` of a unit lie in it, in elements.
inline int unit_index(int32_t format, int lane, int input) {
#if FREIGHT_AVX512
  if (format == FREIGHT_E4M3FN) return lane / 4 * 16 + input / 2 * 8 + lane % 4 * 2 + input % 2;
  if (format == FREIGHT_BFLOAT16) return lane * 2 + input;
#else
  (void)format;
#endif
  return input * kLanes + lane;
}
