// Attention's tile products by matrix tiles (AMX), for BF16 queries over pages whose values are exact in BF16.
//
// The layouts are those of Bf16Tiles: its K tile [pairs of channels][64 keys][2] and V tile [pairs of keys][channels][2]
// are what TDPBF16PS takes as its second operand, 16 rows of 64 bytes at a time. So K and V are decoded once and used
// for all rows of a task. The channels of q and K are padded with zeros to a multiple of 32.
//
// Up to 16 rows go through at once; the configuration says how many, so nothing of another row is read or written. An
// element of a product depends on its own row and column alone, so how many rows go through together changes no bit.
// (The bits are not those of Bf16Tiles: TDPBF16PS adds up even and odd inputs apart.)
#pragma once
#include "simd.h"
#if FREIGHT_AMX
#include "attention_bf16.h"

namespace freight {

// GCC 12 does not know that tile loads and their configuration read memory, nor that tile stores write it.
inline void memory_barrier() { asm volatile("" ::: "memory"); }

// The tile registers of a thread while it works on a task. Tiles 0-3: sums, 4-5: rows of q or p, 6-7: K or V.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (rows) _tile_release();
  }

  // For products of `count` rows, 1 to 16.
  void set_rows(int count) {
    if (count == rows) return;
    rows = count;
    Config config;
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = static_cast<uint8_t>(i < 6 ? count : 16);
    memory_barrier();
    _tile_loadconfig(&config);
  }

 private:
  struct alignas(64) Config {  // as LDTILECFG reads it
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };
  int rows = 0;
};

template <FreightFormat F>
struct AmxTiles : Bf16Tiles<F> {
  using Base = Bf16Tiles<F>;
  using Base::pairs, Base::q_parts, Base::v_dim, Base::value_dim;
  using Registers = TileRegisters;
  static constexpr int max_rows = 16;
  static constexpr bool any_rows = true;

  AmxTiles(int k_dim, int v_dim, bool scaled_q) : Base(k_dim, v_dim, scaled_q) { pairs = (k_dim + 31) / 32 * 16; }

  size_t p_size() const { return (size_t)max_rows * kKeyTile / 2; }

  // scores[rows][64] = q[row ..] . k[key]
  template <int ROWS>
  void scores(const float* q, int row, const float* k, float* out) const {
    constexpr int key_stride = kKeyTile * 4;
    const int stride = q_parts * pairs * 4;
    q += Base::q_size(row);
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
    _tile_stored(0, out, key_stride);
    _tile_stored(1, out + 16, key_stride);
    _tile_stored(2, out + 32, key_stride);
    _tile_stored(3, out + 48, key_stride);
    memory_barrier();
  }

  // out[row] = out[row] * decay[row] + p[row] @ v
  template <int ROWS>
  void accumulate(const float* p, const float* v, const float* decay, float* out) const {
    for (int r = 0; r < max_rows; r++)  // 1 beyond the rows there are
      if (decay[r] != 1.0f) {
        float* row = out + (size_t)r * value_dim;
        for (int d = 0; d < value_dim; d += W) store(row + d, load(row + d) * set1(decay[r]));
      }
    const int stride = value_dim * 4;
    const float* last = v + (size_t)16 * value_dim;  // the last 32 keys
    memory_barrier();
    _tile_loadd(4, p, kKeyTile * 2);
    _tile_loadd(5, p + 16, kKeyTile * 2);
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
