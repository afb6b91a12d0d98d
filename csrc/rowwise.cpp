// Embedding lookup and row-wise operations of some model families: LayerNorm, activations without a gate, gates of
// results, norms of concatenated columns, and the operations around a recurrence.
//
// They round where the reference rounds; a row's bits depend on that row alone.
#include <algorithm>
#include <vector>

#include "gelu.h"
#include "parallel.h"
#include "rows.h"
#include "status.h"

namespace freight {
namespace {

float* scratch_of(int64_t size) {
  thread_local std::vector<float> scratch;
  if (static_cast<int64_t>(scratch.size()) < padded(size)) scratch.resize(static_cast<size_t>(padded(size)));
  return scratch.data();
}

// The sum: by lanes, then over the lanes in order.
float sum_of(const float* values, int64_t size) {
  V16 sums{};
  for (int64_t i = 0; i < size; i += kLanes) sums = sums + load16(values + i);
  float lanes[kLanes], sum = 0.f;
  store(lanes, sums);
  for (float lane : lanes) sum += lane;
  return sum;
}

void add_layer_norm(const FreightLayerNorm& a) {
  const int32_t format = a.format;
  const int64_t size = a.size;
  parallel_for(a.rows, threads_for(a.rows * size, a.threads), [&](int64_t row) {
    float* values = scratch_of(size);
    const int64_t begin = row * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const int count = lanes_at(i, size);
      V16 v = load_as(element(a.x, begin + i, format), format, count);
      if (a.delta) {
        v = rounded_to(v + load_as(element(a.delta, begin + i, format), format, count), format);
        store_as(element(a.sum, begin + i, format), v, format, count);
      }
      store(values + i, v);
    }
    for (int pass = 0; pass < 2; pass++) {  // the second pass removes the rounding error of the first one's mean
      const V16 mean = set16(sum_of(values, padded(size)) / static_cast<float>(size));
      for (int64_t i = 0; i < size; i += kLanes) store(values + i, load16(values + i) - mean);
      std::fill(values + size, values + padded(size), 0.f);
    }
    const float variance = sum_of_squares(values, padded(size)) / static_cast<float>(size);
    const V16 scale = set16(1.f / std::sqrt(variance + a.eps));
    for (int64_t i = 0; i < size; i += kLanes) {
      const int count = lanes_at(i, size);
      const V16 weight = load_as(element(a.weight, i, format), format, count);
      const V16 bias = load_as(element(a.bias, i, format), format, count);
      store_as(element(a.out, begin + i, format), load16(values + i) * scale * weight + bias, format, count);
    }
  });
}

// activation(x), a FreightUngated; NaN stays NaN.
inline VF activated(VF x, int32_t activation) {
  if (activation == FREIGHT_GELU) return gelu(x);
  const VF positive = x < VF{} ? VF{} : x;
  return activation == FREIGHT_RELU_SQUARED ? positive * positive : positive;
}

void activated(const FreightActivated& a) {
  constexpr int64_t kChunk = 2048;  // elements of a task
  const int64_t count = a.rows * a.size;
  parallel_for((count + kChunk - 1) / kChunk, threads_for(count, a.threads), [&](int64_t task) {
    const int64_t end = std::min(count, (task + 1) * kChunk);
    for (int64_t i = task * kChunk; i < end; i += kLanes) {
      const V16 x = load_as(element(a.x, i, a.format), a.format, lanes_at(i, end));
      const V16 result = each([&](int lanes) { return activated(x.v[lanes], a.activation); });
      store_as(element(a.out, i, a.format), result, a.format, lanes_at(i, end));
    }
  });
}

// ln(1 + u) for u of 0 .. 1, as 2 artanh(u / (2 + u)), whose series has an error below 2 ** -28 after these terms.
inline VF log1p(VF u) {
  const VF s = u / (u + set1(2.f)), square = s * s;
  VF sum = set1(1.f / 15.f);
  for (const float divisor : {13.f, 11.f, 9.f, 7.f, 5.f, 3.f, 1.f}) sum = fma(sum, square, set1(1.f / divisor));
  return (s + s) * sum;
}

inline VF factor_of(VF logit, int32_t function) {
  if (function == FREIGHT_BY_IDENTITY) return logit;
  const VF magnitude = (VF)((VI)logit & 0x7FFFFFFF);
  const VF e = exp2(magnitude * set1(-1.44269504088896f));  // e^-|logit|
  VF factor;
  if (function == FREIGHT_BY_SOFTPLUS)
    factor = (logit < VF{} ? VF{} : logit) + log1p(e);
  else
    factor = (logit < VF{} ? e : set1(1.f)) / (e + set1(1.f));
  return logit == logit ? factor : logit;
}

void gate(const FreightGate& a) {
  const int32_t format = a.format;
  const int64_t group = a.size / a.groups;
  parallel_for(a.rows, threads_for(a.rows * a.size, a.threads), [&](int64_t row) {
    float* factors = scratch_of(a.groups);
    read_row(element(a.logits, row * a.logits_stride, format), format, a.groups, factors);
    for (int64_t i = 0; i < a.groups; i += kLanes) {
      const V16 logits = load16(factors + i);
      store(factors + i, each([&](int lanes) { return factor_of(logits.v[lanes], a.function); }));
    }
    const auto multiply = [&](int64_t at, V16 factor, int count) {
      const V16 x = load_as(element(a.x, row * a.x_stride + at, format), format, count);
      store_as(element(a.out, row * a.size + at, format), x * factor, format, count);
    };
    if (group == 1) {
      for (int64_t i = 0; i < a.size; i += kLanes) multiply(i, load16(factors + i), lanes_at(i, a.size));
      return;
    }
    for (int64_t g = 0; g < a.groups; g++)
      for (int64_t i = 0; i < group; i += kLanes) multiply(g * group + i, set16(factors[g]), lanes_at(i, group));
  });
}

void part(const FreightPart& a) {
  const int32_t format = a.format;
  parallel_for(a.rows, threads_for(a.rows * a.size, a.threads), [&](int64_t row) {
    const char* from = element(a.x, row * a.x_stride, format);
    char* to = element(a.out, row * a.out_stride, format);
    if (!a.weight) {
      std::memcpy(to, from, static_cast<size_t>(a.size * bytes_of(format)));
      return;
    }
    float* values = scratch_of(a.group);
    for (int64_t i = 0; i < a.size; i += a.group) {
      read_row(element(from, i, format), format, a.group, values);
      rms_norm(values, a.weight, a.weight_format, a.group, format, a.eps);
      write_row(values, format, a.group, element(to, i, format));
    }
  });
}

// ln(1 + e^x).
inline VF softplus(VF x) { return (x < VF{} ? VF{} : x) + log1p(exp((VF)((VI)x | INT32_MIN))); }

inline VF sigmoid(VF x) {
  const VF e = exp((VF)((VI)x | INT32_MIN));
  return (x < VF{} ? e : set1(1.f)) / (e + set1(1.f));
}

// NaN stays NaN.
inline VF bounded(VF x, VF least, VF most) {
  x = x < least ? least : x;
  return x > most ? most : x;
}

// Log decays of x = a + dt_bias. Without a bound they are computed from dt, which is returned, too.
V16 log_decays(const FreightDecays& a, V16 x, V16 a_log, V16* dt) {
  const VF least = set1(a.least), most = set1(a.most), bound = set1(a.bound);
  if (a.bound < 0) return each([&](int lanes) { return bound * sigmoid(exp(a_log.v[lanes]) * x.v[lanes]); });
  *dt = each([&](int lanes) { return bounded(softplus(x.v[lanes]), least, most); });
  return each([&](int lanes) { return -exp(a_log.v[lanes]) * dt->v[lanes]; });
}

// Compute the log decays of all channels of a row.
void channel_decays(const FreightDecays& a, int64_t row) {
  for (int64_t head = 0; head < a.heads; head++) {
    const V16 a_log = set16(a.a_log[head]);
    for (int64_t i = 0; i < a.k_dim; i += kLanes) {
      const int count = lanes_at(i, a.k_dim);
      const int64_t at = head * a.k_dim + i;
      const V16 bias = load_as<FREIGHT_FLOAT32>(a.dt_bias + at, count);
      V16 dt{};
      const V16 x = load_as(element(a.a, row * a.a_stride + at, a.format), a.format, count) + bias;
      store_as(a.log_decay + row * a.heads * a.k_dim + at, log_decays(a, x, a_log, &dt), FREIGHT_FLOAT32, count);
    }
  }
}

void decays(const FreightDecays& a) {
  const int64_t values = a.heads * std::max<int64_t>(a.k_dim, 1);
  parallel_for(a.rows, threads_for(a.rows * values * 8, a.threads), [&](int64_t row) {
    if (a.k_dim) channel_decays(a, row);
    for (int64_t i = 0; i < a.heads; i += kLanes) {
      const int count = lanes_at(i, a.heads);
      V16 beta{};
      if (!a.k_dim) {
        const V16 bias = load_as<FREIGHT_FLOAT32>(a.dt_bias + i, count);
        const V16 x = load_as(element(a.a, row * a.a_stride + i, a.format), a.format, count) + bias;
        const V16 log_decay = log_decays(a, x, load_as<FREIGHT_FLOAT32>(a.a_log + i, count), &beta);
        store_as(a.log_decay + row * a.heads + i, log_decay, FREIGHT_FLOAT32, count);
      }
      if (a.b) {
        const V16 logits = load_as(element(a.b, row * a.b_stride + i, a.format), a.format, count);
        beta = each([&](int lanes) { return sigmoid(logits.v[lanes]); });
      }
      store_as(a.beta + row * a.heads + i, beta, FREIGHT_FLOAT32, count);
    }
  });
}

void gated_norm(const FreightGatedNorm& a) {
  const int32_t format = a.format;
  parallel_for(a.rows, threads_for(a.rows * a.size, a.threads), [&](int64_t row) {
    float* values = scratch_of(a.group);
    const auto factor_at = [&](int64_t at, int count) {
      const V16 gate = load_as(element(a.gate, row * a.gate_stride + at, format), format, count);
      return each([&](int lanes) { return silu(gate.v[lanes]); });
    };
    for (int64_t begin = 0; begin < a.size; begin += a.group) {
      const char* x = element(a.x, row * a.x_stride + begin, format);
      char* out = element(a.out, row * a.size + begin, format);
      const char* weight = element(a.weight, begin % a.weight_size, a.weight_format);
      for (int64_t i = 0; i < a.group; i += kLanes) {
        const int count = lanes_at(i, a.group);
        const V16 value = load_as(element(x, i, format), format, count);
        store(values + i, a.norm_first ? value : value * factor_at(begin + i, count));
      }
      rms_norm(values, weight, a.weight_format, a.group, format, a.eps);
      for (int64_t i = 0; i < a.group; i += kLanes) {
        const int count = lanes_at(i, a.group);
        const V16 normed = load16(values + i);
        store_as(element(out, i, format), a.norm_first ? normed * factor_at(begin + i, count) : normed, format, count);
      }
    }
  });
}

bool are_rows(const FreightLookup& a) {
  return std::all_of(a.ids, a.ids + a.rows, [&](int64_t id) { return id >= 0 && id < a.table_rows; });
}

void lookup(const FreightLookup& a) {
  const int32_t format = a.format;
  const bool same = !a.base && a.table_format == format && a.multiplier == 1.f && a.factor == 1.f;
  const V16 multiplier = set16(a.multiplier), factor = set16(a.factor);
  parallel_for(a.rows, threads_for(a.rows * a.size, a.threads), [&](int64_t row) {
    const char* from = element(a.table, a.ids[row] * a.table_stride, a.table_format);
    char* to = element(a.out, row * a.size, format);
    if (same) {
      std::memcpy(to, from, static_cast<size_t>(a.size * bytes_of(format)));
      return;
    }
    for (int64_t i = 0; i < a.size; i += kLanes) {
      const int count = lanes_at(i, a.size);
      V16 v = rounded_to(load_as(element(from, i, a.table_format), a.table_format, count), format);
      v = rounded_to(v * multiplier, format);
      if (a.base) v = rounded_to(load_as(element(a.base, row * a.size + i, format), format, count) + v, format);
      store_as(element(to, i, format), v * factor, format, count);
    }
  });
}

}  // namespace
}  // namespace freight

FREIGHT_API FreightStatus freight_lookup(const FreightLookup* arguments) {
  if (!freight::are_rows(*arguments)) return FREIGHT_NO_SUCH_ROW;
  return freight::status_of([&] { freight::lookup(*arguments); });
}

FREIGHT_API FreightStatus freight_add_layer_norm(const FreightLayerNorm* arguments) {
  return freight::status_of([&] { freight::add_layer_norm(*arguments); });
}

FREIGHT_API FreightStatus freight_activated(const FreightActivated* arguments) {
  return freight::status_of([&] { freight::activated(*arguments); });
}

FREIGHT_API FreightStatus freight_gate(const FreightGate* arguments) {
  return freight::status_of([&] { freight::gate(*arguments); });
}

FREIGHT_API FreightStatus freight_part(const FreightPart* arguments) {
  return freight::status_of([&] { freight::part(*arguments); });
}

FREIGHT_API FreightStatus freight_decays(const FreightDecays* arguments) {
  return freight::status_of([&] { freight::decays(*arguments); });
}

FREIGHT_API FreightStatus freight_gated_norm(const FreightGatedNorm* arguments) {
  return freight::status_of([&] { freight::gated_norm(*arguments); });
}
