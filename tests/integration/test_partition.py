"""Rollout pool and learner pool in two network namespaces, with delay, loss and a partition."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from headway.leash import leashed

ROOT = Path(__file__).parents[2]
# Without root a user namespace gives the right to make networks.
ALONE = ["/usr/bin/unshare", "--net", *(() if os.geteuid() == 0 else ("--map-root-user",))]


def test_a_job_survives_thirty_seconds_without_a_network_between_its_pools(tmp_path):
    done = subprocess.run(
        leashed([*ALONE, sys.executable, "-m", "tests.support.two_pools", str(tmp_path)],
                signal.SIGKILL),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert (out["state"], out["step"]) == ("succeeded", 40)  # its accounts are in order too
    assert out["node_addresses"] == ["192.0.2.1", "192.0.2.2"]
    # What had arrived was trained; then the learner stood still, and the doctor knew why.
    assert out["step_before"] <= out["step_during"] <= out["step_before"] + 3
    assert "job j is running and waits for a rollout node" in out["findings"]
    assert any(text.startswith(f"step {out['step_during'] + 1} waits") for text in out["findings"])
    assert out["num_lost_packets"] > 0 and out["largest_lag"] <= 2
    assert {"epoch_formed", "waiting"} <= set(out["event_kinds"])
