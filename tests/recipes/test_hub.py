"""`priorzoo hub`: the folder of a hub repository, its card, and what loads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import zoo
from modalities.tokenizers import copies
from recipes.cli import main
from recipes.hub import dataset_name
from tests.launching import ROOT
from tests.refusals import refuses
from zoo.pretrained import manifest

NAME = "text_ggd_tiny.facts"


def front_matter(card: str) -> dict:
    before, values, _ = card.split("---\n", 2)
    assert before == ""
    return yaml.safe_load(values)


def test_shipped_model_becomes_folder(tmp_path):
    """A shipped model becomes a folder that loads."""
    out = tmp_path / "hub"
    assert main(["hub", NAME, "--out", str(out)]) == 0
    names = {".gitattributes", "README.md", "config.json", "manifest.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == names
    ours = zoo.create_model(NAME)
    read = zoo.load_model(out)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), read.parameters(), strict=True))
    card = (out / "README.md").read_text()
    front = front_matter(card)
    assert front["license"] == "apache-2.0"
    assert front["library_name"] == "priorzoo"
    assert front["pipeline_tag"] == "text-generation"
    assert {"priorzoo", "text", "ggd"} <= set(front["tags"])
    assert dataset_name("hf:me/it:en:train") == "me/it"
    assert dataset_name("/home/me/a.txt") == ""
    assert front["datasets"] == ["sotu-excerpt"]
    assert "bits_per_byte" in front["metrics"]
    hub = pytest.importorskip("huggingface_hub")
    measured = manifest()[NAME]["measured"]
    found = {
        (r.dataset_name, r.metric_type): r.metric_value
        for r in hub.ModelCard(card).data.eval_results
    }
    assert found["held-out data, length 4096", "nll"] == next(
        row["nll"] for row in measured if row["length"] == 4096
    )
    assert 'zoo.load_model(snapshot_download("OWNER/NAME"))' in card
    assert "[text,hub]" in card


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder as training leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "0001"
    zoo.create_model("text_alibi_tiny", num_layers=1).save_pretrained(folder / "model")
    train = {"steps": 7, "batch": 4, "seed": 3, "precision": "fp32"}
    recipe = {
        "name": "text.mine",
        "modality": "text",
        "train": train,
        "data": {"source": "hf:me/speeches"},
    }
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return folder


def test_a_run_brings_its_recipe(run, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    class Api:
        def create_repo(self, name, **options):
            asked.append((name, options))

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            asked.append((repo_id, sorted(path.name for path in folder_path.iterdir())))

    monkeypatch.setattr(hub, "HfApi", Api)
    words = ["--out", str(tmp_path / "hub"), "--license", "CC-BY-4.0"]
    assert main(["hub", str(run), *words, "--push", "me/mine", "--private"]) == 0
    card = (tmp_path / "hub" / "README.md").read_text()
    front = front_matter(card)
    assert front["license"] == "cc-by-4.0"
    assert front["datasets"] == ["me/speeches"]
    assert "# mine" in card
    assert "- **steps**: 7" in card
    assert 'snapshot_download("me/mine")' in card
    assert asked[0] == ("me/mine", {"private": True, "exist_ok": True})
    assert asked[1][0] == "me/mine"
    assert {"README.md", "model.safetensors", "recipe.json"} <= set(asked[1][1])
    assert zoo.load_model(tmp_path / "hub").config.num_layers == 1


def test_failure_leaves_nothing(run, tmp_path, capsys):
    """What cannot be done leaves nothing."""
    for option, value, named in (
        ("--push", "mine", "expected OWNER/NAME"),
        ("--dtype", "float16", "'bfloat16'"),
    ):
        assert main(["hub", str(run), "--out", str(tmp_path / "hub"), option, value]) == 2
        assert named in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
    (tmp_path / "hub").mkdir()
    assert main(["hub", str(run), "--out", str(tmp_path / "hub")]) == 2
    assert "exists; remove it" in capsys.readouterr().err


def test_names_are_escaped(tmp_path):
    """A name makes no lines columns or html of its own."""
    folder = tmp_path / "a\n---\nlicense: mit\n# <img src=x onerror=y>|b[c](d)\x1b[31m"
    zoo.create_model("text_alibi_tiny", num_layers=1).save_pretrained(folder)
    assert main(["hub", str(folder), "--out", str(tmp_path / "hub")]) == 0
    card = (tmp_path / "hub" / "README.md").read_text()
    title = next(line for line in card.splitlines() if line.startswith("# "))
    assert title == r"# a --- license: mit # &lt;img src=x onerror=y&gt;\|b[c]\(d)\x1b[31m"
    assert "license: mit" not in card.replace(title, "")
    assert "license" not in front_matter(card)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mine.json", "hf:tok"])
def test_the_user_s_tokenizer_travels(spec, tmp_path, monkeypatch):
    """Save, publish, move to where the tokenizer's file is not, and read back by every way in."""
    transformers = pytest.importorskip("transformers")
    hf = pytest.importorskip("modalities.text.hf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(copies, "_copies", {})
    shutil.copy(ROOT / "modalities/text/assets/bpe-1k.json", "mine.json")
    hf.fast_tokenizer("bpe-1k").save_pretrained("tok")
    model = zoo.create_model("text_alibi_tiny", num_layers=1, tokenizer=spec)
    ids = torch.arange(20)[None]
    model.save_pretrained("saved")
    expected = model(ids)
    Path("mine.json").unlink()
    shutil.move("tok", "gone")
    assert main(["hub", "saved", "--out", "hub"]) == 0
    shutil.move("hub", "hf:moved")  # a folder, whatever else its name may mean
    for folder in ("hf:moved", "hub/again"):
        # As in a new process.
        monkeypatch.setattr(copies, "_copies", {})
        assert torch.equal(zoo.load_model(folder)(ids), expected)
        assert main(["generate", folder, "The people", "--max-new-tokens", "2"]) == 0
        if folder == "hf:moved":
            assert main(["hub", folder, "--out", "hub/again"]) == 0
            assert Path("hub/again/tokenizer.json").exists()
    hf.wrap(zoo.load_model("hub/again")).save_pretrained("hf")
    monkeypatch.setattr(copies, "_copies", {})
    wrapped = transformers.AutoModelForCausalLM.from_pretrained("hf")
    assert torch.equal(wrapped(ids).logits, expected)
    assert Path("hf/tokenizer.json").exists()
    words = ["--lengths", "32", "--samples", "1", "--source", "sotu-excerpt"]
    assert main(["evaluate", "hf:hf", "hub/again", "perplexity", *words]) == 0
    rows = [
        json.loads(path.read_text())["rows"][0]["nll"]
        for path in Path("results/perplexity").glob("*.json")
    ]
    assert len(rows) == 2
    assert rows[0] == pytest.approx(rows[1])


def test_tokenizers_are_told_apart(tmp_path, monkeypatch):
    """Two tokenizers of one name are told apart."""
    monkeypatch.setattr(copies, "_copies", {})
    for name, content in (("a", "{}"), ("b", "[]")):
        zoo.create_model("text_alibi_tiny", num_layers=1, tokenizer="mine.json").save_pretrained(
            tmp_path / name
        )
        (tmp_path / name / "tokenizer.json").write_text(content)
    zoo.load_model(tmp_path / "a")
    refuses(
        r"a/tokenizer.json and .*b/tokenizer.json differ and are both called 'mine",
        zoo.load_model,
        tmp_path / "b",
    )
