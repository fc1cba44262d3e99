"""What a submitted job may make a service open on its machine: paths under the operator's roots.

A job names paths in `model.path`, `critic.model.path`, `data.name`, the names in
`evaluation.data`, `rollout.snapshot_dir` and `algorithm.custom`, which the learner runs. A service
that others can reach opens only those under `--allow-paths` (HEADWAY_ALLOW_PATHS); one on
loopback, whose users have this machine's files anyway, opens any. Hub names and `wheel:`
requirements are no paths: they lead to the hub and the index that the operator configured, and a
URL in their place is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from headway.errors import InvalidSpec
from headway.jobspec import JobSpec
from headway.models import expand_user, is_hub_name, is_wheel

ANYWHERE = "*"
SETTING = "HEADWAY_ALLOW_PATHS"


def allowed_roots(env: Mapping[str, str] = os.environ) -> tuple[Path, ...] | None:
    """The folders under which a job may name paths; None: anywhere.

    InvalidSpec when one is no absolute path.
    """
    text = env.get(SETTING, ANYWHERE)
    if text == ANYWHERE:
        return None
    roots = tuple(Path(part) for part in text.split(os.pathsep) if part)
    for root in roots:
        if not root.is_absolute():
            raise InvalidSpec(f"--allow-paths {str(root)!r} is no absolute path")
    return roots


def check_reach(spec: JobSpec, roots: tuple[Path, ...] | None) -> None:
    """InvalidSpec, without a word on what lies there, when a job names a path outside."""
    for key, text in _paths(spec):
        if "://" in text:
            raise InvalidSpec(f"{key} {text[:200]!r}: a URL is not fetched; name a path or model")
        if roots is None:
            continue
        # Links are followed first: what counts is where a path leads.
        where = expand_user(text, key).resolve()
        if "\0" in text or not any(where.is_relative_to(root.resolve()) for root in roots):
            named = ", ".join(map(str, roots)) or "none"
            raise InvalidSpec(
                f"{key} {text[:200]!r}: jobs here may name paths under these folders only:"
                f" {named} (--allow-paths)"
            )


def _paths(spec: JobSpec) -> Iterator[tuple[str, str]]:
    models = {"model.path": spec.model.path, "critic.model.path": spec.critic.model.path}
    for key, model in models.items():
        if model is None or is_wheel(model):
            continue
        if not is_hub_name(model) or Path(model).exists():
            yield key, model
    for data_key, data in spec.data_sets.items():
        if data.source != "reasoning_gym":
            yield f"{data_key}.name", data.name
    if spec.rollout.snapshot_dir is not None:
        yield "rollout.snapshot_dir", spec.rollout.snapshot_dir
    if spec.algorithm.custom is not None:
        yield "algorithm.custom", spec.algorithm.custom
