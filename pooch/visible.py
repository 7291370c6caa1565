"""Text from files and models as it is shown: control characters, which could steer a terminal, are written out."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"


def visible(text: str) -> str:
    r"""Returns a text with all that a terminal would obey rather than show as an escape, such as "\x1b".

    Args:
        text: any text; line ends and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    return character.encode("unicode_escape").decode()
