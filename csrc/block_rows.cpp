// Rows of a matrix that is packed from the blocks of a GGUF file (int8_groups.h), as numbers: an embedding, which may
// also be the head's matrix.
#include <algorithm>
#include <vector>

#include "freight.h"
#include "int8_groups.h"
#include "parallel.h"
#include "rows.h"
#include "status.h"

namespace freight {
namespace {

// The code of an input of row `lane` in a group, minus that of zero.
template <class Kind>
int code_at(const GroupLines<Kind::codes>& at, const uint8_t* piece, int lane, int input) {
  const int line = input / kLineInputs, in_line = input % kLineInputs, last = in_line / 4;
  const int byte = lane * 4 + in_line % 4;
  const uint8_t* bytes = piece + at.line + line * kBand * at.line_bytes + byte;
  if constexpr (Kind::codes == Codes::kInt8) return bytes[last * kUnit] - Kind::zero;
  int code = *bytes >> 4 * last & 15;
  if constexpr (high_bits(Kind::codes) != 0) {
    constexpr int count = high_bits(Kind::codes);
    code |= (piece[at.high + byte] >> (2 * line + last) * count & ((1 << count) - 1)) << 4;
  }
  if constexpr (Kind::codes == Codes::kE2M1) code = kE2M1Bytes[code];
  if constexpr (Kind::codes == Codes::kIq4) code = kIq4Bytes[code];
  return code - Kind::zero;
}

// The values of a row, which is `lane` of a block of a band.
template <class Kind>
void decode_row(const FourBit& layout, const uint8_t* piece, int side, int lane, int64_t pieces, float* out) {
  const int inputs = layout.inputs / layout.groups;
  alignas(64) float scales[kLanes], minima[kLanes] = {};
  for (; pieces > 0; pieces--, piece += layout.bytes)
    for (int group = 0; group < layout.groups; group++) {
      const GroupLines<Kind::codes> at(layout, side, group);
      store(scales, Kind::scales(layout, piece, side, group));
      if constexpr (Kind::has_minima) store(minima, Kind::minima(layout, piece, side, group));
      for (int input = 0; input < inputs; input++) {
        const float value = static_cast<float>(code_at<Kind>(at, piece, lane, input)) * scales[lane];
        *out++ = Kind::has_minima ? value + minima[lane] : value;
      }
    }
}

void block_rows(const FreightBlockRows& a) {
  const FreightWeight& table = *static_cast<const FreightWeight*>(a.table);
  const FourBit layout = four_bit(table.format);
  const int64_t pieces = units_of(table.format, table.in_features), size = table.in_features;
  const V16 multiplier = set16(a.multiplier), factor = set16(a.factor);
  with_blocks(table.format, [&](auto kind) {
    parallel_for(a.rows, threads_for(a.rows * size * 4, a.threads), [&](int64_t row) {
      thread_local std::vector<float> values;
      values.resize(static_cast<size_t>(size));
      const int64_t block = a.ids[row] / kLanes;
      const uint8_t* band = static_cast<const uint8_t*>(table.data) + block / kBand * pieces * layout.bytes;
      decode_row<decltype(kind)>(layout, band, block % kBand, a.ids[row] % kLanes, pieces, values.data());
      char* to = element(a.out, row * size, a.format);
      for (int64_t i = 0; i < size; i += kLanes) {
        V16 v = rounded_to(load16(values.data() + i), a.format);
        v = rounded_to(v * multiplier, a.format);
        if (a.base) v = rounded_to(load_as(element(a.base, row * size + i, a.format), a.format, kLanes) + v, a.format);
        store_as(element(to, i, a.format), v * factor, a.format, kLanes);
      }
    });
  });
}

bool are_rows(const FreightBlockRows& a) {
  const int64_t count = static_cast<const FreightWeight*>(a.table)->out_features;
  return std::all_of(a.ids, a.ids + a.rows, [&](int64_t id) { return id >= 0 && id < count; });
}

}  // namespace
}  // namespace freight

FREIGHT_API FreightStatus freight_block_rows(const FreightBlockRows* arguments) {
  if (!freight::are_rows(*arguments)) return FREIGHT_NO_SUCH_ROW;
  return freight::status_of([&] { freight::block_rows(*arguments); });
}
