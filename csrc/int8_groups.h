// Products of weights in 4 bits, in INT8, or in the blocks of GGUF files, with inputs in INT8, where both have scales of
// groups of inputs.
//
// A group's term is the exact sum of its products in int32, converted to float32, times the product of both scales. The
// terms of a row are added from the first group to the last. Where the weight has minima a group has a second term, which
// is added after the first: the sum of the codes of x times the scale of x, times the minimum. Each of these steps rounds
// once, and none is fused. So every build, number of rows and the reference (`_grouped_linear`) give the same bits.
//
// A piece of a band has 32 inputs or more: the scales of its groups, [groups][2 blocks][16]; with zero points their
// codes, [groups][2 blocks][16] bytes; then lines of 64 bytes, [8 inputs each][2 blocks]. A line has four bytes of each of
// 16 rows: byte j has the code of input j in its low half, and that of input 4 + j in its high half. INT8 has two lines, of
// inputs 0 to 3 and 4 to 7. All builds have this layout. The scale of MXFP4 is the exponent's byte of half the scale, that
// of NVFP4 as in four_bit.h.
//
// Blocks of GGUF files: those of 32 inputs are pieces of one group. Minima are float16 and follow the scales as zero
// points do. Blocks of 256 inputs are pieces that begin with a float16 of each row, [2 blocks][16], by which the byte of a
// group is multiplied, exactly: its scale. Another such float16, negated, and bytes are for minima. Signed bytes have 128
// added. The bytes of a group are directly before its codes: memory was read 1.7 times as fast as with those of all groups
// at the front of the piece, on an AMD EPYC (Zen 4). Codes of 5 and 6 bits have their low 4 as above; the others come
// before the lines of a group, a line of 64 bytes for each block: bit k of a byte (5 bits), or bits 2 k and 2 k + 1
// (6 bits), are of the k-th four inputs of the group.
//
// Codes become unsigned bytes, which instructions multiply by the signed bytes of x: INT4 is 0 to 15, E2M1 is twice its
// value plus 12, 0 to 24, INT8 is its value plus 128, and so are the 16 values of IQ4_NL and IQ4_XS, 1 to 241. What that
// adds is subtracted as the code of zero times the sum of the group's x: it is where the sums begin. Without VNNI the
// halves of the bytes of INT8 and IQ4 are multiplied separately.
//
// Where products are summed in 16 bits (AVX2 without VNNI, and portable), each of two sums of a row takes 2 of 4 inputs:
// half of the products. INT4 and halves of bytes: 32 inputs, 16 * 15 * 128 = 30,720; E2M1: 16 inputs, 8 * 24 * 128 =
// 24,576; 5 bits: 16 inputs, 8 * 31 * 128 = 31,744; 6 bits: 8 inputs, 4 * 63 * 128 = 32,256. All fit. (A code of x is -128
// only where x is minus infinity.)
#pragma once
#include "four_bit.h"

namespace freight {

constexpr int kLineInputs = 8;
// Twice the value of each code of E2M1, plus 12.
alignas(16) constexpr int8_t kE2M1Bytes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
// The values of the codes of IQ4_NL and IQ4_XS, plus 128, and their halves.
alignas(16) constexpr uint8_t kIq4Bytes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
struct Iq4Halves {
  alignas(16) uint8_t low[16] = {}, high[16] = {};
};
constexpr Iq4Halves iq4_halves() {
  Iq4Halves out;
  for (int i = 0; i < 16; i++) out.low[i] = kIq4Bytes[i] & 15, out.high[i] = kIq4Bytes[i] >> 4;
  return out;
}
constexpr Iq4Halves kIq4Halves = iq4_halves();

enum class Codes { kInt4, kE2M1, kInt8, kIq4, kFive, kSix };
// Bits of a code that are not in the low 4 (which are in the lines), and the largest byte that a code becomes.
constexpr int high_bits(Codes codes) { return codes == Codes::kFive ? 1 : codes == Codes::kSix ? 2 : 0; }
constexpr bool is_bytes(Codes codes) { return codes == Codes::kInt8 || codes == Codes::kIq4; }
constexpr int largest_byte(Codes codes) {  // of bytes, that of their halves
  return codes == Codes::kE2M1 ? 24 : codes == Codes::kFive ? 31 : codes == Codes::kSix ? 63 : 15;
}
// The largest number of inputs that are summed in 16 bits.
constexpr int inputs_in_short(Codes codes) {
  return codes == Codes::kSix ? 8 : codes == Codes::kE2M1 || codes == Codes::kFive ? 16 : 32;
}
constexpr bool fits_in_short(Codes codes) { return inputs_in_short(codes) / 2 * largest_byte(codes) * 128 < 1 << 15; }
static_assert(fits_in_short(Codes::kInt4) && fits_in_short(Codes::kE2M1) && fits_in_short(Codes::kInt8));
static_assert(fits_in_short(Codes::kIq4) && fits_in_short(Codes::kFive) && fits_in_short(Codes::kSix));
#if FREIGHT_VNNI
constexpr bool kWholeBytes = true;  // 0 to 255 are multiplied at once
#else
constexpr bool kWholeBytes = false;
#endif
// Inputs of a row of x that share a scale. Two groups of NVFP4 do.
constexpr int x_group(int inputs) { return inputs < 32 ? 32 : inputs; }
// Words of a row's staged group: its inputs, its scale, and its sum; where the weight has minima, the sum times the scale.
constexpr int64_t group_words(int inputs) { return inputs / 4 + 2; }

// 16 bytes without a sign as integers, whose bits a V16 holds.
FREIGHT_INLINE V16 of_bytes(const uint8_t* bytes) {
#if FREIGHT_AVX512
  return {(VF)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)))};
#elif FREIGHT_AVX2
  return each([=](int i) {
    return (VF)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + 8 * i)));
  });
#else
  typedef uint8_t Four __attribute__((vector_size(4)));
  return each([=](int i) {
    Four four;
    std::memcpy(&four, bytes + 4 * i, sizeof four);
    return (VF)__builtin_convertvector(four, VU);
  });
#endif
}

// Integer sums of 16 rows, in which one of x's rows is multiplied. `CodeLine` decodes a line to its first and last 4 inputs:
// of bytes without VNNI their low (HALF 0) or high halves. `HighBits` are those of a group, the next line's lowest.
#if FREIGHT_AVX512

struct GroupSums {
  static constexpr bool is_short = false;
  __m512i sum;
  void begin(const V16& at) { sum = (__m512i)at.v[0]; }
  template <class Line>
  FREIGHT_INLINE void add(const Line& line, uint32_t first, uint32_t last) {
    sum = _mm512_dpbusd_epi32(sum, line.first, _mm512_set1_epi32(static_cast<int>(first)));
    sum = _mm512_dpbusd_epi32(sum, line.last, _mm512_set1_epi32(static_cast<int>(last)));
  }
  void widen() {}
  V16 total() const { return {(VF)sum}; }
};

struct HighBits {
  __m512i bits;
  FREIGHT_INLINE void read(const uint8_t* from) { bits = _mm512_loadu_si512(from); }
  FREIGHT_INLINE void skip(int count) { bits = _mm512_srl_epi16(bits, _mm_cvtsi32_si128(count)); }
};

template <Codes CODES, int HALF>
struct CodeLine {
  __m512i first, last;
  FREIGHT_INLINE CodeLine(const uint8_t* from, const HighBits& high) {
    const __m512i codes = _mm512_loadu_si512(from), low = _mm512_set1_epi8(15);
    if constexpr (CODES == Codes::kInt8) {
      first = codes, last = _mm512_loadu_si512(from + kUnit);
      return;
    }
    first = _mm512_and_si512(codes, low), last = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low);
    if constexpr (CODES == Codes::kE2M1 || CODES == Codes::kIq4) {
      const void* bytes = CODES == Codes::kIq4 ? static_cast<const void*>(kIq4Bytes) : kE2M1Bytes;
      const __m512i values = _mm512_broadcast_i32x4(_mm_load_si128(static_cast<const __m128i*>(bytes)));
      first = _mm512_shuffle_epi8(values, first), last = _mm512_shuffle_epi8(values, last);
    }
    if constexpr (high_bits(CODES) != 0) {
      constexpr int count = high_bits(CODES);
      const __m512i mask = _mm512_set1_epi8(((1 << count) - 1) << 4);
      first = _mm512_ternarylogic_epi32(_mm512_slli_epi16(high.bits, 4), mask, first, 0xEA);  // bits & mask | first
      last = _mm512_ternarylogic_epi32(_mm512_slli_epi16(high.bits, 4 - count), mask, last, 0xEA);
    }
  }
};

#elif FREIGHT_AVX2

#if FREIGHT_VNNI
struct GroupSums {
  static constexpr bool is_short = false;
  __m256i sum[2];
  void begin(const V16& at) {
    for (int i = 0; i < 2; i++) sum[i] = (__m256i)at.v[i];
  }
  template <class Line>
  FREIGHT_INLINE void add(const Line& line, uint32_t first, uint32_t last) {
    const __m256i one = _mm256_set1_epi32(static_cast<int>(first)), other = _mm256_set1_epi32(static_cast<int>(last));
    for (int i = 0; i < 2; i++) {
      sum[i] = FREIGHT_DPBUSD(sum[i], line.first[i], one);
      sum[i] = FREIGHT_DPBUSD(sum[i], line.last[i], other);
    }
  }
  void widen() {}
  V16 total() const { return {{(VF)sum[0], (VF)sum[1]}}; }
};
#else
struct GroupSums {
  static constexpr bool is_short = true;
  __m256i sum[2], wide[2];
  void begin(const V16& at) {
    for (int i = 0; i < 2; i++) sum[i] = _mm256_setzero_si256(), wide[i] = (__m256i)at.v[i];
  }
  template <class Line>
  FREIGHT_INLINE void add(const Line& line, uint32_t first, uint32_t last) {
    const __m256i one = _mm256_set1_epi32(static_cast<int>(first)), other = _mm256_set1_epi32(static_cast<int>(last));
    for (int i = 0; i < 2; i++) {
      sum[i] = _mm256_add_epi16(sum[i], _mm256_maddubs_epi16(line.first[i], one));
      sum[i] = _mm256_add_epi16(sum[i], _mm256_maddubs_epi16(line.last[i], other));
    }
  }
  FREIGHT_INLINE void widen() {
    for (int i = 0; i < 2; i++) {
      wide[i] = _mm256_add_epi32(wide[i], _mm256_madd_epi16(sum[i], _mm256_set1_epi16(1)));
      sum[i] = _mm256_setzero_si256();
    }
  }
  V16 total() const { return {{(VF)wide[0], (VF)wide[1]}}; }
};
#endif

struct HighBits {
  __m256i bits[2];
  FREIGHT_INLINE void read(const uint8_t* from) {
    for (int i = 0; i < 2; i++) bits[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i);
  }
  FREIGHT_INLINE void skip(int count) {
    for (auto& half : bits) half = _mm256_srl_epi16(half, _mm_cvtsi32_si128(count));
  }
};

template <Codes CODES, int HALF>
struct CodeLine {
  __m256i first[2], last[2];
  static __m256i half(__m256i bytes) {
    if constexpr (kWholeBytes) return bytes;
    return _mm256_and_si256(HALF ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
  }
  // The bytes of the codes 0 to 15.
  static const void* bytes_of_codes() {
    if constexpr (CODES == Codes::kE2M1) return kE2M1Bytes;
    return kWholeBytes ? kIq4Bytes : HALF ? kIq4Halves.high : kIq4Halves.low;
  }
  FREIGHT_INLINE CodeLine(const uint8_t* from, const HighBits& high) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int i = 0; i < 2; i++) {
      const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i);
      if constexpr (CODES == Codes::kInt8) {
        first[i] = half(codes), last[i] = half(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + kUnit) + i));
        continue;
      }
      first[i] = _mm256_and_si256(codes, low), last[i] = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
      if constexpr (CODES == Codes::kE2M1 || CODES == Codes::kIq4) {
        const __m256i values = _mm256_broadcastsi128_si256(_mm_load_si128(static_cast<const __m128i*>(bytes_of_codes())));
        first[i] = _mm256_shuffle_epi8(values, first[i]), last[i] = _mm256_shuffle_epi8(values, last[i]);
      }
      if constexpr (high_bits(CODES) != 0) {
        constexpr int count = high_bits(CODES);
        const __m256i mask = _mm256_set1_epi8(((1 << count) - 1) << 4);
        first[i] = _mm256_or_si256(first[i], _mm256_and_si256(_mm256_slli_epi16(high.bits[i], 4), mask));
        last[i] = _mm256_or_si256(last[i], _mm256_and_si256(_mm256_slli_epi16(high.bits[i], 4 - count), mask));
      }
    }
  }
};

#elif FREIGHT_NEON && defined(__ARM_FEATURE_DOTPROD)

struct GroupSums {
  static constexpr bool is_short = false;
  int32x4_t sum[4];
  void begin(const V16& at) {
    for (int i = 0; i < 4; i++) sum[i] = (int32x4_t)at.v[i];
  }
  template <class Line>
  FREIGHT_INLINE void add(const Line& line, uint32_t first, uint32_t last) {
    const int8x16_t one = vreinterpretq_s8_u32(vdupq_n_u32(first)), other = vreinterpretq_s8_u32(vdupq_n_u32(last));
    for (int i = 0; i < 4; i++) sum[i] = vdotq_s32(vdotq_s32(sum[i], line.first[i], one), line.last[i], other);
  }
  void widen() {}
  V16 total() const {
    return each([&](int i) { return (VF)sum[i]; });
  }
};

struct HighBits {
  uint8x16_t bits[4];
  FREIGHT_INLINE void read(const uint8_t* from) {
    for (int i = 0; i < 4; i++) bits[i] = vld1q_u8(from + 16 * i);
  }
  FREIGHT_INLINE void skip(int count) {
    for (auto& quarter : bits) quarter = vshlq_u8(quarter, vdupq_n_s8(static_cast<int8_t>(-count)));
  }
};

template <Codes CODES, int HALF>
struct CodeLine {
  int8x16_t first[4], last[4];
  FREIGHT_INLINE CodeLine(const uint8_t* from, const HighBits& high_of) {
    for (int i = 0; i < 4; i++) {
      const uint8x16_t codes = vld1q_u8(from + 16 * i), low = vandq_u8(codes, vdupq_n_u8(15)), high = vshrq_n_u8(codes, 4);
      if constexpr (CODES == Codes::kInt8) {
        const uint8x16_t more = vld1q_u8(from + kUnit + 16 * i);
        first[i] = vreinterpretq_s8_u8(HALF ? high : low);
        last[i] = vreinterpretq_s8_u8(HALF ? vshrq_n_u8(more, 4) : vandq_u8(more, vdupq_n_u8(15)));
      } else if constexpr (CODES == Codes::kE2M1) {
        const int8x16_t values = vld1q_s8(kE2M1Bytes);
        first[i] = vqtbl1q_s8(values, low), last[i] = vqtbl1q_s8(values, high);
      } else if constexpr (CODES == Codes::kIq4) {
        const int8x16_t values = vreinterpretq_s8_u8(vld1q_u8(HALF ? kIq4Halves.high : kIq4Halves.low));
        first[i] = vqtbl1q_s8(values, low), last[i] = vqtbl1q_s8(values, high);
      } else if constexpr (high_bits(CODES) != 0) {
        constexpr int count = high_bits(CODES);
        const uint8x16_t mask = vdupq_n_u8(((1 << count) - 1) << 4);
        first[i] = vreinterpretq_s8_u8(vorrq_u8(low, vandq_u8(vshlq_n_u8(high_of.bits[i], 4), mask)));
        last[i] = vreinterpretq_s8_u8(vorrq_u8(high, vandq_u8(vshlq_n_u8(high_of.bits[i], 4 - count), mask)));
      } else {
        first[i] = vreinterpretq_s8_u8(low), last[i] = vreinterpretq_s8_u8(high);
      }
    }
  }
};

#else

typedef int16_t ByPair __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(16)));

// Four rows in a register: two sums of a row, of its bytes 0 and 1, and 2 and 3.
struct GroupSums {
  static constexpr bool is_short = true;
  ByPair sum[4];
  VI wide[4];
  void begin(const V16& at) {
    for (int i = 0; i < 4; i++) sum[i] = ByPair{}, wide[i] = (VI)at.v[i];
  }
  // Bytes 0 and 2 of a word of x, or 1 and 3, as signed halves of each word.
  static ByPair halves(uint32_t x, int byte) {
    const uint32_t low = static_cast<uint16_t>(static_cast<int8_t>(x >> 8 * byte));
    const uint32_t high = static_cast<uint16_t>(static_cast<int8_t>(x >> (8 * byte + 16)));
    return (ByPair)(VU{} + (low | high << 16));
  }
  template <class Line>
  FREIGHT_INLINE void add(const Line& line, uint32_t first, uint32_t last) {
    const ByPair x[4] = {halves(first, 0), halves(first, 1), halves(last, 0), halves(last, 1)};
    for (int i = 0; i < 4; i++)
      for (int part = 0; part < 4; part++) sum[i] += line.codes[part][i] * x[part];
  }
  void widen() {
    for (int i = 0; i < 4; i++) {
      const VI both = (VI)sum[i];
      wide[i] += ((VI)((VU)both << 16) >> 16) + (both >> 16);
      sum[i] = ByPair{};
    }
  }
  V16 total() const {
    return each([&](int i) { return (VF)wide[i]; });
  }
};

struct HighBits {
  Halves bits[4];
  void read(const uint8_t* from) { std::memcpy(bits, from, sizeof bits); }
  void skip(int count) {
    for (auto& quarter : bits) quarter >>= count;
  }
};

template <Codes CODES, int HALF>
struct CodeLine {
  ByPair codes[4][4];  // of bytes 0 and 2 of each row: low halves; of 1 and 3; then their high halves
  CodeLine(const uint8_t* from, const HighBits& high) {
    for (int i = 0; i < 4; i++) {
      Halves line, more;
      std::memcpy(&line, from + 16 * i, sizeof line);
      if constexpr (CODES == Codes::kInt8) {
        std::memcpy(&more, from + kUnit + 16 * i, sizeof more);
        for (int part = 0; part < 4; part++)
          codes[part][i] = (ByPair)((part / 2 ? more : line) >> (part % 2 * 8 + HALF * 4) & 15);
        continue;
      }
      for (int part = 0; part < 4; part++) {
        codes[part][i] = value((ByPair)(line >> (part % 2 * 8 + part / 2 * 4) & 15));
        if constexpr (high_bits(CODES) != 0) {
          constexpr int count = high_bits(CODES);
          const Halves bits = high.bits[i] >> (part % 2 * 8 + part / 2 * count);
          codes[part][i] |= (ByPair)((bits & static_cast<uint16_t>((1 << count) - 1)) << 4);
        }
      }
    }
  }
  static ByPair value(ByPair code) {
    if constexpr (CODES == Codes::kIq4) {
      const uint8_t* half = HALF ? kIq4Halves.high : kIq4Halves.low;
      for (int i = 0; i < 8; i++) code[i] = half[code[i]];
      return code;
    }
    if constexpr (CODES != Codes::kE2M1) return code;
    const ByPair magnitude = code & 7, sign = -(code >> 3);  // a comparison is -1 where it holds
    const ByPair twice = magnitude - (magnitude > 4) - (magnitude > 5) - 3 * (magnitude > 6);
    return (twice ^ sign) - sign + 12;
  }
};

#endif

// The layout of a weight; of blocks of one format a constant, so that its loops and offsets are, too.
constexpr int kAnyLayout = -1;
template <int BLOCKS>
FREIGHT_INLINE FourBit known_layout(const FourBit& stored) {
  if constexpr (BLOCKS != kAnyLayout) {
    constexpr FourBit own = block_layout(BLOCKS);
    return own;
  }
  return stored;
}

// Weights: their codes, whether their groups have minima, and `zero`, the code of 0 (without zero points). scales,
// minima: of a group of a block.
template <Codes CODES, bool MINIMA = false, int BLOCKS = kAnyLayout>
struct OwnScales {  // 16-bit numbers of each group
  static constexpr int blocks = BLOCKS;
  static constexpr Codes codes = CODES;
  static constexpr bool has_minima = MINIMA;
  static constexpr int zero = is_bytes(CODES) ? 128 : MINIMA ? 0 : CODES == Codes::kFive ? 16 : 8;
  FREIGHT_INLINE static V16 scales(const FourBit& layout, const uint8_t* piece, int side, int group) {
    return scales_of(layout, piece + scales_at(layout, side, group));
  }
  FREIGHT_INLINE static V16 minima(const FourBit& layout, const uint8_t* piece, int side, int group) {
    return load_as<FREIGHT_FLOAT16>(piece + minima_at(layout, side, group));
  }
};
using Int4Groups = OwnScales<Codes::kInt4>;
using Int8Groups = OwnScales<Codes::kInt8>;

template <Codes CODES, bool MINIMA, int BLOCKS>
struct ByteScales {  // bytes of each group, times a float16 of the piece; signed without minima
  static constexpr int blocks = BLOCKS;
  static constexpr Codes codes = CODES;
  static constexpr bool has_minima = MINIMA;
  static constexpr int zero = MINIMA ? 0 : CODES == Codes::kSix ? 32 : 128;
  FREIGHT_INLINE static V16 scales(const FourBit& layout, const uint8_t* piece, int side, int group) {
    return product(piece + side * kLanes * 2, piece + scales_at(layout, side, group), MINIMA ? 0 : 128);
  }
  FREIGHT_INLINE static V16 minima(const FourBit& layout, const uint8_t* piece, int side, int group) {
    return product(piece + (kBand + side) * kLanes * 2, piece + minima_at(layout, side, group), 0);
  }
  FREIGHT_INLINE static V16 product(const uint8_t* row_scales, const uint8_t* bytes, int added) {
    const V16 integers = of_bytes(bytes), factors = load_as<FREIGHT_FLOAT16>(row_scales);
    return each([&](int i) { return __builtin_convertvector((VI)integers.v[i] - added, VF) * factors.v[i]; });
  }
};

struct Mxfp4Groups {
  static constexpr int blocks = kAnyLayout;
  static constexpr Codes codes = Codes::kE2M1;
  static constexpr bool has_minima = false;
  static constexpr int zero = 12;
  FREIGHT_INLINE static V16 scales(const FourBit& layout, const uint8_t* piece, int side, int group) {
    const V16 bytes = of_bytes(piece + scales_at(layout, side, group));
    return each([&](int i) { return (VF)((VU)bytes.v[i] << 23); });
  }
};

struct Nvfp4Groups {
  static constexpr int blocks = kAnyLayout;
  static constexpr Codes codes = Codes::kE2M1;
  static constexpr bool has_minima = false;
  static constexpr int zero = 12;
  FREIGHT_INLINE static V16 scales(const FourBit& layout, const uint8_t* piece, int side, int group) {
    const V16 bytes = of_bytes(piece + scales_at(layout, side, group));
    const VF half = set1(bits_to_float((253u - kScaleBias) << 23));  // values are twice those of the codes
    return each([&](int i) { return (VF)((VU)bytes.v[i] << 20) * half; });
  }
};

// Call f with the kind of a weight in blocks of GGUF files.
template <class F>
void with_blocks(int32_t format, const F& f) {
  switch (format & ~(FREIGHT_BLOCKS | FREIGHT_INTEGERS)) {
    case FREIGHT_BLOCKS_Q4_1: return f(OwnScales<Codes::kInt4, true, FREIGHT_BLOCKS_Q4_1>());
    case FREIGHT_BLOCKS_Q5_0: return f(OwnScales<Codes::kFive, false, FREIGHT_BLOCKS_Q5_0>());
    case FREIGHT_BLOCKS_Q5_1: return f(OwnScales<Codes::kFive, true, FREIGHT_BLOCKS_Q5_1>());
    case FREIGHT_BLOCKS_Q8_0: return f(Int8Groups());
    case FREIGHT_BLOCKS_Q4_K: return f(ByteScales<Codes::kInt4, true, FREIGHT_BLOCKS_Q4_K>());
    case FREIGHT_BLOCKS_Q5_K: return f(ByteScales<Codes::kFive, true, FREIGHT_BLOCKS_Q5_K>());
    case FREIGHT_BLOCKS_Q6_K: return f(ByteScales<Codes::kSix, false, FREIGHT_BLOCKS_Q6_K>());
    case FREIGHT_BLOCKS_IQ4_NL: return f(OwnScales<Codes::kIq4, false, FREIGHT_BLOCKS_IQ4_NL>());
    case FREIGHT_BLOCKS_IQ4_XS: return f(ByteScales<Codes::kIq4, false, FREIGHT_BLOCKS_IQ4_XS>());
    case FREIGHT_BLOCKS_MXFP4: return f(Mxfp4Groups());
    default: return f(Int4Groups());  // Q4_0
  }
}

// Offsets in a piece of the lines of a group of a block and, of codes of 5 and 6 bits, of their high bits.
template <Codes CODES>
struct GroupLines {
  static constexpr int line_bytes = CODES == Codes::kInt8 ? 2 * kUnit : kUnit;
  static constexpr int high_bytes = high_bits(CODES) ? kUnit : 0;
  int64_t high, line;

  FREIGHT_INLINE GroupLines(const FourBit& layout, int side, int group) {
    const int64_t begin = layout.head + group * layout.lines_apart;
    high = begin + side * high_bytes;
    line = begin + kBand * high_bytes + side * line_bytes;
  }
};

// Ask for a line of memory.
FREIGHT_INLINE void prefetch_line(const uint8_t* at, bool past_caches) {
  if (past_caches)  // two instructions, because the kind of prefetch is an immediate
    __builtin_prefetch(at, 0, 0);
  else
    __builtin_prefetch(at);
}

// Multiply M staged rows by a group of a block of weights, and add the terms to sums[M][16]. words: the group of x.
template <class Kind, int M>
FREIGHT_INLINE void add_group(const FourBit& layout, const uint8_t* piece, int side, int group, const uint32_t* words,
                              bool past_caches, int64_t ahead, float* sums) {
  using Lines = GroupLines<Kind::codes>;
  constexpr int halves = is_bytes(Kind::codes) && !kWholeBytes ? 2 : 1;
  const int inputs = layout.inputs / layout.groups, lines = inputs / kLineInputs;
  const int at_once = GroupSums::is_short ? std::min(lines, inputs_in_short(Kind::codes) / kLineInputs) : lines;
  // The lines of both blocks alternate. In long groups those of the second would come much later than those of the
  // first, so the first asks for both: 1.17 times as fast with groups of 128 on an AMD EPYC (Zen 4), and slower with 32.
  const bool asks_for_both = Kind::codes != Codes::kE2M1 && inputs == 128 && side == 0;
  const Lines at(layout, side, group);
  const uint8_t* line = piece + at.line;
  const float* scale = reinterpret_cast<const float*>(words + inputs / 4 * M);
  const int32_t* sum = reinterpret_cast<const int32_t*>(scale + M);
  GroupSums parts[halves][M];
  if (Kind::zero == 0) {
    FREIGHT_UNROLL
    for (int m = 0; m < M; m++) parts[0][m].begin(V16{});
  } else if (layout.zeros) {
    const V16 zeros = of_bytes(piece + zeros_at(layout, side, group));
    FREIGHT_UNROLL
    for (int m = 0; m < M; m++) parts[0][m].begin(each([&](int i) { return (VF)((VI)zeros.v[i] * -sum[m]); }));
  } else {
    FREIGHT_UNROLL
    for (int m = 0; m < M; m++) parts[0][m].begin(each([&](int) { return (VF)(VI{} - Kind::zero * sum[m]); }));
  }
  if constexpr (halves == 2)
    for (int m = 0; m < M; m++) parts[1][m].begin(V16{});
  HighBits high{};
  if constexpr (high_bits(Kind::codes) != 0) {
    high.read(piece + at.high);
    prefetch_line(piece + at.high + ahead, past_caches);
  }
  for (int first = 0; first < lines; first += at_once) {
    for (int i = 0; i < at_once; i++, line += kBand * Lines::line_bytes, words += 2 * M) {
      for (int i = 0; i < Lines::line_bytes; i += kUnit) prefetch_line(line + ahead + i, past_caches);
      if (asks_for_both) __builtin_prefetch(line + ahead + Lines::line_bytes);
      const CodeLine<Kind::codes, 0> codes(line, high);
      FREIGHT_UNROLL
      for (int m = 0; m < M; m++) parts[0][m].add(codes, words[m], words[M + m]);
      if constexpr (halves == 2) {
        const CodeLine<Kind::codes, 1> upper(line, high);
        FREIGHT_UNROLL
        for (int m = 0; m < M; m++) parts[1][m].add(upper, words[m], words[M + m]);
      }
      if constexpr (high_bits(Kind::codes) != 0) high.skip(2 * high_bits(Kind::codes));
    }
    for (auto& half : parts)
      FREIGHT_UNROLL
      for (int m = 0; m < M; m++) half[m].widen();
  }
  const V16 scales = Kind::scales(layout, piece, side, group);
  V16 minima{};
  if constexpr (Kind::has_minima) minima = Kind::minima(layout, piece, side, group);
  FREIGHT_UNROLL
  for (int m = 0; m < M; m++) {
    float* to = sums + m * kLanes;
    V16 dots = parts[0][m].total();
    if constexpr (halves == 2) {
      const V16 upper = parts[1][m].total();
      dots = each([&](int i) { return (VF)((VI)dots.v[i] + (VI)upper.v[i] * 16); });
    }
    V16 total = load16(to) + of_int_sums(dots) * (scales * set16(scale[m]));
    if constexpr (Kind::has_minima) total = total + minima * set16(scale[M + m]);
    store(to, total);
  }
}

// Multiply M staged rows by a band of weights: sums[2][M][16]. Both blocks of a group come one after the other, so that
// memory is one stream.
template <class Kind, int M>
inline void multiply_integers(const FourBit& stored, const uint8_t* piece, const uint32_t* x, int64_t pieces,
                              bool past_caches, int64_t ahead, float* sums) {
  const FourBit layout = known_layout<Kind::blocks>(stored);
  const int64_t words = group_words(layout.inputs / layout.groups) * M;
  for (; pieces > 0; pieces--, piece += layout.bytes)
    for (int group = 0; group < layout.groups; group++, x += words)
      for (int side = 0; side < kBand; side++)
        add_group<Kind, M>(layout, piece, side, group, x, past_caches, ahead, sums + side * M * kLanes);
}

}  // namespace freight
