"""What else computes attention, with a prior or without: each peer is a small class that says why it is left out.

Peers get the problem in the layout they like best; making a dense bias, a block mask or slopes is not counted.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.benches.problem import Contender, Problem, Run, parameters_of
from zoo import create_prior
from zoo.priors.ggd import EPSILON

DENSE_BOUND = {"cuda": 8 * 2**30, "cpu": 256 * 2**20}  # bytes of the largest dense bias, (H, T, S)


def installed(package: str) -> str | None:
    """Why a package of this distribution name cannot be used; None where it is installed."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed"
    return None


def needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "it runs on CUDA only"


def rows_first(x: Tensor) -> Tensor:
    """(B, H, L, D) as (B, L, H, D) and back."""
    return x.transpose(1, 2)


class Sdpa(Contender):
    """torch's scaled_dot_product_attention without bias, by one backend or by its own choice."""

    method = "none"

    def __init__(self, backend: str = "") -> None:
        self.kernel = f"sdpa {backend}".strip()
        named = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        self.backend = named[backend] if backend else None

    def available(self, device: torch.device) -> str | None:
        return needs_cuda(device) if self.backend else None

    def prepare(self, problem: Problem) -> Run:
        leaves, causal = problem.leaves(problem.shape.width), not problem.shape.queries

        def forward() -> Tensor:
            if self.backend is None:
                return F.scaled_dot_product_attention(*leaves.values(), is_causal=causal)
            with sdpa_kernel(self.backend):
                return F.scaled_dot_product_attention(*leaves.values(), is_causal=causal)

        return Run(forward, leaves)


class DenseBias(Contender):
    """SDPA with the ggd log-prior as a dense (1, H, T, S) bias, made beforehand, whose gradient is asked for."""

    method, kernel = "ggd", "sdpa dense bias"

    def refuses(self, problem: Problem) -> str | None:
        shape = problem.shape
        size = shape.heads * shape.rows * shape.length * problem.dtype.itemsize
        bound = DENSE_BOUND[problem.device.type]
        return None if size <= bound else f"its bias takes {size / 2**30:.2g} GiB, bound {bound / 2**30:.2g}"

    def prepare(self, problem: Problem) -> Run:
        leaves, (prior, table) = problem.leaves(problem.shape.width), ggd_of(problem)
        i, j = problem.q_pos.row_index(problem.device), problem.k_pos.row_index(problem.device)
        dense = table.dense().detach().masked_fill(j[None, :] > i[:, None], float("-inf"))
        bias = dense.to(problem.dtype).requires_grad_()
        given = bias.expand(problem.shape.batch, -1, -1, -1)
        backends = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        if problem.device.type == "cpu":
            backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

        def forward() -> Tensor:
            with sdpa_kernel(backends):
                return F.scaled_dot_product_attention(leaves["q"], leaves["k"], leaves["v"], attn_mask=given)

        return Run(forward, leaves | {"bias": bias}, prior)


class Flex(Contender):
    """FlexAttention, compiled for the shape, causal by its block mask, with the ggd prior as a score_mod.

    "table": the score_mod reads a captured (H, T+S−1) table, whose gradient is asked for; "law": it computes the GGD from
    captured (H,) numbers, whose gradients are asked for.
    """

    method = "ggd"

    def __init__(self, form: str, *, forward_only: bool = False) -> None:
        self.form, self.kernel, self.backward = form, f"flex {form}", not forward_only

    def available(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
            return "this torch has no FlexAttention"
        if self.backward and device.type == "cpu":
            return "FlexAttention has no backward pass on the CPU"
        return None

    def prepare(self, problem: Problem) -> Run:
        from torch.nn.attention.flex_attention import create_block_mask

        leaves, (prior, table) = problem.leaves(problem.shape.width), ggd_of(problem)
        offset, origin = problem.q_pos.offset, table.origin
        if self.form == "table":
            numbers = table.table.detach().requires_grad_(self.backward)
            extra = {"table": numbers}

            def score_mod(score, b, h, i, j):
                return score + numbers[h, i - j + origin]
        else:
            extra = parameters_of(prior)
            alpha, beta = (extra[n] if self.backward else extra[n].detach() for n in ("theta_alpha", "theta_beta"))

            def score_mod(score, b, h, i, j):
                distance = (i + offset - j).abs().to(torch.float32) + EPSILON
                return score - alpha[h].exp() * torch.exp(beta[h] * distance.log())

        mask = None
        if not problem.shape.queries:
            size = problem.shape.length
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size, device=str(problem.device))
        compiled = compiled_flex()
        inputs = [leaf if self.backward else leaf.detach() for leaf in leaves.values()]

        def forward() -> Tensor:
            return compiled(*inputs, score_mod=score_mod, block_mask=mask)

        return Run(forward, leaves | extra, prior, table if self.form == "table" else None)


def compiled_flex() -> Any:
    """flex_attention compiled for each shape; more shapes than dynamo keeps are an error and no silent dense attention."""
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    for name, value in (("recompile_limit", 512), ("accumulated_recompile_limit", 4096)):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, value)
    if hasattr(torch._dynamo.config, "fail_on_recompile_limit_hit"):
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(flex_attention, dynamic=False)


class FlashAttn(Contender):
    """The flash-attn package, without bias or with its built-in ALiBi slopes, which are constants."""

    def __init__(self, method: str = "none") -> None:
        self.method, self.kernel = method, "flash-attn"

    def available(self, device: torch.device) -> str | None:
        return installed("flash-attn") or needs_cuda(device)

    def refuses(self, problem: Problem) -> str | None:
        half = problem.dtype in (torch.float16, torch.bfloat16)
        return None if half else f"it takes float16 and bfloat16, not {problem.dtype}"

    def prepare(self, problem: Problem) -> Run:
        from flash_attn import flash_attn_func, flash_attn_with_kvcache

        leaves = problem.leaves(problem.shape.width)
        prior = create_prior("alibi", num_heads=problem.shape.heads) if self.method == "alibi" else None
        slopes = None if prior is None else prior.slopes(problem.device).float()
        attend = flash_attn_with_kvcache if problem.shape.queries else flash_attn_func

        def forward() -> Tensor:
            q, k, v = (rows_first(leaf) for leaf in leaves.values())
            return rows_first(attend(q, k, v, causal=True, alibi_slopes=slopes))

        return Run(forward, leaves, prior)


class GoatPackage(Contender):
    """The goat-attention package's module at K = 0, its projections replaced by the identity: attention and lanes alone."""

    method, kernel, decodes = "goat", "goat-attention", False

    def available(self, device: torch.device) -> str | None:
        return installed("goat-attention")

    def refuses(self, problem: Problem) -> str | None:
        return None if problem.shape.width > 5 else f"its 5 lanes leave no content in heads of {problem.shape.width}"

    def prepare(self, problem: Problem) -> Run:
        from goat import GoatAttention

        shape, leaves = problem.shape, problem.leaves(problem.shape.width)
        module = GoatAttention(
            embed_dim=shape.heads * shape.width, num_heads=shape.heads, batch_first=True, pos_rank=2, abs_rank=8,
            enable_key_bias=True, prior_init="uniform", device=problem.device, dtype=problem.dtype,
        )  # fmt: skip
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(module, name, nn.Identity())

        def forward() -> Tensor:
            q, k, v = (rows_first(leaf).flatten(2) for leaf in leaves.values())
            out, _ = module(q, k, v, is_causal=True, need_weights=False)
            return rows_first(out.unflatten(2, (shape.heads, shape.width)))

        numbers = [p for name, p in module.named_parameters() if "gate" not in name]
        lanes = {f"package {n}": p for n, p in enumerate(numbers)}
        return Run(forward, leaves | lanes, content=module.content_dim)


class Forgetting(Contender):
    """flash-linear-attention's forgetting attention: K[i,j] = G_i − G_j with G the running sum of log forget gates g.

    "alibi": g = −slope; "cable": g = −relu(W x + b), CABLE without its weights w. Its gradient in g is asked for.
    """

    kernel, decodes = "fla forgetting", False

    def __init__(self, method: str) -> None:
        self.method = method

    def available(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("fla") is None:
            return "flash-linear-attention is not installed"
        return needs_cuda(device)

    def prepare(self, problem: Problem) -> Run:
        from fla.ops.forgetting_attn import parallel_forgetting_attn

        shape, leaves = problem.shape, problem.leaves(problem.shape.width)
        torch.manual_seed(0)
        prior = (alibi if self.method == "alibi" else cable)(shape.heads).to(problem.device)
        x = torch.randn(shape.batch, shape.length, 64, device=problem.device)
        if self.method == "alibi":
            rates = prior.slopes(problem.device).expand(shape.batch, shape.length, -1)
        else:
            rates = prior.rates(x, torch.float32)[0].transpose(1, 2)
        gates = (-rates).detach().float().contiguous().requires_grad_()

        def forward() -> Tensor:
            q, k, v = (rows_first(leaf) for leaf in (leaves["q"], leaves["k"], leaves["v"]))
            return rows_first(parallel_forgetting_attn(q, k, v, gates))

        return Run(forward, leaves | {"gates": gates}, prior, x=x)


# --------------------------------------------------------------------------------------------------------- priors


def ggd(heads: int):
    """GGD heads that decay as ALiBi's do."""
    return create_prior("ggd", num_heads=heads, init="alibi")


def mixed(heads: int):
    """GGD heads of which every fourth looks away from the query, a retrieval head, and the others decay as ALiBi's do."""
    prior = ggd(heads)
    with torch.no_grad():
        prior.theta_alpha[3::4], prior.theta_beta[3::4] = 0.0, -0.5
    return prior


def alibi(heads: int):
    return create_prior("alibi", num_heads=heads)


def cable(heads: int):
    """CABLE without weights, over inputs of 64 columns: the form that forgetting attention has."""
    return create_prior("cable", num_heads=heads, d_model=64, weighted=False)


def goat(heads: int):
    return create_prior("goat", num_heads=heads, train_context=128)


def ggd_of(problem: Problem):
    """The ggd prior of a problem, with retrieval heads where it is decoding, and its relative table."""
    prior = (mixed if problem.shape.queries else ggd)(problem.shape.heads).to(problem.device)
    table = prior(problem.q_pos, problem.k_pos, causal=True).table
    assert table is not None and table.origin is not None
    return prior, table


def peers_on(device: torch.device) -> list[Contender]:
    """Every peer that is ever measured on this kind of device, the baseline first, available or not."""
    if device.type == "cuda":
        first: list[Contender] = [Sdpa("flash"), Sdpa("cudnn"), DenseBias(), Flex("table"), Flex("law")]
    else:
        first = [Sdpa(), DenseBias(), Flex("table", forward_only=True)]
    return [*first, FlashAttn(), FlashAttn("alibi"), GoatPackage(), Forgetting("alibi"), Forgetting("cable")]
