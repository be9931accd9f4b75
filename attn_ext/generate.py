"""Text from a model for many requests at once: continuous batching over the paged cache.

An `Engine` keeps a queue of requests. Every `step` is one forward pass over a mix of work: one token for each request
that is generating, and chunks of the prompts that are still being read, up to `max_batch_tokens` tokens. Requests
join and leave between steps. Blocks of prompts that begin alike are shared. When the cache runs out of blocks the
newest request gives up its own and is computed again later; the oldest one therefore always moves on and every
request ends.

What a request generates depends on its prompt, its parameters and its seed alone: not on the other requests, on how
its prompt was cut into chunks or on whether it was interrupted. Our ops give a row the same bits in any batch, and
every request draws from a random generator of its own.
"""

from __future__ import annotations

import math
import numbers
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attn_ext.kv_cache import CacheStats, PagedKVCache, StepBatch, token_ids

__all__ = ["Completion", "Engine", "EngineStats", "Event", "PagedModel", "SamplingParams", "generate", "sample"]

DEFAULT_CACHE_BYTES = 1 << 30


class PagedModel(Protocol):
    """What the engine needs of a model; `nanogpt.GPT` and `llama.Llama` are ones."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    dtype: torch.dtype
    device: torch.device

    def forward_paged(self, batch: StepBatch, cache: PagedKVCache) -> Tensor:
        """Write the K and V of the step's tokens, return the logits of its `logit_rows`: float32 (n, vocab_size)."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    max_new_tokens: at most this many tokens. temperature: 0 takes the most likely token. top_k: only the k most likely
    tokens (ties with the k-th included); a k above the vocabulary means all. top_p: only the most likely tokens that
    together reach probability p, applied after temperature and top_k. seed: of the request's own random generator; None
    draws one from torch's global generator. stop: token ids and strings that end the request; strings need a tokenizer.
    ignore_eos: do not stop at the tokenizer's end-of-text tokens, which otherwise always stop.

    A value out of range raises ValueError.

    >>> from attn_ext.generate import SamplingParams
    >>> SamplingParams(max_new_tokens=8, temperature=0.7, stop="\\n").stop
    ('\\n',)
    >>> SamplingParams(top_k=0)
    Traceback (most recent call last):
    ValueError: SamplingParams: top_k must be at least 1, or None for no limit, got 0
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: int | str | Sequence[int | str] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        def check(holds: bool, name: str, rule: str):
            if not holds:
                raise ValueError(f"SamplingParams: {name} must be {rule}, got {getattr(self, name)!r}")

        stop = (self.stop,) if isinstance(self.stop, int | str) else self.stop
        check(isinstance(stop, Iterable), "stop", "token ids and non-empty strings")
        stop = tuple(stop)
        object.__setattr__(self, "stop", stop)
        for name in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            check(isinstance(value, int) or (value is None and name != "max_new_tokens"), name, "an integer")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            check(isinstance(value, numbers.Real) or (value is None and name == "top_p"), name, "a number")
        check(self.max_new_tokens >= 1, "max_new_tokens", "at least 1")
        check(0 <= self.temperature < math.inf, "temperature", "at least 0 and finite")
        check(self.top_k is None or self.top_k >= 1, "top_k", "at least 1, or None for no limit")
        check(self.top_p is None or 0 < self.top_p <= 1, "top_p", "above 0 and at most 1, or None for no limit")
        check(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer or None")
        check(all(isinstance(s, int | str) and s != "" for s in stop), "stop", "token ids and non-empty strings")


def sample(logits: Tensor, params: SamplingParams, generator: torch.Generator | None = None) -> int:
    """One token from the logits (vocab_size) of one position.

    >>> import torch
    >>> from attn_ext.generate import SamplingParams, sample
    >>> logits = torch.tensor([0.0, 2.0, 1.0])
    >>> sample(logits, SamplingParams())
    1
    >>> sample(logits, SamplingParams(temperature=5.0, top_k=2), torch.Generator().manual_seed(0)) in (1, 2)
    True
    """
    if params.temperature == 0:
        return int(logits.argmax())
    # The maximum first: a small temperature cannot overflow. One that the dtype rounds to 0 would give 0 / 0.
    logits = (logits - logits.max()) / max(params.temperature, torch.finfo(logits.dtype).tiny)
    tokens = torch.arange(len(logits), device=logits.device)
    if params.top_k is not None:
        tokens = tokens[logits >= logits.topk(min(params.top_k, len(logits))).values[-1]]
        logits = logits[tokens]
    probabilities = logits.softmax(-1)
    if params.top_p is not None:
        # All tokens under this bound hold less than 1 - top_p together, so none of them is needed to reach top_p. That
        # is nearly all of a large vocabulary, which need not be sorted.
        likely = (probabilities >= (1 - params.top_p) / len(probabilities)).nonzero().flatten()
        descending, order = probabilities[likely].sort(descending=True, stable=True)
        reached_before = descending.cumsum(-1) - descending
        kept = likely[order[reached_before < params.top_p]]
        probabilities, tokens = probabilities[kept], tokens[kept]
    return int(tokens[_draw(probabilities, generator)])


def _most_likely(logits: Tensor) -> tuple[list[int], list[float]]:
    """The index and the value of the largest element of each row; of a NaN where there is one."""
    if logits.device.type != "cpu":
        best, tokens = logits.max(dim=-1)
        return tokens.tolist(), best.tolist()
    rows = logits.detach().numpy()  # numpy searches a vocabulary in a quarter of torch's time
    tokens = rows.argmax(axis=-1).tolist()
    return tokens, [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


def _draw(probabilities: Tensor, generator: torch.Generator | None) -> int:
    """An index, drawn by inverting the distribution: one random number, where torch.multinomial takes one for each."""
    reached = probabilities.double().cumsum(-1)
    if not reached[-1] > 0:
        raise RuntimeError(f"sample: probabilities must have a sum above 0, got {reached[-1].item()}")
    drawn = torch.rand((), dtype=torch.float64, device=reached.device, generator=generator) * reached[-1]
    return int(torch.searchsorted(reached, drawn, right=True))  # the first that is above: never one of probability 0


@dataclass(frozen=True)
class Completion:
    """A finished request."""

    request_id: int
    prompt: list[int]
    tokens: list[int]  # generated tokens, without the stop token
    text: str | None  # their text up to a stop string; None without a tokenizer
    finish_reason: str  # as in `Event`
    time_to_first_token: float | None  # seconds from submission; None when it ended before
    prefix_hit_tokens: int  # prompt tokens found in the cache when it was admitted
    preemptions: int  # times it gave up its blocks and was computed again
    error: str | None = None  # what went wrong, where the reason is "error"


class Event(NamedTuple):
    """What happened to one request in one step.

    finish_reason: None while the request goes on; "stop" (a stop token or string), "length" (max_new_tokens, or the
    model's context is full), "cache_full" (alone it fills the whole cache), "aborted" or "error" (no token could be
    drawn, as from NaN logits, or the tokenizer could not decode it; the completion says which). token is None
    when the request ended without one, which is so for a stop token. text: what this step adds to the text, "" without
    a tokenizer; text that may become part of a stop string or of a longer character is held back.
    """

    request_id: int
    token: int | None
    finish_reason: str | None = None
    text: str = ""
    completion: Completion | None = None  # the whole result, when finished


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made, and the cache now. Times are in seconds."""

    waiting: int
    running: int
    finished: int  # aborted ones included
    steps: int
    computed_tokens: int  # tokens that went through the model
    generated_tokens: int
    prefix_hit_tokens: int  # tokens that did not, because their blocks were cached
    preemptions: int
    elapsed: float  # time spent in step()
    tokens_per_second: float  # generated tokens over elapsed time
    time_to_first_token: float | None  # mean over the requests that have one
    peak_blocks: int  # most cache blocks in use at once
    cache: CacheStats


class _TextOutput:
    """The text of a growing request, cut at the first stop string."""

    def __init__(self, decoder, stops: Sequence[str]):
        self._decoder, self._stops = decoder, stops
        self._held = ""  # decoded, but it may be the beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        return self._release(self._decoder(token), final=False)

    def finish(self) -> str:
        return "" if self.stopped else self._release(self._decoder.finish(), final=True)

    def _release(self, text: str, final: bool) -> str:
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self.stopped = bool(found)
        if found:
            end = min(found)
        elif final:
            end = len(text)
        else:
            end = len(text) - max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[end:]
        return text[:end]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(eq=False, slots=True)
class _Request:
    id: int
    prompt: list[int]
    params: SamplingParams
    limit: int  # prompt and generated tokens together end here ...
    limit_reason: str  # ... for this reason
    stop_tokens: frozenset[int]
    output: _TextOutput | None
    generator: torch.Generator | None
    submitted: float
    tokens: list[int] = field(default_factory=list)  # prompt and generated
    text: list[str] = field(default_factory=list)
    sequence: int | None = None  # in the cache, while running
    time_to_first_token: float | None = None
    prefix_hit_tokens: int | None = None
    preemptions: int = 0


class Engine:
    """Generates for many requests at once over one paged cache.

    Args:
        model: a `PagedModel`.
        num_blocks or cache_bytes: size of the cache, in blocks of block_size tokens or in bytes. Neither: 1 GiB, or
            less where max_seqs requests of the model's full context need less.
        max_batch_tokens: tokens of one step, which bounds how long a step takes; a longer prompt is read in chunks.
        max_seqs: requests that run at once; others wait.
        prefix_cache: reuse the blocks of prompts that begin alike.
        pack: reorder the weights in place for the CPU kernels (`model.pack_weights()`, where it has that): faster,
            the same results; `model.unpack_weights()` puts them back.
        tokenizer: `attn_ext.tokenizer.Tokenizer` or anything with its encode, stream and eos_ids. With one, prompts
            may be strings, events carry text, and stop strings and end-of-text tokens work.

    Not safe for use from several threads at once.

    >>> import torch
    >>> from attn_ext.generate import Engine, SamplingParams
    >>> from attn_ext.nanogpt import GPT, GPTConfig
    >>> _ = torch.manual_seed(0)
    >>> model = GPT(GPTConfig(block_size=32, vocab_size=11, n_layer=1, n_head=1, n_embd=8)).eval()
    >>> engine = Engine(model, num_blocks=8, block_size=4)
    >>> a = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=2))
    >>> b = engine.submit([4], SamplingParams(max_new_tokens=1))
    >>> [(event.request_id, event.finish_reason) for event in engine.stream()]
    [(0, None), (1, 'length'), (0, 'length')]
    >>> engine.stats().cache.used
    0
    """

    def __init__(
        self, model: PagedModel, *, num_blocks: int | None = None, cache_bytes: int | None = None, block_size: int = 16,
        max_batch_tokens: int = 512, max_seqs: int = 64, prefix_cache: bool = True, pack: bool = True, tokenizer=None,
    ):  # fmt: skip
        for name, value in (("max_batch_tokens", max_batch_tokens), ("max_seqs", max_seqs), ("block_size", block_size)):
            if not hasattr(value, "__index__") or value < 1:
                raise ValueError(f"Engine: {name} must be an integer of at least 1, got {value!r}")
        if num_blocks is None:
            shape = (model.n_layers, model.n_kv_heads, model.head_dim)
            block_nbytes = PagedKVCache.block_nbytes(*shape, block_size, model.dtype)
            if cache_bytes is None:
                enough = max_seqs * math.ceil(model.max_seq_len / block_size)
                num_blocks = max(1, min(enough, DEFAULT_CACHE_BYTES // block_nbytes))
            elif cache_bytes < block_nbytes:
                raise ValueError(f"Engine: cache_bytes must hold a block of {block_nbytes} bytes, got {cache_bytes}")
            else:
                num_blocks = cache_bytes // block_nbytes
        elif cache_bytes is not None:
            raise ValueError("Engine: num_blocks and cache_bytes exclude each other, got both")
        self.model, self.tokenizer = model, tokenizer
        self.max_batch_tokens, self.max_seqs = max_batch_tokens, max_seqs
        self.cache = PagedKVCache(
            model.n_layers, model.n_kv_heads, model.head_dim, num_blocks=num_blocks, block_size=block_size,
            dtype=model.dtype, device=model.device, prefix_cache=prefix_cache,
        )  # fmt: skip
        if pack and hasattr(model, "pack_weights"):
            model.pack_weights()
        self._requests: dict[int, _Request] = {}  # all that are not finished
        # Both in order of submission, and all that runs is older than all that waits.
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._events: deque[Event] = deque()  # what happened and nobody has been told of yet
        self._next_id = self._steps = self._finished = self._preemptions = self._peak_blocks = 0
        self._computed = self._generated = self._prefix_hits = 0
        self._elapsed, self._first_tokens, self._first_token_time = 0.0, 0, 0.0

    # ------------------------------------------------------------------------------------------------- requests

    def submit(self, prompt: str | Iterable[int], params: SamplingParams | None = None) -> int:
        """Queue a request -> its id. Raises ValueError where it can never run; an accepted one always ends."""
        params = SamplingParams() if params is None else params
        prompt = self._encode(prompt)
        request = _Request(
            self._next_id, prompt, params, *self._limit(prompt, params), *self._stops(params),
            generator=self._generator(params), submitted=time.perf_counter(), tokens=list(prompt),
        )  # fmt: skip
        self._next_id += 1
        self._requests[request.id] = request
        self._waiting.append(request)
        return request.id

    def _encode(self, prompt: str | Iterable[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("Engine.submit: prompt must be token ids where there is no tokenizer, got a string")
            prompt = self.tokenizer.encode(prompt)
        prompt = token_ids("Engine.submit: prompt tokens", prompt)
        if not prompt:
            raise ValueError("Engine.submit: prompt must have at least one token, got none")
        if min(prompt) < 0 or max(prompt) >= self.model.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < self.model.vocab_size)
            raise ValueError(f"Engine.submit: prompt tokens must be below {self.model.vocab_size}, got {wrong}")
        return prompt

    def _limit(self, prompt: list[int], params: SamplingParams) -> tuple[int, str]:
        n, context = len(prompt), self.model.max_seq_len
        blocks, block_size = self.cache.num_blocks, self.cache.block_size
        if n + 1 > context:
            raise ValueError(
                f"Engine.submit: prompt must leave room for a token in the model's context of {context}, got {n} tokens"
            )
        if n + 1 > blocks * block_size:
            raise ValueError(
                f"Engine.submit: prompt must leave room for a token in the cache of {blocks} blocks of {block_size}, "
                f"got {n} tokens"
            )
        limits = (n + params.max_new_tokens, "length"), (context, "length"), (blocks * block_size, "cache_full")
        return min(limits, key=lambda limit: limit[0])

    def _stops(self, params: SamplingParams) -> tuple[frozenset[int], _TextOutput | None]:
        tokens = {stop for stop in params.stop if isinstance(stop, int)}
        strings = [stop for stop in params.stop if isinstance(stop, str)]
        for token in tokens:
            if not 0 <= token < self.model.vocab_size:
                raise ValueError(f"Engine.submit: stop tokens must be below {self.model.vocab_size}, got {token}")
        if self.tokenizer is None:
            if strings:
                raise ValueError(f"Engine.submit: stop strings need a tokenizer, got {strings[0]!r}")
            return frozenset(tokens), None
        if not params.ignore_eos:
            tokens.update(self.tokenizer.eos_ids)
        return frozenset(tokens), _TextOutput(self.tokenizer.stream(), strings)

    @staticmethod
    def _generator(params: SamplingParams) -> torch.Generator | None:
        if params.temperature == 0:
            return None
        seed = int(torch.randint(2**63 - 1, (), device="cpu")) if params.seed is None else params.seed
        return torch.Generator().manual_seed(seed)

    def abort(self, request_id: int) -> bool:
        """End a request now and free its blocks; the next step reports it. False when it had already ended."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, None, "aborted")
        return True

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._requests or self._events)

    # ---------------------------------------------------------------------------------------------------- steps

    def step(self) -> list[Event]:
        """One forward pass -> what happened, one event per request that got a token or ended.

        Where the model raises, no request has advanced and the step can be taken again. A request whose token cannot
        be drawn or decoded ends with the reason "error"; the others go on.
        """
        self._advance()
        events = list(self._events)
        self._events.clear()
        return events

    def stream(self) -> Iterator[Event]:
        """Steps until nothing is left to do, event by event. Requests may be submitted and aborted meanwhile.

        Where the loop is left early, `step`, `stream` or `run` go on with the next event.
        """
        while self.has_work:
            if not self._events:
                self._advance()
            while self._events:
                yield self._events.popleft()

    def run(self) -> dict[int, Completion]:
        """Steps until nothing is left to do -> the completion of every request that ended, by id.

        Where a step raises, the events so far stay with the engine, for the next call.
        """
        while self._requests:
            self._advance()
        return {event.request_id: event.completion for event in self.step() if event.completion is not None}

    def _advance(self) -> None:
        started = time.perf_counter()
        if plan := self._schedule():
            self._forward(plan)
        self._elapsed += time.perf_counter() - started

    def _missing(self, request: _Request) -> int:
        """Tokens of the request that are not computed yet: 1 when it is generating, more when it reads its prompt."""
        return len(request.tokens) - self.cache.length(request.sequence)

    def _schedule(self) -> dict[_Request, int]:
        """Which requests take part in this step, with how many tokens each. What it plans fits the cache."""
        plan, budget = {}, self.max_batch_tokens
        # The oldest first. Only the newest can still be reading its prompt, since the next one starts when there is
        # budget left, so a long prompt never keeps the others from generating.
        for request in self._running:
            if budget == 0:
                break
            plan[request] = min(self._missing(request), budget)
            budget -= plan[request]
        self._make_room(plan)
        self._admit(plan, budget)
        return plan

    def _make_room(self, plan: dict[_Request, int]) -> None:
        """Preempt the newest requests until the plan fits.

        The oldest is never preempted: alone it always fits, as `submit` has made sure.
        """
        while self._blocks_needed(plan) > self.cache.allocator.num_available:
            plan.pop(self._preempt_newest(), None)

    def _preempt_newest(self) -> _Request:
        """The newest running request gives up its blocks and waits to be computed again, its generated tokens too."""
        request = self._running.pop()
        self.cache.free(request.sequence)
        request.sequence = None
        request.preemptions += 1
        self._preemptions += 1
        self._waiting.appendleft(request)
        return request

    def _blocks_needed(self, plan: dict[_Request, int]) -> int:
        return sum(self.cache.blocks_needed(request.sequence, n) for request, n in plan.items())

    def _admit(self, plan: dict[_Request, int], budget: int) -> None:
        """Start waiting requests, in order, while everything that runs could get all its tokens and one more.

        The one more is so that a request is not started to be preempted in the next step.
        """
        while self._waiting and budget > 0 and len(self._running) < self.max_seqs:
            request = self._waiting[0]
            request.sequence = self.cache.add_sequence(request.tokens)
            wanted = {r: self._missing(r) + 1 for r in [*self._running, request]}
            if self._blocks_needed(wanted) > self.cache.allocator.num_available:
                self.cache.free(request.sequence)
                request.sequence = None
                break
            hits = self.cache.length(request.sequence)
            self._prefix_hits += hits
            if request.prefix_hit_tokens is None:
                request.prefix_hit_tokens = hits
            self._running.append(self._waiting.popleft())
            plan[request] = min(self._missing(request), budget)
            budget -= plan[request]

    def _forward(self, plan: dict[_Request, int]) -> None:
        chunks, complete = [], []
        for request, n in plan.items():
            start = self.cache.length(request.sequence)
            chunks.append((request.sequence, request.tokens[start : start + n]))
            complete.append(start + n == len(request.tokens))  # its next token can be sampled
        batch = self.cache.prepare(chunks, logits=complete)
        self._peak_blocks = max(self._peak_blocks, self.cache.allocator.num_used)
        with torch.inference_mode():
            logits = self.model.forward_paged(batch, self.cache)
        sampling = [request for request, done in zip(plan, complete, strict=True) if done]
        tokens = self._sample(sampling, logits)
        self.cache.commit(batch)
        self._steps += 1
        self._computed += len(batch.tokens)
        for request, token in zip(sampling, tokens, strict=True):
            self._accept(request, token)

    @staticmethod
    def _sample(requests: list[_Request], logits: Tensor) -> list[int | Exception]:
        """The next token of each request, or why it has none."""
        if not requests:
            return []
        tokens, best = _most_likely(logits)
        for row, request in enumerate(requests):
            try:
                if not math.isfinite(best[row]):
                    raise RuntimeError("the model's logits are not finite")
                if request.params.temperature > 0:
                    tokens[row] = sample(logits[row].cpu(), request.params, request.generator)
            except Exception as error:  # of this request: the others have their tokens
                tokens[row] = error
        return tokens

    def _accept(self, request: _Request, token: int | Exception) -> None:
        if isinstance(token, Exception):
            return self._finish(request, None, "error", error=token)
        if request.time_to_first_token is None:
            request.time_to_first_token = time.perf_counter() - request.submitted
            self._first_tokens += 1
            self._first_token_time += request.time_to_first_token
        if token in request.stop_tokens:
            return self._finish(request, None, "stop")
        text = ""
        if request.output is not None:
            try:
                text = request.output.push(token)
            except Exception as error:  # of the tokenizer
                return self._finish(request, None, "error", error=error)
            request.text.append(text)
        request.tokens.append(token)
        self._generated += 1
        if request.output is not None and request.output.stopped:
            return self._finish(request, token, "stop", text)
        if len(request.tokens) >= request.limit:
            return self._finish(request, token, request.limit_reason, text)
        self._events.append(Event(request.id, token, None, text))

    def _finish(
        self, request: _Request, token: int | None, reason: str, text: str = "", error: Exception | None = None
    ) -> None:
        if request.output is not None and error is None:
            try:
                rest = request.output.finish()
                request.text.append(rest)
                text += rest
            except Exception as failure:  # of the tokenizer
                reason, error = "error", failure
        if request.sequence is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self.cache.free(request.sequence)
        del self._requests[request.id]
        self._finished += 1
        completion = Completion(
            request.id, request.prompt, request.tokens[len(request.prompt) :],
            "".join(request.text) if request.output is not None else None, reason,
            request.time_to_first_token, request.prefix_hit_tokens or 0, request.preemptions,
            None if error is None else f"{type(error).__name__}: {error}",
        )  # fmt: skip
        self._events.append(Event(request.id, token, reason, text, completion))

    # ----------------------------------------------------------------------------------------------- statistics

    def stats(self) -> EngineStats:
        """Counts since the engine was made, and the cache now."""
        return EngineStats(
            waiting=len(self._waiting),
            running=len(self._running),
            finished=self._finished,
            steps=self._steps,
            computed_tokens=self._computed,
            generated_tokens=self._generated,
            prefix_hit_tokens=self._prefix_hits,
            preemptions=self._preemptions,
            elapsed=self._elapsed,
            tokens_per_second=self._generated / self._elapsed if self._elapsed else 0.0,
            time_to_first_token=self._first_token_time / self._first_tokens if self._first_tokens else None,
            peak_blocks=self._peak_blocks,
            cache=self.cache.stats(),
        )


def generate(
    model: PagedModel, prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None, *, tokenizer=None, **engine_options,
) -> list[Completion]:  # fmt: skip
    """Complete every prompt -> completions in the same order.

    params: one for all prompts, or one for each. engine_options: as for `Engine`. Equal seeds give equal draws, so
    prompts that share one `SamplingParams` with a seed share their random numbers too.

    >>> import torch
    >>> from attn_ext.generate import SamplingParams, generate
    >>> from attn_ext.nanogpt import GPT, GPTConfig
    >>> _ = torch.manual_seed(0)
    >>> model = GPT(GPTConfig(block_size=32, vocab_size=11, n_layer=1, n_head=1, n_embd=8)).eval()
    >>> completions = generate(model, [[1, 2, 3], [4]], SamplingParams(max_new_tokens=5))
    >>> [len(completion.tokens) for completion in completions]
    [5, 5]
    """
    if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
        raise ValueError("generate: prompts must be a list of prompts, got a single one")
    each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise ValueError(f"generate: params must be one for all or one per prompt ({len(prompts)}), got {len(each)}")
    engine = Engine(model, tokenizer=tokenizer, **engine_options)
    ids = [engine.submit(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
    completions = engine.run()
    return [completions[request_id] for request_id in ids]
