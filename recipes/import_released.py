"""Make a saved model of a checkpoint that a paper's authors trained; it has the same logits.

    python recipes/import_released.py bam logs/l12/bam_ssmax/version_00/model.pt --out models/bam
    python recipes/import_released.py bam rotary.safetensors --method rotary --heads 16 --context 512 --out models/rotary
    python recipes/import_released.py cable model_19072.pt --context 1024 --out models/cable

The folder is a model for evaluate.py and generate.py. Of bam an args.json beside the file, as its training writes it, says what
the options say. No code from a file is run: a file that needs it is refused. Exit codes: 0 done, 2 the request cannot be served
as written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in recipes/train.py; read when torch is loaded

import typer

from modalities.text.released import BAM_METHODS, FAMILIES, import_released
from recipes.commands import call


def import_command(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help=" or ".join(FAMILIES))],
    file: Annotated[Path, typer.Argument(metavar="FILE", help=".safetensors, or a file of torch")],
    *,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="of the saved model")],
    method: Annotated[str | None, typer.Option(help=f"of bam: {', '.join(BAM_METHODS)}")] = None,
    heads: Annotated[int | None, typer.Option(help="where the file does not say")] = None,
    context: Annotated[int | None, typer.Option(help="tokens of a training row, where the file does not say")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="default: Mistral v0.3's of bam, GPT-2's of cable")] = None,
) -> int:
    model = import_released(family, file, method=method, heads=heads, context=context, tokenizer=tokenizer)
    model.save_pretrained(out)
    config, size = model.config, sum(p.numel() for p in model.parameters())
    name = f"{config.position}{'_ssmax' if config.ssmax else ''}"
    print(
        f"{out}: {name}, {size:,} parameters, trained at {config.train_context:,} tokens, tokenizer {config.tokenizer}"
    )
    return 0


def main(argv: Sequence[str] | None = None, *, prog: str = "recipes/import_released.py") -> int:
    return call(import_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
