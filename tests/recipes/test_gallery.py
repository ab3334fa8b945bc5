"""The gallery: what the page holds, that it is one valid file, and that its arithmetic is the zoo's."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import quickjs
import torch

from recipes.commands import CommandError
from recipes.gallery import LIVE, PAGE, SENTENCE, gallery_page, live_attention, main, stored_scores
from zoo import create_model
from zoo.analysis import analyse
from zoo.pretrained import manifest
from zoo.priors.ggd import Ggd
from zoo.priors.spectral import Spectral

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
VOID = {"meta", "br", "wbr", "input", "img", "link", "hr"}


class Checked(HTMLParser):
    """Fails on tags that do not close in order, on an id that comes twice, and on anything from elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs) -> None:
        found = dict(attrs)
        assert len(found) == len(attrs)
        assert not {"src", "srcset", "action", "poster"} & found.keys() and tag not in ("link", "iframe", "base")
        if "id" in found:
            assert found["id"] not in self.ids and " " not in found["id"]
            self.ids.add(found["id"])
        for name in ("href", "for", "aria-labelledby"):
            if name in found:
                self.links.add(found[name].removeprefix("#"))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(text)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """Made where no results are, from the cards."""
    out = tmp_path_factory.mktemp("gallery") / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out.parent)
        assert main(["--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def test_it_is_one_valid_file_that_has_every_shipped_model(page) -> None:
    found = Checked(page)
    assert set(manifest()) <= found.ids
    assert found.links <= found.ids
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|\bimport\(", page)
    assert len(page.encode()) < 1_500_000
    data = json.loads(found.scripts[0])
    assert {"text_ggd_tiny.facts", "vision_goat_ssmax_tiny_patch8.glyphs"} <= data["priors"].keys()
    shown = set().union(*(table["rows"] for table in data["tables"]))
    assert shown == set(manifest())
    quickjs.Context().eval(f"(function () {{ {found.scripts[1]} }})")  # parsed and not run: there is no document


def test_stored_scores_have_intervals_and_controls_stand_beside_models() -> None:
    tables = stored_scores([BENCHMARKS / "vision_tiny", BENCHMARKS / "dna_tiny", BENCHMARKS / "controls"])
    [top1] = [table for table in tables if (table.title, table.score) == ("resolution", "top1")]
    assert set(top1.kinds.values()) == {"model", "seed", "control"}
    assert top1.places == [48, 72, 96, 144, 192]
    value, low, high = top1.rows["vision_goat_ssmax_tiny_patch8.glyphs"][48]
    assert value == pytest.approx(0.77885, abs=1e-5) and high - low == pytest.approx(2 * 1.96 * 0.020919, abs=1e-5)
    assert top1.rows["goat: reduced to 72"][96] == (0.90192, 0.875, 0.92692)
    [bits] = [table for table in tables if (table.title, table.score) == ("bits", "bits_per_base")]
    assert bits.kinds["markov-12"] == "baseline"
    [mixer] = [table for table in tables if table.title == "beside a context mixer"]
    assert mixer.kinds["mixer"] == "control" and mixer.kinds["goat"] == "model"
    page = gallery_page([top1, mixer], measured=True)
    Checked(page)
    assert "<small>0.875 to 0.927</small>" in page


def test_paired_differences_are_tables_too() -> None:
    [paired] = [
        table
        for table in stored_scores([BENCHMARKS / "text_tiny"])
        if (table.title, table.score) == ("perplexity, difference to text_ggd_goat_ssmax_tiny.facts", "bits_per_byte")
    ]
    assert paired.places == [256, 1024, 4096, 16384] and not paired.is_share
    difference, low, high = paired.rows["text_ggd_goat_tiny.facts"][256]
    assert low < difference < high and difference == pytest.approx(0.00466, abs=1e-5)
    shown = gallery_page([paired], measured=True)
    Checked(shown)
    assert f"<small>{low:.3f} to {high:.3f}</small>" in shown
    named = [
        table
        for table in stored_scores([BENCHMARKS / "dna_copy_tiny"])
        if table.title.startswith("contigs, difference")
    ]
    assert named and all(table.places == ["zymoseptoria_chr01", "yeast_chr04"] for table in named)


def test_results_stored_before_a_setting_existed_stand_beside_others(tmp_path) -> None:
    """Of `parts`, whose first results know no features; results of other settings are refused."""
    (tmp_path / "parts").mkdir()
    folder = BENCHMARKS / "dna_copy_tiny" / "parts"
    stored = [json.loads((folder / f"dna_{method}_copy_tiny.genomes.json").read_text()) for method in ("goat", "rope")]
    for settings, refused in (({"genbank": None}, False), ({"genbank": "features.gb"}, True)):
        stored[0]["settings"].pop("genbank", None)
        stored[1]["settings"] |= settings
        for number, content in enumerate(stored):
            (tmp_path / "parts" / f"{number}.json").write_text(json.dumps(content))
        if refused:
            with pytest.raises(CommandError, match="measured otherwise"):
                stored_scores([tmp_path])
        else:
            stored_scores([tmp_path])


def test_a_difference_over_one_unit_has_no_interval() -> None:
    human = [
        table for table in stored_scores([BENCHMARKS / "dna_human_tiny"]) if table.title.startswith("bits, difference")
    ]
    cells = [cell for table in human for row in table.rows.values() for cell in row.values()]  # of one contig
    assert cells and all(ends == [None, None] for _, *ends in cells)
    Checked(gallery_page(human, measured=True))


@pytest.mark.parametrize("folder", ["missing", "."])
def test_a_folder_without_results_is_said_and_nothing_is_written(tmp_path, monkeypatch, capsys, folder) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--results", folder, "--out", "page.html"]) == 2
    assert "holds no results" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def script() -> quickjs.Context:
    context = quickjs.Context()
    context.eval((PAGE / "priors.js").read_text(encoding="utf-8"))
    return context


def js(context: quickjs.Context, expression: str, **names):
    """The value of an expression over `names`."""
    given = "".join(f"const {name} = {json.dumps(value)};" for name, value in names.items())
    return json.loads(context.eval(f"(() => {{ {given} return JSON.stringify({expression}); }})()"))


@torch.no_grad()
@pytest.mark.parametrize(
    ("alpha", "beta", "theta_mu"), [(0.0, 1.0, 0.0), (1.3, 0.4, -1.5), (-0.7, -1.2, 0.0), (0, -9, 0)]
)
def test_the_pages_ggd_is_the_zoos(script, alpha, beta, theta_mu) -> None:
    prior = Ggd(1, init={"alpha": alpha, "beta": beta}).double()
    prior.theta_mu.fill_(theta_mu)
    mu = float(2 * prior.theta_mu[0].sinh())
    expected = prior.curve(torch.arange(64.0, dtype=torch.float64), causal=True)[0]
    found = js(script, "[...Array(64).keys()].map(d => ggd(d, alpha, beta, mu))", alpha=alpha, beta=beta, mu=mu)
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_the_pages_series_is_the_zoos(script) -> None:
    torch.manual_seed(0)
    prior = Spectral(1, rank=3, base=100.0).double()
    prior.alpha.normal_()
    prior.beta.normal_()
    given = {"omega": prior.omega.tolist(), "alpha": prior.alpha[0].tolist(), "beta": prior.beta[0].tolist()}
    found = js(script, "[...Array(64).keys()].map(d => spectral(d, omega, alpha, beta))", **given)
    expected = prior.series(torch.arange(64))[0]
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_at_the_learned_prior_the_page_shows_the_models_own_attention(script) -> None:
    live = live_attention()
    model = create_model(LIVE).double()
    weights = [one.weights[0] for one in analyse(model, *model.read(SENTENCE).inputs, full=True)]
    assert len(live["heads"]) == sum(map(len, weights)) and len(live["tokens"]) <= 48
    for head in live["heads"]:
        expected = weights[head["layer"]][head["head"]]
        for i, row in enumerate(js(script, "attention(head)", head=head)):
            assert row == pytest.approx(expected[i, : i + 1].tolist(), abs=1e-6)
