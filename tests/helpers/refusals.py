"""A mistake of the user's must give one line that says where it is."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdsl.utils.errors import PdslError


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """Expects a PdslError of one line that has all of the parts."""
    with pytest.raises(PdslError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
