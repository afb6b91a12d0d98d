// Constants that attention's parts share.
#pragma once
#include "attention.h"

namespace freight {

constexpr int kKeyTile = 64;       // keys that are decoded and multiplied together, at absolute positions
constexpr int kPackTogether = 16;  // keys of a tile that are packed at once
// Keys whose softmax is kept apart: cut at absolute positions, whatever the load. 64 bits, because the end of the last
// split of a context of nearly 2^31 tokens does not fit into 32.
constexpr int64_t kKeySplit = 1024;
constexpr int kMaxHeadDim = FREIGHT_MAX_HEAD_DIM;

// Where a token's first KV head lies.
inline uint8_t* vectors_of(const FreightPages& pages, int64_t block, int64_t token) {
  return static_cast<uint8_t*>(pages.data) + block * pages.block + token * pages.token;
}

// Where a token's first scale lies, if tokens have scales.
inline uint8_t* scales_of(const FreightPages& pages, int64_t block, int64_t token) {
  return static_cast<uint8_t*>(pages.scale) + block * pages.scale_block + token * pages.scale_token;
}

}  // namespace freight
