// Ranks: processes that each compute some columns of a model's activations, and gather them over shared memory. Between
// machines a function of the caller gathers instead (`FreightRanks.exchange`); the rest of this file is about one machine.
//
// Turns. A gather is one turn, or several if a part is larger than a slot, which may be less than one row; every rank
// takes the same turns in the same order. In turn t a rank writes its part into slot t % 2 and then says so in `arrived`; it reads another rank's
// part once that rank has arrived. It writes a slot again only when all have arrived at turn t - 1, that is, when all
// have read turn t - 2. So two slots are enough, and a rank is at most one turn ahead.
//
// Waiting. Ranks on cores of their own arrive within microseconds of each other, so a rank first spins. Then it yields:
// on a busy machine the other rank may need this core. Every few milliseconds it looks whether the others live, which a
// hang-up of their pipes shows at once, however they ended. `lost` is set once and stays; `failed` says that a rank has
// left its step, and is cleared by rank 0 when all have left it.
#include <poll.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "freight.h"
#include "parallel.h"
#include "ranks.h"
#include "status.h"

namespace freight {
namespace {

struct alignas(FREIGHT_CACHE_LINE) Line {
  std::atomic<uint64_t> value;
};

// At the start of the shared memory; slots follow it. Python reads and resets it while no rank computes.
struct Shared {
  Line arrived[FREIGHT_MAX_RANKS];  // turns that each rank has written
  Line lost;                        // 0, or 1 + the rank that has ended; + FREIGHT_MAX_RANKS: it does not answer
  Line failed;                      // 0, or 1 + the rank that has left its step
};
static_assert(sizeof(Shared) == FREIGHT_CACHE_LINE * (FREIGHT_MAX_RANKS + 2), "");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock would belong to one process");

constexpr int kSpins = 2000;                    // about 50 microseconds
constexpr int64_t kLook = 5'000'000;            // nanoseconds between looks whether the others live
constexpr int64_t kLong = 100'000'000;          // nanoseconds after which a rank sleeps between looks
constexpr int64_t kTurn = 4 << 20;              // most bytes of a rank that a turn of a gather copies: they stay in L3
constexpr int64_t kTask = 128 << 10;            // bytes that one task copies
constexpr int64_t kManyBytes = 2 * kTask;       // a gather of less is copied by the calling thread

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void set_once(std::atomic<uint64_t>& value, uint64_t to) {
  uint64_t none = 0;
  value.compare_exchange_strong(none, to);
}

// The status of the ranks while `other` is waited for, which began `waited` nanoseconds ago.
FreightStatus look(const FreightRanks& ranks, Shared& shared, int other, int64_t waited) {
  pollfd ends[FREIGHT_MAX_RANKS];
  for (int r = 0; r < ranks.size; r++) ends[r] = {ranks.alive[r], 0, 0};  // a negative one is ignored
  if (poll(ends, static_cast<nfds_t>(ranks.size), 0) > 0)
    for (int r = 0; r < ranks.size; r++)
      if (ends[r].revents) set_once(shared.lost.value, static_cast<uint64_t>(r) + 1);
  if (waited > ranks.timeout * 1'000'000)
    set_once(shared.lost.value, static_cast<uint64_t>(FREIGHT_MAX_RANKS + other) + 1);
  if (shared.lost.value.load()) return FREIGHT_RANK_LOST;
  return shared.failed.value.load() ? FREIGHT_RANK_FAILED : FREIGHT_OK;
}

// Wait until rank `other` has arrived at `turn`.
FreightStatus wait_for(const FreightRanks& ranks, Shared& shared, int other, uint64_t turn) {
  const std::atomic<uint64_t>& arrived = shared.arrived[other].value;
  for (int spins = 0; spins < kSpins; spins++) {
    if (arrived.load(std::memory_order_acquire) >= turn) return FREIGHT_OK;
    relax();
  }
  const int64_t begin = now();
  for (int64_t looked = begin;;) {
    if (arrived.load(std::memory_order_acquire) >= turn) return FREIGHT_OK;
    const int64_t time = now();
    if (time - looked < kLook) {
      if (time - begin > kLong)
        usleep(200);
      else
        sched_yield();
      continue;
    }
    looked = time;
    if (const FreightStatus status = look(ranks, shared, other, time - begin)) return status;
  }
}

// Call copy(begin, end) for all of `rows` rows of `bytes` bytes, by all threads if they are many.
template <class Copy>
void copy_rows(int64_t rows, int64_t bytes, int threads, const Copy& copy) {
  const int64_t per_task = bytes > kTask ? 1 : kTask / bytes;
  const int64_t tasks = rows * bytes > kManyBytes ? (rows + per_task - 1) / per_task : 1;
  parallel_for(tasks, threads, [&](int64_t task) {
    copy(task * per_task, tasks == 1 ? rows : std::min(rows, (task + 1) * per_task));
  });
}

// A turn: `rows` rows of each rank, or `bytes` of one row, which fit into a slot.
FreightStatus take_turn(const FreightGather& a, const FreightRanks& ranks, const uint8_t* part, uint8_t* out,
                        int64_t rows, int64_t bytes) {
  const Turn turn(ranks);
  if (const FreightStatus status = turn.begin()) return status;
  uint8_t* own = turn.part(ranks.rank);
  copy_rows(rows, bytes, a.threads, [&](int64_t begin, int64_t end) {
    std::memcpy(own + begin * bytes, part + begin * bytes, static_cast<size_t>((end - begin) * bytes));
  });
  turn.arrive();
  if (a.only >= 0 && a.only != ranks.rank) return FREIGHT_OK;
  return turn.read(out, rows, bytes, a.part_bytes, a.threads);
}

}  // namespace

Turn::Turn(const FreightRanks& ranks)
    : ranks_(ranks),
      number_(static_cast<Shared*>(ranks.shared)->arrived[ranks.rank].value.load(std::memory_order_relaxed) + 1),
      memory_(reinterpret_cast<uint8_t*>(static_cast<Shared*>(ranks.shared) + 1) +
              static_cast<int64_t>(number_ & 1) * ranks.size * ranks.capacity) {}

FreightStatus Turn::begin() const {
  for (int r = 0; r < ranks_.size; r++)
    if (const FreightStatus status = wait_for(ranks_, *static_cast<Shared*>(ranks_.shared), r, number_ - 1)) return status;
  return FREIGHT_OK;
}

void Turn::arrive() const {
  static_cast<Shared*>(ranks_.shared)->arrived[ranks_.rank].value.store(number_, std::memory_order_release);
}

FreightStatus Turn::wait(int other) const {
  return wait_for(ranks_, *static_cast<Shared*>(ranks_.shared), other, number_);
}

FreightStatus Turn::wait_for_all() const {
  for (int r = 0; r < ranks_.size; r++)
    if (const FreightStatus status = wait(r)) return status;
  return FREIGHT_OK;
}

FreightStatus Turn::read(uint8_t* out, int64_t rows, int64_t bytes, int64_t part_bytes, int threads) const {
  const int64_t row = part_bytes * ranks_.size;
  for (int step = 0; step < ranks_.size; step++) {  // its own part is there already
    const int r = (ranks_.rank + step) % ranks_.size;
    if (const FreightStatus status = wait(r)) return status;
    const uint8_t* from = part(r);
    copy_rows(rows, bytes, threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        std::memcpy(out + i * row + r * part_bytes, from + i * bytes, static_cast<size_t>(bytes));
    });
  }
  return FREIGHT_OK;
}

}  // namespace freight

FREIGHT_API FreightStatus freight_gather(const FreightGather* arguments) {
  using namespace freight;
  const FreightGather& a = *arguments;
  const FreightRanks& ranks = *static_cast<const FreightRanks*>(a.ranks);
  if (ranks.exchange) {
    int32_t said = FREIGHT_INTERRUPTED;
    ranks.exchange(a.part, a.out, a.rows, a.part_bytes, &said);
    return static_cast<FreightStatus>(said);
  }
  const int64_t capacity = std::min(ranks.capacity, kTurn);
  const int64_t most = std::max<int64_t>(1, capacity / a.part_bytes);  // rows of a turn
  FreightStatus status = FREIGHT_OK;
  const FreightStatus thrown = status_of([&] {
    for (int64_t first = 0; first < a.rows && !status; first += most) {
      const uint8_t* part = static_cast<const uint8_t*>(a.part) + first * a.part_bytes;
      uint8_t* out = static_cast<uint8_t*>(a.out) + first * a.part_bytes * ranks.size;
      const int64_t rows = std::min(most, a.rows - first);
      for (int64_t at = 0; at < a.part_bytes && !status; at += capacity)  // a single turn, but of a long row
        status = take_turn(a, ranks, part + at, out + at, rows, std::min(capacity, a.part_bytes - at));
    }
  });
  return status ? status : thrown;
}
