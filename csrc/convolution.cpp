// Causal convolutions over sequences, whose last inputs are stored in blocks.
//
// A task has some channels of all sequences, so that their weights are decoded once. Rows pass through a window of
// floats, whose first rows are the earlier inputs. Each sum adds its products in order, without fused multiply-adds, so
// a row has the bits of the reference, however the sequence is cut into calls.
#include <vector>

#include "parallel.h"
#include "rows.h"
#include "states.h"
#include "status.h"
#include "stretches.h"

namespace freight {
namespace {

constexpr int64_t kChannels = 128;  // channels of a task
constexpr int64_t kRows = 16;       // new rows of a window, after the earlier inputs
constexpr int kMaxBefore = FREIGHT_MAX_WIDTH - 1;

class Channels {
 public:
  Channels(const FreightConvolution& a, int64_t task)
      : a_(a), begin_(task * kChannels), count_(std::min(kChannels, a.channels - begin_)), before_(a.width - 1) {
    float values[kChannels * FREIGHT_MAX_WIDTH + kLanes];
    read_row(element(a.weight, begin_ * a.width, a.format), a.format, count_ * a.width, values);
    for (int j = 0; j < a.width; j++)
      for (int64_t i = 0; i < kChannels; i++) weight_[j][i] = i < count_ ? values[i * a.width + j] : 0.f;
    std::fill_n(bias_, kChannels, 0.f);
    if (a.bias) read_row(element(a.bias, begin_, a.format), a.format, count_, bias_);
  }

  void run(int64_t sequence) {
    bool first = true;
    for_stretches(a_, sequence, [&](const Stretch& part) {
      if (first) load_window(part);
      first = false;
      for (int64_t done = 0; done < part.count; done += kRows) rows(part.row + done, std::min(kRows, part.count - done));
      keep(part);
    });
  }

 private:
  const FreightConvolution& a_;
  int64_t begin_, count_, before_;  // before_: inputs that a row reads besides its own
  alignas(64) float weight_[FREIGHT_MAX_WIDTH][kChannels];
  alignas(64) float bias_[kChannels];
  alignas(64) float window_[kMaxBefore + kRows][kChannels];

  const char* input(int64_t row) const { return element(a_.x, row * a_.x_stride + begin_, a_.format); }
  char* column(int64_t block, int64_t position) const {
    return element(a_.columns, (block * a_.kept + position % a_.kept) * a_.channels + begin_, a_.format);
  }

  // Load the inputs before a sequence's first row, zeros where there are none.
  void load_window(const Stretch& part) {
    for (int64_t i = 0; i < before_; i++) {
      const int64_t position = part.position - before_ + i;
      if (position < 0)
        std::fill_n(window_[i], kChannels, 0.f);
      else
        read_row(column(part.source, position), a_.format, count_, window_[i]);
    }
  }

  // Compute up to kRows rows; afterwards the window begins with the inputs before the next row.
  void rows(int64_t first, int64_t count) {
    for (int64_t row = 0; row < count; row++) {
      read_row(input(first + row), a_.format, count_, window_[before_ + row]);
      char* out = element(a_.out, (first + row) * a_.channels + begin_, a_.format);
      for (int64_t i = 0; i < count_; i += kLanes) {
        V16 sum = load16(bias_ + i);
        for (int j = 0; j < a_.width; j++) sum = sum + load16(weight_[j] + i) * load16(window_[row + j] + i);
        if (a_.silu) sum = each([&](int lanes) { return silu(sum.v[lanes]); });
        store_as(element(out, i, a_.format), sum, a_.format, lanes_at(i, count_));
      }
    }
    std::memmove(window_[0], window_[count], static_cast<size_t>(before_) * sizeof window_[0]);
  }

  // Store the last inputs in the stretch's block, and those before the stretch: it may be taken back to its first row.
  void keep(const Stretch& part) const {
    const int64_t end = part.position + part.count;
    const size_t bytes = static_cast<size_t>(count_ * bytes_of(a_.format));
    const int64_t first = std::max<int64_t>({0, end - a_.kept, part.position - before_});
    for (int64_t position = first; position < end; position++) {
      if (position >= part.position)
        std::memcpy(column(part.target, position), input(part.row + position - part.position), bytes);
      else if (part.source != part.target)
        std::memcpy(column(part.target, position), column(part.source, position), bytes);
    }
  }
};

void convolve(const FreightConvolution& a) {
  const int64_t rows = a.query_starts[a.num_seqs] - a.query_starts[0];
  parallel_for((a.channels + kChannels - 1) / kChannels, threads_for(rows * a.channels, a.threads), [&](int64_t task) {
    Channels channels(a, task);
    for (int64_t sequence = 0; sequence < a.num_seqs; sequence++) channels.run(sequence);
  });
}

}  // namespace
}  // namespace freight

FREIGHT_API FreightStatus freight_convolution(const FreightConvolution* arguments) {
  if (!freight::contexts_hold_rows(*arguments)) return FREIGHT_SHORT_CONTEXT;
  return freight::status_of([&] { freight::convolve(*arguments); });
}
