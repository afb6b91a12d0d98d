// The matrix tiles of AMX: their configuration, and the arithmetic of TDPBF16PS, which `tile_dot.h` repeats.
//
// C[16 rows][16 outputs] += A[16 rows][32 inputs] * B[32 inputs][16 outputs], bfloat16 inputs with float32 sums. For
// each output the even and the odd inputs are summed separately, from zero, by fused multiply-adds; the two sums are
// added, and their sum is added to C. Every step rounds to nearest even and treats subnormal operands and results as
// zeros, independent of MXCSR. TDPBSSD does the same for 64 inputs in INT8, with exact sums in int32.
#pragma once
#include <initializer_list>

#include "vec.h"

#if FREIGHT_AMX

namespace freight {

constexpr int kTileBytes = 1024;  // 16 rows of 64 bytes
constexpr int kTileRowBytes = 64;
constexpr int kTileLines = 16;  // rows of A and C: rows of x
constexpr int kTileInputs = 32;   // of bfloat16; of INT8 twice as many
constexpr int kTileUnits = 16;    // of a block of weights (packed.h): the inputs of a tile
constexpr int kGroupSteps = 4;  // tiles of the inputs that share a block scale
constexpr int kGroupInputs = kGroupSteps * kTileInputs;

// A compiler barrier: GCC 12 does not know that tile loads and configurations read memory, nor that tile stores write
// it.
inline void memory_barrier() { asm volatile("" ::: "memory"); }

// The shapes of all tiles, as LDTILECFG reads them; full tiles by default.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  // Load the configuration. This takes a few hundred cycles, and zeroes all tiles.
  void load() const {
    asm volatile("" ::"r"(this) : "memory");  // GCC 12 assumes that ldtilecfg reads only 8 of the 64 bytes
    _tile_loadconfig(this);
  }
};

// This thread's tiles. They are released at the end, because tiles in use make context switches slower.
class LoadedTiles {
 public:
  LoadedTiles() = default;
  LoadedTiles(const LoadedTiles&) = delete;
  LoadedTiles& operator=(const LoadedTiles&) = delete;
  ~LoadedTiles() {
    if (loaded_) _tile_release();
  }

 protected:
  void load(const TileConfig& config) {
    loaded_ = true;
    config.load();
  }

 private:
  bool loaded_ = false;
};

// The tiles of products: 0-3 for C, 4-5 for A, 6-7 for B.
class TileRegisters : public LoadedTiles {
 public:
  // Configure tiles for products of `rows` rows, 1 to 16, which A and C then have. Tiles 2, 3 and 5, for the next rows,
  // have `second` rows, or if that is 0 the same number.
  void set_rows(int rows, int second = 0) {
    if (rows == rows_ && second == second_) return;
    rows_ = rows, second_ = second;
    TileConfig config;
    for (int i = 0; i < 6; i++) config.rows[i] = static_cast<uint8_t>(rows);
    if (second)
      for (int i : {2, 3, 5}) config.rows[i] = static_cast<uint8_t>(second);
    load(config);
  }

 private:
  int rows_ = 0, second_ = 0;
};

// While it exists, vector instructions of this thread treat subnormals as tiles do. The compiler may move arithmetic
// across its constructor and destructor, so the arithmetic must be in a function that is not inlined.
class SubnormalsAreZero {
 public:
  SubnormalsAreZero() {
    constexpr uint32_t kFlush = 0x8000, kDenormalsAreZero = 0x40;
    asm volatile("stmxcsr %0" : "=m"(before_)::"memory");
    const uint32_t now = before_ | kFlush | kDenormalsAreZero;
    asm volatile("ldmxcsr %0" ::"m"(now) : "memory");
  }
  ~SubnormalsAreZero() { asm volatile("ldmxcsr %0" ::"m"(before_) : "memory"); }
  SubnormalsAreZero(const SubnormalsAreZero&) = delete;
  SubnormalsAreZero& operator=(const SubnormalsAreZero&) = delete;

 private:
  uint32_t before_;
};

}  // namespace freight

#endif
