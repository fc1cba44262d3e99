"""A minute of chaos: what `make chaos` does in ten, and the schedule of faults itself."""

from itertools import islice

from tests.chaos.plan import faults
from tests.chaos.run import LAG, ChaosSettings, run_chaos


async def test_a_short_storm_loses_and_doubles_nothing(tmp_path):
    settings = ChaosSettings(seed=5, faults=12, mean_gap_s=0.6, nodes=3, steps=40, step_s=0.05)
    outcome = await run_chaos(tmp_path, settings)
    figures = outcome.figures()
    assert figures["jobs_failed"] == {} and figures["faults"] == 12
    assert (figures["lost"], figures["doubled"]) == (0, 0)
    assert figures["largest_lag"] <= LAG
    for job in outcome.jobs.values():
        job.check(settings.steps, 4, LAG)


def test_the_same_seed_gives_the_same_storm():
    def storm(seed):
        return list(islice(faults(seed, 4, 1.5, 2.0), 400))

    assert storm(1) == storm(1) != storm(2)
    hit = {fault.target.rpartition("-")[0] or fault.target for fault in storm(1)}
    assert hit >= {"rollout", "rank", "learner", "reward", "coordinator", "redis"}
    assert {fault.kind for fault in storm(1)} == {"kill", "pause", "cut", "stalled", "deaf", "slow"}
