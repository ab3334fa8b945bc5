"""Compile the Triton kernels for a GPU that need not be there, and say what each takes of a multiprocessor.

    python tools/compile_kernels.py                                  every kernel, for compute capability 9.0
    python tools/compile_kernels.py --capability 8.0
    python tools/compile_kernels.py --modules forward --widths 64 --dtypes bfloat16 --variants table --out report.json

Needs triton and torch; no GPU, no CUDA. Launch functions are called with tensors on the CPU, and every kernel they launch
is compiled and not run. Exit code 1 if a kernel spills registers, has its matrix products serialised (ptxas C7510 to
C7515), touches a register that a product in flight reads or adds to (tools/gpu/hazard.py), needs more shared memory than a
block may have, or fails to compile; --lenient lets the first two, which are slow and not wrong, pass. Registers and counts of
instructions say what may bind; times they are not. `make kernels` does this with the oldest Triton too.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

from tools.benches.harness import numbers, one_of, words
from tools.benches.screen import console
from tools.gpu.hazard import hazards
from zoo.attention.triton import WIDEST
from zoo.cli import call
from zoo.files import write_json

app = typer.Typer(add_completion=False, help=(__doc__ or "").split("\n", maxsplit=1)[0])

BATCH, HEADS, GROUPS, LENGTH = 1, 2, 1, 1024
LANES = 16
# Bytes of shared memory that a block may have, and that a multiprocessor has (CUDA programming guide, compute capabilities).
SHARED = {"8.0": (163 * 1024, 164 * 1024), "9.0": (227 * 1024, 228 * 1024)}
REGISTERS, WARPS, RESERVED = 65536, 64, 1024  # of a multiprocessor; bytes of shared memory the system takes of a block
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# What a call has beside queries, keys and values.
VARIANTS: dict[str, set[str]] = {
    "bare": set(),
    "lanes": {"lanes"},
    "table": {"table"},
    "window": {"table", "segments", "window"},
    "window_lanes": {"lanes", "segments", "window"},
    "all": {"table", "row_scale", "segments", "window", "plan"},
    "grid": {"table", "row_scale", "grid", "plan"},
    "bias": {"bias"},
}
MODULES = ("forward", "lanes", "backward", "table_grad", "bias_grad", "plan", "decode")


@dataclass(frozen=True)
class Row:
    """A compiled kernel. spill: bytes of its stack, where registers go that do not fit; shared: bytes; table_loads: loads
    from the table in all of its loops; unit: the instruction that multiplies matrices, empty if none does; serialised:
    whether ptxas lets each wait for the one before; hazards: instructions that touch a register of one in flight."""

    module: str
    kernel: str
    width: int
    dtype: str
    variant: str
    warps: int
    registers: int
    spill: int
    shared: int
    blocks: int
    table_loads: int
    unit: str
    serialised: bool
    hazards: int


def compile_only(capability: str) -> list[tuple[str, Any]]:
    """From here on launches compile for `capability` and do not run; they add (name, compiled kernel) to the list returned.

    A compiled kernel has `ptxas_log`, what ptxas said of it."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target = GPUTarget("cuda", int(capability.replace(".", "")), 32)
    nowhere = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
        is_active=lambda: True,
        utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED[capability][0]}),
    )
    driver.set_active(nowhere)
    launch, found = JITFunction.run, []
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = (
        True  # from the cache on disk it comes without a log
    )

    def compile_it(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = launch(self, *args, **{**kwargs, "warmup": True})
        kernel.ptxas_log = getattr(kernel, "ptxas_log", "") + log.getvalue()
        found.append((self.__name__, kernel))
        return kernel

    JITFunction.run = compile_it
    return found


def launches(
    width: int, dtype: torch.dtype, has: set[str], length: int = LENGTH, step: int = 1
) -> dict[str, Callable[[], Any]]:
    """By module, a call of its launch function on unset tensors for what a variant `has`. A grid is 32 × 31 patches after
    32 tokens without a place, and LENGTH long; decoding is of `step` queries on a line."""
    from zoo.attention.triton import common

    grid = (32, 31, 32) if "grid" in has else (0, 0, 0)
    origin = 63 * 61 // 2 if "grid" in has else length - 1
    window = 256 if "window" in has else 0
    lanes = LANES if "lanes" in has else 0
    line = (width + lanes, width, lanes, "grid" not in has, window, origin, *grid)
    geometry = common.Geometry(BATCH, HEADS, GROUPS, length, length, *line)
    few = common.Geometry(BATCH, HEADS, GROUPS, step, length, *line[:6])
    q, new, k = (
        torch.empty(BATCH, heads, tokens, width + lanes, dtype=dtype)
        for heads, tokens in ((HEADS, length), (HEADS, step), (GROUPS, length))
    )
    out, v = q[..., lanes:].contiguous(), k[..., lanes:].contiguous()
    table = torch.empty(HEADS, 63 * 61 if "grid" in has else 2 * length - 1) if "table" in has else None
    scale = torch.empty(1, HEADS, length) if "row_scale" in has else None
    segments = torch.zeros(BATCH, length, dtype=torch.int32) if "segments" in has else None
    tiles = torch.zeros(2, BATCH * HEADS, -(-length // common.TILE), dtype=torch.int32)
    plan = SimpleNamespace(rows=tiles, cols=tiles, tile=common.TILE) if "plan" in has else None
    lse = torch.empty(BATCH, HEADS, length)
    log_factor = table is not None and "grid" not in has  # two params a head, as of GGD, and of it along two axes
    jacobian = None if table is None else torch.empty(2 - log_factor, *table.shape)

    bias = torch.empty(BATCH, HEADS, length, length) if "bias" in has else None
    call = common.Operands(q, k, v, table, scale, segments, geometry, bias)

    def of(module: str, name: str) -> Callable[..., Any]:
        return getattr(importlib.import_module(f"zoo.attention.triton.{module}"), name)

    upstream = of("backward", "OutputGradient")(out, lse, lse)
    calls = {
        "forward": lambda: of("forward", "attention_forward")(call, plan),
        "backward": lambda: of("backward", "attention_backward")(
            call, of("backward", "output_gradient")(out, out, lse, geometry), plan, jacobian, log_factor
        ),
        "plan": lambda: of("plan", "make_plan")(call).cols,
    }
    if table is not None:
        calls["table_grad"] = lambda: of("table_grad", "table_gradient")(call, upstream, plan)
    if lanes:
        apart = torch.empty(1, HEADS, length, lanes), torch.empty(1, 1, length, lanes)
        ramp = torch.empty(1, HEADS, length, dtype=torch.float64)
        calls["lanes"] = lambda: (
            of("lanes", "ramp_lanes")(ramp, ramp, 5, torch.float32),
            of("lanes", "fold")(q[..., lanes:], k[..., lanes:], *apart),
        )
    if bias is not None:
        calls["bias_grad"] = lambda: of("bias_grad", "bias_gradient")(call, upstream)
    if "grid" not in has and bias is None:
        one = None if scale is None else scale[..., -step:]
        step_call = common.Operands(new, k, v, table, one, segments, few)
        calls["decode"] = lambda: of("decode", "decode")(step_call, splits=4)
    return calls


def examine(kernel: Any, capability: str) -> dict[str, Any]:
    """Of a compiled kernel: warps, registers, spill, shared, blocks that fit on a multiprocessor, table_loads, unit,
    serialised, hazards."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run(
                [knobs.nvidia.cuobjdump.path, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage said nothing of registers: {usage!r}")
    registers, spill = int(found[1]), int(found[2])
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    fits = (
        REGISTERS // (-(-registers // 8) * 8 * 32 * warps),  # registers are given out by eights
        SHARED[capability][1] // (shared + RESERVED),
        WARPS // warps,
    )
    unit = next((name for name in ("HGMMA", "HMMA") if re.search(rf"\b{name}\.", code)), "")
    if not unit and "tt.dot" in kernel.asm["ttgir"]:
        unit = "FFMA"
    loads = len(re.findall(r"\bLDG\.E\.CONSTANT\b", code))
    return dict(
        warps=warps,
        registers=registers,
        spill=spill,
        shared=shared,
        blocks=min(fits),
        table_loads=loads,
        unit=unit,
        serialised=re.search(r"\(C751[0-5]\)", kernel.ptxas_log) is not None,
        hazards=len(hazards(code)[2]) if unit == "HGMMA" else 0,
    )


def shown(rows: list[Row], capability: str) -> Table:
    """The rows as a table, with what is amiss in red."""
    names = [name for name in Row.__dataclass_fields__ if name != "module"]
    table = Table(*(name.replace("_", " ") for name in names), title=f"compute capability {capability}")
    for row in rows:
        style = "red" if wrong(row, capability) else "yellow" if slow(row) else None
        table.add_row(*(str(getattr(row, name)) for name in names), style=style)
    return table


def slow(row: Row) -> bool:
    """Whether the kernel spills, or waits for each of its products."""
    return row.spill > 0 or row.serialised


def wrong(row: Row, capability: str) -> bool:
    """Whether the kernel asks for more shared memory than a block may have, or touches a register of a product in flight."""
    return row.shared > SHARED[capability][0] or row.hazards > 0


@app.command()
def main(
    capability: Annotated[str, typer.Option(help="8.0 or 9.0")] = "9.0",
    modules: Annotated[str, typer.Option(help="of zoo/attention/triton")] = ",".join(MODULES),
    widths: Annotated[str, typer.Option(help="columns of q, k and v")] = "32,64,128,256",
    dtypes: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bfloat16,float32",
    variants: Annotated[str, typer.Option(help=", ".join(VARIANTS))] = ",".join(VARIANTS),
    lenient: Annotated[bool, typer.Option("--lenient", help="spills and serialised products are no error")] = False,
    out: Annotated[Path | None, typer.Option(help="write the rows as JSON")] = None,
) -> None:
    """Compile, tabulate, and exit with 1 if anything is amiss."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise typer.BadParameter("TRITON_INTERPRET=1 is set: the interpreter compiles nothing, unset it")
    one_of("capability", capability, SHARED)
    names = [one_of("modules", name, MODULES) for name in words(modules)]
    wanted = itertools.product(
        [one_of("dtypes", name, DTYPES) for name in words(dtypes)],
        numbers("widths", widths),
        [one_of("variants", name, VARIANTS) for name in words(variants)],
    )
    found = compile_only(capability)
    rows: list[Row] = []
    failures: list[str] = []
    for dtype, width, variant in wanted:
        if "lanes" in VARIANTS[variant] and width + LANES > WIDEST:
            continue  # the kernel refuses such calls
        calls = launches(width, DTYPES[dtype], VARIANTS[variant])
        for module in (name for name in names if name in calls):
            found.clear()
            try:
                calls[module]()
            except Exception as error:  # a compiler's errors have no common type
                failures.append(f"{module} {width} {dtype} {variant}: {str(error).splitlines()[:1]}")
            # A kernel may be launched several times by a call, each time compiled for something else or the same.
            for kernel, compiled in {id(compiled): (kernel, compiled) for kernel, compiled in found}.values():
                rows.append(Row(module, kernel, width, dtype, variant, **examine(compiled, capability)))
    console.print(shown(rows, capability), width=max(150, console.width))
    for line in failures:
        console.print(line, style="red", markup=False)
    import triton

    if out is not None:
        about = {"capability": capability, "triton": triton.__version__}
        write_json(out, {**about, "rows": [asdict(row) for row in rows], "failures": failures})
    amiss, waiting = sum(wrong(row, capability) for row in rows), sum(slow(row) for row in rows)
    console.print(
        f"Triton {triton.__version__}: {len(rows)} kernels, {waiting} that spill or have serialised products, {amiss} with "
        f"register hazards or too much shared memory, {len(failures)} calls that failed"
    )
    raise typer.Exit(1 if amiss or failures or not rows or (waiting and not lenient) else 0)


if __name__ == "__main__":
    sys.exit(call(app, None, prog="tools/compile_kernels.py"))
