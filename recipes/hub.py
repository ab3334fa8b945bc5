"""Write a model as the folder of a repository of the Hugging Face hub, with its card; with --push,
upload it.

    priorzoo hub text_ggd_tiny.facts --out hub/text_ggd_tiny
    priorzoo hub runs/text.ggd_tiny/0001-… --license cc-by-4.0 --out hub/mine --push ME/mine

The folder: config.json, model.safetensors and manifest.json (sizes and SHA-256) as
`save_pretrained` writes them; README.md, a card with YAML front matter, the lines that load it, and
tables of shipped weights; of a run its recipe.json. A tokenizer of the user's is in it.
`zoo.load_model(FOLDER)` and all commands read it. Needs `pip install 'priorzoo[hub]'`; --push also
needs a login (`hf auth login`).
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from modalities.contract import Modality, find_modality
from recipes.commands import CommandError, Console, call
from recipes.recipe import Json
from recipes.registry import find_recipe
from recipes.run_folder import load_run
from zoo.catalog import create_model, load_model, model_entry
from zoo.cli import Import
from zoo.errors import nearest, printable, require
from zoo.files import new_folder, write_json, write_text
from zoo.model import ZooModel
from zoo.plugins import import_named
from zoo.pretrained import weights_entry

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}  # of matrices; vectors and priors stay float32
Row = Mapping[str, Any]  # of the manifest, or of a table


def hub_command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL|RUN_DIR", help="a name with weights, a run, a saved model"),
    ],
    *,
    out: Annotated[Path, typer.Option(help="the folder to make; must not exist")],
    license_: Annotated[
        str, typer.Option("--license", help="SPDX name; default: of shipped weights theirs")
    ] = "",
    dtype: Annotated[
        str, typer.Option(help=f"of matrices: {', '.join(DTYPES)}; default: as they are stored")
    ] = "",
    push: Annotated[
        str, typer.Option(metavar="OWNER/NAME", help="upload the folder to this repository")
    ] = "",
    private: Annotated[
        bool, typer.Option("--private", help="make the repository a private one")
    ] = False,
    import_: Import = [],  # noqa: B006
) -> None:
    import_named(import_)
    require("huggingface_hub", "priorzoo hub", "hub")
    if dtype and dtype not in DTYPES:
        raise CommandError(f"--dtype {dtype!r}: {nearest(dtype, DTYPES)}")
    if push and push.count("/") != 1:
        raise CommandError(f"--push {push!r}: expected OWNER/NAME")
    if out.exists():
        raise CommandError(f"{out} exists; remove it, or name another folder with --out")
    console = Console()
    recipe = None
    source = Path(model).resolve()
    if (source / "recipe.json").is_file():
        loaded, recipe = load_run(model)
    elif source.is_dir():
        loaded = load_model(model)
    elif "/" in model:
        raise CommandError(f"no run folder {model!r}")
    else:
        loaded = create_model(model)
    if source.is_dir():
        card = _folder_card(source, loaded, recipe)
    else:
        card = _published_card(model, weights_entry(model))
        dtype = dtype or "bfloat16"
    card.title, card.license = (
        push.partition("/")[2] * source.is_dir() or card.title,
        license_ or card.license,
    )
    needed = "".join(
        f"# first import {Path(name).name}, which defines parts of the model\n" for name in import_
    )
    imports = f"import zoo  # pip install 'priorzoo[{loaded.modality},hub]'\nfrom huggingface_hub import snapshot_download\n\n"
    card.usage = (
        needed
        + imports
        + f"model = zoo.load_model(snapshot_download({json.dumps(push or 'OWNER/NAME')}))"
    )
    with new_folder(out, "config.json") as folder:
        loaded.save_pretrained(folder, dtype=DTYPES[dtype or "float32"])
        write_text(folder / "README.md", card.markdown())
        write_text(folder / ".gitattributes", "*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
        if recipe is not None:
            write_json(folder / "recipe.json", recipe)
    console.print(f"written: {out}", soft_wrap=True)
    if push:
        from huggingface_hub import HfApi

        console.print(f"pushing to {push}", soft_wrap=True)
        api = HfApi()
        api.create_repo(push, private=private, exist_ok=True)
        api.upload_folder(repo_id=push, folder_path=out, commit_message="Model of priorzoo")
        console.print(f"pushed: {push}", soft_wrap=True)


@dataclass
class Card:
    """A model card. source: of the data. rows: scores by places on the axis, which comes first.
    notes: lines at the end."""

    title: str
    modality: Modality
    source: str
    tags: Sequence[str]
    facts: Row
    rows: Sequence[Row] = ()
    license: str = ""
    usage: str = ""
    notes: Sequence[str] = field(default_factory=list)

    def markdown(self) -> str:
        lines = ["---", self._front_matter(), "---", "", f"# {_plain(self.title)}", ""]
        lines += [f"- **{_plain(key)}**: {_plain(value)}" for key, value in self.facts.items()]
        lines += [] if self.license else ["- **license**: not stated"]
        lines += ["", "## Use", "", "```python", self.usage, "```", ""]
        if self.rows:
            columns = list(dict.fromkeys(column for row in self.rows for column in row))
            cells = [columns, *([row.get(column, "–") for column in columns] for row in self.rows)]
            head, *body = ("| " + " | ".join(map(_plain, line)) + " |" for line in cells)
            lines += ["## Measured", "", head, "|" + "---:|" * len(columns), *body, ""]
        return "\n".join([*lines, *self.notes, *([""] if self.notes else [])])

    def _front_matter(self) -> str:
        from huggingface_hub import EvalResult, ModelCardData

        results = []
        for row in self.rows:
            axis, *scores = row
            place = f"{axis} {row[axis]}"
            task = self.modality.task
            name = f"held-out data, {place}"
            results += [
                EvalResult(task, "held-out", name, score, row[score], dataset_config=place)
                for score in scores
            ]
        dataset = dataset_name(self.source)
        return ModelCardData(
            license=self.license.lower() or None,
            library_name="priorzoo",
            pipeline_tag=self.modality.task,
            tags=list(dict.fromkeys(["priorzoo", self.modality.name, *self.tags])),
            datasets=[dataset] if dataset else None,
            metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
            model_name=self.title if results else None,
            eval_results=results or None,
        ).to_yaml()


def _plain(value: object) -> str:
    """A value in one line of Markdown, without HTML, links and columns of its own."""
    return (
        html.escape(printable(" ".join(str(value).split())), quote=False)
        .replace("|", r"\|")
        .replace("](", r"]\(")
    )


def published_card(name: str, entry: Row, notes: Sequence[str]) -> str:
    """The card of weights that the manifest lists, as it lies beside them."""
    card = _published_card(name, entry)
    modality = card.modality.name
    card.usage = f"import zoo  # pip install 'priorzoo[{modality}]'\n\nmodel = zoo.create_model({json.dumps(name)})"
    card.notes = notes
    return card.markdown()


def _published_card(name: str, entry: Row) -> Card:
    recipe = find_recipe(entry["recipe"])
    tags = [str(model_entry(name).config["position"])]
    rows = entry.get("measured", ())
    facts = {key: value for key, value in entry.items() if key not in ("measured", "file", "bytes")}
    return Card(
        name,
        find_modality(recipe.modality),
        recipe.data.source,
        tags,
        facts,
        rows,
        entry["license"],
    )


def _folder_card(folder: Path, model: ZooModel, recipe: Json | None) -> Card:
    """The card of a run or a saved model."""
    modality = find_modality(model.modality)
    position = model.config.position
    tags = [position] if isinstance(position, str) else list(position)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    facts: Json = {"position": ", ".join(tags), "parameters": f"{parameters:,}"}
    title = folder.name
    source = ""
    if recipe is not None:
        title = recipe["name"]
        source = recipe["data"]["source"]
        facts |= {"recipe": title, "data": source}
        facts |= {key: recipe["train"][key] for key in ("steps", "batch", "seed", "precision")}
    return Card(title, modality, source, tags, facts)


def dataset_name(source: str) -> str:
    """The hub's name of a source; empty for files."""
    name = re.split("[:?]", source.removeprefix("hf:"))[0]
    return (
        name
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
        and (source.startswith("hf:") or "/" not in name)
        else ""
    )


main = partial(call, hub_command, prog="priorzoo hub")
