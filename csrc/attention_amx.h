// Attention's tile products by matrix tiles (AMX), for BF16 queries over pages whose values are exact in BF16.
//
// The layouts are those of Bf16Tiles: its K tile [pairs of channels][64 keys][2] and its V tile [pairs of keys]
// [channels][2] are what TDPBF16PS takes as its second operand, 16 rows of 64 bytes at a time. So K and V are decoded
// once and used for all rows of a task. The channels of q and K are padded with zeros to a multiple of 32.
//
// Up to 16 rows go through at once; the configuration says how many, so nothing of another row is read or written. An
// element of a product depends on its own row and column alone, so how many rows go through together changes no bit.
// (The bits are not those of Bf16Tiles: TDPBF16PS adds up even and odd inputs apart.)
#pragma once
#include "tiles.h"
#if FREIGHT_AMX
#include "attention_bf16.h"

namespace freight {

template <FreightFormat F>
struct AmxTiles : Bf16Tiles<F> {
  using Base = Bf16Tiles<F>;
  using Base::pairs, Base::q_parts, Base::v_dim, Base::value_dim;
  using Registers = TileRegisters;
  static constexpr int max_rows = 16;
  static constexpr bool pipelined = true, side_by_side = false;

  AmxTiles(int k_dim, int v_dim, bool scaled_q) : Base(k_dim, v_dim, scaled_q) { pairs = (k_dim + 31) / 32 * 16; }

  // Rows that go through together: their products with K, then scores, then probabilities, which replace the scores as
  // BF16 numbers in the first half of each row.
  struct Block {
    int row, rows;
    alignas(64) float scores[max_rows * kKeyTile];
    __m512 largest[max_rows];  // by lane
    alignas(64) float decay[max_rows];
  };

  // block.scores[rows][64] = q[row ..] . k[key]
  void scores(TileRegisters& registers, const float* q, const float* k, Block& block) const {
    constexpr int key_stride = kKeyTile * 4;
    const int stride = q_parts * pairs * 4;
    registers.set_rows(block.rows);
    q += Base::q_size(block.row);
    memory_barrier();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int pair = 0; pair < pairs; pair += 16) {
      const float* keys = k + (size_t)pair * kKeyTile;
      _tile_loadd(4, q + pair, stride);
      _tile_loadd(6, keys, key_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, keys + 16, key_stride);
      _tile_dpbf16ps(1, 4, 7);
      if (q_parts == 1) {
        _tile_loadd(6, keys + 32, key_stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, keys + 48, key_stride);
        _tile_dpbf16ps(3, 4, 7);
      } else {
        _tile_loadd(5, q + pairs + pair, stride);
        _tile_dpbf16ps(0, 5, 6);
        _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(6, keys + 32, key_stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(7, keys + 48, key_stride);
        _tile_dpbf16ps(3, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, block.scores, key_stride);
    _tile_stored(1, block.scores + 16, key_stride);
    _tile_stored(2, block.scores + 32, key_stride);
    _tile_stored(3, block.scores + 48, key_stride);
    memory_barrier();
  }

  // The final scores of the r-th row of the block.
  void put_scores(const VF* s, int r, Block& block) const {
    for (int i = 0; i < 4; i++) store(block.scores + r * kKeyTile + i * W, s[i]);
    const __m512 first = _mm512_max_ps((__m512)s[0], (__m512)s[1]), last = _mm512_max_ps((__m512)s[2], (__m512)s[3]);
    block.largest[r] = _mm512_max_ps(first, last);
  }

  // Lane r: the largest lane of rows[r].
  static VF largest_of(const __m512 (&rows)[16]) {
    VF part[16];
    for (int i = 0; i < 16; i++) part[i] = (VF)rows[i];
    for (int half = 8; half >= 1; half /= 2)
      for (int i = 0; i < half; i++) {
        VF first, last;
        interleave(part[i], part[i + half], first, last);
        part[i] = (VF)_mm512_max_ps((__m512)first, (__m512)last);
      }
    return part[0];
  }

  // Scores -> probabilities against the largest score so far of each row, and `out`, the
  // sums so far, times their decay: long before tiles load them, which wait for stores.
  // running: .best and .total of the block's rows; scale: that of V by key, or null.
  template <class Running>
  void softmax(Running* running, const float* scale, Block& block, float* out) const {
    alignas(64) float best[max_rows], base[max_rows];
    const int n = block.rows;
    for (int r = 0; r < n; r++) best[r] = running[r].best;
    for (int r = n; r < max_rows; r++) best[r] = 0.0f, block.largest[r] = _mm512_setzero_ps();
    const VF before = load(best), of_tile = largest_of(block.largest), after = of_tile > before ? of_tile : before;
    const VF infinity = set1(__builtin_inff()), from = after == -infinity ? set1(0.0f) : after;
    store(block.decay, after == before ? set1(1.0f) : exp2(before - from));
    store(best, after);
    store(base, from);
    for (int r = 0; r < n; r++) {
      running[r].best = best[r];
      VF s[4];
      for (int i = 0; i < 4; i++) s[i] = load(block.scores + r * kKeyTile + i * W);
      const VF total = running[r].total * set1(block.decay[r]);
      running[r].total = Base::put_row(total, set1(base[r]), s, scale, block.scores + r * kKeyTile);
      if (block.decay[r] == 1.0f) continue;
      for (float *at = out + (size_t)r * value_dim, *end = at + value_dim; at < end; at += W)
        store(at, load(at) * set1(block.decay[r]));
    }
  }

  // out[row] += p[row] @ v
  void accumulate(TileRegisters& registers, const float* v, const Block& block, float* out) const {
    const int stride = value_dim * 4;
    const float* last = v + (size_t)16 * value_dim;  // the last 32 keys
    registers.set_rows(block.rows);
    memory_barrier();
    _tile_loadd(4, block.scores, kKeyTile * 4);
    _tile_loadd(5, block.scores + 16, kKeyTile * 4);
    for (int d = 0; d < v_dim; d += 32) {
      _tile_loadd(0, out + d, stride);
      _tile_loadd(6, v + d, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(1, out + d + 16, stride);
      _tile_loadd(7, v + d + 16, stride);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, last + d, stride);
      _tile_dpbf16ps(0, 5, 6);
      _tile_loadd(7, last + d + 16, stride);
      _tile_dpbf16ps(1, 5, 7);
      _tile_stored(0, out + d, stride);
      _tile_stored(1, out + d + 16, stride);
    }
    memory_barrier();
  }
};

}  // namespace freight
#endif
