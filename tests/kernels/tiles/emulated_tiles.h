// The tile instructions of AMX that csrc/ uses, in C++, for tests on machines without AMX: `make test-tiles`.
//
// Included ahead of a source it replaces the intrinsics. Results are those of the instructions, bit by bit, as Intel's
// Software Developer's Manual has them in pseudo code (LDTILECFG, TILELOADD, TDPBF16PS, ..). Where a processor raises
// a fault the process is aborted with a line that names the instruction. Loads and stores are ordinary ones of the bytes
// that the configuration names, so that AddressSanitizer sees those out of bounds. Needs AVX-512.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated_tiles {

constexpr int kTiles = 8, kMostRows = 16, kMostBytes = 64;  // of palette 1

struct Tile {
  alignas(64) uint8_t data[kMostRows][kMostBytes];  // zeros beyond its rows and their bytes
  int rows, row_bytes;                              // 0, 0: not configured
};

struct Registers {
  bool configured = false;
  Tile tiles[kTiles] = {};
};

inline thread_local Registers registers;

[[noreturn]] inline void fault(const char* instruction, const char* what, int value) {
  std::fprintf(stderr, "%s: %s (%d)\n", instruction, what, value);
  std::abort();
}

inline void require(bool holds, const char* instruction, const char* what, int value) {
  if (!holds) fault(instruction, what, value);
}

inline Tile& tile_of(int number, const char* instruction) {
  require(registers.configured, instruction, "this thread has configured no tiles", number);
  require(number >= 0 && number < kTiles, instruction, "there is no such tile", number);
  Tile& tile = registers.tiles[number];
  require(tile.rows > 0, instruction, "the tile is not configured", number);
  return tile;
}

inline void release() { registers = {}; }

inline void load_config(const void* from) {
  constexpr const char* kName = "LDTILECFG";
  uint8_t config[64];  // palette, start row, 14 reserved; row_bytes[8] of 16 bits, 16 reserved; rows[8], 8 reserved
  std::memcpy(config, from, sizeof config);
  if (config[0] == 0) return release();
  require(config[0] == 1, kName, "there is no such palette", config[0]);
  require(config[1] == 0, kName, "no instruction here was interrupted at a row", config[1]);
  for (int i = 2; i < 64; i++) {
    const bool reserved = i < 16 || (i >= 32 && i < 48) || i >= 56;
    require(!reserved || config[i] == 0, kName, "a reserved byte is not 0", i);
  }
  release();
  for (int i = 0; i < kTiles; i++) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, config + 16 + 2 * i, 2);
    const int rows = config[48 + i];
    require(row_bytes <= kMostBytes && row_bytes % 4 == 0, kName, "no row has so many bytes", row_bytes);
    require(rows <= kMostRows, kName, "no tile has so many rows", rows);
    require((rows == 0) == (row_bytes == 0), kName, "a tile has rows without bytes, or bytes without rows", i);
    registers.tiles[i].rows = rows, registers.tiles[i].row_bytes = row_bytes;
  }
  registers.configured = true;
}

inline void zero(int number) {
  Tile& tile = tile_of(number, "TILEZERO");
  std::memset(tile.data, 0, sizeof tile.data);
}

inline void load(int number, const void* from, int64_t stride) {
  Tile& tile = tile_of(number, "TILELOADD");
  std::memset(tile.data, 0, sizeof tile.data);
  const size_t bytes = static_cast<size_t>(tile.row_bytes);
  for (int row = 0; row < tile.rows; row++)
    std::memcpy(tile.data[row], static_cast<const uint8_t*>(from) + row * stride, bytes);
}

inline void store(int number, void* to, int64_t stride) {
  const Tile& tile = tile_of(number, "TILESTORED");
  const size_t bytes = static_cast<size_t>(tile.row_bytes);
  for (int row = 0; row < tile.rows; row++)
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, tile.data[row], bytes);
}

// What TDPBF16PS does to the numbers; all of them come from memory behind the first change of MXCSR and are back there
// before the second, so that the compiler moves no arithmetic out of it.
__attribute__((noinline)) inline void multiply(Tile& c, const Tile& a, const Tile& b) {
  constexpr uint32_t kNearest = 0x1F80, kFlush = 0x8000, kDenormalsAreZero = 0x40;  // all exceptions masked
  const uint32_t ours = kNearest | kFlush | kDenormalsAreZero;
  uint32_t before;
  asm volatile("stmxcsr %0" : "=m"(before)::"memory");
  asm volatile("ldmxcsr %0" ::"m"(ours) : "memory");
  const int pairs = a.row_bytes / 4;
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  __m512 even_of_b[kMostRows], odd_of_b[kMostRows];
  for (int k = 0; k < pairs; k++) {
    const __m512i both = _mm512_load_si512(b.data[k]);
    even_of_b[k] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd_of_b[k] = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
  }
  const __mmask16 columns = static_cast<__mmask16>((1u << (c.row_bytes / 4)) - 1);
  for (int m = 0; m < c.rows; m++) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < pairs; k++) {
      uint32_t both;
      std::memcpy(&both, a.data[m] + 4 * k, 4);
      const __m512i of_a = _mm512_set1_epi32(static_cast<int>(both));
      even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(of_a, 16)), even_of_b[k], even);
      odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(of_a, upper)), odd_of_b[k], odd);
    }
    const __m512 sum = _mm512_add_ps(_mm512_load_ps(c.data[m]), _mm512_add_ps(even, odd));
    _mm512_store_ps(c.data[m], _mm512_maskz_mov_ps(columns, sum));
  }
  asm volatile("ldmxcsr %0" ::"m"(before) : "memory");
}

inline void dot_bfloat16(int sums, int first, int second) {
  constexpr const char* kName = "TDPBF16PS";
  require(sums != first && sums != second && first != second, kName, "operands are the same tile", sums);
  Tile& c = tile_of(sums, kName);
  const Tile &a = tile_of(first, kName), &b = tile_of(second, kName);
  require(a.rows == c.rows, kName, "the first operand has other rows than the sums", a.rows);
  require(b.row_bytes == c.row_bytes, kName, "the second operand has other columns than the sums", b.row_bytes);
  require(a.row_bytes == 4 * b.rows, kName, "the second operand has other rows than the first has pairs", b.rows);
  multiply(c, a, b);
}

// C[m][n] += the sum over k of the products of the four signed bytes of A[m][k] and B[k][n], in int32.
inline void dot_int8(int sums, int first, int second) {
  constexpr const char* kName = "TDPBSSD";
  require(sums != first && sums != second && first != second, kName, "operands are the same tile", sums);
  Tile& c = tile_of(sums, kName);
  const Tile &a = tile_of(first, kName), &b = tile_of(second, kName);
  require(a.rows == c.rows, kName, "the first operand has other rows than the sums", a.rows);
  require(b.row_bytes == c.row_bytes, kName, "the second operand has other columns than the sums", b.row_bytes);
  require(a.row_bytes == 4 * b.rows, kName, "the second operand has other rows than the first has quads", b.rows);
  for (int m = 0; m < c.rows; m++)
    for (int n = 0; n < c.row_bytes / 4; n++) {
      int32_t sum;
      std::memcpy(&sum, c.data[m] + 4 * n, 4);
      for (int i = 0; i < a.row_bytes; i++)
        sum += static_cast<int8_t>(a.data[m][i]) * static_cast<int8_t>(b.data[i / 4][4 * n + i % 4]);
      std::memcpy(c.data[m] + 4 * n, &sum, 4);
    }
}

}  // namespace emulated_tiles

// GCC has some of them as macros and some as functions; each is replaced by its name.
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig emulated_tiles::load_config
#define _tile_release emulated_tiles::release
#define _tile_zero emulated_tiles::zero
#define _tile_loadd emulated_tiles::load
#define _tile_stream_loadd emulated_tiles::load
#define _tile_stored emulated_tiles::store
#define _tile_dpbf16ps emulated_tiles::dot_bfloat16
#define _tile_dpbssd emulated_tiles::dot_int8
