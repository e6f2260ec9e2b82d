"""Keys of a HiCache store: pages of one block layout must never be read under another."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang_dcp_block.runtime import active_layout
from sglang_dcp_block.server_args import TESTED_STORAGE_BACKENDS, DcpBlockError


def storage_name(model_name: str | None, block_size: int, memory_layout: str, dtype: Any) -> str:
    """The model name that a store's keys begin with, made to tell page formats apart.

    SGLang's keys hold the tokens of a virtual page, its size, the DCP size and the rank. With the same three, another
    block size puts other tokens into a rank's page. The order of rows and layers in the page and the dtype are not in
    SGLang's keys either; a page read with another has the same size and no meaning.
    """
    return f"{model_name or ''}-dcpblock{block_size}-{memory_layout}-{str(dtype).removeprefix('torch.')}"


def storage_config(original: Any, controller: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's description of a store, from which backends make their keys. B = 1 keeps SGLang's own keys.

    Raises:
        DcpBlockError: the backend is untested; one that is attached to a running server isn't seen at its start.
    """
    config = original(controller, *args, **kwargs)
    block_size = active_layout().block_size
    if block_size == 1:
        return config
    backend = controller.storage_backend_type
    if backend not in TESTED_STORAGE_BACKENDS:
        controller.storage_backend_type = None  # SGLang has set it, and doesn't take it back
        raise DcpBlockError(f"--dcp-block-size {block_size} is not tested with HiCache storage {backend}: attach file.")
    pool = controller.storage_host_pool
    return dataclasses.replace(config, model_name=storage_name(config.model_name, block_size, pool.layout, pool.dtype))
