"""Placeholder until the kernel lands: see the kernel owner."""

from zoo.attention.base import AttentionCall


def refuses(call: AttentionCall) -> str | None:
    return "not built yet"


def run(call: AttentionCall):
    raise NotImplementedError
