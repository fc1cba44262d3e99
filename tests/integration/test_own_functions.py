"""Users' own reward functions, end to end through a real service and its sandbox."""

import json

from headway.jobspec import load_job
from headway.messages import ScoreItem
from services.reward.workers import PoolSettings
from tests.support.reward_stand import ROOT, service

LIMIT_S = 60.0  # of one item: no test waits for it
CHAT = [{"role": "user", "content": "6 * 7?"}]
VERL_ROW = {
    "data_source": "mine",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 3},
}


def own(source, **keys):
    return {"type": "python", "source": source, "timeout_s": LIMIT_S, **keys}


def group(*texts, item=None, prompt=CHAT, name="g"):
    return [ScoreItem(prompt, text, item or {}, name) for text in texts]


async def ask(client, grader, items):
    return await client.score("", "", grader, items, LIMIT_S)


async def rewards(client, grader, items):
    scores = await ask(client, grader, items)
    assert [s.error_message for s in scores if s.error_kind] == []
    return [s.reward for s in scores]


async def refusals(client, grader, items):
    return [(s.reward, s.error_kind, s.error_message) for s in await ask(client, grader, items)]


VERL = """
import numpy as np
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    assert (data_source, extra_info) == ("mine", {"index": 3})
    print("heard by nobody", flush=True)
    right = solution_str == ground_truth
    return {"score": np.float32(scale) * right, "acc": right, "length": len(solution_str),
            "pred": solution_str}
"""
VERL_BATCH = """
def compute_score_batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [float(s == t) for s, t in zip(solution_strs, ground_truths, strict=True)]
"""
TRL = """
import asyncio
async def longest(prompts, completions, answer, level, **columns):
    await asyncio.sleep(0)
    assert prompts == [[{"role": "user", "content": "6 * 7?"}]] * len(completions), prompts
    assert (answer, level) == (["42"] * len(completions), [None] * len(completions))
    texts = [completion[0]["content"] for completion in completions]
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [None if not text else float(len(text) == max(map(len, texts))) for text in texts]
"""
TRL_PLAIN = """
def shout(completions, **kwargs):
    assert sorted(kwargs) == ["answer", "prompts"]
    return [sum(map(str.isupper, text)) for text in completions]
"""
RUBRIC = """
class Parser:
    def parse_answer(self, completion):
        return completion[-1]["content"].strip()
parser = Parser()
async def right(parser, completion, answer, state, info, task):
    assert state["answer"] == answer and state["prompt"][0]["content"] == "6 * 7?"
    assert (info, task) == ({"level": 2}, "default")
    return parser.parse_answer(completion) == answer
"""
RUBRIC_GROUP = """
def rank(completions, answers, states):
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [sum(n < own for n in lengths) for own in lengths]
"""
OPENAI = """
def grade(sample, item):
    assert sample["choices"][0]["message"]["content"] == sample["output_text"]
    return 0.5 * (sample["output_text"] == item["answer"]) + 0.5 * ("output_json" in sample)
"""


async def test_every_signature_of_the_field_is_called_as_there():
    answers = {"answer": "42"}
    async with service() as (_, client):
        scores = await ask(client, own(VERL, kwargs={"scale": 2}), group("42", "7", item=VERL_ROW))
        assert [(s.reward, s.parts) for s in scores] == [
            (2.0, {"acc": 1.0, "length": 2.0}), (0.0, {"acc": 0.0, "length": 1.0}),
        ]  # fmt: skip
        assert await rewards(client, own(VERL_BATCH), group("42", "7", item=VERL_ROW)) == [1.0, 0.0]
        both = [{**answers, "level": None}, answers]
        asked = [
            ScoreItem(CHAT, text, item, "g")
            for text, item in zip(["a", "bb", ""], [*both, answers], strict=True)
        ]
        assert await refusals(client, own(TRL), asked) == [
            (0.0, "", ""),
            (1.0, "", ""),
            (None, "bad_input", "longest gave None for this completion"),
        ]
        plain = group("Abc", "ABc", "", item=answers, prompt="say")
        assert await rewards(client, own(TRL_PLAIN), plain) == [1.0, 2.0, 0.0]
        rubric = group(" 42", "7", item={**answers, "info": json.dumps({"level": 2})})
        assert await rewards(client, own(RUBRIC), rubric) == [1.0, 0.0]
        two = [
            *group("1", "333", "22", item=answers, name="a"),
            *group("1", item=answers, name="b"),
        ]
        assert await rewards(client, own(RUBRIC_GROUP), two) == [0.0, 2.0, 1.0, 0.0]
        assert await rewards(client, own(OPENAI), group("42", "x", item=answers)) == [1.0, 0.0]
        parts = {
            "own": own(RUBRIC_GROUP) | {"timeout_s": None},
            "form": {"type": "regex", "pattern": "3"},
        }
        scores = await ask(client, {"type": "sum", "graders": parts}, two)
        assert [s.reward for s in scores] == [0.0, 3.0, 1.0, 0.0]
        assert scores[1].parts == {"own": 2.0, "form": 1.0}


async def test_the_example_travels_from_its_file_to_the_sandbox():
    grader = load_job(ROOT / "examples" / "own_reward.yaml").reward.grader
    row = {"answer": "3", "metadata": {"source_dataset": "chain_sum"}}
    async with service() as (_, client):
        scores = await ask(client, grader, group("3", "It is 3", "4", "", item=row))
    assert [s.reward for s in scores] == [1.0, 0.8, 0.2, 0.0]
    assert scores[1].parts == {"right": 1.0, "only_a_number": 0.0}


async def test_what_a_function_wants_and_nobody_has_is_said():
    verl = "def compute_score(data_source, solution_str, ground_truth): return 1.0"
    parser = "def right(parser, completion): return 1.0"
    ids = "def right(completions, completion_ids): return [1.0]"
    async with service() as (_, client):
        for source, item, wanted in (
            (verl, {"data_source": "a"}, "compute_score wants ground_truth, of which"),
            (parser, {}, "nor kwargs or a variable of that name in the file has a value"),
            (ids, {"a": 1}, "(there are: a, completions, prompts)"),
        ):  # fmt: skip
            ((reward, kind, message),) = await refusals(client, own(source), group("x", item=item))
            assert (reward, kind) == (None, "bad_input")
            assert wanted in message
        missing = own("def f(completion): ...", function="g", call="rubric")
        ((_, kind, message),) = await refusals(client, missing, group("x"))
        assert (kind, message) == (
            "internal",
            "function.py does not load: function.py defines no function g",
        )
        fails = own("import no_such_module\ndef f(completion): ...", file="mine.py")
        ((_, kind, message),) = await refusals(client, fails, group("x"))
        assert kind == "internal"
        assert message.startswith("mine.py does not load: ModuleNotFoundError: No module named")
        assert message.endswith("(mine.py, line 1)")


COUNTS = """
import numpy as np
def f(completions, what, **kwargs):
    return eval(what[0])
"""


async def test_s047_a_group_must_have_one_reward_a_completion():
    """Behaviour S047: never broadcast, cut short, or taken for 0."""
    wrong = {
        "[1.0]": "f gave 1 rewards, not 8",
        "[0.5] * 7": "f gave 7 rewards, not 8",
        "[0.5] * 9": "f gave 9 rewards, not 8",
        "np.zeros(8)": "f gave a ndarray, not a list of 8 rewards",
        "(0.5 for _ in range(8))": "f gave a generator, not a list of 8 rewards",
        "None": "f gave None, not a list of 8 rewards",
        "0.5": "f gave a float, not a list of 8 rewards",
        "{i: 0.5 for i in range(8)}": "f gave a dict, not a list of 8 rewards",
    }
    async with service() as (_, client):
        for what, message in wrong.items():
            seen = await refusals(client, own(COUNTS), group(*"abcdefgh", item={"what": what}))
            assert seen == [(None, "internal", message)] * 8
        mixed = "[1, True, 0.5, np.float32(2), np.int64(3), np.array(4.0), None, 'x']"
        seen = await refusals(client, own(COUNTS), group(*"abcdefgh", item={"what": mixed}))
        assert [reward for reward, _, _ in seen] == [1.0, 1.0, 0.5, 2.0, 3.0, 4.0, None, None]
        assert seen[7] == (None, "internal", "f gave a str, not a number")


OUTSIDE = """
import os
def f(completion):
    return float(os.path.exists("/proc/self") and os.environ.get("TZ") == "UTC")
"""


async def test_the_sandbox_is_left_only_where_operator_and_grader_say_so(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    outside = own(OUTSIDE, sandbox=False)
    async with service(PoolSettings(num_workers=1, trust_functions=True)) as (_, client):
        assert await rewards(client, own(OUTSIDE), group("x")) == [0.0]
        assert await rewards(client, outside, group("x")) == [1.0]
    async with service() as (_, client):
        ((reward, kind, message),) = await refusals(client, outside, group("x"))
        assert (reward, kind) == (None, "sandbox_unavailable")
        assert "--trust-functions" in message


async def test_without_a_sandbox_nothing_is_run(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    source = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(completion): return 1.0"
    async with service() as (_, client):
        ((reward, kind, _),) = await refusals(client, own(source), group("x"))
        assert (reward, kind) == (None, "sandbox_unavailable")
    assert not (tmp_path / "ran").exists()
