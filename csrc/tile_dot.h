// The product for 1 to 4 rows, by vectors, at the speed of memory and with the bits of tiles (tiles.h).
//
// Tiles would need a second pass over decoded weights, and with so few rows nearly all of their work is wasted.
#pragma once
#include <algorithm>

#include "mxfp4.h"
#include "packed.h"
#include "product.h"
#include "tiles.h"

#if FREIGHT_AMX

namespace freight {

constexpr int64_t kDotAhead = 8192;  // prefetch distance in bytes; into L2, which is faster than into L1

// Decoders of a piece of a block to float32: inputs 0, 1, 2, ... of 16 outputs. `block` is the distance of blocks in
// bytes, `step` the bytes of 32 inputs of a band.
struct DotE4M3 {
  static constexpr int inputs = 4, piece = kBand * kUnit, block = kUnit, step = kTileInputs / inputs * piece;
  E4M3Pair pairs;
  void decode(const uint8_t* from, int at, V16* out) const {
    __m512i two[2];
    pairs.decode(from + at * piece, 0, two);
    for (int i = 0; i < 4; i++) out[i] = half(two[i / 2], i % 2);
  }
};

struct DotBFloat16 {
  static constexpr int inputs = 2, piece = kBand * kUnit, block = kUnit, step = kTileInputs / inputs * piece;
  void decode(const uint8_t* from, int at, V16* out) const {
    const __m512i pairs = _mm512_load_si512(from + at * piece);
    out[0] = half(pairs, 0), out[1] = half(pairs, 1);
  }
};

struct DotMxfp4 {
  static constexpr int inputs = 8, piece = kUnit, block = kMxUnit, step = kBand * kMxUnit;
  MxFloats floats;
  void decode(const uint8_t* from, int at, V16* out) const {
    const __m512i words = floats.words(from, at);
    const __m512 scales = floats.scales(from);
    for (int i = 0; i < inputs; i++) out[i] = floats(_mm512_srli_epi32(words, 4 * i), scales);
  }
};

// sums[2][M] += the products of 32 inputs of a band with x[32][M].
template <class D, int M>
inline void dot_step(const D& decoder, const uint8_t* w, const float* x, V16 (*sums)[M]) {
  V16 even[kBand][M], odd[kBand][M];
  for (int j = 0; j < kBand; j++)
    for (int m = 0; m < M; m++) even[j][m] = odd[j][m] = V16{};
  for (int unit = 0; unit < kTileInputs / D::inputs; unit++, x += D::inputs * M) {
    for (int j = 0; j < kBand; j++) __builtin_prefetch(w + unit * D::piece + j * D::block + kDotAhead, 0, 2);
    for (int j = 0; j < kBand; j++) {
      V16 operand[D::inputs];
      decoder.decode(w + j * D::block, unit, operand);
      for (int i = 0; i < D::inputs; i += 2)
        for (int m = 0; m < M; m++) {
          even[j][m] = fma(operand[i], set16(x[i * M + m]), even[j][m]);
          odd[j][m] = fma(operand[i + 1], set16(x[(i + 1) * M + m]), odd[j][m]);
        }
    }
  }
  if constexpr (D::step % kUnit) __builtin_prefetch(w + D::step - 1 + kDotAhead, 0, 2);  // MXFP4: not aligned to lines
  for (int j = 0; j < kBand; j++)
    for (int m = 0; m < M; m++) sums[j][m] = sums[j][m] + (even[j][m] + odd[j][m]);
}

// Scales of a band's groups: of the weight, [groups], or null without scales; of x, [M][groups], or null for 1.
struct DotScales {
  const float *weight, *x;
  int64_t groups;
};

// out[2][M][16]: the sums of a band over `steps` times 32 inputs.
template <class D, int M>
__attribute__((noinline)) void dot_band(const D& tables, const uint8_t* w, const float* x, int64_t steps,
                                        const DotScales& scales, float* out) {
  const D decoder = tables;  // in registers
  V16 total[kBand][M], sums[kBand][M];
  for (int j = 0; j < kBand; j++)
    for (int m = 0; m < M; m++) total[j][m] = sums[j][m] = V16{};
  for (int64_t group = 0, step = 0; step < steps; group++) {
    const int64_t end = scales.weight ? std::min<int64_t>(step + kGroupSteps, steps) : steps;
    for (; step < end; step++) dot_step<D, M>(decoder, w + step * D::step, x + step * kTileInputs * M, sums);
    if (!scales.weight) break;
    for (int j = 0; j < kBand; j++)
      for (int m = 0; m < M; m++) {
        const float scale = scales.x ? scales.weight[group] * scales.x[m * scales.groups + group] : scales.weight[group];
        total[j][m] = fma(sums[j][m], set16(scale), total[j][m]);
        sums[j][m] = V16{};
      }
  }
  for (int j = 0; j < kBand; j++)
    for (int m = 0; m < M; m++) store(out + (j * M + m) * kLanes, scales.weight ? total[j][m] : sums[j][m]);
}

// Compute one band. x: [steps * 32][M]. Calls finish(sums[M][16], block) for its blocks of 16 outputs.
template <class D, int M, class Finish>
void dot_task(const D& decoder, const FreightWeight& weight, const float* x, const float* x_scale, int64_t band,
              const Finish& finish) {
  const int64_t steps = (weight.in_features + kTileInputs - 1) / kTileInputs;
  const int64_t groups = (weight.in_features + kGroup - 1) / kGroup;
  const int64_t blocks = blocks_of(weight.out_features);
  alignas(64) float sums[kBand * M * kLanes];
  const uint8_t* w = static_cast<const uint8_t*>(weight.data) + band * steps * D::step;
  const float* of_group = weight.block_scale ? weight.block_scale + band * kBand * kLanes / kGroup * groups : nullptr;
  {
    const SubnormalsAreZero scope;
    dot_band<D, M>(decoder, w, x, steps, {of_group, x_scale, groups}, sums);
  }
  for (int64_t j = 0; j < kBand && band * kBand + j < blocks; j++) finish(sums + j * M * kLanes, band * kBand + j);
}

}  // namespace freight

#endif
