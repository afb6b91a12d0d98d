// Products with inputs in INT8 by group (int8_groups.h) on AMX tiles, for more rows than vectors multiply at once. The
// sums are exact, and what follows them has the order of the vectors, so that the bits are the same.
//
// A task decodes a band of weights to bytes, once for all rows. Then 16 rows times 16 outputs are 1 or 2 tile products a
// group, and their terms are added to sums in registers. Codes of 4 to 6 bits are at most 63, so that
// they are signed bytes, too; those of INT8 and IQ4 become so again.
#pragma once
#include "int8_groups.h"
#include "memory.h"
#include "product.h"
#include "tiles.h"

#if FREIGHT_AMX

namespace freight {

// The tiles of a group: 0 and 1 for sums, 2 for x, 3 for weights.
class GroupTileRegisters : public LoadedTiles {
 public:
  // `bytes`: of a row of x in a tile, 16 to 64.
  void set_inputs(int bytes) {
    if (bytes == bytes_) return;
    bytes_ = bytes;
    TileConfig config;
    config.row_bytes[2] = static_cast<uint16_t>(bytes);
    config.rows[3] = static_cast<uint8_t>(bytes / 4);
    load(config);
  }

 private:
  int bytes_ = 0;
};

// A band of weights as bytes. lines: [2 blocks][groups][inputs / 4][64]; scales, zeros: [2 blocks][groups][16]; where
// groups have minima, they are in the place of zeros.
template <class Kind>
struct DecodedBand {
  const FourBit& layout;
  const int inputs = layout.inputs / layout.groups;
  const int64_t groups;
  uint8_t* lines;
  float* scales;
  int32_t* zeros;

  static int64_t bytes(int64_t groups, int inputs) { return kBand * groups * (inputs / 4 + 2) * kUnit; }

  DecodedBand(const FourBit& of, int64_t pieces, uint8_t* memory) : layout(of), groups(pieces * of.groups), lines(memory) {
    scales = reinterpret_cast<float*>(memory + kBand * groups * (inputs / 4) * kUnit);
    zeros = reinterpret_cast<int32_t*>(scales + kBand * groups * kLanes);
  }

  void decode(const uint8_t* piece) const {
    using Lines = GroupLines<Kind::codes>;
    const __m512i sign = _mm512_set1_epi8(is_bytes(Kind::codes) ? -128 : 0);
    const int64_t ahead = layout.groups > 2 ? layout.bytes : layout.bytes * 4;
    for (int64_t group = 0; group < groups; group++) {
      const int in_piece = static_cast<int>(group % layout.groups);
      for (int side = 0; side < kBand; side++) {
        const int64_t at = side * groups + group;
        uint8_t* to = lines + at * (inputs / 4) * kUnit;
        const Lines of_group(layout, side, in_piece);
        const uint8_t* from = piece + of_group.line;
        HighBits high{};
        if constexpr (high_bits(Kind::codes) != 0) high.read(piece + of_group.high);
        for (int line = 0; line < inputs / kLineInputs; line++, from += kBand * Lines::line_bytes, to += 2 * kUnit) {
          __builtin_prefetch(from + ahead);
          const CodeLine<Kind::codes, 0> codes(from, high);
          _mm512_store_si512(to, _mm512_xor_si512(codes.first, sign));
          _mm512_store_si512(to + kUnit, _mm512_xor_si512(codes.last, sign));
          if constexpr (high_bits(Kind::codes) != 0) high.skip(2 * high_bits(Kind::codes));
        }
        store(scales + at * kLanes, Kind::scales(layout, piece, side, in_piece));
        if constexpr (Kind::has_minima)
          store(reinterpret_cast<float*>(zeros) + at * kLanes, Kind::minima(layout, piece, side, in_piece));
        else if (layout.zeros)
          _mm512_store_si512(zeros + at * kLanes, (__m512i)of_bytes(piece + zeros_at(layout, side, in_piece)).v[0]);
      }
      if (in_piece + 1 == layout.groups) piece += layout.bytes;
    }
  }
};

// Products of 16 rows by a block, of one group after the other: sums[16][16]. x: the staged groups of a tile of rows.
template <class Kind, bool kZeros>
__attribute__((noinline)) void multiply_group_tiles(const DecodedBand<Kind>& band, int side, const uint32_t* x, float* sums) {
  const int inputs = band.inputs, bytes = std::min(inputs, kTileRowBytes);
  const int64_t words = group_words(inputs) * kTileLines;
  constexpr int zero = is_bytes(Kind::codes) ? 0 : Kind::zero;
  alignas(64) int32_t dots[2][kTileLines * kLanes], less[kTileLines];
  __m512 total[kTileLines];
  FREIGHT_UNROLL
  for (int row = 0; row < kTileLines; row++) total[row] = _mm512_setzero_ps();
  const uint8_t* line = band.lines + side * band.groups * (inputs / 4) * kUnit;
  for (int64_t group = 0; group < band.groups; group++, x += words, line += inputs / 4 * kUnit) {
    int32_t* sum = dots[group % 2];
    memory_barrier();
    _tile_zero(0);
    for (int at = 0; at < inputs; at += bytes) {
      _tile_loadd(2, reinterpret_cast<const uint8_t*>(x) + at, inputs);
      _tile_loadd(3, line + at / 4 * kUnit, kUnit);
      _tile_dpbssd(0, 2, 3);
    }
    _tile_stored(0, sum, kLanes * 4);
    memory_barrier();
    const float* scale = reinterpret_cast<const float*>(x + inputs / 4 * kTileLines);
    const __m512i of_x = _mm512_loadu_si512(scale + kTileLines);
    const __m512 scales = _mm512_load_ps(band.scales + (side * band.groups + group) * kLanes);
    const int32_t* const of_zero = band.zeros + (side * band.groups + group) * kLanes;
    const __m512i zeros = kZeros ? _mm512_load_si512(of_zero) : __m512i{};
    const __m512 minima = Kind::has_minima ? _mm512_load_ps(of_zero) : __m512{};
    _mm512_store_si512(less, kZeros ? of_x : _mm512_mullo_epi32(of_x, _mm512_set1_epi32(zero)));
    FREIGHT_UNROLL
    for (int row = 0; row < kTileLines; row++) {
      __m512i exact = _mm512_load_si512(sum + row * kLanes);
      if constexpr (kZeros)
        exact = _mm512_sub_epi32(exact, _mm512_mullo_epi32(_mm512_set1_epi32(less[row]), zeros));
      else if constexpr (zero != 0)
        exact = _mm512_sub_epi32(exact, _mm512_set1_epi32(less[row]));
      const __m512 dot = _mm512_cvtepi32_ps(exact);
      total[row] = _mm512_add_ps(total[row], _mm512_mul_ps(dot, _mm512_mul_ps(scales, _mm512_set1_ps(scale[row]))));
      if constexpr (Kind::has_minima)
        total[row] = _mm512_add_ps(total[row], _mm512_mul_ps(minima, _mm512_set1_ps(scale[kTileLines + row])));
    }
  }
  FREIGHT_UNROLL
  for (int row = 0; row < kTileLines; row++) _mm512_store_ps(sums + row * kLanes, total[row]);
}

// A band of a product for all its rows. finish(sums[16][16], row, rows, block) is called for 16 rows and a block.
template <class Kind, class Finish>
void group_tile_task(const Product& call, int64_t band, const Finish& finish) {
  thread_local WorkingMemory memory;
  const FreightWeight& weight = *call.weight;
  const FourBit layout = four_bit(weight.format);
  const int64_t pieces = units_of(weight.format, weight.in_features);
  const int inputs = layout.inputs / layout.groups;
  const DecodedBand<Kind> decoded(layout, pieces, memory.of(DecodedBand<Kind>::bytes(pieces * layout.groups, inputs)));
  decoded.decode(static_cast<const uint8_t*>(weight.data) + band * pieces * layout.bytes);
  GroupTileRegisters tiles;
  tiles.set_inputs(std::min(inputs, kTileRowBytes));
  alignas(64) float sums[kTileLines * kLanes];
  for (int64_t row = 0; row < call.rows; row += kTileLines)
    for (int side = 0; side < kBand && (band * kBand + side) * kLanes < weight.out_features; side++) {
      const uint32_t* x = static_cast<const uint32_t*>(call.staged.x) + row * call.staged.steps;
      bool done = false;
      if constexpr (Kind::codes == Codes::kInt4 && !Kind::has_minima)
        if (layout.zeros) multiply_group_tiles<Kind, true>(decoded, side, x, sums), done = true;
      if (!done) multiply_group_tiles<Kind, false>(decoded, side, x, sums);
      finish(sums, row, std::min<int64_t>(kTileLines, call.rows - row), band * kBand + side);
    }
}

}  // namespace freight

#endif
