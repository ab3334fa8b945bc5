"""Command lines that nobody should write end in one line, whatever is wrong with them: no trace, no hang, no crash.

Every option of every command (but lm-eval's, which the harness parses) with values that it hardly expects, drawn with a
seed; PRIORZOO_FUZZ=5000 draws so many.
"""

from __future__ import annotations

import io
import os
import random
import re
import signal
from contextlib import redirect_stdout

import pytest

from recipes import adapt, evaluate, generate, predict, train, verify
from tests.recipes.test_train import SMALL
from zoo.cli import app, call

LINES, SECONDS = int(os.environ.get("PRIORZOO_FUZZ", "180")), 30
QUICK = [*SMALL, "--set", "train.steps=1", "--set", "evaluate.every=0"]
TEXT, IMAGE, DNA = "text_ggd_tiny.facts", "vision_goat_ssmax_tiny_patch8.glyphs", "dna_goat_tiny.genomes"
COMMANDS = {
    "train": (train.main, QUICK),
    "plan": (train.main, [*SMALL, "--dry-run"]),
    "passkey": (evaluate.main, [TEXT, "passkey", "--lengths", "128", "--samples", "1"]),
    "resolution": (evaluate.main, [IMAGE, "resolution", "--sizes", "48", "--samples", "4"]),
    "bits": (evaluate.main, [DNA, "bits", "--lengths", "64", "--samples", "2"]),
    "generate": (generate.main, [TEXT, "The people", "--max-new-tokens", "2"]),
    "predict": (predict.main, [IMAGE, "nothing.png"]),
    "verify": (verify.main, ["."]),
    "adapt": (adapt.main, ["nothing", "--dry-run"]),
    "show": (lambda words: call(app, words, prog="zoo"), ["show", TEXT]),
    "plot-prior": (lambda words: call(app, words, prog="zoo"), ["plot-prior", TEXT, "--length", "64"]),
}
VALUES = [
    "", " ", "-1", "0", "1e30", "nan", "-inf", "3.5", "99999999999999999999", "ü", "[]", "{}", "null", "true", "a=b", "../..",
    "/dev/null", "/proc/self/mem", "no/such/file", "hf:nope", "newest:nope", "*", "%s", "1,2,x", "1,,2", ",", "a" * 250,
    "--help", "-", '{"a": [', "text.ggd_tiny", "cuda:7", "\ud800",
]  # fmt: skip
KEYS = [
    "model.name", "model.options", "model.options.dim", "model.options.num_heads", "model.options.num_layers",
    "model.init_from", "model.options.position", "model.options.position_options", "model.options.train_context",
    "data.source", "data.context", "data.tokenizer", "data.num_workers", "data.heldout_source", "data.cache_dir",
    "optim.name", "optim.lr", "optim.eps", "optim.betas", "train.steps", "train.batch", "train.seed",
    "train.precision", "train.zero_stage", "evaluate.during", "evaluate.every", "nothing", "", ".", "optim.",
]  # fmt: skip


def options(main) -> list[str]:
    with redirect_stdout(io.StringIO()) as out:
        main(["--help"])
    return sorted(set(re.findall(r"^\s+(--[\w-]+)", out.getvalue(), re.MULTILINE)) - {"--help", "--verbose"})


def draw(name: str, known: list[str], rng: random.Random) -> list[str]:
    """The words of a command, with one to three mistakes."""
    words = list(COMMANDS[name][1])
    for _ in range(rng.choice((1, 1, 2, 3))):
        what, value = rng.random(), rng.choice(VALUES)
        if what < 0.4 and "--set" in known:
            words += ["--set", f"{rng.choice(KEYS)}={value}"]
        elif what < 0.8 and known:
            words += [rng.choice(known), value]
        elif what < 0.9:
            words[rng.randrange(len(words))] = value
        else:
            words.insert(rng.randrange(len(words) + 1), value)
    return words


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_mistakes_end_in_one_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # names of models and data are not looked up
    main, rng, wrong = COMMANDS[name][0], random.Random(name), []
    known = options(main)
    for _ in range(max(1, LINES // len(COMMANDS))):
        words = draw(name, known, rng)
        capsys.readouterr()
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"{name} hangs for {SECONDS} s"))
        signal.alarm(SECONDS)
        try:
            code = main(words)
        except BaseException as error:
            code = repr(error)
        finally:
            signal.alarm(0)
        message = capsys.readouterr().err
        failed = name == "train" and code == 1 and message.startswith("training failed")
        one_line = "Traceback" not in message and message.count("error: ") <= 1 and (code == 2) == bool(message)
        if not failed and (code not in (0, 2) or not one_line):
            wrong.append(f"{[word[:40] for word in words]}: {code}, {message[-300:]!r}")
    assert not wrong, "\n".join(wrong)
