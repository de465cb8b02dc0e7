"""How far two forms of one model are apart: their logits for the same tokens, compared position by position."""

from dataclasses import dataclass

import torch


@dataclass
class Agreement:
    """Sums over the positions compared so far.

    Attributes:
        positions: how many.
        same_top1: at how many both have the same most likely token.
        kl_sum: sum of KL(reference || candidate), in nats.
        largest_difference: of any logit.
    """

    positions: int = 0
    same_top1: int = 0
    kl_sum: float = 0.0
    largest_difference: float = 0.0

    def add(self, reference: torch.Tensor, candidate: torch.Tensor) -> None:
        """Take the logits of both, fp32 [T, V].

        A candidate that is not finite counts as infinitely far.
        """
        log_p, log_q = reference.log_softmax(dim=-1), candidate.log_softmax(dim=-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
        broken = ~candidate.isfinite().all(dim=-1)
        same = (reference.argmax(dim=-1) == candidate.argmax(dim=-1)) & ~broken
        self.positions += len(reference)
        self.same_top1 += int(same.sum())
        self.kl_sum += float(kl.where(~broken, torch.inf).sum())
        largest = float((reference - candidate).abs().nan_to_num(torch.inf).max())
        self.largest_difference = max(self.largest_difference, largest)

    @property
    def top1(self) -> float:
        """Share of positions with the same most likely token."""
        return self.same_top1 / self.positions

    @property
    def kl(self) -> float:
        """Mean KL(reference || candidate), in nats."""
        return self.kl_sum / self.positions
