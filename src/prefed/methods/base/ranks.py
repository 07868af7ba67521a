"""Clients with LoRAs of different ranks, by zero-padding (HetLoRA, Cho et al. 2024, arXiv:2401.06432).

A client of rank r_i receives, trains and sends the first r_i rows of each A and columns of each B. The server
pads them with zeros, and merges as usual; rows and columns that no upload has keep their values. In the
client's model they are 0, and stay 0, since the gradient of each is a product with the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from prefed.core import (
    ClientTrainer,
    Download,
    Entry,
    Exchange,
    Layout,
    Merged,
    Method,
    Owner,
    Round,
    State,
    Tensors,
    Upload,
)
from prefed.merge.lora import first_rows

Groups = Mapping[str, Tensors]


def with_ranks(method: Method, ranks: Mapping[str, int], layout: Layout) -> Method:
    """Return ``method`` with lower ranks for some clients.

    Args:
        ranks: client → rank, at most that of the model.
    """

    def narrow(entry: Entry, client: str) -> Entry:
        if entry.factor is None or client not in ranks or entry.name not in layout:
            return entry
        first, second = entry.shape
        shape = (ranks[client], second) if entry.factor == "A" else (first, ranks[client])
        return replace(entry, shape=shape)

    def widen(entry: Entry) -> Entry:
        return layout[entry.name] if entry.factor is not None and entry.name in layout else entry

    def cut_layout(whole: Layout, client: str) -> Layout:
        return Layout(tuple(narrow(entry, client) for entry in whole.entries))

    def cut(groups: Groups, client: str) -> dict[str, Tensors]:
        """The first rows of A and columns of B."""
        return {group: first_rows(each, cut_layout(each.layout, client)) for group, each in groups.items()}

    def pad(groups: Groups) -> dict[str, Tensors]:
        """The inverse of :func:`cut`, with zeros."""
        result = {}
        for group, tensors in groups.items():
            whole = Layout(tuple(widen(entry) for entry in tensors.layout.entries))
            full = Tensors.zeros(whole, tensors.flat.dtype)
            for entry in tensors.layout.entries:
                full[entry.name][tuple(map(slice, entry.shape))] = tensors[entry.name]
            result[group] = full
        return result

    def low(exchange: Exchange) -> Exchange:
        def send(server: State, client: str, now: Round) -> Download:
            download = exchange.send(server, client, now)
            return replace(download, tensors=cut(download.tensors, client))

        def work(trainer: ClientTrainer, private: State, download: Download) -> tuple[Upload, State]:
            received = replace(download, tensors=pad(download.tensors))
            upload, after = exchange.work(trainer, private, received)
            return replace(upload, tensors=cut(upload.tensors, trainer.client)), after

        def merge(server: State, uploads: Sequence[Upload], now: Round) -> Merged:
            padded = [replace(upload, tensors=pad(upload.tensors)) for upload in uploads]
            return exchange.merge(server, padded, now)

        def groups(client: str, now: Round) -> dict[str, Layout]:
            sent = {"model": layout.select(method.ownership.names(Owner.SHARED))}
            whole = sent if exchange.groups is None else exchange.groups(client, now)
            return {group: cut_layout(each, client) for group, each in whole.items()}

        return replace(exchange, send=send, work=work, merge=merge, groups=groups)

    def init_client(initial: Tensors, client: str) -> State:
        state = method.init_client(initial, client)
        own = {name: group for name, group in state.tensors.items() if name == "personal"}
        return state.update(pad(cut(own, client)))

    def predict(trainer: ClientTrainer, private: State, published: Download) -> Tensors:
        received = replace(published, tensors=pad(cut(published.tensors, trainer.client)))
        return method.predict(trainer, private, received)

    return replace(
        method,
        exchanges=tuple(low(exchange) for exchange in method.exchanges),
        init_client=init_client,
        predict=predict,
        personal=True,
    )
