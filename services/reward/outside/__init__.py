"""Asks judges, reward models and remote graders, in the service's process: workers have no network.

The way of a request: `lane` finds the endpoint, answers from the `cache` or joins what is already
being asked, and puts the rest into a job's `line`, which sends it through the `door`, again and
again as `patience` allows; `reading` takes out of the answer what the worker needs.
"""
