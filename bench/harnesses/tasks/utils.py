"""What the tasks' YAML names."""

from headway.adapters.lm_eval import HeadwayFilter, HeadwayMetric

GRADER = {
    "type": "sum",
    "graders": {
        "only_an_integer": {"type": "regex", "pattern": r"^\s*-?\d+\s*$"},
        "right": {"type": "numeric", "extract": "last"},
    },
    "weights": {"only_an_integer": 0.2, "right": 0.8},
}
score = HeadwayMetric(GRADER, parts=("right",))
rewards = HeadwayFilter(GRADER)
