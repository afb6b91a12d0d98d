// parallel_for: numbered tasks, shared out among threads one by one.
//
// Which thread takes which task is open, so a task must compute the same bits wherever it runs, and may not depend on
// how many threads there are. Threads come from the OpenMP runtime given to freight_init, else from a pool of our own.
#pragma once
#include <atomic>
#include <cstdint>

// Run body(data) on `threads` threads at once, this one included; returns when all have returned.
void run_on_threads(void (*body)(void*), void* data, int threads);

// Call body(task) for task 0 .. tasks-1, on at most `threads` threads.
template <class Body>
void parallel_for(int64_t tasks, int threads, const Body& body) {
  if (threads > tasks) threads = static_cast<int>(tasks);
  if (threads <= 1) {
    for (int64_t task = 0; task < tasks; task++) body(task);
    return;
  }
  struct Job {
    std::atomic<int64_t> next{0};
    int64_t tasks;
    const Body* body;
  } job;
  job.tasks = tasks;
  job.body = &body;
  run_on_threads(
      [](void* data) {
        Job& shared = *static_cast<Job*>(data);
        for (int64_t task; (task = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.tasks;)
          (*shared.body)(task);
      },
      &job, threads);
}
