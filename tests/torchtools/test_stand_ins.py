"""Stand-ins for functions, in place as long as anybody uses them."""

from __future__ import annotations

from types import SimpleNamespace

from pooch.torchtools.stand_ins import Place, StandIns


class User:
    """Uses stand-ins."""


def test_a_user_that_was_dropped_does_not_keep_them_in_place() -> None:
    owner = SimpleNamespace(name="there before")
    stand_ins = StandIns(Place(owner, "name", lambda original: f"instead of what was {original}"))
    dropped, user = User(), User()
    stand_ins.use(dropped)
    stand_ins.use(user)
    del dropped
    assert owner.name == "instead of what was there before"
    stand_ins.leave(user)
    assert owner.name == "there before"
