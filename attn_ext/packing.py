"""Weights of a whole model in the order in which the CPU kernels read them.

`pack_weight` (attn_ext.ops) reorders one weight; `PackableModel` is what a model needs for all of them. The weights are
replaced in place, one at a time, so the memory is not doubled, and every result keeps its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_ext import ops

__all__ = ["PackableModel", "embed", "head"]

_PANEL = 16  # outputs of a panel: `pack_weight` takes whole panels only


class PackableModel(nn.Module):
    """A model whose Linear weights can be packed; `lm_head` is its head, which may be tied to an embedding.

    Packed or not is a matter of speed alone. A state dict holds plain weights in either case, and loading one, or
    moving the model to another dtype or device, unpacks it first.
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
        for linear in self._linears():
            weight = linear.weight
            if weight.dim() == 2 and weight.device.type == "cpu" and self._fits(linear):
                with torch.inference_mode(weight.is_inference()), torch.no_grad():
                    missing = -weight.shape[0] % _PANEL
                    plain = F.pad(weight.data, (0, 0, 0, missing)) if missing else weight.data
                    weight.data = ops.pack_weight(plain)
        return self

    def unpack_weights(self):
        """Undo `pack_weights`, in place -> the model."""
        for linear in self._linears():
            if linear.weight.dim() == 4:
                with torch.inference_mode(linear.weight.is_inference()), torch.no_grad():
                    linear.weight.data = _plain(linear)
        return self

    @property
    def packed(self) -> bool:
        """Whether any weight is packed."""
        return any(linear.weight.dim() == 4 for linear in self._linears())

    def _linears(self):
        return [module for module in self.modules() if isinstance(module, nn.Linear)]

    def _fits(self, linear: nn.Linear) -> bool:
        n, k = linear.weight.shape
        pairs = linear.weight.dtype.itemsize == 2  # neighbours of k that 16-bit types keep together
        return (n % _PANEL == 0 or linear is self.lm_head) and not (pairs and k % 2)

    def _apply(self, fn, recurse=True):  # behind to(), float(), cuda(), ...
        self.unpack_weights()
        return super()._apply(fn, recurse)


def _plain(linear: nn.Linear) -> Tensor:
    return ops.unpack_weight(linear.weight.data)[: linear.out_features].clone()


def _plain_state(model: PackableModel, state: dict, prefix: str, _metadata) -> None:
    plain: dict[int, Tensor] = {}  # by the packed one, so that what is tied stays one tensor
    for name, module in model.named_modules():
        key = f"{prefix}{name}.weight"
        if isinstance(module, nn.Linear | nn.Embedding) and module.weight.dim() == 4:
            if id(module.weight) not in plain:
                rows = module.out_features if isinstance(module, nn.Linear) else module.num_embeddings
                plain[id(module.weight)] = ops.unpack_weight(module.weight.data)[:rows]
            state[key] = plain[id(module.weight)]


def _unpack_before_loading(model: PackableModel, *_) -> None:
    model.unpack_weights()


def embed(table: nn.Embedding, ids: Tensor) -> Tensor:
    """Rows of an embedding that may be packed; ids (...) -> (..., K). Raises IndexError for an id that has no row."""
    weight = table.weight
    if weight.dim() == 2:
        return table(ids)
    if ids.numel():
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= table.num_embeddings:
            raise IndexError(f"embed: ids must be 0 to {table.num_embeddings - 1}, got {low if low < 0 else high}")
    return weight[ids // _PANEL, :, ids % _PANEL].flatten(-2)


def head(linear: nn.Linear, x: Tensor) -> Tensor:
    """Logits of x (..., K) -> (..., vocab_size); the head may be packed and padded."""
    logits = ops.linear(x, linear.weight)
    return logits if logits.shape[-1] == linear.out_features else logits[..., : linear.out_features]
