"""How the ops behave under autograd and autocast; the same for every op and device.

Gradients are not implemented: an input that requires grad, in grad mode, is an error rather than a silent detach.
Autocast casts the tensors of a matrix product to the autocast dtype, as torch does for its own, what goes to or
meets a KV cache to the dtype of the cache, and the weight and bias of a norm to the dtype of what is normed.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("attn_ext", "IMPL")

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
}


def _by_name(op, args, kwargs):
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_differentiated(value) -> bool:
    """Whether reverse mode, or a level of forward mode, wants the derivative by this argument."""
    if not isinstance(value, Tensor):
        return False
    forward = torch.autograd.forward_ad
    return (torch.is_grad_enabled() and value.requires_grad) or (
        forward._current_level >= 0 and forward.unpack_dual(value).tangent is not None
    )


def _register_autograd(name: str, op) -> None:
    def kernel(keyset, *args, **kwargs):
        for argument, value in _by_name(op, args, kwargs).items():
            if _is_differentiated(value):
                raise RuntimeError(
                    f"{name}: {argument} must not require grad (gradients are not implemented; call under "
                    "torch.no_grad()), got a tensor that does"
                )
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    _library.impl(name, kernel, "Autograd", with_keyset=True)


def _register_version_counters(name: str, op) -> None:
    """What an op writes in place gets a new version, so that autograd notices a saved tensor that has changed."""
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not written:
        return

    def kernel(keyset, *args, **kwargs):
        values = _by_name(op, args, kwargs)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)
        torch.autograd.graph.increment_version([values[a] for a in written if not values[a].is_inference()])
        return result

    _library.impl(name, kernel, "ADInplaceOrView", with_keyset=True)


def _register_autocast(name: str, op, device: str, key: str) -> None:
    cast, source = _AUTOCAST[name]
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(*args, **kwargs):
        values = _by_name(op, args, kwargs)
        dtype = torch.get_autocast_dtype(device) if source == "autocast" else values[source].dtype
        for argument in cast:
            value = values.get(argument)
            if value is not None and value.is_floating_point() and value.dtype != torch.float64:
                values[argument] = value.to(dtype)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(**values)

    _library.impl(name, kernel, key)


def register(names: list[str]) -> None:
    """Gives these ops their autograd and autocast behaviour. Called once, by attn_ext.ops."""
    for name in names:
        op = getattr(torch.ops.attn_ext, name).default
        _register_autograd(name, op)
        _register_version_counters(name, op)
        if name in _AUTOCAST:
            _register_autocast(name, op, "cpu", "AutocastCPU")
            _register_autocast(name, op, "cuda", "AutocastCUDA")
