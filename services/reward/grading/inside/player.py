"""The program's side of `asserts`: executes it, then does what the other process asks."""

from __future__ import annotations

import itertools
import os
import resource

from services.reward.grading.inside.program import execute, redirect
from services.reward.grading.inside.wire import NotPlain, decode, dumps, encode, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


_objects: dict[int, Any] = {}
_keys = itertools.count()


def play(job: dict[str, Any], asked: int, answered: int) -> None:
    """Never returns. Descriptors other than these two are closed before the program runs."""
    try:
        silence = os.open("/dev/null", os.O_RDWR)
        redirect(silence, silence, silence, kept=(asked, answered))
        resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"] + 1))
        problem: BaseException | None = None
        names: dict[str, Any] = {}
        try:
            names = execute(compile(job["program"], "program.py", "exec"), "solution")
        except BaseException as error:
            problem = error
        while True:
            request = loads(_exactly(asked, int.from_bytes(_exactly(asked, 4), "big")).decode())
            write(answered, dumps(_answer(request, names, problem)).encode())
    finally:
        os._exit(1)


def _exactly(descriptor: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = os.read(descriptor, length - len(data))
        if not chunk:
            os._exit(0)
        data += chunk
    return data


def write(descriptor: int, body: bytes) -> None:
    """A length and a message, whole."""
    view = memoryview(len(body).to_bytes(4, "big") + body)
    while view:
        view = view[os.write(descriptor, view) :]


def _answer(
    request: dict[str, Any], names: dict[str, Any], problem: BaseException | None
) -> dict[str, Any]:
    try:
        if problem is not None:
            raise problem
        value, changed = _do(request, names)
        return {"value": encode(value, _other), "changed": changed}
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        message = str(error)[:500]
        try:
            args = encode(list(error.args))
        except NotPlain:
            args = encode([message])
        return {"error": kinds[0], "bases": kinds[1:], "message": message, "args": args}


def _do(request: dict[str, Any], names: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    do = request["do"]
    if do == "names":
        module = type(os)
        return {
            name: value
            for name, value in names.items()
            if not name.startswith("__") and not isinstance(value, module)
        }, {}
    target = _objects[request["key"]]
    if do == "call":
        args, kwargs = decode(request["args"], _handle), decode(request["kwargs"], _handle)
        value = target(*args, **kwargs)
        return value, _changes(request["args"][1], args)
    if do == "attribute":
        return getattr(target, request["name"]), {}
    if do == "set":
        setattr(target, request["name"], decode(request["value"], _handle))
        return None, {}
    if do in ("item", "contains"):
        value = decode(request["value"], _handle)
        return (target[value] if do == "item" else value in target), {}
    if do == "next":
        for value in target:
            return [value], {}
        return [], {}
    plain: dict[str, Any] = {"len": len, "str": str, "repr": repr, "iter": iter}
    return plain[do](target), {}


def _changes(before: list[Any], args: list[Any]) -> dict[str, Any]:
    """What a call did to its arguments."""
    changed = {}
    for position, (data, value) in enumerate(zip(before, args, strict=False)):
        if isinstance(value, list | dict | set | bytearray):
            now = encode(value, _other)
            if now != data:
                changed[str(position)] = now
    return changed


def _other(value: Any) -> Any:
    if isinstance(value, type) and issubclass(value, Exception):
        kinds = [kind.__name__ for kind in value.__mro__]
        return ["x", [kinds[0], kinds[1:]]]
    key = next(_keys)
    _objects[key] = value
    return ["h", [key, type(value).__name__]]


def _handle(tag: str, body: Any) -> Any:
    if tag == "h":
        return _objects[body]
    raise ValueError(f"unknown tag {tag!r}")
