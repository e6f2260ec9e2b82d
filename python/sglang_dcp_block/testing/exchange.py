"""A DCP group whose ranks run one after another in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


class _NotSentYet(Exception):
    pass


class Exchange:
    """A GroupCoordinator of ranks that run one after another, as far as SGLang's attention uses one; a CUDA graph may
    hold all of them.

    A rank that needs what another has yet to send is left there and later run again from its beginning. So a rank's
    work must give the same when it is repeated.
    """

    def __init__(self, size: int) -> None:
        self.world_size, self.rank_in_group = size, 0
        self._sent: dict[tuple[int, int], torch.Tensor] = {}
        self._calls = 0

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """[work(rank) for every rank]."""
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            before = len(self._sent), len(results)
            for rank in [r for r in range(self.world_size) if r not in results]:
                self.rank_in_group, self._calls = rank, 0
                with suppress(_NotSentYet):
                    results[rank] = work(rank)
            assert (len(self._sent), len(results)) != before, "the ranks don't make the same collective calls"
        return [results[rank] for rank in range(self.world_size)]

    def sent(self, call: int) -> list[torch.Tensor]:
        """What each rank gave to the collective call of this number."""
        return [self._sent[call, rank] for rank in range(self.world_size)]

    @property
    def calls(self) -> int:
        return len({call for call, _ in self._sent})

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        call = self._calls
        self._calls += 1
        self._sent.setdefault((call, self.rank_in_group), x.clone())
        if any((call, rank) not in self._sent for rank in range(self.world_size)):
            raise _NotSentYet
        return self.sent(call)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim)

    def all_gather_into_tensor(self, output: torch.Tensor, x: torch.Tensor) -> None:
        output.copy_(torch.cat(self._exchange(x)))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def reduce_scatter_along_dim(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self.all_reduce(x).chunk(self.world_size, dim)[self.rank_in_group]

    def all_to_all_single(self, output: torch.Tensor, x: torch.Tensor) -> None:
        parts = self._exchange(x)
        output.copy_(torch.cat([part.view(self.world_size, -1)[self.rank_in_group] for part in parts]))
