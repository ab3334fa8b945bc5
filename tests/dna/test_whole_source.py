"""A file that a model was not trained on is measured whole; one that it was, by the split of its training."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from modalities.dna.baselines import create_baseline
from modalities.dna.evaluators.bits import Bits, BitsSettings
from recipes.evaluate import main
from zoo.files import write_json


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    contigs = {"chrA": 4000, "random": 1000}
    text = "".join(f">{name}\n{''.join(rng.choice(list('ACGT'), size))}\n" for name, size in contigs.items())
    (tmp_path / "my.fa").write_text(text)
    return tmp_path / "my.fa"


def test_all_contigs_of_a_file_unseen_in_training(
    fasta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = f"dna_nope_tiny.genomes bits --source {fasta} --lengths 500 --out {out}"
    assert main(words.split()) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"bases measured of all of {fasta}: 5,000 bases of 2 contigs (chrA, random)" in printed
    tables = [json.loads(path.read_text(), parse_constant=pytest.fail) for path in (out / "bits").glob("*.json")]
    assert {row["contigs"] for table in tables for row in table["rows"]} == {2}


def test_the_training_source_keeps_its_split(fasta: Path) -> None:
    settings = BitsSettings(source=str(fasta), lengths=(100,))
    assert set(Bits(settings, {"source": "genomes:elsewhere"}).heldout.items.contigs) == {"chrA", "random"}
    for spec in (str(fasta), f"{fasta.parent}/*.fa"):
        assert len(Bits(settings, {"source": spec}).heldout.items.contigs) == 1
    chain = create_baseline("markov-2")
    with pytest.raises(ValueError, match="all of it is held out: give --split BED"):
        evaluator = Bits(settings)
        list(evaluator.run(chain))


def test_json_has_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [math.nan, 1.0, {"b": math.inf}], "c": np.float64("nan")})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [None, 1.0, {"b": None}], "c": None}
