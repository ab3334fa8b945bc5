"""`priorzoo fetch-data` without a network: the command, downloads, text and a released model."""

from __future__ import annotations

import hashlib
import io
import json
import signal
import socket
import subprocess
import sys
import tarfile
from pathlib import Path
from urllib.error import HTTPError

import pytest
from huggingface_hub import hf_hub_url

from recipes import fetch_data
from recipes.fetchers import common, text
from tests.launching import ROOT, Done, call
from tests.refusals import refuses


class Answer(io.BytesIO):
    """Of a server that announces `length` bytes."""

    def __init__(self, content: bytes, length: int | None = None):
        super().__init__(content)
        self.length = len(content) if length is None else length


def invoke(*words: str, **environment: str) -> Done:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"COLUMNS": "200", **environment}.items():
            patch.setenv(name, value)
        return call(fetch_data.main, *words)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def web(monkeypatch) -> dict[str, bytes]:
    """Public addresses answered from a dictionary: URL → bytes; what is missing breaks off."""
    pages: dict[str, bytes] = {}

    def open_page(request, timeout: float) -> io.BytesIO:
        if request.full_url not in pages:
            raise OSError("connection reset")
        return Answer(pages[request.full_url])

    monkeypatch.setattr(common, "urlopen", open_page)
    monkeypatch.setattr(common, "WAITS", (0.0, 0.0))
    return pages


def speeches(**members: bytes) -> bytes:
    """A tar of the package of speeches."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(f"datasets-sotu-0.2.3/data/{name}.json")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def test_public_text(tmp_path, web, monkeypatch):
    """Speeches and a tokenizer through the command; another digest is refused."""
    empty = hashlib.sha256(b"{}").hexdigest()
    monkeypatch.setattr(text, "GPT2_FILES", dict.fromkeys(text.GPT2_FILES, empty))
    speech = {"year": 1890, "name": "X", "party": "r", "text": " a\u0002b\n"}
    web |= {
        text.SOTU: speeches(**{"1890_x": json.dumps(speech).encode()}),
        f"{text.GPT2}/encoder.json": b"{}",
        f"{text.GPT2}/vocab.bpe": b"[]",
    }
    done = invoke("text", "sotu", "gpt2", "--data", str(tmp_path))
    (line,) = (tmp_path / "sotu/sotu.jsonl").read_text().splitlines()
    assert json.loads(line) == {"id": "1890_x", "year": 1890, "president": "X", "text": "ab"}
    assert done.exit_code == 1
    assert "vocab.bpe: SHA-256 is" in done.output
    assert files_in(tmp_path) == ["sotu/sotu.jsonl"]
    web[f"{text.GPT2}/vocab.bpe"] = b"{}"
    assert invoke("text", "gpt2", "--data", str(tmp_path)).exit_code == 0
    assert files_in(tmp_path / "gpt2") == ["encoder.json", "vocab.bpe"]


def test_an_empty_archive_is_named(tmp_path, web):
    web[text.SOTU] = speeches()
    done = invoke("text", "sotu", "--data", str(tmp_path))
    assert done.exit_code == 1
    assert "*/data/*.json of v0.2.3.tar.gz gave no document" in " ".join(done.output.split())
    assert not files_in(tmp_path)


def test_downloads_are_tried_again(tmp_path, monkeypatch):
    url = "https://x/file"
    answers = [
        HTTPError(url, 503, "", {}, None),
        Answer(b"abc", 9),
        Answer(b"abcd"),
        HTTPError(url, 404, "", {}, None),
    ]

    def answer(*_, **__):
        if isinstance(one := answers.pop(0), Exception):
            raise one
        return one

    def refused(words: str) -> None:
        refuses(words, common.download, url, tmp_path, error=common.FetchError)

    monkeypatch.setattr(common, "urlopen", answer)
    monkeypatch.setattr(common, "WAITS", (0.0, 0.0, 0.0))
    assert common.download(url, tmp_path).read_bytes() == b"abcd"
    refused(r"HTTP status 404$")
    answers += [Answer(b"abc", 9) for _ in range(3)]
    refused("3 of 9 bytes came, after 3 tries")
    answers += [Answer(b"abcde", 4) for _ in range(3)]
    refused("more than 4 bytes came")
    monkeypatch.setattr(common, "SLOWEST", -1e-3)  # the time of a whole download is over at once
    answers += [Answer(b"z" * 99) for _ in range(3)]
    refused("or too slowly, after 3 tries")
    assert common.HttpAlone().redirect_request(None, None, 302, "", {}, "ftp://x/file") is None
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"abcd"]


def test_command_keeps_existing_files(tmp_path, web):
    """The command lists and keeps what is there."""
    listed = invoke("text", "--data", str(tmp_path / "d"))
    assert listed.exit_code == 0
    assert "1.5 MB" in listed.output
    assert not (tmp_path / "d").exists()
    (tmp_path / "sotu").mkdir()
    (tmp_path / "sotu/sotu.jsonl").write_text("{}")
    done = invoke("text", "sotu", "--data", str(tmp_path))
    assert done.exit_code == 0
    assert "already in" in done.output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("text soto", 2, "did you mean 'sotu'"),
        ("tex", 2, "did you mean 'text'"),
        ("vision", 2, "known: text, dna"),
        ("text gpt2", 1, "connection reset, after 2 tries"),
        ("dna", 2, "pip install 'priorzoo[dna]'"),
    ],
)
def test_failures_are_named(tmp_path, monkeypatch, web, words, code, message):
    """Nothing is left."""
    monkeypatch.setitem(sys.modules, "recipes.fetchers.dna", None)
    monkeypatch.delattr("recipes.fetchers.dna", raising=False)
    done = invoke(*words.split(), "--data", str(tmp_path / "d"))
    assert done.exit_code == code, done.output
    assert message in " ".join(done.output.split()), done.output
    assert not files_in(tmp_path)


PROGRAM = """
import sys
from recipes import fetch_data
from recipes.fetchers import text
text.SOTU, *words = sys.argv[1:]
raise SystemExit(fetch_data.main(words))
"""


@pytest.mark.slow
def test_a_stopped_run_leaves_nothing(tmp_path):
    """The next run cleans up after SIGKILL."""
    data = tmp_path / "data"
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)):
        # A server that never answers.
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"http://127.0.0.1:{server.getsockname()[1]}/x.tar.gz"
            words = [url, "text", "sotu", "--data", str(data)]
            command = [sys.executable, "-c", PROGRAM, *words]
            with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
                connection, _ = server.accept()
                process.send_signal(number)
                assert process.wait() == code
            connection.close()
        assert bool(list(data.iterdir())) == (number == signal.SIGKILL)
    with common.scratch_folder(data) as folder:
        assert list(data.iterdir()) == [folder]
    assert not list(data.iterdir())


def test_released_model_of_hub(tmp_path, web):
    """Verified by the digest that its pointer names; another one leaves nothing. Addresses are
    those of huggingface_hub."""
    hub = text.SMOLLM2
    weights = text.SMOLLM2_WEIGHTS
    address = f"{hub}/resolve/main/{weights}"
    assert hf_hub_url(hub.removeprefix("https://huggingface.co/"), weights) == address
    web |= {f"{hub}/resolve/main/{name}": b"{}" for name in (*text.SMOLLM2_FILES, weights)}
    for digest, code in (("0" * 64, 1), (hashlib.sha256(b"{}").hexdigest(), 0)):
        web[f"{hub}/raw/main/{weights}"] = f"version 1\noid sha256:{digest}\nsize 2\n".encode()
        done = invoke("text", "smollm2", "--data", str(tmp_path))
        assert done.exit_code == code
        assert ("nothing was kept" in " ".join(done.output.split())) == bool(code)
        assert len(files_in(tmp_path)) == (0 if code else 5)
