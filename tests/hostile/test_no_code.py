"""Nothing in data or weights is run. Each file here would make a folder, were it unpickled or imported."""

from __future__ import annotations

import io
import json
import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from modalities.dna.genome import open_genome
from modalities.dna.sources import find_source
from modalities.text.corpus import TokenCorpus, corpus_of
from modalities.text.model import CausalLM, TextConfig
from modalities.text.outside import OUTSIDE
from modalities.text.sources import Document, open_source
from modalities.text.tokenizers import ByteTokenizer, load_tokenizer
from modalities.vision.config import VisionDataConfig
from modalities.vision.data import build_loader
from modalities.vision.shards import open_shards
from modalities.vision.sources import open_images
from tests.vision.image_files import encoded, solid, take, write_tar
from zoo.adapters import load_adapted
from zoo.adapters.layer import RECORD
from zoo.files import file_sha256
from zoo.pretrained import load_pretrained
from zoo.registry import load_model

REFUSED = (ValueError, FileNotFoundError)


class Runs:
    """Unpickles by making a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def mark(tmp_path):
    """The folder that code from a file would make; there is none at the end."""
    path = tmp_path / "ran"
    pickle.loads(pickle.dumps(Runs(path)))
    assert path.is_dir(), "the trap does not spring"
    path.rmdir()
    yield path
    assert not path.exists(), "code from a file has run"


def script(mark):
    return f"import os\nos.mkdir({str(mark)!r})\n"


def torch_file(mark, path):
    torch.save({"model": Runs(mark)}, path)
    return path


def object_array(mark, path):
    np.save(path, np.array([Runs(mark)], dtype=object), allow_pickle=True)
    return path


def small_model(folder):
    model = CausalLM(TextConfig(dim=8, num_layers=1, num_heads=2, hidden_dim=8, position="nope", vocab_size=264))
    model.save_pretrained(folder)
    (folder / "manifest.json").unlink()  # whoever changes a file may change its digest too
    return model


def test_members_of_a_tar_are_bytes(mark, tmp_path):
    """Of whatever suffix: webdataset's own decoders unpickle some of them."""
    npy = io.BytesIO()
    np.save(npy, np.array([Runs(mark)], dtype=object), allow_pickle=True)
    pickled = dict.fromkeys(("pyd", "pickle", "pkl", "pth", "pt", "ten", "mp"), pickle.dumps(Runs(mark)))
    members = {"png": encoded(solid(3)), "cls": b"0", **pickled, "npy": npy.getvalue(), "npz": npy.getvalue()}
    path = write_tar(tmp_path / "a.tar", [(f"{n}", members) for n in range(2)])
    images = open_images(f"wds:{path}", "all")
    assert images.read(1)[1] == 0 and images[0]["pickle"] == members["pickle"]
    config = VisionDataConfig(source=f"wds:{path}", image_size=8, num_classes=2, augment="none", shuffle_buffer=2)
    assert len(take(build_loader(config, micro_batch=2), 2)) == 2
    pickled = write_tar(tmp_path / "b.tar", [("0", {"png": pickle.dumps(Runs(mark)), "cls": pickle.dumps(Runs(mark))})])
    with pytest.raises(ValueError, match="bad label"):
        open_images(f"wds:{pickled}", "all").read(0)


def test_a_tar_s_index_is_json(mark, tmp_path):
    write_tar(tmp_path / "a.tar", [("0", {"png": encoded(solid(3)), "cls": b"0"})])
    (tmp_path / "index.json").write_bytes(pickle.dumps(Runs(mark)))
    with pytest.raises(ValueError, match=r"index\.json: not JSON"):
        open_shards("x", str(tmp_path))


@pytest.mark.parametrize("read", [lambda spec: list(open_source(spec)), lambda spec: open_images(spec, "all")])
def test_a_dataset_s_script_is_not_run(read, mark, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "dataset.py").write_text(script(mark))
    with pytest.raises(Exception, match=r".+"):
        read(f"hf:{folder}")
    with pytest.raises(Exception, match=r".+"):
        read(f"hf:{folder / 'dataset.py'}")


def test_a_dataset_of_tars_is_not_unpickled(mark, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    traps = {"pickle": pickle.dumps(Runs(mark)), "pyd": pickle.dumps(Runs(mark)), "json": b'{"text": "words"}'}
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "train-0.tar", [(f"{n}", traps) for n in range(3)])
    with pytest.raises(Exception, match=r".+"):
        list(open_source(f"hf:{tmp_path / 'data'}"))


def test_tokens_are_no_objects(mark, tmp_path):
    corpus_of([Document("a", "words")], ByteTokenizer()).save(tmp_path / "tokens")
    for name in ("tokens.npy", "offsets.npy"):
        before = (tmp_path / "tokens" / name).read_bytes()
        object_array(mark, tmp_path / "tokens" / name)
        with pytest.raises(ValueError, match=f"{name}: damaged .*allow_pickle|Array can't be memory-mapped"):
            TokenCorpus.load(tmp_path / "tokens")
        (tmp_path / "tokens" / name).write_bytes(pickle.dumps(Runs(mark)))
        with pytest.raises(ValueError, match=f"{name}: damaged"):
            TokenCorpus.load(tmp_path / "tokens")
        (tmp_path / "tokens" / name).write_bytes(before)


def test_a_genome_s_store_is_no_pickle(mark, tmp_path):
    (tmp_path / "a.fa").write_text(">a\nACGTNNA\n")
    source = find_source(str(tmp_path / "a.fa"))
    before = open_genome(source, cache_dir=tmp_path / "cache").fingerprint
    (unknown,) = (tmp_path / "cache").glob("*/unknown.npy")
    object_array(mark, unknown)
    from modalities.dna import genome

    genome._open.cache_clear()
    assert open_genome(source, cache_dir=tmp_path / "cache").fingerprint == before


def test_a_saved_model_is_safetensors_alone(mark, tmp_path):
    small_model(tmp_path / "model")
    torch_file(mark, tmp_path / "model" / "pytorch_model.bin")
    load_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_model(tmp_path / "model")
    torch_file(mark, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ValueError, match=r"is no safetensors file"):
        load_model(tmp_path / "model")


def test_weights_of_a_manifest_are_safetensors_alone(mark, tmp_path):
    model = small_model(tmp_path / "model")
    path = torch_file(mark, tmp_path / "a.safetensors")
    (tmp_path / "manifest.json").write_text(json.dumps({"x.y": {"file": path.name, "sha256": file_sha256(path)}}))
    with pytest.raises(ValueError, match=r"is no safetensors file"):
        load_pretrained(model, "x.y", tmp_path)


def test_a_tokenizer_s_code_is_not_run(mark, tmp_path):
    (tmp_path / "tokenizer.py").write_text(script(mark))
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenizer.Own", "tokenizer.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="hf:"):
        load_tokenizer(f"hf:{tmp_path}")
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
        (tmp_path / name).write_bytes(pickle.dumps(Runs(mark)))
    for spec in (f"hf:{tmp_path}", f"{tmp_path}/tokenizer.json", f"gpt2:{tmp_path}"):
        with pytest.raises(REFUSED, match=str(tmp_path)):
            load_tokenizer(spec)


@pytest.mark.parametrize("load", [OUTSIDE.load, load_adapted])
def test_models_of_transformers_run_nothing(load, mark, tmp_path):
    (tmp_path / "own.py").write_text(script(mark))
    torch_file(mark, tmp_path / "pytorch_model.bin")
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"), 2)
    config = {"model_type": "llama", "vocab_size": 8, **sizes, RECORD: {"position": "nope", "options": {}}}
    for more in ({}, {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}):
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        with pytest.raises(Exception, match=r".+"):  # of a kind that is the library's
            load(str(tmp_path))


def test_images_are_images(mark):
    from modalities.vision.images import decode_image

    with pytest.raises(ValueError, match="unknown format"):
        decode_image(pickle.dumps(Runs(mark)))
    stream = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, "PNG", exif=pickle.dumps(Runs(mark)))
    decode_image(stream.getvalue())
