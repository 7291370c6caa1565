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


def one_line(text: str, most: int = 40) -> str:
    """Returns a name in one line of a bounded length, as `repr` shows it.

    Args:
        text: any text.
        most: characters; a longer text loses its middle.
    """
    line = visible(" ".join(text[: 100 * most].split()))
    if len(line) <= most:
        return line
    end = (most - 3) // 2
    return f"{line[: most - 3 - end]}...{line[len(line) - end :]}"


def _shown(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    return character.encode("unicode_escape").decode()
