"""The same task for lighteval; its data set is the folder that it runs in."""

import json
import os

from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc

from headway.adapters.lighteval import headway_metric


def prompt(row, task_name):
    """A row as lighteval asks it."""
    return Doc(
        task_name=task_name, query=row["question"], choices=[row["answer"]], gold_index=0,
        specific={"answer": row["answer"]},
    )  # fmt: skip


TASKS_TABLE = [
    LightevalTaskConfig(
        name="headway_sums",
        prompt_function=prompt,
        hf_repo=os.environ["SUMS_FOLDER"],
        hf_subset="default",
        hf_avail_splits=["test"],
        evaluation_splits=["test"],
        generation_size=16,
        stop_sequence=[],
        metrics=[headway_metric(json.loads(os.environ["SUMS_GRADER"]))],
    )
]
