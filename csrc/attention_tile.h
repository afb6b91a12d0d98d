// Constants and addresses that the parts of attention share.
#pragma once
#include "attention.h"

namespace freight {

constexpr int kKeyTile = 64;       // keys that are decoded and multiplied together, at absolute positions
constexpr int kPackTogether = 16;  // keys of a tile that are packed at a time
// Keys of a split, which has its own softmax state: cut at absolute positions, independent of the load. 64 bits,
// because the end of the last split of a context of nearly 2^31 tokens does not fit in 32.
constexpr int64_t kKeySplit = 1024;
constexpr int kMaxHeadDim = FREIGHT_MAX_HEAD_DIM;

// The address of a token's first KV head.
inline uint8_t* vectors_of(const FreightPages& pages, int64_t block, int64_t token) {
  return static_cast<uint8_t*>(pages.data) + block * pages.block + token * pages.token;
}

// The address of a token's first scale, if tokens have scales.
inline uint8_t* scales_of(const FreightPages& pages, int64_t block, int64_t token) {
  return static_cast<uint8_t*>(pages.scale) + block * pages.scale_block + token * pages.scale_token;
}

}  // namespace freight
