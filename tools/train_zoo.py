"""Train the shipped tiny models again, measure them, and publish them into the package.

    python tools/train_zoo.py train text           every method, one run folder each under runs/zoo; finished ones are kept
    python tools/train_zoo.py publish text         weights in bf16, SHA-256 and manifest into zoo/weights
    python tools/train_zoo.py measure text         all published weights, and further seeds whose runs exist; then draw
    python tools/train_zoo.py draw text            tables, figures and cards from the stored results of all seeds
    python tools/train_zoo.py train vision …       the same for vision, and for dna

Same data, budget, learning rate and seed for all. A family of models is one entry of FAMILIES. Where it names several seeds,
weights of the first are published, and figures show the spread of all.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

from modalities.contract import find_modality
from modalities.evaluation import Evaluator, ModelResult
from recipes.evaluate import write_overview
from recipes.report import draw_results, load_results
from zoo.cli import call
from zoo.files import write_json

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "zoo"
WEIGHTS = ROOT / "zoo" / "weights"

app = typer.Typer(add_completion=False, help=(__doc__ or "").split("\n", maxsplit=1)[0])
console = Console(highlight=False)


@dataclass(frozen=True)
class Family:
    """Models that are trained, published and measured together.

    Attributes:
        modality: of all of them.  run_prefix: of their run folders' names, before the method.
        methods: `<modality>.<method>_tiny` is each one's recipe.  size: the end of their names.
        tag: of their weights.  seeds: the first is published.
        evaluators: column names of each, as a card's table shows them; `axis` is the column that says where.
        calls: of `recipes/evaluate.py`, in which they are measured: baselines beside them, evaluators, options.
        describe: a card's entries out of the resolved recipe.
        explain: what the card's columns mean.
    """

    modality: str
    run_prefix: str
    methods: tuple[str, ...]
    size: str
    tag: str
    evaluators: dict[str, tuple[str, ...]]
    axis: str
    calls: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...]
    describe: Callable[[dict[str, Any]], dict[str, Any]]
    explain: str
    seeds: tuple[int, ...] = (0,)

    @property
    def measured(self) -> Path:
        return ROOT / "benchmarks" / f"{self.modality}_tiny"

    def weights(self, method: str) -> str:
        """The name that the published weights have."""
        return f"{self.modality}_{method}_{self.size}.{self.tag}"

    def run(self, method: str, seed: int) -> Path:
        """The run folder of a method and seed."""
        name = self.run_prefix + method
        return RUNS / (name if seed == self.seeds[0] else f"{name}-s{seed}")

    def label(self, method: str, seed: int) -> str:
        """What results call it: published weights by their name, a run by its recipe and folder."""
        if seed == self.seeds[0]:
            return self.weights(method)
        return f"{self.modality}.{method}_tiny ({self.run(method, seed).name})"


def describe_text(recipe: dict[str, Any]) -> dict[str, Any]:
    data = recipe["data"]
    return {
        "data": "State of the Union speeches (public domain), training split of the shipped excerpt, as bytes; "
        f"{data['passkey_fraction']:.0%} of the rows are passkey documents, whose five answer tokens count "
        f"{data['passkey_weight']:g} times in the loss",
        "tokens": recipe["train"]["steps"] * recipe["train"]["batch"] * data["context"],
        "train_context": data["context"],
        "tokenizer": data["tokenizer"],
    }


def describe_vision(recipe: dict[str, Any]) -> dict[str, Any]:
    data = recipe["data"]
    return {
        "data": f"{data['source']}: capitals of freely licensed fonts, drawn in scenes with clutter "
        "(`python tools/fetch_data.py vision glyphs --offline`); font families of the held-out images are not in it",
        "images": recipe["train"]["steps"] * recipe["train"]["batch"],
        "image_size": data["image_size"],
        "augmentation": f"{data['augment']}, crop scale {data['crop_scale']}",
        "model_options": recipe["model"]["options"] or "none",
    }


def describe_dna(recipe: dict[str, Any]) -> dict[str, Any]:
    data = recipe["data"]
    return {
        "data": f"{data['source']} (`python tools/fetch_data.py dna genomes --offline`), either strand with probability "
        f"{data['reverse_complement']:g}; yeast_chr04 and zymoseptoria_chr01 are held out whole",
        "tokens": recipe["train"]["steps"] * recipe["train"]["batch"] * data["context"],
        "train_context": data["context"],
        "tokenizer": f"{data['tokenizer']}: one token a base; N and IUPAC codes are read, and never a target",
    }


FAMILIES = {
    "text": Family(
        modality="text",
        run_prefix="",
        methods=(
            "ggd_ssmax", "ggd", "goat", "goat_ssmax", "alibi", "nope", "rope", "rope_ssmax", "cable", "sinusoidal", "t5"
        ),
        size="tiny",
        tag="passkey",
        evaluators={"passkey": ("teacher_forced", "free_generation"), "perplexity": ("nll", "bits_per_byte")},
        axis="length",
        calls=(((), "passkey,perplexity", ("--lengths", "128,256,512,1024,2048,4096")),),
        describe=describe_text,
        explain="Passkey: share of 20 depths × trials answered exactly, scored with the true digits fed back (teacher_forced) "
        "and by free generation (free_generation). nll: nats per byte on held-out speeches.",
    ),
    "vision": Family(
        modality="vision",
        run_prefix="vision_",
        methods=(
            "goat_ssmax", "ggd2d_separable_ssmax", "ggd2d_ssmax", "alibi_ssmax", "rope2d_axial_ssmax",
            "rope2d_mixed_ssmax", "learned_ssmax", "sinusoidal_ssmax", "nope_ssmax",
        ),
        size="tiny_patch8",
        tag="glyphs",
        evaluators={"resolution": ("top1", "top5", "ratio")},
        axis="size",
        calls=(((), "resolution", ("--sizes", "48,72,96,144,192")),),
        describe=describe_vision,
        explain="Held-out font families, drawn with real detail at every size (pixels of a side), nothing tuned for any size. "
        "ratio: top-1 over top-1 at the training size.",
        seeds=(0, 1, 2),
    ),
    "dna": Family(
        modality="dna",
        run_prefix="dna_",
        methods=("goat", "rope", "ggd_ssmax", "alibi", "nope", "cable"),
        size="tiny",
        tag="genomes",
        evaluators={"bits": ("nll", "bits_per_base", "accuracy")},
        axis="length",
        calls=(
            (("markov-*", "uniform", "gzip", "xz"), "bits", ()),
            (("markov-*", "uniform", "gzip", "xz"), "contigs", ("--lengths", "4096", "--samples", "64")),
            ((), "strands", ("--lengths", "256,4096")),
            (("markov-12",), "completion,spectrum", ("--lengths", "256,1024", "--samples", "32")),
        ),
        describe=describe_dna,
        explain="Held-out contigs, the same bases at every length, cut into windows of it (bases), nothing tuned for any "
        "length. nll: nats a base; bits_per_base: uniform is 2; accuracy: of the likeliest next base.",
        seeds=(0, 1, 2),
    ),
}  # fmt: skip


@app.command()
def train(
    family: Annotated[str, typer.Argument(help=", ".join(FAMILIES))],
    methods: Annotated[str, typer.Option(help="comma-separated; default all")] = "",
    seeds: Annotated[str, typer.Option(help="comma-separated; default all")] = "",
    jobs: Annotated[int, typer.Option(help="models at a time, one thread each")] = 2,
) -> None:
    """Train each method by its recipe; an interrupted run continues from its last checkpoint."""
    kind = _family(family)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def one(job: tuple[int, str]) -> tuple[Path, int]:
        seed, method = job
        folder = kind.run(method, seed)
        command = [sys.executable, str(ROOT / "recipes/train.py"), f"{kind.modality}.{method}_tiny"]
        command += ["--run-dir", str(folder), "--resume", "auto", "--set", f"train.seed={seed}"]
        command += ["--set", f"data.seed={seed}"] if seed else []
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".log").open("w") as log:
            return folder, subprocess.run(command, env=environment, stdout=log, stderr=log).returncode

    chosen = [int(seed) for seed in seeds.split(",")] if seeds else kind.seeds
    queue = [(seed, method) for seed in chosen for method in (methods.split(",") if methods else kind.methods)]
    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        for folder, status in pool.map(one, queue):
            console.print(f"{folder.name}: {'trained' if status == 0 else f'failed ({status})'}, see {folder}.log")
            failed += [folder] if status else []
    if failed:
        raise typer.Exit(1)


@app.command()
def publish(family: Annotated[str, typer.Argument(help=", ".join(FAMILIES))]) -> None:
    """Put the trained weights into the package: bf16 safetensors and the manifest with their digests."""
    import torch
    from safetensors.torch import save

    from recipes.runs import load_run
    from zoo.registry import model_entry

    kind = _family(family)
    WEIGHTS.mkdir(exist_ok=True)
    path = WEIGHTS / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for method in kind.methods:
        name, run = kind.weights(method), kind.run(method, kind.seeds[0])
        model, recipe = load_run(run)
        registered = model_entry(name).build(**model_entry(name).config).config
        if model.config != registered:
            raise typer.BadParameter(
                f"{run} was not trained as {name} is registered: {model.config} against {registered}"
            )
        content = save(model.storable_state(torch.bfloat16), metadata={"format": "pt"})
        (WEIGHTS / f"{name}.safetensors").write_bytes(content)
        manifest[name] = {
            "file": f"{name}.safetensors",
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
            "dtype": "bfloat16 matrices, float32 vectors and priors",
            "license": "Apache-2.0",
            "optimiser": f"{recipe['optim']['name']}, learning rate {recipe['optim']['lr']:g}, of the priors' parameters "
            f"{recipe['optim']['prior_lr_scale']:g} times that",
            "recipe": recipe["name"],
            "command": f"deepspeed --num_gpus 1 recipes/train.py {recipe['name']}",
            "steps": recipe["train"]["steps"],
            "seed": recipe["train"]["seed"],
            "commit": json.loads((run / "environment.json").read_text())["commit"],
            "position": f"{model.config.position}, options {json.dumps(model.config.position_options)}, "
            f"SSMax {'on' if model.config.ssmax else 'off'}",
            **kind.describe(recipe),
        }
    write_json(path, manifest)
    console.print(f"{len(manifest)} models, {sum(entry['bytes'] for entry in manifest.values()) / 1e6:.1f} MB")


@app.command()
def measure(family: Annotated[str, typer.Argument(help=", ".join(FAMILIES))]) -> None:
    """All published weights, and the runs of further seeds that exist here; then `draw`.

    Results are one file per model, seed and evaluator, so those of further seeds without a run here stay as they are.
    """
    kind = _family(family)
    published = [kind.weights(method) for method in kind.methods]
    further = [kind.run(method, seed) for seed in kind.seeds[1:] for method in kind.methods]
    further = [str(run) for run in further if (run / "model" / "config.json").is_file()]
    for beside, evaluators, options in kind.calls:
        # What is on the cards is measured for every seed, the rest for what is published.
        models = published + (further if set(evaluators.split(",")) <= set(kind.evaluators) else [])
        command = [sys.executable, str(ROOT / "recipes/evaluate.py"), *models, *beside, evaluators, *options]
        subprocess.run([*command, "--out", str(kind.measured)], check=True)
    draw(family)


@app.command()
def draw(family: Annotated[str, typer.Argument(help=", ".join(FAMILIES))]) -> None:
    """CSV tables, figures and cards from the stored results of all seeds."""
    kind = _family(family)
    known = find_modality(kind.modality).evaluators
    for _, names, _ in kind.calls:
        stored = {name: _in_order(kind, load_results(known[name], kind.measured)) for name in names.split(",")}
        evaluators: dict[str, Evaluator] = {name: known[name]() for name in stored}
        for name, results in stored.items():
            draw_results(evaluators[name], results, kind.measured)
        write_overview(evaluators, stored, kind.measured)
    console.print(f"drawn in {kind.measured}", soft_wrap=True)
    manifest = json.loads((WEIGHTS / "manifest.json").read_text())
    for name, table in measured_tables(kind).items():
        manifest[name]["measured"] = table
        (WEIGHTS / f"{name}.md").write_text(card(kind, name, manifest[name]))
    write_json(WEIGHTS / "manifest.json", manifest)


def _in_order(kind: Family, results: list[ModelResult]) -> list[ModelResult]:
    """Methods in the family's order, then baselines; the seeds of a method are one group, called by its published weights."""
    seeds = {kind.label(method, seed): (seed, method) for seed in kind.seeds for method in kind.methods}
    order = list(seeds)
    several = {
        kind.weights(seeds[r.label][1]) for r in results if r.label in seeds and seeds[r.label][0] != kind.seeds[0]
    }
    grouped = [
        replace(r, group=name if (name := kind.weights(seeds[r.label][1])) in several else "")
        if r.label in seeds
        else r
        for r in results
    ]
    return sorted(grouped, key=lambda r: order.index(r.label) if r.label in order else len(order))


def measured_tables(kind: Family) -> dict[str, list[dict[str, float]]]:
    """Published name → rows of what its evaluators measured."""
    tables: dict[str, dict[int, dict[str, float]]] = {}
    known = find_modality(kind.modality).evaluators
    for evaluator, columns in kind.evaluators.items():
        for result in load_results(known[evaluator], kind.measured):
            if result.label not in map(kind.weights, kind.methods):
                continue  # another seed, or a baseline
            rows = tables.setdefault(result.label, {})
            for row in result.rows:
                kept = {column: round(row[column], 4) for column in columns}
                rows.setdefault(row[kind.axis], {kind.axis: row[kind.axis]}).update(kept)
    return {name: list(rows.values()) for name, rows in tables.items()}


def card(kind: Family, name: str, entry: dict[str, Any]) -> str:
    """A model card in Markdown."""
    facts = {key: value for key, value in entry.items() if key not in ("measured", "file", "bytes")}
    columns = list(entry["measured"][0])
    lines = [f"# {name}", "", *(f"- **{key}**: {value}" for key, value in facts.items()), "", "## Measured", ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---:|" * len(columns)]
    lines += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in entry["measured"]]
    how = f"`python recipes/evaluate.py {name} {','.join(kind.evaluators)}`"
    return "\n".join([*lines, "", f"{kind.explain} How: {how}.", ""])


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(FAMILIES)}")
    return FAMILIES[name]


if __name__ == "__main__":
    sys.exit(call(app, prog="tools/train_zoo.py"))
