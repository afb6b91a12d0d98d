// The product of weights in INT4 and NVFP4 on tiles (tiles.h) for 1 to 24 rows. Weights are the first operand, whose
// rows are 32 inputs of an output: what one look-up decodes (four_bit.h). Rows of x are the second, in pairs of inputs,
// as vectors take them; more than 12 are two tiles. Products commute, so the bits are those of tile_product.h.
#pragma once
#include <algorithm>

#include "activations.h"
#include "four_bit.h"
#include "memory.h"
#include "packed.h"
#include "tiles.h"

#if FREIGHT_AMX

namespace freight {

constexpr int64_t kRowsAhead = 8192;  // prefetch distance in bytes, into L2
constexpr int kPieceBytes = kGroupSteps * kBand * kTileBytes;  // a stored piece in bfloat16: [2 blocks][4 steps][16][32]

// Staged rows: one tile of `first` rows, or another of `second`, each [steps * 16 pairs][rows].
struct PairRows {
  const uint32_t *x, *more;
  int first, second;
};

// The tiles: 0-1 for sums [16 outputs][rows], 2 for x, 6-7 for weights; 3-4 and 5 for the second tile of x.
class WeightRows : public LoadedTiles {
 public:
  explicit WeightRows(const PairRows& rows) {
    TileConfig config;
    for (int i = 0; i < 6; i++) config.row_bytes[i] = static_cast<uint16_t>(4 * (i < 3 ? rows.first : rows.second));
    if (!rows.second)
      for (int i : {3, 4, 5}) config.row_bytes[i] = 64;
    load(config);
  }
};

// Look-ups of INT4. PER: steps of 32 inputs that share scales.
template <int PER>
struct Int4Rows {
  const FourBit layout;
  Int4::Scales scales[kBand][kGroupSteps / PER];  // of the present piece

  explicit Int4Rows(const FourBit& of) : layout(of) {}

  FREIGHT_INLINE void begin(const uint8_t* piece) {
    for (int block = 0; block < kBand; block++)
      for (int group = 0; group < kGroupSteps / PER; group++)
        Int4::read(layout, piece, block, group * PER * kTileInputs / kFourInputs, scales[block][group]);
  }
  // The values of a row: 32 inputs a step, whose codes are in the low bits of words.
  FREIGHT_INLINE void row(const uint8_t*, int block, int row, const __m512i* codes, __m512i* out) const {
    __m512i table = _mm512_setzero_si512();
    FREIGHT_UNROLL
    for (int step = 0; step < kGroupSteps; step++) {
      if (step % PER == 0) table = Int4::table(scales[block][step / PER], row);
      out[step] = _mm512_permutexvar_epi16(codes[step], table);
    }
  }
};

struct Nvfp4Rows {
  const FourBit layout;
  const Nvfp4::Tables& tables = Nvfp4::tables();

  explicit Nvfp4Rows(const FourBit& of) : layout(of) {}

  static void begin(const uint8_t*) {}
  FREIGHT_INLINE void row(const uint8_t* piece, int block, int row, const __m512i* codes, __m512i* out) const {
    constexpr int kApart = kBand * kLanes;  // bytes between the scales of two groups of a row
    const uint8_t* scales = piece + block * kLanes + row;
    FREIGHT_UNROLL
    for (int step = 0; step < kGroupSteps; step++)
      out[step] = Nvfp4::look_up(tables, codes[step], scales + 2 * step * kApart, kApart);
  }
};

// Decode eight of the 32 rows of a piece.
template <class Rows>
FREIGHT_INLINE void decode_rows(Rows& rows, const uint8_t* piece, int part, uint8_t* to) {
  if (part == 0) {
    rows.begin(piece);
    for (int line = 0; line < rows.layout.head; line += kUnit)
      _mm_prefetch(reinterpret_cast<const char*>(piece + line + kRowsAhead), _MM_HINT_T1);
  }
  const int block = part / 2, first = part % 2 * 8;
  const uint8_t* lines = piece + rows.layout.head + part * 8 * kUnit;
  to += block * kGroupSteps * kTileBytes + first * kTileRowBytes;
  FREIGHT_UNROLL
  for (int row = 0; row < 8; row++) {
    const uint8_t* line = lines + row * kUnit;
    _mm_prefetch(reinterpret_cast<const char*>(line + kRowsAhead), _MM_HINT_T1);
    const __m512i low = _mm512_loadu_si512(line);
    // A second load in place of a shift: shifts wait for the ports of the look-ups. No byte may follow the last line.
    const bool is_last = part == kGroupSteps - 1 && row == 7;
    const __m512i high = is_last ? _mm512_srli_epi16(low, 8) : _mm512_loadu_si512(line + 1);
    const __m512i codes[kGroupSteps] = {low, _mm512_srli_epi16(low, 4), high, _mm512_srli_epi16(high, 4)};
    __m512i values[kGroupSteps];
    rows.row(piece, block, first + row, codes, values);
    FREIGHT_UNROLL
    for (int step = 0; step < kGroupSteps; step++)
      _mm512_store_si512(to + step * kTileBytes + row * kTileRowBytes, values[step]);
  }
}

// Compute one band: sums[2 blocks][16 outputs][rows], of a second tile of rows kBandSums further on. `ring` is memory
// for two pieces.
constexpr int kBandSums = kBand * kLanes * kTileRows;

template <class Rows, bool TWO>
__attribute__((noinline)) void rows_band(const FourBit& layout, const uint8_t* from, const PairRows& rows,
                                         int64_t steps, uint8_t* ring, float* sums) {
  constexpr int kPairs = kTileInputs / 2;
  const uint32_t *x = rows.x, *more = rows.more;
  const int64_t stride = 4 * rows.first, of_more = 4 * rows.second;
  Rows decoder(layout);
  const int64_t pieces = (steps + kGroupSteps - 1) / kGroupSteps;
  for (int part = 0; part < kGroupSteps; part++) decode_rows(decoder, from, part, ring);
  memory_barrier();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (TWO) {
    _tile_zero(3);
    _tile_zero(4);
  }
  for (int64_t piece = 0; piece < pieces; piece++) {
    const uint8_t* a = ring + piece % 2 * kPieceBytes;
    uint8_t* next = ring + (piece + 1) % 2 * kPieceBytes;
    FREIGHT_UNROLL
    for (int part = 0; part < kGroupSteps; part++) {
      if (piece * kGroupSteps + part < steps) {
        memory_barrier();
        _tile_loadd(2, x, stride);
        _tile_loadd(6, a + part * kTileBytes, kTileRowBytes);
        _tile_dpbf16ps(0, 6, 2);
        _tile_loadd(7, a + (kGroupSteps + part) * kTileBytes, kTileRowBytes);
        _tile_dpbf16ps(1, 7, 2);
        if constexpr (TWO) {
          _tile_loadd(5, more, of_more);
          _tile_dpbf16ps(3, 6, 5);
          _tile_dpbf16ps(4, 7, 5);
        }
        memory_barrier();
        x += kPairs * rows.first, more += kPairs * rows.second;
      }
      if (piece + 1 < pieces) decode_rows(decoder, from + (piece + 1) * layout.bytes, part, next);
    }
  }
  memory_barrier();
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + kLanes * rows.first, stride);
  if constexpr (TWO) {
    _tile_stored(3, sums + kBandSums, of_more);
    _tile_stored(4, sums + kBandSums + kLanes * rows.second, of_more);
  }
  memory_barrier();
}

template <bool TWO>
void rows_band(const FourBit& layout, const uint8_t* from, const PairRows& rows, int64_t steps, uint8_t* ring,
               float* sums) {
  const auto band = layout.groups == 1   ? rows_band<Int4Rows<4>, TWO>
                    : layout.groups == 2 ? rows_band<Int4Rows<2>, TWO>
                    : layout.groups == 4 ? rows_band<Int4Rows<1>, TWO>
                                         : rows_band<Nvfp4Rows, TWO>;
  band(layout, from, rows, steps, ring, sums);
}

// Compute a band for `count` staged rows; x: tiles of [staged steps][height]. Calls finish(sums[count][16], row, count,
// block) for the rows of each tile and its blocks.
template <class Finish>
void rows_task(const FreightWeight& weight, const uint32_t* x, int64_t staged, int64_t count, int64_t band,
               const Finish& finish) {
  thread_local WorkingMemory memory;
  const FourBit layout = four_bit(weight.format);
  const int64_t steps = (weight.in_features + kTileInputs - 1) / kTileInputs, blocks = blocks_of(weight.out_features);
  const int64_t pieces = (steps + kGroupSteps - 1) / kGroupSteps;
  const uint8_t* from = static_cast<const uint8_t*>(weight.data) + band * pieces * layout.bytes;
  const int first = height_of(count), second = count > kTileRows ? height_of(count - kTileRows) : 0;
  const PairRows rows{x, x + kTileRows * staged, first, second};
  alignas(64) float sums[2 * kBandSums], turned[kTileRows * kLanes];
  uint8_t* ring = memory.of(2 * kPieceBytes);
  {
    const SubnormalsAreZero subnormals;
    const WeightRows tiles(rows);
    if (second)
      rows_band<true>(layout, from, rows, steps, ring, sums);
    else
      rows_band<false>(layout, from, rows, steps, ring, sums);
  }
  for (int64_t row = 0; row < count; row += kTileRows)
    for (int block = 0; block < kBand && band * kBand + block < blocks; block++) {
      const int height = row ? second : first;
      const float* of = sums + (row ? kBandSums : 0) + block * kLanes * height;
      for (int m = 0; m < height; m++)
        for (int lane = 0; lane < kLanes; lane++) turned[m * kLanes + lane] = of[lane * height + m];
      finish(turned, row, std::min<int64_t>(kTileRows, count - row), band * kBand + block);
    }
}

}  // namespace freight

#endif
