"""Formulas and advice, against brute force and against figures published by others."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dcp_block import advise
from sglang_dcp_block.advise import UserError
from sglang_dcp_block.dcp.layout import DcpLayout

# The public config.json of three models, cut to the keys that are read.
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
V2_LITE = MLA | {
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}
V2 = V2_LITE | {
    "hidden_size": 5120,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
}
V3 = V2 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8"},
}

layouts = st.builds(DcpLayout, st.integers(2, 9), st.integers(1, 40))


def write_config(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def v3(tmp_path):
    return advise.load_model(write_config(tmp_path / "v3", V3))


# -- formulas


@pytest.mark.parametrize(
    ("config", "billions"), [(V2_LITE, 15.7), (V2, 235.7), (V3, 671.0)], ids=["V2-Lite", "V2", "V3"]
)
def test_parameters_match_the_published_sizes(config, billions):
    assert advise.parameters(config) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_weight_bytes_follow_the_stored_type(tmp_path, v3):
    assert v3.weight_bytes == advise.parameters(V3)
    lite = advise.load_model(write_config(tmp_path / "lite", V2_LITE))
    assert lite.weight_bytes == 2 * advise.parameters(V2_LITE)
    (tmp_path / "lite" / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 31415926}}')
    assert advise.load_model(tmp_path / "lite").weight_bytes == 31_415_926


def test_row_bytes_are_those_of_sglangs_mla_pool(v3):
    # 1,152 bytes a row and 73,728 a block of 64: what a bf16 MLA pool of kv_lora 512 + rope 64 registers for transfer.
    assert advise.row_bytes(v3, "bf16") == 1152
    assert advise.segment_bytes(DcpLayout(8, 64), 1152) == 73_728
    assert advise.token_bytes(v3, "fp8") == 61 * 576


@given(layouts, st.integers(1, 400))
def test_shards_and_segments_by_counting_tokens(layout, tokens):
    owners = [(t // layout.block_size) % layout.dcp_size for t in range(tokens)]
    counts = [owners.count(rank) for rank in range(layout.dcp_size)]
    assert advise.shard_lengths(layout, tokens) == counts
    assert advise.tail_skew(layout, tokens) == pytest.approx(max(counts) / (tokens / layout.dcp_size) - 1)
    starts = [t for t in range(tokens) if t == 0 or owners[t] != owners[t - 1]]
    for rank in range(layout.dcp_size):
        assert advise.segments_per_layer(layout, tokens, rank) == sum(owners[t] == rank for t in starts)


@given(layouts, st.integers(1, 200))
def test_worst_skew_is_the_worst_of_one_cycle(layout, tokens):
    lengths = range(tokens, tokens + layout.cycle)
    brute = max(advise.tail_skew(layout, n) for n in lengths)
    assert advise.worst_tail_skew(layout, tokens) == pytest.approx(brute)
    # Control: block 1 of the same ranks is bounded far lower, so the check can tell layouts apart.
    if layout.block_size > 8 and tokens < layout.block_size:
        assert advise.worst_tail_skew(DcpLayout(layout.dcp_size, 1), 10 * layout.cycle) < brute


@given(layouts, st.sampled_from([1, 4, 16, 64]), st.integers(1, 5000), st.integers(10**4, 10**7))
def test_capacity_by_placing_virtual_pages(layout, page_size, tokens, kv_bytes):
    per_token = 97
    rows_per_page = math.lcm(page_size, layout.block_size)
    free, pages = kv_bytes // per_token, 0
    while free >= rows_per_page:
        free, pages = free - rows_per_page, pages + 1
    slots = rows_per_page * layout.dcp_size
    assert advise.capacity_tokens(layout, page_size, kv_bytes, per_token) == pages * slots
    taken = advise.allocated_tokens(layout, page_size, tokens)
    assert taken % slots == 0 and taken - slots < tokens <= taken
    assert advise.prefix_hit_tokens(slots, tokens) == max(n for n in range(0, tokens + 1, slots))


def test_segment_counts_of_a_32k_request():
    # 61 layers, 8 ranks: 3,904 blocks a rank against 249,856 rows.
    assert 61 * advise.segments_per_layer(DcpLayout(8, 64), 32_768, 0) == 3_904
    assert 61 * advise.segments_per_layer(DcpLayout(8, 1), 32_768, 0) == 249_856


@pytest.mark.parametrize(
    ("fits", "in_flight", "chosen"),
    [
        ({1: True, 2: True, 4: True}, 1_000, 1),
        ({1: False, 2: True, 4: True}, 1_000, 2),
        ({1: False, 2: False, 4: False}, 1_000, 4),
        ({1: True, 2: True, 4: True}, advise.DCP_PAYS_FROM_TOKENS, 4),
    ],
)
def test_choice_of_ranks(fits, in_flight, chosen):
    assert advise.choose_dcp_size(fits, in_flight) == chosen


@pytest.mark.parametrize(
    ("row", "context", "block"),
    [
        (1152, 131_072, 64),
        (576, 131_072, 128),
        (2304, 131_072, 32),
        (1152, 4_096, 64),
        (1152, 2_048, 32),
        (1152, 64, 16),
    ],
)
def test_choice_of_block(row, context, block):
    assert advise.choose_block_size(8, row, context) == block


@pytest.mark.parametrize(
    ("text", "size"), [("141GB", 141 * 10**9), ("2 GiB", 2**31), ("1.5MiB", 3 * 2**19), ("42", 42), ("7kb", 7000)]
)
def test_sizes(text, size):
    assert advise.parse_size(text) == size


def test_tokens():
    assert [advise.parse_tokens(t) for t in ("128K", "1M", "77")] == [131_072, 1_048_576, 77]


# -- advice


def advice(shape, **changes):
    asked = {"tp_size": 8, "gpu_memory": 141 * 10**9, "context": 131_072, "concurrency": 32}
    return advise.advise(shape, **(asked | changes))


def test_advice_for_many_long_requests(v3):
    best = advice(v3)["recommendation"]
    assert best == {
        "dcp_size": 8,
        "block_size": 64,
        "page_size": 64,
        "fits": True,
        "flags": "--tp-size 8 --dcp-size 8 --dcp-block-size 64 --page-size 64",
    }


def test_advice_leaves_dcp_off_where_it_does_not_pay(v3):
    result = advice(v3, context=4_096, concurrency=8)
    assert result["recommendation"]["flags"] == "--tp-size 8 --page-size 64"
    assert result["block_sizes"] == []
    assert any("Leave DCP off" in reason for reason in result["reasons"])


def test_advice_says_when_the_load_does_not_fit(v3):
    result = advice(v3, concurrency=200)
    assert not result["recommendation"]["fits"]
    assert any("requests at once, not 200" in reason for reason in result["reasons"])


def test_advice_is_accepted_by_the_layout_rule(v3):
    for tp in (1, 2, 4, 8):
        for context in (1_000, 32_768, 131_072):
            best = advice(v3, tp_size=tp, gpu_memory=800 * 10**9, context=context)["recommendation"]
            assert tp % best["dcp_size"] == 0 and v3.heads % best["dcp_size"] == 0
            assert best["page_size"] % best["block_size"] == 0


def test_advice_says_what_the_server_refuses_today(tmp_path, v3):
    assert not any(reason.startswith("Not yet") for reason in advice(v3)["reasons"])
    other = advise.load_model(write_config(tmp_path / "other", V3 | {"architectures": ["OtherForCausalLM"]}))
    assert any("refuses OtherForCausalLM" in reason for reason in advice(other)["reasons"])
    assert any("refuses fp8_e5m2 KV" in reason for reason in advice(v3, dtype="fp8_e5m2")["reasons"])
    for dtype in ("fp8", "fp8_e4m3"):
        assert not any(reason.startswith("Not yet") for reason in advice(v3, dtype=dtype)["reasons"])
    assert not any(reason.startswith("Not yet") for reason in advice(other, context=1024, concurrency=1)["reasons"])


# -- bad input: one sentence that says what to change


def one_sentence(error):
    text = str(error.value)
    assert text.endswith(".") and ". " not in text and "\n" not in text
    return text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp_size": 0}, "--tp must be at least 1"),
        ({"concurrency": -1}, "--concurrency must be at least 1"),
        ({"context": 10**7}, "longer than the model's 163840"),
        ({"gpu_memory": 10**9}, "leave no room for KV"),
        ({"mem_fraction": 1.5}, "--mem-fraction must be"),
        ({"dtype": "int3"}, "unknown KV dtype 'int3'"),
    ],
)
def test_bad_requests(v3, changes, words):
    with pytest.raises(UserError) as error:
        advice(v3, **changes)
    assert words in one_sentence(error)


@pytest.mark.parametrize("text", ["", "GB", "-3GB", "0", "3 parsecs", "nan"])
def test_bad_sizes(text):
    with pytest.raises(UserError) as error:
        advise.parse_size(text)
    one_sentence(error)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "can't read"),
        ("{", "is not JSON"),
        ('{"num_hidden_layers": 4}', "has no kv_lora_rank"),
        (json.dumps(V3 | {"index_topk": 2048}), "sparse attention"),
    ],
)
def test_bad_configs(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError) as error:
        advise.load_model(tmp_path)
    assert words in one_sentence(error)
