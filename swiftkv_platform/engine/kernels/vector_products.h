// Products by multiplying and adding vectors (AVX2 or AVX-512): numbers in bfloat16 are widened to floats, integers to 16 bits.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "blocks.h"
#include "threads.h"
#include "vectors.h"

namespace {

using Input = float;                       // rows of `product`
using Pairs = std::tuple<Floats, Floats>;  // kHalves numbers

constexpr int kBlockVectors = kColumns / kFloats;  // vectors of a block's outputs
constexpr int kStrip = 2;                          // vectors of outputs that are multiplied by many rows
constexpr int kMostRows = kFloats == 16 ? 8 : 5;   // rows that are multiplied by them at once; limited by registers
constexpr int kFewRows = kFloats == 16 ? 4 : 2;    // rows that are multiplied by whole blocks at once
constexpr int64_t kDepth = 256;                    // inputs of a part of a product, whose weights stay in the L1 cache

Pairs load_pairs(const BFloat16* from) {
  return load(from);
}

Pairs make_pairs(Floats low, Floats high) {
  return {low, high};
}

Floats add_products(Floats sums, const Pairs& a, const Pairs& b) {
  sums = at::vec::fmadd(std::get<0>(a), std::get<0>(b), sums);
  return at::vec::fmadd(std::get<1>(a), std::get<1>(b), sums);
}

// Widens the first or second numbers of kFloats pairs.
Floats widen(const BFloat16* pairs, int second) {
  const Bits<uint32_t> bits = as_bits<uint32_t>(Ints::loadu(pairs));
  return at::vec::cast<float>(as_ints(second ? bits & 0xFFFF0000u : bits << 16));
}

// sums [kRows, kVectors * kFloats] (+)= rows [kRows, depth] * packed [depth / 2, ..., 2]; strides are in numbers.
template <int kRows, int kVectors, typename Prefetcher>
void multiply_rows(const float* rows, int64_t stride, const BFloat16* packed, int64_t packed_stride, int64_t depth, bool add,
                   Prefetcher prefetch, float* sums, int64_t sums_stride) {
  Floats products[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    const float* own = sums + r * sums_stride;
    for (int i = 0; i < kVectors; ++i) products[r][i] = add ? Floats::loadu(own + i * kFloats) : Floats(0.0f);
  }
  for (int64_t k = 0; k < depth; k += 2, packed += 2 * packed_stride) {
    prefetch.step();
    for (int odd = 0; odd < 2; ++odd) {
      Floats weights[kVectors];
      for (int i = 0; i < kVectors; ++i) weights[i] = widen(packed + i * 2 * kFloats, odd);
      for (int r = 0; r < kRows; ++r) {
        const Floats input(rows[r * stride + k + odd]);
        for (int i = 0; i < kVectors; ++i) products[r][i] = at::vec::fmadd(weights[i], input, products[r][i]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) products[r][i].store(sums + r * sums_stride + i * kFloats);
  }
}

// sums [num_rows, columns] (+)= rows [num_rows, depth] * packed [depth / 2, columns, 2]; the strides of rows are in numbers.
void product(int64_t num_rows, int64_t columns, int64_t depth, int64_t stride, int64_t packed_stride, int64_t sums_stride,
             bool add, const float* rows, const BFloat16* packed, float* sums) {
  for (int64_t k = 0; k < depth; k += kDepth, add = true) {
    const int64_t size = std::min(kDepth, depth - k), step_bytes = 2 * packed_stride * sizeof(BFloat16);
    const BFloat16* part = packed + k * packed_stride;
    for (int64_t strip = 0, strips = (columns + kStrip * kFloats - 1) / (kStrip * kFloats); strip < strips; ++strip) {
      const int64_t column = strip * kStrip * kFloats;
      divide_evenly<kMostRows>(num_rows, [&]<int kRows>(int64_t row, int64_t pass, int64_t passes) {
        Prefetch(part, size / 2 * step_bytes, step_bytes, strip * passes + pass, strips * passes).apply([&](auto prefetch) {
          multiply_rows<kRows, kStrip>(rows + row * stride + k, stride, part + 2 * column, packed_stride, size, add, prefetch,
                                       sums + row * sums_stride + column, sums_stride);
        });
      });
    }
  }
}

void release_products() {}

// Weights in bfloat16 [num_blocks, size_in / 2, kColumns, 2].
class Weights16 {
 public:
  using Sum = float;
  static constexpr int64_t kPlanes = 1;
  static constexpr int64_t kCachedInputs = kCachedBytes / sizeof(float);
  struct Scratch {};

  Weights16(const Tensor& x, const Tensor& packed)
      : size_in_(x.size(1)), weights_(packed.const_data_ptr<BFloat16>()), inputs_(x.size(0) * size_in_) {
    const auto* from = x.const_data_ptr<BFloat16>();
    share(x.size(0), rows_at_a_time(size_in_), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        std::copy_n(from + row * x.stride(0), size_in_, inputs_.data() + row * size_in_);
      }
    });
  }

  // Multiplies rows by a block: float32 [num_rows, kColumns].
  void multiply(int64_t first, int64_t num_rows, int64_t block, float* sums, int64_t sums_stride, int64_t, Scratch&) const {
    const float* rows = inputs_.data() + first * size_in_;
    const BFloat16* of_block = weights_ + block * size_in_ * kColumns;
    if (num_rows > kFewRows) {
      return product(num_rows, kColumns, size_in_, size_in_, kColumns, sums_stride, false, rows, of_block, sums);
    }
    with_count<kFewRows>(num_rows, [&]<int kRows>() {
      multiply_rows<kRows, kBlockVectors>(rows, size_in_, of_block, kColumns, size_in_, false, Prefetch(of_block, 0, kStepBytes),
                                          sums, sums_stride);
    });
  }

  Floats result(const float* sums, int64_t, int64_t, int64_t, int64_t i) const { return Floats::loadu(sums + i); }

 private:
  static constexpr int64_t kStepBytes = 2 * kColumns * sizeof(BFloat16);

  int64_t size_in_;
  const BFloat16* weights_;
  Numbers<float> inputs_;
};

// Adds the products of pairs of 16-bit integers to the sums.
Ints add_products(Ints sums, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sums, a, b);
#elif defined(CPU_CAPABILITY_AVX512)
  return sums + Ints(_mm512_madd_epi16(a, b));
#else
  Register added = _mm256_madd_epi16(a, b), total = sums;
  // In place: otherwise the compiler keeps the sums twice, and has too few registers.
  asm("vpaddd %1, %0, %0" : "+x"(total) : "x"(added));
  return total;
#endif
}

// Weights in int8 [num_blocks, size_in / 4, kColumns, 4], and `scales` of the outputs [num_blocks, kColumns]. Rows of x are scaled
// so that the largest number of each is kTop, and rounded.
// Sums of products are exact for up to kDepth inputs, then added as floats: neither depends on the number of rows.
class WeightsInt8 {
 public:
  using Sum = float;
  static constexpr int64_t kPlanes = 1;
  static constexpr int64_t kCachedInputs = kCachedBytes / sizeof(int16_t);
  using Scratch = Numbers<int16_t>;

  WeightsInt8(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor&)
      : size_in_(x.size(1)),
        weights_(packed.const_data_ptr<int8_t>()),
        scales_(scales.const_data_ptr<float>()),
        stride_((size_in_ + kHalves - 1) / kHalves * kHalves),
        inputs_(x.size(0) * stride_),
        input_scales_(x.size(0)) {
    share(x.size(0), rows_at_a_time(size_in_), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) quantize(x.const_data_ptr<BFloat16>() + row * x.stride(0), row);
    });
  }

  // Multiplies rows by a block: float32 [num_rows, kColumns].
  void multiply(int64_t first, int64_t num_rows, int64_t block, float* sums, int64_t sums_stride, int64_t,
                Scratch& scratch) const {
    if (num_rows <= kFewRows) {
      return with_count<kFewRows>(num_rows, [&]<int kRows>() { multiply_packed<kRows>(first, block, sums, sums_stride); });
    }
    scratch.resize(kDepth * kColumns);
    for (int64_t begin = 0; begin < size_in_; begin += kDepth) {
      const int64_t size = std::min(kDepth, size_in_ - begin);
      widen_block(block, begin, size, scratch.data());
      for (int strip = 0; strip < kStrips; ++strip) {
        const int64_t column = strip * kStrip * kFloats;
        divide_evenly<kMostRows>(num_rows, [&]<int kRows>(int64_t row, int64_t pass, int64_t passes) {
          const Prefetch of_part(packed(block, begin), size / kInputs * kStepBytes, 2 * kStepBytes / kInputs,
                                 strip * passes + pass, kStrips * passes);
          of_part.apply([&](auto prefetch) {
            const int16_t* rows = inputs_.data() + (first + row) * stride_ + begin;
            multiply_widened<kRows>(rows, scratch.data() + 2 * column, size, begin > 0, prefetch,
                                    sums + row * sums_stride + column, sums_stride);
          });
        });
      }
    }
  }

  // Converts a row's sums to kFloats results.
  Floats result(const float* sums, int64_t, int64_t row, int64_t block, int64_t i) const {
    return Floats::loadu(sums + i) * Floats::loadu(scales_ + block * kColumns + i) * Floats(input_scales_[row]);
  }

 private:
  static constexpr float kTop = 32767.0f;
  static_assert(kDepth * int64_t{128} * 32767 <= std::numeric_limits<int32_t>::max());
  static constexpr int64_t kInputs = 4;  // inputs whose weights are adjacent
  static constexpr int64_t kVectorBytes = sizeof(Register), kStepBytes = kBlockVectors * kVectorBytes;
  static constexpr int kStrips = kBlockVectors / kStrip;

  int64_t block_bytes() const { return size_in_ / kInputs * kStepBytes; }

  // Weights of a block from input `begin` on.
  const int8_t* packed(int64_t block, int64_t begin = 0) const {
    return weights_ + block * block_bytes() + begin / kInputs * kStepBytes;
  }

  // Each four inputs in the order 0, 2, 1, 3: pairs have the order of the bytes of weights with the same parity. A row that is
  // not finite gets the scale NaN, so that all its results are NaN.
  void quantize(const BFloat16* from, int64_t row) {
    using Half [[gnu::vector_size(2 * kFloats)]] = int16_t;
    Floats top(0.0f);
    for (int64_t i = 0; i < size_in_; i += kHalves) {
      const auto [low, high] = load(from + i, rest(size_in_, i));
      top = at::vec::maximum(top, at::vec::maximum(low.abs(), high.abs()));  // NaN if any is
    }
    const float largest = at::vec::vec_reduce_all<float>([](Floats a, Floats b) { return at::vec::maximum(a, b); }, top);
    const bool finite = std::isfinite(largest);
    input_scales_[row] = finite ? largest / kTop : std::numeric_limits<float>::quiet_NaN();
    const Floats inverse(finite && largest >= 0x1p-110f ? kTop / largest : 0.0f);
    int16_t* to = inputs_.data() + row * stride_;
    const auto put = [&](Floats some, int16_t* to) {
      const Ints rounded = at::vec::convert_to_int_of_same_size((some * inverse).round());
      Half half = __builtin_convertvector(as_bits<int32_t>(rounded), Half);
      for (int j = 1; j < kFloats; j += 4) std::swap(half[j], half[j + 1]);
      std::memcpy(to, &half, sizeof half);
    };
    for (int64_t i = 0; i < size_in_; i += kHalves) {
      const auto [low, high] = load(from + i, rest(size_in_, i));
      put(low, to + i);
      put(high, to + i + kFloats);
    }
  }

  // Weights of a pair of inputs: bytes 0 and 2 of four, or bytes 1 and 3.
  static Ints widen(Ints bytes, int pair) {
    const Bits<int16_t> both = as_bits<int16_t>(bytes);
    return as_ints(pair ? both >> 8 : (both << 8) >> 8);
  }

  // Widens weights of inputs `begin` to `begin` + size - 1 to int16 [size / 2, kColumns, 2].
  void widen_block(int64_t block, int64_t begin, int64_t size, int16_t* to) const {
    const int8_t* from = packed(block, begin);
    for (int64_t k = begin; k < begin + size; k += kInputs, from += kStepBytes) {
      for (int vector = 0; vector < kBlockVectors; ++vector, to += 2 * kFloats) {
        const Ints bytes = Ints::loadu(from + vector * kVectorBytes);
        for (int pair = 0; pair < kInputs / 2; ++pair) widen(bytes, pair).store(to + pair * 2 * kColumns);
      }
      to += (kInputs / 2 - 1) * 2 * kColumns;
    }
  }

  // sums [kRows, kStrip * kFloats] (+)= rows [kRows, size] * widened [size / 2, kColumns, 2].
  template <int kRows, typename Prefetcher>
  void multiply_widened(const int16_t* rows, const int16_t* widened, int64_t size, bool add, Prefetcher prefetch, float* sums,
                        int64_t sums_stride) const {
    Ints products[kRows][kStrip];
    for (auto& of_row : products) {
      for (auto& product : of_row) product = Ints(0);
    }
    for (int64_t k = 0; k < size; k += 2, widened += 2 * kColumns) {
      prefetch.step();
      Ints inputs[kRows];
      for (int r = 0; r < kRows; ++r) inputs[r] = Ints(*reinterpret_cast<const Word*>(rows + r * stride_ + k));
#pragma GCC unroll 2
      for (int i = 0; i < kStrip; ++i) {
        Register weights = Ints::loadu(widened + i * 2 * kFloats);
        asm("" : "+x"(weights));  // otherwise the compiler loads them again for each row
        for (int r = 0; r < kRows; ++r) products[r][i] = add_products(products[r][i], weights, inputs[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kStrip; ++i) add_exact(products[r][i], add, sums + r * sums_stride + i * kFloats);
    }
  }

  static void add_exact(Ints product, bool add, float* to) {
    const Floats rounded = at::vec::convert_to_fp_of_same_size<float>(product);
    (add ? Floats::loadu(to) + rounded : rounded).store(to);
  }

  // Multiplies kRows rows by a block as it is packed.
  template <int kRows>
  void multiply_packed(int64_t first, int64_t block, float* sums, int64_t sums_stride) const {
    const int16_t* rows = inputs_.data() + first * stride_;
    const int8_t* from = packed(block);
    Prefetch prefetch(from, block_bytes(), kStepBytes);
    for (int64_t begin = 0; begin < size_in_; begin += kDepth) {
      Ints products[kRows][kBlockVectors];
      for (auto& of_row : products) {
        for (auto& product : of_row) product = Ints(0);
      }
      for (int64_t k = begin; k < std::min(begin + kDepth, size_in_); k += kInputs, from += kStepBytes) {
        prefetch.step();
        Ints bytes[kBlockVectors];
        for (int i = 0; i < kBlockVectors; ++i) {
          bytes[i] = Ints::loadu(from + i * kVectorBytes);
        }
        for (int pair = 0; pair < kInputs / 2; ++pair) {
          Ints weights[kBlockVectors];
          for (int i = 0; i < kBlockVectors; ++i) weights[i] = widen(bytes[i], pair);
          for (int r = 0; r < kRows; ++r) {
            const Ints input(*reinterpret_cast<const Word*>(rows + r * stride_ + k + 2 * pair));
            for (int i = 0; i < kBlockVectors; ++i) products[r][i] = add_products(products[r][i], weights[i], input);
          }
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kBlockVectors; ++i) add_exact(products[r][i], begin > 0, sums + r * sums_stride + i * kFloats);
      }
    }
  }

  int64_t size_in_;
  const int8_t* weights_;
  const float* scales_;
  int64_t stride_;  // of rows of inputs
  Numbers<int16_t> inputs_;
  std::vector<float> input_scales_;
};

}  // namespace
