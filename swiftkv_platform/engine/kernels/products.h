// Products with packed weights: in bfloat16, and in integers of 8 or 4 bits.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kColumns = 32;            // outputs of a block of packed weights
constexpr int64_t kFewRows = 32;            // products of this many rows, or fewer, are multiplied as the weights come
constexpr int64_t kFewRowsBesideTiles = 4;  // the same where the processor has units for tiles of matrices (AMX)
constexpr int64_t kFewRowsWidened = 8;      // and there in int4, which is widened for tiles
constexpr int64_t kSmallRowStep = 4;        // rows that kRowStep leaves are a multiple of this, beside tiles
constexpr int64_t kGroup = 32;              // inputs whose weights in int4 share a multiplier
constexpr int64_t kCachedBytes = 1 << 19;   // inputs that stay in the second-level cache beside a block of weights
constexpr int64_t kMinCachedRows = 64;      // rows that share a block of weights even if they do not

Floats silu(Floats x) {
  return x / (Floats(1.0f) + x.neg().exp_u20());
}

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

// Rows of x in 16 bits, the largest number of each being 32767, as two bytes that are multiplied apart: 8 bits alone lose too
// much where a few inputs are far larger than the others, as in most language models.
class Inputs16 {
 public:
  explicit Inputs16(const Tensor& x) : size_in(x.size(1)), low_(x.numel()), high_(x.numel()), scales_(x.size(0)) {
    const auto* from = x.const_data_ptr<BFloat16>();
    at::parallel_for(0, x.size(0), rows_at_a_time(size_in), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) quantize(from + row * x.stride(0), row);
    });
  }

  const uint8_t* low(int64_t row) const { return low_.data() + row * size_in; }
  // High bytes, 128 added.
  const uint8_t* high(int64_t row) const { return high_.data() + row * size_in; }
  float scale(int64_t row) const { return scales_[row]; }

  const int64_t size_in;

 private:
  // A row that is not finite gets the scale NaN, so that all that is made of it is.
  void quantize(const BFloat16* from, int64_t row) {
    __m512i most = _mm512_setzero_si512();  // bits of bfloat16 without their sign ascend as their numbers
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

  static constexpr float kTop = 32767.0f;

  static __mmask32 mask(int64_t count) { return count >= kHalves ? ~__mmask32{0} : (__mmask32{1} << count) - 1; }

  std::vector<uint8_t> low_, high_;
  std::vector<float> scales_;
};

// Weights in integers; products are sums of int32, so that a row's are exact and do not depend on how many rows there are.
//   int8  [num_blocks, size_in / 4, kColumns, 4]
//   int4  [num_blocks, size_in / 8, kColumns, 4], 8 added: of eight inputs the first four in the low bits. An output's
//         weights are these times `multipliers` [num_blocks, size_in / kGroup, kColumns], which are 1 to 15, so that they
//         fit into int8 too.
// `scales` of the outputs and `offsets`, 128 times the sum of an output's weights, are [num_blocks, kColumns].
template <bool kFourBits>
class WeightsInteger {
 public:
  using Sum = int32_t;
  static constexpr int64_t kPlanes = 2;  // sums of products by low bytes, and by high ones
  static constexpr int64_t kCachedInputs = kCachedBytes / kPlanes;
  using Scratch = std::vector<int8_t>;

  WeightsInteger(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor& offsets,
                 const std::optional<Tensor>& multipliers)
      : inputs_(x),
        weights_(static_cast<const uint8_t*>(packed.const_data_ptr())),
        multipliers_(kFourBits ? multipliers->const_data_ptr<uint8_t>() : nullptr),
        scales_(scales.const_data_ptr<float>()),
        offsets_(offsets.const_data_ptr<int32_t>()) {}

  // Bytes of rows times a block, as int32 [num_rows, kColumns]; those by high bytes lie `plane` behind.
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
    divide_rows<4>(num_rows, kFourBits ? kFewRowsWidened : kFewRowsBesideTiles, product, [&]<int kRows>(int64_t row) {
      few<kRows>(first + row, block, sums + row * sums_stride, sums_stride, plane);
    });
  }

  // kFloats of a row's results from its sums.
  Floats result(const int32_t* sums, int64_t plane, int64_t row, int64_t block, int64_t i) const {
    const int64_t at = block * kColumns + i;
    const __m512i high = _mm512_sub_epi32(_mm512_loadu_si512(sums + plane + i), _mm512_loadu_si512(offsets_ + at));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + i));
    const __m512 both = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), low);
    return Floats(both) * Floats::loadu(scales_ + at) * Floats(inputs_.scale(row));
  }

 private:
  int64_t size_in() const { return inputs_.size_in; }

  template <int kRows>
  void few(int64_t first, int64_t block, int32_t* sums, int64_t sums_stride, int64_t plane) const {
    const uint8_t *low = inputs_.low(first), *high = inputs_.high(first);
    __m512i products[kRows][2][2];  // by low and high bytes, of outputs 0 to 15 and 16 to 31
    for (auto& of_row : products) of_row[0][0] = of_row[0][1] = of_row[1][0] = of_row[1][1] = _mm512_setzero_si512();
    each_four(block, [&](int64_t k, __m512i first_outputs, __m512i others) {
      for (int r = 0; r < kRows; ++r) {
        const __m512i inputs[] = {broadcast(low + r * size_in() + k), broadcast(high + r * size_in() + k)};
        for (int byte = 0; byte < 2; ++byte) {
          products[r][byte][0] = _mm512_dpbusd_epi32(products[r][byte][0], inputs[byte], first_outputs);
          products[r][byte][1] = _mm512_dpbusd_epi32(products[r][byte][1], inputs[byte], others);
        }
      }
    });
    for (int r = 0; r < kRows; ++r) {
      for (int byte = 0; byte < 2; ++byte) {
        int32_t* to = sums + r * sums_stride + byte * plane;
        _mm512_storeu_si512(to, products[r][byte][0]);
        _mm512_storeu_si512(to + kFloats, products[r][byte][1]);
      }
    }
  }

  const int8_t* in_int8(int64_t block, Scratch& scratch) const {
    if constexpr (!kFourBits) {
      const auto* weights = reinterpret_cast<const int8_t*>(weights_ + block * size_in() * kColumns);
      fetch_block(weights, size_in() * kColumns);
      return weights;
    }
    scratch.resize(size_in() * kColumns);
    each_four(block, [&](int64_t k, __m512i of_low, __m512i of_high) {
      _mm512_storeu_si512(scratch.data() + k * kColumns, of_low);
      _mm512_storeu_si512(scratch.data() + (k + 2) * kColumns, of_high);
    });
    return scratch.data();
  }

  // Calls use(k, weights of the inputs k to k + 3 of outputs 0 to 15, and 16 to 31) for all inputs of a block, in int8.
  template <typename Use>
  void each_four(int64_t block, const Use& use) const {
    const uint8_t* weights = weights_ + block * size_in() * kColumns / (kFourBits ? 2 : 1);
    if constexpr (!kFourBits) {
      for (int64_t k = 0; k < size_in(); k += 4, weights += 4 * kColumns) {
        fetch(weights);
        fetch(weights + 2 * kColumns);
        use(k, _mm512_loadu_si512(weights), _mm512_loadu_si512(weights + 2 * kColumns));
      }
      return;
    }
    const uint8_t* multipliers = multipliers_ + block * size_in() / kGroup * kColumns;
    const __m512i four_bits = _mm512_set1_epi8(0x0f);
    // Two bytes of at most 15 times 15 are multiplied at once: neither carries into the other.
    const auto times = [&](__m512i bits, const auto& by) {
      return _mm512_sub_epi8(_mm512_mullo_epi16(_mm512_and_si512(bits, four_bits), by.once), by.eight_times);
    };
    for (int64_t k = 0; k < size_in(); multipliers += kColumns) {
      const Multipliers by_low(multipliers), by_high(multipliers + kFloats);
      for (const int64_t end = k + kGroup; k < end; k += 8, weights += 4 * kColumns) {
        fetch(weights);
        fetch(weights + 2 * kColumns);
        const __m512i low = _mm512_loadu_si512(weights), high = _mm512_loadu_si512(weights + 2 * kColumns);
        use(k, times(low, by_low), times(high, by_high));
        use(k + 4, times(_mm512_srli_epi16(low, 4), by_low), times(_mm512_srli_epi16(high, 4), by_high));
      }
    }
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

  Inputs16 inputs_;
  const uint8_t *weights_, *multipliers_;
  const float* scales_;
  const int32_t* offsets_;
};

// Rows of x [num_tokens, size_in] times all blocks of weights, `kJoined` blocks at a time: finish(row, joined block, result),
// where result(i) is kFloats of its results from the i-th on, of [kJoined, kColumns].
template <int kJoined, typename Weights, typename Finish>
void multiply_blocks(const Weights& weights, int64_t num_tokens, int64_t size_in, int64_t num_blocks,
                     const Finish& finish) {
  const int64_t most = std::max(kMinCachedRows, Weights::kCachedInputs / size_in / kRowStep * kRowStep);
  // Threads share the rows, or where there are few of them the blocks.
  const int64_t row_parts = (num_tokens + most - 1) / most, threads = at::get_num_threads();
  const int64_t block_parts = row_parts >= 4 * threads ? 1 : std::min(num_blocks, threads);
  at::parallel_for(0, row_parts * block_parts, 1, [&](int64_t begin, int64_t end) {
    const int64_t plane = std::min(most, num_tokens) * kJoined * kColumns;
    std::vector<typename Weights::Sum> sums(plane * Weights::kPlanes);
    typename Weights::Scratch scratch;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % row_parts * most, num_rows = std::min(most, num_tokens - first);
      const int64_t part = task / row_parts, last_block = (part + 1) * num_blocks / block_parts;
      for (int64_t block = part * num_blocks / block_parts; block < last_block; ++block) {
        for (int64_t joined = 0; joined < kJoined; ++joined) {
          weights.multiply(first, num_rows, block * kJoined + joined, sums.data() + joined * kColumns, kJoined * kColumns,
                           plane, scratch);
        }
        for (int64_t row = 0; row < num_rows; ++row) {
          finish(first + row, block, [&, own = sums.data() + row * kJoined * kColumns](int64_t i) {
            return weights.result(own, plane, first + row, block * kJoined, i);
          });
        }
      }
    }
    at::native::cpublas::brgemm_release();
  });
}

// The same for weights of any type; in bfloat16 without scales and offsets, in int8 without multipliers.
template <int kJoined, typename Finish>
void multiply_any(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
                  const std::optional<Tensor>& offsets, const std::optional<Tensor>& multipliers, const Finish& finish) {
  const auto run = [&](const auto& weights) {
    multiply_blocks<kJoined>(weights, x.size(0), x.size(1), packed.size(0) / kJoined, finish);
  };
  if (!scales) {
    run(Weights16(x, packed));
  } else if (!multipliers) {
    run(WeightsInteger<false>(x, packed, *scales, *offsets, multipliers));
  } else {
    run(WeightsInteger<true>(x, packed, *scales, *offsets, multipliers));
  }
}

// x [num_tokens, size_in] times packed weights, plus float32 bias [size_out rounded up to blocks] -> [num_tokens,
// size_out].
Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
              const std::optional<Tensor>& offsets, const std::optional<Tensor>& multipliers,
              const std::optional<Tensor>& bias, int64_t size_out) {
  Tensor output = at::empty({x.size(0), size_out}, x.options());
  auto* out = output.data_ptr<BFloat16>();
  const float* added = bias ? bias->const_data_ptr<float>() : nullptr;
  multiply_any<1>(x, packed, scales, offsets, multipliers, [&](int64_t row, int64_t block, const auto& result) {
    const int64_t first = block * kColumns;
    for (int64_t i = 0; i < std::min(kColumns, size_out - first); i += kHalves) {
      Floats low = result(i), high = result(i + kFloats);
      if (added) {
        low = low + Floats::loadu(added + first + i);
        high = high + Floats::loadu(added + first + i + kFloats);
      }
      store(out + row * size_out + first + i, low, high, rest(size_out, first + i));
    }
  });
  return output;
}

// silu(gate) * up of x [num_tokens, size_in]; blocks of packed weights are gate and up in turn -> [num_tokens, size_out].
Tensor gated_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
                    const std::optional<Tensor>& offsets, const std::optional<Tensor>& multipliers, int64_t size_out) {
  Tensor output = at::empty({x.size(0), size_out}, x.options());
  auto* out = output.data_ptr<BFloat16>();
  multiply_any<2>(x, packed, scales, offsets, multipliers, [&](int64_t row, int64_t block, const auto& result) {
    const int64_t first = block * kColumns;
    for (int64_t i = 0; i < std::min(kColumns, size_out - first); i += kHalves) {
      store(out + row * size_out + first + i, silu(result(i)) * result(kColumns + i),
            silu(result(i + kFloats)) * result(kColumns + i + kFloats), rest(size_out, first + i));
    }
  });
  return output;
}

}  // namespace
