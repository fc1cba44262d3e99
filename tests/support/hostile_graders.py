"""A grader that misbehaves as its item asks; loaded into workers by tests only."""

import os
import signal
import time
from typing import Literal

from headway.graders import GraderSpec
from services.reward.grading.evaluate import BUILDERS
from services.reward.grading.groups import once_a_group
from services.reward.grading.outcome import BadInput, Graded, Needs


class Hostile(GraderSpec):
    """Does what `item.do` says; appends the completion to `log` each time it is asked."""

    type: Literal["hostile"] = "hostile"
    log: str = ""


class HostileGroup(Hostile):
    """The same over whole groups: does what each item says, then ranks by length; see `_rank`."""

    type: Literal["hostile_group"] = "hostile_group"

    def whole_group(self) -> bool:
        return True


VALUES = {"nan": float("nan"), "none": None, "list": [1.0], "huge": 1e308 * 10}


def _grade(spec, sample):
    if spec["log"]:
        with open(spec["log"], "a") as log:
            log.write(sample.completion + "\n")
    if sample.item.get("do") == "give":
        return Graded(VALUES[sample.item["value"]])
    if "do" in sample.item:
        DEEDS[sample.item["do"]](sample.item)
    return Graded(1.0)


def _raise(error):
    raise error


def _hog(_):  # more than any worker may have
    bytearray(64 << 30)


def _killed_once(item):
    """Is killed as if from outside, in the middle of its first trial."""
    if not os.path.exists(item["marker"]):
        with open(item["marker"], "w") as file:
            file.write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)


def _wait_for(item):
    while not os.path.exists(item["file"]):
        time.sleep(0.005)


DEEDS = {
    "nap": lambda _: time.sleep(0.1),
    "hang": lambda _: time.sleep(3600),
    "exit": lambda _: os._exit(0),
    "raise": lambda _: _raise(ValueError("no mood for it")),
    "system_exit": lambda _: _raise(SystemExit(3)),
    "hog": _hog,
    "print": lambda _: print("x" * (1 << 20), flush=True),
    "killed_once": _killed_once,
    "wait_for": _wait_for,
    "ask": lambda item: _raise(Needs(item["asks"])),
}


def _rank(spec, group):
    """How many of the group are shorter; an error for an item that is `lost`."""
    for sample in group:
        if sample.item.get("do") != "lost":
            _grade(spec, sample)
    lengths = [len(sample.completion) for sample in group]
    return [
        BadInput("lost")
        if s.item.get("do") == "lost"
        else Graded(float(sum(n < own for n in lengths)))
        for s, own in zip(group, lengths, strict=True)
    ]


BUILDERS["hostile_group"] = lambda spec: once_a_group(lambda group: _rank(spec, group))
BUILDERS["hostile"] = lambda spec: lambda sample: _grade(spec, sample)
