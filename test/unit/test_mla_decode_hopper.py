"""The Hopper kernel runs on Hopper only (test/gpu), but its machine code can be made and judged anywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest


def machine_code(pages: bool) -> dict[str, int]:
    """Compile for sm_90 as a bfloat16 launch would; counts from the PTX and from ptxas's report."""
    import tempfile

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from sglang_dcp_block.attention import mla_decode_hopper as module

    kernel = module._attend_kernel
    layout = gl.NVMMASharedLayout(128, 16, 2)
    types = {
        "latent_desc": f"tensordesc<bf16[64,512],{layout!r}>",
        "key_desc": f"tensordesc<bf16[64,64],{layout!r}>",
        "kv_indices": "*i64",
        "scale_log2e": "fp32",
        **dict.fromkeys(("kv", "q_nope", "q_rope", "out"), "*bf16"),
        **dict.fromkeys(("work", "count"), "*i32"),
        **dict.fromkeys(("partial_out", "partial_lse", "lse"), "*fp32"),
    }
    constants = {"DIM": 512, "ROPE": 64, "HEADS": module.HEADS, "ROWS": module.ROWS, "PAGES": pages}
    names = kernel.arg_names
    aligned = [[["tt.divisibility", 16]] if types.get(name, "i32")[0] in "*i" else [] for name in names]
    source = GluonASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs=constants,
        attrs={(i,): aligned[i] for i, name in enumerate(names) if name not in constants},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas = triton.knobs.nvidia.ptxas.path
        said = subprocess.run(
            [ptxas, "-arch=sm_90a", "-v", file.name, "-o", os.devnull], capture_output=True, text=True, check=True
        ).stderr
    return {
        "products": len(re.findall(r"wgmma\.mma_async", ptx)),
        "tile copies": len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
        "row copies": len(re.findall(r"cp\.async\.cg", ptx)),
        "serialized": said.count("serialized"),
        "spilled bytes": int(re.search(r"(\d+) bytes spill loads", said).group(1)),
        "shared": compiled.metadata.shared,
    }


@pytest.mark.parametrize("pages", [True, False], ids=["whole pages", "rows"])
def test_machine_code_keeps_the_tensor_cores_busy(pages: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, str(int(pages))], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # For each tile 36 of 16 columns of the queries, and for each half of the output 4 of 16 rows of the weights. The
    # left half's role has them in its loop and once outside, the right half's in its loop only.
    assert found["products"] == 2 * (36 + 4) + 4
    assert (found["tile copies"] > 0, found["row copies"] > 0) == (pages, not pages)
    # ptxas gives up overlap when anything touches an accumulator in flight, and only a message says so.
    assert found["serialized"] == 0
    assert found["spilled bytes"] < 512 and found["shared"] <= 232448


if __name__ == "__main__":
    print(json.dumps(machine_code(bool(int(sys.argv[1])))))
