"""What DNA evaluators share: settings, held-out data, tokens as windows of bases; and those of the
entries of a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from typing_extensions import TypeVar

from modalities.dna.baselines import MarkovChain
from modalities.dna.genome import Genome, open_genome
from modalities.dna.scoring import STRANDS
from modalities.dna.sources import DEFAULT_SOURCE, DnaSource, find_source
from modalities.dna.splits import GenomeSplit, open_heldout
from modalities.dna.tokenizers import load_tokenizer
from modalities.evaluation import Evaluator, Listing
from modalities.loading import Heldout
from modalities.results import Axis, CellValue, Row, compact
from modalities.settings import LengthSettings, Settings, check_choice, counts, option
from zoo.model import ZooModel

BASES_LENGTH = Axis("length", "length (bases, log₂)", compact)
# Share of the held-out bases whose contigs must have room for a default length.
ENOUGH = 0.9


@dataclass(frozen=True)
class DnaSettings(Settings):
    """A source, and how it is split."""

    split: str | None = option(
        None, "BED file of what --source holds out; default: the source's own"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split is not None and self.source is None:
            raise ValueError(f"split {self.split!r} needs the source that it splits")


@dataclass(frozen=True)
class StrandSettings(Settings):
    """Which strands likelihoods are of."""

    strands: str | None = option(
        None,
        "one, or both: the mean of a window and its reverse complement; "
        "default: as the model's config says",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("strands", self.strands, STRANDS)


@dataclass(frozen=True)
class DnaLengthSettings(LengthSettings, DnaSettings):
    """Lengths are in bases, whatever a token is."""

    lengths: tuple[int, ...] | None = option(
        None, "bases, as 512,4k; default: by the training length", parse=counts
    )

    factors: ClassVar[tuple[int, ...]] = (1, 2, 4, 8, 16, 32, 64)
    counted: ClassVar[str] = "bases"


D = TypeVar("D", bound=DnaSettings, default=DnaLengthSettings)


class FittingEvaluator(Evaluator[D, ZooModel]):
    """An evaluator of DNA.

    `heldout` is of `source`, to whose training split baselines are fitted.
    """

    unit = "bases"

    @cached_property
    def source(self) -> DnaSource:
        return heldout_source(self.settings, self.trained_on)

    @property
    def heldout(self) -> Heldout[GenomeSplit]:
        return open_heldout(self.source)

    def run(
        self, model: ZooModel, finished: Mapping[str, CellValue] | None = None
    ) -> Iterator[tuple[str, CellValue]]:
        """As `Evaluator.run`; baselines are fitted first."""
        if isinstance(model, MarkovChain):
            model.fit(self.heldout)
        yield from super().run(model, finished)


class DnaEvaluator(FittingEvaluator[D]):
    """An evaluator of held-out DNA (`heldout_source`)."""

    settings_class: ClassVar[type[Settings]] = DnaLengthSettings

    def contents(self) -> str:
        """What is measured of the source: how much of it, contigs and bases."""
        contigs = self.heldout.items.contigs
        bases = sum(sum(map(len, regions)) for regions in contigs.values())
        names = ", ".join(list(contigs)[:6])
        if len(contigs) > 6:
            names += ", …"
        part = "" if self.source.whole else ", the held-out part"
        return f"{self.source.name}{part}: {bases:,} bases of {len(contigs)} contigs ({names})"

    @property
    def source_name(self) -> str:
        return self.source.name

    def trained_at(self, model: ZooModel) -> int:
        """The training length, in bases."""
        return window_of(model, model.config.train_context)

    def longest(self, model: ZooModel) -> int | None:
        most = super().longest(model)
        return None if most is None else window_of(model, most)

    def with_room(self, lengths: tuple[int, ...], extra: int = 0) -> tuple[int, ...]:
        """Those of `lengths`, at least the first, that contigs with most held-out bases have room
        for, and `extra` more."""
        most = self.heldout.items.reaching(ENOUGH) - extra
        return tuple(length for length in lengths if length <= most) or lengths[:1]


def heldout_source(settings: DnaSettings, trained_on: Mapping[str, Any]) -> DnaSource:
    """The source that settings name, all of it held out where it has no split and training read
    none of it; by default that of the model's training, whose data section is `trained_on`."""
    if settings.source is None:
        return find_source(
            trained_on.get("source") or DEFAULT_SOURCE, trained_on.get("split") or None
        )
    source = find_source(settings.source, settings.split)
    if source.bed is not None or settings.source == trained_on.get("source"):
        return source
    if _share_files(source, trained_on):
        return source
    return replace(source, name=f"all of {source.name}", whole=True)


def _share_files(source: DnaSource, trained_on: Mapping[str, Any]) -> bool:
    """Whether training read one of a source's files."""
    if trained_on.get("source") is None:
        return False
    try:
        trained = find_source(trained_on["source"], trained_on.get("split"))
    except (FileNotFoundError, ValueError):
        # A source that is not on this machine is not this one.
        return False
    return any(
        path.samefile(trained_path) for trained_path in trained.files for path in source.files
    )


def strands_of(model: ZooModel, settings: StrandSettings) -> str:
    return settings.strands or model.config.strands


def window_of(model: ZooModel, length: int) -> int:
    """Bases of a window of `length` tokens: `length` times the tokenizer's mean bases per token."""
    return round(length * load_tokenizer(model.config.tokenizer).bases_per_token)


def whole_kmers(model: ZooModel, length: int) -> int:
    """Bases of a window of about `length`: rounded down to whole k-mers, at least one."""
    step = load_tokenizer(model.config.tokenizer).step
    return max(1, length // step) * step


@dataclass(frozen=True)
class FileSettings(DnaSettings, StrandSettings):
    """A file of sequences; the source is that which baselines are fitted to."""

    fasta: str | None = option(None, "file of sequences (FASTA, also compressed)")
    window: int | None = option(None, "bases read at once; default: the evaluator's own")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is not None:
            raise ValueError(
                f"every entry of a file is read; samples ({self.samples}) do not apply"
            )


F = TypeVar("F", bound=FileSettings, default=FileSettings)


class FileEvaluator(FittingEvaluator[F], Listing[F, ZooModel]):
    """Evaluators that read sequences of `fasta` in windows of `window` bases."""

    # The default of `window`, in training lengths.
    default_window: ClassVar[int]
    # Windows are a multiple of this many k-mers.
    window_step: ClassVar[int] = 1

    @property
    def source_name(self) -> str:
        return f"{self.settings.fasta}"

    def genome(self) -> Genome:
        if self.settings.fasta is None:
            raise ValueError(f"{self.name} reads a file of sequences: name one with --fasta")
        return open_genome(find_source(self.settings.fasta))

    def trained_at(self, model: ZooModel) -> int:
        """The training length, in bases."""
        return window_of(model, model.config.train_context)

    def window(self, model: ZooModel) -> int:
        """`window`, or the default, rounded down to a multiple of `window_step` k-mers.

        ValueError where that is 0.
        """
        tokenizer = load_tokenizer(model.config.tokenizer)
        step = tokenizer.step * self.window_step
        window = self.settings.window
        if window is None:
            window = window_of(model, self.default_window * model.config.train_context)
        if window < step:
            raise ValueError(
                f"window {window}: tokenizer {tokenizer.name!r} needs at least {step} bases"
            )
        return window // step * step

    def identity(self, model: ZooModel) -> Row:
        """The reading of a window; a baseline's numbers also depend on what it is fitted to."""
        return {
            "window": self.window(model),
            "strands": strands_of(model, self.settings),
            "tokenizer": load_tokenizer(model.config.tokenizer).fingerprint,
            "fitted_to": self.heldout.fingerprint if isinstance(model, MarkovChain) else None,
        }
