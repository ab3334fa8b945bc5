"""Train the shipped weights again, measure them, and put them into the package.

    python tools/weights.py train text            every method and seed, finished runs are kept
    python tools/weights.py measure text          tables and figures in benchmarks/
    python tools/weights.py publish text          weights in bf16, their cards, the manifest
    python tools/weights.py adapter NAME FOLDER   an adapter of a released model

weights.toml is the table of what ships. Models of seed 0 are published; runs of further seeds stay
in runs/weights/GROUP and are measured where they are.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

# So that a plain `python tools/…` finds the project.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes.hub import published_card
from recipes.registry import find_recipe
from zoo.console import call
from zoo.files import file_sha256, replacing, write_json, write_text
from zoo.pretrained import RELEASE, WEIGHTS

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "weights"
BENCHMARKS = ROOT / "benchmarks"
# Bytes of the largest file in the package.
BUNDLED = 2_000_000
# Settings of a data section that say nothing about the data.
MACHINE = {"cache_dir", "num_workers"}
app = typer.Typer(add_completion=False, help=(__doc__ or "").split("\n", maxsplit=1)[0])


@dataclass(frozen=True)
class Table:
    """One call of `priorzoo evaluate`; its fields are explained in weights.toml."""

    evaluators: str
    options: str = ""
    beside: str = ""
    folder: str = ""
    methods: Sequence[str] = ()
    seeds: bool = True


@dataclass(frozen=True)
class Group:
    """Models that are trained, published and measured together; its fields are explained in
    weights.toml."""

    recipe: str
    weights: str
    methods: Sequence[str]
    axis: str
    columns: dict[str, Sequence[str]]
    tables: Sequence[Table]
    data: str
    against: str = ""
    seeds: Sequence[int] = (0, 1, 2)
    settings: Sequence[str] = ()

    @property
    def modality(self) -> str:
        return self.recipe.partition(".")[0]

    @property
    def folder(self) -> Path:
        """Of the tables, such as benchmarks/text_tiny."""
        return BENCHMARKS / self.recipe.replace(".{}", "")


with Path(__file__).with_name("weights.toml").open("rb") as file:
    FACTS = tomllib.load(file)
# By modality: what the columns of cards mean.
NOTES: dict[str, str] = FACTS.pop("notes")
GROUPS: dict[str, Group] = {}
for group_name, facts in FACTS.items():
    tables = [Table(**table) for table in facts.pop("tables")]
    GROUPS[group_name] = Group(tables=tables, **facts)

Name = Annotated[str, typer.Argument(metavar="GROUP", help=", ".join(GROUPS))]
Methods = Annotated[str, typer.Option(help="comma-separated; default all")]


@app.command()
def train(
    name: Name, methods: Methods = "", jobs: Annotated[int, typer.Option(help="runs at a time")] = 2
) -> None:
    """Train each method with each seed by its recipe; an interrupted run continues from its last
    checkpoint."""
    group = find_group(name)
    names = [group.recipe.format(method) for method in chosen(group, methods)]
    words = ["train-seeds", *names]
    for setting in group.settings:
        words += ["--set", setting]
    words += ["--seeds", ",".join(map(str, group.seeds))]
    words += ["--out", str(RUNS / name)]
    words += ["--jobs", str(jobs)]
    execute(*words)


@app.command()
def measure(name: Name, methods: Methods = "") -> None:
    """Measure published weights and the runs of further seeds that are there; tables, figures, and
    scores of the cards."""
    group = find_group(name)
    selected = chosen(group, methods)
    for table in group.tables:
        subset = [method for method in selected if method in (table.methods or selected)]
        if not subset:
            continue
        models = [group.weights.format(method) for method in subset]
        if table.seeds:
            models += further_runs(name, subset)
        options = shlex.split(table.options)
        if group.against and not table.folder:
            options += ["--against", group.weights.format(group.against)]
        options += ["--out", str(group.folder / table.folder)]
        execute("evaluate", *models, *table.beside.split(), table.evaluators, *options)
    entries = json.loads((WEIGHTS / "manifest.json").read_text())
    for method in selected:
        weights = group.weights.format(method)
        scores = scores_of(group, weights)
        if scores:
            entries[weights]["measured"] = scores
            write_card(group, weights, entries[weights])
    write_manifest(entries)


def further_runs(name: str, methods: Sequence[str]) -> list[str]:
    """The finished runs of further seeds."""
    runs = []
    for seed in GROUPS[name].seeds[1:]:
        for method in methods:
            run = run_folder(name, method, seed)
            if (run / "model").is_dir():
                runs.append(str(run))
    return runs


@app.command()
def publish(name: Name, methods: Methods = "") -> None:
    """Write the trained weights of the first seed: bf16 safetensors, the manifest with their
    digests, and cards.

    Files above `BUNDLED` bytes go to release/, where a checkout finds them.
    """
    group = find_group(name)
    entries = json.loads((WEIGHTS / "manifest.json").read_text())
    for method in chosen(group, methods):
        run = run_folder(name, method, group.seeds[0])
        if not run.is_dir():
            raise typer.BadParameter(f"no run in {run}; train {name} first")
        weights = group.weights.format(method)
        entries[weights] = publish_run(group, weights, run)
        write_card(group, weights, entries[weights])
    write_manifest(entries)
    size = sum(entry["bytes"] for entry in entries.values())
    typer.echo(f"{len(entries)} models, {size / 1e6:.1f} MB")


@app.command()
def adapter(
    name: Annotated[str, typer.Argument(help="such as smollm2.soft")],
    folder: Annotated[Path, typer.Argument(help="that `priorzoo adapt` made")],
    results: Annotated[
        Path | None, typer.Option(help="recall/….json of `priorzoo evaluate hf:FOLDER recall`")
    ] = None,
) -> None:
    """Put an adapter into the package, with its scores. Its base goes by the name of
    `priorzoo fetch-data`."""
    from zoo.adapters import ADAPTER
    from zoo.adapters.released import write_record

    record = json.loads((folder / ADAPTER).read_text())
    record["base"]["name"] = Path(record["base"]["name"]).name
    if results is not None:
        columns = (
            "length",
            "documents",
            "bits_per_byte",
            "tokens_right",
            "tokens_right_beyond",
            "nats",
        )
        record["measured"] = []
        for row in json.loads(results.read_text())["rows"]:
            scores = {column: round(row[column], 4) for column in columns if column in row}
            record["measured"].append(scores)
    place = WEIGHTS / name
    skipped = shutil.ignore_patterns("checkpoints")
    shutil.copytree(folder, place, ignore=skipped, dirs_exist_ok=True)
    for file in place.iterdir():
        file.chmod(0o644)
    write_record(record, place)


def publish_run(group: Group, weights: str, run: Path) -> dict[str, Any]:
    """Write the weights of a run; returns their entry of the manifest. BadParameter: another model
    than is registered."""
    import torch
    from safetensors.torch import save

    from recipes.run_folder import load_run
    from zoo.catalog import model_entry

    model, recipe = load_run(run)
    entry = model_entry(weights)
    if model.config != entry.build(**entry.config).config:
        raise typer.BadParameter(
            f"{run} was not trained as {weights} is registered: {model.config}"
        )
    content = save(model.storable_state(torch.bfloat16), metadata={"format": "pt"})
    file = f"{weights}.safetensors"
    (WEIGHTS / file).unlink(missing_ok=True)
    place = RELEASE if len(content) > BUNDLED else WEIGHTS
    with replacing(place / file, "wb") as stream:
        stream.write(content)
    settings = recipe["train"]
    optim = recipe["optim"]
    data = recipe["data"]
    command = f"deepspeed --num_gpus 1 --module priorzoo.train {recipe['name']}"
    precision = settings["precision"]
    usual = find_recipe(recipe["name"]).train.precision
    # On a CPU "auto" is fp32.
    if precision != usual and (usual, precision) != ("auto", "fp32"):
        command += f" --set train.precision={precision}"
    position_options = json.dumps(model.config.position_options)
    ssmax = "on" if model.config.ssmax else "off"
    facts = {
        "file": file,
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": "bfloat16 matrices, float32 vectors and priors",
        "license": "Apache-2.0",
        "optimiser": (
            f"{optim['name']}, learning rate {optim['lr']:g}, of the priors' parameters "
            f"{optim['prior_lr_scale']:g} times that"
        ),
        "recipe": recipe["name"],
        "command": command,
        "steps": settings["steps"],
        "seed": settings["seed"],
        "commit": json.loads((run / "environment.json").read_text())["commit"],
        "position": f"{model.config.position}, options {position_options}, SSMax {ssmax}",
        "data": group.data,
        "data_section": data_section(recipe["name"]),
    }
    samples = settings["steps"] * settings["batch"]
    if "context" in data:
        context = data["context"]
        facts["tokens"] = samples * context
        facts["train_context"] = context
        facts["tokenizer"] = data["tokenizer"]
    else:
        facts["images"] = samples
        facts["image_size"] = data["image_size"]
        facts["class_names"] = list(model.class_names)
        facts["augmentation"] = data["augment"]
        facts["model_options"] = recipe["model"]["options"] or "none"
    return facts


def data_section(recipe_name: str) -> dict[str, Any]:
    """A recipe's data section, by which evaluators find what training held out.

    Settings of a machine are left out.
    """
    section = dataclasses.asdict(find_recipe(recipe_name).data)
    return {key: value for key, value in section.items() if key not in MACHINE}


def scores_of(group: Group, weights: str) -> list[dict[str, float]]:
    """Rows of a card: the group's columns of its CSV tables, by the places of the axis."""
    rows: dict[int, dict[str, float]] = {}
    for evaluator, columns in group.columns.items():
        path = group.folder / f"{evaluator}.csv"
        if not path.is_file():
            continue
        for line in csv.DictReader(path.read_text().splitlines()):
            if line["model"] != weights:
                continue
            place = int(line[group.axis])
            row = rows.setdefault(place, {group.axis: place})
            for column in columns:
                if line.get(column):
                    row[column] = round(float(line[column]), 4)
    return list(rows.values())


def write_card(group: Group, weights: str, entry: dict[str, Any]) -> None:
    """The model card next to the weights, with the commands of its scores."""
    commands = []
    for table in group.tables:
        if table.folder or not set(table.evaluators.split(",")) & set(group.columns):
            continue
        command = f"priorzoo evaluate {weights} {table.evaluators} {table.options}"
        commands.append(command.strip())
    card = published_card(weights, entry, [NOTES[group.modality], "", "```bash", *commands, "```"])
    write_text(WEIGHTS / f"{weights}.md", card)


def write_manifest(entries: dict[str, Any]) -> None:
    """manifest.json, and manifest.sha256 that verifies it."""
    write_json(WEIGHTS / "manifest.json", entries)
    write_text(WEIGHTS / "manifest.sha256", file_sha256(WEIGHTS / "manifest.json") + "\n")


def run_folder(name: str, method: str, seed: int) -> Path:
    """Where `priorzoo train-seeds` puts a run."""
    return RUNS / name / f"{GROUPS[name].recipe.format(method)}-s{seed}"


def find_group(name: str) -> Group:
    if name not in GROUPS:
        raise typer.BadParameter(f"{name!r}: expected one of {', '.join(GROUPS)}")
    return GROUPS[name]


def chosen(group: Group, methods: str) -> Sequence[str]:
    """The methods of an option, by default all."""
    names = methods.split(",") if methods else group.methods
    unknown = [name for name in names if name not in group.methods]
    if unknown:
        raise typer.BadParameter(
            f"methods {', '.join(unknown)}: expected some of {', '.join(group.methods)}"
        )
    return names


def execute(*words: str) -> None:
    """Run a command of the project; typer.Exit with its status where it fails."""
    typer.echo(f"$ priorzoo {shlex.join(words)}")
    status = subprocess.run([sys.executable, "-m", "priorzoo", *words], cwd=ROOT).returncode
    if status:
        raise typer.Exit(status)


if __name__ == "__main__":
    sys.exit(call(app, prog="tools/weights.py"))
