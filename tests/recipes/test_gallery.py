"""The gallery: one valid file with every model, its scores and intervals."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

from recipes.gallery import main
from zoo.catalog import manifest


class Page(HTMLParser):
    """Fails on an id that comes twice, and on anything from elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs) -> None:
        values = dict(attrs)
        assert not {"src", "srcset", "action", "poster"} & values.keys() and tag not in ("link", "iframe", "base")
        if "id" in values:
            assert values["id"] not in self.ids and " " not in values["id"]
            self.ids.add(values["id"])
        self.links |= {values[name].removeprefix("#") for name in ("href", "for", "aria-labelledby") if name in values}


def test_it_is_one_valid_file_that_has_every_shipped_model(tmp_path) -> None:
    assert main(["--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    parsed = Page(page)
    assert set(manifest()) <= parsed.ids
    assert parsed.links <= parsed.ids
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|\bimport\(", page)
    assert len(page.encode()) < 1_500_000
    data = json.loads(re.findall(r"<script[^>]*json[^>]*>(.*?)</script>", page, re.DOTALL)[0])
    assert {"text_ggd_tiny.facts", "vision_goat_ssmax_tiny_patch8.glyphs"} <= data["priors"].keys()
    assert set().union(*(table["rows"] for table in data["tables"])) == set(manifest())
