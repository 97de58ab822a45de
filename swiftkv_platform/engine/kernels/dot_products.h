// Products of bfloat16 numbers by instructions that add the products of pairs (AVX-512 BF16), or of tiles (AMX).

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>

#include "blocks.h"
#include "vectors.h"

namespace {

constexpr int64_t kFewRows = 32;            // up to this many rows, products use the weights as they are loaded
constexpr int64_t kFewRowsBesideTiles = 1;  // the same on processors with AMX tiles
constexpr int64_t kFewRowsByGroups = 4;     // the same for int4, which is multiplied by groups or else widened to int8
constexpr int64_t kExactRows = 64;          // with tiles, up to this many rows are one product, whose kernel is for their number

using Input = BFloat16;  // rows of `product`
using Pairs = __m512bh;  // kHalves numbers

Pairs load_pairs(const BFloat16* from) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
}

Pairs make_pairs(Floats low, Floats high) {
  return _mm512_cvtne2ps_pbh(high, low);
}

// Adds the products of two adjacent numbers to each of the sums.
Floats add_products(Floats sums, Pairs a, Pairs b) {
  return _mm512_dpbf16_ps(sums, a, b);
}

template <typename Number>
__m512i broadcast(const Number* from) {
  return _mm512_set1_epi32(*reinterpret_cast<const Word*>(from));
}

// sums [num_rows, columns] (+)= rows [num_rows, depth] * packed [depth / 2, columns, 2]; the strides of rows are in numbers.
void product(int64_t num_rows, int64_t columns, int64_t depth, int64_t stride, int64_t packed_stride, int64_t sums_stride,
             bool add, const BFloat16* rows, const BFloat16* packed, float* sums) {
  at::native::cpublas::brgemm(num_rows, columns, depth, stride, packed_stride, sums_stride, add, rows, packed, sums);
}

// Ends this thread's products.
void release_products() {
  at::native::cpublas::brgemm_release();
}

bool uses_tiles = __builtin_cpu_supports("amx-tile");

// Divides rows between two functions: product(first row, number of rows) uses brgemm's kernels; few.operator()<rows>(first row,
// pass, number of passes), for at most kMost rows, uses the weights as they are loaded. `few_beside_tiles`: max rows for which
// only `few` is used on processors with tiles.
template <int kMost, typename Product, typename Few>
void divide_rows(int64_t num_rows, int64_t few_beside_tiles, const Product& product, const Few& few) {
  int64_t row = 0;
  if (num_rows > (uses_tiles ? few_beside_tiles : kFewRows)) {
    if (!uses_tiles || num_rows > kExactRows) product(0, row = num_rows / kRowStep * kRowStep);
    if (uses_tiles && row < num_rows) product(row, num_rows - row), row = num_rows;
  }
  const int64_t num_passes = (num_rows - row + kMost - 1) / kMost;
  for (int64_t pass = 0; pass < num_passes; ++pass, row += kMost) {
    with_count<kMost>(std::min<int64_t>(kMost, num_rows - row), [&]<int kRows>() {
      few.template operator()<kRows>(row, pass, num_passes);
    });
  }
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

  // Multiplies rows by a block: float32 [num_rows, kColumns].
  void multiply(int64_t first, int64_t num_rows, int64_t block, float* sums, int64_t sums_stride, int64_t,
                Scratch&) const {
    const BFloat16 *rows = x_ + first * stride_, *of_block = weights_ + block * size_in_ * kColumns;
    const auto product = [&](int64_t row, int64_t count) {
      ::product(count, kColumns, size_in_, stride_, kColumns, sums_stride, false, rows + row * stride_, of_block,
                sums + row * sums_stride);
    };
    divide_rows<8>(num_rows, kFewRowsBesideTiles, product, [&]<int kRows>(int64_t row, int64_t pass, int64_t num_passes) {
      few<kRows>(rows + row * stride_, of_block, sums + row * sums_stride, sums_stride,
                 Prefetch(of_block, block_bytes(), kStepBytes, pass, num_passes));
    });
  }

  Floats result(const float* sums, int64_t, int64_t, int64_t, int64_t i) const { return Floats::loadu(sums + i); }

 private:
  static constexpr int64_t kStepBytes = 2 * kColumns * sizeof(BFloat16);

  int64_t block_bytes() const { return size_in_ / 2 * kStepBytes; }

  template <int kRows>
  void few(const BFloat16* rows, const BFloat16* block, float* sums, int64_t sums_stride, Prefetch prefetch) const {
    constexpr int kVectors = kColumns / kFloats;
    __m512 products[kRows][kVectors];
    for (auto& of_row : products) {
      for (auto& product : of_row) product = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < size_in_; k += 2, block += 2 * kColumns) {
      prefetch.step();
      __m512bh weights[kVectors];
      for (int i = 0; i < kVectors; ++i) {
        weights[i] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(block + i * kColumns));
      }
      for (int r = 0; r < kRows; ++r) {
        const auto inputs = reinterpret_cast<__m512bh>(broadcast(rows + r * stride_ + k));
        for (int i = 0; i < kVectors; ++i) products[r][i] = _mm512_dpbf16_ps(products[r][i], weights[i], inputs);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kVectors; ++i) _mm512_storeu_ps(sums + r * sums_stride + i * kFloats, products[r][i]);
    }
  }

  const BFloat16 *x_, *weights_;
  int64_t stride_, size_in_;
};

}  // namespace
