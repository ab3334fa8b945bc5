"""The gallery: one valid file with every model, its scores and intervals."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from recipes.gallery import gallery_page, main, stored_scores
from zoo.catalog import manifest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


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


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """Made where no results are, from the cards."""
    out = tmp_path_factory.mktemp("gallery") / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out.parent)
        assert main(["--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def test_it_is_one_valid_file_that_has_every_shipped_model(page) -> None:
    parsed = Page(page)
    assert set(manifest()) <= parsed.ids
    assert parsed.links <= parsed.ids
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|\bimport\(", page)
    assert len(page.encode()) < 1_500_000
    data = json.loads(re.findall(r"<script[^>]*json[^>]*>(.*?)</script>", page, re.DOTALL)[0])
    assert {"text_ggd_tiny.facts", "vision_goat_ssmax_tiny_patch8.glyphs"} <= data["priors"].keys()
    assert set().union(*(table["rows"] for table in data["tables"])) == set(manifest())


def test_scores_of_a_folder_have_intervals() -> None:
    tables = stored_scores([BENCHMARKS / "vision_tiny", BENCHMARKS / "dna_tiny"])
    [top1] = [table for table in tables if (table.title, table.score) == ("resolution", "top1")]
    assert set(top1.kinds.values()) == {"model", "seed"} and top1.places == [48, 72, 96, 144, 192]
    value, low, high = top1.rows["vision_goat_ssmax_tiny_patch8.glyphs"][48]
    assert value == pytest.approx(0.77885, abs=1e-5) and high - low == pytest.approx(2 * 1.96 * 0.020919, abs=1e-5)
    [bits] = [table for table in tables if (table.title, table.score) == ("bits", "bits_per_base")]
    assert bits.kinds["markov-12"] == "baseline"
    page = gallery_page([top1], measured=True)
    Page(page)
    assert f"<small>{low:.3f} to {high:.3f}</small>" in page


def test_a_folder_without_results_is_refused(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--results", ".", "--out", "page.html"]) == 2
    assert "holds no results" in capsys.readouterr().err and not list(tmp_path.iterdir())
