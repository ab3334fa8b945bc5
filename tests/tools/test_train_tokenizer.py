"""tools/train_tokenizer.py: the same text gives the same file, the shipped one among them; what cannot be is one line."""

from __future__ import annotations

import pytest

from modalities.text.tokenizers import _ASSETS, load_tokenizer
from tools.train_tokenizer import app
from zoo.cli import call

pytest.importorskip("tokenizers")


def run(*words):
    return call(app, [*map(str, words)], prog="train_tokenizer.py")


def test_the_shipped_vocabulary_can_be_made_again(tmp_path, capsys):
    assert run(tmp_path / "new.json", "sotu-excerpt", "--entries", 1024) == 0
    assert "1,024 entries" in capsys.readouterr().out
    assert (tmp_path / "new.json").read_bytes() == (_ASSETS / "bpe-1k.json").read_bytes()


def test_sources_are_joined_and_bad_requests_named(tmp_path, capsys):
    for n, text in enumerate(("the cat sat on the mat, the cat", "der Hund und der Hund")):
        (tmp_path / f"{n}.txt").write_text(text)
    out, sources = tmp_path / "made" / "two.json", (tmp_path / "0.txt", tmp_path / "1.txt")
    assert run(out, *sources, "--entries", 263) == 0
    tokenizer = load_tokenizer(str(out))
    assert len(tokenizer.encode(" Hund")) < 5 and len(tokenizer.encode(" cat")) < 4
    capsys.readouterr()
    for words, named in (
        ((out, *sources, "--entries", 200), "at least 259"),
        ((out, *sources, "--entries", 4096), "text gives"),
        ((tmp_path / "two.txt", *sources), "ends in .json"),
        ((out, "sotu-excrept"), "sotu-excerpt"),
    ):
        assert run(*words) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and named in message
