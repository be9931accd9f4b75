"""The structs of csrc/params.h for ctypes, read from the header itself, so that the two cannot differ."""

import ctypes
import enum
import re

import torch
from build import ROOT


class DType(enum.IntEnum):
    f32, bf16, f16, f64, boolean = range(5)


class Activation(enum.IntEnum):
    none, gelu, gelu_tanh, silu = range(4)


_DTYPES = {
    torch.float32: DType.f32,
    torch.bfloat16: DType.bf16,
    torch.float16: DType.f16,
    torch.float64: DType.f64,
    torch.bool: DType.boolean,
}
_TYPES = {
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
    "DType": ctypes.c_int32,
    "Activation": ctypes.c_int32,
}


def _read_header():
    text = re.sub(r"//.*", "", (ROOT / "csrc/params.h").read_text())
    for enum_type in (DType, Activation):
        names = re.search(rf"enum class {enum_type.__name__} : int32_t {{(.*?)}}", text)[1]
        assert [name.strip() for name in names.split(",")] == list(enum_type.__members__), names
    structs = {}
    for name, body in re.findall(r"struct (\w+Params) {(.*?)};", text, re.DOTALL):
        fields = []
        for declaration in filter(None, (d.strip() for d in body.split(";"))):
            type_name, names = re.fullmatch(r"((?:const )?\w+(?: ?\*)?)\s*(.*)", declaration, re.DOTALL).groups()
            for field, count in re.findall(r"(\w+)(?:\[(\d+)\])?", names):
                ctype = ctypes.c_void_p if "*" in type_name else {**_TYPES, **structs}[type_name]
                fields.append((field, ctype * int(count) if count else ctype))
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs


_STRUCTS = _read_header()


def make(name, **values):
    """The struct `name` with these fields; tensors stand for their data, dtypes and lists for what they are in C."""
    params = _STRUCTS[name]()
    types = dict(params._fields_)
    for field, value in values.items():
        if isinstance(value, torch.Tensor):
            value = value.data_ptr()
        elif isinstance(value, torch.dtype):
            value = _DTYPES[value]
        elif isinstance(value, (list, tuple)):
            value = types[field](*value)
        setattr(params, field, value)
    assert set(values) <= set(types), f"{name} has no {set(values) - set(types)}"
    return params
