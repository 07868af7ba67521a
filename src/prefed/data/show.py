"""What is trained on: the token ids of a client's first pairs, as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from prefed.core.strict_settings import StrictModel
from prefed.data.build import make_encoder
from prefed.data.config import DataConfig, SelectorConfig
from prefed.data.dataset import FederatedDataset
from prefed.data.encoding import NOTES, Encoded, Template, Tokenizer, continuation_text
from prefed.data.record import Record

_UNLIMITED = 1 << 31
_Ids: TypeAlias = Sequence[list[int]]
"""The ids of a prompt and of its two continuations."""


class Piece(StrictModel):
    """A special token, or consecutive tokens of text.

    Attributes:
        text: the decoded tokens; empty at a cut.
        special: a special token, not text that looks like one.
        scored: these tokens count in the loss.
        cut: number of tokens that were truncated here.
    """

    text: str = ""
    special: bool = False
    scored: bool = False
    cut: int = 0


class Part(StrictModel):
    """The prompt or a response of a shown pair: its token ids, and the same tokens as text."""

    name: str
    ids: tuple[int, ...]
    pieces: tuple[Piece, ...]


class ShownPair(StrictModel):
    """A pair, a thumb or a selector question.

    Attributes:
        source: path of the file, or hub name with the split.
        row: number of the row in the source; the line number in a text file.
        form: how the prompt was rendered, and what is unusual about it.
        parts: the prompt, and what continues it.
    """

    source: str
    row: int
    form: str
    parts: tuple[Part, ...]


class ShownClient(StrictModel):
    """The first training pairs of a client, of which it has ``train``."""

    id: str
    train: int
    pairs: tuple[ShownPair, ...]


class _Shown(NamedTuple):
    """The ids of a part, those before it, those without a limit of length, and how many last ones count."""

    name: str
    ids: list[int]
    before: list[int]
    whole: list[int]
    scored: int


def first_pairs(
    dataset: FederatedDataset,
    count: int,
    config: DataConfig,
    tokenizer: Tokenizer,
    selector: SelectorConfig | None = None,
    *,
    rejected: bool = True,
) -> list[ShownClient]:
    """Return the first ``count`` training pairs of each client, as they are trained on.

    Token ids are read from the dataset. Only the number of truncated tokens is computed, by encoding the
    record without a limit of length.

    Args:
        selector: as for :func:`~prefed.data.build_dataset`.
        rejected: the loss reads rejected responses.
    """
    unlimited = make_encoder(config.model_copy(update={"max_length": _UNLIMITED}), tokenizer, selector)
    template, tokens = Template.of(tokenizer, config), dataset.tokens
    special = {
        *getattr(tokenizer, "all_special_ids", ()),
        *(n for n, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special),
    }
    clients = []
    for client in dataset.clients.values():
        shown = []
        for row in client.train[:count]:
            pair, record = [ids.tolist() for ids in tokens.pair(row)], tokens.record(row)
            (whole,) = unlimited.encode([record])
            branches = [whole.prompt, *whole.branches] if isinstance(whole, Encoded) else pair
            found = (
                _question(pair, branches, tokens.letters, bool(tokens.orientations[row]))
                if tokens.letters is not None
                else _responses(pair, branches, record, rejected)
            )
            parts = tuple(
                Part(name=p.name, ids=tuple(p.ids), pieces=tuple(_pieces(tokenizer, special, p)))
                for p in found
            )
            source, number = tokens.files[tokens.sources[row]], int(tokens.rows[row])
            form = "selector question" if tokens.letters else _form(record, template, config)
            notes = sorted(whole.notes) if isinstance(whole, Encoded) else []
            form = "; ".join([form, *(NOTES[note] for note in notes)])
            shown.append(ShownPair(source=source, row=number, form=form, parts=parts))
        clients.append(ShownClient(id=client.id, train=len(client.train), pairs=tuple(shown)))
    return clients


def _form(record: Record, template: Template, config: DataConfig) -> str:
    if config.score == "whole":
        return "whole texts"
    if isinstance(template.formed(record.prompt), str):
        return "rendered text" if config.template == "rendered" else "plain text, unchanged"
    if template.chat:
        return "chat template"
    return "dialogue form" if config.template == "auto" else f"{config.template} form"


def _responses(pair: _Ids, whole: _Ids, record: Record, rejected: bool) -> list[_Shown]:
    prompt, chosen, other = pair
    parts = [_Shown("prompt", prompt, [], whole[0], 0)]
    if record.label is not None:
        name = f"thumb {'up' if record.label else 'down'}"
        return [*parts, _Shown(name, chosen, prompt, whole[1] or whole[2], len(chosen))]
    return [
        *parts,
        _Shown("chosen", chosen, prompt, whole[1], len(chosen)),
        _Shown("rejected", other, prompt, whole[2], len(other) * rejected),
    ]


def _question(pair: _Ids, whole: _Ids, letters: tuple[int, int], first: bool) -> list[_Shown]:
    """Return the two orders of a question, each with the letter of the chosen response.

    Args:
        first: the chosen response is alphabetically first, as the stored letters assume.
    """
    parts = [_Shown("prompt", pair[0], [], whole[0], 0)]
    for k, letter in enumerate(letters if first else letters[::-1], 1):
        shown, full = ([*ids[k][:-1], letter] for ids in (pair, whole))
        parts.append(_Shown(f"order {k}", shown, pair[0], full, 1))
    return parts


def _pieces(tokenizer: Any, special: set[int], part: _Shown) -> list[Piece]:
    """Decode the ids of a part: each special token, and runs of other tokens that count alike."""
    ids, count = part.ids, len(part.ids)
    cut, both = len(part.whole) - count, zip(part.ids, part.whole, strict=False)
    place = next((k for k, (own, full) in enumerate(both) if own != full), count)
    keys = [
        (k >= place, k if token in special else -1, k >= count - part.scored) for k, token in enumerate(ids)
    ]
    pieces, before = list[Piece](), list(part.before)
    for (after, single, scored), group in groupby(range(count), keys.__getitem__):
        own = [ids[k] for k in group]
        if after and cut > 0:
            pieces.append(Piece(cut=cut))
            cut = 0
        one = single >= 0
        text = str(tokenizer.decode(own)) if one else continuation_text(tokenizer, before, own)
        pieces.append(Piece(text=text, special=one, scored=scored))
        before += own
    return [*pieces, Piece(cut=cut)] if cut > 0 else pieces
