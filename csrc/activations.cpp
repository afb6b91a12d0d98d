// Staging of activations, and their rounding to E4M3FN as fp8/cast.py defines it, or to INT8 (int8.h).
#include "activations.h"

#include <algorithm>
#include <cstring>

#include "int8_groups.h"
#include "memory.h"
#include "parallel.h"
#include "product.h"
#include "ranks.h"
#include "rows.h"
#include "tiles.h"

namespace freight {
namespace {

constexpr float kLargest = 448.f;  // E4M3FN
constexpr float kLargestInt8 = 127.f;

// Round v to the nearest E4M3FN values, ties to even, saturating; NaN stays NaN. The results are exact in bfloat16.
inline VF round_e4m3(VF v) {
  const VF largest = set1(kLargest);
  const VF bounded = v > largest ? largest : v < -largest ? -largest : v;
  const VU bits = (VU)bounded, magnitude = bits & 0x7FFFFFFFu;
  const VU normal = (bits + 0x7FFFFu + (bits >> 20 & 1u)) & 0xFFF00000u;  // three bits of mantissa
  const VF small = ((VF)magnitude + set1(0x1p14f)) - set1(0x1p14f);        // a multiple of 2^-9
  const VU subnormal = (VU)small | (bits & 0x80000000u);
  return v != v ? v : (VF)((VI)magnitude < 0x3C800000 ? subnormal : normal);  // below 2^-6
}

// The largest finite magnitude of `count` values from `first` on; 16-bit values are compared as they are stored.
float largest_of(const void* x, int32_t format, int64_t first, int64_t count) {
  if (format == FREIGHT_FLOAT32) return largest_finite(static_cast<const float*>(x) + first, count);
  const uint16_t* halves = static_cast<const uint16_t*>(x) + first;
  const int16_t infinity = format == FREIGHT_BFLOAT16 ? 0x7F80 : 0x7C00;
  int16_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    const int16_t magnitude = static_cast<int16_t>(halves[i] & 0x7FFF);
    const int16_t finite = magnitude < infinity ? magnitude : static_cast<int16_t>(0);
    largest = largest > finite ? largest : finite;
  }
  const uint16_t half = static_cast<uint16_t>(largest);
  return format == FREIGHT_BFLOAT16 ? bf16_to_float(half) : f16_to_float(half);
}

// Say whether one of `count` values from `first` on is NaN: as an integer its magnitude is above infinity's.
bool has_nan(const void* x, int32_t format, int64_t first, int64_t count) {
  if (format == FREIGHT_FLOAT32) {
    const float* values = static_cast<const float*>(x) + first;
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
      const int32_t magnitude = static_cast<int32_t>(float_to_bits(values[i]) & 0x7FFFFFFFu);
      largest = largest > magnitude ? largest : magnitude;
    }
    return largest > 0x7F800000;
  }
  const uint16_t* halves = static_cast<const uint16_t*>(x) + first;
  int16_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    const int16_t magnitude = static_cast<int16_t>(halves[i] & 0x7FFF);
    largest = largest > magnitude ? largest : magnitude;
  }
  return largest > (format == FREIGHT_BFLOAT16 ? 0x7F80 : 0x7C00);
}

// Divide values [count], padded with zeros to a multiple of 16, by `scale` and round them.
void round_by(float* values, int64_t count, float scale) {
  const VF by = set1(scale);
  for (int64_t i = 0; i < count; i += W) store(values + i, round_e4m3(load(values + i) / by));
}

constexpr int64_t kColumns = 1024;         // columns of a task; a multiple of kGroup
constexpr int64_t kPartPanels = 8;         // panels of a task if there are few tiles
constexpr int64_t kShareOfStaging = 8192;  // values per thread: fewer are not worth another thread

// Inputs of a panel of tiles: those that share a block scale, or twice as many in INT8.
int64_t panel_inputs(const FreightWeight& weight) { return weight.format == FREIGHT_INT8 ? 2 * kGroup : kGroup; }

// Inputs of a row in a word of a layout.
int inputs_of(Layout layout) { return layout == Layout::kInt8 ? kInt8Word : layout == Layout::kFloats ? 1 : 2; }

bool integer_layout(Layout layout) { return layout == Layout::kIntegers || layout == Layout::kIntegerTiles; }
int64_t tile_rows(Layout layout) {
  return layout == Layout::kTiles || layout == Layout::kIntegerTiles ? 16 : kTileRows;
}

struct Stager {
  const FreightWeight& weight;
  const void* x;
  int32_t format;
  Layout layout;
  int64_t steps, groups;
  float *row_scale, *group_scale;
  const int32_t* index = nullptr;       // Product::index
  int64_t stride = weight.in_features;  // Product::x_stride
  int64_t begin = 0, end = weight.in_features;  // the columns that x has
  int inputs = inputs_of(layout);               // of a word

  // The index in x of column `first` of a row.
  int64_t at(int64_t row, int64_t first) const { return (index ? index[row] : row) * stride + first - begin; }

  // The inputs of columns `first` .. `first` + `count` of a row, as they are stored: in x, or gathered to `room`.
  const char* stored_inputs(int64_t row, int64_t first, int64_t count, void* room) const {
    if (!weight.order) return element(x, at(row, first), format);
    const int32_t* order = weight.order + first;
    const char* from = element(x, at(row, 0), format);
    for (int64_t i = 0; i < count; i++) {
      if (format == FREIGHT_FLOAT32)
        static_cast<uint32_t*>(room)[i] = reinterpret_cast<const uint32_t*>(from)[order[i]];
      else
        static_cast<uint16_t*>(room)[i] = reinterpret_cast<const uint16_t*>(from)[order[i]];
    }
    return static_cast<const char*>(room);
  }

  // The largest finite magnitude of the columns of a row; NaN if INT8 is to store a NaN.
  float largest_in(int64_t row) const {
    if (weight.format == FREIGHT_INT8 && has_nan(x, format, at(row, begin), end - begin)) return __builtin_nanf("");
    return weight.activations == FREIGHT_STATIC ? 0.f : largest_of(x, format, at(row, begin), end - begin);
  }

  // The scale of a row, from what `largest_in` gives for all its columns.
  float scale_of_row(float largest) const {
    if (largest != largest) return largest;  // INT8 has no NaN, so the scale makes the row's results NaN
    if (weight.activations == FREIGHT_STATIC) return weight.input_scale;
    return scale_from(largest, weight.format == FREIGHT_INT8 ? kLargestInt8 : kLargest);
  }

  void scale_row(int64_t row) const { row_scale[row] = scale_of_row(largest_in(row)); }

  // Columns `first` .. `first` + `count` of a row as float32, rounded to FP8 if the weight requires it, with zeros up
  // to a multiple of 16.
  void values_of(int64_t row, int64_t first, int64_t count, float* values) const {
    alignas(64) uint32_t room[kColumns];
    read_row(stored_inputs(row, first, count, room), format, count, values);
    if (row_scale) return round_by(values, count, row_scale[row]);
    if (!group_scale) return;
    for (int64_t done = 0; done < count; done += kGroup) {
      const int64_t part = std::min<int64_t>(kGroup, count - done);
      float& scale = group_scale[row * groups + (first + done) / kGroup];
      scale = scale_from(largest_finite(values + done, part), kLargest);
      round_by(values + done, part, scale);
    }
  }

  // The words of kColumns columns from `first` on of a row; words past its end are 0.
  void words_of(int64_t row, int64_t first, uint32_t* words) const {
    const int64_t count = std::max<int64_t>(0, std::min(kColumns, end - first));
    if (layout == Layout::kPairs && weight.activations == FREIGHT_PLAIN) {
      alignas(64) uint16_t room[kColumns];
      std::memset(words, 0, kColumns * 2);
      std::memcpy(words, stored_inputs(row, first, count, room), static_cast<size_t>(count) * 2);
      return;
    }
    alignas(64) float values[kColumns];
    std::memset(values + count, 0, static_cast<size_t>(kColumns - count) * 4);
    if (layout == Layout::kInt8) {
      read_row(element(x, at(row, first), format), format, count, values);
      return int8_words(values, row_scale[row], words);
    }
    values_of(row, first, count, values);
    if (layout == Layout::kFloats) {
      std::memcpy(words, values, sizeof(values));
      return;
    }
    for (int64_t i = 0; i < kColumns / 2; i++) {  // the upper halves of two values: FP8 values have no lower half
      uint64_t two;
      std::memcpy(&two, values + 2 * i, 8);
      words[i] = static_cast<uint32_t>(two >> 16 & 0xFFFFu) | static_cast<uint32_t>(two >> 32 & 0xFFFF0000u);
    }
  }

  // `count` values, a multiple of 16, divided by `scale` and rounded to INT8.
  static void divided_codes(const float* values, int64_t count, float scale, int32_t* codes) {
    const VF by = set1(scale);
    for (int64_t i = 0; i < count; i += W) {
      const VI rounded = int8_codes(load(values + i) / by);
      std::memcpy(codes + i, &rounded, sizeof rounded);
    }
  }

  // Words of kColumns values, divided by `scale` and rounded to INT8.
  static void int8_words(const float* values, float scale, uint32_t* words) {
    alignas(64) int32_t codes[kColumns];
    divided_codes(values, kColumns, scale, codes);
    for (int64_t i = 0; i < kColumns / kInt8Word; i++) words[i] = int8_word(codes + i * kInt8Word);
  }

  // The step after the last of the columns that x has, and after the zeros that follow the last column of all.
  int64_t end_step() const { return end == weight.in_features ? steps : end / inputs; }

  // Columns of rows after the last, which are zeros.
  int64_t columns() const {
    if (!integer_layout(layout)) return steps * inputs;
    const int piece = inputs_per_unit(weight.format);
    return (weight.in_features + piece - 1) / piece * piece;
  }

  // Inputs of a group of a row, rounded to INT8: their codes, their scale, and the sums of the codes of each term.
  struct IntegerCodes {
    alignas(64) int8_t code[kGroup] = {};
    float scale;
  };
  static void round_to_int8(const float* values, int64_t count, IntegerCodes& out) {
    out.scale = scale_from(largest_finite(values, count), kLargestInt8);
    if (has_nan(values, FREIGHT_FLOAT32, 0, count)) {  // INT8 has none, so the scale makes the row's results NaN
      out.scale = __builtin_nanf("");
      return void(std::memset(out.code, 0, sizeof out.code));
    }
    alignas(64) int32_t codes[kGroup];
    divided_codes(values, count, out.scale, codes);
    for (int64_t i = 0; i < count; i++) out.code[i] = static_cast<int8_t>(codes[i]);
  }

  // kColumns columns of a tile of H rows in the layout of int8_groups.h, or for tiles with the inputs of a row together.
  template <int H>
  void integers(int64_t tile, int64_t first, int64_t rows, uint32_t* to) const {
    const FourBit of_weight = four_bit(weight.format);
    const int term = of_weight.inputs / of_weight.groups, group = x_group(term), terms = group / term;
    const int64_t words = group_words(term), last = std::min(first + kColumns, columns());
    const int64_t height = tile_rows(layout), quads = term / 4;
    const bool together = layout == Layout::kIntegerTiles;
    const int64_t of_row = together ? quads : 1, of_quad = together ? 1 : H;
    uint32_t* out = to + tile * height * steps + first / term * words * H;
    std::memset(out, 0, static_cast<size_t>((last - first) / term * words * H) * 4);
    alignas(64) float values[kColumns];
    IntegerCodes own;
    for (int64_t row = 0; row < rows; row++) {
      alignas(64) uint32_t room[kColumns];
      const int64_t count = std::min(kColumns, weight.in_features - first);
      std::memset(values, 0, sizeof values);
      read_row(stored_inputs(tile * height + row, first, count, room), format, count, values);
      for (int64_t at = 0; at < last - first; at += group) {
        round_to_int8(values + at, group, own);
        for (int i = 0; i < terms; i++) {
          uint32_t* part = out + (at / term + i) * words * H;
          int32_t sum = 0;
          for (int j = 0; j < term; j++) sum += own.code[i * term + j];
          for (int64_t j = 0; j < quads; j++)
            std::memcpy(part + row * of_row + j * of_quad, own.code + i * term + 4 * j, 4);
          std::memcpy(part + quads * H + row, &own.scale, 4);
          const float minima = own.scale * static_cast<float>(sum);  // what minima are multiplied by
          if (of_weight.minimum_bytes)
            std::memcpy(part + (quads + 1) * H + row, &minima, 4);
          else
            std::memcpy(part + (quads + 1) * H + row, &sum, 4);
        }
      }
    }
  }

  // kColumns columns of a tile.
  template <int H>
  void part(int64_t tile, int64_t first, int64_t rows, uint32_t* to) const {
    if (layout == Layout::kIntegers) return integers<H>(tile, first, rows, to);
    const int64_t step = first / inputs, most = kColumns / inputs;
    const int64_t count = std::min(most, end_step() - step);
    alignas(64) uint32_t words[H][kColumns];
    for (int row = 0; row < H; row++) {
      if (row < rows)
        words_of(tile * kTileRows + row, first, words[row]);
      else
        std::memset(words[row], 0, sizeof(words[row]));
    }
    uint32_t* out = to + tile * kTileRows * steps + step * H;
    for (int64_t i = 0; i < count; i++)
      for (int row = 0; row < H; row++) out[i * H + row] = words[row][i];
  }

#if FREIGHT_AMX
  // Write the inputs of a panel of a row to a line of its tiles, as bfloat16, with zeros after the last.
  void panel_line(int64_t row, int64_t panel, uint8_t* line) const {
    const int64_t wide = panel_inputs(weight), first = panel * wide, count = std::min(wide, weight.in_features - first);
    alignas(64) uint16_t room[kGroupInputs], halves[kGroupInputs];
    const char* from = stored_inputs(row, first, count, room);
    if (weight.format == FREIGHT_INT8) return int8_line(from, count, row_scale[row], line);
    if (weight.activations != FREIGHT_PLAIN) return rounded_line(from, count, scale_of(row, panel, count), line);
    if (count < kGroupInputs) {
      std::memset(halves, 0, sizeof(halves));
      std::memcpy(halves, from, static_cast<size_t>(count) * 2);
      from = reinterpret_cast<const char*>(halves);
    }
    for (int step = 0; step < kGroupSteps; step++)
      std::memcpy(line + step * kTileBytes, from + step * kTileRowBytes, kTileRowBytes);
  }

  // The scale of a panel of a row. A group's scale is computed here.
  float scale_of(int64_t row, int64_t panel, int64_t count) const {
    if (row_scale) return row_scale[row];
    const float largest = largest_of(x, format, at(row, panel * kGroupInputs), count);
    return group_scale[row * groups + panel] = scale_from(largest, kLargest);
  }

  // Write `count` values rounded to FP8: their upper halves, because FP8 values have no lower half.
  void rounded_line(const char* from, int64_t count, float scale, uint8_t* line) const {
    const VF by = set1(scale);
    for (int64_t first = 0; first < kGroupInputs; first += kTileInputs, line += kTileBytes) {
      __m512i rounded[2];
      for (int64_t j = 0; j < 2; j++) {
        const int64_t begin = first + j * kLanes, left = count - begin;
        const V16 v = left <= 0 ? V16{} : load_as(element(from, begin, format), format, lanes_at(begin, count));
        rounded[j] = (__m512i)round_e4m3(v.v[0] / by);
      }
      _mm512_store_si512(line, upper_halves(rounded[0], rounded[1]));
    }
  }

  // Write `count` values, divided by `scale` and rounded to INT8.
  void int8_line(const char* from, int64_t count, float scale, uint8_t* line) const {
    const VF by = set1(scale);
    for (int step = 0, first = 0; step < kGroupSteps; step++, line += kTileBytes)
      for (int part = 0; part < kTileRowBytes; part += kLanes, first += kLanes) {
        V16 v{};
        if (first < count) v = load_as(element(from, first, format), format, lanes_at(first, count));
        const __m128i codes = _mm512_cvtepi32_epi8((__m512i)int8_codes(v.v[0] / by));
        _mm_store_si128(reinterpret_cast<__m128i*>(line + part), codes);
      }
  }

  // Write panels of a tile of `rows` rows to [panels][tiles][4][16][32]; `lines` of the 16 are written.
  void tile_part(int64_t tile, int64_t tiles, int64_t panel, int64_t end, int64_t rows, int64_t lines,
                 uint8_t* to) const {
    for (; panel < end; panel++) {
      uint8_t* out = to + (panel * tiles + tile) * kGroupSteps * kTileBytes;
      for (int64_t line = 0; line < lines; line++, out += kTileRowBytes) {
        if (line < rows) {
          panel_line(tile * kTileLines + line, panel, out);
          continue;
        }
        for (int step = 0; step < kGroupSteps; step++) std::memset(out + step * kTileBytes, 0, kTileRowBytes);
      }
    }
  }
#endif
};

int64_t groups_of(const FreightWeight& weight) {
  const int64_t inputs = panel_inputs(weight);
  return (weight.in_features + inputs - 1) / inputs;
}
bool by_group(const FreightWeight& weight) { return weight.activations == FREIGHT_DYNAMIC && weight.block_scale; }
bool by_row(const FreightWeight& weight) { return weight.activations != FREIGHT_PLAIN && !by_group(weight); }

int useful_threads(int64_t values, int threads) {
  return static_cast<int>(std::min<int64_t>(threads, values / kShareOfStaging + 1));
}

// A stager with scales in the calling thread's memory; group scales, of `lines` rows, are initialized to 1.
Stager stager_of(const FreightWeight& weight, const void* x, int32_t format, Layout layout, int64_t steps, int64_t rows,
                 int64_t lines) {
  thread_local std::vector<float> row_scale, group_scale;
  const int64_t groups = groups_of(weight);
  if (by_row(weight)) row_scale.resize(static_cast<size_t>(rows));
  if (by_group(weight)) group_scale.assign(static_cast<size_t>(lines * groups), 1.f);
  return {weight, x, format, layout, steps, groups, by_row(weight) ? row_scale.data() : nullptr,
          by_group(weight) ? group_scale.data() : nullptr};
}

// Stage `rows` rows: as float32, as words of INT8, or as pairs of bfloat16 (values that are not bfloat16 must have been
// rounded to FP8).
Staged stage(const FreightWeight& weight, const void* x, int32_t format, int64_t rows, Layout layout, int64_t steps,
             int threads) {
  thread_local std::vector<uint32_t> staged;
  const int64_t height = tile_rows(layout), tiles = (rows + height - 1) / height;
  const size_t words = static_cast<size_t>(tiles * height * steps);
  if (staged.size() < words) staged = std::vector<uint32_t>(words);
  uint32_t* to = staged.data();
  const Stager stager = stager_of(weight, x, format, layout, steps, rows, tiles * height);
  const int64_t parts = (stager.columns() + kColumns - 1) / kColumns;
  const int useful = useful_threads(rows * weight.in_features, threads);
  if (by_row(weight)) parallel_for(rows, rows > kTileRows ? useful : 1, [&](int64_t row) { stager.scale_row(row); });
  parallel_for(tiles * parts, useful, [&](int64_t task) {
    const int64_t tile = task / parts, first = task % parts * kColumns;
    const int64_t there = std::min<int64_t>(height, rows - tile * height);
    if (layout == Layout::kIntegerTiles) return stager.integers<16>(tile, first, there, to);
    with_height(height_of(there), [&](auto height) { stager.part<height>(tile, first, there, to); });
  });
  return {to, steps, stager.groups, stager.row_scale, stager.group_scale};
}

#if FREIGHT_AMX

// Stage rows as bfloat16 for AMX tiles: `x` of the result is [panels][tiles of 16 rows][4 steps][16 rows][32 inputs],
// where a panel has 128 inputs. The last tile's rows are padded with zeros unless it is the only tile.
Staged stage_tiles(const FreightWeight& weight, const void* x, int32_t format, int64_t rows, int threads) {
  constexpr int64_t kGroupBytes = kGroupSteps * kTileBytes;
  thread_local WorkingMemory memory;
  const int64_t groups = groups_of(weight), tiles = (rows + kTileLines - 1) / kTileLines;
  uint8_t* to = memory.of(tiles * groups * kGroupBytes);
  const Stager stager = stager_of(weight, x, format, Layout::kTiles, 0, rows, rows);
  const int useful = useful_threads(rows * weight.in_features, threads);
  const int64_t parts = tiles < 2 * useful ? std::max<int64_t>(1, (groups + kPartPanels - 1) / kPartPanels) : 1;
  const int64_t part = (groups + parts - 1) / parts;
  if (by_row(weight) && parts > 1) parallel_for(rows, useful, [&](int64_t row) { stager.scale_row(row); });
  parallel_for(tiles * parts, useful, [&](int64_t task) {
    const int64_t tile = task / parts, there = std::min<int64_t>(kTileLines, rows - tile * kTileLines);
    if (by_row(weight) && parts == 1)
      for (int64_t row = 0; row < there; row++) stager.scale_row(tile * kTileLines + row);
    const int64_t first = task % parts * part, end = std::min(first + part, groups);
    stager.tile_part(tile, tiles, first, end, there, tiles == 1 ? there : kTileLines, to);
  });
  return {to, 0, groups, stager.row_scale, stager.group_scale};
}

#endif

// Bytes of the staged rows of a product.
struct Sizes {
  int64_t x, row_scale, group_scale;

  Sizes(const Product& product, Layout layout, int64_t steps) {
    const int64_t rows = product.rows, groups = groups_of(*product.weight);
    int64_t lines = (rows - 1) / kTileRows * kTileRows;  // rows, including those that pad the last tile
    lines += height_of(rows - lines);
    if (layout == Layout::kIntegerTiles) lines = (rows + 15) / 16 * 16;
    x = lines * steps * 4;
#if FREIGHT_AMX
    if (layout == Layout::kTiles) x = (rows + kTileLines - 1) / kTileLines * groups * kGroupSteps * kTileBytes;
#endif
    row_scale = by_row(*product.weight) ? rows * 4 : 0;
    group_scale = by_group(*product.weight) ? lines * groups * 4 : 0;
  }
};

int64_t aligned(int64_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

int64_t steps_of(const FreightWeight& weight, Layout layout) {
  if (integer_layout(layout)) {
    const FourBit of_weight = four_bit(weight.format);
    return units_of(weight.format, weight.in_features) * of_weight.groups * group_words(of_weight.inputs / of_weight.groups);
  }
  const int64_t inputs = units_of(weight.format, weight.in_features) * inputs_per_unit(weight.format);
  return layout == Layout::kTiles ? inputs : inputs / inputs_of(layout);
}

// Stage columns `from` .. `to` of one of `tiles` tiles of `rows` rows to `x`. `from` is a multiple of a panel's inputs,
// and so is `to`, or it is the end of the rows.
void stage_columns(const Stager& stager, int64_t rows, int64_t tile, int64_t tiles, int64_t from, int64_t to, void* x) {
  const int64_t height = tile_rows(stager.layout), first = tile * height, there = std::min(height, rows - first);
#if FREIGHT_AMX
  if (stager.layout == Layout::kTiles) {
    const int64_t inputs = panel_inputs(stager.weight);
    return stager.tile_part(tile, tiles, from / inputs, (to + inputs - 1) / inputs, there,
                            tiles == 1 ? there : kTileLines, static_cast<uint8_t*>(x));
  }
#else
  (void)tiles;
#endif
  const int64_t begin = from / kGroup, end = (to + kGroup - 1) / kGroup;
  const int64_t columns = to == stager.weight.in_features ? stager.columns() : to;  // zeros follow the last
  if (stager.layout == Layout::kIntegerTiles) {
    for (int64_t column = from; column < columns; column += kColumns)
      stager.integers<16>(tile, column, there, static_cast<uint32_t*>(x));
    return;
  }
  with_height(height_of(there), [&](auto height) {
    if (stager.group_scale)
      for (int64_t row = first + there; row < first + height; row++)
        std::fill(stager.group_scale + row * stager.groups + begin, stager.group_scale + row * stager.groups + end, 1.f);
    for (int64_t column = from; column < columns; column += kColumns)
      stager.part<height>(tile, column, there, static_cast<uint32_t*>(x));
  });
}

// Stage all inputs of one tile of a product.
void stage_tile(const Product& product, int32_t format, Layout layout, int64_t tile, int64_t steps) {
  const Staged& staged = product.staged;
  float* row_scale = const_cast<float*>(staged.row_scale);  // in the memory of stage_all
  float* group_scale = const_cast<float*>(staged.group_scale);
  const Stager stager{*product.weight, product.x, format, layout, steps, staged.groups, row_scale,
                      group_scale, product.index, product.x_stride};
  const int64_t first = tile * tile_rows(layout), there = std::min(tile_rows(layout), product.rows - first);
  if (row_scale)
    for (int64_t row = first; row < first + there; row++) stager.scale_row(row);
  const int64_t tiles = (product.rows + tile_rows(layout) - 1) / tile_rows(layout);
  stage_columns(stager, product.rows, tile, tiles, 0, product.weight->in_features, const_cast<void*>(staged.x));
}

}  // namespace

void stage_one(Product& product, int32_t format, int threads) {
  const FreightWeight& weight = *product.weight;
  const Layout layout = layout_of(weight, format, product.rows);
#if FREIGHT_AMX
  if (layout == Layout::kTiles) {
    product.staged = stage_tiles(weight, product.x, format, product.rows, threads);
    return;
  }
#endif
  const int64_t steps = steps_of(weight, layout);
  product.staged = stage(weight, product.x, format, product.rows, layout, steps, threads);
}

bool staged_by_all(const FreightWeight& weight, const FreightRanks& ranks, int32_t format, int64_t rows) {
  const Layout layout = layout_of(weight, format, rows);
  if (integer_layout(layout) || ranks.exchange || weight.order || weight.in_features / ranks.size % panel_inputs(weight)) return false;
  Product product{&weight};
  product.rows = rows;
  const Sizes sizes(product, layout, steps_of(weight, layout));
  return aligned(sizes.x) + sizes.group_scale <= ranks.size * ranks.capacity && sizes.row_scale <= ranks.capacity;
}

namespace {

// Compute the scales of rows of which each rank has some columns: `stager` those of this rank.
FreightStatus scale_rows(const Stager& stager, const FreightRanks& ranks, int64_t rows, int threads) {
  const FreightWeight& weight = stager.weight;
  float* scale = stager.row_scale;
  if (weight.activations == FREIGHT_STATIC && weight.format != FREIGHT_INT8) {
    std::fill(scale, scale + rows, weight.input_scale);
    return FREIGHT_OK;
  }
  const Turn turn(ranks);
  if (const FreightStatus status = turn.begin()) return status;
  float* own = reinterpret_cast<float*>(turn.part(ranks.rank));
  parallel_for(rows, threads, [&](int64_t row) { own[row] = stager.largest_in(row); });
  turn.arrive();
  if (const FreightStatus status = turn.wait_for_all()) return status;
  for (int64_t row = 0; row < rows; row++) {
    float largest = 0.f;
    for (int r = 0; r < ranks.size; r++) {
      const float part = reinterpret_cast<const float*>(turn.part(r))[row];
      if (part > largest || part != part) largest = part;  // NaN stays
    }
    scale[row] = stager.scale_of_row(largest);
  }
  return FREIGHT_OK;
}

}  // namespace

FreightStatus stage_own(Product& product, const FreightRanks& ranks, int32_t format, int threads) {
  thread_local std::vector<float> row_scale;
  const FreightWeight& weight = *product.weight;
  const Layout layout = layout_of(weight, format, product.rows);
  const int64_t steps = steps_of(weight, layout), own = weight.in_features / ranks.size, begin = ranks.rank * own;
  const int useful = useful_threads(product.rows * own, threads);
  if (by_row(weight)) row_scale.resize(static_cast<size_t>(product.rows));
  Stager stager{weight, product.x, format, layout, steps, groups_of(weight), by_row(weight) ? row_scale.data() : nullptr,
                nullptr, nullptr, own, begin, begin + own};
  if (by_row(weight))
    if (const FreightStatus status = scale_rows(stager, ranks, product.rows, useful)) return status;
  const Turn turn(ranks);
  if (const FreightStatus status = turn.begin()) return status;
  if (by_group(weight))
    stager.group_scale = reinterpret_cast<float*>(turn.memory() + aligned(Sizes(product, layout, steps).x));
  const int64_t tiles = (product.rows + tile_rows(layout) - 1) / tile_rows(layout);
  const int64_t part = tiles < 2 * useful ? kColumns : own, parts = (own + part - 1) / part;
  parallel_for(tiles * parts, useful, [&](int64_t task) {
    const int64_t from = begin + task % parts * part, to = std::min(from + part, begin + own);
    stage_columns(stager, product.rows, task / parts, tiles, from, to, turn.memory());
  });
  turn.arrive();
  product.staged = {turn.memory(), steps, stager.groups, stager.row_scale, stager.group_scale};
  return turn.wait_for_all();
}

void stage_all(Product* products, int64_t count, int32_t format, int threads) {
  thread_local WorkingMemory memory;
  int64_t bytes = 0, values = 0;
  for (int64_t i = 0; i < count; i++) {
    const Layout layout = layout_of(*products[i].weight, format, products[i].rows);
    const Sizes sizes(products[i], layout, steps_of(*products[i].weight, layout));
    bytes += aligned(sizes.x) + aligned(sizes.row_scale) + aligned(sizes.group_scale);
    values += products[i].rows * products[i].weight->in_features;
  }
  uint8_t* at = memory.of(bytes);
  for (int64_t i = 0; i < count; i++) {
    const Layout layout = layout_of(*products[i].weight, format, products[i].rows);
    const int64_t steps = steps_of(*products[i].weight, layout);
    const Sizes sizes(products[i], layout, steps);
    Staged& staged = products[i].staged;
    staged = {at, steps, groups_of(*products[i].weight), nullptr, nullptr};
    at += aligned(sizes.x);
    if (sizes.row_scale) staged.row_scale = reinterpret_cast<float*>(at);
    at += aligned(sizes.row_scale);
    if (sizes.group_scale) staged.group_scale = reinterpret_cast<float*>(at);
    at += aligned(sizes.group_scale);
  }
  const auto layout = [&](int64_t i) { return layout_of(*products[i].weight, format, products[i].rows); };
  for_each_task(
      count, useful_threads(values, threads),
      [&](int64_t i) { return (products[i].rows + tile_rows(layout(i)) - 1) / tile_rows(layout(i)); },
      [&](int64_t i, int64_t tile) { stage_tile(products[i], format, layout(i), tile, products[i].staged.steps); });
}

}  // namespace freight
