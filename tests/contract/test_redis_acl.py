"""The Redis users of the services, on real servers: each does its work and nothing else."""

import asyncio
import re
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager

import pytest
import trustme

from headway.errors import NotFound, Unauthorized, Unavailable
from headway.jobs import JobRecord
from headway.journal import Journal
from headway.ledger.api import LedgerConfig, Member
from headway.ledger.keys import job_key, validation_room
from headway.ledger.redis_ledger import RedisLedger
from headway.ledger.scripts import TRANSITIONS
from headway.messages import Ticket
from headway.ports import free_port
from headway.redis_acl import LEDGER_CALLS, SERVICES, acl_rules, derived_password
from headway.redis_client import command, connect, ping
from services.coordinator.decisions import Cancel
from services.coordinator.store import JobStore
from tests.support.fleet import RESOLVED


@asynccontextmanager
async def user(store_url: str, service: str):
    master = store_url.partition("://:")[2].partition("@")[0]
    password = derived_password(master, service)
    client = connect(store_url.replace(f":{master}@", f"{service}:{password}@"))
    yield client
    await client.aclose()


def ticket(number: int) -> Ticket:
    return Ticket(number, (1, 2), "p", {}, 2, number)


@pytest.mark.parametrize("room", ["", validation_room(20)])
async def test_learner_and_rollout_do_a_jobs_work(store_url, job_id, room):
    async with user(store_url, "learner") as l_client, user(store_url, "rollout") as r_client:
        learner, rollout = RedisLedger(l_client, job_id, room), RedisLedger(r_client, job_id, room)
        await learner.open(LedgerConfig(batch_groups=1, max_policy_lag=1))
        assert await learner.issue([ticket(0), ticket(1), ticket(2)]) == 3
        await rollout.announce(Member("n", "h:1", "none"), 60.0)
        (first,) = (await rollout.claim("n", 0)).leases
        assert await rollout.renew("n", [first]) == (first,)
        assert await rollout.release(first)
        first, second = (await rollout.claim("n", 0, 2)).leases
        assert await rollout.deliver(first, b"payload")
        assert await rollout.fail(second, "reason")
        assert (await rollout.members())[0].node_id == "n"
        taken = await learner.take(0)
        assert taken.ticket_ids == (0,)
        assert await learner.payloads((0,)) == [b"payload"]
        await learner.commit(0, (0,))
        assert await learner.trim(1) == 1
        assert (await learner.counts()).consumed == 1
        assert (await learner.look()).step == 1
        await rollout.withdraw("n")
        assert await learner.members() == ()
        await Journal(l_client, job_id).append_metrics(0, {"x": 1.0})
        for client in (l_client, r_client):
            await Journal(client, job_id).append_event("kind", "message")
        await learner.close()


async def test_the_coordinator_keeps_its_jobs(store_url, job_id):
    async with user(store_url, "coordinator") as client:
        store = JobStore(client)
        record, new = await store.create(JobRecord(job_id, RESOLVED, "digest", 1.0, 1.0))
        assert new and await store.get(job_id) == record
        assert record in await store.active()
        assert record in (await store.page("", 1000))[0]
        record, _ = await store.update(job_id, lambda old: Cancel(job_id).apply(old, 2.0))
        assert record.state == "cancelled"
        assert await store.claim_key(job_id, job_id, "d") == (job_id, "d")
        journal = Journal(client, job_id)
        await journal.append_event("kind", "message")
        assert len(await journal.read_events()) == 1
        assert await journal.read_metrics() == []
        assert len(await journal.last_events(5)) == 1
        assert (await command(client, "INFO", "memory"))["used_memory"] > 0
        ledger = RedisLedger(client, job_id)
        assert await ledger.members() == ()
        with pytest.raises(NotFound, match="has no ledger"):
            await ledger.look()


FORBIDDEN = (
    ("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("SCAN", "0"), ("CONFIG", "GET", "*"),
    ("ACL", "LIST"), ("ACL", "SETUSER", "x"), ("SHUTDOWN",), 
    ("MODULE", "LIST"), ("SCRIPT", "FLUSH"), ("FUNCTION", "LIST"), ("CLIENT", "LIST"),
    ("MONITOR",), ("REPLICAOF", "h", "1"), ("SAVE",), ("PUBLISH", "c", "m"),
    ("GET", "another"), ("SET", "another", "1"), ("DEL", "hw:jobs"), ("EXISTS", "hw:jobs"),
)  # fmt: skip


async def denied(client, *words) -> bool:
    try:
        await command(client, *words)
    except Unauthorized:
        return True
    return False


@pytest.mark.parametrize("service", SERVICES)
async def test_nobody_may_do_more(store_url, job_id, service):
    record, payloads = job_key(job_id, "record"), job_key(job_id, "payloads")
    metrics, meta = job_key(job_id, "metrics"), job_key(job_id, "meta")
    own = {
        "coordinator": [("HMGET", payloads, 0), ("XADD", metrics, "*", "json", "{}")],
        "learner": [("GET", record), ("SET", record, "{}"), ("ZRANGE", "hw:jobs", 0, -1)],
        "rollout": [("GET", record), ("SET", record, "{}"), ("XADD", metrics, "*", "json", "{}"),
                    ("XRANGE", metrics, "-", "+"), ("HMGET", payloads, 0)],
        "reward": [("HGET", meta, "config"), ("XADD", metrics, "*", "json", "{}"),
                   ("EVALSHA", "0" * 40, 0)],
    }[service]  # fmt: skip
    async with user(store_url, service) as client:
        await command(client, "PING")
        for words in (*FORBIDDEN, *own):
            assert await denied(client, *words), (service, words)


async def test_a_script_does_not_lead_around_the_rules(store_url, job_id):
    body = "return redis.call('GET', KEYS[1])"
    record = job_key(job_id, "record")
    async with user(store_url, "rollout") as client:
        sha = (await command(client, "SCRIPT", "LOAD", body)).decode()
        assert await denied(client, "EVALSHA", sha, 1, record)
        smuggler = f"return redis.call('HGET', '{record}', 'x')"
        sha = (await command(client, "SCRIPT", "LOAD", smuggler)).decode()
        with pytest.raises(Exception, match=r"(?i)can't (access|run)|no permissions|ACL failure"):
            await command(client, "EVALSHA", sha, 0)


def test_every_transition_is_somebodys():
    assert set().union(*LEDGER_CALLS.values()) == set(TRANSITIONS)
    for service in SERVICES:
        assert "~*" not in acl_rules(service) and "+@all" not in acl_rules(service)


# -- a server of one's own: an ACL file, TLS -------------------------------------------


@contextmanager
def redis_server(*flags: str, folder):
    process = subprocess.Popen(
        [shutil.which("redis-server"), "--bind", "127.0.0.1", "--save", "", *flags],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        for line in process.stdout:
            if "Ready to accept connections" in line:
                break
        else:
            raise AssertionError("redis-server did not start")
        yield
    finally:
        process.kill()
        process.communicate()


def made_file():
    return subprocess.run(
        [sys.executable, "-m", "headway.redis_acl"], capture_output=True, text=True, check=True
    )


async def test_the_acl_file_works_on_a_server_of_ones_own_over_tls(tmp_path, job_id):
    made = await asyncio.to_thread(made_file)
    passwords = dict(re.findall(r"^(\w+): (\S+)$", made.stderr, re.M))
    assert set(passwords) == {*SERVICES, "admin"}
    assert not any(password in made.stdout for password in passwords.values())
    (tmp_path / "users.acl").write_text(made.stdout)
    ca, strangers = trustme.CA(), trustme.CA()
    pair = ca.issue_cert("127.0.0.1")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    pair.private_key_pem.write_to_path(tmp_path / "tls.key")
    ca.cert_pem.write_to_path(tmp_path / "ca.crt")
    strangers.cert_pem.write_to_path(tmp_path / "other.crt")
    port = str(free_port())
    tls = ("--port", "0", "--tls-port", port, "--tls-cert-file", "tls.crt", "--tls-key-file",
           "tls.key", "--tls-ca-cert-file", "ca.crt", "--tls-auth-clients", "no")  # fmt: skip
    with redis_server(*tls, "--aclfile", "users.acl", folder=tmp_path):

        def url(ca: str, password: str = passwords["learner"]) -> str:
            return f"rediss://learner:{password}@127.0.0.1:{port}/0?ssl_ca_certs={tmp_path / ca}"

        await ping(url("ca.crt"), 5.0)
        client = connect(url("ca.crt"))
        await RedisLedger(client, job_id).open(LedgerConfig(batch_groups=1, max_policy_lag=1))
        assert await denied(client, "FLUSHALL")
        await client.aclose()
        with pytest.raises(Unavailable, match=r"(?i)certificate"):
            await ping(url("other.crt"), 5.0)
        with pytest.raises(Unauthorized):
            await ping(url("ca.crt", "wrong"), 5.0)
        nobody = url("ca.crt").replace(f"learner:{passwords['learner']}@", "")
        with pytest.raises(Unauthorized, match="wrong or missing password"):
            await ping(nobody, 5.0)
