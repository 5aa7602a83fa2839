// Vectors, threads and the parts of a product, for the kernels of one CPU.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(alignof(float)), may_alias));

Vector Load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
void Store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }

typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t))));

// e^x for x <= 0, to the last bit or two.
Vector Exp(Vector x) {
  const Vector lowest = Vector{} - 87.0f;
  x = x < lowest ? lowest : x;
  const Vector rounder = Vector{} + 12582912.0f;  // 1.5 * 2^23: adding it leaves no digits behind the point
  const Vector n = (x * 1.44269504f + rounder) - rounder;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  const Vector power = 1 + r * (1 + r * (0.5f + r * (1.66666667e-1f + r * (4.16666667e-2f + r *
                       (8.33333333e-3f + r * 1.38888889e-3f)))));
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  return power * reinterpret_cast<const Vector&>(exponent);
}

Vector Silu(Vector x) {
  const Vector e = Exp(x < 0 ? x : -x);
  return x * (x < 0 ? e : Vector{} + 1) / (1 + e);
}

// ---- threads

// Tasks 0 ... count - 1, each done once. Whoever is free takes the next: no thread waits for one that has not
// begun.
struct Tasks {
  const std::function<void(int64_t)> run;
  const int64_t count;
  std::atomic<int64_t> next{0}, num_done{0};

  Tasks(std::function<void(int64_t)> run, int64_t count) : run(std::move(run)), count(count) {}

  void Help() {
    for (int64_t i; (i = next.fetch_add(1)) < count; num_done.fetch_add(1)) run(i);
  }
};

// From this thread and as many others as are free. One that comes when all is done finds `tasks` still there.
void RunAll(ffi::ThreadPool& pool, int64_t count, std::function<void(int64_t)> run) {
  auto tasks = std::make_shared<Tasks>(std::move(run), count);
  for (int64_t i = 1; i < std::min<int64_t>(pool.num_threads(), count); ++i)
    pool.Schedule([tasks] { tasks->Help(); });
  tasks->Help();
  while (tasks->num_done.load() < count) std::this_thread::yield();
}

// ---- products

constexpr int kStripesPerThread = 9;  // so that a thread that comes late has less to do

// y [m, n] = x times weights that lie in panels of kPanel columns, of blocks of kRows rows, which stay in a near
// cache while weights pass by. multiply(first row, number of rows, panel, out, stride) makes a part of it.
template <int kPanel, int kRows, typename Multiply>
struct Product {
  float* y;
  int64_t m, n;
  Multiply multiply;

  // Calls run(first row, number of rows, panel) for some panels, a block of rows after the other.
  template <typename Run>
  void ForEachBlock(int64_t first_panel, int64_t last_panel, Run run) const {
    for (int64_t row = 0; row < m; row += kRows)
      for (int64_t p = first_panel; p < last_panel; ++p) run(row, std::min<int64_t>(kRows, m - row), p);
  }

  void Compute(int64_t first_panel, int64_t last_panel) const {
    float edge[kRows * kPanel];  // for the last panel, where it has more columns than y
    ForEachBlock(first_panel, last_panel, [&](int64_t row, int64_t num_rows, int64_t p) {
      float* out = y + row * n + p * kPanel;
      const int64_t columns = n - p * kPanel;
      if (columns >= kPanel) return multiply(row, num_rows, p, out, n);
      multiply(row, num_rows, p, edge, kPanel);
      for (int64_t a = 0; a < num_rows; ++a) std::copy_n(edge + a * kPanel, columns, out + a * n);
    });
  }

  // The first half of the panels are gates, the second what they let through: y = silu(gate) * up.
  void ComputeGated(int64_t first_panel, int64_t last_panel) const {
    float gates[kRows * kPanel], ups[kRows * kPanel];
    ForEachBlock(first_panel, last_panel, [&](int64_t row, int64_t num_rows, int64_t p) {
      multiply(row, num_rows, p, gates, kPanel);
      multiply(row, num_rows, n / kPanel + p, ups, kPanel);
      for (int64_t i = 0; i < num_rows * kPanel; i += kLanes) {
        float* to = y + (row + i / kPanel) * n + p * kPanel + i % kPanel;
        Store(to, Silu(Load(gates + i)) * Load(ups + i));
      }
    });
  }
};

template <int kPanel, int kRows, typename Multiply>
void RunProduct(ffi::ThreadPool& pool, int64_t num_panels, bool gated, float* y, int64_t m, int64_t n,
                Multiply multiply) {
  const Product<kPanel, kRows, Multiply> product{y, m, n, multiply};
  num_panels /= gated ? 2 : 1;
  const int64_t num_stripes = std::min(num_panels, std::max<int64_t>(1, pool.num_threads()) * kStripesPerThread);
  RunAll(pool, num_stripes, [&](int64_t i) {
    const int64_t first = i * num_panels / num_stripes, last = (i + 1) * num_panels / num_stripes;
    gated ? product.ComputeGated(first, last) : product.Compute(first, last);
  });
}

}  // namespace
