// The matrix product: y = x @ weight.T, with scales and a bias, over packed weights.
//
// One order of summation for every number of rows: each output is summed over its inputs from first to last by one
// lane; under block scales each group of 128 inputs is summed so, then multiplied and added in order. What differs with
// the rows is only where operands wait: few rows decode weights in registers, as they stream by; many decode a panel of
// 128 outputs once, into the cache, and go over it tile by tile, their sums waiting in memory between panels.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <type_traits>
#include <vector>

#include "activations.h"
#include "packed.h"
#include "parallel.h"

namespace {

constexpr int kPanelBlocks = 8;     // blocks of 16 outputs in a panel; 128 outputs share their block scales
constexpr int kPanelSteps = 256;    // steps of a panel: with two blocks, 32 KiB
constexpr int64_t kChunkRows = 516; // rows that share a decoded panel: their x and their sums stay in L2
constexpr int64_t kStageRows = 1032;
constexpr int64_t kPrefetch = 2048;  // bytes ahead in each stream of weights

struct Call {
  const FreightWeight& weight;
  Staged staged;
  const float* bias;  // [out_features padded to 16], or null
  int32_t format;     // of y
  int64_t rows;
  char* y;
  int threads;

  int64_t blocks() const { return (weight.out_features + kLanes - 1) / kLanes; }
  int64_t value_bytes() const { return format == FREIGHT_FLOAT32 ? 4 : 2; }
};

#if FREIGHT_AVX512
constexpr int kTileBlocks = 2;
constexpr int blocks_for(int height) { return height <= 2 ? 8 : height <= 4 ? 4 : 2; }
#else
constexpr int kTileBlocks = 1;
constexpr int blocks_for(int height) { return height == 1 ? 4 : height == 2 ? 2 : 1; }
#endif

// Call f with the height as a compile-time number.
template <class F>
inline void with_height(int height, const F& f) {
  switch (height) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 4: return f(std::integral_constant<int, 4>());
    case 6: return f(std::integral_constant<int, 6>());
#if FREIGHT_AVX512
    case 8: return f(std::integral_constant<int, 8>());
    case 12: return f(std::integral_constant<int, 12>());
#endif
  }
}

// sums[NB][M][16] += the products of `units` units of NB streams of weights with M staged rows, in order.
template <class D, int M, int NB>
inline void accumulate(const D& decoder, const uint8_t* const* w, const typename D::Math::X* x, int64_t units,
                       float* sums) {
  using Math = typename D::Math;
  const D local = decoder;  // keeps its tables in registers
  V16 sum[NB][M];
  for (int j = 0; j < NB; j++)
    for (int m = 0; m < M; m++) sum[j][m] = load16(sums + (j * M + m) * kLanes);
  for (int64_t unit = 0; unit < units; unit++) {
    typename Math::Operand operand[NB][D::steps];
    for (int j = 0; j < NB; j++) {
      local.decode(w[j] + unit * kUnit, operand[j]);
      if (D::streams) __builtin_prefetch(w[j] + unit * kUnit + kPrefetch);
    }
    for (int s = 0; s < D::steps; s++, x += M)
      for (int m = 0; m < M; m++)
        for (int j = 0; j < NB; j++) sum[j][m] = Math::accumulate(sum[j][m], operand[j][s], x[m]);
  }
  for (int j = 0; j < NB; j++)
    for (int m = 0; m < M; m++) store16(sums + (j * M + m) * kLanes, sum[j][m]);
}

// Scales of groups of 128 inputs, for one tile; `units` is how many units make a group (0: no groups).
struct Groups {
  int64_t units = 0;
  const float* weight[8] = {};  // by block of the tile
  const float* x = nullptr;     // [M][stride], or null
  int64_t stride = 0;
  float factor = 1.f;  // of the decoder
};

template <class D, int M, int NB>
inline void tile(const D& decoder, const uint8_t* const* w, const typename D::Math::X* x, int64_t units,
                 const Groups& groups, float* sums) {
  if (!groups.units) return accumulate<D, M, NB>(decoder, w, x, units, sums);
  for (int64_t group = 0, first = 0; first < units; group++, first += groups.units) {
    alignas(64) float part[NB * M * kLanes] = {};
    const uint8_t* from[NB];
    for (int j = 0; j < NB; j++) from[j] = w[j] + first * kUnit;
    accumulate<D, M, NB>(decoder, from, x + first * D::steps * M, std::min(groups.units, units - first), part);
    for (int j = 0; j < NB; j++)
      for (int m = 0; m < M; m++) {
        float scale = groups.weight[j][group] * groups.factor;
        if (groups.x) scale *= groups.x[m * groups.stride + group];
        float* sum = sums + (j * M + m) * kLanes;
        store16(sum, madd16(load16(part + (j * M + m) * kLanes), splat16(scale), load16(sum)));
      }
  }
}

// Scales, bias and the one rounding of 16 outputs of `rows` rows; sums: [rows][16].
void finish(const Call& call, const float* sums, int64_t row, int64_t rows, int64_t block, float factor) {
  const int64_t first = block * kLanes;
  const int count = static_cast<int>(std::min<int64_t>(kLanes, call.weight.out_features - first));
  const bool scaled = call.weight.scale != nullptr;
  const V16 scale = scaled ? mul16(load16(call.weight.scale + first), splat16(factor)) : splat16(factor);
  const V16 bias = call.bias ? load16(call.bias + first) : zero16();
  for (int64_t m = 0; m < rows; m++) {
    V16 value = load16(sums + m * kLanes);
    if (call.staged.row_scale) value = mul16(value, splat16(call.staged.row_scale[row + m]));
    if (scaled || factor != 1.f) value = mul16(value, scale);
    if (call.bias) value = add16(value, bias);
    char* to = call.y + ((row + m) * call.weight.out_features + first) * call.value_bytes();
    store_as(to, value, call.format, count);
  }
}

template <class D>
struct Product {
  using Math = typename D::Math;
  using X = typename Math::X;
  const Call& call;
  D decoder;
  int64_t units = call.staged.steps / D::steps;
  int64_t group_units = call.weight.block_scale ? kGroup / (D::steps * Math::inputs) : 0;
  float factor = call.weight.block_scale ? 1.f : D::factor;  // left for the end

  const uint8_t* block_data(int64_t block) const {
    return static_cast<const uint8_t*>(call.weight.data) + block * units * kUnit;
  }

  // Group scales of a tile of `blocks` blocks from `block` on (beyond the last: the last), from group `group` on.
  Groups groups(int64_t block, int blocks, int64_t row, int64_t group, int64_t units_in_group) const {
    Groups out;
    if (!group_units) return out;
    const Staged& staged = call.staged;
    out.units = units_in_group, out.stride = staged.groups, out.factor = D::factor;
    for (int j = 0; j < blocks; j++) {
      const int64_t band = std::min(block + j, call.blocks() - 1) * kLanes / kGroup;
      out.weight[j] = call.weight.block_scale + band * staged.groups + group;
    }
    if (staged.group_scale) out.x = staged.group_scale + row * staged.groups + group;
    return out;
  }

  // One tile of rows: weights are decoded as they stream by.
  void few(int64_t rows) const {
    with_height(height_of(rows), [&](auto height) {
      constexpr int M = height, NB = blocks_for(M);
      const int64_t blocks = call.blocks();
      parallel_for((blocks + NB - 1) / NB, call.threads, [&](int64_t task) {
        const int64_t block = task * NB;
        const uint8_t* w[NB];
        for (int j = 0; j < NB; j++) w[j] = block_data(std::min(block + j, blocks - 1));
        alignas(64) float sums[NB * M * kLanes] = {};
        const X* x = static_cast<const X*>(call.staged.x);
        tile<D, M, NB>(decoder, w, x, units, groups(block, NB, 0, 0, group_units), sums);
        for (int j = 0; j < NB && block + j < blocks; j++)
          finish(call, sums + j * M * kLanes, 0, rows, block + j, factor);
      });
    });
  }

  // Rows first .. last-1 (a multiple of the tile's height at the start) with the 128 outputs of one panel.
  void panel(int64_t first, int64_t last, int64_t index) const {
    thread_local std::vector<V16> panel_memory, sums_memory;  // V16: for its alignment
    const int64_t block = index * kPanelBlocks, tiles = (last - first + kTileRows - 1) / kTileRows;
    const int blocks = static_cast<int>(std::min<int64_t>(kPanelBlocks, call.blocks() - block));
    constexpr int64_t panel_units = kPanelSteps / D::steps, tile_floats = kTileBlocks * kTileRows * kLanes;
    const int pairs = (blocks + kTileBlocks - 1) / kTileBlocks;
    panel_memory.resize(kPanelBlocks * kPanelSteps);
    sums_memory.assign(static_cast<size_t>(pairs * tiles * tile_floats / kLanes), zero16());
    uint8_t* decoded = reinterpret_cast<uint8_t*>(panel_memory.data());
    float* sums = reinterpret_cast<float*>(sums_memory.data());
    for (int64_t unit = 0; unit < units; unit += panel_units) {
      const int64_t there = std::min(panel_units, units - unit);
      for (int j = 0; j < blocks; j++) decode(block_data(block + j) + unit * kUnit, there, decoded + j * kPanelSteps * kUnit);
      for (int pair = 0; pair < pairs; pair++)
        for (int64_t t = 0; t < tiles; t++)
          panel_tile(first + t * kTileRows, last, block + pair * kTileBlocks, unit, there,
                     decoded + pair * kTileBlocks * kPanelSteps * kUnit, blocks - pair * kTileBlocks,
                     sums + (pair * tiles + t) * tile_floats);
    }
    for (int pair = 0; pair < pairs; pair++)
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t row = first + t * kTileRows, rows = std::min<int64_t>(kTileRows, last - row);
        for (int j = 0; j < kTileBlocks && pair * kTileBlocks + j < blocks; j++)
          finish(call, sums + (pair * tiles + t) * tile_floats + j * height_of(rows) * kLanes, row, rows,
                 block + pair * kTileBlocks + j, factor);
      }
  }

  void decode(const uint8_t* from, int64_t count, uint8_t* to) const {
    const D local = decoder;
    for (int64_t unit = 0; unit < count; unit++) {
      typename Math::Operand operand[D::steps];
      local.decode(from + unit * kUnit, operand);
      __builtin_prefetch(from + unit * kUnit + kPrefetch);
      for (int s = 0; s < D::steps; s++) Math::store(to + (unit * D::steps + s) * kUnit, operand[s]);
    }
  }

  void panel_tile(int64_t row, int64_t last, int64_t block, int64_t unit, int64_t count, const uint8_t* decoded,
                  int blocks, float* sums) const {
    with_height(height_of(last - row), [&](auto height) {
      constexpr int M = height;
      const uint8_t* w[kTileBlocks];
      for (int j = 0; j < kTileBlocks; j++) w[j] = decoded + std::min(j, blocks - 1) * kPanelSteps * kUnit;
      const X* x = static_cast<const X*>(call.staged.x) + row * call.staged.steps + unit * D::steps * M;
      const int64_t group = group_units ? unit / group_units : 0;
      tile<Decoded<Math>, M, kTileBlocks>(Decoded<Math>(), w, x, count * D::steps,
                                          groups(block, kTileBlocks, row, group, group_units * D::steps), sums);
    });
  }

  void many(int64_t rows) const {
    const int64_t panels = (call.blocks() + kPanelBlocks - 1) / kPanelBlocks;
    int64_t chunk = kChunkRows;
    while (panels * ((rows + chunk - 1) / chunk) < 4 * call.threads && chunk > 4 * kTileRows)
      chunk = (chunk / 2 + kTileRows - 1) / kTileRows * kTileRows;
    const int64_t chunks = (rows + chunk - 1) / chunk;
    parallel_for(chunks * panels, call.threads, [&](int64_t task) {
      const int64_t first = task / panels * chunk;
      panel(first, std::min(rows, first + chunk), task % panels);
    });
  }
};

template <class D>
void run(const FreightWeight& weight, const char* x, int32_t format, int64_t rows, const float* bias, char* y,
         int threads) {
  const int64_t inputs = D::steps * D::Math::inputs, units = (weight.in_features + inputs - 1) / inputs;
  const int64_t size = format == FREIGHT_FLOAT32 ? 4 : 2;
  for (int64_t first = 0; first < rows; first += kStageRows) {
    const int64_t count = std::min(kStageRows, rows - first);
    const Staged staged = stage(weight, x + first * weight.in_features * size, format, count, D::Math::inputs == 2,
                                units * D::steps, threads);
    const Call call{weight, staged, bias, format, count, y + first * weight.out_features * size, threads};
    const Product<D> product{call, D()};
    count <= kTileRows ? product.few(count) : product.many(count);
  }
}

}  // namespace

FREIGHT_API void freight_linear(const FreightWeight* weight, const void* x, int32_t x_format, int64_t rows,
                                const void* bias, void* y, int32_t threads) {
  thread_local std::vector<float> bias_values;
  if (bias) {
    const int64_t out = weight->out_features;
    bias_values.assign(static_cast<size_t>((out + kLanes - 1) / kLanes * kLanes), 0.f);
    for (int64_t i = 0; i < out; i++) {
      const uint16_t half = x_format == FREIGHT_FLOAT32 ? 0 : static_cast<const uint16_t*>(bias)[i];
      bias_values[static_cast<size_t>(i)] = x_format == FREIGHT_FLOAT32  ? static_cast<const float*>(bias)[i]
                                            : x_format == FREIGHT_FLOAT16 ? f16_to_float(half)
                                                                          : bf16_to_float(half);
    }
  }
  const float* b = bias ? bias_values.data() : nullptr;
  const char* from = static_cast<const char*>(x);
  char* to = static_cast<char*>(y);
#if FREIGHT_AVX512
  if (weight->activations != PLAIN || x_format == FREIGHT_BFLOAT16) {  // what goes in is bfloat16, without rounding
    if (weight->format == FREIGHT_E4M3FN) return run<E4M3Pair>(*weight, from, x_format, rows, b, to, threads);
    if (weight->format == FREIGHT_BFLOAT16) return run<BFloat16Pair>(*weight, from, x_format, rows, b, to, threads);
  }
#endif
  switch (weight->format) {
    case FREIGHT_E4M3FN: return run<E4M3>(*weight, from, x_format, rows, b, to, threads);
    case FREIGHT_BFLOAT16: return run<BFloat16>(*weight, from, x_format, rows, b, to, threads);
    case FREIGHT_FLOAT16: return run<Float16>(*weight, from, x_format, rows, b, to, threads);
    default: return run<Float32>(*weight, from, x_format, rows, b, to, threads);
  }
}
