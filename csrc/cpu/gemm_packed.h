// The product of linear: C (rows, columns) = or += A (rows, k) W^T, with W^T in panels.
//
// A panel holds 16 columns. It is (lines, 16 lanes): line i has, in lane n, what column n takes in step i. A weight
// that was packed when it was loaded is a row of such panels, so that the columns of a panel stream through memory in
// the order in which they are used. Lanes of 16-bit elements are pairs, elements 2 i and 2 i + 1 of k: AVX512-BF16
// multiplies them as they are; elsewhere a line is two steps, parted and widened as it is read, or once per task.
//
// A few rows of A are read where they are. More of them are packed too, in slices: a slice is (steps, kBlockRows
// lanes), so that one pointer serves a register block, and rows whose stride is a power of two do not meet in one set
// of the cache.
#pragma once

#include "cpu/gemm.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

inline constexpr int kPanel = 16;  // columns of a panel: of the layout, on every instruction set

// Elements of k in a lane of a packed weight.
template <class T>
inline constexpr int kPerLane = sizeof(T) == 2 ? 2 : 1;

// Steps of a line: of one as it lies in a packed weight of T, or of lanes as they are multiplied with many rows.
template <class T, bool kMany>
inline constexpr int kStepsPerLine = kMany ? 1 : kPerLane<T> / Product<T>::kPerStep;

// Register block: at most this many vectors of sums, of 32 registers with AVX-512 and 16 elsewhere.
inline constexpr int kSums = kVectorBytes == 64 ? 24 : 12;
template <class T>
inline constexpr int kVectorsPerPanel = kPanel / W<Accumulate<T>>;
inline constexpr int kMostPanels = 4;
template <class T>
inline constexpr int kBlockRows = kSums / kVectorsPerPanel<T> / (kVectorBytes == 64 ? 2 : 1);

// Lines of a packed weight are asked for this far ahead (4 KB), into the L2 cache: memory takes as long as some hundred
// multiplications, and the L1 cache has room for fewer outstanding requests.
inline constexpr int kPrefetchLines = 64;

// Panels beside each other in a block of `rows` rows: as many as there are registers for, 1, 2 or 4.
template <class T>
constexpr int panels_of_rows(int64_t rows) {
  int panels = kMostPanels;
  while (panels > 1 && panels * rows * kVectorsPerPanel<T> > kSums) panels /= 2;
  return panels;
}

// Panels p = 0, 1, ... of one range of k, at base + p * stride; in lanes.
template <class T>
struct Panels {
  const Accumulate<T>* base;
  int64_t stride;
  int64_t rest;  // lines of a panel from base to its end; 0: it is in a cache already
};

// A line of pairs, parted and widened to its two steps.
template <class T>
ATTN_INLINE void widen_pairs(Vec<float> pairs, Vec<float> (&steps)[2]) {
  for (int s = 0; s < 2; ++s) steps[s] = widen_half(T{}, pairs, s);
}
#if defined(__AVX512BW__)
template <>
ATTN_INLINE void widen_pairs<f16>(Vec<float> pairs, Vec<float> (&steps)[2]) {  // one shuffle parts both
  typedef uint16_t Halves __attribute__((vector_size(64)));
  Halves order;
  for (int i = 0; i < 32; ++i) order[i] = uint16_t(i < 16 ? 2 * i : 2 * (i - 16) + 1);
  const __m512i parted = _mm512_permutexvar_epi16((__m512i)order, (__m512i)pairs);
  steps[0] = widen(f16{}, (HalfBits)_mm512_castsi512_si256(parted));
  steps[1] = widen(f16{}, (HalfBits)_mm512_extracti64x4_epi64(parted, 1));
}
#endif

// Elements between the steps of a slice.
template <class T>
inline constexpr int kSliceStep = kBlockRows<T> * Product<T>::kPerStep;

// C (R, N panels) = or += A B. A: rows `lda` apart, or with kMany those of a slice.
template <class T, bool kMany, int R, int N>
ATTN_INLINE void panel_block(int64_t lines, const Element<T>* a, int64_t lda, const Panels<T>& b, Accumulate<T>* c,
                             int64_t ldc, bool accumulate) {
  using A = Accumulate<T>;
  constexpr int vectors = kVectorsPerPanel<T>, steps = kStepsPerLine<T, kMany>, per_step = Product<T>::kPerStep;
  Vec<A> sum[R][N * vectors] = {};
  // A pointer for every 4 rows, which gcc must take as it is: from one pointer it makes so many offsets that some lie
  // in vector registers, and fetching them takes turns from the multiply-adds. A slice needs one.
  constexpr int kRowsPerPointer = kMany ? R : 4;
  constexpr int kPointers = ceil_div(R, kRowsPerPointer);
  const Element<T>* left[kPointers];
  for (int g = 0; g < kPointers; ++g) left[g] = a + g * kRowsPerPointer * lda;
  const A* right[N];
  for (int n = 0; n < N; ++n) right[n] = b.base + n * b.stride;
  const auto advance = [&](int line) __attribute__((always_inline)) {
    for (auto& rows : left) {
      rows += line * steps * (kMany ? kSliceStep<T> : per_step);
      asm("" : "+r"(rows));
    }
    for (auto& panel : right) {
      panel += line * kPanel;
      asm("" : "+r"(panel));
    }
  };
  const auto multiply = [&](int i) __attribute__((always_inline)) {  // line i from the pointers on
    Vec<A> line[N * vectors][steps];
    for (int v = 0; v < N * vectors; ++v) {
      const Vec<A> lanes = load(right[v / vectors] + i * kPanel + v % vectors * W<A>);
      if constexpr (steps == 2)
        widen_pairs<T>(lanes, line[v]);
      else
        line[v][0] = lanes;
    }
    for (int s = 0; s < steps; ++s) {
      const int step = i * steps + s;
      for (int r = 0; r < R; ++r) {
        const Element<T>* at = kMany ? left[0] + step * kSliceStep<T> + r * per_step
                                     : left[r / kRowsPerPointer] + r % kRowsPerPointer * lda + step * per_step;
        const Vec<A> av = Product<T>::broadcast(at);
        for (int v = 0; v < N * vectors; ++v) sum[r][v] = Product<T>::add(av, line[v][s], sum[r][v]);
      }
    }
  };
  advance(0);
  int64_t i = 0;
  if (b.rest > 0) {
    for (; i < lines; ++i) {
      // Past the end of a panel, whose neighbour is multiplied beside it, go to the panel that will follow it.
      const int64_t line = i + kPrefetchLines;
      const A* ahead = b.base + line * kPanel + (line < b.rest ? 0 : (N - 1) * b.stride);
      for (int n = 0; n < N; ++n) __builtin_prefetch(ahead + n * b.stride, 0, 2);
      multiply(0);
      advance(1);
    }
  } else {
    // Several lines between steps of the pointers, which take turns from the multiply-adds.
    for (; i + 4 <= lines; i += 4) {
      multiply(0);
      multiply(1);
      multiply(2);
      multiply(3);
      advance(4);
    }
    for (; i < lines; ++i) {
      multiply(0);
      advance(1);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < N * vectors; ++v) {
      A* to = c + r * ldc + v * W<A>;
      store(to, accumulate ? load(to) + sum[r][v] : sum[r][v]);
    }
  }
}

template <class T, bool kMany, int R>
__attribute__((noinline)) void panel_rows(int64_t panels, int64_t lines, const Element<T>* a, int64_t lda,
                                          const Panels<T>& b, Accumulate<T>* c, int64_t ldc, bool accumulate) {
  constexpr int N = panels_of_rows<T>(R);
  int64_t p = 0;
  const auto from_p = [&] { return Panels<T>{b.base + p * b.stride, b.stride, b.rest}; };
  for (; p + N <= panels; p += N) panel_block<T, kMany, R, N>(lines, a, lda, from_p(), c + p * kPanel, ldc, accumulate);
  if constexpr (N == 4) {
    if (p + 2 <= panels) {
      panel_block<T, kMany, R, 2>(lines, a, lda, from_p(), c + p * kPanel, ldc, accumulate);
      p += 2;
    }
  }
  if constexpr (N > 1)
    if (p < panels) panel_block<T, kMany, R, 1>(lines, a, lda, from_p(), c + p * kPanel, ldc, accumulate);
}

// Calls panel_rows for `rows` <= R.
template <class T, bool kMany, int R>
ATTN_INLINE void panel_rows_of(int64_t rows, int64_t panels, int64_t lines, const Element<T>* a, int64_t lda,
                               const Panels<T>& b, Accumulate<T>* c, int64_t ldc, bool accumulate) {
  if constexpr (R > 0) {
    if (rows == R)
      panel_rows<T, kMany, R>(panels, lines, a, lda, b, c, ldc, accumulate);
    else
      panel_rows_of<T, kMany, R - 1>(rows, panels, lines, a, lda, b, c, ldc, accumulate);
  }
}

// C (rows <= kFewRows, 16 panels) = or += A B, over `lines` lines of each panel; rows of A are `lda` apart.
template <class T>
ATTN_INLINE void gemm_few(int64_t rows, int64_t panels, int64_t lines, const Element<T>* a, int64_t lda,
                          const Panels<T>& b, Accumulate<T>* c, int64_t ldc, bool accumulate) {
  panel_rows_of<T, false, kFewRows>(rows, panels, lines, a, lda, b, c, ldc, accumulate);
}

// The same for more rows, in slices `slice` elements apart. After each block of rows: done(row, rows).
template <class T, class Done>
ATTN_INLINE void gemm_many(int64_t rows, int64_t panels, int64_t lines, const Element<T>* a, int64_t slice,
                           const Panels<T>& b, Accumulate<T>* c, int64_t ldc, bool accumulate, const Done& done) {
  for (int64_t r = 0; r < rows; r += kBlockRows<T>) {
    const int64_t count = min_of<int64_t>(kBlockRows<T>, rows - r);
    const Element<T>* block = a + r / kBlockRows<T> * slice;
    const Panels<T> right{b.base, b.stride, r == 0 ? b.rest : 0};
    panel_rows_of<T, true, kBlockRows<T>>(count, panels, lines, block, 0, right, c + r * ldc, ldc, accumulate);
    done(r, count);
  }
}

// `lines` lines of a packed panel of 16-bit elements, each parted and widened to two of the accumulation type.
template <class T>
ATTN_INLINE void widen_panel(int64_t lines, const Accumulate<T>* from, Accumulate<T>* to) {
  using A = Accumulate<T>;
  for (int64_t i = 0; i < lines; ++i) {
    for (int n = 0; n < kPanel; n += W<A>) {
      Vec<A> steps[2];
      widen_pairs<T>(load(from + i * kPanel + n), steps);
      for (int s = 0; s < 2; ++s) store(to + (2 * i + s) * kPanel + n, steps[s]);
    }
  }
}

}  // namespace
}  // namespace attn_ext::ATTN_EXT_ISA
