"""What the demo says about measured files."""

from __future__ import annotations

from modalities.evaluation import ModelResult
from tools import demo
from zoo import list_models


def result(label: str, method: str, **ends: tuple[float, float]) -> ModelResult:
    rows = [{"length": n} | {name: end[k] for name, end in ends.items()} for k, n in enumerate((256, 4096))]
    return ModelResult(label, 256, rows, method=method)


def test_the_demo_says_what_was_measured() -> None:
    mine = result(f"{demo.RECIPE} (demo)", "ggd_goat", bits_per_byte=(2.512, 2.488))
    shares = {"ggd_ssmax": 0.95, "rope_ssmax": 0.0, "alibi": 0.25}
    shipped = [
        result(name, method, free_generation=(1.0, shares[method]))
        for name, method in zip(demo.SHIPPED, shares, strict=True)
    ]
    other = result(demo.SHIPPED[0], "ggd_ssmax", bits_per_byte=(9.0, 9.0))
    own, theirs, _ = demo.summary([other, mine], shipped).splitlines()
    assert "ggd_goat" in own and "2.51 bits per byte in windows of 256" in own and "2.49 in windows of 4,096" in own
    assert "4,096 tokens" in theirs and "ggd_ssmax 95%, rope_ssmax 0%, alibi 25%" in theirs
    assert set(demo.SHIPPED) <= set(list_models(pretrained=True))
