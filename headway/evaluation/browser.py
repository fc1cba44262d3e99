"""The samples of one or two evaluations as HTML: prompts, and completions beside each other.

Everything that came from a model or a data set is escaped text inside elements; the page's one
script, named in its content policy by digest, only shows and hides. So a completion that holds
markup is read, not run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import islice, zip_longest
from typing import Any

from headway.evaluation.estimators import is_right
from headway.evaluation.records import CompletionRecord, PromptRecord
from headway.report_data import plain_prompt
from headway.report_svg import nice

MAX_PROMPTS = 1000
_MAX_TEXT = 8_000  # characters shown of one text
_MAX_PAGE = 12_000_000  # characters of all samples
_SUMMARY = 160

SCRIPT = """
(()=>{const all=[...document.querySelectorAll('.sample')],text=document.querySelector('#find'),
count=document.querySelector('#count');if(!text)return;
function show(){const kind=document.querySelector('input[name=kind]:checked').value,
want=text.value.toLowerCase();let n=0;for(const one of all){
const yes=(kind==='all'||one.dataset.kinds.split(' ').includes(kind))&&
(!want||one.textContent.toLowerCase().includes(want));one.hidden=!yes;n+=yes}
count.textContent=n+' of '+all.length}
document.querySelectorAll('input[name=kind]').forEach(e=>e.addEventListener('change',show));
text.addEventListener('input',show);show()})();
"""

BROWSER_STYLE = """
.tools{display:flex;flex-wrap:wrap;gap:8px 18px;align-items:center;margin:0 0 12px}
.tools input[type=search]{font:inherit;padding:6px 10px;min-width:min(100%,280px);
background:var(--card);color:inherit;border:1px solid var(--edge);border-radius:8px}
.tools label{display:inline-flex;gap:5px;align-items:center}
#count{color:var(--soft)}
.sample{margin:0 0 8px}
.sample[hidden]{display:none}
.sample>summary{display:grid;grid-template-columns:auto auto minmax(0,1fr);gap:12px;font-weight:400}
.sample>summary span:last-child{overflow:hidden;text-overflow:ellipsis;white-space:nowrap;
color:var(--soft)}
.sides{display:grid;gap:14px;padding:4px 14px 14px;
grid-template-columns:minmax(0,1fr) minmax(0,2fr)}
.sides.two{grid-template-columns:minmax(0,1fr) minmax(0,1.5fr) minmax(0,1.5fr)}
.sides h4{margin:8px 0 6px;font-size:12.5px;font-weight:500;color:var(--soft)}
.answer{border-left:3px solid var(--rule);padding:2px 0 2px 10px;margin:0 0 12px}
.answer.right{border-color:var(--s3)}.answer.wrong{border-color:var(--limit)}
.answer.null{border-color:var(--s2)}
.answer p{margin:0 0 3px;font-size:12.5px;color:var(--soft);overflow-wrap:anywhere}
.answer b{color:var(--ink)}
@media (max-width:760px){.sides,.sides.two{grid-template-columns:minmax(0,1fr)}}
"""


def policy() -> str:
    """The page's content policy: nothing is loaded, and no script but SCRIPT runs."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none';"
        f" script-src 'sha256-{digest}'"
    )


def browser(
    sides: Sequence[tuple[str, Iterable[PromptRecord]]], pass_reward: float, total: int
) -> str:
    """The samples of one evaluation, or of two that have the same prompts in the same order.

    `total` is how many prompts there are; what does not fit into a page is left out, and said.
    """
    shown: list[str] = []
    size = 0
    names = [name for name, _ in sides]
    for records in islice(zip_longest(*(each for _, each in sides)), MAX_PROMPTS):
        one = _sample(names, [r for r in records if r is not None], pass_reward)
        size += len(one)
        if size > _MAX_PAGE:
            break
        shown.append(one)
    if not shown:
        return '<p class="none">nothing was recorded</p>'
    rest = total - len(shown)
    note = f'<p class="none">{rest} more prompts are in eval/samples.jsonl.</p>' if rest > 0 else ""
    return _tools() + "".join(shown) + note + f"<script>{SCRIPT}</script>"


def _tools() -> str:
    kinds = {
        "all": "all", "right": "a right one", "wrong": "a wrong one", "null": "an ungraded one"
    }  # fmt: skip
    radios = "".join(
        f'<label><input type="radio" name="kind" value="{kind}"'
        f"{' checked' if kind == 'all' else ''}>{text}</label>"
        for kind, text in kinds.items()
    )
    return (
        f'<div class="tools">{radios}<input type="search" id="find" placeholder="search in'
        ' prompts and completions" aria-label="search"><span id="count"></span></div>'
    )


def _sample(names: Sequence[str], records: Sequence[PromptRecord], pass_reward: float) -> str:
    first = records[0]
    kinds = {_kind(c, pass_reward) for record in records for c in record.completions}
    rewards = " → ".join(_mean(record) for record in records)
    columns = "".join(
        f"<div><h4>{escape(name)}</h4>{_answers(record, pass_reward)}</div>"
        for name, record in zip(names, records, strict=False)
    )
    line = " ".join(plain_prompt(first.prompt).split())[:_SUMMARY]
    return (
        f'<details class="sample" data-kinds="{" ".join(sorted(kinds))}"><summary>'
        f"<b>{rewards}</b><span>{escape(first.data_source)} {first.index}</span>"
        f"<span>{escape(line)}</span></summary>"
        f'<div class="sides{" two" if len(names) > 1 else ""}">'
        f"<div><h4>prompt</h4>{_prompt(first.prompt)}<h4>item</h4>{_text(_item(first.item))}</div>"
        f"{columns}</div></details>"
    )


def _prompt(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return _text(plain_prompt(prompt))
    return "".join(
        f"<h4>{escape(str(message.get('role', '')))}</h4>{_text(str(message.get('content', '')))}"
        for message in prompt
        if isinstance(message, Mapping)
    )


def _answers(record: PromptRecord, pass_reward: float) -> str:
    if not record.completions:
        return f'<p class="none">not sampled: {escape(record.skipped)}</p>'
    return "".join(_answer(completion, pass_reward) for completion in record.completions)


def _answer(completion: CompletionRecord, pass_reward: float) -> str:
    kind = _kind(completion, pass_reward)
    told = [f"<b>{'no reward' if completion.reward is None else nice(completion.reward)}</b>"]
    if completion.reward is None:
        why = ": ".join(t for t in (completion.error_kind, completion.error_message[:500]) if t)
        told.append(escape(why))
    told += [f"{escape(name)} {nice(value)}" for name, value in completion.parts.items()]
    told.append(f"{completion.num_tokens} tokens, {escape(completion.finish_reason)}")
    about = " · ".join(told)
    return f'<div class="answer {kind}"><p>{about}</p>{_text(completion.text)}</div>'


def _kind(completion: CompletionRecord, pass_reward: float) -> str:
    if completion.reward is None:
        return "null"
    return "right" if is_right(completion.reward, pass_reward) else "wrong"


def _mean(record: PromptRecord) -> str:
    rewards = [c.reward for c in record.completions if c.reward is not None]
    return nice(sum(rewards) / len(rewards) if rewards else None)


def _item(item: Mapping[str, Any]) -> str:
    return json.dumps(item, ensure_ascii=False, indent=1, default=str)


def _text(text: str) -> str:
    more = len(text) - _MAX_TEXT
    cut = f"\n… {more:,} more characters" if more > 0 else ""
    return f"<pre>{escape(text[:_MAX_TEXT])}{cut}</pre>"
