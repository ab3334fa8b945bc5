"""The gallery: one valid file with every model and its scores."""

from __future__ import annotations

import json
import re

import pytest

from recipes.gallery import main
from zoo.pretrained import manifest


@pytest.mark.slow
def test_gallery_has_every_model(tmp_path) -> None:
    """It is one valid file that has every shipped model."""
    assert main(["--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    ids, links = (
        re.findall(pattern, page)
        for pattern in (r'\bid="([^" ]+)"', r'(?:href="#|labelledby=")([^"]+)"')
    )
    assert len(ids) == len(set(ids))
    assert set(manifest()) <= set(ids)
    assert set(links) <= set(ids)
    assert not re.search(
        r"url\(|@import|fetch\(|XMLHttpRequest|\bimport\(|<(link|iframe|base)|\bsrc=", page
    )
    assert len(page.encode()) < 1_500_000
    data = json.loads(re.findall(r"<script[^>]*json[^>]*>(.*?)</script>", page, re.DOTALL)[0])
    assert {"text_ggd_tiny.facts", "vision_goat_ssmax_tiny_patch8.glyphs"} <= data["priors"].keys()
    assert set().union(*(table["rows"] for table in data["tables"])) == set(manifest())
