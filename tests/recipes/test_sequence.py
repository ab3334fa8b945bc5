"""Sequence parallelism: ranks that share lines find what one rank finds, for every prior; whole runs; what is refused."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modalities.decoder import causal_lm_loss
from modalities.text.model import build
from recipes.config import ConfigError, apply_overrides, resolve
from recipes.engine import Ranks as Place
from recipes.engine import sequence_group
from recipes.estimate import describe
from recipes.registry import find_recipe
from recipes.runs import RunFolder
from recipes.train import main, rank_state
from tests.ranks import Ranks
from zoo.methods import list_positions
from zoo.priors import PRIORS, TablePrior

LENGTH = 48
SMALL: dict[str, Any] = dict(
    vocab_size=64, dim=32, num_layers=2, num_heads=4, hidden_dim=48, train_context=LENGTH, lanes="beside"
)


class Untold(TablePrior):
    """A prior from outside that says nothing of its parameters: −rate_h·√d, and an offset by head that is no parameter."""

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.rate = nn.Linear(1, num_heads, bias=False)

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        lead = (-1, *[1] * distance.ndim)
        slope = self.rate.weight.exp() + torch.arange(self.num_heads)[:, None]
        return -slope.to(distance.dtype).view(lead) * distance.abs().sqrt()


CASES: dict[str, dict[str, Any]] = {
    **{name: {"position": name} for name in ("alibi", "fire", "kerple", "t5", "spectral", "rope", "nope")},
    "ggd, ssmax": {"position": "ggd", "ssmax": True, "position_options": {"train_mu": True}},
    "goat, ssmax of the content": {
        "position": "goat",
        "ssmax": True,
        "scale_prior": False,
        "lanes": "inside",
        "dim": 64,
    },
    "goat, 2 key heads": {"position": "goat", "num_kv_heads": 2, "ssmax": True},
    "alibi, 1 key head": {"position": "alibi", "num_kv_heads": 1, "position_options": {"learnable": True}},
    "ggd, 3 key heads of 12": {"position": "ggd", "num_kv_heads": 3, "num_heads": 12, "dim": 48},
    "forgetting attention": {"position": "cable", "position_options": {"gate": "logsigmoid", "weighted": False}},
    "cable in a sum, 1 key head": {"position": "ggd+cable", "num_kv_heads": 1, "ssmax": True},
    "rope, dynamic": {
        "position": "rope",
        "position_options": {"scaling": "dynamic", "factor": 2.0, "train_context": 16},
    },
    "gate and temperatures": {
        "position": "ggd",
        "logit_options": {"prior_gate": True, "temperature": 1.5, "prior_scale": 2.0},
    },
    "recomputed, one prior": {"position": "goat", "activation_checkpointing": True, "share_prior": True, "ssmax": True},
    "a method per layer": {"position": ["local", "cable"]},
    "ggd, rows of one document": {"position": "ggd", "ssmax": True, "documents": False},
    "goat, rows of one document": {"position": "goat", "num_kv_heads": 2, "documents": False},
    "cable, rows of one document": {"position": "cable", "documents": False},
    "gpt2": {"position": "learned", "style": "gpt2", "tied": False},
    "untold": {"position": "untold"},
}


@pytest.fixture(scope="module")
def four():
    with Ranks(4) as ranks:
        yield ranks


group = cache(sequence_group)


def batch_of(documents: bool) -> dict[str, Tensor]:
    """Two rows; with documents, some that end inside a rank's part, and a rank without a target."""
    draw = torch.Generator().manual_seed(1)
    batch = {"tokens": torch.randint(0, 64, (2, LENGTH + 1), generator=draw)}
    place = torch.arange(LENGTH + 1).expand(2, -1)
    batch["segments"] = torch.stack([place[0] // 20, (place[1] > 3).long()]) if documents else torch.zeros_like(place)
    if documents:
        batch["weights"] = 10 * torch.rand(2, LENGTH + 1, generator=draw) * (place > LENGTH // 4)
    return batch


def model_of(config: dict[str, Any]) -> Any:
    """A model whose priors have left their inits."""
    torch.manual_seed(0)
    if config["position"] == "untold":
        PRIORS["untold"] = Untold
    model = build(**SMALL | {key: value for key, value in config.items() if key != "documents"})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2 if name in model.prior_parameters() else 0.05)
    return model.train()


def differences(config: dict[str, Any]) -> dict[str, float]:
    """How far the loss and each gradient of two and four ranks that share lines are from rank 0's own; found on that rank."""
    model, batch = model_of(config), batch_of(config.get("documents", True))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rank, groups, found = torch.distributed.get_rank(), {1: None, 2: group(2), 4: group(4)}, []
    for size, model.sequence in groups.items():
        model.zero_grad()
        shares = [torch.zeros(1), *(torch.zeros(p.numel()) for p in named.values())]
        if rank < size:  # ranks of other groups would have the same rows
            loss, _ = causal_lm_loss(model, batch)
            loss.backward()
            shares = [loss.detach().view(1), *(p.grad.flatten() for p in named.values())]
        total = torch.cat(shares)
        torch.distributed.all_reduce(total)
        found.append(total.split([len(share) for share in shares]))
    assert all(t.isfinite().all() for t in found[0]) and found[0][1].abs().max() > 1e-3
    return {
        f"{name} of {size}": float((a - b).abs().max())
        for size, tensors in zip((2, 4), found[1:], strict=True)
        for name, a, b in zip(["loss", *named], found[0], tensors, strict=True)
    }


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_lines_are_one_rank(name, four):
    errors = four(differences, CASES[name])[0]
    assert len(errors) > 20 and max(errors.values()) < 2e-5, {k: v for k, v in errors.items() if v >= 2e-5}


def dna_shares() -> tuple[list[float], list[float]]:
    """(loss, bits per base) of one rank, and this rank's shares among four; of both strands of rows that end in padding."""
    from modalities.dna.model import build, next_token_loss

    torch.manual_seed(0)
    config = dict(vocab_size=7, num_targets=4, tokenizer="bases", strands="both", position="cable", lanes="beside")
    model = build(**SMALL | config)
    batch = batch_of(documents=False)
    batch["tokens"] = (batch["tokens"] % 4).index_fill(1, torch.tensor([0]), 5)
    batch["segments"][:, -20:] = -1
    found = []
    for model.sequence in (None, group(4)):
        loss, metrics = next_token_loss(model, batch)
        found.append([float(loss), float(metrics["bits_per_base"])])
    return found[0], found[1]


def test_shares_of_dna_add_up_to_the_loss_and_bits_of_one_rank(four):
    wholes, shares = zip(*four(dna_shares), strict=True)
    assert [sum(share) for share in zip(*shares, strict=True)] == pytest.approx(wholes[0], abs=2e-6)


def test_streams_are_read_by_groups():
    ranks = [Place(n, 4, n, torch.device("cpu"), shared=2) for n in range(4)]
    assert [(r.group, r.groups) for r in ranks] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [rank_state(["a", "b"], r) for r in ranks] == ["a", "a", "b", "b"]
    with pytest.raises(ConfigError, match="3 readers; this run has 2 groups of 2 ranks"):
        rank_state(["a", "b", "c"], ranks[0])


def saved_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of the tensors that autograd saves for the backward pass of a batch's loss, each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # held here, so that no address is used twice

    def save(x: torch.Tensor) -> torch.Tensor:
        if (storage := x.untyped_storage()).data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        loss, _ = causal_lm_loss(model, batch)
    loss.backward()
    model.zero_grad()
    return sum(storage.nbytes() for storage in storages.values())


def kept_share(config: dict[str, Any], size: int) -> float:
    """What ranks that share lines keep for backward, of what one rank keeps."""
    model, batch = model_of(config), batch_of(documents=True)
    alone = saved_bytes(model, batch)
    model.sequence = group(size)
    return saved_bytes(model, batch) / alone


@pytest.mark.parametrize("position", ["ggd+spectral+key_bias", "rope"])
def test_activation_memory_falls_with_the_ranks(position, four):
    """1/4, and what every rank keeps of whole lines: documents, and key features that all heads have in common."""
    assert max(four(kept_share, {"position": position, "ssmax": True}, 4)) < 0.32


def test_terms_of_some_heads_are_made_alone():
    """Every prior on a line that ships says which of its parameters are whose, but FIRE, which makes no more than asked for."""
    for name in list_positions():
        model = build(**SMALL | {"position": name})
        assert model.refuses_sequence(2) is None
        assert (model.layers[0].attention.prior.by_head is None) == (name == "fire")


def test_a_matrix_is_refused():
    rows = torch.randn(4, LENGTH, LENGTH).tolist()
    model = build(**SMALL | {"position": "matrix", "position_options": {"values": rows}})
    assert "T × T matrix" in model.refuses_sequence(2)


class Reads(Untold):
    """A prior from outside that reads the layer's input, and does not say how."""

    depends_on_content, num_lanes = True, 1


class Tells(Reads):
    by_head = ()


@pytest.mark.parametrize(("prior", "word"), [(Reads, "by_head"), (Tells, "content")])
def test_a_prior_that_does_not_say_what_it_reads_is_refused(prior, word, monkeypatch):
    monkeypatch.setitem(PRIORS, "reads", prior)
    for position in ("reads", "ggd+reads"):
        assert word in build(**SMALL | {"position": position}).refuses_sequence(2)


@pytest.mark.parametrize(
    ("settings", "world", "words"),
    [
        (["train.sequence_parallel=3"], 4, ["sequence_parallel=3", "divisor", "4"]),
        (["train.sequence_parallel=0"], 4, ["sequence_parallel=0"]),
        (
            ["train.sequence_parallel=2", "train.batch=3", "train.micro_batch=2"],
            4,
            ["batch=3", "groups of ranks = 2 × 1 × 2"],
        ),
    ],
)
def test_what_cannot_be_planned(settings, world, words):
    with pytest.raises(ConfigError) as error:
        resolve(apply_overrides(find_recipe("text.ggd_tiny"), settings)[0], world=world)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("recipe", "settings", "words"),
    [
        ("text.ggd_tiny", ["model.options.num_heads=6", "model.options.dim=96"], ["num_heads=6", "4"]),
        ("text.ggd_tiny", ["data.context=130"], ["train_context=130", "4"]),
        ("dna.ggd_copy_tiny", [], ["copy expert"]),
        ("vision.goat_tiny", [], ["lines of tokens"]),
    ],
)
def test_what_cannot_be_shared_is_refused_with_a_reason(recipe, settings, words):
    recipe, _ = apply_overrides(find_recipe(recipe), [*settings, "train.sequence_parallel=4"])
    with pytest.raises(ConfigError) as error:
        describe(resolve(recipe, world=4))
    assert all(word in str(error.value) for word in ["sequence_parallel=4", *words]), error.value


def test_a_dry_run_says_what_a_line_takes_and_what_fits():
    """A million tokens on 8 and 64 GPUs; activations are those of one rank by the ranks that share, states by all ranks."""
    settings = [
        "data.context=1048576",
        "train.batch=8",
        "train.micro_batch=1",
        "train.zero_stage=3",
        "model.options.num_heads=32",
    ]
    settings += ["model.options.dim=2048", "optim.name=adamw"]
    found = {}
    for world, shared in ((8, 1), (8, 8), (64, 8), (64, 32)):
        recipe, _ = apply_overrides(
            find_recipe("text.goat_ssmax_tiny"), [*settings, f"train.sequence_parallel={shared}"]
        )
        plan = resolve(recipe, world=world, device="cuda")
        assert plan.groups == world // shared
        found[world, shared] = plan, describe(plan)
    plan, figures = found[64, 8]
    assert (plan.recipe.train.micro_batch, plan.recipe.train.accumulation) == (1, 1)
    assert plan.deepspeed["sequence_parallel_size"] == 8 and "sequence parallelism" not in found[8, 1][1]
    assert "131,072 of 1,048,576 tokens" in figures["sequence parallelism"]
    assert "1 × groups of ranks 8" in figures["batch"]
    activations = {
        key: float(re.search(r"activations ([\d.]+)", f["estimated memory per rank"])[1])
        for key, (_, f) in found.items()
    }
    assert activations[8, 8] == activations[64, 8] == pytest.approx(activations[8, 1] / 8, rel=1e-3)
    assert activations[64, 32] == pytest.approx(activations[8, 1] / 32, rel=1e-3)


# ------------------------------------------------------------------------------------------------ whole runs

RUN = [
    *["model.options.num_layers=1", "model.options.dim=32", "model.options.num_heads=4", "model.options.hidden_dim=32"],
    *[
        "data.context=160",
        "data.tokenizer=bytes",
        "data.facts_fraction=0.5",
        "data.copies_fraction=0",
        "data.facts_weight=10",
    ],
    *["train.batch=4", "train.steps=4", "train.save_every=2", "optim.name=adamw", "optim.warmup=1", "optim.lr=0.01"],
    *["optim.prior_lr_scale=1", "evaluate.every=2", "evaluate.samples=6", "train.clip=0.5"],
]


def train(folder: Path, settings: list[str], *options: str) -> int:
    """The command, in this rank; returns its exit code."""
    words = [word for setting in [*RUN, *settings] for word in ("--set", setting)]
    return main(["text.ggd_goat_ssmax_tiny", *words, "--run-dir", str(folder), *options])


def curves(folder: Path) -> list[list[float]]:
    records = RunFolder(folder).metrics()
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4]
    return [[r[name] for r in records if name in r] for name in ("loss", "heldout_loss", "grad_norm", "tokens")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of one rank."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with Ranks(1) as one:
        assert one(train, folder, []) == [0]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "shared"), [(0, 2), (1, 4), (2, 2), (3, 2)])
def test_a_run_of_ranks_that_share_lines_is_the_run_of_one(stage, shared, whole, four, tmp_path):
    settings = [f"train.zero_stage={stage}", f"train.sequence_parallel={shared}"]
    assert four(train, tmp_path / "run", settings) == [0] * 4
    for ours, theirs in zip(curves(tmp_path / "run"), curves(whole), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
    if stage != 1:
        return
    assert four(train, tmp_path / "bf16", [*settings, "train.precision=bf16"]) == [0] * 4
    assert curves(tmp_path / "bf16")[0] == pytest.approx(curves(whole)[0], abs=0.02)
    # Resumed by groups of another size, from the middle: the same run again.
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000004")
    assert (
        four(train, tmp_path / "run", [f"train.zero_stage={stage}", "train.sequence_parallel=2"], "--resume", "auto")
        == [0] * 4
    )
    for ours, theirs in zip(curves(tmp_path / "run"), curves(whole), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)
