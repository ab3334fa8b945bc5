"""Weights beyond the wheel: a folder, a server that breaks connections, a hub repository, the cache."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import zoo.download
from zoo import catalog, create_model
from zoo.download import DownloadError, download

NAME = "text_ggd_tiny.facts"
FILE = f"{NAME}.safetensors"
CONTENT = bytes(range(256)) * 4000


class Server:
    """Serves `files` by path; `cuts`: after how many bytes it ends the next responses. starts: first bytes of requests."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.starts: list[int] = []
        self.headers: dict[str, str] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = server.files.get(self.path)
                if body is None:
                    return self.send_error(404)
                start = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
                self.send_response(206 if start else 200)
                for name, value in ({"Content-Length": str(len(body) - start)} | server.headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    server.starts.append(start)
                    self.wfile.write(body[start : start + (server.cuts.pop(0) if server.cuts else len(body))])
                self.close_connection = True

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.address = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    monkeypatch.setattr(zoo.download, "WAIT", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def test_a_broken_download_goes_on_where_it_ended(server: Server, tmp_path: Path) -> None:
    server.files["/w"], server.cuts = CONTENT, [1000, 500_000]
    download(f"{server.address}/w", tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT and server.starts == [0, 1000, 501_000]


def test_why_a_file_does_not_come(server: Server, tmp_path: Path) -> None:
    server.files["/w"], server.cuts = CONTENT, [1000] * zoo.download.TRIES
    with pytest.raises(DownloadError, match=r"/w: 4,000 of 1,024,000 bytes came, after 4 tries"):
        download(f"{server.address}/w", tmp_path / "w")
    with pytest.raises(DownloadError, match=r"/none: HTTP status 404$"):
        download(f"{server.address}/none", tmp_path / "none")


@pytest.mark.parametrize("announced", ["1000", "banana"])
def test_no_more_is_written_than_a_file_has(server: Server, tmp_path: Path, announced: str) -> None:
    server.files["/w"], server.headers = CONTENT, {"Content-Length": announced}
    path = tmp_path / "w"
    path.write_bytes(b"good")
    with pytest.raises(DownloadError, match="expected a number" if announced == "banana" else "has 1,004 bytes"):
        download(f"{server.address}/w", path, size=len(CONTENT))
    assert path.read_bytes() == b"good"


def test_a_server_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo.download, "TRIES", 1)

    class Endless(BytesIO):
        status, url, headers = 200, "http://endless/w", Message()

        def read1(self, size: int = -1) -> bytes:
            return bytes(size)

    monkeypatch.setattr(zoo.download, "_opener", lambda: SimpleNamespace(open=lambda *_, **__: Endless()))
    with pytest.raises(DownloadError, match="more than the 300,000 bytes"):
        download("http://endless/w", tmp_path / "w", size=300_000)
    assert (tmp_path / "w").stat().st_size <= 300_000
    monkeypatch.setattr(zoo.download, "TIMEOUT", 0.0)
    monkeypatch.setattr(zoo.download, "LEAST", 1 << 40)
    with pytest.raises(DownloadError, match="bytes came in 0 s"):
        download("http://endless/w", tmp_path / "slow", size=300_000)


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose manifest names weights that it does not have; returns the folder that has them."""
    package, release = tmp_path / "package", tmp_path / "release"
    package.mkdir()
    release.mkdir()
    (release / FILE).write_bytes(catalog.verified_file(NAME).read_bytes())
    (package / "manifest.json").write_text(json.dumps({NAME: catalog.manifest()[NAME]}))
    monkeypatch.setattr(catalog, "WEIGHTS", package)
    return release


def prior() -> dict[str, Tensor]:
    return create_model(NAME).layers[0].attention.prior.state_dict()


def test_weights_of_a_folder_and_of_an_address(
    server: Server, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match=r"text_ggd_tiny.facts.safetensors, 1.9 MB.*set PRIORZOO_WEIGHTS to"):
        prior()
    monkeypatch.setenv("PRIORZOO_WEIGHTS", str(published / "none"))
    with pytest.raises(FileNotFoundError, match=r"should be at .*/none/text_ggd_tiny\.facts\.safetensors"):
        prior()
    monkeypatch.setenv("PRIORZOO_WEIGHTS", str(published))
    first = prior()
    assert not catalog.cache_folder().exists()  # read where it is
    monkeypatch.setenv("PRIORZOO_WEIGHTS", f"{server.address}/v1/")
    server.files[f"/v1/{FILE}"] = CONTENT
    with pytest.raises(DownloadError, match="the server has 1,024,000 bytes; expected"):
        prior()
    server.files[f"/v1/{FILE}"] = bytes(catalog.manifest()[NAME]["bytes"])
    with pytest.raises(ValueError, match="the manifest says"):
        prior()
    assert not list(catalog.cache_folder().glob("*/*"))
    server.files[f"/v1/{FILE}"], server.cuts, server.starts = (published / FILE).read_bytes(), [100_000], []
    second = prior()
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    monkeypatch.delenv("PRIORZOO_WEIGHTS")
    prior()  # from the cache, without a network
    assert len(server.starts) == 2
    (cached,) = catalog.cache_folder().glob(f"*/{FILE}")
    cached.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="is damaged"):
        prior()
    monkeypatch.setenv("PRIORZOO_WEIGHTS", f"{server.address}/v1")
    prior()  # fetched again
    monkeypatch.setenv("PRIORZOO_WEIGHTS", "ftp://x")
    with pytest.raises(ValueError, match="expected a folder, an http"):
        prior()


def test_weights_of_a_repository_of_the_hub(
    server: Server, published: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    address = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("PRIORZOO_WEIGHTS", "hf:me/weights@v1")
    with pytest.raises(FileNotFoundError, match="do not come from hf:me/weights@v1: "):
        prior()
    server.files[f"/me/weights/resolve/v1/{FILE}"] = (published / FILE).read_bytes()
    server.headers = {"ETag": f'"{catalog.manifest()[NAME]["sha256"]}"', "X-Repo-Commit": "a" * 40}
    prior()
    assert (tmp_path / "hub").exists() and not catalog.cache_folder().exists()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'priorzoo\[hub\]'"):
        prior()
