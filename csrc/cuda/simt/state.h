// What the parts of the executor share.
#pragma once

#include <map>

#include "../simt.cuh"

namespace simt {
namespace host {

// Traffic of one buffer. A sector is 32 aligned bytes; one access of a warp touches each distinct sector once.
struct Traffic {
  u64 load_sectors = 0, store_sectors = 0;
  u64 load_bytes = 0, store_bytes = 0;  // asked for by the lanes
};

// Shared memory serves its 32 banks of 4 bytes once per wavefront; `ideal` is the count without bank conflicts.
struct Wavefronts {
  u64 count = 0, ideal = 0;
};

// What one launch did. Unless said otherwise a count is of warp instructions.
struct Counters {
  std::string kernel, where;
  Dim grid, block;
  u64 shared_bytes = 0;
  u64 mma = 0, ldmatrix = 0, shuffles = 0, votes = 0, warp_barriers = 0;
  u64 barriers = 0;  // of blocks
  u64 exp = 0;       // of threads
  u64 global_loads = 0, global_stores = 0, atomics = 0;
  u64 cp_async_bytes = 0;  // landed, zero fill included
  Wavefronts shared_load, shared_store, ldmatrix_rows;
  std::map<std::string, Traffic> traffic;  // by buffer
};

constexpr int largest_shared = 228 * 1024;  // of any device, bytes

enum class Kind : int {
  input,    // the kernels may not write it
  output,   // unwritten at first; every element must be written
  inout,    // written and read
  scratch,  // unwritten at first
};

extern Counters counters;  // of the launch in progress
extern std::vector<Counters> launches;
extern u64 seed;                 // 0: fixed schedule
extern bool dry_run;             // launches are recorded, and no thread runs
extern u32 now;                  // counts barriers of warps and blocks
extern u32 block_start;          // `now` at the start of the block
extern u32 since_block;          // `now` at the last barrier of the block
extern u32 block_serial;         // of the block in progress, never 0
extern u32 launch_first_serial;  // of the launch's first block
extern Thread* threads;          // of the block

u64 random();

// Ends the launch; message formatted as by printf.
[[noreturn]] __attribute__((format(printf, 3, 4))) void fault(const Thread* thread, const Where& where,
                                                              const char* format, ...);
std::string at(const Where& where);
std::string block_name(u32 serial);

// memory.cpp
void register_buffer(void* p, size_t bytes, int element_size, const char* name, Kind kind);
void forget_buffers();
std::string unwritten_output();  // message, empty when every element of every output is written
void begin_launch_memory();
void begin_block_memory(size_t shared_bytes);
void end_launch_memory();
void drop_memory_state();  // after a fault
void land_all(Thread& thread);
void flush_accesses(int warp_id);
void ldmatrix_read(int warp_id, const char* const* rows, int matrices, const Where& where);

}  // namespace host
}  // namespace simt
