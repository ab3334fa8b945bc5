"""What a training step of a DNA decoder takes with one position method and another: tokens/s and peak memory, in one run.

    python tools/bench_dna.py                                             goat beside rope at GOAT-DNA's size and context
    python tools/bench_dna.py --model tiny --methods goat,alibi,nope      others, as ratios to rope

Steps of the two models alternate, so that other work on the machine falls on both; the speed ratio is the median over pairs.
Memory is what a step (forward, loss, all gradients) adds to the process at its peak, in a process of its own for each model.
Beside it stands what autograd keeps between forward and backward, layer by layer, which tells where a difference comes from.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

from modalities.cost import Meter, device_name
from modalities.dna.model import SIZES, DnaDecoder, next_token_loss
from modalities.dna.tokenizers import load_tokenizer
from tools.bench_attention import paired, write_record
from zoo import create_model
from zoo.methods import list_positions
from zoo.naming import did_you_mean

PLAIN = "rope"
PARTS = {"Attention": "attention", "SwiGLU": "MLP", "RMSNorm": "norms", "Rotary": "rotary"}


class Problem:
    """A model and a batch of random windows; a step is loss and gradients, without an optimiser."""

    def __init__(self, name: str, batch: int, context: int, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        model = create_model(name, train_context=context)
        assert isinstance(model, DnaDecoder)
        self.model = model.to(device, dtype)
        tokens = torch.randint(0, 4, (batch, context + 1), device=device)
        tokens[:, 0] = load_tokenizer("bases").bos_id
        self.batch = {"tokens": tokens, "segments": torch.zeros_like(tokens)}
        self.leaves = [p for p in model.parameters() if p.requires_grad]
        self.device = device

    def step(self) -> None:
        loss, _ = next_token_loss(self.model, self.batch)
        torch.autograd.grad(loss, self.leaves, allow_unused=True)
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)

    def kept(self) -> dict[str, int]:
        """Bytes that autograd keeps for the backward pass, by kind of module, each storage counted once where it appears."""
        seen: set[int] = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        inside: list[str] = [""]
        sums: dict[str, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sums[inside[-1]] = sums.get(inside[-1], 0) + storage.nbytes()
            return tensor

        handles = []
        for module in self.model.modules():
            kind = type(module).__name__
            if kind in PARTS:
                handles.append(module.register_forward_pre_hook(lambda _, __, part=PARTS[kind]: inside.append(part)))
                handles.append(module.register_forward_hook(lambda *_: inside.pop() and None))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = next_token_loss(self.model, self.batch)
        del loss
        for handle in handles:
            handle.remove()
        return {kind or "head": size for kind, size in sums.items()}


def measure_memory(name: str, batch: int, context: int, device: str, dtype: str) -> dict[str, Any]:
    """Peak bytes of a step and what is kept, in this process."""
    problem = Problem(name, batch, context, device, getattr(torch, dtype))
    problem.step()  # what the first step alone allocates
    with Meter(device) as meter:
        problem.step()
    return {"peak_bytes": meter.peak_bytes, "kept_bytes": problem.kept()}


def in_own_process(*words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--child", *words], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def show(record: dict[str, Any], console: Console) -> None:
    table = Table(
        title=f"{record['batch']} × {record['context']} bases, {record['model']}, {record['dtype']} on {record['device']}; "
        f"ratios to {PLAIN}; last columns: MiB kept for the backward pass",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    kinds = sorted({kind for row in record["results"] for kind in row["kept_bytes"]})
    columns = ("method", "tokens/s", "ratio", "peak MiB", "ratio", *kinds)
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in record["results"]:
        peak = row["peak_bytes"]
        table.add_row(
            row["method"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['speed_ratio']:.3f}",
            "" if peak is None else f"{peak / 2**20:,.0f}",
            "" if peak is None else f"{row['peak_ratio']:.3f}",
            *(f"{row['kept_bytes'].get(kind, 0) / 2**20:,.1f}" for kind in kinds),
        )
    console.print(table)


def main(
    model: Annotated[str, typer.Option(help=", ".join(SIZES))] = "25m",
    methods: Annotated[str, typer.Option(help="comma-separated")] = "goat",
    batch: Annotated[int, typer.Option(help="rows a step")] = 1,
    context: Annotated[int | None, typer.Option(help="tokens a row; default the size's own")] = None,
    seconds: Annotated[float, typer.Option(help="of paired steps for each method")] = 20.0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="write the results as JSON here")] = None,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print the table and, with --out, save it."""
    if model not in SIZES:
        raise typer.BadParameter(f"no size {model!r}; {did_you_mean(model, SIZES)}known: {', '.join(SIZES)}")
    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter(f"--dtype must be float32 or bfloat16, got {dtype!r}")
    length = context or SIZES[model]["train_context"]
    if child is not None:
        print(json.dumps(measure_memory(child, batch, length, device, dtype)))
        return
    wanted = list(dict.fromkeys([PLAIN, *(name.strip() for name in methods.split(",") if name.strip())]))
    for method in wanted:
        if method not in list_positions():
            raise typer.BadParameter(f"unknown method {method!r}; {did_you_mean(method, list_positions())}")
    console, results = Console(), []
    plain = Problem(f"dna_{PLAIN}_{model}", batch, length, device, getattr(torch, dtype))
    for method in wanted:
        name = f"dna_{method}_{model}"
        ours = Problem(name, batch, length, device, getattr(torch, dtype))
        _, ms, ratio, pairs = paired(plain.step, ours.step, seconds, time.perf_counter)
        words = ("--batch", str(batch), "--context", str(length), "--device", device, "--dtype", dtype)
        memory = in_own_process(name, *words)
        tokens = batch * length / ms * 1000
        results.append({"method": method, "tokens_per_s": tokens, "speed_ratio": 1 / ratio, "pairs": pairs, **memory})
        del ours
    for row in results:
        row["peak_ratio"] = row["peak_bytes"] and row["peak_bytes"] / results[0]["peak_bytes"]
    record = {
        "model": model, "batch": batch, "context": length, "dtype": dtype, "plain": PLAIN,
        "device": device_name(device), "threads": torch.get_num_threads(), "results": results,
    }  # fmt: skip
    show(record, console)
    if out is not None:
        write_record(out, record, console)


if __name__ == "__main__":
    typer.run(main)
