"""Priors and encodings on a grid of patches that is not square: rows are rows, columns are columns,
prefixes are neither."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.refusals import refuses
from tests.zoo.priors_table import GRID, make
from zoo import Positions, create_prior
from zoo.embeddings import Learned2d, Sinusoidal2d
from zoo.methods import create_grid_position, list_grid_positions
from zoo.priors import Prior
from zoo.rotary import NormalisedRotary2d, Rotary2d

HEIGHT = 3
WIDTH = 5
PREFIX = 2
POS = Positions.grid(HEIGHT, WIDTH, num_prefix=PREFIX)
PATCHES = [(y, x) for y in range(HEIGHT) for x in range(WIDTH)]
VARIANTS = [(name, {}) for name in GRID]
VARIANTS += [
    ("ggd2d", {"form": "isotropic"}),
    *(("lookhere2d", {"num_heads": heads}) for heads in (4, 6, 12)),
]


def power(ggd, distance: float) -> torch.Tensor:
    return (
        -ggd.theta_alpha.exp()
        * ((-distance - 2 * ggd.theta_mu.sinh()).abs() + 1e-5) ** ggd.theta_beta
    )


def series(spectral, distance: int) -> torch.Tensor:
    angle = distance * spectral.omega
    return (spectral.alpha * angle.cos() + spectral.beta * angle.sin()).sum(-1)


def bucket(distance: int, farthest: int) -> int:
    """Of 16 on an axis: 0 … 3 exact, 4 … 7 logarithmic up to the farthest that training saw, and 8
    more for the sign."""
    far = min(abs(distance), farthest)
    if far >= 4:
        far = min(4 + int(math.log(far / 4) / math.log(max(farthest, 5) / 4) * 4 + 1e-9), 7)
    return far + (8 if distance < 0 else 0)


def relative(prior: Prior, name: str, dy: int, dx: int) -> torch.Tensor:
    """(H,) K at one displacement, from the formula."""
    r = math.hypot(dy, dx)
    if name == "alibi2d":
        return -F.softplus(prior.raw_slope) * r
    if name == "kerple2d":
        return -prior.r1.clamp(min=0.01) * torch.log(1 + prior.r2.clamp(min=0.01) * r)
    if name == "ggd2d":
        return (
            power(prior.r, r) if prior.axes == ("r",) else power(prior.y, dy) + power(prior.x, dx)
        )
    if name == "t5_2d":
        return prior.bias[:, bucket(dy, prior.max_distance[0]), bucket(dx, prior.max_distance[1])]
    if name == "fire2d":
        longest = (
            (prior.length * prior.multiplier).abs().clamp(min=math.hypot(HEIGHT - 1, WIDTH - 1))
        )
        return prior.mlp(
            torch.log(prior.scale.abs() * r + 1) / torch.log(prior.scale.abs() * longest + 1)
        )
    return series(prior.y, dy) + series(prior.x, dx)


def sink(prior: Prior, y: int, x: int) -> torch.Tensor:
    """(H,) the key-only part at one patch."""
    features = []
    for c in (2 * y / (HEIGHT - 1) - 1, 2 * x / (WIDTH - 1) - 1):
        harmonics = [math.pi * m * c for m in range(1, prior.rank // 2 + 1)]
        features += [*map(math.cos, harmonics), *map(math.sin, harmonics), c]
    return prior.gain * prior.mlp(torch.tensor(features, dtype=torch.float64))


def expected(prior: Prior, name: str) -> torch.Tensor:
    """(H, T, T) K, entry by entry."""
    if name == "lookhere2d":
        return F.pad(
            lookhere_by_hand(HEIGHT, WIDTH, prior.num_heads, prior.layer_slope),
            (PREFIX, 0, PREFIX, 0),
        )
    if name == "goat2d":
        return expected(prior.spectral, "spectral2d") + expected(prior.key_bias, "key_bias2d")
    result = torch.zeros(prior.num_heads, POS.length, POS.length, dtype=torch.float64)
    for j, (k_y, k_x) in enumerate(PATCHES, PREFIX):
        if name == "key_bias2d":
            result[:, :, j] = sink(prior, k_y, k_x)[:, None]
            continue
        for i, (q_y, q_x) in enumerate(PATCHES, PREFIX):
            result[:, i, j] = relative(prior, name, q_y - k_y, q_x - k_x)
    if name == "key_bias2d":
        result[:, :, :PREFIX] = prior.bump[:, None, None]
    return result


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_entries_by_row_and_column(name: str, options: dict) -> None:
    """Every entry is that of its rows and columns."""
    prior = make(name, **options)
    truth = expected(prior, name)
    torch.testing.assert_close(
        prior.log_prior(POS, POS, causal=False)[0], truth, atol=1e-12, rtol=0
    )
    dense = prior(POS, POS, causal=False).dense()[0]  # in float32 where the prior holds no numbers
    torch.testing.assert_close(
        dense, truth.to(dense.dtype), atol=1e-12 if dense.dtype == truth.dtype else 1e-6, rtol=0
    )


def test_spectral2d_reach() -> None:
    """Spectral2d reaches as far as it is told."""
    wide = create_prior(
        "goat2d", num_heads=1, rank=5, train_grid=(4, 6), reach=3.0
    ).spectral.bfloat16()
    assert torch.equal(wide.y.omega, wide.x.omega)
    assert wide.x.omega.dtype == torch.float64
    assert wide.x.omega[0].item() == 1
    assert wide.x.omega[-1].item() == pytest.approx(math.pi / 18)


def test_grid_priors_refuse_lines() -> None:
    """Priors of a grid refuse a line and half a grid."""
    for name in GRID:
        line = Positions.line(4)
        refuses("grid", make(name), line, line, causal=False)
        if make(name)(POS, POS, causal=False).table is not None:
            refuses(
                "the same grid", make(name), POS, Positions.grid(5, 3, num_prefix=2), causal=False
            )


def turned_by(rotary: Rotary2d, patch: int) -> torch.Tensor:
    """(H, D/2) angles: what the encoding did to unit vectors along the first of each column
    pair."""
    x = torch.zeros(1, 2, POS.length, 16, dtype=torch.float64)
    x[..., :8] = 1
    turned = rotary(x, POS)[0, :, PREFIX + patch]
    return torch.atan2(turned[:, 8:], turned[:, :8])


@torch.no_grad()
def test_rotary2d_by_row_and_column() -> None:
    """Rotary2d turns by row and column."""
    for form in ["axial", "mixed"]:
        rotary = Rotary2d(16, num_heads=2, form=form).double()
        size = (100.0 if form == "axial" else 10.0) ** -(torch.arange(4, dtype=torch.float64) / 4)
        for n, (y, x) in enumerate(PATCHES):
            axial = torch.cat([y * size, x * size]).expand(2, -1)
            angle = axial if form == "axial" else y * rotary.omega[0] + x * rotary.omega[1]
            wanted = torch.atan2(angle.sin(), angle.cos())
            torch.testing.assert_close(turned_by(rotary, n), wanted, atol=1e-12, rtol=0)


def test_sinusoidal2d_by_axis() -> None:
    """Sinusoidal2d is that of each axis."""
    added = Sinusoidal2d(8)(POS, torch.zeros(1, dtype=torch.float64))
    assert added.shape == (1, POS.length, 8)
    assert (added[:, :PREFIX] == 0).all()
    for n, (y, x) in enumerate(PATCHES, PREFIX):
        angles = [c * omega for c in (y, x) for omega in (1.0, 0.01)]
        wanted = [
            f(a) for pair in (angles[:2], angles[2:]) for f in (math.sin, math.cos) for a in pair
        ]
        assert added[0, n].tolist() == pytest.approx(wanted, abs=1e-12)


def lookhere_by_hand(height: int, width: int, heads: int, layer_slope: float) -> torch.Tensor:
    """(H, T, T) −distance·slope, −1e30 outside the field of view; fields and slopes as the released
    tables have them."""
    looking = {12: 8, 6: 4, 4: 4, 3: 3}[heads]
    every = [*(["up", "down", "left", "right"] * 2)[:looking], *["none"] * (heads - looking)]
    slopes = [
        *([1 / 2] * 4 + [1 / 4] * 4)[:looking],
        *[1 / 4, 1 / 16, 1 / 64, 1 / 256][: heads - looking],
    ]
    patches = [(y, x) for y in range(height) for x in range(width)]
    found = torch.zeros(heads, len(patches), len(patches), dtype=torch.float64)
    for h, (direction, slope) in enumerate(zip(every, slopes, strict=True)):
        for i, (y, x) in enumerate(patches):
            for j, (v, u) in enumerate(patches):
                beyond = {"up": y - v, "down": v - y, "left": x - u, "right": u - x}.get(
                    direction, math.inf
                )
                seen = beyond >= (abs(u - x) if direction in ("up", "down") else abs(v - y))
                found[h, i, j] = -layer_slope * slope * math.hypot(y - v, x - u) if seen else -1e30
    return found


def test_lookhere_slopes_fall() -> None:
    """Slopes of lookhere fall with depth."""
    ends = [create_prior("lookhere2d", num_heads=4, depth=(n, 4)).layer_slope for n in (0, 3)]
    assert ends == [1.5, 0.5]
    assert create_prior("lookhere2d", num_heads=4).layer_slope == 1.0


def test_normalised_rope_is_timms() -> None:
    x = torch.randn(1, 1, POS.length, 12, dtype=torch.float64)
    turned = NormalisedRotary2d(12).eval()(x, POS)[0, 0]
    assert torch.equal(turned[:PREFIX], x[0, 0, :PREFIX])
    timm = pytest.importorskip("timm.layers.pos_embed_sincos").RotaryEmbeddingDinoV3(
        12, rotate_half=True
    )
    sin, cos = timm._create_embed([HEIGHT, WIDTH], no_aug=True).double().chunk(2, dim=-1)
    patches = x[0, 0, PREFIX:]
    halves = torch.cat([-patches[:, 6:], patches[:, :6]], dim=-1)
    torch.testing.assert_close(turned[PREFIX:], patches * cos + halves * sin, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name", [name for name in list_grid_positions() if name.startswith("rope")]
)
def test_queries_and_keys_turn_alike(name: str) -> None:
    """⟨q_i, k_j⟩ of equal vectors is |q|² at one place, and depends on the displacement alone,
    whatever is drawn."""
    drawn = name == "rope2d_normalised"
    made = create_grid_position(name, dim=8, num_heads=1, train_grid=(HEIGHT, WIDTH))
    vector = torch.randn(8, dtype=torch.float64).expand(1, 1, POS.length, 8)
    products = set()
    for _ in range(3):
        q, k = made.rotary.train().both(vector, POS, vector, POS)
        logits = (q @ k.mT)[0, 0, PREFIX:, PREFIX:].reshape(HEIGHT, WIDTH, HEIGHT, WIDTH)
        torch.testing.assert_close(
            logits.flatten(2).flatten(0, 1).diagonal(), vector[0, 0, PREFIX:].square().sum(-1)
        )
        torch.testing.assert_close(logits[1:, :, 1:], logits[:-1, :, :-1])
        products.add(float(logits[0, 0, -1, -1]))
    assert len(products) == (3 if drawn else 1)


def test_learned_positions_resize_as_timm() -> None:
    """Learned positions are resized as timm does."""
    for grid in [(3, 5), (4, 7), (2, 9), (1, 2)]:
        resample = pytest.importorskip("timm.layers").resample_abs_pos_embed
        learned = Learned2d(6, train_grid=(HEIGHT, WIDTH))
        weight = learned.weight.detach().flatten(2).transpose(1, 2)
        expected = resample(weight, list(grid), old_size=[HEIGHT, WIDTH], num_prefix_tokens=0)
        torch.testing.assert_close(
            learned(Positions.grid(*grid), torch.zeros(1)), expected, atol=1e-7, rtol=0
        )
