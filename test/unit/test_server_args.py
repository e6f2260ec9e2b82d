"""The flag, its way to other processes, and every refusal."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang_dcp_block import plugin, server_args
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.server_args import REFUSALS, DcpBlockError, Launch, block_size_of


@pytest.fixture(scope="module")
def prepare():
    """SGLang's own parsing with the plugin registered."""
    plugin.register()
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args


def test_flag_reaches_the_record_and_its_pickles(prepare):
    record = prepare(["--model-path", "none", "--dcp-size", "2", "--dcp-block-size", "64"])
    assert block_size_of(record) == 64
    assert block_size_of(pickle.loads(pickle.dumps(record))) == 64


def test_without_the_flag_the_record_is_untouched(prepare):
    record = prepare(["--model-path", "none"])
    assert block_size_of(record) == 1
    assert b"sglang_dcp_block" not in pickle.dumps(record)
    assert b"sglang_dcp_block" not in pickle.dumps(prepare(["--model-path", "none", "--dcp-block-size", "1"]))


def test_rotation_reaches_the_record_and_its_pickles(prepare, tmp_path):
    asked = ["--model-path", "none", "--dcp-size", "2", "--dcp-block-size", "64", "--page-size", "64"]
    path = tmp_path / "server.yaml"
    path.write_text("model-path: none\ndcp-size: 2\ndcp-block-size: 16\ndcp-rotate: true\n")
    build = server_args.EngineServerArgs(lambda **fields: SimpleNamespace(**fields))
    for record in (
        prepare([*asked, "--dcp-rotate"]),
        pickle.loads(pickle.dumps(prepare([*asked, "--dcp-rotate"]))),
        prepare(["--config", str(path)]),
        build(dcp_block_size=64, dcp_rotate=True),
    ):
        assert server_args.config_of(record).rotate is True
    for record in (prepare(asked), build(dcp_block_size=64), build()):
        assert server_args.config_of(record).rotate is False
    layout = server_args.layout_of(prepare([*asked, "--dcp-rotate"]))
    assert layout == DcpLayout(2, 64).rotated(64) != server_args.layout_of(prepare(asked))


def test_rotation_without_blocks_is_refused(prepare):
    build = server_args.EngineServerArgs(lambda **fields: SimpleNamespace(**fields))
    for ask in (lambda: prepare(["--model-path", "none", "--dcp-rotate"]), lambda: build(dcp_rotate=True)):
        with pytest.raises(DcpBlockError, match="add --dcp-block-size, or drop --dcp-rotate"):
            ask()
    with pytest.raises(DcpBlockError, match="--dcp-rotate must be true or false, got 'no'"):
        build(dcp_block_size=64, dcp_rotate="no")


def test_yaml_config(prepare, tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text("model-path: none\ndcp-size: 2\ndcp-block-size: 16\n")
    assert block_size_of(prepare(["--config", str(path)])) == 16


def test_help_names_the_flag(prepare, capsys):
    with pytest.raises(SystemExit):
        prepare(["--help"])
    assert "--dcp-block-size TOKENS" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["0", "-64", "64.5", "many", ""])
def test_values_that_are_no_block_size(prepare, capsys, text):
    with pytest.raises(SystemExit):
        prepare(["--model-path", "none", f"--dcp-block-size={text}"])
    assert f"--dcp-block-size must be a whole number of tokens >= 1, got '{text}'." in capsys.readouterr().err


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "x"])
def test_engine_values_that_are_no_block_size(value):
    build = server_args.EngineServerArgs(lambda **fields: SimpleNamespace(**fields))
    with pytest.raises(DcpBlockError, match="whole number of tokens >= 1"):
        build(model_path="none", dcp_block_size=value)


def test_engine_argument():
    build = server_args.EngineServerArgs(lambda **fields: SimpleNamespace(**fields))
    assert block_size_of(build(model_path="none", dcp_block_size=64)) == 64
    assert block_size_of(build(model_path="none")) == 1
    with pytest.raises(TypeError, match="unexpected"):
        server_args.EngineServerArgs(lambda *, model_path: None)(model_path="none", dcp_blok_size=64)


# -- refusals ----------------------------------------------------------------------------------------------------------

GOOD = dict(
    dcp_size=8,
    tp_size=8,
    pp_size=1,
    dp_size=1,
    attn_dp_size=1,
    page_size=64,
    attention_backend="triton",
    prefill_attention_backend=None,
    decode_attention_backend=None,
    dcp_comm_backend="a2a",
    kv_cache_dtype="auto",
    disaggregation_mode="null",
    disaggregation_transfer_backend="mooncake",
    enable_dp_attention=None,
    kv_canary="none",
    decoupled_spec_role="null",
)
HICACHE = dict(enable_hierarchical_cache=True, hicache_io_backend="kernel", hicache_mem_layout="page_first")
GQA = dict(arch="MHA", architectures=["LlamaForCausalLM"], kv_heads=1)
#: id of a refusal -> settings that ask for it, and what the message must name.
ASKED: dict[str, tuple[dict, str]] = {
    "block-without-dcp": (dict(dcp_size=1), "add --dcp-size, or drop --dcp-block-size"),
    "chunk-below-page": (dict(page_size=96, chunked_prefill_size=128), "--chunked-prefill-size 192 or more"),
    "dcp-not-dividing-tp": (dict(tp_size=4), "divisor of 4"),
    "dcp-not-dividing-heads": (dict(model=dict(num_attention_heads=20)), "divisor of 20"),
    "model-untested": (dict(model=dict(architectures=["KimiLinearForCausalLM"])), "KimiLinearForCausalLM"),
    "gqa-attention-backend": (dict(model=GQA, attention_backend="fa3"), "use --attention-backend triton"),
    "gqa-kv-heads": (dict(model=GQA | dict(kv_heads=2)), "--tp-size that is a multiple of 16"),
    "gqa-sliding-window": (dict(model=GQA | dict(window=4096)), "a window of 4096 tokens"),
    "gqa-fp8": (dict(model=GQA, kv_cache_dtype="fp8_e4m3"), "fp8_e4m3 and grouped-query attention: use auto"),
    "gqa-pd": (dict(model=GQA, disaggregation_mode="prefill"), "LlamaForCausalLM on a PD prefill server"),
    "gqa-dp-attention": (dict(model=GQA, attn_dp_size=2, tp_size=16), "use --attn-dp-size 1"),
    "gqa-hicache": (HICACHE | dict(model=GQA), "LlamaForCausalLM and --enable-hierarchical-cache"),
    "model-sparse": (dict(model=dict(index_topk=2048)), "index_topk"),
    "model-without-rope-part": (dict(model=dict(qk_rope_head_dim=0)), "qk_rope_head_dim 0"),
    "attention-backend": (dict(attention_backend="fa3"), "fa3"),
    "mixed-attention-backends": (dict(decode_attention_backend="flashinfer"), "flashinfer, triton"),
    "comm-backend": (dict(dcp_comm_backend="fi_a2a"), "fi_a2a"),
    "kv-cache-dtype": (dict(kv_cache_dtype="fp8_e5m2"), "fp8_e5m2: use auto, bfloat16 or fp8_e4m3"),
    "fp8-pairs": (
        dict(kv_cache_dtype="fp8_e4m3", attn_dp_size=2, dcp_size=4),
        "fp8_e4m3 and DP attention: use --kv-cache-dtype bfloat16",
    ),
    "dcp-beyond-dp-attention": (dict(attn_dp_size=2), "lower --dcp-size or --attn-dp-size"),
    "context-parallel": (dict(attn_cp_size=2), "use --attn-cp-size 1"),
    "data-parallel": (dict(dp_size=2), "--dp-size 2"),
    "pipeline-parallel": (dict(pp_size=2), "--pp-size 2"),
    "pd-transfer-backend": (dict(disaggregation_mode="decode", disaggregation_transfer_backend="mori"), "mori"),
    "nixl-missing": (dict(disaggregation_mode="decode", disaggregation_transfer_backend="nixl"), "pip install"),
    "nixl-plugin": (dict(disaggregation_mode="prefill", disaggregation_transfer_backend="nixl"), "LIBFABRIC"),
    "platform": ({}, "cpu"),
    "speculative-decoding": (dict(speculative_algorithm="EAGLE"), "--speculative-algorithm"),
    "decoupled-speculation": (dict(decoupled_spec_role="verifier"), "--decoupled-spec-role"),
    "disable-ragged": (dict(flashinfer_mla_disable_ragged=True), "--flashinfer-mla-disable-ragged"),
    "kv-canary": (dict(kv_canary="log"), "--kv-canary"),
    "radix-cache-backend": (dict(radix_cache_backend="other"), "--radix-cache-backend"),
    "elastic-ep": (dict(elastic_ep_backend="mooncake"), "--elastic-ep-backend"),
    "mixed-chunk": (dict(enable_mixed_chunk=True), "--enable-mixed-chunk"),
    "hicache-copies": (
        HICACHE | dict(hicache_io_backend="kernel_ascend"),
        "--hicache-io-backend kernel_ascend and --hicache-mem-layout page_first",
    ),
    "hicache-storage": (HICACHE | dict(hicache_storage_backend="nixl"), "nixl: use file"),
    "hicache-dp-attention": (
        HICACHE | dict(disaggregation_mode="decode", attn_dp_size=2, dcp_size=4, attention_backend="flashinfer"),
        "DP attention on a PD decode server",
    ),
    "lmcache": (dict(enable_lmcache=True), "--enable-lmcache"),
    "flexkv": (dict(enable_flexkv=True), "--enable-flexkv"),
    "external-linker": (dict(enable_unified_cache_external_linker=True), "--enable-unified-cache-external-linker"),
    "hisparse": (dict(enable_hisparse=True), "--enable-hisparse"),
    "unified-memory": (dict(enable_unified_memory=True), "--enable-unified-memory"),
    "page-major": (dict(enable_page_major_kv_layout=True), "--enable-page-major-kv-layout"),
    "streaming-session": (dict(enable_streaming_session=True), "--enable-streaming-session"),
    "session-radix-cache": (dict(enable_session_radix_cache=True), "--enable-session-radix-cache"),
    "kv-checksum": (dict(disaggregation_enable_kv_checksum=True), "--disaggregation-enable-kv-checksum"),
    "decode-offload": (
        dict(disaggregation_decode_enable_offload_kvcache=True),
        "--disaggregation-decode-enable-offload-kvcache",
    ),
    "pd-role-switch": (dict(enable_pd_role_switch=True), "--enable-pd-role-switch"),
    "pdmux": (dict(enable_pdmux=True), "--enable-pdmux"),
    "lora": (dict(enable_lora=True), "--enable-lora"),
    "two-batch-overlap": (dict(enable_two_batch_overlap=True), "--enable-two-batch-overlap"),
    "single-batch-overlap": (dict(enable_single_batch_overlap=True), "--enable-single-batch-overlap"),
    "torch-compile": (dict(enable_torch_compile=True), "--enable-torch-compile"),
    "symmetric-memory": (dict(enable_symm_mem=True), "--enable-symm-mem"),
    "replicate-q-proj": (dict(dcp_replicate_q_proj=True), "--dcp-replicate-q-proj"),
    "deterministic-inference": (dict(enable_deterministic_inference=True), "--enable-deterministic-inference"),
    "megakernel": (dict(enable_nvidia_megakernel=True), "--enable-nvidia-megakernel"),
    "ray": (dict(use_ray=True), "--use-ray"),
    "rotate-attention-backend": (dict(rotate=True, attention_backend="flashinfer"), "use --attention-backend triton"),
    "rotate-hicache": (HICACHE | dict(rotate=True), "drop --enable-hierarchical-cache, or drop --dcp-rotate"),
    "rotate-retraction": (
        dict(rotate=True, disaggregation_mode="decode"),
        "use --disaggregation-decode-retraction-backup none",
    ),
    "rotate-gqa": (dict(rotate=True, model=GQA), "use a model with multi-head latent attention"),
    "rotate-dp-attention": (dict(rotate=True, attn_dp_size=2, dcp_size=4), "use --attn-dp-size 1"),
}


class _Off(SimpleNamespace):
    """Settings that nobody gave are off."""

    def __getattr__(self, name: str):
        return None


def launch(block_size: int = 64, model: dict | None = None, rotate: bool = False, **changes) -> Launch:
    described = dict(arch="MLA", architectures=["DeepseekV3ForCausalLM"], num_attention_heads=128, qk_rope_head_dim=64)
    described |= dict(index_topk=None, kv_heads=128, window=None) | (model or {})
    return Launch(
        _Off(**(GOOD | changes)),
        SimpleNamespace(
            attention_arch=SimpleNamespace(name=described["arch"]),
            hf_config=SimpleNamespace(architectures=described["architectures"]),
            hf_text_config=SimpleNamespace(**{key: described[key] for key in ("qk_rope_head_dim", "index_topk")}),
            num_attention_heads=described["num_attention_heads"],
            get_total_num_kv_heads=lambda: described["kv_heads"],
            sliding_window_size=described["window"],
            attention_chunk_size=None,
        ),
        block_size,
        rotate,
    )


def test_pages_become_whole_blocks():
    def changed(block_size, **settings):
        return server_args.whole_blocks(launch(block_size, **settings))

    assert changed(64) == changed(16) == {}
    assert changed(1024, page_size=1) == {"page_size": 1024}
    assert changed(1024, page_size=1, chunked_prefill_size=8192) == {"page_size": 1024}
    assert changed(1024, page_size=1, chunked_prefill_size=-1) == {"page_size": 1024}
    assert changed(48, chunked_prefill_size=8192) == {"page_size": 192, "chunked_prefill_size": 8064}
    decode = dict(chunked_prefill_size=100, disaggregation_mode="decode")
    assert changed(48, **decode) == {"page_size": 192}
    # Nothing to do a second time; a chunk that fits no page of the user's own is SGLang's to refuse.
    assert changed(48, page_size=192, chunked_prefill_size=8064) == {}
    assert changed(64, chunked_prefill_size=100) == {}


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(server_args, "_platform", lambda: SimpleNamespace(is_cuda=lambda: True, device_name="cuda"))


def test_every_refusal_has_a_case():
    assert set(ASKED) == {r.id for r in REFUSALS}
    assert len({r.id for r in REFUSALS}) == len(REFUSALS)


def test_a_supported_launch_is_not_refused(on_cuda):
    assert server_args.refusals_for(launch()) == []
    assert server_args.refusals_for(launch(attention_backend="flashinfer", dcp_comm_backend="ag_rs")) == []
    assert server_args.refusals_for(launch(**HICACHE)) == []
    for storage in server_args.TESTED_STORAGE_BACKENDS:
        assert server_args.refusals_for(launch(**HICACHE, hicache_storage_backend=storage)) == []
    for backend in server_args.TESTED_BACKENDS:
        groups = dict(attention_backend=backend, attn_dp_size=2, dcp_size=4)
        assert server_args.refusals_for(launch(**groups)) == []
        assert server_args.refusals_for(launch(**groups, **HICACHE)) == []
        assert server_args.refusals_for(launch(**groups, **HICACHE, hicache_storage_backend="file")) == []
    for architecture in server_args.TESTED_GQA_ARCHITECTURES:
        for kv_heads, ranks in ((1, 8), (2, 4), (4, 2)):
            gqa = GQA | dict(architectures=[architecture], kv_heads=kv_heads)
            assert server_args.refusals_for(launch(model=gqa, dcp_size=ranks)) == []
    for transfer in server_args.TESTED_TRANSFER_BACKENDS:
        pd = dict(disaggregation_mode="decode", disaggregation_transfer_backend=transfer)
        assert server_args.refusals_for(launch(**pd)) == []
        assert server_args.refusals_for(launch(**pd, **HICACHE)) == []
        assert server_args.refusals_for(launch(**pd, **HICACHE, hicache_storage_backend="file")) == []
        pd["disaggregation_decode_retraction_backup"] = "none"
        assert server_args.refusals_for(launch(rotate=True, **pd)) == []
        assert server_args.refusals_for(launch(rotate=True, **pd | {"disaggregation_mode": "prefill"})) == []
    assert server_args.refusals_for(launch(rotate=True)) == []


@pytest.mark.parametrize(
    ("tp", "dcp", "kv_heads"),
    [(tp, dcp, kv) for tp in (2, 4, 6, 8, 12, 16) for dcp in (2, 3, 4, 8) for kv in (1, 2, 4)],
)
def test_the_ranks_of_a_group_hold_the_same_kv_head_or_are_refused(on_cuda, tp, dcp, kv_heads):
    """Head by head as SGLang deals them: consecutive ranks share one, DCP groups are consecutive ranks."""
    if tp % dcp:
        return
    holds = [rank // (tp // kv_heads) if tp >= kv_heads and tp % kv_heads == 0 else rank for rank in range(tp)]
    alike = all(len(set(holds[first : first + dcp])) == 1 for first in range(0, tp, dcp))
    messages = server_args.refusals_for(launch(model=GQA | dict(kv_heads=kv_heads), tp_size=tp, dcp_size=dcp))
    assert any("hold the same KV heads" in message for message in messages) == (not alike)


@pytest.mark.parametrize("arch", ["Qwen3MoeForCausalLM", "Qwen3_5ForConditionalGeneration", "MistralForCausalLM"])
def test_grouped_query_architectures_that_are_not_tested(on_cuda, arch):
    """Qwen3-MoE would write KV in its rotary kernel, at slots that know no DCP rank."""
    messages = server_args.refusals_for(launch(model=GQA | dict(architectures=[arch])))
    assert messages and f"is not tested with {arch}" in messages[0]


@pytest.mark.parametrize("id", ASKED)
def test_refusal(id, on_cuda, monkeypatch):
    if id == "platform":
        cpu = SimpleNamespace(is_cuda=lambda: False, device_name="cpu")
        monkeypatch.setattr(server_args, "_platform", lambda: cpu)
    elif id == "nixl-missing":
        monkeypatch.setattr(server_args.importlib.util, "find_spec", lambda name: None)
    elif id == "nixl-plugin":
        monkeypatch.setenv("SGLANG_DISAGGREGATION_NIXL_BACKEND", "LIBFABRIC")
    changes, named = ASKED[id]
    messages = server_args.refusals_for(launch(**changes))
    (refusal,) = [r for r in REFUSALS if r.id == id]
    if changes.get("rotate"):
        assert refusal.text(launch(**changes)) not in server_args.refusals_for(launch(**changes | {"rotate": False}))
    assert refusal.text(launch(**changes)) in messages
    message = messages[0] if id != "dcp-not-dividing-heads" else refusal.text(launch(**changes))
    assert named in message
    assert message.endswith((".", ").")) and ". " not in message, "one sentence"
    assert server_args.refusals_for(launch(block_size=1, **changes)) == [], "B = 1 is SGLang's own business"


def test_fp8_kv_with_a_host_cache_is_refused_on_pd_servers_only(on_cuda):
    asked = HICACHE | dict(kv_cache_dtype="fp8_e4m3", disaggregation_mode="prefill")
    assert any("fp8_e4m3 and HiCache on a PD server" in m for m in server_args.refusals_for(launch(**asked)))
    for tested in (asked | dict(disaggregation_mode="null"), asked | dict(kv_cache_dtype="auto")):
        assert server_args.refusals_for(launch(**tested)) == []


REAL = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import prepare_server_args
answers = []
for argv in json.load(sys.stdin):
    try:
        record = prepare_server_args(argv)
        record.resolve_once()
        cfg = resolving_view(record)
        record.resolve_once()  # a child process does so again
        answers.append(f"accepted: page {cfg.page_size}, chunk {cfg.chunked_prefill_size}")
    except (ValueError, AssertionError) as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


SPECULATIVE = "drop --speculative-algorithm"


def test_refusals_in_sglangs_own_resolution(tmp_path):
    """The same rows through the real ServerArgs of a launch, with the model's real config."""
    from sglang_dcp_block.testing.tiny_model import TinyGqa, TinyMla, cached

    base = ["--model-path", str(cached(TinyMla())), "--skip-tokenizer-init", "--device", "cpu", "--page-size", "64"]
    base += ["--attention-backend", "triton", "--tp-size", "4", "--dcp-size", "2", "--dcp-block-size", "64"]
    chunk = ["--chunked-prefill-size"]
    cases = {
        "accepted: page 64, chunk 2048": [*base, *chunk, "2048"],
        "accepted: page 64, chunk 1024": [*base, *chunk, "1024", "--page-size", "1"],
        "accepted: page 192, chunk 1920": [*base, *chunk, "2048", "--page-size", "48"],
        "accepted: page 192, chunk -1": [*base, *chunk, "-1", "--page-size", "48"],
        "accepted: page 1024, chunk 4096": [*base, *chunk, "5000", "--dcp-block-size", "1024", "--page-size", "16"],
        "accepted: page 1024, chunk 512": [
            *(*base, *chunk, "512", "--dcp-block-size", "1024"),
            *("--disaggregation-mode", "decode"),
        ],
        "add --dcp-size, or drop": [*base, "--dcp-size", "1"],
        "use --chunked-prefill-size 192 or more": [*base, "--page-size", "48", "--chunked-prefill-size", "96"],
        "divisor of 4": [*base, "--dcp-size", "3"],
        "use --attention-backend flashinfer": [*base, "--attention-backend", "torch_native"],
        "drop --enable-mixed-chunk": [*base, "--enable-mixed-chunk"],
        "use --chunked-prefill-size 384 or more": [
            *(*base, *chunk, "256", "--attn-dp-size", "2", "--page-size", "48"),
        ],
        "--attn-dp-size 2 cuts --tp-size 4": [*base, "--attn-dp-size", "2", "--dcp-size", "4"],
        "use --pp-size 1": [*base, "--pp-size", "2"],
        "use --attn-cp-size 1": [*base, "--attn-cp-size", "2"],
        "drop --decoupled-spec-role": [*base, "--decoupled-spec-role", "drafter"],
        # What SGLang chooses itself counts like a given one.
        "attention backend torch_native": [x for x in base if x not in ("--attention-backend", "triton")],
        "accepted: page 64, chunk 1920": [
            *(*base, *chunk, "1920", "--enable-hierarchical-cache", "--hicache-io-backend", "direct"),
            *("--hicache-storage-backend", "file"),
        ],
        "hf3fs: use file": [*base, "--enable-hierarchical-cache", "--hicache-storage-backend", "hf3fs"],
        "use --attention-backend triton, or drop --dcp-rotate": [
            *(*base, "--dcp-rotate", "--attention-backend", "flashinfer"),
        ],
        "use --disaggregation-decode-retraction-backup none": [
            *(*base, "--dcp-rotate", "--disaggregation-mode", "decode"),
        ],
        "accepted: page 192, chunk 1728": [*base, *chunk, "1800", "--page-size", "48", "--dcp-rotate"],
        "drop --enable-lora": [*base, "--enable-lora", "--lora-paths", "a=b"],
    }
    gqa = ["--model-path", str(cached(TinyGqa(kv_heads=2))), *base[2:]]
    grouped = {
        "accepted: page 64, chunk 2048": [*gqa, *chunk, "2048"],
        "needs a --tp-size that is a multiple of 8": [*gqa, "--dcp-size", "4"],
        "runs LlamaForCausalLM on the Triton backend only": [*gqa, "--attention-backend", "flashinfer"],
        "LlamaForCausalLM on a PD prefill server": [*gqa, "--disaggregation-mode", "prefill"],
        "LlamaForCausalLM on a PD decode server": [*gqa, "--disaggregation-mode", "decode"],
        "LlamaForCausalLM and DP attention": [*gqa, "--attn-dp-size", "2"],
    }
    algorithms = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO", "eagle")
    launches = [
        *cases.items(),
        *grouped.items(),
        *((SPECULATIVE, [*base, "--speculative-algorithm", name]) for name in algorithms),
    ]
    environment = os.environ | {"SGLANG_PLATFORM": "dcp_cpu_testbed", "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", REAL],
        input=json.dumps([argv for _, argv in launches]),
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    for (expected, argv), answer in zip(launches, json.loads(result.stdout.splitlines()[-1]), strict=True):
        assert expected in answer, (argv, answer)
