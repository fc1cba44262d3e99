"""gRPC and REST say the same: scores, errors, validation, types, retry hints, the cache."""

import asyncio

import pytest
from prometheus_client import REGISTRY

from headway.graders import GRADERS
from services.reward.request import ServiceLimits
from tests.support.reward_doors import Refused, both_doors
from tests.support.reward_stand import QUICKSTART, service, until

ODD = [
    {"completion": "3", "item": {"answer": "3"}},
    {"completion": " -4 ", "item": {"answer": "3"}, "prompt": [{"role": "user", "content": "?"}]},
    {"completion": "3"},
    {"completion": "٣ é\u0000😀 3", "item": {"answer": 3}},
    {"completion": "3", "item": {"answer": float("nan")}},
    {"completion": "", "item": {"answer": "3", "other": {"deep": [1, None, {}]}}},
]


async def test_scores_are_the_same_by_both_doors():
    async with service() as (server, _), both_doors(server) as doors:
        for grader in (QUICKSTART, {"type": "length", "target": 2}):
            counted = [item | {"num_tokens": n} for n, item in enumerate(ODD)]
            by_grpc, by_rest = [await door.score(grader, counted) for door in doors]
            assert by_grpc == by_rest
        assert [r["reward"] for r in by_grpc] == [0, 0.5, 1, 0.5, 0, 0]
        by_grpc, by_rest = [await door.score(QUICKSTART, ODD) for door in doors]
        assert by_grpc == by_rest
        assert [r["reward"] for r in by_grpc] == [1.0, 0.2, None, 0.8, None, 0.0]
        kinds = [r["error_kind"] for r in by_grpc]
        assert kinds == ["", "", "bad_input", "", "bad_input", ""]
        for door in doors:
            assert await door.score(QUICKSTART, []) == []
            (uncounted,) = await door.score({"type": "length", "target": 2}, ODD[:1])
            assert (uncounted["reward"], uncounted["error_kind"]) == (None, "bad_input")


async def test_refusals_are_the_same_by_both_doors():
    limits = ServiceLimits(max_items=2)
    async with service(limits=limits) as (server, _), both_doors(server) as (by_grpc, by_rest):
        statuses = {"invalid": ("INVALID_ARGUMENT", 422), "conflict": ("ALREADY_EXISTS", 409)}
        good = {"type": "numeric"}
        calls = [
            ("invalid", lambda door: door.score({"type": "numerc"}, [])),
            ("invalid", lambda door: door.score({"type": "numeric", "abs_tol": "x"}, [])),
            ("invalid", lambda door: door.score({"type": "\ud800"}, [])),
            ("invalid", lambda door: door.score({"type": "numeric", "timeout_s": 1e6}, [])),
            ("invalid", lambda door: door.score(good, ODD[:3])),
            ("conflict", lambda door: door.score(good, ODD[:1], "once")),
        ]
        await by_grpc.score(good, ODD[:2], "once")
        for kind, call in calls:
            seen = []
            for number, door in enumerate((by_grpc, by_rest)):
                with pytest.raises(Refused) as refused:
                    await call(door)
                assert (refused.value.kind, refused.value.status) == (kind, statuses[kind][number])
                seen.append(refused.value.message)
            assert seen[0] == seen[1]


async def test_a_request_id_is_one_across_the_doors(hostile, tmp_path):
    log = tmp_path / "log"
    async with service(hostile) as (server, _), both_doors(server) as (by_grpc, by_rest):
        spec, items = {"type": "hostile", "log": str(log)}, [{"completion": "a", "prompt": None}]
        first = await by_grpc.score(spec, items, "r")
        again = await by_grpc.score(spec, items, "r")
        assert first == again
        assert log.read_text() == "a\n"
        with pytest.raises(Refused, match="conflict"):
            await by_rest.score(spec, [{"completion": "b"}], "r")
        flight = [by_rest.score(spec, [{"completion": f"c{n}"}], "s") for n in range(4)]
        answers = await asyncio.gather(*flight, return_exceptions=True)
        conflicts = [answer for answer in answers if isinstance(answer, Refused)]
        assert {answer.kind for answer in conflicts} == {"conflict"} and len(conflicts) == 3
        assert len(log.read_text().splitlines()) == 2


VALIDATED = [
    (QUICKSTART, None, []),
    (QUICKSTART, {"answer": "3"}, []),
    (QUICKSTART, {"answr": "3"}, ["grader.graders.right.reference"]),
    ({"type": "numerc"}, None, ["grader.type"]),
    ({}, None, ["grader.type"]),
    ([], None, ["grader"]),
    (None, None, ["grader"]),
    ({"type": "numeric", "timeout_s": 1e6}, None, ["grader.timeout_s"]),
    ({"type": "numeric", "extrct": 1, "abs_tol": -1}, None,
     ["grader.abs_tol", "grader.extrct"]),
    ({"type": "sum", "graders": {"a": {"type": "regex"}, "b": {"type": "numeric", "x": 1},
                                 "c": {"type": "numeric"}}}, {},
     ["grader.graders.a.pattern", "grader.graders.b.x"]),
    ({"type": "sum", "graders": {"a": {"type": "numeric"}, "b": {"type": "string_check",
                                                                  "operation": "eq"}}}, {},
     ["grader.graders.a.reference", "grader.graders.b.reference"]),
    ({"type": "sum", "graders": {"\ud800": {"type": "numeric"}}}, None, ["grader"]),
]  # fmt: skip


async def test_validation_names_every_fault_by_both_doors():
    async with service() as (server, _), both_doors(server) as doors:
        for grader, item, paths in VALIDATED:
            answers = [await door.validate(grader, item) for door in doors]
            assert answers[0] == answers[1]
            resolved, faults = answers[0]
            assert sorted(path for path, _ in faults) == paths
            assert (resolved is None) == bool(paths)
            if not paths:
                assert resolved["graders"]["right"]["extract"] == "last"
                assert resolved["graders"]["right"]["percent"] == "either"
        for door in doors:
            with pytest.raises(Refused) as refused:
                await door.validate(QUICKSTART, [1])
            assert refused.value.kind == "invalid"
        by_grpc, by_rest = [await door.graders() for door in doors]
        assert by_grpc == by_rest
        assert set(by_grpc) == set(GRADERS)
        description, schema = by_grpc["json_schema"]
        assert description == "1 where the text is JSON that a schema accepts, else 0."
        assert "schema" in schema["properties"] and {"schema", "type"} <= set(schema["required"])


async def test_a_full_queue_says_when_to_ask_again(hostile, tmp_path):
    gate, log = tmp_path / "gate", tmp_path / "log"
    spec = {"type": "hostile", "log": str(log)}
    slow = [{"completion": "x", "item": {"do": "wait_for", "file": str(gate)}}]
    limits = ServiceLimits(max_queued_items=2)
    async with service(hostile, limits) as (server, _), both_doors(server) as doors:
        running = asyncio.create_task(doors[0].score(spec, slow))
        await until(log.exists)
        for door, status in zip(doors, ("RESOURCE_EXHAUSTED", 429), strict=True):
            with pytest.raises(Refused) as refused:
                await door.score(spec, [{"completion": "y"}] * 2)
            assert (refused.value.status, refused.value.kind) == (status, "too_many")
            assert refused.value.retry_after_s == 1.0  # nothing has been measured
            assert "try again in 1.0 s" in refused.value.message
        gate.touch()
        assert (await running)[0]["reward"] == 1.0
        for door in doors:
            assert [r["reward"] for r in await door.score(spec, [{"completion": "y"}] * 2)] == [
                1,
                1,
            ]


def lookups(grader, outcome):
    labels = {"grader": grader, "outcome": outcome}
    return REGISTRY.get_sample_value("headway_reward_cache_lookups_total", labels) or 0.0


async def test_known_rewards_are_not_scored_again_and_nulls_are():
    spec = {"type": "string_check", "operation": "like"}
    items = [{"completion": f"c{n}", "item": {"answer": "c"}} for n in range(3)]
    items.append({"completion": "c", "item": {}})  # null: the item has no answer
    async with service() as (server, _), both_doors(server) as (by_grpc, by_rest):
        hits, misses = lookups("string_check", "hit"), lookups("string_check", "miss")
        first = await by_grpc.score(spec, items)
        assert (lookups("string_check", "hit"), lookups("string_check", "miss")) == (
            hits, misses + 4)  # fmt: skip
        scored = sum(worker.num_scored for worker in server.pool._workers.values())
        again = await by_rest.score({**spec, "strip": False}, items)  # the default, said
        assert again == first
        assert [r["reward"] for r in first] == [1.0, 1.0, 1.0, None]
        assert (lookups("string_check", "hit"), lookups("string_check", "miss")) == (
            hits + 3, misses + 5)  # fmt: skip
        assert sum(w.num_scored for w in server.pool._workers.values()) == scored + 1
        assert (await by_rest.score({**spec, "strip": True}, items[:1]))[0]["reward"] == 1.0
        assert lookups("string_check", "hit") == hits + 3  # another grader


async def test_what_may_judge_otherwise_next_time_is_never_kept(hostile, tmp_path):
    log = tmp_path / "log"
    inner = {"type": "hostile", "log": str(log)}
    async with service(hostile) as (server, _), both_doors(server) as (door, _):
        for spec in (inner, {"type": "sum", "graders": {"a": inner}}):
            for _ in range(2):
                assert (await door.score(spec, [{"completion": "x"}]))[0]["reward"] == 1.0
    assert log.read_text() == "x\n" * 4
