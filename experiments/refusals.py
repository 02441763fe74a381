"""What is wrong with the arguments or the folders is one line, and exit status 2."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refusals() -> Iterator[None]:
    """Around every check and every load: a ValueError is the user's to mend, and no traceback."""
    try:
        yield
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
