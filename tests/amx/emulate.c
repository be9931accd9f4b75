// AMX on CPUs without it: executes the tile instructions of csrc/cpu/amx when they trap.
//
// A tile instruction on a CPU without AMX raises SIGILL. The handler decodes it, executes it on tile registers of the
// thread, as Intel's manual (volume 2, the instructions' pseudo code) says, and goes on with the instructions behind it
// as long as they are tile instructions too. Where the manual says #UD or #GP, the process ends with a message.
//
// Executed: LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED, TDPBF16PS, in 64-bit mode.
//
// Beyond the manual:
//   * registers are filled with NaN when they are released, and an access to them is an error until the next LDTILECFG;
//   * amx_emulator_counts: instructions by kind, traps, and rows of memory that are not aligned to 64 bytes (those are
//     slow on real CPUs); amx_emulator_configured: threads that hold a configuration.
#define _GNU_SOURCE
#include <immintrin.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { TILES = 8, MAX_ROWS = 16, MAX_ROW_BYTES = 64 };
enum { LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED, TDPBF16PS, TRAPS, UNALIGNED_ROWS, COUNTERS };

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} Config;

static __thread Config config;  // palette 0: nothing is configured
static __thread uint8_t tiles[TILES][MAX_ROWS][MAX_ROW_BYTES] __attribute__((aligned(64)));

static uint64_t counts[COUNTERS];
static int64_t configured;  // threads
static int running;
static struct sigaction previous;

static void count(int what, uint64_t n) { __atomic_fetch_add(&counts[what], n, __ATOMIC_RELAXED); }

#define FAIL(...)                                  \
  do {                                             \
    fprintf(stderr, "AMX emulator: " __VA_ARGS__); \
    fputc('\n', stderr);                           \
    abort();                                       \
  } while (0)

// ---------------------------------------------------------------------------------------------- the instructions

static void release(void) {
  if (config.palette) __atomic_fetch_sub(&configured, 1, __ATOMIC_RELAXED);
  memset(&config, 0, sizeof config);
  memset(tiles, 0xff, sizeof tiles);
}

static void load_config(const uint8_t* memory) {
  Config c;
  memcpy(&c, memory, sizeof c);
  if (c.palette == 0) {
    release();
    return;
  }
  if (c.palette > 1) FAIL("#GP, LDTILECFG: palette %d", c.palette);
  for (int i = 0; i < 14; ++i)
    if (c.reserved[i]) FAIL("#GP, LDTILECFG: reserved byte %d is %d", i + 2, c.reserved[i]);
  for (int t = 0; t < 16; ++t) {
    if (t >= TILES && (c.rows[t] || c.row_bytes[t])) FAIL("#GP, LDTILECFG: tile %d has a shape", t);
    if (c.rows[t] > MAX_ROWS) FAIL("#GP, LDTILECFG: tile %d has %d rows", t, c.rows[t]);
    if (c.row_bytes[t] > MAX_ROW_BYTES) FAIL("#GP, LDTILECFG: tile %d has rows of %d bytes", t, c.row_bytes[t]);
    if (!c.rows[t] != !c.row_bytes[t])
      FAIL("#GP, LDTILECFG: tile %d has %d rows of %d bytes", t, c.rows[t], c.row_bytes[t]);
  }
  if (c.start_row >= MAX_ROWS) FAIL("#GP, LDTILECFG: start row %d", c.start_row);
  if (!config.palette) __atomic_fetch_add(&configured, 1, __ATOMIC_RELAXED);
  config = c;
  memset(tiles, 0, sizeof tiles);
}

static void check_tile(const char* instruction, int t) {
  if (!config.palette) FAIL("#UD, %s: no tile is configured", instruction);
  if (t >= TILES || !config.rows[t]) FAIL("#UD, %s: tile %d has no shape", instruction, t);
}

// The rest of a row and the rows behind the last one become 0.
static void zero_rest(int t, int rows) {
  for (int r = 0; r < MAX_ROWS; ++r) {
    const int used = r < rows ? config.row_bytes[t] : 0;
    memset(tiles[t][r] + used, 0, (size_t)(MAX_ROW_BYTES - used));
  }
}

static void check_alignment(int t, const uint8_t* memory, int64_t stride) {
  int rows = 0;
  for (int r = config.start_row; r < config.rows[t]; ++r) rows += ((uintptr_t)(memory + r * stride) & 63) != 0;
  if (rows) count(UNALIGNED_ROWS, (uint64_t)rows);
}

static void load_tile(int t, const uint8_t* memory, int64_t stride) {
  check_tile("TILELOADD", t);
  check_alignment(t, memory, stride);
  if (!config.start_row) zero_rest(t, 0);
  for (int r = config.start_row; r < config.rows[t]; ++r) memcpy(tiles[t][r], memory + r * stride, config.row_bytes[t]);
  zero_rest(t, config.rows[t]);
  config.start_row = 0;
}

static void store_tile(int t, uint8_t* memory, int64_t stride) {
  check_tile("TILESTORED", t);
  check_alignment(t, memory, stride);
  for (int r = config.start_row; r < config.rows[t]; ++r) memcpy(memory + r * stride, tiles[t][r], config.row_bytes[t]);
  config.start_row = 0;
}

// Per row m and column n: one fused chain over the even k, one over the odd k, their sum, and that added to c.
static void dot(int c, int a, int b) {
  if (c == a || c == b || a == b) FAIL("#UD, TDPBF16PS: tiles %d, %d, %d are not distinct", c, a, b);
  check_tile("TDPBF16PS", c);
  check_tile("TDPBF16PS", a);
  check_tile("TDPBF16PS", b);
  const int m = config.rows[c], pairs = config.row_bytes[a] / 4;
  if (config.row_bytes[c] % 4 || config.row_bytes[a] % 4 || config.row_bytes[b] % 4)
    FAIL("#UD, TDPBF16PS: rows of %d, %d, %d bytes", config.row_bytes[c], config.row_bytes[a], config.row_bytes[b]);
  if (config.rows[a] != m || config.rows[b] != pairs || config.row_bytes[b] != config.row_bytes[c])
    FAIL("#UD, TDPBF16PS: (%d, %d) += (%d, %d pairs) . (%d pairs, %d)", m, config.row_bytes[c] / 4, config.rows[a],
         pairs, config.rows[b], config.row_bytes[b] / 4);
  if (config.start_row) FAIL("#UD, TDPBF16PS: start row %d", config.start_row);

  const unsigned mxcsr = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // round to nearest even, subnormal inputs and results are 0, no exceptions
  const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
  for (int r = 0; r < m; ++r) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < pairs; ++k) {
      uint32_t pair;
      memcpy(&pair, tiles[a][r] + 4 * k, 4);
      const __m512i left = _mm512_set1_epi32((int)pair), right = _mm512_load_si512(tiles[b][k]);
      even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(left, 16)),
                             _mm512_castsi512_ps(_mm512_slli_epi32(right, 16)), even);
      odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(left, high)),
                            _mm512_castsi512_ps(_mm512_and_si512(right, high)), odd);
    }
    const __m512 sum = _mm512_add_ps(even, odd);
    _mm512_store_ps(tiles[c][r], _mm512_add_ps(_mm512_load_ps(tiles[c][r]), sum));
  }
  _mm_setcsr(mxcsr);
  zero_rest(c, m);
}

// ------------------------------------------------------------------------------------------------------- decoding

static const int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                   REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

typedef struct {
  int mode, reg, rm, third;  // ModRM; the register in VEX.vvvv
  int has_sib;
  uint8_t* base;   // base + displacement
  int64_t stride;  // index << scale
  int length;
} Operands;

// Reads ModRM, SIB and displacement at code[4]; VEX is code[0..2], the opcode code[3].
static Operands operands(const uint8_t* code, const greg_t* registers) {
  Operands o = {0};
  const int r = !(code[1] & 0x80), x = !(code[1] & 0x40), b = !(code[1] & 0x20);
  const uint8_t modrm = code[4];
  o.mode = modrm >> 6;
  o.reg = (modrm >> 3 & 7) | r << 3;
  o.rm = (modrm & 7) | b << 3;
  o.third = ~(code[2] >> 3) & 15;
  o.length = 5;
  if (o.mode == 3) return o;
  int64_t address = 0;
  int displacement_bytes = o.mode == 1 ? 1 : o.mode == 2 ? 4 : 0;
  int relative = 0;
  if ((modrm & 7) == 4) {
    const uint8_t sib = code[o.length++];
    o.has_sib = 1;
    const int index = (sib >> 3 & 7) | x << 3, base = (sib & 7) | b << 3;
    if (index != 4) o.stride = registers[kRegisters[index]] << (sib >> 6);
    if ((sib & 7) == 5 && o.mode == 0)
      displacement_bytes = 4;  // no base
    else
      address = registers[kRegisters[base]];
  } else if ((modrm & 7) == 5 && o.mode == 0) {
    displacement_bytes = 4;
    relative = 1;
  } else {
    address = registers[kRegisters[o.rm]];
  }
  int32_t displacement = 0;
  if (displacement_bytes == 1) displacement = (int8_t)code[o.length];
  if (displacement_bytes == 4) memcpy(&displacement, code + o.length, 4);
  o.length += displacement_bytes;
  if (relative) address = (int64_t)(code + o.length);
  o.base = (uint8_t*)(address + displacement);
  return o;
}

// Executes the instruction at `code` if it is one of ours; returns its length, or 0.
static int execute(const uint8_t* code, const greg_t* registers) {
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84)) return 0;  // VEX.128.0F38.W0
  const int opcode = code[3], prefix = code[2] & 3;                            // 0, 66, F3, F2
  if (opcode != 0x49 && opcode != 0x4b && opcode != 0x5c) return 0;
  const Operands o = operands(code, registers);
  if (opcode != 0x5c && o.third != 0) return 0;
  if (opcode == 0x49 && prefix == 0 && o.mode != 3) {
    count(LDTILECFG, 1);
    load_config(o.has_sib ? o.base + o.stride : o.base);
  } else if (opcode == 0x49 && prefix == 0 && code[4] == 0xc0) {
    count(TILERELEASE, 1);
    release();
  } else if (opcode == 0x49 && prefix == 3 && o.mode == 3 && o.rm == 0) {
    count(TILEZERO, 1);
    check_tile("TILEZERO", o.reg);
    memset(tiles[o.reg], 0, sizeof tiles[o.reg]);
    config.start_row = 0;
  } else if (opcode == 0x4b && prefix == 3 && o.has_sib) {
    count(TILELOADD, 1);
    load_tile(o.reg, o.base, o.stride);
  } else if (opcode == 0x4b && prefix == 2 && o.has_sib) {
    count(TILESTORED, 1);
    store_tile(o.reg, o.base, o.stride);
  } else if (opcode == 0x5c && prefix == 2 && o.mode == 3) {
    count(TDPBF16PS, 1);
    dot(o.reg, o.rm, o.third);
  } else {
    return 0;
  }
  return o.length;
}

static void on_illegal_instruction(int signal, siginfo_t* info, void* context) {
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const uint8_t* begin = (const uint8_t*)registers[REG_RIP];
  const uint8_t* code = begin;
  for (int length; (length = execute(code, registers)) > 0;) code += length;
  if (code != begin) {
    count(TRAPS, 1);
    registers[REG_RIP] = (greg_t)code;
  } else if ((previous.sa_flags & SA_SIGINFO) && previous.sa_sigaction) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(signal);
  } else {
    sigaction(SIGILL, &previous, NULL);  // the instruction traps again
  }
}

// ------------------------------------------------------------------------------------------------------ interface

// Asked by the table of backends (csrc/cpu/backend.cpp): whether tile instructions run in this process.
int attn_ext_amx_emulator(void) { return running; }

void amx_emulator_start(void) {
  if (running) return;
  struct sigaction action = {0};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  sigaction(SIGILL, &action, &previous);
  running = 1;
}

void amx_emulator_stop(void) {
  if (!running) return;
  sigaction(SIGILL, &previous, NULL);
  running = 0;
}

void amx_emulator_counts(uint64_t to[COUNTERS]) { memcpy(to, counts, sizeof counts); }
int64_t amx_emulator_configured(void) { return __atomic_load_n(&configured, __ATOMIC_RELAXED); }
