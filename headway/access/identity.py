"""Who this process is to others: its token and its certificates, as its environment says.

HEADWAY_TOKEN, HEADWAY_TOKEN_FILE     the token it shows
HEADWAY_TLS_DIR, _CERT, _KEY, _CA     its certificates; _NAME: what the peers' are made out to
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from headway.access.secrets import read_secret
from headway.access.tls import TlsFiles, tls_files
from headway.access.tokens import TOKEN
from headway.errors import InvalidSpec


def own_token(env: Mapping[str, str] = os.environ) -> str:
    """The token this process shows; empty when it has none.

    InvalidSpec when it is none, or when others can read its file.
    """
    token, where = env.get("HEADWAY_TOKEN", "").strip(), "HEADWAY_TOKEN"
    if not token and (file := env.get("HEADWAY_TOKEN_FILE", "")):
        token, where = read_secret(Path(file), "the token file"), file
    if token and not TOKEN.fullmatch(token):
        raise InvalidSpec(f"{where} holds no Headway token: make one with `headway token create`")
    return token


def process_tls(env: Mapping[str, str] = os.environ) -> TlsFiles | None:
    """The certificates that the environment names."""
    parts = ("DIR", "CERT", "KEY", "CA", "NAME")
    folder, cert, key, ca, name = (env.get(f"HEADWAY_TLS_{part}", "") for part in parts)
    if ca and not (folder or cert or key):
        return None  # a caller that only has to know whom to believe over HTTP
    return tls_files(folder, cert, key, ca, name)
