// Several threads that call the kernels at once, each time with another number of threads: `make sanitize-threads`
// compiles this and csrc/ with ThreadSanitizer, which ends it at the first race.
//
// stress LIBRARY: the kernels take threads of their own (freight_init without OpenMP), because the sanitizer does not
// see how those of an OpenMP runtime wait for each other. Every result must have the bits of one thread alone. Then
// threads are ranks over one memory, with random delays: every gather must have the parts of its own turn, and every
// product the bits of one rank.
// stress LIBRARY TURNS: so many gathers, 100,000 unless given, and a hundredth of products.
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "../../csrc/attention.h"

namespace {

template <class Function>
Function* find(void* library, const char* name, Function*) {
  void* found = dlsym(library, name);
  if (!found) std::fprintf(stderr, "%s\n", dlerror()), std::exit(2);
  return reinterpret_cast<Function*>(found);
}
#define FIND(name) find(library, #name, static_cast<decltype(&name)>(nullptr))

using Bytes = std::vector<uint8_t>;

// Bytes from 0 to 63: numbers from 0 to 2 in every format of one or two bytes.
Bytes numbers(size_t bytes, uint32_t seed) {
  Bytes out(bytes);
  for (uint8_t& byte : out) seed = seed * 1664525 + 1013904223, byte = static_cast<uint8_t>((seed >> 24) % 64);
  return out;
}

void* aligned(Bytes& memory) {
  const size_t past = reinterpret_cast<uintptr_t>(memory.data()) % FREIGHT_CACHE_LINE;
  return memory.data() + (past ? FREIGHT_CACHE_LINE - past : 0);
}

// What one caller computes: the bytes that a number of threads gives.
using Work = std::function<Bytes(int threads)>;

void require(FreightStatus status) {
  if (status != FREIGHT_OK) std::fprintf(stderr, "a kernel returned status %d\n", status), std::exit(2);
}

std::vector<Work> linear_works(void* library) {
  const auto linear = FIND(freight_linear);
  const auto pack = FIND(freight_pack);
  const auto packed_bytes = FIND(freight_packed_bytes);
  constexpr int64_t out = 176, in = 520, groups = 5;
  std::vector<Work> works;
  for (int32_t format : {FREIGHT_BFLOAT16, FREIGHT_E4M3FN})
    for (int64_t rows : {1, 7, 70})
      for (bool blocks : {false, true}) {
        if (blocks && format != FREIGHT_E4M3FN) continue;
        works.push_back([=](int threads) {
          const Bytes data = numbers(out * in * 2, 1), x = numbers(rows * in * 2, 2);
          Bytes memory(packed_bytes(format, out, in) + FREIGHT_CACHE_LINE), y(rows * out * 2);
          std::vector<float> scale(out, 1.f), block_scale(2 * groups, 1.f);
          require(pack(data.data(), format, out, in, aligned(memory), scale.data(), threads));
          FreightWeight weight{};
          weight.data = aligned(memory), weight.scale = scale.data(), weight.format = format;
          weight.block_scale = blocks ? block_scale.data() : nullptr;
          weight.out_features = out, weight.in_features = in, weight.input_scale = 1.f;
          weight.activations = format == FREIGHT_E4M3FN ? FREIGHT_DYNAMIC : FREIGHT_PLAIN;
          FreightLinear a{};
          a.weight = &weight, a.x = x.data(), a.y = y.data(), a.rows = rows, a.format = FREIGHT_BFLOAT16;
          a.threads = threads;
          require(linear(&a));
          return y;
        });
      }
  return works;
}

std::vector<Work> attention_works(void* library) {
  const auto attention = FIND(freight_attention);
  constexpr int kv_heads = 2, heads = 4, dim = 64, block = 16, blocks = 72, keys = 1100;
  std::vector<Work> works;
  for (int32_t type : {FREIGHT_BFLOAT16, FREIGHT_FLOAT16})
    for (int32_t rows : {1, 40})
      works.push_back([=](int threads) {
        const Bytes q = numbers(rows * heads * dim * 2, 3), k = numbers(blocks * block * kv_heads * dim, 4);
        Bytes y(q.size());
        std::vector<int32_t> table(blocks);
        for (int i = 0; i < blocks; i++) table[i] = i;
        const int32_t starts[] = {0, rows};
        FreightAttention a{};
        a.q = q.data(), a.out = y.data(), a.block_tables = table.data();
        a.k.data = a.v.data = const_cast<uint8_t*>(k.data()), a.k.head = a.v.head = dim;
        a.k.token = a.v.token = kv_heads * dim, a.k.block = a.v.block = block * kv_heads * dim;
        a.query_starts = starts, a.context_lens = &keys, a.q_stride = heads * dim, a.q_type = type;
        a.kv_format = FREIGHT_E4M3FN, a.num_seqs = 1, a.max_blocks = blocks, a.num_heads = heads;
        a.num_kv_heads = kv_heads, a.k_dim = a.v_dim = dim, a.block_size = block, a.softmax_scale = .01f;
        a.threads = threads;
        require(attention(&a));
        return y;
      });
  return works;
}

std::vector<Work> row_works(void* library) {
  const auto norm = FIND(freight_add_rms_norm);
  const auto gated = FIND(freight_gated);
  const auto store = FIND(freight_rotate_store);
  const auto adapt = FIND(freight_add_adapters);
  constexpr int64_t rows = 70, size = 1024;
  constexpr int kv_heads = 4, dim = 64;
  const auto add_norm = [=](int threads) {
    const Bytes x = numbers(rows * size * 2, 5), weight = numbers(size * 2, 6);
    Bytes sum(x.size()), out(x.size());
    FreightNorm a{};
    a.x = a.delta = x.data(), a.weight = weight.data(), a.sum = sum.data(), a.out = out.data();
    a.rows = rows, a.size = size, a.format = a.weight_format = FREIGHT_BFLOAT16, a.eps = 1e-6f, a.threads = threads;
    require(norm(&a));
    return out;
  };
  const auto activate = [=](int threads) {
    const Bytes x = numbers(rows * size * 2, 7);
    Bytes out(x.size() / 2);
    FreightGated a{};
    a.gate_up = x.data(), a.out = out.data(), a.rows = rows, a.size = size / 2, a.format = FREIGHT_BFLOAT16;
    a.activation = FREIGHT_SILU, a.threads = threads;
    require(gated(&a));
    return out;
  };
  const auto rotate_store = [=](int threads) {
    const Bytes qkv = numbers(rows * 4 * kv_heads * dim * 2, 8);
    Bytes pages(2 * rows * kv_heads * dim), q(rows * 2 * kv_heads * dim * 2);
    const std::vector<float> angles(dim / 2, .5f);
    std::vector<uint16_t> scales(2 * rows * kv_heads);
    std::vector<int64_t> positions(rows), slots(rows), counters(2);
    for (int64_t i = 0; i < rows; i++) slots[i] = rows - 1 - i;
    FreightStore a{};
    a.qkv = qkv.data(), a.q = q.data(), a.scales = FREIGHT_TOKEN_SCALES;
    for (FreightPages* part : {&a.k, &a.v}) {
      const int64_t skipped = part == &a.k ? 0 : rows * kv_heads;
      part->data = pages.data() + skipped * dim, part->scale = scales.data() + skipped;
      part->head = dim, part->token = part->block = kv_heads * dim;
      part->scale_head = 2, part->scale_token = part->scale_block = 2 * kv_heads;
    }
    a.positions = positions.data(), a.slots = slots.data(), a.cos = a.sin = angles.data();
    a.counters = counters.data(), a.rows = rows, a.num_heads = 2 * kv_heads, a.num_kv_heads = a.num_v_heads = kv_heads;
    a.block_size = 1, a.k_dim = a.v_dim = a.rotary_dim = dim, a.type = FREIGHT_BFLOAT16, a.kv_format = FREIGHT_E4M3FN;
    a.threads = threads;
    require(store(&a));
    return pages;
  };
  const auto add_adapters = [=](int threads) {
    constexpr int slots = 3, parts = 2, max_rank = 20;
    const Bytes x = numbers(rows * size * 2, 9), a_rows = numbers(slots * parts * max_rank * size * 2, 10);
    const Bytes b_rows = numbers(slots * max_rank * size * 2, 11);
    const std::vector<int32_t> ranks{20, 7, 0, 16, 1, 3};
    const std::vector<float> scalings(slots * parts, .5f);
    const std::vector<int64_t> ends{700, size};
    std::vector<int32_t> adapters(rows);
    for (int64_t i = 0; i < rows; i++) adapters[i] = static_cast<int32_t>(i % (slots + 1)) - 1;
    Bytes y = numbers(rows * size * 2, 12);
    FreightAdapters a{};
    a.x = x.data(), a.a = a_rows.data(), a.b = b_rows.data(), a.y = y.data(), a.adapters = adapters.data();
    a.ranks = ranks.data(), a.scalings = scalings.data(), a.ends = ends.data();
    a.rows = rows, a.in_features = a.out_features = a.x_stride = size;
    a.num_slots = slots, a.num_parts = parts, a.max_rank = max_rank, a.format = FREIGHT_BFLOAT16, a.threads = threads;
    require(adapt(&a));
    return y;
  };
  return {add_norm, activate, rotate_store, add_adapters};
}

// What rank `rank` sends as byte `i` of gather `call`.
uint8_t sent(int rank, int64_t call, int64_t i) { return static_cast<uint8_t>(31 * rank + 7 * call + i * i); }

// `calls` gathers of rank `rank`, of sizes that all ranks choose alike; some are for one rank only.
void gather_as(void* library, FreightRanks ranks, int rank, int64_t calls) {
  const auto gather = FIND(freight_gather);
  ranks.rank = rank;
  uint32_t alike = 1, own = static_cast<uint32_t>(rank) + 2;
  const auto random = [](uint32_t& seed) { return seed = seed * 1664525 + 1013904223, seed >> 16; };
  for (int64_t call = 0; call < calls; call++) {
    const int64_t rows = random(alike) % 5 + 1, bytes = random(alike) % 40 + 1;  // some take two turns or more
    const int32_t only = random(alike) % 4 ? -1 : static_cast<int32_t>(random(alike)) % ranks.size;
    Bytes part(rows * bytes), out(rows * bytes * ranks.size);
    for (size_t i = 0; i < part.size(); i++) part[i] = sent(rank, call, static_cast<int64_t>(i));
    const uint32_t delay = random(own) % 64;
    if (delay == 0) usleep(20);
    for (volatile uint32_t wait = 0; wait < 20 * delay; wait = wait + 1) {
    }
    FreightGather a{};
    a.ranks = &ranks, a.part = part.data(), a.out = out.data(), a.rows = rows, a.part_bytes = bytes, a.only = only;
    a.threads = 1;
    require(gather(&a));
    if (only >= 0 && only != rank) continue;
    for (int64_t row = 0; row < rows; row++)
      for (int r = 0; r < ranks.size; r++)
        for (int64_t i = 0; i < bytes; i++)
          if (out[(row * ranks.size + r) * bytes + i] != sent(r, call, row * bytes + i))
            std::fprintf(stderr, "gather %ld: rank %d has other bytes of rank %d\n", static_cast<long>(call), rank, r),
                std::exit(1);
  }
}

// A matrix of 64 outputs for each of `size` ranks, packed by rows `first` .. `first` + `count` of it.
struct Matrix {
  static constexpr int64_t in = 768, each = 64;
  Bytes data, packed;
  std::vector<float> scale;
  FreightWeight weight{};

  Matrix(void* library, int64_t first, int64_t count) : data(numbers((first + count) * in, 9)), scale(count, 1.f) {
    packed.resize(FIND(freight_packed_bytes)(FREIGHT_E4M3FN, count, in) + FREIGHT_CACHE_LINE);
    require(FIND(freight_pack)(data.data() + first * in, FREIGHT_E4M3FN, count, in, aligned(packed), scale.data(), 1));
    weight.data = aligned(packed), weight.scale = scale.data(), weight.format = FREIGHT_E4M3FN;
    weight.out_features = count, weight.in_features = in, weight.input_scale = 1.f;
    weight.activations = FREIGHT_DYNAMIC;
  }
};

// `calls` products of which rank `rank` has some inputs and some outputs: they have the bits of the whole product.
void multiply_as(void* library, FreightRanks ranks, int rank, int64_t calls) {
  const auto multiply = FIND(freight_shared_linear);
  ranks.rank = rank;
  Matrix own(library, rank * Matrix::each, Matrix::each), whole(library, 0, ranks.size * Matrix::each);
  const int64_t part = Matrix::in / ranks.size, outputs = ranks.size * Matrix::each;
  uint32_t alike = 1, delay = static_cast<uint32_t>(rank) + 2;
  const auto random = [](uint32_t& seed) { return seed = seed * 1664525 + 1013904223, seed >> 16; };
  for (int64_t call = 0; call < calls; call++) {
    const int64_t rows = random(alike) % 50 + 1;
    const Bytes x = numbers(rows * Matrix::in * 2, random(alike));
    Bytes columns(rows * part * 2), y(rows * outputs * 2), expected(y.size());
    for (int64_t row = 0; row < rows; row++)
      std::memcpy(columns.data() + row * part * 2, x.data() + (row * Matrix::in + rank * part) * 2, part * 2);
    FreightLinear alone{};
    alone.weight = &whole.weight, alone.x = x.data(), alone.y = expected.data(), alone.rows = rows;
    alone.format = FREIGHT_BFLOAT16, alone.threads = 1;
    require(FIND(freight_linear)(&alone));
    if (random(delay) % 4 == 0) usleep(random(delay) % 200);
    FreightSharedLinear a{};
    a.ranks = &ranks, a.weight = &own.weight, a.x = columns.data(), a.y = y.data(), a.rows = rows;
    a.format = FREIGHT_BFLOAT16, a.threads = 2;
    require(multiply(&a));
    if (y != expected)
      std::fprintf(stderr, "product %ld of %ld rows: rank %d has other bits than one rank\n", static_cast<long>(call),
                   static_cast<long>(rows), rank),
          std::exit(1);
  }
}

// Run body(library, ranks, rank, calls) for each rank, on a thread of its own.
template <class Body>
void ranks_in_threads(const Body& body, void* library, int size, int64_t capacity, int64_t calls) {
  constexpr int64_t header = (FREIGHT_MAX_RANKS + 2) * FREIGHT_CACHE_LINE;
  Bytes memory(header + 2 * size * capacity + FREIGHT_CACHE_LINE);
  const std::vector<int32_t> alive(size, -1);
  FreightRanks ranks{};
  ranks.shared = aligned(memory), ranks.alive = alive.data(), ranks.capacity = capacity, ranks.timeout = 60'000;
  ranks.size = size;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; rank++) threads.emplace_back(body, library, ranks, rank, calls);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int count, char** arguments) {
#if defined(__x86_64__)
  syscall(158, 0x1023, 18);  // as library.py asks for the tiles of AMX, should the build use them
#endif
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 2;
  FIND(freight_init)(nullptr);
  std::vector<Work> works = linear_works(library);
  for (const auto& more : {attention_works(library), row_works(library)})
    works.insert(works.end(), more.begin(), more.end());
  std::vector<Bytes> expected;
  for (const Work& work : works) expected.push_back(work(1));
  std::vector<std::thread> callers;
  for (size_t caller = 0; caller < 3; caller++)
    callers.emplace_back([&, caller] {
      for (size_t i = 0; i < 2 * works.size(); i++) {
        const size_t which = (i + caller * works.size() / 3) % works.size();
        if (works[which](static_cast<int>((i + caller) % 4 + 1)) != expected[which])
          std::fprintf(stderr, "work %zu: the number of threads changes its bits\n", which), std::exit(1);
      }
    });
  for (std::thread& caller : callers) caller.join();
  std::printf("%zu kernel calls of three threads at once: no race, the same bits\n", 6 * works.size());
  const int64_t turns = count > 2 ? std::atol(arguments[2]) : 100'000;
  for (int size : {2, 3}) {
    const int64_t gathers = turns / 2, products = turns / 200;
    ranks_in_threads(gather_as, library, size, 128, gathers);
    std::printf("%ld gathers of %d ranks: no race, every part of its own turn\n", static_cast<long>(gathers), size);
    ranks_in_threads(multiply_as, library, size, 1 << 17, products);
    std::printf("%ld products of %d ranks: no race, the bits of one\n", static_cast<long>(products), size);
  }
}
