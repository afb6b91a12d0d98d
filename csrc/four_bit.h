// Weights in 4 bits with scales of groups: INT4, a code minus the code of zero times the scale, and NVFP4, a number in
// E2M1 times a scale in E4M3. The layout of their groups, and their decoders.
//
// A value is exact in float32. Where rows are bfloat16 it is rounded to bfloat16, to nearest even. So a product has the
// bits of the same product with those values as its weights. Scales are so large that no value is subnormal in
// bfloat16, and so small that no step of the rounding overflows (freight.h).
//
// A group of a band has its scales, [2 blocks][16]; with zero points their codes, [2 blocks][16] bytes; then the codes
// of 16 inputs at a time, [2 blocks][128 bytes]. NVFP4 has two groups of 16 inputs at a time, and packing converts
// their scales to 5 bits of exponent and 3 of mantissa without a sign: zeros and signs go into the codes, and
// subnormals become normal. This is 4.125 bits a weight for INT4 in groups of 128, and 4.5 for NVFP4.
//
// With AVX-512 a cache line has the codes of 8 rows: word i those of row i / 2, of the even or the odd inputs, the first
// from bit 12 on. One instruction makes a float32 of a code at bits 12 to 15 or 16 to 19, namely 2048 or 128 plus the
// code, which a fused multiply-add turns into the value. And two registers of 8 rows and two inputs are rounded to
// bfloat16 in the order that `Pair` and tiles take. Elsewhere a line has 8 inputs of 16 rows, as in MXFP4.
#pragma once
#include "mxfp4.h"
#include "packed.h"

namespace freight {

constexpr int kScaleBias = 10;  // of the exponent of NVFP4's packed scales: the least, -9, becomes 1

// Offsets in a group of a band.
inline int64_t scales_at(int block) { return block * 2 * kLanes; }                     // INT4
inline int64_t scales_at(int block, int unit) { return (unit * kBand + block) * kLanes; }  // NVFP4
inline int64_t zeros_at(int block) { return 2 * kBand * kLanes + block * kLanes; }

struct InGroups {};  // base of the decoders of this file

// The 16-bit scales of INT4 of a block.
FREIGHT_INLINE V16 scales_of(const FourBit& layout, const uint8_t* scales) {
  return layout.bfloat16 ? load_as<FREIGHT_BFLOAT16>(scales) : load_as<FREIGHT_FLOAT16>(scales);
}

#if FREIGHT_AVX512

// Numbers of 16 rows, each twice, in two registers.
FREIGHT_INLINE void twice(__m512 rows, __m512* out) {
  const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  out[0] = _mm512_permutexvar_ps(low, rows);
  out[1] = _mm512_permutexvar_ps(_mm512_add_epi32(low, _mm512_set1_epi32(8)), rows);
}

struct Int4 {
  static constexpr bool by_unit = false;  // whether each 16 inputs have scales of their own
  struct Scales {
    __m512 scale[2], first[2], second[2];  // by half of the rows; scale * -(2048 or 128 + the code of zero)
  };

  FREIGHT_INLINE static void read(const FourBit& layout, const uint8_t* group, int block, int, Scales& out) {
    const __m512 scale = (__m512)scales_of(layout, group + scales_at(block)).v[0];
    __m512 zero = _mm512_set1_ps(8.f);
    if (layout.zeros) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group + zeros_at(block)));
      zero = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes));
    }
    twice(scale, out.scale);
    twice(_mm512_mul_ps(_mm512_sub_ps(_mm512_set1_ps(-2048.f), zero), scale), out.first);
    twice(_mm512_mul_ps(_mm512_sub_ps(_mm512_set1_ps(-128.f), zero), scale), out.second);
  }

  // Two pairs of inputs of half of the rows, float32: pairs `pair` and `pair` + 1 of 8.
  FREIGHT_INLINE void values(const Scales& scales, int half, __m512i words, int pair, __m512* out) const {
    const __m512i turned = _mm512_rorv_epi32(words, _mm512_set1_epi32(4 * pair));
    const __m512i first = _mm512_ternarylogic_epi32(turned, _mm512_set1_epi32(0xF000), _mm512_set1_epi32(0x45000000),
                                                    0xEA);  // turned & .. | 2048
    const __m512i second = _mm512_ternarylogic_epi32(turned, _mm512_set1_epi32(0xF0000), _mm512_set1_epi32(0x43000000),
                                                     0xEA);  // turned & .. | 128
    out[0] = _mm512_fmadd_ps(_mm512_castsi512_ps(first), scales.scale[half], scales.first[half]);
    out[1] = _mm512_fmadd_ps(_mm512_castsi512_ps(second), scales.scale[half], scales.second[half]);
  }
};

struct Nvfp4 {
  static constexpr bool by_unit = true;
  struct Scales {
    __m512 scale[2];
  };
  __m512 table;

  Nvfp4() {
    alignas(64) float numbers[16];
    const float factor = bits_to_float((254u - kScaleBias) << 23);
    for (int code = 0; code < 16; code++) numbers[code] = kMxValues[code & 7] * (code & 8 ? -factor : factor);
    table = _mm512_load_ps(numbers);
  }

  FREIGHT_INLINE static void read(const FourBit&, const uint8_t* group, int block, int unit, Scales& out) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group + scales_at(block, unit)));
    twice(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 20)), out.scale);
  }

  FREIGHT_INLINE void values(const Scales& scales, int half, __m512i words, int pair, __m512* out) const {
    for (int i = 0; i < 2; i++) {
      const __m512i turned = _mm512_rorv_epi32(words, _mm512_set1_epi32(4 * (pair + i) + 12));  // to the lowest bits
      out[i] = _mm512_mul_ps(_mm512_permutexvar_ps(turned, table), scales.scale[half]);
    }
  }
};

// Decoder to float32 of four inputs of a block at a time.
template <class Codes>
struct FourBitSingle : InGroups {
  using Math = Single;
  using Kind = Codes;
  using Scales = typename Codes::Scales;
  static constexpr int steps = kFourInputs, at_once = 4;
  static constexpr float factor = 1.f;
  Codes codes;

  FREIGHT_INLINE void decode(const Scales& scales, const uint8_t* unit, int step, V16* out) const {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    __m512 low[2], high[2];
    codes.values(scales, 0, _mm512_loadu_si512(unit), step / 2, low);
    codes.values(scales, 1, _mm512_loadu_si512(unit + kUnit), step / 2, high);
    for (int i = 0; i < 2; i++) {
      out[2 * i] = {(VF)_mm512_permutex2var_ps(low[i], even, high[i])};
      out[2 * i + 1] = {(VF)_mm512_permutex2var_ps(low[i], odd, high[i])};
    }
  }
};

// Decoder to bfloat16 of two pairs of inputs of a block at a time.
template <class Codes>
struct FourBitPair : InGroups {
  using Math = Pair;
  using Kind = Codes;
  using Scales = typename Codes::Scales;
  static constexpr int steps = kFourInputs / 2, at_once = 2;
  static constexpr float factor = 1.f;
  Codes codes;

  FREIGHT_INLINE void decode(const Scales& scales, const uint8_t* unit, int step, __m512i* out) const {
    __m512 low[2], high[2];
    codes.values(scales, 0, _mm512_loadu_si512(unit), step, low);
    codes.values(scales, 1, _mm512_loadu_si512(unit + kUnit), step, high);
    for (int i = 0; i < 2; i++) out[i] = (__m512i)_mm512_cvtne2ps_pbh(high[i], low[i]);
  }
};

#else

struct Int4 {
  static constexpr bool by_unit = false, rounds = true;  // rounds: values may not be exact in bfloat16
  struct Scales {
    V16 scale, zero;  // zero: minus the code of zero, times the scale
  };

  FREIGHT_INLINE static void read(const FourBit& layout, const uint8_t* group, int block, int, Scales& out) {
    alignas(64) float zero[kLanes];
    for (int i = 0; i < kLanes; i++) zero[i] = layout.zeros ? -static_cast<float>(group[zeros_at(block) + i]) : -8.f;
    out.scale = scales_of(layout, group + scales_at(block));
    out.zero = out.scale * load16(zero);
  }
  FREIGHT_INLINE static VF value(const Scales& scales, int i, VU code) {
    return fma(__builtin_convertvector((VI)code, VF), scales.scale.v[i], scales.zero.v[i]);
  }
};

struct Nvfp4 {
  static constexpr bool by_unit = true, rounds = false;
  struct Scales {
    V16 scale;
  };

  FREIGHT_INLINE static void read(const FourBit&, const uint8_t* group, int block, int unit, Scales& out) {
    const uint8_t* bytes = group + scales_at(block, unit);
    const float factor = bits_to_float((254u - kScaleBias - kMxBase) << 23);  // 2 ** kMxBase is in the magnitudes
    alignas(64) float scale[kLanes];
    for (int i = 0; i < kLanes; i++) scale[i] = bits_to_float(static_cast<uint32_t>(bytes[i]) << 20) * factor;
    out.scale = load16(scale);
  }
  FREIGHT_INLINE static VF value(const Scales& scales, int i, VU code) {
    return (VF)(Mxfp4::magnitude(code & 7u) | (code & 8u) << 28) * scales.scale.v[i];
  }
};

// Round v to bfloat16, to nearest even.
FREIGHT_INLINE VF rounded_to_bfloat16(VF v) {
  const VF power = (VF)((VU)v & 0xFF800000u), large = fma(power, set1(0x1p16f), v);  // keeps 8 bits of v
  return fma(power, set1(-0x1p16f), large);
}

// Decoder to float32 of an input of a block; the values of INT4 may be rounded to bfloat16.
template <class Codes, bool kRounds = false>
struct FourBitSingle : InGroups {
  using Math = Single;
  using Kind = Codes;
  using Scales = typename Codes::Scales;
  static constexpr int steps = kFourInputs, at_once = 1;
  static constexpr float factor = 1.f;

  FREIGHT_INLINE void decode(const Scales& scales, const uint8_t* unit, int step, V16* out) const {
    const uint8_t* line = unit + step / 8 * kUnit;
    const int shift = step % 8 * 4;
    *out = each([=, &scales](int i) {
      VU words;
      std::memcpy(&words, line + i * W * 4, sizeof words);
      const VF value = Codes::value(scales, i, words >> shift & 15u);
      if constexpr (kRounds) return rounded_to_bfloat16(value);
      else return value;
    });
  }
};

#if FREIGHT_NEON_BF16
template <class Codes>
struct FourBitPair : InGroups {
  using Math = Pair;
  using Kind = Codes;
  using Scales = typename Codes::Scales;
  static constexpr int steps = kFourInputs / 2, at_once = 1;
  static constexpr float factor = 1.f;

  void decode(const Scales& scales, const uint8_t* unit, int step, Pair::Operand* out) const {
    V16 first, second;
    FourBitSingle<Codes, true>().decode(scales, unit, 2 * step, &first);
    FourBitSingle<Codes, true>().decode(scales, unit, 2 * step + 1, &second);
    for (int i = 0; i < 4; i++) {
      const VU both = (VU)first.v[i] >> 16 | ((VU)second.v[i] & 0xFFFF0000u);
      out->v[i] = vreinterpretq_bf16_u32((uint32x4_t)both);
    }
  }
};
#endif

#endif

// Multiply M staged rows, in order, by NB blocks of weights: sums[NB][M][16]. bands[NB]: the first group of the band of
// each block; sides[NB]: which of its two blocks; AT_ONCE of the blocks are decoded before they are multiplied.
template <class D, int M, int NB, int AT_ONCE>
inline void multiply_groups(const D& decoder, const FourBit& layout, const uint8_t* const* bands, const int* sides,
                            const typename D::Math::X* x, int64_t groups, bool past_caches, int64_t ahead, float* sums) {
  using Math = typename D::Math;
  const D local = decoder;  // keeps its tables in registers
  V16 sum[NB][M];
  FREIGHT_UNROLL
  for (int j = 0; j < NB; j++)
    FREIGHT_UNROLL
    for (int m = 0; m < M; m++) sum[j][m] = V16{};
  const int units = layout.inputs / kFourInputs;
  typename D::Scales scales[NB];
  typename Math::Operand operand[AT_ONCE][D::at_once];
  for (int64_t group = 0; group < groups; group++) {
    const int64_t at = group * layout.bytes;
    for (int unit = 0; unit < units; unit++, x += D::steps * M) {
      const int64_t codes = at + layout.head + unit * kBand * kFourUnit;
      FREIGHT_UNROLL
      for (int j = 0; j < NB; j++) {
        if (unit == 0 || D::Kind::by_unit) D::Kind::read(layout, bands[j] + at, sides[j], unit, scales[j]);
        const uint8_t* soon = bands[j] + codes + sides[j] * kFourUnit + ahead;
        for (int line = 0; line < kFourUnit; line += kUnit) {  // two instructions: the kind is an immediate
          if (past_caches)
            __builtin_prefetch(soon + line, 0, 0);
          else
            __builtin_prefetch(soon + line);
        }
      }
      FREIGHT_UNROLL
      for (int first = 0; first < NB; first += AT_ONCE)
        for (int step = 0; step < D::steps; step += D::at_once) {
          FREIGHT_UNROLL
          for (int j = 0; j < AT_ONCE; j++)
            local.decode(scales[first + j], bands[first + j] + codes + sides[first + j] * kFourUnit, step, operand[j]);
          FREIGHT_UNROLL
          for (int i = 0; i < D::at_once; i++)
            FREIGHT_UNROLL
            for (int m = 0; m < M; m++)
              FREIGHT_UNROLL
              for (int j = 0; j < AT_ONCE; j++)
                sum[first + j][m] = Math::accumulate(sum[first + j][m], operand[j][i], x[(step + i) * M + m]);
        }
    }
  }
  FREIGHT_UNROLL
  for (int j = 0; j < NB; j++)
    FREIGHT_UNROLL
    for (int m = 0; m < M; m++) store(sums + (j * M + m) * kLanes, sum[j][m]);
}

}  // namespace freight
