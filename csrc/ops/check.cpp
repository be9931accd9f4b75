#include "ops/check.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <stdexcept>

#include "ops/huge_pages.h"

namespace attn_ext::ops {

std::string to_string(const Shape& shape) {
  std::string s = "(";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + (shape.size() == 1 ? ",)" : ")");
}

std::string to_string(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return "another dtype (" + std::to_string(int(dtype)) + ")";
  }
}

std::string number(double value) {
  std::ostringstream s;
  s << value;
  return s.str();
}

Shape shape_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return Shape(sizes.begin(), sizes.end());
}

DType dtype_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    case ScalarType::Double: return DType::f64;
    case ScalarType::Bool: return DType::boolean;
    default: throw std::logic_error("no kernel for " + to_string(dtype));
  }
}

ScalarType accumulate_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

namespace {

bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

using DeviceOf = std::pair<int32_t, int32_t>;  // type, index

DeviceOf device_of(const Tensor& t) {
  DeviceOf device{};
  aoti_torch_get_device_type(t.get(), &device.first);
  aoti_torch_get_device_index(t.get(), &device.second);
  return device;
}

std::string to_string(const DeviceOf& device) {
  const auto [type, index] = device;
  const std::string name = type == aoti_torch_device_type_cpu()    ? "cpu"
                           : type == aoti_torch_device_type_cuda() ? "cuda"
                           : type == aoti_torch_device_type_meta() ? "meta"
                                                                   : "device type " + std::to_string(type);
  return name == "cuda" ? name + ":" + std::to_string(index) : name;
}

}  // namespace

namespace {

Shape strides_of(const Tensor& t) {
  const auto strides = t.strides();
  return Shape(strides.begin(), strides.end());
}

// The dimensions with more than one element, outermost (largest stride) first.
std::vector<std::pair<int64_t, int64_t>> dimensions(const Tensor& t) {
  std::vector<std::pair<int64_t, int64_t>> stride_and_size;
  for (int64_t i = 0; i < t.dim(); ++i)
    if (t.size(i) > 1) stride_and_size.push_back({t.stride(i), t.size(i)});
  std::sort(stride_and_size.rbegin(), stride_and_size.rend());
  return stride_and_size;
}

// Does a dimension step by less than what the dimensions inside it span? (So it is in every layout that is a view of
// a buffer without repetition.)
bool overlaps_itself(const Tensor& t) {
  const auto outer_first = dimensions(t);
  int64_t span = 1;
  for (auto d = outer_first.rbegin(); d != outer_first.rend(); ++d) {
    if (d->first < span) return true;
    span = d->first * d->second;
  }
  return false;
}

// Is `offset` the distance of two elements of a tensor with these dimensions? Greedy: what the inner dimensions span is
// less than one step, so only the two nearest multiples of the outermost stride can work.
bool is_distance(int64_t offset, const std::pair<int64_t, int64_t>* d, const std::pair<int64_t, int64_t>* end) {
  if (d == end) return offset == 0;
  const int64_t steps = offset / d->first;
  for (const int64_t n : {steps - 1, steps, steps + 1})
    if (std::abs(n) < d->second && is_distance(offset - n * d->first, d + 1, end)) return true;
  return false;
}

// Do two tensors of one shape, neither of which overlaps itself, share an element? Exact for equal strides (parts of
// one buffer, interleaved or not); for others only the same first element counts.
bool overlap(const Tensor& a, const Tensor& b) {
  const int64_t bytes = static_cast<const char*>(b.const_data_ptr()) - static_cast<const char*>(a.const_data_ptr());
  if (bytes == 0) return true;
  const int64_t size = int64_t(a.element_size());
  if (strides_of(a) != strides_of(b) || bytes % size != 0) return false;
  const auto outer_first = dimensions(a);
  return is_distance(bytes / size, outer_first.data(), outer_first.data() + outer_first.size());
}

}  // namespace

void Checker::finite(double value, const char* name, ScalarType dtype) const {
  const bool wide = dtype == ScalarType::Double;
  ATTN_EXT_CHECK(*this, std::isfinite(wide ? value : double(float(value))), name,
                 wide ? "be finite" : "be finite in float32", number(value));
}

void Checker::fail(const std::string& argument, const std::string& rule, const std::string& got) const {
  const std::string of_layer = layer < 0 ? "" : " of layer " + std::to_string(layer);
  throw std::runtime_error(std::string(op) + ": " + argument + of_layer + " must " + rule + ", got " + got);
}

void Checker::rank(const Tensor& t, const char* name, int64_t rank, const char* layout) const {
  ATTN_EXT_CHECK(*this, t.dim() == rank, name, std::string("have shape ") + layout, to_string(shape_of(t)));
}

void Checker::shape(const Tensor& t, const char* name, const Shape& expected, const char* layout) const {
  const auto sizes = t.sizes();
  ATTN_EXT_CHECK(*this, std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end()), name,
                 std::string("have shape ") + layout + " = " + to_string(expected), to_string(shape_of(t)));
}

void Checker::floating(const Tensor& t, const char* name) const {
  ATTN_EXT_CHECK(*this, is_floating(t.scalar_type()), name, "be float32, bfloat16, float16 or float64",
                 to_string(t.scalar_type()));
}

void Checker::dtype(const Tensor& t, const char* name, ScalarType expected) const {
  ATTN_EXT_CHECK(*this, t.scalar_type() == expected, name, "be " + to_string(expected), to_string(t.scalar_type()));
}

void Checker::same_dtype(std::initializer_list<Named> tensors) const {
  const Tensor& first = *tensors.begin()->second;
  floating(first, tensors.begin()->first);
  const ScalarType dtype = first.scalar_type();
  const auto differs = [&](const Named& t) { return t.second && t.second->scalar_type() != dtype; };
  if (std::none_of(tensors.begin(), tensors.end(), differs)) return;
  std::vector<Named> present;
  for (const Named& t : tensors)
    if (t.second) present.push_back(t);
  std::string names, dtypes;
  for (size_t i = 0; i < present.size(); ++i) {
    names += (i == 0 ? "" : i + 1 == present.size() ? " and " : ", ") + std::string(present[i].first);
    dtypes += (i == 0 ? "" : ", ") + to_string(present[i].second->scalar_type());
  }
  fail(names, "have the same dtype", dtypes);
}

void Checker::same_device(const Tensor& first, const char* first_name, std::initializer_list<Named> others) const {
  const DeviceOf device = device_of(first);
  for (const auto& [name, t] : others)
    ATTN_EXT_CHECK(*this, !t || device_of(*t) == device, name,
                   "be on the device of " + std::string(first_name) + " (" + to_string(device) + ")",
                   to_string(device_of(*t)));
}

void Checker::heads(int64_t H, int64_t Hkv) const {
  ATTN_EXT_CHECK(*this, H >= 1 && Hkv >= 1 && H % Hkv == 0, "the number of query heads",
                 "be a positive multiple of the number of key/value heads",
                 std::to_string(H) + " query heads and " + std::to_string(Hkv) + " key/value heads");
}

void Checker::caches(const Tensor& key_cache, const Tensor& value_cache, Caches use) const {
  const char* layout = "(num_blocks, block_size, Hkv, D)";
  rank(key_cache, "key_cache", 4, layout);
  rank(value_cache, "value_cache", 4, layout);
  ATTN_EXT_CHECK(*this, same_shape(key_cache, value_cache), "value_cache",
                 "have the shape of key_cache " + to_string(shape_of(key_cache)), to_string(shape_of(value_cache)));
  ATTN_EXT_CHECK(*this, key_cache.size(1) >= 1, "key_cache", "have a block size of at least 1",
                 to_string(shape_of(key_cache)));
  for (const auto& [name, cache] : {std::pair{"key_cache", &key_cache}, std::pair{"value_cache", &value_cache}})
    ATTN_EXT_CHECK(*this, cache->size(3) <= 1 || cache->stride(3) == 1, name, "have stride 1 in its last dimension",
                   "stride " + std::to_string(cache->stride(3)));
  if (use == Caches::read || key_cache.numel() == 0) return;
  for (const auto& [name, cache] : {std::pair{"key_cache", &key_cache}, std::pair{"value_cache", &value_cache}})
    ATTN_EXT_CHECK(*this, !overlaps_itself(*cache), name, "not overlap itself",
                   "strides " + to_string(strides_of(*cache)));
  ATTN_EXT_CHECK(*this, !overlap(key_cache, value_cache), "value_cache", "not overlap key_cache",
                 "memory that they share");
}

Tensor unit_last_stride(const Tensor& t) {
  if (t.dim() == 0 || t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1) return t;
  return torch::stable::contiguous(t);
}

bool same_shape(const Tensor& a, const Tensor& b) {
  const auto x = a.sizes(), y = b.sizes();
  return std::equal(x.begin(), x.end(), y.begin(), y.end());
}

// Straight from torch's allocators: new_empty would go through the dispatcher, which costs more than a small kernel.
Tensor new_tensor(const Tensor& like, const Shape& shape, ScalarType dtype) {
  Shape strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= std::max<int64_t>(shape[i], 1)) strides[i] = stride;
  const auto [type, index] = device_of(like);
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      int64_t(shape.size()), shape.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), type, index, &handle));
  Tensor out(handle);
  // A fresh result of many megabytes is memory that the system hands out as it is first written, and in pages of 4 KB
  // that takes longer than a softmax.
  if (out.is_cpu()) {
    const int64_t bytes = out.numel() * int64_t(out.element_size());
    if (bytes >= kHugePage) advise_huge_pages(reinterpret_cast<uintptr_t>(out.mutable_data_ptr()), bytes);
  }
  return out;
}

Tensor new_tensor(const Tensor& like, const Shape& shape) { return new_tensor(like, shape, like.scalar_type()); }

void mark_written(const Tensor& key_cache, const Tensor& value_cache) {
  for (const Tensor& cache : {std::ref(key_cache), std::ref(value_cache)}) {
    StableIValue inference[1] = {torch::stable::detail::from(cache)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::is_inference", "", inference, TORCH_ABI_VERSION));
    if (torch::stable::detail::to<bool>(inference[0])) continue;  // has no version
    // The stable ABI cannot ask for a new version as such. A tensor copied to itself gets one and is not touched.
    Tensor self = cache;
    torch::stable::copy_(self, cache);
  }
}

Tensor as_rows(const Tensor& t, int64_t rows, int64_t columns, int64_t& stride) {
  Tensor u = unit_last_stride(t);
  stride = columns;
  int64_t expected = -1;  // stride of dimension i if all leading dimensions are one
  bool rows_of_one_stride = true;
  for (int64_t i = u.dim() - 2; i >= 0; --i) {
    if (u.size(i) == 1) continue;
    if (expected < 0)
      stride = u.stride(i);
    else
      rows_of_one_stride &= u.stride(i) == expected;
    expected = u.stride(i) * u.size(i);
  }
  if (rows_of_one_stride || rows == 0) return u;
  stride = columns;
  return torch::stable::contiguous(u);
}

std::array<int64_t, 4> broadcast_strides(const Checker& c, const Tensor& t, const char* name,
                                         const std::array<int64_t, 4>& target, const char* layout,
                                         bool longer_allowed) {
  const auto got = shape_of(t);
  const int64_t missing = 4 - t.dim();
  bool ok = missing >= 0;
  std::array<int64_t, 4> strides{};
  for (int64_t i = std::max<int64_t>(missing, 0); ok && i < 4; ++i) {
    const int64_t size = t.size(i - missing), want = target[static_cast<size_t>(i)];
    const bool may_be_longer = longer_allowed && i >= 2;
    ok = size == 1 || size == want || (may_be_longer && size > want);
    strides[static_cast<size_t>(i)] = size == 1 ? 0 : t.stride(i - missing);
  }
  ATTN_EXT_CHECK(c, ok, name,
                 std::string("broadcast to ") + layout + " = " + to_string(Shape(target.begin(), target.end())),
                 to_string(got));
  return strides;
}

}  // namespace attn_ext::ops
