"""Stored cells are keyed by the data: what is measured on other bytes is another measurement."""

from __future__ import annotations

import dataclasses
import json
import os
import time

import numpy as np
import pytest

import zoo
from modalities import digests
from modalities.digests import content_digests
from modalities.dna import MODALITY as DNA
from modalities.evaluation import Evaluator
from modalities.results import Score
from modalities.settings import LengthSettings
from modalities.text import MODALITY as TEXT
from modalities.text.evaluation import HaystackEvaluator, TextEvaluator
from modalities.vision import MODALITY as VISION
from tests.vision.image_files import encoded, picture, write_tar


class Plain(TextEvaluator[LengthSettings]):
    """What a new text evaluator defines, and no more."""

    name = "plain"
    summary = "nothing"
    scores = (Score("x"),)

    def cells(self, model):
        return []

    def measure(self, model, cell):
        return {}


class PlainHay(HaystackEvaluator[LengthSettings]):
    """The same of an evaluator that hides statements in text."""

    name = "plain_hay"
    summary = "nothing"
    scores = (Score("x"),)
    filler = "text"
    cells = Plain.cells
    measure = Plain.measure


class PlainNamed(Evaluator[LengthSettings]):
    """An evaluator that reads its source by itself."""

    name = "plain_named"
    summary = "nothing"
    scores = (Score("x"),)
    cells = Plain.cells
    measure = Plain.measure


def text_options(folder, turn):
    path = folder / f"text{turn}.txt"
    path.write_text("A sentence that is held out. " * 40 + "ab"[turn])
    return {"source": f"{path}?split=heldout"}


def dna_options(folder, turn):
    """Held-out contigs, a file of sequences, and variants of it."""
    rng = np.random.default_rng(turn)
    place = folder / str(turn)
    place.mkdir(exist_ok=True)
    bases = "".join("ACGT"[n] for n in rng.integers(0, 4, 3000))
    (place / "g.fa").write_text(f">c1\n{bases}\n")
    other = "C" if bases[99] == "A" else "A"
    columns = "#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO"
    (place / "v.vcf").write_text(
        f"##fileformat=VCFv4.3\n##contig=<ID=c1>\n{columns}\n"
        f"c1\t100\t.\t{bases[99]}\t{other}\t.\t.\t.\n"
    )
    return {
        "source": str(place / "g.fa"),
        "fasta": str(place / "g.fa"),
        "variants": str(place / "v.vcf"),
    }


def image_options(folder, turn):
    """Pictures of equal size, labels and last bytes, with a label and with boxes."""
    samples = []
    objects = {"bbox": [[0, 0, 20, 20]], "category": [0], "marked": [True]}
    for number in range(3):
        image = picture(10 * turn + number, (40, 40))
        image.paste((255, 255, 255), (0, 38, 40, 40))
        fields = json.dumps({"label": 0, "objects": objects}).encode()
        samples.append((str(number), {"ppm": encoded(image, "PPM"), "json": fields}))
    place = folder / str(turn)
    place.mkdir(exist_ok=True)
    return {"source": f"wds:{write_tar(place / 's.tar', samples)}"}


# An evaluator that makes its own texts has nothing to change.
NO_DATA = ("heads",)
CASES = [
    *((kind, "text_ggd_tiny", text_options) for kind in TEXT.evaluators.values()),
    *((kind, "text_ggd_tiny", text_options) for kind in (Plain, PlainHay, PlainNamed)),
    *((kind, "dna_ggd_tiny", dna_options) for kind in DNA.evaluators.values()),
    *((kind, "vision_goat_tiny_patch8", image_options) for kind in VISION.evaluators.values()),
]


CASES = [case for case in CASES if case[0].name not in NO_DATA]


@pytest.mark.parametrize(
    ("kind", "model", "options"), CASES, ids=[kind.name for kind, _, _ in CASES]
)
def test_other_data_other_key(kind, model, options, tmp_path):
    """Equal data have an equal key wherever they are, other data another one."""
    model = zoo.create_model(model)
    fields = {field.name for field in dataclasses.fields(kind.settings_class)}
    keys = []
    for name, turn in (("a", 0), ("b", 1), ("c", 0)):
        (tmp_path / name).mkdir()
        values = options(tmp_path / name, turn)
        if kind.name == "exact_match":
            values = {"source": ("task:reverse", "task:copy")[turn]}
        if kind.name in ("passkey", "niah"):
            values["filler"] = "text"
        chosen = {key: value for key, value in values.items() if key in fields}
        keys.append(kind(kind.settings_class(**chosen)).identity(model))
    assert keys[0] != keys[1]
    if kind is not PlainNamed:
        assert keys[0] == keys[2]


def test_digests_are_of_bytes(tmp_path, monkeypatch):
    """A cached digest counts for the file that it was taken of alone, even where size and time of
    another are set to the same."""
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(digests, "UNCACHED", 0)
    monkeypatch.setattr(digests, "SETTLED_NS", -(10**12))
    calls = []
    whole = digests.file_sha256
    monkeypatch.setattr(digests, "file_sha256", lambda file: calls.append(file) or whole(file))
    path = tmp_path / "a.bin"
    path.write_bytes(b"one")
    status = path.stat()
    first = content_digests([path])
    assert content_digests([path]) == first
    assert len(calls) == 1
    time.sleep(0.02)
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert content_digests([path]) != first
    [cache] = (tmp_path / "data/cache/digests").iterdir()
    cache.write_text("[]")
    assert content_digests([path]) != first


def test_fresh_digests_are_not_kept(tmp_path, monkeypatch):
    """A file that has just been written may change again within a tick of the clock."""
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(digests, "UNCACHED", 0)
    (tmp_path / "a.bin").write_bytes(b"one")
    content_digests([tmp_path / "a.bin"])
    assert not (tmp_path / "data").exists()
