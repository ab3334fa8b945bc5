"""Write a model as the folder of a repository of the Hugging Face hub, with its card; with --push, upload it.

    priorzoo hub text_ggd_tiny.facts --out hub/text_ggd_tiny
    priorzoo hub runs/text.ggd_tiny/0001-… --results results --license cc-by-4.0 --out hub/mine --push ME/mine

The folder: config.json, model.safetensors and manifest.json (sizes and SHA-256) as `save_pretrained` writes them; README.md, a
card with YAML front matter, data, measured tables and the lines that load it; of a run its recipe.json; .gitattributes.
`zoo.load_model(FOLDER)` reads it. Needs `pip install 'priorzoo[hub]'`; --push also needs a login (`hf auth login`).
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in recipes/train.py; read when torch is loaded

import torch
import typer
from rich.console import Console

from modalities.contract import Modality, find_modality
from modalities.evaluation import Evaluator, Listing
from modalities.files import new_folder
from recipes.commands import CommandError, call
from recipes.registry import find_recipe
from recipes.report import load_results
from recipes.runs import load_run
from zoo.cli import Import
from zoo.errors import require
from zoo.files import write_json, write_text
from zoo.model import ZooModel
from zoo.naming import nearest
from zoo.outside import import_named
from zoo.pretrained import manifest, resolve_tag
from zoo.registry import create_model, load_model, model_entry

__all__ = ["dataset_name", "published_card"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of matrices; vectors and priors stay float32
Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]  # rows by title; the first column is the axis


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
    require("huggingface_hub", "priorzoo hub", "hub")
    if dtype and dtype not in DTYPES:
        raise CommandError(f"--dtype {dtype!r}: {nearest(dtype, DTYPES)}")
    if push and push.count("/") != 1:
        raise CommandError(f"--push {push!r}: expected OWNER/NAME")
    if out.exists():
        raise CommandError(f"{out} exists; remove it, or name another folder with --out")
    console = Console(highlight=False)
    loaded, recipe = _load(model)
    place = f"zoo.load_model(snapshot_download({json.dumps(push or 'OWNER/NAME')}))"
    imports = ["from huggingface_hub import snapshot_download"]
    usage = _usage(place, f"{loaded.modality},hub", imports)
    if recipe is None and not Path(model).is_dir():
        name, dtype = resolve_tag(model), dtype or "bfloat16"
        card = published_card(name, manifest()[name], usage=usage, license=license_)
    else:
        card = _run_card(Path(model).resolve(), loaded, recipe, results, license=license_, push=push, usage=usage)
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


def _usage(expression: str, extras: str, imports: Sequence[str] = ()) -> str:
    """Python that loads a model."""
    return "\n".join([f"import zoo  # pip install 'priorzoo[{extras}]'", *imports, "", f"model = {expression}"])


# ------------------------------------------------------------------------------------------------ cards


def published_card(
    name: str, entry: dict[str, Any], *, usage: str = "", license: str = "", notes: Sequence[str] = ()
) -> str:
    """The card of weights that the manifest lists."""
    recipe = find_recipe(entry["recipe"])
    return _card(
        name,
        find_modality(recipe.modality),
        license=license or entry["license"],
        source=recipe.data.source,
        tags=[str(model_entry(name).config["position"])],
        facts={key: value for key, value in entry.items() if key not in ("measured", "file", "bytes")},
        tables={"": entry["measured"]} if entry.get("measured") else {},
        usage=usage or _usage(f"zoo.create_model({json.dumps(name)})", recipe.modality),
        notes=notes,
    )


def _run_card(
    folder: Path,
    model: ZooModel,
    recipe: dict[str, Any] | None,
    results: Sequence[Path],
    *,
    license: str,
    push: str,
    usage: str,
) -> str:
    """The card of a run, or of a saved model, of which only the configuration is known."""
    modality, position = find_modality(model.modality), model.config.position
    tags = [position] if isinstance(position, str) else list(position)
    facts: dict[str, Any] = {
        "position": ", ".join(tags),
        "parameters": f"{sum(parameter.numel() for parameter in model.parameters()):,}",
    }
    tokenizer = str(getattr(model.config, "tokenizer", ""))
    if Path(tokenizer.partition("?")[0]).is_file():
        file = Path(tokenizer).name
        facts["tokenizer"] = f"{file}, a file that loading needs at {tokenizer}; it is not in this folder"
    title, label, source = folder.name, folder.name, ""
    if recipe is not None:
        title, label, source = recipe["name"], f"{recipe['name']} ({folder.name})", recipe["data"]["source"]
        facts |= {"recipe": title, "data": source}
        facts |= {key: recipe["train"][key] for key in ("steps", "batch", "seed", "precision")}
    return _card(
        push.partition("/")[2] or title,
        modality,
        license=license,
        source=source,
        tags=tags,
        facts=facts,
        tables=_stored_tables(modality, label, results),
        usage=usage,
    )


def _stored_tables(modality: Modality, label: str, folders: Sequence[Path]) -> dict[str, list[Row]]:
    """Rows that `priorzoo evaluate --out FOLDER` stored of the model called `label`; ValueError where a folder has none."""
    tables: dict[str, list[Row]] = {}
    for folder in folders:
        results = {
            kind: load_results(kind, folder) for kind in modality.evaluators.values() if not issubclass(kind, Listing)
        }
        labels = {result.label for stored in results.values() for result in stored}
        if label not in labels:
            raise ValueError(f"{folder} has no results of {label!r}; it has: {', '.join(sorted(labels)) or 'none'}")
        for kind, stored in results.items():
            for result in (result for result in stored if result.label == label):
                title = kind.name + (f" ({result.source})" if result.source else "")
                tables[title] = [_scores(kind, row) for row in result.rows]
    return tables


def _scores(kind: type[Evaluator], row: Row) -> dict[str, Any]:
    """The axis and the scores of a row; conditions of a score are in brackets behind its name."""
    names = [score.column for score in kind.scores]
    columns = [c for c in row if c != kind.axis.column and (c in names or c.rpartition(" (")[0] in names)]
    rounded = {column: round(row[column], 4) if isinstance(row[column], float) else row[column] for column in columns}
    return {kind.axis.column: row[kind.axis.column]} | rounded


def dataset_name(source: str) -> str:
    """What the hub calls the data of a source: of `hf:NAME…` its NAME; empty for files."""
    name = re.split("[:?]", source.removeprefix("hf:"))[0]
    return name if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and (source.startswith("hf:") or "/" not in name) else ""


def _card(
    name: str,
    modality: Modality,
    *,
    license: str,
    source: str,
    tags: Sequence[str],
    facts: Mapping[str, Any],
    tables: Tables,
    usage: str,
    notes: Sequence[str] = (),
) -> str:
    """Markdown of a model card, with the front matter that the hub reads. `notes`: lines at the end."""
    from huggingface_hub import EvalResult, ModelCardData

    results = []
    for title, rows in tables.items():
        for row in rows:
            axis, *scores = row
            place = f"{axis} {row[axis]}"
            data: dict[str, Any] = {
                "dataset_type": title or "held-out",
                "dataset_name": f"{title or 'held-out data'}, {place}",
            }
            results += [
                EvalResult(modality.task, **data, dataset_config=place, metric_type=score, metric_value=row[score])
                for score in scores
                if isinstance(row[score], int | float) and math.isfinite(row[score])
            ]
    dataset = dataset_name(source)
    front = ModelCardData(
        license=license.lower() or None,
        library_name="priorzoo",
        pipeline_tag=modality.task,
        tags=list(dict.fromkeys(["priorzoo", modality.name, *tags])),
        datasets=[dataset] if dataset else None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        model_name=name if results else None,
        eval_results=results or None,
    )
    lines = ["---", front.to_yaml(), "---", "", f"# {name}", ""]
    lines += [f"- **{key}**: {value}" for key, value in facts.items()]
    lines += [] if license else ["- **license**: not stated"]
    lines += ["", "## Use", "", "```python", usage, "```", ""]
    lines += ["## Measured", ""] if tables else []
    for title, rows in tables.items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        lines += [f"### {title}", ""] if title else []
        lines += ["| " + " | ".join(columns) + " |", "|" + "---:|" * len(columns)]
        lines += ["| " + " | ".join(str(row.get(column, "–")) for column in columns) + " |" for row in rows]
        lines.append("")
    return "\n".join([*lines, *notes, *([""] if notes else [])])


def main(argv: Sequence[str] | None = None, *, prog: str = "recipes/hub.py") -> int:
    return call(hub_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
