"""Log-priors made by blocks of rows (FIRE): the matrix's outputs and gradients, without the matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.attention.sdpa import SdpaKernel
from zoo.priors import fire
from zoo.priors.base import PriorTerms
from zoo.priors.tables import whole_bias

SMALL = SdpaKernel(mask_limit=16 * 37, block_rows=16)  # blocks of 16 rows


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fire, "HIDDEN_LIMIT", 5 * 37 * 32)


def made(case: str) -> tuple[nn.Module, dict, dict[str, Tensor]]:
    """A prior, the options of its call, and float64 q, k, v: 37 keys of which more than L are beyond training."""
    torch.manual_seed(0)
    causal = case != "bidirectional"
    prior = zoo.create_prior("fire", num_heads=4, train_context=9).double()
    queries = 20 if case == "offset" else 37
    batch = 2 if case == "documents" else 1
    q, k, v = torch.randn(batch, 4, queries, 8), torch.randn(batch, 2, 37, 8), torch.randn(batch, 2, 37, 8)
    positions, options = zoo.Positions.line(37), {"causal": causal}
    if case == "documents":
        options["segments"] = torch.tensor([[0] * 5 + [1] * 32, [0] * 30 + [1] * 7])
        positions = zoo.Positions.documents(options["segments"])
    if case == "scale":
        options["query_scale"] = torch.rand(4, 37).double() + 0.5
    terms = {"q_pos": positions.tail(queries), "k_pos": positions}
    return prior, options | terms, {name: x.double().requires_grad_() for name, x in zip("qkv", (q, k, v), strict=True)}


def gradients(
    prior: nn.Module, options: dict, given: dict[str, Tensor], kernel: object, *, whole: bool
) -> list[Tensor]:
    options = dict(options)
    terms = prior(options.pop("q_pos"), options.pop("k_pos"), causal=options["causal"])
    if whole:
        terms = replace(terms, bias=whole_bias(terms.bias))
    out = zoo.prior_attention(*given.values(), terms, kernel=kernel, **options)
    torch.manual_seed(1)
    loss = (out * torch.randn_like(out)).sum()
    return [out, *torch.autograd.grad(loss, [*given.values(), *prior.parameters()])]


@pytest.mark.parametrize("case", ["causal", "bidirectional", "offset", "documents", "scale"])
def test_blocks_give_the_outputs_and_every_gradient_of_the_matrix(case: str) -> None:
    prior, options, given = made(case)
    blocks = gradients(prior, options, given, SMALL, whole=False)
    for found, expected in zip(blocks, gradients(prior, options, given, "reference", whole=True), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_heads_and_sums_of_blocks_are_those_of_the_matrix() -> None:
    prior, line = zoo.create_prior("fire", num_heads=4, train_context=9), zoo.Positions.line(37)
    terms = prior(line, line, causal=True)
    dense = torch.randn(1, 4, 37, 37)
    for summed in (terms + PriorTerms(bias=dense), PriorTerms(bias=dense) + terms):
        torch.testing.assert_close(summed.dense(), terms.dense() + dense)
        cut = summed.of_heads(slice(1, 3)).dense()
        torch.testing.assert_close(cut, (terms.dense() + dense)[:, 1:3])
        assert summed.bias is not None and summed.bias.shape == (1, 4, 37, 37) and summed.bias.requires_grad


def test_what_is_kept_for_gradients_is_smaller_than_a_matrix() -> None:
    length, kept = 512, dict[int, torch.UntypedStorage]()
    prior, line = zoo.create_prior("fire", num_heads=1, train_context=9), zoo.Positions.line(length)
    q, k, v = (torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(3))

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        kernel = SdpaKernel(mask_limit=16 * length)
        zoo.prior_attention(q, k, v, prior(line, line, causal=True), causal=True, kernel=kernel)
    assert sum(storage.nbytes() for storage in kept.values()) < length * length * 4
