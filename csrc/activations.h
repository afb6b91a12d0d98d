// Staging: rows of x as the matrix product reads them, converted, padded, and rounded to FP8 if the weight requires it.
//
// Rows are staged in tiles of up to kTileRows; within a tile values are [step][rows of the tile], so that one tile is
// one stream of memory. A staged row depends only on that row. The staging functions are declared in product.h.
#pragma once
#include <type_traits>
#include <vector>

#include "packed.h"

namespace freight {

#if FREIGHT_AVX512
constexpr int kTileRows = 12;  // x 2 blocks of outputs: 24 sums in registers
#else
constexpr int kTileRows = 6;
#endif

// The heights of tiles with compiled code; a tile of another height is padded with zeros to the next larger one.
constexpr int kHeights[] = {1, 2, 4, 6, 8, 12};

inline int height_of(int64_t rows) {
  for (int height : kHeights)
    if (rows <= height && height <= kTileRows) return height;
  return kTileRows;
}

// Call f with the height as a compile-time constant.
template <class F>
inline void with_height(int height, const F& f) {
  switch (height) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 4: return f(std::integral_constant<int, 4>());
    case 6: return f(std::integral_constant<int, 6>());
#if FREIGHT_AVX512
    case 8: return f(std::integral_constant<int, 8>());
    case 12: return f(std::integral_constant<int, 12>());
#endif
  }
}

// Staged rows; their memory belongs to the calling thread and is reused by its next call.
struct Staged {
  const void* x;             // tiles, each [steps][height] of Math::X
  int64_t steps;             // of a row
  int64_t groups;            // of 128 inputs
  const float* row_scale;    // [rows]: multiplies a row's result; null when 1
  const float* group_scale;  // [rows padded to tiles][groups]: multiplies a group's sum; null when 1
};

}  // namespace freight
