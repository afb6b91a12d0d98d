// The rows of one head of one sequence, for both kinds of decay; recurrence.cpp explains the recurrence.
//
// Each kind is compiled in a separate file, so that the code of one kind does not change how the other is compiled.
#pragma once
#include <stdexcept>
#include <vector>

#include "memory.h"
#include "parallel.h"
#include "state_product.h"
#include "stretches.h"

namespace freight {

// Compute the rows of all heads if each channel of a key has its own decay (recurrence_channels.cpp).
void recur_by_channel(const FreightRecurrence& a);

namespace {

// Memory for a head's open tile and its products. Rows of k_dim or v_dim values are padded.
struct Room {
  FloatRows k, u, q;           // the tile's rows as they are kept; q of the rows of this call
  FloatRows factors, products;  // rows that multiply S, and the results: k and q of each row alternating, or only q
  FloatRows matrix;            // S
  FloatRows decay;             // [kStateTile, 1], or by channel [kStateTile, k_dim]
  float* weights;              // [2, kStateTile]
  float *largest, *divisors;   // [v_dim]

  Room(int64_t k_dim, int64_t v_dim, bool by_channel) {
    const int64_t k_size = padded(k_dim), v_size = padded(v_dim), decays = by_channel ? k_size : 1;
    const int64_t floats = (4 * k_size + 3 * v_size + decays + 2) * kStateTile + (k_dim + 2) * v_size;
    thread_local WorkingMemory memory;
    float* next = reinterpret_cast<float*>(memory.of(floats * 4));
    const auto rows = [&](int64_t count, int64_t size) {
      float* own = next;
      next += count * size;
      return FloatRows{own, size};
    };
    k = rows(kStateTile, k_size), u = rows(kStateTile, v_size), q = rows(kStateTile, k_size);
    factors = rows(2 * kStateTile, k_size), products = rows(2 * kStateTile, v_size);
    matrix = rows(k_dim, v_size);
    decay = rows(kStateTile, decays), weights = rows(2, kStateTile).data;
    largest = rows(1, v_size).data, divisors = rows(1, v_size).data;
  }
};

inline __attribute__((always_inline)) float sum_of(const V16& sums) {
  VF sum = sums.v[0];
  for (int i = 1; i < kLanes / W; i++) sum = sum + sums.v[i];
  return reduce_add(sum);
}

float dot(const float* a, const float* b, int64_t size) {
  V16 sums{};
  for (int64_t i = 0; i < size; i += kLanes) sums = fma(load16(a + i), load16(b + i), sums);
  return sum_of(sums);
}

V16 exp16(V16 x) {
  return each([&](int i) { return exp(x.v[i]); });
}

// Prefetch the row after `row`, which is the next head's.
void prefetch_next(const char* row, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += FREIGHT_CACHE_LINE) __builtin_prefetch(row + bytes + line);
}

float exp_of(float x) { return exp(set1(x))[0]; }

// Read a row of one head, [size] of `format`, as floats; with `norm` divided by the root of its sum of squares plus
// 1e-6, times `factor`.
void read_head(const void* from, int32_t format, int64_t size, bool norm, float factor, float* to) {
  read_row(from, format, size, to);
  if (!norm) return;
  const V16 scale = set16(1.f / std::sqrt(dot(to, to, padded(size)) + 1e-6f)), then = set16(factor);
  for (int64_t i = 0; i < size; i += kLanes) store(to + i, load16(to + i) * scale * then);
}

// Read a row's key with the values that are kept of it.
void read_key(const FreightRecurrence& a, int64_t row, int64_t key_head, float* to) {
  const void* from = element(a.k, row * a.k_stride + key_head * a.k_dim, a.format);
  read_head(from, a.format, a.k_dim, a.norm, 1.f, to);
  for (int64_t i = 0; i < a.k_dim; i += kLanes) store(to + i, rounded_to(load16(to + i), a.format));
}

// One head. ByChannel: each channel of a key has its own decay. Products of decays are computed as the exponential of a
// difference of sums, so none is above 1.
template <FreightFormat F, bool ByChannel>
class Head {
 public:
  Head(const FreightRecurrence& a, int64_t head)
      : a_(a), head_(head), key_head_(head / (a.heads / a.key_heads)), room_(a.k_dim, a.v_dim, ByChannel) {}

  void run(int64_t sequence) {
    const int64_t position = first_position(a_, sequence);
    bool first = position > 0;
    for_tiles(a_, sequence, kStateTile, [&](const Stretch& part) {
      if (first) load_tile(part.source, (position - 1) % kStateTile + 1);
      first = false;
      if (part.position % kStateTile == 0) open_tile(part.source, part.target);
      const int64_t begin = part.position % kStateTile, end = begin + part.count;
      multiply(part, begin, end);
      for (int64_t t = begin; t < end; t++) finish_row(part, t, t - begin);
    });
  }

 private:
  const FreightRecurrence& a_;
  int64_t head_, key_head_;
  Room room_;

  StoredState<F> state(int64_t block) const {
    const int64_t index = block * a_.heads + head_;
    uint8_t* data = static_cast<uint8_t*>(a_.state) + index * a_.k_dim * a_.v_dim * bytes_of(F);
    uint16_t* scale = is_quantized(F) ? static_cast<uint16_t*>(a_.scale) + index * a_.v_dim : nullptr;
    return {data, scale, a_.k_dim, a_.v_dim};
  }
  char* kept_u(int64_t block, int64_t t) const {
    return element(a_.kept_u, ((block * kStateTile + t) * a_.heads + head_) * a_.v_dim, a_.format);
  }
  float* kept_decay(int64_t block, int64_t t) const {
    return a_.kept_decay + ((block * kStateTile + t) * a_.heads + head_) * (ByChannel ? a_.k_dim : 1);
  }

  // Load the first `count` rows of the tile that `block` holds.
  void load_tile(int64_t block, int64_t count) {
    for (int64_t t = 0; t < count; t++) {
      const int64_t key = ((block * kStateTile + t) * a_.key_heads + key_head_) * a_.k_dim;
      const char *k = element(a_.kept_k, key, a_.format), *u = kept_u(block, t);
      prefetch_next(k, a_.k_dim * bytes_of(a_.format));
      prefetch_next(u, a_.v_dim * bytes_of(a_.format));
      read_row(k, a_.format, a_.k_dim, room_.k.row(t));
      read_row(u, a_.format, a_.v_dim, room_.u.row(t));
      if constexpr (ByChannel)
        read_row(kept_decay(block, t), FREIGHT_FLOAT32, a_.k_dim, room_.decay.row(t));
      else
        *room_.decay.row(t) = *kept_decay(block, t);
    }
  }

  // Store S after the tile whose rows are loaded, or zeros at the start of a sequence.
  void open_tile(int64_t source, int64_t target) {
    if (source < 0) {
      std::fill_n(room_.matrix.data, a_.k_dim * room_.matrix.stride, 0.f);
      std::fill_n(room_.largest, a_.v_dim, 0.f);
    } else {
      advance(source);
    }
    encode_state(room_.matrix, room_.largest, room_.divisors, state(target));
  }

  // matrix = S after the tile whose rows are loaded; the loaded keys are multiplied by their decays.
  void advance(int64_t source) {
    const float* last = room_.decay.row(kStateTile - 1);
    for (int64_t t = 0; t < kStateTile; t++) {
      float *k = room_.k.row(t), *decay = room_.decay.row(t);
      if constexpr (ByChannel) {
        for (int64_t i = 0; i < a_.k_dim; i += kLanes)
          store(k + i, load16(k + i) * exp16(load16(last + i) - load16(decay + i)));
      } else {
        const V16 factor = set16(exp_of(*last - *decay));
        for (int64_t i = 0; i < a_.k_dim; i += kLanes) store(k + i, load16(k + i) * factor);
      }
    }
    if constexpr (ByChannel) {
      float* factors = room_.factors.row(0);
      for (int64_t i = 0; i < a_.k_dim; i += kLanes) store(factors + i, exp16(load16(last + i)));
      advance_state(state(source), static_cast<const float*>(factors), room_.k, room_.u, room_.matrix, room_.largest);
    } else {
      advance_state(state(source), exp_of(*last), room_.k, room_.u, room_.matrix, room_.largest);
    }
  }

  // Compute the decay from the tile's start to row t of the tile, which is row `row` of the batch; keep it in `target`.
  void decay_row(int64_t target, int64_t t, int64_t row) {
    if constexpr (ByChannel) {
      const float* own = a_.log_decay + (row * a_.heads + head_) * a_.k_dim;
      const VF least = set1(kLeastDecay);
      for (int64_t i = 0; i < a_.k_dim; i += kLanes) {
        V16 sum = load_as<FREIGHT_FLOAT32>(own + i, lanes_at(i, a_.k_dim));
        sum = each([&](int lanes) { return sum.v[lanes] < least ? least : sum.v[lanes]; });  // keeps NaN
        if (t) sum = sum + load16(room_.decay.row(t - 1) + i);
        store(room_.decay.row(t) + i, sum);
      }
      write_row(room_.decay.row(t), FREIGHT_FLOAT32, a_.k_dim, kept_decay(target, t));
    } else {
      const float own = std::max(a_.log_decay[row * a_.heads + head_], kLeastDecay);  // keeps NaN
      *room_.decay.row(t) = *kept_decay(target, t) = t ? own + *room_.decay.row(t - 1) : own;
    }
  }

  // Read keys, queries and decays of rows `begin` .. `end` of the tile, and multiply them by S.
  void multiply(const Stretch& part, int64_t begin, int64_t end) {
    const int64_t each_row = a_.delta ? 2 : 1;
    for (int64_t t = begin, i = 0; t < end; t++, i++) {
      const int64_t row = part.row + i;
      read_key(a_, row, key_head_, room_.k.row(t));
      const void* query = element(a_.q, row * a_.q_stride + key_head_ * a_.k_dim, a_.format);
      read_head(query, a_.format, a_.k_dim, a_.norm, a_.q_factor, room_.q.row(i));
      decay_row(part.target, t, row);
      [[maybe_unused]] const V16 of_head = ByChannel ? V16{} : set16(exp_of(*room_.decay.row(t)));
      float *with_k = room_.factors.row(i * each_row), *with_q = room_.factors.row(i * each_row + each_row - 1);
      for (int64_t c = 0; c < a_.k_dim; c += kLanes) {
        const V16 factor = ByChannel ? exp16(load16(room_.decay.row(t) + c)) : of_head;
        if (a_.delta) store(with_k + c, load16(room_.k.row(t) + c) * factor);
        store(with_q + c, load16(room_.q.row(i) + c) * factor);
      }
    }
    const StoredState<F> stored = state(part.target);
    if (part.count > 1) {
      decode_state(stored, room_.matrix);
      multiply_decoded(stored, room_.matrix, part.count * each_row, room_.factors, room_.products);
    } else if (a_.delta) {
      multiply_stored<2>(stored, room_.factors, room_.products);
    } else {
      multiply_stored<1>(stored, room_.factors, room_.products);
    }
  }

  // weights[j] = exp(G_t - G_j) k_j · x for the first `count` rows of the tile.
  void weigh(int64_t t, int64_t count, const float* x, float* weights) const {
    for (int64_t j = 0; j < count; j++) weights[j] = dot(room_.k.row(j), x, room_.k.stride);
    const V16 decays = exp16(set16(*room_.decay.row(t)) - load16(room_.decay.data));
    store(weights, load16(weights) * decays);
  }

  // with_q[j] = (exp(G_t - G_j) k_j) · q, and with_k[j] the same with the key of row t, for all rows of the tile up to
  // t.
  void weigh_channels(int64_t t, const float* q, float* with_k, float* with_q) const {
    const float *decay = room_.decay.row(t), *k = room_.k.row(t);
    for (int64_t j = 0; j <= t; j++) {
      V16 of_k{}, of_q{};
      for (int64_t c = 0; c < a_.k_dim; c += kLanes) {
        const V16 factor = exp16(load16(decay + c) - load16(room_.decay.row(j) + c));
        const V16 key = load16(room_.k.row(j) + c) * factor;
        if (a_.delta) of_k = fma(key, load16(k + c), of_k);
        of_q = fma(key, load16(q + c), of_q);
      }
      with_k[j] = sum_of(of_k), with_q[j] = sum_of(of_q);
    }
  }

  // Compute u and the result of row t of the tile, the i-th row of this part.
  void finish_row(const Stretch& part, int64_t t, int64_t i) {
    const int64_t row = part.row + i, v_dim = a_.v_dim;
    float *with_k = room_.weights, *with_q = room_.weights + kStateTile;
    if constexpr (ByChannel) {
      weigh_channels(t, room_.q.row(i), with_k, with_q);
    } else {
      if (a_.delta) weigh(t, t, room_.k.row(t), with_k);
      weigh(t, t + 1, room_.q.row(i), with_q);
    }
    const V16 beta = set16(a_.beta[row * a_.heads + head_]), skip = set16(a_.skip ? a_.skip[head_] : 0.f);
    const float* of_k = room_.products.row(a_.delta ? 2 * i : i);
    const float* of_q = room_.products.row(a_.delta ? 2 * i + 1 : i);
    for (int64_t c = 0; c < v_dim; c += kLanes) {
      const int count = lanes_at(c, v_dim);
      const V16 v = load_as(element(a_.v, row * a_.v_stride + head_ * v_dim + c, a_.format), a_.format, count);
      V16 u = v, out = load16(of_q + c);
      if (a_.delta) {
        V16 sum = load16(of_k + c);
        for (int64_t j = 0; j < t; j++) sum = fma(set16(with_k[j]), load16(room_.u.row(j) + c), sum);
        u = v - sum;
      }
      for (int64_t j = 0; j < t; j++) out = fma(set16(with_q[j]), load16(room_.u.row(j) + c), out);
      u = rounded_to(u * beta, a_.format);
      store(room_.u.row(t) + c, u);
      store_as(kept_u(part.target, t) + c * bytes_of(a_.format), u, a_.format, count);
      out = fma(set16(with_q[t]), u, out);
      if (a_.skip) out = out + skip * v;
      store_as(element(a_.out, (row * a_.heads + head_) * v_dim + c, a_.format), out, a_.format, count);
    }
  }
};

template <FreightFormat F, bool ByChannel>
void run_heads(const FreightRecurrence& a) {
  const int64_t tasks = int64_t{a.num_seqs} * a.heads;
  const int64_t elements = static_cast<int64_t>(a.k_dim) * a.v_dim;
  parallel_for(tasks, threads_for(tasks * elements, a.threads),
               [&](int64_t task) { Head<F, ByChannel>(a, task % a.heads).run(task / a.heads); });
}

template <bool ByChannel>
void run_all_heads(const FreightRecurrence& a) {
  switch (a.state_format) {
    case FREIGHT_FLOAT32: return run_heads<FREIGHT_FLOAT32, ByChannel>(a);
    case FREIGHT_BFLOAT16: return run_heads<FREIGHT_BFLOAT16, ByChannel>(a);
    case FREIGHT_INT8: return run_heads<FREIGHT_INT8, ByChannel>(a);
    case FREIGHT_E4M3FN: return run_heads<FREIGHT_E4M3FN, ByChannel>(a);
    case FREIGHT_E4M3FNUZ: return run_heads<FREIGHT_E4M3FNUZ, ByChannel>(a);
    default: throw std::invalid_argument("states have no such format");  // FREIGHT_FAILED, and nothing is written
  }
}

}  // namespace
}  // namespace freight
