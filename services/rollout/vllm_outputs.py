"""Between our messages and vLLM's: sampling parameters, outputs, errors."""

from __future__ import annotations

import struct
from dataclasses import astuple
from typing import Any

import xxhash

from headway import errors
from headway.errors import DeadlineExceeded, HeadwayError, Unavailable
from headway.messages import Completion, FinishReason, VersionSpan, WeightManifest
from services.rollout.engine import Look, Piece, Sampling, SeenToken

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


def visitor_params(sampling: Sampling, seed: int, look: Look) -> Any:
    """vLLM's parameters of a visitor's completion."""
    from vllm.sampling_params import RequestOutputKind

    params = sampling_params(sampling, seed)
    params.flat_logprobs = False  # these can be put together from several outputs
    params.logprobs = look.alternatives
    params.prompt_logprobs = look.prompt_alternatives
    if look.prompt_alternatives is not None:
        params.skip_reading_prefix_cache = True  # what is not computed has no log-probs
    if look.in_pieces:
        params.output_kind = RequestOutputKind.DELTA
    return params


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
    spans = _spans(output, len(token_ids))
    return Completion(token_ids, logprobs, _reason(output), spans, output.text)


def piece_of(output: Any, sent: int, look: Look) -> Piece:
    """What a visitor's completion has grown by, after `sent` tokens of it."""
    done = output.outputs[0]
    count = len(done.token_ids)
    return Piece(
        text=done.text,
        num_tokens=count,
        tokens=_seen(done.token_ids, done.logprobs, look.alternatives),
        prompt=_seen(output.prompt_token_ids, output.prompt_logprobs, look.prompt_alternatives),
        finish_reason=_reason(done) if output.finished else None,
        spans=_spans(done, sent + count) if output.finished else (),
    )


def _seen(token_ids: Any, rows: Any, count: int | None) -> tuple[SeenToken, ...]:
    """Tokens beside vLLM's log-probs of each place, which hold it and the `count` likeliest."""
    if count is None or not rows:
        return ()
    if len(rows) != len(token_ids):
        raise HeadwayError(f"{len(token_ids)} tokens, but log-probs of {len(rows)} places")
    return tuple(_place(t, row, count) for t, row in zip(token_ids, rows, strict=True))


def _place(token: int, row: Any, count: int) -> SeenToken:
    if row is None:  # nothing stands before the first token of a prompt
        return SeenToken(token, "", None)
    ranked = sorted(row.values(), key=lambda entry: -entry.logprob)[:count]
    others = tuple((entry.decoded_token or "", entry.logprob) for entry in ranked)
    return SeenToken(token, row[token].decoded_token or "", row[token].logprob, others)


def _spans(output: Any, num_tokens: int) -> tuple[VersionSpan, ...]:
    spans = tuple(
        VersionSpan(_version(span.version), span.start, span.end)
        for span in output.weight_versions or ()
    )
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != num_tokens:
        raise HeadwayError(f"{num_tokens} sampled tokens, but version spans {spans}")
    return spans


def _reason(output: Any) -> FinishReason:
    finish = _FINISH.get(str(output.finish_reason))
    if finish is None:
        raise Unavailable(f"vLLM ended a request with {output.finish_reason!r}")
    return finish


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


def manifest_rows(manifest: WeightManifest) -> tuple[int, int, list[list[Any]], list[Any] | None]:
    """A manifest as vLLM's worker takes it."""
    rows: list[list[Any]] = [[t.name, t.dtype, list(t.shape), t.digest] for t in manifest.tensors]
    base = [*astuple(manifest.base)] if manifest.base is not None else None
    return manifest.version, manifest.bucket_bytes, rows, base
