"""Hugging Face data sets on disk: every layout gives the rows that were written."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headway.data.files import Arrow, JsonLines, Parquet
from headway.data.folder import Folder
from headway.data.layout import pick, read_layout
from headway.errors import InvalidSpec

ROWS = [{"prompt": [{"role": "user", "content": f"{i} + 1?"}], "answer": i + 1} for i in range(6)]


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def saved(folder, *shards):
    """What Dataset.save_to_disk leaves."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(folder / name, table.schema) as sink:
            sink.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def rows_of(folder, name=None, split=None):
    source = Folder(folder, pick(folder, name, split))
    return [{"prompt": row.prompt, **row.item} for row in map(source.row, range(len(source)))]


def test_a_data_set_that_was_saved_to_disk(tmp_path):
    saved(tmp_path / "one", ROWS[:4], ROWS[4:])
    assert rows_of(tmp_path / "one") == ROWS
    both = tmp_path / "both"
    saved(both / "train", ROWS[:4])
    saved(both / "test", ROWS[4:])
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert rows_of(both, split="test") == ROWS[4:]
    source = Folder(both, pick(both, None, "test"))
    about = source.describe()
    assert (about["source"], about["rows"], len(about["files"])) == ("huggingface", 2, 1)


def test_shards_that_tell_their_split_by_name(tmp_path):
    parquet(tmp_path / "data/train-00000-of-00002.parquet", ROWS[:2])
    parquet(tmp_path / "data/train-00001-of-00002.parquet", ROWS[2:4])
    parquet(tmp_path / "data/test_hard-00000-of-00001.parquet", ROWS[4:])
    assert rows_of(tmp_path, split="train") == ROWS[:4]
    assert rows_of(tmp_path, split="test_hard") == ROWS[4:]


def test_configurations_are_folders(tmp_path):
    parquet(tmp_path / "main/test-00000-of-00001.parquet", ROWS[:1])
    parquet(tmp_path / "socratic/test-00000-of-00001.parquet", ROWS[1:2])
    jsonl(tmp_path / "socratic/train.jsonl", ROWS[2:])
    assert rows_of(tmp_path, "main") == ROWS[:1]
    assert rows_of(tmp_path, "socratic", "train") == ROWS[2:]
    with pytest.raises(InvalidSpec, match=r"set data\.config\.name to one of main, socratic"):
        pick(tmp_path, None, "test")
    with pytest.raises(InvalidSpec, match=r"no configuration 'socratik' \(did you mean socratic"):
        pick(tmp_path, "socratik", "test")


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("rows.jsonl", "train"),
        ("my-test.jsonl", "test"),
        ("gsm8k-validation.jsonl", "validation"),
        ("dev.json", "validation"),
        ("latest.jsonl", "train"),  # no word of its own
        ("test/0000.jsonl", "test"),
        ("data/eval/part.jsonl", "test"),
        ("default/train/0000.jsonl", "train"),
    ],
)
def test_names_of_splits(tmp_path, file, split):
    jsonl(tmp_path / file, ROWS)
    assert [list(splits) for splits in read_layout(tmp_path).values()] == [[split]]
    assert rows_of(tmp_path) == ROWS


def test_a_readme_that_lists_the_files_is_believed(tmp_path):
    jsonl(tmp_path / "a/x.jsonl", ROWS[:2])
    jsonl(tmp_path / "a/y.jsonl", ROWS[2:4])
    jsonl(tmp_path / "b.jsonl", ROWS[4:])
    (tmp_path / "README.md").write_text(
        "---\nlicense: mit\nconfigs:\n- config_name: easy\n  data_files:\n"
        "  - {split: test, path: a/*.jsonl}\n- config_name: hard\n  data_files: b.jsonl\n---\n#\n"
    )
    assert rows_of(tmp_path, "easy", "test") == ROWS[:4]
    assert rows_of(tmp_path, "hard") == ROWS[4:]


@pytest.mark.parametrize("head", ["no head", "---\n", "---\n[\n---\n", "---\nconfigs: 3\n---\n"])
def test_a_readme_that_lists_nothing_leaves_it_to_the_names(tmp_path, head):
    jsonl(tmp_path / "test.jsonl", ROWS)
    (tmp_path / "README.md").write_text(head)
    assert rows_of(tmp_path, split="test") == ROWS


def test_nothing_leads_out_of_the_folder(tmp_path):
    jsonl(tmp_path / "secret.jsonl", ROWS)
    inside = tmp_path / "set"
    inside.mkdir()
    for pattern in ("../secret.jsonl", str(tmp_path / "secret.jsonl")):
        (inside / "README.md").write_text(f"---\nconfigs:\n- data_files: {pattern}\n---\n")
        with pytest.raises(InvalidSpec, match="leads out of the folder"):
            read_layout(inside)
    (inside / "README.md").unlink()
    for name in ("../secret.jsonl", "", ".", "..", None, "a\x00b"):
        (inside / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(InvalidSpec, match="is no name of a file"):
            read_layout(inside)
    (inside / "dataset_dict.json").write_text('{"splits": ["../.."]}')
    with pytest.raises(InvalidSpec, match="is no name of a file"):
        read_layout(inside)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no folder of a data set"),
        ({"notes.txt": "x"}, "no folder of a data set"),
        ({"state.json": "{"}, r"state\.json cannot be read"),
        ({"state.json": "[]"}, r"state\.json is no JSON object"),
        ({"state.json": '{"_data_files": []}'}, "lists no files"),
        ({"state.json": '{"_data_files": [{"filename": "a.arrow"}]}'}, "there is no such file"),
        ({"dataset_dict.json": '{"splits": {}}'}, "lists no splits"),
        ({"test.arrow": "no arrow"}, "not a readable Arrow file"),
        ({"test.jsonl": '{"prompt": "a"}\nrubbish\n'}, r"test\.jsonl:2: not JSON"),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidSpec, match=message):
        rows_of(tmp_path)


def test_a_selection_that_was_saved_apart_from_its_rows_is_refused(tmp_path):
    saved(tmp_path / "old", ROWS)
    state = json.loads((tmp_path / "old/state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "old/state.json").write_text(json.dumps(state))
    with pytest.raises(InvalidSpec, match="flatten_indices"):
        rows_of(tmp_path / "old")


def test_a_prompt_may_have_another_name(tmp_path):
    rows = [{"question": "1 + 1?", "answer": "2"}]
    jsonl(tmp_path / "a.jsonl", rows)
    parquet(tmp_path / "a.parquet", rows)
    for source in (
        JsonLines(tmp_path / "a.jsonl", "question"),
        Parquet(tmp_path / "a.parquet", "question"),
    ):
        assert (source.row(0).prompt, source.row(0).item) == ("1 + 1?", {"answer": "2"})
    with pytest.raises(InvalidSpec, match=r"no column problem \(columns: question, answer\)"):
        Parquet(tmp_path / "a.parquet", "problem")


def test_s071_a_chat_that_came_by_columns_is_a_chat(tmp_path):
    """`Sequence` of a mapping, which the datasets library stores as a mapping of sequences."""
    by_columns = {"prompt": {"role": ["system", "user"], "content": ["Be brief.", "1 + 1?"]}}
    parquet(tmp_path / "a.parquet", [by_columns])
    table = pa.Table.from_pylist([by_columns])
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as sink:  # the file format
        sink.write_table(table)
    for source in (Parquet(tmp_path / "a.parquet"), Arrow(tmp_path / "a.arrow")):
        assert source.row(0).prompt == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 1?"},
        ]
    jsonl(tmp_path / "uneven.jsonl", [{"prompt": {"role": ["user"], "content": ["a", "b"]}}])
    with pytest.raises(InvalidSpec, match="must be a string or a list"):
        JsonLines(tmp_path / "uneven.jsonl")
