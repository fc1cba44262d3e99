"""What people see of evaluations: tables, pages, comparisons; hostile completions stay text."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from headway.cli import group
from headway.errors import InvalidSpec, NotFound
from headway.evaluation import browser
from headway.evaluation.compare import compare
from headway.evaluation.finished import (
    differences,
    is_eval_job,
    read_evaluation,
    voter_of,
    write_metrics,
)
from headway.evaluation.report import render, render_comparison, write_eval_report
from headway.evaluation.text import comparison_lines, table_lines
from tests.support.eval_records import eval_job, eval_run, prompt

HOSTILE = [
    "</pre></div><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "</details><style>*{display:none}</style>",
    '" onmouseover="alert(3)',
    "<!-- ",
    "]]>\x00\x1b[31m\u202e\ud800",
]


class Elements(HTMLParser):
    """The elements of a page, and the text outside of scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.found, self.open, self.text = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += data


@pytest.fixture
def run(tmp_path):
    return eval_run(
        tmp_path / "runs/eval-1",
        [
            prompt(0, [1.0, 0.0, 1.0, 1.0], texts=["7", "8", "7", "7"]),
            prompt(1, [0.0, None, 0.0, 0.0]),
            prompt(2, [], skipped="prompt of 900 tokens"),
        ],
        n=4,
        temperature=1.0,
    )


def test_a_table_for_people(run):
    found = read_evaluation(run)
    assert (found.name, found.model, found.version) == ("eval-1", "some/model", 0)
    head, row, note = table_lines(found.tables)
    assert head.split() == [
        "data", "source", "prompts", "mean@4", "pass@4", "maj@4/mean", "95", "%", "of", "the",
        "mean", "tokens", "cut",
    ]  # fmt: skip
    assert row.split()[:5] == ["sums", "2", "0.375", "1.000", "1.000"]  # one prompt has all four
    assert note == (
        "sums: 7 of 8 completions graded (1 timeout); were those without a reward all wrong or all"
        " right, the mean would be 0.375 or 0.500; 1 prompts were not sampled"
    )


def test_nothing_graded_is_shown_as_nothing(tmp_path):
    bad = [prompt(0, [None], source="a\x1b[2J"), prompt(1, [], source="b", skipped="too long")]
    found = read_evaluation(eval_run(tmp_path / "bad", bad))
    lines = table_lines(found.tables)
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["a?[2J", "1", "–"], ["b", "0", "–"], ["all", "1", "–"],
    ]  # fmt: skip
    assert lines[4].startswith("a?[2J: 0 of 1 completions graded (1 timeout)")
    assert "the mean would be 0.000 or 1.000" in lines[4]
    assert Elements(render(found)).open == []


def test_metrics_are_written_beside_the_records(run):
    target = write_metrics(read_evaluation(run))
    assert target == run / "eval/metrics.json"
    facts = json.loads(target.read_text())
    assert facts["metrics"]["val-core/sums/reward/mean@4"] == 0.375
    assert facts["tables"][0]["null_kinds"] == {"timeout": 1}
    assert (facts["model"], facts["evaluation"]["n"]) == ("some/model", 4)


def test_the_page_has_every_sample_to_look_at(run):
    page = write_eval_report(read_evaluation(run)).read_text()
    elements = Elements(page)
    kinds = [a["data-kinds"] for tag, a in elements.found if a.get("class") == "sample"]
    assert kinds == ["right wrong", "null wrong", ""]
    assert "timeout: too slow" in elements.text
    assert "not sampled: prompt of 900 tokens" in elements.text
    assert not elements.open


def test_the_only_script_is_the_one_that_the_policy_names(run):
    page = render(read_evaluation(run))
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(
        a["content"]
        for tag, a in Elements(page).found
        if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


def test_hostile_text_stays_text(tmp_path):
    evil = "".join(HOSTILE)
    records = [
        prompt(
            index,
            [1.0, None],
            source=evil[:150],
            texts=[text, text],
            prompt=[{"role": text, "content": text}],
            item={text: text},
        )
        for index, text in enumerate(HOSTILE)
    ]
    clean = eval_run(tmp_path / "clean", [prompt(i, [1.0, None]) for i in range(len(HOSTILE))])
    hostile = eval_run(tmp_path / "hostile", records)
    a, b = Elements(render(read_evaluation(clean))), Elements(render(read_evaluation(hostile)))
    kinds = [sorted({tag for tag, _ in e.found}) for e in (a, b)]
    assert kinds[0] == kinds[1]
    assert sum(tag == "script" for tag, _ in b.found) == 1
    assert not [attrs for _, attrs in b.found if any(name.startswith("on") for name in attrs)]
    assert not b.open
    assert HOSTILE[0] in b.text
    write_eval_report(read_evaluation(hostile))  # half a character can be written
    found = read_evaluation(hostile)
    both = render_comparison(found, found, compare(found.records(), found.records()))
    assert sum(tag == "script" for tag, _ in Elements(both).found) == 1


def test_a_page_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(browser, "MAX_PROMPTS", 3)
    many = eval_run(tmp_path / "many", [prompt(i, [1.0], texts=["x" * 9000]) for i in range(5)])
    page = render(read_evaluation(many))
    assert page.count('class="sample"') == 3
    assert "2 more prompts are in eval/samples.jsonl" in page
    assert "… 1,000 more characters" in page
    monkeypatch.setattr(browser, "_MAX_PAGE", 20_000)
    assert render(read_evaluation(many)).count('class="sample"') == 2


def test_a_data_source_named_all_is_one_like_any_other(tmp_path, monkeypatch):
    asked = [prompt(i, [1.0], source=source) for source in ("all", "sums") for i in range(3)]
    run = eval_run(tmp_path / "run", asked)
    assert [(t.data_source, t.num_prompts) for t in read_evaluation(run).tables] == [
        ("all", 3), ("sums", 3),
    ]  # fmt: skip
    monkeypatch.setattr(browser, "MAX_PROMPTS", 2)
    page = render(read_evaluation(run))
    assert page.count('class="sample"') == 2
    assert "4 more" in page


def test_versions_of_a_training_run(tmp_path):
    run = eval_run(
        tmp_path / "run",
        [prompt(0, [0.0]), prompt(0, [1.0], version=5), prompt(1, [1.0], version=5)],
    )
    assert read_evaluation(run).version == 5
    assert read_evaluation(run).name == "run, version 5"
    assert read_evaluation(run, 0).tables[0].num_prompts == 1
    with pytest.raises(NotFound, match=r"no evaluation of version 3 \(there are: 0, 5\)"):
        read_evaluation(run, 3)
    with pytest.raises(NotFound, match="holds no evaluation"):
        read_evaluation(tmp_path)
    assert is_eval_job(run) and not is_eval_job(tmp_path)


def test_votes_are_read_as_each_data_set_is_graded():
    job = eval_job()
    assert voter_of(job)("anything")("so 7") == "7"
    job["evaluation"]["data"] = [
        {"name": "a", "data_source": "A", "grader": {"type": "multiple_choice"}},
        {"name": "b", "grader": None},
    ]
    find = voter_of(job)
    assert (find("A")("so B"), find("b")("so 7"), find("c")) == ("b", "7", None)
    assert voter_of({})("x") is None


def test_what_else_differs_is_said(tmp_path):
    a = eval_run(tmp_path / "a", [prompt(0, [0.0])], max_tokens=8)
    b = eval_run(tmp_path / "b", [prompt(0, [1.0, 1.0])], n=2, temperature=0.5)
    found = differences(read_evaluation(a), read_evaluation(b))
    assert found == [
        "evaluation.n: 1 in A, 2 in B",
        "evaluation.temperature: 0.0 in A, 0.5 in B",
        "evaluation.max_tokens: 8 in A, None in B",
    ]


# --- commands ---


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        return CliRunner().invoke(group, list(map(str, arguments)), catch_exceptions=False)

    return call


def test_compare_prints_the_table_and_writes_the_page(run, tmp_path, command):
    better = [prompt(0, [1.0] * 4), prompt(1, [1.0, None, 1.0, 0.0]), prompt(7, [1.0])]
    eval_run(tmp_path / "runs/eval-2", better, n=4, temperature=1.0)
    done = command("compare", "eval-1", "eval-2")
    assert done.exit_code == 0
    assert "A: eval-1 (some/model)" in done.output
    # 0.75 and 0 against 1 and 2/3
    assert re.search(r"sums +mean +2 +0\.375 +0\.833 +\+0\.458 ", done.output)
    assert "0 prompts are in A only and 1 in B only" in done.output
    assert "no difference beyond what chance explains (p = 0.500)" in done.output
    page = (tmp_path / "runs/eval-2/compare-eval-1.html").read_text()
    assert page.count('class="sample"') == 2 and "B: eval-2" in page
    facts = json.loads(command("compare", "eval-1", "eval-2", "--json").stdout)
    assert facts["contrasts"][0]["wins"] == 2
    assert command("compare", "eval-1", "runs/eval-2", "--out", "x.html").exit_code == 0
    assert (tmp_path / "x.html").is_file()


def test_versions_of_one_run_are_compared(tmp_path, command):
    eval_run(tmp_path / "runs/t", [prompt(0, [0.0]), prompt(0, [1.0], version=5)])
    done = command("compare", "t:0", "t")
    assert "B: t, version 5" in done.output and "+1.000" in done.output
    assert (tmp_path / "runs/t/compare-t-0-5.html").is_file()
    with pytest.raises(InvalidSpec, match="name two evaluations"):
        command("compare", "t:5", "t")
    with pytest.raises(InvalidSpec, match="neither a run folder nor a job"):
        command("compare", "t:x", "t")


def test_report_makes_an_eval_jobs_files_again(run, command):
    done = command("report", "eval-1")
    assert done.stdout.strip().endswith("report.html")
    assert (run / "eval/metrics.json").is_file()
    assert "By data source" in (run / "report.html").read_text()


def test_a_comparison_in_text():
    a = [prompt(i, [0.0]) for i in range(12)]
    b = [prompt(i, [1.0]) for i in range(11)] + [prompt(11, [1.0], item={})]
    lines = comparison_lines(compare(a, b), "a", "b")
    assert "1 rows asked different things and are left out: sums, row 11" in lines
    assert lines[-1] == "B is better, beyond what chance explains (p < 0.001)"
    lines = comparison_lines(compare(b[:11], a[:11]), "b", "a")
    assert lines[-1].startswith("A is better")
