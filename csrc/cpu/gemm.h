// The inner product of every kernel: C (rows, columns) = or += A (rows, k) B (k, columns) in the accumulation type.
//
// Each element of C is one sum over k in ascending order, whatever the number of rows or columns around it.
#pragma once

#include "cpu/vec.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

// Register block: 6 rows by this many vectors. 24 of 32 registers with AVX-512, 12 of 16 elsewhere.
inline constexpr int kGemmRows = 6;
inline constexpr int kGemmVectors = kVectorBytes == 64 ? 4 : 2;

template <class A, int R, int N>
ATTN_INLINE void gemm_block(int64_t k, const A* a, int64_t lda, const A* b, int64_t ldb, A* c, int64_t ldc,
                            bool accumulate) {
  Vec<A> acc[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) acc[r][n] = accumulate ? load(c + r * ldc + n * W<A>) : Vec<A>{};
  for (int64_t i = 0; i < k; ++i) {
    Vec<A> bv[N];
    for (int n = 0; n < N; ++n) bv[n] = load(b + i * ldb + n * W<A>);
    for (int r = 0; r < R; ++r) {
      const Vec<A> av = splat(a[r * lda + i]);
      for (int n = 0; n < N; ++n) acc[r][n] = fma(av, bv[n], acc[r][n]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(c + r * ldc + n * W<A>, acc[r][n]);
}

template <class A, int N>
ATTN_INLINE void gemm_rows(int64_t rows, int64_t k, const A* a, int64_t lda, const A* b, int64_t ldb, A* c,
                           int64_t ldc, bool accumulate) {
  int64_t r = 0;
  for (; r + kGemmRows <= rows; r += kGemmRows)
    gemm_block<A, kGemmRows, N>(k, a + r * lda, lda, b, ldb, c + r * ldc, ldc, accumulate);
  a += r * lda;
  c += r * ldc;
  switch (rows - r) {
    case 5: return gemm_block<A, 5, N>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 4: return gemm_block<A, 4, N>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 3: return gemm_block<A, 3, N>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 2: return gemm_block<A, 2, N>(k, a, lda, b, ldb, c, ldc, accumulate);
    case 1: return gemm_block<A, 1, N>(k, a, lda, b, ldb, c, ldc, accumulate);
  }
}

// columns is a multiple of W<A>.
template <class A>
__attribute__((noinline)) void gemm(int64_t rows, int64_t columns, int64_t k, const A* a, int64_t lda, const A* b,
                                    int64_t ldb, A* c, int64_t ldc, bool accumulate) {
  int64_t n = 0;
  for (; n + kGemmVectors * W<A> <= columns; n += kGemmVectors * W<A>)
    gemm_rows<A, kGemmVectors>(rows, k, a, lda, b + n, ldb, c + n, ldc, accumulate);
  for (; n < columns; n += W<A>) gemm_rows<A, 1>(rows, k, a, lda, b + n, ldb, c + n, ldc, accumulate);
}

// b (k, columns) = the transpose of `rows` rows of k elements of T, widened; columns past the rows are 0.
// row(i) is the address of row i; columns is a multiple of W and row stride of b is ldb.
template <class T, class Row>
ATTN_INLINE void pack_transposed(int64_t rows, int64_t columns, int64_t k, const Row& row, Accumulate<T>* b,
                                 int64_t ldb) {
  using A = Accumulate<T>;
  constexpr int w = W<A>;
  for (int64_t n = 0; n < columns; n += w) {
    for (int64_t i = 0; i < k; i += w) {
      const int64_t depth = min_of<int64_t>(w, k - i);
      Vec<A> square[w];
      for (int r = 0; r < w; ++r) {
        if (n + r >= rows)
          square[r] = Vec<A>{};
        else
          square[r] = depth == w ? load(row(n + r) + i) : load_first(row(n + r) + i, depth);
      }
      transpose<A>(square);
      for (int r = 0; r < depth; ++r) store(b + (i + r) * ldb + n, square[r]);
    }
  }
}

}  // namespace
}  // namespace attn_ext::ATTN_EXT_ISA
