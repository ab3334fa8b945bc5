"""Shipped weights: every entry is what the manifest says; damaged or missing files are errors.
Logits: tests/golden."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.refusals import refuses
from zoo import create_model, list_models, load_model, pretrained

SHIPPED = list_models(pretrained=True)
NAME = "text_ggd_ssmax_tiny.facts"
FILE = f"{NAME}.safetensors"


def test_weights_have_card_and_digest() -> None:
    """Weights have a card a place and their digest."""
    for name in SHIPPED:
        entry = pretrained.manifest()[name]
        file = pretrained.verified_file(name)
        assert file.stat().st_size == entry["bytes"]
        assert file.parent == (
            pretrained.WEIGHTS if entry["bytes"] <= 2_000_000 else pretrained.RELEASE
        )
        assert f"\n# {name}\n" in (pretrained.WEIGHTS / f"{name}.md").read_text()
        assert {"data", "recipe", "seed", "commit", "license", "measured"} <= set(entry)
        with safe_open(file, "pt") as tensors:
            queries = [key for key in tensors.keys() if "query" in key]  # noqa: SIM118
            dtypes = {tensors.get_slice(key).get_dtype() for key in queries}
        assert dtypes == {"BF16"}


def test_names_of_weights() -> None:
    for call, message in [
        (lambda: create_model("text_ggd_ssmax_tiny.factss"), "there are text_ggd_ssmax_tiny.facts"),
        (
            lambda: create_model("text_ggd_ssmax_small.facts"),
            "no weights 'text_ggd_ssmax_small.facts'; did you mean",
        ),
        (lambda: create_model(NAME, dim=64), "do not fit this model"),
    ]:
        refuses(message, call)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose manifest names weights that it does not have, beside an empty release/."""
    folder = tmp_path / "package"
    folder.mkdir()
    for name in ("manifest.json", "manifest.sha256"):
        shutil.copy(pretrained.WEIGHTS / name, folder)
    monkeypatch.setattr(pretrained, "WEIGHTS", folder)
    monkeypatch.setattr(pretrained, "RELEASE", tmp_path / "release")
    return folder


def test_where_files_are(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (Path(pretrained.__file__).parent / "weights" / FILE).read_bytes()
    with pytest.raises(
        FileNotFoundError,
        match=r"1.9 MB.* neither in .*release.*: set PRIORZOO_WEIGHTS to a folder",
    ):
        create_model(NAME)
    for folder in ("release", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / FILE).write_bytes(content)
    assert pretrained.verified_file(NAME) == tmp_path / "release" / FILE
    monkeypatch.setenv("PRIORZOO_WEIGHTS", str(tmp_path / "elsewhere"))
    assert pretrained.verified_file(NAME) == tmp_path / "elsewhere" / FILE
    (tmp_path / "elsewhere" / FILE).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refuses("is damaged: its SHA-256 is", create_model, NAME)


def test_damaged_manifest_is_error(package: Path) -> None:
    """A damaged manifest is an error."""
    assert pretrained.manifest() == json.loads((package / "manifest.json").read_text())
    pretrained._read_manifest.cache_clear()
    (package / "manifest.json").write_text(
        (package / "manifest.json").read_text().replace("facts", "fakts", 1)
    )
    refuses(r"manifest\.json is damaged", pretrained.manifest)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_other_dtype_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Weights of another dtype are refused."""
    create_model("text_ggd_tiny", num_layers=1).save_pretrained(tmp_path)
    (tmp_path / "manifest.json").unlink()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"norm.weight": tensors["norm.weight"].to(dtype)}, tmp_path / "model.safetensors"
    )
    refuses(
        r"'norm.weight' has dtype .* expected float16, bfloat16, float32 or float64",
        load_model,
        tmp_path,
    )
