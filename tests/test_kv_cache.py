"""The paged cache: tables, slots, sharing, copy-on-write, and what goes wrong at the edges of blocks."""

import copy
import doctest
import pickle

import pytest
import torch
from toy_model import ToyModel, poison

import attn_ext.kv_cache
from attn_ext.kv_cache import OutOfBlocks, PagedKVCache


def new_cache(num_blocks=8, block_size=4, n_layers=2, **options):
    cache = PagedKVCache(n_layers, 1, 8, num_blocks=num_blocks, block_size=block_size, **options)
    poison(cache)
    return cache


def store(cache, sequence, tokens):
    """The step a model would take, with K and V that say which token is where."""
    batch = cache.prepare([(sequence, tokens)])
    for layer in range(cache.n_layers):
        for view, sign in ((cache.key_cache(layer), 1), (cache.value_cache(layer), -1)):
            for token, slot in zip(tokens, batch.slot_mapping.tolist(), strict=True):
                if slot >= 0:
                    view[slot // cache.block_size, slot % cache.block_size] = sign * (token + 100 * layer)
    cache.commit(batch)
    return batch


def contents(cache, sequence):
    """The stored tokens as read back from the tensors, which must agree in every layer, for keys and values."""
    slots = cache.slot_mapping(sequence)
    block, offset = slots // cache.block_size, slots % cache.block_size
    tokens = cache.key_cache(0)[block, offset, 0, 0]
    for layer in range(cache.n_layers):
        assert (cache.key_cache(layer)[block, offset] == (tokens + 100 * layer)[:, None, None]).all()
        assert (cache.value_cache(layer)[block, offset] == -(tokens + 100 * layer)[:, None, None]).all()
    return [int(token) for token in tokens]


def state(cache):
    sequences = cache.sequences()
    return (
        [(cache.tokens(s), cache.length(s)) for s in sequences],
        cache.block_table(sequences).tolist(),
        cache.stats(),
    )


def test_views_have_the_layout_the_ops_expect():
    cache = PagedKVCache(3, 2, 8, num_blocks=5, block_size=4, dtype=torch.bfloat16)
    assert cache.key_cache(2).shape == cache.value_cache(2).shape == (5, 4, 2, 8)
    assert cache.key_cache(2).dtype == torch.bfloat16
    assert cache.key_cache(0)[1, :, 1].is_contiguous()  # one head's part of a block
    assert cache.stats().nbytes == 5 * PagedKVCache.block_nbytes(3, 2, 8, 4, torch.bfloat16)


def test_step_of_several_sequences():
    cache = new_cache()
    a, b = cache.add_sequence(), cache.add_sequence()
    store(cache, a, [1, 2, 3, 4, 5])
    batch = cache.prepare([(b, [7, 8, 9]), (a, [6])])
    assert batch.tokens.tolist() == [7, 8, 9, 6] and batch.tokens.dtype == torch.int64
    assert batch.positions.tolist() == [0, 1, 2, 5] and batch.positions.dtype == torch.int64
    assert batch.slot_mapping.tolist() == [8, 9, 10, 5] and batch.slot_mapping.dtype == torch.int64
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4] and batch.cu_seqlens_q.dtype == torch.int32
    assert batch.seq_lens.tolist() == [3, 6] and batch.seq_lens.dtype == torch.int32
    assert batch.block_table.tolist() == [[2, -1], [0, 1]] and batch.block_table.dtype == torch.int32
    assert batch.max_seqlen_q == 3
    assert batch.logit_rows.tolist() == [2, 3] and batch.logit_rows.dtype == torch.int64


def test_rows_whose_logits_are_wanted():
    cache = new_cache()
    chunks = [(cache.add_sequence(), [1, 2]), (cache.add_sequence(), [3, 4, 5])]
    assert cache.prepare(chunks).logit_rows.tolist() == [1, 4]
    assert cache.prepare(chunks, logits="all").logit_rows.tolist() == [0, 1, 2, 3, 4]
    assert cache.prepare(chunks, logits=[False, True]).logit_rows.tolist() == [4]
    assert cache.prepare(chunks, logits=[False, False]).logit_rows.tolist() == []


def test_empty_step():
    batch = new_cache().prepare([])
    assert batch.block_table.shape == (0, 0) and batch.cu_seqlens_q.tolist() == [0] and batch.max_seqlen_q == 0


def test_a_step_that_is_not_committed_can_be_prepared_again():
    cache = new_cache()
    a = cache.add_sequence()
    store(cache, a, [1, 2, 3])
    first, second = cache.prepare([(a, [4, 5])]), cache.prepare([(a, [6])])
    assert first.positions.tolist() == [3, 4] and second.positions.tolist() == [3]
    assert cache.tokens(a) == [1, 2, 3]
    store(cache, a, [4, 5])
    assert cache.tokens(a) == contents(cache, a) == [1, 2, 3, 4, 5] and cache.stats().used == 2
    with pytest.raises(ValueError, match=r"^PagedKVCache\.commit: sequence 0 has moved on"):
        cache.commit(first)


def test_a_step_that_was_prepared_again_cannot_be_committed():
    """The slots may hold the other step's K and V. A `prepare` that fails leaves the one before in force."""
    cache = new_cache()
    a, b = cache.add_sequence(), cache.add_sequence()
    first, second = cache.prepare([(b, [7]), (a, [1, 2, 3, 4])]), cache.prepare([(a, [9, 9])])
    with pytest.raises(OutOfBlocks):
        cache.prepare([(a, [*range(100)])])
    with pytest.raises(ValueError, match=r"^PagedKVCache\.commit: sequence 0 has moved on since .* prepared$"):
        cache.commit(first)
    assert cache.length(a) == cache.length(b) == 0 and cache.allocator.num_published == 0
    cache.commit(second)
    assert cache.tokens(a) == [9, 9]
    with pytest.raises(ValueError, match=r"^PagedKVCache\.commit: sequence 0 has moved on"):
        cache.commit(second)


# ------------------------------------------------------------------------------------------------------- edges


def test_h14_skipped_rows_leave_every_byte_alone():
    """A -1 slot is not slot 0: a prompt that is cached whole writes nothing when its last token is computed again."""
    cache, model = new_cache(), ToyModel()
    a = cache.add_sequence()
    batch = cache.prepare([(a, [1, 2, 3, 4])])
    model.forward_paged(batch, cache)
    cache.commit(batch)
    before = cache._storage.clone()
    b = cache.add_sequence([1, 2, 3, 4])
    batch = cache.prepare([(b, [4])])
    assert batch.slot_mapping.tolist() == [-1]
    model.forward_paged(batch, cache)
    assert torch.equal(cache._storage.view(torch.int32), before.view(torch.int32))


def test_h15_copies_of_a_step_happen_at_once_in_every_layer():
    """Two forks of one half full block write in the same step: each has the old tokens and its own new one."""
    cache = new_cache(num_blocks=3, n_layers=3)
    a = cache.add_sequence()
    store(cache, a, [1, 2])
    b, c = cache.fork(a), cache.fork(a)
    batch = cache.prepare([(a, [3]), (b, [4]), (c, [5])])  # exactly the pool: two copies, one keeps the original
    assert len({*batch.block_table.flatten().tolist()}) == 3
    for sequence, token in ((a, 3), (b, 4), (c, 5)):
        store(cache, sequence, [token])
        assert contents(cache, sequence) == [1, 2, token]


@pytest.mark.parametrize("chunks", [[4, 4, 2], [1] * 10, [3, 3, 3, 1], [10]])
def test_h16_chunked_prefill_reads_only_what_is_written(chunks):
    cache, model = new_cache(), ToyModel()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    whole = cache.prepare([(cache.add_sequence(), prompt)], logits="all")
    expected = model.forward_paged(whole, cache)
    cache = new_cache()
    a, rows = cache.add_sequence(), []
    for n in chunks:
        start = cache.length(a)
        batch = cache.prepare([(a, prompt[start : start + n])], logits="all")
        assert batch.seq_lens.tolist() == [start + n]
        rows.append(model.forward_paged(batch, cache))
        cache.commit(batch)
    assert expected.isfinite().all()
    assert torch.equal(torch.cat(rows), expected)


@pytest.mark.parametrize("length", [8, 9, 11, 12])
def test_h18_a_cached_prompt_is_computed_from_its_last_missing_token(length):
    cache, model, prompt = new_cache(), ToyModel(), [*range(1, length + 1)]
    a = cache.add_sequence(prompt)
    assert cache.length(a) == 0
    batch = cache.prepare([(a, prompt)])
    first = model.forward_paged(batch, cache)
    cache.commit(batch)
    before = cache._storage.clone()

    partly, wholly = cache.add_sequence([*prompt[:4], 20, 21]), cache.add_sequence(prompt)
    assert cache.length(partly) == 4
    assert cache.length(wholly) == (length - 1) // 4 * 4 if length % 4 else cache.length(wholly) == length - 1
    batch = cache.prepare([(partly, [20, 21]), (wholly, prompt[cache.length(wholly) :])])
    again = model.forward_paged(batch, cache)
    cache.commit(batch)
    assert torch.equal(again[1:], first)
    shared = length // 4
    assert cache.block_table([a]).tolist()[0][:shared] == cache.block_table([wholly]).tolist()[0][:shared]
    for block in cache.block_table([a]).tolist()[0]:
        assert torch.equal(cache._storage[:, :, block].nan_to_num(), before[:, :, block].nan_to_num())
    assert cache.tokens(wholly) == prompt
    batch = cache.prepare([(wholly, [13])])  # and it goes on in a block of its own
    assert batch.positions.tolist() == [length]
    assert batch.slot_mapping.tolist()[0] // 4 not in cache.block_table([a]).tolist()[0]


def test_h18_the_recomputed_token_must_be_the_cached_one():
    cache = new_cache()
    store(cache, cache.add_sequence(), [1, 2, 3, 4])
    b = cache.add_sequence([1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"sequence 1 holds \[4\] from position 3, got \[5\]$"):
        cache.prepare([(b, [5])])


def test_h19_growth_at_the_edge_of_a_block():
    cache = new_cache(num_blocks=1)
    a = cache.add_sequence()
    assert cache.stats().wasted_slots == 0
    store(cache, a, [1, 2, 3])
    assert cache.stats().wasted_slots == 1 and cache.blocks_needed(a, 1) == 0
    store(cache, a, [4])  # 3 -> 4 needs no block
    assert cache.stats().wasted_slots == 0 and cache.blocks_needed(a, 1) == 1
    before = state(cache)
    with pytest.raises(OutOfBlocks):  # 4 -> 5 does
        cache.prepare([(a, [5])])
    assert state(cache) == before and contents(cache, a) == [1, 2, 3, 4]


@pytest.mark.parametrize(("length", "blocks", "fill"), [(0, 0, 0), (1, 1, 1), (4, 1, 4), (5, 2, 1), (8, 2, 4)])
def test_h19_fill_of_the_last_block(length, blocks, fill):
    cache = new_cache()
    a = cache.add_sequence()
    if length:
        store(cache, a, [*range(length)])
    stats = cache.stats()
    assert (stats.used, stats.wasted_slots) == (blocks, blocks * 4 - length)
    assert len(cache.tokens(a)) - max(0, blocks - 1) * 4 == fill
    assert cache.slot_mapping(a).tolist() == [*range(length)]


def test_a_step_takes_all_its_blocks_or_none():
    cache = new_cache(num_blocks=3)
    a, b = cache.add_sequence(), cache.add_sequence()
    store(cache, a, [1, 2, 3, 4])
    store(cache, b, [1])
    before = state(cache)
    with pytest.raises(OutOfBlocks):
        cache.prepare([(a, [5]), (b, [2, 3, 4, 5])])
    assert state(cache) == before
    store(cache, a, [5])


# ----------------------------------------------------------------------------------------------------- sharing


def test_fork_copies_a_block_when_it_is_written_to():
    cache = new_cache()
    a = cache.add_sequence()
    store(cache, a, [1, 2, 3, 4, 5])
    b = cache.fork(a)
    assert cache.stats().shared == 2 and cache.blocks_needed(b, 1) == 1
    store(cache, b, [6])
    assert cache.stats().shared == 1 and cache.stats().used == 3
    store(cache, a, [7])  # alone with its block again: in place
    assert cache.stats().used == 3
    assert contents(cache, a) == [1, 2, 3, 4, 5, 7] and contents(cache, b) == [1, 2, 3, 4, 5, 6]
    cache.free(a)
    assert contents(cache, b) == [1, 2, 3, 4, 5, 6]
    cache.free(b)
    assert cache.stats().used == 0


def test_fork_in_the_middle_of_a_step_takes_what_is_stored():
    cache = new_cache()
    a = cache.add_sequence()
    store(cache, a, [1, 2, 3])
    batch = cache.prepare([(a, [4, 5, 6])])
    b = cache.fork(a)
    assert cache.tokens(b) == [1, 2, 3] and cache.block_table([b]).tolist() == [[0]]
    cache.commit(batch)
    store(cache, b, [9, 9])
    assert contents(cache, b) == [1, 2, 3, 9, 9] and cache.tokens(a) == [1, 2, 3, 4, 5, 6]


def test_the_same_prompt_computed_side_by_side_ends_in_the_same_blocks():
    cache = new_cache()
    a, b = cache.add_sequence([1, 2, 3, 4, 5]), cache.add_sequence([1, 2, 3, 4, 5])
    store(cache, a, [1, 2, 3, 4, 5])
    store(cache, b, [1, 2, 3, 4, 5])
    assert cache.stats().shared == 1 and cache.stats().used == 3 and cache.stats().free == 5
    assert contents(cache, a) == contents(cache, b) == [1, 2, 3, 4, 5]


def test_a_prefix_is_found_only_once_it_is_stored():
    cache = new_cache()
    a = cache.add_sequence()
    batch = cache.prepare([(a, [1, 2, 3, 4])])
    assert cache.length(cache.add_sequence([1, 2, 3, 4, 5])) == 0
    cache.commit(batch)
    assert cache.length(cache.add_sequence([1, 2, 3, 4, 5])) == 4


def test_freed_prefixes_are_found_until_their_blocks_are_needed():
    cache = new_cache(num_blocks=2)
    a = cache.add_sequence()
    store(cache, a, [1, 2, 3, 4])
    cache.free(a)
    assert cache.stats().cached == 1
    b = cache.add_sequence([1, 2, 3, 4, 5])
    assert cache.length(b) == 4
    cache.free(b)
    c = cache.add_sequence()
    store(cache, c, [5, 6, 7, 8, 9])
    cache.free(c)
    assert cache.length(cache.add_sequence([1, 2, 3, 4, 5])) == 0


def test_without_prefix_cache_nothing_is_kept():
    cache = new_cache(prefix_cache=False)
    a = cache.add_sequence([1, 2, 3, 4])
    store(cache, a, [1, 2, 3, 4])
    assert cache.length(cache.add_sequence([1, 2, 3, 4, 5])) == 0
    cache.free(a)
    assert cache.stats().cached == 0 and cache.stats().used == 0


def test_clear_prefixes():
    cache = new_cache()
    a = cache.add_sequence()
    store(cache, a, [1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"^PagedKVCache\.clear_prefixes: 1 sequence"):
        cache.clear_prefixes()
    cache.free(a)
    cache.clear_prefixes()
    assert cache.stats().cached == 0 and cache.length(cache.add_sequence([1, 2, 3, 4, 5])) == 0


def test_stats_count_a_shared_half_full_block_once():
    cache = new_cache()
    a = cache.add_sequence()
    store(cache, a, [1])
    cache.fork(a)
    stats = cache.stats()
    assert (stats.used, stats.shared, stats.wasted_slots) == (1, 1, 3)
    assert stats.used + stats.cached + stats.free == stats.num_blocks == 8


def test_random_use_against_plain_lists():
    """Grow, fork, free and restart sequences at random over a small pool; every token is read back every time."""
    import random

    rng, cache = random.Random(1), new_cache(num_blocks=10, block_size=3)
    tokens = {}
    for _ in range(600):
        action = rng.random()
        if action < 0.2 or not tokens:
            prompt = rng.choices(range(2), k=rng.randint(1, 8))
            sequence = cache.add_sequence(prompt)
            tokens[sequence] = prompt[: cache.length(sequence)]
            rest = prompt[cache.length(sequence) :]
        elif action < 0.3:
            source = rng.choice([*tokens])
            tokens[cache.fork(source)] = list(tokens[source])
            continue
        elif action < 0.45:
            sequence = rng.choice([*tokens])
            cache.free(sequence)
            del tokens[sequence]
            continue
        else:
            sequence = rng.choice([*tokens])
            stored = len(cache.slot_mapping(sequence)) - len(tokens[sequence])
            recomputed = contents(cache, sequence)[len(tokens[sequence]) :][:stored]
            rest = recomputed + rng.choices(range(2), k=rng.randint(1, 4))
        try:
            needed, available = cache.blocks_needed(sequence, len(rest)), cache.allocator.num_available
            store(cache, sequence, rest)
            assert needed <= available
            tokens[sequence] += rest
        except OutOfBlocks:
            assert needed > available
        cache.allocator.check_invariants()
        for s, expected in tokens.items():
            assert cache.tokens(s) == expected
            assert contents(cache, s)[: len(expected)] == expected
    for sequence in tokens:
        cache.free(sequence)
    assert cache.stats().used == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: PagedKVCache(0, 1, 8, num_blocks=1), r"^PagedKVCache: n_layers must be an integer of .*, got 0$"),
        (lambda c: PagedKVCache(1, 1, 8, num_blocks=0), r"^PagedKVCache: num_blocks must be an integer of .*, got 0$"),
        (lambda c: PagedKVCache(1, 1, 8, num_blocks=1.5), r"^PagedKVCache: num_blocks must be an .*, got 1\.5$"),
        (lambda c: PagedKVCache(1, 1, 8, num_blocks=1, dtype=torch.int8), r"^PagedKVCache: dtype must be .*int8$"),
        (lambda c: c.free(7), r"^PagedKVCache\.free: there is no sequence 7$"),
        (lambda c: c.fork(7), r"^PagedKVCache\.fork: there is no sequence 7$"),
        (lambda c: c.prepare([(7, [1])]), r"^PagedKVCache\.prepare: there is no sequence 7$"),
        (lambda c: c.prepare([(0, [])]), r"^PagedKVCache\.prepare: sequence 0 needs at least one token$"),
        (lambda c: c.prepare([(0, ["x"])]), r"^PagedKVCache\.prepare: tokens must be 64-bit integers, got 'x'$"),
        (lambda c: c.prepare([(0, [1.5])]), r"^PagedKVCache\.prepare: tokens must be 64-bit integers, got 1\.5$"),
        (lambda c: c.prepare([(0, [2**70])]), r"^PagedKVCache\.prepare: tokens must be 64-bit integers, got 118"),
        (lambda c: c.add_sequence([1.5]), r"^PagedKVCache\.add_sequence: prompt must be 64-bit integers, got 1\.5$"),
        (lambda c: c.prepare([(0, [1]), (0, [2])]), r"^PagedKVCache\.prepare: a sequence may appear once in a step$"),
        (lambda c: c.prepare([(0, [1])], logits="some"), r"^PagedKVCache\.prepare: logits must be .*, got 'some'$"),
        (lambda c: c.prepare([(0, [1])], logits=[]), r"^PagedKVCache\.prepare: logits must have one bool per chunk"),
    ],
)
def test_misuse_is_one_line_and_changes_nothing(call, message):
    cache = new_cache()
    cache.add_sequence()
    with pytest.raises(ValueError, match=message) as error:
        call(cache)
    assert "\n" not in str(error.value)
    assert cache.stats().free == 8 and cache.sequences() == [0]


def test_a_pool_without_memory_is_refused_at_once():
    """Before the allocator's tables are made, which for so many blocks would take a minute and gigabytes."""
    with pytest.raises(RuntimeError, match=r"^PagedKVCache: no memory on cpu for 99999999 blocks of 5368709120 bytes"):
        PagedKVCache(2**15, 16, 64, num_blocks=99_999_999, dtype=torch.float32, block_size=20)


def test_a_cache_cannot_be_copied_or_pickled():
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="^PagedKVCache: a cache cannot be copied or pickled"):
            copied(new_cache())


def test_documentation_examples():
    results = doctest.testmod(attn_ext.kv_cache)
    assert results.attempted > 20 and results.failed == 0
