"""The paged KV cache: every layer's keys and values in blocks of tokens, shared between sequences where they can be.

`PagedKVCache` owns the tensors and the sequences, `BlockAllocator` (C++) decides which block is whose, and a
`StepBatch` is what one forward pass over the cache needs. A step is

    batch = cache.prepare([(sequence, new_tokens), ...])    # blocks reserved, or OutOfBlocks and nothing changed
    logits = model.forward_paged(batch, cache)              # K and V written into the reserved slots
    cache.commit(batch)                                     # the tokens now count as stored

A sequence's length moves in `commit` only, so a forward pass that fails leaves the cache as it was: `prepare` again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_ext import _C, ops
from attn_ext._C import BlockAllocator, OutOfBlocks

__all__ = ["BlockAllocator", "CacheStats", "OutOfBlocks", "PagedKVCache", "StepBatch"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of the ops


@dataclass
class StepBatch:
    """One forward pass over the paged cache: B sequences, their new tokens concatenated.

    Built by `PagedKVCache.prepare`; a caller that lays out its own blocks can fill one in by hand.

    >>> import torch
    >>> from attn_ext import PagedKVCache
    >>> cache = PagedKVCache(n_layers=1, n_kv_heads=1, head_dim=8, num_blocks=4, block_size=2)
    >>> a, b = cache.add_sequence(), cache.add_sequence()
    >>> batch = cache.prepare([(a, [5, 6, 7]), (b, [5])])
    >>> batch.tokens.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist()
    ([5, 6, 7, 5], [0, 1, 2, 0], [0, 1, 2, 4])
    >>> batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist(), batch.block_table.tolist(), batch.logit_rows.tolist()
    ([0, 3, 4], [3, 1], [[0, 1], [2, -1]], [2, 3])
    """

    tokens: Tensor  # int64 (total): query tokens of this step
    positions: Tensor  # int64 (total): position of each in its own sequence
    slot_mapping: Tensor  # int64 (total): block * block_size + offset where its K and V go, -1 = already stored
    cu_seqlens_q: Tensor  # int32 (B + 1)
    seq_lens: Tensor  # int32 (B): keys per sequence once this step's tokens are stored
    block_table: Tensor  # int32 (B, max_blocks), padded with -1
    max_seqlen_q: int
    logit_rows: Tensor  # int64 (n): rows of `tokens` whose logits are wanted
    chunks: list[tuple[int, int, list[int]]] = field(default_factory=list)  # (sequence, start, tokens), for `commit`
    step: int = -1  # the number of the `prepare` that made it, for `commit`


@dataclass(frozen=True)
class CacheStats:
    """How a cache's blocks are used at one moment: `used + cached + free == num_blocks`.

    >>> from attn_ext import PagedKVCache
    >>> PagedKVCache(n_layers=1, n_kv_heads=1, head_dim=8, num_blocks=4, block_size=2).stats()
    CacheStats(num_blocks=4, block_size=2, used=0, shared=0, cached=0, free=4, wasted_slots=0, nbytes=512)
    """

    num_blocks: int
    block_size: int  # tokens per block
    used: int  # blocks in the table of at least one sequence
    shared: int  # of these, blocks in the tables of two or more
    cached: int  # blocks in no table, kept for prompts that begin alike
    free: int
    wasted_slots: int  # token slots of used blocks that hold nothing yet
    nbytes: int  # memory of the whole cache


@dataclass(slots=True)
class _Sequence:
    tokens: list[int] = field(default_factory=list)  # tokens whose K and V are stored
    blocks: list[int] = field(default_factory=list)
    length: int = 0  # tokens computed; below len(tokens) only when the prompt was found whole
    published: int = 0  # leading blocks that are in the prefix cache
    step: int | None = None  # the last `prepare` it took part in, until that is committed


def token_ids(what: str, tokens: Iterable[int]) -> list[int]:
    """`tokens` as Python integers. What is no integer is refused, not rounded or parsed; `what` names it in the error.

    >>> from attn_ext.kv_cache import token_ids
    >>> token_ids("prompt tokens", [1.7])
    Traceback (most recent call last):
    ValueError: prompt tokens must be 64-bit integers, got 1.7
    """
    ids = []
    for token in tokens:
        try:
            ids.append(operator.index(token))
        except TypeError:
            raise ValueError(f"{what} must be 64-bit integers, got {token!r}") from None
        if not -(2**63) <= ids[-1] < 2**63:
            raise ValueError(f"{what} must be 64-bit integers, got {token!r}")
    return ids


class PagedKVCache:
    """Keys and values of all layers for many sequences, in blocks of `block_size` tokens from one pool.

    Full blocks are kept under the tokens they hold (`prefix_cache`): a sequence that begins with the same tokens gets
    the same blocks and need not compute them again. `fork` shares a whole sequence; the first write to a shared block
    copies it. Blocks in no sequence stay findable until the pool needs them, the least recently used going first.

    The storage is uninitialised: slots that hold no token may contain anything, NaN included, and the ops never read
    them. Not safe for use from several threads at once.

    Args: num_blocks and block_size (tokens) size the pool, n_kv_heads and head_dim one token of one layer, dtype and
    device are the tensors'. A value out of range raises ValueError; RuntimeError where there is no memory for the pool.
    A cache cannot be copied or pickled.

    >>> import torch
    >>> from attn_ext import PagedKVCache
    >>> cache = PagedKVCache(n_layers=2, n_kv_heads=1, head_dim=8, num_blocks=4, block_size=2)
    >>> first = cache.add_sequence()
    >>> batch = cache.prepare([(first, [1, 2, 3])])  # a model would now write K and V of 3 tokens
    >>> cache.commit(batch)
    >>> second = cache.add_sequence([1, 2, 9])  # begins with a block that is already there
    >>> cache.length(first), cache.length(second)
    (3, 2)
    >>> cache.stats().used, cache.stats().shared, cache.stats().wasted_slots
    (2, 1, 1)
    >>> cache.free(first)
    >>> cache.free(second)
    >>> cache.stats().used, cache.stats().cached, cache.stats().free
    (0, 1, 3)
    """

    def __init__(
        self, n_layers: int, n_kv_heads: int, head_dim: int, *, num_blocks: int, block_size: int = 16,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", prefix_cache: bool = True,
    ):  # fmt: skip
        sizes = {"n_layers": n_layers, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
        for name, value in {**sizes, "num_blocks": num_blocks, "block_size": block_size}.items():
            if not hasattr(value, "__index__") or value < 1:
                raise ValueError(f"PagedKVCache: {name} must be an integer of at least 1, got {value!r}")
        if dtype not in _DTYPES:
            raise ValueError(f"PagedKVCache: dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}")
        self.n_layers, self.num_blocks, self.block_size = n_layers, num_blocks, block_size
        self.device, self.dtype, self.prefix_cache = torch.device(device), dtype, prefix_cache
        # One head's part of a block is contiguous in memory; the ops see (num_blocks, block_size, Hkv, D) views of it.
        shape = (n_layers, 2, num_blocks, n_kv_heads, block_size, head_dim)
        try:
            self._storage = torch.empty(shape, dtype=dtype, device=device)
            self.allocator = BlockAllocator(num_blocks, block_size)  # second: its tables are filled, which takes time
        except (RuntimeError, MemoryError) as error:
            nbytes = self.block_nbytes(n_layers, n_kv_heads, head_dim, block_size, dtype)
            raise RuntimeError(
                f"PagedKVCache: no memory on {device} for {num_blocks} blocks of {nbytes} bytes ({error})"
            ) from error
        if self.device.type == "cpu":  # blocks lie in any order: with small pages almost each would miss the TLB
            _C.advise_huge_pages(self._storage.data_ptr(), self._storage.nbytes)
        self._views = [(layer[0].transpose(1, 2), layer[1].transpose(1, 2)) for layer in self._storage]
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = self._next_step = 0

    def __reduce__(self):
        raise TypeError("PagedKVCache: a cache cannot be copied or pickled; fork copies a sequence inside it")

    @staticmethod
    def block_nbytes(n_layers: int, n_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes, keys and values of all layers together.

        >>> import torch
        >>> from attn_ext import PagedKVCache
        >>> PagedKVCache.block_nbytes(30, 3, 64, 16, torch.bfloat16)
        368640
        """
        return 2 * n_layers * n_kv_heads * head_dim * block_size * dtype.itemsize

    def key_cache(self, layer: int) -> Tensor:
        """The keys of one layer: a view (num_blocks, block_size, Hkv, D) of the storage."""
        return self._views[layer][0]

    def value_cache(self, layer: int) -> Tensor:
        """The values of one layer: a view (num_blocks, block_size, Hkv, D) of the storage."""
        return self._views[layer][1]

    def layers(self) -> tuple[list[Tensor], list[Tensor]]:
        """The keys of all layers, and the values, as `decoder_layers` takes them."""
        return [keys for keys, _ in self._views], [values for _, values in self._views]

    # ------------------------------------------------------------------------------------------------ sequences

    def _get(self, method: str, sequence: int) -> _Sequence:
        try:
            return self._sequences[sequence]
        except KeyError:
            raise ValueError(f"PagedKVCache.{method}: there is no sequence {sequence!r}") from None

    def _add(self, s: _Sequence) -> int:
        sequence, self._next_id = self._next_id, self._next_id + 1
        self._sequences[sequence] = s
        return sequence

    def add_sequence(self, prompt: Sequence[int] = ()) -> int:
        """Begin a sequence -> its number. What is cached of `prompt` is its first `length(sequence)` tokens.

        The caller goes on with `prompt[length:]`. At least one token is always left to compute, because its logits
        are wanted: when every block of the prompt is cached, `length` is one less than the prompt and the last token's
        K and V, which are there, are not written again.
        """
        s, prompt = _Sequence(), token_ids("PagedKVCache.add_sequence: prompt", prompt)
        if self.prefix_cache and prompt:
            s.blocks = self.allocator.match(prompt)
            s.published = len(s.blocks)
            s.tokens = prompt[: s.published * self.block_size]
            s.length = min(len(s.tokens), len(prompt) - 1)
        return self._add(s)

    def fork(self, sequence: int) -> int:
        """A second sequence with the same tokens -> its number. Nothing is copied until one of the two is written to.

        >>> from attn_ext import PagedKVCache
        >>> cache = PagedKVCache(n_layers=1, n_kv_heads=1, head_dim=8, num_blocks=4, block_size=2)
        >>> a = cache.add_sequence()
        >>> cache.commit(cache.prepare([(a, [1])]))
        >>> b = cache.fork(a)
        >>> cache.commit(cache.prepare([(b, [2])]))  # b writes into a half full shared block: b gets a copy
        >>> cache.block_table([a, b]).tolist()
        [[0], [1]]
        """
        s = self._get("fork", sequence)
        blocks = s.blocks[: self._blocks_for(len(s.tokens))]  # not what an unfinished step has reserved
        self.allocator.fork(blocks)
        return self._add(_Sequence(list(s.tokens), blocks, s.length, s.published))

    def free(self, sequence: int) -> None:
        """End a sequence. Its published blocks stay findable until the pool needs them."""
        self.allocator.free(self._get("free", sequence).blocks)
        del self._sequences[sequence]

    def length(self, sequence: int) -> int:
        """Tokens of the sequence that are computed; the next one has this position."""
        return self._get("length", sequence).length

    def tokens(self, sequence: int) -> list[int]:
        """The computed tokens of the sequence."""
        s = self._get("tokens", sequence)
        return s.tokens[: s.length]

    def sequences(self) -> list[int]:
        """The numbers of all sequences, oldest first."""
        return list(self._sequences)

    # ----------------------------------------------------------------------------------------------------- steps

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)

    def blocks_needed(self, sequence: int, n_tokens: int) -> int:
        """Blocks the pool must have available for `n_tokens` more tokens of the sequence, its copy-on-write included.

        >>> from attn_ext import PagedKVCache
        >>> cache = PagedKVCache(n_layers=1, n_kv_heads=1, head_dim=8, num_blocks=4, block_size=4)
        >>> a = cache.add_sequence()
        >>> cache.commit(cache.prepare([(a, [1, 2, 3])]))
        >>> cache.blocks_needed(a, 1), cache.blocks_needed(a, 2)
        (0, 1)
        """
        s = self._get("blocks_needed", sequence)
        target = self._write_target(s, s.length + n_tokens)
        shared = target is not None and self.allocator.ref_count(s.blocks[target]) > 1
        return max(0, self._blocks_for(s.length + n_tokens) - len(s.blocks)) + shared

    def _write_target(self, s: _Sequence, end: int) -> int | None:
        """Index of the block, among those the sequence has, that storing tokens up to `end` writes to first."""
        index = len(s.tokens) // self.block_size
        return index if end > len(s.tokens) and index < len(s.blocks) else None

    def prepare(
        self, chunks: Iterable[tuple[int, Sequence[int]]], *, logits: str | Sequence[bool] = "last"
    ) -> StepBatch:
        """Reserve slots for the next tokens of some sequences -> StepBatch.

        chunks: (sequence, its next tokens), at least one token each, a sequence at most once. logits: which rows are
        wanted: "last" of every chunk, "all", or one bool per chunk for its last row. Raises OutOfBlocks, with nothing
        changed, when the pool cannot hold all of it. A sequence that is prepared again leaves the batch before behind:
        that one can no longer be committed.
        """
        chunks = [(sequence, token_ids("PagedKVCache.prepare: tokens", tokens)) for sequence, tokens in chunks]
        states = [self._get("prepare", sequence) for sequence, _ in chunks]
        if len({sequence for sequence, _ in chunks}) < len(chunks):
            raise ValueError("PagedKVCache.prepare: a sequence may appear once in a step")
        for s, (sequence, tokens) in zip(states, chunks, strict=True):
            if not tokens:
                raise ValueError(f"PagedKVCache.prepare: sequence {sequence} needs at least one token")
            stored = s.tokens[s.length : s.length + len(tokens)]
            if tokens[: len(stored)] != stored:
                raise ValueError(
                    f"PagedKVCache.prepare: sequence {sequence} holds {stored} from position {s.length}, got {tokens}"
                )
        logit_rows = self._logit_rows(chunks, logits)
        self._reserve([(s, s.length + len(tokens)) for s, (_, tokens) in zip(states, chunks, strict=True)])
        step, self._next_step = self._next_step, self._next_step + 1

        positions, slots, cu_seqlens, block_size = [], [], [0], self.block_size
        for s, (_, tokens) in zip(states, chunks, strict=True):
            s.step = step
            end, stored, blocks = s.length + len(tokens), len(s.tokens), s.blocks
            positions += range(s.length, end)
            slots += [-1] * (min(stored, end) - s.length)
            slots += [blocks[p // block_size] * block_size + p % block_size for p in range(stored, end)]
            cu_seqlens.append(cu_seqlens[-1] + len(tokens))
        return StepBatch(
            tokens=self._tensor([token for _, tokens in chunks for token in tokens], torch.int64),
            positions=self._tensor(positions, torch.int64),
            slot_mapping=self._tensor(slots, torch.int64),
            cu_seqlens_q=self._tensor(cu_seqlens, torch.int32),
            seq_lens=self._tensor(
                [s.length + len(tokens) for s, (_, tokens) in zip(states, chunks, strict=True)], torch.int32
            ),
            block_table=self._table([s.blocks for s in states]),
            max_seqlen_q=max((len(tokens) for _, tokens in chunks), default=0),
            logit_rows=self._tensor(logit_rows, torch.int64),
            chunks=[(sequence, s.length, tokens) for s, (sequence, tokens) in zip(states, chunks, strict=True)],
            step=step,
        )

    def _logit_rows(self, chunks: list, logits: str | Sequence[bool]) -> list[int]:
        rows, end = [], 0
        for _, tokens in chunks:
            end += len(tokens)
            rows.append(end - 1)
        if isinstance(logits, str):
            if logits not in ("last", "all"):
                raise ValueError(f"PagedKVCache.prepare: logits must be 'last', 'all' or bools, got {logits!r}")
            return rows if logits == "last" else list(range(end))
        if len(logits) != len(chunks):
            raise ValueError(f"PagedKVCache.prepare: logits must have one bool per chunk, got {len(logits)}")
        return [row for row, wanted in zip(rows, logits, strict=True) if wanted]

    def _reserve(self, ends: list[tuple[_Sequence, int]]) -> None:
        """Give each sequence private blocks for its tokens up to `end`, all of them or none."""
        targets = [(s, target) for s, end in ends if (target := self._write_target(s, end)) is not None]
        old = [s.blocks[target] for s, target in targets]
        growth = [max(0, self._blocks_for(end) - len(s.blocks)) for s, end in ends]
        new, fresh = self.allocator.make_writable(old, sum(growth))
        copies = [(source, copy) for source, copy in zip(old, new, strict=True) if source != copy]
        if copies:
            for key_cache, value_cache in self._views:
                ops.copy_blocks(key_cache, value_cache, copies)
        for (s, target), block in zip(targets, new, strict=True):
            s.blocks[target] = block
        for (s, _), n in zip(ends, growth, strict=True):
            if n:
                s.blocks += fresh[:n]
                del fresh[:n]

    def commit(self, batch: StepBatch) -> None:
        """The step's keys and values are written: its tokens count as stored, and full blocks can be found."""
        for sequence, _, _ in batch.chunks:
            if self._get("commit", sequence).step != batch.step:
                raise ValueError(f"PagedKVCache.commit: sequence {sequence} has moved on since this step was prepared")
        for sequence, start, tokens in batch.chunks:
            s = self._sequences[sequence]
            s.tokens += tokens[len(s.tokens) - start :]
            s.length, s.step = start + len(tokens), None
            if self.prefix_cache:
                self._publish(s)

    def _publish(self, s: _Sequence) -> None:
        block_size = self.block_size
        for index in range(s.published, len(s.tokens) // block_size):
            parent = s.blocks[index - 1] if index else None
            tokens = s.tokens[index * block_size : (index + 1) * block_size]
            # Another sequence may have stored the same prefix meanwhile: then its block is taken and ours is freed.
            s.blocks[index] = self.allocator.publish(s.blocks[index], tokens, parent)
            s.published = index + 1

    def clear_prefixes(self) -> None:
        """Forget all prefixes, as after a change of the model's weights. No sequence may be open."""
        if self._sequences:
            raise ValueError(f"PagedKVCache.clear_prefixes: {len(self._sequences)} sequence(s) still open")
        self.allocator.clear_prefixes()

    # --------------------------------------------------------------------------------------------------- tensors

    def _tensor(self, values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _table(self, blocks: list[list[int]]) -> Tensor:
        width = max(map(len, blocks), default=0)
        rows = [row + [-1] * (width - len(row)) for row in blocks]
        return self._tensor(rows, torch.int32).reshape(len(blocks), width)

    def block_table(self, sequences: Sequence[int]) -> Tensor:
        """The blocks of some sequences: int32 (B, max_blocks), padded with -1."""
        return self._table([self._get("block_table", sequence).blocks for sequence in sequences])

    def seq_lens(self, sequences: Sequence[int]) -> Tensor:
        """Computed tokens of some sequences: int32 (B)."""
        return self._tensor([self.length(sequence) for sequence in sequences], torch.int32)

    def slot_mapping(self, sequence: int) -> Tensor:
        """Where the sequence's stored tokens are: int64 (tokens), block * block_size + offset."""
        s, n = self._get("slot_mapping", sequence), self.block_size
        return self._tensor([s.blocks[p // n] * n + p % n for p in range(len(s.tokens))], torch.int64)

    # ------------------------------------------------------------------------------------------------ statistics

    def stats(self) -> CacheStats:
        """Blocks used, shared, cached and free, wasted slots and memory, now."""
        a, fill = self.allocator, {}
        for s in self._sequences.values():
            for index in range(len(s.tokens) // self.block_size, len(s.blocks)):  # the blocks before are full
                stored = max(0, len(s.tokens) - index * self.block_size)
                fill[s.blocks[index]] = max(fill.get(s.blocks[index], 0), stored)
        return CacheStats(
            num_blocks=self.num_blocks, block_size=self.block_size, used=a.num_used, shared=a.num_shared,
            cached=a.num_cached, free=a.num_free, wasted_slots=sum(self.block_size - n for n in fill.values()),
            nbytes=self._storage.nbytes,
        )  # fmt: skip
