"""What `priorzoo doctor` prints: packages, devices, and which kernels compute here what they should."""

from __future__ import annotations

import importlib.metadata
import platform
from itertools import product

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zoo.attention.dispatch import KERNELS
from zoo.attention.selfcheck import BOUNDS, check_kernel, device_name

__all__ = ["examine"]

PACKAGES = ("torch", "triton", "flash-attn", "timm", "transformers", "deepspeed", "datasets")


def examine(console: Console) -> bool:
    """Check every kernel in every dtype on every device, print a table, and return whether all are right."""
    facts = Table(show_header=False, box=None)
    facts.add_row("python", platform.python_version())
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        facts.add_row(name, version)
    devices = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
    facts.add_row("devices", ", ".join(device_name(device) for device in devices))
    console.print(facts)
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in BOUNDS}
    table = Table(
        "device", "kernel", *dtypes, title="largest relative error to float64", title_justify="left", box=None
    )
    wrong: list[str] = []
    for device, (name, kernel) in product(devices, KERNELS.items()):
        cells = []
        for label, dtype in dtypes.items():
            with console.status(f"{device} {name} {label}"):
                verdict = check_kernel(kernel, device, dtype)
            wrong += [f"{device}, {name}, {label}: {line}" for line in verdict.wrong]
            error = "not served" if verdict.worst is None else f"{verdict.worst:.0e}"
            cells.append(Text(f"wrong ({len(verdict.wrong)})", "red") if verdict.wrong else Text(error))
        table.add_row(device_name(device), name, *cells)
    console.print(table)
    for line in wrong:
        console.print(f"wrong: {line}", style="red", soft_wrap=True)
    bad = 'some kernels are wrong here: `kernel="auto"` leaves out triton where it is; name another than the others'
    console.print(bad if wrong else "all that is served can be trusted")
    return not wrong
