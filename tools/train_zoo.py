"""Train the shipped tiny models again, measure them, and publish them into the package.

    python tools/train_zoo.py train            every method, one run folder each under runs/zoo; finished ones are kept
    python tools/train_zoo.py publish          weights in bf16, SHA-256 and manifest into zoo/weights
    python tools/train_zoo.py measure          all published weights at once; writes benchmarks/text_tiny and cards

Same data, budget, learning rate and seed for all. Training takes about five core-minutes a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from recipes.runs import write_json

METHODS = (
    "ggd_ssmax",
    "ggd",
    "goat",
    "goat_ssmax",
    "alibi",
    "nope",
    "rope",
    "rope_ssmax",
    "cable",
    "sinusoidal",
    "t5",
)
TAG = "passkey"
ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "zoo"
MEASURED = ROOT / "benchmarks" / "text_tiny"
WEIGHTS = ROOT / "zoo" / "weights"
LENGTHS = "128,256,512,1024,2048,4096"

app = typer.Typer(add_completion=False, help=(__doc__ or "").split("\n", maxsplit=1)[0])
console = Console(highlight=False)


@app.command()
def train(
    methods: Annotated[str, typer.Option(help="comma-separated")] = ",".join(METHODS),
    jobs: Annotated[int, typer.Option(help="models at a time, one thread each")] = 2,
) -> None:
    """Train each method by its recipe; an interrupted run goes on from its last checkpoint."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def one(method: str) -> tuple[str, int]:
        command = [sys.executable, str(ROOT / "recipes/train.py"), f"text.{method}_tiny"]
        command += ["--run-dir", str(RUNS / method), "--resume", "auto"]
        RUNS.mkdir(parents=True, exist_ok=True)
        with (RUNS / f"{method}.log").open("w") as log:
            return method, subprocess.run(command, env=environment, stdout=log, stderr=log).returncode

    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        for method, status in pool.map(one, methods.split(",")):
            console.print(f"{method}: {'trained' if status == 0 else f'failed ({status})'}, see {RUNS / method}.log")
            failed += [method] if status else []
    if failed:
        raise typer.Exit(1)


@app.command()
def publish() -> None:
    """Put the trained weights into the package: bf16 safetensors and the manifest with their digests."""
    import torch
    from safetensors.torch import save

    from modalities.text.model import CausalLM

    WEIGHTS.mkdir(exist_ok=True)
    manifest: dict[str, Any] = {}
    for method in METHODS:
        name, run = f"text_{method}_tiny.{TAG}", RUNS / method
        recipe = json.loads((run / "recipe.json").read_text())
        content = save(
            CausalLM.from_pretrained(run / "model").storable_state(torch.bfloat16), metadata={"format": "pt"}
        )
        (WEIGHTS / f"{name}.safetensors").write_bytes(content)
        manifest[name] = {
            "file": f"{name}.safetensors",
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
            "dtype": "bfloat16 matrices, float32 vectors and priors",
            "license": "Apache-2.0",
            "data": "State of the Union speeches (public domain), training split of the shipped excerpt, as bytes; "
            f"{recipe['data']['passkey_fraction']:.0%} of the rows are passkey documents, whose five answer tokens count "
            f"{recipe['data']['passkey_weight']:g} times in the loss",
            "optimiser": f"{recipe['optim']['name']}, learning rate {recipe['optim']['lr']:g}, of the priors' own numbers "
            f"{recipe['optim']['prior_lr_scale']:g} times that",
            "recipe": recipe["name"],
            "command": f"deepspeed --num_gpus 1 recipes/train.py {recipe['name']}",
            "steps": recipe["train"]["steps"],
            "tokens": recipe["train"]["steps"] * recipe["train"]["batch"] * recipe["data"]["context"],
            "seed": recipe["train"]["seed"],
            "commit": json.loads((run / "environment.json").read_text())["commit"],
            "train_context": recipe["data"]["context"],
            "tokenizer": recipe["data"]["tokenizer"],
        }
    write_json(WEIGHTS / "manifest.json", manifest)
    console.print(f"{len(manifest)} models, {sum(entry['bytes'] for entry in manifest.values()) / 1e6:.1f} MB")


@app.command()
def measure(lengths: Annotated[str, typer.Option()] = LENGTHS) -> None:
    """Passkey and perplexity of all published weights in one call and one figure, then the cards."""
    command = [sys.executable, str(ROOT / "recipes/evaluate.py"), f"text_*_tiny.{TAG}", "passkey,perplexity"]
    subprocess.run([*command, "--lengths", lengths, "--out", str(MEASURED)], check=True)
    manifest = json.loads((WEIGHTS / "manifest.json").read_text())
    for method, table in measured_tables().items():
        name = f"text_{method}_tiny.{TAG}"
        manifest[name]["measured"] = table
        (WEIGHTS / f"{name}.md").write_text(card(name, manifest[name]))
    write_json(WEIGHTS / "manifest.json", manifest)


def measured_tables() -> dict[str, list[dict[str, float]]]:
    """Method → rows of length, both passkey scores, nats per token and bits per byte."""
    tables: dict[str, dict[int, dict[str, float]]] = {}
    for evaluator, columns in (
        ("passkey", ("teacher_forced", "free_generation")),
        ("perplexity", ("nll", "bits_per_byte")),
    ):
        for model in json.loads((MEASURED / f"{evaluator}.json").read_text())["models"]:
            rows = tables.setdefault(model["method"], {})
            for row in model["rows"]:
                kept = {column: round(row[column], 4) for column in columns}
                rows.setdefault(row["length"], {"length": row["length"]}).update(kept)
    return {method: list(rows.values()) for method, rows in tables.items()}


def card(name: str, entry: dict[str, Any]) -> str:
    """A model card in Markdown."""
    facts = {key: value for key, value in entry.items() if key not in ("measured", "file", "bytes")}
    columns = list(entry["measured"][0])
    lines = [f"# {name}", "", *(f"- **{key}**: {value}" for key, value in facts.items()), "", "## Measured", ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---:|" * len(columns)]
    lines += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in entry["measured"]]
    lines += [
        "",
        "Passkey: share of 20 depths × trials answered exactly, scored with the true digits fed back (teacher_forced) "
        "and by free generation (free_generation). nll: nats per byte on held-out speeches. How: "
        f"`python recipes/evaluate.py {name} passkey,perplexity`.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    app()
