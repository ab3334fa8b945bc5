"""recipes/prepare_genome.py as a person runs it: what it writes, prints, refuses."""

from __future__ import annotations

import io
import os
import shlex
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from modalities.dna.genome import open_genome
from modalities.dna.sources import find_source
from modalities.dna.splits import load_regions
from recipes import prepare_genome

SIZES = {"chr1": 900, "chr2": 700, "chr20": 100, "chrUn_KI270302v1": 60, "chr1_KI270706v1_random": 50}


@pytest.fixture
def fasta(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "human.fa"
    path.write_text("".join(f">{name}\n{''.join(rng.choice(list('ACGt'), size))}\n" for name, size in SIZES.items()))
    return path


def prepare(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with patch.dict(os.environ, COLUMNS="200"), redirect_stdout(out), redirect_stderr(err):
        code = prepare_genome.main([str(argument) for argument in arguments])
    return SimpleNamespace(exit_code=code, stdout=out.getvalue(), stderr=err.getvalue())


def splits(out):
    return {row.split("\t")[0]: row.split("\t")[3] for row in (out / "split.bed").read_text().splitlines()}


def test_the_whole_command(fasta, tmp_path):
    out = tmp_path / "out"
    done = prepare(fasta, "--out", out, "--hold-out", "chr20", "--primary")
    assert done.exit_code == 0, done.stderr
    assert splits(out) == {"chr1": "train", "chr2": "train", "chr20": "heldout"}
    assert "train: 2 regions, 1,600 bases" in done.stdout and "5 contigs, 1,810 known bases" in done.stdout
    command = shlex.split(done.stdout.split("train on it: ")[1].replace("\n", " "))
    assert command[:3] == ["python", "recipes/train.py", "dna.human_125m"]
    settings = dict(part.split("=", 1) for part in command if "=" in part)
    source = find_source(settings["data.source"], settings["data.split"])
    assert len(load_regions(source, open_genome(source))) == 3
    assert prepare(fasta, "--out", out, "--hold-out", "chr20", "--primary").exit_code == 0  # the same split again
    other = prepare(fasta, "--out", out)
    assert other.exit_code == 2 and "split.bed holds another split: remove it" in other.stderr
    assert splits(out)["chr20"] == "heldout"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--hold-out", "chr21"], "--hold-out: no contig 'chr21'; did you mean 'chr2'?"),
        (["--hold-out", "chrUn_KI270302v1", "--primary"], "--primary leaves it out"),
        (["--hold-out", ",".join(SIZES)], "holds out 5 of 5 contigs"),
    ],
)
def test_what_cannot_be_done_is_said(fasta, tmp_path, options, message):
    done = prepare(fasta, "--out", tmp_path / "out", *options)
    assert done.exit_code == 2 and message in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "out").exists()
