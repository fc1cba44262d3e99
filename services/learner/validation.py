"""A job's validations: held-out prompts at one version, beside the steps (ADR 17).

While one is under way its version stays the newest that nodes can get; the loop asks
`under_way` before it sends another. `begin` must come before the version is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from headway.errors import NotFound
from headway.evaluation.finished import read_evaluation
from headway.evaluation.names import val_metrics
from headway.evaluation.records import samples_path
from headway.jobspec import JobSpec
from headway.jobspec_eval import last_validated
from headway.ledger.api import Ledger
from headway.patience import patiently
from headway.report_data import is_validation, json_lines
from services.learner.events import Events
from services.learner.held_out import Prompts
from services.learner.round import Round
from services.learner.run_folder import RunFolder


class Validation:
    """One at a time. `ledger_of` opens the ledger of a version's validation."""

    def __init__(
        self,
        spec: JobSpec,
        ledger_of: Callable[[int], Ledger],
        prompts: Prompts,
        folder: RunFolder,
        events: Events,
    ) -> None:
        self._spec, self._ledger_of, self._prompts = spec, ledger_of, prompts
        self._folder, self._events = folder, events
        self._done = validated(folder)
        self._round: Round | None = None
        self._began = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def under_way(self) -> bool:
        """Whether a version is being validated: none that is newer may be sent."""
        return self._round is not None

    @property
    def version(self) -> int:
        """The version under way; -1 for none."""
        return self._round.version if self._round is not None else -1

    def meanwhile(self) -> str:
        """What is under way, for people who ask why no newer weights are sent; "" for nothing."""
        if (found := self._round) is None:
            return ""
        return (
            f"version {found.version} is being validated, {found.num_left} of {found.num_prompts}"
            " prompts are left"
        )

    def is_due(self, version: int) -> bool:
        """Whether this version is to be validated and has not been."""
        return self._spec.validates(version) and version not in self._done

    def unfinished(self, committed: int) -> int | None:
        """The version that a learner started again has to send again, if there is one.

        `committed`: steps that the ledger knows were trained, so that every older version that
        was due has been validated, or was being validated when the learner was lost.
        """
        return next((v for v in range(committed + 1) if self.is_due(v)), None)

    def give_up(self, version: int) -> None:
        """A version's weights are no more: a later checkpoint was made while Redis was full."""
        self._done.add(version)
        text = f"version {version} is not validated to the end: its weights are gone"
        self._events.add("validation_lost", text, level="error", version=version)

    async def tidy(self, committed: int) -> None:
        """Closes the ledgers of validations that were done when the learner was lost."""
        for version in [v for v in last_validated(self._spec, committed) if v in self._done]:
            with suppress(NotFound):
                await patiently(self._ledger_of(version).close)

    async def begin(self, version: int) -> None:
        """Opens a version's ledger, new or as it was left; from now on it is under way."""
        found = Round(
            self._spec,
            self._ledger_of(version),
            self._prompts,
            version,
            samples_path(self._folder.path),
            self._events,
        )
        await found.open()
        total, left = found.num_prompts, found.num_left
        again = f"; {total - left} are done" if left < total else ""
        text = f"version {version} is validated on {total} prompts{again}"
        self._events.add("validation_started", text, version=version, prompts=total, left=left)
        self._round = found
        self._ended.clear()
        self._began.set()

    async def run(self) -> None:
        """Validates what was begun, for ever; raises what that fails with."""
        while True:
            await self._began.wait()
            self._began.clear()
            if (found := self._round) is None:
                continue
            began = time.monotonic()
            await found.run()
            await asyncio.to_thread(self._summarise, found.version, time.monotonic() - began)
            await found.close()
            self._round = None
            self._ended.set()

    async def over(self, timeout_s: float) -> bool:
        """True once nothing is under way; False when that takes longer."""
        if self._round is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._ended.wait()
        return self._round is None

    async def close(self) -> None:
        """The job ends: what is under way is not finished."""
        if self._round is not None:
            await self._round.close()

    def _summarise(self, version: int, seconds: float) -> None:
        """Adds the row that says the validation is complete."""
        metrics = val_metrics(read_evaluation(self._folder.path, version).tables)
        row: dict[str, Any] = {
            "step": version,
            "version": version,
            "time": time.time(),
            "timing_s/testing": seconds,
            **metrics,
        }
        self._folder.append_metrics(row)
        self._done.add(version)
        self._events.metrics(version, row)
        core = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
        said = ", ".join(f"{name.removeprefix('val-core/')} {v:.3f}" for name, v in core.items())
        self._events.add("validated", f"version {version}: {said}", version=version)


def validated(folder: RunFolder) -> set[int]:
    """The versions whose validation is recorded as complete."""
    return set(_versions(json_lines(folder.metrics)))


def _versions(rows: Iterator[Mapping[str, Any]]) -> Iterator[int]:
    return (int(row["step"]) for row in rows if is_validation(row))
