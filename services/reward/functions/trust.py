"""Whether the operator lets users' functions run outside the sandbox (`--trust-functions`)."""

from __future__ import annotations

_trusted = False


def trust_functions() -> None:
    """From now on graders with `sandbox: false` are run by this worker."""
    global _trusted
    _trusted = True


def functions_are_trusted() -> bool:
    """What the operator has said."""
    return _trusted
