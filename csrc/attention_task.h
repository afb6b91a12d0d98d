// One task of attention: rows at neighbouring positions of one sequence, some KV heads, some key splits.
//
// Keys are walked in tiles of 64 at absolute positions, with an online softmax (Milakov and Gimelshein 2018) in base 2.
// Every 1024 keys the running softmax is closed and merged into the row's result, in order: so a long sequence can be
// cut there and its parts computed by different threads (Dao et al. 2023, "Flash-Decoding") with the same bits. A tile
// or split that a row does not see leaves that row's state unchanged.
//
// `Tiles` (attention_amx.h, attention_bf16.h, attention_f32.h) does the arithmetic of a tile: it packs K and V, calling
// `between` after every 16 keys, and multiplies q with K and the probabilities with V. Rows of a task are numbered by
// position, then by query head of the group: row = i * group + g. Up to max_rows rows are multiplied at once: each
// number of them by its own code, or, if `pipelined`, all by the same. Where rows are `side_by_side` or `pipelined`, a
// Tiles::Block keeps what is computed of them; elsewhere a row's softmax is computed after another's.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention_partial.h"
#include "attention_tile.h"
#include "rows.h"

namespace freight {

struct Task {
  int sequence;
  int position, positions;  // of the rows: the first, how many
  int64_t row;              // of the batch, where they begin
  int head, heads;          // KV heads
  int split, splits;        // key splits
  int64_t partial = -1;     // where its partial results lie; -1: it sees all keys of its rows and finishes them
};

// What the tasks of a call share.
template <class Tiles>
struct Call {
  const FreightAttention& a;
  Tiles tiles;
  std::vector<float> k_factor;   // [num_kv_heads] if each head has one static K scale, which multiplies its scores
  std::vector<uint8_t> nothing;  // zeros as far as a token's heads reach, read in place of keys that no row sees
  Partial* partials;
  float* partial_outs;  // [][value_dim]

  int group() const { return a.num_heads / a.num_kv_heads; }  // query heads per KV head
  int first_key(int position) const { return a.window ? std::max(0, position - a.window + 1) : 0; }
};

// `floats` floats of this thread's own, at a multiple of 64 bytes; they grow and are kept.
inline float* working_memory(size_t floats) {
  static thread_local std::vector<float> memory;
  if (memory.size() < floats + 16) memory.resize(floats + 16);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

template <class Tiles>
class Worker {
 public:
  Worker(const Call<Tiles>& call, const Task& task)
      : call(call),
        a(call.a),
        tiles(call.tiles),
        task(task),
        group(call.group()),
        rows(task.positions * group),
        states(rows * task.heads),
        q_size((tiles.q_size(rows) + 15) / 16 * 16),
        running(states) {
    const size_t outs = static_cast<size_t>(states) * tiles.value_dim;
    const size_t sizes[] = {q_size * task.heads, tiles.k_size(), tiles.v_size(), tiles.p_size(), outs};
    const size_t centers = static_cast<size_t>(states) * a.center_size * 2;
    float* memory = working_memory(sizes[0] + sizes[1] + sizes[2] + sizes[3] + 2 * sizes[4] + centers);
    float** parts[] = {&q, &k, &v, &p, &out};
    for (int i = 0; i < 5; i++) *parts[i] = memory, memory += sizes[i];
    center = memory + sizes[4];
    merged_out = task.partial < 0 ? memory : call.partial_outs + task.partial * tiles.value_dim;
  }

  void run() {
    const int dim = tiles.value_dim;
    std::vector<Partial> own(task.partial < 0 ? states : 0);
    Partial* merged = task.partial < 0 ? own.data() : call.partials + task.partial;
    std::fill(merged, merged + states, Partial());
    std::fill(merged_out, merged_out + static_cast<size_t>(states) * dim, 0.0f);
    read_queries();
    for (int split = task.split; split < task.split + task.splits; split++) {
      std::fill(running.begin(), running.end(), Running());
      std::fill(out, out + static_cast<size_t>(states) * dim, 0.0f);
      walk_split(split);
      for (int i = 0; i < states; i++) {
        const Partial part{running[i].best, reduce_add(running[i].total)};
        merge(merged[i], merged_out + static_cast<size_t>(i) * dim, part, out + static_cast<size_t>(i) * dim, dim);
      }
    }
    if (task.partial >= 0) return;
    for (int i = 0; i < states; i++) {
      const int head = (task.head + i / rows) * group + i % group;
      finish(a, task.row + i % rows / group, head, merged[i], merged_out + static_cast<size_t>(i) * dim);
    }
  }

 private:
  struct Running {
    float best = -kInfinity;
    VF total = {};  // by lane
  };

  // 64 keys. Tokens that no row sees are `nothing`.
  struct Tile {
    int key;         // position of the first
    int begin, end;  // those that some row sees
    const uint8_t *k[kKeyTile], *v[kKeyTile];              // each token's first head
    const uint8_t *k_scale[kKeyTile], *v_scale[kKeyTile];  // of those that some row sees, if tokens have scales
    const uint8_t* rotated[kKeyTile];                      // as k, with group scales
  };

  void read_queries() {
    float values[kMaxHeadDim];
    const bool scaled = a.scales == FREIGHT_STATIC_SCALES && call.k_factor.empty();
    for (int h = 0; h < task.heads; h++)
      for (int row = 0; row < rows; row++) {
        const int kv_head = task.head + h, head = kv_head * group + row % group;
        const int64_t from = (task.row + row / group) * a.q_stride + static_cast<int64_t>(head) * a.k_dim;
        read_row(element(a.q, from, a.q_type), a.q_type, a.k_dim, values);
        if (a.center_size) read_center(values, kv_head, center_of(h * rows + row));
        if (scaled) {
          const float* scale = static_cast<const float*>(a.k.scale) + static_cast<size_t>(kv_head) * a.k_dim;
          for (int d = 0; d < a.k_dim; d++) values[d] *= scale[d];
        }
        tiles.pack_q(values, row, q + h * q_size);
      }
  }

  float* out_of(int h, int row) const { return out + static_cast<size_t>(h * rows + row) * tiles.value_dim; }

  // Of one KV head of a token in the pages.
  static int64_t head_bytes(int dim) { return static_cast<int64_t>(dim) * bytes_of(Tiles::format); }

  int64_t rotated_bytes() const { return static_cast<int64_t>(a.k_dim - a.v_dim) * bytes_of(FREIGHT_BFLOAT16); }

  bool v_is_in_k() const {
    const auto first = reinterpret_cast<uintptr_t>(a.k.data), v = reinterpret_cast<uintptr_t>(a.v.data);
    return v >= first && v < first + head_bytes(a.k_dim);
  }

  float* center_of(int state) const { return center + static_cast<size_t>(state) * a.center_size * 2; }

  // The factor from a product of q and k to a score: in base 2, or as `soften` takes it.
  float coefficient() const {
    return a.softmax_scale * (a.soft_cap > 0.0f ? 2.0f / a.soft_cap : 1.0f) * 1.44269504088896341f;
  }

  // The factors of the cosine and the sine of each centered pair in the scores of a row.
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

  // scores += the contribution of the keys' center. s: the scores of one state with the 64 keys of a tile.
  void add_center(const Tile& tile, int state, VF* s) const {
    const int half = a.rotary_dim / 2;
    const int32_t* pairs = a.center_pairs + static_cast<int64_t>(task.head + state / rows) * a.center_size;
    const int64_t first = static_cast<int64_t>(tile.key / kKeyTile) * half;
    const float* factors = center_of(state);
    for (int i = 0; i < a.center_size; i++) {
      const int64_t from = (first + pairs[i]) * kKeyTile;
      const VF of_cos = set1(factors[2 * i]), of_sin = set1(factors[2 * i + 1]);
      for (int j = 0; j < kKeyTile / W; j++) {
        s[j] = fma(load(a.center_cos + from + j * W), of_cos, s[j]);
        s[j] = fma(load(a.center_sin + from + j * W), of_sin, s[j]);
      }
    }
  }

  // Scores, times 2 log2(e) / soft_cap -> soft-capped, in base 2.
  void soften(VF* s) const {
    const VF cap = set1(a.soft_cap * 1.44269504088896341f);
    for (int i = 0; i < kKeyTile / W; i++) s[i] = cap * tanh_of_exp2(s[i]);
  }

  void walk_split(int split) {
    const int64_t end = std::min((split + 1) * kKeySplit, int64_t{task.position} + task.positions);
    const int64_t begin = std::max<int64_t>(split * kKeySplit, call.first_key(task.position)) / kKeyTile * kKeyTile;
    Tile tiles_of_keys[2];
    if (begin < end) find_keys(begin, end, tiles_of_keys[0]);
    int turn = 0;
    for (int64_t key = begin; key < end; key += kKeyTile, turn ^= 1) {
      Tile& tile = tiles_of_keys[turn];
      next = key + kKeyTile < end ? &tiles_of_keys[turn ^ 1] : nullptr, asked_for = 0;
      if (next) find_keys(key + kKeyTile, end, tiles_of_keys[turn ^ 1]);
      for (int h = 0; h < task.heads; h++) walk_tile(tile, h);
    }
  }

  void find_keys(int64_t key, int64_t end, Tile& tile) const {
    tile.key = static_cast<int>(key);
    tile.begin = std::max(0, call.first_key(task.position) - tile.key);
    tile.end = static_cast<int>(std::min<int64_t>(kKeyTile, end - key));
    const int32_t* table = a.block_tables + static_cast<int64_t>(task.sequence) * a.max_blocks;
    int block = (tile.key + tile.begin) / a.block_size, offset = (tile.key + tile.begin) % a.block_size;
    for (int i = 0; i < kKeyTile; i++) tile.k[i] = tile.v[i] = tile.rotated[i] = call.nothing.data();
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

  // Prefetch a few more cache lines of the next tile: whole tokens, K first, in memory order; V that is part of K comes
  // with it, and in V's place what K has apart. Into L2, because a tile of all heads does not fit in L1 beside what this
  // one is packed into. Called all along the work on this tile, because a core has few outstanding misses at a time and
  // stalls on more. The loops are no functions of their own: GCC takes one that only prefetches for one without effects,
  // and leaves its calls out.
  void prefetch() {
    if (!next) return;
    const int calls = kPrefetches * task.heads, until = asked_for + (2 * kKeyTile + calls - 1) / calls;
    for (; asked_for < std::min(until, 2 * kKeyTile); asked_for++) {
      const bool is_v = asked_for >= kKeyTile;
      const int i = asked_for % kKeyTile;
      if (is_v && v_in_k && !grouped) continue;
      const bool apart = is_v && grouped;
      const FreightPages& pages = apart ? a.rotated : is_v ? a.v : a.k;
      const int64_t bytes = apart ? rotated_bytes() : head_bytes(is_v || grouped ? a.v_dim : a.k_dim);
      const int runs = pages.head == bytes ? 1 : task.heads;  // heads that are neighbours are one run
      const int64_t size = bytes * task.heads / runs;
      const uint8_t* run = (apart ? next->rotated[i] : is_v ? next->v[i] : next->k[i]) + task.head * pages.head;
      for (int j = 0; j < runs; j++, run += pages.head)
        for (const uint8_t* line = run; line < run + size; line += 64) __builtin_prefetch(line, 0, kLocality);
      if (a.scales < FREIGHT_TOKEN_SCALES || apart || i < next->begin || i >= next->end) continue;
      const uint8_t* scale = (is_v ? next->v_scale[i] : next->k_scale[i]) + task.head * pages.scale_head;
      for (int j = 0; j < runs; j++, scale += pages.scale_head) __builtin_prefetch(scale);
    }
  }

  void walk_tile(const Tile& tile, int h) {
    read_scales(tile, task.head + h);
    pack_keys(tile, task.head + h);
    if constexpr (Tiles::side_by_side)
      if (rows <= Tiles::max_rows && sees_all(tile, 0) && sees_all(tile, task.positions - 1)) {
        typename Tiles::Block block;
        scores(h, 0, rows, block);
        softmax(tile, h, 0, rows, block);
        pack_values(tile, task.head + h);  // while the softmax, a long chain, is still computed
        accumulate(h, 0, rows, block);
        return;
      }
    pack_values(tile, task.head + h);
    if ((sees_all(tile, 0) && sees_all(tile, task.positions - 1)) || tiles.finite(v)) {
      walk_rows(tile, h, 0, rows);
      return;
    }
    // A probability of 0 times infinity or NaN would reach rows that do not see that key.
    for (int i = 0; i < task.positions; i++) {
      int begin, end;
      seen(tile, i, begin, end);
      Tile own = tile;
      for (int key = 0; key < kKeyTile; key++)
        if (key < begin || key >= end) own.v[key] = call.nothing.data();
      pack_values(own, task.head + h);
      walk_rows(tile, h, i * group, group);
    }
  }

  void pack_keys(const Tile& tile, int head) {
    const int64_t offset = a.k.head * head;
    const auto between = [this] { prefetch(); };
    if constexpr (is_quantized(Tiles::format))
      if (grouped) {
        const int first = a.k_dim - a.v_dim;
        tiles.pack_k_groups(tile.rotated, a.rotated.head * head, first, tile.k, offset, group_scale[0], k, between);
        return;
      }
    tiles.pack_k(tile.k, offset, k, between);
  }

  void pack_values(const Tile& tile, int head) {
    const int64_t offset = a.v.head * head;
    const auto between = [this] { prefetch(); };
    if constexpr (is_quantized(Tiles::format))
      if (grouped) return tiles.pack_v_groups(tile.v, offset, group_scale[0], v, between);
    tiles.pack_v(tile.v, offset, v, between);
  }

  static float token_scale(const uint8_t* stored) {
    return bf16_to_float(*reinterpret_cast<const uint16_t*>(stored));
  }

  // The factors of the scores, and of the probabilities.
  void read_scales(const Tile& tile, int head) {
    const float factor = coefficient() * (call.k_factor.empty() ? 1.0f : call.k_factor[head]);
    std::fill(k_scale, k_scale + kKeyTile, factor);
    if (grouped) read_group_scales(tile, head);
    if (a.scales != FREIGHT_TOKEN_SCALES) return;
    std::fill(v_scale, v_scale + kKeyTile, 0.0f);
    for (int i = tile.begin; i < tile.end; i++) {
      k_scale[i] = factor * token_scale(tile.k_scale[i] + head * a.k.scale_head);
      v_scale[i] = token_scale(tile.v_scale[i] + head * a.v.scale_head);
    }
  }

  // What multiplies the values before the products.
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
    end = std::min(kKeyTile, position + 1 - tile.key);
  }

  bool sees_all(const Tile& tile, int i) const {
    int begin, end;
    seen(tile, i, begin, end);
    return begin <= tile.begin && end >= tile.end;
  }

  // In blocks of rows whose sums fit in registers; blocks that see nothing of the tile are left out.
  void walk_rows(const Tile& tile, int h, int first, int count) {
    const int blocks = (count + Tiles::max_rows - 1) / Tiles::max_rows, step = (count + blocks - 1) / blocks;
    if constexpr (Tiles::pipelined) {
      pipeline(tile, h, first, count, step);
    } else if constexpr (Tiles::side_by_side) {
      side_by_side(tile, h, first, count, step);
    } else {
      for (int row = first; row < first + count; row += step) {
        const int n = std::min(step, first + count - row);
        if (sees_any(tile, row, n)) with_rows(n, [&](auto n_rows) { one_by_one<n_rows>(tile, h, row); });
      }
    }
  }

  // Whether some of n rows see a key of the tile.
  bool sees_any(const Tile& tile, int row, int n) const {
    int begin, end, unused;
    seen(tile, row / group, begin, unused);
    seen(tile, (row + n - 1) / group, unused, end);
    return begin < kKeyTile && end > 0;
  }

  // of(std::integral_constant<int, n>()), with code of its own for each number of rows.
  template <int ROWS = Tiles::max_rows, class Of>
  static void with_rows(int n, const Of& of) {
    if (n == ROWS) return of(std::integral_constant<int, ROWS>());
    if constexpr (ROWS > 1) with_rows<ROWS - 1>(n, of);
  }

  template <class Block>
  void scores(int h, int row, int n, Block& block) const {
    with_rows(n, [&](auto count) { tiles.template scores<count>(q + h * q_size, row, k, block.scores); });
  }

  template <class Block>
  void softmax(const Tile& tile, int h, int row, int n, Block& block) {
    with_rows(n, [&](auto count) { softmax_block<count>(tile, h, row, block); });
  }

  template <class Block>
  void accumulate(int h, int row, int n, const Block& block) const {
    with_rows(n, [&](auto count) { tiles.template accumulate<count>(block, v, out_of(h, row)); });
  }

  // One block after another, two at a time. A softmax is a long chain, beside which the core multiplies the scores of
  // the next block if they come right behind it; the products with V follow.
  void side_by_side(const Tile& tile, int h, int first, int count, int step) {
    typename Tiles::Block blocks[2];
    int turn = 0, before = -1, of_before = 0;
    for (int row = first; row < first + count; row += step) {
      const int n = std::min(step, first + count - row);
      if (!sees_any(tile, row, n)) continue;
      scores(h, row, n, blocks[turn]);
      if (before >= 0) accumulate(h, before, of_before, blocks[turn ^ 1]);
      softmax(tile, h, row, n, blocks[turn]);
      before = row, of_before = n, turn ^= 1;
    }
    if (before >= 0) accumulate(h, before, of_before, blocks[turn ^ 1]);
  }

  template <int ROWS>
  void one_by_one(const Tile& tile, int h, int row) {
    alignas(64) float scores[ROWS * kKeyTile];
    float decay[ROWS];
    tiles.template scores<ROWS>(q + h * q_size, row, k, scores);
    prefetch();
    for (int r = 0; r < ROWS; r++)
      decay[r] = softmax(tile, h * rows + row + r, row + r, r, scores + r * kKeyTile);
    prefetch();
    tiles.template accumulate<ROWS>(p, v, decay, out_of(h, row));
  }

  // As `block` for one block after another, three at a time: while the scores of one are multiplied, the softmax of the
  // one before is computed, and its predecessor's probabilities, long in memory, are multiplied with V.
  void pipeline(const Tile& tile, int h, int first, int count, int step) {
    typename Tiles::Block blocks[3];
    const int last = (count + step - 1) / step;
    for (int i = 0; i < last + 2; i++) {
      if (i < last) {
        auto& block = blocks[i % 3];
        block.row = first + i * step;
        block.rows = std::min(step, first + count - block.row);
        if (!sees_any(tile, block.row, block.rows)) block.rows = 0;
        if (block.rows) tiles.scores(registers, q + h * q_size, k, block);
      }
      if (i > 0 && i <= last) {
        auto& block = blocks[(i - 1) % 3];
        for (int r = 0; r < block.rows; r++) {
          VF s[kKeyTile / W];
          read_scores(tile, h * rows + block.row + r, block.row + r, block.scores + r * kKeyTile, s);
          tiles.put_scores(s, r, block);
        }
        prefetch();
        tiles.softmax(running.data() + h * rows + block.row, v_scales(), block, out_of(h, block.row));
        prefetch();
      }
      if (i > 1) {
        auto& block = blocks[(i - 2) % 3];
        if (block.rows) tiles.accumulate(registers, v, block, out_of(h, block.row));
      }
    }
  }

  // Products -> probabilities of ROWS rows side by side.
  template <int ROWS, class Block>
  void softmax_block(const Tile& tile, int h, int row, Block& block) {
    alignas(64) static constexpr FloatsOfTile kOnes = all_ones();
    const float* factors = k_scale;
    prefetch();
    if (a.center_size || a.soft_cap > 0.0f || !whole(tile, row, ROWS)) {
      factors = kOnes.values;
      for (int r = 0; r < ROWS; r++) {
        VF s[kKeyTile / W];
        read_scores(tile, h * rows + row + r, row + r, block.scores + r * kKeyTile, s);
        for (int i = 0; i < kKeyTile / W; i++) store(block.scores + r * kKeyTile + i * W, s[i]);
      }
    }
    tiles.template softmax<ROWS>(running.data() + h * rows + row, factors, v_scales(), block);
    prefetch();
  }

  struct FloatsOfTile {
    float values[kKeyTile];
  };
  static constexpr FloatsOfTile all_ones() {
    FloatsOfTile ones{};
    for (float& one : ones.values) one = 1.0f;
    return ones;
  }

  const float* v_scales() const { return a.scales == FREIGHT_TOKEN_SCALES ? v_scale : nullptr; }

  // Whether n rows see all keys of the tile.
  bool whole(const Tile& tile, int row, int n) const {
    int begin, end, unused;
    seen(tile, row / group, unused, end);
    seen(tile, (row + n - 1) / group, begin, unused);
    return begin <= 0 && end >= kKeyTile;
  }

  // Products of q and k -> scores in base 2, those of keys that the row does not see -infinity.
  void read_scores(const Tile& tile, int state, int row, const float* scores, VF* s) const {
    constexpr int parts = kKeyTile / W;
    int begin, end;
    seen(tile, row / group, begin, end);
    for (int i = 0; i < parts; i++) s[i] = load(scores + i * W) * load(k_scale + i * W);
    if (a.center_size) add_center(tile, state, s);
    if (a.soft_cap > 0.0f) soften(s);
    if (begin > 0 || end < kKeyTile)
      for (int i = 0; i < parts; i++) s[i] = mask(s[i], begin - i * W, end - i * W);
  }

  // Scores -> probabilities, the `place`-th in p, against the largest score so far; returns the factor of older sums.
  float softmax(const Tile& tile, int state, int row, int place, const float* scores) {
    constexpr int parts = kKeyTile / W;
    Running& so_far = running[state];
    VF s[parts];
    read_scores(tile, state, row, scores, s);
    VF largest = s[0];
    for (int i = 1; i < parts; i++) largest = max(largest, s[i]);
    const float of_tile = reduce_max(largest), best = of_tile > so_far.best ? of_tile : so_far.best;
    const float base = best == -kInfinity ? 0.0f : best;
    const float decay = best == so_far.best ? 1.0f : exp2_of(so_far.best - base);  // 1 is what it would be
    const float* scale = v_scales();
    VF total = so_far.total * set1(decay);
    for (int i = 0; i < parts; i++) total = total + tiles.put_p(p, place, i * W, exp2(s[i] - set1(base)), scale);
    so_far.best = best;
    so_far.total = total;
    return decay;
  }

  // Lanes outside [begin, end) become -infinity.
  static VF mask(VF s, int begin, int end) {
    VI lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    return (lane >= begin) & (lane < end) ? s : set1(-kInfinity);
  }

  const Call<Tiles>& call;
  const FreightAttention& a;
  const Tiles& tiles;
  const Task& task;
  static constexpr int kPrefetches = 2 * kKeyTile / kPackTogether + 2;  // calls of prefetch per head of a tile
#if FREIGHT_AMX  // into L1 there: measured on no processor with matrix tiles
  static constexpr int kLocality = 3;  // as __builtin_prefetch counts it
#else
  static constexpr int kLocality = 2;
#endif
  const Tile* next = nullptr;                                           // the tile to come, if there is one
  int asked_for = 0;                                                    // of its 64 keys, then of its 64 values
  const bool v_in_k = v_is_in_k(), grouped = a.scales == FREIGHT_GROUP_SCALES;
  const int group, rows, states;  // query heads per KV head; rows of one KV head; of all of the task's
  const size_t q_size;            // floats of one KV head's queries
  std::vector<Running> running;   // [heads][rows]
  float *q, *k, *v, *p, *out, *merged_out, *center;
  typename Tiles::Registers registers;
  alignas(64) float k_scale[kKeyTile], v_scale[kKeyTile];
  alignas(64) float group_scale[kMaxHeadDim / FREIGHT_SCALE_GROUP][kKeyTile];
};

}  // namespace freight
