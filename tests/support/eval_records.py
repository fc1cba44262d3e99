"""Records of evaluations, made from their rewards."""

from headway.evaluation.records import (
    CompletionRecord,
    PromptRecord,
    RecordWriter,
    samples_path,
)
from headway.jobspec import parse_job


def prompt(index, rewards, *, source="sums", version=0, texts=None, skipped="", **over):
    """A record whose completions have these rewards; None is one that timed out."""
    texts = texts or [f"answer {i}" for i in range(len(rewards))]
    completions = tuple(
        CompletionRecord(
            text, reward, 3, "stop", {}, *(() if reward is not None else ("timeout", "too slow"))
        )
        for text, reward in zip(texts, rewards, strict=True)
    )
    fields = {"prompt": f"{source} {index}?", "item": {"answer": str(index)}}
    return PromptRecord(
        source, index, version, completions=completions, skipped=skipped, **{**fields, **over}
    )


def eval_job(**evaluation):
    """An eval job as a user writes it."""
    return {
        "kind": "eval",
        "model": {"path": "some/model"},
        "reward": {"grader": {"type": "numeric"}},
        "evaluation": {"data": [{"source": "reasoning_gym", "name": "sums"}], **evaluation},
    }


def eval_run(folder, records, **evaluation):
    """The run folder that an eval job leaves."""
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(parse_job(eval_job(**evaluation)).to_yaml())
    with RecordWriter(samples_path(folder)) as writer:
        for record in records:
            writer.append(record)
    return folder
