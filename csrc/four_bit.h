// Weights in 4 bits with scales of groups: INT4, a code minus the code of zero times the scale, and NVFP4, a number in
// E2M1 times a scale in E4M3. The layout of their groups, and their decoders.
//
// A value is exact in float32. Where rows are bfloat16 it is rounded to bfloat16, to nearest even. So a product has the
// bits of the same product with those values as its weights. Scales are so large that no value is subnormal in
// bfloat16, and so small that no step of the rounding overflows (freight.h).
//
// A band has its inputs in pieces, `FourBit::inputs` each: the scales of their groups, [groups][2 blocks][16]; with zero
// points their codes, [groups][2 blocks][16] bytes; then the codes of the inputs. This is 4.125 bits a weight for INT4
// in groups of 128, and 4.5 for NVFP4.
//
// With AMX a piece has 128 inputs, and their codes by row: [2 blocks][16 rows][64 bytes], where input 32 k + i is in bits
// 4 k to 4 k + 3 of the 16-bit word i. The 16 values of a group of a row are a table in bfloat16, and one instruction
// looks 32 inputs up: a row of the first operand of the tiles (tile_rows.h). Those of NVFP4 are a row of a table of all
// scales.
//
// Elsewhere a piece is a group of INT4, or two of NVFP4, whose scales packing converts to 5 bits of exponent and 3 of
// mantissa without a sign: zeros and signs go into the codes, and subnormals become normal. Codes of 16 inputs at a time
// are [2 blocks][2 lines]. A cache line has 8 inputs of 16 rows, as in MXFP4; in INT4 with AVX-512, 16 inputs of 8 rows:
// word i those of row i / 2, of the even or the odd inputs, the first from bit 12 on. There one instruction makes a
// float32 of a code at bits 12 to 15 or 16 to 19, namely 2048 or 128 plus the code, which a fused multiply-add turns
// into the value. And two registers of 8 rows and two inputs are rounded to bfloat16 in the order that `Pair` takes.
#pragma once
#include "mxfp4.h"
#include "packed.h"

namespace freight {

constexpr int kScaleBias = 10;  // of the exponent of NVFP4's packed scales: the least, -9, becomes 1

// Offsets in a piece of a band: of the scales and codes of zero of a group of a block.
inline int64_t scales_at(const FourBit& layout, int block, int group = 0) {
  return layout.row_head + group * layout.scales_apart + block * kLanes * layout.scale_bytes;
}
inline int64_t zeros_at(const FourBit& layout, int block, int group = 0) {
  return layout.groups * kBand * kLanes * layout.scale_bytes + (group * kBand + block) * kLanes;
}

inline int64_t minima_at(const FourBit& layout, int block, int group = 0) {
  return scales_at(layout, kBand, group) + block * kLanes * layout.minimum_bytes;
}

struct InGroups {};  // base of the decoders of this file

// The 16-bit scales of INT4 of a block.
FREIGHT_INLINE V16 scales_of(const FourBit& layout, const uint8_t* scales) {
  return layout.bfloat16 ? load_as<FREIGHT_BFLOAT16>(scales) : load_as<FREIGHT_FLOAT16>(scales);
}

// The codes of 16 inputs of a block, in a piece.
inline const uint8_t* unit_at(const FourBit& layout, const uint8_t* piece, int block, int unit) {
  return piece + layout.head + (unit * kBand + block) * kFourUnit;
}

#if FREIGHT_AMX

// Codes by row. Kind::values are those of all codes of a row in a group, float32.
template <class Kind>
struct CodesByRow {
  static constexpr bool by_unit = true;  // whether 16 inputs may have other scales than those before
  static constexpr int floats_at_once = kFourInputs;
  struct Scales {
    alignas(64) float scale[kLanes], zero[kLanes];  // zero: minus the code of zero, times the scale
  };

  static const uint8_t* codes(const FourBit& layout, const uint8_t* piece, int block, int) {
    return piece + layout.head + block * kLanes * kUnit;
  }
  FREIGHT_INLINE void floats(const Scales& scales, const uint8_t* codes, int unit, int, V16* out) const {
    VF rows[kLanes];
    for (int row = 0; row < kLanes; row++) {
      const auto* words = reinterpret_cast<const __m256i*>(codes + row * kUnit + unit % 2 * 2 * kFourInputs);
      const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(words));
      const __m512i code = _mm512_srlv_epi32(wide, _mm512_set1_epi32(unit / 2 * 4));
      rows[row] = (VF)_mm512_permutexvar_ps(code, Kind::values(scales, row));
    }
    transpose(rows);
    for (int i = 0; i < kFourInputs; i++) out[i] = {rows[i]};
  }
};

struct Int4 : CodesByRow<Int4> {
  FREIGHT_INLINE static void read(const FourBit& layout, const uint8_t* piece, int block, int unit, Scales& out) {
    const int group = unit * kFourInputs * layout.groups / layout.inputs;
    const V16 scale = scales_of(layout, piece + scales_at(layout, block, group));
    __m512 zero = _mm512_set1_ps(8.f);
    if (layout.zeros) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(piece + zeros_at(layout, block, group)));
      zero = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes));
    }
    store(out.scale, scale);
    _mm512_store_ps(out.zero, _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), zero), (__m512)scale.v[0]));
  }

  // The values of all codes of a row, in float32, and twice in bfloat16.
  FREIGHT_INLINE static __m512 values(const Scales& scales, int row) {
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_fmadd_ps(codes, _mm512_set1_ps(scales.scale[row]), _mm512_set1_ps(scales.zero[row]));
  }
  FREIGHT_INLINE static __m512i table(const Scales& scales, int row) {
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(values(scales, row)));
  }
};

struct Nvfp4 : CodesByRow<Nvfp4> {
  // The values of all codes with each scale, in bfloat16.
  struct Tables {
    alignas(64) uint16_t value[256][16];
    Tables() {
      for (int scale = 0; scale < 256; scale++)
        for (int code = 0; code < 16; code++)
          value[scale][code] = float_to_bf16(kMxValues[code & 7] * (code & 8 ? -1.f : 1.f) *
                                             value_of(FREIGHT_E4M3FN, scale));
    }
  };
  static const Tables& tables() {
    static const Tables all;
    return all;
  }

  FREIGHT_INLINE static void read(const FourBit& layout, const uint8_t* piece, int block, int unit, Scales& out) {
    const float* value = code_table<FREIGHT_E4M3FN>().value;
    for (int row = 0; row < kLanes; row++) out.scale[row] = value[piece[scales_at(layout, block, unit) + row]];
  }
  FREIGHT_INLINE static __m512 values(const Scales& scales, int row) {
    const __m512 numbers = _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f,
                                          -4.f, -6.f);
    return _mm512_mul_ps(numbers, _mm512_set1_ps(scales.scale[row]));
  }

  // The values of 32 inputs of a row, whose codes are in the low bits of words; scales: those of the first of their two
  // groups, of the row; the second's are `apart` bytes further on.
  FREIGHT_INLINE static __m512i look_up(const Tables& tables, __m512i codes, const uint8_t* scales, int64_t apart) {
    const __m512i last = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const auto row = [&](uint8_t scale) {
      return _mm256_load_si256(reinterpret_cast<const __m256i*>(tables.value[scale]));
    };
    const __m512i table = _mm512_inserti64x4(_mm512_castsi256_si512(row(scales[0])), row(scales[apart]), 1);
    const __m512i index = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi16(15), last, 0xEA);  // codes & 15 | last
    return _mm512_permutexvar_epi16(index, table);
  }
};

#elif FREIGHT_AVX512

// Numbers of 16 rows, each twice, in two registers.
FREIGHT_INLINE void twice(__m512 rows, __m512* out) {
  const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  out[0] = _mm512_permutexvar_ps(low, rows);
  out[1] = _mm512_permutexvar_ps(_mm512_add_epi32(low, _mm512_set1_epi32(8)), rows);
}

struct Int4 {
  static constexpr bool by_unit = false;  // whether 16 inputs may have other scales than those before
  static constexpr int floats_at_once = 4;
  static constexpr auto codes = unit_at;
  struct Scales {
    __m512 scale[2], first[2], second[2];  // by half of the rows; scale * -(2048 or 128 + the code of zero)
  };

  FREIGHT_INLINE static void read(const FourBit& layout, const uint8_t* group, int block, int, Scales& out) {
    const __m512 scale = (__m512)scales_of(layout, group + scales_at(layout, block)).v[0];
    __m512 zero = _mm512_set1_ps(8.f);
    if (layout.zeros) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group + zeros_at(layout, block)));
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

  // Pairs of inputs `pair` and `pair` + 1 of all rows in bfloat16, or in float32 their four inputs.
  FREIGHT_INLINE void pairs(const Scales& scales, const uint8_t* unit, int pair, __m512i* out) const {
    __m512 low[2], high[2];
    values(scales, 0, _mm512_loadu_si512(unit), pair, low);
    values(scales, 1, _mm512_loadu_si512(unit + kUnit), pair, high);
    for (int i = 0; i < 2; i++) out[i] = (__m512i)_mm512_cvtne2ps_pbh(high[i], low[i]);
  }
  FREIGHT_INLINE void floats(const Scales& scales, const uint8_t* unit, int, int step, V16* out) const {
    const int pair = step / 2;
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    __m512 low[2], high[2];
    values(scales, 0, _mm512_loadu_si512(unit), pair, low);
    values(scales, 1, _mm512_loadu_si512(unit + kUnit), pair, high);
    for (int i = 0; i < 2; i++) {
      out[2 * i] = {(VF)_mm512_permutex2var_ps(low[i], even, high[i])};
      out[2 * i + 1] = {(VF)_mm512_permutex2var_ps(low[i], odd, high[i])};
    }
  }
};

struct Nvfp4 {
  static constexpr bool by_unit = true;
  static constexpr int floats_at_once = 4;
  static constexpr auto codes = unit_at;
  struct Scales {
    __m512 scale;
  };
  __m512 table;

  Nvfp4() {
    alignas(64) float numbers[16];
    const float factor = bits_to_float((254u - kScaleBias) << 23);
    for (int code = 0; code < 16; code++) numbers[code] = kMxValues[code & 7] * (code & 8 ? -factor : factor);
    table = _mm512_load_ps(numbers);
  }

  FREIGHT_INLINE static void read(const FourBit& layout, const uint8_t* group, int block, int unit, Scales& out) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group + scales_at(layout, block, unit)));
    out.scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 20));
  }

  // Inputs `step` to `step` + 3.
  FREIGHT_INLINE void floats(const Scales& scales, const uint8_t* unit, int, int step, V16* out) const {
    const __m512i words = _mm512_loadu_si512(unit + step / 8 * kUnit);
    for (int i = 0; i < 4; i++) {
      const __m512i code = _mm512_srlv_epi32(words, _mm512_set1_epi32(step % 8 * 4 + 4 * i));
      out[i] = {(VF)_mm512_mul_ps(_mm512_permutexvar_ps(code, table), scales.scale)};
    }
  }
  FREIGHT_INLINE void pairs(const Scales& scales, const uint8_t* unit, int pair, __m512i* out) const {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    V16 inputs[4];
    floats(scales, unit, 0, 2 * pair, inputs);
    for (int i = 0; i < 2; i++) {  // exact, so that the lower halves are zeros
      const __m512i first = _mm512_srli_epi32((__m512i)inputs[2 * i].v[0], 16);
      out[i] = _mm512_ternarylogic_epi32(first, (__m512i)inputs[2 * i + 1].v[0], upper, 0xF8);  // a | b & upper
    }
  }
};

#endif

#if FREIGHT_AVX512

// Decoder to float32 of some inputs of a block at a time.
template <class Codes>
struct FourBitSingle : InGroups {
  using Math = Single;
  using Kind = Codes;
  using Scales = typename Codes::Scales;
  static constexpr int steps = kFourInputs, at_once = Codes::floats_at_once;
  static constexpr float factor = 1.f;
  Codes codes;

  FREIGHT_INLINE void decode(const Scales& scales, const uint8_t* from, int unit, int step, V16* out) const {
    codes.floats(scales, from, unit, step, out);
  }
};

#if !FREIGHT_AMX
// Decoder to bfloat16 of two pairs of inputs of a block at a time.
template <class Codes>
struct FourBitPair : InGroups {
  using Math = Pair;
  using Kind = Codes;
  using Scales = typename Codes::Scales;
  static constexpr int steps = kFourInputs / 2, at_once = 2;
  static constexpr float factor = 1.f;
  Codes codes;

  FREIGHT_INLINE void decode(const Scales& scales, const uint8_t* unit, int, int step, __m512i* out) const {
    codes.pairs(scales, unit, step, out);
  }
};
#endif

#else

struct Int4 {
  static constexpr bool by_unit = false, rounds = true;  // rounds: values may not be exact in bfloat16
  static constexpr auto codes = unit_at;
  struct Scales {
    V16 scale, zero;  // zero: minus the code of zero, times the scale
  };

  FREIGHT_INLINE static void read(const FourBit& layout, const uint8_t* group, int block, int, Scales& out) {
    alignas(64) float zero[kLanes];
    for (int i = 0; i < kLanes; i++) zero[i] = layout.zeros ? -static_cast<float>(group[zeros_at(layout, block) + i]) : -8.f;
    out.scale = scales_of(layout, group + scales_at(layout, block));
    out.zero = out.scale * load16(zero);
  }
  FREIGHT_INLINE static VF value(const Scales& scales, int i, VU code) {
    return fma(__builtin_convertvector((VI)code, VF), scales.scale.v[i], scales.zero.v[i]);
  }
};

struct Nvfp4 {
  static constexpr bool by_unit = true, rounds = false;
  static constexpr auto codes = unit_at;
  struct Scales {
    V16 scale;
  };

  FREIGHT_INLINE static void read(const FourBit& layout, const uint8_t* group, int block, int unit, Scales& out) {
    const uint8_t* bytes = group + scales_at(layout, block, unit);
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

  FREIGHT_INLINE void decode(const Scales& scales, const uint8_t* unit, int, int step, V16* out) const {
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

  void decode(const Scales& scales, const uint8_t* unit, int, int step, Pair::Operand* out) const {
    V16 first, second;
    FourBitSingle<Codes, true>().decode(scales, unit, 0, 2 * step, &first);
    FourBitSingle<Codes, true>().decode(scales, unit, 0, 2 * step + 1, &second);
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
      const uint8_t* codes[NB];
      FREIGHT_UNROLL
      for (int j = 0; j < NB; j++) {
        if (unit == 0 || D::Kind::by_unit) D::Kind::read(layout, bands[j] + at, sides[j], unit, scales[j]);
        codes[j] = D::Kind::codes(layout, bands[j] + at, sides[j], unit);
        const uint8_t* soon = codes[j] + ahead;
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
            local.decode(scales[first + j], codes[first + j], unit, step, operand[j]);
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
