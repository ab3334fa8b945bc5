"""Shipped weights: every entry is what the manifest says; damaged or missing files are errors. Logits: tests/golden."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from zoo import catalog, create_model, list_models, load_model
from zoo.catalog import write_manifest
from zoo.files import file_sha256

SHIPPED = list_models(pretrained=True)
NAME = "text_ggd_ssmax_tiny.facts"


def test_the_promised_methods_ship() -> None:
    text = [*(f"{m}{s}" for m in ("ggd_goat", "ggd", "goat", "rope") for s in ("", "_ssmax")), "alibi", "cable", "t5"]
    grids = "goat ggd2d ggd2d_separable alibi rope2d_axial rope2d_mixed learned sinusoidal nope"
    dna = "goat ggd_ssmax alibi rope nope cable"
    assert {f"text_{method}_tiny.facts" for method in text} <= set(SHIPPED)
    assert {f"vision_{method}_ssmax_tiny_patch8.glyphs" for method in grids.split()} <= set(SHIPPED)
    assert {f"dna_{method}_tiny.genomes" for method in dna.split()} <= set(SHIPPED)


def test_weights_have_a_card_a_place_and_their_digest() -> None:
    for name in SHIPPED:
        entry, file = catalog.manifest()[name], catalog.verified_file(name)
        assert file.stat().st_size == entry["bytes"]
        assert file.parent == (catalog.WEIGHTS if entry["bytes"] <= catalog.BUNDLED else catalog.RELEASE)
        assert f"\n# {name}\n" in (catalog.WEIGHTS / f"{name}.md").read_text()
        assert {"data", "recipe", "seed", "commit", "license", "measured"} <= set(entry)
        with safe_open(file, "pt") as tensors:
            dtypes = {tensors.get_slice(key).get_dtype() for key in tensors.keys() if "query" in key}  # noqa: SIM118
        assert dtypes == {"BF16"}


def test_pretrained_takes_the_first_tag() -> None:
    tagged, plain = create_model(NAME), create_model("text_ggd_ssmax_tiny", pretrained=True)
    assert all(torch.equal(a, b) for a, b in zip(tagged.parameters(), plain.parameters(), strict=True))


def test_weights_that_do_not_exist() -> None:
    for call, message in [
        (lambda: create_model("text_ggd_ssmax_tiny.factss"), "it has: facts"),
        (lambda: create_model("text_ggd_ssmax_small", pretrained=True), "no weights ship"),
        (lambda: create_model(NAME, dim=64), "do not fit this model"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_damaged_and_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, content = catalog.manifest()[NAME]["file"], bytearray(catalog.verified_file(NAME).read_bytes())
    (tmp_path / "manifest.json").write_text(json.dumps(catalog.manifest()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(catalog, "RELEASE", tmp_path / "release")  # of a checkout
    catalog.RELEASE.mkdir()
    (catalog.RELEASE / file).write_bytes(content)
    assert catalog.verified_file(NAME, tmp_path) == catalog.RELEASE / file
    (catalog.RELEASE / file).unlink()
    content[-1] ^= 1
    with pytest.raises(FileNotFoundError, match=r"neither in the package nor in .*: set PRIORZOO_WEIGHTS to a folder"):
        catalog.verified_file(NAME, tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: its SHA-256 is"):
        catalog.verified_file(NAME, tmp_path)


def test_a_damaged_manifest_is_an_error(tmp_path):
    write_manifest({"a": {"file": "a.safetensors"}}, tmp_path)
    assert list(catalog.manifest(tmp_path)) == ["a"]
    (tmp_path / "other").mkdir()
    text = (tmp_path / "manifest.json").read_text().replace("a.safe", "b.safe")
    (tmp_path / "other/manifest.json").write_text(text)
    (tmp_path / "other/manifest.sha256").write_bytes((tmp_path / "manifest.sha256").read_bytes())
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        catalog.manifest(tmp_path / "other")
    shipped = catalog.WEIGHTS
    assert file_sha256(shipped / "manifest.json") == (shipped / "manifest.sha256").read_text().strip()


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_weights_of_another_dtype_are_refused(tmp_path, dtype):
    model = create_model("text_ggd_tiny", num_layers=1)
    model.save_pretrained(tmp_path)
    (tmp_path / "manifest.json").unlink()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"norm.weight": tensors["norm.weight"].to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'norm.weight' has dtype .* expected float16, bfloat16, float32 or float64"):
        load_model(tmp_path)


def test_a_damaged_configuration_says_what_is_wrong(tmp_path):
    create_model("text_ggd_tiny", num_layers=1).save_pretrained(tmp_path)
    for content, reason in (
        (b'{"a": "\xff"}', "decode"),
        (b'{"a": ' + b"[" * 100_000, "nested too deep"),
        (b"{", "not JSON"),
    ):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            load_model(tmp_path)
