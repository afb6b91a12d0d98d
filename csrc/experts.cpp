// A mixture of experts: the two products of each expert over its rows, and the weighted sum of the results.
//
// Rows are sorted by expert. The tasks of all experts' products are distributed over the threads together, so that
// every thread always has weights to read, even if each expert has few rows. A row has the bits of freight_linear and
// freight_gated or freight_activated for that expert.
#include <algorithm>
#include <vector>

#include "memory.h"
#include "parallel.h"
#include "product.h"
#include "rows.h"
#include "status.h"

namespace freight {
namespace {

constexpr int64_t kMostPairs = 16384;  // pairs of a row and an expert at a time, which bounds the working memory
constexpr int64_t kSumColumns = 1024;  // columns of a task of `sum`

// Pairs of a row and one of its experts, sorted by expert.
struct Pairs {
  std::vector<int32_t> row;    // by pair: its row
  std::vector<int64_t> place;  // [rows, top_k]: the pair, or -1 for an id that is skipped
  std::vector<int64_t> end;    // by expert: the end of its pairs
  std::vector<int32_t> slot;   // by pair: the slot of its adapter in the banks, or -1

  void sort(const int32_t* ids, int64_t rows, int64_t top_k, int64_t num_experts) {
    const auto there = [&](int32_t id) { return id >= 0 && id < num_experts; };
    end.assign(static_cast<size_t>(num_experts), 0);
    for (int64_t i = 0; i < rows * top_k; i++)
      if (there(ids[i])) end[static_cast<size_t>(ids[i])]++;
    int64_t all = 0;
    for (int64_t& count : end) {  // becomes the begin of the expert's pairs, and below, pair by pair, their end
      const int64_t first = all;
      all += count;
      count = first;
    }
    row.resize(static_cast<size_t>(all));
    place.resize(static_cast<size_t>(rows * top_k));
    for (int64_t i = 0; i < rows * top_k; i++) {
      const int64_t pair = there(ids[i]) ? end[static_cast<size_t>(ids[i])]++ : -1;
      place[static_cast<size_t>(i)] = pair;
      if (pair >= 0) row[static_cast<size_t>(pair)] = static_cast<int32_t>(i / top_k);
    }
  }

  // Set `slot` from the slots of the rows. Returns whether a pair has one.
  bool adapt(const int32_t* adapters, int64_t num_slots) {
    const int64_t num_experts = static_cast<int64_t>(end.size());
    bool any = false;
    slot.assign(row.size(), -1);
    size_t pair = 0;
    for (int64_t expert = 0; expert < num_experts; expert++)
      for (; pair < static_cast<size_t>(end[static_cast<size_t>(expert)]); pair++) {
        const int64_t own = adapters[row[pair]] * num_experts + expert;
        if (adapters[row[pair]] < 0 || own >= num_slots) continue;
        slot[pair] = static_cast<int32_t>(own);
        any = true;
      }
    return any;
  }

  int64_t count() const { return static_cast<int64_t>(row.size()); }
};

// One of the two products of an expert.
struct Side {
  const FreightWeight* weights;
  const void* bias;  // [num_experts, out_features], or null
  int32_t format;

  // Make the products of the pairs of each expert. Rows of x are selected by index, or x has one row per pair. `biases`
  // owns the biases of the products.
  void products(const Pairs& pairs, const void* x, bool by_index, void* y, std::vector<float>& biases,
                std::vector<Product>& out) const {
    const int64_t in = weights->in_features, width = weights->out_features;
    out.clear();
    int64_t first = 0, used = 0;
    for (size_t expert = 0; expert < pairs.end.size(); first = pairs.end[expert++]) {
      for (int64_t at = first, end = pairs.end[expert]; at < end; at += kMostTileRows) {
        Product one{weights + expert};
        one.x = by_index ? x : element(x, at * in, format);
        one.index = by_index ? pairs.row.data() + at : nullptr;
        one.rows = std::min(kMostTileRows, end - at);
        one.y = element(y, at * width, format);
        out.push_back(one);
      }
      if (first < pairs.end[expert]) used++;
    }
    if (bias) set_biases(used, biases, out);
  }

  void set_biases(int64_t used, std::vector<float>& biases, std::vector<Product>& out) const {
    const int64_t width = weights->out_features;
    biases.resize(static_cast<size_t>(used * padded(width)));
    float* to = biases.data();
    for (size_t i = 0; i < out.size(); i++) {
      if (i && out[i].weight == out[i - 1].weight) {
        out[i].bias = out[i - 1].bias;
        continue;
      }
      read_row(element(bias, (out[i].weight - weights) * width, format), format, width, to);
      out[i].bias = to;
      to += padded(width);
    }
  }
};

// Say whether all products stage the same values: there is a single row, and all experts quantize it alike.
bool stage_alike(const std::vector<Product>& products, int64_t rows) {
  return rows == 1 && std::all_of(products.begin(), products.end(), [&](const Product& one) {
           const FreightWeight &weight = *one.weight, &first = *products[0].weight;
           return one.rows == 1 && weight.order == first.order &&
                  (weight.activations != FREIGHT_STATIC || weight.input_scale == first.input_scale);
         });
}

struct Mixture {
  const FreightExperts& a;
  const FreightWeight* gate_up = static_cast<const FreightWeight*>(a.gate_up);
  const FreightWeight* down = static_cast<const FreightWeight*>(a.down);
  const FreightRanks* ranks = static_cast<const FreightRanks*>(a.ranks);
  int64_t hidden = gate_up->in_features, inner = gate_up->out_features / (a.gated ? 2 : 1);
  int64_t outputs = down->out_features, begin = ranks ? ranks->rank * outputs : 0;  // columns of the result

  FreightStatus compute(int64_t first, int64_t rows) const {
    thread_local Pairs pairs;
    thread_local WorkingMemory memory;
    thread_local std::vector<Product> products;
    thread_local std::vector<float> biases;
    pairs.sort(a.ids + first * a.top_k, rows, a.top_k, a.num_experts);
    const int64_t wide = pairs.count() * std::max(gate_up->out_features, outputs) * bytes_of(a.format) + kUnit;
    const int64_t narrow = pairs.count() * inner * bytes_of(a.format), gathered = ranks ? narrow * ranks->size : 0;
    uint8_t* results = memory.of(wide + narrow + gathered);  // of both products in turn
    uint8_t* between = results + wide;
    const Side outer{gate_up, a.gate_up_bias, a.format}, last{down, a.down_bias, a.format};
    outer.products(pairs, element(a.x, first * hidden, a.format), true, results, biases, products);
    int64_t count = static_cast<int64_t>(products.size());
    const bool alike = stage_alike(products, rows);
    stage_all(products.data(), alike ? std::min<int64_t>(count, 1) : count, a.format, a.threads);
    if (alike)
      for (Product& one : products) one.staged = products[0].staged;
    multiply(products.data(), count, a.format, a.threads);
    const bool adapted = a.adapters && pairs.adapt(a.adapters + first, a.gate_up_bank.num_slots);
    if (adapted) add(a.gate_up_bank, pairs, element(a.x, first * hidden, a.format), pairs.row.data(), results);
    if (activate(results, between, pairs.count()) != FREIGHT_OK) throw std::bad_alloc();
    if (ranks) {
      const FreightGather gather{ranks, between, between + narrow, pairs.count(), inner * bytes_of(a.format), -1, a.threads};
      if (const FreightStatus status = freight_gather(&gather)) return status;
      between += narrow;
    }
    last.products(pairs, between, false, results, biases, products);
    count = static_cast<int64_t>(products.size());
    stage_all(products.data(), count, a.format, a.threads);
    multiply(products.data(), count, a.format, a.threads);
    if (adapted) add(a.down_bank, pairs, between, nullptr, results);
    sum(pairs.place.data(), results, first, rows);
    return FREIGHT_OK;
  }

  // Add to the products y of all pairs what their adapters add. index: the row of x of each pair, or null: its own.
  void add(FreightAdapters bank, const Pairs& pairs, const void* x, const int32_t* index, void* y) const {
    bank.x = x;
    bank.index = index;
    bank.y = y;
    bank.adapters = pairs.slot.data();
    bank.rows = pairs.count();
    bank.x_stride = bank.in_features;
    bank.format = a.format;
    bank.threads = a.threads;
    if (freight_add_adapters(&bank) != FREIGHT_OK) throw std::bad_alloc();
  }

  // Apply the activation to the results of the first products of `count` pairs. out: [count, inner].
  FreightStatus activate(const void* first, void* out, int64_t count) const {
    if (a.gated) {
      const FreightGated gated{first, out, count, inner, a.format, a.activation, a.limit, a.threads};
      return freight_gated(&gated);
    }
    const FreightActivated activated{first, out, count, inner, a.format, a.activation, a.threads};
    return freight_activated(&activated);
  }

  // Sum the weighted results of each row. place: [rows, top_k], the pair of each result.
  void sum(const int64_t* place, const void* results, int64_t first, int64_t rows) const {
    const int64_t chunks = (outputs + kSumColumns - 1) / kSumColumns;
    parallel_for(rows * chunks, threads_for(rows * outputs * a.top_k, a.threads), [&](int64_t task) {
      const int64_t row = task / chunks, from = task % chunks * kSumColumns;
      const int64_t end = std::min(outputs, from + kSumColumns), at = (first + row) * outputs;
      const void* base = a.base ? element(a.base, (first + row) * hidden + begin, a.format) : nullptr;
      const float* weights = a.weights + (first + row) * a.top_k;
      for (int64_t i = from; i < end; i += kLanes) {
        const int lanes = lanes_at(i, end);
        V16 total = base ? load_as(element(base, i, a.format), a.format, lanes) : V16{};
        for (int64_t slot = 0; slot < a.top_k; slot++) {
          const int64_t pair = place[row * a.top_k + slot];
          if (pair < 0) continue;
          total = total + set16(weights[slot]) * load_as(element(results, pair * outputs + i, a.format), a.format, lanes);
        }
        store_as(element(a.out, at + i, a.format), total, a.format, lanes);
      }
    });
  }
};

}  // namespace
}  // namespace freight

FREIGHT_API FreightStatus freight_experts(const FreightExperts* arguments) {
  FreightStatus status = FREIGHT_OK;
  const FreightStatus thrown = freight::status_of([&] {
    const int64_t most = std::max<int64_t>(1, freight::kMostPairs / std::max(1, arguments->top_k));
    const freight::Mixture mixture{*arguments};
    for (int64_t first = 0; first < arguments->rows && !status; first += most)
      status = mixture.compute(first, std::min(most, arguments->rows - first));
  });
  return status ? status : thrown;
}
