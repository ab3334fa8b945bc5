"""Text models in lm-evaluation-harness, as its model `priorzoo`.

    priorzoo lm-eval --model priorzoo --model_args pretrained=text_ggd_ssmax_tiny.facts --tasks arc_easy

The harness knows the models of its own package and those of modules that have been imported; it looks for no entry points.
The command imports this module and hands its words over. In Python, `import modalities.text.lm_eval` comes before
`lm_eval.simple_evaluate(model="priorzoo", ...)`. Needs the extra `lm-eval`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from modalities.decoder.scoring import continuation_scores, continue_texts
from modalities.text.model import CausalLM
from modalities.text.tokenizers import load_tokenizer
from zoo.naming import check_options, nearest
from zoo.registry import create_model, list_models, load_model, model_entry
from zoo.slices import slices

__all__ = ["PriorzooLM"]

_log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@register_model("priorzoo")
class PriorzooLM(TemplateLM):
    """A text model that answers the harness' requests.

    BOS precedes every text, as in training. A context and its continuation are tokenised together and split at the context's
    length, spaces at its end go to the continuation: the harness' convention. Requests of one context read it once.

    Args:
        pretrained: a name with weights, the folder of a run or a checkpoint, or one written by `save_pretrained`.
        dtype: float32 or bfloat16, of the weights and of the forward pass. Softmaxes are taken in float64.
        device: such as cuda:1. Where torch sees no CUDA device it is the CPU: the harness' command asks for cuda:0 by itself.
        batch_size: contexts that are read together.
        max_length: tokens that a prediction sees at most, the newest ones; the rest is cut, with a warning. By default nothing
            is cut, whatever length the model was trained at.

    Raises:
        ValueError: for other arguments, values out of range, or a model without weights or of another modality.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        dtype: str = "float32",
        device: str = "cuda:0",
        batch_size: int | str = 1,
        max_length: int | None = None,
        **unknown: Any,
    ) -> None:
        check_options("the model priorzoo", type(self), {"pretrained", *unknown}, fixed=("unknown",))
        super().__init__()
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r}: {nearest(dtype, DTYPES)}")
        self._device = torch.device(device if torch.cuda.is_available() or not device.startswith("cuda") else "cpu")
        self.batch_size = _at_least_one("batch_size", batch_size)
        self.max_length = None if max_length is None else _at_least_one("max_length", max_length)
        self.model = _load(pretrained).to(device=self._device, dtype=DTYPES[dtype]).eval()
        self.tokenizer = load_tokenizer(self.model.config.tokenizer)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """From model_args, and the harness' own options, of which its command always gives a batch size: model_args win."""
        own = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**own | arg_dict)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.tokenizer.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text. BOS comes first, unless it is there already or `add_special_tokens` is False."""
        ids = self.tokenizer.encode(string).tolist()
        bos = [self.tokenizer.bos_id]
        return ids if add_special_tokens is False or ids[:1] == bos else bos + ids

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation in nats, and whether greedy decoding writes it.

        Raises:
            ValueError: for a continuation without tokens of its own, or one that `max_length` has no room for.
        """
        for pair, _context, tokens in requests:
            if not tokens:
                raise ValueError(f"the continuation of {pair} has no token of its own")
        contexts = self._fit([context for _, context, _ in requests], [len(tokens) for _, _, tokens in requests])
        sharing: dict[tuple[tuple[int, ...], int | None], list[int]] = {}
        for n, context in enumerate(contexts):
            # One token is quickly read again, and continuations of different rows are read together.
            sharing.setdefault((tuple(context), n if len(context) == 1 else None), []).append(n)

        def size(group: list[int]) -> tuple[int, int]:
            return len(contexts[group[0]]), max(len(requests[n][2]) for n in group)

        # Rows of a batch are of similar lengths; the longest come first, so that memory that is short is short at once.
        groups = sorted(sharing.values(), key=size, reverse=True)
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        with tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm) as bar:
            for part in slices(len(groups), self.batch_size):
                rows = groups[part]
                following = [[requests[n][2] for n in group] for group in rows]
                found = continuation_scores(self.model, [contexts[group[0]] for group in rows], following)
                for n, score in zip(chain(*rows), chain(*found), strict=True):
                    scores[n] = score
                    if (pair := requests[n][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", pair, score)
                    bar.update()
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text in nats: every token once, after all before it; with `max_length`, in windows."""
        windows: list[tuple[None, list[int], list[int]]] = []
        of: list[int] = []
        for n, (text,) in enumerate(request.args for request in requests):
            tokens = self.tok_encode(text, add_special_tokens=False)
            most = self.max_length or max(1, len(tokens))
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, most, 1):
                windows.append((None, *make_disjoint_window(window)))
                of.append(n)
        sums = [0.0] * len(requests)
        for n, (score, _) in zip(of, self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm), strict=True):
            sums[n] += score
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to EOS, a stop string, which is left out, or `max_gen_toks` tokens.

        Greedy unless the request's arguments sample: until, max_gen_toks, do_sample, temperature, top_k and top_p are served.

        Raises:
            ValueError: for other arguments, naming them.
        """
        alike: dict[str, list[int]] = {}
        for n, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(n)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="generation", disable=disable_tqdm) as bar:
            for group in alike.values():
                stop, most, sampling = _settings(requests[group[0]].args[1])
                prompts = self._fit([self.tok_encode(requests[n].args[0]) for n in group], [most] * len(group))
                order = sorted(range(len(group)), key=lambda n: len(prompts[n]), reverse=True)
                for part in slices(len(order), self.batch_size):
                    rows = order[part]
                    written = continue_texts(
                        self.model,
                        self.tokenizer,
                        [prompts[row] for row in rows],
                        max_new_tokens=most,
                        finished=[partial(_stopped, stop)] * len(rows),
                        **sampling,
                    )
                    for n, text in zip((group[row] for row in rows), written, strict=True):
                        texts[n] = text[: min((text.find(s) for s in stop if s in text), default=None)]
                        self.cache_hook.add_partial("generate_until", requests[n].args, texts[n])
                        bar.update()
        return texts

    def _fit(self, contexts: list[list[int]], following: list[int]) -> list[list[int]]:
        """Contexts cut from the left to what predictions of so many tokens after them may see."""
        if self.max_length is None or not contexts:
            return contexts
        rooms = [self.max_length + 1 - count for count in following]  # the last token predicted is not seen
        if min(rooms) < 1:
            raise ValueError(f"max_length={self.max_length} has no room for {max(following)} tokens after a context")
        cut = sum(len(context) > room for context, room in zip(contexts, rooms, strict=True))
        if cut:
            _log.warning("max_length=%d: %d of %d contexts are cut from the left", self.max_length, cut, len(contexts))
        return [context[-room:] for context, room in zip(contexts, rooms, strict=True)]


def _load(name: str) -> CausalLM:
    """The text model of a name with weights, or in a folder."""
    if Path(name).is_dir():
        model = load_model(name)
    elif "/" in name:
        raise ValueError(f"no folder {name!r}")
    elif "." not in name:
        tags = ", ".join(list_models(f"{model_entry(name).name}.*", pretrained=True))
        raise ValueError(f"{name} is untrained; with weights: {tags or 'none of this architecture'}")
    else:
        model = create_model(name)
    if not isinstance(model, CausalLM):
        raise ValueError(f"{name} is a model of {model.modality}; the harness' tasks are for models of text")
    return model


def _settings(gen_kwargs: Mapping[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
    """Stop strings, new tokens at most, and options of `stream`, from a request's arguments."""
    given = normalize_gen_kwargs(dict(gen_kwargs))
    check_options("generate_until", _served, given)
    return _served(**given)


def _served(
    until: Sequence[str | None],
    max_gen_toks: int,
    do_sample: bool | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> tuple[list[str], int, dict[str, Any]]:
    # `normalize_gen_kwargs` has set the temperature to 0 where nothing is sampled.
    return [s for s in until if s], max_gen_toks, dict(temperature=temperature, top_k=top_k, top_p=top_p)


def _stopped(stop: Sequence[str], text: str) -> bool:
    return any(s in text for s in stop)


def _at_least_one(name: str, value: int | str) -> int:
    if not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"{name}={value}: expected a number from 1 on")
    return int(value)
