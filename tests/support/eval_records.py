"""Records of evaluations, made from their rewards."""

from headway.evaluation.records import CompletionRecord, PromptRecord


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
