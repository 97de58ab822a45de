// Processing of heads between products and attention: norms, RoPE, and writes to the cache.

#pragma once

#include <ATen/ops/empty.h>
#include <c10/util/Float8_e4m3fn.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace {

// RMSNorm of a row of `size` numbers. `scale`: float32, padded to whole vectors.
void normalize(const BFloat16* from, const float* scale, float epsilon, int64_t size, BFloat16* to) {
  Floats squares(0.0f);
  for (int64_t i = 0; i < size; i += kHalves) {
    const auto [low, high] = load(from + i, rest(size, i));
    squares = at::vec::fmadd(low, low, squares);
    squares = at::vec::fmadd(high, high, squares);
  }
  const Floats factor(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + epsilon));
  for (int64_t i = 0; i < size; i += kHalves) {
    const auto [low, high] = load(from + i, rest(size, i));
    store(to + i, low * factor * Floats::loadu(scale + i), high * factor * Floats::loadu(scale + i + kFloats),
          rest(size, i));
  }
}

// x [..., size], weight float32 [size rounded up to whole vectors] -> [..., size].
Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  const Tensor input = x.contiguous();
  Tensor output = at::empty(input.sizes(), input.options());
  const int64_t size = input.size(-1);
  const auto* in = input.const_data_ptr<BFloat16>();
  const auto* scale = weight.const_data_ptr<float>();
  auto* out = output.data_ptr<BFloat16>();
  share(input.numel() / size, rows_at_a_time(size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      normalize(in + row * size, scale, static_cast<float>(epsilon), size, out + row * size);
    }
  });
  return output;
}

// RoPE of a head's first `size` dimensions, where dimension j pairs with j + size / 2. Cosines, sines: [1, num_tokens, size].
struct Rotation {
  const BFloat16 *cosines, *sines;
  int64_t cosines_stride, sines_stride, size;

  Rotation(const Tensor& cos, const Tensor& sin)
      : cosines(cos.const_data_ptr<BFloat16>()),
        sines(sin.const_data_ptr<BFloat16>()),
        cosines_stride(cos.stride(1)),
        sines_stride(sin.stride(1)),
        size(cos.size(2)) {}

  // Rotates a head of a token; `to` may be `from`: (a, b) -> (a cos - b sin, b cos + a sin).
  void apply(const BFloat16* from, int64_t token, BFloat16* to) const {
    const BFloat16 *c = cosines + token * cosines_stride, *s = sines + token * sines_stride;
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += kHalves) {
      const int64_t count = rest(half, i);
      const auto [a_low, a_high] = load(from + i, count);
      const auto [b_low, b_high] = load(from + half + i, count);
      const auto [ca_low, ca_high] = load(c + i, count);
      const auto [cb_low, cb_high] = load(c + half + i, count);
      const auto [sa_low, sa_high] = load(s + i, count);
      const auto [sb_low, sb_high] = load(s + half + i, count);
      store(to + i, a_low * ca_low - b_low * sa_low, a_high * ca_high - b_high * sa_high, count);
      store(to + half + i, b_low * cb_low + a_low * sb_low, b_high * cb_high + a_high * sb_high, count);
    }
  }
};

// RoPE: x [1, num_heads, num_tokens, head_dim], cos and sin [1, num_tokens, head_dim] -> [1, num_heads, num_tokens,
// head_dim], tokens first in memory.
Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const int64_t num_heads = x.size(1), num_tokens = x.size(2), dim = x.size(3);
  Tensor output = at::empty({1, num_tokens, num_heads, dim}, x.options());
  const auto* in = x.const_data_ptr<BFloat16>();
  auto* out = output.data_ptr<BFloat16>();
  const Rotation rotation(cos, sin);
  share(num_tokens, rows_at_a_time(num_heads * dim), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < num_heads; ++head) {
        rotation.apply(in + head * x.stride(1) + token * x.stride(2), token, out + (token * num_heads + head) * dim);
      }
    }
  });
  return output.transpose(1, 2);
}

// Format of a row of the cache: the numbers of one head and token (model/cache.py).
enum class Format : int64_t {
  kBFloat16,
  kFloat8,  // e4m3, then a bfloat16 scale
  kInt8,    // likewise
};

constexpr float kFloat8Shift = 0x1p120f;  // factor between e4m3 and its bits in those of a float
constexpr float kLargest = 0x1.fep127f * (1.0f - 1.0f / 16.0f);  // larger numbers saturate, since scales are rounded up

void quantize(const BFloat16* from, int64_t dim, Format format, uint8_t* row) {
  float largest = 0.0f;
  bool finite = true;
  for (int64_t d = 0; d < dim; ++d) {
    const float x = from[d];
    finite = finite && std::isfinite(x);
    largest = std::max(largest, std::abs(x));
  }
  const float top = format == Format::kFloat8 ? 448.0f : 127.0f;
  uint32_t bits = c10::detail::fp32_to_bits(std::max(std::min(largest, kLargest) / top, 0x1p-126f));
  const float scale = c10::detail::fp32_from_bits((bits + 0xFFFF) & ~uint32_t{0xFFFF});
  for (int64_t d = 0; d < dim; ++d) {
    const float x = std::clamp<float>(from[d], -kLargest, kLargest) / scale;
    row[d] = !finite                      ? 0
             : format == Format::kFloat8 ? c10::Float8_e4m3fn(x).x
                                          : static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(x)));
  }
  const BFloat16 stored(finite ? scale : std::numeric_limits<float>::quiet_NaN());
  std::memcpy(row + dim, &stored, sizeof stored);
}

// Widens kFloats numbers of a row in 8 bits, without its scale.
Floats widen_some(const uint8_t* from, Format format) {
  const Ints numbers = at::vec::convert_to_int32<int8_t>(reinterpret_cast<const int8_t*>(from));
  if (format == Format::kInt8) return at::vec::convert_to_fp_of_same_size<float>(numbers);
  const Ints bits = (numbers << Ints(20)) & Ints(static_cast<int32_t>(0x87F00000));
  return at::vec::cast<float>(bits) * Floats(kFloat8Shift);
}

// Widens kHalves numbers.
std::tuple<Floats, Floats> widen(const uint8_t* from, Format format) {
  return {widen_some(from, format), widen_some(from + kFloats, format)};
}

float scale_of(const uint8_t* row, int64_t dim) {
  BFloat16 stored;
  std::memcpy(&stored, row + dim, sizeof stored);
  return stored;
}

void dequantize(const uint8_t* row, int64_t dim, Format format, BFloat16* to) {
  const Floats scale(scale_of(row, dim));
  for (int64_t d = 0; d < dim; d += kHalves) {
    const auto [low, high] = widen(row + d, format);
    store(to + d, low * scale, high * scale);
  }
}

// Slots of the cache to which tokens' keys or values are written: rows [num_heads, num_slots, dim or bytes].
struct Slots {
  uint8_t* rows;
  const int64_t* slots;
  int64_t head_bytes, row_bytes;
  Format format;

  Slots(const Tensor& rows, const int64_t* slots, Format format)
      : rows(static_cast<uint8_t*>(rows.data_ptr())),
        slots(slots),
        head_bytes(rows.stride(0) * rows.element_size()),
        row_bytes(rows.stride(1) * rows.element_size()),
        format(format) {}

  void put(const BFloat16* from, int64_t dim, int64_t head, int64_t token) const {
    uint8_t* row = rows + head * head_bytes + slots[token] * row_bytes;
    if (format == Format::kBFloat16) {
      std::memcpy(row, from, dim * sizeof *from);
    } else {
      quantize(from, dim, format, row);
    }
  }
};

// Writes x [num_heads, num_tokens, dim] to the slots [num_tokens] of rows [num_heads, num_slots, dim or bytes].
void write(Tensor& rows, const Tensor& slots, const Tensor& x, int64_t format) {
  const int64_t num_heads = x.size(0), num_tokens = x.size(1), dim = x.size(2);
  const auto* in = x.const_data_ptr<BFloat16>();
  const Slots to(rows, slots.const_data_ptr<int64_t>(), static_cast<Format>(format));
  share(num_tokens, rows_at_a_time(num_heads * dim), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < num_heads; ++head) {
        to.put(in + head * x.stride(0) + token * x.stride(1), dim, head, token);
      }
    }
  });
}

// Adjacent heads in the projections of tokens, with an optional norm (one for all heads, as in rms_norm) and rotation.
struct Heads {
  const BFloat16* projected;
  int64_t stride, dim;
  std::optional<Tensor> norm;
  float epsilon;
  const std::optional<Rotation>& rotation;

  void prepare(int64_t token, int64_t head, BFloat16* to) const {
    const BFloat16* from = projected + token * stride + head * dim;
    if (norm) {
      normalize(from, norm->const_data_ptr<float>(), epsilon, dim, to);
    } else {
      std::memcpy(to, from, dim * sizeof *from);
    }
    if (rotation) rotation->apply(to, token, to);
  }
};

// Heads of keys, and the heads of values after them, in the projections of tokens, with a layer's slots for them.
struct KeyValueHeads {
  Heads keys;
  int64_t count;
  Slots key_slots, value_slots;

  void put(int64_t token) const {
    thread_local std::vector<BFloat16> key;
    key.resize(keys.dim);
    const BFloat16* values = keys.projected + token * keys.stride + count * keys.dim;
    for (int64_t head = 0; head < count; ++head) {
      keys.prepare(token, head, key.data());
      key_slots.put(key.data(), keys.dim, head, token);
      value_slots.put(values + head * keys.dim, keys.dim, head, token);
    }
  }
};

constexpr int64_t kTokensAtATime = 16;  // tokens whose projections for all layers fit into a core's cache

// Writes keys and values of several layers, projected [num_tokens, layers * (key heads, value heads)], to slots [num_tokens]
// of each layer's rows. `norms`: as in rms_norm, one per layer, or empty.
void write_projected(const Tensor& projected, at::TensorList norms, double epsilon, const std::optional<Tensor>& cos,
                     const std::optional<Tensor>& sin, const Tensor& slots, at::TensorList keys, at::TensorList values,
                     int64_t format) {
  const int64_t num_tokens = projected.size(0), num_layers = static_cast<int64_t>(keys.size()), num_heads = keys[0].size(0);
  const int64_t dim = projected.size(1) / (2 * num_layers * num_heads);
  const std::optional<Rotation> rotation = cos ? std::optional<Rotation>(Rotation(*cos, *sin)) : std::nullopt;
  const auto* from = projected.const_data_ptr<BFloat16>();
  const auto* written = slots.const_data_ptr<int64_t>();
  std::vector<KeyValueHeads> layers;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const std::optional<Tensor> norm = norms.empty() ? std::nullopt : std::optional<Tensor>(norms[layer]);
    layers.push_back({{from + 2 * layer * num_heads * dim, projected.stride(0), dim, norm, static_cast<float>(epsilon), rotation},
                      num_heads,
                      Slots(keys[layer], written, static_cast<Format>(format)),
                      Slots(values[layer], written, static_cast<Format>(format))});
  }
  share(num_tokens, kTokensAtATime, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kTokensAtATime) {
      for (const KeyValueHeads& layer : layers) {
        for (int64_t token = first; token < std::min(first + kTokensAtATime, end); ++token) layer.put(token);
      }
    }
  });
}

}  // namespace
