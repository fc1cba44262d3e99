"""Secrets: files that their owner alone may read, and never on a command line."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from headway.errors import InvalidSpec

_MAX_BYTES = 64 << 10


def write_secret(path: Path, text: str) -> None:
    """Replaces a file at once by one that its owner alone may read and write (0600)."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.unlink(missing_ok=True)  # a crash's leftover; an older file may have wider rights
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_secret(path: Path, what: str) -> str:
    """The text of a secret file, blanks around it left out.

    InvalidSpec when it cannot be read, or when others on this machine can read it too. A
    file that another user (root) owns and lends to our group is fine: so mount orchestrators
    their secrets.
    """
    try:
        with path.open(encoding="utf-8") as file:
            facts = os.fstat(file.fileno())
            mode = stat.S_IMODE(facts.st_mode)
            ours = facts.st_uid == os.geteuid()
            if mode & (0o077 if ours else 0o007):
                raise InvalidSpec(f"{what} {path} is open to others (mode {mode:04o}): chmod 600")
            return file.read(_MAX_BYTES).strip()
    except OSError as error:
        raise InvalidSpec(f"{what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidSpec(f"{what} {path} holds no text") from None


def check_no_password(redis_url: str) -> None:
    """InvalidSpec when a URL from a command line holds a password, which others would see."""
    where = redis_url.rpartition("://")[2].partition("?")[0]
    before_host, at, _ = where.rpartition("@")
    if (at and ":" in before_host) or "password=" in redis_url:
        raise InvalidSpec(
            "--redis: a password on the command line is seen by everyone on this machine; give"
            " the URL in HEADWAY_REDIS_URL"
        )
