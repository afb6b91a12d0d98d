// Attention over the pages of the KV cache: how work is cut into tasks, and how results of cut sequences are merged.
//
// Work is cut into tasks by rows, KV heads and key splits. The cuts depend on the load and the threads; the bits of a
// row do not (attention_task.h). A task of few rows takes all KV heads, because a token's heads are adjacent in memory;
// one of many rows takes one head, so that a decoded tile serves many rows.
#include "attention.h"

#include <memory>

#include "attention_amx.h"
#include "attention_bf16.h"
#if FREIGHT_AVX2
#include "attention_codes.h"
#endif
#include "attention_f32.h"
#include "attention_task.h"
#include "attention_vectors.h"
#include "parallel.h"
#include "status.h"

namespace freight {
namespace {

// Rows (positions x query heads) that share a decoded tile of keys; both figures are measured. With AMX, decoding is a
// larger share of the time, so more rows share it, and their sums, half a megabyte, stream through L2 without delay.
int rows_together([[maybe_unused]] int value_dim) {
#if FREIGHT_AMX
  return (1 << 17) / value_dim;
#else
  return 128;
#endif
}
constexpr int kTasksPerThread = 8;  // enough to balance tasks of different lengths

struct Plan {
  std::vector<Task> tasks;
  std::vector<Task> cut;  // tasks whose key splits are separate tasks, to be merged
  int64_t partials = 0;
};

// Add the tasks of `positions` positions of one sequence, each of at most `heads` KV heads, and if `cut` of one split.
void plan_rows(const FreightAttention& a, Task task, int heads, bool cut, Plan& plan) {
  const int splits = task.splits, rows = task.positions * (a.num_heads / a.num_kv_heads);
  for (task.head = 0; task.head < a.num_kv_heads; task.head += heads) {
    task.heads = std::min(heads, a.num_kv_heads - task.head);
    if (!cut || splits == 1) {
      plan.tasks.push_back(task);
      continue;
    }
    Task part = task;
    part.partial = plan.partials;
    plan.cut.push_back(part);
    part.splits = 1;
    for (int i = 0; i < splits; i++, part.split++, part.partial += rows * task.heads) plan.tasks.push_back(part);
    plan.partials = part.partial;
  }
}

template <class Tiles>
void sort_largest_first(const Call<Tiles>& call, std::vector<Task>& tasks) {
  const auto size = [&](const Task& task) {
    const int64_t last = call.end_key(task.sequence, task.position + task.positions - 1);
    const int64_t end = std::min((task.split + task.splits) * kKeySplit, last);
    return (end - task.split * kKeySplit) * task.positions * task.heads;
  };
  const auto larger = [&](const Task& x, const Task& y) { return size(x) > size(y); };
  std::stable_sort(tasks.begin(), tasks.end(), larger);
}

// A plan of tasks of at most `heads` KV heads; if `cut`, tasks of several key splits are cut into one task per split.
template <class Tiles>
Plan make_plan(const Call<Tiles>& call, int heads, bool cut) {
  const FreightAttention& a = call.a;
  const int most = rows_together(call.tiles.value_dim), together = std::max(1, most / call.group());
  Plan plan;
  for (int s = 0; s < a.num_seqs; s++) {
    const int count = a.query_starts[s + 1] - a.query_starts[s], first = a.context_lens[s] - count;
    for (int i = 0; i < count; i += together) {
      const int positions = std::min(together, count - i), rows = positions * call.group();
      const int begin = static_cast<int>(call.first_key(first + i) / kKeySplit);
      const int end = static_cast<int>((call.end_key(s, first + i + positions - 1) - 1) / kKeySplit) + 1;
      const Task task{s, first + i, positions, a.query_starts[s] + i, 0, 0, begin, end - begin};
      plan_rows(a, task, std::min(heads, std::max(1, most / rows)), cut, plan);
    }
  }
  sort_largest_first(call, plan.tasks);
  return plan;
}

// A plan of as few tasks as keep all threads busy: they are cut by splits, then by heads, only if there are too few.
// Heads whose rows are multiplied together stay together if each thread has a task.
template <class Tiles>
Plan make_plan(const Call<Tiles>& call) {
  const size_t threads = call.a.threads, wanted = threads > 1 ? kTasksPerThread * threads : 1;
  const int together = std::max(1, Tiles::rows_of_block / call.group());
  int heads = call.a.num_kv_heads;
  Plan plan = make_plan(call, heads, false);
  for (bool cut = false; plan.tasks.size() < wanted;) {
    if (cut && heads <= (plan.tasks.size() < threads ? 1 : together)) break;
    if (cut) heads = (heads + 1) / 2;
    cut = true;
    plan = make_plan(call, heads, cut);
  }
  return plan;
}

// One factor per KV head if the static K scale is the same for all its channels, so that q need not be scaled.
std::vector<float> factors_per_head(const FreightAttention& a) {
  std::vector<float> factors;
  if (a.scales != FREIGHT_STATIC_SCALES) return factors;
  const float* scale = static_cast<const float*>(a.k.scale);
  for (int h = 0; h < a.num_kv_heads; h++, scale += a.k_dim) {
    if (std::count(scale, scale + a.k_dim, scale[0]) < a.k_dim) return {};
    factors.push_back(scale[0]);
  }
  return factors;
}

// Merge the splits of a task that was cut, in order, and finish its rows.
template <class Tiles>
void merge_splits(const Call<Tiles>& call, const Task& task) {
  const size_t dim = call.tiles.value_dim;
  const int group = call.group(), rows = task.positions * group, states = rows * task.heads;
  for (int i = 0; i < states; i++) {
    Partial& sum = call.partials[task.partial + i];
    float* out = call.partial_outs + (task.partial + i) * dim;
    for (int split = 1; split < task.splits; split++) {
      const int64_t part = task.partial + static_cast<int64_t>(split) * states + i;
      merge(sum, out, call.partials[part], call.partial_outs + part * dim, static_cast<int>(dim));
    }
    finish(call.a, task.row + i % rows / group, (task.head + i / rows) * group + i % group, sum, out);
  }
}

template <class Tiles, template <class> class WorkerOf>
void attend(const FreightAttention& a) {
  const std::vector<float> k_factor = factors_per_head(a);
  const Tiles tiles(a.k_dim, a.v_dim, a.scales == FREIGHT_STATIC_SCALES && k_factor.empty());
  const size_t last_head = static_cast<size_t>(a.num_kv_heads - 1) * std::max({a.k.head, a.v.head, a.rotated.head});
  const int wide = bytes_of(a.scales == FREIGHT_GROUP_SCALES ? FREIGHT_BFLOAT16 : Tiles::format);
  const std::vector<uint8_t> nothing(last_head + std::max(a.k_dim, a.v_dim) * wide);
  Call<Tiles> call{a, tiles, k_factor, nothing, nullptr, nullptr};
  const Plan plan = make_plan(call);
  const std::unique_ptr<Partial[]> partials(new Partial[plan.partials]);
  const std::unique_ptr<float[]> outs(new float[plan.partials * tiles.value_dim]);
  call.partials = partials.get(), call.partial_outs = outs.get();
  parallel_for(plan.tasks.size(), a.threads, [&](int64_t i) { WorkerOf<Tiles>(call, plan.tasks[i]).run(); });
  parallel_for(plan.cut.size(), a.threads, [&](int64_t i) { merge_splits(call, plan.cut[i]); });
}

template <FreightFormat F>
void attend_pages(const FreightAttention& a) {
#if FREIGHT_AMX
  if constexpr (F == FREIGHT_BFLOAT16 || is_quantized(F))
    if (a.q_type == FREIGHT_BFLOAT16) return attend<AmxTiles<F>, TileWorker>(a);
#elif FREIGHT_AVX512
  if constexpr (F == FREIGHT_BFLOAT16 || is_quantized(F))
    if (a.q_type == FREIGHT_BFLOAT16) return attend<Bf16Tiles<F>, VectorWorker>(a);
#elif FREIGHT_AVX2
  if constexpr (F != FREIGHT_FLOAT32) return attend<CodeTiles<F>, VectorWorker>(a);
#endif
  attend<Float32Tiles<F>, VectorWorker>(a);
}

// Say whether every context is as long as its queries: a row before the first key would have no key to attend to.
bool contexts_hold_queries(const FreightAttention& a) {
  for (int s = 0; s < a.num_seqs; s++)
    if (a.context_lens[s] < a.query_starts[s + 1] - a.query_starts[s]) return false;
  return true;
}

void attention(const FreightAttention& a) {
  for_format(a.kv_format, [&](auto format) { attend_pages<decltype(format)::value>(a); });
}

}  // namespace
}  // namespace freight

FREIGHT_API FreightStatus freight_attention(const FreightAttention* a) {
  if (!freight::contexts_hold_queries(*a)) return FREIGHT_SHORT_CONTEXT;
  return freight::status_of([&] { freight::attention(*a); });
}
