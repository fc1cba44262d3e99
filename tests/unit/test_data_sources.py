"""Sources of prompts: names, columns, damaged files."""

import datetime
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headway.data import open_source
from headway.data.plain import plain
from headway.errors import InvalidSpec
from headway.jobspec import DataSpec

SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
CHAT = [{"role": "user", "content": "What is 1 + 2?"}]
VERL = {
    "data_source": "gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"split": "train", "index": 7},
}


def spec(source, name, **more):
    return DataSpec(source=source, name=str(name), **more)


def test_reasoning_gym_keeps_question_and_answer_and_repeats_itself():
    source = open_source(spec("reasoning_gym", "chain_sum", config=SUM, size=20, seed=5))
    again = open_source(spec("reasoning_gym", "chain_sum", config=SUM, size=20, seed=5))
    other = open_source(spec("reasoning_gym", "chain_sum", config=SUM, size=20, seed=6))
    assert len(source) == 20
    rows = [source.row(i) for i in range(20)]
    assert rows == [again.row(i) for i in range(20)] != [other.row(i) for i in range(20)]
    for row in rows:
        question = row.prompt[0]["content"]
        expression = row.item["metadata"]["expression"]
        assert (
            question
            == f"State the final answer to the following arithmetic problem: {expression} ="
        )
        left, sign, right = expression.split()
        assert len(left) == len(right) == 1
        total = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert row.item["answer"] == str(total)
        assert row.item["metadata"]["source_dataset"] == "chain_sum"


def test_reasoning_gym_names_the_nearest_known_name_or_key():
    with pytest.raises(InvalidSpec, match="did you mean chain_sum"):
        open_source(spec("reasoning_gym", "chain_sums"))
    with pytest.raises(InvalidSpec, match=r"data\.config\.min_term \(did you mean min_terms\?\)"):
        open_source(spec("reasoning_gym", "chain_sum", config={"min_term": 2}))
    with pytest.raises(InvalidSpec, match=r"write data\.seed instead"):
        open_source(spec("reasoning_gym", "chain_sum", config={"seed": 2}))
    for bad in ({"min_terms": 5, "max_terms": 2}, {"min_terms": "two"}):
        with pytest.raises(InvalidSpec, match=r"data\.config of chain_sum"):
            open_source(spec("reasoning_gym", "chain_sum", config=bad))


def test_a_missing_file_and_a_config_for_a_file_are_refused(tmp_path):
    with pytest.raises(InvalidSpec, match="there is no such file"):
        open_source(spec("jsonl", tmp_path / "none.jsonl"))
    with pytest.raises(InvalidSpec, match="takes none"):
        open_source(spec("jsonl", tmp_path / "none.jsonl", config={"a": 1}))


def test_verl_and_trl_rows_keep_their_columns(tmp_path):
    path = tmp_path / "rows.jsonl"
    trl = {"prompt": "The sky is", "solution": "blue", "weights": [1, 2.5, None]}
    path.write_text(json.dumps(VERL) + "\n" + json.dumps(trl) + "\n")
    source = open_source(spec("jsonl", path))
    first, second = source.row(0), source.row(1)
    assert first.prompt == CHAT
    assert first.item == {k: v for k, v in VERL.items() if k != "prompt"}
    assert second.prompt == "The sky is"
    assert second.item == {"solution": "blue", "weights": [1, 2.5, None]}


def test_s087_bom_crlf_and_blank_lines_give_the_clean_files_rows(tmp_path):
    rows = [{**VERL, "extra_info": {"index": i, "note": "a\u2028b"}} for i in range(3)]
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    clean, rough = tmp_path / "clean.jsonl", tmp_path / "rough.jsonl"
    clean.write_bytes(b"\n".join(lines) + b"\n")
    rough.write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(lines) + b"\r\n  \r\n\r\n")
    a, b = open_source(spec("jsonl", clean)), open_source(spec("jsonl", rough))
    assert len(a) == len(b) == 3
    assert [a.row(i) for i in range(3)] == [b.row(i) for i in range(3)]
    assert b.row(2).item["extra_info"] == {"index": 2, "note": "a\u2028b"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "a", ', "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'["a"]', "a row is a JSON object, not list"),
        (b'{"question": "a"}', r"no column prompt \(columns: question\)"),
        (b'{"prompt": [{"role": "user"}]}', "a chat message is"),
        (b'{"prompt": []}', "prompt must be"),
    ],
)
def test_s087_a_damaged_line_is_named_by_its_number_in_the_file(tmp_path, line, reason):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "fine"}\r\n\r\n' + line + b"\r\n")
    with pytest.raises(InvalidSpec, match=rf"bad\.jsonl:3: {reason}"):
        open_source(spec("jsonl", path))


def nested_tables():
    """The same two rows as different writers lay them out in Arrow."""
    rows = [VERL, {**VERL, "extra_info": {"split": "test", "index": 8}}]
    inferred = pa.Table.from_pylist(rows)
    message = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
    large = pa.schema(
        [
            ("data_source", pa.dictionary(pa.int32(), pa.string())),
            ("prompt", pa.large_list(message)),
            ("ability", pa.large_string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64())])),
        ]
    )
    columns = {name: inferred[name].to_pylist() for name in large.names}
    arrays = [
        pa.array(columns[n], pa.string() if n == "data_source" else large.field(n).type)
        for n in large.names
    ]
    arrays[0] = arrays[0].dictionary_encode()
    index = inferred.append_column("__index_level_0__", pa.array([0, 1]))  # as pandas leaves it
    extra = pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
    wide = inferred.set_column(1, "prompt", pa.array([VERL["prompt"]] * 2, pa.list_(extra)))
    as_map = inferred.set_column(
        3,
        "reward_model",
        pa.array([list(VERL["reward_model"].items())] * 2, pa.map_(pa.string(), pa.string())),
    )
    return {
        "plain": inferred,
        "large_list": pa.Table.from_arrays(arrays, names=large.names),
        "pandas_index": index,
        "null_filled_struct": wide,
        "map": as_map,
    }


def test_s071_nested_values_are_plain_whichever_writer_made_the_file(tmp_path):
    seen = {}
    for name, table in nested_tables().items():
        pq.write_table(table, tmp_path / f"{name}.parquet")
        source = open_source(spec("parquet", tmp_path / f"{name}.parquet"))
        seen[name] = [source.row(i) for i in range(2)]
        assert type(seen[name][0].prompt) is list and type(seen[name][0].prompt[0]) is dict
        assert type(seen[name][0].item["reward_model"]) is dict
    assert seen["plain"][0].prompt == CHAT
    assert seen["plain"][1].item["extra_info"] == {"split": "test", "index": 8}
    for name, rows in seen.items():
        assert rows == seen["plain"], name


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_that_changes_under_a_job_is_not_read_on(tmp_path):
    file = written(tmp_path / "data.jsonl", {"prompt": "a", "n": 1}, {"prompt": "b", "n": 2})
    source = open_source(spec("jsonl", file))
    os.utime(file, (1, 1))  # touched only
    assert source.row(1).prompt == "b"
    copy = tmp_path / "copy"
    copy.write_bytes(file.read_bytes())
    copy.replace(file)  # another file, the same bytes
    assert [source.row(i).prompt for i in (0, 1)] == ["a", "b"]
    written(file, {"prompt": "a", "n": 1}, {"prompt": "c", "n": 2})  # as long as before
    os.utime(file, (2, 2))
    with pytest.raises(InvalidSpec, match=r"data\.jsonl has changed since it was opened"):
        source.row(1)
    file.unlink()
    with pytest.raises(InvalidSpec, match=r"data\.jsonl: No such file"):
        source.row(0)


def test_half_a_character_is_found_when_the_file_is_opened(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(
        '{"prompt": "\\ud83d\\ude00 fine \\u00e9"}\n{"prompt": "x", "y": ["\\ud800"]}\n'
    )
    with pytest.raises(InvalidSpec, match=r"data\.jsonl:2: half of a surrogate pair"):
        open_source(spec("jsonl", file))


def test_a_parquet_file_without_prompts_or_rows_is_refused(tmp_path):
    (tmp_path / "text.parquet").write_text("no parquet")
    pq.write_table(pa.table({"question": ["a"]}), tmp_path / "column.parquet")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    for name, reason in [
        ("text", "not a readable parquet"),
        ("column", r"no column prompt \(columns: question\)"),
        ("empty", "has no rows"),
    ]:
        with pytest.raises(InvalidSpec, match=reason):
            open_source(spec("parquet", tmp_path / f"{name}.parquet"))


def test_plain_values():
    when = datetime.datetime(2024, 5, 6, 7, 8)
    value = {1: (2, {3}), "when": when, "big": 2**70, "raw": b"a\xff", "none": None, "yes": True}
    assert plain(value) == {
        "1": [2, [3]],
        "when": "2024-05-06T07:08:00",
        "big": str(2**70),
        "raw": "a\\xff",
        "none": None,
        "yes": True,
    }
