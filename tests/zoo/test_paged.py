"""The paged KV cache: what it drops is proven useless, what it computes is what a dense cache computes, and what it holds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from modalities.decoder.model import PAGED_FROM
from modalities.text.model import CausalLM, TextConfig
from tests.device import DEVICE
from tests.zoo.priors_table import LINE, inputs, make
from zoo import KVCache, PagedCache, Positions, create_prior
from zoo.decoding.eviction import EvictionBound
from zoo.decoding.pages import PageStore
from zoo.encodings import Rotary
from zoo.layers import Attention, Block, LogitOptions, SSMax, SwiGLU
from zoo.methods import list_positions
from zoo.priors import Prior

METHODS = [name for name in list_positions() if name != "fire"]
CHUNKS = [13, 3, 9, 1, 1, 1, 1, 1]  # an empty cache, part of a page, more than a page, single tokens
LENGTH = sum(CHUNKS)


def tokens(length: int = LENGTH, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(3))


def small(position: str, **config) -> CausalLM:
    """A two-layer model in float64 whose priors are moved off their inits."""
    torch.manual_seed(0)
    shape = dict(vocab_size=40, dim=64, num_layers=2, num_heads=2, hidden_dim=32, train_context=40)
    model = CausalLM(TextConfig(position=position, **(shape | config))).double().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Prior):
                for parameter in module.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def fading(*, heads: int = 6, retrieval: int = 3, slope: float = 10.0, **config) -> CausalLM:
    """GGD heads of a steep linear decay, but for `retrieval` first ones: θβ = 0 (no prior), and θβ < 0 for the last of them."""
    model = small("ggd", num_heads=heads, dim=16 * heads, position_options={"init": "alibi"}, **config)
    with torch.no_grad():
        for layer in model.layers:
            prior = layer.attention.prior
            prior.theta_alpha.fill_(math.log(slope))
            prior.theta_beta.fill_(1.0)
            prior.theta_alpha[:retrieval], prior.theta_beta[:retrieval] = 0.0, 0.0
            prior.theta_beta[retrieval - 1] = -0.3
    return model


def bounds(model: CausalLM, horizon: int, block: int) -> list[EvictionBound]:
    return [EvictionBound.of(layer, horizon, block) for layer in model.layers]


def paged(model: CausalLM, horizon: int, *, block: int = 4) -> PagedCache:
    return PagedCache(len(model.layers), horizon=horizon, block=block, bounds=bounds(model, horizon, block))


def read(model: CausalLM, cache, ids: torch.Tensor, chunks=CHUNKS, segments=None, **options) -> torch.Tensor:
    parts = ids.split(chunks, dim=1)
    marks = [None] * len(parts) if segments is None else segments.split(chunks, dim=1)
    return torch.cat(
        [model.forward_features(t, segments=s, cache=cache, **options) for t, s in zip(parts, marks, strict=True)],
        dim=1,
    )


def same(found: torch.Tensor, expected: torch.Tensor, budget: float = 1e-12) -> None:
    """Float64 sums in another order."""
    assert (found - expected).abs().max() <= budget * expected.abs().max()


# ------------------------------------------------------------------------------------------------------ what a tail is


@pytest.mark.parametrize("name", LINE[::2])
def test_tail_is_above_every_key_so_far_away(name: str) -> None:
    """sup of K[i,j] − K[i,i] over i < horizon and j ≤ i − d, taken entry by entry of the oracle, is never above `tail`."""
    horizon = 40
    for seed in range(2):
        prior, pos = make(name, seed=seed), Positions.line(horizon)
        dense = prior.log_prior(pos, pos, causal=True, x=inputs(horizon)).amax(0)
        lifted = dense - dense.diagonal(dim1=1, dim2=2)[..., None]
        away = torch.arange(horizon)[:, None] - torch.arange(horizon)
        distance = torch.arange(horizon)
        tail = prior.tail(distance, horizon)
        assert tail.shape == (prior.num_heads, horizon) and tail.dtype == torch.float64
        for d in distance.tolist():
            highest = lifted.masked_fill(away < d, -torch.inf).amax((1, 2))
            assert (highest <= tail[:, d] + 1e-9).all(), f"{name} at distance {d}"


@pytest.mark.parametrize(
    ("name", "exact"),
    [("alibi", True), ("ggd", True), ("kerple", True), ("t5", True), ("uniform", True), ("fire", False)],
)
def test_tail_is_the_least_bound_of_priors_of_distance(name: str, exact: bool) -> None:
    horizon, prior = 300, make(name)
    distance = torch.tensor([0, 1, 7, 100, 299, 400])
    tail = prior.tail(distance, horizon)
    if not exact:
        assert (tail == torch.inf).all()
        return
    every = prior.log_prior(Positions.line(1, offset=horizon - 1), Positions.line(horizon), causal=True)[0, :, 0].flip(
        1
    )
    for n, d in enumerate(distance.tolist()[:-1]):
        torch.testing.assert_close(tail[:, n], every[:, d:].amax(1) - every[:, 0], atol=1e-9, rtol=0)
    assert (tail[:, -1] <= tail[:, -2]).all()


def test_grids_are_never_forgotten() -> None:
    for name in ("alibi2d", "kerple2d", "ggd2d"):
        assert (create_prior(name, num_heads=2).tail(torch.arange(9), 9) == torch.inf).all()


# ------------------------------------------------------------------------------------------------------ the certificate


def extreme_block(ssmax: bool = False, scale_prior: bool = True, rotary: Rotary | None = None) -> Block:
    """One head whose content columns all read one input: inputs ±(√C, 0, …) reach the bounds on queries and keys."""
    dim, slope = 4, 2.0
    prior = create_prior("ggd", num_heads=1, init="alibi")
    prior.theta_alpha.data.fill_(math.log(slope))
    scale = SSMax(1, train_context=40) if ssmax else None
    attention = Attention(dim, 1, prior=prior, rotary=rotary, ssmax=scale, logits=LogitOptions(scale_prior=scale_prior))
    block = Block(dim, attention, SwiGLU(dim, 4)).double()
    with torch.no_grad():
        block.attention_norm.weight.copy_(torch.tensor([1.5, 1, 1, 1]))
        for linear, size in ((attention.query, 0.7), (attention.key, -0.4)):
            linear.weight.zero_()
            linear.weight[0, 0] = size
    return block


@torch.no_grad()
def test_biases_and_temperature_enter_the_bound() -> None:
    """Norms of queries and keys of random inputs stay below it, and the worst input of one column reaches it."""
    torch.manual_seed(0)
    attention = Attention(8, 2, prior=create_prior("ggd", num_heads=2), bias=True, logits=LogitOptions(temperature=0.5))
    block = Block(8, attention, SwiGLU(8, 4), norm=nn.LayerNorm).double()
    for module in (block.attention_norm, attention.query, attention.key):
        nn.init.normal_(module.bias)
        nn.init.normal_(module.weight)
    bound = EvictionBound.of(block, 40, 1)
    x = block.attention_norm(torch.randn(20000, 8, dtype=torch.float64))
    for linear, most, share in ((attention.query, bound.query, 0.5 * 2), (attention.key, bound.key, 1.0)):
        longest = linear(x).unflatten(1, (2, 4)).norm(dim=-1).amax(0) / share
        assert (longest <= most).all() and (longest > 0.5 * most).all()


@pytest.mark.parametrize(("ssmax", "scale_prior"), [(False, True), (True, True), (True, False)])
@torch.no_grad()
def test_the_bound_is_reached_and_never_crossed(ssmax: bool, scale_prior: bool) -> None:
    """The worst input is a key aligned with a query whose own key is opposed to it. A page is dead exactly when that key's
    weight, at any position to come, is below 2^-24/horizon of the own key's: to the 1.5% that rounding is given, and 2^-7."""
    horizon = 400
    block = extreme_block(ssmax, scale_prior)
    attention, bound = block.attention, EvictionBound.of(block, horizon, 1)
    ahead = block.attention_norm(torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))
    q, k_own, k_past = attention.query(ahead), attention.key(ahead), attention.key(-ahead)
    content = float(q @ (k_past - k_own)) / math.sqrt(attention.content_dim)
    assert content > 0
    limit, now = 24 * math.log(2) + math.log(horizon), 40
    last = torch.arange(now)[None, None]
    dead = bound.evictable(k_past.norm().expand(1, 1, now), last, now, documents=False)[0, 0]
    position = torch.arange(now, horizon, dtype=torch.float64)
    row = attention.ssmax.s[0] * (position + 1).log() if ssmax else torch.ones_like(position)
    key = torch.arange(now, dtype=torch.float64)
    fall = prior_fall(attention.prior, position[:, None] - key)
    gap = row[:, None] * content + fall * (row[:, None] if scale_prior else 1.0)
    worst = gap.amax(0)
    assert (worst[dead] < -limit).all() and dead.any() and not dead.all()
    kept = worst[~dead]
    slack = 0.031 * float(row.max()) * content + 0.01 * float(fall.abs().max()) + (1e-3 if scale_prior else 0.0)
    if ssmax and not scale_prior:  # the row scale is taken at the horizon, where the prior has fallen further
        slack += content * float(row.max() - row.min())
    assert (kept > -limit - slack).all()
    shorter = bound.evictable(k_past.norm().expand(1, 1, now) * 3, last, now, documents=False)[0, 0]
    assert shorter.sum() < dead.sum()  # longer keys stay longer


def prior_fall(prior: Prior, distance: torch.Tensor) -> torch.Tensor:
    return (prior.curve(distance, causal=True) - prior.curve(torch.zeros_like(distance), causal=True))[0]


@torch.no_grad()
def test_a_negative_row_scale_and_a_young_document_forget_nothing() -> None:
    block = extreme_block(ssmax=True)
    last, highest = torch.arange(300)[None, None], torch.full((1, 1, 300), 0.5)
    old = EvictionBound.of(block, 400, 1).evictable(highest, last, 300, documents=False)
    young = EvictionBound.of(block, 400, 1).evictable(highest, last, 300, documents=True)
    assert old.any() and not (young & ~old).any() and young.sum() < old.sum()
    block.attention.ssmax.s.fill_(-0.1)
    assert not EvictionBound.of(block, 400, 1).evictable(highest, last, 300, documents=False).any()


@torch.no_grad()
def test_yarn_lengthens_queries_and_keys() -> None:
    plain = EvictionBound.of(extreme_block(rotary=Rotary(4)), 40, 1)
    yarn = EvictionBound.of(extreme_block(rotary=Rotary(4, train_context=16, scaling="yarn", factor=4.0)), 40, 1)
    torch.testing.assert_close(yarn.query / plain.query, torch.tensor([0.1 * math.log(4) + 1], dtype=torch.float64))
    torch.testing.assert_close(yarn.key / plain.key, yarn.query / plain.query)


# ------------------------------------------------------------------------------------------------------ the cache


def test_pages_are_judged_by_their_longest_key_once_they_are_full() -> None:
    """Norms are of the content columns, whether a page came whole or token by token; one that is not full is never judged."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 3, 34, width, generator=generator) for width in (6, 5))
    norms = k[..., 2:].norm(dim=-1)[..., :32].unflatten(2, (8, 4)).amax(-1)
    for sizes in ([34], [1] * 34, [5, 11, 1, 1, 16]):
        store, judged = PageStore(k, v, block=4, width=4), {}

        def dead(highest: torch.Tensor, last: torch.Tensor, judged=judged) -> torch.Tensor:
            for n, stop in enumerate(last[0, 0].tolist()):
                judged.setdefault(stop // 4, []).append(highest[..., n])
            return torch.zeros_like(last, dtype=torch.bool)

        for part_k, part_v in zip(k.split(sizes, 2), v.split(sizes, 2), strict=True):
            store.append(part_k, part_v, dead)
        for page in range(8):
            torch.testing.assert_close(judged[page][-1], norms[..., page])
        assert (store.pages.count == 9).all() and store.pages.length == 34
        pool = store.pages.keys[store.pages.index.long()].flatten(2, 3)[:, :, :34]
        assert torch.equal(pool, k)
        store.append(k[:, :, :7], v[:, :, :7], lambda highest, last: torch.ones_like(last, dtype=torch.bool))
        assert (store.pages.count == 1).all() and (store.pages.start == 40).all()
        assert torch.equal(store.pages.keys[store.pages.index[..., 0].long(), :1], k[:, :, 6:7])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ssmax"), [(name, n % 2 == 0) for n, name in enumerate(METHODS)])
@torch.no_grad()
def test_pages_compute_what_a_dense_cache_does(name: str, ssmax: bool) -> None:
    model, ids = small(name, ssmax=ssmax), tokens()
    same(read(model, paged(model, LENGTH), ids), read(model, KVCache(2), ids))


@pytest.mark.parametrize(("name", "groups"), [("ggd", 1), ("alibi", 2), ("t5", 2)])
@torch.no_grad()
def test_grouped_heads(name: str, groups: int) -> None:
    model, ids = small(name, num_heads=4, num_kv_heads=groups, ssmax=True), tokens()
    cache = paged(model, LENGTH)
    same(read(model, cache, ids), read(model, KVCache(2), ids))
    assert cache.held().shape == (2, 2, 4 if name == "alibi" else groups)  # its lanes differ from head to head


@torch.no_grad()
def test_documents_and_padding() -> None:
    segments = torch.tensor([[0] * 9 + [1] * (LENGTH - 9), [-1] * 5 + [0] * 12 + [1] * (LENGTH - 17)])
    for model in (fading(ssmax=True, slope=30.0), small("goat"), small("local", train_context=11)):
        found = read(model, paged(model, LENGTH), tokens(), segments=segments)
        same(found, read(model, KVCache(2), tokens(), segments=segments), 2.0**-20)


@pytest.mark.parametrize(
    ("make_model", "paged"),
    [
        (lambda: fading(retrieval=2), True),
        (lambda: fading(retrieval=4), False),  # of six heads: more than half of the keys stay
        (lambda: fading(retrieval=2, num_kv_heads=1), False),  # what any head of the group can use stays
        (lambda: small("alibi"), True),
        (lambda: small("rope"), False),
        (lambda: small(["alibi", "alibi", "alibi", "rope"], num_layers=4), True),
        (lambda: small(["alibi", "alibi", "alibi", "fire"], num_layers=4), False),  # no paged cache serves a dense bias
    ],
)
def test_a_long_cache_is_paged_where_that_halves_it(make_model, paged: bool) -> None:
    model = make_model()
    assert isinstance(model.new_cache(), KVCache) and isinstance(model.new_cache(PAGED_FROM - 1), KVCache)
    assert isinstance(model.new_cache(PAGED_FROM), PagedCache if paged else KVCache)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"ssmax": True, "scale_prior": False}, {"num_kv_heads": 2}])
@torch.no_grad()
def test_memory_follows_the_retrieval_heads(config: dict) -> None:
    """Three of six heads hold every page, the others the few that their decay leaves; outputs are those of a dense cache."""
    length, ids = 100, tokens(100)
    # Of grouped keys the first group has two retrieval heads and one that decays: it must keep what any head can use.
    model = fading(retrieval=2 if "num_kv_heads" in config else 3, **config)
    cache = paged(model, length)
    chunks = [50, 3, 20] + [1] * (length - 73)
    same(read(model, cache, ids, chunks), read(model, KVCache(2), ids, chunks), 2.0**-20)
    held, every = cache.held(), length // 4
    retrieving = 1 if "num_kv_heads" in config else 3
    assert (held[:, :, :retrieving] == every).all()
    assert (held[:, :, retrieving:] <= 5).all() and (held >= 1).all()
    for layer in cache.layers:
        pages, pool = layer.store.pages, len(layer.store.pages.keys)
        total = int(pages.count.sum())
        assert total <= pool <= 1.25 * (total + 3 * held[0].numel())  # what was dropped is what others took
        ids_held = [pages.index[b, g, :n].tolist() for b in range(2) for g, n in enumerate(pages.count[b].tolist())]
        flat = [page for row in ids_held for page in row]
        assert len(set(flat)) == len(flat)  # a page has one holder
        assert layer.store.counts == pages.count.flatten().tolist()
        starts = [pages.start[b, g, :n] for b in range(2) for g, n in enumerate(pages.count[b].tolist())]
        assert all((row.diff() == 4).all() and row[-1] == length - 4 for row in starts)
    dense = KVCache(2)
    read(model, dense, ids, chunks)
    assert cache.memory() < 0.8 * dense.memory()


@torch.no_grad()
def test_a_retrieval_head_needs_its_pages() -> None:
    """Without certificates nothing is dropped; and hiding pages that certificates keep shows in the output."""
    length, ids = 60, tokens(60, rows=1)
    model = fading(slope=1.0)
    chunks = [length - 1, 1]
    everything = PagedCache(2, horizon=length, block=4)
    expected = read(model, everything, ids, chunks)[:, -1]
    assert (everything.held() == length // 4).all()
    cache = paged(model, length)
    model.forward_features(ids[:, :-1], cache=cache)
    store = cache.layers[0].store
    store.pages.index[:, :3, 0] = store.pages.index[:, :3].gather(2, store.newest[:, :3])[..., 0]
    store.pages.count[:, :3], store.counts[:3] = 1, [1, 1, 1]  # retrieval heads with the newest page alone
    with pytest.raises(AssertionError):
        same(model.forward_features(ids[:, -1:], cache=cache)[:, 0], expected, 2.0**-20)


def test_what_a_head_keeps_is_one_stretch() -> None:
    """A page that no query can use stays while an older one, whose keys are longer, is used."""
    k, v = torch.randn(1, 2, 40, 6), torch.randn(1, 2, 40, 5)
    k[:, 1, 8:12] *= 100
    store = PageStore(k, v, block=4, width=4)
    store.append(k[:, :, :30], v[:, :, :30], lambda highest, last: (highest < 50) & (last < 20))
    starts = [row[:count].tolist() for row, count in zip(store.pages.start[0], store.counts, strict=True)]
    assert starts == [[20, 24, 28], [8, 12, 16, 20, 24, 28]]
    store.append(k[:, :, 30:], v[:, :, 30:], lambda highest, last: (highest < 50) & (last < 30))
    assert store.counts == [3, 8]


@pytest.mark.parametrize("name", ["ggd", "alibi", "cable", "t5"])
@torch.no_grad()
def test_chunks_longer_than_a_page_attend_to_stretches(name: str) -> None:
    """Heads that forget and heads that do not, rows of different documents, whole chunks and their last tokens alone."""
    model = fading(ssmax=True) if name == "ggd" else small(name, ssmax=True)
    ids, chunks = tokens(40, rows=3), [13, 12, 15]
    segments = torch.tensor([[0] * 40, [-1] * 5 + [0] * 15 + [1] * 20, [0] * 18 + [1] * 22])
    for marks in (None, segments):
        cache = paged(model, 40)
        expected = read(model, KVCache(2), ids, chunks, marks)
        same(read(model, cache, ids, chunks, marks), expected, 2.0**-20)
        last = read(model, paged(model, 40), ids, chunks, marks, last=2)
        same(last, torch.cat([part[:, -2:] for part in expected.split(chunks, dim=1)], dim=1), 2.0**-20)
        assert name != "ggd" or cache.held().min() < 6 < cache.held().max()


@torch.no_grad()
def test_a_window_drops_what_left_it() -> None:
    model, length = small("local", train_context=10), 60
    cache, chunks = paged(model, length), [20] + [1] * 40
    same(read(model, cache, tokens(length), chunks), read(model, KVCache(2), tokens(length), chunks))
    assert (cache.held() <= 10 // 4 + 2).all()


@torch.no_grad()
def test_a_cache_is_not_cropped_to_where_keys_are_gone() -> None:
    model, ids = fading(), tokens(80)
    cache = paged(model, 80)
    read(model, cache, ids, [30] + [1] * 50)
    with pytest.raises(ValueError, match="may be evicted"):
        cache.crop(40)


@torch.no_grad()
def test_mark_and_rewind() -> None:
    """What follows a mark is forgotten, dropped pages included: while the mark is kept none is dropped."""
    model, ids, length = fading(), tokens(80), 80
    cache = paged(model, length)
    read(model, cache, ids[:, :30], [30])
    before = cache.held()
    mark = cache.mark()
    first = read(model, cache, ids[:, 30:70], [20] + [1] * 20)
    assert (cache.held()[..., -1] >= before[..., -1] + 10).all()
    cache.rewind(mark)
    assert cache.length == 30 and torch.equal(cache.held(), before)
    other = tokens(80).flip(1)
    read(model, cache, other[:, 30:47], [1] * 17)
    cache.rewind(mark)
    again = read(model, cache, ids[:, 30:70], [20] + [1] * 20)
    assert torch.equal(first, again)
    del mark
    last = read(model, cache, ids[:, 70:], [1] * 10)
    assert (cache.held()[..., -1] <= 5).all()
    same(last, read(model, KVCache(2), ids, [30, 40, 10])[:, 70:], 2.0**-20)


@pytest.mark.parametrize("config", [{}, {"ssmax": True}])
@torch.no_grad()
def test_greedy_generation_is_the_same(config: dict) -> None:
    model = fading(**config)
    prompts = [tokens(70)[0].tolist(), tokens(70)[1, :31].tolist()]
    dense = model.generate(prompts, max_new_tokens=8)
    assert model.generate(prompts, max_new_tokens=8, cache="paged") == dense
    assert dense[0] != dense[1]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ggd"])
@torch.no_grad()
def test_the_decoding_kernel_reads_the_same_pages(name: str) -> None:
    """Triton's kernel, float32, against gathered pages: sums in another order, 24 bits."""
    gathering = "auto" if DEVICE.type == "cpu" else "reference"  # on CUDA "auto" reads them in place
    config = dict(num_layers=1, dim=64, num_heads=4, num_kv_heads=2) if name == "rope" else dict(num_layers=1)
    model = (fading(heads=2, retrieval=1, **config) if name == "ggd" else small(name, **config)).float().to(DEVICE)
    ids, chunks = tokens(40).to(DEVICE), [37, 2, 1]
    segments = torch.tensor([[0] * 40, [-1] * 5 + [0] * 35], device=DEVICE)
    for marks in (None, segments):
        by_kernel, gathered = paged(model, 40, block=16), paged(model, 40, block=16)
        read(model, by_kernel, ids[:, :37], [37], None if marks is None else marks[:, :37])
        rest = None if marks is None else marks[:, 37:]
        found = read(model, by_kernel, ids[:, 37:], chunks[1:], rest, kernel="triton")
        expected = read(model, gathered, ids, chunks, marks, kernel=gathering)[:, 37:]
        same(found, expected, 2.0**-16)


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "message"), [(16, "no gradient"), (4, "power of two of keys")])
def test_the_decoding_kernel_says_what_it_cannot_do(block: int, message: str) -> None:
    """Gathering can: it hands a gradient to the new tokens."""
    model, prompt, token = small("ggd").float().to(DEVICE), tokens(20).to(DEVICE), tokens(1).to(DEVICE)
    cache = paged(model, 40, block=block)
    with torch.no_grad():
        model.forward_features(prompt, cache=cache)
    with torch.set_grad_enabled(block == 16), pytest.raises(ValueError, match=message):
        model.forward_features(token, cache=cache, kernel="triton")
    weight = model.layers[0].attention.query.weight
    (grad,) = torch.autograd.grad(model.forward_features(token, cache=cache).sum(), weight)
    assert grad.abs().max() > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: small("fire").generate([[1, 2]], max_new_tokens=2, cache="paged"), "Fire"),
        (lambda: small("ggd").new_cache(8, "page"), "did you mean 'paged'"),
        (lambda: small("ggd").new_cache(kind="paged"), "needs its capacity"),
        (lambda: PagedCache(1, horizon=0), "horizon must be a whole number of 1 or more, got 0"),
        (lambda: PagedCache(2, horizon=9, bounds=bounds(small("ggd"), 8, 4)), "up to 9 tokens"),
        (lambda: small("ggd").forward_features(tokens(9), cache=paged(small("ggd"), 8)), "made for 8 tokens"),
    ],
)
@torch.no_grad()
def test_bad_requests_are_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
