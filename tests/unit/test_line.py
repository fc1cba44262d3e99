"""The line to an endpoint: jobs take turns, tries and pauses, in virtual time."""

import asyncio
import itertools

import pytest

from services.reward.outside.door import Failed, Target
from services.reward.outside.endpoints import Endpoint
from services.reward.outside.line import Ask, Backoff, Desk, Line
from tests.support.virtual_time import run_virtual

SPEC = {
    "type": "remote", "body": None, "field": None, "batch_size": 1, "patience_s": 100.0,
}  # fmt: skip


class Server:
    """Stands for the HTTP door: `answer(contents, number)` gives rewards, or raises."""

    def __init__(self, answer, takes_s=1.0):
        self.answer, self.takes_s = answer, takes_s
        self.calls = []

    async def post(self, target, body):
        self.calls.append((asyncio.get_running_loop().time(), body["items"]))
        number = len(self.calls)
        await asyncio.sleep(self.takes_s)
        return {"results": self.answer(body["items"], number)}


def lines(server, *jobs, slots=1, backoff=None, **spec):
    desk = Desk(slots)
    target = Target(Endpoint("e", "http://e"), "http://e", 60.0)
    tasks = []

    def spawn(coro, name):
        tasks.append(asyncio.create_task(coro, name=name))
        return tasks[-1]

    return [
        Line(SPEC | spec, target, desk, server, backoff or Backoff(), spawn) for _ in jobs
    ], tasks


def put(line, content):
    ask = Ask(content, 0, lambda value: None)
    line.put(ask)
    return asyncio.create_task(ask.wait())


def unavailable(after_s=0.0):
    return Failed("answered 503", "503", after_s=after_s)


def test_jobs_take_turns_however_much_each_has_waiting():
    async def main():
        server = Server(lambda items, number: [1.0] * len(items))
        (long, short), _ = lines(server, "long", "short")
        waiting = [put(long, f"l{i}") for i in range(5)]
        await asyncio.sleep(0.5)
        waiting += [put(short, f"s{i}") for i in range(2)]
        await asyncio.gather(*waiting)
        order = [items[0] for _, items in server.calls]
        assert order == ["l0", "l1", "s0", "l2", "s1", "l3", "l4"]

    run_virtual(main())


def test_no_more_is_asked_at_once_than_the_endpoint_takes():
    async def main():
        server = Server(lambda items, number: [1.0])
        (one, other), _ = lines(server, "one", "other", slots=2)
        await asyncio.gather(*(put(line, i) for i in range(3) for line in (one, other)))
        assert [at for at, _ in server.calls] == [0, 0, 1, 1, 2, 2]

    run_virtual(main())


def test_what_waits_goes_together_in_batches():
    async def main():
        server = Server(lambda items, number: [len(items)] * len(items))
        (line,), _ = lines(server, "job", batch_size=3)
        answers = await asyncio.gather(*(put(line, i) for i in range(5)))
        assert [a["ok"] for a in answers] == [3, 3, 3, 2, 2]

    run_virtual(main())


def test_tries_end_with_patience_and_a_dead_endpoint_costs_the_next_one_try():
    async def main():
        def dead(items, number):
            raise unavailable()

        server = Server(dead)
        (line,), _ = lines(server, "job")
        began = asyncio.get_running_loop().time()
        first = await put(line, "a")
        took_s = asyncio.get_running_loop().time() - began
        assert first["error"] == "remote_unavailable"
        tries = len(server.calls)
        assert f"({tries} tries in " in first["message"] and 7 <= tries <= 11
        assert 60 <= took_s <= 101
        await put(line, "b")  # has what is left of patience since the first failure, at 1 s
        assert asyncio.get_running_loop().time() - began <= 102
        tries = len(server.calls)
        await asyncio.sleep(max(0.0, began + 101 - asyncio.get_running_loop().time()))
        third = await put(line, "c")
        assert len(server.calls) == tries + 1
        assert "(1 try in 1 s)" in third["message"]
        # much later its failures are forgotten: it is given time again
        await asyncio.sleep(1000)
        await put(line, "d")
        assert len(server.calls) > tries + 6

    run_virtual(main())


def test_pauses_double_within_bounds_and_retry_after_is_honoured():
    async def main():
        def at_last(items, number):
            if number == 5:
                raise unavailable(after_s=40)
            if number < 7:
                raise unavailable()
            return [1.0]

        server = Server(at_last, takes_s=0.0)
        (line,), _ = lines(server, "job", patience_s=300.0)
        assert (await put(line, "a")) == {"ok": 1.0}
        times = [at for at, _ in server.calls]
        pauses = [b - a for a, b in itertools.pairwise(times)]
        for pause, longest in zip(pauses[:4], (0.5, 1, 2, 4), strict=True):
            assert longest / 2 <= pause <= longest
        assert pauses[4] == pytest.approx(40)
        assert 8 <= pauses[5] <= 16

    run_virtual(main())


def test_a_wait_that_is_asked_for_beyond_patience_is_not_begun():
    async def main():
        def busy(items, number):
            raise unavailable(after_s=101)

        server = Server(busy)
        (line,), _ = lines(server, "job")
        answer = await put(line, "a")
        assert len(server.calls) == 1 and "asked to wait 101 s" in answer["message"]

    run_virtual(main())


def test_useless_answers_are_asked_for_four_times_and_refusals_once():
    async def main():
        def answer(items, number):
            if items == ["refused"]:
                raise Failed("answered 401", "401", kind="refused", again=False)
            return []

        server = Server(answer)
        (line,), _ = lines(server, "job")
        assert (await put(line, "a"))["error"] == "remote_unparsable"
        assert len(server.calls) == 4
        assert (await put(line, "refused")) == {
            "error": "remote_refused", "message": "endpoint e: answered 401",
        }  # fmt: skip
        assert len(server.calls) == 5

    run_virtual(main())


def test_useless_answers_to_one_job_do_not_cost_another_its_patience():
    async def main():
        def answer(items, number):
            if "useless" in items[0]:
                return []
            if (tries := [i for _, i in server.calls].count(items)) < 3:
                raise unavailable()
            return [float(tries)]

        server = Server(answer)
        (careless, other), _ = lines(server, "careless", "other")
        for number in range(30):  # longer than anyone's patience
            assert (await put(careless, f"useless{number}"))["error"] == "remote_unparsable"
        assert asyncio.get_running_loop().time() > 100
        assert (await put(other, "a")) == {"ok": 3.0}

    run_virtual(main())


def test_one_that_waits_between_tries_holds_no_slot():
    async def main():
        def answer(items, number):
            if items == ["bad"] and number < 4:
                raise unavailable()
            return [1.0]

        server = Server(answer)
        (line,), _ = lines(server, "job", backoff=Backoff(first_s=50.0, longest_s=50.0))
        bad, good = put(line, "bad"), put(line, "good")
        assert await good == {"ok": 1.0}
        assert asyncio.get_running_loop().time() - server.calls[0][0] < 5
        assert await bad == {"ok": 1.0}

    run_virtual(main())


def test_what_nobody_waits_for_is_not_sent_and_what_is_on_its_way_is_broken_off():
    async def main():
        server = Server(lambda items, number: [1.0] * len(items), takes_s=1000.0)
        (line,), tasks = lines(server, "job")
        first, second, third = (put(line, name) for name in "abc")
        await asyncio.sleep(1)
        second.cancel()
        first.cancel()
        await asyncio.sleep(1)
        assert [items for _, items in server.calls] == [["a"], ["c"]]
        assert await third == {"ok": 1.0}
        assert all(task.done() for task in tasks)

    run_virtual(main())


def test_a_fault_of_ours_leaves_nobody_waiting():
    async def main():
        def broken(items, number):
            raise RuntimeError("a bug")

        (line,), _ = lines(Server(broken), "job")
        answer = await put(line, "a")
        assert answer["error"] == "internal" and "a bug" in answer["message"]

    run_virtual(main())
