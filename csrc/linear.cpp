// The matrix product: y = x @ weight.T, with scales and a bias, over packed weights.
//
// There is one order of summation per build, for every number of rows. Vectors: one lane sums an output over its inputs
// from first to last, one input a step with `Single`, two with `Pair` (packed.h). AMX: 32 inputs a step, even and odd
// ones separately (tiles.h). With block scales each group of 128 inputs is summed in this order, then multiplied by its
// scale and added to the total, in order. Sums in INT8 are exact (int8.h). Rows are processed in
// tiles, outputs in blocks; weights are decoded in registers as they stream in, once for every tile of rows, which costs
// almost nothing while the multipliers are busy; but with AVX2, whose few registers hold small tiles, many rows have them
// decoded once, to L1 (`VectorTask::panels`).
// A task computes all tiles of rows with its few blocks of weights: with few rows it reads the weights once, from
// memory; with many it reads them repeatedly, from L2.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "four_bit.h"
#include "int8_group_tiles.h"
#include "mxfp4.h"
#include "packed.h"
#include "parallel.h"
#include "memory.h"
#include "product.h"
#include "ranks.h"
#include "rows.h"
#include "status.h"
#include "tile_dot.h"
#include "tile_few.h"
#include "tile_product.h"
#include "tile_rows.h"

namespace freight {
namespace {

constexpr int64_t kStageRows = 516;  // rows staged at a time, which all cores read repeatedly, from L3
constexpr int64_t kTileAlign = 16;   // rows of an AMX tile
constexpr int64_t kFewShared = 8;    // rows that each rank stages by itself: one turn less than to stage them together
constexpr int64_t kPrefetch = 6144;  // prefetch distance in bytes, over all streams of weights; reaches the next task's
constexpr int64_t kStream = 32;      // bands of a stream, if a task reads two streams

// Weights are read once, so prefetching them past the caches evicts nothing: 3 % faster on an AMD EPYC (Zen 4). Other
// processors wait for such lines: decoding FP8 takes 1.2 to 1.9 times as long on an Intel Xeon. kernels/cpu/tuning.py
// measures it on the processor at hand.
std::atomic<bool> non_temporal{false};

// Blocks of a tile, and how many of them are decoded before they are multiplied: as many as fit in registers.
#if FREIGHT_AVX512
constexpr int blocks_for(int height) { return height <= 4 ? 4 : 2; }
constexpr int blocks_at_once(int height) { return height <= 2 ? 1 : blocks_for(height); }
#else
constexpr int blocks_for(int height) { return height == 1 ? 4 : height == 2 ? 2 : 1; }
constexpr int blocks_at_once(int) { return 1; }
#endif

// Values of a weight that were decoded to float32 and are in L1.
struct Decoded : Float32 {};

template <class D>
constexpr bool kPrefetched = !std::is_same_v<D, Decoded>;

// Say whether weights are decoded once for all tiles of rows, not once for each, if these are more than kFewTiles.
// Decoding a unit of E4M3 takes about half as many operations as multiplying a tile of six rows by it.
constexpr int64_t kFewTiles = 2;
template <class D>
#if FREIGHT_AVX2
constexpr bool kDecodedOnce = std::is_same_v<D, E4M3> || std::is_same_v<D, BFloat16> || std::is_same_v<D, Float16>;
#else
constexpr bool kDecodedOnce = false;
#endif

// Multiply M staged rows, in order, by `units` units of NB blocks of weights. Without `scale` the products are added to
// sums[NB][M][16] one by one; with scale[NB][M] their sum is multiplied by it and then added.
template <class D, int M, int NB>
inline void accumulate(const D& decoder, const uint8_t* const* w, const typename D::Math::X* x, int64_t units,
                       const float* scale, float* sums) {
  using Math = typename D::Math;
  const D local = decoder;  // keeps its tables in registers
  const bool past_caches = non_temporal.load(std::memory_order_relaxed);
  V16 sum[NB][M];
  FREIGHT_UNROLL
  for (int j = 0; j < NB; j++)
    FREIGHT_UNROLL
    for (int m = 0; m < M; m++) sum[j][m] = scale ? V16{} : load16(sums + (j * M + m) * kLanes);
  constexpr int blocks = std::min(blocks_at_once(M), NB);
  typename Math::Operand operand[blocks][D::at_once];
  constexpr int64_t ahead = NB > kBand ? kPrefetch * kBand / NB : kPrefetch;
  constexpr int bytes = kUnitOf<D>;
  for (int64_t unit = 0; unit < units; unit++, x += D::steps * M) {
    const int64_t at = unit * kBand * bytes;
    for (int j = 0; j < NB; j++)  // two instructions, because the kind of prefetch is an immediate
      for (int line = 0; kPrefetched<D> && line < bytes; line += kUnit) {
        if (past_caches)
          __builtin_prefetch(w[j] + at + ahead + line, 0, 0);
        else
          __builtin_prefetch(w[j] + at + ahead + line);
      }
    FREIGHT_UNROLL
    for (int first = 0; first < NB; first += blocks)
      for (int step = 0; step < D::steps; step += D::at_once) {
        FREIGHT_UNROLL
        for (int j = 0; j < blocks; j++) local.decode(w[first + j] + at, step, operand[j]);
        FREIGHT_UNROLL
        for (int i = 0; i < D::at_once; i++)
          FREIGHT_UNROLL
          for (int m = 0; m < M; m++)
            FREIGHT_UNROLL
            for (int j = 0; j < blocks; j++)
              sum[first + j][m] = Math::accumulate(sum[first + j][m], operand[j][i], x[(step + i) * M + m]);
      }
  }
  FREIGHT_UNROLL
  for (int j = 0; j < NB; j++)
    FREIGHT_UNROLL
    for (int m = 0; m < M; m++) {
      float* to = sums + (j * M + m) * kLanes;
      store(to, scale ? fma(sum[j][m], set16(scale[j * M + m]), load16(to)) : sum[j][m]);
    }
}

// Scales of groups of 128 inputs, for one tile; `units` is the number of units of a group (0: no groups).
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
  if (!groups.units) return accumulate<D, M, NB>(decoder, w, x, units, nullptr, sums);
  for (int64_t group = 0, first = 0; first < units; group++, first += groups.units) {
    float scale[NB * M];
    const uint8_t* from[NB];
    for (int j = 0; j < NB; j++) {
      from[j] = w[j] + first * kBand * kUnitOf<D>;
      const float of_weight = groups.weight[j][group] * groups.factor;
      for (int m = 0; m < M; m++)
        scale[j * M + m] = groups.x ? of_weight * groups.x[m * groups.stride + group] : of_weight;
    }
    const int64_t count = std::min(groups.units, units - first);
    accumulate<D, M, NB>(decoder, from, x + first * D::steps * M, count, scale, sums);
  }
}

// 16 sums as float32. Those in INT8 are rounded here, to nearest, ties to even, before any scale multiplies them.
inline V16 sums_of(const float* sums, bool integers) {
  return integers ? of_int_sums(load16(sums)) : load16(sums);
}

// Apply scales and bias to 16 outputs of `rows` rows, and round them once, unless y is float32; sums: [rows][16].
void finish(const Product& call, int32_t format, const float* sums, int64_t row, int64_t rows, int64_t block,
            float factor) {
  const FreightWeight& weight = *call.weight;
  const int64_t first = block * kLanes;
  const int count = static_cast<int>(std::min<int64_t>(kLanes, weight.out_features - first));
  const bool scaled = weight.scale != nullptr, integers = weight.format == FREIGHT_INT8;
  const int32_t stored = call.wide ? FREIGHT_FLOAT32 : format;
  const V16 scale = scaled ? load16(weight.scale + first) * set16(factor) : set16(factor);
  const V16 bias = call.bias ? load16(call.bias + first) : V16{};
  for (int64_t m = 0; m < rows; m++) {
    V16 value = sums_of(sums + m * kLanes, integers);
    if (call.staged.row_scale) value = value * set16(call.staged.row_scale[row + m]);
    if (scaled || factor != 1.f) value = value * scale;
    if (call.bias) value = value + bias;
    store_as(element(call.y, (row + m) * call.y_stride + first, stored), value, stored, count);
  }
}

// Some blocks of a product, for all its rows: one task.
template <class D>
struct VectorTask {
  using Math = typename D::Math;
  using X = typename Math::X;
  const Product& call;
  const int32_t format;
  const D& decoder;
  const FreightWeight& weight = *call.weight;
  int64_t units = call.staged.steps / D::steps;
  float factor = weight.block_scale ? 1.f : D::factor;  // applied by `finish`

  const uint8_t* block_data(int64_t block) const {
    return static_cast<const uint8_t*>(weight.data) + block_offset(block, units, kUnitOf<D>);
  }

  // The blocks of a task. Blocks beyond one band come from a second stream of memory, `kStream` bands further on, so
  // that each stream continues in the thread's next task. Some may be beyond the last block.
  template <int NB>
  std::array<int64_t, NB> blocks(int64_t task) const {
    std::array<int64_t, NB> out;
    if constexpr (NB <= kBand) {
      for (int j = 0; j < NB; j++) out[j] = task * NB + j;
    } else {
      static_assert(NB == 2 * kBand);
      const int64_t first = task / kStream * kStream * 2, bands = bands_of(weight.out_features);
      const int64_t apart = std::min(kStream, (bands - first + 1) / 2);
      for (int j = 0; j < NB; j++) out[j] = (first + task % kStream + j / kBand * apart) * kBand + j % kBand;
    }
    return out;
  }

  // Group scales of a tile: its blocks `own` (the last one for those beyond it), and its rows from `row` on.
  template <size_t NB>
  Groups groups(const std::array<int64_t, NB>& own, int64_t row) const {
    Groups out;
    if (!weight.block_scale) return out;
    const Staged& staged = call.staged;
    out.units = kGroup / (D::steps * Math::inputs), out.stride = staged.groups, out.factor = D::factor;
    for (size_t j = 0; j < NB; j++)
      out.weight[j] = weight.block_scale + std::min(own[j], blocks_of(weight.out_features) - 1) * kLanes / kGroup * out.stride;
    if (staged.group_scale) out.x = staged.group_scale + row * out.stride;
    return out;
  }

  static bool in_panels(const Product& call) { return kDecodedOnce<D> && call.rows > kFewTiles * kTileRows; }

  static int64_t tasks(const Product& call) {
    int64_t tasks = 0;
    if (in_panels(call)) return bands_of(call.weight->out_features);
    with_height(height_of(call.rows), [&](auto height) {
      tasks = (blocks_of(call.weight->out_features) + blocks_for(height) - 1) / blocks_for(height);
    });
    return tasks;
  }

  void compute(int64_t task) const {
    if constexpr (kDecodedOnce<D>)
      if (in_panels(call)) return panels(task);
    with_height(height_of(call.rows), [&](auto height) {
      const auto blocks = this->template blocks<blocks_for(height)>(task);
      for (int64_t row = 0; row < call.rows; row += kTileRows)
        with_height(height_of(call.rows - row), [&](auto own) {
          if constexpr (own <= height) one_tile<own>(row, blocks);
        });
    });
  }

  template <int M, size_t NB>
  void one_tile(int64_t row, const std::array<int64_t, NB>& own) const {
    const int64_t rows = std::min<int64_t>(kTileRows, call.rows - row), last = blocks_of(weight.out_features) - 1;
    const uint8_t* w[NB];
    alignas(64) float sums[NB * M * kLanes] = {};
#if FREIGHT_VNNI
    if constexpr (std::is_same_v<D, Int8>) {
      const uint8_t* starts = static_cast<const uint8_t*>(weight.data) + bands_of(weight.out_features) * kBand * units * kUnit;
      for (size_t j = 0; j < NB; j++)
        for (int m = 0; m < M; m++)
          std::memcpy(sums + (j * M + m) * kLanes, starts + std::min(own[j], last) * kLanes * 4, kLanes * 4);
    }
#endif
    const X* x = static_cast<const X*>(call.staged.x) + row * call.staged.steps;
    if constexpr (std::is_base_of_v<InGroups, D>) {
      const FourBit layout = four_bit(weight.format);
      const int64_t count = units * kFourInputs / layout.inputs;
      int sides[NB];
      for (size_t j = 0; j < NB; j++) {
        const int64_t block = std::min(own[j], last);
        w[j] = static_cast<const uint8_t*>(weight.data) + block / kBand * count * layout.bytes;
        sides[j] = static_cast<int>(block % kBand);
      }
      constexpr int64_t ahead = NB > kBand ? kPrefetch * kBand / NB : kPrefetch;
      multiply_groups<D, M, NB, std::min<int>(blocks_at_once(M), NB)>(
          decoder, layout, w, sides, x, count, non_temporal.load(std::memory_order_relaxed), ahead, sums);
    } else {
      for (size_t j = 0; j < NB; j++) w[j] = block_data(std::min(own[j], last));
      tile<D, M, NB>(decoder, w, x, units, groups(own, row), sums);
    }
    for (size_t j = 0; j < NB; j++)
      if (own[j] <= last) finish(call, format, sums + j * M * kLanes, row, rows, own[j], factor);
  }

  // A band for more rows than a tile has. Panels of kGroup inputs are decoded, and multiplied by all tiles of rows. The
  // order of the sums is that of `one_tile`.
  void panels(int64_t band) const {
    static_assert(kStageRows % kTileRows == 0 && kStageRows >= kMostTileRows);
    constexpr int64_t of_panel = kGroup / D::steps, of_tile = kTileRows * kLanes;
    alignas(64) float values[kGroup * kBand * kLanes], sums[kBand * kStageRows * kLanes];
    const int64_t tiles = (call.rows + kTileRows - 1) / kTileRows;
    std::memset(sums, 0, static_cast<size_t>(tiles * kBand * of_tile) * sizeof(float));
    for (int64_t first = 0; first < units; first += of_panel) {
      const int64_t count = std::min(of_panel, units - first);
      decode(block_data(band * kBand) + first * kBand * kUnit, count, values);
      for (int64_t row = 0; row < call.rows; row += kTileRows)
        with_height(height_of(call.rows - row), [&](auto height) {
          multiply_panel<height>(values, band, row, first * D::steps, count * D::steps, sums + kBand * row * kLanes);
        });
    }
    for (int64_t row = 0; row < call.rows; row += kTileRows) {
      const int64_t rows = std::min<int64_t>(kTileRows, call.rows - row);
      for (int64_t side = 0, block = band * kBand; side < kBand && block * kLanes < weight.out_features; side++, block++)
        finish(call, format, sums + kBand * row * kLanes + side * of_tile, row, rows, block, factor);
    }
  }

  // Decode `count` units of both blocks to [inputs][kBand][16], the layout of a weight in float32.
  void decode(const uint8_t* from, int64_t count, float* to) const {
    const D local = decoder;
    constexpr int64_t next = kGroup / D::steps * kBand * kUnit;  // the next panel
    for (int64_t i = 0; i < count; i++, from += kBand * kUnit, to += D::steps * kBand * kLanes)
      FREIGHT_UNROLL
      for (int side = 0; side < kBand; side++) {
        __builtin_prefetch(from + side * kUnit + next);
        for (int step = 0; step < D::steps; step += D::at_once) {
          V16 out[D::at_once];
          local.decode(from + side * kUnit, step, out);
          for (int j = 0; j < D::at_once; j++) store(to + ((step + j) * kBand + side) * kLanes, out[j]);
        }
      }
  }

  // Multiply a tile of M rows by a panel: `count` inputs from `first` on. sums: [kBand][kTileRows][16].
  template <int M>
  void multiply_panel(const float* values, int64_t band, int64_t row, int64_t first, int64_t count,
                      float* sums) const {
    const float* x = static_cast<const float*>(call.staged.x) + row * call.staged.steps + first * M;
    for (int side = 0; side < kBand; side++) {
      Groups own = groups(std::array<int64_t, 1>{band * kBand + side}, row);
      if (own.units) own.units = kGroup, own.weight[0] += first / kGroup;
      if (own.x) own.x += first / kGroup;
      const uint8_t* w = reinterpret_cast<const uint8_t*>(values + side * kLanes);
      tile<Decoded, M, 1>(Decoded{}, &w, x, count, own, sums + side * kTileRows * kLanes);
    }
  }
};

template <class D>
void by_vectors(const Product* products, int64_t count, int32_t format, int threads) {
  const D decoder{};
  for_each_task(
      count, threads, [&](int64_t i) { return VectorTask<D>::tasks(products[i]); },
      [&](int64_t i, int64_t task) { VectorTask<D>{products[i], format, decoder}.compute(task); });
}

// Products with weights in 4 bits with scales of groups.
template <class Codes>
void by_vectors_of_groups(const Product* products, int64_t count, int32_t format, int threads) {
#if FREIGHT_AMX  // for float32 and float16
#elif FREIGHT_AVX512 || FREIGHT_NEON_BF16
  if (format == FREIGHT_BFLOAT16) return by_vectors<FourBitPair<Codes>>(products, count, format, threads);
#else
  if (format == FREIGHT_BFLOAT16)
    return by_vectors<FourBitSingle<Codes, Codes::rounds>>(products, count, format, threads);
#endif
  by_vectors<FourBitSingle<Codes>>(products, count, format, threads);
}

// Products with inputs in INT8 by group: a band of outputs, for all rows, is a task.
template <class Kind>
struct IntegerTask {
  const Product& call;
  const int32_t format;
  const FreightWeight& weight = *call.weight;

  void compute(int64_t band) const {
    for (int64_t row = 0; row < call.rows; row += kTileRows)
      with_height(height_of(call.rows - row), [&](auto height) { tile<height>(row, band); });
  }

  template <int M>
  void tile(int64_t row, int64_t band) const {
    const FourBit layout = four_bit(weight.format);
    const int64_t pieces = units_of(weight.format, weight.in_features);
    const uint8_t* from = static_cast<const uint8_t*>(weight.data) + band * pieces * layout.bytes;
    const uint32_t* x = static_cast<const uint32_t*>(call.staged.x) + row * call.staged.steps;
    const int64_t rows = std::min<int64_t>(kTileRows, call.rows - row);
    alignas(64) float sums[kBand * M * kLanes] = {};
    multiply_integers<Kind, M>(layout, from, x, pieces, non_temporal.load(std::memory_order_relaxed), kPrefetch, sums);
    for (int64_t side = 0, block = band * kBand; side < kBand && block * kLanes < weight.out_features; side++, block++)
      finish(call, format, sums + side * M * kLanes, row, rows, block, 1.f);
  }
};

template <class Kind>
void by_integers(const Product* products, int64_t count, int32_t format, int threads) {
  for_each_task(
      count, threads, [&](int64_t i) { return bands_of(products[i].weight->out_features); },
      [&](int64_t i, int64_t band) {
#if FREIGHT_AMX
        const Product& call = products[i];
        if (layout_of(*call.weight, format, call.rows) == Layout::kIntegerTiles)
          return group_tile_task<Kind>(call, band, [&](const float* sums, int64_t row, int64_t rows, int64_t block) {
            finish(call, format, sums, row, rows, block, 1.f);
          });
#endif
        IntegerTask<Kind>{products[i], format}.compute(band);
      });
}

#if FREIGHT_AMX

// Consumer of the sums of tiles: calls `finish`, by blocks or by bands.
struct Finish {
  const Product& call;
  const int32_t format;

  void operator()(const float* sums, int64_t row, int64_t rows, int64_t block) const {
    finish(call, format, sums, row, rows, block, 1.f);
  }

  // Finish the band that begins with `block`: sums[rows][16] of each of its two blocks, `apart` floats apart. In
  // bfloat16 a row of both blocks is as long as a cache line, and is written together; by blocks each line would be
  // written twice.
  void band(const float* sums, int64_t apart, int64_t row, int64_t rows, int64_t block) const {
    const FreightWeight& weight = *call.weight;
    const int64_t out = weight.out_features, first = block * kLanes;
    const bool whole = first + kBand * kLanes <= out;
    if (format == FREIGHT_BFLOAT16 && !call.wide && whole) return lines(sums, apart, row, rows, first);
    for (int64_t j = 0; j < kBand && first + j * kLanes < out; j++) (*this)(sums + j * apart, row, rows, block + j);
  }

 private:
  // `finish` of two blocks in bfloat16, from output `first` on.
  void lines(const float* sums, int64_t apart, int64_t row, int64_t rows, int64_t first) const {
    const FreightWeight& weight = *call.weight;
    const float* row_scale = call.staged.row_scale;
    const bool integers = weight.format == FREIGHT_INT8;
    V16 scale[kBand], bias[kBand];
    for (int j = 0; j < kBand; j++) {
      scale[j] = weight.scale ? load16(weight.scale + first + j * kLanes) : set16(1.f);
      bias[j] = call.bias ? load16(call.bias + first + j * kLanes) : V16{};
    }
    for (int64_t m = 0; m < rows; m++)
      for (int j = 0; j < kBand; j++) {
        V16 value = sums_of(sums + j * apart + m * kLanes, integers);
        if (row_scale) value = value * set16(row_scale[row + m]);
        if (weight.scale) value = value * scale[j];
        if (call.bias) value = value + bias[j];
        const int64_t at = (row + m) * call.y_stride + first + j * kLanes;
        store_as<FREIGHT_BFLOAT16>(element(call.y, at, FREIGHT_BFLOAT16), value);
      }
  }
};

// Products on AMX tiles, or for few rows by vectors with the bits of the tiles.
template <int32_t FORMAT>
void by_tiles(const Product* products, int64_t count, int32_t format, int threads) {
  using Decoder = std::conditional_t<FORMAT == FREIGHT_E4M3FN, DotE4M3,
                                     std::conditional_t<FORMAT == FREIGHT_MXFP4, DotMxfp4, DotBFloat16>>;
  const Decoder decoder;  // built before SubnormalsAreZero applies, like tile_decoder
  const TileDecoder<FORMAT> tile_decoder;
  const int share = std::max(1, static_cast<int>(threads / count));  // threads for one product
  const auto job_of = [&](const Product& call) {
    return TileJob(*call.weight, call.staged.x, call.staged.group_scale, call.rows, share);
  };
  for_each_task(
      count, threads,
      [&](int64_t i) {
        const Product& call = products[i];
        return call.rows <= kDotRows ? bands_of(call.weight->out_features) : job_of(call).tasks();
      },
      [&](int64_t i, int64_t task) {
        const Product& call = products[i];
        if (call.rows > kDotRows) {
          const Finish finished{call, format};
          if constexpr (FORMAT == FREIGHT_E4M3FN)
            if (call.rows <= kFewRows) return few_task<FORMAT>(job_of(call), tile_decoder, task, finished);
          return tile_task<FORMAT>(job_of(call), tile_decoder, task, finished);
        }
        with_height(height_of(call.rows), [&](auto height) {
          if constexpr (height <= kDotRows)
            dot_task<Decoder, height>(
                decoder, *call.weight, static_cast<const float*>(call.staged.x), call.staged.group_scale, task,
                [&](const float* sums, int64_t block) { finish(call, format, sums, 0, call.rows, block, 1.f); });
        });
      });
}

// Products on tiles, with any number of rows, with weights in 4 bits with scales of groups. Decoding to bfloat16 takes
// fewer instructions than decoding and multiplying float32, so few rows too are on tiles.
template <int32_t FORMAT>
void by_tiles_of_groups(const Product* products, int64_t count, int32_t format, int threads) {
  TileDecoder<FORMAT> decoder;
  decoder.layout = four_bit(products->weight->format);
  const int share = std::max(1, static_cast<int>(threads / count));
  const auto job_of = [&](const Product& call) {
    return TileJob(*call.weight, call.staged.x, nullptr, call.rows, share);
  };
  for_each_task(
      count, threads,
      [&](int64_t i) {
        const TileJob job = job_of(products[i]);
        return job.rows <= kFewRows ? job.all_bands() : job.tasks();
      },
      [&](int64_t i, int64_t task) {
        const Finish finished{products[i], format};
        const Product& call = products[i];
        if (call.rows <= kMostByRows)
          return rows_task(*call.weight, static_cast<const uint32_t*>(call.staged.x), call.staged.steps, call.rows,
                           task, finished);
        const TileJob job = job_of(call);
        if (job.rows <= kFewRows) return few_task<FORMAT>(job, decoder, task, finished);
        tile_task<FORMAT>(job, decoder, task, finished);
      });
}

// Products in INT8: on AMX tiles, or by vectors for few rows.
void int8_by_tiles(const Product* products, int64_t count, int32_t format, int threads) {
  const Int8 decoder;
  const TileDecoder<FREIGHT_INT8> none;
  const int share = std::max(1, static_cast<int>(threads / count));
  const auto job_of = [&](const Product& call) { return TileJob(*call.weight, call.staged.x, nullptr, call.rows, share); };
  for_each_task(
      count, threads,
      [&](int64_t i) {
        const Product& call = products[i];
        return call.rows <= kInt8DotRows ? VectorTask<Int8>::tasks(call) : job_of(call).tasks();
      },
      [&](int64_t i, int64_t task) {
        const Product& call = products[i];
        if (call.rows <= kInt8DotRows) return VectorTask<Int8>{call, format, decoder}.compute(task);
        tile_task<FREIGHT_INT8>(job_of(call), none, task, Finish{call, format});
      });
}

#endif

// Bias in `format` as float32, of the calling thread; null without a bias.
const float* bias_values(const void* bias, const FreightWeight& weight, int32_t format) {
  if (!bias) return nullptr;
  thread_local std::vector<float> values;
  values.resize(static_cast<size_t>(padded(weight.out_features)));
  read_row(bias, format, weight.out_features, values.data());
  return values.data();
}

// How many of `rows` rows are staged and multiplied at a time.
int64_t rows_at_once(const FreightWeight& weight, int32_t format, int64_t rows) {
  if (layout_of(weight, format, rows) != Layout::kTiles) return kStageRows;
  const int64_t parts = (rows + kMostTileRows - 1) / kMostTileRows;  // in parts of about the same size
  return ((rows + parts - 1) / parts + kTileAlign - 1) / kTileAlign * kTileAlign;
}

void linear(const FreightLinear& a) {
  const FreightWeight& weight = *static_cast<const FreightWeight*>(a.weight);
  const float* bias = bias_values(a.bias, weight, a.format);
  const int64_t most = rows_at_once(weight, a.format, a.rows);
  for (int64_t first = 0; first < a.rows; first += most) {
    Product call{&weight, element(a.x, first * weight.in_features, a.format), nullptr, std::min(most, a.rows - first)};
    call.bias = bias;
    call.wide = a.wide != 0;
    call.y = element(a.y, first * weight.out_features, call.wide ? FREIGHT_FLOAT32 : a.format);
    stage_one(call, a.format, a.threads);
    multiply(&call, 1, a.format, a.threads);
  }
}

// The product of some rows, whose inputs and outputs are on all ranks.
struct SharedProduct {
  const FreightSharedLinear& a;
  const FreightRanks& ranks = *static_cast<const FreightRanks*>(a.ranks);
  const FreightWeight& weight = *static_cast<const FreightWeight*>(a.weight);
  const int64_t own = a.whole ? weight.in_features : weight.in_features / ranks.size;
  const int64_t row_bytes = weight.out_features * bytes_of(a.format);

  FreightStatus compute(int64_t first, int64_t rows, const float* bias) const {
    thread_local WorkingMemory inputs;
    Product call{&weight, element(a.x, first * own, a.format), nullptr, rows, bias};
    if (!a.whole && rows > kFewShared && staged_by_all(weight, ranks, a.format, rows)) {
      if (const FreightStatus status = stage_own(call, ranks, a.format, a.threads)) return status;
    } else {
      if (!a.whole) {
        void* all = inputs.of(rows * weight.in_features * bytes_of(a.format));
        if (const FreightStatus status = gather(call.x, all, rows, own * bytes_of(a.format))) return status;
        call.x = all;
      }
      stage_one(call, a.format, a.threads);
    }
    return outputs(call, element(a.y, first * weight.out_features * ranks.size, a.format));
  }

 private:
  FreightStatus gather(const void* part, void* out, int64_t rows, int64_t part_bytes) const {
    const FreightGather gathered{&ranks, part, out, rows, part_bytes, -1, a.threads};
    return freight_gather(&gathered);
  }

  // Multiply, into the memory that the other ranks read if the result fits there.
  FreightStatus outputs(Product& call, char* out) const {
    if (ranks.exchange || call.rows * row_bytes > ranks.capacity) {
      thread_local WorkingMemory own_outputs;
      call.y = own_outputs.of(call.rows * row_bytes);
      multiply(&call, 1, a.format, a.threads);
      return gather(call.y, out, call.rows, row_bytes);
    }
    const Turn turn(ranks);
    if (const FreightStatus status = turn.begin()) return status;
    call.y = turn.part(ranks.rank);
    multiply(&call, 1, a.format, a.threads);
    turn.arrive();
    return turn.read(reinterpret_cast<uint8_t*>(out), call.rows, row_bytes, row_bytes, a.threads);
  }
};

FreightStatus shared_linear(const FreightSharedLinear& a) {
  const SharedProduct product{a};
  const float* bias = bias_values(a.bias, product.weight, a.format);
  const int64_t most = rows_at_once(product.weight, a.format, a.rows);
  for (int64_t first = 0; first < a.rows; first += most)
    if (const FreightStatus status = product.compute(first, std::min(most, a.rows - first), bias)) return status;
  return FREIGHT_OK;
}

}  // namespace

void multiply(const Product* products, int64_t count, int32_t format, int threads) {
  if (count == 0) return;
  const FreightWeight& weight = *products->weight;
  if (has_integers(weight.format)) {
    const int32_t stored = weight.format & ~FREIGHT_INTEGERS;
    if (stored & FREIGHT_BLOCKS)
      return with_blocks(weight.format, [&](auto kind) { by_integers<decltype(kind)>(products, count, format, threads); });
    if (stored & FREIGHT_BYTES) return by_integers<Int8Groups>(products, count, format, threads);
    if (stored == FREIGHT_MXFP4) return by_integers<Mxfp4Groups>(products, count, format, threads);
    if (stored == FREIGHT_NVFP4) return by_integers<Nvfp4Groups>(products, count, format, threads);
    return by_integers<Int4Groups>(products, count, format, threads);
  }
#if FREIGHT_AMX
  if (weight.format == FREIGHT_INT8) return int8_by_tiles(products, count, format, threads);
  if (exact_in_bfloat16(weight, format)) {
    if (weight.format == FREIGHT_NVFP4) return by_tiles_of_groups<FREIGHT_NVFP4>(products, count, format, threads);
    if (in_groups(weight.format)) return by_tiles_of_groups<FREIGHT_INT4>(products, count, format, threads);
    if (weight.format == FREIGHT_E4M3FN) return by_tiles<FREIGHT_E4M3FN>(products, count, format, threads);
    if (weight.format == FREIGHT_MXFP4) return by_tiles<FREIGHT_MXFP4>(products, count, format, threads);
    return by_tiles<FREIGHT_BFLOAT16>(products, count, format, threads);
  }
#endif
  if (weight.format == FREIGHT_NVFP4) return by_vectors_of_groups<Nvfp4>(products, count, format, threads);
  if (in_groups(weight.format)) return by_vectors_of_groups<Int4>(products, count, format, threads);
#if !FREIGHT_AMX && (FREIGHT_AVX512 || FREIGHT_NEON_BF16)
  if (exact_in_bfloat16(weight, format)) {
    if (weight.format == FREIGHT_E4M3FN) return by_vectors<E4M3Pair>(products, count, format, threads);
    if (weight.format == FREIGHT_MXFP4) return by_vectors<Mxfp4Pair>(products, count, format, threads);
    return by_vectors<BFloat16Pair>(products, count, format, threads);
  }
#endif
  switch (weight.format) {
    case FREIGHT_E4M3FN: return by_vectors<E4M3>(products, count, format, threads);
    case FREIGHT_BFLOAT16: return by_vectors<BFloat16>(products, count, format, threads);
    case FREIGHT_MXFP4: return by_vectors<Mxfp4>(products, count, format, threads);
    case FREIGHT_INT8: return by_vectors<Int8>(products, count, format, threads);
    case FREIGHT_FLOAT16: return by_vectors<Float16>(products, count, format, threads);
    default: return by_vectors<Float32>(products, count, format, threads);
  }
}

}  // namespace freight

FREIGHT_API FreightStatus freight_linear(const FreightLinear* arguments) {
  return freight::status_of([&] { freight::linear(*arguments); });
}

FREIGHT_API FreightStatus freight_shared_linear(const FreightSharedLinear* arguments) {
  FreightStatus status = FREIGHT_OK;
  const FreightStatus thrown = freight::status_of([&] { status = freight::shared_linear(*arguments); });
  return status ? status : thrown;
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
