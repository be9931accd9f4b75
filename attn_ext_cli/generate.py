"""`attn-ext generate`: text from a model, streamed; or many prompts at once through the engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attn_ext_cli.common import Model, OptionalDtype, Threads, UserError, command, console, load, set_threads

if TYPE_CHECKING:
    from attn_ext.generate import Completion, Engine, Event
    from attn_ext.kv_cache import CacheStats


@command
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to answer or continue; - reads it from stdin.")] = None,
    model: Model = "smollm2",
    prompts_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answer every line of this file, all at once.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens", help="At most so many, each prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token every time.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the most likely tokens of mass p.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. May be given several times.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat", help="Ask for an answer, or continue the text. Default: chat if the model can."
        ),
    ] = None,
    system: Annotated[str, typer.Option(help="The system message of a chat.")] = "",
    dtype: OptionalDtype = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the KV cache. Default: up to 1 GiB of them.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block of the KV cache.")] = 16,
    max_batch_tokens: Annotated[int, typer.Option(help="Tokens in one step, over all prompts.")] = 512,
    pack: Annotated[
        bool, typer.Option("--pack/--no-pack", help="Reorder the weights for this CPU first: same text, sooner.")
    ] = True,
    threads: Threads = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Only the text: no summary, no progress.")] = False,
) -> None:
    """Answer a prompt (or continue it with --no-chat), token by token. A summary follows on stderr."""
    prompts = _prompts(prompt, prompts_file)
    set_threads(threads)
    from attn_ext.generate import Engine, SamplingParams

    try:
        params = SamplingParams(max_new_tokens, temperature, top_k, top_p, seed, stop or ())
    except ValueError as error:
        raise UserError(str(error)) from error
    network, tokenizer = load(model, dtype)
    if chat is None:
        chat = tokenizer.chat_template is not None
    encode = (lambda text: _chat(tokenizer, system, text)) if chat else tokenizer.encode
    try:
        engine = Engine(
            network, num_blocks=num_blocks, block_size=block_size, max_batch_tokens=max_batch_tokens,
            tokenizer=tokenizer, pack=pack,
        )  # fmt: skip
        for text in prompts:
            engine.submit(encode(text), params)
    except (ValueError, RuntimeError) as error:  # a prompt too long, no memory for the cache
        raise UserError(str(error)) from error

    run = _Run(engine)
    try:
        if prompts_file is not None:
            _run_all(run, prompts, progress=not quiet)
        else:
            _run_one(run, "" if chat else prompts[0])
    finally:  # after Ctrl-C too
        if not quiet:
            _print_summary(run)
    failed = [completion.error for completion in run.done.values() if completion.finish_reason == "error"]
    if failed:
        which = "" if len(prompts) == 1 else f"{len(failed)} of {len(prompts)} prompts failed, the first: "
        raise UserError(f"{which}{failed[0]}")


def _prompts(prompt: str | None, prompts_file: Path | None) -> list[str]:
    if (prompt is None) == (prompts_file is None):
        raise UserError("give either a prompt or --prompts-file" + ("" if prompt is None else ", not both"))
    if prompt is not None:
        text = _stdin() if prompt == "-" else prompt
        if not text.strip():
            raise UserError("the prompt is empty")
        return [text]
    try:
        lines = prompts_file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"--prompts-file {prompts_file}: {reason}") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"--prompts-file {prompts_file}: no prompt in it (one a line)")
    return prompts


def _stdin() -> str:
    if sys.stdin is None:
        raise UserError("the prompt: the standard input is closed")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError("the prompt: the standard input is not UTF-8 text") from error


def _chat(tokenizer, system: str, text: str) -> list[int]:
    user = {"role": "user", "content": text}
    try:
        # An empty system message, too, is said: templates tend to put words of their own where there is none.
        return tokenizer.chat([{"role": "system", "content": system}, user])
    except ValueError:
        if system:
            raise
        return tokenizer.chat([user])  # a template that knows no system messages


class _Run:
    """Steps the engine, and remembers how the cache was used when it was fullest and how each request ended."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.peak: CacheStats = engine.cache.stats()
        self.done: dict[int, Completion] = {}

    def step(self) -> list[Event]:
        events = self.engine.step()
        self.done |= {event.request_id: event.completion for event in events if event.completion is not None}
        now = self.engine.cache.stats()
        if now.used > self.peak.used:
            self.peak = now
        return events


def _run_one(run: _Run, shown_first: str) -> None:
    sys.stdout.write(shown_first)
    try:
        while run.engine.has_work:
            sys.stdout.write("".join(event.text for event in run.step()))
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def _run_all(run: _Run, prompts: list[str], progress: bool) -> None:
    """Answers are printed in the order of the prompts, each as soon as it and those before it are done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    err = console(stderr=True)
    # The bar shares a terminal with the answers, but must not draw them to itself where stdout is a file.
    bar = Progress(
        *columns, console=err, transient=True, redirect_stdout=sys.stdout.isatty(),
        disable=not (progress and err.is_terminal),
    )  # fmt: skip
    printed = 0
    with bar:
        task = bar.add_task("", total=len(prompts))
        while run.engine.has_work:
            run.step()
            while printed in run.done:
                separator = "" if printed == 0 else "\n"
                print(f"{separator}> {prompts[printed]}\n{run.done[printed].text.strip()}", flush=True)
                printed += 1
            stats = run.engine.stats()
            queue = f"{stats.running} running, {stats.waiting} waiting"
            blocks = f"{stats.cache.used} of {stats.cache.num_blocks} blocks"
            bar.update(
                task, completed=len(run.done), description=f"{queue}, {stats.tokens_per_second:.1f} tokens/s, {blocks}"
            )


def _print_summary(run: _Run) -> None:
    stats, peak = run.engine.stats(), run.peak
    tokens = [f"{_count(stats.generated_tokens, 'token')}, {stats.tokens_per_second:.1f} tokens/s"]
    if stats.time_to_first_token is not None:
        mean = " on average" if len(run.done) > 1 else ""
        tokens.append(f"first token after {stats.time_to_first_token:.2f} s{mean}")
    for reason, words in (("length", "at the length limit"), ("cache_full", "because the cache is full")):
        if n := sum(completion.finish_reason == reason for completion in run.done.values()):
            tokens.append(f"{'' if len(run.done) == 1 else f'{n} '}ended {words}")
    cache = [f"at most {stats.peak_blocks} of {_count(peak.num_blocks, 'block')} used"]
    if peak.used:  # (a request that ends in its first step is never seen in the cache)
        slots = peak.used * peak.block_size
        cache.append(
            f"{peak.shared} shared, {peak.wasted_slots} of {slots} slots wasted ({peak.wasted_slots / slots:.0%})"
        )
    cache.append(f"{_count(stats.prefix_hit_tokens, 'prompt token')} reused")
    cache.append(_count(stats.preemptions, "preemption"))
    console(stderr=True).print(
        f"\n{', '.join(tokens)}\nKV cache: {', '.join(cache)}", style="dim", markup=False, soft_wrap=True
    )


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}{'' if n == 1 else 's'}"
