"""A grader worker: reads batches on stdin, writes one result an item, in order.

    parent -> {"grader": {...}, "timeout_s": 10.0, "units": [[item, …], …]}, an item being
              [prompt_json, completion, item_json, num_tokens, given_json]
    worker -> {"ready": pid}            once, when loaded
    worker -> {"prepared": true}        a batch's grader is loaded: the first item's clock runs
    worker -> {"reward": 1.0, ...} or {"error": kind, "message": text}, one an item
           or {"needs": {key: ask}, "kept": {...}}: asked elsewhere, the item comes again with
              them as its given_json (services/reward/grading/asking.py)

A unit is one item, or all completions of a prompt where the grader needs them together:
its results are written when all are there. The process has a memory limit and dies
with its parent. What a grader prints goes nowhere.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import signal
import sys
import time
from typing import Any

from headway.lifecycle import die_with_parent
from services.reward import frames
from services.reward.functions.trust import trust_functions
from services.reward.grading import clock
from services.reward.grading.evaluate import build
from services.reward.grading.outcome import (
    BadInput,
    Graded,
    GradingError,
    Needs,
    Spoilt,
    checked_reward,
)
from services.reward.grading.sample import Grade, Memory, Sample, as_group

_MAX_MESSAGE = 2000
_FRAME_ROOM = 1024  # for what is added to a result


def main() -> int:
    """Serves batches until the pipe ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--import", dest="imports", action="append", default=[])
    parser.add_argument("--trust-functions", action="store_true")
    flags = parser.parse_args()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (flags.memory_bytes, flags.memory_bytes))
    if flags.trust_functions:
        trust_functions()
    for module in flags.imports:
        importlib.import_module(module)
    source, sink = os.dup(0), os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(silence, fd)
    frames.write_blocking(sink, {"ready": os.getpid()})
    while (batch := frames.read_blocking(source)) is not None:
        _serve(batch, sink)
    return 0


def _serve(batch: dict[str, Any], sink: int) -> None:
    try:
        grade = build(batch["grader"])
    except Exception as error:
        kind = error.kind if isinstance(error, GradingError) else "internal"
        frames.write_blocking(sink, {"unusable": _message(error), "kind": kind})
        return
    frames.write_blocking(sink, {"prepared": True})
    kind, text = batch["grader"]["type"], json.dumps(batch["grader"])
    needs_prompt = "prompt" in text or '"python"' in text
    for unit in batch["units"]:
        started = time.perf_counter()
        clock.start(batch["timeout_s"] * len(unit))
        results = _score_unit(grade, kind, unit, needs_prompt)
        share_s = (time.perf_counter() - started) / len(unit)
        for result in results:
            frames.write_blocking(sink, result | {"duration_s": share_s})


def _score_unit(
    grade: Grade, kind: str, unit: list[list[Any]], needs_prompt: bool
) -> list[dict[str, Any]]:
    try:
        samples = [_sample(prompt if needs_prompt else "", *rest) for prompt, *rest in unit]
    except BadInput as error:
        return [{"error": error.kind, "message": _message(error)}] * len(unit)
    return [_score(grade, kind, sample) for sample in as_group(samples)]


def _score(grade: Grade, kind: str, sample: Sample) -> dict[str, Any]:
    try:
        graded = grade(sample)
        parts = {name: checked_reward(part, name) for name, part in graded.parts.items()}
        return {"reward": checked_reward(graded.reward, f"the {kind} grader"), "parts": parts}
    except Needs as needs:
        return _needs(needs, sample)
    except GradingError as error:
        return {"error": error.kind, "message": _message(error)}
    except MemoryError:
        return {"error": "memory", "message": "the item needed more memory than a worker may have"}
    except Spoilt:
        raise
    except BaseException as error:  # a grader may raise anything, SystemExit included
        return {"error": "internal", "message": f"{kind}: {_message(error)}"}


def _needs(needs: Needs, sample: Sample) -> dict[str, Any]:
    kept = {key: [graded.reward, graded.parts] for key, graded in sample.memory.kept.items()}
    result = {"needs": needs.asks, "kept": kept}
    size = len(frames.encode(result))
    if size > frames.MAX_ANSWER_BYTES - _FRAME_ROOM:
        limit = f"at most {frames.MAX_ANSWER_BYTES >> 10} KiB are sent"
        return {"error": "bad_input", "message": f"the item's requests have {size} bytes: {limit}"}
    return result


def _sample(
    prompt_json: str, completion: str, item_json: str, num_tokens: int | None, given_json: str
) -> Sample:
    try:
        prompt = json.loads(prompt_json) if prompt_json else None
        item = json.loads(item_json) if item_json else {}
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the item is not JSON: {error}") from None
    if not isinstance(item, dict):
        raise BadInput(f"the item is {type(item).__name__}, not a JSON object")
    memory = Memory()
    if given_json:
        given = json.loads(given_json)
        kept = {key: Graded(reward, parts) for key, (reward, parts) in given["kept"].items()}
        memory = Memory(given["answers"], kept)
    return Sample(completion, item, prompt, num_tokens=num_tokens, memory=memory)


def _message(error: BaseException) -> str:
    text = str(error) if isinstance(error, GradingError) else f"{type(error).__name__}: {error}"
    # What it quotes may hold half a surrogate pair, which neither JSON nor protobuf carries.
    return text[:_MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()


if __name__ == "__main__":
    sys.exit(main())
