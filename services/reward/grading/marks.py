"""Where a text says what its answer is: marks, and statements such as "the answer is …".

The last mark wins: `\\boxed{…}` (`\\fbox`, `\\framebox`), a line `#### …`, or
`<answer>…</answer>`. Every function here is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_TEXT = 200_000

_BRACE = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])[ \t]*(\{)?|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"[^$\n{}]{0,200}?(?=\$|\n|\\[)\]]|[.,;]\s|[.,;]?\Z)")
_HASHES = re.compile(
    r"^[ \t]*####[ \t]*((?=[-+$€£¥\\({.,\d\u2212*])[^\n]*|(?=\s*\Z))", re.MULTILINE
)
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_CUE = re.compile(
    r"\banswer\b[^\n.:=\d]{0,40}?(?:\bis\b|\bare\b|\bequals\b|:|=)[\s:*_]*|答案(?:是|为|:|\uff1a)\s*",
    re.IGNORECASE,
)
_RETRACTED = re.compile(
    r"\b(?:wait\b|actually|sorry|correction|no,|instead|scratch that|on second thought"
    r"|i (?:was|am) wrong|i made|my mistake|a mistake|let me (?:re|correct|fix)"
    r"|(?:that|this)(?:'s| is| was) (?:\w+ )?(?:wrong|incorrect|not right|a mistake))",
    re.IGNORECASE,
)
_BROKEN_ESCAPES = {"\x08oxed": "\\boxed", "\x0crac": "\\frac", "\x0cbox": "\\fbox"}


@dataclass(frozen=True, slots=True)
class Box:
    """A box's position in its text and its content; None: it is never closed."""

    start: int
    content: str | None


def without_reasoning(text: str) -> str:
    """The text after its reasoning block; what an unclosed `<think>` begins does not count.

    Of what is left the last `MAX_TEXT` characters: an answer stands at the end.
    """
    for broken, meant in _BROKEN_ESCAPES.items():
        if broken in text:
            text = text.replace(broken, meant)
    return text.rpartition("</think>")[2].partition("<think>")[0][-MAX_TEXT:]


def marked(text: str, hashes: re.Pattern[str] = _HASHES) -> str | None:
    """The last marked answer; empty where a mark has none; None where nothing is marked."""
    marks = list(_marks(text, hashes))
    return max(marks)[1] if marks else None


def last_tag(text: str) -> tuple[int, str] | None:
    """Where the last complete <answer>…</answer> begins, and its content."""
    opened = None
    found = None
    for tag in _TAG.finditer(text):
        if not tag.group(1):
            opened = tag.end()
        elif opened is not None:
            found, opened = (opened, text[opened : tag.start()]), None
    return found


def statements(text: str) -> list[int]:
    """Where what follows "the answer is", "answer:" and the like begins, in order."""
    return [cue.end() for cue in _CUE.finditer(text)]


def retracted_after(text: str, position: int) -> bool:
    """Whether the text takes something back after a position ("wait, …")."""
    return _RETRACTED.search(text, position) is not None


def last_box(text: str) -> Box | None:
    """The last box that is in no other box. A box in a truncated text may have no end."""
    if "box" not in text:
        return None
    closed, unclosed = _boxes(text)
    start, covered, inside = -1, -1, (0, 0)
    for begin, opening, closing in sorted(closed):
        if begin >= covered:
            start, covered, inside = begin, closing, (opening, closing)
        elif not text[inside[0] : begin].strip() and not text[closing + 1 : inside[1]].strip():
            inside = (opening, closing)  # a box that holds nothing but a box
    if unclosed > start:
        return Box(unclosed, None)
    return Box(start, text[slice(*inside)]) if start >= 0 else None


def _boxes(text: str) -> tuple[list[tuple[int, int, int]], int]:
    """Each closed box's start, opening and closing; the start of the last unclosed one, or -1."""
    outer: list[tuple[int, int | None]] = []  # open braces: where, and the box's start if it is one
    closed: list[tuple[int, int, int]] = []
    for brace in _BRACE.finditer(text):
        token = brace.group()
        if token[0] == "{" or brace.group(1):
            outer.append((brace.end(), brace.start() if brace.group(1) else None))
        elif token == "}" and outer:
            opening, start = outer.pop()
            if start is not None:
                closed.append((start, opening, brace.start()))
        elif len(token) > 2:  # a box without braces
            bare = _BARE_BOX.match(text, brace.end())
            closed.append((brace.start(), brace.end(), bare.end() if bare else brace.end()))
    return closed, max((start for _, start in outer if start is not None), default=-1)


def unboxed(text: str) -> str:
    """The text without the commands of the boxes in it; their contents stay."""
    return re.sub(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])", "", text)


def closing_brace(text: str, opening: int) -> int | None:
    """Where the brace at `opening` is closed; None when it never is."""
    depth = 0
    for brace in re.finditer(r"\\[{}]|[{}]", text[opening:]):
        if len(brace.group()) == 1:
            depth += 1 if brace.group() == "{" else -1
            if depth == 0:
                return opening + brace.start()
    return None


def _marks(text: str, hashes: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    box = last_box(text)
    if box is not None:
        yield box.start, "" if box.content is None else unboxed(box.content)
    for match in hashes.finditer(text):
        inner = last_box(match.group(1))
        if inner is None:
            yield match.start(), match.group(1)
    tagged = last_tag(text)
    if tagged is not None:
        start, content = tagged
        inside = marked(content, hashes)
        yield start + len(content), content if inside is None else inside
