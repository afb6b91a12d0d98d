// One task of attention: rows at adjacent positions of one sequence, some KV heads, some key splits.
//
// Keys are walked in tiles of 64 at absolute positions, with an online softmax (Milakov and Gimelshein 2018) in base 2.
// Every 1024 keys the running softmax is closed and merged into the row's result, in order. So a long sequence can be
// cut there and its parts computed by different threads (Dao et al. 2023, "Flash-Decoding") with the same bits. A tile
// or split that a row does not see leaves that row's state unchanged.
//
// `Tiles` (attention_amx.h, attention_bf16.h, attention_f32.h) does the arithmetic of a tile: it packs K and V, calling
// `between` after every 16 keys, and multiplies q with K and the probabilities with V. Rows of a task are numbered by
// position, then by query head of the group: row = i * group + g.
#pragma once
#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "attention_partial.h"
#include "attention_tile.h"
#include "rows.h"

namespace freight {

// Lower bound of the factors of scores: 0 times a score of -infinity would be NaN.
constexpr float kLeastFactor = std::numeric_limits<float>::min();

struct Task {
  int sequence;
  int position, positions;  // of the rows: the first position, and how many
  int64_t row;              // the first row in the batch
  int head, heads;          // KV heads
  int split, splits;        // key splits
  int64_t partial = -1;     // index of its partial results; -1: it has all keys of its rows and finishes them
};

// Data that the tasks of a call share.
template <class Tiles>
struct Call {
  const FreightAttention& a;
  Tiles tiles;
  std::vector<float> k_factor;   // [num_kv_heads] if each head has one static K scale, which multiplies its scores
  std::vector<uint8_t> nothing;  // zeros, as long as a token's heads; read in place of keys that no row sees
  Partial* partials;
  float* partial_outs;  // [][value_dim]

  int group() const { return a.num_heads / a.num_kv_heads; }  // query heads per KV head

  // The keys that a row at `position` sees are [first_key, end_key). Both rise with the position.
  int first_key(int position) const { return a.window ? std::max(0, position - a.window + 1) : 0; }
  int end_key(int sequence, int position) const {
    if (!a.both_ways) return position + 1;
    const int length = a.context_lens[sequence];
    return a.window && a.window < length - position ? position + a.window : length;
  }
};

// Say whether cache lines of a tile are prefetched round-robin from 8 groups of its tokens. The groups lie in different
// pages of memory, and the hardware prefetcher of an Intel core runs in each of them, so that more reads are in flight
// than the core can issue. (Compared with a sequential sum, a Xeon reads randomly placed blocks of 8 KB line by line at
// half the speed, and from 8 groups at 0.75.) On AMD only prefetching in the order of memory was measured, so it is
// kept.
inline bool prefetches_in_groups() {
#if defined(__x86_64__)
  static const bool is_intel = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") != 0;
  }();
  return is_intel;
#else
  return false;
#endif
}

// This thread's working memory, at least `floats` floats at a multiple of 64 bytes; it grows and is kept.
inline float* working_memory(size_t floats) {
  static thread_local std::vector<float> memory;
  if (memory.size() < floats + 16) memory.resize(floats + 16);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

// One task. `Walk` derives from it and computes the rows of a tile (attention_vectors.h, attention_amx.h): it has
// begin_split(), walk(tile), end_split(), and partial(h, row), the softmax state of a row of the task's h-th KV head.
template <class Tiles, class Walk>
class Worker {
 public:
  // row_stride: rows of `out` from one KV head to the next.
  Worker(const Call<Tiles>& call, const Task& task, int row_stride)
      : call(call),
        a(call.a),
        tiles(call.tiles),
        task(task),
        group(call.group()),
        rows(task.positions * group),
        row_stride(row_stride),
        states(rows * task.heads),
        q_size((tiles.q_size(rows) + 15) / 16 * 16) {
    const size_t dim = tiles.value_dim, outs = static_cast<size_t>(row_stride) * task.heads * dim;
    const size_t centers = (static_cast<size_t>(states) * a.center_size * 2 + 15) / 16 * 16;
    const size_t sizes[] = {q_size * task.heads, tiles.k_size(), tiles.v_size(),
                            tiles.p_size(task.heads, rows), outs,           centers,        states * dim};
    float** parts[] = {&q, &k, &v, &p, &out, &center, &merged_out};
    float* memory = working_memory(std::accumulate(std::begin(sizes), std::end(sizes), size_t{0}));
    for (int i = 0; i < 7; i++) *parts[i] = memory, memory += sizes[i];
    if (task.partial >= 0) merged_out = call.partial_outs + task.partial * dim;
  }

  void run() {
    const int dim = tiles.value_dim;
    std::vector<Partial> own(task.partial < 0 ? states : 0);
    Partial* merged = task.partial < 0 ? own.data() : call.partials + task.partial;
    std::fill(merged, merged + states, Partial());
    std::fill(merged_out, merged_out + static_cast<size_t>(states) * dim, 0.0f);
    read_queries();
    find_keys(begin_of(task.split), end_of(task.split), places[turn]);
    if (in_groups) start_ahead(&places[turn]), prefetch(all_work);  // the full first tile, before its heads are read
    for (int split = task.split; split < task.split + task.splits; split++) {
      walk_of_task().begin_split();
      std::fill(out, out + static_cast<size_t>(row_stride) * task.heads * dim, 0.0f);
      walk_split(split);
      walk_of_task().end_split();
      for (int i = 0; i < states; i++)
        merge(merged[i], merged_out + static_cast<size_t>(i) * dim, walk_of_task().partial(i / rows, i % rows),
              out_of(i / rows, i % rows), dim);
    }
    if (task.partial >= 0) return;
    for (int i = 0; i < states; i++) {
      const int head = (task.head + i / rows) * group + i % group;
      finish(a, task.row + i % rows / group, head, merged[i], merged_out + static_cast<size_t>(i) * dim);
    }
  }

 protected:
  // 64 keys. Tokens that no row sees point to `nothing`, and so do their scales.
  struct Tile {
    int key;         // position of the first key
    int begin, end;  // the keys that some row sees
    const uint8_t *k[kKeyTile], *v[kKeyTile];              // each token's first head
    const uint8_t *k_scale[kKeyTile], *v_scale[kKeyTile];  // if tokens have scales
    const uint8_t* rotated[kKeyTile];                      // as k, with group scales
  };

  Walk& walk_of_task() { return static_cast<Walk&>(*this); }

  void read_queries() {
    float values[kMaxHeadDim];
    const bool scaled = a.scales == FREIGHT_STATIC_SCALES && call.k_factor.empty();
    for (int h = 0; h < task.heads; h++)
      for (int row = 0; row < rows; row++) {
        const int kv_head = task.head + h, head = kv_head * group + row % group;
        const int64_t from = (task.row + row / group) * a.q_stride + static_cast<int64_t>(head) * a.k_dim;
        __builtin_prefetch(element(a.q, from + 4 * a.q_stride, a.q_type));
        __builtin_prefetch(static_cast<const char*>(element(a.q, from + 4 * a.q_stride, a.q_type)) + 64);
        read_row(element(a.q, from, a.q_type), a.q_type, a.k_dim, values);
        if (a.center_size) read_center(values, kv_head, center_of(h * rows + row));
        if (scaled) {
          const float* scale = static_cast<const float*>(a.k.scale) + static_cast<size_t>(kv_head) * a.k_dim;
          for (int d = 0; d < a.k_dim; d++) values[d] *= scale[d];
        }
        tiles.pack_q(values, row, q + h * q_size);
      }
  }

  float* out_of(int h, int row) const { return out + static_cast<size_t>(h * row_stride + row) * tiles.value_dim; }

  // Bytes of one KV head of a token in the pages.
  static int64_t head_bytes(int dim) { return static_cast<int64_t>(dim) * bytes_of(Tiles::format); }

  int64_t rotated_bytes() const { return static_cast<int64_t>(a.k_dim - a.v_dim) * bytes_of(FREIGHT_BFLOAT16); }

  bool v_is_in_k() const {
    const auto first = reinterpret_cast<uintptr_t>(a.k.data), v = reinterpret_cast<uintptr_t>(a.v.data);
    return v >= first && v < first + head_bytes(a.k_dim);
  }

  float* center_of(int state) const { return center + static_cast<size_t>(state) * a.center_size * 2; }

  // The factor from a product of q and k to a score in base 2, or with a soft cap to the input of `softened`.
  float coefficient() const {
    return a.softmax_scale * (a.soft_cap > 0.0f ? 2.0f / a.soft_cap : 1.0f) * 1.44269504088896341f;
  }

  // Scores times 2 log2(e) / soft_cap -> soft-capped scores in base 2.
  VF softened(VF s) const { return set1(a.soft_cap * 1.44269504088896341f) * tanh_of_exp2(s); }

  // Compute the factors of the cosine and the sine of each centered pair in the scores of a row.
  void read_center(const float* q, int kv_head, float* to) const {
    const int64_t first = static_cast<int64_t>(kv_head) * a.center_size;
    const float *b1 = a.center_parts + first, *b2 = b1 + static_cast<int64_t>(a.num_kv_heads) * a.center_size;
    const float factor = coefficient();
    for (int i = 0; i < a.center_size; i++) {
      const int pair = a.center_pairs[first + i];
      const float q1 = q[pair] * factor, q2 = q[pair + a.rotary_dim / 2] * factor;
      to[2 * i] = q1 * b1[i] + q2 * b2[i];
      to[2 * i + 1] = q2 * b1[i] - q1 * b2[i];
    }
  }

  // The keys of a split that some row sees: full tiles from the first one on.
  int end_key(int i) const { return call.end_key(task.sequence, task.position + i); }
  int64_t begin_of(int split) const {
    return std::max<int64_t>(split * kKeySplit, call.first_key(task.position)) / kKeyTile * kKeyTile;
  }
  int64_t end_of(int split) const {
    return std::min((split + 1) * kKeySplit, int64_t{end_key(task.positions - 1)});
  }

  void walk_split(int split) {
    const int64_t end = end_of(split);
    for (int64_t key = begin_of(split); key < end; key += kKeyTile) {
      const Tile& tile = places[turn];
      turn ^= 1;
      const bool in_split = key + kKeyTile < end;
      const int64_t following = in_split ? key + kKeyTile : begin_of(split + 1);
      const bool is_last = !in_split && split + 1 == task.split + task.splits;
      if (!is_last) find_keys(following, in_split ? end : end_of(split + 1), places[turn]);
      start_ahead(is_last ? nullptr : &places[turn]);
      walk_of_task().walk(tile);
    }
  }

  void find_keys(int64_t key, int64_t end, Tile& tile) const {
    tile.key = static_cast<int>(key);
    tile.begin = std::max(0, call.first_key(task.position) - tile.key);
    tile.end = static_cast<int>(std::min<int64_t>(kKeyTile, end - key));
    const int32_t* table = a.block_tables + static_cast<int64_t>(task.sequence) * a.max_blocks;
    int block = (tile.key + tile.begin) / a.block_size, offset = (tile.key + tile.begin) % a.block_size;
    for (int i = 0; i < kKeyTile; i++)
      tile.k[i] = tile.v[i] = tile.rotated[i] = tile.k_scale[i] = tile.v_scale[i] = call.nothing.data();
    for (int i = tile.begin; i < tile.end; i++) {
      tile.k[i] = vectors_of(a.k, table[block], offset);
      tile.v[i] = vectors_of(a.v, table[block], offset);
      if (a.scales >= FREIGHT_TOKEN_SCALES) {
        tile.k_scale[i] = scales_of(a.k, table[block], offset);
        tile.v_scale[i] = scales_of(a.v, table[block], offset);
      }
      if (grouped) tile.rotated[i] = vectors_of(a.rotated, table[block], offset);
      if (++offset == a.block_size) offset = 0, block++;
    }
  }

  // The heads of this task in the pages of keys (0) or of values (1): `runs` runs of `size` bytes in each token.
  struct Side {
    int64_t first, size, stride, scale_first, scale_stride;
    int runs;
    bool apart, scaled;
  };
  Side side_of(int side) const {
    const bool apart = side && grouped;
    const FreightPages& pages = apart ? a.rotated : side ? a.v : a.k;
    const int64_t bytes = apart ? rotated_bytes() : head_bytes(side || grouped ? a.v_dim : a.k_dim);
    const bool one = pages.head == bytes;  // heads are neighbours
    const bool scaled = a.scales >= FREIGHT_TOKEN_SCALES && !apart;
    return {task.head * pages.head, one ? bytes * task.heads : bytes, pages.head, task.head * pages.scale_head,
            pages.scale_head,       one ? 1 : task.heads,             apart,      scaled};
  }

  // Number of steps in which `prefetch` fetches a tile.
  int steps_of_tile() const {
    int64_t all = 0;
    for (int i = 0; i < sides; i++) all += side[i].runs * ((side[i].size + step_bytes - 1) / step_bytes) * group_tokens;
    return static_cast<int>(all);
  }

  // Progress of prefetching in the next tile: keys, then values; a token of each group; a run of its memory; and a
  // place in the run. `tokens` and `from` follow from these.
  struct Ahead {
    int side = 0, token = 0, run = 0;
    int64_t place = 0;
    const uint8_t* const* tokens = nullptr;
    int64_t from = 0;
  };

  void start_ahead(const Tile* tile) {
    next = tile, ahead = Ahead(), due = 0;
    if (next) find_place();
  }

  void find_place() {
    const Side& of = side[ahead.side];
    ahead.tokens = (of.apart ? next->rotated : ahead.side ? next->v : next->k) + ahead.token;
    ahead.from = of.first + ahead.run * of.stride + ahead.place;
    if (!of.scaled || ahead.place) return;
    const uint8_t* const* scales = (ahead.side ? next->v_scale : next->k_scale) + ahead.token;
    for (int token = 0; token < kKeyTile; token += group_tokens)
      __builtin_prefetch(scales[token] + of.scale_first + ahead.run * of.scale_stride);
  }

  void next_place() {
    const Side& of = side[ahead.side];
    if ((ahead.place += step_bytes) >= of.size) {
      ahead.place = 0;
      if (++ahead.run == of.runs) {
        ahead.run = 0;
        if (++ahead.token == group_tokens) ahead.token = 0, ahead.side++;
      }
    }
    if (ahead.side < sides)
      find_place();
    else
      next = nullptr;
  }

  // Prefetch a part of the next tile into L2: a tile of all heads does not fit in L1 together with the packed tile. It
  // is called at short intervals during the work on this tile, because many prefetches at a time would wait for each
  // other. `work` is the work until the next call, in keys or values that are packed meanwhile. The loops are not
  // separate functions: GCC takes a function that only prefetches for one without effects, and removes its calls.
  void prefetch(int work) {
    for (due += work * steps; due >= all_work && next; due -= all_work) {
      const uint8_t* const* tokens = ahead.tokens;
      if (in_groups) {
        for (int token = 0; token < kKeyTile; token += kKeyTile / 8) __builtin_prefetch(tokens[token] + ahead.from, 0, 2);
      } else {
        const uint8_t* first = *tokens + ahead.from;
        const int64_t bytes = std::min(step_bytes, side[ahead.side].size - ahead.place);
        for (int64_t i = 0; i < bytes; i += FREIGHT_CACHE_LINE) __builtin_prefetch(first + i, 0, 2);
      }
      next_place();
    }
  }

  void pack_keys(const Tile& tile, int head, float* to) {
    const int64_t offset = a.k.head * head;
    const auto between = [this](int keys) { prefetch(keys); };
    if constexpr (is_quantized(Tiles::format))
      if (grouped) {
        const int first = a.k_dim - a.v_dim;
        tiles.pack_k_groups(tile.rotated, a.rotated.head * head, first, tile.k, offset, group_scale[0], to, between);
        return;
      }
    tiles.pack_k(tile.k, offset, to, between);
  }

  void pack_values(const Tile& tile, int head, float* to) {
    const int64_t offset = a.v.head * head;
    const auto between = [this](int keys) { prefetch(keys); };
    if constexpr (is_quantized(Tiles::format))
      if (grouped) return tiles.pack_v_groups(tile.v, offset, group_scale[0], to, between);
    tiles.pack_v(tile.v, offset, to, between);
  }

  static float token_scale(const uint8_t* stored) {
    return bf16_to_float(*reinterpret_cast<const uint16_t*>(stored));
  }

  // Read the factors of the scores and of the probabilities.
  void read_scales(const Tile& tile, int head) {
    const float factor = coefficient() * (call.k_factor.empty() ? 1.0f : call.k_factor[head]);
    std::fill(k_scale, k_scale + kKeyTile, factor);
    if (grouped) read_group_scales(tile, head);
    if (a.scales != FREIGHT_TOKEN_SCALES) return;
    std::fill(v_scale, v_scale + kKeyTile, 0.0f);
    for (int i = tile.begin; i < tile.end; i++) {
      k_scale[i] = std::max(factor * token_scale(tile.k_scale[i] + head * a.k.scale_head), kLeastFactor);
      v_scale[i] = token_scale(tile.v_scale[i] + head * a.v.scale_head);
    }
  }

  // Read the group scales, which multiply the values before the products.
  void read_group_scales(const Tile& tile, int head) {
    const int groups = a.v_dim / FREIGHT_SCALE_GROUP;
    std::fill(group_scale[0], group_scale[0] + groups * kKeyTile, 0.0f);
    for (int i = tile.begin; i < tile.end; i++) {
      const uint8_t* stored = tile.k_scale[i] + head * a.k.scale_head;
      for (int g = 0; g < groups; g++) group_scale[g][i] = token_scale(stored + 2 * g);
    }
  }

  // Keys of the tile that the rows of the i-th position see: [begin, end), empty if end <= begin.
  void seen(const Tile& tile, int i, int& begin, int& end) const {
    const int position = task.position + i;
    begin = std::max(0, call.first_key(position) - tile.key);
    end = std::min(kKeyTile, call.end_key(task.sequence, position) - tile.key);
  }

  bool sees_all(const Tile& tile, int i) const {
    int begin, end;
    seen(tile, i, begin, end);
    return begin <= tile.begin && end >= tile.end;
  }

  bool all_see_all(const Tile& tile) const { return sees_all(tile, 0) && sees_all(tile, task.positions - 1); }

  // Say whether the tile has an infinity or NaN that would reach rows which do not see its key: 0 times it is NaN.
  bool unseen_infinities(const Tile& tile, const float* values) const {
    return !all_see_all(tile) && !tiles.finite(values);
  }

  // The tile with only the values that the rows of the i-th position see.
  Tile seen_alone(const Tile& tile, int i) const {
    int begin, end;
    seen(tile, i, begin, end);
    Tile own = tile;
    for (int key = 0; key < kKeyTile; key++)
      if (key < begin || key >= end) own.v[key] = call.nothing.data();
    return own;
  }

  // Say whether any of n rows sees a key of the tile.
  bool sees_any(const Tile& tile, int row, int n) const {
    int begin, end, unused;
    seen(tile, row / group, begin, unused);
    seen(tile, (row + n - 1) / group, unused, end);
    return begin < kKeyTile && end > 0;
  }

  // Say whether all of n rows see all keys of the tile.
  bool whole(const Tile& tile, int row, int n) const {
    int begin, end, unused;
    seen(tile, row / group, unused, end);
    seen(tile, (row + n - 1) / group, begin, unused);
    return begin <= 0 && end >= kKeyTile;
  }

  const float* v_scales() const { return a.scales == FREIGHT_TOKEN_SCALES ? v_scale : nullptr; }

  const Call<Tiles>& call;
  const FreightAttention& a;
  const Tiles& tiles;
  const Task& task;
  const bool in_groups = prefetches_in_groups();  // a prefetch step is a line of each group, or 8 of one token
  const int group_tokens = in_groups ? 8 : kKeyTile;
  const int64_t step_bytes = (in_groups ? 1 : 8) * FREIGHT_CACHE_LINE;
  const Tile* next = nullptr;  // the next tile; null once all of it is prefetched
  const bool v_in_k = v_is_in_k(), grouped = a.scales == FREIGHT_GROUP_SCALES;
  Ahead ahead;
  Tile places[2];  // this tile and the next
  int turn = 0;
  const Side side[2] = {side_of(0), side_of(1)};
  const int sides = v_in_k && !grouped ? 1 : 2, steps = steps_of_tile();
  int all_work = 2 * kKeyTile * task.heads;  // the work of a tile
  int64_t due = 0;                           // work since the last step, times `steps`: a step is due at all_work
  const int group, rows, row_stride, states;  // query heads per KV head; rows of one KV head; of all of the task's
  const size_t q_size;                        // floats of one KV head's queries
  float *q, *k, *v, *p, *out, *center, *merged_out;
  alignas(64) float k_scale[kKeyTile], v_scale[kKeyTile];
  alignas(64) float group_scale[kMaxHeadDim / FREIGHT_SCALE_GROUP][kKeyTile];
};

}  // namespace freight
