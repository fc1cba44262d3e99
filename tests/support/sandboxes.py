"""Programs for the sandbox, and the `code` grader as a worker calls it."""

import psutil

from headway.graders import validate_grader
from services.reward import sandbox
from services.reward.grading import clock
from services.reward.grading.evaluate import build
from services.reward.grading.sample import Sample

QUICK = sandbox.Limits(
    wall_s=8.0, cpu_s=4, memory_bytes=128 << 20, processes=8, file_bytes=8 << 20,
    tmp_bytes=4 << 20, output_bytes=1 << 16,
)  # fmt: skip


def play(source, limits=QUICK, **more):
    """A Python program in the sandbox."""
    sandbox.require()
    argv = sandbox.python_argv("-c", source)
    return sandbox.run(argv, limits=limits, **more)


def grade(program, item=None, limit_s=60.0, **spec):
    """What the `code` grader says of a completion."""
    clock.start(limit_s)
    grader = validate_grader({"type": "code", **spec})
    return build(grader.model_dump(mode="json"))(Sample(program, item or {}, None))


def ended(graded):
    """How the tests ended, by kind."""
    return {kind: share for kind, share in graded.parts.items() if share}


def zombies():
    """Process ids of our dead children that nobody waited for."""
    children = psutil.Process().children()
    return {child.pid for child in children if child.status() == psutil.STATUS_ZOMBIE}


def left_over(mark, before=frozenset()):
    """Processes of this machine with the mark in their command line, and zombies since `before`."""
    marked = []
    for process in psutil.process_iter(["cmdline"]):
        if any(mark in word for word in process.info["cmdline"] or ()):
            marked.append(process.pid)
    return [*marked, *(zombies() - before)]
