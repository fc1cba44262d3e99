"""A process's own access: whom it lets in, and who it is to others.

Settled by the environment, which `headway.settings` fills from the flags, so that what a
service starts (the learner's ranks, say) is the same to others. Servers and channels ask here
when they are not told otherwise: a door that nobody thought of is shut like all the others.
HEADWAY_TOKENS names the file of the tokens let in; the process's own token
(`headway.access.identity`) is let in too: whoever has it is of our fleet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headway.access.gate import Gate
from headway.access.identity import own_token, process_tls
from headway.access.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class Access:
    """What guards a process's doors, and what it shows at others'."""

    gate: Gate | None = None  # None: no tokens; only this machine can reach us
    token: str = field(default="", repr=False)
    tls: TlsFiles | None = None


def process_access(env: Mapping[str, str] = os.environ) -> Access:
    """The access that the environment describes. InvalidSpec when it is faulty."""
    token = own_token(env)
    accepted = env.get("HEADWAY_TOKENS", "")
    gate = Gate(Path(accepted) if accepted else None, token) if accepted or token else None
    return Access(gate, token, process_tls(env))
