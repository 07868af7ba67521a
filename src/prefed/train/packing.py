"""Preference pairs laid end to end: no padding, and one prompt for both of its responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from prefed.data import Pair


@dataclass(frozen=True)
class Segment:
    """One pair's stretch of the packed sequence: ``prompt`` tokens, then both responses' inputs."""

    prompt: int
    chosen: int
    rejected: int

    @property
    def length(self) -> int:
        """Tokens of the stretch."""
        return self.prompt + self.chosen + self.rejected

    @property
    def ends(self) -> tuple[int, int]:
        """Within the stretch, the last position of either response."""
        return self.prompt + self.chosen - 1, self.length - 1


@dataclass
class Packing:
    """A batch of B pairs as one sequence of T tokens.

    A pair occupies ``prompt, chosen[:-1], rejected[:-1]``. The last token of a response predicts nothing, so
    it is only a target. With ``whole`` the last tokens are there too, because the reward head reads every
    hidden state. With ``ends`` the last token of a response is its only target: a selector's pair is a prompt
    with two branches, and each branch ends with a letter. Positions restart at the prompt's length for the
    second response, and attention lets neither response see the other.

    Attributes:
        ids: ``[1, T]``.
        positions: ``[1, T]``.
        segments: one per pair, in order.
        rows: ``[K]`` positions in the sequence whose final hidden state is needed: the positions that predict
            a completion token, or with ``whole`` all positions.
        pick: ``[M]`` indices into ``rows``, one per completion token (a prompt's last row serves both).
        targets: ``[M]`` the token each predicts.
        response: ``[M]`` 2 · pair for a token of the chosen response, 2 · pair + 1 for one of the rejected.
        counts: number of ``rows`` of each pair.
        whole: every token is a row.
        ends: the rows are the last positions of both responses, two of each pair.
        hidden: the last block's output at ``rows``, while a forward pass hands it over.

    >>> pair = Pair(*(np.array(ids, np.int32) for ids in ([5, 6], [7, 0], [8, 9, 0])))
    >>> p = Packing.of([pair])
    >>> p.ids.tolist(), p.positions.tolist()
    ([[5, 6, 7, 8, 9]], [[0, 1, 2, 2, 3]])
    >>> p.rows.tolist(), p.pick.tolist(), p.targets.tolist()
    ([1, 2, 3, 4], [0, 1, 0, 2, 3], [7, 0, 8, 9, 0])
    """

    ids: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]
    rows: torch.Tensor
    pick: torch.Tensor
    targets: torch.Tensor
    response: torch.Tensor
    counts: tuple[int, ...]
    whole: bool = False
    ends: bool = False
    hidden: torch.Tensor | None = None
    _masks: dict[tuple[Segment | tuple[int, int], torch.dtype], torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def of(
        pairs: Sequence[Pair],
        *,
        rejected: bool = True,
        whole: bool = False,
        ends: bool = False,
        device: torch.device | str = "cpu",
    ) -> Packing:
        """Pack ``pairs``; with ``rejected=False`` only the chosen responses.

        Raises:
            ValueError: with ``ends``, a response is nothing but its target.
        """
        ids, positions, segments, counts = [], [], [], []
        rows, pick, targets, response = [], [], [], []
        start = known = 0
        last = 0 if whole else 1
        for number, pair in enumerate(pairs):
            prompt, chosen = pair.prompt, pair.chosen
            other = pair.rejected if rejected else pair.chosen[:last]
            p, c, r = len(prompt), len(chosen) - last, max(len(other) - last, 0)
            ids += [prompt, chosen[:c], other[:r]]
            positions += [np.arange(p + c), np.arange(p, p + r)]
            segments.append(Segment(p, c, r))
            if ends:
                if not min(c, r):
                    raise ValueError(
                        f"pair {number} of the batch has a branch without a token before its letter"
                    )
                rows.append(start + np.array(segments[-1].ends))
                pick.append(known + np.arange(2))
                targets.append(np.array([chosen[-1], other[-1]]))
                response.append(2 * number + np.arange(2))
                start += p + c + r
                known += 2
                counts.append(2)
                continue
            skipped = 0 if whole else p - 1
            count = p + c + r - skipped
            rows.append(np.arange(start + skipped, start + p + c + r))
            first = known + p - 1 - skipped
            pick.append(np.arange(first, first + len(chosen)))
            targets.append(chosen)
            response.append(np.full(len(chosen), 2 * number))
            if rejected:
                pick += [np.array([first]), np.arange(first + c + 1, first + c + len(other))]
                targets.append(other)
                response.append(np.full(len(other), 2 * number + 1))
            start += p + c + r
            known += count
            counts.append(count)

        def tensor(parts: list[npt.NDArray[np.int64]] | list[npt.NDArray[np.int32]]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

        return Packing(
            tensor(ids)[None],
            tensor(positions)[None],
            tuple(segments),
            tensor(rows),
            tensor(pick),
            tensor(targets),
            tensor(response),
            tuple(counts),
            whole,
            ends,
        )

    def pooling(self, completion: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """For a mean over tokens: ``[Q]`` rows, and ``[Q]`` the response that each belongs to.

        Responses are numbered as in :attr:`response`. A prompt's tokens count for both of its responses, or
        with ``completion`` for none. Needs ``whole``.
        """
        rows, responses = [], []
        start = 0
        for number, segment in enumerate(self.segments):
            p, c, r = segment.prompt, segment.chosen, segment.rejected
            prompt = np.arange(start, start if completion else start + p)
            chosen = np.arange(start + p, start + p + c)
            other = np.arange(start + p + c, start + p + c + r)
            rows += [prompt, chosen, prompt, other]
            responses += [np.full(len(prompt) + c, 2 * number), np.full(len(prompt) + r, 2 * number + 1)]
            start += segment.length
        device = self.ids.device
        return (
            torch.from_numpy(np.concatenate(rows)).to(device),
            torch.from_numpy(np.concatenate(responses)).to(device),
        )

    def mask(self, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
        """Additive attention mask ``[L, L]`` of a pair: 0 where a token may attend, else −inf."""
        if (segment, dtype) not in self._masks:
            shape, device = (segment.length, segment.length), self.ids.device
            mask = torch.full(shape, -torch.inf, dtype=dtype, device=device).triu_(1)
            response = segment.prompt + segment.chosen
            mask[response:, segment.prompt : response] = -torch.inf
            self._masks[segment, dtype] = mask
        return self._masks[segment, dtype]

    def causal(self, prompt: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask ``[count, prompt + count]`` of a response's rows.

        They attend to the whole prompt, and causally to their own response.
        """
        key = (prompt, count), dtype
        if key not in self._masks:
            shape, device = (count, prompt + count), self.ids.device
            self._masks[key] = torch.full(shape, -torch.inf, dtype=dtype, device=device).triu_(prompt + 1)
        return self._masks[key]

    def ends_mask(self, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask ``[2, L]`` of the last positions of a pair's two branches."""
        mask = torch.zeros(2, segment.length, dtype=dtype, device=self.ids.device)
        response = segment.prompt + segment.chosen
        mask[0, response:] = -torch.inf
        mask[1, segment.prompt : response] = -torch.inf
        return mask
