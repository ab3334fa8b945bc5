"""Write a model's features of images, texts or sequences of bases: one vector each.

    python recipes/embed.py vision_goat_ssmax_tiny_patch8.glyphs a.png b.png --out features.npy
    python recipes/embed.py text_ggd_tiny.facts "The people" "The Congress" --pool last --out features.safetensors
    python recipes/embed.py dna_goat_tiny.genomes - --out features.npy < sequences.txt
    python recipes/embed.py dna_goat_tiny.genomes genome.fa --regions genes.bed --out features.safetensors

The model is a name with weights, a run folder or a saved model's folder. An image's features are what its classifier reads:
the class token or the mean of the patches. Those of a text or of bases are the mean over its tokens after the last norm, or
with `--pool last` those of the last token, which has seen all others. Rows are in the order of the inputs: (inputs, C) float32.
A sequence file (FASTA, GenBank) is an input for each of its records, or for each row of the BED file --regions.
`.safetensors` also has the names of the inputs, as JSON in its metadata.
Exit codes: 0 done, 2 the request cannot be served as written.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in recipes/train.py; read when torch is loaded

import numpy as np
import torch
import typer
from safetensors.torch import save_file

from modalities.contract import Collector, Embedder
from recipes.commands import CommandError, call
from recipes.console import Console, facts_table
from recipes.targets import find_trained
from zoo.cli import Import
from zoo.files import replacing_path

FORMATS = (".npy", ".safetensors")


def embed_command(
    name: Annotated[str, typer.Argument(metavar="MODEL|RUN_DIR", help="one that has weights")],
    inputs: Annotated[
        list[str], typer.Argument(metavar="IMAGE|TEXT|BASES|FASTA…", help='"-" reads one a line from standard input')
    ],
    *,
    out: Annotated[Path, typer.Option(help=f"file that ends in {' or '.join(FORMATS)}")] = Path("features.npy"),
    regions: Annotated[str | None, typer.Option(metavar="BED", help="of sequence files, what to read of them")] = None,
    pool: Annotated[
        str | None, typer.Option(help="of texts and bases mean or last, of images avg or token; default: see above")
    ] = None,
    size: Annotated[int | None, typer.Option(min=1, help="side of images in pixels; default: as trained")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    import_: Import = [],  # noqa: B006
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would run, and write nothing")] = False,
) -> None:
    if out.suffix not in FORMATS:
        raise CommandError(f"--out {out}: expected a file that ends in {' or '.join(FORMATS)}")
    target = find_trained(name, device, import_)
    model, console = target.model, Console()
    if not isinstance(model, Embedder):
        raise CommandError(f"{target.label} reads nothing that a command line can name")
    words = sys.stdin.read().splitlines() if inputs == ["-"] else inputs
    if not words:
        raise CommandError("standard input has no line")
    if regions is not None and not isinstance(model, Collector):
        raise CommandError(f"--regions {regions}: {target.label} reads no sequence files")
    names, features = [], []
    for word in words:
        try:
            collected = model.collect(word, regions=regions) if isinstance(model, Collector) else [(word, word)]
            for label, one in collected:
                names.append(label)
                if not dry_run:
                    features.append(model.represent(one, pool=pool, size=size).cpu())
        except ValueError as error:
            raise CommandError(f"input {word[:40]!r}: {error}") from error
    if dry_run:
        facts = {"inputs": f"{len(names):,}", "features of each": f"{target.model.config.dim:,}"}
        facts |= {"pool": pool or "default", "device": device, "would write": str(out)}
        console.print(facts_table(f"{target.label} (dry run)", facts))
        return
    rows = torch.stack(features)
    with replacing_path(out) as file:
        if out.suffix == ".npy":
            np.save(file, rows.numpy())
        else:
            save_file({"features": rows}, file, metadata={"model": name, "inputs": json.dumps(names)})
    console.print(f"written: {out}, {rows.shape[0]} × {rows.shape[1]}", soft_wrap=True)


def main(argv: Sequence[str] | None = None, *, prog: str = "recipes/embed.py") -> int:
    return call(embed_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
