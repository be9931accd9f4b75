"""Which kernels run: the backends of this machine, the one in use, and what this build is."""

from __future__ import annotations

import threading

import torch

from attn_ext._extension import _C

__all__ = ["active_backend", "backends", "build_info", "use_backend"]


def backends() -> list[str]:
    """Names of the CPU backends that run on this machine, best first. The first is used unless another is chosen.

    >>> import attn_ext
    >>> attn_ext.backends()[-1]
    'scalar'
    """
    return _C.supported_backends()


def active_backend() -> str:
    """Name of the backend in use. float64 tensors run on `scalar` whatever it is: no other computes float64.

    >>> import attn_ext
    >>> attn_ext.active_backend() in attn_ext.backends()
    True
    """
    return _C.active_backend()


_lock = threading.Lock()
_entered: list[use_backend] = []  # contexts whose end is to come, in the order they were entered


class use_backend:
    """Use the named backend, for the whole process: as a call for good, as a context manager until its end.

    An unknown name, or one this machine cannot run, raises ValueError and lists the possible ones. The environment
    variable ATTN_EXT_BACKEND does the same when attn_ext is imported. Where contexts of several threads overlap, the
    one entered last decides for all of them, and the last to end restores what was in use before the first.

    >>> import attn_ext
    >>> with attn_ext.use_backend("scalar"):
    ...     attn_ext.active_backend()
    'scalar'
    """

    def __init__(self, name: str):
        with _lock:
            self._before = _C.active_backend()
            _C.use_backend(name)

    def __enter__(self) -> use_backend:
        with _lock:
            _entered.append(self)
        return self

    def __exit__(self, *_) -> None:
        with _lock:
            at = _entered.index(self)
            if at == len(_entered) - 1:
                _C.use_backend(self._before)
            else:  # another thread's, entered later, goes on: it has the backend of before to restore
                _entered[at + 1]._before = self._before
            del _entered[at]


def build_info() -> dict:
    """What was built and what it runs on.

    >>> import attn_ext
    >>> attn_ext.build_info()["version"] == attn_ext.__version__
    True
    """
    return {
        "version": _C.version,
        "torch_built": _C.torch_version,
        "torch_running": torch.__version__,
        "compiler": _C.compiler,
        "cuda": _C.cuda_built,
        "backends": _C.supported_backends(),
        "backend": _C.active_backend(),
        "threads": torch.get_num_threads(),
    }
