"""The `text_similarity` grader: well-known measures of how alike two texts are.

    fuzzy_match     rapidfuzz.fuzz.ratio: 1 − indel distance / (|text| + |reference|)
    bleu            sacrebleu, one sentence: 13a tokens, exponential smoothing, effective order
    gleu            nltk's sentence GLEU (Wu et al., arXiv:1609.08144), the same tokens
    rouge_1 … 5, l  rouge_score's F measure, no stemming

ROUGE's own tokens are runs of a-z and 0-9 only, which makes every Chinese or Greek text equal:
here other letters count too, and for plain English nothing changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from services.reward.grading.outcome import BadInput, Graded
from services.reward.grading.sample import Grade, Sample, text_of, value_of

Compare = Callable[[str, str], float]
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_TOKEN = re.compile(rf"[a-z0-9]+|[{_CJK}]|[^\W_a-z0-9{_CJK}]+")


def text_similarity(spec: Mapping[str, Any]) -> Grade:
    """Loads the library of the metric, then compares; the likest of several references counts."""
    metric = spec["evaluation_metric"]
    compare = _rouge(metric) if metric.startswith("rouge") else _METRICS[metric]()

    def grade(sample: Sample) -> Graded:
        text = text_of(spec["input"], sample)
        alike = [compare(text, reference) for reference in _references(spec["reference"], sample)]
        return Graded(min(1.0, max(alike)))

    return grade


def _references(reference: str | list[str], sample: Sample) -> list[str]:
    found: list[Any] = []
    for template in [reference] if isinstance(reference, str) else reference:
        value = value_of(template, sample)
        found += value if isinstance(value, list) else [value]
    if not found:
        raise BadInput("the item's list of references is empty")
    for value in found:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise BadInput(f"a reference is {type(value).__name__}, not a text or a number")
        if not str(value).strip():
            raise BadInput("a reference is empty: nothing is like it")
    return [str(value) for value in found]


def _fuzzy() -> Compare:
    from rapidfuzz import fuzz

    return lambda text, reference: fuzz.ratio(text, reference) / 100


def _bleu() -> Compare:
    from sacrebleu.metrics.bleu import BLEU

    measure = BLEU(effective_order=True)
    return lambda text, reference: measure.sentence_score(text, [reference]).score / 100


def _gleu() -> Compare:
    from nltk.translate.gleu_score import sentence_gleu
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    words = Tokenizer13a()

    def compare(text: str, reference: str) -> float:
        ours = words(text).split()
        return float(sentence_gleu([words(reference).split()], ours)) if ours else 0.0

    return compare


def _rouge(metric: str) -> Compare:
    from rouge_score.rouge_scorer import RougeScorer

    name = "rougeL" if metric == "rouge_l" else f"rouge{metric.removeprefix('rouge_')}"
    scorer = RougeScorer([name], tokenizer=_Words())
    return lambda text, reference: float(scorer.score(reference, text)[name].fmeasure)


class _Words:
    """A tokenizer as rouge_score takes one."""

    def tokenize(self, text: str) -> list[str]:
        """Runs of letters and digits in lower case; a Chinese or Japanese sign by itself."""
        return _TOKEN.findall(text.lower())


_METRICS: Mapping[str, Callable[[], Compare]] = {
    "fuzzy_match": _fuzzy,
    "bleu": _bleu,
    "gleu": _gleu,
}
