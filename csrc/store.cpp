// Rotate and store: rotate the queries of a merged projection, and store its keys and values, in one pass.
//
// The bits are those of kernels/reference.py `rotate_store`: each step rounds to the type of the projection; stored
// values are divided by the scale in float32, clamped, and rounded to nearest, ties to even; NaN stays NaN. A `token`
// or `group` scale is amax / max of the finite values, rounded to bfloat16. NaNs are counted, and so are values clipped
// to the range of their scale.
#include <atomic>
#include <utility>

#include "attention.h"
#include "attention_tile.h"
#include "parallel.h"
#include "rows.h"
#include "status.h"

namespace freight {
namespace {

constexpr int64_t kRowsPerTask = 4;  // rows of a task

enum Kind { kQuery, kKey, kValue };

struct Counts {
  int64_t nan = 0, beyond = 0;

  void operator+=(const Counts& other) { nan += other.nan, beyond += other.beyond; }
};

// Round `values` [n], padded, to `type`.
void round_to(float* values, int n, int32_t type) {
  if (type == FREIGHT_FLOAT32) return;
  for (int i = 0; i < n; i += kLanes) store(values + i, rounded_to(load16(values + i), type));
}

// Apply rotary embedding to the pairs (i, i + half), and copy the channels after them; cos and sin: [half].
void rotate(const float* x, const float* cos, const float* sin, int half, int n, float* out) {
  for (int i = 0; i < half; i += kLanes) {
    const int count = lanes_at(i, half);
    const V16 c = load_as<FREIGHT_FLOAT32>(cos + i, count), s = load_as<FREIGHT_FLOAT32>(sin + i, count);
    const V16 a = load_as<FREIGHT_FLOAT32>(x + i, count), b = load_as<FREIGHT_FLOAT32>(x + i + half, count);
    store_as(out + i, a * c - b * s, FREIGHT_FLOAT32, count);
    store_as(out + i + half, b * c + a * s, FREIGHT_FLOAT32, count);
  }
  std::copy(x + 2 * half, x + n, out + 2 * half);
}

// Multiply x [n], padded, by `factor` rounded to `type`.
void multiply(float* x, float factor, int n, int32_t type) {
  const V16 rounded = rounded_to(set16(factor), type);
  for (int i = 0; i < n; i += kLanes) store(x + i, load16(x + i) * rounded);
}

// Norm, center, rotate and scale x, one head of one row, in place or in `other`, which has the same size. Returns the
// one that holds the result.
float* finished(const FreightStore& a, Kind kind, int head, int64_t position, float* x, float* other) {
  const int n = kind == kValue ? a.v_dim : a.k_dim, half = a.rotary_dim / 2;
  const void* norm = kind == kQuery ? a.q_norm : kind == kKey ? a.k_norm : nullptr;
  if (norm) rms_norm(x, norm, kind == kQuery ? a.q_norm_type : a.k_norm_type, n, a.type, a.eps);
  if (kind == kKey && a.k_center) {
    for (int i = 0; i < n; i++) x[i] -= a.k_center[static_cast<int64_t>(head) * n + i];
    round_to(x, n, a.type);
  }
  if (kind == kValue) return x;
  if (half != 0) {
    rotate(x, a.cos + position * half, a.sin + position * half, half, n, other);
    round_to(other, n, a.type);
    std::swap(x, other);
  }
  if (kind == kQuery && a.q_factor) {
    multiply(x, a.q_factor[position], n, a.type);
    round_to(x, n, a.type);
  }
  return x;
}

// Encode x[i] / scale(i) to `to`; returns the numbers of NaNs and of clipped values.
template <FreightFormat F, class Scale>
Counts encode(const float* x, int n, const Scale& scale, uint8_t* to) {
  const int32_t last = static_cast<int32_t>(float_to_bits(overflow_of(F)));
  int32_t nan = 0, beyond = 0;
  for (int i = 0; i < n; i++) {
    const float quotient = x[i] / scale(i);
    const int32_t magnitude = static_cast<int32_t>(float_to_bits(quotient) & 0x7FFFFFFFu);
    to[i] = code_of<F>(quotient);
    nan += magnitude > 0x7F800000;
    beyond += magnitude > last;
  }
  return {nan, beyond - nan};
}

int64_t count_nan(const float* x, int n) {
  int64_t count = 0;
  for (int i = 0; i < n; i++) count += (float_to_bits(x[i]) & 0x7FFFFFFFu) > 0x7F800000u;
  return count;
}

// Encode x [n] with a scale measured from its values, which is stored in `to_scale`.
template <FreightFormat F>
Counts store_scaled(const float* x, int n, uint8_t* to_scale, uint8_t* to) {
  const uint16_t stored = float_to_bf16(scale_from(largest_finite(x, n), max_of(F)));
  *reinterpret_cast<uint16_t*>(to_scale) = stored;
  const float scale = bf16_to_float(stored);
  return encode<F>(x, n, [scale](int) { return scale; }, to);
}

// Store a key with group scales: the first channels in bfloat16, the others in groups with a scale each.
template <FreightFormat F>
Counts store_groups(const FreightStore& a, int head, int64_t block, int64_t token, const float* x) {
  const int first = a.k_dim - a.v_dim;
  write_row(x, FREIGHT_BFLOAT16, first, vectors_of(a.rotated, block, token) + head * a.rotated.head);
  Counts counts{count_nan(x, first)};
  uint8_t* to = vectors_of(a.k, block, token) + head * a.k.head;
  uint8_t* to_scale = scales_of(a.k, block, token) + head * a.k.scale_head;
  for (int i = 0; i < a.v_dim; i += FREIGHT_SCALE_GROUP, to_scale += 2) {
    counts += store_scaled<F>(x + first + i, FREIGHT_SCALE_GROUP, to_scale, to + i);
  }
  return counts;
}

template <FreightFormat F>
Counts store_head(const FreightStore& a, Kind kind, int head, int64_t slot, const float* x) {
  const int n = kind == kKey ? a.k_dim : a.v_dim;
  const FreightPages& pages = kind == kKey ? a.k : a.v;
  const int64_t block = slot / a.block_size, token = slot % a.block_size;
  uint8_t* to = vectors_of(pages, block, token) + head * pages.head;
  if constexpr (!is_quantized(F)) {
    write_row(x, F, n, to);
    return {count_nan(x, n)};
  } else if (a.scales == FREIGHT_STATIC_SCALES) {
    const float* scale = static_cast<const float*>(pages.scale) + static_cast<int64_t>(head) * n;
    return encode<F>(x, n, [scale](int i) { return scale[i]; }, to);
  } else if (a.scales == FREIGHT_TOKEN_SCALES) {
    return store_scaled<F>(x, n, scales_of(pages, block, token) + head * pages.scale_head, to);
  } else if (a.scales == FREIGHT_GROUP_SCALES) {
    return store_groups<F>(a, head, block, token, x);
  } else {
    return encode<F>(x, n, [](int) { return 1.f; }, to);
  }
}

template <FreightFormat F>
void store_rows(const FreightStore& a) {
  const int first_value = a.num_heads + a.num_kv_heads, heads = first_value + a.num_v_heads;
  const int64_t k_size = static_cast<int64_t>(first_value) * a.k_dim, width = k_size + a.num_v_heads * a.v_dim;
  const int threads = threads_for(a.rows * width, a.threads);
  std::atomic<int64_t> nan{0}, beyond{0};
  parallel_for((a.rows + kRowsPerTask - 1) / kRowsPerTask, threads, [&](int64_t task) {
    alignas(64) float x[kMaxHeadDim], other[kMaxHeadDim];
    Counts found;
    for (int64_t row = task * kRowsPerTask; row < std::min(a.rows, (task + 1) * kRowsPerTask); row++) {
      const int64_t slot = a.slots[row];
      Counts of_row;
      for (int index = 0; index < (slot < 0 ? a.num_heads : heads); index++) {
        const Kind kind = index < a.num_heads ? kQuery : index < first_value ? kKey : kValue;
        const int head = index - (kind == kQuery ? 0 : kind == kKey ? a.num_heads : first_value);
        const int n = kind == kValue ? a.v_dim : a.k_dim;
        const int64_t from = row * width + (kind == kValue ? k_size + head * n : index * n);
        read_row(element(a.qkv, from, a.type), a.type, n, x);
        const float* values = finished(a, kind, head, a.positions[row], x, other);
        if (kind == kQuery) {
          write_row(values, a.type, n, element(a.q, (row * a.num_heads + head) * n, a.type));
        } else {
          of_row += store_head<F>(a, kind, head, slot, values);
        }
      }
      found += of_row;
      if (a.row_counters) a.row_counters[2 * row] = of_row.nan, a.row_counters[2 * row + 1] = of_row.beyond;
    }
    if (found.nan) nan += found.nan;
    if (found.beyond) beyond += found.beyond;
  });
  a.counters[0] += nan;
  a.counters[1] += beyond;
}

void rotate_store(const FreightStore& a) {
  for_format(a.kv_format, [&](auto format) { store_rows<decltype(format)::value>(a); });
}

}  // namespace
}  // namespace freight

FREIGHT_API FreightStatus freight_rotate_store(const FreightStore* a) {
  return freight::status_of([&] { freight::rotate_store(*a); });
}
