// Attention's tile products of the AVX2 builds, for formats of one or two bytes.
//
// Decoding a tile into floats and transposing them took 0.7 of the time of a decode step: three query heads share it
// there. So keys are transposed as codes, at a quarter or half of the operations, and decoded afterwards. With few rows
// no tile of floats is stored at all: codes are decoded between the products, those of V where they lie in the pages.
// Sums are the same, in the same order, so how a tile was read changes no bit.
//
// E4M3 is decoded through float16, where its bits are those of a value 2^8 (FNUZ: 2^7) times smaller, subnormals
// included; queries and probabilities are multiplied by that factor instead. A NaN would be decoded to a finite value
// which no other code has; so would the NaN of INT8. Tiles are searched for them, and in those that have one the floats
// are corrected.
#pragma once
#include "attention_f32.h"

namespace freight {

template <FreightFormat F>
struct CodeTiles : Float32Tiles<F> {
  using Base = Float32Tiles<F>;
  using Base::chunk, Base::k_dim, Base::v_dim, Base::value_dim, Base::q_size;
  static constexpr bool reads_codes = true;
  static constexpr int most_rows = 8;  // with more, a decoded tile is stored
  static constexpr int bytes = bytes_of(F), together = 16 / bytes;  // codes that are transposed together, each way
  // True values are those decoded here times `factor`.
  static constexpr float factor = F == FREIGHT_E4M3FN ? 256.0f : F == FREIGHT_E4M3FNUZ ? 128.0f : 1.0f;
  // What a NaN's code is decoded to, if that is no NaN: a finite value (FNUZ: -0) that no other code has.
  static constexpr bool hides_nans = is_quantized(F) && F != FREIGHT_E5M2;
  static constexpr float hidden = F == FREIGHT_INT8 ? -128.0f : F == FREIGHT_E4M3FN ? 1.875f : -0.0f;

  using Base::Base;

  // Keys: the floats, then the codes.
  size_t k_floats() const { return Base::k_size(); }
  size_t k_size() const { return k_floats() + (size_t)(k_dim + chunk) * kKeyTile * bytes / sizeof(float); }
  uint8_t* k_codes(float* packed) const { return reinterpret_cast<uint8_t*>(packed + k_floats()); }
  const uint8_t* k_codes(const float* packed) const { return reinterpret_cast<const uint8_t*>(packed + k_floats()); }

  size_t p_size(int, int) const { return (size_t)most_rows * kKeyTile; }

  void pack_q(const float* q, int row, float* packed) const {
    for (int d = 0; d < k_dim; d++) packed[q_size(row) + d] = q[d] * factor;
  }

  VF put_p(float* packed, int row, int key, VF p, const float* scale) const {
    store(packed + row * kKeyTile + key, (scale ? p * load(scale + key) : p) * set1(factor));
    return p;
  }

  // Say whether codes are decoded between the products of so many rows.
  bool reads_codes_of(int rows) const { return rows <= most_rows && v_dim % kLanes == 0; }

  // keys[64] + offset: `dim` codes each -> k_codes, [dim][64]. Returns whether some are NaNs that are hidden.
  template <class Between>
  bool transpose_k(const uint8_t* const* keys, size_t offset, int dim, float* packed, const Between& between) const {
    const int at_once = 2 * together, work = at_once * together / dim;
    Hidden nans;
    for (int first = 0; first < kKeyTile; first += at_once) {
      int due = at_once;
      for (int d = 0; d < dim; d += together) {
        __m256i part[together];
        read_part(keys + first, offset + d * bytes, dim - d, part);
        for (int i = 0; i < together; i++) nans.add(part[i]);
        transpose(part);
        uint8_t* to = k_codes(packed) + ((size_t)d * kKeyTile + first) * bytes;
        for (int i = 0; i < together; i++)
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (size_t)i * kKeyTile * bytes), part[i]);
        between(work), due -= work;
      }
      between(due);
    }
    return nans.found();
  }

  template <class Between>
  void pack_k(const uint8_t* const* keys, size_t offset, float* packed, const Between& between) const {
    pack_codes(keys, offset, k_dim, packed, packed, between);
  }

  template <class Between>
  void pack_v(const uint8_t* const* keys, size_t offset, float* packed, const Between& between) const {
    if (v_dim % kLanes) {
      Base::pack_v(keys, offset, packed, between);
      if (factor != 1.0f)
        for (size_t i = 0; i < Base::v_size(); i += W) store(packed + i, load(packed + i) * set1(1.0f / factor));
      return;
    }
    for (int key = 0; key < kKeyTile; key++) {
      float* row = packed + (size_t)key * value_dim;
      for (int d = 0; d < v_dim; d += W) store(row + d, decoded(keys[key] + offset + d * bytes));
      std::fill(row + v_dim, row + value_dim, 0.0f);
      if ((key + 1) % 8 == 0) between(8);
    }
    if (hides_nan(keys, offset)) show_nans(packed, Base::v_size());
  }

  // As those of Float32Tiles; scales are by group of channels and key.

  template <class Between>
  void pack_k_groups(const uint8_t* const* rotated, size_t rotated_offset, int before, const uint8_t* const* keys,
                     size_t offset, const float* scale, float* packed, const Between& between) const {
    const auto divided = [](V16 values, int) { return values * set16(1.0f / factor); };
    for (int first = 0; first < kKeyTile; first += W)
      Base::template pack_rows<FREIGHT_BFLOAT16>(rotated + first, rotated_offset, before, packed + first, divided);
    const size_t at = (size_t)before * kKeyTile;
    pack_codes(keys, offset, v_dim, packed, packed + at, between);
    for (size_t d = 0; d < (size_t)v_dim; d++)
      for (int key = 0; key < kKeyTile; key += W) {
        float* to = packed + at + d * kKeyTile + key;
        store(to, load(to) * load(scale + d / FREIGHT_SCALE_GROUP * kKeyTile + key));
      }
  }

  template <class Between>
  void pack_v_groups(const uint8_t* const* keys, size_t offset, const float* scale, float* packed,
                     const Between& between) const {
    pack_v(keys, offset, packed, between);
    Base::scale_groups(scale, packed);
  }

  // Say whether values of a tile are NaNs that are hidden.
  bool hides_nan(const uint8_t* const* keys, size_t offset) const {
    if (!hides_nans) return false;
    Hidden nans;
    for (int key = 0; key < kKeyTile; key += 2)
      for (size_t d = offset; d < offset + v_dim; d += kLanes) nans.add(of_two(keys[key] + d, keys[key + 1] + d));
    return nans.found();
  }

  // As `scores` and `accumulate`, from the codes of keys and those in the pages of values.

  template <int ROWS>
  void scores_of_codes(const float* q, const float* k, float* out) const {
    constexpr int vectors = vectors_of(ROWS);
    for (int key = 0; key < kKeyTile; key += vectors * W) {
      VF sum[ROWS][vectors] = {};
      const uint8_t* from = k_codes(k) + key * bytes;
      for (int d = 0; d < k_dim; d++, from += kKeyTile * bytes) {
        add_products<ROWS, vectors>(from, q + d, k_dim, sum);
      }
      for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < vectors; i++) store(out + r * kKeyTile + key + i * W, sum[r][i]);
    }
  }

  template <int ROWS, class Between>
  void accumulate_codes(const float* p, const uint8_t* const* keys, size_t offset, const float* decay, float* out,
                        const Between& between) const {
    constexpr int vectors = vectors_of(ROWS), fewest = std::min(vectors, kLanes / W);
    int d = 0;
    for (; d + vectors * W <= v_dim; d += vectors * W)
      accumulate_channels<ROWS, vectors>(p, keys, offset, d, decay, out, between);
    for (; d < v_dim; d += fewest * W) accumulate_channels<ROWS, fewest>(p, keys, offset, d, decay, out, between);
  }

 private:
  // keys[64] + offset: `dim` codes each -> `to`, [dim][64]
  template <class Between>
  void pack_codes(const uint8_t* const* keys, size_t offset, int dim, float* packed, float* to,
                  const Between& between) const {
    const bool has_nan = transpose_k(keys, offset, dim, packed, between);
    const uint8_t* codes = k_codes(packed);
    const size_t count = (size_t)dim * kKeyTile;
    for (size_t i = 0; i < count; i += W) store(to + i, decoded(codes + i * bytes));
    if (has_nan) show_nans(to, count);
  }

  // Registers of each row's sums.
  static constexpr int vectors_of(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : rows <= 5 ? 2 : 1; }

  template <int ROWS, int VECTORS, class Between>
  void accumulate_channels(const float* p, const uint8_t* const* keys, size_t offset, int d, const float* decay,
                           float* out, const Between& between) const {
    VF sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
      for (int i = 0; i < VECTORS; i++) sum[r][i] = load(out + (size_t)r * value_dim + d + i * W) * set1(decay[r]);
    offset += d * bytes;
    for (int first = 0; first < kKeyTile; first += 8) {
      for (int key = first; key < first + 8; key++)
        add_products<ROWS, VECTORS>(keys[key] + offset, p + key, kKeyTile, sum);
      if (d == 0) between(8);
    }
    for (int r = 0; r < ROWS; r++)
      for (int i = 0; i < VECTORS; i++) store(out + (size_t)r * value_dim + d + i * W, sum[r][i]);
  }

  // sum[r] += the values from `from` on, times x[r]
  template <int ROWS, int VECTORS>
  static FREIGHT_INLINE void add_products(const uint8_t* from, const float* x, size_t stride, VF (&sum)[ROWS][VECTORS]) {
    FREIGHT_UNROLL
    for (int i = 0; i < VECTORS; i++) {
      const VF part = decoded(from + i * W * bytes);
      for (int r = 0; r < ROWS; r++) sum[r][i] = fma(part, set1(x[r * stride]), sum[r][i]);
    }
  }

  // W values divided by `factor`, without NaNs that are hidden.
  static FREIGHT_INLINE VF decoded(const uint8_t* from) {
    if constexpr (F == FREIGHT_E4M3FN || F == FREIGHT_E4M3FNUZ) {
      // Sign, sign, exponent, mantissa: the second sign is where float16 has the exponent's first bit.
      const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
      return of_f16((VH)_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xBFFF)));
    } else if constexpr (F == FREIGHT_INT8) {
      return of_ints(load_int8(from));
    } else {
      return load_lanes<F>(from);
    }
  }

  // A search for codes of NaNs that `decoded` hides.
  struct Hidden {
    __m256i extreme = _mm256_setzero_si256();

    void add(__m256i codes) {
      if constexpr (F == FREIGHT_E4M3FN) extreme = _mm256_max_epu8(extreme, _mm256_and_si256(codes, magnitude()));
      else if constexpr (hides_nans) extreme = _mm256_min_epi8(extreme, codes);
    }

    bool found() const {
      const __m256i nan = F == FREIGHT_E4M3FN ? magnitude() : _mm256_set1_epi8((char)0x80);
      return hides_nans && _mm256_movemask_epi8(_mm256_cmpeq_epi8(extreme, nan));
    }

    static __m256i magnitude() { return _mm256_set1_epi8(0x7F); }
  };

  static void show_nans(float* values, size_t count) {
    const VI bits = VI{} + (int32_t)float_to_bits(hidden), sign = VI{} + (F == FREIGHT_E4M3FN ? INT32_MAX : -1);
    for (size_t i = 0; i < count; i += W) {
      const VI value = (VI)load(values + i);
      store(values + i, (VF)(value | ((value & sign) == bits)));
    }
  }

  // The next codes of 2 * together keys; zeros after `codes` codes.
  static FREIGHT_INLINE void read_part(const uint8_t* const* keys, size_t offset, int codes, __m256i (&part)[together]) {
    if (codes >= together) {
      FREIGHT_UNROLL
      for (int i = 0; i < together; i++) part[i] = of_two(keys[i] + offset, keys[together + i] + offset);
      return;
    }
    for (int i = 0; i < together; i++) {
      alignas(16) uint8_t all[2][16] = {};
      std::memcpy(all[0], keys[i] + offset, static_cast<size_t>(codes) * bytes);
      std::memcpy(all[1], keys[together + i] + offset, static_cast<size_t>(codes) * bytes);
      part[i] = of_two(all[0], all[1]);
    }
  }

  static __m256i of_two(const uint8_t* first, const uint8_t* last) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(last));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }

  // r[i][j] <-> r[j][i] in either half of the registers: rounds of interleaving.
  static FREIGHT_INLINE void transpose(__m256i (&r)[together]) {
    FREIGHT_UNROLL
    for (int round = 1; round < together; round *= 2) {
      __m256i next[together];
      FREIGHT_UNROLL
      for (int i = 0; i < together / 2; i++) {
        const __m256i a = r[i], b = r[i + together / 2];
        next[2 * i] = bytes == 1 ? _mm256_unpacklo_epi8(a, b) : _mm256_unpacklo_epi16(a, b);
        next[2 * i + 1] = bytes == 1 ? _mm256_unpackhi_epi8(a, b) : _mm256_unpackhi_epi16(a, b);
      }
      FREIGHT_UNROLL
      for (int i = 0; i < together; i++) r[i] = next[i];
    }
  }
};

}  // namespace freight
