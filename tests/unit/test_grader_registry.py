"""Every type of grader stands under one name: in the spec, in the service and in the docs."""

import importlib
from pathlib import Path

import pytest

from headway.graders import GRADERS
from services.reward.grading.evaluate import BUILDERS

PAGE = (Path(__file__).parents[2] / "docs" / "graders.md").read_text()


@pytest.mark.parametrize("name", GRADERS)
def test_a_type_has_one_name_everywhere(name):
    assert GRADERS[name].model_fields["type"].default == name
    module, _, builder = BUILDERS[name].partition(":")
    assert callable(getattr(importlib.import_module(module), builder))
    assert f"`{name}`" in PAGE or f"## {name}\n" in PAGE or f"type: {name}," in PAGE


def test_no_two_types_share_a_model_or_a_builder():
    assert len(set(GRADERS.values())) == len(GRADERS)
    assert len({BUILDERS[name] for name in GRADERS}) == len(GRADERS)
