"""Priors given as numbers: where they come from, what lies beyond them, when a matrix becomes lanes, and files that may go."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributions import Exponential, Geometric, LogNormal, Uniform

from zoo import Positions, create_model, create_prior, load_model
from zoo.priors import Matrix, Table
from zoo.priors.given import IMPOSSIBLE


def write(path, numbers: np.ndarray) -> str:
    """The numbers in a file of the kind that its ending names."""
    if path.suffix == ".npy":
        np.save(path, numbers)
    elif path.suffix == ".csv":
        np.savetxt(path, numbers, delimiter=",")
    elif path.suffix == ".json":
        path.write_text(json.dumps(numbers.tolist()))
    else:
        save_file({"numbers": torch.from_numpy(numbers)}, path)
    return str(path)


@pytest.mark.parametrize("ending", ["npy", "csv", "json", "safetensors"])
@pytest.mark.parametrize("shape", [(7,), (2, 7)])
def test_a_table_from_a_file(tmp_path, ending: str, shape) -> None:
    weights = np.random.default_rng(0).random(shape)
    file = write(tmp_path / f"numbers.{ending}", weights)
    expected = torch.from_numpy(weights).log().expand(2, -1).float()
    assert torch.equal(Table(2, file=file, kind="weights").values, expected)
    logs = Table(2, file=write(tmp_path / f"logs.{ending}", np.log(weights)))
    torch.testing.assert_close(logs.values, expected, check_dtype=False)
    assert not logs.values.requires_grad and Table(2, file=file, kind="weights", learnable=True).values.requires_grad


def test_a_table_from_a_function_and_from_distributions() -> None:
    distance = torch.arange(16.0)
    rates = torch.tensor([0.1, 0.7])
    for given in (lambda d: -rates.double()[:, None] * d + 1, Exponential(rates)):
        values = Table(2, values=given, length=16).values
        torch.testing.assert_close(values - values[:, :1], -rates[:, None] * distance)
    values = Table(2, values=Geometric(0.3), train_context=16).values
    torch.testing.assert_close(values.exp().sum(-1), torch.full((2,), 1 - 0.7**16))
    apart = Table(2, values=LogNormal(0.0, 1.0), length=4).values
    assert (apart[:, 0] == IMPOSSIBLE).all() and apart[0, 1] == pytest.approx(-0.5 * math.log(2 * math.pi))
    each = Table(2, values=Uniform(torch.zeros(2), torch.tensor([2.5, 9.0])), length=4).values.exp()
    torch.testing.assert_close(each, torch.tensor([[0.4, 0.4, 0.4, 0.0], [1 / 9] * 4]))
    with pytest.raises(ValueError, match="Uniform has no probability at any distance from 0 to 3"):
        Table(2, values=Uniform(7.0, 9.0), length=4)


def test_a_table_fitted_to_what_was_observed() -> None:
    observed = [0, 0, 0, 1, 1, 4]
    fitted = Table.fit(2, distances=observed, smoothing=0.5)
    torch.testing.assert_close(fitted.values[1].exp(), torch.tensor([3.5, 2.5, 0.5, 0.5, 1.5]) / 8.5)
    assert torch.equal(Table.fit(2, counts=[3, 2, 0, 0, 1], smoothing=0.5).values, fitted.values)
    assert Table.fit(2, distances=observed, length=2).values.shape == (2, 2)
    longer = (
        Table.fit(2, length=7, **given).values for given in ({"distances": observed}, {"counts": [3, 2, 0, 0, 1]})
    )
    assert torch.equal(*longer)
    assert torch.equal(Table(1, values=Frozen().logpdf, length=4).values, -0.1 * torch.arange(4.0)[None])
    assert Table.fit(1, counts=[3, 0], smoothing=0).values[0, 1] == IMPOSSIBLE
    for wrong in (
        {},
        {"distances": [1], "counts": [1]},
        {"distances": [-1]},
        {"counts": [0, 0], "smoothing": 0},
        {"smoothing": -1},
    ):
        with pytest.raises(ValueError, match=r"distances|counts|smoothing"):
            Table.fit(1, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("beyond", "expected"), [("last", [-2.0, -2.0]), ("zero", [IMPOSSIBLE] * 2), ("linear", [-3.0, -12.0])]
)
def test_beyond_the_last_distance(beyond: str, expected: list[float]) -> None:
    prior = Table(1, values=[0.0, -0.5, -2.0], beyond=beyond)
    assert prior.curve(torch.tensor([3.0, 12.0]), causal=True)[0].tolist() == expected
    assert torch.equal(prior.curve(torch.tensor([-2.0]), causal=False), prior.curve(torch.tensor([2.0]), causal=False))
    rising = Table(1, values=[0.0, 1.0], beyond="linear")
    assert rising.curve(torch.tensor([9.0]), causal=True).item() == 1.0
    distance = torch.tensor([0, 2, 5])
    assert prior.tail(distance, 8)[0].tolist() == [0.0, -2.0, prior.curve(torch.tensor([5.0]), causal=True).item()]


def test_without_numbers_a_table_is_learned() -> None:
    model = create_model("text_table_tiny", num_layers=1, train_context=20)
    prior = model.layers[0].attention.prior
    assert prior.values.shape == (4, 20) and prior.values.requires_grad and not prior.values.any()
    model(torch.randint(0, 256, (1, 30))).square().sum().backward()
    assert prior.values.grad.abs().sum() > 0


def test_impossible_keys_get_no_weight() -> None:
    prior = Table(1, values=[0.0, 1.0, 2.0], kind="weights", beyond="zero")
    p = prior.log_prior(Positions.line(5), Positions.line(5), causal=True)[0, 0].softmax(-1)
    assert p[4, 4] == 0 and p[4, 0] == 0 and p[4, 2] == pytest.approx(2 / 3, abs=1e-6)
    assert torch.isfinite(p).all()


class Frozen:
    """As scipy's distributions are: no function and no array."""

    def logpdf(self, distance):
        return -0.1 * np.asarray(distance)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"values": [1.0, -1.0], "kind": "weights"}, "0 or more, got -1"),
        ({"values": [1.0], "kind": "lgo"}, "did you mean 'log'"),
        ({"values": [1.0], "beyond": "lats"}, "did you mean 'last'"),
        ({"values": [[1.0]] * 3}, r"\(N,\) or \(2, N\), got \(3, 1\)"),
        ({"values": [[0.0, 1.0], [1.0, math.nan]]}, r"finite or −∞, got nan at \[1, 1\] of values"),
        ({"values": [1.0, math.inf], "kind": "weights"}, r"weights .* finite, got inf at \[1\] of values"),
        ({"values": [0.0], "kind": "weights"}, "weight above 0"),
        ({"values": [-math.inf]}, "finite log-value"),
        ({"values": [1j]}, "real numbers"),
        ({"values": np.array(["2020-01-01"], dtype="datetime64[D]")}, "array of numbers.*got ndarray"),
        ({"values": Frozen()}, "such as its logpdf.*got Frozen"),
        ({"values": lambda d: d[1:], "length": 5}, r"shape \(4,\), expected \(5,\)"),
        ({"values": lambda d: 0.0, "length": 5}, r"shape \(\), expected \(5,\)"),
        ({"values": lambda d: None, "length": 5}, "returns None, expected log-values"),
        ({"values": [1.0, 2.0], "length": 3}, "length 3"),
        ({"values": [1.0], "file": "x.npy"}, "not from both"),
        ({"values": "x.npy"}, r"file='x\.npy'"),
        ({}, "needs its length"),
        ({"file": "x.txt"}, r"got '\.txt'"),
    ],
)
def test_bad_tables_are_named(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Table(2, **options)


def test_a_file_that_is_missing_or_no_numbers(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.npy"):
        Table(2, file=tmp_path / "none.npy")
    (tmp_path / "words.json").write_text('["a"]')
    with pytest.raises(ValueError, match=r"words\.json holds no array"):
        Table(2, file=tmp_path / "words.json")
    (tmp_path / "torn.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
    with pytest.raises(ValueError, match=r"torn\.safetensors holds no array"):
        Table(2, file=tmp_path / "torn.safetensors")
    for array in (np.array([1j]), np.array(["2020-01-01"], dtype="datetime64[D]")):
        np.save(tmp_path / "kind.npy", array)
        with pytest.raises(ValueError, match=r"kind\.npy holds no array of numbers: expected real numbers"):
            Table(2, file=tmp_path / "kind.npy")
    np.save(tmp_path / "nan.npy", np.array([0.0, np.nan]))
    with pytest.raises(ValueError, match=r"got nan at \[1\] of .*nan\.npy"):
        Table(2, file=tmp_path / "nan.npy")


# ------------------------------------------------------------------------------------------------ matrices


def realised(prior: Matrix, length: int) -> torch.Tensor:
    pos = Positions.line(length)
    return prior(pos, pos, causal=True).dense().double()[0]


def test_a_matrix_of_low_rank_is_lanes_and_another_is_dense() -> None:
    i, j = torch.arange(30.0).double()[:, None], torch.arange(30.0).double()
    waves = torch.stack([(i + j).sin() * h + 0.2 * (j - i) for h in (1, 2)])  # rank 3: a line, a sine and a cosine
    prior = Matrix(2, values=waves)
    assert (prior.rank, prior.num_lanes) == (3, 12) and 0 < prior.error < 1e-5
    error = realised(prior, 30) - waves
    assert (error.amax(-1) - error.amin(-1)).max() / 2 < 1e-5
    alibi, pos = Matrix(2, values=-0.3 * (i - j)), Positions.line(30)  # rank 1 but for its row constants
    assert alibi.rank == 1
    torch.testing.assert_close(realised(alibi, 30), alibi.log_prior(pos, pos, causal=True)[0], atol=1e-6, rtol=0)
    ridge = Matrix(2, values=-0.3 * (i - j).abs())
    assert ridge.rank is None and ridge.num_lanes == 0 and ridge.error == 0
    torch.testing.assert_close(realised(ridge, 30)[0], -0.3 * (i - j).abs(), atol=1e-6, rtol=0)
    rough = Matrix(2, values=-0.3 * (i - j).abs(), tolerance=0.5)
    assert rough.rank is not None and 1e-3 < rough.error <= 0.5
    worst = realised(rough, 30)[0] + 0.3 * (i - j).abs()
    assert (worst.amax(-1) - worst.amin(-1)).max().item() / 2 == pytest.approx(rough.error, rel=1e-3)
    assert Matrix(2, values=waves, max_rank=2).rank is None and Matrix(2, values=waves, tolerance=0).rank is None


def test_lanes_of_a_matrix_keep_their_precision_in_bfloat16() -> None:
    length = 512
    i, j = torch.arange(length).double()[:, None], torch.arange(length).double()
    matrix = 0.05 * (j - i)
    prior, pos = Matrix(1, values=matrix), Positions.line(length)
    terms = prior(pos, pos, causal=True)
    assert terms.q_lanes is not None and terms.k_lanes is not None
    q, k = (lanes.to(torch.bfloat16).double() for lanes in (terms.q_lanes, terms.k_lanes))
    error = (q @ k.mT)[0, 0] - matrix
    assert (error.amax(-1) - error.amin(-1)).max() / 2 < 0.02


def causal_weights(log_values: torch.Tensor) -> torch.Tensor:
    length = log_values.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return log_values.double().masked_fill(later, -math.inf).softmax(-1)


LINE = torch.arange(64.0)
CAUSAL = {
    "alibi": (1, -0.1 * (LINE[:, None] - LINE)),
    "ramp+waves": (3, torch.stack([h * (LINE[:, None] - LINE).cos() + 0.1 * LINE for h in (1, 2)])),
    **{
        f"rank {rank}": (rank, torch.randn(64, rank, generator=(g := torch.Generator().manual_seed(rank)))
        @ torch.randn(rank, 64, generator=g))
        for rank in (1, 2, 3)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_matrix_is_fitted_where_it_is_seen(name: str) -> None:
    rank, log_values = CAUSAL[name]
    weights = causal_weights(log_values)
    prior, again = (Matrix(2, values=weights.float(), kind="weights") for _ in range(2))
    assert prior.rank == rank and prior.causal and prior.error < 1e-4 and torch.equal(prior.keys, again.keys)
    pos = Positions.line(64)
    terms = prior(pos, pos, causal=True)
    assert terms.bias is None and terms.table is None
    seen = torch.ones(64, 64, dtype=torch.bool).tril()
    p = terms.dense().double()[0].masked_fill(~seen, -math.inf).softmax(-1)
    torch.testing.assert_close(p, weights.expand(2, -1, -1), atol=1e-4, rtol=1e-3)
    # Both directions of attention see the entries above the diagonal, which are impossible.
    whole = prior(pos, pos, causal=False)
    assert whole.q_lanes is None and whole.bias is not None
    p = whole.dense().double()[0].softmax(-1)
    assert not p.masked_fill(seen, 0).any()
    torch.testing.assert_close(p, weights.expand(2, -1, -1), atol=1e-4, rtol=1e-3)
    bias, tail = prior.log_prior(pos, pos, causal=True)[0, 1], prior.tail(torch.arange(64), 64)[1]
    for d in (0, 7, 63):
        assert float((bias - bias.diagonal()[:, None]).diagonal(-d).max()) - 1e-9 <= tail[d]
    assert tail.max() < 100


def test_a_causal_matrix_of_full_rank_stays_dense() -> None:
    g = torch.Generator().manual_seed(0)
    for log_values in (torch.randn(64, 64, generator=g), -(LINE[:, None] - LINE).abs().sqrt()):
        prior = Matrix(2, values=causal_weights(log_values), kind="weights")
        assert prior.rank is None and not prior.causal and prior.num_lanes == 0
    with pytest.raises(ValueError, match="causal of a matrix prior goes with its shape"):
        Matrix(1, values=[[0.0, 1.0]] * 2, causal=True)


@pytest.mark.parametrize("lanes", ["inside", "beside"])
@torch.no_grad()
def test_a_causal_matrix_decodes_and_attends_both_ways(lanes: str, tmp_path) -> None:
    rank, log_values = CAUSAL["rank 2"]
    numbers = {"values": causal_weights(log_values), "kind": "weights"}
    low, dense = (
        create_model("text_matrix_tiny", num_layers=1, lanes=lanes, position_options=numbers | more).eval()
        for more in ({}, {"tolerance": 0})
    )
    assert low.config.position_options == {"shape": [64, 64, rank], "causal": True}
    tokens = torch.randint(0, 256, (2, 64))
    expected = low(tokens)
    if lanes == "beside":  # the same projections
        dense.load_state_dict({k: v for k, v in low.state_dict().items() if ".prior." not in k}, strict=False)
        torch.testing.assert_close(dense(tokens), expected, atol=1e-4, rtol=1e-4)
    low.save_pretrained(tmp_path)
    loaded = load_model(tmp_path).eval()
    assert torch.equal(loaded(tokens), expected)
    cache = loaded.new_cache(64)
    found = torch.cat([loaded(t, cache=cache) for t in (tokens[:, :20], *tokens[:, 20:].split(1, 1))], dim=1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    attention = loaded.layers[0].attention
    attention.causal = False
    x, pos = torch.randn(1, 64, loaded.config.dim), Positions.line(64)
    changed = x.clone()
    changed[:, 40:] += 1
    torch.testing.assert_close(attention(changed, pos)[:, :40], attention(x, pos)[:, :40])


def test_positions_beyond_a_matrix_are_refused() -> None:
    prior = Matrix(1, values=torch.zeros(4, 6) + torch.arange(6.0))
    prior(Positions.line(4), Positions.line(6), causal=False)
    with pytest.raises(ValueError, match="4 query positions, got position 4"):
        prior(Positions.line(5), Positions.line(6), causal=False)
    with pytest.raises(ValueError, match="6 key positions, got position 6"):
        prior(Positions.line(1, offset=2), Positions.line(7), causal=True)
    packed = Positions.documents(
        torch.tensor([[0] * 4 + [1] * 3])
    )  # seven tokens, but none beyond its document's fourth
    assert prior.log_prior(packed, packed, causal=True).shape == (1, 1, 7, 7)
    with pytest.raises(ValueError, match=r"needs its numbers.*file"):
        create_prior("matrix", num_heads=2)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_tail_of_a_matrix_is_a_bound(symmetric: bool) -> None:
    i, j = torch.arange(12.0)[:, None], torch.arange(12.0)
    prior = Matrix(2, values=-(i - j).abs().sqrt() if symmetric else (i * j / 20).cos() * 0 + 0.3 * j)
    assert (prior.rank is None) == symmetric
    bias = prior.log_prior(Positions.line(12), Positions.line(12), causal=True)[0]
    tail = prior.tail(torch.arange(12), 12)
    for d in range(12):
        highest = max(float(bias[1, a, b] - bias[1, a, a]) for a in range(12) for b in range(a - d + 1))
        assert highest - 1e-9 <= tail[1, d] <= highest + 0.01
    assert torch.isinf(prior.tail(torch.arange(3), 13)).all()


# ------------------------------------------------------------------------------------------------ saved models


@pytest.mark.parametrize("name", ["table", "matrix", "matrix-dense", "table+key_bias", "matrix+ggd"])
@torch.no_grad()
def test_a_saved_model_needs_no_file(name: str, tmp_path) -> None:
    size = np.arange(40.0)
    numbers = {
        "table": -0.3 * size,
        "matrix": np.sin(size[:, None] + size),
        "matrix-dense": -(np.abs(size[:, None] - size) ** 0.5),
    }
    file = tmp_path / "numbers.npy"
    part = name.partition("+")[0]
    np.save(file, numbers[part])
    part, summed = part.removesuffix("-dense"), "+" in name
    options = {part: {"file": str(file)}} if summed else {"file": str(file)}
    model = create_model(f"text_{name.removesuffix('-dense')}_tiny", num_layers=2, position_options=options).eval()
    tokens = torch.randint(0, 256, (2, 40))
    expected = model(tokens)
    json.dumps(model.config.position_options)
    model.save_pretrained(tmp_path / "first")
    file.unlink()
    for folder in ("first", "second"):
        model = load_model(tmp_path / folder).eval()
        assert torch.equal(model(tokens), expected)
        assert not any(
            p.requires_grad for n, p in model.named_parameters() if n.endswith(("prior.values", "prior.keys"))
        )
        model.save_pretrained(tmp_path / "second")
    cache = model.new_cache(40, "dense" if name == "matrix-dense" else "paged")
    found = torch.cat([model(t, cache=cache) for t in (tokens[:, :20], *tokens[:, 20:].split(1, 1))], dim=1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    prompts = [tokens[0, :15].tolist(), tokens[1, :6].tolist()]
    assert model.generate(prompts, max_new_tokens=3)[1] == model.generate(prompts[1:], max_new_tokens=3)[0]


def test_numbers_in_python_become_options_of_their_shape(tmp_path) -> None:
    model = create_model("text_table_tiny", position_options={"values": Exponential(0.1), "beyond": "linear"})
    assert model.config.position_options == {"beyond": "linear", "length": 256, "learnable": False}
    model.save_pretrained(tmp_path)
    saved, made = load_model(tmp_path).state_dict(), model.state_dict()
    assert all(torch.equal(saved[key], made[key]) for key in made)
