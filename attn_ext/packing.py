"""Weights of a whole model in the order in which the CPU kernels read them.

`pack_weight` (attn_ext.ops) reorders one weight; `PackableModel` is what a model needs for all of them. The weights are
replaced in place, one at a time, so the memory is not doubled, and every result keeps its bits. Those that follow each
other share an arena of huge pages: most weights are too small for such pages of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_ext import _C, ops

__all__ = ["PackableModel", "Projection", "affine", "embed", "head"]

_PANEL = 16  # outputs of a panel: `pack_weight` takes whole panels only
_HUGE_PAGE = 2 << 20  # bytes
_ARENA = 32 << 20  # bytes of an arena; a larger weight has one of its own


class Projection(nn.Linear):
    """A Linear that a model multiplies by through attn_ext's ops, so that its weight may be packed."""


class PackableModel(nn.Module):
    """A model whose Projections can be packed; `lm_head` is its head, which may be tied to an embedding.

    Packed or not is a matter of speed alone. The model's state dict holds plain weights in either case, of a packed
    model as copies: write to them and the model does not change. Loading a state dict, or moving the model to another
    dtype or device, unpacks it first. Other Linears that were put into the model are left alone.
    """

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(_plain_state)
        self.register_load_state_dict_pre_hook(_unpack_before_loading)

    def pack_weights(self):
        """Reorder the weights for the CPU kernels, in place -> the model.

        Weights whose shape `pack_weight` does not take stay as they are, except the head, which gets rows of zeros up
        to the next multiple of 16. Nothing happens to weights that are packed already, or not on the CPU.

        >>> import torch
        >>> from attn_ext.nanogpt import GPT, GPTConfig
        >>> model = GPT(GPTConfig(block_size=8, vocab_size=17, n_layer=1, n_head=2, n_embd=16)).eval()
        >>> idx = torch.tensor([[1, 2, 3]])
        >>> with torch.no_grad():
        ...     before = model(idx)[0]
        ...     torch.equal(model.pack_weights()(idx)[0], before)
        True
        >>> model.packed, model.lm_head.weight.shape, model.unpack_weights().lm_head.weight.shape
        (True, torch.Size([2, 16, 16, 1]), torch.Size([17, 16]))
        """
        plain = {id(linear.weight): linear.weight for linear in self.modules() if self._fits(linear)}  # tied once
        for weights in _groups(list(plain.values())):
            arena = _Arena(sum(map(_packed_nbytes, weights)))
            for weight in weights:
                with torch.inference_mode(weight.is_inference()), torch.no_grad():
                    missing = -weight.shape[0] % _PANEL
                    padded = F.pad(weight.data, (0, 0, 0, missing)) if missing else weight.data
                    weight.data = arena.put(ops.pack_weight(padded))
        return self

    def unpack_weights(self):
        """Undo `pack_weights`, in place -> the model."""
        for module in self._packables():
            if module.weight.dim() == 4:  # asked here: tied ones are unpacked together
                with torch.inference_mode(module.weight.is_inference()), torch.no_grad():
                    module.weight.data = _plain(module)
        return self

    @property
    def packed(self) -> bool:
        """Whether any weight is packed."""
        return any(module.weight.dim() == 4 for module in self._packables())

    def _packables(self) -> list[Projection | nn.Embedding]:
        """Modules whose weight may be packed: an embedding's is where it is, or was, tied to the head."""
        return [module for module in self.modules() if isinstance(module, Projection | nn.Embedding)]

    def _fits(self, linear: nn.Module) -> bool:
        if not isinstance(linear, Projection) or linear.weight.dim() != 2 or linear.weight.device.type != "cpu":
            return False
        n, k = linear.weight.shape
        pairs = linear.weight.dtype.itemsize == 2  # neighbours of k that 16-bit types keep together
        return (n % _PANEL == 0 or linear is self.lm_head) and not (pairs and k % 2)

    def _apply(self, fn, recurse=True):  # behind to(), float(), cuda(), ...
        self.unpack_weights()
        return super()._apply(fn, recurse)


def _packed_nbytes(weight: Tensor) -> int:
    return (weight.shape[0] + -weight.shape[0] % _PANEL) * weight.shape[1] * weight.dtype.itemsize


def _groups(weights: list[Tensor]) -> list[list[Tensor]]:
    """Neighbours that fit an arena together; few enough that unpacking keeps little more than it has yet to unpack."""
    groups, room = [], 0
    for weight in weights:
        nbytes = _packed_nbytes(weight)
        if not groups or nbytes > room:
            groups.append([])
            room = _ARENA
        groups[-1].append(weight)
        room -= nbytes
    return groups


class _Arena:
    """Memory for packed weights one after the other, freed with the last of them."""

    def __init__(self, nbytes: int):
        self.storage = torch.UntypedStorage(nbytes + (_HUGE_PAGE if nbytes >= _HUGE_PAGE else 0))
        self.end = -self.storage.data_ptr() % _HUGE_PAGE if nbytes >= _HUGE_PAGE else 0
        _C.advise_huge_pages(self.storage.data_ptr(), self.storage.nbytes())

    def put(self, packed: Tensor) -> Tensor:
        start, self.end = self.end, self.end + packed.nbytes  # a packed weight takes whole 64 bytes
        place = torch.empty(0, dtype=packed.dtype)
        place.set_(self.storage, start // packed.dtype.itemsize, packed.shape, packed.stride())
        return place.copy_(packed)


def _plain(module: Projection | nn.Embedding) -> Tensor:
    """A copy of its weight, unpacked and without padding."""
    rows = module.out_features if isinstance(module, Projection) else module.num_embeddings
    plain = ops.unpack_weight(module.weight.data)
    return plain if len(plain) == rows else plain[:rows].clone()


def _plain_state(model: PackableModel, state: dict, prefix: str, _metadata) -> None:
    plain: dict[int, Tensor] = {}  # by the packed one, so that what is tied stays one tensor
    for name, module in model.named_modules():
        key = f"{prefix}{name}.weight"
        if isinstance(module, Projection | nn.Embedding) and module.weight.dim() == 4:
            if id(module.weight) not in plain:
                plain[id(module.weight)] = _plain(module)
            state[key] = plain[id(module.weight)]


def _unpack_before_loading(model: PackableModel, *_) -> None:
    model.unpack_weights()


def affine(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Its weight and bias, or None. As `module.weight`, but without that search, which takes a microsecond each."""
    own = module._parameters
    if "weight" in own and len(own) <= 2 and not module._modules:
        return own["weight"], own.get("bias")
    return module.weight, getattr(module, "bias", None)  # computed from other parameters


def embed(table: nn.Embedding, ids: Tensor) -> Tensor:
    """Rows of an embedding that may be packed; ids (...) -> (..., K). Raises IndexError for an id that has no row."""
    weight = table.weight
    if weight.dim() == 2:
        return table(ids)
    if torch.compiler.is_compiling():  # which cannot ask for values
        torch._assert_async(((ids >= 0) & (ids < table.num_embeddings)).all(), "embed: ids must be rows of the table")
    elif ids.numel():
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= table.num_embeddings:
            raise IndexError(f"embed: ids must be 0 to {table.num_embeddings - 1}, got {low if low < 0 else high}")
    return weight[ids // _PANEL, :, ids % _PANEL].flatten(-2)


def head(linear: nn.Linear, x: Tensor) -> Tensor:
    """Logits of x (..., K) -> (..., vocab_size); the head may be packed and padded."""
    logits = ops.linear(x, linear.weight)
    return logits if logits.shape[-1] == linear.out_features else logits[..., : linear.out_features]
