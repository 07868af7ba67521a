"""Settings for sampling tokens."""

from pydantic import Field

from prefed.core.strict_settings import StrictModel


class Sampling(StrictModel):
    """Settings for sampling tokens.

    Attributes:
        max_tokens: maximum number of tokens in a response, without its end-of-text token.
        temperature: sampling temperature; 0 always takes the most probable token.
        top_p: sample from the most probable tokens with this total probability.
        top_k: sample from this many most probable tokens; 0: all.
    """

    max_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.7, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
