// Products over packed weights: one of freight_linear, or one per expert or head, with tasks shared by all threads.
#pragma once
#include <algorithm>
#include <vector>

#include "activations.h"
#include "parallel.h"

namespace freight {

constexpr int kDotRows = 4;              // with AMX: more rows than this are multiplied on tiles
constexpr int kInt8DotRows = 4;          // likewise, in INT8
constexpr int64_t kMostByRows = 2 * kTileRows;  // with AMX: rows of a product that has weights by rows (tile_rows.h)
constexpr int64_t kMostTileRows = 512;  // rows of a product on tiles: their sums and one panel of them stay in L2

// y = x @ weight.T + bias, for some rows.
struct Product {
  const FreightWeight* weight;
  const void* x = nullptr;         // [.., in_features], rows at multiples of x_stride
  const int32_t* index = nullptr;  // [rows]: the rows of x; null: its first `rows`
  int64_t rows = 0;
  const float* bias = nullptr;  // [out_features padded to 16], or null
  void* y = nullptr;            // [rows, out_features], rows at multiples of y_stride
  bool wide = false;            // y is float32, whatever the call's format
  Staged staged = {};
  int64_t x_stride = weight->in_features, y_stride = weight->out_features;

  int64_t row_of(int64_t row) const { return index ? index[row] : row; }
};

// Say whether inputs and weights of the product are exact in bfloat16, so that `Pair` and tiles lose nothing. Values of
// INT4 are rounded to it first, if that is the format of the rows.
inline bool exact_in_bfloat16(const FreightWeight& weight, int32_t format) {
  const bool inputs = weight.activations != FREIGHT_PLAIN || format == FREIGHT_BFLOAT16;
  return inputs && (weight.format == FREIGHT_E4M3FN || weight.format == FREIGHT_BFLOAT16 ||
                    weight.format == FREIGHT_MXFP4 || in_groups(weight.format));
}

// The layout in which `rows` rows in `format` are staged for a weight.
enum class Layout { kFloats, kPairs, kInt8, kIntegers, kIntegerTiles, kTiles };

inline Layout layout_of(const FreightWeight& weight, int32_t format, int64_t rows) {
#if FREIGHT_AMX
  if (has_integers(weight.format) && rows > kTileRows) return Layout::kIntegerTiles;
#endif
  if (has_integers(weight.format)) return Layout::kIntegers;
#if FREIGHT_AMX
  if (weight.format == FREIGHT_INT8 && rows > kInt8DotRows) return Layout::kTiles;
#endif
  if (weight.format == FREIGHT_INT8) return Layout::kInt8;
#if FREIGHT_AMX
  if (!exact_in_bfloat16(weight, format)) return Layout::kFloats;
  if (in_groups(weight.format)) return rows > kMostByRows ? Layout::kTiles : Layout::kPairs;
  return rows > kDotRows ? Layout::kTiles : Layout::kFloats;
#elif FREIGHT_AVX512 || FREIGHT_NEON_BF16
  (void)rows;
  return exact_in_bfloat16(weight, format) ? Layout::kPairs : Layout::kFloats;
#else
  (void)weight, (void)format, (void)rows;
  return Layout::kFloats;
#endif
}

// Stage the rows of one product, which are contiguous, with all threads on each tile; or of many products, with each
// tile on one thread. The memory is valid until the calling thread's next call of the same function.
void stage_one(Product& product, int32_t format, int threads);
void stage_all(Product* products, int64_t count, int32_t format, int threads);

// Say whether `rows` rows, of which each rank has some columns, can be staged by all ranks together, each its columns.
bool staged_by_all(const FreightWeight& weight, const FreightRanks& ranks, int32_t format, int64_t rows);
// Stage the columns of this rank, [rows, in_features / ranks], and wait for those of the others: all ranks read the same
// memory. It is valid until this rank arrives at its next turn.
FreightStatus stage_own(Product& product, const FreightRanks& ranks, int32_t format, int threads);

// Compute the products of staged rows. All weights have the same shape, format and treatment of activations. The tasks
// of all products are distributed together, those of a product next to each other.
void multiply(const Product* products, int64_t count, int32_t format, int threads);

// Call body(i, task) for task 0 .. tasks(i) - 1 of every i below `count`.
template <class Tasks, class Body>
void for_each_task(int64_t count, int threads, const Tasks& tasks, const Body& body) {
  thread_local std::vector<int64_t> ends;  // by i: the end of its tasks among all
  ends.resize(static_cast<size_t>(count));
  int64_t all = 0;
  for (int64_t i = 0; i < count; i++) ends[static_cast<size_t>(i)] = all += tasks(i);
  const int64_t* end = ends.data();
  parallel_for(all, threads, [=, &body](int64_t task) {
    const int64_t i = std::upper_bound(end, end + count, task) - end;
    body(i, i ? task - end[i - 1] : task);
  });
}

}  // namespace freight
