// The rows of recurrences in which each channel of a key has its own decay (KDA).
#include "recurrence_head.h"

namespace freight {

void recur_by_channel(const FreightRecurrence& a) { run_all_heads<true>(a); }

}  // namespace freight
