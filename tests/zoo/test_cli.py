"""priorzoo list, show, doctor, and what `zoo.cli` imports."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import pytest
import typer

from tests import launching
from zoo import create_model
from zoo.cli import app
from zoo.console import OnceCommand, call, new_app


def invoke(*arguments: object, app: typer.Typer = app) -> launching.Done:
    """Run a command as the console does, which says on one line what cannot be carried out."""
    return launching.call(partial(call, app, prog="priorzoo"), *arguments)


def test_list_takes_a_pattern() -> None:
    done = invoke("list", "text_kerple*_tiny")
    assert done.exit_code == 0
    assert done.output.split() == [
        "text_kerple_ssmax_tiny",
        "text_kerple_tiny",
    ]
    done = invoke("list", "nothing*", "--verbose")
    assert done.exit_code == 2
    assert "Traceback" in done.stderr


@pytest.mark.slow
def test_closed_pipe_is_141() -> None:
    """A reader that goes away is 141."""
    words = [sys.executable, "-m", "priorzoo", "show", "text_alibi_tiny"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


def test_names_are_printed_literally(tmp_path: Path) -> None:
    """Names are printed as they are."""
    folder = tmp_path / "a[red]:dna:\x1b]0;t\x07"
    create_model(
        "text_alibi_tiny", num_layers=1, tokenizer="[/b]:dna:\x1b[31m.json"
    ).save_pretrained(folder)
    shown = invoke("show", folder)
    assert shown.exit_code == 0
    assert "\x1b" not in shown.output
    assert r"a[red]:dna:\x1b]0;t\x07" in shown.output
    assert r"[/b]:dna:\x1b[31m.json" in shown.output


def test_show_prints_parameters() -> None:
    """Show prints parameters of any size and the card."""
    done = invoke("show", "text_ggd_ssmax_tiny.facts")
    total = sum(p.numel() for p in create_model("text_ggd_ssmax_tiny").parameters())
    assert done.exit_code == 0
    assert f"{total:,} parameters" in done.output
    assert "32 of 32" in done.output
    assert "train_context" in done.output
    assert "bits_per_byte" in done.output
    assert "State of the Union" in done.output
    assert (
        "1,1" in invoke("show", "text_ggd_ssmax_1100m").output
    )  # built on the meta device: no memory
    images = invoke("show", "vision_goat_small_patch16").output
    assert "patch_embed" in images
    assert "other" not in images
    assert "none ship" in images


@pytest.mark.slow
def test_text_needs_no_vision_package() -> None:
    """Without timm, text models are made and listed, and what vision lacks is said."""
    code = """
import sys
sys.modules["timm"] = None
import zoo
assert zoo.create_model("text_ggd_tiny").config.dim == 128 and zoo.list_models("text_*")
assert "vision_goat_tiny_patch8" in zoo.list_models() and len(zoo.list_models("*glyphs*", pretrained=True)) > 3
try:
    zoo.create_model("vision_goat_tiny_patch8")
except ImportError as error:
    print(error)
"""
    assert "pip install 'priorzoo[vision]'" in launching.command([sys.executable, "-c", code])


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["timm", "from transformers import LlamaConfig, ViTModel", "peft"]
)
def test_libraries_are_imported_after_zoo(first: str) -> None:
    line = first if first.startswith("from") else f"import {first}"
    launching.command([sys.executable, "-c", f"import zoo\n{line}"])


def test_option_given_twice_is_refused(capsys):
    """Of two values click would take the last."""
    words = ["text_ggd_tiny", "--seed", "1", "--seed", "2"]
    assert call(app_with_seed(), words, prog="priorzoo") == 2
    assert "Invalid value for '--seed': given twice" in capsys.readouterr().err


def test_repeatable_option_takes_all(capsys):
    words = ["text_ggd_tiny", "--set", "a=1", "--set", "b=2", "--flag", "--flag"]
    assert call(app_with_seed(), words, prog="priorzoo") == 0
    assert capsys.readouterr().out.split() == ["a=1", "b=2"]


def app_with_seed() -> typer.Typer:
    app = new_app()

    @app.command(cls=OnceCommand)
    def command(
        name: str,
        seed: int = 0,
        set_: Annotated[list[str], typer.Option("--set")] = [],  # noqa: B006
        flag: Annotated[bool, typer.Option("--flag")] = False,
    ) -> None:
        print(*set_)

    return app
