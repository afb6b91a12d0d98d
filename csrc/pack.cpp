// Packing: [out, in] row-major -> the units of packed.h. Done once, at load.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "blocks.h"
#include "four_bit.h"
#include "int8_groups.h"
#include "mxfp4.h"
#include "packed.h"
#include "parallel.h"
#include "status.h"

namespace freight {
namespace {

// Request large pages, before the memory is first written: reading through them is up to a tenth faster. A refusal is
// ignored.
void ask_for_large_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 1 << 21;
  const uintptr_t first = reinterpret_cast<uintptr_t>(memory), end = first + static_cast<uintptr_t>(bytes);
  const uintptr_t from = (first + kPage - 1) / kPage * kPage, to = end / kPage * kPage;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

// Pack a block of `rows` rows, with units kBand units apart; a block of 0 rows pads the last band.
template <class T>
void pack_block(const T* from, T* to, int32_t format, int64_t rows, int64_t in, float* scale) {
  const int inputs = inputs_per_unit(format);
  const int64_t units = units_of(format, in);
  int index[kUnit];  // at lane * inputs + input: where (lane, input) is in a unit
  for (int lane = 0; lane < kLanes; lane++)
    for (int input = 0; input < inputs; input++) index[lane * inputs + input] = unit_index(format, lane, input);
  for (int64_t unit = 0; unit < units; unit++) {
    T* out = to + unit * kBand * kLanes * inputs;
    std::memset(out, 0, kUnit);
    const int there = static_cast<int>(std::clamp<int64_t>(in - unit * inputs, 0, inputs));
    for (int lane = 0; lane < rows; lane++)
      for (int input = 0; input < there; input++)
        out[index[lane * inputs + input]] = from[lane * in + unit * inputs + input];
  }
  if (format != FREIGHT_E4M3FN) return;
  for (int64_t lane = 0; lane < rows; lane++) {
    uint8_t nan = 0;
    for (int64_t i = 0; i < in; i++) nan |= (static_cast<uint8_t>(from[lane * in + i]) & 0x7F) == 0x7F;
    if (nan) scale[lane] = __builtin_nanf("");  // makes every product with the row NaN, so decoders need not handle it
  }
}

template <class T>
void pack(const void* data, int32_t format, int64_t out, int64_t in, void* packed, float* scale, int threads) {
  const int64_t units = units_of(format, in);
  parallel_for(bands_of(out) * kBand, threads, [&](int64_t block) {
    const int64_t first = std::min(block * kLanes, out), rows = std::min<int64_t>(kLanes, out - first);
    const T* from = static_cast<const T*>(data) + first * in;
    T* to = static_cast<T*>(packed) + block_offset(block, units) / static_cast<int64_t>(sizeof(T));
    pack_block(from, to, format, rows, in, scale + first);
  });
}

// Pack a block of MXFP4, as freight_pack takes it. Rows of padding and groups of zeros have an arbitrary valid scale.
void pack_mxfp4_block(const uint8_t* from, uint8_t* to, int64_t rows, int64_t groups) {
  constexpr int kStored = kMxInputs / 2 + 1;  // bytes of a group
  for (int64_t group = 0; group < groups; group++, from += kStored, to += kBand * kMxUnit) {
    std::memset(to, 0, kMxCodes);
    std::memset(to + kMxCodes, 127 - kMxBase, kLanes);
    for (int64_t lane = 0; lane < rows; lane++) {
      const uint8_t* stored = from + lane * groups * kStored;
      uint8_t any = 0;
      for (int i = 0; i < kMxInputs / 2; i++) {
        any |= stored[i] & 0x77;
        to[i / 4 * kUnit + lane * 4 + i % 4] = stored[i];
      }
      if (any) to[kMxCodes + lane] = static_cast<uint8_t>(stored[kMxInputs / 2] - kMxBase);
    }
  }
}

void pack_mxfp4(const uint8_t* data, int64_t out, int64_t in, uint8_t* packed, int threads) {
  const int64_t groups = units_of(FREIGHT_MXFP4, in);
  parallel_for(bands_of(out) * kBand, threads, [&](int64_t block) {
    const int64_t first = std::min(block * kLanes, out), rows = std::min<int64_t>(kLanes, out - first);
    pack_mxfp4_block(data + first * groups * (kMxInputs / 2 + 1), packed + block_offset(block, groups, kMxUnit), rows,
                     groups);
  });
}

#if FREIGHT_AVX512 && !FREIGHT_AMX
// Every second of 16 codes, the first, the third, ...
uint32_t every_second(uint64_t codes) {
  codes &= 0x0F0F0F0F0F0F0F0F;
  codes = (codes | codes >> 4) & 0x00FF00FF00FF00FF;
  codes = (codes | codes >> 8) & 0x0000FFFF0000FFFF;
  return static_cast<uint32_t>(codes | codes >> 16);
}
#endif

#if !FREIGHT_AMX
// Put 16 codes of NVFP4, or of INT4, of row `lane` into 16 inputs of a block (four_bit.h).
void put_codes(uint64_t codes, int lane, uint8_t* unit) {
  for (int line = 0; line < 2; line++) {
    const uint32_t word = static_cast<uint32_t>(codes >> 32 * line);
    std::memcpy(unit + line * kUnit + lane * 4, &word, sizeof word);
  }
}

void put_int4(uint64_t codes, int lane, uint8_t* unit) {
#if FREIGHT_AVX512
  uint8_t* to = unit + lane / 8 * kUnit + lane % 8 * 8;
  for (int odd = 0; odd < 2; odd++) {
    const uint32_t word = every_second(codes >> 4 * odd), turned = word << 12 | word >> 20;
    std::memcpy(to + 4 * odd, &turned, sizeof turned);
  }
#else
  put_codes(codes, lane, unit);
#endif
}
#endif

uint64_t sixteen_codes(const uint8_t* stored) {
  uint64_t codes;
  std::memcpy(&codes, stored, sizeof codes);
  return codes;
}

// Put 16 codes of row `lane` of a block, of the 16 inputs `unit` of a piece, after those before them.
void put_codes_of(const FourBit& layout, uint64_t codes, int block, int lane, int unit, uint8_t* piece) {
#if FREIGHT_AMX
  uint8_t* line = piece + layout.head + (block * kLanes + lane) * kUnit;
  uint16_t words[kFourInputs];
  uint8_t* to = line + unit % 2 * sizeof words;
  if (unit < 2)
    std::memset(words, 0, sizeof words);
  else
    std::memcpy(words, to, sizeof words);
  for (int i = 0; i < kFourInputs; i++) words[i] |= static_cast<uint16_t>((codes >> 4 * i & 15) << unit / 2 * 4);
  std::memcpy(to, words, sizeof words);
#else
  put_int4(codes, lane, piece + layout.head + (unit * kBand + block) * kFourUnit);
#endif
}

// Pack a block, as freight_pack takes it. Rows and groups of padding have the scale 0.
void pack_block(const uint8_t* from, const FourBit& layout, uint8_t* piece, int block, int64_t rows, int64_t groups) {
  const int inputs = layout.inputs / layout.groups, codes = inputs / 2, scale_bytes = layout.scale_bytes;
  const int stored = codes + scale_bytes + layout.zeros, units = inputs / kFourInputs;
  for (int64_t group = 0; group < (groups + layout.groups - 1) / layout.groups * layout.groups; group++) {
    const int in_piece = static_cast<int>(group % layout.groups);
    for (int lane = 0; lane < kLanes; lane++) {
      const bool there = lane < rows && group < groups;
      const uint8_t* row = there ? from + (lane * groups + group) * stored : from;
      for (int unit = 0; unit < units; unit++)
        put_codes_of(layout, there ? sixteen_codes(row + unit * 8) : 0, block, lane, in_piece * units + unit, piece);
      uint8_t* scale = piece + scales_at(layout, block, in_piece) + scale_bytes * lane;
      std::memset(scale, 0, static_cast<size_t>(scale_bytes));
      if (there) std::memcpy(scale, row + codes, static_cast<size_t>(scale_bytes));
      if (layout.zeros) piece[zeros_at(layout, block, in_piece) + lane] = there ? row[codes + scale_bytes] : 0;
    }
    if (in_piece + 1 == layout.groups) piece += layout.bytes;
  }
}

// The scale of NVFP4 as 5 bits of exponent and 3 of mantissa, from a code of E4M3FN that is not 0 or NaN.
uint8_t scale_bits(uint8_t code) {
  return static_cast<uint8_t>((float_to_bits(value_of(FREIGHT_E4M3FN, code & 0x7F)) >> 20) - ((127 - kScaleBias) << 3));
}

// A group of a row in 4 bits for inputs in INT8 (int8_groups.h). stored: as freight_pack takes it; null: of padding.
struct IntegerGroup {
  uint64_t codes[8] = {};  // 16 inputs each
  uint8_t scale[2] = {}, zero = 0;

  IntegerGroup(const uint8_t* stored, int32_t format, const FourBit& layout) {
    if (!stored) return;
    const int inputs = layout.inputs / layout.groups;
    const uint8_t* after = stored + inputs / 2;
    uint64_t any = 0;
    for (int i = 0; i < inputs / kFourInputs; i++) any |= codes[i] = sixteen_codes(stored + 8 * i);
    std::memcpy(scale, after, static_cast<size_t>(layout.scale_bytes));
    if (layout.zeros) zero = after[layout.scale_bytes];
    if (format == (FREIGHT_MXFP4 | FREIGHT_INTEGERS))  // half the scale; that of zeros may be anything
      *scale = static_cast<uint8_t>(any & 0x7777777777777777 ? *after - 1 : 127);
    if (format == (FREIGHT_NVFP4 | FREIGHT_INTEGERS)) {
      const bool is_zero = !(*after & 0x7F);
      *scale = is_zero ? static_cast<uint8_t>(kScaleBias << 3) : scale_bits(*after);
      codes[0] = is_zero ? 0 : codes[0] ^ (*after & 0x80 ? 0x8888888888888888 : 0);
    }
  }
};

// Put a group of a row of INT8 (int8_groups.h) into its lines, which are `apart` bytes apart; null: padding, of zeros.
void put_bytes(const uint8_t* stored, int inputs, int64_t apart, uint8_t* to) {
  for (int i = 0; i < inputs; i++) {
    const uint8_t code = stored ? stored[i] : 0;
    to[i / kLineInputs * apart + i % kLineInputs / 4 * kUnit + i % 4] = code ^ 0x80;
  }
}

// Pack a block for inputs in INT8. Codes of padding are those of zeros, or have the scale 0.
void pack_integers(const uint8_t* from, int32_t format, const FourBit& layout, uint8_t* piece, int block, int64_t rows,
                   int64_t groups) {
  const int inputs = layout.inputs / layout.groups, line_bytes = kUnit * layout.code_bits / 4;
  const int code_bytes = inputs * layout.code_bits / 8, stored = code_bytes + layout.scale_bytes + layout.zeros;
  for (int64_t group = 0; group < (groups + layout.groups - 1) / layout.groups * layout.groups; group++) {
    const int in_piece = static_cast<int>(group % layout.groups);
    for (int lane = 0; lane < kLanes; lane++) {
      const bool there = lane < rows && group < groups;
      uint8_t* lines = piece + layout.head + (in_piece * (inputs / kLineInputs) * kBand + block) * line_bytes + lane * 4;
      uint8_t* scale = piece + scales_at(layout, block, in_piece) + layout.scale_bytes * lane;
      if (layout.code_bits == 8) {
        const uint8_t* of_row = there ? from + (lane * groups + group) * stored : nullptr;
        put_bytes(of_row, inputs, kBand * line_bytes, lines);
        std::memset(scale, 0, 2);
        if (there) std::memcpy(scale, of_row + inputs, 2);
        continue;
      }
      const IntegerGroup own(there ? from + (lane * groups + group) * stored : nullptr, format, layout);
      for (int line = 0; line < inputs / kLineInputs; line++) {
        const uint32_t eight = static_cast<uint32_t>(own.codes[line / 2] >> line % 2 * 32);
        uint8_t* to = lines + line * kBand * line_bytes;
        for (int i = 0; i < 4; i++) to[i] = static_cast<uint8_t>((eight >> 4 * i & 15) | (eight >> (16 + 4 * i) & 15) << 4);
      }
      std::memcpy(scale, own.scale, static_cast<size_t>(layout.scale_bytes));
      if (layout.zeros) piece[zeros_at(layout, block, in_piece) + lane] = own.zero;
    }
    if (in_piece + 1 == layout.groups) piece += layout.bytes;
  }
}

#if !FREIGHT_AMX
// Pack a block of NVFP4, as freight_pack takes it. Rows and inputs of padding, and groups of zeros, have the scale 1.
void pack_nvfp4_block(const uint8_t* from, const FourBit& layout, uint8_t* band, int block, int64_t rows, int64_t groups) {
  constexpr int kStored = kFourInputs / 2 + 1;
  const int64_t units = (groups + 1) / 2 * 2;
  for (int64_t group = 0; group < units; group++, from += kStored) {
    uint8_t* at = band + group / 2 * layout.bytes;
    const int unit = static_cast<int>(group % 2);
    uint8_t* to = at + layout.head + (unit * kBand + block) * kFourUnit;
    std::memset(at + scales_at(layout, block, unit), kScaleBias << 3, kLanes);
    std::memset(to, 0, kFourUnit);
    for (int lane = 0; lane < rows && group < groups; lane++) {
      const uint8_t* stored = from + lane * groups * kStored;
      const uint8_t scale = stored[kFourInputs / 2];
      if (!(scale & 0x7F)) continue;
      at[scales_at(layout, block, unit) + lane] = scale_bits(scale);
      put_codes(sixteen_codes(stored) ^ (scale & 0x80 ? 0x8888888888888888 : 0), lane, to);
    }
  }
}

#endif

void pack_groups(const uint8_t* data, int32_t format, int64_t out, int64_t in, uint8_t* packed, int threads) {
  const FourBit layout = four_bit(format);
  const int inputs = layout.inputs / layout.groups, scale = layout.scale_bytes + layout.zeros;
  const int64_t groups = in / inputs, row_bytes = groups * (inputs * layout.code_bits / 8 + scale);
  const int64_t band_bytes = units_of(format, in) * layout.bytes;
  parallel_for(bands_of(out) * kBand, threads, [&](int64_t block) {
    const int64_t first = std::min(block * kLanes, out), rows = std::min<int64_t>(kLanes, out - first);
    uint8_t* band = packed + block / kBand * band_bytes;
    const uint8_t* from = data + first * row_bytes;
    const int side = static_cast<int>(block % kBand);
    if (has_integers(format)) return pack_integers(from, format, layout, band, side, rows, groups);
#if !FREIGHT_AMX
    if (format == FREIGHT_NVFP4) return pack_nvfp4_block(from, layout, band, side, rows, groups);
#endif
    pack_block(from, layout, band, side, rows, groups);
  });
}

// Put eight codes of a row, inputs 8 `line` on of a group, into its line, and bits above the lowest 4 into `high`.
template <Codes CODES>
void put_eight(uint64_t codes, int line, uint8_t* to, uint8_t* high) {
  const uint32_t first = static_cast<uint32_t>(codes), last = static_cast<uint32_t>(codes >> 32);
  if constexpr (CODES == Codes::kInt8) {
    std::memcpy(to, &first, sizeof first);
    std::memcpy(to + kUnit, &last, sizeof last);
    return;
  }
  const uint32_t word = (first & 0x0F0F0F0Fu) | (last & 0x0F0F0F0Fu) << 4;
  std::memcpy(to, &word, sizeof word);
  if constexpr (high_bits(CODES) != 0) {
    constexpr int count = high_bits(CODES);
    constexpr uint32_t mask = 0x01010101u * ((1 << count) - 1);
    uint32_t bits = 0;
    if (line) std::memcpy(&bits, high, sizeof bits);
    bits |= (first >> 4 & mask) << 2 * line * count | (last >> 4 & mask) << (2 * line + 1) * count;
    std::memcpy(high, &bits, sizeof bits);
  }
}

// Put a block of row `lane` into a piece.
template <Codes CODES>
void put_block(const FileBlock& from, const FourBit& layout, int block, int lane, uint8_t* piece) {
  using Lines = GroupLines<CODES>;
  const int inputs = layout.inputs / layout.groups;
  for (int i = 0; i < layout.row_scales; i++)
    std::memcpy(piece + ((i * kBand + block) * kLanes + lane) * 2, from.row_scales + i, 2);
  for (int group = 0; group < layout.groups; group++) {
    uint8_t* scale = piece + scales_at(layout, block, group) + layout.scale_bytes * lane;
    std::memcpy(scale, from.scales[group], static_cast<size_t>(layout.scale_bytes));
    uint8_t* minimum = piece + minima_at(layout, block, group) + layout.minimum_bytes * lane;
    if (layout.minimum_bytes) std::memcpy(minimum, from.minima[group], static_cast<size_t>(layout.minimum_bytes));
    const Lines at(layout, block, group);
    uint8_t *to = piece + at.line + lane * 4, *high = piece + at.high + lane * 4;
    for (int line = 0; line < inputs / kLineInputs; line++, to += kBand * Lines::line_bytes) {
      uint64_t eight;
      std::memcpy(&eight, from.codes + group * inputs + line * kLineInputs, sizeof eight);
      put_eight<CODES>(eight, line, to, high);
    }
  }
}

// Pack rows of blocks as a GGUF file has them. Rows of padding have the scale 0. Returns whether all numbers are valid.
bool pack_blocks(const uint8_t* data, int32_t format, int64_t out, int64_t in, uint8_t* packed, int threads) {
  const FourBit layout = four_bit(format);
  const int32_t blocks = format & ~(FREIGHT_BLOCKS | FREIGHT_INTEGERS);
  const int64_t pieces = in / layout.inputs, stored = block_bytes(blocks);
  std::atomic<bool> valid{true};
  with_blocks(format, [&](auto kind) {
    parallel_for(bands_of(out) * kBand, threads, [&](int64_t block) {
      const int64_t first = block * kLanes;
      const int side = static_cast<int>(block % kBand);
      uint8_t* piece = packed + block / kBand * pieces * layout.bytes;
      const FileBlock padding;
      FileBlock own;
      for (int64_t i = 0; i < pieces; i++, piece += layout.bytes)
        for (int lane = 0; lane < kLanes; lane++) {
          const bool there = first + lane < out;
          if (there) read_block(data + ((first + lane) * pieces + i) * stored, blocks, own);
          put_block<decltype(kind)::codes>(there ? own : padding, layout, side, lane, piece);
        }
      if (!own.is_valid) valid.store(false, std::memory_order_relaxed);
    });
  });
  return valid.load();
}

// Write the sums' starts of a weight in INT8 behind its units (int8.h).
void pack_int8_starts(const int8_t* data, int64_t out, int64_t in, uint8_t* packed, int threads) {
  const int64_t blocks = bands_of(out) * kBand;
  int32_t* starts = reinterpret_cast<int32_t*>(packed + blocks * units_of(FREIGHT_INT8, in) * kUnit);
  parallel_for(blocks, threads, [&](int64_t block) {
    for (int64_t row = block * kLanes; row < (block + 1) * kLanes; row++) {
      int32_t sum = 0;
      for (int64_t i = 0; row < out && i < in; i++) sum += data[row * in + i];
      starts[row] = -128 * sum;
    }
  });
}

// Bytes of a packed weight.
int64_t packed_bytes(int32_t format, int64_t out, int64_t in) {
  const int64_t blocks = bands_of(out) * kBand;
  return blocks * units_of(format, in) * unit_bytes(format) + (format == FREIGHT_INT8 ? int8_start_bytes(blocks) : 0);
}

FreightStatus pack(const void* data, int32_t format, int64_t out, int64_t in, void* packed, float* scale, int threads) {
  ask_for_large_pages(packed, packed_bytes(format, out, in));
  if (format & FREIGHT_BLOCKS) {
    const uint8_t* blocks = static_cast<const uint8_t*>(data);
    const bool valid = pack_blocks(blocks, format, out, in, static_cast<uint8_t*>(packed), threads);
    return valid ? FREIGHT_OK : FREIGHT_BAD_SCALE;
  }
  if (format == FREIGHT_MXFP4)
    pack_mxfp4(static_cast<const uint8_t*>(data), out, in, static_cast<uint8_t*>(packed), threads);
  else if (in_groups(format))
    pack_groups(static_cast<const uint8_t*>(data), format, out, in, static_cast<uint8_t*>(packed), threads);
  else if (format == FREIGHT_FLOAT32)
    pack<uint32_t>(data, format, out, in, packed, scale, threads);
  else if (format == FREIGHT_E4M3FN || format == FREIGHT_INT8)
    pack<uint8_t>(data, format, out, in, packed, scale, threads);
  else
    pack<uint16_t>(data, format, out, in, packed, scale, threads);
  if (format == FREIGHT_INT8)
    pack_int8_starts(static_cast<const int8_t*>(data), out, in, static_cast<uint8_t*>(packed), threads);
  return FREIGHT_OK;
}

}  // namespace
}  // namespace freight

FREIGHT_API int64_t freight_packed_bytes(int32_t format, int64_t out, int64_t in) {
  return freight::packed_bytes(format, out, in);
}

FREIGHT_API FreightStatus freight_pack(const void* data, int32_t format, int64_t out, int64_t in, void* packed,
                                       float* scale, int32_t threads) {
  FreightStatus status = FREIGHT_OK;
  const FreightStatus thrown =
      freight::status_of([&] { status = freight::pack(data, format, out, in, packed, scale, threads); });
  return status ? status : thrown;
}
