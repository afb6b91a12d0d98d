// The C interface of attention over the pages of the KV cache, and of storing into them.
//
// Each call takes one struct, which src/freight/kernels/cpu/interface.py mirrors field by field. Only slots that were
// stored are read.
#pragma once
#include "freight.h"

enum FreightKvScales : int32_t {
  FREIGHT_NO_SCALES = 0,      // stored values are the true ones
  FREIGHT_STATIC_SCALES = 1,  // float32 [num_kv_heads, k_dim or v_dim]
  FREIGHT_TOKEN_SCALES = 2,   // bfloat16 [num_blocks, block_size, num_kv_heads]
  // bfloat16 [num_blocks, block_size, num_kv_heads][v_dim / FREIGHT_SCALE_GROUP]: one scale for each group of channels
  // of V. The vectors of K hold exactly V; the channels of keys before those are stored separately, in bfloat16.
  FREIGHT_GROUP_SCALES = 3,
};

constexpr int32_t FREIGHT_SCALE_GROUP = 128;  // channels; v_dim is a multiple of it

constexpr int32_t FREIGHT_MAX_HEAD_DIM = 1024;  // of k_dim and v_dim

// The pages of K or of V: vectors [num_blocks, block_size, num_kv_heads] of k_dim or v_dim contiguous values. Strides
// are in bytes. V may lie inside the vectors of K: `data` is then the first byte of V's first vector, and the strides
// are K's. With group scales K and V are the same vectors of v_dim values.
struct FreightPages {
  void* data;
  void* scale;                                   // as FreightKvScales describes it
  int64_t block, token, head;                    // from a vector to that of the next block, token, KV head
  int64_t scale_block, scale_token, scale_head;  // likewise between token scales
};

struct FreightAttention {
  const void* q;                // [num_tokens, num_heads, k_dim] of q_type; rows q_stride values apart
  void* out;                    // [num_tokens, num_heads, v_dim] of q_type
  FreightPages k, v;            // of kv_format
  FreightPages rotated;         // group scales: the first k_dim - v_dim channels of keys (an even number), bfloat16
  const int32_t* query_starts;  // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  // Subtracted from keys before their rotary embedding (src/freight/operands/kv_pages.py, KeyCenter); unused without pairs.
  const int32_t* center_pairs;          // [num_kv_heads, center_size]: channels i, paired with i + rotary_dim / 2
  const float* center_parts;            // [2, num_kv_heads, center_size]
  const float *center_cos, *center_sin;  // [positions / 64, rotary_dim / 2, 64]
  const float* sinks;           // [num_heads]: an additional score in the sum of each row's softmax; null: none
  int64_t q_stride;
  int32_t q_type, kv_format, scales;
  int32_t num_seqs, max_blocks, num_heads, num_kv_heads, k_dim, v_dim, block_size;
  int32_t window;               // a row sees keys at a distance < window; 0: none
  int32_t both_ways;            // 1: a row also sees later keys, within the window; 0: none
  int32_t center_size;          // pairs per KV head; 0: keys are not centered
  int32_t rotary_dim;           // channels that are rotated; unused without pairs
  float softmax_scale;
  float soft_cap;               // a score s becomes soft_cap * tanh(s / soft_cap); 0: no cap
  int32_t threads;
};

// Grouped-query attention of each row over its sequence. A row's bits depend only on the keys that it may see: its own
// history, or with `both_ways` its sequence, whose rows are then all in this call. A context shorter than its queries is
// refused (FREIGHT_SHORT_CONTEXT) before anything is written.
FREIGHT_API FreightStatus freight_attention(const FreightAttention* arguments);

struct FreightStore {
  const void* qkv;  // [rows, num_heads * k_dim + num_kv_heads * k_dim + num_v_heads * v_dim] of type, contiguous
  void* q;          // [rows, num_heads, k_dim] of type: normed, rotated, times q_factor
  FreightPages k, v;                    // of kv_format; scales are read if static, written if per token or group
  FreightPages rotated;                 // as in FreightAttention
  const int64_t *positions, *slots;     // [rows]; slot s is token s % block_size of block s / block_size; < 0: none
  const float *cos, *sin;               // [max_positions, rotary_dim / 2]
  const float* q_factor;                // [max_positions], rounded to type: multiplies rotated queries; null: none
  const void *q_norm, *k_norm;          // [k_dim]: weight of the RMSNorm of each head, applied first; null: none
  const float* k_center;                // [num_kv_heads, k_dim]: subtracted from keys before rotation; null: none
  int64_t* counters;                    // [2], incremented by the numbers of NaNs and of values clipped to their range
  int64_t* row_counters;                // [rows, 2]: the same numbers of each row; null: not wanted
  int64_t rows;
  int32_t num_heads, num_kv_heads;
  int32_t num_v_heads;  // num_kv_heads, or 0 where V lies inside K
  int32_t k_dim, v_dim, block_size;
  int32_t rotary_dim;  // the first channels of q and k, in pairs (i, i + rotary_dim / 2); the others are not rotated
  int32_t type, kv_format, scales;
  int32_t q_norm_type, k_norm_type;  // type, or float32: as the weights of FreightNorm
  float eps;
  int32_t threads;
};

// Norm, center and rotate; quantize rows of K and V into their slots: divide by the scale in float32, round to nearest,
// ties to even, and saturate.
FREIGHT_API FreightStatus freight_rotate_store(const FreightStore* arguments);
