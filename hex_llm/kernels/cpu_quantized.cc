// x [m, k] times quantized weights [n, k] transposed, as whole numbers of a byte: a processor multiplies four times
// as many of these at once as floats, and few bits come from memory.
//
// Rows of x are rounded to 16 bits, block by block of inputs, and lie as two bytes of each number: what that loses is
// less than what summing in float32 does, so no row's tokens depend on it. A weight is (code - zero) * scale + offset,
// with scales and offsets for groups of blocks, float16 or float32. A matrix is its scales [panels][groups][kPanel],
// offsets, if any, likewise, and codes: of a panel and a block [block / 4][kVectors][kWide][4], so that each vector has
// four inputs of kWide outputs. Of 4 bits, the block's second half lies above the first.

#include <cstring>
#include <memory>
#include <utility>

#include "cpu_common.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define HEX_LLM_MULTIPLIES_BYTES 1
#include <arm_neon.h>
#elif defined(__AVX2__) && defined(__F16C__)
#define HEX_LLM_MULTIPLIES_BYTES 1
#include <immintrin.h>
#endif

#ifndef HEX_LLM_MULTIPLIES_BYTES
extern "C" int hex_llm_quantized_panel_width() { return 0; }
#else

namespace {

// ---- what the processors have of their own: vectors of kWide numbers, and a product of bytes

#if defined(__aarch64__)
constexpr int kWide = 4, kTile = 8;  // rows at a time: their totals and a vector's weights fit into the registers
#else
constexpr int kWide = 8, kTile = 4;
#endif
constexpr int kVectors = 2, kPanel = kVectors * kWide;
constexpr int kBlockRows = 24;  // whole tiles
typedef float Floats __attribute__((vector_size(kWide * sizeof(float)), aligned(alignof(float)), may_alias));
typedef int32_t Sums __attribute__((vector_size(kWide * sizeof(int32_t))));
typedef uint8_t Codes __attribute__((vector_size(kWide * 4), aligned(1), may_alias));

// sums += of each output 16 codes times 16 bytes of x, of the upper ones and of the lower.
#if defined(__aarch64__)
template <bool kSigned>
void Dot(Sums& upper, Sums& lower, const Codes* quads, const int8_t* above, const int8_t* below) {
  // In this order, which no compiler leaves as it is, both pipes are busy.
  asm("sdot %0.4s, %2.16b, %6.4b[0]\n\tsdot %1.4s, %2.16b, %7.4b[0]\n\t"
      "sdot %0.4s, %3.16b, %6.4b[1]\n\tsdot %1.4s, %3.16b, %7.4b[1]\n\t"
      "sdot %0.4s, %4.16b, %6.4b[2]\n\tsdot %1.4s, %4.16b, %7.4b[2]\n\t"
      "sdot %0.4s, %5.16b, %6.4b[3]\n\tsdot %1.4s, %5.16b, %7.4b[3]"
      : "+w"(upper), "+w"(lower)
      : "w"(quads[0]), "w"(quads[1]), "w"(quads[2]), "w"(quads[3]), "w"(vld1q_s8(above)), "w"(vld1q_s8(below)));
}
Floats FromHalf(const uint16_t* from) { return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
#else
template <bool kSigned>
Sums DotQuad(Sums sums, Codes codes, const int8_t* x) {
  int32_t quad;
  std::memcpy(&quad, x, 4);
  __m256i w = (__m256i)codes, four = _mm256_set1_epi32(quad);
  if (kSigned) four = _mm256_sign_epi8(four, w), w = _mm256_abs_epi8(w);  // the first factor has no sign
  return sums + (Sums)_mm256_madd_epi16(_mm256_maddubs_epi16(w, four), _mm256_set1_epi16(1));
}
template <bool kSigned>
void Dot(Sums& upper, Sums& lower, const Codes* quads, const int8_t* above, const int8_t* below) {
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    upper = DotQuad<kSigned>(upper, quads[q], above + q * 4);
    lower = DotQuad<kSigned>(lower, quads[q], below + q * 4);
  }
}
Floats FromHalf(const uint16_t* from) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
#endif

#define INLINED __attribute__((always_inline))  // what is left a call keeps its sums in memory

// Calls run(a number as a constant) for 0 ... count - 1.
template <typename Run, int... numbers>
INLINED inline void Unrolled(std::integer_sequence<int, numbers...>, Run run) {
  (run(std::integral_constant<int, numbers>()), ...);
}
template <int count, typename Run>
INLINED inline void Unrolled(Run run) {
  Unrolled(std::make_integer_sequence<int, count>(), run);
}

// Whole numbers up to 2^22 that are added to the bits of this float are added to its value, or to 256 times as much
// 256 times of it: so no instruction is needed that makes floats of them, which are slow.
constexpr float kFloatZero = 12582912.0f;  // 1.5 * 2^23

// Where sums begin. Each is loaded anew: copying a register would take a product's place.
const Floats kUpperZero = Floats{} + kFloatZero * 256, kLowerZero = Floats{} + kFloatZero;

Sums Fresh(const Floats& zero) { return (Sums)(Floats) const_cast<const volatile Floats&>(zero); }

// 256 * upper + lower, rounded once.
Floats ToFloats(Sums upper, Sums lower) {
  return reinterpret_cast<const Floats&>(upper) - kFloatZero * 257 + reinterpret_cast<const Floats&>(lower);
}

// ---- rows in whole numbers

constexpr float kLargest = 127 * 256;  // bytes are never -128, which x86 could not negate

// The largest tile of m rows that has this one, among those of kTile rows and, at the end, of half as many each.
struct Tile {
  int64_t first, size;

  Tile(int64_t row, int64_t m) : size(kTile) {
    while (row >= m / size * size) size /= 2;
    first = row / size * size;
  }
};

struct Rows {
  int64_t m, num_blocks;
  float factor;                     // of the sums
  std::unique_ptr<int8_t[]> bytes;  // of each tile [blocks][rows][2][block]: upper, then lower
  std::unique_ptr<float[]> scales;  // of each tile [blocks][2][rows]: scales, then sums

  Rows(int64_t m, int64_t num_blocks, int block, float factor)
      : m(m), num_blocks(num_blocks), factor(factor), bytes(new int8_t[m * num_blocks * 2 * block]),
        scales(new float[m * num_blocks * 2]) {}

  template <int kBlock>
  void Round(const float* x, int64_t row) {
    const Tile tile(row, m);
    int8_t* to = bytes.get() + (tile.first * num_blocks + row - tile.first) * 2 * kBlock;
    float* scale = scales.get() + tile.first * num_blocks * 2 + row - tile.first;
    for (int64_t b = 0; b < num_blocks; ++b, x += kBlock, to += tile.size * 2 * kBlock, scale += tile.size * 2)
      scale[tile.size] = RoundBlock<kBlock>(x, to, scale) * factor;
  }

  // The sum of what is multiplied, so that both lose the same.
  template <int kBlock>
  static float RoundBlock(const float* x, int8_t* to, float* scale) {
    Sums peaks = {};
    for (int i = 0; i < kBlock; i += kWide) {
      Sums bits;  // as whole numbers, NaN is larger than all others
      std::memcpy(&bits, x + i, sizeof bits);
      bits &= 0x7fffffff;
      peaks = bits > peaks ? bits : peaks;
    }
    int32_t peak_bits = 0, sum = 0;
    for (int i = 0; i < kWide; ++i) peak_bits = std::max(peak_bits, peaks[i]);
    float peak;
    std::memcpy(&peak, &peak_bits, sizeof peak);
    const float inverse = peak > 1e-30f ? kLargest / peak : 0;
    int32_t both[2 * kBlock];
    Sums sums = {};
    for (int i = 0; i < kBlock; i += kWide) {
      // The last bits are the nearest whole number's.
      const Floats moved = *reinterpret_cast<const Floats*>(x + i) * inverse + kFloatZero;
      const Sums number = (Sums)moved - 0x4b400000, above = (number + 128) >> 8, rest = number - (above << 8);
      const Sums below = rest < -127 ? Sums{} - 127 : rest;
      std::memcpy(both + i, &above, sizeof above);
      std::memcpy(both + kBlock + i, &below, sizeof below);
      sums += (above << 8) + below;
    }
    for (int i = 0; i < 2 * kBlock; ++i) to[i] = static_cast<int8_t>(both[i]);
    for (int i = 0; i < kWide; ++i) sum += sums[i];
    *scale = peak / kLargest;
    return sum * *scale;
  }
};

// ---- weights

struct Weights {
  const uint8_t *scales, *offsets, *codes;  // offsets: null if there are none
  int64_t num_groups;
  bool is_half;

  // A vector of scales or offsets.
  Floats Numbers(const uint8_t* from) const {
    if (__builtin_expect(is_half, true)) return FromHalf(reinterpret_cast<const uint16_t*>(from));
    return *reinterpret_cast<const Floats*>(from);
  }
};

// One of a panel's vectors of a block, a quad of inputs in each.
template <int kBits, int kBlock>
void Unpack(const uint8_t* codes, Codes (&quads)[kBlock / 4]) {
  constexpr int kStride = kPanel * 4, kHalf = kBlock / 8;
  Unrolled<kBits == 4 ? kHalf : kBlock / 4>([&](auto q) INLINED {
    const Codes loaded = *reinterpret_cast<const Codes*>(codes + q * kStride);
    if constexpr (kBits == 4) quads[q] = loaded & 15, quads[q + kHalf] = loaded >> 4;
    else quads[q] = loaded;
  });
}

// y [M, V vectors] = M rows, which are a tile, times V vectors of a panel from `vector` on.
template <int kBits, int kBlock, int M, int V>
__attribute__((noinline)) void MultiplyTile(const Rows& x, int64_t row, const Weights& w, int64_t panel, int vector,
                                            float* y, int64_t stride) {
  constexpr int64_t kCodeBytes = kBlock * kPanel * kBits / 8;
  const int64_t num_blocks = x.num_blocks, blocks_in_group = num_blocks / w.num_groups;
  const int64_t vector_bytes = kWide * (w.is_half ? 2 : 4);
  const uint8_t* codes = w.codes + panel * num_blocks * kCodeBytes + vector * kWide * 4;
  const int8_t* bytes = x.bytes.get() + row * num_blocks * 2 * kBlock;
  const float* row_scales = x.scales.get() + row * num_blocks * 2;
  int64_t group = (panel * w.num_groups * kVectors + vector) * vector_bytes, blocks_left = blocks_in_group;
  Floats totals[M][V] = {};
  for (int64_t b = 0; b < num_blocks; ++b) {
    Unrolled<V>([&](auto v) INLINED {
      Codes quads[kBlock / 4];
      Unpack<kBits, kBlock>(codes + v * kWide * 4, quads);
      const Floats scales = w.Numbers(w.scales + group + v * vector_bytes);
      Unrolled<M>([&](auto a) INLINED {
        Sums upper = Fresh(kUpperZero), lower = Fresh(kLowerZero);
        const int8_t *above = bytes + a * 2 * kBlock, *below = above + kBlock;
        Unrolled<kBlock / 16>([&](auto i) INLINED {
          Dot<kBits == 8>(upper, lower, quads + i * 4, above + i * 16, below + i * 16);
        });
        totals[a][v] += scales * row_scales[a] * ToFloats(upper, lower);
      });
      if (__builtin_expect(w.offsets != nullptr, kBits == 4)) {
        const Floats offsets = w.Numbers(w.offsets + group + v * vector_bytes);
        Unrolled<M>([&](auto a) INLINED { totals[a][v] += offsets * row_scales[M + a]; });
      }
    });
    codes += kCodeBytes, bytes += M * 2 * kBlock, row_scales += M * 2;
    if (--blocks_left == 0) blocks_left = blocks_in_group, group += kVectors * vector_bytes;
  }
  Unrolled<M>([&](auto a) INLINED {
    Unrolled<V>([&](auto v) INLINED { *reinterpret_cast<Floats*>(y + a * stride + v * kWide) = totals[a][v]; });
  });
}

// y [num_rows, kPanel] for any number of rows, in tiles of at most M.
template <int kBits, int kBlock, int M>
void MultiplyRows(const Rows& x, int64_t row, int64_t num_rows, const Weights& w, int64_t panel, float* y,
                  int64_t stride) {
  constexpr int V = M < kTile ? kVectors : 1;  // what fits into the registers
  for (; num_rows >= M; num_rows -= M, row += M, y += M * stride)
    for (int v = 0; v < kVectors; v += V)
      MultiplyTile<kBits, kBlock, M, V>(x, row, w, panel, v, y + v * kWide, stride);
  if constexpr (M > 1) MultiplyRows<kBits, kBlock, M / 2>(x, row, num_rows, w, panel, y, stride);
}

template <int kBits, int kBlock>
void Multiply(ffi::ThreadPool& pool, const float* x, int64_t m, int64_t k, const Weights& weights, float zero,
              int64_t num_panels, bool gated, float* y, int64_t n) {
  // (code - zero) * scale is an offset, too: the scale, of rows whose sums are -zero times theirs.
  Rows rows(m, k / kBlock, kBlock, zero != 0 ? -zero : 1);
  if (m < kTile) {
    for (int64_t row = 0; row < m; ++row) rows.Round<kBlock>(x + row * k, row);
  } else {
    RunAll(pool, m, [&](int64_t row) { rows.Round<kBlock>(x + row * k, row); });
  }
  auto multiply = [&](int64_t row, int64_t num_rows, int64_t panel, float* out, int64_t stride) {
    MultiplyRows<kBits, kBlock, kTile>(rows, row, num_rows, weights, panel, out, stride);
  };
  RunProduct<kPanel, kBlockRows>(pool, num_panels, gated, y, m, n, multiply);
}

ffi::Error MultiplyQuantized(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::BufferR2<ffi::U8> cells,
                             ffi::ResultBufferR2<ffi::F32> y, int64_t bits, int64_t block, int64_t num_groups,
                             bool is_half, bool has_offsets, float zero, bool gated) {
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1], n = y->dimensions()[1] * (gated ? 2 : 1);
  const int64_t num_panels = (n + kPanel - 1) / kPanel, grid = num_panels * num_groups * kPanel * (is_half ? 2 : 4);
  const uint8_t *scales = cells.typed_data(), *offsets = has_offsets ? scales + grid : zero != 0 ? scales : nullptr;
  const Weights weights{scales, offsets, scales + grid * (has_offsets ? 2 : 1), num_groups, is_half};
  auto run = bits == 4 ? &Multiply<4, 32> : block == 32 ? &Multiply<8, 32> : &Multiply<8, 16>;
  zero = has_offsets ? 0 : zero;
  run(pool, x.typed_data(), m, k, weights, zero, num_panels, gated, y->typed_data(), y->dimensions()[1]);
  return ffi::Error::Success();
}

}  // namespace

extern "C" int hex_llm_quantized_panel_width() { return kPanel; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(hex_llm_quantized_matmul, MultiplyQuantized,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::U8>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("block")
                                  .Attr<int64_t>("num_groups")
                                  .Attr<bool>("is_half")
                                  .Attr<bool>("has_offsets")
                                  .Attr<float>("zero")
                                  .Attr<bool>("gated"));

#endif
