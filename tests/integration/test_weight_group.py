"""Weight groups over real processes: broadcasts, deaths, hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch

from headway.errors import EpochBroken, WeightMismatch
from headway.messages import EpochInvite
from headway.weights.group import Rendezvous, WeightGroup
from tests.support.weight_fleet import (
    LARGE,
    SHAPES,
    TIMEOUT_S,
    WeightFleet,
    digest,
    tensors,
    weight_fleet,
)


@pytest.fixture
async def fleet() -> AsyncIterator[WeightFleet]:
    async with weight_fleet() as fleet:
        yield fleet


async def test_every_member_of_three_gets_the_very_bytes(fleet: WeightFleet) -> None:
    await asyncio.gather(fleet.add("n1"), fleet.add("n2"))
    publisher = fleet.publisher()
    for version in (0, 1):
        report = await publisher.publish(version, tensors(version))
        assert set(report.installed) == {"n1", "n2"} and not report.lost and not report.rejected
        assert {r.digest for r in report.installed.values()} == {digest(version)}
        assert report.num_bytes == 4 * (40_000 + 3 + 90_000 + 77)
        for node_id in ("n1", "n2"):
            assert await fleet.line(node_id) == f"broadcast {version} {digest(version)}"
    await publisher.close()
    # one epoch served both versions, and nobody had to catch up
    assert fleet.epochs() == [["n1", "n2"]]
    assert not fleet.kinds("weights_missed") and not fleet.kinds("weights_caught_up")


@pytest.mark.parametrize(("fate", "when"), [("die", "3"), ("hang", "3"), ("die", "install")])
async def test_a_member_lost_in_a_broadcast_costs_one_deadline(
    fleet: WeightFleet, fate: str, when: str
) -> None:
    await asyncio.gather(
        fleet.add("n1", shapes=LARGE),
        fleet.add("n2", fate, when, shapes=LARGE),
        fleet.add("n3", shapes=LARGE),
    )
    publisher = fleet.publisher()
    report = await publisher.publish(5, tensors(5, LARGE))
    assert set(report.installed) == {"n1", "n3"} and set(report.lost) == {"n2"}
    whole = f"broadcast 5 {digest(5, LARGE)}"
    assert await fleet.line("n1") == await fleet.line("n3") == whole
    # the deadline of the broadcast and the survivors' grace, once; not once a survivor
    assert report.seconds < 2 * TIMEOUT_S + 4.0
    # a survivor that had it all before the break need not take it again
    epochs = fleet.epochs()
    assert epochs[0] == ["n1", "n2", "n3"] and len(epochs) == 2 and "n2" not in epochs[1]
    assert fleet.nodes("weights_missed") == ["n2"]
    # still announced, it is asked no more and costs nothing
    again = await publisher.publish(6, tensors(6, LARGE))
    assert set(again.installed) == {"n1", "n3"} and not again.lost
    assert fleet.epochs()[-1] == ["n1", "n3"]
    await publisher.close()


async def test_a_node_that_died_before_the_epoch_is_left_out_at_once(fleet: WeightFleet) -> None:
    await asyncio.gather(fleet.add("n1"), fleet.add("n2"))
    await fleet.kill("n2")
    publisher = fleet.publisher()
    report = await publisher.publish(0, tensors(0))
    assert set(report.installed) == {"n1"} and set(report.lost) == {"n2"}
    await publisher.close()


async def test_a_node_whose_digests_differ_is_put_out(fleet: WeightFleet) -> None:
    await asyncio.gather(fleet.add("n1"), fleet.add("n2", "corrupt", "install"))
    publisher = fleet.publisher()
    report = await publisher.publish(0, tensors(0))
    assert set(report.installed) == {"n1"} and set(report.rejected) == {"n2"}
    [told] = fleet.kinds("weights_refused")
    assert (told["node_id"], told["level"], told["version"]) == ("n2", "error", 0)
    assert "tensor a: sent" in told["why"]
    for version in (1, 2):
        assert set((await publisher.publish(version, tensors(version))).installed) == {"n1"}
    assert await publisher.admit() == ()  # no second chance for as long as it lives
    assert fleet.epochs() == [["n1", "n2"], ["n1"]]
    await publisher.close()


async def test_a_node_without_the_groups_backend_is_refused_by_name(fleet: WeightFleet) -> None:
    await asyncio.gather(fleet.add("n1"), fleet.add("n2"))
    fleet.members["n2"] = replace(fleet.members["n2"], backends=("nccl",))
    publisher = fleet.publisher()
    report = await publisher.publish(0, tensors(0))
    assert set(report.installed) == {"n1"}
    assert "it offers nccl; the weight group needs gloo" in report.rejected["n2"]
    assert [e["backend"] for e in fleet.kinds("epoch_formed")] == ["gloo"]
    await publisher.close()


async def test_s015_a_node_with_another_shape_is_left_out_by_name(fleet: WeightFleet) -> None:
    padded = {**SHAPES, "b": (4,)}
    await asyncio.gather(fleet.add("n1"), fleet.add("n2", shapes=padded))
    publisher = fleet.publisher()
    report = await publisher.publish(0, tensors(0))
    assert set(report.installed) == {"n1"} and set(report.rejected) == {"n2"}
    assert "tensor b" in report.rejected["n2"] and "[4]" in report.rejected["n2"]
    assert [(e["node_id"], e["level"]) for e in fleet.kinds("weights_refused")] == [("n2", "error")]
    # the broadcast went to its end for the good one: no second epoch was needed
    assert len(fleet.kinds("epoch_formed")) == 1
    await publisher.close()


async def test_s015_weights_that_fit_no_node_fail_the_publish(fleet: WeightFleet) -> None:
    await fleet.add("n1", shapes={**SHAPES, "b": (4,)})
    publisher = fleet.publisher()
    with pytest.raises(WeightMismatch, match="tensor b: the learner sends shape"):
        await publisher.publish(0, tensors(0))
    await publisher.close()


async def test_a_rendezvous_without_the_others_ends_at_its_deadline() -> None:
    meeting = Rendezvous("127.0.0.1", 1.0)
    invite = EpochInvite("job", 1, "127.0.0.1", meeting.port, 0, 2, "gloo", 1.0)
    started = time.monotonic()
    with pytest.raises(EpochBroken, match="rank 0 of 2"):
        await asyncio.to_thread(WeightGroup.join, invite, "cpu", meeting.store)
    assert time.monotonic() - started < 10.0


async def test_a_closed_group_ends_the_others_wait_and_stays_closed() -> None:
    meeting = Rendezvous("127.0.0.1", 30.0)
    invites = [EpochInvite("j", 1, "127.0.0.1", meeting.port, r, 2, "gloo", 30.0) for r in (0, 1)]
    sender, member = await asyncio.gather(
        asyncio.to_thread(WeightGroup.join, invites[0], "cpu", meeting.store),
        asyncio.to_thread(WeightGroup.join, invites[1]),
    )
    entered = threading.Event()

    def wait() -> None:
        transfer = member.start_broadcast(torch.empty(4, dtype=torch.uint8))
        entered.set()
        transfer.wait()

    waiting = asyncio.create_task(asyncio.to_thread(wait))
    await asyncio.to_thread(entered.wait)
    started = time.monotonic()
    sender.close()
    with pytest.raises(EpochBroken, match="epoch 1"):
        await waiting
    assert time.monotonic() - started < 15.0  # half its deadline
    with pytest.raises(EpochBroken, match="was closed"):
        sender.broadcast(torch.zeros(4, dtype=torch.uint8))
