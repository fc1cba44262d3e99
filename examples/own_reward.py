"""A reward function of one's own, with verl's signature: examples/own_reward.yaml names it."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """0.8 for the right number at the end, 0.2 for nothing but a number."""
    numbers = re.findall(r"-?\d+", solution_str)
    right = bool(numbers) and numbers[-1] == str(ground_truth)
    only_a_number = re.fullmatch(r"\s*-?\d+\s*", solution_str) is not None
    return {
        "score": 0.8 * right + 0.2 * only_a_number,
        "right": right,
        "only_a_number": only_a_number,
    }
