"""The papers' equations and theorems: each is held by tests, which `reproduce.py` runs."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tools.papers import ITEMS, ROOT, Item, Row, Verdict


def tested(key: str, title: str, *, published: str, tests: str) -> None:
    """An item that holds where the tests chosen by words of pytest pass: files, node ids and -k EXPRESSION."""
    command = f"python -m pytest {tests}"

    def run(out: Path) -> list[Row]:
        report = out / "report.xml"
        words = [word.replace("·", " ") for word in tests.split()]
        subprocess.run([sys.executable, "-m", "pytest", "-q", *words, f"--junitxml={report}"], cwd=ROOT)
        suite = next(ElementTree.parse(report).iter("testsuite"))
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        return [{"command": command.replace("·", " "), **counts}]

    run.__doc__ = f"`{command.replace('·', ' ')}`"
    ITEMS[key] = Item(key, title, published, (command.replace("·", " "),), run, _passed, exact=True)


def _passed(rows: list[Row]) -> Verdict:
    row = rows[0]
    good = row["tests"] - row["failures"] - row["errors"] - row["skipped"]
    return good > 0 and not row["failures"] and not row[
        "errors"
    ], f"{good} of {row['tests'] - row['skipped']} tests pass"


PRIORS, ANALYSIS = "tests/zoo/test_priors.py", "tests/zoo/test_analysis.py"
for _key, _title, _published, _tests in (
    (
        "goat.equation3",
        "attention minimises cost plus τ·KL(p‖π), and any π is a prior (eq. 2–10)",
        "p = softmax(s/τ + log π); entropy is the divergence to a uniform π",
        f"{ANALYSIS} tests/zoo/test_given.py -k minimises·or·matrix·or·table",
    ),
    (
        "goat.equation12",
        "spectral lanes, the key's lane and their sum in one call (eq. 11–24, shift equivariance)",
        "K = Σ α cos ω(i−j) + β sin ω(i−j) + u(j) as columns of q and k",
        f"{PRIORS} tests/zoo/test_lanes.py -k goat·or·spectral·or·key_bias",
    ),
    (
        "goat.released",
        "gate and scale of the prior, inits, ranks, base of the frequencies, the released module",
        "set_prior_gate, set_goat_prior_scale, pos_base, abs_base",
        "tests/zoo/test_layers.py tests/text/test_released.py -k gate·or·scale·or·goat",
    ),
    (
        "goat.theorem3",
        "of all recencies of one mean lag the exponential has most entropy (th. 3, app. F)",
        "λ = ln(1 + 1/μ) for a mean lag μ",
        f"{PRIORS} -k lag·or·entropy",
    ),
    (
        "bam.theorem1",
        "priors as densities and their limits (def. 1–2, lemmas 1–4, th. 1–4)",
        "GGD is NoPE at θβ = 0 and ALiBi at θβ = 1; below 0 it looks away",
        f"{PRIORS} -k ggd",
    ),
    (
        "bam.appendixG",
        "Z, the factors of attention, and the mutual information ln Z",
        "p = Z · softmax(s) · softmax(K)",
        f"{ANALYSIS} -k definitions",
    ),
    (
        "bam.baselines",
        "the ten methods of the released code, and those that CABLE and GOAT stand beside",
        "ALiBi-SSMax adds its bias outside the scale, RoPE has θ = 500,000, …",
        "tests/text/test_published.py",
    ),
    (
        "bam.released",
        "one prior for all layers, a rate for each of θα, θβ, θμ, the released checkpoints",
        "--global_prior, --shape_lr, --scale_lr, --loc_lr",
        "tests/zoo/test_layers.py tests/recipes/test_recipes.py tests/text/test_released.py "
        "-k one_prior·or·rates_of_their_own·or·bam",
    ),
    (
        "cable.equation2",
        "CABLE as printed, as released, and forgetting attention; lanes and dense form (eq. 2–7)",
        "K = −w_i (S_i − S_j)",
        f"{PRIORS} tests/zoo/test_lanes.py -k cable",
    ),
):
    tested(_key, _title, published=_published, tests=_tests)
