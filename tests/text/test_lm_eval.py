"""Models in lm-evaluation-harness: tasks of local files against direct computation; batches,
contexts, windows, arguments."""

from __future__ import annotations

import json
import math
from functools import partialmethod
from pathlib import Path

import pytest
import torch

from modalities.text import CausalLM
from modalities.text.tokenizers import load_tokenizer
from modalities.tokenizers.outside import open_tokenizer
from zoo import create_model

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from modalities.text.lm_eval import PriorzooLM  # noqa: E402
from recipes.cli import main  # noqa: E402
from tests.text.outside_models import llama_of  # noqa: E402
from zoo.adapters import load_adapted, save_adapted  # noqa: E402
from zoo.adapters.released import open_released  # noqa: E402

NAME = "text_ggd_ssmax_tiny.facts"
QUESTIONS = [
    {"text": "The people of the United", "choices": [" States", " Nations", " a"], "answer": 0},
    {"text": "Congress shall ", "choices": ["act now", "wait"], "answer": 1},
    # Longer than the model was trained at.
    {"text": "It is é. " * 20 + "It", "choices": [" is é.", " was"], "answer": 0},
]
WORDS = {"doc_to_text": "{{text}}"}
MEAN = {"aggregation": "mean", "higher_is_better": True}
UNTIL = {"until": ["e"], "max_gen_toks": 12, "do_sample": False}
CHOICE = {
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc", **MEAN}],
}
WRITTEN = {"doc_to_target": "{{choices[0]}}", "metric_list": [{"metric": "exact_match", **MEAN}]}
ROLLING = {
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}
TASKS = {
    "choice": {"output_type": "multiple_choice"} | WORDS | CHOICE,
    "written": {"output_type": "generate_until", "generation_kwargs": UNTIL} | WORDS | WRITTEN,
    "rolling": {"output_type": "loglikelihood_rolling"} | ROLLING,
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """A folder of tasks that read the questions from a file."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "questions.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in QUESTIONS)
    )
    files = {
        "data_files": {"test": str(folder / "questions.jsonl")},
        "cache_dir": str(folder / "cache"),
    }
    for name, task in TASKS.items():
        head = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps(head | task))  # which is YAML
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory) -> str:
    """The folder of a model of bytes with random weights: its tokens can be counted by hand."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bytes")
    create_model(
        "text_ggd_ssmax_tiny", num_layers=2, tokenizer="bytes", vocab_size=264
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(by_bytes: str) -> CausalLM:
    return CausalLM.from_pretrained(by_bytes).eval()


def asked(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, args, n) for n, args in enumerate(arguments)]


@torch.no_grad()
def direct(model: CausalLM, ids: list[int], count: int) -> tuple[float, bool]:
    """Log-probability of the last `count` ids after the ones before, and whether they are the
    likeliest, by one forward."""
    logits = model(torch.tensor([ids[:-1]]))[0, -count:].double()
    targets = torch.tensor(ids[-count:])
    return logits.log_softmax(-1).gather(-1, targets[:, None]).sum().item(), torch.equal(
        logits.argmax(-1), targets
    )


@pytest.mark.slow
def test_harness_equals_direct_computation(tasks, model, by_bytes) -> None:
    """Tasks of the harness equal direct computation."""
    found = lm_eval.simple_evaluate(
        model="priorzoo",
        model_args={"pretrained": by_bytes},
        batch_size=2,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    encode = load_tokenizer("bytes").encode
    right = []
    nats = []
    samples = {
        name: sorted(rows, key=lambda row: row["doc_id"]) for name, rows in found["samples"].items()
    }
    for question, choice, written, rolling in zip(
        QUESTIONS, *(samples[name] for name in TASKS), strict=True
    ):
        scores = []
        for text, (answered,) in zip(question["choices"], choice["resps"], strict=True):
            # `target_delimiter`, a space, comes before a choice.
            ids = [256, *encode(question["text"] + " " + text).tolist()]
            scores.append(direct(model, ids, len(ids) - 1 - len(encode(question["text"].rstrip()))))
            assert answered[0] == pytest.approx(scores[-1][0], abs=1e-4)
            assert answered[1] == scores[-1][1]
        right.append(max(range(len(scores)), key=lambda n: scores[n][0]) == question["answer"])
        prompt = [256, *encode(question["text"]).tolist()]
        [ids] = model.generate([prompt], max_new_tokens=12)
        assert written["resps"] == [[load_tokenizer("bytes").decode(ids).partition("e")[0]]]
        nats.append(direct(model, prompt, len(prompt) - 1)[0])
        assert rolling["resps"][0][0] == pytest.approx(nats[-1], abs=1e-4)
    assert found["results"]["choice"]["acc,none"] == sum(right) / len(right)
    size = sum(len(question["text"].encode()) for question in QUESTIONS)
    assert found["results"]["rolling"]["bits_per_byte,none"] == pytest.approx(
        -sum(nats) / size / math.log(2), abs=1e-5
    )


def test_max_length_cuts_left(model, by_bytes) -> None:
    """Max length cuts from the left."""
    harness = PriorzooLM(by_bytes, batch_size=2, max_length=20)
    encode = load_tokenizer("bytes").encode
    pairs = [("The people of the United", " States"), ("The", " people")]
    scores = harness.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    for pair, (log_prob, _) in zip(pairs, scores, strict=True):
        ids = [256, *encode("".join(pair)).tolist()]
        assert log_prob == pytest.approx(direct(model, ids[-21:], len(pair[1]))[0], abs=1e-4)
    [text] = harness.generate_until(
        asked("generate_until", (pairs[0][0], {"max_gen_toks": 8})), disable_tqdm=True
    )
    ids = encode(pairs[0][0]).tolist()[-12:]
    assert text == load_tokenizer("bytes").decode(
        model.generate([ids], max_new_tokens=8, eos_id=257)[0]
    )
    [rolling] = harness.loglikelihood_rolling(
        asked("loglikelihood_rolling", (pairs[0][0],)), disable_tqdm=True
    )
    ids = [256, *encode(pairs[0][0]).tolist()]  # 24 tokens: 20, and 4 after the 17 before them
    assert rolling == pytest.approx(
        direct(model, ids[:21], 20)[0] + direct(model, ids[4:25], 4)[0], abs=1e-4
    )


def test_unserved_is_named(tmp_path) -> None:
    """What is not served is named."""
    create_model("dna_ggd_tiny", num_layers=1).save_pretrained(tmp_path)
    for options, message in (
        ({"max_lenght": 9}, "did you mean 'max_length'"),
        ({"dtype": "bfloat"}, "did you mean 'bfloat16'"),
        ({"pretrained": "text_ggd_ssmax_tiny"}, NAME),
        ({"pretrained": "runs/none"}, "'runs/none'"),
        ({"pretrained": str(tmp_path)}, "a model of dna"),
    ):
        with pytest.raises(ValueError, match=message):
            PriorzooLM(**{"pretrained": NAME} | options)


@pytest.fixture
def command(tasks, monkeypatch) -> list[str]:
    # The harness' own tasks, thousands of files, would be read first.
    monkeypatch.setattr(
        TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False)
    )
    return [
        "lm-eval",
        "--model",
        "priorzoo",
        "--tasks",
        "choice",
        "--include_path",
        str(tasks),
        "--model_args",
    ]


@pytest.mark.slow
def test_command_is_the_harness(command, capsys) -> None:
    """The command is the harness own."""
    assert main([*command, f"pretrained={NAME},batch_size=3", "--limit", "2"]) == 0
    printed = capsys.readouterr().out
    assert "|choice|" in printed
    assert "'batch_size': 3" in printed
    assert main([*command, f"pretrained={NAME},max_lenght=3"]) == 2
    assert "did you mean 'max_length'" in capsys.readouterr().err


def test_adapter_by_command(command, tmp_path: Path) -> None:
    """An adapter of a released model by the command."""
    base = llama_of(create_model("text_rope_tiny.facts"), tmp_path / "base")
    save_adapted(open_released(base, {"soft": "12", "sinks": "2"}), tmp_path / "adapter")
    assert (
        main(
            [
                *command,
                f"pretrained=hf:{tmp_path}/adapter",
                "--log_samples",
                "--output_path",
                str(tmp_path),
            ]
        )
        == 0
    )
    [file] = tmp_path.glob("*/samples_choice_*.jsonl")
    samples = sorted(
        map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"]
    )
    adapted = load_adapted(tmp_path / "adapter")
    encode = open_tokenizer(base).encode
    for question, sample in zip(QUESTIONS, samples, strict=True):
        for text, [(found, _)] in zip(question["choices"], sample["resps"], strict=True):
            ids = encode(question["text"] + " " + text)
            count = len(ids) - len(encode(question["text"].rstrip()))
            expected, _ = direct(lambda tokens: adapted(tokens).logits, ids, count)
            assert float(found) == pytest.approx(expected, abs=1e-4)
