"""Llamas made of RoPE models, and training on what `zoo.adapt` made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")

import zoo
from modalities.decoder.llama import as_llama
from modalities.text import adapting
from modalities.text.adapting import IGNORED, adaptation_rows, rows_at_once
from recipes import adapt
from tests.text.outside_models import llama_of
from zoo.adapters.layer import RECORD
from zoo.adapters.released import open_released
from zoo.catalog import list_models

[ROPE] = list_models("text_rope_tiny*", pretrained=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return llama_of(zoo.create_model(ROPE), tmp_path_factory.mktemp("base") / "llama")


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": 2}, {"tied": False}, {"position_options": {"theta": 5e5}}]
)
def test_rope_model_is_a_llama(options: dict[str, object]) -> None:
    """A rope model is a llama."""
    torch.manual_seed(0)
    model = zoo.create_model("text_rope_tiny", **options).eval()
    tokens = torch.randint(0, 256, (2, 300))
    with torch.no_grad():
        expected = model(tokens)
        got = as_llama(model).eval()(tokens).logits
    assert (got - expected).abs().max() < 2e-5 * expected.abs().max().clamp(min=1)


def test_non_llama_is_named() -> None:
    """What is no llama is said."""
    with pytest.raises(ValueError, match="style='gpt2', ssmax"):
        as_llama(zoo.create_model("text_rope_ssmax_tiny", style="gpt2"))


def test_rows_are_packed_documents(tmp_path: Path) -> None:
    texts = [
        {"id": str(n), "text": f"The document of number {n}, and no other."} for n in range(100)
    ]
    (tmp_path / "short.jsonl").write_text("\n".join(map(json.dumps, texts)))
    rows = adaptation_rows("bytes", str(tmp_path / "short.jsonl"), 64, count=200)
    assert len(rows) == 200
    seen = 0
    for row in rows:
        starts = row["position_ids"] == 0
        assert all(len(row[name]) == 64 for name in ("input_ids", "labels", "position_ids"))
        assert (row["labels"][starts] == IGNORED).all()
        inside = row["labels"] != IGNORED
        assert torch.equal(row["labels"][inside], row["input_ids"][inside])
        assert ((row["position_ids"].diff() == 1) | (row["position_ids"][1:] == 0)).all()
        seen += int(starts[1:].sum())
    assert seen  # documents that begin inside a row


def test_passes_divide_a_batch() -> None:
    sizes = {(3, 4096): 1, (4, 4096): 2, (32, 512): 16, (6, 2000): 3, (1, 20_000): 1}
    assert {key: rows_at_once(*key) for key in sizes} == sizes


@pytest.mark.slow
def test_command_adapts_and_saves(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command adapts trains and saves."""
    out = tmp_path / "adapted"
    words = [llama, "--position", "ggd_goat", "--rope", "drop", "--train", "all", "--out", str(out)]
    words += ["--context", "48", "--batch", "2"]
    assert adapt.main([*words, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "its own positions: drop" in plan
    assert "GiB" in plan
    assert "of held-out losses (estimated)" in plan
    assert "times those of sotu-excerpt" in plan
    assert not out.exists()
    assert adapt.main([*words, "--steps", "3"]) == 0
    told = capsys.readouterr().out
    assert all(f"held-out loss, {stage}" in told for stage in ("as it came", "adapted", "trained"))
    assert "step 3/3  loss" in told
    model = zoo.load_adapted(out)
    before = open_released(llama).state_dict()
    after = model.state_dict()
    moved = [name for name, value in before.items() if not torch.equal(after[name], value)]
    moved += [
        n for n, p in model.named_parameters() if n.endswith("theta_beta") and p.abs().max() > 0
    ]
    assert len(moved) == len(before) + len(model.model.layers)
    assert adapt.main(words) == 2
    assert "holds a model already" in capsys.readouterr().err
    assert adapt.main([str(out), "--train", "prior", "--out", str(tmp_path / "again")]) == 2
    assert "expected --train all" in capsys.readouterr().err


@pytest.mark.slow
def test_stop_after_training_keeps_adapter(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill while the last held-out loss is measured leaves a whole adapter."""
    out = tmp_path / "adapted"
    losses = iter([1.0, 2.0])

    def measure(model: object, rows: object) -> float:
        value = next(losses, None)
        if value is None:
            raise KeyboardInterrupt
        return value

    monkeypatch.setattr(adapting, "heldout_loss", measure)
    words = [llama, "--position", "ggd", "--train", "prior", "--out", str(out), "--steps", "2"]
    assert adapt.main([*words, "--context", "48", "--batch", "2"]) == 130
    record = zoo.load_adapted(out).__dict__[RECORD]
    assert record["training"]["tokens"] == 2 * 2 * 48


ADAPTERS = [["--train", "prior", "--position", "ggd"]]
ADAPTERS += [
    ["--train", "lora", "--rank", "2", "--position", "ggd", "--set", "init=alibi", "--rope", "drop"]
]


@pytest.mark.slow
@pytest.mark.parametrize("words", ADAPTERS, ids=["prior", "both"])
def test_adapter_trained_and_measured(
    words: list[str], llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a scaled rotation and in bfloat16, itself in float32; resumed its files are those of
    the whole run, to the bit."""
    run = [
        f"{llama}@yarn=2,dtype=bfloat16",
        *words,
        "--context",
        "48",
        "--batch",
        "2",
        "--steps",
        "4",
    ]
    with monkeypatch.context() as patched:
        patched.setattr(adapting, "CHECKPOINTED", 64)  # layers are computed again, to the same bits
        assert adapt.main([*run, "--out", str(tmp_path / "whole")]) == 0
    shutil.copytree(
        tmp_path / "whole/checkpoints/checkpoint-3", tmp_path / "parts/checkpoints/checkpoint-3"
    )
    assert adapt.main([*run, "--out", str(tmp_path / "parts"), "--resume"]) == 0
    files = [(tmp_path / name / "adapter.safetensors").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]
    assert len(files[0]) < 200_000
    record = json.loads((tmp_path / "whole/adapter.json").read_text())
    assert record["settings"] == {"yarn": 2}
    assert "384 tokens" in record["training"]["data"]
    own = open_released(llama)
    loaded = zoo.load_adapted(tmp_path / "whole")
    trained = {
        name: p
        for name, p in loaded.named_parameters()
        if p.requires_grad and "base_layer" not in name
    }
    assert all(
        p.dtype == torch.float32 for p in load_file(tmp_path / "whole/adapter.safetensors").values()
    )
    assert any("lora_B" in name and p.abs().max() > 0 for name, p in trained.items()) == (
        "lora" in words
    )
    weights = {
        name.replace(".base_layer", ""): value for name, value in loaded.state_dict().items()
    }
    assert all(torch.equal(weights[name], value) for name, value in own.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["text_ggd_goat_tiny"], "no such folder"),
        (["LLAMA", "--position", "nope", "--train", "prior"], "nothing would be trained"),
        (["LLAMA", "--resume"], "has no checkpoint"),
        (["LLAMA", "--train", "priors"], "did you mean 'prior'"),
        (["LLAMA", "--position", "rope"], "rotation"),
        (
            ["LLAMA", "--train", "lora", "--steps", "0"],
            "LoRA starts without effect; expected --train prior",
        ),
        (["LLAMA", "--lr", "-1"], "--lr -1.0: expected a number of at least 0"),
        (["LLAMA@yarm=2"], "did you mean 'yarn'"),
        (["LLAMA@soft=40", "--position", "ggd", "--steps", "0"], "has a prior already"),
    ],
)
def test_unadaptable_is_one_line(
    words: list[str],
    what: str,
    llama: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be adapted is one line."""
    monkeypatch.chdir(tmp_path)
    words = [word.replace("LLAMA", llama) for word in words]
    assert adapt.main([*words, "--out", "x", "--context", "32"]) == 2
    told = capsys.readouterr().err
    assert what in told
    assert "Traceback" not in told
    assert not (tmp_path / "x").exists()
