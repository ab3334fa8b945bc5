"""Every prior against its oracle, and the identities of the papers, in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import zoo
from tests.refusals import refuses
from tests.zoo.priors_table import CASES, LINE, OPTIONS, inputs, make, positions_for
from zoo import Positions, compose, create_prior, list_priors, prior_attention
from zoo.adapters import limited_reach
from zoo.methods import list_positions
from zoo.priors.alibi import alibi_slopes
from zoo.priors.base import prior_dtype


def test_every_prior_has_a_row() -> None:
    assert sorted(OPTIONS) == list_priors()


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_prior_equals_formula(name: str, causal: bool) -> None:
    """Lanes or table, multiplied out, equal the oracle up to a row constant; so do all gradients.
    No buffer is unsaved."""
    prior = make(name)
    pos = positions_for(name)
    assert not any(module._non_persistent_buffers_set for module in prior.modules())
    x = inputs(pos.length).requires_grad_()
    weights = torch.randn(prior.num_heads, pos.length, pos.length, dtype=torch.float64)
    # Gradients are taken through a softmax, which is blind to row constants, as attention is.
    leaves = [p for p in prior.parameters() if p.requires_grad] + [x]
    grads = []
    values = []
    for dense in (
        prior(pos, pos, causal=causal, x=x).dense(),
        prior.log_prior(pos, pos, causal=causal, x=x),
    ):
        dense = dense.double().expand(-1, prior.num_heads, pos.length, pos.length)
        mask = (
            torch.ones(pos.length, pos.length, dtype=torch.bool).tril()
            if causal
            else torch.tensor(True)
        )
        p = dense.masked_fill(~mask, -math.inf).softmax(-1)
        # A softmax sees differences to the row's first key alone, and no hidden entry.
        values.append((dense - dense[..., :1]).masked_fill(~mask, 0.0).detach())
        loss = (p * weights).sum()
        found = (
            torch.autograd.grad(loss, leaves, allow_unused=True)
            if loss.requires_grad
            else [None] * len(leaves)
        )
        grads.append(
            [
                torch.zeros_like(leaf) if g is None else g
                for leaf, g in zip(leaves, found, strict=True)
            ]
        )
    torch.testing.assert_close(values[0].expand_as(values[1]), values[1], atol=1e-9, rtol=0)
    for ours, oracle in zip(*grads, strict=True):
        torch.testing.assert_close(ours, oracle, atol=1e-8, rtol=1e-7)


@pytest.mark.parametrize(("name", "causal"), dict(CASES).items())
def test_some_heads_of_a_prior(name: str, causal: bool) -> None:
    """Some heads of a prior are those heads with their gradients."""
    prior = make(name)
    pos = positions_for(name)
    heads = [2, 0]
    x = inputs(pos.length).requires_grad_()
    content = prior.content(x)
    own = prior.of_heads(heads)
    all_heads = prior(pos, pos, causal=causal, x=x).dense().expand(-1, prior.num_heads, -1, -1)
    some = own(pos, pos, causal=causal, x=x if content is None else content[:, heads]).dense()
    assert own.num_heads == 2
    assert own.num_lanes == prior.num_lanes
    torch.testing.assert_close(some.expand(-1, 2, -1, -1), all_heads[:, heads], atol=1e-12, rtol=0)
    leaves = [p for p in prior.parameters() if p.requires_grad] + [x]
    weights = torch.randn(pos.length, pos.length, dtype=torch.float64)
    losses = [
        (dense * weights).sum() for dense in (some.expand(-1, 2, -1, -1), all_heads[:, heads])
    ]
    if losses[0].requires_grad:
        ours, theirs = (torch.autograd.grad(loss, leaves, allow_unused=True) for loss in losses)
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kernel", ["sdpa", "toeplitz", "triton", "reference"])
def test_steep_curves_stay_finite(kernel: str) -> None:
    """(1e−5)^−8 and 12^40 are beyond float32: gradients are those of float64, where the formula
    needs no bound."""
    length = 13
    powers = (-8.0, 40.0, -30.0, -6.0)
    dtype = torch.bfloat16 if kernel == "reference" else torch.float32
    generator = torch.Generator().manual_seed(0)
    q, k, v, out_grad = (
        torch.randn(1, 4, length, 16, generator=generator).to(dtype) for _ in range(4)
    )
    prior = create_prior("ggd", num_heads=4, train_mu=True)
    prior.theta_beta.data.copy_(torch.tensor(powers))
    line = Positions.line(length)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = prior_attention(*inputs, prior(line, line, causal=True), causal=True, kernel=kernel)
    found = torch.autograd.grad((out * out_grad).sum(), [*inputs, *prior.parameters()])

    wide = [x.double().requires_grad_() for x in (q, k, v)]
    theta = [p.detach().double().requires_grad_() for p in prior.parameters()]
    alpha, beta, mu = (p[:, None, None] for p in theta)
    index = torch.arange(length, dtype=torch.float64)
    away = (index - index[:, None] - 2 * mu.sinh()).abs() + 1e-5
    logits = wide[0] @ wide[1].mT / 4 - alpha.exp() * away**beta
    logits = logits.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
    truth = logits.softmax(-1) @ wide[2]
    expected = torch.autograd.grad((truth * out_grad.double()).sum(), [*wide, *theta])
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    for got, want in zip([out, *found], [truth, *expected], strict=True):
        scale = max(1.0, float(want.detach().abs().max()))
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * scale)


def test_far_soft_limits() -> None:
    """r^8 alone is beyond float32 from 65,536 tokens on, and exp(θα) below it."""
    for soft in (65536, 1_000_000):
        prior = create_prior("ggd", num_heads=1, **limited_reach(soft=soft)["options"])
        value = prior.log_prior(Positions.line(1, offset=soft), Positions.line(1), causal=True)
        gradients = torch.autograd.grad(value.sum(), [prior.theta_alpha, prior.theta_beta])
        assert [x.item() for x in (value, *gradients)] == pytest.approx(
            [-1, -1, -math.log(soft)], rel=1e-4
        )


@pytest.mark.parametrize("scale", [1e-4, -1e-5])
def test_steep_entries_without_gradients(scale: float) -> None:
    """Small row scales leave steep entries without gradients."""
    prior = create_prior("ggd", num_heads=4)
    line = Positions.line(29)
    scales = torch.full((1, 4, 29), scale)
    prior.theta_beta.data.copy_(torch.tensor([-1.0, -3.0, -8.0, 0.5]))
    q, k, v = torch.randn(3, 1, 4, 29, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for kernel in ("triton", "reference"):
        out = prior_attention(
            q, k, v, prior(line, line, causal=True), causal=True, query_scale=scales, kernel=kernel
        )
        found.append(torch.autograd.grad(out.square().sum(), [prior.theta_alpha, prior.theta_beta]))
    torch.testing.assert_close(*found, rtol=0.1, atol=1e-9)


FORMS = [("ggd2d", {"form": form, "train_mu": True}) for form in ("isotropic", "separable")]


@pytest.mark.parametrize(
    ("name", "options"), [*(("ggd", {"train_mu": mu}) for mu in (False, True)), *FORMS]
)
def test_table_jacobian_reduces_gradient(name: str, options: dict) -> None:
    """The jacobian of a table reduces its gradient to that of the parameters."""
    prior = make(name, **options)
    pos = positions_for(name)
    table = prior(pos, pos, causal=False).table
    assert table.parametric is not None
    assert (table + table).parametric is None
    leaves = [p for p in prior.parameters() if p.requires_grad]
    of_table = torch.randn_like(table.table)
    expected = torch.autograd.grad(table.table, leaves, of_table)
    params = table.parametric.params
    jacobian = table.jacobian()
    assert len(params) == len(leaves)
    assert not jacobian.requires_grad
    torch.testing.assert_close(
        torch.autograd.grad(params, leaves, (jacobian * of_table).sum(-1)), expected
    )
    if table.parametric.log_factor:
        torch.testing.assert_close(jacobian[0], table.table.detach(), rtol=1e-12, atol=0)


def test_ggd_starts_as_bam_does() -> None:
    slopes = alibi_slopes(4).log().float()
    for init, beta in {"alibi": [1.0] * 4, "linear": [0, 1 / 3, 2 / 3, 1]}.items():
        prior = create_prior("ggd", num_heads=4, init=init)
        torch.testing.assert_close(
            (prior.theta_alpha.data, prior.theta_beta.data), (slopes, torch.tensor(beta))
        )
    sampled = create_prior("ggd2d", num_heads=4000, init="sampled", form="separable")
    values = torch.stack([p.data for p in sampled.parameters() if p.requires_grad])
    assert len(values) == 4
    assert (values.mean(1).abs() < 0.1).all()
    assert ((values.std(1) - 1).abs() < 0.1).all()


@pytest.mark.parametrize(
    ("gate", "bias", "weighted"),
    [("relu", False, True), ("softplus", True, False), ("logsigmoid", True, True)],
)
def test_cable_gates(gate: str, bias: bool, weighted: bool) -> None:
    """K[i,j] = −w_i·Σ_{j < l ≤ i} c_l entry by entry; forgetting attention's is Σ log sigmoid of
    the forget gate."""
    lives = (
        create_prior("fox", num_heads=4, d_model=8, half_lives=[4, 256])
        .decay.bias.sigmoid()
        .log2()
        .reciprocal()
    )
    torch.testing.assert_close(lives, -torch.tensor([4.0, 16.0, 64.0, 256.0]), atol=0, rtol=1e-3)
    cable = make("cable", gate=gate, bias=bias, weighted=weighted)
    x = inputs(7)
    pos = Positions.line(7)
    raw = x @ cable.decay.weight.T + (cable.decay.bias if bias else 0)
    rate = {
        "relu": raw.clamp(min=0),
        "softplus": (1 + raw.exp()).log(),
        "logsigmoid": -(1 / (1 + (-raw).exp())).log(),
    }
    weight = (1 + (x @ cable.weight.weight.T).exp()).log() if weighted else torch.ones_like(raw)
    found = cable.log_prior(pos, pos, causal=True, x=x)
    for i in range(7):
        for j in range(i + 1):
            expected = -weight[:, i] * rate[gate][:, j + 1 : i + 1].sum(1)
            torch.testing.assert_close(found[:, :, i, j], expected, atol=1e-12, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["alibi", "goat", "cable"])
def test_growing_lanes_keep_their_precision(name: str, dtype: torch.dtype) -> None:
    """The realised K differs from that of float64 by less than 0.02 logits up to a row constant,
    below position 2^20."""
    torch.manual_seed(0)
    at = 2**20 - 1
    near = 300
    heads = 2 if name == "cable" else 8
    options = {"cable": {"d_model": 1}, "goat": {"train_context": 128}}.get(name, {})
    prior = create_prior(name, num_heads=heads, **options)
    for part in prior.modules():  # fresh, the last layer of an MLP is 0 and hides its part
        if isinstance(part, torch.nn.Linear):
            torch.nn.init.normal_(part.weight, std=0.3)
    # Keys near the query, in the middle, and at the start: where neighbours would tie, and where
    # errors add up.
    j = torch.cat(
        [torch.arange(at - near, at + 1), torch.arange(at // 2, at // 2 + 50), torch.arange(50)]
    )
    q_pos, k_pos = (Positions(len(p), within=p[None]) for p in (torch.tensor([at]), j))
    x = torch.zeros(1, len(j), 1)
    pick = torch.arange(len(j))
    if name == "cable":
        prior.decay.bias.data.fill_(0.31)
        q_pos = Positions.line(1, offset=at)
        k_pos = Positions.line(at + 1)
        pick = j
        x = torch.ones(1, at + 1, 1)
    with torch.no_grad():
        terms = prior(q_pos, k_pos, causal=True, x=x)
        wide = copy.deepcopy(prior).double()(q_pos, k_pos, causal=True, x=x.double())
    exact = wide.q_lanes @ wide.k_lanes[:, :, pick].mT
    q_lanes = terms.q_lanes.to(dtype)
    k_lanes = terms.k_lanes[:, :, pick].to(dtype)
    assert row_constant_apart(q_lanes.double() @ k_lanes.double().mT, exact) < 0.02
    # As a kernel sums it, in float32, lane after lane: near the query, where weights are not 0,
    # that costs nothing.
    summed = torch.zeros_like(exact, dtype=torch.float32)
    for r in range(q_lanes.shape[-1]):
        summed = summed + q_lanes[..., r, None].float() * k_lanes[..., None, :, r].float()
    assert row_constant_apart(summed[..., : near + 1].double(), exact[..., : near + 1]) < 0.02


def row_constant_apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Half the spread of a − b: the largest difference that is left when the best row constant is
    taken away."""
    return float(((a - b).amax(-1) - (a - b).amin(-1)).max()) / 2


def test_priors_stay_float32() -> None:
    """Priors stay float32 in a bfloat16 model."""
    for name in LINE:
        prior = make(name).to(torch.bfloat16)
        pos = Positions.line(5)
        terms = prior(pos, pos, causal=True, x=inputs(5).bfloat16())
        assert prior_dtype(prior) == torch.float32
        for tensor in (terms.q_lanes, terms.k_lanes, terms.bias, terms.table and terms.table.table):
            assert tensor is None or tensor.dtype == torch.float32
        if hasattr(prior, "omega"):
            assert prior.omega.dtype == torch.float64


def test_sum_formula_on_device() -> None:
    """Fixed slopes are on the CPU for want of a parameter that tells; "meta" is not the default
    device, as CUDA is not."""
    both = compose(create_prior("alibi", num_heads=3), make("ggd")).to("meta")
    pos = Positions.line(9)
    assert both.log_prior(pos, pos, causal=True).is_meta


def test_alibi_slopes() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(12).tolist()[8:] == [2 ** (-0.5 * n) for n in (1, 3, 5, 7)]


def test_t5_buckets_as_published() -> None:
    """Causal: exact below 16, then 16 + log(d/16)/log(128/16)·16, and the last bucket from 128
    on."""
    prior = create_prior("t5", num_heads=1)
    distance = torch.tensor([0.0, 15, 16, 20, 32, 64, 100, 127, 128, 5000, -3])
    assert prior.bucket(distance, causal=True).tolist() == [
        0,
        15,
        16,
        17,
        21,
        26,
        30,
        31,
        31,
        31,
        0,
    ]
    assert prior.bucket(torch.tensor([5.0, -5.0]), causal=False).tolist() == [5, 21]


def test_bad_options_are_named() -> None:
    for name, options, message in [
        ("albi", {}, "did you mean 'alibi'"),
        ("ggd", {"init": "linea"}, "did you mean 'linear'"),
        ("cable", {"d_model": 4, "gate": "softplu"}, "did you mean 'softplus'"),
        ("goat", {}, "needs the option 'train_context'"),
    ]:
        refuses(message, create_prior, name, num_heads=2, **options)


def test_undefined_prior_says_so() -> None:
    """Where a prior is not defined it says so."""
    pos = Positions.line(4)
    refuses("causal attention only", make("cable"), pos, pos, causal=False, x=inputs(4))
    refuses("same number of heads", compose, make("ggd"), make("ggd", num_heads=4))
    refuses(
        "one part of a composed prior",
        compose(make("cable"), make("cable")),
        pos,
        pos,
        causal=True,
        x=inputs(4),
    )
    grid = Positions.grid(2, 2)
    for name in {*LINE} - {"uniform", "sink"}:
        refuses("needs a 2-D prior", make(name), grid, grid, causal=True, x=inputs(4))


def test_soft_windows_by_number() -> None:
    """GGD with θβ = 8 is a soft window; ALiBi of mean distance μ has slopes ln(1 + 1/μ)."""
    window = create_prior("ggd", num_heads=2, init={"alpha": -8 * math.log(100.0), "beta": 8})
    matrix = window.log_prior(Positions.line(151), Positions.line(151), causal=True)
    log_prior = matrix.reshape(-1, 151, 151)[0, -1].flip(0)
    assert -0.005 < log_prior[50] < 0
    assert abs(float(log_prior[100]) + 1) < 1e-3
    assert log_prior[150] < -25
    slopes = create_prior("alibi", num_heads=2, mean_lag=[10, 1000]).slopes()
    assert torch.equal(
        slopes, torch.tensor([math.log1p(0.1), math.log1p(0.001)], dtype=torch.float64)
    )
    for name, options in (("ggd", {"init": {"gamma": 1}}), ("alibi", {"mean_lag": [1]})):
        refuses(next(iter(options)), create_prior, name, num_heads=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in list_positions() if name != "learned"])
def test_model_compiles_to_one_graph(name):
    """Of packed rows; learned positions read how many there are."""
    sizes = {"num_layers": 1, "dim": 32, "num_heads": 4, "hidden_dim": 16, "vocab_size": 32}
    model = zoo.create_model(f"text_{name}_tiny", train_context=16, **sizes)
    tokens = torch.randint(0, 32, (2, 24))
    segments = torch.tensor([[0] * 10 + [1] * 14] * 2)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(tokens, segments=segments), model(tokens, segments=segments))


def test_sum_has_models_grammar():
    """`create_prior` makes the sum that a model of the same name has."""
    model = zoo.create_model("text_ggd_goat_tiny", num_layers=1)
    attention = model.layers[0].attention
    prior = create_prior("ggd_goat", num_heads=4, train_context=256)
    expected = attention.prior.state_dict()
    assert prior.state_dict().keys() == expected.keys()
    line = Positions.line(9)
    prior.load_state_dict(expected)
    value = prior.log_prior(line, line, causal=True)
    assert torch.equal(value, attention.prior.log_prior(line, line, causal=True))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "ggd+spectrl",
            {},
            "part 'spectrl' of 'ggd\\+spectrl' is no prior; did you mean 'spectral'",
        ),
        ("ggd+ggd", {}, "has the part 'ggd' twice"),
        (
            "ggd+alibi",
            {"init": "alibi", "rank": 3},
            "no part of 'ggd\\+alibi' has the option 'rank'",
        ),
    ],
)
def test_wrong_sum_is_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_prior(name, num_heads=4, **options)


def test_options_of_parts():
    prior = create_prior("ggd+spectral", num_heads=4, spectral={"rank": 5})
    assert [type(part).__name__ for part in prior.parts()] == ["Ggd", "Spectral"]
    assert prior.parts()[1].rank == 5
