"""`priorzoo prepare-genome` as a person runs it: what it writes, prints, refuses."""

from __future__ import annotations

import shlex

import numpy as np
import pytest

from modalities.dna.genome import open_genome
from modalities.dna.sources import find_source
from modalities.dna.splits import load_regions
from recipes.prepare_genome import main

SIZES = {"chr1": 900, "chr2": 700, "chr20": 100, "chrUn_KI270302v1": 60, "chr1_KI270706v1_random": 50}


@pytest.fixture
def words(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "human.fa"
    path.write_text("".join(f">{name}\n{''.join(rng.choice(list('ACGt'), size))}\n" for name, size in SIZES.items()))
    return [str(path), "--out", str(tmp_path / "out")]


def test_the_whole_command(words, tmp_path, capsys):
    chosen, bed = [*words, "--hold-out", "chr20", "--primary"], tmp_path / "out" / "split.bed"
    assert main(chosen) == 0
    printed = capsys.readouterr().out
    assert bed.read_text() == "chr1\t0\t900\ttrain\nchr2\t0\t700\ttrain\nchr20\t0\t100\theldout\n"
    assert "train: 2 regions, 1,600 bases" in printed and "5 contigs, 1,810 known bases" in printed
    command = shlex.split(printed.split("train on it: ")[1])
    assert command[:3] == ["priorzoo", "train", "dna.human_125m"]
    settings = dict(part.split("=", 1) for part in command if "=" in part)
    source = find_source(settings["data.source"], settings["data.split"])
    assert len(load_regions(source, open_genome(source))) == 3
    assert main(chosen) == 0  # the same split again
    assert main(words) == 2 and "split.bed holds another split: remove it" in capsys.readouterr().err
    assert "chr20\t0\t100\theldout" in bed.read_text()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--hold-out", "chr21"], "--hold-out: no contig 'chr21'; did you mean 'chr2'?"),
        (["--hold-out", "chrUn_KI270302v1", "--primary"], "--primary leaves it out"),
        (["--hold-out", ",".join(SIZES)], "holds out 5 of 5 contigs"),
    ],
)
def test_what_cannot_be_done_is_said(words, tmp_path, options, message, capsys):
    assert main([*words, *options]) == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
