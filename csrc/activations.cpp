// Staging of activations, and their rounding to E4M3FN as fp8/quantize.py defines it.
#include "activations.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

namespace {

constexpr float kLargest = 448.f;            // E4M3FN
constexpr float kSmallestScale = 0x1p-126f;  // the smallest normal float32

// The E4M3FN value nearest to v, ties to even; saturates. NaN stays NaN. Exact in bfloat16.
inline float round_e4m3(float v) {
  v = v > kLargest ? kLargest : v < -kLargest ? -kLargest : v;
  const uint32_t bits = float_to_bits(v), sign = bits & 0x80000000u, magnitude = bits & 0x7FFFFFFFu;
  const uint32_t normal = (magnitude + 0x7FFFFu + (magnitude >> 20 & 1)) & 0xFFF00000u;  // three bits of mantissa
  const float small = (bits_to_float(magnitude) + 0x1p14f) - 0x1p14f;                    // a multiple of 2^-9
  const uint32_t rounded = magnitude < 0x3C800000u ? float_to_bits(small) : normal;      // below 2^-6
  return v != v ? v : bits_to_float(rounded | sign);
}

// amax / 448 over the finite values, as large as the smallest normal float32 at least.
float scale_of(const float* values, int64_t count) {
  float largest = 0.f;
  for (int64_t i = 0; i < count; i++) {
    const float magnitude = bits_to_float(float_to_bits(values[i]) & 0x7FFFFFFFu);
    largest = magnitude < __builtin_inff() && magnitude > largest ? magnitude : largest;
  }
  const float scale = largest / kLargest;
  return scale > kSmallestScale ? scale : kSmallestScale;
}

void round_by(float* values, int64_t count, float scale) {
  for (int64_t i = 0; i < count; i++) values[i] = round_e4m3(values[i] / scale);
}

void to_float(const void* x, int32_t format, int64_t first, int64_t count, float* out) {
  if (format == FREIGHT_FLOAT32) {
    std::memcpy(out, static_cast<const float*>(x) + first, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const uint16_t* halves = static_cast<const uint16_t*>(x) + first;
  if (format == FREIGHT_BFLOAT16)
    for (int64_t i = 0; i < count; i++) out[i] = bf16_to_float(halves[i]);
  else
    for (int64_t i = 0; i < count; i++) out[i] = f16_to_float(halves[i]);
}

struct Stager {
  const FreightWeight& weight;
  const void* x;
  int32_t format;
  bool pair;
  int64_t steps, groups;
  float *row_scale, *group_scale;

  // One row into every height-th word of `to`.
  void row(int64_t index, uint32_t* to, int height, std::vector<float>& values) const {
    const int64_t in = weight.in_features;
    if (pair && weight.activations == PLAIN) {
      const uint16_t* from = static_cast<const uint16_t*>(x) + index * in;
      const int64_t whole = in / 2;
      for (int64_t i = 0; i < whole; i++) std::memcpy(&to[i * height], from + 2 * i, 4);
      for (int64_t i = whole; i < steps; i++) to[i * height] = 0;
      if (in % 2) to[whole * height] = from[in - 1];
      return;
    }
    values.assign(static_cast<size_t>(steps) * (pair ? 2 : 1), 0.f);
    to_float(x, format, index * in, in, values.data());
    if (weight.activations == STATIC) {
      round_by(values.data(), in, weight.input_scale);
      row_scale[index] = weight.input_scale;
    } else if (weight.activations == DYNAMIC && group_scale) {
      for (int64_t group = 0; group < groups; group++) {
        float* part = values.data() + group * kGroup;
        const int64_t count = std::min<int64_t>(kGroup, in - group * kGroup);
        group_scale[index * groups + group] = scale_of(part, count);
        round_by(part, count, group_scale[index * groups + group]);
      }
    } else if (weight.activations == DYNAMIC) {
      row_scale[index] = scale_of(values.data(), in);
      round_by(values.data(), in, row_scale[index]);
    }
    if (!pair) {
      for (int64_t i = 0; i < steps; i++) std::memcpy(&to[i * height], &values[static_cast<size_t>(i)], 4);
      return;
    }
    for (int64_t i = 0; i < steps; i++) {
      const float* two = values.data() + 2 * i;
      to[i * height] = float_to_bf16(two[0]) | static_cast<uint32_t>(float_to_bf16(two[1])) << 16;
    }
  }
};

}  // namespace

Staged stage(const FreightWeight& weight, const void* x, int32_t format, int64_t rows, bool pair, int64_t steps,
             int threads) {
  thread_local std::vector<uint32_t> staged;
  thread_local std::vector<float> row_scale, group_scale;
  const int64_t groups = (weight.in_features + kGroup - 1) / kGroup, tiles = (rows + kTileRows - 1) / kTileRows;
  const bool by_group = weight.activations == DYNAMIC && weight.block_scale;
  const bool by_row = weight.activations == STATIC || (weight.activations == DYNAMIC && !by_group);
  const size_t words = static_cast<size_t>(tiles * kTileRows * steps);
  if (staged.size() < words) staged = std::vector<uint32_t>(words);
  if (by_row) row_scale.resize(static_cast<size_t>(rows));
  if (by_group) group_scale.assign(static_cast<size_t>(tiles * kTileRows * groups), 1.f);
  uint32_t* to = staged.data();
  const Stager stager{weight, x, format, pair, steps, groups, by_row ? row_scale.data() : nullptr,
                      by_group ? group_scale.data() : nullptr};
  parallel_for(tiles, threads, [&](int64_t tile) {
    thread_local std::vector<float> values;
    const int64_t first = tile * kTileRows, there = std::min<int64_t>(kTileRows, rows - first);
    const int height = height_of(there);
    uint32_t* out = to + first * steps;
    for (int64_t row = 0; row < there; row++) stager.row(first + row, out + row, height, values);
    for (int64_t row = there; row < height; row++)
      for (int64_t i = 0; i < steps; i++) out[i * height + row] = 0;
  });
  return {to, steps, groups, stager.row_scale, stager.group_scale};
}
