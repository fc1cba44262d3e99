"""Graders of whole groups: what is scored together, and what the failure of one costs."""

import asyncio

import httpx
import pytest

from headway.messages import ScoreItem
from services.reward.request import ServiceLimits
from services.reward.waiting import WireItem, split, units_of
from services.reward.workers import PoolSettings
from tests.support.reward_stand import items, service, until

RANKS = {"type": "hostile_group"}


def group(name, *texts, **does):
    """Items of one group; `does` maps a text to what happens there."""
    return [
        ScoreItem(None, text, {"do": does[text]} if text in does else {}, name) for text in texts
    ]


def test_units_are_items_or_groups_and_batches_never_cut_one():
    wire = [WireItem("", "", "", name) for name in ("a", "", "b", "a", "", "b", "a")]
    positions = [[p for p, _ in unit] for unit in units_of(wire, whole_groups=True)]
    assert positions == [[0, 3, 6], [1], [2, 5], [4]]
    assert [[p for p, _ in u] for u in units_of(wire, whole_groups=False)] == [
        [i] for i in range(7)
    ]

    def sizes(*units, step):
        runs = split([tuple((0, wire[0]) for _ in range(size)) for size in units], step)
        return [[len(unit) for unit in run] for run in runs]

    assert sizes(1, 1, 1, 1, 1, step=2) == [[1, 1], [1, 1], [1]]
    assert sizes(3, 9, 1, 3, 4, 1, step=4) == [[3], [9], [1, 3], [4], [1]]
    assert sizes(step=4) == []


async def test_a_group_is_scored_together_wherever_its_items_stand(hostile):
    mixed = [*group("a", "x", "xxxx", "xx"), *group("", "xxxxxxx"), *group("b", "yy", "y")]
    order = [4, 0, 3, 2, 5, 1]
    parts = {"type": "sum", "graders": {"rank": RANKS, "one": {"type": "hostile"}}}
    async with service(hostile) as (server, client):
        scores = await client.score("", "", RANKS, [mixed[i] for i in order], 5.0)
        assert [s.reward for s in scores] == [1.0, 0.0, 0.0, 1.0, 0.0, 2.0]
        summed = await client.score("", "", parts, mixed, 5.0)
        assert [s.reward for s in summed] == [1.0, 3.0, 2.0, 1.0, 2.0, 1.0]
        assert summed[1].parts == {"rank": 2.0, "one": 1.0}
        body = {"grader": RANKS, "items": [{"completion": c, "group": "g"} for c in ("ab", "a")]}
        async with httpx.AsyncClient() as http:
            answer = await http.post(server.http_address + "/v1/score", json=body)
        assert [r["reward"] for r in answer.json()["results"]] == [1.0, 0.0]


async def test_one_groups_failure_is_all_of_its_items_and_no_others(hostile):
    deeds = {"hang": "timeout", "exit": "crash", "raise": "internal", "hog": "memory"}
    asked = [*group("first", "1", "22")]
    for deed in deeds:
        asked += [*group(deed, "1", "22", "333", **{"22": deed}), *group(f"{deed}+", "1", "22")]
    async with service(hostile) as (server, client):
        scores = await client.score("", "", RANKS, asked, 1.0)
        assert server.pool.num_ready == 1
    for item, score in zip(asked, scores, strict=True):
        if item.group in deeds:
            assert (score.reward, score.error_kind) == (None, deeds[item.group])
        else:
            assert score.reward == len(item.completion) - 1
    by_group = {item.group: score for item, score in zip(asked, scores, strict=True)}
    assert by_group["hang"].error_message == "not scored within 3 s, the limit of a group of 3"
    assert by_group["exit"].error_message == "the group of 3 ended its worker process twice"


async def test_an_item_of_a_group_may_be_null_alone_and_a_damaged_one_spoils_its_group(hostile):
    lost = group("a", "1", "22", "333", **{"22": "lost"})
    damaged = {"completion": "x" * 60, "group": "b"}
    async with service(hostile, ServiceLimits(max_item_bytes=50)) as (server, client):
        scores = await client.score("", "", RANKS, lost, 5.0)
        assert [(s.reward, s.error_kind) for s in scores] == [
            (0.0, ""), (None, "bad_input"), (2.0, ""),
        ]  # fmt: skip
        asked = [damaged, {"completion": "y", "group": "b"}, {"completion": "z"}]
        async with httpx.AsyncClient() as http:
            body = {"grader": RANKS, "items": asked}
            answer = await http.post(server.http_address + "/v1/score", json=body)
        kinds = [r["error_kind"] for r in answer.json()["results"]]
        assert kinds == ["bad_input", "bad_input", ""]


async def test_a_group_whose_worker_is_killed_from_outside_is_scored_again(hostile, tmp_path):
    first, second = group("a", "1", "22", "333"), group("b", "1", "22")
    marked = ScoreItem(None, "22", {"do": "killed_once", "marker": str(tmp_path / "m")}, "a")
    asked = [first[0], marked, first[2], *second]
    async with service(hostile) as (_, client):
        scores = await client.score("", "", RANKS, asked, 10.0)
    assert [s.reward for s in scores] == [0.0, 1.0, 2.0, 0.0, 1.0]


async def test_many_groups_over_two_workers(hostile, tmp_path):
    sizes = [1 + (7 * i) % 23 for i in range(60)]
    asked = [s for i, n in enumerate(sizes) for s in group(f"g{i}", *("x" * k for k in range(n)))]
    log = tmp_path / "log"
    pool = PoolSettings(num_workers=2, memory_bytes=512 << 20, imports=hostile.imports)
    async with service(pool) as (_, client):
        scores = await client.score("", "", RANKS | {"log": str(log)}, asked, 10.0)
    assert [s.reward for s in scores] == [float(k) for n in sizes for k in range(n)]
    assert len(log.read_text().splitlines()) == len(asked)  # each group once


async def test_groups_are_of_the_request_that_the_id_names(hostile):
    from headway.errors import Conflict

    one, other = group("a", "1", "22"), group("b", "1", "22")
    async with service(hostile) as (_, client):
        await client.score("id", "", RANKS, one, 5.0)
        with pytest.raises(Conflict):
            await client.score("id", "", RANKS, other, 5.0)


async def test_a_cancelled_request_of_groups_is_dropped(hostile, tmp_path):
    gate, log = tmp_path / "gate", tmp_path / "log"
    spec = RANKS | {"log": str(log)}
    held = [ScoreItem(None, "1", {"do": "wait_for", "file": str(gate)}, "a")]
    async with service(hostile) as (server, client):
        running = asyncio.create_task(client.score("", "", spec, held, 30.0))
        await until(log.exists)
        running.cancel()
        await until(lambda: not server.scorer._running)
        gate.touch()
        (after,) = await client.score("", "", {"type": "hostile"}, items({}), 30.0)
        assert after.reward == 1.0
