// Turns of ranks over shared memory, as ranks.cpp describes them.
#pragma once
#include "freight.h"

namespace freight {

// The turn after the last one that this rank has taken. The rank begins it, writes, arrives, and reads what the others
// have written once they have arrived. It may read until it arrives at the next turn.
class Turn {
 public:
  explicit Turn(const FreightRanks& ranks);

  // Wait until the memory of this turn may be written.
  FreightStatus begin() const;
  // Say that this rank has written.
  void arrive() const;
  // Wait until rank `other` has written.
  FreightStatus wait(int other) const;
  FreightStatus wait_for_all() const;

  // The memory of all ranks, [size][capacity] bytes, which they may divide in another way.
  uint8_t* memory() const { return memory_; }
  // The part of a rank, [capacity] bytes.
  uint8_t* part(int rank) const { return memory_ + rank * ranks_.capacity; }

  // Put `bytes` bytes of each row of all parts, [rows, bytes], side by side: to out[rows][size], `part_bytes` apart.
  FreightStatus read(uint8_t* out, int64_t rows, int64_t bytes, int64_t part_bytes, int threads) const;

 private:
  const FreightRanks& ranks_;
  const uint64_t number_;
  uint8_t* const memory_;
};

}  // namespace freight
