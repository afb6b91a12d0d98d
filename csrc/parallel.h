// parallel_for: numbered tasks, distributed over threads.
//
// Each thread has a range of tasks, the same in every call with this number of threads, and runs it in order. So what
// it reads is one stream of memory, which is in that core's caches or on its memory node if an earlier call has read or
// first written it. A thread that has finished its range steals from the ends of others. It is therefore undetermined
// which thread runs a task, so a task must compute the same bits on every thread, and for any number of threads.
// Threads come from the OpenMP runtime given to freight_init, else from a pool; freight_bind keeps them on memory
// nodes. A task may throw std::bad_alloc.
#pragma once
#include <atomic>
#include <cstdint>
#include <new>

namespace freight {

// Run body(data) on `threads` threads at once, this one included; returns when all have returned.
void run_on_threads(void (*body)(void*), void* data, int threads);

// The calling thread's number: 0, 1, ... in the order in which threads first called this. Pools keep their threads.
int thread_number();

// The remaining tasks of a range: the first in the low half, the end in the high half.
class TaskRange {
 public:
  void set(int64_t first, int64_t end) { left_.store(static_cast<uint64_t>(end) << 32 | static_cast<uint64_t>(first)); }

  // Remove and return the first or the last task, or return -1 if none is left.
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
// task did, after all threads have returned.
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
        const int own = thread_number() % shared.count;  // two threads may share a range and split it
        try {  // an exception that leaves the region would terminate the process
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
