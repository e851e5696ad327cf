"""A few hostile inputs for every parser; `nox -s fuzz` gives each of them fifty thousand."""

import pytest

from dst.fuzz import PARSERS, fuzz


@pytest.mark.parametrize("parser", PARSERS)
def test_hostile_input_is_taken_or_refused_in_one_line(parser: str) -> None:
    assert fuzz(parser, 10**6, 60) is None
