"""Break the layout on purpose, in a scheduler: ``SGLANG_DCP_BLOCK_SABOTAGE=<name>`` (see cpu_testbed.register).

Negative controls: a test that can't see these faults proves nothing about their absence. Each fault leaves most tokens
right, which is why tokens alone are no oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _mirror_ranks() -> None:
    """Every rank takes another rank's place, in writes and reads alike: consistent, and wrong."""
    from sglang_dcp_block import dcp_hooks, runtime
    from sglang_dcp_block.attention import flashinfer_mla, triton_gqa, triton_mla

    right = runtime.active_rank

    def active_rank() -> int:
        return runtime.active_layout().dcp_size - 1 - right()

    for module in (runtime, dcp_hooks, flashinfer_mla, triton_gqa, triton_mla):
        setattr(module, "active_rank", active_rank)  # noqa: B010


def _swap_rows() -> None:
    """Neighbouring rows of a block change places when they are written."""
    _wrap_write(lambda loc: loc ^ 1)


def _drop_last_row() -> None:
    """The last token of each write is dropped: slot 0 is SGLang's slot to skip."""

    def change(loc: Any) -> Any:
        loc = loc.clone()
        loc[-1:] = 0
        return loc

    _wrap_write(change)


#: One row in 64, wherever the block: at this one the accuracy gate has needles (test/engine/test_accuracy.py).
LOST_ROW = 7


def _lose_rows() -> None:
    """One row in 64 is never written."""
    _wrap_write(lambda loc: loc.masked_fill(loc & 63 == LOST_ROW, 0))


def _wrap_write(change: Callable[[Any], Any]) -> None:
    from sglang_dcp_block import dcp_hooks
    from sglang_dcp_block.attention import triton_gqa

    def changed(write: Callable[..., None]) -> Callable[..., None]:
        return lambda buffer, loc, *args, **kwargs: write(buffer, change(loc), *args, **kwargs)

    dcp_hooks.write_mla_kv = changed(dcp_hooks.write_mla_kv)
    triton_gqa.write_rows = changed(triton_gqa.write_rows)


def _half_scale() -> None:
    """FP8 rows are written at half their values, as if for a reader that doubles them."""
    import torch

    from sglang_dcp_block import dcp_hooks

    write = dcp_hooks.write_mla_kv

    def halved(fp8_bytes: torch.Tensor) -> torch.Tensor:
        return (fp8_bytes.view(torch.float8_e4m3fn).float() / 2).to(torch.float8_e4m3fn).view(torch.uint8)

    def changed(kv_buffer: Any, loc: Any, k_nope: Any, k_rope: Any, *args: Any, **kwargs: Any) -> None:
        write(kv_buffer, loc, halved(k_nope), halved(k_rope), *args, **kwargs)

    dcp_hooks.write_mla_kv = changed


def _unguarded_merge() -> None:
    """An empty shard's output goes into the merge as the kernel left it."""
    from sglang_dcp_block.attention import flashinfer_mla, triton_mla

    for module in (flashinfer_mla, triton_mla):
        setattr(module, "guard_empty_shards", lambda *_: None)  # noqa: B010


def _blind_store() -> None:
    """Pages of a HiCache store go by the name of one block size, whatever the server's own is."""
    from sglang_dcp_block.mem_cache import storage_key

    name = storage_key.storage_name
    storage_key.storage_name = lambda model, _block, *rest: name(model, 16, *rest)


def _pages_astray() -> None:
    """The pages that one load brings back from host memory change places. On the CPU test bed."""
    from sglang_dcp_block.testing import host_copies

    host_copies.send_astray()


def _unrotated_writes() -> None:
    """New rows go to the rank that owns them without rotation; reads are rotated."""
    from sglang_dcp_block.mem_cache import kv_write

    kv_write.rotation_constants = lambda layout: {}


def _float16_partials() -> None:
    """Partial results go to the merge in float16, as they do from bfloat16 activations, which the interpreter lacks."""
    import torch

    from sglang_dcp_block.attention import flashinfer_float16, triton_mla

    dtype_of = triton_mla.partial_dtype

    def partial_dtype(model_dtype: torch.dtype) -> torch.dtype:
        dtype_of(model_dtype)  # the merge must know the model's
        return torch.float16

    triton_mla.partial_dtype = partial_dtype
    flashinfer_float16.gains = lambda model_dtype: True


FAULTS: dict[str, Callable[[], None]] = {
    "mirrored-ranks": _mirror_ranks,
    "swapped-rows": _swap_rows,
    "dropped-row": _drop_last_row,
    "lost-rows": _lose_rows,
    "half-scale": _half_scale,
    "unguarded-merge": _unguarded_merge,
    "blind-store": _blind_store,
    "pages-astray": _pages_astray,
    "unrotated-writes": _unrotated_writes,
    "float16-partials": _float16_partials,
}
