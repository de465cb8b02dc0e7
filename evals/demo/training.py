"""Training of the demo model: AdamW, and a router that is balanced by its bias instead of a loss."""

import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm
from transformers import DeepseekV3ForCausalLM

from moe_int8.evals.demo.corpus import Corpus
from moe_int8.evals.demo.model import moe_layers
from moe_int8.evals.mmlu import CHOICES

WARM_UP = 200  # updates
BIAS_STEP = 1e-3  # of e_score_correction_bias in one update; DeepSeek-V3's technical report, 4.2
SHORT_SHARE = 0.65  # of the training
LETTER_WEIGHT = 8.0  # in the loss: the answer is one of some seventy tokens of a four-choice question
DOCUMENTS_AT_A_TIME = 256
REPORT_EVERY = 20  # updates


@dataclass(frozen=True)
class Plan:
    """How long and how fast.

    Attributes:
        minutes: time limit, over which the learning rate falls to 0; None if `updates` is the limit.
        updates: number of updates; None if `minutes` is the limit.
        batch_tokens: tokens in an update.
        rows: tokens in a row while the model learns what to do, and then, with room for five examples in front of a
            question. Attention is cheap in short rows.
        workers: processes that write the training text.
    """

    minutes: float | None
    updates: int | None
    batch_tokens: int
    rows: tuple[int, int]
    learning_rate: float
    seed: int
    workers: int

    @property
    def warm_up(self) -> int:
        """Updates until the learning rate is at its height."""
        return WARM_UP if self.updates is None else max(min(WARM_UP, self.updates // 5), 1)

    def progress(self, update: int, seconds: float) -> float:
        """How much of the training is done, 1 at its end."""
        return update / self.updates if self.updates is not None else seconds / (60 * (self.minutes or 0))


@dataclass
class History:
    """What happened.

    Attributes:
        losses: (update, mean loss since the last entry; its letters weigh more), every REPORT_EVERY updates.
        usage: for each MoE layer the share of every expert in the choices of the last updates; 1 / E is even.
    """

    losses: list[tuple[int, float]] = field(default_factory=list)
    usage: list[list[float]] = field(default_factory=list)
    updates: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def note(self, loss_sum: float, usage: list[list[float]]) -> None:
        """Add an entry: the losses' sum since the last one, and how the experts were used meanwhile."""
        mean = loss_sum / (self.updates - (self.losses[-1][0] if self.losses else 0))
        if not math.isfinite(mean):
            raise FloatingPointError(f"the loss is {mean} after {self.updates} updates; lower --lr")
        self.losses.append((self.updates, mean))
        self.usage = usage


class Rows(IterableDataset):
    """Batches of token ids, int64 [batch_tokens / length, length], cut out of one document after the other."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, plan: Plan, length: int) -> None:
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.plan = plan
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        if info is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the threads; it would warn of the fork
        rng = random.Random(f"training {self.plan.seed} {self.length} {info.id if info else 0}")
        documents = self.corpus.training(rng, few_shot=self.length == self.plan.rows[1])
        size = self.plan.batch_tokens
        ids: list[int] = []
        while True:
            while len(ids) < size:
                texts = [next(documents) for _ in range(DOCUMENTS_AT_A_TIME)]
                for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                    ids += encoding.ids
            yield torch.tensor(ids[:size]).view(-1, self.length)
            ids = ids[size:]


def train(model: DeepseekV3ForCausalLM, corpus: Corpus, tokenizer: Tokenizer, plan: Plan) -> History:
    """Train `model` in place, under a progress bar.

    Raises:
        FloatingPointError: the loss is not a number.
    """
    device = model.device
    balance = Balance(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda"
    )
    loaders = {
        length: iter(DataLoader(Rows(corpus, tokenizer, plan, length), batch_size=None, num_workers=plan.workers))
        for length in plan.rows
    }
    weight = token_weights(tokenizer).to(device)
    history = History()
    loss_sum = torch.zeros((), device=device)
    start = time.perf_counter()
    with tqdm(desc="train", unit=" tokens", unit_scale=True, mininterval=1) as bar:
        while (done := plan.progress(history.updates, time.perf_counter() - start)) < 1:
            rate = (1 - done) * min(1.0, (history.updates + 1) / plan.warm_up)
            for group in optimizer.param_groups:
                group["lr"] = plan.learning_rate * rate
            rows = next(loaders[plan.rows[done >= SHORT_SHARE]]).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(input_ids=rows, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten(), weight=weight)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            balance.step()
            loss_sum += loss.detach()
            history.updates += 1
            history.tokens += rows.numel()
            bar.update(rows.numel())
            if history.updates % REPORT_EVERY == 0:
                history.note(loss_sum.item(), balance.usage())
                loss_sum.zero_()
                bar.set_postfix_str(f"{done:.0%}, loss {history.losses[-1][1]:.3f}")
    if history.updates % REPORT_EVERY:
        history.note(loss_sum.item(), balance.usage())
    history.seconds = time.perf_counter() - start
    return history


def token_weights(tokenizer: Tokenizer) -> torch.Tensor:
    """What each token counts for in the loss, fp32 [V]."""
    weight = torch.ones(tokenizer.get_vocab_size())
    weight[[tokenizer.encode(choice, add_special_tokens=False).ids[0] for choice in CHOICES]] = LETTER_WEIGHT
    return weight


class Balance:
    """Keeps the experts of each layer evenly used: one that had more than its share gets a lower bias, one that had
    less a higher one. The bias steers which experts are chosen and does not enter their weights."""

    def __init__(self, model: DeepseekV3ForCausalLM) -> None:
        self.layers = moe_layers(model)
        self.total = [torch.zeros_like(layer.experts.load) for layer in self.layers]

    def step(self) -> None:
        """Move the biases after an update."""
        for layer, total in zip(self.layers, self.total, strict=True):
            load = layer.experts.load
            layer.gate.e_score_correction_bias += BIAS_STEP * torch.sign(load.mean() - load)
            total += load
            load.zero_()

    def usage(self) -> list[list[float]]:
        """For each layer the share of each expert in all choices since the last call."""
        shares = [(total / total.sum()).tolist() for total in self.total]
        for total in self.total:
            total.zero_()
        return shares
