// Products with packed weights: in bfloat16, and in integers of 8 or 4 bits.

#pragma once

#include <ATen/ops/empty.h>

#include <optional>
#include <vector>

#include "heads.h"
#include "int4.h"
#include "threads.h"
#ifdef HAS_DOT_PRODUCTS
#include "integers.h"
#else
#include "vector_products.h"
#endif

namespace {

Floats silu(Floats x) {
  return x / (Floats(1.0f) + x.neg().exp_u20());
}

// Multiplies rows of x [num_tokens, size_in] by all blocks of weights, and joins `kJoined` blocks: calls finish(row, joined
// block, result), where result(i) returns kFloats results from index i on of [kJoined, kColumns].
template <int kJoined, typename Weights, typename Finish>
void multiply_blocks(const Weights& weights, int64_t num_tokens, int64_t size_in, int64_t num_blocks,
                     const Finish& finish) {
  const int64_t most = std::max(kMinCachedRows, Weights::kCachedInputs / size_in / kRowStep * kRowStep);
  // Divide the rows among threads or, if there are few rows, the blocks.
  const int64_t row_parts = (num_tokens + most - 1) / most, parts = kPartsOfThread * num_threads();
  const int64_t block_parts = row_parts >= parts ? 1 : std::min(num_blocks, parts);
  Threads::shared().run(row_parts * block_parts, [&](int64_t task) {
    const int64_t stride = kJoined * kColumns, plane = std::min(most, num_tokens) * stride;
    Numbers<typename Weights::Sum> sums(plane * Weights::kPlanes);
    typename Weights::Scratch scratch;
    const int64_t first = task % row_parts * most, num_rows = std::min(most, num_tokens - first);
    const int64_t part = task / row_parts, last_block = (part + 1) * num_blocks / block_parts;
    for (int64_t block = part * num_blocks / block_parts; block < last_block; ++block) {
      for (int64_t joined = 0; joined < kJoined; ++joined) {
        weights.multiply(first, num_rows, block * kJoined + joined, sums.data() + joined * kColumns, stride, plane, scratch);
      }
      for (int64_t row = 0; row < num_rows; ++row) {
        finish(first + row, block, [&, own = sums.data() + row * stride](int64_t at) {
          return weights.result(own, plane, first + row, block * kJoined, at);
        });
      }
    }
    release_products();
  });
}

// `multiply_blocks` for weights of any type: bfloat16 has no scales and offsets, int8 has no multipliers.
template <int kJoined, typename Finish>
void multiply_any(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
                  const std::optional<Tensor>& offsets, const std::optional<Tensor>& multipliers, const Finish& finish) {
  const auto run = [&](const auto& weights) {
    multiply_blocks<kJoined>(weights, x.size(0), x.size(1), packed.size(0) / kJoined, finish);
  };
  if (!scales) {
    run(Weights16(x, packed));
  } else if (!multipliers) {
    run(WeightsInt8(x, packed, *scales, *offsets));
#ifdef HAS_DOT_PRODUCTS
  } else if (uses_tiles) {
    run(WeightsInt4OfTiles(x, packed, *scales, *offsets, *multipliers));
#endif
  } else {
    run(WeightsInt4(x, packed, *scales, *multipliers));
  }
}

// y = x W^T + b for x [num_tokens, size_in], packed weights and float32 bias [size_out rounded up to blocks]. Calls write(row,
// first output, low vector, high vector) for each two vectors of results.
template <typename Write>
void linear_to(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
               const std::optional<Tensor>& offsets, const std::optional<Tensor>& multipliers,
               const std::optional<Tensor>& bias, int64_t size_out, const Write& write) {
  const float* added = bias ? bias->const_data_ptr<float>() : nullptr;
  multiply_any<1>(x, packed, scales, offsets, multipliers, [&](int64_t row, int64_t block, const auto& result) {
    const int64_t first = block * kColumns;
    for (int64_t i = 0; i < std::min(kColumns, size_out - first); i += kHalves) {
      Floats low = result(i), high = result(i + kFloats);
      if (added) {
        low = low + Floats::loadu(added + first + i);
        high = high + Floats::loadu(added + first + i + kFloats);
      }
      write(row, first + i, low, high);
    }
  });
}

// y = norm(x) W^T + b + residual in bfloat16 [num_tokens, size_out]; norm and residual are optional.
Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
              const std::optional<Tensor>& offsets, const std::optional<Tensor>& multipliers,
              const std::optional<Tensor>& bias, int64_t size_out, const std::optional<Tensor>& norm, double epsilon,
              const std::optional<Tensor>& residual) {
  Tensor output = at::empty({x.size(0), size_out}, x.options());
  auto* out = output.data_ptr<BFloat16>();
  const auto* more = residual ? residual->const_data_ptr<BFloat16>() : nullptr;
  const int64_t stride = residual ? residual->stride(0) : 0;
  const Tensor input = norm ? rms_norm(x, *norm, epsilon) : x;
  linear_to(input, packed, scales, offsets, multipliers, bias, size_out, [&](int64_t row, int64_t i, Floats low, Floats high) {
    const int64_t count = rest(size_out, i);
    if (more) {  // round the product to bfloat16 before the sum, as without a residual
      const auto [product_low, product_high] = at::vec::convert_bfloat16_float(round(low, high));
      const auto [more_low, more_high] = load(more + row * stride + i, count);
      low = product_low + more_low;
      high = product_high + more_high;
    }
    store(out + row * size_out + i, low, high, count);
  });
  return output;
}

// y = x W^T + b in float32.
Tensor logits(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
              const std::optional<Tensor>& offsets, const std::optional<Tensor>& multipliers,
              const std::optional<Tensor>& bias, int64_t size_out) {
  Tensor output = at::empty({x.size(0), size_out}, x.options().dtype(at::kFloat));
  auto* out = output.data_ptr<float>();
  linear_to(x, packed, scales, offsets, multipliers, bias, size_out, [&](int64_t row, int64_t i, Floats low, Floats high) {
    const int64_t count = rest(size_out, i);
    low.store(out + row * size_out + i, static_cast<int>(std::min(count, kFloats)));
    if (count > kFloats) high.store(out + row * size_out + i + kFloats, static_cast<int>(count - kFloats));
  });
  return output;
}

// silu(x G^T) * x U^T for x [num_tokens, size_in] -> [num_tokens, size_out]. Packed blocks of gate and up alternate.
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
