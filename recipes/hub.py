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
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from modalities.contract import Modality, find_modality
from recipes.commands import CommandError, call
from recipes.models import NamedModel, find_model
from recipes.recipe import Json
from zoo.catalog import model_entry
from zoo.console import Console, Import
from zoo.errors import nearest, printable, require
from zoo.files import new_folder, write_json, write_text
from zoo.model import ZooModel
from zoo.plugins import import_named
from zoo.pretrained import weights_entry

# Of matrices; vectors and priors stay float32.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# An entry of the manifest, or a row of a table.
Row = Mapping[str, Any]


def hub_command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL|RUN_DIR", help="a name with weights, a run, a saved model"),
    ],
    *,
    out: Annotated[Path, typer.Option(help="the folder to make; must not exist")],
    license_: Annotated[
        str, typer.Option("--license", help="SPDX name; default: that of shipped weights")
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(help=f"dtype of matrices: {', '.join(DTYPES)}; default: as they are stored"),
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
    named = find_model(model)
    if named.kind not in ("run", "saved"):
        # ValueError where the model has no weights that ship.
        card = _published_card(model, weights_entry(model))
        dtype = dtype or "bfloat16"
    loaded, _ = named.load({})
    if named.kind in ("run", "saved"):
        card = _folder_card(named, loaded)
        # A repository's name says more than a folder's.
        card.title = push.partition("/")[2] or card.title
    if license_:
        card.license = license_
    card.usage = _usage(loaded.modality, push or "OWNER/NAME", import_)
    with new_folder(out, "config.json") as folder:
        loaded.save_pretrained(folder, dtype=DTYPES[dtype or "float32"])
        write_text(folder / "README.md", card.markdown())
        write_text(folder / ".gitattributes", "*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
        if named.kind == "run":
            write_json(folder / "recipe.json", named.facts)
    console.print(f"written: {out}", soft_wrap=True)
    if push:
        console.print(f"pushing to {push}", soft_wrap=True)
        _upload(out, push, private=private)
        console.print(f"pushed: {push}", soft_wrap=True)


def _usage(modality: str, repository: str, imports: Sequence[str]) -> str:
    """The lines of Python that load the model."""
    lines = []
    for name in imports:
        lines.append(f"# first import {Path(name).name}, which defines parts of the model")
    lines.append(f"import zoo  # pip install 'priorzoo[{modality},hub]'")
    lines.append("from huggingface_hub import snapshot_download")
    lines.append("")
    lines.append(f"model = zoo.load_model(snapshot_download({json.dumps(repository)}))")
    return "\n".join(lines)


def _upload(folder: Path, repository: str, *, private: bool) -> None:
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repository, private=private, exist_ok=True)
    api.upload_folder(
        repo_id=repository,
        folder_path=folder,
        commit_message="Model of priorzoo",
    )


@dataclass
class Card:
    """A model card.

    source: of the data. rows: scores by places on the axis, which is the first column. notes: lines
    at the end.
    """

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
        if not self.license:
            lines.append("- **license**: not stated")
        lines += ["", "## Use", "", "```python", self.usage, "```", ""]
        if self.rows:
            lines += ["## Measured", "", *self._score_table(), ""]
        if self.notes:
            lines += [*self.notes, ""]
        return "\n".join(lines)

    def _score_table(self) -> list[str]:
        columns = list(dict.fromkeys(itertools.chain.from_iterable(self.rows)))
        lines = [_table_line(columns), "|" + "---:|" * len(columns)]
        for row in self.rows:
            cells = [row.get(column, "–") for column in columns]
            lines.append(_table_line(cells))
        return lines

    def _front_matter(self) -> str:
        from huggingface_hub import EvalResult, ModelCardData

        results = []
        for row in self.rows:
            axis, *scores = row
            place = f"{axis} {row[axis]}"
            task = self.modality.task
            name = f"held-out data, {place}"
            for score in scores:
                result = EvalResult(task, "held-out", name, score, row[score], dataset_config=place)
                results.append(result)
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
    line = printable(" ".join(str(value).split()))
    return html.escape(line, quote=False).replace("|", r"\|").replace("](", r"]\(")


def _table_line(values: Iterable[object]) -> str:
    return "| " + " | ".join(map(_plain, values)) + " |"


def published_card(name: str, entry: Row, notes: Sequence[str]) -> str:
    """The card of weights that the manifest lists, as it lies beside them."""
    card = _published_card(name, entry)
    modality = card.modality.name
    lines = [
        f"import zoo  # pip install 'priorzoo[{modality}]'",
        "",
        f"model = zoo.create_model({json.dumps(name)})",
    ]
    card.usage = "\n".join(lines)
    card.notes = notes
    return card.markdown()


def _published_card(name: str, entry: Row) -> Card:
    registered = model_entry(name)
    unlisted = ("measured", "file", "bytes", "data_section")
    return Card(
        title=name,
        modality=find_modality(registered.modality),
        source=entry["data_section"]["source"],
        tags=[str(registered.config["position"])],
        facts={key: value for key, value in entry.items() if key not in unlisted},
        rows=entry.get("measured", ()),
        license=entry["license"],
    )


def _folder_card(named: NamedModel, model: ZooModel) -> Card:
    """The card of a run or a saved model."""
    modality = find_modality(model.modality)
    position = model.config.position
    tags = [position] if isinstance(position, str) else list(position)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    facts: Json = {"position": ", ".join(tags), "parameters": f"{parameters:,}"}
    title = named.label
    source = ""
    if named.kind == "run":
        recipe = named.facts
        title = recipe["name"]
        source = recipe["data"]["source"]
        facts |= {"recipe": title, "data": source}
        facts |= {key: recipe["train"][key] for key in ("steps", "batch", "seed", "precision")}
    return Card(title, modality, source, tags, facts)


def dataset_name(source: str) -> str:
    """The hub's name of a source; empty for files."""
    name = re.split("[:?]", source.removeprefix("hf:"))[0]
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return ""
    on_hub = source.startswith("hf:")
    # Without "hf:" a name with a slash is a path.
    return name if on_hub or "/" not in name else ""


main = partial(call, hub_command, prog="priorzoo hub")
