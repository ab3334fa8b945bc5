"""Weights beyond the wheel: a folder, a server that breaks connections, a hub repository, the cache, several at once."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import zoo.download
from zoo import create_model, pretrained
from zoo.download import DownloadError, download_verified

NAME = "text_ggd_tiny.facts"
CONTENT = bytes(range(256)) * 4000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Server:
    """Serves `files` by path. `cuts`: after how many bytes it ends the next answers; None stalls there until `resume` is set.

    requests: (path, first byte asked for) of each.
    """

    def __init__(self):
        self.files, self.cuts, self.requests, self.headers = {}, [], [], {}
        self.resume, self.stalled, serving = threading.Event(), threading.Event(), self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                body = serving.files.get(self.path)
                if body is None:
                    return self.send_error(404)
                start = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
                if self.command == "GET":
                    serving.requests.append((self.path, start))
                if start >= len(body):
                    return self.send_error(416)
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(body) - start))
                for name, value in serving.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "HEAD":
                    return
                cut = serving.cuts.pop(0) if serving.cuts else len(body)
                if cut is None:
                    self.wfile.write(body[start : start + 70_000])
                    self.wfile.flush()
                    serving.stalled.set()
                    serving.resume.wait(20)
                else:
                    self.wfile.write(body[start : start + cut])
                self.close_connection = True

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.address = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setattr(zoo.download, "WAIT", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Server()
    yield made
    made.resume.set()
    made.http.shutdown()
    made.http.server_close()


def left(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def get(server, path, content=CONTENT):
    download_verified(f"{server.address}/w", path, sha256=hashlib.sha256(content).hexdigest(), size=len(content))


def test_a_broken_download_goes_on_where_it_ended(server, tmp_path):
    server.files["/w"], server.cuts = CONTENT, [1000, 500_000]
    get(server, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT and left(tmp_path) == ["w"]
    assert [start for _, start in server.requests] == [0, 1000, 501_000]
    get(server, tmp_path / "w")
    assert len(server.requests) == 3  # it is there


def test_what_never_comes_stays_to_go_on_from(server, tmp_path):
    server.files["/w"], server.cuts = CONTENT, [1000] * zoo.download.TRIES
    with pytest.raises(DownloadError, match=r"/w: 4,000 of 1,024,000 bytes came, after 4 tries"):
        get(server, tmp_path / "w")
    assert left(tmp_path) == [".w.partial"]
    get(server, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT and server.requests[-1] == ("/w", 4000)
    with pytest.raises(DownloadError, match=r"/none: HTTP status 404$"):
        download_verified(f"{server.address}/none", tmp_path / "none", sha256=DIGEST, size=9)


@pytest.mark.parametrize("old", [b"x" * 2000, CONTENT[:-1] + b"x", CONTENT + b"more"])
def test_a_part_of_something_else_is_fetched_again_from_the_start(server, tmp_path, old):
    (tmp_path / ".w.partial").write_bytes(old)
    server.files["/w"] = CONTENT
    get(server, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT and left(tmp_path) == ["w"]


def test_other_bytes_than_those_wanted_leave_nothing(server, tmp_path):
    server.files["/w"] = CONTENT[::-1]
    with pytest.raises(ValueError, match=f"expected {DIGEST}; nothing was kept"):
        get(server, tmp_path / "w")
    assert left(tmp_path) == []


def test_processes_that_want_the_same_file_fetch_it_once(server, tmp_path):
    server.files["/w"], server.cuts = CONTENT, [None, 200_000]
    fork = multiprocessing.get_context("fork")
    several = [fork.Process(target=get, args=(server, tmp_path / "w")) for _ in range(3)]
    for process in several:
        process.start()
    assert server.stalled.wait(20) and not (tmp_path / "w").exists()
    server.resume.set()  # the first one's connection breaks, with all of them waiting
    for process in several:
        process.join(30)
    assert [process.exitcode for process in several] == [0, 0, 0]
    assert (tmp_path / "w").read_bytes() == CONTENT and left(tmp_path) == ["w"]
    starts = [start for _, start in server.requests]
    assert len(starts) == 3 and starts == sorted(starts)  # one process alone, going on twice


def test_a_process_that_is_killed_leaves_what_the_next_goes_on_with(server, tmp_path):
    server.files["/w"], server.cuts = CONTENT, [None]
    process = multiprocessing.get_context("fork").Process(target=get, args=(server, tmp_path / "w"))
    process.start()
    assert server.stalled.wait(20)
    partial = tmp_path / ".w.partial"
    deadline = time.monotonic() + 10
    while not (partial.exists() and partial.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.join(10)
    assert left(tmp_path) == [".w.partial"]
    get(server, tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == CONTENT and server.requests[-1][1] > 0


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A package whose manifest names weights that it does not have; returns the folder that has them."""
    file = pretrained.verified_file(NAME)
    package, release = tmp_path / "package", tmp_path / "release"
    package.mkdir()
    release.mkdir()
    (release / file.name).write_bytes(file.read_bytes())
    (package / "manifest.json").write_text(json.dumps({NAME: pretrained.manifest()[NAME]}))
    monkeypatch.setattr(pretrained, "WEIGHTS", package)
    return release


def same_weights():
    model = create_model(NAME)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return model.layers[0].attention.prior.state_dict()


def test_weights_come_from_a_folder_or_an_address_and_stay_in_the_cache(server, published, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"text_ggd_tiny.facts.safetensors, 1.9 MB.*set PRIORZOO_WEIGHTS to"):
        create_model(NAME)
    monkeypatch.setenv("PRIORZOO_WEIGHTS", str(published / "none"))
    with pytest.raises(FileNotFoundError, match=r"should be at .*/none/text_ggd_tiny\.facts\.safetensors"):
        create_model(NAME)
    monkeypatch.setenv("PRIORZOO_WEIGHTS", str(published))
    first = same_weights()
    assert not pretrained.cache_folder().exists()  # read where it lies
    monkeypatch.setenv("PRIORZOO_WEIGHTS", f"{server.address}/v1/")
    file = f"{NAME}.safetensors"
    server.files[f"/v1/{file}"], server.cuts = (published / file).read_bytes(), [100_000]
    second = same_weights()
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    monkeypatch.delenv("PRIORZOO_WEIGHTS")
    same_weights()  # from the cache, without a network
    assert len(server.requests) == 2
    (kept,) = pretrained.cache_folder().glob(f"*/{file}")
    kept.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="is damaged"):
        create_model(NAME)
    monkeypatch.setenv("PRIORZOO_WEIGHTS", f"{server.address}/v1")
    same_weights()  # fetched again
    monkeypatch.setenv("PRIORZOO_WEIGHTS", "ftp://x")
    kept.unlink()
    with pytest.raises(ValueError, match="expected a folder, an http"):
        create_model(NAME)


def test_the_manifest_may_name_the_place(server, published):
    path = pretrained.WEIGHTS / "manifest.json"
    path.write_text(json.dumps({NAME: pretrained.manifest()[NAME] | {"source": server.address}}))
    pretrained._read_manifest.cache_clear()
    server.files[f"/{NAME}.safetensors"] = (published / f"{NAME}.safetensors").read_bytes()
    assert pretrained.verified_file(NAME).parent.parent == pretrained.cache_folder()


def test_weights_come_from_a_repository_of_the_hub(server, published, monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    address = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("PRIORZOO_WEIGHTS", "hf:me/weights@v1")
    file = f"{NAME}.safetensors"
    with pytest.raises(FileNotFoundError, match="do not come from hf:me/weights@v1: "):
        create_model(NAME)
    server.files[f"/me/weights/resolve/v1/{file}"] = (published / file).read_bytes()
    server.headers = {"ETag": f'"{pretrained.manifest()[NAME]["sha256"]}"', "X-Repo-Commit": "a" * 40}
    same_weights()
    assert os.listdir(tmp_path / "hub") and not pretrained.cache_folder().exists()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'priorzoo\[hub\]'"):
        create_model(NAME)
