"""How much a job samples of held-out data, worked out before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from headway.data.source import open_source
from headway.jobspec import EvalDataSpec, JobSpec


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The arithmetic of an eval job, or of all validations of a training job."""

    prompts: int  # of all data sets
    n: int  # completions a prompt
    max_tokens: int  # a completion
    rounds: int  # versions that are evaluated

    @property
    def completions(self) -> int:
        """Of all rounds."""
        return self.prompts * self.n * self.rounds


def held_out_of(job: JobSpec) -> HeldOut | None:
    """What is sampled of the held-out data; None where nothing is. InvalidSpec: not to be read."""
    versions = range(job.trainer.total_training_steps + 1)
    rounds = 1 if job.kind == "eval" else sum(job.validates(version) for version in versions)
    if not rounds:
        return None
    ask = job.evaluation
    return HeldOut(
        prompts=sum(_rows(data, f"evaluation.data.{i}") for i, data in enumerate(ask.data)),
        n=ask.n,
        max_tokens=job.max_answer,
        rounds=rounds,
    )


def _rows(data: EvalDataSpec, key: str) -> int:
    made = data.source == "reasoning_gym"
    rows = data.size if made else len(open_source(data, key))
    return min(rows, data.limit or rows)
