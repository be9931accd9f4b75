"""`attn-ext explain`: every stage of one layer, and what its heads make of a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from attn_ext_cli.common import Model, OptionalDtype, Threads, UserError, command, console, load, set_threads


@command
def explain(
    prompt: Annotated[str, typer.Argument(help='A short text, "My hobby is".')],
    model: Model = "smollm2",
    layer: Annotated[int, typer.Option(help="Which layer, from 0; negative ones count from the last.")] = 0,
    head: Annotated[int | None, typer.Option(help="Only this head. Default: all of them.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A .png or .html to write. Default: print to the terminal.")
    ] = None,
    dtype: OptionalDtype = None,
    threads: Threads = None,
) -> None:
    """Show every stage of one layer with its shape, and each head's scores, weights and value-weighted outputs."""
    if output is not None and output.suffix not in (".png", ".html"):
        raise UserError(f"--output must end in .png or .html, got {output}")
    set_threads(threads)
    from attn_ext.explain import explain as take_apart

    if output is not None and output.suffix == ".png":
        try:
            from attn_ext_cli.render_png import save_png
        except ImportError as error:
            raise UserError(f"a .png needs matplotlib: pip install 'attn_ext[plot]' ({error})") from error
    network, tokenizer = load(model, dtype)
    try:
        tokens = tokenizer.encode(prompt)
        explanation = take_apart(network, tokens, layer=layer, head=head)
    except ValueError as error:
        raise UserError(str(error)) from error
    labels = token_labels(tokenizer, tokens)

    if output is None:
        from attn_ext_cli.render_text import print_text

        print_text(explanation, labels, prompt, console())
        return
    try:
        if output.suffix == ".png":
            if not save_png(explanation, labels, prompt, output):
                print("matplotlib's font lacks some of the characters; a .html shows all of them", file=sys.stderr)
        else:
            from attn_ext_cli.render_html import MAX_CELLS, cells, save_html

            if cells(explanation) > MAX_CELLS:
                size = f"{len(tokens)} tokens of {len(explanation.heads)} heads"
                raise UserError(f"{size} are too much for a page; choose one --head, or a .png")
            save_html(explanation, labels, prompt, output)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from error
    print(f"{output}: layer {explanation.layer}, {len(explanation.heads)} of {explanation.n_heads} heads")


def token_labels(tokenizer, tokens: list[int]) -> list[str]:
    """Tokens as axis labels: spaces and line ends become visible, long ones are cut.

    A character that is spread over several tokens stands at the last of them, the others are "…".
    """
    stream, labels = tokenizer.stream(), []
    for token in tokens:
        text = stream(token)
        if not text:
            part_of_character = "\ufffd" in tokenizer.decode([token])
            text = "…" if part_of_character else tokenizer.backend.id_to_token(token)  # <|im_start|> and the like
        text = text.replace(" ", "·").replace("\n", "↵").replace("\t", "→")
        labels.append(text if len(text) <= 12 else text[:11] + "…")
    return labels
