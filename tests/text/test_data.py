"""Sources, the held-out split, packing, sharding, and exact resume."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from modalities.text.config import TextDataConfig
from modalities.text.data import (
    EncodedDocument,
    PackedDataset,
    build_loader,
    corpus_of,
    open_heldout,
    tokenize_corpus,
)
from modalities.text.rows import RowMix
from modalities.text.sources import Document, document_split, open_source
from modalities.text.tokenizers import load_tokenizer
from tests.refusals import refuses

BYTES = load_tokenizer()


def corpus(*texts):
    return corpus_of(map(Document, texts), BYTES)


def random_texts(count, seed=0, longest=90):
    rng = np.random.default_rng(seed)
    return [
        "".join(rng.choice(list("abcdefgh"), size=rng.integers(1, longest))) for _ in range(count)
    ]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_excerpt_trains_and_measures():
    documents = list(open_source())
    assert len(documents) == 36
    heldout = open_heldout("sotu-excerpt", "bytes").items
    assert sum(document.bytes > 32768 for document in heldout) >= 10
    assert {d.text for d in heldout} == {
        d.text for d in documents if document_split(d) == "heldout"
    }
    assert all(len(d.tokens) == d.bytes and (d.byte_lengths(BYTES) == 1).all() for d in heldout)


def test_the_bytes_of_tokens():
    """A character of several tokens counts with its first one."""
    tokenizer = load_tokenizer("bpe-1k")
    text = "The naïve 日本語 of 😀 America"
    sizes = [1, 1, 1, 2, 1, 2, 0, 2, 1, 3, 0, 0, 3, 0, 0, 3, 0, 0, 3, 1, 4, 0, 0, 0, 8]
    assert (
        EncodedDocument(text, tokenizer.encode(text), len(text.encode()))
        .byte_lengths(tokenizer)
        .tolist()
        == sizes
    )


def test_split_depends_on_text():
    """The split depends on the text alone."""
    heldout = [
        d
        for d in [Document(f"text number {i}") for i in range(4000)]
        if document_split(d) == "heldout"
    ]
    assert 150 < len(heldout) < 250
    assert all(document_split(Document(f" {d.text}\n")) == "heldout" for d in heldout)
    # A change here would put documents that shipped weights were trained on into their held-out
    # set.
    assert [d.text.split()[-1] for d in heldout[:6]] == PINNED
    assert document_split(Document(heldout[0].text, split="train")) == "train"


PINNED = ["16", "30", "41", "48", "58", "106"]


def test_text_files_gz_and_globs(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_bytes("\ufefffirst é".encode())
    with gzip.open(tmp_path / "c.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.write('\ufeff{"text": "third", "id": 7}\n\n{"text": "fourth"}\n')
    assert [d.text for d in open_source(f"{tmp_path}/*")][2:] == ["third", "fourth"]
    assert [d.text for d in open_source(f"{tmp_path}/?.txt")] == [
        "first é",
        "second",
    ]  # "?" of a glob, not options


BAD = [
    ("a.txt", b"good \xff bad", r"a\.txt.*byte 5 \(0xff\).*errors=replace"),
    ("b.jsonl", b'{"text": "ok"}\n{"text": "\xe9"}\n', r"b\.jsonl, row 2\b.*UTF-8"),
    ("c.jsonl", b'{"text": "ok"}\n{"txet": "no"}\n', r"c\.jsonl, row 2\b.*'text'.*'\?field=txet'"),
    ("d.jsonl", b'{"text": 3}\n', r"row 1\b.*'text'.*\bint\b"),
    ("f.jsonl", b'{"text": "ok"}\n{"text": \n', r"f\.jsonl, row 2\b.*JSON"),
    (
        "g.jsonl",
        b'{"text": "ok"}\n{"text": "a \\ud83d b"}\n',
        r"g\.jsonl, row 2\b.*U\+D83D.*character 2;.*errors=replace",
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD, ids=[name for name, *_ in BAD])
def test_unreadable_names_file_and_row(name, content, message, tmp_path):
    """What cannot be read names file and row."""
    (tmp_path / name).write_bytes(content)
    refuses(message, list, open_source(f"{tmp_path}/{name}"))
    if name in ("a.txt", "g.jsonl"):
        text = "good \ufffd bad" if name == "a.txt" else "a \ufffd b"
        assert [d.text for d in open_source(f"{tmp_path}/{name}?errors=replace")][-1] == text


def test_source_brings_its_split(tmp_path):
    """A source can bring its own split."""
    rows = [
        {"text": f"t{i}", "s": name}
        for i, name in enumerate(["train", "heldout", "unused", "train"])
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    by_field = open_source(f"{path}?split_field=s")
    assert BYTES.decode(tokenize_corpus(by_field, BYTES).tokens) == "t0t3"
    assert BYTES.decode(tokenize_corpus(by_field, BYTES, split="heldout").tokens) == "t1"
    for split, other in (("train", "heldout"), ("heldout", "train")):
        source = open_source(f"{path}?split={split}")
        assert len(tokenize_corpus(source, BYTES, split=split)) == 4
        refuses(rf"no document in the '{other}'", tokenize_corpus, source, BYTES, split=other)
    write_jsonl(path, [{"text": "t", "s": "test"}])
    refuses("'test'", list, by_field)


def test_unseen_speeches_exclude_excerpt(tmp_path, monkeypatch):
    """Unseen speeches are all but those that the excerpt trains on."""
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    (tmp_path / "sotu").mkdir()
    excerpt = list(open_source("sotu-excerpt"))
    rows = [{"text": d.text} for d in excerpt] + [{"text": "A speech of its own."}]
    write_jsonl(tmp_path / "sotu" / "sotu.jsonl", rows)
    unseen = list(open_source("sotu-unseen"))
    held = [d.text for d in excerpt if document_split(d) == "heldout"]
    assert [d.text for d in unseen] == [*held, "A speech of its own."]
    assert {document_split(d) for d in unseen} == {"heldout"}


def test_english_keeps_splits(tmp_path, monkeypatch):
    """English is a mix that keeps the splits of its parts."""
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    for name, split in {
        "sotu": {},
        "poetry": {"split": "train"},
        "rfc": {"split": "unused"},
    }.items():
        (tmp_path / name).mkdir()
        rows = [{"id": f"{name}{n}", "text": f"{name} {n}"} | split for n in range(21)]
        write_jsonl(tmp_path / name / f"{name}.jsonl", rows)
    splits = {d.text: document_split(d) for d in open_source("english")}
    assert len(splits) == 21 + 11 + 3  # every speech, every second poem, every tenth RFC
    assert [split for name, split in splits.items() if name.startswith("rfc")] == ["unused"] * 3
    assert {d.text: document_split(d) for d in open_source("sotu")}.items() <= splits.items()


def test_unknown_sources_name_the_nearest(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path / "nothing"))
    for name in ("speech.txt", "pic.png", "a[1].txt"):
        (tmp_path / name).write_text("x")
    cases = {
        "sotu-exerpt": (FileNotFoundError, "'sotu-excerpt'"),
        "english": (FileNotFoundError, "tools.offline sotu poetry rfc"),
        f"{tmp_path}/speeech.txt": (FileNotFoundError, "speech.txt'"),
        f"{tmp_path}": (FileNotFoundError, r"folder.*/\*\.txt"),
        f"{tmp_path}/pic.png": (ValueError, r"pic\.png.*\.jsonl"),
        "sotu-excerpt?feild=text": (ValueError, "'feild'.*'field'"),
        "sotu-excerpt?data_files=x": (ValueError, "data_files.*'hf:"),
        "english?field=body": (ValueError, "english.*options"),
        "hf:a:b:c:d": (ValueError, "'hf:NAME"),
    }
    for spec, (error, message) in cases.items():
        refuses(message, open_source, spec, error=error)
    assert [d.text for d in open_source(f"{tmp_path}/a[1].txt")] == ["x"]  # a file, no pattern


def test_cache_notices_changes(tmp_path):
    """Cache is used and notices changes."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in random_texts(50)])
    cache = tmp_path / "cache"
    first, second = (
        tokenize_corpus(open_source(str(path)), BYTES, cache_dir=cache) for _ in range(2)
    )
    assert isinstance(first.tokens, np.memmap)
    assert first.tokens.dtype == np.uint16
    assert len(list(cache.iterdir())) == 1
    assert (
        first.fingerprint
        == second.fingerprint
        == tokenize_corpus(open_source(str(path)), BYTES).fingerprint
    )
    write_jsonl(path, [{"text": t} for t in random_texts(51)])
    assert (
        tokenize_corpus(open_source(str(path)), BYTES, cache_dir=cache).fingerprint
        != first.fingerprint
    )
    assert len(list(cache.iterdir())) == 2


def test_cache_is_of_bytes(tmp_path):
    """Another file of the same name, size and time has tokens of its own."""
    cache = tmp_path / "cache"
    rows = []
    for turn in ("a", "b"):
        (tmp_path / turn).mkdir()
        path = write_jsonl(tmp_path / turn / "x.jsonl", [{"text": turn * 9}])
        os.utime(path, ns=(10**18, 10**18))
        source = open_source(str(path))
        tokens = tokenize_corpus(source, BYTES, split="all", cache_dir=cache).tokens
        rows.append(tokens.tolist())
    assert rows[0] != rows[1]


def test_damaged_cache_is_rebuilt(tmp_path):
    """A damaged cache is made again."""
    source = open_source(str(write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}])))
    cache = tmp_path / "cache"
    first = tokenize_corpus(source, BYTES, split="all", cache_dir=cache)
    (folder,) = cache.iterdir()
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        changed = (
            whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 9)
        )
        for content in (b"{", *changed):
            path.write_bytes(content)
            with pytest.warns(
                UserWarning, match=r"^damaged cache of '.*a\.jsonl', which is tokenised again \("
            ):
                again = tokenize_corpus(source, BYTES, split="all", cache_dir=cache)
            assert again.tokens.tolist() == first.tokens.tolist()
            assert again.fingerprint == first.fingerprint


def test_tokens_are_targets_once():
    """Every token is a target once per epoch."""
    texts = random_texts(40)
    data = PackedDataset(corpus(*texts), 16, BYTES, seed=3)
    for epoch in (0, 1, 5):
        rows = [data[epoch * data.epoch_windows + i] for i in range(data.epoch_windows)]
        real = [(row["tokens"][1:])[row["segments"][1:] >= 0] for row in rows]
        counts = np.bincount(torch.cat(real).numpy(), minlength=264)
        # every document's bytes and BOS, but for the very first token of the line, which nothing
        # predicts
        assert (
            counts[:256].tolist()
            == np.bincount(BYTES.encode("".join(texts)), minlength=256).tolist()
        )
        assert counts[256] == len(texts) - 1


def test_rows_have_document_ids():
    """Rows hold whole pieces with document ids."""
    row = PackedDataset(corpus("abc", "de", "fghij"), 12, BYTES, epochs=1)[0]
    pieces = BYTES.decode(row["tokens"][1:].where(row["tokens"][1:] != 256, ord("|"))).split("|")
    assert sorted(pieces) == ["abc", "de", "fghij"]
    assert row["segments"].tolist() == [n for n, piece in enumerate(pieces) for _ in f"|{piece}"]
    packed = PackedDataset(corpus("abc", "de", "fghij"), 15, BYTES, epochs=1, documents="packed")[0]
    assert packed["tokens"][:13].equal(row["tokens"])
    assert packed["segments"].tolist() == [0] * 13 + [-1] * 3


WRONG = {
    "facts_fraction": 3,
    "copies_fraction": -1,
    "facts_weight": 0,
    "context": 0,
    "num_workers": -1,
}


def test_wrong_values_are_refused():
    with pytest.raises(ValueError, match=r"context 60\b.*'bytes' needs at least \d{2,3}$"):
        PackedDataset(corpus("x"), 60, BYTES, mix=RowMix(facts=0.1))
    for name, value in WRONG.items():
        refuses(rf"{name}.{value}", TextDataConfig, **{name: value})
    refuses("documents='pack': did you mean 'packed'", TextDataConfig, documents="pack")
    refuses("facts_wordings='wid': did you mean 'wide'", TextDataConfig, facts_wordings="wid")
    with pytest.raises(
        ValueError, match=r"facts_fraction 0\.7 and copies_fraction 0\.4 .*at most 1"
    ):
        TextDataConfig(facts_fraction=0.7, copies_fraction=0.4)


def test_other_state_is_refused():
    """A state of other rows is refused."""
    config = TextDataConfig(context=192, facts_fraction=0.5)
    state = build_loader(config, micro_batch=4).state_dict()
    for other, said in (
        ({"facts_weight": 2.0}, r"data state has mix=\{"),
        ({"facts_wordings": "wide"}, r"data state has mix=\{"),
        ({"copies_fraction": 0.1}, r"data state has mix=\{"),
        ({"seed": 1}, "seed="),
        ({"context": 256}, "context="),
        ({"documents": "packed"}, "documents="),
        ({"source": "sotu-excerpt?split=train"}, "fingerprint"),
    ):
        refuses(said, build_loader(replace(config, **other), micro_batch=4).load_state_dict, state)
    packed = build_loader(replace(config, documents="packed"), micro_batch=4).state_dict()
    refuses("documents='packed'", build_loader(config, micro_batch=4).load_state_dict, packed)


def test_heldout_pass_is_complete():
    """Heldout pass is finite complete and equal on all ranks."""
    config = TextDataConfig(context=512)
    single = build_loader(config, split="heldout", micro_batch=3)
    count = sum(int((b["segments"][:, 1:] >= 0).sum()) for b in single)
    assert count == single.source.rows.epoch_tokens - 1
    loaders = [
        build_loader(config, split="heldout", micro_batch=5, rank=r, world=3) for r in range(3)
    ]
    batches = [list(loader) for loader in loaders]
    assert {len(b) for b in batches} == {len(loaders[0])}
    assert sum(int((b["segments"][:, 1:] >= 0).sum()) for part in batches for b in part) == count
    assert len(list(loaders[0])) == len(loaders[0])  # a second pass starts over
    other = build_loader(replace(config, seed=9), split="heldout", micro_batch=3)
    assert torch.equal(next(iter(other))["tokens"], next(iter(single))["tokens"])
