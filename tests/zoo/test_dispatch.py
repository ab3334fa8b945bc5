"""Which kernel `auto` takes on CUDA, the warning where none fits, kernel 'flash' beside the oracle,
and torch.compile.

No GPU is needed: tensors that only claim to be on CUDA are torch's fake ones, or those of the CPU
with `on_cuda` set.
"""

from __future__ import annotations

import math
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import zoo
from tests.zoo.priors_table import make
from tests.zoo.test_attention import CASES, build, evaluate, terms_of
from zoo import Positions, prior_attention
from zoo.attention import KERNELS, Kernel
from zoo.attention.call import AttentionCall
from zoo.attention.dispatch import MaskWarning, choose_kernel
from zoo.attention.flash import PACKAGES, FlashKernel, find_package
from zoo.attention.masks import needs_mask
from zoo.attention.triton import TritonKernel
from zoo.priors.base import RelativeTable
from zoo.priors.tables import BlockedBias
from zoo.priors.terms import PriorTerms

MISSING = "the flash-attn package is not installed"


def hopper(device: str) -> tuple[int, int]:
    return 9, 0  # the compute capability of a GPU that flash attention runs on


def flash(missing: str | None = MISSING, **options: Any) -> FlashKernel:
    """Kernel 'flash' on such a GPU, without flash-attn unless `missing` is None or the name of a
    module."""
    package = ("", missing) if missing == MISSING else (missing or "flash_attn", "")
    return FlashKernel(**{"capability": hopper, "package": lambda: package} | options)


def kernels_on(missing: str | None = MISSING) -> dict[str, Kernel]:
    return KERNELS | {
        "flash": flash(missing),
        "triton": TritonKernel(capability=hopper, distrust=lambda *_: None),
    }


def cuda_call(
    *,
    dtype=torch.bfloat16,
    queries=16,
    keys=16,
    width=64,
    lanes=0,
    table=False,
    bias="",
    window=None,
    causal=True,
) -> AttentionCall:
    """Inside FakeTensorMode: a call on CUDA that holds no data."""
    q, k, v = (
        torch.empty(2, 4, n, width, dtype=dtype, device="cuda") for n in (queries, keys, keys)
    )
    terms = PriorTerms()
    if lanes:
        terms += PriorTerms(*(torch.empty(1, 1, n, lanes, device="cuda") for n in (queries, keys)))
    if table:
        numbers = torch.empty(4, queries + keys - 1, device="cuda")
        places = Positions.line(queries, offset=keys - queries), Positions.line(keys)
        terms += PriorTerms(table=RelativeTable.line(numbers, *places, center=queries - 1))
    if bias:
        rows = (
            torch.empty(n, dtype=torch.int64, device="cuda")
            for n in ((queries,), (keys,), (1, queries))
        )
        blocked = BlockedBias(torch.add, *rows, causal, range(4), torch.float32, False, 1)
        terms += PriorTerms(
            bias=torch.empty(1, 4, queries, keys, device="cuda") if bias == "matrix" else blocked
        )
    return AttentionCall(q, k, v, terms, causal, window=window)


SINGLE = torch.float32
DOUBLE = torch.float64
# options of the call, kernel without and with the flash-attn package
CHOICES = [
    ({}, "flash", "flash"),
    ({"dtype": torch.float16}, "flash", "flash"),
    ({"dtype": SINGLE}, "sdpa", "sdpa"),
    ({"causal": False, "queries": 9}, "flash", "flash"),
    ({"lanes": 4}, "flash", "flash"),
    ({"width": 256, "lanes": 8}, "sdpa", "sdpa"),
    ({"queries": 1, "lanes": 4}, "flash", "flash"),
    ({"queries": 4}, "triton", "flash"),
    ({"queries": 4, "dtype": SINGLE}, "triton", "triton"),
    ({"window": 5}, "triton", "flash"),
    ({"window": 5, "dtype": SINGLE}, "triton", "triton"),
    ({"table": True}, "triton", "triton"),
    ({"table": True, "dtype": SINGLE}, "triton", "triton"),
    ({"table": True, "lanes": 4, "window": 3}, "triton", "triton"),
    ({"table": True, "queries": 1}, "triton", "triton"),
]


def test_choices_on_cuda() -> None:
    pytest.importorskip("triton")
    for options, without, with_package in CHOICES:
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("error", MaskWarning)
            call = cuda_call(**options)
            assert call.on_cuda, options
            assert choose_kernel(call, kernels_on()) == without, options
            assert choose_kernel(call, kernels_on(missing=None)) == with_package, options


def attend(q, k, v, *, softmax_scale, causal, window_size, deterministic):
    """flash_attn_func as its documentation has it: (B, length, heads, width), masks aligned to the
    last query and key."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    assert q.shape[-1] % 8 == 0
    assert k.shape[2] == v.shape[2]
    assert q.shape[2] % k.shape[2] == 0
    assert softmax_scale == 1.0
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k)
    distance = (
        torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    )
    left, right = (-1 if side is None else side for side in window_size)
    right = 0 if causal else right
    hidden = ((distance > left) & (left >= 0)) | ((distance < -right) & (right >= 0))
    return torch.einsum("bhij,bjhd->bihd", logits.masked_fill(hidden, -math.inf).softmax(-1), v)


def attend_runs(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    """flash_attn_varlen_func: (total, heads, width), a sequence between neighbouring entries of
    cu_seqlens."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert int(cu_seqlens_q[-1]) == len(q)
    assert int(cu_seqlens_k[-1]) == len(k) == len(v)
    runs = [
        torch.tensor_split(x, cu[1:-1].long())
        for x, cu in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
    ]
    assert (max(map(len, runs[0])), max(map(len, runs[1]))) == (max_seqlen_q, max_seqlen_k)
    assert min(map(len, runs[0])) > 0
    return torch.cat(
        [attend(*(x[None] for x in run), **options)[0] for run in zip(*runs, strict=True)]
    )


@pytest.fixture
def package(monkeypatch) -> ModuleType:
    """A flash-attn that computes in float64 on the CPU, so that differences are errors; tensors of
    the CPU pass for CUDA's."""
    monkeypatch.setattr(AttentionCall, "on_cuda", True)
    made = ModuleType("flash_attn")
    beta = ModuleType("flash_attn.cute")
    made.flash_attn_func = attend
    made.flash_attn_varlen_func = attend_runs
    beta.flash_attn_func = lambda *heads, **options: (attend(*heads, **options), "log-sum-exp")
    beta.flash_attn_varlen_func = lambda *heads, **options: (
        attend_runs(*heads, **options),
        "log-sum-exp",
    )
    for module in (made, beta):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


@pytest.mark.parametrize(
    ("name", "realised"), [(name, ("none", "lanes")[n % 2]) for n, name in enumerate(CASES)]
)
def test_flash_equals_oracle(name: str, realised: str, package) -> None:
    """flash-attn by its documentation, and torch's kernels without it; odd widths are padded."""
    case = CASES[name]
    leaves, options = build(case, realised)
    leaves["v"] = torch.cat([leaves["v"], leaves["v"][..., :5]], -1).detach().requires_grad_()
    expected = evaluate(leaves, options, "reference", case.grid)
    for kernel in (flash(which, dtypes=(DOUBLE,)) for which in (None, "flash_attn.cute", MISSING)):
        call = AttentionCall(leaves["q"], leaves["k"], leaves["v"], terms_of(leaves), **options)
        if kernel.refuses(call):
            assert (not kernel.package_name() and needs_mask(call)) or (
                call.segments is not None and call.offset
            )
            continue
        torch.testing.assert_close(
            evaluate(leaves, options, kernel, case.grid), expected, rtol=1e-10, atol=1e-11
        )


def test_newest_flash_is_found(package, monkeypatch) -> None:
    """4 alone leaves `flash_attn` an empty package; 3 runs on compute capability 9."""
    third = ModuleType("flash_attn_interface")
    third.flash_attn_varlen_func = attend_runs
    monkeypatch.setitem(sys.modules, "flash_attn_interface", third)
    for major, expected in ((9, "flash_attn_interface"), (8, "flash_attn")):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, major=major: (major, 0)
        )
        assert find_package() == (expected, "")
    del package.flash_attn_varlen_func
    assert find_package() == ("flash_attn.cute", "")
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    assert find_package() == ("", MISSING)


def test_documents_choose_package(package) -> None:
    """All layers share the ids: they are read back from the device once, and again when they
    changed."""
    kernel = flash(None, dtypes=(DOUBLE,))
    kernels = KERNELS | {"flash": kernel, "triton": KERNELS["reference"]}
    heads = torch.randn(1, 2, 6, 8, dtype=DOUBLE)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    call = AttentionCall(heads, heads, heads, PriorTerms(), True, None, ids)
    assert choose_kernel(call, kernels) == "flash"
    runs = kernel.runs_of(ids)
    assert kernel.runs_of(ids) is runs
    ids[0, 2] = 1
    assert kernel.runs_of(ids) is not runs
    ids[0] = torch.tensor([0, 1, 0, 2, 2, 2])
    assert choose_kernel(call, kernels) == "triton"


def test_cuda_mask_is_said_once() -> None:
    """A mask on cuda is said once with its reason."""
    pytest.importorskip("triton")
    for words, options in {
        "float64": {"table": True, "dtype": DOUBLE},
        "256": {"window": 5, "width": 264},
        "no dense bias": {"bias": "blocks"},
    }.items():
        warned: set[str] = set()
        with FakeTensorMode():
            call = cuda_call(**options)
            with pytest.warns(MaskWarning, match=words) as issued:
                assert [choose_kernel(call, kernels_on(), warned=warned) for _ in range(2)] == [
                    "sdpa",
                    "sdpa",
                ]
            assert len(issued) == 1


@pytest.mark.parametrize(
    "name",
    [
        "text_ggd_goat_ssmax_tiny",
        "text_cable_tiny",
        "text_t5_tiny",
        "text_fire_tiny",
        "vision_goat_tiny_patch8",
    ],
)
def test_nothing_synchronises(name: str) -> None:
    """On "meta", which is not the default device, as CUDA is not, and whose tensors have no numbers
    to read."""
    shape, dtype = (
        ((2, 3, 48, 48), torch.float32) if name.startswith("vision") else ((2, 40), torch.long)
    )
    assert (
        zoo.create_model(name, num_layers=2)
        .to("meta")(torch.empty(shape, device="meta", dtype=dtype))
        .is_meta
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernel"), [("ggd", "auto"), ("goat", "reference")])
def test_masked_documents_compile(name: str, kernel: str) -> None:
    """A call with documents and a mask compiles to one graph."""
    prior = make(name)
    line = Positions.line(300)
    x = torch.randn(2, 3, 300, 8, dtype=DOUBLE, requires_grad=True)
    ids = (torch.arange(300) // 170).expand(2, -1)
    mask = torch.rand(2, 1, 300, 300) < 0.9

    def attention(x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        terms = prior(line, line, causal=True)
        return prior_attention(
            x, x, x, terms, causal=True, segments=ids, window=90, mask=mask, kernel=kernel
        )

    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    results = [run(x, ids, mask) for run in (attention, compiled)]
    leaves = [x, *(p for p in prior.parameters() if p.requires_grad)]
    grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in results]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-10)
