// The inner product of every kernel: C (rows, columns) = or += A (rows, k) B (k, columns).
//
// Each element of C is one sum over k in ascending order, whatever the number of rows or columns around it.
#pragma once

#include "cpu/vec.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

// Register block: 6 rows by this many vectors. 24 of 32 registers with AVX-512, 12 of 16 elsewhere.
inline constexpr int kGemmRows = 6;
inline constexpr int kGemmVectors = kVectorBytes == 64 ? 4 : 2;

// What a product does between its steps, told how many bytes of B it has read since: nothing, or asking for more.
struct NothingBetween {
  ATTN_INLINE void operator()(int64_t) const {}
  template <class Rows>
  ATTN_INLINE void square(const Rows&, int64_t) const {}
  ATTN_INLINE void line(int64_t, int) const {}
};

// B is given by its vectors: b(i, n) holds step i, columns n W .. n W + W - 1. lda is in elements, `steps` in steps.
template <class T, int R, int N, bool kAdd, class B, class Between>
ATTN_INLINE void gemm_block(int64_t steps, const Element<T>* a, int64_t lda, const B& b, Between& between,
                            Accumulate<T>* c, int64_t ldc) {
  using A = Accumulate<T>;
  Vec<A> acc[R][N] = {};
  if constexpr (kAdd) {
    if (steps <= 0) __builtin_unreachable();  // else gcc keeps the sums in memory for that case
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) acc[r][n] = load(c + r * ldc + n * W<A>);
  }
  for (int64_t i = 0; i < steps; ++i) {
    between(N * W<A> * Product<T>::kPerStep * int64_t(sizeof(T)));
    Vec<A> bv[N];
    for (int n = 0; n < N; ++n) bv[n] = b(i, n);
    for (int r = 0; r < R; ++r) {
      const Vec<A> av = Product<T>::broadcast(a + r * lda + i * Product<T>::kPerStep);
      for (int n = 0; n < N; ++n) acc[r][n] = Product<T>::add(av, bv[n], acc[r][n]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(c + r * ldc + n * W<A>, acc[r][n]);
}

template <class T, int N, bool kAdd, class B, class Between>
ATTN_INLINE void gemm_rows(int64_t rows, int64_t steps, const Element<T>* a, int64_t lda, const B& b, Between& between,
                           Accumulate<T>* c, int64_t ldc) {
  int64_t r = 0;
  for (; r + kGemmRows <= rows; r += kGemmRows)
    gemm_block<T, kGemmRows, N, kAdd>(steps, a + r * lda, lda, b, between, c + r * ldc, ldc);
  a += r * lda;
  c += r * ldc;
  switch (rows - r) {
    case 5: return gemm_block<T, 5, N, kAdd>(steps, a, lda, b, between, c, ldc);
    case 4: return gemm_block<T, 4, N, kAdd>(steps, a, lda, b, between, c, ldc);
    case 3: return gemm_block<T, 3, N, kAdd>(steps, a, lda, b, between, c, ldc);
    case 2: return gemm_block<T, 2, N, kAdd>(steps, a, lda, b, between, c, ldc);
    case 1: return gemm_block<T, 1, N, kAdd>(steps, a, lda, b, between, c, ldc);
  }
}

// b(i, column) is the vector of step i from that column on; columns is a multiple of W.
template <class T, bool kAdd, class B, class Between>
ATTN_INLINE void gemm_columns(int64_t rows, int64_t columns, int64_t steps, const Element<T>* a, int64_t lda,
                              const B& b, Between& between, Accumulate<T>* c, int64_t ldc) {
  constexpr int w = W<Accumulate<T>>;
  int64_t n = 0;
  const auto from_n = [&](int64_t i, int v) { return b(i, n + v * w); };
  for (; n + kGemmVectors * w <= columns; n += kGemmVectors * w)
    gemm_rows<T, kGemmVectors, kAdd>(rows, steps, a, lda, from_n, between, c + n, ldc);
  if constexpr (kGemmVectors == 4) {
    if (n + 2 * w <= columns) {
      gemm_rows<T, 2, kAdd>(rows, steps, a, lda, from_n, between, c + n, ldc);
      n += 2 * w;
    }
  }
  for (; n < columns; n += w) gemm_rows<T, 1, kAdd>(rows, steps, a, lda, from_n, between, c + n, ldc);
}

// B (steps, columns) packed: one lane of the accumulation type a step and column, row stride ldb.
template <class T, bool kAdd>
__attribute__((noinline)) void gemm(int64_t rows, int64_t columns, int64_t steps, const Element<T>* a, int64_t lda,
                                    const Accumulate<T>* b, int64_t ldb, Accumulate<T>* c, int64_t ldc) {
  if (kAdd && steps == 0) return;
  const auto packed = [&](int64_t i, int64_t n) { return load(b + i * ldb + n); };
  NothingBetween between;
  gemm_columns<T, kAdd>(rows, columns, steps, a, lda, packed, between, c, ldc);
}

// ------------------------------------------------------------------------------------------ B given by its rows

// Step i of columns n .. n + W - 1, from the rows of k that it takes.
template <class T, class Row>
ATTN_INLINE Vec<Accumulate<T>> step_of_rows(const Row& row, int64_t i, int64_t n) {
  if constexpr (Product<T>::kPerStep == 2) {
    HalfBits low, high;
    memcpy(&low, row(2 * i) + n, sizeof low);
    memcpy(&high, row(2 * i + 1) + n, sizeof high);
    return (Vec<float>)(zero_extend(low) | (zero_extend(high) << 16));
  } else {
    return load(row(i) + n);
  }
}

// Rows are read where they are; k is a whole number of steps.
template <class T, bool kAdd, class Row, class Between>
ATTN_INLINE void gemm_from_rows(int64_t rows, int64_t columns, int64_t k, const Element<T>* a, int64_t lda,
                                const Row& row, Between& between, Accumulate<T>* c, int64_t ldc) {
  const auto b = [&](int64_t i, int64_t n) { return step_of_rows<T>(row, i, n); };
  gemm_columns<T, kAdd>(rows, columns, k / Product<T>::kPerStep, a, lda, b, between, c, ldc);
}

// ------------------------------------------------------------------------------- B given by its columns (B^T)

// W rows of elements of T, transposed: step(i) holds step i of each row. Two 16-bit elements travel as one 32-bit
// lane, and are parted and widened when they are read unless the product takes pairs.
template <class T>
struct Square {
  using A = Accumulate<T>;
  static constexpr int kPerLane = int(sizeof(A) / sizeof(T));
  static constexpr int kDepth = W<A> * kPerLane;  // elements of each row
  static constexpr int kSteps = kDepth / Product<T>::kPerStep;
  Vec<A> lanes[W<A>];

  // Elements i .. i + depth - 1 of each row; `depth` is kDepth, or less at the rows' end.
  ATTN_INLINE Square(const T* const (&rows)[W<A>], int64_t i, int64_t depth) {
    if (depth == kDepth) {
      load_transposed<A>(rows, i, lanes);
      return;
    }
    for (int r = 0; r < W<A>; ++r) {
      char part[sizeof lanes[r]] = {};
      memcpy(part, rows[r] + i, size_t(depth) * sizeof(T));
      memcpy(&lanes[r], part, sizeof part);
    }
    transpose<A>(lanes);
  }
  ATTN_INLINE Vec<A> step(int i) const {
    if constexpr (kPerLane == 2 && Product<T>::kPerStep == 1)
      return widen_half(T{}, lanes[i / 2], i % 2);
    else
      return lanes[i];
  }
};

// The addresses of rows n .. n + W - 1 of `count`; past the end, those of the last row (their lanes are not used).
template <class T, class Row>
struct RowGroup {
  const T* rows[W<Accumulate<T>>];
  ATTN_INLINE RowGroup(int64_t n, int64_t count, const Row& row) {
    for (int r = 0; r < W<Accumulate<T>>; ++r) rows[r] = row(min_of(n + r, count - 1));
  }
};

// b (steps, columns rounded up to whole vectors) = the transpose of `columns` rows of k elements.
template <class T, class Row>
ATTN_INLINE void pack_transposed(int64_t columns, int64_t k, const Row& row, Accumulate<T>* b, int64_t ldb) {
  constexpr int depth = Square<T>::kDepth, per_step = Product<T>::kPerStep;
  for (int64_t n = 0; n < columns; n += W<Accumulate<T>>) {
    const RowGroup<T, Row> group(n, columns, row);
    int64_t i = 0;
    for (; i + depth <= k; i += depth) {
      const Square<T> square(group.rows, i, depth);
      for (int d = 0; d < Square<T>::kSteps; ++d) store(b + (i / per_step + d) * ldb + n, square.step(d));
    }
    if (i < k) {
      const Square<T> square(group.rows, i, k - i);
      for (int d = 0; d * per_step < k - i; ++d) store(b + (i / per_step + d) * ldb + n, square.step(d));
    }
  }
}

// The most rows of A for which transposing B in registers beats packing it.
inline constexpr int kFewRows = kVectorBytes == 64 ? 8 : 4;

// Beside what `between` is told in every product, it hears of each square of rows, and W times within it, evenly.
template <class T, int R, class Row, class Between>
ATTN_INLINE void gemm_transposed_rows(int64_t columns, int64_t k, const Element<T>* a, int64_t lda, const Row& row,
                                      Between& between, Accumulate<T>* c, int64_t ldc) {
  using A = Accumulate<T>;
  constexpr int depth = Square<T>::kDepth, per_step = Product<T>::kPerStep, steps = Square<T>::kSteps;
  for (int64_t n = 0; n < columns; n += W<A>) {
    const RowGroup<T, Row> group(n, columns, row);
    Vec<A> acc[R] = {};
    const auto add = [&](const Square<T>& square, int64_t i, int d) {
      const Vec<A> b = square.step(d);
      for (int r = 0; r < R; ++r)
        acc[r] = Product<T>::add(Product<T>::broadcast(a + r * lda + i + d * per_step), b, acc[r]);
    };
    int64_t i = 0;
    for (; i + depth <= k; i += depth) {
      between.square(group.rows, i);
      const Square<T> square(group.rows, i, depth);
#pragma GCC unroll 32
      for (int d = 0; d < steps; ++d) {  // unrolled, the square stays in registers
        add(square, i, d);
        if (d % max_of(1, steps / 4) == 0) between(W<A> * kVectorBytes / 4);
        if (d % (steps / W<A>) == 0) between.line(i, d / (steps / W<A>));
      }
    }
    if (i < k) {
      const Square<T> square(group.rows, i, k - i);
      for (int d = 0; d * per_step < k - i; ++d) add(square, i, d);
    }
    for (int r = 0; r < R; ++r) store(c + r * ldc + n, acc[r]);
  }
}

// C (rows <= kFewRows, columns) = A B with B^T given by its rows: the sums of pack_transposed and gemm, to the bit.
// Columns up to the next multiple of W<A> are written.
template <class T, class Row, class Between>
__attribute__((noinline)) void gemm_transposed_between(int64_t rows, int64_t columns, int64_t k, const Element<T>* a,
                                                       int64_t lda, const Row& row, Between& between, Accumulate<T>* c,
                                                       int64_t ldc) {
  const auto run = [&](auto r) {
    gemm_transposed_rows<T, decltype(r)::value>(columns, k, a, lda, row, between, c, ldc);
  };
  switch (rows) {
    case 1: return run(Constant<1>{});
    case 2: return run(Constant<2>{});
    case 3: return run(Constant<3>{});
    case 4: return run(Constant<4>{});
  }
  if constexpr (kFewRows > 4) {
    switch (rows) {
      case 5: return run(Constant<5>{});
      case 6: return run(Constant<6>{});
      case 7: return run(Constant<7>{});
      case 8: return run(Constant<8>{});
    }
  }
}

// The same, and what lies `ahead` elements behind each row of a square is asked for before it, unless that is 0.
struct AskAhead : NothingBetween {
  int64_t ahead;
  template <class Rows>
  ATTN_INLINE void square(const Rows& rows, int64_t i) const {
    if (ahead != 0)
      for (const auto* from : rows) __builtin_prefetch(from + i + ahead, 0, 2);
  }
};

template <class T, class Row>
ATTN_INLINE void gemm_transposed(int64_t rows, int64_t columns, int64_t k, const Element<T>* a, int64_t lda,
                                 const Row& row, int64_t ahead, Accumulate<T>* c, int64_t ldc) {
  AskAhead between{{}, ahead};
  gemm_transposed_between<T>(rows, columns, k, a, lda, row, between, c, ldc);
}

}  // namespace
}  // namespace attn_ext::ATTN_EXT_ISA
