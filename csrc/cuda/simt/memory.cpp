// Checks and counts of memory accesses: registered buffers, shared memory, asynchronous copies.
//
// Order between two accesses of a block is read off a clock, `now`, that every barrier advances: what happened before
// the block's last barrier is ordered before everything after it, and likewise within a warp for its last barrier.
// Two accesses of different threads that are not ordered, one of them a write, are a race.
#include <sys/mman.h>

#include <algorithm>

#include "state.h"

namespace simt {
namespace host {
namespace {

constexpr u32 in_flight = 0xffffffffu;  // write time of bytes that a cp.async will write
constexpr u16 many_warps = 0xffff,
              lanes_of = 0x8000;    // readers of a unit, beside a thread's number
constexpr u16 atomically = 0xffff;  // writer of a unit

// ---- call sites and their accesses ----

enum class Access : u64 { load, store, shared_load, shared_store };

// The k-th access of each lane at one call site since the warp last met: one instruction of the warp.
struct Group {
  u32 lanes = 0;
  u32 bytes = 0;  // of all lanes
  struct Buffer* buffer = nullptr;
  u64 address[32];
};

struct SiteLog {
  Access access{};
  int bytes = 0;
  u32 seen[32] = {};
  size_t used = 0;
  std::vector<Group> groups;
};

struct WarpLog {
  std::vector<SiteLog> sites;  // by site number
  std::vector<u16> active;
};

// Call sites by number; a source_location is one pointer to a static record, which identifies the site.
class Sites {
 public:
  u16 number(const Where& where, Access access) {
    static_assert(sizeof(Where) == sizeof(u64));
    u64 key = std::bit_cast<u64>(where) + u64(access);
    for (u64 i = key * 0x9e3779b97f4a7c15u >> 48;; i = (i + 1) & 0xffff) {
      if (table_[i].key == key) return table_[i].number;
      if (table_[i].key == 0) {
        if (places_.size() == 0x8000) fault(current, where, "more than 32768 call sites");
        table_[i] = {key, u16(places_.size())};
        places_.push_back(where);
        return table_[i].number;
      }
    }
  }
  const Where& place(u16 number) const { return places_[number]; }

 private:
  struct Entry {
    u64 key;
    u16 number;
  };
  std::vector<Entry> table_ = std::vector<Entry>(0x10000);
  std::vector<Where> places_;
};

// ---- shadows ----

struct SharedUnit {           // 2 bytes of shared memory
  u32 written = 0, read = 0;  // times
  u16 writer = 0, write_site = 0;
  u16 reader = 0, read_site = 0;
};

struct GlobalUnit {                  // an element of a buffer that is not an input
  u32 write_block = 0, written = 0;  // serial of the block, 0: never; time
  u32 read_block = 0;
  u16 writer = 0, write_site = 0;
};

struct Buffer {
  char* base;
  size_t bytes;
  int unit;
  std::string name;
  Kind kind;
  std::vector<GlobalUnit> shadow;
  Traffic traffic;  // of the launch
};

Sites sites;
WarpLog logs[32];
std::vector<Buffer> buffers;  // by base
Buffer* last_buffer = nullptr;
std::vector<SharedUnit> shared_shadow;
size_t shared_size;
bool acquired;  // this block has done an atomic: it may read what blocks before it wrote

void log(const Thread& t, u16 site, Access access, const void* p, int bytes, Buffer* buffer) {
  WarpLog& log = logs[t.warp_id];
  if (log.sites.size() <= site) log.sites.resize(site + 64);
  SiteLog& s = log.sites[site];
  if (s.used == 0) {
    log.active.push_back(site);
    s.access = access;
    s.bytes = bytes;
  }
  u32 k = s.seen[t.lane]++;
  if (k == s.used) {
    if (s.groups.size() == k) s.groups.emplace_back();
    s.groups[k].lanes = s.groups[k].bytes = 0;
    s.groups[k].buffer = buffer;
    ++s.used;
  }
  s.groups[k].lanes |= 1u << t.lane;
  s.groups[k].bytes += bytes;
  s.groups[k].address[t.lane] = u64(p);
}

// Accesses to `count` distinct pieces of one bank row's width, `banks` side by side: the fullest bank decides.
void add_wavefronts(Wavefronts& w, u64* pieces, int count, int banks) {
  if (count == 0) return;
  std::sort(pieces, pieces + count);
  count = int(std::unique(pieces, pieces + count) - pieces);
  int load[32] = {}, most = 0;
  for (int i = 0; i < count; ++i) most = std::max(most, ++load[pieces[i] % banks]);
  w.count += most;
  w.ideal += (count + banks - 1) / banks;
}

void account(const SiteLog& s, const Group& g) {
  if (s.access == Access::load || s.access == Access::store) {
    u64 sectors[32];
    int n = 0;
    for (int lane = 0; lane < 32; ++lane) {
      if (!(g.lanes >> lane & 1)) continue;
      u64 sector = g.address[lane] >> 5;
      if (n == 0 || sectors[n - 1] != sector) sectors[n++] = sector;
    }
    if (!std::is_sorted(sectors, sectors + n)) std::sort(sectors, sectors + n);
    n = int(std::unique(sectors, sectors + n) - sectors);
    bool load = s.access == Access::load;
    (load ? counters.global_loads : counters.global_stores) += 1;
    Traffic& t = g.buffer->traffic;
    (load ? t.load_sectors : t.store_sectors) += n;
    (load ? t.load_bytes : t.store_bytes) += g.bytes;
  } else {
    Wavefronts& w = s.access == Access::shared_load ? counters.shared_load : counters.shared_store;
    int width = std::max(s.bytes, 4), lanes = 128 / width;  // lanes that one wavefront can serve
    for (int first = 0; first < 32; first += lanes) {
      u64 pieces[32];
      int n = 0;
      for (int lane = first; lane < first + lanes; ++lane) {
        if (g.lanes >> lane & 1) pieces[n++] = g.address[lane] / width;
      }
      add_wavefronts(w, pieces, n, 128 / width);
    }
  }
}

// ---- shared memory ----

// Whether a write at `time` by `writer` comes before what t does now.
bool ordered(const Thread& t, int writer, u32 time) {
  if (time < since_block || writer == t.id) return true;
  return writer / 32 == t.warp_id && time < t.warp->since;
}

size_t shared_offset(const Thread& t, const void* p, int bytes, const char* what, const Where& where) {
  size_t offset = size_t(static_cast<const char*>(p) - shared_base);
  if (offset >= shared_size || offset + bytes > shared_size) {
    fault(&t, where, "out-of-bounds shared %s of %d bytes at offset %lld, the block has %zu bytes", what, bytes,
          (long long)offset, shared_size);
  }
  if (offset % bytes) fault(&t, where, "misaligned shared %s of %d bytes at offset %zu", what, bytes, offset);
  return offset;
}

const Where& copy_into(const Thread& t, size_t offset) {
  for (const AsyncCopy& c : t.copies) {
    size_t first = size_t(c.dst - shared_base);
    if (offset + 2 > first && offset < first + c.bytes) return c.where;
  }
  return t.where;
}

void read_shared(const Thread& t, const void* p, int bytes, u16 site, const Where& where) {
  size_t offset = shared_offset(t, p, bytes, "read", where);
  for (size_t i = offset / 2; i <= (offset + bytes - 1) / 2; ++i) {
    SharedUnit& u = shared_shadow[i];
    if (u.written == in_flight) {
      fault(&t, where, "read of shared memory at offset %zu before cp_async_wait; copied at %s", 2 * i,
            at(copy_into(threads[u.writer], 2 * i)).c_str());
    }
    if (u.written < block_start) fault(&t, where, "read of shared memory never written, at offset %zu", 2 * i);
    if (!ordered(t, u.writer, u.written)) {
      fault(&t, where,
            "race on shared memory at offset %zu: read with no barrier after the write by thread "
            "%d at %s",
            2 * i, u.writer, at(sites.place(u.write_site)).c_str());
    }
    bool mine = u.reader == t.id || u.reader == (lanes_of | t.warp_id);
    bool my_warp = mine || u.reader / 32 == t.warp_id;
    if (u.read < since_block || (my_warp && u.read < t.warp->since)) {
      u.reader = u16(t.id);
    } else if (!mine) {
      u.reader = my_warp ? u16(lanes_of | t.warp_id) : many_warps;
    }
    u.read = now;
    u.read_site = site;
  }
}

void write_shared(const Thread& t, void* p, int bytes, u32 time, u16 site, const Where& where) {
  size_t offset = shared_offset(t, p, bytes, "write", where);
  for (size_t i = offset / 2; i <= (offset + bytes - 1) / 2; ++i) {
    SharedUnit& u = shared_shadow[i];
    if (u.written == in_flight) {
      fault(&t, where,
            "write to shared memory at offset %zu while a cp.async into it is in flight; copied at "
            "%s",
            2 * i, at(copy_into(threads[u.writer], 2 * i)).c_str());
    }
    if (!ordered(t, u.writer, u.written)) {
      fault(&t, where,
            "race on shared memory at offset %zu: written with no barrier after the write by "
            "thread %d at %s",
            2 * i, u.writer, at(sites.place(u.write_site)).c_str());
    }
    bool my_warp = u.reader == (lanes_of | t.warp_id) || u.reader / 32 == t.warp_id;
    if (u.reader != t.id && u.read >= since_block && !(my_warp && u.read < t.warp->since)) {
      fault(&t, where, "race on shared memory at offset %zu: written with no barrier after the read at %s", 2 * i,
            at(sites.place(u.read_site)).c_str());
    }
    u.written = time;
    u.writer = u16(t.id);
    u.write_site = site;
  }
}

// ---- global memory ----

Buffer& find(const Thread& t, const void* pointer, int bytes, int alignment, const char* what, const Where& where) {
  const char* p = static_cast<const char*>(pointer);
  Buffer* b = last_buffer;
  if (!b || p < b->base || p + bytes > b->base + b->bytes) {
    auto after =
        std::upper_bound(buffers.begin(), buffers.end(), p, [](const char* x, const Buffer& y) { return x < y.base; });
    if (after == buffers.begin()) {
      fault(&t, where, "out-of-bounds global %s of %d bytes at %p, before every buffer", what, bytes, pointer);
    }
    b = &*(after - 1);
    if (p + bytes > b->base + b->bytes) {
      std::string next =
          after == buffers.end() ? "" : ", " + std::to_string(after->base - p) + " before " + after->name;
      fault(&t, where, "out-of-bounds global %s of %d bytes at byte %lld of '%s', which has %zu%s", what, bytes,
            (long long)(p - b->base), b->name.c_str(), b->bytes, next.c_str());
    }
    last_buffer = b;
  }
  if (u64(p) % alignment) {
    fault(&t, where, "misaligned global %s of %d bytes at byte %lld of '%s'", what, bytes, (long long)(p - b->base),
          b->name.c_str());
  }
  return *b;
}

template <class F>
void each_unit(Buffer& b, const void* p, int bytes, F f) {
  if (b.shadow.empty()) return;
  size_t offset = size_t(static_cast<const char*>(p) - b.base);
  for (size_t i = offset / b.unit; i <= (offset + bytes - 1) / b.unit; ++i) f(b.shadow[i], i);
}

bool in_launch(u32 serial) { return serial >= launch_first_serial; }

void read_global(const Thread& t, const void* p, int bytes, int alignment, bool constant, const Where& where) {
  Buffer& b = find(t, p, bytes, alignment, "read", where);
  log(t, sites.number(where, Access::load), Access::load, p, bytes, &b);
  each_unit(b, p, bytes, [&](GlobalUnit& u, size_t i) {
    if (u.write_block == 0 && b.kind != Kind::inout) {
      fault(&t, where, "read of element %zu of '%s', never written", i, b.name.c_str());
    }
    if (in_launch(u.write_block)) {
      bool other = u.write_block != block_serial;
      if (constant || (other ? !acquired : u.writer != atomically && !ordered(t, u.writer, u.written))) {
        fault(&t, where, "%s element %zu of '%s', written in this launch by %s%s at %s",
              constant ? "constant read of"
              : other  ? "read of"
                       : "read with no barrier of",
              i, b.name.c_str(), block_name(u.write_block).c_str(),
              other ? "" : (", thread " + std::to_string(u.writer)).c_str(), at(sites.place(u.write_site)).c_str());
      }
    }
    if (!in_launch(u.read_block) || u.read_block == block_serial) u.read_block = block_serial;
  });
}

void write_global(const Thread& t, void* p, int bytes, bool atomic, const Where& where) {
  Buffer& b = find(t, p, bytes, bytes, "write", where);
  if (b.kind == Kind::input) {
    fault(&t, where, "write to '%s', an input (byte %lld)", b.name.c_str(),
          (long long)(static_cast<char*>(p) - b.base));
  }
  u16 site = sites.number(where, Access::store);
  log(t, site, Access::store, p, bytes, &b);
  if (atomic) acquired = true;
  each_unit(b, p, bytes, [&](GlobalUnit& u, size_t i) {
    if (atomic && u.write_block == 0 && b.kind != Kind::inout) {
      fault(&t, where, "atomic on element %zu of '%s', never written", i, b.name.c_str());
    }
    bool was_atomic = u.writer == atomically;
    if (in_launch(u.write_block) && !(was_atomic && acquired)) {
      if (u.write_block != block_serial) {
        fault(&t, where, "element %zu of '%s' written by two blocks, before by %s at %s", i, b.name.c_str(),
              block_name(u.write_block).c_str(), at(sites.place(u.write_site)).c_str());
      }
      if (!ordered(t, u.writer, u.written)) {
        fault(&t, where,
              "race on element %zu of '%s': written with no barrier after the write by thread %d "
              "at %s",
              i, b.name.c_str(), u.writer, at(sites.place(u.write_site)).c_str());
      }
    }
    if (in_launch(u.read_block) && u.read_block != block_serial && !acquired) {
      fault(&t, where, "element %zu of '%s' written, and read in the same launch by %s", i, b.name.c_str(),
            block_name(u.read_block).c_str());
    }
    u.write_block = block_serial;
    u.written = now;
    u.writer = atomic ? atomically : u16(t.id);
    u.write_site = site;
  });
}

void land(const AsyncCopy& c) {
  std::memcpy(c.dst, c.src, c.src_bytes);
  std::memset(c.dst + c.src_bytes, 0, c.bytes - c.src_bytes);
  size_t offset = size_t(c.dst - shared_base);
  for (size_t i = offset / 2; i < (offset + c.bytes) / 2; ++i) shared_shadow[i].written = now;
  counters.cp_async_bytes += c.bytes;
}

void clear_logs() {
  for (WarpLog& log : logs) {
    log.sites.clear();
    log.active.clear();
  }
}

}  // namespace

void flush_accesses(int warp_id) {
  WarpLog& log = logs[warp_id];
  for (u16 site : log.active) {
    SiteLog& s = log.sites[site];
    for (size_t k = 0; k < s.used; ++k) account(s, s.groups[k]);
    s.used = 0;
    std::fill_n(s.seen, 32, 0);
  }
  log.active.clear();
}

void ldmatrix_read(int warp_id, const char* const* rows, int matrices, const Where& where) {
  u16 site = sites.number(where, Access::shared_load);
  for (int m = 0; m < matrices; ++m) {
    u64 pieces[8];
    for (int i = 0; i < 8; ++i) {
      read_shared(threads[32 * warp_id + 8 * m + i], rows[8 * m + i], 16, site, where);
      pieces[i] = u64(rows[8 * m + i]) / 16;
    }
    add_wavefronts(counters.ldmatrix_rows, pieces, 8, 8);
  }
}

void global_read(const void* p, int bytes, bool constant, const Where& where) {
  read_global(*current, p, bytes, bytes, constant, where);
}

void global_write(void* p, int bytes, const Where& where) { write_global(*current, p, bytes, false, where); }

void global_atomic(void* p, int bytes, const Where& where) {
  write_global(*current, p, bytes, true, where);
  ++counters.atomics;
}

void shared_read(const void* p, int bytes, const Where& where) {
  u16 site = sites.number(where, Access::shared_load);
  read_shared(*current, p, bytes, site, where);
  log(*current, site, Access::shared_load, p, bytes, nullptr);
}

void shared_write(void* p, int bytes, const Where& where) {
  u16 site = sites.number(where, Access::shared_store);
  write_shared(*current, p, bytes, now, site, where);
  log(*current, site, Access::shared_store, p, bytes, nullptr);
}

void cp_async(void* shared_ptr, const void* global_ptr, int bytes, int src_bytes, const Where& where) {
  Thread& t = *current;
  if (src_bytes < 0 || src_bytes > bytes) fault(&t, where, "cp.async of %d bytes from %d", bytes, src_bytes);
  if (src_bytes > 0) read_global(t, global_ptr, src_bytes, bytes, false, where);
  u16 site = sites.number(where, Access::shared_store);
  write_shared(t, shared_ptr, bytes, in_flight, site, where);
  log(t, site, Access::shared_store, shared_ptr, bytes, nullptr);
  std::memset(shared_ptr, 0xff, bytes);
  t.copies.push_back(
      {static_cast<char*>(shared_ptr), static_cast<const char*>(global_ptr), bytes, src_bytes, t.groups, where});
}

void cp_async_commit() { ++current->groups; }

void cp_async_wait(int pending) {
  Thread& t = *current;
  size_t n = 0;  // copies are in the order of their groups
  while (n < t.copies.size() && t.copies[n].group + u32(pending) < t.groups) land(t.copies[n++]);
  t.copies.erase(t.copies.begin(), t.copies.begin() + n);
}

void land_all(Thread& t) {
  for (const AsyncCopy& c : t.copies) land(c);
  t.copies.clear();
}

void register_buffer(void* p, size_t bytes, int element_size, const char* name, Kind kind) {
  if (bytes == 0) return;
  Buffer b = {static_cast<char*>(p), bytes, element_size, name, kind, {}, {}};
  for (auto i = buffers.begin(); i != buffers.end();) {  // views of one tensor become one buffer
    if (i->base + i->bytes <= b.base || b.base + b.bytes <= i->base) {
      ++i;
      continue;
    }
    char* end = std::max(b.base + b.bytes, i->base + i->bytes);
    b.base = std::min(b.base, i->base);
    b.bytes = size_t(end - b.base);
    b.name = i->name + "+" + b.name;
    b.unit = std::min(b.unit, i->unit);
    if (b.kind != i->kind) b.kind = Kind::inout;
    i = buffers.erase(i);
  }
  if (b.kind != Kind::input) b.shadow.resize((b.bytes + b.unit - 1) / b.unit);
  buffers.insert(std::upper_bound(buffers.begin(), buffers.end(), b.base,
                                  [](const char* x, const Buffer& y) { return x < y.base; }),
                 std::move(b));
  last_buffer = nullptr;
}

void forget_buffers() {
  buffers.clear();
  last_buffer = nullptr;
}

std::string unwritten_output() {
  for (const Buffer& b : buffers) {
    if (b.kind != Kind::output) continue;
    auto unwritten = [](const GlobalUnit& u) { return u.write_block == 0; };
    auto count = std::count_if(b.shadow.begin(), b.shadow.end(), unwritten);
    if (count == 0) continue;
    auto first = std::find_if(b.shadow.begin(), b.shadow.end(), unwritten) - b.shadow.begin();
    std::string launched = launches.empty() ? "no launch" : launches.back().where;
    std::string kernel = launches.empty() ? "" : " [kernel " + launches.back().kernel + "]";
    return launched + ": " + std::to_string(count) + " of " + std::to_string(b.shadow.size()) + " elements of '" +
           b.name + "' never written, the first is " + std::to_string(first) + kernel;
  }
  return "";
}

void begin_launch_memory() {
  if (!shared_base) {
    void* p = mmap(nullptr, largest_shared, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    shared_base = static_cast<char*>(p);
    shared_shadow.resize(largest_shared / 2);
  }
  for (Buffer& b : buffers) b.traffic = {};
}

void begin_block_memory(size_t shared_bytes) {
  shared_size = shared_bytes;
  std::memset(shared_base, 0xff, shared_bytes);  // NaN in every float format
  acquired = false;
}

void end_launch_memory() {
  for (const Buffer& b : buffers) {
    if (b.traffic.load_sectors + b.traffic.store_sectors == 0) continue;
    Traffic& t = counters.traffic[b.name];  // several buffers may share a name
    t.load_sectors += b.traffic.load_sectors;
    t.store_sectors += b.traffic.store_sectors;
    t.load_bytes += b.traffic.load_bytes;
    t.store_bytes += b.traffic.store_bytes;
  }
}

void drop_memory_state() {
  clear_logs();
  std::fill(shared_shadow.begin(), shared_shadow.end(), SharedUnit{});
}

}  // namespace host
}  // namespace simt
