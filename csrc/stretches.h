// Stretches: the rows of a sequence that fall into one block of states, as src/freight/operands/states.py defines them.
#pragma once
#include <algorithm>
#include <cstdint>

namespace freight {

struct Stretch {
  int64_t row, count;  // of the batch
  int64_t position;    // of the first row in its sequence
  int64_t source;      // the block with the state before the first row; -1: the sequence begins here
  int64_t target;      // the block for the state after the last row
};

// The number of a sequence's rows in this call, and the position of the first of them. `Call` has the lengths and
// tables.
template <class Call>
int64_t rows_of(const Call& a, int64_t sequence) {
  return a.query_starts[sequence + 1] - a.query_starts[sequence];
}
template <class Call>
int64_t first_position(const Call& a, int64_t sequence) {
  return a.context_lens[sequence] - rows_of(a, sequence);
}

template <class Call>
bool contexts_hold_rows(const Call& a) {
  for (int64_t sequence = 0; sequence < a.num_seqs; sequence++)
    if (first_position(a, sequence) < 0) return false;
  return true;
}

// Call visit(Stretch) for the stretches of a sequence, in the order in which they must be computed.
template <class Call, class Visit>
void for_stretches(const Call& a, int64_t sequence, const Visit& visit) {
  const int32_t* table = a.block_tables + sequence * a.max_blocks;
  int64_t row = a.query_starts[sequence], position = first_position(a, sequence);
  const int64_t end = a.query_starts[sequence + 1];
  int64_t source = position > 0 ? table[(position - 1) / a.every] : -1;
  while (row < end) {
    const int64_t block = position / a.every, count = std::min((block + 1) * a.every - position, end - row);
    visit(Stretch{row, count, position, source, table[block]});
    row += count, position += count, source = table[block];
  }
}

// The same with each stretch cut at multiples of `tile` positions; only its first part has the stretch's source.
template <class Call, class Visit>
void for_tiles(const Call& a, int64_t sequence, int64_t tile, const Visit& visit) {
  for_stretches(a, sequence, [&](Stretch part) {
    for (int64_t left = part.count; left > 0; left -= part.count) {
      part.count = std::min(tile - part.position % tile, left);
      visit(part);
      part.row += part.count, part.position += part.count, part.source = part.target;
    }
  });
}

}  // namespace freight
