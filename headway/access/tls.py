"""Certificates: what a process shows, and whom it believes.

gRPC is mutual: each side shows its certificate and both check the other's against the fleet's
CA. HTTP shows the server's certificate only; its callers are known by their tokens.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from headway.access.secrets import read_secret
from headway.errors import InvalidSpec

FOLDER_NAMES = ("tls.crt", "tls.key", "ca.crt")
"""Certificate, key and CA in a `--tls-dir`: the names of a Kubernetes TLS secret."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. `name` is the one peers' certificates carry when it is not their address."""

    cert: Path
    key: Path
    ca: Path
    name: str = ""

    def check(self) -> None:
        """InvalidSpec when a file is missing, damaged, open to others, or fits no other."""
        read_secret(self.key, "the TLS key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for file in (self.cert, self.ca):
            if not file.is_file():
                raise InvalidSpec(f"TLS: there is no file {file}")
        try:
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise InvalidSpec(f"TLS: {self.cert} with {self.key}: {error}") from None
        try:
            context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            raise InvalidSpec(f"TLS: {self.ca} holds no certificates: {error}") from None


def tls_files(
    folder: str = "", cert: str = "", key: str = "", ca: str = "", name: str = ""
) -> TlsFiles | None:
    """The files that the settings name, each by itself or all by their folder; None: no TLS.

    InvalidSpec when only some are named, or one cannot be used.
    """
    given = [cert, key, ca]
    if folder:
        named = zip(given, FOLDER_NAMES, strict=True)
        given = [path or str(Path(folder) / default) for path, default in named]
    if not any(given):
        return None
    if not all(given):
        raise InvalidSpec("TLS needs all of --tls-cert, --tls-key and --tls-ca, or --tls-dir")
    files = TlsFiles(Path(given[0]), Path(given[1]), Path(given[2]), name)
    files.check()
    return files
