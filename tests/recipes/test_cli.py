"""The command `priorzoo`: one entry to the models, training and evaluation, and one way of
reporting errors."""

from __future__ import annotations

import io
import json
import sys

import pytest

import priorzoo
import zoo
from modalities.vision.sources import open_images
from recipes import train
from recipes.cli import COMMANDS, main
from tests.launching import ROOT, command

GLYPHS = "vision_goat_ssmax_tiny_patch8.glyphs"
SCENES = "vision_ggd2d_separable_ssmax_scene_patch8.scenes"


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("list", "show", "plot-prior", "attention", *COMMANDS))
    assert main(["fetch-data", "--help"]) == 0
    assert "Usage: priorzoo fetch-data" in capsys.readouterr().out
    assert main(["evaluate", "text_ggd_tiny", "passkey", "--help"]) == 0
    assert "--lengths" in capsys.readouterr().out
    assert main(["evaluate", "--list"]) == 0
    assert "--sizes" in capsys.readouterr().out
    assert main(["list", "text_ggd_*", "--pretrained"]) == 0
    printed = capsys.readouterr().out
    assert "text_ggd_goat_ssmax_tiny.facts" in printed.split()
    assert max(map(len, printed.splitlines())) <= 80
    assert {"trained", "256", "0.92M"} <= set(printed.split())
    assert main(["--version"]) == 0
    assert priorzoo.__version__ == zoo.__version__
    assert capsys.readouterr().out == f"priorzoo {zoo.__version__}\n"


@pytest.mark.slow
def test_commands_import_little():
    """Commands start without what they do not need."""
    script = """
import contextlib, gc, priorzoo.__main__, sys
from recipes import cli, find_recipe
assert gc.get_freeze_count() > 100_000, "every collection visits the imported modules"
for line in sys.argv[1:]:
    cli.main(line.split())
with contextlib.suppress(ValueError):
    find_recipe("vision.ggd_tini")
print("loaded", *sys.modules)
"""
    lines = ["--help", "evaluate --help", "adapt --help", "evaluate txt_ggd_tiny passkey"]
    lines += ["evaluate vision_gg map", "evaluate hf:./none recall", "adapt ./none --out x"]
    loaded = set(
        command([sys.executable, "-c", script, *lines], folder=ROOT)
        .rpartition("loaded ")[2]
        .split()
    )
    assert "torch" in loaded
    assert not {"timm", "transformers", "deepspeed", "matplotlib.pyplot"} & loaded


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["trian"], ["'trian'", "'train'"]),
        (["list", "txt_*"], ["'txt_*'"]),
        (["show", "text_ggd_tinny"], ["'text_ggd_tinny'", "text_ggd_tiny"]),
        (["evaluate", "text_ggd_tiny", "passkey", "--lenghts", "96"], ["--lenghts", "--lengths"]),
        (["evaluate"], ["EVAL"]),
        (["generate", "text_ggd_tiny", "a"], ["untrained", "text_ggd_tiny.facts"]),
        (["generate", GLYPHS, "a"], ["vision_goat", "text and dna"]),
        (["generate", "dna_goat_tiny.genomes", "PROTEIN"], ["letter 0", "'P'"]),
        (["generate", "text_ggd_tiny.facts", "a", "--top-p", "2"], ["top_p", "2.0"]),
        (["predict", "text_ggd_tiny.facts", __file__], ["names no classes: it is a model of text"]),
        (["predict", GLYPHS, "none.png"], ["none.png"]),
        (
            ["plot-prior", "text_ggd_tiny", "--out", f"{__file__}/x.png"],
            [__file__, "a file is where a folder is"],
        ),
        (["lm-eval", "--model", "priorzoo"], ["lm_eval", "pip install 'priorzoo[lm-eval]'"]),
    ],
)
def test_refusal_is_one_line(words, named, capsys, monkeypatch):
    """What cannot be done is one line."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as where it is not installed
    assert main(words) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: "), message
    assert all(word in message for word in named), message


def test_generate_writes_the_stream(capsys, monkeypatch, tmp_path):
    """Generate writes what the model streams."""
    words = ["text_ggd_tiny.facts", "--max-new-tokens", "12"]
    model = zoo.create_model(words[0])
    expected = (
        "".join(model.stream_text("The é", max_new_tokens=12, temperature=0.8, top_p=0.95, seed=0))
        + "\n"
    )
    assert main(["generate", *words, "The é"]) == 0
    assert capsys.readouterr().out == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("The é\n".encode())))
    model.save_pretrained(tmp_path / "saved")
    assert main(["generate", str(tmp_path / "saved"), "-", *words[1:]]) == 0
    assert capsys.readouterr().out == expected

    def interrupted(*_, **__):
        yield "The"
        raise KeyboardInterrupt

    monkeypatch.setattr(type(model), "stream_text", interrupted)
    assert main(["generate", *words]) == 130
    assert capsys.readouterr().out == "The\n"


def test_predict_prints_names_and_probabilities(tmp_path, capsys):
    files = [str(tmp_path / f"{name}.png") for name in "AB"]
    images = open_images("glyphs-builtin", "heldout", size=64)
    for label, file in enumerate(files):
        images.read(label)[0].save(file)
    assert main(["predict", GLYPHS, *files, "--top", "2", "--size", "72"]) == 0
    printed = capsys.readouterr().out
    model = zoo.create_model(GLYPHS).eval()
    for file in files:
        classes = model.classify(file, size=72)
        shares = model(model.read(file, size=72))[0].softmax(-1)
        assert sum(share for _, share in classes) == pytest.approx(1)
        assert len(classes) == 26
        assert all(f"{share:.4f}" in printed for _, share in classes[:2])
        assert classes[0][0] == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[int(shares.argmax())]
    assert (
        main(["predict", SCENES, files[0], "--size", "96"]) == 0
    )  # 27 classes, the first of them the background
    assert zoo.create_model(SCENES).class_names == ("background", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    for name in zoo.list_models("vision_*", pretrained=True):
        model = zoo.create_model(name)
        assert len(model.class_names) in (0, model.num_classes), name
    assert main(["predict", GLYPHS, files[0], "--size", "50", "--verbose"]) == 2
    assert (
        "nearest sizes are 48 and 56" in capsys.readouterr().err.split("\nerror: ")[1]
    )  # behind its trace


def test_recipes_listed_and_planned(capsys):
    """Recipes are listed by family and planned as json."""
    assert train.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert "text.<method>_tiny: 0.9M parameters, context 256" in printed
    assert "ggd_ssmax" in printed
    assert len(printed.splitlines()) < 200
    assert train.main(["text.ggd_tiny", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["recipe"]["train"]["steps"] == 4500
    assert plan["deepspeed"]["train_batch_size"] == 8
