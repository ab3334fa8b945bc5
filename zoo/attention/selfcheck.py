"""Compare a kernel with float64 on small calls of real priors, forward and backward, before its
first use.

A fused kernel is compiled on the user's machine by a compiler that the project may not know.
`check_kernel` precedes its first call in a process on each device and dtype. A kernel that is wrong
or fails refuses calls; `kernel="auto"` takes another one and logs why. `priorzoo doctor` checks
every kernel in every dtype.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from zoo.attention.call import AttentionCall, Kernel
from zoo.attention.reference import ReferenceKernel
from zoo.positions import Positions
from zoo.priors import create_prior
from zoo.priors.terms import PriorTerms

# Norm of the error over that of the truth: rounding of operands, once in the logits and once in the
# weights, and of sums.
BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5, torch.float64: 1e-11}
# Times as much for gradients of a prior's numbers and of row scales, whose summands cancel.
CANCELLING = 4.0
HEADS = 4


@dataclass(frozen=True)
class Case:
    """A call, in part of a tile.

    trained: gradients of the prior's parameters too.  shape: of a grid behind one prefix token.
    groups: key heads.  documents: where the second begins, or 0.  gradients: or forward alone,
    which a decoding kernel serves.  width: of heads.
    """

    prior: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    trained: bool = False
    queries: int = 200
    keys: int = 200
    shape: tuple[int, int] | None = None
    groups: int = 4
    scaled: bool = False
    documents: int = 0
    gradients: bool = True
    sinks: int = 0
    window: int | None = None
    width: int = 64


CASES = {
    "content": Case(documents=77),
    # In bfloat16 the rounding of a slope's gradient is as large as itself.
    "lanes": Case("alibi"),
    "table": Case("t5", trained=True, queries=133, groups=2),
    "window": Case("t5", window=70),
    "wide": Case("t5", trained=True, width=128, groups=2),
    "wide, scaled": Case("t5", width=128, scaled=True, documents=77),
    "parametric table": Case("ggd", {"init": "alibi"}, trained=True, scaled=True, documents=77),
    "sinks": Case("ggd", {"init": "alibi"}, trained=True, scaled=True, documents=77, sinks=3),
    "grid": Case("ggd2d", {"init": "alibi"}, shape=(12, 16), queries=193, keys=193),
    "decoding": Case("ggd", {"init": "alibi"}, queries=1, gradients=False, groups=2),
}


@dataclass(frozen=True)
class Verdict:
    """Relative errors by case and tensor, and what is beyond its bound, not finite, or failed:
    without any it is trusted."""

    errors: dict[str, dict[str, float]]
    wrong: list[str]

    @property
    def worst(self) -> float | None:
        by_case = [max(errors.values()) for errors in self.errors.values() if errors]
        return max(by_case, default=None)


_log = logging.getLogger(__name__)
# Set while kernels ask for a verdict, which is not there yet.
_CHECKING: ContextVar[bool] = ContextVar("checking", default=False)
# By kernel, device and dtype: why it is not trusted, or None.
_REASONS: dict[tuple[str, str, str], str | None] = {}


def check_kernel(kernel: Kernel, device: str, dtype: torch.dtype) -> Verdict:
    """Compare the kernel's outputs and gradients with float64, in each case that it serves if it is
    trusted."""
    verdict = Verdict({}, [])
    for label, case in CASES.items():
        token = _CHECKING.set(True)
        try:
            errors = _errors(kernel, case, device, dtype)
        except Exception as error:
            # Of a compiler, a driver, or our own: whatever it is, the kernel does not serve.
            first_line = str(error).partition("\n")[0]
            verdict.wrong.append(f"{label}: {type(error).__name__}: {first_line}"[:300])
            continue
        finally:
            _CHECKING.reset(token)
        if errors is None:
            continue
        verdict.errors[label] = errors
        for tensor, share in errors.items():
            bound = BOUNDS[dtype]
            if tensor not in ("output", "q", "k", "v"):
                bound *= CANCELLING
            if not share <= bound:
                verdict.wrong.append(f"{label}: {tensor} is off by {share:.1g}")
    return verdict


def relative_error(value: Tensor, exact: Tensor) -> float:
    """‖value − exact‖/‖exact‖; inf unless all is finite."""
    exact = exact.detach().double()
    error = (value.detach().to(exact) - exact).norm() / exact.norm().clamp(min=1e-30)
    return float(error) if bool(error.isfinite()) else math.inf


def _errors(kernel: Kernel, case: Case, device: str, dtype: torch.dtype) -> dict[str, float] | None:
    """Relative errors by tensor, of two batch rows; None where the kernel does not serve the
    case."""
    q_shape = (2, HEADS, case.queries, case.width)
    k_shape = (2, case.groups, case.keys, case.width)
    wide = torch.promote_types(dtype, torch.float32)
    # Autocast, inference mode, a default device and the state of random numbers are put aside.
    # Leaving inference mode enables gradients.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(torch.device(device).type, enabled=False),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
    ):
        # The CPU's alone: torch.manual_seed would seed those of GPUs too.
        torch.default_generator.manual_seed(0)
        shapes = {"q": q_shape, "k": k_shape, "v": k_shape}
        leaves = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
        if case.scaled:
            leaves["row scale"] = torch.rand(HEADS, case.queries).to(wide) + 0.5
        prior: nn.Module = nn.Module()
        if case.prior:
            prior = create_prior(case.prior, num_heads=HEADS, **case.options)
        # Parameters start alike in all heads, or at 0.
        for parameter in prior.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)).requires_grad_(case.trained)
        prior = prior.to(wide)
        direction = torch.randn(q_shape).to(dtype)
        on_device = {name: x.to(device) for name, x in leaves.items()}
        results = _run(kernel, case, on_device, prior.to(device), direction)
        if results is None:
            return None
        exact = {name: x.double() for name, x in leaves.items()}
        exact_prior = copy.deepcopy(prior).cpu().double()
        truth = _run(ReferenceKernel(), case, exact, exact_prior, direction.double())
    assert truth is not None
    return {name: relative_error(results[name], value) for name, value in truth.items()}


def _run(
    kernel: Kernel, case: Case, leaves: dict[str, Tensor], prior: nn.Module, direction: Tensor
) -> dict[str, Tensor] | None:
    """The output, and gradients by name; None where the kernel refuses."""
    leaves = {name: x.detach().requires_grad_(case.gradients) for name, x in leaves.items()}
    q = leaves["q"]
    causal = case.shape is None
    if case.shape is None:
        k_pos = Positions.line(case.keys)
        q_pos = k_pos.tail(case.queries)
    else:
        k_pos = Positions.grid(*case.shape, num_prefix=1)
        q_pos = k_pos
    segments = None
    if case.documents:
        in_second = torch.arange(case.keys, device=q.device) >= case.documents
        segments = in_second.long().expand(2, -1)
    with torch.set_grad_enabled(case.gradients):
        terms = PriorTerms()
        if case.prior:
            # x: a prior without parameters makes its numbers where the layer's input is.
            terms = prior(q_pos, k_pos, causal=causal, x=q[:, 0])
        scale = leaves.get("row scale")
        call = AttentionCall(
            q=q,
            k=leaves["k"],
            v=leaves["v"],
            terms=terms,
            causal=causal,
            query_scale=None if scale is None else scale[None],
            segments=segments,
            window=case.window,
            sinks=case.sinks,
        )
        if kernel.refuses(call):
            return None
        output = kernel.run(call)
    results = {"output": output.detach()}
    if case.gradients:
        inputs = leaves | {name: p for name, p in prior.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(output, list(inputs.values()), direction.to(output.device))
        results |= dict(zip(inputs, grads, strict=True))
    return results


def find_distrust(name: str, kernel: Kernel, device: str, dtype: torch.dtype) -> str | None:
    """Why a kernel is not trusted on a device in a dtype; None if it is, or a CUDA graph is
    captured. Checked once."""
    if _CHECKING.get():
        return None
    key = (name, device_name(device), str(dtype).removeprefix("torch."))
    if key in _REASONS:
        return _REASONS[key]
    if device.startswith("cuda") and torch.cuda.is_current_stream_capturing():
        return None
    # On CUDA some thirty kernels are compiled, for half a minute the first time on a machine.
    _log.warning("comparing kernel %r with float64 on %s in %s before its first use", *key)
    wrong = check_kernel(kernel, device, dtype).wrong
    reason = None
    if wrong:
        reason = (
            f"on {key[1]} in {key[2]} its results are wrong ({wrong[0]}); `priorzoo doctor` "
            "checks again and shows all"
        )
    _REASONS[key] = reason
    return reason


@cache
def device_name(device: str) -> str:
    """The name of a device's model with its compute capability, such as "NVIDIA H200 (9.0)";
    "cpu"."""
    if torch.device(device).type != "cuda":
        return torch.device(device).type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} ({major}.{minor})"
