"""tools/fetch_data.py without a network: cleaning, verifying, the restricted pickle, and what it says when it cannot."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.fetchers import common, text  # noqa: E402


def script(*argv, **environment):
    env = {**os.environ, "PRIORZOO_DATA": "unused", **environment}
    command = [sys.executable, str(ROOT / "tools/fetch_data.py"), *argv]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_command_line(tmp_path):
    listed = script("text", "sotu", "--dry-run", "--data", str(tmp_path / "d"), COLUMNS="120")
    assert listed.returncode == 0 and "would be fetched" in listed.stderr
    assert not (tmp_path / "d").exists()
    wrong = script("text", "sott", "--data", str(tmp_path))
    assert wrong.returncode == 2 and "did you mean 'sotu'" in wrong.stderr


def test_a_missing_program_is_named_and_nothing_is_left(tmp_path):
    without = script("text", "sotu", "rfc", "--data", str(tmp_path / "d"), PATH=str(tmp_path), COLUMNS="200")
    assert without.returncode == 1
    assert "needs `npm`, which is not on this system: install Node.js" in without.stderr
    assert "needs `apt-get`" in without.stderr and "Debian" in without.stderr
    assert list((tmp_path / "d").iterdir()) == []


def test_what_is_there_is_not_fetched_again(tmp_path):
    (tmp_path / "sotu").mkdir()
    (tmp_path / "sotu/sotu.jsonl").write_text("{}")
    done = script("text", "sotu", "--data", str(tmp_path), PATH="")
    assert done.returncode == 0 and "already in" in done.stderr


def test_a_program_that_fails_is_quoted(tmp_path):
    with pytest.raises(common.FetchError, match=r"(?s)thing: `sh -c .*failed with status 3:\nno such package"):
        common.run_tool(["sh", "-c", "echo no such package >&2; exit 3"], cwd=tmp_path, what="thing")


def test_hash_is_checked(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"content")
    common.verify_sha256(path, hashlib.sha256(b"content").hexdigest())
    with pytest.raises(common.FetchError, match="expected 00"):
        common.verify_sha256(path, "00")


def test_jsonl_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a/b.jsonl"
    assert common.write_jsonl(path, [{"text": "é"}, {"text": "b"}]) == (2, 3)
    before = path.read_text()

    def broken():
        yield {"text": "new"}
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        common.write_jsonl(path, broken())
    with pytest.raises(common.FetchError, match=r"1 documents and 1 bytes of text;.*nothing was kept"):
        common.write_jsonl(path, [{"text": "x"}], at_least=(2, 1))
    assert path.read_text() == before and [p.name for p in path.parent.iterdir()] == ["b.jsonl"]


def test_apt_sources_keep_their_place_and_change_their_component(tmp_path):
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/debian.sources").write_text(
        "Types: deb\nURIs: http://x/debian\nComponents: main contrib\n"
    )
    (tmp_path / "sources.list").write_text(
        "# deb http://off/ y main\ndeb [signed-by=/k] http://x/debian stable main\ndeb-src http://x/ y main\n"
    )
    assert dict(common._debian_sources(tmp_path, "non-free")) == {
        "debian.sources": "Types: deb\nURIs: http://x/debian\nComponents: non-free\n",
        "sources.list": "deb [signed-by=/k] http://x/debian stable non-free\n",
    }


# ---- cleaning ----

RFC = """
Network Working Group                                        A. Author
Request for Comments: 9999                                   July 2020

   The first paragraph runs over the



Author                  Standards Track                     [Page 1]
\f
RFC 9999                   A Title                       July 2020


   edge of a page.



   Another ends here.

Author                  Standards Track                     [Page 2]
\f
RFC 9999                   A Title                       July 2020

2.  Section, which mentions RFC 9999 and [Page 2] inside a line
"""


def test_rfc_pages_are_joined_without_headers_and_footers():
    assert text.strip_pages(RFC) == (
        "Network Working Group                                        A. Author\n"
        "Request for Comments: 9999                                   July 2020\n\n"
        "   The first paragraph runs over the\n"
        "   edge of a page.\n\n"
        "   Another ends here.\n\n"
        "2.  Section, which mentions RFC 9999 and [Page 2] inside a line"
    )
    assert text.strip_pages("\f\n\f") == ""


def test_rfcs_are_split_by_number(tmp_path):
    path = tmp_path / "rfc1.txt"
    path.write_bytes("caf\xe9".encode("latin-1"))
    rows = [text._rfc_row(number, path) for number in (1, 8500, 8501, 8900, 8901)]
    assert [row["split"] for row in rows] == ["train", "train", "unused", "unused", "heldout"]
    assert rows[0] == {"id": "rfc1", "split": "train", "text": "café"}


def test_speeches_are_cleaned(tmp_path):
    path = tmp_path / "1890_x.json"
    path.write_text(json.dumps({"year": 1890, "name": "X", "party": "r", "text": " a\u0002b\n"}))
    assert text._speech(path) == {"id": "1890_x", "year": 1890, "president": "X", "text": "ab"}


def test_verse_is_cut_into_documents_with_the_end_held_out():
    rows = list(text._poems(np.array([f"line {n}" for n in range(20_500)], dtype=object)))
    assert len(rows) == 21 and rows[1]["text"].startswith("line 1000\nline 1001\n")
    assert [row["split"] for row in rows] == ["train"] * 20 + ["heldout"]


# ---- the pickle ----


class _Runs:
    """What a hostile pickle looks like: reading it calls a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def test_only_arrays_are_read_from_a_pickle(tmp_path):
    target = tmp_path / "touched"
    for hostile in (_Runs(os.system, f"touch {target}"), _Runs(eval, "1"), _Runs(Path, str(target))):
        with pytest.raises(common.FetchError, match="the pickle asks for"):
            text.read_frame_text(pickle.dumps(hostile), "text")
    assert not target.exists()
    with pytest.raises(common.FetchError, match="not a pickled table"):
        text.read_frame_text(pickle.dumps([1, 2]), "text")
    with pytest.raises(common.FetchError, match="not a pickled table"):
        text.read_frame_text(b"", "text")


class _Built:
    """Pickles as a call of `function`, with a state."""

    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


def test_a_frame_is_read_without_pandas(monkeypatch):
    # A DataFrame's pickle as pandas 1.0 made it, from stand-ins that only bear its names.
    fake = types.ModuleType("pandas")
    for name in ("DataFrame", "BlockManager", "Index", "_new_Index"):
        setattr(fake, name, type(name, (), {"__module__": "pandas"}))
    columns = _Built(fake._new_Index, (fake.Index, {"data": np.array(["text", "meter"], dtype=object), "name": None}))
    values = np.array([["a line", "another"], ["x", "y"]], dtype=object)
    manager = _Built(fake.BlockManager, (), ([columns], [values], [columns], {}))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", fake)
        pickled = pickle.dumps(_Built(fake.DataFrame, (), {"_data": manager, "_typ": "dataframe"}))
    assert text.read_frame_text(pickled, "text").tolist() == ["a line", "another"]
    with pytest.raises(common.FetchError, match=r"no column 'txt', only \['meter', 'text'\]"):
        text.read_frame_text(pickled, "txt")
