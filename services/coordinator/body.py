"""Reads a submitted job from the bytes of a request: JSON or YAML, whatever may be in them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import yaml

from headway.errors import InvalidSpec
from headway.graders import validate_grader
from headway.jobspec import MAX_JOB_BYTES, JobSpec, parse_job
from headway.yamls import MAX_DEPTH, StrictLoader, check_plain

MAX_BODY_BYTES = MAX_JOB_BYTES


@dataclass(frozen=True, slots=True)
class Submission:
    """A checked job and the id it was given in the body, if any."""

    spec: JobSpec
    job_id: str | None


def parse_submission(body: bytes, content_type: str) -> Submission:
    """The job in a request's body. InvalidSpec names every fault."""
    raw = _load(body, content_type)
    if not isinstance(raw, dict):
        raise InvalidSpec("the body is not a job: a JSON or YAML mapping is expected")
    check_plain(raw, "the body")
    job_id = raw.pop("job_id", None)
    if job_id is not None and not isinstance(job_id, str):
        raise InvalidSpec("job_id: a text is expected")
    return Submission(_checked(raw), job_id)


def _checked(raw: dict[str, Any]) -> JobSpec:
    faults = []
    spec = None
    try:
        spec = parse_job(raw)
    except InvalidSpec as error:
        faults.append(str(error))
    reward = raw.get("reward")
    # A missing grader, or one of the wrong type, is parse_job's to say.
    if isinstance(reward, dict) and isinstance(reward.get("grader"), dict):
        try:
            validate_grader(reward["grader"], path="reward.grader")
        except InvalidSpec as error:
            faults.append(str(error))
    if faults or spec is None:
        raise InvalidSpec("; ".join(faults))
    return spec


class _Loader(StrictLoader):
    """Plain YAML without aliases: a few hundred bytes of them stand for gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise InvalidSpec("the body is not taken: YAML aliases (*name) are refused")
        return super().compose_node(parent, index)


def _load(body: bytes, content_type: str) -> Any:
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidSpec(f"the body is not UTF-8: {error}") from None
    kind = "JSON" if content_type.partition(";")[0].strip() == "application/json" else "YAML"
    try:
        return json.loads(text) if kind == "JSON" else yaml.load(text, _Loader)
    except RecursionError:
        raise InvalidSpec(f"the body is nested more than {MAX_DEPTH} deep") from None
    except (ValueError, yaml.YAMLError, AttributeError) as error:
        # AttributeError: PyYAML on a few malformed tags and timestamps.
        raise InvalidSpec(f"the body is not {kind}: {error}") from None
