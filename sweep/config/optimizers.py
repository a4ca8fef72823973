"""Settings of optimizers, and what the policies do for each."""

from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import Field, JsonValue

from sweep.config.settings import Settings, one_of
from sweep.resources import read_toml

OptimizerName = Annotated[str, one_of("adamw", "sgd", "muon", "adafactor", "none")]
OPTIMIZER_FACTS: dict[str, dict[str, Any]] = read_toml(__file__, "optimizers.toml")


def optimizer_facts(name: str) -> dict[str, Any]:
    return OPTIMIZER_FACTS.get(name, OPTIMIZER_FACTS["user"])


class OptimizerSettings(Settings):
    """An optimizer of torch, or the user's; weight decay applies to matrices only."""

    # adamw, sgd, muon, adafactor, your module:object, or none: only forward and backward
    name: OptimizerName = "adamw"
    beta1: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.9  # decay of the first moment
    beta2: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.999  # decay of the second moment
    eps: Annotated[float, Field(gt=0, strict=True)] = 1e-8  # added to the denominator
    weight_decay: Annotated[float, Field(ge=0, strict=True)] = 0.1  # decoupled, times the rate
    clip: Annotated[float, Field(ge=0, strict=True)] = 1.0  # global gradient norm; 0: no clipping
    # further arguments, by the name of the optimizer
    options: dict[OptimizerName, dict[str, JsonValue]] = Field(default={})

    def with_options_of(self, names: Iterable[str]) -> Self:
        """Add the options that these optimizers have unless the experiment sets them."""
        options = dict(self.options)
        for name in names:
            merged = {**optimizer_facts(name)["options"], **options.get(name, {})}
            if merged:
                options[name] = merged
        return self.model_copy(update={"options": options})

    def of(self, name: str | None) -> Self:
        """Return the settings of one of a sweep's optimizers, by default this one."""
        name = name or self.name
        options = {name: self.options[name]} if self.options.get(name) else {}
        return self.model_copy(update={"name": name, "options": options})
