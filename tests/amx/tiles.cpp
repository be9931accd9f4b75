// The primitives of csrc/cpu/amx/tile.h as C functions, and sequences of instructions that a CPU refuses.
#include "cpu/amx/tile.h"

namespace tmm = attn_ext::ATTN_EXT_ISA::tmm;

namespace {
// C (m, n) = C + A (m, 2 pairs) . B (pairs, n): tiles 0, 1, 2
tmm::Shapes product_shapes(int m, int n, int pairs) {
  tmm::Shapes shapes;
  shapes.rows[0] = shapes.rows[1] = uint8_t(m);
  shapes.rows[2] = uint8_t(pairs);
  shapes.row_bytes[0] = shapes.row_bytes[2] = uint16_t(4 * n);
  shapes.row_bytes[1] = uint16_t(4 * pairs);
  return shapes;
}
}  // namespace

extern "C" {

void multiply(int m, int n, int pairs, const void* a, int64_t lda, const void* b, int64_t ldb, void* c, int64_t ldc,
              int times) {
  const tmm::Config config(product_shapes(m, n, pairs));
  tmm::load<0>(c, ldc);
  tmm::load<1>(a, lda);
  tmm::load<2>(b, ldb);
  for (int i = 0; i < times; ++i) tmm::dot<0, 1, 2>();
  tmm::store<0>(c, ldc);
}

// Every register is written and read back: to[t] = from[t], after all are loaded; tile 3 is zeroed in between.
void copy_all(const char* from, char* to) {
  const tmm::Config config(tmm::Shapes::full());
  tmm::load<0>(from);
  tmm::load<1>(from + 1024);
  tmm::load<2>(from + 2048);
  tmm::load<3>(from + 3072);
  tmm::load<4>(from + 4096);
  tmm::load<5>(from + 5120);
  tmm::load<6>(from + 6144);
  tmm::load<7>(from + 7168);
  tmm::zero<3>();
  tmm::store<7>(to + 7168);
  tmm::store<6>(to + 6144);
  tmm::store<5>(to + 5120);
  tmm::store<4>(to + 4096);
  tmm::store<3>(to + 3072);
  tmm::store<2>(to + 2048);
  tmm::store<1>(to + 1024);
  tmm::store<0>(to);
}

// A small shape after a full one: rows and bytes behind the shape are 0 (seen through a full shape they are not there).
void load_only(int rows, int row_bytes, const void* from, void* to) {
  tmm::Shapes shapes;
  shapes.rows[5] = uint8_t(rows);
  shapes.row_bytes[5] = uint16_t(row_bytes);
  const tmm::Config config(shapes);
  tmm::load<5>(from);
  tmm::store<5>(to);
}

// A configuration written just before it is used, and memory changed between two loads: what a missing clobber breaks.
int reads_what_was_written(int rounds) {
  alignas(64) char memory[tmm::kBytes], back[tmm::kBytes];
  int wrong = 0;
  for (int i = 0; i < rounds; ++i) {
    const int rows = 1 + i % 16;
    tmm::Shapes shapes;
    shapes.set(0, rows);
    const tmm::Config config(shapes);
    for (int j = 0; j < tmm::kBytes; ++j) memory[j] = char(i + j);
    tmm::load<0>(memory);
    for (int j = 0; j < tmm::kBytes; ++j) memory[j] = 0;
    for (int j = 0; j < tmm::kBytes; ++j) back[j] = 77;
    tmm::store<0>(back);
    for (int j = 0; j < tmm::kBytes; ++j) wrong += back[j] != (j < 64 * rows ? char(i + j) : 77);
  }
  return wrong;
}

void use_without_config() { tmm::zero<0>(); }

void use_after_release() {
  {
    const tmm::Config config(tmm::Shapes::full());
  }
  tmm::zero<0>();
}

void use_of_a_tile_without_shape() {
  tmm::Shapes shapes;
  shapes.set(1, 16);
  const tmm::Config config(shapes);
  tmm::zero<0>();
}

void config_of(const tmm::Shapes* shapes) { const tmm::Config config(*shapes); }

void product_of(const tmm::Shapes* shapes) {
  const tmm::Config config(*shapes);
  tmm::dot<0, 1, 2>();
}

void not_a_tile_instruction() { asm volatile("ud2"); }
}
