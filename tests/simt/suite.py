"""The backend `simt` of the op suite: the package's functions are those of the CUDA kernels under the executor."""

import contextlib
import functools
import inspect

import torch
from attention_ops import AttentionOps
from kernel_ops import KernelOps

import attn_ext

NAMES = {
    KernelOps: [
        "linear",
        "qkv_projection",
        "qkv_projection_to_cache",
        "rms_norm",
        "layer_norm",
        "masked_softmax",
        "append_kv",
        "copy_blocks",
    ],
    AttentionOps: ["attention", "attention_varlen", "paged_attention", "merge_attention"],
}
WRITTEN = dict.fromkeys(["append_kv", "copy_blocks", "qkv_projection_to_cache"], ("key_cache", "value_cache"))


@functools.cache
def _executors():
    return {executor: executor() for executor in NAMES}


def _on_executor(name, package_op, executor):
    signature = inspect.signature(package_op)

    def op(*args, **kwargs):
        # The checks are shared by all devices: the package's function makes them, on copies of what it would write.
        checked = signature.bind(*args, **kwargs)
        written = [a for a in WRITTEN.get(name, ()) if isinstance(checked.arguments.get(a), torch.Tensor)]
        if all(checked.arguments[a].numel() < 2**28 for a in written):
            checked.arguments.update({a: checked.arguments[a].clone() for a in written})
            package_op(*checked.args, **checked.kwargs)
        executor.seed += 1  # each call runs on a schedule of its own
        return getattr(executor, name)(*args, **kwargs)

    return op


@contextlib.contextmanager
def on_executor():
    """attn_ext's functions are the CUDA kernels' inside this context."""
    package = {name: getattr(attn_ext, name) for names in NAMES.values() for name in names}
    try:
        for executor, names in NAMES.items():
            _executors()[executor].seed = 0
            for name in names:
                setattr(attn_ext, name, _on_executor(name, package[name], _executors()[executor]))
        yield
    finally:
        for name, function in package.items():
            setattr(attn_ext, name, function)
