"""What becomes of a version on its way to the members."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headway.errors import EpochBroken, HeadwayError, WeightMismatch
from headway.messages import InstallReport
from headway.weights.catch_up import check_report
from headway.weights.epoch import Backend
from headway.weights.manifest import spec_bytes
from headway.weights.members import MemberClient
from headway.weights.snapshot import Staged


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What became of one version. By node id: its report, or why it has none."""

    version: int
    installed: Mapping[str, InstallReport]
    lost: Mapping[str, str]
    rejected: Mapping[str, str]
    num_bytes: int
    seconds: float

    @property
    def pause_s(self) -> float:
        """The longest time that sampling stood still on a member."""
        return max((report.pause_s for report in self.installed.values()), default=0.0)


@dataclass(slots=True)
class Outcome:
    """What became of one round. By node id; reports, or reasons."""

    installed: dict[str, InstallReport] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)


def judge(
    call: asyncio.Task[InstallReport], client: MemberClient, staged: Staged, outcome: Outcome
) -> None:
    """Enters how a member answered; not at all for a survivor of a broken epoch."""
    node_id = client.member.node_id
    if not call.done():
        outcome.lost[node_id] = "did not answer in time"
        return
    try:
        report = call.result()
        check_report(report, client.member, staged)
    except WeightMismatch as error:
        outcome.rejected[node_id] = str(error)
    except EpochBroken:
        pass  # a survivor of a broken epoch stays for the next round
    except HeadwayError as error:
        outcome.lost[node_id] = str(error)
    else:
        outcome.installed[node_id] = report


def report_of(staged: Staged, outcome: Outcome, started: float) -> PublishReport:
    """The report of a publish that began at `started`, by time.monotonic."""
    return PublishReport(
        staged.manifest.version,
        outcome.installed,
        outcome.lost,
        outcome.rejected,
        sum(spec_bytes(spec) for spec in staged.manifest.tensors),
        time.monotonic() - started,
    )


def unable(backend: Backend, seated: Sequence[MemberClient]) -> dict[str, str]:
    """Node id -> why, of those that cannot take part in the group."""
    return {
        c.member.node_id: f"it offers {', '.join(c.member.backends) or 'no backend'}; the weight"
        f" group needs {backend}: give it a torch with {backend}"
        for c in seated
        if backend not in c.member.backends
    }
