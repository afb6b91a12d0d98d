// The matrix tiles of AMX: their configuration, and the arithmetic of TDPBF16PS, which `tile_dot.h` repeats.
//
// C[16 rows][16 outputs] += A[16 rows][32 inputs] * B[32 inputs][16 outputs], of bfloat16 in float32. For each output the
// even and the odd inputs are summed apart, from zero, by fused multiply-adds; the two sums are added; that is added to
// C. All of it rounds to nearest even and takes subnormal operands and results for zeros, whatever MXCSR says.
#pragma once
#include <initializer_list>

#include "vec.h"

#if FREIGHT_AMX

namespace freight {

constexpr int kTileBytes = 1024;  // 16 rows of 64 bytes
constexpr int kTileRowBytes = 64;
constexpr int kTileLines = 16;  // rows of A and C: rows of x
constexpr int kTileInputs = 32;
constexpr int kGroupSteps = 4;  // tiles of the inputs that share a block scale
constexpr int kGroupInputs = kGroupSteps * kTileInputs;

// GCC 12 does not know that tile loads and their configuration read memory, nor that tile stores write it.
inline void memory_barrier() { asm volatile("" ::: "memory"); }

// The shapes of all tiles, as LDTILECFG reads them: whole ones by default.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  // Takes a few hundred cycles, and makes all tiles zero.
  void load() const {
    asm volatile("" ::"r"(this) : "memory");  // GCC 12 takes ldtilecfg to read 8 of the 64 bytes, and drops the others
    _tile_loadconfig(this);
  }
};

// This thread's tiles. Released at the end, since tiles in use make every change of threads slower.
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

// Those of products: 0-3 for C, 4-5 for A, 6-7 for B.
class TileRegisters : public LoadedTiles {
 public:
  // For products of `rows` rows, 1 to 16: A and C have so many. Tiles 2, 3 and 5, which are for the next rows, have
  // `second` of them, 0: as many.
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

// While it lives, vector instructions of this thread treat subnormals as tiles do. The compiler may move arithmetic across
// it, so what it is for belongs into a function that is not inlined.
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
