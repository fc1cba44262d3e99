"""Graders as a user writes them: JSON in a job or a request. See docs/graders.md."""

from headway.graders.gym import ReasoningGym
from headway.graders.parsing import GRADERS, parse_grader_json, validate_grader
from headway.graders.spec import Combination, GraderSpec

__all__ = [
    "GRADERS",
    "Combination",
    "GraderSpec",
    "ReasoningGym",
    "parse_grader_json",
    "validate_grader",
]
