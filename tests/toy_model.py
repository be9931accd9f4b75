"""A tiny random model for the tests of the cache and the engine, and a model that remembers what it was asked."""

import torch

from attn_ext import ops


class Remembering:
    """A model around another one, which checks that logits are a function of the prefix alone.

    `seen` maps every prefix whose logits were wanted to those logits: wanted again, in whatever batch, they must have
    the same bits. `steps` lists the number of tokens of each sequence, step by step.
    """

    def __init__(self, model):
        self.model, self.seen, self.steps = model, {}, []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward_paged(self, batch, cache):
        logits = self.model.forward_paged(batch, cache)
        self.steps.append([len(tokens) for _, _, tokens in batch.chunks])
        prefix_of_row = []
        for sequence, start, tokens in batch.chunks:
            known = cache.tokens(sequence)
            assert len(known) == start
            prefix_of_row += [(*known, *tokens[: i + 1]) for i in range(len(tokens))]
        for row, row_logits in zip(batch.logit_rows.tolist(), logits, strict=True):
            before = self.seen.setdefault(prefix_of_row[row], row_logits)
            assert torch.equal(before, row_logits), f"other logits than before for {prefix_of_row[row]}"
        return logits


class ToyModel:
    """Embedding, layers of rotated grouped-query attention with a residual, and a head: nothing but our ops."""

    def __init__(self, *, vocab_size=23, max_seq_len=64, n_layers=2, dtype=torch.float32, seed=0):
        self.vocab_size, self.max_seq_len, self.n_layers = vocab_size, max_seq_len, n_layers
        self.n_heads, self.n_kv_heads, self.head_dim = 2, 1, 8
        self.dtype, self.device = dtype, torch.device("cpu")
        g = torch.Generator().manual_seed(seed)
        width = self.n_heads * self.head_dim

        def weight(*shape):
            return (torch.randn(shape, generator=g) / shape[1] ** 0.5).to(dtype)

        self.embedding = weight(vocab_size, width) * 4
        self.qkv = [weight(width + 2 * self.n_kv_heads * self.head_dim, width) for _ in range(n_layers)]
        self.out = [weight(width, width) for _ in range(n_layers)]
        self.head = weight(vocab_size, width)
        angle = torch.arange(max_seq_len)[:, None] / 10 ** torch.linspace(0, 2, self.head_dim // 2)
        self.cos, self.sin = angle.cos(), angle.sin()

    def forward_paged(self, batch, cache):
        assert int(batch.positions.max()) < self.max_seq_len
        x = self.embedding[batch.tokens]
        for layer in range(self.n_layers):
            key_cache, value_cache = cache.key_cache(layer), cache.value_cache(layer)
            q = ops.qkv_projection_to_cache(
                x, self.qkv[layer], None, key_cache, value_cache, batch.slot_mapping, n_heads=self.n_heads,
                n_kv_heads=self.n_kv_heads, rope=(self.cos, self.sin, batch.positions),
            )  # fmt: skip
            o = ops.paged_attention(
                q, key_cache, value_cache, batch.block_table, batch.seq_lens, cu_seqlens_q=batch.cu_seqlens_q,
                max_seqlen_q=batch.max_seqlen_q,
            )  # fmt: skip
            x = ops.linear(o.flatten(1), self.out[layer], residual=x)
        return ops.linear(x[batch.logit_rows], self.head).float()


def poison(cache):
    """Every slot of the cache becomes NaN: what is read without having been written shows."""
    for layer in range(cache.n_layers):
        cache.key_cache(layer).fill_(torch.nan)
        cache.value_cache(layer).fill_(torch.nan)
