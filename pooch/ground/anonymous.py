"""Texts that can be sent to others: without names of users and hosts, and without paths."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_PATH = re.compile(r"(?<![\w/.])/([^\s/:'\",;()]+)(?:/[^\s:'\",;()]*)+")
_SHORTEST = 3  # letters of a name that is looked for anywhere; shorter ones are parts of words
_NOT_PERSONAL = {"root", "user", "localhost", "cpu", "cuda"}


def without_names(document: Any) -> Any:
    """Return the same document with all of its texts made anonymous; keys of mappings are left alone.

    Args:
        document: texts, numbers, and mappings and sequences of them.
    """
    if isinstance(document, str):
        return _anonymous(document)
    if isinstance(document, Mapping):
        return {key: without_names(each) for key, each in document.items()}
    if isinstance(document, Sequence):
        return [without_names(each) for each in document]
    return document


def _anonymous(text: str) -> str:
    for path, name in _known_paths():
        text = text.replace(path, name)
    text = _PATH.sub(r"/\1/...", text)
    for name, instead in _personal_names():
        text = re.sub(re.escape(name), instead, text, flags=re.IGNORECASE)
    return text


@cache
def _known_paths() -> tuple[tuple[str, str], ...]:
    """Directories of this process, which may have blanks in their names, the longest first."""
    named = {
        str(Path.home()): "HOME",
        sys.prefix: "PYTHON",
        tempfile.gettempdir(): "TEMPORARY",
        str(Path.cwd()): "HERE",
    }
    named.update({os.environ[name]: name for name in ("POOCH_SPILL_DIRECTORY", "CXX") if os.environ.get(name)})
    long = {path: name for path, name in named.items() if len(path) > 1}
    return tuple(sorted(long.items(), key=lambda each: -len(each[0])))


@cache
def _personal_names() -> tuple[tuple[str, str], ...]:
    host = socket.gethostname()
    found = {host: "HOST", host.partition(".")[0]: "HOST", _user(): "USER", Path.home().name: "USER"}
    wanted = {name: instead for name, instead in found.items() if len(name) >= _SHORTEST}
    return tuple((name, instead) for name, instead in wanted.items() if name.lower() not in _NOT_PERSONAL)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a process of a user who has no name
        return ""
