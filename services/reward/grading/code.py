"""The `code` grader: the completion's program, run in the sandbox, judged outside it.

Cases: outputs and returned values come out as data and are compared here with what is right,
which never goes in. Asserts: run in the sandbox too, in a process that the program has no way
into (`inside/asserts.py`).
"""

from __future__ import annotations

import json
import py_compile
import re
import resource
import struct
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from services.reward import sandbox
from services.reward.grading import clock
from services.reward.grading.code_cases import Case, read_cases, same_text, same_value
from services.reward.grading.inside.wire import NotPlain, decode, encode
from services.reward.grading.outcome import BadInput, Graded, GradingError
from services.reward.grading.sample import Grade, Sample, text_of, value_of

_FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*([\w.+#-]*)(.*)")
_INSIDE = "services/reward/grading/inside"
_START = (
    "import sys; sys.path.insert(0, '/box');"
    " from services.reward.grading.inside.{0} import main;"
    " sys.path[0] = '/packages'; main()"
)
_NAMES = ("python", "py", "python3")
_MARGIN_S = 1.0  # of the item's time, for what is not the program's
_LONGEST_S = 300.0
_CASE_OUTPUT, _ALL_OUTPUT = 1 << 20, 64 << 20  # bytes
_PROCESSES = 17  # the driver and 16 of the program
_OUTCOMES = ("passed", "wrong", *(kind for kind in sandbox.KINDS if kind != "ok"))


def code(spec: Mapping[str, Any]) -> Grade:
    """Runs the program against its cases or tests."""
    view = sandbox.View(packages=tuple(spec["packages"]))

    def grade(sample: Sample) -> Graded:
        text = text_of(spec["input"], sample)
        program = extract_program(text) if spec["extract"] == "block" else text
        program = program.lstrip("\ufeff")
        if spec["prefix"]:
            program = f"{text_of(spec['prefix'], sample)}\n{program}"
        function = value_of(spec["function"], sample) if spec["function"] else None
        if function is not None and not isinstance(function, str):
            raise BadInput(f"function is {type(function).__name__}, not a name")
        if spec["cases"] is not None:
            cases, function = read_cases(_rendered(spec["cases"], sample), function)
            outcomes = _run_cases(program, cases, function, spec, view)
        else:
            tests = _rendered(spec["tests"], sample)
            outcomes = _run_tests(program, _texts(tests), function, spec, view)
        return _graded(outcomes, spec["score"])

    return grade


def extract_program(text: str) -> str:
    """The last fenced block of Python, or unnamed, or of any name; without a fence, the whole.

    A reasoning block never counts.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    blocks: list[tuple[str, list[str]]] = []
    fence = ""
    for line in text.splitlines():
        found = _FENCE.fullmatch(line)
        if found and not fence and "`" not in found[3]:
            fence = found[1]
            blocks.append((found[2].lower(), []))
        elif found and fence and found[1].startswith(fence) and not (found[2] + found[3]).strip():
            fence = ""
        elif fence:
            blocks[-1][1].append(line)
    if not blocks:
        return text
    for wanted in (_NAMES, ("",)):
        chosen = [lines for name, lines in blocks if name in wanted]
        if chosen:
            return "\n".join(chosen[-1])
    return "\n".join(blocks[-1][1])


def _run_cases(
    program: str, cases: list[Case], function: str | None, spec: Mapping[str, Any],
    view: sandbox.View,
) -> list[str]:  # fmt: skip
    """How each case ended."""
    job = {
        "program": program, "function": function, **_case_limits(spec),
        "stop_at_break": spec["score"] == "all", "output_bytes": _CASE_OUTPUT,
        "cases": [_given(case) for case in cases],
    }  # fmt: skip
    outcome = _run("cases", json.dumps(job).encode(), len(cases), spec, view)
    results = _lines(outcome.stdout)
    ended = [
        _case_outcome(case, result, spec["tolerance"])
        for case, result in zip(cases, results, strict=False)
    ]
    # What was not run shares the fate of what kept it from running.
    last = ended[-1] if ended and ended[-1] not in ("passed", "wrong") else "crash"
    missing = last if outcome.kind == "ok" else outcome.kind
    return ended + [missing] * (len(cases) - len(ended))


def _given(case: Case) -> dict[str, Any]:
    if case.stdin is not None:
        return {"stdin": case.stdin}
    try:
        return {"args": encode(list(case.args)), "kwargs": encode(dict(case.kwargs or {}))}
    except NotPlain as error:
        raise BadInput(f"the arguments of a case are {error}") from None


def _case_outcome(case: Case, result: Mapping[str, Any], tolerance: float) -> str:
    if result.get("late"):
        return "timeout"
    if result.get("flood"):
        return "output"
    exit_code = result.get("code")
    if not isinstance(exit_code, int) or exit_code:
        number = exit_code if isinstance(exit_code, int) else 1
        return sandbox.kind_of(128 - number if number < 0 else number, str(result.get("err")))
    if case.stdin is not None:
        return "passed" if same_text(str(result.get("out")), case.expected, tolerance) else "wrong"
    try:
        value = decode(json.loads(result["value"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "wrong"
    right = any(same_value(value, expected, tolerance) for expected in case.expected)
    return "passed" if right else "wrong"


def _run_tests(
    program: str, tests: list[str], function: str | None, spec: Mapping[str, Any],
    view: sandbox.View,
) -> list[str]:  # fmt: skip
    """How each unit of the tests ended. GradingError where they cannot be run this way."""
    parts = ({"program": program, **_case_limits(spec)}, {"tests": tests, "function": function})
    texts = [json.dumps(part).encode() for part in parts]
    stdin = b"".join(struct.pack("!I", len(text)) + text for text in texts)
    outcome = _run("asserts", stdin, 1, spec, view)
    total, ended, complete = 0, list[str](), False
    for line in _lines(outcome.stdout):
        if "unsupported" in line:
            raise BadInput(f"the tests cannot be run: {line['unsupported']}")
        total = line.get("total", total)
        complete = complete or "end" in line
        if line.get("ok"):
            ended.append("passed")
        elif "ok" in line:
            ended.append(_unit_outcome(line))
    if complete and not ended:
        raise BadInput("the tests assert nothing")
    if not complete:
        last = ended[-1] if ended and ended[-1] != "passed" else "crash"
        missing = last if outcome.kind == "ok" else outcome.kind
        ended += [missing] * max(total - len(ended), 1 if "passed" in ended[-1:] else 0)
    return ended or [outcome.kind if outcome.kind != "ok" else "crash"]


def _unit_outcome(line: Mapping[str, Any]) -> str:
    if line.get("late"):
        return "timeout"
    said = str(line.get("err"))
    return "wrong" if said.startswith("AssertionError") else sandbox.kind_of(1, said)


def _run(
    driver: str, stdin: bytes, num_cases: int, spec: Mapping[str, Any], view: sandbox.View
) -> sandbox.Outcome:
    sandbox.require()
    memory_bytes, most = spec["memory_mib"] << 20, resource.getrlimit(resource.RLIMIT_AS)[1]
    if most != resource.RLIM_INFINITY and memory_bytes > most:
        raise BadInput(f"memory_mib: a worker has {most >> 20} (--worker-memory-mib)")
    wall_s = min(clock.left_s() - _MARGIN_S, _LONGEST_S)
    if wall_s <= 0:
        raise OutOfTime("no time is left for the program: raise timeout_s")
    limits = sandbox.Limits(
        wall_s=wall_s,
        cpu_s=None,  # the driver gives each case its own
        memory_bytes=memory_bytes,
        processes=_PROCESSES,
        output_bytes=min(num_cases * (_CASE_OUTPUT * 2 + 65536), _ALL_OUTPUT),
    )
    argv = sandbox.python_argv("-c", _START.format(driver))
    return sandbox.run(argv, stdin, _drivers(), limits, view)


class OutOfTime(GradingError):
    """The item's time was over before its program could be run."""

    kind = "timeout"


def _case_limits(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"cpu_s": spec["time_limit_s"], "wall_s": 2.0 * spec["time_limit_s"]}


@lru_cache(maxsize=1)
def _drivers() -> dict[str, bytes]:
    """Compiled: programs start often."""
    compiled = {}
    with tempfile.TemporaryDirectory(prefix="headway-") as folder:
        for path in Path(__file__).with_name("inside").glob("[a-z]*.py"):
            target = Path(folder, f"{path.stem}.pyc")
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(path), str(target), path.name, True, invalidation_mode=mode)
            compiled[f"{_INSIDE}/{target.name}"] = target.read_bytes()
    return compiled


def _lines(stdout: bytes) -> list[dict[str, Any]]:
    """What a driver told; nothing after the first line that is none of its."""
    told: list[dict[str, Any]] = []
    for line in stdout.splitlines():
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(message, dict):
            break
        told.append(message)
    return told


def _rendered(raw: Any, sample: Sample) -> Any:
    if isinstance(raw, str):
        return value_of(raw, sample)
    if isinstance(raw, list):
        return [value_of(part, sample) if isinstance(part, str) else part for part in raw]
    return raw


def _texts(tests: Any) -> list[str]:
    texts = [tests] if isinstance(tests, str) else tests
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts) or not texts:
        raise BadInput("tests is a text or a list of texts")
    return texts


def _graded(ended: list[str], score: str) -> Graded:
    counts = Counter(ended)
    parts = {name: counts[name] / len(ended) for name in _OUTCOMES}
    passed = parts["passed"]
    return Graded(passed if score == "fraction" else float(passed == 1.0), parts)
