"""Settings for sampling tokens."""

from pydantic import Field

from prefed.core.strict_settings import StrictModel


class Sampling(StrictModel):
    """How a response is sampled."""

    max_tokens: int = Field(128, ge=1, description="maximum number of tokens in a response")
    temperature: float = Field(0.7, ge=0, description="temperature; 0 always takes the most probable token")
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the most probable tokens with this total probability"
    )
    top_k: int = Field(0, ge=0, description="sample from this many most probable tokens; 0: all")
