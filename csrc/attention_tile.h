// Constants that attention's parts share.
#pragma once

namespace freight {

constexpr int kKeyTile = 64;      // keys that are decoded together, at absolute positions
constexpr int kKeySplit = 1024;   // keys whose softmax is kept apart: cut at absolute positions, whatever the load
constexpr int kMaxHeadDim = 1024;

}  // namespace freight
