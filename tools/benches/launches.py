"""Kernels that attention layers would launch on a GPU, and the host's time for that; both counted without a GPU.

Triton's kernels are not launched, and torch's run on the CPU over a few narrow tokens, where they take about as long as to
launch them. What a GPU then computes is not in these numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Annotated, Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tools.benches import harness
from tools.benches.harness import Record, Row, text_of
from tools.benches.screen import Option
from zoo import layers as zoo_layers
from zoo.attention import dispatch
from zoo.attention.triton import TritonKernel, lanes, op
from zoo.attention.triton.common import shared_limit
from zoo.layers import Attention, Block, layer_terms
from zoo.positions import Positions
from zoo.priors import alibi
from zoo.registry import create_model

# Operations that launch nothing: memory without values, and numbers of the host. Views are known by their schema.
SILENT = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
    "_unsafe_view",
}
SILENT |= {"promote_types", "scalar_tensor"}
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "_unique2",
    "masked_select",
}  # for values of a device
OPERATORS = {"attention": op.attention_op, "attention_backward": op._backward_op}
LAYERS, HEADS, WIDTH = 12, 12, 8  # heads so narrow that their products take no time beside their launch


class Launches(TorchDispatchMode):
    """Inside it operations are counted. Our own operators are not: what is in them is.

    Attributes:
        names: of torch's kernels, in their order.
        triton: launches of Triton's, if inside `launching(self)` too.
        refused: names of operations that raise RuntimeError.
    """

    def __init__(self, refused: set[str] | None = None) -> None:
        super().__init__()
        self.names: list[str] = []
        self.triton = 0
        self.refused = refused or set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.refused:
            raise RuntimeError(f"{name} waits for values of a device")
        if func.namespace == "priorzoo":
            with self:
                return OPERATORS[name]._init_fn(*args)
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not views and name not in SILENT:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def launching(seen: Launches | None = None, *, together: bool = True) -> Iterator[None]:
    """Inside the context Triton's kernels are not launched but counted, and choices are those made for an H200.

    together: whether the terms of layers are made for all of them at once; else by each.
    """

    def launch(*_: Any, **__: Any) -> None:
        if seen is not None:
            seen.triton += 1

    device = SimpleNamespace(utils=SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 232448}))
    shared_limit.cache_clear()
    try:
        with (
            patch.object(JITFunction, "run", launch),
            patch.object(InterpretedFunction, "run", launch),
            patch.object(driver, "_active", device),
            patch.object(zoo_layers, "costs_launches", lambda x: together),
            patch.object(alibi, "ramp_kernel", lambda ramp: lanes.ramp_lanes),
            patch.object(dispatch, "_hides_nothing", lambda segments: False),  # which looks at values on the CPU alone
        ):
            yield
    finally:
        shared_limit.cache_clear()


def attention_layers(method: str, *, dtype: torch.dtype = torch.bfloat16) -> list[Attention]:
    """The attention layers of a text model of this method, with its lanes beside the heads' columns."""
    torch.manual_seed(0)
    size = dict(dim=HEADS * WIDTH, num_heads=HEADS, num_layers=LAYERS, hidden_dim=32, vocab_size=32)
    model = create_model(f"text_{method}_small", **size, lanes="beside").to(dtype)
    return [cast(Block, layer).attention for layer in model.layers]


def forward_of(layers: list[Attention], *, documents: bool, plan: bool, tokens: int = 16) -> Callable[[], Tensor]:
    """The forward pass of all layers over a row, by the fused kernel."""
    kernel = TritonKernel(least_keys=1 if plan else 1 << 40, decode_queries=0, interpreted=lambda: True)
    x = torch.randn(1, tokens, HEADS * WIDTH, dtype=layers[0].query.weight.dtype, requires_grad=True)
    segments = (torch.arange(tokens) >= tokens // 2).int()[None] if documents else None

    def forward() -> Tensor:
        at = Positions.line(tokens) if segments is None else Positions.documents(segments)
        y = x
        for layer, made in zip(layers, layer_terms(layers, at, x), strict=True):
            y = layer(y, at, segments=segments, kernel=kernel, made=made)
        return y

    return forward


def count(method: str, *, documents: bool = False, plan: bool = True, together: bool = True) -> Row:
    """Per layer: kernels of torch and launches of Triton, forward and backward."""
    forward = forward_of(attention_layers(method), documents=documents, plan=plan)
    found: Row = {}
    seen = Launches()
    with launching(seen, together=together), seen:
        out = forward()
    back = Launches()
    with launching(back), back:
        out.sum().backward()
    for name, counted in (("forward", seen), ("backward", back)):
        found |= {f"{name}_torch": len(counted.names) / LAYERS, f"{name}_triton": counted.triton / LAYERS}
    return found


def host_us(
    method: str, *, documents: bool = False, plan: bool = True, together: bool = True, seconds: float = 2.0
) -> float:
    """Microseconds of the processor for a layer's forward pass, the tenth percentile of at least ten runs.

    In float32 and on one thread: its four products here then take about as long as to launch them; those of bfloat16 take three
    times as long, and waking a second thread for each operation doubles the whole."""
    forward = forward_of(attention_layers(method, dtype=torch.float32), documents=documents, plan=plan)
    times: list[float] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with launching(together=together):
            forward()
            end = time.perf_counter() + seconds
            while len(times) < 10 or time.perf_counter() < end:
                start = time.thread_time()  # time in which other processes have the core is not the layer's
                forward()
                times.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return 1e6 * sorted(times)[len(times) // 10] / LAYERS


def main(
    methods: Annotated[str, Option(help="position methods, with _ssmax if wanted")] = (
        "nope,ggd,ggd_ssmax,kerple,alibi,goat,ggd_goat,rope"
    ),
    seconds: harness.Seconds = 2.0,
    out: harness.Out = None,
    commit: harness.Commit = "",
) -> None:
    """Kernels and launches of an attention layer, per layer of twelve, with the terms of layers made by each and together."""
    about = {"layers": LAYERS, "heads": HEADS, "dtype": "bfloat16", "host_dtype": "float32", "host_threads": 1}
    record = Record({"benchmark": "launches", **about}, out=out, commit=commit)

    def measured(method: str, documents: bool, together: bool) -> list[Row]:
        of: dict[str, Any] = dict(documents=documents, together=together)
        row = {"method": method, "row": "documents" if documents else "one document", **of, **count(method, **of)}
        return [row | {"host_us": host_us(method, **of, seconds=seconds)}]

    with record.status:
        record.measure(
            (f"{method}, {'documents' if documents else 'one document'}", "launches", lambda c=cell: measured(*c))
            for cell in ((m, d, t) for d in (False, True) for m in harness.words(methods) for t in (False, True))
            for method, documents in [cell[:2]]
        )
    columns = {
        "method": text_of("method"),
        "terms": lambda row: "together" if row["together"] else "by layer",
        "torch": text_of("forward_torch", ".1f"),
        "triton": text_of("forward_triton", ".1f"),
        "torch, backward": text_of("backward_torch", ".1f"),
        "triton, backward": text_of("backward_triton", ".1f"),
        "host µs, forward": text_of("host_us", ".0f"),
    }
    record.show(f"per layer of {LAYERS}, with a plan, as from 4,096 keys on", columns, text_of("row"))
