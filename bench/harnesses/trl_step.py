"""Two steps of TRL's GRPOTrainer with Headway's reward, on a tiny random model; JSON on stdout."""

import json
import os
import sys
from pathlib import Path

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from headway.adapters.scoring import Grading
from headway.adapters.trl import HeadwayReward
from headway.messages import ScoreItem

GRADER = json.loads(os.environ["SUMS_GRADER"])


class Watched(HeadwayReward):
    """Keeps what it was asked and what it said."""

    def __init__(self):
        super().__init__(GRADER)
        self.rows = []

    def __call__(self, prompts, completions, **columns):
        """As TRL calls it."""
        rewards = super().__call__(prompts, completions, **columns)
        texts = [completion[0]["content"] for completion in completions]
        self.rows += zip(texts, columns["answer"], rewards, strict=True)
        return rewards


def main() -> None:
    """Trains, and grades the same completions again."""
    folder, out = Path(sys.argv[1]), sys.argv[2]
    data = load_dataset("json", data_files="sums.jsonl", split="train")
    data = data.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})
    # every fourth row has no reference, so that there are nulls
    data = data.map(
        lambda row, i: {"answer": None if i % 4 == 3 else row["answer"]}, with_indices=True
    )
    reward = Watched()
    arguments = GRPOConfig(
        output_dir=out, max_steps=2, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=8, use_cpu=True, bf16=False, report_to=[], logging_steps=1,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder), reward_funcs=reward, args=arguments,
        train_dataset=data, processing_class=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    answers = [ScoreItem(None, text, {"answer": answer}) for text, answer, _ in reward.rows]
    ours = [score.reward for score in Grading(GRADER).score(answers)]
    json.dump({"theirs": [r for *_, r in reward.rows], "ours": ours, "logged": logged}, sys.stdout)


if __name__ == "__main__":
    main()
