"""Settings of the learning-rate schedule."""

from typing import Annotated

from pydantic import Field

from sweep.config.settings import Settings, Share, one_of


class ScheduleSettings(Settings):
    """Linear warmup, then cosine decay or a constant rate; or the user's function of the step."""

    # after the warmup; or your module:function
    name: Annotated[str, one_of("cosine", "constant")] = "cosine"
    # warmup as a share of the steps, of which it takes at most a tenth
    warmup_fraction: Annotated[float, Field(ge=0, le=0.1, strict=True)] = 0.01
    # least warmup at a fixed rate, up to a tenth of the steps
    warmup_min_steps: Annotated[int, Field(ge=0, strict=True)] = 0
    final_fraction: Share = 0.1  # last rate of the cosine as a share of the peak
    # width of the weights' average, as a share of the steps so far; 0: none. With a target: 0.1
    average: Annotated[float, Field(ge=0, le=0.25, strict=True)] = 0.0
