// Products of 16-bit inputs with 8-bit integer weights by instructions that add the products of four bytes (AVX-512 VNNI), or of
// tiles (AMX); and with 4-bit weights on processors with tiles.

#pragma once

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "dot_products.h"
#include "threads.h"

namespace {

// Rows of x as 16-bit integers, scaled so that the largest number of each row is 32767. The high and low bytes are multiplied
// separately. 8 bits would not be enough, because a few inputs of most language models are far larger than the others.
class Inputs16 {
 public:
  // `group`: number of inputs per group whose sums are needed; 0: no sums.
  explicit Inputs16(const Tensor& x, int64_t group = 0)
      : size_in(x.size(1)),
        low_(x.numel()),
        high_(x.numel()),
        scales_(x.size(0)),
        num_groups_(group ? size_in / group : 0),
        sums_(2 * x.size(0) * num_groups_) {
    const auto* from = x.const_data_ptr<BFloat16>();
    share(x.size(0), rows_at_a_time(size_in), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        quantize(from + row * x.stride(0), row);
        for (int64_t i = 0; i < num_groups_; ++i) {
          int32_t* to = sums_.data() + 2 * (row * num_groups_ + i);
          to[0] = sum_of(low(row) + i * group, group);
          to[1] = sum_of(high(row) + i * group, group);
        }
      }
    });
  }

  const uint8_t* low(int64_t row) const { return low_.data() + row * size_in; }
  // High bytes + 128.
  const uint8_t* high(int64_t row) const { return high_.data() + row * size_in; }
  float scale(int64_t row) const { return scales_[row]; }
  // Per group of inputs: sum of the low bytes, sum of the high bytes.
  const int32_t* sums(int64_t row) const { return sums_.data() + 2 * row * num_groups_; }

  const int64_t size_in;

 private:
  // A row that is not finite gets the scale NaN, so that all its results are NaN.
  void quantize(const BFloat16* from, int64_t row) {
    __m512i most = _mm512_setzero_si512();  // bfloat16 bits without the sign have the order of the absolute values
    for (int64_t i = 0; i < size_in; i += kHalves) {
      const __m512i bits = _mm512_maskz_loadu_epi16(mask(size_in - i), from + i);
      most = _mm512_max_epu16(most, _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)));
    }
    most = _mm512_max_epu32(_mm512_and_si512(most, _mm512_set1_epi32(0xffff)), _mm512_srli_epi32(most, 16));
    const float largest = c10::detail::fp32_from_bits(_mm512_reduce_max_epu32(most) << 16);
    const bool finite = std::isfinite(largest);
    scales_[row] = finite ? largest / kTop : std::numeric_limits<float>::quiet_NaN();
    const __m512 inverse = _mm512_set1_ps(finite && largest >= 0x1p-110f ? kTop / largest : 0.0f);
    for (int64_t i = 0; i < size_in; i += kFloats) {
      const auto kept = static_cast<__mmask16>(mask(size_in - i));
      const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(kept, from + i)), 16);
      const __m512i rounded = _mm512_maskz_cvtps_epi32(kept, _mm512_mul_ps(_mm512_castsi512_ps(bits), inverse));
      const __m512i high = _mm512_srli_epi32(_mm512_add_epi32(rounded, _mm512_set1_epi32(0x8000)), 8);
      _mm_mask_storeu_epi8(low_.data() + row * size_in + i, kept, _mm512_cvtepi32_epi8(rounded));
      _mm_mask_storeu_epi8(high_.data() + row * size_in + i, kept, _mm512_cvtepi32_epi8(high));
    }
  }

  // Sum of a multiple of 32 bytes.
  static int32_t sum_of(const uint8_t* bytes, int64_t count) {
    __m256i sums = _mm256_setzero_si256();
    for (int64_t i = 0; i < count; i += 32) {
      const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + i));
      sums = _mm256_add_epi64(sums, _mm256_sad_epu8(some, _mm256_setzero_si256()));
    }
    const __m128i halves = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return static_cast<int32_t>(_mm_extract_epi64(halves, 0) + _mm_extract_epi64(halves, 1));
  }

  static constexpr float kTop = 32767.0f;

  static __mmask32 mask(int64_t count) { return count >= kHalves ? ~__mmask32{0} : (__mmask32{1} << count) - 1; }

  Numbers<uint8_t> low_, high_;
  std::vector<float> scales_;
  int64_t num_groups_;
  std::vector<int32_t> sums_;
};

// Integer weights. Products are summed in int32, so that they are exact and do not depend on the number of rows.
//   int8  [num_blocks, size_in / 4, kColumns, 4]
//   int4  [num_blocks, size_in / 8, kColumns, 4], weight + 8, with the first four of eight inputs in the low bits. An output's
//         weights are multiplied by `multipliers` [num_blocks, size_in / group, kColumns] of 1 to 15, so that the products
//         fit into int8. A group is a multiple of 32 inputs.
// `scales` of the outputs, and `offsets` (128 times the sum of an output's weights), are [num_blocks, kColumns].
template <bool kFourBits>
class WeightsIntegers {
 public:
  using Sum = int32_t;
  static constexpr int64_t kPlanes = 2;  // sums of low-byte products, and of high-byte products
  static constexpr int64_t kCachedInputs = kCachedBytes / kPlanes;
  using Scratch = Numbers<int8_t>;

  WeightsIntegers(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor& offsets,
                  const std::optional<Tensor>& multipliers = std::nullopt)
      : group_(kFourBits ? x.size(1) / multipliers->size(1) : 0),
        inputs_(x, group_),
        weights_(static_cast<const uint8_t*>(packed.const_data_ptr())),
        multipliers_(kFourBits ? multipliers->const_data_ptr<uint8_t>() : nullptr),
        scales_(scales.const_data_ptr<float>()),
        offsets_(offsets.const_data_ptr<int32_t>()) {}

  // Multiplies the bytes of rows by a block: int32 [num_rows, kColumns]. High-byte products are at an offset of `plane`.
  void multiply(int64_t first, int64_t num_rows, int64_t block, int32_t* sums, int64_t sums_stride, int64_t plane,
                Scratch& scratch) const {
    const int8_t* widened = nullptr;
    const auto product = [&](int64_t row, int64_t count) {
      if (!widened) widened = in_int8(block, scratch);
      int32_t* to = sums + row * sums_stride;
      for (const auto& [bytes, sums_of] : {std::pair(inputs_.low(first + row), to), {inputs_.high(first + row), to + plane}}) {
        at::native::cpublas::brgemm(count, kColumns, size_in(), size_in(), kColumns, sums_stride, false, bytes, widened,
                                    sums_of);
      }
    };
    const bool by_groups = kFourBits && num_rows <= kFewRowsByGroups;
    const auto few_rows = [&]<int kRows>(int64_t row, int64_t pass, int64_t num_passes) {
      int32_t* to = sums + row * sums_stride;
      if (!by_groups && !widened) widened = in_int8(block, scratch);
      Prefetch prefetch(packed(block), block_bytes(), by_groups ? kStepBytes : block_bytes() / size_in() * 4, pass, num_passes);
      if (by_groups) {
        few_by_groups<kRows>(first + row, block, to, sums_stride, plane, prefetch);
      } else {
        few<kRows>(first + row, widened, to, sums_stride, plane, prefetch);
      }
    };
    divide_rows<4>(num_rows, kFourBits ? kFewRowsByGroups : kFewRowsBesideTiles, product, few_rows);
  }

  // Converts a row's sums to kFloats results.
  Floats result(const int32_t* sums, int64_t plane, int64_t row, int64_t block, int64_t i) const {
    const int64_t at = block * kColumns + i;
    const __m512i high = _mm512_sub_epi32(_mm512_loadu_si512(sums + plane + i), _mm512_loadu_si512(offsets_ + at));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + i));
    const __m512 both = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), low);
    return Floats(both) * Floats::loadu(scales_ + at) * Floats(inputs_.scale(row));
  }

 private:
  static constexpr int64_t kStepBytes = 4 * kColumns;  // weights of four inputs, or in int4 of eight

  int64_t size_in() const { return inputs_.size_in; }
  int64_t block_bytes() const { return size_in() / (kFourBits ? 8 : 4) * kStepBytes; }
  const uint8_t* packed(int64_t block) const { return weights_ + block * block_bytes(); }

  // `weights`: a block in int8.
  template <int kRows>
  void few(int64_t first, const int8_t* weights, int32_t* sums, int64_t sums_stride, int64_t plane,
           Prefetch prefetch) const {
    constexpr int kVectors = kColumns / kFloats;
    const uint8_t *low = inputs_.low(first), *high = inputs_.high(first);
    __m512i products[kRows][2][kVectors];  // by low and high bytes
    for (auto& of_row : products) {
      for (auto& of_byte : of_row) {
        for (auto& product : of_byte) product = _mm512_setzero_si512();
      }
    }
    for (int64_t k = 0; k < size_in(); k += 4, weights += 4 * kColumns) {
      prefetch.step();
      __m512i of_outputs[kVectors];
      for (int i = 0; i < kVectors; ++i) {
        of_outputs[i] = _mm512_loadu_si512(weights + i * 2 * kColumns);
      }
      for (int r = 0; r < kRows; ++r) {
        const __m512i inputs[] = {broadcast(low + r * size_in() + k), broadcast(high + r * size_in() + k)};
        for (int byte = 0; byte < 2; ++byte) {
          for (int i = 0; i < kVectors; ++i) {
            products[r][byte][i] = _mm512_dpbusd_epi32(products[r][byte][i], inputs[byte], of_outputs[i]);
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int byte = 0; byte < 2; ++byte) {
        int32_t* to = sums + r * sums_stride + byte * plane;
        for (int i = 0; i < kVectors; ++i) _mm512_storeu_si512(to + i * kFloats, products[r][byte][i]);
      }
    }
  }

  // int4: multiplies the sum of a group instead of each weight, and subtracts 8 * the sum of inputs, because weights are stored
  // with 8 added.
  template <int kRows>
  void few_by_groups(int64_t first, int64_t block, int32_t* sums, int64_t sums_stride, int64_t plane,
                     Prefetch prefetch) const {
    constexpr int kVectors = kColumns / kFloats;
    const uint8_t* weights = packed(block);
    const uint8_t* multipliers = multipliers_ + block * size_in() / group_ * kColumns;
    const __m512i four_bits = _mm512_set1_epi8(0x0f);
    const uint8_t *low = inputs_.low(first), *high = inputs_.high(first);
    for (int64_t k = 0, group = 0; k < size_in(); ++group, multipliers += kColumns) {
      __m512i products[kRows][2][kVectors];  // by low and high bytes
      for (int r = 0; r < kRows; ++r) {
        for (int byte = 0; byte < 2; ++byte) {
          const __m512i start = _mm512_set1_epi32(-8 * inputs_.sums(first + r)[2 * group + byte]);
          for (auto& product : products[r][byte]) product = start;
        }
      }
      for (const int64_t end = k + group_; k < end; k += 8, weights += 4 * kColumns) {
        prefetch.step();
        __m512i some[kVectors];
        for (int i = 0; i < kVectors; ++i) some[i] = _mm512_loadu_si512(weights + i * 2 * kColumns);
        for (int half = 0; half < 2; ++half) {  // inputs k to k + 3, and k + 4 to k + 7
          for (int r = 0; r < kRows; ++r) {
            const int64_t at = r * size_in() + k + 4 * half;
            const __m512i inputs[] = {broadcast(low + at), broadcast(high + at)};
            for (int i = 0; i < kVectors; ++i) {
              const __m512i of_outputs = _mm512_and_si512(half ? _mm512_srli_epi16(some[i], 4) : some[i], four_bits);
              for (int byte = 0; byte < 2; ++byte) {
                products[r][byte][i] = _mm512_dpbusd_epi32(products[r][byte][i], inputs[byte], of_outputs);
              }
            }
          }
        }
      }
      for (int i = 0; i < kVectors; ++i) {
        const uint8_t* here = multipliers + i * kFloats;
        const __m512i by = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(here)));
        for (int r = 0; r < kRows; ++r) {
          for (int byte = 0; byte < 2; ++byte) {
            int32_t* to = sums + r * sums_stride + byte * plane + i * kFloats;
            const __m512i product = _mm512_mullo_epi32(products[r][byte][i], by);
            _mm512_storeu_si512(to, group ? _mm512_add_epi32(_mm512_loadu_si512(to), product) : product);
          }
        }
      }
    }
  }

  // Returns a block's weights in int8; int4 is widened to `scratch`.
  const int8_t* in_int8(int64_t block, Scratch& scratch) const {
    const uint8_t* weights = packed(block);
    if constexpr (!kFourBits) return reinterpret_cast<const int8_t*>(weights);
    scratch.resize(size_in() * kColumns);
    const uint8_t* multipliers = multipliers_ + block * size_in() / group_ * kColumns;
    const __m512i four_bits = _mm512_set1_epi8(0x0f);
    // Multiplies two bytes at once. The products are at most 15 * 15, so there is no carry between them.
    const auto times = [&](__m512i bits, const auto& by) {
      return _mm512_sub_epi8(_mm512_mullo_epi16(_mm512_and_si512(bits, four_bits), by.once), by.eight_times);
    };
    for (int64_t k = 0; k < size_in(); multipliers += kColumns) {
      const Multipliers by_low(multipliers), by_high(multipliers + kFloats);
      for (const int64_t end = k + group_; k < end; k += 8, weights += 4 * kColumns) {
        fetch(weights);
        fetch(weights + 2 * kColumns);
        const __m512i low = _mm512_loadu_si512(weights), high = _mm512_loadu_si512(weights + 2 * kColumns);
        int8_t* to = scratch.data() + k * kColumns;  // inputs k to k + 3 of outputs 0 to 15, of the others; k + 4 to k + 7
        _mm512_storeu_si512(to, times(low, by_low));
        _mm512_storeu_si512(to + 2 * kColumns, times(high, by_high));
        _mm512_storeu_si512(to + 4 * kColumns, times(_mm512_srli_epi16(low, 4), by_low));
        _mm512_storeu_si512(to + 6 * kColumns, times(_mm512_srli_epi16(high, 4), by_high));
      }
    }
    return scratch.data();
  }

  // Those of 16 outputs, beside the bytes of their four inputs.
  struct Multipliers {
    __m512i once;         // int16
    __m512i eight_times;  // int8

    explicit Multipliers(const uint8_t* from) {
      const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      once = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
      eight_times = _mm512_or_si512(_mm512_slli_epi16(once, 3), _mm512_slli_epi16(once, 11));
    }
  };

  int64_t group_;
  Inputs16 inputs_;
  const uint8_t *weights_, *multipliers_;
  const float* scales_;
  const int32_t* offsets_;
};

using WeightsInt8 = WeightsIntegers<false>;
using WeightsInt4OfTiles = WeightsIntegers<true>;  // tiles do not end a sum after a unit of inputs, as WeightsInt4 does

}  // namespace
