"""Plans which rank writes which piece of which tensor into which file; agreed once, then cached.

A plan depends on names, sizes and placement alone. Each save compares this rank's own part with that of the last save,
and only when it has changed somewhere do the ranks plan anew, together.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from quern.errors import QuernError
from quern.train.checkpoint.format.files import FILE_BYTES, TensorFile, Written, deal_files
from quern.train.checkpoint.format.unpadded import UnpaddedSavePlanner
from quern.train.processes.agree import Agreement

__all__ = ["Plan", "Planner"]

Places = Mapping[MetadataIndex, _StorageInfo]


@dataclass(frozen=True)
class Plan:
    """The pieces and files that this rank writes."""

    files: tuple[TensorFile, ...]
    items: tuple[WriteItem, ...]
    """Of all files in turn."""

    def places(self, written: Mapping[str, Written]) -> dict[MetadataIndex, _StorageInfo]:
        """The position of every piece."""
        spots = [(file.name, *place) for file in self.files for place in written[file.name].places]
        return {item.index: _StorageInfo(*spot) for item, spot in zip(self.items, spots, strict=True)}


@dataclass
class Planner:
    """Plans the saves of one rank. Collective, with the ranks of ``agreement``."""

    agreement: Agreement
    file_bytes: int = FILE_BYTES
    _planner: UnpaddedSavePlanner | None = None
    _local: SavePlan | None = None
    _plan: Plan | None = None
    _metadata: Metadata | None = None
    """On rank 0, without places."""
    _places: list[Places] = field(default_factory=list)
    """On rank 0, of every rank."""
    _sent: Places | None = None
    """This rank's places as rank 0 knows them."""

    def plan(self, tensors: Mapping[str, torch.Tensor], rows: Mapping[str, int]) -> Plan:
        """The plan for these tensors, from which :meth:`fetch` then takes the pieces.

        Raises:
            QuernError: on every rank, when the pieces of the ranks do not make whole tensors.
        """
        planner = UnpaddedSavePlanner(rows)
        planner.set_up_planner(dict(tensors), is_coordinator=self.agreement.rank == 0)
        local = self.agreement.all_or_raise(planner.create_local_plan)
        self._planner = planner
        if self._plan is None or any(self.agreement.gather(local != self._local)):
            self._plan_anew(planner, local)
        assert self._plan is not None
        return self._plan

    def _plan_anew(self, planner: UnpaddedSavePlanner, local: SavePlan) -> None:
        self._plan = self._metadata = self._sent = None
        shares = self.agreement.gather_on_rank0(local)

        def whole() -> list[SavePlan]:
            try:
                plans, self._metadata = planner.create_global_plan(shares)
            except (ValueError, AssertionError) as error:
                raise QuernError(f"the ranks' pieces do not make whole tensors: {error}") from error
            self._places = [{} for _ in shares]
            return plans

        items = tuple(self.agreement.scatter(whole).items)
        files = deal_files(self.agreement.rank, map(_kind, items), self.file_bytes)
        self._plan, self._local = Plan(tuple(files), items), local

    def pieces(self) -> list[torch.Tensor]:
        """This rank's pieces of the tensors last given to :meth:`plan`, where they are."""
        assert self._plan is not None
        return [self.fetch(number) for number in range(len(self._plan.items))]

    def fetch(self, number: int) -> torch.Tensor:
        """Fetch one of the pieces."""
        assert self._planner is not None
        assert self._plan is not None
        found = self._planner.resolve_data(self._plan.items[number])
        assert isinstance(found, torch.Tensor)
        return found

    def report(self, written: Mapping[str, Written]) -> Places | None:
        """The positions of this rank's pieces, for :meth:`metadata` on rank 0; None: unchanged since the last save."""
        assert self._plan is not None
        places = self._plan.places(written)
        known, self._sent = places == self._sent, places
        return None if known else places

    def metadata(self, reports: Sequence[Places | None]) -> bytes | None:
        """DCP's ``.metadata`` of this save, from every rank's report, on rank 0; None: that of the last save."""
        assert self._metadata is not None
        if all(report is None for report in reports):
            return None
        self._places = [
            known if report is None else report for known, report in zip(self._places, reports, strict=True)
        ]
        self._metadata.storage_data = {index: place for share in self._places for index, place in share.items()}
        return pickle.dumps(self._metadata)


def _kind(item: WriteItem) -> tuple[str, Sequence[int]]:
    assert item.tensor_data is not None
    return str(item.tensor_data.properties.dtype).removeprefix("torch."), item.tensor_data.chunk.sizes
