"""Downloads of `priorzoo fetch-data` from a server that breaks off, lies about sizes, redirects or never ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from recipes.fetchers import common
from recipes.fetchers.common import FetchError, download

CONTENT = bytes(range(256)) * 400
# (status, headers, body) of each request
Answers = list[tuple[int, dict[str, str], bytes]]


@pytest.fixture
def answers() -> Answers:
    return []


@pytest.fixture
def address(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answers.pop(0)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(common, "WAITS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(common, "LARGEST", 2 * len(CONTENT))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/file"
    server.shutdown()
    server.server_close()


def test_a_broken_download_is_tried_again(address: str, answers: Answers, tmp_path: Path) -> None:
    size = {"Content-Length": str(len(CONTENT))}
    answers += [(200, size, CONTENT[:1000]), (503, {}, b""), (200, size, CONTENT + b"more")]
    assert download(address, tmp_path).read_bytes() == CONTENT and not answers
    answers += [(200, {"Content-Length": "banana"}, CONTENT)]  # until the server closes
    assert download(address, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("answer", "slowest", "reason"),
    [
        ((200, {"Content-Length": "200000"}, CONTENT), 1e3, "102,400 of 200,000 bytes came, after 3 tries"),
        ((200, {}, 3 * CONTENT), 1e3, "more than 204,800 bytes came, or too slowly, after 3 tries"),
        ((200, {"Content-Length": "102400"}, CONTENT), -1.0, "or too slowly, after 3 tries"),  # time is over at once
        ((404, {}, b""), 1e3, "HTTP status 404$"),
        ((302, {"Location": "ftp://127.0.0.1/file"}, b""), 1e3, "HTTP status 302$"),
    ],
)
def test_why_a_file_does_not_come(
    address: str, answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    answer: tuple[int, dict[str, str], bytes], slowest: float, reason: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(common, "SLOWEST", slowest)
    (tmp_path / "file").write_text("good")
    answers += [answer] * 3
    with pytest.raises(FetchError, match=reason):
        download(address, tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["good"]
