"""The loop on a very small model: ranks, ZeRO stages, resume, failure, signals, launchers, the run
folder."""

import json
import math
import os
import shutil
import signal
import sys
import traceback
from dataclasses import replace
from resource import RUSAGE_SELF, getrusage

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from modalities.text import MODALITY, CausalLM
from recipes.registry import find_recipe
from recipes.run_folder import RunFolder, load_run, newest_model
from recipes.train import Trainer, main, with_worker
from tests.launching import ROOT, command, deepspeed_launcher
from tests.ranks import Ranks
from zoo import pretrained
from zoo.files import file_sha256

SETTINGS = (
    *(
        "model.options.num_layers=1",
        "model.options.dim=16",
        "model.options.num_heads=2",
        "model.options.hidden_dim=32",
    ),
    *("data.context=32", "data.tokenizer=bytes", "data.facts_fraction=0", "data.copies_fraction=0"),
    *(
        "train.batch=8",
        "train.steps=4",
        "train.save_every=2",
        "train.log_every=1",
        "evaluate.every=2",
    ),
    # At its start a prior's gradient is rounding alone: Adam would make it a step, and a multiple
    # of the rate a difference.
    *(
        "optim.prior_lr_scale=1",
        "optim.name=adamw",
        "optim.warmup=1",
        "optim.lr=0.01",
        "evaluate.samples=16",
    ),
)
SMALL = ["text.ggd_ssmax_tiny", *(word for setting in SETTINGS for word in ("--set", setting))]


def run(folder, *settings, resume=None, words=SMALL):
    """Train in this process; returns the exit code."""
    arguments = [*words, "--run-dir", str(folder), *(["--resume", resume] if resume else [])]
    return main(arguments + [part for setting in settings for part in ("--set", setting)])


@pytest.fixture
def changed(monkeypatch):
    """Train with a text modality in which some parts are others."""

    def change(**parts):
        monkeypatch.setattr("recipes.train.find_modality", lambda name: replace(MODALITY, **parts))

    return change


def curve(folder):
    """(training losses, held-out losses, gradient norms)"""
    records = RunFolder(folder).metrics()
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4]
    return tuple(
        [r[name] for r in records if name in r] for name in ("loss", "heldout_loss", "grad_norm")
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert run(folder) == 0
    return folder


def same(a, b):
    for ours, theirs in zip(curve(a), curve(b), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)


@pytest.mark.slow
def test_a_run_folder_is_complete(whole):
    assert json.loads((whole / "recipe.json").read_text())["train"]["micro_batch"] == 8
    assert json.loads((whole / "deepspeed.json").read_text())["train_batch_size"] == 8
    assert json.loads((whole / "environment.json").read_text())["versions"]["torch"]
    assert (whole / "plots" / "loss.png").stat().st_size > 1000
    model, config = load_run(whole)
    assert config["name"] == "text.ggd_ssmax_tiny"
    assert model.config.dim == 16
    assert (whole / "checkpoints" / "latest").read_text() == "step_00000004"
    assert not list(whole.rglob("*.partial"))
    losses, held_out, norms = curve(whole)
    assert losses[-1] < losses[0]
    assert len(held_out) == 2
    assert all(n > 0 for n in norms)


def test_fp16_skips_overflow(whole, tmp_path):
    """The dynamic loss scale starts too high: such steps have a norm of 0 and leave the weights,
    later ones train."""
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed says that this machine has no float16")
    file = tmp_path / "fp16.json"
    file.write_text(
        json.dumps({"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}})
    )
    words = [
        *SMALL,
        "--set",
        "train.steps=8",
        "--run-dir",
        str(tmp_path / "run"),
        "--deepspeed_config",
        str(file),
    ]
    assert main(words) == 0
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000008")
    assert main([*words, "--resume", "auto"]) == 0  # the loss scale's class is one that may be read
    steps = [record for record in RunFolder(tmp_path / "run").metrics() if "loss" in record]
    assert steps[0]["loss"] == pytest.approx(curve(whole)[0][0], abs=0.05)
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert steps[0]["grad_norm"] == 0
    assert steps[-1]["grad_norm"] > 0
    state = load_file(tmp_path / "run/model/model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "run"), (signal.SIGHUP, "lr[1e-3] [bold]a*b?[/x]")]
)
def test_resume_after_signal_is_exact(number, name, whole, tmp_path, changed, capsys):
    """A signal saves and resume is exact."""
    calls = []

    def interrupted(model, batch):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return MODALITY.loss(model, batch)

    folder = tmp_path / name.replace("/", "")
    changed(loss=interrupted)
    before = signal.signal(number, signal.SIG_DFL)  # `nohup make test` has SIGHUP ignored
    code = run(folder, "evaluate.every=0", "train.save_every=0")
    signal.signal(number, before)
    assert code == 128 + number
    printed = " ".join(capsys.readouterr().out.split())
    assert "--set train.save_every=0 --run-dir" in printed
    assert "--resume auto" in printed
    changed()
    assert [path.name for path in RunFolder(folder).checkpoints()] == ["step_00000003"]
    assert run(folder, "evaluate.every=0", resume="auto") == 0
    assert curve(folder)[::2] == curve(whole)[::2]


class Reads(TorchDispatchMode):
    """Notes where the host reads a tensor: the innermost function of recipes/ that asks."""

    READS = frozenset(
        {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default"}
    )
    # On the host, before the batch is copied; and what is asked on the CPU alone.
    ALLOWED = frozenset({"batch_weight", "to_device", "__iter__", "bad_keys"})

    def __init__(self):
        super().__init__()
        self.places = []

    def note(self):
        frames = traceback.extract_stack()
        if not self.ALLOWED & {frame.name for frame in frames}:
            self.places.append(
                [f.name for f in frames if f.filename.startswith(str(ROOT / "recipes"))][-1]
            )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function) in self.READS:
            self.note()
        return function(*args, **kwargs or {})


def test_spare_core_makes_batches():
    """One process makes batches where a core is free for it."""
    data = find_recipe("text.goat_tiny").data
    cases = {(0, "cuda", 2): 1, (0, "cuda", 1): 0, (3, "cuda", 8): 3, (0, "cpu", 64): 0}
    for (count, *machine), workers in cases.items():
        assert with_worker(replace(data, num_workers=count), *machine).num_workers == workers
    assert with_worker(data.context, "cuda", 2) == data.context  # no num_workers
    loaders = [MODALITY.loader(replace(data, num_workers=count), micro_batch=2) for count in (0, 1)]
    for _, one, other in zip(range(3), *loaders, strict=False):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_step_does_not_synchronise(tmp_path, monkeypatch):
    """`finish` alone reads: of steps 1 and 2 after 2 and 3 are queued, and of the last two at the
    end."""
    events = []
    launch = Trainer.launch
    finish = Trainer.finish
    tolist = torch.Tensor.tolist

    def launched(trainer):
        with reads:
            step = launch(trainer)
        events.append(f"launch {step.number}")
        return step

    def listed(tensor):  # on the CPU no dispatcher sees it
        reads.note()
        return tolist(tensor)

    def finished(trainer, step):
        events.append(f"finish {step.number}")
        return finish(trainer, step)

    reads = Reads()
    monkeypatch.setattr(Trainer, "launch", launched)
    monkeypatch.setattr(Trainer, "finish", finished)
    monkeypatch.setattr(torch.Tensor, "tolist", listed)
    assert run(tmp_path / "run", "train.save_every=0", "evaluate.every=0") == 0
    assert events == [
        *(
            "launch 1",
            "launch 2",
            "finish 1",
            "launch 3",
            "finish 2",
            "launch 4",
            "finish 3",
            "finish 4",
        )
    ]
    assert set(reads.places) == {"read"}


@pytest.mark.slow
def test_infinite_gradient_stops(tmp_path, changed, capsys):
    """A gradient that is not finite stops the run."""
    calls = []

    def broken(gradient):
        calls.append(1)
        return gradient * float("nan") if len(calls) == 3 else gradient

    def build(*arguments):
        model = MODALITY.build(*arguments)
        model.norm.register_full_backward_hook(
            lambda module, ours, theirs: tuple(broken(g) for g in ours)
        )
        return model

    changed(build=build)
    assert (
        run(tmp_path / "run", "train.zero_stage=1", "train.precision=bf16", "evaluate.every=0") == 1
    )
    message = capsys.readouterr().err
    assert "gradient" in message
    assert "at step 3" in message
    assert "step_00000002" in message
    assert [path.name for path in RunFolder(tmp_path / "run").checkpoints()] == ["step_00000002"]


def test_closed_pipe_ends_nothing(tmp_path, monkeypatch):
    """Of a pipe, as `| head -1`; a closed terminal is a SIGHUP and then the same."""
    for name in ("stdout", "stderr"):
        read, write = os.pipe()
        os.close(read)
        monkeypatch.setattr(sys, name, os.fdopen(write, "w"))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` leaves it
    try:
        assert run(tmp_path / "run", "evaluate.every=0") == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(curve(tmp_path / "run")[0]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("link", [True, False])
def test_final_weights_follow_link(link, tmp_path, capsys):
    """Final weights replace what a link names and nothing else."""
    folder = tmp_path / "run"
    other = tmp_path / "disk" / "weights"
    folder.mkdir()
    other.mkdir(parents=True)  # an empty folder
    if link:
        (folder / "model").symlink_to(other)
    else:
        (folder / "model").write_text("precious")
    for _ in range(2):
        assert run(folder, "evaluate.every=0", "train.steps=1", resume="auto") == (0 if link else 2)
    if link:
        assert load_file(other / "model.safetensors")
        assert os.listdir(other.parent) == ["weights"]
    else:
        assert f"{folder / 'model'} is no saved model" in capsys.readouterr().err
        assert sorted(os.listdir(folder)) == ["model", "run.lock"]
        assert (folder / "model").read_text() == "precious"


def test_records_are_json(tmp_path):
    folder = RunFolder(tmp_path / "x_{$")
    folder.path.mkdir()
    folder.log({"step": 1, "loss": 2.0, "heldout_loss": float("nan")})
    folder.log({"step": 2, "loss": 1.0, "norms": [float("inf")]})
    lines = [
        json.loads(line, parse_constant=pytest.fail)
        for line in folder.metrics_path.read_text().splitlines()
    ]
    assert lines == [
        {"step": 1, "loss": 2.0, "heldout_loss": None},
        {"step": 2, "loss": 1.0, "norms": [None]},
    ]
    assert folder.plot() == folder.path / "plots" / "loss.png"


@pytest.mark.parametrize(
    "ranks", [{"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}]
)
def test_half_a_launch_is_named(ranks, tmp_path, monkeypatch, capsys):
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert run(tmp_path / "run") == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, message
    assert "RANK=" in message, message
    assert "WORLD_SIZE=" in message, message
    assert not list(tmp_path.iterdir())


def test_removed_weights_fall_back(whole, tmp_path):
    """Weights that are removed while they are read are read from the newer checkpoint."""
    folder = tmp_path / "run"
    paths = []
    shutil.copytree(whole, folder)

    def read(path):
        paths.append(path.parent.name)
        if path.parent.name == "step_00000004":
            os.rename(path.parent, path.parent.with_name("step_00000006"))
            raise FileNotFoundError(path)
        raise ValueError("not removed, and wrong")

    with pytest.raises(ValueError, match="not removed"):
        newest_model(folder, read)
    assert paths == ["step_00000004", "step_00000006"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        (["train.zero_stage=2", "train.accumulation=4"], 2e-5),
        (["train.precision=bf16", "train.zero_stage=3", "optim.name=radam"], None),
        (["optim.name=muon", "train.zero_stage=1", "train.precision=bf16"], None),
    ],
)
def test_every_stage_resumes_exactly(settings, tolerance, whole, tmp_path):
    """Every stage and precision resumes to the bit."""
    folder = tmp_path / "run"
    assert run(folder, *settings) == 0
    losses, _, norms = curve(folder)
    if tolerance:
        assert losses == pytest.approx(curve(whole)[0], abs=tolerance)
    # From stage 1 on DeepSpeed's norm is of Muon's updates: it is not recorded as the gradients'.
    assert bool(norms) != ("optim.name=muon" in settings and "train.zero_stage=1" in settings)
    matrices = [t for t in load_file(folder / "model/model.safetensors").values() if t.ndim == 2]
    assert {tensor.dtype for tensor in matrices} == {
        torch.float32
    }  # the optimiser's, and not what bf16 computes with
    assert not any(torch.equal(m, m.bfloat16().float()) for m in matrices)
    shutil.rmtree(folder / "checkpoints/step_00000004")
    assert run(folder, *settings, resume="auto") == 0
    assert curve(folder)[0] == losses


def test_unresumable_run_is_named(whole, capsys):
    """What cannot be resumed is named."""
    for part, settings, resume, words in (
        ("", [], None, ["--resume auto"]),
        ("..", [], "auto", [f"such as {whole}", "--run-dir"]),
        ("", ["model.options.dim=32"], "auto", ["model.options", "16", "32", "--run-dir"]),
        (
            "",
            ["train.zero_stage=1"],
            "auto",
            ["train.precision=fp32", "zero_stage=0", "model.init_from="],
        ),
    ):
        assert run(whole / part, *settings, resume=resume) == 2
        message = capsys.readouterr().err
        assert all(word in message for word in words), message
        assert "Traceback" not in message, message


@pytest.mark.slow
def test_longer_run_has_new_rates(whole, tmp_path):
    """A run of more steps continues at its new rates."""
    folder = tmp_path / "run"
    assert run(folder, "train.steps=2") == 0
    assert run(folder, resume="auto") == 0
    rates, others = (
        {r["step"]: r["lr"] for r in RunFolder(path).metrics() if "lr" in r}
        for path in (folder, whole)
    )
    assert (rates[3], rates[4]) == (others[3], others[4])
    before = [(folder / name).read_text() for name in ("metrics.jsonl", "recipe.json")]
    assert run(folder, "optim.lr=0.1", resume="auto") == 0  # nothing is left to train
    assert [(folder / name).read_text() for name in ("metrics.jsonl", "recipe.json")] == before


def test_calibration_leaves_nothing(tmp_path, monkeypatch, capsys):
    """A calibration trains and leaves nothing."""
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--calibrate", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the median of 2" in printed
    assert "GiB at the peak" in printed
    assert "without evaluation" in printed
    pages = [
        ([torch.ones(2 << 20) for _ in range(8)], getrusage(RUSAGE_SELF).ru_minflt)[1]
        for _ in range(3)
    ]
    assert pages[2] - pages[1] < 100  # of 16,384: freed tensors are kept
    assert main([*SMALL, "--calibrate", "2", "--set", "optim.lr=1e38"]) == 1
    assert "training failed: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------
# launches


@pytest.mark.slow
def test_two_ranks_equal_one(whole, tmp_path):
    """ZeRO 1 under `deepspeed` is the same run; its checkpoint then continues in one process."""
    words = [
        str(ROOT / "recipes/train.py"),
        *SMALL,
        "--run-dir",
        str(tmp_path / "run"),
        "--set",
        "train.zero_stage=1",
    ]
    command([*deepspeed_launcher(), *words])
    same(tmp_path / "run", whole)
    assert run(tmp_path / "run", "train.zero_stage=1", "train.steps=5", resume="auto") == 0
    shutil.copytree(whole, tmp_path / "one")
    assert run(tmp_path / "one", "train.steps=5", resume="auto") == 0
    last = [RunFolder(tmp_path / folder).metrics()[-2]["loss"] for folder in ("run", "one")]
    assert last[0] == pytest.approx(last[1], abs=2e-5)


@pytest.mark.slow
def test_zero_3_partitions_all(tmp_path):
    """Below a threshold DeepSpeed keeps parameters whole; at 0 even the key bias's small MLP is cut
    over the ranks."""
    config = tmp_path / "zero3.json"
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    monitor = {"enabled": True, "output_path": str(tmp_path / "csv")}
    config.write_text(json.dumps({"zero_optimization": zero, "csv_monitor": monitor}))
    # Adam with this eps moves a number in proportion to its gradient, and rounding stays rounding.
    settings = [
        "--set",
        "model.options.dim=32",
        "--set",
        "evaluate.every=0",
        "--set",
        "optim.eps=1e-2",
    ]
    words = ["text.goat_ssmax_tiny", *SMALL[1:], *settings, "--run-dir"]
    with Ranks(2) as ranks:
        assert ranks(main, [*words, str(tmp_path / "cut"), "--deepspeed_config", str(config)]) == [
            0,
            0,
        ]
    assert main([*words, str(tmp_path / "whole")]) == 0
    same(tmp_path / "cut", tmp_path / "whole")
    assert {"loss.csv", "grad_norm.csv", "lr.csv"} <= {
        path.name for path in (tmp_path / "csv").rglob("*.csv")
    }
    cut, one = (load_run(tmp_path / folder)[0].state_dict() for folder in ("cut", "whole"))
    for name, tensor in one.items():
        assert torch.allclose(cut[name], tensor, atol=1e-5), name


@pytest.mark.slow
def test_files_that_a_training_enters(tmp_path):
    """Files of the project that two steps of a text recipe import."""
    script = f"""
import sys
from recipes.train import Trainer, main
code = main({[*SMALL, "--set", "train.steps=2", "--set", "evaluate.every=0", "--run-dir", str(tmp_path / "run")]})
files = {{str(getattr(module, "__file__", "")) for module in sys.modules.values()}}
files = [f for f in files if f.startswith({str(ROOT)!r}) and "site-packages" not in f]
print(code, len(files), sum(f.startswith({str(ROOT / "recipes")!r}) for f in files))
"""
    printed = command([sys.executable, "-c", script], PYTHONPATH=str(ROOT))
    code, files, recipes = map(int, printed.splitlines()[-1].split())
    assert code == 0
    assert recipes <= 20
    assert files <= 90


def test_impossible_run_leaves_nothing(tmp_path, monkeypatch):
    """A run that cannot begin is none."""
    monkeypatch.chdir(tmp_path)
    for words in (["--run-dir", "new/deep"], ["--run-dir", "new/deep"], [], ["--resume", "auto"]):
        assert main([*SMALL, "--set", "data.source=nowhere/*.txt", *words]) == 2
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == ["new/deep/run.lock"]
    assert not list(tmp_path.glob("runs/*/*"))


@pytest.mark.slow
def test_weights_are_a_start(whole, tmp_path, monkeypatch, capsys):
    model = load_run(whole)[0]
    file = whole / "model" / "model.safetensors"
    entry = {"file": file.name, "sha256": file_sha256(file)}
    shutil.copytree(file.parent, tmp_path / "weights")
    (tmp_path / "weights" / "manifest.json").write_text(
        json.dumps({"text_ggd_ssmax_tiny.test": entry})
    )
    monkeypatch.setattr(pretrained, "WEIGHTS", tmp_path / "weights")
    settings = ["train.steps=1", "optim.lr=1e-9", "evaluate.every=0"]
    for start in ("text_ggd_ssmax_tiny.test", str(whole), str(whole / "model")):
        assert run(tmp_path / start.replace("/", "_"), f"model.init_from={start}", *settings) == 0
        trained = load_run(tmp_path / start.replace("/", "_"))[0]
        for a, b in zip(trained.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    for start, word in {
        "text_ggd_ssmax_tiny.tset": "there are text_ggd_ssmax_tiny.test",
        "nowhere/run": "newest:RECIPE",
        "newest:text.ggd_tiny": "priorzoo train text.ggd_tiny",
    }.items():
        assert run(tmp_path / "other", f"model.init_from={start}", *settings) == 2
        assert word in capsys.readouterr().err
    assert (
        run(tmp_path / "other", "model.init_from=text_ggd_ssmax_tiny.test", "model.options.dim=32")
        == 2
    )


# ------------------------------------------------------------------------------------------------
# evaluators on the way


def during(**evaluators):
    return f"evaluate.during={json.dumps(evaluators)}"


@pytest.mark.slow
def test_evaluators_run_during_training(whole, tmp_path):
    """Evaluators run on the way on what is exported."""
    folder = tmp_path / "run"
    options = {
        "passkey": {"every": 2, "lengths": [96], "samples": 1},
        "perplexity": {"every": 3, "lengths": [16, 32]},
    }
    assert run(folder, during(**options), "train.ema=0.5") == 0
    records = {
        r["step"]: {k for k in r if "/" in k}
        for r in RunFolder(folder).metrics()
        if "loss" not in r
    }
    names = {
        name: {
            f"{name}/{s.column}@{n}"
            for n in options[name]["lengths"]
            for s in MODALITY.evaluators[name].scores
        }
        for name in options
    }
    everything = names["passkey"] | names["perplexity"]
    assert [records[step] for step in (2, 3, 4)] == [
        names["passkey"],
        names["perplexity"],
        everything,
    ]
    assert curve(folder)[0] == curve(whole)[0]  # measuring changes no step
    model = CausalLM.from_pretrained(folder / "model").eval()  # the averaged weights
    kind = MODALITY.evaluators["perplexity"]
    evaluator = kind(kind.settings_class(lengths=(16, 32)), {"source": "sotu-excerpt"})
    for row in evaluator.rows(dict(evaluator.run(model))):
        for score in evaluator.scores:
            assert (
                RunFolder(folder).metrics()[-1][f"perplexity/{score.column}@{row['length']}"]
                == row[score.column]
            )


@pytest.mark.parametrize(
    ("evaluators", "words"),
    [
        ({"paskey": 2}, ["'paskey'", "'passkey'"]),
        ({"passkey": {"every": 2, "lenghts": [96]}}, ["'lenghts'", "'lengths'"]),
        ({"passkey": {"lengths": [96]}}, ["passkey", "'every'"]),
        ({"passkey": {"every": 2, "lengths": [50]}}, ["50", "81"]),
    ],
)
def test_unmeasurable_stops_before_training(evaluators, words, tmp_path, capsys):
    """What cannot be measured on the way stops before training."""
    assert run(tmp_path / "run", during(**evaluators)) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: "), message
    assert all(word in message for word in words), message
