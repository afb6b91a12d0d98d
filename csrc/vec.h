// One float vector type for every instruction set: 16 lanes (AVX-512), 8 (AVX2), or 4 (all else GCC and Clang know).
//
// Lane-wise operations are GCC's vector extensions, so the sources read the same everywhere. What is written here gives
// the same bits on every call: no contraction is left to the compiler (the build passes -ffp-contract=off).
#pragma once
#include "simd.h"

namespace freight {

#if FREIGHT_AVX512
constexpr int W = 16;
#elif FREIGHT_AVX2
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float VF __attribute__((vector_size(W * 4)));
typedef int32_t VI __attribute__((vector_size(W * 4)));

inline VF load(const float* p) {
  VF v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, VF v) { std::memcpy(p, &v, sizeof v); }
inline VF set1(float x) { return x - VF{}; }  // exact, and keeps the sign of zero

// a * b + c, one rounding where the instruction set has it.
inline VF fma(VF a, VF b, VF c) {
#if FREIGHT_AVX512
  return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FREIGHT_AVX2
  return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline VF max(VF a, VF b) { return a > b ? a : b; }  // b where either is NaN

// The lanes of a and b in turns: the first halves, and the last halves.
inline void interleave(VF a, VF b, VF& first, VF& last) {
#if FREIGHT_AVX512
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  first = (VF)_mm512_permutex2var_ps((__m512)a, low, (__m512)b);
  last = (VF)_mm512_permutex2var_ps((__m512)a, high, (__m512)b);
#elif FREIGHT_AVX2
  const __m256 low = _mm256_unpacklo_ps((__m256)a, (__m256)b), high = _mm256_unpackhi_ps((__m256)a, (__m256)b);
  first = (VF)_mm256_permute2f128_ps(low, high, 0x20);
  last = (VF)_mm256_permute2f128_ps(low, high, 0x31);
#else
  first = VF{a[0], b[0], a[1], b[1]};
  last = VF{a[2], b[2], a[3], b[3]};
#endif
}

inline float reduce_add(VF v) {
  for (int round = 1; round < W; round *= 2) {
    VF first, last;
    interleave(v, v, first, last);
    v = first + last;
  }
  return v[0];
}

inline float reduce_max(VF v) {
  for (int round = 1; round < W; round *= 2) {
    VF first, last;
    interleave(v, v, first, last);
    v = max(first, last);
  }
  return v[0];
}

// 2 ** x for x <= 0, within 1 ulp; exactly 1 at 0 and exactly 0 below -126.5; NaN stays NaN.
inline VF exp2(VF x) {
  const VF magic = set1(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
  x = max(set1(-127.0f), x);
  const VF rounded = x + magic;
  const VF f = x - (rounded - magic);
  VF p = set1(0.0001535335322842002f);
  p = fma(p, f, set1(0.0013398875016719103f));
  p = fma(p, f, set1(0.009618437848985195f));
  p = fma(p, f, set1(0.055503323674201965f));
  p = fma(p, f, set1(0.24022647738456726f));
  p = fma(p, f, set1(0.6931471824645996f));
  p = fma(p, f, set1(1.0f));
  return p * (VF)(((VI)rounded + 127) << 23);
}

// tanh(x * log(2) / 2), within 2 ** -23 of it: what exp2 makes it from. NaN stays NaN.
inline VF tanh_of_exp2(VF x) {
  const VF power = exp2(x > 0.0f ? -x : x), size = (1.0f - power) / (1.0f + power);
  return x > 0.0f ? size : -size;
}

// r[i][j] <-> r[j][i]: log2(W) rounds of interleaving.
inline void transpose(VF (&r)[W]) {
  for (int round = 1; round < W; round *= 2) {
    VF next[W];
    for (int i = 0; i < W / 2; i++) interleave(r[i], r[i + W / 2], next[2 * i], next[2 * i + 1]);
    for (int i = 0; i < W; i++) r[i] = next[i];
  }
}

}  // namespace freight
