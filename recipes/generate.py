"""Continue a text with a language model, or a sequence of bases with a model of DNA.

    priorzoo generate text_rope_lm.english "The people of the United States"
    priorzoo generate RUN_DIR - --temperature 0 < prompt.txt
    priorzoo generate dna_goat_tiny.genomes ACGTACGT --max-new-tokens 60

The model is a name with weights, a run folder or a saved model's folder. What follows the prompt is
printed as it is written; the prompt itself is not. The same seed writes the same text. Exit codes:
0 done, 2 the request cannot be served as written, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import typer

from modalities.contract import Writer
from recipes.commands import CommandError, call
from recipes.models import installed_modalities, load_trained
from zoo.console import Import


def generate_command(
    name: Annotated[str, typer.Argument(metavar="MODEL|RUN_DIR", help="one that has weights")],
    prompt: Annotated[
        str, typer.Argument(help='"-" reads it from standard input, without its last line break')
    ] = "",
    *,
    max_new_tokens: Annotated[int, typer.Option(help="largest number of tokens to write")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="sample among the k likeliest tokens")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="sample among the likeliest tokens that reach this probability"),
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    import_: Import = [],  # noqa: B006
) -> int:
    named, model = load_trained(name, device, import_)
    if not isinstance(model, Writer):
        writers = [m.name for m in installed_modalities() if issubclass(m.model, Writer)]
        raise CommandError(f"{named.label} continues no text; models of {' and '.join(writers)} do")
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    pieces = model.stream_text(
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        return 130
    return 0


main = partial(call, generate_command, prog="priorzoo generate")
