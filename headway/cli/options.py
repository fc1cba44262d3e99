"""Options that several commands share, and what they mean."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click

from headway.access.secrets import check_no_password, read_secret
from headway.errors import InvalidSpec, Unavailable
from headway.fleet.spec import DEFAULT_API_PORT, LocalFleetSpec, split_cores
from headway.fleet.state import default_state_dir, read_state
from headway.jobspec import MAX_JOB_BYTES, DataSpec, EvalDataSpec, JobSpec, load_job
from headway.models import check_model, expand_user
from headway.ports import is_loopback
from headway.settings import check_level, parse_cores
from headway.yamls import load_yaml

if TYPE_CHECKING:
    from headway.client import HeadwayClient

F = TypeVar("F", bound=Callable[..., Any])
D = TypeVar("D", DataSpec, EvalDataSpec)

job_file = click.argument("job_file", metavar="JOB.yaml", type=click.Path(path_type=Path))
overrides = click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override one key of the job."
)
api = click.option(
    "--url",
    envvar="HEADWAY_URL",
    help="The coordinator's REST API (env HEADWAY_URL). Default: the fleet on this machine.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="JSON for programs.")


def fleet_options(command: F) -> F:
    """The options that say how a local fleet is made."""
    options = (
        click.option(
            "--rollouts", type=click.IntRange(0, 1000), default=1, show_default=True,
            help="Rollout nodes.",
        ),
        click.option(
            "--engine", type=click.Choice(["vllm", "sim"]), default="vllm", show_default=True,
            help="sim imitates a model: for trying the fleet without one.",
        ),
        click.option(
            "--redis", "redis_url", envvar="HEADWAY_REDIS_URL",
            help="Redis or Valkey to use (env HEADWAY_REDIS_URL). Default: an embedded one.",
        ),
        click.option(
            "--runs-dir", type=click.Path(path_type=Path, file_okay=False), default=Path("runs"),
            show_default=True, help="Where run folders are written.",
        ),
        click.option("--learner-cores", help="CPU list, such as 0-3. Default: half of them."),
        click.option("--rollout-cores", help="CPU list, such as 4-7. Default: the other half."),
        click.option(
            "--port", type=click.IntRange(1, 65535), default=DEFAULT_API_PORT, show_default=True,
            help="Port of the REST API.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def fleet_spec(
    rollouts: int,
    engine: str,
    redis_url: str | None,
    runs_dir: Path,
    learner_cores: str | None,
    rollout_cores: str | None,
    port: int,
    ephemeral: bool = False,
) -> LocalFleetSpec:
    """The fleet that the options describe.

    InvalidSpec for cores that are not there, and for a password on the command line.
    """
    if redis_url and redis_url != os.environ.get("HEADWAY_REDIS_URL"):
        check_no_password(redis_url)
    try:
        check_level(os.environ.get("HEADWAY_LOG_LEVEL") or "info")
    except InvalidSpec as error:
        raise InvalidSpec(f"HEADWAY_LOG_LEVEL: {error}") from None
    ours = tuple(sorted(os.sched_getaffinity(0)))
    learner, rollout = split_cores(ours)
    return LocalFleetSpec(
        state_dir=default_state_dir(),
        runs_dir=runs_dir.absolute(),
        engine="sim" if engine == "sim" else "vllm",
        num_rollouts=rollouts,
        learner_cores=_cores("--learner-cores", learner_cores, ours) or learner,
        rollout_cores=_cores("--rollout-cores", rollout_cores, ours) or rollout,
        api_port=port,
        redis_url=redis_url or None,
        ephemeral=ephemeral,
    )


def read_job(path: Path, overrides: Sequence[str]) -> JobSpec:
    """The job with its overrides; folders and files are made absolute.

    InvalidSpec for a bad file, override, key or value.
    """
    job = load_job(path, [parse_override(text) for text in overrides], MAX_JOB_BYTES)
    if check_model(job.model.path) == "folder":
        folder = str(expand_user(job.model.path, "model.path").absolute())
        job = job.model_copy(update={"model": job.model.model_copy(update={"path": folder})})
    own = job.critic.model.path
    if own is not None and check_model(own, "critic.model.path") == "folder":
        folder = str(expand_user(own, "critic.model.path").absolute())
        model = job.critic.model.model_copy(update={"path": folder})
        job = job.model_copy(update={"critic": job.critic.model_copy(update={"model": model})})
    if job.kind == "train":
        job = job.model_copy(update={"data": _at_home(job.data, "data")})
    held_out = tuple(
        _at_home(data, f"evaluation.data.{i}") for i, data in enumerate(job.evaluation.data)
    )
    evaluation = job.evaluation.model_copy(update={"data": held_out})
    job = job.model_copy(update={"evaluation": evaluation})
    if job.algorithm.custom is not None:
        custom = str(expand_user(job.algorithm.custom, "algorithm.custom").absolute())
        algorithm = job.algorithm.model_copy(update={"custom": custom})
        job = job.model_copy(update={"algorithm": algorithm})
    return job


def api_url(given: str | None) -> str:
    """Where the coordinator is. Unavailable when none is given and no fleet is up here."""
    if given:
        return given
    state = read_state(default_state_dir())
    if state is None:
        raise Unavailable("no fleet is up on this machine: start one with `headway up`, or --url")
    return state.api_url


def connect(given: str | None) -> HeadwayClient:
    """A client of the coordinator at `given`, or of the fleet on this machine.

    The fleet on this machine is shown the token that it made for us; any other that of
    HEADWAY_TOKEN or HEADWAY_TOKEN_FILE.
    """
    from headway.client import HeadwayClient  # what a bad job need not wait for

    url = api_url(given)
    state = read_state(default_state_dir())
    if state is not None and state.token_file and state.api_url == url.rstrip("/"):
        return HeadwayClient(url, read_secret(Path(state.token_file), "the fleet's token"))
    return HeadwayClient(url)


def is_local(url: str) -> bool:
    """Whether the coordinator is on this machine, so that paths mean the same to it."""
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:  # whoever connects says what is wrong with it
        return False


def parse_override(text: str) -> tuple[str, Any]:
    """Key and value of one --set. InvalidSpec when it has no `=`."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InvalidSpec(f"--set {text!r} is not of the form key=value, such as seed=1")
    try:
        return key.strip(), load_yaml(value)
    except InvalidSpec:
        return key.strip(), value


def _at_home(data: D, key: str) -> D:
    """The data set with its file's whole path."""
    if data.source == "reasoning_gym":
        return data
    file = str(expand_user(data.name, f"{key}.name").absolute())
    return data.model_copy(update={"name": file})


def _cores(flag: str, text: str | None, ours: tuple[int, ...]) -> tuple[int, ...]:
    try:
        cores = parse_cores(text or "")
    except InvalidSpec as error:
        raise InvalidSpec(f"{flag}: {error}") from None
    if missing := [core for core in cores if core not in ours]:
        raise InvalidSpec(f"{flag}: this process may not use core {missing[0]} (it has {ours})")
    return cores
