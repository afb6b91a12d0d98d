// Attention's tile products in float32, for every instruction set and every stored format.
//
// A key tile is decoded once into floats: K transposed, so that a lane is a key, and V in the stored order, so that a
// lane is a channel. Every score and every output channel is one ordered chain of additions, so the number of rows that
// are multiplied together changes no bit.
#pragma once
#include <algorithm>

#include "attention_tile.h"
#include "rows.h"

namespace freight {

// The products, which do not depend on the stored format, and so are compiled once.
struct Float32Products {
  static constexpr int rows_of_block = 1;  // rows of several KV heads that are multiplied together
  static constexpr bool side_by_side = false, reads_codes = false;
  // Rows whose sums stay in registers, and registers of keys or channels that are loaded at a time.
#if FREIGHT_NEON
  static constexpr int max_rows = 4, vectors = 4;  // 32 registers
#else
  static constexpr int max_rows = W == 16 ? 6 : W == 8 ? 5 : 3, vectors = W == 16 ? 4 : 2;
#endif
  static constexpr int chunk = kLanes;                           // channels that are transposed together

  int k_dim, v_dim;
  int value_dim;  // v_dim padded to 64: length of an output row in the working memory

  Float32Products(int k_dim, int v_dim, bool /* scaled_q */)
      : k_dim(k_dim), v_dim(v_dim), value_dim((v_dim + 63) / 64 * 64) {}

  // Sizes of the working memory, in floats.
  size_t q_size(int rows) const { return (size_t)rows * k_dim; }
  size_t k_size() const { return (size_t)(k_dim + chunk) * kKeyTile; }
  size_t v_size() const { return (size_t)kKeyTile * value_dim; }
  size_t p_size(int, int) const { return (size_t)max_rows * kKeyTile; }

  void pack_q(const float* q, int row, float* packed) const { std::copy(q, q + k_dim, packed + q_size(row)); }

  // Say whether a packed V tile holds neither infinities nor NaN.
  bool finite(const float* packed) const {
    int unlike = 0;
    for (size_t i = 0; i < v_size(); i++) unlike |= (float_to_bits(packed[i]) & 0x7F800000) == 0x7F800000;
    return !unlike;
  }

  // scores[ROWS][64] = q[row ..] . k[key]
  template <int ROWS>
  void scores(const float* q, int row, const float* k, float* out) const {
    q += q_size(row);
    for (int key = 0; key < kKeyTile; key += vectors * W) {
      VF sum[ROWS][vectors] = {};
      for (int d = 0; d < k_dim; d++) {
        VF part[vectors];
        for (int i = 0; i < vectors; i++) part[i] = load(k + (size_t)d * kKeyTile + key + i * W);
        for (int r = 0; r < ROWS; r++) {
          const VF x = set1(q[(size_t)r * k_dim + d]);
          for (int i = 0; i < vectors; i++) sum[r][i] = fma(part[i], x, sum[r][i]);
        }
      }
      for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < vectors; i++) store(out + r * kKeyTile + key + i * W, sum[r][i]);
    }
  }

  // Store W probabilities of a row, times their V scales if there are any; returns them without scales, to be summed.
  VF put_p(float* packed, int row, int key, VF p, const float* scale) const {
    store(packed + row * kKeyTile + key, scale ? p * load(scale + key) : p);
    return p;
  }

  // out[row] = out[row] * decay[row] + p[row] @ v
  template <int ROWS>
  void accumulate(const float* p, const float* v, const float* decay, float* out) const {
    for (int d = 0; d < value_dim; d += vectors * W) {
      VF sum[ROWS][vectors];
      for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < vectors; i++) sum[r][i] = load(out + (size_t)r * value_dim + d + i * W) * set1(decay[r]);
      for (int key = 0; key < kKeyTile; key++) {
        VF part[vectors];
        for (int i = 0; i < vectors; i++) part[i] = load(v + (size_t)key * value_dim + d + i * W);
        for (int r = 0; r < ROWS; r++) {
          const VF x = set1(p[r * kKeyTile + key]);
          for (int i = 0; i < vectors; i++) sum[r][i] = fma(part[i], x, sum[r][i]);
        }
      }
      for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < vectors; i++) store(out + (size_t)r * value_dim + d + i * W, sum[r][i]);
    }
  }
};

template <FreightFormat F>
struct Float32Tiles : Float32Products {
  static constexpr FreightFormat format = F;
  using Float32Products::Float32Products;

  // keys[64] + offset: k_dim stored values each -> [k_dim][64]
  template <class Between>
  void pack_k(const uint8_t* const* keys, size_t offset, float* packed, const Between& between) const {
    for (int first = 0; first < kKeyTile; first += W) {
      pack_rows<F>(keys + first, offset, k_dim, packed + first, [](V16 values, int) { return values; });
      if ((first + W) % 8 == 0) between(std::max(W, 8));
    }
  }

  // `pack_k` with group scales: the first `before` channels of keys are BF16 at rotated[64] + rotated_offset, the
  // others have the scales scale[group][64].
  template <class Between>
  void pack_k_groups(const uint8_t* const* rotated, size_t rotated_offset, int before, const uint8_t* const* keys,
                     size_t offset, const float* scale, float* packed, const Between& between) const {
    for (int first = 0; first < kKeyTile; first += W) {
      const auto as_stored = [](V16 values, int) { return values; };
      pack_rows<FREIGHT_BFLOAT16>(rotated + first, rotated_offset, before, packed + first, as_stored);
      for (int d = 0; d < v_dim; d += FREIGHT_SCALE_GROUP) {
        const float* of_keys = scale + d / FREIGHT_SCALE_GROUP * kKeyTile + first;
        float* to = packed + (size_t)(before + d) * kKeyTile + first;
        const auto scaled = [of_keys](V16 values, int i) { return values * set16(of_keys[i]); };
        pack_rows<F>(keys + first, offset + d, FREIGHT_SCALE_GROUP, to, scaled);
      }
      if ((first + W) % 8 == 0) between(std::max(W, 8));
    }
  }

  // Channels of W keys, `dim` values each in format G -> of(values), [dim padded to chunk][64].
  template <FreightFormat G, class Of>
  static void pack_rows(const uint8_t* const* keys, size_t offset, int dim, float* packed, const Of& of) {
    for (int d = 0; d < dim; d += chunk) {
      float rows[W][chunk];
      for (int i = 0; i < W; i++)
        store(rows[i], of(load_as<G>(keys[i] + offset + d * bytes_of(G), lanes_at(d, dim)), i));
      for (int c = 0; c < chunk; c += W) {
        VF part[W];
        for (int i = 0; i < W; i++) part[i] = load(rows[i] + c);
        transpose(part);
        for (int i = 0; i < W; i++) store(packed + (size_t)(d + c + i) * kKeyTile, part[i]);
      }
    }
  }

  // -> [64][value_dim]
  template <class Between>
  void pack_v(const uint8_t* const* keys, size_t offset, float* packed, const Between& between) const {
    for (int key = 0; key < kKeyTile; key++) {
      float* row = packed + (size_t)key * value_dim;
      read_row<F>(keys[key] + offset, v_dim, row);
      std::fill(row + padded(v_dim), row + value_dim, 0.0f);
      if ((key + 1) % 8 == 0) between(8);
    }
  }

  template <class Between>
  void pack_v_groups(const uint8_t* const* keys, size_t offset, const float* scale, float* packed,
                     const Between& between) const {
    pack_v(keys, offset, packed, between);
    scale_groups(scale, packed);
  }

  void scale_groups(const float* scale, float* packed) const {
    for (int key = 0; key < kKeyTile; key++)
      for (int d = 0; d < v_dim; d += kLanes) {
        float* at = packed + (size_t)key * value_dim + d;
        store(at, load16(at) * set16(scale[d / FREIGHT_SCALE_GROUP * kKeyTile + key]));
      }
  }
};

}  // namespace freight
