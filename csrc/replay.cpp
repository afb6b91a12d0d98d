// Replay of a sequence of calls, without a return to the caller in between.
#include "attention.h"
#include "states.h"

namespace {

FreightStatus run(const FreightCall& call) {
  switch (call.function) {
    case FREIGHT_LINEAR: return freight_linear(static_cast<const FreightLinear*>(call.arguments));
    case FREIGHT_ADD_RMS_NORM: return freight_add_rms_norm(static_cast<const FreightNorm*>(call.arguments));
    case FREIGHT_GATED: return freight_gated(static_cast<const FreightGated*>(call.arguments));
    case FREIGHT_ATTENTION: return freight_attention(static_cast<const FreightAttention*>(call.arguments));
    case FREIGHT_ROTATE_STORE: return freight_rotate_store(static_cast<const FreightStore*>(call.arguments));
    case FREIGHT_EXPERTS: return freight_experts(static_cast<const FreightExperts*>(call.arguments));
    case FREIGHT_ROUTE: return freight_route(static_cast<const FreightRoute*>(call.arguments));
    case FREIGHT_ADD_LAYER_NORM: return freight_add_layer_norm(static_cast<const FreightLayerNorm*>(call.arguments));
    case FREIGHT_ACTIVATED: return freight_activated(static_cast<const FreightActivated*>(call.arguments));
    case FREIGHT_GATE: return freight_gate(static_cast<const FreightGate*>(call.arguments));
    case FREIGHT_PART: return freight_part(static_cast<const FreightPart*>(call.arguments));
    case FREIGHT_DECAYS: return freight_decays(static_cast<const FreightDecays*>(call.arguments));
    case FREIGHT_GATED_NORM: return freight_gated_norm(static_cast<const FreightGatedNorm*>(call.arguments));
    case FREIGHT_CONVOLUTION: return freight_convolution(static_cast<const FreightConvolution*>(call.arguments));
    case FREIGHT_RECURRENCE: return freight_recurrence(static_cast<const FreightRecurrence*>(call.arguments));
    case FREIGHT_LOOKUP: return freight_lookup(static_cast<const FreightLookup*>(call.arguments));
    case FREIGHT_BY_HEAD: return freight_by_head(static_cast<const FreightByHead*>(call.arguments));
    case FREIGHT_GATHER: return freight_gather(static_cast<const FreightGather*>(call.arguments));
    case FREIGHT_SHARED_LINEAR: return freight_shared_linear(static_cast<const FreightSharedLinear*>(call.arguments));
    case FREIGHT_BLOCK_ROWS: return freight_block_rows(static_cast<const FreightBlockRows*>(call.arguments));
    case FREIGHT_ADD_ADAPTERS: return freight_add_adapters(static_cast<const FreightAdapters*>(call.arguments));
    default: return FREIGHT_FAILED;
  }
}

}  // namespace

FREIGHT_API FreightStatus freight_replay(const FreightCall* calls, int64_t count, int64_t* failed) {
  for (int64_t i = 0; i < count; i++)
    if (const FreightStatus status = run(calls[i])) {
      *failed = i;
      return status;
    }
  return FREIGHT_OK;
}
