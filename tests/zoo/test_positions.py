"""Positions, and the encodings that read them."""

from __future__ import annotations

import math

import pytest
import torch

from tests.refusals import refuses
from zoo import Positions
from zoo.embeddings import Learned, Sinusoidal
from zoo.rotary import Rotary


def test_line_and_documents() -> None:
    assert Positions.line(3, offset=5).index().tolist() == [[5, 6, 7]]
    segments = torch.tensor([[0, 0, 0, 4, 4], [-1, -1, 0, 0, 0]])
    assert Positions.documents(segments).index().tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert Positions.documents(segments).row_index().tolist() == [0, 1, 2, 3, 4]


def test_parts_keep_positions() -> None:
    """Parts of a line keep their places."""
    segments = torch.tensor([[0, 0, 0, 4, 4, 4]])
    for part in (
        Positions.documents(segments).slice(2, 5),
        Positions.documents(segments).slice(0, 5).tail(3),
    ):
        assert (part.length, part.offset, part.index().tolist()) == (3, 2, [[2, 0, 1]])
    for start, stop in ((-1, 2), (2, 2), (0, 7)):
        refuses(rf"\[{start}, {stop}\) of 6", Positions.line(6).slice, start, stop)
    refuses("of a line", Positions.grid(2, 3).slice, 0, 2)


@pytest.mark.parametrize(
    ("scaling", "theta", "partial", "more"),
    [
        ("linear", 1e4, 1.0, {}),
        ("linear", 1e4, 0.25, {}),
        ("yarn", 1e4, 1.0, {}),
        ("yarn", 5e5, 0.5, {"truncate": False}),
        ("yarn", 5e5, 1.0, {"mscale": 0.7, "mscale_all_dim": 1.2}),
        ("yarn", 1e4, 1.0, {"attention_factor": 1.3}),
        ("proportional", 1e4, 0.3, {}),
    ],
)
def test_rotary_scalings_equal_transformers(
    scaling: str, theta: float, partial: float, more: dict
) -> None:
    """Rotary scalings are those of transformers."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=2048,
        rope_parameters=dict(
            rope_type=scaling, rope_theta=theta, factor=8.0, original_max_position_embeddings=2048
        )
        | {"partial_rotary_factor": partial}
        | more,
    )
    theirs, lengthened = ROPE_INIT_FUNCTIONS[scaling](config, "cpu")
    ours = Rotary(
        64, theta=theta, train_context=2048, scaling=scaling, factor=8.0, partial=partial, **more
    )
    torch.testing.assert_close(ours.frequencies().float(), theirs, rtol=2e-6, atol=0)
    x = torch.randn(1, 1, 3, 65)
    turned = ours(x, Positions.line(3))
    width = 2 * len(theirs)
    torch.testing.assert_close(
        turned[..., :width].norm(dim=-1), (lengthened * x)[..., :width].norm(dim=-1)
    )
    assert torch.equal(turned[..., width:], x[..., width:])


def test_embeddings() -> None:
    like = torch.zeros(1, dtype=torch.float32)
    sinusoidal = Sinusoidal(8)(Positions.line(5, offset=3), like)
    assert sinusoidal.shape == (1, 5, 8)
    assert sinusoidal[0, 0, 0].item() == pytest.approx(math.sin(3))
    learned = Learned(8, train_context=4)
    assert torch.equal(learned(Positions.line(4), like)[0], learned.weight)
    refuses("end at 4 tokens, got position 4", learned, Positions.line(5), like)


def test_bad_rotary_options() -> None:
    for options, message in [
        ({"scaling": "yarm", "factor": 2.0}, "known: none, linear, ntk, yarn, proportional"),
        (
            {"scaling": "linear", "factor": 0.5},
            "factor must be a finite number of 1 or more, got 0.5",
        ),
        ({"scaling": "yarn", "factor": 2.0}, "'yarn' needs train_context"),
        ({"partial": 0.2}, r"partial=0.2: expected a share of 1 or less, an even number of 16"),
        ({"mscale": 1.0}, "'yarn' does"),
        (
            {"scaling": "yarn", "factor": 2.0, "train_context": 9, "mscale": 1.0},
            "mscale and mscale_all_dim",
        ),
    ]:
        refuses(message, Rotary, 16, **options)
