"""How the ops behave under autograd and autocast; the same for every op and device.

Gradients are not implemented: an input that requires grad, in grad mode, is an error rather than a silent detach.
Autocast casts the tensors of a matrix product to the autocast dtype, as torch does for its own, what goes to or
meets a KV cache to the dtype of the cache, and the weight and bias of a norm to the dtype of what is normed.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.autograd import forward_ad

_library = torch.library.Library("attn_ext", "IMPL")

_PRODUCTS = ("qkv", "out", "gate", "up", "down")  # of decoder_layer: weights, which may be packed
LAYER_WEIGHTS = tuple(  # of decoder_layer, in the order in which decoder_layers has them too
    name + kind for name in ("norm_1", "qkv", "out", "norm_2", "gate", "up", "down") for kind in ("", "_bias")
)

# Arguments cast under autocast, and where their dtype comes from ("autocast" or an argument's name).
_AUTOCAST = {
    "linear": (("x", "weight", "bias", "residual", "multiply"), "autocast"),
    "qkv_projection": (("x", "weight", "bias"), "autocast"),
    "qkv_projection_to_cache": (("x", "weight", "bias"), "key_cache"),
    "rms_norm": (("weight",), "x"),
    "layer_norm": (("weight", "bias"), "x"),
    "attention": (("q", "k", "v"), "autocast"),
    "attention_varlen": (("q", "k", "v"), "autocast"),
    "paged_attention": (("q",), "key_cache"),
    "append_kv": (("key", "value"), "key_cache"),
    "decoder_layer": (("x", *LAYER_WEIGHTS), "key_cache"),
    "decoder_layers": (("x", "weights"), "key_caches"),
}


def _by_name(op, args, kwargs):
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _entry_name(argument: str, i: int) -> str:
    """Of an entry of a list, as errors call it: decoder_layers is the op with lists."""
    if argument != "weights":
        return f"{argument}[{i}]"
    layer, weight = divmod(i, len(LAYER_WEIGHTS))
    return f"{LAYER_WEIGHTS[weight]} of layer {layer}"


def _is_differentiated(value) -> bool:
    """Whether reverse mode, or a level of forward mode, wants the derivative by this argument."""
    if not isinstance(value, Tensor):
        return False
    return (torch.is_grad_enabled() and value.requires_grad) or (
        forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None
    )


def _register_autograd(name: str, op) -> None:
    below, redispatch = torch._C._AutoDispatchBelowAutograd, op.redispatch

    def refuse(argument):
        raise RuntimeError(
            f"{name}: {argument} must not require grad (gradients are not implemented; call under "
            "torch.no_grad()), got a tensor that does"
        )

    def kernel(keyset, *args, **kwargs):
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            for argument, value in _by_name(op, args, kwargs).items():
                if _is_differentiated(value):
                    refuse(argument)
                if isinstance(value, list | tuple):
                    for i, entry in enumerate(value):
                        if _is_differentiated(entry):
                            refuse(_entry_name(argument, i))
        with below():
            return redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    _library.impl(name, kernel, "Autograd", with_keyset=True)


def _register_autocast(name: str, op, device: str, key: str, unpack) -> None:
    cast, source = _AUTOCAST[name]
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def to(dtype, argument, value):
        if value is None or not value.is_floating_point() or value.dtype == torch.float64:
            return value
        if argument in ("weight", *_PRODUCTS) and value.dim() == 4 and value.dtype.itemsize != dtype.itemsize:
            value = unpack(value)  # it is packed for the width of its own dtype; the results have the same bits
        return value.to(dtype)

    def kernel(*args, **kwargs):
        values = _by_name(op, args, kwargs)
        if source == "autocast":
            dtype = torch.get_autocast_dtype(device)
        else:
            like = values[source]
            if isinstance(like, list | tuple):
                like = like[0] if like else values["x"]  # without an entry: refused by the op
            dtype = like.dtype
        for argument in cast:
            value = values.get(argument)
            if isinstance(value, list | tuple):
                names = itertools.cycle(LAYER_WEIGHTS)
                values[argument] = [to(dtype, *entry) for entry in zip(names, value, strict=False)]
            else:
                values[argument] = to(dtype, argument, value)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(**values)

    _library.impl(name, kernel, key)


def register(names: list[str], unpack) -> None:
    """Gives these ops their autograd and autocast behaviour. Called once, by attn_ext.ops, with its unpack_weight."""
    for name in names:
        op = getattr(torch.ops.attn_ext, name).default
        _register_autograd(name, op)
        if name in _AUTOCAST:
            _register_autocast(name, op, "cpu", "AutocastCPU", unpack)
            _register_autocast(name, op, "cuda", "AutocastCUDA", unpack)
