"""Files, folders and tables that appear whole or not at all, and where fetched data lies."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import time
from pathlib import Path

import pytest

from modalities.results import file_safe
from modalities.tables import write_table
from zoo import files
from zoo.errors import one_line
from zoo.files import (
    ABANDONED,
    data_folder,
    matching_files,
    near_file,
    new_folder,
    replacing,
    replacing_path,
    write_json,
    write_text,
)


def test_tables(tmp_path):
    rows = [{"a": 1, "positions": [1, 2]}, {"a": 2, "b": "x"}]
    write_table(tmp_path / "t.csv", rows)
    with pytest.raises(UnicodeEncodeError):
        write_table(tmp_path / "t.csv", [{"a": "\ud800"}])
    assert (tmp_path / "t.csv").read_bytes() == b"a,b\n1,\n2,x\n"
    assert len(list(tmp_path.iterdir())) == 1
    write_table(tmp_path / "t.tsv", rows, delimiter="\t")
    assert (tmp_path / "t.tsv").read_text() == "a\tb\n1\t\n2\tx\n"
    assert file_safe("text.ggd tiny (run/é)") == "text.ggd_tiny__run_é_"


def test_tables_have_no_formulas(tmp_path):
    """Tables have no formulas and no line breaks."""
    hostile = ["=1+1", "-2+3", "@SUM(A1)", " =1", "\t=x", "\uff1d1+1"]
    harmless = ["-2.5", "+1e3", "-", "text.a-b"]
    write_table(
        tmp_path / "t.csv",
        [{"=x": label} for label in (*hostile, *harmless, "a\r\n=b\u2028c", "\ufeff=1")],
    )
    head, *cells, _ = (tmp_path / "t.csv").read_text().split("\n")
    assert head == "'=x"
    assert cells == [
        *(f"'{label}" for label in hostile),
        *harmless,
        "a =b c",
        "'=1",
    ]


def test_file_is_old_or_new(tmp_path):
    """A file is the old one or the new one."""
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "old é\n")
    with pytest.raises(OSError, match="full"), replacing_path(path) as temporary:
        assert temporary.suffix == ".txt"
        assert temporary.parent == path.parent
        temporary.write_text("a part")
        raise OSError("disk full")
    assert path.read_bytes() == "old é\n".encode()
    assert list(path.parent.iterdir()) == [path]
    with replacing(path, "wb") as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644
    write_json(path, {"path": Path("a/b"), "nan": math.nan})
    assert json.loads(path.read_text()) == {"path": "a/b", "nan": None}


def test_folder_is_complete_or_absent(tmp_path):
    """A folder is complete or absent and the first of two is kept."""
    folder = tmp_path / "cache" / "f"
    with pytest.raises(RuntimeError), new_folder(folder, "mark") as temporary:
        (temporary / "mark").touch()
        raise RuntimeError
    assert list(folder.parent.iterdir()) == []
    for text in ("first", "second"):
        with new_folder(folder, "mark") as temporary:
            (temporary / "mark").write_text(text)
    assert (folder / "mark").read_text() == "first"
    assert list(folder.parent.iterdir()) == [folder]
    (folder / "mark").rename(folder / "other")
    with (
        pytest.raises(OSError),
        new_folder(folder, "mark") as temporary,
    ):  # what is there is something else
        (temporary / "mark").touch()


def test_abandoned_files_are_removed(tmp_path):
    """Not what others have written to since, and nothing else."""
    past = time.time() - 2 * ABANDONED
    for name in (
        ".t.csv-abcdefgh.csv",
        ".t.csv-12345678.csv",
        ".t.csv-notes.csv",
        ".other.csv-abcdefgh.csv",
    ):
        (tmp_path / name).write_text("a part")
    for name in (".cache.v1-abcdefgh.v1", ".cache.v1-12345678.v1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bases").write_text("a part")
    for path in tmp_path.rglob("*"):
        if "12345678" not in str(path.parent):  # somebody fills that folder
            os.utime(path, (past, past))
    os.utime(tmp_path / ".t.csv-12345678.csv")
    write_text(tmp_path / "t.csv", "new")
    with new_folder(tmp_path / "cache.v1", "mark") as temporary:
        (temporary / "mark").touch()
    left = {
        ".t.csv-12345678.csv",
        ".t.csv-notes.csv",
        ".other.csv-abcdefgh.csv",
        ".cache.v1-12345678.v1",
    }
    assert {path.name for path in tmp_path.iterdir()} == left | {"t.csv", "cache.v1"}


def test_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRIORZOO_DATA", raising=False)
    assert data_folder() == Path("data")  # of a checkout, which this is
    monkeypatch.setattr(files, "_CHECKOUT", False)
    assert data_folder().is_absolute()
    assert data_folder().name == "priorzoo"
    monkeypatch.setenv("PRIORZOO_DATA", "elsewhere")
    assert data_folder() == Path("elsewhere")


def test_the_nearest_file(tmp_path):
    """A long path that is shared makes no file close."""
    folder = tmp_path / "a{b}" / ("long" * 10)
    folder.mkdir(parents=True)
    for name in ("calls.vcf", "genes.gb"):
        (folder / name).touch()
    assert near_file(folder / "calls.vfc") == f"did you mean {str(folder / 'calls.vcf')!r}? "
    assert (
        near_file(folder / "calls.vfc", lambda name: name.endswith(".gb"))
        == near_file(folder / "x")
        == ""
    )
    assert (
        near_file(tmp_path / "none" / "calls.vcf")
        == near_file(f"{'n' * 300}/x")
        == near_file("absent.vcf")
        == ""
    )


def test_glob_matches_files_once(tmp_path: Path) -> None:
    """A glob matches each file once."""
    for name in ("b/x.txt", "a/x.txt", ".hidden/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "b/up").symlink_to(tmp_path)
    (tmp_path / "a/again.txt").symlink_to(tmp_path / "b/x.txt")
    paths = matching_files(f"{tmp_path}/**/*.txt")
    assert [str(path.relative_to(tmp_path)) for path in paths] == ["a/again.txt", "a/x.txt"]


def test_new_files_obey_umask(tmp_path: Path) -> None:
    """New files obey the umask and long names fit."""
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "deep" / ("x" * 250 + ".json"), "{}")
        with new_folder(tmp_path / "folder", "mark") as folder:
            (folder / "mark").touch()
    finally:
        os.umask(before)
    (path,) = (tmp_path / "deep").iterdir()
    assert path.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750


def test_unflushed_folders_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that cannot be flushed are told."""

    def refuse_folders(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse_folders)
    with pytest.warns(UserWarning, match="does not flush folders"):
        write_text(tmp_path / "x", "text")


def test_errors_show_control_characters() -> None:
    assert one_line(ValueError("a\x1b]0;PWN\x07 name\r")) == r"a\x1b]0;PWN\x07 name"
