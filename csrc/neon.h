// NEON code in place of GCC's vector extensions: conversions between stored formats and float32, and with the BF16
// extension (FEAT_BF16) the decoding of E4M3 to bfloat16. Vectors have 4 lanes of float32, as in the portable build.
#pragma once
#if defined(__aarch64__) && defined(__ARM_NEON)
#define FREIGHT_NEON 1
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define FREIGHT_NEON_BF16 1  // also has dot products of bfloat16
#endif
#include <arm_neon.h>

#include "values.h"

namespace freight {

struct Floats16 {
  float32x4_t v[4];
};

// 16 values of float16.
inline Floats16 neon_of_f16(uint16x8_t first, uint16x8_t last) {
  const float16x8_t a = vreinterpretq_f16_u16(first), b = vreinterpretq_f16_u16(last);
  return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)}};
}

// 8 codes of E4M3 -> float16 that are 2^8 too small (E4M3FNUZ: 2^7): the bits are shifted left by seven, and the bias
// of float16's exponent is 8 (7) larger. NaN codes are not handled.
inline uint16x8_t neon_e4m3(int8x8_t codes) {
  return vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(codes, 7)), vdupq_n_u16(0xBF80));  // clears the extended sign
}

// 16 values of format F, which is not float32.
template <FreightFormat F>
inline Floats16 neon_load(const void* from) {
  if constexpr (F == FREIGHT_FLOAT16) {
    const uint16_t* halves = static_cast<const uint16_t*>(from);
    return neon_of_f16(vld1q_u16(halves), vld1q_u16(halves + 8));
  } else if constexpr (F == FREIGHT_BFLOAT16) {
    const uint16x8_t zero = vdupq_n_u16(0);
    Floats16 out;
    for (int i = 0; i < 4; i += 2) {
      const uint16x8_t halves = vld1q_u16(static_cast<const uint16_t*>(from) + 4 * i);
      out.v[i] = vreinterpretq_f32_u16(vzip1q_u16(zero, halves));
      out.v[i + 1] = vreinterpretq_f32_u16(vzip2q_u16(zero, halves));
    }
    return out;
  } else if constexpr (F == FREIGHT_INT8) {
    const int8x16_t codes = vld1q_s8(static_cast<const int8_t*>(from));
    const int16x8_t halves[] = {vmovl_s8(vget_low_s8(codes)), vmovl_s8(vget_high_s8(codes))};
    Floats16 out;
    for (int i = 0; i < 4; i++) {
      const int32x4_t code = vmovl_s16(i % 2 ? vget_high_s16(halves[i / 2]) : vget_low_s16(halves[i / 2]));
      const uint32x4_t nan = vceqq_s32(code, vdupq_n_s32(-128));  // all bits set: a NaN
      out.v[i] = vreinterpretq_f32_u32(vreinterpretq_u32_f32(vcvtq_f32_s32(code)) | nan);
    }
    return out;
  } else if constexpr (F == FREIGHT_E5M2) {
    const uint8x16_t codes = vld1q_u8(static_cast<const uint8_t*>(from));
    const uint8x16_t zero = vdupq_n_u8(0);
    return neon_of_f16(vreinterpretq_u16_u8(vzip1q_u8(zero, codes)), vreinterpretq_u16_u8(vzip2q_u8(zero, codes)));
  } else {  // E4M3 through float16
    const int8x16_t codes = vld1q_s8(static_cast<const int8_t*>(from));
    const int8x16_t all = vdupq_n_s8(0x7F), magnitude = vandq_s8(codes, all);
    const uint8x16_t nan = F == FREIGHT_E4M3FNUZ ? vceqq_s8(codes, vdupq_n_s8(-128)) : vceqq_s8(magnitude, all);
    const uint16x8_t quiet = vdupq_n_u16(0x7E00);
    const uint16x8_t first = neon_e4m3(vget_low_s8(codes)), last = neon_e4m3(vget_high_s8(codes));
    const uint16x8_t first_nan = vandq_u16(vreinterpretq_u16_u8(vzip1q_u8(nan, nan)), quiet);
    const uint16x8_t last_nan = vandq_u16(vreinterpretq_u16_u8(vzip2q_u8(nan, nan)), quiet);
    Floats16 out = neon_of_f16(vorrq_u16(first, first_nan), vorrq_u16(last, last_nan));
    for (auto& v : out.v) v = v * (F == FREIGHT_E4M3FNUZ ? 128.0f : 256.0f);
    return out;
  }
}

// 16 floats, rounded to nearest, ties to even, as float_to_bf16 and float_to_f16 do.
template <FreightFormat F>
inline void neon_store(uint16_t* to, const Floats16& values) {
  for (int i = 0; i < 4; i++) {
    const float32x4_t v = values.v[i];
    if constexpr (F == FREIGHT_FLOAT16) {
      vst1_u16(to + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(v)));
    } else {
      const uint32x4_t bits = vreinterpretq_u32_f32(v), high = bits >> 16;
      const uint32x4_t rounded = bits + 0x7FFF + (high & 1), nan = bits | (0x40 << 16);
      vst1_u16(to + 4 * i, vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, nan), 16));
    }
  }
}

#if FREIGHT_NEON_BF16

// 16 codes of E4M3 -> bfloat16, in order. The bfloat16 of a normal value is its exponent and mantissa, shifted left by
// four, plus the difference of the exponents' biases. Codes with a magnitude below 16, some of which are subnormal, are
// looked up in a table. NaN codes are not handled.
struct NeonE4M3 {
  uint8x16_t low, high;

  NeonE4M3() {
    const CodeTable& table = code_table<FREIGHT_E4M3FN>();
    low = vld1q_u8(table.low), high = vld1q_u8(table.high);
  }

  void operator()(const uint8_t* from, bfloat16x8_t& first, bfloat16x8_t& last) const {
    const uint8x16_t codes = vld1q_u8(from), sign = vdupq_n_u8(0x80), magnitude = vbicq_u8(codes, sign);
    const uint8x16_t lows = vqtbx1q_u8(vshlq_n_u8(codes, 4), low, magnitude);  // vqtbx keeps lanes beyond the table
    const uint8x16_t highs = vqtbx1q_u8(vsraq_n_u8(vdupq_n_u8(0x3C), magnitude, 4), high, magnitude);
    const uint8x16_t with_sign = vbslq_u8(sign, codes, highs);
    first = vreinterpretq_bf16_u8(vzip1q_u8(lows, with_sign));
    last = vreinterpretq_bf16_u8(vzip2q_u8(lows, with_sign));
  }
};

#endif

}  // namespace freight
#endif
