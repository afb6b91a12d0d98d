// The product on tiles (tiles.h), for 5 rows and more; of FP8 weights for more than 32 (tile_few.h).
//
// A task has a few bands of 32 outputs and walks their inputs in panels. Within a panel all rows are multiplied by all
// bands; between panels the sums are in memory, which changes no bit. Weights of 4 and 8 bits are decoded once for all
// rows: a few registers of the next panel after every step of this one, so that tiles and vector units work at the same
// time. Without block scales, results are scaled, rounded and written during the last panel, in parallel to the tiles.
#pragma once
#include <algorithm>

#include "four_bit.h"
#include "memory.h"
#include "mxfp4.h"
#include "packed.h"
#include "tiles.h"

#if FREIGHT_AMX

namespace freight {

constexpr int64_t kTileAhead = 4096;     // prefetch distance in bytes from the weights that are decoded
constexpr int kStepBytes = 2 * kTileBytes;  // 32 inputs of a band in bfloat16, 64 in INT8: [16 units][2 blocks][64]
constexpr int kPairBytes = 2 * kGroupSteps * kTileBytes;  // a pair of row tiles in a group of inputs
constexpr int kSquare = 4 * kTileLines * kLanes;  // sums of 32 rows and a band: [2 row tiles][2 blocks][16][16]

struct TileJob {
  const FreightWeight& weight;
  const uint8_t* x;      // tiles: [groups][row tiles][kGroupSteps][kTileBytes]
  const float* x_scale;  // [rows][groups], or null
  int64_t rows;
  int bands;        // bands of a task
  int panel_steps;  // steps of 32 inputs of a panel: kGroupSteps with block scales, else a multiple

  TileJob(const FreightWeight& of, const void* tiles, const float* scale, int64_t count, int threads)
      : weight(of), x(static_cast<const uint8_t*>(tiles)), x_scale(scale), rows(count) {
    constexpr int64_t kMostBands = 8, kTasks = 3;  // measured; kTasks: least tasks per thread, if possible
    const int64_t most = std::clamp<int64_t>(all_bands() / (kTasks * threads), 1, kMostBands);
    bands = has_many() ? static_cast<int>(most) : 1;
    panel_steps = weight.block_scale || !has_many() ? kGroupSteps : 2 * kGroupSteps;
  }

  int64_t steps() const {
    const int64_t inputs = weight.format == FREIGHT_INT8 ? 2 * kTileInputs : kTileInputs;
    return (weight.in_features + inputs - 1) / inputs;
  }
  bool has_many() const { return rows >= 64; }  // measured
  int64_t panels() const { return (steps() + panel_steps - 1) / panel_steps; }
  int64_t band_panel() const { return static_cast<int64_t>(panel_steps) * kStepBytes; }  // bytes in bfloat16
  int64_t row_tiles() const { return (rows + kTileLines - 1) / kTileLines; }
  int64_t row_pairs() const { return (row_tiles() + 1) / 2; }
  int64_t all_bands() const { return bands_of(weight.out_features); }
  int64_t tasks() const { return (all_bands() + bands - 1) / bands; }
  const uint8_t* panel_rows(int64_t panel) const { return x + panel * panel_steps * row_tiles() * kTileBytes; }
};

constexpr int kStepPieces = kStepBytes / (2 * kUnit);  // of two registers of bfloat16

// Tables of INT4 for a band, and look-ups of 32 inputs of a row. RowLookups of NVFP4 have those of all scales.
template <class Codes>
struct RowLookups {
  alignas(64) uint8_t tables[kBand][kGroupSteps][kLanes][kUnit];  // of the groups of a piece, bfloat16

  FREIGHT_INLINE void begin(const FourBit& layout, const uint8_t* from) {
    for (int block = 0; block < kBand; block++)
      for (int group = 0; group < layout.groups; group++) {
        Int4::Scales scales;
        Int4::read(layout, from, block, group * (kGroupInputs / kFourInputs) / layout.groups, scales);
        for (int row = 0; row < kLanes; row++) _mm512_store_si512(tables[block][group][row], Int4::table(scales, row));
      }
  }
  FREIGHT_INLINE __m512i look_up(const FourBit& layout, const uint8_t*, int block, int row, int step, __m512i codes) const {
    return _mm512_permutexvar_epi16(codes, _mm512_load_si512(tables[block][step * layout.groups / kGroupSteps][row]));
  }
};

template <>
struct RowLookups<Nvfp4> {
  const Nvfp4::Tables& tables = Nvfp4::tables();

  static void begin(const FourBit&, const uint8_t*) {}
  FREIGHT_INLINE __m512i look_up(const FourBit& layout, const uint8_t* from, int block, int row, int step,
                                 __m512i codes) const {
    const uint8_t* scales = from + scales_at(layout, block, 2 * step) + row;
    return Nvfp4::look_up(tables, codes, scales, scales_at(layout, 0, 1));
  }
};

// Decoder of weights in 4 bits with scales of groups, for a band. Rows of 32 inputs are looked up and transposed: those
// of a block with the first piece of its half of a step.
template <class Codes>
struct GroupTiles {
  FourBit layout;
  const uint8_t *from, *codes;
  int step;  // of the four of a stored piece
  RowLookups<Codes> lookups;

  static constexpr int steps() { return kGroupSteps; }

  // Begin step `at` of a stored piece. Its first step makes the tables.
  FREIGHT_INLINE void begin(const uint8_t* stored, int at) {
    from = stored, codes = stored + layout.head, step = at;
    if (at == 0) lookups.begin(layout, stored);
  }

  FREIGHT_INLINE void piece(int at, uint8_t* to) {
    if (at % (kStepPieces / kBand)) return;
    const int block = at / (kStepPieces / kBand);
    const __m128i shift = _mm_cvtsi32_si128(4 * step);
    VF rows[kLanes];
    for (int row = 0; row < kLanes; row++) {
      const uint8_t* line = codes + (block * kLanes + row) * kUnit;
      _mm_prefetch(reinterpret_cast<const char*>(line + kTileAhead), _MM_HINT_T1);
      const __m512i code = _mm512_srl_epi16(_mm512_loadu_si512(line), shift);
      rows[row] = (VF)lookups.look_up(layout, from, block, row, step, code);
    }
    transpose(rows);
    for (int pair = 0; pair < kLanes; pair++) store(reinterpret_cast<float*>(to + (pair * kBand + block) * kUnit), rows[pair]);
  }
};
// Say whether tiles are loaded from the weights as they are stored.
template <int32_t FORMAT>
constexpr bool kAsStored = FORMAT == FREIGHT_BFLOAT16 || FORMAT == FREIGHT_INT8;

template <int32_t FORMAT>
using TileDecoder = std::conditional_t<
    FORMAT == FREIGHT_MXFP4, Mxfp4Pair,
    std::conditional_t<FORMAT == FREIGHT_INT4, GroupTiles<Int4>,
                       std::conditional_t<FORMAT == FREIGHT_NVFP4, GroupTiles<Nvfp4>, E4M3Pair>>>;
template <int32_t FORMAT>
constexpr bool kOfGroups = FORMAT == FREIGHT_INT4 || FORMAT == FREIGHT_NVFP4;

// Bytes of a stored step.
template <int32_t FORMAT>
constexpr int kStoredStep = FORMAT == FREIGHT_MXFP4 ? kBand * kMxUnit
                            : FORMAT == FREIGHT_E4M3FN ? kStepBytes / 2 : kStepBytes;

// Bytes of `steps` stored steps of a band, from the first on, or of those that are left of it.
template <int32_t FORMAT>
int64_t stored_bytes(const TileDecoder<FORMAT>& decoder, int64_t steps) {
  if constexpr (kOfGroups<FORMAT>) return (steps + decoder.steps() - 1) / decoder.steps() * decoder.layout.bytes;
  else return (void)decoder, steps * kStoredStep<FORMAT>;
}

// Preparation of the next panel of some bands, in pieces of 128 bytes of bfloat16 or INT8. Such weights are prefetched,
// the others decoded to `to`.
template <int32_t FORMAT>
struct Ahead {
  static constexpr int kPieces = kStepBytes / 128;  // pieces of a step
  TileDecoder<FORMAT> decoder;
  const uint8_t* from;
  uint8_t* to;
  int64_t from_skip, to_skip;  // bytes from the end of a band's panel to the next band's
  int each, bands;             // pieces of a band; remaining bands
  int piece = 0;

  int pieces() const { return each * bands; }

  void advance(int count) {
    for (; count > 0 && bands > 0; count--) {
      if constexpr (FORMAT == FREIGHT_MXFP4) {
        mxfp4_piece(piece % kPieces);
      } else if constexpr (kOfGroups<FORMAT>) {
        group_piece();
      } else if constexpr (FORMAT == FREIGHT_E4M3FN) {
        __builtin_prefetch(from + kTileAhead);
        __m512i lines[2];
        decoder.decode(from, 0, lines);
        uint8_t* line = to + piece % kBand * kUnit;
        _mm512_store_si512(line, lines[0]);
        _mm512_store_si512(line + kBand * kUnit, lines[1]);
        to += piece % kBand * 2 * kBand * kUnit;
        from += kUnit;
      } else {
        _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T1);  // a panel may be larger than L1
        _mm_prefetch(reinterpret_cast<const char*>(from + kUnit), _MM_HINT_T1);
        from += 2 * kUnit;
      }
      if (++piece == each) piece = 0, bands--, from += from_skip, to += to_skip;
    }
  }

  void group_piece() {
    const int at = piece % kPieces, step = piece / kPieces % decoder.steps();
    if (at == 0) decoder.begin(from, step);
    decoder.piece(at, to);
    if (at < kPieces - 1) return;
    to += kStepBytes;
    if (step + 1 == decoder.steps() || piece + 1 == each) from += decoder.layout.bytes;
  }

  // Four inputs of a block; a step has those of one block, then those of the other.
  void mxfp4_piece(int at) {
    const int pair = at % (kPieces / kBand) * 2, block = at / (kPieces / kBand);
    __builtin_prefetch(from + kTileAhead + at * (kStoredStep<FORMAT> / kPieces));
    __m512i lines[2];
    decoder.decode(from + block * kMxUnit, pair, lines);
    for (int i = 0; i < 2; i++) _mm512_store_si512(to + ((pair + i) * kBand + block) * kUnit, lines[i]);
    if (at == kPieces - 1) from += kStoredStep<FORMAT>, to += kStepBytes;
  }
};

// Data that tiles load next, prefetched while they multiply: many rows do not stay in L2, nor their sums in L1.
struct Soon {
  const uint8_t* rows;  // this band's part of the next pair of row tiles, into L2
  int lines;            // lines of it that a step prefetches in each group of inputs; 0: neither rows nor sums
  const float* sums;    // the next square, into L1
};

// The product of two tiles, in the arithmetic of FORMAT. A macro, because the numbers of tiles are immediates.
#define FREIGHT_TILE_PRODUCT(sums, rows, weights)     \
  if constexpr (FORMAT == FREIGHT_INT8)               \
    _tile_dpbssd(sums, rows, weights);                \
  else                                                \
    _tile_dpbf16ps(sums, rows, weights)

// sums += up to 32 rows x a band over a panel, or if `fresh` sums = that. Each step also advances `ahead` by `each`
// pieces.
template <int ROW_TILES, int32_t FORMAT>
inline void multiply(const uint8_t* a, int64_t a_group, const uint8_t* b, int steps, bool fresh, float* sums,
                     Ahead<FORMAT>& ahead, int each, const Soon& soon) {
  constexpr int kSums = kTileLines * kLanes, kStepSums = kSquare / (2 * kGroupSteps);
  memory_barrier();
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kTileRowBytes);
    _tile_loadd(1, sums + kSums, kTileRowBytes);
    if constexpr (ROW_TILES == 2) {
      _tile_loadd(2, sums + 2 * kSums, kTileRowBytes);
      _tile_loadd(3, sums + 3 * kSums, kTileRowBytes);
    }
  }
  for (int step = 0; step < steps; step++, b += kStepBytes) {
    const uint8_t* at = a + step / kGroupSteps * a_group + step % kGroupSteps * kTileBytes;
    _tile_loadd(4, at, kTileRowBytes);
    _tile_loadd(6, b, kBand * kUnit);
    _tile_loadd(7, b + kUnit, kBand * kUnit);
    FREIGHT_TILE_PRODUCT(0, 4, 6);
    FREIGHT_TILE_PRODUCT(1, 4, 7);
    if constexpr (ROW_TILES == 2) {
      _tile_loadd(5, at + kGroupSteps * kTileBytes, kTileRowBytes);
      FREIGHT_TILE_PRODUCT(2, 5, 6);
      FREIGHT_TILE_PRODUCT(3, 5, 7);
    }
    // The loops are not separate functions: GCC takes a function that only prefetches for one without effects, and
    // removes its calls. A single tile of rows is all there is, or the end of many: it prefetches none.
    if constexpr (ROW_TILES == 2) {
      const uint8_t* rows = soon.rows + step / kGroupSteps * a_group + step % kGroupSteps * soon.lines * kUnit;
      for (int i = 0; i < soon.lines; i++) _mm_prefetch(reinterpret_cast<const char*>(rows + i * kUnit), _MM_HINT_T1);
      if (soon.lines)
        for (int i = 0; i < kStepSums; i += kLanes) __builtin_prefetch(soon.sums + step * kStepSums + i, 1);
    }
    ahead.advance(each);
  }
  _tile_stored(0, sums, kTileRowBytes);
  _tile_stored(1, sums + kSums, kTileRowBytes);
  if constexpr (ROW_TILES == 2) {
    _tile_stored(2, sums + 2 * kSums, kTileRowBytes);
    _tile_stored(3, sums + 3 * kSums, kTileRowBytes);
  }
  memory_barrier();
}

// totals += sums * scales for a group of inputs and `rows` rows of a pair of row tiles; x_scale points to the first
// row's.
inline void add_scaled(const float* sums, int64_t rows, float weight_scale, const float* x_scale, int64_t stride,
                       float* totals) {
  for (int64_t row = 0; row < rows; row++) {
    const V16 scale = set16(x_scale ? weight_scale * x_scale[row * stride] : weight_scale);
    const int64_t at = row / kTileLines * 2 * kTileLines * kLanes + row % kTileLines * kLanes;
    for (int64_t to = at, j = 0; j < kBand; j++, to += kTileLines * kLanes)
      store(totals + to, fma(load16(sums + to), scale, load16(totals + to)));
  }
}

// One task on one thread. `scratch` holds two panels of its bands; sums: [row pairs][bands of the task][kSquare].
template <int32_t FORMAT, class Finish>
struct TileTask {
  const TileJob& job;
  int64_t first_band;
  int bands;
  uint8_t* scratch;
  float* sums;
  const TileDecoder<FORMAT>& decoder;
  const Finish& finish;

  static constexpr bool kDecodes = !kAsStored<FORMAT>;
  int steps_of(int64_t panel) const {
    return static_cast<int>(std::min<int64_t>(job.panel_steps, job.steps() - panel * job.panel_steps));
  }
  uint8_t* decoded(int64_t panel) const { return scratch + panel % 2 * bands * job.band_panel(); }
  const uint8_t* stored(int64_t panel) const {
    const auto* data = static_cast<const uint8_t*>(job.weight.data);
    return data + first_band * stored_bytes<FORMAT>(decoder, job.steps()) +
           stored_bytes<FORMAT>(decoder, panel * job.panel_steps);
  }
  Ahead<FORMAT> ahead_of(int64_t panel) const {
    if (panel >= job.panels()) return {decoder, nullptr, nullptr, 0, 0, 0, 0};
    const int64_t steps = steps_of(panel);
    return {decoder, stored(panel), decoded(panel), stored_bytes<FORMAT>(decoder, job.steps()) - stored_bytes<FORMAT>(decoder, steps),
            job.band_panel() - steps * kStepBytes, static_cast<int>(steps) * kStepBytes / 128, bands};
  }

  __attribute__((noinline)) void compute() const {
    Ahead<FORMAT> first = ahead_of(0);
    first.advance(first.pieces());
    if (job.weight.block_scale) std::fill(sums, sums + job.row_pairs() * bands * kSquare, 0.f);
    for (int64_t panel = 0; panel < job.panels(); panel++) compute_panel(panel);
  }

  void compute_panel(int64_t panel) const {
    Ahead<FORMAT> ahead = ahead_of(panel + 1);
    const int steps = steps_of(panel), places = static_cast<int>(job.row_pairs()) * bands * steps;
    const int each = (ahead.pieces() + places - 1) / places;
    const uint8_t* b = kDecodes ? decoded(panel) : stored(panel);
    const int64_t b_stride = kDecodes ? job.band_panel() : job.steps() * kStepBytes;
    const uint8_t* a = job.panel_rows(panel);
    const bool last = panel + 1 == job.panels(), finishes = last && !job.weight.block_scale;
    const uint8_t* following = job.panel_rows(last ? 0 : panel + 1);  // the next task begins with the first
    // few rows stay in the caches, and their prefetches would keep those of weights waiting
    const int lines = job.has_many() ? (kPairBytes / (kGroupSteps * kUnit) + bands - 1) / bands : 0;
    for (int64_t pair = 0; pair < job.row_pairs(); pair++, a += kPairBytes) {
      const uint8_t* next = pair + 1 < job.row_pairs() ? a + kPairBytes : following;
      for (int band = 0; band < bands; band++) {
        const int64_t square = pair * bands + band;
        float* to = sums + square * kSquare;
        const Soon soon{next + band * kGroupSteps * lines * kUnit, lines, to + kSquare};
        if (!job.weight.block_scale) {
          rows_of(pair, a, b + band * b_stride, steps, panel == 0, to, ahead, each, soon);
          if (finishes && square) finish_square(square - 1);
          continue;
        }
        alignas(64) float group[kSquare];
        rows_of(pair, a, b + band * b_stride, steps, true, group, ahead, each, soon);
        const int64_t groups = job.panels(), row = pair * 2 * kTileLines;
        add_scaled(group, std::min<int64_t>(2 * kTileLines, job.rows - row),
                   job.weight.block_scale[(first_band + band) * kBand * kLanes / kGroup * groups + panel],
                   job.x_scale ? job.x_scale + row * groups + panel : nullptr, groups, to);
      }
    }
    ahead.advance(ahead.pieces());
    if (finishes) finish_square(job.row_pairs() * bands - 1);
  }

  // Finish the outputs of a square. It is called one square after the sums were stored, so that reading them does not
  // wait for the stores.
  void finish_square(int64_t square) const {
    const int64_t pair = square / bands, band = square % bands;
    const float* from = sums + square * kSquare;
    for (int64_t row = pair * 2 * kTileLines, i = 0; i < 2 && row < job.rows; i++, row += kTileLines)
      finish.band(from + i * 2 * kTileLines * kLanes, kTileLines * kLanes, row,
                  std::min<int64_t>(kTileLines, job.rows - row), (first_band + band) * kBand);
  }

  void rows_of(int64_t pair, const uint8_t* a, const uint8_t* b, int steps, bool fresh, float* to, Ahead<FORMAT>& ahead,
               int each, const Soon& soon) const {
    const int64_t a_group = job.row_tiles() * kGroupSteps * kTileBytes;
    if (2 * pair + 1 < job.row_tiles())
      multiply<2>(a, a_group, b, steps, fresh, to, ahead, each, soon);
    else
      multiply<1>(a, a_group, b, steps, fresh, to, ahead, each, soon);
  }
};

// Compute some bands. Calls finish.band(sums of the band's first block, floats from there to the second block's, row,
// rows, first block) for all rows of each band.
template <int32_t FORMAT, class Finish>
void tile_task(const TileJob& job, const TileDecoder<FORMAT>& decoder, int64_t task, const Finish& finish) {
  thread_local WorkingMemory memory;
  const int64_t all = job.all_bands();
  const int64_t first = task * job.bands, squares = job.row_pairs() * job.bands;
  const int bands = static_cast<int>(std::min<int64_t>(job.bands, all - first));
  const int64_t scratch = kAsStored<FORMAT> ? 0 : 2 * job.bands * job.band_panel();
  uint8_t* at = memory.of(scratch + squares * kSquare * 4);
  float* sums = reinterpret_cast<float*>(at + scratch);
  const TileTask<FORMAT, Finish> all_rows{job, first, bands, at, sums, decoder, finish};
  TileRegisters tiles;
  tiles.set_rows(static_cast<int>(std::min<int64_t>(job.rows, kTileLines)));
  if (!job.weight.block_scale) return all_rows.compute();  // vectors decode, and finish where subnormals count
  {
    const SubnormalsAreZero subnormals;
    all_rows.compute();
  }
  for (int64_t square = 0; square < job.row_pairs() * bands; square++) all_rows.finish_square(square);
}

}  // namespace freight

#endif
