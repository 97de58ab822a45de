// What all operators are made of: vectors of numbers, and memory that is asked for ahead.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <tuple>
#include <vector>

namespace {

using at::BFloat16;
using at::Tensor;
using Floats = at::vec::Vectorized<float>;
using Halves = at::vec::Vectorized<BFloat16>;

constexpr int64_t kFloats = Floats::size();
constexpr int64_t kHalves = Halves::size();
constexpr int64_t kGrain = 16384;  // elements that are worth a thread
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int64_t kRowStep = 16;         // rows of a product are a multiple of this: each shape is a kernel of its own
constexpr int64_t kFetchedAhead = 4096;  // bytes between the numbers in use and those that memory is asked for
constexpr int64_t kFetchedAheadInTurn = 1024;  // the same where several places are read in turn

// Memory that begins where a cache line does: tiles of numbers that cross lines take up to twice as long.
template <typename Number>
struct Aligned {
  using value_type = Number;
  static constexpr std::align_val_t kLine{64};

  Number* allocate(size_t count) { return static_cast<Number*>(::operator new(count * sizeof(Number), kLine)); }
  void deallocate(Number* numbers, size_t) { ::operator delete(numbers, kLine); }
  friend bool operator==(Aligned, Aligned) { return true; }
};

template <typename Number>
using Numbers = std::vector<Number, Aligned<Number>>;

std::tuple<Floats, Floats> load(const BFloat16* from, int64_t count = kHalves) {
  return at::vec::convert_bfloat16_float(count < kHalves ? Halves::loadu(from, count) : Halves::loadu(from));
}

void store(BFloat16* to, Floats low, Floats high, int64_t count = kHalves) {
  Halves(reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low))).store(to, count);
}

// How many of the numbers from i on fit into one vector.
int64_t rest(int64_t size, int64_t i) {
  return std::min(kHalves, size - i);
}

float sum(Floats x) {
  return at::vec::vec_reduce_all<float>([](Floats a, Floats b) { return a + b; }, x);
}

int64_t rows_at_a_time(int64_t row_size) {
  return std::max<int64_t>(1, kGrain / row_size);
}

using Word [[gnu::may_alias]] = int32_t;  // two neighbouring inputs in bfloat16, or four in 8 bits

template <typename Number>
__m512i broadcast(const Number* from) {
  return _mm512_set1_epi32(*reinterpret_cast<const Word*>(from));
}

// `kPlaces`: places that are read in turn.
template <int kPlaces = 1>
void fetch(const void* before) {
  _mm_prefetch(static_cast<const char*>(before) + (kPlaces > 1 ? kFetchedAheadInTurn : kFetchedAhead), _MM_HINT_T0);
}

}  // namespace
