// Fibers, their schedule, barriers and warp collectives.
#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <memory>
#include <numeric>

#include "state.h"

#ifdef __x86_64__
asm(R"(
  .text
  .globl simt_switch
  .hidden simt_switch
  .type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size simt_switch, .-simt_switch
)");
#endif

namespace simt {
namespace host {

Thread* current = nullptr;
Index block_index, block_size, grid_size;
char* shared_base = nullptr;
Device device = {132, 227 * 1024, 90};
u64 exp_count = 0;

Counters counters;
std::vector<Counters> launches;
u64 seed = 0;
bool dry_run = false;
u32 now = 1, block_start = 1, since_block = 1;
u32 block_serial = 0, launch_first_serial = 0;
Thread* threads = nullptr;

namespace {

constexpr int max_threads = 1024;

std::vector<Warp> warps;
std::vector<Thread> thread_storage;
std::vector<u64> block_order;  // linear block indices of the launch, in the order they run
fiber::Context main_context;
void (*launch_body)(void*);
void* launch_context;
std::string failure;
bool running = false;

u64 random_state;
int thread_count, warp_count, waiting, exited;
bool vote, vote_result;
Where barrier_where;

bool same_place(const Where& a, const Where& b) {
  if (std::bit_cast<const void*>(a) == std::bit_cast<const void*>(b)) return true;  // one static record
  return a.line() == b.line() && a.column() == b.column() && !strcmp(a.file_name(), b.file_name());
}

const char* name_of(Op op) {
  switch (op) {
    case Op::shfl: return "shfl";
    case Op::shfl_xor: return "shfl_xor";
    case Op::shfl_down: return "shfl_down";
    case Op::shfl_up: return "shfl_up";
    case Op::ballot: return "vote";
    case Op::sync_warp: return "sync_warp";
    case Op::ldmatrix_x2: return "ldmatrix_x2";
    case Op::ldmatrix_x4: return "ldmatrix_x4";
    case Op::ldmatrix_x2_trans: return "ldmatrix_x2_trans";
    case Op::ldmatrix_x4_trans: return "ldmatrix_x4_trans";
    case Op::mma_bf16: return "mma_m16n8k16<bf16>";
    case Op::mma_f16: return "mma_m16n8k16<f16>";
  }
  return "?";
}

std::string kernel_name(const void* kernel) {
  Dl_info info;
  if (!dladdr(kernel, &info) || !info.dli_sname) return "kernel";
  int status;
  std::unique_ptr<char, void (*)(void*)> demangled(abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status),
                                                   free);
  std::string name = status == 0 ? demangled.get() : info.dli_sname;
  if (name.rfind("void ", 0) == 0) name.erase(0, 5);
  int depth = 0;  // the parameter list starts at the first parenthesis outside template arguments
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0) return name.substr(0, i);
  }
  return name;
}

Index index_of(u64 linear) {
  return {u32(linear % grid_size.x), u32(linear / grid_size.x % grid_size.y), u32(linear / grid_size.x / grid_size.y)};
}

// ---- schedule ----

void run(Thread* next) {
  Thread* from = current;
  if (next == from) return;
  current = next;
  fiber::swap(from->context, next->context);
}

// A lane that can run, the next one after `lane` or a random one.
int pick_lane(const Warp& warp, int lane) {
  int start = seed ? int(random() % 32) : (lane + 1) % 32;
  return (std::countr_zero(std::rotr(warp.ready, start)) + start) % 32;
}

Thread* pick_in(int warp_id, int lane) { return &threads[32 * warp_id + pick_lane(warps[warp_id], lane)]; }

// A warp that can run, the next one or a random one; -1: none.
int pick_warp(int after) {
  int start = seed ? int(random() % warp_count) : after + 1;
  for (int i = 0; i < warp_count; ++i) {
    int id = (start + i) % warp_count;
    if (warps[id].ready) return id;
  }
  return -1;
}

// Leaves a thread that cannot go on.
void run_next() {
  Thread* t = current;
  if (t->warp->ready) return run(pick_in(t->warp_id, t->lane));
  int id = pick_warp(t->warp_id);
  if (id >= 0) return run(pick_in(id, 31));
  if (exited == thread_count) {
    current = nullptr;
    fiber::swap(t->context, main_context);
    return;
  }
  const Thread* stuck = nullptr;
  for (int i = 0; i < thread_count && !stuck; ++i) {
    if (threads[i].state == Thread::at_barrier) stuck = &threads[i];
  }
  fault(stuck, stuck->where, "deadlock at a barrier: %d of %d threads wait, %d have exited", waiting, thread_count,
        exited);
}

[[noreturn]] void diverged(const Warp& warp, const Thread* other) {
  std::string where = other->state == Thread::exited ? "has exited" : "waits at the barrier at " + at(other->where);
  fault(current, warp.where, "lanes diverge at a warp collective: %d lanes wait at %s, lane %d %s",
        std::popcount(warp.arrived), name_of(warp.op), other->lane, where.c_str());
}

void thread_main() {
  launch_body(launch_context);
  Thread* t = current;
  land_all(*t);
  t->state = Thread::exited;
  t->warp->ready &= ~(1u << t->lane);
  ++exited;
  if (t->warp->arrived) diverged(*t->warp, t);
  run_next();
  __builtin_unreachable();
}

void arrive_at_barrier(const Where& where) {
  Thread* t = current;
  t->where = where;
  t->state = Thread::at_barrier;
  if (t->warp->arrived) diverged(*t->warp, t);
  if (waiting == 0) {
    barrier_where = where;
  } else if (!same_place(where, barrier_where)) {
    fault(t, where, "threads of a block meet at different barriers, others at %s", at(barrier_where).c_str());
  }
  t->warp->ready &= ~(1u << t->lane);
  if (++waiting < thread_count) return run_next();
  waiting = 0;
  ++counters.barriers;
  since_block = ++now;
  vote_result = vote;
  vote = false;
  for (int i = 0; i < warp_count; ++i) {
    flush_accesses(i);
    warps[i].ready = ~0u;
    warps[i].since = now;
  }
  for (int i = 0; i < thread_count; ++i) threads[i].state = Thread::running;
  if (seed) run(pick_in(pick_warp(t->warp_id), t->lane));
}

// ---- collectives ----

void execute(Warp& w) {
  switch (w.op) {
    case Op::shfl:
    case Op::shfl_xor:
    case Op::shfl_down:
    case Op::shfl_up:
      for (int lane = 0; lane < 32; ++lane) {
        int from = w.source[lane];
        if (w.op == Op::shfl) from = from & 31;
        if (w.op == Op::shfl_xor) from = lane ^ from;
        if (w.op == Op::shfl_down) from = lane + from;
        if (w.op == Op::shfl_up) from = lane - from;
        w.result[lane] = w.value[from >= 0 && from < 32 ? from : lane];
      }
      ++counters.shuffles;
      break;
    case Op::ballot: {
      u32 bits = 0;
      for (int lane = 0; lane < 32; ++lane) bits |= u32(w.value[lane] != 0) << lane;
      std::fill_n(w.result, 32, bits);
      ++counters.votes;
      break;
    }
    case Op::sync_warp:
      w.since = ++now;
      ++counters.warp_barriers;
      break;
    case Op::ldmatrix_x2:
    case Op::ldmatrix_x4:
    case Op::ldmatrix_x2_trans:
    case Op::ldmatrix_x4_trans: {
      int matrices = w.op == Op::ldmatrix_x4 || w.op == Op::ldmatrix_x4_trans ? 4 : 2;
      ldmatrix_read(current->warp_id, w.row, matrices, w.where);
      warp_ops::ldmatrix(w.a, w.row, matrices, w.op == Op::ldmatrix_x2_trans || w.op == Op::ldmatrix_x4_trans);
      ++counters.ldmatrix;
      break;
    }
    case Op::mma_bf16:
    case Op::mma_f16:
      warp_ops::mma_m16n8k16(w.c, w.a, w.b, w.op == Op::mma_bf16);
      ++counters.mma;
      break;
  }
}

void run_block(u64 linear, size_t shared_bytes, const fiber::Stacks& stacks) {
  block_index = index_of(linear);
  ++block_serial;
  block_start = since_block = ++now;
  waiting = exited = 0;
  vote = false;
  begin_block_memory(shared_bytes);
  for (int i = 0; i < warp_count; ++i) {
    warps[i].arrived = 0;
    warps[i].ready = ~0u;
    warps[i].since = now;
  }
  for (int i = 0; i < thread_count; ++i) {
    Thread& t = threads[i];
    t.index = {u32(i), 0, 0};
    t.lane = i % 32;
    t.warp_id = i / 32;
    t.id = i;
    t.warp = &warps[i / 32];
    t.state = Thread::running;
    t.groups = 0;
    t.copies.clear();
    fiber::start(t.context, stacks, i, thread_main);
  }
  current = pick_in(pick_warp(warp_count - 1), 31);
  fiber::swap(main_context, current->context);
  current = nullptr;
  for (int i = 0; i < warp_count; ++i) flush_accesses(i);
}

}  // namespace

u64 random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state >> 11;
}

std::string at(const Where& where) { return std::string(where.file_name()) + ":" + std::to_string(where.line()); }

std::string block_name(u32 serial) {
  Index i = index_of(block_order[serial - launch_first_serial]);
  return "block (" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}

void fault(const Thread* thread, const Where& where, const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  failure = at(where) + ": " + text + " [kernel " + counters.kernel;
  if (thread) failure += ", " + block_name(block_serial) + ", thread " + std::to_string(thread->id);
  failure += "]";
  if (!current) throw Fault(failure);
  fiber::Context abandoned;
  current = nullptr;
  fiber::swap(abandoned, main_context);
  __builtin_unreachable();
}

void collective(Op op, const Where& where) {
  Thread* t = current;
  Warp& w = *t->warp;
  if (w.arrived == 0) {
    w.op = op;
    w.where = where;
  } else if (op != w.op || !same_place(where, w.where)) {
    fault(t, where, "lanes diverge at a warp collective: lane %d meets %s, others %s at %s", t->lane, name_of(op),
          name_of(w.op), at(w.where).c_str());
  }
  u32 bit = 1u << t->lane;
  w.arrived |= bit;
  if (w.arrived == ~0u) {
    w.arrived = 0;
    w.ready = ~0u;
    flush_accesses(t->warp_id);
    execute(w);
    if (seed && random() % 4 == 0) run(pick_in(pick_warp(t->warp_id), t->lane));
    return;
  }
  w.ready &= ~bit;
  if (!w.ready) {
    for (int lane = 0; lane < 32; ++lane) {
      if (!(w.arrived >> lane & 1)) diverged(w, &threads[32 * t->warp_id + lane]);
    }
  }
  run_next();
}

void sync_threads(const Where& where) { arrive_at_barrier(where); }

bool sync_threads_or(bool predicate, const Where& where) {
  vote |= predicate;
  arrive_at_barrier(where);
  return vote_result;
}

void launch(const void* kernel, Dim grid, Dim block, size_t shared_bytes, const Where& where, void (*body)(void*),
            void* context) {
  static std::unique_ptr<fiber::Stacks> stacks;  // as many as the largest block so far
  counters = {};
  counters.kernel = kernel_name(kernel);
  counters.where = at(where);
  counters.grid = grid;
  counters.block = block;
  counters.shared_bytes = shared_bytes;
  if (running) fault(nullptr, where, "a launch inside a launch");
  u64 blocks = u64(grid.x) * grid.y * grid.z;
  if (blocks == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    fault(nullptr, where, "grid (%u, %u, %u) is not in 1..(2147483647, 65535, 65535)", grid.x, grid.y, grid.z);
  }
  if (block.y != 1 || block.z != 1 || block.x == 0 || block.x % 32 || block.x > max_threads) {
    fault(nullptr, where, "block (%u, %u, %u) is not (a multiple of 32 up to 1024, 1, 1)", block.x, block.y, block.z);
  }
  if (shared_bytes > size_t(device.max_shared)) {
    fault(nullptr, where, "%zu bytes of shared memory, the device has %d", shared_bytes, device.max_shared);
  }
  if (dry_run) {
    launches.push_back(counters);
    return;
  }
  if (!stacks || stacks->count() < int(block.x)) {
    stacks.reset();
    stacks = std::make_unique<fiber::Stacks>(int(block.x));
  }
  grid_size = {grid.x, grid.y, grid.z};
  block_size = {block.x, 1, 1};
  thread_count = int(block.x);
  warp_count = thread_count / 32;
  launch_body = body;
  launch_context = context;
  warps.resize(max_threads / 32);
  thread_storage.resize(max_threads);
  threads = thread_storage.data();
  random_state = seed * 0x9e3779b97f4a7c15u + 1;
  block_order.resize(blocks);
  std::iota(block_order.begin(), block_order.end(), 0);
  if (seed) {
    for (u64 i = blocks; i > 1; --i) std::swap(block_order[i - 1], block_order[random() % i]);
  }
  failure.clear();
  exp_count = 0;
  launch_first_serial = block_serial + 1;
  begin_launch_memory();
  running = true;
  for (u64 i = 0; i < blocks && failure.empty(); ++i) run_block(block_order[i], shared_bytes, *stacks);
  running = false;
  counters.exp = exp_count;
  if (!failure.empty()) {
    drop_memory_state();
    throw Fault(failure);
  }
  end_launch_memory();
  launches.push_back(counters);
}

}  // namespace host
}  // namespace simt
