"""What is asked of a quantize run, as it was asked: what is None is settled later, to suit the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qinfer.calibrate.data import DEFAULT_SEED, Document, check_source
from qinfer.calibrate.kv_scales import check_kind
from qinfer.errors import check_counts, check_flags, check_seed


@dataclass(frozen=True)
class Settings:
    """A preset or scheme, how to find its scales, the text to look at, and where to work.

    Raises UserError for a value that can never be; what does not go with a model or with another setting is
    for `settle` and `prepare_job` to say.
    """

    scheme: str = "int8"
    method: str | None = None  # None: the scheme's usual
    group_size: int | None = None
    symmetric: bool | None = None
    ranges: str | None = None  # None: the method's usual
    kv_scales: str | None = None  # one of kv_scales.KV_SCALES
    rotate: bool = False  # merge rotations into the weights first
    calibration: str | Iterable[Document] | None = None  # None: reference text and self-written
    num_samples: int | None = None
    max_seq_len: int | None = None  # tokens
    seed: int = DEFAULT_SEED
    device: str | None = None  # "auto" (or None: a GPU where there is one), "cpu", "cuda" or "cuda:N"

    def __post_init__(self) -> None:
        check_flags(rotate=self.rotate, symmetric=self.symmetric or False)
        check_counts(group_size=self.group_size, num_samples=self.num_samples, max_seq_len=self.max_seq_len)
        check_seed(self.seed)
        check_kind(self.kv_scales)
        check_source(self.calibration)
