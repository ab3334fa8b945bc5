"""Every reader over damaged files: it reads them or says in a ValueError what is wrong, and nothing else happens.

The damage is seeded, so a number names a file for ever. PRIORZOO_FUZZ=20000 tries so many for each reader, in children whose
death is a failure too.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from modalities.dna.bed import bed_rows
from modalities.dna.formats import read_codes
from modalities.dna.genome import open_genome
from modalities.dna.sources import find_source
from modalities.dna.vcf import read_variants
from modalities.text.corpus import TokenCorpus, corpus_of
from modalities.text.model import CausalLM, TextConfig
from modalities.text.sources import Document, open_source
from modalities.text.tokenizers import ByteTokenizer, load_tokenizer
from modalities.vision.images import decode_image
from modalities.vision.shards import open_shards, scan, write_index
from tests.dna.test_genome import MIXED, fasta, genbank
from tests.dna.test_vcf import whole as whole_vcf
from tests.hostile.mutations import damaged, damaged_json, in_child, outcome
from tests.vision.image_files import encoded, picture, solid, write_tar
from zoo.inputs import read_tensors
from zoo.registry import load_model

LONG = int(os.environ.get("PRIORZOO_FUZZ", "0"))
ASSETS = Path(sys.modules["modalities.text"].__file__).parent / "assets"


@dataclass
class Reader:
    """A reader of one kind of file: `files` that it reads, by name, how it reads one, and how one is damaged."""

    name: str
    files: dict[str, bytes]
    read: object
    number: int = 150  # files that are tried
    damage: object = damaged
    allowed: tuple = (ValueError,)
    beside: dict[str, bytes] = field(default_factory=dict)  # files that stay as they are


def inside_gzip(data, seed):
    """Damage to the content, or to the compressed bytes."""
    if int(seed.rpartition(" ")[2]) % 2:
        return damaged(data, seed)
    return gzip.compress(damaged(gzip.decompress(data), seed), 1, mtime=0)


def uncompressed_too(data, seed):
    """Damage to compressed BCF, or to BCF that is not compressed, where no checksum protects it."""
    return damaged(data if int(seed.rpartition(" ")[2]) % 2 else gzip.decompress(data), seed)


def walk(iterator):
    for _ in iterator:
        pass


def parquet():
    table = pyarrow.table({"text": [f"row {n} " * 9 for n in range(60)], "id": [str(n) for n in range(60)]})
    stream = io.BytesIO()
    pyarrow.parquet.write_table(table, stream, row_group_size=20)
    return stream.getvalue()


def tar(folder):
    samples = [(f"{n}", {"png": encoded(solid(n)), "cls": b"0", "json": b'{"label": 1}'}) for n in range(3)]
    samples.append(("long/" + "x" * 150, {"png": encoded(solid(9)), "cls": b"1"}))
    return write_tar(folder / "part-000.tar", samples).read_bytes()


def read_tar(path):
    shards = open_shards("x", str(path))
    assert len(scan(path)) == len(shards)
    walk(shards.read(0, 0, len(shards)))


def corpus_files(folder):
    corpus_of([Document("a", "some text"), Document("b", "more")], ByteTokenizer()).save(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def model_files(folder):
    torch.manual_seed(0)
    options = dict(position="rope", position_options={"theta": 1e4}, train_context=16, vocab_size=32)
    model = CausalLM(TextConfig(dim=8, num_layers=1, num_heads=2, hidden_dim=8, **options))
    model.save_pretrained(folder)
    (folder / "manifest.json").unlink()  # whoever changes a file may change its digest too
    return {path.name: path.read_bytes() for path in folder.iterdir()}


IMAGES = {"png": {}, "jpeg": {}, "gif": {}, "webp": {}, "tiff": {"compression": "tiff_lzw"}, "bmp": {}, "ppm": {}}


def readers(folder):
    letters = fasta(MIXED).encode()
    records = "##fileformat=VCFv4.2\n#CHROM\tPOS\tID\tREF\tALT\n" + "".join(
        f"c\t{n}\tr\tA\tC,G\n" for n in range(1, 30)
    )
    rows = b"".join(json.dumps({"text": f"röw {n}", "id": n}).encode() + b"\n" for n in range(20))
    model, corpus = model_files(folder / "model"), corpus_files(folder / "corpus")
    shards = tar(folder)
    index = write_index(folder, ["a", "b"]).read_bytes()
    tokenizer = json.loads((ASSETS / "bpe-1k.json").read_bytes())
    tokenizer["added_tokens"] = [
        {"id": 0, "content": "<|endoftext|>", "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    ]
    (folder / "genome.fa").write_bytes(letters)
    genome = open_genome(find_source(str(folder / "genome.fa")))
    read_genome = lambda path: walk(read_codes(path))  # noqa: E731
    read_vcf = lambda path: walk(read_variants(path))  # noqa: E731
    read_text = lambda path: walk(open_source(str(path)))  # noqa: E731
    read_model = lambda path: load_model(path.parent)  # noqa: E731
    return [
        Reader("FASTA", {"a.fa": letters}, read_genome),
        Reader("FASTA, gzip", {"a.fa.gz": gzip.compress(letters, mtime=0)}, read_genome, damage=inside_gzip),
        Reader("GenBank", {"a.gb": genbank(MIXED).encode()}, read_genome, 100),
        Reader("VCF", {"a.vcf": records.encode()}, read_vcf),
        Reader("VCF, gzip", {"a.vcf.gz": gzip.compress(records.encode(), mtime=0)}, read_vcf, 50, inside_gzip),
        Reader("BCF", {"a.bcf": whole_vcf(folder / "a.bcf").read_bytes()}, read_vcf, 100, uncompressed_too),
        Reader("BED", {"a.bed": b"chr1\t0\t9\tname\nchr2 5 60\n# x\n" * 9}, lambda path: bed_rows(path, genome)),
        Reader("text", {"a.txt": "Some words, ünd\n".encode() * 30}, read_text),
        Reader("text, gzip", {"a.txt.gz": gzip.compress(b"Some words\n" * 30, mtime=0)}, read_text, damage=inside_gzip),
        Reader("JSONL", {"a.jsonl": rows}, read_text),
        Reader("Parquet", {"a.parquet": parquet()}, read_text),
        Reader("images", {f"a.{form}": encoded(picture(1), form, **options) for form, options in IMAGES.items()},
               lambda path: decode_image(path.read_bytes())),
        Reader("tar", {"a.tar": shards}, read_tar),
        Reader("shard index", {"index.json": index}, lambda path: open_shards("x", str(path.parent)), damage=damaged_json,
               beside={"part-000.tar": shards}, allowed=(ValueError, FileNotFoundError)),
        Reader("config.json", {"config.json": model["config.json"]}, read_model, damage=damaged_json, beside=model),
        Reader("model.safetensors", {"model.safetensors": model["model.safetensors"]}, read_model, 80, beside=model),
        Reader("tensors", {"a.safetensors": model["model.safetensors"]}, read_tensors),
        Reader("tokenizer.json", {"a.json": json.dumps(tokenizer).encode()},
               lambda path: load_tokenizer(str(path)).encode("a few words, 12"), 80, damaged_json),
        Reader("tokens", corpus, lambda path: [*map(TokenCorpus.load(path.parent).document, range(2))], beside=corpus,
               damage=lambda data, seed: (damaged_json if data.startswith(b"{") else damaged)(data, seed)),
    ]  # fmt: skip


NAMES = [
    "FASTA", "FASTA, gzip", "GenBank", "VCF", "VCF, gzip", "BCF", "BED", "text", "text, gzip",
    "JSONL", "Parquet", "images", "tar", "shard index", "config.json", "model.safetensors", "tensors", "tokenizer.json",
    "tokens",
]  # fmt: skip


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return {reader.name: reader for reader in readers(tmp_path_factory.mktemp("whole"))}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of damaged metadata
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_read_or_refused(name, every, tmp_path, capsys):
    assert [*every] == NAMES
    reader = every[name]
    for beside, data in reader.beside.items():
        (tmp_path / beside).write_bytes(data)
    names = [*reader.files]
    for whole in names:
        (tmp_path / whole).write_bytes(reader.files[whole])
        reader.read(tmp_path / whole)

    def trial(number):
        file = names[number % len(names)]
        path = tmp_path / file
        path.write_bytes(reader.damage(reader.files[file], f"{name} {number}"))
        found = outcome(reader.read, path, number, reader.allowed)
        path.write_bytes(reader.files[file])
        return found

    total = Counter()
    if LONG:
        for start in range(0, LONG, 1000):
            total += in_child(range(start, min(start + 1000, LONG)), trial, tmp_path / "at")
        with capsys.disabled():
            print(f"\n{name}: {dict(total)}")
    else:
        for number in range(reader.number):
            total += trial(number)
    assert total["refused"] > 0, "no damage was noticed: it is none"
