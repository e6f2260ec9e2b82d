"""``python -m sglang_dcp_block.testing.run_case CASE.json RESULT.json``: one engine, all its rounds, in this process.

Called by :func:`sglang_dcp_block.testing.engine.run`, which sets the environment up.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from sglang_dcp_block.testing.cpu_testbed import AUDIT_VARIABLE
from sglang_dcp_block.testing.engine import Answer, case_from_json, write_whole
from sglang_dcp_block.testing.warm import Template, import_sglang, read_variables_again

SERVER_INFO = (
    "max_total_num_tokens",
    "dcp_size",
    "dcp_block_size",
    "dcp_comm_backend",
    "attention_backend",
    "page_size",
)


def main(case_file: str, result_file: str) -> None:
    case = case_from_json(Path(case_file).read_text())
    marks = [time.monotonic()]
    import_sglang()
    read_variables_again()
    Template().install()
    import sglang

    engine = sglang.Engine(**case.spec.engine_arguments())
    marks.append(time.monotonic())
    answers = []
    try:
        for number, one in enumerate(case.rounds):
            if one.flush:
                engine.flush_cache()
            replies = engine.generate(
                input_ids=one.prompts,
                sampling_params=one.sampling,
                return_logprob=True,
                logprob_start_len=-1,
            )
            answers.append([asdict(_answer(reply)) for reply in replies])
            marks.append(time.monotonic())
            print(f"ROUND {number} {one.name} done in {marks[-1] - marks[-2]:.1f} s", flush=True)
            if os.environ.get(AUDIT_VARIABLE):
                _audit(engine, f"{number:02d}", case.spec.extra.get("attn_dp_size", 1))
        info = engine.get_server_info()
        server = {key: info.get(key) for key in SERVER_INFO}
        server["max_total_num_tokens"] = engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
    finally:
        engine.shutdown()
    seconds = [after - before for before, after in pairwise(marks)]
    write_whole(Path(result_file), {"answers": answers, "seconds": seconds, "server": server})


def _audit(engine: Any, name: str, groups: int) -> None:
    """``engine.collective_rpc("dcp_block_audit", name=name)``, under DP attention as well.

    The leader of each attention group holds an end of the RPC socket, so messages go to them in turn. All ranks obey
    the one that reaches the first group, the others are lost, and every leader replies.
    """
    from sglang.srt.managers.io_struct import RpcReqInput, sock_recv, sock_send

    for _ in range(groups):
        sock_send(engine.send_to_rpc, RpcReqInput(method="dcp_block_audit", parameters={"name": name}))
    for _ in range(groups):
        reply = sock_recv(engine.send_to_rpc)
        assert reply.success, reply.message


def _answer(reply: dict[str, Any]) -> Answer:
    meta = reply["meta_info"]
    return Answer(
        tokens=list(reply["output_ids"]),
        logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
        cached=meta["cached_tokens"],
        retracted=meta.get("num_retractions", 0),
        sources=meta.get("cached_tokens_details") or {},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
