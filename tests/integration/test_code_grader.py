"""The `code` grader: right programs, wrong ones, and every trick to pass without being right."""

import asyncio
import json

import pytest

from headway.messages import ScoreItem
from services.reward.grading.outcome import BadInput
from services.reward.workers import PoolSettings
from tests.support.reward_stand import service
from tests.support.sandboxes import ended, grade

ADD = "a, b = map(int, input().split())\nprint(a + b)"
IO = [{"input": f"{i} {i + 1}\n", "output": f"{2 * i + 1}\n"} for i in range(4)]
CALLS = [{"args": [2], "expected": 4}, {"args": [3], "expected": 9}]
ASSERTS = "assert f(2) == 4\nassert f(3) == 9"
CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n"
UNITTEST = (
    "import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n"
    "    def test_two(self): self.assertEqual(f(2), 4)\n"
    "    def test_three(self): self.assertEqual(f(3), 9)\n"
)
LIAR = (
    "class Liar(int):\n    def __eq__(self, other): return True\n"
    "    def __ne__(self, other): return False\n    def __hash__(self): return 4\n"
    "def f(x): return Liar(0)"
)
OBJECT_LIAR = LIAR.replace("(int)", "").replace("Liar(0)", "Liar()")
QUICK = {"score": "fraction", "time_limit_s": 1}
# Whatever of these a program does, it has not computed a square.
CHEATS = {
    "exits early": "import sys\nsys.exit(0)",
    "exits early, hard": "import os\nos._exit(0)",
    "exits when called": "import os\ndef f(x): os._exit(0)",
    "exits at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "equals everything": LIAR,
    "is an object that equals everything": OBJECT_LIAR,
    "patches builtins": (
        "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\n"
        "builtins.all = builtins.any = builtins.isinstance = lambda *a: True\n"
        "builtins.abs = builtins.len = lambda x: 0\ndef f(x): return 0"),
    "defines what tests use": (
        "def len(x): return 4\ndef assertEqual(*a): pass\nclass unittest:\n"
        "    class TestCase: pass\ndef check(c): pass\ndef f(x): return 0"),
    "patches unittest": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
        "unittest.TestCase.run = lambda s, r=None: None\ndef f(x): return 0"),
    "replaces modules": (
        "import sys, types\nfor name in ('tests', 'json', 'ast', 'unittest', 'wire', 'asserts'):\n"
        "    sys.modules[name] = types.ModuleType(name)\ndef f(x): return 0"),
    "prints success": (
        "import os\nmark = b'{\"ok\": true}\\n{\"end\": true}\\n'\n"
        "for n in range(64):\n    try: os.write(n, mark)\n"
        "    except OSError: pass\ndef f(x): return 0"),
    "looks for the tests": (
        "import gc, os, sys\ndef f(x):\n    seen = []\n    frame = sys._getframe()\n"
        "    while frame:\n        seen += [frame.f_locals, frame.f_globals]\n"
        "        frame = frame.f_back\n    seen += gc.get_objects()\n"
        "    text = ''.join(str(s) for s in seen if isinstance(s, (str, dict, list, bytes)))\n"
        "    if '%s f(2)' % 'assert' in text or 'test_%s' % 'two' in text: return x * x\n"
        "    for folder, _, files in os.walk('/'):\n        for file in files:\n"
        "            if 'test' in file and folder.startswith(('/tmp', '/box')): return x * x\n"
        "    return 0"),
    "reads the tests' pipe": (
        "import os\ndef f(x):\n    for n in range(64):\n        try: data = os.read(n, 1 << 16)\n"
        "        except OSError: continue\n        if b'9' in data: return x * x\n    return 0"),
    "kills the checker": (
        "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    return 0"),
    "traces the checker": (
        "import ctypes, os\ndef f(x):\n    c = ctypes.CDLL(None)\n"
        "    return 0 if c.ptrace(16, os.getppid(), 0, 0) else x * x"),
    "raises what tests skip": "import unittest\ndef f(x): raise unittest.SkipTest('no')",
    "raises StopIteration": "def f(x): raise StopIteration",
    "raises SystemExit": "def f(x): raise SystemExit(0)",
    "raises KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "lacks a module": "import no_such_module\ndef f(x): return x * x",
    "is no Python": "def f(x: return x * x",
    "is empty": "",
    "recurses": "def f(x): return f(x)",
    "answers with itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_that_cheats_passes_nothing(name):
    by_call = grade(CHEATS[name], cases=CALLS, function="f", **QUICK)
    assert by_call.reward == 0.0, by_call
    by_tests = grade(CHEATS[name], tests=[ASSERTS, CHECK, UNITTEST], function="f", **QUICK)
    assert by_tests.reward == 0.0, by_tests
    assert sum(by_tests.parts.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("tests", [ASSERTS, CHECK, UNITTEST, ASSERTS.splitlines()])
def test_right_and_half_right_programs(tests):
    right, half = "def f(x): return x * x", "def f(x): return 4"
    assert ended(grade(right, tests=tests, function="f")) == {"passed": 1.0}
    assert grade(half, tests=tests, function="f").reward == 0.0
    share = grade(half, tests=tests, function="f", score="fraction").reward
    assert share == (0.0 if tests == CHECK else 0.5)


def test_stdin_cases():
    assert ended(grade(f"So:\n```python\n{ADD}\n```\nDone.", cases=IO)) == {"passed": 1.0}
    wrong = grade(ADD.replace("a + b", "a * b + 1"), cases=IO, score="fraction")
    assert ended(wrong) == {"passed": 0.5, "wrong": 0.5}
    assert wrong.reward == 0.5
    late = grade("a = input()\nwhile a[0] > '1': pass\nprint(1 if a[0] == '0' else 3)",
                 cases=IO, time_limit_s=1)  # fmt: skip
    assert ended(late) == {"passed": 0.5, "timeout": 0.5}
    assert late.reward == 0.0
    assert ended(grade("import sys\nsys.exit(0)", cases=IO)) == {"wrong": 1.0}
    assert ended(grade("while True: print('3' * 999)", cases=IO)) == {"output": 1.0}
    assert ended(grade("bytearray(9 << 30)", cases=IO)) == {"memory": 1.0}
    assert ended(grade("import os\nwhile True: os.fork()", cases=IO)) == {"processes": 1.0}
    assert ended(grade(f"{ADD}\nraise SystemExit(3)", cases=IO)) == {"crash": 1.0}
    left = f"import os\n{ADD}\nif os.fork() == 0:\n    import time\n    time.sleep(600)"
    assert ended(grade(left, cases=IO)) == {"passed": 1.0}
    kill = f"import os\n{ADD}\nif a == 1: os.kill(os.getppid(), 9)"
    assert ended(grade(kill, cases=IO, score="fraction")) == {"passed": 0.25, "crash": 0.75}


HONEST = {
    "exit": "print(3)\nexit()",
    "a deep thread": (
        "import sys, threading\nthreading.stack_size(1 << 26)\nsys.setrecursionlimit(10**6)\n"
        "def down(n): return n and 1 + down(n - 1)\n"
        "threading.Thread(target=lambda: print(down(20000) - 19997)).start()"),
    "a pool": (
        "import multiprocessing\ndef f(x): return x\nif __name__ == '__main__':\n"
        "    with multiprocessing.Pool(2) as pool: print(sum(pool.map(f, [1, 2])))"),
    "exit handlers": "import atexit\natexit.register(print, 3)",
    "descriptors": "import os\nos.write(1, b'%d' % sum(map(int, os.read(0, 99).split())))",
    "pickle": "import pickle\nclass A: x = 3\nprint(pickle.loads(pickle.dumps(A())).x)",
    "a child": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(3)'])",
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_find_what_they_need(name):
    graded = grade(HONEST[name], cases=[{"input": "1 2\n", "output": "3"}])
    assert ended(graded) == {"passed": 1.0}


def test_each_case_has_a_fresh_program():
    counts = "import builtins\nbuiltins.n = getattr(builtins, 'n', 0) + 1\nprint(builtins.n)"
    assert grade(counts, cases=[{"input": "", "output": "1"}] * 3).reward == 1.0


@pytest.mark.parametrize(
    "cases, program",
    [
        ({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]},
         "import sys\nprint(sum(map(int, sys.stdin.read().split())))"),
        ({"inputs": [[2], [3]], "outputs": [[4], 9], "fn_name": "f"}, "def f(x): return x * x"),
        (json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]),
         "class Solution:\n    def f(self, a, b): return sum(a) + b"),
        ([{"args": [[1, 2]], "kwargs": {"k": 1}, "expected": {"1": [1, None]}}],
         "def f(a, k): return {1: (a[0], None)}"),
    ],
    ids=["apps stdin", "apps call", "livecodebench", "own"],
)  # fmt: skip
def test_forms_of_the_field(cases, program):
    item = {"cases": cases}
    assert grade(program, item, cases="{{item.cases}}", function="f").reward == 1.0


def test_tolerance_is_asked_for():
    third, cases = "print(1 / 3, 'x')", [{"input": "", "output": "0.33333 x"}]
    assert grade(third, cases=cases).reward == 0.0
    assert grade(third, cases=cases, tolerance=1e-4).reward == 1.0
    calls = [{"args": [], "expected": [0.33333]}]
    assert grade("def f(): return [1 / 3]", cases=calls, function="f").reward == 0.0
    assert grade("def f(): return [1 / 3]", cases=calls, function="f", tolerance=1e-4).reward == 1.0


def test_objects_exceptions_iterators_and_arguments_changed_in_place():
    program = (
        "class Full(ValueError): pass\nclass Box:\n"
        "    def __init__(self, n): self.n, self.x = n, []\n"
        "    def put(self, x):\n        if len(self.x) >= self.n: raise Full('full')\n"
        "        self.x.append(x)\n        return self\n    def __len__(self): return len(self.x)\n"
        "def fill(xs): xs.append(9)\ndef up(n): yield from range(n)\n"
        "def look(d, k): return d[k]\n"
    )
    tests = (
        "from solution import *\nb = Box(2).put(1)\n"
        "assert len(b.put({2})) == 2 and b.x == [1, {2}]\n"
        "try:\n    b.put(3)\n    assert False\nexcept Full as e:\n    assert str(e) == 'full'\n"
        "xs = [1]\nfill(xs)\nassert xs == [1, 9]\nassert list(up(3)) == [0, 1, 2]\n"
        "try:\n    look({}, 'k')\n    assert False\n"
        "except KeyError as e:\n    assert e.args == ('k',)\n"
        "assert isinstance(b.x, list) and not isinstance(b, int)\n"
    )
    assert ended(grade(program, tests=tests, score="fraction")) == {"passed": 1.0}


def test_tests_that_cannot_be_run_are_null_whatever_the_program():
    for program in ("def f(x): return x", "import os; os._exit(0)"):
        for tests, message in (
            ("assert f(", "SyntaxError"),
            ("x = 1", "assert nothing"),
            ("def test_it(fixture): assert f(1)", "wants arguments"),
        ):
            if program.startswith("import") and tests == "x = 1":
                continue
            with pytest.raises(BadInput, match=message):
                grade(program, tests=tests)
    with pytest.raises(BadInput, match="pass a function to the program"):
        grade("def f(x): return x(1)", tests="assert f(lambda y: y) == 1")
    for cases, message in (
        ("[", "no JSON"), ([], "empty"), ([1], "not an object"), ([{"input": 1}], "no output"),
        ([{"args": [1], "expected": 1}], "no function is named"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=message):
            grade(ADD, {"cases": cases}, cases="{{item.cases}}")


def test_modules_that_tests_look_into_are_never_the_programs():
    fake = "class {0}:\n    isclose = allclose = lambda *a, **k: True\ndef f(x): return 0"
    tests = "assert {0}.{1}(f(2), 4)"
    assert ended(grade(fake.format("math"), tests=tests.format("math", "isclose"))) == {
        "wrong": 1.0
    }
    fakes = {"tests": tests.format("np", "allclose"), "packages": ["numpy"]}
    assert ended(grade(fake.format("np"), **fakes)) == {"wrong": 1.0}
    right = "import numpy as np\ndef f(x): return np.array([x, x]).sum() ** 2 / 4"
    assert ended(grade(right, **fakes)) == {"passed": 1.0}


async def test_s051_hostile_submissions_score_0_and_the_next_grading_is_normal():
    programs = [
        ADD, "import os\nwhile True: os.fork()", "bytearray(64 << 30)",
        "while True: print('x' * 999)", "import os\nos.kill(os.getppid(), 9)\nos.kill(1, 9)",
        "print(open('/proc/1/environ').read())",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)", ADD,
    ]  # fmt: skip
    spec = {"type": "code", "cases": IO, "time_limit_s": 1, "timeout_s": 60.0}
    async with service(PoolSettings(num_workers=2)) as (server, client):
        before = server.pool.pids
        scores = await client.score("", "", spec, [ScoreItem(None, p, {}) for p in programs], 60.0)
        assert [s.reward for s in scores] == [1.0, 0, 0, 0, 0, 0, 0, 1.0], scores
        (again,) = await asyncio.gather(
            client.score("", "", spec, [ScoreItem(None, ADD, {})], 60.0)
        )
        assert again[0].reward == 1.0
        assert server.pool.pids == before
