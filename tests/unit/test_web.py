"""Refusals over HTTP name what was wrong and what to do, whoever made the app."""

import httpx
import pytest
from pydantic import BaseModel

from headway.web import make_app


class Body(BaseModel):
    """A request with one number."""

    number: int


@pytest.fixture
async def http():
    app = make_app("Test", lambda: True)

    @app.post("/v1/double")
    async def double(body: Body) -> int:
        return 2 * body.number

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


async def refusal(http, method, path, status, **sent):
    answer = await http.request(method, path, **sent)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    return answer.json()["error"]


JSON = {"content-type": "application/json"}


async def test_a_body_that_is_json_under_another_name_says_which_header_is_missing(http):
    curls = {"content-type": "application/x-www-form-urlencoded"}
    for headers in (curls, {}):
        error = await refusal(
            http, "POST", "/v1/double", 422, content=b'{"number": 1}', headers=headers
        )
        assert error["kind"] == "invalid"
        assert "`Content-Type: application/json`" in error["message"]
    assert (await http.post("/v1/double", content=b'{"number": 1}', headers=JSON)).json() == 2


async def test_json_that_is_none_says_where(http):
    error = await refusal(http, "POST", "/v1/double", 422, content=b'{"number": ', headers=JSON)
    assert error["message"] == "the body is not JSON: Expecting value (character 11)"


async def test_a_faulty_body_names_each_key(http):
    error = await refusal(http, "POST", "/v1/double", 422, json={"nmber": 1})
    assert error["message"] == "body.number: Field required"
    for wrong in ([], "text", 3):
        error = await refusal(http, "POST", "/v1/double", 422, json=wrong)
        assert error["message"].startswith("body: ")


async def test_an_unknown_path_and_a_wrong_method_name_what_was_asked_for(http):
    error = await refusal(http, "GET", "/v1/doubel", 404)
    assert error == {
        "kind": "not_found",
        "message": "there is no /v1/doubel here; GET /docs shows what there is",
    }
    error = await refusal(http, "GET", "/v1/double", 405)
    assert error == {"kind": "invalid", "message": "/v1/double is not for GET: it takes POST"}
