// The product of FP8 weights on tiles (tiles.h) for 5 to 32 rows: an expert's rows of a prompt, or a decode batch. And of
// weights in INT4 and NVFP4 for 25 to 32 (tile_rows.h has fewer).
//
// With so few rows, decoding weights takes as long as multiplying them. So the decoder's tables stay in registers, the
// decoding of a later step is interleaved with each step of the tiles, sums stay in tiles from the first input to the
// last, and the second tile of rows has only as many rows as exist. The bits are those of tile_product.h.
#pragma once
#include <algorithm>

#include "memory.h"
#include "packed.h"
#include "tile_product.h"
#include "tiles.h"

#if FREIGHT_AMX

namespace freight {

constexpr int64_t kFewRows = 2 * kTileLines;
constexpr int kFewAhead = kGroupSteps;   // steps from the decoding of weights to their multiplication
constexpr int kFewRing = 2 * kFewAhead;  // decoded steps in memory: a power of two

// 32 inputs of a band -> bfloat16; `step` of the steps from `from` on. Steps are decoded in order.
FREIGHT_INLINE void decode_step(const E4M3Pair& decoder, const uint8_t* from, int64_t step, uint8_t* to) {
  from += step * (kStepBytes / 2);
  for (int unit = 0; unit < kStepBytes / 2 / kUnit; unit++, from += kUnit) {
    __builtin_prefetch(from + kTileAhead, 0, 2);  // into L2, which is faster than into L1
    __m512i lines[2];
    decoder.decode(from, 0, lines);
    uint8_t* line = to + (unit / kBand * 2 * kBand + unit % kBand) * kUnit;
    _mm512_store_si512(line, lines[0]);
    _mm512_store_si512(line + kBand * kUnit, lines[1]);
  }
}

template <class Codes>
FREIGHT_INLINE void decode_step(GroupTiles<Codes>& decoder, const uint8_t* from, int64_t step, uint8_t* to) {
  const int64_t group = step / decoder.steps(), at = step % decoder.steps();
  decoder.begin(from + group * decoder.layout.bytes, static_cast<int>(at));
  FREIGHT_UNROLL
  for (int piece = 0; piece < kStepPieces; piece++) decoder.piece(piece, to);
}

// Tiles 0 and 1 hold a band's sums of the first 16 rows, 2 and 3 those of the others.
template <int ROW_TILES>
FREIGHT_INLINE void zero_tiles() {
  memory_barrier();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (ROW_TILES == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <int ROW_TILES>
FREIGHT_INLINE void store_tiles(float* to) {
  constexpr int kSums = kTileLines * kLanes;
  memory_barrier();
  _tile_stored(0, to, kTileRowBytes);
  _tile_stored(1, to + kSums, kTileRowBytes);
  if constexpr (ROW_TILES == 2) {
    _tile_stored(2, to + 2 * kSums, kTileRowBytes);
    _tile_stored(3, to + 3 * kSums, kTileRowBytes);
  }
  memory_barrier();
}

// Compute one band on one thread: sums[kSquare]. `ring` is memory for kFewRing steps.
template <int ROW_TILES, int32_t FORMAT>
__attribute__((noinline)) void few_band(const TileJob& job, const TileDecoder<FORMAT>& tables, int64_t band,
                                        uint8_t* ring, float* sums) {
  TileDecoder<FORMAT> decoder = tables;  // in registers
  const int64_t steps = job.steps();
  const uint8_t* from = static_cast<const uint8_t*>(job.weight.data) + band * stored_bytes<FORMAT>(decoder, steps);
  const auto place = [&](int64_t step) { return ring + step % kFewRing * kStepBytes; };
  const auto decode = [&](int64_t step) { decode_step(decoder, from, step, place(step)); };
  for (int64_t step = 0; step < std::min<int64_t>(kFewAhead, steps); step++) decode(step);
  zero_tiles<ROW_TILES>();
  if (job.weight.block_scale) std::fill(sums, sums + kSquare, 0.f);
  for (int64_t step = 0; step < steps; step++) {
    const uint8_t* a = job.x + (step / kGroupSteps * ROW_TILES * kGroupSteps + step % kGroupSteps) * kTileBytes;
    const uint8_t* b = place(step);
    memory_barrier();
    _tile_loadd(4, a, kTileRowBytes);
    _tile_loadd(6, b, kBand * kUnit);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + kUnit, kBand * kUnit);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (ROW_TILES == 2) {
      _tile_loadd(5, a + kGroupSteps * kTileBytes, kTileRowBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    memory_barrier();
    if (step + kFewAhead < steps) decode(step + kFewAhead);
    if (!job.weight.block_scale || ((step + 1) % kGroupSteps && step + 1 < steps)) continue;
    alignas(64) float group[kSquare];
    store_tiles<ROW_TILES>(group);
    const int64_t groups = job.panels(), at = step / kGroupSteps;
    add_scaled(group, job.rows, job.weight.block_scale[band * kBand * kLanes / kGroup * groups + at],
               job.x_scale ? job.x_scale + at : nullptr, groups, sums);
    zero_tiles<ROW_TILES>();
  }
  if (!job.weight.block_scale) store_tiles<ROW_TILES>(sums);
}

// `tile_task` for at most kFewRows rows; a task is a band.
template <int32_t FORMAT, class Finish>
void few_task(const TileJob& job, const TileDecoder<FORMAT>& decoder, int64_t band, const Finish& finish) {
  thread_local WorkingMemory memory;
  constexpr int64_t ring = kFewRing * kStepBytes;
  uint8_t* at = memory.of(ring + kSquare * 4);
  float* sums = reinterpret_cast<float*>(at + ring);
  const int first = static_cast<int>(std::min<int64_t>(job.rows, kTileLines)), second = static_cast<int>(job.rows) - first;
  {
    const SubnormalsAreZero subnormals;
    TileRegisters tiles;
    tiles.set_rows(first, second);
    if (second)
      few_band<2, FORMAT>(job, decoder, band, at, sums);
    else
      few_band<1, FORMAT>(job, decoder, band, at, sums);
  }
  const int64_t blocks = blocks_of(job.weight.out_features);
  for (int64_t row = 0; row < job.rows; row += kTileLines)
    for (int64_t block = band * kBand; block < std::min((band + 1) * kBand, blocks); block++)
      finish(sums + (row / kTileLines * kBand + block % kBand) * kTileLines * kLanes, row, row ? second : first, block);
}

}  // namespace freight

#endif
