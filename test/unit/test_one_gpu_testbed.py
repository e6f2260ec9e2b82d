"""The one-GPU bed's collectives, between two real processes over gloo, against what torch says about the whole data."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sglang_dcp_block.testing import one_gpu_testbed as bed

WORLD = 2


def data(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(24).reshape(4, 6).add(100 * rank).to(dtype)


def worker(rank: int, store: str, dtype: torch.dtype, answers: mp.Queue) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    group = SimpleNamespace(cpu_group=dist.group.WORLD, world_size=WORLD, rank_in_group=rank)
    mine = data(rank, dtype)
    reduced = mine.clone()
    bed.all_reduce(group, reduced)
    scattered = bed.reduce_scatter(group, torch.empty(2, 6, dtype=dtype), mine)
    gathered = torch.empty(8, 6, dtype=dtype)
    bed.all_gather_into(group, gathered, mine)
    exchanged = torch.empty_like(mine)
    bed.all_to_all(group, exchanged, mine)
    told = bed.broadcast(group, mine.clone(), src=1)
    answers.put((rank, [x.float().tolist() for x in (reduced, scattered, gathered, exchanged, told)]))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_collectives_through_the_host(dtype: torch.dtype, tmp_path) -> None:
    context = mp.get_context("spawn")
    answers = context.Queue()
    workers = [context.Process(target=worker, args=(r, str(tmp_path / "store"), dtype, answers)) for r in range(WORLD)]
    for process in workers:
        process.start()
    found = dict(answers.get(timeout=120) for _ in workers)
    for process in workers:
        process.join(30)
    a, b = data(0, dtype), data(1, dtype)
    total = (a.float() + b.float()).to(dtype)
    for rank in range(WORLD):
        half = slice(2 * rank, 2 * rank + 2)
        want = [total, total[half], torch.cat([a, b]), torch.cat([a[half], b[half]]), b]
        assert found[rank] == [x.float().tolist() for x in want]


def test_every_shim_names_something_that_exists() -> None:
    import importlib

    for shim in bed.SHIMS:
        owner = importlib.import_module(shim.module)
        for part in shim.attribute.split("."):
            assert hasattr(owner, part), f"{shim.module} has no {shim.attribute}"
            owner = getattr(owner, part)


def test_nothing_happens_without_the_variable(monkeypatch) -> None:
    monkeypatch.delenv(bed.VARIABLE, raising=False)
    monkeypatch.setattr(bed, "install", lambda: pytest.fail("installed without being asked"))
    bed.register()
