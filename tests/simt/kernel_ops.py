"""The ops of the package other than attention, run by the CUDA kernels under the executor."""

from ctypes import byref

import torch
from build import ROOT, build
from executor import Library, extent
from params import Activation, make

NAMES = ["linear", "norm", "masked_softmax", "kv_cache"]


def _unit_last_stride(x):
    return x if x is None or x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _rows(x):
    """(..., C) as rows of one stride."""
    return (
        _unit_last_stride(x).reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    )


def _strides(x, dims):
    return [0 if x.shape[i] == 1 else x.stride(i) for i in dims]


def _in_units(x):
    """The executor wants one writer of each element, and 8-byte elements move as two halves."""
    return x.view(torch.float32) if x.element_size() == 8 else x


class KernelOps:
    """linear, qkv_projection(_to_cache), the norms, masked_softmax, append_kv and copy_blocks as the package has them.

    `seed` chooses the schedule, `sms` and `max_shared` are what the device has. `launches` holds the counters of the
    last call.
    """

    def __init__(self):
        sources = [ROOT / f"csrc/cuda/{name}.cu" for name in NAMES]
        sources += [ROOT / f"tests/simt/entries/{name}.cpp" for name in NAMES]
        self.library = Library(build("kernels", sources))
        self.seed, self.sms, self.max_shared = 0, 132, 227 * 1024
        self.launches = []

    # ---- products

    def linear(self, x, weight, bias=None, *, activation=None, residual=None, multiply=None):
        y = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
        fields = {"y": y, "y_stride": weight.shape[0], "activation": Activation[activation or "none"]}
        inputs, gemm = self._gemm(x, weight, bias)
        for name, t in (("residual", residual), ("multiply", multiply)):
            if t is not None:
                inputs[name] = rows = _rows(t)
                fields |= {name: rows, f"{name}_stride": rows.stride(0)}
        self._call("linear", make("LinearParams", **gemm, **fields), inputs, {"y": y})
        return y

    def qkv_projection(self, x, weight, bias=None, *, n_heads, n_kv_heads=None):
        n_kv_heads = n_kv_heads or n_heads
        heads = self.linear(x, weight, bias).unflatten(-1, (n_heads + 2 * n_kv_heads, -1))
        return heads.split([n_heads, n_kv_heads, n_kv_heads], -2)

    def qkv_projection_to_cache(
        self, x, weight, bias, key_cache, value_cache, slot_mapping, *, n_heads, n_kv_heads=None, rope=None
    ):
        inputs, gemm = self._gemm(x, weight, bias)
        inputs["slot_mapping"] = slot_mapping = slot_mapping.contiguous()
        fields = {}
        if rope is not None:
            cos, sin = map(_unit_last_stride, rope[:2])
            positions = rope[2].reshape(-1).contiguous()
            inputs |= {"rope_cos": cos, "rope_sin": sin, "positions": positions}
            fields = {
                "rope_cos": cos, "rope_sin": sin, "positions": positions, "rope_cos_stride": cos.stride(0),
                "rope_sin_stride": sin.stride(0), "max_pos": cos.shape[0],
            }  # fmt: skip
        D = key_cache.shape[3]
        q = torch.empty(*x.shape[:-1], n_heads, D, dtype=x.dtype)
        params = make(
            "QkvToCacheParams", gemm=make("LinearParams", **gemm), H=n_heads, Hkv=n_kv_heads or n_heads, D=D, q=q,
            slot_mapping=slot_mapping, **self._cache_fields(key_cache, value_cache), **fields,
        )  # fmt: skip
        caches = self._touched(slot_mapping // key_cache.shape[1], key_cache=key_cache, value_cache=value_cache)
        self._call("qkv_to_cache", params, inputs, {"q": q}, caches)
        return q

    def _gemm(self, x, weight, bias):
        x, weight, bias = _rows(x), _unit_last_stride(weight), _unit_last_stride(bias)
        return {"x": x, "weight": weight, "bias": bias}, {
            "dtype": x.dtype, "M": x.shape[0], "N": weight.shape[0], "K": x.shape[1], "x": x, "x_stride": x.stride(0),
            "weight": weight, "weight_stride": weight.stride(0), "bias": 0 if bias is None else bias,
        }  # fmt: skip

    # ---- norms

    def rms_norm(self, x, weight, eps=1e-5):
        return self._norm(x, weight, None, eps, centered=False)

    def layer_norm(self, x, weight, bias=None, eps=1e-5):
        return self._norm(x, weight, bias, eps, centered=True)

    def _norm(self, x, weight, bias, eps, centered):
        y = torch.empty(x.shape, dtype=x.dtype)
        x, weight, bias = _rows(x), _unit_last_stride(weight), _unit_last_stride(bias)
        params = make(
            "NormParams", dtype=x.dtype, rows=x.shape[0], C=x.shape[1], x=x, x_stride=x.stride(0), weight=weight,
            bias=0 if bias is None else bias, y=y, eps=eps, centered=centered,
        )  # fmt: skip
        self._call("norm", params, {"x": x, "weight": weight, "bias": bias}, {"y": y})
        return y

    # ---- softmax

    def masked_softmax(self, scores, mask=None, *, causal=False, scale=1.0):
        shape, out = scores.shape, torch.empty(scores.shape, dtype=scores.dtype)
        if scores.dim() > 4 and mask is not None and mask.dim() > 4:
            mask = mask.reshape(-1, *mask.shape[-3:])
        scores = (
            scores.reshape(-1, *shape[-3:]) if scores.dim() > 4 else scores.reshape((1,) * (4 - len(shape)) + shape)
        )
        scores = _unit_last_stride(scores)
        fields = {}
        if mask is not None:
            full = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
            fields = {"mask": mask, "mask_dtype": mask.dtype, "mask_strides": _strides(full, range(4))}
        B0, B1, Tq, Tk = scores.shape
        params = make(
            "MaskedSoftmaxParams", dtype=scores.dtype, B0=B0, B1=B1, Tq=Tq, Tk=Tk, scores=scores, out=out,
            causal=causal, scale=scale, scores_strides=_strides(scores, range(3)), **fields,
        )  # fmt: skip
        self._call("masked_softmax", params, {"scores": scores, "mask": mask}, {"out": out})
        return out

    # ---- cache

    def append_kv(self, key, value, key_cache, value_cache, slot_mapping):
        key, value, slot_mapping = _unit_last_stride(key), _unit_last_stride(value), slot_mapping.contiguous()
        params = make(
            "AppendKvParams", element_size=key.element_size(), tokens=key.shape[0], Hkv=key.shape[1], D=key.shape[2],
            key=key, value=value, key_in_strides=key.stride()[:2], value_in_strides=value.stride()[:2],
            slot_mapping=slot_mapping, **self._cache_fields(key_cache, value_cache),
        )  # fmt: skip
        inputs = {"key": key, "value": value, "slot_mapping": slot_mapping}
        caches = self._touched(slot_mapping // key_cache.shape[1], key_cache=key_cache, value_cache=value_cache)
        self._call("append_kv", params, inputs, {}, caches)

    def copy_blocks(self, key_cache, value_cache, block_pairs):
        pairs = torch.as_tensor(block_pairs, dtype=torch.int64).reshape(-1, 2).contiguous()
        for cache in (key_cache, value_cache):
            blocks, block_size, heads, D = cache.shape
            held = torch.empty(len(pairs) * block_size * heads * D, dtype=cache.dtype)
            params = make(
                "CopyBlocksParams", element_size=cache.element_size(), pairs=len(pairs), block_size=block_size,
                Hkv=heads, D=D, cache=cache, strides=cache.stride()[:3], block_pairs=pairs, num_blocks=blocks,
            )  # fmt: skip
            self._call("copy_blocks", params, {"pairs": pairs}, {}, self._touched(pairs, cache=cache), held)

    def _cache_fields(self, key_cache, value_cache):
        return {
            "key_cache": key_cache, "value_cache": value_cache, "key_strides": key_cache.stride()[:3],
            "value_strides": value_cache.stride()[:3], "num_blocks": key_cache.shape[0],
            "block_size": key_cache.shape[1],
        }  # fmt: skip

    def _touched(self, blocks, **caches):
        """(name, tensor) of what may be written: a cache, or of one too large for the executor these blocks."""
        touched = []
        for name, cache in caches.items():
            known = [b for b in blocks.unique().tolist() if 0 <= b < len(cache)]
            touched += [(name, cache[b]) for b in known] if extent(cache) > 2**28 else [(name, cache)]
        return touched

    # ---- what they share

    def _call(self, entry, params, inputs, outputs, in_place=(), workspace=None):
        """Every element of an output is checked to be written once."""
        self.library.reset()
        self.library.seed(self.seed)
        self.library.device(sms=self.sms, max_shared=self.max_shared)
        for name, x in inputs.items():
            self.library.register(name, x, "input")
        for name, x in outputs.items():
            self.library.register(name, x, "output")
        for name, x in in_place:
            self.library.register(name, _in_units(x), "inout")
        if workspace is not None:
            self.library.register("workspace", _in_units(workspace), "scratch")
        self.library.call(entry, byref(params), *([] if workspace is None else [workspace]))
        self.library.check_outputs()
        self.launches = self.library.launches()
