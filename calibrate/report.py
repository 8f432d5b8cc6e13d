"""What a quantize run did, layer by layer: for the person who waits and for the file beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

FILE_NAME = "qinfer_report.json"


@dataclass(frozen=True)
class LayerReport:
    """One layer. Errors are relative, ||quantized - dense|| / ||dense||."""

    index: int
    seconds: float
    weight_errors: dict[str, float]  # by module, after scaling
    output_errors: dict[str, float] = field(default_factory=dict)  # by group, on calibration inputs
    input_absmax: dict[str, float] = field(default_factory=dict)  # by group
    outliers: dict[str, float] = field(default_factory=dict)  # by group: largest channel over the median's
    scales: list[dict[str, Any]] = field(default_factory=list)  # mapping, setting, loss, unscaled_loss
    # by module: error of searched ranges as a share of the full ranges'
    clipping: dict[str, float] = field(default_factory=dict)
    clipped: dict[str, float] = field(default_factory=dict)  # by module: share of weights beyond their range
    input_clipped: dict[str, float] = field(default_factory=dict)  # by group: inputs beyond a static range
    range_used: dict[str, float] = field(default_factory=dict)  # by group: what 0.9999 of inputs need of it
    groups: dict[str, list[str]] = field(default_factory=dict)  # group -> its modules
    kv_absmax: dict[str, list[float]] = field(default_factory=dict)  # "k" and "v", by key head
    notes: dict[str, str] = field(default_factory=dict)  # by group, where something was not as usual


@dataclass(frozen=True)
class QuantizeReport:
    """The whole run; `to_dict` is what lies in qinfer_report.json."""

    scheme: str  # label, "w4a16 g64 asym"
    method: str
    ranges: str
    notes: tuple[str, ...]
    calibration: dict[str, Any] | None  # source, seed, number of tokens, hash; None where no text was needed
    propagated: str  # what a layer was calibrated on
    seconds: float  # of this run alone
    layers: tuple[LayerReport, ...]
    resumed: int = 0  # layers that an earlier run had finished, whose seconds are not counted
    bytes_before: int = 0  # of the weights in the files
    bytes_after: int = 0
    average_bits: float = 0.0  # per weight of the linears, scales and zero points counted
    mix: dict[str, str] = field(default_factory=dict)  # "layer 3 down" -> label of its own scheme
    sensitivity: dict[str, float] = field(default_factory=dict)  # KL in nats of each unit quantized alone
    kv_scales: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # model, its weights, versions, seed
    health: tuple[str, ...] = ()  # what was checked before the files appeared

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> QuantizeReport:
        """The report that `to_dict` wrote; TypeError or KeyError for anything else."""
        layers = tuple(LayerReport(**layer) for layer in raw["layers"])
        return cls(**{**raw, "notes": tuple(raw["notes"]), "health": tuple(raw["health"]), "layers": layers})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        """The report file's text."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def to_pace(self) -> str:
        """How many layers this run made, and in what time."""
        made = f"{len(self.layers) - self.resumed} layers in {self.seconds:.1f} s"
        return f"{made}, {self.resumed} finished before" if self.resumed else made

    def to_text(self) -> str:
        """Three lines for a terminal: what was done, on what, and how well."""
        lines = [f"{self.scheme} by {self.method}: {self.to_pace()}"]
        if self.mix:
            kinds = ", ".join(sorted(set(self.mix.values())))
            lines.append(f"{len(self.mix)} units in {kinds}: {self.average_bits:.2f} bits per weight in all")
        if self.calibration is not None:
            kinds = ", ".join(f"{n} {kind}" for kind, n in self.calibration["kinds"].items())
            lines.append(
                f"calibrated on {self.calibration['num_tokens']} tokens in "
                f"{self.calibration['num_sequences']} sequences ({kinds}), seed {self.calibration['seed']}"
            )
        weights = [error for layer in self.layers for error in layer.weight_errors.values()]
        line = f"relative error of weights {_mean(weights):.4f}"
        outputs = [error for layer in self.layers for error in layer.output_errors.values()]
        if outputs:
            worst = max(self.layers, key=lambda layer: max(layer.output_errors.values()))
            line += f", of outputs {_mean(outputs):.4f}, worst {max(outputs):.4f} in layer {worst.index}"
        return "\n".join([*lines, line])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
