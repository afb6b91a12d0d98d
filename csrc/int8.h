// Products in INT8: signed bytes times signed bytes, summed in int32.
//
// Integer sums are exact, so every build, kernel and order of summation gives the same bits: at most kInt8Inputs inputs,
// whose products cannot overflow. A V16 holds the bits of the sums, and `finish` (linear.cpp) converts them to float32.
//
// A word of x holds as many inputs as the instruction set multiplies at once. Where it has dot products of bytes (VNNI,
// SDOT) that is four, and a unit of weights is [16 rows][4 inputs], as AMX's tiles take it too. Elsewhere it is two, as
// int16, and a unit is [2][16 rows][2 inputs]. VNNI multiplies unsigned by signed bytes: 128 is added to x, and sums
// begin at -128 times the sum of the weights of their row, which is packed behind the units (`int8_starts`).
#pragma once
#include "vec.h"

#if FREIGHT_AVX512 || (FREIGHT_AVX2 && defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define FREIGHT_VNNI 1
#define FREIGHT_DPBUSD _mm256_dpbusd_epi32
#elif FREIGHT_AVX2 && defined(__AVXVNNI__)
#define FREIGHT_VNNI 1
#define FREIGHT_DPBUSD _mm256_dpbusd_avx_epi32
#endif
#if FREIGHT_VNNI || (FREIGHT_NEON && defined(__ARM_FEATURE_DOTPROD))
#define FREIGHT_INT8_QUADS 1
#endif

namespace freight {

constexpr int64_t kInt8Inputs = FREIGHT_INT8_INPUTS;
static_assert(kInt8Inputs * 128 * 128 < int64_t{1} << 31);

#if FREIGHT_INT8_QUADS
constexpr int kInt8Word = 4;  // inputs in a word of x
#else
constexpr int kInt8Word = 2;
#endif

// The place in a unit of row `lane` and input `input`.
constexpr int int8_index(int lane, int input) {
  return input / kInt8Word * FREIGHT_LANES * kInt8Word + lane * kInt8Word + input % kInt8Word;
}

// The sums as float32, rounded to nearest, ties to even.
inline V16 of_int_sums(const V16& sums) {
  return each([&](int i) { return __builtin_convertvector((VI)sums.v[i], VF); });
}

// The codes of values that were divided by their scale: rounded to nearest, ties to even, -128 .. 127. Any of NaN.
inline VI int8_codes(VF v) {
  const VF least = set1(-128.f), most = set1(127.f);
  const VF bounded = v > most ? most : v < least ? least : v;
  return (VI)((VU)(bounded + set1(kRound)) - float_to_bits(kRound));
}

// kInt8Word codes as a word.
inline uint32_t int8_word(const int32_t* codes) {
#if FREIGHT_INT8_QUADS
  uint32_t word = 0;
  for (int i = 0; i < 4; i++) word |= (static_cast<uint32_t>(codes[i]) & 0xFFu) << 8 * i;
#if FREIGHT_VNNI
  word ^= 0x80808080u;  // + 128
#endif
  return word;
#else
  return (static_cast<uint32_t>(codes[0]) & 0xFFFFu) | static_cast<uint32_t>(codes[1]) << 16;
#endif
}

#if FREIGHT_INT8_QUADS

struct ByteDot {
  using X = uint32_t;
  static constexpr int inputs = 4;
#if FREIGHT_AVX512
  using Operand = __m512i;
  static V16 accumulate(V16 sum, Operand w, X x) {
    return {(VF)_mm512_dpbusd_epi32((__m512i)sum.v[0], _mm512_set1_epi32(static_cast<int>(x)), w)};
  }
  static void read(const uint8_t* unit, Operand* out) { *out = _mm512_load_si512(unit); }
#elif FREIGHT_AVX2
  struct Operand {
    __m256i v[2];
  };
  static V16 accumulate(V16 sum, const Operand& w, X x) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(x));
    return each([&](int i) { return (VF)FREIGHT_DPBUSD((__m256i)sum.v[i], all, w.v[i]); });
  }
  static void read(const uint8_t* unit, Operand* out) {
    for (int i = 0; i < 2; i++) out->v[i] = _mm256_load_si256(reinterpret_cast<const __m256i*>(unit) + i);
  }
#else
  struct Operand {
    int8x16_t v[4];
  };
  static V16 accumulate(V16 sum, const Operand& w, X x) {
    const int8x16_t all = vreinterpretq_s8_u32(vdupq_n_u32(x));
    return each([&](int i) { return (VF)vdotq_s32((int32x4_t)sum.v[i], w.v[i], all); });
  }
  static void read(const uint8_t* unit, Operand* out) {
    for (int i = 0; i < 4; i++) out->v[i] = vld1q_s8(reinterpret_cast<const int8_t*>(unit) + 16 * i);
  }
#endif
};

struct Int8 {
  using Math = ByteDot;
  static constexpr int steps = 1, at_once = 1;
  static constexpr float factor = 1.f;
  FREIGHT_INLINE void decode(const uint8_t* unit, int, Math::Operand* out) const { Math::read(unit, out); }
};

#else

// Two inputs a step. Products of two bytes and the sum of two of them fit in 16 and 32 bits.
struct ShortPair {
  using X = uint32_t;
  static constexpr int inputs = 2;
#if FREIGHT_AVX2
  struct Operand {
    __m256i v[2];
  };
  static V16 accumulate(V16 sum, const Operand& w, X x) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(x));
    return each([&](int i) {
      return (VF)_mm256_add_epi32((__m256i)sum.v[i], _mm256_madd_epi16(w.v[i], all));
    });
  }
  static void read(const uint8_t* from, Operand* out) {
    for (int i = 0; i < 2; i++)
      out->v[i] = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(from) + i));
  }
#else
  typedef int8_t Bytes __attribute__((vector_size(8)));
  typedef int16_t Shorts __attribute__((vector_size(16)));
  static Shorts shorts(const uint8_t* from) {
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Shorts);
  }
#if defined(__SSE2__)
  struct Operand {
    __m128i v[4];
  };
  static V16 accumulate(V16 sum, const Operand& w, X x) {
    const __m128i all = _mm_set1_epi32(static_cast<int>(x));
    return each([&](int i) { return (VF)_mm_add_epi32((__m128i)sum.v[i], _mm_madd_epi16(w.v[i], all)); });
  }
  static void read(const uint8_t* from, Operand* out) {
    for (int i = 0; i < 4; i++) out->v[i] = (__m128i)shorts(from + 8 * i);
  }
#else
  struct Operand {
    VI first[4], second[4];
  };
  static V16 accumulate(V16 sum, const Operand& w, X x) {
    const int32_t first = static_cast<int16_t>(x & 0xFFFFu), second = static_cast<int16_t>(x >> 16);
    return each([&](int i) { return (VF)((VI)sum.v[i] + w.first[i] * first + w.second[i] * second); });
  }
  static void read(const uint8_t* from, Operand* out) {
    for (int i = 0; i < 4; i++) {
      const VU pairs = (VU)shorts(from + 8 * i);
      out->first[i] = (VI)(pairs << 16) >> 16, out->second[i] = (VI)pairs >> 16;
    }
  }
#endif
#endif
};

struct Int8 {
  using Math = ShortPair;
  static constexpr int steps = 2, at_once = 1;
  static constexpr float factor = 1.f;
  FREIGHT_INLINE void decode(const uint8_t* unit, int step, Math::Operand* out) const {
    Math::read(unit + step * FREIGHT_LANES * kInt8Word, out);
  }
};

#endif

// Bytes behind the units of `blocks` blocks: int32 [blocks][16], at which sums begin with VNNI. Other builds keep the
// place, so that the size of a weight depends on the padding of its inputs alone.
constexpr int64_t int8_start_bytes(int64_t blocks) { return blocks * FREIGHT_LANES * 4; }

}  // namespace freight
