"""Writing a result so that nobody ever sees half of it."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def moved_into_place(option: str, path: Path | None) -> Iterator[Path | None]:
    """Give a file beside ``path`` to write to, and move it there at the end.

    Whether the place can be written is known before anything is computed.

    Args:
        option: of a command, for errors: ``--json``.
        path: where the file is to be; None: nothing is written.

    Yields:
        The file to write to, or None.

    Raises:
        ValueError: a place that can't be written.
    """
    if path is None:
        yield None
        return
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            raise ValueError(f"{option} {path}: must be a file; got another thing")
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".sfa-")
        os.close(handle)
    except OSError as error:
        raise ValueError(f"{option} {path}: must be a file that can be written; got {error.strerror}") from error
    scratch = Path(name)
    try:
        yield scratch
        mask = os.umask(0)
        os.umask(mask)
        scratch.chmod(0o666 & ~mask)  # mkstemp makes it the owner's alone
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
