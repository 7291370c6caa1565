"""Data that the program assigns to tensors which autograd has saved."""

import torch

from pooch.executor.records import Reassigned, pack_kept

LEAF = torch.ones(4, requires_grad=True)


def _made(data: torch.Tensor) -> torch.Tensor:
    hidden = LEAF * data
    hidden.sin()  # so that `hidden` is not the result of the newest node
    return hidden


def test_what_was_saved_is_read_with_its_new_data() -> None:
    hidden = _made(torch.ones(4))
    packed, assigned = pack_kept(hidden, -1), Reassigned()
    assigned.note(hidden, -1)
    hidden.data = torch.full((4,), 3.0)
    found = assigned.instead_of(packed)
    assert found is not None
    assert torch.equal(found, torch.full((4,), 3.0))


def test_a_tensor_at_the_address_of_one_that_was_saved_is_another() -> None:
    """Values that a plan does not know all have the same number, so that only the identity tells them apart."""
    data = torch.ones(4)
    before = _made(data)
    packed, number = pack_kept(before, -1), id(before)
    del before
    others = []
    for _ in range(1000):
        others.append(_made(data))
        if id(others[-1]) == number:
            break
    assert id(others[-1]) == number, "no tensor came to the same address, so that this test tells nothing"
    assigned = Reassigned()
    assigned.note(others[-1], -1)
    assert assigned.instead_of(packed) is None
