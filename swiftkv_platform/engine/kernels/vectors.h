// Helpers of all operators: vectors of numbers, aligned memory, and prefetching.

#pragma once

// Whether the processor multiplies and adds pairs of bfloat16 numbers, and quadruples of bytes, in one instruction.
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define HAS_DOT_PRODUCTS
#endif

#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <immintrin.h>

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
using Ints = at::vec::Vectorized<int32_t>;  // as many as Floats
#ifdef CPU_CAPABILITY_AVX512
using Register = __m512i;
using FloatRegister = __m512;  // for arrays, which the compiler does not always keep in registers as Floats
#else
using Register = __m256i;
using FloatRegister = __m256;
#endif

constexpr int64_t kFloats = Floats::size();
constexpr int64_t kHalves = Halves::size();
constexpr int64_t kGrain = 16384;  // min elements per thread
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int64_t kFetchedAhead = 4096;  // prefetch distance in bytes
constexpr int64_t kLineBytes = 64;       // bytes of a cache line

// The bits of a register as integers of another size, for the compiler's operators.
template <typename Number>
using Bits [[gnu::vector_size(sizeof(Register))]] = Number;

template <typename Number>
Bits<Number> as_bits(Ints x) {
  return reinterpret_cast<Bits<Number>>(static_cast<Register>(x));
}

template <typename Vector>
Ints as_ints(Vector bits) {
  return Ints(reinterpret_cast<Register>(bits));
}

// Memory aligned to cache lines. Tiles that cross cache lines take up to twice as long.
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

Halves round(Floats low, Floats high) {
#ifdef HAS_DOT_PRODUCTS
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
#else
  return at::vec::convert_float_bfloat16(low, high);
#endif
}

void store(BFloat16* to, Floats low, Floats high, int64_t count = kHalves) {
  round(low, high).store(to, count);
}

void store(float* to, Floats low, Floats high) {
  low.store(to);
  high.store(to + kFloats);
}

// Number of elements from i on that are in one vector.
int64_t rest(int64_t size, int64_t i) {
  return std::min(kHalves, size - i);
}

float sum(Floats x) {
  return at::vec::vec_reduce_all<float>([](Floats a, Floats b) { return a + b; }, x);
}

// The larger numbers; b where a is NaN.
Floats larger(Floats a, Floats b) {
  return at::vec::clamp_min(b, a);
}

float largest_in(Floats x) {
  return at::vec::vec_reduce_all<float>(larger, x);
}

int64_t rows_at_a_time(int64_t row_size) {
  return std::max<int64_t>(1, kGrain / row_size);
}

using Word [[gnu::may_alias]] = int32_t;  // two adjacent inputs in bfloat16, or four in 8 bits

void fetch(const void* before) {
  _mm_prefetch(static_cast<const char*>(before) + kFetchedAhead, _MM_HINT_T0);
}

struct NoPrefetch {
  void step() {}
};

// Prefetches weights while a block is multiplied, step by step, in one or several passes. A single pass prefetches what it needs
// soon. Of several, each prefetches its part of the next block: otherwise the first one would wait for memory, and the others
// would leave it idle.
class Prefetch {
 public:
  Prefetch(const void* first, int64_t block_bytes, int64_t step_bytes, int64_t pass = 0, int64_t num_passes = 1)
      : next_(static_cast<const char*>(first)) {
    const int64_t parts = std::min(num_passes, kMostParts);
    next_ += parts == 1 ? kFetchedAhead : block_bytes + pass * (block_bytes / parts);
    stride_ = pass < parts ? step_bytes / parts : 0;
  }

  void step() {
    for (int64_t i = 0; i < stride_; i += kLineBytes) _mm_prefetch(next_ + i, _MM_HINT_T0);
    next_ += stride_;
  }

  // Calls use(this), or use(NoPrefetch()) if all parts are prefetched by earlier passes.
  template <typename Use>
  void apply(const Use& use) const {
    stride_ ? use(*this) : use(NoPrefetch());
  }

 private:
  static constexpr int64_t kMostParts = 16;

  const char* next_;
  int64_t stride_;
};

}  // namespace
