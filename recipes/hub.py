"""Write a model as the folder of a repository of the Hugging Face hub, with its card; with --push, upload it.

    priorzoo hub text_ggd_tiny.facts --out hub/text_ggd_tiny
    priorzoo hub runs/text.ggd_tiny/0001-… --results results --license cc-by-4.0 --out hub/mine --push ME/mine

The folder: config.json, model.safetensors and manifest.json (sizes and SHA-256) as `save_pretrained` writes them; README.md, a
card with YAML front matter, data, measured tables and the lines that load it; of a run its recipe.json; .gitattributes.
`zoo.load_model(FOLDER)` reads it. --push needs `pip install 'priorzoo[hub]'` and a login (`hf auth login`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in recipes/train.py; read when torch is loaded

import torch
import typer
from rich.console import Console

from modalities.contract import find_modality
from modalities.files import new_folder
from recipes.cards import Table, model_card, stored_tables
from recipes.commands import CommandError, call
from recipes.registry import find_recipe
from recipes.runs import load_run
from zoo.cli import Import
from zoo.errors import require
from zoo.files import write_json, write_text
from zoo.model import ZooModel
from zoo.naming import nearest
from zoo.outside import import_named
from zoo.pretrained import manifest, resolve_tag
from zoo.registry import create_model, load_model, model_entry

__all__ = ["published_card"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of matrices; vectors and priors stay float32


def hub_command(
    model: Annotated[str, typer.Argument(metavar="MODEL|RUN_DIR", help="a name with weights, a run, a saved model")],
    *,
    out: Annotated[Path, typer.Option(help="the folder to make; must not exist")],
    results: Annotated[list[Path], typer.Option(help="what `priorzoo evaluate --out` wrote, for the card")] = [],  # noqa: B006
    license_: Annotated[str, typer.Option("--license", help="SPDX name; default: of shipped weights theirs")] = "",
    dtype: Annotated[str, typer.Option(help=f"of matrices: {', '.join(DTYPES)}; default: as they are stored")] = "",
    push: Annotated[str, typer.Option(metavar="OWNER/NAME", help="upload the folder to this repository")] = "",
    private: Annotated[bool, typer.Option("--private", help="make the repository a private one")] = False,
    import_: Import = [],  # noqa: B006
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the card, and write nothing")] = False,
) -> None:
    import_named(import_)
    if dtype and dtype not in DTYPES:
        raise CommandError(f"--dtype {dtype!r}: {nearest(dtype, DTYPES)}")
    if push and push.count("/") != 1:
        raise CommandError(f"--push {push!r}: expected OWNER/NAME")
    if out.exists():
        raise CommandError(f"{out} exists; remove it, or name another folder with --out")
    if push:
        require("huggingface_hub", "--push", "hub")
    console = Console(highlight=False)
    loaded, recipe = _load(model)
    repository = push or "OWNER/NAME"
    usage = _usage(f"snapshot_download({json.dumps(repository)})", loaded.modality, hub=True)
    if recipe is None and not Path(model).is_dir():
        name, dtype = resolve_tag(model), dtype or "bfloat16"
        card = published_card(name, manifest()[name], usage=usage, license=license_)
    else:
        card = _own_card(model, loaded, recipe, results, license=license_, name=push.partition("/")[2], usage=usage)
    if dry_run:
        console.print(card, markup=False, soft_wrap=True)
        return
    with new_folder(out, "config.json") as folder:
        loaded.save_pretrained(folder, dtype=DTYPES[dtype or "float32"])
        write_text(folder / "README.md", card)
        write_text(folder / ".gitattributes", "*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
        if recipe is not None:
            write_json(folder / "recipe.json", recipe)
    console.print(f"written: {out}", soft_wrap=True, markup=False)
    if push:
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(push, private=private, exist_ok=True)
        api.upload_folder(repo_id=push, folder_path=out, commit_message="Model of priorzoo")
        console.print(f"pushed: {push}", soft_wrap=True, markup=False)


def _load(model: str) -> tuple[ZooModel, dict[str, Any] | None]:
    """The model, and of a run its recipe."""
    if (Path(model) / "recipe.json").is_file():
        return load_run(model)
    if Path(model).is_dir():
        return load_model(model), None
    if "/" in model:
        raise CommandError(f"no run folder {model!r}")
    return create_model(model, pretrained=True), None


def _usage(place: str, modality: str, *, hub: bool = False) -> str:
    extra = f"# pip install 'priorzoo[{modality}{',hub' if hub else ''}]'"
    lines = [f"import zoo  {extra}"]
    if hub:
        return "\n".join(
            [*lines, "from huggingface_hub import snapshot_download", "", f"model = zoo.load_model({place})"]
        )
    return "\n".join([*lines, "", f"model = zoo.create_model({place})"])


def published_card(
    name: str, entry: dict[str, Any], *, usage: str = "", license: str = "", notes: Sequence[str] = ()
) -> str:
    """The card of weights that the manifest has an entry of."""
    recipe = find_recipe(entry["recipe"])
    rows = entry.get("measured", ())
    return model_card(
        name,
        find_modality(recipe.modality),
        license=license or entry["license"],
        sources=[recipe.data.source],
        tags=[str(model_entry(name).config["position"])],
        facts={key: value for key, value in entry.items() if key not in ("measured", "file", "bytes")},
        tables=[Table("", rows)] if rows else [],
        usage=usage or _usage(json.dumps(name), recipe.modality),
        notes=notes,
    )


def _own_card(
    path: str,
    model: ZooModel,
    recipe: dict[str, Any] | None,
    results: Sequence[Path],
    *,
    license: str,
    name: str,
    usage: str,
) -> str:
    """The card of a run, or of a saved model, about which nothing is known but its configuration."""
    folder, modality = Path(path).resolve(), find_modality(model.modality)
    position = model.config.position
    facts: dict[str, Any] = {
        "position": position if isinstance(position, str) else ", ".join(position),
        "parameters": f"{sum(parameter.numel() for parameter in model.parameters()):,}",
    }
    title = name or folder.name
    tokenizer = str(getattr(model.config, "tokenizer", ""))
    if Path(tokenizer.partition("?")[0]).is_file():
        facts["tokenizer"] = (
            f"{Path(tokenizer).name}, a file that loading needs at {tokenizer}; it is not in this folder"
        )
    if recipe is not None:
        title = name or recipe["name"]
        train = recipe["train"]
        facts |= {"recipe": recipe["name"], "data": recipe["data"]["source"], "steps": train["steps"]}
        facts |= {"batch": train["batch"], "seed": train["seed"], "precision": train["precision"]}
    label = f"{recipe['name']} ({folder.name})" if recipe is not None else folder.name
    return model_card(
        title,
        modality,
        license=license,
        sources=[recipe["data"]["source"]] if recipe is not None else [],
        tags=[position] if isinstance(position, str) else position,
        facts=facts,
        tables=stored_tables(modality, label, results),
        usage=usage,
    )


def main(argv: Sequence[str] | None = None, *, prog: str = "recipes/hub.py") -> int:
    return call(hub_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
