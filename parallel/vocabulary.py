"""The two layers that are split along the vocabulary: the embedding and the output head."""

import torch
import torch.nn.functional as F
from torch import nn

from moe_int8.parallel.groups import Group
from moe_int8.parallel.linear import EVERYTHING, WeightSource, expect_shape


class VocabularyParallel(nn.Module):
    """A weight [vocab_size, hidden_size] split along the vocabulary into equal parts; the last may be padded."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, group: Group) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.group = group
        self.part = -(-vocab_size // group.size)
        self.start = min(group.rank * self.part, vocab_size)
        self.stop = min(self.start + self.part, vocab_size)
        self.weight = nn.Parameter(torch.empty(self.part, hidden_size, dtype=dtype), requires_grad=False)

    def load(self, source: WeightSource) -> None:
        """Fill this rank's rows; padding rows are zero."""
        expect_shape(source, (self.vocab_size, self.weight.shape[1]))
        own = self.stop - self.start
        if own:
            rows = source.read_float(slice(self.start, self.stop), EVERYTHING, self.weight.dtype)
            self.weight.data[:own].copy_(rows)
        self.weight.data[own:].zero_()


class VocabularyParallelEmbedding(VocabularyParallel):
    """Token ids to rows of the weight."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden_size], a partial sum: zero for tokens that another rank holds."""
        local = token_ids - self.start
        own = (local >= 0) & (local < self.stop - self.start)
        return F.embedding(local.where(own, 0), self.weight).where(own[:, None], 0)


class VocabularyParallelHead(VocabularyParallel):
    """Hidden states to logits."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> fp32 logits [T, vocab_size] on every rank; padding is cut off, so it cannot win."""
        logits = self.group.all_gather(F.linear(hidden, self.weight))
        return logits[:, : self.vocab_size].float()
