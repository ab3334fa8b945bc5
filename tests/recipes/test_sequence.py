"""Sequence parallelism: ranks that share lines find what one rank finds, for every prior; whole
runs; what is refused."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo.sequence
from modalities.decoder import causal_lm_loss
from modalities.text.model import build_model as build
from recipes.commands import ConfigError
from recipes.estimate import describe
from recipes.plan import resolve
from recipes.ranks import sequence_group
from recipes.registry import find_recipe
from recipes.settings import apply_overrides
from recipes.train import main
from tests.ranks import Ranks
from tests.recipes.test_train import same
from zoo.methods import list_positions
from zoo.priors import PRIORS, Prior, TablePrior, create_prior
from zoo.priors.terms import PriorTerms

LENGTH = 48
SMALL: dict[str, Any] = dict(
    vocab_size=64,
    dim=32,
    num_layers=2,
    num_heads=4,
    hidden_dim=48,
    train_context=LENGTH,
    lanes="beside",
)


class Outside(TablePrior):
    """A prior that says nothing of its parameters: −rate_h·√d, and an offset by head that is no
    parameter."""

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.rate = nn.Linear(1, num_heads, bias=False)

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        slope = self.rate.weight.exp() + torch.arange(self.num_heads)[:, None]
        return -slope.to(distance.dtype).view(-1, *[1] * distance.ndim) * distance.abs().sqrt()


CASES: dict[str, dict[str, Any]] = {
    **{name: {"position": name} for name in ("fire", "rope")},
    "goat, ssmax of the content": {"position": "goat", "ssmax": True, "scale_prior": False, "lanes": "inside", "dim": 64},
    "ggd, 3 key heads of 12": {"position": "ggd", "num_kv_heads": 3, "num_heads": 12, "dim": 48, "share_prior": True},
    "forgetting attention": {"position": "cable", "position_options": {"gate": "logsigmoid", "weighted": False}},
    "a method per layer": {"position": ["local", "cable"]},
    "gpt2": {"position": "learned", "style": "gpt2", "tied": False},
    "outside": {"position": "outside"},
    "heads in another order": {"position": "alibi+fire", "num_heads": 8, "dim": 64, "num_kv_heads": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def four():
    with Ranks(4) as ranks:
        yield ranks


group = cache(sequence_group)


def batch_of_documents() -> dict[str, Tensor]:
    """Two rows with documents, some of which end inside a rank's part, and a rank without a
    target."""
    draw = torch.Generator().manual_seed(1)
    batch = {"tokens": torch.randint(0, 64, (2, LENGTH + 1), generator=draw)}
    place = torch.arange(LENGTH + 1).expand(2, -1)
    batch["segments"] = torch.stack([place[0] // 20, (place[1] > 3).long()])
    batch["weights"] = 10 * torch.rand(2, LENGTH + 1, generator=draw) * (place > LENGTH // 4)
    return batch


def model_of(config: dict[str, Any]) -> Any:
    """A model whose priors have left their inits."""
    torch.manual_seed(0)
    if config["position"] == "outside":
        PRIORS["outside"] = Outside
    model = build(**SMALL | config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(
                torch.randn_like(parameter), alpha=0.2 if name in model.prior_parameters() else 0.05
            )
    return model.train()


def differences(config: dict[str, Any]) -> dict[str, float]:
    """How far the loss and each gradient of two and four ranks that share lines are from rank
    0's."""
    zoo.sequence.NEGLIGIBLE = 2.0  # so that heads of short lines differ in what they see
    model = model_of(config)
    batch = batch_of_documents()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rank = torch.distributed.get_rank()
    groups = {1: None, 2: group(2), 4: group(4)}
    totals = []
    for size, model.sequence in groups.items():
        model.zero_grad()
        shares = [torch.zeros(1), *(torch.zeros(p.numel()) for p in named.values())]
        if rank < size:  # ranks of other groups would have the same rows
            loss, _ = causal_lm_loss(model, batch)
            loss.backward()
            shares = [loss.detach().view(1), *(p.grad.flatten() for p in named.values())]
        total = torch.cat(shares)
        torch.distributed.all_reduce(total)
        totals.append(total.split([len(share) for share in shares]))
    assert all(t.isfinite().all() for t in totals[0])
    assert totals[0][1].abs().max() > 1e-3
    return {
        f"{name} of {size}": float((a - b).abs().max())
        for size, tensors in zip((2, 4), totals[1:], strict=True)
        for name, a, b in zip(["loss", *named], totals[0], tensors, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_sharing_ranks_are_one(name, four):
    """Ranks that share lines are one rank."""
    errors = four(differences, CASES[name])[0]
    assert len(errors) > 20, {k: v for k, v in errors.items() if v >= 2e-5}
    assert max(errors.values()) < 2e-5, {k: v for k, v in errors.items() if v >= 2e-5}


def test_heads_are_balanced() -> None:
    """ALiBi's slopes: in the order of heads the slowest of eight ranks has four times the mean."""
    pairs = zoo.sequence.visible_pairs(create_prior("alibi", num_heads=32), 2**16)
    ranks = 8
    order = zoo.sequence.balanced_groups(pairs, 32, ranks)
    assert sorted(order) == list(range(32))
    loads = [
        pairs[heads].view(ranks, -1).sum(1) for heads in (torch.arange(32), torch.tensor(order))
    ]
    slowest = [float(load.max() / load.mean()) for load in loads]
    assert slowest[0] > 3.5
    assert slowest[1] < 1.3


class Reads(Outside):
    """A prior that reads the layer's input, and does not say how."""

    depends_on_content = True
    num_lanes = 1


class Dense(Prior):
    """A bias over pairs of positions."""

    by_head = ()

    def forward(self, q_pos, k_pos, *, causal, x=None):
        return PriorTerms(bias=torch.zeros(1, self.num_heads, q_pos.length, k_pos.length))


def test_unfit_prior_is_refused(monkeypatch):
    """A prior that does not fit is refused."""
    for name in list_positions():
        assert build(**SMALL | {"position": name}).refuses_sequence(2) is None
    monkeypatch.setitem(PRIORS, "reads", Reads)
    for position in ("reads", "ggd+reads"):
        assert "by_head" in build(**SMALL | {"position": position}).refuses_sequence(2)
    monkeypatch.setitem(PRIORS, "dense", Dense)
    assert "T × T matrix" in build(**SMALL | {"position": "dense"}).refuses_sequence(2)


@pytest.mark.parametrize(
    ("recipe", "settings", "words"),
    [
        (
            "text.ggd_tiny",
            ["model.options.num_heads=6", "model.options.dim=96"],
            ["num_heads=6", "4"],
        ),
        ("dna.ggd_copy_tiny", [], ["copy expert"]),
        ("vision.goat_tiny", [], ["lines of tokens"]),
    ],
)
def test_unshareable_is_refused(recipe, settings, words):
    """What cannot be shared is refused with a reason."""
    recipe, _ = apply_overrides(find_recipe(recipe), [*settings, "train.sequence_parallel=4"])
    with pytest.raises(ConfigError) as error:
        describe(resolve(recipe, world=4))
    assert all(word in str(error.value) for word in ["sequence_parallel=4", *words]), error.value


# ------------------------------------------------------------------------------------------------
# whole runs

RUN = [
    *[
        "model.options.num_layers=1",
        "model.options.dim=32",
        "model.options.num_heads=4",
        "model.options.hidden_dim=32",
    ],
    *[
        "data.context=160",
        "data.tokenizer=bytes",
        "data.facts_fraction=0.5",
        "data.copies_fraction=0",
    ],
    *[
        "data.facts_weight=10",
        "train.clip=0.5",
        "optim.prior_lr_scale=1",
        "evaluate.every=2",
        "evaluate.samples=6",
    ],
    *[
        "train.batch=4",
        "train.steps=4",
        "train.save_every=2",
        "optim.name=adamw",
        "optim.warmup=1",
        "optim.lr=0.01",
    ],
]


def train(folder: Path, settings: list[str], *options: str) -> int:
    """The command, in this rank; returns its exit code."""
    words = [word for setting in [*RUN, *settings] for word in ("--set", setting)]
    return main(["text.ggd_goat_ssmax_tiny", *words, "--run-dir", str(folder), *options])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of one rank."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with Ranks(1) as one:
        assert one(train, folder, []) == [0]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "shared"), [(0, 2), (1, 4), (3, 2)])
def test_sharing_run_equals_one_rank(stage, shared, whole, four, tmp_path):
    """A run of ranks that share lines is the run of one."""

    def train_and_compare(shared, *options):
        settings = [f"train.zero_stage={stage}", f"train.sequence_parallel={shared}"]
        assert four(train, tmp_path / "run", settings, *options) == [0] * 4
        same(tmp_path / "run", whole)

    train_and_compare(shared)
    if stage == 1:  # resumed by groups of another size, from the middle: the same run again
        shutil.rmtree(tmp_path / "run/checkpoints/step_00000004")
        train_and_compare(2, "--resume", "auto")
