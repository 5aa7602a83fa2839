"""The functions that faults are injected into are where the list says."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter

import pytest

from tests.reliability.points import POINTS


@pytest.mark.parametrize("point", POINTS)
def test_is_there(point: str) -> None:
    module, name = point.split()[1].split(":")
    assert attrgetter(name)(import_module(module))
