"""How a grader asks somebody outside, though a worker reaches no network.

A leaf renders its request and looks whether the answer came with the item. Where it did not,
it raises `Needs`: the service asks, and hands the item in again with the answers. What was
graded in between is kept with them, so that nothing is graded twice.

A request is `{"leaf": digest of the leaf's spec, "content": what is asked}`; an answer is a
list, one entry a sample: `{"ok": value}` or `{"error": kind, "message": text}`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.reward.grading.outcome import Needs, OutsideFailed
from services.reward.grading.sample import Sample

Answer = Mapping[str, Any]


def digest(value: object) -> str:
    """A name for plain data, the same in every process."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def ask(spec: Mapping[str, Any], sample: Sample, content: Any) -> Sequence[Answer]:
    """The answers to a request, one a sample of it. Needs where it was not asked yet."""
    leaf = digest(spec)
    key = f"{leaf}:{digest(content)}"
    answers = sample.memory.answers.get(key)
    if answers is None:
        raise Needs({key: {"leaf": leaf, "content": content}})
    return answers


def value_of_answer(answer: Answer) -> Any:
    """What was answered. OutsideFailed when nothing was."""
    if "ok" not in answer:
        raise OutsideFailed(str(answer["message"]), str(answer["error"]))
    return answer["ok"]
