"""Which kernel `auto` takes on CUDA, the warning where none fits, kernel 'flash' beside the oracle, and torch.compile.

No GPU is needed: tensors that only claim to be on CUDA are torch's fake ones, or those of the CPU with `on_cuda` set.
"""

from __future__ import annotations

import math
import sys
import warnings
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from tests.zoo.priors_table import GRID, WIDTH, make
from zoo import Positions, prior_attention
from zoo.attention import KERNELS, Kernel
from zoo.attention.base import AttentionCall
from zoo.attention.dispatch import MaskWarning, choose_kernel
from zoo.attention.flash import FlashKernel, find_package
from zoo.attention.triton import TritonKernel
from zoo.priors.base import PriorTerms, RelativeTable
from zoo.priors.tables import _Sum

MISSING = "the flash-attn package is not installed"


def hopper(device: str) -> tuple[int, int]:
    """Compute capability of a GPU that flash attention runs on."""
    return 9, 0


def flash(missing: str | None = MISSING, **options: Any) -> FlashKernel:
    """Kernel 'flash' on such a GPU, without flash-attn unless `missing` is None."""
    return FlashKernel(**{"capability": hopper, "package": lambda: missing} | options)


def kernels_on(capability=hopper, missing: str | None = MISSING, distrust: str | None = None) -> dict[str, Kernel]:
    return KERNELS | {
        "flash": flash(missing, capability=capability),
        "triton": TritonKernel(capability=capability, distrust=lambda device, dtype: distrust),
    }


class Refusing:
    """A kernel that serves nothing, or, without a reason, would serve everything."""

    def __init__(self, reason: str | None) -> None:
        self.reason = reason

    def refuses(self, call: AttentionCall) -> str | None:
        return self.reason

    def run(self, call: AttentionCall) -> Tensor:
        raise NotImplementedError


@pytest.fixture
def claimed(monkeypatch):
    """Tensors of the CPU pass for tensors on CUDA."""
    monkeypatch.setattr(AttentionCall, "on_cuda", True)


def cuda_call(
    *, dtype=torch.bfloat16, queries=16, keys=16, width=64, lanes=0, table=False, bias="", window=None, causal=True
) -> AttentionCall:
    """Inside FakeTensorMode: a call on CUDA that holds no data."""
    q, k, v = (torch.empty(2, 4, n, width, dtype=dtype, device="cuda") for n in (queries, keys, keys))
    terms = PriorTerms()
    if lanes:
        terms += PriorTerms(*(torch.empty(1, 1, n, lanes, device="cuda") for n in (queries, keys)))
    if table:
        numbers = torch.empty(4, queries + keys - 1, device="cuda")
        places = Positions.line(queries, offset=keys - queries), Positions.line(keys)
        terms += PriorTerms(table=RelativeTable.line(numbers, *places, center=queries - 1))
    if bias:
        matrix = torch.empty(1, 4, queries, keys, device="cuda")
        terms += PriorTerms(bias=matrix if bias == "matrix" else _Sum((matrix, matrix)))
    return AttentionCall(q, k, v, terms, causal, window=window)


HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
# options of the call -> kernel without and with the flash-attn package
CHOICES = {
    "plain": ({}, "flash", "flash"),
    "plain-float16": ({"dtype": torch.float16}, "flash", "flash"),
    "plain-float32": ({"dtype": SINGLE}, "sdpa", "sdpa"),
    "bidirectional": ({"causal": False, "queries": 9}, "flash", "flash"),
    "lanes": ({"lanes": 4}, "flash", "flash"),
    "wide": ({"width": 256, "lanes": 8}, "sdpa", "sdpa"),
    "decode": ({"queries": 1, "lanes": 4}, "flash", "flash"),
    "offset": ({"queries": 4}, "triton", "flash"),
    "offset-float32": ({"queries": 4, "dtype": SINGLE}, "triton", "triton"),
    "window": ({"window": 5}, "triton", "flash"),
    "window-float32": ({"window": 5, "dtype": SINGLE}, "triton", "triton"),
    "table": ({"table": True}, "triton", "triton"),
    "table-float32": ({"table": True, "dtype": SINGLE}, "triton", "triton"),
    "bias": ({"bias": "matrix", "causal": False}, "triton", "triton"),
    "table-lanes-window": ({"table": True, "lanes": 4, "window": 3}, "triton", "triton"),
    "table-decode": ({"table": True, "queries": 1}, "triton", "triton"),
    "table-few-queries": ({"table": True, "queries": 8, "keys": 40}, "triton", "triton"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_on_cuda(name: str) -> None:
    pytest.importorskip("triton")
    options, without, with_package = CHOICES[name]
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error", MaskWarning)
        call = cuda_call(**options)
        assert call.on_cuda
        assert choose_kernel(call, kernels_on()) == without
        assert choose_kernel(call, kernels_on(missing=None)) == with_package


SLOW = {
    "plain-float64": ({"dtype": DOUBLE}, "float64"),
    "table-float64": ({"table": True, "dtype": DOUBLE}, "float64"),
    "table-wide": ({"table": True, "width": 256, "lanes": 8}, "256"),
    "window-wide": ({"window": 5, "width": 264}, "256"),
    "bias-by-blocks": ({"bias": "blocks"}, "relative table or lanes"),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_mask_on_cuda_is_said_once_with_its_reason(name: str) -> None:
    pytest.importorskip("triton")
    options, words = SLOW[name]
    kernels, warned = kernels_on(), set()
    with FakeTensorMode():
        call = cuda_call(**options)
        with pytest.warns(MaskWarning, match=words) as heard:
            assert choose_kernel(call, kernels, warned=warned) == "sdpa" == choose_kernel(call, kernels, warned=warned)
        assert len(heard) == 1
        kernels["triton"] = Refusing("the package triton is not installed")
        with pytest.warns(MaskWarning, match="not installed"):  # another reason warns again
            assert choose_kernel(cuda_call(table=True), kernels, warned=warned) == "sdpa"


METHODS = [name for name in zoo.list_models("text_*_tiny") if "_ssmax" not in name]
TINY = [*METHODS, "text_ggd_goat_ssmax_tiny", "dna_goat_tiny", *zoo.list_models("vision_*2d*_ssmax_tiny_patch8")]


@pytest.mark.parametrize("name", TINY)
def test_models_make_all_they_need_where_their_input_is(name: str) -> None:
    """On "meta", which is not the default device, as CUDA is not."""
    model = zoo.create_model(name, num_layers=2).to("meta")  # terms of several layers are made together
    shape = (2, 3, 48, 48) if name.startswith("vision") else (2, 40)
    x = torch.empty(shape, device="meta") if len(shape) == 4 else torch.empty(shape, device="meta", dtype=torch.long)
    assert model(x).is_meta


@pytest.mark.parametrize(
    "queries, options", [(40, {"lanes": 4}), (40, {"bias": "matrix"}), (1, {"lanes": 4}), (1, {"table": True})]
)
def test_the_fused_kernel_propagates_shapes(queries: int, options: dict[str, Any]) -> None:
    pytest.importorskip("triton")

    def see(device: str, dtype: torch.dtype) -> str:
        raise AssertionError("a self-check needs values")

    with FakeTensorMode():
        call = cuda_call(queries=queries, keys=40, **options)
        kernel = TritonKernel(capability=hopper, distrust=see)
        out = prior_attention(call.q, call.k, call.v, call.terms, causal=True, kernel=kernel)
        assert out.shape == call.q.shape and out.device.type == "cuda" and out.dtype == call.q.dtype
        # Without CUDA torch has no thread for the gradients of its tensors.
        q, k, v = (torch.empty(x.shape, dtype=x.dtype, requires_grad=True) for x in (call.q, call.k, call.v))
        kernel = TritonKernel(interpreted=lambda: True, decode_queries=0)
        out = prior_attention(q, k, v, causal=True, kernel=kernel)
        assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [x.shape for x in (q, k, v)]


class StaysOnTheDevice(TorchDispatchMode):
    """Raises where a tensor comes from another device or goes to one: either waits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args, out) if isinstance(t, Tensor)]
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten.lift_fresh.default):
            assert {t.device.type for t in tensors} == {"meta"}, func
        return out


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "ggd", "goat", "cable", *GRID])
def test_priors_do_not_wait_for_a_device(name: str, monkeypatch) -> None:
    """A tensor on "meta" has no data: reading a number back raises."""
    monkeypatch.setattr(torch, "autocast", lambda *given, **options: nullcontext())  # it knows no "meta"
    options = {"learnable": False} if name.startswith("alibi") else {}
    prior = make(name, num_heads=4, **options).to("meta")
    pos = Positions.grid(3, 4, num_prefix=1) if name in GRID else Positions.line(13)
    x = torch.empty(1, 13, WIDTH, device="meta")
    with StaysOnTheDevice():
        terms = prior(pos, pos, causal=name not in GRID, x=x)
    found = [terms.q_lanes, terms.k_lanes, None if terms.table is None else terms.table.table]
    assert {t.device.type for t in found if t is not None} == {"meta"}


def test_ids_are_not_read_back_from_a_device() -> None:
    """A fake tensor has no data: looking at it raises. So the ids reach the kernel even if they hide nothing."""
    seen = []
    kernel = SimpleNamespace(refuses=lambda call: None, run=lambda call: seen.append(call.segments) or call.q)
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 16, device="cuda")
        ids = torch.empty(1, 8, dtype=torch.long, device="cuda")
        prior_attention(q, q, q, causal=True, segments=ids, kernel=kernel)
    assert seen[0] is ids


def test_what_flash_refuses(claimed, monkeypatch) -> None:
    half = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    table = PriorTerms(table=RelativeTable.line(torch.zeros(2, 15), *(Positions.line(8),) * 2, center=7))
    ids = torch.tensor([[0, 0, 1, 1, 0, 2, 2, 2]])

    def refusal(missing=MISSING, **options):
        with pytest.raises(ValueError) as raised:
            prior_attention(*options.pop("heads", (half,) * 3), causal=True, kernel=flash(missing), **options)
        return str(raised.value)

    assert "kernel='triton'" in refusal(terms=table)
    assert "torch.float32" in refusal(heads=(half.float(),) * 3)
    assert "torch.bfloat16, torch.float16" in refusal(heads=(half, half, half.half()))
    assert "264" in refusal(heads=(torch.zeros(1, 2, 8, 264, dtype=torch.bfloat16),) * 3)
    for needs in ({"window": 3}, {"segments": ids}):
        assert MISSING in refusal(**needs) and "kernel='triton'" in refusal(**needs)
    assert "recurs" in refusal(None, segments=ids)
    monkeypatch.setattr(AttentionCall, "on_cuda", False)
    assert "the queries are on cpu" in refusal()


def attend(q, k, v, *, softmax_scale, causal, window_size, deterministic):
    """flash_attn_func as its documentation has it: (B, length, heads, width), masks aligned to the last query and key."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    assert k.shape[2] == v.shape[2] and q.shape[2] % k.shape[2] == 0 and softmax_scale == 1.0
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k)
    distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    left, right = window_size
    right = 0 if causal else right
    hidden = ((distance > left) & (left >= 0)) | ((distance < -right) & (right >= 0))
    return torch.einsum("bhij,bjhd->bihd", logits.masked_fill(hidden, -math.inf).softmax(-1), v)


def attend_runs(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    """flash_attn_varlen_func: (total, heads, width), a sequence between neighbouring entries of cu_seqlens."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert int(cu_seqlens_q[-1]) == len(q) and int(cu_seqlens_k[-1]) == len(k) == len(v)
    runs = [
        torch.tensor_split(x, cu[1:-1].long()) for x, cu in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
    ]
    assert (max(map(len, runs[0])), max(map(len, runs[1]))) == (max_seqlen_q, max_seqlen_k)
    assert min(map(len, runs[0])) > 0
    return torch.cat([attend(*(x[None] for x in run), **options)[0] for run in zip(*runs, strict=True)])


@pytest.fixture
def package(claimed, monkeypatch) -> ModuleType:
    """A flash-attn that computes in float64 on the CPU, so that differences are errors."""
    made = ModuleType("flash_attn")
    made.__version__ = "2.8.3"
    made.flash_attn_func, made.flash_attn_varlen_func = attend, attend_runs
    monkeypatch.setitem(sys.modules, "flash_attn", made)
    return made


# q heads are 4; k and v heads, T, S, widths of content and values, and what differs from a causal call without a mask
CALLS = {
    "plain": {},
    "grouped": {"groups": 2},
    "grouped-apart": {"groups": 2, "value_groups": 1},
    "odd-width": {"width": 10, "value_width": 13},
    "wide-values": {"value_width": 24},
    "lanes": {"lanes": 3},
    "lanes-of-heads": {"lanes": 3, "lane_heads": 4, "groups": 2},
    "bidirectional": {"causal": False},
    "more-keys": {"causal": False, "queries": 5},
    "more-queries": {"causal": False, "keys": 5},
    "decode": {"queries": 1, "groups": 2},
    "scale": {"scale": True, "lanes": 3},
}
MASKED = {
    "offset": {"queries": 5, "groups": 2},
    "window": {"window": 3},
    "window-of-one": {"window": 1},
    "window-offset": {"queries": 5, "window": 4},
    "window-bidirectional": {"causal": False, "window": 3, "groups": 2},
    "documents": {"ids": ((0, 0, 0, 1, 1, 1, 1, 1, 1, 2, -1), (7,) * 11)},
    "documents-groups": {"ids": ((0,) * 4 + (5,) * 7, (3,) * 10 + (1,)), "groups": 2, "lanes": 3},
    "documents-offset": {"ids": ((0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3), (7,) * 11), "queries": 6},
    "documents-decode": {"ids": ((0,) * 4 + (5,) * 7, (3,) * 10 + (1,)), "queries": 1, "groups": 2},
    "documents-window": {"ids": ((0,) * 4 + (5,) * 7, (3,) * 10 + (1,)), "window": 2, "causal": False},
}


def call_of(
    *, groups=4, value_groups=0, queries=11, keys=11, width=16, value_width=0, lanes=0, lane_heads=1, scale=False,
    causal=True, window=None, ids=None,
) -> tuple[list[Tensor], dict]:  # fmt: skip
    """Float64 leaves q, k, v, lanes, scale, and the options that are none."""
    generator = torch.Generator().manual_seed(2)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    leaves = [leaf(2, 4, queries, width), leaf(2, groups, keys, width)]
    leaves.append(leaf(2, value_groups or groups, keys, value_width or width))
    leaves += [leaf(1, lane_heads, queries, lanes), leaf(1, lane_heads, keys, lanes)] if lanes else []
    leaves += [leaf(4, queries)] if scale else []
    return leaves, {"causal": causal, "window": window, "segments": None if ids is None else torch.tensor(ids)}


def evaluate(case: dict, kernel: str | Kernel) -> list[Tensor]:
    """The output and the gradient of every leaf."""
    leaves, options = call_of(**case)
    lanes = leaves[3:5] if case.get("lanes") else (None, None)
    scale = leaves[-1] if case.get("scale") else None
    out = prior_attention(*leaves[:3], PriorTerms(*lanes), query_scale=scale, kernel=kernel, **options)
    return [out, *torch.autograd.grad(out.sin().sum(), leaves)]


@pytest.mark.parametrize("name", CALLS | MASKED)
def test_the_package_is_called_so_that_it_computes_the_oracle(name: str, package) -> None:
    case = (CALLS | MASKED)[name]
    kernel = flash(dtypes=(torch.float64,), package=find_package)
    for got, want in zip(evaluate(case, kernel), evaluate(case, "reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", CALLS)
def test_without_the_package_torch_computes_the_oracle(name: str, claimed) -> None:
    kernel = flash(dtypes=(torch.float64,))
    for got, want in zip(evaluate(CALLS[name], kernel), evaluate(CALLS[name], "reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


def test_documents_choose_the_package_and_are_found_once(package) -> None:
    """All layers share the ids: they are read back from the device once, and again when they changed."""
    kernel = flash(None, dtypes=(torch.float64,))
    kernels = KERNELS | {"flash": kernel, "triton": Refusing(None)}
    heads = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    call = AttentionCall(heads, heads, heads, PriorTerms(), True, None, ids)
    assert choose_kernel(call, kernels) == "flash"
    found = kernel.runs_of(ids, 0)
    for _ in range(3):
        prior_attention(heads, heads, heads, causal=True, segments=ids, kernel=kernel)
    assert kernel.runs_of(ids, 0) is found
    ids[0, 2] = 1
    got = prior_attention(heads, heads, heads, causal=True, segments=ids, kernel=kernel)
    assert kernel.runs_of(ids, 0) is not found
    torch.testing.assert_close(got, prior_attention(heads, heads, heads, causal=True, segments=ids, kernel="reference"))
    ids[0] = torch.tensor([0, 1, 0, 2, 2, 2])
    assert choose_kernel(call, kernels) == "triton"


def compiled(function, *given):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")(*given)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernel"), [("ggd", "auto"), ("goat", "reference")])
def test_a_call_with_documents_compiles_to_one_graph(name: str, kernel: str) -> None:
    prior = make(name)
    x, ids = (
        torch.randn(2, 3, 300, 8, dtype=torch.float64),
        torch.arange(300).div(170, rounding_mode="floor").expand(2, -1),
    )
    line = Positions.line(300)

    def attention(x: Tensor, ids: Tensor) -> Tensor:
        terms = prior(line, line, causal=True)
        return prior_attention(x, x, x, terms, causal=True, segments=ids, window=90, kernel=kernel)

    leaf = x.clone().requires_grad_()
    numbers = [p for p in prior.parameters() if p.requires_grad]
    results = [run(leaf, ids) for run in (attention, lambda *given: compiled(attention, *given))]
    grads = [torch.autograd.grad(out.sin().sum(), [leaf, *numbers]) for out in results]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-10)
