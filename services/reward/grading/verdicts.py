"""What a judge's answer says: one verdict of it, and one of several answers."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from headway.labels import label_key
from services.reward.grading.outcome import GradingError, OutsideFailed

_VERDICT_LINE = re.compile(r"^[ \t*_#>`-]*verdict[ \t*_`]*[:=][ \t]*(\S.*)$", re.I | re.M)
_NUMBER = re.compile(r"([-+]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30}))(?:\s*/\s*(\d{1,30}))?")


def verdict_of(text: str, cut_off: bool, spec: Mapping[str, Any]) -> float:
    """The reward that one answer stands for. OutsideFailed (judge_unparsable) when none does.

    Only what follows the judge's reasoning is read; the last match, object or line wins.
    """
    answer = _after_reasoning(text)
    found = _found(answer, spec)
    if found is None or found == "":
        why = "was cut off at its token limit before a verdict" if cut_off else "holds no verdict"
        raise _unparsable(f"the judge's answer {why}: {_tail(answer)}")
    if spec["labels"]:
        return _labelled(found, spec["labels"])
    return _number(found, spec)


def combined(
    verdicts: Sequence[float], failures: Sequence[GradingError], spec: Mapping[str, Any]
) -> float:
    """One reward of several verdicts.

    Raises the first failure, unless the verdicts there are decide whatever the missing ones had
    been.
    """
    how = spec["combine"]
    if how == "vote":
        counts = Counter(verdicts).most_common()
        second = counts[1][1] if len(counts) > 1 else 0
        if failures and (not counts or counts[0][1] <= second + len(failures)):
            raise failures[0]
        return min(value for value, count in counts if count == counts[0][1])
    if how == "mean" or not failures:
        if failures:
            raise failures[0]
        return statistics.fmean(verdicts) if how == "mean" else statistics.median(verdicts)
    low = statistics.median([*verdicts, *[-math.inf] * len(failures)])
    high = statistics.median([*verdicts, *[math.inf] * len(failures)])
    if low != high:
        raise failures[0]
    return low


def _after_reasoning(text: str) -> str:
    """What follows a reasoning block; nothing where one was begun and not ended."""
    after = text.rpartition("</think>")[2].strip()
    return "" if after.startswith("<think>") else after


def _found(answer: str, spec: Mapping[str, Any]) -> Any:
    """The verdict as it was written; None where there is none."""
    if spec["json_field"] is not None:
        return _at(_last_object(answer), spec["json_field"])
    if spec["pattern"] is not None:
        matches = list(re.finditer(spec["pattern"], answer))
        if not matches:
            return None
        return matches[-1].group(matches[-1].re.groups)
    lines = _VERDICT_LINE.findall(answer)
    return lines[-1] if lines else answer


def _labelled(found: Any, labels: Mapping[str, float]) -> float:
    text = json.dumps(found) if isinstance(found, bool | int | float) else str(found)
    known = {label_key(label): reward for label, reward in labels.items()}
    if label_key(text) not in known:
        raise _unparsable(f"the judge's verdict {_tail(text)} is none of {', '.join(labels)}")
    return known[label_key(text)]


def _number(found: Any, spec: Mapping[str, Any]) -> float:
    low, high = spec["range"]
    if isinstance(found, bool | int | float):
        value = float(found) if abs(found) <= sys.float_info.max else math.nan
    else:
        match = _NUMBER.fullmatch(found.strip(" \t\r\n*_`\"'!()[]"))
        if match is None or (match[2] is not None and float(match[2]) != high):
            raise _unparsable(f"the judge's verdict {_tail(str(found))} is no number")
        value = float(match[1])
    if not low <= value <= high:
        raise _unparsable(f"the judge's verdict {value:g} is not within {low:g} to {high:g}")
    return (value - low) / (high - low) if spec["normalize"] else value


def _last_object(text: str) -> Any:
    decoder = json.JSONDecoder()
    last, start = None, text.find("{")
    while start >= 0:
        try:
            last, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1
        except RecursionError:  # nobody's verdict: to try each of its levels would take for ever
            return None
        start = text.find("{", end)
    return last


def _at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, str | bool | int | float) else None


def _unparsable(message: str) -> OutsideFailed:
    return OutsideFailed(message, "judge_unparsable")


def _tail(text: str) -> str:
    return repr(text[-80:].strip()) if text.strip() else "(empty)"
