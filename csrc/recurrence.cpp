// Linear attention with a decay (gated delta nets, KDA, Mamba-2), whose state is rounded where a tile of 16 positions
// begins.
//
// A task is one head of one sequence: its rows tile by tile, in float32. A row is computed from the stored S at its
// tile's start and from the stored rows of its tile, in one order of sums, so its bits do not depend on how rows are
// cut into calls. Heads that share a key head share its kept rows, and may still read those of a tile that this call
// overwrites. So kept keys are written only after all tasks have ended.
#include "recurrence_head.h"
#include "status.h"

namespace freight {
namespace {

// Store the keys of the last tile of each block's rows.
void keep_keys(const FreightRecurrence& a, int64_t sequence, int64_t key_head, float* key) {
  for_stretches(a, sequence, [&](const Stretch& part) {
    const int64_t last = part.position + part.count - 1, begin = std::max(part.position, last - last % kStateTile);
    for (int64_t position = begin; position <= last; position++) {
      read_key(a, part.row + position - part.position, key_head, key);
      const int64_t row = part.target * kStateTile + position % kStateTile;
      write_row(key, a.format, a.k_dim, element(a.kept_k, (row * a.key_heads + key_head) * a.k_dim, a.format));
    }
  });
}

void recurrence(const FreightRecurrence& a) {
  a.by_channel ? recur_by_channel(a) : run_all_heads<false>(a);
  const int64_t keys = int64_t{a.num_seqs} * a.key_heads;
  parallel_for(keys, threads_for(keys * a.k_dim, a.threads), [&](int64_t task) {
    keep_keys(a, task / a.key_heads, task % a.key_heads, Room(a.k_dim, a.v_dim, false).k.data);
  });
}

}  // namespace
}  // namespace freight

FREIGHT_API FreightStatus freight_recurrence(const FreightRecurrence* arguments) {
  if (!freight::contexts_hold_rows(*arguments)) return FREIGHT_SHORT_CONTEXT;
  return freight::status_of([&] { freight::recurrence(*arguments); });
}
