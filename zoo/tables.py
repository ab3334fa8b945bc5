"""Tables of what ships, which `priorzoo list` prints: (title, columns, rows) of words."""

from __future__ import annotations

from collections.abc import Sequence

from zoo.adapters import ADAPTER
from zoo.files import read_object
from zoo.plugins import headline_scores
from zoo.pretrained import WEIGHTS, weights_entry


def pretrained_tables(names: Sequence[str]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, rows) for the weights of each kind of data, with scores of the cards at the
    first and last place."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        groups.setdefault((name.partition("_")[0], name.rpartition(".")[2]), []).append(name)
    tables = []
    for (modality, tag), members in groups.items():
        cards = [weights_entry(name) for name in members]
        measured = cards[0]["measured"]
        axis = next(iter(measured[0]))
        score = next(
            name
            for name in headline_scores(modality)
            if max(row.get(name, 0.0) for row in measured) > 0.5
        )
        places = [row[axis] for row in measured if score in row]
        ends = list(dict.fromkeys([places[0], places[-1]]))
        trained = dict.fromkeys(
            str(card.get("train_context", card.get("image_size"))) for card in cards
        )
        title = f"{modality}, {tag}: {cards[0]['data'].partition(';')[0].partition(' (')[0]}"
        title += f"\ntrained at {axis} {', '.join(trained)}; {score} at {axis} {' and '.join(map(str, ends))}"
        rows = []
        for name, card in zip(members, cards, strict=True):
            scores = {row[axis]: f"{row[score]:.3f}" for row in card["measured"] if score in row}
            size = [f"{card['parameters'] / 1e6:.2f}M", f"{card['bytes'] / 1e6:.1f}"]
            rows.append([name, *size, *(scores.get(end, "–") for end in ends)])
        tables.append((title, ["name", "params", "MB", *map(str, ends)], rows))
    return tables


def adapters_table(names: Sequence[str]) -> tuple[str, list[str], list[list[str]]]:
    """(title, columns, rows) of shipped adapters. Reach is the longest text that was measured;
    scores are those there."""
    rows = []
    for folder in (WEIGHTS / name for name in names):
        record = read_object(folder / ADAPTER)
        base = record["base"]
        measured = record.get("measured") or [{}]
        parts = [f"{key}={value}" for key, value in (record["settings"] | record["reach"]).items()]
        if record["priors"] and not record["reach"] and record["priors"]["position"] != "nope":
            parts.append(record["priors"]["position"])
        method = ", ".join(parts + [f"LoRA {record['lora']}"] * bool(record["lora"]))
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        lengths = [f"{n:,}" for n in (base["window"], measured[-1].get("length", base["window"]))]
        scores = [
            f"{x:.3f}" if (x := measured[-1].get(score)) else "–"
            for score in ("bits_per_byte", "tokens_right")
        ]
        tokens = f"{record['training'].get('tokens', 0):,}"
        rows.append([folder.name, base["name"], method, *lengths, tokens, f"{size:.2f}", *scores])
    title = "adapters of released models\ntokens: trained on; at reach: bits per byte, share of facts' tokens right"
    return (
        title,
        ["name", "base", "method", "window", "reach", "tokens", "MB", "bits", "right"],
        rows,
    )
