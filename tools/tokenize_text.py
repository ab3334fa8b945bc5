"""Tokenise a text source once into packed uint16/uint32 arrays, for machines that have no text or no tokenizer.

    python tools/tokenize_text.py rfc tokens/rfc-gpt2 --tokenizer 'gpt2?split_digits=true'

writes FOLDER/train and FOLDER/heldout; "tokens:FOLDER" is then a source like any other (give the same tokenizer).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from modalities.text.corpus import tokenize_corpus
from modalities.text.sources import SPLITS, open_source
from modalities.text.tokenizers import load_tokenizer
from zoo.cli import call

app = typer.Typer(add_completion=False, help=(__doc__ or "").split("\n", maxsplit=1)[0])


@app.command()
def main(
    source: Annotated[str, typer.Argument(help="a source spec: sotu, rfc, 'corpus/*.jsonl', …")],
    folder: Annotated[Path, typer.Argument(help="where train/ and heldout/ are to be written")],
    tokenizer: Annotated[str, typer.Option(help="bytes, gpt2, gpt2:FOLDER or FILE.json, with options")] = "bytes",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check source and tokenizer, and write nothing")] = False,
) -> None:
    """Tokenise a text source once into packed arrays."""
    loaded = load_tokenizer(tokenizer)
    opened = open_source(source)
    for split in SPLITS:
        target = folder / split
        if dry_run:
            typer.echo(f"{target}: would hold the {split} split of {source} as {loaded.name} tokens")
        elif target.exists():
            typer.echo(f"{target}: there already")
        else:
            corpus = tokenize_corpus(opened, loaded, split=split)
            corpus.save(target)
            typer.echo(f"{target}: {len(corpus):,} documents, {len(corpus.tokens):,} {loaded.name} tokens")


if __name__ == "__main__":
    sys.exit(call(app, None, prog="tools/tokenize_text.py"))
