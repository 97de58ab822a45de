// Blocks of packed weights and rows that are multiplied by them; weights in bfloat16.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>

#include <utility>

#include "vectors.h"

namespace {

constexpr int64_t kColumns = 32;            // outputs of a block of packed weights
constexpr int64_t kFewRows = 32;            // products of this many rows, or fewer, are multiplied as the weights come
constexpr int64_t kFewRowsBesideTiles = 4;  // the same where the processor has units for tiles of matrices (AMX)
constexpr int64_t kFewRowsWidened = 8;      // and there in int4, which is widened for tiles
constexpr int64_t kSmallRowStep = 4;        // rows that kRowStep leaves are a multiple of this, beside tiles
constexpr int64_t kCachedBytes = 1 << 19;   // inputs that stay in the second-level cache beside a block of weights
constexpr int64_t kMinCachedRows = 64;      // rows that share a block of weights even if they do not

bool has_tiles() {
  static const bool has = __builtin_cpu_supports("amx-tile");
  return has;
}

// Divides rows: product(first row, number of rows) takes them as brgemm has kernels for, few.operator()<rows>(first row) at
// most kMost at a time, as the weights come. `few_beside_tiles`: up to which number all are few, where there are tiles.
template <int kMost, typename Product, typename Few>
void divide_rows(int64_t num_rows, int64_t few_beside_tiles, const Product& product, const Few& few) {
  int64_t row = 0;
  if (num_rows > (has_tiles() ? few_beside_tiles : kFewRows)) {
    if (num_rows >= kRowStep) product(0, row = num_rows / kRowStep * kRowStep);
    const int64_t left = (num_rows - row) / kSmallRowStep * kSmallRowStep;
    if (has_tiles() && left) product(row, left), row += left;
  }
  const auto call = [&]<int... kLess>(std::integer_sequence<int, kLess...>, int64_t count) {
    ((count == kLess + 1 ? few.template operator()<kLess + 1>(row) : void()), ...);
  };
  for (; row < num_rows; row += kMost) {
    call(std::make_integer_sequence<int, kMost>(), std::min<int64_t>(kMost, num_rows - row));
  }
}

// Asks memory for the block behind one that is in use: a product of many rows takes as long as that.
void fetch_block(const void* block, int64_t num_bytes) {
  const char* next = static_cast<const char*>(block) + num_bytes;
  for (int64_t i = 0; i < num_bytes; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
}

// Weights in bfloat16 [num_blocks, size_in / 2, kColumns, 2].
class Weights16 {
 public:
  using Sum = float;
  static constexpr int64_t kPlanes = 1;
  static constexpr int64_t kCachedInputs = kCachedBytes / sizeof(BFloat16);
  struct Scratch {};

  Weights16(const Tensor& x, const Tensor& packed)
      : x_(x.const_data_ptr<BFloat16>()),
        weights_(packed.const_data_ptr<BFloat16>()),
        stride_(x.stride(0)),
        size_in_(x.size(1)) {}

  // Rows times a block, as float32 [num_rows, kColumns].
  void multiply(int64_t first, int64_t num_rows, int64_t block, float* sums, int64_t sums_stride, int64_t,
                Scratch&) const {
    const BFloat16 *rows = x_ + first * stride_, *of_block = weights_ + block * size_in_ * kColumns;
    const auto product = [&](int64_t row, int64_t count) {
      fetch_block(of_block, size_in_ * kColumns * sizeof(BFloat16));
      at::native::cpublas::brgemm(count, kColumns, size_in_, stride_, kColumns, sums_stride, false, rows + row * stride_,
                                  of_block, sums + row * sums_stride);
    };
    divide_rows<8>(num_rows, kFewRowsBesideTiles, product, [&]<int kRows>(int64_t row) {
      few<kRows>(rows + row * stride_, of_block, sums + row * sums_stride, sums_stride);
    });
  }

  Floats result(const float* sums, int64_t, int64_t, int64_t, int64_t i) const { return Floats::loadu(sums + i); }

 private:
  // The block is fetched from memory ahead of its use: what a decode step waits for.
  template <int kRows>
  void few(const BFloat16* rows, const BFloat16* block, float* sums, int64_t sums_stride) const {
    __m512 low[kRows], high[kRows];
    for (int r = 0; r < kRows; ++r) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < size_in_; k += 2, block += 2 * kColumns) {
      fetch(block);
      fetch(block + kColumns);
      const auto weights_low = reinterpret_cast<__m512bh>(_mm512_loadu_si512(block));
      const auto weights_high = reinterpret_cast<__m512bh>(_mm512_loadu_si512(block + kColumns));
      for (int r = 0; r < kRows; ++r) {
        const auto inputs = reinterpret_cast<__m512bh>(broadcast(rows + r * stride_ + k));
        low[r] = _mm512_dpbf16_ps(low[r], weights_low, inputs);
        high[r] = _mm512_dpbf16_ps(high[r], weights_high, inputs);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      _mm512_storeu_ps(sums + r * sums_stride, low[r]);
      _mm512_storeu_ps(sums + r * sums_stride + kFloats, high[r]);
    }
  }

  const BFloat16 *x_, *weights_;
  int64_t stride_, size_in_;
};

}  // namespace
