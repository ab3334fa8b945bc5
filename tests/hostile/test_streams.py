"""Text and genomes of any size stream: how much is held follows from what a file holds, never from its compressed size."""

from __future__ import annotations

import gzip
import json
import re

import numpy as np
import pytest

from modalities.dna import genome as genomes
from modalities.dna.formats import read_codes
from modalities.dna.genome import open_genome
from modalities.dna.sources import find_source
from modalities.dna.vcf import read_variants
from modalities.text import corpus as corpora
from modalities.text import data, sources
from modalities.text.corpus import TokenCorpus, tokenize_corpus
from modalities.text.data import open_heldout
from modalities.text.sources import LongDocument, document_split, open_source
from modalities.text.tokenizers import ByteTokenizer, load_tokenizer
from recipes import find_recipe
from recipes.config import apply_overrides
from tests.hostile.memory import Peak, gz
from zoo.inputs import parse_json, read_json

# ---- text ----


def test_a_long_text_streams_to_disk(tmp_path, monkeypatch):
    """Compressed, as one document; its tokens are those of a text that is read as a whole, to the byte."""
    words = " ".join(f"wörd{chr(97 + n % 26)} and others" for n in range(40_000)) + "\n"
    path = gz(tmp_path / "a.txt.gz", [words.encode()] * 2)
    tokenizer = ByteTokenizer()
    whole = tokenize_corpus(open_source(str(path)), tokenizer, split="all")
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path / "data"))
    for module, name, value in (
        (sources, "LONGEST_TEXT", 10_000),
        (sources, "_CHUNK", 4097),  # letters of two bytes are cut
        (corpora, "_PART", 20_000),
        (corpora, "_BATCH", (256, 50_000)),
        (corpora, "_IN_MEMORY", 100_000),
    ):
        monkeypatch.setattr(module, name, value)
    (document,) = open_source(str(path))
    assert isinstance(document, LongDocument) and "".join(document.pieces()) == words * 2
    with Peak() as peak:
        parts = tokenize_corpus(open_source(str(path)), tokenizer, split="all")
    assert peak.bytes < 2 * 2**20 < whole.tokens.nbytes
    assert isinstance(parts.tokens, np.memmap) and np.array_equal(parts.tokens, whole.tokens)
    assert (parts.fingerprint, parts.num_bytes, parts.ids) == (whole.fingerprint, whole.num_bytes, whole.ids)
    (folder,) = (tmp_path / "data" / "cache" / "text").iterdir()
    np.save(tmp_path / "b.npy", whole.tokens)
    assert (folder / "tokens.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
    assert TokenCorpus.load(folder).fingerprint == whole.fingerprint
    with pytest.raises(ValueError, match=r"'a\.txt\.gz' has more than .* characters"):
        open_heldout(str(path), "bytes", "all")


@pytest.mark.parametrize("spec", ["bytes", "bpe-1k", "bpe-4k"])
def test_parts_of_a_text_have_its_tokens(spec, monkeypatch):
    tokenizer = load_tokenizer(spec)
    documents = list(open_source())[:6]
    whole = corpora.corpus_of(documents, tokenizer)
    monkeypatch.setattr(corpora, "_PART", 500)
    parts = corpora.corpus_of(documents, tokenizer)
    assert parts.fingerprint == whole.fingerprint and parts.num_bytes == whole.num_bytes


def test_parts_end_where_a_tokenizer_bears_it(monkeypatch):
    class Prepending(ByteTokenizer):
        def encode(self, text):
            return super().encode("_" + text.replace(" ", "_"))

    class Counting(ByteTokenizer):  # cannot read parts
        def encode(self, text):
            return np.append(super().encode(text), len(text))

    class Pairs(ByteTokenizer):  # of letters, within words: a word that is cut has others
        def encode(self, text):
            pairs = [word[at : at + 2] for word in re.findall(r" ?\S+|\s", text) for at in range(0, len(word), 2)]
            return np.array([sum(map(ord, pair)) % 250 for pair in pairs], np.int64)

    documents = list(open_source())[:3]
    chinese = sources.Document("lines", "".join(f"没有空格的句子{n}。\n然后" for n in range(200)))
    for tokenizer in (Prepending(), Counting(), Pairs()):
        documents += [chinese] if isinstance(tokenizer, Pairs) else []
        whole = corpora.corpus_of(documents, tokenizer)
        with monkeypatch.context() as patch:
            patch.setattr(corpora, "_PART", 500)
            parts = corpora.corpus_of(documents, tokenizer)
        assert parts.fingerprint == whole.fingerprint and parts.num_bytes == whole.num_bytes
    long = LongDocument("a", "some", read=lambda: iter(["some ", "text"]))
    assert corpora.corpus_of([long], Prepending()).num_bytes == 9
    with pytest.raises(
        ValueError, match=r"a: more than .* characters, and tokenizer 'bytes' cannot read a text in parts"
    ):
        corpora.corpus_of([long], Counting())


def test_a_split_is_of_the_stripped_text(monkeypatch, tmp_path):
    texts = [f"\n {n} some\n\n words {n} \n\t" for n in range(60)]
    before = [document_split(sources.Document("", text)) for text in texts]
    assert {*before} == {"train", "heldout"}
    for size in (1, 2, 7):
        cut = [[text[at : at + size] for at in range(0, len(text), size)] for text in texts]
        assert [document_split(LongDocument("", "", read=lambda p=p: iter(p))) for p in cut] == before
    monkeypatch.setattr(sources, "LONGEST_TEXT", 1000)
    (tmp_path / "a.txt").write_text("a" + " " * 3000)
    with pytest.raises(ValueError, match="more than 1,000 characters of white space"):
        list(map(document_split, open_source(str(tmp_path / "a.txt"))))


def test_a_row_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST_ROW", 1 << 16)
    path = gz(tmp_path / "a.jsonl.gz", [b'{"text": "', *[b" " * 2**20] * 16, b'"}'])
    assert path.stat().st_size < 2**17
    with Peak() as peak, pytest.raises(ValueError, match=r"a\.jsonl\.gz, row 1: more than 65,536 bytes"):
        list(open_source(str(path)))
    assert peak.bytes < 2 * 2**20


def test_held_out_documents_have_a_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MOST_CHARACTERS", 25)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"ten of {n:03d}"}) + "\n" for n in range(9)))
    assert [d.text for d in open_heldout(str(tmp_path / "a.jsonl"), "bytes", "all").items] == [
        "ten of 000",
        "ten of 001",
    ]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.vcf.gz", "a.fa.gz"])
def test_a_gzip_stream_that_is_cut_short_or_damaged(name, tmp_path):
    content = {"a.txt.gz": b"words " * 999, "a.fa.gz": b">a\n" + b"ACGTTGAC" * 999}.get(name, b"")
    content = content or (b'{"text": "x"}\n' * 999 if "json" in name else b"##VCF\n" + b"c\t1\t.\tA\tC\n" * 999)
    read = {"a.vcf.gz": read_variants, "a.fa.gz": read_codes}.get(name, lambda path: open_source(str(path)))
    whole = gzip.compress(content)
    for damage in (whole[:-1], whole[:-8], whole[:20], whole[:12] + b"\xff" * 8 + whole[20:], whole[:-8] + bytes(8)):
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(ValueError, match=rf"{name}: (the gzip file is )?(truncated|damaged)"):
            list(read(tmp_path / name))


def test_values_nested_deep_are_no_recursion(tmp_path):
    deep = "[" * 10**5
    (tmp_path / "a.jsonl").write_text(deep)
    with pytest.raises(ValueError, match=r"a\.jsonl, row 1: not JSON .*nested too deep"):
        list(open_source(str(tmp_path / "a.jsonl")))
    with pytest.raises(ValueError, match="nested too deep"):
        parse_json(deep, "x")
    with pytest.raises(ValueError, match=r"a\.jsonl: 100,000 bytes of JSON; at most 1,000 are read"):
        read_json(tmp_path / "a.jsonl", most=1000)
    recipe = apply_overrides(find_recipe("text.ggd_tiny"), [f"model.options.num_layers={deep}"])[0]
    assert recipe.model.options["num_layers"] == deep  # a word, as all that is no JSON


def test_corrupt_parquet_is_named(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["some text"] * 9}), path)
    whole = path.read_bytes()
    for damage in (
        whole[:-1],
        whole[:50],
        whole[4:],
        b"PAR1" + bytes(50) + whole[-8:],
        whole[:20] + b"\xff" * 9 + whole[29:],
    ):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match=r"a\.parquet, after row 0: damaged Parquet"):
            list(open_source(str(path)))


# ---- DNA ----


def test_a_small_file_of_many_bases_goes_to_disk(tmp_path, monkeypatch):
    path = gz(tmp_path / "a.fa.gz", [b">a\n", *[b"ACGTTGCA" * 2**13] * 64])
    assert path.stat().st_size < 2**16
    monkeypatch.setattr(genomes, "_IN_MEMORY", 2**20)
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path / "data"))
    with Peak() as peak:
        genome = open_genome(find_source(str(path)))
    assert genome.bases == 2**22 and peak.bytes < 8 * 2**20 and isinstance(genome._from, type(path))
    genomes._open.cache_clear()
    with monkeypatch.context() as patch:  # there already: nothing is parsed
        patch.setattr(genomes, "_parse", None)
        assert open_genome(find_source(str(path))).fingerprint == genome.fingerprint


def test_what_stays_in_memory_of_a_genome_has_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(genomes, "_MOST_CONTIGS", 10)
    monkeypatch.setattr(genomes, "_MOST_RUNS", 100)
    (tmp_path / "a.fa").write_text("".join(f">{n}\nA\n" for n in range(11)))
    (tmp_path / "b.fa").write_text(">a\n" + "AN" * 101)
    for name, message in (("a.fa", "more than 10 contigs"), ("b.fa", "more than 100 runs of unknown bases")):
        with pytest.raises(ValueError, match=rf"{name}, line \d+: {message}"):
            open_genome(find_source(str(tmp_path / name)))


def test_lines_and_records_have_limits(tmp_path, monkeypatch):
    from modalities.dna import formats, vcf

    monkeypatch.setattr(vcf, "_LONGEST_LINE", 1000)
    path = gz(tmp_path / "a.vcf.gz", [b"##fileformat=VCFv4.2\n", b"c\t1\t.\tA\t" + b"C" * 2000])
    with pytest.raises(ValueError, match=r"a\.vcf\.gz line 2: more than 1,000 characters"):
        list(read_variants(path))
    (tmp_path / "b.csv").write_text("chrom,pos,ref,alt\nc,1,A," + "C" * 200_000)
    monkeypatch.setattr(vcf, "_LONGEST_LINE", 1 << 20)
    with pytest.raises(ValueError, match=r"b\.csv: not a table: field larger than field limit"):
        list(read_variants(tmp_path / "b.csv"))
    monkeypatch.setattr(formats, "_LONGEST_RECORD", 1000)
    (tmp_path / "a.gb").write_text("LOCUS       a   9 bp DNA\n" + "COMMENT     x\n" * 100)
    with pytest.raises(ValueError, match=r"a\.gb, line \d+: the record that begins at line 1 has more than 1,000 char"):
        list(read_codes(tmp_path / "a.gb"))
    monkeypatch.setattr(formats, "_LONGEST_LINE", 100)
    (tmp_path / "a.gb").write_text("LOCUS       a   9 bp DNA\n" + "x" * 1000)
    with pytest.raises(ValueError, match=r"a\.gb, line 2: 100 characters or more"):
        list(read_codes(tmp_path / "a.gb"))
