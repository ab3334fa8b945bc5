"""What cannot be done is an error, whose message says why in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def refuses(
    words: str | None,
    call: Callable[..., object],
    /,
    *arguments: object,
    error: type[Exception] | tuple[type[Exception], ...] = ValueError,
    **options: object,
) -> str:
    """The message of the error that a call raises: one line, in which the regular expression
    `words`, if any, is found."""
    __tracebackhide__ = True
    with pytest.raises(error, match=words) as raised:
        call(*arguments, **options)
    message = str(raised.value)
    assert "\n" not in message, message
    return message
