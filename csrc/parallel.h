// parallel_for: numbered tasks, distributed over threads.
//
// Each thread starts on a range of its own, the same one in every call with as many threads, and goes through it in
// order: what its tasks read is one stream of memory, which lies in that core's caches or on its memory node if an earlier
// call has read or first written it. A thread that has finished steals from the ends of other ranges. Which thread runs which task is undetermined,
// so a task must compute the same bits wherever it runs, and may not depend on the number of threads. Threads come from
// the OpenMP runtime given to freight_init, else from a pool of our own; freight_bind keeps them on memory nodes. A task may throw std::bad_alloc.
#pragma once
#include <atomic>
#include <cstdint>
#include <new>

namespace freight {

// Run body(data) on `threads` threads at once, this one included; returns when all have returned.
void run_on_threads(void (*body)(void*), void* data, int threads);

// The calling thread's number: 0, 1, ... in the order in which threads first asked. Pools keep their threads.
int thread_number();

// The tasks that are left of a range: the first in the low half, the end in the high half.
class TaskRange {
 public:
  void set(int64_t first, int64_t end) { left_.store(static_cast<uint64_t>(end) << 32 | static_cast<uint64_t>(first)); }

  // The first or the last task, which is the caller's from then on; -1 when none is left.
  int64_t take(bool first) {
    uint64_t left = left_.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t next = left & 0xFFFFFFFFu, end = left >> 32;
      if (next >= end) return -1;
      if (left_.compare_exchange_weak(left, first ? left + 1 : left - (uint64_t{1} << 32), std::memory_order_relaxed))
        return static_cast<int64_t>(first ? next : end - 1);
    }
  }

 private:
  alignas(64) std::atomic<uint64_t> left_{0};
};

// Call body(task) for task 0 .. tasks-1, on at most `threads` threads; fewer than 2^32 tasks. Throws std::bad_alloc if a
// task did; all threads have returned then.
template <class Body>
void parallel_for(int64_t tasks, int threads, const Body& body) {
  constexpr int kRanges = 64;
  if (threads > tasks) threads = static_cast<int>(tasks);
  if (threads <= 1) {
    for (int64_t task = 0; task < tasks; task++) body(task);
    return;
  }
  struct Job {
    TaskRange ranges[kRanges];
    std::atomic<bool> failed{false};
    int count;
    const Body* body;
  } job;
  job.count = threads < kRanges ? threads : kRanges;
  job.body = &body;
  for (int i = 0; i < job.count; i++) job.ranges[i].set(tasks * i / job.count, tasks * (i + 1) / job.count);
  run_on_threads(
      [](void* data) {
        Job& shared = *static_cast<Job*>(data);
        const int own = thread_number() % shared.count;  // two threads may share one and split it
        try {  // an exception that left the region would end the process
          for (int i = 0; i < shared.count; i++) {
            TaskRange& range = shared.ranges[(own + i) % shared.count];
            for (int64_t task; (task = range.take(i == 0)) >= 0;) (*shared.body)(task);
          }
        } catch (...) {
          shared.failed.store(true, std::memory_order_relaxed);
        }
      },
      &job, threads);
  if (job.failed.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

}  // namespace freight
