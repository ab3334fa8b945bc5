"""Folders of adapted models of transformers, and encoders whose learned positions were taken
out."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import zoo
from modalities.text.hf import wrap
from tests.refusals import refuses
from tests.zoo.test_cli import invoke
from zoo.adapters.released import add_lora, open_released, write_record
from zoo.files import read_object
from zoo.tables import adapters_table

SIZES = dict(
    vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)


def test_transformers_alone_refuses_folder(tmp_path: Path) -> None:
    """Transformers alone does not load a folder without its priors."""
    model = zoo.adapt(LlamaForCausalLM(LlamaConfig(**SIZES)), "ggd", keep_rope=False)
    model.save_pretrained(tmp_path)
    for auto in (AutoModel, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=r"llama with priors, which zoo\.load_adapted loads"):
            auto.from_pretrained(tmp_path)
    refuses("no adapted model", zoo.load_adapted, tmp_path / "none")
    loaded = zoo.load_adapted(tmp_path)
    assert loaded.config.model_type == "llama"
    assert loaded.config.vocab_size == 40
    assert (
        pickle.loads(pickle.dumps(copy.deepcopy(loaded.config))).to_json_string()
        == model.config.to_json_string()
    )
    assert get_peft_model(loaded, LoraConfig(task_type="CAUSAL_LM")).num_parameters() > 0


def test_missing_tensor_is_named(base: Path, tmp_path: Path) -> None:
    """A tensor that is missing is named."""
    zoo.adapt(LlamaForCausalLM(LlamaConfig(**SIZES)), "ggd").save_pretrained(tmp_path / "own")
    wrap(zoo.create_model("text_ggd_ssmax_tiny", num_layers=1)).save_pretrained(tmp_path / "ours")
    loads = {
        "base": open_released,
        "own": zoo.load_adapted,
        "ours": AutoModelForCausalLM.from_pretrained,
    }
    for (folder, load), name in zip(loads.items(), ("up_", "mu", "ssmax"), strict=True):
        file = tmp_path / folder / "model.safetensors"
        save_file(
            {key: x for key, x in load_file(file).items() if name not in key},
            file,
            {"format": "pt"},
        )
        refuses(rf"{folder} lacks '.*{name}.*'; expected all", load, str(file.parent))


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert", "OPT"])
@torch.inference_mode()
def test_reading_past_position_table(kind: str) -> None:
    """Reading past the table of positions."""
    make = getattr(transformers, f"{kind}Model")
    config = getattr(transformers, f"{kind}Config")
    torch.manual_seed(0)
    model = zoo.adapt(
        make(config(**SIZES, max_position_embeddings=16)), "alibi", keep_rope=False
    ).eval()
    tokens = torch.randint(3, 40, (2, 32))
    long = model(tokens).last_hidden_state
    roomy = zoo.adapt(
        make(config(**SIZES, max_position_embeddings=64)), "alibi", keep_rope=False
    ).eval()
    roomy.load_state_dict(model.state_dict())
    torch.testing.assert_close(long, roomy(tokens).last_hidden_state, rtol=0, atol=0)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return create_base("llama", tmp_path)


def create_base(kind: str, folder: Path) -> Path:
    """A small causal LM of random weights."""
    torch.manual_seed(0)
    short = SIZES | dict(max_position_embeddings=16)
    options = {"llama": short, "gpt2": dict(vocab_size=40, n_embd=32, n_layer=2, n_head=2)}
    options["gemma3_text"] = short | dict(num_key_value_heads=1, head_dim=16, sliding_window=8)
    config = AutoConfig.for_model(
        kind, **options[kind], bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    return folder / "base"


SOFT = zoo.adapters.limited_reach(soft=9.0)
BASES = [("llama", lora, prior) for lora in (0, 2) for prior in (None, {"position": "ggd"}, SOFT)]
BASES += [
    ("gpt2", 2, {"position": "ggd", "keep_rope": False}),
    ("gpt2", 0, SOFT),
    ("gemma3_text", 2, SOFT),
]


@pytest.mark.parametrize(("kind", "lora", "prior"), BASES)
def test_adapter_lacks_base_alone(kind: str, lora: int, prior: dict | None, tmp_path: Path) -> None:
    """On the base at another place: the same logits, cached generation, the adapter again, and
    merged a whole model."""
    base = create_base(kind, tmp_path)
    model = open_released(str(base), {} if kind == "gpt2" else {"yarn": "2"})
    if lora:
        add_lora(model, lora)
    if prior:
        zoo.adapt(model, **prior)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ("lora_" in name or "position_bias" in name):
                parameter.add_(0.02 * torch.randn_like(parameter))
    zoo.save_adapted(model, tmp_path / "adapter")
    base.rename(tmp_path / "moved")
    refuses("give base=FOLDER", zoo.load_adapted, tmp_path / "adapter")
    loaded = zoo.load_adapted(tmp_path / "adapter", base=str(tmp_path / "moved"))
    tokens = torch.randint(3, 40, (1, 24))
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
    assert kind == "gpt2" or '"rope_type": "yarn"' in loaded.config.to_json_string()
    written = loaded.generate(tokens, max_new_tokens=6, do_sample=False)
    assert torch.equal(
        loaded.generate(tokens, max_new_tokens=6, do_sample=False, use_cache=False), written
    )
    zoo.save_adapted(loaded, tmp_path / "again")
    files = [
        (tmp_path / name / "adapter.safetensors").read_bytes() for name in ("adapter", "again")
    ]
    assert files[0] == files[1]
    assert len(files[0]) < 30_000
    merged = zoo.load_adapted(tmp_path / "again", base=str(tmp_path / "moved"), merge=True)
    assert not [name for name, _ in merged.named_parameters() if "lora_" in name]
    torch.testing.assert_close(merged(tokens).logits, loaded(tokens).logits, rtol=1e-4, atol=1e-5)


def test_kept_positions_are_weights(tmp_path: Path) -> None:
    """Learned positions that are kept count as weights."""
    base = create_base("gpt2", tmp_path)
    model = open_released(str(base), {})
    add_lora(model, 2)
    zoo.save_adapted(model, tmp_path / "adapter")
    other = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        other.transformer.wpe.weight += 1
    other.save_pretrained(base)
    refuses("is another model", zoo.load_adapted, tmp_path / "adapter", base=str(base))


def test_gemma_with_sinks_generates(tmp_path: Path) -> None:
    """Gemma with sinks generates until its cache drops keys."""
    model = open_released(
        str(create_base("gemma3_text", tmp_path)), {"soft": "9", "sinks": "2"}
    ).eval()
    tokens = torch.randint(3, 40, (1, 4))
    options = dict(do_sample=False, eos_token_id=None)
    written = model.generate(tokens, max_new_tokens=4, **options)
    assert torch.equal(
        model.generate(tokens, max_new_tokens=4, use_cache=False, **options), written
    )
    assert model.generate(tokens, max_new_tokens=20, use_cache=False, **options).shape == (1, 24)
    words = "a cache of the last 8 keys does not tell their positions, on which sinks depend"
    refuses(words, model.generate, tokens, max_new_tokens=20, **options)


def test_an_adapter_refuses_another_base(base: Path, tmp_path: Path) -> None:
    """What was trained needs the weights that it was trained on, in any dtype; a window any of
    these sizes."""
    zoo.save_adapted(zoo.adapt(open_released(str(base)), "ggd"), tmp_path / "trained")
    zoo.save_adapted(open_released(str(base), {"window": "5"}), tmp_path / "untrained")
    LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "other")
    LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 1})).save_pretrained(
        tmp_path / "small"
    )
    zoo.load_adapted(tmp_path / "untrained", base=str(tmp_path / "other"))
    zoo.load_adapted(tmp_path / "trained", base=str(tmp_path / "half"))
    for name, other, key in (("trained", "other", "digest"), ("untrained", "small", "sizes")):
        with pytest.raises(
            ValueError,
            match=rf"{name} is an adapter of .*base, and .*{other} is another model: {key}",
        ):
            zoo.load_adapted(tmp_path / name, base=str(tmp_path / other))
    refuses("takes no base", zoo.load_adapted, tmp_path / "half", base=str(base))


def test_adapters_that_ship() -> None:
    """Of at most 20 MB, on a base that goes by its name, with a card."""
    shipped = zoo.adapters.list_adapters()
    assert "smollm2.soft" in shipped
    for folder in (zoo.adapters.WEIGHTS / name for name in shipped):
        record = read_object(folder / "adapter.json")
        assert sum(file.stat().st_size for file in folder.iterdir()) < 20e6
        assert "/" not in record["base"]["name"]
        assert "base_model" in (folder / "README.md").read_text()


def test_name_is_adapter_and_base(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the base is in the data folder. Without it the error names the command that fetches
    one."""
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    monkeypatch.setattr(zoo.adapters, "WEIGHTS", tmp_path / "weights")
    monkeypatch.setattr(zoo.tables, "WEIGHTS", tmp_path / "weights")
    model = open_released(str(base), {"soft": "9", "sinks": "2", "yarn": "2"})
    zoo.save_adapted(model, tmp_path / "weights" / "base.soft")
    record = read_object(tmp_path / "weights" / "base.soft" / "adapter.json")
    assert record["base"]["name"] == "base"
    rows = [
        {"length": 16, "bits_per_byte": 1.5, "tokens_right": 0.25},
        {"length": 32, "bits_per_byte": 1.75},
    ]
    write_record(record | {"measured": rows}, tmp_path / "weights" / "base.soft")
    tokens = torch.randint(3, 40, (1, 24))
    assert torch.equal(zoo.load_adapted("base.soft")(tokens).logits, model.eval()(tokens).logits)
    assert "| 16 | 1.5 | 0.25 |" in (tmp_path / "weights/base.soft/README.md").read_text()
    [row] = adapters_table(["base.soft"])[2]
    assert row == [
        "base.soft",
        "base",
        "yarn=2, soft=9, sinks=2",
        "16",
        "32",
        "0",
        "0.00",
        "1.750",
        "–",
    ]
    assert "base.soft" in invoke("list", "--adapters").output
    assert invoke("list", "--adapters", "other*").exit_code == 2
    base.rename(tmp_path / "moved")

    def missing(*_: object, **__: object) -> None:
        raise OSError("neither here nor on the hub")

    monkeypatch.setattr(
        "zoo.adapters.released.open_released", missing
    )  # which tries for half a minute
    refuses(
        r"adapter of base, .*`priorzoo fetch-data text base`, or base=FOLDER",
        zoo.load_adapted,
        "base.soft",
    )
