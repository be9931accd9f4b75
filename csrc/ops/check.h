// Argument checks, shared by every op and device. A failed check throws one line before anything is written:
//
//     <op>: <argument>[ of layer <i>] must <rule>, got <what it got>
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "params.h"

namespace attn_ext::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;

std::string to_string(const Shape& shape);  // "(2, 3)"
std::string to_string(ScalarType dtype);    // "float32"
std::string number(double value);           // "1e-05"
Shape shape_of(const Tensor& t);
DType dtype_of(ScalarType dtype);
ScalarType accumulate_dtype(ScalarType dtype);  // float64 for float64, else float32

// t itself where its last dimension has unit stride (or at most one element), else a contiguous copy.
Tensor unit_last_stride(const Tensor& t);

// A new contiguous tensor on the device of `like`, and of its dtype unless one is given.
Tensor new_tensor(const Tensor& like, const Shape& shape);
Tensor new_tensor(const Tensor& like, const Shape& shape, ScalarType dtype);

// Gives tensors that a kernel wrote a new version, so that autograd notices a saved tensor that has changed.
void mark_written(const Tensor& key_cache, const Tensor& value_cache);

bool same_shape(const Tensor& a, const Tensor& b);

// A tensor and its name in errors; null for an optional argument that is not given.
using Named = std::pair<const char*, const Tensor*>;
inline const Tensor* given(const OptionalTensor& t) { return t ? &*t : nullptr; }

// The values of a one-dimensional index tensor. Those of a tensor on a device are not known to the host, and not
// checked, unless fetched, which waits for the device.
template <class Int>
struct Indices {
  Tensor held;
  OptionalTensor fetched;
  const Int* data;    // where the tensor is
  const Int* values;  // on the host, or null
  int64_t size;

  explicit Indices(const Tensor& t)
      : held(unit_last_stride(t)),
        data(static_cast<const Int*>(held.const_data_ptr())),
        values(held.is_cpu() ? data : nullptr),
        size(t.size(0)) {}
  void fetch() {
    fetched = torch::stable::to(held, torch::stable::Device(torch::headeronly::DeviceType::CPU));
    values = static_cast<const Int*>(fetched->const_data_ptr());
  }
  bool known() const { return values != nullptr || size == 0; }
  Int operator[](int64_t i) const { return values[i]; }
};

// Checker::fail unless ok. A macro, because every call of an op runs many of these: the texts are made for a failure
// only.
#define ATTN_EXT_CHECK(checker, ok, argument, rule, got) \
  do {                                                   \
    if (!(ok)) (checker).fail(argument, rule, got);      \
  } while (0)

// Checks the arguments of one op.
struct Checker {
  const char* op;
  int64_t layer = -1;  // which the arguments belong to, in ops that take several

  [[noreturn]] void fail(const std::string& argument, const std::string& rule, const std::string& got) const;

  void rank(const Tensor& t, const char* name, int64_t rank, const char* layout) const;
  void shape(const Tensor& t, const char* name, const Shape& expected, const char* layout) const;
  void floating(const Tensor& t, const char* name) const;
  void dtype(const Tensor& t, const char* name, ScalarType expected) const;
  void same_dtype(std::initializer_list<Named> tensors) const;  // the first one is given
  void same_device(const Tensor& first, const char* first_name, std::initializer_list<Named> others) const;

  // H query heads over Hkv key heads.
  void heads(int64_t H, int64_t Hkv) const;

  // Key and value caches (num_blocks, block_size, Hkv, D), used in place.
  // Written caches must not overlap each other or themselves.
  enum class Caches { read, written };
  void caches(const Tensor& key_cache, const Tensor& value_cache, Caches use) const;

  // A factor that the kernels hold in the accumulation type.
  void finite(double value, const char* name, ScalarType dtype) const;

  // A one-dimensional int32 or int64 tensor, made contiguous where it is not.
  template <class Int>
  Indices<Int> indices(const Tensor& t, const char* name) const {
    dtype(t, name, sizeof(Int) == 4 ? ScalarType::Int : ScalarType::Long);
    ATTN_EXT_CHECK(*this, t.dim() == 1, name, "have one dimension", to_string(shape_of(t)));
    return Indices<Int>(t);
  }
};

// t (..., C) as rows of one stride, without a copy where its strides allow it.
Tensor as_rows(const Tensor& t, int64_t rows, int64_t columns, int64_t& stride);

// Strides of t broadcast to `target`: 0 where t has one element for many. The last `t.dim()` dimensions count; a
// dimension in `at_least` may also be longer than the target.
std::array<int64_t, 4> broadcast_strides(const Checker& c, const Tensor& t, const char* name,
                                         const std::array<int64_t, 4>& target, const char* layout, bool longer_allowed);

}  // namespace attn_ext::ops
