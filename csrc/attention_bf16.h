// Attention's tile products by BF16 dot products (AVX-512), for BF16 queries over pages whose values are exact in BF16:
// the quantized formats and BF16.
//
// K and V are exact, unless they have group scales, which multiply stored values before the products, rounded to BF16.
// q is one BF16 number per channel, or two (high and low part, together 16 bits of mantissa) if a scale multiplies it.
// A probability is one BF16 number, and the sum of probabilities adds the rounded numbers. Sums are float32, one
// ordered chain per score and per output channel, so the number of rows that are multiplied together changes no bit.
//
// K tile: the stored values of 16 keys are transposed, then decoded (quantized formats by table look-ups), so that a
// lane is a key and holds two adjacent channels. V tile: two adjacent keys are interleaved, then decoded, so that a
// lane is a channel and holds two keys.
#pragma once
#include "vec.h"
#if FREIGHT_AVX512
#include "attention_tile.h"

namespace freight {

// Lane l of out[c] is lane c of in[l], lanes of 128 bits.
inline void transpose_lanes(const __m512i (&in)[4], __m512i (&out)[4]) {
  const __m512i a = _mm512_shuffle_i32x4(in[0], in[1], 0x44), b = _mm512_shuffle_i32x4(in[2], in[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(in[0], in[1], 0xEE), d = _mm512_shuffle_i32x4(in[2], in[3], 0xEE);
  out[0] = _mm512_shuffle_i32x4(a, b, 0x88), out[1] = _mm512_shuffle_i32x4(a, b, 0xDD);
  out[2] = _mm512_shuffle_i32x4(c, d, 0x88), out[3] = _mm512_shuffle_i32x4(c, d, 0xDD);
}

// Pairs of BF16 numbers times `even` and `odd`, rounded.
inline __m512i scaled_pairs(__m512i pairs, __m512 even, __m512 odd) {
  alignas(64) static constexpr uint16_t kInTurns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512 first = _mm512_mul_ps((__m512)_mm512_slli_epi32(pairs, 16), even);
  const __m512 last = _mm512_mul_ps((__m512)_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xFFFF0000)), odd);
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInTurns), (__m512i)_mm512_cvtne2ps_pbh(last, first));
}

// The products, which do not depend on the stored format, and so are compiled once.
struct Bf16Products {
  static constexpr int rows_of_block = 1;  // rows of several KV heads that are multiplied together
  static constexpr bool side_by_side = true, reads_codes = false;
  static constexpr int max_rows = 6;  // rows whose sums stay in registers

  int k_dim, v_dim;
  int value_dim;  // v_dim padded to 64: length of an output row in the working memory
  int pairs;      // pairs of channels that a score sums
  int q_parts;    // BF16 numbers of a channel of q: 1, or 2 if it is scaled

  Bf16Products(int k_dim, int v_dim, bool scaled_q)
      : k_dim(k_dim),
        v_dim(v_dim),
        value_dim((v_dim + 63) / 64 * 64),
        pairs((k_dim + 3) / 4 * 2),
        q_parts(scaled_q ? 2 : 1) {}

  // Sizes of the working memory, in floats; two BF16 numbers fill one.
  size_t q_size(int rows) const { return (size_t)rows * q_parts * pairs; }
  size_t k_size() const { return (size_t)pairs * kKeyTile; }
  size_t v_size() const { return (size_t)kKeyTile / 2 * value_dim; }
  size_t p_size(int, int) const { return 0; }  // a Block holds the probabilities

  // Rows that are computed together: their products with K, then their probabilities.
  struct Block {
    alignas(64) float scores[max_rows * kKeyTile];
    alignas(64) float decay[W];
  };

  // A row of q, k_dim floats -> [rows][q_parts][pairs][2]
  void pack_q(const float* q, int row, float* packed) const {
    uint16_t* high = (uint16_t*)(packed + q_size(row));
    for (int d = 0; d < k_dim; d++) high[d] = float_to_bf16(q[d]);
    std::fill(high + k_dim, high + pairs * 2, uint16_t(0));
    if (q_parts == 1) return;
    uint16_t* low = high + pairs * 2;
    for (int d = 0; d < k_dim; d++) low[d] = float_to_bf16(q[d] - bf16_to_float(high[d]));
    std::fill(low + k_dim, low + pairs * 2, uint16_t(0));
  }

  // Say whether a packed V tile holds neither infinities nor NaN.
  bool finite(const float* packed) const {
    const __m512i exponent = _mm512_set1_epi16(0x7F80);
    __mmask32 found = 0;
    for (size_t i = 0; i < v_size(); i += 16)
      found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(packed + i), exponent), exponent);
    return found == 0;
  }

  static __m512 dot(__m512 sum, __m512i a, const float* pair) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)_mm512_set1_ps(*pair));
  }

  // scores[ROWS][64] = q[row ..] . k[key]
  template <int ROWS>
  void scores(const float* q, int row, const float* k, float* out) const {
    q_parts == 1 ? scores<ROWS, 1>(q + q_size(row), k, out) : scores<ROWS, 2>(q + q_size(row), k, out);
  }

  template <int ROWS, int PARTS>
  void scores(const float* q, const float* k, float* out) const {
    __m512 sum[ROWS][4];
    FREIGHT_UNROLL
    for (int r = 0; r < ROWS; r++)
      FREIGHT_UNROLL
      for (int i = 0; i < 4; i++) sum[r][i] = _mm512_setzero_ps();
    for (int pair = 0; pair < pairs; pair++) {
      __m512i keys[4];
      for (int i = 0; i < 4; i++) keys[i] = _mm512_loadu_si512(k + (size_t)pair * kKeyTile + 16 * i);
      FREIGHT_UNROLL
      for (int part = 0; part < PARTS; part++)
        FREIGHT_UNROLL
        for (int r = 0; r < ROWS; r++)
          FREIGHT_UNROLL
          for (int i = 0; i < 4; i++) sum[r][i] = dot(sum[r][i], keys[i], q + (r * PARTS + part) * pairs + pair);
    }
    FREIGHT_UNROLL
    for (int r = 0; r < ROWS; r++)
      FREIGHT_UNROLL
      for (int i = 0; i < 4; i++) _mm512_storeu_ps(out + r * kKeyTile + 16 * i, sum[r][i]);
  }

  // 2 ** x for x <= 0, within 2 ** -18: a probability keeps only 8 bits. Exactly 1 at 0 and exactly 0 below -126.5; NaN
  // stays NaN.
  static __m512 power(__m512 x) {
    const __m512 magic = _mm512_set1_ps(12582912.0f + 127.0f);  // adding it rounds to an integer: the exponent's bits
    x = _mm512_max_ps(_mm512_set1_ps(-127.0f), x);
    const __m512 rounded = _mm512_add_ps(x, magic), f = _mm512_sub_ps(x, _mm512_sub_ps(rounded, magic));
    __m512 p = _mm512_set1_ps(0.0095828240737319f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.055906422436237335f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24024099111557007f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931241750717163f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_mul_ps(p, (__m512)_mm512_slli_epi32((__m512i)rounded, 23));
  }

  // Lane r of the result is the largest lane of rows[r]. `rows` has room for ROWS rounded up to 4 or 8.
  template <int ROWS>
  static VF largest_of(VF* rows) {
    constexpr int count = ROWS > 4 ? 8 : 4;
    for (int r = ROWS; r < count; r++) rows[r] = rows[0];
    FREIGHT_UNROLL
    for (int half = count / 2; half >= 1; half /= 2)
      FREIGHT_UNROLL
      for (int i = 0; i < half; i++) {
        VF first, last;
        interleave(rows[i], rows[i + half], first, last);
        rows[i] = larger(first, last);
      }
    __m512 v = (__m512)rows[0];
    if (count == 4) v = _mm512_max_ps(v, _mm512_shuffle_f32x4(v, v, 0xB1));
    return larger((VF)v, (VF)_mm512_shuffle_f32x4(v, v, 0x4E));
  }
  static VF larger(VF a, VF b) { return (VF)_mm512_max_ps((__m512)a, (__m512)b); }

  // Products -> probabilities relative to the largest score so far of each row, as BF16 numbers in the first half of
  // each row, and the decay of earlier sums. factors: by key, from a product to a score; scale: by key, of V, or null.
  template <int ROWS, class Running>
  void softmax(Running* running, const float* factors, const float* scale, Block& block) const {
    constexpr int parts = kKeyTile / W;
    VF s[ROWS][parts], largest[8];
    alignas(64) float best[W] = {};
    FREIGHT_UNROLL
    for (int r = 0; r < ROWS; r++) {
      FREIGHT_UNROLL
      for (int i = 0; i < parts; i++) s[r][i] = load(block.scores + r * kKeyTile + i * W) * load(factors + i * W);
      largest[r] = larger(larger(s[r][0], s[r][1]), larger(s[r][2], s[r][3]));
      best[r] = running[r].best;
    }
    const VF before = load(best), of_tile = largest_of<ROWS>(largest), after = of_tile > before ? of_tile : before;
    const VF base = after == set1(-__builtin_inff()) ? set1(0.0f) : after;
    const VF decay = after == before ? set1(1.0f) : exp2(before - base);
    store(block.decay, decay);
    store(best, after);
    FREIGHT_UNROLL
    for (int r = 0; r < ROWS; r++) {
      running[r].best = best[r];
      const VF total = running[r].total * lane(decay, r);
      running[r].total = put_row(total, lane(base, r), s[r], scale, block.scores + r * kKeyTile);
    }
  }
  static VF lane(VF v, int i) { return (VF)_mm512_permutexvar_ps(_mm512_set1_epi32(i), (__m512)v); }

  // One row of scores -> probabilities; returns `total` plus the probabilities, by lane.
  static VF put_row(VF total, VF base, const VF* s, const float* scale, float* row) {
    const __m512i ones = _mm512_set1_epi32(0x3F803F80);
    __m512 p[4];
    FREIGHT_UNROLL
    for (int i = 0; i < 4; i++) p[i] = power((__m512)(s[i] - base));
    if (scale)
      FREIGHT_UNROLL
      for (int i = 0; i < 4; i++) {
        total = total + (VF)p[i];
        p[i] = _mm512_mul_ps(p[i], _mm512_load_ps(scale + i * W));
      }
    FREIGHT_UNROLL
    for (int i = 0; i < 4; i += 2) {
      const __m512bh two = _mm512_cvtne2ps_pbh(p[i + 1], p[i]);
      if (!scale) total = (VF)_mm512_dpbf16_ps((__m512)total, two, (__m512bh)ones);  // sums the rounded probabilities
      _mm512_store_si512(row + i / 2 * W, (__m512i)two);
    }
    return total;
  }

  static __m512 decayed(const float* sum, float decay) {
    return _mm512_mul_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(decay));
  }

  // out[row] = out[row] * decay[row] + p[row] @ v
  template <int ROWS>
  void accumulate(const Block& block, const float* v, float* out) const {
    for (int d = 0; d < value_dim; d += 64) {
      __m512 sum[ROWS][4];
      for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 4; i++) sum[r][i] = decayed(out + (size_t)r * value_dim + d + 16 * i, block.decay[r]);
      for (int pair = 0; pair < kKeyTile / 2; pair++) {
        __m512i values[4];
        for (int i = 0; i < 4; i++) values[i] = _mm512_loadu_si512(v + (size_t)pair * value_dim + d + 16 * i);
        for (int r = 0; r < ROWS; r++)
          for (int i = 0; i < 4; i++) sum[r][i] = dot(sum[r][i], values[i], block.scores + r * kKeyTile + pair);
      }
      for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 4; i++) _mm512_storeu_ps(out + (size_t)r * value_dim + d + 16 * i, sum[r][i]);
    }
  }
};

template <FreightFormat F>
struct Bf16Tiles : Bf16Products {
  static constexpr FreightFormat format = F;
  static constexpr bool quantized = is_quantized(F);
  static constexpr int chunk = quantized ? 64 : 32;  // channels in one register as stored
  using Bf16Products::Bf16Products;

  using Mask = std::conditional_t<quantized, __mmask64, __mmask32>;

  // A mask of the channels of a chunk that exist if `left` are left.
  static Mask chunk_mask(int left) {
    return left >= chunk ? static_cast<Mask>(-1) : static_cast<Mask>((uint64_t{1} << std::max(left, 0)) - 1);
  }

  // A chunk of stored values, with zeros after the end of a row.
  static __m512i load_chunk(const uint8_t* from, Mask mask) {
    if constexpr (quantized) return _mm512_maskz_loadu_epi8(mask, from);
    return _mm512_maskz_loadu_epi16(mask, from);
  }

  // Four rows -> part t, lane c: dword 4 c + t of each row; for quantized formats two pairs of bytes, each of all rows.
  static void transpose_rows(const __m512i (&r)[4], __m512i (&part)[4]) {
    if constexpr (quantized) {
      const __m512i a0 = _mm512_unpacklo_epi16(r[0], r[2]), a1 = _mm512_unpackhi_epi16(r[0], r[2]);
      const __m512i b0 = _mm512_unpacklo_epi16(r[1], r[3]), b1 = _mm512_unpackhi_epi16(r[1], r[3]);
      part[0] = _mm512_unpacklo_epi16(a0, b0), part[1] = _mm512_unpackhi_epi16(a0, b0);
      part[2] = _mm512_unpacklo_epi16(a1, b1), part[3] = _mm512_unpackhi_epi16(a1, b1);
    } else {
      const __m512i a0 = _mm512_unpacklo_epi32(r[0], r[1]), a1 = _mm512_unpackhi_epi32(r[0], r[1]);
      const __m512i b0 = _mm512_unpacklo_epi32(r[2], r[3]), b1 = _mm512_unpackhi_epi32(r[2], r[3]);
      part[0] = _mm512_unpacklo_epi64(a0, b0), part[1] = _mm512_unpackhi_epi64(a0, b0);
      part[2] = _mm512_unpacklo_epi64(a1, b1), part[3] = _mm512_unpackhi_epi64(a1, b1);
    }
  }

  // keys[64] + offset: k_dim stored values each -> [pairs][64][2]
  template <class Between>
  void pack_k(const uint8_t* const* keys, size_t offset, float* packed, const Between& between) const {
    for (int first = 0; first < kKeyTile; first += kPackTogether, between(kPackTogether))
      pack_pairs<false>(keys + first, offset, k_dim, pairs, nullptr, packed + first);
  }

  // `pack_k` with group scales: the first `before` channels of keys are BF16 at rotated[64] + rotated_offset, the
  // others have the scales scale[group][64].
  template <class Between>
  void pack_k_groups(const uint8_t* const* rotated, size_t rotated_offset, int before, const uint8_t* const* keys,
                     size_t offset, const float* scale, float* packed, const Between& between) const {
    constexpr int group = FREIGHT_SCALE_GROUP;
    const int used = (before + v_dim) / 2;
    for (int first = 0; first < kKeyTile; first += kPackTogether, between(kPackTogether)) {
      float* to = packed + first;
      Bf16Tiles<FREIGHT_BFLOAT16>::pack_pairs<false>(rotated + first, rotated_offset, before, before / 2, nullptr, to);
      to += (size_t)before / 2 * kKeyTile;
      for (int d = 0; d < v_dim; d += group, to += group / 2 * kKeyTile)
        pack_pairs<true>(keys + first, offset + d, group, group / 2, scale + d / group * kKeyTile + first, to);
      for (int pair = used; pair < pairs; pair++, to += kKeyTile) _mm512_storeu_si512(to, _mm512_setzero_si512());
    }
  }

  // 16 keys, `dim` channels each -> `count` pairs of channels, [pairs][64][2], times the scale of each key if SCALED.
  template <bool SCALED>
  static void pack_pairs(const uint8_t* const* keys, size_t offset, int dim, int count, const float* scale, float* to) {
    for (int pair = 0; pair < count; pair += chunk / 2) {
      const Mask mask = chunk_mask(dim - 2 * pair);
      __m512i parts[4][4];  // [part][4 keys]
      FREIGHT_UNROLL
      for (int four = 0; four < 4; four++) {
        __m512i rows[4], part[4];
        FREIGHT_UNROLL
        for (int i = 0; i < 4; i++)
          rows[i] = load_chunk(keys[4 * four + i] + offset + 2 * pair * bytes_of(F), mask);
        transpose_rows(rows, part);
        FREIGHT_UNROLL
        for (int t = 0; t < 4; t++) parts[t][four] = part[t];
      }
      store_pairs<SCALED>(parts, count - pair, scale, to + (size_t)pair * kKeyTile);
    }
  }

  // The first `count` pairs of channels of 16 keys, parts[part][4 keys] -> [pairs][64][2].
  template <bool SCALED>
  static void store_pairs(const __m512i (&parts)[4][4], int count, const float* scale, float* to) {
    const Decoder<F> decode;
    FREIGHT_UNROLL
    for (int t = 0; t < 4; t++) {
      __m512i lanes[4];
      transpose_lanes(parts[t], lanes);
      FREIGHT_UNROLL
      for (int c = 0; c < 4; c++) {
        const int pair = (4 * c + t) * (quantized ? 2 : 1);
        if (pair >= count) continue;
        if constexpr (quantized) {
          __m512i even, odd;
          decode(lanes[c], even, odd);
          if constexpr (SCALED) {
            const __m512 of_keys = _mm512_loadu_ps(scale);
            even = scaled_pairs(even, of_keys, of_keys), odd = scaled_pairs(odd, of_keys, of_keys);
          }
          _mm512_storeu_si512(to + pair * kKeyTile, even);
          _mm512_storeu_si512(to + (pair + 1) * kKeyTile, odd);
        } else {
          _mm512_storeu_si512(to + pair * kKeyTile, lanes[c]);
        }
      }
    }
  }

  // Permute stored values so that interleaving them with another key's restores the order of channels.
  static __m512i spread(__m512i stored) {
    const __m512i of_bytes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i of_bf16 = _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm512_permutexvar_epi32(quantized ? of_bytes : of_bf16, stored);
  }

  // -> [32 pairs of keys][value_dim][2]
  template <class Between>
  void pack_v(const uint8_t* const* keys, size_t offset, float* packed, const Between& between) const {
    pack_channels<false>(keys, offset, nullptr, packed, between);
  }

  // `pack_v` with group scales scale[group][64].
  template <class Between>
  void pack_v_groups(const uint8_t* const* keys, size_t offset, const float* scale, float* packed,
                     const Between& between) const {
    pack_channels<true>(keys, offset, scale, packed, between);
  }

  template <bool SCALED, class Between>
  void pack_channels(const uint8_t* const* keys, size_t offset, const float* scale, float* packed,
                     const Between& between) const {
    const int width = value_dim;
    const Decoder<F> decode;
    for (int first = 0; first < kKeyTile; first += kPackTogether)
      for (int channel = 0; channel < width; channel += chunk) {
        const Mask mask = chunk_mask(v_dim - channel);
        const size_t from = offset + channel * bytes_of(F);
        float* to = packed + (size_t)first / 2 * width + channel;
        FREIGHT_UNROLL
        for (int key = first; key < first + kPackTogether; key += 2, to += width) {
          if (channel == 0 && key % 8 == 0) between(8);
          const __m512i even = spread(load_chunk(keys[key] + from, mask));
          const __m512i odd = spread(load_chunk(keys[key + 1] + from, mask));
          __m512i out[chunk / 16];
          if constexpr (quantized) {
            decode(_mm512_unpacklo_epi8(even, odd), out[0], out[1]);
            decode(_mm512_unpackhi_epi8(even, odd), out[2], out[3]);
          } else {
            out[0] = _mm512_unpacklo_epi16(even, odd), out[1] = _mm512_unpackhi_epi16(even, odd);
          }
          if constexpr (SCALED) {
            const float* of_keys = scale + channel / FREIGHT_SCALE_GROUP * kKeyTile + key;
            const __m512 first_key = _mm512_set1_ps(of_keys[0]), second_key = _mm512_set1_ps(of_keys[1]);
            FREIGHT_UNROLL
            for (int i = 0; i < chunk / 16; i++) out[i] = scaled_pairs(out[i], first_key, second_key);
          }
          FREIGHT_UNROLL
          for (int i = 0; i < chunk / 16; i++) _mm512_storeu_si512(to + 16 * i, out[i]);
        }
      }
  }
};

}  // namespace freight
#endif
