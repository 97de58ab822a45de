// Sizes of blocks of packed weights, and of the parts of products.

#pragma once

#include <cstdint>
#include <utility>

namespace {

constexpr int64_t kColumns = 32;            // outputs per block of packed weights
constexpr int64_t kRowStep = 16;            // products have a multiple of this many rows: one kernel each
constexpr int64_t kCachedBytes = 1 << 19;   // bytes of inputs that stay in the L2 cache together with a block of weights
constexpr int64_t kMinCachedRows = 64;      // min rows that are multiplied by a block, even if they exceed that

// Calls use.operator()<count>() for a count of 1 to kMost.
template <int kMost, typename Use>
void with_count(int64_t count, const Use& use) {
  [&]<int... kLess>(std::integer_sequence<int, kLess...>) {
    ((count == kLess + 1 ? use.template operator()<kLess + 1>() : void()), ...);
  }(std::make_integer_sequence<int, kMost>());
}

// Calls use.operator()<rows>(first row, part, number of parts) for all rows, in parts of at most kMost rows of about the same
// size.
template <int kMost, typename Use>
void divide_evenly(int64_t num_rows, const Use& use) {
  const int64_t parts = (num_rows + kMost - 1) / kMost;
  for (int64_t row = 0, part = 0; part < parts; ++part) {
    const int64_t count = (num_rows - row + parts - part - 1) / (parts - part);
    with_count<kMost>(count, [&]<int kRows>() { use.template operator()<kRows>(row, part, parts); });
    row += count;
  }
}

}  // namespace
