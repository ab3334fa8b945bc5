"""Train a byte-level BPE vocabulary on the training split of one or more text sources.

    python tools/train_tokenizer.py modalities/text/assets/bpe-1k.json sotu-excerpt --entries 1024

Every byte has an entry, so any text can be encoded and comes back as it was. Each digit is a token of its own, no space
is added in front, and BOS, EOS and PAD (ids 0, 1, 2) are never read out of text. The same sources give the same file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from modalities.text.sources import document_split, open_source
from modalities.text.tokenizers import load_tokenizer
from zoo.cli import call
from zoo.files import write_text

SPECIAL = ("<|startoftext|>", "<|endoftext|>", "<|pad|>")
LEAST_ENTRIES = 256 + len(SPECIAL)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def train(texts: Iterator[str], entries: int) -> str:
    """The JSON of a byte-level BPE with `entries` entries, trained on texts. ValueError where they give fewer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (found := tokenizer.get_vocab_size()) != entries:
        raise ValueError(
            f"{entries} entries asked for, and the text gives {found}; give more text or --entries {found}"
        )
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = []  # in the vocabulary they stay; "<|endoftext|>" written in a text is only text
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"


def training_texts(sources: Sequence[str]) -> Iterator[str]:
    """The texts of the sources' training documents; held-out ones do not shape the vocabulary."""
    for source in sources:
        yield from (p for d in open_source(source) if document_split(d) == "train" for p in d.pieces())


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="the .json file to write")],
    sources: Annotated[list[str], typer.Argument(help="source specs: sotu-excerpt, english, 'corpus/*.jsonl', …")],
    entries: Annotated[int, typer.Option(help=f"size of the vocabulary, at least {LEAST_ENTRIES}")] = 4096,
) -> None:
    """Train a byte-level BPE vocabulary on text sources."""
    if entries < LEAST_ENTRIES:
        raise ValueError(f"--entries {entries}: at least {LEAST_ENTRIES} (256 bytes, {', '.join(SPECIAL)})")
    if out.suffix != ".json":
        raise ValueError(f"{out}: a tokenizer's file ends in .json")
    content = train(training_texts(sources), entries)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, content)
    typer.echo(f"{out}: {load_tokenizer(str(out)).vocab_size:,} entries, {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    raise SystemExit(call(app, prog="train_tokenizer.py"))
