"""A user's own advantages and losses: the file that `algorithm.custom` names."""

from __future__ import annotations

import runpy
from pathlib import Path

from headway.errors import InvalidSpec
from headway.jobspec import AlgorithmSpec
from headway.rl import names, registry
from services.learner.credit import estimator


def load_custom(algorithm: AlgorithmSpec) -> None:
    """Runs the file, if there is one. InvalidSpec: it fails, or a name of the job is unknown."""
    if algorithm.custom is not None:
        path = Path(algorithm.custom).expanduser()
        if not path.is_file():
            raise InvalidSpec(f"algorithm.custom: there is no file {path} on the learner's machine")
        try:
            runpy.run_path(str(path.resolve()))
        except (Exception, SystemExit) as error:
            raise InvalidSpec(
                f"algorithm.custom: {path} failed: {type(error).__name__}: {error}"
            ) from error
    try:
        if algorithm.adv_estimator not in (*names.PER_TOKEN, "remax"):
            estimator(algorithm)
        if algorithm.policy_loss not in names.POLICY_LOSSES:
            registry.policy_losses.get(algorithm.policy_loss)
    except KeyError as error:
        raise InvalidSpec(f"algorithm: {error.args[0]}") from None
