// Packed weights: their layout, and the arithmetic and decoders of each instruction set for matrix products.
//
// A weight is stored as units of 64 bytes that hold 16 output rows x `inputs` inputs (4 of eight bits, 2 of sixteen, 1
// in float32): [ceil(out / 32)][ceil(in / inputs)][2][64], padded with zeros. So a band of two blocks of 16 rows is one
// stream of memory, and each of 16 lanes sums one output: there is no horizontal sum, and the order of the sum does not
// depend on the number of rows of x. It differs between builds (linear.cpp). (A few streams of full pairs of cache
// lines are read a third faster than eight of single lines.)
//
// Within a unit values are [inputs][16], with two exceptions (`unit_index`). AVX-512 takes pairs (`Pair`): bfloat16 is
// [16][2], and E4M3 is ordered so that one look-up serves two registers of 16 x 2; AMX tiles take the same layout. NEON
// with BF16 also takes pairs: bfloat16 is [16][2], E4M3 [2][16][2], which E4M3 of AVX2 is too. And E4M3 of the portable
// build has the order that its decoder needs.
//
// MXFP4 has larger units, of 32 inputs: kMxUnit bytes (mxfp4.h). NVFP4 and INT4 have groups of both blocks of a band
// (four_bit.h), and so have blocks of GGUF files (int8_groups.h); what is called a unit here is then a block's half of a group. INT8 is described in int8.h.
//
// `Single` multiplies float32 by float32, one input a step. `Pair` multiplies two bfloat16 inputs a step (vdpbf16ps;
// BFDOT), with exact products. A decoder D decodes a unit to D::steps operands of its arithmetic D::Math; a call
// decodes D::at_once of them, from `step` on.
#pragma once
#include "int8.h"
#include "tiles.h"
#include "vec.h"

namespace freight {

// A block is kLanes output rows.
constexpr int kUnit = FREIGHT_CACHE_LINE;  // bytes
constexpr int kBand = 2;                   // blocks whose units alternate in memory
constexpr int kGroup = 128;                // outputs and inputs that share one block scale
constexpr int kMxInputs = 32;              // of a row of MXFP4 that share a scale
constexpr int kMxUnit = kMxInputs / 2 * kLanes + kLanes;  // bytes

constexpr int kFourInputs = 16;                            // inputs of codes in 4 bits that lie together
constexpr int kFourUnit = kFourInputs / 2 * kLanes;        // bytes of them in a block

// Layout of a weight in NVFP4 or INT4 (four_bit.h), or in blocks of GGUF files (int8_groups.h).
struct FourBit {
  int inputs = 32, groups = 1;           // inputs of a piece, stored together, and how many groups these are
  int scale_bytes = 2;                   // of a group of a row
  bool zeros = false, bfloat16 = false;  // of INT4
  int code_bits = 4;
  int minimum_bytes = 0;  // of a group of a row
  int row_scales = 0;     // float16 numbers of a row in a piece: factors of its groups' bytes, which are with their codes

  // Bytes: of a group without its codes, and of its codes; of a piece before all groups, and before the first codes.
  int group_head = kBand * kLanes * (scale_bytes + zeros + minimum_bytes);
  int group_lines = kBand * kLanes * (inputs / groups) * code_bits / 8;
  int row_head = kBand * kLanes * 2 * row_scales;
  int head = row_head + (row_scales ? group_head : groups * group_head);
  // From the scales of a group to those of the next, and from its codes to the next; of a piece of a band.
  int scales_apart = row_scales ? group_head + group_lines : kBand * kLanes * scale_bytes;
  int lines_apart = row_scales ? group_head + group_lines : group_lines;
  int bytes = row_head + groups * (group_head + group_lines);
};

inline bool has_integers(int32_t format) { return (format & FREIGHT_INTEGERS) != 0; }
inline bool in_groups(int32_t format) {
  return format == FREIGHT_NVFP4 || (format & FREIGHT_INT4) != 0 || has_integers(format);
}

constexpr FourBit block_layout(int32_t blocks) {
  switch (blocks) {
    case FREIGHT_BLOCKS_Q4_1: return {32, 1, 2, false, false, 4, 2};
    case FREIGHT_BLOCKS_Q5_0: return {32, 1, 2, false, false, 5};
    case FREIGHT_BLOCKS_Q5_1: return {32, 1, 2, false, false, 5, 2};
    case FREIGHT_BLOCKS_Q8_0: return {32, 1, 2, false, false, 8};
    case FREIGHT_BLOCKS_Q4_K: return {256, 8, 1, false, false, 4, 1, 2};
    case FREIGHT_BLOCKS_Q5_K: return {256, 8, 1, false, false, 5, 1, 2};
    case FREIGHT_BLOCKS_Q6_K: return {256, 16, 1, false, false, 6, 0, 1};
    case FREIGHT_BLOCKS_IQ4_XS: return {256, 8, 1, false, false, 4, 0, 1};
    case FREIGHT_BLOCKS_MXFP4: return {32, 1, 1, false, false, 4};
    default: return {32, 1, 2, false, false, 4};  // Q4_0, IQ4_NL
  }
}

inline FourBit four_bit(int32_t format) {
  if (format & FREIGHT_BLOCKS) return block_layout(format & ~(FREIGHT_BLOCKS | FREIGHT_INTEGERS));
  const int32_t stored = format & ~(FREIGHT_INTEGERS | FREIGHT_BYTES);
  if (stored == FREIGHT_MXFP4) return {kMxInputs, 1, 1, false, false};
  const bool nvfp4 = stored == FREIGHT_NVFP4;
  const int32_t kind = nvfp4 ? 0 : stored - FREIGHT_INT4;
  const int group = nvfp4 ? kFourInputs : kind & FREIGHT_INT4_128 ? 128 : kind & FREIGHT_INT4_64 ? 64 : 32;
  int inputs = nvfp4 ? 2 * group : group;
#if FREIGHT_AMX
  if (!has_integers(format)) inputs = kGroupInputs;  // of a row: a cache line of codes
#endif
  if (nvfp4) return {inputs, inputs / group, 1, false, false};
  const int bits = format & FREIGHT_BYTES ? 8 : 4;
  return {inputs, inputs / group, 2, (kind & FREIGHT_INT4_ZEROS) != 0, (kind & FREIGHT_INT4_BFLOAT16) != 0, bits};
}

// Numbers of blocks and bands of a weight, of which the last may be padded.
inline int64_t blocks_of(int64_t out_features) { return (out_features + kLanes - 1) / kLanes; }
inline int64_t bands_of(int64_t out_features) { return (out_features + kBand * kLanes - 1) / (kBand * kLanes); }

inline int64_t unit_bytes(int32_t format) {
  if (in_groups(format)) return four_bit(format).bytes / kBand;
  return format == FREIGHT_MXFP4 ? kMxUnit : kUnit;
}

inline int inputs_per_unit(int32_t format) {
  if (format == FREIGHT_MXFP4) return kMxInputs;
  if (in_groups(format)) return four_bit(format).inputs;
  return format == FREIGHT_FLOAT32 ? 1 : format == FREIGHT_E4M3FN || format == FREIGHT_INT8 ? 4 : 2;
}

// Number of units of a block: the inputs are padded with zeros, for AMX tiles to a multiple of a tile's inputs.
inline int64_t units_of(int32_t format, int64_t in_features) {
  const int inputs = inputs_per_unit(format);
#if FREIGHT_AMX
  if (format == FREIGHT_E4M3FN || format == FREIGHT_BFLOAT16)
    return (in_features + kTileInputs - 1) / kTileInputs * kTileInputs / inputs;
  if (format == FREIGHT_INT8) return (in_features + 2 * kTileInputs - 1) / (2 * kTileInputs) * kTileUnits;
#endif
  return (in_features + inputs - 1) / inputs;
}

// Offset in bytes of a block's first unit in a packed weight; the next units follow at steps of kBand * `bytes`.
inline int64_t block_offset(int64_t block, int64_t units, int64_t bytes = kUnit) {
  return block / kBand * kBand * units * bytes + block % kBand * bytes;
}

// Bytes of a unit, by its decoder.
template <class D>
constexpr int kUnitOf = kUnit;

struct Single {
  using X = float;
  using Operand = V16;
  static constexpr int inputs = 1;
  static V16 accumulate(V16 sum, Operand w, X x) { return fma(w, set16(x), sum); }
};

struct Float32 {
  using Math = Single;
  static constexpr int steps = 1, at_once = 1;
  static constexpr float factor = 1.f;  // true value = decoded * factor
  FREIGHT_INLINE void decode(const uint8_t* unit, int, V16* out) const { *out = load16(reinterpret_cast<const float*>(unit)); }
};

struct Float16 {
  using Math = Single;
  static constexpr int steps = 2, at_once = 1;
  static constexpr float factor = 1.f;
  FREIGHT_INLINE void decode(const uint8_t* unit, int step, V16* out) const {
    *out = load_as<FREIGHT_FLOAT16>(unit + 2 * kLanes * step);
  }
};

#if FREIGHT_AVX512

struct Pair {
  using X = uint32_t;  // two bfloat16, the earlier input in the low half
  using Operand = __m512i;
  static constexpr int inputs = 2;
  static V16 accumulate(V16 sum, Operand w, X x) {
    return {(VF)_mm512_dpbf16_ps((__m512)sum.v[0], (__m512bh)w, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)))};
  }
};

// The first or the second bfloat16 of every pair.
inline V16 half(__m512i pairs, int second) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  return {(VF)(second ? _mm512_and_si512(pairs, high) : _mm512_slli_epi32(pairs, 16))};
}

struct BFloat16Pair {
  using Math = Pair;
  static constexpr int steps = 1, at_once = 1;
  static constexpr float factor = 1.f;
  FREIGHT_INLINE void decode(const uint8_t* unit, int, __m512i* out) const { *out = _mm512_load_si512(unit); }
};

struct BFloat16 {
  using Math = Single;
  static constexpr int steps = 2, at_once = 1;
  static constexpr float factor = 1.f;
  FREIGHT_INLINE void decode(const uint8_t* unit, int step, V16* out) const { *out = half(_mm512_load_si512(unit), step); }
};

struct E4M3Pair {
  using Math = Pair;
  static constexpr int steps = 2, at_once = 2;
  static constexpr float factor = 1.f;
  Decoder<FREIGHT_E4M3FN> pairs;
  FREIGHT_INLINE void decode(const uint8_t* unit, int, __m512i* out) const { pairs(_mm512_load_si512(unit), out[0], out[1]); }
};

struct E4M3 {
  using Math = Single;
  static constexpr int steps = 4, at_once = 1;
  static constexpr float factor = 1.f;
  E4M3Pair pairs;
  FREIGHT_INLINE void decode(const uint8_t* unit, int step, V16* out) const {
    __m512i two[2];
    pairs.decode(unit, 0, two);
    *out = half(two[step / 2], step % 2);
  }
};

#elif FREIGHT_NEON_BF16

// BFDOT rounds sums to odd and treats subnormals as zeros, unlike fused multiply-adds. So products of any number of
// rows use it, and a row's bits are always the same.
struct Pair {
  using X = uint32_t;  // two bfloat16, the earlier input in the low half
  struct Operand {
    bfloat16x8_t v[4];  // four lanes each
  };
  static constexpr int inputs = 2;
  static V16 accumulate(V16 sum, const Operand& w, X x) {
    const bfloat16x8_t both = vreinterpretq_bf16_u32(vdupq_n_u32(x));
    return each([&](int i) { return (VF)vbfdotq_f32((float32x4_t)sum.v[i], w.v[i], both); });
  }
};

// The first or the second bfloat16 of every pair.
inline V16 half(const Pair::Operand& pairs, int second) {
  return each([&](int i) {
    const uint32x4_t words = vreinterpretq_u32_bf16(pairs.v[i]);
    return (VF)(second ? words & 0xFFFF0000u : words << 16);
  });
}

struct BFloat16Pair {
  using Math = Pair;
  static constexpr int steps = 1, at_once = 1;
  static constexpr float factor = 1.f;
  void decode(const uint8_t* unit, int, Pair::Operand* out) const {
    for (int i = 0; i < 4; i++) out->v[i] = vreinterpretq_bf16_u8(vld1q_u8(unit + 16 * i));
  }
};

struct BFloat16 {
  using Math = Single;
  static constexpr int steps = 2, at_once = 1;
  static constexpr float factor = 1.f;
  void decode(const uint8_t* unit, int step, V16* out) const {
    Pair::Operand pairs;
    BFloat16Pair().decode(unit, 0, &pairs);
    *out = half(pairs, step);
  }
};

struct E4M3Pair {
  using Math = Pair;
  static constexpr int steps = 2, at_once = 1;
  static constexpr float factor = 1.f;
  NeonE4M3 pairs;
  void decode(const uint8_t* unit, int step, Pair::Operand* out) const {
    for (int i = 0; i < 4; i += 2) pairs(unit + 32 * step + 8 * i, out->v[i], out->v[i + 1]);
  }
};

struct E4M3 {
  using Math = Single;
  static constexpr int steps = 4, at_once = 1;
  static constexpr float factor = 1.f;
  E4M3Pair pairs;
  void decode(const uint8_t* unit, int step, V16* out) const {
    Pair::Operand two;
    pairs.decode(unit, step / 2, &two);
    *out = half(two, step % 2);
  }
};

#else

struct BFloat16 {
  using Math = Single;
  static constexpr int steps = 2, at_once = 1;
  static constexpr float factor = 1.f;
  FREIGHT_INLINE void decode(const uint8_t* unit, int step, V16* out) const {
    *out = load_as<FREIGHT_BFLOAT16>(unit + 2 * kLanes * step);
  }
};

// NaN codes need no handling: packing has set the scale of their row to NaN.
struct E4M3 {
  using Math = Single;
  static constexpr int steps = 4, at_once = 1;
#if FREIGHT_AVX2
  // Words hold the codes of two inputs. A code's bits, with its sign extended, shifted left by seven, are a float16
  // that is 2^8 too small, because its exponent's bias is 8 larger. A multiplication by 128 does that for the lower
  // codes. This takes fewer operations than to widen codes and to shift them, which counts where those of 256 bits are
  // two.
  static constexpr float factor = 256.f;
  FREIGHT_INLINE void decode(const uint8_t* unit, int step, V16* out) const {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit) + step / 2);
    const __m256i shifted =
        step % 2 ? _mm256_srai_epi16(codes, 1) : _mm256_maddubs_epi16(_mm256_set1_epi16(0x80), codes);
    const __m256i half = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<short>(0xBF80)));
    *out = {of_f16((VH)_mm256_castsi256_si128(half)), of_f16((VH)_mm256_extracti128_si256(half, 1))};
  }
#elif FREIGHT_NEON
  static constexpr float factor = 256.f;  // likewise
  void decode(const uint8_t* unit, int step, V16* out) const {
    const int8x16_t codes = vreinterpretq_s8_u8(vld1q_u8(unit + kLanes * step));
    const Floats16 floats = neon_of_f16(neon_e4m3(vget_low_s8(codes)), neon_e4m3(vget_high_s8(codes)));
    *out = each([&](int i) { return (VF)floats.v[i]; });
  }
#else
  // The same for float32, 2^120 too small; it is multiplied immediately, because products with it would underflow.
  // Sixteen codes are read as four words; byte i of each word gives one vector of four.
  static constexpr float factor = 1.f;
  FREIGHT_INLINE void decode(const uint8_t* unit, int step, V16* out) const {
    VU words;
    std::memcpy(&words, unit + kLanes * step, sizeof words);
    *out = each([&](int i) {
      const VU code = words << (24 - 8 * i);
      return (VF)((code & 0x80000000u) | (code & 0x7F000000u) >> 4) * 0x1p120f;
    });
  }
#endif
};

#endif

// Index in a unit, in elements, of row `lane` and input `input`.
inline int unit_index(int32_t format, int lane, int input) {
  if (format == FREIGHT_INT8) return int8_index(lane, input);
#if FREIGHT_AVX512
  if (format == FREIGHT_E4M3FN) return lane / 4 * 16 + input / 2 * 8 + lane % 4 * 2 + input % 2;
  if (format == FREIGHT_BFLOAT16) return lane * 2 + input;
#elif FREIGHT_NEON_BF16
  if (format == FREIGHT_E4M3FN) return input / 2 * 2 * kLanes + lane * 2 + input % 2;
  if (format == FREIGHT_BFLOAT16) return lane * 2 + input;
#elif FREIGHT_AVX2
  if (format == FREIGHT_E4M3FN) return input / 2 * 2 * kLanes + lane * 2 + input % 2;
#elif FREIGHT_PORTABLE && !FREIGHT_NEON
  if (format == FREIGHT_E4M3FN) return input * kLanes + lane % 4 * 4 + lane / 4;
#else
  (void)format;
#endif
  return input * kLanes + lane;
}

}  // namespace freight
