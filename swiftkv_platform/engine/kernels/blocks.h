// Sizes of blocks of packed weights, and of the parts of products.

#pragma once

#include <cstdint>
#include <utility>

namespace {

constexpr int64_t kColumns = 32;            // outputs per block of packed weights
constexpr int64_t kTogether = 2;            // blocks multiplied at once with few rows: two streams of memory
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

}  // namespace
