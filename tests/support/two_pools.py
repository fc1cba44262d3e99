"""`python -m tests.support.two_pools FOLDER`: a job whose pools lie in two network namespaces.

    this namespace, 192.0.2.1                        192.0.2.2
    Redis, coordinator, reward, learner  ── link ──  rollout-0 (a seat in the weight group),
                                                     rollout-1 (none)

The test starts it in a namespace of its own. The other one belongs to a process that is
leashed to this one: nothing has a name that could be left behind. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from headway.access.tokens import TokenFile, add_token
from headway.leash import leashed
from tests.support.accounts import accounts
from tests.support.sim_fleet import FleetShape, SimFleet, eventually, sim_job
from tests.support.tun_link import HERE, THERE, TunLink

DELAY_S, LOSS = 0.01, 0.01
PARTITION_S = 30.0
STEPS, BATCH, LAG = 40, 4, 2
SHAPE = FleetShape(
    nodes=2, broadcast=1, step_s=0.1, weight_mib=0.25, lost_after_s=8.0, tokens_per_s=200.0
)


@dataclass(frozen=True)
class Outcome:
    """What the test looks at."""

    state: str
    step_before: int  # committed when the link was cut
    step_during: int  # and when it was healed
    step: int
    expired_leases: int
    largest_lag: int
    node_addresses: list[str]
    event_kinds: list[str]
    findings: list[str]  # of the doctor, at the end of the partition
    num_lost_packets: int
    seconds_after_healing: float


class TwoPools(SimFleet):
    """A fleet whose rollout nodes live in the namespace of process `far`."""

    def __init__(self, folder: Path, far: int) -> None:
        self._far = far
        tokens = TokenFile(folder / "tokens.json")
        fleet, _ = add_token(tokens, "service", "fleet")
        super().__init__(folder, replace(SHAPE, env={"HEADWAY_TOKEN": fleet}))
        self.token, _ = add_token(tokens, "user", "test")
        self.shape.env["HEADWAY_TOKENS"] = str(tokens.path)
        self.shape.env["HEADWAY_ALLOW_PATHS"] = str(folder)  # where the job's data are

    def host_of(self, name: str) -> str:
        return THERE if name.startswith("rollout") else HERE

    def within(self, name: str) -> tuple[str, ...]:
        if not name.startswith("rollout"):
            return ()
        return ("/usr/bin/nsenter", f"--net=/proc/{self._far}/ns/net")


async def partition(folder: Path, far: int, link: TunLink) -> Outcome:
    """The job, with a cut in its middle; its accounts are checked here."""
    async with TwoPools(folder, far) as fleet:
        job = sim_job(
            folder / "data.jsonl",
            rollout__lease_s=6.0,
            rollout__update_timeout_s=5.0,
            trainer__total_training_steps=STEPS,
        )
        await fleet.submit(job, "j")
        await fleet.seen_step("j", 5)
        link.up = False
        before = await fleet.step("j")
        await asyncio.sleep(PARTITION_S)
        during = await fleet.step("j")
        seen = await fleet.client.waits("j", 10.0)
        link.up = True
        healed = time.monotonic()
        record = await fleet.ended("j")
        seconds = time.monotonic() - healed
        found = await accounts(fleet.redis, "j", fleet.runs / "j")
        found.check(STEPS, BATCH, LAG)
        nodes = (await fleet.client.fleet())["nodes"]
        return Outcome(
            state=record.state,
            step_before=before,
            step_during=during,
            step=record.step,
            expired_leases=found.counts.expired_leases,
            largest_lag=found.largest_lag,
            node_addresses=sorted({node["address"].rpartition(":")[0] for node in nodes}),
            event_kinds=sorted({row["kind"] for row in await fleet.events("j")}),
            findings=[f["text"] for f in seen["findings"] if f["level"] == "stuck"],
            num_lost_packets=link.num_lost,
            seconds_after_healing=seconds,
        )


def namespace() -> subprocess.Popen[bytes]:
    """A process with a network of its own, for as long as we live."""
    apart = ["/usr/bin/unshare", "--net", "sleep", "infinity"]
    return subprocess.Popen(leashed(apart, signal.SIGKILL))


async def main(folder: Path) -> None:
    """Two namespaces, a link between them, and the job on it."""
    far = namespace()
    try:
        await eventually(lambda: apart(far.pid))
        link = TunLink(far.pid, DELAY_S, LOSS)
        link.open()
        try:
            print(json.dumps(asdict(await partition(folder, far.pid, link))))
        finally:
            link.close()
    finally:
        far.kill()
        far.wait()


async def apart(pid: int) -> bool:
    """Whether the process has a network namespace of its own by now."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
    return False


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
