// V16: sixteen float32 lanes, the same operations for every instruction set, and the decoding of stored formats.
//
// AVX-512: one register; AVX2: two; portable: four vectors of four, which compilers map to SSE2 or NEON.
// `madd` is fused where the build has FMA (then always, as the compiler's own contraction is off).
// Decoding is exact, subnormals included, and NaN stays NaN.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VBMI__) && \
    defined(__AVX512BF16__)
#define FREIGHT_AVX512 1
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define FREIGHT_AMX 1  // besides: matrix tiles
#endif
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FREIGHT_AVX2 1
#include <immintrin.h>
#else
#define FREIGHT_PORTABLE 1
#endif

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float bf16_to_float(uint16_t value) { return bits_to_float(static_cast<uint32_t>(value) << 16); }

// Round to nearest, ties to even; NaN stays a (quiet) NaN. Branch-free, so that loops over it become vectors.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(value != value ? (bits >> 16 | 0x40) : rounded);
}

// Exact, subnormals, infinities and NaN included.
inline float f16_to_float(uint16_t value) {
  const uint32_t magnitude = value & 0x7FFFu, sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const float scaled = bits_to_float(magnitude << 13) * 0x1p112f;  // the exponent's bias is 15 there, 127 here
  const uint32_t bits = magnitude >= 0x7C00u ? (magnitude << 13 | 0x7F800000u) : float_to_bits(scaled);
  return bits_to_float(bits | sign);
}

// Round to nearest, ties to even; beyond the range: infinity.
inline uint16_t float_to_f16(float value) {
  const uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude > 0x7F800000u)
    half = 0x7E00u;
  else if (magnitude >= 0x477FF000u)
    half = 0x7C00u;
  else if (magnitude < 0x38800000u)  // below 2^-14: a multiple of 2^-24, which adding 0.5 rounds to
    half = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3F000000u;
  else
    half = (magnitude + 0xFFFu + (magnitude >> 13 & 1) - 0x38000000u) >> 13;
  return static_cast<uint16_t>(sign | half);
}

// Value of an E4M3FN code; 0x7F and 0xFF are NaN.
inline float e4m3_to_float(uint8_t code) {
  const float magnitude = bits_to_float(static_cast<uint32_t>(code & 0x7F) << 20) * 0x1p120f;  // bias 7 there
  const uint32_t bits = (code & 0x7F) == 0x7F ? 0x7FC00000u : float_to_bits(magnitude);
  return bits_to_float(bits | static_cast<uint32_t>(code & 0x80) << 24);
}

#if FREIGHT_AVX512

struct V16 {
  __m512 v;
};
inline V16 zero16() { return {_mm512_setzero_ps()}; }
inline V16 splat16(float value) { return {_mm512_set1_ps(value)}; }
inline V16 load16(const float* from) { return {_mm512_loadu_ps(from)}; }
inline void store16(float* to, V16 a) { _mm512_storeu_ps(to, a.v); }
inline V16 add16(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V16 sub16(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V16 mul16(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V16 max16(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V16 madd16(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c

inline V16 bf16_to_16(const uint16_t* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline V16 f16_to_16(const uint16_t* from) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
inline V16 e4m3_to_16(const uint8_t* from) {  // by way of float16, whose bias is 8 larger
  const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7F));
  const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(_mm256_set1_epi16(0x7F), code), 8);
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7F));
  const __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);
  const __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.f));
  return {_mm512_mask_mov_ps(value, nan, _mm512_set1_ps(__builtin_nanf("")))};
}

#elif FREIGHT_AVX2

struct V16 {
  __m256 lo, hi;
};
inline V16 zero16() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V16 splat16(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline V16 load16(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store16(float* to, V16 a) { _mm256_storeu_ps(to, a.lo), _mm256_storeu_ps(to + 8, a.hi); }
inline V16 add16(V16 a, V16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline V16 sub16(V16 a, V16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline V16 mul16(V16 a, V16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline V16 max16(V16 a, V16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline V16 madd16(V16 a, V16 b, V16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

inline __m256 bf16_to_8(const uint16_t* from) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline V16 bf16_to_16(const uint16_t* from) { return {bf16_to_8(from), bf16_to_8(from + 8)}; }
inline V16 f16_to_16(const uint16_t* from) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8)))};
}
inline V16 e4m3_to_16(const uint8_t* from) {  // by way of float16, whose bias is 8 larger; 0x7F becomes its NaN
  const __m256i code = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i low = _mm256_set1_epi16(0x7F), magnitude = _mm256_and_si256(code, low);
  const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, low), _mm256_set1_epi16(0x7E00));
  const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(low, code), 8);
  const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign), nan);
  const __m256 scale = _mm256_set1_ps(256.f);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), scale),
          _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), scale)};
}

#else

typedef float V4 __attribute__((vector_size(16)));
struct V16 {
  V4 v[4];
};
inline V16 load16(const float* from) {
  V16 a;
  std::memcpy(&a, from, 64);
  return a;
}
inline void store16(float* to, V16 a) { std::memcpy(to, &a, 64); }
inline V16 splat16(float x) {
  const V4 v = {x, x, x, x};
  return {{v, v, v, v}};
}
inline V16 zero16() { return splat16(0.f); }
inline V16 add16(V16 a, V16 b) { return {{a.v[0] + b.v[0], a.v[1] + b.v[1], a.v[2] + b.v[2], a.v[3] + b.v[3]}}; }
inline V16 sub16(V16 a, V16 b) { return {{a.v[0] - b.v[0], a.v[1] - b.v[1], a.v[2] - b.v[2], a.v[3] - b.v[3]}}; }
inline V16 mul16(V16 a, V16 b) { return {{a.v[0] * b.v[0], a.v[1] * b.v[1], a.v[2] * b.v[2], a.v[3] * b.v[3]}}; }
inline V16 max16(V16 a, V16 b) {
  for (int i = 0; i < 4; i++) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline V16 madd16(V16 a, V16 b, V16 c) {
#ifdef __FP_FAST_FMAF
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) c.v[i][j] = __builtin_fmaf(a.v[i][j], b.v[i][j], c.v[i][j]);
  return c;
#else
  return add16(mul16(a, b), c);
#endif
}
template <class T, class Decode>
inline V16 decode_16(const T* from, Decode decode) {
  float values[16];
  for (int i = 0; i < 16; i++) values[i] = decode(from[i]);
  return load16(values);
}
inline V16 bf16_to_16(const uint16_t* from) { return decode_16(from, bf16_to_float); }
inline V16 f16_to_16(const uint16_t* from) { return decode_16(from, f16_to_float); }
inline V16 e4m3_to_16(const uint8_t* from) { return decode_16(from, e4m3_to_float); }

#endif

// Round to nearest, ties to even, as float_to_bf16 and float_to_f16 do.
#if FREIGHT_AVX512

inline void bf16_from_16(uint16_t* to, V16 a) {  // not vcvtneps2bf16, which makes subnormals zero
  const __m512i bits = _mm512_castps_si512(a.v), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  const __m512i rounded = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(rounded));
}
inline void f16_from_16(uint16_t* to, V16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

#elif FREIGHT_AVX2

inline __m256i bf16_from_8(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a), high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}
inline void bf16_from_16(uint16_t* to, V16 a) {
  const __m256i mixed = _mm256_packus_epi32(bf16_from_8(a.lo), bf16_from_8(a.hi));  // by halves of 128 bits
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(mixed, 0xD8));
}
inline void f16_from_16(uint16_t* to, V16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}

#else

inline void bf16_from_16(uint16_t* to, V16 a) {
  float values[16];
  store16(values, a);
  for (int i = 0; i < 16; i++) to[i] = float_to_bf16(values[i]);
}
inline void f16_from_16(uint16_t* to, V16 a) {
  float values[16];
  store16(values, a);
  for (int i = 0; i < 16; i++) to[i] = float_to_f16(values[i]);
}

#endif

// Sixteen lanes as float32 (0), float16 (1) or bfloat16 (2), by FreightFormat.
inline void store_16(void* to, V16 a, int format) {
  if (format == 0)
    store16(static_cast<float*>(to), a);
  else if (format == 1)
    f16_from_16(static_cast<uint16_t*>(to), a);
  else
    bf16_from_16(static_cast<uint16_t*>(to), a);
}

// The first `count` of them.
inline void store_as(void* to, V16 a, int format, int count) {
  if (count == 16) return store_16(to, a, format);
  alignas(64) char all[64];
  store_16(all, a, format);
  std::memcpy(to, all, static_cast<size_t>(count) * (format == 0 ? 4 : 2));
}
