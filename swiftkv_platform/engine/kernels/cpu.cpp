// The engine's operators on a CPU in bfloat16, with sums in float32. `__init__.py` builds and verifies them. Tests compare them
// with PyTorch's operators (tests/unit/engine/test_kernels.py, test_attention.py).
//
// `attend` needs a head size that is a multiple of 32, products an even number of inputs. A token's numbers, and a head's, are
// contiguous.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "heads.h"
#include "products.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr double kLog2OfE = 1.4426950408889634;

constexpr int64_t kMinProductQueries = 16;   // with fewer queries, keys are read one by one
constexpr int64_t kQueryBlock = 64;          // queries per tile of scores
constexpr int64_t kKeyBlock = 256;           // keys per tile of scores; the float32 tile fits into the L2 cache
constexpr int64_t kKeyStep = 64;             // the last tile has a multiple of this many keys
constexpr int64_t kMinPart = 256;            // min queries of a chunk per task, since each task packs the keys again

// Keys or values of all slots.
struct Rows {
  const uint8_t* data;
  int64_t head_bytes, row_bytes, dim;
  Format format;

  Rows(const Tensor& rows, int64_t dim, Format format)
      : data(static_cast<const uint8_t*>(rows.const_data_ptr())),
        head_bytes(rows.stride(0) * rows.element_size()),
        row_bytes(rows.stride(1) * rows.element_size()),
        dim(dim),
        format(format) {}

  // Row of a head and slot. The next slot's row follows after row_bytes.
  const uint8_t* at(int64_t head, int64_t slot) const { return data + head * head_bytes + slot * row_bytes; }

  // A head's numbers of adjacent slots, [count, dim]. Other formats than bfloat16 are converted to `buffer`.
  const BFloat16* read(int64_t head, int64_t slot, int64_t count, Numbers<BFloat16>& buffer) const {
    const uint8_t* first = at(head, slot);
    if (format == Format::kBFloat16) return reinterpret_cast<const BFloat16*>(first);
    buffer.resize(count * dim);
    for (int64_t i = 0; i < count; ++i) dequantize(first + i * row_bytes, dim, format, buffer.data() + i * dim);
    return buffer.data();
  }
};

// Queries and context of a sequence, as in `attend`.
struct Sequence {
  int64_t first_query, num_queries, first_run, num_runs;
};

struct Run {
  int64_t first, end;
};

struct Attention {
  const BFloat16* query;
  int64_t query_head, query_token;  // strides
  Rows keys, values;
  const int64_t* positions;
  const Run* runs;
  BFloat16* output;
  int64_t num_heads, heads_per_key, dim, window;
  float scaling;

  const BFloat16* query_at(int64_t row, int64_t head) const {
    return query + row * query_token + head * query_head;
  }
  BFloat16* output_at(int64_t row, int64_t head) const {
    return output + (row * num_heads + head) * dim;
  }
  int64_t first_seen(int64_t row) const {
    return std::max<int64_t>(0, positions[row] + 1 - window);
  }

  // Calls visit(position, slot, count) for each run of adjacent slots with positions begin to end - 1.
  template <typename Visit>
  void each_run(const Sequence& sequence, int64_t begin, int64_t end, const Visit& visit) const {
    int64_t position = 0;
    for (int64_t i = sequence.first_run; i < sequence.first_run + sequence.num_runs && position < end; ++i) {
      const int64_t length = runs[i].end - runs[i].first;
      const int64_t low = std::max(begin, position), high = std::min(end, position + length);
      if (low < high) visit(low, runs[i].first + low - position, high - low);
      position += length;
    }
  }

  void finish(BFloat16* to, const float* sums, float total) const {
    const Floats factor(1.0f / total);
    for (int64_t d = 0; d < dim; d += kHalves) {
      store(to + d, Floats::loadu(sums + d) * factor, Floats::loadu(sums + d + kFloats) * factor);
    }
  }
};

// Online softmax (arXiv 1805.02867): the largest score so far, and the sum of exponentials relative to it.
struct Softmax {
  float largest = kMinusInfinity;
  float total = 0.0f;
};

// 2^x for x <= 0, by a polynomial on [-1/2, 1/2], with an error of 8e-8; 0 below -126, NaN for NaN.
Floats power_of_two(Floats x) {
  const Floats bounded = larger(Floats(-127.0f), x), whole = bounded.round(), rest = bounded - whole;
  Floats power(0.001327645150013268f);
  for (const float next : {0.009675540961325169f, 0.05550713464617729f, 0.24022120237350464f, 0.6931469440460205f, 1.0f}) {
    power = at::vec::fmadd(power, rest, Floats(next));
  }
  const Ints exponent = at::vec::convert_to_int_of_same_size(whole) + Ints(127);  // 0 for -127: the float is 0
  return power * at::vec::cast<float>(exponent << Ints(23));
}

// Weights 2^(score - shift) of count scores (a multiple of kHalves). Returns their sum and the largest score.
template <typename Weight>
std::tuple<float, float> weigh(const float* scores, Weight* weights, int64_t count, float scaling, float shift) {
  const Floats scale(scaling), less(-shift);
  Floats total(0.0f), other_total(0.0f);
  Floats top(kMinusInfinity), other_top = top;
  for (int64_t i = 0; i < count; i += kHalves) {
    const Floats first = Floats::loadu(scores + i), second = Floats::loadu(scores + i + kFloats);
    top = larger(top, first);
    other_top = larger(other_top, second);
    const Floats low = power_of_two(at::vec::fmadd(first, scale, less));
    const Floats high = power_of_two(at::vec::fmadd(second, scale, less));
    store(weights + i, low, high);
    total = total + low;
    other_total = other_total + high;
  }
  return {sum(total + other_total), largest_in(larger(top, other_top))};
}

float largest_of(const float* scores, int64_t count) {
  Floats top(kMinusInfinity), other_top = top;
  for (int64_t i = 0; i < count; i += kHalves) {
    top = larger(top, Floats::loadu(scores + i));
    other_top = larger(other_top, Floats::loadu(scores + i + kFloats));
  }
  return largest_in(larger(top, other_top));
}

// Exponentials of count scores (a multiple of kHalves; masked scores are minus infinity, but not all are masked). Returns the
// factor for earlier sums. Powers of 2 are used: `scaling` includes log2(e). The reference stays the earlier largest score
// unless a new score exceeds it by more than kSlack, because floats are as exact then. So most scores are read only once.
template <typename Weight>
float exponentiate(Softmax& state, const float* scores, Weight* weights, int64_t count, float scaling) {
  constexpr float kSlack = 16.0f;
  if (state.largest != kMinusInfinity) {
    const auto [total, largest] = weigh(scores, weights, count, scaling, state.largest);
    if (largest * scaling <= state.largest + kSlack) {
      state.total += total;
      return 1.0f;
    }
  }
  const float now = std::max(state.largest, largest_of(scores, count) * scaling);
  const auto [total, _] = weigh(scores, weights, count, scaling, now);
  const float factor = std::exp2(state.largest - now);
  state.total = state.total * factor + total;
  state.largest = now;
  return factor;
}

void multiply(float* x, int64_t size, float factor) {
  if (factor == 1.0f) return;
  for (int64_t i = 0; i < size; i += kFloats) (Floats::loadu(x + i) * Floats(factor)).store(x + i);
}

// Keys and values of one head, packed for products in tiles of kKeyBlock positions: keys [dim / 2, kKeyBlock, 2] and values
// [kKeyBlock / 2, dim, 2], so that pairs of summands are adjacent. After the last position there are zeros.
class Tiles {
 public:
  void pack(const Attention& a, const Sequence& sequence, int64_t key_head, int64_t begin, int64_t end) {
    begin_ = begin;
    tile_ = kKeyBlock * a.dim;
    const int64_t size = (end - begin + kKeyBlock - 1) / kKeyBlock * tile_;
    keys_.resize(size);
    values_.resize(size);
    std::fill(keys_.end() - tile_, keys_.end(), BFloat16(0.0f));
    std::fill(values_.end() - tile_, values_.end(), BFloat16(0.0f));
    const int64_t dim = a.dim, pairs = dim / 2;
    a.each_run(sequence, begin, end, [&](int64_t position, int64_t slot, int64_t length) {
      const BFloat16* all_keys = a.keys.read(key_head, slot, length, key_buffer_);
      const BFloat16* all_values = a.values.read(key_head, slot, length, value_buffer_);
      for (int64_t j = 0; j < length; ++j) {
        const int64_t at = position + j - begin, in_tile = at % kKeyBlock;
        const BFloat16* key = all_keys + j * dim;
        const BFloat16* value = all_values + j * dim;
        BFloat16* keys = keys_.data() + at / kKeyBlock * tile_ + in_tile * 2;
        BFloat16* values = values_.data() + at / kKeyBlock * tile_ + in_tile / 2 * dim * 2 + in_tile % 2;
        for (int64_t d = 0; d < pairs; ++d) {
          keys[d * kKeyBlock * 2] = key[2 * d];
          keys[d * kKeyBlock * 2 + 1] = key[2 * d + 1];
        }
        for (int64_t d = 0; d < dim; ++d) values[2 * d] = value[d];
      }
    });
  }

  const BFloat16* keys(int64_t position) const { return keys_.data() + (position - begin_) / kKeyBlock * tile_; }
  const BFloat16* values(int64_t position) const { return values_.data() + (position - begin_) / kKeyBlock * tile_; }

 private:
  int64_t begin_ = 0, tile_ = 0;
  Numbers<BFloat16> keys_, values_, key_buffer_, value_buffer_;
};

struct Workspace {
  Tiles tiles;
  Numbers<float> scratch;
  Numbers<Input> queries, weights;
};

// Sums of kFloats vectors, one per lane.
Floats sum_each(const FloatRegister* x) {
#ifdef CPU_CAPABILITY_AVX512
  __m512 quarters[8], sums[4];
  for (int i = 0; i < 8; ++i) {
    quarters[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d first = _mm512_castps_pd(quarters[2 * i]), second = _mm512_castps_pd(quarters[2 * i + 1]);
    sums[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)),
                            _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
  }
  const auto halve = [](__m512 first, __m512 second) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88), _mm512_shuffle_f32x4(first, second, 0xdd));
  };
  return halve(halve(sums[0], sums[1]), halve(sums[2], sums[3]));
#else
  const auto add_pairs = [](__m256 first, __m256 second) { return _mm256_hadd_ps(first, second); };
  const __m256 first = add_pairs(add_pairs(x[0], x[1]), add_pairs(x[2], x[3]));
  const __m256 second = add_pairs(add_pairs(x[4], x[5]), add_pairs(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31));
#endif
}

// kHalves numbers of a row in any format, without its scale. 8-bit numbers are exact in bfloat16.
template <Format kFormat>
Pairs numbers(const uint8_t* row, int64_t d) {
  if constexpr (kFormat == Format::kBFloat16) {
    return load_pairs(reinterpret_cast<const BFloat16*>(row) + d);
  } else {
    const auto [low, high] = widen(row + d, kFormat);
    return make_pairs(low, high);
  }
}

// scores[r][j] = queries[r] * keys[j] for kRows rows r, padded with zeros to a multiple of kFloats. Prefetches the next keys,
// and the values of these keys.
template <Format kFormat, int kRows>
void score(const BFloat16* const* queries, int64_t dim, const uint8_t* keys, const uint8_t* values, int64_t row_bytes,
           int64_t count, float* scores) {
  for (int64_t j = 0; j < count; j += kFloats) {
    FloatRegister products[kRows][kFloats];
    alignas(64) float scales[kFloats] = {};
    for (int64_t i = 0; i < kFloats; ++i) {
      FloatRegister sums[kRows];
      for (int r = 0; r < kRows; ++r) sums[r] = Floats(0.0f);
      if (const uint8_t* key = keys + (j + i) * row_bytes; j + i < count) {
        if constexpr (kFormat != Format::kBFloat16) scales[i] = scale_of(key, dim);
        for (int64_t d = 0; d < dim; d += kHalves) {
          const uint8_t* here = key + d * (kFormat == Format::kBFloat16 ? sizeof(BFloat16) : 1);
          fetch(here);
          _mm_prefetch(values + (here - keys), _MM_HINT_T0);
          const Pairs some = numbers<kFormat>(key, d);
          for (int r = 0; r < kRows; ++r) sums[r] = add_products(sums[r], some, load_pairs(queries[r] + d));
        }
      }
      for (int r = 0; r < kRows; ++r) products[r][i] = sums[r];
    }
    for (int r = 0; r < kRows; ++r) {
      const Floats sums = sum_each(products[r]);
      (kFormat == Format::kBFloat16 ? sums : sums * Floats::loadu(scales)).store(scores + r * kKeyBlock + j);
    }
  }
}

// outputs[r] += sum over j of weights[r][j] * values[j], for kRows rows r. With an odd count, the weight after the last is 0.
template <Format kFormat, int kRows>
void add_values(float* outputs, int64_t dim, const Input* weights, const uint8_t* values, int64_t row_bytes, int64_t count) {
#ifdef HAS_DOT_PRODUCTS
  int16_t places[kHalves];  // 0, 32, 1, 33 ...: numbers of the first and second row alternate
  for (int16_t i = 0; i < kHalves; ++i) places[i] = i / 2 + i % 2 * kHalves;
  const __m512i ascending = _mm512_loadu_si512(places);
  const __m512i behind = _mm512_add_epi16(ascending, _mm512_set1_epi16(kHalves / 2));
#endif
  for (int64_t d = 0; d < dim; d += kHalves) {
    Floats low[kRows], high[kRows];
    for (int r = 0; r < kRows; ++r) {
      low[r] = Floats::loadu(outputs + r * dim + d);
      high[r] = Floats::loadu(outputs + r * dim + d + kFloats);
    }
#ifdef HAS_DOT_PRODUCTS
    for (int64_t j = 0; j < count; j += 2) {
      const auto first = reinterpret_cast<__m512i>(numbers<kFormat>(values + j * row_bytes, d));
      const auto second =
          j + 1 < count ? reinterpret_cast<__m512i>(numbers<kFormat>(values + (j + 1) * row_bytes, d)) : first;
      const auto pairs_low = reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(first, ascending, second));
      const auto pairs_high = reinterpret_cast<__m512bh>(_mm512_permutex2var_epi16(first, behind, second));
      for (int r = 0; r < kRows; ++r) {
        const auto weight = reinterpret_cast<__m512bh>(broadcast(weights + r * kKeyBlock + j));
        low[r] = add_products(low[r], pairs_low, weight);
        high[r] = add_products(high[r], pairs_high, weight);
      }
    }
#else
    for (int64_t j = 0; j < count; ++j) {
      const auto [value_low, value_high] = numbers<kFormat>(values + j * row_bytes, d);
      for (int r = 0; r < kRows; ++r) {
        const Floats weight(weights[r * kKeyBlock + j]);
        low[r] = at::vec::fmadd(value_low, weight, low[r]);
        high[r] = at::vec::fmadd(value_high, weight, high[r]);
      }
    }
#endif
    for (int r = 0; r < kRows; ++r) store(outputs + r * dim + d, low[r], high[r]);
  }
}

// Attention for a few queries of one sequence and the query heads of one key head. Keys and values are read in place, for up to
// four rows at a time.
template <Format kFormat>
void attend_few(const Attention& a, const Sequence& sequence, int64_t key_head, Workspace& space) {
  static constexpr decltype(&score<kFormat, 1>) score_rows[] = {score<kFormat, 1>, score<kFormat, 2>, score<kFormat, 3>,
                                                                score<kFormat, 4>};
  static constexpr decltype(&add_values<kFormat, 1>) add_rows[] = {add_values<kFormat, 1>, add_values<kFormat, 2>,
                                                                   add_values<kFormat, 3>, add_values<kFormat, 4>};
  constexpr int64_t kMost = 4;
  const int64_t dim = a.dim, num_rows = sequence.num_queries * a.heads_per_key;
  space.scratch.assign(num_rows * dim, 0.0f);
  float* outputs = space.scratch.data();  // [num_rows, dim]
  space.weights.resize(kMost * kKeyBlock);
  std::vector<Softmax> state(num_rows);
  const auto row_of = [&](int64_t r) { return sequence.first_query + r / a.heads_per_key; };
  const auto head_of = [&](int64_t r) { return key_head * a.heads_per_key + r % a.heads_per_key; };

  const int64_t end = a.positions[sequence.first_query + sequence.num_queries - 1] + 1;
  a.each_run(sequence, a.first_seen(sequence.first_query), end, [&](int64_t position, int64_t slot, int64_t length) {
    for (int64_t done = 0; done < length; done += kKeyBlock) {
      const int64_t count = std::min(kKeyBlock, length - done), start = position + done;
      const int64_t padded = (count + kHalves - 1) / kHalves * kHalves;
      const uint8_t *keys = a.keys.at(key_head, slot + done), *values = a.values.at(key_head, slot + done);
      for (int64_t first = 0; first < num_rows; first += kMost) {
        const int64_t rows = std::min(kMost, num_rows - first);
        const BFloat16* queries[kMost];
        float scores[kMost * kKeyBlock];
        for (int64_t r = 0; r < rows; ++r) queries[r] = a.query_at(row_of(first + r), head_of(first + r));
        score_rows[rows - 1](queries, dim, keys, values, a.keys.row_bytes, count, scores);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t row = row_of(first + r);
          float* own = scores + r * kKeyBlock;
          Input* weights = space.weights.data() + r * kKeyBlock;
          const int64_t low = std::clamp<int64_t>(a.first_seen(row) - start, 0, count);
          const int64_t high = std::clamp<int64_t>(a.positions[row] + 1 - start, 0, count);
          if (low >= high) {
            std::fill(weights, weights + padded, Input(0.0f));
            continue;
          }
          std::fill(own, own + low, kMinusInfinity);
          std::fill(own + high, own + padded, kMinusInfinity);
          float* outputs_of_row = outputs + (first + r) * dim;
          if constexpr (kFormat == Format::kBFloat16) {
            multiply(outputs_of_row, dim, exponentiate(state[first + r], own, weights, padded, a.scaling));
          } else {
            float exact[kKeyBlock];
            multiply(outputs_of_row, dim, exponentiate(state[first + r], own, exact, padded, a.scaling));
            for (int64_t j = 0; j < count; ++j) exact[j] *= scale_of(values + j * a.values.row_bytes, dim);
            for (int64_t j = 0; j < padded; j += kHalves) {
              store(weights + j, Floats::loadu(exact + j), Floats::loadu(exact + j + kFloats));
            }
          }
        }
        add_rows[rows - 1](outputs + first * dim, dim, space.weights.data(), values, a.values.row_bytes, count);
      }
    }
  });
  for (int64_t r = 0; r < num_rows; ++r) {
    a.finish(a.output_at(row_of(r), head_of(r)), outputs + r * dim, state[r].total);
  }
}

// Attention for queries of a prompt's chunk and the query heads of one key head: tiles of scores by matrix products, with
// online softmax (FlashAttention). The first tile starts at position `begin`.
void attend_chunk(const Attention& a, const Sequence& sequence, int64_t key_head, int64_t begin, Workspace& space) {
  const int64_t dim = a.dim, last_query = sequence.first_query + sequence.num_queries;
  space.tiles.pack(a, sequence, key_head, begin, a.positions[last_query - 1] + 1);
  space.scratch.resize(kQueryBlock * (dim + kKeyBlock));
  space.queries.resize(kQueryBlock * dim);
  space.weights.resize(kQueryBlock * kKeyBlock);
  float* scores = space.scratch.data();                // [kQueryBlock, kKeyBlock]
  float* outputs = scores + kQueryBlock * kKeyBlock;   // [kQueryBlock, dim]
  Input* queries = space.queries.data();               // [kQueryBlock, dim]
  Input* weights = space.weights.data();               // [kQueryBlock, kKeyBlock]
  for (int64_t first = sequence.first_query; first < last_query; first += kQueryBlock) {
    const int64_t num_queries = std::min(kQueryBlock, last_query - first);
    const int64_t end = a.positions[first + num_queries - 1] + 1;
    const int64_t num_rows = (num_queries + kRowStep - 1) / kRowStep * kRowStep;
    const int64_t skipped = (a.first_seen(first) - begin) / kKeyBlock * kKeyBlock;
    for (int64_t head = key_head * a.heads_per_key; head < (key_head + 1) * a.heads_per_key; ++head) {
      Softmax state[kQueryBlock];
      std::fill(outputs, outputs + num_rows * dim, 0.0f);
      for (int64_t r = 0; r < num_queries; ++r) {
        std::copy_n(a.query_at(first + r, head), dim, queries + r * dim);
      }
      for (int64_t start = begin + skipped; start < end; start += kKeyBlock) {
        const int64_t count = std::min(kKeyBlock, (end - start + kKeyStep - 1) / kKeyStep * kKeyStep);
        product(num_rows, count, dim, dim, kKeyBlock, kKeyBlock, false, queries, space.tiles.keys(start), scores);
        for (int64_t r = 0; r < num_queries; ++r) {
          float* own = scores + r * kKeyBlock;
          Input* to = weights + r * kKeyBlock;
          const int64_t low = std::clamp<int64_t>(a.first_seen(first + r) - start, 0, count);
          const int64_t high = std::clamp<int64_t>(a.positions[first + r] + 1 - start, 0, count);
          if (low >= high) {
            std::fill(to, to + count, Input(0.0f));
            continue;
          }
          std::fill(own, own + low, kMinusInfinity);
          std::fill(own + high, own + count, kMinusInfinity);
          multiply(outputs + r * dim, dim, exponentiate(state[r], own, to, count, a.scaling));
        }
        product(num_rows, dim, count, kKeyBlock, dim, dim, true, weights, space.tiles.values(start), outputs);
      }
      for (int64_t r = 0; r < num_queries; ++r) {
        a.finish(a.output_at(first + r, head), outputs + r * dim, state[r].total);
      }
    }
  }
}

struct Task {
  Sequence sequence;
  int64_t key_head, begin;
  bool products;
};

// Makes a task per sequence and key head. If there are few, the queries of chunks are divided too, so that threads finish at
// about the same time. Blocks of queries and tiles do not depend on the number of threads, so neither do the results.
std::vector<Task> divide(const Attention& a, const Tensor& sequences, int64_t num_kv_heads) {
  const auto* all = reinterpret_cast<const Sequence*>(sequences.const_data_ptr<int64_t>());
  const int64_t whole = sequences.size(0) * num_kv_heads, threads = num_threads();
  const int64_t parts = threads == 1 ? 1 : (kPartsOfThread * threads + whole - 1) / whole;
  std::vector<Task> tasks;
  for (int64_t i = 0; i < sequences.size(0); ++i) {
    const Sequence& sequence = all[i];
    const int64_t begin = a.first_seen(sequence.first_query);
    const bool products = sequence.num_queries >= kMinProductQueries;
    const int64_t size = std::max(kMinPart, (sequence.num_queries / parts + kQueryBlock - 1) / kQueryBlock * kQueryBlock);
    // The last queries first: they attend to the most keys.
    for (int64_t part = (sequence.num_queries - 1) / size; part >= 0; --part) {
      Sequence some = sequence;
      some.first_query += part * size;
      some.num_queries = std::min(size, sequence.num_queries - part * size);
      const int64_t before = (a.first_seen(some.first_query) - begin) / kKeyBlock * kKeyBlock;
      for (int64_t head = 0; head < num_kv_heads; ++head) tasks.push_back({some, head, begin + before, products});
    }
  }
  return tasks;
}

// Attention of a flat batch to paged contexts.
//   query      [1, num_heads, num_tokens, head_dim]
//   keys       [num_kv_heads, num_slots, head_dim or bytes of the format], values likewise
//   sequences  int64 [num_sequences, 4]: first query, number of queries, first run, number of runs
//   positions  int64 [num_tokens], of each query in its sequence, ascending
//   runs       int64 [num_runs, 2]: adjacent slots [first, end), in the order of the contexts
//   window     number of tokens that a query attends to, including itself
// -> [1, num_tokens, num_heads, head_dim]
Tensor attend(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& sequences,
              const Tensor& positions, const Tensor& runs, double scaling, int64_t window, int64_t format) {
  const int64_t num_heads = query.size(1), dim = query.size(3), num_kv_heads = keys.size(0);
  Tensor output = at::empty({1, query.size(2), num_heads, dim}, query.options());
  const Attention attention{
      query.const_data_ptr<BFloat16>(), query.stride(1), query.stride(2),
      Rows(keys, dim, static_cast<Format>(format)), Rows(values, dim, static_cast<Format>(format)),
      positions.const_data_ptr<int64_t>(), reinterpret_cast<const Run*>(runs.const_data_ptr<int64_t>()),
      output.data_ptr<BFloat16>(), num_heads, num_heads / num_kv_heads, dim, window, static_cast<float>(scaling * kLog2OfE)};
  const std::vector<Task> tasks = divide(attention, sequences, num_kv_heads);
  const auto few = attention.keys.format == Format::kBFloat16 ? attend_few<Format::kBFloat16>
                   : attention.keys.format == Format::kFloat8 ? attend_few<Format::kFloat8>
                                                              : attend_few<Format::kInt8>;
  Threads::shared().run(tasks.size(), [&](int64_t i) {
    static thread_local Workspace space;  // per thread, because its buffers are large
    const auto& [sequence, key_head, begin, products] = tasks[i];
    if (products) {
      attend_chunk(attention, sequence, key_head, begin, space);
      release_products();
    } else {
      few(attention, sequence, key_head, space);
    }
  });
  return output;
}

// Attention from projections [num_tokens, query heads, key heads, value heads]: normalizes and rotates heads, writes keys and
// values to the cache, and attends.
//   query_at, key_at  offsets of the query heads and the key heads; value heads follow the key heads
//   slots             int64 [num_tokens]: slots of keys and values; none: they are already written
// -> [num_tokens, num_heads * head_dim]
Tensor attend_projected(const Tensor& projected, int64_t num_heads, int64_t query_at, int64_t key_at,
                        const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm, double epsilon,
                        const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                        const std::optional<Tensor>& slots, const Tensor& keys, const Tensor& values, const Tensor& sequences, const Tensor& positions,
                        const Tensor& runs, double scaling, int64_t window, int64_t format) {
  const int64_t num_tokens = projected.size(0), num_kv_heads = keys.size(0);
  const int64_t dim = format ? keys.size(2) - static_cast<int64_t>(sizeof(BFloat16)) : keys.size(2);
  Tensor queries = at::empty({1, num_tokens, num_heads, dim}, projected.options());
  auto* to = queries.data_ptr<BFloat16>();
  const auto* from = projected.const_data_ptr<BFloat16>();
  const std::optional<Rotation> rotation = cos ? std::optional<Rotation>(Rotation(*cos, *sin)) : std::nullopt;
  const int64_t stride = projected.stride(0);
  const Heads of_queries{from + query_at, stride, dim, query_norm, static_cast<float>(epsilon), rotation};
  const int64_t* written = slots ? slots->const_data_ptr<int64_t>() : nullptr;
  const KeyValueHeads stored{{from + key_at, stride, dim, key_norm, static_cast<float>(epsilon), rotation},
                             num_kv_heads,
                             Slots(keys, written, static_cast<Format>(format)),
                             Slots(values, written, static_cast<Format>(format))};
  share(num_tokens, rows_at_a_time((num_heads + 2 * num_kv_heads) * dim), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < num_heads; ++head) {
        of_queries.prepare(token, head, to + (token * num_heads + head) * dim);
      }
      if (written) stored.put(token);
    }
  });
  return attend(queries.transpose(1, 2), keys, values, sequences, positions, runs, scaling, window, format)
      .view({num_tokens, num_heads * dim});
}

using Optionals = c10::List<std::optional<Tensor>>;

// Runs consecutive layers, each y = x + attention(norm(x)), then y + MLP(norm(y)). Products evict Python's data from the caches,
// so a decode step runs no Python between them.
//   weights    per layer: packed weight, scales, offsets, multipliers and bias of its products (queries, keys and values;
//              output; gate and up; down); norms before attention, before the MLP, of query heads and of key heads
//   sizes      per layer: outputs of the products, number of query heads, `query_at`, `key_at` and `window`
//   factors    per layer: epsilons of the norms before attention, before the MLP and of heads; `scaling`
//   rotations  per layer: cosines and sines, or neither
//   slots, keys, values  per layer, as in `attend_projected`
// -> [num_tokens, hidden_size]
Tensor layers(const Tensor& x, const Optionals& weights, at::IntArrayRef sizes, at::ArrayRef<double> factors,
              const Optionals& rotations, const Optionals& slots, at::TensorList keys, at::TensorList values,
              const Tensor& sequences, const Tensor& positions, const Tensor& runs, int64_t format) {
  constexpr int64_t kProduct = 5, kWeights = 4 * kProduct + 4, kSizes = 8, kFactors = 4;
  const auto count = static_cast<int64_t>(keys.size());
  Tensor hidden = x;
  for (int64_t i = 0; i < count; ++i) {
    const auto of = [&](int64_t at) { return weights.get(i * kWeights + at); };
    const int64_t* size = sizes.data() + i * kSizes;
    const double* factor = factors.data() + i * kFactors;
    const auto product = [&](const Tensor& input, int64_t at, const std::optional<Tensor>& norm, double epsilon,
                             const std::optional<Tensor>& residual) {
      const int64_t first = at * kProduct;
      return linear(input, *of(first), of(first + 1), of(first + 2), of(first + 3), of(first + 4), size[at], norm, epsilon,
                    residual);
    };
    const int64_t norms = 4 * kProduct, gated = 2 * kProduct;
    const Tensor projected = product(hidden, 0, of(norms), factor[0], std::nullopt);
    const Tensor attended =
        attend_projected(projected, size[4], size[5], size[6], of(norms + 2), of(norms + 3), factor[2], rotations.get(2 * i),
                         rotations.get(2 * i + 1), slots.get(i), keys[i], values[i], sequences, positions, runs, factor[3],
                         size[7], format);
    hidden = product(attended, 1, std::nullopt, 0.0, hidden);
    const Tensor inner = gated_linear(rms_norm(hidden, *of(norms + 1), factor[1]), *of(gated), of(gated + 1), of(gated + 2),
                                      of(gated + 3), size[2]);
    hidden = product(inner, 3, std::nullopt, 0.0, hidden);
  }
  return hidden;
}

void use_threads(int64_t count) {
  threads_of_kernels = count;
}

#ifdef HAS_DOT_PRODUCTS
// Chooses the products for processors with tiles, or for others; brgemm runs on both.
void use_tiles(bool use) {
  uses_tiles = use;
}
#endif

std::string instructions() {
#ifdef HAS_DOT_PRODUCTS
  return uses_tiles ? "AMX" : "AVX-512 BF16";
#elif defined(CPU_CAPABILITY_AVX512)
  return "AVX-512";
#else
  return "AVX2";
#endif
}

TORCH_LIBRARY(swiftkv_cpu, library) {
  library.def("instructions() -> str", instructions);
  library.def("use_threads(int count) -> ()", use_threads);
#ifdef HAS_DOT_PRODUCTS
  library.def("use_tiles(bool use) -> ()", use_tiles);
#endif
  library.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
  library.def(
      "linear(Tensor x, Tensor packed, Tensor? scales, Tensor? offsets, Tensor? multipliers, Tensor? bias, int size_out, "
      "Tensor? norm=None, float epsilon=0.0, Tensor? residual=None) -> Tensor");
  library.def(
      "logits(Tensor x, Tensor packed, Tensor? scales, Tensor? offsets, Tensor? multipliers, Tensor? bias, int size_out) -> "
      "Tensor");
  library.def(
      "gated_linear(Tensor x, Tensor packed, Tensor? scales, Tensor? offsets, Tensor? multipliers, int size_out) -> Tensor");
  library.def("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor");
  library.def("write(Tensor(a!) rows, Tensor slots, Tensor x, int format) -> ()");
  library.def(
      "write_projected(Tensor projected, Tensor[] norms, float epsilon, Tensor? cos, Tensor? sin, Tensor slots, "
      "Tensor(a!)[] keys, Tensor(b!)[] values, int format) -> ()");
  library.def(
      "attend(Tensor query, Tensor keys, Tensor values, Tensor sequences, Tensor positions, Tensor runs, float scaling, "
      "int window, int format) -> Tensor");
  library.def(
      "layers(Tensor x, Tensor?[] weights, int[] sizes, float[] factors, Tensor?[] rotations, Tensor?[] slots, "
      "Tensor(a!)[] keys, Tensor(b!)[] values, Tensor sequences, Tensor positions, Tensor runs, int format) -> Tensor");
}

TORCH_LIBRARY_IMPL(swiftkv_cpu, CPU, library) {
  library.impl("rms_norm", rms_norm);
  library.impl("linear", linear);
  library.impl("logits", logits);
  library.impl("gated_linear", gated_linear);
  library.impl("rotate", rotate);
  library.impl("write", write);
  library.impl("write_projected", write_projected);
  library.impl("attend", attend);
  library.impl("layers", layers);
}

}  // namespace
