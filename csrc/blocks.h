// Blocks of GGUF files (llama.cpp's ggml-common.h) as packing reads them: codes as bytes, and the numbers of their groups
// in the form in which int8_groups.h lays them out.
#pragma once
#include <cstdint>
#include <cstring>

#include "freight.h"

namespace freight {

constexpr int kSuperInputs = 256;  // inputs of a block of the formats that end in K or XS

// A block of a row; blocks of one format may be read into it one after the other. scales, minima: of each group, as they
// are packed: a float16, or a byte.
struct FileBlock {
  alignas(8) uint8_t codes[kSuperInputs] = {};  // without a sign; of IQ4 and MXFP4 the index of a value
  uint8_t scales[16][2] = {}, minima[8][2] = {};
  uint16_t row_scales[2] = {};  // float16
  bool is_valid = true;         // whether all numbers that were read are those that are computed with
};

inline uint16_t half_at(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof half);
  return half;
}
inline bool is_finite_half(uint16_t half) { return (half & 0x7C00) != 0x7C00; }

// Low halves of `count` bytes, then their high halves.
inline void read_halves(const uint8_t* from, int count, uint8_t* codes) {
  for (int i = 0; i < count; i++) codes[i] = from[i] & 15, codes[count + i] = from[i] >> 4;
}

// A float16 of the block's only group.
inline void read_number(const uint8_t* from, uint8_t* to, FileBlock& out) {
  std::memcpy(to, from, 2);
  out.is_valid = out.is_valid && is_finite_half(half_at(from));
}
// A float16 of the row: the factor of the scales (`i` 0) or of the minima, which are subtracted in the file.
inline void read_row_scale(const uint8_t* from, int i, FileBlock& out) {
  const uint16_t half = half_at(from);
  out.row_scales[i] = static_cast<uint16_t>(i ? half ^ 0x8000 : half);
  out.is_valid = out.is_valid && is_finite_half(half);
}

// Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL: the scale, the minimum, 32 high bits, then codes.
inline void read_small(const uint8_t* from, bool minimum, bool high, FileBlock& out) {
  read_number(from, out.scales[0], out);
  from += 2;
  if (minimum) {
    read_number(from, out.minima[0], out);
    from += 2;
  }
  const uint8_t* bits = from;
  if (high) from += 4;
  read_halves(from, 16, out.codes);
  if (high)
    for (int i = 0; i < 32; i++) out.codes[i] |= static_cast<uint8_t>((bits[i / 8] >> i % 8 & 1) << 4);
}

inline void read_q8_0(const uint8_t* from, FileBlock& out) {
  read_number(from, out.scales[0], out);
  for (int i = 0; i < 32; i++) out.codes[i] = from[2 + i] ^ 0x80;
}

// Half the scale as an exponent's byte: codes become twice their values. A group of zeros may have any scale.
inline void read_mxfp4(const uint8_t* from, FileBlock& out) {
  read_halves(from + 1, 16, out.codes);
  uint8_t any = 0;
  for (int i = 0; i < 16; i++) any |= from[1 + i] & 0x77;
  out.scales[0][0] = static_cast<uint8_t>(any ? from[0] - 1 : 127);
  out.is_valid = out.is_valid && (!any || from[0] >= 2);
}

// Q4_K and Q5_K: two float16, 12 bytes of 8 scales and 8 minima of 6 bits, high bits, then codes.
inline void read_q4_k(const uint8_t* from, bool high, FileBlock& out) {
  read_row_scale(from, 0, out);
  read_row_scale(from + 2, 1, out);
  const uint8_t* packed = from + 4;
  for (int i = 0; i < 4; i++) {
    out.scales[i][0] = packed[i] & 63, out.minima[i][0] = packed[4 + i] & 63;
    out.scales[4 + i][0] = static_cast<uint8_t>((packed[8 + i] & 15) | packed[i] >> 6 << 4);
    out.minima[4 + i][0] = static_cast<uint8_t>(packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4);
  }
  const uint8_t *bits = from + 16, *codes = high ? bits + 32 : bits;
  for (int part = 0; part < 4; part++) read_halves(codes + 32 * part, 32, out.codes + 64 * part);
  if (!high) return;
  for (int group = 0; group < 8; group++)
    for (int i = 0; i < 32; i++) out.codes[32 * group + i] |= static_cast<uint8_t>((bits[i] >> group & 1) << 4);
}

// 128 bytes of low halves, 64 of two high bits, 16 scales, a float16.
inline void read_q6_k(const uint8_t* from, FileBlock& out) {
  for (int part = 0; part < 2; part++) {
    uint8_t* codes = out.codes + 128 * part;
    read_halves(from + 64 * part, 64, codes);
    const uint8_t* bits = from + 128 + 32 * part;
    for (int quarter = 0; quarter < 4; quarter++)
      for (int i = 0; i < 32; i++) codes[32 * quarter + i] |= static_cast<uint8_t>((bits[i] >> 2 * quarter & 3) << 4);
  }
  for (int group = 0; group < 16; group++) out.scales[group][0] = from[192 + group] ^ 0x80;
  read_row_scale(from + 208, 0, out);
}

// A float16, 2 bytes of the high 2 bits of 8 scales, 4 of their low 4 bits, then codes.
inline void read_iq4_xs(const uint8_t* from, FileBlock& out) {
  read_row_scale(from, 0, out);
  for (int group = 0; group < 8; group++) {
    const int low = from[4 + group / 2] >> group % 2 * 4 & 15, high = half_at(from + 2) >> 2 * group & 3;
    out.scales[group][0] = static_cast<uint8_t>((low | high << 4) - 32 + 128);
    read_halves(from + 8 + 16 * group, 16, out.codes + 32 * group);
  }
}

// Bytes of a block in the file.
inline int block_bytes(int32_t blocks) {
  switch (blocks) {
    case FREIGHT_BLOCKS_Q4_1: return 20;
    case FREIGHT_BLOCKS_Q5_0: return 22;
    case FREIGHT_BLOCKS_Q5_1: return 24;
    case FREIGHT_BLOCKS_Q8_0: return 34;
    case FREIGHT_BLOCKS_Q4_K: return 144;
    case FREIGHT_BLOCKS_Q5_K: return 176;
    case FREIGHT_BLOCKS_Q6_K: return 210;
    case FREIGHT_BLOCKS_IQ4_XS: return 136;
    case FREIGHT_BLOCKS_MXFP4: return 17;
    default: return 18;  // Q4_0, IQ4_NL
  }
}

inline void read_block(const uint8_t* from, int32_t blocks, FileBlock& out) {
  switch (blocks) {
    case FREIGHT_BLOCKS_Q4_1: return read_small(from, true, false, out);
    case FREIGHT_BLOCKS_Q5_0: return read_small(from, false, true, out);
    case FREIGHT_BLOCKS_Q5_1: return read_small(from, true, true, out);
    case FREIGHT_BLOCKS_Q8_0: return read_q8_0(from, out);
    case FREIGHT_BLOCKS_Q4_K: return read_q4_k(from, false, out);
    case FREIGHT_BLOCKS_Q5_K: return read_q4_k(from, true, out);
    case FREIGHT_BLOCKS_Q6_K: return read_q6_k(from, out);
    case FREIGHT_BLOCKS_IQ4_XS: return read_iq4_xs(from, out);
    case FREIGHT_BLOCKS_MXFP4: return read_mxfp4(from, out);
    default: return read_small(from, false, false, out);  // Q4_0, IQ4_NL
  }
}

}  // namespace freight
