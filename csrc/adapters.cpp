// Low-rank adapters by row: y += scaling * B (A x), each row with the A and B of its own adapter.
//
// Rows are sorted by slot, so that rows of one adapter share what is read of it, and cut into groups. Where each thread
// gets several groups, it computes the sums t = A x of a group, then its outputs. Else the threads divide the sums of
// all groups by ranks, meet, and divide the outputs.
//
// A sum of t has sixteen lanes, each in the order of inputs, which are added up in a fixed order; an output adds t * b
// in the order of ranks. So a row's bits depend on that row and its adapter alone, whichever tasks compute them.
#include <algorithm>
#include <vector>

#include "memory.h"
#include "parallel.h"
#include "rows.h"
#include "status.h"

namespace freight {
namespace {

constexpr int64_t kMostSums = 1 << 20;  // sums t at a time, which bounds the working memory
constexpr int64_t kGroupRows = 32;      // rows of a group, at most
constexpr int64_t kGroups = 4;          // groups for each thread from which on threads do not share them
constexpr int64_t kTaskOutputs = 256;   // outputs of a task, at most: what it reads of b stays in the first cache
constexpr int64_t kTaskRanks = 4;       // ranks of a task, at most: a decode step of one row has some for each thread

// Rows and ranks, or rows and V16 of outputs, whose sums are in registers together.
constexpr int kRows = W == 16 ? 4 : 2;
#if FREIGHT_AVX512
constexpr int kColumns = 4;
#elif FREIGHT_AVX2 || FREIGHT_NEON
constexpr int kColumns = 2;
#else
constexpr int kColumns = 1;
#endif

inline float sum_of(const V16& lanes) {
  VF sum = lanes.v[0];
  for (int i = 1; i < kLanes / W; i++) sum = sum + lanes.v[i];
  return reduce_add(sum);
}

// The rows of a group, which have one adapter, and some ranks or outputs of one part.
struct Task {
  int32_t slot, part;
  int64_t first, count;  // of the sorted rows
  int64_t begin, end;    // ranks or outputs
};

// Where the rank and the scaling of a task's part are.
inline int64_t place_of(const FreightAdapters& a, const Task& task) {
  return int64_t{task.slot} * a.num_parts + task.part;
}

// The first step: sums[row, part, rank] = A x.
template <FreightFormat F>
struct Sums {
  const FreightAdapters& a;
  const int32_t* row;  // the sorted rows
  float* sums;         // [sorted rows, num_parts, max_rank]

  const char* x_of(int64_t sorted) const {
    const int64_t own = row[sorted];
    return element(a.x, (a.index ? a.index[own] : own) * a.x_stride, F);
  }
  float* sums_of(int64_t sorted, int32_t part) const { return sums + (sorted * a.num_parts + part) * a.max_rank; }

  void operator()(const Task& task) const {
    int64_t rank = task.begin;
    for (; rank + kColumns <= task.end; rank += kColumns) of_ranks<kColumns>(task, rank);
    for (; rank < task.end; rank++) of_ranks<1>(task, rank);
  }

  template <int RANKS>
  void of_ranks(const Task& task, int64_t rank) const {
    const int64_t end = task.first + task.count;
    int64_t at = task.first;
    for (; at + kRows <= end; at += kRows) block<kRows, RANKS>(task, at, rank);
    for (; at < end; at++) block<1, RANKS>(task, at, rank);
  }

  template <int ROWS, int RANKS>
  void block(const Task& task, int64_t first, int64_t rank) const {
    const int64_t inputs = a.in_features, whole = inputs / kLanes * kLanes;
    const char* matrix = element(a.a, (place_of(a, task) * a.max_rank + rank) * inputs, F);
    const char* x[ROWS];
    for (int i = 0; i < ROWS; i++) x[i] = x_of(first + i);
    V16 sum[ROWS][RANKS] = {};
    const auto add = [&](int64_t input, auto load) {
      V16 weight[RANKS];
      FREIGHT_UNROLL
      for (int j = 0; j < RANKS; j++) weight[j] = load(element(matrix, j * inputs + input, F));
      FREIGHT_UNROLL
      for (int i = 0; i < ROWS; i++) {
        const V16 value = load(element(x[i], input, F));
        FREIGHT_UNROLL
        for (int j = 0; j < RANKS; j++) sum[i][j] = fma(value, weight[j], sum[i][j]);
      }
    };
    const auto load_all = [](const void* from) { return load_as<F>(from); };
    for (int64_t input = 0; input < whole; input += kLanes) add(input, load_all);
    if (whole < inputs) {
      const int count = lanes_at(whole, inputs);
      add(whole, [=](const void* from) { return load_as<F>(from, count); });
    }
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < RANKS; j++) sums_of(first + i, task.part)[rank + j] = sum_of(sum[i][j]);
  }
};

// The second step: y += scaling * B sums.
template <FreightFormat F>
struct Outputs {
  const FreightAdapters& a;
  const int32_t* row;
  const float* sums;

  const float* sums_of(int64_t sorted, int32_t part) const { return sums + (sorted * a.num_parts + part) * a.max_rank; }

  void operator()(const Task& task) const {
    constexpr int64_t kWide = kColumns * kLanes;
    int64_t output = task.begin;
    for (; output + kWide <= task.end; output += kWide) of_outputs<kColumns>(task, output, kLanes);
    for (; output < task.end; output += kLanes) of_outputs<1>(task, output, lanes_at(output, task.end));
  }

  // `lanes`: of the last V16.
  template <int COLUMNS>
  void of_outputs(const Task& task, int64_t output, int lanes) const {
    const int64_t end = task.first + task.count;
    int64_t sorted = task.first;
    for (; sorted + kRows <= end; sorted += kRows) block<kRows, COLUMNS>(task, sorted, output, lanes);
    for (; sorted < end; sorted++) block<1, COLUMNS>(task, sorted, output, lanes);
  }

  template <int ROWS, int COLUMNS>
  void block(const Task& task, int64_t first, int64_t output, int lanes) const {
    const char* matrix = element(a.b, task.slot * int64_t{a.max_rank} * a.out_features + output, F);
    const float* t[ROWS];
    for (int i = 0; i < ROWS; i++) t[i] = sums_of(first + i, task.part);
    V16 sum[ROWS][COLUMNS] = {};
    const int32_t rank = a.ranks[place_of(a, task)];
    for (int32_t r = 0; r < rank; r++) {
      V16 weight[COLUMNS];
      FREIGHT_UNROLL
      for (int j = 0; j < COLUMNS; j++)
        weight[j] = load_as<F>(element(matrix, r * a.out_features + j * kLanes, F), j < COLUMNS - 1 ? kLanes : lanes);
      FREIGHT_UNROLL
      for (int i = 0; i < ROWS; i++) {
        const V16 factor = set16(t[i][r]);
        FREIGHT_UNROLL
        for (int j = 0; j < COLUMNS; j++) sum[i][j] = fma(factor, weight[j], sum[i][j]);
      }
    }
    const V16 scaling = set16(a.scalings[place_of(a, task)]);
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < COLUMNS; j++) {
        char* y = element(a.y, row[first + i] * a.out_features + output + j * kLanes, F);
        const int count = j < COLUMNS - 1 ? kLanes : lanes;
        store_as(y, load_as<F>(y, count) + sum[i][j] * scaling, F, count);
      }
  }
};

// Where the tasks of a group end.
struct Group {
  size_t sums, outputs;
};

// Some of the rows, sorted by slot, and the tasks of both steps.
struct Work {
  std::vector<int32_t> row;   // those with an adapter
  std::vector<int64_t> ends;  // by slot: the end of its rows
  std::vector<Task> sums, outputs;
  std::vector<Group> groups;
  int64_t sums_size, outputs_size;  // multiplications

  void sort(const FreightAdapters& a, int64_t first, int64_t count) {
    const auto has = [&](int64_t i) { return a.adapters[i] >= 0 && a.adapters[i] < a.num_slots; };
    ends.assign(static_cast<size_t>(a.num_slots), 0);
    for (int64_t i = first; i < first + count; i++)
      if (has(i)) ends[static_cast<size_t>(a.adapters[i])]++;
    int64_t all = 0;
    for (int64_t& end : ends) {  // becomes the begin of the slot's rows, and below, row by row, their end
      const int64_t begin = all;
      all += end;
      end = begin;
    }
    row.resize(static_cast<size_t>(all));
    for (int64_t i = first; i < first + count; i++)
      if (has(i)) row[static_cast<size_t>(ends[static_cast<size_t>(a.adapters[i])]++)] = static_cast<int32_t>(i);
  }

  void divide(const FreightAdapters& a) {
    sums.clear();
    outputs.clear();
    groups.clear();
    sums_size = outputs_size = 0;
    int64_t begin = 0;
    for (int32_t slot = 0; slot < a.num_slots; slot++) {
      const int64_t end = ends[static_cast<size_t>(slot)];
      for (; begin < end; begin += kGroupRows) {
        for (int32_t part = 0; part < a.num_parts; part++)
          add(a, {slot, part, begin, std::min(kGroupRows, end - begin), 0, 0});
        groups.push_back({sums.size(), outputs.size()});
      }
      begin = end;
    }
  }

  void add(const FreightAdapters& a, Task task) {
    const int64_t rank = a.ranks[place_of(a, task)];
    const int64_t first = task.part ? a.ends[task.part - 1] : 0, end = a.ends[task.part];
    if (!rank) return;
    sums_size += task.count * rank * a.in_features;
    outputs_size += task.count * rank * (end - first);
    for (task.begin = 0; task.begin < rank; task.begin = task.end) {
      task.end = std::min(rank, task.begin + kTaskRanks);
      sums.push_back(task);
    }
    for (task.begin = first; task.begin < end; task.begin = task.end) {
      task.end = std::min(end, task.begin + kTaskOutputs);
      outputs.push_back(task);
    }
  }
};

template <class Sums, class Outputs>
void run(const Work& work, int threads, const Sums& sums, const Outputs& outputs) {
  const int64_t groups = static_cast<int64_t>(work.groups.size());
  const int few = threads_for(work.sums_size + work.outputs_size, threads);
  if (groups >= kGroups * few) {
    parallel_for(groups, few, [&](int64_t number) {
      const size_t at = static_cast<size_t>(number);
      const Group begin = at ? work.groups[at - 1] : Group{0, 0}, end = work.groups[at];
      for (size_t i = begin.sums; i < end.sums; i++) sums(work.sums[i]);
      for (size_t i = begin.outputs; i < end.outputs; i++) outputs(work.outputs[i]);
    });
    return;
  }
  const int64_t num_sums = static_cast<int64_t>(work.sums.size());
  const int64_t num_outputs = static_cast<int64_t>(work.outputs.size());
  parallel_for(num_sums, threads_for(work.sums_size, threads),
               [&](int64_t task) { sums(work.sums[static_cast<size_t>(task)]); });
  parallel_for(num_outputs, threads_for(work.outputs_size, threads),
               [&](int64_t task) { outputs(work.outputs[static_cast<size_t>(task)]); });
}

template <FreightFormat F>
void add_adapters(const FreightAdapters& a) {
  thread_local Work work;
  thread_local WorkingMemory memory;
  const int64_t row_sums = std::max<int64_t>(1, int64_t{a.num_parts} * a.max_rank);
  const int64_t most = std::max<int64_t>(1, kMostSums / row_sums);  // rows
  for (int64_t first = 0; first < a.rows; first += most) {
    work.sort(a, first, std::min(most, a.rows - first));
    work.divide(a);
    if (work.sums.empty()) continue;
    float* sums = reinterpret_cast<float*>(memory.of(static_cast<int64_t>(work.row.size()) * row_sums * 4));
    run(work, a.threads, Sums<F>{a, work.row.data(), sums}, Outputs<F>{a, work.row.data(), sums});
  }
}

}  // namespace
}  // namespace freight

FREIGHT_API FreightStatus freight_add_adapters(const FreightAdapters* arguments) {
  return freight::status_of([&] {
    switch (arguments->format) {
      case FREIGHT_FLOAT32: return freight::add_adapters<FREIGHT_FLOAT32>(*arguments);
      case FREIGHT_FLOAT16: return freight::add_adapters<FREIGHT_FLOAT16>(*arguments);
      default: return freight::add_adapters<FREIGHT_BFLOAT16>(*arguments);
    }
  });
}
