// Small kernels with one planted fault each. Without it, out[i] = in[i with the order of each block's 64 elements
// reversed]. The line that the report must name ends with the comment "fault:" and the fault's name.
#include "simt.cuh"

using simt::u32;

namespace faults {

struct Params {
  const float* in;
  float* out;
  bool faulty;
};

ATTN_DEVICE int tid() { return int(simt::thread_idx().x); }
ATTN_DEVICE int first() { return 64 * int(simt::block_idx().x); }
ATTN_DEVICE float* tile() { return reinterpret_cast<float*>(simt::shared()); }

ATTN_KERNEL(64, 1) missing_sync_threads(ATTN_CONSTANT_PARAM Params p) {
  simt::sts(tile() + tid(), simt::ldg(p.in + first() + tid()));
  if (!p.faulty) simt::sync_threads();
  float x = simt::lds(tile() + 63 - tid());  // fault: missing_sync_threads
  simt::st(p.out + first() + tid(), x);
}

ATTN_KERNEL(64, 1) missing_cp_async_wait(ATTN_CONSTANT_PARAM Params p) {
  if (tid() < 16) simt::cp_async16(tile() + 4 * tid(), p.in + first() + 4 * tid());
  simt::cp_async_commit();
  if (!p.faulty) simt::cp_async_wait<0>();
  simt::sync_threads();
  float x = simt::lds(tile() + 63 - tid());  // fault: missing_cp_async_wait
  simt::st(p.out + first() + tid(), x);
}

// The wait is there, and the barrier that shows the data to the other threads is not.
ATTN_KERNEL(64, 1) missing_barrier_after_cp_async(ATTN_CONSTANT_PARAM Params p) {
  if (tid() < 16) simt::cp_async16(tile() + 4 * tid(), p.in + first() + 4 * tid());
  simt::cp_async_commit();
  simt::cp_async_wait<0>();
  if (!p.faulty) simt::sync_threads();
  float x = simt::lds(tile() + 63 - tid());  // fault: missing_barrier_after_cp_async
  simt::st(p.out + first() + tid(), x);
}

// A pipeline of two groups that waits for one group too few.
ATTN_KERNEL(64, 1) cp_async_wait_too_short(ATTN_CONSTANT_PARAM Params p) {
  for (int half = 0; half < 2; ++half) {
    if (tid() < 8) simt::cp_async16(tile() + 32 * half + 4 * tid(), p.in + first() + 32 * half + 4 * tid());
    simt::cp_async_commit();
  }
  if (p.faulty) {
    simt::cp_async_wait<1>();
  } else {
    simt::cp_async_wait<0>();
  }
  simt::sync_threads();
  float x = simt::lds(tile() + 63 - tid());  // fault: cp_async_wait_too_short
  simt::st(p.out + first() + tid(), x);
}

// The tile is written again while another warp may still read it.
ATTN_KERNEL(64, 1) shared_race(ATTN_CONSTANT_PARAM Params p) {
  simt::sts(tile() + tid(), 0.0f);
  simt::sync_threads();
  float zero = simt::lds(tile() + 63 - tid());  // fault: shared_race
  if (!p.faulty) simt::sync_threads();
  simt::sts(tile() + tid(), simt::ldg(p.in + first() + tid()) + zero);  // fault: shared_race
  simt::sync_threads();
  simt::st(p.out + first() + tid(), simt::lds(tile() + 63 - tid()));
}

// Lanes of one warp exchange through shared memory.
ATTN_KERNEL(64, 1) missing_sync_warp(ATTN_CONSTANT_PARAM Params p) {
  simt::sts(tile() + tid(), simt::ldg(p.in + first() + 63 - tid()));
  if (!p.faulty) simt::sync_warp();
  float x = simt::lds(tile() + (tid() ^ 1));  // fault: missing_sync_warp
  simt::st(p.out + first() + (tid() ^ 1), x);
}

ATTN_KERNEL(64, 1) divergent_collective(ATTN_CONSTANT_PARAM Params p) {
  float x = simt::ldg(p.in + first() + 63 - tid());
  if (!p.faulty || simt::lane() < 16) x = simt::shfl_xor(x, 1);  // fault: divergent_collective
  x = simt::shfl_xor(x, 1);  // fault: divergent_collective
  simt::st(p.out + first() + tid(), x);
}

ATTN_KERNEL(64, 1) collective_after_exit(ATTN_CONSTANT_PARAM Params p) {
  float x = simt::ldg(p.in + first() + 63 - tid());
  simt::st(p.out + first() + tid(), x);
  if (p.faulty && simt::lane() == 31) return;
  simt::shfl(x, 0);  // fault: collective_after_exit
}

ATTN_KERNEL(64, 1) global_read_out_of_bounds(ATTN_CONSTANT_PARAM Params p) {
  float x = simt::ldg(p.in + first() + 63 - tid() + (p.faulty ? 1 : 0));  // fault: global_read_out_of_bounds
  simt::st(p.out + first() + tid(), x);
}

ATTN_KERNEL(64, 1) global_write_out_of_bounds(ATTN_CONSTANT_PARAM Params p) {
  float x = simt::ldg(p.in + first() + 63 - tid());
  simt::st(p.out + first() + tid() - (p.faulty ? 1 : 0), x);  // fault: global_write_out_of_bounds
}

ATTN_KERNEL(64, 1) shared_out_of_bounds(ATTN_CONSTANT_PARAM Params p) {
  int shift = p.faulty ? 1 : 0;
  simt::sts(tile() + tid() + shift, simt::ldg(p.in + first() + tid()));  // fault: shared_out_of_bounds
  simt::sync_threads();
  simt::st(p.out + first() + tid(), simt::lds(tile() + 63 - tid() + shift));
}

ATTN_KERNEL(64, 1) unwritten_shared_read(ATTN_CONSTANT_PARAM Params p) {
  if (!p.faulty || tid() != 40) simt::sts(tile() + tid(), simt::ldg(p.in + first() + tid()));
  simt::sync_threads();
  float x = simt::lds(tile() + 63 - tid());  // fault: unwritten_shared_read
  simt::st(p.out + first() + tid(), x);
}

ATTN_KERNEL(64, 1) unwritten_ldmatrix_read(ATTN_CONSTANT_PARAM Params p) {
  if (!p.faulty || tid() != 40) simt::sts(tile() + tid(), simt::ldg(p.in + first() + tid()));
  simt::sync_threads();
  u32 r[2];
  simt::ldmatrix_x2(r, tile() + 4 * (simt::lane() % 16));  // fault: unwritten_ldmatrix_read
  simt::st(p.out + first() + tid(), simt::lds(tile() + 63 - tid()));
}

ATTN_KERNEL(64, 1) output_never_written(ATTN_CONSTANT_PARAM Params p) {
  float x = simt::ldg(p.in + first() + 63 - tid());
  if (!p.faulty || tid() != 63) simt::st(p.out + first() + tid(), x);
}

ATTN_KERNEL(64, 1) output_written_twice(ATTN_CONSTANT_PARAM Params p) {
  int i = p.faulty && first() == 64 ? tid() + 63 : first() + tid();
  simt::st(p.out + i, simt::ldg(p.in + first() + 63 - tid()));  // fault: output_written_twice
}

ATTN_KERNEL(64, 1) read_of_another_block(ATTN_CONSTANT_PARAM Params p) {
  simt::st(p.out + first() + tid(), simt::ldg(p.in + first() + 63 - tid()));
  if (p.faulty) simt::ld(p.out + 64 - first());  // fault: read_of_another_block
}

ATTN_KERNEL(64, 1) input_written(ATTN_CONSTANT_PARAM Params p) {
  float x = simt::ldg(p.in + first() + 63 - tid());
  simt::st(p.out + first() + tid(), x);
  if (p.faulty) simt::st(const_cast<float*>(p.in) + first() + tid(), x);  // fault: input_written
}

ATTN_KERNEL(64, 1) deadlock_at_barrier(ATTN_CONSTANT_PARAM Params p) {
  simt::st(p.out + first() + tid(), simt::ldg(p.in + first() + 63 - tid()));
  if (p.faulty && simt::warp() == 1) return;
  simt::sync_threads();  // fault: deadlock_at_barrier
}

ATTN_KERNEL(64, 1) different_barriers(ATTN_CONSTANT_PARAM Params p) {
  simt::st(p.out + first() + tid(), simt::ldg(p.in + first() + 63 - tid()));
  if (p.faulty && simt::warp() == 1) {
    simt::sync_threads();  // fault: different_barriers
  } else {
    simt::sync_threads();  // fault: different_barriers
  }
}

ATTN_KERNEL(64, 1) misaligned_access(ATTN_CONSTANT_PARAM Params p) {
  if (p.faulty) simt::ldg128(p.in + 1);  // fault: misaligned_access
  simt::st(p.out + first() + tid(), simt::ldg(p.in + first() + 63 - tid()));
}

ATTN_KERNEL(64, 1) cp_async_out_of_bounds(ATTN_CONSTANT_PARAM Params p) {
  int shift = p.faulty && first() == 64 ? 4 : 0;
  if (tid() < 16) simt::cp_async16(tile() + 4 * tid(), p.in + first() + 4 * tid() + shift);  // fault: cp_async_out_of_bounds
  simt::cp_async_commit();
  simt::cp_async_wait<0>();
  simt::sync_threads();
  simt::st(p.out + first() + tid(), simt::lds(tile() + 63 - tid()));
}

// The next tile is copied into the stage that other threads still read.
ATTN_KERNEL(64, 1) stage_overwritten(ATTN_CONSTANT_PARAM Params p) {
  for (int round = 0; round < 2; ++round) {
    if (tid() < 16) {
      simt::cp_async16(tile() + 4 * tid(), p.in + first() + 4 * tid());  // fault: stage_overwritten
    }
    simt::cp_async_commit();
    simt::cp_async_wait<0>();
    simt::sync_threads();
    float x = simt::lds(tile() + 63 - tid());  // fault: stage_overwritten
    if (!p.faulty) simt::sync_threads();
    if (round == 1) simt::st(p.out + first() + tid(), x);
  }
}

ATTN_KERNEL(64, 1) store_into_copy_in_flight(ATTN_CONSTANT_PARAM Params p) {
  if (tid() < 16) simt::cp_async16(tile() + 4 * tid(), p.in + first() + 4 * tid());
  simt::cp_async_commit();
  if (!p.faulty) simt::cp_async_wait<0>();
  if (tid() == 0) simt::sts(tile(), simt::ldg(p.in + first()));  // fault: store_into_copy_in_flight
  if (p.faulty) simt::cp_async_wait<0>();
  simt::sync_threads();
  simt::st(p.out + first() + tid(), simt::lds(tile() + 63 - tid()));
}

ATTN_KERNEL(64, 1) race_on_output(ATTN_CONSTANT_PARAM Params p) {
  simt::st(p.out + first() + tid(), simt::ldg(p.in + first() + 63 - tid()));  // fault: race_on_output
  if (p.faulty && tid() == 5) simt::st(p.out + first() + 40, simt::ldg(p.in + first() + 23));  // fault: race_on_output
}

ATTN_KERNEL(64, 1) unordered_global_read(ATTN_CONSTANT_PARAM Params p) {
  simt::st(p.out + first() + tid(), simt::ldg(p.in + first() + 63 - tid()));
  if (!p.faulty) simt::sync_threads();
  simt::ld(p.out + first() + 63 - tid());  // fault: unordered_global_read
}

ATTN_KERNEL(64, 1) constant_read_of_output(ATTN_CONSTANT_PARAM Params p) {
  simt::st(p.out + first() + tid(), simt::ldg(p.in + first() + 63 - tid()));
  if (p.faulty) simt::ldg(p.out + first() + tid());  // fault: constant_read_of_output
}

using Kernel = void (*)(const Params);

const char* run(Kernel kernel, const float* in, float* out, int faulty) {
  return simt::guarded([&] {
    simt::launch(kernel, simt::Dim{2}, simt::Dim{64}, 256, nullptr, Params{in, out, faulty != 0});  // fault: output_never_written
  });
}

}  // namespace faults

#define ENTRY(name)                                                            \
  extern "C" const char* name(const float* in, float* out, int faulty) {       \
    return faults::run(faults::name, in, out, faulty);                         \
  }

ENTRY(missing_sync_threads)
ENTRY(missing_cp_async_wait)
ENTRY(missing_barrier_after_cp_async)
ENTRY(cp_async_wait_too_short)
ENTRY(shared_race)
ENTRY(missing_sync_warp)
ENTRY(divergent_collective)
ENTRY(collective_after_exit)
ENTRY(global_read_out_of_bounds)
ENTRY(global_write_out_of_bounds)
ENTRY(shared_out_of_bounds)
ENTRY(unwritten_shared_read)
ENTRY(unwritten_ldmatrix_read)
ENTRY(output_never_written)
ENTRY(output_written_twice)
ENTRY(read_of_another_block)
ENTRY(input_written)
ENTRY(deadlock_at_barrier)
ENTRY(different_barriers)
ENTRY(misaligned_access)
ENTRY(cp_async_out_of_bounds)
ENTRY(stage_overwritten)
ENTRY(store_into_copy_in_flight)
ENTRY(race_on_output)
ENTRY(unordered_global_read)
ENTRY(constant_read_of_output)
