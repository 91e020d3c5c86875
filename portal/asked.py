"""Reading what addresses and forms carry: text from strangers, on its way to the database."""


def whole(text: str | None, below: int = 2**63) -> int | None:
    """The number that the text writes in ASCII digits, if it fits a column; else None."""
    if not text or len(text) > 19 or not (text.isascii() and text.isdigit()):
        return None
    number = int(text)
    return number if number < below else None


def plain(text: str) -> str:
    """The text without NUL, which no text column takes."""
    return text.replace("\0", "")
