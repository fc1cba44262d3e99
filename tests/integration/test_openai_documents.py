"""OpenAI's grader documents that ask a model, through a real service and a server beside it."""

from headway.messages import ScoreItem
from tests.support.outside_server import asking, outside_server, said
from tests.support.reward_stand import service

SCORE = {
    "type": "score_model",
    "name": "closeness",
    "model": "gpt-5-mini",
    "input": [{"role": "user", "content": "{{item.answer}} or {{sample.output_text}}?"}],
    "range": [0, 10],
    "sampling_params": {"temperature": 1, "top_p": 0.5, "seed": 42},
}
LABEL = {
    "type": "label_model",
    "name": "tone",
    "model": "o4-mini",
    "input": [{"role": "developer", "content": "Tone of: {{sample.output_text}}"}],
    "labels": ["kind", "rude"],
    "passing_labels": ["kind"],
}
MULTI = {
    "type": "multi",
    "name": "all",
    "graders": {
        "closeness": SCORE,
        "tone": LABEL,
        "length": {
            "type": "python",
            "name": "length",
            "source": "def grade(sample, item):\n    return len(sample['output_text'])",
            "image_tag": "2025-05-08",
        },
    },
    "calculate_output": "0.1 * closeness + tone + min(length, 2) ^ 2",
}


def answer(asked):
    if asked.body["model"] == "gpt-5-mini":
        return said("7")
    return said("Verdict: Rude." if "bah" in str(asked.body["messages"]) else "Kind")


async def test_a_multi_document_with_models_and_a_function():
    async with outside_server(answer) as openai:
        endpoint = openai.endpoint("openai", path="/v1", key="sk-secret")
        async with service(asking=asking(endpoint)) as (_, client):
            items = [ScoreItem(None, text, {"answer": "yes"}) for text in ("y", "bah")]
            scores = await client.score("", "", MULTI, items, 60.0)
    assert [s.error_message for s in scores] == ["", ""]
    assert [round(s.reward, 9) for s in scores] == [0.7 + 1 + 1, 0.7 + 0 + 4]
    assert scores[1].parts == {"closeness": 7.0, "tone": 0.0, "length": 3.0}
    of_score = [a.body for a in openai.asked if a.body["model"] == "gpt-5-mini"]
    assert {b["messages"][0]["content"].splitlines()[0] for b in of_score} == {
        "yes or y?",
        "yes or bah?",
    }
    settings = {k: v for k, v in of_score[0].items() if k not in ("messages", "model")}
    assert settings == {"temperature": 1, "top_p": 0.5, "seed": 42}
