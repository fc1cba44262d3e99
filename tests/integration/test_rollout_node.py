"""Rollout nodes as processes: real gRPC, a real Valkey, a real reward service, the sim engine."""

import asyncio
import random
import signal
import socket

import pytest

from headway.errors import Conflict, EpochBroken, NotFound, Unavailable
from headway.journal import Journal
from headway.ledger.api import Member
from headway.messages import EpochInvite
from headway.pb import rollout_pb2, rollout_pb2_grpc
from headway.rpc import channel
from headway.valkey import EmbeddedValkey
from tests.support.rollout_house import BATCH, N, house, spec_json


async def test_two_nodes_serve_one_job_and_updates_split_completions(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open()
        it.assign(job_id)
        # of 8 groups begun together, 4 are still on their way when the first step has its 4
        slow = {"lengths": "uniform:60", "rate": "40"}
        await asyncio.gather(it.node("node-a", **slow), it.node("node-b", **slow))
        members = await learner.members(2)
        assert members == tuple(
            Member(node_id, it.nodes[node_id].address, "none", None, (), member.session)
            for node_id, member in zip(("node-a", "node-b"), members, strict=True)
        )
        assert len({m.session for m in members} - {""}) == 2
        assert (await learner.ledger.counts()).issued == 40  # no claim before the first weights
        reports = await learner.install(0, members)
        assert [r.version for r in reports] == [0, 0]
        seen, nodes, split = set(), set(), 0
        for step in range(4):
            for group in await learner.take(step):
                assert group.ticket.ticket_id not in seen
                seen.add(group.ticket.ticket_id)
                nodes.add(group.node_id)
                assert len(group.completions) == N and group.attempt == 1
                for completion in group.completions:
                    assert 1 <= len(completion.token_ids) == len(completion.logprobs) < 120
                    ends = [0, *(span.end for span in completion.spans)]
                    assert [span.start for span in completion.spans] == ends[:-1]
                    assert ends[-1] == len(completion.token_ids)
                    assert group.start_version <= completion.oldest_version
                    assert step - 2 <= completion.oldest_version <= step
                    split += len(completion.spans) > 1
                    assert completion.reward == float("7" in completion.text)
            await learner.install(step + 1, members)
        assert nodes == {"node-a", "node-b"}
        assert split > 0
        status = await it.desk.reported("node-a", job_id, "running")
        assert status.version in (3, 4)


async def test_s035_a_node_that_stood_still_past_its_lease_delivers_nothing_twice(
    valkey_url, reward, job_id
):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open(lag=0, lease_s=2.0, num_tickets=BATCH)
        it.assign(job_id, lag=0, lease_s=2.0)
        await it.node("slow")
        [slow] = await learner.members(1)
        await learner.install(0, [slow])
        await learner.until(lambda c: c.leased == BATCH)
        it.nodes["slow"].signal(signal.SIGSTOP)
        await learner.until(lambda c: c.expired_leases == BATCH)
        await it.node("other")
        members = await learner.members(2)
        await learner.install(0, [m for m in members if m.node_id == "other"])
        await learner.until(lambda c: c.delivered == BATCH)
        it.nodes["slow"].signal(signal.SIGCONT)
        groups = await learner.take(0)
        assert [(g.node_id, g.attempt) for g in groups] == [("other", 2)] * BATCH
        # what it held is lost to it, whether it was still sampling or came too late
        await learner.issue(BATCH)
        await learner.install(1, [slow])
        assert {g.node_id for g in await learner.take(1)} == {"slow"}
        counts = await learner.until(lambda c: c.consumed == 2 * BATCH)
        assert (counts.issued_total, counts.abandoned) == (2 * BATCH, 0)
        messages = "a lease was lost; its work stops", "a late delivery was refused"
        rows = [row for row in it.nodes["slow"].log if row["message"] in messages]
        lost = sorted(row["ticket"] for row in rows if row["attempt"] == 1)
        # of the second batch too, should this machine itself have stood still
        assert lost[:BATCH] == list(range(BATCH)) and len(set(lost)) == len(lost)


async def test_s019_control_calls_do_not_wait_behind_work(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open(lag=63, num_tickets=256)
        it.assign(job_id, lag=63, max_num_seqs=256 * N)
        node = await it.node("node-a", lengths="constant:400", rate="10")
        [member] = await learner.members(1)
        await learner.install(0, [member])
        await learner.until(lambda c: c.leased == 256)
        await learner.sampled([member], 1)
        async with channel(node.address) as link:
            stub = rollout_pb2_grpc.RolloutServiceStub(link)
            installing = asyncio.create_task(learner.install(1, [member], 5.0))
            for _ in range(20):
                status = await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=1.0)
                assert status.num_tickets_in_flight == 256
                assert status.num_completions_in_flight == 256 * N
            [report] = await installing
            assert report.version == 1
            await learner.sampled([member], 1)
            status = await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=1.0)
            assert (status.job_id, status.version, status.node_id) == (job_id, 1, "node-a")
            assert status.num_tokens_sampled > 0 and status.busy_s > 0


def invite(job_id, epoch):
    return EpochInvite(job_id, epoch, "127.0.0.1", 1, 1, 2, "gloo", 5.0)


async def test_calls_for_another_job_or_a_past_epoch_are_refused(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open()
        it.assign(job_id)
        await it.node("node-a")
        [member] = await learner.members(1)
        stranger = it.learner("another-job")
        with pytest.raises(NotFound, match=f"serves job {job_id}, not job another-job"):
            await stranger.install(0, [member])
        client = learner.client(member)
        await client.join(invite(job_id, 7))
        await client.join(invite(job_id, 7))  # a repeat
        with pytest.raises(Conflict, match=r"epoch 6 .* is past: this node is in epoch 7"):
            await client.join(invite(job_id, 6))
        await client.leave(5.0)
        await client.join(invite(job_id, 6))
        assert (await learner.install(3, [member]))[0].version == 3


async def test_a_broken_install_stops_claims_until_the_next(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open(lag=0)
        it.assign(job_id, lag=0)
        await it.node("node-a", "--sim-install-pause-s", "0.3")
        members = await learner.members(1)
        with pytest.raises(EpochBroken):
            await learner.install(0, members, timeout_s=0.1)
        await it.desk.reported("node-a", job_id, "running")
        assert (await learner.ledger.counts()).issued == 40
        await learner.install(0, members)
        assert len(await learner.take(0)) == BATCH


async def test_a_kept_engine_serves_the_next_job_only_with_its_weights(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        first, second = it.learner(job_id), it.learner(f"{job_id}-2")
        await first.open(lag=0)
        await second.open(lag=0)
        it.assign(first.job_id, lag=0)
        await it.node("node-a", lengths="constant:4000")
        members = await first.members(1)
        await first.install(0, members)
        await first.sampled(members, 1)
        it.desk.assign(first.job_id, spec_json(lag=0), cancel=True)
        await it.desk.reported("node-a", first.job_id, "cancelled")
        counts = await first.ledger.counts()
        assert (counts.leased, counts.issued) == (0, 40)
        assert await first.ledger.members() == ()
        del it.desk.assignments[first.job_id]
        it.assign(second.job_id, lag=0)
        [member] = await second.members(1)
        assert member.version is None
        status = await second.status(member)
        assert status.num_tokens_sampled > 0  # the engine is the same
        assert status.job_id == second.job_id and not status.HasField("version")
        assert (await second.ledger.counts()).issued == 40
        await second.install(0, [member])
        await second.until(lambda c: c.leased == BATCH)


async def test_s007_cancels_and_updates_meet_in_any_order(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        await it.node("node-a", "--sim-install-pause-s", "0.01", lengths="constant:4000")
        draw = random.Random(7)
        for number in range(10):
            learner = it.learner(f"{job_id}-{number}")
            await learner.open(lag=0)
            it.assign(learner.job_id, lag=0)
            members = await learner.members(1)
            await learner.install(0, members)
            await learner.until(lambda c: c.leased == BATCH)
            updates = []
            at = draw.randrange(6)
            for update in range(6):
                if update == at:
                    it.desk.assign(learner.job_id, spec_json(lag=0), cancel=True)
                updates.append(asyncio.create_task(learner.install(0, members)))
                await asyncio.sleep(draw.uniform(0, 0.05))
            for answer in await asyncio.gather(*updates, return_exceptions=True):
                assert isinstance(answer, list | NotFound | Unavailable), answer
            await it.desk.reported("node-a", learner.job_id, "cancelled")
            counts = await learner.ledger.counts()
            assert (counts.leased, counts.issued, counts.expired_leases) == (0, 40, 0)
            del it.desk.assignments[learner.job_id]


async def test_s055_failing_graders_filter_the_group_and_say_why(valkey_url, reward, job_id):
    async with house(valkey_url, reward) as it:
        learner = it.learner(job_id)
        await learner.open(lag=0)
        grader = {"type": "numeric", "reference": "{{item.missing}}"}
        it.assign(job_id, lag=0, grader=grader, on_error="fail")
        await it.node("node-a", rate="2000")
        await learner.install(0, await learner.members(1))
        counts = await learner.until(lambda c: c.filtered >= BATCH)
        [reason] = counts.reasons
        assert reason.startswith("reward_error:")
        assert (counts.delivered, counts.taken, counts.payload_bytes) == (0, 0, 0)
        [event] = await Journal(it.redis, job_id).read_events()
        assert event["kind"] == "reward_errors" and event["policy"] == "fail"
        assert event["error_kind"] == reason.partition(":")[2]


async def test_nothing_is_lost_while_redis_is_away(reward, job_id, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]  # one that the server has again after its restart
    server = EmbeddedValkey(tmp_path, port)
    await asyncio.to_thread(server.start)
    try:
        async with house(server.url, reward) as it:
            learner = it.learner(job_id)
            await learner.open(lag=0)
            it.assign(job_id, lag=0)
            node = await it.node("node-a")
            await learner.install(0, await learner.members(1))
            await learner.until(lambda c: c.leased == BATCH)
            await asyncio.to_thread(server.stop)
            async with asyncio.timeout(20):
                # sampled and scored, and nobody to deliver to
                while not any("trying again" in row["message"] for row in node.log):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await asyncio.to_thread(server.start)
            groups = await learner.take(0)
            assert [g.attempt for g in groups] == [1] * BATCH
            counts = await learner.ledger.counts()
            assert (counts.expired_leases, counts.refused_deliveries) == (0, 0)
    finally:
        await asyncio.to_thread(server.stop)
