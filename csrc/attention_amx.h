// Attention's tile products by matrix tiles (AMX), for BF16 queries over pages whose values are exact in BF16.
//
// Scores are computed transposed: the keys of a tile are the first operand of TDPBF16PS, in the order in which they are
// stored, and 16 queries are the second. So keys are decoded but not transposed, and in the softmax a lane is a query,
// so that nothing is reduced over lanes. Channels of q and K are padded with zeros to a multiple of 32.
//
// 16 queries are a block: adjacent rows of one KV head or, if there are few rows, all rows of several heads. With few
// rows the probabilities are transposed, and are the first operand of the products with V, whose layout is that of
// Bf16Tiles. With many rows V is transposed, once for all blocks. It is the first operand, and the probabilities are the
// second as the softmax leaves them; two blocks of large heads share the loads of keys and values. An element of a
// product depends only on its query and key, or its query and channel, and a lane only on its query, so neither the
// grouping of queries nor the order of operands changes a bit.
// (The bits differ from those of Bf16Tiles: TDPBF16PS sums even and odd inputs separately.)
//
// A softmax takes the vector units about as long as the products take the tiles. So the two are pipelined: while the
// softmax of a group of one or two blocks is computed, the scores of the next group and the sums of the one before are
// multiplied.
#pragma once
#include "tiles.h"
#if FREIGHT_AMX
#include "attention_bf16.h"
#include "attention_task.h"

namespace freight {

template <FreightFormat F>
struct AmxTiles : Bf16Tiles<F> {
  using Base = Bf16Tiles<F>;
  using Base::k_dim, Base::pairs, Base::q_parts, Base::v_dim, Base::value_dim, Base::quantized, Base::chunk;

  static constexpr int rows_of_block = 16;

  AmxTiles(int k_dim, int v_dim, bool scaled_q) : Base(k_dim, v_dim, scaled_q) { pairs = (k_dim + 31) / 32 * 16; }

  // Sizes of the working memory, in floats. It holds two tiles of keys and of values: one is multiplied while the next
  // is packed.
  size_t q_size(int rows) const { return (size_t)padded(rows) * q_parts * pairs; }
  size_t k_size() const { return 2 * keys_size(); }
  size_t v_size() const { return 2 * values_size(); }
  size_t keys_size() const { return Base::k_size(); }
  size_t values_size() const { return Base::v_size(); }
  size_t p_size(int heads, int rows) const { return (size_t)blocks_of(heads, rows) * (kScores + kProbabilities); }

  // Rows of a head in the working memory: full pairs of blocks, unless one block has all of them.
  static int padded(int rows) { return rows > 16 ? (rows + 31) / 32 * 32 : 16; }

  static constexpr int kScores = kKeyTile * 16, kProbabilities = kKeyTile / 2 * 16;  // floats of a block

  // Number of blocks whose scores are kept at a time: two groups of up to two, or if there are few rows all blocks.
  static int blocks_of(int heads, int rows) { return rows > 16 ? 4 : (heads + 16 / rows - 1) / (16 / rows); }

  // A row of q, k_dim floats and zeros up to a multiple of 16 -> [16 rows][q_parts][pairs][16 of the rows][2]
  void pack_q(const float* q, int row, float* packed) const {
    packed += (size_t)(row / 16) * 16 * q_parts * pairs + row % 16;
    alignas(64) uint16_t halves[kMaxHeadDim + kLanes];
    for (int part = 0; part < q_parts; part++, packed += (size_t)16 * pairs) {
      for (int d = 0; d < k_dim; d += kLanes) {
        V16 values = load16(q + d);
        if (part) values = values - load_as<FREIGHT_BFLOAT16>(halves + d);  // the high part
        store_as<FREIGHT_BFLOAT16>(halves + d, values);
      }
      for (int pair = 0; pair < (k_dim + 1) / 2; pair++) std::memcpy(packed + 16 * pair, halves + 2 * pair, 4);
    }
  }

  // keys[64] + offset: k_dim stored values each -> [64][pairs][2]
  template <class Between>
  void pack_k(const uint8_t* const* keys, size_t offset, float* packed, const Between& between) const {
    const Decoder<F> decode;
    for (int key = 0; key < kKeyTile; key++) {
      store_key(decode, keys[key] + offset, k_dim, pairs, packed + (size_t)key * pairs);
      if ((key + 1) % 8 == 0) between(8);
    }
  }

  // `pack_k` with group scales: the first `before` channels of keys are BF16 at rotated[64] + rotated_offset, the
  // others have the scales scale[group][64].
  template <class Between>
  void pack_k_groups(const uint8_t* const* rotated, size_t rotated_offset, int before, const uint8_t* const* keys,
                     size_t offset, const float* scale, float* packed, const Between& between) const {
    const Decoder<F> decode;
    for (int key = 0; key < kKeyTile; key++) {
      float* to = packed + (size_t)key * pairs;
      std::fill(to, to + pairs, 0.0f);
      if (before) std::memcpy(to, rotated[key] + rotated_offset, (size_t)before * 2);
      for (int d = 0; d < v_dim; d += FREIGHT_SCALE_GROUP) {
        const __m512 of_key = _mm512_set1_ps(scale[d / FREIGHT_SCALE_GROUP * kKeyTile + key]);
        for (int i = d; i < d + FREIGHT_SCALE_GROUP; i += chunk) {
          __m512i first, last;
          decode_chunk(decode, keys[key] + offset + i, ~__mmask64(0), first, last);
          _mm512_storeu_si512(to + (before + i) / 2, scaled_pairs(first, of_key, of_key));
          _mm512_storeu_si512(to + (before + i) / 2 + 16, scaled_pairs(last, of_key, of_key));
        }
      }
      if ((key + 1) % 8 == 0) between(8);
    }
  }

  // 64 codes -> BF16, in order.
  static void decode_chunk(const Decoder<F>& decode, const uint8_t* from, __mmask64 mask, __m512i& first, __m512i& last) {
    const __m512i in_turns = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // undoes the decoder's order (16-byte halves)
    decode(_mm512_permutexvar_epi64(in_turns, _mm512_maskz_loadu_epi8(mask, from)), first, last);
  }

  // `dim` stored values -> BF16, padded with zeros to `pairs` pairs, a multiple of 16.
  static FREIGHT_INLINE void store_key(const Decoder<F>& decode, const uint8_t* from, int dim, int pairs, float* to) {
    for (int pair = 0; pair < pairs; pair += chunk / 2) {
      const auto mask = Base::chunk_mask(dim - 2 * pair);
      if constexpr (quantized) {
        __m512i first, last;
        decode_chunk(decode, from + 2 * pair, mask, first, last);
        _mm512_storeu_si512(to + pair, first);
        if (pair + 16 < pairs) _mm512_storeu_si512(to + pair + 16, last);
      } else {
        _mm512_storeu_si512(to + pair, _mm512_maskz_loadu_epi16(mask, from + 4 * pair));
      }
    }
  }

  // Products are split into pieces of 32 channels and 32 keys or values, which alternate with other work. Pieces of one
  // block are computed in order.
  int score_pieces() const { return 2 * (pairs / 16); }
  int value_pieces() const { return 2 * ((v_dim + 31) / 32); }

  // scores[64][16 lanes] = keys . q, of up to 16 queries, or of 2 x 16 with BLOCKS = 2.
  template <int BLOCKS>
  void score_piece(int piece, const float* q, const float* k, float* to) const {
    const int steps = pairs / 16, half = piece / steps, step = piece % steps, stride = pairs * 4;
    k += 16 * step + (size_t)half * 32 * pairs, to += half * 32 * 16;
    memory_barrier();
    if (step == 0) zero<BLOCKS>();
    _tile_loadd(4, k, stride);
    _tile_loadd(5, k + (size_t)16 * pairs, stride);
    for (int part = 0; part < q_parts; part++) {
      const float* of_part = q + (size_t)(part * pairs + 16 * step) * 16;
      _tile_loadd(6, of_part, 64);
      if constexpr (BLOCKS == 2) _tile_loadd(7, of_part + (size_t)16 * q_parts * pairs, 64);
      multiply<BLOCKS>();
    }
    if (step + 1 == steps) store_tiles<BLOCKS>(to, kScores);
    memory_barrier();
  }
  template <int BLOCKS>
  void scores(const float* q, const float* k, float* to) const {
    for (int piece = 0; piece < score_pieces(); piece++) score_piece<BLOCKS>(piece, q, k, to);
  }

  // Tiles 0 and 1 are two results of the first block, 2 and 3 of the second; 4 and 5 are their first operands, 6 and 7
  // the second operand of each block.
  template <int BLOCKS>
  static void zero() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (BLOCKS == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  template <int BLOCKS>
  static void multiply() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (BLOCKS == 2) {
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  // Two results of each block, one after the other; the second block's are `apart` floats further.
  template <int BLOCKS>
  static void load_tiles(const float* from, size_t apart) {
    _tile_loadd(0, from, 64);
    _tile_loadd(1, from + 16 * 16, 64);
    if constexpr (BLOCKS == 2) {
      _tile_loadd(2, from + apart, 64);
      _tile_loadd(3, from + apart + 16 * 16, 64);
    }
  }
  template <int BLOCKS>
  static void store_tiles(float* to, size_t apart) {
    _tile_stored(0, to, 64);
    _tile_stored(1, to + 16 * 16, 64);
    if constexpr (BLOCKS == 2) {
      _tile_stored(2, to + apart, 64);
      _tile_stored(3, to + apart + 16 * 16, 64);
    }
  }

  // V as `pack_v` leaves it, [32 pairs of keys][value_dim][2] -> [value_dim][32 pairs of keys][2]
  void turn_values(const float* v, float* turned) const {
    for (int d = 0; d < value_dim; d += 16)
      for (int pair = 0; pair < kKeyTile / 2; pair += 16) {
        VF of[16];
        FREIGHT_UNROLL
        for (int i = 0; i < 16; i++) of[i] = load(v + static_cast<size_t>(pair + i) * value_dim + d);
        transpose(of);
        FREIGHT_UNROLL
        for (int i = 0; i < 16; i++) store(turned + (d + i) * (kKeyTile / 2) + pair, of[i]);
      }
  }

  // out[channel][16 rows] += v[channel][64 keys] @ p[32 pairs of keys][16 rows][2], with v from `turn_values`, of one
  // block or of two.
  template <int BLOCKS>
  void turned_piece(int piece, const float* p, const float* v, float* out) const {
    const int d = piece / 2 * 32, last = piece % 2;
    const size_t apart = (size_t)16 * value_dim;
    out += d * 16, v += d * (kKeyTile / 2) + last * 16, p += last * 16 * 16;
    memory_barrier();
    if (!last) load_tiles<BLOCKS>(out, apart);
    _tile_loadd(4, v, kKeyTile * 2);
    _tile_loadd(5, v + 16 * (kKeyTile / 2), kKeyTile * 2);
    _tile_loadd(6, p, 64);
    if constexpr (BLOCKS == 2) _tile_loadd(7, p + kProbabilities, 64);
    multiply<BLOCKS>();
    if (last) store_tiles<BLOCKS>(out, apart);
    memory_barrier();
  }
  template <int BLOCKS>
  void accumulate_turned(const float* p, const float* v, float* out) const {
    for (int piece = 0; piece < value_pieces(); piece++) turned_piece<BLOCKS>(piece, p, v, out);
  }

  // out[row][channel] += p[row][64 keys] @ v
  void value_piece(int piece, const float* p, const float* v, float* out) const {
    const int d = piece / 2 * 32, last = piece % 2, stride = value_dim * 4;
    out += d, v += d + (size_t)last * 16 * value_dim;
    memory_barrier();
    if (!last) {
      _tile_loadd(2, out, stride);
      _tile_loadd(3, out + 16, stride);
    }
    _tile_loadd(7, p + 16 * last, kKeyTile * 2);
    _tile_loadd(4, v, stride);
    _tile_loadd(5, v + 16, stride);
    _tile_dpbf16ps(2, 7, 4);
    _tile_dpbf16ps(3, 7, 5);
    if (last) {
      _tile_stored(2, out, stride);
      _tile_stored(3, out + 16, stride);
    }
    memory_barrier();
  }
  void accumulate(const float* p, const float* v, float* out) const {
    for (int piece = 0; piece < value_pieces(); piece++) value_piece(piece, p, v, out);
  }
};

// Tiles of few rows: 0 and 1 are scores, 6 the queries; 2 and 3 are outputs, 7 the probabilities; 4 and 5 are keys, then
// values. Of many rows: as in `multiply`.
class AttentionRegisters : public LoadedTiles {
 public:
  // Configure tiles for `columns` columns of scores, queries and turned outputs, and `rows` rows of other outputs.
  void set(int columns, int rows) {
    if (columns == columns_ && rows == rows_) return;
    columns_ = columns, rows_ = rows;
    TileConfig config;
    for (int i : {0, 1, 6}) config.row_bytes[i] = static_cast<uint16_t>(4 * columns);
    for (int i : {2, 3, 7}) config.rows[i] = static_cast<uint8_t>(rows);
    load(config);
  }

 private:
  int columns_ = 0, rows_ = 0;
};

// The softmax of up to 16 queries, one per lane, over the 64 keys of a tile.
//
// Probabilities are relative to 2 ** base, where base is the largest score of the first tile that the lane sees. It moves
// to the largest score so far only if that exceeds it by more than kHeadroom. So most tiles need neither their largest
// score beforehand nor a decay of earlier sums. Probabilities of up to 2 ** kHeadroom are rounded as others are.
struct TileSoftmax {
  static constexpr int kSlots = 16;  // number of calls of `beside`
  static constexpr float kHeadroom = 8.0f;

  // Products scores[64][16], times `factor`, -> probabilities pairs[32 pairs of keys][16][2] of bfloat16. factor and
  // v_scale are [64][16] if BY_LANE, else [64]; v_scale multiplies probabilities if SCALED. `beside(i)` is called at
  // regular intervals, to interleave other work. Returns the lanes whose earlier sums must be multiplied by `decay`.
  template <bool BY_LANE, bool SCALED, class Beside>
  static inline __mmask16 compute(const float* scores, const float* factor, const float* v_scale, VF& base, VF& total,
                                  float* decay, float* pairs, const Beside& beside) {
    const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
    const __mmask16 fresh = _mm512_cmp_ps_mask((__m512)base, nothing, _CMP_EQ_OQ);  // lanes that have seen no key
    if (!fresh) {
      VF sum = total;
      const __mmask16 above =
          put<BY_LANE, SCALED>(scores, factor, v_scale, (__m512)base, sum, pairs, beside);
      if (!above) {
        total = sum;
        return 0;
      }
      return move<BY_LANE, SCALED>(scores, factor, v_scale, above, base, total, decay, pairs, [](int) {});
    }
    __mmask16 above = 0;
    if (fresh != 0xFFFF) above = exceeding<BY_LANE>(scores, factor, (__m512)zero_if_none(base));
    return move<BY_LANE, SCALED>(scores, factor, v_scale, above | fresh, base, total, decay, pairs, beside);
  }

  // Move the bases of the lanes `moved` to their largest scores of this tile, which exceed them, and compute.
  template <bool BY_LANE, bool SCALED, class Beside>
  static inline __mmask16 move(const float* scores, const float* factor, const float* v_scale, __mmask16 moved, VF& base,
                               VF& total, float* decay, float* pairs, const Beside& beside) {
    __m512 largest[4];
    for (__m512& one : largest) one = _mm512_set1_ps(-__builtin_inff());
    for (int key = 0; key < kKeyTile; key += 4)
      FREIGHT_UNROLL
      for (int i = 0; i < 4; i++)
        largest[i] =
            _mm512_max_ps((__m512)(load(scores + 16 * (key + i)) * factor_of<BY_LANE>(factor, key + i)), largest[i]);
    const __m512 of_tile = _mm512_max_ps(_mm512_max_ps(largest[0], largest[1]), _mm512_max_ps(largest[2], largest[3]));
    const VF before = base;
    base = (VF)_mm512_mask_blend_ps(moved, (__m512)before, of_tile);
    const VF now = zero_if_none(base), kept = base == before ? set1(1.0f) : exp2(before - now);
    store(decay, kept);
    total = total * kept;
    put<BY_LANE, SCALED>(scores, factor, v_scale, (__m512)now, total, pairs, beside);
    return _mm512_cmp_ps_mask((__m512)base, (__m512)before, _CMP_NEQ_UQ);
  }

  // Write the probabilities of a tile and add them to `total`. Returns the lanes of which a score exceeds `base` by
  // more than kHeadroom.
  template <bool BY_LANE, bool SCALED, class Beside>
  static inline __mmask16 put(const float* scores, const float* factor, const float* v_scale, __m512 base, VF& total,
                              float* pairs, const Beside& beside) {
    VF sums[2] = {total, VF{}};
    __m512 largest[2] = {_mm512_set1_ps(-__builtin_inff()), _mm512_set1_ps(-__builtin_inff())};
    for (int pair = 0; pair < kKeyTile / 2; pair += 2) {
      FREIGHT_UNROLL
      for (int j = 0; j < 2; j++) {
        __m512 two[2];
        FREIGHT_UNROLL
        for (int i = 0; i < 2; i++) {
          const int key = 2 * (pair + j) + i;
          const __m512 x = relative<BY_LANE>(scores, factor, key, base);
          largest[i] = _mm512_max_ps(x, largest[i]);  // NaN is no score, and stays NaN as a probability
          two[i] = power(x);
          sums[i] = sums[i] + (VF)two[i];
          if constexpr (SCALED) two[i] = _mm512_mul_ps(two[i], (__m512)factor_of<BY_LANE>(v_scale, key));
        }
        _mm512_store_si512(pairs + 16 * (pair + j), interleaved(two[0], two[1]));
      }
      beside(pair / 2);
    }
    total = sums[0] + sums[1];
    return beyond(_mm512_max_ps(largest[0], largest[1]));
  }

  // The lanes of which a score exceeds `base` by more than kHeadroom, with the bits that `put` finds.
  template <bool BY_LANE>
  static __mmask16 exceeding(const float* scores, const float* factor, __m512 base) {
    __m512 largest = _mm512_set1_ps(-__builtin_inff());
    for (int key = 0; key < kKeyTile; key++)
      largest = _mm512_max_ps(relative<BY_LANE>(scores, factor, key, base), largest);
    return beyond(largest);
  }

  template <bool BY_LANE>
  static VF factor_of(const float* factor, int key) {
    return BY_LANE ? load(factor + 16 * key) : set1(factor[key]);
  }
  template <bool BY_LANE>
  static __m512 relative(const float* scores, const float* factor, int key, __m512 base) {
    return _mm512_fmsub_ps((__m512)load(scores + 16 * key), (__m512)factor_of<BY_LANE>(factor, key), base);
  }
  static __mmask16 beyond(__m512 largest) {
    return _mm512_cmp_ps_mask(largest, _mm512_set1_ps(kHeadroom), _CMP_GT_OQ);
  }
  static VF zero_if_none(VF base) { return base == set1(-__builtin_inff()) ? set1(0.0f) : base; }

  // pairs[32 pairs of keys][16][2] -> p[16][64 keys]
  static void transpose_pairs(const float* pairs, float* p) {
    for (int half = 0; half < 2; half++) {
      VF rows[16];
      FREIGHT_UNROLL
      for (int i = 0; i < 16; i++) rows[i] = load(pairs + (half * 16 + i) * 16);
      transpose(rows);
      FREIGHT_UNROLL
      for (int i = 0; i < 16; i++) store(p + i * (kKeyTile / 2) + half * 16, rows[i]);
    }
  }

  // 2 ** x for x up to kHeadroom, within 2 ** -13: a probability keeps only 8 bits. NaN stays
  // NaN.
  static __m512 power(__m512 x) {
    constexpr int kDown = 1;  // rounding mode: the fraction is x minus the largest integer below it
    const __m512 f = _mm512_reduce_ps(x, kDown);
    __m512 p = _mm512_set1_ps(0.07706703990697861f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.22764499485492706f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6951167583465576f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);
  }

  // BF16 of both, `even` in the low halves, rounded to nearest with halves away from zero. (The conversion instruction
  // takes longer, and so does the one that sums such pairs.)
  static __m512i interleaved(__m512 even, __m512 odd) {
    const __m512i half = _mm512_set1_epi32(0x8000), high = _mm512_set1_epi32((int)0xFFFF0000);
    const __m512i first = _mm512_bsrli_epi128(_mm512_add_epi32((__m512i)even, half), 2);
    return _mm512_ternarylogic_epi32(high, _mm512_add_epi32((__m512i)odd, half), first, 0xCA);  // high ? odd : first
  }
};

template <class Tiles>
class TileWorker : public Worker<Tiles, TileWorker<Tiles>> {
  using Base = Worker<Tiles, TileWorker<Tiles>>;
  using typename Base::Tile;
  using Base::a, Base::call, Base::task, Base::tiles, Base::group, Base::rows, Base::row_stride, Base::grouped;
  using Base::q, Base::q_size, Base::k, Base::v, Base::p, Base::out_of, Base::k_scale, Base::v_scale, Base::center_of;
  using Base::sees_any, Base::seen, Base::whole, Base::unseen_infinities, Base::seen_alone;
  using Base::coefficient, Base::softened, Base::token_scale;
  using Base::read_scales, Base::read_group_scales, Base::pack_keys, Base::pack_values, Base::prefetch, Base::all_work;
  static constexpr int kScores = Tiles::kScores, kProbabilities = Tiles::kProbabilities;

 public:
  // Rows of a head are padded to full blocks, unless a block has rows of several heads.
  TileWorker(const Call<Tiles>& call, const Task& task)
      : Base(call, task, stride_of(task.positions * call.group())),
        blocks(Tiles::blocks_of(task.heads, rows)),
        base(task.heads * row_stride + 16),
        total(base.size()) {
    std::fill(q, q + q_size * task.heads, 0.0f);
    if (rows <= 16) all_work += blocks * TileSoftmax::kSlots * kSlotWork;
    std::fill(p, p + blocks * (kScores + kProbabilities), 0.0f);
  }

  void begin_split() {
    std::fill(base.begin(), base.end(), -kInfinity);
    std::fill(total.begin(), total.end(), 0.0f);
  }

  // Sums of many rows are [channels][16 rows] in each block, until the split ends.
  void end_split() {
    if (rows <= 16) return;
    const int dim = tiles.value_dim;
    alignas(64) float turned[16 * kMaxHeadDim];
    for (int first = 0; first < task.heads * row_stride; first += 16) {
      float* block = out_of(0, first);
      for (int d = 0; d < dim; d += 16) {
        VF of[16];
        FREIGHT_UNROLL
        for (int i = 0; i < 16; i++) of[i] = load(block + (d + i) * 16);
        transpose(of);
        FREIGHT_UNROLL
        for (int i = 0; i < 16; i++) store(turned + i * dim + d, of[i]);
      }
      std::memcpy(block, turned, sizeof(float) * 16 * dim);
    }
  }

  Partial partial(int h, int row) const { return {base[h * row_stride + row], total[h * row_stride + row]}; }

  void walk(const Tile& tile) {
    if (rows <= 16) return walk_together(tile);
    for (int h = 0; h < task.heads; h++) two_share ? walk_head<2>(tile, h) : walk_head<1>(tile, h);
  }

 private:
  // Up to 16 adjacent rows of `out`: of one KV head, or all rows of several.
  struct Block {
    int state = 0, lanes = 0, row = 0;  // row: the block's first row within its first head
    float *scores = nullptr, *probabilities = nullptr, *out = nullptr;
    const float* queries = nullptr;
  };

  static constexpr int kSlotWork = 2;  // work of a slot for `prefetch`: about the time of packing so many keys
  static int stride_of(int rows) { return rows <= 16 ? rows : Tiles::padded(rows); }
  float* keys_of(int h) const { return k + h % 2 * tiles.keys_size(); }
  float* values_of(int h) const { return v + h % 2 * tiles.values_size(); }
  float* turned_values() const { return values_of(1); }  // with many rows
  float* scores_at(int i) const { return p + i * kScores; }
  float* probabilities_at(int i) const { return p + blocks * kScores + i * kProbabilities; }
  const float* queries(int h, int row) const {
    return q + h * q_size + static_cast<size_t>(row) * tiles.q_parts * tiles.pairs;
  }

  // Few rows: first all scores of the tile, then all softmaxes, then all sums. The products of each head are computed
  // after the next head is packed.
  void walk_together(const Tile& tile) {
    const int heads = 16 / rows;  // of a block
    registers.set(rows, rows);
    one_behind(
        [&](int h) {
          if (grouped) read_group_scales(tile, task.head + h);
          pack_keys(tile, task.head + h, keys_of(h));
        },
        [&](int h) { tiles.template scores<1>(queries(h, 0), keys_of(h), scores_at(h / heads) + h % heads * rows); });
    for (int i = 0; i < blocks; i++) {
      const int first = i * heads, count = std::min(heads, task.heads - first);
      read_lane_scales(tile, first, count);
      softmax<true>(tile, {first * rows, count * rows, 0, scores_at(i), probabilities_at(i), out_of(first, 0)},
                    [this](int) { prefetch(kSlotWork); });
    }
    one_behind(
        [&](int h) {
          if (grouped) read_group_scales(tile, task.head + h);
          pack_values(tile, task.head + h, values_of(h));
        },
        [&](int h) {
          const float* of_head = probabilities_at(h / heads) + h % heads * rows * (kKeyTile / 2);
          if (!unseen_infinities(tile, values_of(h))) return tiles.accumulate(of_head, values_of(h), out_of(h, 0));
          each_position(0, rows, [&](int i, int row, int count) {
            pack_values(seen_alone(tile, i), task.head + h, values_of(h));
            registers.set(rows, count);
            tiles.accumulate(of_head + row * (kKeyTile / 2), values_of(h), out_of(h, row));
          });
          registers.set(rows, rows);
        });
  }

  // Call pack(h) for each head, each followed by multiply(h - 1).
  template <class Pack, class Multiply>
  void one_behind(const Pack& pack, const Multiply& multiply) {
    for (int h = 0; h < task.heads; h++) {
      pack(h);
      if (h) multiply(h - 1);
    }
    multiply(task.heads - 1);
  }

  // Call of(i, row, count) for the rows of each position among `count` rows from `row` on. (A position is multiplied
  // separately, by only the values that it sees, if others that it does not see are infinite.)
  template <class Of>
  void each_position(int row, int count, const Of& of) const {
    for (int first = row; first < row + count;) {
      const int i = first / group, n = std::min((i + 1) * group, row + count) - first;
      of(i, first, n);
      first += n;
    }
  }

  // Many rows of one head, one group of BLOCKS adjacent blocks after another, pipelined.
  template <int BLOCKS>
  void walk_head(const Tile& tile, int h) {
    registers.set(16, 16);
    read_scales(tile, task.head + h);
    pack_keys(tile, task.head + h, k);
    pack_values(tile, task.head + h, v);
    const bool apart = unseen_infinities(tile, v);
    tiles.turn_values(v, turned_values());
    Block before, block = block_from<BLOCKS>(tile, h, 0, 0);
    if (block.lanes) tiles.template scores<BLOCKS>(block.queries, k, block.scores);
    for (int turn = 1; block.lanes; turn ^= 1) {
      const Block after = block_from<BLOCKS>(tile, h, block.row + 16 * BLOCKS, turn);
      const int of_keys = after.lanes ? tiles.score_pieces() : 0;
      const int all = of_keys + (before.lanes ? tiles.value_pieces() : 0);
      int done = 0;
      const auto multiply_until = [&](int until) __attribute__((always_inline)) {
        for (; done < until; done++)
          if (done < of_keys)
            tiles.template score_piece<BLOCKS>(done, after.queries, k, after.scores);
          else
            tiles.template turned_piece<BLOCKS>(done - of_keys, before.probabilities, turned_values(), before.out);
      };
      constexpr int kSlots = TileSoftmax::kSlots;
      softmax<false>(tile, block, [&](int slot) __attribute__((always_inline)) {
        multiply_until(all * (slot + 1) / (BLOCKS * kSlots));
      });
      const Block second = block_at(h, block.row + 16, BLOCKS * (1 - turn) + 1);
      const bool has_second = BLOCKS == 2 && second.row < rows;
      if constexpr (BLOCKS == 2) {
        if (has_second)
          softmax<false>(tile, second, [&](int slot) __attribute__((always_inline)) {
            multiply_until(all * (kSlots + slot + 1) / (2 * kSlots));
          });
        multiply_until(all);
      }
      if (apart) {
        add_values_apart(tile, h, block);
        if (has_second) add_values_apart(tile, h, second);
      } else {
        before = block;
      }
      block = after;
    }
    if (before.lanes) tiles.template accumulate_turned<BLOCKS>(before.probabilities, turned_values(), before.out);
  }

  // Add the values of a block position by position, each with only those that it sees.
  void add_values_apart(const Tile& tile, int h, const Block& block) {
    each_position(block.row, std::min(16, rows - block.row), [&](int i, int row, int count) {
      pack_values(seen_alone(tile, i), task.head + h, v);
      tiles.turn_values(v, turned_values());
      registers.set(count, 16);
      const int lane = row - block.row;
      tiles.template accumulate_turned<1>(block.probabilities + lane, turned_values(), block.out + lane);
    });
    registers.set(16, 16);
  }

  // The first block from `row` on of a group that sees a part of the tile; it has 0 lanes if there is none.
  template <int BLOCKS>
  Block block_from(const Tile& tile, int h, int row, int turn) const {
    for (; row < rows; row += 16 * BLOCKS)
      if (sees_any(tile, row, std::min(16 * BLOCKS, rows - row))) return block_at(h, row, BLOCKS * turn);
    return {};
  }

  Block block_at(int h, int row, int place) const {
    return {h * row_stride + row,    16,            row,           scores_at(place),
            probabilities_at(place), out_of(h, row), queries(h, row)};
  }

  // Read the factors of scores and of probabilities of the task's heads from `first` on: [64 keys][16 lanes].
  void read_lane_scales(const Tile& tile, int first, int count) {
    const int32_t lanes = count * rows;
    alignas(64) int32_t head_of[16];
    alignas(64) float of_heads[16] = {};
    for (int i = 0; i < 16; i++) head_of[i] = i < lanes ? i / rows : 0;
    const __m512i index = _mm512_load_si512(head_of);
    const auto spread = [&] { return _mm512_permutexvar_ps(index, _mm512_load_ps(of_heads)); };
    for (int i = 0; i < count; i++)
      of_heads[i] = coefficient() * (call.k_factor.empty() ? 1.0f : call.k_factor[task.head + first + i]);
    const __m512 factor = spread();
    if (a.scales != FREIGHT_TOKEN_SCALES) {
      for (int key = 0; key < kKeyTile; key++) _mm512_store_ps(k_lanes + 16 * key, factor);
      return;
    }
    const auto read = [&](const uint8_t* scales, const FreightPages& pages) {
      const uint8_t* from = scales + (task.head + first) * pages.scale_head;
      if (pages.scale_head == 2) {
        const __m256i halves = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1 << count) - 1), from);
        return _mm512_permutexvar_ps(index, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
      }
      for (int i = 0; i < count; i++) of_heads[i] = token_scale(from + i * pages.scale_head);
      return spread();
    };
    for (int key = 0; key < kKeyTile; key++) {
      const bool is_seen = key >= tile.begin && key < tile.end;
      const __m512 of_key = is_seen ? _mm512_mul_ps(factor, read(tile.k_scale[key], a.k)) : factor;
      _mm512_store_ps(k_lanes + 16 * key, _mm512_max_ps(_mm512_set1_ps(kLeastFactor), of_key));  // NaN stays NaN
      _mm512_store_ps(v_lanes + 16 * key, is_seen ? read(tile.v_scale[key], a.v) : _mm512_setzero_ps());
    }
  }

  // Scores of a block -> probabilities; the block's earlier sums are multiplied by their decay.
  template <bool BY_LANE, class Beside>
  void softmax(const Tile& tile, const Block& block, const Beside& beside) {
    alignas(64) static constexpr auto kOnes = ones();
    const float *factor = BY_LANE ? k_lanes : k_scale, *v_factor = BY_LANE ? v_lanes : v_scale;
    if (a.center_size || a.soft_cap > 0.0f) change_scores<BY_LANE>(tile, block, factor), factor = kOnes.values;
    if (!whole(tile, block.row, BY_LANE ? rows : std::min(16, rows - block.row))) mask(tile, block);
    const __mmask16 lanes = static_cast<__mmask16>((1 << block.lanes) - 1);
    VF of_base = (VF)_mm512_mask_loadu_ps(_mm512_setzero_ps(), lanes, &base[block.state]);
    VF of_total = load(&total[block.state]);
    alignas(64) float decay[16], own[kProbabilities];
    float* pairs = BY_LANE ? own : block.probabilities;
    __mmask16 decays;
    if (a.scales == FREIGHT_TOKEN_SCALES)
      decays = TileSoftmax::compute<BY_LANE, true>(block.scores, factor, v_factor, of_base, of_total, decay, pairs, beside);
    else
      decays = TileSoftmax::compute<BY_LANE, false>(block.scores, factor, nullptr, of_base, of_total, decay, pairs, beside);
    _mm512_mask_storeu_ps(&base[block.state], lanes, (__m512)of_base);
    _mm512_mask_storeu_ps(&total[block.state], lanes, (__m512)of_total);
    if constexpr (BY_LANE) {
      TileSoftmax::transpose_pairs(pairs, block.probabilities);
      decay_rows(block, decay, decays & lanes);
    } else if (decays) {
      const VF kept = load(decay);
      for (int d = 0; d < tiles.value_dim; d++) store(block.out + 16 * d, load(block.out + 16 * d) * kept);
    }
  }

  // Multiply the rows of a block's sums that are in `decays` by their decay.
  void decay_rows(const Block& block, const float* decay, uint32_t decays) const {
    const int dim = tiles.value_dim;
    for (; decays; decays &= decays - 1) {
      const int lane = __builtin_ctz(decays);
      float* of_row = block.out + static_cast<size_t>(lane) * dim;
      const VF kept = set1(decay[lane]);
      for (int d = 0; d < dim; d += 4 * W)
        FREIGHT_UNROLL
        for (int i = 0; i < 4; i++) store(of_row + d + i * W, load(of_row + d + i * W) * kept);
    }
  }

  struct Factors {
    float values[kScores];
  };
  static constexpr Factors ones() {
    Factors all{};
    for (float& one : all.values) one = 1.0f;
    return all;
  }

  // Set the scores of keys that a lane's row does not see to -infinity.
  void mask(const Tile& tile, const Block& block) const {
    alignas(64) int32_t first[16] = {}, last[16] = {};
    for (int i = 0; i < block.lanes; i++) {
      const int row = (block.state + i) % row_stride % rows;
      int begin, end;
      seen(tile, row / group, begin, end);
      first[i] = begin, last[i] = end;
    }
    const __m512i begin = _mm512_load_si512(first), end = _mm512_load_si512(last);
    const __m512 never = _mm512_set1_ps(-kInfinity);
    for (int key = 0; key < kKeyTile; key++) {
      const __m512i at = _mm512_set1_epi32(key);
      const int unseen = _mm512_cmplt_epi32_mask(at, begin) | _mm512_cmpge_epi32_mask(at, end);
      _mm512_mask_storeu_ps(block.scores + 16 * key, static_cast<__mmask16>(unseen), never);
    }
  }

  // Products -> scores, with the contribution of the keys' center and the soft cap.
  template <bool BY_LANE>
  void change_scores(const Tile& tile, const Block& block, const float* factor) const {
    for (int key = 0; key < kKeyTile; key++) {
      float* at = block.scores + 16 * key;
      store(at, load(at) * (BY_LANE ? load(factor + 16 * key) : set1(factor[key])));
    }
    if (a.center_size)
      for (int lane = 0; lane < block.lanes;) {
        const int h = (block.state + lane) / row_stride;
        const int count = std::min((h + 1) * row_stride - block.state, block.lanes) - lane;
        add_center(tile, h, block, lane, count);
        lane += count;
      }
    if (a.soft_cap > 0.0f)
      for (int key = 0; key < kKeyTile; key++) store(block.scores + 16 * key, softened(load(block.scores + 16 * key)));
  }

  // scores += the contribution of the keys' center, in `count` lanes of one KV head.
  void add_center(const Tile& tile, int h, const Block& block, int lane, int count) const {
    const int64_t first = static_cast<int64_t>(tile.key / kKeyTile) * (a.rotary_dim / 2);
    const int32_t* pairs = a.center_pairs + static_cast<int64_t>(task.head + h) * a.center_size;
    const __mmask16 lanes = static_cast<__mmask16>(((1 << count) - 1) << lane);
    for (int i = 0; i < a.center_size; i++) {
      alignas(64) float of_cos[16] = {}, of_sin[16] = {};
      for (int j = lane; j < lane + count; j++) {
        const int row = (block.state + j) % row_stride;
        if (row >= rows) continue;
        const float* factors = center_of(h * rows + row);
        of_cos[j] = factors[2 * i], of_sin[j] = factors[2 * i + 1];
      }
      const int64_t from = (first + pairs[i]) * kKeyTile;
      for (int key = 0; key < kKeyTile; key++) {
        float* at = block.scores + 16 * key;
        VF s = load(at);
        s = fma(set1(a.center_cos[from + key]), load(of_cos), s);
        s = fma(set1(a.center_sin[from + key]), load(of_sin), s);
        _mm512_mask_storeu_ps(at, lanes, (__m512)s);
      }
    }
  }

  const int blocks;
  // Two blocks share the loads of a tile if keys, values and all of one block do not stay in L1 anyway (48 KiB). Measured
  // against one: heads of 128 and more 1.07 to 1.10 times as fast, heads of 64 0.89 to 0.96.
  const bool two_share = tiles.k_dim + tiles.v_dim > 128;
  std::vector<float> base, total;  // of rows of `out`
  AttentionRegisters registers;
  alignas(64) float k_lanes[kScores], v_lanes[kScores];
};

}  // namespace freight
#endif
