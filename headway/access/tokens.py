"""Bearer tokens: made once, shown once, kept as hashes.

A token is `hw_<id>_<secret>`; the id (8 hex digits) names it in lists, the secret is 32
random bytes. Kept is the SHA-256 of the whole text. What has 256 random bits cannot be
guessed from its hash, so a slow password hash would cost every request and win nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from headway.access.roles import ROLES, Role
from headway.access.secrets import write_secret
from headway.errors import InvalidSpec, NotFound

TOKEN = re.compile(r"hw_([0-9a-f]{8})_[A-Za-z0-9_-]{43}")
"""The form of a token; group 1 is its id."""

_NAME = re.compile(r"[\w .@+-]{1,64}")
_MAX_FILE_BYTES = 4 << 20
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What is kept of one token. Times are Unix seconds; `expires_at` None: never."""

    token_id: str
    name: str
    role: Role
    sha256: str
    created_at: float
    expires_at: float | None = None

    def expired(self, now: float) -> bool:
        """Whether its time is up."""
        return self.expires_at is not None and now >= self.expires_at


def new_token(
    role: Role, name: str, now: float, lifetime_s: float | None = None
) -> tuple[str, TokenRecord]:
    """A fresh token and what is kept of it. InvalidSpec for an unknown role or an odd name."""
    if role not in ROLES:
        raise InvalidSpec(f"{role!r} is no role; there are {', '.join(ROLES)}")
    if not _NAME.fullmatch(name):
        raise InvalidSpec(f"the token's name {name[:80]!r} is not 1 to 64 letters, digits, .@+-_")
    if lifetime_s is not None and not 0 < lifetime_s < 1e10:
        raise InvalidSpec(f"a token cannot live for {lifetime_s:g} s")
    token_id = secrets.token_hex(4)
    token = f"hw_{token_id}_{secrets.token_urlsafe(32)}"
    expires_at = None if lifetime_s is None else now + lifetime_s
    return token, TokenRecord(token_id, name, role, sha256_of(token), now, expires_at)


def sha256_of(token: str) -> str:
    """What is kept of a token, hexadecimal."""
    return hashlib.sha256(token.encode()).hexdigest()


class TokenFile:
    """The tokens that services accept: a JSON file of hashes that its owner alone may change.

    Changes are made under a lock and by renaming, so a service reads the old file or the new.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[TokenRecord, ...]:
        """All records. InvalidSpec: unreadable, damaged, or open to others' changes."""
        try:
            with self.path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if mode & 0o022:
                    raise InvalidSpec(
                        f"the token file {self.path} may be changed by others (mode {mode:04o}):"
                        " chmod 600"
                    )
                plain = json.loads(file.read(_MAX_FILE_BYTES))
        except OSError as error:
            raise InvalidSpec(f"the token file {self.path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise InvalidSpec(f"the token file {self.path} is damaged: no JSON") from None
        return _records(plain, self.path)

    def add(self, record: TokenRecord) -> None:
        """Adds a token; makes the file when there is none. A name may occur more than once."""
        with self._locked() as records:
            write_secret(self.path, _text((*records, record)))

    def revoke(self, token_id: str) -> TokenRecord:
        """Takes a token out. NotFound when there is none of this id."""
        with self._locked() as records:
            for record in records:
                if record.token_id == token_id:
                    write_secret(self.path, _text(tuple(r for r in records if r is not record)))
                    return record
        raise NotFound(f"there is no token {token_id[:80]!r} in {self.path}")

    def replace(self, record: TokenRecord) -> None:
        """Adds a token in place of all of the same name."""
        with self._locked() as records:
            others = tuple(r for r in records if r.name != record.name)
            write_secret(self.path, _text((*others, record)))

    @contextmanager
    def _locked(self) -> Iterator[tuple[TokenRecord, ...]]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise InvalidSpec(f"the token file {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.read() if self.path.exists() else ()
        finally:
            os.close(lock)


def parse_lifetime(text: str) -> float:
    """Seconds of `90d`, `12h`, `30m` or `45s`. InvalidSpec for anything else."""
    found = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if found is None or int(found[1]) == 0:
        raise InvalidSpec(f"{text!r} is no span of time: write 90d, 12h, 30m or 45s")
    return int(found[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[found[2]]


def add_token(
    file: TokenFile, role: Role, name: str, lifetime_s: float | None = None, only: bool = False
) -> tuple[str, TokenRecord]:
    """Makes a token and keeps its hash; `only`: in place of others of its name."""
    token, record = new_token(role, name, time.time(), lifetime_s)
    (file.replace if only else file.add)(record)
    return token, record


def _text(records: tuple[TokenRecord, ...]) -> str:
    rows = [asdict(record) for record in records]
    return json.dumps({"format": _FORMAT, "tokens": rows}, indent=2) + "\n"


def _records(plain: object, path: Path) -> tuple[TokenRecord, ...]:
    try:
        if not isinstance(plain, dict) or plain["format"] != _FORMAT:
            raise InvalidSpec(f"{path} is no token file of this version of Headway")
        records = tuple(TokenRecord(**row) for row in plain["tokens"])
        for record in records:
            if record.role not in ROLES or len(bytes.fromhex(record.sha256)) != 32:
                raise ValueError
            if not isinstance(record.token_id, str) or not isinstance(record.name, str):
                raise TypeError
            record.expired(0.0)
    except (KeyError, TypeError, ValueError):
        raise InvalidSpec(f"the token file {path} is damaged") from None
    return records
