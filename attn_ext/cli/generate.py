"""`attn-ext generate`: text from a model, streamed; or many prompts at once through the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attn_ext.cli.common import Model, OptionalDtype, Threads, UserError, command, console, load, prepare

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
    threads: Threads = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Only the text: no summary, no progress.")] = False,
) -> None:
    """Answer a prompt (or continue it with --no-chat), token by token. A summary follows on stderr."""
    prompts = _prompts(prompt, prompts_file)
    prepare(threads)
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
            tokenizer=tokenizer,
        )  # fmt: skip
        for text in prompts:
            engine.submit(encode(text), params)
    except (ValueError, RuntimeError) as error:  # a prompt too long, no memory for the cache
        raise UserError(str(error)) from error

    usage = _PeakUsage(engine)
    try:
        if prompts_file is not None:
            _run_all(engine, prompts, usage, progress=not quiet)
        else:
            _run_one(engine, "" if chat else prompts[0], usage)
    finally:  # after Ctrl-C too
        if not quiet:
            _print_summary(engine, usage)


def _prompts(prompt: str | None, prompts_file: Path | None) -> list[str]:
    if (prompt is None) == (prompts_file is None):
        raise UserError("give either a prompt or --prompts-file" + ("" if prompt is None else ", not both"))
    if prompt is not None:
        text = sys.stdin.read() if prompt == "-" else prompt
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


def _chat(tokenizer, system: str, text: str) -> list[int]:
    user = {"role": "user", "content": text}
    try:
        # An empty system message, too, is said: templates tend to put words of their own where there is none.
        return tokenizer.chat([{"role": "system", "content": system}, user])
    except ValueError:
        if system:
            raise
        return tokenizer.chat([user])  # a template that knows no system messages


class _PeakUsage:
    """Steps the engine and remembers how the cache was used when it was fullest."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.peak: CacheStats = engine.cache.stats()

    def step(self) -> list[Event]:
        events = self.engine.step()
        now = self.engine.cache.stats()
        if now.used > self.peak.used:
            self.peak = now
        return events


def _run_one(engine: Engine, shown_first: str, usage: _PeakUsage) -> None:
    write: Callable[[str], object] = sys.stdout.write
    write(shown_first)
    try:
        while engine.has_work:
            for event in usage.step():
                write(event.text)
            sys.stdout.flush()
    finally:
        write("\n")
        sys.stdout.flush()


def _run_all(engine: Engine, prompts: list[str], usage: _PeakUsage, progress: bool) -> None:
    """Answers are printed in the order of the prompts, each as soon as it and those before it are done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    done: dict[int, Completion] = {}
    printed = 0
    columns = TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    err = console(stderr=True)
    # A bar shares the terminal with the answers, or leaves stdout alone where that is a file.
    bar = Progress(*columns, console=err, transient=True, redirect_stdout=sys.stdout.isatty(),
                   disable=not (progress and err.is_terminal))  # fmt: skip
    with bar:
        task = bar.add_task("", total=len(prompts))
        while engine.has_work:
            for event in usage.step():
                if event.completion is not None:
                    done[event.request_id] = event.completion
            while printed in done:
                text = done[printed].text.strip()
                print(f"{'' if printed == 0 else chr(10)}> {prompts[printed]}\n{text}", flush=True)
                printed += 1
            stats = engine.stats()
            queue = f"{stats.running} running, {stats.waiting} waiting"
            rate = f"{stats.tokens_per_second:.1f} tokens/s"
            blocks = f"{stats.cache.used} of {stats.cache.num_blocks} blocks"
            bar.update(task, completed=len(done), description=f"{queue}, {rate}, {blocks}")


def _print_summary(engine: Engine, usage: _PeakUsage) -> None:
    stats, peak = engine.stats(), usage.peak
    first = stats.time_to_first_token
    parts = [
        f"{stats.generated_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s",
        "no token yet"
        if first is None
        else f"first token after {first:.2f} s" + (" (mean)" if stats.finished > 1 else ""),
    ]
    slots = peak.used * peak.block_size
    cache = [
        f"{stats.peak_blocks} of {peak.num_blocks} blocks used at most",
        f"{peak.shared} shared",
        f"{peak.wasted_slots} of {slots} slots wasted" + (f" ({peak.wasted_slots / slots:.0%})" if slots else ""),
        f"{stats.prefix_hit_tokens} prompt tokens reused",
        f"{stats.preemptions} preemptions",
    ]
    console(stderr=True).print(
        f"\n{', '.join(parts)}\nKV cache: {', '.join(cache)}", style="dim", markup=False, soft_wrap=True
    )
