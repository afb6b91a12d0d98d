// The threads of kernels: those of the process's OpenMP runtime if it has one, else those of a small pool.
//
// A second pool alongside torch's would compete with it for the cores, because after a parallel region OpenMP's workers
// spin for milliseconds. Calling GOMP_parallel, whose interface is stable, runs kernels on the same threads as torch,
// and needs no OpenMP compiler. The pool serves processes whose torch has no GOMP (macOS).
#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "freight.h"
#include "parallel.h"

namespace freight {
namespace {

FreightGompParallel gomp_parallel = nullptr;  // written by freight_init, before any kernel runs

// Processors by memory node; written by freight_bind, before any kernel runs. Threads that the caller created are left
// where they run; `calls_kernels` marks them.
#if defined(__linux__)
std::vector<cpu_set_t> nodes;
#endif
thread_local bool calls_kernels = false;

void bind_to_node([[maybe_unused]] int number) {
#if defined(__linux__)
  if (nodes.empty() || calls_kernels) return;
  const cpu_set_t& node = nodes[static_cast<size_t>(number) % nodes.size()];
  sched_setaffinity(0, sizeof node, &node);  // on refusal, the thread stays where it runs
#endif
}

class Pool {
 public:
  void run(void (*body)(void*), void* data, int threads) {
    std::lock_guard<std::mutex> one_at_a_time(turn_);
    while (static_cast<int>(workers_.size()) < threads - 1) {
      const int index = static_cast<int>(workers_.size());
      workers_.emplace_back([this, index, seen = generation_.load()] { work(index, seen); });
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = body, data_ = data, active_ = threads - 1;
      pending_.store(static_cast<int>(workers_.size()));
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    body(data);
    for (int spins = 0; pending_.load(std::memory_order_acquire) > 0; spins++)
      if (spins > kSpins) std::this_thread::yield();
  }

 private:
  static constexpr int kSpins = 20000;  // tens of microseconds, longer than the gap between two kernels

  void work(int index, uint64_t seen) {
    for (;;) {
      for (int spins = 0; generation_.load(std::memory_order_acquire) == seen && spins < kSpins; spins++) {
      }
      void (*body)(void*);
      void* data;
      bool active;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load() != seen; });
        seen = generation_.load();
        body = body_, data = data_, active = index < active_;
      }
      if (active) body(data);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> pending_{0};
  void (*body_)(void*) = nullptr;
  void* data_ = nullptr;
  int active_ = 0;
};

Pool* pool = nullptr;  // never destroyed: its workers wait until the process ends

Pool& own_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });  // a forked child does not have the threads
  });
  return *pool;
}

}  // namespace

void run_on_threads(void (*body)(void*), void* data, int threads) {
  calls_kernels = true;
  if (gomp_parallel)
    gomp_parallel(body, data, static_cast<unsigned>(threads), 0);
  else
    own_pool().run(body, data, threads);
}

int thread_number() {
  static std::atomic<int> count{0};
  static thread_local const int number = [] {
    const int own = count.fetch_add(1, std::memory_order_relaxed) & 0xFFFFFF;
    bind_to_node(own);
    return own;
  }();
  return number;
}

}  // namespace freight

FREIGHT_API void freight_init(FreightGompParallel parallel) { freight::gomp_parallel = parallel; }

FREIGHT_API void freight_bind([[maybe_unused]] const int32_t* node_of, [[maybe_unused]] int32_t processors,
                              [[maybe_unused]] int32_t nodes) {
#if defined(__linux__)
  cpu_set_t none;
  CPU_ZERO(&none);
  freight::nodes.assign(static_cast<size_t>(nodes), none);
  for (int32_t processor = 0; processor < processors && processor < CPU_SETSIZE; processor++)
    if (node_of[processor] >= 0) CPU_SET(processor, &freight::nodes[static_cast<size_t>(node_of[processor])]);
#endif
}

FREIGHT_API int32_t freight_abi() { return FREIGHT_ABI; }
