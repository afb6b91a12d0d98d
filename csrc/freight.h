// The C interface of the CPU kernels, which src/freight/kernels/cpu/library.py calls through ctypes.
//
// Plain functions on raw pointers; every array is contiguous and row-major unless its comment says otherwise. No
// function allocates what it returns, throws, or keeps a pointer beyond the call. `threads` is the largest number of
// threads of a call. Functions that compute return a FreightStatus; their output is undefined unless that is
// FREIGHT_OK. Attention and the KV cache are declared in attention.h, operations that keep a state in states.h.
#pragma once
#include <cstdint>

#define FREIGHT_API extern "C" __attribute__((visibility("default")))

// Incremented when any declaration changes, so that a library of an older build is refused instead of called wrongly.
constexpr int32_t FREIGHT_ABI = 41;
FREIGHT_API int32_t freight_abi();

constexpr int32_t FREIGHT_LANES = 16;      // outputs computed together; arrays by output are padded to a multiple
constexpr int32_t FREIGHT_CACHE_LINE = 64;  // bytes
constexpr int32_t FREIGHT_MAX_RANKS = 64;
constexpr int32_t FREIGHT_INT8_INPUTS = 131071;  // of a weight in INT8, at most: their products fit in int32

enum FreightStatus : int32_t {
  FREIGHT_OK = 0,
  FREIGHT_OUT_OF_MEMORY = 1,  // no room for working memory; a later call may succeed
  FREIGHT_FAILED = 2,         // the operating system refused something else, such as a thread
  FREIGHT_SHORT_CONTEXT = 3,  // attention: a sequence has fewer keys than queries
  FREIGHT_NO_SUCH_ROW = 4,    // lookup: an id is not a row of the table
  FREIGHT_RANK_LOST = 5,      // gather: another rank has ended, or does not answer
  FREIGHT_RANK_FAILED = 6,    // gather: another rank has left the step
  FREIGHT_INTERRUPTED = 7,    // gather: the caller's own function was left by an exception (FreightExchange)
  FREIGHT_BAD_SCALE = 8,      // pack: a scale or minimum of a block is not one that is computed with
};

// Formats of stored values; the numbers are part of the interface.
enum FreightFormat : int32_t {
  FREIGHT_FLOAT32 = 0,
  FREIGHT_FLOAT16 = 1,
  FREIGHT_BFLOAT16 = 2,
  FREIGHT_E4M3FN = 3,
  FREIGHT_E5M2 = 4,
  FREIGHT_E4M3FNUZ = 5,
  FREIGHT_INT8 = 6,
  FREIGHT_MXFP4 = 7,  // only of weights: E2M1, with a scale in E8M0 for every 32 inputs of a row
  FREIGHT_NVFP4 = 8,  // only of weights: E2M1, with a scale in E4M3FN for every 16 inputs of a row
  FREIGHT_INT4 = 16,  // only of weights: codes of 4 bits, with a scale for every 32 inputs; plus numbers of FreightInt4
  FREIGHT_INTEGERS = 32,  // added to MXFP4, NVFP4 or INT4: inputs are rounded to INT8 in groups (int8_groups.h)
  FREIGHT_BYTES = 64,     // added to INT4 with that: codes are signed bytes, with no code of zero
  FREIGHT_BLOCKS = 128,   // only of weights, with INTEGERS: blocks of GGUF files; plus a number of FreightBlocks
};

// Blocks of a row, as GGUF files have them: what is added to FREIGHT_BLOCKS.
enum FreightBlocks : int32_t {
  FREIGHT_BLOCKS_Q4_0 = 0,
  FREIGHT_BLOCKS_Q4_1 = 1,
  FREIGHT_BLOCKS_Q5_0 = 2,
  FREIGHT_BLOCKS_Q5_1 = 3,
  FREIGHT_BLOCKS_Q8_0 = 4,
  FREIGHT_BLOCKS_Q4_K = 5,
  FREIGHT_BLOCKS_Q5_K = 6,
  FREIGHT_BLOCKS_Q6_K = 7,
  FREIGHT_BLOCKS_IQ4_NL = 8,
  FREIGHT_BLOCKS_IQ4_XS = 9,
  FREIGHT_BLOCKS_MXFP4 = 10,
};

// What is added to FREIGHT_INT4.
enum FreightInt4 : int32_t {
  FREIGHT_INT4_ZEROS = 1,     // each group has the code of zero; else it is 8
  FREIGHT_INT4_BFLOAT16 = 2,  // scales are bfloat16; else float16
  FREIGHT_INT4_64 = 4,        // groups of 64 inputs
  FREIGHT_INT4_128 = 8,       // groups of 128 inputs
};

// Use the threads of an OpenMP runtime: the address of GOMP_parallel of the runtime that the process already uses
// (torch's), so that there is only one pool of threads for the cores. Null: the kernels create a pool. Called once.
typedef void (*FreightGompParallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
FREIGHT_API void freight_init(FreightGompParallel gomp_parallel);

// Bind the threads that will run kernels, except the calling threads, to the machine's memory nodes, round-robin:
// weights are in the memory of the thread that packed them, and are read by that thread. node_of[processors]: the node
// of each logical processor, -1 for processors that are not used; `nodes` nodes, numbered from 0. Called once, before
// any kernel runs; if it is not called, the operating system places the threads. Changes no result. Without effect
// outside Linux.
FREIGHT_API void freight_bind(const int32_t* node_of, int32_t processors, int32_t nodes);

// Set how weights are prefetched: 0, the default: into all caches; 1: past them (non-temporal). Changes no result.
FREIGHT_API void freight_set_prefetch(int32_t non_temporal);

// Remove `bytes` bytes from all caches of the processor, so that the next read comes from memory (for measurements).
// Returns 1, or 0 where that is not possible.
FREIGHT_API int32_t freight_evict(const void* data, int64_t bytes);

// Rounding of the inputs of a product.
enum FreightActivations : int32_t {
  FREIGHT_PLAIN = 0,    // none
  // Both round to E4M3FN, or for weights in INT8 to INT8, where a row with a NaN has only NaN as results.
  FREIGHT_DYNAMIC = 1,  // scaled by the amax of the row (with block scales of each 128 inputs)
  FREIGHT_STATIC = 2,   // scaled by input_scale
};

// A packed weight [out_features, in_features]. The layout of `data` depends on the build that packed it (packed.h).
// INT8 has at most FREIGHT_INT8_INPUTS inputs, no block_scale, and activations that are not plain; -128 is a value.
struct FreightWeight {
  const void* data;          // freight_packed_bytes, at a multiple of FREIGHT_CACHE_LINE
  const float* scale;        // [out_features, padded to FREIGHT_LANES]: factor of a row's sum; NaN: the row has a NaN
  const float* block_scale;  // [ceil(out / 128), ceil(in / 128)], or null
  const int32_t* order;      // [in_features]: the input that each column takes, with PLAIN only; null: its own
  int64_t out_features, in_features;
  int32_t format;       // a FreightFormat: of 16 or 32 bits, E4M3FN, INT8, MXFP4, NVFP4, INT4 or BLOCKS
  int32_t activations;  // FreightActivations
  float input_scale;
};

FREIGHT_API int64_t freight_packed_bytes(int32_t format, int64_t out_features, int64_t in_features);

// Pack data, [out_features, in_features]. Rows with a NaN code get the scale NaN, which is written to `scale`. MXFP4 is
// [out_features, in_features / 32, 17] bytes: 16 with two codes each, the earlier input in the low half, then the byte
// of their scale. It is 3 to 252 unless all codes are zeros, so that every value is a normal bfloat16. NVFP4 is
// [out_features, in_features / 16, 9] bytes: 8 of codes, then the scale. INT4 is [out_features, in_features / group,
// group / 2 + 2 or 3] bytes: codes, the scale, 2 ** -126 to 2 ** 100 in magnitude or 0, and the code of zero, if any; with
// FREIGHT_BYTES there are group + 2. BLOCKS are rows of blocks as they are in the file. FREIGHT_BAD_SCALE: one of their
// float16 is not finite, or the scale's byte of a group of MXFP4 with other codes than zeros is below 2.
FREIGHT_API FreightStatus freight_pack(const void* data, int32_t format, int64_t out_features, int64_t in_features,
                                       void* packed, float* scale, int32_t threads);

struct FreightLinear {
  const void* weight;  // FreightWeight
  const void* x;       // [rows, in_features]
  const void* bias;    // [out_features], or null
  void* y;             // [rows, out_features]
  int64_t rows;
  int32_t format;  // of x and bias: float32, float16 or bfloat16
  int32_t wide;    // 0: y is stored in `format`; 1: as float32, with no rounding to `format`
  int32_t threads;
};

// y = x @ weight.T * scales + bias. Sums are float32, in an order that depends only on the build (linear.cpp), not on
// the number of rows or threads. Rounded once, at the end, to the format of y. In INT8 sums are int32 and exact, then converted to float32,
// multiplied by the scale of the row of x, then by that of the weight's row, so that every build has the same bits.
FREIGHT_API FreightStatus freight_linear(const FreightLinear* arguments);

struct FreightByHead {
  const void* weights;  // FreightWeight[heads], which differ only in their data and scales
  const void* x;        // [rows, heads, in_features], rows at multiples of x_stride, heads at multiples of head_stride
  void* y;              // [rows, heads, out_features]
  int64_t rows, x_stride, head_stride;
  int32_t heads;
  int32_t format;  // of x and y: float32, float16 or bfloat16
  int32_t threads;
};

// y[:, h] = x[:, h] @ weights[h].T for every head, with the bits of freight_linear.
FREIGHT_API FreightStatus freight_by_head(const FreightByHead* arguments);

struct FreightAdapters {
  const void *x, *a, *b;    // [rows, in_features], rows at multiples of x_stride;
                            // [num_slots, num_parts, max_rank, in_features]; [num_slots, max_rank, out_features]
  const int32_t* adapters;  // [rows]: the slot of each; others than 0 .. num_slots - 1: none
  const int32_t* ranks;     // [num_slots, num_parts], 0 .. max_rank
  const float* scalings;    // [num_slots, num_parts]
  const int64_t* ends;      // [num_parts]: where the outputs of each part end; the last is out_features
  const int32_t* index;     // [rows]: the row of x that belongs to each row of y; null: its own
  void* y;                  // [rows, out_features]
  int64_t rows, in_features, out_features, x_stride;
  int32_t num_slots, num_parts, max_rank;
  int32_t format;  // of x, a, b and y: float32, float16 or bfloat16
  int32_t threads;
};

// y += scaling * B (A x), of the adapter of each row, part by part, with the first `rank` rows of a and b. Sums are
// float32, in an order that depends only on the build; y is rounded once. Rows without an adapter, and the outputs of a
// part of rank 0, are neither read nor written.
FREIGHT_API FreightStatus freight_add_adapters(const FreightAdapters* arguments);

// Row-wise operations: inputs and outputs in `format` (float32, float16, bfloat16), computed in float32.

struct FreightNorm {
  const void *x, *delta;              // [rows, size]; without delta (null) the sum is x, and not written
  const void *weight, *delta_weight;  // [size]; with delta_weight (not null) the RMSNorm of delta is added
  void *sum, *out;                    // [rows, size]
  int64_t rows, size;
  int32_t format;                              // of all but the weights
  int32_t weight_format, delta_weight_format;  // `format`, or float32
  float eps;
  int32_t threads;
};

// sum = x + delta; out = sum / sqrt(mean(sum^2) + eps) * weight. Where the weight is in `format`, the normed values are
// rounded before it multiplies them.
FREIGHT_API FreightStatus freight_add_rms_norm(const FreightNorm* arguments);

enum FreightGatedActivation : int32_t {
  FREIGHT_SILU = 0,       // gate / (1 + e^-gate)
  FREIGHT_GELU_TANH = 1,  // gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate^3)))
  // g / (1 + e^(-1.702 g)) with g = min(gate, 7); multiplies 1 + up, where up is clamped to [-7, 7]
  FREIGHT_CLAMPED_SWIGLU = 2,
  FREIGHT_CLAMPED_SILU = 3,  // min(gate / (1 + e^-gate), limit); multiplies up, clamped to [-limit, limit]
  FREIGHT_GEGLU = 4,         // gate / 2 * (1 + erf(gate / sqrt(2)))
};

struct FreightGated {
  const void* gate_up;  // [rows, 2 * size], gate first
  void* out;            // [rows, size]
  int64_t rows, size;
  int32_t format;
  int32_t activation;  // FreightGatedActivation
  float limit;         // of FREIGHT_CLAMPED_SILU, > 0
  int32_t threads;
};

// out = activation(gate) * up.
FREIGHT_API FreightStatus freight_gated(const FreightGated* arguments);

struct FreightLayerNorm {
  const void *x, *delta;      // [rows, size]; without delta (null) the sum is x, and not written
  const void *weight, *bias;  // [size]
  void *sum, *out;            // [rows, size]
  int64_t rows, size;
  int32_t format;
  float eps;
  int32_t threads;
};

// sum = x + delta; out = (sum - mean(sum)) / sqrt(variance(sum) + eps) * weight + bias.
FREIGHT_API FreightStatus freight_add_layer_norm(const FreightLayerNorm* arguments);

enum FreightUngated : int32_t {
  FREIGHT_RELU = 0,          // max(x, 0)
  FREIGHT_RELU_SQUARED = 1,  // max(x, 0)^2
  FREIGHT_GELU = 2,          // x / 2 * (1 + erf(x / sqrt(2)))
};

struct FreightActivated {
  const void* x;  // [rows, size]
  void* out;      // [rows, size]
  int64_t rows, size;
  int32_t format;
  int32_t activation;  // FreightUngated
  int32_t threads;
};

// out = activation(x).
FREIGHT_API FreightStatus freight_activated(const FreightActivated* arguments);

enum FreightGateFunction : int32_t {
  FREIGHT_BY_SOFTPLUS = 0,  // ln(1 + e^logit)
  FREIGHT_BY_SIGMOID = 1,   // 1 / (1 + e^-logit)
  FREIGHT_BY_IDENTITY = 2,  // the logit itself
};

struct FreightGate {
  const void* x;       // [rows, size], rows at multiples of x_stride
  const void* logits;  // [rows, groups], rows at multiples of logits_stride; 0: all rows share one
  void* out;           // [rows, size]
  int64_t rows, size, groups, x_stride, logits_stride;
  int32_t format;
  int32_t function;  // FreightGateFunction
  int32_t threads;
};

// out = x * function(logits), where each of `groups` equal parts of a row has one factor. Rounded once, at the end.
FREIGHT_API FreightStatus freight_gate(const FreightGate* arguments);

struct FreightPart {
  const void* x;       // [rows, size], rows at multiples of x_stride
  const void* weight;  // [group], or null
  void* out;           // [rows, size], rows at multiples of out_stride
  int64_t rows, size, x_stride, out_stride, group;
  int32_t format, weight_format;  // weight_format: `format`, or float32
  float eps;
  int32_t threads;
};

// Columns of a larger matrix: out = x, or with a weight the RMSNorm of each `group` values of a row, as add_rms_norm.
FREIGHT_API FreightStatus freight_part(const FreightPart* arguments);

struct FreightDecays {
  const void *a, *b;             // [rows, heads], rows at multiples of a_stride and b_stride; b may be null
  const float *a_log, *dt_bias;  // [heads]
  float *beta, *log_decay;       // [rows, heads]
  int64_t rows, heads;
  // 0: one decay per head; else a and log_decay are [rows, heads, k_dim], dt_bias is [heads, k_dim], b is not null
  int64_t k_dim;
  int64_t a_stride, b_stride;
  float least, most;  // bounds of dt
  float bound;        // of log_decay, below 0, or 0
  int32_t format;     // of a and b
  int32_t threads;
};

// dt = softplus(a + dt_bias), bounded; log_decay = -exp(a_log) * dt; beta = sigmoid(b), or dt without b. With a bound
// log_decay = bound * sigmoid(exp(a_log) * (a + dt_bias)).
FREIGHT_API FreightStatus freight_decays(const FreightDecays* arguments);

struct FreightGatedNorm {
  const void *x, *gate;  // [rows, size], rows at multiples of x_stride and gate_stride
  const void* weight;    // [size], or [group] for all groups
  void* out;             // [rows, size]
  int64_t rows, size, group, weight_size, x_stride, gate_stride;
  int32_t format, weight_format;  // weight_format: `format`, or float32
  float eps;
  int32_t norm_first;  // 0 or 1
  int32_t threads;
};

// The RMSNorm of each `group` values of x, as add_rms_norm rounds it, times SiLU of the gate, rounded; or, unless
// norm_first, the norm of x times SiLU of the gate.
FREIGHT_API FreightStatus freight_gated_norm(const FreightGatedNorm* arguments);

struct FreightLookup {
  const void* table;   // [table_rows, size], rows at multiples of table_stride
  const int64_t* ids;  // [rows]
  const void* base;    // [rows, size], or null
  void* out;           // [rows, size]
  int64_t rows, size, table_rows, table_stride;
  int32_t table_format, format;  // format: of base and out
  float multiplier, factor;
  int32_t threads;
};

// out = (base + table[ids] * multiplier) * factor: the rows, each product and the sum are rounded to `format`. An id
// outside the table is refused (FREIGHT_NO_SUCH_ROW) before anything is written.
FREIGHT_API FreightStatus freight_lookup(const FreightLookup* arguments);

struct FreightBlockRows {
  const void* table;   // FreightWeight in BLOCKS
  const int64_t* ids;  // [rows]
  const void* base;    // [rows, in_features], or null
  void* out;           // [rows, in_features]
  int64_t rows;
  int32_t format;  // of base and out: float32, float16 or bfloat16
  float multiplier, factor;
  int32_t threads;
};

// out = (base + table[ids] * multiplier) * factor: the values, each product and the sum are rounded to `format`. An id
// outside the table is refused (FREIGHT_NO_SUCH_ROW) before anything is written.
FREIGHT_API FreightStatus freight_block_rows(const FreightBlockRows* arguments);

// A mixture of experts.

enum FreightScoring : int32_t {
  FREIGHT_SOFTMAX = 0,  // over all experts
  FREIGHT_SIGMOID = 1,  // of each expert
  FREIGHT_CHOSEN = 2,   // softmax over the chosen experts
};

struct FreightRoute {
  const void *router, *x;           // FreightWeight [num_experts, hidden_size]; [rows, hidden_size] in `format`
  const float *bias, *choice_bias;  // [num_experts], or null: added to the logits; added to the scores for the choice
  const float* expert_scale;        // [num_experts], or null: multiplies the weights
  int32_t* ids;                     // [rows, top_k], ascending in a row
  float* weights;                   // [rows, top_k]
  int64_t rows;
  int32_t format, top_k, scoring, normed;  // scoring: FreightScoring; normed: 0 or 1
  int32_t num_groups, top_groups;          // of experts; experts are chosen from the top_groups best groups
  int32_t group_best;                      // 1 or 2: number of a group's best scores whose sum rates the group
  float factor;                            // multiplies the weights
  int32_t threads;
};

// Choose the top_k experts of each row with the largest scores, of equal ones those with the lower ids, and compute
// their weights. The logits are those of freight_linear for the row in float32. A NaN score counts as the largest.
FREIGHT_API FreightStatus freight_route(const FreightRoute* arguments);

struct FreightExperts {
  const void *gate_up, *down;            // FreightWeight[num_experts], which differ only in their data and scales
  const void *gate_up_bias, *down_bias;  // [num_experts, out_features], or null
  const void *x, *base;                  // [rows, hidden_size]; base may be null
  const int32_t* ids;                    // [rows, top_k], ascending in a row; ids outside [0, num_experts) are skipped
  const float* weights;                  // [rows, top_k]
  void* out;                             // [rows, down's out_features]
  const void* ranks;                     // FreightRanks, or null
  int64_t rows;
  int32_t num_experts, top_k;
  int32_t format;      // of x, base, the biases and out
  int32_t gated;       // 1: gate_up has the rows of gate, then of up; 0: only those of up
  int32_t activation;  // FreightGatedActivation, or without a gate FreightUngated
  float limit;         // as in FreightGated
  int32_t threads;
  const int32_t* adapters;                       // [rows]: the slot of each, or null; others than those of the banks: none
  FreightAdapters gate_up_bank, down_bank;       // with adapters: the banks alone, whose slot s of expert e is the slot
                                                 // s * num_experts + e
};

// out = base + the sum over a row's experts of weight * down(activation(gate) * up), or of weight *
// down(activation(up)); products and activations are rounded as by freight_linear, freight_gated and freight_activated.
// The sum is float32, in the order of ids, rounded once, at the end. With ranks gate_up has the rows of this rank, whose
// activations are gathered, and out the columns of this rank: those of down, which come from its number on. Adapters add
// to both products what freight_add_adapters adds, after they are rounded.
FREIGHT_API FreightStatus freight_experts(const FreightExperts* arguments);

// Ranks: processes that each compute some columns of the same rows. On one machine they gather over shared memory. On
// several, `exchange` gathers, and the shared memory is not looked at.

// part [rows, part_bytes] -> out [rows, size, part_bytes]. It writes a FreightStatus, and does not return it: a function of
// Python that Ctrl-C interrupts before its first line returns anything, and writes nothing.
typedef void (*FreightExchange)(const void* part, void* out, int64_t rows, int64_t part_bytes, int32_t* status);

struct FreightRanks {
  void* shared;          // memory of all ranks: cache lines with a number each, which are 0 at first: turns of each of
                         // FREIGHT_MAX_RANKS ranks, `lost`, `failed`; then [2][size][capacity] bytes
  const int32_t* alive;  // [size]: a file that hangs up when that rank ends; -1 for the rank itself
  int64_t capacity;      // bytes of a slot, a multiple of the cache line
  int64_t timeout;       // milliseconds after which a rank that does not answer counts as lost
  int32_t rank, size;
  FreightExchange exchange;  // null, or what takes the place of shared memory
};

struct FreightGather {
  const void* ranks;         // FreightRanks
  const void* part;          // [rows, part_bytes], of this rank
  void* out;                 // [rows, size, part_bytes]
  int64_t rows, part_bytes;
  int32_t only;              // the one rank whose out is written; -1: all
  int32_t threads;
};

// Put the parts of all ranks side by side. Every rank makes the same calls in the same order.
FREIGHT_API FreightStatus freight_gather(const FreightGather* arguments);

struct FreightSharedLinear {
  const void* ranks;   // FreightRanks
  const void* weight;  // FreightWeight: the rows of this rank
  const void* x;       // [rows, in_features / size], of this rank; with `whole` [rows, in_features]
  const void* bias;    // [out_features], or null
  void* y;             // [rows, size, out_features]
  int64_t rows;
  int32_t format;  // of x, bias and y: float32, float16 or bfloat16
  int32_t whole;   // 0 or 1
  int32_t threads;
};

// freight_linear of the inputs of all ranks, which freight_gather would put side by side, and the outputs of all ranks,
// with the bits of these calls. Every rank makes the same calls in the same order.
FREIGHT_API FreightStatus freight_shared_linear(const FreightSharedLinear* arguments);

// Replay of several calls.

enum FreightFunction : int32_t {
  FREIGHT_LINEAR = 0,
  FREIGHT_ADD_RMS_NORM = 1,
  FREIGHT_GATED = 2,
  FREIGHT_ATTENTION = 3,
  FREIGHT_ROTATE_STORE = 4,
  FREIGHT_EXPERTS = 5,
  FREIGHT_ROUTE = 6,
  FREIGHT_ADD_LAYER_NORM = 7,
  FREIGHT_ACTIVATED = 8,
  FREIGHT_GATE = 9,
  FREIGHT_PART = 10,
  FREIGHT_DECAYS = 11,
  FREIGHT_GATED_NORM = 12,
  FREIGHT_CONVOLUTION = 13,
  FREIGHT_RECURRENCE = 14,
  FREIGHT_LOOKUP = 15,
  FREIGHT_BY_HEAD = 16,
  FREIGHT_GATHER = 17,
  FREIGHT_SHARED_LINEAR = 18,
  FREIGHT_BLOCK_ROWS = 19,
  FREIGHT_ADD_ADAPTERS = 20,
};

struct FreightCall {
  const void* arguments;  // the struct that the function takes
  int32_t function;       // FreightFunction
};

// Make `count` calls in order, up to the first that fails: returns its status, and writes its index to `failed`.
FREIGHT_API FreightStatus freight_replay(const FreightCall* calls, int64_t count, int64_t* failed);
