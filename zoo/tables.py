"""Tables of what ships, which `priorzoo list` prints: (title, columns, rows) of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from zoo.adapters import ADAPTER
from zoo.files import read_object
from zoo.plugins import headline_scores
from zoo.pretrained import WEIGHTS, weights_entry

Table: TypeAlias = tuple[str, list[str], list[list[str]]]
# A table shows the first of a modality's scores that is above this in a row of the card.
LEAST_SCORE = 0.5


def pretrained_tables(names: Sequence[str]) -> list[Table]:
    """A table for the weights of each kind of data, with scores of the cards at the first and last
    place."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        modality = name.partition("_")[0]
        tag = name.rpartition(".")[2]
        groups.setdefault((modality, tag), []).append(name)
    return [_weights_table(modality, tag, members) for (modality, tag), members in groups.items()]


def _weights_table(modality: str, tag: str, names: Sequence[str]) -> Table:
    """The table of weights with one tag: trained on the same data and measured alike."""
    cards = [weights_entry(name) for name in names]
    measured = cards[0]["measured"]
    axis = next(iter(measured[0]))
    score = _headline(modality, measured)
    places = [row[axis] for row in measured if score in row]
    ends = list(dict.fromkeys([places[0], places[-1]]))
    trained = dict.fromkeys(
        str(card.get("train_context", card.get("image_size"))) for card in cards
    )
    data = cards[0]["data"].partition(";")[0].partition(" (")[0]
    title = (
        f"{modality}, {tag}: {data}\n"
        f"trained at {axis} {', '.join(trained)}; "
        f"{score} at {axis} {' and '.join(map(str, ends))}"
    )
    rows = []
    for name, card in zip(names, cards, strict=True):
        by_place = {row[axis]: f"{row[score]:.3f}" for row in card["measured"] if score in row}
        parameters = f"{card['parameters'] / 1e6:.2f}M"
        megabytes = f"{card['bytes'] / 1e6:.1f}"
        scores = [by_place.get(end, "–") for end in ends]
        rows.append([name, parameters, megabytes, *scores])
    return title, ["name", "params", "MB", *map(str, ends)], rows


def _headline(modality: str, measured: Sequence[Mapping[str, Any]]) -> str:
    """The modality's most telling score in which the rows of a card show something."""
    for score in headline_scores(modality):
        if max(row.get(score, 0.0) for row in measured) > LEAST_SCORE:
            return score
    raise ValueError(f"a card of {modality} has none of {', '.join(headline_scores(modality))}")


def adapters_table(names: Sequence[str]) -> Table:
    """The table of shipped adapters. Reach is the longest text that was measured; scores are those
    there."""
    title = (
        "adapters of released models\n"
        "tokens: trained on; at reach: bits per byte, share of facts' tokens right"
    )
    columns = ["name", "base", "method", "window", "reach", "tokens", "MB", "bits", "right"]
    return title, columns, [_adapter_row(WEIGHTS / name) for name in names]


def _adapter_row(folder: Path) -> list[str]:
    """The cells of an adapter in `adapters_table`."""
    record = read_object(folder / ADAPTER)
    window = record["base"]["window"]
    measured = record.get("measured") or [{}]
    longest = measured[-1]
    size = sum(file.stat().st_size for file in folder.iterdir())
    return [
        folder.name,
        record["base"]["name"],
        _adapter_method(record),
        f"{window:,}",
        f"{longest.get('length', window):,}",
        f"{record['training'].get('tokens', 0):,}",
        f"{size / 1e6:.2f}",
        _score(longest, "bits_per_byte"),
        _score(longest, "tokens_right"),
    ]


def _adapter_method(record: Mapping[str, Any]) -> str:
    """What an adapter changes of its base: settings, a reach or a prior, LoRA."""
    parts = [f"{key}={value}" for key, value in (record["settings"] | record["reach"]).items()]
    priors = record["priors"]
    if priors and not record["reach"] and priors["position"] != "nope":
        parts.append(priors["position"])
    if record["lora"]:
        parts.append(f"LoRA {record['lora']}")
    return ", ".join(parts)


def _score(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name]:.3f}" if row.get(name) else "–"
