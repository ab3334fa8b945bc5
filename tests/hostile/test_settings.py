"""Numbers of configurations, weights, tokenizers and command lines are checked before memory is asked for by them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from modalities.evaluation import LengthSettings
from modalities.text import corpus as corpora
from modalities.text import sources
from modalities.text.model import CausalLM, TextConfig
from modalities.text.tokenizers import load_tokenizer
from modalities.vision import VisionConfig
from modalities.vision.evaluators.resolution import ResolutionSettings
from recipes import find_recipe
from recipes.config import ConfigError, apply_overrides, resolve
from zoo.inputs import read_tensors
from zoo.registry import load_model

# ---- tokenizers ----


def test_a_tokenizer_file_ends_no_process(tmp_path):
    content = json.loads((corpora.Path(sources.__file__).parent / "assets" / "bpe-1k.json").read_bytes())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    path = tmp_path / "a.json"

    def load(**changed):
        path.write_text(json.dumps(content | changed))
        return load_tokenizer(str(path))

    for number in (4 * 10**9, -1, 2**24, 0.5, None):
        with pytest.raises(ValueError, match=r"a\.json: token 'x' has id .*; expected 0 to 16,777,215"):
            load(added_tokens=[{"id": number, "content": "x", "special": True, **flags}])
    with pytest.raises(ValueError, match=r"token 'x' has id 1099511627776"):
        load(model=content["model"] | {"vocab": content["model"]["vocab"] | {"x": 2**40}})
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = load(pre_tokenizer=split)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_many([text])):
        with pytest.raises(ValueError, match=r"'a' failed inside its library: .*retry-limit"):
            encode("a" * 60 + "!")


# ---- configurations and weights ----


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"num_layers": 0}, "num_layers=0: expected a whole number from 1 to 1,024"),
        ({"num_layers": -1}, "num_layers=-1"),
        ({"num_layers": 10**6}, "num_layers=1000000: expected a whole number from 1 to 1,024"),
        ({"num_layers": 1.5}, r"num_layers=1\.5"),
        ({"num_layers": True}, "num_layers=True"),
        ({"vocab_size": 0}, "vocab_size=0: expected a whole number from 1 to 16,777,216"),
        ({"dim": 10**400}, "dim=1000"),
        ({"train_context": 10**9}, "train_context=1000000000: expected a whole number from 1 to 16,777,216"),
        ({"num_kv_heads": 0}, "num_kv_heads=0: expected a whole number from 1 to 4,096 or none"),
        ({"ssmax": "yes"}, "ssmax='yes': expected true or false"),
        ({"tied": "x"}, "tied='x': expected true or false"),
        ({"tokenizer": 3}, "tokenizer=3: expected a string"),
        ({"ssmax_start": float("nan")}, "ssmax_start=nan: expected a number or none"),
        ({"position": [3]}, r"position=\[3\]: expected a string or a list, each a string"),
        ({"position_options": []}, r"position_options=\[\]: expected values by name"),
        (
            {"dim": 2**17, "hidden_dim": 2**20, "num_layers": 1024},
            "a model of about .* parameters; at most 1,099,511,627,776",
        ),
    ],
)
def test_a_configuration_is_typed_and_bounded(option, message):
    with pytest.raises(ValueError, match=message):
        TextConfig(**option)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"img_size": 2**20}, "img_size=1048576: expected a whole number from 1 to 65,536 or 2 values"),
        ({"img_size": 2**16, "patch_size": 1}, "img_size=65536 has 4,294,967,296 patches of 1; at most 16,777,216"),
        ({"patch_size": 0}, "patch_size=0: expected a whole number from 1"),
        ({"num_classes": -1}, "num_classes=-1: expected a whole number from 0"),
        ({"mean": (0, 0)}, r"mean=\(0, 0\): expected 3 values, each a number"),
        ({"dim": "384"}, "dim='384': expected a whole number"),
    ],
)
def test_a_configuration_of_images_is_typed_and_bounded(option, message):
    with pytest.raises(ValueError, match=message):
        VisionConfig(**option)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = CausalLM(TextConfig(dim=8, num_layers=1, num_heads=2, hidden_dim=8, position="nope"))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()  # whoever changes a file may change its digest too
    return tmp_path / "model"


def test_weights_are_finite(saved):
    path = saved / "model.safetensors"
    whole = load_file(path)
    for value in (float("nan"), float("inf"), -float("inf")):
        for kind in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2):
            state = {name: tensor.clone() for name, tensor in whole.items()}
            state["norm.weight"][3] = value
            state["norm.weight"] = state["norm.weight"].to(kind)
            save_file(state, path)
            with pytest.raises(
                ValueError, match=r"model\.safetensors: the tensor 'norm\.weight' has values that are not fin"
            ):
                load_model(saved)
    save_file(
        {"a": torch.zeros(0), "b": torch.ones(2, dtype=torch.int64), "c": torch.ones(2).to(torch.float8_e4m3fn)}, path
    )
    assert sorted(read_tensors(path)) == ["a", "b", "c"]


def test_a_configuration_is_held_against_its_weights_before_it_takes_memory(saved):
    """A table of 2^24 × 2^16 numbers is 4 TiB."""
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"vocab_size": 2**24, "dim": 2**15, "num_heads": 2}))
    before = torch.random.get_rng_state()
    with pytest.raises(
        ValueError, match=r"do not fit its config\.json: 'embedding\.weight' has shape \(264, 8\), expected"
    ):
        load_model(saved)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("content", ["[]", "3", "{", "[" * 10**5, '{"modality": 3}', "\0"])
def test_a_config_that_is_no_object(content, saved):
    (saved / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(saved)
    with pytest.raises(ValueError, match=r"config\.json|holds a model of 3"):
        CausalLM.from_pretrained(saved)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.context=1e9", "context=1000000000: expected a whole number from 1 to 16,777,216"),
        ("data.num_workers=100000", "num_workers=100000: expected a whole number from 0 to 1,024"),
        ("train.batch=1e15", r"train\.batch=1000000000000000: expected a whole number from 1 to 4,194,304"),
        ("train.micro_batch=0", r"train\.micro_batch=0: expected a whole number from 1 to 4,194,304 or none"),
        ("train.steps=1e30", r"train\.steps=.*: expected a whole number from 1 to 1,099,511,627,776"),
        ("train.seed=1e30", r"train\.seed=.*: expected a whole number from"),
        ("optim.prior_lr_scale=inf", r"optim\.prior_lr_scale=inf: expected a number"),
        ('optim.lr_scales={"theta": "x"}', "multiples above 0"),
        ("evaluate.samples=1e20", r"evaluate\.samples=1"),
    ],
)
def test_settings_of_a_recipe_are_bounded(setting, message):
    with pytest.raises(ConfigError, match=message) as error:
        resolve(apply_overrides(find_recipe("text.ggd_tiny"), [setting])[0], world=1)
    assert "\n" not in str(error.value)


def test_settings_of_an_evaluator_are_bounded():
    assert LengthSettings(lengths=(2**19, 2**27)).lengths == (2**19, 2**27)
    with pytest.raises(ValueError, match="lengths 99,999,999,999: expected at most 134,217,728"):
        LengthSettings(lengths=(128, 99_999_999_999))
    with pytest.raises(ValueError, match="samples 1,000,000,000,000: expected at most"):
        LengthSettings(samples=10**12)
    with pytest.raises(
        ValueError, match=r"images of 10,000,000,000 pixels \(sizes 100000, aspect 1:1\); at most 89,478,485"
    ):
        ResolutionSettings(sizes=(96, 100_000))
