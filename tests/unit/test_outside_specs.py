"""What graders that ask outside may say, whom they may ask, what their answers mean."""

import pytest

from headway.errors import InvalidSpec
from headway.graders import validate_grader
from headway.graders.outside import outside_limit_s
from services.reward.__main__ import main
from services.reward.grading.outcome import OutsideFailed
from services.reward.grading.verdicts import verdict_of
from services.reward.outside.cache import AnswerCache
from services.reward.outside.endpoints import Endpoints, load_endpoints

JUDGE = {"type": "judge", "endpoint": "j", "criteria": "x"}
MODEL = {"type": "reward_model", "endpoint": "j"}
REMOTE = {"type": "remote", "endpoint": "j"}


@pytest.mark.parametrize(
    "spec, message",
    [
        ({"type": "judge", "criteria": "x"}, "name either endpoint or url"),
        (JUDGE | {"url": "http://x"}, "name either endpoint or url"),
        (JUDGE | {"endpoint": None, "url": "http://x"}, "model: a judge at a url"),
        (JUDGE | {"messages": [{"role": "user", "content": "x"}]}, "either criteria or messages"),
        ({"type": "judge", "endpoint": "j"}, "either criteria or messages"),
        (JUDGE | {"criteria": "{{itm.x}}"}, "criteria: {{itm.x}} is not"),
        (
            {"type": "judge", "endpoint": "j", "messages": [{"role": "user", "content": "{{y}}"}]},
            "messages.0: {{y}} is not",
        ),
        (
            {"type": "judge", "endpoint": "j", "messages": [{"role": "usr", "content": "y"}]},
            "grader.messages.0.role",
        ),
        (JUDGE | {"range": [1, 1]}, "the lowest verdict is below"),
        (JUDGE | {"range": [0, 1], "labels": {"a": 1}}, "range and normalize do not go"),
        (JUDGE | {"labels": {"Yes": 1, "yes.": 0}}, "labels differ by more than"),
        (JUDGE | {"labels": {"*": 1}}, "labels differ by more than"),
        (JUDGE | {"pattern": "("}, "not a regular expression"),
        (JUDGE | {"pattern": "(a)(b)"}, "at most one group"),
        (JUDGE | {"pattern": "a", "json_field": "b"}, "either pattern or json_field"),
        (JUDGE | {"extra": {"messages": []}}, "messages is not set in extra"),
        (JUDGE | {"extra": {"stream": True}}, "stream is not set in extra"),
        (JUDGE | {"samples": 0}, "grader.samples"),
        (JUDGE | {"api_key": "sk-x"}, "unknown key grader.api_key"),
        (JUDGE | {"patience_s": -1}, "grader.patience_s"),
        (MODEL | {"as_chat": True, "api": "score"}, "api score takes texts"),
        (MODEL | {"label": 0, "api": "score"}, "api score gives one score"),
        (MODEL | {"input": "{{sample.x}}"}, "input: {{sample.x}} is not"),
        (REMOTE | {"body": {"a": "{{nope}}"}, "field": "x"}, "body.a: {{nope}} is not"),
        (REMOTE | {"body": {}}, "body and field are given together"),
        (REMOTE | {"body": {}, "field": "x", "batch_size": 2}, "holds one item"),
        (REMOTE | {"send": ["text"]}, "grader.send.0"),
    ],
)
def test_faulty_graders_are_refused(spec, message):
    with pytest.raises(InvalidSpec) as refused:
        validate_grader(spec)
    assert message in str(refused.value)


def test_templates_are_looked_for_in_the_data():
    with pytest.raises(InvalidSpec, match=r"grader\.reference: .*did you mean item\.answer"):
        validate_grader(JUDGE | {"reference": "{{item.answr}}"}, {"answer": 1})
    with pytest.raises(InvalidSpec, match=r"grader\.body\.a\.0: item\.x does not exist"):
        validate_grader(REMOTE | {"body": {"a": ["{{item.x}}"]}, "field": "y"}, {"answer": 1})


def test_how_long_asking_may_take():
    gate = {"type": "gate", "condition": {"type": "regex", "pattern": "x"}, "then": JUDGE}
    assert outside_limit_s(gate["condition"], 8) == 0
    assert outside_limit_s(gate, 8) == 300 + 8 * 60
    two = {"a": JUDGE | {"samples": 3, "try_timeout_s": 10}, "b": REMOTE | {"patience_s": 0}}
    assert outside_limit_s({"type": "sum", "graders": two}, 2) == 300 + 60 + 120
    assert outside_limit_s(["no", {"type": "judge"}], 2) == 0
    assert outside_limit_s({"type": "judge", "patience_s": "long"}, 1) == 360


# --- verdicts ------------------------------------------------------------------------------


def verdict(text, cut_off=False, **changes):
    return verdict_of(text, cut_off, validate_grader(JUDGE | changes).model_dump(mode="json"))


TEN = {"range": [1, 10]}
LABELS = {"labels": {"correct": 1.0, "partly correct": 0.5, "incorrect": 0.0}}


@pytest.mark.parametrize(
    "text, changes, reward",
    [
        ("Verdict: 0.5", {}, 0.5),
        ("It says\n> Verdict: 1\nwhich is a trick.\n**Verdict:** 0", {}, 0.0),
        ("verdict = 8/10", TEN, 8.0),
        ("Verdict: **7.**", TEN, 7.0),
        ("Verdict: 10", TEN | {"normalize": True}, 1.0),
        ("Verdict: 1", TEN | {"normalize": True}, 0.0),
        ("Verdict: -1", {"range": [-1, 1]}, -1.0),
        ("Verdict: .25", {}, 0.25),
        ("  1\n", {}, 1.0),
        ("<think>Verdict: 0</think>\nVerdict: 1", {}, 1.0),
        ("He wrote </think>.\nVerdict: 1", {}, 1.0),
        ("Verdict: Partly Correct.", LABELS, 0.5),
        ('"CORRECT"', LABELS, 1.0),
        ("[[B]] then [[A]]", {"pattern": r"\[\[(\w)\]\]", "labels": {"A": 1, "B": 0}}, 1.0),
        ("4 stars, 5 stars", {"pattern": r"\d(?= stars)", "range": [1, 5]}, 5.0),
        ('{"score": 3} no: {"score": 4}', {"json_field": "score"} | TEN, 4.0),
        ('```json\n{"a": {"ok": true}}\n```', {"json_field": "a.ok"}, 1.0),
        ('{"ok": true}', {"json_field": "ok", "labels": {"true": 0.5, "false": 0}}, 0.5),
        ('{"v": "incorrect"}', {"json_field": "v"} | LABELS, 0.0),
        ('{{"score": 0.5}', {"json_field": "score"}, 0.5),
    ],
)
def test_verdicts(text, changes, reward):
    assert verdict(text, **changes) == reward


@pytest.mark.parametrize(
    "text, changes, message",
    [
        ("I cannot tell", {}, "is no number"),
        ("Verdict: 11", TEN, "11 is not within 1 to 10"),
        ("Verdict: 0", TEN, "0 is not within"),
        ("Verdict: 4/5", TEN, "'4/5' is no number"),
        ("Verdict: 1e0", {}, "is no number"),
        ("Verdict: inf", {}, "is no number"),
        ("Verdict: 0 or 1", {}, "is no number"),
        ("Verdict: 0,5", {}, "is no number"),
        ("Verdict:", {}, "is no number"),
        ("<think>Verdict: 1", {}, "holds no verdict"),
        ("Verdict: not correct", LABELS, "is none of correct, partly"),
        ("5", {"pattern": r"\[\[(\w)\]\]"}, "holds no verdict"),
        ("[1]", {"json_field": "score"}, "holds no verdict"),
        ('{"score": null}', {"json_field": "score"}, "holds no verdict"),
        ('{"score": 1' + "0" * 400 + "}", {"json_field": "score"}, "nan is not within"),
        ('{"score": NaN}', {"json_field": "score"}, "nan is not within"),
        ('{"score": {"score": 1}}', {"json_field": "score"}, "holds no verdict"),
        ('{"a":' * 5000, {"json_field": "a"}, "holds no verdict"),
    ],
)
def test_what_is_no_verdict_is_said_and_never_a_zero(text, changes, message):
    with pytest.raises(OutsideFailed) as said:
        verdict(text, **changes)
    assert said.value.kind == "judge_unparsable" and message in str(said.value)


def test_an_answer_cut_off_before_its_verdict_says_so():
    with pytest.raises(OutsideFailed, match="cut off at its token limit"):
        verdict("<think>hm", cut_off=True)


# --- endpoints -----------------------------------------------------------------------------


def test_endpoints_have_their_keys_from_environment_and_files(tmp_path):
    key = tmp_path / "key"
    key.write_text("sk-file\n")
    key.chmod(0o600)
    file = tmp_path / "e.yaml"
    file.write_text(
        "a: {base_url: 'https://a/v1', key_env: A_KEY, model: m, max_concurrent: 3}\n"
        f"b: {{base_url: 'http://b:8000', key_file: {key}, key_header: api-key}}\n"
    )
    found = load_endpoints(str(file), (), {"A_KEY": "sk-env"}).named
    assert found["a"].headers() == {"Authorization": "Bearer sk-env"}
    assert found["b"].headers() == {"api-key": "sk-file"}
    assert (found["a"].model, found["a"].max_concurrent, found["b"].model) == ("m", 3, None)
    assert "sk-" not in repr(found)
    key.chmod(0o644)
    with pytest.raises(InvalidSpec, match=r"b: key_file .* is open to others"):
        load_endpoints(str(file), (), {"A_KEY": "sk-env"})


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: {base_url: 'https://a', key: sk-secret}", "a: key Extra inputs"),
        ("a: {base_url: 'https://a', key_env: NOT_THERE}", "the environment has no NOT_THERE"),
        ("a: {base_url: 'https://u:sk-secret@a'}", "a URL has no login"),
        ("a: {base_url: 'ftp://a'}", "not an http or https URL"),
        ("a: {base_url: 'https://a', key_env: A, key_file: b}", "either key_env or key_file"),
        ("a: {base_url: 'https://a', ca_file: /not/there}", "no file /not/there"),
        ("a: {base_url: 'https://a', key_header: 'x: y'}", "key_header"),
        ("a: {base_url: 'https://a', key_env: BAD}", "characters that no header"),
        ("- a", "a mapping of names"),
        ("a: [", "e.yaml: "),
        ("a: 1", "valid dictionary"),
    ],
)
def test_faulty_endpoints_end_the_start_and_tell_no_secret(text, message, tmp_path, capsys):
    file = tmp_path / "e.yaml"
    file.write_text(text)
    with pytest.raises(InvalidSpec) as refused:
        load_endpoints(str(file), (), {"A": "x", "BAD": "sk-secret\nx"})
    assert message in str(refused.value) and "sk-secret" not in str(refused.value)


def test_a_service_with_faulty_endpoints_does_not_start(tmp_path, capsys):
    assert main(["--endpoints", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["--allow-url", "judge.lan"]) == 2
    assert "--allow-url: not an http or https URL" in capsys.readouterr().err


ALLOWED = ("https://a.lan/v1", "http://127.0.0.1:8000")


@pytest.mark.parametrize(
    "url",
    [
        "https://a.lan/v1", "https://A.lan:443/v1/", "https://a.lan/v1/more",
        "http://127.0.0.1:8000", "http://127.0.0.1:8000/any/thing",
    ],
)  # fmt: skip
def test_urls_below_an_allowed_one(url):
    assert Endpoints({}, ALLOWED).find({"url": url}, "g").base_url == url


@pytest.mark.parametrize(
    "url",
    [
        "https://a.lan", "https://a.lan/v10", "https://a.lan/v1/../admin", "https://a.lan/v1/%2e%2e/x",
        "http://a.lan/v1", "https://a.lan:8443/v1", "https://a.lan.evil/v1", "https://evil/a.lan/v1",
        "https://a.lan@evil/v1", "https://u@a.lan/v1", "https://a.lan/v1?x=1", "https://a.lan/v1#x",
        "https://a.lan\\@evil/v1", "http://127.0.0.1/", "http://127.0.0.1:8001", "http://localhost:8000",
        "http://127.1:8000", "http://2130706433:8000", "file:///etc/passwd", "//a.lan/v1", "", "https://",
        "https://a.lan/v1/./x", "https://a.lan/v1\n/x",
    ],
)  # fmt: skip
def test_urls_beside_an_allowed_one_are_refused(url):
    with pytest.raises(InvalidSpec, match=r"^g\.url: "):
        Endpoints({}, ALLOWED).find({"url": url}, "g")


def test_jobs_share_slots_and_failures_only_where_they_ask_the_same_host():
    def desk(url):
        return Endpoints({}, (ALLOWED[0], "public")).find({"url": url}, "g").desk

    assert (
        desk("https://a.example/x")
        == desk("https://a.example:443/y")
        == ("public, https://a.example:443")
    )
    assert desk("https://b.example/x") == "public, https://b.example:443"
    assert desk("https://a.example:8443/x") == "public, https://a.example:8443"
    assert desk(ALLOWED[0].rstrip("/") + "/x") == ALLOWED[0]


def test_public_urls_go_through_the_check_of_addresses():
    found = Endpoints({}, ("public",)).find({"url": "https://169.254.169.254/x"}, "g")
    assert found.public_only and found.key == ""


# --- cache ---------------------------------------------------------------------------------


def test_the_answers_used_last_stay():
    cache = AnswerCache(max_bytes=3 * 210)
    for name in "abc":
        cache.put(name, "x" * 6)
    assert cache.get("a") == ("xxxxxx",)
    cache.put("d", None)
    assert cache.get("b") is None and cache.get("d") == (None,) and len(cache) == 3
    cache.put("a", 2)
    cache.forget(["a", "nothing"])
    assert cache.get("a") is None and len(cache) == 2
    cache.put("huge", "x" * 10_000)
    assert len(cache) == 0
    cache.put("c", 1)
    assert cache.get("c") == (1,)
