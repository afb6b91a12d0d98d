// Values of a state, decoded as they enter a product.
//
// A product sums what `Codes::read` returns: the stored value divided by a power of two, which is exact. NaN codes are
// checked once per column, after the sum, because a sum with a NaN is NaN. `finished` multiplies the sum by the power
// of two, and makes it NaN if the column has a NaN code.
#pragma once
#include "rows.h"

namespace freight {

// Sixteen codes in a register of bytes, if the instruction set can widen them.
#if FREIGHT_AVX512 || FREIGHT_AVX2
#define FREIGHT_WIDENS_BYTES 1
typedef int8_t VB __attribute__((vector_size(kLanes)));

inline VB load_codes(const void* p) {
  VB v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Register `i` of a V16: the codes, sign-extended to 16 and to 32 bits.
inline VH widened16(VB codes, [[maybe_unused]] int i) {
#if FREIGHT_AVX512
  return (VH)_mm256_cvtepi8_epi16((__m128i)codes);
#else
  return (VH)_mm_cvtepi8_epi16(i ? _mm_srli_si128((__m128i)codes, 8) : (__m128i)codes);
#endif
}
inline VI widened32(VB codes, [[maybe_unused]] int i) {
#if FREIGHT_AVX512
  return (VI)_mm512_cvtepi8_epi32((__m128i)codes);
#else
  return (VI)_mm256_cvtepi8_epi32(i ? _mm_srli_si128((__m128i)codes, 8) : (__m128i)codes);
#endif
}
#endif

// Reader of sixteen values of F in each row of a column vector. One object per column vector.
template <FreightFormat F>
class Codes {
 public:
#if FREIGHT_WIDENS_BYTES
  static constexpr bool kWidens = F == FREIGHT_INT8 || F == FREIGHT_E4M3FN || F == FREIGHT_E4M3FNUZ;
#else
  static constexpr bool kWidens = false;
#endif

  // The values of a row from `from` on, divided by kFactor. A NaN is recorded in `seen_`, and returned as any number.
  V16 read(const uint8_t* from) {
#if FREIGHT_WIDENS_BYTES
    if constexpr (kWidens) return of(load_codes(from));
#endif
    return load_as<F>(from);
  }

  // The first `count` values, and zeros.
  V16 read(const uint8_t* from, int count) {
    if (count == kLanes) return read(from);
    alignas(64) uint8_t all[kLanes * bytes_of(F)] = {};
    std::memcpy(all, from, static_cast<size_t>(count * bytes_of(F)));
    return read(all);
  }

  // Turn a sum over rows of the results of `read` into the sum of the stored values.
  V16 finished(V16 sum) const {
#if FREIGHT_WIDENS_BYTES
    if constexpr (kWidens) {
      return each([&](int i) { return (VF)((VI)(sum.v[i] * set1(kFactor)) | (widened32(seen_, i) == kNaN)); });
    }
#endif
    return sum;
  }

 private:
#if FREIGHT_WIDENS_BYTES
  // INT8 is read exactly; E4M3 through float16, whose exponent's bias is 8 or 7 larger.
  static constexpr float kFactor = F == FREIGHT_E4M3FN ? 256.0f : F == FREIGHT_E4M3FNUZ ? 128.0f : 1.0f;
  static constexpr int kNaN = F == FREIGHT_E4M3FN ? 0x7F : -128;  // the final value of `seen_` if there was a NaN
  VB seen_ = F == FREIGHT_E4M3FN ? VB{} : VB{} + 127;

  V16 of(VB codes) {
    if constexpr (F == FREIGHT_E4M3FN) {
      const VB magnitudes = codes & 0x7F;
      seen_ = seen_ > magnitudes ? seen_ : magnitudes;
    } else {
      seen_ = seen_ < codes ? seen_ : codes;
    }
    if constexpr (F == FREIGHT_INT8) return each([&](int i) { return of_ints(widened32(codes, i)); });
    else return each([&](int i) { return of_f16(widened16(codes, i) << 7 & 0xBF80); });  // clears the extended sign
  }
#endif
};

}  // namespace freight
