// Products of 8-bit inputs with 4-bit integer weights, by vectors (AVX2 or AVX-512).

#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "blocks.h"
#include "threads.h"
#include "vectors.h"

namespace {

#if defined(__AVX512VNNI__) && defined(CPU_CAPABILITY_AVX512)
#define HAS_BYTE_PRODUCTS
#endif

// Adds the products of unsigned and signed bytes: of each four to an int32 or, without an instruction for it, of each two to an
// int16.
Register add_byte_products(Register sums, Register a, Register b) {
#if defined(HAS_BYTE_PRODUCTS)
  return _mm512_dpbusd_epi32(sums, a, b);
#elif defined(CPU_CAPABILITY_AVX512)
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16(a, b));
#else
  Register added = _mm256_maddubs_epi16(a, b);
  asm("vpaddw %1, %0, %0" : "+x"(sums) : "x"(added));  // in place, as in `add_products`
  return sums;
#endif
}

// Weights [num_blocks, size_in / 8, kColumns, 4], weight + 8, with the first four of eight inputs in the low bits. An output's
// weights are multiplied by `multipliers` [num_blocks, size_in / group, kColumns] of 1 to 15, and by `scales`
// [num_blocks, kColumns]. A group is a multiple of kUnit inputs.
//
// Each unit of inputs of a row has its own scale, so that the few inputs that are far larger than the others round only their
// neighbors. The products of a unit are exact, and the units are added in their order: results do not depend on other rows.
class WeightsInt4 {
 public:
  using Sum = float;
  static constexpr int64_t kPlanes = 1;
  static constexpr int64_t kCachedInputs = kCachedBytes;
  struct Scratch {};

  WeightsInt4(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor& multipliers)
      : size_in_(x.size(1)),
        group_(size_in_ / multipliers.size(1)),
        weights_(static_cast<const uint8_t*>(packed.const_data_ptr())),
        multipliers_(multipliers.const_data_ptr<uint8_t>()),
        scales_(scales.const_data_ptr<float>()),
        inputs_(x.numel()),
        units_(x.numel() / kUnit) {
    const auto* from = x.const_data_ptr<BFloat16>();
    share(x.size(0), rows_at_a_time(size_in_), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t i = 0; i < size_in_; i += kUnit) quantize(from + row * x.stride(0) + i, row * size_in_ + i);
      }
    });
  }

  // Multiplies rows by a block: float32 [num_rows, kColumns].
  void multiply(int64_t first, int64_t num_rows, int64_t block, float* sums, int64_t sums_stride, int64_t, Scratch&) const {
    if (num_rows <= kFewRows) {
      multiply_strips<kFewRows, kBlockVectors>(first, num_rows, block, sums, sums_stride);
    } else {
      multiply_strips<kMostRows, kStrip>(first, num_rows, block, sums, sums_stride);
    }
  }

  // Converts a row's sums to kFloats results.
  Floats result(const float* sums, int64_t, int64_t, int64_t block, int64_t i) const {
    return Floats::loadu(sums + i) * Floats::loadu(scales_ + block * kColumns + i);
  }

 private:
  static constexpr int64_t kUnit = 32;  // inputs with one scale
  static constexpr int kBlockVectors = kColumns / kFloats;  // vectors of a block's outputs
  static constexpr int kFewRows = 2;                        // rows that are multiplied at once by all of them
  static constexpr int kStrip = 2;                          // vectors of outputs that more rows are multiplied by
  static constexpr int kMostRows = kFloats == 16 ? 6 : 4;   // rows that are multiplied by them at once; limited by registers
  static constexpr int64_t kInputs = 8, kStepBytes = 4 * kColumns;  // inputs whose weights are adjacent
  static constexpr float kTop = 127.0f;

  struct Unit {
    float scale;
    Word start;  // of sums: -8 times the sum of the inputs, because weights are stored with 8 added
  };

  int64_t block_bytes() const { return size_in_ / kInputs * kStepBytes; }
  const uint8_t* packed(int64_t block) const { return weights_ + block * block_bytes(); }

  // Rounds a unit of inputs, so that the largest becomes kTop. One that is not finite gets the scale NaN.
  void quantize(const BFloat16* from, int64_t at) {
    using Bytes [[gnu::vector_size(kFloats)]] = int8_t;
    Floats inputs[kUnit / kFloats], top(0.0f);
    for (int64_t i = 0; i < kUnit / kFloats; i += 2) {
      std::tie(inputs[i], inputs[i + 1]) = load(from + i * kFloats);
      top = at::vec::maximum(top, at::vec::maximum(inputs[i].abs(), inputs[i + 1].abs()));  // NaN if any is
    }
    const float largest = at::vec::vec_reduce_all<float>([](Floats a, Floats b) { return at::vec::maximum(a, b); }, top);
    const bool finite = std::isfinite(largest);
    const Floats inverse(finite && largest >= 0x1p-110f ? kTop / largest : 0.0f);
    for (int64_t i = 0; i < kUnit / kFloats; ++i) {
      const Ints rounded = at::vec::convert_to_int_of_same_size((inputs[i] * inverse).round());
      const Bytes bytes = __builtin_convertvector(as_bits<int32_t>(rounded), Bytes);
      std::memcpy(inputs_.data() + at + i * kFloats, &bytes, sizeof bytes);
    }
    units_[at / kUnit] = {finite ? largest / kTop : std::numeric_limits<float>::quiet_NaN(), start(inputs_.data() + at)};
  }

  static Word start(const int8_t* inputs) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(inputs)), eight = _mm256_set1_epi8(8);
#ifdef HAS_BYTE_PRODUCTS
    __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), eight, bytes);
    constexpr auto add = [](__m128i a, __m128i b) { return _mm_add_epi32(a, b); };
    const auto negate = [](__m128i a) { return _mm_sub_epi32(_mm_setzero_si128(), a); };
#else
    __m256i sums = _mm256_maddubs_epi16(eight, bytes);
    constexpr auto add = [](__m128i a, __m128i b) { return _mm_add_epi16(a, b); };
    const auto negate = [](__m128i a) { return _mm_sub_epi16(_mm_setzero_si128(), a); };
#endif
    __m128i half = add(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    half = add(half, _mm_shuffle_epi32(half, 0b1110));
    half = add(half, _mm_shuffle_epi32(half, 0b01));
    return _mm_cvtsi128_si32(negate(half));
  }

  // Multiplies rows by a block, kMost rows and kVectors vectors of outputs at once.
  template <int kMost, int kVectors>
  void multiply_strips(int64_t first, int64_t num_rows, int64_t block, float* sums, int64_t sums_stride) const {
    for (int64_t strip = 0, strips = kBlockVectors / kVectors; strip < strips; ++strip) {
      divide_evenly<kMost>(num_rows, [&]<int kRows>(int64_t row, int64_t pass, int64_t passes) {
        const Prefetch of_pass(packed(block), block_bytes(), kStepBytes, strip * passes + pass, strips * passes);
        of_pass.apply([&](auto prefetch) {
          multiply_strip<kRows, kVectors>(first + row, block, strip * kVectors, prefetch,
                                          sums + row * sums_stride + strip * kVectors * kFloats, sums_stride);
        });
      });
    }
  }

  // Multiplies kRows rows by kVectors vectors of a block's outputs, from `vector` on: float32 [kRows, kVectors * kFloats].
  template <int kRows, int kVectors, typename Prefetcher>
  void multiply_strip(int64_t first, int64_t block, int64_t vector, Prefetcher prefetch, float* sums, int64_t sums_stride) const {
    const uint8_t* weights = packed(block) + vector * sizeof(Register);
    const uint8_t* multipliers = multipliers_ + block * (size_in_ / group_) * kColumns + vector * kFloats;
    const int8_t* inputs = inputs_.data() + first * size_in_;
    const Unit* units = units_.data() + first * size_in_ / kUnit;
    const Ints four_bits(0x0f0f0f0f);
    FloatRegister totals[kRows][kVectors];
    for (auto& of_row : totals) {
      for (auto& total : of_row) total = Floats(0.0f);
    }
    for (int64_t unit = 0; unit < size_in_ / kUnit; ++unit) {
      // 1. sum the products of a unit
      Register products[kRows][kVectors];
      for (int r = 0; r < kRows; ++r) {
        for (auto& product : products[r]) product = Ints(units[r * (size_in_ / kUnit) + unit].start);
      }
      for (int step = 0; step < kUnit / kInputs; ++step, weights += kStepBytes, inputs += kInputs) {
        prefetch.step();
        Ints both[kVectors];
        for (int i = 0; i < kVectors; ++i) {
          both[i] = Ints::loadu(weights + i * sizeof(Register));
        }
        for (int half = 0; half < 2; ++half) {
          Register of_outputs[kVectors];
          for (int i = 0; i < kVectors; ++i) {
            of_outputs[i] = (half ? as_ints(as_bits<uint16_t>(both[i]) >> 4) : both[i]) & four_bits;
          }
          for (int r = 0; r < kRows; ++r) {
            const Ints four(*reinterpret_cast<const Word*>(inputs + r * size_in_ + 4 * half));
            for (int i = 0; i < kVectors; ++i) products[r][i] = add_byte_products(products[r][i], of_outputs[i], four);
          }
        }
      }
      // 2. multiply them by their group's multipliers and the unit's scales
      for (int i = 0; i < kVectors; ++i) {
        const Ints by = at::vec::convert_to_int32<uint8_t>(multipliers + unit * kUnit / group_ * kColumns + i * kFloats);
        for (int r = 0; r < kRows; ++r) {
          const Floats product = at::vec::convert_to_fp_of_same_size<float>(multiply_sums(products[r][i], by));
          totals[r][i] = at::vec::fmadd(product, Floats(units[r * (size_in_ / kUnit) + unit].scale), Floats(totals[r][i]));
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kVectors; ++i) Floats(totals[r][i]).store(sums + r * sums_stride + i * kFloats);
    }
  }

  // Multiplies the sums of `add_byte_products`, which fit into 16 bits. For two sums of 16 bits, adds both.
  static Ints multiply_sums(Register sums, Ints by) {
#if defined(HAS_BYTE_PRODUCTS)
    return Ints(_mm512_madd_epi16(sums, by));
#elif defined(CPU_CAPABILITY_AVX512)
    return Ints(_mm512_madd_epi16(sums, by * Ints(0x10001)));
#else
    return Ints(_mm256_madd_epi16(sums, by * Ints(0x10001)));
#endif
  }

  int64_t size_in_, group_;
  const uint8_t *weights_, *multipliers_;
  const float* scales_;
  Numbers<int8_t> inputs_;
  std::vector<Unit> units_;
};

}  // namespace
