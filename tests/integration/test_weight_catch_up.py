"""Nodes that join late, come back or missed versions: real processes, streams and files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headway.errors import DeadlineExceeded, InvalidSpec, NotFound, Unavailable
from headway.rpc import grpc_server
from headway.weights.manifest import build_manifest
from headway.weights.snapshot import SnapshotServer, Staged, fetch, snapshot_at_hand
from headway.weights.transfer import Staging
from tests.support.weight_fleet import (
    BUCKET,
    LARGE,
    SHAPES,
    WeightFleet,
    admitted,
    digest,
    tensors,
    weight_fleet,
)


@pytest.fixture
async def fleet() -> AsyncIterator[WeightFleet]:
    async with weight_fleet() as fleet:
        yield fleet


@pytest.mark.parametrize("shared", [False, True])
async def test_a_newcomer_catches_up_alone_and_then_gets_its_seat(
    fleet: WeightFleet, shared: bool, tmp_path: Path
) -> None:
    fleet.folder = tmp_path if shared else None
    await asyncio.gather(fleet.add("n1"), fleet.add("n2"))
    late = fleet.members.pop("n2")
    publisher = fleet.publisher()
    await publisher.publish(0, tensors(0))
    assert await publisher.admit() == ()
    fleet.members["n2"] = late
    await admitted(publisher)
    assert await fleet.line("n2") == f"snapshot 0 {digest(0)}"
    assert fleet.nodes("weights_caught_up") == ["n2"]
    assert fleet.epochs() == [["n1"]]  # no epoch was broken up or formed for it
    both = await publisher.publish(1, tensors(1))
    assert set(both.installed) == {"n1", "n2"}
    assert await fleet.line("n2") == f"broadcast 1 {digest(1)}"
    assert fleet.epochs() == [["n1"], ["n1", "n2"]]
    # n1 saw each version once
    assert await fleet.line("n1") == f"broadcast 0 {digest(0)}"
    assert await fleet.line("n1") == f"broadcast 1 {digest(1)}"
    await publisher.close()
    # nothing is written for those who have a seat
    assert len(list(tmp_path.rglob("*.weights"))) == (1 if shared else 0)


async def test_a_joiner_that_hangs_delays_no_publish_and_may_still_come(
    fleet: WeightFleet,
) -> None:
    await asyncio.gather(fleet.add("n1"), fleet.add("n2", "hang", "catch_up"))
    late = fleet.members.pop("n2")
    publisher = fleet.publisher()
    await publisher.publish(0, tensors(0))
    fleet.members["n2"] = late
    [catching_up] = await publisher.admit()
    for version in (1, 2):
        report = await publisher.publish(version, tensors(version))
        assert set(report.installed) == {"n1"} and not report.lost
    assert not catching_up.done() and fleet.epochs() == [["n1"]]
    # it goes on with the version that was offered to it, although newer ones were published
    fleet.go_on("n2")
    await catching_up
    assert await fleet.line("n2") == f"snapshot 0 {digest(0)}"
    fleet.go_on("n2")
    [again] = await publisher.admit()
    while not again.done():  # it stops itself at the start of each
        fleet.go_on("n2")
        await asyncio.sleep(0.01)
    assert await fleet.line("n2") == f"snapshot 2 {digest(2)}"
    report = await publisher.publish(3, tensors(3))
    assert set(report.installed) == {"n1", "n2"}
    await publisher.close()


async def test_a_joiner_that_goes_away_is_forgotten(fleet: WeightFleet) -> None:
    await asyncio.gather(fleet.add("n1"), fleet.add("n2", "hang", "catch_up"))
    late = fleet.members.pop("n2")
    publisher = fleet.publisher()
    await publisher.publish(0, tensors(0))
    fleet.members["n2"] = late
    [catching_up] = await publisher.admit()
    del fleet.members["n2"]  # as when its announcement runs out
    assert await publisher.admit() == ()
    assert catching_up.cancelled() and not fleet.kinds("weights_missed")
    await publisher.close()


async def test_a_node_killed_in_mid_broadcast_is_back_at_once_under_its_old_name(
    fleet: WeightFleet,
) -> None:
    await asyncio.gather(
        fleet.add("n1", shapes=LARGE), fleet.add("n2", "die", "3", shapes=LARGE, session="first")
    )
    publisher = fleet.publisher()
    report = await publisher.publish(0, tensors(0, LARGE))
    assert set(report.lost) == {"n2"}
    assert await publisher.admit() == ()  # the dead one is in its pause
    await fleet.kill("n2")
    port = int(fleet.members["n2"].address.rpartition(":")[2])
    await fleet.add("n2", shapes=LARGE, port=port, session="second")
    await admitted(publisher)
    assert await fleet.line("n2") == f"snapshot 0 {digest(0, LARGE)}"
    report = await publisher.publish(1, tensors(1, LARGE))
    assert set(report.installed) == {"n1", "n2"} and fleet.epochs()[-1] == ["n1", "n2"]
    await publisher.close()


async def test_a_joiner_whose_digests_differ_is_put_out(fleet: WeightFleet) -> None:
    await asyncio.gather(
        fleet.add("n1"),
        fleet.add("n2", "corrupt", "catch_up"),
        fleet.add("n3", shapes={**SHAPES, "b": (4,)}),
    )
    late = {node_id: fleet.members.pop(node_id) for node_id in ("n2", "n3")}
    publisher = fleet.publisher()
    await publisher.publish(0, tensors(0))
    fleet.members.update(late)
    await admitted(publisher)
    told = {e["node_id"]: (e["level"], e["why"]) for e in fleet.kinds("weights_refused")}
    assert told["n2"][0] == told["n3"][0] == "error"
    assert "tensor a: sent" in told["n2"][1] and "tensor b: the learner sends" in told["n3"][1]
    assert set((await publisher.publish(1, tensors(1))).installed) == {"n1"}
    assert await publisher.admit() == ()
    await publisher.close()


async def test_between_two_versions_a_newcomer_waits_for_the_second(fleet: WeightFleet) -> None:
    await fleet.add("n1")
    late, fleet.members = fleet.members, {}
    publisher = fleet.publisher()
    await publisher.publish(0, tensors(0))
    publisher.retire()
    fleet.members = late
    assert await publisher.admit() == ()
    report = await publisher.publish(1, tensors(1))
    assert set(report.installed) == {"n1"}
    await publisher.close()


async def test_weights_without_members_wait_for_the_first(fleet: WeightFleet) -> None:
    publisher = fleet.publisher()
    report = await publisher.publish(0, tensors(0))
    assert report.installed == {} and report.lost == {}
    await fleet.add("n1")
    await admitted(publisher)
    assert await fleet.line("n1") == f"snapshot 0 {digest(0)}"
    await publisher.close()


# -- the stream and the file themselves


def staged(version: int = 0) -> Staged:
    named = tensors(version)
    return Staged(build_manifest(version, named, BUCKET), named, digest(version))


class Spoilt(SnapshotServer):
    """A server whose stream goes wrong on the way."""

    how = ""

    async def FetchWeights(self, request: Any, context: Any) -> Any:
        async for part in super().FetchWeights(request, context):
            if self.how == "damaged":
                part.data = b"\0" + part.data[1:]
            yield part
            if self.how == "short":
                return
            if self.how == "silent":
                await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("damaged", Unavailable, "damaged after 0 bytes"),
        ("short", Unavailable, "bytes came instead of"),
        ("silent", DeadlineExceeded, r"nothing came for 0.2 s after \d+ of \d+ bytes"),
    ],
)
async def test_a_stream_that_goes_wrong_is_an_error(
    how: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    server = Spoilt("job")
    server.how = how
    version = staged()
    async with grpc_server("127.0.0.1", 0, server.register) as port, server.offer(version):
        with pytest.raises(error, match=message):
            await fetch(f"127.0.0.1:{port}", "job", version.manifest, tmp_path / "w", 0.2)


async def test_only_what_is_on_offer_is_streamed(tmp_path: Path) -> None:
    server, old, new = SnapshotServer("job"), staged(0), staged(1)
    async with grpc_server("127.0.0.1", 0, server.register) as port:
        where, path = f"127.0.0.1:{port}", tmp_path / "w"
        async with server.offer(old), server.offer(new), server.offer(new):
            for version in (old, new):
                await fetch(where, "job", version.manifest, path, 5.0)
                staging = Staging()
                staging.read(path, version.manifest)
                assert staging.digests == tuple(s.digest for s in version.manifest.tensors)
            with pytest.raises(NotFound, match="this is job job, not other"):
                await fetch(where, "other", old.manifest, path, 5.0)
        with pytest.raises(NotFound, match="version 1 is not on offer"):
            await fetch(where, "job", new.manifest, path, 5.0)
    with pytest.raises(Unavailable):
        await fetch(where, "job", new.manifest, path, 5.0)


async def test_a_snapshot_that_is_not_there_is_named(tmp_path: Path) -> None:
    manifest = staged().manifest
    async with snapshot_at_hand("job", manifest, "", str(tmp_path), 1.0) as path:
        with pytest.raises(Unavailable, match=r"version-0-.*cannot be read"):
            Staging().read(path, manifest)
        path.parent.mkdir()
        path.write_bytes(b"short")
        with pytest.raises(Unavailable, match="it ends too early"):
            Staging().read(path, manifest)
    with pytest.raises(InvalidSpec, match=r"no rollout.snapshot_dir"):
        async with snapshot_at_hand("job", manifest, "", None, 1.0):
            pass
