"""What a user's reward function looks like, read from its source without running it."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from headway.suggestions import near

Call = Literal["verl", "verl_batch", "trl", "rubric", "rubric_group", "openai"]
"""Whose signature a function has; docs/graders.md has them exactly."""

CALLS: tuple[Call, ...] = get_args(Call)
WHOLE_GROUP: frozenset[Call] = frozenset({"verl_batch", "trl", "rubric_group"})
_USUAL = ("compute_score", "grade")  # verl's and OpenAI's own names
_OF_RUBRIC = {"completion", "answer", "state", "info", "task", "parser"}
_OF_RUBRIC_GROUP = {"answers", "states", "infos", "tasks"}


class Unclear(ValueError):
    """The source is no Python, or does not say what is to be called, or how."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the source's top level and the names of its arguments."""

    name: str
    arguments: tuple[str, ...]


def functions_of(source: str) -> dict[str, Function]:
    """The functions of the top level by name. Unclear: the source is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a plain text, say: of no concern here
            module = ast.parse(source)
        found = [*_functions(module.body)]
    except SyntaxError as error:
        raise Unclear(f"not Python: line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unclear(f"not Python: {str(error) or 'nested too deeply'}") from None
    return {function.name: function for function in found}


def chosen(functions: dict[str, Function], name: str | None) -> str:
    """The name of the function to call. Unclear where none, or more than one, could be meant."""
    if name is not None:
        return name
    public = [known for known in functions if not known.startswith("_")]
    usual = [known for known in _USUAL if known in functions]
    if len(public) == 1 or len(usual) == 1:
        return (usual or public)[0]
    if not public:
        raise Unclear("the source defines no function at its top level")
    raise Unclear(f"name one of {', '.join(public)}: the source defines several functions")


def call_of(functions: dict[str, Function], name: str) -> Call:
    """Whose signature it has, by the names of its arguments. Unclear where they do not say."""
    function = functions.get(name)
    if function is None:
        raise Unclear(
            f"{name} is not a def of the source's top level{near(name, functions)}: where it is"
            f" made otherwise, say how it is called ({', '.join(CALLS)})"
        )
    found = _call(set(function.arguments))
    if found is None:
        raise Unclear(
            f"the arguments of {name} ({_listed(function.arguments)}) are of no known signature:"
            f" say one of {', '.join(CALLS)}"
        )
    return found


def _call(names: set[str]) -> Call | None:
    if "solution_strs" in names:
        return "verl_batch"
    if "solution_str" in names:
        return "verl"
    if names & _OF_RUBRIC_GROUP:
        return "rubric_group"
    if "completions" in names:
        return "trl"
    if {"sample", "item"} <= names:
        return "openai"
    return "rubric" if names & _OF_RUBRIC else None


def _functions(body: Sequence[ast.stmt]) -> Iterator[Function]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            yield Function(node.name, tuple(argument.arg for argument in arguments))
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions([*node.body, *node.orelse])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
