"""Causal language models of the transformers library, with random weights from a seed."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sweep.config.models import HuggingFaceSettings
from sweep.errors import SweepError
from sweep.usercode.objects import require_extra

SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
# transformers warns if an id is outside of the vocabulary, and nothing here reads them.
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id"))
# On meta tensors, transformers cannot check for packed sequences. It assumes them and builds a
# causal mask that real steps do not need.
WITHOUT_MASK = "sdpa_without_mask"


class HuggingFace(nn.Module):
    """Map token ids (B, T) to logits (B, T, V), without dropout, so the seed decides everything."""

    def __init__(self, settings: HuggingFaceSettings, seed: int, recomputes: bool = False) -> None:
        super().__init__()
        require_extra("transformers", "hf", f"model {settings.name!r}")
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        try:
            sizes = {**settings.sizes, **NO_TOKENS, "vocab_size": settings.vocabulary}
            config = AutoConfig.for_model(settings.architecture, **sizes)
        except ValueError as error:
            raise SweepError(
                f"model {settings.name!r} must have an architecture and sizes that transformers "
                f"knows, got {settings.architecture!r} ({' '.join(str(error).split())[:200]})."
            ) from error
        for name, value in list(vars(config).items()):  # names differ between architectures
            if "drop" in name and isinstance(value, int | float):
                setattr(config, name, type(value)(0))
        config.use_cache = False
        attention = "sdpa"
        if torch.get_default_device().type == "meta":
            attention = WITHOUT_MASK
            AttentionInterface.register(attention, sdpa_attention_forward)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            build: Any = AutoModelForCausalLM.from_config
            self.model = build(config, attn_implementation=attention)
        self.model.get_input_embeddings().padding_idx = None  # no token is padding
        output = self.model.get_output_embeddings()
        if output.bias is not None or any(getattr(config, name, None) for name in SCALED_LOGITS):
            raise SweepError(
                f"model {settings.name!r} must compute logits as states times a matrix, got logits "
                "with a bias or a scale. Use it as your own module:object."
            )
        if recomputes:
            enable = getattr(self.model, "activation_checkpointing_enable", None)
            if enable is None:  # an older version of transformers
                enable = self.model.gradient_checkpointing_enable
            enable({"use_reentrant": False})

    def load(self, folder: Path) -> None:
        """Load pretrained weights from safetensors; the class is ours, so no remote code runs."""
        from transformers import logging

        disable_progress_bar: Any = logging.disable_progress_bar
        disable_progress_bar()
        options: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True}
        load: Any = type(self.model).from_pretrained
        pretrained, report = load(folder, **options, output_loading_info=True)
        missing = sorted(report["missing_keys"])
        if missing:  # otherwise they would be random
            raise ValueError(f"{', '.join(missing)} is missing")
        self.model.load_state_dict(pretrained.state_dict())

    def add_adapters(self, rank: int, seed: int) -> None:
        """Freeze the weights and add LoRA adapters, which alone belong to the state dict."""
        require_extra("peft", "peft", "lora")
        from peft import LoraConfig, inject_adapter_in_model
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS
        from transformers.pytorch_utils import Conv1D

        targets = DEFAULTS.get(self.model.config.model_type, "all-linear")
        is_transposed = any(isinstance(module, Conv1D) for module in self.modules())
        sizes = {"r": rank, "lora_alpha": 2 * rank, "fan_in_fan_out": is_transposed}
        config = LoraConfig(target_modules=targets, lora_dropout=0.0, **sizes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, self.model)
        weights = self.named_parameters(remove_duplicate=False)
        frozen = {name for name, weight in weights if not weight.requires_grad}

        def drop_frozen(module: nn.Module, tensors: dict[str, Tensor], *_: Any) -> None:
            for name in frozen & tensors.keys():
                del tensors[name]

        self.register_state_dict_post_hook(drop_frozen)  # type: ignore[no-untyped-call]

    def hidden(self, ids: Tensor) -> Tensor:
        return self.model.base_model(ids).last_hidden_state  # type: ignore[no-any-return]

    def extend(self, ids: Tensor, past: Any) -> tuple[Tensor, Any]:
        output = self.model.base_model(ids, past_key_values=past, use_cache=True)
        return output.last_hidden_state, output.past_key_values

    def output_weight(self) -> Tensor:
        return self.model.get_output_embeddings().weight  # type: ignore[no-any-return]

    def stacked_weights(self) -> list[tuple[Tensor, list[int], int]]:
        """Return the weights of GPT-2 that stack projections, along their columns.

        transformers does not declare which weights of its other models do, or in which order: some
        alternate query, key and value by head.
        """
        config = self.model.config
        if config.model_type != "gpt2":
            return []
        modules = self.model.named_modules()
        weights = [module.weight for name, module in modules if name.endswith(".attn.c_attn")]
        return [(weight, [config.n_embd] * 3, 1) for weight in weights]

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).logits  # type: ignore[no-any-return]
