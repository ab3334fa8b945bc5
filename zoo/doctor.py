"""What `python -m zoo doctor` prints: packages, devices, and which kernels compute here what they should."""

from __future__ import annotations

import importlib.metadata
import platform

import torch
from rich.console import Console
from rich.table import Table

from zoo.attention.dispatch import KERNELS
from zoo.attention.selfcheck import BOUNDS, Verdict, check_kernel, device_name

__all__ = ["examine"]

PACKAGES = ("torch", "triton", "flash-attn", "timm", "transformers", "deepspeed", "datasets")


def examine(console: Console) -> bool:
    """Check every kernel in every dtype on every device, print a table, and return whether all are right."""
    facts = Table(show_header=False, box=None)
    facts.add_row("python", platform.python_version())
    for name in PACKAGES:
        facts.add_row(name, _version(name))
    devices = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
    facts.add_row("devices", ", ".join(device_name(device) for device in devices))
    console.print(facts)
    table = Table(
        title="relative error of outputs and gradients to float64, the largest", title_justify="left", box=None
    )
    for column in ("device", "kernel", *(str(dtype).removeprefix("torch.") for dtype in BOUNDS)):
        table.add_column(column)
    wrong: list[str] = []
    for device in devices:
        for name, kernel in KERNELS.items():
            found = []
            for dtype in BOUNDS:
                with console.status(f"{device} {name} {dtype}"):
                    verdict = check_kernel(name, kernel, device, dtype)
                found.append(_cell(verdict))
                wrong += [f"{device}, {name}, {verdict.dtype}: {line}" for line in verdict.wrong]
            table.add_row(device_name(device), name, *found)
    console.print(table)
    for line in wrong:
        console.print(f"wrong: {line}", style="red", markup=False, soft_wrap=True)
    said = "all that is served can be trusted"
    if wrong:
        said = (
            'some kernels are wrong here: `kernel="auto"` leaves out triton where it is; name another than the others'
        )
    console.print(said, markup=False)
    return not wrong


def _cell(verdict: Verdict) -> str:
    if verdict.wrong:
        return f"[red]wrong ({len(verdict.wrong)})[/red]"
    return "not served" if verdict.worst is None else f"{verdict.worst:.0e}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
