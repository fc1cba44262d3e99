"""Records of an evaluation: what is written is read back, kills and damage included."""

import json
import os

import pytest

from headway.errors import InvalidSpec, StorageFailed
from headway.evaluation.records import (
    CompletionRecord,
    PromptRecord,
    RecordWriter,
    completion_record,
    read_records,
    samples_path,
)
from headway.messages import Completion, VersionSpan


def record(index=0, version=0, data_source="sums", **over):
    fields = {
        "prompt": [{"role": "user", "content": "4 + 3 ="}],
        "item": {"answer": "7"},
        "completions": (
            CompletionRecord("7", 1.0, 2, "stop", {"form": 0.5}),
            CompletionRecord("?", None, 12, "length", {}, "timeout", "took 10 s"),
        ),
    }
    return PromptRecord(data_source, index, version, **{**fields, **over})


def test_what_is_written_is_read_back(tmp_path):
    path = samples_path(tmp_path)
    assert path == tmp_path / "eval/samples.jsonl"
    written = [record(0), record(1, prompt="4 + 3 ="), record(1, version=5), record(2, skipped="x")]
    with RecordWriter(path) as writer:
        assert [writer.append(each) for each in written] == [True] * 4
    assert list(read_records(path)) == written
    assert list(read_records(path, version=5)) == [written[2]]
    assert list(read_records(tmp_path / "none.jsonl")) == []


def test_a_prompt_is_recorded_once_also_by_a_writer_that_goes_on(tmp_path):
    path = samples_path(tmp_path)
    with RecordWriter(path) as writer:
        writer.append(record(0))
        assert not writer.append(record(0, completions=()))
    with RecordWriter(path) as writer:
        assert (len(writer), (0, "sums", 0) in writer, (0, "sums", 1) in writer) == (1, True, False)
        assert not writer.append(record(0))
        assert writer.append(record(0, data_source="products"))
    assert [r.data_source for r in read_records(path)] == ["sums", "products"]


def test_a_file_cut_at_any_byte_loses_only_the_line_that_was_cut(tmp_path):
    path = tmp_path / "samples.jsonl"
    with RecordWriter(path) as writer:
        for index in range(3):
            writer.append(record(index, prompt="é " * index))
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in sorted({*range(0, len(whole), 17), *ends, *(end - 1 for end in ends)}):
        path.write_bytes(whole[:cut])
        kept = sum(end <= cut for end in ends)
        assert [r.index for r in read_records(path)] == list(range(kept))
        with RecordWriter(path) as writer:
            assert len(writer) == kept
            for index in range(3):
                writer.append(record(index, prompt="é " * index))
        assert path.read_bytes() == whole


def test_a_line_longer_than_the_search_for_its_end(tmp_path):
    path = tmp_path / "samples.jsonl"
    with RecordWriter(path) as writer:
        writer.append(record(0))
    good = path.read_bytes()
    path.write_bytes(good + b"x" * 200_000)
    RecordWriter(path).close()
    assert path.read_bytes() == good
    path.write_bytes(b"x" * 200_000)
    RecordWriter(path).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "null",
        "[" * 100_000,
        '{"data_source": "a"}',
        '{"data_source": "a", "index": -1, "version": 0, "item": {}, "completions": []}',
        '{"data_source": "a", "index": 1, "version": 0, "item": [], "completions": []}',
        '{"data_source": "a", "index": 1, "version": 0, "item": {}, "completions": [{"text": 1}]}',
        '{"data_source": "a", "index": 1, "version": 0, "item": {}, "completions": [{"text": "",'
        ' "reward": "1", "num_tokens": 1, "finish_reason": "stop"}]}',
        "\ufffd\x00",
    ],
)
def test_a_damaged_line_is_named_by_file_and_line(tmp_path, line):
    path = tmp_path / "samples.jsonl"
    with RecordWriter(path) as writer:
        writer.append(record(0))
    path.write_bytes(path.read_bytes() + line.encode() + b"\n")
    with pytest.raises(InvalidSpec, match=r"samples\.jsonl:2: "):
        list(read_records(path))
    with pytest.raises(InvalidSpec, match=r"samples\.jsonl:2: "):
        RecordWriter(path)


def test_what_no_json_can_say_becomes_null_and_half_characters_survive(tmp_path):
    path = tmp_path / "samples.jsonl"
    odd = CompletionRecord("\ud800\u2028\n", float("nan"), 1, "stop", {"a": float("inf"), "b": 1.0})
    with RecordWriter(path) as writer:
        writer.append(record(0, completions=(odd,), item={"x": float("nan")}))
    (back,) = read_records(path)
    assert back.completions == (CompletionRecord("\ud800\u2028\n", None, 1, "stop", {"b": 1.0}),)
    assert back.item == {"x": None}


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "samples.jsonl"
    with RecordWriter(path) as writer:
        writer.append(record(0))
        before = path.read_bytes()
        write = os.write
        calls = []

        def fill(handle, data):
            calls.append(1)
            if len(calls) == 1:
                return write(handle, data[:10])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", fill)
        with pytest.raises(StorageFailed, match="No space left"):
            writer.append(record(1))
        monkeypatch.undo()
        assert path.read_bytes() == before
        assert writer.append(record(1))
    assert [r.index for r in read_records(path)] == [0, 1]


def test_the_hash_is_of_prompt_and_item_and_nothing_else(tmp_path):
    one = record(0)
    assert one.content_hash == record(7, version=3, completions=(), data_source="b").content_hash
    assert one.content_hash != record(0, prompt="4 + 3 = ").content_hash
    assert one.content_hash != record(0, item={"answer": 7}).content_hash
    tuples = record(0, item={"a": (1, 2.0), "b": float("nan")})
    with RecordWriter(tmp_path / "s.jsonl") as writer:
        writer.append(tuples)
    (back,) = read_records(tmp_path / "s.jsonl")
    assert back.content_hash == tuples.content_hash


def test_a_completion_leaves_its_tokens_behind():
    completion = Completion(
        (5, 6), (-0.1, -0.2), "length", (VersionSpan(3, 0, 2),), "hi", 0.5, {"a": 0.25}, "", ""
    )
    kept = completion_record(completion)
    assert kept == CompletionRecord("hi", 0.5, 2, "length", {"a": 0.25})
    assert json.dumps(kept.parts) == '{"a": 0.25}'
