// Row-wise operations between the matrix products: RMSNorm, SiLU times up, rotary embedding.
//
// As the reference, they compute in float32 and round where it rounds; a row's bits depend on that row alone. Only
// large inputs are shared out among threads: the rows of a decode step are done before a thread has woken.
#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "vec.h"
#include "freight.h"

namespace {

constexpr int kLanes = 16;
constexpr int64_t kShare = 32768;  // elements that are worth a second thread
constexpr int64_t kChunk = 2048;   // elements of a task

int64_t size_of(int32_t format) { return format == FREIGHT_FLOAT32 ? 4 : 2; }

int threads_for(int64_t elements, int threads) {
  return static_cast<int>(std::min<int64_t>(threads, elements / kShare + 1));
}

inline V16 load_16(const char* from, int32_t format) {
  if (format == FREIGHT_FLOAT32) return load16(reinterpret_cast<const float*>(from));
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
  return format == FREIGHT_BFLOAT16 ? bf16_to_16(halves) : f16_to_16(halves);
}

// The `count` (1 .. 16) values at element `first` of `from`, zeros after them.
inline V16 load_as(const void* from, int64_t first, int32_t format, int count) {
  const char* at = static_cast<const char*>(from) + first * size_of(format);
  if (count == kLanes) return load_16(at, format);
  alignas(64) char padded[64] = {};
  std::memcpy(padded, at, static_cast<size_t>(count * size_of(format)));
  return load_16(padded, format);
}

// The values that `format` stores for them.
inline V16 rounded_to(V16 values, int32_t format) {
  if (format == FREIGHT_FLOAT32) return values;
  alignas(64) char stored[64];
  store_as(stored, values, format, kLanes);
  return load_16(stored, format);
}

inline char* element(void* base, int64_t index, int32_t format) {
  return static_cast<char*>(base) + index * size_of(format);
}

// In lanes, and the lanes in order.
float sum_of_squares(const float* values, int64_t padded) {
  V16 sums = zero16();
  for (int64_t i = 0; i < padded; i += kLanes) {
    const V16 v = load16(values + i);
    sums = madd16(v, v, sums);
  }
  float lanes[kLanes], sum = 0.f;
  store16(lanes, sums);
  for (float lane : lanes) sum += lane;
  return sum;
}

void rms_norm_row(const void* x, int64_t first, const void* weight, void* out, int64_t to, int64_t dim, int32_t format,
                  float eps) {
  thread_local std::vector<float> scratch;
  const int64_t padded = (dim + kLanes - 1) / kLanes * kLanes;
  if (static_cast<int64_t>(scratch.size()) < padded) scratch.resize(static_cast<size_t>(padded));
  float* values = scratch.data();
  for (int64_t i = 0; i < dim; i += kLanes)
    store16(values + i, load_as(x, first + i, format, static_cast<int>(std::min<int64_t>(kLanes, dim - i))));
  const float mean = sum_of_squares(values, padded) / static_cast<float>(dim);
  const float scale = 1.f / std::sqrt(mean + eps);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, dim - i));
    const V16 normed = rounded_to(mul16(load16(values + i), splat16(scale)), format);
    store_as(element(out, to + i, format), mul16(load_as(weight, i, format, count), normed), format, count);
  }
}

// gate / (1 + e^-gate) * up, with an exponential that cannot overflow.
inline void silu_mul_lanes(const float* gate, const float* up, float* out) {
  using namespace freight;
  for (int i = 0; i < kLanes; i += W) {
    const VF g = load(gate + i), magnitude = (VF)((VI)g & 0x7FFFFFFF);
    const VF e = freight::exp2(magnitude * set1(-1.44269504088896f));
    const VF top = g < VF{} ? g * e : g;
    freight::store(out + i, top / (e + set1(1.f)) * load(up + i));
  }
}

}  // namespace

FREIGHT_API void freight_rms_norm(const void* x, const void* weight, void* out, int32_t format, int64_t rows,
                                  int64_t heads, int64_t dim, int64_t row_stride, float eps, int32_t threads) {
  parallel_for(rows, threads_for(rows * heads * dim, threads), [&](int64_t row) {
    for (int64_t head = 0; head < heads; head++)
      rms_norm_row(x, row * row_stride + head * dim, weight, out, (row * heads + head) * dim, dim, format, eps);
  });
}

FREIGHT_API void freight_silu_mul(const void* gate_up, void* out, int32_t format, int64_t rows, int64_t size,
                                  int32_t threads) {
  const int64_t chunks = (size + kChunk - 1) / kChunk;
  parallel_for(rows * chunks, threads_for(rows * size, threads), [&](int64_t task) {
    const int64_t row = task / chunks, begin = task % chunks * kChunk, end = std::min(size, begin + kChunk);
    for (int64_t i = begin; i < end; i += kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(kLanes, end - i));
      float gate[kLanes], up[kLanes];
      store16(gate, load_as(gate_up, row * 2 * size + i, format, count));
      store16(up, load_as(gate_up, row * 2 * size + size + i, format, count));
      silu_mul_lanes(gate, up, gate);
      store_as(element(out, row * size + i, format), load16(gate), format, count);
    }
  });
}

FREIGHT_API void freight_rotate(const void* x, const float* cos, const float* sin, void* out, int32_t format,
                                int64_t rows, int64_t heads, int64_t dim, int64_t row_stride, int32_t threads) {
  const int64_t half = dim / 2;
  parallel_for(rows, threads_for(rows * heads * dim, threads), [&](int64_t row) {
    for (int64_t i = 0; i < half; i += kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(kLanes, half - i));
      const V16 c = load_as(cos, row * half + i, FREIGHT_FLOAT32, count);
      const V16 s = load_as(sin, row * half + i, FREIGHT_FLOAT32, count);
      for (int64_t head = 0; head < heads; head++) {
        const int64_t from = row * row_stride + head * dim + i, to = (row * heads + head) * dim + i;
        const V16 a = load_as(x, from, format, count), b = load_as(x, from + half, format, count);
        store_as(element(out, to, format), sub16(mul16(a, c), mul16(b, s)), format, count);
        store_as(element(out, to + half, format), add16(mul16(b, c), mul16(a, s)), format, count);
      }
    }
  });
}
