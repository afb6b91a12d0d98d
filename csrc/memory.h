// Working memory of a thread: it grows and is kept. Large sizes use large pages.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

namespace freight {

class WorkingMemory {
 public:
  // Return `bytes` bytes, aligned to a cache line; earlier contents are lost. Throws std::bad_alloc.
  uint8_t* of(int64_t bytes) {
    constexpr size_t kLine = 64, kPage = 1 << 21;
    const size_t wanted = static_cast<size_t>(bytes), unit = wanted < kPage / 2 ? kLine : kPage;
    const size_t size = (wanted + unit - 1) / unit * unit;
    if (size <= size_) return memory_;
    std::free(memory_);
    size_ = 0;
    memory_ = static_cast<uint8_t*>(std::aligned_alloc(unit, size));
    if (!memory_) throw std::bad_alloc();
    size_ = size;
#ifdef MADV_HUGEPAGE
    if (unit == kPage) madvise(memory_, size, MADV_HUGEPAGE);
#endif
    return memory_;
  }
  WorkingMemory() = default;
  ~WorkingMemory() { std::free(memory_); }
  WorkingMemory(const WorkingMemory&) = delete;
  WorkingMemory& operator=(const WorkingMemory&) = delete;

 private:
  uint8_t* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace freight
