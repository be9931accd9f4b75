// The executor's C functions, for the tests: buffers, the schedule's seed, what went wrong, what was counted.
#include <algorithm>

#include "state.h"

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace simt::host;

std::string error, json;

void field(const char* name, unsigned long long value) {
  json += std::string(json.back() == '{' ? "" : ", ") + "\"" + name + "\": " + std::to_string(value);
}

void text(const char* name, const std::string& value) {
  json += std::string(json.back() == '{' ? "" : ", ") + "\"" + name + "\": \"";
  for (char c : value) {
    if (c == '"' || c == '\\') json += '\\';
    json += c;
  }
  json += '"';
}

}  // namespace

namespace simt {

const char* guarded(void (*body)(void*), void* context) {
  try {
    body(context);
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}

}  // namespace simt

SIMT_EXPORT void simt_register(void* p, size_t bytes, int element_size, const char* name, int kind) {
  register_buffer(p, bytes, element_size, name, Kind(kind));
}

// Forgets buffers and counters.
SIMT_EXPORT void simt_reset() {
  forget_buffers();
  launches.clear();
}

// 0: warps run in order, each as far as it can; else a schedule drawn from the seed.
SIMT_EXPORT void simt_seed(unsigned long long value) { seed = value; }

// Launches are recorded with their grid and checked, and no thread runs.
SIMT_EXPORT void simt_dry_run(int on) { dry_run = on; }

SIMT_EXPORT void simt_device(int sms, int max_shared, int cc) {
  device = {sms, std::min(max_shared, largest_shared), cc};
}

// Null when every element of every output is written, else the message.
SIMT_EXPORT const char* simt_check_outputs() {
  error = unwritten_output();
  return error.empty() ? nullptr : error.c_str();
}

// The launches since the last reset, a JSON array.
SIMT_EXPORT const char* simt_launches() {
  json = "[";
  for (const Counters& c : launches) {
    json += json.size() > 1 ? ", {" : "{";
    text("kernel", c.kernel);
    text("where", c.where);
    field("blocks", (unsigned long long)c.grid.x * c.grid.y * c.grid.z);
    field("grid_x", c.grid.x);
    field("grid_y", c.grid.y);
    field("grid_z", c.grid.z);
    field("threads", c.block.x);
    field("shared_bytes", c.shared_bytes);
    field("mma", c.mma);
    field("ldmatrix", c.ldmatrix);
    field("shuffles", c.shuffles);
    field("votes", c.votes);
    field("warp_barriers", c.warp_barriers);
    field("barriers", c.barriers);
    field("exp", c.exp);
    field("global_loads", c.global_loads);
    field("global_stores", c.global_stores);
    field("atomics", c.atomics);
    field("cp_async_bytes", c.cp_async_bytes);
    field("shared_load_wavefronts", c.shared_load.count);
    field("shared_load_ideal", c.shared_load.ideal);
    field("shared_store_wavefronts", c.shared_store.count);
    field("shared_store_ideal", c.shared_store.ideal);
    field("ldmatrix_wavefronts", c.ldmatrix_rows.count);
    field("ldmatrix_ideal", c.ldmatrix_rows.ideal);
    json += ", \"traffic\": {";
    for (const auto& [name, t] : c.traffic) {
      if (json.back() != '{') json += ", ";
      json += "\"" + name + "\": {";
      field("load_sectors", t.load_sectors);
      field("store_sectors", t.store_sectors);
      field("load_bytes", t.load_bytes);
      field("store_bytes", t.store_bytes);
      json += "}";
    }
    json += "}}";
  }
  json += "]";
  return json.c_str();
}
