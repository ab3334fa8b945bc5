"""Damaged, hostile and huge files: a reader reads them or says in one line what is wrong, and
nothing else happens."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from modalities.dna.genome import open_genome
from modalities.dna.sources import find_source
from modalities.dna.variants import read_variants
from modalities.settings import LengthSettings
from modalities.text import CausalLM, TextConfig, sources
from modalities.text.data import TokenCorpus, corpus_of
from modalities.text.sources import Document, open_source
from modalities.text.tokenizers import load_tokenizer
from modalities.tokenizers.encoding import ByteTokenizer
from modalities.vision.images import decode_image
from modalities.vision.sources import open_images
from tests.durability.files import DAMAGE, Peak, Runs, save_model, whole_files
from tests.refusals import refuses
from tests.vision.image_files import encoded, solid, tar
from zoo.catalog import load_model
from zoo.files import parse_json, read_json, seal

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of damaged metadata
WHOLE = whole_files()


def read(path: Path) -> None:
    """All of a file, by the reader of its kind."""
    ending = path.name.partition(".")[2].removesuffix(".gz")
    if ending in ("txt", "jsonl"):
        list(open_source(str(path)))
    elif ending == "png":
        decode_image(path.read_bytes())
    elif ending == "tar":
        images = open_images(f"wds:{path}", "all")
        for number in range(len(images)):
            images.read(number)
    elif ending == "fa":
        open_genome(find_source(str(path)))
    else:
        for _ in read_variants(path):
            pass


@pytest.mark.parametrize("name", WHOLE)
def test_damaged_file_never_crashes(name: str, tmp_path: Path) -> None:
    """A damaged file is read or refused."""
    (tmp_path / name).write_bytes(WHOLE[name])
    read(tmp_path / name)
    refused = 0
    for kind, damage in DAMAGE.items():
        path = tmp_path / kind.replace(" ", "") / name
        path.parent.mkdir()
        path.write_bytes(damage(WHOLE[name]))
        try:
            with Peak() as peak:
                read(path)
        except ValueError as error:
            refused += 1
            assert name in str(error) or name == "a.png", f"{kind}: {error}"
            assert "\n" not in str(error).strip()
        assert peak.bytes < 64 * 2**20
    assert refused >= (1 if name == "a.txt" else 2)


# ---- code


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """The folder that code from a file would make; there is none at the end."""
    path = tmp_path / "ran"
    pickle.loads(pickle.dumps(Runs(path)))
    assert path.is_dir(), "the trap does not spring"
    path.rmdir()
    yield path
    assert not path.exists(), "code from a file has run"


def test_tar_members_are_bytes(mark: Path, tmp_path: Path) -> None:
    """Of whatever suffix: webdataset's own decoders unpickle some of them."""
    trap = pickle.dumps(Runs(mark))
    npy = io.BytesIO()
    np.save(npy, np.array([Runs(mark)], dtype=object), allow_pickle=True)
    endings = dict.fromkeys(("pyd", "pickle", "pkl", "pth", "pt", "ten", "mp"), trap)
    sample = {"png": encoded(solid(0)), "cls": b"0", **endings, "npy": npy.getvalue()}
    (tmp_path / "a.tar").write_bytes(tar((n, sample) for n in "01"))
    assert open_images(f"wds:{tmp_path / 'a.tar'}", "all").read(1)[1] == 0
    (tmp_path / "b.tar").write_bytes(tar([("0", {"png": trap, "cls": trap})]))
    refuses("label", open_images(f"wds:{tmp_path / 'b.tar'}", "all").read, 0)
    refuses("unknown format", decode_image, trap)


@pytest.mark.parametrize(
    "open_", [lambda spec: list(open_source(spec)), lambda spec: open_images(spec, "all")]
)
def test_dataset_script_is_not_run(open_, mark: Path, tmp_path: Path, monkeypatch) -> None:
    """A dataset s script is not run."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "dataset.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    for spec in (f"hf:{folder}", f"hf:{folder / 'dataset.py'}"):
        refuses(r".+", open_, spec, error=Exception)  # of a kind that is the library's


def test_no_pickle_is_loaded(mark: Path, tmp_path: Path) -> None:
    """Weights tokens and tokenizers are no pickles."""
    save_model(tmp_path / "model")
    torch.save({"model": Runs(mark)}, tmp_path / "model" / "model.safetensors")
    refuses("is no safetensors file", load_model, tmp_path / "model")
    corpus_of([Document("words")], ByteTokenizer()).save(tmp_path / "tokens")
    np.save(
        tmp_path / "tokens" / "tokens.npy", np.array([Runs(mark)], dtype=object), allow_pickle=True
    )
    seal(tmp_path / "tokens")
    refuses(r"memory-mapped|allow_pickle", TokenCorpus.load, tmp_path / "tokens")
    (tmp_path / "tokenizer.json").write_bytes(pickle.dumps(Runs(mark)))
    for spec in (f"hf:{tmp_path}", f"{tmp_path}/tokenizer.json", f"gpt2:{tmp_path}"):
        refuses(str(tmp_path), load_tokenizer, spec, error=(ValueError, FileNotFoundError))


# ---- sizes


def test_memory_follows_file_size(tmp_path: Path, monkeypatch) -> None:
    """Memory follows what a file holds and not its numbers."""
    (tmp_path / "deep.jsonl").write_text("[" * 10**5)
    refuses(r"deep\.jsonl, row 1: not JSON .*nested too deep", read, tmp_path / "deep.jsonl")
    monkeypatch.setattr(sources, "LONGEST_ROW", 1 << 16)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        for piece in (b'{"text": "', *[b" " * 2**20] * 16, b'"}'):
            file.write(piece)
    with (
        Peak() as peak,
        pytest.raises(ValueError, match=r"a\.jsonl\.gz, row 1: more than 65,536 bytes"),
    ):
        read(tmp_path / "a.jsonl.gz")
    assert peak.bytes < 2 * 2**20
    refuses("nested too deep", parse_json, "[" * 10**5, "x")
    refuses(
        r"100,000 bytes of JSON; at most 1,000 are read",
        read_json,
        tmp_path / "deep.jsonl",
        most=1000,
    )


def test_weights_fit_configuration(tmp_path: Path) -> None:
    """Weights are finite and fit their configuration."""
    save_model(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    config = tmp_path / "model" / "config.json"
    state = load_file(path)
    save_file(state | {"norm.weight": torch.full_like(state["norm.weight"], float("nan"))}, path)
    refuses(
        r"the tensor 'norm\.weight' has values that are not fin", load_model, tmp_path / "model"
    )
    save_file(state, path)
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"vocab_size": 2**24, "dim": 2**15})
    )  # 2 TiB
    refuses(
        r"do not fit its config\.json: 'embedding\.weight' has shape \(264, 8\)",
        load_model,
        tmp_path / "model",
    )
    for content in (
        b"[]",
        b"{",
        b'{"modality": 3}',
        b"\0",
        b'{"a": "\xff"}',
        b'{"a": ' + b"[" * 10**5,
    ):
        config.write_bytes(content)
        refuses(r"config\.json|holds a model of 3", CausalLM.from_pretrained, tmp_path / "model")


def test_numbers_are_bounded() -> None:
    refuses(
        "num_layers=1000000: expected a whole number from 1 to 1,024", TextConfig, num_layers=10**6
    )
    refuses(
        r"a model of about .* parameters; at most",
        TextConfig,
        dim=2**17,
        hidden_dim=2**20,
        num_layers=1024,
    )
    refuses(
        "lengths 99,999,999,999: expected at most 134,217,728",
        LengthSettings,
        lengths=(128, 99_999_999_999),
    )
