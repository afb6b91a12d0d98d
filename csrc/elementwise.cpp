// Row-wise operations between the matrix products: residual addition with RMSNorm, SiLU times up.
//
// As the reference, they compute in float32 and round where it rounds; a row's bits depend on that row alone.
#include <vector>

#include "parallel.h"
#include "rows.h"
#include "status.h"
#include "vec.h"

namespace freight {
namespace {

constexpr int64_t kChunk = 2048;  // elements of a task

// gate / (1 + e^-gate) * up, with an exponential that cannot overflow.
inline void silu_mul_lanes(const float* gate, const float* up, float* out) {
  for (int i = 0; i < kLanes; i += W) {
    const VF g = load(gate + i), magnitude = (VF)((VI)g & 0x7FFFFFFF);
    const VF e = exp2(magnitude * set1(-1.44269504088896f));
    const VF top = g < VF{} ? g * e : g;
    store(out + i, top / (e + set1(1.f)) * load(up + i));
  }
}

void add_rms_norm(const void* x, const void* delta, const void* weight, void* sum, void* out, int32_t format,
                  int64_t rows, int64_t size, float eps, int32_t threads) {
  parallel_for(rows, threads_for(rows * size, threads), [&](int64_t row) {
    thread_local std::vector<float> scratch;
    if (static_cast<int64_t>(scratch.size()) < padded(size)) scratch.resize(static_cast<size_t>(padded(size)));
    float* values = scratch.data();
    const int64_t begin = row * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const int count = lanes_at(i, size);
      V16 v = load_as(x, begin + i, format, count);
      if (delta) {
        v = rounded_to(add16(v, load_as(delta, begin + i, format, count)), format);
        store_as(element(sum, begin + i, format), v, format, count);
      }
      store16(values + i, v);
    }
    rms_norm(values, weight, size, format, eps);
    for (int64_t i = 0; i < size; i += kLanes)
      store_as(element(out, begin + i, format), load16(values + i), format, lanes_at(i, size));
  });
}

void silu_mul(const void* gate_up, void* out, int32_t format, int64_t rows, int64_t size, int32_t threads) {
  const int64_t chunks = (size + kChunk - 1) / kChunk;
  parallel_for(rows * chunks, threads_for(rows * size, threads), [&](int64_t task) {
    const int64_t row = task / chunks, begin = task % chunks * kChunk, end = std::min(size, begin + kChunk);
    for (int64_t i = begin; i < end; i += kLanes) {
      const int count = lanes_at(i, end);
      float gate[kLanes], up[kLanes];
      store16(gate, load_as(gate_up, row * 2 * size + i, format, count));
      store16(up, load_as(gate_up, row * 2 * size + size + i, format, count));
      silu_mul_lanes(gate, up, gate);
      store_as(element(out, row * size + i, format), load16(gate), format, count);
    }
  });
}

}  // namespace
}  // namespace freight

FREIGHT_API int32_t freight_add_rms_norm(const void* x, const void* delta, const void* weight, void* sum, void* out,
                                         int32_t format, int64_t rows, int64_t size, float eps, int32_t threads) {
  return status_of([&] { freight::add_rms_norm(x, delta, weight, sum, out, format, rows, size, eps, threads); });
}

FREIGHT_API int32_t freight_silu_mul(const void* gate_up, void* out, int32_t format, int64_t rows, int64_t size,
                                     int32_t threads) {
  return status_of([&] { freight::silu_mul(gate_up, out, format, rows, size, threads); });
}
