// The C interface of the operations that keep a state of each sequence: convolutions and recurrences.
//
// Each call takes one struct, which src/freight/kernels/cpu/interface.py mirrors field by field. States are stored in
// blocks: a block belongs to `every` positions of one sequence, and holds the state after the last of them so far. The
// first row of block i reads the state of block i - 1 (src/freight/operands/states.py). Lengths and tables are read
// when the function is called.
#pragma once
#include "freight.h"

constexpr int32_t FREIGHT_STATE_TILE = 16;  // positions between two roundings of a state; `every` is a multiple of it
constexpr int32_t FREIGHT_MAX_WIDTH = 8;    // of a convolution

struct FreightConvolution {
  const void* x;                // [rows, channels], rows at multiples of x_stride
  const void* weight;           // [channels, width]
  const void* bias;             // [channels], or null
  void* out;                    // [rows, channels]
  void* columns;                // [num_blocks, kept, channels]: the input at position p lies at p % kept
  const int32_t* query_starts;  // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  int64_t x_stride;
  int32_t num_seqs, max_blocks, every;
  int32_t channels, width;  // width: 2 to FREIGHT_MAX_WIDTH
  int32_t kept;             // inputs of a block, width - 1 or more: those beyond are room for rows that are taken back
  int32_t format;           // of all but the integers
  int32_t silu;             // 0 or 1
  int32_t threads;
};

// A causal convolution of each channel over its sequence; the formula is that of `KernelSet.convolve`
// (src/freight/kernels/interface.py). Its sums have the bits of the reference. A context shorter than its rows is
// refused (FREIGHT_SHORT_CONTEXT) before anything is written.
FREIGHT_API FreightStatus freight_convolution(const FreightConvolution* arguments);

struct FreightRecurrence {
  const void *q, *k;             // [rows, key_heads * k_dim], rows q_stride and k_stride values apart
  const void* v;                 // [rows, heads * v_dim], rows v_stride values apart
  const float *beta, *log_decay;  // [rows, heads]; log_decay with by_channel [rows, heads, k_dim]
  const float* skip;             // [heads], or null
  void* out;                     // [rows, heads * v_dim]
  void* state;                   // [num_blocks, heads, k_dim, v_dim] of state_format: S at the start of the open tile
  void* scale;                   // [num_blocks, heads, v_dim] bfloat16; null for the formats of 16 and 32 bits
  void* kept_k;                  // [num_blocks, FREIGHT_STATE_TILE, key_heads, k_dim] of format: rows of the open tile
  void* kept_u;                  // [num_blocks, FREIGHT_STATE_TILE, heads, v_dim] of format
  float* kept_decay;             // [num_blocks, FREIGHT_STATE_TILE, heads (, k_dim)]: sums since the tile's start
  const int32_t* query_starts;   // [num_seqs + 1]
  const int32_t* context_lens;   // [num_seqs]
  const int32_t* block_tables;   // [num_seqs, max_blocks]
  int64_t q_stride, k_stride, v_stride;
  int32_t num_seqs, max_blocks, every;
  int32_t key_heads, heads, k_dim, v_dim;  // heads: a multiple of key_heads; the heads of one key head are adjacent
  int32_t format;                          // of q, k, v, out and the kept rows: float32, float16 or bfloat16
  int32_t state_format;                    // float32, bfloat16, INT8 or E4M3
  int32_t delta, norm;                     // 0 or 1
  int32_t by_channel;                      // 1: a decay of each channel of a key; 0: one of each head
  float q_factor;                          // multiplies q with `norm`
  int32_t threads;
};

// Linear attention with a decay; the formulas are those of `KernelSet.recurrence` (src/freight/kernels/interface.py). A
// row's bits, and those of the stored state, depend only on its own history. A context shorter than its rows is refused
// (FREIGHT_SHORT_CONTEXT) before anything is written, and so is a format that states do not have (FREIGHT_FAILED).
FREIGHT_API FreightStatus freight_recurrence(const FreightRecurrence* arguments);
