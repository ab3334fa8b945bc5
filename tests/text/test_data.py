"""Sources, the held-out split, packing, sharding, and exact resume."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import modalities.text.corpus as corpora
from modalities.loading import IndexedLoader, RowBatches
from modalities.text.config import TextDataConfig
from modalities.text.corpus import TokenCorpus, corpus_of, tokenize_corpus
from modalities.text.data import PackedDataset, build_loader, open_heldout
from modalities.text.rows import RowMix
from modalities.text.sources import Document, document_split, open_source
from modalities.text.tokenizers import load_tokenizer

BYTES = load_tokenizer()


def corpus(*texts):
    return corpus_of([Document(str(i), text) for i, text in enumerate(texts)], BYTES)


def random_texts(count, seed=0, longest=90):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abcdefgh"), size=rng.integers(1, longest))) for _ in range(count)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def take(iterable, count):
    return list(itertools.islice(iterable, count))


def loader_of(dataset, micro_batch, **share):
    return IndexedLoader(RowBatches(dataset), micro_batch, **share)


# ---- the shipped excerpt and the split ----


def test_the_excerpt_trains_and_measures():
    documents = list(open_source())
    assert len(documents) == 36 and len({d.id for d in documents}) == 36
    heldout = open_heldout("sotu-excerpt", "bytes")
    assert sum(document.bytes > 32768 for document in heldout.items) >= 10
    assert {d.text for d in heldout.items} == {d.text for d in documents if document_split(d) == "heldout"}
    assert all(len(d.tokens) == d.bytes and d.bytes_per_token == 1 for d in heldout.items)
    loader = build_loader(TextDataConfig(context=192, facts_fraction=0.5), micro_batch=4)
    batch = next(iter(loader))
    assert batch["tokens"].shape == batch["segments"].shape == (4, 193)
    assert batch["tokens"].dtype == batch["segments"].dtype == torch.int64


def test_the_split_depends_on_the_text_alone():
    documents = [Document(str(i), f"text number {i}") for i in range(4000)]
    heldout = [d for d in documents if document_split(d) == "heldout"]
    assert 150 < len(heldout) < 250
    assert all(document_split(Document("other name", f" {d.text}\n")) == "heldout" for d in heldout)
    # Pinned: a change here would put documents that shipped weights were trained on into their held-out set.
    assert [d.id for d in heldout[:6]] == PINNED
    assert document_split(Document("x", heldout[0].text, split="train")) == "train"


PINNED = ["16", "30", "41", "48", "58", "106"]


# ---- sources ----


def test_text_files_gz_and_globs(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_bytes("\ufefffirst é".encode())
    with gzip.open(tmp_path / "c.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.write('{"text": "third", "id": 7}\n\n{"text": "fourth"}\n')
    assert [d.text for d in open_source(f"{tmp_path}/*.txt")] == ["first é", "second"]
    assert [(d.id, d.text) for d in open_source(f"{tmp_path}/*")][2:] == [("7", "third"), ("c.jsonl.gz:3", "fourth")]
    assert [d.text for d in open_source(f"{tmp_path}/?.txt")] == ["first é", "second"]  # "?" of a glob, not options


def test_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = arrow.table({"body": ["one", "", "two"], "n": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "x.parquet")
    spec = f"{tmp_path}/x.parquet"
    assert [d.text for d in open_source(spec + "?field=body&id_field=n")] == ["one", "two"]
    assert [d.id for d in open_source(spec + "?field=body&id_field=n")] == ["1", "3"]
    with pytest.raises(ValueError, match=r"row 1\b.*'bdy'.*'\?field=body'"):
        list(open_source(spec + "?field=bdy"))


def test_invalid_utf8_is_an_error_or_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good \xff bad")
    with pytest.raises(ValueError, match=r"a\.txt.*byte 5 \(0xff\).*errors=replace"):
        list(open_source(f"{tmp_path}/a.txt"))
    assert [d.text for d in open_source(f"{tmp_path}/a.txt?errors=replace")] == ["good \ufffd bad"]
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xe9"}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl, row 2\b.*UTF-8"):
        list(open_source(f"{tmp_path}/b.jsonl"))


def test_bad_rows_name_file_and_row(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "ok"}, {"txet": "no"}])
    with pytest.raises(ValueError, match=r"a\.jsonl, row 2\b.*'text'.*'\?field=txet'"):
        list(open_source(str(path)))
    with pytest.raises(ValueError, match=r"row 1\b.*'text'.*\bint\b"):
        list(open_source(str(write_jsonl(tmp_path / "b.jsonl", [{"text": 3}]))))
    with pytest.raises(ValueError, match=r"c\.jsonl, row 1\b"):
        list(open_source(str(write_jsonl(tmp_path / "c.jsonl", [["text"]]))))
    (tmp_path / "d.jsonl").write_text('{"text": "ok"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"d\.jsonl, row 2\b.*JSON"):
        list(open_source(str(tmp_path / "d.jsonl")))


def test_a_source_can_bring_its_own_split(tmp_path):
    rows = [{"text": f"t{i}", "s": name} for i, name in enumerate(["train", "heldout", "unused", "train"])]
    spec = f"{write_jsonl(tmp_path / 'a.jsonl', rows)}?split_field=s"
    assert [tokenize_corpus(open_source(spec), BYTES, split=s).ids for s in ("train", "heldout")] == [
        ["a.jsonl:1", "a.jsonl:4"],
        ["a.jsonl:2"],
    ]
    rows[0]["s"] = "test"
    write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match="'test'"):
        list(open_source(spec))


def test_all_documents_of_a_source_may_be_of_one_split(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("One text alone.")
    rows = write_jsonl(tmp_path / "a.jsonl", [{"text": f"t{i}", "s": "train"} for i in range(30)])
    for place, count in ((path, 1), (rows, 30)):
        for split, other in (("train", "heldout"), ("heldout", "train")):
            source = open_source(f"{place}?split={split}")
            assert len(tokenize_corpus(source, BYTES, split=split)) == count
            with pytest.raises(ValueError, match=r"none in the 'train'.*\?split=train|none in.*data\.heldout_source"):
                tokenize_corpus(source, BYTES, split=other)
    for wrong, said in (("split=test", "'train' or 'heldout'"), ("split=train&split_field=s", "one of them")):
        with pytest.raises(ValueError, match=said):
            open_source(f"{rows}?{wrong}")


def test_unseen_speeches_are_all_but_those_that_the_excerpt_trains_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    (tmp_path / "sotu").mkdir()
    excerpt = list(open_source("sotu-excerpt"))
    rows = [{"id": d.id, "text": d.text} for d in excerpt] + [{"id": "new", "text": "A speech of its own."}]
    write_jsonl(tmp_path / "sotu" / "sotu.jsonl", rows)
    unseen = list(open_source("sotu-unseen"))
    held = [d.id for d in excerpt if document_split(d) == "heldout"]
    assert [d.id for d in unseen] == [*held, "new"] and {document_split(d) for d in unseen} == {"heldout"}
    trained = next(n for n, d in enumerate(excerpt) if document_split(d) == "train")
    rows[trained]["text"] += " More."
    write_jsonl(tmp_path / "sotu" / "sotu.jsonl", rows)
    with pytest.raises(ValueError, match="1 speeches of the excerpt"):
        list(open_source("sotu-unseen"))


def test_english_is_a_mix_that_keeps_the_splits_of_its_parts(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    for name, split in {"sotu": {}, "poetry": {"split": "train"}, "rfc": {"split": "unused"}}.items():
        with pytest.raises(FileNotFoundError, match=rf"fetch_data.py text .*{name}"):
            open_source("english")
        (tmp_path / name).mkdir()
        rows = [{"id": f"{name}{n}", "text": f"{name} {n}"} | split for n in range(21)]
        if name == "rfc":
            rows[10]["split"] = "heldout"
        write_jsonl(tmp_path / name / f"{name}.jsonl", rows)
    source = open_source("english")
    splits = {d.id: document_split(d) for d in source}
    assert len(splits) == 21 + 11 + 3 and [s for i, s in splits.items() if i.startswith("rfc")] == [
        "unused",
        "heldout",
        "unused",
    ]
    assert {i: s for i, s in splits.items() if i.startswith("sotu")} == {
        d.id: document_split(d) for d in open_source("sotu")
    }
    before = source.cache_key()
    write_jsonl(tmp_path / "rfc" / "rfc.jsonl", [{"id": "0", "text": "x", "split": "train"}])
    assert open_source("english").cache_key() != before
    with pytest.raises(ValueError, match=r"english.*options"):
        open_source("english?field=body")


def test_unknown_sources_name_the_nearest(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path / "nothing"))
    (tmp_path / "speech.txt").write_text("x")
    (tmp_path / "pic.png").write_text("x")
    cases = {
        "sotu-exerpt": (FileNotFoundError, "'sotu-excerpt'"),
        "rfc": (FileNotFoundError, "fetch_data.py text rfc"),
        "english": (FileNotFoundError, "fetch_data.py text sotu poetry rfc"),
        "englisch": (FileNotFoundError, "'english'"),
        f"{tmp_path}/speeech.txt": (FileNotFoundError, "speech.txt'"),
        f"{tmp_path}/*.md": (FileNotFoundError, r"\*\.md"),
        f"{tmp_path}": (FileNotFoundError, r"folder.*/\*\.jsonl"),
        f"{tmp_path}/pic.png": (ValueError, r"pic\.png.*\.jsonl"),
        "sotu-excerpt?feild=text": (ValueError, "'feild'.*'field'"),
        "sotu-excerpt?errors=skip": (ValueError, "'skip'.*'strict' or 'replace'"),
        "sotu-excerpt?data_files=x": (ValueError, "data_files.*'hf:"),
        "hf:": (ValueError, "'hf:NAME"),
        "hf:a:b:c:d": (ValueError, "'hf:NAME"),
        "": (ValueError, "''"),
    }
    for spec, (error, message) in cases.items():
        with pytest.raises(error, match=message):
            open_source(spec)


def test_hf_specs():
    parse = lambda spec: (lambda s: (s.name, s.config, s.split))(open_source(spec))  # noqa: E731
    assert parse("hf:allenai/c4:en") == ("allenai/c4", "en", "train")
    assert parse("hf:allenai/c4:en:validation") == ("allenai/c4", "en", "validation")
    assert parse("hf:a/b::test") == ("a/b", None, "test")
    assert parse("hf:a/b:validation") == ("a/b", None, "validation")
    assert open_source("hf:json?data_files=x/*.jsonl").options == {"data_files": "x/*.jsonl"}


# ---- the tokenised corpus ----


def test_cache_is_used_and_notices_changes(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in random_texts(50)])
    cache = tmp_path / "cache"
    first = tokenize_corpus(open_source(str(path)), BYTES, cache_dir=cache)
    assert isinstance(first.tokens, np.memmap) and first.tokens.dtype == np.uint16
    assert len(list(cache.iterdir())) == 1
    second = tokenize_corpus(open_source(str(path)), BYTES, cache_dir=cache)
    plain = tokenize_corpus(open_source(str(path)), BYTES)
    assert first.fingerprint == second.fingerprint == plain.fingerprint and second.ids == plain.ids
    assert len(list(cache.iterdir())) == 1
    write_jsonl(path, [{"text": t} for t in random_texts(51)])
    assert len(tokenize_corpus(open_source(str(path)), BYTES, cache_dir=cache)) > 0
    assert len(list(cache.iterdir())) == 2


# ---- packing ----


def test_every_token_is_a_target_once_per_epoch():
    texts = random_texts(40)
    data = PackedDataset(corpus(*texts), 16, BYTES, seed=3)
    for epoch in (0, 1, 5):
        rows = [data[epoch * data.epoch_windows + i] for i in range(data.epoch_windows)]
        real = [(row["tokens"][1:])[row["segments"][1:] >= 0] for row in rows]
        counts = np.bincount(torch.cat(real).numpy(), minlength=264)
        # every document's bytes and BOS, but for the very first token of the line, which nothing predicts
        assert counts[:256].tolist() == np.bincount(BYTES.encode("".join(texts)), minlength=256).tolist()
        assert counts[256] == len(texts) - 1


def test_rows_hold_whole_pieces_with_document_ids():
    data = PackedDataset(corpus("abc", "de", "fghij"), 12, BYTES, shuffle=False, epochs=1)
    assert len(data) == 1
    row = data[0]
    assert row["tokens"].tolist() == [256, 97, 98, 99, 256, 100, 101, 256, 102, 103, 104, 105, 106]
    assert row["segments"].tolist() == [0] * 4 + [1] * 3 + [2] * 6


def test_rows_of_facts_come_at_their_rate_and_leave_text_rows_alone():
    texts = random_texts(200)
    plain = PackedDataset(corpus(*texts), 192, BYTES, seed=4)
    mixed = PackedDataset(corpus(*texts), 192, BYTES, seed=4, mix=RowMix(facts=0.25, weight=3.0))
    rows = [mixed[i] for i in range(400)]
    facts = ["weights" in row for row in rows]
    assert 70 < sum(facts) < 130
    for index, (row, has_facts) in enumerate(zip(rows, facts, strict=True)):
        if has_facts:
            assert row["tokens"][0] == 256 and set(row["weights"].tolist()) <= {0.0, 1.0, 3.0}
            own = BYTES.decode(plain[index]["tokens"])
            assert BYTES.decode(row["tokens"])[:1] in (own[:1], " ")  # of the row that it stands for
        else:
            assert torch.equal(row["tokens"], plain[index]["tokens"])
    again = PackedDataset(corpus(*texts), 192, BYTES, seed=4, mix=RowMix(facts=0.25, weight=3.0))
    assert all(torch.equal(again[i]["tokens"], rows[i]["tokens"]) for i in (399, 7, 0))
    with pytest.raises(ValueError, match=r"context 60\b.*'bytes' needs at least \d{2,3}$") as error:
        PackedDataset(corpus("x"), 60, BYTES, mix=RowMix(facts=0.1))
    least = int(str(error.value).split()[-1])
    assert len(PackedDataset(corpus("x"), least, BYTES, mix=RowMix(facts=1.0))[0]["tokens"]) == least + 1


WRONG = {"facts_fraction": 3, "copies_fraction": -1, "facts_weight": 0, "context": 0, "num_workers": -1}


def test_wrong_values_are_refused():
    with pytest.raises(ValueError, match=r"'bytes'.*'gpt2'"):
        PackedDataset(corpus("x"), 8, type("T", (), {"name": "gpt2"})())
    with pytest.raises(IndexError, match=r"sample 1\b"):
        PackedDataset(corpus("x"), 8, BYTES, epochs=1)[1]
    with pytest.raises(ValueError, match="micro_batch 0"):
        loader_of(PackedDataset(corpus("x"), 8, BYTES), 0)
    with pytest.raises(ValueError, match=r"rank 2\b"):
        loader_of(PackedDataset(corpus("x"), 8, BYTES), 1, rank=2, world=2)
    for name, value in WRONG.items():
        with pytest.raises(ValueError, match=rf"{name}.{value}"):
            TextDataConfig(**{name: value})
    with pytest.raises(ValueError, match=r"facts_fraction 0\.7 and copies_fraction 0\.4 .*at most 1"):
        TextDataConfig(facts_fraction=0.7, copies_fraction=0.4)
    with pytest.raises(ValueError, match="'valid'"):
        tokenize_corpus(open_source(), BYTES, split="valid")


# ---- loaders: shards, workers, resume ----


def packed(micro_batch=2, rank=0, world=1, workers=0, seed=0, context=16):
    data = PackedDataset(corpus(*random_texts(60)), context, BYTES, seed=seed)
    return loader_of(data, micro_batch, rank=rank, world=world, num_workers=workers)


def global_samples(world, micro_batch, workers=0, steps=12):
    """The rows of all ranks, step by step, in the order of their global numbers."""
    loaders = [packed(micro_batch, rank, world, workers) for rank in range(world)]
    batches = [[b["tokens"] for b in take(loader, steps)] for loader in loaders]
    return torch.cat([torch.stack(step, dim=1).flatten(0, 1) for step in zip(*batches, strict=True)])


def test_the_global_order_does_not_depend_on_ranks_batches_or_workers():
    one = global_samples(world=1, micro_batch=4)
    assert torch.equal(one, global_samples(world=2, micro_batch=2))
    assert torch.equal(one, global_samples(world=4, micro_batch=1))
    assert torch.equal(one, global_samples(world=1, micro_batch=2, steps=24))
    assert torch.equal(one, global_samples(world=2, micro_batch=2, workers=2))


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact(workers):
    loader = packed(workers=workers)
    take(loader, 7)  # workers have fetched ahead; the state counts what was handed out
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["next_sample"] == 14
    whole = [b["tokens"] for b in take(packed(), 12)]
    fresh = packed(workers=workers)
    fresh.load_state_dict(state)
    resumed = [b["tokens"] for b in take(fresh, 5)]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(whole[7:], resumed, strict=True))
    # and on two ranks
    ranks = [packed(1, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    both = torch.cat([next(iter(rank))["tokens"] for rank in ranks])
    assert torch.equal(both, whole[7])


def test_a_foreign_state_is_refused():
    state = packed().state_dict()
    for other in (packed(seed=1), packed(context=8)):
        with pytest.raises(ValueError, match=r"\b(seed|context)="):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="fingerprint"):
        loader_of(PackedDataset(corpus("x"), 16, BYTES), 2).load_state_dict(state)


STATE = {"kind": "packed", "fingerprint": "004d223252de1896a2e3132efee93a8b", "seed": 0, "context": 128}


def test_a_state_of_other_rows_is_refused():
    """Of passkeys, which are no more, and of another mix."""
    config = TextDataConfig(context=192, facts_fraction=0.5)
    with pytest.raises(ValueError, match="data state has mix=None"):
        build_loader(config, micro_batch=4).load_state_dict(STATE | {"context": 192, "passkey_fraction": 0.5})
    state = build_loader(config, micro_batch=4).state_dict()
    for other in ({"facts_fraction": 0.0}, {"facts_weight": 2.0}, {"copies_fraction": 0.1}):
        with pytest.raises(ValueError, match=r"data state has mix=\{"):
            build_loader(replace(config, **other), micro_batch=4).load_state_dict(state)


def test_heldout_pass_is_finite_complete_and_equal_on_all_ranks():
    config = TextDataConfig(context=512)
    single = build_loader(config, split="heldout", micro_batch=3)
    count = sum(int((b["segments"][:, 1:] >= 0).sum()) for b in single)
    assert count == single.source.rows.epoch_tokens - 1
    loaders = [build_loader(config, split="heldout", micro_batch=5, rank=r, world=3) for r in range(3)]
    batches = [list(loader) for loader in loaders]
    assert {len(b) for b in batches} == {len(loaders[0])}
    assert sum(int((b["segments"][:, 1:] >= 0).sum()) for part in batches for b in part) == count
    assert len(list(loaders[0])) == len(loaders[0])  # a second pass starts over
    other = build_loader(replace(config, seed=9), split="heldout", micro_batch=3)
    assert torch.equal(next(iter(other))["tokens"], next(iter(single))["tokens"])


@pytest.mark.slow
def test_training_imports_neither_datasets_nor_arrow_nor_tokenizers():
    code = (
        "import sys; from modalities.text.config import TextDataConfig; from modalities.text.data import build_loader;"
        "next(iter(build_loader(TextDataConfig(context=192, facts_fraction=.5, copies_fraction=.5), micro_batch=2)));"
        "print([m for m in ('datasets', 'pyarrow', 'pandas', 'tokenizers', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- long texts ----


@pytest.mark.parametrize("spec", ["bytes", "bpe-1k"])
def test_parts_of_a_long_text_have_its_tokens(spec, monkeypatch, tmp_path):
    tokenizer = load_tokenizer(spec)
    chinese = Document("lines", "".join(f"没有空格的句子{n}。\n然后" for n in range(200)))
    documents = [*take(open_source(), 4), chinese, Document("unbroken", "没有空格" * 400)]
    whole = corpus_of(documents, tokenizer)
    for name, value in (("_PART", 500), ("_BATCH", (256, 5000)), ("_IN_MEMORY", 1000)):
        monkeypatch.setattr(corpora, name, value)
    parts = corpus_of(documents, tokenizer)
    assert isinstance(parts.tokens, np.memmap) and np.array_equal(parts.tokens, whole.tokens)  # in a temporary file
    assert parts.fingerprint == whole.fingerprint and parts.num_bytes == whole.num_bytes
    parts.save(tmp_path / "saved")
    assert TokenCorpus.load(tmp_path / "saved").fingerprint == whole.fingerprint
