"""The kinds of work that a node has at its version: a validation's first, then the job's own."""

from __future__ import annotations

from collections.abc import Callable

from headway.errors import HeadwayError
from headway.jobspec import JobSpec
from headway.ledger.api import Ledger, Refusal
from headway.ledger.keys import validation_room
from services.rollout.engine import Engine
from services.rollout.presence import WorkerSettings
from services.rollout.scoring import Scores
from services.rollout.sources import EVAL_JOB, TRAINING, TicketSource, validation
from services.rollout.tickets import EventLog, TicketWork


class Desk:
    """Makes the works of one job on one node.

    That a version is validated is known from the job itself, and the learner opens that
    validation's ledger before it sends the version: nobody has to be told.
    """

    def __init__(
        self,
        job_id: str,
        spec: JobSpec,
        settings: WorkerSettings,
        engine: Engine,
        ledger: Ledger,
        scores: Scores,
        events: EventLog,
        on_broken: Callable[[HeadwayError], None],
        room: Callable[[str], Ledger] | None,
    ) -> None:
        """`room` opens a ledger beside the job's own; None: there is none, nothing is validated."""

        def work(ledger: Ledger, source: TicketSource) -> TicketWork:
            return TicketWork(
                job_id, spec, settings.node_id, engine, ledger, scores, events, on_broken, source
            )

        self._spec, self._room, self._work = spec, room, work
        self.own = work(ledger, EVAL_JOB if spec.kind == "eval" else TRAINING)
        self._validation: TicketWork | None = None
        self._has_more = False  # of the validation, as its ledger last said

    @property
    def works(self) -> tuple[TicketWork, ...]:
        """In the order in which their tickets are claimed: a validation holds up newer weights."""
        return (self.own,) if self._validation is None else (self._validation, self.own)

    def turn_to(self, version: int) -> None:
        """A version was installed."""
        self._validation = None
        if self._room is not None and self._spec.validates(version):
            ledger = self._room(validation_room(version))
            self._validation = self._work(ledger, validation(version))
            self._has_more = True

    def answered(self, work: TicketWork, refusal: Refusal | None) -> None:
        """A claim was granted or refused; a validation whose ledger is closed is over.

        The job's own ledger is looked at again and again all the same.
        """
        if work is self._validation:
            self._has_more = refusal is None
            self._validation = None if refusal == "closed" else work

    def comes_first(self, work: TicketWork) -> bool:
        """Whether a work has tickets left, as far as is known, that others must not hold up."""
        return work is self._validation and self._has_more
