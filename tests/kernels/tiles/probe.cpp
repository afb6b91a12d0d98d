// One product on tiles, and every wrong use of them, for test_emulated_tiles.py. Compiled with emulated_tiles.h ahead of
// it, and, where the machine has AMX, without.
#include <immintrin.h>

#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void tile(int number, int its_rows, int bytes) {
    rows[number] = static_cast<uint8_t>(its_rows), row_bytes[number] = static_cast<uint16_t>(bytes);
  }
  void load() const {
    asm volatile("" ::"r"(this) : "memory");  // GCC 12 takes ldtilecfg to read 8 of the 64 bytes
    _tile_loadconfig(this);
  }
};

// c[rows][columns] += a[rows][pairs] * b[pairs][columns], on tiles 0, 4 and 6.
Config config_of(int rows, int pairs, int columns) {
  Config config;
  config.tile(0, rows, columns * 4), config.tile(4, rows, pairs * 4), config.tile(6, pairs, columns * 4);
  return config;
}

alignas(64) uint8_t memory[2048];

}  // namespace

// Rows of a, b and c begin 64 bytes apart. `mxcsr`: what the thread has meanwhile; returns what it is afterwards.
EXPORT uint32_t product(const void* a, const void* b, void* c, int rows, int pairs, int columns, uint32_t mxcsr) {
  uint32_t before, after;
  asm volatile("stmxcsr %0" : "=m"(before)::"memory");
  config_of(rows, pairs, columns).load();
  asm volatile("ldmxcsr %0" ::"m"(mxcsr) : "memory");
  _tile_loadd(0, c, 64);
  _tile_loadd(4, a, 64);
  _tile_stream_loadd(6, b, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_stored(0, c, 64);
  asm volatile("stmxcsr %0" : "=m"(after)::"memory");
  _tile_release();
  asm volatile("ldmxcsr %0" ::"m"(before) : "memory");
  return after;
}

// What is stored of a tile that is loaded from `from`, then zeroed if wanted, under 3 rows of 8 bytes.
EXPORT void moved(const void* from, int stride, void* to, int zeroed) {
  config_of(3, 5, 2).load();
  _tile_loadd(0, from, stride);
  if (zeroed) _tile_zero(0);
  asm volatile("" ::: "memory");
  _tile_stored(0, to, 64);
  asm volatile("" ::: "memory");
  _tile_release();
}

EXPORT void load_without_configuration() { _tile_loadd(0, memory, 64); }
EXPORT void zero_after_release() {
  config_of(16, 16, 16).load();
  _tile_release();
  _tile_zero(0);
}
EXPORT void load_of_another_tile() {
  config_of(16, 16, 16).load();
  _tile_loadd(1, memory, 64);
}
EXPORT void store_of_another_tile() {
  config_of(16, 16, 16).load();
  _tile_stored(5, memory, 64);
}
EXPORT void too_many_rows() { config_of(17, 16, 16).load(); }
EXPORT void too_many_bytes() { config_of(16, 16, 17).load(); }
EXPORT void rows_without_bytes() {
  Config config;
  config.tile(3, 4, 0);
  config.load();
}
EXPORT void unknown_palette() {
  Config config = config_of(16, 16, 16);
  config.palette = 2;
  config.load();
}
EXPORT void ninth_tile() {
  Config config = config_of(16, 16, 16);
  config.tile(8, 16, 64);
  config.load();
}
EXPORT void same_operands() {
  config_of(16, 16, 16).load();
#ifdef __AMX_BF16__
  asm volatile(".byte 0xC4, 0xE2, 0x5A, 0x5C, 0xC4");  // as below, which no assembler takes
#else
  _tile_dpbf16ps(0, 4, 4);
#endif
}
EXPORT void rows_that_differ() {
  Config config = config_of(16, 16, 16);
  config.tile(4, 15, 64);
  config.load();
  _tile_dpbf16ps(0, 4, 6);
}
EXPORT void columns_that_differ() {
  Config config = config_of(16, 16, 16);
  config.tile(6, 16, 32);
  config.load();
  _tile_dpbf16ps(0, 4, 6);
}
EXPORT void pairs_that_differ() {
  Config config = config_of(16, 16, 16);
  config.tile(6, 8, 64);
  config.load();
  _tile_dpbf16ps(0, 4, 6);
}
