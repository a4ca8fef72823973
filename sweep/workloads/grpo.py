"""Group relative policy optimization: sample, score, compare within groups, update.

`build_batch` returns only the numbers of completions; `roll_out` turns them, phase by phase, into
the input of the loss. Completion i belongs to prompt i // group_size and draws its own random
numbers, so equal weights sample equal completions at every batch size.
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

from sweep.config.trial import TrialConfig
from sweep.config.workload import FINAL_PROMPTS, GrpoSettings
from sweep.data.tokens import SEPARATOR_ID, TextTokenizer, TokenizedText
from sweep.models import HasCache, HasHidden, autocast
from sweep.models.generation import Sampling, completion_uniforms, extend_equal, generate
from sweep.models.loss import linear_log_probs, widened
from sweep.workloads.grpo_loss import (
    advantages,
    completion_mask,
    denominator,
    surrogate,
    token_weights,
)
from sweep.workloads.inputs import build_initial_model, open_text, open_tokenizer
from sweep.workloads.protocol import Batch, FinalEvaluation, Meter
from sweep.workloads.tasks import (
    Prompt,
    Task,
    build_task,
    check_prompts,
    check_task,
    encode_prompt,
    score,
)

HELD_OUT = 1 << 40  # first number of the completions of evaluations; training does not reach it
ALL_ROWS = 1 << 30


class Grpo:
    """GRPO on the model and the task of a trial; a sequence is a prompt and its completion."""

    is_rehearsal = False

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        assert config.science.grpo and config.science.model.vocabulary
        assert config.science.evaluation.sequences
        self.config, self.device = config, device
        self.settings: GrpoSettings = config.science.grpo
        self.vocabulary: int = config.science.model.vocabulary
        self.tokens_per_sequence = self.settings.tokens_per_sequence
        self.updates_per_step = self.settings.num_iterations
        self.meter = Meter()
        self.reference: nn.Module | None = None
        self.on_phase: Callable[[str], None] = lambda name: None

    @cached_property
    def text(self) -> TokenizedText | None:
        """The text from which prompts are drawn, or None."""
        return open_text(self.config)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of prompts and completions."""
        return self.text.tokenizer if self.text else open_tokenizer(self.config)

    @cached_property
    def task(self) -> Task:
        """The prompts and their rewards."""
        return build_task(self.settings, self.text, self.config.science.seed)

    def check(self, text: TokenizedText | None) -> None:
        """Check the task, its prompts and its reward; see `sweep.workloads.check_workload`."""
        check_task(self.settings)
        if text is not None:
            self.text = text
        elif self.config.science.data is not None:
            return  # the prompts are checked once the text is prepared
        check_prompts(self.task, self.tokenizer, self.settings.prompt_tokens)

    def build_model(self) -> nn.Module:
        """Build the float32 model on the CPU, from the trial's seed or its start."""
        return build_initial_model(self.config)

    def start(self, model: nn.Module) -> None:
        """Copy the initial weights to the reference, if the divergence has a weight."""
        if not self.settings.kl:
            return
        # Cloned one by one: a deep copy of fake tensors does not preserve shared storages.
        copies: dict[int, Any] = {id(tensor): tensor.clone() for tensor in model.buffers()}
        for weight in model.parameters():
            copies[id(weight)] = nn.Parameter(weight.detach().clone(), requires_grad=False)
        self.reference = copy.deepcopy(model, copies).eval()

    def frozen_bytes(self) -> int:
        """Return the bytes of the reference."""
        return sum(weight.nbytes for weight in self.reference.parameters()) if self.reference else 0

    def build_batch(self, first: int, count: int) -> Batch:
        """Return the numbers of completions, (count,)."""
        return (torch.arange(first, first + count),)

    def random_batch(self, count: int) -> Batch:
        """Return random prompts (count, P) and random numbers (count, N) for a step without data.

        Its completions have the maximum length and no advantages.
        """
        shape = (count, self.settings.prompt_tokens)
        ids = torch.randint(self.vocabulary, shape, device=self.device)
        shape = (count, self.settings.new_tokens)
        return ids, torch.rand(shape, dtype=torch.float64, device=self.device)

    def loss_tokens(self, batch: Batch) -> int | Tensor:
        """Return the divisor of the loss of a whole batch."""
        return denominator(batch[1], self.settings.loss)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed, weighted surrogate of the completions of `roll_out`."""
        ids, mask, advantage, old, reference = batch
        log_probs, entropies = self.log_probs(model, ids)
        losses, metrics = surrogate(
            log_probs,
            old if self.updates_per_step > 1 else None,
            reference if self.settings.kl else None,
            advantage,
            self.settings,
        )
        self.meter.add_means({**metrics, "grpo/entropy": entropies}, mask)
        return (losses * token_weights(mask, self.settings.loss)).sum()

    def log_probs(self, model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the completions, (B, N) each, from (B, P + N).

        They are computed at the sampling temperature. For a model with `hidden`, at most
        `loss_chunk_rows` rows of logits exist at a time.
        """
        execution, precision = self.config.execution, self.config.science.precision
        temperature, targets = self.settings.temperature, ids[:, self.settings.prompt_tokens :]
        with autocast(self.device, precision):
            if not isinstance(model, HasHidden):
                logits = model(ids)[:, self.settings.prompt_tokens - 1 : -1]
                every = torch.log_softmax(widened(logits) / temperature, dim=-1)
                entropies = -(every.detach().exp() * every.detach()).sum(-1)
                return every.gather(-1, targets[..., None]).squeeze(-1), entropies
            hidden = self._states(model, ids).flatten(0, 1)
        states = hidden.to(torch.bfloat16 if precision == "bf16" else hidden.dtype)
        rows, weight = execution.loss_chunk_rows or ALL_ROWS, model.output_weight()
        results = linear_log_probs(states, weight, targets.flatten(), rows, temperature)
        return results[0].view(targets.shape), results[1].view(targets.shape)

    def _states(self, model: HasHidden, ids: Tensor) -> Tensor:
        """Return the states that predict the completions, (B, N, D), from (B, P + N)."""
        length, copies = self.settings.prompt_tokens, self._equal_prompts(len(ids))
        is_shared = copies > 1 and getattr(model, "trains_with_past", True)
        if not is_shared or not isinstance(model, HasCache):
            return model.hidden(ids[:, :-1])[:, length - 1 :]
        last, past = extend_equal(model, ids[:, :length], copies)
        return torch.cat((last, model.extend(ids[:, length:-1], past)[0]), dim=1)

    def _equal_prompts(self, rows: int) -> int:
        """Return how many adjacent completions share a prompt whose states are computed once."""
        size = self.settings.group_size
        if not self.config.execution.shares_prompts or self.settings.new_tokens == 1:
            return 1
        return size if rows % size == 0 else rows if size % rows == 0 else 1

    def roll_out(self, model: nn.Module, batch: Batch, microbatch_size: int) -> Batch:
        """Sample completions, score them, and measure their log-probabilities.

        Args:
            model: the policy.
            batch: from `build_batch` or `random_batch`.
            microbatch_size: completions whose log-probabilities are computed at a time.

        Returns:
            ids (B, P + N), mask (B, N), advantages (B,), and log-probabilities (B, N) of the
            sampling policy and of the reference; zeros if they are not needed.
        """
        settings, is_random = self.settings, len(batch) > 1
        prompts: list[Prompt] = []
        if is_random:
            ids, uniforms = batch
        else:
            numbers = batch[0].numpy()
            groups = numbers // settings.group_size
            drawn = {group: self.task.prompt(int(group), False) for group in np.unique(groups)}
            prompts = [drawn[group] for group in groups]
            ids = self._encode(prompts)
            uniforms = completion_uniforms(self.config.science.seed, numbers, settings.new_tokens)
        with self._phase("generate"):
            end = None if is_random else SEPARATOR_ID
            size = self.config.sampled_at_once(microbatch_size)
            completions = self.generate(model, ids, uniforms, size, in_groups=True, end=end)
        with self._phase("score"):
            gain = torch.zeros(len(ids), device=self.device)
            if not is_random:
                rewards, components = score(self.task, prompts, completions, self.tokenizer)
                self.meter.add_rewards(rewards, components, settings.group_size)
                scores = torch.from_numpy(rewards).float().to(self.device)
                gain = advantages(scores, settings.group_size, settings.scale_rewards)
            mask = completion_mask(completions, SEPARATOR_ID)
            self.meter.add("completion/tokens", mask.sum(), len(mask))
        with self._phase("log_probs"):
            ids = torch.cat((ids, completions), dim=1)
            sampling_policy = model if self.updates_per_step > 1 else None
            old = self._log_probs_without_gradient(sampling_policy, ids, microbatch_size)
            reference = self._log_probs_without_gradient(self.reference, ids, microbatch_size)
        return ids, mask, gain, old, reference

    def generate(
        self,
        model: nn.Module,
        prompts: Tensor,
        uniforms: Tensor,
        size: int,
        *,
        in_groups: bool = False,
        end: int | None = SEPARATOR_ID,
    ) -> Tensor:
        """Sample completions (B, N) of prompts (B, P), `size` at a time.

        If they are `in_groups`, the equal prompts of a group may be read once. With `end` None,
        completions have the maximum length.
        """
        sampling = Sampling(self.settings.temperature, self.settings.top_p, end)
        was_training, parts = model.training, []
        model.eval()
        uniforms = uniforms.to(self.device)
        with autocast(self.device, self.config.science.precision):
            for ids, own in zip(
                torch.split(prompts, size), torch.split(uniforms, size), strict=True
            ):
                copies = self._equal_prompts(len(ids)) if in_groups else 1
                parts.append(
                    generate(
                        model, ids, own, sampling, copies=copies, is_rehearsal=self.is_rehearsal
                    )
                )
        model.train(was_training)
        return torch.cat(parts)

    @torch.no_grad()
    def _log_probs_without_gradient(
        self, model: nn.Module | None, ids: Tensor, size: int
    ) -> Tensor:
        if model is None:
            return torch.zeros(len(ids), self.settings.new_tokens, device=self.device)
        return torch.cat([self.log_probs(model, part)[0] for part in torch.split(ids, size)])

    def _encode(self, prompts: list[Prompt]) -> Tensor:
        length = self.settings.prompt_tokens
        ids = [encode_prompt(prompt, self.tokenizer, length) for prompt in prompts]
        return torch.tensor(ids, device=self.device)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.meter.add(f"perf/{name}_seconds", time.perf_counter() - start, 1)
        self.on_phase(name)

    def evaluate(self, model: nn.Module) -> float:
        """Return minus the mean reward of one completion of each held-out prompt."""
        count = self.config.science.evaluation.sequences
        assert count
        return -float(self._rewards(model, count, is_held_out=True).mean())

    def evaluate_finally(self, model: nn.Module) -> FinalEvaluation:
        """Evaluate more held-out prompts, and the first training prompts."""
        held_out = self._rewards(model, FINAL_PROMPTS, is_held_out=True)
        groups = self.config.science.tokens // self.tokens_per_sequence // self.settings.group_size
        train = self._rewards(model, min(FINAL_PROMPTS, max(1, groups)), is_held_out=False)
        losses = np.stack([-held_out, np.ones(FINAL_PROMPTS)], axis=1)
        return FinalEvaluation(losses, -float(train.mean()), None)

    def epochs(self) -> float | None:
        """Return the trained prompts divided by the prompts of the task; None if endless."""
        if self.task.prompts_in_epoch is None:
            return None
        completions = self.config.science.tokens / self.tokens_per_sequence
        return completions / self.settings.group_size / self.task.prompts_in_epoch

    def _rewards(self, model: nn.Module, count: int, is_held_out: bool) -> NDArray[np.float64]:
        """Return the rewards of one completion of each of the first `count` prompts."""
        size, rewards = self.config.execution.evaluation_batch_size, []
        at_once = min(size, self.config.sampled_at_once(self.config.microbatch_size))
        for first in range(0, count, size):
            numbers = np.arange(first, min(first + size, count))
            prompts = [self.task.prompt(int(number), is_held_out) for number in numbers]
            uniforms = completion_uniforms(0, numbers + HELD_OUT, self.settings.new_tokens)
            completions = self.generate(model, self._encode(prompts), uniforms, at_once)
            rewards.append(score(self.task, prompts, completions, self.tokenizer)[0])
        return np.concatenate(rewards)
