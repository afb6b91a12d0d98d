// The C interface of the CPU kernels: what src/freight/kernels/cpu/library.py calls through ctypes.
//
// Plain functions on raw pointers; every array is contiguous and row-major unless its comment says otherwise. Nothing
// here allocates what it returns, throws, or keeps a pointer beyond the call. `threads` is how many threads may work.
// Functions that compute return a FreightStatus; their output is undefined unless that is FREIGHT_OK.
// Attention and the KV cache have their own header, attention.h; operations that keep a state have states.h.
#pragma once
#include <cstdint>

#define FREIGHT_API extern "C" __attribute__((visibility("default")))

// Changes when any declaration changes, so that a library from an older build is refused instead of called wrongly.
constexpr int32_t FREIGHT_ABI = 26;
FREIGHT_API int32_t freight_abi();

constexpr int32_t FREIGHT_LANES = 16;      // outputs that are computed together: arrays by output are padded to it
constexpr int32_t FREIGHT_CACHE_LINE = 64;  // bytes

enum FreightStatus : int32_t {
  FREIGHT_OK = 0,
  FREIGHT_OUT_OF_MEMORY = 1,  // no room for working memory; a later call may succeed
  FREIGHT_FAILED = 2,         // the system refused something else, such as a thread
  FREIGHT_SHORT_CONTEXT = 3,  // attention: a sequence has fewer keys than queries
  FREIGHT_NO_SUCH_ROW = 4,    // lookup: an id is no row of the table
};

// How values are stored; the numbers are part of the interface.
enum FreightFormat : int32_t {
  FREIGHT_FLOAT32 = 0,
  FREIGHT_FLOAT16 = 1,
  FREIGHT_BFLOAT16 = 2,
  FREIGHT_E4M3FN = 3,
  FREIGHT_E5M2 = 4,
  FREIGHT_E4M3FNUZ = 5,
  FREIGHT_INT8 = 6,
  FREIGHT_MXFP4 = 7,  // weights alone: E2M1, with E8M0 for every 32 inputs of a row
};

// Take the caller's OpenMP pool: the address of GOMP_parallel of the runtime that the process uses already (torch's),
// so that one pool of threads exists and two never fight for the cores. Null: a pool of our own. Called once.
typedef void (*FreightGompParallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
FREIGHT_API void freight_init(FreightGompParallel gomp_parallel);

// Bind the threads that will run kernels to the machine's memory nodes in turn, the calling threads excepted: weights lie
// where the thread that packed them ran, and are read by that thread. node_of[processors]: the node of each logical
// processor, -1 for those that are not to be used; `nodes` of them, numbered from 0. Called once, before any kernel runs;
// not called: the operating system places threads. Changes no result. Linux only, elsewhere it does nothing.
FREIGHT_API void freight_bind(const int32_t* node_of, int32_t processors, int32_t nodes);

// How weights are prefetched: 0, the default: into all caches; 1: past them (non-temporal). Changes no result.
FREIGHT_API void freight_set_prefetch(int32_t non_temporal);

// Remove `bytes` bytes from all caches of the processor, so that the next read comes from memory: for measurements.
// Returns 1, or 0 where that is not possible.
FREIGHT_API int32_t freight_evict(const void* data, int64_t bytes);

// How a product takes its inputs.
enum FreightActivations : int32_t {
  FREIGHT_PLAIN = 0,    // as they are
  FREIGHT_DYNAMIC = 1,  // rounded to E4M3FN by the row's amax (under block scales by that of 1 x 128)
  FREIGHT_STATIC = 2,   // rounded to E4M3FN by input_scale
};

// A packed weight [out_features, in_features]. The layout of `data` belongs to the build that packed it (packed.h).
struct FreightWeight {
  const void* data;          // freight_packed_bytes, at a multiple of FREIGHT_CACHE_LINE
  const float* scale;        // [out_features, padded to FREIGHT_LANES]: multiplies a row's sum; NaN: it holds NaN codes
  const float* block_scale;  // [ceil(out / 128), ceil(in / 128)], or null
  int64_t out_features, in_features;
  int32_t format;       // FREIGHT_FLOAT32, FREIGHT_FLOAT16, FREIGHT_BFLOAT16, FREIGHT_E4M3FN or FREIGHT_MXFP4
  int32_t activations;  // FreightActivations
  float input_scale;
};

FREIGHT_API int64_t freight_packed_bytes(int32_t format, int64_t out_features, int64_t in_features);

// data: [out_features, in_features]. Rows with a NaN code get the scale NaN, which is written into `scale`. MXFP4:
// [out_features, in_features / 32, 17] bytes, 16 with two codes each, the earlier input in the low half, and the byte of
// their scale, from 3 to 252 unless all of them are zeros: then every value is a normal bfloat16.
FREIGHT_API FreightStatus freight_pack(const void* data, int32_t format, int64_t out_features, int64_t in_features,
                                       void* packed, float* scale, int32_t threads);

struct FreightLinear {
  const void* weight;  // FreightWeight
  const void* x;       // [rows, in_features]
  const void* bias;    // [out_features], or null
  void* y;             // [rows, out_features]
  int64_t rows;
  int32_t format;  // of x and bias: float32, float16 or bfloat16
  int32_t wide;    // 0: y is in `format`; 1: its values are, and stored as float32
  int32_t threads;
};

// y = x @ weight.T * scales + bias. Sums are float32, in one order per build, whatever the rows and threads; one rounding,
// at the end. Builds differ in that order: see linear.cpp.
FREIGHT_API FreightStatus freight_linear(const FreightLinear* arguments);

struct FreightByHead {
  const void* weights;  // FreightWeight[heads]; all alike but for their data and scales
  const void* x;        // [rows, heads, in_features], rows at multiples of x_stride, heads at multiples of head_stride
  void* y;              // [rows, heads, out_features]
  int64_t rows, x_stride, head_stride;
  int32_t heads;
  int32_t format;  // of x and y: float32, float16 or bfloat16
  int32_t threads;
};

// y[:, h] = x[:, h] @ weights[h].T for every head, with the bits of freight_linear.
FREIGHT_API FreightStatus freight_by_head(const FreightByHead* arguments);

// Row-wise operations; all in `format` (float32, float16, bfloat16), contiguous, float32 inside.

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
  // g / (1 + e^(-1.702 g)) with g = min(gate, 7); it multiplies up, bounded to [-7, 7], plus 1
  FREIGHT_CLAMPED_SWIGLU = 2,
  FREIGHT_CLAMPED_SILU = 3,  // min(gate / (1 + e^-gate), limit); it multiplies up, bounded to [-limit, limit]
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
  const void* logits;  // [rows, groups], rows at multiples of logits_stride; 0: all rows have the same
  void* out;           // [rows, size]
  int64_t rows, size, groups, x_stride, logits_stride;
  int32_t format;
  int32_t function;  // FreightGateFunction
  int32_t threads;
};

// out = x * function(logits), where each of `groups` equal parts of a row has one factor. One rounding, at the end.
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
  int64_t k_dim;  // with a decay of each channel, else 0: a and log_decay are [rows, heads, k_dim], dt_bias too; b is there
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

// out = (base + table[ids] * multiplier) * factor: the rows, each product and the sum are rounded to `format`. An id beyond
// the table is refused (FREIGHT_NO_SUCH_ROW) before anything is written.
FREIGHT_API FreightStatus freight_lookup(const FreightLookup* arguments);

// A mixture of experts.

enum FreightScoring : int32_t {
  FREIGHT_SOFTMAX = 0,  // over all experts
  FREIGHT_SIGMOID = 1,  // of each alone
  FREIGHT_CHOSEN = 2,   // softmax over the chosen ones
};

struct FreightRoute {
  const void *router, *x;           // FreightWeight [num_experts, hidden_size]; [rows, hidden_size] in `format`
  const float *bias, *choice_bias;  // [num_experts], or null: added to the logits; added to the scores for the choice
  const float* expert_scale;        // [num_experts], or null: multiplies the weights
  int32_t* ids;                     // [rows, top_k], ascending in a row
  float* weights;                   // [rows, top_k]
  int64_t rows;
  int32_t format, top_k, scoring, normed;  // scoring: FreightScoring; normed: 0 or 1
  int32_t num_groups, top_groups;          // of experts; experts are chosen among those of the top_groups best groups
  int32_t group_best;                      // 1 or 2: how many of a group's best scores are summed
  float factor;                            // multiplies the weights
  int32_t threads;
};

// The top_k experts of each row with the largest scores, of equal ones those with the lower ids, and their weights. The
// logits are those of freight_linear for the row in float32. A score that is NaN is larger than all others.
FREIGHT_API FreightStatus freight_route(const FreightRoute* arguments);

struct FreightExperts {
  const void *gate_up, *down;            // FreightWeight[num_experts]; all alike but for their data and scales
  const void *gate_up_bias, *down_bias;  // [num_experts, out_features], or null
  const void *x, *base;                  // [rows, hidden_size]; base may be null
  const int32_t* ids;                    // [rows, top_k], ascending in a row; one that is no expert's counts for nothing
  const float* weights;                  // [rows, top_k]
  void* out;                             // [rows, hidden_size]
  int64_t rows;
  int32_t num_experts, top_k;
  int32_t format;      // of x, base, the biases and out
  int32_t gated;       // 1: gate_up has the rows of gate, then of up; 0: those of up alone
  int32_t activation;  // FreightGatedActivation, or without a gate FreightUngated
  float limit;         // as in FreightGated
  int32_t threads;
};

// out = base + the sum over a row's experts of weight * down(activation(gate) * up), or of weight * down(activation(up));
// each product and the activation are rounded as those of freight_linear, freight_gated and freight_activated. The sum is
// float32, in the order of ids; one rounding, at the end.
FREIGHT_API FreightStatus freight_experts(const FreightExperts* arguments);

// Several calls at once.

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
};

struct FreightCall {
  const void* arguments;  // the struct that the function takes
  int32_t function;       // FreightFunction
};

// Make `count` calls in order, up to the first that fails: its status is returned, its number written into `failed`.
FREIGHT_API FreightStatus freight_replay(const FreightCall* calls, int64_t count, int64_t* failed);
