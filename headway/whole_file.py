"""Files that readers find whole or as they were before."""

from __future__ import annotations

import os
from pathlib import Path

from headway.errors import StorageFailed


def write_whole(target: Path, text: str) -> None:
    """Writes a UTF-8 file by a temporary name, then renames it. StorageFailed.

    Halves of surrogate pairs are written as their escapes.
    """
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(text.encode("utf-8", "backslashreplace"))
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise StorageFailed(f"cannot write {target}: {error.strerror}") from None
