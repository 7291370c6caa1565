"""The checksum that devices compute, here on the CPU, which has the same operators."""

from __future__ import annotations

import pytest
import torch

from pooch.torchtools.checksums import _reduced


@pytest.mark.parametrize("size_bytes", [5, 4096, 3 * 2**20 + 8 * 700 + 3])
def test_a_changed_byte_and_a_moved_one_are_noticed(size_bytes: int) -> None:
    """Sizes of less than a word, of some rows, and of two squares with rows, words and bytes beyond."""
    torch.manual_seed(0)
    data = torch.randint(0, 255, (size_bytes,), dtype=torch.uint8)
    expected = _reduced(data.untyped_storage())
    assert _reduced(data.clone().untyped_storage()) == expected
    for position in {0, size_bytes // 2, size_bytes - 1}:
        changed = data.clone()
        changed[position] += 1
        assert _reduced(changed.untyped_storage()) != expected
    assert _reduced(data.roll(1).untyped_storage()) != expected


def test_words_that_change_places_are_noticed() -> None:
    words = torch.arange(2**19)
    expected = _reduced(words.untyped_storage())
    for first, second in [(0, 1), (0, 512), (3, 2**18 + 3), (2**18 - 1, 2**18)]:
        swapped = words.clone()
        swapped[first], swapped[second] = words[second], words[first]
        assert _reduced(swapped.untyped_storage()) != expected
