// Vectors: VF, a register of the instruction set, and V16, sixteen float32 lanes in as many registers as they need.
//
// A register has W lanes: 16 with AVX-512, 8 with AVX2, 4 with NEON and on every other target of GCC and Clang.
// Lane-wise operations use GCC's vector extensions, so one source serves all instruction sets. They give the same bits
// on every call: the compiler may not contract (the build passes -ffp-contract=off). `fma` is fused where the build has
// FMA.
#pragma once
#include "values.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VBMI__) && \
    defined(__AVX512BF16__)
#define FREIGHT_AVX512 1
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define FREIGHT_AMX 1  // also has matrix tiles
#endif
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FREIGHT_AVX2 1
#include <immintrin.h>
#else
#define FREIGHT_PORTABLE 1
#include "neon.h"  // on arm64 also conversions
#if defined(__SSE2__)
#include <emmintrin.h>  // of INT8 (int8.h)
#endif
#endif

// Before a loop over an array of vectors: GCC keeps the array in registers only if the loop is unrolled early.
#define FREIGHT_UNROLL _Pragma("GCC unroll 16")

// Without it GCC 12 does not inline larger functions, and the vectors that they return pass through memory.
#define FREIGHT_INLINE inline __attribute__((always_inline))

namespace freight {

#if FREIGHT_AVX512
constexpr int W = 16;
#elif FREIGHT_AVX2
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
constexpr int kLanes = FREIGHT_LANES;  // lanes of a V16

typedef float VF __attribute__((vector_size(W * 4)));
typedef int32_t VI __attribute__((vector_size(W * 4)));
typedef uint32_t VU __attribute__((vector_size(W * 4)));
typedef uint16_t VH __attribute__((vector_size(W * 2)));

struct V16 {
  VF v[kLanes / W];
};

inline VF load(const float* p) {
  VF v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, VF v) { std::memcpy(p, &v, sizeof v); }
inline VF set1(float x) { return x - VF{}; }  // exact, and keeps the sign of zero

// a * b + c, with one rounding if the instruction set has FMA.
inline VF fma(VF a, VF b, VF c) {
#if FREIGHT_AVX512
  return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FREIGHT_AVX2
  return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif FREIGHT_NEON
  return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < W; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

inline VF max(VF a, VF b) { return a > b ? a : b; }  // b where either is NaN

// A V16 whose i-th register is lanes(i). The two forms differ in what GCC 12 keeps in registers.
template <class Lanes>
inline V16 each(const Lanes& lanes) {
#if FREIGHT_PORTABLE
  V16 out;
  for (int i = 0; i < kLanes / W; i++) out.v[i] = lanes(i);
  return out;
#else
  if constexpr (kLanes == W) return {{lanes(0)}};
  else return {{lanes(0), lanes(1)}};
#endif
}

#if FREIGHT_PORTABLE
inline V16 load16(const float* p) {
  V16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, const V16& v) { std::memcpy(p, &v, sizeof v); }
#else
inline V16 load16(const float* p) {
  return each([=](int i) { return load(p + i * W); });
}
inline void store(float* p, const V16& v) {
  for (int i = 0; i < kLanes / W; i++) store(p + i * W, v.v[i]);
}
#endif
inline V16 set16(float x) {
  return each([=](int) { return set1(x); });
}
inline V16 operator+(const V16& a, const V16& b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline V16 operator-(const V16& a, const V16& b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline V16 operator*(const V16& a, const V16& b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline V16 fma(const V16& a, const V16& b, const V16& c) {
  return each([&](int i) { return fma(a.v[i], b.v[i], c.v[i]); });
}

// Interleave the lanes of a and b: of the first halves, and of the last halves.
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
#elif FREIGHT_NEON
  first = (VF)vzip1q_f32((float32x4_t)a, (float32x4_t)b), last = (VF)vzip2q_f32((float32x4_t)a, (float32x4_t)b);
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

// 2 ** f for f of -0.5 .. 0.5.
inline VF exp2_of_fraction(VF f) {
  VF p = set1(0.0001535335322842002f);
  p = fma(p, f, set1(0.0013398875016719103f));
  p = fma(p, f, set1(0.009618437848985195f));
  p = fma(p, f, set1(0.055503323674201965f));
  p = fma(p, f, set1(0.24022647738456726f));
  p = fma(p, f, set1(0.6931471824645996f));
  return fma(p, f, set1(1.0f));
}

constexpr float kRound = 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer

// 2 ** x for x <= 0, within 1 ulp; exactly 1 at 0 and exactly 0 below -126.5; NaN stays NaN.
inline VF exp2(VF x) {
  const VF magic = set1(kRound);
  x = max(set1(-127.0f), x);
  const VF rounded = x + magic;
  return exp2_of_fraction(x - (rounded - magic)) * (VF)(((VU)rounded + 127u) << 23);  // a NaN's bits may overflow
}

// e ** x, within 2 ulp, including results that are subnormal, 0 or infinity; NaN stays NaN. The multiple of log(2) is
// subtracted in two parts, so that a large x loses no digits.
inline VF exp(VF x) {
  const VF magic = set1(kRound), log2e = set1(1.44269504088896f);
  x = max(set1(-104.0f), x);
  x = x > 89.0f ? set1(89.0f) : x;
  const VF rounded = x * log2e + magic, n = rounded - magic;
  const VF rest = (x - n * set1(0.693145751953125f)) - n * set1(1.42860682030941723e-6f);
  const VU whole = (VU)rounded - float_to_bits(kRound), half = (VU)((VI)whole >> 1);  // a NaN's bits are any number
  return exp2_of_fraction(rest * log2e) * (VF)((half + 127u) << 23) * (VF)((whole - half + 127u) << 23);
}

// x / (1 + e ** -x), computed from the exponential of -|x|, which cannot overflow.
inline VF silu(VF x) {
  const VF e = exp((VF)((VI)x | INT32_MIN));
  return (x < VF{} ? x * e : x) / (e + set1(1.0f));
}

// tanh(x * log(2) / 2), within 2 ** -23, computed from exp2. NaN stays NaN.
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

// Loads and stores of W stored values in a register.

#if FREIGHT_AVX512
inline VH load_halves(const void* p) { return (VH)_mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline VH load_bytes(const uint8_t* p) {
  return (VH)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline VI load_int8(const uint8_t* p) {
  return (VI)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline VF of_ints(VI v) { return (VF)_mm512_cvtepi32_ps((__m512i)v); }
inline VF of_f16(VH v) { return (VF)_mm512_cvtph_ps((__m256i)v); }
inline VF of_bf16(VH v) { return (VF)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16); }
inline VH to_f16(VF v) { return (VH)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT); }
inline VH narrow(VU v) { return (VH)_mm512_cvtepi32_epi16((__m512i)v); }
#elif FREIGHT_AVX2
inline VH load_halves(const void* p) { return (VH)_mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline VH load_bytes(const uint8_t* p) {
  return (VH)_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline VI load_int8(const uint8_t* p) {
  return (VI)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline VF of_ints(VI v) { return (VF)_mm256_cvtepi32_ps((__m256i)v); }
inline VF of_f16(VH v) { return (VF)_mm256_cvtph_ps((__m128i)v); }
inline VF of_bf16(VH v) { return (VF)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)v), 16); }
inline VH to_f16(VF v) { return (VH)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
inline VH narrow(VU v) {
  return (VH)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
}
#else
inline VH load_halves(const void* p) {
  VH v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline VF of_bf16(VH v) { return (VF)(__builtin_convertvector(v, VU) << 16); }
// As f16_to_float and float_to_f16.
inline VF of_f16(VH v) {
  const VI bits = __builtin_convertvector(v, VI), magnitude = bits & 0x7FFF;
  const VI scaled = (VI)((VF)(magnitude << 13) * 0x1p112f);
  return (VF)((magnitude >= 0x7C00 ? magnitude << 13 | 0x7F800000 : scaled) | (VI)((VU)(bits & 0x8000) << 16));
}
inline VH to_f16(VF v) {
  const VI bits = (VI)v, magnitude = bits & 0x7FFFFFFF;
  const VI small = (VI)((VF)magnitude + 0.5f) - 0x3F000000;
  const VI normal = (VI)((VU)magnitude + 0xFFFu + (VU)(magnitude >> 13 & 1) - 0x38000000u) >> 13;
  const VI finite = magnitude < 0x38800000 ? small : normal;
  const VI half = magnitude > 0x7F800000 ? VI{} + 0x7E00 : magnitude >= 0x477FF000 ? VI{} + 0x7C00 : finite;
  return __builtin_convertvector((VU)half | ((VU)bits >> 16 & 0x8000), VH);
}
inline VH narrow(VU v) { return __builtin_convertvector(v, VH); }
#endif

#if FREIGHT_NEON

// Sixteen values of format F.
template <FreightFormat F>
inline V16 load_as(const void* from) {
  if constexpr (F == FREIGHT_FLOAT32) return load16(static_cast<const float*>(from));
  else {
    const Floats16 floats = neon_load<F>(from);
    return each([&](int i) { return (VF)floats.v[i]; });
  }
}

template <FreightFormat F>
inline void store_as(void* to, const V16& v) {
  if constexpr (F == FREIGHT_FLOAT32) return store(static_cast<float*>(to), v);
  else {
    Floats16 floats;
    for (int i = 0; i < 4; i++) floats.v[i] = (float32x4_t)v.v[i];
    neon_store<F>(static_cast<uint16_t*>(to), floats);
  }
}

#else

// W values of format F.
template <FreightFormat F>
inline VF load_lanes(const uint8_t* from) {
  if constexpr (F == FREIGHT_FLOAT32) {
    return load(reinterpret_cast<const float*>(from));
  } else if constexpr (F == FREIGHT_FLOAT16) {
    return of_f16(load_halves(from));
  } else if constexpr (F == FREIGHT_BFLOAT16) {
    return of_bf16(load_halves(from));
#if FREIGHT_PORTABLE
  } else {
    const float* value = code_table<F>().value;
    return VF{value[from[0]], value[from[1]], value[from[2]], value[from[3]]};
#else
  } else if constexpr (F == FREIGHT_INT8) {
    const VI code = load_int8(from);
    return (VF)((VI)of_ints(code) | (code == -128));  // all bits set: a NaN
  } else if constexpr (F == FREIGHT_E5M2) {
    return of_f16(load_bytes(from) << 8);
  } else {  // E4M3 through float16, whose exponent's bias is 15
    const VH code = load_bytes(from), magnitude = code & 0x7F;
    const VH nan = (VH)(F == FREIGHT_E4M3FNUZ ? code == 0x80 : magnitude == 0x7F) & 0x7E00;
    return of_f16(magnitude << 7 | (code & 0x80) << 8 | nan) * set1(F == FREIGHT_E4M3FNUZ ? 128.0f : 256.0f);
#endif
  }
}

// Sixteen values of format F.
template <FreightFormat F>
inline V16 load_as(const void* from) {
  return each([=](int i) { return load_lanes<F>(static_cast<const uint8_t*>(from) + i * W * bytes_of(F)); });
}

// Rounded to nearest, ties to even, as float_to_bf16 and float_to_f16 do.
template <FreightFormat F>
inline void store_as(void* to, const V16& v) {
  if constexpr (F == FREIGHT_FLOAT32) return store(static_cast<float*>(to), v);
  for (int i = 0; i < kLanes / W; i++) {
    VH halves;
    if constexpr (F == FREIGHT_FLOAT16) {
      halves = to_f16(v.v[i]);
    } else {  // not vcvtneps2bf16, which makes subnormals zero
      const VU bits = (VU)v.v[i], high = bits >> 16, rounded = (bits + 0x7FFF + (high & 1)) >> 16;
      halves = narrow(v.v[i] != v.v[i] ? high | 0x40 : rounded);
    }
    std::memcpy(static_cast<VH*>(to) + i, &halves, sizeof halves);
  }
}

#endif

#if FREIGHT_AVX512

// The upper halves of 32 words, in order.
inline __m512i upper_halves(__m512i first, __m512i last) {
  alignas(64) static constexpr uint16_t kOdd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                    33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(first, _mm512_load_si512(kOdd), last);
}

// Decoder of 64 codes of a quantized format to BF16, by tables of the low and the high byte. `first` gets the first
// eight of each 16 codes, `last` the last eight.
template <FreightFormat F>
struct Decoder {
  __m512i low0, low1, high0, high1;

  Decoder() {
    if constexpr (is_quantized(F)) {
      const CodeTable& table = code_table<F>();
      low0 = _mm512_load_si512(table.low), low1 = _mm512_load_si512(table.low + 64);
      high0 = _mm512_load_si512(table.high), high1 = _mm512_load_si512(table.high + 64);
    }
  }

  void operator()(__m512i code, __m512i& first, __m512i& last) const {
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    const __m512i magnitude = F == FREIGHT_INT8 ? _mm512_abs_epi8(code) : code;  // the look-ups ignore the top bit
    __m512i low = _mm512_permutex2var_epi8(low0, magnitude, low1);
    __m512i high = _mm512_permutex2var_epi8(high0, magnitude, high1);
    high = _mm512_ternarylogic_epi32(high, code, sign, 0xF8);  // high | (code & sign)
    if constexpr (F == FREIGHT_E4M3FNUZ || F == FREIGHT_INT8) {
      const __mmask64 nan = _mm512_cmpeq_epi8_mask(code, sign);
      low = _mm512_mask_blend_epi8(nan, low, _mm512_set1_epi8((char)0xC0));
      high = _mm512_mask_blend_epi8(nan, high, _mm512_set1_epi8(0x7F));
    }
    first = _mm512_unpacklo_epi8(low, high);
    last = _mm512_unpackhi_epi8(low, high);
  }
};

#endif

}  // namespace freight
