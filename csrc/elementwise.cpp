// Row-wise operations between the matrix products: residual addition fused with RMSNorm, and gated activations.
//
// They compute in float32 and round where the reference rounds; a row's bits depend on that row alone.
#include <vector>

#include "gelu.h"
#include "parallel.h"
#include "rows.h"
#include "status.h"

namespace freight {
namespace {

constexpr int64_t kChunk = 2048;  // elements of a task of `gated`

// All activations but GELU by the error function are gate / (1 + e^-z): z is gate for both kinds of SiLU, 1.702 gate
// for the clamped SwiGLU, and 2 sqrt(2 / pi) (gate + 0.044715 gate^3) for GELU by tanh, because (1 + tanh(z / 2)) / 2 is
// 1 / (1 + e^-z). The exponential is that of -|z|, which cannot overflow.
template <FreightGatedActivation A>
inline VF activated(VF gate) {
  if constexpr (A == FREIGHT_GEGLU) return gelu(gate);
  const VF magnitude = (VF)((VI)gate & 0x7FFFFFFF);
  VF e;
  if constexpr (A == FREIGHT_SILU || A == FREIGHT_CLAMPED_SILU)
    e = exp2(magnitude * set1(-1.44269504088896f));
  else if constexpr (A == FREIGHT_CLAMPED_SWIGLU)
    e = exp2(magnitude * set1(-2.455466959593f));  // 1.702 log2(e)
  else
    e = exp2(magnitude * fma(gate * gate, set1(0.044715f), set1(1.f)) * set1(-2.3022082f));  // 2 sqrt(2 / pi) log2(e)
  return (gate < VF{} ? gate * e : gate) / (e + set1(1.f));
}

// activation(gate) * up; a NaN stays NaN. `bound` is the limit of the clamped SiLU.
template <FreightGatedActivation A>
inline VF product_of(VF gate, VF up, VF bound) {
  if constexpr (A == FREIGHT_CLAMPED_SWIGLU) {
    const VF limit = set1(7.f), least = set1(-7.f);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = (up < least ? least : up) + set1(1.f);
  }
  VF value = activated<A>(gate);
  if constexpr (A == FREIGHT_CLAMPED_SILU) {
    value = value > bound ? bound : value;
    up = up > bound ? bound : up;
    up = up < -bound ? -bound : up;
  }
  return value * up;
}

void add_rms_norm(const FreightNorm& a) {
  const int32_t format = a.format;
  const int64_t size = a.size;
  parallel_for(a.rows, threads_for(a.rows * size, a.threads), [&](int64_t row) {
    thread_local std::vector<float> scratch;
    if (static_cast<int64_t>(scratch.size()) < padded(size)) scratch.resize(static_cast<size_t>(padded(size)));
    float* values = scratch.data();
    const int64_t begin = row * size;
    if (a.delta_weight) {
      read_row(element(a.delta, begin, format), format, size, values);
      rms_norm(values, a.delta_weight, a.delta_weight_format, size, format, a.eps);
    }
    for (int64_t i = 0; i < size; i += kLanes) {
      const int count = lanes_at(i, size);
      V16 v = load_as(element(a.x, begin + i, format), format, count);
      if (a.delta) {
        const V16 delta =
            a.delta_weight ? load16(values + i) : load_as(element(a.delta, begin + i, format), format, count);
        v = rounded_to(v + delta, format);
        store_as(element(a.sum, begin + i, format), v, format, count);
      }
      store(values + i, v);
    }
    rms_norm(values, a.weight, a.weight_format, size, format, a.eps);
    write_row(values, format, size, element(a.out, begin, format));
  });
}

template <FreightGatedActivation A>
void gated(const FreightGated& a) {
  const int32_t format = a.format;
  const int64_t size = a.size;
  const int64_t chunks = (size + kChunk - 1) / kChunk;
  const VF bound = set1(a.limit);
  parallel_for(a.rows * chunks, threads_for(a.rows * size, a.threads), [&](int64_t task) {
    const int64_t row = task / chunks, begin = task % chunks * kChunk, end = std::min(size, begin + kChunk);
    for (int64_t i = begin; i < end; i += kLanes) {
      const int count = lanes_at(i, end);
      const V16 gate = load_as(element(a.gate_up, row * 2 * size + i, format), format, count);
      const V16 up = load_as(element(a.gate_up, row * 2 * size + size + i, format), format, count);
      const V16 product = each([&](int lanes) { return product_of<A>(gate.v[lanes], up.v[lanes], bound); });
      store_as(element(a.out, row * size + i, format), product, format, count);
    }
  });
}

}  // namespace
}  // namespace freight

FREIGHT_API FreightStatus freight_add_rms_norm(const FreightNorm* arguments) {
  return freight::status_of([&] { freight::add_rms_norm(*arguments); });
}

FREIGHT_API FreightStatus freight_gated(const FreightGated* arguments) {
  return freight::status_of([&] {
    switch (arguments->activation) {
      case FREIGHT_SILU: return freight::gated<FREIGHT_SILU>(*arguments);
      case FREIGHT_GELU_TANH: return freight::gated<FREIGHT_GELU_TANH>(*arguments);
      case FREIGHT_CLAMPED_SILU: return freight::gated<FREIGHT_CLAMPED_SILU>(*arguments);
      case FREIGHT_GEGLU: return freight::gated<FREIGHT_GEGLU>(*arguments);
      default: return freight::gated<FREIGHT_CLAMPED_SWIGLU>(*arguments);
    }
  });
}
