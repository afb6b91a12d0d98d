// The matrix product: y = x @ weight.T, with scales and a bias, over packed weights.
//
// One order of summation for every number of rows: each output is summed over its inputs from first to last by one
// lane; under block scales each group of 128 inputs is summed so, then multiplied and added in order. Rows are taken in
// tiles, outputs in blocks; weights are decoded in registers as they stream by, once for every tile of rows, which costs
// next to nothing while the multipliers are busy. A task goes over all tiles of rows with its few blocks of weights: with
// few rows it reads them from memory once, with many again and again, then from L2.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "activations.h"
#include "packed.h"
#include "parallel.h"
#include "rows.h"
#include "status.h"
#include "tile_dot.h"
#include "tile_product.h"

namespace freight {
namespace {

constexpr int64_t kStageRows = 516;  // rows staged at once: what all cores read over and over, from L3
constexpr int64_t kPrefetch = 8192;  // bytes ahead in the streams of weights together, and so into the next task's

// Weights are read once, so prefetching them past the caches evicts nothing: 3 % faster on an AMD EPYC (Zen 4). Other
// processors wait for such lines: decoding FP8 takes 1.2 to 1.9 times as long on an Intel Xeon. kernels/cpu/tuning.py
// measures which this one is.
std::atomic<bool> non_temporal{false};

struct Call {
  const FreightWeight& weight;
  Staged staged;
  const float* bias;  // [out_features padded to 16], or null
  int32_t format;     // of y
  int64_t rows;
  void* y;
  int threads;

  int64_t blocks() const { return (weight.out_features + kLanes - 1) / kLanes; }
};

// Blocks of a tile, and how many of them are decoded before they are multiplied: what registers hold.
#if FREIGHT_AVX512
constexpr int blocks_for(int height) { return height <= 4 ? 4 : 2; }
constexpr int blocks_at_once(int height) { return height <= 2 ? 1 : blocks_for(height); }
#else
constexpr int blocks_for(int height) { return height == 1 ? 4 : height == 2 ? 2 : 1; }
constexpr int blocks_at_once(int) { return 1; }
#endif

// With M staged rows, in order over `units` units of NB blocks of weights: sums[NB][M][16] go on adding products; or,
// given scale[NB][M], the products' own sum is multiplied by that and added. `left` units from the first on the bands
// end; what is to be read after that lies (NB / kBand - 1) bands, of `band` bytes each, further on.
template <class D, int M, int NB>
inline void accumulate(const D& decoder, const uint8_t* const* w, const typename D::Math::X* x, int64_t units,
                       int64_t left, int64_t band, const float* scale, float* sums) {
  using Math = typename D::Math;
  const D local = decoder;  // keeps its tables in registers
  const bool past_caches = non_temporal.load(std::memory_order_relaxed);
  V16 sum[NB][M];
  for (int j = 0; j < NB; j++)
    for (int m = 0; m < M; m++) sum[j][m] = scale ? V16{} : load16(sums + (j * M + m) * kLanes);
  constexpr int blocks = std::min(blocks_at_once(M), NB);
  typename Math::Operand operand[blocks][D::at_once];
  constexpr int64_t ahead = NB > kBand ? kPrefetch * kBand / NB : kPrefetch;
  const int64_t end = left * kBand * kUnit, skipped = NB > kBand ? (NB / kBand - 1) * band : 0;
  for (int64_t unit = 0; unit < units; unit++, x += D::steps * M) {
    const int64_t at = unit * kBand * kUnit;
    const int64_t distance = at + ahead < end ? ahead : ahead + skipped;
    for (int j = 0; j < NB; j++) {  // how is a constant of the instruction
      if (past_caches)
        __builtin_prefetch(w[j] + at + distance, 0, 0);
      else
        __builtin_prefetch(w[j] + at + distance);
    }
    for (int first = 0; first < NB; first += blocks)
      for (int step = 0; step < D::steps; step += D::at_once) {
        for (int j = 0; j < blocks; j++) local.decode(w[first + j] + at, step, operand[j]);
        for (int i = 0; i < D::at_once; i++)
          for (int m = 0; m < M; m++)
            for (int j = 0; j < blocks; j++)
              sum[first + j][m] = Math::accumulate(sum[first + j][m], operand[j][i], x[(step + i) * M + m]);
      }
  }
  for (int j = 0; j < NB; j++)
    for (int m = 0; m < M; m++) {
      float* to = sums + (j * M + m) * kLanes;
      store(to, scale ? fma(sum[j][m], set16(scale[j * M + m]), load16(to)) : sum[j][m]);
    }
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
  const int64_t band = units * kBand * kUnit;
  if (!groups.units) return accumulate<D, M, NB>(decoder, w, x, units, units, band, nullptr, sums);
  for (int64_t group = 0, first = 0; first < units; group++, first += groups.units) {
    float scale[NB * M];
    const uint8_t* from[NB];
    for (int j = 0; j < NB; j++) {
      from[j] = w[j] + first * kBand * kUnit;
      const float of_weight = groups.weight[j][group] * groups.factor;
      for (int m = 0; m < M; m++)
        scale[j * M + m] = groups.x ? of_weight * groups.x[m * groups.stride + group] : of_weight;
    }
    const int64_t count = std::min(groups.units, units - first);
    accumulate<D, M, NB>(decoder, from, x + first * D::steps * M, count, units - first, band, scale, sums);
  }
}

// Scales, bias and the one rounding of 16 outputs of `rows` rows; sums: [rows][16].
void finish(const Call& call, const float* sums, int64_t row, int64_t rows, int64_t block, float factor) {
  const int64_t first = block * kLanes;
  const int count = static_cast<int>(std::min<int64_t>(kLanes, call.weight.out_features - first));
  const bool scaled = call.weight.scale != nullptr;
  const V16 scale = scaled ? load16(call.weight.scale + first) * set16(factor) : set16(factor);
  const V16 bias = call.bias ? load16(call.bias + first) : V16{};
  for (int64_t m = 0; m < rows; m++) {
    V16 value = load16(sums + m * kLanes);
    if (call.staged.row_scale) value = value * set16(call.staged.row_scale[row + m]);
    if (scaled || factor != 1.f) value = value * scale;
    if (call.bias) value = value + bias;
    const int64_t at = (row + m) * call.weight.out_features + first;
    store_as(element(call.y, at, call.format), value, call.format, count);
  }
}

template <class D>
struct Product {
  using Math = typename D::Math;
  using X = typename Math::X;
  const Call call;
  D decoder;
  int64_t units = call.staged.steps / D::steps;
  float factor = call.weight.block_scale ? 1.f : D::factor;  // left for the end

  const uint8_t* block_data(int64_t block) const {
    return static_cast<const uint8_t*>(call.weight.data) + block_offset(block, units);
  }

  // Group scales of a tile: `blocks` blocks from `block` on (beyond the last: the last), rows from `row` on.
  Groups groups(int64_t block, int blocks, int64_t row) const {
    Groups out;
    if (!call.weight.block_scale) return out;
    const Staged& staged = call.staged;
    out.units = kGroup / (D::steps * Math::inputs), out.stride = staged.groups, out.factor = D::factor;
    for (int j = 0; j < blocks; j++)
      out.weight[j] = call.weight.block_scale + std::min(block + j, call.blocks() - 1) * kLanes / kGroup * out.stride;
    if (staged.group_scale) out.x = staged.group_scale + row * out.stride;
    return out;
  }

  void compute() const {
    with_height(height_of(call.rows), [&](auto height) {
      constexpr int NB = blocks_for(height);
      parallel_for((call.blocks() + NB - 1) / NB, call.threads, [&](int64_t task) {
        for (int64_t row = 0; row < call.rows; row += kTileRows)
          with_height(height_of(call.rows - row), [&](auto own) {
            if constexpr (own <= height) one_tile<own, NB>(row, task * NB);
          });
      });
    });
  }

  template <int M, int NB>
  void one_tile(int64_t row, int64_t block) const {
    const int64_t rows = std::min<int64_t>(kTileRows, call.rows - row);
    const uint8_t* w[NB];
    for (int j = 0; j < NB; j++) w[j] = block_data(std::min(block + j, call.blocks() - 1));
    alignas(64) float sums[NB * M * kLanes] = {};
    const X* x = static_cast<const X*>(call.staged.x) + row * call.staged.steps;
    tile<D, M, NB>(decoder, w, x, units, groups(block, NB, row), sums);
    for (int j = 0; j < NB && block + j < call.blocks(); j++)
      finish(call, sums + j * M * kLanes, row, rows, block + j, factor);
  }
};

template <class D>
void run(const FreightWeight& weight, const void* x, int32_t format, int64_t rows, const float* bias, void* y,
         int threads) {
  const int64_t units = units_of(weight.format, weight.in_features);
  for (int64_t first = 0; first < rows; first += kStageRows) {
    const int64_t count = std::min(kStageRows, rows - first);
    const Staged staged = stage(weight, element(x, first * weight.in_features, format), format, count,
                                D::Math::inputs == 2, units * D::steps, threads);
    void* to = element(y, first * weight.out_features, format);
    Product<D>{{weight, staged, bias, format, count, to, threads}, {}}.compute();
  }
}

#if FREIGHT_AMX

// The same on tiles, or for few rows by vectors with the tiles' bits.
template <bool FP8>
void run_tiles(const FreightWeight& weight, const void* x, int32_t format, int64_t rows, const float* bias, void* y,
               int threads) {
  constexpr int64_t kMostRows = 512;  // at once: their sums, and a panel of theirs, stay in L2
  const int64_t parts = (rows + kMostRows - 1) / kMostRows;
  const int64_t part = parts ? ((rows + parts - 1) / parts + kTileLines - 1) / kTileLines * kTileLines : 0;
  for (int64_t first = 0; first < rows; first += part) {
    const int64_t count = std::min(part, rows - first);
    const void* from = element(x, first * weight.in_features, format);
    void* to = element(y, first * weight.out_features, format);
    if (count <= kDotRows) {
      const int64_t steps = (weight.in_features + kTileInputs - 1) / kTileInputs * kTileInputs;
      const Call call{weight, stage(weight, from, format, count, false, steps, threads), bias, format, count, to, threads};
      const float* values = static_cast<const float*>(call.staged.x);
      const auto finish_block = [&](const float* sums, int64_t block) { finish(call, sums, 0, count, block, 1.f); };
      using Decoder = std::conditional_t<FP8, DotE4M3, DotBFloat16>;
      with_height(height_of(count), [&](auto height) {
        if constexpr (height <= kDotRows)
          dot_product<Decoder, height>(weight, values, call.staged.group_scale, threads, finish_block);
      });
      continue;
    }
    const Call call{weight, stage_tiles(weight, from, format, count, threads), bias, format, count, to, threads};
    const TileJob job(weight, call.staged.x, call.staged.group_scale, count, threads);
    tile_product<FP8>(job, threads, [&](const float* sums, int64_t row, int64_t there, int64_t block) {
      finish(call, sums, row, there, block, 1.f);
    });
  }
}

#endif

void linear(const FreightLinear& a) {
  const FreightWeight& weight = *static_cast<const FreightWeight*>(a.weight);
  thread_local std::vector<float> bias_values;
  if (a.bias) {
    const int64_t out = weight.out_features;
    bias_values.resize(static_cast<size_t>(padded(out)));
    read_row(a.bias, a.format, out, bias_values.data());
  }
  const float* b = a.bias ? bias_values.data() : nullptr;
#if FREIGHT_AMX
  if (weight.activations != FREIGHT_PLAIN || a.format == FREIGHT_BFLOAT16) {  // bfloat16 without rounding
    if (weight.format == FREIGHT_E4M3FN) return run_tiles<true>(weight, a.x, a.format, a.rows, b, a.y, a.threads);
    if (weight.format == FREIGHT_BFLOAT16) return run_tiles<false>(weight, a.x, a.format, a.rows, b, a.y, a.threads);
  }
#elif FREIGHT_AVX512 || FREIGHT_NEON_BF16
  if (weight.activations != FREIGHT_PLAIN || a.format == FREIGHT_BFLOAT16) {  // bfloat16 without rounding
    if (weight.format == FREIGHT_E4M3FN) return run<E4M3Pair>(weight, a.x, a.format, a.rows, b, a.y, a.threads);
    if (weight.format == FREIGHT_BFLOAT16) return run<BFloat16Pair>(weight, a.x, a.format, a.rows, b, a.y, a.threads);
  }
#endif
  switch (weight.format) {
    case FREIGHT_E4M3FN: return run<E4M3>(weight, a.x, a.format, a.rows, b, a.y, a.threads);
    case FREIGHT_BFLOAT16: return run<BFloat16>(weight, a.x, a.format, a.rows, b, a.y, a.threads);
    case FREIGHT_FLOAT16: return run<Float16>(weight, a.x, a.format, a.rows, b, a.y, a.threads);
    default: return run<Float32>(weight, a.x, a.format, a.rows, b, a.y, a.threads);
  }
}

}  // namespace
}  // namespace freight

FREIGHT_API FreightStatus freight_linear(const FreightLinear* arguments) {
  return freight::status_of([&] { freight::linear(*arguments); });
}

FREIGHT_API void freight_set_prefetch(int32_t wanted) {
  freight::non_temporal.store(wanted != 0, std::memory_order_relaxed);
}

FREIGHT_API int32_t freight_evict(const void* data, int64_t bytes) {
#if defined(__x86_64__)
  for (int64_t i = 0; i < bytes; i += 64) _mm_clflush(static_cast<const char*>(data) + i);
  _mm_mfence();
  return 1;
#elif defined(__aarch64__)
  for (int64_t i = 0; i < bytes; i += 64) asm volatile("dc civac, %0" ::"r"(static_cast<const char*>(data) + i) : "memory");
  asm volatile("dsb ish" ::: "memory");
  return 1;
#else
  (void)data, (void)bytes;
  return 0;
#endif
}
