// The softmax state of a row of attention after some of its keys: merging of two states, and output from the last.
#pragma once
#include <limits>

#include "attention.h"
#include "attention_tile.h"
#include "rows.h"

namespace freight {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The softmax state of a row after some of its keys. Its `out`, stored apart, is the sum of 2 ** (score - best) * v.
struct Partial {
  float best = -kInfinity;  // the largest score, in base 2; with AMX one that is less than the largest by at most 8
  float total = 0.0f;       // the sum of 2 ** (score - best)
};

inline float exp2_of(float x) { return exp2(set1(x))[0]; }

// Merge `part`, whose keys come later, into `into`. Merging an empty state, or into one, is exact.
inline void merge(Partial& into, float* into_out, const Partial& part, const float* part_out, int size) {
  const float best = part.best > into.best ? part.best : into.best;
  const float base = best == -kInfinity ? 0.0f : best;
  const float kept = exp2_of(into.best - base), added = exp2_of(part.best - base);
  into.best = best;
  into.total = into.total * kept + part.total * added;
  for (int d = 0; d < size; d += W)
    store(into_out + d, load(into_out + d) * set1(kept) + load(part_out + d) * set1(added));
}

// Apply the sink of a query head to its row's merged result: returns the new sum of the softmax, and sets the factor of
// `out`. The sink is applied last, so that the result does not depend on how the keys were cut.
inline float add_sink(const FreightAttention& a, int head, const Partial& merged, float& factor) {
  const float sink = a.sinks[head] * 1.44269504088896341f;
  const float best = sink > merged.best ? sink : merged.best;
  factor = exp2_of(merged.best - best);
  return merged.total * factor + exp2_of(sink - best);
}

// Write the output row of one query head from its merged result. Adding 0 turns -0 into +0.
inline void finish(const FreightAttention& a, int64_t row, int head, const Partial& merged, float* out) {
  float values[kMaxHeadDim], total = merged.total;
  const int dim = a.v_dim;
  if (a.sinks) {
    float factor;
    total = add_sink(a, head, merged, factor);
    for (int d = 0; d < dim; d++) out[d] *= factor;
  }
  for (int d = 0; d < dim; d++) values[d] = out[d] / total + 0.0f;
  if (a.scales == FREIGHT_STATIC_SCALES) {
    const int64_t kv_head = head / (a.num_heads / a.num_kv_heads);
    const float* scale = static_cast<const float*>(a.v.scale) + kv_head * dim;
    for (int d = 0; d < dim; d++) values[d] *= scale[d];
  }
  write_row(values, a.q_type, dim, element(a.out, (row * a.num_heads + head) * dim, a.q_type));
}

}  // namespace freight
