"""What every loader shares: tensors taken by name with their shape checked, and a model built around them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attn_ext._config import check_sizes

__all__ = ["LoadError", "Weights", "build", "check_keys", "load_pickled", "reason"]


class LoadError(RuntimeError):
    """A model could not be loaded; the message is one line that names the file and what is wrong with it."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))  # a value out of a file, a tensor say, may print as several


def reason(error: Exception) -> str:
    """What another library says is wrong, on one line.

    >>> reason(KeyError("w"))
    "KeyError: 'w'"
    """
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def check_keys(file: Path, values: dict[str, object]) -> None:
    """Raise LoadError where the value of one of these keys of `file` is no whole number >= 1."""
    try:
        check_sizes(str(file), {f"key {key!r}": value for key, value in values.items()})
    except ValueError as e:
        raise LoadError(str(e)) from e


def load_pickled(path: Path):
    """What torch.save wrote, tensors and plain values only (`weights_only`): no code in the file is run."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:  # torch's advice, weights_only=False, would run the code
        raise LoadError(f"{path}: not a file of tensors and plain values: damaged, or it holds other objects") from e
    except Exception as e:  # a damaged file makes torch raise many types
        raise LoadError(f"{path}: not a file of tensors and plain values: {reason(e)}") from e


class Weights:
    """The tensors of one checkpoint, each read when it is taken.

    `read(name)` gives the tensor. `source` names the checkpoint in errors. Taken tensors come in `dtype` on `device`.

    >>> import torch
    >>> weights = Weights("demo", ["w"], {"w": torch.ones(2, 3)}.__getitem__)
    >>> weights.take("w", (2, 3)).shape
    torch.Size([2, 3])
    >>> weights.finish()                               # nothing is left over
    """

    def __init__(
        self, source: str, names: Iterable[str], read: Callable[[str], Tensor], dtype=torch.float32, device="cpu"
    ):
        self.source, self.dtype, self.device = source, dtype, device
        self.read = read
        self._left = set(map(str, names))  # a pickled dict may have other keys: never taken, so `finish` names them

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def __len__(self) -> int:
        return len(self._left)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, which must exist, be dense and real and have `shape`; raises LoadError."""
        if name not in self._left:
            raise LoadError(f"{self.source}: tensor {name!r} is missing")
        self._left.remove(name)
        tensor = self.read(name)
        if not isinstance(tensor, Tensor):
            raise LoadError(f"{self.source}: tensor {name!r} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex() or tensor.is_quantized:
            got = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise LoadError(f"{self.source}: tensor {name!r} must be dense and real, got {got}")
        if tuple(tensor.shape) != tuple(shape):
            raise LoadError(f"{self.source}: tensor {name!r} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
        return tensor.to(device=self.device, dtype=self.dtype).contiguous()

    def ignore(self, unused: Callable[[str], bool]) -> None:
        """Forget the tensors whose name `unused` accepts: buffers that are no weights."""
        self._left = {name for name in self._left if not unused(name)}

    def finish(self) -> None:
        """Raise LoadError where a tensor was not taken: the checkpoint holds more than the model uses."""
        if self._left:
            name = min(self._left)
            raise LoadError(f"{self.source}: unexpected tensor {name!r} ({len(self._left)} unexpected in all)")


class _NoInit(TorchFunctionMode):
    """Skips torch.nn.init: on meta tensors it does nothing but import a second's worth of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def build(
    model_class: type[nn.Module], config, n_layers: int, weights: Weights,
    take: Callable[[Weights, str, tuple], Tensor],
):  # fmt: skip
    """A model in eval mode, without gradients, whose parameter `name` is `take(weights, name, shape)`."""
    if n_layers > len(weights):  # before a model is made of a million layers
        raise LoadError(f"{weights.source}: must have tensors for {n_layers} layers, got {len(weights)} tensors in all")
    with torch.device("meta"), _NoInit():  # no memory and no random numbers for weights that are replaced at once
        model = model_class(config)
    parameters = dict(model.named_parameters())  # a tied parameter once, under its first name
    state = {name: take(weights, name, tuple(p.shape)) for name, p in parameters.items()}
    weights.finish()
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model.eval().requires_grad_(False)
