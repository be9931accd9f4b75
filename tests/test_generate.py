"""The engine: the same tokens and logits however requests are mixed, and every request ends."""

import doctest
import random
from contextlib import nullcontext

import pytest
import torch
from toy_model import Remembering, ToyModel, poison

import attn_ext.generate
from attn_ext.generate import Engine, SamplingParams, generate, sample
from attn_ext.llama import Llama, LlamaConfig
from attn_ext.nanogpt import GPT, GPTConfig

PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 20], [*range(20)], [7, 7, 7]]
PARAMS = [
    SamplingParams(max_new_tokens=9),
    SamplingParams(max_new_tokens=12, temperature=0.8, seed=3),
    SamplingParams(max_new_tokens=5, temperature=1.3, top_k=5, seed=4),
    SamplingParams(max_new_tokens=11, temperature=1.0, top_p=0.7, seed=5),
    SamplingParams(max_new_tokens=12),
    SamplingParams(max_new_tokens=30, temperature=0.9, top_k=9, top_p=0.9, seed=6),
]


def new_engine(model, *, num_blocks=100, block_size=4, **options):
    engine = Engine(model, num_blocks=num_blocks, block_size=block_size, **options)
    poison(engine.cache)
    return engine


def finish(engine):
    """Run to the end; no block is lost."""
    completions = engine.run()
    engine.cache.allocator.check_invariants()
    assert engine.cache.stats().used == 0 and engine.cache.sequences() == []
    assert engine.stats().running == engine.stats().waiting == 0
    return completions


def tokens_of(model, prompts, params, **options):
    engine = new_engine(model, **options)
    ids = [engine.submit(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    completions = finish(engine)
    return [completions[i].tokens for i in ids], engine


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def alone(request):
    """The model, and what each request gives alone: one-shot prefill, no cached prefix, room for everything.

    The model checks bit by bit that all later runs with it give these logits.
    """
    model = Remembering(ToyModel(dtype=request.param))
    expected = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        (tokens,), _ = tokens_of(model, [prompt], [params], prefix_cache=False, max_batch_tokens=1000)
        expected.append(tokens)
    assert len({*map(tuple, expected)}) == len(expected)
    return model, expected


# -------------------------------------------------------------------------------------------------- invariance


def test_together_as_alone(alone):
    model, expected = alone
    assert tokens_of(model, PROMPTS, PARAMS)[0] == expected


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 7, 1000])
def test_chunk_sizes(alone, max_batch_tokens):
    model, expected = alone
    model.steps.clear()
    assert tokens_of(model, PROMPTS, PARAMS, max_batch_tokens=max_batch_tokens)[0] == expected
    assert max(sum(step) for step in model.steps) <= max_batch_tokens
    if max_batch_tokens == 7:
        assert any(1 in step and max(step) > 1 for step in model.steps), "no step mixed decode with prefill"


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("max_seqs", [1, 2, 6])
def test_prefix_cache_and_width(alone, prefix_cache, max_seqs):
    model, expected = alone
    tokens, engine = tokens_of(model, PROMPTS, PARAMS, prefix_cache=prefix_cache, max_seqs=max_seqs)
    assert tokens == expected
    if max_seqs == 1:
        # One after the other: prompt 2 finds both blocks of prompt 1, prompts 3 and 4 find one and none.
        assert engine.stats().prefix_hit_tokens == (12 if prefix_cache else 0)


@pytest.mark.parametrize("block_size", [1, 2, 5, 16])
def test_block_sizes(alone, block_size):
    model, expected = alone
    assert tokens_of(model, PROMPTS, PARAMS, block_size=block_size)[0] == expected


def test_order_of_submission(alone):
    model, expected = alone
    assert tokens_of(model, PROMPTS[::-1], PARAMS[::-1])[0] == expected[::-1]


def test_number_of_threads(alone, threads):
    model, expected = alone
    for n in (1, 2):
        threads(n)
        assert tokens_of(model, PROMPTS, PARAMS, num_blocks=12)[0] == expected


def test_requests_that_join_and_leave_midway(alone):
    model, expected = alone
    engine, got = new_engine(model), {}
    waiting = list(zip(range(len(PROMPTS)), PROMPTS, PARAMS, strict=True))
    index = {}
    while waiting or engine.has_work:
        if waiting:
            i, prompt, params = waiting.pop(0)
            index[engine.submit(prompt, params)] = i
        for event in engine.step():
            if event.completion:
                got[index[event.request_id]] = event.completion.tokens
    assert [got[i] for i in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("num_blocks", [9, 10, 11, 16])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_h20_preempted_requests_go_on_as_if_nothing_had_happened(alone, num_blocks, prefix_cache):
    model, expected = alone
    tokens, engine = tokens_of(model, PROMPTS, PARAMS, num_blocks=num_blocks, prefix_cache=prefix_cache)
    assert tokens == expected
    assert engine.stats().preemptions > 0
    assert engine.stats().peak_blocks <= num_blocks


def test_h20_forced_preemption_after_three_tokens_twice():
    model, params = Remembering(ToyModel()), SamplingParams(max_new_tokens=12)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    expected, _ = tokens_of(model, prompts, [params] * 2)
    engine = new_engine(model)
    ids, got, preempted_at = [engine.submit(prompt, params) for prompt in prompts], {0: [], 1: []}, []
    completions = {}
    while engine.has_work:
        for event in engine.step():
            got[event.request_id].append(event.token)
            if event.completion:
                completions[event.request_id] = event.completion
        if len(got[1]) in (3, 6) and len(got[1]) not in preempted_at:
            preempted_at.append(len(got[1]))
            engine._preempt_newest()
    assert [got[i] for i in ids] == expected and all(len(tokens) == 12 for tokens in expected)
    assert completions[1].preemptions == 2 and completions[1].tokens == expected[1]
    assert engine.cache.stats().used == 0


def test_a_long_prompt_does_not_keep_others_from_generating():
    model = Remembering(ToyModel())
    engine = new_engine(model, max_batch_tokens=4)
    first = engine.submit([1], SamplingParams(max_new_tokens=20))
    engine.step()
    engine.submit([*range(20)], SamplingParams(max_new_tokens=2))
    for _ in range(7):
        assert first in [event.request_id for event in engine.step()]
    assert model.steps[1:] == [[1, 3]] * 6 + [[1, 2]]
    finish(engine)


def test_a_request_is_not_started_to_be_preempted_at_once():
    """Two prompts of a block each would fit the three blocks, but not their first tokens."""
    model, params = ToyModel(), SamplingParams(max_new_tokens=4)
    _, engine = tokens_of(model, [[1, 2, 3, 4], [5, 6, 7, 8]], [params] * 2, num_blocks=3)
    assert engine.stats().preemptions == 0 and engine.stats().steps == 8


def test_h20_a_pool_too_small_for_both():
    model, params = Remembering(ToyModel()), SamplingParams(max_new_tokens=12)
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    expected, _ = tokens_of(model, prompts, [params] * 2)
    tokens, engine = tokens_of(model, prompts, [params] * 2, num_blocks=4)  # 15 and 16 tokens in 16 slots
    assert tokens == expected
    assert engine.stats().preemptions >= 1


def test_h18_a_prompt_of_whole_blocks_twice():
    model = Remembering(ToyModel())
    engine = new_engine(model, max_seqs=1)
    prompt, params = [1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_new_tokens=6)
    first, second = engine.submit(prompt, params), engine.submit(prompt, params)
    model.steps.clear()
    completions = finish(engine)
    assert completions[first].tokens == completions[second].tokens
    assert completions[first].prefix_hit_tokens == 0 and completions[second].prefix_hit_tokens == 7
    assert model.steps == [[8], *[[1]] * 5, [1], *[[1]] * 5]


def new_gpt(dtype):
    config = GPTConfig(block_size=64, vocab_size=23, n_layer=2, n_head=2, n_embd=48)
    return GPT(config).eval().to(dtype)


def new_llama(dtype):
    config = LlamaConfig(
        vocab_size=23, hidden_size=48, intermediate_size=72, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=64
    )
    return Llama(config).eval().to(dtype)


@pytest.mark.parametrize("new_model", [new_gpt, new_llama])
def test_real_models_on_every_backend(new_model, backend, dtype, threads):
    model, prompts, params = Remembering(new_model(dtype)), PROMPTS[1:5], PARAMS[1:5]
    threads(1)
    expected = [tokens_of(model, [p], [q], prefix_cache=False)[0][0] for p, q in zip(prompts, params, strict=True)]
    assert tokens_of(model, prompts, params, max_batch_tokens=3, num_blocks=9)[0] == expected
    threads(2)
    assert tokens_of(model, prompts, params, block_size=16, max_seqs=2)[0] == expected


# ----------------------------------------------------------------------------------------------------- endings


def test_soak_of_random_requests_over_tiny_pools():
    """Every request ends for its reason, with the tokens it has alone; every block comes back."""
    rng, model = random.Random(7), Remembering(ToyModel(max_seq_len=24, n_layers=1))
    for _ in range(30):
        num_blocks, block_size = rng.randint(2, 9), rng.choice([1, 2, 3, 4])
        options = {
            "num_blocks": num_blocks, "block_size": block_size, "max_batch_tokens": rng.randint(1, 12),
            "max_seqs": rng.randint(1, 6), "prefix_cache": rng.random() < 0.7,
        }  # fmt: skip
        engine, capacity, expected, aborted = new_engine(model, **options), num_blocks * block_size, {}, set()
        completions = {}
        for _ in range(25):
            prompt = rng.choices(range(3), k=rng.randint(1, min(capacity + 1, 22)))
            params = SamplingParams(
                max_new_tokens=rng.randint(1, 12), temperature=rng.choice([0, 0.9]), seed=rng.randint(0, 5),
                stop=rng.choice([(), (3, 4)]),
            )  # fmt: skip
            if len(prompt) + 1 > capacity:
                with pytest.raises(ValueError, match="in the cache of"):
                    engine.submit(prompt, params)
                continue
            expected[engine.submit(prompt, params)] = prompt, params
            for _ in range(rng.randint(0, 3)):
                completions.update({e.request_id: e.completion for e in engine.step() if e.completion})
                order = [request.id for request in [*engine._running, *engine._waiting]]
                assert order == sorted(order), "a newer request runs while an older one waits"
            if rng.random() < 0.1 and (unfinished := sorted(expected.keys() - completions.keys() - aborted)):
                victim = rng.choice(unfinished)
                assert engine.abort(victim)
                aborted.add(victim)
        completions.update(finish(engine))
        assert completions.keys() == expected.keys()
        assert engine.cache.stats().free + engine.cache.stats().cached == num_blocks
        for request_id, (prompt, params) in expected.items():
            completion, n = completions[request_id], len(prompt)
            (whole,), _ = tokens_of(model, [prompt], [params], prefix_cache=False)
            assert completion.tokens == whole[: len(completion.tokens)]
            if completion.finish_reason == "length":
                assert len(completion.tokens) == min(params.max_new_tokens, 24 - n)
            elif completion.finish_reason == "cache_full":
                assert len(completion.tokens) == capacity - n
            elif completion.finish_reason == "stop":
                assert params.stop and completion.tokens == whole
            else:
                assert completion.finish_reason == "aborted" and request_id in aborted


def test_h30_temperature_zero_is_greedy():
    model = Remembering(ToyModel())
    (first,), _ = tokens_of(model, [[3]], [SamplingParams(max_new_tokens=10, temperature=0)])
    (again,), _ = tokens_of(model, [[3]], [SamplingParams(max_new_tokens=10, temperature=0, seed=9)])
    assert first == again
    prefix = [3]
    for token in first:
        assert token == int(model.seen[tuple(prefix)].argmax())
        prefix.append(token)
    for temperature in (1e-40, 1e-46, 5e-324):  # no overflow on the way to zero, and no 0 / 0
        (nearly,), _ = tokens_of(model, [[3]], [SamplingParams(max_new_tokens=10, temperature=temperature, seed=9)])
        assert nearly == first


def test_h30_top_k_beyond_the_vocabulary_means_all_of_it():
    model = Remembering(ToyModel())
    params = [SamplingParams(max_new_tokens=10, temperature=1.0, seed=1, top_k=k) for k in (None, 23, 24, 10**9)]
    tokens, _ = tokens_of(model, [[3]] * 4, params)
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]


@pytest.mark.parametrize(("prompt_length", "new"), [(1, 15), (10, 6), (15, 1)])
def test_h30_generation_ends_with_the_context(prompt_length, new):
    model = ToyModel(max_seq_len=16)
    engine = new_engine(model)
    i = engine.submit([1] * prompt_length, SamplingParams(max_new_tokens=100))
    completion = finish(engine)[i]
    assert (len(completion.tokens), completion.finish_reason) == (new, "length")


def test_h30_generation_ends_with_the_cache():
    engine = new_engine(ToyModel(), num_blocks=2)
    i = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=100))
    completion = finish(engine)[i]
    assert (len(completion.tokens), completion.finish_reason) == (5, "cache_full")


def test_stop_token_ends_and_is_not_part_of_the_tokens():
    model = Remembering(ToyModel())
    (tokens,), _ = tokens_of(model, [[3]], [SamplingParams(max_new_tokens=10, temperature=1, seed=0)])
    stop = tokens[5]
    engine = new_engine(model)
    i = engine.submit([3], SamplingParams(max_new_tokens=10, temperature=1, seed=0, stop=[stop, 2 if stop != 2 else 1]))
    events = list(engine.stream())
    completion = events[-1].completion
    cut = min(tokens.index(t) for t in (stop, 2 if stop != 2 else 1) if t in tokens)
    assert completion.tokens == tokens[:cut] and completion.finish_reason == "stop"
    assert [e.token for e in events] == [*tokens[:cut], None]
    assert i == completion.request_id and engine.cache.stats().used == 0


def test_abort_frees_blocks_and_leaves_the_others_alone():
    model = Remembering(ToyModel())
    expected, _ = tokens_of(model, PROMPTS[:3], PARAMS[:3])
    engine = new_engine(model, max_seqs=2)
    ids = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS[:3], PARAMS[:3], strict=True)]
    events = engine.step() + engine.step()
    used = engine.cache.stats().used
    assert engine.abort(ids[1])  # running
    assert engine.cache.stats().used < used
    assert not engine.abort(ids[1]) and not engine.abort(99)
    late = engine.submit([1])
    assert engine.abort(late)  # waiting
    events += list(engine.stream())
    by_id = {e.request_id: e.completion for e in events if e.completion}
    assert [by_id[i].finish_reason for i in (ids[1], late)] == ["aborted", "aborted"]
    assert by_id[ids[1]].tokens == expected[1][: len(by_id[ids[1]].tokens)] and by_id[late].tokens == []
    assert [by_id[ids[0]].tokens, by_id[ids[2]].tokens] == [expected[0], expected[2]]
    assert by_id[late].time_to_first_token is None
    assert engine.cache.stats().used == 0 and not engine.has_work and engine.step() == []


def test_a_step_that_fails_can_be_taken_again():
    model = Remembering(ToyModel())
    expected, _ = tokens_of(model, PROMPTS, PARAMS)
    engine = new_engine(model, num_blocks=12)
    ids = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    forward, rng, completions, failures = model.forward_paged, random.Random(0), {}, 0

    def unreliable(batch, cache):
        logits = forward(batch, cache)  # K and V are written, then the step dies
        if rng.random() < 0.4:
            raise ConnectionError
        return logits

    model.forward_paged = unreliable
    while engine.has_work:
        try:
            completions.update({e.request_id: e.completion for e in engine.step() if e.completion})
        except ConnectionError:
            failures += 1
    assert failures > 5
    assert [completions[i].tokens for i in ids] == expected


@pytest.mark.parametrize("leave", ["break", "raise"])
@pytest.mark.parametrize("go_on", [Engine.run, Engine.stream, Engine.step])
def test_a_stream_left_early_loses_no_event(leave, go_on):
    """Three requests end in one step; the loop is left after the first event."""
    engine = new_engine(ToyModel())
    ids = [engine.submit([i], SamplingParams(max_new_tokens=1)) for i in range(3)]
    with pytest.raises(KeyboardInterrupt) if leave == "raise" else nullcontext():
        for event in engine.stream():
            first = event
            if leave == "raise":
                raise KeyboardInterrupt
            break
    assert first.request_id == ids[0] and engine.has_work
    rest = go_on(engine)
    rest = [*rest] if go_on is Engine.run else [event.request_id for event in rest]
    assert rest == ids[1:] and not engine.has_work


def test_a_run_that_fails_keeps_what_had_ended():
    model = Remembering(ToyModel())
    engine, forward = new_engine(model), model.forward_paged
    engine.submit([1], SamplingParams(max_new_tokens=1))
    engine.submit([2], SamplingParams(max_new_tokens=3))

    def fails_once(batch, cache):
        if len(model.steps) == 2:
            model.forward_paged = forward
            raise ConnectionError
        return forward(batch, cache)

    model.forward_paged = fails_once
    with pytest.raises(ConnectionError):
        engine.run()
    assert [len(completion.tokens) for completion in finish(engine).values()] == [1, 3]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_request_without_finite_logits_ends_and_the_others_go_on(wrong):
    model, params = Remembering(ToyModel()), SamplingParams(max_new_tokens=5)
    prompts = [[1, 2], [3], [4]]
    expected, _ = tokens_of(model, prompts, [params] * 3)
    forward = model.forward_paged

    def breaks_request_1(batch, cache):
        logits = forward(batch, cache).clone()
        if len(logits) == 3 and int(batch.positions.max()) >= 3:
            logits[1] = wrong
        return logits

    model.forward_paged = breaks_request_1
    engine = new_engine(model)
    ids = [engine.submit(prompt, params) for prompt in prompts]
    completions = finish(engine)
    assert [completions[i].finish_reason for i in ids] == ["length", "error", "length"]
    assert [completions[i].tokens for i in ids] == [expected[0], expected[1][:2], expected[2]]
    assert [completions[i].error for i in ids] == [None, "RuntimeError: the model's logits are not finite", None]


def test_a_request_whose_drawing_fails_ends_and_the_others_go_on(monkeypatch):
    model = Remembering(ToyModel())
    (expected,), _ = tokens_of(model, [[1]], [SamplingParams(max_new_tokens=3)])
    engine = new_engine(model)
    good = engine.submit([1], SamplingParams(max_new_tokens=3))
    bad = engine.submit([2], SamplingParams(max_new_tokens=3, temperature=1.0))

    def fails(logits, params, generator):
        raise OSError("no randomness")

    monkeypatch.setattr(attn_ext.generate, "sample", fails)
    completions = finish(engine)
    assert completions[good].tokens == expected and completions[good].finish_reason == "length"
    assert (completions[bad].finish_reason, completions[bad].error) == ("error", "OSError: no randomness")


# ------------------------------------------------------------------------------------------------------ sampling


def test_equal_seeds_draw_equally_and_others_do_not():
    model = Remembering(ToyModel())
    params = [SamplingParams(max_new_tokens=20, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    tokens, _ = tokens_of(model, [[3]] * 3, params)
    assert tokens[0] == tokens[1] != tokens[2]


def test_without_a_seed_torchs_global_one_decides():
    model, runs = Remembering(ToyModel()), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(tokens_of(model, [[3]] * 2, [SamplingParams(max_new_tokens=20, temperature=1.5)] * 2)[0])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {1, 2, 3}),  # 1 and 2 tie
        ({"top_p": 0.4}, {3}),
        ({"top_p": 0.6}, {1, 3}),  # 0.5 is not enough; of two that tie the first
        ({"top_p": 0.7}, {1, 2, 3}),
        ({"top_k": 4, "top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-9}, {3}),
    ],
)
def test_what_can_be_drawn(options, possible):
    logits = torch.tensor([0.1, 0.15, 0.15, 0.5, 0.1]).log()
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=1.0, **options)
    before = logits.clone()
    assert {sample(logits, params, generator) for _ in range(300)} == possible
    assert torch.equal(logits, before)


def test_top_p_that_is_reached_exactly_needs_no_more_tokens():
    generator, params = torch.Generator().manual_seed(0), SamplingParams(temperature=1.0, top_p=0.5)
    assert {sample(torch.zeros(4), params, generator) for _ in range(100)} == {0, 1}


def test_drawing_does_not_depend_on_the_default_device():
    params = SamplingParams(max_new_tokens=5, temperature=1.0, top_k=3, top_p=0.9)
    torch.manual_seed(0)
    expected, _ = tokens_of(ToyModel(), [[1]], [params])
    model = ToyModel()
    torch.manual_seed(0)
    with torch.device("meta"):
        assert tokens_of(model, [[1]], [params])[0] == expected


def test_drawn_frequencies_follow_the_temperature():
    probabilities = torch.tensor([0.7, 0.2, 0.1])
    generator, params = torch.Generator().manual_seed(0), SamplingParams(temperature=2.0)
    draws = torch.tensor([sample(probabilities.log(), params, generator) for _ in range(4000)])
    expected = probabilities.sqrt() / probabilities.sqrt().sum()
    assert torch.allclose(draws.bincount(minlength=3) / 4000, expected, atol=0.03)


def test_ties_are_broken_alike_alone_and_in_a_batch():
    logits = torch.zeros(9, 50257)
    logits[:, [7, 30000]] = 1.0
    for n in range(1, 10):
        assert logits[:n].max(dim=-1).indices.tolist() == [7] * n
    assert sample(logits[0], SamplingParams()) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer, got 1.5"),
        ({"temperature": -0.1}, "temperature must be at least 0 and finite, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be at least 0 and finite, got nan"),
        ({"temperature": float("inf")}, "temperature must be at least 0 and finite, got inf"),
        ({"temperature": "a"}, "temperature must be a number, got 'a'"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"top_p": "a"}, "top_p must be a number, got 'a'"),
        ({"top_k": 0}, "top_k must be at least 1, or None for no limit, got 0"),
        ({"top_k": -1}, "top_k must be at least 1, or None for no limit, got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, or None for no limit, got 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, or None for no limit, got 1.1"),
        ({"seed": 2**64}, "seed must be a 64-bit integer or None, got 18446744073709551616"),
        ({"stop": ""}, "stop must be token ids and non-empty strings, got ('',)"),
        ({"stop": [1.5]}, "stop must be token ids and non-empty strings, got (1.5,)"),
        ({"stop": None}, "stop must be token ids and non-empty strings, got None"),
        ({"stop": 3.5}, "stop must be token ids and non-empty strings, got 3.5"),
    ],
)
def test_h30_parameters_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ValueError) as error:
        SamplingParams(**options)
    assert str(error.value) == f"SamplingParams: {message}"


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], None, "prompt must have at least one token, got none"),
        ([1.7], None, "prompt tokens must be 64-bit integers, got 1.7"),
        (["1"], None, "prompt tokens must be 64-bit integers, got '1'"),
        ([2**70], None, "prompt tokens must be 64-bit integers, got 1180591620717411303424"),
        ([1, 23], None, "prompt tokens must be below 23, got 23"),
        ([1, -1], None, "prompt tokens must be below 23, got -1"),
        ([1] * 64, None, "prompt must leave room for a token in the model's context of 64, got 64 tokens"),
        ([1] * 40, None, "prompt must leave room for a token in the cache of 10 blocks of 4, got 40 tokens"),
        ("text", None, "prompt must be token ids where there is no tokenizer, got a string"),
        ([1], SamplingParams(stop="x"), "stop strings need a tokenizer, got 'x'"),
        ([1], SamplingParams(stop=23), "stop tokens must be below 23, got 23"),
    ],
)
def test_what_can_never_run_is_refused_at_submission(prompt, params, message):
    engine = new_engine(ToyModel(), num_blocks=10)
    with pytest.raises(ValueError) as error:
        engine.submit(prompt, params)
    assert str(error.value) == f"Engine.submit: {message}"
    assert not engine.has_work


def test_the_longest_prompt_that_fits_runs():
    engine = new_engine(ToyModel(), num_blocks=10, max_batch_tokens=7)
    i = engine.submit([1] * 39, SamplingParams(max_new_tokens=5))
    assert len(finish(engine)[i].tokens) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 1, "cache_bytes": 1}, "num_blocks and cache_bytes exclude each other, got both"),
        ({"cache_bytes": 1}, "cache_bytes must hold a block of 2048 bytes, got 1"),
        ({"max_batch_tokens": 0}, "max_batch_tokens must be an integer of at least 1, got 0"),
        ({"max_batch_tokens": 1.5}, "max_batch_tokens must be an integer of at least 1, got 1.5"),
        ({"max_seqs": 0}, "max_seqs must be an integer of at least 1, got 0"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
    ],
)
def test_engine_options_out_of_range(options, message):
    with pytest.raises(ValueError) as error:
        Engine(ToyModel(), **options)
    assert str(error.value) == f"Engine: {message}"


def test_size_of_the_cache():
    model = ToyModel(dtype=torch.bfloat16)
    assert Engine(model, cache_bytes=10_000).cache.num_blocks == 9  # 1024 bytes per block of 16 tokens
    assert Engine(model, max_seqs=3).cache.num_blocks == 3 * 64 // 16  # never more than can be used


# ---------------------------------------------------------------------------------------------------------- text


class LetterTokenizer:
    """Token i is a letter, but 20 and 21 are the two halves of one, and 22 ends a text."""

    eos_ids = (22,)

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def stream(self):
        return self

    def __call__(self, token):
        return {20: "", 21: "é"}.get(token) or chr(ord("a") + token)

    def finish(self):
        return "?"


class ScriptedModel(ToyModel):
    """Generates a given text, whatever the prompt."""

    def __init__(self, script):
        super().__init__(n_layers=1)
        self.script = script

    def forward_paged(self, batch, cache):
        logits = super().forward_paged(batch, cache) * 0
        for row, (_, start, tokens) in zip(logits, batch.chunks, strict=True):
            row[self.script[start + len(tokens) - 1]] = 1
        return logits


def scripted(text, stop=(), ignore_eos=False, extra=()):
    tokens = [*LetterTokenizer().encode(text), *extra]
    engine = new_engine(ScriptedModel([*tokens, 22, 0, 0, 0]), tokenizer=LetterTokenizer())
    engine.submit("a", SamplingParams(max_new_tokens=len(tokens) + 2, stop=stop, ignore_eos=ignore_eos))
    events = list(engine.stream())
    assert "".join(e.text for e in events) == events[-1].completion.text
    return events[-1].completion, [e.text for e in events]


class FailingTokenizer(LetterTokenizer):
    """Its call number `at` fails, `finish` being one."""

    def __init__(self, at):
        self.left = at

    def stream(self):
        return self

    def __call__(self, token):
        self._count()
        return super().__call__(token)

    def finish(self):
        self._count()
        return super().finish()

    def _count(self):
        self.left -= 1
        if self.left == 0:
            raise KeyError("decoder")


@pytest.mark.parametrize(("at", "tokens", "text"), [(1, "", ""), (2, "h", "h"), (3, "he", "he")])
def test_a_request_that_cannot_be_decoded_ends_and_the_others_go_on(at, tokens, text):
    model, params = ScriptedModel([*LetterTokenizer().encode("hello"), 0, 0]), SamplingParams(max_new_tokens=2)
    engine = new_engine(model, tokenizer=FailingTokenizer(at))
    bad = engine.submit("a", params)
    engine.tokenizer = LetterTokenizer()
    good = engine.submit("a", params)
    events = list(engine.stream())
    completions = {event.request_id: event.completion for event in events if event.completion}
    assert (completions[good].text, completions[good].finish_reason) == ("he?", "length")
    assert completions[bad].tokens == LetterTokenizer().encode(tokens) and completions[bad].text == text
    assert (completions[bad].finish_reason, completions[bad].error) == ("error", "KeyError: 'decoder'")
    mine = [event for event in events if event.request_id == bad]
    assert [event.token for event in mine if event.token is not None] == completions[bad].tokens
    assert "".join(event.text for event in mine) == text
    assert engine.cache.stats().used == 0 and not engine.has_work


def test_text_ends_at_the_end_of_text_token():
    completion, pieces = scripted("hello")
    assert (completion.text, completion.finish_reason, len(completion.tokens)) == ("hello?", "stop", 5)
    assert pieces == ["h", "e", "l", "l", "o", "?"]


def test_end_of_text_can_be_ignored():
    completion, _ = scripted("hello", ignore_eos=True)
    assert (completion.finish_reason, len(completion.tokens)) == ("length", 7)


@pytest.mark.parametrize(
    ("text", "stop", "expected", "pieces"),
    [
        ("hello", "ll", "he", ["h", "e", "", ""]),
        ("helalo", "ll", "helalo?", ["h", "e", "", "la", "", "lo", "?"]),
        ("ababac", "abac", "ab", ["", "", "", "ab", "", ""]),
        ("hello", ["lo", "el"], "h", ["h", "", ""]),
        ("hello", ["o", "lo"], "hel", ["h", "e", "", "l", ""]),
        ("hello", "h", "", [""]),
        ("hello", "loop", "hello?", ["h", "e", "", "l", "", "lo?"]),
        ("hello", ["x", 4], "h?", ["h", "?"]),  # 4 is e
    ],
)
def test_text_ends_before_a_stop_string(text, stop, expected, pieces):
    completion, got = scripted(text, stop)
    assert completion.text == expected
    assert got == pieces


def test_generate_is_the_engine_in_one_call():
    model = Remembering(ToyModel())
    expected, _ = tokens_of(model, PROMPTS, PARAMS)
    assert [c.tokens for c in generate(model, PROMPTS, PARAMS, num_blocks=20, block_size=4)] == expected
    same = generate(model, [[1], [2]], SamplingParams(max_new_tokens=3))
    assert [c.prompt for c in same] == [[1], [2]] and all(c.text is None for c in same)
    with pytest.raises(ValueError, match=r"^generate: params must be one for all or one per prompt \(2\), got 1$"):
        generate(model, [[1], [2]], [SamplingParams()])
    for single in ("text", [1, 2, 3]):
        with pytest.raises(ValueError, match="^generate: prompts must be a list of prompts, got a single one$"):
            generate(model, single)
    assert generate(model, []) == []


def test_statistics_add_up():
    model = Remembering(ToyModel())
    engine = new_engine(model, max_seqs=1)
    for _ in range(2):
        engine.submit([1, 2, 3, 4, 5], SamplingParams(max_new_tokens=4))
    before = engine.stats()
    assert (before.waiting, before.finished, before.tokens_per_second) == (2, 0, 0) and not before.time_to_first_token
    completions = finish(engine)
    stats = engine.stats()
    assert (stats.finished, stats.generated_tokens, stats.prefix_hit_tokens) == (2, 8, 4)
    assert stats.computed_tokens == 5 + 3 + 1 + 3 and stats.steps == 8 and stats.peak_blocks == 2
    assert stats.tokens_per_second == pytest.approx(8 / stats.elapsed)
    times = [completions[i].time_to_first_token for i in (0, 1)]
    assert 0 < times[0] < times[1] and stats.time_to_first_token == pytest.approx(sum(times) / 2)


def test_documentation_examples():
    results = doctest.testmod(attn_ext.generate)
    assert results.attempted > 15 and results.failed == 0
