"""What a layer would launch on a GPU: how much, and that nothing waits for the device's values."""

from __future__ import annotations

import gc
import json
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

from modalities.decoder import causal_lm_loss
from modalities.dna.model import next_token_loss
from modalities.loading import to_device
from tools import bench
from tools.benches.launches import WAITING, Launches, count, launching
from zoo import create_model
from zoo.attention import dispatch, triton


@pytest.fixture(autouse=True)
def nothing_to_finalise() -> None:
    """What earlier tests left, such as engines, is freed before operations are counted, and not while they are."""
    gc.collect()


@pytest.mark.parametrize(
    ("method", "documents", "most"),
    [("ggd_ssmax", False, 10), ("ggd", False, 10), ("kerple", False, 10), ("alibi", True, 10), ("goat", True, 12)],
)
def test_a_layer_launches_few_kernels(method: str, documents: bool, most: int) -> None:
    """Forward, torch's and Triton's together, per layer of twelve; with a plan, as from 4,096 keys on."""
    found = count(method, documents=documents)
    assert found["forward_torch"] + found["forward_triton"] <= most, found
    alone = count(method, documents=documents, together=False)
    assert alone["forward_torch"] > 2 * found["forward_torch"]


@pytest.mark.parametrize("name", ["text_ggd_ssmax_tiny", "text_goat_tiny", "text_rope_tiny", "dna_goat_tiny"])
def test_nothing_in_a_step_waits_for_the_device(name: str) -> None:
    model = create_model(name, num_layers=2)
    tokens = torch.randint(0, 4, (2, 33))
    packed = torch.tensor([[0] * 20 + [1] * 13, [0] * 33])
    loss_of = next_token_loss if name.startswith("dna") else causal_lm_loss
    for segments in (packed, torch.zeros_like(packed)):
        batch = to_device({"tokens": tokens, "segments": segments}, "cpu")
        seen = Launches(refused=WAITING)
        with launching(seen), patch.object(dispatch, "choose_kernel", lambda call: "triton"), by_stand_in(), seen:
            loss, _ = loss_of(model, batch)
            loss.backward()
        assert seen.triton and seen.names
    with pytest.raises(RuntimeError, match="waits for values"), Launches(refused=WAITING):
        causal_lm_loss(model, {"tokens": tokens, "segments": packed})


def test_the_command_writes_what_it_counts(tmp_path: Path) -> None:
    out = tmp_path / "launches.json"
    done = CliRunner().invoke(
        bench.application("launches"), ["launches", "--methods", "alibi", "--seconds", "0", "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["results"]
    assert [(row["documents"], row["together"]) for row in rows] == list(product((False, True), repeat=2))
    assert all(row["host_us"] > 0 for row in rows)


def by_stand_in():
    """The fused kernel serves calls on the CPU, its launches being counted and not made."""
    return patch.object(triton.TRITON, "interpreted", lambda: True)
