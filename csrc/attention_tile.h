// Constants that attention's parts share.
#pragma once

namespace freight {

constexpr int kKeyTile = 64;       // keys that are decoded and multiplied together, at absolute positions
constexpr int kPackTogether = 16;  // keys of a tile that are packed at once
constexpr int kKeySplit = 1024;    // keys whose softmax is kept apart: cut at absolute positions, whatever the load
constexpr int kMaxHeadDim = 1024;

}  // namespace freight
