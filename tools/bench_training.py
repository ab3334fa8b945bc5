"""What a training step of a text model takes with one position method and another: tokens/s, MFU and peak memory, in one run.

    python tools/bench_training.py                                  125M at contexts 2048 and 16384 on CUDA
    python tools/bench_training.py --model tiny --contexts 128      what a machine without a GPU takes by default
    python tools/bench_training.py --minutes 6 --out benchmarks/h200/training.json

A step is forward, loss, backward, gradient clipping and the optimiser, through the recipes' own engine: DeepSpeed, ZeRO
stage 1 and bfloat16 on CUDA, one process. Where DeepSpeed is not installed it is plain torch, weights in bfloat16 and AdamW
fused, and the record says so. Tokens are random. Steps of the methods alternate, so that other work on the machine falls on
all; ratios are medians over rounds, against the first method.

    MFU = tokens/s · F / ceiling,      F = 6·N + 6·layers·C·(L + 1)   operations a token

N: parameters that multiply activations, the output matrix once, the embedding as a look-up not at all; 2 operations each
forward and 4 backward. The rest, a layer: <q, k> and the weighted sum of values over the (L + 1)/2 visible keys of a row,
4·C operations a key forward and twice that backward. What is computed again counts nothing. The ceiling is a large
matrix product of the same run; `--datasheet-tflops` adds the share of a figure that you give, and labels it as such.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

from modalities.cost import Meter, device_name
from modalities.text import CausalLM, causal_lm_loss
from modalities.text.data import TextDataConfig
from modalities.text.model import SIZES
from recipes.config import Model, Optim, Recipe, Train, resolve
from tools.benches.kit import Budget, by_clock, matmul_ceiling, median_ratio, versions, write_record
from zoo import create_model, list_models
from zoo.naming import did_you_mean

METHODS = "rope,alibi,goat,ggd_ssmax"
DEFAULTS = {"cuda": ("125m", "2048,16384", 32768), "cpu": ("tiny", "128", 512)}  # model, contexts, tokens a step
CLIP = 1.0


class EngineStep:
    """A step by recipes.engine: DeepSpeed as `recipes/train.py` runs it."""

    def __init__(self, model: CausalLM, batch: int, ranks: Any) -> None:
        from recipes.engine import Engine

        cuda = ranks.device.type == "cuda"
        train = Train(steps=10**6, batch=batch, micro_batch=batch, zero_stage=int(cuda), clip=CLIP)
        recipe = Recipe("bench", "text", Model("bench"), TextDataConfig(), Optim(), train)
        self.plan = resolve(recipe, world=1, device=ranks.device.type)
        self.engine = Engine(model, self.plan, ranks)
        self.engine.train()

    def __call__(self, batch: dict[str, torch.Tensor]) -> float:
        loss, _ = causal_lm_loss(self.engine, batch)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())


class TorchStep:
    """A step without DeepSpeed."""

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self.model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=Optim().lr, betas=Optim().betas, fused=True)

    def __call__(self, batch: dict[str, torch.Tensor]) -> float:
        loss, _ = causal_lm_loss(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def flops_per_token(model: CausalLM, context: int) -> float:
    """F of the module's docstring, from the model's own linear layers and its output matrix."""
    matrices = sum(m.weight.numel() for m in model.layers.modules() if isinstance(m, torch.nn.Linear))
    config = model.config
    return 6.0 * (matrices + config.vocab_size * config.dim) + 6.0 * config.num_layers * config.dim * (context + 1)


def build(name: str, context: int, batch: int, device: torch.device, ranks: Any, compiled: bool) -> dict[str, Any]:
    """A model with its step, and the memory that both hold."""
    torch.manual_seed(0)
    with Meter(device) as meter:
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        model = create_model(name, train_context=context)
        assert isinstance(model, CausalLM)
        flops, parameters = flops_per_token(model, context), sum(p.numel() for p in model.parameters())
        if compiled:
            model.compile()
        step = TorchStep(model, device) if ranks is None else EngineStep(model, batch, ranks)
    held = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else meter.peak_bytes
    return {"step": step, "flops": flops, "parameters": parameters, "held": held}


def measure(
    names: dict[str, str], context: int, batch: int, device: torch.device, ranks: Any, *,
    seconds: float, compiled: bool, report: Callable[[str], None],
) -> tuple[list[dict[str, Any]], dict[str, str]]:  # fmt: skip
    """Steps of every method in turns. Returns a row for each and what went wrong, by method."""
    tokens = torch.randint(0, 256, (batch, context + 1), device=device)
    data = {"tokens": tokens, "segments": torch.zeros_like(tokens)}
    made, peaks, failed = {}, {}, {}
    for method, name in names.items():
        report(f"{name} at {context}: first steps")
        try:
            made[method] = build(name, context, batch, device, ranks, compiled)
            losses = [made[method]["step"](data) for _ in range(2)]  # compiled, and Adam's moments allocated
            with Meter(device) as meter:
                losses.append(made[method]["step"](data))
            if not all(x == x and abs(x) != float("inf") for x in losses):
                raise ValueError(f"the loss is not finite: {losses}")
            peaks[method] = meter.peak_bytes
        except Exception as error:  # another method may still run
            failed[method] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            made.pop(method, None)
            peaks.pop(method, None)
    report(f"context {context}: {len(made)} methods in turns")
    rows = [] if not made else timed(made, peaks, data, seconds, device, context, batch)
    made.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows, failed


def timed(
    made: dict[str, dict[str, Any]], peaks: dict[str, int | None], data: dict[str, torch.Tensor], seconds: float,
    device: torch.device, context: int, batch: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of the methods in `made`, after at least three rounds for about `seconds` each."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    watch, rounds, end = by_clock(clock), [], time.perf_counter() + seconds * len(made)
    while len(rounds) < 3 or time.perf_counter() < end:
        rounds.append([watch(lambda entry=entry: entry["step"](data)) for entry in made.values()])
    rows = []
    for n, (method, entry) in enumerate(made.items()):
        ms = statistics.median(row[n] for row in rounds)
        peak = peaks[method]
        rows.append(
            {
                "method": method, "context": context, "batch": batch, "ms": ms, "rounds": len(rounds),
                "tokens_per_s": 1e3 * batch * context / ms, "speed_ratio": 1 / median_ratio(rounds, n, 0),
                "parameters": entry["parameters"], "flops_per_token": entry["flops"],
                "tflops": batch * context * entry["flops"] / ms / 1e9,
                "peak_bytes": None if peak is None or entry["held"] is None else entry["held"] + peak,
            }
        )  # fmt: skip
    return rows


def show(record: dict[str, Any], console: Console) -> None:
    table = Table(
        title=f"training steps of {record['model']} on {record['device']}, {record['dtype']}, {record['engine']}; "
        f"ratios to {record['plain']}; MFU of {record['matmul_tflops']:.2f} TFLOP/s measured",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    sheet = record["datasheet_tflops"] is not None
    columns = [
        "context",
        "method",
        "tokens/s",
        "ratio",
        "TFLOP/s",
        "MFU",
        *(["of datasheet"] if sheet else []),
        "peak GiB",
    ]
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in record["results"]:
        peak = row["peak_bytes"]
        cells = [str(row["context"]), row["method"], f"{row['tokens_per_s']:,.0f}", f"{row['speed_ratio']:.3f}"]
        cells += [f"{row['tflops']:.3g}", f"{row['mfu']:.1%}"]
        cells += [f"{row['datasheet_mfu']:.1%}"] if sheet else []
        table.add_row(*cells, "" if peak is None else f"{peak / 2**30:.2f}")
    console.print(table)
    for note in record["notes"]:
        console.print(note, highlight=False)


def names_of(methods: str, model: str) -> dict[str, str]:
    """The text model of each method. typer.BadParameter for a size or method there is none of."""
    if model not in SIZES:
        raise typer.BadParameter(f"no size {model!r}; {did_you_mean(model, SIZES)}known: {', '.join(SIZES)}")
    known = {name.removeprefix("text_").removesuffix(f"_{model}"): name for name in list_models(f"text_*_{model}")}
    found = {}
    for method in filter(None, (word.strip() for word in methods.split(","))):
        if method not in known:
            raise typer.BadParameter(
                f"unknown method {method!r}; {did_you_mean(method, known)}known: {', '.join(known)}"
            )
        found[method] = known[method]
    return found


def main(
    model: Annotated[str, typer.Option(help="default 125m on CUDA, tiny on the CPU")] = "",
    methods: Annotated[str, typer.Option(help="comma-separated; ratios are to the first")] = METHODS,
    contexts: Annotated[str, typer.Option(help="tokens a row; default 2048,16384 on CUDA")] = "",
    tokens: Annotated[int, typer.Option(help="tokens a step; default 32768 on CUDA")] = 0,
    seconds: Annotated[float, typer.Option(help="of steps for each method and context")] = 8.0,
    minutes: Annotated[float, typer.Option(help="drop the longest contexts beyond; 0: no limit")] = 0.0,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile the model")] = False,
    engine: Annotated[str, typer.Option(help="auto, deepspeed or torch")] = "auto",
    datasheet_tflops: Annotated[float | None, typer.Option(help="a second ceiling, from a datasheet")] = None,
    commit: Annotated[str, typer.Option(help="what to record, where the checkout has no history")] = "",
    out: Annotated[Path | None, typer.Option(help="write the results as JSON here")] = None,
) -> None:
    """Print the table and, with --out, save it."""
    if engine not in ("auto", "deepspeed", "torch"):
        raise typer.BadParameter(f"--engine must be auto, deepspeed or torch, got {engine!r}")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    default_model, default_contexts, default_tokens = DEFAULTS[kind]
    model = model or default_model
    names = names_of(methods, model)
    lengths = [int(word) for word in (contexts or default_contexts).split(",") if word.strip().isdigit()]
    if not lengths or not names:
        raise typer.BadParameter(f"--contexts {contexts!r} and --methods {methods!r}: expected at least one of each")
    installed = importlib.util.find_spec("deepspeed") is not None
    if engine == "deepspeed" and not installed:
        raise typer.BadParameter("--engine deepspeed: deepspeed is not installed; --engine torch needs none")
    notes, console = [], Console()
    if kind == "cpu":
        notes.append(f"No CUDA device: {model} on the CPU in float32, which says nothing about a GPU.")
    ranks = None
    if engine != "torch" and installed:
        from recipes.engine import start

        ranks = start()
    elif engine == "auto":
        notes.append(
            "deepspeed is not installed: plain torch instead, without ZeRO and without float32 copies of weights."
        )
    device = torch.device(kind) if ranks is None else ranks.device
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32

    def clock() -> float:
        if kind == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    ceiling = matmul_ceiling(device, dtype, by_clock(clock))
    budget, results = Budget(minutes), list[dict[str, Any]]()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(lengths))
        for context in sorted(lengths):
            if not budget.allows("contexts"):
                notes.append(f"Out of time: context {context} was not measured.")
                continue
            batch = max(1, (tokens or default_tokens) // context)
            rows, failed = measure(
                names, context, batch, device, ranks, seconds=seconds, compiled=compiled,
                report=lambda line: progress.update(task, description=line),
            )  # fmt: skip
            results += rows
            notes += [f"Failed: {method} at {context}: {why}" for method, why in failed.items()]
            progress.advance(task)
    for row in results:
        row["mfu"] = row["tflops"] / ceiling
        row["datasheet_mfu"] = row["tflops"] / datasheet_tflops if datasheet_tflops else None
    record: dict[str, Any] = {"commit": commit} if commit else {}
    record |= {
        "model": model, "device": device_name(device), "dtype": str(dtype).removeprefix("torch."),
        "engine": "plain torch" if ranks is None else f"DeepSpeed ZeRO-{int(kind == 'cuda')}", "compiled": compiled,
        "packages": versions(), "plain": next(iter(names)), "matmul_tflops": ceiling,
        "datasheet_tflops": datasheet_tflops, "notes": notes, "results": results,
    }  # fmt: skip
    show(record, console)
    if out is not None:
        write_record(out, record, console)
    if any(note.startswith("Failed") for note in notes):
        raise typer.Exit(1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    code = 0
    try:
        typer.run(main)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    from recipes.engine import leave

    leave(code)
