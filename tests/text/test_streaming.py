"""Streamed sources, on local files of the form that Hugging Face datasets have."""

from __future__ import annotations

import json
import re
from itertools import islice

import pytest
import torch

from modalities.text.config import TextDataConfig
from modalities.text.data import build_loader, load_corpus
from modalities.text.sources import Document, document_split
from modalities.text.tokenizers import load_tokenizer

datasets = pytest.importorskip("datasets")

BYTES = load_tokenizer()
FILES = 4
ROWS = 40


@pytest.fixture(autouse=True)
def quiet(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def texts():
    return [f"<{n:03d}> " + "word " * (n % 7) for n in range(FILES * ROWS)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("shards")
    for file in range(FILES):
        lines = [json.dumps({"body": t}) for t in texts[file::FILES]]
        (folder / f"part-{file}.jsonl").write_text("\n".join(lines) + "\n")
    return f"hf:json?data_files={folder}/*.jsonl&field=body"


def config(spec, **options):
    return TextDataConfig(source=spec, context=8, **options)


def loader(spec, *, rank=0, world=1, **options):
    return build_loader(config(spec, **options), micro_batch=4, rank=rank, world=world)


def train_texts(texts):
    return {t[:5] for t in texts if document_split(Document(t)) == "train"}


@pytest.mark.slow
def test_workers_share_documents(tmp_path):
    """Ranks and workers share the documents without overlap."""
    world = 2
    workers = 2
    texts = [f"<{n:03d}> " + "word " * 160 for n in range(160)]
    for file in range(4):
        (tmp_path / f"{file}.jsonl").write_text(
            "".join(json.dumps({"text": t}) + "\n" for t in texts[file::4])
        )
    options = {"source": f"hf:{tmp_path}", "context": 32, "num_workers": workers}
    # As many whole blocks of 256 windows as surely lie in the first epoch; later epochs deal the
    # files out anew.
    blocks = int(0.7 * 160 * 806 / (world * workers) / (256 * 32))
    seen = []
    for rank in range(world):
        whole = build_loader(TextDataConfig(**options), micro_batch=16, rank=rank, world=world)
        rows = [row for batch in islice(whole, blocks * 16 * workers) for row in batch["tokens"]]
        assert len(rows) == blocks * 16 * workers * 16
        seen.append(set(re.findall(r"<\d{3}>", "".join(map(BYTES.decode, rows)))))
    assert len(set.union(*seen)) == sum(map(len, seen))
    assert set.union(*seen) <= train_texts(texts)
    assert len(set.union(*seen)) > 0.4 * len(
        train_texts(texts)
    )  # a marker cut by a window's edge is not found


@pytest.mark.slow
@pytest.mark.parametrize(("world", "workers", "stops"), [(1, 0, (0, 64, 400)), (2, 2, (1, 130))])
def test_resume_is_exact(spec, world, workers, stops):
    options = {
        "rank": world - 1,
        "world": world,
        "num_workers": workers,
        "copies_fraction": 0.3,
        "seed": 3,
    }
    first = loader(spec, **options)
    iterator = iter(first)
    whole = []
    states = {}
    for number in range(max(stops) + 90):
        if number in stops:
            states[number] = json.loads(json.dumps(first.state_dict()))
        whole.append(next(iterator))
    for number, state in states.items():
        second = loader(spec, **options)
        second.load_state_dict(state)
        for old, new in zip(whole[number : number + 90], islice(second, 90), strict=True):
            assert torch.equal(old["tokens"], new["tokens"])
            assert torch.equal(old["segments"], new["segments"])
            assert old["tokens"].dtype == new["tokens"].dtype == torch.int64
    if not workers and world == 1:  # the last stop lay beyond the first epoch
        assert states[400]["states"]["0"]["dataset"]["epoch"] > 0


def test_packed_documents_see_another(spec):
    """Documents of packed rows see one another."""
    masked, packed = (
        list(islice(loader(spec, documents=documents), 3)) for documents in ("masked", "packed")
    )
    assert len(masked) == 3
    for one, other in zip(masked, packed, strict=True):
        assert one["tokens"].equal(other["tokens"])
        assert one["segments"].any()
        assert not other["segments"].any()


def test_heldout_documents_of_a_stream(spec, texts):
    assert len(load_corpus(config(spec), "heldout")) == len(texts) - len(train_texts(texts)) > 0
    assert len(load_corpus(config(spec, heldout_limit=2), "heldout")) == 2
    assert len(load_corpus(config(spec, heldout_source=spec, heldout_limit=50), "heldout")) == 50
