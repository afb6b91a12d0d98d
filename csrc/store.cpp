// Quantize and store: rows of K and V into their slots of the pages, each value read once and written once.
//
// The same bits as kernels/reference.py `store_kv`: divided by the scale in float32, clamped, rounded to nearest, ties
// to even; NaN stays NaN and is counted. A `token` scale is amax / max of the finite values, rounded to bfloat16.
#include <algorithm>
#include <atomic>

#include "attention.h"
#include "attention_tile.h"
#include "kv_formats.h"
#include "parallel.h"

namespace freight {
namespace {

constexpr int64_t kRowsPerTask = 32;
constexpr float kSmallestScale = 0x1p-126f;  // the smallest normal float32

// Magnitudes as integers, which a compiler may take in any order: so this loop becomes vectors.
float largest_finite(const float* values, int n) {
  int32_t largest = 0;
  for (int i = 0; i < n; i++) {
    const int32_t magnitude = static_cast<int32_t>(float_to_bits(values[i]) & 0x7FFFFFFFu);
    const int32_t finite = magnitude < 0x7F800000 ? magnitude : 0;
    largest = largest > finite ? largest : finite;
  }
  return bits_to_float(static_cast<uint32_t>(largest));
}

int64_t count_nan(const float* values, int n) {
  int32_t count = 0;
  for (int i = 0; i < n; i++) count += (float_to_bits(values[i]) & 0x7FFFFFFFu) > 0x7F800000u;
  return count;
}

// One of the two halves of a store: what K and V differ in.
struct Side {
  const void* from;
  int64_t stride;
  uint8_t* pages;
  void* scale;
};

// Store one head of one row, whose values are `x`; returns how many of them are NaN.
template <FreightFormat F>
int64_t store_head(const FreightStore& a, const Side& side, const float* x, int64_t slot, int head) {
  const int n = a.head_dim;
  const int64_t place = slot * a.num_kv_heads + head;
  uint8_t* to = side.pages + place * n * bytes_of(F);
  if constexpr (bytes_of(F) > 1) {
    write_row(x, F, n, to);
  } else if (a.scales == FREIGHT_STATIC_SCALES) {
    const float* scale = static_cast<const float*>(side.scale) + static_cast<int64_t>(head) * n;
    for (int i = 0; i < n; i++) to[i] = float_to_fp8<F>(x[i] / scale[i]);
  } else if (a.scales == FREIGHT_TOKEN_SCALES) {
    const uint16_t scale = float_to_bf16(std::max(largest_finite(x, n) / fp8_max(F), kSmallestScale));
    static_cast<uint16_t*>(side.scale)[place] = scale;
    for (int i = 0; i < n; i++) to[i] = float_to_fp8<F>(x[i] / bf16_to_float(scale));
  } else {
    for (int i = 0; i < n; i++) to[i] = float_to_fp8<F>(x[i]);
  }
  return count_nan(x, n);
}

template <FreightFormat F>
void store_rows(const FreightStore& a) {
  const FreightFormat type = static_cast<FreightFormat>(a.type);
  const Side sides[] = {{a.k, a.k_stride, static_cast<uint8_t*>(a.k_pages), a.k_scale},
                        {a.v, a.v_stride, static_cast<uint8_t*>(a.v_pages), a.v_scale}};
  std::atomic<int64_t> nan_count{0};
  parallel_for((a.rows + kRowsPerTask - 1) / kRowsPerTask, a.threads, [&](int64_t task) {
    float x[kMaxHeadDim];
    int64_t found = 0;
    for (int64_t row = task * kRowsPerTask; row < std::min(a.rows, (task + 1) * kRowsPerTask); row++) {
      if (a.slots[row] < 0) continue;
      for (const Side& side : sides)
        for (int head = 0; head < a.num_kv_heads; head++) {
          const int64_t from = row * side.stride + static_cast<int64_t>(head) * a.head_dim;
          read_row(static_cast<const char*>(side.from) + from * bytes_of(type), type, a.head_dim, x);
          found += store_head<F>(a, side, x, a.slots[row], head);
        }
    }
    if (found) nan_count += found;
  });
  *a.nan_count += nan_count;
}

}  // namespace
}  // namespace freight

FREIGHT_API void freight_store(const FreightStore* a) {
  switch (a->kv_format) {
    case FREIGHT_FLOAT32: return freight::store_rows<FREIGHT_FLOAT32>(*a);
    case FREIGHT_FLOAT16: return freight::store_rows<FREIGHT_FLOAT16>(*a);
    case FREIGHT_BFLOAT16: return freight::store_rows<FREIGHT_BFLOAT16>(*a);
    case FREIGHT_E4M3FN: return freight::store_rows<FREIGHT_E4M3FN>(*a);
    case FREIGHT_E5M2: return freight::store_rows<FREIGHT_E5M2>(*a);
    case FREIGHT_E4M3FNUZ: return freight::store_rows<FREIGHT_E4M3FNUZ>(*a);
  }
}
