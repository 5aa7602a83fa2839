// The two operations of a step that XLA's CPU backend leaves far below what the machine can do.
//
// matmul: XLA multiplies one row on one core, and turns the weights round for a few. Here all threads share
// the outputs, and weights, which lie in panels (cpu.py), pass from memory once and in order.
//
// attention: XLA copies every key and value out of its page before use. Here they are read where they lie.

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "cpu_common.h"

namespace {

// ---- x [m, k] times w [n, k] transposed; w lies in panels [n / kPanel, k, kPanel]

constexpr int kVectors = 2;  // in a row of a panel
constexpr int kPanel = kVectors * kLanes;
#if defined(__aarch64__) || defined(__AVX512F__)
constexpr int kTile = 8;  // kTile x kVectors sums fit into the registers
#else
constexpr int kTile = 6;
#endif
constexpr int kBlockRows = 8 * kTile;  // of x, that stay in a near cache while weights pass by
constexpr int64_t kBlockDepth = 8192 / kPanel;  // of a panel, so that it stays in the nearest

// Some numbers of a row, each to be multiplied with a vector: Arm takes it from a register, x86 from memory.
#if defined(__aarch64__)
using Numbers = Vector;
Numbers Take(const float* from) { return Load(from); }
#else
using Numbers = const float*;
Numbers Take(const float* from) { return from; }
#endif

// y [M, kPanel] (+)= x [M, depth] times a panel [depth, kPanel]; depth is a multiple of kLanes.
template <int M>
void MultiplyTile(const float* x, int64_t k, const float* panel, int64_t depth, bool add, float* y, int64_t n) {
  Vector sums[M][kVectors] = {};
  for (int64_t i = 0; i < depth; i += kLanes) {
    Numbers rows[M];
#pragma GCC unroll 8
    for (int a = 0; a < M; ++a) rows[a] = Take(x + a * k + i);
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) {
      Vector weights[kVectors];
#pragma GCC unroll 2
      for (int b = 0; b < kVectors; ++b) weights[b] = Load(panel + (i + j) * kPanel + b * kLanes);
#pragma GCC unroll 8
      for (int a = 0; a < M; ++a)
#pragma GCC unroll 2
        for (int b = 0; b < kVectors; ++b) sums[a][b] += weights[b] * rows[a][j];
    }
  }
#pragma GCC unroll 8
  for (int a = 0; a < M; ++a)
#pragma GCC unroll 2
    for (int b = 0; b < kVectors; ++b) {
      float* to = y + a * n + b * kLanes;
      Store(to, add ? Load(to) + sums[a][b] : sums[a][b]);
    }
}

// The same for any number of rows, in tiles of at most M.
template <int M>
void MultiplyRows(const float* x, int64_t m, int64_t k, const float* panel, int64_t depth, bool add, float* y,
                  int64_t n) {
  for (; m >= M; m -= M, x += M * k, y += M * n) MultiplyTile<M>(x, k, panel, depth, add, y, n);
  if constexpr (M > 1) MultiplyRows<M - 1>(x, m, k, panel, depth, add, y, n);
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::BufferR3<ffi::F32> panels,
                    ffi::ResultBufferR2<ffi::F32> y, bool gated) {
  const float *all_rows = x.typed_data(), *all_panels = panels.typed_data();
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1];
  auto multiply = [=](int64_t row, int64_t num_rows, int64_t p, float* out, int64_t stride) {
    const float *rows = all_rows + row * k, *panel = all_panels + p * k * kPanel;
    for (int64_t i = 0; i < k; i += kBlockDepth)
      MultiplyRows<kTile>(rows + i, num_rows, k, panel + i * kPanel, std::min(kBlockDepth, k - i), i > 0, out, stride);
  };
  RunProduct<kPanel, kBlockRows>(pool, panels.dimensions()[0], gated, y->typed_data(), m, y->dimensions()[1], multiply);
  return ffi::Error::Success();
}

// ---- attention through the pages, as kernels/attention.py tells it; k and v have been written

constexpr int kKeys = 64;     // scored at a time
constexpr int kQueries = 16;  // of one KV head that share their reading: rows of one sequence x query heads

// What is left when a vector's halves are put together with Op until there are four numbers.
typedef float Four __attribute__((vector_size(4 * sizeof(float)), aligned(alignof(float)), may_alias));

template <typename Op>
Four ToFour(Vector v, Op op) {
  Four four = reinterpret_cast<const Four&>(v);
#pragma GCC unroll 4
  for (int i = 1; i < kLanes / 4; ++i) four = op(four, reinterpret_cast<const Four*>(&v)[i]);
  return four;
}

// The sum of each of four vectors.
Four Sums(const Vector (&v)[4]) {
  Four f[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) f[i] = ToFour(v[i], [](Four a, Four b) { return a + b; });
  const Four low = __builtin_shufflevector(f[0], f[1], 0, 4, 1, 5) + __builtin_shufflevector(f[0], f[1], 2, 6, 3, 7);
  const Four high = __builtin_shufflevector(f[2], f[3], 0, 4, 1, 5) + __builtin_shufflevector(f[2], f[3], 2, 6, 3, 7);
  return __builtin_shufflevector(low, high, 0, 1, 4, 5) + __builtin_shufflevector(low, high, 2, 3, 6, 7);
}

using Pages = ffi::Buffer<ffi::F32, 5>;  // [N, block, K, 2, H]

struct Attention {
  const float *q, *pages;
  const int32_t *tables, *positions, *sequences;
  const float* sinks;  // [K, G]; none: minus infinity
  float* out;
  int64_t num_heads, group, size;                  // K, G, H
  int64_t num_pages, block_size, num_seqs, width;  // width: blocks in a row of `tables`
  float scale, softcap;                            // no cap: 0
  int64_t window, chunk;                           // none: 0

  // The first key that a query at this position sees; the last is its own.
  int64_t First(int64_t position) const {
    int64_t first = window ? std::max<int64_t>(0, position - window + 1) : 0;
    return chunk ? std::max(first, position / chunk * chunk) : first;
  }

  // Key of one head at a position, of the sequence with this table; its value lies `size` behind it, the next
  // key of the same block `Stride()`.
  const float* Key(const int32_t* table, int64_t position, int64_t head) const {
    int64_t page = std::clamp<int64_t>(table[std::min(position / block_size, width - 1)], 0, num_pages - 1);
    return pages + ((page * block_size + position % block_size) * num_heads + head) * 2 * size;
  }
  int64_t Stride() const { return num_heads * 2 * size; }

  // Four keys and their values, which lie too far apart for the processor to foresee.
  void Prefetch(const float* keys) const {
    for (int i = 0; i < 4; ++i)
      for (int64_t j = 0; j < 2 * size; j += 16) __builtin_prefetch(keys + i * Stride() + j);
  }

  // One query's scores of a stretch become weights: 0 outside [from, to); what was summed before shrinks.
  void Softmax(float* scores, int64_t from, int64_t to, float* peak, float* total, float* sums) const {
    if (from >= to) return std::fill_n(scores, kKeys, 0.0f), void();
    if (softcap)
      for (int64_t i = from; i < to; ++i) scores[i] = std::tanh(scores[i] / softcap) * softcap;
    const int64_t first = from / kLanes * kLanes, last = (to + kLanes - 1) / kLanes * kLanes;
    const float unseen = -std::numeric_limits<float>::infinity();
    std::fill(scores + first, scores + from, unseen);
    std::fill(scores + to, scores + last, unseen);
    Vector highs = Load(scores + first), added = {};
    for (int64_t i = first; i < last; i += kLanes) highs = Load(scores + i) > highs ? Load(scores + i) : highs;
    float highest = *peak;
    for (int i = 0; i < kLanes; ++i) highest = std::max(highest, highs[i]);
    const float shrink = std::exp(*peak - highest);
    for (int64_t i = first; i < last; i += kLanes) {
      const Vector score = Load(scores + i), weight = score == unseen ? Vector{} : Exp(score - highest);
      Store(scores + i, weight);
      added += weight;
    }
    std::fill(scores, scores + first, 0.0f);
    std::fill(scores + last, scores + kKeys, 0.0f);
    float sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += added[i];
    *peak = highest;
    *total = *total * shrink + sum;
    for (int64_t i = 0; i < size; ++i) sums[i] *= shrink;
  }

  void Attend(int64_t first_row, int64_t count, int64_t head) const;
};

// Q queries' scores of four keys: [Q, kKeys] at `scores`.
template <int Q>
void ScoreTile(const float* q, const float* keys, int64_t stride, int64_t size, float* scores) {
  Vector sums[Q][4] = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    Vector columns[4];
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b) columns[b] = Load(keys + b * stride + i);
#pragma GCC unroll 4
    for (int a = 0; a < Q; ++a) {
      Vector row = Load(q + a * size + i);
#pragma GCC unroll 4
      for (int b = 0; b < 4; ++b) sums[a][b] += row * columns[b];
    }
  }
#pragma GCC unroll 4
  for (int a = 0; a < Q; ++a) *reinterpret_cast<Four*>(scores + a * kKeys) = Sums(sums[a]);
}

// Adds to Q queries' sums [Q, size], V vectors of each, `count` values with their weights [Q, kKeys].
template <int Q, int V>
void ValueTile(const float* weights, const float* values, int64_t stride, int64_t count, int64_t size, float* out) {
  Vector sums[Q][V];
#pragma GCC unroll 4
  for (int a = 0; a < Q; ++a)
#pragma GCC unroll 4
    for (int b = 0; b < V; ++b) sums[a][b] = Load(out + a * size + b * kLanes);
  for (int64_t i = 0; i < count; ++i, values += stride) {
#pragma GCC unroll 4
    for (int b = 0; b < V; ++b) {
      Vector value = Load(values + b * kLanes);
#pragma GCC unroll 4
      for (int a = 0; a < Q; ++a) sums[a][b] += value * weights[a * kKeys + i];
    }
  }
#pragma GCC unroll 4
  for (int a = 0; a < Q; ++a)
#pragma GCC unroll 4
    for (int b = 0; b < V; ++b) Store(out + a * size + b * kLanes, sums[a][b]);
}

// All of Q queries' sums.
template <int Q>
void ValueTiles(const float* weights, const float* values, int64_t stride, int64_t count, int64_t size, float* out) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) ValueTile<Q, 4>(weights, values + i, stride, count, size, out + i);
  for (; i < size; i += kLanes) ValueTile<Q, 1>(weights, values + i, stride, count, size, out + i);
}

// Calls run(first query, number of queries as a constant), four queries at a time.
template <typename Run>
void ForQueries(int64_t count, Run run) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) run(i, std::integral_constant<int, 4>());
  if (count - i == 3) run(i, std::integral_constant<int, 3>());
  if (count - i == 2) run(i, std::integral_constant<int, 2>());
  if (count - i == 1) run(i, std::integral_constant<int, 1>());
}

// Rows that follow each other in one sequence, with all query heads of one KV head: a running softmax over
// stretches of kKeys positions, which begin at multiples of it. So no result depends on what shares the group.
void Attention::Attend(int64_t first_row, int64_t count, int64_t head) const {
  const int64_t num_queries = count * group;
  thread_local std::vector<float> memory;
  memory.assign(num_queries * (2 * size + kKeys + 2), 0.0f);
  float *queries = memory.data(), *sums = queries + num_queries * size, *scores = sums + num_queries * size;
  float *peaks = scores + num_queries * kKeys, *totals = peaks + num_queries;
  for (int64_t i = 0; i < num_queries; ++i) peaks[i] = sinks[head * group + i % group], totals[i] = 1;
  int64_t low = std::numeric_limits<int64_t>::max(), high = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float* from = q + ((first_row + i) * num_heads + head) * group * size;
    for (int64_t j = 0; j < group * size; ++j) queries[i * group * size + j] = from[j] * scale;
    low = std::min(low, First(positions[first_row + i]));
    high = std::max<int64_t>(high, positions[first_row + i]);
  }
  const int32_t* table = tables + sequences[first_row] * width;
  for (int64_t start = low / kKeys * kKeys; start <= high; start += kKeys) {
    const int64_t end = std::min(start + kKeys, high + 1);
    for (int64_t key = start; key < end; key += 4) {  // blocks hold multiples of four
      const float* keys = Key(table, key, head);
      if (key + 16 <= high) Prefetch(Key(table, key + 16, head));
      ForQueries(num_queries, [&](int64_t i, auto n) {
        ScoreTile<n>(queries + i * size, keys, Stride(), size, scores + i * kKeys + key - start);
      });
    }
    for (int64_t i = 0; i < num_queries; ++i) {
      const int64_t position = positions[first_row + i / group];
      const int64_t from = std::max(First(position), start) - start, to = std::min(position + 1, end) - start;
      Softmax(scores + i * kKeys, from, to, peaks + i, totals + i, sums + i * size);
    }
    for (int64_t key = start, run; key < end; key += run) {
      run = std::min(block_size - key % block_size, end - key);
      const float* values = Key(table, key, head) + size;
      ForQueries(num_queries, [&](int64_t i, auto n) {
        ValueTiles<n>(scores + i * kKeys + key - start, values, Stride(), run, size, sums + i * size);
      });
    }
  }
  for (int64_t i = 0; i < num_queries; ++i) {
    float* to = out + (((first_row + i / group) * num_heads + head) * group + i % group) * size;
    for (int64_t d = 0; d < size; ++d) to[d] = sums[i * size + d] / totals[i];
  }
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::BufferR4<ffi::F32> q, Pages pages,
                  ffi::BufferR2<ffi::S32> tables, ffi::BufferR1<ffi::S32> positions,
                  ffi::BufferR1<ffi::S32> sequences, ffi::BufferR2<ffi::F32> sinks,
                  ffi::ResultBufferR4<ffi::F32> out, float scale, float softcap, int64_t window, int64_t chunk) {
  auto [num_rows, num_heads, group, size] = std::tuple(q.dimensions()[0], q.dimensions()[1], q.dimensions()[2],
                                                       q.dimensions()[3]);
  const Attention attention{q.typed_data(), pages.typed_data(), tables.typed_data(), positions.typed_data(),
                            sequences.typed_data(), sinks.typed_data(), out->typed_data(), num_heads, group, size,
                            pages.dimensions()[0], pages.dimensions()[1], tables.dimensions()[0],
                            tables.dimensions()[1], scale, softcap, window, chunk};
  std::vector<std::pair<int64_t, int64_t>> groups;  // first row, count
  const int64_t most = std::max<int64_t>(1, kQueries / group);
  const int32_t* owner = attention.sequences;
  for (int64_t row = 0; row < num_rows; ++row) {
    const bool is_padding = owner[row] < 0 || owner[row] >= attention.num_seqs;
    if (is_padding) std::fill_n(attention.out + row * num_heads * group * size, num_heads * group * size, 0.0f);
    else if (!groups.empty() && groups.back().second < most && groups.back().first + groups.back().second == row &&
             owner[groups.back().first] == owner[row]) ++groups.back().second;
    else groups.emplace_back(row, 1);
  }
  RunAll(pool, groups.size() * num_heads, [&, num_heads = num_heads](int64_t i) {
    attention.Attend(groups[i / num_heads].first, groups[i / num_heads].second, i % num_heads);
  });
  return ffi::Error::Success();
}

}  // namespace

extern "C" int hex_llm_panel_width() { return kPanel; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(hex_llm_matmul, Multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<bool>("gated"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(hex_llm_attention, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR4<ffi::F32>>()
                                  .Arg<Pages>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR4<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("chunk"));
