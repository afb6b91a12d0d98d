// A task of attention on vectors: blocks of up to Tiles::max_rows rows are multiplied together, with code compiled for
// each number of rows. With `side_by_side` a Tiles::Block holds their results, and their softmaxes are computed
// together; otherwise the softmaxes of rows are computed one after another.
#pragma once
#include <type_traits>

#include "attention_task.h"

namespace freight {

template <class Tiles>
class VectorWorker : public Worker<Tiles, VectorWorker<Tiles>> {
  using Base = Worker<Tiles, VectorWorker<Tiles>>;
  using typename Base::Tile;
  using Base::a, Base::task, Base::tiles, Base::group, Base::rows, Base::states, Base::q_size, Base::q, Base::k, Base::v;
  using Base::p, Base::k_scale, Base::v_scales, Base::out_of, Base::center_of, Base::softened;
  using Base::all_see_all, Base::unseen_infinities, Base::seen_alone, Base::sees_any, Base::seen, Base::whole;
  using Base::read_scales, Base::pack_keys, Base::pack_values, Base::grouped, Base::prefetch;

 public:
  VectorWorker(const Call<Tiles>& call, const Task& task)
      : Base(call, task, task.positions * call.group()), running(states) {}

  void begin_split() { std::fill(running.begin(), running.end(), Running()); }
  void end_split() {}

  Partial partial(int h, int row) const {
    const Running& state = running[h * rows + row];
    return {state.best, reduce_add(state.total)};
  }

  void walk(const Tile& tile) {
    for (int h = 0; h < task.heads; h++) walk_head(tile, h);
  }

  void walk_head(const Tile& tile, int h) {
    read_scales(tile, task.head + h);
    if constexpr (Tiles::reads_codes)
      if (tiles.reads_codes_of(rows) && !grouped && all_see_all(tile) && walk_codes(tile, h)) return;
    pack_keys(tile, task.head + h, k);
    if constexpr (Tiles::side_by_side)
      if (rows <= Tiles::max_rows && all_see_all(tile)) {
        typename Tiles::Block block;
        scores(h, 0, rows, block);
        softmax(tile, h, 0, rows, block);
        pack_values(tile, task.head + h, v);  // overlaps with the softmax, a long dependency chain
        accumulate(h, 0, rows, block);
        return;
      }
    pack_values(tile, task.head + h, v);
    if (!unseen_infinities(tile, v)) return walk_rows(tile, h, 0, rows);
    for (int i = 0; i < task.positions; i++) {
      pack_values(seen_alone(tile, i), task.head + h, v);
      walk_rows(tile, h, i * group, group);
    }
  }

 private:
  struct Running {
    float best = -kInfinity;
    VF total = {};  // by lane
  };

  // Compute rows in blocks whose sums fit in registers; blocks that see nothing of the tile are skipped.
  void walk_rows(const Tile& tile, int h, int first, int count) {
    const int blocks = (count + Tiles::max_rows - 1) / Tiles::max_rows, step = (count + blocks - 1) / blocks;
    if constexpr (Tiles::side_by_side) {
      side_by_side(tile, h, first, count, step);
    } else {
      for (int row = first; row < first + count; row += step) {
        const int n = std::min(step, first + count - row);
        if (sees_any(tile, row, n)) with_rows(n, [&](auto n_rows) { one_by_one<n_rows>(tile, h, row); });
      }
    }
  }

  // Call of(std::integral_constant<int, n>()), so that each number of rows has separately compiled code.
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

  // One block after another, pipelined. A softmax is a long dependency chain; the core overlaps it with the scores of
  // the next block if those come right after it. The products with V follow.
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

  // One block of rows that see all keys, without packed values. Returns false if the tile has NaNs that would be hidden.
  bool walk_codes(const Tile& tile, int h) {
    const size_t of_k = a.k.head * (task.head + h), of_v = a.v.head * (task.head + h);
    const auto between = [this](int keys) { prefetch(keys); };
    if (tiles.transpose_k(tile.k, of_k, a.k_dim, k, between) || tiles.hides_nan(tile.v, of_v)) return false;
    with_rows<Tiles::most_rows>(rows, [&](auto count) {
      alignas(64) float scores[count * kKeyTile];
      float decay[count];
      tiles.template scores_of_codes<count>(q + h * q_size, k, scores);
      for (int r = 0; r < count; r++) decay[r] = softmax(tile, h * rows + r, r, r, scores + r * kKeyTile);
      tiles.template accumulate_codes<count>(p, tile.v, of_v, decay, out_of(h, 0), between);
    });
    return true;
  }

  template <int ROWS>
  void one_by_one(const Tile& tile, int h, int row) {
    alignas(64) float scores[ROWS * kKeyTile];
    float decay[ROWS];
    tiles.template scores<ROWS>(q + h * q_size, row, k, scores);
    for (int r = 0; r < ROWS; r++)
      decay[r] = softmax(tile, h * rows + row + r, row + r, r, scores + r * kKeyTile);
    tiles.template accumulate<ROWS>(p, v, decay, out_of(h, row));
  }

  // Products -> probabilities of ROWS rows together.
  template <int ROWS, class Block>
  void softmax_block(const Tile& tile, int h, int row, Block& block) {
    alignas(64) static constexpr FloatsOfTile kOnes = all_ones();
    const float* factors = k_scale;
    if (a.center_size || a.soft_cap > 0.0f || !whole(tile, row, ROWS)) {
      factors = kOnes.values;
      for (int r = 0; r < ROWS; r++) {
        VF s[kKeyTile / W];
        read_scores(tile, h * rows + row + r, row + r, block.scores + r * kKeyTile, s);
        for (int i = 0; i < kKeyTile / W; i++) store(block.scores + r * kKeyTile + i * W, s[i]);
      }
    }
    tiles.template softmax<ROWS>(running.data() + h * rows + row, factors, v_scales(), block);
  }

  struct FloatsOfTile {
    float values[kKeyTile];
  };
  static constexpr FloatsOfTile all_ones() {
    FloatsOfTile ones{};
    for (float& one : ones.values) one = 1.0f;
    return ones;
  }

  // scores += the contribution of the keys' center. s: the scores of one row and head with the 64 keys of a tile.
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

  // Products of q and k -> scores in base 2, -infinity for keys that the row does not see.
  void read_scores(const Tile& tile, int state, int row, const float* scores, VF* s) const {
    constexpr int parts = kKeyTile / W;
    int begin, end;
    seen(tile, row / group, begin, end);
    for (int i = 0; i < parts; i++) s[i] = load(scores + i * W) * load(k_scale + i * W);
    if (a.center_size) add_center(tile, state, s);
    if (a.soft_cap > 0.0f)
      for (int i = 0; i < parts; i++) s[i] = softened(s[i]);
    if (begin > 0 || end < kKeyTile)
      for (int i = 0; i < parts; i++) s[i] = mask(s[i], begin - i * W, end - i * W);
  }

  // Scores -> probabilities, stored as row `place` of p, relative to the largest score so far. Returns the factor of
  // earlier sums.
  float softmax(const Tile& tile, int state, int row, int place, const float* scores) {
    constexpr int parts = kKeyTile / W;
    Running& so_far = running[state];
    VF s[parts];
    read_scores(tile, state, row, scores, s);
    VF largest = s[0];
    for (int i = 1; i < parts; i++) largest = max(largest, s[i]);
    const float of_tile = reduce_max(largest), best = of_tile > so_far.best ? of_tile : so_far.best;
    const float base = best == -kInfinity ? 0.0f : best;
    const float decay = best == so_far.best ? 1.0f : exp2_of(so_far.best - base);  // exp2_of(0) is 1
    const float* scale = v_scales();
    VF total = so_far.total * set1(decay);
    for (int i = 0; i < parts; i++) total = total + tiles.put_p(p, place, i * W, exp2(s[i] - set1(base)), scale);
    so_far.best = best;
    so_far.total = total;
    return decay;
  }

  // Set lanes outside [begin, end) to -infinity.
  static VF mask(VF s, int begin, int end) {
    VI lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    return (lane >= begin) & (lane < end) ? s : set1(-kInfinity);
  }

  std::vector<Running> running;  // [heads][rows]
};

}  // namespace freight
