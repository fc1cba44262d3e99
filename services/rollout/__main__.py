"""python -m services.rollout: parse and choose cores first, then the heavy imports."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from headway.errors import InvalidSpec
from headway.settings import add_service_flags, parse_cores, service_settings


def main(argv: list[str] | None = None) -> int:
    """Runs a rollout node; returns its exit code (2: bad settings)."""
    namespace = _parser().parse_args(argv)
    try:
        settings = service_settings(namespace)
        if not settings.coordinator:
            raise InvalidSpec("--coordinator HOST:PORT is missing: a node serves a fleet")
        cores = parse_cores(namespace.cores)
        _bind(cores)
        sim = _sim_settings(namespace)
    except InvalidSpec as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from headway.lifecycle import run
    from headway.telemetry import configure_logging
    from services.rollout import serve
    from services.rollout.engines import EngineSettings

    configure_logging("rollout", settings.log_level)
    engine = EngineSettings(namespace.engine, cores, sim)
    return run(lambda lifecycle: serve.main(settings, engine, namespace.drain_s, lifecycle))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rollout", description="Headway's rollout node")
    add_service_flags(parser, "rollout")
    add = parser.add_argument
    add("--engine", choices=("vllm", "sim"), default="vllm")
    add("--cores", default="", help="CPU cores to use, such as 0,2-3; default: all it may use")
    add("--drain-s", type=float, default=20.0, help="at most so long for what is under way")
    sim = parser.add_argument_group("the sim engine, for tests and benchmarks").add_argument
    sim("--sim-tokens-per-s", type=float, default=1000.0, help="of one completion")
    sim("--sim-shared", action="store_true", help="the rate is that of all completions together")
    sim(
        "--sim-lengths",
        default="constant:32",
        metavar="KIND:MEAN[:SIGMA]",
        help="constant, uniform, lognormal or geometric, in tokens",
    )
    sim("--sim-vocab-size", type=int, default=256)
    sim("--sim-seed", type=int, default=0)
    sim("--sim-start-s", type=float, default=0.0, help="what loading the model takes")
    sim("--sim-install-pause-s", type=float, default=0.0, help="what installing weights takes")
    sim("--sim-broadcast", action="store_true", help="receive weights over a real weight group")
    return parser


def _bind(cores: tuple[int, ...]) -> None:
    """Keeps this process and its children on the cores; before any library counts them."""
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        there = sorted(os.sched_getaffinity(0))
        raise InvalidSpec(f"--cores {cores} are not all among this machine's {there}") from None
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(len(cores)))


def _sim_settings(namespace: argparse.Namespace) -> Any:
    from services.rollout.sim_engine import Lengths, SimSettings

    kind, _, rest = namespace.sim_lengths.partition(":")
    try:
        numbers = [float(part) for part in rest.split(":")] if rest else []
    except ValueError:
        numbers = [0.0, 0.0, 0.0]
    if kind not in ("constant", "uniform", "lognormal", "geometric") or len(numbers) > 2:
        raise InvalidSpec(
            f"--sim-lengths {namespace.sim_lengths!r} is not of the form KIND:MEAN[:SIGMA]"
        )
    return SimSettings(
        tokens_per_s=namespace.sim_tokens_per_s,
        shared=namespace.sim_shared,
        lengths=Lengths(kind, *numbers),
        vocab_size=namespace.sim_vocab_size,
        seed=namespace.sim_seed,
        start_s=namespace.sim_start_s,
        install_pause_s=namespace.sim_install_pause_s,
        broadcast=namespace.sim_broadcast,
    )


if __name__ == "__main__":
    sys.exit(main())
