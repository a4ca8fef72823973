"""Group relative policy optimisation: sample, score, compare within groups, update.

A batch is first only the numbers of its completions. `roll_out` makes of it, phase by phase, what
`loss_sum` needs. Completion i belongs to prompt i // group_size and draws random numbers of its
own, so that equal completions are sampled at every batch size from equal weights.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sweep.config.grpo import FINAL_PROMPTS
from sweep.config.trial import TrialConfig
from sweep.data.tokenizer import SEPARATOR_ID, TextTokenizer
from sweep.data.tokens import TokenizedText
from sweep.models import HasCache, HasHidden, build_model
from sweep.models.generation import Sampling, completion_uniforms, extend_equal, generate
from sweep.models.loss import linear_log_probs
from sweep.models.precision import autocast
from sweep.workloads import tasks
from sweep.workloads.grpo_loss import (
    advantages,
    completion_mask,
    denominator,
    surrogate,
    token_weights,
)
from sweep.workloads.meter import Meter, watch_rewards
from sweep.workloads.protocol import Batch, FinalEvaluation
from sweep.workloads.start import load_start
from sweep.workloads.tasks import Prompt, Task

HELD_OUT = 1 << 40  # numbers of completions that no training reaches
ALL_ROWS = 1 << 30


class Grpo:
    """GRPO on the model and task of a trial; a sequence is a prompt and its completion."""

    is_cached = True  # sampling, where the model has a cache
    on_logits: Callable[[Tensor], object] | None = None  # called with each token's logits
    is_rehearsal = False

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        assert config.science.grpo and config.science.model.kind != "quadratic"
        assert config.science.evaluation.sequences
        self.config, self.device = config, device
        self.settings, self.model_settings = config.science.grpo, config.science.model
        self.tokens_per_sequence = self.settings.tokens_per_sequence
        self.updates_per_step = self.settings.num_iterations
        self.needs_old = self.updates_per_step > 1  # else they are the current ones
        self.meter = Meter()
        self.reference: nn.Module | None = None
        self.on_phase: Callable[[str], None] = lambda name: None
        self._rows = config.execution.loss_chunk_rows or ALL_ROWS

    # Text, prompts and rewards.

    @cached_property
    def text(self) -> TokenizedText | None:
        """The text that prompts are drawn from, or None."""
        return tasks.open_text(self.config)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """What prompts and completions are made of: the text's, the start's, or bytes."""
        return self.text.tokenizer if self.text else tasks.open_tokenizer(self.config)

    @cached_property
    def task(self) -> Task:
        """What is asked for."""
        return tasks.build_task(self.settings, self.text, self.config.science.seed)

    def score(
        self, prompts: list[Prompt], completions: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """Return each completion's reward, and its components, from ids (B, N)."""
        return tasks.rewards_of(self.task, prompts, completions, self.tokenizer)

    # The protocol of workloads.

    def build_model(self) -> nn.Module:
        """Build the float32 model on the CPU: of the seed, or of the trial it starts from."""
        science, execution = self.config.science, self.config.execution
        model = build_model(science.model, science.seed, execution.activation_checkpointing)
        is_real = all(weight.device.type != "meta" for weight in model.parameters())
        if self.config.init_path is not None and is_real:
            load_start(model, self.config.init_path, science.start)
        return model

    def start(self, model: nn.Module) -> None:
        """Keep a copy of the weights before any training, where the loss refers to them."""
        if not self.settings.kl:
            return
        # Cloned, because deep copies of fake tensors lose which of them share a storage.
        known: dict[int, Any] = {id(tensor): tensor.clone() for tensor in model.buffers()}
        for weight in model.parameters():
            known[id(weight)] = nn.Parameter(weight.detach().clone(), requires_grad=False)
        self.reference = copy.deepcopy(model, known).eval()

    def frozen_bytes(self) -> int:
        """Return the bytes of the reference."""
        return sum(weight.nbytes for weight in self.reference.parameters()) if self.reference else 0

    def build_batch(self, first: int, count: int) -> Batch:
        """Return the numbers of completions, (count); the rest is rolled out."""
        return (torch.arange(first, first + count),)

    def random_batch(self, count: int) -> Batch:
        """Return what a step of the largest lengths takes, without text or rewards."""
        prompts = (count, self.settings.prompt_tokens)
        drawn = torch.rand(count, self.settings.new_tokens, dtype=torch.float64, device=self.device)
        ids = torch.randint(self.model_settings.vocabulary, prompts, device=self.device)
        return ids, drawn, torch.rand(count, device=self.device)

    def loss_tokens(self, batch: Batch) -> int | Tensor:
        """Return what the loss of this kind is divided by, for a whole batch."""
        return denominator(batch[1], self.settings.loss)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed, weighted surrogate of rolled out completions."""
        ids, mask, advantage, old, reference = batch
        log_probs, entropies = self.log_probs(model, ids)
        earlier = old if self.needs_old else None
        start = reference if self.settings.kl else None
        found = surrogate(log_probs, earlier, start, advantage, self.settings)
        watched = {
            "grpo/ratio": found.ratios,
            "grpo/clip_fraction": found.is_clipped,
            "grpo/entropy": entropies,
            "grpo/kl": found.divergences,
        }
        self.meter.add_means(watched, mask)
        return (found.losses * token_weights(mask, self.settings.loss)).sum()

    def log_probs(self, model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the completions, (B, N) each, from (B, P + N).

        At the temperature that they were sampled at. Of a model that shows its states no more than
        the execution's rows of logits exist at a time.
        """
        first, temperature = self.settings.prompt_tokens - 1, self.settings.temperature
        shape = (len(ids), self.settings.new_tokens)
        targets = ids[:, first + 1 :]
        precision = self.config.science.precision
        with autocast(self.device, precision):
            if not isinstance(model, HasHidden):
                logits = model(ids)[:, first:-1]
                wide = logits if logits.dtype == torch.float64 else logits.float()
                every = torch.log_softmax(wide / temperature, dim=-1)
                entropies = -(every.detach().exp() * every.detach()).sum(-1)
                return every.gather(-1, targets[..., None]).squeeze(-1), entropies
            hidden = self._states(model, ids)
        dtype = torch.bfloat16 if precision == "bf16" else hidden.dtype
        rows = hidden.flatten(0, 1).to(dtype)
        found = linear_log_probs(
            rows, model.output_weight(), targets.flatten(), self._rows, temperature
        )
        return found[0].view(shape), found[1].view(shape)

    def _states(self, model: HasHidden, ids: Tensor) -> Tensor:
        """Return the states that predict completions, (B, N, D), from (B, P + N)."""
        room, copies = self.settings.prompt_tokens, self._equal_prompts(len(ids))
        is_shared = copies > 1 and getattr(model, "trains_with_past", True)
        if not is_shared or not isinstance(model, HasCache):
            return model.hidden(ids[:, :-1])[:, room - 1 :]
        last, past = extend_equal(model, ids[:, :room], copies)
        return torch.cat((last, model.extend(ids[:, room:-1], past)[0]), dim=1)

    def _equal_prompts(self, rows: int) -> int:
        """Return how many side by side, of a part of a batch, share a prompt and its states."""
        size = self.settings.group_size
        if not self.config.execution.shares_prompts or self.settings.new_tokens == 1:
            return 1
        return size if rows % size == 0 else rows if size % rows == 0 else 1

    # The phases of a step.

    def roll_out(self, model: nn.Module, batch: Batch, microbatch_size: int) -> Batch:
        """Return what `loss_sum` needs of completions that the model samples now.

        Args:
            model: the policy.
            batch: numbers of completions, or what `random_batch` returns.
            microbatch_size: completions whose log-probabilities are computed at a time.

        Returns:
            ids (B, P + N), mask (B, N), advantages (B), log-probabilities (B, N) of the policy,
            zeros where nothing needs them, and of the reference.
        """
        at_once = self.config.sampled_at_once(microbatch_size)
        if len(batch) == 1:
            numbers = batch[0].numpy()
            prompts = self._prompts(numbers)
            ids = self._prompt_ids(prompts)
            drawn = completion_uniforms(self.config.science.seed, numbers, self.settings.new_tokens)
            with self._phase("generate"):
                drawn = drawn.to(self.device)
                completions = self.generate(model, ids, drawn, at_once, in_groups=True)
            with self._phase("score"):
                rewards, parts = self.score(prompts, completions.cpu().numpy())
            watch_rewards(self.meter, rewards, parts, self.settings.group_size)
            scores = torch.from_numpy(rewards).float().to(self.device)
            gain = advantages(scores, self.settings.group_size, self.settings.scale_rewards)
            mask = completion_mask(completions, SEPARATOR_ID)
            self.meter.add("completion/tokens", mask.sum(), len(mask))
        else:  # of the largest lengths
            ids, drawn, gain = batch
            with self._phase("generate"):
                completions = self.generate(
                    model, ids, drawn, at_once, in_groups=True, looks_for_end=False
                )
            mask = torch.ones_like(drawn, dtype=torch.float32)
        with self._phase("log_probs"):
            ids = torch.cat((ids, completions), dim=1)
            zeros = torch.zeros_like(mask)
            old = self._log_probs_of(model, ids, microbatch_size) if self.needs_old else zeros
            reference = (
                self._log_probs_of(self.reference, ids, microbatch_size)
                if self.reference is not None
                else zeros
            )
        return ids, mask, gain, old, reference

    def generate(
        self,
        model: nn.Module,
        prompts: Tensor,
        drawn: Tensor,
        at_once: int,
        *,
        in_groups: bool = False,
        looks_for_end: bool = True,
    ) -> Tensor:
        """Sample completions (B, N).

        Args:
            model: the policy.
            prompts: ids, (B, P).
            drawn: random numbers, (B, N).
            at_once: so many.
            in_groups: whether the prompts of a group are equal, and so may be seen once.
            looks_for_end: stop as soon as all have ended.
        """
        sampling = Sampling(self.settings.temperature, self.settings.top_p, SEPARATOR_ID)
        was_training = model.training
        model.eval()
        with autocast(self.device, self.config.science.precision):
            found = [
                generate(
                    model,
                    ids,
                    uniforms,
                    sampling,
                    looks_for_end=looks_for_end,
                    is_cached=self.is_cached,
                    copies=self._equal_prompts(len(ids)) if in_groups else 1,
                    on_logits=self.on_logits,
                    is_rehearsal=self.is_rehearsal and self.on_logits is None,
                )
                for ids, uniforms in zip(
                    torch.split(prompts, at_once), torch.split(drawn, at_once), strict=True
                )
            ]
        model.train(was_training)
        return torch.cat(found)

    @torch.no_grad()
    def _log_probs_of(self, model: nn.Module, ids: Tensor, size: int) -> Tensor:
        return torch.cat([self.log_probs(model, part)[0] for part in torch.split(ids, size)])

    def _prompt_ids(self, prompts: list[Prompt]) -> Tensor:
        room = self.settings.prompt_tokens
        found = [tasks.encode_prompt(prompt, self.tokenizer, room) for prompt in prompts]
        return torch.tensor(found, device=self.device)

    def _prompts(self, numbers: NDArray[np.int64]) -> list[Prompt]:
        groups = numbers // self.settings.group_size
        known = {int(group): self.task.prompt(int(group), False) for group in np.unique(groups)}
        return [known[int(group)] for group in groups]

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.meter.add(f"perf/{name}_seconds", time.perf_counter() - start, 1)
        self.on_phase(name)

    # Evaluation, by rewards: a loss is a mean reward with the sign changed.

    def evaluate(self, model: nn.Module) -> float:
        """Return minus the mean reward of a completion of each of some held-out prompts."""
        count = self.config.science.evaluation.sequences
        assert count
        return -float(self._rewards(model, count, lambda i: self.task.prompt(i, True)).mean())

    def evaluate_finally(self, model: nn.Module) -> FinalEvaluation:
        """Measure more held-out prompts, and the first trained on, one completion each."""
        count = FINAL_PROMPTS
        held_out = self._rewards(model, count, lambda i: self.task.prompt(i, True))
        trained = self.config.science.tokens // self.tokens_per_sequence
        seen = min(count, max(1, trained // self.settings.group_size))
        train = self._rewards(model, seen, lambda i: self.task.prompt(i, False))
        losses = np.stack([-held_out, np.ones(count)], axis=1)
        return FinalEvaluation(losses, -float(train.mean()), None)

    def epochs(self) -> float | None:
        """Return prompts trained on over the prompts that there are."""
        if self.task.prompts_in_epoch is None:
            return None
        completions = self.config.science.tokens / self.tokens_per_sequence
        return completions / self.settings.group_size / self.task.prompts_in_epoch

    def _rewards(
        self, model: nn.Module, count: int, prompt: Callable[[int], Prompt]
    ) -> NDArray[np.float64]:
        """Return the rewards of one completion each of prompts 0 … count − 1."""
        size, found = self.config.execution.evaluation_batch_size, []
        at_once = min(size, self.config.sampled_at_once(self.config.microbatch_size))
        for first in range(0, count, size):
            numbers = np.arange(first, min(first + size, count))
            prompts = [prompt(int(number)) for number in numbers]
            ids = self._prompt_ids(prompts)
            drawn = completion_uniforms(0, numbers + HELD_OUT, self.settings.new_tokens)
            completions = self.generate(model, ids, drawn.to(self.device), at_once)
            found.append(self.score(prompts, completions.cpu().numpy())[0])
        return np.concatenate(found)
