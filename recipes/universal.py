"""Convert a checkpoint to DeepSpeed's universal form, which loads at any number of ranks: python -m recipes.universal FROM TO

The folder TO appears whole, with the digests of its files. No code from a file is run.
"""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path

from recipes.checkpoints import COMPLETE, checkpoint_facts, data_only, seal
from recipes.config import ConfigError
from zoo.files import file_digests, sync, sync_tree, write_json


def convert(source: Path, universal: Path) -> None:
    """Write `source` as `universal`, replacing what is there. ConfigError where it cannot be read."""
    from deepspeed.checkpoint import ds_to_universal

    partial = universal.with_name(universal.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    made = partial / universal.name  # DeepSpeed also writes a pointer beside it
    made.mkdir(parents=True)
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    try:
        with data_only(source):
            ds_to_universal.main(
                Namespace(input_folder=str(source), output_folder=str(made), inject_missing_state=True, **options)
            )
        if (made / "tmp").exists():  # DeepSpeed's removal of it ignores errors
            shutil.rmtree(made / "tmp")
        sync_tree(made)
        names = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
        write_json(made / COMPLETE, seal((checkpoint_facts(source) or {}) | {"files": file_digests(made, names)}))
        shutil.rmtree(universal, ignore_errors=True)
        os.rename(made, universal)
        sync(universal.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")
