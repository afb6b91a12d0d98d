// Products of rows with a state, and its advance over a tile.
//
// A column's sum adds the rows of S in order, in one accumulator, whether S is decoded during the product or before it,
// and for any number of rows. So a row's bits do not depend on the number of rows of a call.
#pragma once
#include "state_codes.h"
#include "states.h"

namespace freight {

constexpr int kStateTile = FREIGHT_STATE_TILE;
constexpr float kLeastDecay = -104.0f;  // LEAST_DECAY of operands/tiles.py, which says why
constexpr int64_t kStateAhead = 4096;  // bytes between what is decoded and what is prefetched

// Column vectors that are summed at a time: of one or two rows while S is decoded, of `kRowsOfMany` rows of a decoded
// S.
#if FREIGHT_AVX512
constexpr int kColumnsOfOne = 8, kRowsOfMany = 4, kColumnsOfMany = 4;
#elif FREIGHT_AVX2
constexpr int kColumnsOfOne = 2, kRowsOfMany = 4, kColumnsOfMany = 1;
#else
constexpr int kColumnsOfOne = 1, kRowsOfMany = 2, kColumnsOfMany = 1;
#endif

// The stored S of one head: [k_dim, v_dim] of F, and its scales [v_dim], or null.
template <FreightFormat F>
struct StoredState {
  uint8_t* data;
  uint16_t* scale;
  int64_t k_dim, v_dim;

  V16 scaled(V16 values, int64_t column) const {
    if constexpr (is_quantized(F))
      return values * load_as<FREIGHT_BFLOAT16>(scale + column, lanes_at(column, v_dim));
    return values;
  }
};

// Rows of floats, `stride` apart, a multiple of kLanes, with zeros after the last value.
struct FloatRows {
  float* data;
  int64_t stride;

  float* row(int64_t index) const { return data + index * stride; }
};

// Call body(N, column) for N column vectors from `column` on; N is a constant, as large as fits. The very last vector
// may be partial.
template <int N, class Body>
void for_column_vectors(int64_t begin, int64_t size, const Body& body) {
  for (; begin + (N > 1 ? N * kLanes : 1) <= size; begin += N * kLanes) body(std::integral_constant<int, N>(), begin);
  if constexpr (N > 1) for_column_vectors<N / 2>(begin, size, body);
}

// out[m] = x[m] S for M rows, with S decoded during the product.
template <int M, FreightFormat F>
void multiply_stored(const StoredState<F>& s, FloatRows x, FloatRows out) {
  for_column_vectors<kColumnsOfOne>(0, s.v_dim, [&](auto number, int64_t column) {
    constexpr int N = decltype(number)::value;
    const int count = N > 1 ? kLanes : lanes_at(column, s.v_dim);
    const int64_t pitch = s.v_dim * bytes_of(F);
    const uint8_t* from = s.data + column * bytes_of(F);
    Codes<F> codes[N];
    V16 sums[M][N] = {};
    for (int64_t row = 0; row < s.k_dim; row++, from += pitch) {
      for (int64_t line = 0; line < N * kLanes * bytes_of(F); line += FREIGHT_CACHE_LINE)
        __builtin_prefetch(from + kStateAhead + line);
      V16 factors[M];
      FREIGHT_UNROLL
      for (int m = 0; m < M; m++) factors[m] = set16(x.row(m)[row]);
      FREIGHT_UNROLL
      for (int n = 0; n < N; n++) {
        const V16 values = codes[n].read(from + n * kLanes * bytes_of(F), count);
        FREIGHT_UNROLL
        for (int m = 0; m < M; m++) sums[m][n] = fma(factors[m], values, sums[m][n]);
      }
    }
    for (int n = 0; n < N; n++)
      for (int m = 0; m < M; m++)
        store(out.row(m) + column + n * kLanes, s.scaled(codes[n].finished(sums[m][n]), column + n * kLanes));
  });
}

// Decode S to the values that `multiply_stored` sums, [k_dim, padded(v_dim)]. A NaN anywhere in a column is stored in
// its first row.
template <FreightFormat F>
void decode_state(const StoredState<F>& s, FloatRows to) {
  for (int64_t column = 0; column < s.v_dim; column += kLanes) {
    const int count = lanes_at(column, s.v_dim);
    const uint8_t* from = s.data + column * bytes_of(F);
    Codes<F> codes;
    for (int64_t row = 0; row < s.k_dim; row++, from += s.v_dim * bytes_of(F))
      store(to.row(row) + column, codes.read(from, count));
    store(to.row(0) + column, load16(to.row(0) + column) + codes.finished(V16{}));
  }
}

// The same as `multiply_stored` for M rows of `decoded`, which `decode_state` wrote.
template <int M, FreightFormat F>
void multiply_decoded(const StoredState<F>& s, FloatRows decoded, FloatRows x, FloatRows out) {
  for_column_vectors<kColumnsOfMany>(0, s.v_dim, [&](auto number, int64_t column) {
    constexpr int N = decltype(number)::value;
    V16 sums[M][N] = {};
    for (int64_t row = 0; row < s.k_dim; row++) {
      V16 values[N];
      FREIGHT_UNROLL
      for (int n = 0; n < N; n++) values[n] = load16(decoded.row(row) + column + n * kLanes);
      FREIGHT_UNROLL
      for (int m = 0; m < M; m++) {
        const V16 factor = set16(x.row(m)[row]);
        FREIGHT_UNROLL
        for (int n = 0; n < N; n++) sums[m][n] = fma(factor, values[n], sums[m][n]);
      }
    }
    for (int n = 0; n < N; n++)
      for (int m = 0; m < M; m++)
        store(out.row(m) + column + n * kLanes, s.scaled(Codes<F>().finished(sums[m][n]), column + n * kLanes));
  });
}

template <FreightFormat F>
void multiply_decoded(const StoredState<F>& s, FloatRows decoded, int64_t rows, FloatRows x, FloatRows out) {
  const auto from = [](FloatRows all, int64_t row) { return FloatRows{all.row(row), all.stride}; };
  int64_t row = 0;
  for (; row + kRowsOfMany <= rows; row += kRowsOfMany)
    multiply_decoded<kRowsOfMany>(s, decoded, from(x, row), from(out, row));
  for (; row < rows; row++) multiply_decoded<1>(s, decoded, from(x, row), from(out, row));
}

inline V16 larger_finite(V16 largest, V16 values) {
  return each([&](int i) {
    const VI magnitude = (VI)values.v[i] & 0x7FFFFFFF, finite = magnitude < 0x7F800000 ? magnitude : VI{};
    return (VF)((VI)largest.v[i] > finite ? (VI)largest.v[i] : finite);
  });
}

// The factor of a row of S: one for all rows, or one for each.
inline V16 all_lanes(float decay) { return set16(decay); }
inline const float* all_lanes(const float* decays) { return decays; }
inline V16 decay_of(V16 decay, int64_t) { return decay; }
inline V16 decay_of(const float* decays, int64_t row) { return set16(decays[row]); }

// Compute rows `row` .. `row + D` of `advance_state`.
template <int D, int N, FreightFormat F, class Decay>
void advance_rows(const StoredState<F>& s, Decay decay, FloatRows k, FloatRows u, FloatRows to, int64_t row,
                  int64_t column, V16* largest) {
  V16 sums[D][N];
  FREIGHT_UNROLL
  for (int d = 0; d < D; d++) {
    const uint8_t* from = s.data + ((row + d) * s.v_dim + column) * bytes_of(F);
    FREIGHT_UNROLL
    for (int n = 0; n < N; n++) {
      const int64_t at = column + n * kLanes;
      const V16 stored = load_as<F>(from + n * kLanes * bytes_of(F), lanes_at(at, s.v_dim));
      sums[d][n] = s.scaled(stored, at) * decay_of(decay, row + d);
    }
  }
  for (int j = 0; j < kStateTile; j++) {
    V16 values[N];
    FREIGHT_UNROLL
    for (int n = 0; n < N; n++) values[n] = load16(u.row(j) + column + n * kLanes);
    FREIGHT_UNROLL
    for (int d = 0; d < D; d++) {
      const V16 factor = set16(k.row(j)[row + d]);
      FREIGHT_UNROLL
      for (int n = 0; n < N; n++) sums[d][n] = fma(factor, values[n], sums[d][n]);
    }
  }
  FREIGHT_UNROLL
  for (int d = 0; d < D; d++)
    FREIGHT_UNROLL
    for (int n = 0; n < N; n++) {
      store(to.row(row + d) + column + n * kLanes, sums[d][n]);
      largest[n] = larger_finite(largest[n], sums[d][n]);
    }
}

// to = decay * S + the sum over j of k_j u_jᵀ, j ascending, and the largest finite magnitude of each column.
// decay: a number, or one for each row of S; k: [kStateTile, padded(k_dim)], u: [kStateTile, padded(v_dim)].
template <FreightFormat F, class Decay>
void advance_state(const StoredState<F>& s, Decay decay, FloatRows k, FloatRows u, FloatRows to, float* largest) {
  for_column_vectors<kColumnsOfMany>(0, s.v_dim, [&](auto number, int64_t column) {
    constexpr int N = decltype(number)::value;
    V16 found[N] = {};
    int64_t row = 0;
    for (; row + kRowsOfMany <= s.k_dim; row += kRowsOfMany)
      advance_rows<kRowsOfMany, N>(s, all_lanes(decay), k, u, to, row, column, found);
    for (; row < s.k_dim; row++) advance_rows<1, N>(s, all_lanes(decay), k, u, to, row, column, found);
    for (int n = 0; n < N; n++) store(largest + column + n * kLanes, found[n]);
  });
}

// Encode a row's values. The arrays do not overlap (__restrict), so that the loop vectorizes.
template <FreightFormat F>
void encode_row(const float* __restrict values, const float* __restrict divisors, int64_t size,
                uint8_t* __restrict codes) {
  for (int64_t i = 0; i < size; i++) codes[i] = code_of<F>(values[i] / divisors[i]);
}

// Store `matrix` [k_dim, v_dim]. largest: [v_dim], the largest magnitude of each column; divisors: scratch, [v_dim].
template <FreightFormat F>
void encode_state(FloatRows matrix, const float* largest, [[maybe_unused]] float* divisors, const StoredState<F>& s) {
  if constexpr (is_quantized(F)) {
    for (int64_t i = 0; i < s.v_dim; i++) {
      s.scale[i] = float_to_bf16(scale_from(largest[i], max_of(F)));
      divisors[i] = bf16_to_float(s.scale[i]);
    }
    for (int64_t row = 0; row < s.k_dim; row++)
      encode_row<F>(matrix.row(row), divisors, s.v_dim, s.data + row * s.v_dim);
  } else {
    for (int64_t row = 0; row < s.k_dim; row++)
      write_row(matrix.row(row), F, s.v_dim, s.data + row * s.v_dim * bytes_of(F));
  }
}

}  // namespace freight
