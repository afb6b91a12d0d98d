// A product of each head: all rows' inputs of a head by the matrix of that head.
//
// The products of all heads are staged together, and their tasks are distributed over the threads together, so that one
// row of many heads waits for the threads twice in all, not twice per head. Rows are read and written in place.
#include <algorithm>
#include <vector>

#include "product.h"
#include "rows.h"
#include "status.h"

namespace freight {
namespace {

constexpr int64_t kMostInputs = 1 << 21;  // inputs of all heads staged at a time, so that they stay in the caches
constexpr int64_t kPartRows = 16;         // rows of a tile: parts are multiples of it

// Rows of a part, chosen so that all parts have about the same number.
int64_t part_of(const FreightByHead& a, const FreightWeight& weight) {
  const int64_t most = std::clamp(kMostInputs / (a.heads * weight.in_features), kPartRows, kMostTileRows);
  const int64_t parts = (a.rows + most - 1) / most;
  return parts ? ((a.rows + parts - 1) / parts + kPartRows - 1) / kPartRows * kPartRows : 1;
}

void by_head(const FreightByHead& a) {
  const FreightWeight* weights = static_cast<const FreightWeight*>(a.weights);
  const int64_t out = weights->out_features, part = part_of(a, *weights);
  thread_local std::vector<Product> products;
  for (int64_t first = 0; first < a.rows; first += part) {
    products.clear();
    for (int64_t head = 0; head < a.heads; head++) {
      Product one{weights + head, element(a.x, first * a.x_stride + head * a.head_stride, a.format)};
      one.rows = std::min(part, a.rows - first);
      one.y = element(a.y, (first * a.heads + head) * out, a.format);
      one.x_stride = a.x_stride, one.y_stride = a.heads * out;
      products.push_back(one);
    }
    stage_all(products.data(), a.heads, a.format, a.threads);
    multiply(products.data(), a.heads, a.format, a.threads);
  }
}

}  // namespace
}  // namespace freight

FREIGHT_API FreightStatus freight_by_head(const FreightByHead* arguments) {
  return freight::status_of([&] { freight::by_head(*arguments); });
}
