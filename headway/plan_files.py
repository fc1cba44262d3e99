"""What a job leaves in its run folder, and how large it gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.jobspec import JobSpec
from headway.memory import GIB, checkpoint_bytes, export_bytes
from headway.model_size import ModelShape
from headway.plan_held_out import HeldOut

_METRICS_ROW_BYTES = 2_000
_SAMPLE_BYTES_PER_TOKEN = 6
_SAMPLE_OVERHEAD_BYTES = 400
_RECORD_BYTES_PER_TOKEN = 12  # int32 id, float64 log-prob
_REPORT_BYTES = 300_000


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """Something the job leaves behind; `size` in bytes, None where unknown."""

    path: Path
    what: str
    size: int | None


def planned_files(
    job: JobSpec,
    shape: ModelShape | None,
    runs_dir: Path,
    critic: ModelShape | None = None,
    held_out: HeldOut | None = None,
) -> tuple[PlannedFile, ...]:
    """The run folder's content with its sizes at the end of the job."""
    run = runs_dir / f"{job.name}-<id>"
    answers = []
    if held_out is not None:
        kept = held_out.completions * completion_bytes(held_out.max_tokens)
        text = "held-out prompts, completions, rewards, versions"
        answers.append(PlannedFile(run / "eval" / "samples.jsonl", text, kept))
    if job.kind == "eval":
        return (
            PlannedFile(run / "job.yaml", "the job as resolved", len(job.to_yaml())),
            PlannedFile(run / "environment.json", "versions, machine, seeds, hashes", 8_000),
            *answers,
            PlannedFile(run / "metrics.jsonl", "the scores", _METRICS_ROW_BYTES),
            PlannedFile(run / "learner.log", "what the lead process said", None),
        )
    steps, save = job.trainer.total_training_steps, job.trainer.save_freq
    completions = job.data.train_batch_size * steps * job.rollout.n
    written = -(-steps // save) if save else 1
    kept = min(job.trainer.max_ckpt_to_keep, written)
    samples = completions * completion_bytes(job.rollout.max_tokens)
    record = completions * (_RECORD_BYTES_PER_TOKEN * job.rollout.max_tokens)
    record = min(record + samples, int(job.trainer.max_record_gib * GIB))
    one = checkpoint_bytes(job, shape, critic) if shape else None
    files = [
        PlannedFile(run / "job.yaml", "the job as resolved", len(job.to_yaml())),
        PlannedFile(run / "environment.json", "versions, machine, seeds, hashes", 8_000),
        PlannedFile(run / "metrics.jsonl", "a row a step", steps * _METRICS_ROW_BYTES),
        PlannedFile(run / "samples.jsonl", "prompts, completions, rewards, versions", samples),
        PlannedFile(run / "groups.log", "the groups as trained on, for `headway replay`", record),
        PlannedFile(
            run / "checkpoints",
            f"{kept} of {written} kept",
            one * kept if one is not None else None,
        ),
        *answers,
        PlannedFile(run / "learner.log", "what the training processes said", None),
        PlannedFile(run / "report.html", "curves", _REPORT_BYTES),
    ]
    if job.trainer.export:
        size = export_bytes(job, shape) if shape else None
        files.append(PlannedFile(run / "model", "Hugging Face folder", size))
    return tuple(files)


def completion_bytes(max_tokens: int) -> int:
    """One of the longest completions in samples.jsonl."""
    return _SAMPLE_OVERHEAD_BYTES + _SAMPLE_BYTES_PER_TOKEN * max_tokens
