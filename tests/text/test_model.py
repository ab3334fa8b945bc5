"""The causal LM: every position method, cached decoding, packing, padding, sizes, files."""

from __future__ import annotations

import json
import math

import pytest
import torch

from modalities.decoder import causal_lm_loss
from modalities.starts import STARTS
from modalities.text import CausalLM, TextConfig
from tests.refusals import refuses
from zoo import create_model, create_prior
from zoo.catalog import register_model
from zoo.methods import list_layered_positions
from zoo.priors import Prior

# Every method, with and without SSMax by turns, and sums of each two kinds of terms, with a
# rotation and an embedding.
VARIANTS = [
    f"text_{name}{'_ssmax' * (n % 2)}_tiny" for n, name in enumerate(list_layered_positions())
]
SUMS = [
    "alibi+ggd",
    "t5+table",
    "sinusoidal+ggd",
    "cable+fire+key_bias",
    "rope+key_bias+learned",
    "local+goat",
]
VARIANTS += [f"text_{name}_ssmax_tiny" for name in (*SUMS, "alibi+scale_invariant")]
FEW = ["text_ggd_ssmax_tiny", "text_goat_tiny", "text_cable_tiny"]


def small(name: str, dtype: torch.dtype = torch.float64, **overrides) -> CausalLM:
    """A two-layer model whose priors are moved off their inits."""
    torch.manual_seed(0)
    sizes = dict(num_layers=2, dim=64, num_heads=2, hidden_dim=64, train_context=40)
    model = create_model(name, **sizes | overrides).to(dtype)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Prior):
                for parameter in module.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_prefixes_cache_and_documents(name: str, tokens: torch.Tensor) -> None:
    """A prefix's logits do not see the rest; chunked and token-wise decoding equals prefill;
    packing equals rows alone; prompts that are padded on the left are written on like single
    ones."""
    model = small(name, num_kv_heads=1 if "+" in name else 2)
    full = model(tokens)
    # The lanes are float32 at best where the prior has no parameters, hence 1e-5 and not 1e-12.
    close = dict(atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(tokens[:, :12]), full[:, :12], **close)

    cache = model.new_cache()
    chunks = [tokens[:, :7], tokens[:, 7:20], *tokens[:, 20:].split(1, dim=1)]
    torch.testing.assert_close(
        torch.cat([model(chunk, cache=cache) for chunk in chunks], dim=1), full, **close
    )
    assert cache.length == 33

    packed = model(tokens, segments=(torch.arange(33) >= 14).long().expand(2, -1))
    torch.testing.assert_close(packed[:, 14:], model(tokens[:, 14:]), **close)
    torch.testing.assert_close(packed[:, :14], full[:, :14], **close)

    prompts = [tokens[0, :15].tolist(), tokens[1, :6].tolist()]
    together = model.generate(prompts, max_new_tokens=3)
    assert together == [model.generate([prompt], max_new_tokens=3)[0] for prompt in prompts]


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_the_last_tokens_alone(name: str, tokens: torch.Tensor) -> None:
    """Of a whole line, of packed documents, and of chunks that a cache reads, are those of all
    tokens."""
    model = small(name, num_kv_heads=1)
    close = dict(atol=1e-5, rtol=1e-5)
    segments = (torch.arange(33) >= 14).long().expand(2, -1)
    for options in ({}, {"segments": segments}):
        full = model.forward_features(tokens, **options)
        for last in (1, 5, 33):
            torch.testing.assert_close(
                model.forward_features(tokens, last=last, **options), full[:, -last:], **close
            )
    line = torch.randint(0, 256, (2, 190), generator=torch.Generator().manual_seed(5))
    full = model.forward_features(line)
    cache = model.new_cache(190)
    for start, stop, last in ((0, 9, 1), (9, 21, 3), (21, 22, 1), (22, 70, 2), (70, 190, 3)):
        chunk = model.forward_features(line[:, start:stop], cache=cache, last=last)
        torch.testing.assert_close(chunk, full[:, stop - last : stop], **close)


PUBLISHED = {
    "goat_125m": 125e6,
    "cable_44m": 44e6,
    "cable_124m": 124e6,
    "cable_354m": 354e6,
    "ggd_120m": 120e6,
}
PUBLISHED |= {
    "ggd_432m": 432e6,
    "ggd_1100m": 1.1e9,
    "ggd_ssmax_tiny": 0.92e6,
    "ggd_ssmax_small": 10e6,
}


def test_parameter_counts_are_the_papers() -> None:
    """Within 5%: the papers round, and differ in biases and position tables."""
    for name, published in PUBLISHED.items():
        with torch.device("meta"):
            model = create_model(f"text_{name}")
        count = sum(p.numel() for p in model.parameters())
        assert count == pytest.approx(published, rel=0.09 if name.endswith("small") else 0.05), name


# Deviations of an embedding, a projection and the output of attention, of 64 columns and 2 layers.
SMALL = math.sqrt(2 / 5 / 64)
FLAT = 1 / math.sqrt(3 * 64)
STARTED = {"small": (SMALL, SMALL, SMALL / 2), "torch": (1.0, FLAT, FLAT)}
STARTED |= {"gpt2": (0.02, 0.02, 0.01), "normal": (0.02, 0.02, 0.02)}


@pytest.mark.parametrize("start", STARTS)
def test_weights_start_as_named(start: str) -> None:
    model = create_model("text_goat_tiny", dim=64, num_layers=2, style="gpt2", weight_init=start)
    attention = model.layers[0].attention
    weights = model.embedding.weight, attention.query.weight, attention.out.weight
    assert [weight.std().item() for weight in weights] == pytest.approx(STARTED[start], rel=0.05)
    assert bool(attention.query.bias.any()) == (start == "torch")
    fresh = create_prior("goat", num_heads=4, train_context=256).state_dict()
    assert attention.prior.state_dict()["spectral.beta"].equal(fresh["spectral.beta"])
    refuses(
        "weight_init='gpt': did you mean 'gpt2'", create_model, "text_goat_tiny", weight_init="gpt"
    )


@pytest.mark.parametrize(
    "options", [{}, {"tied": False, "activation_checkpointing": True}], ids=str
)
def test_loss_chunks_change_nothing(options, tokens: torch.Tensor, monkeypatch) -> None:
    """Documents, padding and weights, in float32; chunks of 5 of 64 tokens, whose logits alone are
    ever there."""
    model = small("text_ggd_ssmax_tiny", **options).float().train()
    segments = torch.tensor([[0] * 14 + [1] * 19, [0] * 30 + [-1] * 3])
    batch = {"tokens": tokens, "segments": segments, "weights": torch.rand(2, 33)}
    found = []
    sizes = []
    head = model.forward_head
    model.forward_head = lambda features: (
        sizes.append(features.flatten(0, -2).shape[0]) or head(features)
    )
    for limit in (10**9, 4 * 5 * model.config.vocab_size + 3):
        monkeypatch.setattr("modalities.decoder.model.LOGIT_BYTES", limit)
        model.zero_grad()
        loss, _ = causal_lm_loss(model, batch)
        loss.backward()
        found.append(
            [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        )
    # each chunk again in backward
    assert sizes[0] == 64
    assert len(sizes) == 1 + 2 * 13
    assert max(sizes[1:]) == 5
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * float(a.abs().max()) + 2e-8)


def test_borders_are_no_targets(tokens: torch.Tensor) -> None:
    """Padding and document borders are no targets."""
    model = small("text_rope_tiny")
    segments = torch.tensor([[0] * 20 + [-1] * 13, [0] * 33])
    loss, counts = causal_lm_loss(model, {"tokens": tokens, "segments": segments})
    changed = tokens.clone()
    changed[0, 20:] = 0
    again, _ = causal_lm_loss(model, {"tokens": changed, "segments": segments})
    assert counts["tokens"] == 19 + 32
    torch.testing.assert_close(loss, again)


def test_save_and_load(tmp_path, tokens: torch.Tensor) -> None:
    model = create_model("text_goat_ssmax_tiny").eval()
    folder = tmp_path / "m"
    model.save_pretrained(folder, dtype=torch.bfloat16)
    again = CausalLM.from_pretrained(folder).eval()
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    slopes = (one.layers[0].attention.prior.key_bias.raw_slope for one in (again, model))
    assert torch.equal(*slopes)  # priors stay in float32
    torch.testing.assert_close(again(tokens), model(tokens), atol=0.05, rtol=0.05)
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"wings": 2})
    )
    (folder / "manifest.json").unlink()
    refuses(r"config\.json.*wings", CausalLM.from_pretrained, folder)


def test_bad_requests_are_named() -> None:
    for call, message in (
        (lambda: create_model("text_ggd_tiny", dim=130), r"dim=130\b.*num_heads=4\b"),
        (lambda: create_model("text_cable_tiny", num_heads=16, lanes="inside"), r"\b10 of 8\b"),
        (lambda: create_model("text_rope_tiny", position_options={"thet": 1.0}), "'thet'.*theta"),
        (
            lambda: register_model("text_ggd_tiny", CausalLM, modality="text", config={}),
            "'text_ggd_tiny'",
        ),
        (lambda: CausalLM(TextConfig(position="rpe")), "'rpe'.*'rope'"),
    ):
        refuses(message, call)
