"""The error of an image that cannot be used."""


class BadImage(ValueError):
    """An image that is skipped: `reason` is what reports count, `detail` is for people."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
