"""Between our messages and vLLM's: sampling parameters, outputs, errors."""

from __future__ import annotations

import struct
from typing import Any

import xxhash

from headway import errors
from headway.errors import DeadlineExceeded, HeadwayError, Unavailable
from headway.messages import Completion, FinishReason, VersionSpan
from services.rollout.engine import Sampling

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}


def completion_seed(seed: int, index: int) -> int:
    """The seed of one completion of a ticket: a hash, so that neighbours share nothing."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QI", seed & (2**64 - 1), index)) >> 1


def sampling_params(sampling: Sampling, seed: int) -> Any:
    """vLLM's parameters of one completion."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=list(sampling.stop) or None,
        seed=seed,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def final_output(queue: Any) -> Any:
    """A request's last output. Unavailable: the engine died."""
    while True:
        output = queue.get_nowait() or await translated(queue.get())
        if output.finished:
            return output


def completion_of(output: Any) -> Completion:
    """vLLM's output as it was sampled. HeadwayError when a token lacks log-prob or version."""
    token_ids = tuple(output.token_ids)
    flat = output.logprobs
    first = list(flat.start_indices) if flat is not None else []
    logprobs = tuple(flat.logprobs[i] for i in first)
    if tuple(flat.token_ids[i] for i in first) != token_ids:
        raise HeadwayError(f"{len(token_ids)} sampled tokens, but log-probs of others")
    spans = tuple(
        VersionSpan(_version(span.version), span.start, span.end)
        for span in output.weight_versions or ()
    )
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != len(token_ids):
        raise HeadwayError(f"{len(token_ids)} sampled tokens, but version spans {spans}")
    finish = _FINISH.get(str(output.finish_reason))
    if finish is None:
        raise Unavailable(f"vLLM ended a request with {output.finish_reason!r}")
    return Completion(token_ids, logprobs, finish, spans, output.text)


def _version(label: str) -> int:
    try:
        return int(label)
    except ValueError as error:
        raise HeadwayError(f"tokens were sampled by weights without a version: {label}") from error


def error_of(kind: str, message: str) -> HeadwayError:
    """The error that a worker's reply stands for."""
    known = errors.WeightMismatch, errors.EpochBroken, errors.InvalidSpec, DeadlineExceeded
    for cls in (*known, Unavailable):
        if cls.kind == kind:
            return cls(message)
    return HeadwayError(message)


async def translated(call: Any) -> Any:
    """Awaits a call of vLLM's; its death is Unavailable."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        return await call
    except EngineDeadError:
        raise Unavailable("the vLLM engine died; restart this node") from None
