"""What text evaluators share: the held-out documents that they read, and what statements are hidden
in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from modalities.decoder.model import Decoder
from modalities.evaluation import Evaluator, S
from modalities.loading import Heldout
from modalities.results import ModelResult, Row
from modalities.settings import LengthSettings
from modalities.text.config import DEFAULT_SOURCE
from modalities.text.data import MOST_DOCUMENTS, EncodedDocument, open_heldout
from modalities.text.prompts import Haystack, open_haystack
from modalities.text.tokenizers import load_tokenizer


class TextEvaluator(Evaluator[S, Decoder]):
    """An evaluator that reads held-out documents: those of `settings.source`, else those that
    training held out."""

    # What `cells` has to say of the held-out documents that it reads and leaves out.
    data_line = ""

    @property
    def text_name(self) -> str:
        """The source of the held-out documents."""
        training_source = self.trained_on.get("source", DEFAULT_SOURCE)
        heldout_source = self.trained_on.get("heldout_source")
        return self.settings.source or heldout_source or training_source

    @property
    def source_name(self) -> str | None:
        return self.text_name

    def heldout_for(self, model: Decoder) -> Heldout[tuple[EncodedDocument, ...]]:
        """The documents in the model's tokens."""
        split = "heldout"
        if self.settings.source is None and self.trained_on.get("heldout_source") is not None:
            # That source is held out as a whole.
            split = "all"
        return open_heldout(self.text_name, model.config.tokenizer, split)

    def identity(self, model: Decoder) -> Row:
        """The documents in the model's tokens, and all settings but the source."""
        identity = super().identity(model)
        identity.pop("source", None)
        return identity | {"text": self.heldout_for(model).fingerprint}

    def describe(self, documents: Sequence[EncodedDocument], length: int) -> int:
        """Set `data_line`: how many documents have `length` tokens, which it returns."""
        enough = sum(len(document.tokens) >= length for document in documents)
        count = len(documents)
        read = f"first {count:,}" if count == MOST_DOCUMENTS else f"{count:,}"
        self.data_line = (
            f"{enough:,} of the {read} held-out documents of {self.text_name} "
            f"have {length:,} tokens"
        )
        if enough < count:
            self.data_line += f"; left out: {count - enough:,} with fewer"
        return enough

    def samples_line(self, results: list[ModelResult]) -> str:
        """What was measured, counted."""
        return f"{len(results[0].cells):,} samples"

    def measured(self, results: list[ModelResult]) -> str:
        line = f"{self.name}: {self.samples_line(results)} measured"
        if self.data_line:
            line += f"; {self.data_line}"
        if isinstance(self.settings, LengthSettings):
            missing: set[int] = set()
            for result in results:
                missing.update(self.settings.resolved_lengths(result.trained_at))
            for result in results:
                missing.difference_update(row["length"] for row in result.rows)
            if missing:
                lengths = ", ".join(f"{length:,}" for length in sorted(missing))
                line += f"; left out: lengths {lengths}, for which the model has no positions"
        return line


class HaystackEvaluator(TextEvaluator[S]):
    """An evaluator that hides statements in a haystack.

    ValueError for a source of held-out text and another filler.
    """

    def __init__(
        self, settings: S | None = None, trained_on: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(settings, trained_on)
        source = self.settings.source
        if source and self.filler != "text":
            raise ValueError(
                f"source {source!r} is of held-out text, the filler is {self.filler!r}; "
                "add filler text"
            )

    @property
    @abstractmethod
    def filler(self) -> str:
        """The name of the haystack."""

    @property
    def source_name(self) -> str | None:
        return self.text_name if self.filler == "text" else self.filler

    def haystack(self, model: Decoder) -> Haystack:
        documents = self.heldout_for(model).items if self.filler == "text" else ()
        return _haystack(self.filler, model.config.tokenizer, documents)

    def identity(self, model: Decoder) -> Row:
        """The haystack in the model's tokens, and all settings but the source."""
        # Filler that is no text reads no documents.
        identity = Evaluator.identity(self, model)
        identity.pop("source", None)
        return identity | {"hay": self.haystack(model).fingerprint}

    def describe_hay(self, model: Decoder, length: int) -> None:
        """Set `data_line` for texts of up to `length` tokens."""
        if self.filler != "text":
            self.data_line = f"hay: {self.filler}"
        elif not self.describe(self.heldout_for(model).items, length):
            self.data_line = (
                f"hay: documents of {self.text_name} in a row, none of which has {length:,} tokens"
            )


@lru_cache(maxsize=4)
def _haystack(filler: str, tokenizer: str, documents: tuple[EncodedDocument, ...]) -> Haystack:
    texts = [document.tokens for document in documents]
    return open_haystack(filler, load_tokenizer(tokenizer), texts)
