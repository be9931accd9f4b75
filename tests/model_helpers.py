"""What the model tests share: logits over the paged cache under any chunking, and the comparison with transformers."""

import copy

import torch
from tolerance import assert_as_accurate_as_torch

from attn_ext.kv_cache import PagedKVCache


def paged_logits(model, prompts, chunks, *, block_size=4):
    """Logits of every token of `prompts`, list of (len, vocab_size), computed step by step over one paged cache.

    `chunks[i]` are the lengths of the pieces in which prompt i is fed; the n-th pieces of all prompts share a step.
    """
    blocks = sum(-(-len(p) // block_size) for p in prompts)
    cache = PagedKVCache(
        model.n_layers, model.n_kv_heads, model.head_dim, num_blocks=blocks, block_size=block_size, dtype=model.dtype
    )
    for layer in range(model.n_layers):  # what was never written must not matter
        cache.key_cache(layer).fill_(float("nan"))
        cache.value_cache(layer).fill_(float("nan"))
    sequences = [cache.add_sequence() for _ in prompts]
    done, logits = [0] * len(prompts), [[] for _ in prompts]
    for step in range(max(map(len, chunks))):
        here = [i for i in range(len(prompts)) if step < len(chunks[i])]
        pieces = [prompts[i][done[i] : done[i] + chunks[i][step]] for i in here]
        batch = cache.prepare([(sequences[i], piece) for i, piece in zip(here, pieces, strict=True)], logits="all")
        rows = model.forward_paged(batch, cache)
        cache.commit(batch)
        for i, part in zip(here, rows.split([len(piece) for piece in pieces]), strict=True):
            logits[i].append(part)
            done[i] += len(part)
    return [torch.cat(parts) for parts in logits]


CHUNKINGS = [[11], [1] * 11, [4, 4, 3], [10, 1], [1, 3, 5, 2]]


def set_dtype(theirs, dtype):
    """transformers' model with its parameters in `dtype`; the rotary frequencies, which are buffers, stay float32."""
    for p in theirs.parameters():
        p.data = p.data.to(dtype)
    return theirs


def in_float64(theirs):
    """A float64 copy of transformers' model, norms included (theirs go through float32 in any dtype)."""
    theirs = set_dtype(copy.deepcopy(theirs), torch.float64)
    for module in theirs.modules():
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            module.forward = norm.forward
    return theirs


@torch.no_grad()
def assert_logits_match(logits, theirs, idx, what="logits"):
    """`logits` at idx are as close to a float64 run of transformers' model as its own run in the same dtype."""
    if theirs.dtype != logits.dtype:
        theirs = set_dtype(copy.deepcopy(theirs), logits.dtype)
    assert_as_accurate_as_torch(logits, in_float64(theirs)(idx).logits, theirs(idx).logits, what=what)
