"""Users' functions that misbehave: what it costs, and that nobody else's items pay."""

import psutil

from headway.messages import ScoreItem
from services.reward.workers import PoolSettings
from tests.support.reward_stand import service

DEEDS = """
import json, os, struct, sys, time
import numpy as np

def fall(): return fall()
def hog(): return bytearray(1 << 40)
def patch():
    json.dumps = json.loads = os.write = os.read = struct.unpack = struct.pack = None
    return 1.0
def noise():
    for fd in (1, 2):
        os.write(fd, b"x" * (1 << 20))
    print("x" * (1 << 20), flush=True)
    return 1.0
def multiply():
    return float(os.fork() == 0) + 1.0
def herd():
    for _ in range(3):
        if os.fork() == 0:
            held = bytearray(b"x") * (200 << 20)
            time.sleep(99)
    time.sleep(99)
def forge():
    body = json.dumps({"id": "0", "results": [{"reward": 9.0, "parts": {}}]}).encode()
    for fd in range(3, 20):
        try:
            os.write(fd, struct.pack("!I", len(body)) + body)
        except OSError:
            pass
    return 1.0
class Odd:
    shape = ()
    def item(self): raise RuntimeError("no item")
class Sly(Exception):
    def __str__(self): sys.exit(0)
def sly(): raise Sly

def compute_score(solution_str, ground_truth):
    return 1.0 if ground_truth == "good" else eval(ground_truth)
"""
# what it does -> its reward, or the kind of its error and a part of the message
DEEDS_DONE = {
    "float('nan')": ("internal", "compute_score gave nan, not a finite number"),
    "float('-inf')": ("internal", "compute_score gave -inf, not a finite number"),
    "10 ** 400": ("internal", "a int is no reward"),
    "True": 1.0,
    "np.float16(0.5)": 0.5,
    "np.bool_(True)": 1.0,
    "np.array([0.5])": ("internal", "compute_score gave a ndarray, not a number"),
    "'1.0'": ("internal", "compute_score gave a str, not a number"),
    "1j": ("internal", "compute_score gave a complex, not a number"),
    "{'acc': 1.0}": ("internal", "compute_score gave a dict without score"),
    "{'score': 1.0, 'x': float('nan')}": ("internal", "x of compute_score gave nan"),
    "{'score': 1.0, **{str(n): n for n in range(99)}}": ("internal", "more than 64 parts"),
    "{'score': 1.0, '\\ud800': 1}": ("internal", "a part whose name is '\\ud800'"),
    "{'score': 1.0, 'x' * 200: 1}": ("internal", "a part whose name is 'xxx"),
    "Odd()": ("internal", "compute_score: RuntimeError: no item"),
    "sly()": ("internal", "compute_score: Sly (own.py, line "),
    "1 / 0": ("internal", "compute_score: ZeroDivisionError: division by zero (own.py, line "),
    "fall()": ("internal", "compute_score: RecursionError"),
    "sys.exit(3)": ("internal", "compute_score: SystemExit: 3 (own.py, line "),
    "float('HEADWAY_SECRET' in os.environ)": 0.0,
    "float(os.path.exists('/proc/self'))": 0.0,
    "noise()": 1.0,
    "multiply()": 1.0,
    "patch()": 1.0,
    "hog()": ("memory", "compute_score needed more memory than it may have"),
    "herd()": ("memory", "compute_score and what it started needed more memory"),
    "forge()": ("crash", "the item ended its worker process twice"),
    "os._exit(0)": ("crash", "the item ended its worker process twice"),
    "os.kill(os.getpid(), 9) or time.sleep(99)": ("crash", "twice"),
}


async def test_a_hostile_function_costs_its_own_items_only(monkeypatch):
    monkeypatch.setenv("HEADWAY_SECRET", "tell")
    spec = {"type": "python", "source": DEEDS, "file": "own.py", "timeout_s": 60}
    truths = [truth for deed in DEEDS_DONE for truth in (deed, "good")]
    items = [ScoreItem(None, "x", {"answer": truth}) for truth in truths]
    pool = PoolSettings(num_workers=1, memory_bytes=512 << 20)
    async with service(pool) as (server, client):
        scores = await client.score("", "", spec, items, 60.0)
        assert server.pool.num_ready == 1
        (worker,) = server.pool.pids
        sandboxed = psutil.Process(worker).children(recursive=True)
    assert psutil.wait_procs(sandboxed, timeout=10)[1] == []
    for (deed, wanted), got, good in zip(
        DEEDS_DONE.items(), scores[::2], scores[1::2], strict=True
    ):
        assert (good.reward, good.error_message) == (1.0, ""), deed
        if isinstance(wanted, tuple):
            assert (got.reward, got.error_kind) == (None, wanted[0]), (deed, got)
            assert wanted[1] in got.error_message, (deed, got)
        else:
            assert got.reward == wanted, (deed, got)


async def test_a_function_that_hangs_is_a_timeout_of_its_item():
    source = "import time\ndef f(completion): return 1.0 if completion else time.sleep(99)"
    spec = {"type": "python", "source": source, "timeout_s": 3}
    asked = [ScoreItem(None, text, {}) for text in ("a", "", "b")]
    async with service() as (_, client):
        scores = await client.score("", "", spec, asked, 3.0)
    assert [(s.reward, s.error_kind) for s in scores] == [(1.0, ""), (None, "timeout"), (1.0, "")]


async def test_one_that_hangs_or_ends_while_loading_fails_its_items_by_name():
    good = "\ndef f(completion): return 1.0"
    pool = PoolSettings(num_workers=1, start_timeout_s=20)
    async with service(pool) as (server, client):
        for source, kind, message in (
            ("import os; os._exit(3)", "internal", "own.py ended its process while loading"),
            ("import sys; sys.exit(3)", "internal", "own.py does not load: SystemExit: 3"),
            ("", "", ""),
        ):
            spec = {"type": "python", "source": source + good, "file": "own.py"}
            (score,) = await client.score("", "", spec, [ScoreItem(None, "x", {})], 20.0)
            assert score.error_kind == kind
            assert message in score.error_message
        assert server.pool.num_ready == 1
