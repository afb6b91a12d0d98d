// driver LIBRARY: calls functions of a shared library for another process, one request on stdin after another.
//
// So the tests reach kernels that were compiled for another processor: this runs in an emulator, remote.py sends it the
// memory that a call refers to and takes back what the call left there. All numbers are uint64, native byte order:
//   request: name, 32 bytes; counts of arguments, regions and pointers; arguments (is it an address, value); regions
//            (address, bytes); addresses of pointers inside regions; the regions' contents
//   answer:  the returned integer; the regions' contents
// Every region ends, but for its alignment to 64 bytes, before a page that cannot be read.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr uint64_t kPage = 4096, kAlignment = 64;

[[noreturn]] void fail(const char* why, const char* what) {
  std::fprintf(stderr, "driver: %s: %s\n", why, what);
  std::exit(1);
}

void receive(void* to, size_t bytes) {
  if (std::fread(to, 1, bytes, stdin) != bytes) std::exit(0);  // no more requests
}

std::vector<uint64_t> receive_numbers(uint64_t count) {
  std::vector<uint64_t> numbers(count);
  receive(numbers.data(), count * 8);
  return numbers;
}

struct Region {
  uint64_t address, bytes;  // in the other process
  char *mapping, *memory;
  uint64_t mapped;

  Region(uint64_t address, uint64_t bytes) : address(address), bytes(bytes) {
    const uint64_t used = (bytes + kAlignment + kPage - 1) / kPage * kPage;
    mapped = used + kPage;
    void* at = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) fail("no memory", "mmap");
    mapping = static_cast<char*>(at);
    mprotect(mapping + used, kPage, PROT_NONE);
    const uint64_t latest = used - bytes;  // the latest place that is aligned as the other process has it
    memory = mapping + latest - (latest - address) % kAlignment;
  }
  ~Region() { munmap(mapping, mapped); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
};

struct Memory {
  std::vector<Region*> regions;

  ~Memory() {
    for (Region* region : regions) delete region;
  }
  uint64_t local(uint64_t address) const {
    if (!address) return 0;
    for (const Region* region : regions)
      if (address - region->address < region->bytes)
        return reinterpret_cast<uint64_t>(region->memory + (address - region->address));
    fail("an address in no region", "request");
  }
};

void serve(void* library) {
  char name[32];
  receive(name, sizeof name);
  const auto counts = receive_numbers(3);
  const auto arguments = receive_numbers(2 * counts[0]), places = receive_numbers(2 * counts[1]);
  const auto pointers = receive_numbers(counts[2]);
  Memory memory;
  for (uint64_t i = 0; i < counts[1]; i++) {
    memory.regions.push_back(new Region(places[2 * i], places[2 * i + 1]));
    receive(memory.regions.back()->memory, places[2 * i + 1]);
  }
  for (const uint64_t pointer : pointers) {
    char* at = reinterpret_cast<char*>(memory.local(pointer));
    uint64_t target;
    std::memcpy(&target, at, 8);
    target = memory.local(target);
    std::memcpy(at, &target, 8);
  }
  uint64_t a[8] = {};
  if (counts[0] > 8) fail("too many arguments", name);
  for (uint64_t i = 0; i < counts[0]; i++)
    a[i] = arguments[2 * i] ? memory.local(arguments[2 * i + 1]) : arguments[2 * i + 1];
  void* function = dlsym(library, name);
  if (!function) fail("no such function", name);
  // AAPCS64 passes integers and pointers in x0 to x7, whatever their width.
  using Call = uint64_t (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
  const uint64_t result = reinterpret_cast<Call>(function)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
  std::fwrite(&result, 8, 1, stdout);
  for (const Region* region : memory.regions) std::fwrite(region->memory, 1, region->bytes, stdout);
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) fail("usage", "driver LIBRARY");
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) fail("cannot load", dlerror());
  for (;;) serve(library);
}
