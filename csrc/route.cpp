// Routing: the logits of a router, and for each row the experts with the largest scores.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "memory.h"
#include "parallel.h"
#include "rows.h"
#include "status.h"

namespace freight {
namespace {

constexpr int64_t kRowsAtOnce = 1024;  // rows at a time, which bounds the memory of float32 inputs and logits
constexpr int64_t kCost = 64;          // cost of a logit, in the elements that threads_for counts

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A number that is ordered like the values; NaN is the largest, and -0 equals 0.
inline uint32_t rank_of(float value) {
  const uint32_t bits = float_to_bits(value + 0.f);
  return value != value ? 0xFFFFFFFFu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Find the `count` largest of values[0 .. size - 1], of equal ones the first: their keys, largest first (`place_of`).
void largest(const float* values, int64_t size, int64_t count, std::vector<uint64_t>& keys) {
  keys.resize(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; i++)
    keys[static_cast<size_t>(i)] = static_cast<uint64_t>(rank_of(values[i])) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(i));
  std::partial_sort(keys.begin(), keys.begin() + count, keys.end(), [](uint64_t a, uint64_t b) { return a > b; });
}

inline int32_t place_of(uint64_t key) { return static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(key)); }

// Softmax in place; all values become NaN if one is.
void softmax(float* values, int64_t size) {
  float top = -kInfinity;
  for (int64_t i = 0; i < size; i++) top = values[i] > top ? values[i] : top;
  double sum = 0;
  for (int64_t i = 0; i < size; i++) sum += values[i] = std::exp(values[i] - top);
  for (int64_t i = 0; i < size; i++) values[i] = static_cast<float>(values[i] / sum);
}

struct Router {
  const FreightRoute& a;
  int64_t num_experts;

  // Set wanted[e] = -infinity for the experts outside the top_groups best groups. A group is rated by the sum of its
  // group_best largest values.
  void leave_groups_out(float* wanted, std::vector<float>& best, std::vector<uint64_t>& keys) const {
    const int64_t size = num_experts / a.num_groups;
    best.resize(static_cast<size_t>(a.num_groups));
    for (int64_t group = 0; group < a.num_groups; group++) {
      const float* of = wanted + group * size;
      const int64_t summed = std::min<int64_t>(a.group_best, size);
      largest(of, size, summed, keys);
      best[static_cast<size_t>(group)] = of[place_of(keys[0])] + (summed > 1 ? of[place_of(keys[1])] : 0.f);
    }
    largest(best.data(), a.num_groups, a.num_groups, keys);
    for (int64_t i = a.top_groups; i < a.num_groups; i++) {
      float* of = wanted + place_of(keys[static_cast<size_t>(i)]) * size;
      std::fill(of, of + size, -kInfinity);
    }
  }

  // Choose the experts of a row. scores: its logits, which are overwritten.
  void choose(float* scores, int32_t* ids, float* weights) const {
    thread_local std::vector<float> wanted, best;
    thread_local std::vector<uint64_t> keys;
    if (a.scoring == FREIGHT_SOFTMAX) softmax(scores, num_experts);
    if (a.scoring == FREIGHT_SIGMOID)
      for (int64_t i = 0; i < num_experts; i++) scores[i] = 1.f / (1.f + std::exp(-scores[i]));
    wanted.assign(scores, scores + num_experts);
    if (a.choice_bias)
      for (int64_t i = 0; i < num_experts; i++) wanted[static_cast<size_t>(i)] += a.choice_bias[i];
    if (a.num_groups > 1) leave_groups_out(wanted.data(), best, keys);
    largest(wanted.data(), num_experts, a.top_k, keys);
    for (int64_t i = 0; i < a.top_k; i++) ids[i] = place_of(keys[static_cast<size_t>(i)]);
    std::sort(ids, ids + a.top_k);
    for (int64_t i = 0; i < a.top_k; i++) weights[i] = scores[ids[i]];
    if (a.scoring == FREIGHT_CHOSEN) softmax(weights, a.top_k);
    if (a.normed) {
      double sum = 0;
      for (int64_t i = 0; i < a.top_k; i++) sum += weights[i];
      const float total = static_cast<float>(sum) + 1e-20f;  // the sum of sigmoids may be 0
      for (int64_t i = 0; i < a.top_k; i++) weights[i] /= total;
    }
    for (int64_t i = 0; i < a.top_k; i++) weights[i] *= a.factor;
    if (a.expert_scale)
      for (int64_t i = 0; i < a.top_k; i++) weights[i] *= a.expert_scale[ids[i]];
  }
};

// Read `rows` rows of x, from `first` on, as float32.
void read_inputs(const FreightRoute& a, int64_t first, int64_t rows, int64_t hidden, float* to) {
  parallel_for(rows, threads_for(rows * hidden, a.threads), [&](int64_t row) {
    for (int64_t i = 0; i < hidden; i += kLanes) {
      const int lanes = lanes_at(i, hidden);
      const V16 values = load_as(element(a.x, (first + row) * hidden + i, a.format), a.format, lanes);
      store_as(to + row * hidden + i, values, FREIGHT_FLOAT32, lanes);
    }
  });
}

void route(const FreightRoute& a, int64_t first, int64_t rows) {
  thread_local WorkingMemory memory;
  const FreightWeight& weight = *static_cast<const FreightWeight*>(a.router);
  const int64_t hidden = weight.in_features, num_experts = weight.out_features;
  float* logits = reinterpret_cast<float*>(memory.of(rows * (num_experts + hidden) * 4));
  float* inputs = logits + rows * num_experts;
  read_inputs(a, first, rows, hidden, inputs);
  const FreightLinear product{a.router, inputs, a.bias, logits, rows, FREIGHT_FLOAT32, 0, a.threads};
  if (freight_linear(&product) != FREIGHT_OK) throw std::bad_alloc();
  const Router router{a, num_experts};
  parallel_for(rows, threads_for(rows * num_experts * kCost, a.threads), [&](int64_t row) {
    const int64_t at = (first + row) * a.top_k;
    router.choose(logits + row * num_experts, a.ids + at, a.weights + at);
  });
}

}  // namespace
}  // namespace freight

FREIGHT_API FreightStatus freight_route(const FreightRoute* arguments) {
  return freight::status_of([&] {
    for (int64_t first = 0; first < arguments->rows; first += freight::kRowsAtOnce)
      freight::route(*arguments, first, std::min(freight::kRowsAtOnce, arguments->rows - first));
  });
}
