"""The functions that faults are injected into are where the list says."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter

import pytest

from tests.reliability.points import POINTS


@pytest.mark.parametrize("point", POINTS)
def test_is_there(point: str) -> None:
    """Itself, not in a class that it is inherited from: there injection would not find it."""
    module, path = point.split()[1].split(":")
    owner, _, name = path.rpartition(".")
    found = import_module(module)
    assert name in vars(attrgetter(owner)(found) if owner else found)
